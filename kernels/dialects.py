"""What differs between Metal and CUDA: two preludes that give the same names to both, and the call that builds a kernel.

A kernel is one text of functions (its header) and one body, written in these names alone. The preludes hold no
arithmetic of a format; an operation named here rounds once, to nearest, and is never fused with its neighbour.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

SIMD_WIDTH = 32  # lanes that run in step: a simdgroup of Apple's, a warp of NVIDIA's

METAL = """
#include <metal_stdlib>
#pragma METAL fp contract(off)
#define FUNCTION inline
#define DEVICE device
#define THREAD thread
#define SHARED threadgroup
#define SHARED_SPACE threadgroup
#define CONSTANT constant
#define UNROLL _Pragma("clang loop unroll(full)")
typedef uint u32;
typedef ulong u64;
typedef ushort u16;

FUNCTION float float_of(u32 bits) { return as_type<float>(bits); }
FUNCTION u32 bits_of(float x) { return as_type<u32>(x); }
FUNCTION float plus(float a, float b) { return a + b; }
FUNCTION float minus(float a, float b) { return a - b; }
FUNCTION float times(float a, float b) { return a * b; }
FUNCTION float over(float a, float b) { return a / b; }
FUNCTION float fused(float a, float b, float c) { return metal::fma(a, b, c); }
FUNCTION float root(float x) { return metal::precise::sqrt(x); }
FUNCTION float least(float a, float b) { return metal::fmin(a, b); }
FUNCTION float greatest(float a, float b) { return metal::fmax(a, b); }
FUNCTION u32 larger(u32 a, u32 b) { return metal::max(a, b); }
FUNCTION float magnitude(float x) { return metal::fabs(x); }

FUNCTION float swapped(float x, u32 mask) { return metal::simd_shuffle_xor(x, u16(mask)); }
FUNCTION u32 swapped(u32 x, u32 mask) { return metal::simd_shuffle_xor(x, u16(mask)); }
FUNCTION u32 from_next(u32 x) { return metal::simd_shuffle_down(x, u16(1)); }
FUNCTION void barrier() { metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup); }

FUNCTION u32 window(u32 low, u32 high, u32 shift) { return shift ? low >> shift | high << (32 - shift) : low; }
FUNCTION u32 low_field(u32 pair, u32 top) { return (pair & 0xFFFFu) | top << 16; }
FUNCTION u32 high_field(u32 pair, u32 top) { return pair >> 16 | top << 16; }
FUNCTION float low_half(u32 pair) { return float(as_type<half>(u16(pair & 0xFFFFu))); }
FUNCTION float high_half(u32 pair) { return float(as_type<half>(u16(pair >> 16))); }
FUNCTION u32 half_pair(float low, float high) {
  return u32(as_type<u16>(half(low))) | u32(as_type<u16>(half(high))) << 16;
}
FUNCTION u32 bfloat_bits(float x) { return (bits_of(x) + 0x7FFFu + (bits_of(x) >> 16 & 1u)) >> 16; }
FUNCTION u32 bfloat_pair(float low, float high) { return bfloat_bits(low) | bfloat_bits(high) << 16; }

FUNCTION bool aligned(const DEVICE u32* address) { return true; }
FUNCTION void load_four(const DEVICE u32* address, THREAD u32* words) {
  const uint4 four = *reinterpret_cast<const DEVICE uint4*>(address);
  words[0] = four.x; words[1] = four.y; words[2] = four.z; words[3] = four.w;
}
FUNCTION void store_four(DEVICE u32* address, const THREAD u32* words) {
  *reinterpret_cast<DEVICE uint4*>(address) = uint4(words[0], words[1], words[2], words[3]);
}
"""

METAL_POSITION = """
  const u32 member = thread_index_in_threadgroup;
  const u32 group = threadgroup_position_in_grid.x;
  const u32 groups = threadgroups_per_grid.x;
"""

CUDA = """
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define FUNCTION __device__ __forceinline__
#define DEVICE
#define THREAD
#define SHARED __shared__
#define SHARED_SPACE
#define CONSTANT __constant__
#define UNROLL _Pragma("unroll")
typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;

FUNCTION float float_of(u32 bits) { return __uint_as_float(bits); }
FUNCTION u32 bits_of(float x) { return __float_as_uint(x); }
FUNCTION float plus(float a, float b) { return __fadd_rn(a, b); }
FUNCTION float minus(float a, float b) { return __fsub_rn(a, b); }
FUNCTION float times(float a, float b) { return __fmul_rn(a, b); }
FUNCTION float over(float a, float b) { return __fdiv_rn(a, b); }
FUNCTION float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
FUNCTION float root(float x) { return __fsqrt_rn(x); }
FUNCTION float least(float a, float b) { return fminf(a, b); }
FUNCTION float greatest(float a, float b) { return fmaxf(a, b); }
FUNCTION u32 larger(u32 a, u32 b) { return max(a, b); }
FUNCTION float magnitude(float x) { return fabsf(x); }

FUNCTION float swapped(float x, u32 mask) { return __shfl_xor_sync(0xFFFFFFFFu, x, mask); }
FUNCTION u32 swapped(u32 x, u32 mask) { return __shfl_xor_sync(0xFFFFFFFFu, x, mask); }
FUNCTION u32 from_next(u32 x) { return __shfl_down_sync(0xFFFFFFFFu, x, 1); }
FUNCTION void barrier() { __syncthreads(); }

FUNCTION u32 window(u32 low, u32 high, u32 shift) { return __funnelshift_r(low, high, shift); }
FUNCTION u32 low_field(u32 pair, u32 top) { return __byte_perm(pair, top, 0x5410); }
FUNCTION u32 high_field(u32 pair, u32 top) { return __byte_perm(pair, top, 0x5432); }
FUNCTION float low_half(u32 pair) { return __half2float(__ushort_as_half(u16(pair & 0xFFFFu))); }
FUNCTION float high_half(u32 pair) { return __half2float(__ushort_as_half(u16(pair >> 16))); }
FUNCTION u32 half_pair(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return u32(__half_as_ushort(__low2half(pair))) | u32(__half_as_ushort(__high2half(pair))) << 16;
}
FUNCTION u32 bfloat_pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return u32(__bfloat16_as_ushort(__low2bfloat16(pair))) | u32(__bfloat16_as_ushort(__high2bfloat16(pair))) << 16;
}

FUNCTION bool aligned(const u32* address) { return (reinterpret_cast<u64>(address) & 15) == 0; }
FUNCTION void load_four(const u32* address, u32* words) {
  const uint4 four = *reinterpret_cast<const uint4*>(address);
  words[0] = four.x; words[1] = four.y; words[2] = four.z; words[3] = four.w;
}
FUNCTION void store_four(u32* address, const u32* words) {
  __stcs(reinterpret_cast<uint4*>(address), make_uint4(words[0], words[1], words[2], words[3]));  // not read again soon
}
"""

CUDA_POSITION = """
  const u32 member = threadIdx.x;
  const u32 group = blockIdx.x;
  const u32 groups = gridDim.x;
"""


@dataclass(frozen=True)
class Source:
    """A kernel's text before any dialect: what it takes, what it gives, its functions and its body."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    functions: str
    body: str


@dataclass(frozen=True)
class Dialect:
    name: str
    prelude: str
    position: str

    def header_of(self, source: Source) -> str:
        return self.prelude + source.functions

    def body_of(self, source: Source) -> str:
        return self.position + source.body

    def name_of(self, source: Source) -> str:
        """MLX keeps compiled CUDA code on disk by its name alone, also from one release to the next; so the text's hash
        is part of it."""
        text = self.header_of(source) + self.body_of(source)
        return f"prefixcache_{source.name}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"


DIALECTS = {"metal": Dialect("metal", METAL, METAL_POSITION), "cuda": Dialect("cuda", CUDA, CUDA_POSITION)}

Kernel = Callable[..., Sequence[mx.array]]


def dialect_here() -> Dialect | None:
    """The dialect of MLX's default device; None where that is a CPU."""
    if mx.default_device().type != mx.DeviceType.gpu:
        return None
    if mx.metal.is_available():
        return DIALECTS["metal"]
    return DIALECTS["cuda"] if mx.cuda.is_available() else None


def build(dialect: Dialect, source: Source) -> Kernel:
    """The compiled form: MLX's callable, which compiles when it first runs. Inputs are taken as they lie (strided)."""
    maker: Any = mx.fast.metal_kernel if dialect.name == "metal" else mx.fast.cuda_kernel
    kernel: Kernel = maker(
        name=dialect.name_of(source),
        input_names=list(source.inputs),
        output_names=list(source.outputs),
        header=dialect.header_of(source),
        source=dialect.body_of(source),
        ensure_row_contiguous=False,
    )
    return kernel
