# SPDX-License-Identifier: MIT
"""lk's compiled library and its headers: library(), include_dir(). `python -m lk` shows them, and whether they fit this machine.

The functions are those of C, for each op, direction and type: lk_srms_norm_forward_bf16, for example. lk_torch and lk_jax call
them from PyTorch and JAX; a program of your own links with the library, or loads it with ctypes.
"""
import os

from ._build import ARCHES, BACKEND, LIBRARY, PTX
from ._build import VERSION as __version__

__all__ = ["ARCHES", "BACKEND", "PTX", "include_dir", "library"]
_HERE = os.path.dirname(os.path.abspath(__file__))


def library():
    """The path of liblk.so, to link with or to load: `ctypes.CDLL(lk.library())`.

    It has machine code of the cards in ARCHES ("90a" is an H100 or H200), and PTX for those that are newer than PTX. BACKEND is
    "gpu", or "cpu" for the simulator's library. Its matmuls need libcublasLt.so.13, which it finds in the wheel nvidia-cublas
    beside this package, in CUDA's toolkit, or where the process has loaded it already, as PyTorch and JAX do.
    """
    return os.path.join(_HERE, "lib", LIBRARY)


def include_dir():
    """The folder for a compiler's -I: then `#include "lk/srms_norm.cuh"` finds the headers that the library was compiled from."""
    return os.path.join(_HERE, "include")
