// What a program that links the library statically sees: prints the targets, one a line, in the table's order.
#include <cstdio>
#include <cstring>

#include "oeq.h"

int main() {
  const OeqFfiHandlerTable* table = oeq_ffi_handler_table();
  if (table == nullptr) {
    std::fprintf(stderr, "%s\n", oeq_last_error());
    return 1;
  }
  if (table->abi_version != OEQ_FFI_ABI_VERSION || table->type_count != 1) return 2;
  for (uint32_t i = 0; i < table->handler_count; ++i) {
    const OeqFfiHandler& handler = table->handlers[i];
    if (handler.instantiate == nullptr || handler.initialize == nullptr || handler.execute == nullptr) return 3;
    if (handler.traits != OEQ_FFI_TRAIT_COMMAND_BUFFER_COMPATIBLE) return 4;
    std::printf("%s\n", handler.name);
  }
  // A second look and the older layout are the same handlers.
  const auto* old = static_cast<const OeqFfiHandlerTableV2*>(oeq_ffi_handler_table_for(2));
  if (old == nullptr || old->handlers != table->handlers || oeq_ffi_handler_table() != table) return 5;
  return 0;
}
