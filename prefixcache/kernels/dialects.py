"""What differs between Metal and CUDA: two preludes that give the same names to both, and the call that builds a kernel.

A kernel is one text of functions (its header) and one body, written in these names alone. The preludes hold no
arithmetic of a format; an operation named here rounds once, to nearest, and is never fused with its neighbour.

A matrix product goes by tiles of 8 x 8 that a simdgroup holds together: a lane has two neighbouring values of one row,
those of `tile_row` at the columns 2 * `tile_pair` and the next, as a pair of fp16 in 32 bits, or two floats of a sum.
Lanes that differ in the bits ROW_1, ROW_2, ROW_4 alone hold the same columns. `multiply` adds to two tiles of sums, one
below the other, the product of four tiles (`left`: first column of tiles, then second) and two (`right`, one below the
other, each turned by `right_of` into the way that the product wants it).

A table in shared memory that every lane looks up at will is kept in COPIES, one a bank, so that no lane waits for another:
lane l looks at the l % COPIES-th of the words that stand for one entry.
Decision 0023 says why there is one text, and what it gained.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import mlx.core as mx

ELEMENTS = ("float16", "bfloat16", "float32")  # in the order of their numbers in a kernel's text
LOG2_E = 1.4426950408889634
SIMD_WIDTH = 32  # lanes that run in step: a simdgroup of Apple's, a warp of NVIDIA's

METAL = """
#include <metal_simdgroup_matrix>
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

#define COPIES 1
#define SHARED_WORDS(name, count) SHARED u32 name[count]
FUNCTION u32 entry_at(const SHARED_SPACE u32* table, u32 bytes) {
  return *reinterpret_cast<const SHARED_SPACE u32*>(reinterpret_cast<const SHARED_SPACE char*>(table) + bytes);
}
FUNCTION u32 byte_above(u32 word, int number, u32 low) { return (word >> (8 * number) & 255u) << 8 | low; }

#define ROW_1 2u
#define ROW_2 4u
#define ROW_4 16u
FUNCTION u32 tile_row(u32 lane) { return (lane >> 2 & 4u) | (lane >> 1 & 3u); }
FUNCTION u32 tile_pair(u32 lane) { return (lane >> 2 & 2u) | (lane & 1u); }
FUNCTION u32 right_of(u32 pair) { return pair; }
FUNCTION void multiply(THREAD float* sums, const THREAD u32* left, const THREAD u32* right) {
  UNROLL for (int part = 0; part < 4; part++) {
    const int row = part % 2, step = part / 2;
    metal::simdgroup_matrix<half, 8, 8> a, b;
    metal::simdgroup_matrix<float, 8, 8> c;
    reinterpret_cast<THREAD half2&>(a.thread_elements()) = as_type<half2>(left[part]);
    reinterpret_cast<THREAD half2&>(b.thread_elements()) = as_type<half2>(right[step]);
    reinterpret_cast<THREAD float2&>(c.thread_elements()) = float2(sums[2 * row], sums[2 * row + 1]);
    metal::simdgroup_multiply_accumulate(c, a, b, c);
    const float2 both = reinterpret_cast<THREAD float2&>(c.thread_elements());
    sums[2 * row] = both.x;
    sums[2 * row + 1] = both.y;
  }
}
FUNCTION u32 pair_minus(u32 a, u32 b) { return as_type<u32>(as_type<half2>(a) - as_type<half2>(b)); }
FUNCTION float power_of_two(float x) { return metal::fast::exp2(x); }
FUNCTION float logarithm(float x) { return metal::log2(x); }
FUNCTION bool any_lane(bool x) { return metal::simd_any(x); }
#define FETCHES 0
#define fetch_ahead(address)
FUNCTION void load_two(const DEVICE u32* address, THREAD u32* words) {
  const uint2 two = *reinterpret_cast<const DEVICE uint2*>(address);
  words[0] = two.x; words[1] = two.y;
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

#define COPIES 32
#define SHARED_WORDS(name, count) extern __shared__ __align__(16) u32 name[]
FUNCTION u32 entry_at(const u32* table, u32 bytes) {
  return *reinterpret_cast<const u32*>(reinterpret_cast<const char*>(table) + bytes);
}
FUNCTION u32 byte_above(u32 word, int number, u32 low) { return __byte_perm(word, low, 0x5504 | number << 4); }

#define ROW_1 4u
#define ROW_2 8u
#define ROW_4 16u
FUNCTION u32 tile_row(u32 lane) { return lane >> 2; }
FUNCTION u32 tile_pair(u32 lane) { return lane & 3u; }
FUNCTION u32 right_of(u32 pair) {
  u32 turned;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(pair));
  return turned;
}
FUNCTION void multiply(float* sums, const u32* left, const u32* right) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right[0]), "r"(right[1]));
}
FUNCTION u32 pair_minus(u32 a, u32 b) {
  u32 found;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(found) : "r"(a), "r"(b));
  return found;
}
FUNCTION float power_of_two(float x) {
  float found;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(x));
  return found;
}
FUNCTION float logarithm(float x) {
  float found;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(found) : "f"(x));
  return found;
}
FUNCTION bool any_lane(bool x) { return __any_sync(0xFFFFFFFFu, x); }
#define FETCHES 1
FUNCTION void fetch_ahead(const void* address) { asm volatile("prefetch.global.L2 [%0];" ::"l"(address)); }
FUNCTION void load_two(const u32* address, u32* words) {
  const uint2 two = *reinterpret_cast<const uint2*>(address);
  words[0] = two.x; words[1] = two.y;
}
"""

CUDA_POSITION = """
  const u32 member = threadIdx.x;
  const u32 group = blockIdx.x;
  const u32 groups = gridDim.x;
"""


@dataclass(frozen=True)
class KernelSource:
    """A kernel's text before any dialect: what it takes, what it gives, its functions and its body."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    functions: str
    body: str
    shared: int = 0
    """Bytes of what the body declares by SHARED_WORDS, once; there may be more of them than of SHARED."""


@dataclass(frozen=True)
class Dialect:
    name: str
    prelude: str
    position: str

    def header_of(self, source: KernelSource) -> str:
        return _bare(self.prelude + source.functions, self.position + source.body)

    def body_of(self, source: KernelSource) -> str:
        return _plain(self.position + source.body)

    def name_of(self, source: KernelSource) -> str:
        """MLX keeps compiled CUDA code on disk by its name alone, also from one release to the next; so the text's hash
        is part of it."""
        text = self.header_of(source) + self.body_of(source)
        return f"prefixcache_{source.name}_{hashlib.sha256(text.encode()).hexdigest()[:16]}"


DIALECTS = {"metal": Dialect("metal", METAL, METAL_POSITION), "cuda": Dialect("cuda", CUDA, CUDA_POSITION)}

Kernel = Callable[..., Sequence[mx.array]]


def dialect_here() -> Dialect | None:
    """Return the dialect of MLX's default device; None where that is a CPU."""
    if mx.default_device().type != mx.DeviceType.gpu:
        return None
    if mx.metal.is_available():
        return DIALECTS["metal"]
    return DIALECTS["cuda"] if mx.cuda.is_available() else None


# A macro with the lines it goes on for, a function, a table, or any other line.
ITEM = re.compile(
    r"#define (\w+).*(?:(?<=\\)\n.*)*|(?:template .*\n)?FUNCTION [^(]*?(\w+)\((?:.*\}|[\s\S]*?\n\})$|CONSTANT int (\w+).*|.+",
    re.M,
)


@lru_cache(maxsize=64)
def _bare(header: str, body: str) -> str:
    """Return a header without comments and indentation, and without macros, functions and tables that nothing names:
    MLX copies and hashes a kernel's text at every call, which takes 0.2 us a kilobyte.
    """
    while True:
        words = Counter(re.findall(r"\w+", header + body))
        used = []
        for item in ITEM.finditer(header):
            name = next(filter(None, item.groups()), None)
            if name is None or words[name] > len(re.findall(rf"\b{name}\b", item[0])):
                used.append(item[0])
        if len(shorter := "\n".join(used)) == len(header):
            return _plain(header)
        header = shorter


def _plain(text: str) -> str:
    """Return the text without comments, indentation, and spaces around signs that never begin another sign."""
    lines = (line.partition("//")[0].strip() for line in text.splitlines())
    squeezed = (
        line if line[:1] == "#" or '"' in line else re.sub(r" ?([=<>|^?:;,(){}\[\]]) ?", r"\1", line) for line in lines
    )
    return "\n".join(line for line in squeezed if line) + "\n"


def defines(numbers: Mapping[str, object], *, unsigned: bool = False) -> str:
    """Return the macros that a kernel's text is specialised by, a line each."""
    return "".join(f"#define {name} {number}{'u' * unsigned}\n" for name, number in numbers.items())


def bits_of(value: float) -> str:
    """Return a float32 as a literal that every dialect reads alike: the bits of it."""
    return f"0x{struct.unpack('<I', struct.pack('<f', value))[0]:08X}u"


def table(name: str, values: list[int]) -> str:
    """Return a table of integers at program scope."""
    return f"CONSTANT int {name}[{len(values)}] = {{{', '.join(map(str, values))}}};\n"


def launch(
    kernel: Kernel,
    inputs: list[mx.array],
    outputs: Sequence[tuple[tuple[int, ...], mx.Dtype]],
    groups: int,
    threads: int,
) -> Sequence[mx.array]:
    """Run a kernel in so many groups of so many threads. Return its outputs, of these shapes and dtypes, lazy."""
    return kernel(
        inputs=inputs,
        output_shapes=[shape for shape, _ in outputs],
        output_dtypes=[dtype for _, dtype in outputs],
        grid=(groups * threads, 1, 1),
        threadgroup=(threads, 1, 1),
    )


def build(dialect: Dialect, source: KernelSource) -> Kernel:
    """Return the compiled form: MLX's callable, which compiles when it first runs. Inputs are taken as they lie (strided)."""
    metal = dialect.name == "metal"
    maker: Any = mx.fast.metal_kernel if metal else partial(mx.fast.cuda_kernel, shared_memory=source.shared)
    kernel: Kernel = maker(
        name=dialect.name_of(source),
        input_names=list(source.inputs),
        output_names=list(source.outputs),
        header=dialect.header_of(source),
        source=dialect.body_of(source),
        ensure_row_contiguous=False,
    )
    return kernel
