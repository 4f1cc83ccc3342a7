# SPDX-License-Identifier: MIT
"""Builds lk_torch: `make lib` for the kernels, g++ for the rest. README.md says how to choose the backend and the cards."""
import glob
import os
import shutil
import subprocess
import sys

import torch
from setuptools import setup
from torch.utils import cpp_extension

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
BACKEND = os.environ.get("LK_BACKEND", "gpu")
if BACKEND not in ("cpu", "gpu"):
    sys.exit(f"lk_torch: LK_BACKEND is {BACKEND}; it must be cpu or gpu")
CPU = BACKEND == "cpu"
FILES = ["module", "cross_entropy", "linear_cross_entropy", "logsumexp", "md_lrpe_cosine", "rms_norm"]


def version():
    text = open(os.path.join(ROOT, "lk", "lk_base.cuh")).read()
    return [text.split(f"#define LK_VERSION_{part} ")[1].split()[0] for part in ("MAJOR", "MINOR", "PATCH")]


class Build(cpp_extension.BuildExtension):
    """The kernels' library goes beside the extension, which finds it by its own folder."""

    def run(self):
        backend = "cpu" if CPU else "gpu"
        print(f"lk_torch: backend {backend}; make lib, then {len(FILES)} files for torch {torch.__version__}", flush=True)
        subprocess.check_call(["make", "-C", ROOT, "lib", f"BACKEND={backend}", "-j" + os.environ["MAX_JOBS"]])
        built = os.path.join(ROOT, "build", "cpu-plain/liblk_simt.so" if CPU else "gpu/liblk.so")
        library = "liblk_simt.so" if CPU else "liblk.so." + ".".join(version()[:2])
        folder = os.path.dirname(os.path.abspath(self.get_ext_fullpath("lk_torch._C")))
        os.makedirs(folder, exist_ok=True)
        for old in glob.glob(os.path.join(folder, "liblk*")):  # of the other backend, or of another version
            os.remove(old)
        shutil.copy2(built, os.path.join(folder, library))
        # The libstdc++ that PyTorch has loaded stands before g++'s own choice. Where that is a static one, two of them would be
        # in one process, and the first message with a number in it would crash.
        shared = next(line.split()[-1] for line in open("/proc/self/maps") if "/libstdc++.so" in line)
        self.extensions[0].extra_link_args += [f"-L{folder}", f"-l:{library}", shared]
        super().run()
        path = os.path.abspath(self.get_ext_fullpath("lk_torch._C"))
        if b"codecvt" in subprocess.check_output(["nm", "-D", "--defined-only", path]):
            sys.exit(f"lk_torch: {path} holds parts of a static libstdc++; take a g++ that links the shared one, no newer than "
                     f"{shared}")


def extension():
    flags = ["-O2", "-Wall", "-g0"]
    sources = [os.path.join("csrc", name + ".cpp") for name in FILES]
    options = dict(include_dirs=[ROOT], extra_link_args=["-Wl,-rpath,$ORIGIN"], extra_compile_args=flags)
    if CPU:
        options["define_macros"] = [("LK_TORCH_CPU", None)]
    else:
        options["include_dirs"] = [ROOT, *cpp_extension.include_paths("cuda")]
        options["library_dirs"] = cpp_extension.library_paths("cuda")
        options["libraries"] = ["c10_cuda", "torch_cuda"]
    return cpp_extension.CppExtension("lk_torch._C", sources, **options)


os.chdir(HERE)
os.environ.setdefault("MAX_JOBS", str(os.cpu_count()))
setup(name="lk_torch", version=".".join(version()), packages=["lk_torch"], ext_modules=[extension()],
      description="lk's five ops of language-model training in PyTorch", license="MIT", python_requires=">=3.10",
      cmdclass={"build_ext": Build.with_options(use_ninja=True)})
