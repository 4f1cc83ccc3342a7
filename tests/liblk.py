# SPDX-License-Identifier: MIT
"""The shared library of `make lib` through ctypes, for tests that drive it on torch tensors.

The argument structs are read from the headers, so that a new field is never missed; tests/against_torch.py holds them against
the C compiler's layout.
"""
import ctypes
import os
import re
import sys

import torch

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


class VocabParallel(ctypes.Structure):
    """lk_vocab_parallel of lk_base.cuh; the callbacks stay NULL here."""
    _fields_ = [("vocab_start", ctypes.c_int64), ("vocab_total", ctypes.c_int64), ("rank", ctypes.c_int), ("ranks", ctypes.c_int),
                ("user", ctypes.c_void_p), ("all_gather", ctypes.c_void_p), ("reduce", ctypes.c_void_p), ("reduce_sms", ctypes.c_int)]


SCALARS = {"lk_vocab_parallel": VocabParallel, "int64_t": ctypes.c_int64, "uint64_t": ctypes.c_uint64, "int32_t": ctypes.c_int32, "int": ctypes.c_int,
           "size_t": ctypes.c_size_t, "float": ctypes.c_float, "char": ctypes.c_char}


def structs_of(op, known=None):
    """The structs of the C interface of lk/<op>.cuh as ctypes, by name. known: those of other ops, which may be their fields."""
    text, marker, _ = open(f"{ROOT}/lk/{op}.cuh").read().partition("\n#if LK_CUDA\n")  # the C half; kernels and launchers follow
    if not marker:
        raise ValueError(f"lk/{op}.cuh: no line #if LK_CUDA")
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.S)
    found = {}
    for body, name in re.findall(r"typedef struct \{([^{}]*)\} (lk_%s_\w+);" % op, text):
        fields = []
        for declaration in filter(None, map(str.strip, body.split(";"))):
            kind, star, names = re.fullmatch(r"(?:const )?(\w+) (\*?)([\w\[\], ]+)", declaration).groups()
            for field, extent in re.findall(r"(\w+)(?:\[(\d+)\])?", names):
                type_ = ctypes.c_void_p if star else SCALARS.get(kind) or known[kind]
                fields.append((field, type_ * int(extent) if extent else type_))
        found[name] = type(name, (ctypes.Structure,), {"_fields_": fields})
    return found


class Library:
    def __init__(self, path, ops, device):
        # A PyTorch for GPUs brings CUDA libraries of its own, cuBLASLt among them: those that the library was linked with come
        # first.
        self.lk = ctypes.CDLL(os.path.abspath(path), mode=os.RTLD_LOCAL | os.RTLD_NOW | os.RTLD_DEEPBIND)
        self.lk.lk_status_string.restype = self.lk.lk_last_error.restype = ctypes.c_char_p
        header = open(f"{ROOT}/lk/lk_base.cuh").read()
        numbers = [int(re.search(rf"#define LK_VERSION_{part} (\d+)", header)[1]) for part in ("MAJOR", "MINOR", "PATCH")]
        if self.lk.lk_version() // 100 != numbers[0] * 100 + numbers[1]:
            sys.exit(f"{path} is of version {self.lk.lk_version()}, the headers are of {numbers}: make lib")
        self.device = device
        self.ops, self.structs = list(ops), {}
        for op in ops:
            self.structs.update(structs_of(op, self.structs))
        self.fields = {name: dict(struct._fields_) for name, struct in self.structs.items()}

    def call(self, function, dtype, **fields):
        """Calls lk_<function>_<dtype>; tensors become pointers, a dict the fields of a struct within. The workspace is what the
        query says. Returns the status."""
        op = max((op for op in self.ops if function.startswith(op + "_")), key=len)
        args, known = self.structs[f"lk_{op}_args"](), self.fields[f"lk_{op}_args"]

        def fill(struct, fields):
            types = dict(struct._fields_)
            for field, value in fields.items():
                if field not in types:
                    raise KeyError(f"{function} has no {field}")
                if isinstance(value, dict):
                    fill(getattr(struct, field), value)
                    continue
                if torch.is_tensor(value):
                    value = value.data_ptr()
                elif isinstance(value, (list, tuple)):
                    value = types[field](*value)
                setattr(struct, field, value)

        fill(args, fields)
        if "workspace" in known:
            size = ctypes.c_size_t()
            status = getattr(self.lk, f"lk_{function}_workspace_bytes_{dtype}")(ctypes.byref(args), ctypes.byref(size))
            if status:
                return status
            if size.value:
                scratch = torch.empty(size.value + 256, dtype=torch.uint8, device=self.device)
                args.workspace, args.workspace_bytes = -(-scratch.data_ptr() // 256) * 256, size.value
        stream = torch.cuda.current_stream().cuda_stream if self.device == "cuda" else 0
        return getattr(self.lk, f"lk_{function}_{dtype}")(ctypes.byref(args), ctypes.c_void_p(stream))

    def scale(self, dtype, x, factor):
        """lk_scale: multiplies a tensor in place by one float in device memory. Returns the status."""
        stream = torch.cuda.current_stream().cuda_stream if self.device == "cuda" else 0
        return getattr(self.lk, f"lk_scale_{dtype}")(ctypes.c_void_p(x.data_ptr()), ctypes.c_int64(x.numel()),
                                                     ctypes.c_void_p(factor.data_ptr()), ctypes.c_void_p(stream))

    def launch(self, function, dtype, **fields):
        status = self.call(function, dtype, **fields)
        if status:
            raise RuntimeError(f"{self.lk.lk_status_string(status).decode()}: {self.lk.lk_last_error().decode()}")
