/* The entropy coder of transform coding, row by row: what prefixcache/codecs/transform/entropy.py does, bit for bit. Called by
 * c_entropy.py there through ctypes.
 *
 * Shapes, dtypes, strides and classes are checked in Python, before a pointer comes in. Heads and words are anyone's:
 * no word is read but between the first and the last of its row, whatever they say. Nothing is allocated, and nothing is
 * kept between calls, so that any number of threads may call at once.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "The words of a row are little-endian; NumPy serves on other machines."
#endif

#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* As tables.py and entropy.py there have them. */
enum {
    PRECISION = 12,
    TOTAL = 1 << PRECISION,
    CLASSES = 61,
    DIRECT = 8,
    ESCAPE = DIRECT + 4 * 12,
    SYMBOLS = ESCAPE + 1,
    MOST = (1 << 15) - 1,
    GAINS = 15,
    LEAST = 1 << 16,
    WORD_BITS = 16,
    MOST_WORDS = (1 << 12) - 1
};
#define DEAD_ZONE 0.42f

enum {
    LANES = 4,
    AT_ONCE = 4,                       /* rows that are decoded side by side, half as fast again as one by one */
    GAIN_LANES = 16,                   /* the gains, and one more whose cost nobody reads */
    SHIFTED = CLASSES + GAIN_LANES - 1 /* classes, each as often as class + gain leads there */
};

/* Vectors that every processor has. */
typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));

/* How a symbol of a class is coded. One that its class has no slots for is coded as the escape is. */
struct code {
    uint64_t reciprocal; /* ceil(2**44 / frequency): state * reciprocal >> 44 is state / frequency where no word is due */
    uint16_t frequency, start;
    uint16_t least;     /* the magnitude whose extra bits are all zero */
    uint16_t open_bits; /* extra bits and the sign */
};

enum { RECIPROCAL_BITS = 44 };

/* How a symbol of a class is decoded. */
struct span {
    uint16_t frequency, start;
    uint32_t open_bits; /* extra bits and the sign */
    uint32_t mask;      /* 2**open_bits - 1 */
    float least;        /* the value, or that whose extra bits are all zero */
};

/* Strides are in bytes; the last axis of each array is contiguous. */
struct packing {
    const char *values; /* float32 (rows, components), in steps */
    int64_t values_of_row;
    char *decoded; /* float32 (rows, components), what a decoder will give; may be `values` */
    int64_t decoded_of_row;
    uint16_t *heads;
    const int32_t *classes;    /* (components) */
    const struct code *codes;  /* (SHIFTED, SYMBOLS) */
    const int32_t *costs;      /* (SYMBOLS, SHIFTED): what a symbol costs more than 0 does */
    const int32_t *cost_of_0s; /* (GAIN_LANES): of a row of zeros */
    const float *points;       /* (SHIFTED, DIRECT): what small magnitudes are decoded to */
    int64_t components;
};

struct unpacking {
    char *values; /* float32 (rows, components), in steps */
    int64_t values_of_row;
    const uint16_t *heads;
    const int64_t *first; /* where each row's words begin */
    const char *words;    /* aligned or not */
    int64_t words_count;
    const int32_t *classes;
    const uint8_t *symbols;   /* (SHIFTED, TOTAL) */
    const struct span *spans; /* (SHIFTED, SYMBOLS) */
    const float *points;      /* (SHIFTED, DIRECT) */
    int64_t components;
};

/* What is wrong with a row's words. */
enum { SOUND, MISPLACED, TOO_FEW, TOO_MANY };

/* So that the Python side can tell that it mirrors the same structures. */
int transform_size_of_packing(void)
{
    return (int)sizeof(struct packing);
}

int transform_size_of_unpacking(void)
{
    return (int)sizeof(struct unpacking);
}

int transform_size_of_code(void)
{
    return (int)sizeof(struct code);
}

int transform_size_of_span(void)
{
    return (int)sizeof(struct span);
}

INLINE uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* -- from values to words --------------------------------------------------------------------------------------------- */

/* Values -> whole steps: bit 0 has the sign, bits 1 to 15 the magnitude, the bits from 16 on the symbol. */
INLINE words steps_of(floats values)
{
    floats magnitude = (floats)((words)values & 0x7FFFFFFF) + DEAD_ZONE;
    words number = (words)(magnitude == magnitude), within = (words)(magnitude < (float)MOST); /* NaN is 0 */
    magnitude = (floats)(((words)magnitude & within) | ((words)((floats){0} + (float)MOST) & ~within & number));
    ints whole = __builtin_convertvector(magnitude, ints);
    /* The exponent and two bits behind it count the symbols from 8 on, which are 512 less. */
    words large = ((words)__builtin_convertvector(whole, floats) >> 21) - 512, direct = (words)(whole < DIRECT);
    words symbol = ((words)whole & direct) | (large & ~direct);
    return symbol << 16 | (words)whole << 1 | ((words)values >> 31 & (words)(whole > 0));
}

INLINE uint32_t step_at(const char *steps, int64_t i)
{
    uint32_t step;
    memcpy(&step, steps + 4 * i, sizeof step);
    return step;
}

/* Values of a row -> whole steps. How many there are but for zeros at the end, or a few more. */
INLINE int64_t quantise(const char *values, char *steps, int64_t components)
{
    int64_t used = 0, at = 0, whole = components - components % LANES;
    for (; at < whole; at += LANES) {
        floats value;
        memcpy(&value, values + 4 * at, sizeof value);
        words step = steps_of(value);
        memcpy(steps + 4 * at, &step, sizeof step);
        if (step[0] | step[1] | step[2] | step[3]) used = at + LANES;
    }
    for (; at < components; at++) {
        floats value = {0};
        memcpy(&value, values + 4 * at, sizeof(float));
        words step = steps_of(value);
        memcpy(steps + 4 * at, &step, sizeof(uint32_t));
        if (step[0]) used = at + 1;
    }
    return used;
}

/* The gain that makes a row cost least; of those that do, the lowest. */
INLINE int gain_of(const struct packing *job, const char *steps, int64_t used)
{
    ints part[GAIN_LANES / LANES], more[GAIN_LANES / LANES];
    int32_t cost[GAIN_LANES];
    memcpy(part, job->cost_of_0s, sizeof part);
    for (int64_t i = 0; i < used; i++) {
        memcpy(more, job->costs + (step_at(steps, i) >> 16) * SHIFTED + job->classes[i], sizeof more);
        UNROLL for (int j = 0; j < GAIN_LANES / LANES; j++) part[j] += more[j];
    }
    memcpy(cost, part, sizeof cost);
    int best = 0;
    for (int gain = 1; gain < GAINS; gain++)
        if (cost[gain] < cost[best]) best = gain;
    return best;
}

/* A word out of the state where that is too large. Without a branch, which would be foreseen half the time: otherwise what is
 * written here will be written over.
 */
INLINE uint64_t make_room(uint64_t state, int full, uint16_t **end)
{
    (*end)[-1] = (uint16_t)state;
    *end -= full;
    return full ? state >> WORD_BITS : state;
}

/* Steps of one row -> its words, which end at `end`, and decoded values in place of the steps. Where the words begin. */
INLINE uint16_t *pack_row(const struct packing *packing, char *steps, int gain, uint16_t *end)
{
    const struct packing copy = *packing, *job = &copy;
    uint64_t state = LEAST;
    for (int64_t i = job->components - 1; i >= 0; i--) {
        uint32_t step = step_at(steps, i), sized = step & 0xFFFF, symbol = step >> 16;
        int64_t class = job->classes[i] + gain;
        const struct code *code = job->codes + class * SYMBOLS + symbol;
        state = make_room(state, state >> (32 - code->open_bits) > 0, &end);
        state = state << code->open_bits | (sized - 2u * code->least);
        state = make_room(state, state >> (32 - PRECISION) >= code->frequency, &end);
        uint64_t quotient = state * code->reciprocal >> RECIPROCAL_BITS;
        state += quotient * (TOTAL - code->frequency) + code->start;
        uint32_t point = bits_of(job->points[class * DIRECT + symbol % DIRECT]);
        uint32_t bits = (symbol < DIRECT ? point : bits_of((float)(int32_t)(sized >> 1))) | step << 31;
        memcpy(steps + 4 * i, &bits, sizeof bits);
    }
    *--end = (uint16_t)state;
    *--end = (uint16_t)(state >> WORD_BITS);
    return end;
}

/* Rows [first, last), their words one behind the other from `words` on: how many there are. There is room for as many as
 * the rows may have, 4095 each, and behind it for the most that a row comes to, 2 to the component and 2.
 */
int64_t transform_pack(const struct packing *job, int64_t first, int64_t last, uint16_t *words)
{
    uint16_t *at = words;
    for (int64_t row = first; row < last; row++) {
        char *decoded = job->decoded + row * job->decoded_of_row;
        int64_t used = quantise(job->values + row * job->values_of_row, decoded, job->components);
        if (!used) {
            job->heads[row] = GAINS / 2 << PRECISION;
            continue;
        }
        int gain = gain_of(job, decoded, used);
        uint16_t *end = at + 2 * job->components + 2, *begin = pack_row(job, decoded, gain, end);
        if (end - begin > MOST_WORDS) {
            job->heads[row] = 0xFFFF;
            memset(decoded, 0, 4 * (size_t)job->components);
            continue;
        }
        job->heads[row] = (uint16_t)(gain << PRECISION | (end - begin));
        memmove(at, begin, (size_t)(end - begin) * sizeof *at);
        at += end - begin;
    }
    return at - words;
}

/* -- from words to values --------------------------------------------------------------------------------------------- */

struct reader {
    uint32_t state;
    int gain;
    int64_t at, last; /* the next word, and the row's last one; beyond it that one is read again */
    char *values;
};

INLINE uint32_t word_at(const struct unpacking *job, int64_t at)
{
    uint16_t word;
    memcpy(&word, job->words + 2 * at, sizeof word);
    return word;
}

/* A word behind a state that is too small. Without a branch, too: a word is read either way, always one of the row's. */
INLINE uint32_t refilled(const struct unpacking *job, struct reader *row, uint32_t state)
{
    uint32_t word = word_at(job, row->at < row->last ? row->at : row->last);
    row->at += state < LEAST;
    return state < LEAST ? state << WORD_BITS | word : state;
}

INLINE void unpack_one(const struct unpacking *job, struct reader *row, int64_t i)
{
    int64_t class = job->classes[i] + row->gain;
    uint32_t state = row->state, slot = state & (TOTAL - 1), symbol = job->symbols[class * TOTAL + slot];
    const struct span *span = job->spans + class * SYMBOLS + symbol;
    state = span->frequency * (state >> PRECISION) + slot - span->start;
    state = refilled(job, row, state);
    uint32_t open = state & span->mask, extra = open >> 1;
    row->state = refilled(job, row, state >> span->open_bits);
    float value = span->least + (float)(int32_t)extra;
    if (symbol == ESCAPE && extra < DIRECT) value = job->points[class * DIRECT + extra];
    uint32_t bits = bits_of(value) | open << 31;
    memcpy(row->values + 4 * i, &bits, sizeof bits);
}

/* `rows` of them side by side: a row's next component waits for its last one, but not for other rows. */
INLINE int unpack_rows(const struct unpacking *unpacking, const struct reader *readers, const int rows)
{
    const struct unpacking job = *unpacking; /* no value that is stored changes these */
    struct reader reader[AT_ONCE];
    UNROLL for (int row = 0; row < rows; row++) reader[row] = readers[row];
    for (int64_t i = 0; i < job.components; i++)
        UNROLL for (int row = 0; row < rows; row++) unpack_one(&job, &reader[row], i);
    UNROLL for (int row = 0; row < rows; row++) {
        if (reader[row].at > reader[row].last + 1) return TOO_FEW;
        if (reader[row].at <= reader[row].last || reader[row].state != LEAST) return TOO_MANY;
    }
    return SOUND;
}

/* Rows [first, last). SOUND, or what is wrong with one: then what the values are says nothing. */
int transform_unpack(const struct unpacking *job, int64_t first, int64_t last)
{
    struct reader reader[AT_ONCE];
    int waiting = 0, wrong = SOUND;
    for (int64_t row = first; row < last; row++) {
        char *values = job->values + row * job->values_of_row;
        int gain = job->heads[row] >> PRECISION;
        int64_t count = job->heads[row] & MOST_WORDS, at = job->first[row];
        if (gain == GAINS || !count) {
            memset(values, 0, 4 * (size_t)job->components);
            continue;
        }
        if (count < 2 || at < 0 || at > job->words_count - count) return MISPLACED;
        struct reader *next = reader + waiting++;
        next->gain = gain;
        next->state = word_at(job, at) << WORD_BITS | word_at(job, at + 1);
        next->at = at + 2;
        next->last = at + count - 1;
        next->values = values;
        if (waiting < AT_ONCE) continue;
        if ((wrong = unpack_rows(job, reader, AT_ONCE))) return wrong;
        waiting = 0;
    }
    for (int row = 0; row < waiting; row++)
        if ((wrong = unpack_rows(job, reader + row, 1))) return wrong;
    return SOUND;
}
