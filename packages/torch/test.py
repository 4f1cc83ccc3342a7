# SPDX-License-Identifier: MIT
"""lk_torch against PyTorch in float64, and against what PyTorch asks of an operator.

    python packages/torch/test.py               # all groups; V=1 in the environment prints each check
    python packages/torch/test.py cross_entropy compile
    python packages/torch/test.py --list

A check compares outputs and gradients with what PyTorch computes in float64 from the same inputs. Each number has a bound of
its own, derived from the manuals in lk/<op>.cuh: half a unit of the type for each rounding to it, and some units of U = 2^-24
of the magnitudes of the terms. A printed share is the largest error over its bound; above 1 the check fails.
"""
import collections
import copy
import functools
import inspect
import io
import itertools
import math
import os
import pickle
import random
import re
import subprocess
import sys
import threading
import time
import traceback
import types

from testing import CUDA, D, HERE, VERBOSE, quiet, totals, verdict

import numpy
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import lk_torch
from lk_torch import functional as LF

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
TYPES = (F32, F16, BF16)
U = 2.0**-24
HALF = {F32: 2.0**-24, F16: 2.0**-11, BF16: 2.0**-8, torch.float64: 0.0}  # half a unit of the type, relative
LEAST = {F32: 2.0**-126, F16: 2.0**-25, BF16: 2.0**-126, torch.float64: 0.0}  # half of f16's least number; others may flush
INF, NAN = math.inf, math.nan
NAMES = {F32: "f32", F16: "f16", BF16: "bf16", torch.float64: "f64"}

# ---- Verdicts ---------------------------------------------------------------------------------------------------------------

worst = 0.0  # of the group at hand
rng = random.Random()
generator = torch.Generator()


def share(value, expected, bound):
    """The largest error as a share of its bound, with its place. Infinite where a shape, a NaN or an infinity is wrong."""
    if tuple(value.shape) != tuple(expected.shape):
        return INF, f"the shape is {tuple(value.shape)}, not {tuple(expected.shape)}"
    if value.numel() == 0:
        return 0.0, ""
    value, expected = value.detach().double(), expected.detach().double()
    bound = torch.as_tensor(bound, dtype=torch.float64, device=value.device).expand_as(expected)
    part = (value - expected).abs() / bound
    part = torch.where((value == expected) | (value.isnan() & expected.isnan()), 0.0, part)
    part = torch.where(part.isnan() | (value.isfinite() != expected.isfinite()) & (part != 0), INF, part)
    at = int(part.argmax())
    return float(part.flatten()[at]), f"[{at}] is {value.flatten()[at]:.9g}, not {expected.flatten()[at]:.9g}"


def compare(name, *results):
    """One check. Each result is (name, value, expected, bound)."""
    global worst
    shares = [(which, *share(value, expected, bound)) for which, value, expected, bound in results]
    worst = max([worst, *(part for _, part, _ in shares if part < INF)])
    wrong = [f"{which}{where} ({part:.3g} of its bound)" for which, part, where in shares if not part <= 1]
    verdict(name + "".join(f"  {which} {part:.2f}" for which, part, _ in shares), not wrong, "; ".join(wrong))


def attempt(name, f):
    """f(), whose exception is a failed check."""
    try:
        f()
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == os.path.abspath(__file__)][-3:]
        verdict(name, False, f"{type(error).__name__} at lines {lines}: {' '.join(str(error).split())[:700]}")


def rounded(expected, error, dtype, times=1):
    """The bound of a result that is within `error` as a float and is then rounded to this type, `times` times."""
    expected = expected.detach()
    return torch.nan_to_num(expected.abs(), posinf=0.0) * HALF[dtype] * times + error + LEAST[dtype]


def raises(name, f, *words, kind=None):
    """f() must be refused with a sentence that has one of these words, by an exception of just this kind if one is given."""
    try:
        f()
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        text = " ".join(str(error).split())
        good = len(text) > 15 and any(word.lower() in text.lower() for word in words) and kind in (None, type(error))
        if VERBOSE:
            print(f"        {type(error).__name__}: {text[:200]}")
        return verdict(name, good, f"{type(error).__name__}: {text[:300]!r} names none of {words}, or is no {kind}")
    verdict(name, False, "no exception")


# ---- Inputs -----------------------------------------------------------------------------------------------------------------


def normal(*shape, sigma=1.0):
    return torch.randn(shape, generator=generator) * sigma


def leaf(values, dtype=F32, layout="packed", grad=True):
    """A tensor on the device with these values, this type and this layout in memory."""
    values = values.to(D).to(dtype)
    if values.dim() and values.numel():
        if layout == "gaps":  # between rows, and rows that start on no multiple of 16 bytes
            room = torch.full((*values.shape[:-1], values.shape[-1] + 3), NAN, device=D).to(dtype)
            room[..., 1:-2] = values
            values = room[..., 1:-2]
        elif layout == "beside":  # packed, one element behind a multiple of 16 bytes
            values = torch.cat([values.new_full((1,), NAN), values.flatten()])[1:].view(values.shape)
        elif layout == "one more":  # a column between rows, as in logits[..., :-1]
            values = torch.cat([values, values.new_full((*values.shape[:-1], 1), NAN)], -1)[..., :-1]
        elif layout == "padded":  # as of a head whose classes are padded to a multiple of 8, or more
            values = F.pad(values, (0, 16 - values.shape[-1] % 8), value=NAN)[..., :values.shape[-1]]
        elif layout == "heads" and values.dim() > 1:  # one of three tensors that lie side by side
            values = torch.stack([values.new_full(values.shape, NAN), values, values.new_full(values.shape, NAN)], -2)[..., 1, :]
        elif layout == "second rows":
            room = torch.full((2 * values.shape[0], *values.shape[1:]), NAN, device=D).to(dtype)
            room[::2] = values
            values = room[::2]
        elif layout == "transposed":  # the last dimension is not contiguous
            values = values.transpose(0, -1).contiguous().transpose(0, -1)
        elif layout == "swapped":  # the last dimension is contiguous, the two before it are swapped
            values = values.transpose(-3, -2).contiguous().transpose(-3, -2) if values.dim() > 2 else values
        elif layout == "expanded":
            values = values[:1].expand(values.shape)
        elif layout == "last expanded":
            values = values[..., :1].expand(values.shape)
    return values.detach().requires_grad_(grad)


LAYOUTS = ("packed", "gaps", "second rows", "transposed", "swapped", "expanded", "last expanded", "beside", "one more", "padded",
           "heads")
APART = ("packed", "gaps", "beside", "one more", "padded", "heads")  # one stride between rows: read as they are
UPSTREAMS = ("packed", "gaps", "transposed", "expanded", "number")


def classes(high, *shape, dtype=torch.int64):
    return torch.randint(high, shape, generator=generator).to(dtype).to(D)


def upstream_of(out, kind):
    if out.dim() == 0:
        return torch.tensor(kind if isinstance(kind, float) else -0.7, device=D).to(out.dtype)
    if kind == "number":  # one number for all elements: every stride is 0
        return torch.tensor(0.6, device=D).to(out.dtype).expand(out.shape)
    return leaf(normal(*out.shape), out.dtype, kind, False)


def tuple_of(x):
    return tuple(x) if isinstance(x, (tuple, list)) else (x,)


def hold(name, *arguments, **more):
    attempt(name, lambda: hold_or_raise(name, *arguments, **more))


def hold_or_raise(name, ours, exact, inputs, bounds, upstream=None, outputs=None, twice=False, dtypes=None):
    """Outputs and gradients of ours(*inputs) against exact(*doubles) of the same numbers.

    bounds(doubles, exact outputs, upstreams, exact gradients) returns the errors of the outputs and of the gradients before
    they are rounded to their types. upstream: a layout, or a number for a loss of one number. outputs: which of the outputs
    have an upstream gradient; None: all that can. twice: a gradient is rounded once more, when upstream is multiplied into it.
    In f16 it must not be, since gradients for an upstream of 1 are too small for that type."""
    doubles = [t.detach().double().requires_grad_(t.requires_grad) for t in inputs]
    found, expected = tuple_of(ours(*inputs)), tuple_of(exact(*doubles))
    for i, (a, dtype) in enumerate(zip(found, dtypes or ())):
        if a.dtype != dtype:
            return verdict(name, False, f"output {i} is {a.dtype}, not {dtype}")
    if len(found) != len(expected):
        return verdict(name, False, f"{len(found)} outputs, not {len(expected)}")
    chosen = [i for i, t in enumerate(expected) if t.requires_grad and (outputs is None or i in outputs)]
    kind = upstream or rng.choice(UPSTREAMS)
    ups = [upstream_of(found[i], kind) if i in chosen else None for i in range(len(found))]
    wide = [None if u is None else u.double() for u in ups]
    leaves, roots = [t for t in inputs if t.requires_grad], [t for t in doubles if t.requires_grad]
    right = gradients = []
    if chosen:
        right = torch.autograd.grad([expected[i] for i in chosen], roots, [wide[i] for i in chosen], allow_unused=True)
        gradients = torch.autograd.grad([found[i] for i in chosen], leaves, [ups[i] for i in chosen], allow_unused=True)
    right = [torch.zeros_like(t) if g is None else g for t, g in zip(roots, right)]
    errors, gradient_errors = bounds([t.detach() for t in doubles], [t.detach() for t in expected], wide, right)
    results = [(f"out{i}", a, b, rounded(b, e, a.dtype)) for i, (a, b, e) in enumerate(zip(found, expected, errors))]
    for i, (t, a, b, e) in enumerate(zip(leaves, gradients, right, gradient_errors)):
        if a is None:  # a gradient that autograd leaves out is zero
            a = torch.zeros_like(t)
        if a.dtype != t.dtype:
            return verdict(name, False, f"gradient {i} is {a.dtype}, not {t.dtype}")
        results.append((f"grad{i}", a, b, rounded(b, e, t.dtype, 2 if twice and t.dtype != F16 else 1)))
    compare(f"{name}, upstream {kind}", *results)


def magnitude(d):
    """For a bound: what is not finite has no rounding error."""
    return torch.nan_to_num(d.abs(), nan=0.0, posinf=0.0)


# ---- logsumexp --------------------------------------------------------------------------------------------------------------


def logsumexp_bounds(dim, scale, keepdim, stored=None):
    def bounds(doubles, outs, ups, gradients):
        z = doubles[0] * scale
        dims = tuple(d % max(z.dim(), 1) for d in tuple_of(dim)) if z.dim() else ()
        n = math.prod(z.shape[d] for d in dims)
        if not z.numel():
            return [torch.zeros_like(outs[0])], [torch.zeros_like(z)]
        lse = outs[0] if keepdim or not z.dim() else functools.reduce(torch.unsqueeze, sorted(dims), outs[0])
        top = magnitude(z).amax(dims, keepdim=True) if z.dim() else magnitude(z)
        error = 8 * U * (top + math.log(max(n, 1)) + 1)
        # A gradient is made from an lse that is kept as a float, or, if it is the rounded output, from that.
        relative = (4 + magnitude(z - lse)) * 2 * U + error + 2 * U * magnitude(lse)
        return [error.view_as(outs[0])], [gradients[0].abs() * relative if gradients else None]
    return bounds


def logsumexp():
    shapes = [((6, 64), 1), ((6, 64), 0), ((3, 50, 7), 1), ((3, 5, 33), -1), ((2, 3, 4, 5), (1, 3)), ((2, 3, 4, 5), (2, 3)),
              ((4, 6, 5), (0, 1)), ((3, 4, 5), (-1, 0, 1)), ((1031,), 0), ((2, 3001), 1), ((1, 1), 0), ((), 0)]
    for t, (shape, dim) in itertools.product(TYPES, shapes):
        for dtype, keepdim in ((None, False), (F32, True)):
            scale, layout = rng.choice((1.0, 0.5, -2.0)), rng.choice(LAYOUTS)
            hold(f"{NAMES[t]} {shape} dim={dim} scale={scale} dtype={dtype} keepdim={keepdim} {layout}",
                 lambda x: LF.logsumexp(x, dim, keepdim, scale=scale, dtype=dtype),
                 lambda x: torch.logsumexp(x * scale, dim, keepdim), [leaf(normal(*shape, sigma=2.0), t, layout)],
                 logsumexp_bounds(dim, scale, keepdim), dtypes=[dtype or t])
    for layout, upstream in itertools.product(LAYOUTS, UPSTREAMS):
        hold(f"bf16 {layout}", lambda x: LF.logsumexp(x, -1), lambda x: torch.logsumexp(x, -1),
             [leaf(normal(4, 6, 40), BF16, layout)], logsumexp_bounds(-1, 1.0, False), upstream)
    for shape, dim in (((0, 5), 1), ((5, 0), 0), ((3, 0, 4), 0), ((5, 0), 1), ((2, 0, 3), 1)):
        hold(f"empty {shape} dim={dim}", lambda x: LF.logsumexp(x, dim), lambda x: torch.logsumexp(x, dim),
             [leaf(torch.zeros(shape))], logsumexp_bounds(dim, 1.0, False))
    x = normal(6, 33)
    x[0], x[1, ::2], x[2, 5], x[3, 7], x[4, 1] = -INF, -INF, INF, NAN, 1e4
    for t in TYPES:
        special = leaf(x, t)
        lse = LF.logsumexp(special, 1, dtype=F32)
        exact = torch.logsumexp(special.double(), 1)
        compare(f"{NAMES[t]} special values", ("lse", lse, exact, 8 * U * (1e4 + 5)))
        gradient, = torch.autograd.grad(lse[:2].sum(), special)  # a row of -inf: 0 by lk's manual, NaN in PyTorch
        right = torch.softmax(special.double(), 1)[:2].nan_to_num(0.0).detach()
        compare(f"{NAMES[t]} gradient of rows with -inf", ("dx", gradient[:2], right, rounded(right, right * 2**-18, t)))
    if CUDA:
        for shape, dim in (((4096, 1024), 1), ((300, 32768), 1), ((3, 5000, 257), 1), ((2, 151936), 1)):
            hold(f"bf16 {shape} dim={dim}", lambda x: LF.logsumexp(x, dim), lambda x: torch.logsumexp(x, dim),
                 [leaf(normal(*shape), BF16)], logsumexp_bounds(dim, 1.0, False))


# ---- kl ---------------------------------------------------------------------------------------------------------------------


def kl_exact(teacher, divergence, beta, scales, caps, weight, reduction):
    """The formula in the type of its argument, and for the bounds p, q, log p and log q."""
    def log_softmax(x, scale, cap):
        return (cap * torch.tanh(x * scale / cap) if cap else x * scale).log_softmax(-1)

    def divide(x, parts=False):
        lp, lq = log_softmax(x, scales[0], caps[0]), log_softmax(teacher.double(), scales[1], caps[1])
        lm = torch.logaddexp(lq + math.log(beta), lp + math.log1p(-beta))

        def of(a, b):
            return (a.exp() * torch.where(a == -INF, 0.0, a - b)).sum(-1)
        loss = {"forward": lambda: of(lq, lp), "reverse": lambda: of(lp, lq),
                "jensen_shannon": lambda: beta * of(lq, lm) + (1 - beta) * of(lp, lm),
                "total_variation": lambda: (lq.exp() - lp.exp()).abs().sum(-1) / 2}[divergence]()
        if parts:
            return lp, lq, loss
        loss = loss if weight is None else loss * weight.double()
        if reduction == "mean":
            return loss.mean() if weight is None else loss.sum() / weight.double().sum()
        return loss.sum() if reduction == "sum" else loss
    divide.divergence = divergence
    return divide


def kl_bounds(exact, weight, logit_error=0.0):
    """logit_error: of both heads' logits together."""
    def bounds(doubles, outs, ups, gradients):
        with torch.no_grad():
            lp, lq, loss = exact(doubles[0], True)
            p, q = lp.exp(), lq.exp()
            error = 2 * U * (8 + 4 * (lp.amax(-1, True) - lp.amin(-1, True)) + 4 * (lq.amax(-1, True) - lq.amin(-1, True))
                             + 4 * math.log(lp.shape[-1] + 1)) + logit_error
            off = (error * (p + q) * (1 + (lp - lq).abs())).sum(-1) + 32 * U * loss
            factor = ups[0] if ups[0] is not None else torch.zeros(())
            rows = factor if factor.dim() else factor * outs[0].new_ones(loss.shape)
            if weight is not None:
                off, rows = off * weight.double().abs(), rows * weight.double().abs()
            wide = (p + q) * (error * 2 * (1 + (lp - lq).abs()) + off.unsqueeze(-1))
            if exact.divergence == "total_variation":  # where p and q are closer than their errors, a column may count to either side
                either = p * ((p - q).abs() <= error * (p + q))
                wide = wide + either + p * either.sum(-1, True)
            wide = rows.abs().unsqueeze(-1) * wide
        return [off if outs[0].dim() else off.sum()], [wide + 8 * U * gradients[0].abs() if gradients else None]
    return bounds


def half_of(z):
    """Weights of rows, every second of which is 0."""
    return (torch.arange(z[..., 0].numel(), device=D) % 2 * 0.75).view(z.shape[:-1])


def kl_entropy(name, call, leaves, logits, scale, temperature, weighted, logit_error=0.0):
    """return_entropy=True: the student's entropy; loss and gradients keep their bits."""
    loss, entropy = call(*leaves, return_entropy=True)
    alone = call(*leaves)
    logp = (logits.detach() * scale / temperature).log_softmax(-1)
    terms = torch.where(logp == -INF, 0.0, logp.exp() * logp)
    wide = 2 * U * (8 + logp.clamp(min=-200).abs().amax(-1, True) * 4) + logit_error * scale / temperature
    bound = (wide * logp.exp() * (1 + logp.clamp(min=-200).abs())).sum(-1)
    exact = -terms.sum(-1)
    if weighted:
        exact, bound = (torch.where(half_of(logits) == 0, 0.0, v) for v in (exact, bound))
    compare(name, ("entropy", entropy, exact, bound + 1e-30))
    verdict(f"{name}: entropy has no gradient", not entropy.requires_grad and entropy.dtype == F32)
    pairs = zip(*([of, *torch.autograd.grad(of.sum(), leaves)] for of in (loss, alone)))
    verdict(f"{name}: the same loss and gradients with and without entropy", all(torch.equal(a, b) for a, b in pairs))
    with torch.no_grad():  # forward sums it in another pass than forward_backward
        compare(f"{name}: no_grad", ("entropy", call(*leaves, return_entropy=True)[1], exact, bound + 1e-30))


def kl():
    shapes = [(6, 64), (3, 5, 33), (2, 3001), (1, 1), (7,)]
    for t, shape, divergence in itertools.product(TYPES, shapes, ("forward", "reverse", "jensen_shannon", "total_variation")):
        beta, layout, reduction = rng.choice((0.5, 0.1)), rng.choice(LAYOUTS), rng.choice(("none", "mean", "sum"))
        scales, caps = rng.choice(((1.0, 1.0), (0.5, 2.0))), rng.choice(((0.0, 0.0), (5.0, 3.0)))
        weight = rng.choice((None, torch.rand(shape[:-1], generator=generator).to(D)))
        teacher = leaf(normal(*shape, sigma=2.0), t, rng.choice(LAYOUTS), False)
        exact = kl_exact(teacher, divergence, beta, scales, caps, weight, reduction)
        hold(f"{NAMES[t]} {shape} {divergence} {beta} {scales} {caps} {reduction} {layout} weighted={weight is not None}",
             lambda x: LF.kl(x, teacher, divergence=divergence, beta=beta, row_weight=weight, reduction=reduction,
                             logit_scale=scales[0], teacher_scale=scales[1], softcap=caps[0], teacher_softcap=caps[1]),
             exact, [leaf(normal(*shape, sigma=2.0), t, layout)], kl_bounds(exact, weight), dtypes=[F32])
    x, y = leaf(normal(4, 50)), leaf(normal(4, 50), grad=False)
    compare("beside F.kl_div", ("loss", LF.kl(x, y, reduction="sum"),
                                F.kl_div(x.log_softmax(-1), y.log_softmax(-1), reduction="sum", log_target=True), 1e-5),
            ("temperature", LF.kl(x, y, temperature=2.0, softcap=3.0, reduction="sum"),
             F.kl_div((3 * torch.tanh(x / 3) / 2).log_softmax(-1), (y / 2).log_softmax(-1), reduction="sum", log_target=True), 1e-5))
    near = x.detach() + 1e-4 * leaf(normal(4, 50), grad=False)
    exact = kl_exact(near, "forward", 0.5, (1.0, 1.0), (0.0, 0.0), None, "none")(x.detach().double())
    compare("digits where the two nearly agree", ("loss", LF.kl(x, near, reduction="none"), exact, 1e-2 * exact))
    compiled = torch.compile(lambda x: LF.kl(x, y).sum(), backend="aot_eager", fullgraph=True)
    compare("torch.compile", ("loss", compiled(x), LF.kl(x, y), 1e-6))
    raises("teacher with a gradient", lambda: LF.kl(x, x), "teacher", kind=ValueError)
    raises("another shape", lambda: LF.kl(x, y[:3]), "teacher", kind=ValueError)
    raises("another type", lambda: LF.kl(x, y.to(BF16)), "teacher", kind=TypeError)
    raises("beta above 1", lambda: LF.kl(x, y, divergence="jensen_shannon", beta=1.01), "beta", kind=ValueError)
    raises("no such divergence", lambda: LF.kl(x, y, divergence="jsd"), "divergence", kind=ValueError)
    raises("row_weight of another shape", lambda: LF.kl(x, y, row_weight=y[0]), "row_weight", kind=ValueError)
    raises("temperature 0", lambda: LF.kl(x, y, temperature=0.0), "temperature", kind=ValueError)
    raises("a second derivative", lambda: torch.autograd.grad(LF.kl(x, y), x, create_graph=True)[0].sum().backward(), "second")
    for t, divergence, reduction, weighted in itertools.product(TYPES, ("forward", "reverse", "jensen_shannon", "total_variation"), ("none", "mean"),
                                                                (False, True)):
        z, other = leaf(normal(2, 3, 70, sigma=2.0), t), leaf(normal(2, 3, 70, sigma=2.0), t, grad=False)
        z.data[1, 2, 60:] = -INF
        other[1, 2, 60:] = -INF
        kl_entropy(f"kl: {NAMES[t]} {divergence} {reduction} weighted={weighted}",
                   lambda z, **more: LF.kl(z, other, divergence=divergence, reduction=reduction, logit_scale=0.5, temperature=0.7,
                                           row_weight=half_of(z) if weighted else None, **more), [z], z.double(), 0.5, 0.7, weighted)


# ---- linear_kl --------------------------------------------------------------------------------------------------------------


def linear_kl_case(t, spread, sizes, divergence, reduction, biases=(False, False), weighted=False, wants=(True, True, True),
                   layout="packed", upstream=None, beta=0.5, scales=(1.0, 1.0), caps=(0.0, 0.0), chunks=1, **more):
    """sizes: hidden, teacher_hidden, vocab. Of chunks of tokens, each rounds a dweight of 16 bits. Bounds: kl's for logits that
    have errors, carried through the matmuls."""
    hidden, teacher_hidden, vocab = sizes
    inputs = [leaf(normal(*spread, hidden), t, layout, wants[0]),
              leaf(normal(vocab, hidden, sigma=2 * hidden**-0.5), t, "gaps" if layout == "gaps" else "packed", wants[1])]
    inputs += [leaf(normal(vocab), t, rng.choice(("packed", "second rows")), wants[2])] if biases[0] else []
    y, v = (leaf(normal(*shape, sigma=s), t, layout, False) for shape, s in (
        ((*spread, teacher_hidden), 1.0), ((vocab, teacher_hidden), 2 * teacher_hidden**-0.5)))
    c = leaf(normal(vocab), t, "packed", False) if biases[1] else None
    factors = leaf(normal(*spread).abs() + 0.25, F32, rng.choice(("packed", "second rows")), False) if weighted else None
    if weighted and spread:
        factors[torch.rand(spread, generator=generator).to(D) < 0.25] = 0
        factors[(0,) * len(spread)] = 0.5  # so that a mean has what it divides by
    by = {"mean": math.prod(spread) if factors is None else float(factors.double().sum())}.get(reduction, 1.0)
    flat = None if factors is None else factors.double().reshape(-1) / by
    of_teacher = F.linear(y.double(), v.double(), None if c is None else c.double()).reshape(-1, vocab)
    divide = kl_exact(of_teacher, divergence, beta, scales, caps, None, "none")

    def exact(x, w, b=None):
        each = divide(F.linear(x, w, b).reshape(-1, vocab)) * (1 / by if flat is None else flat)
        return each.sum() if reduction != "none" else each.reshape(spread)

    def ours(x, w, b=None):
        return LF.linear_kl(x, w, y, v, linear_bias=b, teacher_bias=c, divergence=divergence, reduction=reduction, beta=beta,
                            row_weight=factors, logit_scale=scales[0], teacher_scale=scales[1], softcap=caps[0],
                            teacher_softcap=caps[1], **more)

    def bounds(doubles, outs, ups, gradients):
        x, w = doubles[0].reshape(-1, hidden), doubles[1]
        logits = F.linear(*[x, w, *doubles[2:]])
        error = 0.0
        for a, k, b, z, scale in ((x, w, doubles[2:], logits, scales[0]),
                                  (y.double().reshape(-1, teacher_hidden), v.double(), [] if c is None else [c.double()],
                                   of_teacher, scales[1])):
            size = a.abs() @ k.abs().t() + sum(v.abs() for v in b)
            stored = HALF[t] * z.abs() if more.get("fast_logits") else 0.0
            error = error + scale * ((2 * a.shape[1] + 4) * U * size + stored).amax(1, True)
        up = None if ups[0] is None else ups[0].reshape(-1) if reduction == "none" else ups[0]
        weights = flat if flat is not None else None if by == 1 else torch.full((len(x),), 1 / by, dtype=torch.float64, device=D)
        logits.requires_grad_()
        loss = divide(logits) * (1.0 if weights is None else weights)
        g = torch.zeros_like(logits)
        if up is not None:
            g, = torch.autograd.grad(loss, logits, up.expand(loss.shape))
        each = [loss.detach() if reduction == "none" else loss.detach().sum()]
        (off,), (dz,) = kl_bounds(divide, weights, error)([logits.detach()], each, [up], [g])
        off = (off.reshape(outs[0].shape) if reduction == "none" else off) + 64 * U * outs[0].abs()
        if not gradients:
            return [off], []
        # dZ is rounded to T, in f16 as 2^-32 of the largest factor at least; a tail of columns is added in T.
        factor = float((up.abs() * (1.0 if weights is None else weights)).max()) * max(scales[0], 1)
        g, dz = g.abs(), scales[0] * dz + HALF[t] * g.abs() + (t == F16) * 2.0**-32 * factor
        dx = dz @ w.abs() + 2 * vocab * U * (g @ w.abs())
        dw = dz.t() @ x.abs() + (2 * len(x) * U + (chunks > 1) * chunks * HALF[t]) * (g.t() @ x.abs())
        db = dz.sum(0) + 2 * len(x) * U * g.sum(0)
        return [off], [e.view_as(d) for e, d, want in zip((dx, dw, db), doubles, wants) if want]
    hold(f"{NAMES[t]} {spread} {sizes} {divergence} {beta:g} {reduction} biases {biases} weighted {weighted} wants {wants} "
         f"{scales} {caps} {layout} {more}", ours, exact, inputs, bounds, upstream, dtypes=[F32], twice=reduction != "none")


def linear_kl():
    shapes = [((6,), (16, 16, 50)), ((3, 4), (24, 8, 101)), ((9,), (8, 40, 256)), ((), (16, 12, 30)), ((2, 2, 3), (32, 16, 64))]
    divergences, choices = ("forward", "reverse", "jensen_shannon", "total_variation"), list(itertools.product((False, True), repeat=2))
    for t, divergence, reduction, (spread, sizes) in itertools.product(TYPES, divergences, ("none", "mean", "sum"), shapes):
        linear_kl_case(t, spread, sizes, divergence, reduction, rng.choice(choices), rng.random() < 0.5,
                       layout=rng.choice(("packed", "gaps", "transposed")), beta=rng.choice((0.5, 0.1)),
                       scales=rng.choice(((1.0, 1.0), (0.5, 2.0))), caps=rng.choice(((0.0, 0.0), (5.0, 3.0), (4.0, 0.0))),
                       workspace_mib=rng.choice((1, 64, None)), fast_logits=rng.random() < 0.3)
    for wants in itertools.product((False, True), repeat=3):
        if any(wants):
            for reduction in ("none", "mean"):
                linear_kl_case(BF16, (6,), (16, 24, 40), "reverse", reduction, (True, True), wants=wants)
    for layout, upstream in itertools.product(LAYOUTS, UPSTREAMS):
        linear_kl_case(F32, (4, 3), (16, 8, 40), "forward", "none", layout=layout, upstream=upstream)
    for t, reduction in itertools.product(TYPES, ("none", "mean")):  # chunks of 64 tokens, beside one of all
        for mib in (1, None):
            linear_kl_case(t, (200,), (16, 24, 1500), "reverse", reduction, (True, False), True, workspace_mib=mib,
                           chunks=1 if mib is None or t == F32 else 4)
    for upstream in (65536.0, 1e-3, -2.5):
        for t in TYPES:
            linear_kl_case(t, (32,), (16, 8, 1000), "reverse", "mean", (True, False), True, upstream=upstream)
    x, w, y, v = leaf(normal(6, 16)), leaf(normal(20, 16)), leaf(normal(6, 8), grad=False), leaf(normal(20, 8), grad=False)
    b, ones = leaf(normal(20)), torch.ones(6, device=D)
    for options in (dict(temperature=2.0), dict(temperature=0.5, softcap=3.0, divergence="reverse"), dict(row_weight=ones * 0.3)):
        by_kl = LF.kl(F.linear(x, w, b), F.linear(y, v), **options)
        by_heads = LF.linear_kl(x, w, y, v, linear_bias=b, **options)
        close(f"beside kl of logits, {list(options)}", [by_heads, *torch.autograd.grad(by_heads, [x, w, b])],
              [by_kl, *torch.autograd.grad(by_kl, [x, w, b])], 256 * U)
    mask = ones.clone()
    mask[2:4] = 0
    ours = LF.linear_kl(x, w, y, v, row_weight=mask / mask.sum(), reduction="sum")
    part = LF.linear_kl(x[mask > 0], w, y[mask > 0], v)
    gradients = torch.autograd.grad(ours, [x, w])
    close("a mask over the number of its tokens is a mean", [ours, *gradients],
          [part, *torch.autograd.grad(part, [x, w])], 256 * U)
    verdict("a masked token's input has no gradient", bool((gradients[0][2:4] == 0).all()), f"{gradients[0][2:4]}")
    spoiled = [torch.where(mask[:, None] > 0, q.detach(), NAN) for q in (x, y)]  # the masked tokens' rows may be anything
    for t, most, reduction in itertools.product(TYPES, (4, 5, 6, 9), ("none", "mean")):
        a, aw, ay, av, ab = (leaf(q, t) for q in (x.detach(), w.detach(), y, v, b.detach()))
        c, cy = (leaf(q, t) for q in spoiled) if most < 6 else (a, ay)
        up = [normal(6).to(D)] if reduction == "none" else []
        right = LF.linear_kl(a, aw, ay.detach(), av.detach(), linear_bias=ab, row_weight=mask, reduction=reduction, return_entropy=True)
        found = LF.linear_kl(c, aw, cy.detach(), av.detach(), linear_bias=ab, row_weight=mask, reduction=reduction, return_entropy=True,
                             max_counted=most)
        close(f"{NAMES[t]} max_counted {most}, {reduction}", [*found, *torch.autograd.grad(found[0], [c, aw, ab], *up)],
              [*right, *torch.autograd.grad(right[0], [a, aw, ab], *up)], 256 * U if t == F32 else 4 * HALF[t])
    loss = LF.linear_kl(x, w, y, v, row_weight=mask, reduction="none", max_counted=3)
    found = [loss, *torch.autograd.grad(loss.sum(), [x, w])]
    verdict("more tokens than max_counted: NaN everywhere", all(bool(q.isnan().all()) for q in found))
    hidden = torch.full((20,), -INF, device=D)
    hidden[:12] = 0
    ours = LF.linear_kl(x, w, y, v, linear_bias=hidden, teacher_bias=hidden, divergence="reverse")
    close("a bias of -inf masks a class", ours, LF.linear_kl(x, w[:12], y, v[:12], divergence="reverse"))
    same = leaf(x.detach().clone(), grad=False)
    none, = torch.autograd.grad(LF.linear_kl(x, w, same, w.detach()), w)
    verdict("a student that is its teacher has no gradient", bool((none == 0).all()), f"{none.abs().max()}")
    for reduction, right in (("none", None), ("sum", 0.0), ("mean", NAN)):
        loss = LF.linear_kl(x[:0], w, y[:0], v, linear_bias=b, reduction=reduction)
        found = torch.autograd.grad(loss, [x, w, b], torch.ones_like(loss))
        right = torch.empty(0) if right is None else torch.tensor(right)
        compare(f"no tokens, {reduction}", ("loss", loss, right.to(D), 1e-30),
                *[(f"d{i}", g, torch.zeros_like(p), 1e-30) for i, (g, p) in enumerate(zip(found, (x, w, b)))])
    loss = LF.linear_kl(x, w, y, v, row_weight=0 * ones)
    compare("weights of 0 alone: a mean of nothing, as kl has it", ("loss", loss, torch.tensor(NAN, device=D), 1e-30),
            *[(f"d{i}", g, torch.zeros_like(g), 1e-30) for i, g in enumerate(torch.autograd.grad(loss, [x, w]))])
    for t in (F32, BF16):
        few, many = ([LF.linear_kl(*(q.to(t) for q in (x, w, y, v)), workspace_mib=m) for m in (1, 1024)])
        verdict(f"{NAMES[t]}: as much workspace as one chunk needs, and more", torch.equal(few, many), f"{few}, {many}")
    half = [leaf(q.detach(), F16, grad=q.requires_grad) for q in (x, w, y, v)]
    one, other = (torch.autograd.grad(LF.linear_kl(*half, row_weight=ones * 2.0**-k, reduction="sum"), half[:2],
                                      torch.tensor(2.0**k, device=D)) for k in (0, 20))
    verdict("f16: an upstream as loss scalers have it brings back small weights", all(map(torch.equal, one, other)))
    wide, fast = (LF.linear_kl(*(q.to(BF16) for q in (x, w, y, v)), fast_logits=f) for f in (False, True))
    verdict("fast_logits rounds the logits", not torch.equal(wide, fast), f"{wide}, {fast}")
    for reduction, wanted in (("none", [x, w, y, v, b]), ("sum", [x, w, b])):  # a sum keeps its gradients
        found = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
            loss = LF.linear_kl(x, w, y, v, linear_bias=b, reduction=reduction)
        shapes, right = (sorted(tuple(q.shape) for q in these if q.dim()) for these in (found, wanted))
        verdict(f"{reduction}: what the graph keeps", shapes == right, f"{shapes}, not {right}")
    too_much = [leaf(normal(64, 8), BF16), leaf(normal(20000, 8), BF16), leaf(normal(64, 8), BF16, grad=False),
                leaf(normal(20000, 8), BF16, grad=False)]
    raises("a workspace that is too small", lambda: LF.linear_kl(*too_much, workspace_mib=1), "workspace", kind=ValueError)
    raises("max_counted without row_weight", lambda: LF.linear_kl(x, w, y, v, max_counted=3), "row_weight", kind=ValueError)
    raises("max_counted below 0", lambda: LF.linear_kl(x, w, y, v, row_weight=ones, max_counted=-1), "max_counted", kind=ValueError)
    raises("a second derivative", lambda: torch.autograd.grad(LF.linear_kl(x, w, y, v, reduction="none").sum(), x,
                                                              create_graph=True)[0].sum().backward(), "second")
    for t, reduction, weighted in itertools.product(TYPES, ("none", "sum"), (False, True)):
        h, head, other, teacher = (leaf(normal(*shape), t) for shape in ((2, 3, 16), (40, 16), (2, 3, 8), (40, 8)))
        exact = F.linear(h.double(), head.double())
        kl_entropy(f"{NAMES[t]} {reduction} weighted={weighted}", lambda h, w, **more: LF.linear_kl(
            h, w, other.detach(), teacher.detach(), reduction=reduction, logit_scale=0.5, temperature=0.7,
            row_weight=half_of(h) if weighted else None, **more), [h, head], exact, 0.5, 0.7, weighted,
            32 * U * (h.double().abs() @ head.double().abs().t()))
    empty = LF.linear_kl(x[:0], w, y[:0], v, return_entropy=True)[1]
    verdict("entropy of no tokens", empty.shape == (0,) and empty.dtype == F32)
    if CUDA:
        for t, spread, sizes, mib in ((BF16, (512,), (512, 1024, 8192), 1024), (BF16, (300,), (256, 128, 50257), 64),
                                      (F16, (256,), (256, 256, 4096), 8), (F32, (128,), (256, 64, 1000), 1024)):
            linear_kl_case(t, spread, sizes, "reverse", "mean", workspace_mib=mib, chunks=8)


# ---- Norms ------------------------------------------------------------------------------------------------------------------


def norm_bounds(dims, eps, residual, weighted, sum_type=None, offset=0.0):
    """Of y, and with a residual of s. sum_type: s is rounded to it before backward reads it; rstd is that of the exact sum."""
    def bounds(doubles, outs, ups, gradients):
        x = doubles[0] + doubles[1] if residual else doubles[0]
        w = doubles[-1] + offset if weighted else 1.0
        axes = tuple(range(-dims, 0))
        errors = [16 * U * outs[0].abs()] + ([2 * U * outs[1].abs()] if residual else [])
        if not gradients:
            return errors, []
        rstd = torch.rsqrt(x.pow(2).mean(axes, keepdim=True) + eps)
        dy = torch.zeros_like(x) if ups[0] is None else ups[0]
        h, g = (x * rstd).abs(), (dy * w).abs()
        terms = rstd * (g + h * (g * h).mean(axes, keepdim=True))
        ds = ups[1].abs() if residual and ups[1] is not None else 0.0
        stale = 3 * HALF[sum_type] if sum_type else 0.0
        dx = 16 * U * (terms + ds) + stale * terms
        rows = tuple(range(x.dim() - dims))
        dw = (dy.abs() * h).sum(rows) if rows else dy.abs() * h
        rows = x.numel() // max(math.prod(x.shape[-dims:]), 1)
        dw = dw * ((16 + math.log2(max(rows, 1))) * 2 * U + stale)
        return errors, [dx] * (2 if residual else 1) + [dw] * weighted
    return bounds


def exact_norm(x, shape, weight=None, eps=1e-6):
    y = x * torch.rsqrt(x.pow(2).mean(tuple(range(-len(shape), 0)), keepdim=True) + eps)
    return y if weight is None else y * weight


def norms():
    eps = 2.0**-20  # a float, so that float64 has the same

    def nn_of(w, eps):
        norm = lk_torch.nn.AddRMSNorm(w.shape, eps, device=w.device, dtype=w.dtype, round_sum=True)
        norm.load_state_dict({"weight": w})
        return norm

    shapes = [((6, 64), 1), ((3, 7, 100), 1), ((2, 4, 3, 8), 2), ((2, 1023), 1), ((5, 1), 1), ((40,), 1), ((3, 4, 5), 3)]
    for t, (shape, dims) in itertools.product(TYPES, shapes):
        last = shape[-dims:]
        for weight_type in dict.fromkeys((None, t, F32)):
            layout = rng.choice(LAYOUTS)
            name = f"{NAMES[t]} {shape} {dims} dims, weight {NAMES.get(weight_type)} {layout}"
            x = leaf(normal(*shape, sigma=1.5), t, layout)
            w = [leaf(normal(*last), weight_type, rng.choice(("packed", "second rows")))] if weight_type else []
            hold("rms_norm " + name, lambda x, w=None: LF.rms_norm(x, last, w, eps),
                 lambda x, w=None: exact_norm(x, last, w, eps), [x, *w], norm_bounds(dims, eps, False, bool(w)), dtypes=[t])
            for residual_type in dict.fromkeys((t, F32)):
                r = leaf(normal(*shape), residual_type, rng.choice(LAYOUTS))
                both = lambda x, r, w=None: (exact_norm(x + r, last, w, eps), x + r)
                for outputs in ((0, 1), rng.choice(((0,), (1,)))):
                    hold(f"add_rms_norm {name}, residual {NAMES[residual_type]}, upstream of {outputs}",
                         lambda x, r, w=None: LF.add_rms_norm(x, r, last, w, eps), both, [x, r, *w],
                         norm_bounds(dims, eps, True, bool(w), residual_type), outputs=outputs, dtypes=[t, residual_type])
        hold(f"srms_norm {NAMES[t]} {shape}", lambda x: LF.srms_norm(x, eps), lambda x: exact_norm(x, shape[-1:], None, eps),
             [leaf(normal(*shape), t, rng.choice(LAYOUTS))], norm_bounds(1, eps, False, False), dtypes=[t])
    for layout, upstream in itertools.product(LAYOUTS, UPSTREAMS):
        hold(f"rms_norm bf16 {layout}", lambda x, w: LF.rms_norm(x, (40,), w, eps), lambda x, w: exact_norm(x, (40,), w, eps),
             [leaf(normal(4, 6, 40), BF16, layout), leaf(normal(40), BF16)], norm_bounds(1, eps, False, True), upstream)
    for t, weight_type, offset in itertools.product(TYPES, (None, F32), (1.0, -0.25)):
        x, r, w = leaf(normal(3, 6, 40), t), leaf(normal(3, 6, 40), t), leaf(normal(40), weight_type or t)
        name = f"{NAMES[t]}, weight {NAMES[weight_type or t]} + {offset}"
        hold("rms_norm " + name, lambda x, w: LF.rms_norm(x, (40,), w, eps, weight_offset=offset),
             lambda x, w: exact_norm(x, (40,), w + offset, eps), [x, w], norm_bounds(1, eps, False, True, None, offset))
        hold("add_rms_norm " + name, lambda x, r, w: LF.add_rms_norm(x, r, (40,), w, eps, weight_offset=offset),
             lambda x, r, w: (exact_norm(x + r, (40,), w + offset, eps), x + r), [x, r, w],
             norm_bounds(1, eps, True, True, t, offset))
    for t, residual_type in [(t, r) for t in TYPES for r in dict.fromkeys((t, F32))]:
        x, r, w = leaf(normal(3, 6, 64), t), leaf(normal(3, 6, 64), residual_type), leaf(normal(64), t)
        name = f"{NAMES[t]}, residual {NAMES[residual_type]}, round_sum"
        f = lambda x, r, w, **more: LF.add_rms_norm(x, r, (64,), w, eps, round_sum=True, **more)
        through = lambda s: s + (s.to(residual_type).to(s.dtype) - s).detach()
        hold("add_rms_norm " + name, f, lambda x, r, w: (exact_norm(through(x + r), (64,), w, eps), through(x + r)), [x, r, w],
             norm_bounds(1, eps, True, True, residual_type), dtypes=[t, residual_type])
        y, s = f(x, r, w)
        verdict(name + ": the sum has the bits of PyTorch's", torch.equal(s, x + r))
        verdict(name + ": nn", all(map(torch.equal, (y, s), nn_of(w, eps)(x, r))))
        if t == residual_type:
            again, eight = LF.rms_norm(s, (64,), w, eps), torch.float8_e4m3fn
            ours = f(x, r, w, out_dtype=eight)[0], LF.rms_norm(s, (64,), w, eps, out_dtype=eight)[0]
            verdict(name + ": the norm has the bits of rms_norm(s)", torch.equal(y, again))
            verdict(name + ": 8 bits too", torch.equal(*(q.detach().view(torch.uint8) for q in ours)))
        if t != F32 and t == residual_type:
            verdict(name + ": matters", not torch.equal(y, LF.add_rms_norm(x, r, (64,), w, eps)[0]))
    grouped = lambda x, n, w, b: exact_norm(x, x.shape[-n:], None, eps) * (1.0 if w is None else w) + b

    def bias_bounds(n, residual, weighted, sum_type=None):
        def bounds(doubles, outs, ups, gradients):
            b, doubles, dy = doubles[-1], doubles[:-1], ups[0]
            rows = tuple(range(outs[0].dim() - b.dim()))
            db = torch.zeros_like(b) if dy is None else dy.abs().sum(rows) * (16 + math.log2(max(dy.numel(), 1))) * 2 * U
            w = doubles[-1] if weighted else 1.0
            errors, every = norm_bounds(n, eps, residual, weighted, sum_type)(
                doubles, [outs[0] - b, *outs[1:]], ups, gradients[:-1])
            if weighted and w.dim() > n:  # norm_bounds sums dweight over all rows
                every[-1] = every[-1].expand(w.shape)
            return [errors[0] + 16 * U * b.abs(), *errors[1:]], [*every, db]
        return bounds
    for t, (shape, n, groups) in itertools.product(TYPES, (((6, 40), 1, 1), ((2, 3, 4, 33), 1, 4), ((4, 3, 2, 5), 2, 3))):
        affine = shape[-n:] if groups == 1 else (groups, *shape[-n:])
        for weight_type, weighted in itertools.product(dict.fromkeys((t, F32)), (False, True)):
            name = f"{NAMES[t]} {shape} {n} dims, groups {groups}, bias {NAMES[weight_type]}, weight {weighted}"
            x, r = leaf(normal(*shape), t, rng.choice(LAYOUTS)), leaf(normal(*shape), rng.choice((t, F32)))
            more = [leaf(normal(*affine), weight_type) for _ in range(2)]
            if weighted:
                hold("rms_norm " + name, lambda x, w, b: LF.rms_norm(x, shape[-n:], w, eps, bias=b, groups=groups),
                     lambda x, w, b: grouped(x, n, w, b), [x, *more], bias_bounds(n, False, True))
                hold("add_rms_norm " + name,
                     lambda x, r, w, b: LF.add_rms_norm(x, r, shape[-n:], w, eps, bias=b, groups=groups),
                     lambda x, r, w, b: (grouped(x + r, n, w, b), x + r), [x, r, *more], bias_bounds(n, True, True, r.dtype))
            else:
                hold("rms_norm " + name, lambda x, b: LF.rms_norm(x, shape[-n:], None, eps, bias=b, groups=groups),
                     lambda x, b: grouped(x, n, None, b), [x, more[1]], bias_bounds(n, False, False))
    x, w, b = leaf(normal(6, 40)), leaf(normal(40)), leaf(normal(40))
    for wants in ((w,), (b,), (x,), (x, b)):
        ours, theirs = (torch.autograd.grad(f(), wants, torch.ones(6, 40, device=D)) for f in (
            lambda: LF.rms_norm(x, 40, w, eps, bias=b), lambda: grouped(x, 1, w, b)))
        close(f"rms_norm with bias, {len(wants)} gradients wanted", ours, theirs, 1e-5)
    for wants in itertools.product((False, True), repeat=3):
        if any(wants):
            def bounds(doubles, outs, ups, gradients, wants=wants):
                errors, every = norm_bounds(1, eps, True, True, F32)(doubles, outs, ups, gradients)
                return errors, [e for e, want in zip(every, wants) if want]
            hold(f"add_rms_norm, gradients wanted {wants}", lambda x, r, w: LF.add_rms_norm(x, r, (40,), w, eps),
                 lambda x, r, w: (exact_norm(x + r, (40,), w, eps), x + r),
                 [leaf(normal(*shape), grad=want) for shape, want in zip(((4, 40), (4, 40), (40,)), wants)], bounds)
    for shape in ((0, 8), (3, 0, 8)):
        hold(f"rms_norm, empty {shape}", lambda x, w: LF.rms_norm(x, (8,), w, eps), lambda x, w: exact_norm(x, (8,), w, eps),
             [leaf(torch.zeros(shape)), leaf(normal(8))], lambda d, o, u, g: ([0.0], [torch.zeros_like(t) for t in g]))
    for t in TYPES:  # eps=None is the eps of F.rms_norm, at values so small that it decides
        x = leaf(normal(3, 32, sigma=2e-4), t)
        theirs = F.rms_norm(x, (32,))
        compare(f"eps=None, {NAMES[t]}", ("y", LF.rms_norm(x, (32,)), theirs, rounded(theirs, 32 * U * theirs.abs(), t, 2)))
    x = leaf(normal(3, 8))
    exact = exact_norm(x.double(), (8,), None, eps)
    compare("normalized_shape may be a list, or a number", ("list", LF.rms_norm(x, [8], None, eps), exact, 1e-5),
            ("int", LF.rms_norm(x, 8, None, eps), exact, 1e-5),
            ("numpy", LF.add_rms_norm(x, 0 * x, numpy.int64(8), None, eps)[0], exact, 1e-5))
    if CUDA:
        for shape in ((4096, 1024), (300, 8192), (8, 131072)):
            hold(f"add_rms_norm bf16 {shape}", lambda x, r, w: LF.add_rms_norm(x, r, shape[-1:], w, eps),
                 lambda x, r, w: (exact_norm(x + r, shape[-1:], w, eps), x + r),
                 [leaf(normal(*shape), BF16), leaf(normal(*shape)), leaf(normal(shape[-1]), BF16)],
                 norm_bounds(1, eps, True, True, F32))


def gated_norms():
    def exact(x, gate, w, first, offset=0.0):
        scale = 1.0 if w is None else offset + w
        s = x * F.silu(gate) if first else x
        y = s * torch.rsqrt(s.square().mean(-1, keepdim=True) + 2.0**-20) * scale
        return y if first else y * F.silu(gate)
    for t, first, (shape, groups) in itertools.product(TYPES, (False, True), (((6, 64), 1), ((3, 5, 33), 1), ((2, 3, 4, 128), 4), ((40,), 1))):
        for weight_type in dict.fromkeys((None, t, F32)):
            x, gate = (leaf(normal(*shape, sigma=1.5), t, rng.choice(LAYOUTS)) for _ in range(2))
            affine, offset = shape[-1:] if groups == 1 else (groups, shape[-1]), rng.choice((0.0, 1.0))
            w = None if weight_type is None else leaf(normal(*affine), weight_type)
            leaves, name = [v for v in (x, gate, w) if v is not None], f"{NAMES[t]} {shape} first={first} weight {NAMES.get(weight_type)}"
            y = LF.rms_norm(x, shape[-1:], w, 2.0**-20, weight_offset=offset if w is not None else 0.0, groups=groups, gate=gate, gate_first=first)
            doubles = [v.detach().double().requires_grad_() for v in leaves]
            right = exact(*doubles, *([None] if w is None else []), first, offset)
            up = normal(*shape).to(t)
            close(f"gate, {name}", [y, *torch.autograd.grad(y, leaves, up)], [right, *torch.autograd.grad(right, doubles, up.double())],
                  3 * HALF[t] + 64 * U)
            verdict(f"gate, {name}: the type is input's", y.dtype == t)
            with torch.no_grad():
                verdict(f"gate, {name}: no_grad", torch.equal(y, LF.rms_norm(
                    x, shape[-1:], w, 2.0**-20, weight_offset=offset if w is not None else 0.0, groups=groups, gate=gate, gate_first=first)))
    x, gate, w = leaf(normal(6, 40)), leaf(normal(6, 40)), leaf(normal(40))
    for wants in ([x], [gate], [w], [gate, w]):
        frozen = [v if any(v is u for u in wants) else v.detach() for v in (x, gate, w)]
        ours = torch.autograd.grad(LF.rms_norm(frozen[0], 40, frozen[2], 2.0**-20, gate=frozen[1]).sum(), wants)
        close(f"gate, {len(wants)} gradients wanted", ours, torch.autograd.grad(exact(*frozen, False).sum(), wants), 1e-5)
    module = lk_torch.GatedRMSNorm(40, eps=2.0**-20, device=D, gate_first=True)
    close("GatedRMSNorm", module(x, gate), exact(x.double(), gate.double(), None, True), 1e-6)
    verdict("GatedRMSNorm's repr", "gate_first=True" in repr(module) and list(module.state_dict()) == ["weight"])
    many = leaf(normal(2, 3, 4, 5)), leaf(normal(2, 3, 4, 5))
    close("gate, two dimensions", LF.rms_norm(many[0], (4, 5), None, 2.0**-20, gate=many[1]),
          exact(*(v.double().flatten(-2) for v in many), None, False).view(2, 3, 4, 5), 1e-6)
    for shape in ((0, 8), (3, 0, 8)):
        x0, g0, w0 = leaf(torch.zeros(shape)), leaf(torch.zeros(shape)), leaf(normal(8))
        found = torch.autograd.grad(LF.rms_norm(x0, 8, w0, gate=g0).sum(), [x0, g0, w0])
        verdict(f"gate, empty {shape}", found[0].shape == shape and float(found[2].abs().sum()) == 0)
    for says, kind, f in (("gate", ValueError, lambda: LF.rms_norm(x, 40, gate=gate[:3])), ("gate", TypeError, lambda: LF.rms_norm(x, 40, gate=gate.to(BF16))),
                          ("bias", ValueError, lambda: LF.rms_norm(x, 40, w, bias=w, gate=gate)),
                          ("out_dtype", ValueError, lambda: LF.rms_norm(x, 40, gate=gate, out_dtype=torch.float8_e4m3fn)),
                          ("gate_first", ValueError, lambda: LF.rms_norm(x, 40, gate_first=True)),
                          ("normalized_shape", ValueError, lambda: LF.rms_norm(x, 41, gate=gate)),
                          ("gate", TypeError, lambda: LF.rms_norm(x, 40, gate=1.0))):
        raises(f"gate: {says}", f, says, kind=kind)
    raises("gate: a second derivative", lambda: torch.autograd.grad(LF.rms_norm(x, 40, gate=gate), x, torch.ones_like(x), create_graph=True)[0].sum().backward(), "second")


# ---- glu --------------------------------------------------------------------------------------------------------------------

def normal_share(g):
    """Phi(g). F.gelu and torch.special.ndtr have 1 + erf, which is 0 at -12, in float64 too."""
    return torch.erfc(-g * math.sqrt(0.5)) / 2


GATED = {"silu": lambda g, alpha: g * torch.sigmoid(alpha * g),
         "gelu": lambda g, _: g * normal_share(g),
         "gelu_tanh": lambda g, _: F.gelu(g, approximate="tanh"), "relu": lambda g, _: F.relu(g),
         "sigmoid": lambda g, _: torch.sigmoid(g)}


def gate_and_up(gate, up, interleaved):
    """Of the arguments gate and up."""
    if up is not None:
        return gate, up
    return (gate[..., ::2], gate[..., 1::2]) if interleaved else gate.chunk(2, -1)


def exact_glu(gate, up=None, activation="silu", *, alpha=1.0, limit=None, up_offset=0.0, row_weight=None, interleaved=False):
    g, v = gate_and_up(gate, up, interleaved)
    if limit is not None:
        # At the limit itself clamp's gradient is 1 or 0, by the version of PyTorch.
        g = torch.where(g <= limit, g, g.detach().clamp(max=limit))
        v = torch.where(v.abs() <= limit, v, v.detach().clamp(-limit, limit))
    y = GATED[activation](g, alpha) * (v + up_offset)
    return y if row_weight is None else y * row_weight.unsqueeze(-1)


def glu_bounds(activation="silu", alpha=1.0, limit=None, up_offset=0.0, interleaved=False, weighted=False, wants=(True,) * 3):
    """lk/glu.md: act has a relative error of (3 |z| + 10) 2^-23, and act' that share of the size of its terms. The products and
    the sum with up_offset round 8 times at most."""
    def bounds(doubles, outs, ups, gradients):
        tensors, r = (doubles[:-1], doubles[-1].unsqueeze(-1).abs()) if weighted else (doubles, 1.0)
        gate, up = gate_and_up(*tensors, *(None,) * (2 - len(tensors)), interleaved)
        g, v = (gate, up) if limit is None else (gate.clamp(max=limit), up.clamp(-limit, limit))
        low, inside = (torch.ones_like(g), torch.ones_like(g)) if limit is None else (gate <= limit, up.abs() <= limit)
        v, act = (v + up_offset).abs(), magnitude(GATED[activation](g, alpha))
        near, root = g.clamp(-16, 16), 2 * math.sqrt(2 / math.pi)
        z = {"silu": alpha * g, "gelu": g * g, "gelu_tanh": root * (near + 0.044715 * near**3)}.get(activation, g)
        s = normal_share(g) if activation == "gelu" else torch.sigmoid(z)
        second = {"silu": lambda: z.abs() * s * (1 - s),
                  "gelu": lambda: g.abs() * torch.exp(-g * g / 2) / math.sqrt(2 * math.pi),
                  "gelu_tanh": lambda: (near * root * (1 + 3 * 0.044715 * near * near)).abs() * s * (1 - s),
                  "relu": lambda: 1 - s, "sigmoid": lambda: s * (1 - s) - s}[activation]()  # both terms together: s (1 - s)
        relative = 8 * U if activation == "relu" else (3 * magnitude(z) + 10) * 2 * U + 8 * U
        errors = [magnitude(outs[0]) * relative + LEAST[F32] * magnitude(v)]
        if not gradients:
            return errors, []
        dy, least = ups[0].abs(), LEAST[F32]
        dgate = r * dy * v * (magnitude(s + second) * relative + least) * low
        dup = r * dy * (act * relative + least) * inside
        dr = (dy * act * v * relative).sum(-1) + (dy * act * v).sum(-1) * (16 + math.log2(max(g.shape[-1], 1))) * 2 * U
        if len(tensors) == 2:
            every = [dgate, dup]
        else:
            every = [torch.stack([dgate, dup], -1).flatten(-2) if interleaved else torch.cat([dgate, dup], -1)]
        return errors, [e for e, want in zip(every + [dr] * weighted, wants) if want]
    return bounds


def glu_case(t, shape, how, activation, options, weight_type=None, layouts=("packed",) * 2, wants=(True,) * 3, upstream=None):
    """how: gate and up are apart, or both are in one tensor: as halves, in turns, or as the two of chunk."""
    n, options = shape[-1], {k: v for k, v in options.items() if k != "alpha" or activation == "silu"}
    names = ("gate", "up") if how == "apart" else ("gate",)
    sizes = shape if how == "apart" else (*shape[:-1], 2 * n)
    inputs = [leaf(normal(*sizes, sigma=1.5), t, layout, want) for _, layout, want in zip(names, layouts, wants)]
    weighted = weight_type is not None
    if weighted:
        inputs.append(leaf(normal(*shape[:-1]), weight_type, rng.choice(("packed", "second rows")), wants[len(names)]))
    turns = how == "turns"

    def call(f):
        def of(*tensors):
            more = dict(options, row_weight=tensors[-1]) if weighted else options
            gate, up = (*tensors[:len(names)], None)[:2]
            if how == "chunk":
                gate, up = gate.chunk(2, -1)
            return f(gate, up, activation, interleaved=turns, **more)
        return of
    bounds = glu_bounds(activation, **options, interleaved=turns, weighted=weighted, wants=wants)
    hold(f"{NAMES[t]} {shape} {how} {activation} {options} row_weight {NAMES.get(weight_type)} {layouts} wants {wants}",
         call(LF.glu), call(exact_glu), inputs, bounds, upstream, dtypes=[t])


def glu():
    ways = ("apart", "halves", "turns", "chunk")
    shapes = [(6, 64), (3, 7, 100), (2, 1023), (5, 1), (40,), (2, 3, 4, 33)]
    for t, shape, how, activation in itertools.product(TYPES, shapes, ways, GATED):
        options = dict(alpha=rng.choice((1.0, 1.702, -0.5)), limit=rng.choice((None, 0.75, 7.0)),
                       up_offset=rng.choice((0.0, 1.0, -0.5)))
        some = [w for w in itertools.product((False, True), repeat=3) if any(w[:1 + (how == "apart")])]
        wants = rng.choice([(True,) * 3] * 3 + some)
        glu_case(t, shape, how, activation, options, rng.choice((None, None, F32, t, torch.float64)),
                 (rng.choice(LAYOUTS), rng.choice(LAYOUTS)), wants)
    for layout, upstream, how in itertools.product(LAYOUTS, UPSTREAMS, ways):
        glu_case(BF16, (4, 6, 40), how, rng.choice(list(GATED)), {}, rng.choice((None, F32)),
                 (layout, rng.choice(("packed", layout))), upstream=upstream)
    for t in TYPES:  # row_weight alone learns
        glu_case(t, (5, 40), "apart", "silu", {}, F32, wants=(False, False, True))
        glu_case(t, (5, 40), "halves", "gelu", {}, BF16, wants=(False, True))
    for shape, how in itertools.product(((0, 8), (3, 0, 8), (3, 0)), ways):
        glu_case(F32, shape, how, "silu", {}, F32)
        glu_case(BF16, shape, how, "gelu", dict(limit=7.0))
    attempt("special values", glu_special_values)
    attempt("what is kept", glu_kept)
    x, n = leaf(normal(6, 24)), 12
    close("F.glu", out_and_gradients(lambda x: LF.glu(x[..., n:], x[..., :n], "sigmoid"), [x]), out_and_gradients(F.glu, [x]))
    gpt_oss = dict(alpha=1.702, limit=7.0, up_offset=1.0, interleaved=True)

    def reference(x):  # as transformers has it
        gate, up = x[..., ::2].clamp(max=7.0), x[..., 1::2].clamp(min=-7.0, max=7.0)
        return (up + 1) * (gate * torch.sigmoid(gate * 1.702))
    x = leaf(normal(6, 24, sigma=5.0))
    close("gpt-oss", out_and_gradients(lambda x: LF.glu(x, **gpt_oss), [x]), out_and_gradients(reference, [x]))
    module = lk_torch.nn.GLU(**gpt_oss)
    verdict("the module has the bits of the function", torch.equal(module(x), LF.glu(x, **gpt_oss)))
    verdict("its repr", repr(module) == "GLU('silu', alpha=1.702, limit=7.0, up_offset=1.0, interleaved=True)", repr(module))
    u, mask = leaf(normal(6, 24)), torch.arange(6, device=D) % 2 == 0
    compare("one tensor as both", ("y", LF.glu(x, x), exact_glu(x.double(), x.double()), 1e-4))
    close("a mask", out_and_gradients(lambda x, u: LF.glu(x, u, row_weight=mask), [x, u]),
          out_and_gradients(lambda x, u: exact_glu(x, u, row_weight=mask.float()), [x, u]))
    verdict("alpha=1 of another activation", torch.equal(LF.glu(x, u, "relu", alpha=1), LF.glu(x, u, "relu")))
    verdict("an infinite limit", torch.equal(LF.glu(x, u, limit=INF), LF.glu(x, u)))
    same = [out_and_gradients(f, [x, u]) for f in (
        lambda x, u: LF.glu(x, u), lambda x, u: LF.glu(*torch.cat([x, u], 1).chunk(2, 1)),
        lambda x, u: LF.glu(torch.cat([x, u], 1)), lambda x, u: LF.glu(torch.stack([x, u], -1).flatten(-2), interleaved=True))]
    verdict("the same bits, wherever both lie", all(torch.equal(a, b) for other in same[1:] for a, b in zip(same[0], other)))
    if CUDA:
        for shape in ((4096, 14336), (300, 8192), (8, 131072)):
            glu_case(BF16, shape, rng.choice(ways), "silu", {}, F32)


def glu_special_values():
    row = torch.tensor([-INF, INF, NAN, 1e4, -1e4, 300.0, -300.0, 0.0, -0.0, 88.0, -88.0, 30.0, -30.0, -5.0, 12.0, -12.0])
    values = torch.stack([row, row.roll(5), torch.full((16,), -0.5), row])
    up = torch.stack([torch.linspace(-2, 2, 16), torch.full((16,), 0.75), row, row.roll(3)])
    for t, activation, limit in itertools.product(TYPES, GATED, (None, 7.0)):
        g, v = leaf(values, t), leaf(up, t)
        f = lambda f, g, v: f(g, v, activation, limit=limit)
        y, exact = f(LF.glu, g, v), f(exact_glu, *(d := [a.detach().double().requires_grad_() for a in (g, v)]))
        name = f"special values, {NAMES[t]} {activation} limit {limit}"
        right = exact.detach().to(t).double()
        compare(name, ("y", y, right, rounded(right, 400 * 2 * U * magnitude(right), t, 2)))
        ours, theirs = torch.autograd.grad(y, [g, v], torch.ones_like(y)), torch.autograd.grad(exact, d, torch.ones_like(exact))
        (dgate, dup), (right_gate, right_up) = ours, (a.to(t).double() for a in theirs)
        gate, size = d[0].detach(), d[1].detach()
        # Of an infinite gate: see below. Where the slope is 0, an infinite up gives NaN, and PyTorch's relu and clamp give 0.
        plain = gate.isfinite() & size.isfinite() if limit is None else ~size.isnan() & (gate != -INF)
        size, most = magnitude(size if limit is None else size.clamp(-limit, limit)), magnitude(GATED[activation](gate, 1.0))
        dgate, right_gate, size = dgate[plain], right_gate[plain], 1200 * 2 * U * size[plain]
        compare(f"{name}: gradients", ("dgate", dgate, right_gate, rounded(right_gate, size, t, 2)),
                ("dup", dup, right_up, rounded(right_up, 400 * 2 * U * most, t, 2)))
    g, v = leaf(torch.tensor([[-INF, INF, NAN]])), leaf(torch.tensor([[2.0, 3.0, 4.0]]))
    found, = torch.autograd.grad(LF.glu(g, v, "gelu_tanh").sum(), g)
    right = found[0, :2].tolist() == [0.0, 3.0] and bool(found[0, 2].isnan())
    verdict("gelu_tanh of an infinite gate has a slope of 0 or 1", right, str(found))


def glu_kept():
    """Backward's tensors are gate and up themselves. A gate that has both gets one gradient."""
    g, u, both = leaf(normal(4, 24), BF16), leaf(normal(4, 24), BF16), leaf(normal(4, 48), BF16)
    r = leaf(normal(4))
    halves = both.chunk(2, -1)
    for name, f, own in (("apart", lambda: LF.glu(g, u), (g, u)), ("both", lambda: LF.glu(both), (both,)),
                         ("with row_weight", lambda: LF.glu(g, u, row_weight=r), (g, u, r)),
                         ("in turns", lambda: LF.glu(both, interleaved=True), (both,)),
                         ("chunk", lambda: LF.glu(*halves), halves)):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            f()
        lie = lambda tensors: sorted((t.data_ptr(), t.stride()) for t in tensors)
        verdict(f"kept, {name}: its own tensors", lie(saved) == lie(own), f"{lie(saved)}, not {lie(own)}")


# ---- rope -------------------------------------------------------------------------------------------------------------------

def rope_angles(tokens, pairs, inv_freq=None, position=None, cos=None, sin=None, offset=0, scale=1.0, pair_axis=None,
                interleaved=False):
    """C and S of [batch or 1, tokens, pairs] in float64."""
    if inv_freq is None:
        def table(t):
            t = t.detach().double()
            t = t if t.dim() == 3 else t.unsqueeze(0)
            return scale * (t if t.shape[-1] == pairs else t[..., ::2] if interleaved else t[..., :pairs])
        return table(cos), table(sin)
    if position is None:
        position = torch.arange(offset, offset + tokens, device=D)
    if position.dim() == 3:
        axis = torch.zeros(pairs, dtype=torch.int64, device=D) if pair_axis is None else pair_axis.long()
        at = position[axis].permute(1, 2, 0)
    else:
        at = (position if position.dim() == 2 else position.unsqueeze(0)).unsqueeze(-1)
    phi = at.double() * inv_freq.double()
    return scale * phi.cos(), scale * phi.sin()


def rope_turn(x, c, s, interleaved, heads_first):
    """(a C - b S, b C + a S) of the pairs, and features without one as they are."""
    c, s = (t.unsqueeze(-3 if heads_first else -2) for t in (c, s))
    if x.dim() == 3:
        c, s = c.squeeze(0), s.squeeze(0)
    n = 2 * c.shape[-1]
    a, b = (x[..., 0:n:2], x[..., 1:n:2]) if interleaved else (x[..., :n // 2], x[..., n // 2:n])
    pair = (a * c - b * s, b * c + a * s)
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([turned, x[..., n:]], -1)


def rope_norm(x, weight, eps, weight_offset):
    return x if weight is None else x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * (weight_offset + weight)


def rope_parts(q, rotary_dim=None, interleaved=False, heads_first=False, eps=1e-6, weight_offset=0.0, **angles):
    """C and S, and what rope_turn and rope_norm take of the options."""
    tokens, pairs = q.shape[-2 if heads_first else -3], (rotary_dim or q.shape[-1]) // 2
    return rope_angles(tokens, pairs, interleaved=interleaved, **angles), (interleaved, heads_first), (eps, weight_offset)


def exact_rope(q, k=None, q_weight=None, k_weight=None, **options):
    angles, how, numbers = rope_parts(q, **options)
    y = rope_turn(rope_norm(q, q_weight, *numbers), *angles, *how)
    return y if k is None else (y, rope_turn(rope_norm(k, k_weight, *numbers), *angles, *how))


def rope_bounds(names, options, wants):
    """lk/rope.md. names: of the inputs, among them q_weight and k_weight. A backward without a norm is a forward."""
    def bounds(doubles, outs, ups, gradients):
        given = dict(zip(names, doubles))
        (c, s), how, (eps, offset) = rope_parts(given["q"], **options)
        size = (c.abs(), -s.abs())  # the turn of magnitudes: |a C| + |b S| in both
        by_table, scale = "cos" in options, abs(options.get("scale", 1.0))
        share = 5 * U if by_table else 8e-7
        full = tuple(v if by_table else scale * torch.sign(v + 0.5 * (1 - 2 * i) * (v == 0)) for i, v in enumerate(size))

        def turned(x, by):
            interleaved = how[0]
            a = rope_turn(x.abs(), by[0], by[1], *how)
            b = rope_turn(x.abs(), by[0], -by[1], *how)
            return torch.maximum(a.abs(), b.abs())

        def errors_of(x):  # of a turn
            e = share * turned(x, full)
            e[..., 2 * c.shape[-1]:] = 0
            return e
        out_errors, gradient_errors = [], {}
        for i, name in enumerate(n for n in ("q", "k") if n in given):
            z, w = given[name], given.get(f"{name}_weight")
            x = rope_norm(z, w, eps, offset)
            out_errors.append(errors_of(x) + (0 if w is None else 16 * U * turned(x, size)))
            if ups[i] is None:
                gradient_errors |= {name: torch.zeros_like(z), f"{name}_weight": w if w is None else torch.zeros_like(w)}
                continue
            e, g = errors_of(ups[i]), turned(ups[i], size)
            if w is None:
                gradient_errors[name] = e
                continue
            rstd = (z.square().mean(-1, keepdim=True) + eps).rsqrt()
            k = (offset + w).abs()
            mean = lambda t: (t * z.abs()).mean(-1, keepdim=True) * z.abs() * rstd**2
            gradient_errors[name] = rstd * (k * e + mean(k * e) + 48 * U * (k * g + mean(k * g)))
            rows = tuple(range(z.dim() - 1))
            gradient_errors[f"{name}_weight"] = ((e + (48 + z[..., 0].numel()) * U * g) * z.abs() * rstd).sum(rows)
        return out_errors, [gradient_errors[n] for n, want in zip(names, wants) if want]
    return bounds


def rope_tables(kind, shape, pairs, t, interleaved):
    """The angles of a call. Of a table of rotary columns the second number of two is NaN: it is not read."""
    batch, tokens = shape
    inv_freq = (10000.0 ** -(torch.arange(pairs) / max(pairs, 1))).to(D)
    integers = lambda *n: torch.randint(-50, 5000, n, generator=generator).to(D, rng.choice((torch.int64, torch.int32)))
    if kind == "offset":
        inv_freq = leaf(inv_freq, F32, rng.choice(("packed", "second rows")), False)
        return dict(inv_freq=inv_freq, offset=rng.choice((0, 7, -3, 100000)))
    if kind == "position":
        return dict(inv_freq=inv_freq, position=rng.choice((integers(tokens), integers(1, tokens), integers(batch, tokens))))
    if kind == "axes":
        axes = rng.choice((1, 2, 3))
        axis = torch.randint(axes, (pairs,), generator=generator).to(D, torch.int32)
        return dict(inv_freq=inv_freq, position=integers(axes, rng.choice((1, batch)), tokens),
                    pair_axis=axis if axes > 1 else rng.choice((None, axis)))
    lead = rng.choice(((), (1,), (batch,)))
    cos, sin = ((torch.rand(*lead, tokens, pairs, generator=generator) * 2 - 1).to(D, rng.choice((t, F32))) for _ in range(2))
    sin, layout = sin.to(cos.dtype), rng.choice(("packed", "gaps", "beside", "second rows", "transposed", "expanded"))
    if rng.random() < 0.5:
        twice = lambda v: (torch.stack if interleaved else torch.cat)((v, torch.full_like(v, NAN)), -1)
        cos, sin = (twice(v).flatten(-2) if interleaved else twice(v) for v in (cos, sin))
    return dict(cos=leaf(cos, cos.dtype, layout, False), sin=leaf(sin, sin.dtype, rng.choice((layout, "packed")), False))


def rope_case(t, shape, kv_heads, kind, heads_first=False, interleaved=False, rotary_dim=None, norms=(None, None),
              layouts=("packed",) * 2, wants=(True,) * 4, upstream=None, outputs=None, **more):
    """shape: batch, tokens, heads, dim; a batch of None is left out. norms: the types of both weights."""
    lead, (tokens, heads, dim) = shape[:1] if shape[0] is not None else (), shape[1:]
    sizes = lambda n: (*lead, n, tokens, dim) if heads_first else (*lead, tokens, n, dim)
    options = dict(rope_tables(kind, (lead[0] if lead else 1, tokens), (rotary_dim or dim) // 2, t, interleaved),
                   interleaved=interleaved, heads_first=heads_first, rotary_dim=rotary_dim, **more)
    there = {"q": True, "k": kv_heads is not None, "q_weight": norms[0] is not None, "k_weight": norms[1] is not None}
    names = [name for name in there if there[name]]
    wanted = [want for name, want in zip(there, wants) if there[name]]
    wanted = wanted if any(wanted) else [True] * len(names)
    make = {"q": lambda want: leaf(normal(*sizes(heads)), t, layouts[0], want),
            "k": lambda want: leaf(normal(*sizes(kv_heads)), t, layouts[1], want),
            "q_weight": lambda want: leaf(normal(dim), norms[0], rng.choice(("packed", "second rows", "beside")), want),
            "k_weight": lambda want: leaf(normal(dim), norms[1], "packed", want)}
    inputs = [make[name](want) for name, want in zip(names, wanted)]
    of = lambda f: lambda *tensors: f(**dict(zip(names, tensors)), **options)
    said = {k: (v.dtype, tuple(v.shape)) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    hold(f"{NAMES[t]} {shape} kv {kv_heads} {said} norms {[NAMES.get(n) for n in norms]} {layouts} wants {wanted} of {outputs}",
         of(LF.rope), of(exact_rope), inputs, rope_bounds(names, options, wanted), upstream, outputs,
         dtypes=[t] * (1 + there["k"]))


def rope():
    shapes = [((2, 5, 4, 64), 2), ((1, 7, 3, 32), 3), ((3, 4, 1, 40), None), ((None, 6, 5, 16), 1), ((2, 1, 2, 10), 2)]
    kinds = ("offset", "position", "axes", "tables")
    for t, (shape, kv), kind, heads_first, interleaved in itertools.product(TYPES, shapes, kinds, (False, True), (False, True)):
        dim, both = shape[-1], rng.choice((t, F32))
        norms = rng.choice(((None, None), (both, both), (both, None), (None, both)))
        norms = norms if kv else (norms[0], None)
        wants = rng.choice([(True,) * 4] * 2 + [tuple(rng.random() < 0.5 for _ in range(4))])
        outputs = rng.choice((None, None, {0}, {1})) if kv and all(wants) else None  # only one has an upstream gradient
        rope_case(t, shape, kv, kind, heads_first, interleaved, rng.choice((None, None, dim // 4 * 2, 2)), norms,
                  (rng.choice(LAYOUTS), rng.choice(LAYOUTS)), wants, None, outputs, scale=rng.choice((1.0, 1.25, -0.5)),
                  weight_offset=rng.choice((0.0, 1.0)), eps=rng.choice((1e-6, 1e-2)))
    for layout, upstream, norm in itertools.product(LAYOUTS, UPSTREAMS, (None, F32)):
        rope_case(BF16, (2, 6, 4, 32), 2, rng.choice(kinds), rng.random() < 0.5, norms=(norm, norm),
                  layouts=(layout, rng.choice(LAYOUTS)), upstream=upstream)
    for shape, kv, kind in itertools.product(((0, 4, 2, 8), (2, 0, 2, 8), (2, 3, 0, 8)), (0, 2), kinds):
        for norm in (None, F32):
            rope_case(F32, shape, kv, kind, norms=(norm, norm))
    rope_case(F32, (1, 3, 2, 256), 1, "offset", norms=(F32, F32))
    rope_case(BF16, (1, 3, 2, 300), 1, "tables", rotary_dim=256)
    for check in (rope_packed, rope_transformers, rope_kept, rope_order, rope_compiled):
        attempt(check.__name__, check)
    if CUDA:
        for shape, norm in itertools.product(((2, 4096, 32, 128), (1, 32768, 8, 64)), (None, BF16)):
            rope_case(BF16, shape, 8, rng.choice(kinds), norms=(norm, norm))


def inverse_frequencies(dim, base=10000.0):
    return base ** -(torch.arange(0, dim, 2, device=D) / dim)


def rope_packed():
    """Parts of one tensor have the bits of tensors of their own, and their gradients."""
    heads, kv, dim, inv_freq = 4, 2, 16, inverse_frequencies(16)
    for t, rows, norm in itertools.product(TYPES, ((2, 5), (7,)), (False, True)):
        weights = dict(q_weight=leaf(normal(dim), t), k_weight=leaf(normal(dim), t)) if norm else {}
        qkv = leaf(normal(*rows, (heads + 2 * kv) * dim), t)

        def parts(x):
            q, k, _ = x.split((heads * dim, kv * dim, kv * dim), -1)
            return q.view(*rows, heads, dim), k.view(*rows, kv, dim)
        leaves, found = [qkv, *weights.values()], []
        for f in (lambda q, k: LF.rope(q, k, inv_freq=inv_freq, **weights),
                  lambda q, k: LF.rope(q.contiguous(), k.contiguous(), inv_freq=inv_freq, **weights),
                  lambda q, k: tuple(y.transpose(-3, -2) for y in LF.rope(
                      q.transpose(-3, -2), k.transpose(-3, -2), inv_freq=inv_freq, heads_first=True, **weights))):
            y = f(*parts(qkv))
            found.append([*y, *torch.autograd.grad(sum((v.float() * v.detach().float()).sum() for v in y), leaves)])
        same = all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))
        verdict(f"{NAMES[t]} {rows} norm {norm}: the same bits, wherever both lie", same)
        q, k = parts(qkv.detach())
        alone = LF.rope(q, inv_freq=inv_freq, q_weight=weights.get("q_weight"))
        verdict(f"{NAMES[t]} {rows} norm {norm}: q alone", torch.equal(alone, found[0][0]))
        verdict(f"{NAMES[t]} {rows} norm {norm}: its gradient of v is 0", not found[0][2][..., -kv * dim:].any())
    x = leaf(normal(2, 5, 4, 16))
    y = LF.rope(x, x, inv_freq=inv_freq)
    verdict("one tensor as both", torch.equal(*y))
    close("one tensor as both, its gradient", torch.autograd.grad(sum(y).sum(), x),
          [2 * torch.autograd.grad(LF.rope(x, inv_freq=inv_freq).sum(), x)[0]])


def rope_transformers():
    try:
        from transformers.models.llama import modeling_llama as llama
    except ImportError as error:
        print(f"  skipped: rope beside transformers ({error})")
        return
    dim, tokens = 32, 6
    config = llama.LlamaConfig(hidden_size=4 * dim, num_attention_heads=4, num_key_value_heads=2, head_dim=dim)
    embedding = llama.LlamaRotaryEmbedding(config).to(D)
    for t, batch, positions in itertools.product(TYPES, (1, 3), ("from 0", "of each")):
        q, k = (leaf(normal(batch, tokens, n, dim), t).transpose(1, 2) for n in (4, 2))
        ids = torch.arange(tokens, device=D).expand(batch, -1) if positions == "from 0" else classes(4000, batch, tokens)
        cos, sin = embedding(q, ids)
        up = [normal(*x.shape).to(D, t) for x in (q, k)]
        found = []
        for f in (lambda: llama.apply_rotary_pos_emb(q, k, cos, sin), lambda: LF.rope(q, k, cos=cos, sin=sin, heads_first=True),
                  lambda: LF.rope(q, k, inv_freq=embedding.inv_freq.float(), position=ids, heads_first=True)):
            y = f()
            found.append([*y, *torch.autograd.grad(y, [q, k], up)])
        name = f"transformers, {NAMES[t]} batch {batch} positions {positions}"
        # Its own rounds cos, sin, both products and the sum to the type, and float32 angles err by 2^-24 of the position.
        close(name, found[1], found[0], 4 * HALF[t])
        close(f"{name}, inv_freq", found[2], found[0], 4 * HALF[t] + 4000 * 2 * U)


def rope_kept():
    """Backward keeps q and k where they have a norm, and else the angles alone."""
    q, k, w, inv_freq = leaf(normal(2, 5, 4, 16)), leaf(normal(2, 5, 2, 16)), leaf(normal(16)), inverse_frequencies(16)
    position = torch.arange(5, device=D)
    cos, sin = torch.randn(5, 16, device=D), torch.randn(5, 16, device=D)
    for name, f, own in (("inv_freq", lambda: LF.rope(q, k, inv_freq=inv_freq), (inv_freq,)),
                         ("position", lambda: LF.rope(q, k, inv_freq=inv_freq, position=position), (inv_freq, position)),
                         ("tables", lambda: LF.rope(q, k, cos=cos, sin=sin), (cos, sin)),
                         ("a norm of q", lambda: LF.rope(q, k, inv_freq=inv_freq, q_weight=w), (inv_freq, q, w)),
                         ("both norms", lambda: LF.rope(q, k, inv_freq=inv_freq, q_weight=w, k_weight=w),
                          (inv_freq, q, k, w, w))):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
            f()
        lie = lambda tensors: sorted((t.data_ptr(), t.stride()) for t in tensors)
        verdict(f"kept, {name}", lie(saved) == lie(own), f"{lie(saved)}, not {lie(own)}")


def rope_order():
    """Results lie in memory as their inputs do, without gaps, in fake tensors too."""
    inv_freq = inverse_frequencies(8)
    room = torch.randn(3, 5, 4, 24, device=D)
    for name, x, order in (("packed", room[..., :8].contiguous(), (0, 1, 2)), ("a part", room[..., 8:16], (0, 1, 2)),
                           ("swapped", room[..., 8:16].transpose(1, 2), (0, 2, 1)),
                           ("batch last", room[..., :8].permute(1, 2, 0, 3), (2, 0, 1)),
                           ("tokens outside", room[..., :8].transpose(0, 1), (1, 0, 2)),
                           ("one token", room[:, :1, :, :8].transpose(1, 2), (0, 1, 2)),
                           ("expanded", room[:1, ..., :8].expand(3, 5, 4, 8), (0, 1, 2)),
                           ("last apart", room[..., ::3], (0, 1, 2)), ("empty", room[:0, ..., :8].transpose(1, 2), (0, 2, 1))):
        y = LF.rope(x, inv_freq=inv_freq)
        # order: the dimensions from the outermost one on
        verdict(f"{name}: dense", y.permute(*order, 3).is_contiguous(), str(y.stride()))
        with torch._subclasses.FakeTensorMode() as mode:
            made = LF.rope(mode.from_tensor(x), inv_freq=mode.from_tensor(inv_freq))
        verdict(f"{name}: a fake tensor lies alike", made.stride() == y.stride() and made.shape == y.shape,
                f"{made.stride()}, not {y.stride()}")


def rope_compiled():
    inv_freq, w = inverse_frequencies(16), leaf(normal(16))

    def step(qkv, w, offset):
        q, k, v = qkv.view(*qkv.shape[:2], 8, 16).split((4, 2, 2), 2)
        q, k = LF.rope(q.transpose(1, 2), k.transpose(1, 2), inv_freq=inv_freq, heads_first=True, q_weight=w, offset=offset)
        return torch.cat((q, k), 1) * 2
    for backend, dynamic in (("aot_eager", None), ("inductor", None), ("aot_eager", True)):
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
        fast = torch.compile(step, fullgraph=True, backend=counter, dynamic=dynamic)
        for tokens, offset in ((5, 0), (6, 3), (9, 8), (12, 40)):
            qkv = leaf(normal(2, tokens, 128))
            found = [out_and_gradients(lambda x, w: f(x, w, offset), [qkv, w]) for f in (fast, step)]
            close(f"{backend} dynamic {dynamic}, {tokens} tokens from {offset} on", *found, 1e-5)
        verdict(f"{backend} dynamic {dynamic}: at most 3 programs", counter.frame_count <= 3, str(counter.frame_count))
    torch._dynamo.reset()


# ---- cross_entropy ----------------------------------------------------------------------------------------------------------

PLAIN = dict(reduction="mean", ignore_index=-100, label_smoothing=0.0, z_loss=0.0, softcap=0.0, logit_scale=1.0,
             zero_when_empty=False, denominator=None)


def capped(x, o):
    z = x * o.logit_scale
    return o.softcap * torch.tanh(z / o.softcap) if o.softcap else z


def exact_loss(logits, target, weight, options):
    """loss, lse, z_loss, entropy of rows of logits in float64, by PyTorch. target is [rows]."""
    o = types.SimpleNamespace(**{**PLAIN, **options})
    z, counted, target = capped(logits, o), target != o.ignore_index, target.long()
    weight = None if weight is None else weight.double()
    divided = o.denominator is not None and o.reduction == "mean"
    loss = F.cross_entropy(z, target, weight, ignore_index=o.ignore_index, reduction="sum" if divided else o.reduction,
                           label_smoothing=o.label_smoothing)
    if divided:
        loss = loss / o.denominator.double().reshape(())
    if o.zero_when_empty and not counted.any():
        loss = z.sum() * 0
    lse = torch.where(counted, torch.logsumexp(z, 1), 0.0)
    extra = o.z_loss * lse**2
    logp = z - torch.logsumexp(z, 1, keepdim=True)
    entropy = torch.where(counted, -(logp.exp() * logp).sum(1), 0.0)
    if o.reduction != "none":
        extra = extra.sum() / (o.denominator.double().reshape(()) if divided else
                               max(int(counted.sum()), 1) if o.reduction == "mean" else 1)
    return loss + extra, lse, extra.detach(), entropy


def loss_bounds(logits, target, weight, options, up, dlse=None, logit_error=0.0, dentropy=None):
    """Errors of loss, lse, z-loss, entropy and of the gradient of the logits, as lk/cross_entropy.cuh states them.

    logits: [rows, vocab] in float64, each off by up to logit_error [rows, 1]. up: the upstream gradient of loss."""
    o = types.SimpleNamespace(**{**PLAIN, **options})
    rows, vocab = logits.shape
    z, counted = capped(logits, o), (target != o.ignore_index).double()
    y = torch.where(target == o.ignore_index, 0, target.long())
    lse = torch.logsumexp(z, 1)
    p = torch.exp(z - lse[:, None])
    top, away = z.amax(1), (z - z.amax(1, keepdim=True)).abs()
    base = math.log(vocab) + 1
    cap = torch.as_tensor(logit_error, device=D).reshape(-1) * o.logit_scale
    if o.softcap:
        cap = cap + 16 * U * z.abs().amax(1)
    lse_error = 8 * U * (z.abs().amax(1) + base) + cap
    w = torch.ones(vocab, dtype=torch.float64, device=D) if weight is None else weight.double()
    w_y, total, each = w[y], w.sum(), o.label_smoothing / vocab
    row = (1 - o.label_smoothing) * w_y * (16 * U * (top - z.gather(1, y[:, None])[:, 0] + base) + 2 * cap)
    row = row + each * (16 * U * (total * base + (w * away).sum(1)) + 2 * total * cap)
    extra = o.z_loss * (2 * lse.abs() * lse_error + 4 * U * lse**2) * counted
    loss = row * counted + extra
    entropy = 16 * U * (base + (p * away).sum(1)) + 2 * cap * (1 + (p * away).sum(1))
    divisor = count = 1.0
    if o.reduction == "mean":
        divisor, count = (w_y * counted).sum().clamp(min=1e-30), counted.sum().clamp(min=1)
        if o.denominator is not None:
            divisor = count = o.denominator.double().reshape(())
    if o.reduction != "none":
        terms = exact_loss(logits, target, weight, {**options, "reduction": "none"})[0].abs().sum()
        extra = (extra.sum() + 16 * U * (o.z_loss * lse**2 * counted).sum()) / count
        loss = ((row * counted).sum() + 16 * U * terms) / divisor + extra
    if up is None and dlse is None and dentropy is None:
        return loss, lse_error, extra, entropy, None
    up = torch.zeros_like(lse) if up is None else up.double().abs().expand(rows)
    f, h = up / divisor * counted, up / count * counted
    rise = f * ((1 - o.label_smoothing) * w_y + each * total)
    spare = 2 * o.z_loss * h * lse.abs() + (0.0 if dlse is None else dlse.abs() * counted)
    relative = (4 + (z - lse[:, None]).abs()) * 2 * U + (lse_error + 2 * U * lse.abs() + 2 * cap)[:, None] + 16 * U
    error = (rise + spare)[:, None] * p * relative + (2 * o.z_loss * h * lse_error)[:, None] * p
    error = error + (f * each)[:, None] * w * 16 * U
    # dz[y] is G less the sum of all others, so it has their errors.
    own = error.sum(1) + 16 * U * (spare + f * each * total)
    error = error.scatter(1, y[:, None], own[:, None])
    bent = 0.0
    if dentropy is not None:  # p (log p + entropy)
        size = (z - lse[:, None]).abs() + (p * (z - lse[:, None]).abs()).sum(1, keepdim=True)
        bent = (dentropy.abs() * counted)[:, None] * p
        error = error + bent * (size * relative + (lse_error + entropy + 2 * cap)[:, None] + 16 * U * size)
        bent = bent * size
    slope = 1.0
    if o.softcap:  # the derivative of the softcap, from an exponential
        u = logits * o.logit_scale / o.softcap
        gradient = (rise + spare)[:, None] * (p + torch.zeros_like(p).scatter(1, y[:, None], 1.0)) + (f * each * total)[:, None]
        slope = 1 - torch.tanh(u)**2
        error = error * slope + (gradient + bent) * (slope * (5 + u.abs()) * 4 * U + 2 * cap[:, None] / o.softcap)
    return loss, lse_error, extra, entropy, error * o.logit_scale


def rows_of(x):
    """[C] or [N, C] or [N, C, d...] as rows of logits."""
    return x[None] if x.dim() == 1 else x.movedim(1, -1).reshape(-1, x.shape[1])


def as_input(rows, shape):
    """The inverse of rows_of, for a gradient of this shape."""
    return rows.view(shape) if len(shape) == 1 else rows.view(shape[0], *shape[2:], shape[1]).movedim(-1, 1)


def draw_options(vocab, reduction):
    options = dict(reduction=reduction)
    options["label_smoothing"] = rng.choice((0.0, 0.0, 0.125, 1.0))
    options["z_loss"] = rng.choice((0.0, 2.0**-7))
    options["softcap"] = rng.choice((0.0, 0.0, 8.0))
    options["logit_scale"] = rng.choice((1.0, 0.5, 1.5))
    options["ignore_index"] = rng.choice((-100, -100, min(2, vocab - 1)))
    if reduction == "mean" and rng.random() < 0.4:  # in any shape and type of one number
        options["denominator"] = rng.choice((torch.tensor(5.0), torch.tensor([3.5]), torch.tensor(7))).to(D)
    weight = None
    if rng.random() < 0.4:
        weight = leaf(torch.rand(vocab, generator=generator) + 0.25, F32, rng.choice(("packed", "second rows")), False)
    return options, weight


def draw_targets(vocab, shape, ignore_index):
    target = classes(vocab, *shape, dtype=rng.choice((torch.int64, torch.int32)))
    if target.numel() > 1:
        target[torch.rand(shape, generator=generator).to(D) < 0.25] = ignore_index
        target.view(-1)[0] = (ignore_index + 1) % vocab if vocab > 1 else 0
    return torch.stack([target, target - 1], -1)[..., 0] if rng.random() < 0.3 else target  # with gaps between, or packed


def case_name(t, shape, options, weight, *more):
    changed = {k: v for k, v in options.items() if v != PLAIN[k]}
    return f"{NAMES[t]} {tuple(shape)} {changed} {'weights ' if weight is not None else ''}{' '.join(map(str, more))}"


def loss_case(t, shape, layout, options, weight, target=None, upstream=None):
    vocab = shape[0] if len(shape) == 1 else shape[1]
    spread = (*shape[:1], *shape[2:]) if len(shape) > 1 else ()
    target = draw_targets(vocab, spread, options.get("ignore_index", -100)) if target is None else target
    flat = target.reshape(-1)
    x = leaf(normal(*shape, sigma=2.0), t, layout)

    def exact(x):
        return exact_loss(rows_of(x), flat, weight, options)[0].reshape(() if options["reduction"] != "none" else spread)

    def bounds(doubles, outs, ups, gradients):
        up = ups[0].reshape(-1) if options["reduction"] == "none" else ups[0]
        loss, *_, dx = loss_bounds(rows_of(doubles[0]), flat, weight, options, up)
        return [loss.reshape(outs[0].shape)], [as_input(dx, shape)]
    hold(case_name(t, shape, options, weight, layout, target.dtype),
         lambda x: LF.cross_entropy(x, target, weight, **options), exact, [x], bounds, upstream, dtypes=[F32],
         twice=options["reduction"] != "none")


def scaled_gradients(f, leaves, factor, **more):
    """The loss and the gradients of factor * f, by a tensor, as a weighted sum of losses gives it."""
    loss = f(*leaves, **more)
    return loss, torch.autograd.grad(loss, leaves, torch.tensor(factor, device=D))


def upstreams():
    """Gradients that forward computes for an upstream gradient which backward tells: known, guessed, wrong, in place."""
    t, th = classes(12, 6), classes(20, 6)
    cases = [("cross_entropy", lambda x, **more: LF.cross_entropy(x, t, **more), lambda x: F.cross_entropy(x, t),
              lambda dtype: [leaf(normal(6, 12), dtype)]),
             ("cross_entropy sum", lambda x, **more: LF.cross_entropy(x, t, reduction="sum", **more),
              lambda x: F.cross_entropy(x, t, reduction="sum"), lambda dtype: [leaf(normal(6, 12), dtype)]),
             ("cross_entropy of probabilities", lambda x, **more: LF.cross_entropy(x, torch.softmax(normal_q, 1), **more),
              lambda x: F.cross_entropy(x, torch.softmax(normal_q, 1).to(x.dtype)), lambda dtype: [leaf(normal(6, 12), dtype)]),
             ("linear_cross_entropy", lambda x, w, **more: LF.linear_cross_entropy(x, w, th, **more),
              lambda x, w: F.cross_entropy(x @ w.t(), th), lambda dtype: [leaf(normal(6, 16), dtype), leaf(normal(20, 16), dtype)]),
             ("linear_kl", lambda x, w, **more: LF.linear_kl(x, w, y.to(x.dtype), v.to(x.dtype), **more),
              lambda x, w: F.kl_div((x @ w.t()).log_softmax(1), (y.to(dtype).double() @ v.to(dtype).double().t()).softmax(1),
                                    reduction="batchmean"),
              lambda dtype: [leaf(normal(6, 16), dtype), leaf(normal(20, 16), dtype)])]
    y, v = normal(6, 8).to(D), normal(20, 8).to(D)
    normal_q = normal(6, 12).to(D)
    for (name, ours, theirs, make), dtype in itertools.product(cases, TYPES):
        leaves = make(dtype)
        doubles = [v.detach().double().requires_grad_() for v in leaves]
        bits = {}
        for factor in (1.0, 0.25, -0.3, 65536.0, 1e-3):
            right = [g * factor for g in torch.autograd.grad(theirs(*doubles), doubles)]
            # The head's matmuls take gradients of its logits in this type.
            bound = lambda g, times: rounded(g, (4 * HALF[dtype] + 64 * U) * g.abs().max(), dtype, times)
            ways = {"as it comes": {}, "number": dict(grad_scale=factor), "tensor": dict(grad_scale=torch.tensor(factor, device=D)),
                    "wrong": dict(grad_scale=factor * 3)}
            if dtype == F16:
                ways.pop("wrong")  # a gradient for another upstream may be too small or too large for float16
            for way, more in ways.items():
                for turn in range(3):  # the third call expects what the first two got
                    loss, gradients = scaled_gradients(ours, leaves, factor, **more)
                    compare(f"{name} {NAMES[dtype]} upstream {factor:g}, grad_scale {way}, call {turn + 1}",
                            *[(f"d{i}", g, r, bound(r, 2)) for i, (g, r) in enumerate(zip(gradients, right))])
                if way in ("number", "tensor"):
                    bits.setdefault(factor, []).append([g.clone() for g in gradients])
        same = all(torch.equal(a, b) for pair in bits.values() for a, b in zip(*pair))
        verdict(f"{name} {NAMES[dtype]}: a number and a tensor as grad_scale give the same bits", same)
        if dtype != F16:  # exact for powers of two, however often the gradient was rounded
            first = [scaled_gradients(ours, leaves, 1.0)[1] for _ in range(4)][-1]  # by then 1 is expected
            for factor in (0.5, 4.0):
                for more in ({}, {}, {}, dict(grad_scale=factor), dict(grad_scale=8.0)):
                    g = scaled_gradients(ours, leaves, factor, **more)[1]
                    verdict(f"{name} {NAMES[dtype]}: {factor:g} times the bits of 1, {more}",
                            all(torch.equal(a, b * factor) for a, b in zip(g, first)))
        torch.use_deterministic_algorithms(True)
        runs = [scaled_gradients(ours, leaves, 0.3)[1] for _ in range(4)]
        torch.use_deterministic_algorithms(False)
        verdict(f"{name} {NAMES[dtype]}: the same bits in every call under use_deterministic_algorithms",
                all(torch.equal(a, b) for run in runs for a, b in zip(run, runs[0])))
        # A second backward over the same graph, and one in place of memory that a hook has kept.
        loss, kept = ours(*leaves), []
        a = torch.autograd.grad(loss, leaves, torch.tensor(0.7, device=D), retain_graph=True)
        b = torch.autograd.grad(loss, leaves, torch.tensor(1.4, device=D), retain_graph=True)
        c = torch.autograd.grad(loss, leaves, torch.tensor(0.7, device=D))
        verdict(f"{name} {NAMES[dtype]}: a graph that is kept", all(torch.equal(i, k) and torch.equal(2 * i, j) for i, j, k in zip(a, b, c))
                if dtype != F16 else all(torch.allclose(2 * i, j, rtol=0.01) for i, j in zip(a, b)))
        with torch.autograd.graph.saved_tensors_hooks(lambda v: kept.append(v) or v, lambda v: v):
            loss = ours(*leaves)
        before = [v.clone() for v in kept]
        torch.autograd.grad(loss, leaves, torch.tensor(5.0, device=D))
        verdict(f"{name} {NAMES[dtype]}: what hooks have kept stays as it is", all(torch.equal(v, w) for v, w in zip(kept, before)))
        # An upstream gradient that PyTorch has not computed yet: a sign, a zero.
        loss = ours(*leaves)
        z = torch.complex(torch.zeros_like(loss), loss).conj()
        negated = torch.autograd.grad((z * (1 + 2j)).real.sum(), leaves)
        right = torch.autograd.grad(ours(*leaves) * 2, leaves)
        verdict(f"{name} {NAMES[dtype]}: a lazily negated upstream", all(torch.allclose(i, j, rtol=0.02, atol=1e-6) for i, j in zip(negated, right)))
        loss = ours(*leaves)
        zero = torch.autograd.grad(loss, leaves, torch._efficientzerotensor(loss.shape, device=D))
        verdict(f"{name} {NAMES[dtype]}: a zero tensor as upstream", all((i == 0).all() for i in zero))
    of_both = [leaf(normal(6, 16), BF16), leaf(normal(20, 16), BF16)]  # two losses of a step, as distillation beside labels has them
    for _ in range(3):
        scaled_gradients(cases[-2][1], of_both, 1.0)
        found = scaled_gradients(cases[-1][1], of_both, 0.3)[1]
    known = scaled_gradients(cases[-1][1], of_both, 0.3, grad_scale=0.3)[1]
    verdict("linear_kl expects its own upstream, not that of linear_cross_entropy", all(map(torch.equal, found, known)))
    inplace()


def inplace():
    t = classes(12, 6)
    w, h = leaf(normal(12, 8), BF16), leaf(normal(6, 8), BF16)
    for options in (dict(), dict(grad_scale=0.3), dict(reduction="sum", z_loss=1e-3, softcap=5.0, label_smoothing=0.1)):
        both = []
        for more in (dict(), dict(inplace=True)):
            for _ in range(3):  # so that both expect the same upstream gradient
                logits = h @ w.t()
                loss = LF.cross_entropy(logits, t, **options, **more)
                g = torch.autograd.grad(loss, (h, w), torch.tensor(0.3, device=D))
            both.append((loss.detach(), *g))
        verdict(f"inplace {options}: the same bits", all(torch.equal(a, b) for a, b in zip(*both)))
    logits = h @ w.t()
    base = logits.detach()
    gradient, = torch.autograd.grad(LF.cross_entropy(logits, t, inplace=True), logits)
    verdict("inplace: the gradient lies in the logits' memory", gradient.data_ptr() == base.data_ptr())
    logits = h @ w.t()
    loss = LF.cross_entropy(logits, t, inplace=True)
    a = torch.autograd.grad(loss, h, torch.tensor(2.0, device=D), retain_graph=True)[0]
    b = torch.autograd.grad(loss, h, torch.tensor(4.0, device=D))[0]
    verdict("inplace: a graph that is kept", torch.equal(2 * a, b))
    with torch.no_grad():
        logits = h @ w.t()
        before = logits.clone()
        LF.cross_entropy(logits, t, inplace=True)
        verdict("inplace: nothing is overwritten where no gradient is wanted", torch.equal(before, logits))

    def saved_before():
        logits = h @ w.t()
        squares = logits.square().sum()  # needs the logits in backward
        (LF.cross_entropy(logits, t, inplace=True) + squares).backward()
    raises("inplace: logits that another op needs", saved_before, "modified by an inplace operation")
    raises("inplace: a leaf", lambda: LF.cross_entropy(leaf(normal(6, 12)), t, inplace=True), "leaf")
    raises("inplace: a view of a leaf", lambda: LF.cross_entropy(leaf(normal(2, 3, 12)).view(6, 12), t, inplace=True), "leaf")
    raises("inplace: a loss per row", lambda: LF.cross_entropy(h @ w.t(), t, reduction="none", inplace=True), "inplace")
    raises("inplace: gaps", lambda: LF.cross_entropy((h @ leaf(normal(16, 8), BF16).t())[:, :12], t, inplace=True), "contiguous")
    raises("inplace: float16 without grad_scale", lambda: LF.cross_entropy(h.half() @ w.half().t(), t, inplace=True), "grad_scale")
    raises("grad_scale: 0", lambda: LF.cross_entropy(h @ w.t(), t, grad_scale=0.0), "grad_scale")
    raises("grad_scale: two numbers", lambda: LF.cross_entropy(h @ w.t(), t, grad_scale=torch.ones(2, device=D)), "grad_scale")
    raises("grad_scale: a gradient", lambda: LF.cross_entropy(h @ w.t(), t, grad_scale=torch.ones((), device=D, requires_grad=True)), "detach")


# What PyTorch does without a kernel.
NO_KERNEL = {"aten::empty", "aten::empty_strided", "aten::detach", "aten::as_strided", "aten::view", "aten::_reshape_alias",
             "aten::reshape", "aten::select", "aten::unsqueeze", "aten::t", "aten::transpose", "aten::movedim", "aten::is_nonzero",
             "aten::to", "aten::contiguous", "aten::resolve_neg", "aten::resolve_conj", "aten::alias", "aten::new_empty",
             "aten::empty_like", "aten::result_type", "aten::permute", "aten::flatten", "aten::_unsafe_view", "aten::lift_fresh"}


def launches():
    """No call runs a kernel of PyTorch's beside lk's: no cast, no copy, no fill. C runs none either."""
    t, th = classes(64, 6), classes(40, 6)
    calls = [("logsumexp", lambda x: LF.logsumexp(x, 1), [leaf(normal(6, 64), BF16)]),
             ("logsumexp f32", lambda x: LF.logsumexp(x, 1, dtype=F32), [leaf(normal(6, 64), BF16)]),
             ("rms_norm", lambda x, w: LF.rms_norm(x, (64,), w), [leaf(normal(6, 64), BF16), leaf(normal(64), BF16)]),
             ("add_rms_norm", lambda x, r, w: LF.add_rms_norm(x, r, (64,), w), [leaf(normal(6, 64), BF16), leaf(normal(6, 64), BF16), leaf(normal(64), BF16)]),
             ("srms_norm", lambda x: LF.srms_norm(x), [leaf(normal(6, 64), BF16)]),
             ("rms_norm, gate", lambda x, g, w: LF.rms_norm(x, 64, w, gate=g), [leaf(normal(6, 64), BF16), leaf(normal(6, 64), BF16),
                                                                                leaf(normal(64), BF16)]),
             ("cross_entropy", lambda x: LF.cross_entropy(x, t), [leaf(normal(6, 64), BF16)]),
             ("cross_entropy, inplace", lambda x: LF.cross_entropy(-x, t, inplace=True), [leaf(normal(6, 64), BF16)]),
             ("cross_entropy none", lambda x: LF.cross_entropy(x, t, reduction="none"), [leaf(normal(6, 64), BF16)]),
             ("cross_entropy f16", lambda x: LF.cross_entropy(x, t), [leaf(normal(6, 64), F16)]),
             ("cross_entropy of probabilities", lambda x: LF.cross_entropy(x, q), [leaf(normal(6, 64), BF16)]),
             ("cross_entropy_stats", lambda x: LF.cross_entropy_stats(x, t, reduction="none")[:2], [leaf(normal(6, 64), BF16)]),
             ("linear_cross_entropy", lambda x, w: LF.linear_cross_entropy(x, w, th), [leaf(normal(6, 64), BF16), leaf(normal(40, 64), BF16)]),
             ("linear_cross_entropy none", lambda x, w: LF.linear_cross_entropy(x, w, th, reduction="none"), [leaf(normal(6, 64), BF16), leaf(normal(40, 64), BF16)]),
             ("md_lrpe_cosine", lambda x, th: LF.md_lrpe_cosine(x, th, (6,)), [leaf(normal(1, 2, 6, 16), BF16), leaf(normal(2, 16))])]
    q = torch.softmax(normal(6, 64), 1).to(D, BF16)
    for name, f, leaves in calls:
        for _ in range(2):  # the second time: what is made once is there
            outs = f(*leaves)
            outs = outs if isinstance(outs, tuple) else (outs,)
            ups = [torch.full_like(o, 0.3) for o in outs]
            activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * CUDA
            with torch.profiler.profile(activities=activities) as profile:
                outs = f(*leaves)
                outs = outs if isinstance(outs, tuple) else (outs,)
                torch.autograd.grad(outs, leaves, ups)
                if CUDA:
                    torch.cuda.synchronize()
        own = {"aten::neg"} if "inplace" in name else set()  # the case's -x
        events = profile.events()
        others = sorted({e.name for e in events if e.name.startswith("aten::")} - NO_KERNEL - own)
        verdict(f"{name}: nothing but lk's kernels", not others, str(others))
        if CUDA:
            device = [e.name for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
            foreign = [n for n in device if "at::native" in n and not own]
            verdict(f"{name}: no kernel of PyTorch's", not foreign, f"{foreign} of {device}")
            if VERBOSE:
                print(f"        {name}: {collections.Counter(n.split('<')[0].split('(')[0] for n in device)}")


def prob_case(t, shape, layout, options, weight, q, outputs=None):
    """Class probabilities q as targets, against PyTorch in float64. outputs: cross_entropy_stats, with gradients of these."""
    o = types.SimpleNamespace(**{**PLAIN, **options})
    reduced, x = o.reduction != "none", leaf(normal(*shape, sigma=2.0), t, layout)
    spread = (*shape[:1], *shape[2:]) if len(shape) > 1 else ()
    function = LF.cross_entropy if outputs is None else LF.cross_entropy_stats

    def ours(x):
        out = function(x, q, weight, **options)
        return out if outputs is None else (out.loss, out.lse, out.entropy)

    def exact(x):
        z = capped(rows_of(x), o)
        w = None if weight is None else weight.double()
        divided = o.denominator is not None
        loss = F.cross_entropy(z, rows_of(q).double(), w, reduction="sum" if divided else o.reduction,
                               label_smoothing=o.label_smoothing)
        lse, over = torch.logsumexp(z, 1), o.denominator.double().reshape(()) if divided else float(z.shape[0])
        extra = o.z_loss * lse**2
        if reduced:
            extra = extra.sum() / (over if o.reduction == "mean" else 1)
        logp = z - lse[:, None]
        entropy = -(logp.exp() * logp).sum(1)
        loss = (loss / over if divided else loss) + extra
        loss = loss if reduced else loss.reshape(spread)
        return loss if outputs is None else (loss, lse.reshape(spread), entropy.reshape(spread))

    def bounds(doubles, outs, ups, gradients):  # plain: the op's own tests derive tight ones
        u = (rows_of(q).double() * (1 - o.label_smoothing) + o.label_smoothing / shape[len(shape) > 1])
        u = (u if weight is None else u * weight.double()).abs().sum(1).max().clamp(min=1)
        up = sum(magnitude(a).max() for a in ups if a is not None) if gradients else 0.0
        return [1e-5 * (1 + magnitude(a)) for a in outs], [2e-6 * (up * (u + 8) + magnitude(g)) for g in gradients]
    hold(case_name(t, shape, options, weight, layout, q.dtype, "probabilities"), ours, exact, [x], bounds, outputs=outputs,
         dtypes=[F32] * 3, twice=reduced)


def probabilities():
    shapes = [(6, 50), (3, 257), (2, 1031), (40,), (4, 7, 5), (2, 33, 3, 2), (5, 1)]
    for t, reduction, shape in itertools.product(TYPES, ("none", "mean", "sum"), shapes):
        options, weight = draw_options(shape[len(shape) > 1], reduction)
        options["ignore_index"] = -100
        q = leaf(torch.rand(shape, generator=generator), rng.choice((t, F32)), rng.choice(LAYOUTS), False)
        q = q / q.sum(int(len(shape) > 1), keepdim=True) if rng.random() < 0.3 and q.dtype == F32 else q
        prob_case(t, shape, rng.choice(LAYOUTS), options, weight, q)
        prob_case(t, shape, rng.choice(LAYOUTS), options, weight, q, rng.choice(((0, 1, 2), (0,), (1,), (2,))))
    x, q = leaf(normal(3, 40)), torch.zeros(3, 40, device=D)  # a single 1 is a class; a probability of 0 at -inf counts 0
    with torch.no_grad():
        x[0, ::3], q[0, 5], q[1, 9], q[2, 0] = -INF, 1, 1, 1
    loss, target = LF.cross_entropy(x, q, reduction="none"), torch.tensor([5, 9, 0], device=D)
    exact = F.cross_entropy(x.detach().double(), target, reduction="none")
    gradient, = torch.autograd.grad(loss.sum(), x)
    right = torch.softmax(x.detach().double(), 1) - q.double()
    compare("-inf beside probabilities of 0", ("loss", loss, exact, rounded(exact, 1e-5, F32)), ("dx", gradient, right, 1e-6))
    for reduction, zero in itertools.product(("none", "mean", "sum"), (False, True)):
        x, q = leaf(normal(0, 9)), torch.zeros(0, 9, device=D)
        loss = LF.cross_entropy(x, q, reduction=reduction, zero_when_empty=zero)
        gradient, = torch.autograd.grad(loss, x, torch.ones_like(loss))
        right = torch.zeros(() if reduction != "none" else (0,), device=D) + (NAN if reduction == "mean" and not zero else 0)
        compare(f"no rows, {reduction}, zero_when_empty={zero}", ("loss", loss, right, 1e-30))
    x, q = leaf(normal(6, 50)), torch.softmax(normal(6, 50), 1).to(D)
    for reduction in ("none", "mean"):
        f = lambda x: LF.cross_entropy(x, q, reduction=reduction, label_smoothing=0.125).sum()
        one, = torch.autograd.grad(f(x), x)
        two, = torch.autograd.grad(torch.compile(f, backend="aot_eager")(x), x)
        compare(f"torch.compile, {reduction}", ("dx", two, one, 1e-6))


def cross_entropy():
    probabilities()
    shapes = [(6, 50), (3, 257), (2, 1031), (40,), (4, 7, 5), (2, 33, 3, 2), (5, 1), (1, 8)]
    for t, reduction, shape in itertools.product(TYPES, ("none", "mean", "sum"), shapes):
        for _ in range(2):
            vocab = shape[0] if len(shape) == 1 else shape[1]
            options, weight = draw_options(vocab, reduction)
            loss_case(t, shape, rng.choice(LAYOUTS), options, weight)
    for t, reduction, option in itertools.product(TYPES, ("none", "mean", "sum"), (
            {}, {"label_smoothing": 0.125}, {"z_loss": 2.0**-7}, {"softcap": 8.0}, {"logit_scale": 1.5}, {"ignore_index": 3})):
        loss_case(t, (5, 300), "packed", dict(option, reduction=reduction), None)
    for layout, upstream, reduction in itertools.product(LAYOUTS, UPSTREAMS, ("none", "mean")):
        if reduction == "none" or upstream == "packed":
            loss_case(BF16, (6, 7, 5), layout, dict(reduction=reduction), None, upstream=upstream)
            loss_case(BF16, (6, 40), layout, dict(reduction=reduction), None, upstream=upstream)
    for t in TYPES:  # class weights of the logits' type, as F.cross_entropy wants them
        weight = (torch.rand(20, generator=generator) + 0.25).to(D).to(t)
        loss_case(t, (6, 20), "packed", dict(reduction="mean"), weight)
    loss_case(F16, (8, 1000), "packed", dict(reduction="mean"), None, upstream=65536.0)  # as a loss scaler has it
    for reduction in ("none", "mean", "sum"):  # a bad target: its row alone is NaN
        x, target = leaf(normal(4, 9)), torch.tensor([1, 9, -3, 8], device=D)
        loss = LF.cross_entropy(x, target, reduction=reduction)
        gradient, = torch.autograd.grad(loss.sum(), x)
        bad = torch.tensor([False, True, True, False], device=D)
        verdict(f"bad targets, {reduction}", torch.equal(loss.isnan(), bad if reduction == "none" else bad.any()) and
                torch.equal(gradient.isnan().all(1), bad) and torch.equal(gradient.isnan().any(1), bad), f"{loss}, {gradient}")
    for empty, zero in itertools.product((False, True), repeat=2):
        shape = (0, 9) if empty else (3, 9)
        x, target = leaf(normal(*shape)), torch.full(shape[:1], -100, device=D)
        for reduction in ("none", "mean", "sum"):
            loss = LF.cross_entropy(x, target, reduction=reduction, zero_when_empty=zero)
            expected = torch.zeros(shape[:1] if reduction == "none" else (), device=D)
            expected = expected + NAN if reduction == "mean" and not zero else expected
            gradient, = torch.autograd.grad(loss, x, torch.ones_like(loss))
            compare(f"{'no rows' if empty else 'all ignored'}, {reduction}, zero_when_empty={zero}",
                    ("loss", loss, expected, 1e-30), ("dx", gradient, torch.zeros_like(x), 1e-30))
    x, target = leaf(normal(3, 40)), torch.tensor([5, 9, -100], device=D)
    with torch.no_grad():
        x[0, ::3], x[1, 9], x[2] = -INF, -INF, NAN
    loss = LF.cross_entropy(x, target, reduction="none")
    gradient, = torch.autograd.grad(loss.sum(), x)
    right = torch.softmax(x.detach().double(), 1)
    right[0, 5] -= 1
    right[1, 9] -= 1
    right[2] = 0
    exact = F.cross_entropy(x.detach().double(), target, reduction="none")
    compare("-inf, and NaN in an ignored row", ("loss", loss, exact, rounded(exact, 1e-5, F32)), ("dx", gradient, right, 1e-6))
    if CUDA:
        for t, shape, reduction in ((BF16, (4096, 1024), "mean"), (BF16, (300, 32768), "mean"), (F32, (64, 151936), "sum"),
                                    (F16, (1000, 4099), "none")):
            loss_case(t, shape, "packed", dict(reduction=reduction), None)


def with_grad():
    """The loss and the gradient as results: those of cross_entropy, and in narrower types their rounding."""
    e5m2 = torch.float8_e5m2
    half = {e5m2: 2.0**-3, F16: HALF[F16], BF16: HALF[BF16], F32: 0.0}
    least = {e5m2: 2.0**-17, F16: LEAST[F16], BF16: LEAST[BF16], F32: 0.0}
    for t, reduction, shape in itertools.product(TYPES, ("none", "mean", "sum"), ((6, 50), (3, 257), (2, 1031), (4, 7, 5), (40,))):
        vocab = shape[0] if len(shape) == 1 else shape[1]
        options, weight = draw_options(vocab, reduction)
        x = leaf(normal(*shape), t)
        target = draw_targets(vocab, shape[:1][:len(shape) - 1] + shape[2:], options["ignore_index"])
        scale = rng.choice((None, 1.0, 2.0**9, torch.tensor(2.0**-3, device=D)))
        exact = leaf(x.detach().float())
        right = LF.cross_entropy(exact, target, weight, **options)
        dx, = torch.autograd.grad((right * (1.0 if scale is None else scale)).sum(), exact)
        for narrow in (None, e5m2, *((F16, BF16) if t == F32 else ())):
            to = narrow or t
            loss, d = LF.cross_entropy_with_grad(x, target, weight, **options, grad_scale=scale, dlogits_dtype=narrow)
            wanted = dx.clamp(-57344, 57344) if to == e5m2 else dx
            size = torch.nan_to_num(wanted.abs())
            kept = {BF16: 2.0**-10, e5m2: 2.0**-8}.get(to, 0.0) if options["softcap"] and t != F32 else 0.0  # lk/cross_entropy.md
            bound = size * (half[to] + kept + 1e-5) + least[to] + 2e-6 * (1 + size.max())
            compare(f"with_grad {case_name(t, shape, options, weight)} grad_scale {scale} -> {to}",
                    ("loss", loss, right, 1e-5 * (1 + torch.nan_to_num(right.detach()).abs())),
                    ("dlogits", d.float(), wanted, bound))
            verdict(f"with_grad {t} -> {to}: results of their types, without a gradient", d.dtype == to and d.shape == x.shape and
                    not (d.requires_grad or loss.requires_grad), f"{d.dtype} {d.shape} {loss.requires_grad}")
    x, target = leaf(torch.tensor([[0.0, 0, -4, -20, NAN, 9]], dtype=F32).repeat(2, 1)), torch.tensor([1, 0], device=D)
    with torch.no_grad():
        x[0, 4] = -8
    _, d = LF.cross_entropy_with_grad(x, target, reduction="sum", grad_scale=2.0**17, dlogits_dtype=e5m2)
    verdict("with_grad: too large becomes the largest number, NaN stays", bool((d[0].float().abs().max() == 57344) &
            d[1].float().isnan().all() & (d[0].float() == d[0].float()).all()), f"{d.float()}")
    raises("with_grad: a type that there is not", lambda: LF.cross_entropy_with_grad(x, target, dlogits_dtype=torch.float8_e4m3fn),
           "dlogits_dtype is Float8_e4m3fn", kind=ValueError)
    raises("with_grad: 16 bits of 16 bits", lambda: LF.cross_entropy_with_grad(x.to(BF16), target, dlogits_dtype=F16),
           "dlogits_dtype", kind=ValueError)
    q = torch.rand(2, 6, device=D)
    raises("with_grad: e5m2 of probabilities", lambda: LF.cross_entropy_with_grad(x, q, dlogits_dtype=e5m2), "target_prob",
           kind=ValueError)
    raises("with_grad: temperatures", lambda: LF.cross_entropy_with_grad(x, target, temperature=torch.ones(2, device=D)),
           "must be numbers", kind=TypeError)


def stats_case(t, shape, layout, options, weight, outputs):
    vocab = shape[0] if len(shape) == 1 else shape[1]
    spread = (*shape[:1], *shape[2:]) if len(shape) > 1 else ()
    target = draw_targets(vocab, spread, options.get("ignore_index", -100))
    flat, reduced = target.reshape(-1), options["reduction"] != "none"
    x = leaf(normal(*shape, sigma=2.0), t, layout)
    found = {}

    def ours(x):
        out = LF.cross_entropy_stats(x, target, weight, **options)
        found["argmax"] = out.argmax
        verdict("names of the outputs", out._fields == ("loss", "lse", "z_loss", "entropy", "argmax"), str(out._fields))
        return out.loss, out.lse, out.z_loss, out.entropy

    def exact(x):
        loss, lse, extra, entropy = exact_loss(rows_of(x), flat, weight, options)
        one = () if reduced else spread
        return loss.reshape(one), lse.reshape(spread), extra.reshape(one), entropy.reshape(spread)

    def bounds(doubles, outs, ups, gradients):
        up = ups[0] if reduced or ups[0] is None else ups[0].reshape(-1)
        dlse, dentropy = (None if ups[i] is None else ups[i].reshape(-1) for i in (1, 3))
        *errors, dx = loss_bounds(rows_of(doubles[0]), flat, weight, options, up, dlse, dentropy=dentropy)
        return [e.reshape(a.shape) for e, a in zip(errors, outs)], [as_input(dx, shape)]
    name = case_name(t, shape, options, weight, layout, f"upstream of {outputs}")
    hold(name, ours, exact, [x], bounds, outputs=outputs, dtypes=[F32] * 4, twice=reduced)
    argmax = torch.where(flat == options.get("ignore_index", -100), -1, rows_of(x.detach()).argmax(1)).reshape(spread)
    verdict(name + " argmax", torch.equal(found["argmax"], argmax) and argmax.dtype == torch.int64, f"{found['argmax']}")


def ids_case(t, shape, n, layout, options, weighted, wants, tails=False):
    """cross_entropy_ids against PyTorch in float64. wants: upstream gradients of loss, of logp, of the tail."""
    vocab, rows, ignore = shape[-1], shape[:-1], options.get("ignore_index", -100)
    x, ids = leaf(normal(*shape, sigma=2.0), t, layout), classes(vocab, *rows, n, dtype=rng.choice([torch.int64, torch.int32]))
    x_rows = x.detach().double().reshape(-1, vocab).requires_grad_()
    skipped = torch.rand(ids.shape, generator=generator).to(D) < 0.2
    ids = ids.masked_fill(skipped, ignore)
    ids.view(-1, n)[0] = ignore  # a row that is ignored
    skipped = ids == ignore
    weight = normal(*ids.shape).to(D) if weighted else None
    of_tail = normal(*rows).to(D) if tails and weighted else None
    out = LF.cross_entropy_ids(x, ids, weight, **options, **(dict(tail_weight=of_tail, tail=not weighted) if tails else {}))
    z = x_rows * options.get("logit_scale", 1.0)
    if options.get("softcap"):
        z = options["softcap"] * torch.tanh(z / options["softcap"])
    lse, gone = z.logsumexp(-1), skipped.view(-1, n)
    logp = torch.where(gone, 0.0, (z - lse[:, None]).gather(1, ids.view(-1, n).long().clamp(0, vocab - 1)))
    w = weight.double().view(-1, n) if weighted else torch.ones_like(logp)
    counted = ~gone.all(1)
    others = torch.ones_like(z).scatter(1, ids.view(-1, n).long().masked_fill(gone, vocab - 1), 0.0)
    last = (~gone & (ids.view(-1, n) == vocab - 1)).any(1)  # what the skipped ids have hit
    others = torch.where((torch.arange(vocab, device=D) == vocab - 1) & ~last[:, None], 1.0, others)
    tail = torch.where(counted, (z + others.log()).logsumexp(1) - lse, 0.0) if tails else None
    loss = -(w * logp).sum(1) - (of_tail.double().view(-1) * tail if of_tail is not None else 0) + torch.where(counted, options.get("z_loss", 0.0) * lse**2, 0.0)
    reduction = options.get("reduction", "mean")
    loss = loss if reduction == "none" else loss.sum() / (counted.sum() if reduction == "mean" else 1)
    dloss, dlogp = upstream_of(out.loss, rng.choice(UPSTREAMS[:1])), upstream_of(out.logp, rng.choice(UPSTREAMS))
    exacts, ups = [loss, logp], [dloss, dlogp]
    if tails:
        exacts, ups = [*exacts, tail], [*ups, upstream_of(out.tail, rng.choice(UPSTREAMS))]
    grads = [g for g, want in zip(ups, wants) if want]
    found, = torch.autograd.grad([o for o, want in zip(out, wants) if want], x, grads)
    exact, = torch.autograd.grad([o for o, want in zip(exacts, wants) if want], x_rows,
                                 [g.double().reshape(o.shape) for g, o, want in zip(ups, exacts, wants) if want])
    size = 64 * U * (1 + z.abs().max().item()) * (1 + w.abs().sum(1).max().item() + n)
    name = f"cross_entropy_ids {t} {list(shape)} n={n} {layout} {options} {weighted} {wants}"
    compare(name, ("loss", out.loss, loss.view(out.loss.shape), size * (logp.shape[0] if reduction == "sum" else 1)),
            ("logp", out.logp, logp.view(out.logp.shape), 64 * U * (1 + logp.abs().max().item())),
            ("gradient", found, exact.view(x.shape), rounded(exact.view(x.shape), size, t)),
            *([("tail", out.tail, tail.view(out.tail.shape), 2.0**-15 * (1 + tail.abs().max().item()))] if tails else []))


def cross_entropy_ids():
    for t, (shape, n), weighted in itertools.product(TYPES, (((6, 50), 5), ((2, 3, 257), 1), ((5, 1031), 64)), (True, False)):
        for wants in ((True, False, False), (False, False, True), (True, True, True)):
            ids_case(t, shape, n, rng.choice(LAYOUTS[:5]), dict(reduction=rng.choice(("none", "mean", "sum"))), weighted, wants, True)
    sure = torch.zeros(2, 40, device=D)
    sure[:, :3] = torch.tensor([30.0, 31.0, 150.0], device=D)
    sure.requires_grad_()
    of_others = LF.cross_entropy_ids(sure, torch.tensor([[0, 1], [0, 2]], device=D), tail=True).tail
    exact = torch.log_softmax(sure.double(), -1)[1, [1, *range(3, 40)]].logsumexp(0)
    close("a tail far below", of_others[1], exact, 1e-4)
    slope, = torch.autograd.grad(of_others[1], sure)
    close("its gradient", slope[1, 1], exact.new_tensor(1 - 37 * math.exp(-31)), 1e-5)
    all_ids = LF.cross_entropy_ids(sure[:, :2], torch.tensor([[0, 1]] * 2, device=D), tail_weight=torch.zeros(2, device=D))
    verdict("all classes are ids", bool((all_ids.tail == -math.inf).all() and all_ids.loss.isfinite()))
    for t, reduction, (shape, n) in itertools.product(TYPES, ("none", "mean", "sum"), (
            ((6, 50), 5), ((2, 3, 257), 1), ((5, 1031), 64), ((4, 8), 128))):
        for weighted, wants in ((True, (True, False)), (False, (True, True)), (True, (False, True))):
            ids_case(t, shape, n, rng.choice(LAYOUTS[:5]), dict(reduction=reduction), weighted, wants)
    for option in ({"z_loss": 2.0**-7}, {"softcap": 8.0}, {"logit_scale": 1.5}, {"ignore_index": 3}, {"temperature": 0.5}):
        scaled = dict(option) if "temperature" not in option else {"logit_scale": 2.0}
        ids_case(F32, (5, 300), 7, "packed", scaled, True, (True, True))
    x, ids = leaf(normal(4, 9)), torch.tensor([[1, 2], [9, 0], [3, 3], [8, -1]], device=D)
    out = LF.cross_entropy_ids(x, ids, reduction="none")
    gradient, = torch.autograd.grad(out.loss.sum(), x)
    bad = torch.tensor([False, True, False, True], device=D)
    verdict("a bad id: its row alone is NaN", bool((out.loss.isnan() == bad).all() and (gradient.isnan().all(1) == bad).all()))
    weight = torch.tensor([[1.0, 0.5], [0.0, 1.0], [1.0, -1.0], [2.0, 0.0]], device=D)
    out = LF.cross_entropy_ids(x, ids, weight, reduction="none")
    verdict("a weight of 0 skips its id", bool(out.loss.isfinite().all() and out.logp[1, 0] == 0 and out.logp[3, 1] == 0))
    one = LF.cross_entropy_ids(x, ids[:, :1].clamp(0, 8), ignore_index=-7)
    verdict("one id of weight 1: the bits of cross_entropy", bool(one.loss == LF.cross_entropy(x, ids[:, 0].clamp(0, 8))))
    ids = ids.clamp(0, 8)
    raises("ids of another shape", lambda: LF.cross_entropy_ids(x, ids[:2]), "target_ids", kind=ValueError)
    raises("float ids", lambda: LF.cross_entropy_ids(x, ids.float()), "target_ids", kind=TypeError)
    raises("weights of another shape", lambda: LF.cross_entropy_ids(x, ids, weight[:, :1]), "target_weight", kind=ValueError)
    raises("weights with a gradient", lambda: LF.cross_entropy_ids(x, ids, leaf(weight)), "target_weight", kind=ValueError)
    raises("no ids", lambda: LF.cross_entropy_ids(x, ids[:, :0]), "ids_per_row", kind=ValueError)
    raises("129 ids", lambda: LF.cross_entropy_ids(x, ids[:, :1].expand(4, 129)), "ids_per_row", kind=ValueError)
    raises("ids on no tensor", lambda: LF.cross_entropy_ids(x, [1, 2]), "target_ids", kind=TypeError)
    raises("tail weights of another shape", lambda: LF.cross_entropy_ids(x, ids, tail_weight=weight), "tail_weight", kind=ValueError)
    raises("tail weights with a gradient", lambda: LF.cross_entropy_ids(x, ids, tail_weight=leaf(weight[:, 0])), "tail_weight",
           kind=ValueError)


def head_ids_case(t, spread, hidden, vocab, n, options, weighted, wants, biased=False, layout="packed", tails=False, **more):
    """linear_cross_entropy_ids against the same of logits by PyTorch in float64. wants: upstream gradients of loss, of logp, and
    with tails of the tail, which is in the loss where the ids are weighted."""
    inputs = [leaf(normal(*spread, hidden), t, layout), leaf(normal(vocab, hidden, sigma=2 * hidden**-0.5), t)]
    if biased:
        inputs.append(leaf(normal(vocab), t))
    ids, weight = classes(vocab, *spread, n), normal(*spread, n).to(D) if weighted else None
    name = (f"linear_cross_entropy_ids {t} {spread} {hidden} x {vocab} n={n} {options} {weighted} {wants} {biased} {layout} {more} "
            f"tails={tails}")
    of_tail = normal(*spread).to(D) if tails and weighted else None
    given = dict(tail_weight=of_tail, tail=not weighted) if tails else {}
    out = LF.linear_cross_entropy_ids(*inputs[:2], ids, weight, linear_bias=inputs[2] if biased else None, **options, **more,
                                      **given)
    ups = [torch.randn_like(o) if wanted else None for o, wanted in zip(out, wants)]
    found = torch.autograd.grad([o for o, up in zip(out, ups) if up is not None], inputs, [up for up in ups if up is not None])
    exact = [x.detach().double().requires_grad_() for x in inputs]
    logits = F.linear(exact[0], exact[1], exact[2] if biased else None) * options.get("logit_scale", 1.0)
    logp = torch.log_softmax(logits, -1).gather(-1, ids)
    skipped = ids == options.get("ignore_index", -100)
    logp = logp.masked_fill(skipped, 0.0)
    loss = -(logp if weight is None else logp * weight.double()).sum(-1) + options.get("z_loss", 0.0) * (
        torch.logsumexp(logits, -1)**2).masked_fill(skipped.all(-1), 0.0)
    tail = []
    if tails:
        mine = (F.one_hot(ids, vocab) * ~skipped[..., None]).amax(-2).bool()
        of_others = logits.masked_fill(mine, -INF).logsumexp(-1) - logits.logsumexp(-1)
        tail = [torch.where(skipped.all(-1), 0.0, of_others)]
        loss = loss - (0.0 if of_tail is None else of_tail.double() * tail[0])
    reduction = options.get("reduction", "mean")
    loss = loss if reduction == "none" else loss.sum() / (1 if reduction == "sum" else (~skipped.all(-1)).sum())
    right = torch.autograd.grad([o for o, up in zip((loss, logp, *tail), ups) if up is not None], exact,
                                [up.double() for up in ups if up is not None])
    close(f"{name}: loss, logp", list(out), [loss, logp, *tail], 2e-4)
    verdict(f"{name}: its type", type(out) is (LF.CrossEntropyIdsTailOutput if tails else LF.CrossEntropyIdsOutput))
    for what, a, b in zip(("input", "weight", "bias"), found, right):
        off, size = (a.double() - b).norm().item(), b.norm().item()
        verdict(f"{name}: gradient of {what}", off <= (3 * HALF[t] + 2e-5) * size + 1e-6, f"off by {off} of {size}")


def supports(t, spread, vocab, most, kind=torch.int64, repeat=False):
    """Ids of `most` classes at most for each token, at least one, and all of them different unless some may repeat; offsets, targets
    among them."""
    tokens = math.prod(spread)
    each = [rng.choices(range(vocab), k=rng.randint(1, most)) if repeat else rng.sample(range(vocab), rng.randint(1, min(most, vocab)))
            for _ in range(tokens)]
    offsets = torch.tensor([0, *itertools.accumulate(map(len, each))], dtype=kind, device=D)
    target = torch.tensor([rng.choice(mine) for mine in each], device=D).reshape(spread)
    return torch.tensor(sum(each, []), dtype=kind, device=D), offsets, target


def exact_support(input, weight, ids, offsets, target=None, ignore_index=-100, *, linear_bias=None, teacher_logp=None, softcap=0.0,
                  logit_scale=1.0, temperature=1.0):
    """The docstring's loop, by PyTorch. Without a weight input are the logits."""
    x, results, support = input.reshape(-1, input.shape[-1]), [], []
    for k in range(len(x)):
        mine = slice(int(offsets[k]), int(offsets[k + 1]))
        head = () if weight is None else (weight[ids[mine]], None if linear_bias is None else linear_bias[ids[mine]])
        z = F.linear(x[k], *head) if head else x[k, ids[mine]]
        z = z * (logit_scale.flatten()[k] if isinstance(logit_scale, torch.Tensor) and logit_scale.dim() else logit_scale)
        z = (softcap * torch.tanh(z / softcap) if softcap else z) / temperature
        ignored = target is not None and target.flatten()[k] == ignore_index
        logp = z.log_softmax(-1) * (0.0 if ignored else 1.0)
        support.append(logp)
        own = logp.new_zeros(()) if target is None or ignored else logp[ids[mine] == target.flatten()[k]][0]
        p, of_teacher = logp.exp(), None if teacher_logp is None else teacher_logp[mine].double()
        kl = logp.new_zeros(()) if of_teacher is None else torch.where(
            of_teacher == -INF, 0.0, of_teacher.exp() * (of_teacher.clamp(min=-1e9) - logp)).sum()
        zero = 0.0 if ignored else 1.0
        results.append(torch.stack([own, zero * z.logsumexp(-1), zero * -(p * logp).sum(), zero * kl]))
    rows = torch.stack(results, -1) if results else x.new_zeros(4, 0)
    logp, lse, entropy, kl = (r.reshape(input.shape[:-1]) for r in rows)
    return LF.SupportOutput(logp if target is not None else None, lse, entropy, kl if teacher_logp is not None else None,
                            torch.cat(support) if support else x.new_zeros(0))


def support_case(t, spread, hidden, vocab, most, options, biased=False, layout="packed", wants=(True,) * 5, teacher=True, target=True,
                 kind=torch.int64):
    """linear_support against the loop in float64, and its gradients for these results."""
    inputs = [leaf(normal(*spread, hidden), t, layout), leaf(normal(vocab, hidden, sigma=2 * hidden**-0.5), t)]
    if biased:
        inputs.append(leaf(normal(vocab), t))
    ids, offsets, y = supports(t, spread, vocab, most, kind)
    given = dict(teacher_logp=normal(len(ids)).to(D).masked_fill(torch.rand(len(ids), device=D) < 0.2, -INF) - 1) if teacher else {}
    call = lambda f, x, w, b=None: f(x, w, ids, offsets, y if target else None, linear_bias=b, **options, **given)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out, right = call(LF.linear_support, *inputs), call(exact_support, *exact)
    name = f"linear_support {t} {spread} {hidden} x {vocab} most={most} {options} {biased} {layout} {wants} {teacher} {target} {kind}"
    close(f"{name}: results", [o for o in out if o is not None], [r for r in right if r is not None], 2e-4)
    verdict(f"{name}: which there are", [o is None for o in out] == [r is None for r in right] and type(out) is LF.SupportOutput)
    ups = [torch.randn_like(o) if o is not None and wanted else None for o, wanted in zip(out, wants)]
    some = lambda results: [o for o, up in zip(results, ups) if up is not None]
    found = torch.autograd.grad(some(out), inputs, some(ups))
    wanted = torch.autograd.grad(some(right), exact, [up.double() for up in some(ups)])
    for what, a, b in zip(("input", "weight", "bias"), found, wanted):
        off, size = (a.double() - b).norm().item(), b.norm().item()
        verdict(f"{name}: gradient of {what}", a.dtype == t and off <= (3 * HALF[t] + 2e-5) * size + 1e-6, f"off by {off} of {size}")


def topk_case(t, spread, hidden, classes, k, options, bias=None, layout="packed"):
    """linear_topk against PyTorch in float64. Where two logits are as close as a sum in f32 is exact, either may come first."""
    x, w = leaf(normal(*spread, hidden), t, layout, grad=False), leaf(normal(classes, hidden), t, layout, grad=False)
    b = None if bias is None else leaf(normal(classes), bias, grad=False)
    cap, scale = options.get("softcap", 0), options.get("logit_scale", 1.0) / options.get("temperature", 1.0)
    cap = cap / options.get("temperature", 1.0)
    z = F.linear(x.double(), w.double(), None if b is None else b.to(t).double()) * scale
    z = cap * torch.tanh(z / cap) if cap else z
    out, lse = LF.linear_topk(x, w, k, linear_bias=b, **options), z.logsumexp(-1)
    name = f"linear_topk {t} {spread} {hidden} x {classes} k={k} {options} bias={bias} {layout}"
    off = 2e-5 * (1 + float(z.abs().max()))
    mine = z.gather(-1, out.ids)
    verdict(f"{name}: types", (out.logp.dtype, out.ids.dtype, out.lse.dtype) == (F32, torch.int64, F32) and
            out.logp.shape == out.ids.shape == (*spread, k) and out.lse.shape == spread and not out.logp.requires_grad)
    verdict(f"{name}: lse", bool(((out.lse - lse).abs() <= off).all()), f"{out.lse}, not {lse}")
    verdict(f"{name}: logp", bool(((out.logp - mine + lse[..., None]).abs() <= off).all()))
    verdict(f"{name}: ids", bool(((mine - z.topk(k).values).abs() <= off).all()) and all(len(set(r)) == k for r in out.ids.view(-1, k).tolist()))


def linear_topk():
    for t, layout in itertools.product(TYPES, LAYOUTS[:3]):
        topk_case(t, (6,), 16, 50, 5, {}, rng.choice((None, t, F32)), layout)
    for option in ({"softcap": 2.0}, {"logit_scale": 1.5}, {"temperature": 0.5}, {"softcap": 3.0, "temperature": 2.0}, {"workspace_mib": 64}):
        topk_case(F32, (2, 5), 24, 130, 64, option, F32)
        topk_case(BF16, (7,), 9, 30, 4, option)
    topk_case(F32, (), 8, 5, 5, {})
    topk_case(F16, (3,), 8, 3000, 64, {})
    x, w = leaf(normal(4, 8), grad=False), leaf(normal(9, 8))
    equal = LF.linear_topk(x, torch.zeros(9, 8, device=D), 4)
    verdict("of equal logits the smallest ids", equal.ids.tolist() == [[0, 1, 2, 3]] * 4)
    close("of equal logits logp", equal.logp, torch.full((4, 4), -math.log(9), device=D, dtype=torch.float64), 1e-6)
    masked = LF.linear_topk(x, w, 3, linear_bias=torch.tensor([0.0, 0.0] + [-INF] * 7, device=D))
    verdict("a masked class comes after all others", masked.logp[:, 2].eq(-INF).all() and masked.ids[:, 2].eq(2).all() and
            masked.ids[:, :2].sort(1).values.eq(torch.tensor([0, 1], device=D)).all())
    per_token = torch.tensor([1.0, 2.0, 3.0, 4.0], device=D)
    warm, right = LF.linear_topk(x, w, 3, temperature=per_token), LF.linear_topk(x / per_token[:, None], w, 3)
    verdict("a temperature for each token", torch.equal(warm.ids, right.ids))
    close("a temperature for each token", warm.logp, right.logp.double(), 1e-5)
    nothing = LF.linear_topk(x[:0], w, 3)
    verdict("no tokens", nothing.ids.shape == (0, 3) and nothing.lse.shape == (0,))
    with torch.no_grad():
        verdict("a model's hidden states, without gradients", torch.equal(LF.linear_topk(leaf(normal(4, 8)) * 0 + x, w, 2).ids, LF.linear_topk(x, w, 2).ids))
    many = 4000
    same, seed, offset = x[:1].expand(many, 8), torch.full((many,), 3, device=D), torch.arange(many, device=D)
    drawn, p = LF.linear_topk(same, w, 2, seed=seed, offset=offset), F.linear(x[:1].double(), w.double()).softmax(-1)[0]
    for what, got, want in (("first", drawn.ids[:, 0], p), ("second", drawn.ids[:, 1], sum(p[i] * p / (1 - p[i]) for i in range(9)) - p * p / (1 - p))):
        share = got.bincount(minlength=9) / many
        verdict(f"the {what} draw", bool(((share - want).abs() <= 4.5 * (want * (1 - want) / many).sqrt()).all()), f"{share}, not {want}")
    close("logp of draws", drawn.logp, p.log()[drawn.ids], 1e-5)
    verdict("draws without the batch", all(map(torch.equal, LF.linear_topk(same[7:9], w, 2, seed=seed[7:9], offset=offset[7:9]), [t[7:9] for t in drawn])))
    verdict("offset is 0 without one", torch.equal(LF.linear_topk(same, w, 2, seed=offset).ids, LF.linear_topk(same, w, 2, seed=offset, offset=0 * offset).ids))
    apart = LF.linear_topk(same.view(40, 100, 8), w, 2, seed=seed.view(40, 100), offset=offset.view(100, 40).t())
    verdict("draws of a batch, a strided offset", torch.equal(apart.ids.view(many, 2), LF.linear_topk(same, w, 2, seed=seed, offset=offset.view(100, 40).t().reshape(-1)).ids))
    y, seven = leaf(normal(6, 8)), leaf(normal(70, 8))
    ids = LF.linear_topk(y.detach(), seven, 5).ids
    logp = LF.linear_support(y, seven, ids.flatten(), torch.arange(0, ids.numel() + 1, 5, device=D)).support_logp.view(6, 5)
    q = F.linear(y, seven).gather(-1, ids).log_softmax(-1)
    close("the docstring's support", logp, q.double(), 1e-5)
    close("its gradients", torch.autograd.grad((logp.exp() * logp).sum(), (y, seven)),
          [g.double() for g in torch.autograd.grad((q.exp() * q).sum(), (y, seven))], 1e-4)
    full = LF.linear_cross_entropy_ids(y, seven, ids, reduction="none").logp
    close("logp of linear_cross_entropy_ids", full, LF.linear_topk(y.detach(), seven, 5).logp.double(), 1e-5)
    fast = torch.compile(lambda x, w: LF.linear_topk(x, w, 3), backend="aot_eager", fullgraph=True)
    verdict("compiled", all(map(torch.equal, fast(x, w), LF.linear_topk(x, w, 3))))
    fast = torch.compile(lambda x, w, s: LF.linear_topk(x, w, 3, seed=s, offset=s), backend="aot_eager", fullgraph=True)
    verdict("draws, compiled", all(map(torch.equal, fast(x, w, seed[:4]), LF.linear_topk(x, w, 3, seed=seed[:4], offset=seed[:4]))))
    for name, call, word, kind in (
            ("offset without seed", lambda: LF.linear_topk(x, w, 3, offset=seed[:4]), "offset is given", ValueError),
            ("seeds of other tokens", lambda: LF.linear_topk(x, w, 3, seed=seed[:5]), "seed has shape", ValueError),
            ("seeds of int32", lambda: LF.linear_topk(x, w, 3, seed=seed[:4].int()), "seed is Int", TypeError),
            ("a number as seed", lambda: LF.linear_topk(x, w, 3, seed=3), "seed", TypeError),
            ("k = 0", lambda: LF.linear_topk(x, w, 0), "k is 0", ValueError), ("k = 10 of 9", lambda: LF.linear_topk(x, w, 10), "k is 10", ValueError),
            ("k = 65", lambda: LF.linear_topk(y.detach(), seven, 65), "k is 65", ValueError),
            ("k = 2.5", lambda: LF.linear_topk(x, w, 2.5), "k", TypeError),
            ("an input with a gradient", lambda: LF.linear_topk(y, seven, 3), "input requires a gradient", ValueError),
            ("a weight of another width", lambda: LF.linear_topk(x, w[:, :7], 3), "linear_weight", ValueError),
            ("a bias of another length", lambda: LF.linear_topk(x, w, 3, linear_bias=w[:, 0][:8]), "linear_bias", ValueError),
            ("a weight of another type", lambda: LF.linear_topk(x, w.half(), 3), "linear_weight", TypeError),
            ("softcap below 0", lambda: LF.linear_topk(x, w, 3, softcap=-1.0), "softcap", ValueError),
            ("k = 10 of 9 on meta", lambda: LF.linear_topk(x.to("meta"), w.to("meta"), 10), "k is 10", ValueError),
            ("a learned temperature", lambda: LF.linear_topk(x, w, 3, temperature=per_token.clone().requires_grad_()), "temperature requires",
             ValueError),
            ("too little memory", lambda: LF.linear_topk(normal(64, 8).to(D), normal(20000, 8).to(D), 3, workspace_mib=1), "call needs at least",
             ValueError),
            ("workspace_mib = 0", lambda: LF.linear_topk(x, w, 3, workspace_mib=0), "workspace_mib", ValueError)):
        raises(f"linear_topk: {name}", call, word, kind=kind)


def linear_support():
    for t, wants in itertools.product(TYPES, ((True,) * 5, (True, False, False, False, False), (False, False, True, False, False),
                                              (False, False, False, True, True))):
        support_case(t, (6,), 16, 50, 5, {}, rng.random() < 0.5, rng.choice(LAYOUTS[:3]), wants, kind=rng.choice((torch.int32, torch.int64)))
    for option in ({"softcap": 2.0}, {"logit_scale": 1.5}, {"temperature": 0.5}, {"softcap": 3.0, "temperature": 2.0},
                   {"ignore_index": 3}):
        support_case(F32, (2, 5), 24, 30, 12, option, True)
        support_case(BF16, (7,), 9, 30, 4, option, teacher=False, target="ignore_index" in option)
    support_case(F32, (), 8, 5, 5, {})
    for k in range(4):
        support_case(rng.choice(TYPES), (40,), rng.choice((8, 64, 65)), 300, rng.choice((2, 40, 300)), {}, True)
    x, w = leaf(normal(4, 8)), leaf(normal(9, 8))
    ids, offsets = torch.tensor([1, 2, 9, 0, 3, 4], device=D), torch.tensor([0, 2, 4, 4, 6], device=D)
    target = torch.tensor([2, 0, 0, 3], device=D)
    out = LF.linear_support(x, w, ids, offsets, target)
    dx, dw = torch.autograd.grad(out.logp.sum(), (x, w))
    bad = torch.tensor([False, True, True, False], device=D)
    verdict("a bad id, no ids: these tokens alone are NaN", bool((out.logp.isnan() == bad).all() and (dx.isnan().all(1) == bad).all()
                                                                 and dw.isfinite().all() and not dw[[0, 5, 6, 7, 8]].any()))
    dx, = torch.autograd.grad(LF.linear_support(x, w, ids, offsets, target).logp[~bad].sum(), x)
    verdict("without a gradient above them they get 0", not dx[bad].any() and bool(dx[~bad].any(1).all()))
    good = ids.clamp(0, 8)
    two, one = LF.linear_support(x, w, good, torch.tensor([0, 2, 3, 4, 6], device=D)), LF.linear_support(
        x[3:], w, good, torch.tensor([4, 6], device=D))
    verdict("a token has the same bits alone", torch.equal(two.lse[3:], one.lse) and torch.equal(two.support_logp[4:], one.support_logp[4:]))
    per_token = torch.tensor([1.0, 2.0, 3.0, 4.0], device=D)
    warm, offsets = LF.linear_support(x, w, good, torch.tensor([0, 2, 3, 4, 6], device=D), temperature=per_token), two
    close("a temperature for each token", warm.lse, LF.linear_support((x / per_token[:, None]), w, good, torch.tensor(
        [0, 2, 3, 4, 6], device=D)).lse, 1e-5)
    nothing = LF.linear_support(x[:0], w, good[:0], torch.zeros(1, dtype=torch.int64, device=D), target[:0])
    none, = torch.autograd.grad(nothing.logp.sum() + nothing.lse.sum(), w)
    verdict("no tokens", nothing.logp.shape == (0,) and not none.any())
    none = torch.zeros(5, dtype=torch.int64, device=D)
    out = LF.linear_support(x, w, good[:0], none, torch.full((4,), -100, device=D))
    dx, = torch.autograd.grad((out.support_logp * normal(0).to(D)).sum() + out.lse.sum(), x)
    verdict("tokens without ids, all ignored", not out.lse.any() and not dx.any())
    dx, = torch.autograd.grad(LF.linear_support(x, w, good[:0], none).support_logp, x, normal(0).to(D))
    verdict("a gradient of no entry", not dx.any())
    wide = torch.tensor([2**32 + 1, 0, 3, 2**32], device=D)
    far = LF.linear_support(x, w, good.int(), torch.tensor([0, 2, 3, 4, 6], device=D), wide, ignore_index=2**32)
    verdict("a target beyond int32 is bad, or ignored", bool(far.logp[0].isnan()) and far.logp[3].item() == 0)
    at = torch.tensor([0, 2, 3, 4, 6], device=D)
    wrong = [("ids of two dimensions", lambda: LF.linear_support(x, w, good[None], at), "ids", ValueError),
             ("float ids", lambda: LF.linear_support(x, w, good.float(), at), "ids", TypeError),
             ("offsets too short", lambda: LF.linear_support(x, w, good, at[1:]), "offsets", ValueError),
             ("float offsets", lambda: LF.linear_support(x, w, good, at.float()), "offsets", TypeError),
             ("target of another shape", lambda: LF.linear_support(x, w, good, at, target[:2]), "target", ValueError),
             ("a float target", lambda: LF.linear_support(x, w, good, at, target.float()), "target", TypeError),
             ("teacher_logp of another shape", lambda: LF.linear_support(x, w, good, at, teacher_logp=per_token), "teacher_logp", ValueError),
             ("teacher_logp of ids", lambda: LF.linear_support(x, w, good, at, teacher_logp=good), "teacher_logp", TypeError),
             ("teacher_logp with a gradient", lambda: LF.linear_support(x, w, good, at, teacher_logp=leaf(normal(6))), "teacher_logp", ValueError),
             ("a weight of another width", lambda: LF.linear_support(x, w[:, :7], good, at), "linear_weight", ValueError),
             ("a bias of another length", lambda: LF.linear_support(x, w, good, at, linear_bias=w[:, 0][:8]), "linear_bias", ValueError),
             ("ids that are no tensor", lambda: LF.linear_support(x, w, [1, 2], at), "ids", TypeError),
             ("softcap below 0", lambda: LF.linear_support(x, w, good, at, softcap=-1.0), "softcap", ValueError)]
    for name, call, word, kind in wrong:
        raises(f"linear_support: {name}", call, word, kind=kind)


def logits_case(t, spread, vocab, most, options, layout="packed", wants=(True,) * 5, teacher=True, target=True, kind=torch.int64,
                repeat=True, upstream="packed"):
    """support against the same loop in float64, and the gradient of logits: dense, of their type, 0 at all classes but the ids."""
    x = leaf(normal(*spread, vocab, sigma=2.0), t, layout)
    ids, offsets, y = supports(t, spread, vocab, most, kind, repeat)
    given = dict(teacher_logp=normal(len(ids)).to(D).masked_fill(torch.rand(len(ids), device=D) < 0.2, -INF) - 1) if teacher else {}
    exact = x.detach().double().requires_grad_()
    out = LF.support(x, ids, offsets, y if target else None, **options, **given)
    right = exact_support(exact, None, ids, offsets, y if target else None, **options, **given)
    name = f"support {NAMES[t]} {spread} x {vocab} most={most} {options} {layout} {wants} {teacher} {target} {kind} {repeat} {upstream}"
    verdict(f"{name}: which there are", [o is None for o in out] == [r is None for r in right] and type(out) is LF.SupportOutput
            and all(o.dtype == F32 for o in out if o is not None))
    close(f"{name}: results", [o for o in out if o is not None], [r for r in right if r is not None], 32 * U)
    ups = [upstream_of(o, upstream) if o is not None and wanted else None for o, wanted in zip(out, wants)]
    some = lambda results: [o for o, up in zip(results, ups) if up is not None]
    dx, = torch.autograd.grad(some(out), x, some(ups))
    wanted, = torch.autograd.grad(some(right), exact, [up.double() for up in some(ups)])
    others = torch.ones(math.prod(spread), vocab, dtype=torch.bool, device=D)
    others[torch.arange(len(others), device=D).repeat_interleave(offsets.diff()), ids.long()] = False
    dense = dx.dtype == t and dx.shape == x.shape and dx.is_contiguous()
    verdict(f"{name}: a dense gradient", dense and not dx.view(-1, vocab)[others].any())
    most = wanted.abs().max()
    compare(f"{name}: gradient", ("dx", dx, wanted, rounded(wanted, 64 * U * (most + 1), t)))


def support():
    for t, wants in itertools.product(TYPES, ((True,) * 5, (True, False, False, False, False), (False, True, False, False, False),
                                              (False, False, True, False, False), (False, False, False, True, True))):
        logits_case(t, (6,), 50, 5, {}, rng.choice(LAYOUTS), wants, kind=rng.choice((torch.int32, torch.int64)))
    for t, layout in itertools.product(TYPES, LAYOUTS):
        logits_case(t, (3, 4), 21, 9, {}, layout, teacher=rng.random() < 0.5, repeat=False, upstream=rng.choice(UPSTREAMS))
    for option in ({"softcap": 2.0}, {"logit_scale": 1.5}, {"temperature": 0.5}, {"softcap": 3.0, "temperature": 2.0},
                   {"ignore_index": 3}):
        logits_case(F32, (2, 5), 30, 12, option)
        logits_case(BF16, (7,), 30, 4, option, teacher=False, target="ignore_index" in option)
    logits_case(F32, (), 5, 5, {})
    whole = leaf(normal(2, 4, 11))
    ids, offsets, _ = supports(F32, (2, 3), 11, 5)
    ours, theirs = (f(whole[:, :-1]) for f in (lambda x: LF.support(x, ids, offsets).entropy, lambda x: exact_support(
        x.double(), None, ids, offsets).entropy))
    up = leaf(normal(3, 2), grad=False).t()
    close("support: all tokens but the last", (ours, torch.autograd.grad(ours, whole, up)[0]),
          (theirs, torch.autograd.grad(theirs, whole, up.double())[0].double()), 64 * U)
    logits_case(F16, (300,), 40, 40, {}, "one more")  # many tokens with an id: runs of the sort
    logits_case(BF16, (2,), 3, 700, {})  # an id hundreds of times in one support
    x = leaf(normal(4, 9))
    ids, offsets = torch.tensor([1, 2, 9, 0, 3, 4], device=D), torch.tensor([0, 2, 4, 4, 6], device=D)
    target, bad = torch.tensor([2, 0, 0, 3], device=D), torch.tensor([False, True, True, False], device=D)
    out = LF.support(x, ids, offsets, target)
    dx, = torch.autograd.grad(out.logp.sum(), x)
    verdict("support: a bad id, no ids: these tokens alone are NaN", bool((out.logp.isnan() == bad).all()
                                                                          and (dx.isnan() == bad[:, None]).all()))
    dx, = torch.autograd.grad(LF.support(x, ids, offsets, target).logp[~bad].sum(), x)
    verdict("support: without a gradient above them they get 0", not dx[bad].any() and bool(dx[~bad].any(1).all()))
    good, at = ids.clamp(0, 8), torch.tensor([0, 2, 3, 4, 6], device=D)
    first, one = LF.support(x, good, at), LF.support(x[3:], good, torch.tensor([4, 6], device=D))
    verdict("support: a token has the same bits alone", torch.equal(first.lse[3:], one.lse)
            and torch.equal(first.support_logp[4:], one.support_logp[4:]))
    eye = torch.eye(9, device=D)
    head = LF.linear_support(x, eye, good, at, torch.tensor([2, 8, 0, 3], device=D), teacher_logp=first.support_logp.detach() - 1)
    ours = LF.support(x, good, at, torch.tensor([2, 8, 0, 3], device=D), teacher_logp=first.support_logp.detach() - 1)
    verdict("support: as linear_support of these logits", all(map(torch.equal, ours, head)))
    verdict("support: and its gradient", all(torch.equal(*(torch.autograd.grad(o[k].sum(), x, retain_graph=True)[0] for o in (ours, head)))
                                             for k in range(5)))
    warm = [leaf(torch.tensor([1.0, 2.0, 3.0, 4.0])), leaf(torch.tensor(0.7)), torch.nn.Parameter(torch.ones(1, device=D))]
    for scale, t in itertools.product(warm, (F32, BF16)):
        leaves = [leaf(normal(4, 9), t), scale]
        exact = [v.detach().double().requires_grad_() for v in leaves]
        ups = normal(4).to(D)
        for name, f, e in (("logit_scale", lambda x, s: LF.support(x, good, at, logit_scale=s),
                            lambda x, s: exact_support(x, None, good, at, logit_scale=s.squeeze())),
                           ("temperature", lambda x, s: LF.support(x, good, at, temperature=s),
                            lambda x, s: exact_support(x, None, good, at, logit_scale=(1 / s).squeeze()))):
            for result in ("lse", "entropy"):
                out, right = getattr(f(*leaves), result), getattr(e(*exact), result)
                (dx, ds), (wx, ws) = torch.autograd.grad(out, leaves, ups), torch.autograd.grad(right, exact, ups.double())
                verdict(f"support: {name} {list(scale.shape)} {NAMES[t]}: type of the gradient", dx.dtype == t)
                close(f"support: {name} {list(scale.shape)} {NAMES[t]}, {result}", (out, dx, ds), (right, wx, ws), 256 * U + HALF[t])
    raises("support: scales for three of four tokens", lambda: LF.support(x, good, at, logit_scale=warm[0][:3]), "logit_scale",
           kind=ValueError)
    raises("support: a temperature for each token and a softcap", lambda: LF.support(x, good, at, temperature=warm[0], softcap=2.0),
           "softcap", kind=ValueError)
    nothing = LF.support(x[:0], good[:0], at[:1], target[:0])
    none, = torch.autograd.grad(nothing.logp.sum() + nothing.lse.sum(), x)
    verdict("support: no tokens", nothing.logp.shape == (0,) and not none.any())
    out = LF.support(x, good[:0], at * 0, torch.full((4,), -100, device=D))
    dx, = torch.autograd.grad((out.support_logp * normal(0).to(D)).sum() + out.lse.sum(), x)
    verdict("support: tokens without ids, all ignored", not out.lse.any() and not dx.any())
    dx, = torch.autograd.grad(LF.support(x, good[:0], at * 0).support_logp, x, normal(0).to(D))
    verdict("support: a gradient of no entry", not dx.any())
    wide = torch.tensor([2**32 + 1, 0, 3, 2**32], device=D)
    far = LF.support(x, good.int(), at, wide, ignore_index=2**32)
    verdict("support: a target beyond int32 is bad, or ignored", bool(far.logp[0].isnan()) and far.logp[3].item() == 0)
    masked = leaf(torch.tensor([[-INF, 0.0, 1.0], [-INF, -INF, -INF], [0.0, INF, 1.0]]))
    out = LF.support(masked, torch.tensor([0, 1, 0, 1, 1, 2], device=D), torch.tensor([0, 2, 4, 6], device=D))
    dx, = torch.autograd.grad(out.lse[0], masked)
    verdict("support: logits of -inf and inf", out.support_logp[:2].tolist() == [-INF, 0.0] and bool(out.lse[1:].isnan().all())
            and dx[0].tolist() == [0.0, 1.0, 0.0] and dx[1:].isnan().tolist() == [[True, True, False], [False, True, True]])
    with torch.no_grad():
        verdict("support: no_grad", not any(o.requires_grad for o in LF.support(x, good, at, target) if o is not None))
    verdict("support: logits without a gradient", not LF.support(x.detach(), good, at).lse.requires_grad)
    big = leaf(normal(64, 4096), BF16)
    each, starts, _ = supports(BF16, (64,), 4096, 3)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.untyped_storage().nbytes()) or t, lambda t: t):
        LF.support(big, each, starts)
    verdict("support: logits are not kept", 0 < sum(kept) < big.nbytes // 16, f"{kept} bytes, and logits have {big.nbytes}")
    middle = big * 1.0
    out, right = LF.support(middle, each, starts).lse, torch.autograd.grad(LF.support(big, each, starts).lse.sum(), big)[0]
    middle.zero_()
    verdict("support: logits may be overwritten before backward", torch.equal(torch.autograd.grad(out.sum(), big)[0], right))
    with torch.autocast(D, dtype=BF16):
        mixed, of_half = LF.support(x, good, at), LF.support(x.to(BF16), good, at)
    verdict("support: autocast changes nothing", torch.equal(mixed.lse, first.lse) and not torch.equal(of_half.lse, first.lse))
    wrong = [("ids of two dimensions", lambda: LF.support(x, good[None], at), "ids", ValueError),
             ("float ids", lambda: LF.support(x, good.float(), at), "ids", TypeError),
             ("offsets too short", lambda: LF.support(x, good, at[1:]), "offsets", ValueError),
             ("float offsets", lambda: LF.support(x, good, at.float()), "offsets", TypeError),
             ("target of another shape", lambda: LF.support(x, good, at, target[:2]), "target", ValueError),
             ("a float target", lambda: LF.support(x, good, at, target.float()), "target", TypeError),
             ("teacher_logp of another shape", lambda: LF.support(x, good, at, teacher_logp=warm[0].detach()), "teacher_logp", ValueError),
             ("teacher_logp of ids", lambda: LF.support(x, good, at, teacher_logp=good), "teacher_logp", TypeError),
             ("teacher_logp with a gradient", lambda: LF.support(x, good, at, teacher_logp=leaf(normal(6))), "teacher_logp", ValueError),
             ("logits of float64", lambda: LF.support(x.double(), good, at), "logits must be float32", TypeError),
             ("logits of no dimension", lambda: LF.support(x[0, 0], good, at), "logits needs at least one dimension", ValueError),
             ("logits of no classes", lambda: LF.support(x[:, :0], good, at), "vocab", ValueError),
             ("logits that are no tensor", lambda: LF.support([1.0], good, at), "logits is of type list", TypeError),
             ("offsets on meta", lambda: LF.support(x, good, at.to("meta")), "offsets", ValueError),
             ("ids that are no tensor", lambda: LF.support(x, [1, 2], at), "ids", TypeError),
             ("logit_scale of 0", lambda: LF.support(x, good, at, logit_scale=0.0), "logit_scale", ValueError),
             ("temperature of 0", lambda: LF.support(x, good, at, temperature=0.0), "temperature", ValueError),
             ("shards without a group", lambda: LF.support(x, good, at, shards=[9]), "shards", ValueError),
             ("softcap below 0", lambda: LF.support(x, good, at, softcap=-1.0), "softcap", ValueError)]
    for name, call, word, kind in wrong:
        raises(f"support: {name}", call, word, kind=kind)
    LF.CHECK_TARGETS = True
    try:
        raises("support: LK_CHECK_TARGETS, ids", lambda: LF.support(x, ids, at), "ids[2] is 9; it must be 0 to 8", kind=ValueError)
        raises("support: LK_CHECK_TARGETS, target", lambda: LF.support(x, good, at, target + 6), "target[3] is 9", kind=ValueError)
        verdict("support: LK_CHECK_TARGETS, good ones", torch.equal(LF.support(x, good, at).lse, first.lse))
    finally:
        LF.CHECK_TARGETS = False


def head_ids_tails():
    for t, reduction, wants, weighted in itertools.product(TYPES, ("none", "mean", "sum"), (
            (True, False, False), (False, False, True), (True, True, True)), (True, False)):
        head_ids_case(t, (6,), 16, 50, 5, dict(reduction=reduction), weighted, wants, rng.random() < 0.5, rng.choice(LAYOUTS[:3]),
                      tails=True)
    for option in ({"z_loss": 2.0**-7}, {"logit_scale": 1.5}, {"ignore_index": 3}, {"workspace_mib": 1}):
        head_ids_case(F32, (2, 5), 24, 300, 33, option, True, (True, True, True), True, tails=True)
    for weighted in (True, False):  # some tokens are ignored
        head_ids_case(F32, (30,), 8, 5, 2, {"ignore_index": 3}, weighted, (True, True, True), tails=True)
    head_ids_case(BF16, (500,), 16, 1000, 3, dict(reduction="sum", workspace_mib=1), True, (True, True, True), tails=True)
    # The logits are the first column of the weight, exactly. The second token's tail has a probability of 1e-52.
    x, w = torch.zeros(2, 8, device=D), torch.zeros(40, 8, device=D)
    x[:, 0], w[:3, 0] = 1.0, torch.tensor([30.0, 31.0, 150.0], device=D)
    x.requires_grad_(), w.requires_grad_()
    tail = LF.linear_cross_entropy_ids(x, w, torch.tensor([[0, 1], [0, 2]], device=D), tail=True).tail
    exact = torch.log_softmax(w[:, 0].detach().double(), -1)[[1, *range(3, 40)]].logsumexp(0)
    close("the head's tail far below", tail[1], exact, 1e-4)
    slope, = torch.autograd.grad(tail[1], w)
    close("its gradient", slope[1, 0], exact.new_tensor(1 - 37 * math.exp(-31)), 1e-5)
    gradients = []
    for which in ((x,), (w,), (x, w)):  # each alone has the bits that it has beside the other
        out = LF.linear_cross_entropy_ids(*(v if any(v is a for a in which) else v.detach() for v in (x, w)),
                                          torch.tensor([[0, 1], [0, 5]], device=D), tail_weight=torch.ones(2, device=D))
        gradients += torch.autograd.grad(out.loss + out.tail.sum(), which)
    verdict("a frozen weight, a frozen input", torch.equal(gradients[0], gradients[2]) and torch.equal(gradients[1], gradients[3]))
    every = LF.linear_cross_entropy_ids(x, w[:2], torch.tensor([[0, 1]] * 2, device=D), tail_weight=torch.zeros(2, device=D))
    verdict("the head's classes are all ids", bool((every.tail == -math.inf).all() and every.loss.isfinite()))
    x, w, ids = leaf(normal(4, 8)), leaf(normal(9, 8)), torch.tensor([[1, 2], [9, 0], [3, 3], [-100, -100]], device=D)
    for more in (dict(tail_weight=torch.ones(4, device=D)), dict(tail=True)):
        out = LF.linear_cross_entropy_ids(x, w, ids, reduction="none", **more)
        dx, dw = torch.autograd.grad(out.loss.sum() + out.tail.sum(), (x, w))
        bad = torch.tensor([False, True, False, False], device=D)
        verdict(f"a bad id, {list(more)}: its token alone is NaN", bool((out.tail.isnan() == bad).all() and (
            out.loss.isnan() == bad).all() and (dx.isnan().all(1) == bad).all() and dw.isfinite().all()))
        verdict("the tail of an ignored token is 0, and its gradient", out.tail[3].item() == 0 and not dx[3].any())
    nothing = LF.linear_cross_entropy_ids(x[:0], w, ids[:0], reduction="sum", tail=True)
    none, = torch.autograd.grad(nothing.loss + nothing.tail.sum(), w)
    verdict("a tail of no tokens", nothing.tail.shape == (0,) and nothing.loss.item() == 0 and not none.any())
    ids = ids.clamp(0, 8)
    raises("the head's tail weights of another shape", lambda: LF.linear_cross_entropy_ids(
        x, w, ids, tail_weight=torch.ones(3, device=D)), "tail_weight", kind=ValueError)
    raises("the head's tail weights of another type", lambda: LF.linear_cross_entropy_ids(x, w, ids, tail_weight=ids[:, 0]),
           "tail_weight", kind=TypeError)
    raises("the head's tail weights with a gradient", lambda: LF.linear_cross_entropy_ids(x, w, ids, tail_weight=leaf(normal(4))),
           "tail_weight", kind=ValueError)


def linear_cross_entropy_ids():
    for t, reduction, wants in itertools.product(TYPES, ("none", "mean", "sum"), ((True, False), (True, True), (False, True))):
        head_ids_case(t, (6,), 16, 50, 5, dict(reduction=reduction), True, wants, rng.random() < 0.5, rng.choice(LAYOUTS[:3]))
    for option in ({"z_loss": 2.0**-7}, {"logit_scale": 1.5}, {"ignore_index": 3}, {"workspace_mib": 1}, {}):
        head_ids_case(F32, (2, 5), 24, 300, 33, option, True, (True, True), True)
    head_ids_case(BF16, (4, 3), 16, 41, 128, dict(reduction="sum"), False, (True, True))
    head_ids_tails()
    x, w, ids = leaf(normal(4, 8)), leaf(normal(9, 8)), torch.tensor([[1, 2], [9, 0], [3, 3], [8, 4]], device=D)
    out = LF.linear_cross_entropy_ids(x, w, ids, reduction="none")
    dx, dw = torch.autograd.grad(out.loss.sum(), (x, w))
    bad = torch.tensor([False, True, False, False], device=D)
    verdict("a bad id: its token alone is NaN",
            bool((out.loss.isnan() == bad).all() and (dx.isnan().all(1) == bad).all() and dw.isfinite().all()))
    ids = ids.clamp(0, 8)
    some = torch.cat([ids, ids]).clone()
    some[1::2] = -100
    up = normal(8, 2).to(D)
    for t, most, tail in itertools.product(TYPES, (4, 5), (False, True)):
        a, aw, ab = (leaf(q, t) for q in (torch.cat([x.detach()] * 2), w.detach(), normal(9)))
        spoiled = leaf(torch.where(some[:, :1] < 0, NAN, a.detach().float()), t)  # the other tokens' rows may be anything
        def run(a, **more):
            out = LF.linear_cross_entropy_ids(a, aw, some, linear_bias=ab, tail=tail, **more)
            return [*out, *torch.autograd.grad(out.loss + (out.logp * up).sum(), [a, aw, ab])]
        close(f"{NAMES[t]} max_counted {most}, tail {tail}", run(spoiled, max_counted=most), run(a), 256 * U if t == F32 else 4 * HALF[t])
    verdict("more tokens than max_counted: NaN everywhere", all(bool(q.isnan().all()) for q in run(a, max_counted=3)))
    raises("max_counted below 0", lambda: run(a, max_counted=-1), "max_counted", kind=ValueError)
    one = LF.linear_cross_entropy_ids(x, w, ids[:, :1])
    close("one id of weight 1: linear_cross_entropy", one.loss, LF.linear_cross_entropy(x, w, ids[:, 0]), 1e-6)
    two = LF.linear_cross_entropy_ids(x, w, ids, temperature=0.5, reduction="none")
    close("temperature", two.logp, torch.log_softmax(2 * F.linear(x, w), -1).gather(-1, ids), 1e-5)
    nothing = LF.linear_cross_entropy_ids(x[:0], w, ids[:0], reduction="sum")
    close("no tokens", [nothing.loss, *torch.autograd.grad(nothing.loss, w)], [torch.zeros((), device=D), torch.zeros_like(w)])
    raises("the head's ids of another shape", lambda: LF.linear_cross_entropy_ids(x, w, ids[:2]), "target_ids", kind=ValueError)
    raises("the head's float ids", lambda: LF.linear_cross_entropy_ids(x, w, ids.float()), "target_ids", kind=TypeError)
    raises("weights with a gradient", lambda: LF.linear_cross_entropy_ids(x, w, ids, leaf(normal(4, 2))), "target_weight",
           kind=ValueError)
    raises("a weight of another width", lambda: LF.linear_cross_entropy_ids(x, w[:, :7], ids), "linear_weight", kind=ValueError)
    raises("a bias of another length", lambda: LF.linear_cross_entropy_ids(x, w, ids, linear_bias=w[:, 0][:8]), "linear_bias",
           kind=ValueError)
    raises("a workspace of 0", lambda: LF.linear_cross_entropy_ids(x, w, ids, workspace_mib=0), "workspace_mib", kind=ValueError)


def cross_entropy_stats():
    for t, reduction, shape in itertools.product(TYPES, ("none", "mean", "sum"), ((6, 50), (2, 1031), (4, 7, 5), (40,))):
        for outputs in ((0, 1, 3), rng.choice(((0,), (1,), (3,)))):
            options, weight = draw_options(shape[0] if len(shape) == 1 else shape[1], reduction)
            stats_case(t, shape, rng.choice(LAYOUTS), options, weight, outputs)


def statistics():
    """statistics=True: three results more, against float64; the others are the same, and so are all gradients."""
    names = ("log_sum_sq_probs", "mean_logits", "top_logprob")
    for t, head, (spread, vocab) in itertools.product(TYPES, (False, True), (((6,), 50), ((3, 4), 301))):
        options, weight = draw_options(vocab, rng.choice(("none", "mean", "sum")))
        target = draw_targets(vocab, spread, options["ignore_index"])
        if head:
            leaves = [leaf(normal(*spread, 16), t), leaf(normal(vocab, 16, sigma=0.5), t)]
            f = lambda x, w, **more: LF.linear_cross_entropy_stats(x, w, target, weight=weight, **options, **more)
        else:
            leaves = [leaf(normal(*spread, vocab, sigma=2.0), t)]
            f = lambda x, **more: LF.cross_entropy_stats(x.movedim(-1, 1), target, weight, **options, **more)
        with torch.no_grad():
            z = leaves[0].double() @ leaves[1].double().t() if head else leaves[0].double()
            z = z * options["logit_scale"]
            z = options["softcap"] * torch.tanh(z / options["softcap"]) if options["softcap"] else z
            logp, gone = z.log_softmax(-1), target == options["ignore_index"]
            exact = [v.masked_fill(gone, 0) for v in ((2 * logp).logsumexp(-1), z.mean(-1), logp.amax(-1))]
        out, plain = f(*leaves, statistics=True), f(*leaves)
        name = f"{'linear_' * head}cross_entropy_stats {t} {spread} x {vocab}, {options['reduction']}"
        verdict(f"{name}: names", out._fields == (*plain._fields, *names), str(out._fields))
        # Sums may have another order: the plan has room for fewer stretches of columns, since their states are larger.
        close(f"{name}: the other results", out[:len(plain)], plain)
        wants = [v.requires_grad for v in out[len(plain):]]
        verdict(f"{name}: no gradients", not any(wants), str(wants))
        found = [getattr(out, n) for n in names]
        compare(name, *[(n, a, b, 2e-5 * (1 + b.abs())) for n, a, b in zip(names, found, exact)])
        ours, theirs = (torch.autograd.grad(sum_of(o), leaves) for o in (out, plain))
        close(f"{name}: gradients", ours, theirs, 64 * U if t == F32 else HALF[t])
        torch._dynamo.reset()
        fast = torch.compile(functools.partial(f, statistics=True), backend="aot_eager", fullgraph=True)
        attempt(f"{name}: compiled", lambda: close(f"{name}: compiled", fast(*leaves), out))
    torch._dynamo.reset()


# ---- linear_cross_entropy ---------------------------------------------------------------------------------------------------


def linear_case(t, spread, hidden, vocab, options, weight, bias_type=None, wants=(True, True, True), layout="packed",
                upstream=None, stats=None, **more):
    """x [spread, hidden] times weight [vocab, hidden]; bounds by lk/linear_cross_entropy.cuh.

    stats: linear_cross_entropy_stats, with upstream gradients of these of loss, lse, entropy."""
    target = draw_targets(vocab, spread, options.get("ignore_index", -100))
    flat, reduced = target.reshape(-1), options["reduction"] != "none"
    inputs = [leaf(normal(*spread, hidden), t, layout, wants[0]),
              leaf(normal(vocab, hidden, sigma=2 * hidden**-0.5), t, "gaps" if layout == "gaps" else "packed", wants[1])]
    if bias_type:
        inputs.append(leaf(normal(vocab), bias_type, rng.choice(("packed", "second rows")), wants[2]))

    def logits_of(x, w, b=None):
        return F.linear(x, w, b).reshape(-1, vocab)

    def exact(x, w, b=None):
        loss, lse, _, entropy = exact_loss(logits_of(x, w, b), flat, weight, options)
        loss = loss.reshape(() if reduced else spread)
        return (loss, lse.reshape(spread), entropy.reshape(spread)) if stats else loss

    def ours(x, w, b=None):
        if not stats:
            return LF.linear_cross_entropy(x, w, target, linear_bias=b, weight=weight, **options, **more)
        out = LF.linear_cross_entropy_stats(x, w, target, linear_bias=b, weight=weight, **options, **more)
        top = logits_of(x.detach().double(), w.detach().double(), None if b is None else b.detach().double())
        counted, found = flat != options.get("ignore_index", -100), out.argmax.reshape(-1)
        near = top.gather(1, found.clamp(min=0)[:, None])[:, 0] >= top.amax(1) - 1e-3
        verdict("argmax of linear_cross_entropy_stats", bool(torch.where(counted, near, found == -1).all()), f"{found}")
        return out.loss, out.lse, out.entropy

    def bounds(doubles, outs, ups, gradients):
        x, w = doubles[0].reshape(-1, hidden), doubles[1]
        logits = logits_of(*doubles).requires_grad_()
        up = ups[0] if ups[0] is None or reduced else ups[0].reshape(-1)
        size = x.abs() @ w.abs().t() + (doubles[2].abs() if bias_type else 0.0)
        logit_error = ((2 * hidden + 4) * U * size).amax(1, keepdim=True)
        dlse, dentropy = (None if not stats or u is None else u.reshape(-1) for u in (ups + [None, None])[1:3])
        loss, lse, _, entropy, dz = loss_bounds(logits.detach(), flat, weight, options, up, dlse, logit_error, dentropy)
        errors = [e.reshape(o.shape) for e, o in zip((loss, lse, entropy), outs)]
        if dz is None:
            return errors, []
        loss, lse, _, entropy = exact_loss(logits, flat, weight, options)
        parts = [(o, u) for o, u in ((loss, up), (lse, dlse), (entropy, dentropy)) if u is not None]
        g, = torch.autograd.grad([o for o, _ in parts], logits, [u for _, u in parts])
        g = g.nan_to_num().abs()
        # dZ is rounded to T, and by the plan FUSED once more, as are the rows of x; a tail of columns is added in T.
        dz = dz + (3 if CUDA or more.get("keep") else 1) * HALF[t] * g
        tail = vocab % 8
        dx = dz @ w.abs() + 2 * vocab * U * (g @ w.abs()) + HALF[t] * (g[:, vocab - tail:] @ w[vocab - tail:].abs())
        dw = dz.t() @ x.abs() + 2 * len(x) * U * (g.t() @ x.abs())
        db = dz.sum(0) + 2 * len(x) * U * g.sum(0)
        return errors, [e.view_as(d) for e, d, want in zip((dx, dw, db), doubles, wants) if want]
    hold(case_name(t, (*spread, hidden, vocab), options, weight, f"bias {NAMES.get(bias_type)}, wants {wants}, {layout}", more),
         ours, exact, inputs, bounds, upstream, stats, dtypes=[F32] * (3 if stats else 1), twice=reduced)


def linear_prob_case(t, spread, hidden, vocab, options, weight, q_type=F32, bias_type=None, stats=None, **more):
    """Class probabilities as targets of a head, against PyTorch in float64."""
    o, reduced = types.SimpleNamespace(**{**PLAIN, **options}), options["reduction"] != "none"
    q = torch.softmax(normal(*spread, vocab, sigma=2.0), -1).to(q_type)
    inputs = [leaf(normal(*spread, hidden), t), leaf(normal(vocab, hidden, sigma=2 * hidden**-0.5), t)]
    if bias_type:
        inputs.append(leaf(normal(vocab), bias_type))
    u = q.double().reshape(-1, vocab) * (1 - o.label_smoothing) + o.label_smoothing / vocab
    u = u if weight is None else u * weight.double()

    def exact(x, w, b=None):
        z = capped(F.linear(x, w, b).reshape(-1, vocab), o)
        lse = torch.logsumexp(z, 1)
        loss = (u * (lse[:, None] - z)).sum(1) + o.z_loss * lse**2
        over = 1 if o.reduction != "mean" else o.denominator.double().reshape(()) if o.denominator is not None else len(loss)
        loss = loss.sum() / over if reduced else loss.reshape(spread)
        logp = z - lse[:, None]
        return (loss, lse.reshape(spread), -(logp.exp() * logp).sum(1).reshape(spread)) if stats else loss

    def ours(x, w, b=None):
        function = LF.linear_cross_entropy_stats if stats else LF.linear_cross_entropy
        out = function(x, w, q, linear_bias=b, weight=weight, **options, **more)
        return (out.loss, out.lse, out.entropy) if stats else out

    def bounds(doubles, outs, ups, gradients):
        x, w = doubles[0].reshape(-1, hidden), doubles[1]
        size = (x.abs() @ w.abs().t()).max() + (doubles[2].abs().max() if bias_type else 0.0)
        off = (2 * hidden + 4) * U * size + (HALF[t] * size if more.get("fast_logits") else 0.0)  # of a logit
        errors = [(1e-5 + 4 * off) * (u.abs().sum() if a.dim() == 0 and o.reduction == "sum" else 1) * (1 + magnitude(a)) for a in outs]
        if not gradients:
            return errors, []
        up = sum(magnitude(a).max() for a in ups if a is not None)
        over = len(u) if o.reduction == "mean" else 1
        dz = up / over * (1 + u.sum(1).max()) * (HALF[t] + 8 * off + 2e-6) * torch.ones_like(u)
        parts = (dz @ w.abs(), dz.t() @ x.abs(), dz.sum(0))
        return errors, [2 * e.view_as(d) for e, d in zip(parts, doubles)]
    hold(case_name(t, (*spread, hidden, vocab), options, weight, f"probabilities {NAMES[q_type]}, bias {NAMES.get(bias_type)}", more),
         ours, exact, inputs, bounds, outputs=stats, dtypes=[F32] * (3 if stats else 1), twice=reduced)


def linear_probabilities():
    for t, reduction, (spread, hidden, vocab) in itertools.product(TYPES, ("none", "mean", "sum"), [((6,), 16, 50), ((3, 4), 24, 101), ((), 8, 30)]):
        options, weight = draw_options(vocab, reduction)
        options = {k: v for k, v in options.items() if k not in ("ignore_index", "row_weight", "zero_when_empty")}
        fast = rng.random() < 0.5
        linear_prob_case(t, spread, hidden, vocab, options, weight, rng.choice((F32, t)), rng.choice((None, t, F32)), fast_logits=fast,
                         workspace_mib=rng.choice((1, 64, None)))
        linear_prob_case(t, spread, hidden, vocab, options, weight, stats=(0, 1, 2))
    x, w, q = leaf(normal(6, 16), BF16), leaf(normal(40, 16), BF16), torch.softmax(normal(6, 40), 1)
    loss = lambda x, w, **more: LF.linear_cross_entropy(x, w, q, **more)
    torch._dynamo.reset()
    fast = torch.compile(loss, backend="aot_eager", fullgraph=True)
    close("linear probabilities: compiled", torch.autograd.grad(fast(x, w), [x, w]), torch.autograd.grad(loss(x, w), [x, w]),
          4 * HALF[BF16])
    torch._dynamo.reset()
    close("linear probabilities: keep", loss(x, w, reduction="none", keep=True), loss(x, w, reduction="none"))
    one = torch.nn.functional.one_hot(classes(40, 6), 40).float()
    close("linear probabilities of 1", LF.linear_cross_entropy(x, w, one), LF.linear_cross_entropy(x, w, one.argmax(1)), 1e-5)
    for name, call, says in (
            ("max_counted", lambda: loss(x, w, max_counted=3), "max_counted"),
            ("batch_invariant", lambda: loss(x, w, batch_invariant=True), "batch_invariant"),
            ("ignore_index", lambda: loss(x, w, ignore_index=1), "ignore_index"),
            ("statistics", lambda: LF.linear_cross_entropy_stats(x, w, q, statistics=True), "statistics"),
            ("shape", lambda: LF.linear_cross_entropy(x, w, q[:, :39]), "target"),
            ("gradient", lambda: LF.linear_cross_entropy(x, w, q.clone().requires_grad_()), "target")):
        raises(f"linear probabilities: {name}", call, says)


def ports():
    """What other libraries' calls pass: None for off, masks, weights of another type, the ends of beta."""
    x, target = leaf(normal(6, 40)), classes(40, 6)
    h, w, b = leaf(normal(6, 16), BF16), leaf(normal(40, 16)), leaf(normal(40))
    heads = (("cross_entropy", [x], lambda x, t=target, **more: LF.cross_entropy(x, t, **more)),
             ("linear_cross_entropy", [h, w], lambda h, w, t=target, **more: LF.linear_cross_entropy(h, w.to(h.dtype), t, **more)))
    for name, leaves, f in heads:
        alike = lambda what, ours, theirs: close(f"{name}: {what}", (ours, *torch.autograd.grad(ours, leaves)),
                                                 (theirs, *torch.autograd.grad(theirs, leaves)))
        off = dict(softcap=None, z_loss=None, label_smoothing=None, logit_scale=None, temperature=None, denominator=None)
        alike("None is off", f(*leaves, **off), f(*leaves))
        alike("ignore_index None", f(*leaves, ignore_index=None), f(*leaves))
        some = target.clone()
        some[1] = -100
        alike("ignore_index None is -100", f(*leaves, some, ignore_index=None), f(*leaves, some))
        alike("uint8 targets", f(*leaves, target.to(torch.uint8)), f(*leaves))
        mask = target % 2 == 0
        alike("a mask as row_weight", f(*leaves, row_weight=mask), f(*leaves, row_weight=mask.float()))
    if hasattr(torch.nn.functional, "linear_cross_entropy"):  # newer versions have it
        leaves = [leaf(normal(6, 16)), w, b]
        for options in (None, torch.nn.LinearCrossEntropyOptions()):
            more = dict(reduction="sum", label_smoothing=0.1, ignore_index=None, options=options)
            ours, theirs = (f(leaves[0], w, some, linear_bias=b, **more) for f in (LF.linear_cross_entropy, F.linear_cross_entropy))
            close(f"F.linear_cross_entropy's call, options {options is not None}", (ours, *torch.autograd.grad(ours, leaves)),
                  (theirs, *torch.autograd.grad(theirs, leaves)), 64 * U)
    ids = classes(40, 6, 3)
    close("cross_entropy_ids: None is off", LF.cross_entropy_ids(x, ids, ignore_index=None, softcap=None, z_loss=None),
          LF.cross_entropy_ids(x, ids))
    for name, f in (("linear_cross_entropy", lambda h, w, b: LF.linear_cross_entropy(h, w, target, linear_bias=b)),
                    ("of each token", lambda h, w, b: LF.linear_cross_entropy(h, w, target, linear_bias=b, reduction="none").mean()),
                    ("linear_cross_entropy_ids", lambda h, w, b: LF.linear_cross_entropy_ids(h, w, ids, linear_bias=b).loss)):
        for layout in ("packed", "gaps"):
            wide = w if layout == "packed" else leaf(w.detach(), F32, layout)
            ours, theirs = f(h, wide, b), f(h, wide.to(BF16), b)
            mine, cast = (torch.autograd.grad(loss, [h, wide, b]) for loss in (ours, theirs))
            verdict(f"float32 weight, {name}, {layout}: types", mine[1].dtype == F32, str(mine[1].dtype))
            close(f"float32 weight, {name}, {layout}", (ours, mine[0], mine[2]), (theirs, cast[0], cast[2]))
            close(f"float32 weight, {name}, {layout}: its gradient", mine[1], cast[1], 2 * HALF[BF16])
    f32, half = leaf(normal(6, 16)), leaf(normal(40), BF16)
    close("bias of 16 bits beside float32", LF.linear_cross_entropy(f32, w, target, linear_bias=half),
          LF.linear_cross_entropy(f32, w, target, linear_bias=half.float()))
    scale = leaf(normal(16), BF16)
    close("norm's weight of 16 bits beside float32", LF.rms_norm(f32, (16,), scale), LF.rms_norm(f32, (16,), scale.float()))
    y = normal(6, 40)
    q = dict(divergence="jensen_shannon")
    teacher = normal(6, 24).to(BF16), torch.nn.Parameter(normal(40, 24).to(BF16)), torch.nn.Parameter(normal(40))
    kl_of = lambda x, **more: LF.kl(x, y, **more)
    head_of = lambda h, w, **more: LF.linear_kl(h, w, teacher[0], teacher[1], teacher_bias=teacher[2], **more)
    a, v, ta, tv = leaf(normal(6, 16)), leaf(normal(40, 16)), normal(6, 24), normal(40, 24)
    with torch.autocast(D, torch.float16):  # whose gradients for 2^-24 would be 0
        loss = LF.linear_kl(a, v, ta, tv, denominator=2.0**24)
    right, = torch.autograd.grad(LF.linear_kl(a, v, ta, tv, reduction="sum"), a)
    close("linear_kl: autocast to float16 and a denominator", torch.autograd.grad(loss, a, loss.new_tensor(2.0**24))[0], right, 1e-2)
    zeros = torch.zeros(6, device=D)
    for name, leaves, f in (("kl", [x], kl_of), ("linear_kl", [h, w], head_of)):
        alike = lambda what, ours, theirs, slack=8 * U: close(f"{name}: {what}", (ours, *torch.autograd.grad(ours, leaves)),
                                                              (theirs, *torch.autograd.grad(theirs, leaves)), slack)
        some = 8 * U if name == "kl" else 4 * HALF[BF16]
        alike("beta 0", f(*leaves, beta=0, **q), f(*leaves))
        alike("beta 1", f(*leaves, beta=1.0, **q), f(*leaves, divergence="reverse"))
        alike("None is off", f(*leaves, softcap=None, teacher_softcap=None, logit_scale=None, temperature=None), f(*leaves))
        alike("batchmean", f(*leaves, reduction="batchmean"), f(*leaves, reduction="sum") / 6, some)
        alike("denominator", f(*leaves, denominator=4), f(*leaves, reduction="sum") / 4, some)
        alike("denominator, a tensor", f(*leaves, denominator=torch.tensor([4], device=D)), f(*leaves, denominator=4.0), some)
        alike("a mask as row_weight", f(*leaves, row_weight=target % 2 == 0), f(*leaves, row_weight=(target % 2 == 0).float()))
        alike("zero_when_empty of some", f(*leaves, row_weight=zeros + 2, zero_when_empty=True), f(*leaves), some)
        alike("zero_when_empty", f(*leaves, row_weight=zeros, zero_when_empty=True), 0 * f(*leaves))
        alike("weights whose sum is beyond float16", f(*leaves, row_weight=(zeros + 2.0**15).half(), zero_when_empty=True), f(*leaves), some)
        verdict(f"{name}: a mean over nothing", bool(f(*leaves, row_weight=zeros).isnan()), "")
        raises(f"{name}: denominator of a sum", lambda: f(*leaves, reduction="sum", denominator=4), "denominator")
        raises(f"{name}: beta", lambda: f(*leaves, beta=1.5, **q), "beta")
    one, other, rows = (leaf(t) for t in (x[0].detach(), h[0].detach().float(), w.detach().float()))  # no batch
    right = F.kl_div(one.log_softmax(-1), y[0].softmax(-1), reduction="batchmean")
    close("kl: batchmean of [classes]", (LF.kl(one, y[0], reduction="batchmean"), *torch.autograd.grad(
        LF.kl(one, y[0], reduction="batchmean"), one)), (right, *torch.autograd.grad(right, one)))
    tables = normal(6, 24)[0], normal(40, 24)
    right = F.kl_div((other @ rows.t()).log_softmax(-1), (tables[0] @ tables[1].t()).softmax(-1), reduction="batchmean")
    ours = LF.linear_kl(other, rows, *tables, reduction="batchmean")
    close("linear_kl: batchmean of [hidden]", (ours, *torch.autograd.grad(ours, (other, rows))),
          (right, *torch.autograd.grad(right, (other, rows))), 1e-5)
    raises("teacher's hidden states with a gradient", lambda: LF.linear_kl(h, w, teacher[0].clone().requires_grad_(), teacher[1]),
           "teacher_input")


def linear_cross_entropy():
    shapes = [((6,), 16, 50), ((3, 4), 24, 101), ((9,), 8, 256), ((), 16, 30), ((2, 2, 3), 32, 64)]
    for t, reduction, (spread, hidden, vocab) in itertools.product(TYPES, ("none", "mean", "sum"), shapes):
        options, weight = draw_options(vocab, reduction)
        bias_type = rng.choice((None, t, F32))
        linear_case(t, spread, hidden, vocab, options, weight, bias_type, layout=rng.choice(("packed", "gaps", "transposed")),
                    workspace_mib=rng.choice((1, 64, 1024, None)))
        for stats in ((0, 1, 2), rng.choice(((0,), (1,), (2,)))):
            linear_case(t, spread, hidden, vocab, options, weight, bias_type, stats=stats)
    for wants in itertools.product((False, True), repeat=3):
        if any(wants):
            for reduction in ("none", "mean"):
                linear_case(BF16, (6,), 16, 40, dict(reduction=reduction), None, F32, wants)
    for layout, upstream in itertools.product(LAYOUTS, UPSTREAMS):
        linear_case(F32, (4, 3), 16, 40, dict(reduction="none"), None, layout=layout, upstream=upstream)
    linear_case(F16, (32,), 16, 1000, dict(reduction="mean"), None, F32, upstream=65536.0)  # as a loss scaler has it
    x, w = leaf(normal(6, 16)), leaf(normal(40, 16))
    for tokens, kind in ((0, "no tokens"), (6, "all ignored")):
        target = torch.full((tokens,), -100, device=D)
        for zero in (False, True):
            part = x[:tokens]
            loss = LF.linear_cross_entropy(part, w, target, zero_when_empty=zero)
            dx, dw = torch.autograd.grad(loss, [x, w])
            compare(f"{kind}, zero_when_empty={zero}", ("loss", loss, torch.tensor(0.0 if zero else NAN, device=D), 1e-30),
                    ("dx", dx, torch.zeros_like(x), 1e-30), ("dweight", dw, torch.zeros_like(w), 1e-30))
    with torch.no_grad():
        target = classes(40, 6)
        exact = F.cross_entropy(x.double() @ w.double().t(), target)
        compare("no_grad", ("loss", LF.linear_cross_entropy(x, w, target), exact, 1e-5))
    if CUDA:
        for t, spread, hidden, vocab, mib in ((BF16, (512,), 512, 8192, 1024), (BF16, (300,), 256, 50257, 16),
                                              (F16, (256,), 256, 4096, 8), (F32, (128,), 256, 1000, 1024)):
            linear_case(t, spread, hidden, vocab, dict(reduction="mean"), None, workspace_mib=mib)
    kept_logits()
    batch_invariant()
    linear_probabilities()


def kept_bytes(f):
    """The bytes of logits or exponentials that the graph of f() keeps."""
    found = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
        f()
    return sum(t.numel() for t in found if t.dtype == torch.uint8)


def kept_logits():
    """keep=True against float64, beside keep=False, and how many bytes it keeps: exponentials take 2 a logit, logits 4."""
    able = not CUDA or torch.cuda.get_device_capability() == (9, 0)
    for spread, hidden, vocab in (((6,), 16, 50), ((3, 4), 24, 101), ((70,), 8, 300), ((), 16, 30), ((9,), 16, 32)):
        for smooth, (mib, layout) in enumerate(itertools.product((1, 1024), ("packed", "gaps"))):
            options, weight = draw_options(vocab, "none")
            options["label_smoothing"] *= smooth % 2
            linear_case(BF16, spread, hidden, vocab, options, weight, rng.choice((None, BF16, F32)), layout=layout,
                        workspace_mib=mib, keep=True)
            linear_case((F32, F16)[smooth // 2], spread, hidden, vocab, options, weight, None, layout=layout, keep=True)
    for wants in itertools.product((False, True), repeat=3):
        if any(wants):
            linear_case(BF16, (6,), 16, 40, dict(reduction="none"), None, F32, wants, keep=True)
    x, w, t = leaf(normal(70, 16), BF16), leaf(normal(50, 16), BF16), classes(50, 70)
    t[::2] = -100
    up = normal(70).to(D)
    for name, more in (("all rows", {}), ("max_counted", dict(max_counted=40))):
        def run(keep):
            loss = LF.linear_cross_entropy(x, w, t, reduction="none", keep=keep, **more)
            return [loss, *torch.autograd.grad(loss, [x, w], up)]
        close(f"keep beside none, {name}", run(True), run(False), 4 * HALF[BF16])
        size, each = kept_bytes(lambda: run(True)), 4
        rows = more.get("max_counted", 70)
        verdict(f"the buffer is that of f32 logits, {name}", each * 50 * rows < size < each * 128 * 128, f"{size} bytes")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: torch.zeros_like(t) if t.dtype == torch.uint8 else t):
        without = run(True)[1]
    verdict("backward reads what forward kept", not torch.equal(without, run(True)[1]), "the same gradient without it")
    module = lk_torch.LinearCrossEntropyLoss(16, 50, device=D, dtype=BF16, reduction="none", keep=True)
    f32 = [leaf(normal(70, 16)), leaf(normal(50, 16))]

    def cast():
        with torch.autocast(D, dtype=BF16):
            return loss(*f32)
    loss = lambda x, w, **more: LF.linear_cross_entropy(x, w, t, **{"reduction": "none", "keep": True, **more})
    many = (1024, 16, 16384) if CUDA else (1024, 8, 600)  # tokens, hidden, classes: so many that exponentials take less time
    long = [leaf(normal(many[0], many[1]), BF16), leaf(normal(many[2], many[1]), BF16), classes(many[2], many[0])]
    for name, f, each in (
            ("none", lambda: loss(x, w), 4), ("the module", lambda: module(x, t), 4), ("autocast", cast, 4),
            ("every other option", lambda: loss(x, w, z_loss=0.1, softcap=5.0, logit_scale=0.5, fast_logits=True), 2),
            ("keep=False", lambda: loss(x, w, keep=False), 0), ("no gradient", lambda: loss(x.detach(), w.detach()), 0),
            ("mean", lambda: loss(x, w, reduction="mean"), 0), ("sum", lambda: loss(x, w, reduction="sum"), 0),
            ("label_smoothing", lambda: loss(x, w, label_smoothing=0.125), 4), ("f32", lambda: loss(*f32), 4),
            ("label_smoothing, fast_logits", lambda: loss(x, w, label_smoothing=0.125, fast_logits=True), 2),
            ("f16", lambda: loss(*(v.to(F16) for v in f32)), 4), ("f16, fast_logits",
             lambda: loss(*(v.to(F16) for v in f32), fast_logits=True), 2),
            ("f16, mean", lambda: loss(*(v.to(F16) for v in f32), reduction="mean"), 4),
            ("32 classes", lambda: LF.linear_cross_entropy(x, w[:32], t % 32, reduction="none", keep=True), 4),
            ("hidden 12", lambda: loss(x[:, :12], w[:, :12].contiguous()), 4),
            ("many tokens", lambda: LF.linear_cross_entropy(*long, reduction="none", keep=True), 2 if able else 4)):
        tokens, columns, more = (many[0], -(-many[2] // 64) * 64, 12 * many[0] + 4096) if name == "many tokens" else (70, 64, 4096)
        size, whole = kept_bytes(f), each * columns * tokens  # columns are rounded up
        verdict(f"{name}: {each} bytes a logit are kept", whole <= size <= whole + (more if each else 0), f"{size} bytes")
    kept_or_not()


def kept_or_not():
    """Shapes for which lk keeps the other of logits and exponentials for 64 tokens, on the simulator's 4 SMs. A program for any
    number of tokens makes a buffer from what it keeps for 64, and runs without where that does not do."""
    shapes = [(1024, 12, 600, False, 0), (257, 960, 2048, False, 4), (128, 1200, 2560, True, 2)]
    for tokens, hidden, vocab, fast, each in shapes + [(1024, 12, 16384, False, 0)] * CUDA:  # the last is that of an H200
        x, w, t = leaf(normal(tokens, hidden), BF16), leaf(normal(vocab, hidden) * 0.03, BF16), classes(vocab, tokens)
        up = normal(tokens).to(D)

        def loss(x, w, keep=True):
            return LF.linear_cross_entropy(x, w, t, reduction="none", keep=keep, fast_logits=fast)
        run = lambda f, **more: (lambda out: [out, *torch.autograd.grad(out, [x, w], up)])(f(x, w, **more))
        name, right = f"{tokens} tokens, hidden {hidden}, {vocab} classes", run(loss, keep=False)
        close(f"{name}: keep beside none", run(loss), right, 4 * HALF[BF16])
        size, whole = kept_bytes(lambda: loss(x, w)), each * tokens * vocab
        verdict(f"{name}: {each} bytes a logit are kept", CUDA or whole <= size <= whole + (4096 if each else 0), f"{size} bytes")
        torch._dynamo.reset()
        fast_one = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
        close(f"{name}: compiled for any number", run(fast_one), right, 4 * HALF[BF16])
    torch._dynamo.reset()


def batch_invariant():
    """The bits of a token's results for other numbers of tokens and other places among them. For sm_90a, which the simulator is
    too; elsewhere it is refused."""
    x, w, t = leaf(normal(300, 64), BF16), leaf(normal(3000, 64), BF16), classes(3000, 300)
    options = dict(reduction="none", batch_invariant=True)
    if CUDA and torch.cuda.get_device_capability() != (9, 0):
        return
    whole = LF.linear_cross_entropy(x, w, t, **options)
    stats = LF.linear_cross_entropy_stats(x, w, t, **options)
    for first, tokens in ((0, 1), (5, 1), (131, 128), (40, 260)):
        part = slice(first, first + tokens)
        loss = LF.linear_cross_entropy(x[part], w, t[part], **options)
        verdict(f"batch_invariant: {tokens} tokens from {first}", torch.equal(loss, whole[part]), f"{loss - whole[part]}")
        out = LF.linear_cross_entropy_stats(x[part], w, t[part], **options)
        verdict(f"batch_invariant, stats: {tokens} tokens from {first}",
                all(torch.equal(a, b[part]) for a, b in zip(out, stats)))
    linear_case(BF16, (70,), 64, 300, dict(reduction="none"), None, batch_invariant=True)
    linear_case(BF16, (70,), 64, 300, dict(reduction="mean"), None, F32, batch_invariant=True)
    linear_case(BF16, (70,), 64, 300, dict(reduction="none"), None, stats=(0, 1, 2), batch_invariant=True)
    size = kept_bytes(lambda: LF.linear_cross_entropy(x, w, t, keep=True, **options))
    verdict("batch_invariant: nothing is kept", size == 0, f"{size} bytes")


# ---- Options that are tensors, and others of Python -------------------------------------------------------------------------


def learned():
    """logit_scale and temperature as tensors, against PyTorch in float64: of all logits, and of each row, with gradients."""
    def case(t, head, per_row, which, bias=False, stats=False, **options):
        rows, hidden, vocab = 6, 12, 20
        x = leaf(normal(rows, hidden if head else vocab, sigma=1.5), t)
        w = [leaf(normal(vocab, hidden, sigma=0.4), t)] if head else []
        b = [leaf(normal(vocab), F32)] if bias else []
        s = leaf(torch.rand((rows,) if per_row else rng.choice(((), (1,))), generator=generator) + 0.5)
        y = torch.where(torch.rand(rows, generator=generator) < 0.2, -100, torch.randint(vocab, (rows,), generator=generator))
        y, number = y.to(D), rng.choice((1.0, 0.5, 2))
        given = {which: s, "temperature" if which == "logit_scale" else "logit_scale": number}

        def ours(x, s, *more):
            values = {k: s if v is not number else v for k, v in given.items()}
            if head:
                f = LF.linear_cross_entropy_stats if stats else LF.linear_cross_entropy
                out = f(x, more[0], y, linear_bias=more[1] if bias else None, **options, **values)
            else:
                out = (LF.cross_entropy_stats if stats else LF.cross_entropy)(x, y, **options, **values)
            return sum_of(out) if stats else out.sum()

        def exact(x, s, *more):
            z = x @ more[0].t() if head else x
            z = z + more[1] if bias else z
            scale = given.get("logit_scale", 1.0) if which == "temperature" else s.reshape(-1, 1)
            over = s.reshape(-1, 1) if which == "temperature" else given.get("temperature", 1.0)
            z, cap = z * scale, options.get("softcap")
            z = (cap * torch.tanh(z / cap) if cap else z) / over
            rest = {k: v for k, v in options.items() if k != "softcap"}
            loss, lse, _, entropy = exact_loss(z, y, None, rest)
            return loss.sum() + lse.sum() + 0.5 * entropy.sum() if stats else loss.sum()
        leaves = [x, s, *w, *b]
        doubles = [v.detach().double().requires_grad_() for v in leaves]
        found, right = ours(*leaves), exact(*doubles)
        gradients = [torch.autograd.grad(f, v) for f, v in ((found, leaves), (right, doubles))]
        name = f"{'head' if head else 'logits'} {NAMES[t]} {which} {list(s.shape)}, bias {bias}, stats {stats}, {options}"
        # The logits' product is a float. The head's input is rounded once more, and every gradient once or twice to its type.
        close(name, [found], [right], (4 if head else 0.5) * HALF[t] + 64 * U)
        for i, (a, b) in enumerate(zip(*gradients)):
            error = float((a.double() - b).norm() / b.norm().clamp(min=1e-30))
            verdict(f"{name}, gradient {i}", error <= (6 if head else 2) * HALF[t] + 64 * U and a.dtype == leaves[i].dtype,
                    f"relative error {error:.3g}, {a.dtype}")
    for t, head, per_row, which in itertools.product(TYPES, (False, True), (False, True), ("logit_scale", "temperature")):
        for reduction in ("none", "mean", "sum"):
            capped = {} if which == "temperature" else dict(softcap=4.0)
            case(t, head, per_row, which, reduction=reduction)
            case(t, head, per_row, which, reduction=reduction, label_smoothing=0.125, z_loss=0.01, **capped,
                 stats=rng.random() < 0.5, bias=head and not per_row)
    x, w, t, v = leaf(normal(6, 12), BF16), leaf(normal(20, 12), BF16), classes(12, 6), leaf(normal(2, 5, 3))
    for k in ("logit_scale", "temperature"):  # a tensor is a number where that asks for nothing: the same bits
        alone = [LF.cross_entropy(x, t, **{k: value}) for value in (0.5, torch.tensor(0.5), numpy.float32(0.5))]
        verdict(f"{k} as a tensor of the host", all(torch.equal(alone[0], other) for other in alone))
    compare("logit_scale of [N, C, d]", ("loss", LF.cross_entropy(v, t[:6].view(2, 3) % 5, logit_scale=torch.full(
        (2, 3), 0.5, device=D)), LF.cross_entropy(v, t.view(2, 3) % 5, logit_scale=0.5), 1e-5))
    for cap, over in ((6.0, 2.0), (None, 2), (0, 0.5)):
        right = F.cross_entropy((cap * torch.tanh(x.double() * 1.5 / cap) if cap else x.double() * 1.5) / over, t)
        compare(f"temperature {over} of softcap {cap}", ("loss", LF.cross_entropy(
            x, t, softcap=cap, logit_scale=1.5, temperature=over), right, 1e-5))
    head = lk_torch.LinearCrossEntropyLoss(12, 20, bias=True, device=D, softcap=3.0, logit_scale=1.5, temperature=0.5)
    y = classes(20, 6)
    compare("the head's logits are those of its loss",
            ("loss", F.cross_entropy(head.logits(x.float()), y), head(x.float(), y).double(), 1e-5))
    counted = LF.cross_entropy(x, t, denominator=torch.full((), 5.0, device=D))
    for d in (5, 5.0, numpy.int64(5), torch.tensor(5, device=D)):
        compare(f"denominator {d!r}", ("loss", LF.cross_entropy(x, t, denominator=d), counted, 0.0 + 1e-30),
                ("head", LF.linear_cross_entropy(x, w, t, denominator=d),
                 LF.linear_cross_entropy(x, w, t, reduction="sum") / 5, 1e-5))

    def one_program():
        for name, f in (("cross_entropy", lambda x, s: LF.cross_entropy(x, t, logit_scale=s)),
                        ("linear_cross_entropy", lambda x, s: LF.linear_cross_entropy(x, w, t, logit_scale=s)),
                        ("cross_entropy, temperature", lambda x, s: LF.cross_entropy(x, t, temperature=s))):
            torch._dynamo.reset()
            counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
            fast = torch.compile(f, backend=counter, fullgraph=True)
            for n in range(9):
                s = torch.tensor(1 + n / 8, device=D, requires_grad=True)
                close(f"{name}: compiled, a tensor of {float(s)}", out_and_gradients(fast, [x, s]),
                      out_and_gradients(f, [x, s]), 4 * HALF[BF16])
            verdict(f"{name}: one program for 9 numbers", counter.frame_count == 1, f"{counter.frame_count} programs")
        torch._dynamo.reset()
    attempt("numbers of a compiled program", one_program)


def weighted_case(t, shape, options, weight, head, stats):
    """row_weight against PyTorch's loss per row times it, in float64. head: of a matmul."""
    o, vocab = types.SimpleNamespace(**{**PLAIN, **options}), 20 if head else shape[len(shape) > 1]
    spread = shape[:-1] if head else (*shape[:1], *shape[2:]) if len(shape) > 1 else ()
    target = classes(vocab, *spread)
    factors = normal(*spread).to(D)
    if target.dim():
        target.view(-1)[2], factors.view(-1)[0] = o.ignore_index, 0
        factors = torch.where(target == o.ignore_index, NAN, factors)  # which is of no consequence
    factors = leaf(factors, F32, rng.choice(("packed", "second rows")), False)
    leaves = [leaf(normal(*shape, sigma=1.0 if head else 2.0), t, "packed" if head else rng.choice(LAYOUTS))]
    leaves += [leaf(normal(vocab, shape[-1], sigma=0.3), t)] if head else []
    function = getattr(LF, ("linear_" if head else "") + "cross_entropy" + ("_stats" if stats else ""))

    def ours(x, w=None):
        where = dict(weight=weight, row_weight=factors, **options)
        out = function(x, w, target, **where) if head else function(x, target, **where)
        return (out.loss, out.lse, out.entropy) if stats else out

    def exact(x, w=None):
        rows = (x @ w.t()).reshape(-1, vocab) if head else rows_of(x)
        y = target.reshape(-1)
        each, lse, _, entropy = exact_loss(rows, y, weight, {**options, "reduction": "none"})
        loss = torch.where(y == o.ignore_index, 0.0, each * torch.nan_to_num(factors.double().reshape(-1)))
        if o.reduction != "none":
            counted = y != o.ignore_index
            by = counted.sum() if weight is None else weight.double()[y[counted]].sum()
            by = o.denominator.double().reshape(()) if o.denominator is not None else by
            loss = loss.sum() / (by if o.reduction == "mean" else 1)
        loss = loss.reshape(spread if o.reduction == "none" else ())
        return (loss, lse.reshape(spread), entropy.reshape(spread)) if stats else loss

    def bounds(doubles, outs, ups, gradients):  # plain: the op's own tests derive tight ones
        error = [2e-5 * (1 + magnitude(v).max()) for v in outs]
        return error, [(4e-5 + 8 * head * HALF[t]) * (1e-3 + magnitude(g).max()) for g in gradients]
    hold(case_name(t, shape, options, weight, "head" if head else "", "stats" if stats else "", "row_weight"), ours, exact, leaves,
         bounds, dtypes=[F32] * 3, twice=options["reduction"] != "none" and not stats)


def row_weight():
    for t, reduction in itertools.product(TYPES, ("none", "mean", "sum")):
        for shape, head in (((6, 50), False), ((3, 257), False), ((40,), False), ((4, 7, 5), False), ((7, 12), True), ((2, 3, 16), True)):
            options = draw_options(20, reduction)[0]
            options.update(ignore_index=-100, z_loss=0.0 if "denominator" in options or rng.random() < 0.5 else 2.0**-7)
            weight = leaf(torch.rand(20 if head else shape[len(shape) > 1], generator=generator) + 0.25, F32, "packed", False)
            weight = None if options["z_loss"] or rng.random() < 0.5 else weight
            weighted_case(t, shape, options, weight, head, rng.random() < 0.4)
    x, w, t, r = leaf(normal(6, 12)), leaf(normal(20, 12)), classes(12, 6), leaf(normal(6), grad=False)
    q = torch.softmax(normal(6, 12), 1).to(D)
    ours, theirs = LF.cross_entropy(x, q, reduction="sum", row_weight=r), (F.cross_entropy(x, q, reduction="none") * r).sum()
    compare("row_weight of probabilities", ("loss", ours, theirs, 1e-4),
            ("dx", torch.autograd.grad(ours, x)[0], torch.autograd.grad(theirs, x)[0], 1e-5))
    whole = LF.cross_entropy(x, t, row_weight=r.bfloat16().float(), denominator=r.sum())
    compare("row_weight of 16 bits, a weighted mean",
            ("loss", LF.cross_entropy(x, t, row_weight=r.bfloat16(), denominator=r.sum()), whole, 1e-30))
    for name, module, inputs in (("CrossEntropyLoss", lk_torch.CrossEntropyLoss(reduction="sum"), (x, t)),
                                 ("LinearCrossEntropyLoss", lk_torch.LinearCrossEntropyLoss(12, 20, reduction="sum", device=D), (x, t))):
        each = copy.deepcopy(module)
        each.options["reduction"] = "none"
        compare(f"{name} takes row_weight", ("loss", module(*inputs, row_weight=r), (each(*inputs) * r).sum(), 1e-4))
    for name, f in (("cross_entropy", lambda x, r: LF.cross_entropy(x, t, row_weight=r)),
                    ("linear_cross_entropy", lambda x, r: LF.linear_cross_entropy(x, w, t, row_weight=r))):
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        fast = torch.compile(f, backend=counter, fullgraph=True)
        for n in range(9):
            close(f"{name}: compiled, row_weight {n}", *[(lambda out: (out.detach(), *torch.autograd.grad(out, x)))(g(x, r * n))
                                                         for g in (fast, f)])
        verdict(f"{name}: one program for any row_weight", counter.frame_count == 1, f"{counter.frame_count} programs")


def tools():
    """What tools around a model ask of lk_torch."""
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
    from torch.utils.flop_counter import FlopCounterMode
    x, w, t = leaf(normal(6, 16)), leaf(normal(20, 16)), classes(20, 6)
    for matmuls, options in ((3, {}), (3, dict(reduction="sum", softcap=3.0)), (4, dict(reduction="none")),
                             (3, dict(reduction="none", keep=True)), (1.5, dict(max_counted=3)),
                             (4, dict(group=dist.group.WORLD))):
        with FlopCounterMode(display=False) as counter:
            LF.linear_cross_entropy(x, w, t, **options).sum().backward()
        found = counter.get_total_flops()
        verdict(f"flops of linear_cross_entropy, {sorted(options)}", found == matmuls * 2 * 6 * 16 * 20, f"{found}")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        LF.linear_cross_entropy_stats(x, w, t), LF.linear_cross_entropy(x, w, t)
    verdict("flops of forward alone", counter.get_total_flops() == 2 * 2 * 6 * 16 * 20, f"{counter.get_total_flops()}")
    y, v = x.detach()[:, :8], w.detach()[:, :8]
    split = dict(group=dist.group.WORLD)
    half = dict(row_weight=(torch.arange(6, device=D) < 3).float(), max_counted=3)
    for own, teachers, options in ((3, 1, {}), (4, 2, dict(reduction="none")), (1.5, 0.5, half), (1, 1, None), (4, 2, split),
                                   (5, 3, dict(split, divergence="jensen_shannon"))):
        with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(options is not None):
            loss = LF.linear_kl(x, w, y, v, **(options or {})).sum()
            loss.requires_grad and loss.backward()
        found, right = counter.get_total_flops(), 2 * 6 * 20 * (own * 16 + teachers * 8)
        verdict(f"flops of linear_kl, {options}", found == right, f"{found}, not {right}")
    for options in {}, dict(group=dist.group.WORLD):
        with FlopCounterMode(display=False) as counter:
            LF.linear_cross_entropy_ids(x, w, t[:, None], **options).loss.backward()
        found = counter.get_total_flops()
        verdict(f"flops of linear_cross_entropy_ids, {sorted(options)}", found == 4 * 2 * 6 * 16 * 20, f"{found}")
    with FlopCounterMode(display=False) as counter:
        LF.linear_topk(x.detach(), w, 3)
    verdict("flops of linear_topk", counter.get_total_flops() == 2 * 6 * 16 * 20, f"{counter.get_total_flops()}")
    at = torch.arange(7, device=D)
    for name, right, f in (("linear_support", 3 * 2 * 6 * 16, lambda: LF.linear_support(x, w, t, at)),
                           ("support", 0, lambda: LF.support(x, t % 16, at))):
        with FlopCounterMode(display=False) as counter:
            f().lse.sum().backward()
        found = counter.get_total_flops()
        verdict(f"flops of {name}", found == right, f"{found}, not {right}")
    compare("dims of numpy", ("one", LF.logsumexp(x, numpy.int64(1)), torch.logsumexp(x, 1), 1e-5),
            ("two", LF.logsumexp(x, (numpy.int32(0), 1)), torch.logsumexp(x, (0, 1)), 1e-5))
    other = "import torch; torch.__version__ = '1.0.0'; import lk_torch"  # an upgrade of PyTorch, after which nothing was built
    child = subprocess.run([sys.executable, "-c", other], stderr=subprocess.PIPE, text=True,
                           env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)})
    verdict("another version of PyTorch", "this is 1.0.0; build it again" in child.stderr, child.stderr[-300:])
    head, d = lk_torch.LinearKLLoss(16, 20, group=dist.group.WORLD, device=D), x.detach()
    for name, twin in (("deepcopy", copy.deepcopy(head)), ("pickle", pickle.loads(pickle.dumps(head)))):
        same = torch.equal(twin(d, d + 1, w.detach()), head(d, d + 1, w.detach())) and twin.options["group"] is dist.group.WORLD
        verdict(f"a head of distillation with a group, {name}", same)
    head = lk_torch.LinearCrossEntropyLoss(16, 20, group=dist.group.WORLD, device=D)
    for name, twin in (("deepcopy", copy.deepcopy(head)), ("pickle", pickle.loads(pickle.dumps(head)))):
        same = torch.equal(twin(x, t), head(x, t)) and twin.options["group"] is dist.group.WORLD
        verdict(f"a head with a group, {name}", same)
        twin.compile(backend="eager")
        verdict(f"a head that is compiled, {name}", copy.deepcopy(twin)._compiled_call_impl is None)
    state = head.__getstate__()
    twin.__setstate__({**state, "options": {**state["options"], "group": "another"}})
    raises("a head of another process's group", lambda: twin(x, t), "another", kind=ValueError)
    LF.CHECK_TARGETS = True
    try:
        bad = t.clone()
        bad[3], bad[4] = 20, -7
        for name, f in (("cross_entropy", lambda t: LF.cross_entropy(x @ w.t(), t)),
                        ("cross_entropy_stats", lambda t: LF.cross_entropy_stats(x @ w.t(), t).loss),
                        ("linear_cross_entropy", lambda t: LF.linear_cross_entropy(x, w, t)),
                        ("with a group", lambda t: LF.linear_cross_entropy(x, w, t, group=dist.group.WORLD))):
            raises(f"LK_CHECK_TARGETS, {name}", lambda: f(bad), "target[3] is 20", kind=ValueError)
            verdict(f"LK_CHECK_TARGETS, {name}: good targets", bool(f(torch.where(bad == t, t, -100)).isfinite()))
        ids = torch.stack([t, bad], -1)
        for name, f in (("cross_entropy_ids", lambda **more: LF.cross_entropy_ids(x @ w.t(), ids, **more)),
                        ("linear_cross_entropy_ids", lambda **more: LF.linear_cross_entropy_ids(x, w, ids, **more))):
            raises(f"LK_CHECK_TARGETS, {name}", f, "lk: target_ids[3, 1] is 20", kind=ValueError)
            raises(f"LK_CHECK_TARGETS, {name} with a group", lambda: f(group=dist.group.WORLD), "lk: target_ids[3, 1] is 20",
                   kind=ValueError)
        raises("LK_CHECK_TARGETS, [N, C, d]", lambda: LF.cross_entropy(leaf(normal(2, 5, 3)), classes(5, 2, 3) * 0 + 5),
               "target[0, 0] is 5", kind=ValueError)
    finally:
        LF.CHECK_TARGETS = False
    said = subprocess.run([sys.executable, "-c", "import lk_torch; print(lk_torch.functional.CHECK_TARGETS)"], text=True,
                          env={**os.environ, "LK_CHECK_TARGETS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
                          capture_output=True).stdout
    verdict("LK_CHECK_TARGETS=1 in the environment", said.strip() == "True", said)
    theta = lk_torch.MdLrpeCosine(2, 16)
    model = torch.nn.Sequential(theta, lk_torch.RMSNorm(16)).to(D).to(BF16)
    same = torch.equal(theta.theta.cpu(), lk_torch.MdLrpeCosine(2, 16).theta)
    verdict("theta stays float32 in a model of bf16", theta.theta.dtype == F32 and same and model[1].weight.dtype == BF16)
    verdict("theta of a given type", lk_torch.MdLrpeCosine(2, 16, dtype=BF16).theta.dtype == BF16)
    mesh = init_device_mesh(D, (1,))
    split = lambda v, p: distribute_tensor(v.detach(), mesh, [p]).requires_grad_(v.is_floating_point())
    u = leaf(normal(16))
    h, v, ids = normal(6, 16).to(D), normal(20, 16).to(D), classes(20, 6)
    rows, head = split(h, Shard(0)), split(v, Shard(0))
    for name, f, word in (
            ("kl", lambda: LF.kl(rows, h), "input"), ("kl", lambda: LF.kl(h, rows.detach()), "teacher"),
            ("cross_entropy_ids", lambda: LF.cross_entropy_ids(rows, ids[:, None]), "input"),
            ("support", lambda: LF.support(rows, ids, torch.arange(7, device=D)), "logits"),
            ("linear_cross_entropy", lambda: LF.linear_cross_entropy(h, head, ids), "linear_weight"),
            ("linear_cross_entropy_stats", lambda: LF.linear_cross_entropy_stats(rows, v, ids), "input"),
            ("linear_cross_entropy_ids", lambda: LF.linear_cross_entropy_ids(h, head, ids[:, None]), "linear_weight"),
            ("linear_kl", lambda: LF.linear_kl(h, v, h, head.detach()), "teacher_weight")):
        raises(f"{name}: {word} is a DTensor", f, f"{word} is a DTensor, which {name} does not take", kind=TypeError)
    for name, f, leaves in (("rms_norm", lambda x, w: LF.rms_norm(x, (16,), w), [x, u]),
                            ("add_rms_norm", lambda x, w: LF.add_rms_norm(x, x * 2, (16,), w)[0], [x, u]),
                            ("logsumexp", lambda x: LF.logsumexp(x, 1), [x]), ("module", lk_torch.SRMSNorm(), [x]),
                            ("glu", LF.glu, [x]), ("glu, apart", lambda x, u: LF.glu(x, u.expand(6, 16)), [x, u]),
                            ("glu, row_weight", lambda x, u: LF.glu(x, 2 * x, row_weight=u[:6]), [x, u]),
                            ("rope", lambda x, u: LF.rope(x.view(6, 2, 8), 2 * x.view(6, 2, 8), inv_freq=u.detach()[:4],
                                                          heads_first=True, q_weight=u[:8])[0], [x, u])):
        given = [split(v, Shard(0) if v is x else Replicate()) for v in leaves]
        out, right = f(*given), f(*leaves)
        verdict(f"{name} of a DTensor", isinstance(out, DTensor) and out.placements == (Shard(0),), str(out))
        full = lambda v: v.full_tensor() if isinstance(v, DTensor) else v
        close(f"{name} of a DTensor: values", [full(v) for v in (out, *torch.autograd.grad(out.sum(), given))],
              [right, *torch.autograd.grad(right.sum(), leaves)])


# ---- md_lrpe_cosine ---------------------------------------------------------------------------------------------------------

ACTS = {None: lambda v: v, "relu": F.relu, "sigmoid": torch.sigmoid, "silu": F.silu, "softmax": lambda v: v.softmax(-1),
        "softmax_tokens": lambda v: v.softmax(-2)}


def lrpe_positions(shape, offset):
    axes = [torch.arange(n, device=D) + first for n, first in zip(shape, offset or [0] * len(shape))]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).view(-1, len(shape)).double()


def lrpe_angles(theta, shape, dim, offset):
    position = lrpe_positions(shape, offset)
    angles = position[None, :, :, None] * theta[:, None, None, :]
    return angles.reshape(theta.shape[0], math.prod(shape), len(shape) * theta.shape[1])[..., :dim]


def lrpe_theta(theta, x, shape):
    """theta of all heads and features; those that share one have a row or a column."""
    return theta.expand(x.shape[1], -(-x.shape[3] // len(shape)) if theta.shape[1] == 1 else theta.shape[1])


def exact_lrpe(x, theta, shape, prefix, activation, offset=()):
    a, theta = ACTS[activation](x), lrpe_theta(theta, x, shape)
    phi = lrpe_angles(theta, shape, x.shape[3], offset)
    head, cells = a[:, :, :prefix], a[:, :, prefix:]
    return torch.cat([torch.cat([head, torch.zeros_like(head)], -1), torch.cat([cells * phi.cos(), cells * phi.sin()], -1)], 2)


def lrpe_bounds(shape, prefix, activation, wants, offset=()):
    def bounds(doubles, outs, ups, gradients):
        x, own = doubles
        d, a, theta = x.shape[3], ACTS[activation](x).abs(), lrpe_theta(own, x, shape)
        relative = torch.zeros_like(x)
        if activation in ("sigmoid", "silu"):
            relative = (x.abs() + 8) * 2 * U
        elif activation == "softmax":
            relative = (x.amax(-1, keepdim=True) - x + math.log(d) + 8) * 2 * U
        elif activation == "softmax_tokens":
            relative = (x.amax(-2, keepdim=True) - x + 2 * math.log(x.shape[2]) + 18) * 2 * U
        angle = 8e-7
        y = (torch.cat([a, a], -1) * angle + torch.cat([a * relative] * 2, -1))
        if not gradients:
            return [y], []
        g = ups[0][..., :d].abs() + ups[0][..., d:].abs()
        if activation in ("softmax", "softmax_tokens"):
            over = -1 if activation == "softmax" else -2
            inner = (g * a).sum(over, keepdim=True)
            dx = a * (g + inner) * (angle + 2 * relative.amax(over, keepdim=True) + 16 * U)
        else:
            size = {None: torch.ones_like(x), "relu": (x > 0).double(), "sigmoid": torch.sigmoid(x),
                    "silu": torch.sigmoid(x) * (1 + x.abs())}[activation]
            dx = g * size * (angle + 3 * relative + 4 * U)
        errors = [dx]
        if wants[1]:
            position = lrpe_positions(shape, offset).repeat_interleave(theta.shape[1], 1)[:, :d]
            terms = (position.abs() * (g * a * (angle + relative + 16 * U))[:, :, prefix:]).sum((0, 2))
            spread = torch.zeros(theta.shape[0], len(shape) * theta.shape[1], dtype=torch.float64, device=D)
            spread[:, :d] = terms
            errors.append(spread.view(theta.shape[0], len(shape), -1).sum(1).sum_to_size(own.shape))
        return [y], [e for e, want in zip(errors, wants) if want]
    return bounds


def md_lrpe_cosine():
    shapes = [(2, 3, 16, (10,), 0), (1, 2, 24, (3, 5), 2), (3, 1, 7, (2, 3, 2), 1), (2, 2, 64, (6,), 3),
              (1, 1, 8, (2, 1, 2, 2), 0)]
    for t, (b, h, d, shape, prefix), activation in itertools.product(TYPES, shapes, ACTS):
        n, e = prefix + math.prod(shape), -(-d // len(shape)) + rng.choice((0, 0, 2))
        wants = rng.choice(((True, True), (True, True), (True, False), (False, True)))
        layout = rng.choice(LAYOUTS)
        theta = normal(*rng.choice(((h, e), (h, e), (1, e), (h, 1), (1, 1))))
        theta = leaf(theta, rng.choice((t, F32)), rng.choice(("packed", "transposed")), wants[1])
        offset = tuple(rng.randint(-9, 99) for _ in shape) if rng.random() < 0.5 else ()
        hold(f"{NAMES[t]} {(b, h, n, d)} {shape} prefix {prefix} {activation} theta {NAMES[theta.dtype]} {tuple(theta.shape)} "
             f"{offset} {layout}",
             lambda x, th: LF.md_lrpe_cosine(x, th, shape, prefix, activation, offset),
             lambda x, th: exact_lrpe(x, th, shape, prefix, activation, offset),
             [leaf(normal(b, h, n, d), t, layout, wants[0]), theta], lrpe_bounds(shape, prefix, activation, wants, offset),
             dtypes=[t])
    for layout, upstream in itertools.product(LAYOUTS, UPSTREAMS):
        hold(f"f32 {layout}", lambda x, th: LF.md_lrpe_cosine(x, th, (5,)), lambda x, th: exact_lrpe(x, th, (5,), 0, None),
             [leaf(normal(2, 3, 5, 8), F32, layout), leaf(normal(3, 8))], lrpe_bounds((5,), 0, None, (True, True)), upstream)
    for shape, full in (((0,), (2, 2, 0, 8)), ((3,), (0, 2, 3, 8))):
        hold(f"empty {full}", lambda x, th: LF.md_lrpe_cosine(x, th, shape), lambda x, th: exact_lrpe(x, th, shape, 0, None),
             [leaf(torch.zeros(full)), leaf(normal(2, 8))], lambda d, o, u, g: ([0.0], [torch.zeros_like(t) for t in g]))
    for t, (b, h, d, shape, prefix), dtype in itertools.product(TYPES, shapes, (torch.int32, torch.int64)):
        offset = tuple(rng.randint(-9, 99) for _ in shape)
        x, th = leaf(normal(b, h, prefix + math.prod(shape), d), t), leaf(normal(h, -(-d // len(shape))))
        room = torch.tensor([v for n in offset for v in (n, 1000)], device=D).to(dtype)  # read as they lie: every second one
        hold(f"{NAMES[t]} {shape} prefix {prefix}, offset {offset} in {dtype} on the device",
             lambda x, th: LF.md_lrpe_cosine(x, th, shape, prefix, "silu", room[::2]),
             lambda x, th: exact_lrpe(x, th, shape, prefix, "silu", offset), [x, th],
             lrpe_bounds(shape, prefix, "silu", (True, True), offset), dtypes=[t])
        same = [out_and_gradients(lambda x, th: LF.md_lrpe_cosine(x, th, shape, prefix, None, by), [x, th]) for by in (offset, room[::2])]
        verdict(f"{NAMES[t]} {shape}: an offset on the device has the bits of a number", all(map(torch.equal, *same)))
    x, th = leaf(normal(1, 2, 3, 8)), leaf(normal(2, 8))
    step = torch.compile(lambda x, th, at: LF.md_lrpe_cosine(x, th, (3,), offset=at), fullgraph=True, backend="aot_eager")
    for n in (5, 9):
        at = torch.tensor([n], device=D)
        close(f"compiled, offset {n} on the device", out_and_gradients(lambda x, th: step(x, th, at), [x, th]),
              out_and_gradients(lambda x, th: LF.md_lrpe_cosine(x, th, (3,), offset=(n,)), [x, th]))
    module = lk_torch.MdLrpeCosine(2, 8, device=D)
    verdict("the module's offset on the device", torch.equal(module(x, (3,), 0, torch.tensor([4], device=D)), module(x, (3,), 0, (4,))))
    raises("offset of another length", lambda: LF.md_lrpe_cosine(x, th, (3,), offset=torch.tensor([1, 2], device=D)), "offset", kind=ValueError)
    raises("offset of a type", lambda: LF.md_lrpe_cosine(x, th, (3,), offset=torch.tensor([1.0], device=D)), "offset", kind=TypeError)
    if CUDA:
        hold("bf16, a large grid", lambda x, th: LF.md_lrpe_cosine(x, th, (32, 32), 1, "silu"),
             lambda x, th: exact_lrpe(x, th, (32, 32), 1, "silu"), [leaf(normal(2, 8, 1025, 128), BF16), leaf(normal(8, 64))],
             lrpe_bounds((32, 32), 1, "silu", (True, True)))


# ---- Layouts ----------------------------------------------------------------------------------------------------------------


def lies(t):
    """Where rows start: of the first one, and from each to the next, in elements modulo 16 bytes."""
    size = t.element_size()
    rows = [t.stride(i) for i in range(t.dim() - 1) if t.shape[i] > 1][-1:] or [0]
    return t.data_ptr() % 16 // size, rows[0] % (16 // size)


def learners(cols, t=BF16, shape=(5,)):
    """Each call whose gradient has the layout of its input: (name, function of it)."""
    y, q = classes(cols, *shape), torch.softmax(normal(*shape, cols), -1).to(D, t)
    flat = lambda x: x.reshape(-1, cols) if x.dim() > 2 else x
    ids, teacher = torch.stack([y, (y + 1) % cols], -1), leaf(normal(*shape, cols), t, grad=False)
    loss = lambda x, target=y.flatten(), **more: LF.cross_entropy(flat(x), target, **more)
    return [("logsumexp", lambda x: LF.logsumexp(x, -1, dtype=F32).sum()), ("kl", lambda x: LF.kl(x, teacher, reduction="sum")),
            ("cross_entropy", lambda x: loss(x)), ("cross_entropy sum", lambda x: loss(x, reduction="sum")),
            ("cross_entropy none", lambda x: loss(x, reduction="none").sum()),
            ("cross_entropy, options", lambda x: loss(x, label_smoothing=0.125, z_loss=0.01, softcap=9.0, reduction="sum")),
            ("probabilities", lambda x: loss(x, q.view(-1, cols), reduction="sum")),
            ("cross_entropy_stats", lambda x: sum_of(LF.cross_entropy_stats(flat(x), y.flatten(), label_smoothing=0.125))),
            ("cross_entropy_ids", lambda x: sum(v.sum() for v in LF.cross_entropy_ids(x, ids, tail=True)))]


def layouts():
    """Rows that are apart, or beside a multiple of 16 bytes: values, the layout of gradients, and that kernels get vectors."""
    every = dict(PLAIN)
    for t, layout, shape in itertools.product(TYPES, APART, ((5, 101), (4, 128))):
        for reduction in ("none", "mean"):
            loss_case(t, shape, layout, {**every, "reduction": reduction}, None)
            prob_case(t, shape, layout, {**every, "reduction": reduction}, None,
                      leaf(torch.rand(shape, generator=generator), t, rng.choice(APART), False))
        stats_case(t, shape, layout, {**every, "label_smoothing": 0.125}, None, (0, 1, 3))
        ids_case(t, shape, 3, layout, {}, True, (True, True, True), True)
        teacher = leaf(normal(*shape), t, rng.choice(APART), False)
        exact = kl_exact(teacher, "reverse", 0.5, (1.0, 1.0), (0.0, 0.0), None, "sum")
        hold(f"kl {NAMES[t]} {shape} {layout}", lambda x: LF.kl(x, teacher, divergence="reverse", reduction="sum"), exact,
             [leaf(normal(*shape), t, layout)], kl_bounds(exact, None))
        for dim in (0, 1):
            hold(f"logsumexp {NAMES[t]} {shape} {layout} dim {dim}", lambda x: LF.logsumexp(x, dim),
                 lambda x: torch.logsumexp(x, dim), [leaf(normal(*shape), t, layout)], logsumexp_bounds(dim, 1.0, False))
    attempt("layout of gradients", layout_of_gradients)
    attempt("gradients that backward scales", scaled_apart)
    attempt("parameters", layout_of_parameters)
    attempt("copies", copies)
    attempt("fakes", fakes)
    attempt("compiled layouts", compiled_layouts)
    attempt("calls of C", calls_of_c)


def layout_of_gradients():
    for t, layout, cols, shape in itertools.product(TYPES, APART, (101, 128), ((5,), (2, 3))):
        for name, f in learners(cols, t, shape):
            x = leaf(normal(*shape, cols, sigma=2.0), t, layout)
            g, = torch.autograd.grad(f(x), x)
            plain = x.detach().clone(memory_format=torch.contiguous_format).requires_grad_()
            close(f"{name} {NAMES[t]} {layout} {shape}", g, torch.autograd.grad(f(plain), plain)[0], 2 * HALF[t] + 64 * U)
            if x.is_contiguous() or x.stride(0) == x.stride(1) * x.shape[1] or x.dim() == 2:
                verdict(f"{name} {NAMES[t]} {layout} {shape}: rows of the gradient lie as those of the input", lies(g) == lies(x),
                        f"{lies(g)}, not {lies(x)}")
                verdict(f"{name} {NAMES[t]} {layout} {shape}: and less than 16 bytes apart",
                        cols <= g.stride(-2) < cols + 16 // g.element_size(), str(g.stride()))
    for t, cols, pad in ((BF16, 55, 7), (BF16, 56, 7), (F32, 7, 1), (F32, 8, 1)):
        x = torch.zeros(5, cols + pad, device=D, dtype=t)[:, :cols].requires_grad_()
        for name, f in learners(cols, t):
            g, = torch.autograd.grad(f(x), x)
            verdict(f"{name}: {cols} columns with {pad} more", g.is_contiguous() == (8 * pad > cols), str(g.stride()))
    y = classes(128, 5)
    for t, dtype in ((BF16, None), (BF16, torch.float8_e5m2), (F32, BF16), (F16, torch.float8_e5m2)):
        for layout in APART:
            x = leaf(normal(5, 128), t, layout, False)
            loss, d = LF.cross_entropy_with_grad(x, y, dlogits_dtype=dtype, grad_scale=8.0)
            packed = LF.cross_entropy_with_grad(x.clone(memory_format=torch.contiguous_format), y, dlogits_dtype=dtype, grad_scale=8.0)
            close(f"with_grad {NAMES[t]} {dtype} {layout}", (loss, d.float()), (packed[0], packed[1].float()), 64 * U)
            vec = 16 // x.element_size()
            right = (d.storage_offset() - x.storage_offset()) % vec == (d.stride(0) - x.stride(0)) % vec == 0
            verdict(f"with_grad {NAMES[t]} {dtype} {layout}: vectors", right and d.data_ptr() % 16 == d.storage_offset() * d.element_size() % 16,
                    f"{d.stride()}, {d.storage_offset()}")


def scaled_apart():
    """The gradient of a mean, made in forward, is scaled in backward: also what lies between its rows, unless others hold that."""
    y = classes(101, 5)
    for t, layout in itertools.product((F32, BF16), APART):
        x = leaf(normal(5, 101), t, layout)
        right, = torch.autograd.grad(F.cross_entropy(x.double(), y), x)
        loss = lambda: LF.cross_entropy(x, y, grad_scale=1.0)
        bound = rounded(right.double(), 64 * U * right.double().abs(), t, 3)
        out, up = loss(), torch.tensor(5.0, device=D)
        a = torch.autograd.grad(out, x, up, retain_graph=True)[0]
        b = torch.autograd.grad(out, x, up, retain_graph=True)[0]
        c = torch.autograd.grad(out, x, up)[0]
        for i, g in enumerate((a, b, c)):
            compare(f"scaled {NAMES[t]} {layout}, turn {i}", ("dx", g, right.double() * 5, 5 * bound))
        verdict(f"scaled {NAMES[t]} {layout}: a layout for all", lies(a) == lies(b) == lies(c) == lies(x), f"{lies(a)}, {lies(c)}, {lies(x)}")
        buffers = []

        def pack(v):  # the saved gradient goes into a buffer of the hook's own, between other numbers
            if v.dim() < 2:
                return v
            buffers.append(v.new_full((5, 104), 7.0))
            buffers[-1][:, 2:-1] = v
            return buffers[-1]
        for unpack in (lambda v: v[:, 2:-1] if v.dim() == 2 else v, lambda v: v[:, 2:-1].t().contiguous().t() if v.dim() == 2 else v):
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                out = loss()
            g, = torch.autograd.grad(out, x, up)
            compare(f"scaled {NAMES[t]} {layout}, of a hook", ("dx", g, right.double() * 5, 5 * bound))
            verdict(f"scaled {NAMES[t]} {layout}: the hook's numbers stay", bool((buffers[-1][:, :2] == 7).all() and (buffers[-1][:, -1] == 7).all()))
        raises(f"{NAMES[t]} {layout}: second derivative", lambda: torch.autograd.grad(
            torch.autograd.grad(loss(), x, create_graph=True)[0].sum(), x), "no second derivative")


def layout_of_parameters():
    """.grad of a leaf that is cut from more memory, of a padded parameter, and with two uses and two backwards."""
    for t, layout in itertools.product((F32, BF16), APART):
        for name, f in learners(101, t):
            x = leaf(normal(5, 101), t, layout)
            g, = torch.autograd.grad(f(x), x)
            f(x).backward()
            close(f"{name} {NAMES[t]} {layout}: .grad", x.grad, g)
            (f(x) + f(x * 1)).backward()
            close(f"{name} {NAMES[t]} {layout}: .grad of three uses", x.grad, 3 * g, 4 * HALF[t] + 64 * U)
    for t, part in itertools.product((F32, BF16), ((slice(None), slice(None, -1)), (slice(None), slice(1, None)), (slice(1, None), slice(3, 99)))):
        p = leaf(normal(5, 102), t)
        rows, cols = p[part].shape
        for name, f in learners(cols, t, (rows,)):
            p.grad = None
            f(p[part]).backward()
            plain = p.detach()[part].clone(memory_format=torch.contiguous_format).requires_grad_()
            right = torch.zeros_like(p)
            right[part] = torch.autograd.grad(f(plain), plain)[0]
            close(f"{name} {NAMES[t]} a parameter's {part}", p.grad, right, 2 * HALF[t] + 64 * U)
            verdict(f"{name} {NAMES[t]} a parameter's {part}: zeros beside it", p.grad.is_contiguous() and not p.grad[right == 0].any())
            batch = leaf(normal(3, *p.shape), t, rng.choice(APART), False)
            one = lambda v: f(v[part]).float()
            found = torch.func.vmap(torch.func.grad(one))(batch)
            close(f"{name} {NAMES[t]} a parameter's {part}, vmap", found, torch.stack([torch.func.grad(one)(v) for v in batch]),
                  2 * HALF[t] + 64 * U)


def large_calls():
    """Calls of norms, md_lrpe_cosine and heads whose inputs are large enough for copies, and one size below: (name, large, function,
    shapes of the tensors, types)."""

    def of(rows, large):
        shape, y = (rows, 1024), torch.arange(rows, device=D) % 16
        out = []
        for w in (BF16, F32):
            out += [(f"rms_norm weight {NAMES[w]}", large, lambda x, w: LF.rms_norm(x, (1024,), w), [shape, (1024,)], [BF16, w])]
        out += [("rms_norm", large, lambda x: LF.rms_norm(x, (1024,)), [shape], [BF16]),
                ("rms_norm f32", large, lambda x, w: LF.rms_norm(x, (512,), w), [(rows, 512), (512,)], [F32, F32]),
                ("add_rms_norm", large, lambda x, r, w: LF.add_rms_norm(x, r, (1024,), w), [shape, shape, (1024,)], [BF16] * 3),
                ("rms_norm 8 bits", large, lambda x, w: LF.rms_norm(x, 1024, w, out_dtype=torch.float8_e4m3fn, scaling="block128")[0],
                 [shape, (1024,)], [BF16, BF16]),
                ("logsumexp dim 0", large, lambda x: LF.logsumexp(x, 0, dtype=F32), [shape], [BF16]),
                ("md_lrpe_cosine", large, lambda x, th: LF.md_lrpe_cosine(x, th, (rows,)), [(1, 8, rows, 128), (8, 128)], [BF16, F32]),
                ("linear_cross_entropy", large, lambda x, w: LF.linear_cross_entropy(x, w, y), [shape, (16, 1024)], [BF16, BF16]),
                ("linear_kl", large, lambda x, w: LF.linear_kl(x, w, x.detach() * 2, w.detach()), [shape, (16, 1024)], [BF16, BF16]),
                ("linear_cross_entropy_ids", large, lambda x, w: LF.linear_cross_entropy_ids(x, w, y[:, None]).loss,
                 [shape, (16, 1024)], [BF16, BF16])]
        if large:
            out.append(("add_rms_norm f32 residual", large, lambda x, r: LF.add_rms_norm(x, r, (1024,)), [shape, shape], [BF16, F32]))
        return out
    return of(72, True) + of(56, False)  # 128 KiB are 64 rows of 1024 in bf16


def copies():
    """What is copied before a kernel has the results of packed tensors, whose vectors the kernel then reads: the same bits. head:
    cuBLASLt and plans choose by alignment, so to the last bit only on the simulator."""
    for name, large, f, shapes, types in large_calls():
        for layout in ("gaps", "beside", "one more", "heads"):
            values = [normal(*s) * (0.05 if "linear" in name and i else 1) for i, s in enumerate(shapes)]
            packed = [leaf(v, t) for v, t in zip(values, types)]
            moved = [leaf(v, t, layout if v.dim() > 1 else "beside") for v, t in zip(values, types)]
            found, right = [], []
            for leaves, into in ((moved, found), (packed, right)):
                outs = [o for o in tuple_of(f(*leaves)) if o.requires_grad]
                ups = [leaf(torch.linspace(-1, 1, o.numel()).view(o.shape), o.dtype if o.element_size() > 1 else BF16,
                            layout if leaves is moved else "packed", False) for o in outs]
                if "8 bits" in name:  # the gradient of numbers of 8 bits is one of input's type: through a function of the user's
                    into += [o.float() for o in outs]
                    continue
                into += [*outs, *torch.autograd.grad(outs, leaves, ups, allow_unused=True)]
            close(f"{name} {shapes[0]} {layout}", found, right, 2 * HALF[BF16])


def fakes():
    """What _fake.py says of the layout of each result is what the kernel returns. opcheck copies its samples, which packs them."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    found = []
    for t, layout, cols in itertools.product((F32, BF16), LAYOUTS, (101, 128, 24)):
        for shape in ((5,), (2, 3)):
            x = leaf(normal(*shape, cols), t, layout)
            for name, f in learners(cols, t, shape):
                with Calls(found):
                    torch.autograd.grad(f(x), x)
            if len(shape) == 1:
                y = classes(cols, 5)
                for dtype in (None, torch.float8_e5m2):
                    with Calls(found):
                        LF.cross_entropy_with_grad(x, y, dlogits_dtype=dtype)
    seen, wrong, apart = 0, [], 0
    describe = lambda out: [(tuple(v.shape), v.dtype, v.stride(), v.storage_offset()) for v in tuple_of(out)]
    for op, args, _ in found:
        if op.namespace != "lk":
            continue
        with torch.no_grad():
            real = describe(op(*args))
            with FakeTensorMode() as mode:
                fake = describe(op(*[mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for v in args]))
        seen += 1
        apart += any(stride and stride != torch.empty(shape, device="meta").stride() for shape, _, stride, _ in real)
        if real != fake:
            wrong.append(f"{op} of {[(v.shape, v.stride(), v.storage_offset()) for v in args if isinstance(v, torch.Tensor)][:2]}: {fake}, not {real}")
    verdict(f"{seen} results of kernels lie as their fakes, {apart} of them apart", not wrong and apart > 100, f"{len(wrong)}: {wrong[:2]}")


def compiled_layouts():
    y = classes(101, 6)
    for backend in ("aot_eager", "inductor"):
        for name, f in learners(101, F32, (6,)):
            if backend == "inductor" and name not in ("logsumexp", "kl", "cross_entropy", "cross_entropy none"):
                continue  # a program takes seconds, and the others lay their gradients out by the same function
            def check():
                torch._dynamo.reset()
                # logits that a graph makes and cuts, and the gradient of these, which it reads
                g = lambda p: f((p * 2)[:, :-1])
                cut = lambda p: f(p[:, 1:-2])
                for what, h, width in (("made", g, 102), ("cut", cut, 104)):
                    fast = torch.compile(h, fullgraph=True, backend=backend)
                    for n in range(2):
                        p = leaf(normal(6, width))
                        close(f"{backend}, {name} {what} {n}", out_and_gradients(fast, [p]), out_and_gradients(h, [p]), 1e-5)
                if backend == "inductor":
                    fast = torch.compile(f, fullgraph=True)
                    for layout in APART + APART[:2]:  # a program for one layout, then the others
                        x = leaf(normal(6, 101), F32, layout)
                        found, right = out_and_gradients(fast, [x]), out_and_gradients(f, [x])
                        close(f"inductor, {name} {layout}", found, right, 1e-5)
            attempt(f"{backend}, {name}", check)
    for name, f in (("logsumexp", lambda x, y: LF.logsumexp(x[:, :-1], 1).sum()), ("kl", lambda x, y: LF.kl(x[:, :-1], x[:, 1:].detach())),
                    ("cross_entropy", lambda x, y: LF.cross_entropy(x[:, :-1], y)),
                    ("cross_entropy none", lambda x, y: LF.cross_entropy(x[:, 1:], y, reduction="none").sum())):
        torch._dynamo.reset()
        counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        fast = torch.compile(f, backend=counter, fullgraph=True)
        for n in (6, 8, 10, 12):
            x, y = leaf(normal(n, 102)), classes(101, n)
            close(f"{name} of {n} rows", torch.autograd.grad(fast(x, y), x), torch.autograd.grad(f(x, y), x), 1e-5)
        verdict(f"{name}, cut: at most 2 programs for 4 sizes", counter.frame_count <= 2, f"{counter.frame_count} programs")
        torch._dynamo.reset()
        g = torch.autograd.grad
        inside = torch.compile(lambda x, y: f(x * 1, y), backend="aot_eager", dynamic=True, fullgraph=True)
        for n, cols in ((6, 102), (7, 99), (9, 65)):  # of classes too: residues are symbols
            x, y = leaf(normal(n, cols)), classes(cols - 1, n)
            close(f"{name} of {n} x {cols}", g(inside(x, y), x), g(f(x, y), x), 1e-5)
    torch._dynamo.reset()


def calls_of_c():
    """In a process whose calls of lk's library pass through calls.cpp: what the kernels get."""
    import tempfile
    with tempfile.TemporaryDirectory() as folder:
        spy, root = f"{folder}/calls.so", os.path.dirname(os.path.dirname(HERE))
        subprocess.run([os.environ.get("CXX", "g++"), "-std=c++17", "-O1", "-shared", "-fPIC", "-I", root, HERE + "/calls.cpp", "-o", spy,
                        "-ldl"], check=True)
        in_a_child("spied", more={"LD_PRELOAD": spy, "LK_TEST_SPY": spy})


def sequences():
    """Tensors as logits[:, :-1], of whose rows logsumexp copies none: (name, x, type of the result). And some that it copies."""
    for name, t, dtype, shape, cut in (
            ("f32", F32, None, (2, 513, 2048), lambda x: x[:, :-1]), ("bf16", BF16, None, (2, 3, 256, 4096), lambda x: x[:, 1:]),
            ("f16", F16, F32, (2, 513, 4104), lambda x: x[:, 1:, 8:]), ("long rows", F32, None, (2, 401, 4104), lambda x: x[:, :-1]),
            ("copied: small", F32, None, (3, 8, 16), lambda x: x[:, :-1]),
            ("copied: too few rows", F32, None, (2, 400, 4104), lambda x: x[:, :-1]),
            ("copied: an odd length", BF16, None, (2, 513, 4097), lambda x: x[:, :-1]),
            ("copied: beside", F32, None, (2, 513, 2052), lambda x: x[:, :-1, 1:-3])):
        yield name, cut(leaf(normal(*shape), t, grad=False)).requires_grad_(), dtype


def spied():
    import ctypes
    library = next(line.split()[-1] for line in open("/proc/self/maps") if "/liblk" in line)
    spy = ctypes.CDLL(os.environ["LK_TEST_SPY"])
    spy.lk_calls.restype = ctypes.c_char_p
    verdict("calls.cpp finds the library", spy.lk_calls_open(library.encode()) == 0, library)

    def calls(f):
        """[(function, {tensor: (address, distance of rows, bytes of an element)}, columns)]"""
        spy.lk_calls()
        f()
        found = []
        for line in spy.lk_calls().decode().splitlines():
            name, cols, *fields = line.split()
            numbers = {k: tuple(map(int, v.split(","))) for k, v in (field.split("=") for field in fields)}
            found.append((name, {k: v for k, v in numbers.items() if v[0]}, int(cols)))
        return found

    def alike(tensors, cols):
        """Rows of all tensors have the same offset modulo 16 bytes, in elements where their sizes differ."""
        base, step, size = next(iter(tensors.values()))
        vec = 16 // size
        return all((a // b - base // size) % min(vec, 16 // b) == 0 and ((s or cols) - (step or cols)) % min(vec, 16 // b) == 0
                   for a, s, b in tensors.values())
    on_16 = lambda tensors, cols: all(a % 16 == 0 and (s or cols) * b % 16 == 0 for a, s, b in tensors.values())
    of_loss = {"logsumexp": "logsumexp_backward", "kl": "kl_backward", "cross_entropy none": "cross_entropy_backward",
               "cross_entropy": "cross_entropy_forward_backward", "cross_entropy sum": "cross_entropy_forward_backward",
               "cross_entropy, options": "cross_entropy_forward_backward", "cross_entropy_stats": "cross_entropy_backward",
               "probabilities": "cross_entropy_probabilities_forward_backward", "cross_entropy_ids": "cross_entropy_ids_backward"}
    for t, layout, cols in itertools.product(TYPES, APART, (101, 128)):
        for name, f in learners(cols, t):
            x = leaf(normal(5, cols), t, layout)
            found = calls(lambda: torch.autograd.grad(f(x), x))
            of = f"lk_{of_loss[name].replace('forward_', '' if t == F16 else 'forward_')}_{NAMES[t]}"  # f16: see the README
            right = [alike(tensors, c) for function, tensors, c in found if function == of and len(tensors) == 2]
            verdict(f"{of}, {layout} x {cols}: vectors", bool(right) and all(right), str(found))
            if layout == "packed":  # the same call with a gradient one element on would not be
                moved = [{k: (a + b * (k != "logits" and k != "x"), s, b) for k, (a, s, b) in tensors.items()} for function, tensors, c in found if function == of]
                verdict(f"{of}: what is not alike is seen", bool(moved) and not any(alike(m, cols) for m in moved))
    for name, x, dtype in sequences():
        up = normal(*x.shape[:-1]).to(D, dtype or x.dtype)
        run = lambda x: (lambda out: (out, *torch.autograd.grad(out, x, up)))(LF.logsumexp(x, -1, dtype=dtype))
        results = []
        found = [(function, tensors["x"][0]) for function, tensors, _ in calls(lambda: results.extend(run(x)))]
        right = [(f"lk_logsumexp_{way}_{NAMES[x.dtype]}", x.data_ptr() + i * x.stride(0) * x.element_size())
                 for way in ("forward", "backward") for i in range(x.shape[0])]
        seen = len(found) == 2 and not set(right) & set(found) if "copied" in name else found == right
        verdict(f"logsumexp of sequences, {name}: {len(found)} calls", seen, f"{found}, not {right}")
        packed = run(x.detach().clone(memory_format=torch.contiguous_format).requires_grad_())
        verdict(f"logsumexp of sequences, {name}: the bits of packed rows", all(torch.equal(a, b) for a, b in zip(results, packed)))
        verdict(f"logsumexp of sequences, {name}: the gradient is packed", results[1].is_contiguous(), str(results[1].stride()))
    n, ways = 24, dict(apart=LF.glu, halves=LF.glu, chunk=lambda x: LF.glu(*x.chunk(2, -1)),
                       turns=lambda x: LF.glu(x, interleaved=True))
    for layout, (how, f) in itertools.product(LAYOUTS, ways.items()):
        wide, owned = n if how == "apart" else 2 * n, layout in APART + ("second rows", "swapped")  # of two dimensions
        tensors = [leaf(normal(4, wide), BF16, layout) for _ in range(1 + (how == "apart"))]
        results = []
        found = calls(lambda: results.extend(torch.autograd.grad(f(*tensors), tensors, torch.ones(4, n, dtype=BF16, device=D))))
        x = tensors[0]
        gate, up = x.data_ptr(), 0 if how == "turns" else tensors[1].data_ptr() if how == "apart" else x.data_ptr() + 2 * n
        given = [(name, t["gate"][0], t.get("up", (0,))[0], t["gate"][1] or wide) for name, t, _ in found]
        right = [(f"lk_glu_{way}_bf16", gate, up, x.stride(0)) for way in ("forward", "backward")]
        seen = given == right if owned else len(given) == 2 and all(g[1] != gate for g in given)
        verdict(f"glu {how} {layout}: {'where it lies' if owned else 'copied'}", seen, f"{given}, not {right}")
        if how == "halves":
            both = [(t["dgate"][:2], t["dup"][:2]) for name, t, _ in found[1:]]
            at = results[0].data_ptr()
            verdict(f"glu {how} {layout}: one gradient", both == [((at, 2 * n), (at + 2 * n, 2 * n))], str(both))
        elif how != "turns" and layout == "packed":
            verdict(f"glu {how}: vectors", all(alike(t, cols) for _, t, cols in found), str(found))
    room = torch.randn(2, 6, 4 * 16 + 8, device=D).to(BF16)
    for layout, q, there in (("packed qkv", room[..., :48].view(2, 6, 3, 16), True),
                             ("its transposition", room[..., :48].view(2, 6, 3, 16).transpose(0, 1), True),
                             ("a part of heads", room[..., :64].view(2, 6, 4, 16)[..., :8], True),
                             ("three dimensions", room[0, :, :48].view(6, 3, 16), True),
                             ("expanded", room[:1, :, :48].view(1, 6, 3, 16).expand(2, 6, 3, 16), False),
                             ("last apart", room[..., :64].view(2, 6, 4, 16)[..., ::2], False)):
        cos = torch.randn(q.shape[-3], q.shape[-1], device=D)
        for first, norm in itertools.product((False, True), (None, torch.ones(q.shape[-1], device=D))):
            x = (q.transpose(-3, -2) if first else q).detach().requires_grad_()
            results = []

            def run():
                y = LF.rope(x, cos=cos, sin=cos, heads_first=first, q_weight=norm)
                results.extend((y, *torch.autograd.grad(y, x, torch.ones_like(y))))
            found, step = calls(run), q.stride(-3)
            y = results[0].transpose(-3, -2) if first else results[0]
            given = [(name, *t["q"][:2], *t["cos"]) if "q" in t else (name, *t["cos"]) for name, t, _ in found]
            table = (cos.data_ptr(), cos.stride(0), 4)
            lies = (q.data_ptr(), step, *table)
            right = [("lk_rope_forward_bf16", *lies), ("lk_rope_backward_bf16", *(table if norm is None else lies))]
            seen = given == right if there else len(given) == 2 and given[0][1] != q.data_ptr()
            what = f"rope {layout}, heads first {first}, norm {norm is not None}"
            verdict(f"{what}: {'where it lies' if there else 'copied'}", seen, f"{given}, not {right}")
            verdict(f"{what}: written where the result lies", found[0][1]["q_out"][:2] == (y.data_ptr(), y.stride(-3)), str(found))
    for name, large, f, shapes, types in large_calls():
        for layout in ("packed", "gaps", "beside", "one more", "heads"):
            leaves = [leaf(normal(*s), t, layout if len(s) > 1 else "packed" if layout == "packed" else "beside") for s, t in zip(shapes, types)]

            def run():
                outs = [o for o in tuple_of(f(*leaves)) if o.requires_grad]
                if "8 bits" not in name:
                    torch.autograd.grad(outs, leaves, [leaf(normal(*o.shape), o.dtype, layout if o.dim() else "packed", False) for o in outs],
                                        allow_unused=True)
            found = calls(run)
            on = alike if "rms_norm" in name and "8 bits" not in name else on_16  # as the headers of the ops say
            seen = [(function, on(tensors, cols)) for function, tensors, cols in found]
            enough = len(seen) >= (2 if name.startswith(("rms", "add", "md")) and "8 bits" not in name else 1)
            fast = large or layout == "packed" or (layout == "heads" and all(len(s) > 1 for s in shapes))
            fast = fast or ("dim 0" in name and layout != "beside")  # what is no packed tensor is copied, however small
            verdict(f"{name} {shapes[0]} {layout}: {'vectors' if fast else 'as they are'}",
                    enough and all(ok for _, ok in seen) == fast, f"{seen} of {found}")


# ---- What PyTorch users rely on ---------------------------------------------------------------------------------------------


def signatures():
    def parameters(f):
        return [(p.name, p.default) for p in inspect.signature(f).parameters.values() if p.name != "self"]

    def positional(f):
        return [(p.name, p.default) for p in inspect.signature(f).parameters.values() if p.kind != p.KEYWORD_ONLY]
    gone = ("size_average", "reduce")  # deprecated in PyTorch
    empty = inspect.Parameter.empty
    nn = lk_torch.nn
    for name, ours, theirs in (
            ("cross_entropy", positional(LF.cross_entropy), [p for p in parameters(F.cross_entropy) if p[0] not in gone]),
            ("rms_norm", positional(LF.rms_norm), parameters(F.rms_norm)),
            ("logsumexp", positional(LF.logsumexp), [("input", empty), ("dim", empty), ("keepdim", False)]),
            ("linear_cross_entropy", positional(LF.linear_cross_entropy),
             [("input", empty), ("linear_weight", empty), ("target", empty)])):
        verdict(f"{name}: as PyTorch's", ours == theirs, f"{ours}, not {theirs}")
    more = ("statistics", False)  # of stats alone
    stats = [p for p in parameters(LF.cross_entropy_stats) if p != more]
    late = ("keep", "grad_scale", "inplace", "options")  # what stats, whose gradients are computed in backward, has no use for
    plain = [p for p in parameters(LF.cross_entropy) if p[0] not in late]
    verdict("cross_entropy_stats: as cross_entropy", stats == plain, str(stats))
    both = [p for p in parameters(LF.cross_entropy_with_grad) if p[0] != "dlogits_dtype"]
    plain = [p for p in parameters(LF.cross_entropy) if p[0] not in ("inplace", "group", "shards", "vocab_slices")]
    verdict("cross_entropy_with_grad: likewise", both == plain, str(both))
    stats = [p for p in parameters(LF.linear_cross_entropy_stats) if p != more]
    plain = [p for p in parameters(LF.linear_cross_entropy) if p[0] not in late]
    verdict("linear_cross_entropy_stats: likewise", stats == plain, str(stats))
    keyword = lambda f: {p.name: p.default for p in inspect.signature(f).parameters.values() if p.kind == p.KEYWORD_ONLY}
    found = keyword(LF.linear_kl)
    wanted = {**keyword(LF.kl), **{k: v for k, v in keyword(LF.linear_cross_entropy).items()
                                   if k in ("linear_bias", "workspace_mib", "fast_logits", "max_counted", "grad_scale",
                                             "sequence_parallel")}, "teacher_bias": None}
    verdict("linear_kl: keywords of kl, and of linear_cross_entropy", found == wanted, f"{found}, not {wanted}")
    for name in ("RMSNorm", "CrossEntropyLoss"):
        wanted = [p for p in parameters(getattr(torch.nn, name).__init__) if p[0] not in gone]
        found = dict(parameters(getattr(nn, name).__init__))
        same = all(n in found and found[n] == v for n, v in wanted)
        verdict(f"nn.{name}: parameters of PyTorch's", same, f"{found}, not {wanted}")
    keywords = dict(parameters(LF.linear_cross_entropy))
    wanted = {**PLAIN, "linear_bias": None, "weight": None, "workspace_mib": None}
    verdict("linear_cross_entropy: keywords", all(keywords.get(k, empty) == v for k, v in wanted.items()), str(keywords))
    x, t = leaf(normal(4, 9)), classes(9, 4)
    compare("drop-in: positional and named as PyTorch's",
            ("loss", LF.cross_entropy(x, t, None, -100, "sum", 0.125),
             F.cross_entropy(x, t, None, None, -100, None, "sum", 0.125), 1e-5),
            ("named", LF.cross_entropy(input=x, target=t, weight=None), F.cross_entropy(input=x, target=t, weight=None), 1e-6),
            ("norm", LF.rms_norm(input=x, normalized_shape=[9], weight=None, eps=None), F.rms_norm(x, [9]), 1e-5),
            ("lse", LF.logsumexp(input=x, dim=(0, 1), keepdim=True), torch.logsumexp(x, dim=(0, 1), keepdim=True), 1e-5))


def modules():
    nn = lk_torch.nn
    torch.manual_seed(1)
    x, r, target = leaf(normal(4, 16)), leaf(normal(4, 16)), classes(12, 4)
    cube = leaf(normal(2, 2, 6, 16))
    weight = (torch.rand(12, generator=generator) + 0.25).to(D)
    teacher = normal(4, 8).to(D), normal(12, 8).to(D)
    made = [("RMSNorm", nn.RMSNorm(16), (x,)),
            ("RMSNorm, no weight", nn.RMSNorm((16,), eps=1e-5, elementwise_affine=False), (x,)),
            ("AddRMSNorm", nn.AddRMSNorm(16), (x, r)), ("SRMSNorm", nn.SRMSNorm(), (x,)),
            ("RMSNorm, weight_offset", nn.RMSNorm(16, weight_offset=1), (x,)),
            ("RMSNorm, bias and groups", nn.RMSNorm(16, bias=True, groups=2), (cube.transpose(1, 2),)),
            ("AddRMSNorm, bias", nn.AddRMSNorm((16,), bias=True), (x, r)),
            ("AddRMSNorm, round_sum", nn.AddRMSNorm(16, round_sum=True), (x, r)),
            ("CrossEntropyLoss, temperature", nn.CrossEntropyLoss(temperature=2, softcap=None), (x[:, :12], target)),
            ("AddRMSNorm, weight_offset", nn.AddRMSNorm(16, weight_offset=1), (x, r)),
            ("CrossEntropyLoss", nn.CrossEntropyLoss(label_smoothing=0.125), (x[:, :12], target)),
            ("CrossEntropyLoss, a learned scale", nn.CrossEntropyLoss(logit_scale=torch.nn.Parameter(torch.tensor(2.0))),
             (x[:, :12], target)),
            ("LinearCrossEntropyLoss, a learned scale",
             nn.LinearCrossEntropyLoss(16, 12, logit_scale=torch.nn.Parameter(torch.ones(1)), temperature=torch.ones(4)),
             (x, target)),
            ("CrossEntropyLoss, weights", nn.CrossEntropyLoss(weight=weight, reduction="sum"), (x[:, :12], target)),
            ("LinearCrossEntropyLoss", nn.LinearCrossEntropyLoss(16, 12), (x, target)),
            ("LinearCrossEntropyLoss, bias", nn.LinearCrossEntropyLoss(16, 12, bias=True), (x, target)),
            ("LinearKLLoss", nn.LinearKLLoss(16, 12, divergence="reverse", temperature=2), (x, *teacher)),
            ("LinearKLLoss, bias", nn.LinearKLLoss(16, 12, bias=True), (x, *teacher, torch.ones(12, device=D), weight[:4])),
            ("GLU", nn.GLU(), (x, r)), ("GLU, both", nn.GLU("gelu_tanh", limit=2, interleaved=True), (x, None, r[:, 0])),
            ("MdLrpeCosine", nn.MdLrpeCosine(2, 16, axes=2), (cube, (2, 3)))]
    for name, module, inputs in made:
        module = module.to(D)
        with torch.no_grad():
            for p in module.parameters():
                p.add_(torch.randn(p.shape, generator=generator).to(D) * 0.1)
        expected = tuple_of(module(*inputs))
        for how, twin in (("deepcopy", copy.deepcopy(module)), ("pickle", pickle.loads(pickle.dumps(module)))):
            same = all(torch.equal(a, b) for a, b in zip(tuple_of(twin(*inputs)), expected))
            verdict(f"{name}, {how}", same, "other outputs")
        memory = io.BytesIO()
        torch.save(module.state_dict(), memory)
        memory.seek(0)
        other = copy.deepcopy(module)
        with torch.no_grad():
            for p in other.parameters():
                p.zero_()
        other.load_state_dict(torch.load(memory, weights_only=True))
        same = all(torch.equal(a, b) for a, b in zip(tuple_of(other(*inputs)), expected))
        verdict(f"{name}, state_dict", same, "other outputs")
        sum(out.float().sum() for out in expected).backward()
        without = [n for n, p in module.named_parameters() if p.grad is None or not p.grad.isfinite().all()]
        verdict(f"{name}, every parameter has a gradient", not without, str(without))
        verdict(f"{name}, repr", type(module).__name__ in repr(module), repr(module))
    ours, theirs = nn.RMSNorm(16, eps=1e-5).to(D), torch.nn.RMSNorm(16, eps=1e-5).to(D)
    theirs.load_state_dict(ours.state_dict())
    compare("RMSNorm takes torch.nn.RMSNorm's state_dict", ("y", ours(x), theirs(x), 1e-5))
    shifted, both = nn.RMSNorm(16, eps=1e-5, weight_offset=1).to(D), nn.AddRMSNorm(16, eps=1e-5, weight_offset=1).to(D)
    with torch.no_grad():
        theirs.weight.copy_(torch.rand(16, generator=generator).to(D) + 0.5)
        shifted.weight.add_(theirs.weight - 1), both.weight.add_(theirs.weight - 1)  # they begin at 0, where the factor is 1
    compare("RMSNorm and AddRMSNorm with weight_offset 1 beside torch.nn.RMSNorm's weight", ("y", shifted(x), theirs(x), 1e-5),
            ("y of the sum", both(x, r)[0], theirs(x + r), 1e-5))
    ours, theirs = nn.CrossEntropyLoss(weight).to(D), torch.nn.CrossEntropyLoss(weight).to(D)
    compare("CrossEntropyLoss beside torch.nn's", ("loss", ours(x[:, :12], target), theirs(x[:, :12], target), 1e-5))
    head = nn.LinearCrossEntropyLoss(16, 12, logit_scale=torch.nn.Parameter(torch.full((), 2.0)), device=D).to(D)
    found = dict(head.named_parameters())
    verdict("a learned scale is a parameter, and keeps its first value", float(found["logit_scale"]) == 2, str(list(found)))
    half = nn.RMSNorm(16).to(D).to(BF16)
    verdict("RMSNorm.to(bf16)", half(x.to(BF16)).dtype == BF16 and half.weight.dtype == BF16, str(half.weight.dtype))


def sum_of(out):
    return out.loss.sum() + out.lse.sum() + 0.5 * out.entropy.sum()


def functions():
    """name, function of its leaves, and the leaves: each function once, small, in f32."""
    t, th = classes(12, 6), classes(20, 6)
    r = torch.linspace(-1, 2, 6, device=D)
    inv_freq, table = torch.linspace(1, 0.1, 6, device=D), torch.linspace(-1, 2, 24, device=D).view(6, 4)
    teacher = normal(6, 12).to(D)
    y, v, c = normal(6, 8).to(D), normal(20, 8).to(D), normal(20).to(D)  # a teacher's head
    several, positive = classes(12, 6, 3), torch.rand(6, 3, generator=generator).to(D) + 0.25
    at_support = torch.arange(0, 19, 3, device=D)
    return [("logsumexp", lambda x: LF.logsumexp(x, 1), [leaf(normal(6, 12))]),
            ("rms_norm", lambda x, w: LF.rms_norm(x, (12,), w), [leaf(normal(6, 12)), leaf(normal(12))]),
            ("rms_norm, weight_offset", lambda x, w: LF.rms_norm(x, (12,), w, weight_offset=1),
             [leaf(normal(6, 12)), leaf(normal(12))]),
            ("rms_norm, bias", lambda x, w, b: LF.rms_norm(x, (12,), w, bias=b),
             [leaf(normal(6, 12)), leaf(normal(12)), leaf(normal(12))]),
            ("rms_norm, groups", lambda x, w, b: LF.rms_norm(x.view(2, 3, 12), (12,), w, bias=b, groups=3),
             [leaf(normal(6, 12)), leaf(normal(3, 12)), leaf(normal(3, 12))]),
            ("rms_norm, gate", lambda x, g, w: LF.rms_norm(x, (12,), w, gate=g, gate_first=True),
             [leaf(normal(6, 12)), leaf(normal(6, 12)), leaf(normal(12))]),
            ("glu", lambda g, u, r: LF.glu(g, u, alpha=1.702, up_offset=1.0, row_weight=r),
             [leaf(normal(6, 12)), leaf(normal(6, 12)), leaf(normal(6))]),
            ("glu, halves", lambda x: LF.glu(x, None, "gelu"), [leaf(normal(6, 24))]),
            ("glu, chunk", lambda x: LF.glu(*x.chunk(2, -1), "gelu_tanh"), [leaf(normal(6, 24))]),
            ("glu, in turns", lambda x, r: LF.glu(x, interleaved=True, limit=30.0, row_weight=r),
             [leaf(normal(6, 24)), leaf(normal(6))]),
            ("rope", lambda q, k: torch.cat(LF.rope(q, k, inv_freq=inv_freq, offset=3), -2),
             [leaf(normal(2, 3, 4, 12)), leaf(normal(2, 3, 2, 12))]),
            ("rope, norms", lambda q, k, w, u: torch.cat(LF.rope(
                q, k, inv_freq=inv_freq, position=t.view(2, 3), heads_first=True, q_weight=w, k_weight=u, weight_offset=1.0), 1),
             [leaf(normal(2, 4, 3, 12)), leaf(normal(2, 2, 3, 12)), leaf(normal(12)), leaf(normal(12))]),
            ("rope, tables", lambda x: LF.rope(x.view(6, 2, 12), cos=table, sin=1 - table, rotary_dim=8, interleaved=True),
             [leaf(normal(6, 24))]),
            ("cross_entropy, a learned scale", lambda x, s: LF.cross_entropy(x, t, logit_scale=s),
             [leaf(normal(6, 12)), leaf(torch.ones(()))]),
            ("linear_cross_entropy, temperatures", lambda x, w, s: LF.linear_cross_entropy(x, w, th, temperature=s),
             [leaf(normal(6, 12)), leaf(normal(20, 12)), leaf(torch.rand(6) + 0.5)]),
            ("add_rms_norm", lambda x, r, w: torch.cat(LF.add_rms_norm(x, r, (12,), w)),
             [leaf(normal(6, 12)), leaf(normal(6, 12)), leaf(normal(12))]),
            ("srms_norm", lambda x: LF.srms_norm(x), [leaf(normal(6, 12))]),
            ("cross_entropy mean", lambda x: LF.cross_entropy(x, t), [leaf(normal(6, 12))]),
            ("cross_entropy mean, denominator", lambda x: LF.cross_entropy(x, t, denominator=torch.full((), 5, device=D)),
             [leaf(normal(6, 12))]),
            ("linear_cross_entropy mean, denominator",
             lambda x, w: LF.linear_cross_entropy(x, w, th, denominator=torch.full((1,), 5.0, device=D)),
             [leaf(normal(6, 12)), leaf(normal(20, 12))]),
            ("cross_entropy mean, row_weight", lambda x: LF.cross_entropy(x, t, row_weight=r), [leaf(normal(6, 12))]),
            ("cross_entropy none, row_weight", lambda x: LF.cross_entropy(x, t, reduction="none", row_weight=r), [leaf(normal(6, 12))]),
            ("linear_cross_entropy none, row_weight",
             lambda x, w: LF.linear_cross_entropy(x, w, th, reduction="none", row_weight=r), [leaf(normal(6, 12)), leaf(normal(20, 12))]),
            ("cross_entropy sum", lambda x: LF.cross_entropy(x, t, reduction="sum"), [leaf(normal(6, 12))]),
            ("cross_entropy none", lambda x: LF.cross_entropy(x, t, reduction="none"), [leaf(normal(6, 12))]),
            ("kl", lambda x: LF.kl(x, teacher), [leaf(normal(6, 12))]),
            ("kl, entropy", lambda x: LF.kl(x, teacher, return_entropy=True)[0], [leaf(normal(6, 12))]),
            ("linear_kl mean, entropy", lambda x, w: LF.linear_kl(x, w, y, v, return_entropy=True)[0],
             [leaf(normal(6, 12)), leaf(normal(20, 12))]),
            ("linear_kl none, entropy", lambda x, w: LF.linear_kl(x, w, y, v, reduction="none", return_entropy=True)[0],
             [leaf(normal(6, 12)), leaf(normal(20, 12))]),
            ("linear_kl mean", lambda x, w, b: LF.linear_kl(x, w, y, v, linear_bias=b, teacher_bias=c),
             [leaf(normal(6, 12)), leaf(normal(20, 12)), leaf(normal(20))]),
            ("linear_kl sum, row_weight",
             lambda x, w: LF.linear_kl(x, w, y, v, reduction="sum", divergence="reverse", row_weight=r), [leaf(normal(6, 12)), leaf(normal(20, 12))]),
            ("linear_kl none", lambda x, w, b: LF.linear_kl(x, w, y, v, reduction="none", linear_bias=b, row_weight=r.abs(),
                                                            divergence="jensen_shannon"),
             [leaf(normal(6, 12)), leaf(normal(20, 12)), leaf(normal(20))]),
            ("cross_entropy_ids mean", lambda x: LF.cross_entropy_ids(x, several, positive).loss, [leaf(normal(6, 12))]),
            ("linear_cross_entropy_ids", lambda x, w, b: sum((v * by).sum() for v, by in zip(
                LF.linear_cross_entropy_ids(x, w, several, linear_bias=b, reduction="none", row_weight=r), (0.5, positive))),
             [leaf(normal(6, 12)), leaf(normal(20, 12)), leaf(normal(20))]),
            ("linear_support", lambda x, w, b: sum((v * (0.5 + k)).sum() for k, v in enumerate(LF.linear_support(
                x, w, several.flatten(), at_support, several[:, 0], linear_bias=b, teacher_logp=-positive.flatten()))),
             [leaf(normal(6, 12)), leaf(normal(20, 12)), leaf(normal(20))]),
            ("support", lambda x: sum((v * (0.5 + k)).sum() for k, v in enumerate(LF.support(
                x, several.flatten(), at_support, several[:, 0], teacher_logp=-positive.flatten()))), [leaf(normal(6, 12))]),
            ("linear_cross_entropy_ids, tail", lambda x, w, b: sum((v * by).sum() for v, by in zip(
                LF.linear_cross_entropy_ids(x, w, several, positive, linear_bias=b, tail_weight=r), (0.5, positive, r))),
             [leaf(normal(6, 12)), leaf(normal(20, 12)), leaf(normal(20))]),
            ("cross_entropy_ids none, logp", lambda x: sum((v * by).sum() for v, by in zip(
                LF.cross_entropy_ids(x, several, reduction="none"), (0.5, positive))), [leaf(normal(6, 12))]),
            ("cross_entropy_ids, tail", lambda x: sum((v * by).sum() for v, by in zip(
                LF.cross_entropy_ids(x, several, positive, tail_weight=r), (0.5, positive, r))), [leaf(normal(6, 12))]),
            ("cross_entropy_stats", lambda x: sum_of(LF.cross_entropy_stats(x, t)), [leaf(normal(6, 12))]),
            ("linear_cross_entropy_stats", lambda x, w: sum_of(LF.linear_cross_entropy_stats(x, w, th, reduction="none")),
             [leaf(normal(6, 12)), leaf(normal(20, 12))]),
            ("cross_entropy_stats, statistics", lambda x: sum_of(LF.cross_entropy_stats(x, t, statistics=True)),
             [leaf(normal(6, 12))]),
            ("linear_cross_entropy_stats, statistics",
             lambda x, w: sum_of(LF.linear_cross_entropy_stats(x, w, th, reduction="none", statistics=True)),
             [leaf(normal(6, 12)), leaf(normal(20, 12))]),
            ("linear_cross_entropy mean", lambda x, w, b: LF.linear_cross_entropy(x, w, th, linear_bias=b),
             [leaf(normal(6, 12)), leaf(normal(20, 12)), leaf(normal(20))]),
            ("linear_cross_entropy none", lambda x, w: LF.linear_cross_entropy(x, w, th, reduction="none"),
             [leaf(normal(6, 12)), leaf(normal(20, 12))]),
            ("md_lrpe_cosine", lambda x, th: LF.md_lrpe_cosine(x, th, (6,), 0, "silu"),
             [leaf(normal(1, 2, 6, 12)), leaf(normal(2, 12))])]


def kept():
    """Likewise, of the function that keeps exponentials for backward in bf16. x has gaps: it is copied."""
    t = classes(20, 6)
    return [("linear_cross_entropy keep", lambda x, w: LF.linear_cross_entropy(x, w, t, reduction="none", keep=True),
             [leaf(normal(6, 16), BF16, "gaps"), leaf(normal(20, 16), BF16)])]


def out_and_gradients(f, leaves):
    out = f(*leaves)
    return [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]


def close(name, ours, theirs, tolerance=64 * U):
    """By the norm: for results whose terms were added in another order, or that were compiled in another way."""
    global worst
    for i, (a, b) in enumerate(zip(tuple_of(ours), tuple_of(theirs))):
        if a is None or b is None or a.shape != b.shape or b.dtype not in (a.dtype, torch.float64):
            kinds = [None if v is None else (tuple(v.shape), v.dtype) for v in (a, b)]
            return verdict(f"{name} [{i}]", False, f"{kinds[0]}, not {kinds[1]}")
        a, b = a.detach().double(), b.detach().double()
        error = float((a - b).norm() / b.norm().clamp(min=1e-30)) if b.numel() else 0.0
        worst = max(worst, error / tolerance if error < INF else 0.0)
        verdict(f"{name} [{i}] {error / tolerance:.2f}", error <= tolerance, f"relative error {error:.3g}, not {tolerance:.3g}")


def autograd_of(name, f, leaves):
    up = lambda out, factor: torch.full_like(out, factor)
    unit = max(HALF[t.dtype] for t in leaves)
    out = f(*leaves)
    first = torch.autograd.grad(out, leaves, up(out, 1.0), retain_graph=True)
    kept = [g.clone() for g in first]
    second = torch.autograd.grad(out, leaves, up(out, -3.0), retain_graph=True)
    third = torch.autograd.grad(out, leaves, up(out, 1.0))
    close(f"{name}: another upstream", second, [-3 * g for g in kept], 8 * unit)
    verdict(f"{name}: the same again", all(torch.equal(a, b) for a, b in zip(third, kept)), "other bits")
    same = all(torch.equal(a, b) for a, b in zip(first, kept))
    verdict(f"{name}: earlier gradients are not overwritten", same, "they changed")
    raises(f"{name}: backward through a freed graph", lambda: torch.autograd.grad(out, leaves, up(out, 1.0)), "second time")
    out = f(*leaves)  # a factor that 16 bits do not have: it is not rounded, whoever scales
    third = torch.autograd.grad(out, leaves, up(out, 1 / 3), retain_graph=True)
    same = all(torch.equal(a, b) for a, b in zip(third, torch.autograd.grad(out, leaves, up(out, 1 / 3))))
    verdict(f"{name}: the same with retain_graph", same, "other bits")
    for t in leaves:
        t.grad = None
    for factor in (1.0, 2.0):  # two graphs into one .grad
        (f(*leaves) * factor).sum().backward()
    out = f(*leaves)
    (out * 0.5).sum().backward(retain_graph=True)
    held = [t.grad for t in leaves]
    before = [g.clone() for g in held]
    for t in leaves:
        t.grad = None
    (out * -2.0).sum().backward()
    close(f"{name}: .grad sums up", before, [3.5 * g for g in kept], 16 * unit)
    memory = {t.grad.data_ptr() for t in leaves}
    verdict(f"{name}: every .grad has memory of its own", len(memory) == len(leaves), "two share it")
    verdict(f"{name}: a kept .grad is not overwritten", all(torch.equal(a, b) for a, b in zip(held, before)), "it changed")
    close(f"{name}: .grad of the last backward", [t.grad for t in leaves], [-2 * g for g in kept], 8 * unit)
    out = f(*leaves)
    close(f"{name}: two uses of one result", torch.autograd.grad((out * 2 + out * out.detach()).sum(), leaves),
          torch.autograd.grad(f(*leaves), leaves, (2 + out).detach()), 16 * unit)

    def twice():
        out = f(*leaves).sum()
        g = torch.autograd.grad(out, leaves[0], create_graph=True)[0]
        (out + g.pow(2).sum()).backward()
    raises(f"{name}: a gradient of a gradient", twice, "twice", "double", "differentiable", "derivative", "second")
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):  # as offloading has them
        out = f(*leaves)
    close(f"{name}: saved tensors that were moved", torch.autograd.grad(out, leaves, up(out, 1.0)), kept, 8 * unit)

    if hasattr(torch.autograd.graph, "node_creation_hook"):  # from PyTorch 2.14 on
        made = []
        with torch.autograd.graph.node_creation_hook(made.append):
            out = f(*leaves)
        nodes, at = [], [out.grad_fn]
        while at:
            nodes += at
            at = [node for last in at for node, _ in last.next_functions if node is not None and node not in nodes]
        ours = [node for node in nodes if "lk_torch::" in node.name()]
        verdict(f"{name}: hooks are told of its node", len(ours) > 0 and all(made.count(node) == 1 for node in ours),
                f"of {[node.name() for node in ours]} they saw {[node.name() for node in made]}")

    def written(which):
        """Backward after its input or its output was changed in place: PyTorch's error, or the gradients of before."""
        middle = [t * 1.0 for t in leaves]
        out = f(*middle)
        (out if which == "output" else middle[0]).mul_(2.0)
        try:
            found = torch.autograd.grad(out, leaves, up(out, 1.0))
        except RuntimeError as error:
            return verdict(f"{name}: {which} changed in place", "inplace operation" in str(error), str(error))
        close(f"{name}: {which} changed in place", found, [g * (2.0 if which == "output" else 1.0) for g in kept], 8 * unit)
    written("input")
    written("output")
    frozen = [t.detach() for t in leaves]
    verdict(f"{name}: no gradient wanted", not f(*frozen).requires_grad, "the result wants one")
    for i in range(len(leaves)):  # one leaf alone
        alone = [t if j == i else t.detach() for j, t in enumerate(leaves)]
        out = f(*alone)
        close(f"{name}: gradient of leaf {i} alone", torch.autograd.grad(out, leaves[i], up(out, 1.0))[0], kept[i], 8 * unit)


def autograd():
    for name, f, leaves in functions() + kept():
        attempt(name, lambda: autograd_of(name, f, leaves))
    x, t = leaf(normal(6, 12)), classes(12, 6)
    hidden = x * 1.0
    before = hidden.detach().clone()
    LF.cross_entropy(hidden, t).backward()
    verdict("cross_entropy leaves its input as it was", torch.equal(hidden, before), "it changed")
    table, ids = leaf(normal(20, 12)), classes(20, 6)  # a head whose weight is the embedding's

    def tied(loss):
        return torch.autograd.grad(loss(F.embedding(ids, table), table), table)
    exact = tied(lambda h, w: F.cross_entropy(h.double() @ w.double().t(), ids))
    close("tied weight", tied(lambda h, w: LF.linear_cross_entropy(h, w, ids)), exact)
    hooked = []
    x.register_hook(lambda g: hooked.append(g.clone()) or g * 2)
    x.grad = None
    LF.cross_entropy(x, t).backward()
    verdict("a hook sees and changes the gradient", len(hooked) == 1 and torch.equal(x.grad, hooked[0] * 2), "it does not")
    out = LF.cross_entropy_stats(leaf(normal(6, 12)), t)
    wants = [o.requires_grad for o in out]
    verdict("cross_entropy_stats: loss, lse, entropy have gradients", wants == [True, True, False, True, False], str(wants))


def differences():
    """<gradient, v> of each function against its slope along v, from values at a +- h v and a +- 2 h v."""
    for name, f, leaves in functions():
        with torch.no_grad():
            out = f(*leaves)
        weights = torch.linspace(0.5, 1.5, out.numel(), dtype=torch.float64, device=D).view(out.shape)
        for i, t in enumerate(leaves):
            v = normal(*t.shape).to(D)
            v /= v.norm()
            h = 2.0**-6

            def value(shift):
                with torch.no_grad():
                    out = f(*[a + shift * v if j == i else a for j, a in enumerate(leaves)]).double()
                return float((out * weights).sum()), float((out * weights).abs().sum())
            values = {k: value(k * h) for k in (-2, -1, 1, 2)}
            slope = (8 * (values[1][0] - values[-1][0]) - (values[2][0] - values[-2][0])) / (12 * h)  # error h^4 f^(5) / 30
            out = f(*leaves)
            g, = torch.autograd.grad(out, t, weights.to(out.dtype))
            ours = float((g.double() * v).sum())
            bound = 18 / (12 * h) * 8 * U * values[1][1] + 40 * h**4 * float(g.double().norm())  # 18 values, each within 8 U
            compare(f"{name}, leaf {i}", ("slope", *torch.tensor([[ours], [slope]], dtype=torch.float64), bound))


def autocast():
    x, w, b, t = leaf(normal(6, 16)), leaf(normal(20, 16)), leaf(normal(20)), classes(20, 6)
    with torch.autocast(D, dtype=BF16):
        loss = LF.linear_cross_entropy(x, w, t, linear_bias=b)
        mixed = LF.linear_cross_entropy(x.to(BF16), w, t)
        half = LF.cross_entropy(F.linear(x, w), t)
        kept = (LF.rms_norm(x, (16,)), LF.rms_norm(x.to(BF16), (16,)), LF.logsumexp(x, 1), LF.cross_entropy(x, t % 16),
                LF.glu(x), LF.glu(x.to(BF16), row_weight=x[:, 0]),
                LF.rope(x.to(BF16).view(6, 1, 16), cos=x.detach(), sin=x.detach()))
    gradients = torch.autograd.grad(loss, [x, w, b])
    narrow = [v.detach().to(BF16).requires_grad_() for v in (x, w)] + [b.detach().to(BF16).requires_grad_()]
    same = LF.linear_cross_entropy(narrow[0], narrow[1], t, linear_bias=narrow[2])
    right = [g.float() for g in torch.autograd.grad(same, narrow)]
    close("linear_cross_entropy casts as F.linear does", [loss, *gradients], [same, *right], 4 * HALF[BF16])
    same = LF.linear_cross_entropy(narrow[0], narrow[1], t)
    close("linear_cross_entropy of a bf16 input and an f32 weight", mixed, same, 4 * HALF[BF16])
    y, v = normal(6, 8).to(D), normal(20, 8).to(D)
    with torch.autocast(D, dtype=BF16):
        loss = LF.linear_kl(x, w, y, v.to(BF16), linear_bias=b, teacher_bias=b.detach())
    same = LF.linear_kl(*narrow[:2], y.to(BF16), v.to(BF16), linear_bias=narrow[2], teacher_bias=narrow[2].detach())
    right = [g.float() for g in torch.autograd.grad(same, narrow)]
    with torch.autocast(D, dtype=BF16):
        several = LF.linear_cross_entropy_ids(x, w, t[:, None], linear_bias=b).loss
        with_tail = LF.linear_cross_entropy_ids(x, w, t[:, None], linear_bias=b, tail=True).tail
    close("linear_cross_entropy_ids likewise", several, LF.linear_cross_entropy_ids(*narrow[:2], t[:, None], linear_bias=narrow[2]).loss,
          4 * HALF[BF16])
    close("its tail", with_tail, LF.linear_cross_entropy_ids(*narrow[:2], t[:, None], linear_bias=narrow[2], tail=True).tail,
          4 * HALF[BF16])
    close("linear_kl likewise", [loss, *torch.autograd.grad(loss, [x, w, b])], [same, *right], 4 * HALF[BF16])
    verdict("cross_entropy of bf16 logits is f32", half.dtype == F32 and half.isfinite().item(), str(half.dtype))
    types_found = [v.dtype for v in kept]
    right = [F32, BF16, F32, F32, F32, BF16, BF16]
    verdict("norms, logsumexp, cross_entropy, glu and rope keep types", types_found == right, str(types_found))


def inference():
    for name, f, leaves in functions():
        expected = f(*leaves)
        with torch.inference_mode():
            out = f(*leaves)
            verdict(f"{name}: inference_mode", out.is_inference() and not out.requires_grad, "not an inference tensor")
            inputs = [t * 1 for t in leaves]
            close(f"{name}: of inference tensors", [f(*inputs), out], [expected, expected], 8 * U)
        with torch.no_grad():
            close(f"{name}: no_grad", f(*leaves), expected, 8 * U)


class Calls(TorchDispatchMode):
    """Keeps the calls of lk's operators below autograd."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        detach = lambda v: v.detach() if isinstance(v, torch.Tensor) else v  # these operators have no gradient of their own
        self.found.append((op, tuple(map(detach, args)), {k: detach(v) for k, v in (kwargs or {}).items()}))
        return op(*args, **(kwargs or {}))


class PublicCalls(torch.overrides.TorchFunctionMode):
    """Keeps the calls of lk's operators as Python makes them."""

    def __init__(self, found):
        super().__init__()
        self.found = found

    def __torch_function__(self, op, types, args=(), kwargs=None):
        self.found.append((op, args, kwargs or {}))
        return op(*args, **(kwargs or {}))


def overload(op):
    """The operator of torch.ops.lk that was called, or None."""
    op = op.default if isinstance(op, torch._ops.OpOverloadPacket) else op
    return op if isinstance(op, torch._ops.OpOverload) and op.namespace == "lk" else None


def of_one_rank(group):
    """A group of checks in a process group of this process alone."""
    import torch.distributed as dist
    dist.init_process_group("nccl" if CUDA else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group()
    finally:
        dist.destroy_process_group()


def opcheck():
    found = []
    x, t = leaf(normal(6, 12), BF16), classes(12, 6)
    w, alone = leaf(normal(12, 12), BF16), dict(group=torch.distributed.group.WORLD)
    calls = functions() + kept() + [
        ("linear_topk", lambda x, w: LF.linear_topk(x.detach(), w, 3).logp.sum() + x.sum() + w.sum(), [x, w]),
        ("group", lambda x, w: LF.linear_cross_entropy(x, w, t, **alone), [x, w]),
        ("group, stats", lambda x, w: sum_of(LF.linear_cross_entropy_stats(x, w, t, **alone)), [x, w]),
        ("group, logits", lambda x: LF.cross_entropy(x, t, label_smoothing=0.1, **alone), [x]),
        ("group, logits, stats", lambda x: sum_of(LF.cross_entropy_stats(x, t, statistics=True, **alone)), [x]),
        ("group, several ids", lambda x: sum(v.sum() for v in LF.cross_entropy_ids(x, t[:, None].repeat(1, 3), **alone)), [x]),
        ("group, several ids of a head",
         lambda x, w: sum(v.sum() for v in LF.linear_cross_entropy_ids(x, w, t[:, None].repeat(1, 3), **alone)), [x, w]),
        ("group, kl", lambda x: LF.kl(x, x.detach() + 1, divergence="jensen_shannon", **alone), [x]),
        ("group, linear_kl", lambda x, w: LF.linear_kl(x, w, x.detach(), w.detach() + 1, row_weight=t[:6].float(), **alone), [x, w]),
        ("options", lambda x: LF.cross_entropy(x, t, torch.ones(12, device=D), -100, "sum", 0.125, z_loss=0.01, softcap=8.0,
                                               zero_when_empty=True), [x]),
        ("f16", lambda x: LF.cross_entropy(x, t), [leaf(normal(6, 12), F16)]),
        ("dims", lambda x: LF.logsumexp(x, (0, 2), True, dtype=F32), [leaf(normal(2, 3, 4), BF16)]),
        ("keepdim", lambda x: LF.logsumexp(x, 1, True, dtype=F32), [leaf(normal(2, 3, 4), BF16)]),
        ("f32 residual", lambda x, r: sum(LF.add_rms_norm(x, r, (12,))), [x, leaf(normal(6, 12))]),
        ("heads in f16", lambda x, w: LF.linear_kl(x, w, x.detach(), w.detach() + 1, row_weight=t[:6].float()),
         [leaf(normal(6, 12), F16), leaf(normal(12, 12), F16)]),
        ("8 bits", lambda x, r: LF.add_rms_norm(x, r, 12, out_dtype=torch.float8_e4m3fn, scaling="block128", transposed=True)[0],
         [x, leaf(normal(6, 12), BF16)]),
        ("8 bits, one scale", lambda x: LF.rms_norm(x, 12, out_dtype=torch.float8_e5m2, scaling="tensor", amax=True)[0], [x]),
        ("a gradient in 8 bits", lambda x: LF.cross_entropy(x, t) + LF.cross_entropy_with_grad(
            x.detach(), t, grad_scale=2.0, dlogits_dtype=torch.float8_e5m2)[0], [x]),
        ("[N, C, d]", lambda x: LF.cross_entropy(x, classes(5, 2, 3)), [leaf(normal(2, 5, 3))])]
    for name, f, leaves in calls:
        with PublicCalls(found), Calls(found):
            out = f(*leaves)
            torch.autograd.grad(out, leaves, torch.ones_like(out))
        with torch.no_grad(), PublicCalls(found), Calls(found):
            f(*leaves)
    # Reduced losses take this operator in eager mode alone, and under Calls they are not in it.
    one_pass = torch.ops.lk.cross_entropy_forward_backward.default
    in_two = torch.ops.lk.cross_entropy_forward.default
    found += [(one_pass, (*args[:-1], None, None), {}) for op, args, _ in found if op == in_two and args[3]]
    samples, seen = [], set()
    for op, args, kwargs in found:
        op = overload(op)
        if op:
            kind = lambda v: (v.dtype, v.dim(), v.requires_grad) if isinstance(v, torch.Tensor) else v
            key = str((op, [kind(v) for v in (*args, *kwargs.values())]))
            if key not in seen:
                seen.add(key)
                samples.append((op, args, kwargs))
    names = {n for n in torch._C._dispatch_get_all_op_names() if n.startswith("lk::")} - {"lk::set_batch_invariant"}  # which takes no tensor
    covered = {op.name() for op, _, _ in samples}
    complete = bool(names) and names == covered
    verdict("every operator of torch.ops.lk has a sample", complete, f"none of {sorted(names - covered)}")
    fresh = lambda v: v.detach().clone().requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) else v
    count = collections.Counter()
    for op, args, kwargs in samples:
        if count[op] == 8:
            continue
        count[op] += 1
        for test in ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"):
            if test == "test_aot_dispatch_dynamic" and op == torch.ops.lk.linear_cross_entropy_forward.default and args[-1]:
                continue  # it compares outputs, and the buffer of exponentials has bytes that nothing writes
            if test == "test_aot_dispatch_dynamic" and op == torch.ops.lk.rms_norm_fp8.default and args[0].requires_grad:
                continue  # it sums the outputs, and PyTorch has no sum of 8 bits
            tolerance = dict(rtol=2 * HALF[BF16], atol=1e-4)
            if "fp8" in op.name() or torch.float8_e5m2 in args:
                tolerance = dict(rtol=0, atol=0)  # PyTorch compares numbers of 8 bits by no other
            def check():
                given = tuple(map(fresh, args)), {k: fresh(v) for k, v in kwargs.items()}
                torch.library.opcheck(op, *given, test_utils=test, **tolerance)
                verdict(f"{op} sample {count[op]} {test}", True)
            attempt(f"{op} sample {count[op]} {test}", check)


# ---- torch.compile ----------------------------------------------------------------------------------------------------------


def small_model():
    """A step with all five ops, and its parameters."""
    p = [leaf(normal(32)), leaf(normal(64, 32, sigma=0.2)), leaf(normal(50, 64, sigma=0.2)), leaf(normal(2, 32)),
         leaf(normal(50))]

    def step(x, r, target):
        y, s = LF.add_rms_norm(x, r, (32,), p[0])
        h = F.silu(y @ p[1].t())
        z = LF.md_lrpe_cosine(h.view(1, -1, 2, 32).transpose(1, 2), p[3], (h.shape[0],))
        h = h + z[0].transpose(0, 1).sum(1)
        loss = LF.linear_cross_entropy(LF.srms_norm(h), p[2], target, linear_bias=p[4], workspace_mib=64)
        logits = h @ p[2].t()
        rows = LF.cross_entropy(logits, target, reduction="none", label_smoothing=0.125)
        lse = LF.logsumexp(logits, 1)
        return loss + LF.cross_entropy(logits, target) + rows.mean() + 1e-2 * lse.square().mean() + s.square().mean()
    return p, step


def batch_of(n):
    return leaf(normal(n, 32)), leaf(normal(n, 32)), classes(50, n)


def gradients_of(f, batch, p):
    """Copies, since a CUDA graph of torch.compile writes its next results over the last."""
    out = f(*batch)
    return [out.detach().clone(), *(g.clone() for g in torch.autograd.grad(out, [*batch[:2], *p]))]


def compiled():
    p, step = small_model()
    batches = [batch_of(n) for n in (12, 20, 28)]
    expected = [gradients_of(step, b, p) for b in batches]
    modes = [("aot_eager", dict(backend="aot_eager")), ("inductor", {}), ("inductor, dynamic", dict(dynamic=True))]
    modes += [("reduce-overhead", dict(mode="reduce-overhead"))] if CUDA else []
    for name, options in modes:
        def check():
            fast = torch.compile(step, fullgraph=True, **options)
            for i in (0, 0, 0, 1, 2) if "mode" in options else (0, 1, 2):
                if "mode" in options:
                    torch.compiler.cudagraph_mark_step_begin()
                close(f"{name}, batch {i}", gradients_of(fast, batches[i], p), expected[i], 1e-5)
            with torch.no_grad():
                close(f"{name}, no_grad", fast(*batches[0]), step(*batches[0]), 1e-5)
        torch._dynamo.reset()
        attempt(name, check)
    t = classes(12, 6)
    weight = torch.ones(12, device=D)
    more = functions() + kept() + [
        ("tuple of dims", lambda x: LF.logsumexp(x, (0, 2), True, scale=0.5), [leaf(normal(2, 3, 4), BF16)]),
        ("keepdim", lambda x: LF.logsumexp(x, 1, True), [leaf(normal(2, 3, 4), BF16)]),
        ("every option", lambda x: LF.cross_entropy(x, t, weight, 3, "sum", 0.125, z_loss=0.01, softcap=8.0, logit_scale=0.5,
                                                    zero_when_empty=True), [leaf(normal(6, 12), BF16)]),
        ("[N, C, d]", lambda x: LF.cross_entropy(x, t.view(2, 3)), [leaf(normal(2, 12, 3))]),
        ("f32 residual", lambda x, r: sum(LF.add_rms_norm(x, r, (12,))), [leaf(normal(6, 12), BF16), leaf(normal(6, 12))]),
        ("frozen weight", lambda x: LF.linear_cross_entropy(x, weight.repeat(20, 1), t), [leaf(normal(6, 12))]),
        ("module", (lambda module: lambda x: module(x))(lk_torch.nn.RMSNorm(12).to(D)), [leaf(normal(6, 12))])]
    for name, f, leaves in more:
        def check():
            fast = torch.compile(f, fullgraph=True, backend="aot_eager")
            close(f"aot_eager, {name}", out_and_gradients(fast, leaves), out_and_gradients(f, leaves),
                  1e-5 if leaves[0].dtype == F32 else 4 * HALF[BF16])
        torch._dynamo.reset()
        attempt(f"aot_eager, {name}", check)

    def of_any_batch():
        w = leaf(normal(50, 16), BF16)
        f = lambda x, t: LF.linear_cross_entropy(x, w, t, reduction="none", keep=True)
        fast = torch.compile(f, fullgraph=True, dynamic=True)
        for n in (12, 65, 130):
            x, t = leaf(normal(n, 16), BF16), classes(50, n)
            ours, theirs = ([out, *torch.autograd.grad(out.sum(), [x, w])] for out in (fast(x, t), f(x, t)))
            close(f"kept exponentials, {n} tokens", ours, theirs, 4 * HALF[BF16])
            sizes = [kept_bytes(lambda: g(x, t)) for g in (fast, f)]
            verdict(f"kept exponentials, {n} tokens: as many bytes, of whole 64 tokens", sizes[0] >= sizes[1] > 0, str(sizes))
    attempt("kept exponentials, dynamic", of_any_batch)
    torch._dynamo.reset()

    any_size()

    class Exported(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = lk_torch.nn.RMSNorm(12)

        def forward(self, x, t):
            return LF.cross_entropy(self.norm(x), t, reduction="none") + LF.logsumexp(x, -1)
    module, x = Exported().to(D), normal(6, 12).to(D)
    attempt("torch.export", lambda: close("torch.export", torch.export.export(module, (x, t)).module()(x, t), module(x, t)))
    torch._dynamo.reset()


def any_size():
    """A size that changes is a symbol from the second one on: two programs, whatever the op. An exported program has one."""
    w, head, rows = leaf(normal(16)), leaf(normal(20, 16)), dict(reduction="none")
    loss, head_loss, theta = LF.cross_entropy, LF.linear_cross_entropy, leaf(normal(2, 16))
    teacher, teacher_head = normal(20, 8).to(D), normal(20, 16).to(D)
    cases = [("logsumexp", lambda x, t: LF.logsumexp(x, 1)), ("logsumexp, dim 0", lambda x, t: LF.logsumexp(x, 0)),
             ("logsumexp, two dims", lambda x, t: LF.logsumexp(x.view(-1, 2, 8), (0, 2))),
             ("rms_norm", lambda x, t: LF.rms_norm(x, (16,), w)), ("srms_norm", lambda x, t: LF.srms_norm(x)),
             ("rms_norm, two dims", lambda x, t: LF.rms_norm(x.view(-1, 2, 8), (2, 8), w.view(2, 8))),
             ("add_rms_norm", lambda x, t: torch.cat(LF.add_rms_norm(x, 2 * x, (16,), w))),
             ("glu", lambda x, t: LF.glu(x, 2 * x, row_weight=t.float())), ("glu, halves", lambda x, t: LF.glu(x)),
             ("glu, chunk", lambda x, t: LF.glu(*x.chunk(2, 1), "relu")),
             ("glu, in turns", lambda x, t: LF.glu(x, None, "gelu", interleaved=True)),
             ("rope", lambda x, t: LF.rope(x.view(-1, 2, 8), inv_freq=w.detach()[:4], position=t)),
             ("rope, a norm", lambda x, t: torch.cat(LF.rope(
                 *x.view(1, -1, 2, 8).transpose(1, 2).chunk(2, 1), inv_freq=w.detach()[:4], heads_first=True, q_weight=w[:8],
                 offset=3), 1)[0].transpose(0, 1)),
             ("cross_entropy_stats", lambda x, t: sum_of(LF.cross_entropy_stats(x, t))),
             ("cross_entropy_stats, statistics", lambda x, t: sum_of(LF.cross_entropy_stats(x, t, statistics=True))),
             ("cross_entropy, weights", lambda x, t: loss(x, t, w.detach())),
             ("cross_entropy, probabilities", lambda x, t: loss(x, x.detach().softmax(1))),
             ("cross_entropy, [N, C, d]", lambda x, t: loss(x[:, :, None] * 1, t[:, None])),
             ("linear_cross_entropy_stats", lambda x, t: sum_of(LF.linear_cross_entropy_stats(x, head, t))),
             ("linear_cross_entropy, keep", lambda x, t: head_loss(x, head, t, keep=True, **rows)),
             ("linear_support", lambda x, t: LF.linear_support(
                 x, head, torch.cat([t, t]), torch.arange(t.shape[0] + 1, device=D) * 2).lse),
             ("support", lambda x, t: LF.support(x, torch.stack([t, 15 - t], 1).flatten(), torch.arange(t.shape[0] + 1, device=D) * 2, t).logp),
             ("md_lrpe_cosine", lambda x, t: LF.md_lrpe_cosine(x.view(1, 2, -1, 16), theta, (x.shape[0] // 2,)))]
    for reduction in ("none", "mean", "sum"):
        cases += [(f"cross_entropy, {reduction}", lambda x, t, r=reduction: loss(x, t, reduction=r)),
                  (f"linear_cross_entropy, {reduction}", lambda x, t, r=reduction: head_loss(x, head, t, reduction=r)),
                  (f"linear_cross_entropy_ids, {reduction}", lambda x, t, r=reduction: LF.linear_cross_entropy_ids(
                      x, head, torch.stack((t, 15 - t), 1), reduction=r).logp),
                  (f"linear_cross_entropy_ids, tail, {reduction}", lambda x, t, r=reduction: sum(
                      v.sum() for v in LF.linear_cross_entropy_ids(x, head, torch.stack((t, 15 - t), 1), reduction=r,
                                                                   tail_weight=t.float()))),
                  (f"linear_kl, {reduction}", lambda x, t, r=reduction: LF.linear_kl(
                      x, head, x.detach()[:, :8] * 2, teacher, reduction=r)),
                  (f"linear_kl, weights, {reduction}", lambda x, t, r=reduction: LF.linear_kl(
                      x, head, x.detach(), teacher_head, reduction=r, row_weight=t.float()))]
    batch = lambda n: (leaf(normal(n, 16)), classes(16, n))
    for name, f in cases:
        def check():
            torch._dynamo.reset()
            counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
            fast = torch.compile(f, backend=counter, fullgraph=True)
            for n in (6, 8, 10, 12, 20, 34, 40, 42, 50, 64, 70, 82):
                fast(*batch(n)).sum().backward()
            verdict(f"{name}: at most 2 programs for 12 sizes", counter.frame_count <= 2, f"{counter.frame_count} programs")
            torch._dynamo.reset()
            n, module = 2 * torch.export.Dim("n", min=2, max=512), torch.nn.Module()
            module.forward = lambda x, t: f(x * 1, t)
            sizes = {"x": {0: n}, "t": {0: n}}
            with torch.no_grad():
                program = torch.export.export(module, batch(6), dynamic_shapes=sizes).module()
                x, t = batch(10)
                close(f"{name}: exported for any size", program(x, t), f(x, t))
        attempt(f"{name}: any size", check)
    torch._dynamo.reset()


def training():
    """Ten steps of AdamW on a small model: lk's functions and PyTorch's give the same losses."""
    class Model(torch.nn.Module):
        def __init__(self, lk):
            super().__init__()
            torch.manual_seed(3)
            self.lk, nn = lk, torch.nn
            self.embed, self.up, self.down = nn.Embedding(40, 32), nn.Linear(32, 64), nn.Linear(64, 32)
            self.first = lk_torch.nn.RMSNorm(32, eps=1e-6) if lk else nn.RMSNorm(32, eps=1e-6)
            self.last = lk_torch.nn.AddRMSNorm(32, eps=1e-6) if lk else nn.RMSNorm(32, eps=1e-6)

        def forward(self, ids, target):
            s = self.embed(ids)
            a = self.down(F.silu(self.up(self.first(s))))
            if self.lk:
                y, _ = self.last(a, s)
                return LF.linear_cross_entropy(y, self.embed.weight, target, z_loss=1e-4)
            logits = F.linear(self.last(a + s), self.embed.weight).flatten(0, 1)
            z = 1e-4 * torch.logsumexp(logits, 1).square().mean()
            return F.cross_entropy(logits, target.flatten()) + z
    losses = {}
    ids, target = classes(40, 4, 5), classes(40, 4, 5)
    for lk in (True, False):
        model = Model(lk).to(D)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses[lk] = []
        for _ in range(10):
            optimizer.zero_grad()
            loss = model(ids, target)
            loss.backward()
            optimizer.step()
            losses[lk].append(loss.detach())
    ours, theirs = torch.stack(losses[True]), torch.stack(losses[False])
    close("ten losses", ours, theirs, 1e-4)
    verdict("the loss falls", bool(ours[-1] < 0.8 * ours[0]), f"{ours}")
    verdict("state_dict keys are torch.nn's", list(Model(True).state_dict()) == list(Model(False).state_dict()),
            str(list(Model(True).state_dict())))


def checkpoint():
    from torch.utils.checkpoint import checkpoint as again
    for name, f, leaves in functions() + kept():
        for reentrant in (False, True):
            def run(out):
                for t in leaves:
                    t.grad = None
                out.sum().backward()
                return [out, *(t.grad for t in leaves)]

            def check():
                close(f"{name}, reentrant {reentrant}", run(again(f, *leaves, use_reentrant=reentrant)), run(f(*leaves)), 8 * U)
            attempt(f"{name}, reentrant {reentrant}", check)



def distributed():
    model = torch.nn.Sequential(torch.nn.Linear(12, 16), lk_torch.nn.RMSNorm(16)).to(D)
    head = lk_torch.nn.LinearCrossEntropyLoss(16, 20).to(D)

    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.head = model, head

        def forward(self, x, t):
            return self.head(self.model(x), t)
    plain = copy.deepcopy(Both())
    wrapped = torch.nn.parallel.DistributedDataParallel(Both())
    x, t = normal(6, 12).to(D), classes(20, 6)
    for module in (plain, wrapped):
        module(x, t).backward()
    ours, theirs = [p.grad for p in wrapped.parameters()], [p.grad for p in plain.parameters()]
    close("gradients of DistributedDataParallel", ours, theirs)


def threads():
    calls = functions() + kept()
    expected = [out_and_gradients(f, leaves) for _, f, leaves in calls]
    if CUDA:
        torch.cuda.synchronize()
        for (name, f, leaves), right in zip(calls, expected):  # inputs that are there only when this stream comes to them
            late = [torch.zeros_like(t) for t in leaves]
            with torch.cuda.stream(torch.cuda.Stream()):
                torch.cuda._sleep(10**8)
                for a, b in zip(late, leaves):
                    a.copy_(b.detach())
                close(f"{name}, on another stream", out_and_gradients(f, [t.requires_grad_() for t in late]), right, 8 * U)
    wrong, turns = [], 20 if CUDA else 2

    def work(number):
        try:
            stream = torch.cuda.Stream() if CUDA else None
            with torch.cuda.stream(stream):
                for i in range(turns * len(calls)):
                    at = (i + number) % len(calls)
                    name, f, leaves = calls[at]
                    found = out_and_gradients(f, leaves)
                    if CUDA:
                        stream.synchronize()
                    if not all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(found, expected[at])):
                        wrong.append(name)
        except Exception as error:
            wrong.append(f"{type(error).__name__}: {error}")
    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    verdict("4 threads, each with its own stream" if CUDA else "4 threads", not wrong, str(wrong[:3]))


# ---- Mistakes ---------------------------------------------------------------------------------------------------------------


def mistakes():
    zeros = lambda *shape, dtype=F32: torch.zeros(shape, dtype=dtype, device=D)
    long = torch.int64
    x, t, w, cube, theta = zeros(4, 8), zeros(4, dtype=long), zeros(9, 8), zeros(1, 2, 6, 8), zeros(2, 8)
    ce, lce, lse, rms, lrpe = LF.cross_entropy, LF.linear_cross_entropy, LF.logsumexp, LF.rms_norm, LF.md_lrpe_cosine
    lkl, glu, rope, learns = LF.linear_kl, LF.glu, LF.rope, lambda *shape: zeros(*shape).requires_grad_()
    heads, freq, table, at = zeros(2, 3, 4, 8), zeros(4), zeros(3, 4), zeros(2, 3, dtype=long)
    for wants_grad in (False, True):
        a = x.clone().requires_grad_(wants_grad)
        b = w.clone().requires_grad_(wants_grad)
        h = heads.clone().requires_grad_(wants_grad)
        for name, f, *words in (
                ("logsumexp: float64", lambda: lse(a.double(), 1), "float64"),
                ("logsumexp: int64", lambda: lse(t, 0), "long", "int64"),
                ("logsumexp: complex", lambda: lse(a.to(torch.complex64), 1), "complex"),
                ("logsumexp: dim out of range", lambda: lse(a, 2), "dim"),
                ("logsumexp: a dim of a tuple out of range", lambda: lse(a, (0, 5)), "dim"),
                ("logsumexp: a dim twice", lambda: lse(a, (0, 0)), "dim"),
                ("logsumexp: scale", lambda: lse(a, 1, scale=INF), "scale"),
                ("logsumexp: dtype", lambda: lse(a, 1, dtype=torch.float64), "dtype"),
                ("logsumexp: not a tensor", lambda: lse([1.0], 0), "tensor", "input"),
                ("logsumexp: sparse", lambda: lse(a.detach().to_sparse(), 1), "sparse"),
                ("rms_norm: float64", lambda: rms(a.double(), (8,)), "float64"),
                ("rms_norm: normalized_shape", lambda: rms(a, (7,)), "normalized_shape"),
                ("rms_norm: normalized_shape too long", lambda: rms(a, (2, 4, 8)), "normalized_shape"),
                ("rms_norm: an empty normalized_shape", lambda: rms(a, ()), "normalized_shape"),
                ("rms_norm: length of weight", lambda: rms(a, (8,), zeros(7)), "weight"),
                ("rms_norm: type of weight", lambda: rms(a, (8,), zeros(8, dtype=torch.float64)), "weight"),
                ("rms_norm: eps below 0", lambda: rms(a, (8,), None, -1.0), "eps"),
                ("rms_norm: eps NaN", lambda: rms(a, (8,), None, NAN), "eps"),
                ("rms_norm: weight_offset NaN", lambda: rms(a, (8,), zeros(8), weight_offset=NAN), "weight_offset"),
                ("rms_norm: weight is a number", lambda: rms(a, (8,), 1.0), "weight", "tensor"),
                ("srms_norm: a 0-d tensor", lambda: LF.srms_norm(a.sum()), "dim", "input"),
                ("srms_norm: eps", lambda: LF.srms_norm(a, -1.0), "eps"),
                ("add_rms_norm: shape of residual", lambda: LF.add_rms_norm(a, zeros(3, 8), (8,)), "residual"),
                ("add_rms_norm: shape of residual, two dimensions",
                 lambda: LF.add_rms_norm(zeros(2, 3, 4), zeros(2, 2, 6), (3, 4)), "residual"),
                ("add_rms_norm: type of residual", lambda: LF.add_rms_norm(a, zeros(4, 8, dtype=BF16), (8,)), "residual"),
                ("glu: float64", lambda: glu(a.double()), "float64"),
                ("glu: int64", lambda: glu(t), "int64"),
                ("glu: not a tensor", lambda: glu([1.0, 2.0]), "tensor", "gate"),
                ("glu: up, not a tensor", lambda: glu(a, "gelu"), "up is of type str"),
                ("glu: a 0-d tensor", lambda: glu(a.sum()), "gate", "dim"),
                ("glu: an odd last dimension", lambda: glu(a[:, :7]), "even"),
                ("glu: shape of up", lambda: glu(a, zeros(4, 7)), "up has shape [4, 7]"),
                ("glu: up of one row", lambda: glu(a, zeros(8)), "up has shape [8]"),
                ("glu: type of up", lambda: glu(a, zeros(4, 8, dtype=BF16)), "up is bfloat16"),
                ("glu: up and interleaved", lambda: glu(a, a, interleaved=True), "interleaved"),
                ("glu: activation", lambda: glu(a, a, "swish"), "'swish'", "silu"),
                ("glu: alpha of another activation", lambda: glu(a, a, "gelu", alpha=1.702), "alpha is 1.702"),
                ("glu: alpha 0", lambda: glu(a, alpha=0.0), "alpha"),
                ("glu: alpha that float has not", lambda: glu(a, alpha=1e-50), "alpha"),
                ("glu: alpha NaN", lambda: glu(a, alpha=NAN), "alpha"),
                ("glu: limit 0", lambda: glu(a, limit=0), "limit"),
                ("glu: limit below 0", lambda: glu(a, limit=-7.0), "limit"),
                ("glu: limit NaN", lambda: glu(a, limit=NAN), "limit"),
                ("glu: up_offset", lambda: glu(a, up_offset=INF), "up_offset"),
                ("glu: up_offset is a string", lambda: glu(a, up_offset="1"), "up_offset"),
                ("glu: gradient of alpha", lambda: glu(a, alpha=zeros().requires_grad_()), "alpha", "detach"),
                ("glu: shape of row_weight", lambda: glu(a, row_weight=zeros(4, 1)), "row_weight"),
                ("glu: type of row_weight", lambda: glu(a, row_weight=t), "row_weight"),
                ("glu: row_weight is a number", lambda: glu(a, row_weight=2.0), "row_weight", "tensor"),
                ("GLU: activation", lambda: lk_torch.GLU("swish"), "'swish'"),
                ("rope: float64", lambda: rope(h.double(), inv_freq=freq), "float64"),
                ("rope: not a tensor", lambda: rope([1.0], inv_freq=freq), "q is of type list"),
                ("rope: k, not a tensor", lambda: rope(h, 1.0, inv_freq=freq), "k is of type float"),
                ("rope: two dimensions", lambda: rope(a, inv_freq=freq), "q must be [batch, tokens, heads, dim]"),
                ("rope: five dimensions", lambda: rope(h[None], inv_freq=freq, heads_first=True),
                 "[batch, heads, tokens, dim]"),
                ("rope: tokens of k", lambda: rope(h, h[:, :2], inv_freq=freq), "k has shape [2, 2, 4, 8]"),
                ("rope: features of k", lambda: rope(h, h[..., :6], inv_freq=freq), "k has shape [2, 3, 4, 6]"),
                ("rope: dimensions of k", lambda: rope(h, h[0], inv_freq=freq), "k has shape [3, 4, 8]"),
                ("rope: type of k", lambda: rope(h, h.to(BF16), inv_freq=freq), "k is bfloat16"),
                ("rope: an odd dim", lambda: rope(h[..., :7], inv_freq=freq), "rotary_dim is 7"),
                ("rope: rotary_dim is odd", lambda: rope(h, inv_freq=freq, rotary_dim=5), "rotary_dim is 5"),
                ("rope: rotary_dim above dim", lambda: rope(h, inv_freq=freq, rotary_dim=10), "rotary_dim is 10"),
                ("rope: rotary_dim 0", lambda: rope(h, inv_freq=freq, rotary_dim=0), "rotary_dim is 0"),
                ("rope: no angles", lambda: rope(h), "inv_freq is needed, or cos and sin"),
                ("rope: two kinds of angles", lambda: rope(h, inv_freq=freq, cos=table, sin=table),
                 "inv_freq is given, and so are"),
                ("rope: cos alone", lambda: rope(h, cos=table), "cos is given without sin"),
                ("rope: sin alone", lambda: rope(h, sin=table, inv_freq=freq), "sin is given without cos"),
                ("rope: shape of inv_freq", lambda: rope(h, inv_freq=zeros(8)), "inv_freq has shape [8]"),
                ("rope: type of inv_freq", lambda: rope(h, inv_freq=freq.to(BF16)), "inv_freq must be float32"),
                ("rope: shape of position", lambda: rope(h, inv_freq=freq, position=at[:, :2]), "position has shape [2, 2]"),
                ("rope: batches of position", lambda: rope(h, inv_freq=freq, position=at.repeat(2, 1)),
                 "position has shape [4, 3]"),
                ("rope: type of position", lambda: rope(h, inv_freq=freq, position=at.float()),
                 "position must be int64 or int32"),
                ("rope: position and tables", lambda: rope(h, cos=table, sin=table, position=at), "position is for inv_freq"),
                ("rope: position and offset", lambda: rope(h, inv_freq=freq, position=at, offset=3), "offset is 3"),
                ("rope: offset and tables", lambda: rope(h, cos=table, sin=table, offset=3), "offset is 3"),
                ("rope: offset out of range", lambda: rope(h, inv_freq=freq, offset=2**31), "offset"),
                ("rope: offset is a half", lambda: rope(h, inv_freq=freq, offset=0.5), "offset"),
                ("rope: axes without pair_axis", lambda: rope(h, inv_freq=freq, position=at.expand(2, 2, 3)),
                 "pair_axis is needed"),
                ("rope: 9 axes", lambda: rope(h, inv_freq=freq, position=at.expand(9, 2, 3)), "9 axes"),
                ("rope: pair_axis of one axis", lambda: rope(h, inv_freq=freq, pair_axis=freq.int()),
                 "pair_axis is for a position of"),
                ("rope: type of pair_axis", lambda: rope(h, inv_freq=freq, position=at[None], pair_axis=freq.long()),
                 "pair_axis must be int32"),
                ("rope: shape of pair_axis", lambda: rope(h, inv_freq=freq, position=at[None], pair_axis=at.int()),
                 "pair_axis has shape"),
                ("rope: columns of cos", lambda: rope(h, cos=zeros(3, 6), sin=zeros(3, 6)), "cos has shape [3, 6]"),
                ("rope: tokens of cos", lambda: rope(h, cos=zeros(4, 8), sin=zeros(4, 8)), "cos has shape [4, 8]"),
                ("rope: batches of cos", lambda: rope(h, cos=zeros(3, 3, 8), sin=zeros(3, 3, 8)), "cos has shape [3, 3, 8]"),
                ("rope: shape of sin", lambda: rope(h, cos=table, sin=table[None]), "sin has shape [1, 3, 4]"),
                ("rope: type of cos", lambda: rope(h, cos=table.to(BF16), sin=table.to(BF16)), "cos must be float32"),
                ("rope: type of sin", lambda: rope(h.to(BF16), cos=table.to(BF16), sin=table), "sin is float32"),
                ("rope: gradient of inv_freq", lambda: rope(h, inv_freq=learns(4)), "inv_freq requires a gradient"),
                ("rope: gradient of cos", lambda: rope(h, cos=learns(3, 4), sin=table), "cos requires a gradient"),
                ("rope: gradient of sin", lambda: rope(h, cos=table, sin=learns(3, 4)), "sin requires a gradient"),
                ("rope: shape of q_weight", lambda: rope(h, inv_freq=freq, q_weight=zeros(4)), "q_weight has shape [4]"),
                ("rope: shape of k_weight", lambda: rope(h, h, inv_freq=freq, k_weight=zeros(4, 8)),
                 "k_weight has shape [4, 8]"),
                ("rope: k_weight without k", lambda: rope(h, inv_freq=freq, k_weight=zeros(8)), "k_weight is given without k"),
                ("rope: type of q_weight", lambda: rope(h, inv_freq=freq, q_weight=zeros(8).to(BF16)),
                 "q_weight must be float32"),
                ("rope: type of one weight", lambda: rope(h.to(BF16), h.to(BF16), inv_freq=freq, q_weight=zeros(8),
                                                          k_weight=zeros(8).to(BF16)), "k_weight is bfloat16"),
                ("rope: a long head with a norm", lambda: rope(zeros(1, 1, 258), inv_freq=zeros(129), q_weight=zeros(258)),
                 "dim", "256"),
                ("rope: scale 0", lambda: rope(h, inv_freq=freq, scale=0.0), "scale"),
                ("rope: scale NaN", lambda: rope(h, inv_freq=freq, scale=NAN), "scale"),
                ("rope: eps below 0", lambda: rope(h, inv_freq=freq, eps=-1.0), "eps"),
                ("rope: weight_offset", lambda: rope(h, inv_freq=freq, weight_offset=INF), "weight_offset"),
                ("cross_entropy: float64", lambda: ce(a.double(), t), "float64"),
                ("cross_entropy: 0-d input", lambda: ce(a.sum(), t), "input", "dim"),
                ("cross_entropy: targets of int16", lambda: ce(a, t.short()), "target"),
                ("cross_entropy: type of probabilities", lambda: ce(a, zeros(4, 8).double()), "target"),
                ("cross_entropy: shape of probabilities", lambda: ce(a, zeros(4, 7)), "target"),
                ("cross_entropy: gradient of probabilities", lambda: ce(a, zeros(4, 8).requires_grad_()), "target"),
                ("cross_entropy: ignore_index of probabilities", lambda: ce(a, zeros(4, 8), ignore_index=1), "ignore_index"),
                ("cross_entropy: too few targets", lambda: ce(a, t[:3]), "target"),
                ("cross_entropy: shape of targets", lambda: ce(a, t[:, None]), "target"),
                ("cross_entropy: no classes", lambda: ce(zeros(4, 0), t), "class", "vocab", "input"),
                ("cross_entropy: length of weight", lambda: ce(a, t, zeros(7)), "weight"),
                ("cross_entropy: shape of weight", lambda: ce(a, t, zeros(8, 1)), "weight"),
                ("cross_entropy: gradient of weight", lambda: ce(a, t, zeros(8).requires_grad_()), "weight", "detach"),
                ("cross_entropy: logit_scale that float has not", lambda: ce(a, t, logit_scale=1e-50), "logit_scale"),
                ("cross_entropy: type of weight", lambda: ce(a, t, zeros(8, dtype=long)), "weight"),
                ("cross_entropy: reduction", lambda: ce(a, t, reduction="average"), "reduction", "average"),
                ("cross_entropy: label_smoothing", lambda: ce(a, t, label_smoothing=1.5), "label_smoothing"),
                ("cross_entropy: z_loss", lambda: ce(a, t, z_loss=-1.0), "z_loss"),
                ("cross_entropy: softcap", lambda: ce(a, t, softcap=-1.0), "softcap"),
                ("cross_entropy: logit_scale", lambda: ce(a, t, logit_scale=NAN), "logit_scale"),
                ("cross_entropy: logit_scale below 0", lambda: ce(a, t, logit_scale=-1.0), "logit_scale"),
                ("cross_entropy: denominator of a sum", lambda: ce(a, t, reduction="sum", denominator=zeros()), "denominator",
                 "mean"),
                ("cross_entropy: shape of denominator", lambda: ce(a, t, denominator=zeros(2)), "denominator"),
                ("cross_entropy: denominator is a string", lambda: ce(a, t, denominator="3"), "denominator"),
                ("cross_entropy: logit_scale is a string", lambda: ce(a, t, logit_scale="3"), "logit_scale"),
                ("cross_entropy: z_loss is a string", lambda: ce(a, t, z_loss="small"), "z_loss"),
                ("cross_entropy: shape of logit_scale", lambda: ce(a, t, logit_scale=zeros(3) + 1), "logit_scale"),
                ("cross_entropy: temperature", lambda: ce(a, t, temperature=0.0), "temperature"),
                ("cross_entropy: temperatures and softcap", lambda: ce(a, t, softcap=3.0, temperature=zeros(4) + 1), "softcap"),
                ("cross_entropy: weight is a number", lambda: ce(a, t, 1.0), "weight", "tensor"),
                ("cross_entropy: targets, not a tensor", lambda: ce(a, [0, 1, 2, 3]), "target"),
                ("rms_norm: shape of bias", lambda: rms(a, (8,), bias=zeros(7)), "bias"),
                ("rms_norm: shape of bias beside weight", lambda: rms(a, (8,), zeros(8), bias=zeros(1, 8)), "bias"),
                ("rms_norm: type of bias", lambda: rms(a, (8,), bias=zeros(8, dtype=torch.float64)), "bias"),
                ("rms_norm: type of bias beside weight",
                 lambda: rms(a.to(BF16), (8,), zeros(8), bias=zeros(8, dtype=BF16)), "bias"),
                ("rms_norm: groups", lambda: rms(a, (8,), zeros(3, 8), groups=3), "groups"),
                ("rms_norm: groups of 0", lambda: rms(a, (8,), zeros(0, 8), groups=0), "groups"),
                ("rms_norm: no groups before", lambda: rms(a[0], (8,), zeros(4, 8), groups=4), "groups"),
                ("rms_norm: weight without groups", lambda: rms(a, (8,), zeros(4, 8)), "weight"),
                ("rms_norm: shape of the groups' weight", lambda: rms(a, (8,), zeros(8), groups=4), "weight"),
                ("rms_norm: normalized_shape is a half, of type float", lambda: rms(a, 8.5), "normalized_shape"),
                ("linear_cross_entropy: a temperature per token and bias",
                 lambda: lce(a, b, t, linear_bias=zeros(9), temperature=zeros(4) + 1), "linear_bias"),
                ("linear_cross_entropy: max_counted is a half", lambda: lce(a, b, t, max_counted=1.5), "max_counted"),
                ("linear_cross_entropy: shards without group", lambda: lce(a, b, t, shards=[9]), "shards"),
                ("md_lrpe_cosine: x, not a tensor", lambda: lrpe([1.0], theta, (6,)), "x is"),
                ("md_lrpe_cosine: shape is a half", lambda: lrpe(cube, theta, (6.0,)), "shape"),
                ("cross_entropy: gradient of denominator", lambda: ce(a, t, denominator=zeros(1).requires_grad_()),
                 "denominator"),
                ("cross_entropy: shape of row_weight", lambda: ce(a, t, row_weight=zeros(4, 1)), "row_weight"),
                ("cross_entropy: type of row_weight", lambda: ce(a, t, row_weight=zeros(4, dtype=long)), "row_weight"),
                ("cross_entropy: row_weight is a number", lambda: ce(a, t, row_weight=2.0), "row_weight", "tensor"),
                ("cross_entropy: gradient of row_weight", lambda: ce(a, t, row_weight=zeros(4).requires_grad_()), "row_weight"),
                ("linear_cross_entropy: shape of row_weight", lambda: lce(a, b, t, row_weight=zeros(3)), "row_weight"),
                ("linear_cross_entropy: gradient of row_weight", lambda: lce(a, b, t, row_weight=zeros(4).requires_grad_()),
                 "row_weight", "detach"),
                ("cross_entropy: ignore_index", lambda: ce(a, t, ignore_index=0.5), "ignore_index", "int"),
                ("cross_entropy: another name", lambda: ce(a, t, smoothing=0.1), "smoothing"),
                ("cross_entropy_stats: reduction", lambda: LF.cross_entropy_stats(a, t, reduction="average"), "reduction"),
                ("cross_entropy_stats: softcap", lambda: LF.cross_entropy_stats(a, t, softcap=-1.0), "softcap"),
                ("cross_entropy_stats: statistics of probabilities",
                 lambda: LF.cross_entropy_stats(a, a.detach().softmax(1), statistics=True), "statistics"),
                ("linear_kl: gradient of teacher_input", lambda: lkl(a, b, learns(4, 8), w), "teacher_input"),
                ("linear_kl: gradient of teacher_weight", lambda: lkl(a, b, x, learns(9, 8)), "teacher_weight"),
                ("linear_kl: gradient of teacher_bias", lambda: lkl(a, b, x, w, teacher_bias=learns(9)), "teacher_bias"),
                ("linear_kl: gradient of row_weight", lambda: lkl(a, b, x, w, row_weight=learns(4)), "row_weight"),
                ("linear_kl: shape of row_weight", lambda: lkl(a, b, x, w, row_weight=zeros(3)), "row_weight"),
                ("linear_kl: row_weight is a number", lambda: lkl(a, b, x, w, row_weight=2.0), "row_weight", "tensor"),
                ("linear_kl: hidden", lambda: lkl(a, zeros(9, 7), x, w), "linear_weight"),
                ("linear_kl: the teacher's hidden", lambda: lkl(a, b, x, zeros(9, 7)), "teacher_weight"),
                ("linear_kl: classes", lambda: lkl(a, b, x, zeros(10, 8)), "teacher_weight has 10"),
                ("linear_kl: the teacher's tokens", lambda: lkl(a, b, zeros(3, 8), w), "teacher_input"),
                ("linear_kl: dimensions of the teacher's weight", lambda: lkl(a, b, x, zeros(8)), "teacher_weight"),
                ("linear_kl: type of the weight", lambda: lkl(a, b.to(BF16), x, w), "linear_weight"),
                ("linear_kl: type of the teacher's input", lambda: lkl(a, b, x.to(BF16), w), "teacher_input"),
                ("linear_kl: type of the teacher's weight", lambda: lkl(a, b, x, w.to(BF16)), "teacher_weight"),
                ("linear_kl: type of the bias", lambda: lkl(a, b, x, w, linear_bias=zeros(9).double()), "linear_bias"),
                ("linear_kl: float64", lambda: lkl(a.double(), b.double(), x.double(), w.double()), "float64"),
                ("linear_kl: bias", lambda: lkl(a, b, x, w, linear_bias=zeros(8)), "linear_bias"),
                ("linear_kl: the teacher's bias", lambda: lkl(a, b, x, w, teacher_bias=zeros(8)), "teacher_bias"),
                ("linear_kl: the teacher's weight, not a tensor", lambda: lkl(a, b, x, [1.0]), "teacher_weight"),
                ("linear_kl: divergence", lambda: lkl(a, b, x, w, divergence="jsd"), "divergence"),
                ("linear_kl: beta", lambda: lkl(a, b, x, w, divergence="jensen_shannon", beta=-0.1), "beta"),
                ("linear_kl: reduction", lambda: lkl(a, b, x, w, reduction="average"), "reduction"),
                ("linear_kl: temperature", lambda: lkl(a, b, x, w, temperature=0.0), "temperature"),
                ("linear_kl: logit_scale", lambda: lkl(a, b, x, w, logit_scale=-1.0), "logit_scale"),
                ("linear_kl: teacher_softcap", lambda: lkl(a, b, x, w, teacher_softcap=-1.0), "teacher_softcap"),
                ("linear_kl: workspace_mib", lambda: lkl(a, b, x, w, workspace_mib=0), "workspace"),
                ("linear_kl: no classes", lambda: lkl(a, zeros(0, 8), x, zeros(0, 8)), "vocab", "class"),
                ("linear_kl: grad_scale", lambda: lkl(a, b.clone().requires_grad_(), x, w, grad_scale=0.0), "grad_scale"),
                ("linear_cross_entropy: hidden", lambda: lce(a, zeros(9, 7), t), "linear_weight"),
                ("linear_cross_entropy: dimensions of the weight", lambda: lce(a, zeros(8), t), "linear_weight"),
                ("linear_cross_entropy: type of the weight", lambda: lce(a, b.to(BF16), t), "linear_weight"),
                ("linear_cross_entropy: float64", lambda: lce(a.double(), b.double(), t), "float64"),
                ("linear_cross_entropy: bias", lambda: lce(a, b, t, linear_bias=zeros(8)), "linear_bias"),
                ("linear_cross_entropy: targets", lambda: lce(a, b, t[:3]), "target"),
                ("linear_cross_entropy: shape of probabilities", lambda: lce(a, b, t.float()), "probabilities"),
                ("linear_cross_entropy: type of probabilities", lambda: lce(a, b, zeros(4, 9).double()), "probabilities"),
                ("linear_cross_entropy: workspace_mib", lambda: lce(a, b, t, workspace_mib=-1), "workspace"),
                ("linear_cross_entropy: denominator", lambda: lce(a, b, t, denominator=zeros(2)), "denominator"),
                ("linear_cross_entropy: batch_invariant in float32", lambda: lce(a, b, t, batch_invariant=True),
                 "batch_invariant"),
                ("linear_cross_entropy: label_smoothing", lambda: lce(a, b, t, label_smoothing=-0.5), "label_smoothing"),
                ("md_lrpe_cosine: 3 dimensions", lambda: lrpe(cube[0], theta, (6,)), "x", "dim"),
                ("md_lrpe_cosine: heads of theta", lambda: lrpe(cube, zeros(3, 8), (6,)), "theta"),
                ("md_lrpe_cosine: features of theta", lambda: lrpe(cube, zeros(2, 7), (6,)), "theta", "e is"),
                ("md_lrpe_cosine: type of theta", lambda: lrpe(cube, theta.to(BF16), (6,)), "theta"),
                ("md_lrpe_cosine: tokens", lambda: lrpe(cube, theta, (5,)), "shape", "token"),
                ("md_lrpe_cosine: prefix", lambda: lrpe(cube, theta, (7,), -1), "prefix", "shape"),
                ("md_lrpe_cosine: 9 axes", lambda: lrpe(cube, theta, (1,) * 8 + (6,)), "axes", "shape"),
                ("an option of the other module", lambda: lk_torch.LinearKLLoss(8, 9, row_weight=zeros(4)), "row_weight"),
                ("an option of the module", lambda: lk_torch.LinearCrossEntropyLoss(8, 9, reductoin="sum"), "reductoin"),
                ("md_lrpe_cosine: offset", lambda: lrpe(cube, theta, (2, 3), 0, None, (1,)), "offset", "shape"),
                ("md_lrpe_cosine: no axes", lambda: lrpe(cube[:, :, :1], theta, ()), "axes", "shape"),
                ("md_lrpe_cosine: activation", lambda: lrpe(cube, theta, (6,), 0, "gelu"), "activation", "gelu")):
            kind = TypeError if re.search("float64|int64|complex|type of|not a tensor|int16|of float|a number|: ignore_index$|"
                                          ": dtype|another name|an option|a string|a half|a tensor", name) else ValueError
            kind = NotImplementedError if "sparse" in name else IndexError if re.search("a dim|: dim ", name) else kind
            raises(f"{name}{', with gradient' if wants_grad else ''}", f, *words, kind=kind)
    leaf_x = x.clone().requires_grad_()

    def same_or_raises(name, f, right, *words):
        try:
            out = f()
        except (RuntimeError, NotImplementedError) as error:
            return verdict(f"{name} is refused", any(word in str(error) for word in words), " ".join(str(error).split())[:300])
        close(f"{name} works", out, right())
    import torch.autograd.forward_ad as forward_ad
    some = normal(9, 8).to(D)

    def tangent(f):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(f(forward_ad.make_dual(x + 1, torch.ones_like(x)))).tangent
    for name, ours, theirs in (("logsumexp", lambda v: lse(v, -1), lambda v: torch.logsumexp(v, -1)),
                               ("srms_norm", lambda v: LF.srms_norm(v), lambda v: exact_norm(v, v.shape[-1:])),
                               ("cross_entropy", lambda v: ce(v, t), lambda v: F.cross_entropy(v, t)),
                               ("glu", lambda v: glu(v, some[:4]), lambda v: F.silu(v) * some[:4]),
                               ("rope", lambda v: rope(v.view(4, 1, 8), inv_freq=freq), lambda v: v.view(4, 1, 8) * 1),
                               ("linear_kl", lambda v: lkl(v, some, x + 2, some), lambda v: F.kl_div(
                                   (v @ some.t()).log_softmax(-1), ((x + 2) @ some.t()).softmax(-1), reduction="batchmean"))):
        same_or_raises(f"{name}: forward-mode AD", lambda: tangent(ours), lambda: tangent(theirs), "jvp", "forward", "Forward")
        same_or_raises(f"{name}: torch.func.grad", lambda: torch.func.grad(lambda v: ours(v).sum())(x),
                       lambda: torch.func.grad(lambda v: theirs(v).sum())(x), "functorch", "torch.func", "vmap", "transform")
        stack = torch.stack([x + 1, x * 2 - 1])
        same_or_raises(f"{name}: torch.vmap", lambda: torch.vmap(ours)(stack), lambda: torch.stack([theirs(v) for v in stack]),
                       "vmap", "functorch", "batching", "Batched")
    if CUDA:
        host = torch.zeros(4, dtype=long)
        for name, f in (("input", lambda: ce(x.cpu(), t)), ("target", lambda: ce(x, host)),
                        ("weight", lambda: ce(x, t, torch.ones(8))), ("norm", lambda: rms(x, (8,), torch.ones(8))),
                        ("host alone", lambda: LF.srms_norm(x.cpu())),
                        ("linear_weight", lambda: lce(x, w.cpu(), t)), ("theta", lambda: lrpe(cube, theta.cpu(), (6,))),
                        ("teacher_input", lambda: LF.linear_kl(x, w, x.cpu(), w)),
                        ("teacher_weight", lambda: LF.linear_kl(x, w, x, w.cpu())),
                        ("residual", lambda: LF.add_rms_norm(x, x.cpu(), (8,)))):
            raises(f"a tensor of the host: {name}", f, "cpu", "device")
        if torch.cuda.device_count() > 1:
            raises("tensors of two devices", lambda: ce(x, t.to("cuda:1")), "cuda:1", "device")
    learned = torch.ones((), requires_grad=True)
    for option, f in (("scale", lambda v: lse(x, 1, scale=v)), ("z_loss", lambda v: ce(x, t, z_loss=v)),
                      ("softcap", lambda v: ce(x, t, softcap=v)), ("label_smoothing", lambda v: ce(x, t, label_smoothing=v)),
                      ("denominator", lambda v: ce(x, t, denominator=v)), ("z_loss", lambda v: lce(x, w, t, z_loss=v)),
                      ("softcap", lambda v: lce(x, w, t, softcap=v)), ("eps", lambda v: rms(x, (8,), eps=v)),
                      ("label_smoothing", lambda v: lce(x, w, t, label_smoothing=v)),
                      ("weight_offset", lambda v: rms(x, (8,), zeros(8), weight_offset=v)),
                      ("weight_offset", lambda v: LF.add_rms_norm(x, x, (8,), zeros(8), weight_offset=v)),
                      ("eps", lambda v: LF.srms_norm(x, v)), ("alpha", lambda v: glu(x, alpha=v)),
                      ("limit", lambda v: glu(x, limit=v)), ("up_offset", lambda v: glu(x, x, up_offset=v)),
                      ("scale", lambda v: rope(heads, inv_freq=freq, scale=v)),
                      ("eps", lambda v: rope(heads, inv_freq=freq, eps=v)),
                      ("weight_offset", lambda v: rope(heads, inv_freq=freq, weight_offset=v))):
        where = D if option == "denominator" else "cpu"
        raises(f"{option} is learned", lambda: f(learned.to(where)), option, kind=ValueError)
        raises(f"{option} has two numbers", lambda: f(torch.ones(2, device=D)), option, kind=ValueError)
        if CUDA and option != "denominator":
            raises(f"{option} on the device", lambda: f(torch.ones((), device=D)), option, kind=TypeError)
        with torch.no_grad():
            verdict(f"{option} is read where no gradient is wanted", tuple_of(f(learned.to(where)))[0].isfinite().all())
    raises("an upstream of another shape", lambda: torch.autograd.grad(ce(leaf_x, t), leaf_x, zeros(3)), "shape")
    for name, f, leaves in functions():  # after all that, right calls still work
        verdict(f"afterwards: {name}", all(v.isfinite().all() for v in out_and_gradients(f, leaves)), "not finite")


def in_a_child(name, file=__file__, more=()):
    """Runs a group in a process of its own, so that a crash is a failed check and not the end. more: of the environment."""
    command = [sys.executable, os.path.abspath(file), *([name] if file == __file__ else [])]
    result = subprocess.run(command, env={**os.environ, **dict(more), "LK_TEST_CHILD": "1"}, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True, timeout=900)
    lines = result.stdout.rstrip().splitlines() or [""]
    counts = re.fullmatch(r"(\d+) passed, (\d+) failed", lines[-1])
    for line in lines if not counts or VERBOSE else [s for s in lines if s.lstrip().startswith(("FAIL  ", "skipped"))]:
        print(line if line.startswith("  ") else "  " + line)
    if counts:
        totals[0] += int(counts[1])
        totals[1] += int(counts[2])
    else:
        verdict(name, False, f"the process ended with {result.returncode} before its last line")


# ---- GPU --------------------------------------------------------------------------------------------------------------------


def graphs():
    p, step = small_model()
    batch = batch_of(12)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            gradients_of(step, batch, p)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(*batch)
        gradients = torch.autograd.grad(loss, [*batch[:2], *p])
    for i in range(3):
        with torch.no_grad():
            batch[0].normal_(), batch[1].normal_(), batch[2].random_(50)
        graph.replay()
        close(f"a training step, replay {i}", [loss, *gradients], gradients_of(step, batch, p), 1e-5)


def large():
    rows, cols = 70000, 32768  # 2,293,760,000 elements
    if torch.cuda.mem_get_info()[0] < 12 * 2**30:
        print("  skipped: needs 12 GiB of free device memory")
        return
    x = torch.empty(rows, cols, dtype=BF16, device=D).normal_()
    x.requires_grad_()
    lse = LF.logsumexp(x, 1, dtype=F32)
    up = torch.full_like(lse, 1.0)
    gradient, = torch.autograd.grad(lse, x, up)
    for where in (slice(0, 3), slice(65535, 65539), slice(rows - 3, rows)):  # element 2^31 is in row 65536
        part = x.detach()[where].double()
        right = torch.logsumexp(part, 1)
        p = torch.softmax(part, 1)
        compare(f"rows from {where.start}", ("lse", lse[where], right, 8 * U * (part.abs().max() + math.log(cols) + 1)),
                ("dx", gradient[where], p, rounded(p, p * 64 * U, BF16)))
    del gradient, x


def devices():
    for name, f, leaves in functions():
        if name.startswith(("cross", "linear", "support")):
            continue  # their functions hold targets of the first device
        there = [t.detach().to("cuda:1").requires_grad_() for t in leaves]
        found = [v.to(D) for v in out_and_gradients(f, there)]
        close(f"{name} on cuda:1 while cuda:0 is current", found, out_and_gradients(f, leaves), 8 * U)
    x, w, t = leaf(normal(6, 12)), leaf(normal(20, 12)), classes(20, 6)
    there = [v.detach().to("cuda:1").requires_grad_() for v in (x, w)]
    for _ in range(2):  # contexts of both devices, in turns
        loss = LF.linear_cross_entropy(*there, t.to("cuda:1"))
        close("linear_cross_entropy on cuda:1", loss.to(D), LF.linear_cross_entropy(x, w, t))
        close("linear_kl on cuda:1", LF.linear_kl(*there, *[v.detach() + 1 for v in there]).to(D),
              LF.linear_kl(x, w, x.detach() + 1, w.detach() + 1))
    close("cross_entropy on cuda:1", LF.cross_entropy(there[0], (t % 12).to("cuda:1")).to(D), LF.cross_entropy(x, t % 12))


def fp8():
    """Norms whose result has 8 bits: scales, numbers and the transposed copy against float64, gradients against the plain
    norm's."""
    eps, most = 2.0**-20, {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
    digits = {torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3}  # half a step of a number at its largest

    def by_blocks(scale, per, cols):
        return scale.float().repeat_interleave(per, -1)[..., :cols]

    def check_numbers(name, q, scale, y, per, narrow, given=None):
        """q [rows, cols] and its scales [rows, blocks] against y [rows, cols]; given: the scale of TENSOR."""
        rows, cols = y.shape
        if given is None:
            amax = F.pad(y.abs(), (0, -cols % per)).view(rows, -1, per).amax(-1)
            right = torch.where(amax > 0, amax / most[q.dtype], 2.0**-127 if scale.dtype == torch.float8_e8m0fnu else 1.0)
            if narrow:
                half = scale.double().frexp().mantissa == 0.5  # log2 of a power of two is no whole number on every device
                verdict(f"{name}: powers of two", bool((half & (scale.double() >= right * (1 - 1e-6)) & (
                    (scale.double() < 2 * right * (1 + 1e-6)) | (amax == 0))).all()), f"{scale} for {right}")
            else:
                compare(f"{name}: scale", ("scale", scale, right, right * 16 * U))
            given = by_blocks(scale, per, cols).double()
        bound = (y.abs() * digits[q.dtype] + given * 2.0**(-10 if q.dtype == torch.float8_e4m3fn else -17)) * (1 + 1e-5)
        y = y.clamp(-most[q.dtype] * given, most[q.dtype] * given)
        compare(f"{name}: numbers", ("y", q.double() * given, y, bound))

    for t, scaling, (shape, layout) in itertools.product(
            TYPES, ("tensor", "row", "block128", "mx"), (((6, 64), "packed"), ((2, 3, 300), "gaps"), ((130, 160), "packed"))):
        dtype, cols, narrow = rng.choice(list(most)), shape[-1], scaling == "mx" or rng.random() < 0.5
        x, w = leaf(normal(*shape, sigma=1.5), t, layout), leaf(normal(cols), rng.choice((t, F32)))
        r = leaf(normal(*shape), rng.choice((t, F32))) if rng.random() < 0.5 else None
        with torch.no_grad():
            x[0] = 0 if layout == "packed" else x[0]  # a row of zeros
        offset, turned = rng.choice((0.0, 1.0)), scaling != "row"
        number = torch.tensor(0.02, device=D) if scaling == "tensor" else None
        name = f"{NAMES[t]} {shape} {scaling} {str(dtype)[6:]} weight {NAMES[w.dtype]}{', residual' if r is not None else ''}"
        options = dict(out_dtype=dtype, scaling=scaling, scale=number, power_of_two=narrow, amax=scaling == "tensor",
                       transposed=turned, weight_offset=offset)
        out = list(LF.rms_norm(x, cols, w, eps, **options) if r is None else LF.add_rms_norm(x, r, cols, w, eps, **options))
        s = x.detach().double() + (0.0 if r is None else r.detach().double())
        y = exact_norm(s, (cols,), w.detach().double() + offset, eps).view(-1, cols)
        per = {"row": cols, "block128": 128, "mx": 32, "tensor": 1}[scaling]
        q, scale = out[:2]
        if r is not None:
            compare(f"{name}: the sum", ("s", out.pop(), s, rounded(s, 2 * U * s.abs(), r.dtype)))
        if scaling == "tensor":
            compare(f"{name}: amax", ("amax", out.pop(2), y.abs().max(), y.abs().max() * 16 * U))
            verdict(f"{name}: scale is the one given", scale is number)
        else:
            verdict(f"{name}: shape of scale", scale.shape == (*shape[:-1], -(-cols // per)), str(scale.shape))
            scale = scale.reshape(y.shape[0], -1)
        verdict(f"{name}: what comes back", len(out) == (4 if turned else 2) and q.shape == x.shape and q.dtype == dtype,
                str(len(out)))
        given = number.double() if scaling == "tensor" else None
        check_numbers(name, q.detach().view(-1, cols), scale, y, per, narrow, given)
        if turned:
            check_numbers(f"{name}, transposed", out[2], out[3], y.t(), min(per, 128), narrow, given)
            verdict(f"{name}: rows of the transposed copy are contiguous", out[2].is_contiguous() and not out[2].requires_grad)
        # The gradient of q has x's type and is the plain norm's, except in the last places of rstd: the two sum in other orders.
        dy, inputs = leaf(normal(*shape), t, "packed", False), [x, w] + ([] if r is None else [r])
        plain = LF.rms_norm(x, cols, w, eps, weight_offset=offset) if r is None else LF.add_rms_norm(
            x, r, cols, w, eps, weight_offset=offset)[0]
        ours, theirs = torch.autograd.grad(q, inputs, dy), torch.autograd.grad(plain, inputs, dy)
        compare(f"{name}: gradients are the plain norm's", *((what, a, b, 2 * rounded(b, 64 * U * b.abs().max(), b.dtype))
                                                            for what, a, b in zip(("dx", "dweight", "dresidual"), ours, theirs)))
        verdict(f"{name}: in its own types", [g.dtype for g in ours] == [v.dtype for v in inputs], str([g.dtype for g in ours]))
        with torch.no_grad():
            bare = LF.rms_norm(x, cols, w, eps, **options)[0]
        verdict(f"{name}: without a gradient", not bare.requires_grad and (r is not None or torch.equal(
            bare.view(torch.uint8), q.detach().view(torch.uint8))))

    class Product(torch.autograd.Function):  # what takes q's gradient: a product of 8 bits
        @staticmethod
        def forward(ctx, q, scale, weight):
            ctx.save_for_backward(q, scale, weight)
            return (q.float() * scale @ weight.float().t()).to(BF16)

        @staticmethod
        def backward(ctx, dout):
            q, scale, weight = ctx.saved_tensors
            return dout @ weight, None, (dout.float().t() @ (q.float() * scale)).to(BF16)
    x, w, m = leaf(normal(6, 64), BF16), leaf(normal(64), BF16), leaf(normal(32, 64), BF16)
    q, scale = LF.rms_norm(x, 64, w, eps, out_dtype=torch.float8_e4m3fn)
    up = leaf(normal(6, 32), BF16, "packed", False)
    found = torch.autograd.grad(Product.apply(q, scale, m), [x, w, m], up, retain_graph=True)
    dy = up @ m.detach()
    right = torch.autograd.grad(LF.rms_norm(x, 64, w, eps), [x, w], dy)
    compare("through an autograd.Function", *((what, a, b, 2 * rounded(b, 64 * U * b.abs().max(), BF16))
                                               for what, a, b in zip(("dx", "dweight"), found, right)))
    two = torch.autograd.grad(Product.apply(q, scale, m).float().sum() + 2 * Product.apply(q, scale, m).float().sum(), [x])
    verdict("of two readers", torch.isfinite(two[0]).all().item())
    y = torch.randn(4, 128, device=D, generator=None)
    q, scale = LF.rms_norm(y, 128, None, eps, out_dtype=torch.float8_e4m3fn, power_of_two=True)
    right = (F.rms_norm(y.double(), (128,), None, eps).float() / scale).to(torch.float8_e4m3fn)
    far = (q.view(torch.uint8) != right.view(torch.uint8)).sum().item()
    verdict("powers of two: PyTorch's own conversion", far <= 2, f"{far} of {q.numel()} differ")  # y may be off by an ulp
    # Exact bytes: where |x| is 1 and eps 0, y is the weight with x's sign.
    x, w = torch.ones(6, 300, device=D), torch.randn(300, device=D) * torch.randn(300, device=D).mul(4).exp2()
    x[::2, 1::3], w[32:64], w[70], w[100], w[200:203] = -1, 0.0, math.inf, math.nan, torch.tensor([448.0, 460.0, 511.0], device=D)
    w[256:288] = 2.0**-122  # in MX the byte 0 stands for 2^-127
    y, inf = x * w, torch.tensor(math.inf, device=D)
    for (dtype, limit), rounding, scaling in itertools.product(most.items(), ("up", "floor"), ("row", "block128", "mx")):
        out = LF.rms_norm(x, 300, w, 0.0, out_dtype=dtype, scaling=scaling, power_of_two=True, scale_rounding=rounding,
                          transposed=scaling != "row")
        for q, scale, part in zip(out[::2], out[1::2], (y, y.t())):
            per = {"row": 300, "block128": 128, "mx": 32}[scaling]
            amax = F.pad(part.abs(), (0, -part.shape[1] % per)).view(len(part), -1, per).amax(-1)
            bad = ~(amax < inf)
            if scaling != "mx":
                amax = torch.where(amax > 0, amax.clamp(min=2.0**-80), amax)
            mantissa, exponent = torch.frexp(amax.double() / (limit if rounding == "up" else limit / 1.75))
            exponent = exponent - ((mantissa == 0.5) | (rounding == "floor")).int()
            exponent = torch.where(bad, 0, exponent)
            if scaling == "mx":
                exponent = torch.where(amax == 0, -127, exponent).clamp(min=-127)
                right = torch.where(bad, 255, exponent + 127)
                same = torch.equal(scale.view(torch.uint8).int(), right.int())
            else:
                exponent = torch.where(amax == 0, 0, exponent)
                same = torch.equal(scale.nan_to_num(-1.0), torch.where(bad, -1.0, torch.exp2(exponent.float())))
            verdict(f"{scaling} {rounding} {str(dtype)[6:]}: scales", same, str(scale))
            by_column = lambda v: v.repeat_interleave(per, -1)[:, :part.shape[1]]
            right = (part.double() / by_column(torch.exp2(exponent.double()))).clamp(-limit, limit).float().to(dtype)
            right = torch.where(by_column(bad), 0x7f, right.view(torch.uint8))
            verdict(f"{scaling} {rounding} {str(dtype)[6:]}: bytes", torch.equal(q.view(torch.uint8), right))
    q, scale, amax = LF.rms_norm(x, 300, w, 0.0, out_dtype=torch.float8_e4m3fn, scaling="tensor", amax=True)
    verdict("one scale: an infinity saturates, and amax tells", amax == math.inf and (q[:, 70].float().abs() == 448).all().item() and
            torch.isnan(q[:, 100].float()).all().item())
    x, w = leaf(normal(6, 64), BF16), leaf(normal(64), BF16)
    for shape in ((0, 16), (2, 0, 16)):
        q, scale = LF.rms_norm(leaf(torch.zeros(shape)), 16, None, eps, out_dtype=torch.float8_e5m2)
        verdict(f"empty {shape}", q.shape == shape and scale.shape == (*shape[:-1], 1))
    q, scale = LF.rms_norm(torch.zeros(2, 16, device=D), 16, None, eps, out_dtype=torch.float8_e5m2)
    verdict("zeros have scale 1", bool((scale == 1).all() and (q.float() == 0).all()))
    e4m3 = dict(out_dtype=torch.float8_e4m3fn)
    step = lambda x, w: LF.rms_norm(x, 64, w, eps, scaling="block128", transposed=True, **e4m3)
    with torch.no_grad():
        ours, theirs = torch.compile(step, backend="aot_eager", fullgraph=True)(x, w), step(x, w)
    bits = lambda v: v.view(torch.uint8) if v.element_size() == 1 else v
    verdict("compiled", all(torch.equal(bits(a), bits(b)) and a.stride() == b.stride() for a, b in zip(ours, theirs)))
    train = lambda x, w, m: Product.apply(*LF.rms_norm(x, 64, w, eps, **e4m3), m)
    compiled_too = (train, torch.compile(train, backend="aot_eager", fullgraph=True))
    both = [torch.autograd.grad(f(x, w, m), [x, w, m], up) for f in compiled_too]
    verdict("compiled, with gradients", all(map(torch.equal, *both)))
    for name, f, *words in (
            ("out_dtype", lambda: LF.rms_norm(x, 64, w, out_dtype=BF16), "out_dtype"),
            ("scaling", lambda: LF.rms_norm(x, 64, w, scaling="rows", **e4m3), "scaling"),
            ("scale_rounding", lambda: LF.rms_norm(x, 64, w, scaling="mx", scale_rounding="even", **e4m3), "scale_rounding"),
            ("scale_rounding of floats", lambda: LF.rms_norm(x, 64, w, scale_rounding="floor", **e4m3), "scale_rounding"),
            ("scale_rounding of a tensor", lambda: LF.rms_norm(x, 64, w, scaling="tensor", power_of_two=True, scale_rounding="floor",
                                                               **e4m3), "scale_rounding"),
            ("bias", lambda: LF.rms_norm(x, 64, w, bias=w, **e4m3), "bias"),
            ("groups", lambda: LF.rms_norm(x.view(3, 2, 64), 64, leaf(normal(2, 64)), groups=2, **e4m3), "groups"),
            ("two dimensions", lambda: LF.rms_norm(x.view(6, 2, 32), (2, 32), None, **e4m3), "one dimension"),
            ("scale of rows", lambda: LF.rms_norm(x, 64, w, scale=torch.ones((), device=D), **e4m3), "scale"),
            ("amax of rows", lambda: LF.rms_norm(x, 64, w, amax=True, **e4m3), "amax"),
            ("transposed rows", lambda: LF.rms_norm(x, 64, w, transposed=True, **e4m3), "row"),
            ("scale's type", lambda: LF.rms_norm(x, 64, w, scaling="tensor", scale=torch.ones((), device=D).double(), **e4m3),
             "scale"),
            ("scale's shape", lambda: LF.rms_norm(x, 64, w, scaling="tensor", scale=torch.ones(2, device=D), **e4m3), "scale"),
            ("scale's gradient", lambda: LF.rms_norm(x, 64, w, scaling="tensor", scale=leaf(torch.ones(())), **e4m3), "scale"),
            ("weight", lambda: LF.rms_norm(x, 64, w[:32], **e4m3), "weight"),
            ("cols", lambda: LF.rms_norm(x, 32, None, **e4m3), "normalized_shape"),
            ("residual", lambda: LF.add_rms_norm(x, x[:3], 64, w, **e4m3), "residual"),
            ("eps", lambda: LF.rms_norm(x, 64, w, -1.0, **e4m3), "eps")):
        raises(f"fp8: {name}", f, *words)


def invariant():
    """set_batch_invariant: a row's results have the same bits in any batch, in eager mode and compiled, and gradients stay right."""
    rows = 2400 if CUDA else 120  # enough for other kernels than a row alone has
    target = torch.arange(rows, device=D)
    differ = 0
    verdict("set_batch_invariant: off at first", not LF.set_batch_invariant())
    verdict("set_batch_invariant: then on", LF.set_batch_invariant(True))
    for dtype, cols in itertools.product((F32, F16, BF16), (1000, 8192, 20000)):
        x, y, w = (torch.randn(n, cols, device=D).to(dtype) for n in (rows, rows, 1))
        calls = {"rms_norm": lambda a, b: LF.rms_norm(x[a:b], cols, w[0], 1e-6),
                 "rms_norm, gate": lambda a, b: LF.rms_norm(x[a:b], cols, w[0], 1e-6, gate=y[a:b]),
                 "add_rms_norm": lambda a, b: LF.add_rms_norm(x[a:b], y[a:b], cols, w[0], 1e-6),
                 "kl": lambda a, b: LF.kl(x[a:b], y[a:b], reduction="none", return_entropy=True),
                 "cross_entropy": lambda a, b: LF.cross_entropy(x[a:b], target[a:b] % cols, reduction="none"),
                 "kl, slices": lambda a, b: LF.kl(x[a:b], y[a:b], reduction="none", divergence="jensen_shannon", vocab_slices=1),
                 "vocab_slices": lambda a, b: LF.cross_entropy(x[a:b], target[a:b] % cols, reduction="none", vocab_slices=1),
                 "cross_entropy_stats": lambda a, b: tuple(LF.cross_entropy_stats(x[a:b], target[a:b] % cols, reduction="none"))}
        for name, call in calls.items():
            results = lambda a, b: (lambda out: out if isinstance(out, tuple) else (out,))(call(a, b))
            whole = results(0, rows)
            for a, b in ((0, 1), (rows - 1, rows), (rows // 3, rows // 2)):
                same = all(torch.equal(u[a:b], v) for u, v in zip(whole, results(a, b)))
                verdict(f"{name} {dtype} {cols}: rows {a} to {b} have the bits of {rows} rows", same)
            LF.set_batch_invariant(False)
            differ += not all(torch.equal(u[:1], v) for u, v in zip(results(0, rows), results(0, 1)))
            LF.set_batch_invariant(True)
    verdict("without it some bits differ", differ > 0)
    x = torch.randn(rows, 20000, device=D, requires_grad=True)
    fast = torch.compile(lambda x, y: LF.cross_entropy(x, y, reduction="none"), backend="aot_eager", fullgraph=True)
    verdict("compiled", torch.equal(fast(x, target)[5:6], LF.cross_entropy(x[5:6], target[5:6], reduction="none")))
    up = torch.randn(rows, device=D)
    found, right = (torch.autograd.grad(f(x, target, reduction="none"), x, up)[0] for f in (LF.cross_entropy, F.cross_entropy))
    verdict("the gradient", torch.allclose(found, right, rtol=1e-4, atol=1e-6))
    verdict("set_batch_invariant: off again", LF.set_batch_invariant(False) and not LF.set_batch_invariant(False))


GROUPS = {"logsumexp": logsumexp, "kl": kl, "norms": norms, "gated_norms": gated_norms, "glu": glu, "rope": rope, "fp8": fp8,
          "cross_entropy": cross_entropy, "with_grad": with_grad, "cross_entropy_stats": cross_entropy_stats,
          "statistics": statistics, "invariant": invariant,
          "cross_entropy_ids": cross_entropy_ids, "linear_cross_entropy_ids": linear_cross_entropy_ids, "linear_support": linear_support, "linear_topk": linear_topk,
          "support": support,
          "upstreams": upstreams, "launches": launches,
          "linear_cross_entropy": linear_cross_entropy, "ports": ports, "linear_kl": linear_kl, "row_weight": row_weight, "learned": learned,
          "md_lrpe_cosine": md_lrpe_cosine, "layouts": layouts, "tools": functools.partial(of_one_rank, tools), "signatures": signatures,
          "modules": modules, "autograd": autograd, "differences": differences, "autocast": autocast, "inference": inference,
          "mistakes": mistakes, "opcheck": functools.partial(of_one_rank, opcheck), "compile": compiled, "training": training,
          "checkpoint": checkpoint, "threads": threads,
          "parallel": functools.partial(in_a_child, "parallel", HERE + "/test_parallel.py")}
if "LK_TEST_SPY" in os.environ:
    GROUPS["spied"] = spied
if not CUDA:
    GROUPS["distributed"] = functools.partial(of_one_rank, distributed)
if CUDA:
    GROUPS.update(graphs=graphs, large=large)
    if torch.cuda.device_count() > 1:
        GROUPS["devices"] = devices


def main():
    global worst
    chosen = sys.argv[1:]
    if "--list" in chosen:
        return print(" ".join(GROUPS))
    unknown = [name for name in chosen if name not in GROUPS]
    if unknown:
        sys.exit(f"{unknown[0]} is no group; there are: {' '.join(GROUPS)}")
    child = "LK_TEST_CHILD" in os.environ
    if CUDA and not torch.cuda.is_available():
        print(f"lk_torch was built for a GPU, and PyTorch {torch.__version__} sees none; build it with LK_BACKEND=cpu")
        print("0 passed, 1 failed")
        sys.exit(1)
    start = time.time()
    if not CUDA:
        torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other
    if not child:
        device = torch.cuda.get_device_name() if CUDA else "CPU tensors, on the simulator: small shapes"
        print(f"lk_torch ({lk_torch.BACKEND}) in PyTorch {torch.__version__}, {device}")
        print(f"{'group':24}{'checks':>8}{'worst share':>13}{'seconds':>9}", flush=True)
    for name in chosen or GROUPS:
        before, worst, began = list(totals), 0.0, time.time()
        rng.seed(name)
        generator.manual_seed(1)
        torch.manual_seed(1)
        attempt(name, functools.partial(in_a_child, name) if name == "mistakes" and not child else GROUPS[name])
        checks, failed = sum(totals) - sum(before), totals[1] - before[1]
        if not child:
            print(f"{name:24}{checks:8d}{f'{worst:.3f}' if worst else '-':>13}{time.time() - began:9.1f}"
                  f"{f'   {failed} FAILED' if failed else ''}", flush=True)
    if not child:
        print(f"{time.time() - start:.0f} seconds")
    print(f"{totals[0]} passed, {totals[1]} failed")
    sys.exit(totals[1] > 0)


if __name__ == "__main__":
    quiet()
    main()
