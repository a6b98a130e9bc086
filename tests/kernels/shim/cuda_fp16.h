// Of CUDA's device functions, and of MLX's device headers, the names that the kernels use.
#pragma once
#include "host.h"

struct alignas(2) __half {
  uint16_t bits;
  operator float() const { return float(host::cast<_Float16>(bits)); }
};
struct alignas(2) __nv_bfloat16 {
  uint16_t bits;
  operator float() const { return host::cast<float>(uint32_t(bits) << 16); }
};
struct __half2 {
  __half x, y;
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};

struct alignas(4) uint4 {
  unsigned x, y, z, w;
  uint4() {}
  uint4(const uint4& from) {
    host::check_alignment(&from, 16);
    memcpy(static_cast<void*>(this), &from, 16);
  }
  uint4& operator=(const uint4& from) {
    host::check_alignment(this, 16);
    memcpy(static_cast<void*>(this), &from, 16);
    return *this;
  }
};
struct alignas(4) uint2 {
  unsigned x, y;
};
struct Four {
  unsigned words[4];
};
inline Four make_uint4(unsigned a, unsigned b, unsigned c, unsigned d) { return {{a, b, c, d}}; }
inline void __stcs(uint4* address, const Four& four) {
  host::check_alignment(address, 16);
  memcpy(static_cast<void*>(address), four.words, 16);
}

struct Shape {
  int32_t of[10];
  int32_t operator[](int i) const { return of[i]; }
};
struct Strides {
  int64_t of[10];
  int64_t operator[](int i) const { return of[i]; }
};
struct {
  struct {
    operator unsigned() const { return host::current; }
  } x;
} threadIdx;
struct {
  struct {
    operator unsigned() const { return host::group; }
  } x;
} blockIdx;
struct {
  struct {
    operator unsigned() const { return host::groups; }
  } x;
} gridDim;

inline float __uint_as_float(unsigned x) { return host::cast<float>(x); }
inline unsigned __float_as_uint(float x) { return host::cast<unsigned>(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline int __float2int_rd(float x) { return int(std::floor(x)); }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return unsigned(((uint64_t(high) << 32) | low) >> (shift & 31));
}
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned select) {
  const uint64_t both = uint64_t(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; i++) result |= unsigned(both >> (8 * (select >> (4 * i) & 7)) & 255) << (8 * i);
  return result;
}
inline __half __ushort_as_half(unsigned short x) { return {x}; }
inline unsigned short __half_as_ushort(__half x) { return x.bits; }
inline float __half2float(__half x) { return x; }
inline __half __float2half_rn(float x) { return {host::cast<uint16_t>(_Float16(x))}; }
inline __half2 __floats2half2_rn(float low, float high) { return {__float2half_rn(low), __float2half_rn(high)}; }
inline __half __low2half(__half2 pair) { return pair.x; }
inline __half __high2half(__half2 pair) { return pair.y; }
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  const uint32_t bits = host::cast<uint32_t>(x);
  return {uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16)};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float low, float high) {
  return {__float2bfloat16_rn(low), __float2bfloat16_rn(high)};
}
inline __nv_bfloat16 __low2bfloat16(__nv_bfloat162 pair) { return pair.x; }
inline __nv_bfloat16 __high2bfloat16(__nv_bfloat162 pair) { return pair.y; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.bits; }

template <typename T>
__attribute__((always_inline)) static inline T __shfl_xor_sync(unsigned lanes, T value, unsigned mask) {
  if (lanes != 0xFFFFFFFFu) host::fail("an exchange among some lanes only");
  return host::cast<T>(host::meet(host::SWAP, host::cast<unsigned>(value), mask, __builtin_return_address(0)));
}
template <typename T>
__attribute__((always_inline)) static inline T __shfl_down_sync(unsigned lanes, T value, unsigned) {
  if (lanes != 0xFFFFFFFFu) host::fail("an exchange among some lanes only");
  return host::cast<T>(host::meet(host::NEXT, host::cast<unsigned>(value), 1, __builtin_return_address(0)));
}
__attribute__((always_inline)) static inline bool __any_sync(unsigned lanes, bool value) {
  if (lanes != 0xFFFFFFFFu) host::fail("a vote among some lanes only");
  return host::meet(host::ANY, value, 0, __builtin_return_address(0));
}
__attribute__((always_inline)) static inline void __syncthreads() { host::barrier(__builtin_return_address(0)); }

#define __global__
#define __grid_constant__
#define __device__
#define __shared__ HOST_SHARED
#define __constant__
#define __forceinline__ __attribute__((noinline)) static
