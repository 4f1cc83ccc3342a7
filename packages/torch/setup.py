# SPDX-License-Identifier: MIT
"""Builds lk_torch: the kernels by `make lib` or from lk-kernels, the rest by g++. README.md says how to choose backend and cards."""
import glob
import os
import subprocess
import sys
import sysconfig

import torch
from setuptools import setup
from torch.utils import cpp_extension

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))
import lk_library

if torch.__version__ < (2, 11):
    sys.exit(f"lk_torch: PyTorch here is {torch.__version__}; it must be 2.11 or later")

CPU = lk_library.backend_asked() == "cpu"
FILES = ["module", "cross_entropy", "cross_entropy_ids", "glu", "kl", "linear_cross_entropy", "linear_cross_entropy_ids",
         "linear_kl", "logsumexp", "md_lrpe_cosine", "rms_norm"]


class Build(cpp_extension.BuildExtension):
    def run(self):
        backend = "cpu" if CPU else "gpu"
        print(f"lk_torch: backend {backend}; lk's library, then {len(FILES)} files for torch {torch.__version__}", flush=True)
        folder = os.path.dirname(os.path.abspath(self.get_ext_fullpath("lk_torch._C")))
        library, headers = lk_library.take(backend, folder)
        # The libstdc++ that PyTorch has loaded stands before g++'s own choice. Where that is a static one, two of them would be
        # in one process, and the first message with a number in it would crash.
        shared = next(line.split()[-1] for line in open("/proc/self/maps") if "/libstdc++.so" in line)
        self.extensions[0].include_dirs.insert(0, headers)
        self.extensions[0].extra_link_args += [library, shared]
        super().run()
        path = os.path.abspath(self.get_ext_fullpath("lk_torch._C"))
        if b"codecvt" in subprocess.check_output(["nm", "-D", "--defined-only", path]):
            sys.exit(f"lk_torch: {path} holds parts of a static libstdc++; take a g++ that links the shared one, no newer than "
                     f"{shared}")


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
    if CPU:
        options["define_macros"] = [("LK_TORCH_CPU", None)]
    else:
        options["include_dirs"], options["library_dirs"] = cuda()
        options["libraries"] = ["c10_cuda", "torch_cuda"]
    return cpp_extension.CppExtension("lk_torch._C", sources, **options)


os.chdir(HERE)
os.environ.setdefault("MAX_JOBS", str(os.cpu_count()))
setup(name="lk_torch", version=lk_library.version(), packages=["lk_torch"], ext_modules=[extension()],
      description="lk's ops of language-model training in PyTorch", license="MIT", python_requires=">=3.10",
      install_requires=lk_library.requirement("cpu" if CPU else "gpu"),
      cmdclass={"build_ext": Build.with_options(use_ninja=True)})
