/* The kernel with 16-byte vectors, for every processor: NEON on arm64, SSE2 on x86-64, elsewhere whatever the compiler
 * makes of them.
 */
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#define VECTOR_BYTES 16
#include "turboquant_rows.h"
#include "turboquant_attend.h"
#include "turboquant_measure.h"

const struct path turboquant_portable = {encode_rows, decode_rows, measure, attend, merge, scratch_size, state_size};
