"""Builds the C kernels of TurboQuant and of transform coding, where there is a compiler for them.

All else about the package is in pyproject.toml.

The libraries hold no Python module: ctypes loads them, so one build serves every version of Python on the machine.
"""

from __future__ import annotations

from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

# Without contraction: a product fused with a sum rounds once instead of twice, and codes would differ. These come after
# the flags of the environment, so that its -ffast-math counts for nothing: neither in the code, nor to the linker, which
# gives a library what flushes small numbers to zero in whatever process loads it (gcc before 13).
EXACT = ["-O3", "-fno-fast-math", "-fno-unsafe-math-optimizations"]
FLAGS = ["-std=gnu11", "-g0", *EXACT, "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi"]

TURBOQUANT = Extension(
    "prefixcache.kernels._turboquant",
    sources=[f"prefixcache/kernels/turboquant{part}.c" for part in ("", "_portable", "_avx2", "_avx512")],
    depends=[
        f"prefixcache/kernels/turboquant{part}.h" for part in ("", "_vectors", "_mix", "_rows", "_attend", "_measure")
    ],
    extra_compile_args=FLAGS,
    extra_link_args=EXACT,
    optional=True,
)
TRANSFORM = Extension(
    "prefixcache.kernels._transform",
    sources=["prefixcache/kernels/transform.c"],
    extra_compile_args=FLAGS,
    extra_link_args=EXACT,
    optional=True,
)


class BuildLibrary(build_ext):
    def get_ext_filename(self, fullname: str) -> str:
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def get_export_symbols(self, ext: Extension) -> list[str]:
        return []  # no PyInit_


class OneWheelAPlatform(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(ext_modules=[TURBOQUANT, TRANSFORM], cmdclass={"build_ext": BuildLibrary, "bdist_wheel": OneWheelAPlatform})
