/* The kernel for AVX2, F16C and FMA; called only where turboquant.c has found all three. */
#if defined(__x86_64__)
#include <immintrin.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,f16c,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c,fma")
#endif

#define VECTOR_BYTES 32
#include "turboquant_rows.h"
#include "turboquant_attend.h"
#include "turboquant_measure.h"

const struct path turboquant_avx2 = {encode_rows, decode_rows, measure, attend, merge, scratch_size, state_size};

#ifdef __clang__
#pragma clang attribute pop
#endif
#else
typedef int nothing_for_this_processor;
#endif
