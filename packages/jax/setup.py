# SPDX-License-Identifier: MIT
"""pip install --no-build-isolation ./packages/jax    from a checkout of lk; LK_BACKEND=cpu or gpu chooses, see build.py."""
import os
import shutil
import subprocess
import sys

import setuptools
from setuptools.command.build_py import build_py

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))
import lk_library


class Build(build_py):
    def run(self):
        subprocess.check_call([sys.executable, f"{HERE}/build.py"])
        shutil.rmtree(self.build_lib, ignore_errors=True)  # may hold the library of another backend
        super().run()


class Binary(setuptools.Distribution):
    def has_ext_modules(self):  # so that the wheel is one of this machine
        return True


setuptools.setup(name="lk_jax", version=lk_library.version(), description="lk's operations of language-model training for JAX",
                 license="MIT", packages=["lk_jax"], package_data={"lk_jax": ["*.so*"]},
                 install_requires=["jax>=0.10", *lk_library.requirement(lk_library.backend_asked())], python_requires=">=3.11", cmdclass={"build_py": Build}, distclass=Binary)
