// Beside other code: a second Rust library, and symbols of the program's own that are named like targets.
#include <cstdio>
#include <cstring>

#include "oeq.h"

extern "C" int conv_forward() { return 7; }
#ifdef OTHER
extern "C" int other_answer();
#endif
#ifdef OUTSIDE
extern "C" int outside_require();
#endif

int main() {
#ifdef OUTSIDE
  if (outside_require() != 0) return 1;
#endif
  const OeqFfiHandlerTable* table = oeq_ffi_handler_table();
  if (table == nullptr) {
    std::fprintf(stderr, "%s\n", oeq_last_error());
    return 2;
  }
  for (uint32_t i = 0; i < table->handler_count; ++i) std::printf("%s\n", table->handlers[i].name);
#ifdef OTHER
  if (other_answer() != 42) return 3;
#endif
  // Our failures come back through a boundary that catches panics; it works beside the other library's.
  if (oeq_register_ffi(nullptr, "CUDA") != OEQ_INVALID_ARGUMENT) return 4;
  return conv_forward() == 7 ? 0 : 5;
}
