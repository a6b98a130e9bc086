/* The entry points of TurboQuant's C kernel, called by prefixcache/codecs/turboquant/c_rows.py through ctypes.
 *
 * Nothing is checked here: shapes, dtypes, strides and paths are, in Python, before a pointer comes in. Nothing is
 * allocated, and nothing is kept between calls, so that any number of threads may call at once.
 */
#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif
#include <stddef.h>

#include "turboquant.h"

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "The codes of a row are little-endian words; NumPy serves on other machines."
#endif

enum { PORTABLE, AVX2, AVX512, PATHS };

static int has_path(int path)
{
#if defined(__x86_64__)
    unsigned eax, ebx, ecx = 0, edx;
    __builtin_cpu_init();
    switch (path) {
    case AVX2:
        /* Compilers disagree on whether __builtin_cpu_supports knows f16c. */
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
               __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & bit_F16C);
    case AVX512:
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    }
#endif
    return path == PORTABLE;
}

static const struct path *path_of(int path)
{
#if defined(__x86_64__)
    if (path == AVX2) return &turboquant_avx2;
    if (path == AVX512) return &turboquant_avx512;
#endif
    return path == PORTABLE ? &turboquant_portable : NULL;
}

/* The paths that this processor can run: bit i for path i. */
int turboquant_paths(void)
{
    int found = 0;
    for (int path = 0; path < PATHS; path++) found |= has_path(path) << path;
    return found;
}

/* So that the Python side can tell that it mirrors the same structures. */
int turboquant_size_of_form(void)
{
    return (int)sizeof(struct form);
}

int turboquant_size_of_job(void)
{
    return (int)sizeof(struct job);
}

int turboquant_size_of_measuring(void)
{
    return (int)sizeof(struct measuring);
}

int turboquant_size_of_attention(void)
{
    return (int)sizeof(struct attention);
}

/* Rows [first, last) of jobs that stand one behind the other; the caller knows how many rows they have. */
static void run(rows_of_job *work, const struct job *jobs, int64_t first, int64_t last)
{
    for (; last > 0; jobs++) {
        int64_t rows = jobs->tokens * jobs->heads;
        if (first < rows) work(jobs, first, last < rows ? last : rows);
        first = first > rows ? first - rows : 0;
        last -= rows;
    }
}

void turboquant_encode(const struct job *jobs, int64_t first, int64_t last, int path)
{
    run(path_of(path)->encode, jobs, first, last);
}

void turboquant_decode(const struct job *jobs, int64_t first, int64_t last, int path)
{
    run(path_of(path)->decode, jobs, first, last);
}

/* Heads [first, last) of jobs that stand one behind the other. */
void turboquant_measure(const struct measuring *jobs, int64_t first, int64_t last, int path)
{
    for (; last > 0; jobs++) {
        if (first < jobs->heads) path_of(path)->measure(jobs, first, last < jobs->heads ? last : jobs->heads);
        first = first > jobs->heads ? first - jobs->heads : 0;
        last -= jobs->heads;
    }
}

/* How many queries of a head are a block. */
int turboquant_queries_of_block(void)
{
    return QUERIES_OF_BLOCK;
}

/* The bytes that a thread works in, and those of a part's state; both begin at a multiple of the longest vector, 64. */
int64_t turboquant_attention_scratch(const struct attention *job, int path)
{
    return path_of(path)->scratch(job);
}

int64_t turboquant_attention_state(const struct attention *job, int path)
{
    return path_of(path)->state(job);
}

/* Parts [first, last) of the work. */
void turboquant_attend(const struct attention *job, int64_t first, int64_t last, char *scratch, int path)
{
    for (; first < last; first++) path_of(path)->attend(job, first, scratch);
}

/* Blocks [first, last) of queries, counted as parts are without their ranges of columns. */
void turboquant_attend_merge(const struct attention *job, int64_t first, int64_t last, char *scratch, int path)
{
    for (; first < last; first++) path_of(path)->merge(job, first, scratch);
}
