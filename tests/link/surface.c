/* The C surface from C: every failure is a status and a text, outputs are untouched, and the process lives. Prints sizes
 * and offsets of the header's structures for comparison with the library's own. */
#include <stddef.h>
#include <stdio.h>
#include <string.h>

#include "oeq.h"

#define CHECK(condition)                                                                   \
  do {                                                                                     \
    if (!(condition)) {                                                                    \
      fprintf(stderr, "line %d: %s (last error: %s)\n", __LINE__, #condition, oeq_last_error()); \
      return 1;                                                                            \
    }                                                                                      \
  } while (0)

int main(void) {
  CHECK(strlen(oeq_last_error()) == 0);
  CHECK(strlen(oeq_version()) >= 5);
  CHECK(oeq_register_ffi(NULL, "CUDA") == OEQ_INVALID_ARGUMENT);
  CHECK(strstr(oeq_last_error(), "`api` is NULL") != NULL);
  CHECK(RegisterFFi(NULL, NULL) == OEQ_INVALID_ARGUMENT);
  CHECK(oeq_ffi_handler_table_for(1) == NULL);

  CHECK(oeq_configure("compile_threads", "0") == OEQ_INVALID_ARGUMENT);
  CHECK(strstr(oeq_last_error(), "1 to 1024") != NULL);
  CHECK(oeq_configure("no_such_option", "1") == OEQ_INVALID_ARGUMENT);
  CHECK(oeq_configure(NULL, "1") == OEQ_INVALID_ARGUMENT);
  CHECK(oeq_configure("compile_threads", "3") == OEQ_OK);

  OeqStats stats;
  memset(&stats, 0x55, sizeof stats);
  stats.struct_size = 0;
  CHECK(oeq_get_stats(&stats) == OEQ_INVALID_ARGUMENT);
  CHECK(stats.launches == 0x5555555555555555u);
  stats.struct_size = offsetof(OeqStats, launches); /* a caller from before `launches` */
  CHECK(oeq_get_stats(&stats) == OEQ_OK);
  CHECK(stats.struct_size == offsetof(OeqStats, launches) && stats.kernels_interned == 0);
  CHECK(stats.launches == 0x5555555555555555u);
  stats.struct_size = sizeof stats;
  CHECK(oeq_get_stats(&stats) == OEQ_OK && stats.launches == 0);
  CHECK(oeq_get_stats(NULL) == OEQ_INVALID_ARGUMENT);
  CHECK(oeq_configure("compile_threads", "2") == OEQ_FAILED_PRECONDITION); /* the runtime has started */

  OeqDeviceProperties properties;
  properties.struct_size = sizeof properties;
  CHECK(oeq_device_properties(0, &properties) == OEQ_OK); /* OEQ_DEVICE=H200 */
  CHECK(strcmp(properties.name, "H200") == 0 && properties.compute_major == 9 && properties.warp_size == 32);
  CHECK(properties.multiprocessor_count == 132 && properties.shared_memory_per_block == 232448);
  OeqTimer* timer = NULL;
  CHECK(oeq_timer_create(NULL) == OEQ_INVALID_ARGUMENT);
  if (oeq_timer_create(&timer) != OEQ_OK) {
    CHECK(timer == NULL);
    CHECK(strstr(oeq_last_error(), "CUDA driver") != NULL);
  }
  oeq_timer_destroy(timer);

#define SIZE(type) printf("%s %zu\n", #type, sizeof(type))
#define OFFSET(type, member) printf("%s.%s %zu\n", #type, #member, offsetof(type, member))
  SIZE(OeqFfiHandler);
  OFFSET(OeqFfiHandler, instantiate);
  OFFSET(OeqFfiHandler, prepare);
  OFFSET(OeqFfiHandler, initialize);
  OFFSET(OeqFfiHandler, execute);
  OFFSET(OeqFfiHandler, traits);
  SIZE(OeqFfiType);
  OFFSET(OeqFfiType, type_id);
  OFFSET(OeqFfiType, type_info);
  SIZE(OeqFfiHandlerTableV2);
  OFFSET(OeqFfiHandlerTableV2, handlers);
  SIZE(OeqFfiHandlerTable);
  OFFSET(OeqFfiHandlerTable, types);
  OFFSET(OeqFfiHandlerTable, handler_count);
  OFFSET(OeqFfiHandlerTable, handlers);
  SIZE(OeqStats);
  OFFSET(OeqStats, compiled);
  OFFSET(OeqStats, launches);
  SIZE(OeqDeviceProperties);
  OFFSET(OeqDeviceProperties, compute_major);
  OFFSET(OeqDeviceProperties, shared_memory_per_block);
  return 0;
}
