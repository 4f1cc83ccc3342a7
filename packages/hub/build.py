# SPDX-License-Identifier: MIT
"""Builds the kernel that Hugging Face's `kernels` loads, in build/hub/<variant>. Usage: python build.py [cpu | gpu]

It builds lk_torch in its folder, as `make torch` does, and links its objects again, with those of liblk.so, without those for
Python, and with another namespace for the ops: one library that needs PyTorch's and CUDA's, and no version of Python. gpu, the
default, needs nvcc and no GPU: ARCH="80 90a 100f" chooses the cards. cpu takes lk's simulator, to test without a GPU.
LK_BACKEND says the same, CXX names another compiler. Where ziglang is installed, it links, for glibc 2.28 and later.
"""
import base64
import glob
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time

import torch
from torch.utils import cpp_extension

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
TORCH = os.path.join(ROOT, "packages", "torch")
sys.path.insert(0, os.path.join(ROOT, "packages"))
import lk_library

VERSION = 0  # of the kernel's interface, the Hub's number: 0 while names may change, then a new one where a caller must change


def variant(backend):
    """The folder's name, which says what the build is for."""
    number = "torch" + "".join(torch.__version__.split(".")[:2])
    device = "cpu" if backend == "cpu" else "cu" + torch.version.cuda.replace(".", "")
    abi = "cxx11" if torch.compiled_with_cxx11_abi() else "cxx98"
    return f"{number}-{abi}-{device}-{platform.machine()}-{platform.system().lower()}"


def cards():
    """What machine code the library has, as `kernels` writes it: 9.0a, or 10.0+PTX."""
    text = open(os.path.join(ROOT, "build", "gpu", "lib", "arches")).read()
    found = re.findall(r"code=(sm|compute)_(\d+)(\d[a-z]?)\b", text)
    return [f"{major}.{minor}" + ("+PTX" if kind == "compute" else "") for kind, major, minor in found]


def call(*command):
    print(" ".join(command), flush=True)
    subprocess.check_call(command)


def digest(folder):
    """Of each file but metadata.json, as `kernels verify-signature` wants it: SHA-256 in base64."""
    sums = {name: hashlib.sha256(open(os.path.join(folder, name), "rb").read()).digest()
            for name in sorted(os.listdir(folder)) if name != "metadata.json"}
    return {"algorithm": "sha256", "files": {name: base64.b64encode(found).decode() for name, found in sums.items()}}


def build(backend):
    began = time.time()
    if backend not in ("cpu", "gpu"):
        sys.exit(f"lk hub: the backend is cpu or gpu, not {backend}")
    if backend == "gpu" and torch.version.cuda is None:
        sys.exit(f"lk hub: PyTorch {torch.__version__} is built without CUDA; BACKEND=cpu builds the simulator's kernel")
    cuda = backend == "gpu" and lk_library.facts()[0]
    if cuda and cuda.split(".")[0] != torch.version.cuda.split(".")[0]:
        sys.exit(f"lk hub: nvcc is of CUDA {cuda}, and PyTorch {torch.__version__} of CUDA {torch.version.cuda}; NVCC= names another")
    print(f"lk hub: {variant(backend)}, for PyTorch {torch.__version__}, backend {backend}; lk_torch first", flush=True)
    jobs = os.environ.get("MAX_JOBS", str(os.cpu_count()))
    subprocess.check_call(["make", "-C", ROOT, "lib", f"BACKEND={backend}", "-j" + jobs])
    subprocess.check_call([sys.executable, os.path.join(TORCH, "setup.py"), "build_ext", "--inplace"],
                          env={**os.environ, "LK_BACKEND": backend})
    of_torch = glob.glob(os.path.join(TORCH, "build", f"temp.*{sys.implementation.cache_tag}", "csrc", "*.o"))
    of_lk = [f"{ROOT}/build/{where}/*.o" for where in (["gpu/lib"] if backend == "gpu" else ["cpu-plain/lib", "cpu-plain/simt"])]
    objects = sorted(o for o in of_torch if os.path.basename(o) != "module.o") + sorted(o for g in of_lk for o in glob.glob(g))
    files = [os.path.join(TORCH, "lk_torch", name + ".py") for name in ("functional", "_fake", "_dtensor")]
    files += glob.glob(os.path.join(HERE, "kernel", "*.py")) + [os.path.join(ROOT, "LICENSE")]

    parts = hashlib.sha256()
    for path in [*objects, *sorted(files)]:
        parts.update(open(path, "rb").read())
    device = "cpu" if backend == "cpu" else "cuda"
    name = f"_lk_{device}_{parts.hexdigest()[:8]}"  # the ops' namespace, and the module's name: no two builds have one
    folder = os.path.join(ROOT, "build", "hub", variant(backend))
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    for path in files:
        shutil.copy(path, folder)
    # Its static initializers register the ops: it exports nothing. Of an inline function or a class that lk_torch or another
    # build has too, the process would else take whichever came first, and with it the ops of that one.
    work = os.path.join(ROOT, "build", "hub", "work")
    os.makedirs(work, exist_ok=True)
    with open(os.path.join(work, "namespace.cpp"), "w") as f:
        f.write(f'namespace lk_torch {{ extern const char ops_namespace[] = "{name}"; }}\n')
        # While glibc's is true, g++'s headers count references without atomics. glibc has it from 2.32 on.
        f.write('extern "C" const char __libc_single_threaded = 0;\n')
    with open(os.path.join(work, "exports"), "w") as f:
        f.write("{ local: *; };\n")
    # As lk_torch's setup.py.
    shared = [next(line.split()[-1] for line in open("/proc/self/maps") if "/libstdc++.so" in line)]
    libraries = ["torch", "torch_cpu", "c10"]
    if backend == "gpu":
        libraries += ["torch_cuda", "c10_cuda", "cudart", "cublasLt"]
    cxx, own = os.environ.get("CXX", "g++"), os.path.join(work, "namespace.o")
    flags = ["-shared", "-pthread", "-Wl,-z,defs", "-Wl,--version-script=" + os.path.join(work, "exports")]
    call(cxx, "-O2", "-fPIC", "-c", os.path.join(work, "namespace.cpp"), "-o", own)
    linker = [cxx]
    if importlib.util.find_spec("ziglang"):  # as packages/rules.mk links liblk.so, and why: the wheel's README
        linker = [sys.executable, "-m", "ziglang", "c++", "-target", f"{platform.machine()}-linux-gnu.2.28", "-nostdlib++",
                  "-Xlinker", "--strip-debug"]
        shared += [subprocess.check_output([cxx, "-print-file-name=libgcc_s.so.1"], text=True).strip()]
    call(*linker, own, *objects, *(f"-L{path}" for path in cpp_extension.library_paths("cuda" if backend == "gpu" else "cpu")),
         *(f"-l{name}" for name in libraries), *shared, *flags, "-o", os.path.join(folder, name + ".abi3.so"))
    about = {"id": name, "name": "lk", "version": VERSION, "license": "MIT", "python-depends": [], "backend": {"type": device}}
    if backend == "gpu":
        about["backend"]["archs"] = cards()
    about["digest"] = digest(folder)
    with open(os.path.join(folder, "metadata.json"), "w") as f:
        json.dump(about, f, indent=2)
    size = sum(os.path.getsize(os.path.join(folder, n)) for n in os.listdir(folder)) / 2**20
    print(f"lk hub: {os.path.relpath(folder)}, {size:.0f} MiB, torch.ops.{name}, in {time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    build(*(sys.argv[1:2] or [os.environ.get("LK_BACKEND", "gpu")]))
