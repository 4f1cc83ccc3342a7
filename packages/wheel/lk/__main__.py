# SPDX-License-Identifier: MIT
"""python -m lk            what is installed, and whether it fits this machine and its driver; the last line says so
python -m lk --cflags   for a compiler
python -m lk --libs     for a linker"""
import ctypes
import importlib.metadata
import os
import sys

import lk


def cards():
    """The names of this machine's cards and their compute capabilities, 90 for 9.0; by the driver, so without CUDA's toolkit."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count, found = ctypes.c_int(), []
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    for device in range(count.value):
        name, major, minor = ctypes.create_string_buffer(100), ctypes.c_int(), ctypes.c_int()
        driver.cuDeviceGetName(name, 100, device)
        driver.cuDeviceGetAttribute(ctypes.byref(major), 75, device)  # COMPUTE_CAPABILITY_MAJOR
        driver.cuDeviceGetAttribute(ctypes.byref(minor), 76, device)
        found.append((name.value.decode(), 10 * major.value + minor.value))
    return found


def runs_on(capability):
    """The code that a card of this compute capability runs, in words; None where there is none."""
    for arch in lk.ARCHES:
        number = int(arch.rstrip("af"))
        family = arch[-1] != "a" and number // 10 == capability // 10 and number <= capability
        if number == capability or family:
            return f"machine code of {arch}"
    return f"PTX of {lk.PTX}, compiled at the first call" if lk.PTX and capability >= int(lk.PTX) else None


def number(version):
    return tuple(map(int, version.split(".")))


def main(arguments):
    if arguments == ["--cflags"]:
        return print(f"-I{lk.include_dir()}")
    if arguments == ["--libs"]:
        folder, file = os.path.split(lk.library())
        return print(f"-L{folder} -l:{file} -Wl,-rpath,{folder}")
    if arguments:
        sys.exit(__doc__)
    if lk.BACKEND == "cpu":
        code = "the simulator, which runs on the CPU and is for tests"
    else:
        code = f"CUDA {lk.CUDA}, machine code of {' '.join(lk.ARCHES)}" + (f", PTX of {lk.PTX}" if lk.PTX else "")
    print(f"lk {lk.__version__}: {code}")
    print(f"library  {lk.library()}, {os.path.getsize(lk.library()) / 1e6:.1f} MB")
    print(f"headers  {lk.include_dir()}/lk, {sum(name.endswith('.cuh') for name in os.listdir(lk.include_dir() + '/lk'))} files")
    wrong = []
    installed = {found.metadata["Name"] for found in importlib.metadata.distributions()}
    if {"lk-kernels", "lk-kernels-cu12"} <= installed:
        wrong.append("lk-kernels and lk-kernels-cu12 are both installed, and have the same files: uninstall both, and install one")
    try:
        library = ctypes.CDLL(lk.library())
        print(f"loads    yes, as {'.'.join(str(library.lk_version() // n % 100) for n in (10000, 100, 1))}")
    except OSError as error:
        print(f"loads    no: {error}")
        cublas = "nvidia-cublas" + lk.NAME.removeprefix("lk-kernels")
        wrong.append("the library does not load" + (f": is {cublas} installed?" if "cublas" in str(error) else ""))
    if lk.BACKEND == "gpu":
        driver = lk.driver_cuda()
        print(f"driver   {f'takes CUDA {driver} and older' if driver else 'none here'}")
        if lk._too_old(driver):
            wrong.append(lk._too_old(driver))
        found = cards()
        for name, capability in found:
            code = runs_on(capability)
            print(f"card     {name} ({capability / 10}): {code or 'no code that runs on it'}")
            if not code:
                wrong.append(f"the library has no code for {name}")
            elif code.startswith("PTX") and number(driver) < number(lk.CUDA):
                wrong.append(f"for {name} there is PTX alone, which takes a driver of CUDA {lk.CUDA} or later: update the driver")
        if not found:
            print("card     none here")
    if wrong:
        sys.exit("lk: " + "; ".join(wrong))
    print("lk: all as it should be")


if __name__ == "__main__":
    main(sys.argv[1:])
