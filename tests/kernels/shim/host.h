// A GPU on the host: every thread of a group is a fiber, and every collective is a meeting. A simdgroup's lanes must all
// come to the same call, one after the other; what is told apart is the place it is called from, its kind and its mask.
// So a divergent shuffle, a lane that returned too early and a barrier that some threads miss end the program with a word.
// What kernels see of it is here, and nothing that takes long to compile.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

// Shared memory holds garbage when a group begins.
#ifdef __ELF__
#define HOST_SHARED static __attribute__((section("shared_memory")))
#else
#define HOST_SHARED static
#endif

namespace host {

constexpr unsigned SIMD = 32;

enum Kind { SWAP, NEXT, ANY, PRODUCT };

// What a lane has of 8 x 8 matrices: two neighbours of one row of each. d = a b + c.
struct Product {
  float a[2], b[2], c[2], d[2];
};

extern unsigned current, group, groups;
extern void (*kernel)();  // calls the kernel with the buffers, for thread `current` of `group`

[[noreturn]] void fail(const char* what);
char* memory(unsigned buffer);
// A vector's address must be a multiple of its size from the start of the buffer it lies in.
void check_alignment(const void* address, size_t size);
uint32_t meet(Kind kind, uint32_t value, uint32_t mask, const void* site);
void meet_for(Product* product, const void* site);
void barrier(const void* site);
// Command line: groups, threads. Standard input: for each buffer a byte (1: output), its size, and an input's bytes.
// Standard output: the bytes of every output.
int run(int count, char** arguments);

template <typename T, typename U>
inline T cast(const U& value) {
  static_assert(sizeof(T) == sizeof(U), "sizes differ");
  T result;
  memcpy(&result, &value, sizeof(T));
  return result;
}

}  // namespace host
