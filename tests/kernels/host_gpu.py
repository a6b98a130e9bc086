"""Runs a kernel's text on the host: the very text that MLX would hand to Metal's or to NVIDIA's compiler, in a program of
the C++ compiler's.

How MLX writes that text is mirrored from mlx/backend/metal/metal_kernel and mlx/backend/cuda/custom_kernel.cpp of
MLX 0.32: header, generated signature, body. One line is added to Metal's, which says that shared memory is shared.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
import struct
import subprocess
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from prefixcache.codecs.interchange import borrow, bring_in, name_of
from prefixcache.kernels.dialects import DIALECTS, Dialect, KernelSource, dialect_here

SHIM = Path(__file__).parent / "shim"
COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
OWN = "gpu"  # the place that is this machine's own GPU; the others are dialects, whose text runs on the host
CONSTANT_BELOW = 8  # inputs of fewer elements are passed in Metal's constant address space
# No fused operations. Nothing is optimised: a program runs for milliseconds and is compiled in half the time; and a call
# stays at one place, by which an exchange is known.
FLAGS = ["-std=c++17", "-O0", "-w", "-ffp-contract=off", "-fno-strict-aliasing", "-U_FORTIFY_SOURCE"]
FLAGS += ["-fuse-ld=gold"] if shutil.which("ld.gold") else []  # links in a third of the time
COMMON_TYPES = {"float32": "float", "bool": "bool", **{n: f"{n}_t" for n in ("uint32", "uint16", "uint8", "int32")}}
METAL_TYPES = COMMON_TYPES | {"float16": "float16_t", "bfloat16": "bfloat16_t"}
CUDA_TYPES = COMMON_TYPES | {"float16": "__half", "bfloat16": "__nv_bfloat16"}

BY_VALUE = {"shape": "int", "strides": "int64_t"}

# The positions that MLX passes to a Metal kernel whose body names them, in its order; those that the host has.
METAL_POSITIONS = {
    "thread_index_in_threadgroup": ("uint", "host::current"),
    "threadgroup_position_in_grid": ("uint3", "uint3{host::group, 0, 0}"),
    "threadgroups_per_grid": ("uint3", "uint3{host::groups, 1, 1}"),
}


def places(*dialects: str) -> list[str]:
    """Where a test's kernels run: as programs of the host, in each of these dialects, and on the GPU that there is."""
    return [*dialects, *([OWN] if dialect_here() is not None else [])]


class Given:
    """An input as MLX has it: a strided view, bf16 as uint16."""

    def __init__(self, array: np.ndarray[Any, Any], dtype: str) -> None:
        self.array, self.dtype = array, dtype

    @property
    def memory(self) -> bytes:
        """All bytes from the view's first element to its last."""
        if self.array.flags.c_contiguous:
            return self.array.tobytes()
        spans = [(n - 1) * stride for n, stride in zip(self.array.shape, self.array.strides, strict=True)]
        count = sum(spans) // self.array.itemsize + 1
        return np.lib.stride_tricks.as_strided(self.array, (count,), (self.array.itemsize,)).tobytes()

    @property
    def shape(self) -> bytes:
        return struct.pack("<10i", *self.array.shape, *[0] * (10 - self.array.ndim))

    @property
    def strides(self) -> bytes:
        elements = [stride // self.array.itemsize for stride in self.array.strides]
        return struct.pack("<10q", *elements, *[0] * (10 - len(elements)))


def _arguments(source: KernelSource, body: str, inputs: Sequence[Given]) -> list[tuple[str, Given, str]]:
    """(name, input, "array", "shape" or "strides") in the order of the signature."""
    found = []
    for name, given in zip(source.inputs, inputs, strict=True):
        found.append((name, given, "array"))
        for kind in ("shape", "strides"):
            if f"{name}_{kind}" in body:
                found.append((f"{name}_{kind}", given, kind))
        assert f"{name}_ndim" not in body
    return found


def metal_text(source: KernelSource, inputs: Sequence[Given], outputs: Sequence[str]) -> str:
    """A program around the text for Metal."""
    dialect = DIALECTS["metal"]
    body = dialect.body_of(source)
    parameters, values = [], []
    for number, (name, given, kind) in enumerate(_arguments(source, body, inputs)):
        space = "constant" if kind != "array" or given.array.size < CONSTANT_BELOW else "device"
        element = BY_VALUE[kind] if kind != "array" else METAL_TYPES[given.dtype]
        parameters.append(f"  const {space} {element}* {name} [[buffer({number})]]")
        values.append(f"reinterpret_cast<{element}*>(host::memory({number}))")
    for name, dtype in zip(source.outputs, outputs, strict=True):
        number = len(parameters)
        parameters.append(f"  device {METAL_TYPES[dtype]}* {name} [[buffer({number})]]")
        values.append(f"reinterpret_cast<{METAL_TYPES[dtype]}*>(host::memory({number}))")
    assert len(parameters) <= 31
    for name, (element, value) in METAL_POSITIONS.items():
        if name in body:
            parameters.append(f"  {element} {name} [[{name}]]")
            values.append(value)
    name = f"custom_kernel_{dialect.name_of(source)}"
    return (
        "#include <metal_stdlib>\n"
        + dialect.header_of(source)
        + "\n#undef SHARED\n#define SHARED HOST_SHARED\n"
        + f"[[kernel]] void {name}(\n"
        + ",\n".join(parameters)
        + ") {\n"
        + body
        + "\n}\n"
        + _main(f"{name}({', '.join(values)})")
    )


def cuda_text(source: KernelSource, inputs: Sequence[Given], outputs: Sequence[str]) -> str:
    """A program around the text for CUDA."""
    dialect = DIALECTS["cuda"]
    body = dialect.body_of(source)
    parameters, values = [], []
    for number, (name, given, kind) in enumerate(_arguments(source, body, inputs)):
        if kind != "array":
            parameters.append(f"    const __grid_constant__ {kind.title()} {name}")
            values.append(f"*reinterpret_cast<{kind.title()}*>(host::memory({number}))")
        else:
            parameters.append(f"    const {CUDA_TYPES[given.dtype]}* {name}")
            values.append(f"reinterpret_cast<{CUDA_TYPES[given.dtype]}*>(host::memory({number}))")
    for name, dtype in zip(source.outputs, outputs, strict=True):
        parameters.append(f"    {CUDA_TYPES[dtype]}* {name}")
        values.append(f"reinterpret_cast<{CUDA_TYPES[dtype]}*>(host::memory({len(values)}))")
    name = f"custom_kernel_{dialect.name_of(source)}"
    return (
        '#include "mlx/backend/cuda/device/utils.cuh"\n#include <cooperative_groups.h>\n'
        + dialect.header_of(source)
        + "namespace mlx::core::cu {\nnamespace cg = cooperative_groups;\n"
        + f"__global__ void {name}(\n"
        + ",\n".join(parameters)
        + ") {\n"
        + body
        + "\n}\n}\n"
        + _main(f"mlx::core::cu::{name}({', '.join(values)})")
    )


def _main(call: str) -> str:
    return (
        f"static void call() {{ {call}; }}\n"
        "int main(int count, char** arguments) {\n  host::kernel = call;\n  return host::run(count, arguments);\n}\n"
    )


def compiled(text: str, folder: Path) -> Path:
    """The program of a text, built once in a folder, by whichever process and run of the tests comes first."""
    program = folder / _named(_built_from() + text.encode())
    if not program.exists():
        with TemporaryDirectory(dir=folder) as apart:
            source, built = Path(apart, "kernel.cpp"), Path(apart, "program")
            source.write_text(text)
            host = _host(folder)
            _compile("-include", str(host / "host.h"), str(source), str(host / "host.o"), "-o", str(built), "-lm")
            built.rename(program)
    return program


def _host(folder: Path) -> Path:
    """What all programs have in common, compiled once: the fibers, and their header as the compiler reads it."""
    host = folder / f"host-{_named(_built_from())}"
    if not host.exists():
        with TemporaryDirectory(dir=folder) as apart:
            built = Path(apart, "host")
            built.mkdir()
            header = built / "host.h"
            header.write_text(f'#include "{SHIM}/host.h"\n')
            _compile("-x", "c++-header", str(header), "-o", f"{header}.gch")
            _compile("-c", str(SHIM / "host.cpp"), "-o", str(built / "host.o"))
            with contextlib.suppress(OSError):  # another process was quicker
                built.rename(host)
    return host


@lru_cache(maxsize=1)
def _built_from() -> bytes:
    """What a program depends on beside its text: the compiler, its flags, the host's sources."""
    version = subprocess.run([str(COMPILER), "--version"], capture_output=True).stdout
    sources = [path.read_bytes() for path in sorted(SHIM.rglob("*")) if path.is_file()]
    return b"\0".join([str(SHIM).encode(), version, " ".join(FLAGS).encode(), *sources])


def _named(what: bytes) -> str:
    return hashlib.sha256(what).hexdigest()[:20]


def _compile(*arguments: str) -> None:
    assert COMPILER is not None
    done = subprocess.run([COMPILER, *FLAGS, f"-I{SHIM}", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]


def run(
    dialect: Dialect,
    source: KernelSource,
    inputs: Sequence[Given],
    outputs: Sequence[tuple[tuple[int, ...], str]],
    groups: int,
    threads: int,
    folder: Path,
) -> list[np.ndarray[Any, Any]]:
    """The outputs of one launch; AssertionError with what the host found wrong. bf16 as uint16."""
    write = metal_text if dialect.name == "metal" else cuda_text
    program = compiled(write(source, inputs, [dtype for _, dtype in outputs]), folder)
    message = b""
    for _, given, kind in _arguments(source, dialect.body_of(source), inputs):
        memory = {"array": given.memory, "shape": given.shape, "strides": given.strides}[kind]
        message += struct.pack("<BQ", 0, len(memory)) + memory
    kinds = [np.dtype("uint16" if dtype == "bfloat16" else dtype) for _, dtype in outputs]
    sizes = [int(np.prod(shape)) * kind.itemsize for (shape, _), kind in zip(outputs, kinds, strict=True)]
    message += b"".join(struct.pack("<BQ", 1, size) for size in sizes)
    done = subprocess.run([str(program), str(groups), str(threads)], input=message, capture_output=True)
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr.decode()}"
    found, at = [], 0
    for (shape, _), kind, size in zip(outputs, kinds, sizes, strict=True):
        found.append(np.frombuffer(done.stdout, kind, size // kind.itemsize, at).reshape(shape))
        at += size
    assert at == len(done.stdout)
    return found


def builder(folder: Path):
    """In place of `prefixcache.kernels.dialects.build`: kernels that run on the host, on MLX arrays of the CPU."""

    def build(dialect: Dialect, source: KernelSource):
        def kernel(*, inputs, output_shapes, output_dtypes, grid, threadgroup):
            assert grid[0] % threadgroup[0] == 0
            assert grid[1:] == threadgroup[1:] == (1, 1)
            given = [Given(borrow(array), name_of(array.dtype)) for array in inputs]
            outputs = [(shape, name_of(dtype)) for shape, dtype in zip(output_shapes, output_dtypes, strict=True)]
            found = run(dialect, source, given, outputs, grid[0] // threadgroup[0], threadgroup[0], folder)
            return [bring_in(array, dtype) for array, (_, dtype) in zip(found, outputs, strict=True)]

        return kernel

    return build
