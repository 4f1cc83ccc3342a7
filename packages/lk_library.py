# SPDX-License-Identifier: MIT
"""What the builds of lk-kernels, lk_torch and lk_jax share: lk's library, from `make lib` or from an installed lk-kernels."""
import glob
import os
import re
import shutil
import subprocess
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def version(parts=3):
    """lk's version: 0.3.0, or with 2 parts 0.3, which is in the library's name."""
    text = open(f"{ROOT}/lk/lk_base.cuh").read()
    return ".".join(re.search(rf"#define LK_VERSION_{part} (\d+)", text)[1] for part in ("MAJOR", "MINOR", "PATCH")[:parts])


def name(backend):
    return {"gpu": f"liblk.so.{version(2)}", "cpu": "liblk_simt.so"}[backend]


def backend_asked(given=None):
    """What is given, else LK_BACKEND, else gpu."""
    backend = given or os.environ.get("LK_BACKEND", "gpu")
    if backend not in ("cpu", "gpu"):
        sys.exit(f"lk: the backend is {backend}; it must be cpu or gpu")
    return backend


def clear(folder):
    """Removes the library of an earlier build, which may be of the other backend, or of another version."""
    for pattern in ("liblk.so*", "liblk_simt.so"):
        for old in glob.glob(os.path.join(folder, pattern)):
            os.remove(old)


def facts(*arguments):
    """What `make lib` would build: (CUDA's version, the cards of machine code, that of PTX or None)."""
    cuda, arches, ptx = subprocess.check_output(["make", "-s", "-C", ROOT, "facts", *arguments], text=True).splitlines()
    if not cuda:
        sys.exit("lk: the library for GPUs needs nvcc, and there is none; LK_BACKEND=cpu takes the simulator's")
    return cuda, arches.split(), ptx or None


def build(backend, folder, *arguments):
    """Builds the library by `make lib` and copies it into the folder, in place of what an earlier build left there."""
    jobs = os.environ.get("MAX_JOBS", os.cpu_count())
    subprocess.check_call(["make", "-C", ROOT, "lib", f"BACKEND={backend}", f"-j{jobs}", *arguments])
    os.makedirs(folder, exist_ok=True)
    clear(folder)
    shutil.copy2(f"{ROOT}/build/{'cpu-plain/liblk_simt.so' if backend == 'cpu' else 'gpu/liblk.so'}", f"{folder}/{name(backend)}")


def installed(backend):
    """The installed package lk-kernels, where its library is of this backend and its headers are those of this checkout.

    None where it is not, and where ARCH asks for cards or LK_KERNELS is 0: then the library is compiled.
    """
    if os.environ.get("LK_KERNELS") == "0" or "ARCH" in os.environ:
        return None
    try:
        import lk
        found, headers = lk.BACKEND, f"{lk.include_dir()}/lk"
    except (ImportError, AttributeError):  # in a checkout `import lk` alone finds the folder of headers, which is no package
        return None
    ours = sorted(os.path.basename(path) for path in glob.glob(f"{ROOT}/lk/*.cuh"))
    same = all(os.path.exists(f"{headers}/{file}") and open(f"{headers}/{file}").read() == open(f"{ROOT}/lk/{file}").read()
               for file in ours)
    if found != backend or not same:
        why = "headers are not those of this checkout" if found == backend else f"library is for {found}, not {backend}"
        print(f"lk: lk-kernels {lk.__version__} is installed, but its {why}; so lk is compiled", flush=True)
        return None
    return lk


def take(backend, folder):
    """The library for a binding whose package is the folder: (what to link with, whose headers).

    That of an installed lk-kernels stays where it is; the binding loads it when it is imported. Else it is compiled and lies in
    the folder, where the binding finds it by its rpath.
    """
    kernels = installed(backend)
    if kernels is None:
        print(f"lk: make lib, backend {backend}", flush=True)
        build(backend, folder)
        return f"{folder}/{name(backend)}", ROOT
    clear(folder)
    print(f"lk: takes {kernels.library()} of lk-kernels {kernels.__version__}; nothing is compiled by nvcc", flush=True)
    return kernels.library(), kernels.include_dir()


def requirement(backend):
    """What a binding needs at run time: lk-kernels of this minor version, if its library is taken from there."""
    kernels = installed(backend)
    return [f"{kernels.NAME}~={version(2)}.0"] if kernels else []


def system(library, machine=None, least=0):
    """A wheel's system: the oldest glibc that has the functions which its library calls, as pip names it; from `least` on."""
    symbols = subprocess.check_output(["readelf", "-W", "--dyn-syms", library], text=True)
    minor = max(least, *(int(found) for found in re.findall(r"GLIBC_2\.(\d+)", symbols)))
    return f"manylinux_2_{minor}_{machine or os.uname().machine}"
