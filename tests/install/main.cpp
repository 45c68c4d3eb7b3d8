// A program that uses the installed library: prints its version and its targets.
#include <oeq.h>

#include <cstdio>

int main() {
  const OeqFfiHandlerTable* table = oeq_ffi_handler_table();
  if (table == nullptr) {
    std::fprintf(stderr, "%s\n", oeq_last_error());
    return 1;
  }
  std::printf("oeq_native %s, %u targets\n", oeq_version(), static_cast<unsigned>(table->handler_count));
  for (uint32_t i = 0; i < table->handler_count; ++i) std::printf("  %s\n", table->handlers[i].name);
  return table->handler_count == 8 ? 0 : 2;
}
