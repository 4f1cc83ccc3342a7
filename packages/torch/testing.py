# SPDX-License-Identifier: MIT
"""What the test programs of lk_torch begin with: the lk_torch that is tested, its device, and how checks are counted. A program
imports this first."""
import glob
import logging
import os
import sys
import warnings

HERE = os.path.dirname(os.path.abspath(__file__))
if not glob.glob(HERE + "/lk_torch/_C*"):  # not built in this folder: take the installed package
    sys.path = [p for p in sys.path if os.path.abspath(p or ".") != HERE]
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # a graph on disk may have been compiled with an older lk_torch

import lk_torch

CUDA = lk_torch.BACKEND == "cuda"
D = "cuda" if CUDA else "cpu"
VERBOSE = os.environ.get("V") == "1"
totals = [0, 0]  # passed, failed


def verdict(name, right, why=""):
    totals[not right] += 1
    if not right or VERBOSE:
        print(f"  {'ok  ' if right else 'FAIL'}  {name}{'' if right or not why else f': {why}'}", flush=True)


def quiet():
    warnings.filterwarnings("ignore")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it says that there is no GPU
