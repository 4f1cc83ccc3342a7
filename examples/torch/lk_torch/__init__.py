# SPDX-License-Identifier: MIT
"""lk's five ops of language-model training as PyTorch functions and modules. BACKEND is "cuda", or "cpu" for the simulator."""
import torch  # loads the libraries that _C is linked with

from . import _C  # before the others: where it was not built this is an ImportError, which callers expect
from . import _fake, functional, nn
from .functional import CrossEntropyOutput
from .nn import AddRMSNorm, CrossEntropyLoss, LinearCrossEntropyLoss, MdLrpeCosine, RMSNorm, SRMSNorm

BACKEND = _C.BACKEND
__version__ = f"{_C.LK_VERSION // 10000}.{_C.LK_VERSION // 100 % 100}.{_C.LK_VERSION % 100}"
__all__ = ["AddRMSNorm", "BACKEND", "CrossEntropyLoss", "CrossEntropyOutput", "LinearCrossEntropyLoss", "MdLrpeCosine",
           "RMSNorm", "SRMSNorm", "functional", "nn"]
