/* Where the rows of a head lie: the mean of each channel, how far rows are from it, and how large each row is beside that.
 *
 * Each sum is taken in one order, whatever the vectors: a channel's by tokens, a row's in SUMS parts of every SUMS-th
 * channel, which are then added by halves.
 */

enum { SUMS = 16, PARTS_OF_SUMS = SUMS / LANES };

INLINE void load_channels(const char *row, int64_t channel, const int dtype, floats *values)
{
    UNROLL for (int i = 0; i < PARTS_OF_SUMS; i++) values[i] = load_values(row, (int)channel + i * LANES, dtype);
}

INLINE float summed(const floats *sums)
{
    float part[SUMS];
    memcpy(part, sums, sizeof part);
    for (int half = SUMS / 2; half; half /= 2)
        for (int i = 0; i < half; i++) part[i] += part[i + half];
    return part[0];
}

INLINE void measure_head(const struct measuring *job, int64_t head, const int dtype)
{
    const char *rows = job->rows + head * job->row_of_head;
    float *mean = job->mean + head * job->width, *spread = job->spread + head * job->width;
    for (int64_t channel = 0; channel < job->width; channel += SUMS) {
        floats middle[PARTS_OF_SUMS] = {{0}}, apart[PARTS_OF_SUMS] = {{0}}, values[PARTS_OF_SUMS];
        if (job->centred) {
            for (int64_t token = 0; token < job->tokens; token++) {
                load_channels(rows + token * job->row_of_token, channel, dtype, values);
                UNROLL for (int i = 0; i < PARTS_OF_SUMS; i++) middle[i] += values[i];
            }
            UNROLL for (int i = 0; i < PARTS_OF_SUMS; i++) middle[i] /= all_floats((float)job->tokens);
        }
        for (int64_t token = 0; token < job->tokens; token++) {
            load_channels(rows + token * job->row_of_token, channel, dtype, values);
            UNROLL for (int i = 0; i < PARTS_OF_SUMS; i++)
                apart[i] += (floats)((ints)(values[i] - middle[i]) & all_ints(MAGNITUDE));
        }
        UNROLL for (int i = 0; i < PARTS_OF_SUMS; i++) apart[i] /= all_floats((float)job->tokens);
        memcpy(mean + channel, middle, sizeof middle);
        memcpy(spread + channel, apart, sizeof apart);
    }
    for (int64_t token = 0; token < job->tokens; token++) {
        floats sums[PARTS_OF_SUMS] = {{0}}, values[PARTS_OF_SUMS], middle[PARTS_OF_SUMS], apart[PARTS_OF_SUMS];
        for (int64_t channel = 0; channel < job->width; channel += SUMS) {
            load_channels(rows + token * job->row_of_token, channel, dtype, values);
            memcpy(middle, mean + channel, sizeof middle);
            memcpy(apart, spread + channel, sizeof apart);
            UNROLL for (int i = 0; i < PARTS_OF_SUMS; i++) {
                floats by = chosen_floats(apart[i] > all_floats(0), apart[i], all_floats(1));
                floats ratio = (values[i] - middle[i]) / by;
                sums[i] += ratio * ratio;
            }
        }
        job->size[head * job->tokens + token] = summed(sums) / (float)job->width;
    }
}

/* Heads [first, last). */
static void measure(const struct measuring *job, int64_t first, int64_t last)
{
    for (; first < last; first++) {
        switch (job->dtype) {
        case FLOAT16: measure_head(job, first, FLOAT16); break;
        case BFLOAT16: measure_head(job, first, BFLOAT16); break;
        default: measure_head(job, first, FLOAT32);
        }
    }
}
