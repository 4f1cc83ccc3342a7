# SPDX-License-Identifier: MIT
"""Loads lk's library, where it does not lie beside this file: then it is that of the package lk-kernels."""
import ctypes
import os

here = os.listdir(os.path.dirname(os.path.abspath(__file__)))
if any(name.startswith("_C.") for name in here) and not any(name.startswith("liblk") for name in here):
    try:
        import lk
        ctypes.CDLL(lk.library())  # _C finds it by its name
    except (AttributeError, ImportError, OSError) as error:
        raise ImportError(f"lk_torch was built with the kernels of lk-kernels, which do not load: {error}. Install lk-kernels of the "
                          "same version, or build lk_torch with LK_KERNELS=0, which compiles them") from error
