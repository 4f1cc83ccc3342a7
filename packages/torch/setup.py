# SPDX-License-Identifier: MIT
"""Builds lk_torch: the kernels by `make lib` or from lk-kernels, the rest by g++. README.md says which backends and cards.

LK_TORCH_WHEEL=1, as wheels.py sets it: for all versions of Python, with the library of lk-kernels."""
import glob
import os
import shutil
import subprocess
import sys
import sysconfig

import torch
from setuptools import setup
try:
    from setuptools.command.bdist_wheel import bdist_wheel  # setuptools 70.1 and later
except ImportError:
    from wheel.bdist_wheel import bdist_wheel
from torch.utils import cpp_extension

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))
import lk_library

if torch.__version__ < (2, 11):
    sys.exit(f"lk_torch: PyTorch here is {torch.__version__}; it must be 2.11 or later")

CPU = lk_library.backend_asked() == "cpu"
WHEEL = os.environ.get("LK_TORCH_WHEEL") == "1"
NAME = "lk_torch._ops" if WHEEL else "lk_torch._C"
FILES = ["any_python" if WHEEL else "module", "cross_entropy", "cross_entropy_ids", "glu", "kl",
         "linear_cross_entropy", "linear_cross_entropy_ids", "linear_kl", "linear_support", "linear_topk", "logsumexp",
         "md_lrpe_cosine", "rms_norm", "rope"]


class Build(cpp_extension.BuildExtension):
    def run(self):
        backend = "cpu" if CPU else "gpu"
        print(f"lk_torch: backend {backend}; lk's library, then {len(FILES)} files for torch {torch.__version__}", flush=True)
        folder = os.path.dirname(os.path.abspath(self.get_ext_fullpath(NAME)))
        if WHEEL and not lk_library.installed(backend):
            sys.exit("lk_torch: a wheel takes the library of lk-kernels of this checkout, and there is none: make wheels")
        library, headers = lk_library.take(backend, folder)
        # The libstdc++ that PyTorch has loaded stands before g++'s own choice. Where that is a static one, two of them would be
        # in one process, and the first message with a number in it would crash.
        shared = next(line.split()[-1] for line in open("/proc/self/maps") if "/libstdc++.so" in line)
        if headers not in self.extensions[0].include_dirs:  # bdist_wheel may run this twice
            self.extensions[0].include_dirs.insert(0, headers)
            self.extensions[0].extra_link_args += [library, shared]
        super().run()
        path = os.path.abspath(self.get_ext_fullpath(NAME))
        if b"codecvt" in subprocess.check_output(["nm", "-D", "--defined-only", path]):
            sys.exit(f"lk_torch: {path} holds parts of a static libstdc++; take a g++ that links the shared one, no newer than "
                     f"{shared}")
        if WHEEL:
            shutil.copy(os.path.join(HERE, "any_python.py"), os.path.join(folder, "_C.py"))
            major, minor, patch = map(int, lk_library.version().split("."))
            with open(os.path.join(folder, "_build.py"), "w") as file:
                file.write(f"BACKEND = {'cpu' if CPU else 'cuda'!r}\nTORCH = {torch.__version__!r}\n"
                           f"LK_VERSION = {10000 * major + 100 * minor + patch}\n")


class Wheel(bdist_wheel):
    """With LK_TORCH_WHEEL=1 for any Python 3, and for glibc from 2.28 on, as PyTorch's own, or from what it calls on."""

    def get_tag(self):
        if not WHEEL:
            return super().get_tag()
        build = self.get_finalized_command("build_ext")
        return "py3", "none", lk_library.system(build.get_ext_fullpath(NAME), least=28)


def cuda():
    """Folders of CUDA's headers and libraries: of the toolkit, or of the wheels beside PyTorch, where there is no toolkit."""
    if cpp_extension.CUDA_HOME:
        return cpp_extension.include_paths("cuda"), cpp_extension.library_paths("cuda")
    wheels = glob.glob(os.path.join(sysconfig.get_path("purelib"), "nvidia", "cu*", "include"))
    return cpp_extension.include_paths("cpu") + wheels, cpp_extension.library_paths("cpu")


def extension():
    flags = ["-O2", "-Wall", "-g0"]
    sources = [os.path.join("csrc", name + ".cpp") for name in FILES]
    options = dict(include_dirs=[], extra_link_args=["-Wl,-rpath,$ORIGIN"], extra_compile_args=flags)
    if WHEEL:  # it exports nothing, as the Hub's kernel: packages/hub/build.py says why
        options["extra_link_args"].append("-Wl,--version-script=" + os.path.join(HERE, "csrc", "any_python.exports"))
    if CPU:
        options["define_macros"] = [("LK_TORCH_CPU", None)]
    else:
        options["include_dirs"], options["library_dirs"] = cuda()
        options["libraries"] = ["c10_cuda", "torch_cuda"]
    return cpp_extension.CppExtension(NAME, sources, py_limited_api=WHEEL, **options)


os.chdir(HERE)
os.environ.setdefault("MAX_JOBS", str(os.cpu_count()))
minor = ".".join(torch.__version__.split(".")[:2])
setup(name="lk_torch", version=lk_library.version() + (f"+torch{minor}" if WHEEL else ""), packages=["lk_torch"],
      ext_modules=[extension()], python_requires=">=3.10", license="MIT",
      description="lk's ops of language-model training in PyTorch",
      install_requires=lk_library.requirement("cpu" if CPU else "gpu") + ([f"torch=={minor}.*"] if WHEEL else []),
      cmdclass={"build_ext": Build.with_options(use_ninja=True), "bdist_wheel": Wheel})
