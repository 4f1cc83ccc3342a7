# SPDX-License-Identifier: MIT
"""lk's ops of language-model training as PyTorch functions and modules. BACKEND is "cuda", or "cpu" for the simulator."""
import importlib.util
import sys

import torch  # loads the libraries that _C is linked with

from . import _library  # loads the kernels
try:
    from . import _C  # before the others: where it was not built this is an ImportError, which callers expect
except ImportError as error:
    if "undefined symbol" not in str(error):
        raise
    raise ImportError(f"lk_torch was built for another version of PyTorch than {torch.__version__}; build it again") from error
if _C.TORCH.split(".")[:2] != torch.__version__.split(".")[:2]:  # all symbols may be there, and mean something else
    raise ImportError(f"lk_torch was built for PyTorch {_C.TORCH}, and this is {torch.__version__}; build it again")

from . import _fake, functional, nn
from ._patch import Patched, patch, unpatch
from .functional import CrossEntropyIdsOutput, CrossEntropyIdsTailOutput, CrossEntropyOutput, set_batch_invariant
from .nn import AddRMSNorm, CrossEntropyLoss, GatedRMSNorm, GLU, LinearCrossEntropyLoss, LinearKLLoss, MdLrpeCosine, RMSNorm, SRMSNorm


class _AfterImport:
    """A finder of modules that imports `then` once `name` is there. The flop counter takes 0.2 s, and few programs need it."""

    def __init__(self, name, then):
        self.name, self.then = name, then
        if name in sys.modules:
            importlib.import_module(then)
        else:
            sys.meta_path.insert(0, self)

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            execute = spec.loader.exec_module

            def execute_both(module):
                execute(module)
                importlib.import_module(self.then)
            spec.loader.exec_module = execute_both
        return spec


_AfterImport("torch.utils.flop_counter", "lk_torch._flops")
BACKEND = _C.BACKEND
__version__ = f"{_C.LK_VERSION // 10000}.{_C.LK_VERSION // 100 % 100}.{_C.LK_VERSION % 100}"
__all__ = ["AddRMSNorm", "BACKEND", "CrossEntropyIdsOutput", "CrossEntropyIdsTailOutput", "CrossEntropyLoss", "CrossEntropyOutput",
           "GatedRMSNorm", "GLU", "LinearCrossEntropyLoss", "LinearKLLoss", "MdLrpeCosine", "Patched", "RMSNorm", "SRMSNorm", "functional",
           "nn", "patch", "set_batch_invariant", "unpatch"]
