#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Norms with a result of 8 bits, E4M3: lk's beside those of other libraries, on a GPU: `make norm-fp8-peers`.

    norm_fp8_peers.py [--case TEXT]... [--provider NAME]... [--budget SECONDS] [--csv FILE] [--build ARCH] [--device cpu --smoke]

Cases      rms_norm of x [rows, 4096] in bf16 with a weight: with one scale that is given (tensor), with a scale of each row
           (row), of each 128 columns (block), of each 32 columns as a power of two (mx); residual=1: of x + residual, which is
           returned in bf16 too; transposed=1: with the transposed copy, which in block has scales of 128 rows of its own.
Providers  lk, through lk_torch, in one kernel. torch: F.rms_norm, then the quantiser as it is written below; torch.compile: both as
           one function.
           flashinfer CUDA, flashinfer CuTe: rmsnorm_quant and fused_add_rmsnorm_quant by flashinfer's two backends; it takes CuTe
           where nvidia-cutlass-dsl is installed. CUDA has fused_add_rmsnorm_fp8_block_quant too, which also writes y in bf16.
           vllm: rms_norm_static_fp8_quant, fused_add_rms_norm_static_fp8_quant, rms_norm_dynamic_per_token_quant,
           rms_norm_per_block_quant.
           quack: its rmsnorm, then the quantiser by torch.compile.
           bench/fetch_peers fetches flashinfer's and vLLM's kernels; nvcc compiles the CUDA ones into build/norm_fp8_peers, with
           the flags that their own builds have. One that is not there is named in a row.
           flashinfer and vLLM write x + residual over residual, so it grows from call to call; their time does not depend on it.
           TransformerEngine is left out: its library has 343 MB, and its norm takes no residual. It has one kernel in tensor alone
           (delayed scaling); its blocks and its MX, which wants a Blackwell, are a norm and then a quantiser, and its transposed
           copy is a second kernel.
Times      call_ms and kernel_ms as in compare.py, by a graph for all. Of the ceiling: as there, too.
Errors     y: ||scale q - y|| / ||y|| against float64; rounding to E4M3 alone is some 2.6e-2. scale: the largest relative error of
           a scale against max |y| / 448; in mx the share of scales that are not the least power of two from there on.
           y_transposed and scale_transposed: the same of the copy. residual_out: ||value - right|| / ||right|| against the sum
           rounded once.
Equal      The share of bytes of q that are y / scale of float64, rounded once, by the provider's own scale; who rounds y to bf16
           before has about 0.97. residual_out: the share of elements that are the sum rounded once. q_transposed: in tensor the
           share that is q's transpose; both must be 1. A result that is wrong has no times: WRONG below.
Rows       are appended to BENCH_CSV, or bench/results/<gpu>-norm-fp8.csv.
--build    compiles what needs nvcc, for ARCH (90a), and ends. It needs no GPU.
"""
import argparse
import collections
import ctypes
import dataclasses
import glob
import hashlib
import importlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import time

FOLDER = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "build/norm_fp8_peers")
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{FOLDER}/inductor")  # before PyTorch reads it

import compare  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402

COLUMNS = ("op", "direction", "dtype", "case", "provider", "version", "call_ms", "kernel_ms", "kernel_clock", "gb_per_s",
           "of_ceiling", "ceiling_ms", "ceiling_from", "errors", "equal", "note", "gpu", "commit")
BF16, E4M3, EPS, MOST = torch.bfloat16, torch.float8_e4m3fn, 1e-6, 448.0
SCALE = 1 / 32  # of tensor: |y| is below 14
SHAPES = ((8192, 4096), (16384, 4096))
SMOKE = ((256, 384),)
# A scale of a y that was rounded to bf16 is up to 2^-8 off, for each of up to four roundings.
WRONG = {"y": 0.04, "scale": 2.0**-6, "residual_out": 1e-6, "y_transposed": 0.04, "scale_transposed": 2.0**-6}
COMPILING = ("torch.compile", "quack")  # processes compile these beforehand
LONGEST = 60.0  # seconds for a row, compilation included
WAIT = 150.0  # for all compilations beforehand

Kind = collections.namedtuple("Kind", "scaling residual transposed")
KINDS = [Kind(scaling, residual, 0) for scaling in ("tensor", "row", "block") for residual in (0, 1)]
KINDS += [Kind("mx", 0, 0), Kind("tensor", 0, 1), Kind("block", 0, 1)]
PER = {"block": 128, "mx": 32}  # columns that share a scale
Result = collections.namedtuple("Result", "q scale residual_out turned turned_scale y", defaults=(None,) * 5)

# ---- The formula in PyTorch -------------------------------------------------------------------------------------------------


def quantise(y, kind, scale):
    """(q, scale) of y, by products with the inverse, which cost less than quotients."""
    y = y.float()
    if kind.scaling == "tensor":
        return (y * scale.reciprocal()).clamp(-MOST, MOST).to(E4M3), scale
    parts = y.unflatten(-1, (-1, PER.get(kind.scaling, y.shape[-1])))
    most = parts.abs().amax(-1, keepdim=True)
    if kind.scaling == "mx":  # 448 is 1.75 * 2^8; above a mantissa of 1.75 it is the next power
        exponent = ((most.view(torch.int32) + 0x1fffff) >> 23) - 8
        scales, scale = exponent.to(torch.uint8).squeeze(-1), (exponent << 23).view(torch.float32)
    else:
        scale = most / MOST
        scales = scale.squeeze(-1)
    return (parts * scale.reciprocal()).clamp(-MOST, MOST).to(E4M3).flatten(-2), scales


def quantised(y, kind, scale=None):
    """A Result's fields as a tuple, without residual_out."""
    q, scales = quantise(y, kind, scale)
    if not kind.transposed:
        return q, scales, None, None
    if kind.scaling == "tensor":
        return q, scales, q.t().contiguous(), scales
    turned, turned_scales = quantise(y.t(), kind, scale)
    return q, scales, turned.contiguous(), turned_scales


def formula(kind):
    def call(x, weight, scale=None, residual=None):
        s = x if residual is None else x + residual
        q, scales, turned, turned_scales = quantised(F.rms_norm(s, weight.shape, weight, EPS), kind, scale)
        return q, scales, None if residual is None else s, turned, turned_scales
    return call


# ---- Kernels of others, compiled here ---------------------------------------------------------------------------------------

FLASHINFER = r"""
#include <flashinfer/norm.cuh>
using namespace flashinfer;
typedef __nv_bfloat16 T;
typedef __nv_fp8_e4m3 Q;
extern "C" int quant(Q *q, T *x, T *weight, float *scale, unsigned rows, unsigned cols, float eps, cudaStream_t stream)
{
    return norm::RMSNormQuant(x, weight, q, rows, cols, cols, cols, scale, eps, true, stream);
}
extern "C" int add_quant(Q *q, T *x, T *residual, T *weight, float *scale, unsigned rows, unsigned cols, float eps,
                         cudaStream_t stream)
{
    return norm::FusedAddRMSNormQuant(x, residual, weight, q, rows, cols, cols, cols, cols, scale, eps, true, stream);
}
extern "C" int add_block_quant(Q *q, float *scale, T *y, T *x, T *residual, T *weight, unsigned rows, unsigned cols, float eps,
                               cudaStream_t stream)
{
    return norm::FusedAddRMSNormFP8BlockQuant(x, residual, weight, q, scale, y, rows, cols, cols, cols, cols, cols,
                                              (rows + 3) / 4 * 4, eps, true, stream);
}
"""
VLLM = r"""
#include "layernorm_quant_kernels.cu"
#include "quantization/fused_kernels/fused_layernorm_dynamic_per_token_quant.cu"
#include <torch/csrc/stable/library.h>
STABLE_TORCH_LIBRARY_FRAGMENT(lk_vllm_norm, m)
{
    m.def("tensor(Tensor! q, Tensor x, Tensor weight, Tensor scale, float eps) -> ()");
    m.def("add_tensor(Tensor! q, Tensor x, Tensor! residual, Tensor weight, Tensor scale, float eps) -> ()");
    m.def("row(Tensor! q, Tensor x, Tensor weight, Tensor! scale, float eps, Tensor? most, Tensor!? residual) -> ()");
    m.def("block(Tensor! q, Tensor x, Tensor weight, Tensor! scale, float eps, Tensor? most, Tensor!? residual, int cols, "
          "bool turned) -> ()");
}
STABLE_TORCH_LIBRARY_IMPL(lk_vllm_norm, CUDA, m)
{
    m.impl("tensor", TORCH_BOX(&rms_norm_static_fp8_quant));
    m.impl("add_tensor", TORCH_BOX(&fused_add_rms_norm_static_fp8_quant));
    m.impl("row", TORCH_BOX(&rms_norm_dynamic_per_token_quant));
    m.impl("block", TORCH_BOX(&rms_norm_per_block_quant));
}
"""
# The text, the folder of headers in the package that bench/fetch_peers makes, the flags.
SOURCES = {
    "flashinfer_norm": (FLASHINFER, "include", "-std=c++17 -use_fast_math -DNDEBUG -DENABLE_BF16 -DENABLE_FP8 "
                        "-DFLASHINFER_ENABLE_F16 -DFLASHINFER_ENABLE_BF16 -DFLASHINFER_ENABLE_FP8_E4M3 "
                        "-DFLASHINFER_ENABLE_FP8_E5M2 -DFLASHINFER_ENABLE_FP8_E8M0 -DFLASHINFER_ENABLE_FP4_E2M1"),
    "vllm_norm": (VLLM, "csrc", "-std=c++20 --expt-relaxed-constexpr -DNDEBUG -DENABLE_FP8 -DUSE_CUDA "
                  "-DTORCH_TARGET_VERSION=0x020B000000000000ULL"),
}


class Built:
    """A peer's library: begun at once where it is not there yet, waited for by path()."""

    def __init__(self, name, arch):
        text, headers, flags = SOURCES[name]
        self.name, self.process, self.why = name, None, ""
        found = importlib.util.find_spec(name)
        if not found:
            self.why = f"{name} is not in PYTHONPATH; bench/fetch_peers"
            return
        version = importlib.metadata.version(name.replace("_", "-"))
        key = hashlib.sha256("\n".join([text, flags, arch, version, torch.__version__]).encode()).hexdigest()[:12]
        self.file = f"{FOLDER}/{name}-{key}.so"
        if os.path.exists(self.file):
            return
        nvcc = os.environ.get("NVCC") or shutil.which("nvcc") or f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin/nvcc"
        if not shutil.which(nvcc):
            self.why = f"no {nvcc} to compile {name}"
            return
        os.makedirs(FOLDER, exist_ok=True)
        source, home = f"{FOLDER}/{name}-{key}.cu", os.path.dirname(torch.__file__)
        with open(source, "w") as file:
            file.write(text)
        # What the toolkit lacks the wheels beside PyTorch may have.
        wheels = glob.glob(os.path.join(os.path.dirname(home), "nvidia/*/include"))
        command = [nvcc, *flags.split(), "-O3", "-w", "-gencode", f"arch=compute_{arch},code=sm_{arch}", "-shared", "-Xcompiler",
                   ",".join(["-fPIC", *(f"-idirafter,{folder}" for folder in wheels)]),
                   "-I" + os.path.join(os.path.dirname(found.origin), headers)]
        if name == "vllm_norm":
            command += [f"-I{home}/include", f"-L{home}/lib", "-ltorch_cpu", "-ltorch_cuda", "-lc10", "-lc10_cuda"]
        self.log = open(f"{FOLDER}/{name}-{key}.log", "w+")
        self.process = subprocess.Popen([*command, source, "-o", f"{self.file}.part"], stdout=self.log, stderr=self.log)

    def path(self, seconds):
        if self.process:
            try:
                self.process.wait(max(1.0, seconds))
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.why = f"{self.name}: nvcc took more than {WAIT:.0f} s"
            if self.process.returncode == 0:
                os.replace(f"{self.file}.part", self.file)
            elif not self.why:
                self.log.seek(0)
                first = next((line for line in self.log if "error" in line), "no error named").strip()
                self.why = f"{self.name}: nvcc: {first}"
            self.process = None
        if self.why:
            raise ImportError(self.why)
        return self.file


# ---- Providers --------------------------------------------------------------------------------------------------------------


class Provider:
    """call(inputs) gives a Result; load() gives it, or raises what says why it is not here. None: it has no such norm."""

    def __init__(self, name, version, load):
        self.name, self.version, self.load = name, version, load


def pointers(*tensors):
    return [ctypes.c_void_p(tensor.data_ptr()) for tensor in tensors]


def lk(env, kind):
    scaling = "block128" if kind.scaling == "block" else kind.scaling
    options = {"out_dtype": E4M3, "scaling": scaling, "transposed": bool(kind.transposed)}

    def call(x, weight, scale=None, residual=None):
        if kind.scaling == "tensor":
            options["scale"] = scale
        if residual is None:
            q, scales, *turned = env.lk.rms_norm(x, weight.shape, weight, EPS, **options)
            return Result(q, scales, None, *turned)
        q, scales, *turned, total = env.lk.add_rms_norm(x, residual, weight.shape, weight, EPS, **options)
        return Result(q, scales, total, *turned)
    return call


def eager(kind):
    own = formula(kind)
    return lambda **inputs: Result(*own(**inputs))


def compiled(kind):
    own = torch.compile(formula(kind), dynamic=False)
    return lambda **inputs: Result(*own(**inputs))


def flashinfer_cuda(kind, library):
    if kind.transposed or (kind.scaling, kind.residual) not in (("tensor", 0), ("tensor", 1), ("block", 1)):
        return None
    functions = ctypes.CDLL(library())

    def call(x, weight, scale=None, residual=None):
        rows, cols = x.shape
        q, stream = torch.empty_like(x, dtype=E4M3), ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        last, y = (*map(ctypes.c_uint, x.shape), ctypes.c_float(EPS), stream), None
        if kind.scaling == "block":
            scale, y = torch.empty(cols // 128, (rows + 3) // 4 * 4, device=x.device), torch.empty_like(x)
            status = functions.add_block_quant(*pointers(q, scale, y, x, residual, weight), *last)
            scale = scale.t()[:rows]
        elif kind.residual:
            status = functions.add_quant(*pointers(q, x, residual, weight, scale), *last)
        else:
            status = functions.quant(*pointers(q, x, weight, scale), *last)
        if status:
            raise RuntimeError(f"CUDA error {status}")
        return Result(q, scale, residual, y=y)
    return call


def flashinfer_cute(kind):
    if kind.transposed or kind.scaling != "tensor":
        return None
    plain, fused = (importlib.import_module(f"flashinfer_norm.kernels.{name}") for name in ("rmsnorm", "fused_add_rmsnorm"))

    def call(x, weight, scale, residual=None):
        q = torch.empty_like(x, dtype=E4M3)
        if residual is None:
            plain.rmsnorm_quant_cute(q, x, weight, scale, EPS, weight_bias=0.0, enable_pdl=True)
        else:
            fused.fused_add_rmsnorm_quant_cute(q, x, residual, weight, scale, EPS, weight_bias=0.0, enable_pdl=True)
        return Result(q, scale, residual)
    return call


def vllm(kind, library):
    if kind.transposed or kind.scaling == "mx":
        return None
    torch.ops.load_library(library())
    ops = torch.ops.lk_vllm_norm

    def call(x, weight, scale=None, residual=None):
        rows, cols = x.shape
        q = torch.empty_like(x, dtype=E4M3)
        if kind.scaling == "row":
            scale = torch.empty(rows, 1, device=x.device)
            ops.row(q, x, weight, scale, EPS, None, residual)
        elif kind.scaling == "block":
            scale = torch.empty(cols // 128, rows, device=x.device).t()
            ops.block(q, x, weight, scale, EPS, None, residual, 128, True)
        elif residual is None:
            ops.tensor(q, x, weight, scale, EPS)
        else:
            ops.add_tensor(q, x, residual, weight, scale, EPS)
        return Result(q, scale, residual)
    return call


def quack(kind):
    norm = importlib.import_module("quack.rmsnorm").rmsnorm
    own = torch.compile(lambda y, scale: quantised(y, kind, scale), dynamic=False)

    def call(x, weight, scale=None, residual=None):
        y, total = norm(x, weight, eps=EPS), None
        if residual is not None:
            y, total = norm(x, weight, residual=residual, eps=EPS, prenorm=True)
        q, scales, turned, turned_scales = own(y, scale)
        return Result(q, scales, total, turned, turned_scales)
    return call


def version_of(package):
    return f"{package} {importlib.metadata.version(package)}" if compare.has_package(package) else package


def providers(env, kind, libraries):
    of_torch = f"torch {torch.__version__}"
    found = [Provider("lk", env.version, lambda: lk(env, kind)), Provider("torch", of_torch, lambda: eager(kind))]
    if env.cuda:
        flashinfer = version_of("flashinfer-norm")
        found += [Provider("torch.compile", of_torch, lambda: compiled(kind)),
                  Provider("flashinfer CUDA", flashinfer, lambda: flashinfer_cuda(kind, libraries["flashinfer_norm"])),
                  Provider("flashinfer CuTe", flashinfer, lambda: flashinfer_cute(kind)),
                  Provider("vllm", version_of("vllm-norm"), lambda: vllm(kind, libraries["vllm_norm"])),
                  Provider("quack", f"{version_of('quack-kernels')}; {of_torch}", lambda: quack(kind))]
    wanted = env.options.provider
    return [p for p in found if not wanted or p.name in wanted or p.name.split()[0] in wanted]


# ---- Right or wrong ---------------------------------------------------------------------------------------------------------


def right_y(inputs):
    """y in float64."""
    s = inputs["x"].double()
    if "residual" in inputs:
        s += inputs["residual"].double()
    factor = torch.rsqrt(s.square().mean(1, keepdim=True) + EPS)
    return s.mul_(factor).mul_(inputs["weight"].double())


def judge(kind, y, q, scale):
    """(relative error of scale q, error of the scales, share of equal bytes); y in float64, all with rows that share scales."""
    per = PER.get(kind.scaling, y.shape[1])
    parts = y.unflatten(1, (-1, per))
    if kind.scaling == "mx":
        scale = torch.exp2(scale.view(torch.uint8).double() - 127)
    scale = scale.double().reshape((1, 1, 1) if kind.scaling == "tensor" else (len(y), y.shape[1] // per, 1))
    off = 0.0
    if kind.scaling != "tensor":
        best = parts.abs().amax(2, keepdim=True) / MOST
        if kind.scaling == "mx":
            off = float((scale != torch.exp2(best.log2().ceil())).double().mean())
        else:
            off = float((scale / best - 1).abs().max())
    expected = (parts / scale).clamp_(-MOST, MOST).float().to(E4M3).flatten(1)
    equal = float((expected.view(torch.uint8) == q.view(torch.uint8)).float().mean())
    error = float((q.double().unflatten(1, (-1, per)) * scale - parts).norm() / y.norm())
    return error, off, equal


def checked(kind, y, total, result):
    """({name: error}, {name: share that is equal}); total is x + residual, rounded once."""
    errors, equal = {}, {}
    errors["y"], errors["scale"], equal["q"] = judge(kind, y, result.q, result.scale)
    if kind.residual:
        errors["residual_out"] = float((result.residual_out.double() - total.double()).norm() / total.double().norm())
        equal["residual_out"] = float((result.residual_out == total).float().mean())
    if kind.transposed:
        turned = judge(kind, y.t(), result.turned, result.turned_scale)
        errors["y_transposed"], errors["scale_transposed"], equal["q_transposed"] = turned
        if kind.scaling == "tensor":
            equal["q_transposed"] = float((result.turned.view(torch.uint8) == result.q.view(torch.uint8).t()).float().mean())
    return errors, equal


def wrong(kind, errors, equal):
    found = [f"{name} is off by {value:.2e}" for name, value in errors.items() if not value < WRONG[name]]
    must = ["residual_out"] * kind.residual + ["q_transposed"] * (kind.transposed and kind.scaling == "tensor")
    return found + [f"{name} is wrong in {1 - equal[name]:.1e} of its elements" for name in must if equal[name] != 1]


# ---- The run ----------------------------------------------------------------------------------------------------------------


def case_of(shape, kind):
    rows, cols = shape
    n = rows * cols
    name = f"rows={rows} cols={cols} scaling={kind.scaling}" + " residual=1" * kind.residual + " transposed=1" * kind.transposed
    inputs = {"x": compare.normal(rows, cols, sigma=1.5),
              "weight": ((cols,), BF16, lambda t, g: t.normal_(generator=g).mul_(0.1).add_(1))}
    if kind.scaling == "tensor":
        inputs["scale"] = (1,), torch.float32, lambda t, g: t.fill_(SCALE)
    if kind.residual:
        inputs["residual"] = compare.normal(rows, cols)
    traffic = {"forward": (2 * n * (1 + kind.residual), n * (1 + 2 * kind.residual + kind.transposed))}
    return compare.Case("srms_norm_fp8", name, inputs, (), (), (), None, traffic, [])


def measure(env, case, kind, call, sets, refill, row):
    """Fills the row."""
    with compare.Deadline(LONGEST):
        call(**sets[0])  # it compiles, tunes and loads
        refill()
        y = right_y(sets[0])
        total = sets[0]["x"] + sets[0]["residual"] if kind.residual else None
        errors, equal = checked(kind, y, total, call(**sets[0]))
        del y, total
        row["errors"] = " ".join(f"{name}={value:.2e}" for name, value in errors.items())
        row["equal"] = " ".join(f"{name}={value:.6g}" for name, value in equal.items())
        bad = wrong(kind, errors, equal)
        if bad:
            raise ArithmeticError("; ".join(bad))
        numbered = lambda number: call(**sets[number])
        call_ms, = compare.call_clock(env, [numbered], [lambda: None], len(sets))
        if isinstance(call_ms, Exception):
            raise call_ms
        row["call_ms"] = f"{call_ms:.5g}"
        if env.cuda:
            ms, row["kernel_clock"], why = compare.kernel_clock(env, numbered, len(sets), call_ms)
            row["note"] = why or row.get("note", "")
            if ms is not None:
                row.update(kernel_ms=f"{ms:.5g}", gb_per_s=f"{case.size() / ms * 1e-6:.5g}")


def run_case(env, rows, progress, case, kind, libraries):
    sets, _, refill = compare.make_sets(env, case)
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    ceiling = source = None
    if env.cuda:
        ceiling, source = env.ceilings.bench(case, "forward", case.size())
        if ceiling is None:
            ceiling, source = env.ceilings.copy(case.size())
    for provider in providers(env, kind, libraries):
        row = {"provider": provider.name, "version": provider.version, "direction": "forward"}
        progress.show(f"{case.name} {provider.name}")
        try:
            call = provider.load()
        except Exception as error:  # a package may fail at import in any way
            if (provider.name, str(error)) not in env.said:
                env.said.add((provider.name, str(error)))
                row.update(direction="", note=f"missing: {type(error).__name__}: {error}")
                compare.say(env, rows, progress, dataclasses.replace(case, name=""), row)
            continue
        if not call:
            continue
        if provider.name == "flashinfer CUDA" and kind.scaling == "block":
            row["note"] = "writes y in bf16 too"
        try:
            refill()
            measure(env, case, kind, call, sets, refill, row)
            if ceiling and row.get("kernel_ms"):
                share = ceiling / float(row["kernel_ms"])
                row.update(of_ceiling=f"{share:.3f}", ceiling_ms=f"{ceiling:.5g}", ceiling_from=source)
        except Exception as error:  # a peer may fail in any way
            row["note"] = f"failed: {type(error).__name__}: {error}"
        call = None
        compare.say(env, rows, progress, case, row)
        compare.give_back(env)


def chosen(options):
    """(shape, kind, case) of what is to be measured, the kinds of the first shape first."""
    found = [(shape, kind, case_of(shape, kind)) for shape in (SMOKE if options.smoke else SHAPES) for kind in KINDS]
    return [each for each in found if any(text in each[2].name for text in options.case or [""])]


def compile_part(env, kind):
    """One process's share: what torch.compile makes of a kind, at all shapes, into its cache on disk."""
    env.options.calls = True  # one set of inputs
    for _, own, case in chosen(env.options):
        if own == kind:
            sets, _, _ = compare.make_sets(env, case)
            for provider in providers(env, kind, {}):
                if provider.name in COMPILING:
                    try:
                        provider.load()(**sets[0])
                    except Exception as error:  # the run itself will say so
                        print(f"{case.name} {provider.name}: {type(error).__name__}: {error}")
    return 0


def prepare(env, todo):
    """Starts all compilers at once and waits for them; the libraries are waited for when they are first called for."""
    start = time.monotonic()
    arch = "{}{}".format(*torch.cuda.get_device_capability())
    arch += "a" * (int(arch) >= 90)
    built = {name: Built(name, arch) for name in SOURCES}
    kinds, wanted = list(dict.fromkeys(kind for _, kind, _ in todo)), env.options.provider
    command = [sys.executable, os.path.abspath(__file__), *sys.argv[1:]]
    settings = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    parts = [subprocess.Popen([*command, "--part", str(KINDS.index(kind))], env=settings, stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL)
             for kind in kinds if not wanted or any(name in wanted for name in COMPILING)]
    running = ", ".join(name for name, each in built.items() if each.process) or "nothing"
    print(f"compiling: {running} by nvcc; {len(parts)} kinds of cases by torch.compile", flush=True)
    for part in parts:
        try:
            part.wait(max(1.0, start + WAIT - time.monotonic()))
        except subprocess.TimeoutExpired:
            part.kill()
    print(f"{time.monotonic() - env.started:4.0f} s  torch.compile's are there", flush=True)
    for name, each in built.items():
        try:
            each.path(start + WAIT - time.monotonic())
            print(f"{time.monotonic() - env.started:4.0f} s  {name} is there", flush=True)
        except ImportError as error:
            print(f"{time.monotonic() - env.started:4.0f} s  {error}", flush=True)
    return {name: lambda each=each: each.path(0) for name, each in built.items()}


def build_alone(arch):
    failed = 0
    for each in [Built(name, arch) for name in SOURCES]:
        start = time.monotonic()
        try:
            print(f"{each.path(600)}: {time.monotonic() - start:.0f} s", flush=True)
        except ImportError as error:
            failed += 1
            print(error)
    return failed


def main():
    parser = argparse.ArgumentParser(description="norms in 8 bits beside others'; the file's first comment says how it measures")
    parser.add_argument("--csv", default=os.environ.get("BENCH_CSV"),
                        help="instead of BENCH_CSV or bench/results/<gpu>-norm-fp8.csv; build/cpu-norm-fp8.csv with --smoke")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--smoke", action="store_true", help="lk and torch on tiny cases, to try the program itself")
    parser.add_argument("--case", action="append", help="only cases whose name holds this; may be given several times")
    parser.add_argument("--provider", action="append", default=[],
                        help="only providers of this name, or with this first word; may be given several times")
    parser.add_argument("--budget", type=float, help="seconds after which no further case is begun")
    parser.add_argument("--build", metavar="ARCH", help="compiles the peers' kernels for ARCH alone")
    parser.add_argument("--part", type=int, help=argparse.SUPPRESS)  # a process that compiles for KINDS[part]
    parser.set_defaults(calls=False, quick=False, list=False, reference=False)  # compare.Environment's
    options = parser.parse_args()
    if options.build:
        return build_alone(options.build)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"PyTorch {torch.__version__} sees no GPU here, so nothing was measured")
        return 0
    if options.part is not None:
        options.list = True  # lk is not needed
    env = compare.Environment(options)
    torch.set_grad_enabled(False)
    if options.part is not None:
        return compile_part(env, KINDS[options.part])
    for line in env.head():
        print(line)
    todo = chosen(options)
    libraries = prepare(env, todo) if env.cuda else {}
    env.ceilings = compare.Ceilings(env)
    folder = "build" if env.smoke else "bench/results"
    rows = compare.Rows(options.csv or f"{compare.ROOT}/{folder}/{env.gpu}-norm-fp8.csv", COLUMNS)
    print("| # | " + " | ".join(column for column in compare.SHOWN if column in COLUMNS) + " |", flush=True)
    progress, left_out = compare.Progress(len(todo)), []
    try:
        for _, kind, case in todo:
            progress.done += 1
            if env.left() < 0:
                left_out.append(case.name)
                continue
            run_case(env, rows, progress, case, kind, libraries)
    finally:
        progress.clear()
        rows.finish()
    for name in left_out:
        print(f"left out for want of time: {name}")
    failed = [row["provider"] for row in env.rows if not row["call_ms"]]
    print(f"{rows.path}: {len(env.rows)} rows, {len(failed)} of them failed, {len(left_out)} cases left out, "
          f"{time.monotonic() - env.started:.0f} s")
    if env.smoke:
        print(f"{len(env.rows) - len(failed)} passed, {len(failed)} failed")
        return len(failed)
    return "lk" in failed


if __name__ == "__main__":
    sys.exit(main())
