# SPDX-License-Identifier: MIT
"""Builds lk_torch as wheels in build/dist, one for each minor version of PyTorch, for all versions of Python. Tests each.

    python packages/torch/wheels.py [cpu | gpu] [2.11 2.15 ...]     # after `make wheel`, whose lk-kernels they take

PyTorch comes from PyPI into a venv in build/wheels, which is the user's: it has PyTorch and what PyTorch needs, and the tests
run with this venv's programs alone in PATH, so without a compiler. setuptools and ninja lie beside it. A venv takes 5 GB with
PyTorch for CUDA, and is removed after its test. LK_PIP=ARGS: more arguments for pip, as --index-url of PyTorch without CUDA.
"""
import glob
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
DIST, WORK = f"{ROOT}/build/dist", f"{ROOT}/build/wheels"
sys.path.insert(0, os.path.dirname(HERE))
import lk_library

VERSIONS = ["2.11", "2.12", "2.13", "2.14", "2.15"]
MOST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}  # manylinux_2_28
# Of test.py's groups those that call each kind of op in eager mode, and those of wrong arguments and of autograd's rules.
GROUPS = ["mistakes", "norms", "logsumexp", "cross_entropy", "linear_cross_entropy_ids", "kl", "autograd"]
USE = """
import shutil, torch, lk_torch
assert not [tool for tool in ("g++", "gcc", "cc", "nvcc", "ninja") if shutil.which(tool)]
if lk_torch.BACKEND == "cuda" and not torch.cuda.is_available():
    raise SystemExit(print("imported"))
from torch.nn import functional as F
D = "cpu" if lk_torch.BACKEND == "cpu" else "cuda"
x, weight = torch.randn(7, 48, device=D, requires_grad=True), torch.randn(48, device=D, requires_grad=True)
head, target = torch.randn(33, 48, device=D, requires_grad=True), torch.arange(7, device=D)
ours = lk_torch.functional.linear_cross_entropy(lk_torch.functional.rms_norm(x, (48,), weight, 1e-6), head, target)
theirs = F.cross_entropy(F.rms_norm(x, (48,), weight, 1e-6) @ head.T, target)
for a, b in zip(*([loss, *torch.autograd.grad(loss, (x, weight, head))] for loss in (ours, theirs))):
    assert torch.allclose(a, b, rtol=1e-4, atol=1e-5), (a, b)
print("forward and backward")
"""
totals = [0, 0]


def verdict(name, right, why=""):
    totals[not right] += 1
    if not right:
        print(f"  FAIL  {name}  {str(why)[-2000:]}", flush=True)


def run(*command, **options):
    """What a command says, and whether it succeeded."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options)
    return done.stdout, done.returncode == 0


def must(*command, **options):
    said, good = run(*command, **options)
    if not good:
        sys.exit(f"{said}\nlk: this failed: {' '.join(command)}")
    return said


def venv(version):
    """A user's venv with this PyTorch, and its Python."""
    folder = f"{WORK}/{version}"
    shutil.rmtree(folder, ignore_errors=True)
    must(sys.executable, "-m", "venv", folder)
    pip = os.environ.get("LK_PIP", "").split()
    must(f"{folder}/bin/python", "-m", "pip", "install", "-q", f"torch=={version}.*", "numpy", *pip)
    return f"{folder}/bin/python"


def build(version, python, backend, kernels):
    """The wheel's path. lk-kernels and the tools are found by PYTHONPATH, so the venv stays a user's."""
    base = f"{WORK}/build-{version}"
    shutil.rmtree(base, ignore_errors=True)
    must(sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", f"{base}/kernels", kernels)
    for old in glob.glob(f"{DIST}/lk_torch-*torch{version}-*.whl"):
        os.remove(old)
    environment = {name: value for name, value in os.environ.items() if name not in ("ARCH", "LK_KERNELS")}
    environment.update(LK_TORCH_WHEEL="1", LK_BACKEND=backend, PYTHONPATH=f"{base}/kernels:{WORK}/tools",
                       PATH=f"{WORK}/tools/bin:{os.environ['PATH']}")
    os.makedirs(f"{base}/egg")
    must(python, f"{HERE}/setup.py", "egg_info", "-e", f"{base}/egg", "build", "-b", base, "bdist_wheel", "--skip-build",
         "-b", f"{base}/bdist", "-d", DIST, env=environment)
    return glob.glob(f"{DIST}/lk_torch-*torch{version}-*.whl")[0]


def contents(version, wheel):
    """What is in the wheel, and which systems it runs on."""
    name = os.path.basename(wheel)
    archive = zipfile.ZipFile(wheel)
    first, machine = f"lk_torch-{lk_library.version()}+torch{version}-py3-none-manylinux_2_", os.uname().machine
    found = re.fullmatch(re.escape(first) + rf"(\d+)_{machine}\.whl", name)
    verdict("its name", found and found[1] == "28", name)
    files = {f for f in archive.namelist() if ".dist-info/" not in f}
    sources = {f"lk_torch/{os.path.basename(path)}" for path in glob.glob(f"{HERE}/lk_torch/*.py")}
    verdict("its files", files == sources | {"lk_torch/_C.py", "lk_torch/_build.py", "lk_torch/_ops.abi3.so"}, files)
    metadata = archive.read(next(f for f in archive.namelist() if f.endswith("METADATA"))).decode()
    needs = sorted(line.split(": ")[1] for line in metadata.splitlines() if line.startswith("Requires-Dist"))
    verdict("what it needs", needs == [f"lk-kernels~={lk_library.version(2)}.0", f"torch=={version}.*"], needs)
    archive.extract("lk_torch/_ops.abi3.so", f"{WORK}/build-{version}/wheel")
    symbols, _ = run("readelf", "-W", "--dyn-syms", f"{WORK}/build-{version}/wheel/lk_torch/_ops.abi3.so")
    newer = [line for line in symbols.splitlines() for dep, v in re.findall(r"@(GLIBC|GLIBCXX|CXXABI|GCC)_([\d.]+)", line)
             if " UND " in line and tuple(map(int, v.split("."))) > MOST[dep]]
    verdict("manylinux_2_28", not newer, newer)
    verdict("it needs no Python, and exports nothing", not re.search(r" UND _?Py", symbols) and
            not re.search(r"(GLOBAL|WEAK|UNIQUE) +DEFAULT +\d+ ", symbols), symbols)


def use(version, python, backend, kernels, wheel):
    """Installs both wheels, and runs with the venv's own programs in PATH."""
    plain = {"PATH": os.path.dirname(python), "HOME": os.environ.get("HOME", "/"), "LANG": "C.UTF-8"}
    said, good = run(python, "-m", "pip", "install", "-q", "--no-index", "--no-deps", kernels, wheel, env=plain, cwd=WORK)
    verdict("pip installs it", good, said)
    said, good = run(python, "-m", "pip", "check", env=plain, cwd=WORK)
    verdict("and finds all that it needs", good, said)
    said, good = run(python, "-c", USE, env=plain, cwd=WORK)
    verdict("it works without a compiler", good and said.split("\n")[-2] in ("imported", "forward and backward"), said)
    print(f"      {said.splitlines()[-1]}", flush=True)
    said, good = run(python, "-c", "import torch; torch.__version__ = '1.0.0'; import lk_torch", env=plain, cwd=WORK)
    verdict("another PyTorch gets a sentence", not good and f"was built for PyTorch {version}." in said, said)
    if backend == "gpu":
        return print("skip  wheels, lk_torch's tests: those of a GPU are run by make torch")
    tests = f"{WORK}/build-{version}/tests"
    os.makedirs(tests)
    for file in ("test.py", "testing.py"):
        shutil.copy(f"{HERE}/{file}", tests)
    said, good = run(python, f"{tests}/test.py", *GROUPS, env=plain, cwd=tests)
    counts = re.search(r"^(\d+) passed, (\d+) failed", said, re.M)
    verdict("lk_torch's tests", good and counts and int(counts[2]) == 0, said)
    print(f"      lk_torch's tests, {' '.join(GROUPS)}: {counts[0] if counts else 'no count'}", flush=True)


def main():
    words = sys.argv[1:]
    backend = words.pop(0) if words[:1] in (["cpu"], ["gpu"]) else "gpu"
    kernels = glob.glob(f"{DIST}/lk_kernels-{lk_library.version()}-*{os.uname().machine}.whl")
    if len(kernels) != 1:
        sys.exit(f"lk: build/dist has {len(kernels)} wheels of lk-kernels for this machine; `make wheel` writes one")
    os.makedirs(WORK, exist_ok=True)
    shutil.rmtree(f"{WORK}/tools", ignore_errors=True)
    kernels = shutil.copy(kernels[0], WORK)  # `make dist` empties build/dist
    must(sys.executable, "-m", "pip", "install", "-q", "--target", f"{WORK}/tools", "setuptools", "wheel", "ninja")
    for version in words or VERSIONS:
        began = time.time()
        python = venv(version)
        torch, got = must(python, "-c", "import torch; print(torch.__version__)").strip().split("\n")[-1], time.time()
        wheel = build(version, python, backend, kernels)
        print(f"{os.path.basename(wheel)}, {os.path.getsize(wheel) / 1e6:.1f} MB, built with PyTorch {torch} in "
              f"{time.time() - got:.0f} s", flush=True)
        contents(version, wheel)
        use(version, python, backend, kernels, wheel)
        shutil.rmtree(f"{WORK}/{version}")
        print(f"      {time.time() - began:.0f} s in all, {got - began:.0f} of them for PyTorch", flush=True)
    print(f"{totals[0]} passed, {totals[1]} failed")
    sys.exit(totals[1] > 0)


if __name__ == "__main__":
    main()
