# SPDX-License-Identifier: MIT
"""Builds lk-kernels, the Python package lk: liblk.so of all ops and types, and lk's headers. Needs nvcc, make and g++, no GPU.

    make wheel                                              writes build/dist/lk_kernels-<version>-py3-none-<system>.whl
    make wheel NVCC=/a/cuda/12/bin/nvcc                     writes lk_kernels_cu12-...: lk-kernels-cu12, for drivers of CUDA 12
    pip install --no-build-isolation ./packages/wheel       builds and installs it
    ARCH="80 90a"                                           machine code of these cards alone; else of all that lk compiles for
    LK_BACKEND=cpu                                          the simulator's library, for tests
    pip install ziglang                                     before: the library runs with glibc 2.28 and later; without it, with
                                                            this machine's and later
    MACHINE=aarch64 CUDA_LIB=DIR                            for that processor: packages/rules.mk says what that needs
"""
import glob
import importlib.util
import os
import shutil
import sys

import setuptools
from setuptools.command.build_py import build_py

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
import lk_library

BACKEND = lk_library.backend_asked()
ROOT = lk_library.ROOT
ASKED = "all" if os.environ.get("ARCH", "native") == "native" else os.environ["ARCH"]
CUDA, ARCHES, PTX = lk_library.facts(f"ARCH={ASKED}") if BACKEND == "gpu" else (None, [], None)
NAME, CUBLAS = "lk-kernels", "nvidia-cublas>=13,<14"
if CUDA and CUDA.startswith("12."):
    NAME, CUBLAS = "lk-kernels-cu12", "nvidia-cublas-cu12>=12,<13"


class Build(build_py):
    """The library and the headers go into the package, and _build.py, which says what they are."""

    def run(self):
        shutil.rmtree(self.build_lib, ignore_errors=True)  # may hold those of another backend or version
        super().run()
        package = os.path.join(self.build_lib, "lk")
        on = f"CUDA {CUDA}, for {' '.join(ARCHES)}" if CUDA else "the simulator"
        print(f"{NAME} {lk_library.version()}: {on}", flush=True)
        zig = ["GLIBC=2.28", f"PYTHON={sys.executable}"] if importlib.util.find_spec("ziglang") else []
        lk_library.build(BACKEND, f"{package}/lib", *([f"ARCH={ASKED}", *zig] if BACKEND == "gpu" else []))
        headers = f"{package}/include/lk"
        os.makedirs(headers)
        for path in [*glob.glob(f"{ROOT}/lk/*.cuh"), *glob.glob(f"{ROOT}/lk/*.md"), f"{ROOT}/lk/LICENSE"]:
            shutil.copy2(path, headers)
        with open(f"{package}/_build.py", "w") as file:
            file.write(f"NAME = {NAME!r}\nVERSION = {lk_library.version()!r}\nBACKEND = {BACKEND!r}\n"
                       f"LIBRARY = {lk_library.name(BACKEND)!r}\nCUDA = {CUDA!r}\nARCHES = {ARCHES!r}\nPTX = {PTX!r}\n")


def system():
    library = f"{ROOT}/build/{'cpu-plain/liblk_simt.so' if BACKEND == 'cpu' else 'gpu/liblk.so'}"
    asked = os.environ.get("MACHINE")
    return lk_library.system(library, asked if asked in ("x86_64", "aarch64") else None)


class Binary(setuptools.Distribution):
    def has_ext_modules(self):  # so that the wheel is one of this machine
        return True


commands = {"build_py": Build}
try:
    from setuptools.command.bdist_wheel import bdist_wheel  # setuptools 70.1 and later
except ImportError:
    from wheel.bdist_wheel import bdist_wheel


class Wheel(bdist_wheel):
    """For any Python 3 of this system: nothing in it is compiled for a version of Python."""

    def get_tag(self):
        return "py3", "none", system()


os.chdir(os.path.dirname(os.path.abspath(__file__)))
setuptools.setup(name=NAME, version=lk_library.version(), license="MIT", packages=["lk"], python_requires=">=3.10",
                 description="Kernels of language-model training: lk's library and its headers", distclass=Binary,
                 long_description=open("README.md").read(), long_description_content_type="text/markdown",
                 install_requires=[CUBLAS] if BACKEND == "gpu" else [],
                 cmdclass={"build_py": Build, "bdist_wheel": Wheel})
