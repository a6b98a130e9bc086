/* The kernel for AVX-512; called only where turboquant.c has found all the parts of it that are named here. */
#if defined(__x86_64__)
#include <immintrin.h>

#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif

#define VECTOR_BYTES 64
#include "turboquant_rows.h"
#include "turboquant_attend.h"
#include "turboquant_measure.h"

const struct path turboquant_avx512 = {encode_rows, decode_rows, measure, attend, merge, scratch_size, state_size};

#ifdef __clang__
#pragma clang attribute pop
#endif
#else
typedef int nothing_for_this_processor;
#endif
