# SPDX-License-Identifier: MIT
"""Builds lk_jax in the tree: lk's library by `make lib`, XLA's handlers by g++. Usage: python build.py [cpu | gpu]

gpu, the default, needs nvcc and no GPU. cpu takes lk's simulator, to test without a GPU. LK_BACKEND in the environment says
the same. Then `import lk_jax` works with this folder on PYTHONPATH. CXX names another compiler, MAX_JOBS limits how many run.
"""
import os
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))
import lk_library

PACKAGE = os.path.join(HERE, "lk_jax")


def build(backend=None):
    import jax

    began = time.time()
    backend = lk_library.backend_asked(backend)
    print(f"lk_jax: building for JAX {jax.__version__}, backend {backend}", flush=True)
    library, headers = lk_library.take(backend, PACKAGE)
    command = [os.environ.get("CXX", "g++"), "-std=c++17", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", f"-I{headers}",
               "-isystem", jax.ffi.include_dir(), *(["-DLK_JAX_CPU"] if backend == "cpu" else []), f"{HERE}/lk_jax.cpp",
               library, "-Wl,-rpath,$ORIGIN", "-o", f"{PACKAGE}/liblk_jax.so"]
    print(" ".join(command), flush=True)
    subprocess.check_call(command)
    print(f"lk_jax: {PACKAGE} is built for {backend} in {time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    build(*sys.argv[1:2])
