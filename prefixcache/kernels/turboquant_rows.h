/* TurboQuant's encoder and decoder, written once and compiled for each kind of processor (VECTOR_BYTES).
 *
 * A row lives in one lane of a vector and its values in one vector after another, the *columns*: so the rotation, the
 * sums and the comparisons are operations between columns, whatever the width, and no lane asks for another. Rows are
 * transposed where they come in and go out. The format, with each operation that rounds, is codecs/turboquant/format.py's.
 *
 * The last tile of a row overlaps the one before where the row is no multiple of it: the same values are computed twice.
 */
#include "turboquant.h"
#include "turboquant_vectors.h"

#define COLUMN floats
#define SCALAR float
#define MIX mix_floats
#define WITH_SEVEN
#include "turboquant_mix.h"

/* Unsigned, so that what wraps between two sums comes back. */
#define COLUMN halves
#define SCALAR uint16_t
#define MIX mix_halves
#include "turboquant_mix.h"

INLINE int smaller(int a, int b)
{
    return a < b ? a : b;
}

/* -- codes as words in columns ------------------------------------------------------------------------------------- */

/* Up to LANES words; the caller's count is seldom a constant. */
INLINE void copy_words(void *to, const void *from, int count)
{
    char *target = to;
    const char *source = from;
    for (; count >= 4; count -= 4, source += 16, target += 16) memcpy(target, source, 16);
    for (; count > 0; count--, source += 4, target += 4) memcpy(target, source, 4);
}

/* Words of LANES rows -> a column each. */
INLINE void load_codes(const char *const *rows, int count, words *columns)
{
    if (count < LANES) {
        words tile[LANES] = {{0}};
        for (int r = 0; r < LANES; r++) copy_words(&tile[r], rows[r], count);
        transpose(tile);
        memcpy(columns, tile, count * sizeof *tile);
        return;
    }
    for (int begin = 0; begin < count; begin += LANES) {
        int at = smaller(begin, count - LANES);
        words tile[LANES];
        UNROLL for (int r = 0; r < LANES; r++) memcpy(&tile[r], rows[r] + 4 * at, sizeof *tile);
        transpose(tile);
        UNROLL for (int r = 0; r < LANES; r++) columns[at + r] = tile[r];
    }
}

/* A column for each word -> the words of LANES rows. */
INLINE void store_codes(const words *columns, int count, char *const *rows)
{
    if (count < LANES) {
        words tile[LANES] = {{0}};
        memcpy(tile, columns, count * sizeof *tile);
        transpose(tile);
        for (int r = 0; r < LANES; r++) copy_words(rows[r], &tile[r], count);
        return;
    }
    for (int begin = 0; begin < count; begin += LANES) {
        int at = smaller(begin, count - LANES);
        words tile[LANES];
        UNROLL for (int r = 0; r < LANES; r++) tile[r] = columns[at + r];
        transpose(tile);
        UNROLL for (int r = 0; r < LANES; r++) memcpy(rows[r] + 4 * at, &tile[r], sizeof *tile);
    }
}

/* -- encoding: load, level ----------------------------------------------------------------------------------------- */

/* LANES rows at a time; what one of them is read from and written to. */
struct encoded {
    const char *values[LANES];
    const char *mean[LANES], *weight[LANES]; /* NULL: not levelled */
    char *codes[LANES];
    char *scale[LANES];
};

INLINE floats load_values(const char *row, int at, const int dtype)
{
    floats values;
    few_halves bits;
    if (dtype == FLOAT32) {
        memcpy(&values, row + 4 * at, sizeof values);
        return values;
    }
    memcpy(&bits, row + 2 * at, sizeof bits);
    if (dtype == FLOAT16) return from_float16(bits);
    return (floats)(__builtin_convertvector(bits, words) << 16);
}

INLINE floats load_floats(const char *row, int at)
{
    return load_values(row, at, FLOAT32);
}

/* Rows -> columns, levelled; gives the largest magnitude of each row, as the bits of a float. */
INLINE ints load_rows(const struct encoded *rows, int width, const int dtype, const int levelled, floats *columns)
{
    ints top = {0};
    for (int begin = 0; begin < width; begin += LANES) {
        int at = smaller(begin, width - LANES);
        words tile[LANES];
        UNROLL for (int r = 0; r < LANES; r++) {
            floats x = load_values(rows->values[r], at, dtype);
            if (levelled) {
                x -= load_floats(rows->mean[r], at);
                x *= load_floats(rows->weight[r], at);
            }
            tile[r] = (words)x;
        }
        transpose(tile);
        UNROLL for (int i = 0; i < LANES; i++) {
            top = larger(top, (ints)(tile[i] & MAGNITUDE));
            columns[at + i] = (floats)tile[i];
        }
    }
    return top;
}

static ints load_rows_of(const struct encoded *rows, int width, int dtype, floats *columns)
{
    int levelled = rows->mean[0] != NULL;
    switch (2 * dtype + levelled) {
    case 2 * FLOAT16: return load_rows(rows, width, FLOAT16, 0, columns);
    case 2 * FLOAT16 + 1: return load_rows(rows, width, FLOAT16, 1, columns);
    case 2 * BFLOAT16: return load_rows(rows, width, BFLOAT16, 0, columns);
    case 2 * BFLOAT16 + 1: return load_rows(rows, width, BFLOAT16, 1, columns);
    case 2 * FLOAT32: return load_rows(rows, width, FLOAT32, 0, columns);
    default: return load_rows(rows, width, FLOAT32, 1, columns);
    }
}

/* -- encoding: size, rotation -------------------------------------------------------------------------------------- */

/* Brings each row's largest value to [2, 4), drops what is too small beside it, and makes the first round's sign
 * flips. Rows that aren't alive become zeros. Gives the sum of squares, in the format's order: the upper half onto the
 * lower half.
 */
INLINE floats normalise(floats *columns, const struct form *form, ints exponent, ints alive)
{
    ints least = (larger(exponent, all_ints(101)) - 100) << 23;
    floats power = (floats)((255 - chosen(alive, exponent, all_ints(128))) << 23);
    floats sums[MAX_WIDTH / 2];
    int count = form->width / 2;
    for (int i = 0; i < form->width; i++) {
        ints bits = (ints)columns[i];
        ints kept = ((bits & MAGNITUDE) >= least) & alive;
        floats x = (floats)(bits & kept) * power;
        floats square = x * x;
        if (i < count) sums[i] = square;
        else sums[i - count] += square;
        columns[i] = (floats)((words)x ^ form->flip[0][i]);
    }
    while (count > 1) {
        int half = count / 2;
        for (int i = 0; i < half; i++) sums[i] += sums[half + i];
        if (count % 2) sums[half] = sums[count - 1];
        count = half + count % 2;
    }
    return sums[0];
}

INLINE void rotate(floats *columns, const struct form *form)
{
    mix_floats(columns, form);
    for (int turn = 1; turn < form->rounds; turn++) {
        for (int i = 0; i < form->width; i++) columns[i] = (floats)((words)columns[i] ^ form->flip[turn][i]);
        mix_floats(columns, form);
    }
}

/* -- encoding: quantise, pack -------------------------------------------------------------------------------------- */

/* Half steps of the grid -> the index of the magnitude, four values of a row in each 32-bit lane. */
INLINE bytes index_of(bytes half_steps, const struct form *form, const int bits)
{
    /* Signed bytes, because processors before AVX-512 compare no others. */
    chars value = (chars)(half_steps ^ 0x80);
    bytes index = {0};
    const int borders = (1 << (bits - 1)) - 1;
    UNROLL for (int k = 0; k < borders; k++) {
        int8_t below = (int8_t)(form->border[k] - 129);
        index -= (bytes)(value > below);
    }
    return index;
}

/* The sum of the squares of the four bytes of each lane. */
INLINE words squared(bytes magnitude)
{
    halves even = (halves)magnitude & 0xFF, odd = (halves)magnitude >> 8;
    halves pairs = even * even + odd * odd;
    return ((words)pairs & 0xFFFF) + ((words)pairs >> 16);
}

/* Four codes of a row, a byte each -> 4 * bits bits. */
INLINE words joined(words codes, const int bits)
{
    if (bits == 8) return codes;
    const uint32_t pair = (1u << (2 * bits)) - 1;
    codes = (codes | codes >> (8 - bits)) & (pair | pair << 16);
    return (codes | codes >> (16 - 2 * bits)) & (uint32_t)((1ull << (4 * bits)) - 1);
}

/* Rotated columns, and how many half steps of the grid 1 is -> words of codes in columns. Gives cc. */
INLINE words quantise(const floats *y, const struct form *form, floats half_steps, words *packed, const int bits)
{
    words squares = {0}, word = {0};
    int filled = 0;
    for (int i = 0; i < form->width; i += 4) {
        words steps = {0}, negative = {0};
        UNROLL for (int k = 0; k < 4; k++) {
            floats a = (floats)((words)y[i + k] & MAGNITUDE) * half_steps;
            words floor = (words)__builtin_convertvector(a, ints);
            /* Far beyond the last border is as good as 255. */
            if (bits == 8) floor = (words)chosen((ints)floor > 253, all_ints(127), (ints)((floor + 1) >> 1));
            else floor = (floor | (words)((ints)floor > 255)) & 255;
            steps |= floor << (8 * k);
            negative |= (words)(y[i + k] < 0) & (0xFFu << (8 * k));
        }
        bytes index, code, magnitude;
        if (bits == 8) {
            index = (bytes)steps;
            magnitude = index;
            code = ((index ^ (bytes)negative) - (bytes)negative) + 128;
        } else {
            index = index_of((bytes)steps, form, bits);
            magnitude = looked_up(form->magnitude, index, 1 << (bits - 1));
            code = (index + (uint8_t)(1 << (bits - 1))) ^ ((bytes)negative & (uint8_t)((1 << bits) - 1));
        }
        squares += squared(magnitude);
        words four = joined((words)code, bits);
        word |= four << filled;
        filled += 4 * bits;
        if (filled >= 32) {
            *packed++ = word;
            filled -= 32;
            word = filled ? four >> (4 * bits - filled) : (words){0};
        }
    }
    if (filled) *packed = word;
    return squares;
}

static words quantise_to(const floats *y, const struct form *form, floats half_steps, words *packed)
{
    switch (form->bits) {
    case 1: return quantise(y, form, half_steps, packed, 1);
    case 2: return quantise(y, form, half_steps, packed, 2);
    case 3: return quantise(y, form, half_steps, packed, 3);
    case 4: return quantise(y, form, half_steps, packed, 4);
    default: return quantise(y, form, half_steps, packed, 8);
    }
}

/* bfloat16 bits of value * 2**power: 0 below the normal numbers, at most the largest. */
INLINE ints scale_of(floats value, ints power)
{
    ints bits = (ints)rounded_to_bfloat16(value) + (power << 7);
    bits = chosen(bits > all_ints(0x7F7F), all_ints(0x7F7F), bits);
    return bits & (bits >= all_ints(0x80));
}

static void encode_block(const struct form *form, const struct encoded *rows, int dtype)
{
    floats columns[MAX_WIDTH];
    words packed[MAX_WIDTH / 4];
    floats one = all_floats(1);

    ints exponent = load_rows_of(rows, form->width, dtype, columns) >> 23;
    ints alive = (exponent > 0) & (exponent < 255);
    floats ss = chosen_floats(alive, normalise(columns, form, exponent, alive), one);
    rotate(columns, form);

    floats factor = form->per_length / roots(ss);
    if (form->per_peak != 0) {
        ints peak = {0};
        for (int i = 0; i < form->width; i++) peak = larger(peak, (ints)((words)columns[i] & MAGNITUDE));
        factor += form->per_peak / chosen_floats(alive, (floats)peak, one);
    }
    ints squares = (ints)quantise_to(columns, form, factor + factor, packed);

    floats cc = chosen_floats(alive, __builtin_convertvector(squares, floats), one);
    ints scale = scale_of(roots(ss / cc), exponent - 128 + form->shift);
    scale &= exponent > 0;
    words coded = (words)(alive & (scale > 0));
    scale = chosen(exponent == 255, all_ints(0x7FC0), scale);

    for (int i = 0; i < form->words; i++) packed[i] &= coded;
    store_codes(packed, form->words, rows->codes);
    for (int r = 0; r < LANES; r++) {
        uint16_t bits = (uint16_t)scale[r];
        memcpy(rows->scale[r], &bits, sizeof bits);
    }
}

static void encode_rows(const struct job *job, int64_t first, int64_t last)
{
    struct encoded rows;
    char unwanted[MAX_WIDTH], unwanted_scale[2];
    int levelled = job->mean != NULL;
    for (; first < last; first += LANES) {
        for (int r = 0; r < LANES; r++) {
            /* Lanes without a row of their own encode the last one once more, to nowhere. */
            int spare = first + r >= last;
            int64_t row = spare ? last - 1 : first + r;
            int64_t head = row / job->tokens, token = row % job->tokens;
            int64_t levels = head * job->levels_of_head;
            rows.values[r] = job->rows + token * job->row_of_token + head * job->row_of_head;
            rows.mean[r] = levelled ? job->mean + levels : NULL;
            rows.weight[r] = levelled ? job->factor + levels : NULL;
            rows.codes[r] = spare ? unwanted : job->codes + token * job->codes_of_token + head * job->codes_of_head;
            rows.scale[r] = spare ? unwanted_scale
                                  : job->scales + token * job->scale_of_token + head * job->scale_of_head;
        }
        encode_block(job->form, &rows, (int)job->dtype);
    }
}

/* -- decoding: unpack ---------------------------------------------------------------------------------------------- */

/* Rows are decoded 2 * LANES at a time, because that is how many 16-bit integers a vector has. */
struct decoded {
    const char *codes[2 * LANES];
    float scale[2 * LANES];
    const char *mean[2 * LANES], *spread[2 * LANES];
    char *values[2 * LANES];
};

/* Columns of 32 bits of LANES rows and of the LANES rows after -> columns of 16 bits: row r in 16-bit lane 2 * r, row
 * LANES + r in the one beside it.
 */
INLINE void pair_rows(words rows, words next_rows, halves *low, halves *high)
{
    *low = (halves)((rows & 0xFFFF) | next_rows << 16);
    *high = (halves)(rows >> 16 | (next_rows & 0xFFFF0000));
}

/* Columns of 16 bits of codes -> what each code stands for, columns of int16. */
INLINE void centroids_of_halves(const halves *codes, const struct form *form, halves *y, const int bits)
{
    const uint16_t mask = (uint16_t)((1 << bits) - 1);
    for (int i = 0; i < form->width; i += 4) {
        /* Four codes. Bytes side by side are looked up together: of the first and third, of the second and fourth. */
        int at = i * bits / 16, offset = i * bits % 16;
        halves four = codes[at] >> offset;
        if (offset + 4 * bits > 16) four |= codes[at + 1] << (16 - offset);
        UNROLL for (int k = 0; k < 2; k++) {
            halves two = (four & mask) | ((four << (8 - 2 * bits)) & (uint16_t)(mask << 8));
            shorts both = (shorts)looked_up(form->centroid, (bytes)two, 1 << bits);
            y[i + k] = (halves)((shorts)((halves)both << 8) >> 8);
            y[i + k + 2] = (halves)(both >> 8);
            four >>= bits;
        }
    }
}

INLINE shorts centroid_of_byte(halves code)
{
    shorts c = (shorts)code - 128;
    return c - (c < -127); /* a comparison that holds is -1 */
}

static void unpack_halves(const halves *codes, const struct form *form, halves *y)
{
    switch (form->bits) {
    case 1: centroids_of_halves(codes, form, y, 1); break;
    case 2: centroids_of_halves(codes, form, y, 2); break;
    case 3: centroids_of_halves(codes, form, y, 3); break;
    case 4: centroids_of_halves(codes, form, y, 4); break;
    default:
        for (int i = 0; i < form->width / 2; i++) {
            y[2 * i] = (halves)centroid_of_byte(codes[i] & 0xFF);
            y[2 * i + 1] = (halves)centroid_of_byte(codes[i] >> 8);
        }
    }
}

/* Columns of words -> what each code stands for, columns of float32. */
static void unpack_floats(const words *codes, const struct form *form, floats *y)
{
    int bits = form->bits;
    uint32_t mask = (1u << bits) - 1;
    for (int i = 0; i < form->width; i++) {
        int at = i * bits / 32, offset = i * bits % 32;
        words code = codes[at] >> offset;
        if (offset + bits > 32) code |= codes[at + 1] << (32 - offset);
        code &= mask;
        ints c;
        if (bits == 8) {
            c = (ints)code - 128;
            c -= c < -127;
        } else {
            c = (ints)((words)looked_up(form->centroid, (bytes)code, 1 << bits) << 24) >> 24;
        }
        y[i] = __builtin_convertvector(c, floats);
    }
}

/* -- decoding: rotate back, to rows -------------------------------------------------------------------------------- */

/* Integers of 16 bits all the way. y: int16 (2 * LANES, width). */
static void unmix_narrow(const struct form *form, const struct decoded *rows, int16_t *y)
{
    words low[MAX_WIDTH / 4], high[MAX_WIDTH / 4];
    halves codes[MAX_WIDTH / 2], columns[MAX_WIDTH];
    load_codes(rows->codes, form->words, low);
    load_codes(rows->codes + LANES, form->words, high);
    for (int i = 0; i < form->words; i++) pair_rows(low[i], high[i], &codes[2 * i], &codes[2 * i + 1]);
    unpack_halves(codes, form, columns);
    mix_halves(columns, form);
    if (form->rounds == 2) {
        for (int i = 0; i < form->width; i++) {
            uint16_t negative = form->flip[1][i] ? 0xFFFF : 0;
            columns[i] = (columns[i] ^ negative) - negative;
        }
        mix_halves(columns, form);
    }
    for (int begin = 0; begin < form->width; begin += 2 * LANES) {
        int at = smaller(begin, form->width - 2 * LANES);
        words tile[LANES], next_tile[LANES];
        UNROLL for (int i = 0; i < LANES; i++) {
            words even = (words)columns[at + 2 * i], odd = (words)columns[at + 2 * i + 1];
            tile[i] = (even & 0xFFFF) | odd << 16;
            next_tile[i] = even >> 16 | (odd & 0xFFFF0000);
        }
        transpose(tile);
        UNROLL for (int r = 0; r < LANES; r++) memcpy(&y[r * form->width + at], &tile[r], sizeof *tile);
        transpose(next_tile);
        UNROLL for (int r = 0; r < LANES; r++) memcpy(&y[(LANES + r) * form->width + at], &next_tile[r], sizeof *tile);
    }
}

/* The same for LANES rows, in float32: for widths with a table, and where int16 is too small. */
static void unmix_wide(const struct form *form, const char *const *rows, float *y)
{
    words codes[MAX_WIDTH / 4];
    floats columns[MAX_WIDTH];
    load_codes(rows, form->words, codes);
    unpack_floats(codes, form, columns);
    mix_floats(columns, form);
    if (form->rounds == 2) {
        /* Integers have no -0; adding +0 takes it away where the first round counts as one of integers. */
        floats zero = form->first_narrow ? all_floats(0.0f) : all_floats(-0.0f);
        for (int i = 0; i < form->width; i++) columns[i] = (floats)((words)columns[i] ^ form->flip[1][i]) + zero;
        mix_floats(columns, form);
    }
    for (int begin = 0; begin < form->width; begin += LANES) {
        int at = smaller(begin, form->width - LANES);
        words tile[LANES];
        UNROLL for (int i = 0; i < LANES; i++) tile[i] = (words)columns[at + i];
        transpose(tile);
        UNROLL for (int r = 0; r < LANES; r++) memcpy(&y[r * form->width + at], &tile[r], sizeof *tile);
    }
}

/* -- decoding: values ---------------------------------------------------------------------------------------------- */

/* One row of y, int16 or float32 -> values. */
INLINE void finish(const void *y, const int narrow, const struct decoded *rows, int r, int width, const int dtype)
{
    const float scale = rows->scale[r];
    const char *mean = rows->mean[r], *spread = rows->spread[r];
    char *values = rows->values[r];
    for (int begin = 0; begin < width; begin += LANES) {
        int at = smaller(begin, width - LANES);
        floats x;
        if (narrow) {
            few_shorts whole;
            memcpy(&whole, (const int16_t *)y + at, sizeof whole);
            x = __builtin_convertvector(__builtin_convertvector(whole, ints), floats);
        } else {
            memcpy(&x, (const float *)y + at, sizeof x);
        }
        x *= load_floats(spread, at);
        x *= scale;
        x += load_floats(mean, at);
        if (dtype == FLOAT32) {
            x = cut(x, 0x1.fffffep127f);
            memcpy(values + 4 * at, &x, sizeof x);
        } else {
            few_halves bits;
            if (dtype == FLOAT16) bits = to_float16(cut(x, 65504.0f));
            else bits = __builtin_convertvector(rounded_to_bfloat16(cut(x, 0x1.fep127f)), few_halves);
            memcpy(values + 2 * at, &bits, sizeof bits);
        }
    }
}

/* `count` rows of y, from row `first` of the block on. */
INLINE void finish_all(const void *y, const int narrow, const struct decoded *rows, int first, int count, int width,
                       int dtype)
{
    for (int r = 0; r < count; r++) {
        const void *row = (const char *)y + r * width * (narrow ? 2 : 4);
        switch (dtype) {
        case FLOAT16: finish(row, narrow, rows, first + r, width, FLOAT16); break;
        case BFLOAT16: finish(row, narrow, rows, first + r, width, BFLOAT16); break;
        default: finish(row, narrow, rows, first + r, width, FLOAT32);
        }
    }
}

static void decode_block_narrow(const struct form *form, const struct decoded *rows, int dtype)
{
    int16_t y[2 * LANES * MAX_WIDTH];
    unmix_narrow(form, rows, y);
    finish_all(y, 1, rows, 0, 2 * LANES, form->width, dtype);
}

static void decode_block_wide(const struct form *form, const struct decoded *rows, int dtype)
{
    float y[LANES * MAX_WIDTH];
    for (int first = 0; first < 2 * LANES; first += LANES) {
        unmix_wide(form, rows->codes + first, y);
        finish_all(y, 0, rows, first, LANES, form->width, dtype);
    }
}

static void decode_rows(const struct job *job, int64_t first, int64_t last)
{
    static const float no_mean[MAX_WIDTH];
    struct decoded rows;
    char unwanted[4 * MAX_WIDTH];
    for (; first < last; first += 2 * LANES) {
        for (int r = 0; r < 2 * LANES; r++) {
            int spare = first + r >= last;
            int64_t row = spare ? last - 1 : first + r;
            int64_t head = row / job->tokens, token = row % job->tokens;
            uint16_t scale;
            memcpy(&scale, job->scales + token * job->scale_of_token + head * job->scale_of_head, sizeof scale);
            uint32_t bits = (uint32_t)scale << 16;
            memcpy(&rows.scale[r], &bits, sizeof bits);
            rows.codes[r] = job->codes + token * job->codes_of_token + head * job->codes_of_head;
            rows.mean[r] = job->mean ? job->mean + head * job->levels_of_head : (const char *)no_mean;
            rows.spread[r] = job->factor + head * job->levels_of_head;
            rows.values[r] = spare ? unwanted : job->rows + token * job->row_of_token + head * job->row_of_head;
        }
        if (job->form->narrow) decode_block_narrow(job->form, &rows, (int)job->dtype);
        else decode_block_wide(job->form, &rows, (int)job->dtype);
    }
}
