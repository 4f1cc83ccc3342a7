# SPDX-License-Identifier: MIT
"""Builds lk_jax in the tree: lk's library by `make lib`, XLA's handlers by g++. Usage: python build.py [cpu | gpu]

gpu, the default, needs nvcc and no GPU. cpu takes lk's simulator, to test without a GPU. LK_BACKEND in the environment says
the same. Then `import lk_jax` works with this folder on PYTHONPATH. CXX names another compiler, MAX_JOBS limits how many run.
"""
import os
import re
import shutil
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
PACKAGE = os.path.join(HERE, "lk_jax")


def build(backend=None):
    import jax

    began = time.time()
    backend = backend or os.environ.get("LK_BACKEND", "gpu")
    if backend not in ("cpu", "gpu"):
        sys.exit(f"lk_jax: the backend is cpu or gpu, not {backend}")
    print(f"lk_jax: building for JAX {jax.__version__}, backend {backend}", flush=True)
    subprocess.check_call(["make", "-C", ROOT, "lib", f"BACKEND={backend}", f"-j{os.environ.get('MAX_JOBS', os.cpu_count())}"])
    header = open(f"{ROOT}/lk/lk_base.cuh").read()
    version = ".".join(re.search(rf"#define LK_VERSION_{part} (\d+)", header)[1] for part in ("MAJOR", "MINOR"))
    built, library = {"gpu": ("build/gpu/liblk.so", f"liblk.so.{version}"),
                      "cpu": ("build/cpu-plain/liblk_simt.so", "liblk_simt.so")}[backend]
    for name in os.listdir(PACKAGE):  # of an earlier build, maybe for the other backend
        if ".so" in name:
            os.remove(f"{PACKAGE}/{name}")
    shutil.copy(f"{ROOT}/{built}", f"{PACKAGE}/{library}")
    command = [os.environ.get("CXX", "g++"), "-std=c++17", "-O2", "-fPIC", "-shared", "-Wall", "-Wextra", f"-I{ROOT}",
               "-isystem", jax.ffi.include_dir(), *(["-DLK_JAX_CPU"] if backend == "cpu" else []), f"{HERE}/lk_jax.cpp",
               f"-L{PACKAGE}", f"-l:{library}", "-Wl,-rpath,$ORIGIN", "-o", f"{PACKAGE}/liblk_jax.so"]
    print(" ".join(command), flush=True)
    subprocess.check_call(command)
    print(f"lk_jax: {PACKAGE} is built for {backend} in {time.time() - began:.0f} s", flush=True)


if __name__ == "__main__":
    build(*sys.argv[1:2])
