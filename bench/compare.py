#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""lk beside the libraries that its users would take otherwise: `make compare`, `make compare-<op>`, `make compare-calls`.
linear_cross_entropy at several sizes of workspace, its time against its memory: frontier.py.

    compare.py [OP...] [--calls] [--csv FILE] [--quick] [--budget SECONDS] [--resume] [--case TEXT]...
               [--provider NAME]... [--reference [--compile PROCESSES]] [--list] [--device cpu --smoke]

Providers  lk, through its PyTorch extension lk_torch (packages/torch); PyTorch eager and torch.compile; Liger-Kernel,
           flash-linear-attention, cut-cross-entropy and quack-kernels where they import (bench/requirements.txt pins what was
           measured), and xopes, where lk's ops come from (bench/fetch_xopes), in both variants that its benchmarks name;
           torch2.15, the head of the newest PyTorch on this one, and TRL's kernels (bench/fetch_peers). One that does not import
           is named as missing. Each is called as its own documentation calls it. "lk inplace" makes
           cross_entropy's gradient in the logits' memory, as xopes and Liger do.
Directions forward; backward (autograd.grad, nothing accumulated); forward_backward (a forward, then autograd.grad of it).
           Inputs want gradients, so forward keeps what backward needs.
           A provider that makes its gradients in forward, as lk_torch does for both cross entropies, has forward_backward. Its
           forward is that of evaluation: inputs that want no gradient, under no_grad. It has no backward of its own. lk has
           one all the same: after the loss per row (reduction="none"), whose forward keeps the lse and whose backward makes
           the gradients. linear_cross_entropy's forward also keeps all logits there, or their exponentials (keep=True), as
           PyTorch keeps the logits. Its upstream is 1 / rows for each row, so the gradients are those of the mean.
Upstream   Random normal numbers for rows, norms and encodings. A mean loss has two cases: an upstream of 1, and, with
           upstream=random in the name, a number in device memory that is not 1, the same in every call of a case, as the loss
           scale, 1 / the steps of gradient accumulation or the weight of a loss is. Some libraries ask whether it is 1 and
           leave out a pass where it is. lk_torch expects what came twice in a row, so its warm-up meets a wrong guess and its
           timed calls do not; with another number in each call lk's cross_entropy would take a pass more, as long as itself. A forward does not see its upstream, so that case has no forward of its own.
           lk's logsumexp is asked for float32, which is what fla returns; PyTorch's is bf16. With upstream=T in the name lk's is of
           bf16 too, and so is its upstream. cross_entropy with reduction=none has an upstream for each row.
Inputs     The same tensors for everyone, several sets of them, more than four times the L2 together; they are filled again
           before each provider, since some overwrite them. Before each call of a provider that does so, too, outside its time;
           its graph has one call a set, and the inputs are filled before each replay; the profiler sees one call a set too.
Clocks     call_ms: the L2 is flushed, the GPU is idle, then one call from Python, from the event before to the event after it:
           launch overhead is in it. kernel_ms: the kernels alone, either a CUDA graph of calls over all sets in turn, replay
           time / calls (kernel_clock graph), or for what cannot be captured the profiler's sum of kernel times of such calls
           (kernel_clock profiler). Medians of 21; of fewer, as many as take 0.2 s and at least 7, where one takes over 10 ms.
           --reference: of 9.
           Ops with matmuls: the profiler for all providers, since some heads synchronise, and a graph's calls without gaps
           are slower for their heat. The GPU rests for 0.3 s before the kernels, and before each of the bare matmuls.
Errors     ||value - right|| / ||right|| of every output and gradient, right being the formula in float64 on the same inputs.
Memory     extra_mb: the peak during a call beyond inputs, upstream gradients and results, in MiB. What forward keeps for
           backward counts, in backward too.
Ceiling    The time of a plain kernel with the same reads and writes, from lk's own bench (bench/results/<gpu>.csv) where it has
           the case (ceiling_from bench), cases of less and of more traffic (bench between) or of less alone (bench beyond);
           else a copy by torch of as many bytes, timed here (copy). linear_cross_entropy: the bare matmuls by torch, their
           vocabulary in whole eights, timed here (matmul); so are other heads. forward_backward: the sum of both directions; for
           cross_entropy one read and one write, for linear_cross_entropy three matmuls, for linear_kl four.
Rows       are appended to the CSV as they finish, so a run that is stopped leaves what it measured; at the end the newest row
           of each case stays. --budget ends the run in time and names what it left out; --resume skips rows of this commit that
           are there. `make compare-plots` makes plots and tables from the CSV; it needs matplotlib, and no GPU.
--reference  lk, PyTorch and xopes on the shapes of xopes' benchmark pages, of every op the largest first, into a CSV of its own
           (<gpu>-reference.csv); `make reference` makes bench/results/reference.md from it. Triton tunes by 5 + 20 ms for
           each of its choices instead of 25 + 100. --compile: so many processes compile what is to be tuned before that.
--calls    call_ms alone, medians of 3 to 51, into a CSV of its own (<gpu>-calls.csv): no kernels, errors or memory. The
           providers' calls take turns, on one set of inputs, in one process. torch.compile, FLA, quack and xopes compile or
           tune for seconds in every case, so they come one after another behind all cases of the others, and only where lk's call
           takes under 1 ms. The run ends with the places where lk is more than 5% slower than the fastest other.
"""
import argparse
import collections
import contextlib
import csv
import dataclasses
import functools
import gc
import importlib
import importlib.metadata
import inspect
import math
import os
import platform
import re
import signal
import site
import statistics
import subprocess
import sys
import time

for folder in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
    site.addsitedir(folder)  # what .pth files there say too, of packages that were only unpacked

try:
    import torch
    import torch._functorch.config
    import torch.nn.functional as F
except ImportError as error:
    sys.exit(f"{sys.executable}: {error}; `make compare` needs PyTorch, PYTHON= says which Python has it")

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path.append(f"{ROOT}/packages/torch")  # lk_torch where it was built in the tree, unless one is installed
import plot  # noqa: E402: beside this file; its plots are not made here

OPS = ("logsumexp", "cross_entropy", "cross_entropy_stats", "kl", "srms_norm", "glu", "md_lrpe_cosine", "linear_cross_entropy",
       "linear_cross_entropy_stats", "linear_kl")
DIRECTIONS = ("forward", "backward", "forward_backward")
COLUMNS = ("op", "direction", "dtype", "case", "provider", "version", "call_ms", "kernel_ms", "kernel_clock", "of_ceiling",
           "ceiling_ms", "ceiling_from", "errors", "extra_mb", "note", "gpu", "commit")
CALLS_COLUMNS = ("op", "direction", "dtype", "case", "provider", "version", "call_ms", "note", "gpu", "commit")
BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
REALISTIC = (32000, 50257, 128256, 151936)  # vocabularies of Llama 2, GPT-2, Llama 3, Qwen
EPS = 1e-6
LONGEST = 150.0  # seconds that a provider may take for one direction of a case, compilation included
COMPILING = ("torch.compile", "fla", "quack", "xopes")  # compile or tune for every shape; --calls has them last, in this order,
COMPILED_BELOW = 1.0  # and only where lk's call takes fewer milliseconds
COMPILE_MOST = 180.0  # seconds for --compile; what is not compiled by then is compiled when it is tuned
REST = 0.3  # seconds without work before kernels that are mostly matmuls, since the power limit is on a mean over time. lk's
# forward of 12288 x 4096 x 4096 on an H100: 0.75 ms in a run of all cases without it, 0.63 with it, 0.66 where the case ran alone
WRONG = 1e-2  # a relative error from which on a row of --smoke fails; rounding to bf16 is some 2e-3
MIB = 2.0**20

# ---- Cases ------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Case:
    """`inputs`: name -> (shape, dtype, what it is filled with). `wanted`: the inputs whose gradients are taken. `upstream`: for
    each output its gradient, as in `inputs`, or None for a scalar loss, whose gradient is 1. `traffic`: the least bytes that
    each direction reads and writes, or `flops` of forward where matmuls are what it costs. `reference`: the formula. `page`:
    whether xopes' benchmark pages have the case."""
    op: str
    name: str
    inputs: dict
    wanted: tuple
    outputs: tuple
    upstream: tuple
    reference: object
    traffic: dict
    providers: list
    quick: bool = False
    flops: float = 0.0
    page: bool = False

    def size(self):
        return self.flops or sum(self.traffic["forward"])


def normal(*shape, sigma=1.0, dtype=BF16):
    return shape, dtype, lambda t, g: t.normal_(generator=g).mul_(sigma)


def targets(rows, vocab):
    return (rows,), torch.int64, lambda t, g: t.random_(0, vocab, generator=g)


def scalar():
    """A loss's upstream that is not 1 and that bf16 can say, so that it is the same for losses of all types."""
    return (), BF16, lambda t, g: t.fill_(1.7109375)


UPSTREAMS = (("", None), (" upstream=random", scalar()))  # of a mean loss: the end of the case's name, and what it is


def fixed(values):
    return tuple(values.shape), values.dtype, lambda t, g: t.copy_(values)


def fill(tensors, specs, seed):
    g = torch.Generator(device=next(iter(tensors.values())).device).manual_seed(seed)
    for name, tensor in tensors.items():
        specs[name][2](tensor, g)


def slices(rows, elements):
    """Slices of rows of about 2^27 elements: float64 temporaries of 1 GiB."""
    step = max(1, 2**27 // max(1, elements))
    return [slice(at, min(rows, at + step)) for at in range(0, rows, step)]


def logsumexp_reference(i, upstream):
    x, dlse = i["x"], upstream[0].double()
    lse, dx = x.new_empty(x.shape[:1], dtype=F64), x.new_empty(x.shape, dtype=F64)
    for s in slices(*x.shape):
        lse[s] = torch.logsumexp(x[s].double(), 1)
        dx[s] = torch.exp(x[s].double() - lse[s, None]) * dlse[s, None]
    return [lse], [dx]


def of_logits(formula):
    """The reference of an op on logits. formula(z, i, s, upstream) gives the outputs and the gradient of the logits z, in float64,
    of the rows s: an output is a row's, or the rows' share of a scalar."""
    def reference(i, upstream):
        x, parts = i["logits"], []
        dx = x.new_empty(x.shape, dtype=F64)
        for s in slices(*x.shape):
            outputs, dx[s] = formula(x[s].double(), i, s, upstream)
            parts.append(outputs)
        return joined(parts), [dx]
    return reference


def of_head(formula):
    """The same of an op on x and weight, whose product is the logits."""
    def reference(i, upstream):
        x, w, parts = i["x"], i["weight"].double(), []
        dx, dweight = x.new_empty(x.shape, dtype=F64), torch.zeros_like(w)
        for s in slices(len(x), len(w)):
            rows = x[s].double()
            outputs, dz = formula(rows @ w.T, i, s, upstream)
            parts.append(outputs)
            dx[s] = dz @ w
            dweight.addmm_(dz.T, rows)
        return joined(parts), [dx, dweight]
    return reference


def joined(parts):
    return [torch.cat(own) if own[0].dim() else sum(own) for own in zip(*parts)]


def of_mean(dz, upstream):
    return dz if upstream[0] is None else dz.mul_(upstream[0].double())


def cross_entropy_rows_formula(z, i, s, upstream):
    """The loss of each row."""
    target = i["target"][s, None]
    logp = torch.log_softmax(z, 1)
    loss = -logp.gather(1, target)[:, 0]
    dz = logp.exp_()
    return [loss], dz.scatter_add_(1, target, dz.new_full(target.shape, -1.0)).mul_(upstream[0][s, None].double())


def cross_entropy_formula(z, i, s, upstream):
    n, target = len(i["target"]), i["target"][s, None]
    logp = torch.log_softmax(z, 1)
    loss = -logp.gather(1, target).sum() / n
    dz = logp.exp_().div_(n)
    return [loss], of_mean(dz.scatter_add_(1, target, dz.new_full(target.shape, -1 / n)), upstream)


def stats_formula(z, i, s, upstream):
    """The log-probability of the target and the entropy of each row."""
    target, (dlogp, dentropy) = i["target"][s, None], (u[s, None].double() for u in upstream)
    logp = torch.log_softmax(z, 1)
    p = logp.exp()
    entropy = -(p * logp).sum(1)
    dz = p * (-dlogp - dentropy * (logp + entropy[:, None]))
    return [logp.gather(1, target)[:, 0], entropy], dz.scatter_add_(1, target, dlogp)


def kl_formula(z, i, s, upstream):
    """KL(teacher || student), its mean over all rows."""
    head = "teacher_x" in i
    n = len(i["teacher_x" if head else "teacher"])
    t = i["teacher_x"][s].double() @ i["teacher_weight"].double().T if head else i["teacher"][s].double()
    t, logp = torch.log_softmax(t, 1), torch.log_softmax(z, 1)
    p = t.exp()
    return [(p * (t - logp)).sum() / n], of_mean((logp.exp_() - p).div_(n), upstream)


def srms_norm_reference(i, upstream):
    x, residual, weight = i["x"], i.get("residual"), i.get("weight")
    w = 1.0 if weight is None else weight.double()
    y, ds = x.new_empty(x.shape, dtype=F64), x.new_empty(x.shape, dtype=F64)
    sums = x.new_empty(x.shape, dtype=F64) if residual is not None else None
    dweight = x.new_zeros(x.shape[1:], dtype=F64)
    for p in slices(*x.shape):
        s = x[p].double() + (0 if residual is None else residual[p].double())
        rstd = torch.rsqrt(s.square().mean(1, keepdim=True) + EPS)
        h, dy = s * rstd, upstream[0][p].double()
        y[p] = h * w
        ds[p] = rstd * (dy * w - h * (dy * w * h).mean(1, keepdim=True))
        dweight += (dy * h).sum(0)
        if residual is not None:
            sums[p] = s
            ds[p] += upstream[1][p].double()
    has_residual, has_weight = residual is not None, weight is not None
    return [y] + [sums] * has_residual, [ds] * (1 + has_residual) + [dweight] * has_weight


def lrpe_angles(positions, theta, dim, dtype):
    """[heads, tokens of the grid, dim]: feature f turns with axis f / e by theta[head, f % e] a step."""
    e = theta.shape[1]
    f = torch.arange(dim, device=theta.device)
    return positions.to(dtype)[None, :, f // e] * theta.to(dtype)[:, None, f % e]


def glu_reference(activation):
    def reference(i, upstream):
        y, dgate, dup = (torch.empty_like(i["gate"], dtype=F64) for _ in range(3))
        for s in slices(*y.shape):
            gate, up, dy = (t[s].double() for t in (i["gate"], i["up"], upstream[0]))
            with torch.enable_grad():
                gate.requires_grad_()
                act = GLU_ACTS[activation](gate)
                slope, = torch.autograd.grad(act.sum(), gate)
            y[s], dgate[s], dup[s] = act.detach() * up, dy * up * slope, dy * act.detach()
        return [y], [dgate, dup]
    return reference


def md_lrpe_cosine_reference(positions, prefix):
    def reference(i, upstream):
        x, dy = i["x"], upstream[0]
        dim = x.shape[-1]
        phi = lrpe_angles(positions, i["theta"], dim, F64)
        cos, sin = torch.cos(phi), torch.sin(phi)
        y, dx = x.new_zeros(*x.shape[:-1], 2 * dim, dtype=F64), x.new_empty(x.shape, dtype=F64)
        y[..., :prefix, :dim], dx[..., :prefix, :] = x[..., :prefix, :], dy[..., :prefix, :dim]
        for b in range(len(x)):
            grid = x[b, :, prefix:].double()
            y[b, :, prefix:, :dim], y[b, :, prefix:, dim:] = grid * cos, grid * sin
            dx[b, :, prefix:] = dy[b, :, prefix:, :dim].double() * cos + dy[b, :, prefix:, dim:].double() * sin
        return [y], [dx]
    return reference


def logsumexp_cases(env):
    shapes = [(4096, 1 << k) for k in range(10, 18)] + [(8192, vocab) for vocab in REALISTIC] + [(8, 151935), (1000, 32003)]
    shapes = [(*shape, "") for shape in shapes] + [(4096, 65536, " upstream=T")]
    for rows, cols, suffix in [(5, 300, ""), (5, 300, " upstream=T")] if env.smoke else shapes:
        n = 2 * rows * cols
        yield Case("logsumexp", f"rows={rows} cols={cols}{suffix}", {"x": normal(rows, cols, sigma=1.5)}, ("x",), ("lse",),
                   (normal(rows),), logsumexp_reference, {"forward": (n, 0), "backward": (n, n)},
                   logsumexp_rounded_providers(env) if suffix else logsumexp_providers(env),
                   (rows, cols) in ((4096, 1024), (4096, 131072), (8192, 128256)), page=rows == 4096 and not suffix)


def cross_entropy_cases(env):
    shapes = [(4096, 1 << k) for k in range(10, 18)] + [(8192, vocab) for vocab in REALISTIC]
    few = [(100, 32003), (4090, 151935)]
    for rows, vocab in [(5, 300)] if env.smoke else shapes + few:
        n = 2 * rows * vocab
        for suffix, upstream in UPSTREAMS[:1] if (rows, vocab) in few else UPSTREAMS:
            yield Case("cross_entropy", f"rows={rows} vocab={vocab} reduction=mean{suffix}",
                       {"logits": normal(rows, vocab, sigma=1.5), "target": targets(rows, vocab)}, ("logits",), ("loss",),
                       (upstream,), of_logits(cross_entropy_formula),
                       {"forward": (n, 0), "backward": (n, n), "forward_backward": (n, n)}, cross_entropy_providers(env),
                       (rows, vocab) in ((4096, 1024), (4096, 131072), (8192, 128256)), page=rows == 4096)
    for rows, vocab in [(5, 300)] if env.smoke else [(4096, 32768)]:
        n = 2 * rows * vocab
        yield Case("cross_entropy", f"rows={rows} vocab={vocab} reduction=none",
                   {"logits": normal(rows, vocab, sigma=1.5), "target": targets(rows, vocab)}, ("logits",), ("loss",),
                   (normal(rows, dtype=F32),), of_logits(cross_entropy_rows_formula), {"forward": (n, 0), "backward": (n, n)},
                   cross_entropy_rows_providers(env))


def srms_norm_cases(env):
    reference = [(4096 << k, 2048, residual, 0) for residual in (0, 1) for k in range(6)]
    weighted = [(rows, 2048, residual, 1) for residual in (0, 1) for rows in (4096, 131072)]
    realistic = [(8192, hidden, residual, 1) for residual in (0, 1) for hidden in (4096, 8192)]
    realistic += [(100, 5120, 1, 1), (1000, 4096, 1, 1)]
    smoke = [(7, 128, residual, weight) for residual in (0, 1) for weight in (0, 1)]
    for rows, cols, residual, weight in smoke if env.smoke else reference + weighted + realistic:
        inputs = {"x": normal(rows, cols, sigma=1.5)}
        if residual:
            inputs["residual"] = normal(rows, cols)
        if weight:
            inputs["weight"] = normal(cols)
        n = 2 * rows * cols
        outputs = ("y", "residual_out")[:1 + residual]
        yield Case("srms_norm", f"rows={rows} cols={cols} residual={residual}" + " weight=1" * weight, inputs, tuple(inputs),
                   outputs, tuple(normal(rows, cols) for _ in outputs), srms_norm_reference,
                   {"forward": (n + n * residual, n + n * residual), "backward": (2 * n + n * residual, n)},
                   srms_norm_providers(env, residual, weight), (rows, cols) in ((4096, 2048), (131072, 2048), (8192, 4096)),
                   page=cols == 2048 and not weight)


GLU_ACTS = {"silu": F.silu, "gelu_tanh": functools.partial(F.gelu, approximate="tanh")}


def glu_cases(env):
    shapes = [(rows, cols, "silu") for rows, cols in ((4096, 14336), (8192, 8192), (16384, 6144), (4096, 2048), (100, 14336),
                                                       (4090, 5461))]
    shapes += [(8192, 8192, "gelu_tanh")]
    for rows, cols, activation in [(7, 130, name) for name in GLU_ACTS] if env.smoke else shapes:
        n = 2 * rows * cols
        suffix = "" if activation == "silu" else f" activation={activation}"
        yield Case("glu", f"rows={rows} cols={cols}{suffix}",
                   {"gate": normal(rows, cols, sigma=2.0), "up": normal(rows, cols)}, ("gate", "up"), ("y",), (normal(rows, cols),),
                   glu_reference(activation), {"forward": (2 * n, n), "backward": (3 * n, 2 * n)}, glu_providers(env, activation),
                   rows in (4096, 100))


def md_lrpe_cosine_cases(env):
    grids = [(256 << k,) for k in range(8)] + [(16 << k,) * 2 for k in range(4)] + [(4 << k,) * 3 for k in range(4)]
    shapes = [(12, 12, 128, grid, prefix) for grid in grids for prefix in (0, 10)]
    shapes += [(1, hidden // 128, 128, (8192,), 0) for hidden in (4096, 8192)]
    smoke = [(2, 3, 16, (4, 5), 2), (2, 3, 16, (9,), 0)]
    for batch, heads, dim, grid, prefix in smoke if env.smoke else shapes:
        tokens, e = prefix + math.prod(grid), -(-dim // len(grid))
        head, t = torch.arange(heads)[:, None], torch.arange(e)
        theta = (10000.0 ** (-t / e) * (1 + 0.01 * head)).float().to(env.device)
        axes = torch.meshgrid(*(torch.arange(size, device=env.device) for size in grid), indexing="ij")
        positions = torch.stack([axis.flatten() for axis in axes], 1)
        n = 2 * batch * heads * tokens * dim
        yield Case("md_lrpe_cosine",
                   f"batch={batch} heads={heads} dim={dim} shape={'x'.join(map(str, grid))} prefix={prefix}",
                   {"x": normal(batch, heads, tokens, dim), "theta": fixed(theta)}, ("x",), ("y",),
                   (normal(batch, heads, tokens, 2 * dim),), md_lrpe_cosine_reference(positions, prefix),
                   {"forward": (n, 2 * n), "backward": (2 * n, n)}, md_lrpe_cosine_providers(env, grid, prefix, positions),
                   prefix == 0 and grid in ((256,), (32768,), (32, 32, 32)), page=batch == 12)


def linear_cross_entropy_cases(env):
    shapes = [(12288, 4096, 1 << k) for k in range(10, 18)]
    shapes += [(8192, hidden, vocab) for hidden in (4096, 8192) for vocab in REALISTIC]
    few = [(8, 4096, 151936), (100, 4096, 32003), (1000, 4096, 151935), (4090, 4096, 131072)]
    for tokens, hidden, vocab in [(6, 64, 300)] if env.smoke else shapes + few:
        for suffix, upstream in UPSTREAMS[:1] if (tokens, hidden, vocab) in few else UPSTREAMS:
            yield Case("linear_cross_entropy", f"tokens={tokens} hidden={hidden} vocab={vocab} reduction=mean{suffix}",
                       {"x": normal(tokens, hidden), "weight": normal(vocab, hidden, sigma=0.02),
                        "target": targets(tokens, vocab)},
                       ("x", "weight"), ("loss",), (upstream,), of_head(cross_entropy_formula), {},
                       linear_cross_entropy_providers(env),
                       (tokens, hidden, vocab) in ((12288, 4096, 8192), (12288, 4096, 131072), (8192, 4096, 128256)),
                       flops=2.0 * tokens * hidden * vocab, page=tokens == 12288)


def cross_entropy_stats_cases(env):
    for rows, vocab in [(5, 300)] if env.smoke else [(8192, 151936)]:
        n = 2 * rows * vocab
        yield Case("cross_entropy_stats", f"rows={rows} vocab={vocab}",
                   {"logits": normal(rows, vocab, sigma=1.5), "target": targets(rows, vocab)}, ("logits",), ("logp", "entropy"),
                   (normal(rows, dtype=F32),) * 2, of_logits(stats_formula), {"forward": (n, 0), "backward": (n, n)},
                   cross_entropy_stats_providers(env))


def linear_cross_entropy_stats_cases(env):
    for tokens, hidden, vocab in [(6, 64, 300)] if env.smoke else [(8192, 4096, 151936)]:
        yield Case("linear_cross_entropy_stats", f"tokens={tokens} hidden={hidden} vocab={vocab}",
                   {"x": normal(tokens, hidden), "weight": normal(vocab, hidden, sigma=0.02), "target": targets(tokens, vocab)},
                   ("x", "weight"), ("logp", "entropy"), (normal(tokens, dtype=F32),) * 2, of_head(stats_formula), {},
                   linear_cross_entropy_stats_providers(env), flops=2.0 * tokens * hidden * vocab)


def kl_cases(env):
    for rows, vocab in [(5, 300)] if env.smoke else [(4096, 32768), (4096, 131072), (4096, 151936), (1000, 32003)]:
        n = 2 * rows * vocab
        yield Case("kl", f"rows={rows} vocab={vocab}",
                   {"logits": normal(rows, vocab, sigma=1.5), "teacher": normal(rows, vocab, sigma=1.5)}, ("logits",), ("loss",),
                   (None,), of_logits(kl_formula),
                   {"forward": (2 * n, 0), "backward": (2 * n, n), "forward_backward": (2 * n, n)}, kl_providers(env))


def linear_kl_cases(env):
    for tokens, hidden, vocab in [(6, 64, 300)] if env.smoke else [(8192, 4096, 131072), (100, 4096, 32003)]:
        heads = {name: spec for prefix in ("", "teacher_") for name, spec in (
            (f"{prefix}x", normal(tokens, hidden)), (f"{prefix}weight", normal(vocab, hidden, sigma=0.02)))}
        yield Case("linear_kl", f"tokens={tokens} hidden={hidden} teacher={hidden} vocab={vocab} dweight=bf16", heads,
                   ("x", "weight"), ("loss",), (None,), of_head(kl_formula), {}, linear_kl_providers(env),
                   flops=2.0 * tokens * hidden * vocab)


CASES = {op: globals()[f"{op}_cases"] for op in OPS}

# ---- Providers --------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Provider:
    """forward(**inputs) gives the output or outputs, which autograd can differentiate. load() gives (version, forward): it is
    called before the first use, so that a run of one provider waits for no other's import. gradients_in_forward: forward makes
    the gradients where one is wanted. apart: a forward that does not, for backward. destroys: it writes to its inputs, so they
    are filled before each call. missing: why the provider is not here."""
    name: str
    load: object
    directions: tuple = DIRECTIONS
    gradients_in_forward: bool = False
    apart: object = None
    destroys: bool = False
    version: str = ""
    forward: object = None
    missing: str = ""

    def ready(self):
        if not (self.forward or self.missing):
            try:
                self.version, self.forward = self.load()
            except Exception as error:  # a package may fail at import in any way
                self.missing = f"{PACKAGES.get(self.first(), self.name)}: {type(error).__name__}: {error}"
        return not self.missing


    def first(self):
        return self.name.split()[0]

    def called(self, names):
        """Whether one of the names, where there are any, is the provider's: all of it, or its first word."""
        return not names or self.name in names or self.first() in names


PACKAGES = {"liger": "liger-kernel", "fla": "flash-linear-attention", "cce": "cut-cross-entropy", "quack": "quack-kernels",
            "xopes": "xopes", "torch2.15": "torch-head", "trl": "trl"}


@functools.cache
def imported(module):
    """The module, or what its import raised: one that fails is not tried again for each case."""
    try:
        return importlib.import_module(module)
    except Exception as error:
        return error


def peer(name, module, make, label=None, gradients_in_forward=False, directions=DIRECTIONS, destroys=False):
    """A provider from another package: make(module) gives its forward."""
    def load():
        version, found = f"{PACKAGES[name]} {importlib.metadata.version(PACKAGES[name])}", imported(module)
        if isinstance(found, Exception):
            raise found
        return version, make(found)
    if gradients_in_forward:
        directions = ("forward", "forward_backward")
    return Provider(label or name, load, directions, gradients_in_forward, destroys=destroys)


def torch_pair(forward):
    """PyTorch eager, and the same function compiled for the case's shape."""
    version = f"torch {torch.__version__}"
    return [Provider("torch", lambda: (version, forward)),
            Provider("torch.compile", lambda: (version, torch.compile(forward, dynamic=False)))]


def lk_provider(env, forward, apart=None):
    return Provider("lk", lambda: (env.version, forward), gradients_in_forward=apart is not None, apart=apart)


def as_computed(leaf):
    """The leaf's memory as autograd sees what a model computed: inplace refuses a leaf, and a view of one, which is still read."""
    return torch.ops.aten._unsafe_view(leaf, leaf.shape)


def lk_inplace(env):
    """cross_entropy whose gradient takes the logits' memory. It wants logits that were computed."""
    def load():
        if "inplace" not in inspect.signature(env.lk.cross_entropy).parameters:
            raise ImportError("lk_torch is older than inplace")
        return env.version, lambda logits, target: env.lk.cross_entropy(as_computed(logits), target, inplace=True)
    return Provider("lk inplace", load, ("forward_backward",), gradients_in_forward=True, destroys=True)


def lk_fast_logits(env, forward):
    """linear_cross_entropy that stores logits in bf16, as xopes and F.linear do. In the reference pages alone."""
    def load():
        if not env.options.reference:
            raise ImportError("measured by --reference alone")
        return env.version, lambda x, weight, target: forward(x, weight, target, fast_logits=True)
    return Provider("lk fast_logits", load, ("forward", "forward_backward"), gradients_in_forward=True)


def logsumexp_providers(env):
    return [lk_provider(env, lambda x: env.lk.logsumexp(x, -1, dtype=F32)), *torch_pair(lambda x: torch.logsumexp(x, -1)),
            peer("fla", "fla.ops.utils", lambda m: m.logsumexp_fwd, directions=("forward",)),
            peer("xopes", "xopes.ops.logsumexp", lambda m: lambda x: m.lse_recurrence_triton(x, -1),
                 label="xopes Recurrence Triton"),
            peer("xopes", "xopes.ops.logsumexp", lambda m: lambda x: m.lse_parallel_triton(x, -1),
                 label="xopes Parallel Triton")]


def logsumexp_rounded_providers(env):
    return [lk_provider(env, lambda x: env.lk.logsumexp(x, -1)), *torch_pair(lambda x: torch.logsumexp(x, -1))]


def cross_entropy_rows_providers(env):
    return [lk_provider(env, lambda logits, target: env.lk.cross_entropy(logits, target, reduction="none")),
            *torch_pair(lambda logits, target: F.cross_entropy(logits, target, reduction="none"))]


def cross_entropy_providers(env):
    return [lk_provider(env, lambda logits, target: env.lk.cross_entropy(logits, target),
                        lambda logits, target: env.lk.cross_entropy(logits, target, reduction="none")),
            lk_inplace(env), *torch_pair(lambda logits, target: F.cross_entropy(logits, target)),
            peer("liger", "liger_kernel.transformers.functional",
                 lambda m: lambda logits, target: m.liger_cross_entropy(logits, target), gradients_in_forward=True,
                 destroys=True),
            peer("fla", "fla.modules", lambda m: lambda logits, target, loss=m.FusedCrossEntropyLoss(): loss(logits, target)),
            peer("quack", "quack.cross_entropy",
                 lambda m: lambda logits, target: m.cross_entropy(logits, target, reduction="mean")),
            # Its forward makes the gradient whether one is wanted or not; its backward is a product with upstream.
            peer("xopes", "xopes.ops.cross_entropy", lambda m: lambda logits, target: m.cross_entropy_triton(
                logits, target), label="xopes Triton", destroys=True),
            peer("xopes", "xopes.ops.cross_entropy", lambda m: lambda logits, target: m.cross_entropy_parallel_triton(
                logits, target), label="xopes Parallel Triton", destroys=True)]


def cross_entropy_stats_providers(env):
    def lk(logits, target):
        out = env.lk.cross_entropy_stats(logits, target, reduction="none")
        return -out.loss, out.entropy

    return [lk_provider(env, lk), *torch_pair(stats_of),
            peer("trl", "trl.kernels", lambda m: lambda logits, target: m.selective_log_softmax_and_entropy(logits, target))]


def stats_of(logits, target):
    logp = F.log_softmax(logits, -1, dtype=F32)
    return logp.gather(1, target[:, None])[:, 0], -(logp.exp() * logp).sum(1)


def kl_providers(env):
    def of_logp(kl):
        """PyTorch and Liger take logarithms of probabilities, and divide a sum by the rows."""
        return lambda logits, teacher: kl(*(F.log_softmax(z, -1, dtype=F32) for z in (logits, teacher)))

    functional = "liger_kernel.transformers.functional"
    return [lk_provider(env, lambda logits, teacher: env.lk.kl(logits, teacher)), *torch_pair(of_logp(batch_mean_kl)),
            peer("liger", functional, lambda m: of_logp(lambda x, t: m.liger_kl_div(x, t, reduction="batchmean", log_target=True)),
                 label="liger KLDiv"),
            peer("liger", functional, lambda m: of_logp(lambda x, t: m.liger_jsd(x, t, beta=0.0)), label="liger JSD")]


def batch_mean_kl(logp, teacher):
    return F.kl_div(logp, teacher, reduction="batchmean", log_target=True)


def srms_norm_providers(env, residual, weight):
    def lk(x, residual=None, weight=None):
        if residual is None:
            return env.lk.rms_norm(x, x.shape[-1:], weight, EPS)
        return env.lk.add_rms_norm(x, residual, x.shape[-1:], weight, EPS)

    def eager(x, residual=None, weight=None):
        s = x if residual is None else x + residual
        f = s.float()
        y = f * torch.rsqrt(f.square().mean(-1, keepdim=True) + EPS)
        y = (y if weight is None else y * weight.float()).to(x.dtype)
        return y if residual is None else (y, s)

    def functional(x, residual=None, weight=None):
        s = x if residual is None else x + residual
        y = F.rms_norm(s, s.shape[-1:], weight, EPS)
        return y if residual is None else (y, s)

    providers = [lk_provider(env, lk), *torch_pair(eager)]
    if hasattr(F, "rms_norm"):
        providers.append(Provider("torch.rms_norm", lambda: (f"torch {torch.__version__}", functional)))
    if residual and weight:
        providers.append(peer("liger", "liger_kernel.transformers.functional",
                              lambda m: lambda x, residual, weight: m.liger_fused_add_rms_norm(x, residual, weight, EPS)))
    elif not residual:
        providers.append(peer("liger", "liger_kernel.transformers.functional",
                              lambda m: lambda x, weight=None: m.liger_rms_norm(x, weight, EPS)))
    else:
        providers.append(Provider("liger", None, missing="liger-kernel: with a residual it wants a weight"))
    providers.append(peer("fla", "fla.modules.layernorm", lambda m: lambda x, residual=None, weight=None: m.rms_norm(
        x, weight, None, residual, eps=EPS, prenorm=residual is not None)))
    providers.append(peer("quack", "quack.rmsnorm", lambda m: lambda x, residual=None, weight=None: m.rmsnorm(
        x, weight, residual=residual, eps=EPS, prenorm=residual is not None)))
    # What its srms_norm_triton calls, which has no weight.
    providers.append(peer("xopes", "xopes.ops.normalize", lambda m: lambda x, residual=None, weight=None: m.normalize_triton(
        x, weight, residual=residual, c=x.shape[-1]**0.5, eps=EPS), label="xopes Triton"))
    return providers


def glu_providers(env, activation):
    act = GLU_ACTS[activation]
    liger = ("swiglu", "LigerSiLUMulFunction") if activation == "silu" else ("geglu", "LigerGELUMulFunction")
    return [lk_provider(env, lambda gate, up: env.lk.glu(gate, up, activation)), *torch_pair(lambda gate, up: act(gate) * up),
            peer("liger", f"liger_kernel.ops.{liger[0]}", lambda m: getattr(m, liger[1]).apply, destroys=True)]


def md_lrpe_cosine_providers(env, grid, prefix, positions):
    def eager(x, theta):
        phi = lrpe_angles(positions, theta, x.shape[-1], F32)
        turned = x[..., prefix:, :]
        y = torch.cat([turned * torch.cos(phi), turned * torch.sin(phi)], -1).to(x.dtype)
        if prefix:
            head = x[..., :prefix, :]
            y = torch.cat([torch.cat([head, torch.zeros_like(head)], -1), y], -2)
        return y

    return [lk_provider(env, lambda x, theta: env.lk.md_lrpe_cosine(x, theta, grid, prefix)), *torch_pair(eager),
            peer("xopes", "xopes.ops.lrpe.cosine._md",
                 lambda m: lambda x, theta: m.lrpe_cosine_md_triton(x, theta, grid, prefix), label="xopes Triton"),
            peer("xopes", "xopes.ops.lrpe.cosine._md",
                 lambda m: lambda x, theta: m.lrpe_cosine_md_cache_triton(x, theta, grid, prefix), label="xopes Triton Cache")]


def torch_head(label, cute=False, **options):
    """The head of PyTorch 2.15, which bench/fetch_peers carries to an older PyTorch. Its compiled kernel is the one that PyTorch
    takes by itself where nvidia-cutlass-dsl is of a version that it knows."""
    def make(m):
        def forward(x, weight, target):
            with m.cute() if cute else contextlib.nullcontext():
                return m.linear_cross_entropy(x, weight, target, options=m.LinearCrossEntropyOptions(**options))
        return forward
    return peer("torch2.15", "torch_head", make, label=f"torch2.15 {label}", gradients_in_forward=True)


def linear_cross_entropy_providers(env):
    def lk(x, weight, target, **options):
        return env.lk.linear_cross_entropy(x, weight, target, **options)

    return [lk_provider(env, lk, functools.partial(lk, reduction="none", keep=True)),
            *torch_pair(lambda x, weight, target: F.cross_entropy(F.linear(x, weight), target)),
            peer("liger", "liger_kernel.transformers.functional",
                 lambda m: lambda x, weight, target: m.liger_fused_linear_cross_entropy(x, weight, target),
                 gradients_in_forward=True),
            peer("fla", "fla.modules", lambda m: lambda x, weight, target, loss=m.FusedLinearCrossEntropyLoss(): loss(
                x, target, weight), gradients_in_forward=True),
            peer("cce", "cut_cross_entropy", lambda m: lambda x, weight, target: m.linear_cross_entropy(x, weight, target)),
            peer("cce", "cut_cross_entropy", lambda m: lambda x, weight, target: m.linear_cross_entropy(
                x, weight, target, filter_eps=None), label="cce unfiltered"),
            # quack 0.6.5 fails where a chunk has as many tokens as features, as its default of 4096 has at hidden 4096
            peer("quack", "quack.linear_cross_entropy",
                 lambda m: lambda x, weight, target: m.chunked_linear_cross_entropy(
                     x, weight, target, chunk_size=2048 if x.shape[1] == 4096 else 4096), gradients_in_forward=True),
            torch_head("chunks"), torch_head("one chunk", chunking_method=None), torch_head("CuTe", cute=True),
            torch_head("CuTe one chunk", cute=True, chunking_method=None),
            # As its benchmarks' table names them. tr's forward makes the gradients whether they are wanted or not.
            peer("xopes", "xopes.ops.linear_cross_entropy",
                 lambda m: lambda x, weight, target: m.linear_cross_entropy_triton(x, target, weight), label="xopes tr",
                 gradients_in_forward=True),
            peer("xopes", "xopes.ops.linear_cross_entropy.baseline",
                 lambda m: lambda x, weight, target: m.linear_cross_entropy_xopes_wrapper(x, target, weight),
                 # Its backward writes over the logits that forward kept, so it cannot be timed again and again by itself.
                 label="xopes tr_lce", directions=("forward", "forward_backward")),
            lk_fast_logits(env, lk)]


def linear_cross_entropy_stats_providers(env):
    def lk(x, weight, target):
        out = env.lk.linear_cross_entropy_stats(x, weight, target, reduction="none")
        return -out.loss, out.entropy

    # As its trainers call it: their tiles, and the outputs that a loss with an entropy needs.
    return [lk_provider(env, lk), *torch_pair(lambda x, weight, target: stats_of(F.linear(x, weight), target)),
            peer("trl", "trl.kernels", lambda m: lambda x, weight, target: m.ChunkedLogProbFunction.apply(
                x, weight, None, target, 1.0, 32768, None, 1.0, ("entropy",))[:2])]


def linear_kl_providers(env):
    def lk(x, weight, teacher_x, teacher_weight):
        return env.lk.linear_kl(x, weight, teacher_x, teacher_weight)

    def eager(x, weight, teacher_x, teacher_weight):
        return batch_mean_kl(*(F.log_softmax(F.linear(a, b), -1, dtype=F32) for a, b in ((x, weight), (teacher_x, teacher_weight))))

    def chunked_jsd(m):
        def forward(x, weight, teacher_x, teacher_weight):
            labels = torch.zeros(len(x), dtype=torch.int64, device=x.device)  # they are asked for, and here of no meaning
            return m.LigerFusedLinearJSDLoss(0.0, 1.0, 0.0)(x, weight, teacher_x, teacher_weight, labels)
        return forward

    return [Provider("lk", lambda: (env.version, lk), ("forward", "forward_backward"), gradients_in_forward=True),
            *torch_pair(eager),
            peer("liger", "liger_kernel.transformers.functional", lambda m: lambda x, weight, teacher_x, teacher_weight:
                 m.liger_fused_linear_jsd(x, weight, teacher_x, teacher_weight, jsd_beta=0.0), label="liger JSD",
                 gradients_in_forward=True),
            peer("liger", "liger_kernel.chunked_loss", chunked_jsd, label="liger chunked JSD", gradients_in_forward=True),
            peer("trl", "trl.kernels.chunked_divergence", lambda m: lambda x, weight, teacher_x, teacher_weight:
                 m.ChunkedDivergenceFunction.apply(x, weight, None, teacher_x, teacher_weight, None, 0.0)[0].mean())]


# ---- One provider on one case -----------------------------------------------------------------------------------------------


def as_list(outputs):
    return list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]


class Subject:
    """A provider on the sets of inputs of a case: calls by direction, on set `number`."""

    def __init__(self, case, provider, sets, upstreams, refill):
        self.case, self.provider, self.refill = case, provider, refill
        self.sets = [{name: t.detach().requires_grad_(name in case.wanted) for name, t in s.items()} for s in sets]
        self.plain = [{name: t.detach() for name, t in s.items()} for s in sets]
        self.upstreams, self.casts = upstreams, {}
        self.kept = {}  # what backward alone starts from

    def forward(self, number):
        differentiable = not self.provider.gradients_in_forward and self.provider.directions != ("forward",)
        with torch.set_grad_enabled(differentiable):
            return as_list(self.provider.forward(**(self.sets if differentiable else self.plain)[number]))

    def fill(self):
        """Before a call outside of its time, where the provider destroys its inputs."""
        if self.provider.destroys:
            self.refill()

    def upstream(self, number, outputs):
        """In the outputs' types; making them is no part of a call. A mean has 1 or a number; its losses per row that / rows."""
        def of(given, output):
            if given is not None and given.shape == output.shape:
                return given.to(output.dtype)
            return torch.full_like(output, 1 / output.numel()).mul_(1 if given is None else given)
        if number not in self.casts:
            self.casts[number] = [of(*pair) for pair in zip(self.upstreams[number], outputs)]
        return self.casts[number]

    def gradients(self, outputs, number, retain):
        inputs = [self.sets[number][name] for name in self.case.wanted]
        return torch.autograd.grad(outputs, inputs, self.upstream(number, outputs), retain_graph=retain)

    def prepare(self, direction, count):
        """What the first `count` sets' calls start from: backward has a forward before it, and upstream gradients are made."""
        for number in range(count if direction != "forward" else 0):
            differentiable = self.provider.forward if direction != "backward" else self.provider.apart or self.provider.forward
            outputs = as_list(differentiable(**self.sets[number]))
            self.upstream(number, outputs)
            if direction == "backward":
                self.kept[number] = outputs

    def backward(self, number):
        return list(self.gradients(self.kept[number], number, True))

    def forward_backward(self, number):
        outputs = as_list(self.provider.forward(**self.sets[number]))
        return outputs + list(self.gradients(outputs, number, False))


class Deadline:
    """Raises TimeoutError in the main thread after some seconds: a compilation that does not end must not end the run. What
    runs in C++ or in another thread is interrupted when it returns."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __enter__(self):
        signal.signal(signal.SIGALRM, self.ring)
        signal.setitimer(signal.ITIMER_REAL, self.seconds)

    def ring(self, *_):
        raise TimeoutError(f"more than {self.seconds:.0f} s")

    def __exit__(self, *_):
        signal.setitimer(signal.ITIMER_REAL, 0)


def relative_errors(names, values, right):
    """name=||value - right|| / ||right||, as text."""
    found = []
    for name, value, expected in zip(names, values, right):
        value, expected = value.detach().reshape(expected.shape), expected
        if expected.dim() == 0:
            value, expected = value.reshape(1), expected.reshape(1)
        off = total = 0.0
        for s in slices(len(expected), expected[0].numel()):
            off += float((value[s].double() - expected[s]).square().sum())
            total += float(expected[s].square().sum())
        found.append(f"{name}={math.sqrt(off / total):.2e}")
    return " ".join(found)


def tensor_bytes(tensors, others):
    """Of all tensors that are not one of the others."""
    sizes = {t.data_ptr(): t.numel() * t.element_size() for t in tensors}
    return sum(size for pointer, size in sizes.items() if pointer not in {t.data_ptr() for t in others})


def enough(env, most, ms):
    """How often what takes so many ms is timed: `most` times, or as long as 0.2 s allow, but 7 times at least. With --calls,
    which has slow rivals in every turn, 0.05 s and 3 times."""
    seconds, least = (0.05, 3) if env.options.calls else (0.2, 7)
    return min(most, max(least, math.ceil(1e3 * seconds / ms)))


def call_clock(env, calls, fills, sets):
    """For each call the median of its times from Python, the L2 cold and the GPU idle before each, fills[i]() before that.
    Several calls take turns, so that they share what else the machine does meanwhile. A call that raises has its exception as
    its time."""
    times, wanted, failed = [[] for _ in calls], [env.warm + env.calls] * len(calls), {}
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2)) if env.cuda else (None, None)

    def once(call, number):
        if not env.cuda:
            start = time.perf_counter()
            result = call(number)
            return (time.perf_counter() - start) * 1e3, result
        env.flush.zero_()
        torch.cuda.synchronize()
        begin.record()
        result = call(number)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end), result

    results = [None] * len(calls)  # they live until the next call, as they would in training
    while any(len(mine) < most for i, (mine, most) in enumerate(zip(times, wanted)) if i not in failed):
        for i, call in enumerate(calls):
            if i in failed or len(times[i]) >= wanted[i]:
                continue
            try:
                fills[i]()
                ms, results[i] = once(call, len(times[i]) % sets)
            except Exception as error:
                failed[i], results[i] = error, None
                continue
            times[i].append(ms)
            if len(times[i]) == env.warm:
                wanted[i] = env.warm + enough(env, env.calls, ms)
    return [failed[i] if i in failed else statistics.median(mine[env.warm:]) for i, mine in enumerate(times)]


def graph_clock(env, call, sets, call_ms, fill=None):
    """The kernels alone: a graph of calls over all sets in turn, replay time / calls. Results live for a turn of the sets, so
    that outputs rotate over as many buffers as inputs. fill: called before each replay of a graph of one call a set, for calls
    that destroy their inputs. The L2 is flushed then, and the GPU is at that when the replay is queued, which hides its start."""
    calls = sets * max(1, math.ceil(min(8.0 / call_ms, 192) / sets)) if call_ms < 20 else 1  # what the L2 keeps is nothing then
    if fill:
        calls = sets
    results = collections.deque(maxlen=sets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=env.stream):
        for number in range(calls):
            results.append(call(number % sets))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(enough(env, env.replays, call_ms * calls) + 1)]
    for _ in range(2):
        graph.replay()
    events[0].record()
    starts = events
    if fill:
        starts = [torch.cuda.Event(enable_timing=True) for _ in events]
    for start, event in zip(starts, events[1:]):
        if fill:
            fill()
            env.flush.zero_()
            start.record()
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) / calls for a, b in zip(starts, events[1:])]
    results.clear()
    graph.reset()
    return statistics.median(times)


def profiler_clock(env, call, sets, call_ms, fill=None):
    """The kernels alone where there are host synchronisations: the time in which one runs, by the profiler, a call. fill: called
    before each round of one call a set, for calls that destroy their inputs."""
    calls, found = enough(env, env.calls, call_ms), []
    if fill:
        calls = min(calls, sets)
    for _ in range(3 if fill and calls < 7 else 1):
        if fill:
            fill()
            torch.cuda.synchronize()
        found.append(profiled(call, calls, sets))
    return statistics.median(found)


def busy(kernels):
    """Milliseconds in which at least one of these kernels runs. With programmatic dependent launch a kernel starts, and waits, before
    its predecessor ends, so a sum of their times would count such time twice."""
    total, end = 0.0, float("-inf")
    for kernel in kernels:  # by their start
        span = kernel.time_range
        total += max(0.0, span.end - max(span.start, end))
        end = max(end, span.end)
    return total / 1e3


def profiled(call, calls, sets):
    """Milliseconds of the kernels of a call: the median of so many."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for number in range(calls):
            result = call(number % sets)  # noqa: F841
        torch.cuda.synchronize()
    kernels = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA and
               not getattr(e, "is_user_annotation", False)]
    kernels.sort(key=lambda e: e.time_range.start)
    if not kernels:
        raise RuntimeError("the profiler saw no kernel")
    if len(kernels) % calls:  # calls differ in their kernels: no median of calls
        return busy(kernels) / calls
    each = len(kernels) // calls
    return statistics.median(busy(kernels[at:at + each]) for at in range(0, len(kernels), each))


def kernel_clock(env, call, sets, call_ms, fill=None, graph=True):
    """(milliseconds, clock, why there is none). graph: try one."""
    try:
        if not graph:
            raise RuntimeError("not asked for")
        # A capture that meets a synchronisation leaves the allocator in its pool, so one is looked for before.
        torch.cuda.set_sync_debug_mode("error")
        try:
            call(0)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return graph_clock(env, call, sets, call_ms, fill), "graph", ""
    except TimeoutError:
        raise
    except Exception as error:
        why = f"no graph: {type(error).__name__}: {error}"
    torch.cuda.synchronize()
    try:
        return profiler_clock(env, call, sets, call_ms, fill), "profiler", ""
    except Exception as error:
        return None, "", f"{why}; profiler: {type(error).__name__}: {error}"


def first_calls(env, subject, direction):
    """They compile, tune and load. Then the inputs are filled again, since some write to them or to upstream gradients."""
    with env.timed("first calls"):
        subject.prepare(direction, 1)
        getattr(subject, direction)(0)
        subject.refill()


def checked(env, subject, direction, right):
    """The columns errors and extra_mb, each of one call."""
    case, row, call = subject.case, {}, getattr(subject, direction)
    names = list(case.outputs) * (direction != "backward") + [f"d{name}" for name in case.wanted] * (direction != "forward")
    expected = right[0] * (direction != "backward") + right[1] * (direction != "forward")
    subject.prepare(direction, 1)
    if direction != "backward":  # whose forward may have left the gradients where the inputs were
        subject.fill()
    result = call(0)
    row["errors"] = relative_errors(names, result, expected)
    result = None
    subject.kept.clear()
    if env.cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        subject.prepare(direction, 1)
        result = call(0)
        torch.cuda.synchronize()
        own = tensor_bytes(result + subject.kept.get(0, []), subject.sets[0].values())
        row["extra_mb"] = f"{max(0, torch.cuda.max_memory_allocated() - before - own) / MIB:.6g}"
    return row


def measure(env, subject, direction, right):
    """One row's measured columns."""
    call, sets = getattr(subject, direction), len(subject.sets)
    row = {}
    with Deadline(min(LONGEST, max(0.0, env.left()) + 30)):
        first_calls(env, subject, direction)
        with env.timed("errors and memory"):
            row.update(checked(env, subject, direction, right))
        with env.timed("calls"):
            subject.prepare(direction, sets)
            call_ms, = call_clock(env, [call], [subject.fill], sets)
        if isinstance(call_ms, Exception):
            raise call_ms
        row["call_ms"] = f"{call_ms:.5g}"
        if env.cuda:
            with env.timed("kernels"):
                time.sleep(REST * (3 if env.options.reference and subject.case.flops > 2e12 else 1) if subject.case.flops else 0)
                fill = subject.refill if subject.provider.destroys else None
                # Matmuls by one clock for all: some heads synchronise, so they have no graph, and a graph's calls without gaps
                # are slower, since the power limit is on a mean over time.
                kernel_ms, row["kernel_clock"], row["note"] = kernel_clock(env, call, sets, call_ms, fill, not subject.case.flops)
            if kernel_ms is not None:
                row["kernel_ms"] = f"{kernel_ms:.5g}"
    return row


# ---- Ceilings ---------------------------------------------------------------------------------------------------------------


class Ceilings:
    """Milliseconds of a plain kernel with a case's traffic, and where they are from."""

    def __init__(self, env):
        self.env, self.copies, self.exact, self.sizes, self.products = env, {}, {}, collections.defaultdict(dict), {}
        try:
            with open(f"{ROOT}/bench/results/{env.gpu}.csv", newline="") as file:
                for row in csv.DictReader(file):
                    invalid = (row.get("note") or "").startswith("invalid")
                    if row["provider"] == "ceiling" and row["dtype"] == "bf16" and not invalid:
                        key = row["op"], row["direction"]
                        self.exact[(*key, row["case"])] = float(row["ms"])
                        self.sizes[key][float(row["ms"]) * float(row["gb_per_s"]) * 1e6] = float(row["gb_per_s"])
        except FileNotFoundError:
            pass

    def bench(self, case, direction, size):
        plain = re.sub(r" upstream=\w+$", "", case.name)
        for name in (plain, plain.replace("reduction=mean", "reduction=none")):
            if (case.op, direction, name) in self.exact:
                return self.exact[case.op, direction, name], "bench"
        known = sorted(self.sizes[case.op, direction].items())
        for (low, slow), (high, fast) in zip(known, known[1:]):
            if low <= size <= high:
                part = math.log(size / low) / math.log(high / low) if high > low else 0.0
                return size / (slow + part * (fast - slow)) * 1e-6, "bench between"
        if known and size > known[-1][0]:  # rates no longer grow with the size there
            return size / known[-1][1] * 1e-6, "bench beyond"
        return None, ""

    def copy(self, size):
        if size not in self.copies:
            sets = 1 + math.ceil(4 * self.env.l2 / size)
            pairs = [torch.empty(2, size // 4, dtype=torch.int16, device=self.env.device) for _ in range(sets)]
            self.copies[size] = graph_clock(self.env, lambda number: pairs[number][1].copy_(pairs[number][0]), sets, 0.05)
        return self.copies[size], "copy"

    def matmuls(self, case, sets):
        """Forward's matmul, with a teacher two, and backward's two, on random operands; of a vocabulary in whole eights: where rows
        do not start on 16 bytes a matmul takes six times as long, and a yardstick that slow measures nothing."""
        x, weight = sets[0]["x"], F.pad(sets[0]["weight"].detach(), (0, 0, 0, -len(sets[0]["weight"]) % 8))
        dz = torch.randn(len(x), len(weight), dtype=BF16, device=self.env.device) / len(x)
        times, more = [], "teacher_x" in case.inputs
        for call in (lambda _: x @ weight.T, lambda _: dz @ weight, lambda _: dz.T @ x):
            time.sleep(REST)
            times.append(profiler_clock(self.env, call, 1, case.flops / 7e11))
        times[0] *= 1 + more  # the teacher's is as large
        return {"forward": (times[0], "matmul"), "backward": (times[1] + times[2], "matmul"),
                "forward_backward": (sum(times), "matmul")}

    def of(self, case, sets):
        """By direction: (milliseconds, where from)."""
        if not self.env.cuda:
            return {direction: (None, "") for direction in DIRECTIONS}
        if case.flops:
            shape = case.name.removesuffix(UPSTREAMS[1][0])
            if shape not in self.products:
                self.products[shape] = self.matmuls(case, sets)
            return self.products[shape]
        found = {}
        for direction, (reads, writes) in case.traffic.items():
            size = reads + writes
            # One read and one write of everything costs in one launch what backward costs.
            found[direction] = self.bench(case, "backward" if direction == "forward_backward" else direction, size)
            if found[direction][0] is None:
                found[direction] = self.copy(size)
        if "forward_backward" not in found:
            parts = [found["forward"], found["backward"]]
            found["forward_backward"] = sum(p[0] for p in parts), " + ".join(dict.fromkeys(p[1] for p in parts))
        return found


# ---- The run ----------------------------------------------------------------------------------------------------------------


def text_of(command):
    try:
        return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


class Environment:
    def __init__(self, options):
        self.options, self.smoke, self.device = options, options.smoke, options.device
        self.cuda = self.device == "cuda"
        self.started = time.monotonic()
        self.calls, self.warm, self.replays = (2, 1, 0) if self.smoke else (9, 2, 7) if options.quick else (21, 3, 21)
        if options.reference and not self.smoke:
            self.calls, self.replays = 9, 9
        if options.calls and not (self.smoke or options.quick):
            self.calls, self.warm = 51, 1  # there are calls enough before it
        self.commit = os.environ.get("COMMIT") or text_of(["git", "rev-parse", "--short", "HEAD"]) or "none"
        name = torch.cuda.get_device_name() if self.cuda else "cpu"
        self.gpu = name.removeprefix("NVIDIA ").lower().translate(str.maketrans(" /,", "---"))
        if self.cuda:
            self.l2 = torch.cuda.get_device_properties(0).L2_cache_size
            self.flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
            self.stream = torch.cuda.Stream()
            torch.cuda.set_stream(self.stream)  # one stream for all: a capture of backward needs the stream of its forward
        driver = text_of(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).split("\n")[0] or "unknown"
        triton = importlib.metadata.version("triton") if has_package("triton") else "none"
        self.said, self.spent, self.rows = set(), collections.Counter(), []
        self.version = f"lk {self.commit}; driver {driver}; CUDA {torch.version.cuda}; PyTorch {torch.__version__}; " \
                       f"Triton {triton}; Python {platform.python_version()}"
        wanted = options.list is False and (not options.provider or {"lk", "lk inplace"} & set(options.provider))
        self.lk = self.load_lk() if wanted else None

    def load_lk(self):
        """lk_torch's functions. Without them there is nothing to compare with, so that ends the run."""
        try:
            import lk_torch
        except Exception as error:
            raise SystemExit(f"lk_torch: {type(error).__name__}: {error}\n"
                             "`pip install --no-build-isolation ./packages/torch` builds it for this GPU; with LK_BACKEND=cpu "
                             "before it, for --device cpu") from error
        if lk_torch.BACKEND != self.device:
            raise SystemExit(f"{lk_torch.__file__} was built for {lk_torch.BACKEND}, and --device is {self.device}")
        self.version = f"lk_torch {lk_torch.__version__}; {self.version}"  # plot.py tells by it how lk was called
        self.where = os.path.dirname(lk_torch.__file__)
        return lk_torch.functional

    @contextlib.contextmanager
    def timed(self, what):
        """Adds up where the run's seconds go."""
        start = time.monotonic()
        try:
            yield
        finally:
            self.spent[what] += time.monotonic() - start

    def left(self):
        budget = self.options.budget
        return math.inf if budget is None else budget - (time.monotonic() - self.started)

    def head(self):
        yield self.version
        yield f"GPU {torch.cuda.get_device_name()}, L2 {self.l2 / MIB:.0f} MiB" if self.cuda else "no GPU"
        if self.lk:
            yield f"lk_torch {self.where}"
        for package in PACKAGES.values():
            yield f"{package} {importlib.metadata.version(package)}" if has_package(package) else f"missing: {package}"


def has_package(name):
    try:
        importlib.metadata.version(name)
        return True
    except importlib.metadata.PackageNotFoundError:
        return False


def key_of(row):
    return tuple(row[column] for column in ("op", "direction", "dtype", "case", "provider"))


class Rows:
    """The CSV: rows are appended as they come, and the newest of each key stay."""

    def __init__(self, path, columns):
        self.path, self.columns, self.rows = path, columns, {}
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        if os.path.exists(path):
            with open(path, newline="") as file:
                reader = csv.DictReader(file)
                if tuple(reader.fieldnames or ()) != self.columns:
                    raise SystemExit(f"{path} has other columns than this program writes; it is left as it is")
                self.rows = {key_of(row): row for row in reader}

    def append(self, row):
        new = not os.path.exists(self.path)
        with open(self.path, "a", newline="") as file:
            writer = csv.DictWriter(file, self.columns, lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerow(row)
        self.rows[key_of(row)] = row

    def finish(self):
        order = {op: i for i, op in enumerate(OPS)}
        rows = sorted(self.rows.values(), key=lambda row: order.get(row["op"], len(order)))  # stable: cases keep their order
        with open(f"{self.path}.part", "w", newline="") as file:
            writer = csv.DictWriter(file, self.columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
        os.replace(f"{self.path}.part", self.path)


class Progress:
    """A bar on a terminal's stderr, rows go to stdout. done counts the case that is being measured too."""

    def __init__(self, total):
        self.total, self.done, self.started = total, 0, time.monotonic()

    def show(self, what):
        if sys.stderr.isatty():
            before = max(0, self.done - 1)
            full = 24 * before // max(1, self.total)
            spent = time.monotonic() - self.started
            rest = f", about {spent / before * (self.total - before):.0f} s to go" if before else ""
            print(f"\r\033[K[{'#' * full}{'.' * (24 - full)}] {self.done}/{self.total}{rest}  {what}", end="", file=sys.stderr,
                  flush=True)

    def clear(self):
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr, flush=True)


SHOWN = ("op", "case", "direction", "provider", "call_ms", "kernel_ms", "kernel_clock", "burst_ms", "sustained_ms",
         "of_matmuls", "of_ceiling", "errors", "equal", "extra_mb", "workspace_mb", "plan", "note")  # those of them that a CSV has


def say(env, rows, progress, case, row):
    row = {**dict.fromkeys(rows.columns, ""), "op": case.op, "dtype": "bf16", "case": case.name, "gpu": env.gpu,
           "commit": env.commit, **row}
    plain = re.sub(r"\x1b\[[0-9;]*m", "", row["note"])  # without colours
    row["note"] = " ".join(plain.replace(",", ";").replace('"', "'").replace("|", "/").split())[:200]
    rows.append(row)
    if row["direction"]:
        env.rows.append(row)
    progress.clear()
    print(f"| {progress.done}/{progress.total} | " + " | ".join(str(row[c]) for c in SHOWN if c in row) + " |", flush=True)


def make_sets(env, case):
    """Sets of inputs and upstream gradients, and the function that fills them."""
    specs = dict(case.inputs)
    for number, gradient in enumerate(case.upstream):
        if gradient:
            specs[f"upstream {number}"] = gradient
    size = sum(math.prod(shape) * torch.empty(0, dtype=dtype).element_size() for shape, dtype, _ in specs.values())
    count = 1 if env.options.calls else max(2, 1 + math.ceil(4 * env.l2 / size)) if env.cuda else 2
    whole = [{name: torch.empty(shape, dtype=dtype, device=env.device) for name, (shape, dtype, _) in specs.items()}
             for _ in range(count)]

    def refill():
        """The same numbers again; autograd does not see that they were written, so a backward may still follow."""
        for number, tensors in enumerate(whole):
            fill({name: tensor.data for name, tensor in tensors.items()}, specs, 1000 + number)

    refill()
    sets = [{name: s[name] for name in case.inputs} for s in whole]
    upstreams = [[s.get(f"upstream {number}") for number in range(len(case.upstream))] for s in whole]
    return sets, upstreams, refill


def ready(env, rows, progress, case, provider):
    """Whether the provider is here; that one is not is said once an op."""
    with env.timed("imports"):
        here = provider.ready()
    if not here and (case.op, provider.name, provider.missing) not in env.said:
        env.said.add((case.op, provider.name, provider.missing))
        say(env, rows, progress, dataclasses.replace(case, name=""),
            {"provider": provider.name, "note": f"missing: {provider.missing}"})
    return here


def failure(provider, direction, error):
    return {"provider": provider.name, "version": provider.version, "direction": direction,
            "note": f"failed: {type(error).__name__}: {error}"}


def give_back(env):
    with env.timed("memory given back"):
        gc.collect()
        if env.cuda:
            torch.cuda.synchronize()  # raises when the context is lost: nothing after it would be worth a row
            torch.cuda.empty_cache()


def run_provider(env, rows, progress, case, provider, wanted, shared):
    sets, upstreams, refill, right, ceilings = shared
    for direction in wanted:
        progress.show(f"{case.op} {case.name} {provider.name} {direction}")
        subject = Subject(case, provider, sets, upstreams, refill)
        try:
            with env.timed("inputs"):
                refill()
            row = {"provider": provider.name, "version": provider.version, "direction": direction,
                   **measure(env, subject, direction, right)}
            ceiling, source = ceilings[direction]
            if ceiling and row.get("kernel_ms"):
                share = ceiling / float(row["kernel_ms"])
                row.update(of_ceiling=f"{share:.3f}", ceiling_ms=f"{ceiling:.5g}", ceiling_from=source)
        except Exception as error:  # a peer may fail in any way, and says so in its row
            row = failure(provider, direction, error)
        subject = None
        give_back(env)
        say(env, rows, progress, case, row)


def worth_compiling(rows, case, direction):
    """What lk needs under COMPILED_BELOW ms for, or what lk has no row of."""
    lk = rows.rows.get((case.op, direction, "bf16", case.name, "lk"))
    return not (lk and lk["call_ms"]) or float(lk["call_ms"]) < COMPILED_BELOW


def run_calls(env, rows, progress, case, todo, sets, upstreams, refill):
    """The rows of --calls: the providers' calls take turns."""
    for direction in DIRECTIONS:
        subjects = [Subject(case, provider, sets, upstreams, refill) for provider, wanted in todo if direction in wanted]

        def those_that(step, subjects):
            """The subjects whose step does not fail; of the others there is a row that says why."""
            fine = []
            for subject in subjects:
                progress.show(f"{case.op} {case.name} {subject.provider.name} {direction}")
                try:
                    with Deadline(min(LONGEST, max(0.0, env.left()) + 30)):
                        step(subject)
                    fine.append(subject)
                except Exception as error:
                    say(env, rows, progress, case, failure(subject.provider, direction, error))
            return fine

        # All first calls come before all preparations: they fill the inputs again, which ends what was prepared on them.
        subjects = those_that(lambda subject: first_calls(env, subject, direction), subjects)
        subjects = those_that(lambda subject: subject.prepare(direction, len(sets)), subjects)
        with env.timed("calls"):
            times = call_clock(env, [getattr(subject, direction) for subject in subjects],
                               [subject.fill for subject in subjects], len(sets))
        for provider, ms in zip([subject.provider for subject in subjects], times):
            say(env, rows, progress, case, failure(provider, direction, ms) if isinstance(ms, Exception) else
                {"provider": provider.name, "version": provider.version, "direction": direction, "call_ms": f"{ms:.5g}"})
        del subjects
        give_back(env)


def run_case(env, rows, progress, case, todo):
    """Whether there was time for all of it."""
    todo = [(provider, directions) for provider, directions in todo if ready(env, rows, progress, case, provider)]
    if env.options.calls:
        todo = [(provider, [d for d in directions if provider.first() not in COMPILING or worth_compiling(rows, case, d)])
                for provider, directions in todo]
    if not any(directions for _, directions in todo):
        return True
    gc.freeze()  # the modules' objects, which are many: gc.collect() then looks at the case's alone
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()  # else shapes of earlier cases cost later ones guards, and at the eighth compilation ends
    with env.timed("inputs"):
        sets, upstreams, refill = make_sets(env, case)
    if env.options.calls:
        run_calls(env, rows, progress, case, todo, sets, upstreams, refill)
        return True
    with env.timed("float64"), torch.no_grad():
        right = case.reference(sets[0], [None if u is None else u.detach() for u in upstreams[0]])
    with env.timed("ceilings"):
        ceilings = Ceilings.of(env.ceilings, case, sets)
    for provider, directions in todo:
        if env.left() < 0:
            return False
        run_provider(env, rows, progress, case, provider, directions, (sets, upstreams, refill, right, ceilings))
    return True


def chosen_cases(env, rows):
    """(case, [(provider, directions)]) of what is to be measured."""
    options, found = env.options, []
    for op in options.ops or OPS:
        for case in CASES[op](env):
            if not any(text in case.name for text in options.case or [""]) or (options.quick and not case.quick and not env.smoke):
                continue
            if options.reference and not case.page and not env.smoke:
                continue
            todo = []
            for provider in case.providers:
                wanted = [d for d in provider.directions if d != "forward" or not case.name.endswith(UPSTREAMS[1][0])]
                if options.reference and not provider.called(("lk", "torch", "xopes")):
                    continue
                if options.resume:
                    done = (rows.rows.get((op, d, "bf16", case.name, provider.name)) for d in wanted)
                    wanted = [d for d, row in zip(list(wanted), done)
                              if not (row and row["commit"] == env.commit and row["call_ms"])]
                if provider.called(options.provider) and wanted:
                    todo.append((provider, wanted))
            if todo:
                found.append((case, todo))
    if options.reference:  # the largest of each op first, the ops in turn
        places = {}
        for op in OPS:
            mine = sorted((case for case, _ in found if case.op == op), key=Case.size, reverse=True)
            places.update((id(case), at / len(mine)) for at, case in enumerate(mine))
        found.sort(key=lambda pair: places[id(pair[0])])
    if options.calls:
        passes = [lambda first: first not in COMPILING, *(functools.partial(str.__eq__, name) for name in COMPILING)]
        found = [(case, [part for part in todo if chosen(part[0].first())]) for chosen in passes for case, todo in found]
        found = [(case, todo) for case, todo in found if todo]
    return found


def tune_for(warmup, rep):
    """Triton times each choice for so many milliseconds, where a kernel does not say for how many."""
    try:
        import triton.testing
    except ImportError:
        return
    triton.testing.do_bench = functools.partial(triton.testing.do_bench, warmup=warmup, rep=rep)


def compile_first(processes):
    """Fills Triton's cache on disk by processes that each take a share of the cases, so that this one has only to tune."""
    start, command = time.monotonic(), [sys.executable, os.path.abspath(__file__), *sys.argv[1:]]
    running = [subprocess.Popen([*command, "--part", f"{k}/{processes}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
               for k in range(processes)]
    for process in running:
        try:
            process.wait(max(0.0, start + COMPILE_MOST - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
    print(f"compiled in {processes} processes: {time.monotonic() - start:.0f} s")


def compile_share(env, todo):
    """First calls of what tunes by Triton's autotuner, on one set of inputs; each choice is compiled, run once, and not timed."""
    import triton.testing

    def once(call, quantiles=None, **_):
        call()
        return [1.0] * len(quantiles or (0,))
    triton.testing.do_bench = once
    k, n = map(int, env.options.part.split("/"))
    env.options.calls = True  # one set of inputs
    todo = [(case, providers) for case, providers in todo if case.upstream != (None,)]  # a random one has all its kernels too
    for case, providers in todo[k::n]:
        mine = [provider for provider, _ in providers if provider.name.startswith("xopes") and provider.ready()]
        try:
            sets, upstreams, refill = make_sets(env, case) if mine else (None, None, None)
            for provider in mine:
                first_calls(env, Subject(case, provider, sets, upstreams, refill), provider.directions[-1])
        except Exception:  # the run itself will say so
            pass
        sets = upstreams = refill = None
        give_back(env)
    return 0


def main():
    parser = argparse.ArgumentParser(description="lk beside other libraries; the file's first comment says how it measures")
    parser.add_argument("ops", nargs="*", choices=[[], *OPS], metavar="OP", help=f"{', '.join(OPS)}; all when left out")
    parser.add_argument("--calls", action="store_true", help="times calls from Python alone")
    parser.add_argument("--csv", help="instead of bench/results/<gpu>-compare.csv or -calls.csv; build/<gpu>-... with --smoke")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--smoke", action="store_true", help="tiny cases, to try the program itself")
    parser.add_argument("--quick", action="store_true", help="three cases an op, fewer repetitions")
    parser.add_argument("--budget", type=float, help="seconds after which no further provider is begun")
    parser.add_argument("--resume", action="store_true", help="leaves out rows of this commit that the CSV has")
    parser.add_argument("--case", action="append", help="only cases whose name holds this; may be given several times")
    parser.add_argument("--provider", action="append", default=[],
                        help="only providers of this name, or with this first word; may be given several times")
    parser.add_argument("--reference", action="store_true", help="lk, PyTorch and xopes on the shapes of xopes' pages")
    parser.add_argument("--compile", type=int, default=0, metavar="PROCESSES", help="compile in so many processes before")
    parser.add_argument("--part", help=argparse.SUPPRESS)  # K/N: a process of --compile, which makes first calls of its share
    parser.add_argument("--list", action="store_true", help="names cases and providers, measures nothing")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"PyTorch {torch.__version__} sees no GPU here, so nothing was measured; what an H200 reached is in "
              "bench/results/h200-compare.md")
        return 0
    torch._functorch.config.donated_buffer = False  # backward is timed several times from one forward
    env = Environment(options)
    env.ceilings = Ceilings(env)
    for line in env.head() if not options.part else ():
        print(line)
    kind = "-calls" if options.calls else "-reference" if options.reference else "-compare"
    kind += "-quick" * options.quick
    folder = "build" if options.smoke else "bench/results"
    rows = Rows(options.csv or f"{ROOT}/{folder}/{env.gpu}{kind}.csv", CALLS_COLUMNS if options.calls else COLUMNS)
    todo = chosen_cases(env, rows)
    if options.list:
        for case, providers in todo:
            print(f"{case.op} {case.name}: {', '.join(provider.name for provider, _ in providers)}")
        return 0
    if options.part:
        return compile_share(env, todo)
    if options.compile:
        compile_first(options.compile)
    if options.reference and env.cuda:
        tune_for(5, 20)
    print("call_ms: a call from Python, L2 cold" + ("" if options.calls else "; kernel_ms: the kernels alone; of_ceiling: of "
          "kernel_ms;\nerrors: relative, against float64; extra_mb: peak beyond inputs and results, MiB") + "\n")
    head = ["#", *(column for column in SHOWN if column in rows.columns)]
    print("| " + " | ".join(head) + " |\n" + "|---" * len(head) + "|", flush=True)
    progress = Progress(len(todo))
    left_out = []
    try:
        for case, providers in todo:
            progress.done += 1
            try:
                if env.left() < 0 or not run_case(env, rows, progress, case, providers):
                    left_out.append(f"{case.op} {case.name}")
            except torch.OutOfMemoryError as error:  # the case itself; a provider's own ends in its row
                say(env, rows, progress, case, {"provider": "all", "note": f"failed: {error}"})
            gc.collect()
            if env.cuda:
                torch.cuda.empty_cache()
    finally:
        progress.clear()
        rows.finish()
    for name in left_out:
        print(f"left out, or not all of it, for want of time: {name}")
    if env.spent:
        print("seconds: " + ", ".join(f"{what} {seconds:.0f}" for what, seconds in env.spent.most_common()))
    if options.calls:
        timed = plot.calls_of(rows.path)
        texts, count, compared = plot.slower(plot.grouped(timed), "call_ms", plot.SLOWER)
        print(*texts, f"lk's call is more than {plot.SLOWER - 1:.0%} slower than the fastest other's in {count} of "
              f"{compared} places (rows of {plot.commits_of(timed)})", sep="\n")
    failed = [row for row in env.rows if row["note"].startswith("failed")]
    print(f"{rows.path}: {len(env.rows)} rows measured, {len(failed)} of them failed, {time.monotonic() - env.started:.0f} s"
          + ("" if options.calls or options.smoke else "; `make compare-plots` makes plots and tables, where matplotlib is"))
    if options.smoke:
        passed = sum(bool(row["call_ms"]) and plot.right(row, WRONG) for row in env.rows)
        failures = len(env.rows) - passed + len(left_out)
        print(f"{passed} passed, {failures} failed")
        return 1 if failures else 0
    return 1 if any(row["provider"] == "lk" for row in failed) else 0


if __name__ == "__main__":
    sys.exit(main())
