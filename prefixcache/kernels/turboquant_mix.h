/* The mixing of a round, T of rotation.py, over rows in columns. Included once for float32 and once for 16-bit integers:
 * the including file defines COLUMN (the vector type), SCALAR (its values' type), MIX (the function's name) and, for
 * float32 alone, WITH_SEVEN.
 *
 * Up to three stages of butterflies are done at once, on values that stay in registers; each value's sums are the same,
 * and in the same order, as one stage after another gives.
 */

#define BUTTERFLIES NAMED(butterflies_of, MIX)
#define HOUSEHOLDER NAMED(householder_of, MIX)
#define TABLE NAMED(table_of, MIX)

INLINE void BUTTERFLIES(COLUMN *y, int width, int stride, const int stages)
{
    const int radix = 1 << stages;
    for (int block = 0; block < width; block += radix * stride) {
        for (int at = block; at < block + stride; at++) {
            COLUMN v[8];
            UNROLL for (int k = 0; k < radix; k++) v[k] = y[at + k * stride];
            UNROLL for (int stage = 0; stage < stages; stage++) {
                const int step = 1 << stage;
                UNROLL for (int k = 0; k < radix; k++) {
                    if (k & step) continue;
                    COLUMN low = v[k], high = v[k + step];
                    v[k] = low + high;
                    v[k + step] = low - high;
                }
            }
            UNROLL for (int k = 0; k < radix; k++) y[at + k * stride] = v[k];
        }
    }
}

INLINE void HOUSEHOLDER(COLUMN *y, int width, int stride, const int factor)
{
    for (int block = 0; block < width; block += factor * stride) {
        for (int at = block; at < block + stride; at++) {
            COLUMN total = y[at];
            UNROLL for (int k = 1; k < factor; k++) total += y[at + k * stride];
            total += total;
            UNROLL for (int k = 0; k < factor; k++) y[at + k * stride] = y[at + k * stride] * (SCALAR)factor - total;
        }
    }
}

#ifdef WITH_SEVEN
INLINE void TABLE(COLUMN *y, int width, int stride, const float *table)
{
    for (int block = 0; block < width; block += SEVEN * stride) {
        for (int at = block; at < block + stride; at++) {
            COLUMN x[SEVEN];
            for (int k = 0; k < SEVEN; k++) x[k] = y[at + k * stride];
            for (int i = 0; i < SEVEN; i++) {
                COLUMN sum = x[0] * table[i];
                for (int k = 1; k < SEVEN; k++) sum += x[k] * table[k * SEVEN + i];
                y[at + i * stride] = sum;
            }
        }
    }
}
#endif

static void MIX(COLUMN *y, const struct form *form)
{
    int stride = 1, twos = form->twos;
    for (; twos >= 3; twos -= 3, stride *= 8) BUTTERFLIES(y, form->width, stride, 3);
    if (twos == 2) BUTTERFLIES(y, form->width, stride, 2);
    if (twos == 1) BUTTERFLIES(y, form->width, stride, 1);
    stride <<= twos;
    for (int i = 0; i < form->odd_factors; i++) {
        int factor = form->odd_factor[i];
        if (factor == 3) HOUSEHOLDER(y, form->width, stride, 3);
        if (factor == 5) HOUSEHOLDER(y, form->width, stride, 5);
#ifdef WITH_SEVEN
        if (factor == SEVEN) TABLE(y, form->width, stride, form->seven);
#endif
        stride *= factor;
    }
}

#undef BUTTERFLIES
#undef HOUSEHOLDER
#undef TABLE
#undef WITH_SEVEN
#undef COLUMN
#undef SCALAR
#undef MIX
