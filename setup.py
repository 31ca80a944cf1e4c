"""Builds the CPU kernels. Everything else about the package is in pyproject.toml."""

from pathlib import Path

from setuptools import Extension, setup

SOURCES = Path("src/nibblekv/backends/cpu/csrc")

setup(
    ext_modules=[
        Extension(
            "nibblekv.backends.cpu._native",
            sources=sorted(str(path) for path in SOURCES.glob("*.cpp")),
            depends=sorted(str(path) for path in SOURCES.glob("*.h")),
            # The kernels choose their instruction set at run time, so no -march here. Contracting a * b + c would round
            # codes differently from the format's formulas.
            extra_compile_args=[
                "-std=c++17",
                "-O3",
                "-fno-math-errno",
                "-fno-trapping-math",
                "-ffp-contract=off",
                "-Wno-psabi",
                "-Wno-uninitialized",  # GCC 12's own headers
            ],
            optional=True,  # without a compiler the package installs, and the backend says what is missing
        )
    ]
)
