#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""A hunt for calls of lk_torch that are slower than they should be, at drawn shapes between those of the benches: `make hunt`.

    hunt.py [--seconds S] [--seed N] [--question NAME]... [--call TEXT]... [--most N] [--csv FILE] [--device cpu --smoke]

Questions  torch: the call beside PyTorch's own functions, eager, on the same tensors. Right: at most 1.05 times their time.
           neighbour: a shape a little smaller, or odd, beside the shape itself; both are lk's. Right: at most 1.15.
           layout: rows with gaps, a base that is off by an element, slices and transposes of larger tensors, and options, beside
           the same call on packed rows without option. Right: at most 1.15.
           ALLOWED says where more is right, how much, and why.
Cases      drawn by --seed: 1 to 16384 rows, 8 to 262144 columns, hidden 8 to 7168, three types. Half of the sizes are what models
           have and what lies beside it, half are any number. Small ones are drawn more often: most calls that users make are small,
           and more of them fit into the time. CALLS is every function of lk_torch.functional that runs on one GPU. Upstream
           gradients: 1, a number, a random one for each element, one number or one row expanded with a stride of 0. They have the
           result's type, as autograd has it: `logsumexp float32` has one in float32, logsumexp one in T.
Check      Before it is timed, a call's results are held against PyTorch's on the same inputs as float32: ||value - right|| is at
           most WRONG of ||right||, and what rounding to float16's smallest numbers adds. A case that is wrong, or that does not
           run, falls short too. One for which memory is not enough is left out, and counted.
Time       Whole calls, forward alone under no_grad or forward and gradients by autograd.grad, in CUDA graphs of 1 to 8 calls back
           to back. The two graphs of a case take turns, and the median of the turns counts. Inputs stay in the L2 where they fit.
           What is above its limit is timed again, longer, and the smaller ratio counts.
Inputs     are views of normal numbers that are made once for each type. A head's x is divided by sqrt(hidden), so logits are
           normal too.
Rows       One for each question, call and direction, worst first: how many cases, how many above 1.05 and 1.15, how many above
           their own limit (short), the geometric mean and the worst. They go to bench/results/<gpu>-hunt.csv, of which `make
           readme` makes tables; with --question, --call or --most to build, unless --csv names a file. Every case goes to
           build/<gpu>-hunt-cases.csv. The exit status is 1 where any case falls short.
--smoke    each call in each direction, option, layout and upstream, each question, on tiny tensors. Results are checked; times are
           not judged, and the rows go to build.
"""
import argparse
import collections
import contextlib
import csv
import dataclasses
import gc
import math
import os
import random
import statistics
import sys
import time

import compare
import torch
import torch.nn.functional as F

LIMITS = {"torch": 1.05, "neighbour": 1.15, "layout": 1.15}
COLUMNS = ("question", "call", "direction", "cases", "above_1.05", "above_1.15", "short", "mean", "worst", "worst_limit",
           "worst_case", "seed", "seconds", "version", "gpu", "commit")
CASE_COLUMNS = ("question", "call", "direction", "case", "ratio", "limit", "ms", "beside_ms", "note")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
NAMES = {BF16: "bf16", F16: "f16", F32: "f32"}
BOTH = "forward_backward"
EPS = 1e-6
LRPE_HEADS = 8
NUMBER = 1.7109375  # an upstream that is not 1 and that bf16 can say
IDS = 8
# Of the norm of what is right. 16 bits: rounding dz and the result to bf16 is some 4e-3. Float32: lk's sums and PyTorch's are of up
# to 10^4 terms in other orders.
WRONG = {BF16: 1e-2, F16: 1e-2, F32: 2e-4}
TURNS, TURN_MS, AGAIN = 5, 0.6, 4  # turns of a pair, how long one lasts, how much longer where the ratio is above its limit
REPLAY_MS, CALLS_MOST = 0.1, 8  # a graph has calls for so many ms, and at most so many calls

ROWS = (1, 2, 3, 4, 7, 8, 13, 16, 31, 32, 64, 100, 128, 252, 256, 500, 512, 1000, 1020, 1024, 2044, 2048, 4090, 4096, 8188, 8192,
        16384)
COLS = (8, 17, 64, 100, 128, 256, 500, 512, 1000, 1024, 2048, 3001, 4096, 5120, 8192, 12288, 16384, 32000, 32003, 50257, 65536,
        128256, 151935, 151936, 262144)
HIDDEN = (8, 64, 100, 128, 576, 768, 1024, 2048, 4096, 7168)
WHOLE_ROWS = (8, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192)  # whose neighbours are a little smaller
WHOLE_COLS = (1024, 4096, 8192, 16384, 32000, 50304, 65536, 128256)
WHOLE_HIDDEN = (1024, 2048, 4096)
SMALLER = ("rows-1", "rows-4", "rows-100", "cols-1", "cols-8", "cols-47", "hidden-8", "hidden-4")


@dataclasses.dataclass(frozen=True)
class Case:
    call: str
    direction: str
    rows: int
    cols: int
    hidden: int = 0  # of heads
    dtype: torch.dtype = BF16
    upstream: str = "one"
    layout: str = "packed"
    option: str = "plain"

    def text(self):
        """Rows x columns, of heads rows x hidden x columns, and what is not plain."""
        sizes = f"{self.rows} x " + (f"{self.hidden} x " if self.hidden else "") + str(self.cols)
        more = [name for name, plain in ((self.layout, "packed"), (self.option, "plain")) if name != plain]
        more += [f"upstream {self.upstream}"] if self.upstream != "one" and self.direction == BOTH else []
        return " ".join([sizes, NAMES[self.dtype], *more])

    def elements(self):
        """Of logits, or of a norm's rows."""
        return self.rows * self.cols

    def ms(self):
        """A guess."""
        return 0.01 + self.elements() * 8 / 3e9 + 6.0 * self.elements() * self.hidden / 6e11


# ---- Inputs -----------------------------------------------------------------------------------------------------------------


class Store:
    """Normal numbers, made once for each type. What a case takes lies one behind the other, from the start again where there is no
    room. Nothing writes to it."""

    def __init__(self, env):
        self.env, self.at, self.numbers = env, 0, {}
        self.size = min(2**31, env.memory_bytes // 64) if env.cuda else 2**18

    def all(self, dtype):
        if dtype not in self.numbers:
            self.numbers[dtype] = torch.empty(self.size, dtype=dtype, device=self.env.device)
            part = 2**28  # whose indices are of 32 bits
            for at in range(0, self.size, part):
                self.numbers[dtype][at:at + part].normal_()
        return self.numbers[dtype]

    def take(self, count, dtype, skip=0):
        """`count` numbers from a multiple of 128 on, and `skip` further."""
        if skip + count > self.size:
            raise torch.OutOfMemoryError(f"{count} numbers of {self.size}")
        if self.at + skip + count > self.size:  # not from 0 on: two tensors of a case must not have the same numbers
            self.at = min(2**14, self.size - skip - count) // 128 * 128
        start = self.at + skip
        self.at = -(-(start + count) // 128) * 128
        return self.all(dtype)[start:start + count]

    def laid(self, rows, cols, dtype, layout="packed", scale=1.0):
        """[rows, cols], or [4, rows / 4, cols], of numbers times scale."""
        n, strides, skip = rows * cols, (cols, 1), 0
        if layout.startswith("pad"):  # the rows of a wider tensor
            strides = cols + int(layout[3:]), 1
            n = rows * strides[0]
        elif layout == "thirds":  # the second of three parts of each row
            n, strides, skip = 3 * n, (3 * cols, 1), cols
        elif layout == "transposed":
            strides = 1, rows
        elif layout == "shift":  # all tokens but the last of each sequence
            n += 4 * cols
        numbers = self.take(n, dtype, skip=layout == "offset")
        if scale != 1.0:
            numbers = torch.cat([numbers[:1], numbers])[1:].mul_(scale) if layout == "offset" else numbers * scale
        if layout == "shift":
            return numbers[:4 * (rows // 4 + 1) * cols].view(4, rows // 4 + 1, cols)[:, :-1]
        return numbers.as_strided((rows, cols), strides, numbers.storage_offset() + skip)


def input_rows(name="x", cols="cols", laid=True):
    def make(env, case):
        count, layout = getattr(case, cols), case.layout if laid and not case.layout.startswith("weight ") else "packed"
        if layout == "shift" and case.rows < 4:
            layout = "packed"
        return env.store.laid(case.rows, count, case.dtype, layout, count**-0.5 if cols == "hidden" else 1.0)
    return {name: make}


def input_head(name="weight"):
    return {name: lambda env, case: env.store.laid(case.cols, case.hidden, case.dtype, case.layout.removeprefix("weight ")
                                                   if case.layout.startswith("weight ") else "packed")}


def tokens_of(case):
    return (4, case.rows // 4) if case.layout == "shift" and case.rows >= 4 else (case.rows,)


def input_targets(env, case):
    target = torch.randint(case.cols, tokens_of(case), device=env.device)
    if case.option == "ignore":  # nine of ten, and never all
        target.view(-1)[1:].masked_fill_(torch.rand(target.numel() - 1, device=env.device) < 0.9, -100)
    return target.int() if case.option == "int32" else target


def input_options(env, case):
    """What the options of a loss need besides."""
    if case.option == "weights":
        return torch.rand(case.cols, device=env.device) + 0.5
    if case.option == "row_weight":
        return torch.rand(tokens_of(case), device=env.device) + 0.5
    if case.option == "bias":
        return env.store.laid(1, case.cols, case.dtype)[0]
    return None


def input_ids(env, case):
    return torch.randint(case.cols, (*tokens_of(case), min(IDS, case.cols)), device=env.device)


def input_id_weights(env, case):
    return torch.rand((*tokens_of(case), min(IDS, case.cols)), device=env.device) / IDS


LOSS_INPUTS = {"target": input_targets, "more": input_options}
IDS_INPUTS = {"ids": input_ids, "id_weight": input_id_weights}

# ---- PyTorch's functions: of inputs of any type ---------------------------------------------------------------------------------


def torch_loss(z, i, case, reduction):
    """F.cross_entropy with lk's options."""
    option, more, target = case.option, i["more"], i["target"].long()
    z, target = z.flatten(0, -2), target.flatten()
    if option == "softcap":
        z = 30.0 * torch.tanh(z / 30.0)
    if option == "logit_scale":
        z = z * 0.7
    weighted = option == "row_weight"
    loss = F.cross_entropy(z, target, weight=more.to(z.dtype) if option == "weights" else None,
                           reduction="none" if weighted or option == "z_loss" else reduction,
                           label_smoothing=0.1 if option == "smoothing" else 0.0)
    if weighted:
        loss = loss * more.flatten()
    if option == "z_loss":
        loss = loss + 1e-4 * torch.logsumexp(z, 1).square()
    if (weighted or option == "z_loss") and reduction != "none":
        loss = loss.mean() if reduction == "mean" else loss.sum()
    return loss if reduction != "none" else loss.view(i["target"].shape)


def lk_options(i, case):
    return {"weights": {"weight": i["more"]}, "smoothing": {"label_smoothing": 0.1}, "z_loss": {"z_loss": 1e-4},
            "softcap": {"softcap": 30.0}, "logit_scale": {"logit_scale": 0.7}, "row_weight": {"row_weight": i["more"]},
            "bias": {"linear_bias": i["more"]}}.get(case.option, {})


def head_wanted(case):
    return ("x", "weight") + ("more",) * (case.option == "bias")


def torch_logits(i, case):
    return F.linear(i["x"], i["weight"], i["more"] if case.option == "bias" else None)


def torch_stats(z, i):
    """The loss and the entropy of each row."""
    logp = F.log_softmax(z, -1, dtype=F32)
    return -logp.gather(-1, i["target"][..., None])[..., 0], -(logp.exp() * logp).sum(-1)


def loss_and_entropy(out):
    return out.loss, out.entropy


def torch_statistics(z):
    logp = F.log_softmax(z, -1, dtype=F32)
    return (2 * logp).logsumexp(-1), z.float().mean(-1), logp.amax(-1)


def torch_ids(z, i):
    logp = F.log_softmax(z, -1, dtype=F32).gather(-1, i["ids"])
    return -(i["id_weight"] * logp).sum(), logp


def torch_tail(z, i):
    """The loss of the ids and of all other classes, the latter of weight 0.5."""
    logp = F.log_softmax(z, -1, dtype=F32)
    rest = torch.logsumexp(logp.scatter(-1, i["ids"], -math.inf), -1)
    return -(i["id_weight"] * logp.gather(-1, i["ids"])).sum() - 0.5 * rest.sum()


def torch_kl(z, t, case, reduction):
    z, t = (v.flatten(0, -2).log_softmax(1) for v in (z, t))
    if case.option == "jensen_shannon":
        m = torch.logaddexp(z, t) - math.log(2)
        each = 0.5 * (F.kl_div(m, t, log_target=True, reduction="none") + F.kl_div(m, z, log_target=True, reduction="none"))
    else:
        each = F.kl_div(*((z, t) if case.option == "plain" else (t, z)), log_target=True,
                        reduction="batchmean" if reduction == "mean" else "none")
    if reduction == "none":
        return each.sum(1)
    return each if each.dim() == 0 else each.sum() / len(z)


def lk_kl(case, reduction):
    return {"divergence": {"plain": "forward"}.get(case.option, case.option), "reduction": reduction}


def norm_wanted(case):
    return ("x", "residual") + ("weight",) * (case.option != "no weight") + ("bias",) * (case.option == "bias")


def torch_norm(s, i, case):
    """In s's type."""
    option, w, shape = case.option, i["weight"], s.shape
    if option == "groups":
        return (F.rms_norm(s.unflatten(-1, (-1, 64)), (64,), None, EPS) * w.view(-1, 64)).flatten(-2)
    w = None if option == "no weight" else 1 + w if option == "offset" else w
    y = F.rms_norm(s if w is None else s.to(w.dtype), shape[-1:], w, EPS).to(s.dtype)
    return y + i["bias"] if option == "bias" else y


def lk_norm(function, i, case, *x):
    cols, option, more = (x[0].shape[-1],), case.option, {}
    w = None if option == "no weight" else i["weight"]
    if option == "groups":
        x, cols, w, more = [t.unflatten(-1, (-1, 64)) for t in x], (64,), w.view(-1, 64), {"groups": x[0].shape[-1] // 64}
    if option == "offset":
        more = {"weight_offset": 1.0}
    if option == "bias":
        more = {"bias": i["bias"]}
    y = function(*x, cols, w, EPS, **more)
    if option != "groups":
        return y
    return y.flatten(-2) if torch.is_tensor(y) else tuple(t.flatten(-2) for t in y)


NORM_INPUTS = {"weight": lambda env, case: env.store.laid(1, case.cols, F32 if case.option == "float32 weight" else case.dtype)[0],
               "bias": lambda env, case: env.store.laid(1, case.cols, case.dtype)[0]}
NORM_OPTIONS = ("plain", "no weight", "float32 weight", "bias", "offset", "groups")
PER = {"block128": 128, "mx": 32}
E4M3 = torch.float8_e4m3fn


def torch_norm_fp8(s, i, case):
    """(q, scales): a norm, and a quantiser as its user would write it."""
    y = F.rms_norm(s, s.shape[-1:], i["weight"], EPS).float()
    if case.option == "tensor":
        return (y * 32.0).clamp(-448, 448).to(E4M3), torch.full((), 1 / 32, device=y.device)
    parts = y.unflatten(-1, (-1, PER.get(case.option, y.shape[-1])))
    scale = parts.abs().amax(-1, keepdim=True) / 448
    if case.option == "mx":
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    q = (parts * scale.reciprocal()).clamp(-448, 448).to(E4M3).flatten(-2)
    return q, scale.squeeze(-1).to(torch.float8_e8m0fnu) if case.option == "mx" else scale.squeeze(-1)


def lk_norm_fp8(LF, i, case):
    more = {"scale": i["scale"]} if case.option == "tensor" else {}
    x = (i["x"],) if "residual" not in i else (i["x"], i["residual"])
    return (LF.rms_norm if len(x) == 1 else LF.add_rms_norm)(*x, x[0].shape[-1:], i["weight"], EPS, out_dtype=E4M3,
                                                           scaling=case.option, **more)


def read_fp8(results, case):
    """y from q and its scales, and what comes behind them."""
    q, scale, *rest = results
    if case.option in PER:
        return [(q.float().unflatten(-1, (-1, PER[case.option])) * scale.float().unsqueeze(-1)).flatten(-2), *rest]
    return [q.float() * scale.float().view(scale.shape if scale.dim() == q.dim() or not scale.dim() else (*scale.shape, 1)), *rest]


def input_lrpe(env, case):
    return env.store.laid(LRPE_HEADS * case.rows, case.cols, case.dtype).view(1, LRPE_HEADS, case.rows, case.cols)


def input_theta(env, case):
    """Angles of which the largest is a few turns at the last token."""
    return env.store.laid(LRPE_HEADS, case.cols, F32).abs() * (10.0 / (1 + case.rows))


def torch_lrpe(i, case):
    x, theta = i["x"], i["theta"]
    turned = F.silu(x) if case.option == "silu" else x
    phi = torch.arange(x.shape[2], device=x.device)[None, :, None] * theta[:, None, :]
    return torch.cat([turned * phi.cos(), turned * phi.sin()], -1).to(x.dtype)


# ---- Calls ------------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Call:
    """ours(LF, i, case), theirs(i, case): a result or several, with gradients for those inputs of wanted(case) that there are. own:
    both make gradients themselves, and return them. read(results, case): what is compared, where that is not the results.
    again(case): how many products of forward lk makes once more in backward. multiple: of the columns. whole_hidden: in eights."""
    ours: object
    theirs: object
    inputs: dict
    wanted: object = lambda case: ("x",)
    options: tuple = ("plain",)
    layouts: tuple = ()
    upstreams: tuple = ("one", "number")
    directions: tuple = ("forward", BOTH)
    dtypes: tuple = (BF16, F16, F32)
    own: bool = False
    read: object = None
    wrong: float = 0.0
    again: object = lambda case: 0
    head: bool = False
    cols: tuple = COLS
    multiple: int = 1
    whole_hidden: bool = False


PER_ROW = ("random", "one", "expanded")  # upstreams of results of each row
SPACED = ("pad1", "pad8", "offset", "thirds")
LEADING = (*SPACED, "shift", "transposed")  # of what takes [..., cols]
HEAD_LAYOUTS = (*LEADING, "weight pad1", "weight pad8", "weight offset", "weight transposed")
LOSS_OPTIONS = ("plain", "weights", "smoothing", "z_loss", "softcap", "logit_scale", "row_weight", "ignore", "int32")
HEAD_OPTIONS = ("plain", "bias", "softcap", "weights", "smoothing", "ignore")
DIVERGENCES = ("plain", "reverse", "jensen_shannon")
LOGITS = input_rows()
HEAD = {**input_rows(cols="hidden"), **input_head()}


def ups_of(reduction):
    return PER_ROW if reduction == "none" else ("one", "number")


def loss_call(reduction):
    """cross_entropy of logits."""
    return Call(lambda LF, i, case: LF.cross_entropy(i["x"], i["target"], reduction=reduction, **lk_options(i, case)),
                lambda i, case: torch_loss(i["x"], i, case, reduction), {**LOGITS, **LOSS_INPUTS}, options=LOSS_OPTIONS,
                layouts=(*SPACED, "transposed"), upstreams=ups_of(reduction))


def inplace(LF, i, case):
    return LF.cross_entropy(compare.as_computed(i["x"]), i["target"], inplace=True)


def with_grad(scale, **options):
    """The loss and its gradient in one call, which is no autograd's. The gradient is times scale."""
    def ours(LF, i, case):
        return LF.cross_entropy_with_grad(i["x"], i["target"], reduction="none", grad_scale=scale, **options)

    def theirs(i, case):
        x = i["x"].detach().requires_grad_()
        with torch.enable_grad():
            loss = F.cross_entropy(x, i["target"], reduction="none")
        return loss.detach(), torch.autograd.grad(loss, x, torch.full_like(loss, scale))[0]
    return Call(ours, theirs, {**LOGITS, **LOSS_INPUTS}, layouts=SPACED, upstreams=("one",), directions=(BOTH,), own=True,
                read=lambda results, case: [t.float() for t in results], wrong=0.1 if options else 0.0,
                dtypes=(BF16, F32) if options else (BF16, F16, F32))


def head_call(reduction, keep=False):
    def again(case):
        # Of float16 a mean's gradients are made in backward too. Kept exponentials, which bf16 has, want whole eights.
        kept = keep and not (case.dtype == BF16 and case.hidden % 8)
        return int(case.direction == BOTH and not kept and (reduction == "none" or case.dtype == F16))
    extra = {"keep": True} if keep else {}
    return Call(lambda LF, i, case: LF.linear_cross_entropy(i["x"], i["weight"], i["target"], reduction=reduction, **extra,
                                                            **lk_options(i, case)),
                lambda i, case: torch_loss(torch_logits(i, case), i, case, reduction), {**HEAD, **LOSS_INPUTS}, head_wanted,
                HEAD_OPTIONS, HEAD_LAYOUTS, ups_of(reduction), head=True, again=again)


def in_backward(case):
    return int(case.direction == BOTH)


def kl_call(reduction):
    return Call(lambda LF, i, case: LF.kl(i["x"], i["teacher"], **lk_kl(case, reduction)),
                lambda i, case: torch_kl(i["x"], i["teacher"], case, reduction), {**LOGITS, **input_rows("teacher")},
                options=DIVERGENCES, layouts=(*SPACED, "transposed"), upstreams=ups_of(reduction))


def linear_kl_call(reduction):
    return Call(lambda LF, i, case: LF.linear_kl(i["x"], i["weight"], i["teacher"], i["teacher_weight"], **lk_kl(case, reduction)),
                lambda i, case: torch_kl(F.linear(i["x"], i["weight"]), F.linear(i["teacher"], i["teacher_weight"]), case,
                                         reduction),
                {**HEAD, **input_rows("teacher", "hidden", laid=False), **input_head("teacher_weight")}, head_wanted, DIVERGENCES,
                SPACED, ups_of(reduction), head=True,
                again=lambda case: 2 if case.direction == BOTH and (reduction == "none" or case.dtype == F16) else 0)


def norm_call(add):
    def ours(LF, i, case):
        return lk_norm(LF.add_rms_norm if add else LF.rms_norm, i, case, *([i["x"], i["residual"]] if add else [i["x"]]))

    def theirs(i, case):
        s = i["x"] + i["residual"] if add else i["x"]
        return (torch_norm(s, i, case), s) if add else torch_norm(s, i, case)
    return Call(ours, theirs, {**LOGITS, **(input_rows("residual") if add else {}), **NORM_INPUTS},
                norm_wanted, NORM_OPTIONS, LEADING, ("random", "one", "expanded", "row"),
                cols=tuple(c for c in COLS if c <= 16384))


def fp8_call(add):
    def theirs(i, case):
        s = i["x"] + i["residual"] if add else i["x"]
        return (*torch_norm_fp8(s, i, case), *([s] if add else []))
    inputs = {**LOGITS, **(input_rows("residual") if add else {}), **NORM_INPUTS,
              "scale": lambda env, case: torch.full((), 1 / 32, device=env.device)}
    # Two numbers of 8 bits that are both near y differ by up to 2^-3 of it.
    return Call(lk_norm_fp8, theirs, inputs, norm_wanted, ("row", "tensor", "block128", "mx"), (), ("one",), ("forward",), (BF16,),
                read=read_fp8, wrong=0.06, cols=tuple(c for c in COLS if c <= 16384), multiple=128)


CALLS = {
    "logsumexp": Call(lambda LF, i, case: LF.logsumexp(i["x"], -1), lambda i, case: torch.logsumexp(i["x"], -1), LOGITS,
                      layouts=LEADING, upstreams=PER_ROW),
    "logsumexp float32": Call(lambda LF, i, case: LF.logsumexp(i["x"], -1, dtype=F32), lambda i, case: torch.logsumexp(i["x"], -1),
                              LOGITS, layouts=LEADING, upstreams=PER_ROW),
    "logsumexp dim 0": Call(lambda LF, i, case: LF.logsumexp(i["x"], 0), lambda i, case: torch.logsumexp(i["x"], 0), LOGITS,
                            upstreams=PER_ROW),
    "cross_entropy": loss_call("mean"),
    "cross_entropy sum": loss_call("sum"),
    "cross_entropy none": loss_call("none"),
    "cross_entropy inplace": Call(inplace, lambda i, case: F.cross_entropy(i["x"], i["target"]), {**LOGITS, **LOSS_INPUTS},
                                  directions=(BOTH,), dtypes=(BF16, F32)),
    "cross_entropy_with_grad": with_grad(1.0),
    "cross_entropy_with_grad e5m2": with_grad(2.0**15, dlogits_dtype=torch.float8_e5m2),
    "cross_entropy_stats": Call(lambda LF, i, case: loss_and_entropy(LF.cross_entropy_stats(i["x"], i["target"], reduction="none")),
                                lambda i, case: torch_stats(i["x"], i), {**LOGITS, **LOSS_INPUTS}, layouts=SPACED,
                                upstreams=PER_ROW),
    "cross_entropy_stats statistics": Call(
        lambda LF, i, case: LF.cross_entropy_stats(i["x"], i["target"], reduction="none", statistics=True)[5:],
        lambda i, case: torch_statistics(i["x"]), {**LOGITS, **LOSS_INPUTS}, directions=("forward",)),
    "cross_entropy probabilities": Call(
        lambda LF, i, case: LF.cross_entropy(i["x"], i["prob"]), lambda i, case: F.cross_entropy(i["x"], i["prob"]),
        {**LOGITS, "prob": lambda env, case: torch.softmax(env.store.laid(case.rows, case.cols, case.dtype), 1)}, layouts=SPACED),
    "cross_entropy_ids": Call(lambda LF, i, case: LF.cross_entropy_ids(i["x"], i["ids"], i["id_weight"], reduction="sum")[0],
                              lambda i, case: torch_ids(i["x"], i)[0], {**LOGITS, **IDS_INPUTS}, layouts=LEADING),
    "cross_entropy_ids logp": Call(lambda LF, i, case: LF.cross_entropy_ids(i["x"], i["ids"], i["id_weight"], reduction="sum")[1],
                                   lambda i, case: torch_ids(i["x"], i)[1], {**LOGITS, **IDS_INPUTS}, layouts=SPACED,
                                   upstreams=PER_ROW),
    "cross_entropy_ids tail": Call(
        lambda LF, i, case: LF.cross_entropy_ids(i["x"], i["ids"], i["id_weight"], reduction="sum", tail_weight=i["tail"])[0],
        lambda i, case: torch_tail(i["x"], i),
        {**LOGITS, **IDS_INPUTS, "tail": lambda env, case: torch.full(tokens_of(case), 0.5, device=env.device)},
        cols=tuple(c for c in COLS if c > 2 * IDS)),
    "kl": kl_call("mean"),
    "kl none": kl_call("none"),
    "rms_norm": norm_call(False),
    "add_rms_norm": norm_call(True),
    "srms_norm": Call(lambda LF, i, case: LF.srms_norm(i["x"]), lambda i, case: F.rms_norm(i["x"], i["x"].shape[-1:], None, EPS),
                      LOGITS, layouts=SPACED, upstreams=("random", "row"), cols=tuple(c for c in COLS if c <= 16384)),
    "rms_norm fp8": fp8_call(False),
    "add_rms_norm fp8": fp8_call(True),
    "md_lrpe_cosine": Call(
        lambda LF, i, case: LF.md_lrpe_cosine(i["x"], i["theta"], (case.rows,), activation="silu" if case.option == "silu" else None),
        torch_lrpe, {"x": input_lrpe, "theta": input_theta}, lambda case: ("x", "theta")[:1 + (case.option == "theta")],
        ("plain", "silu", "theta"), upstreams=("random", "one", "expanded"), cols=(64, 96, 128), multiple=32),
    "linear_cross_entropy": head_call("mean"),
    "linear_cross_entropy sum": head_call("sum"),
    "linear_cross_entropy none": head_call("none"),
    "linear_cross_entropy keep": head_call("none", keep=True),
    "linear_cross_entropy batch_invariant": Call(
        lambda LF, i, case: LF.linear_cross_entropy(i["x"], i["weight"], i["target"], reduction="none", batch_invariant=True),
        lambda i, case: torch_loss(F.linear(i["x"], i["weight"]), i, case, "none"), {**HEAD, **LOSS_INPUTS}, head_wanted,
        directions=("forward",), dtypes=(BF16,), head=True, whole_hidden=True),
    "linear_cross_entropy_stats": Call(
        lambda LF, i, case: loss_and_entropy(LF.linear_cross_entropy_stats(i["x"], i["weight"], i["target"], reduction="none")),
        lambda i, case: torch_stats(F.linear(i["x"], i["weight"]), i), {**HEAD, **LOSS_INPUTS}, head_wanted, upstreams=PER_ROW,
        head=True, again=in_backward),
    "linear_cross_entropy_ids": Call(
        lambda LF, i, case: LF.linear_cross_entropy_ids(i["x"], i["weight"], i["ids"], i["id_weight"], reduction="sum")[0],
        lambda i, case: torch_ids(F.linear(i["x"], i["weight"]), i)[0], {**HEAD, **IDS_INPUTS}, head_wanted, layouts=HEAD_LAYOUTS,
        head=True, again=in_backward),
    "linear_cross_entropy_ids logp": Call(
        lambda LF, i, case: LF.linear_cross_entropy_ids(i["x"], i["weight"], i["ids"], i["id_weight"], reduction="sum")[1],
        lambda i, case: torch_ids(F.linear(i["x"], i["weight"]), i)[1], {**HEAD, **IDS_INPUTS}, head_wanted, upstreams=PER_ROW,
        head=True, again=in_backward),
    "linear_kl": linear_kl_call("mean"),
    "linear_kl none": linear_kl_call("none"),
}

# ---- Where more than the limit is right -------------------------------------------------------------------------------------


@dataclasses.dataclass
class Allowed:
    """Of the question's cases for which where(case, smaller) holds, smaller being what a neighbour lacks. `most`: how much slower, or
    what is timed to know it: "again": the products that lk makes again, beside PyTorch's call; "torch": the same pair by PyTorch;
    "copy": a copy of the tensor as packed rows, beside the call on packed rows."""
    question: str
    where: object
    most: object
    why: str


ALLOWED = (
    Allowed("torch", lambda case, smaller: CALLS[case.call].again(case) > 0, "again",
            "without keep lk computes logits again in backward, which PyTorch keeps in memory: at most the matmul that does it"),
    Allowed("torch", lambda case, smaller: case.call.endswith("batch_invariant"), 2.5,
            "the same bits for any other tokens: no sum is split by the number of tokens, which PyTorch does not promise"),
    Allowed("neighbour", lambda case, smaller: smaller == "hidden-4", "torch",
            "rows of a hidden size that is no multiple of 8 do not start on 16 bytes: at most what PyTorch's own matmuls lose"),
    Allowed("layout", lambda case, smaller: CALLS[case.call].head and case.layout.endswith(("pad1", "offset")), "torch",
            "a factor of a matmul whose rows do not start on 16 bytes: at most what PyTorch's own matmuls lose"),
    Allowed("layout", lambda case, smaller: case.layout.endswith("transposed"), "copy",
            "rows whose elements are not adjacent are copied: at most one such copy"),
    Allowed("layout", lambda case, smaller: case.layout == "shift" and not case.call.startswith("logsumexp"), "copy",
            "rows that have no common stride are copied: at most one such copy"),
    Allowed("layout", lambda case, smaller: case.option == "softcap", 2.5,
            "a tanh for each logit, in forward and again in backward: 2.2 to 2.4 in the rows softcap=30 of results/h200.csv"),
)


def allowance(question, case, smaller=""):
    """The entry of ALLOWED for a case, or None."""
    return next((a for a in ALLOWED if a.question == question and a.where(case, smaller)), None)


def limit_of(question, beside_ms, most=1.0, more_ms=0.0):
    """The largest ratio that is right: the question's limit of what the second one takes, times most, or with more_ms."""
    return LIMITS[question] * max(1.0, most) * (beside_ms + more_ms) / beside_ms


# ---- One call ---------------------------------------------------------------------------------------------------------------


def upstream(env, form, out, number):
    """The gradient of a result in its type, the same numbers for all types."""
    if form == "one":
        return torch.ones_like(out)
    if form == "expanded" and out.dim():
        return torch.full((), NUMBER, dtype=out.dtype, device=out.device).expand(out.shape)
    if form in ("random", "row") and out.dim():
        numbers, count = env.store.all(BF16), out.numel() if form == "random" else out.shape[-1]
        at = min(env.store.size // 2 + number * 1024, env.store.size - count)  # others than the inputs', which are taken from 0 on
        return numbers[at:at + count].to(out.dtype).view(out.shape if form == "random" else (-1,)).expand(out.shape)
    return torch.full_like(out, NUMBER)


class Subject:
    """lk's call of a case, or PyTorch's: run() gives results and gradients."""

    def __init__(self, env, case, ours, inputs=None):
        self.env, self.case, self.ours, self.call, self.upstreams = env, case, ours, CALLS[case.call], None
        self.inputs = inputs or {name: make(env, case) for name, make in self.call.inputs.items()}
        wanted = self.call.wanted(case) if case.direction == BOTH and not self.call.own else ()
        self.leaves = {name: None if t is None else t.detach().requires_grad_(name in wanted) for name, t in self.inputs.items()}
        self.wanted = [self.leaves[name] for name in wanted if name in self.leaves]
        if case.call.endswith("inplace") and ours:  # the logits are destroyed, and the store's numbers are for all
            self.leaves["x"] = self.leaves["x"].detach().clone().requires_grad_()
            self.wanted = [self.leaves["x"]]

    def results(self):
        found = self.call.ours(self.env.lk, self.leaves, self.case) if self.ours else self.call.theirs(self.leaves, self.case)
        return compare.as_list(found)

    def run(self):
        if not self.wanted:
            with torch.no_grad():
                return self.results()
        results = self.results()
        if self.upstreams is None:
            self.upstreams = [upstream(self.env, self.case.upstream, out, number) for number, out in enumerate(results)]
        return results + list(torch.autograd.grad(results, self.wanted, self.upstreams))

    def same(self, ours=False):
        """The other one of the same inputs."""
        return Subject(self.env, self.case, ours, self.inputs)


def wide(t):
    return t.float() if t is not None and t.is_floating_point() else t


def wrong(env, subject):
    """Runs a call of lk's, and says what of its results is not as PyTorch has it from the same numbers in float32; "" where all is.
    Factors of 16 bits are exact in TF32, so the matmuls may be of that."""
    case, call = subject.case, subject.call
    found = subject.run()
    torch.backends.cuda.matmul.allow_tf32 = case.dtype != F32
    try:
        exact = Subject(env, case, False, {name: wide(t) for name, t in subject.inputs.items()})
        right = exact.run()
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    if call.read:
        found, right = call.read(found, case), call.read(right, case)
    limit, least = call.wrong or WRONG[case.dtype], 2.0**-25 if case.dtype == F16 else 1e-30
    shapes = [(value.shape, expected.shape) for value, expected in zip(found, right) if value.shape != expected.shape]
    if shapes or len(found) != len(right):
        return f"wrong: {len(found)} results for {len(right)}; shapes {shapes}"
    off = [((value.float() - expected).norm() - least * math.sqrt(value.numel())) / (expected.norm() + 1e-30)
           for value, expected in zip(found, right)]
    errors = torch.stack(off).tolist()
    bad = [f"{number} is off by {error:.2g}" for number, error in enumerate(errors) if not error <= limit]
    return f"wrong: of {len(found)} results and gradients " + ", ".join(bad) + f"; limit {limit:g}" if bad else ""


# ---- Times ------------------------------------------------------------------------------------------------------------------


class Clock:
    """Times of calls in CUDA graphs. The graphs share their memory: they are replayed one after the other, and no result is read."""

    def __init__(self, env):
        self.env, self.pool = env, None
        self.marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if env.cuda else []
        self.renew()

    def renew(self):
        """Gives all memory back. One graph that stays keeps the pool."""
        gc.collect()
        if not self.env.cuda:
            return
        self.keeper = None
        torch.cuda.empty_cache()
        self.pool = torch.cuda.graph_pool_handle()
        self.keeper = self.capture(lambda: torch.empty(1, device=self.env.device).zero_(), 1)

    def capture(self, run, calls):
        """A graph of so many calls. torch.cuda.graph() would give all cached memory back before each capture."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(self.pool)
        try:
            for _ in range(calls):
                run()
        except Exception:
            with contextlib.suppress(Exception):  # of the capture that the first one has ended
                graph.capture_end()
            raise
        graph.capture_end()
        return graph

    def turns(self, runs, guess):
        """turns(count): milliseconds of a call of each run, medians of so many turns. guess: what a call may take."""
        if not self.env.cuda:
            return lambda count: [self.once(run) for run in runs]
        for run in runs:
            for _ in range(2):  # wrong() has made a call of each of lk's
                run()
        calls = max(1, min(CALLS_MOST, math.ceil(REPLAY_MS / guess)))
        graphs = [self.capture(run, calls) for run in runs]
        counts = [max(1, min(64, round(TURN_MS / max(min(self.replay(graph, 1) for _ in range(2)), 1e-3)))) for graph in graphs]

        def times(count):
            found = [[] for _ in graphs]
            for _ in range(count):
                for mine, graph, replays in zip(found, graphs, counts):
                    mine.append(self.replay(graph, replays) / calls)
            return [statistics.median(mine) for mine in found]
        return times

    def replay(self, graph, count):
        begin, end = self.marks
        begin.record()
        for _ in range(count):
            graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / count

    def once(self, run):
        start = time.perf_counter()
        run()
        return (time.perf_counter() - start) * 1e3


def row_of(question, case, more="", note=""):
    return {"question": question, "call": case.call, "direction": case.direction, "case": case.text() + more, "ratio": "",
            "limit": "", "ms": "", "beside_ms": "", "note": note}


def judge(env, question, subject, beside, smaller=""):
    """A row: subject's time over beside's, and its limit."""
    case = subject.case
    row = row_of(question, case, f" of {beside.case.text()}" if smaller else "")
    for mine in (subject, beside):
        row["note"] = row["note"] or (wrong(env, mine) if mine.ours else "")
    if row["note"]:
        return row
    clock, guess, entry = env.clock, beside.case.ms(), allowance(question, case, smaller)
    times = clock.turns([subject.run, beside.run], guess)
    first, second = times(TURNS)
    most, more = 1.0, 0.0
    if entry and (env.smoke or first > limit_of(question, second) * second):
        if entry.most == "torch":
            theirs = clock.turns([subject.same().run, beside.same().run], guess)(TURNS)
            most = theirs[0] / theirs[1]
        elif entry.most in ("again", "copy"):
            more, = clock.turns([products_of(subject) if entry.most == "again" else copy_of(subject)], guess)(TURNS)
        else:
            most = entry.most
    if first > limit_of(question, second, most, more) * second and not env.smoke:
        first, second = min((first, second), times(TURNS * AGAIN), key=lambda ms: ms[0] / ms[1])
    limit = math.inf if env.smoke else limit_of(question, second, most, more)
    row.update(ratio=first / second, limit=limit, ms=first, beside_ms=second)
    return row


def copy_of(subject):
    return subject.inputs["weight" if subject.case.layout.startswith("weight ") else "x"].contiguous


def products_of(subject):
    """What lk's backward computes again."""
    i, pairs = subject.inputs, (("x", "weight"), ("teacher", "teacher_weight"))[:subject.call.again(subject.case)]

    def run():
        for x, weight in pairs:
            F.linear(i[x], i[weight])
    return run


# ---- What is drawn ----------------------------------------------------------------------------------------------------------


def size(r, known, most):
    """A known one, or any up to `most`, all magnitudes alike."""
    return r.choice(known) if r.random() < 0.5 else max(1, round(2 ** r.uniform(0, math.log2(most))))


def fitted(case):
    """The case with columns that its call takes."""
    call = CALLS[case.call]
    most, least = max(call.cols), max(8, min(call.cols), call.multiple)
    multiple = 64 if case.option == "groups" else call.multiple
    least = 128 if case.option == "groups" else least
    hidden = max(8, case.hidden // 8 * 8) if call.whole_hidden else case.hidden
    return dataclasses.replace(case, cols=min(most, max(least, case.cols // multiple * multiple)), hidden=hidden)


def likely(env, r, case):
    """Whether the case stays: it fits, and large ones are fewer."""
    work = case.elements() * max(1, case.hidden)
    most, usual = (2**40 if case.dtype != F32 else 2**37, 2**34) if case.hidden else (2**29, 2**24)
    needed = case.cols * case.hidden if case.hidden else 3 * case.elements()
    return (work <= most and case.elements() <= 2**30 and needed <= env.store.size and
            r.random() < (usual / max(usual, work)) ** 0.3)


def draw_call(r, names):
    """Heads are drawn twice as often as others: they have one size more."""
    name = r.choices(names, [2 if CALLS[name].head else 1 for name in names])[0]
    call = CALLS[name]
    dtype = r.choice([d for d in call.dtypes for _ in range(3 if d is BF16 else 1)])
    return name, call, r.choice(call.directions), dtype


def draw_torch(env, r, names):
    name, call, direction, dtype = draw_call(r, names)
    option = r.choice(call.options) if r.random() < 0.4 else call.options[0]
    hidden = size(r, HIDDEN, 7168) if call.head else 0
    hidden = max(8, hidden // 8 * 8) if hidden and r.random() < 0.8 else hidden
    case = fitted(Case(name, direction, size(r, ROWS, 16384), size(r, COLS, 262144), hidden, dtype, r.choice(call.upstreams),
                       option=option))
    if option == "int32" or not likely(env, r, case):  # PyTorch has no int32 targets
        return None
    subject = Subject(env, case, True)
    return subject, subject.same(), ""


def draw_neighbour(env, r, names):
    name, call, direction, dtype = draw_call(r, names)
    case = fitted(Case(name, direction, r.choice(WHOLE_ROWS), r.choice(WHOLE_COLS if max(call.cols) >= 1024 else call.cols),
                       r.choice(WHOLE_HIDDEN) if call.head else 0, dtype, option=call.options[0], upstream=call.upstreams[0]))
    which = r.choice(SMALLER)
    what, less = which.split("-")
    smaller = dataclasses.replace(case, **{what: getattr(case, what) - int(less)})
    if smaller.rows < 1 or smaller.hidden < 0 or (less == "100" and case.rows < 1024) or fitted(smaller) != smaller:
        return None
    if not likely(env, r, case):
        return None
    return Subject(env, smaller, True), Subject(env, case, True), which


def draw_layout(env, r, names):
    name, call, direction, dtype = draw_call(r, names)
    layout, option = "packed", call.options[0]
    if call.layouts and r.random() < 0.7:
        layout = r.choice(call.layouts)
    elif len(call.options) > 1 and (name.startswith("cross_entropy") or call.head and "kl" not in name):
        option = r.choice(call.options[1:])
    form = r.choice(call.upstreams) if direction == BOTH else call.upstreams[0]
    case = fitted(Case(name, direction, r.choice((64, 256, 1024, 4096, 8192)),
                       r.choice([c for c in call.cols if c >= 1024] or call.cols), r.choice(WHOLE_HIDDEN) if call.head else 0, dtype,
                       form, layout, option))
    # One number for all is the same in both: lk_torch expects what came twice in a row, and the two take turns.
    plain = dataclasses.replace(case, layout="packed", option=call.options[0],
                                upstream=form if call.upstreams[0] == "one" else call.upstreams[0])
    if plain == case or not likely(env, r, case):
        return None
    return Subject(env, case, True), Subject(env, plain, True), ""


DRAW = {"torch": draw_torch, "neighbour": draw_neighbour, "layout": draw_layout}
SHARE = {"torch": 5, "neighbour": 3, "layout": 2}


def smoke_cases(env):
    """(question, subject, beside, smaller) of all that can be drawn, tiny."""
    for turn, (name, call) in enumerate(env.calls.items()):
        def case(number, direction, **more):
            dtype = call.dtypes[number % len(call.dtypes)]
            return fitted(Case(name, direction, 12, 24, 16 if call.head else 0, dtype, **{"upstream": call.upstreams[0],
                                                                                          "option": call.options[0], **more}))
        number = turn
        for direction in call.directions:
            for kind, values in (("option", call.options), ("upstream", call.upstreams[1:] if direction == BOTH else ())):
                for value in values:
                    number += 1
                    subject = Subject(env, case(number, direction, **{kind: value}), True)
                    yield "torch", subject, subject.same(), ""
        direction = call.directions[-1]
        for layout in call.layouts:
            number += 1
            subject = Subject(env, case(number, direction, layout=layout), True)
            yield "layout", subject, Subject(env, case(number, direction), True), ""
        for which in ("rows-1", "cols-1", "hidden-4"):
            what, less = which.split("-")
            whole = case(number, direction)
            smaller = fitted(dataclasses.replace(whole, **{what: getattr(whole, what) - int(less)}))
            if smaller.hidden >= 0 and smaller != whole:
                yield "neighbour", Subject(env, smaller, True), Subject(env, whole, True), which


def drawn_cases(env):
    r, names = random.Random(env.options.seed), list(env.calls)
    questions = env.options.question or list(DRAW)
    while env.left() > 0:
        question = r.choices(questions, [SHARE[q] for q in questions])[0]
        torch.manual_seed(r.getrandbits(32))
        env.store.at = 0
        try:
            found = DRAW[question](env, r, names)
        except torch.OutOfMemoryError:
            env.left_out += 1
            env.clock.renew()
            continue
        if found:
            yield (question, *found)


# ---- The run ----------------------------------------------------------------------------------------------------------------


def is_short(row):
    return bool(row["note"]) or row["ratio"] > row["limit"]


def badness(row):
    """What sorts rows, worst first: failures, then by how far the ratio is above its limit."""
    return (1, 0.0) if row["note"] else (0, row["ratio"] / row["limit"])


def summarised(rows, tail):
    """A CSV's rows, worst first."""
    groups = collections.defaultdict(list)
    for row in rows:
        groups[row["question"], row["call"], row["direction"]].append(row)
    found = []
    for (question, call, direction), mine in groups.items():
        timed = [row for row in mine if not row["note"]]
        worst = max(mine, key=badness)
        ratios = [row["ratio"] for row in timed]
        line = {"question": question, "call": call, "direction": direction, "cases": len(mine),
                "above_1.05": sum(ratio > 1.05 for ratio in ratios), "above_1.15": sum(ratio > 1.15 for ratio in ratios),
                "short": sum(map(is_short, mine)),
                "mean": f"{math.exp(statistics.mean(map(math.log, ratios))):.3f}" if ratios else "",
                "worst": "" if worst["note"] else f"{worst['ratio']:.3f}",
                "worst_limit": "" if worst["note"] else f"{worst['limit']:.3f}", "worst_case": worst["case"], **tail}
        found.append((badness(worst), line))
    return [line for _, line in sorted(found, key=lambda pair: pair[0], reverse=True)]


def write(path, columns, rows):
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(f"{path}.part", "w", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n", extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    os.replace(f"{path}.part", path)


def show(rows):
    """The table of what falls short, worst first."""
    short = sorted(filter(is_short, rows), key=badness, reverse=True)
    if short:
        print("\n| question | call | direction | case | ratio | limit | ms | beside, ms | note |\n" + "|---" * 9 + "|")
    for row in short:
        numbers = [f"{row[name]:.4g}" if row[name] != "" else "" for name in ("ratio", "limit", "ms", "beside_ms")]
        print("| " + " | ".join([row["question"], row["call"], row["direction"], row["case"], *numbers, row["note"]]) + " |")
    return short


def own_checks():
    """The judgement itself, on numbers: what must fall short, and what must not."""
    head = Case("linear_cross_entropy none", BOTH, 64, 1024, 64)
    row = {"note": "", "ratio": 1.3, "limit": limit_of("torch", 2.0)}
    yield is_short(row) and not is_short({**row, "ratio": 1.04}) and is_short({**row, "ratio": "", "note": "failed: x"})
    yield math.isclose(limit_of("torch", 3.0, more_ms=1.0), 1.4) and math.isclose(limit_of("neighbour", 3.0, most=0.5), 1.15)
    yield allowance("torch", head).most == "again" and allowance("torch", dataclasses.replace(head, direction="forward")) is None
    yield allowance("torch", dataclasses.replace(head, call="linear_cross_entropy keep")) is None
    yield allowance("neighbour", head, "cols-1") is None and allowance("neighbour", head, "hidden-4").most == "torch"
    rows = [{**row, "question": "torch", "call": call, "direction": BOTH, "case": "", "ratio": ratio}
            for call, ratio in (("b", 1.06), ("a", 0.5), ("a", 2.0))]
    yield [[line[name] for name in ("call", "cases", "above_1.15", "short", "mean")] for line in summarised(rows, {})] == [
        ["a", 2, 1, 1, "1.000"], ["b", 1, 0, 1, "1.060"]]


def main():
    parser = argparse.ArgumentParser(description="calls of lk_torch that are slower than right; the file's first comment says more")
    parser.add_argument("--seconds", type=float, default=100.0, help="how long it draws")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--question", action="append", choices=list(LIMITS), help="only this one; may be given several times")
    parser.add_argument("--call", action="append", help="only calls whose name holds this; may be given several times")
    parser.add_argument("--most", type=int, default=0, metavar="N", help="ends after so many cases")
    parser.add_argument("--csv", help="instead of bench/results/<gpu>-hunt.csv; build/cpu-hunt.csv with --smoke")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--smoke", action="store_true", help="each kind of call on tiny tensors, to try the program itself")
    parser.set_defaults(calls=True, quick=False, list=False, reference=False, provider=[])  # of compare.Environment
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"PyTorch {torch.__version__} sees no GPU here, so nothing was measured")
        return 0
    options.budget = None if options.smoke else options.seconds
    if options.device == "cpu":
        torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other
    env = compare.Environment(options)
    env.calls = {name: call for name, call in CALLS.items() if any(text in name for text in options.call or [""])}
    env.memory_bytes = torch.cuda.get_device_properties(0).total_memory if env.cuda else 0
    env.store, env.clock, env.left_out = Store(env), Clock(env), 0
    torch.manual_seed(options.seed)
    print(env.version, f"GPU {torch.cuda.get_device_name()}" if env.cuda else "no GPU", f"seed {options.seed}", sep="\n")
    rows, progress, lost = [], compare.Progress(math.ceil(options.seconds)), ""
    gc.collect()
    gc.freeze()
    gc.disable()  # a collection in a capture could free a graph; one between cases is enough
    env.started = time.monotonic()
    for question, subject, beside, smaller in smoke_cases(env) if env.smoke else drawn_cases(env):
        progress.done = 1 + int(time.monotonic() - env.started)
        progress.show(f"{len(rows)} cases, {sum(map(is_short, rows))} short; {question} {subject.case.call} {subject.case.text()}")
        try:
            rows.append(judge(env, question, subject, beside, smaller))
        except torch.OutOfMemoryError:
            env.left_out += 1
            env.clock.renew()
        except Exception as error:  # whatever it is, the case did not run
            note = " ".join(f"failed: {type(error).__name__}: {error}".replace("|", "/").split())[:200]
            rows.append(row_of(question, subject.case, note=note))
            try:
                env.clock.renew()
            except Exception as after:  # the context is lost: nothing after it would be worth a row
                lost = f"the GPU's context is lost: {after}"
                break
        subject = beside = None
        if len(rows) % 500 == 0 or env.cuda and torch.cuda.memory_reserved() > 0.6 * env.memory_bytes:
            env.clock.renew()
        if len(rows) == options.most:
            break
    progress.clear()
    spent = time.monotonic() - env.started
    judged = [row for row in rows if row["note"]] if env.smoke else rows
    short = show(judged)
    tail = {"seed": options.seed, "seconds": f"{spent:.0f}", "version": env.version.replace(",", ";"), "gpu": env.gpu,
            "commit": env.commit}
    partial = bool(options.question or options.call or options.most) and not options.csv
    folder = "build" if env.smoke or partial else "bench/results"
    path = options.csv or f"{compare.ROOT}/{folder}/{env.gpu}-hunt.csv"
    lines = summarised(rows, tail)
    write(path, COLUMNS, lines)
    write(f"{compare.ROOT}/build/{env.gpu}-hunt-cases.csv", CASE_COLUMNS, rows)
    names = ("question", "call", "direction", "cases", "above_1.05", "above_1.15", "short", "mean", "worst", "worst_limit")
    if not env.smoke:
        print("\n| " + " | ".join(names) + " |\n" + "|---" * len(names) + "|")
    for line in lines if not env.smoke else ():
        print("| " + " | ".join(str(line[name]) for name in names) + " |")
    print(f"{path}: {len(rows)} cases, {len(short)} fall short, {env.left_out} left out for want of memory, {spent:.0f} s")
    if lost:
        print(lost)
    if env.smoke:
        own = list(own_checks())
        print(f"{len(rows) - len(short) + sum(own)} passed, {len(short) + len(own) - sum(own)} failed")
        return bool(short) or not all(own)
    return bool(short or lost)


if __name__ == "__main__":
    sys.exit(main())
