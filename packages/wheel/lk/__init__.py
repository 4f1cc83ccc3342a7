# SPDX-License-Identifier: MIT
"""lk's compiled library and its headers: library(), include_dir(). `python -m lk` shows them, and whether they fit this machine.

The functions are those of C, for each op, direction and type: lk_srms_norm_forward_bf16, for example. lk_torch and lk_jax call
them from PyTorch and JAX; a program of your own links with the library, or loads it with ctypes.
"""
import ctypes
import os
import warnings

from ._build import ARCHES, BACKEND, CUDA, LIBRARY, NAME, PTX
from ._build import VERSION as __version__

__all__ = ["ARCHES", "BACKEND", "CUDA", "NAME", "PTX", "driver_cuda", "include_dir", "library"]
_HERE = os.path.dirname(os.path.abspath(__file__))


def library():
    """The path of liblk.so, to link with or to load: `ctypes.CDLL(lk.library())`.

    It was compiled with CUDA, "13.0" say; NAME is the package's, lk-kernels for CUDA 13 and lk-kernels-cu12 for CUDA 12. It has
    machine code of the cards in ARCHES ("90a" is an H100 or H200), and PTX for those that are newer than PTX. BACKEND is "gpu", or
    "cpu" for the simulator's library, whose CUDA is None. Its matmuls need libcublasLt.so.13, or .12, which it finds in the wheel
    nvidia-cublas, or nvidia-cublas-cu12, beside this package, in CUDA's toolkit, or where the process has loaded it already, as
    PyTorch and JAX do.
    """
    return os.path.join(_HERE, "lib", LIBRARY)


def include_dir():
    """The folder for a compiler's -I: then `#include "lk/srms_norm.cuh"` finds the headers that the library was compiled from."""
    return os.path.join(_HERE, "include")


def driver_cuda():
    """The newest CUDA that this machine's driver takes, "13.0" say; None where there is no driver."""
    version = ctypes.c_int()
    try:
        if ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(version)):
            return None
    except (AttributeError, OSError):
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def _too_old(driver):
    """Why a driver that takes this CUDA and older does not take the library, in words; None where it does. CUDA's minor version
    does not matter to it."""
    if not CUDA or not driver or int(driver.split(".")[0]) >= int(CUDA.split(".")[0]):
        return None
    other = "; or install lk-kernels-cu12 in its place" if NAME == "lk-kernels" and driver.startswith("12.") else ""
    return f"{NAME} was compiled with CUDA {CUDA}, and this machine's driver takes CUDA {driver} and older: update the driver{other}"


if _too_old(driver_cuda()):
    warnings.warn(_too_old(driver_cuda()), RuntimeWarning, stacklevel=2)
