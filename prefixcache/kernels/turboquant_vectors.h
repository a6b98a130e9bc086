/* Vectors of VECTOR_BYTES bytes, and the few operations on them that have no operator in GNU C: all that differs from
 * one processor to another. Everything else of the kernel is written once, with gcc's and clang's vector types.
 */
#include <math.h>
#include <string.h>

#define LANES (VECTOR_BYTES / 4) /* 32-bit lanes; a row lives in one of them */

typedef float floats __attribute__((vector_size(VECTOR_BYTES)));
typedef int32_t ints __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t words __attribute__((vector_size(VECTOR_BYTES)));
typedef int16_t shorts __attribute__((vector_size(VECTOR_BYTES)));
typedef uint16_t halves __attribute__((vector_size(VECTOR_BYTES)));
typedef int8_t chars __attribute__((vector_size(VECTOR_BYTES)));
typedef uint8_t bytes __attribute__((vector_size(VECTOR_BYTES)));
/* As many 16-bit values as a vector has 32-bit lanes. */
typedef int16_t few_shorts __attribute__((vector_size(VECTOR_BYTES / 2)));
typedef uint16_t few_halves __attribute__((vector_size(VECTOR_BYTES / 2)));

#define INLINE static inline __attribute__((always_inline))
#define NAMED_(a, b) a##_##b
#define NAMED(a, b) NAMED_(a, b)
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* gcc before 12 has no __builtin_shufflevector, clang no __builtin_shuffle. */
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (words){__VA_ARGS__})
#endif

#define MAGNITUDE 0x7FFFFFFFu

INLINE ints chosen(ints mask, ints yes, ints no)
{
    return (mask & yes) | (~mask & no);
}

INLINE floats chosen_floats(ints mask, floats yes, floats no)
{
    return (floats)chosen(mask, (ints)yes, (ints)no);
}

INLINE ints all_ints(int32_t value)
{
    return value - (ints){0};
}

INLINE floats all_floats(float value)
{
    return value - (floats){0};
}

/* IEEE's square root, lane by lane; there are two a row. */
INLINE floats roots(floats x)
{
    float lane[LANES];
    memcpy(lane, &x, sizeof lane);
    for (int i = 0; i < LANES; i++) lane[i] = sqrtf(lane[i]);
    memcpy(&x, lane, sizeof lane);
    return x;
}

/* float32 -> the bits of the nearest bfloat16, ties to even. */
INLINE words rounded_to_bfloat16(floats x)
{
    words bits = (words)x;
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}

/* -- what processors have instructions for ----------------------------------------------------------------------------
 *
 * larger(a, b)                      the larger of each two integers
 * cut(x, most)                      x cut to [-most, most]; NaN stays
 * looked_up(table, index, entries)  table[index] for each byte of index, all below `entries`; the table has room for 16
 * from_float16(x), to_float16(x)    round to nearest even; NaN stays
 */

#if VECTOR_BYTES == 32

INLINE ints larger(ints a, ints b)
{
    return (ints)_mm256_max_epi32((__m256i)a, (__m256i)b);
}

INLINE floats cut(floats x, float most)
{
    /* Of two operands of which one is NaN, these give the second. */
    return _mm256_max_ps(_mm256_set1_ps(-most), _mm256_min_ps(_mm256_set1_ps(most), x));
}

INLINE bytes looked_up(const void *table, bytes index, const int entries)
{
    (void)entries;
    __m128i row = _mm_loadu_si128(table);
    return (bytes)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(row), (__m256i)index);
}

INLINE floats from_float16(few_halves x)
{
    return _mm256_cvtph_ps((__m128i)x);
}

INLINE few_halves to_float16(floats x)
{
    return (few_halves)_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
}

#elif VECTOR_BYTES == 64

INLINE ints larger(ints a, ints b)
{
    return (ints)_mm512_max_epi32((__m512i)a, (__m512i)b);
}

INLINE floats cut(floats x, float most)
{
    return _mm512_max_ps(_mm512_set1_ps(-most), _mm512_min_ps(_mm512_set1_ps(most), x));
}

INLINE bytes looked_up(const void *table, bytes index, const int entries)
{
    (void)entries;
    __m128i row = _mm_loadu_si128(table);
    return (bytes)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(row), (__m512i)index);
}

INLINE floats from_float16(few_halves x)
{
    return _mm512_cvtph_ps((__m256i)x);
}

INLINE few_halves to_float16(floats x)
{
    return (few_halves)_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
}

#elif defined(__aarch64__)

INLINE ints larger(ints a, ints b)
{
    return (ints)vmaxq_s32((int32x4_t)a, (int32x4_t)b);
}

INLINE floats cut(floats x, float most)
{
    return (floats)vmaxq_f32(vdupq_n_f32(-most), vminq_f32(vdupq_n_f32(most), (float32x4_t)x));
}

INLINE bytes looked_up(const void *table, bytes index, const int entries)
{
    (void)entries;
    return (bytes)vqtbl1q_u8(vld1q_u8(table), (uint8x16_t)index);
}

INLINE floats from_float16(few_halves x)
{
    return (floats)vcvt_f32_f16((float16x4_t)x);
}

INLINE few_halves to_float16(floats x)
{
    return (few_halves)vcvt_f16_f32((float32x4_t)x);
}

#else /* plain C, for any processor */

INLINE ints larger(ints a, ints b)
{
    return chosen(a > b, a, b);
}

INLINE floats cut(floats x, float most)
{
    x = chosen_floats(x > all_floats(most), all_floats(most), x);
    return chosen_floats(x < all_floats(-most), all_floats(-most), x);
}

INLINE bytes looked_up(const void *table, bytes index, const int entries)
{
    bytes found = {0};
    for (int i = 0; i < entries; i++) found |= (bytes)(index == (uint8_t)i) & ((const uint8_t *)table)[i];
    return found;
}

INLINE floats from_float16(few_halves x)
{
    ints wide = (ints)__builtin_convertvector(x, words);
    ints sign = (wide & 0x8000) << 16;
    ints bits = (wide & 0x7FFF) << 13;
    /* Exponents move from a bias of 15 to one of 127 by a product, which makes subnormals normal; that of infinity and
     * NaN has to become the largest again. */
    floats moved = (floats)bits * 0x1p112f;
    ints special = bits >= all_ints(0x7C00 << 13);
    return (floats)(sign | (ints)moved | (special & 0x7F800000));
}

INLINE few_halves to_float16(floats x)
{
    words bits = (words)x & MAGNITUDE;
    words sign = ((words)x >> 16) & 0x8000;
    /* Normal: the exponent moves, 13 bits are rounded off. Subnormal: adding 1/2 leaves the rounded bits at the end. */
    words normal = (bits - (112u << 23) + 0xFFF + ((bits >> 13) & 1)) >> 13;
    words small = (words)((floats)bits + 0.5f) - 0x3F000000u;
    words nan = 0x7E00 | ((bits >> 13) & 0x3FF);
    words half = (words)chosen((ints)bits < all_ints(113 << 23), (ints)small, (ints)normal);
    half = (words)chosen((ints)bits >= all_ints(143 << 23), all_ints(0x7C00), (ints)half);
    half = (words)chosen((ints)bits > all_ints(0x7F800000), (ints)nan, (ints)half);
    return __builtin_convertvector(half | sign, few_halves);
}

#endif

/* -- transposing --------------------------------------------------------------------------------------------------- */

/* LANES vectors of LANES 32-bit values: value j of vector i becomes value i of vector j.
 *
 * First each four vectors by themselves within every 16 bytes, then the blocks of 16 bytes.
 */
#if VECTOR_BYTES == 16
#define LOW_32(a, b) SHUFFLE(a, b, 0, 4, 1, 5)
#define HIGH_32(a, b) SHUFFLE(a, b, 2, 6, 3, 7)
#define LOW_64(a, b) SHUFFLE(a, b, 0, 1, 4, 5)
#define HIGH_64(a, b) SHUFFLE(a, b, 2, 3, 6, 7)
#elif VECTOR_BYTES == 32
#define LOW_32(a, b) SHUFFLE(a, b, 0, 8, 1, 9, 4, 12, 5, 13)
#define HIGH_32(a, b) SHUFFLE(a, b, 2, 10, 3, 11, 6, 14, 7, 15)
#define LOW_64(a, b) SHUFFLE(a, b, 0, 1, 8, 9, 4, 5, 12, 13)
#define HIGH_64(a, b) SHUFFLE(a, b, 2, 3, 10, 11, 6, 7, 14, 15)
#define LOW_128(a, b) SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11)
#define HIGH_128(a, b) SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15)
#else
#define LOW_32(a, b) SHUFFLE(a, b, 0, 16, 1, 17, 4, 20, 5, 21, 8, 24, 9, 25, 12, 28, 13, 29)
#define HIGH_32(a, b) SHUFFLE(a, b, 2, 18, 3, 19, 6, 22, 7, 23, 10, 26, 11, 27, 14, 30, 15, 31)
#define LOW_64(a, b) SHUFFLE(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29)
#define HIGH_64(a, b) SHUFFLE(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31)
#define LOW_256(a, b) SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23)
#define HIGH_256(a, b) SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31)
#define EVEN_128(a, b) SHUFFLE(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27)
#define ODD_128(a, b) SHUFFLE(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31)
#endif

INLINE void transpose(words tile[LANES])
{
    UNROLL for (int i = 0; i < LANES; i += 4) {
        words low = LOW_32(tile[i], tile[i + 1]), high = HIGH_32(tile[i], tile[i + 1]);
        words next_low = LOW_32(tile[i + 2], tile[i + 3]), next_high = HIGH_32(tile[i + 2], tile[i + 3]);
        tile[i] = LOW_64(low, next_low);
        tile[i + 1] = HIGH_64(low, next_low);
        tile[i + 2] = LOW_64(high, next_high);
        tile[i + 3] = HIGH_64(high, next_high);
    }
#if VECTOR_BYTES == 32
    UNROLL for (int i = 0; i < 4; i++) {
        words low = LOW_128(tile[i], tile[i + 4]);
        tile[i + 4] = HIGH_128(tile[i], tile[i + 4]);
        tile[i] = low;
    }
#elif VECTOR_BYTES == 64
    UNROLL for (int i = 0; i < 4; i++) {
        words low = LOW_256(tile[i], tile[i + 4]), next_low = LOW_256(tile[i + 8], tile[i + 12]);
        words high = HIGH_256(tile[i], tile[i + 4]), next_high = HIGH_256(tile[i + 8], tile[i + 12]);
        tile[i] = EVEN_128(low, next_low);
        tile[i + 4] = ODD_128(low, next_low);
        tile[i + 8] = EVEN_128(high, next_high);
        tile[i + 12] = ODD_128(high, next_high);
    }
#endif
}
