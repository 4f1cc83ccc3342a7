# SPDX-License-Identifier: MIT
"""Tests the wheel lk-kernels as a user gets it: installed into a venv of its own. Usage: python test.py WHEEL

Also lk_torch and lk_jax, where they are built in the tree for the same backend and this Python has PyTorch and JAX: without a
library beside them they take the wheel's. Needs gcc and no network.
"""
import glob
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
passed = failed = 0


def check(name, right, said=""):
    global passed, failed
    passed, failed = passed + bool(right), failed + (not right)
    if not right:
        print(f"FAIL  {name}\n      {str(said)[-2000:]}", flush=True)


def run(*command, **options):
    """What a command says, and whether it succeeded."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=options.pop("cwd", work), **options)
    return done.stdout, done.returncode == 0


def says(name, sentence, *command, succeeds=True, **options):
    said, good = run(*command, **options)
    check(name, good == succeeds and sentence in said, said)
    return said


wheel = os.path.abspath(sys.argv[1])
began, work = time.time(), tempfile.mkdtemp()
version = ".".join(re.search(rf"#define LK_VERSION_{part} (\d+)", open(f"{ROOT}/lk/lk_base.cuh").read())[1]
                   for part in ("MAJOR", "MINOR", "PATCH"))
names = zipfile.ZipFile(wheel).namelist()
cpu = "lk/lib/liblk_simt.so" in names
cuda = re.search(r"^CUDA = '?([\w.]+)", zipfile.ZipFile(wheel).read("lk/_build.py").decode(), re.M)[1]  # or None
major = cuda.split(".")[0]
name, cublas, where = (("lk_kernels_cu12", "nvidia-cublas-cu12<13,>=12", "cublas") if major == "12" else
                       ("lk_kernels", "nvidia-cublas<14,>=13", "cu13"))
print(f"{name.replace('_', '-')} as a wheel, {os.path.getsize(wheel) / 1e6:.1f} MB, {'the simulator' if cpu else f'CUDA {cuda}'}, "
      f"Python {sys.version.split()[0]}", flush=True)

# What is in it.
check("its name", re.fullmatch(rf"{name}-{version}-py3-none-manylinux_2_\d+_\w+\.whl", os.path.basename(wheel)), wheel)
headers = {f"lk/include/lk/{os.path.basename(path)}" for pattern in ("*.cuh", "*.md", "LICENSE") for path in glob.glob(f"{ROOT}/lk/{pattern}")}
library = "lk/lib/" + ("liblk_simt.so" if cpu else f"liblk.so.{version.rsplit('.', 1)[0]}")
code = {"lk/__init__.py", "lk/__main__.py", "lk/_build.py"}
check("its files", {name for name in names if ".dist-info/" not in name} == headers | code | {library}, names)
check("its headers are the sources'", all(zipfile.ZipFile(wheel).read(name) == open(f"{ROOT}/lk/{os.path.basename(name)}", "rb").read()
                                          for name in headers))
metadata = next(name for name in names if name.endswith("METADATA"))
check("it asks for CUDA's cuBLASLt", cpu != (f"Requires-Dist: {cublas}" in zipfile.ZipFile(wheel).read(metadata).decode()))

# Installed.
python = f"{work}/venv/bin/python"
check("a venv", run(sys.executable, "-m", "venv", f"{work}/venv")[1])
said, good = run(python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", wheel)
check("pip installs it", good, said)
exists = "import os, lk; print(os.path.exists(lk.library()) and os.path.exists(lk.include_dir() + '/lk/srms_norm.cuh') and lk.__version__)"
says("library() and include_dir() are there", version, python, "-c", exists)
says("the same in a checkout, whose folder lk is no package", version, python, "-c", exists, cwd=ROOT)
if not cpu:
    found = run(python, "-c", "import lk; print(lk.library())")[0].strip()
    dynamic = run("readelf", "-d", found)[0]
    check("it looks for cuBLASLt in nvidia-cublas' wheel", f"[$ORIGIN/../../nvidia/{where}/lib:" in dynamic, dynamic)
    symbols = run("readelf", "-W", "--dyn-syms", found)[0]
    most = {name: max((tuple(map(int, v.split("."))) for v in re.findall(rf"\b{name}_([\d.]+)", symbols)), default=(0,))
            for name in ("GLIBC", "GLIBCXX", "CXXABI")}
    least = tuple(map(int, re.search(r"manylinux_(\d+)_(\d+)", wheel).groups()))
    check("its name says which glibc it needs", most["GLIBC"] == least, most)
    try:
        import ziglang  # then it is linked for all that manylinux_2_28 has
        check("it needs what manylinux_2_28 has",
              most["GLIBC"] <= (2, 28) and most["GLIBCXX"] <= (3, 4, 24) and most["CXXABI"] <= (1, 3, 11), most)
    except ImportError:
        print("skip  manylinux_2_28: there is no ziglang", flush=True)
    check("and needs no other library of CUDA's", re.findall(r"NEEDED.*\[lib(cu\w+|nv\w+)", dynamic) == ["cublasLt"], dynamic)
said = says("python -m lk", f"lk {version}: ", python, "-m", "lk")
check("it loads, and is said to", f"loads    yes, as {version}" in said and said.endswith("lk: all as it should be\n"), said)
says("a wrong option shows what there is", "--cflags", python, "-m", "lk", "--help", succeeds=False)

# Which code a card runs. Code of 80 runs on 8.x, of 100f on 10.x; code with an a on its own card alone; PTX on the newer ones.
fits = ("import lk; lk.ARCHES, lk.PTX = ['80', '90a', '100f', '120a'], '120'; from lk.__main__ import runs_on; "
        "print([runs_on(c) for c in (75, 86, 90, 91, 100, 103, 110, 120, 121)])")
says("which code runs on which card", "[None, 'machine code of 80', 'machine code of 90a', None, 'machine code of 100f', "
     "'machine code of 100f', None, 'machine code of 120a', 'PTX of 120, compiled at the first call']", python, "-c", fits)

# What the driver takes: a stand-in for it says CUDA 12.4, and has no card.
with open(f"{work}/driver.c", "w") as file:
    file.write("int cuDriverGetVersion(int *version) { *version = 12040; return 0; }\nint cuInit(unsigned flags) { return 100; }\n")
check("a stand-in for the driver", run("gcc", "-shared", "-fPIC", "driver.c", "-o", "libcuda.so.1")[1])
driver = {**os.environ, "LD_LIBRARY_PATH": f"{work}:" + os.environ.get("LD_LIBRARY_PATH", "")}
says("driver_cuda()", "12.4\n", python, "-W", "ignore", "-c", "import lk; print(lk.driver_cuda())", env=driver)
old = "lk-kernels was compiled with CUDA 13.0, and this machine's driver takes CUDA 12.4 and older: update the driver"
says("which driver is too old", f"{old}; or install lk-kernels-cu12 in its place\nNone None None None None", python, "-W", "ignore",
     "-c", "import lk; lk.CUDA, lk.NAME = '13.0', 'lk-kernels'; print(lk._too_old('12.4')); "
     "a = [lk._too_old(driver) for driver in ('13.0', '14.1', None)]; lk.CUDA = '12.9'; a.append(lk._too_old('12.0')); "
     "lk.CUDA = None; print(*a, lk._too_old('11.8'))")
said = says("python -m lk with it", "lk: all" if cpu else "driver   takes CUDA 12.4", python, "-m", "lk", env=driver,
            succeeds=major != "13")
if major == "13":
    check("it says so", f"RuntimeWarning: {old}" in said and f"lk: {old}" in said, said)

# A user's program in C, linked with it.
with open(f"{work}/main.c", "w") as file:
    file.write("""#include <stdio.h>
#include "lk/logsumexp.cuh"
LK_DECLARE_LOGSUMEXP(bf16)
int main(void)
{
    const lk_logsumexp_args args = {.outer = 2, .cols = 3};
    const lk_status status = lk_logsumexp_forward_bf16(&args, NULL);
    printf("%s, %s\\n", lk_status_string(status), lk_last_error());
    return lk_version() != LK_VERSION;
}
""")
flags = [run(python, "-m", "lk", option)[0].split() for option in ("--cflags", "--libs")]
said, good = run("gcc", "-std=c11", "-Wall", "-Werror", *flags[0], "main.c", *flags[1], "-o", "program")
check("gcc with --cflags and --libs", good, said)
says("the program gets lk's sentence", "LK_ERR_NULL, lk_logsumexp_forward_bf16: x is NULL", f"{work}/program")

# Both wheels in one place.
site = os.path.dirname(os.path.dirname(run(python, "-c", "import lk; print(lk.__file__)")[0].strip()))
other = f"{site}/other-1.dist-info"
os.mkdir(other)
with open(f"{other}/METADATA", "w") as file:
    file.write(f"Metadata-Version: 2.1\nName: {'lk-kernels' if major == '12' else 'lk-kernels-cu12'}\nVersion: 1\n")
says("both wheels are too many", "lk-kernels and lk-kernels-cu12 are both installed", python, "-m", "lk", succeeds=False)
shutil.rmtree(other)

# Builds of the bindings take it, if it has this checkout's headers and their backend.
backend, other = ("cpu", "gpu") if cpu else ("gpu", "cpu")
take = "import lk_library, sys; found = lk_library.installed(sys.argv[1]); print(found and found.library())"
environment = {name: value for name, value in os.environ.items() if name not in ("ARCH", "LK_KERNELS")}
environment["PYTHONPATH"] = os.path.dirname(HERE)
says("a build takes its library", f"{site}/{library}", python, "-c", take, backend, env=environment)
says("not for the other backend", f"its library is for {backend}, not {other}; so lk is compiled\nNone", python, "-c", take, other,
     env=environment)
says("not with LK_KERNELS=0", "None", python, "-c", take, backend, env={**environment, "LK_KERNELS": "0"})
says("not where ARCH names cards", "None", python, "-c", take, backend, env={**environment, "ARCH": "90a"})
with open(f"{site}/lk/include/lk/lk_base.cuh", "a") as file:
    file.write("// changed")
says("not with other headers", "its headers are not those of this checkout; so lk is compiled\nNone", python, "-c", take, backend,
     env=environment)

# The bindings, built in the tree, without a library beside them.
device = "cpu" if cpu else "cuda"
call = {"torch": f"import torch, lk_torch; print(lk_torch.functional.logsumexp(torch.zeros(2, 4, device='{device}'), 1))",
        "jax": "import jax.numpy as jnp, lk_jax; print(lk_jax.logsumexp(jnp.zeros((2, 4)), 1))"}
for framework, binding in (("torch", "_C.*so"), ("jax", "liblk_jax.so")):
    package = f"{ROOT}/packages/{framework}/lk_{framework}"
    built = glob.glob(f"{package}/{binding}")
    same = built and f"[{os.path.basename(library)}]" in run("readelf", "-d", built[0])[0]
    if not same or not run(sys.executable, "-c", f"import {framework}")[1] or not (cpu or shutil.which("nvidia-smi")):
        print(f"skip  lk_{framework} with the wheel's library: needs {framework}, and `make {framework}` of the same backend before")
        continue
    moved = f"{work}/{framework}/lk_{framework}"
    shutil.copytree(package, moved, ignore=shutil.ignore_patterns("liblk.so*", "liblk_simt.so"))
    says(f"lk_{framework} without lk-kernels", "Install lk-kernels", sys.executable, "-c", call[framework], succeeds=False,
         env={**os.environ, "PYTHONPATH": f"{work}/{framework}"})
    says(f"lk_{framework} with lk-kernels", "1.386", sys.executable, "-c", call[framework],
         env={**os.environ, "PYTHONPATH": f"{work}/{framework}:{site}"})

shutil.rmtree(work)
print(f"{passed} passed, {failed} failed in {time.time() - began:.0f} s")
sys.exit(failed > 0)
