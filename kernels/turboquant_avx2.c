/* The kernel for AVX2 and F16C; called only where turboquant.c has found both. */
#if defined(__x86_64__)
#include <immintrin.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,f16c")
#endif

#define VECTOR_BYTES 32
#include "turboquant_rows.h"

const struct path turboquant_avx2 = {encode_rows, decode_rows};

#ifdef __clang__
#pragma clang attribute pop
#endif
#else
typedef int nothing_for_this_processor;
#endif
