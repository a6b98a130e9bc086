/* Attention on TurboQuant's codes, written once and compiled for each kind of processor (VECTOR_BYTES).
 *
 * A decoded key is spread * (R c) * scale + mean, where R is the rotation back, T or T D_2 T: symmetric both. So a
 * query is multiplied by the spread and rotated once, and its score with a key is that key's scale times the product
 * with its integers c; the product with the mean is the same for all keys. Of values the integers are summed up,
 * each with its weight times its scale, and only the sum is rotated back, multiplied by the spread, and given the
 * mean.
 *
 * A block of queries goes over its columns in tiles. Of a tile, the keys' integers become columns of float32, a key
 * in each lane, and those of values rows; both products are then sums of a row of vectors times one number
 * (`product`). Unlike the codes, nothing here has bits that it must have: FMA is used where there is one.
 */
#include "turboquant.h"

#if VECTOR_BYTES == 32
enum { PANEL = 2 }; /* vectors side by side in a product, whose AT_ONCE * PANEL sums stay in registers */
#else
enum { PANEL = 4 };
#endif
enum { AT_ONCE = 4, TILE = 128, TILE_VECTORS = TILE / LANES };

typedef uint8_t few_bytes __attribute__((vector_size(LANES))); /* as many as a vector has 32-bit lanes */

/* -- arithmetic ---------------------------------------------------------------------------------------------------- */

#if VECTOR_BYTES == 64

/* a * b + c */
INLINE floats fused(floats a, floats b, floats c)
{
    return _mm512_fmadd_ps(a, b, c);
}

/* The larger of each two; `top` where x is NaN. */
INLINE floats larger_number(floats x, floats top)
{
    return _mm512_max_ps(x, top);
}

INLINE float largest_lane(floats x)
{
    return _mm512_reduce_max_ps(x);
}

INLINE float sum_of_lanes(floats x)
{
    return _mm512_reduce_add_ps(x);
}

#elif VECTOR_BYTES == 32

INLINE floats fused(floats a, floats b, floats c)
{
    return _mm256_fmadd_ps(a, b, c);
}

INLINE floats larger_number(floats x, floats top)
{
    return _mm256_max_ps(x, top);
}

INLINE float largest_lane(floats x)
{
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

INLINE float sum_of_lanes(floats x)
{
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

#else

INLINE floats fused(floats a, floats b, floats c)
{
#if defined(__aarch64__)
    return (floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

INLINE floats larger_number(floats x, floats top)
{
    return chosen_floats(x > top, x, top);
}

INLINE float largest_lane(floats x)
{
    float low = x[0] > x[1] ? x[0] : x[1], high = x[2] > x[3] ? x[2] : x[3];
    return low > high ? low : high;
}

INLINE float sum_of_lanes(floats x)
{
    return (x[0] + x[2]) + (x[1] + x[3]);
}

#endif

/* 2**power * e**rest for |rest| <= ln 2 / 2, to about one unit in the last place; 0 below the normal numbers. */
INLINE floats scaled_exponential(ints power, floats rest)
{
    floats y = fused(rest, all_floats(0x1.6c16c2p-10f), all_floats(0x1.111112p-7f));
    y = fused(y, rest, all_floats(0x1.555556p-5f));
    y = fused(y, rest, all_floats(0x1.555556p-3f));
    y = fused(y, rest, all_floats(0.5f));
    y = fused(y, rest, all_floats(1.0f));
    y = fused(y, rest, all_floats(1.0f));
    /* A product, so that NaN stays. */
    return y * (floats)((larger(power, all_ints(-127)) + 127) << 23);
}

#define NEAREST 0x1.8p23f /* added to a number of less than 22 bits, leaves the nearest integer at the end */

/* e**x for x up to 80: 0 where that is below the normal numbers. */
INLINE floats exponential(floats x)
{
    x = cut(x, 104.0f);
    floats steps = fused(x, all_floats(0x1.715476p0f), all_floats(NEAREST));
    floats whole = steps - NEAREST;
    floats rest = fused(whole, all_floats(-0x1.62e4p-1f), x);
    rest = fused(whole, all_floats(-0x1.7f7d1cp-20f), rest);
    return scaled_exponential((ints)steps - (ints)all_floats(NEAREST), rest);
}

INLINE float exponential_of(float x)
{
    return exponential(all_floats(x))[0];
}

/* 2**power of a whole or broken number between -126 and 127; exact for whole ones. */
INLINE floats power_of_two(floats power)
{
    floats steps = power + NEAREST;
    return scaled_exponential((ints)steps - (ints)all_floats(NEAREST), (power - (steps - NEAREST)) * 0x1.62e43p-1f);
}

#define NO_SCORE (-(float)INFINITY)
#define PER_LN2 1.44269504f

/* sums[i][j] (+)= the sum over `depth` of left[i, d] * right[d][j], of `rows` by `columns` vectors. */
INLINE void product_of(const float *left, int64_t left_of_row, int64_t left_of_depth, const floats *right, int depth,
                       floats *sums, int64_t sums_of_row, int adding, const int rows, const int columns)
{
    floats sum[AT_ONCE][PANEL];
    UNROLL for (int i = 0; i < rows; i++) {
        UNROLL for (int j = 0; j < columns; j++) sum[i][j] = adding ? sums[i * sums_of_row + j] : (floats){0};
    }
    for (int d = 0; d < depth; d++, left += left_of_depth, right += PANEL) {
        floats own[PANEL];
        UNROLL for (int j = 0; j < columns; j++) own[j] = right[j];
        UNROLL for (int i = 0; i < rows; i++) {
            floats factor = all_floats(left[i * left_of_row]);
            UNROLL for (int j = 0; j < columns; j++) sum[i][j] = fused(factor, own[j], sum[i][j]);
        }
    }
    UNROLL for (int i = 0; i < rows; i++) {
        UNROLL for (int j = 0; j < columns; j++) sums[i * sums_of_row + j] = sum[i][j];
    }
}

/* The same for up to AT_ONCE rows and up to PANEL vectors. right: (depth, PANEL), whatever is used of it. */
static void product(const float *left, int64_t left_of_row, int64_t left_of_depth, const floats *right, int depth,
                    floats *sums, int64_t sums_of_row, int adding, int rows, int columns)
{
#define CASE(rows_, columns_)                                                                                     \
    case 8 * rows_ + columns_:                                                                                    \
        product_of(left, left_of_row, left_of_depth, right, depth, sums, sums_of_row, adding, rows_, columns_);   \
        break
#define CASES(rows_) CASE(rows_, 1); CASE(rows_, 2)
#define MORE(rows_) CASE(rows_, 3); CASE(rows_, 4)
    switch (8 * rows + columns) {
        CASES(1); CASES(2); CASES(3); CASES(4);
#if VECTOR_BYTES != 32
        MORE(1); MORE(2); MORE(3); MORE(4);
#endif
    }
#undef CASE
#undef CASES
#undef MORE
}

/* -- what a thread works in ---------------------------------------------------------------------------------------- */

/* What is known of a block of queries after some columns: sums * 2**unit are those of values' integers. */
struct state {
    floats *sums;   /* (queries, vectors of a value), of queries a multiple of AT_ONCE */
    floats *totals; /* (queries): of e**(score - top), a share in each lane */
    float *top;     /* (queries): the highest score, -inf where there is none yet */
    float *unit;    /* (queries) */
    float *shift;   /* (queries): what all scores lack, the product with the mean */
};

struct scratch {
    struct state state, other;
    floats *queries;                         /* (QUERIES_OF_BLOCK / LANES, width): a query in each lane */
    float *factor;                           /* (queries): what a score is yet to be multiplied by */
    floats *keys;                            /* (TILE_VECTORS / PANEL, width, PANEL): a key in each lane */
    floats *values;                          /* (vectors of a value / PANEL, TILE, PANEL): a channel in each lane */
    floats *weights;                         /* (queries, TILE_VECTORS), the same: scores, then weights */
    floats *bias;                            /* (queries, TILE_VECTORS), of the mask */
    const floats *bias_of[QUERIES_OF_BLOCK]; /* NULL: none */
    int visible[QUERIES_OF_BLOCK];           /* how many columns of the tile a query may attend to, by position */
    floats key_scale[TILE_VECTORS], value_scale[TILE_VECTORS];
};

INLINE int smaller_number(int64_t a, int64_t b)
{
    return (int)(a < b ? a : b);
}

INLINE int divided_up(int a, int b)
{
    return (a + b - 1) / b;
}

INLINE int queries_of_block(const struct attention *job)
{
    return smaller_number(job->group * job->length, QUERIES_OF_BLOCK);
}

INLINE int vectors_of_value(const struct attention *job)
{
    return divided_up(job->values->width, LANES);
}

/* The next `count` vectors of the memory; `at` counts bytes. */
INLINE void *taken(char *memory, int64_t *at, int64_t count)
{
    int64_t begin = *at;
    *at += count * (int64_t)sizeof(floats);
    return memory ? memory + begin : NULL;
}

/* Both return how many bytes there are; with no memory, that alone. */
static int64_t place_state(const struct attention *job, char *memory, struct state *state)
{
    int queries = queries_of_block(job), few = divided_up(queries, LANES);
    int64_t at = 0;
    queries = divided_up(queries, AT_ONCE) * AT_ONCE;
    state->sums = taken(memory, &at, (int64_t)queries * vectors_of_value(job));
    state->totals = taken(memory, &at, queries);
    state->top = taken(memory, &at, few);
    state->unit = taken(memory, &at, few);
    state->shift = taken(memory, &at, few);
    return at;
}

static int64_t place_scratch(const struct attention *job, char *memory, struct scratch *scratch)
{
    int queries = queries_of_block(job), few = divided_up(queries, LANES);
    int64_t at = 0, state = place_state(job, NULL, &scratch->state) / (int64_t)sizeof(floats);
    char *first = taken(memory, &at, state), *second = taken(memory, &at, state);
    place_state(job, first, &scratch->state);
    place_state(job, second, &scratch->other);
    scratch->queries = taken(memory, &at, (int64_t)few * job->keys->width);
    scratch->factor = taken(memory, &at, few);
    scratch->keys = taken(memory, &at, (int64_t)TILE_VECTORS * job->keys->width);
    scratch->values = taken(memory, &at, (int64_t)divided_up(vectors_of_value(job), PANEL) * PANEL * TILE);
    scratch->weights = taken(memory, &at, (int64_t)divided_up(queries, AT_ONCE) * AT_ONCE * TILE_VECTORS);
    scratch->bias = taken(memory, &at, (int64_t)queries * TILE_VECTORS);
    return at;
}

static int64_t scratch_size(const struct attention *job)
{
    struct scratch scratch;
    return place_scratch(job, NULL, &scratch);
}

static int64_t state_size(const struct attention *job)
{
    struct state state;
    return place_state(job, NULL, &state);
}

static void clear(const struct attention *job, const struct state *state, int queries, float unit)
{
    memset(state->sums, 0, sizeof(floats) * divided_up(queries, AT_ONCE) * AT_ONCE * vectors_of_value(job));
    memset(state->totals, 0, sizeof(floats) * queries);
    for (int q = 0; q < queries; q++) {
        state->top[q] = NO_SCORE;
        state->unit[q] = unit;
        state->shift[q] = 0;
    }
}

/* -- the part of the work ------------------------------------------------------------------------------------------ */

/* Queries [query, query + queries) of those of a head, which are counted token by token: all of its group at one
 * position, then all at the next, so that a block looks at much the same columns.
 */
struct part {
    int64_t sequence, head, query;
    int queries;
    int64_t begin, end; /* columns */
    int64_t state;      /* its number in `partial` */
};

static struct part block_of(const struct attention *job, int64_t number, int64_t splits)
{
    struct part part;
    int64_t all = job->group * job->length, blocks = (all + QUERIES_OF_BLOCK - 1) / QUERIES_OF_BLOCK;
    int64_t block = number % blocks, split = number / blocks % splits, head = number / blocks / splits;
    part.sequence = head / job->heads;
    part.head = head % job->heads;
    part.query = block * QUERIES_OF_BLOCK;
    part.queries = smaller_number(all - part.query, QUERIES_OF_BLOCK);
    part.state = (head * blocks + block) * job->splits + split;
    part.begin = split * job->tokens_of_split;
    part.end = part.begin + job->tokens_of_split;
    int64_t first = job->first ? job->first[part.sequence] : 0;
    int64_t last = job->last ? job->last[part.sequence] : job->tokens;
    if (last > job->tokens) last = job->tokens;
    if (part.begin < first) part.begin = first;
    if (part.end > last) part.end = last;
    return part;
}

/* Behind the last column that query q of the part may attend to. */
INLINE int64_t end_of(const struct attention *job, const struct part *part, int q)
{
    if (!job->causal) return part->end;
    int64_t end = job->tokens - job->length + (part->query + q) / job->group + 1;
    return end < part->end ? end : part->end;
}

INLINE int64_t head_of_query(const struct attention *job, const struct part *part, int q)
{
    return part->head * job->group + (part->query + q) % job->group;
}

INLINE int64_t token_of_query(const struct attention *job, const struct part *part, int q)
{
    return (part->query + q) / job->group;
}

/* -- queries ------------------------------------------------------------------------------------------------------- */

/* T D_2 T or T. */
static void rotate_back(floats *columns, const struct form *form)
{
    mix_floats(columns, form);
    for (int turn = 1; turn < form->rounds; turn++) {
        for (int i = 0; i < form->width; i++) columns[i] = (floats)((words)columns[i] ^ form->flip[turn][i]);
        mix_floats(columns, form);
    }
}

/* The part's queries -> columns, made to be multiplied with integers, each with its largest value brought near 1: no
 * product overflows, whatever the dtype holds.
 */
static void load_queries(const struct attention *job, const struct part *part, struct scratch *scratch,
                         const struct state *state)
{
    const struct form *form = job->keys;
    int64_t levels = part->sequence * job->key_levels_of_sequence + part->head * job->key_levels_of_head;
    const char *spread = job->key_spread + levels, *mean = job->key_mean ? job->key_mean + levels : NULL;
    for (int begin = 0; begin < part->queries; begin += LANES) {
        struct encoded rows;
        floats *columns = scratch->queries + (int64_t)begin / LANES * form->width;
        rows.mean[0] = NULL;
        for (int r = 0; r < LANES; r++) {
            int q = smaller(begin + r, part->queries - 1);
            rows.values[r] = job->queries + part->sequence * job->query_of_sequence +
                             head_of_query(job, part, q) * job->query_of_head +
                             token_of_query(job, part, q) * job->query_of_token;
        }
        ints exponent = load_rows_of(&rows, form->width, (int)job->dtype, columns) >> 23;
        exponent = chosen(exponent > 252, all_ints(252), larger(exponent, all_ints(1)));
        floats power = (floats)((253 - exponent) << 23), shift = {0};
        for (int i = 0; i < form->width; i++) {
            float by;
            memcpy(&by, spread + 4 * i, sizeof by);
            floats x = columns[i] * power;
            if (mean) {
                float plus;
                memcpy(&plus, mean + 4 * i, sizeof plus);
                shift = fused(x, all_floats(plus), shift);
            }
            columns[i] = x * by;
        }
        rotate_back(columns, form);
        floats factor = (floats)((exponent + 1) << 23) * (float)job->scale;
        shift *= factor;
        memcpy(scratch->factor + begin, &factor, sizeof factor);
        memcpy(state->shift + begin, &shift, sizeof shift);
    }
}

/* -- tiles: codes -------------------------------------------------------------------------------------------------- */

/* What centroids are looked up in, for codes of up to 4 bits in the low end of each lane, whatever is above them. */
#if VECTOR_BYTES == 64

struct centroids {
    __m512 all; /* for fewer bits, again and again */
};

INLINE struct centroids centroids_of(const struct form *form)
{
    struct centroids made;
    int8_t entry[16];
    for (int i = 0; i < 16; i++) entry[i] = form->centroid[i & ((1 << (form->bits & 7)) - 1) & 15];
    __m128i narrow;
    memcpy(&narrow, entry, sizeof narrow);
    made.all = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(narrow));
    return made;
}

INLINE floats centroid_of(const struct centroids *centroids, const struct form *form, words code, const int bits)
{
    (void)form, (void)bits;
    return _mm512_permutexvar_ps((__m512i)code, centroids->all);
}

#elif VECTOR_BYTES == 32

struct centroids {
    __m256 low, high;
};

INLINE struct centroids centroids_of(const struct form *form)
{
    struct centroids made;
    int8_t entry[16];
    for (int i = 0; i < 16; i++) entry[i] = form->centroid[i & ((1 << (form->bits & 7)) - 1) & 15];
    __m128i narrow;
    memcpy(&narrow, entry, sizeof narrow);
    made.low = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(narrow));
    made.high = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(narrow, 8)));
    return made;
}

INLINE floats centroid_of(const struct centroids *centroids, const struct form *form, words code, const int bits)
{
    (void)form;
    __m256 low = _mm256_permutevar8x32_ps(centroids->low, (__m256i)code);
    if (bits < 4) return low;
    __m256 high = _mm256_permutevar8x32_ps(centroids->high, (__m256i)code);
    return _mm256_blendv_ps(low, high, (__m256)(code << 28)); /* by the sign bit */
}

#else

struct centroids {
    int nothing;
};

INLINE struct centroids centroids_of(const struct form *form)
{
    (void)form;
    return (struct centroids){0};
}

INLINE floats centroid_of(const struct centroids *centroids, const struct form *form, words code, const int bits)
{
    (void)centroids;
    code = (words)looked_up(form->centroid, (bytes)(code & ((1u << bits) - 1)), 1 << bits);
    return __builtin_convertvector((ints)(code << 24) >> 24, floats);
}

#endif

INLINE floats centroid_of_eight_bits(words code)
{
    return __builtin_convertvector(larger((ints)code - 128, all_ints(-127)), floats);
}

/* Columns of words -> what the eight codes from `first` on stand for, a multiple of 8. */
INLINE void unpack_eight(const words *codes, const struct form *form, const struct centroids *centroids, int first,
                         floats y[8], const int bits)
{
    /* Eight codes begin with a byte; those of up to 4 bits are brought to the low end of a word. */
    int at = first * bits / 32, offset = first * bits % 32;
    words eight = bits == 4 || bits == 8 ? codes[at] : codes[at] >> offset;
    if (bits == 3 && offset > 8) eight |= codes[at + 1] << (32 - offset);
    UNROLL for (int k = 0; k < 8; k++) {
        if (bits == 8) {
            y[k] = centroid_of_eight_bits(codes[at + k / 4] >> (8 * (k % 4)) & 255);
        } else {
            y[k] = centroid_of(centroids, form, eight >> (k * bits), bits);
        }
    }
}

/* All of them; column i to y[i * step]. */
INLINE void unpack_columns_of(const words *codes, const struct form *form, floats *y, const int step, const int bits)
{
    const struct centroids centroids = centroids_of(form);
    for (int i = 0; i < form->width; i += 8) {
        floats eight[8];
        unpack_eight(codes, form, &centroids, i, eight, bits);
        UNROLL for (int k = 0; k < 8; k++) y[(i + k) * step] = eight[k];
    }
}

INLINE void unpack_columns(const words *codes, const struct form *form, floats *y, const int step)
{
    switch (form->bits) {
    case 1: unpack_columns_of(codes, form, y, step, 1); break;
    case 2: unpack_columns_of(codes, form, y, step, 2); break;
    case 3: unpack_columns_of(codes, form, y, step, 3); break;
    case 4: unpack_columns_of(codes, form, y, step, 4); break;
    default: unpack_columns_of(codes, form, y, step, 8);
    }
}

INLINE const char *codes_at(const struct attention *job, const struct part *part, int64_t column, int word)
{
    return job->codes + part->sequence * job->codes_of_sequence + part->head * job->codes_of_head +
           column * job->codes_of_token + 4 * word;
}

/* LANES rows of codes from `column + begin` on, the last one once more beyond `count` -> a column for each word.
 * What the next tile will read is asked for: rows are too short and too far apart for processors to foresee it.
 */
INLINE void load_tile(const struct attention *job, const struct part *part, int64_t column, int begin, int count,
                      int word, int row_words, words *codes)
{
    const char *rows[LANES];
    for (int r = 0; r < LANES; r++) {
        rows[r] = codes_at(job, part, column + smaller(begin + r, count - 1), word);
        const char *next = rows[r] + TILE * job->codes_of_token;
        for (int at = 0; at < 4 * row_words; at += 64) __builtin_prefetch(next + at);
    }
    load_codes(rows, row_words, codes);
}

static void load_keys(const struct attention *job, const struct part *part, int64_t column, int count, floats *keys)
{
    const struct form *form = job->keys;
    words codes[MAX_WIDTH / 4];
    for (int begin = 0; begin < count; begin += LANES) {
        int vector = begin / LANES;
        load_tile(job, part, column, begin, count, 0, form->words, codes);
        unpack_columns(codes, form, keys + (int64_t)vector / PANEL * PANEL * form->width + vector % PANEL, PANEL);
    }
}

static void load_key_values(const struct attention *job, const struct part *part, int64_t column, int count,
                            floats *values)
{
    const struct form *form = job->values;
    words codes[MAX_WIDTH / 4];
    floats columns[MAX_WIDTH];
    int vectors = vectors_of_value(job);
    for (int i = form->width; i < vectors * LANES; i++) columns[i] = (floats){0};
    for (int begin = 0; begin < count; begin += LANES) {
        load_tile(job, part, column, begin, count, job->keys->words, form->words, codes);
        unpack_columns(codes, form, columns, 1);
        for (int vector = 0; vector < vectors; vector++) {
            words tile[LANES];
            UNROLL for (int i = 0; i < LANES; i++) tile[i] = (words)columns[vector * LANES + i];
            transpose(tile);
            floats *own = values + (vector / PANEL * TILE + begin) * PANEL + vector % PANEL;
            UNROLL for (int r = 0; r < LANES; r++) own[r * PANEL] = (floats)tile[r];
        }
    }
}

/* -- tiles: scales ------------------------------------------------------------------------------------------------- */

/* The scales of values are taken in turns of SPAN powers of two, brought to 1 and less: in one turn for all, sums
 * that a query needs could be too small for float32 beside others that it does not attend to. Nearly always there is
 * one turn.
 */
enum { SPAN = 64, NOT_A_NUMBER = 255 };

struct turn {
    int low, high; /* exponent fields of the scales whose columns have their turn, both included */
    int power;     /* their scales are divided by 2**power */
    int all;       /* there is no other turn */
};

INLINE uint32_t scales_at(const struct attention *job, const struct part *part, int64_t column)
{
    uint32_t both;
    const char *scales = job->scales + part->sequence * job->scales_of_sequence + part->head * job->scales_of_head;
    memcpy(&both, scales + column * job->scales_of_token, sizeof both);
    return both;
}

/* The lowest and the highest exponent field of the values' scales, zeros and NaN not counted. */
static void fields_of(const struct attention *job, const struct part *part, int *low, int *high)
{
    *low = NOT_A_NUMBER;
    *high = 0;
    for (int64_t column = part->begin; column < part->end; column++) {
        int field = scales_at(job, part, column) >> 23 & 255;
        int least = field ? field : NOT_A_NUMBER, most = field == NOT_A_NUMBER ? 0 : field;
        *low = *low < least ? *low : least;
        *high = *high > most ? *high : most;
    }
    if (*high == 0) *low = *high = 1;
}

INLINE ints lane_numbers(void)
{
    ints number;
    UNROLL for (int i = 0; i < LANES; i++) number[i] = i;
    return number;
}

/* The tile's scales. Where there are several turns, `left_out` becomes -inf for columns of another, 0 for the rest.
 */
static void load_scales(const struct attention *job, const struct part *part, int64_t column, int count,
                        const struct turn *turn, struct scratch *scratch, floats *left_out)
{
    words both[TILE_VECTORS];
    uint32_t *one = (uint32_t *)both;
    for (int r = 0; r < TILE; r++) one[r] = scales_at(job, part, column + smaller(r, count - 1));
    int half = turn->power / 2;
    floats low = (floats)(all_ints(127 - half) << 23), high = (floats)(all_ints(127 - (turn->power - half)) << 23);
    for (int v = 0; v < TILE_VECTORS; v++) {
        if (!turn->all) {
            ints field = (ints)(both[v] >> 23 & 255);
            ints other = (field < turn->low) | (field > turn->high);
            left_out[v] = chosen_floats(other, all_floats(NO_SCORE), (floats){0});
        }
        scratch->key_scale[v] = (floats)(both[v] << 16);
        scratch->value_scale[v] = (floats)(both[v] & 0xFFFF0000) * low * high;
    }
}

/* -- tiles: masks -------------------------------------------------------------------------------------------------- */

/* `count` values of a mask -> what is added to scores. Gives whether any of them is more than -inf. */
INLINE int load_mask(const char *values, int64_t stride, const int dtype, int count, floats *bias)
{
    const int size = dtype == BOOLEAN ? 1 : dtype == FLOAT32 ? 4 : 2;
    char own[4 * TILE];
    if (stride != size || count < TILE) {
        memset(own, 0, sizeof own);
        if (stride == size) memcpy(own, values, (size_t)count * size);
        else for (int i = 0; i < count; i++) memcpy(own + i * size, values + i * stride, size);
        values = own;
    }
    ints some = {0};
    for (int v = 0; v < TILE_VECTORS; v++) {
        if (dtype == BOOLEAN) {
            few_bytes seen;
            memcpy(&seen, values + v * LANES, sizeof seen);
            ints unseen = (ints)(__builtin_convertvector(seen, words) == 0);
            bias[v] = chosen_floats(unseen, all_floats(NO_SCORE), (floats){0});
        } else {
            bias[v] = load_values(values, v * LANES, dtype);
        }
        some |= ~(ints)(bias[v] == NO_SCORE) & (lane_numbers() + v * LANES < count);
    }
    return largest_lane(-__builtin_convertvector(some, floats)) > 0;
}

static int load_mask_of(const char *values, int64_t stride, int64_t dtype, int count, floats *bias)
{
    switch (dtype) {
    case FLOAT16: return load_mask(values, stride, FLOAT16, count, bias);
    case BFLOAT16: return load_mask(values, stride, BFLOAT16, count, bias);
    case FLOAT32: return load_mask(values, stride, FLOAT32, count, bias);
    default: return load_mask(values, stride, BOOLEAN, count, bias);
    }
}

/* What each query may attend to of the tile. Gives whether that is anything. */
static int look(const struct attention *job, const struct part *part, int64_t column, int count,
                struct scratch *scratch, const floats *left_out)
{
    int some = 0;
    for (int q = 0; q < part->queries; q++) {
        int64_t visible = end_of(job, part, q) - column;
        scratch->visible[q] = visible < 0 ? 0 : smaller_number(visible, count);
        scratch->bias_of[q] = left_out;
        if (scratch->visible[q] == 0) continue;
        if (!job->mask) {
            some = 1;
            continue;
        }
        int64_t token = token_of_query(job, part, q);
        if (q > 0 && job->mask_of_head == 0 && token == token_of_query(job, part, q - 1)) {
            scratch->bias_of[q] = scratch->bias_of[q - 1];
            continue;
        }
        floats *bias = scratch->bias + q * TILE_VECTORS;
        const char *values = job->mask + part->sequence * job->mask_of_sequence +
                             head_of_query(job, part, q) * job->mask_of_head + token * job->mask_of_query +
                             column * job->mask_of_column;
        some |= load_mask_of(values, job->mask_of_column, job->mask_dtype, scratch->visible[q], bias);
        if (left_out) {
            for (int v = 0; v < TILE_VECTORS; v++) {
                bias[v] = chosen_floats(left_out[v] == NO_SCORE, left_out[v], bias[v]);
            }
        }
        scratch->bias_of[q] = bias;
    }
    return some;
}

/* -- tiles: scores, weights, sums ---------------------------------------------------------------------------------- */

/* A query's products -> its weights, the softmax of a tile: what came before is made smaller where the top rises. */
static void weigh(const struct scratch *scratch, const struct state *state, int q, int vectors)
{
    floats *weights = scratch->weights + q * TILE_VECTORS, top = all_floats(NO_SCORE);
    const floats *bias = scratch->bias_of[q];
    int visible = scratch->visible[q];
    for (int v = 0; v < TILE_VECTORS; v++) {
        floats score = weights[v] * (scratch->key_scale[v] * scratch->factor[q]);
        if (bias) score = chosen_floats(bias[v] == NO_SCORE, bias[v], score + bias[v]);
        if (visible < TILE) {
            score = chosen_floats(lane_numbers() + v * LANES < visible, score, all_floats(NO_SCORE));
        }
        top = larger_number(score, top);
        weights[v] = score;
    }
    float before = state->top[q], now = largest_lane(top);
    if (now > before) {
        float less = exponential_of(before - now);
        state->top[q] = now;
        state->totals[q] *= less;
        for (int i = 0; i < vectors; i++) state->sums[(int64_t)q * vectors + i] *= less;
    } else {
        now = before;
    }
    floats from = all_floats(now == NO_SCORE ? 0 : now), total = state->totals[q];
    for (int v = 0; v < TILE_VECTORS; v++) {
        ints unseen = weights[v] == NO_SCORE;
        floats weight = exponential(weights[v] - from);
        total += weight;
        weights[v] = (floats)((ints)(weight * scratch->value_scale[v]) & ~unseen); /* NaN only where attended to */
    }
    state->totals[q] = total;
}

/* Queries times keys: the products of the tile's first `count` columns, some more with them. */
static void multiply_keys(const struct attention *job, const struct part *part, int count, struct scratch *scratch)
{
    int width = job->keys->width;
    for (int panel = 0; panel < divided_up(count, PANEL * LANES); panel++) {
        const floats *keys = scratch->keys + (int64_t)panel * PANEL * width;
        for (int q = 0; q < part->queries; q += AT_ONCE) {
            const float *queries = (const float *)(scratch->queries + (int64_t)q / LANES * width) + q % LANES;
            floats *scores = scratch->weights + q * TILE_VECTORS + panel * PANEL;
            int rows = smaller(AT_ONCE, part->queries - q);
            product(queries, 1, LANES, keys, width, scores, TILE_VECTORS, 0, rows, PANEL);
        }
    }
}

/* Weights times values, onto the sums. */
static void multiply_values(const struct attention *job, const struct part *part, int count,
                            const struct scratch *scratch, const struct state *state)
{
    int vectors = vectors_of_value(job);
    for (int vector = 0; vector < vectors; vector += PANEL) {
        const floats *values = scratch->values + (int64_t)vector * TILE;
        int columns = smaller(PANEL, vectors - vector);
        for (int q = 0; q < part->queries; q += AT_ONCE) {
            const float *weights = (const float *)(scratch->weights + q * TILE_VECTORS);
            floats *sums = state->sums + (int64_t)q * vectors + vector;
            product(weights, TILE, 1, values, count, sums, vectors, 1, smaller(AT_ONCE, part->queries - q), columns);
        }
    }
}

/* -- a tile for a few queries -------------------------------------------------------------------------------------- */

/* With no more than AT_ONCE queries, unpacked codes are used once: they stay in registers. What lanes beyond the
 * queries hold is of no use and does no harm.
 */
enum { SIDE_BY_SIDE = 2 };

INLINE void multiply_codes_of_keys(words codes[SIDE_BY_SIDE][MAX_WIDTH / 4], const struct form *form,
                                   const float *queries, floats *scores, const int bits)
{
    const struct centroids centroids = centroids_of(form);
    floats sum[AT_ONCE][SIDE_BY_SIDE] = {{{0}}};
    for (int i = 0; i < form->width; i += 8, queries += 8 * LANES) {
        floats eight[SIDE_BY_SIDE][8];
        UNROLL for (int j = 0; j < SIDE_BY_SIDE; j++) unpack_eight(codes[j], form, &centroids, i, eight[j], bits);
        UNROLL for (int k = 0; k < 8; k++) {
            UNROLL for (int q = 0; q < AT_ONCE; q++) {
                floats factor = all_floats(queries[k * LANES + q]);
                UNROLL for (int j = 0; j < SIDE_BY_SIDE; j++) sum[q][j] = fused(factor, eight[j][k], sum[q][j]);
            }
        }
    }
    UNROLL for (int q = 0; q < AT_ONCE; q++) {
        UNROLL for (int j = 0; j < SIDE_BY_SIDE; j++) scores[q * TILE_VECTORS + j] = sum[q][j];
    }
}

/* Both `load_keys` and `multiply_keys`. */
static void multiply_few_keys(const struct attention *job, const struct part *part, int64_t column, int count,
                              struct scratch *scratch)
{
    const struct form *form = job->keys;
    const float *queries = (const float *)scratch->queries;
    words codes[SIDE_BY_SIDE][MAX_WIDTH / 4];
    for (int begin = 0; begin < count; begin += SIDE_BY_SIDE * LANES) {
        floats *scores = scratch->weights + begin / LANES;
        for (int j = 0; j < SIDE_BY_SIDE; j++) {
            load_tile(job, part, column, begin + j * LANES, count, 0, form->words, codes[j]);
        }
        switch (form->bits) {
        case 1: multiply_codes_of_keys(codes, form, queries, scores, 1); break;
        case 2: multiply_codes_of_keys(codes, form, queries, scores, 2); break;
        case 3: multiply_codes_of_keys(codes, form, queries, scores, 3); break;
        case 4: multiply_codes_of_keys(codes, form, queries, scores, 4); break;
        default: multiply_codes_of_keys(codes, form, queries, scores, 8);
        }
    }
}

#if VECTOR_BYTES >= 32

/* LANES codes of a row, which begin with a byte -> what they stand for, a channel in each lane. */
INLINE floats unpack_row(const char *row, const struct form *form, const struct centroids *centroids, const int bits)
{
    if (bits == 8) {
        few_bytes code;
        memcpy(&code, row, sizeof code);
        return centroid_of_eight_bits(__builtin_convertvector(code, words));
    }
#if VECTOR_BYTES == 64
    /* To each lane the two bytes in which its code is. */
    uint64_t all = 0;
    memcpy(&all, row, 2 * bits);
    bytes place;
    words shift;
    UNROLL for (int i = 0; i < LANES; i++) {
        for (int k = 0; k < 4; k++) place[4 * i + k] = (uint8_t)(k < 2 ? (i * bits / 8 + k) % 8 : 128);
        shift[i] = i * bits % 8;
    }
    words code = (words)_mm512_shuffle_epi8(_mm512_set1_epi64((long long)all), (__m512i)place);
    code >>= shift;
#else
    uint32_t all = 0;
    memcpy(&all, row, bits);
    words code = (all - (words){0}) >> ((words)lane_numbers() * bits);
#endif
    return centroid_of(centroids, form, code, bits);
}

INLINE void multiply_codes_of_values(const struct attention *job, const char *rows, int count, const float *weights,
                                     floats *sums, const int bits)
{
    const struct form *form = job->values;
    const struct centroids centroids = centroids_of(form);
    const int vectors = vectors_of_value(job), size = LANES * bits / 8;
    for (int vector = 0; vector < vectors; vector += SIDE_BY_SIDE) {
        floats sum[AT_ONCE][SIDE_BY_SIDE];
        const char *row = rows + vector * size;
        UNROLL for (int q = 0; q < AT_ONCE; q++) {
            UNROLL for (int j = 0; j < SIDE_BY_SIDE; j++) sum[q][j] = sums[q * vectors + vector + j];
        }
        for (int k = 0; k < count; k++, row += job->codes_of_token) {
            floats own[SIDE_BY_SIDE];
            if (vector * size % 64 == 0) __builtin_prefetch(row + TILE * job->codes_of_token);
            UNROLL for (int j = 0; j < SIDE_BY_SIDE; j++) own[j] = unpack_row(row + j * size, form, &centroids, bits);
            UNROLL for (int q = 0; q < AT_ONCE; q++) {
                floats weight = all_floats(weights[q * TILE + k]);
                UNROLL for (int j = 0; j < SIDE_BY_SIDE; j++) sum[q][j] = fused(weight, own[j], sum[q][j]);
            }
        }
        UNROLL for (int q = 0; q < AT_ONCE; q++) {
            UNROLL for (int j = 0; j < SIDE_BY_SIDE; j++) sums[q * vectors + vector + j] = sum[q][j];
        }
    }
}

/* Both `load_key_values` and `multiply_values`, for widths of whole pairs of vectors. */
static void multiply_few_values(const struct attention *job, const struct part *part, int64_t column, int count,
                                const struct scratch *scratch, const struct state *state)
{
    const char *rows = codes_at(job, part, column, job->keys->words);
    const float *weights = (const float *)scratch->weights;
    switch (job->values->bits) {
    case 1: multiply_codes_of_values(job, rows, count, weights, state->sums, 1); break;
    case 2: multiply_codes_of_values(job, rows, count, weights, state->sums, 2); break;
    case 3: multiply_codes_of_values(job, rows, count, weights, state->sums, 3); break;
    case 4: multiply_codes_of_values(job, rows, count, weights, state->sums, 4); break;
    default: multiply_codes_of_values(job, rows, count, weights, state->sums, 8);
    }
}

INLINE int takes_few_values(const struct attention *job)
{
    return job->values->width % (SIDE_BY_SIDE * LANES) == 0;
}

#else /* so few codes as a vector has lanes need not begin with a byte */

static void multiply_few_values(const struct attention *job, const struct part *part, int64_t column, int count,
                                const struct scratch *scratch, const struct state *state)
{
    (void)job, (void)part, (void)column, (void)count, (void)scratch, (void)state;
}

INLINE int takes_few_values(const struct attention *job)
{
    (void)job;
    return 0;
}

#endif

/* -- all tiles ----------------------------------------------------------------------------------------------------- */

static void attend_in_turn(const struct attention *job, const struct part *part, const struct turn *turn,
                           struct scratch *scratch, const struct state *state)
{
    floats left_out[TILE_VECTORS];
    int vectors = vectors_of_value(job), few = part->queries <= AT_ONCE;
    for (int64_t column = part->begin; column < part->end; column += TILE) {
        int count = smaller_number(part->end - column, TILE);
        load_scales(job, part, column, count, turn, scratch, left_out);
        if (!look(job, part, column, count, scratch, turn->all ? NULL : left_out)) continue;
        if (few) {
            multiply_few_keys(job, part, column, count, scratch);
        } else {
            load_keys(job, part, column, count, scratch->keys);
            multiply_keys(job, part, count, scratch);
        }
        for (int q = 0; q < part->queries; q++) weigh(scratch, state, q, vectors);
        if (few && takes_few_values(job)) {
            multiply_few_values(job, part, column, count, scratch, state);
        } else {
            load_key_values(job, part, column, count, scratch->values);
            multiply_values(job, part, count, scratch, state);
        }
    }
}

/* -- states -------------------------------------------------------------------------------------------------------- */

/* `into` becomes what it would be, had it gone over the columns of `from` as well. */
static void bring_together(const struct state *into, const struct state *from, int queries, int vectors)
{
    for (int q = 0; q < queries; q++) {
        floats *sums = into->sums + (int64_t)q * vectors, *others = from->sums + (int64_t)q * vectors;
        int empty = sum_of_lanes(into->totals[q]) == 0;
        if (sum_of_lanes(from->totals[q]) == 0) continue;
        float top = empty || from->top[q] > into->top[q] ? from->top[q] : into->top[q];
        float below = empty ? NO_SCORE : into->top[q] - top, other_below = from->top[q] - top;
        float level = into->unit[q] + below * PER_LN2, other_level = from->unit[q] + other_below * PER_LN2;
        float unit = level > other_level ? level : other_level;
        float less = exponential_of((level - unit) / PER_LN2);
        float other_less = exponential_of((other_level - unit) / PER_LN2);
        into->totals[q] = into->totals[q] * exponential_of(below) + from->totals[q] * exponential_of(other_below);
        for (int i = 0; i < vectors; i++) sums[i] = sums[i] * less + others[i] * other_less;
        into->top[q] = top;
        into->unit[q] = unit;
        into->shift[q] = from->shift[q];
    }
}

/* The state of all columns -> out, top and total. */
static void give_out(const struct attention *job, const struct part *part, const struct state *state)
{
    const struct form *form = job->values;
    int64_t levels = part->sequence * job->value_levels_of_sequence + part->head * job->value_levels_of_head;
    const char *spread = job->value_spread + levels, *mean = job->value_mean ? job->value_mean + levels : NULL;
    int vectors = vectors_of_value(job);
    floats columns[MAX_WIDTH];
    for (int begin = 0; begin < part->queries; begin += LANES) {
        int64_t row[LANES];
        floats divisor, half;
        ints alive;
        for (int r = 0; r < LANES; r++) {
            int q = smaller(begin + r, part->queries - 1);
            int64_t head = part->sequence * job->heads * job->group + head_of_query(job, part, q);
            row[r] = head * job->length + token_of_query(job, part, q);
            float total = sum_of_lanes(state->totals[q]);
            job->top[row[r]] = state->top[q] + state->shift[q];
            job->total[row[r]] = total;
            alive[r] = total == 0 ? 0 : -1;
            divisor[r] = total == 0 ? 1 : total;
            half[r] = state->unit[q] / 2;
        }
        floats factor = all_floats(1) / divisor, power = power_of_two(half);
        for (int vector = 0; vector < vectors; vector++) {
            words tile[LANES];
            for (int r = 0; r < LANES; r++) {
                int64_t q = smaller(begin + r, part->queries - 1);
                tile[r] = (words)(state->sums[q * vectors + vector]);
            }
            transpose(tile);
            UNROLL for (int i = 0; i < LANES; i++) columns[vector * LANES + i] = (floats)tile[i] * factor;
        }
        rotate_back(columns, form);
        for (int i = 0; i < form->width; i++) {
            float by, plus = 0;
            memcpy(&by, spread + 4 * i, sizeof by);
            if (mean) memcpy(&plus, mean + 4 * i, sizeof plus);
            floats x = columns[i] * by * power * power + plus;
            columns[i] = (floats)((ints)cut(x, 0x1.fffffep127f) & alive);
        }
        for (int at = 0; at < form->width; at += LANES) {
            int channel = smaller(at, form->width - LANES);
            words tile[LANES];
            UNROLL for (int i = 0; i < LANES; i++) tile[i] = (words)columns[channel + i];
            transpose(tile);
            for (int r = 0; r < LANES; r++) memcpy(job->out + row[r] * form->width + channel, &tile[r], sizeof *tile);
        }
    }
}

/* -- the work ------------------------------------------------------------------------------------------------------ */

static void attend(const struct attention *job, int64_t number, char *memory)
{
    struct scratch scratch;
    struct part part = block_of(job, number, job->splits);
    part.end = end_of(job, &part, part.queries - 1);
    place_scratch(job, memory, &scratch);
    struct state state = scratch.state;
    if (job->splits > 1) place_state(job, job->partial + part.state * state_size(job), &state);
    int low, high, vectors = vectors_of_value(job);
    fields_of(job, &part, &low, &high);
    clear(job, &state, part.queries, (float)(high - 127));
    if (part.begin < part.end) {
        load_queries(job, &part, &scratch, &state);
        for (int first = high; high >= low; high -= SPAN) {
            int last = high - SPAN < low;
            struct turn turn = {last ? 0 : high - SPAN + 1, high == first ? NOT_A_NUMBER : high, high - 127, 0};
            turn.all = high == first && last;
            if (high == first) {
                attend_in_turn(job, &part, &turn, &scratch, &state);
            } else {
                clear(job, &scratch.other, part.queries, (float)turn.power);
                memcpy(scratch.other.shift, state.shift, sizeof(float) * part.queries);
                attend_in_turn(job, &part, &turn, &scratch, &scratch.other);
                bring_together(&state, &scratch.other, part.queries, vectors);
            }
        }
    }
    if (job->splits == 1) give_out(job, &part, &state);
}

static void merge(const struct attention *job, int64_t number, char *memory)
{
    (void)memory;
    struct part part = block_of(job, number, 1);
    int64_t size = state_size(job);
    char *states = job->partial + part.state * size;
    struct state state, other;
    place_state(job, states, &state);
    for (int64_t split = 1; split < job->splits; split++) {
        place_state(job, states + split * size, &other);
        bring_together(&state, &other, part.queries, vectors_of_value(job));
    }
    give_out(job, &part, &state);
}
