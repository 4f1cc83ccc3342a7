# SPDX-License-Identifier: MIT
"""The module _C of a wheel: it stands for the extension of this name, which is for one version of Python. The ops are the same,
in a library that needs no Python. A call takes about a microsecond more, since torch.ops parses its arguments."""
import os
import re

import torch

from ._build import BACKEND, LK_VERSION, TORCH

NAMESPACE = "lk"
if TORCH.split(".")[:2] == torch.__version__.split(".")[:2]:  # else __init__ says so
    try:
        torch.ops.load_library(os.path.join(os.path.dirname(os.path.abspath(__file__)), "_ops.abi3.so"))
    except OSError as error:
        raise ImportError(str(error)) from error

_KINDS = {"Tensor": "a tensor", "Optional[Tensor]": "a tensor or None", "bool": "True or False", "int": "an integer",
          "Optional[ScalarType]": "a torch.dtype or None"}


def _type_error(name, error):
    """What csrc/module.cpp says of an argument of a wrong type, or None."""
    found = re.search(r"Expected a value of type '(.*?)' for argument '(\w+)' but instead found type '(\w+)'", str(error))
    if not found or found[1] not in _KINDS:
        return None
    from ._fake import public_name
    return TypeError(f"lk: {public_name(name, found[2])} is of type {found[3]}; it must be {_KINDS[found[1]]}")


def __getattr__(name):
    op = getattr(getattr(torch.ops, NAMESPACE), name).default

    def call(*args):
        try:
            return op(*args)
        except RuntimeError as error:
            wrong = _type_error(name, error)
            if wrong is None:
                raise
        raise wrong
    globals()[name] = call
    return call
