/* What the files of TurboQuant's C kernel share: the constants of a form, one call's arrays, the code paths.
 *
 * The structures are written by prefixcache/codecs/turboquant/c_rows.py, c_attention.py and measure_levels.py there, which
 * mirror them field by field.
 */
#ifndef TURBOQUANT_H
#define TURBOQUANT_H

#include <stdint.h>

enum {
    MAX_WIDTH = 1024, /* what the columns on the stack are made for */
    MAX_ROUNDS = 2,
    MAX_BORDERS = 7,
    MAX_ODD_FACTORS = 8,
    SEVEN = 7, /* the one factor whose matrix is a table */
    QUERIES_OF_BLOCK = 64
};

enum dtype { FLOAT16, BFLOAT16, FLOAT32 };

/* The constants of rows of one width, bit depth and seed: `Form` of format.py there, as the kernel reads them. */
struct form {
    int32_t width; /* a multiple of 8, from 32 to MAX_WIDTH */
    int32_t bits;
    int32_t words; /* uint32 words a row of codes takes */
    int32_t rounds;
    int32_t twos; /* how often 2 divides the width */
    int32_t odd_factors;
    int32_t odd_factor[MAX_ODD_FACTORS]; /* the other primes, ascending: 3, 5 or 7 */
    int32_t narrow;                      /* the decoder's integers fit int16 to the end */
    int32_t first_narrow;                /* those of its first round do */
    int32_t shift;
    int32_t borders;
    float per_length;
    float per_peak;
    float seven[SEVEN * SEVEN];
    uint8_t border[MAX_BORDERS + 1]; /* in half steps of the grid */
    uint8_t magnitude[16];           /* of each index */
    int8_t centroid[16];             /* of each code; 8 bits need no table */
    uint32_t flip[MAX_ROUNDS][MAX_WIDTH]; /* the sign bit where a round flips the sign, else 0 */
};

/* The arrays of one call. Strides are in bytes; the last axis of each array is contiguous. */
struct job {
    const struct form *form;
    char *rows;
    int64_t row_of_token, row_of_head;
    char *codes;
    int64_t codes_of_token, codes_of_head;
    char *scales;
    int64_t scale_of_token, scale_of_head;
    const char *mean;   /* float32; NULL where rows aren't levelled */
    const char *factor; /* float32; encoding: the levels' weight, or NULL. Decoding: the spread, never NULL */
    int64_t levels_of_head;
    int64_t tokens, heads;
    int64_t dtype;
};

/* Rows [first, last) of a job, counted head by head. */
typedef void rows_of_job(const struct job *job, int64_t first, int64_t last);

enum { BOOLEAN = FLOAT32 + 1 }; /* one more dtype, of masks alone */

/* Attention on coded rows, and its arrays. Strides are in bytes, 0 where one serves all; the last axis of each array
 * but the mask is contiguous. The query heads of a key's head stand side by side.
 *
 * The work falls into parts: for each sequence, head and range of columns, in this order, the blocks of queries.
 * Where columns are split up, what comes of a part goes to `partial`, in a state of its own.
 */
struct attention {
    const struct form *keys, *values;
    const char *queries; /* (sequences, heads * group, length, width of keys) of `dtype` */
    int64_t query_of_sequence, query_of_head, query_of_token;
    int64_t dtype;
    const char *codes; /* uint32 (sequences, heads, tokens, words of a key, then those of a value) */
    int64_t codes_of_sequence, codes_of_head, codes_of_token;
    const char *scales; /* bfloat16 (sequences, heads, tokens, 2) */
    int64_t scales_of_sequence, scales_of_head, scales_of_token;
    const char *key_mean, *key_spread; /* float32 (sequences, heads, width); no mean: NULL */
    int64_t key_levels_of_sequence, key_levels_of_head;
    const char *value_mean, *value_spread;
    int64_t value_levels_of_sequence, value_levels_of_head;
    const char *mask; /* (sequences, heads * group, length, tokens) of `mask_dtype`, or NULL */
    int64_t mask_of_sequence, mask_of_head, mask_of_query, mask_of_column;
    int64_t mask_dtype;
    const int32_t *first, *last; /* (sequences), or NULL */
    float *out;                  /* (sequences, heads * group, length, width of values) */
    float *top, *total;          /* (sequences, heads * group, length): the sum of exponentials is total * e**top */
    char *partial;
    int64_t sequences, heads, group, length, tokens;
    int64_t splits, tokens_of_split;
    int64_t causal;
    double scale;
};

/* One part of the work, or one block of queries whose parts are brought together. */
typedef void part_of_attention(const struct attention *job, int64_t number, char *scratch);
typedef int64_t size_of_attention(const struct attention *job);

/* Rows whose levels are wanted: per head and channel the mean, and the mean of what rows are away from it; per row the mean
 * square of its channels in those. The last axis of rows is contiguous, its width a multiple of 16; strides are in bytes.
 */
struct measuring {
    const char *rows;
    int64_t row_of_token, row_of_head;
    float *mean, *spread; /* (heads, width) */
    float *size;          /* (heads, tokens) */
    int64_t tokens, heads, width;
    int64_t dtype;
    int64_t centred; /* else the mean is 0 */
};

/* Heads [first, last). */
typedef void heads_of_measuring(const struct measuring *job, int64_t first, int64_t last);

struct path {
    rows_of_job *encode, *decode;
    heads_of_measuring *measure;
    part_of_attention *attend, *merge;
    size_of_attention *scratch, *state; /* bytes */
};

extern const struct path turboquant_portable;
#if defined(__x86_64__)
extern const struct path turboquant_avx2, turboquant_avx512;
#endif

#endif
