# SPDX-License-Identifier: MIT
"""A kernel of your own on lk_row.cuh, compiled while the program runs: the log-probabilities of given tokens,

    log_prob[r] = scale x[r,token[r]] - log sum_c exp(scale x[r,c]),    scale = 1 / temperature

    pip install "cuda-core[cu13]" nvidia-cuda-runtime numpy
    python examples/nvrtc.py                  # or make example-nvrtc; without a GPU it only compiles

The compiler is NVRTC, which takes device functions alone: lk_row.cuh and lk_loss.cuh. Here cuda.core calls it. CuPy and
PyTorch take the same SOURCE and FOLDERS:

    cupy.RawModule(code=SOURCE, options=("-std=c++17", *("-I" + f for f in FOLDERS))).get_function("token_log_prob")
    torch.cuda._compile_kernel(SOURCE, "token_log_prob", cuda_include_dirs=FOLDERS, nvcc_options=["-std=c++17"])
"""
import pathlib
import sys

SOURCE = r"""
#include "lk/lk_row.cuh"

/* A block of 256 threads owns a row. Such a team needs no plan of the host: the launch has as many blocks as rows. */
extern "C" __global__ void __launch_bounds__(256)
    token_log_prob(const lk_f16 *x, const int64_t *token, float *log_prob, int64_t cols, float scale)
{
    const lk_row<lk_f16> row = lk_row_of<LK_TEAM_BLOCK, 256>({}, x, cols, gridDim.x, cols); /* this thread's columns */
    LK_SHARED(lk_lse_inbox<256>, inbox, [1]);
    lk_inbox_begin<LK_TEAM_BLOCK>(inbox);
    lk_vec<lk_f16> raw[8]; /* vectors of 16 bytes, so many in flight */
    lk_row_load(raw, row);
    const lk_lse warp = lk_lse_read(raw, row, scale), all = lk_lse_team<LK_TEAM_BLOCK>(inbox, warp);
    if (row.rank == 0) log_prob[row.number] = scale * lk_to_float(row.data[token[row.number]]) - lk_lse_log(all);
}
"""
try:
    import numpy as np
    from cuda.core import Device, LaunchConfig, LegacyPinnedMemoryResource, Program, ProgramOptions, launch
    from cuda.pathfinder import find_nvidia_header_directory
except ImportError as error:
    print(f"skip  nvrtc: {error}")
    sys.exit()

lk = pathlib.Path(__file__).resolve().parent.parent # the folder that holds lk/
cuda = find_nvidia_header_directory("cudart") or sys.exit("no cuda_fp16.h: pip install nvidia-cuda-runtime")
FOLDERS = [str(lk), cuda]
try:
    device = Device()
    device.set_current()
except Exception: # no driver, or no GPU
    device = None
options = ProgramOptions(std="c++17", arch=f"sm_{device.arch}" if device else "sm_90a", include_path=FOLDERS)
code = Program(SOURCE, "c++", options).compile("cubin")
if not device:
    print(f"skip  nvrtc: compiled for {options.arch}, {len(code.code)} bytes; there is no GPU to run it")
    sys.exit()


def array(shape, dtype): # in memory that NumPy and kernels both see
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    return np.from_dlpack(LegacyPinnedMemoryResource().allocate(size)).view(dtype).reshape(shape)


rows, cols, scale = 100, 50257, np.float32(1 / 0.7) # an odd number: rows start at all offsets from a 16-byte boundary
x, token, log_prob = array((rows, cols), np.float16), array(rows, np.int64), array(rows, np.float32)
random = np.random.default_rng(0)
x[:], token[:], log_prob[:] = 4 * random.standard_normal((rows, cols)), random.integers(cols, size=rows), np.nan
launch(device.default_stream, LaunchConfig(grid=rows, block=256), code.get_kernel("token_log_prob"),
       x.ctypes.data, token.ctypes.data, log_prob.ctypes.data, np.int64(cols), scale)
device.sync()

z = scale * x.astype(np.float64) # the formula in double
z -= z.max(axis=1, keepdims=True)
error = np.abs(log_prob - (z[np.arange(rows), token] - np.log(np.exp(z).sum(axis=1)))).max()
print(f"{rows} rows of {cols} on {device.name}: largest error {error:.1e}")
print("all as expected" if error < 1e-5 else "FAIL: the error is above 1e-5")
sys.exit(0 if error < 1e-5 else 1)
