# SPDX-License-Identifier: MIT
"""Stands for lk_torch's extension of this name, which is for one version of Python. The ops are the same, in a library that
needs no Python; their namespace in torch.ops is the build's id."""
import json
import os

import torch

_folder = os.path.dirname(__file__)
with open(os.path.join(_folder, "metadata.json")) as _file:
    _metadata = json.load(_file)
NAMESPACE, BACKEND = _metadata["id"], _metadata["backend"]["type"]
torch.ops.load_library(os.path.join(_folder, NAMESPACE + ".abi3.so"))


def __getattr__(name):
    value = globals()[name] = getattr(getattr(torch.ops, NAMESPACE), name).default
    return value
