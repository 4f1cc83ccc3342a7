# SPDX-License-Identifier: MIT
"""Holds lk_jax against the formulas in float64: values, gradients, every option, JAX's transformations, mistakes.

    python build.py cpu && python test.py        some minutes on lk's simulator; on a GPU the same tests
    python test.py cross_entropy transforms      some groups

A result may differ from the formula by its own rounding, as often as it is rounded, and by 2^-18 for sums in float32; both are
relative, in the Frobenius norm. Each group runs in a process of its own, some with other settings of JAX: x64 (64-bit targets),
devices, ranks and slices (shard_map over two, four and six devices of the CPU, so not on a GPU) and, on a GPU, graphs (all calls in
CUDA graphs).
"""
import concurrent.futures
import functools
import itertools
import logging
import math
import os
import pickle
import re
import subprocess
import sys
import time
import warnings

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)
SETTINGS = {"x64": {"JAX_ENABLE_X64": "1"}, "devices": {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
            **dict.fromkeys(("meshes", "ranks"), {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}),
            "invariant": {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"},
            "slices": {"XLA_FLAGS": "--xla_force_host_platform_device_count=6"},
            "graphs": {"XLA_FLAGS": "--xla_gpu_graph_min_graph_size=1"}}
os.environ.update(XLA_PYTHON_CLIENT_PREALLOCATE="false", TF_CPP_MIN_LOG_LEVEL="2")  # several processes share a GPU

import jax
import jax.numpy as jnp
import numpy as np

import lk_jax as lk

DTYPES = ("float32", "float16", "bfloat16")
ROUNDING = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
counts = {}
group = None


def check(name, good, note=""):
    counts[group][not good] += 1
    if not good:
        print(f"FAIL {group}: {name} {note}", flush=True)


def close(name, ours, exact, roundings=1, like=None):
    """like: the type whose rounding counts; None: that of ours."""
    u = ROUNDING[like or ours.dtype.name]
    ours, exact = np.asarray(ours, np.float64), np.asarray(exact, np.float64)
    if ours.shape != exact.shape:
        return check(name, False, f"shape {ours.shape}, not {exact.shape}")
    finite = np.isfinite(exact)
    same = np.array_equal(np.isfinite(ours), finite) and np.array_equal(ours[~finite], exact[~finite], equal_nan=True)
    ours, exact = (np.where(np.isfinite(a), a, 0) for a in (ours, exact))
    error, limit = np.linalg.norm(ours - exact), (roundings * u + 2.0**-18) * np.linalg.norm(exact)
    counts[group][2] = max(counts[group][2], error / limit if limit else 0)
    check(name, same and error <= limit, f"error {error:.3g}, limit {limit:.3g}, infinities {'equal' if same else 'differ'}")


def exactly(f, *arrays, upstream):
    """f's results and gradients in float64, as numpy arrays. upstream: the gradient of the result."""
    with jax.enable_x64(True):
        upstream, arrays = jax.tree.map(lambda a: jnp.asarray(np.asarray(a, np.float64)), (upstream, arrays))
        results, pull = jax.vjp(f, *arrays)
        return jax.tree.map(np.asarray, (results, pull(upstream)))


def compare(name, ours, exact, arrays, upstream, roundings=1, jit=False, like=None):
    """Values and gradients of two functions of the same arrays. upstream: the gradient of the result.

    A float32 gradient, dweight for example, may come from 16-bit numbers that were rounded before: the coarsest type counts.
    like: the type whose rounding counts in all of them.
    """
    coarsest = like or max((a.dtype.name for a in arrays), key=ROUNDING.get)
    results, pull = jax.vjp(jax.jit(ours) if jit else ours, *arrays)
    expected, gradients = exactly(exact, *arrays, upstream=upstream)
    for i, (a, b) in enumerate(zip(jax.tree.leaves(results), jax.tree.leaves(expected))):
        close(f"{name}, result {i}", a, b, like=like)
    upstream = jax.tree.map(lambda u, r: u.astype(r.dtype), upstream, results)
    for i, (a, b) in enumerate(zip(pull(upstream), gradients)):
        check(f"{name}, type of gradient {i}", a.dtype == arrays[i].dtype and a.shape == arrays[i].shape, f"{a.dtype}{a.shape}")
        close(f"{name}, gradient {i}", a, b, roundings, coarsest)


def normal(seed, *shape, dtype="float32", scale=1.0):
    return jnp.asarray((np.random.default_rng(seed).standard_normal(shape) * scale).astype(jnp.dtype(dtype)))


def integers(seed, end, *shape, dtype=np.int32):
    return np.random.default_rng(seed).integers(0, end, shape).astype(dtype)


def calls_in(f, *args):
    """The calls of lk in a compiled function: (function, inputs, outputs)."""
    text = jax.jit(f).lower(*args).compile().as_text()
    return re.findall(r'custom_call_target="lk_(\w+)".*?inputs ?= ?"([^"]*)".*?outputs ?= ?"([^"]*)"', text)


def kernels_in(f, *args):
    """What a compiled function runs: the functions of lk, and XLA's own instructions, of which a fusion is one. Both sorted."""
    bodies, lk_, others = {}, [], []
    for line in jax.jit(f).lower(*args).compile().as_text().splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.-]+) .*{$", line):
            body = bodies["ENTRY" if head[1] else head[2]] = []
        elif found := re.match(r"\s+(?:ROOT )?%?[\w.-]+ = (?:\((?:[^()]|\([^()]*\))*\)|\S+) ([a-z][\w-]*)\(", line):
            body.append((found[1], line))

    def walk(body):
        for opcode, line in body:
            if opcode == "call":  # of a part of the program: XLA makes these of what is one graph, or one loop of threads
                walk(bodies[re.search(r"to_apply=%?([\w.-]+)", line)[1]])
            elif mine := re.search(r'custom_call_target="lk_(\w+)_(?:f32|f16|bf16)"', line):
                lk_.append(mine[1])
            elif opcode not in ("parameter", "constant", "tuple", "get-tuple-element", "bitcast"):
                others.append(opcode)
    walk(bodies["ENTRY"])
    return sorted(lk_), sorted(others)


# ---- The formulas ------------------------------------------------------------------------------------------------------------


STATISTICS = ("log_sum_sq_probs", "mean_logits", "top_logprob")


def exact_entropy(logits, targets, reduction="mean", ignore_index=-100, label_smoothing=0.0, z_loss=0.0, softcap=0.0,
                  logit_scale=1.0, temperature=1.0, class_weight=None, zero_when_empty=False, denominator=None, row_weight=None):
    """(loss, {aux}) by the formulas at the top of lk/cross_entropy.cuh. A temperature divides the logits at the end."""
    vocab = logits.shape[-1]
    z = logits * (logit_scale[..., None] if jnp.ndim(logit_scale) else logit_scale)
    z = softcap * jnp.tanh(z / softcap) if softcap else z
    z = z / (temperature[..., None] if jnp.ndim(temperature) else temperature)
    w = jnp.ones(vocab) if class_weight is None else jnp.asarray(class_weight, jnp.float64)
    counted = jnp.ones(targets.shape, bool) if ignore_index is None else targets != ignore_index
    good = counted & (targets >= 0) & (targets < vocab)
    y = jnp.where(good, targets, 0)
    lse = jax.nn.logsumexp(z, -1)
    own = jnp.take_along_axis(z, y[..., None], -1)[..., 0]
    rows = (1 - label_smoothing) * w[y] * (lse - own) + label_smoothing / vocab * (w.sum() * lse - (w * z).sum(-1))
    rows = jnp.where(counted, jnp.where(good, rows, jnp.nan), 0)
    z_rows = jnp.where(counted, z_loss * lse**2, 0)
    if row_weight is not None:
        r = jnp.asarray(np.asarray(row_weight), jnp.float64)
        rows, z_rows = (jnp.where(counted, v * r, 0) for v in (rows, z_rows))
    p = jax.nn.softmax(z, -1)
    valid, weight_sum = counted.sum(), jnp.where(good, w[y], 0).sum()
    aux = {"lse": jnp.where(counted, lse, 0), "entropy": jnp.where(counted, lse - (p * z).sum(-1), 0),
           "argmax": jnp.where(counted, jnp.argmax(z, -1), -1), "valid_rows": valid, "weight_sum": weight_sum}
    logp = z - lse[..., None]
    statistics = jax.nn.logsumexp(2 * logp, -1), z.mean(-1), logp.max(-1)
    aux.update({n: jnp.where(counted, v, 0) for n, v in zip(STATISTICS, statistics)})
    if denominator is not None:
        aux["z_loss"] = z_rows.sum() / denominator
        loss = (rows + z_rows).sum() / denominator
    elif reduction == "mean":
        divisor = valid if class_weight is None else weight_sum
        empty = 0.0 if zero_when_empty else jnp.nan
        aux["z_loss"] = jnp.where(valid > 0, z_rows.sum() / jnp.maximum(valid, 1), empty)
        loss = jnp.where(divisor > 0, rows.sum() / jnp.where(divisor > 0, divisor, 1), empty) + aux["z_loss"]
    else:
        aux["z_loss"] = z_rows.sum() if reduction == "sum" else z_rows
        loss = (rows + z_rows).sum() if reduction == "sum" else rows + z_rows
    return loss, aux


def exact_ids(logits, ids, weight=None, reduction="mean", ignore_index=-100, z_loss=0.0, softcap=0.0, logit_scale=1.0,
              temperature=1.0, zero_when_empty=False, denominator=None, row_weight=None):
    """(loss, logp) by the formulas at the top of lk/cross_entropy_ids.cuh."""
    vocab, outside = logits.shape[-1], (ids < 0) | (ids >= logits.shape[-1])
    w = jnp.ones(ids.shape) if weight is None else jnp.asarray(np.asarray(weight, np.float64))
    skipped = (outside & (w == 0)) | (False if ignore_index is None else ids == ignore_index)
    bad, counted = (outside & ~skipped).any(-1), ~skipped.all(-1)
    z = (logits + jnp.where(bad, jnp.nan, 0)[..., None]) * (logit_scale[..., None] if jnp.ndim(logit_scale) else logit_scale)
    z = softcap * jnp.tanh(z / softcap) if softcap else z
    z = z / (temperature[..., None] if jnp.ndim(temperature) else temperature)
    lse = jax.nn.logsumexp(z, -1)
    logp = jnp.take_along_axis(z, jnp.where(outside, 0, ids), -1) - lse[..., None]
    logp = jnp.where(skipped & ~bad[..., None], 0, logp)
    r = 1.0 if row_weight is None else jnp.where(counted, jnp.asarray(np.asarray(row_weight, np.float64)), 0)
    rows = -r * (w * jnp.where((w == 0) & ~bad[..., None], 0, logp)).sum(-1) + r * jnp.where(counted, z_loss * lse**2, 0)
    if reduction == "none":
        return rows, logp
    divisor = 1 if reduction == "sum" else counted.sum() if denominator is None else denominator
    empty = 0.0 if zero_when_empty else jnp.nan
    return jnp.where(divisor > 0, rows.sum() / jnp.where(divisor > 0, divisor, 1), empty), logp


def exact_tail(logits, ids, weight, tail_weight, reduction, ignore_index=-100):
    """(loss, logp, tail) with a tail, of good rows that have an id; weights of 0 are ids all the same."""
    loss, logp = exact_ids(logits, ids, weight, "none", ignore_index)
    mine = ((ids[..., None] == np.arange(logits.shape[-1])) & (ids != ignore_index)[..., None]).any(-2)
    tail = jax.nn.logsumexp(jnp.where(mine, -jnp.inf, logits), -1) - jax.nn.logsumexp(logits, -1)
    tail = jnp.where((ids == ignore_index).all(-1), 0, tail)
    loss = loss - (0 if tail_weight is None else jnp.asarray(np.asarray(tail_weight, np.float64)) * tail)
    return loss if reduction == "none" else loss.sum() / (1 if reduction == "sum" else (ids != ignore_index).any(-1).sum()), logp, tail


def exact_norm(x, residual=None, weight=None, eps=1e-6, bias=0.0, weight_offset=0.0):
    s = x if residual is None else x + residual
    y = s / jnp.sqrt(jnp.mean(s * s, -1, keepdims=True) + eps)
    return (y if weight is None else y * (weight_offset + weight)) + bias, s


def exact_glu(gate, up=None, activation="silu", alpha=1.0, limit=None, up_offset=0.0, row_weight=None, interleaved=False):
    if up is None:
        gate, up = (gate[..., ::2], gate[..., 1::2]) if interleaved else jnp.split(gate, 2, -1)
    if limit is not None:
        gate, up = jnp.where(gate > limit, limit, gate), jnp.where(jnp.abs(up) > limit, jnp.sign(up) * limit, up)
    act = {"silu": lambda g: g * jax.nn.sigmoid(alpha * g), "gelu": lambda g: jax.nn.gelu(g, approximate=False),
           "gelu_tanh": lambda g: jax.nn.gelu(g, approximate=True), "relu": jax.nn.relu, "sigmoid": jax.nn.sigmoid}[activation]
    y = act(gate) * (up + up_offset)
    return y if row_weight is None else y * row_weight[..., None]


def exact_rope(q, k=None, q_weight=None, k_weight=None, inv_freq=None, position=None, cos=None, sin=None, rotary_dim=None,
               interleaved=False, heads_first=False, offset=0, scale=1.0, pair_axis=None, eps=1e-6, weight_offset=0.0):
    """y_q and y_k, or y_q."""
    wide = lambda a: jnp.asarray(np.asarray(a, np.float64))
    pairs = (rotary_dim or q.shape[-1]) // 2
    if inv_freq is not None:
        tokens = q.shape[-2 if heads_first else -3]
        at = np.arange(offset, offset + tokens) if position is None else np.asarray(position)
        at = at[np.zeros(pairs, int) if pair_axis is None else np.asarray(pair_axis)] if at.ndim == 3 else at[None]
        phi = np.moveaxis(at.astype(np.float64), 0, -1) * np.asarray(inv_freq, np.float64)
        c, s = np.cos(phi), np.sin(phi)
    else:
        cut = lambda t: t if t.shape[-1] == pairs else t[..., ::2] if interleaved else t[..., :pairs]
        c, s = (cut(np.asarray(t, np.float64)) for t in (cos, sin))
    c, s = (scale * wide(np.expand_dims(t, -3 if heads_first else -2)) for t in (c, s))
    c, s = (t.reshape(t.shape[-3:]) if q.ndim == 3 else t for t in (c, s))

    def turn(x, weight):
        if weight is not None:
            x = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + eps) * (weight_offset + weight)
        n = 2 * pairs
        a, b = (x[..., 0:n:2], x[..., 1:n:2]) if interleaved else (x[..., :pairs], x[..., pairs:n])
        both = a * c - b * s, b * c + a * s
        y = jnp.stack(both, -1).reshape(*x.shape[:-1], n) if interleaved else jnp.concatenate(both, -1)
        return jnp.concatenate([y, x[..., n:]], -1)
    return turn(q, q_weight) if k is None else (turn(q, q_weight), turn(k, k_weight))


def exact_lrpe(x, theta, shape, prefix=0, activation=None, offset=None, layout="BHTD"):
    x = x if layout == "BHTD" else jnp.swapaxes(x, -3, -2)
    act = {None: lambda v: v, "relu": jax.nn.relu, "sigmoid": jax.nn.sigmoid, "silu": jax.nn.silu,
           "softmax": functools.partial(jax.nn.softmax, axis=-1),
           "softmax_tokens": functools.partial(jax.nn.softmax, axis=-2)}[activation](x)
    e, feature = theta.shape[-1] if theta.shape[-1] > 1 else -(-x.shape[-1] // len(shape)), jnp.arange(x.shape[-1])
    theta = jnp.broadcast_to(theta, (x.shape[-3], e))
    axes = [jnp.arange(n) + first for n, first in zip(shape, offset or (0,) * len(shape))]
    position = jnp.stack(jnp.meshgrid(*axes, indexing="ij"), -1).reshape(-1, len(shape))[:, feature // e]
    phi = jnp.concatenate([jnp.zeros((theta.shape[0], prefix, x.shape[-1])), position * theta[:, None, feature % e]], 1)
    y = jnp.concatenate([act * jnp.cos(phi), act * jnp.sin(phi)], -1)
    return y if layout == "BHTD" else jnp.swapaxes(y, -3, -2)


# ---- One group per op --------------------------------------------------------------------------------------------------------


def logsumexp():
    for dtype in DTYPES:
        for shape, axis in [((7,), None), ((3, 40), -1), ((3, 40), 0), ((2, 3, 5, 4), (1, 2)), ((2, 3, 5), None), ((2, 3), ()),
                            ((3, 1000), 1), ((2, 5, 3), [1, 2])]:
            for options in ({}, {"keepdims": True}, {"scale": -0.5}, {"dtype": "float32"})[:4 if len(shape) == 4 else 1]:
                x = normal(1, *shape, dtype=dtype, scale=3)
                key = tuple(axis) if isinstance(axis, list) else axis
                exact = lambda v: jax.nn.logsumexp(options.get("scale", 1.0) * v, key, keepdims=options.get("keepdims", False))
                ours = functools.partial(lk.logsumexp, axis=axis, **options)
                up = normal(2, *ours(x).shape).astype(ours(x).dtype)
                check(f"type {dtype} {options}", ours(x).dtype == options.get("dtype", dtype))
                compare(f"{dtype} {shape} axis {axis} {options}", ours, exact, [x], up)
    check("an empty sum", bool((lk.logsumexp(jnp.zeros((2, 0)), 1) == -jnp.inf).all()))
    check("no rows", lk.logsumexp(jnp.zeros((0, 3)), 1).shape == (0,) and lk.logsumexp(jnp.zeros((3, 0)), 0).shape == (0,))
    close("-inf and inf", lk.logsumexp(jnp.array([[-jnp.inf, 1], [jnp.inf, 1], [-jnp.inf, -jnp.inf]]), 1), [1, np.inf, -np.inf])


def exact_kl(teacher, divergence="forward", beta=0.5, temperature=1.0, row_weight=None, logit_scale=1.0, teacher_scale=1.0,
             softcap=0.0, teacher_softcap=0.0, reduction="mean"):
    def log_softmax(x, scale, cap):
        z = cap * jnp.tanh(scale * x / cap) if cap else scale * x
        return jax.nn.log_softmax(z / temperature, -1)

    def f(logits):
        lp, lq = log_softmax(logits, logit_scale, softcap), log_softmax(jnp.asarray(np.asarray(teacher, np.float64)), teacher_scale,
                                                                        teacher_softcap)
        lm = jnp.logaddexp(lq + np.log(beta), lp + np.log1p(-beta))
        of = lambda a, b: (jnp.exp(a) * (a - b)).sum(-1)
        loss = {"forward": lambda: of(lq, lp), "reverse": lambda: of(lp, lq),
                "jensen_shannon": lambda: beta * of(lq, lm) + (1 - beta) * of(lp, lm),
                "total_variation": lambda: jnp.abs(jnp.exp(lq) - jnp.exp(lp)).sum(-1) / 2}[divergence]()
        loss = loss if row_weight is None else loss * np.asarray(row_weight, np.float64)
        if reduction == "mean":
            return loss.mean() if row_weight is None else loss.sum() / np.asarray(row_weight, np.float64).sum()
        return loss.sum() if reduction == "sum" else loss
    return f


def entropies(name, alone, both, exact, arrays, weight=None, roundings=1):
    """alone: the loss; both: with return_entropy. The entropy is right, and loss and gradients keep their bits. A row whose weight
    is 0 has none."""
    found = both(*arrays)
    z = exact(*(np.asarray(a, np.float64) for a in arrays))
    logp = z - np.log(np.exp(z).sum(-1, keepdims=True))
    expected = -(np.exp(logp) * logp).sum(-1)
    close(f"{name}, entropy", found[1], expected if weight is None else np.where(weight == 0, 0, expected), roundings)
    check(f"{name}, loss beside entropy", np.array_equal(found[0], alone(*arrays)))
    wanted = tuple(range(len(arrays)))
    grads = [jax.jit(jax.grad(lambda *a, f=f: f(*a).sum(), wanted))(*arrays) for f in (alone, lambda *a: both(*a)[0])]
    check(f"{name}, gradients beside entropy", all(map(np.array_equal, *grads)))
    check(f"{name}, no gradient of the entropy", not any(g.any() for g in jax.grad(lambda *a: both(*a)[1].sum(), wanted)(*arrays)))


def kl():
    weights = jnp.asarray([[0.5, 0.0, 2.0], [1.0, 1.5, 0.25]])
    for dtype in DTYPES:
        for divergence in ("forward", "reverse", "jensen_shannon", "total_variation"):
            for options in ({}, {"reduction": "none"}, {"reduction": "sum", "row_weight": weights}, {"row_weight": weights},
                            {"temperature": 2.0, "softcap": 5.0}, {"beta": 0.1, "logit_scale": 0.5, "teacher_scale": 1.5,
                                                                   "teacher_softcap": 4.0}):
                x, y = normal(1, 2, 3, 50, dtype=dtype, scale=2), normal(2, 2, 3, 50, dtype=dtype, scale=2)
                ours = functools.partial(lk.kl, teacher=y, divergence=divergence, **options)
                up = normal(3, *ours(x).shape)
                compare(f"{dtype} {divergence} {options}", ours, exact_kl(y, divergence, **options), [x], up, jit=dtype == "float32")
    for dtype, (divergence, reduction, weight) in itertools.product(DTYPES, (("forward", "mean", None), ("reverse", "none", weights),
                                                                             ("jensen_shannon", "sum", weights))):
        x, y = normal(1, 2, 3, 50, dtype=dtype, scale=2), normal(2, 2, 3, 50, dtype=dtype, scale=2)
        f = functools.partial(lk.kl, teacher=y, reduction=reduction, divergence=divergence, row_weight=weight, logit_scale=0.5)
        entropies(f"{dtype} {divergence} {reduction}", f, functools.partial(f, return_entropy=True), lambda x: 0.5 * x, [x], weight)
    both = jax.vmap(lambda x, y: lk.kl(x, y, return_entropy=True))(*(a.astype("float32") for a in (x, y)))
    check("entropy under vmap", both[0].shape == (2,) and both[1].shape == (2, 3))
    x, y = normal(4, 3, 40), normal(5, 3, 40)
    near_x = x + 1e-4 * y
    compare("where the two nearly agree", lambda x: lk.kl(x, near_x, "none"), exact_kl(near_x, reduction="none"), [x],
            jnp.ones(3), like="bfloat16")
    for name, f, error in (("teacher's shape", lambda: lk.kl(x, y[:2]), ValueError),
                           ("teacher's type", lambda: lk.kl(x, y.astype(jnp.bfloat16)), TypeError),
                           ("beta", lambda: lk.kl(x, y, beta=1.5), ValueError),
                           ("divergence", lambda: lk.kl(x, y, divergence="jsd"), ValueError),
                           ("temperature", lambda: lk.kl(x, y, temperature=0.0), ValueError),
                           ("teacher's gradient", lambda: jax.grad(lambda y: lk.kl(x, y))(y), TypeError)):
        try:
            f()
            check(f"{name}: refused", False)
        except error as found:
            check(f"{name}: a sentence", name.split("'")[0] in str(found), str(found))


def ports():
    """What other libraries' calls pass: None for off, masks, targets of uint8, the ends of beta."""
    x, y, targets = normal(1, 6, 40), normal(2, 6, 40), integers(3, 40, 6)
    h, w, th, tw = normal(4, 6, 16), normal(5, 40, 16), normal(6, 6, 24), normal(7, 40, 24)
    mask, zeros = targets % 2 == 0, jnp.zeros(6)

    def alike(name, ours, theirs, *arrays):
        """The loss and its gradients."""
        near(name, *(jax.value_and_grad(f, tuple(range(len(arrays))))(*arrays) for f in (ours, theirs)))

    heads = (("cross_entropy", (x,), lambda *a, t=targets, **more: lk.cross_entropy(*a, t, **more)),
             ("linear_cross_entropy", (h, w), lambda *a, t=targets, **more: lk.linear_cross_entropy(*a, t, **more)))
    off = dict(softcap=None, z_loss=None, label_smoothing=None, logit_scale=None, temperature=None, denominator=None)
    for name, arrays, f in heads:
        alike(f"{name}: None is off", functools.partial(f, **off), f, *arrays)
        alike(f"{name}: uint8 targets", functools.partial(f, t=targets.astype(np.uint8)), f, *arrays)
        alike(f"{name}: a mask", functools.partial(f, row_weight=mask), functools.partial(f, row_weight=mask.astype(np.float32)), *arrays)
    divergences = (("kl", (x,), lambda *a, **more: lk.kl(*a, y, **more)),
                   ("linear_kl", (h, w), lambda *a, **more: lk.linear_kl(*a, th, tw, **more)))
    for name, arrays, f in divergences:
        with_ = lambda **more: functools.partial(f, **more)
        alike(f"{name}: beta 0", with_(divergence="jensen_shannon", beta=0), f, *arrays)
        alike(f"{name}: beta 1", with_(divergence="jensen_shannon", beta=1.0), with_(divergence="reverse"), *arrays)
        alike(f"{name}: None is off", with_(softcap=None, teacher_scale=None, logit_scale=None, temperature=None), f, *arrays)
        total = lambda over: lambda *a: f(*a, reduction="sum") / over
        alike(f"{name}: batchmean", with_(reduction="batchmean"), total(6), *arrays)
        alike(f"{name}: denominator", with_(denominator=4), total(4), *arrays)
        alike(f"{name}: a traced denominator", lambda *a: jax.jit(lambda d, *a: f(*a, denominator=d))(jnp.asarray([4]), *a), total(4), *arrays)
        alike(f"{name}: a mask", with_(row_weight=mask), with_(row_weight=mask.astype(np.float32)), *arrays)
        alike(f"{name}: zero_when_empty of some", with_(row_weight=zeros + 2, zero_when_empty=True), f, *arrays)
        alike(f"{name}: zero_when_empty", with_(row_weight=zeros, zero_when_empty=True), lambda *a: 0 * f(*a), *arrays)
        check(f"{name}: a mean over nothing", bool(jnp.isnan(f(*arrays, row_weight=zeros))))
        for says, more in (("denominator", dict(reduction="sum", denominator=4)), ("beta", dict(divergence="jensen_shannon", beta=-0.5))):
            try:
                f(*arrays, **more)
                check(f"{name}, {says}: refused", False)
            except ValueError as found:
                check(f"{name}, {says}: a sentence", says in str(found), str(found))


def linear_kl():
    tokens, hidden, wide, vocab = (2, 5), 24, 16, 43
    f64 = lambda a: np.asarray(a, np.float64)
    weights = jnp.asarray([[0.5, 0.0, 2.0, 1.0, 1.0], [1.0, 1.5, 0.25, 0.0, 3.0]])
    v32, m32, b32 = normal(1, *tokens, hidden), normal(2, vocab, hidden, scale=0.3), normal(3, vocab)
    t32, n32, c32 = normal(4, *tokens, wide), normal(5, vocab, wide, scale=0.3), normal(6, vocab)
    beside = ("fast_logits", "tf32", "workspace_mib")
    for dtype in DTYPES:
        v, m, b, t, n, c = (a.astype(dtype) for a in (v32, m32, b32, t32, n32, c32))
        for divergence in ("forward", "reverse", "jensen_shannon", "total_variation"):
            for options in ({}, {"reduction": "none", "row_weight": weights}, {"reduction": "sum"}, {"row_weight": weights},
                            {"temperature": 2.0, "softcap": 5.0, "reduction": "none"}, {"beta": 0.1, "logit_scale": 0.5,
                            "teacher_scale": 1.5, "teacher_softcap": 4.0}, *({"tf32": True}, {"fast_logits": True}, {
                            "workspace_mib": 0.1})[:3 if divergence == "reverse" else 0]):
                known = {k: a for k, a in options.items() if k not in beside}
                kinds = ("plain", False), ("bias", True), ("float32 weight", False)
                for kind, biases in kinds[:3 if divergence == "forward" and not options else 1]:
                    w = m.astype("float32") if kind == "float32 weight" else m
                    more = {"teacher_bias": c} if biases else {}
                    ours = lambda v, w, b=None: lk.linear_kl(v, w, t, n, bias=b, divergence=divergence, **options, **more)
                    teacher = f64(t) @ f64(n).T + (f64(c) if biases else 0)
                    exact = lambda v, w, b=0.0: exact_kl(teacher, divergence, **known)(v @ w.T + b)
                    up = 1024 * jnp.abs(normal(7, *(tokens if options.get("reduction") == "none" else ())))
                    name = f"{dtype} {divergence} { {k: a for k, a in options.items() if k != 'row_weight'} } {kind}"
                    if "fast_logits" in options and dtype != "float32":  # half an ulp of every logit, which are below 8
                        found, expected = ours(v, w), exactly(exact, v, w, upstream=jnp.float32(1))[0]
                        check(name, abs(float(found) - float(expected)) <= 16 * ROUNDING[dtype], f"{found} {expected}")
                        continue
                    # dZ is rounded, then dx, dweight and dbias, which a late upstream gradient rounds again. TF32: like float16.
                    compare(name, ours, exact, [v, w] + [b] * biases, up, 3, jit=dtype == "float32",
                            like="float16" if "tf32" in options and dtype == "float32" else None)
    for dtype, reduction, weight in itertools.product(DTYPES, ("none", "mean"), (None, jnp.asarray([0.0, 1.5, 2.0, 0.0, 1.0]))):
        v, m, t, n = (normal(i, rows, 8, dtype=dtype) for i, rows in ((1, 5), (2, 30), (3, 5), (4, 30)))
        f = functools.partial(lk.linear_kl, teacher_x=t, teacher_weight=n, reduction=reduction, row_weight=weight)
        entropies(f"{dtype} {reduction} {'plain' if weight is None else 'weighted'}", f, functools.partial(f, return_entropy=True),
                  lambda v, m: v @ m.T, [v, m], weight)
    # Several chunks of tokens: a small workspace.
    v, m, t, n = (normal(i, rows, 8, dtype="bfloat16") for i, rows in ((1, 700), (2, 30), (3, 700), (4, 30)))
    for mib in (0.3, 0.06):
        compare(f"chunks in {mib} MiB", lambda v, m: lk.linear_kl(v, m, t, n, workspace_mib=mib), lambda v, m: exact_kl(
            f64(t) @ f64(n).T)(v @ m.T), [v, m], jnp.float32(1024), 6)
    # Where the two nearly agree, the digits are those of the logits.
    v, m, near_m = normal(1, 4, 8), normal(2, 40, 8), normal(4, 40, 8)
    near_v = v + 1e-3 * normal(3, 4, 8)
    compare("where the two nearly agree", lambda v: lk.linear_kl(v, m, near_v, m, "none"), lambda v: exact_kl(
        f64(near_v) @ f64(m).T, reduction="none")(v @ f64(m).T), [v], jnp.ones(4), like="bfloat16")
    masked = lk.linear_kl(v, m, v, m, bias=jnp.zeros(40).at[3].set(-jnp.inf), divergence="reverse")
    check("a masked column", bool(jnp.isfinite(masked)) and float(masked) > 0, masked)
    few = jnp.array([1.0, 0.0, 0.5, 0.0])
    spoiled = [jnp.where(few[:, None] == 0, jnp.nan, a) for a in (v, near_v)]  # x of the other tokens may be anything
    for most, reduction in itertools.product((2, 3), ("none", "mean")):
        ours = lambda v, w, u: lk.linear_kl(v, w, u, m, reduction, row_weight=few, max_counted=most)
        full = lambda v, w, u: lk.linear_kl(v, w, u, m, reduction, row_weight=few)
        near(f"max_counted {most}, {reduction}", ours(spoiled[0], m, spoiled[1]), full(v, m, near_v))
        grad = lambda f, *a: jax.grad(lambda *a: f(*a).sum(), (0, 1))(*a)
        near(f"max_counted {most}, {reduction}, gradient", grad(ours, spoiled[0], m, spoiled[1]), grad(full, v, m, near_v))
    found = jax.value_and_grad(lambda v: lk.linear_kl(v, m, near_v, m, "sum", row_weight=few, max_counted=1))(v)
    check("more tokens than max_counted: NaN", all(bool(jnp.isnan(a).all()) for a in found), found)
    # No tokens, frozen arrays, one program.
    total, each, mean = (lk.linear_kl(v[:0], m, v[:0], m, reduction) for reduction in ("sum", "none", "mean"))
    check("no tokens", float(total) == 0 and each.shape == (0,) and bool(jnp.isnan(mean)))
    check("gradients of no tokens", not jax.grad(lambda w: lk.linear_kl(v[:0], w, v[:0], m, "sum"))(m).any())
    of = lambda v, m, *a: lk.linear_kl(v, m, near_v, near_m, *a)
    inputs = "x weight teacher_x teacher_weight"
    for wanted, made in [(0, "dx"), (1, "dweight"), ((0, 1), "dx dweight")]:
        calls = calls_in(jax.grad(of, wanted), v, m)
        check(f"only the gradient of {made}", calls == [("linear_kl_forward_backward_f32", f"{inputs} upstream",
                                                         f"loss {made} workspace")], calls)
    calls = calls_in(jax.grad(lambda *a: of(*a, "none").sum()), v, m)
    check("a gradient alone of a loss per token", calls == [("linear_kl_backward_f32", f"{inputs} upstream", "dx workspace")],
          calls)
    made = programs(lambda i: jax.grad(lambda v: lk.linear_kl(v, m, near_v, m, row_weight=jnp.full(4, i)))(v), range(1, 6))
    check("a new row_weight is no new program", made == 0, f"{made} programs for 3 values")
    grad = lambda name: jax.grad(lambda a: lk.linear_kl(**{**dict(x=v, weight=m, teacher_x=near_v, teacher_weight=m), name: a}))
    for expected, f, error in (
            ("weight has the shape (40, 7); it must have (40, 8)", lambda: lk.linear_kl(v, m[:, :7], v, m), ValueError),
            ("teacher_x has the shape (3, 8); it must have (4, 8)", lambda: lk.linear_kl(v, m, v[:3], m), ValueError),
            ("teacher_weight has the shape (39, 8); it must have (40, 8)", lambda: lk.linear_kl(v, m, v, m[1:]), ValueError),
            ("teacher_x is float16; it must be float32, as x is", lambda: lk.linear_kl(v, m, v.astype("float16"), m), TypeError),
            ("bias has the shape (8,); it must have (40,)", lambda: lk.linear_kl(v, m, v, m, bias=m[0]), ValueError),
            ("teacher_bias is bfloat16; it must be float32", lambda: lk.linear_kl(
                v, m, v, m, teacher_bias=m[:, 0].astype("bfloat16")), TypeError),
            ("max_counted needs row_weight", lambda: lk.linear_kl(v, m, v, m, max_counted=2), ValueError),
            ("max_counted is 0; it must be 1 or more", lambda: lk.linear_kl(v, m, v, m, row_weight=few, max_counted=0), ValueError),
            ("row_weight has the shape (3,); it must have (4,)", lambda: lk.linear_kl(v, m, v, m, row_weight=np.ones(3)),
             ValueError),
            ("beta is 1.5", lambda: lk.linear_kl(v, m, v, m, beta=1.5), ValueError),
            ("divergence is 'jsd'", lambda: lk.linear_kl(v, m, v, m, divergence="jsd"), ValueError),
            ("reduction is 'max'", lambda: lk.linear_kl(v, m, v, m, "max"), ValueError),
            ("softcap is -1", lambda: lk.linear_kl(v, m, v, m, softcap=-1.0), ValueError),
            ("temperature is traced", lambda: jax.jit(lambda s: lk.linear_kl(v, m, v, m, temperature=s))(2.0), TypeError),
            ("workspace_mib is 9.53674e-07; linear_", lambda: lk.linear_kl(v, m, v, m, workspace_mib=1e-6), ValueError),
            *((f"{name} would need a gradient", lambda name=name, a=a: grad(name)(a), TypeError) for name, a in (
                ("teacher_x", v), ("teacher_weight", m), ("teacher_bias", m[:, 0]), ("row_weight", jnp.ones(4))))):
        try:
            f()
            check(expected, False, "no error")
        except (TypeError, ValueError) as found:
            check(expected, type(found) is error and expected in str(found), f"a {type(found).__name__}: {found}")


def with_aux(result):
    loss, aux = result
    return loss, aux["lse"], aux["entropy"]


def entropy_options(vocab):
    weight = np.abs(normal(5, vocab)) + 0.1
    return [{}, {"ignore_index": None}, {"ignore_index": 3}, {"label_smoothing": 0.1}, {"z_loss": 0.01}, {"softcap": 5.0},
            {"logit_scale": 0.5}, {"class_weight": weight}, {"class_weight": weight, "label_smoothing": 0.2, "z_loss": 0.01},
            dict(label_smoothing=0.1, z_loss=0.01, softcap=8.0, logit_scale=1.5, class_weight=weight, ignore_index=1)]


def cross_entropy():
    known = ("lse", "z_loss", "entropy", "argmax", "valid_rows", "weight_sum", *STATISTICS)
    for dtype in DTYPES:
        for shape, vocab in [((2, 5), 50), ((3,), 1000), ((), 9)]:
            for options in entropy_options(vocab)[:None if vocab == 50 else 2]:
                targets = integers(3, vocab, *shape)
                if shape and options.get("ignore_index", -100) is not None:
                    targets[(0,) * len(shape)] = options.get("ignore_index", -100)
                for reduction in ("mean", "none", "sum")[:3 if dtype == "float32" else 2]:
                    full = dict(options, reduction=reduction)
                    x = normal(4, *shape, vocab, dtype=dtype, scale=2)
                    ours = lambda v: lk.cross_entropy(v, targets, **full)
                    exact = lambda v: exact_entropy(v, targets, **full)[0]
                    # A large upstream gradient: with it float16 has no gradients below its smallest numbers.
                    up = 4096 * jnp.abs(normal(6, *(shape if reduction == "none" else ())))
                    name = f"{dtype} {shape} {vocab} { {k: v for k, v in full.items() if k != 'class_weight'} }"
                    compare(name, ours, exact, [x], up, 2, jit=reduction == "sum")
                    if dtype == "bfloat16" and vocab == 50:
                        in_place = lambda v: lk.cross_entropy(v, targets, **full, in_place=True)
                        compare(f"{name} in place", in_place, exact, [x], up, 2)
                    # The same with all other results, and a gradient of lse.
                    loss, aux = lk.cross_entropy(x, targets, **full, aux=known)
                    with jax.enable_x64(True):
                        expected = exact_entropy(jnp.asarray(np.asarray(x, np.float64)), targets, **full)[1]
                    for n in ("lse", "z_loss", "entropy", "weight_sum", *STATISTICS):
                        close(f"{name} {n}", aux[n], expected[n], 2)
                    check(f"{name} valid_rows", int(aux["valid_rows"]) == int(expected["valid_rows"]))
                    if dtype != "bfloat16" and "softcap" not in full:  # others have equal logits
                        check(f"{name} argmax", np.array_equal(aux["argmax"], expected["argmax"]))
                    if vocab == 50 and reduction != "sum":
                        ours = lambda v: with_aux(lk.cross_entropy(v, targets, **full, aux=("entropy", "lse")))
                        exact = lambda v: with_aux(exact_entropy(v, targets, **full))
                        ups = up, 512 * normal(7, *shape), 512 * normal(9, *shape)
                        compare(f"{name} with lse and entropy", ours, exact, [x], ups, 2)
                        for i, only in ((1, "lse"), (2, "entropy")):
                            if not options:
                                compare(f"{name} {only} alone", lambda v: ours(v)[i], lambda v: exact(v)[i], [x], ups[i], 2)
                                alone = lambda v: lk.cross_entropy(v, targets, **full, aux=(only,))[1][only]
                                compare(f"{name} aux={only}", alone, lambda v: exact(v)[i], [x], ups[i], 2)
                    if vocab == 50:
                        r = np.array(normal(8, *shape))
                        if options.get("ignore_index", -100) is not None:
                            r[targets == options.get("ignore_index", -100)] = np.nan  # it is not used
                        ours = lambda v: lk.cross_entropy(v, targets, **full, row_weight=r)
                        exact = lambda v: exact_entropy(v, targets, **full, row_weight=r)[0]
                        compare(f"{name} row_weight", ours, exact, [x], up, 2)
                    if vocab == 50 and reduction == "mean":
                        for d in (7, 2.5, jnp.float32(3), jnp.array([3.0])):
                            ours = lambda v: lk.cross_entropy(v, targets, **full, denominator=d)
                            exact = lambda v: exact_entropy(v, targets, **full, denominator=float(jnp.reshape(d, ())))[0]
                            compare(f"{name} denominator {d}", ours, exact, [x], up, 2)
    x, ignored = normal(4, 3, 8), jnp.full(3, -100)
    check("mean over nothing", bool(jnp.isnan(lk.cross_entropy(x, ignored))))
    check("zero_when_empty", float(lk.cross_entropy(x, ignored, zero_when_empty=True)) == 0)
    check("its gradient", not jax.grad(lambda v: lk.cross_entropy(v, ignored, zero_when_empty=True))(x).any())
    bad = jnp.array([1, 8, 2])
    check("a bad target", np.array_equal(np.isnan(lk.cross_entropy(x, bad, reduction="none")), [False, True, False]))
    check("of no rows", lk.cross_entropy(jnp.zeros((0, 4)), jnp.zeros(0, jnp.int32), reduction="none").shape == (0,))
    x, t = normal(4, 4, 8), jnp.arange(4)
    plain = "logits target"
    calls = calls_in(jax.value_and_grad(lk.cross_entropy), x, t)
    check("one call for loss and gradient", calls == [("cross_entropy_forward_backward_f32", plain, "loss dlogits workspace")],
          calls)
    text = jax.jit(jax.grad(lambda v: lk.cross_entropy(v + 1, t, in_place=True))).lower(x).compile().as_text()
    check("in place", "output_to_operand_aliasing={{1}: (0, {})}" in text, text)
    text = jax.jit(jax.grad(lk.cross_entropy)).lower(x.astype(jnp.bfloat16), t).compile().as_text()
    check("an upstream gradient of 1 costs nothing", "multiply" not in text, text)
    check("float16 has the upstream gradient before it rounds",
          [c[0] for c in calls_in(jax.grad(lk.cross_entropy), x.astype(jnp.float16), t)] ==
          ["cross_entropy_forward_f16", "cross_entropy_backward_f16"])
    check("a loss alone has no other results", calls_in(lambda v, t: lk.cross_entropy(v, t, reduction="none"), x, t) ==
          [("cross_entropy_forward_f32", plain, "loss")])


def with_grad():
    """The loss and the gradient as results, of narrower types too."""
    half = {"float8_e5m2": 2.0**-3, "bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-20}
    least = {"float8_e5m2": 2.0**-17, "bfloat16": 1e-30, "float16": 2.0**-25, "float32": 1e-30}
    for i, (dtype, reduction, shape) in enumerate(itertools.product(DTYPES, ("none", "mean", "sum"), ((5, 24), (2, 3, 37)))):
        x, targets = normal(i, *shape, dtype=dtype), integers(i + 1, shape[-1], *shape[:-1])
        options = [{}, dict(z_loss=0.01), dict(softcap=8.0, logit_scale=1.5), dict(label_smoothing=0.1)][i % 4]
        scale = [None, 512.0, jnp.float32(0.25)][i % 3]
        wide = x.astype(jnp.float32)
        loss, pull = jax.vjp(lambda a: lk.cross_entropy(a, targets, reduction=reduction, **options), wide)
        dx, = pull(jnp.full(loss.shape, 1.0 if scale is None else scale, jnp.float32))
        for narrow in (None, jnp.float8_e5m2, *((jnp.float16, jnp.bfloat16) if dtype == "float32" else ())):
            to = jnp.dtype(narrow or dtype).name
            f = lambda a: lk.cross_entropy_with_grad(a, targets, reduction=reduction, grad_scale=scale, dlogits_dtype=narrow,
                                                     **options)
            found, d = (jax.jit(f) if i % 2 else f)(x)
            right, got = np.asarray(dx, np.float64), np.asarray(d.astype(jnp.float32), np.float64)
            error = np.abs(got - right)
            bound = np.abs(right) * half[to] * (1 + 1e-4) + least[to] + 1e-6 * (1 + np.abs(right).max())
            check(f"with_grad {dtype} {reduction} -> {to}", d.dtype.name == to and d.shape == x.shape and (error <= bound).all() and
                  np.allclose(found, loss, rtol=1e-5, atol=1e-5))
    x, targets = normal(1, 3, 24), integers(2, 24, 3)
    each = lambda a: lk.cross_entropy_with_grad(a, targets, dlogits_dtype=jnp.float8_e5m2)[1].astype(jnp.float32)
    both = jnp.stack([x, -x])
    check("with_grad: vmap", np.array_equal(jax.vmap(each)(both), jnp.stack([each(a) for a in both])))
    for name, f, kind in (("a type", lambda: lk.cross_entropy_with_grad(x, targets, dlogits_dtype=jnp.float8_e4m3fn), ValueError),
                          ("16 of 16 bits", lambda: lk.cross_entropy_with_grad(x.astype(jnp.bfloat16), targets,
                                                                               dlogits_dtype=jnp.float16), ValueError),
                          ("a traced scale", lambda: jax.jit(lambda s: lk.cross_entropy_with_grad(x, targets, logit_scale=s))(0.5),
                           TypeError)):
        try:
            f()
            check(f"with_grad refuses {name}", False)
        except kind as error:
            check(f"with_grad refuses {name}", "dlogits_dtype" in str(error) or "logit_scale" in str(error), str(error))


def ids_case(seed, vocab, n, *shape, ignore_index=-100):
    """ids and weights: a fifth of the ids is ignored, all of the first row; weights of 0 skip numbers that are no ids."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, vocab, (*shape, n)).astype(np.int32)
    skip, weight = rng.random(ids.shape), np.abs(rng.standard_normal(ids.shape)) + 0.1
    if ignore_index is not None:
        ids[skip < 0.2] = ignore_index
        if shape:
            ids[(0,) * len(shape)] = ignore_index
    zeros = (skip > 0.8) if n > 1 else np.zeros(ids.shape, bool)
    ids[zeros & (skip > 0.9)] = 2**31 - 1
    return ids, np.where(zeros, 0, weight).astype(np.float32)


def cross_entropy_ids():
    options_of = [{}, {"ignore_index": None}, {"ignore_index": 3}, {"z_loss": 0.01}, {"softcap": 5.0}, {"logit_scale": 0.5},
                  {"temperature": 0.7}, dict(z_loss=0.01, softcap=8.0, logit_scale=1.5, temperature=2.0, ignore_index=1)]
    at = lambda f, i: lambda *a: f(*a)[i]
    for dtype in DTYPES:
        for shape, vocab, n in [((2, 5), 50, 5), ((3,), 1031, 64), ((4,), 8, 128), ((), 9, 1)]:
            for options in options_of[:None if vocab == 50 else 1]:
                ids, weight = ids_case(3, vocab, n, *shape, ignore_index=options.get("ignore_index", -100))
                x = normal(4, *shape, vocab, dtype=dtype, scale=2)
                for reduction in ("mean", "none", "sum")[:3 if dtype == "float32" else 2]:
                    full = dict(options, reduction=reduction)
                    # Large upstream gradients: with them float16 has no gradients below its smallest numbers.
                    ups = 4096 / n * jnp.abs(normal(6, *(shape if reduction == "none" else ()))), 512 * normal(7, *shape, n)
                    plain = np.where(weight == 0, 2, ids)
                    for what, i, w in (("weights", ids, weight), ("no weights", plain, None))[:1 if options else 2]:
                        ours = lambda v: tuple(lk.cross_entropy_ids(v, i, w, **full))
                        exact = lambda v: exact_ids(v, i, w, **full)
                        name = f"{dtype} {shape} {vocab} n={n} {full} {what}"
                        compare(name, ours, exact, [x], ups, 2, jit=reduction == "sum")
                        for k, only in enumerate(("loss", "logp") if not options else ()):
                            compare(f"{name} {only} alone", at(ours, k), at(exact, k), [x], ups[k], 2)
                    if vocab != 50:
                        continue
                    r = np.array(normal(8, *shape))
                    if full.get("ignore_index", -100) is not None:
                        r[(0,) * len(shape)] = np.nan  # the row is ignored
                    compare(f"{name} row_weight", lambda v: tuple(lk.cross_entropy_ids(v, ids, weight, **full, row_weight=r)),
                            lambda v: exact_ids(v, ids, weight, **full, row_weight=r), [x], ups, 2)
                    for d in (7, jnp.array([2.5])) if reduction == "mean" and len(options) < 2 else ():
                        ours = lambda v: tuple(lk.cross_entropy_ids(v, ids, weight, **full, denominator=d))
                        exact = lambda v: exact_ids(v, ids, weight, **full, denominator=float(jnp.reshape(d, ())))
                        compare(f"{name} denominator {d}", ours, exact, [x], ups, 2)
        # Special rows: repeated ids, weights of either sign, -inf at ids and elsewhere, bad ids, ids that are skipped.
        x = normal(5, 6, 20, dtype=dtype, scale=2).at[1:3, 4].set(-jnp.inf).at[1, 9].set(-jnp.inf).at[2, 5].set(-jnp.inf)
        ids = np.array([[3, 3, 3, 7], [4, 1, 4, 6], [4, 5, 5, 4], [20, 2, 3, 4], [-1, 2, -100, 99], [-100] * 4], np.int32)
        for what, w in (("no weights", None), ("weights of 1", np.ones((6, 4))), ("weights", np.array(
                [[1, -2, 0.5, 1], [0, 1, 0, 2], [0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 0], [1, 1, 1, 1]]))):
            for reduction, up in (("none", jnp.float32([64, 128, 256, 32, 64, 99])), ("mean", jnp.float32(512))):
                ours = lambda v: tuple(lk.cross_entropy_ids(v, ids, w, reduction=reduction))
                exact = lambda v: exact_ids(v, ids, w, reduction=reduction)
                compare(f"{dtype} special rows, {what}, {reduction}", ours, exact, [x], (up, 64 * normal(6, 6, 4)), 2)
        out = lk.cross_entropy_ids(x, ids, w, reduction="none")
        check(f"{dtype} bad ids", np.array_equal(jnp.isnan(out.loss), [0, 0, 0, 1, 0, 0]) and bool(jnp.isnan(out.logp[3]).all()))
        skipped = np.array(out.logp)[4:] == 0
        check(f"{dtype} skipped ids", np.array_equal(skipped, [[True, False, True, True], [True] * 4]), skipped)
        check(f"{dtype} types", type(out) is lk.CrossEntropyIdsOutput and out.loss.dtype == out.logp.dtype == jnp.float32)
        # The tail.
        for (shape, vocab, n), reduction in itertools.product((((2, 5), 50, 5), ((3,), 1031, 64)), ("mean", "none", "sum")):
            ids, weight = ids_case(3, vocab, n, *shape)
            ids = np.where(ids == 2**31 - 1, 2, ids)
            x, q = normal(4, *shape, vocab, dtype=dtype, scale=2), np.abs(np.array(normal(9, *shape)))
            ups = (512 * jnp.abs(normal(6, *(shape if reduction == "none" else ()))), 512 * normal(7, *shape, n), 512 * normal(8, *shape))
            for k, w in ((0, q), (1, None)):
                ours = lambda v: tuple(lk.cross_entropy_ids(v, ids, weight, reduction=reduction, tail_weight=w, tail=True))
                exact = lambda v: exact_tail(v, ids, weight, w, reduction)
                compare(f"{dtype} {shape} {vocab} n={n} {reduction} tail {k}", ours, exact, [x], ups, 4, jit=reduction == "sum")
                compare(f"{dtype} {shape} {vocab} n={n} {reduction} tail {k} alone", at(ours, 2), at(exact, 2), [x], ups[2], 4)
    sure = normal(1, 3, 30).at[:, :2].add(jnp.array([40.0, 200.0]))
    compare("a tail far below", lambda v: lk.cross_entropy_ids(v, np.array([[0, 1]] * 3), tail=True).tail,
            lambda v: exact_tail(v, np.array([[0, 1]] * 3), None, None, "none")[2], [sure], normal(2, 3), 8)
    # A loss of logp whose weights depend on the logits: the reverse divergence over a teacher's ids.
    x, ids, teacher = normal(1, 5, 30), integers(2, 30, 5, 8), jax.nn.log_softmax(normal(3, 5, 8))
    divergence = lambda logp: (jnp.exp(logp) * (logp - jnp.asarray(teacher, logp.dtype))).sum(-1)
    compare("a loss of logp", lambda v: divergence(lk.cross_entropy_ids(v, ids).logp), lambda v: divergence(exact_ids(v, ids)[1]),
            [x], normal(4, 5), 4, jit=True)
    one = lambda v: lk.cross_entropy_ids(v, ids[:, :1], reduction="none").loss
    same = lambda v: lk.cross_entropy(v, ids[:, 0], reduction="none")
    equal("one id has the bits of cross_entropy", *(jax.vjp(f, x)[0] for f in (one, same)))
    equal("and its gradient", *(jax.vjp(f, x)[1](teacher[:, 0]) for f in (one, same)))
    empty = jnp.full((3, 2), -100)
    check("mean over nothing", bool(jnp.isnan(lk.cross_entropy_ids(x[:3], empty).loss)))
    check("zero_when_empty", float(lk.cross_entropy_ids(x[:3], empty, zero_when_empty=True).loss) == 0)
    check("its gradient", not jax.grad(lambda v: lk.cross_entropy_ids(v, empty, zero_when_empty=True).loss)(x[:3]).any())
    none = lambda v: lk.cross_entropy_ids(v, jnp.zeros((0, 3), jnp.int32), reduction="none")
    check("of no rows", [a.shape for a in (*none(x[:0]), jax.grad(lambda v: none(v).logp.sum())(x[:0]))] == [(0,), (0, 3), (0, 30)])
    check("row_weight beside a gradient of logp alone", bool(jnp.isfinite(jax.grad(lambda v: lk.cross_entropy_ids(
        v, ids, row_weight=jnp.full(5, jnp.nan)).logp.sum())(x)).all()))
    # The calls: what is not used is not there.
    w = jnp.ones(ids.shape)
    forward, back = ("cross_entropy_ids_forward_f32", "logits target_ids", "loss logp workspace"), "cross_entropy_ids_backward_f32"
    calls = calls_in(lk.cross_entropy_ids, x, ids)
    check("a call without options", calls == [forward], calls)
    calls = calls_in(lambda *a: lk.cross_entropy_ids(*a, reduction="none", row_weight=teacher[:, 0]), x, ids, w)
    check("a call with weights", calls == [(forward[0], "logits target_ids target_weight row_weight", forward[2])], calls)
    for only, i, upstream in (("loss", 0, "upstream"), ("logp", 1, "dlogp")):
        calls = calls_in(jax.grad(lambda v: at(lk.cross_entropy_ids, i)(v, ids).sum()), x)
        check(f"a gradient of {only} alone", calls == [
            (forward[0], forward[1], "loss lse valid_rows logp lse_low workspace"),
            (back, f"logits target_ids lse lse_low valid_rows {upstream}", "dlogits workspace")], calls)


def statistics():
    """Beside a gradient, alone, with entropy and without, and under vmap, whose rows are behind the kind of result."""
    hidden, vocab = 24, 70
    x, m, t = normal(7, 3, 2, 5, hidden), normal(8, vocab, hidden, scale=0.3), jnp.asarray(integers(3, vocab, 30)).reshape(3, 2, 5)
    functions = {"cross_entropy": lambda v, i, **more: lk.cross_entropy(v @ m.T, i, **more),
                 "linear_cross_entropy": lambda v, i, **more: lk.linear_cross_entropy(v, m, i, **more)}
    for name, f in functions.items():
        for reduction, aux in (("none", STATISTICS), ("mean", ("mean_logits", "entropy")), ("sum", ("top_logprob",))):
            one = lambda v, i: f(v, i, reduction=reduction, aux=aux)
            plain = lambda v, i: f(v, i, reduction=reduction, aux=tuple(n for n in aux if n == "entropy") or ("lse",))
            loss, found = one(x, t)
            check(f"{name} {reduction} {aux}: names", tuple(found) == aux, tuple(found))
            with jax.enable_x64(True):
                z = np.asarray(x, np.float64) @ np.asarray(m, np.float64).T
                expected = exact_entropy(z, np.asarray(t), reduction=reduction)[1]
            for n in aux:
                close(f"{name} {reduction} {n}", found[n], expected[n], 2)
            total = lambda f: jax.jit(jax.grad(lambda v: f(v, t)[0].sum()))(x)
            near(f"{name} {reduction} {aux}: gradient", total(one), total(plain))
            rows = jax.jit(jax.vmap(one))(x, t)
            twice = jax.vmap(jax.vmap(one))(x, t)
            for n in aux:
                near(f"{name} {reduction} {n} vmap", rows[1][n], found[n])
                near(f"{name} {reduction} {n} vmap of vmap", twice[1][n], found[n])


def linear_cross_entropy():
    tokens, hidden, vocab = 11, 24, 40
    weights, bias = normal(8, vocab, hidden, scale=0.3), normal(9, vocab)
    more = [{"max_counted": 10}, {"fast_logits": True}, {"tf32": True}, {"workspace_mib": 1}]
    for dtype in DTYPES:
        x = normal(7, tokens, hidden, dtype=dtype)
        for options in entropy_options(vocab) + more:
            targets = integers(3, vocab, tokens)
            if options.get("ignore_index", -100) is not None:
                targets[2] = options.get("ignore_index", -100)
            for reduction in ("mean", "none") if options else ("mean", "sum", "none"):
                types = [(dtype, None), (dtype, dtype), ("float32", "float32")]
                for weight_type, bias_type in types[:1 if options else 3]:
                    full = dict(options, reduction=reduction)
                    known = {k: v for k, v in full.items() if k not in more[0] | more[1] | more[2] | more[3]}
                    arrays = [x, weights.astype(dtype).astype(weight_type)] + ([bias.astype(bias_type)] if bias_type else [])
                    up = 4096 * jnp.abs(normal(6, *((tokens,) if reduction == "none" else ())))
                    ours = lambda v, m, b=None: lk.linear_cross_entropy(v, m, targets, bias=b, **full)
                    exact = lambda v, m, b=0.0: exact_entropy(v @ m.T + b, targets, **known)[0]
                    name = f"{dtype} {weight_type} {bias_type} { {k: v for k, v in full.items() if k != 'class_weight'} }"
                    if "fast_logits" in full and dtype != "float32":  # half an ulp of every logit, which are below 8
                        with_error = jax.vjp(lambda v: ours(v, arrays[1]), x)[0]
                        reference = exactly(lambda v: exact(v, np.asarray(arrays[1], np.float64)), x, upstream=up)[0]
                        check(name, bool((jnp.abs(with_error - reference) <= 16 * ROUNDING[dtype]).all()))
                    else:
                        # dZ is rounded to T, and dx or dweight once more; both again by a late upstream gradient.
                        like = "float16" if "tf32" in full and dtype == "float32" else None  # TF32 has as many digits
                        compare(name, ours, exact, arrays, up, 3, jit=reduction == "sum", like=like)
    x, m, t = normal(7, 2, 3, hidden), weights, jnp.asarray(targets[:6]).reshape(2, 3)
    known = ("lse", "z_loss", "entropy", "argmax", "valid_rows", "weight_sum", *STATISTICS)
    loss, aux = lk.linear_cross_entropy(x, m, t, z_loss=0.01, aux=known)
    with jax.enable_x64(True):
        expected = exact_entropy(np.asarray(x, np.float64) @ np.asarray(m, np.float64).T, np.asarray(t), z_loss=0.01)[1]
    for n in known:
        close(f"aux {n}", aux[n].astype(jnp.float32), expected[n], 2)
    statistics()
    for dtype in DTYPES:
        arrays = [x.astype(dtype), m.astype(dtype)]
        for options in ({}, {"softcap": 5.0}, {"label_smoothing": 0.1, "logit_scale": 0.5}):
            ours = lambda v, m: with_aux(lk.linear_cross_entropy(v, m, t, **options, aux=("lse", "entropy")))
            exact = lambda v, m: with_aux(exact_entropy(v @ m.T, np.asarray(t), **options))
            ups = 512 * jnp.float32(3), 512 * normal(1, 2, 3), 512 * normal(2, 2, 3)
            compare(f"{dtype} {options} with lse and entropy", ours, exact, arrays, ups, 3)
            if not options:
                for i in (1, 2):
                    compare(f"{dtype} aux {i} alone", lambda *a: ours(*a)[i], lambda *a: exact(*a)[i], arrays, ups[i], 3)
                    rows = lambda v, m: with_aux(lk.linear_cross_entropy(v, m, t, reduction="none", aux=("lse", "entropy")))
                    compare(f"{dtype} aux {i} alone, none", lambda *a: rows(*a)[i], lambda *a: exact(*a)[i], arrays, ups[i], 3)
            ours = lambda v, m: lk.linear_cross_entropy(v, m, t, **options, denominator=jnp.float32(11))
            exact = lambda v, m: exact_entropy(v @ m.T, np.asarray(t), **options, denominator=11.0)[0]
            compare(f"{dtype} {options} denominator", ours, exact, arrays, 4096 * jnp.float32(1), 3)
            for reduction in ("none", "mean", "sum"):
                full, r = dict(options, reduction=reduction, z_loss=0.01), normal(3, 2, 3)
                ours = lambda v, m: lk.linear_cross_entropy(v, m, t, **full, row_weight=r)
                exact = lambda v, m: exact_entropy(v @ m.T, np.asarray(t), **full, row_weight=r)[0]
                up = 512 * jnp.ones((2, 3) if reduction == "none" else ())
                compare(f"{dtype} {full} row_weight", ours, exact, arrays, up, 3)
    if jax.default_backend() == "cpu" or jax.devices()[0].compute_capability == "9.0":
        v, n, k = normal(1, 300, 64, dtype="bfloat16"), normal(2, 3000, 64, dtype="bfloat16", scale=0.3), integers(3, 3000, 300)
        options = dict(reduction="none", batch_invariant=True, aux=known)
        all_ = lk.linear_cross_entropy(v, n, k, **options)
        for first, end in ((0, 1), (5, 6), (131, 259), (40, 300)):
            some = lk.linear_cross_entropy(v[first:end], n, k[first:end], **options)
            same = [np.array_equal(some[0], all_[0][first:end])]
            same += [np.array_equal(some[1][i], all_[1][i][first:end]) for i in ("lse", "entropy", "argmax", *STATISTICS)]
            check(f"batch_invariant: tokens {first} to {end}", all(same), same)
        ours = lambda v, n: lk.linear_cross_entropy(v, n, k, batch_invariant=True)
        compare("batch_invariant", ours, lambda v, n: exact_entropy(v @ n.T, k)[0], [v, n], 4096 * jnp.float32(1), 3)
    name = "linear_cross_entropy_forward_backward_f32"
    for wanted, made in [(0, "dx"), (1, "dweight"), ((0, 1), "dx dweight")]:
        calls = calls_in(jax.grad(lambda v, m: lk.linear_cross_entropy(v, m, t), wanted), x, m)
        check(f"only the gradient of {made}", calls == [(name, "x weight target", f"loss {made} workspace")], calls)


def supports(seed, tokens, vocab, most, kind=np.int32):
    """Ids of 1 to `most` columns for each token, all of them different; offsets; targets among them."""
    draw = np.random.default_rng(seed)
    each = [draw.permutation(vocab)[:draw.integers(1, most + 1)] for _ in range(tokens)]
    offsets = np.cumsum([0, *map(len, each)]).astype(kind)
    return np.concatenate(each).astype(kind), offsets, np.array([draw.choice(mine) for mine in each], kind)


def exact_support(logits, ids, offsets, targets=None, teacher_logp=None, *, ignore_index=-100, softcap=0.0, logit_scale=1.0,
                  temperature=1.0):
    """support by JAX, token by token: the results that there are. All of a bad token is NaN, its gradient at all columns too."""
    shape, vocab, ids = logits.shape[:-1], logits.shape[-1], np.asarray(ids)
    z = logit_scale * logits
    z = (softcap * jnp.tanh(z / softcap) if softcap else z) / temperature
    found, each = [], jnp.zeros(len(ids), z.dtype)
    for t, row in enumerate(z.reshape(math.prod(shape), vocab)):
        mine, y = slice(offsets[t], offsets[t + 1]), None if targets is None else np.ravel(targets)[t]
        own, kl = ids[mine], 0.0
        if y is not None and y == ignore_index:
            found.append(jnp.zeros(4, z.dtype))
            continue
        if not len(own) or own.min() < 0 or own.max() >= vocab or (y is not None and y not in own):
            found.append(jnp.full(4, np.nan) * row.sum())
            each = each.at[mine].set(np.nan * row.sum())
            continue
        lse = jax.nn.logsumexp(row[own])
        logp = row[own] - lse
        if teacher_logp is not None:
            q, log_q = np.exp(np.float64(teacher_logp[mine])), np.float64(teacher_logp[mine])
            kl = (q * (np.where(q > 0, log_q, 0.0) - logp)).sum()
        entropy = -(jnp.exp(logp) * jnp.where(logp == -np.inf, 0.0, logp)).sum()
        found.append(jnp.stack([0.0 if y is None else logp[list(own).index(y)], lse, entropy, kl]))
        each = each.at[mine].set(logp)
    logp, lse, entropy, kl = (a.reshape(shape) for a in jnp.stack(found, 1))
    return *(() if targets is None else (logp,)), lse, entropy, *(() if teacher_logp is None else (kl,)), each


def exact_linear_support(x, m, b, *args, **options):
    return exact_support(x @ m.T + (0.0 if b is None else b), *args, **options)


def some_results(out):
    return tuple(a for a in out if a is not None)


def teacher_of(ids):
    """A teacher's log-probabilities; where one is -inf there is no q."""
    return np.where(np.arange(len(ids)) % 5 == 2, -np.inf, np.array(normal(3, len(ids))) - 1).astype(np.float32)


SUPPORT_OPTIONS = ({}, {"softcap": 5.0}, dict(softcap=8.0, logit_scale=1.5, temperature=2.0), {"ignore_index": 3},
                   {"temperature": 0.7})


def support():
    vocab = 43
    for dtype, (k, options), shape in itertools.product(DTYPES, enumerate(SUPPORT_OPTIONS), ((2, 3), (5,), ())):
        if len(shape) != k % 3 and (dtype != "float32" or len(shape) != 2):  # each once
            continue
        tokens = math.prod(shape)
        ids, offsets, targets = supports(k, tokens, vocab, (3, 12, 43, 12, 40)[k])
        targets = targets.reshape(shape)
        if "ignore_index" in options and tokens > 2:
            targets.ravel()[2] = 3
        teacher, rest = teacher_of(ids), {n: o for n, o in options.items() if n != "ignore_index"}
        x = normal(4, *shape, vocab, dtype=dtype, scale=2)
        ups = [64 * normal(20 + i, *(shape if i < 4 else (len(ids),))) for i in range(5)]
        name = f"{dtype} {shape} {options}"
        compare(name, lambda v: some_results(lk.support(v, ids, offsets, targets, teacher_logp=teacher, **options)),
                lambda v: exact_support(v, ids, offsets, targets, teacher, **options), [x], tuple(ups))
        compare(f"{name} no targets, no teacher", lambda v: some_results(lk.support(v, ids, offsets, **rest)),
                lambda v: exact_support(v, ids, offsets, **rest), [x], (ups[1], ups[2], ups[4]), jit=True)
        for i, field in enumerate(lk.SupportOutput._fields if dtype == "float32" and k < 4 else ()):
            compare(f"{name} {field} alone", lambda v: lk.support(v, ids, offsets, targets, teacher_logp=teacher, **options)[i],
                    lambda v: exact_support(v, ids, offsets, targets, teacher, **options)[i], [x], ups[i])
    # Ids that come twice in a support; bad ids, a target that is none of the ids, ignored tokens, no ids; entries of no token.
    ids = np.array([-1, -2, 7, 1, 7, 7, vocab, 3, 3, 9, -3, 5, 38, 5, 5, 1, 20, 99])
    offsets = np.array([2, 6, 7, 10, 11, 13, 13, 16, 17])
    targets = np.array([7, vocab, 3, -3, 9, 1, 5, -2])
    for dtype in DTYPES:
        x = normal(4, 8, vocab, dtype=dtype).at[2, 9].set(-jnp.inf)
        ups = tuple(64 * normal(20 + i, *((8,) if i < 4 else (len(ids),))) for i in range(5))
        ours = lambda v: tuple(lk.support(v, ids, offsets, targets, teacher_logp=teacher, ignore_index=-2))
        teacher = np.where(ids == 9, -np.inf, -0.7).astype(np.float32)
        finite = lambda v: exact_support(jnp.where(v == -np.inf, -1e5, v), ids, offsets, targets, teacher, ignore_index=-2)
        out, pull = jax.vjp(ours, x)
        expected, (gradient,) = exactly(finite, x, upstream=ups)
        at = np.arange(len(ids)) == 9  # of the column that is masked, -1e5 there
        check(f"{dtype} special tokens, a masked column", np.isneginf(out[4][9]) and expected[4][9] < -9e4, out[4])
        for i, (a, b) in enumerate(zip(out, expected)):
            a, b = (np.where(at, 0, c) if i == 4 else c for c in (a, b))
            close(f"{dtype} special tokens, result {i}", a, b, like="float32")
        check(f"{dtype} special tokens, which are NaN", np.flatnonzero(np.isnan(out[1])).tolist() == [1, 3, 4, 5], out[1])
        zeros = *(a[7] for a in out[:4]), np.asarray(out[4])[[0, 1, 16, 17]]
        check(f"{dtype} special tokens, which are 0", not any(map(np.any, zeros)), out)
        dx, = pull(ups)
        gradient = np.where(np.asarray(x) == -np.inf, np.asarray(dx), gradient)  # JAX's where gives it none
        check(f"{dtype} special tokens, type of the gradient", dx.dtype == x.dtype and bool(jnp.isfinite(dx[2, 9])), dx.dtype)
        close(f"{dtype} special tokens, gradient", dx, gradient, 2)
        quiet, = pull(tuple(u.at[1].set(0) if i < 4 else u.at[6].set(0) for i, u in enumerate(ups)))
        check(f"{dtype} a bad token whose gradients are 0", not quiet[1].any() and bool(jnp.isnan(quiet[3]).all()), quiet[1])
    # The bits are those of a head whose product is exact: ids pick rows of the identity.
    x = normal(4, 8, vocab)
    i, o, t = supports(5, 8, vocab, 43)
    more = dict(teacher_logp=teacher_of(i), softcap=9.0)
    equal("the bits of linear_support", lk.support(x, i, o, t, **more), lk.linear_support(x, jnp.eye(vocab), i, o, t, **more))
    # Numbers that are operands.
    for dtype in DTYPES:
        x, (i, o, t) = normal(7, 4, vocab, dtype=dtype), supports(9, 4, vocab, 6)
        for what, value in (("logit_scale", jnp.float32(0.7)), ("logit_scale", jnp.abs(normal(5, 4)) + 0.5),
                            ("temperature", jnp.abs(normal(6, 4)) + 0.5)):
            compare(f"{dtype} {what} {value.shape}", lambda v, s: lk.support(v, i, o, **{what: s}).support_logp,
                    lambda v, s: exact_support((v.T * s).T if what == "logit_scale" else (v.T / s).T, i, o)[2],
                    [x, value], 64 * normal(5, len(i)), 8, like=dtype)
    x, (i, o, t) = normal(7, 4, vocab), supports(9, 4, vocab, 6)
    made = programs(lambda n: jax.grad(lambda v, s: lk.support(
        v, i, o, t, logit_scale=s, teacher_logp=np.full(len(i), -n)).kl.sum(), (0, 1))(x, jnp.float32(n)), range(1, 6))
    check("new numbers are no new program", made == 0, f"{made} programs for 3 values")
    # No tokens; no entries.
    none = lambda v: lk.support(v, i, np.array([0]), np.zeros(0, np.int32))
    slope = jax.grad(lambda v: none(v).lse.sum())(x[:0])
    check("no tokens", not any(a.any() for a in some_results(none(x[:0]))) and slope.shape == (0, vocab))
    alone, pull = jax.vjp(lambda v: lk.support(v, i[:0], np.zeros(5, np.int32), np.array([-100, 1, -100, -100])).lse, x)
    dx, = pull(jnp.ones(4))
    check("no entries", np.isnan(alone).tolist() == np.isnan(dx).all(1).tolist() == [False, True, False, False] and
          not dx[jnp.array([0, 2, 3])].any(), f"{alone} {dx}")
    # What runs. Backward does not read the logits, so nothing keeps them.
    forward, back = ("linear_support_" + d for d in ("forward_f32", "backward_f32"))
    loss = lambda v: lk.support(v, i, o, t).logp.sum()
    calls = calls_in(jax.grad(loss), x)
    check("calls", calls == [(forward, "full_logits ids offsets target", "logits logp lse entropy support_logp workspace"),
                             (back, "ids offsets target logits dlogp", "dfull_logits workspace")], calls)
    calls = calls_in(loss, x)
    check("forward alone", [c[0] for c in calls] == [forward], calls)
    kept = jax.tree.leaves(jax.jit(lambda v: jax.vjp(loss, v)[1])(x))
    check("what is kept for backward", not any(a.size >= x.size for a in kept), [a.shape for a in kept])
    # Transformations.
    logp = lambda v: lk.support(v, i, o, t).logp
    _, pull = jax.vjp(logp, x)
    equal("jacrev", jax.jacrev(logp)(x), jnp.stack([pull(row)[0] for row in jnp.eye(4)]))
    xs, all_ids, all_t = jnp.stack([x, 2 * x, -x]), jnp.stack([i, i[::-1], i]), jnp.stack([t, i[::-1][o[:-1]], t])
    teacher = teacher_of(i)
    for how, axes in (("logits", (0, None, None)), ("logits, ids and targets", (0, 0, 0)), ("ids and targets", (None, 0, 0))):
        given = [a if n == 0 else a[0] for a, n in zip((xs, all_ids, all_t), axes)]
        f = lambda v, i, t: tuple(lk.support(v, i, o, t, teacher_logp=teacher))
        loss = lambda v, i, t: sum(jnp.sin(a).sum() for a in f(v, i, t))
        each = [[a if n is None else a[k] for a, n in zip(given, axes)] for k in range(3)]
        for what, g in (("value", f), ("gradient", jax.grad(loss))):
            equal(f"vmap over {how}, {what}", jax.jit(jax.vmap(g, axes))(*given), jax.tree.map(
                lambda *a: jnp.stack(a), *(g(*e) for e in each)))
    again = jax.checkpoint(logp)
    equal("checkpoint", jax.jit(jax.grad(lambda v: again(v).sum()))(x), jax.grad(lambda v: logp(v).sum())(x))
    traced = jax.jit(lk.support)
    equal("all arrays traced", traced(x, i, o, t), lk.support(x, i, o, t))
    for kind, text, wrong in [
            (ValueError, "ids has the shape (1, 5); it must have one dimension",
             lambda: lk.support(x, np.ones((1, 5), np.int32), o)),
            (ValueError, "offsets has the shape (4,); the shape of logits asks for (5,)", lambda: lk.support(x, i, o[1:])),
            (ValueError, "teacher_logp has the shape", lambda: lk.support(x, i, o, teacher_logp=np.ones(2))),
            (ValueError, "targets has the shape (1,); the shape of logits asks for (4,)", lambda: lk.support(x, i, o, t[:1])),
            (ValueError, "logits has the shape (); it must have 1 dimensions or more",
             lambda: lk.support(jnp.float32(1), i, o)),
            (ValueError, "vocab is 0", lambda: lk.support(x[:, :0], i, o)),
            (ValueError, "softcap is -1", lambda: lk.support(x, i, o, softcap=-1.0)),
            (ValueError, "logit_scale is 0", lambda: lk.support(x, i, o, logit_scale=0)),
            (ValueError, "temperature is 0", lambda: lk.support(x, i, o, temperature=0)),
            (ValueError, "logit_scale has the shape (3,); it must be one number, or have (4,), one for each token",
             lambda: lk.support(x, i, o, logit_scale=jnp.ones(3))),
            (TypeError, "temperature is an array, and there is a softcap",
             lambda: lk.support(x, i, o, softcap=2.0, temperature=jnp.ones(4))),
            (TypeError, "logits is int32; it must be", lambda: lk.support(np.ones((4, 8), np.int32), i, o)),
            (TypeError, "ids is float32; it must be int32, int64 or uint8", lambda: lk.support(x, i.astype(np.float32), o)),
            (ValueError, "ids has a number outside of int32", lambda: lk.support(x, i.astype(np.int64) + 2**31, o)),
            (TypeError, "teacher_logp would need a gradient", lambda: jax.grad(lambda q: lk.support(
                x, i, o, teacher_logp=q).kl.sum())(jnp.zeros(len(i))))]:
        refused(text, wrong, kind, re.escape(text))
    os.environ["LK_CHECK_TARGETS"] = "1"
    try:
        lk.support(x, ids, np.array([2, 6, 6, 7, 7]), np.array([7, -100, -100, -100]))  # the bad id is of a token that is ignored
        refused("LK_CHECK_TARGETS", lambda: lk.support(x, ids, np.array([2, 6, 7, 7, 7])), ValueError,
                rf"^ids\[6\] is {vocab}; it must be in \[0, {vocab}\)")
    finally:
        del os.environ["LK_CHECK_TARGETS"]


def linear_support():
    tokens, hidden, vocab = 4, 24, 43
    weights, bias = normal(8, vocab, hidden, scale=0.3), normal(9, vocab)
    for dtype in DTYPES:
        x, m = normal(7, tokens, hidden, dtype=dtype), weights.astype(dtype)
        for k, options in enumerate(SUPPORT_OPTIONS[:4]):
            ids, offsets, targets = supports(k, tokens, vocab, (3, 12, 43, 12)[k])
            if k and dtype != "float32" and k != 1 + (dtype == "float16"):  # each once in 16 bits
                continue
            if "ignore_index" in options:
                targets[2] = 3
            teacher = teacher_of(ids)
            ups = [256 * normal(20 + i, *((tokens,) if i < 4 else (len(ids),))) for i in range(5)]
            rest = {n: o for n, o in options.items() if n != "ignore_index"}
            compare(f"{dtype} {options}", lambda v, w: some_results(lk.linear_support(
                v, w, ids, offsets, targets, teacher_logp=teacher, **options)), lambda v, w: exact_linear_support(
                    v, w, None, ids, offsets, targets, teacher, **options), [x, m], tuple(ups), 8, like=dtype)
            compare(f"{dtype} {options} no targets, no teacher", lambda v, w: some_results(lk.linear_support(v, w, ids, offsets, **rest)),
                    lambda v, w: exact_linear_support(v, w, None, ids, offsets, **rest), [x, m], (ups[1], ups[2], ups[4]), 8, jit=True,
                    like=dtype)
            for kind in dict.fromkeys((dtype, "float32")):
                compare(f"{dtype} {options}, weight and bias {kind}", lambda v, w, b: some_results(lk.linear_support(
                    v, w, ids, offsets, targets, bias=b, **options)), lambda v, w, b: exact_linear_support(
                        v, w, b, ids, offsets, targets, **options), [x, m.astype(kind), bias.astype(kind)],
                    (ups[0], ups[1], ups[2], ups[4]), 8, like=dtype)
            if k:
                continue
            compare(f"{dtype} {options} logp alone", lambda v, w: lk.linear_support(v, w, ids, offsets, targets, **options).logp,
                    lambda v, w: exact_linear_support(v, w, None, ids, offsets, targets, **options)[0], [x, m], ups[0], 8,
                    like=dtype)
        ids, offsets, targets = supports(9, tokens, vocab, 6)
        for what, value in (("logit_scale", jnp.float32(0.7)), ("temperature", jnp.abs(normal(6, tokens)) + 0.5)):
            compare(f"{dtype} {what} {value.shape}", lambda v, w, s: lk.linear_support(v, w, ids, offsets, **{what: s}).support_logp,
                    lambda v, w, s: exact_linear_support((v.T * (s if what == "logit_scale" else 1 / s)).T, w, None, ids, offsets)[2],
                    [x, m, value], 64 * normal(5, len(ids)), 8, like=dtype)
    x, m = normal(7, 3, hidden), weights
    ids, offsets = np.array([1, 2, vocab, 4, 5]), np.array([0, 2, 4, 5])
    out, pull = jax.vjp(lambda v, w: lk.linear_support(v, w, ids, offsets, np.array([2, 4, 9])).logp, x, m)
    dx, dm = pull(jnp.ones(3))
    check("a bad id, a target that is none of the ids", bool((jnp.isnan(out) == np.array([False, True, True])).all() and (
        jnp.isnan(dx).all(1) == np.array([False, True, True])).all() and jnp.isfinite(dm).all()), f"{out} {dx}")
    nothing = jax.grad(lambda w: lk.linear_support(x[:0], w, ids[:0], np.array([0])).lse.sum())(m)
    check("no tokens", not nothing.any(), "a gradient")
    forward, back = ("linear_support_" + d for d in ("forward_f32", "backward_f32"))
    ids, offsets, targets = supports(1, 3, vocab, 4)
    calls = calls_in(jax.grad(lambda v, w: lk.linear_support(v, w, ids, offsets, targets).logp.sum(), 0), x, m)
    check("a frozen weight", calls == [(forward, "x weight ids offsets target", "logits logp lse entropy support_logp workspace"),
                                       (back, "x weight ids offsets target logits dlogp", "dx workspace")], str(calls))
    logp = lambda v: lk.linear_support(v, m, ids, offsets, targets).logp
    _, pull = jax.vjp(logp, x)
    check("jacrev", bool((jax.jacrev(logp)(x) == jnp.stack([pull(row)[0] for row in jnp.eye(3)])).all()), "another one")
    each = jax.vmap(lambda v, i: lk.linear_support(v, m, i, offsets, None).support_logp)(
        jnp.stack([x, 2 * x]), jnp.stack([ids, ids[::-1]]))
    both = jnp.stack([lk.linear_support(v, m, i, offsets).support_logp for v, i in ((x, ids), (2 * x, ids[::-1]))])
    check("vmap", bool((each == both).all()), f"{each} {both}")
    raises = [("ids has the shape (1, 5)", lambda: lk.linear_support(x, m, np.ones((1, 5), np.int32), offsets)),
              ("offsets has the shape", lambda: lk.linear_support(x, m, ids, offsets[1:])),
              ("teacher_logp has the shape", lambda: lk.linear_support(x, m, ids, offsets, teacher_logp=np.ones(2))),
              ("weight has the shape (43, 23)", lambda: lk.linear_support(x, m[:, :23], ids, offsets)),
              ("targets has the shape", lambda: lk.linear_support(x, m, ids, offsets, targets[:1]))]
    for text, wrong in raises:
        try:
            wrong()
            check(text, False, "nothing was raised")
        except ValueError as error:
            check(text, text in str(error), str(error))


def exact_topk(x, m, k, b=None, scale=1.0, cap=0.0):
    """logp, ids and lse in float64. scale: a number, or one for each token. A softcap may round two logits to one z."""
    x, m, scale = (np.asarray(a, np.float64) for a in (x, m, scale))
    logits = x @ m.T + (0.0 if b is None else np.asarray(b, np.float64))
    z = logits * (scale[..., None] if scale.ndim else scale)
    z = cap * np.tanh(z / cap) if cap else z
    largest = z.max(-1, keepdims=True)
    lse = (largest + np.log(np.exp(z - largest).sum(-1, keepdims=True)))
    ids = np.argsort(-logits, axis=-1, kind="stable")[..., :k]
    return np.take_along_axis(z, ids, -1) - lse, ids, lse[..., 0]


def same_topk(name, ours, exact, roundings=1):
    """The ids are equal, logp and lse close. logp may be off by 4 units where it is 0."""
    check(f"{name}, types", type(ours) is lk.TopkOutput and [a.dtype.name for a in ours] == ["float32", "int32", "float32"], ours)
    check(f"{name}, ids", np.array_equal(ours.ids, exact[1]), f"{ours.ids} {exact[1]}")
    close(f"{name}, logp", ours.logp - 4, exact[0] - 4, roundings)
    close(f"{name}, lse", ours.lse, exact[2], roundings)


TOPK_OPTIONS = ({}, {"softcap": 5.0}, dict(softcap=8.0, logit_scale=1.5, temperature=2.0), {"temperature": 0.7}, {"tf32": True})


def topk_scale(options):
    """scale and softcap of z."""
    t = options.get("temperature", 1.0)
    return options.get("logit_scale", 1.0) / t, options.get("softcap", 0.0) / t


def linear_topk():
    hidden, vocab = 24, 300
    weights, bias = normal(8, vocab, hidden, scale=0.3), normal(9, vocab)
    for dtype in DTYPES:
        m, b = weights.astype(dtype), bias.astype(dtype)
        for i, options in enumerate(TOPK_OPTIONS):
            x, k = normal(7 + i, *((5,), (2, 3), (), (1, 2, 2), (4,))[i], hidden, dtype=dtype), (1, 64, 7, 20, 33)[i]
            same_topk(f"{dtype} {options} k={k}", lk.linear_topk(x, m, k, **options), exact_topk(x, m, k, None, *topk_scale(options)))
            same_topk(f"{dtype} {options} k={k} bias, jit", jax.jit(lambda v, w, c: lk.linear_topk(v, w, k, bias=c, **options))(
                x, m, b), exact_topk(x, m, k, b, *topk_scale(options)))
        x = normal(6, 5, hidden, dtype=dtype)
        same_topk(f"{dtype}, float32 weight and bias", lk.linear_topk(x, weights, 9, bias=bias), exact_topk(x, m, 9, b))
        for what, value in (("logit_scale", jnp.float32(0.7)), ("logit_scale", jnp.abs(normal(5, 5)) + 0.5),
                            ("temperature", jnp.abs(normal(6, 5)) + 0.5)):
            scale = value if what == "logit_scale" else 1 / value
            scaled = (x.astype("float32") * (scale[:, None] if scale.ndim else scale)).astype(dtype)
            same_topk(f"{dtype} {what} {value.shape}", jax.jit(lambda v, s: lk.linear_topk(v, m, 8, **{what: s}))(x, value),
                      exact_topk(scaled, m, 8))
        few = m[:64]
        for k in (1, 17, 64):
            same_topk(f"{dtype}, all {k} columns", lk.linear_topk(x, few[:k], k), exact_topk(x, few[:k], k))
    x, m = normal(7, 3, hidden), weights
    twice = jnp.concatenate([m[:40]] * 3)[jnp.array(np.random.default_rng(1).permutation(120))]
    same_topk("equal columns", lk.linear_topk(x, twice, 60), exact_topk(x, twice, 60))
    same_topk("all columns equal", lk.linear_topk(x, m[:1].repeat(70, 0), 64), exact_topk(x, m[:1].repeat(70, 0), 64))
    masked = jnp.zeros(vocab).at[5:].set(-jnp.inf)
    with np.errstate(invalid="ignore"):
        same_topk("masked columns", lk.linear_topk(x, m, 8, bias=masked), exact_topk(x, m, 8, masked))
    out = lk.linear_topk(x.at[1, 0].set(jnp.nan), m, 3)
    check("NaN", bool(jnp.isnan(out.lse).tolist() == [False, True, False] and jnp.isnan(out.logp[1]).all()), out)
    out = lk.linear_topk(x, m, 2, bias=jnp.zeros(vocab).at[7].set(jnp.nan))
    check("NaN comes first", bool((out.ids[:, 0] == 7).all() and jnp.isnan(out.logp).all()), out)
    out = lk.linear_topk(x[:0], m, 5)
    check("no tokens", [a.shape for a in out] == [(0, 5), (0, 5), (0,)], out)
    wide = normal(3, 400, hidden)
    same_topk("chunks", lk.linear_topk(wide, m, 5, workspace_mib=0.2), exact_topk(wide, m, 5))
    equal("bits of numpy arrays", lk.linear_topk(np.asarray(x), np.asarray(m), np.int64(4)), lk.linear_topk(x, m, 4))
    # No gradient: what uses the results is constant. A gradient is that of the ids' log-probabilities.
    own = lambda v, w: lk.linear_topk(v, w, 4, bias=w[:, 0], logit_scale=v[0, 0] ** 2 + 1).logp.sum() + lk.linear_topk(v, w, 4).lse.sum()
    check("gradients are 0", not any(g.any() for g in jax.jit(jax.grad(own, (0, 1)))(x, m)), "a gradient")
    check("the derivative is 0", not jax.jvp(own, (x, m), (x, m))[1].any(), "a derivative")

    def again(v, w):
        top = lk.linear_topk(v, w, 4)
        return lk.linear_cross_entropy_ids(v, w, top.ids).logp * jnp.exp(top.logp)
    close("logp of linear_cross_entropy_ids", lk.linear_cross_entropy_ids(x, m, lk.linear_topk(x, m, 4).ids).logp,
          lk.linear_topk(x, m, 4).logp, 2)
    ids = lk.linear_topk(x, m, 4).ids
    of = lambda v, w: jnp.take_along_axis(jax.nn.log_softmax(v @ w.T), ids, -1)
    compare("a gradient by the ids", again, lambda v, w: of(v, w) * jax.lax.stop_gradient(jnp.exp(of(v, w))), [x, m],
            normal(4, 3, 4), 8)
    check("one call", calls_in(lambda v, w: lk.linear_topk(v, w, 4), x, m) == [
        ("linear_topk_forward_f32", "x weight", "ids logp lse workspace")], calls_in(lambda v, w: lk.linear_topk(v, w, 4), x, m))
    keys, few = jax.random.split(jax.random.key(3), 4000), m[:9] / 4
    drawn, p = lk.linear_topk(jnp.repeat(x[:1], 4000, 0), few, 2, seed=keys), jax.nn.softmax(x[0] @ few.T)
    for i, want in enumerate((p, sum(p[j] * p / (1 - p[j]) for j in range(9)) - p * p / (1 - p))):
        share = jnp.bincount(drawn.ids[:, i], length=9) / 4000
        check(f"draw {i}", bool((abs(share - want) <= 4.5 * jnp.sqrt(want * (1 - want) / 4000)).all()), (share, want))
    close("logp of draws", drawn.logp, jnp.log(p)[drawn.ids], 1)
    alone = jax.jit(lambda v, s: lk.linear_topk(v, few, 2, seed=s))(jnp.repeat(x[:1], 2, 0), jax.random.key_data(keys)[7:9])
    check("draws of two tokens", all(map(np.array_equal, alone, [a[7:9] for a in drawn])), alone)
    each = jax.vmap(lambda v, s: lk.linear_topk(v[None], few, 2, seed=s[None]).ids[0])(jnp.repeat(x[:1], 6, 0), keys[:6])
    check("draws, vmap", np.array_equal(each, drawn.ids[:6]), each)
    stack, f = normal(5, 4, 3, hidden), lambda v, w: lk.linear_topk(v, w, 6)
    each = [f(v, m) for v in stack]
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *each)
    near("vmap", jax.jit(jax.vmap(f, (0, None)))(stack, m), stacked)
    near("vmap along another axis", jax.vmap(f, (1, None))(stack.swapaxes(0, 1), m), stacked)
    near("vmap of vmap", jax.vmap(jax.vmap(f, (0, None)), (0, None))(stack[None], m), jax.tree.map(lambda a: a[None], stacked))
    near("vmap over weights", jax.vmap(f, (None, 0))(x, jnp.stack([m, m[::-1]])), jax.tree.map(
        lambda *a: jnp.stack(a), f(x, m), f(x, m[::-1])))
    near("scan", jax.lax.scan(lambda c, v: (c, f(v, m)), 0, stack)[1], stacked)
    near("checkpoint", jax.jit(jax.checkpoint(f))(stack[0], m), each[0])
    check("vmap is one call", len(calls_in(jax.vmap(f, (0, None)), stack, m)) == 1)
    for text, wrong, kind in [
            ("seed is int32; it must be keys", lambda: lk.linear_topk(x, m, 2, seed=ids), TypeError),
            ("seed is int; it must be keys", lambda: lk.linear_topk(x, m, 2, seed=3), TypeError),
            ("two words for each token, as the data of threefry's keys", lambda: lk.linear_topk(
                x, m, 2, seed=jax.random.split(jax.random.key(0, impl="rbg"), 3)), ValueError),
            ("seed has the shape (5, 2); it must have (3, 2)", lambda: lk.linear_topk(x, m, 2, seed=keys[:5]), ValueError),
            ("k is 0; it must be 1 to 64", lambda: lk.linear_topk(x, m, 0), ValueError),
            ("k is 65; it must be 1 to 64", lambda: lk.linear_topk(x, m, 65), ValueError),
            ("k is 6; it must be 1 to 5, the number of columns", lambda: lk.linear_topk(x, m[:5], 6), ValueError),
            ("k is -1; it must be 1 to 64", lambda: lk.linear_topk(x, m, -1), ValueError),
            ("k is 2.0; it must be a whole number", lambda: lk.linear_topk(x, m, 2.0), TypeError),
            ("k is None; it must be a whole number", lambda: lk.linear_topk(x, m, None), TypeError),
            ("k is traced", lambda: jax.jit(lambda k: lk.linear_topk(x, m, k))(2), TypeError),
            ("weight has the shape (300, 23); it must have (300, 24)", lambda: lk.linear_topk(x, m[:, :23], 2), ValueError),
            ("x has the shape ()", lambda: lk.linear_topk(jnp.float32(1), m, 2), ValueError),
            ("x is int32", lambda: lk.linear_topk(ids, m, 2), TypeError),
            ("weight is bfloat16; it must be float32", lambda: lk.linear_topk(x, m.astype("bfloat16"), 2), TypeError),
            ("bias has the shape (24,); it must have (300,)", lambda: lk.linear_topk(x, m, 2, bias=m[0]), ValueError),
            ("softcap is -1", lambda: lk.linear_topk(x, m, 2, softcap=-1.0), ValueError),
            ("logit_scale is -1", lambda: lk.linear_topk(x, m, 2, logit_scale=-1.0), ValueError),
            ("logit_scale is 0; it must be above 0", lambda: lk.linear_topk(x, m, 2, logit_scale=0.0), ValueError),
            ("temperature is 0.0; it must be above 0", lambda: lk.linear_topk(x, m, 2, temperature=0), ValueError),
            ("logit_scale has the shape (3,); with a bias it must be one number", lambda: lk.linear_topk(
                x, m, 2, bias=bias, logit_scale=jnp.ones(3)), ValueError),
            ("temperature is an array, and there is a softcap", lambda: lk.linear_topk(
                x, m, 2, temperature=jnp.ones(3), softcap=3.0), TypeError),
            ("tf32 is 2", lambda: lk.linear_topk(x, m, 2, tf32=2), TypeError),
            ("workspace_mib is 9.53674e-07; linear_topk", lambda: lk.linear_topk(x, m, 2, workspace_mib=1e-6), ValueError)]:
        refused(text, wrong, kind, re.escape(text))


def linear_cross_entropy_ids():
    tokens, hidden, vocab = 11, 24, 43
    weights, bias = normal(8, vocab, hidden, scale=0.3), normal(9, vocab)
    beside = ("fast_logits", "tf32", "workspace_mib")
    at = lambda f, i: lambda *a: f(*a)[i]
    lean = [{"fast_logits": True}, {"tf32": True}, {"workspace_mib": 0.1}]
    for dtype in DTYPES:
        x, m = normal(7, tokens, hidden, dtype=dtype), weights.astype(dtype)
        ids, w = ids_case(3, vocab, 5, tokens)
        ids = jnp.asarray(ids).at[::3].set(-100)
        spoiled = x.at[::3].set(jnp.nan)  # x of the tokens that do not count may be anything
        for most, reduction in itertools.product((7, 8), ("none", "mean")):
            full = lambda v, m, **more: lk.linear_cross_entropy_ids(v, m, ids, w, reduction=reduction, tail=most == 8, **more)
            ours = lambda v, m: full(v, m, max_counted=most)
            of = lambda f, *a: jax.grad(lambda *a: sum(r.sum() for r in f(*a)), (0, 1))(*a)
            near(f"{dtype} max_counted {most}, {reduction} _ids", ours(spoiled, m), full(x, m))
            near(f"{dtype} max_counted {most}, {reduction} _ids gradient", of(ours, spoiled, m), of(full, x, m))
        for options in ({}, {"ignore_index": None, "softcap": 5.0}, dict(z_loss=0.01, softcap=8.0, logit_scale=1.5, temperature=2.0,
                        ignore_index=1), *lean):
            ids, w = ids_case(3, vocab, 5, tokens, ignore_index=options.get("ignore_index", -100))
            for reduction in ("mean",) if options in lean else ("none", "sum") if options else ("mean", "none"):
                full = dict(options, reduction=reduction)
                known = {k: v for k, v in full.items() if k not in beside}
                ups = 1024 * jnp.abs(normal(6, *((tokens,) if reduction == "none" else ()))), 256 * normal(7, tokens, 5)
                name = f"{dtype} {full}"
                ours = lambda v, m, b=None: tuple(lk.linear_cross_entropy_ids(v, m, ids, w, bias=b, **full))
                exact = lambda v, m, b=0.0: exact_ids(v @ m.T + b, ids, w, **known)
                if "fast_logits" in full and dtype != "float32":  # half an ulp of every logit, which are below 8
                    for i, (a, b) in enumerate(zip(ours(x, m), exactly(exact, x, m, upstream=ups)[0])):
                        check(f"{name} {i}", bool((jnp.abs(a - b) <= 32 * ROUNDING[dtype]).all()), f"{a} {b}")
                    continue
                like = "float16" if "tf32" in full and dtype == "float32" else None  # TF32 has as many digits
                compare(name, ours, exact, [x, m], ups, 3, jit=reduction == "sum", like=like)
                if options:
                    continue
                for kind in dict.fromkeys((dtype, "float32")):
                    compare(f"{name}, weight and bias {kind}", ours, exact, [x, m.astype(kind), bias.astype(kind)], ups, 3)
                for k, only in enumerate(("loss", "logp")):
                    compare(f"{name} {only} alone", at(ours, k), at(exact, k), [x, m], ups[k], 3)
                r = np.array(normal(8, tokens))
                r[0] = np.nan  # the token is ignored
                compare(f"{name} row_weight", lambda v, m: tuple(lk.linear_cross_entropy_ids(v, m, ids, w, **full, row_weight=r)),
                        lambda v, m: exact_ids(v @ m.T, ids, w, **full, row_weight=r), [x, m], ups, 3)
                plain = np.where(w == 0, 2, ids)
                compare(f"{name} no weights", lambda v, m: tuple(lk.linear_cross_entropy_ids(v, m, plain, **full)),
                        lambda v, m: exact_ids(v @ m.T, plain, **full), [x, m], ups, 3)
                if reduction == "mean":
                    compare(f"{name} denominator", lambda v, m: tuple(lk.linear_cross_entropy_ids(
                        v, m, ids, w, denominator=jnp.float32(2.5))), lambda v, m: exact_ids(
                            v @ m.T, ids, w, denominator=2.5), [x, m], ups, 3)
        # Numbers that are operands.
        ids, w = ids_case(3, vocab, 5, tokens)
        one, each = jnp.float32(0.7), jnp.abs(normal(6, tokens)) + 0.5
        ups = 1024 * jnp.float32(1), 64 * normal(7, tokens, 5)
        for what, options in (("logit_scale", one), ("logit_scale", each), ("temperature", one), ("z_loss", jnp.float32(0.02))):
            compare(f"{dtype} {what} {options.shape}", lambda v, m, s: tuple(lk.linear_cross_entropy_ids(
                v, m, ids, w, **{what: s})), lambda v, m, s: exact_ids(v @ m.T, ids, w, **{what: s}), [x, m, options], ups, 8,
                jit=options is one, like=dtype)
        compare(f"{dtype} logit_scale and bias", lambda v, m, b, s: tuple(lk.linear_cross_entropy_ids(
            v, m, ids, w, bias=b, logit_scale=s)), lambda v, m, b, s: exact_ids(v @ m.T + b, ids, w, logit_scale=s),
            [x, m, bias.astype(dtype), one], ups, 8, like=dtype)
    # Several chunks of tokens: a small workspace.
    v, n = normal(1, 700, 8, dtype="bfloat16"), normal(2, 30, 8, dtype="bfloat16")
    k, kw = ids_case(5, 30, 3, 700)
    for mib in (0.3, 0.12):
        compare(f"chunks in {mib} MiB", lambda v, n: tuple(lk.linear_cross_entropy_ids(v, n, k, kw, workspace_mib=mib)),
                lambda v, n: exact_ids(v @ n.T, k, kw), [v, n], (jnp.float32(1024), normal(3, 700, 3)), 6)
    # The tail.
    for dtype, reduction in itertools.product(DTYPES, ("mean", "none", "sum")):
        x, m = normal(7, tokens, hidden, dtype=dtype), weights.astype(dtype)
        ids, w = ids_case(3, vocab, 5, tokens)
        ids, q = np.where(ids == 2**31 - 1, 2, ids), np.abs(np.array(normal(9, tokens)))
        ups = (512 * jnp.abs(normal(6, *((tokens,) if reduction == "none" else ()))), 256 * normal(7, tokens, 5),
               256 * normal(8, tokens))
        for what, by in (("weighted", q), ("no weights", None)):
            name = f"{dtype} {reduction} tail, {what}"
            ours = lambda v, m, b: tuple(lk.linear_cross_entropy_ids(v, m, ids, w, bias=b, reduction=reduction, tail_weight=by,
                                                                     tail=True))
            exact = lambda v, m, b: exact_tail(v @ m.T + b, ids, w, by, reduction)
            arrays = [x, m, bias.astype(dtype)]
            compare(name, ours, exact, arrays, ups, 4, jit=reduction == "sum")
            compare(f"{name} alone", at(ours, 2), at(exact, 2), arrays, ups[2], 4)
            compare(f"{name} loss alone", at(ours, 0), at(exact, 0), arrays, ups[0], 4)
    k, q = np.where(k == 2**31 - 1, 2, k), np.abs(np.array(normal(5, 700)))
    compare("a tail, chunks in 0.12 MiB",
            lambda v, n: tuple(lk.linear_cross_entropy_ids(v, n, k, kw, tail_weight=q, workspace_mib=0.12)),
            lambda v, n: exact_tail(v @ n.T, k, kw, q, "mean"), [v, n],
            (jnp.float32(1024), normal(3, 700, 3), normal(4, 700)), 6)
    sure, one = jnp.eye(3, 8), normal(1, 30, 8).at[:2].add(jnp.array([[40.0], [200.0]]))
    compare("a tail far below", lambda v, n: lk.linear_cross_entropy_ids(v, n, np.array([[0, 1]] * 3), tail=True).tail,
            lambda v, n: exact_tail(v @ n.T, np.array([[0, 1]] * 3), None, None, "none")[2], [sure, one], normal(2, 3), 8)
    # A bad id, and a token whose ids are all ignored.
    x, ids = normal(7, 2, 2, hidden), np.array([[[3, 4], [vocab, 2]], [[-100, -100], [5, -1]]], np.int32)
    out, pull = jax.vjp(lambda v, m: tuple(lk.linear_cross_entropy_ids(v, m, ids, reduction="none")), x, weights)
    check("shapes and types", [a.shape for a in out] == [(2, 2), (2, 2, 2)] and all(a.dtype == jnp.float32 for a in out))
    check("bad ids", np.array_equal(jnp.isnan(out[0]), [[0, 1], [0, 1]]) and float(out[0][1, 0]) == 0 and not out[1][1, 0].any())
    dx, dm = pull((jnp.ones((2, 2)), jnp.ones((2, 2, 2))))
    check("gradients of bad ids", np.array_equal(jnp.isnan(dx).any(-1), [[0, 1], [0, 1]]) and not dx[1, 0].any() and
          bool(jnp.isfinite(dm).all()))
    out, pull = jax.vjp(lambda v, m: tuple(lk.linear_cross_entropy_ids(v, m, ids, reduction="none", tail=True)), x, weights)
    check("tails of bad ids", np.array_equal(jnp.isnan(out[2]), [[0, 1], [0, 1]]) and float(out[2][1, 0]) == 0)
    dx, dm = pull((jnp.ones((2, 2)), jnp.ones((2, 2, 2)), jnp.ones((2, 2))))
    check("their gradients", np.array_equal(jnp.isnan(dx).any(-1), [[0, 1], [0, 1]]) and not dx[1, 0].any() and
          bool(jnp.isfinite(dm).all()))
    # One id is a target. A mean over nothing. No tokens.
    x, t = x[0], jnp.array([4, 9])
    loss, same = lk.linear_cross_entropy_ids(x, weights, t[:, None]).loss, lk.linear_cross_entropy(x, weights, t)
    close("one id", loss, same, 4)
    empty = jnp.full((2, 3), -100)
    check("mean over nothing", bool(jnp.isnan(lk.linear_cross_entropy_ids(x, weights, empty).loss)) and float(
        lk.linear_cross_entropy_ids(x, weights, empty, zero_when_empty=True).loss) == 0)
    zero = lambda m: lk.linear_cross_entropy_ids(x, m, empty, zero_when_empty=True).loss
    check("its gradient", not jax.grad(zero)(weights).any())
    none = lambda m: lk.linear_cross_entropy_ids(x[:0], m, empty[:0], reduction="none")
    check("of no tokens", [a.shape for a in none(weights)] == [(0,), (0, 3)] and not jax.grad(lambda m: none(m).logp.sum())(
        weights).any())
    # The calls: what is not used is not there.
    forward, back = ("linear_cross_entropy_ids_" + d for d in ("forward_f32", "backward_f32"))
    ids, w = jnp.asarray(integers(3, vocab, 2, 4)), jnp.ones((2, 4))
    calls = calls_in(lk.linear_cross_entropy_ids, x, weights, ids)
    check("a call without options", calls == [(forward, "x weight target_ids", "loss logp workspace")], calls)
    for made, wanted in (("dx", 0), ("dweight", 1), ("dweight dx", (0, 1))):
        for only, i, upstream in (("loss", 0, "upstream"), ("logp", 1, "dlogp")):
            calls = calls_in(jax.grad(lambda v, m: at(lk.linear_cross_entropy_ids, i)(v, m, ids).sum(), wanted), x, weights)
            check(f"{made} of {only} alone", calls == [(forward, "x weight target_ids", "loss lse logp lse_low workspace"), (
                back, f"x weight target_ids lse lse_low {upstream}", f"{made} workspace")], calls)
    tailed = functools.partial(lk.linear_cross_entropy_ids, tail_weight=w[:, 0])
    for only, f, read in (("loss", at(tailed, 0), "lse lse_low tail upstream"), ("tail", at(tailed, 2), "lse lse_low tail dtail")):
        calls = calls_in(jax.grad(lambda v: f(v, weights, ids).sum()), x)
        check(f"a tail, gradient of {only} alone", calls == [
            (forward, "x weight target_ids tail_weight", "loss lse logp tail lse_low workspace"),
            (back, f"x weight target_ids tail_weight {read}", "dx workspace")], calls)
    calls = calls_in(jax.grad(lambda v: lk.linear_cross_entropy_ids(v, weights, ids, tail=True).loss), x)
    check("a tail without weights or gradient is not read", calls == [
        (forward, "x weight target_ids", "loss lse logp tail lse_low workspace"),
        (back, "x weight target_ids lse lse_low upstream", "dx workspace")], calls)
    made = programs(lambda i: jax.grad(lambda v, s: sum(a.sum() for a in lk.linear_cross_entropy_ids(
        v, weights, ids, i * w, z_loss=s, logit_scale=s, denominator=i, row_weight=np.full(2, i))), (0, 1))(x, jnp.float32(i)),
        range(1, 6))
    check("new numbers are no new program", made == 0, f"{made} programs for 3 values")
    f = functools.partial(lk.linear_cross_entropy_ids, x, weights)
    for expected, g, error in (
            ("weight has the shape (43, 23); it must have (43, 24)", lambda: lk.linear_cross_entropy_ids(
                x, weights[:, 1:], ids), ValueError),
            ("target_ids is float32; it must be int32, int64 or uint8", lambda: f(w), TypeError),
            ("target_ids has the shape (1, 4); the shape of x asks for (2,) and the number of ids", lambda: f(ids[:1]), ValueError),
            ("target_weight has the shape (2, 3); it must have (2, 4)", lambda: f(ids, w[:, 1:]), ValueError),
            ("tail_weight has the shape (2, 4); it must have (2,)", lambda: f(ids, tail_weight=w), ValueError),
            ("tail_weight would need a gradient", lambda: jax.grad(lambda q: f(ids, tail_weight=q).loss)(w[:, 0]), TypeError),
            ("ids_per_row is 0", lambda: f(ids[:, :0]), ValueError),
            ("ids_per_row is 129", lambda: f(np.zeros((2, 129), np.int32)), ValueError),
            ("bias has the shape (24,); it must have (43,)", lambda: f(ids, bias=weights[0]), ValueError),
            ("with a bias it must be one number", lambda: f(ids, bias=bias, logit_scale=jnp.ones(2)), ValueError),
            ("softcap is -1", lambda: f(ids, softcap=-1.0), ValueError),
            ("with a denominator it must be 'mean'", lambda: f(ids, reduction="sum", denominator=3), ValueError),
            ("workspace_mib is 9.53674e-07; linear_", lambda: f(ids, workspace_mib=1e-6), ValueError),
            *((f"{name} would need a gradient, and gets none", lambda name=name, a=a: jax.grad(lambda a: f(ids, **{
                name: a}).loss)(a), TypeError) for name, a in (("target_weight", w), ("denominator", jnp.float32(2)),
                                                               ("row_weight", jnp.ones(2))))):
        try:
            g()
            check(expected, False, "no error")
        except (TypeError, ValueError) as found:
            check(expected, type(found) is error and expected in str(found), f"a {type(found).__name__}: {found}")


def md_lrpe_cosine():
    cases = [((6,), 0, None, None), ((2, 3), 1, "relu", None), ((3, 2), 0, "sigmoid", (5, -2)), ((2, 2, 2), 2, "silu", None),
             ((4,), 1, "softmax", (100,)), ((2, 20), 1, "softmax_tokens", (3, 0)), ((1, 1), 0, None, (7, 9))]
    for dtype in DTYPES:
        for shape, prefix, activation, offset in cases:
            for layout in ("BHTD", "BTHD"):
                for theta_type in dict.fromkeys((dtype, "float32")):
                    heads, dim, tokens = 2, 16, prefix + int(np.prod(shape))
                    lead = (3, heads, tokens) if layout == "BHTD" else (3, tokens, heads)
                    x = normal(1, *lead, dim, dtype=dtype)
                    theta = normal(2, heads, -(-dim // len(shape)), dtype=dtype).astype(theta_type)
                    options = dict(shape=shape, prefix=prefix, activation=activation, offset=offset, layout=layout)
                    up, exact = normal(3, *lead, 2 * dim, dtype=dtype), lambda v, t: exact_lrpe(v, t, **options)
                    compare(f"{dtype} {theta_type} {options}", lambda v, t: lk.md_lrpe_cosine(v, t, **options), exact, [x, theta],
                            up)
                    if offset and theta_type == dtype == "float32":  # an array, and traced
                        pull = lambda offset, *a: jax.vjp(lambda v, t: lk.md_lrpe_cosine(v, t, **dict(options, offset=offset)), *a)
                        both = lambda offset, up, *a: (lambda y, pull: (y, pull(up)))(*pull(offset, *a))
                        expected = both(offset, up, x, theta)
                        for how, given in (("array", jnp.array(offset)), ("traced", None), ("list of traced", list)):
                            f = both if given is not None else jax.jit(both)
                            if given is list:
                                f, given = jax.jit(lambda a, *more: both([a[0], *offset[1:]], *more)), jnp.array(offset)
                            equal(f"{dtype} {theta_type} {options} offset {how}",
                                  f(jnp.array(offset) if given is None else given, up, x, theta), expected)
    for rows, columns in ((1, 8), (2, 1), (1, 1)):  # shared by heads, by features
        for layout in ("BHTD", "BTHD"):
            options = dict(shape=(3, 2), prefix=1, activation="silu", offset=(4, 0), layout=layout)
            lead = (3, 2, 7) if layout == "BHTD" else (3, 7, 2)
            compare(f"theta ({rows}, {columns}) {layout}", lambda v, t: lk.md_lrpe_cosine(v, t, **options),
                    lambda v, t: exact_lrpe(v, t, **options), [normal(1, *lead, 16), normal(2, rows, columns)],
                    normal(3, *lead, 32))
    x, theta = normal(1, 2, 3, 4, 8), normal(2, 3, 8)
    loss = lambda x, theta, **o: lk.md_lrpe_cosine(x, theta, 4, **o).sum()
    calls = calls_in(jax.grad(loss), x, theta)
    check("no x for the gradient of x", calls == [("md_lrpe_cosine_backward_f32", "theta dy", "dx")], calls)
    close("one axis as a number", lk.md_lrpe_cosine(x, theta, 4, offset=2), exact_lrpe(x, theta, (4,), offset=(2,)), 4)
    whole = lk.md_lrpe_cosine(x, theta, 4, offset=7, prefix=0)
    step = jax.jit(lambda v, i: lk.md_lrpe_cosine(v, theta, 1, offset=7 + i))
    check("token by token by one program", all(np.array_equal(step(x[:, :, i:i + 1], i), whole[:, :, i:i + 1]) for i in range(4)))
    rows = jax.vmap(lambda v, i: lk.md_lrpe_cosine(v, theta, 4, offset=i))(x, jnp.array([5, -9]))
    check("vmap over offsets", all(np.array_equal(rows[i], lk.md_lrpe_cosine(x[i], theta, 4, offset=o))
                                   for i, o in enumerate((5, -9))))
    check("without a batch", np.array_equal(lk.md_lrpe_cosine(x[0], theta, 4), lk.md_lrpe_cosine(x, theta, 4)[0]))


def rms_norm():
    for dtype in DTYPES:
        for shape in [(5, 64), (2, 3, 1000), (33,), (2, 0, 8)]:
            x, residual, weight = (normal(i, *s, dtype=dtype) for i, s in enumerate((shape, shape, shape[-1:])))
            up, up_s = normal(3, *shape, dtype=dtype), normal(4, *shape, dtype=dtype)
            for w in dict.fromkeys((None, dtype, "float32")):
                name, arrays = f"{dtype} {shape} weight {w}", [x] + ([weight.astype(w)] if w else [])
                compare(name, lk.rms_norm, lambda v, m=None: exact_norm(v, None, m)[0], arrays, up)
                for r in dict.fromkeys((dtype, "float32")):
                    # s is rounded to residual's type before backward reads it, which is one more rounding.
                    arrays = [x, residual.astype(r)] + ([weight.astype(w)] if w else [])
                    compare(f"{name} residual {r}", lk.add_rms_norm, exact_norm, arrays, (up, up_s.astype(r)), 3)
                    for i, alone in enumerate((up, up_s.astype(r))):
                        compare(f"{name} residual {r}, result {i} alone", lambda *a: lk.add_rms_norm(*a)[i],
                                lambda *a: exact_norm(*a)[i], arrays, alone, 3)
                    def rounded(x, r, *w):  # straight through the rounding, as backward has it
                        s = x + r
                        s = s + jax.lax.stop_gradient(s.astype(r_type).astype(s.dtype) - s)
                        return exact_norm(s, None, *w)[0], s
                    r_type = r
                    compare(f"{name} residual {r}, round_sum", lambda *a: lk.add_rms_norm(*a, round_sum=True), rounded, arrays,
                            (up, up_s.astype(r)), 3)
            if math.prod(shape):
                y, s = lk.add_rms_norm(x, residual, weight, round_sum=True)
                check(f"{dtype} {shape} round_sum: the sum has the bits of JAX's", bool((s == x + residual).all()))
                if shape[-1] % 8 == 0:
                    check(f"{dtype} {shape} round_sum: the norm has the bits of rms_norm(s)", bool((y == lk.rms_norm(s, weight)).all()))
                    eight = [f(weight, out_dtype=jnp.float8_e4m3fn)[0].view(jnp.uint8) for f in (
                        lambda *a, **o: lk.add_rms_norm(x, residual, *a, round_sum=True, **o), lambda *a, **o: lk.rms_norm(s, *a, **o))]
                    check(f"{dtype} {shape} round_sum: 8 bits", bool((eight[0] == eight[1]).all()))
                if dtype != "float32":
                    check(f"{dtype} {shape} round_sum matters", not bool((y == lk.add_rms_norm(x, residual, weight)[0]).all()))
        for shape, ends in (((2, 3, 40), (40,)), ((2, 3, 40), (3, 40)), ((5, 2, 3, 40), (2, 3, 40)), ((3, 40), (3, 40))):
            x, w, b = normal(1, *shape, dtype=dtype), normal(2, *ends, dtype=dtype), normal(3, *ends, dtype=dtype)
            r, up = normal(4, *shape), normal(5, *shape, dtype=dtype)
            name = f"{dtype} {shape} weight and bias {ends}"
            for kind in dict.fromkeys((dtype, "float32")):
                compare(f"{name} {kind}", lambda x, w, b: lk.rms_norm(x, w, bias=b, weight_offset=1.0), lambda x, w, b: exact_norm(
                    x, None, w, bias=b, weight_offset=1.0)[0], [x, w.astype(kind), b.astype(kind)], up)
            compare(f"{name} alone", lambda x, b: lk.rms_norm(x, bias=b), lambda x, b: exact_norm(x, bias=b)[0], [x, b], up)
            compare(f"{name} residual", lambda x, r, w, b: lk.add_rms_norm(x, r, w, bias=b, weight_offset=-0.5),
                    lambda x, r, w, b: exact_norm(x, r, w, bias=b, weight_offset=-0.5), [x, r, w, b], (up, r), 3)
            compare(f"{name} weight_offset with a gradient", lambda x, w, b, o: lk.rms_norm(x, w, bias=b, weight_offset=o),
                    lambda x, w, b, o: exact_norm(x, None, w, bias=b, weight_offset=o)[0], [x, w, b, jnp.float32(0.75)], up,
                    3, jit=True)
    def gated(x, gate, w=None, first=False):
        silu = gate / (1 + jnp.exp(-gate))
        y = exact_norm(x * silu if first else x, None, w)[0]
        return y if first else y * silu
    for dtype, first, (shape, ends) in itertools.product(DTYPES, (False, True), (((5, 64), (64,)), ((2, 3, 4, 33), (4, 33)), ((40,), None), ((0, 8), (8,)))):
        x, gate, up = (normal(i, *shape, dtype=dtype) for i in (1, 2, 3))
        for kind in dict.fromkeys((dtype, "float32")) if ends else (None,):
            arrays = [x, gate] + ([normal(4, *ends, dtype=kind)] if ends else [])
            compare(f"gate {dtype} {shape} first={first} weight {kind}",
                    lambda x, gate, w=None: lk.rms_norm(x, w, gate=gate, gate_first=first), lambda *a: gated(*a, first=first)
                    if len(a) == 3 else gated(*a, None, first), arrays, up, 2)
    x, gate, w = normal(1, 2, 3, 8), normal(2, 2, 3, 8), normal(3, 8)
    check("gate under vmap", np.allclose(jax.vmap(lambda a, g: lk.rms_norm(a, w, gate=g))(x, gate), lk.rms_norm(x, w, gate=gate), 1e-6))
    calls = calls_in(jax.grad(lambda x: lk.rms_norm(x, w, gate=gate).sum()), x)
    check("gate: a frozen one has no gradient", calls == [("srms_norm_gated_backward_f32", "weight x gate dy", "dx")], calls)
    for says, error, f in (("gate", ValueError, lambda: lk.rms_norm(x, gate=gate[:1])), ("gate", TypeError, lambda: lk.rms_norm(
            x, gate=gate.astype("bfloat16"))), ("bias", ValueError, lambda: lk.rms_norm(x, w, bias=w, gate=gate)),
                           ("gate_first", ValueError, lambda: lk.rms_norm(x, gate_first=True))):
        try:
            f()
            check(f"gate: {says}: refused", False)
        except error as e:
            check(f"gate: {says}: the message", says in str(e), e)
    x, w = normal(1, 4, 8), normal(2, 8)
    close("eps", lk.rms_norm(x, w, 0.5), exact_norm(x, None, w, 0.5)[0], 4)
    check("srms_norm", np.array_equal(lk.srms_norm(x), lk.rms_norm(x)))
    loss = lambda *a: lk.rms_norm(*a).sum()
    calls = calls_in(jax.grad(loss), x, w)
    check("a frozen weight has no gradient", calls == [("srms_norm_backward_f32", "weight x dy", "dx")], calls)
    check("nor has a frozen x", [c[2] for c in calls_in(jax.grad(loss, 1), x, w)] == ["dweight workspace"])
    check("a value alone needs y alone", calls_in(lk.rms_norm, x, w) == [("srms_norm_forward_f32", "weight x", "y")])


def glu():
    options = [{}, {"limit": 0.75}, {"up_offset": 1.0, "alpha": 1.702, "limit": 7.0}, {"up_offset": -0.5, "alpha": -0.5}]
    for dtype in DTYPES:
        for shape in [(5, 64), (2, 3, 101), (33,), (4, 1), (2, 0, 8)][:5 if dtype == "float32" else 2]:
            for i, (activation, how) in enumerate(itertools.product(lk.GATES, ("apart", "halves", "turns"))):
                more = {k: v for k, v in options[(i + len(shape)) % 4].items() if k != "alpha" or activation == "silu"}
                more |= dict(activation=activation, interleaved=how == "turns")
                wide = shape if how == "apart" else (*shape[:-1], 2 * shape[-1])
                arrays = [normal(j, *wide, dtype=dtype, scale=1.5) for j in range(1 + (how == "apart"))]
                up = normal(3, *shape, dtype=dtype)
                name = f"{dtype} {shape} {how} {more}"
                if i % 2:
                    compare(name, lambda *a: lk.glu(*a, **more), lambda *a: exact_glu(*a, **more), arrays, up, jit=i % 4 == 1)
                    continue
                weight = normal(4, *shape[:-1], dtype=("float32", dtype)[i // 2 % 2])
                compare(f"{name} row_weight {weight.dtype.name}", lambda *a: lk.glu(*a[:-1], **more, row_weight=a[-1]),
                        lambda *a: exact_glu(*a[:-1], **more, row_weight=a[-1]), [*arrays, weight], up)
    x, u, w, both = normal(1, 4, 8), normal(2, 4, 8), normal(3, 4), normal(4, 4, 16)
    y, pull = jax.vjp(lk.glu, x, u)
    for how, packed in (("halves", jnp.concatenate([x, u], -1)), ("turns", jnp.stack([x, u], -1).reshape(4, 16))):
        other, pull_other = jax.vjp(functools.partial(lk.glu, interleaved=how == "turns"), packed)
        check(f"{how}: the bits of two arrays", np.array_equal(y, other))
        d, (dx, du) = pull_other(x)[0], pull(x)
        dx_other, du_other = jnp.split(d, 2, -1) if how == "halves" else (d[:, ::2], d[:, 1::2])
        check(f"{how}: their gradients", np.array_equal(dx, dx_other) and np.array_equal(du, du_other))
    close("jax.nn.glu", lk.glu(both[:, 8:], both[:, :8], "sigmoid"), jax.nn.glu(both, -1), 4)
    close("a mask", lk.glu(x, u, row_weight=w > 0), exact_glu(x, u, row_weight=(w > 0) * 1.0), 4)
    check("an infinite limit", np.array_equal(lk.glu(x, u, limit=np.inf), y))
    slopes = jax.grad(lambda w: lk.glu(x[:, :0], row_weight=w).sum())(w)
    check("no columns", lk.glu(x[:, :0]).shape == (4, 0) and not slopes.any())
    special = jnp.array([[-jnp.inf, jnp.inf, jnp.nan, 1e4, -1e4, 0]])
    for activation in lk.GATES:
        ours, exact = lk.glu(special, special[:, ::-1], activation), exact_glu(special, special[:, ::-1], activation)
        close(f"special values {activation}", ours, exact, 400)
        close(f"special values {activation}, limit", lk.glu(special, special[:, ::-1], activation, limit=7.0), exact_glu(
            special, special[:, ::-1], activation, limit=7.0), 400)
    loss = lambda *a: lk.glu(*a[:2], row_weight=a[2]).sum()
    each = {0: "dgate", 1: "dup", 2: "drow_weight"}
    for i, name in each.items():
        calls = calls_in(jax.grad(loss, i), x, u, w)
        check(f"{name} alone", calls == [("glu_backward_f32", "gate up row_weight dy", name)], calls)
    calls = calls_in(jax.grad(lambda v: lk.glu(v).sum()), both)
    check("both gradients are one array", calls == [("glu_backward_f32", "gate dy", "dgate")], calls)
    check("a value alone needs y alone", calls_in(lk.glu, x, u) == [("glu_forward_f32", "gate up", "y")])


def rope():
    """Two tensors of [batch, tokens, heads, dim], or one, by each kind of angles, with and without norms."""
    kinds, count = ("offset", "position", "batches", "axes", "tables", "wide tables", "tables of batches"), 0
    for dtype in DTYPES:
        for kind, first, turns, norms in itertools.product(kinds, (False, True), (False, True), (False, True)):
            count += 1
            norms = ("q", "k", "qk")[count // 2 % 3] if norms else ""
            batch, tokens, heads, kv, dim = [(2, 5, 3, 1, 16), (1, 4, 2, 2, 10), (3, 1, 1, 2, 64)][count % 3]
            rotary = (None, dim // 4 * 2, None, 2)[count // 3 % 4]
            pairs = (rotary or dim) // 2
            inv = np.float32(100.0) ** -(np.arange(pairs) / pairs).astype("float32")
            options = dict(rotary_dim=rotary, interleaved=turns, heads_first=first, scale=(1.0, 1.25, -0.5)[count % 3],
                           eps=(1e-6, 1e-2)[count % 2], weight_offset=float(count % 2))
            table = lambda seed, *lead: normal(seed, *lead, tokens, pairs, dtype=("float32", dtype)[count % 2])
            both = lambda t: (jnp.stack if turns else jnp.concatenate)([t, t * jnp.nan], -1)  # the second one is not read
            twice = lambda t: both(t).reshape(*t.shape[:-1], -1)
            if kind in ("offset", "position", "batches", "axes"):
                options["inv_freq"] = inv
            if kind == "offset":
                options["offset"] = (0, 3, 70000, -2)[count % 4]
            elif kind in ("position", "batches"):
                options["position"] = integers(count, 5000, *([batch] if kind == "batches" else [[], [1]][count % 2]), tokens)
            elif kind == "axes":
                options.update(position=integers(count, 99, 3, (1, batch)[count % 2], tokens), pair_axis=integers(count, 3, pairs))
            else:
                tables = [table(i, *([batch] if kind == "tables of batches" else [])) for i in (7, 8)]
                options.update(zip(("cos", "sin"), map(twice, tables) if kind == "wide tables" else tables))
            lead = () if batch == 1 else (batch,)
            shape = lambda n: (*lead, n, tokens, dim) if first else (*lead, tokens, n, dim)
            names = ["q"] + ["k"] * (count % 4 != 3 or "k" in norms) + [f"{n}_weight" for n in norms]
            make = {"q": lambda: normal(1, *shape(heads), dtype=dtype), "k": lambda: normal(2, *shape(kv), dtype=dtype),
                    "q_weight": lambda: normal(3, dim, dtype=(dtype, "float32")[count // 2 % 2]),
                    "k_weight": lambda: normal(4, dim, dtype=(dtype, "float32")[count // 2 % 2])}
            arrays = [make[name]() for name in names]
            up = normal(5, *shape(heads)), normal(6, *shape(kv))
            of = lambda f: lambda *a: f(**dict(zip(names, a)), **options)
            said = {k: getattr(v, "shape", v) for k, v in options.items()}
            compare(f"{dtype} {shape(heads)} {names} {kind} {said}", of(lk.rope), of(exact_rope), arrays,
                    up if "k" in names else up[0], 2, jit=count % 5 == 0)
    q, k, w, inv = normal(1, 2, 5, 3, 8), normal(2, 2, 5, 1, 8), normal(3, 8), jnp.asarray(0.5 ** np.arange(4), jnp.float32)
    y = lk.rope(q, k, inv_freq=inv, offset=7)
    for name, f in (("an operand", lambda: lk.rope(q, k, inv_freq=inv, offset=jnp.int32(7))),
                    ("traced", lambda: jax.jit(lambda n: lk.rope(q, k, inv_freq=inv, offset=n))(7)),
                    ("positions", lambda: lk.rope(q, k, inv_freq=inv, position=jnp.arange(7, 12))),
                    ("of batches", lambda: lk.rope(q, k, inv_freq=inv, position=jnp.tile(jnp.arange(7, 12), (2, 1)))),
                    ("one axis", lambda: lk.rope(q, k, inv_freq=inv, position=jnp.arange(7, 12)[None, None])),
                    ("heads first", lambda: [jnp.swapaxes(y, 1, 2) for y in lk.rope(
                        jnp.swapaxes(q, 1, 2), jnp.swapaxes(k, 1, 2), inv_freq=inv, offset=7, heads_first=True)]),
                    ("q and k alone", lambda: (lk.rope(q, inv_freq=inv, offset=7), lk.rope(k, inv_freq=inv, offset=7))),
                    ("each batch", lambda: [jnp.stack(y) for y in zip(*(
                        lk.rope(a, b, inv_freq=inv, offset=7) for a, b in zip(q, k)))])):
        check(f"offset, {name}: the same bits", all(map(np.array_equal, f(), y)))
    for shape in ((0, 5, 3, 8), (2, 0, 3, 8), (2, 5, 0, 8)):
        slopes = jax.grad(lambda q, w: lk.rope(q, inv_freq=inv, q_weight=w).sum(), (0, 1))(jnp.zeros(shape), w)
        check(f"empty {shape}", slopes[0].shape == shape and not slopes[1].any())
    y, slope = jax.value_and_grad(lambda o: (lk.rope(q, inv_freq=inv, q_weight=w, weight_offset=o) * q).sum())(jnp.float32(1))
    h = [float((lk.rope(q, inv_freq=inv, q_weight=w, weight_offset=o) * q).sum()) for o in (0.5, 1.5)]
    check("a traced weight_offset", abs(slope - (h[1] - h[0])) < 1e-3 and abs(y - (h[0] + h[1]) / 2) < 1e-3, f"{slope} {h}")
    loss = lambda q, k, v, w: sum(y.sum() for y in lk.rope(q, k, inv_freq=inv, q_weight=v, k_weight=w))
    each = {0: ("dq_out inv_freq q_weight", "dq"), 1: ("dk_out inv_freq k_weight", "dk"),
            2: ("dq_out inv_freq q_weight", "dq_weight"), 3: ("dk_out inv_freq k_weight", "dk_weight")}
    for i, (inputs, name) in each.items():
        calls = [c for c in calls_in(jax.grad(loss, i), q, k, w, w) if "backward" in c[0]]
        right = [("rope_backward_f32", f"{inputs[1]} {inputs}", name)]
        check(f"{name} alone", [(c[0], c[1], c[2].replace(" workspace", "")) for c in calls] == right, calls)
    calls = calls_in(jax.grad(lambda q: lk.rope(q, k, inv_freq=inv)[0].sum()), q)
    check("without a norm backward has no q", calls == [("rope_backward_f32", "dq_out inv_freq", "dq")], calls)
    calls = calls_in(lambda q, k: lk.rope(q, k, inv_freq=inv), q, k)
    check("a value alone", calls == [("rope_forward_f32", "q k inv_freq", "q_out k_out")], calls)


def fp8():
    """Norms whose result has 8 bits, and the transposed copy."""
    most = {"float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}

    def numbers(name, q, scale, y, per, narrow):
        """q [rows, cols], scales [rows, blocks] or one number, y in float64."""
        scale, got, limit = np.asarray(scale, np.float64), np.asarray(q.astype(jnp.float32), np.float64), most[q.dtype.name]
        rows, cols = y.shape
        if scale.ndim:
            amax = np.pad(np.abs(y), ((0, 0), (0, -cols % per))).reshape(rows, -1, per).max(-1)
            right = np.where(amax > 0, amax / limit, 1)
            part = scale / right
            check(f"{name}: scales", scale.shape == right.shape and (part > 1 - 1e-5).all() and
                  (part < (2 if narrow else 1) + 1e-5).all())
            check(f"{name}: powers of two", not narrow or (np.log2(scale) % 1 == 0).all())
            scale = np.repeat(scale, per, -1)[:, :cols]
        half, least = (2.0**-4, 2.0**-10) if q.dtype.name == "float8_e4m3fn" else (2.0**-3, 2.0**-17)
        error = np.abs(got * scale - np.clip(y, -limit * scale, limit * scale))
        check(f"{name}: numbers", got.shape == y.shape and (error <= (np.abs(y) * half + scale * least) * (1 + 1e-5)).all())

    for dtype in DTYPES:
        cases = [(s, n) for s in ("tensor", "row", "block128", "mx") for n in ((6, 64), (2, 3, 300), (130, 160))]
        for i, (scaling, shape) in enumerate(cases):
            out_dtype, narrow, cols = list(most)[i % 2], scaling == "mx" or i % 3 == 0, shape[-1]
            x, r = normal(1, *shape, dtype=dtype), normal(3, *shape, dtype=dtype)
            w = normal(2, cols, dtype=dtype if i % 2 else "float32")
            scale = jnp.float32(0.02) if scaling == "tensor" else None
            options = dict(out_dtype=out_dtype, scaling=scaling, scale=scale, power_of_two=narrow, amax=scaling == "tensor",
                           transposed=scaling != "row", weight_offset=float(i % 3 == 1))
            name = f"{dtype} {shape} {scaling} {out_dtype}"
            f = lambda x, w, r: lk.add_rms_norm(x, r, w, **options) if i % 4 == 1 else lk.rms_norm(x, w, **options)
            out = list((jax.jit(f) if i % 2 else f)(x, w, r))
            s = np.asarray(x, np.float64) + (np.asarray(r, np.float64) if i % 4 == 1 else 0)
            y = s / np.sqrt((s**2).mean(-1, keepdims=True) + 1e-6) * (np.asarray(w, np.float64) + options["weight_offset"])
            y = y.reshape(-1, cols)
            if i % 4 == 1:
                close(f"{name}: the sum", out.pop(), s)
            if scaling == "tensor":
                close(f"{name}: amax", out.pop(2), np.abs(y).max(), 16)
            check(f"{name}: what comes back", len(out) == (2 if scaling == "row" else 4) and out[0].shape == shape, len(out))
            per = {"row": cols, "block128": 128, "mx": 32, "tensor": 1}[scaling]
            flat = lambda a: a.reshape(y.shape[0], -1) if a.ndim else a
            numbers(name, flat(out[0]), flat(out[1]), y, per, narrow)
            if len(out) == 4:
                numbers(f"{name}, transposed", out[2], out[3], y.T, per, narrow)
    # Bytes of MX: where |x| is 1 and eps 0, y is the weight with x's sign.
    e4m3, raw = dict(out_dtype=jnp.float8_e4m3fn), lambda a: np.asarray(a).view(np.uint8)
    w = normal(2, 96).at[jnp.array([5, 70])].set(jnp.array([jnp.inf, 460.0])).at[32:64].set(0)
    for rounding, byte, largest in (("up", 128, 0x76), ("floor", 127, 0x7e)):
        q, scale, q_t, scale_t = map(raw, lk.rms_norm(jnp.ones((4, 96)), w, 0.0, scaling="mx", scale_rounding=rounding,
                                                      transposed=True, **e4m3))
        check(f"mx {rounding}: an infinity, zeros, 460", (scale == [255, 0, byte]).all() and (scale_t[[5, 40, 70], 0] == [
            255, 0, byte]).all(), scale)
        check(f"mx {rounding}: their numbers", (q[:, :32] == 0x7f).all() and (q[:, 32:64] == 0).all() and
              (q[:, 70] == largest).all() and (q_t[5] == 0x7f).all() and (q_t[32:64] == 0).all() and (q_t[70] == largest).all())
    x, w, m = normal(1, 6, 64), normal(2, 64), normal(3, 32, 64)
    stacked = jnp.stack([x, 2 * x + 1, -x])
    for options in (dict(scaling="block128"), dict(scaling="tensor", amax=True), dict(scaling="mx", transposed=True)):
        f = lambda v: lk.rms_norm(v, w, **e4m3, **options)
        mapped, each = jax.vmap(f)(stacked), [f(v) for v in stacked]
        floats = lambda a: np.asarray(a, np.float32)
        check(f"vmap {options}", all(np.array_equal(floats(a[i]), floats(b)) for i, one in enumerate(each)
                                     for a, b in zip(mapped, one)))

    for dtype in ("float32", "bfloat16"):  # weight_offset may be traced, and is added before then
        low, offset = w.astype(dtype), jnp.float32(1)
        f = lambda o: (lk.rms_norm(x.astype(dtype), low, weight_offset=o, **e4m3),
                       lk.add_rms_norm(x.astype(dtype), x, low, weight_offset=o, **e4m3), lk.rms_norm(x, weight_offset=o, **e4m3))
        equal(f"{dtype} weight_offset traced", jax.jit(f)(offset), f(1.0))

    @jax.custom_vjp
    def product(x, w, m):  # as the manual says: a product of 8 bits, with the norm's gradient straight through
        q, scale = lk.rms_norm(x, w, **e4m3)
        return (q.astype(jnp.float32) * scale) @ m.T

    def back(kept, dout):
        x, w, m = kept
        q, scale = lk.rms_norm(x, w, **e4m3)
        return (*jax.vjp(lk.rms_norm, x, w)[1](dout @ m), dout.T @ (q.astype(jnp.float32) * scale))
    product.defvjp(lambda *a: (product(*a), a), back)
    loss = lambda *a: (product(*a)**2).sum()
    found = jax.jit(jax.grad(loss, (0, 1, 2)))(x, w, m)
    right = jax.grad(lambda x, w, m: ((lk.rms_norm(x, w) @ m.T)**2).sum(), (0, 1, 2))(x, w, m)
    errors = [float(jnp.linalg.norm(a - b) / jnp.linalg.norm(b)) for a, b in zip(found, right)]
    check("a product of 8 bits, and its gradients", max(errors) < 0.1, errors)
    calls = calls_in(jax.grad(loss), x, w, m)
    check("the plain forward goes", not any(c[0] == "srms_norm_forward_f32" for c in calls), calls)
    for name, f, word in (("out_dtype", lambda: lk.rms_norm(x, w, out_dtype="float16"), "out_dtype"),
                          ("scaling", lambda: lk.rms_norm(x, w, scaling="rows", **e4m3), "scaling"),
                          ("scale_rounding", lambda: lk.rms_norm(x, w, scaling="mx", scale_rounding="even", **e4m3), "scale_rounding"),
                          ("scale_rounding of floats", lambda: lk.rms_norm(x, w, scale_rounding="floor", **e4m3), "scale_rounding"),
                          ("bias", lambda: lk.rms_norm(x, w, bias=w, **e4m3), "bias"),
                          ("scale", lambda: lk.rms_norm(x, w, scale=1.0, **e4m3), "scale"),
                          ("amax", lambda: lk.rms_norm(x, w, amax=True, **e4m3), "amax"),
                          ("transposed", lambda: lk.rms_norm(x, w, transposed=True, **e4m3), "row"),
                          ("weight", lambda: lk.rms_norm(x, w[:3], **e4m3), "weight"),
                          ("eps", lambda: lk.rms_norm(x, w, -1.0, **e4m3), "eps"),
                          ("a gradient", lambda: jax.grad(lambda v: lk.rms_norm(v, w, **e4m3)[1].sum())(x), "gradient")):
        try:
            f()
            said = "nothing"
        except (ValueError, TypeError) as error:
            said = str(error)
        check(f"{name} is refused", word in said, said)


# ---- Numbers as operands -----------------------------------------------------------------------------------------------------


def programs(f, values):
    """How many programs XLA compiles for new values, after two others."""
    compiled = [0]

    def listen(event, seconds, **more):
        compiled[0] += event == "/jax/core/compile/backend_compile_duration"
    f(values[0]), f(values[1])
    jax.monitoring.register_event_duration_secs_listener(listen)
    for v in values[2:]:
        f(v)
    jax.monitoring.unregister_event_duration_listener(listen)
    return compiled[0]


def launches():
    """A call runs the kernels that the calls of C run, and no other: in forward, in loss and gradient, with given upstreams.

    What stays of XLA's, at most, beside each case (a GPU may make one kernel of several):
    SCALE  A reduced loss whose upstream gradient is an operand: one product for each gradient, where C calls lk_scale. XLA
           removes it where the upstream gradient is 1, as in jax.grad, and fuses it with what reads the gradient; a call of lk
           would stay in both. With grad_scale it is lk_rescale.
    TWICE  x and residual have one gradient, and here jit must return it as two arrays. Inside a program nothing is copied.
    ROUND  lk's dtheta is float32, in C too, while JAX demands a gradient of theta's own type.
    """
    SCALE, TWICE, ROUND = ["fusion"], ["copy"], ["fusion"]
    for dtype in DTYPES:
        a = lambda seed, *shape, dtype=dtype: normal(seed, *shape, dtype=dtype)
        x, x3, w, r, m, theta, q = a(1, 6, 64), a(2, 3, 64, 5), a(3, 64), a(4, 6, 64), a(5, 40, 64), a(6, 2, 16), a(7, 1, 2, 6, 16)
        t, th, g = integers(1, 64, 6), integers(2, 40, 6), jnp.float32(4)
        b, theta32 = a(8, 40), theta.astype("float32")
        half, low = dtype == "float16", dtype != "float32"
        fb = lambda op, late=SCALE: ([f"{op}_forward", f"{op}_backward"], []) if half else ([f"{op}_forward_backward"], late)
        each = lambda op: ([f"{op}_forward", f"{op}_backward"], [])
        ce, lce, norm, lrpe = "cross_entropy", "linear_cross_entropy", "srms_norm", "md_lrpe_cosine"
        cei, ids, a32 = "cross_entropy_ids", integers(3, 64, 6, 4), normal(9, 6, 4)
        rescaled = lambda op, n: ([f"{op}_forward_backward", *["rescale"] * n], [])
        tx, tw, w32, f8 = a(10, 6, 16), a(11, 40, 16), normal(12, 6), jnp.linspace(1, 0.1, 8)
        # name, function, arrays that have a gradient, other arrays, calls and others of loss and gradient
        for name, f, arrays, others, (calls, stays) in [
                ("logsumexp", lambda x: lk.logsumexp(x, 1), [x], [], each("logsumexp")),
                ("logsumexp of columns", lambda x: lk.logsumexp(x, 1), [x3], [], each("logsumexp")),
                ("logsumexp of all", lk.logsumexp, [x3], [], each("logsumexp")),
                ("logsumexp float32", lambda x: lk.logsumexp(x, 1, dtype="float32"), [x], [], each("logsumexp")),
                ("rms_norm", lk.rms_norm, [x, w], [], each(norm)),
                ("rms_norm bias", lambda x, w, b: lk.rms_norm(x, w, bias=b), [x, w, w], [], each(norm)),
                ("rms_norm float32 weight", lk.rms_norm, [x, w.astype("float32")], [], each(norm)),
                ("srms_norm", lk.srms_norm, [x], [], each(norm)),
                ("rms_norm gate", lambda x, r, w: lk.rms_norm(x, w, gate=r), [x, r, w], [], each("srms_norm_gated")),
                ("glu", lk.glu, [x, r], [], each("glu")), ("glu halves", lk.glu, [x], [], each("glu")),
                ("glu in turns", lambda x: lk.glu(x, None, "gelu", interleaved=True), [x], [], each("glu")),
                ("glu row_weight", lambda x, r, w: lk.glu(x, r, row_weight=w), [x, r, w32], [], each("glu")),
                ("rope", lambda q, k, f: lk.rope(q.reshape(6, 4, 16), k.reshape(6, 4, 16), inv_freq=f), [x, r], [f8],
                 each("rope")),
                ("rope heads first", lambda q, f: lk.rope(q, inv_freq=f, heads_first=True), [q], [f8], each("rope")),
                ("rope norms", lambda q, k, v, u, f: lk.rope(q, k, inv_freq=f, rotary_dim=16, q_weight=v, k_weight=u),
                 [a(14, 6, 2, 64), a(15, 6, 1, 64), w, w], [f8], each("rope")),
                ("rope tables", lambda q, c: lk.rope(q.reshape(6, 4, 16), cos=c, sin=c), [x], [a(13, 6, 16)], each("rope")),
                ("add_rms_norm", lk.add_rms_norm, [x, r, w], [], (each(norm)[0], TWICE)),
                ("add_rms_norm float32", lk.add_rms_norm, [x, r.astype("float32"), w], [], (each(norm)[0], [] if low else TWICE)),
                ("cross_entropy", lk.cross_entropy, [x], [t], fb(ce)),
                ("cross_entropy sum", lambda x, t: lk.cross_entropy(x, t, reduction="sum"), [x], [t], fb(ce)),
                ("cross_entropy none", lambda x, t: lk.cross_entropy(x, t, reduction="none"), [x], [t], each(ce)),
                ("cross_entropy grad_scale", lambda x, t, g: lk.cross_entropy(x, t, grad_scale=g), [x], [t, g], rescaled(ce, 1)),
                ("cross_entropy lse alone", lambda x, t: lk.cross_entropy(x, t, reduction="none", aux=("lse",))[1]["lse"], [x],
                 [t], each(ce)),
                ("cross_entropy lse and entropy", lambda x, t: with_aux(lk.cross_entropy(x, t, aux=("lse", "entropy"))), [x], [t],
                 each(ce)),
                ("cross_entropy_ids", lambda x, i: tuple(lk.cross_entropy_ids(x, i)), [x], [ids], each(cei)),
                ("cross_entropy_ids none", lambda x, i, w: tuple(lk.cross_entropy_ids(x, i, w, reduction="none")), [x], [ids, a32],
                 each(cei)),
                ("cross_entropy_ids loss alone", lambda x, i, w: lk.cross_entropy_ids(x, i, w)[0], [x], [ids, a32], each(cei)),
                ("cross_entropy_ids logp alone", lambda x, i: lk.cross_entropy_ids(x, i)[1], [x], [ids], each(cei)),
                ("linear_cross_entropy", lk.linear_cross_entropy, [x, m], [th], fb(lce, 2 * SCALE)),
                ("linear_cross_entropy bias", lambda x, m, b, t: lk.linear_cross_entropy(x, m, t, bias=b), [x, m, b], [th],
                 fb(lce, 3 * SCALE)),
                ("linear_cross_entropy none", lambda x, m, t: lk.linear_cross_entropy(x, m, t, reduction="none"), [x, m], [th],
                 each(lce)),
                ("linear_cross_entropy grad_scale", lambda x, m, t, g: lk.linear_cross_entropy(x, m, t, grad_scale=g), [x, m],
                 [th, g], rescaled(lce, 2)),
                ("linear_cross_entropy lse alone", lambda x, m, t: lk.linear_cross_entropy(x, m, t, reduction="none", aux=(
                    "lse",))[1]["lse"], [x, m], [th], each(lce)),
                ("linear_cross_entropy_ids", lambda x, m, i: tuple(lk.linear_cross_entropy_ids(x, m, i)), [x, m], [ids],
                 each("linear_cross_entropy_ids")),
                ("linear_cross_entropy_ids tail", lambda x, m, i, q: tuple(lk.linear_cross_entropy_ids(x, m, i, tail_weight=q)),
                 [x, m], [ids, a32[:, 0]], each("linear_cross_entropy_ids")),
                ("linear_kl none", lambda *a: lk.linear_kl(*a, "none"), [x, m], [tx, tw], each("linear_kl")),
                ("md_lrpe_cosine", lambda x, theta: lk.md_lrpe_cosine(x, theta, 6), [q, theta32], [], each(lrpe)),
                ("md_lrpe_cosine silu", lambda x, theta: lk.md_lrpe_cosine(x, theta, 6, activation="silu"), [q, theta32], [],
                 each(lrpe)),
                ("md_lrpe_cosine theta of x's type", lambda x, theta: lk.md_lrpe_cosine(x, theta, 6), [q, theta], [],
                 (each(lrpe)[0], ROUND if low else [])),
                ("md_lrpe_cosine offset", lambda x, theta, o: lk.md_lrpe_cosine(x, theta, 6, offset=o), [q, theta32],
                 [jnp.array([7])], each(lrpe))]:
            found = kernels_in(f, *arrays, *others)
            check(f"{dtype} {name}: forward", found == ([calls[0].replace("_backward", "")], []), found)

            def whole(arrays, others, ups):
                results, pull = jax.vjp(lambda *a: f(*a, *others), *arrays)
                return results, pull(ups)
            ups = jax.tree.map(lambda u: jnp.full(u.shape, 0.3, u.dtype), jax.eval_shape(f, *arrays, *others))
            found = kernels_in(whole, arrays, others, ups)
            check(f"{dtype} {name}: gradient", found[0] == sorted(calls) and len(found[1]) <= len(stays), found)
            if calls == [f"{ce}_forward_backward"] or calls == [f"{lce}_forward_backward"]:
                found = kernels_in(jax.value_and_grad(f, tuple(range(len(arrays)))), *arrays, *others)
                check(f"{dtype} {name}: an upstream gradient of 1", found == (calls, []), found)


def numbers():
    """Options that are operands of the compiled program, and have gradients."""
    t, ignored, vocab, hidden = integers(3, 40, 6), integers(3, 40, 6), 40, 24
    ignored[2] = -100
    ids, weight = ids_case(3, vocab, 5, 6)
    ids[2], weight[2] = (-100, 1 << 20, 1 << 20, -100, -1), (1, 0, 0, 0, 0)  # an ignored row, for two reasons
    bias = normal(9, vocab)
    for dtype in DTYPES:
        x, v = normal(4, 6, vocab, dtype=dtype, scale=2), normal(5, 6, hidden, dtype=dtype)
        m = normal(8, vocab, hidden, dtype=dtype, scale=0.3)
        one, each = jnp.float32(0.7), jnp.abs(normal(6, 6)) + 0.5
        for reduction in ("mean", "none", "sum")[:3 if dtype == "float32" else 2]:
            up = 1024 * jnp.abs(normal(6, *((6,) if reduction == "none" else ())))
            for options in ({}, {"softcap": 5.0}, {"z_loss": 0.01, "label_smoothing": 0.1})[:3 if dtype == "bfloat16" else 1]:
                for name in ("logit_scale", "temperature"):
                    for s in (one, each):
                        if name == "temperature" and "softcap" in options:
                            continue
                        full = dict(options, reduction=reduction)
                        what = f"{dtype} {full} {name} {s.shape}"
                        # s x is rounded to 16 bits, as are the gradients that the gradient of s is a sum of.
                        compare(f"cross_entropy {what}", lambda x, s: lk.cross_entropy(x, ignored, **full, **{name: s}),
                                lambda x, s: exact_entropy(x, ignored, **full, **{name: s})[0], [x, s], up, 8, jit=s is one,
                                like=dtype)
                        if "label_smoothing" not in full:
                            compare(f"cross_entropy_ids {what}", lambda x, s: tuple(lk.cross_entropy_ids(
                                x, ids, weight, **full, **{name: s})), lambda x, s: exact_ids(x, ids, weight, **full, **{name: s}),
                                [x, s], (up, 64 * normal(7, 6, 5)), 8, jit=s is one, like=dtype)
                        compare(f"linear {what}", lambda v, m, s: lk.linear_cross_entropy(v, m, ignored, **full, **{name: s}),
                                lambda v, m, s: exact_entropy(v @ m.T, ignored, **full, **{name: s})[0], [v, m, s], up, 8,
                                jit=s is one, like=dtype)
            compare(f"{dtype} {reduction} bias", lambda v, m, b, s: lk.linear_cross_entropy(
                v, m, t, bias=b, logit_scale=s, reduction=reduction), lambda v, m, b, s: exact_entropy(
                    v @ m.T + b, t, logit_scale=s, reduction=reduction)[0], [v, m, bias.astype(dtype), one], up, 8, like=dtype)
            for options in ({}, {"class_weight": np.abs(normal(5, vocab)) + 0.1, "softcap": 5.0}, {"denominator": 4},
                            {"zero_when_empty": True}, {"row_weight": np.where(ignored == -100, np.nan, np.abs(normal(11, 6)))}):
                if reduction != "mean" and "denominator" in options:
                    continue
                full, k = dict(options, reduction=reduction), jnp.float32(0.02)
                what = f"{dtype} {[*options]} {reduction} z_loss"
                compare(what, lambda x, k: lk.cross_entropy(x, ignored, **full, z_loss=k),
                        lambda x, k: exact_entropy(x, ignored, **full, z_loss=k)[0], [x, k], up, 4)
                compare(f"linear {what}", lambda v, m, k: lk.linear_cross_entropy(v, m, ignored, **full, z_loss=k),
                        lambda v, m, k: exact_entropy(v @ m.T, ignored, **full, z_loss=k)[0], [v, m, k], up, 4, jit=True)
                if "class_weight" not in full:
                    compare(f"ids {what}", lambda x, k: tuple(lk.cross_entropy_ids(x, ids, weight, **full, z_loss=k)),
                            lambda x, k: exact_ids(x, ids, weight, **full, z_loss=k), [x, k], (up, 64 * normal(7, 6, 5)), 4)
                aux = ("z_loss", "valid_rows")
                a, b = (lk.cross_entropy(x, ignored, **full, z_loss=z, aux=aux) for z in (k, 0.02))
                close(f"{what} aux", a[1]["z_loss"], b[1]["z_loss"], 8)
                check(f"{what} aux names", a[1].keys() == b[1].keys() and np.array_equal(a[1]["valid_rows"], b[1]["valid_rows"]))
        for options in ({"temperature": 0.7}, {"temperature": 1.5, "softcap": 5.0, "logit_scale": 2.0}):
            what = f"{dtype} {options}"
            compare(what, lambda x: lk.cross_entropy(x, t, **options), lambda x: exact_entropy(x, t, **options)[0], [x],
                    jnp.float32(1024), 2)
            compare(f"linear {what}", lambda v, m: lk.linear_cross_entropy(v, m, t, **options),
                    lambda v, m: exact_entropy(v @ m.T, t, **options)[0], [v, m], jnp.float32(1024), 3)
        compare(f"{dtype} scale", lambda x, s: lk.logsumexp(x, 1, scale=s), lambda x, s: jax.nn.logsumexp(x * s, 1), [x, one],
                normal(1, 6, dtype=dtype), 8, like=dtype)
    x, v, m = normal(4, 6, vocab), normal(5, 6, hidden), normal(8, vocab, hidden)
    empty = jnp.full(6, -100)
    for zero in (True, False):
        a, b = (lk.cross_entropy(x, empty, z_loss=z, zero_when_empty=zero) for z in (jnp.float32(0.1), 0.1))
        check(f"z_loss over nothing, zero_when_empty={zero}", np.array_equal(a, b, equal_nan=True), f"{a} {b}")
    check("softcap None", np.array_equal(lk.cross_entropy(x, t, softcap=None), lk.cross_entropy(x, t)))
    q, theta = normal(1, 1, 2, 1, 8), normal(2, 2, 8)
    grad = lambda f, *a: jax.grad(f, tuple(range(len(a))))(*a)
    for name, f in {
            "offset": lambda i: lk.md_lrpe_cosine(q, theta, (1,), offset=i),
            "offset's gradients": lambda i: grad(lambda q, h: lk.md_lrpe_cosine(q, h, (1,), offset=i).sum(), q, theta),
            "offset traced": jax.jit(lambda i: lk.md_lrpe_cosine(q, theta, (1,), offset=i)),
            "z_loss": lambda i: grad(lambda x: lk.cross_entropy(x, t, z_loss=jnp.float32(i)), x),
            "logit_scale": lambda i: grad(lambda x, s: lk.cross_entropy(x, t, logit_scale=s), x, jnp.float32(i)),
            "number of cross_entropy_ids": lambda i: grad(lambda x, s: sum(v.sum() for v in lk.cross_entropy_ids(
                x, ids, i * weight, z_loss=s, logit_scale=s, denominator=i, row_weight=np.full(6, i))), x, jnp.float32(i)),
            "temperature": lambda i: grad(lambda v, m: lk.linear_cross_entropy(v, m, t, temperature=jnp.float32(i)), v, m),
            "weight_offset": lambda i: grad(lambda x: lk.rms_norm(x, x[0], weight_offset=jnp.float32(i)).sum(), x),
            "scale": lambda i: lk.logsumexp(x, scale=jnp.float32(i)),
            "denominator": lambda i: lk.cross_entropy(x, t, denominator=i),
            "row_weight": lambda i: grad(lambda x: lk.cross_entropy(x, t, row_weight=jnp.full(t.shape, i)), x),
            "grad_scale": lambda i: grad(lambda x: i * lk.cross_entropy(x, t, grad_scale=i), x)}.items():
        made = programs(f, range(1, 6))
        check(f"a new {name} is no new program", made == 0, f"{made} programs for 3 values")


def scales():
    """grad_scale: forward multiplies gradients by what backward most likely will be given."""
    t, vocab, hidden = integers(3, 40, 6), 40, 24
    t[2] = -100
    bias, x32, v32 = normal(9, vocab), normal(4, 6, vocab, scale=2), normal(5, 6, hidden)
    for dtype in DTYPES:
        x, v, m = x32.astype(dtype), v32.astype(dtype), normal(8, vocab, hidden, dtype=dtype, scale=0.3)
        for reduction in ("mean", "sum"):
            for g, up in ((4096.0, 4096.0), (4096.0, 1000.0), (0.3, 0.3), (0.3, 3000.0), (7, 7)):
                up = jnp.float32(up)
                for given in (g, jnp.float32(g)):
                    full = dict(reduction=reduction, label_smoothing=0.1)
                    what = f"{dtype} {reduction} {g} {up} {type(given).__name__}"
                    like = "bfloat16" if dtype == "float16" and g < 1 else None  # f16 with a small factor has few digits left
                    compare(f"cross_entropy {what}", lambda x: lk.cross_entropy(x, t, **full, grad_scale=given),
                            lambda x: exact_entropy(x, t, **full)[0], [x], up, 2, jit=given is g, like=like)
                    compare(f"linear {what}", lambda v, m, b: lk.linear_cross_entropy(v, m, t, bias=b, **full, grad_scale=given),
                            lambda v, m, b: exact_entropy(v @ m.T + b, t, **full)[0], [v, m, bias], up, 3, jit=given is g,
                            like=like)
        both = lambda x, g, up: jax.vjp(lambda x: lk.cross_entropy(x, t, grad_scale=g), x)[1](up)[0]
        all_, ups = jnp.stack([x, x + 1, -x]), jnp.float32([512, 3, 700])
        for how, g, axes in (("one", jnp.float32(512), (0, None, 0)), ("each its own", jnp.float32([512, 2, 7]), (0, 0, 0)),
                             ("one gradient", jnp.float32(512), (0, None, None))):
            mapped = jax.jit(jax.vmap(both, axes))(all_, g, ups[0] if axes[2] is None else ups)
            for i in range(3):
                own = both(all_[i], g[i] if axes[1] == 0 else g, ups[0] if axes[2] is None else ups[i])
                close(f"{dtype} vmap, {how} {i}", mapped[i], own, 1)
    # float16: the factor comes before the rounding, in one call. Gradients of a mean over many rows would round to 0 without it.
    x, t = normal(1, 512, 256, dtype="float16"), integers(2, 256, 512)
    scaled = lambda x, g: jax.grad(lambda x: g * lk.cross_entropy(x, t, grad_scale=g))(x)
    exact = exactly(lambda x: exact_entropy(x, t)[0], x, upstream=jnp.float32(65536))[1][0]
    close("float16 with a loss scale", scaled(x, jnp.float32(65536)), exact)
    f = lambda x, g: jax.value_and_grad(lambda x: g * lk.cross_entropy(x, t, grad_scale=g))(x)
    calls = calls_in(f, x, jnp.float32(8))
    check("float16 in one call", calls == [("cross_entropy_forward_backward_f16", "logits target upstream",
                                            "loss dlogits workspace")], calls)
    text = jax.jit(f).lower(x, jnp.float32(8)).compile().as_text()
    check("its gradients are scaled in place", 'custom_call_target="lk_rescale_f16"' in text and " copy(" not in text and
          " conditional(" not in text and "output_to_operand_aliasing={{}: (0, {})}" in text, text)
    loss, pull = jax.vjp(lambda x: lk.cross_entropy(x, t, grad_scale=2.0), x.astype(jnp.float32))
    first, second, third = (pull(jnp.float32(u))[0] for u in (2, 6, 2))
    check("the gradient can be pulled again", np.array_equal(first, third) and np.allclose(3 * first, second, rtol=1e-6))
    plain = jax.grad(lambda x: lk.cross_entropy(x, t, aux=("lse",))[0])(x)
    equal("beside lse", jax.grad(lambda x: lk.cross_entropy(x, t, grad_scale=3.0, aux=("lse",))[0])(x), plain)


# ---- All ops under JAX's transformations -------------------------------------------------------------------------------------


def functions():
    """name: (f, arrays with a dimension to map over, other arrays): f works on one slice of the first."""
    t, ids = jnp.asarray(integers(3, 16, 4, 6)), jnp.asarray(integers(4, 16, 4, 6, 4))
    w, m, theta = normal(1, 16), normal(2, 20, 16), normal(3, 3, 16)
    x, freq = normal(4, 4, 6, 16), jnp.asarray(0.5 ** np.arange(8), jnp.float32)
    return {
        "logsumexp": (lambda x: lk.logsumexp(x, -1), (x,), ()),
        "logsumexp axis 0": (lambda x: lk.logsumexp(x, 0), (x,), ()),
        "kl": (lambda x: lk.kl(x, normal(8, 6, 16), "none", divergence="reverse"), (x,), ()),
        "linear_kl": (lambda x, m: lk.linear_kl(x, m, normal(8, 6, 16), normal(9, 20, 16), "none"), (x,), (m,)),
        "linear_kl mean": (lambda x, m: lk.linear_kl(x, m, normal(8, 6, 16), normal(9, 20, 16)), (x,), (m,)),
        "cross_entropy none": (lambda x, t: lk.cross_entropy(x, t, reduction="none"), (x, t), ()),
        "cross_entropy aux": (lambda x, t: lk.cross_entropy(x, t, reduction="none", aux=("lse", "argmax")), (x, t), ()),
        "cross_entropy lse alone": (lambda x, t: lk.cross_entropy(x, t, reduction="none", aux=("lse",))[1]["lse"], (x, t), ()),
        "cross_entropy mean": (lambda x, t: lk.cross_entropy(x, t, label_smoothing=0.1), (x, t), ()),
        "cross_entropy none row_weight": (lambda x, t: lk.cross_entropy(
            x, t, reduction="none", row_weight=jax.lax.stop_gradient(x[..., 0])), (x, t), ()),
        "cross_entropy mean denominator": (lambda x, t, d: lk.cross_entropy(x, t, denominator=d), (x, t), (jnp.int32(5),)),
        "cross_entropy mean grad_scale": (lambda x, t, g: lk.cross_entropy(x, t, grad_scale=g), (x, t), (jnp.int32(3),)),
        "cross_entropy_ids none": (lambda x, i: lk.cross_entropy_ids(x, i, normal(8, 6, 4), reduction="none"), (x, ids), ()),
        "cross_entropy_ids logp alone": (lambda x, i: lk.cross_entropy_ids(x, i, reduction="none").logp, (x, ids), ()),
        "cross_entropy_ids of the same logits": (lambda i, x: lk.cross_entropy_ids(x, i, reduction="none"), (ids,), (x[0],)),
        "cross_entropy_ids mean": (lambda x, i, d: lk.cross_entropy_ids(x, i, denominator=d), (x, ids), (jnp.int32(5),)),
        "linear entropy": (lambda x, t, m: lk.linear_cross_entropy(x, m, t, reduction="none", aux=("entropy", "argmax")),
                           (x, t), (m,)),
        "linear entropy alone": (lambda x, t, m: lk.linear_cross_entropy(x, m, t, reduction="none", aux=("entropy",))[1][
            "entropy"], (x, t), (m,)),
        "linear none": (lambda x, t, m: lk.linear_cross_entropy(x, m, t, reduction="none"), (x, t), (m,)),
        "linear none logit_scale": (lambda x, t, m, s: lk.linear_cross_entropy(x, m, t, reduction="none", logit_scale=s), (x, t),
                                    (m, jnp.int32(2))),  # whole: a gradient's sum depends on what XLA fuses
        "linear mean": (lambda x, t, m: lk.linear_cross_entropy(x, m, t), (x, t), (m,)),
        "linear_cross_entropy_ids": (lambda x, i, m: lk.linear_cross_entropy_ids(x, m, i, normal(8, 6, 4), reduction="none"), (
            x, ids), (m,)),
        "linear_cross_entropy_ids tail": (lambda x, i, m: lk.linear_cross_entropy_ids(
            x, m, i, tail_weight=jax.lax.stop_gradient(x[..., 0]), reduction="none"), (x, ids), (m,)),
        "linear_cross_entropy_ids tail alone": (lambda x, i, m: lk.linear_cross_entropy_ids(
            x, m, i, reduction="none", tail=True).tail, (x, ids), (m,)),
        "linear_cross_entropy_ids of the same x": (lambda i, x, m: lk.linear_cross_entropy_ids(x, m, i, reduction="none"), (ids,), (
            x[0], m)),
        "md_lrpe_cosine": (lambda x, theta: lk.md_lrpe_cosine(x, theta, 2, activation="silu"), (x.reshape(4, 3, 2, 16),),
                           (theta,)),
        "md_lrpe_cosine offset": (lambda x, theta, o: lk.md_lrpe_cosine(x, theta, 2, offset=o), (x.reshape(4, 3, 2, 16),),
                                  (theta, jnp.int32(1000))),
        "glu": (lambda x, r, w: lk.glu(x, r, row_weight=w), (x, x[::-1]), (normal(8, 6),)),
        "glu halves": (lambda x: lk.glu(x, None, "gelu"), (x,), ()),
        "glu in turns": (lambda x, w: lk.glu(x, interleaved=True, row_weight=w), (x, x[..., 0]), ()),
        "glu one up": (lambda x, r: lk.glu(x, r), (x,), (x[0],)),
        "rope": (lambda q, k: lk.rope(q[:, None], k[:, None], inv_freq=freq, offset=3), (x, x[::-1]), ()),
        "rope norms": (lambda q, v, u: lk.rope(q.reshape(3, 2, 16), q.reshape(3, 2, 16), inv_freq=freq, heads_first=True,
                                               q_weight=v, k_weight=u), (x,), (w, normal(6, 16))),
        "rope positions": (lambda q, n: lk.rope(q[:, None], inv_freq=freq, position=n), (x, ids[..., 0]), ()),
        "rope offset": (lambda q, n: lk.rope(q[:, None], inv_freq=freq, offset=n), (x, ids[:, 0, 0]), ()),
        "rope axes": (lambda q, n: lk.rope(q.reshape(2, 1, 3, 16), inv_freq=freq, position=n, heads_first=True,
                                           interleaved=True, pair_axis=jnp.arange(8, dtype="int32") % 2),
                      (x, ids[:, :, :2].reshape(4, 2, 2, 3)), ()),
        "rope tables": (lambda q, n: lk.rope(q.reshape(2, 3, 1, 16), cos=jnp.cos(n.reshape(2, 3, 4) / 3),
                                             sin=jnp.sin(n.reshape(2, 3, 4) / 3), rotary_dim=8), (x, ids), ()),
        "rope one table": (lambda q: lk.rope(q[:, None], cos=normal(8, 6, 8), sin=normal(9, 6, 8)), (x,), ()),
        "rms_norm heads": (lambda x, w, b: lk.rms_norm(x, w, bias=b), (x,), (normal(6, 6, 16), normal(7, 6, 16))),
        "rms_norm": (lambda x, w: lk.rms_norm(x, w), (x,), (w,)),
        "add_rms_norm sum alone": (lambda x, r: lk.add_rms_norm(x, r)[1], (x, x[::-1]), ()),
        "add_rms_norm": (lambda x, r, w: lk.add_rms_norm(x, r, w), (x, x[::-1]), (w,)),
    }


def equal(name, a, b):
    notes = []
    for i, (u, v) in enumerate(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)):
        if not np.array_equal(u, v):
            off = np.abs(np.asarray(u, np.float64) - np.asarray(v, np.float64)) if u.shape == v.shape else np.array([np.nan])
            notes.append(f"result {i}, {u.shape} and {v.shape}: {np.count_nonzero(off)} differ, by up to {off.max():.3g} of "
                         f"{np.abs(np.asarray(v, np.float64)).max():.3g}")
    check(name, not notes, "; ".join(notes))


def near(name, a, b):
    """Equal up to the order of sums, which depends on the number of rows.

    A gradient has the cosine of a result in it. For a result of up to 60, whose sums differ by a few 2^-24 of it, the cosines differ by
    some 2^-17, so gradients get twice the limit of values. The loss of four ids is the sum of four such results, and close's 2^-18
    is for less: 64 units of 2^-24 are as much again. The gradient of an entropy is p times a difference, log p + entropy, in which an
    error of a logit counts in full, and matmuls of another number of rows have other errors: on an H200 against float64, a slice alone
    1.7e-6, in a batch 6.9e-6 of the norm.
    """
    limit = 4 if " gradient" not in name else 64 if "_ids" in name or "entropy alone" in name else 8
    for i, (u, v) in enumerate(zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)):
        close(f"{name}, {i}", u.astype(jnp.float32), v, limit)


def gradients(f):
    """f's gradients of its float arguments, by a loss that uses all float results."""
    def floats(arrays):
        return [i for i, a in enumerate(arrays) if jnp.issubdtype(a.dtype, jnp.floating)]

    def loss(*arrays):
        results = jax.tree.leaves(f(*arrays))
        return sum(jnp.sin(results[i]).sum() for i in floats(results))
    return lambda *arrays: jax.grad(loss, floats(arrays))(*arrays)


BY_XLA = ("linear_kl mean",)  # XLA sums these losses, in an order that may differ from program to program on a GPU


def transforms():
    x, w, t = normal(1, 4, 9, 16), normal(2, 20, 16), np.stack([integers(i, 20, 9) for i in range(4)])
    t[:, 5:] = -100  # 5 of 9 tokens of each element count, so max_counted is a bound for each element alone
    f = lambda v, u: lk.linear_cross_entropy(v, w, u, reduction="none", max_counted=5)
    near("max_counted vmap", jax.vmap(f)(x, t), jnp.stack([f(x[i], t[i]) for i in range(4)]))
    g = lambda v, u: jax.grad(lambda v: f(v, u).sum())(v)
    near("max_counted gradient vmap", jax.vmap(g)(x, t), jnp.stack([g(x[i], t[i]) for i in range(4)]))
    f = lambda v, u: lk.linear_cross_entropy_ids(v, w, jnp.stack([u, u // 2 * (u >= 0) - 100 * (u < 0)], 1), max_counted=5).logp
    near("max_counted _ids vmap", jax.vmap(f)(x, t), jnp.stack([f(x[i], t[i]) for i in range(4)]))
    f = lambda v, u: lk.linear_kl(v, w, v + 1, w, "none", row_weight=(u >= 0).astype("float32"), max_counted=5)
    near("max_counted linear_kl vmap", jax.vmap(f)(x, t), jnp.stack([f(x[i], t[i]) for i in range(4)]))
    for name, (f, mapped, others) in functions().items():
        slices = [tuple(a[i] for a in mapped) for i in range(4)]
        axes = (0,) * len(mapped) + (None,) * len(others)
        for what, g in (("value", f), ("gradient", gradients(f))):
            jitted, same = jax.jit(g), near if name in BY_XLA else equal
            each = [jitted(*s, *others) for s in slices]
            stacked = jax.tree.map(lambda *a: jnp.stack(a), *each)
            same(f"{name} {what} without jit", g(*slices[0], *others), each[0])
            same(f"{name} {what} scan", jax.lax.scan(lambda c, s: (c, g(*s, *others)), 0, mapped)[1], stacked)
            near(f"{name} {what} vmap", jax.jit(jax.vmap(g, axes))(*mapped, *others), stacked)
            pairs = tuple(a.reshape(2, 2, *a.shape[1:]) for a in mapped)
            near(f"{name} {what} vmap of vmap", jax.jit(jax.vmap(jax.vmap(g, axes), axes))(*pairs, *others), jax.tree.map(
                lambda a: a.reshape(2, 2, *a.shape[1:]), stacked))
            ends = tuple(-1 if a is None else None for a in axes)  # the others mapped, along their last axis
            if others:
                both = tuple(jnp.stack([o, 2 * o], -1) for o in others)
                near(f"{name} {what} vmap over weights", jax.jit(jax.vmap(g, ends))(*slices[0], *both), jax.tree.map(
                    lambda *a: jnp.stack(a), each[0], jitted(*slices[0], *(2 * o for o in others))))
        if "mean" not in name:  # one call for all elements; a reduced loss has one call each, in a loop
            check(f"{name} vmap is one call", len(calls_in(jax.vmap(f, axes), *mapped, *others)) == 1 and
                  " while(" not in jax.jit(jax.vmap(f, axes)).lower(*mapped, *others).compile().as_text())
        same(f"{name} gradient checkpoint", jax.jit(gradients(jax.checkpoint(f)))(*slices[0], *others), each[0])
        total = lambda *a: jax.tree.map(lambda r: r.sum(), jax.vmap(f, axes)(*a))
        floats = lambda g: [a for a in jax.tree.leaves(g) if a.dtype == jnp.float32]
        several = floats(jax.jit(gradients(total))(*mapped, *others))
        check(f"{name} gradient of vmap", all(bool(jnp.isfinite(a).all()) and bool(a.any()) for a in several))
    x, w = normal(1, 4, 16), normal(2, 16)
    stack = normal(5, 3, 16)
    all_layers = lambda f: lambda v, ws: jax.lax.scan(lambda c, w: (f(c, w), None), v, ws)[0].sum()
    layers = lambda f: jax.jit(jax.grad(all_layers(f), (0, 1)))(x, stack)
    ours, by_hand = layers(lk.rms_norm), layers(lambda v, m: exact_norm(v, None, m)[0])
    for i in range(2):
        close(f"scan over layers, gradient {i}", ours[i], by_hand[i], 32)


def mistakes():
    x, t, w = normal(1, 4, 8), jnp.zeros(4, jnp.int32), normal(2, 8)
    m, theta, z = normal(3, 6, 8), normal(4, 3, 8), normal(5, 2, 3, 4, 8)
    h, f4, table, at = z, normal(6, 4), normal(7, 3, 8), jnp.asarray(integers(8, 99, 2, 3))
    wide = np.zeros((4, 8), np.int32)
    scalar = jnp.float32(0.5)
    for kind, expected, f in [
        (TypeError, "x is int32; it must be float32, float16 or bfloat16", lambda: lk.rms_norm(wide)),
        (ValueError, "weight has the shape (7,); it must have (8,)", lambda: lk.rms_norm(x, w[:7])),
        (TypeError, "weight is bfloat16; it must be float32", lambda: lk.rms_norm(x, w.astype(jnp.bfloat16))),
        (ValueError, "eps is -1", lambda: lk.rms_norm(x, w, -1.0)),
        (TypeError, "gate is int32; it must be float32, float16 or bfloat16", lambda: lk.glu(wide)),
        (ValueError, "gate has the shape ()", lambda: lk.glu(jnp.float32(1))),
        (ValueError, "gate has the shape (4, 7); without up it has both", lambda: lk.glu(x[:, :7])),
        (ValueError, "up has the shape (8,); it must have (4, 8)", lambda: lk.glu(x, w)),
        (TypeError, "up is bfloat16; it must be float32, as gate is", lambda: lk.glu(x, x.astype(jnp.bfloat16))),
        (TypeError, "up is of the type str", lambda: lk.glu(x, "gelu")),
        (ValueError, "up is given; with interleaved", lambda: lk.glu(x, x, interleaved=True)),
        (ValueError, "activation is 'swish'; it must be one of 'silu', 'gelu'", lambda: lk.glu(x, x, "swish")),
        (ValueError, "activation is None", lambda: lk.glu(x, x, None)),
        (ValueError, "alpha is 1.702; it is for activation 'silu'", lambda: lk.glu(x, x, "gelu", alpha=1.702)),
        (ValueError, "alpha is 0", lambda: lk.glu(x, alpha=1e-50)),
        (ValueError, "alpha is nan", lambda: lk.glu(x, alpha=float("nan"))),
        (ValueError, "limit is 0", lambda: lk.glu(x, limit=0)),
        (ValueError, "limit is -7", lambda: lk.glu(x, limit=-7)),
        (ValueError, "up_offset is inf", lambda: lk.glu(x, up_offset=float("inf"))),
        (TypeError, "limit is '7'", lambda: lk.glu(x, limit="7")),
        (TypeError, "interleaved is 2", lambda: lk.glu(x, interleaved=2)),
        (ValueError, "row_weight has the shape (8,); it must have (4,)", lambda: lk.glu(x, row_weight=w)),
        (TypeError, "alpha is traced", lambda: jax.grad(lambda a: lk.glu(x, alpha=a).sum())(0.5)),
        (TypeError, "q is int32; it must be float32, float16 or bfloat16", lambda: lk.rope(wide, inv_freq=f4)),
        (TypeError, "k is of the type str", lambda: lk.rope(h, "k", inv_freq=f4)),
        (ValueError, "q has the shape (4, 8); it must be [batch, tokens, heads, dim]", lambda: lk.rope(x, inv_freq=f4)),
        (ValueError, "it must be [batch, heads, tokens, dim]", lambda: lk.rope(x, inv_freq=f4, heads_first=True)),
        (ValueError, "k has the shape (2, 2, 4, 8), and q (2, 3, 4, 8)", lambda: lk.rope(h, h[:, :2], inv_freq=f4)),
        (ValueError, "they may differ in heads alone", lambda: lk.rope(h, h[:, :, :2], inv_freq=f4, heads_first=True)),
        (ValueError, "k has the shape (3, 4, 8)", lambda: lk.rope(h, h[0], inv_freq=f4)),
        (TypeError, "k is bfloat16; it must be float32, as q is", lambda: lk.rope(h, h.astype(jnp.bfloat16), inv_freq=f4)),
        (ValueError, "rotary_dim is 7; it must be even", lambda: lk.rope(h[..., :7], inv_freq=f4)),
        (ValueError, "rotary_dim is 10; it must be even, above 0, and at most dim, which is 8",
         lambda: lk.rope(h, inv_freq=f4, rotary_dim=10)),
        (ValueError, "rotary_dim is 0", lambda: lk.rope(h, inv_freq=f4, rotary_dim=0)),
        (ValueError, "inv_freq is needed, or cos and sin", lambda: lk.rope(h)),
        (ValueError, "inv_freq is given, and so are cos and sin", lambda: lk.rope(h, inv_freq=f4, cos=z[0, 0], sin=z[0, 0])),
        (ValueError, "cos is given without sin", lambda: lk.rope(h, cos=table)),
        (ValueError, "sin is given without cos", lambda: lk.rope(h, inv_freq=f4, sin=table)),
        (ValueError, "inv_freq has the shape (8,); with rotary_dim 8 it must have (4,)", lambda: lk.rope(h, inv_freq=w)),
        (TypeError, "inv_freq is bfloat16; it must be float32", lambda: lk.rope(h, inv_freq=f4.astype(jnp.bfloat16))),
        (ValueError, "position has the shape (2, 2); it must be [3], [2 or 1, 3]",
         lambda: lk.rope(h, inv_freq=f4, position=at[:, :2])),
        (TypeError, "position is float32; it must be int32 or int64", lambda: lk.rope(h, inv_freq=f4, position=at * 1.0)),
        (ValueError, "position is for inv_freq", lambda: lk.rope(h, cos=table, sin=table, position=at)),
        (ValueError, "offset is 3; it is for inv_freq without position",
         lambda: lk.rope(h, inv_freq=f4, position=at, offset=3)),
        (ValueError, "offset is 3; it is for inv_freq without position", lambda: lk.rope(h, cos=table, sin=table, offset=3)),
        (ValueError, "offset is 2.14748e+09", lambda: lk.rope(h, inv_freq=f4, offset=2**31)),
        (TypeError, "offset is 0.5; it must be a whole number", lambda: lk.rope(h, inv_freq=f4, offset=0.5)),
        (TypeError, "offset is float32; it must be a whole number", lambda: lk.rope(h, inv_freq=f4, offset=scalar)),
        (ValueError, "offset has the shape (4,); it must be one number", lambda: lk.rope(h, inv_freq=f4, offset=t)),
        (ValueError, "position has 2 axes, so pair_axis is needed",
         lambda: lk.rope(h, inv_freq=f4, position=jnp.stack([at, at]))),
        (ValueError, "position has 9 axes; it must have 1 to 8", lambda: lk.rope(h, inv_freq=f4, position=jnp.stack([at] * 9))),
        (ValueError, "pair_axis is for a position of", lambda: lk.rope(h, inv_freq=f4, pair_axis=t)),
        (TypeError, "pair_axis is float32; it must be int32", lambda: lk.rope(h, inv_freq=f4, position=at[None], pair_axis=f4)),
        (ValueError, "pair_axis has the shape (3,)", lambda: lk.rope(h, inv_freq=f4, position=at[None], pair_axis=t[:3])),
        (ValueError, "cos has the shape (3, 6); it must be [3, 4 or 8] or [2 or 1, 3, 4 or 8]",
         lambda: lk.rope(h, cos=table[:, :6], sin=table)),
        (ValueError, "cos has the shape (3, 3, 8)", lambda: lk.rope(h, cos=jnp.stack([table] * 3), sin=table)),
        (ValueError, "sin has the shape (3, 4); it must have (3, 8), as cos has",
         lambda: lk.rope(h, cos=table, sin=table[:, :4])),
        (TypeError, "cos is bfloat16; it must be float32", lambda: lk.rope(h, cos=table.astype(jnp.bfloat16), sin=table)),
        (TypeError, "sin is bfloat16; it must be float32, as cos is",
         lambda: lk.rope(h, cos=table, sin=table.astype(jnp.bfloat16))),
        (ValueError, "q_weight has the shape (4,); it must have (8,)", lambda: lk.rope(h, inv_freq=f4, q_weight=f4)),
        (TypeError, "q_weight is bfloat16; it must be float32",
         lambda: lk.rope(h, inv_freq=f4, q_weight=w.astype(jnp.bfloat16))),
        (ValueError, "k_weight is given without k", lambda: lk.rope(h, inv_freq=f4, k_weight=w)),
        (TypeError, "k_weight is float32; it must be float16, as q_weight is", lambda: lk.rope(
            h.astype(jnp.float16), h.astype(jnp.float16), inv_freq=f4, q_weight=w.astype(jnp.float16), k_weight=w)),
        (ValueError, "dim is 258; it must be 1 to 256", lambda: lk.rope(jnp.zeros((1, 1, 258)), inv_freq=jnp.zeros(129),
                                                                        q_weight=jnp.zeros(258))),
        (ValueError, "scale is 0", lambda: lk.rope(h, inv_freq=f4, scale=0)),
        (ValueError, "scale is nan", lambda: lk.rope(h, inv_freq=f4, scale=float("nan"))),
        (ValueError, "eps is -1", lambda: lk.rope(h, inv_freq=f4, eps=-1.0, q_weight=w)),
        (TypeError, "scale is traced", lambda: jax.grad(lambda a: lk.rope(h, inv_freq=f4, scale=a).sum())(0.5)),
        (TypeError, "heads_first is 2", lambda: lk.rope(h, inv_freq=f4, heads_first=2)),
        *((TypeError, f"{name} would need a gradient, and gets none; give jax.lax.stop_gradient of it",
           lambda name=name, a=a, more=more: jax.grad(lambda a: lk.rope(h, **{name: a}, **more).sum())(a))
          for name, a, more in (("inv_freq", f4, {}), ("cos", table, dict(sin=table)), ("sin", table, dict(cos=table)))),
        (ValueError, "residual has the shape (4, 7)", lambda: lk.add_rms_norm(x, x[:, :7])),
        (ValueError, "x has the shape ()", lambda: lk.rms_norm(jnp.float32(1))),
        (ValueError, "cols is 0", lambda: lk.rms_norm(jnp.zeros((4, 0)))),
        (TypeError, "targets is float32; it must be int32, int64 or uint8", lambda: lk.cross_entropy(x, w)),
        (ValueError, "targets has the shape (3,)", lambda: lk.cross_entropy(x, t[:3])),
        (ValueError, "label_smoothing is 2", lambda: lk.cross_entropy(x, t, label_smoothing=2.0)),
        (ValueError, "softcap is -1", lambda: lk.cross_entropy(x, t, softcap=-1.0)),
        (ValueError, "z_loss is", lambda: lk.cross_entropy(x, t, z_loss=float("nan"))),
        (ValueError, "logit_scale is 0", lambda: lk.cross_entropy(x, t, logit_scale=0)),
        (ValueError, "reduction is 'max'; it must be one of 'none', 'mean', 'sum'",
         lambda: lk.cross_entropy(x, t, reduction="max")),
        (ValueError, "aux has 'loss'", lambda: lk.cross_entropy(x, t, aux=("loss",))),
        (ValueError, "class_weight has the shape (8, 1)", lambda: lk.cross_entropy(x, t, class_weight=w[:, None])),
        (ValueError, "vocab is 0", lambda: lk.cross_entropy(jnp.zeros((4, 0)), t)),
        (ValueError, "weight has the shape (6, 7); it must have (6, 8)", lambda: lk.linear_cross_entropy(x, m[:, :7], t)),
        (TypeError, "weight is float16; it must be float32", lambda: lk.linear_cross_entropy(x, m.astype(jnp.float16), t)),
        (ValueError, "bias has the shape (8,); it must have (6,)", lambda: lk.linear_cross_entropy(x, m, t, bias=w)),
        (ValueError, "max_counted is -1", lambda: lk.linear_cross_entropy(x, m, t, max_counted=-1)),
        (ValueError, "max_counted is 0", lambda: lk.linear_cross_entropy_ids(x, m, t[:, None], max_counted=0)),
        (ValueError, "aux has 'rank'", lambda: lk.linear_cross_entropy(x, m, t, aux=("rank",))),
        (ValueError, "batch_invariant needs", lambda: lk.linear_cross_entropy(x, m, t, batch_invariant=True)),
        (ValueError, "reduction is 'sum'; with a denominator it must be 'mean'",
         lambda: lk.cross_entropy(x, t, reduction="sum", denominator=3)),
        (ValueError, "denominator has the shape (8,)", lambda: lk.cross_entropy(x, t, denominator=w)),
        (ValueError, "row_weight has the shape (8,); it must have (4,)", lambda: lk.cross_entropy(x, t, row_weight=w)),
        (ValueError, "row_weight has the shape (); it must have (4,)", lambda: lk.linear_cross_entropy(x, m, t, row_weight=2.0)),
        (ValueError, "workspace_mib is 9.53674e-07; linear_cross_entropy_forward_f32 of these sizes needs",
         lambda: lk.linear_cross_entropy(x, m, t, workspace_mib=1e-6)),
        (ValueError, "workspace_mib is 0", lambda: lk.linear_cross_entropy(x, m, t, workspace_mib=0)),
        (ValueError, "axis 2 does not exist", lambda: lk.logsumexp(x, 2)),
        (ValueError, "axis is (0, 2); lk sums over axes that are neighbours", lambda: lk.logsumexp(z, (0, 2))),
        (ValueError, "scale is 0", lambda: lk.logsumexp(x, scale=0)),
        (ValueError, "scale is", lambda: lk.logsumexp(x, scale=float("inf"))),
        (TypeError, "dtype is float16; it must be float32", lambda: lk.logsumexp(x, dtype="float16")),
        (ValueError, "x has the shape (4, 8)", lambda: lk.md_lrpe_cosine(x, theta, 4)),
        (ValueError, "4 tokens; prefix and shape ask for 5", lambda: lk.md_lrpe_cosine(z, theta, 5)),
        (ValueError, "theta has the shape (2, 8); it must have (3, 8)", lambda: lk.md_lrpe_cosine(z, theta[:2], 4)),
        (ValueError, "e is 3", lambda: lk.md_lrpe_cosine(z, theta[:, :3], 4)),
        (ValueError, "activation is 'gelu'", lambda: lk.md_lrpe_cosine(z, theta, 4, activation="gelu")),
        (ValueError, "layout is 'BTDH'", lambda: lk.md_lrpe_cosine(z, theta, 4, layout="BTDH")),
        (ValueError, "must have 1 to 8 axes", lambda: lk.md_lrpe_cosine(z, theta, (1,) * 9)),
        (ValueError, "as many axes as shape", lambda: lk.md_lrpe_cosine(z, theta, (2, 2), offset=(1,))),
        (TypeError, "target_ids is float32; it must be int32, int64 or uint8", lambda: lk.cross_entropy_ids(x, x)),
        (ValueError, "target_ids has the shape (3, 2); the shape of logits asks for (4,) and the number of ids",
         lambda: lk.cross_entropy_ids(x, wide[:3, :2])),
        (ValueError, "target_ids has the shape (4,); the shape of logits", lambda: lk.cross_entropy_ids(x, t)),
        (ValueError, "target_weight has the shape (4, 7); it must have (4, 8)", lambda: lk.cross_entropy_ids(x, wide, x[:, :7])),
        (ValueError, "ids_per_row is 0", lambda: lk.cross_entropy_ids(x, wide[:, :0])),
        (ValueError, "ids_per_row is 129", lambda: lk.cross_entropy_ids(x, np.zeros((4, 129), np.int32))),
        (ValueError, "vocab is 0", lambda: lk.cross_entropy_ids(x[:, :0], wide)),
        (ValueError, "row_weight has the shape (8,); it must have (4,)", lambda: lk.cross_entropy_ids(x, wide, row_weight=w)),
        (ValueError, "with a denominator it must be 'mean'", lambda: lk.cross_entropy_ids(x, wide, reduction="sum", denominator=3)),
        (ValueError, "logit_scale has the shape (3,); it must be one number, or have (4,), one for each row",
         lambda: lk.cross_entropy_ids(x, wide, logit_scale=jnp.ones(3))),
        # Numbers that are part of the program.
        *((TypeError, f"{name} is traced, by jit or grad; it must be a number of Python", lambda name=name, how=how: how(
            lambda s: lk.cross_entropy(x, t, **{name: s}))(0.5)) for name in ("softcap", "label_smoothing")
          for how in (jax.jit, jax.grad)),
        (TypeError, "eps is traced", lambda: jax.grad(lambda e: lk.rms_norm(x, w, e).sum())(0.5)),
        (TypeError, "ignore_index is traced", lambda: jax.jit(lambda i: lk.cross_entropy(x, t, ignore_index=i))(3)),
        (TypeError, "prefix is traced", lambda: jax.jit(lambda i: lk.md_lrpe_cosine(z, theta, 4, i))(0)),
        (TypeError, "softcap is 'big'; it must be a number", lambda: lk.cross_entropy(x, t, softcap="big")),
        (TypeError, "eps is None; it must be a number", lambda: lk.rms_norm(x, w, None)),
        (TypeError, "ignore_index is 2.5; it must be a whole number", lambda: lk.cross_entropy(x, t, ignore_index=2.5)),
        (ValueError, "batch_invariant is given; with out_dtype there is none",
         lambda: lk.rms_norm(x, batch_invariant=True, out_dtype=jnp.float8_e4m3fn)),
        (ValueError, "batch_invariant is given; with out_dtype there is none",
         lambda: lk.add_rms_norm(x, x, batch_invariant=True, out_dtype=jnp.float8_e4m3fn)),
        (TypeError, "round_sum is 2; it must be True or False", lambda: lk.add_rms_norm(x, x, round_sum=2)),
        *((TypeError, "batch_invariant is 2; it must be True or False", f) for f in (
            lambda: lk.rms_norm(x, batch_invariant=2), lambda: lk.kl(x, x, batch_invariant=2),
            lambda: lk.cross_entropy(x, t, batch_invariant=2))),
        (TypeError, "max_counted is 1.5; it must be a whole number", lambda: lk.linear_cross_entropy(x, m, t, max_counted=1.5)),
        (TypeError, "shape is 4.0; it must be a whole number", lambda: lk.md_lrpe_cosine(z, theta, 4.0)),
        (TypeError, "offset is 1.5; it must be a whole number", lambda: lk.md_lrpe_cosine(z, theta, 4, offset=1.5)),
        (TypeError, "offset is float32; it must be of whole numbers", lambda: lk.md_lrpe_cosine(z, theta, 4, offset=scalar)),
        (ValueError, "offset[0] 2147483645 and shape[0] 4 make a position outside (-2^31, 2^31)",
         lambda: lk.md_lrpe_cosine(z, theta, 4, offset=2**31 - 3)),
        # Numbers that are operands.
        (ValueError, "logit_scale has the shape (3,); it must be one number, or have (4,), one for each target",
         lambda: lk.cross_entropy(x, t, logit_scale=jnp.ones(3))),
        (ValueError, "with a bias it must be one number",
         lambda: lk.linear_cross_entropy(x, m, t, bias=m[:, 0], logit_scale=jnp.ones(4))),
        (ValueError, "z_loss has the shape (4,); it must be one number", lambda: lk.cross_entropy(x, t, z_loss=jnp.ones(4))),
        (ValueError, "temperature is 0.0; it must be above 0", lambda: lk.cross_entropy(x, t, temperature=0)),
        (TypeError, "temperature is an array, and there is a softcap",
         lambda: lk.cross_entropy(x, t, temperature=scalar, softcap=3.0)),
        (ValueError, "reduction is 'none'; with a grad_scale it must be 'mean' or 'sum'",
         lambda: lk.cross_entropy(x, t, reduction="none", grad_scale=2)),
        (ValueError, "grad_scale is 0", lambda: lk.cross_entropy(x, t, grad_scale=0)),
        (ValueError, "grad_scale has the shape (4,)", lambda: lk.linear_cross_entropy(x, m, t, grad_scale=jnp.ones(4))),
        # Gradients that are not there.
        *((TypeError, f"{name} would need a gradient, and gets none; give jax.lax.stop_gradient of it",
           lambda name=name, a=a, f=f: jax.grad(lambda a: f(**{name: a}))(a))
          for f, columns in ((functools.partial(lk.cross_entropy, x, t), 8),
                             (functools.partial(lk.linear_cross_entropy, x, m, t), 6))
          for name, a in (("class_weight", jnp.ones(columns)), ("denominator", scalar), ("grad_scale", scalar),
                          ("row_weight", jnp.ones(4)))),
        *((TypeError, f"{name} would need a gradient, and gets none; give jax.lax.stop_gradient of it",
           lambda name=name, a=a: jax.grad(lambda a: lk.cross_entropy_ids(x, wide, **{name: a}).loss)(a))
          for name, a in (("target_weight", jnp.ones((4, 8))), ("denominator", scalar), ("row_weight", jnp.ones(4)))),
        # Norms.
        (ValueError, "weight has the shape (3, 8); it must have (8,)", lambda: lk.rms_norm(x, m[:3])),
        (ValueError, "weight and bias have the shapes [(8,), (4, 8)]; they must have one", lambda: lk.rms_norm(x, w, bias=x)),
        (TypeError, "they must have one type", lambda: lk.rms_norm(x.astype(jnp.float16), w, bias=w.astype(jnp.float16))),
        (TypeError, "weight_offset is '1'", lambda: lk.rms_norm(x, w, weight_offset="1")),
        # Arguments of other kinds.
        (TypeError, "tf32 is 'no'; it must be True or False", lambda: lk.linear_cross_entropy(x, m, t, tf32="no")),
        (TypeError, "aux is 'lse'; it must be a tuple of names", lambda: lk.cross_entropy(x, t, aux="lse")),
        (ValueError, "reduction is ['mean']; it must be one of", lambda: lk.cross_entropy(x, t, reduction=["mean"])),
        (TypeError, "axis is 1.5; it must be a whole number", lambda: lk.logsumexp(x, 1.5)),
        (TypeError, "dtype is 'word'; it must be a type of arrays", lambda: lk.logsumexp(x, dtype="word")),
        (ValueError, "workspace_mib is inf; it must be above 0, and finite",
         lambda: lk.linear_cross_entropy(x, m, t, workspace_mib=float("inf"))),
        (ValueError, "axis_name is 3, and there is no such axis here", lambda: lk.cross_entropy(x, t, axis_name=3)),
        (TypeError, "denominator is complex64; it must be of real numbers",
         lambda: lk.cross_entropy(x, t, denominator=jnp.complex64(1))),
        (ValueError, "targets has a number outside of int32", lambda: lk.cross_entropy(x, np.full(4, 2**40))),
        (ValueError, "targets: Python integer 1099511627776 out of bounds", lambda: lk.cross_entropy(x, [2**40] * 4)),
    ]:
        for how, call in (("", f), ("under jit: ", jax.jit(f))):
            try:
                jax.block_until_ready(call())
                check(how + expected, False, "no error")
            except (TypeError, ValueError) as error:
                check(how + expected, type(error) is kind and expected in str(error), f"a {type(error).__name__}: {error}")
    loss = jax.grad(lambda c: lk.cross_entropy(x, t, class_weight=jax.lax.stop_gradient(c)))
    check("stop_gradient of class_weight", not loss(jnp.ones(8)).any())
    # LK_CHECK_TARGETS=1: bad targets raise, at once or when the program runs.
    os.environ["LK_CHECK_TARGETS"] = "1"
    logging.getLogger("jax._src.debugging").setLevel(logging.CRITICAL)  # it prints the exceptions of callbacks
    try:
        for ops, end in ((lambda t, **o: lk.cross_entropy(x, t, **o), 8),
                         (lambda t, **o: lk.linear_cross_entropy(x, m, t, **o), 6)):
            for bad in (end, -1, -100, 2**31 - 1):
                targets, options = t.at[2].set(bad), {"ignore_index": None} if bad == -100 else {}
                ignored = "" if options else " or ignore_index, -100"
                expected = f"targets[2] is {bad}; it must be in [0, {end}){ignored}"
                for how, f, kind in (("", lambda t: ops(t, **options), ValueError),
                                     ("under jit: ", jax.jit(lambda t: ops(t, **options)), jax.errors.JaxRuntimeError)):
                    try:
                        jax.block_until_ready(f(targets))
                        jax.effects_barrier()
                        check(how + expected, False, "no error")
                    except (ValueError, jax.errors.JaxRuntimeError) as error:
                        check(how + expected, type(error) is kind and expected in str(error), f"{type(error)}: {error}")
            good = t.at[1].set(-100)
            check("good targets", all(bool(jnp.isfinite(f(good))) for f in (ops, jax.jit(ops), jax.jit(lambda t: jax.vmap(ops)(
                t[None])[0]))))
        weigh = lambda i, w: lk.cross_entropy_ids(x, i, w).loss
        ids, weight = jnp.asarray(wide).at[1, 2].set(8).at[3].set(-100), jnp.ones((4, 8)).at[1, 2].set(0)
        for how, f, kind in (("", weigh, ValueError), ("under jit: ", jax.jit(weigh), jax.errors.JaxRuntimeError)):
            for expected, given in (("[1, 2] is 8", (ids, None)), ("[1, 2] is 8", (ids, jnp.ones((4, 8)))),
                                    ("[2, 1] is -3", (ids.at[2, 1].set(-3), weight))):
                expected = f"target_ids{expected}; it must be in [0, 8) or ignore_index, -100"
                try:
                    jax.block_until_ready(f(*given))
                    jax.effects_barrier()
                    check(how + expected, False, "no error")
                except (ValueError, jax.errors.JaxRuntimeError) as error:
                    check(how + expected, type(error) is kind and expected in str(error), f"{type(error)}: {error}")
            check(f"{how}good ids", bool(jnp.isfinite(f(ids, weight))))
    finally:
        del os.environ["LK_CHECK_TARGETS"]
    check("bad targets are NaN otherwise", bool(jnp.isnan(lk.cross_entropy(x, t.at[2].set(8)))))
    # XLA may give x at any address. Rows of 1020 elements rule out the plan that wants 16 bytes. What they need at least is enough.
    query = lambda hidden, **budget: lk._ffi._workspace_bytes(
        "linear_cross_entropy_forward_bf16", ["x", "weight", "target", "loss"],
        {"tokens": 4096, "hidden": hidden, "vocab": 32768, **budget})
    least = query(1024) - 128  # LK_WORKSPACE_ALIGNMENT, which XLA's buffers may lack
    check("workspace for x at any address", query(1020, workspace_bytes=least) <= least + 128)
    budgets()
    # What the handler finds itself: these calls are not made by lk_jax's functions.
    for expected, inputs, fields in [("cols is 0", "x", {"rows": 4}), ("x is NULL", "weight", {"rows": 4, "cols": 8}),
                                     ("no field nonsense", "x", {"rows": 4, "cols": 8, "nonsense": 1})]:
        try:
            numbers = {k: np.int64(v) for k, v in fields.items()}
            jax.block_until_ready(jax.ffi.ffi_call("lk_srms_norm_forward_f32", jax.ShapeDtypeStruct(x.shape, x.dtype))(
                x, inputs=inputs, outputs="y", **numbers))
            check(expected, False, "no error")
        except jax.errors.JaxRuntimeError as error:
            check(expected, expected in str(error), str(error)[:300])


def every():
    """Each public function: (its arrays, its other arguments, a number that is part of the program and two values, gradients?).
    every_... below pass them by name. A function that is not here fails."""
    x, w, m, r = normal(4, 4, 6, 16), normal(1, 16), normal(2, 20, 16), normal(5, 4, 6, 16)
    t, ids = jnp.asarray(integers(3, 16, 4, 6)), jnp.asarray(integers(4, 16, 4, 6, 4))
    b, q = normal(6, 20), jnp.abs(normal(7, 4, 6, 4))
    none, weight = {"reduction": "none"}, jnp.abs(normal(8, 4, 6))
    return {
        "logsumexp": (dict(a=x), dict(axis=-1), ("scale", 0.5, 2.0), "a"),
        "kl": (dict(logits=x, teacher=r, row_weight=weight), none, ("temperature", 1.0, 2.0), "logits"),
        "linear_kl": (dict(x=x, weight=m, teacher_x=r, teacher_weight=m[::-1], bias=b, teacher_bias=b[::-1], row_weight=weight),
                      none, ("temperature", 1.0, 2.0), "x weight bias"),
        "cross_entropy": (dict(logits=x, targets=t, row_weight=weight, class_weight=jnp.abs(w), denominator=jnp.float32(7),
                               grad_scale=jnp.float32(3)), {},
                          ("label_smoothing", 0.1, 0.2), "logits"),
        "cross_entropy_with_grad": (dict(logits=x, targets=t, class_weight=jnp.abs(w), row_weight=weight), none,
                                    ("softcap", 5.0, 9.0), ""),
        "cross_entropy_ids": (dict(logits=x, target_ids=ids, target_weight=q, row_weight=weight, tail_weight=weight), none,
                              ("softcap", 5.0, 9.0), "logits"),
        "linear_cross_entropy": (dict(x=x, weight=m, targets=t, bias=b, row_weight=weight), none, ("z_loss", 0.1, 0.2),
                                 "x weight bias"),
        "linear_cross_entropy_ids": (dict(x=x, weight=m, target_ids=ids, target_weight=q, bias=b), none, ("softcap", 5.0, 9.0),
                                     "x weight bias"),
        "linear_support": (dict(x=x, weight=m, ids=jnp.stack([t.ravel(), t.ravel() + 1], 1).ravel(), offsets=jnp.arange(0, 49, 2),
                                targets=t, bias=b, teacher_logp=-jnp.abs(normal(9, 48))), {}, ("softcap", 5.0, 9.0), "x weight bias"),
        "support": (dict(logits=x, ids=jnp.stack([t.ravel(), (t.ravel() + 1) % 16], 1).ravel(), offsets=jnp.arange(0, 49, 2),
                         targets=t, teacher_logp=-jnp.abs(normal(9, 48))), {}, ("softcap", 5.0, 9.0), "logits"),
        "linear_topk": (dict(x=x, weight=m, bias=b), dict(k=5), ("softcap", 5.0, 9.0), ""),
        "md_lrpe_cosine": (dict(x=x.reshape(4, 3, 2, 16), theta=normal(3, 3, 16)), dict(shape=2), ("activation", "silu", None),
                           "x theta"),
        "glu": (dict(gate=x, up=r, row_weight=weight), {}, ("limit", 1.0, 2.0), "gate up row_weight"),
        "rope": (dict(q=x.reshape(4, 6, 2, 8), k=r.reshape(4, 6, 2, 8)[:, :, :1], inv_freq=1 / jnp.arange(1.0, 5.0), position=t,
                      q_weight=w[:8], k_weight=w[8:]), {}, ("scale", 1.0, 2.0), "q k q_weight k_weight"),
        "rope tables": (dict(q=x.reshape(4, 2, 6, 8), cos=normal(9, 6, 8), sin=normal(10, 6, 8)), dict(heads_first=True),
                        ("interleaved", False, True), "q"),
        "rms_norm": (dict(x=x, weight=w, bias=w[::-1]), {}, ("eps", 1e-6, 0.1), "x weight bias"),
        "add_rms_norm": (dict(x=x, residual=r, weight=w), {}, ("weight_offset", 0.0, 1.0), "x residual weight"),
        "srms_norm": (dict(x=x), {}, ("eps", 1e-6, 0.1), "x"),
        "rms_norm fp8": (dict(x=x, weight=w), dict(out_dtype=jnp.float8_e4m3fn), ("eps", 1e-6, 0.1), ""),
    }


def cases():
    """name, f, arrays, the names of those that have gradients, and the loss and gradients of all results; of each of every()."""
    for name, (arrays, others, _, wanted) in every().items():
        f = functools.partial(lambda function, others, arrays: function(**arrays, **others), getattr(lk, name.split()[0]), others)
        wanted = wanted.split()

        def both(arrays, f=f, wanted=wanted):
            def loss(some):
                return sum(jnp.sin(r).sum() for r in jax.tree.leaves(f({**arrays, **some})))
            return f(arrays), jax.grad(loss)({n: arrays[n] for n in wanted}) if wanted else {}
        yield name, f, arrays, wanted, both


def refused(name, f, kind, expected):
    """f raises an error of that kind, whose words are matched by the expression."""
    try:
        jax.block_until_ready(f())
        check(name, False, "no error")
    except Exception as error:
        check(name, isinstance(error, kind) and bool(re.search(expected, str(error))), f"a {type(error).__name__}: {error}")


SECOND = r"^a result of lk_\w+ would need a derivative, and has none: lk has first derivatives alone"


def everywhere():
    """Each public function in what JAX does with functions, and with what a user may pass: it is right, or says one sentence."""
    public = {n for n in lk.__all__ if not isinstance(getattr(lk, n), type)} - {"platform", "targets"}
    check("all public functions", public == {n.split()[0] for n in every()}, public)
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in lk.targets()]
    rows, = jax.export.symbolic_shape("rows")
    for name, f, arrays, wanted, both in cases():
        jitted, function = jax.jit(both), getattr(lk, name.split()[0])
        expected = jitted(arrays)
        alike = lambda how, found: near(f"{name} gradient {how}", found, expected)
        first = next(iter(arrays))
        # Numbers of which each makes a program.
        _, others, (option, *values), _ = every()[name]
        static = jax.jit(lambda arrays, value: function(**arrays, **{**others, option: value}), static_argnums=1)
        found = [static(arrays, v) for v in (*values, *values)]
        for v, a, again in zip(values, found, found[2:]):
            near(f"{name} {option}={v}", a, function(**arrays, **{**others, option: v}))
            equal(f"{name} {option}={v} again", a, again)
        check(f"{name} {option} has an effect", any(not np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, found[:2]))))
        # Other arrays: numpy's, weakly typed ones, donated ones, without rows.
        alike("numpy", both(jax.tree.map(np.asarray, arrays)))
        weak = jnp.broadcast_to(jnp.asarray(0.5), arrays[first].shape)
        assert weak.weak_type
        strong = jnp.full(weak.shape, 0.5, jnp.float32)
        near(f"{name} gradient of a weak type", both({**arrays, first: weak}), jitted({**arrays, first: strong}))
        rest = {n: a for n, a in arrays.items() if n != first}
        with warnings.catch_warnings(action="ignore"):  # of a result that is too small for the memory
            alike("donated", jax.jit(lambda a, rest: both({first: a, **rest}), donate_argnums=0)(jnp.copy(arrays[first]), rest))
        mapped = {n for n, a in arrays.items() if a.ndim > 1 and a.shape[0] == 4}
        none = {n: a[:0] if n in mapped else a[:1] if n == "offsets" else a for n, a in arrays.items()}
        results, slopes = jax.jit(both)(none)
        check(f"{name} no rows", all(a.shape[0] == 0 if b.ndim and b.shape[0] == 4 else a.shape == b.shape for a, b in zip(
            *map(jax.tree.leaves, (results, expected[0])), strict=True)), jax.tree.map(jnp.shape, results))
        check(f"{name} gradients of no rows", all(s.shape == none[n].shape and not s.any() for n, s in slopes.items()), slopes)
        # Wrong ones.
        with jax.enable_x64(True):
            refused(f"{name} float64", lambda: f({**arrays, first: np.asarray(arrays[first], np.float64)}), TypeError,
                    f"^{first} is float64; it must be ")
        for n in arrays:
            for bad in ("word", object(), arrays[first] * 1j, [[1], [1, 2]]):
                refused(f"{name} {n} {type(bad).__name__}", lambda: f({**arrays, n: bad}), TypeError, f"^{n} is ")
        # Derivatives.
        if wanted:
            pick = lambda a: f({**arrays, wanted[0]: a})
            up = jax.tree.map(lambda a: normal(9, *a.shape), expected[0])
            given = arrays[wanted[0]]
            rows_of = jax.jit(jax.jacrev(pick))(given)
            ours = sum(jnp.tensordot(u, j, u.ndim) for u, j in zip(*map(jax.tree.leaves, (up, rows_of)), strict=True))
            near(f"{name} gradient by jacrev", ours, jax.vjp(pick, given)[1](up)[0])
            total = lambda a: sum(jnp.sin(r).sum() for r in jax.tree.leaves(pick(a)))
            refused(f"{name} grad of grad", lambda: jax.grad(lambda a: jax.grad(total)(a).sum())(given), TypeError, SECOND)
            refused(f"{name} jacrev of grad", lambda: jax.jit(jax.jacrev(jax.grad(total)))(given), TypeError, SECOND)
            for how, g in (("jvp", lambda: jax.jvp(total, (given,), (given,))), ("jacfwd", lambda: jax.jacfwd(total)(given)),
                           ("hessian", lambda: jax.hessian(total)(given))):
                refused(f"{name} {how}", g, TypeError, rf"forward-mode .* custom_vjp function|{SECOND}")  # the first is JAX's
        elif name == "linear_topk":
            slope = jax.grad(lambda a: sum(r.sum() for r in jax.tree.leaves(f({**arrays, first: a}))).astype(jnp.float32))
            check(f"{name} gradient", not slope(arrays[first]).any())
        else:
            refused(f"{name} gradient", lambda: jax.grad(lambda a: sum(r.astype(jnp.float32).sum() for r in jax.tree.leaves(f({
                **arrays, first: a}))))(arrays[first]), TypeError, f"{SECOND}|would need a gradient through 8 bits")
        # jax.export, pickle.
        alike("exported", jax.export.export(jitted, disabled_checks=checks)(arrays).call(arrays))
        shapes = {n: jax.ShapeDtypeStruct((rows, *a.shape[1:]) if n in mapped else a.shape, a.dtype) for n, a in arrays.items()}
        refused(f"{name} a symbolic dimension", lambda: jax.export.export(jax.jit(f), disabled_checks=checks)(shapes), ValueError,
                "with a symbolic dimension; lk's calls are compiled for sizes that are known: export one program for each size$")
        axes = {n: 0 if n in mapped else None for n in arrays}
        if name not in ("cross_entropy", "support", "linear_support"):  # a mean is a loop of calls, one each; offsets are of all x
            refused(f"{name} vmap, a symbolic dimension", lambda: jax.export.export(jax.jit(jax.vmap(
                f, (axes,))), disabled_checks=checks)(shapes), ValueError, "a symbolic dimension; lk's calls are compiled")
        check(f"{name} pickle", pickle.loads(pickle.dumps(function)) is function)
        copied = pickle.loads(pickle.dumps(expected[0]))
        equal(f"{name} results of pickle", copied, expected[0])
        check(f"{name} type of results", type(copied) is type(expected[0]))


def meshes():
    """Arrays that are split over a mesh, outside of shard_map. With explicit axes, JAX's default, types say how: gradients are
    split as their arrays are, and results as the first of them."""
    P = jax.sharding.PartitionSpec
    for kind in (jax.sharding.AxisType.Explicit, jax.sharding.AxisType.Auto):
        mesh = jax.make_mesh((2, 2), ("rows", "columns"), axis_types=(kind,) * 2)
        explicit = kind == jax.sharding.AxisType.Explicit
        for name, f, arrays, wanted, both in cases():
            expected = jax.jit(both)(arrays)
            # What has the rows is split over them, and over its columns; others over their first dimension, where 2 divides it.
            spec = lambda a: (P("rows", *(None,) * (a.ndim - 2), *["columns"] * (a.ndim > 2)) if a.ndim > 1 and len(a) == 4 else
                              P("columns") if a.ndim and len(a) % 2 == 0 else P())
            split = {n: jax.device_put(a, jax.NamedSharding(mesh, spec(a))) for n, a in arrays.items()}
            title = f"{name} {kind.name}"
            with jax.set_mesh(mesh):
                found = jax.jit(both)(split)
                near(f"{title} gradient", found, expected)
                if not explicit:
                    continue
                near(f"{title} gradient without jit", both(split), expected)
            of = lambda a: tuple(jax.typeof(a).sharding.spec)
            check(f"{title} types of gradients", all(of(g) == of(split[n]) for n, g in found[1].items()))
            results = [a for a in jax.tree.leaves(found[0]) if a.ndim and a.shape[0] == 4]
            check(f"{title} types of results", all(of(a)[0] == "rows" for a in results), [of(a) for a in results])
            axes = {n: 0 if a.ndim > 1 and a.shape[0] == 4 else None for n, a in arrays.items()}
            mapped = jax.vmap(f, (axes,))

            def slopes(arrays):
                return jax.grad(lambda some: sum(jnp.sin(r).sum() for r in jax.tree.leaves(mapped({**arrays, **some}))))(
                    {n: arrays[n] for n in wanted})
            if wanted and name not in ("support", "linear_support"):  # whose offsets are those of all x
                same = jax.jit(slopes)(arrays) if name == "cross_entropy" else expected[1]  # a mean for each element
                near(f"{title} gradient of vmap", jax.jit(slopes)(split), same)


def budgets():
    """A workspace_mib that backward would refuse is refused in forward, where a gradient is wanted, with the least that works."""
    x, m, low = normal(1, 200, 32), normal(2, 1031, 32), jnp.bfloat16
    y, t, ids = (x[::-1] / 2).astype(low), jnp.asarray(integers(3, 1031, 200)), jnp.asarray(integers(4, 1031, 200, 3))
    higher = 0
    for name, f in (("linear_cross_entropy", lambda v, w, **o: lk.linear_cross_entropy(v, w, t, **o)),
                    ("linear_cross_entropy", lambda v, w, **o: lk.linear_cross_entropy(v, w, t, reduction="none", **o)),
                    ("linear_cross_entropy", lambda v, w, **o: lk.linear_cross_entropy(v, w, t, aux=("entropy",), **o)),
                    ("linear_cross_entropy_ids", lambda v, w, **o: lk.linear_cross_entropy_ids(v, w, ids, **o)),
                    ("linear_cross_entropy_ids", lambda v, w, **o: lk.linear_cross_entropy_ids(v, w, ids, tail=True, **o)),
                    ("linear_kl", lambda v, w, **o: lk.linear_kl(v, w, y, m[::-1].astype(low), **o)),
                    ("linear_kl", lambda v, w, **o: lk.linear_kl(v, w, y, m[::-1].astype(low), "none", **o))):
        one = lambda mib: jax.eval_shape(functools.partial(f, workspace_mib=mib), x.astype(low), m.astype(low))
        forward = lambda mib: jax.eval_shape(lambda *a: jax.vjp(functools.partial(f, workspace_mib=mib), *a)[0], x.astype(low),
                                             m.astype(low))

        def both(mib):
            def g(*a):
                results, pull = jax.vjp(functools.partial(f, workspace_mib=mib), *a)
                return pull(results)
            return jax.eval_shape(g, x.astype(low), m.astype(low))

        def least(call):
            mib, words = 1e-6, rf"^workspace_mib is \S+; {name}_\w+_bf16 of these sizes needs ([\d.]+) or more$"
            for _ in range(2):  # forward, and its backward, which may need more
                try:
                    call(mib)
                except ValueError as error:
                    found = re.search(words, str(error))
                    check(f"{name}: words of workspace_mib", bool(found), str(error))
                    mib = float(found[1])
            return mib
        mib = least(forward)
        higher += mib > least(one)
        both(mib)  # raises nothing
        refused(f"{name}: less than the least", lambda: forward(mib - 0.002), ValueError,
                f"^workspace_mib is .* needs {mib:.10g} or more$")
    check("backward needs more", higher > 0, higher)


# ---- Groups in processes of their own ----------------------------------------------------------------------------------------


def x64():
    assert jax.config.jax_enable_x64
    x, w, m = normal(1, 4, 8), normal(2, 8), normal(3, 6, 8)
    for end in (np.int32, np.int64):
        t = jnp.asarray(integers(3, 6, 4), end)
        check(f"targets are {end.__name__}", t.dtype == end)
        for ignored in (-100, 2, *((1 << 40,) if end is np.int64 else ())):
            t = t.at[1].set(ignored)
            expected, gradient = exactly(lambda v: exact_entropy(v, t, ignore_index=ignored)[0], x, upstream=jnp.float32(1))
            ours, g = jax.jit(jax.value_and_grad(lambda v: lk.cross_entropy(v, t, ignore_index=ignored)))(x)
            close(f"cross_entropy {end.__name__} {ignored}", ours, expected)
            close(f"cross_entropy {end.__name__} {ignored} gradient", g, gradient[0])
            loss = lambda v, m: exact_entropy(v @ m.T, t, ignore_index=ignored)[0]
            close(f"linear_cross_entropy {end.__name__} {ignored}", lk.linear_cross_entropy(x, m, t, ignore_index=ignored),
                  exactly(loss, x, m, upstream=jnp.float32(1))[0])
        ids = jnp.stack([t, jnp.zeros_like(t)], 1).at[3, 0].set(t[1])
        ups, ignored = (jnp.float32(1), normal(4, 4, 2)), int(t[1])
        compare(f"cross_entropy_ids {end.__name__}", lambda v: tuple(lk.cross_entropy_ids(v, ids, ignore_index=ignored)),
                lambda v: exact_ids(v, ids, ignore_index=ignored), [x], ups)
        compare(f"linear_cross_entropy_ids {end.__name__}", lambda v, m: tuple(lk.linear_cross_entropy_ids(
            v, m, ids, ignore_index=ignored)), lambda v, m: exact_ids(v @ m.T, ids, ignore_index=ignored), [x, m], ups, 3)
        own, ups = jnp.stack([jnp.clip(t, 0, 5), (jnp.clip(t, 0, 5) + 1) % 6], 1).ravel(), tuple(normal(i, 4) for i in range(3))
        for at in (np.int32, np.int64):
            at = np.arange(0, 9, 2, at)
            compare(f"support {end.__name__} {at.dtype}", lambda v: tuple(lk.support(v, own, at, t, ignore_index=ignored)[:3]),
                    lambda v: exact_support(v, own, at, t, ignore_index=ignored)[:3], [x[:, :6]], ups)
            compare(f"linear_support {end.__name__} {at.dtype}", lambda v, m: tuple(lk.linear_support(
                v, m, own, at, t, ignore_index=ignored)[:3]), lambda v, m: exact_linear_support(
                    v, m, None, own, at, t, ignore_index=ignored)[:3], [x, m], ups, 3)
        loss, aux = lk.cross_entropy(x, t, aux=("argmax", "valid_rows"))
        check("types of aux", loss.dtype == jnp.float32 and aux["argmax"].dtype == aux["valid_rows"].dtype == jnp.int32)
        check("argmax", np.array_equal(aux["argmax"], np.argmax(x, -1)))
    same_topk("linear_topk", lk.linear_topk(x, m, 3, temperature=2.0), exact_topk(x, m, 3, scale=0.5))
    same_topk("linear_topk, a scale of each token", jax.jit(lambda s: lk.linear_topk(x, m, 3, logit_scale=s))(np.ones(4)),
              exact_topk(x, m, 3))
    for f in (lambda: lk.rms_norm(x.astype(jnp.float64)), lambda: lk.logsumexp(x.astype(jnp.float64)),
              lambda: lk.cross_entropy(x.astype(jnp.float64), t)):
        try:
            f()
            check("float64", False, "no error")
        except TypeError as error:
            check("float64", "is float64; it must be float32, float16 or bfloat16" in str(error), str(error))
    for dtype in DTYPES:
        a, b = x.astype(dtype), w.astype(dtype)
        compare(f"rms_norm {dtype}", lk.rms_norm, lambda v, w: exact_norm(v, None, w)[0], [a, b], a)
        compare(f"logsumexp {dtype}", lambda v: lk.logsumexp(v, 1), lambda v: jax.nn.logsumexp(v, 1), [a], b[:4])


def devices():
    """Rows over two devices: values, and gradients of weights, which JAX sums over the devices."""
    P = jax.sharding.PartitionSpec
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    for name, (f, mapped, others) in functions().items():
        specs = (P("rows"),) * len(mapped) + (P(),) * len(others)
        axes = (0,) * len(mapped) + (None,) * len(others)
        split = [s for a, s in zip((*mapped, *others), specs) if a.dtype == jnp.float32]
        g = jax.vmap(f, axes)
        for what, g, out in (("value", g, P("rows")), ("gradient", gradients(g), tuple(split))):
            ours = jax.jit(jax.shard_map(g, mesh=mesh, in_specs=specs, out_specs=out))(*mapped, *others)
            near(f"{name} {what}", ours, g(*mapped, *others))
        # One function, differentiated by all arguments, by each, and by all again: JAX keeps what it has traced.
        arrays, g = (*mapped, *others), jax.vmap(f, axes)
        loss = lambda *a: sum(jnp.sin(r).sum() for r in jax.tree.leaves(g(*a)) if jnp.issubdtype(r.dtype, jnp.floating))
        total = jax.jit(jax.shard_map(lambda *a: jax.lax.psum(loss(*a), "rows"), mesh=mesh, in_specs=specs, out_specs=P()))
        floats = [i for i, a in enumerate(arrays) if a.dtype == jnp.float32]
        jax.vjp(total, *arrays)[1](jnp.float32(3))
        for wanted in (*((i,) for i in floats), floats):
            near(f"{name} gradient of {wanted}", jax.jit(jax.grad(total, wanted))(*arrays), jax.grad(loss, wanted)(*arrays))


def mesh_of(**axes):
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(jax.sharding.AxisType.Auto,) * len(axes))


def split(f, *specs, out=jax.sharding.PartitionSpec(), mesh=None, checked=True):
    """f over devices, by default four that have columns. specs: of the arguments; a number n: n axes, and then the columns."""
    P = jax.sharding.PartitionSpec
    specs = tuple(P(*(None,) * n, "vocab") if isinstance(n, int) else n for n in specs)
    return jax.jit(jax.shard_map(f, mesh=mesh or mesh_of(vocab=4), in_specs=specs, out_specs=out, check_vma=checked))


def sums_in(text, shape):
    """How often a compiled program sums float32 numbers of this shape over devices."""
    return len(re.findall(rf"= f32\[{shape}\]\S* all-reduce(?:-start)?\(", text))


def ranks():
    """Columns over four devices (axis_name): the formulas of all columns, in float64, and the bits of the call of one device."""
    ranks_cross_entropy()
    ranks_ids()
    ranks_linear()
    ranks_linear_ids()
    ranks_support()
    ranks_support_of_logits()
    ranks_topk()
    ranks_kl()
    ranks_transforms()
    ranks_mistakes()


def ranks_cross_entropy():
    known = ("lse", "z_loss", "entropy", "argmax", "valid_rows", "weight_sum", *STATISTICS)
    over = functools.partial(lk.cross_entropy, axis_name="vocab")
    modes = itertools.cycle((True, False))
    for dtype, (k, options) in itertools.product(DTYPES, enumerate(entropy_options(52))):
        if dtype == "float16" and k % 3:  # the others say it
            continue
        reduction = ("mean", "none", "sum")[k % 3]
        full, checked = dict(options, reduction=reduction), next(modes)
        x, targets, r = normal(4, 2, 5, 52, dtype=dtype, scale=2), integers(3, 52, 2, 5), np.array(normal(8, 2, 5))
        if (ignored := options.get("ignore_index", -100)) is not None:
            targets[0, 0], r[0, 0] = ignored, np.nan
        up = 4096 * jnp.abs(normal(6, *((2, 5) if reduction == "none" else ())))
        name = f"{dtype} { {k: v for k, v in full.items() if k != 'class_weight'} } {'' if checked else 'unchecked'}"
        compare(name, split(lambda v: over(v, targets, **full), 2, checked=checked),
                lambda v: exact_entropy(v, targets, **full)[0], [x], up, 2)
        compare(f"{name} row_weight", split(lambda v: over(v, targets, **full, row_weight=r, in_place=True), 2, checked=checked),
                lambda v: exact_entropy(v, targets, **full, row_weight=r)[0], [x], up, 2)
        ups = up, 512 * normal(7, 2, 5), 512 * normal(9, 2, 5)
        compare(f"{name} with lse and entropy",
                split(lambda v: with_aux(over(v, targets, **full, aux=("entropy", "lse"))), 2, checked=checked),
                lambda v: with_aux(exact_entropy(v, targets, **full)), [x], ups, 2)
        loss, aux = split(lambda v: over(v, targets, **full, aux=known), 2, checked=checked)(x)
        alone = lk.cross_entropy(x, targets, **full, aux=known)[1]
        with jax.enable_x64(True):
            expected = exact_entropy(jnp.asarray(np.asarray(x, np.float64)), targets, **full)[1]
        for n in ("lse", "z_loss", "entropy", "weight_sum", *STATISTICS):
            close(f"{name} {n}", aux[n], expected[n], 2)
        for n in ("argmax", "valid_rows"):
            check(f"{name} {n}", np.array_equal(aux[n], alone[n]), f"{aux[n]}, not {alone[n]}")
        if reduction == "mean":
            d = jnp.array([2.5])
            compare(f"{name} denominator", split(lambda v: over(v, targets, **full, denominator=d), 2, checked=checked),
                    lambda v: exact_entropy(v, targets, **full, denominator=2.5)[0], [x], up, 2)
    # Special rows: equal logits, of one device and of several; masked columns; NaN and infinities; bad targets.
    x = normal(5, 11, 12, scale=2).at[9].set(jnp.nan).at[10, :7].set(jnp.nan)
    x = x.at[0].set(1.0).at[1, 3:].set(7.0).at[2, :6].set(-jnp.inf).at[3, 7].set(jnp.nan).at[4, 2].set(jnp.inf).at[5].set(-jnp.inf)
    for targets in ([0, 3, 7, 7, 3, 1, 12, -1, 2**31 - 1, 3, 8], [11, 4, 8, 6, 2, -100, -2, -100, -101, 12, 7]):
        targets = np.array(targets, np.int32)
        every = dict(reduction="none", aux=("lse", "entropy", "argmax", *STATISTICS), ignore_index=-100)
        value = lambda f: lambda v: f(v, targets, **every)
        ours, alone = split(value(over), 1)(x), value(lk.cross_entropy)(x)
        for i, (a, b) in enumerate(zip(jax.tree.leaves(ours), jax.tree.leaves(alone), strict=True)):
            close(f"special rows, result {i}", a.astype(jnp.float32), b)
        gradient = lambda f: lambda v: jax.grad(lambda v: f(v, targets, reduction="sum", ignore_index=-100))(v)
        close("special rows, gradient", jax.jit(gradient(lambda v, *a, **o: split(lambda v: over(v, *a, **o), 1)(v)))(x),
              gradient(lk.cross_entropy)(x), 8)
    x, targets = normal(5, 12, 4), np.array([*range(4)] * 2 + [-100, -1, 4, 0], np.int32)
    found = split(lambda v: over(v, targets, aux=("argmax", "entropy")), 1)(x)
    near("a column for each device", found, lk.cross_entropy(x, targets, aux=("argmax", "entropy")))
    # All devices get the same bits.
    x, t, weight = normal(1, 40, 100), integers(2, 100, 40), np.abs(normal(3, 100))
    every = dict(class_weight=weight, label_smoothing=0.1, z_loss=0.01, aux=known)
    found = split(lambda v: jax.tree.map(lambda a: a[None], over(v, t, **every)), 1, checked=False,
                  out=jax.sharding.PartitionSpec("vocab"))(x)
    check("the same bits on all devices", all(np.array_equal(a[:1].repeat(4, 0), a) for a in jax.tree.leaves(found)), found)
    with jax.enable_x64(True):
        wide = jnp.asarray(t, jnp.int64).at[0].set(1 << 40)
        ours, alone = (jax.jit(jax.value_and_grad(lambda v: f(v, wide, ignore_index=1 << 40)))(x) for f in (
            lambda *a, **o: split(lambda v: over(v, *a[1:], **o), 1)(a[0]), lk.cross_entropy))
    near("64-bit targets, gradient", ours, alone)
    # Nothing to count, and no rows.
    empty = np.full(3, -100, np.int32)
    none = split(lambda v: over(v, empty, zero_when_empty=True), 1)
    check("mean over nothing", bool(jnp.isnan(split(lambda v: over(v, empty), 1)(x[:3]))) and float(none(x[:3])) == 0)
    check("its gradient", not jax.grad(none)(x[:3]).any())
    none = split(lambda v: over(v, empty[:0], reduction="none"), 1)
    check("of no rows", none(x[:0]).shape == (0,) and jax.grad(lambda v: none(v).sum())(x[:0]).shape == (0, 100))
    # What runs.
    calls = calls_in(split(lambda v: over(v, t), 1), x)
    check("a loss alone", calls == [
        ("cross_entropy_parallel_forward_f32", "logits target", "states"),
        ("cross_entropy_parallel_finish_f32", "target all_states", "loss workspace")], calls)
    P = jax.sharding.PartitionSpec
    both = split(lambda v: jax.value_and_grad(over)(v, t), 1, out=(P(), P(None, "vocab")))
    calls = calls_in(both, x)
    check("loss and gradient", calls == [
        ("cross_entropy_parallel_forward_f32", "logits target", "states"),
        ("cross_entropy_parallel_finish_f32", "target all_states", "loss lse valid_rows lse_low others workspace"),
        ("cross_entropy_parallel_backward_f32", "logits target lse lse_low others valid_rows upstream", "dlogits")], calls)
    text = both.lower(x).compile().as_text()
    check("one collective", len(re.findall(r" all-gather(?:-start)?\(", text)) == 1 and "all-reduce" not in text, text)


def ranks_ids():
    over = functools.partial(lk.cross_entropy_ids, axis_name="vocab")
    options_of = [{}, {"ignore_index": None}, {"ignore_index": 3}, {"softcap": 5.0, "z_loss": 0.01},
                  dict(z_loss=0.01, softcap=8.0, logit_scale=1.5, temperature=2.0, ignore_index=1)]
    modes = itertools.cycle((True, False))
    for dtype, (shape, vocab, n) in itertools.product(DTYPES, [((2, 5), 52, 5), ((3,), 1032, 64), ((), 8, 1)]):
        for k, options in enumerate(options_of[:1 if vocab != 52 else 3 if dtype == "float16" else None]):
            reduction, checked = ("mean", "none", "sum")[k % 3], next(modes)
            ids, weight = ids_case(3, vocab, n, *shape, ignore_index=options.get("ignore_index", -100))
            x, r = normal(4, *shape, vocab, dtype=dtype, scale=2), np.array(normal(8, *shape))
            full = dict(options, reduction=reduction)
            if full.get("ignore_index", -100) is not None:
                r[(0,) * len(shape)] = np.nan
            ups = 4096 / n * jnp.abs(normal(6, *(shape if reduction == "none" else ()))), 512 * normal(7, *shape, n)
            name = f"ids {dtype} {shape} {vocab} n={n} {full} {'' if checked else 'unchecked'}"
            for what, w, more in (("weights", weight, {}), ("no weights", None, {"row_weight": r} if shape else {})):
                i = ids if w is not None else np.where(weight == 0, 2, ids)
                compare(f"{name} {what}", split(lambda v: tuple(over(v, i, w, **full, **more)), len(shape), checked=checked),
                        lambda v: exact_ids(v, i, w, **full, **more), [x], ups, 2)
        i = np.where(ids == 2**31 - 1, 2, ids)
        for k, q in enumerate((jnp.abs(normal(9, *shape)), None)):  # the tail, with a weight and without
            tailed = lambda v: tuple(over(v, i, weight, reduction="none", tail_weight=q, tail=True))
            compare(f"ids {dtype} {shape} {vocab} tail {k}", split(tailed, len(shape), checked=not k),
                    lambda v: exact_tail(v, i, weight, q, "none"), [x],
                    (4096 / n * jnp.abs(normal(6, *shape)), 512 * normal(7, *shape, n), 512 * normal(5, *shape)), 4)
        compare(f"ids {dtype} {shape} {vocab} tail alone", split(lambda v: tailed(v)[2], len(shape)),
                lambda v: exact_tail(v, i, weight, None, "none")[2], [x], 512 * normal(5, *shape), 4)
        only = split(lambda v: over(v, ids, weight, denominator=3.0).logp, len(shape))
        compare(f"ids {dtype} {shape} logp alone", only, lambda v: exact_ids(v, ids, weight)[1], [x], ups[1], 2)
    x = normal(5, 6, 20, scale=2).at[1:3, 4].set(-jnp.inf).at[1, 9].set(-jnp.inf).at[2, 5].set(-jnp.inf)
    ids = np.array([[3, 3, 3, 7], [4, 1, 4, 6], [4, 5, 5, 4], [20, 2, 3, 4], [-1, 2, -100, 99], [-100] * 4], np.int32)
    w = np.array([[1, -2, 0.5, 1], [0, 1, 0, 2], [0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 0], [1, 1, 1, 1]])
    for reduction, up in (("none", jnp.float32([64, 128, 256, 32, 64, 99])), ("mean", jnp.float32(512))):
        compare(f"ids, special rows, {reduction}", split(lambda v: tuple(over(v, ids, w, reduction=reduction)), 1),
                lambda v: exact_ids(v, ids, w, reduction=reduction), [x], (up, 64 * normal(6, 6, 4)), 2)
    sure = normal(1, 3, 8).at[:, :2].add(60)
    compare("ids, a tail far below", split(lambda v: over(v, np.array([[0, 1]] * 3), tail=True).tail, 1),
            lambda v: exact_tail(v, np.array([[0, 1]] * 3), None, None, "none")[2], [sure], normal(2, 3), 8)
    none = split(lambda v: tuple(over(v, ids[:0], reduction="none", tail=True)), 1)
    check("ids of no rows", [a.shape for a in none(x[:0])] == [(0,), (0, 4), (0,)])


def ranks_linear():
    P, over = jax.sharding.PartitionSpec, functools.partial(lk.linear_cross_entropy, axis_name="vocab")
    tokens, hidden, vocab = 11, 24, 40
    known = ("lse", "z_loss", "entropy", "argmax", "valid_rows", "weight_sum", *STATISTICS)
    weights, bias = normal(8, vocab, hidden, scale=0.3), normal(9, vocab)
    more = [{"max_counted": 10}, {"tf32": True}, {"workspace_mib": 1}]
    beside = {name for options in more for name in options}
    modes = itertools.cycle((True, False))
    for dtype, (k, options) in itertools.product(DTYPES, enumerate(entropy_options(vocab) + more)):
        if dtype == "float16" and k % 3:
            continue
        x, targets = normal(7, tokens, hidden, dtype=dtype), integers(3, vocab, tokens)
        if (ignored := options.get("ignore_index", -100)) is not None:
            targets[2] = ignored
        reduction, checked = ("mean", "none", "sum")[k % 3], next(modes)
        weight_type, bias_type = ((dtype, None), (dtype, dtype), ("float32", "float32"))[k % 3 if options else 1]
        arrays = [x, weights.astype(dtype).astype(weight_type)] + ([bias.astype(bias_type)] if bias_type else [])
        specs, full = (P(), 0, 0)[:len(arrays)], dict(options, reduction=reduction)
        known_options = {k: v for k, v in full.items() if k not in beside}
        up = 4096 * jnp.abs(normal(6, *((tokens,) if reduction == "none" else ())))
        name = f"head {dtype} {weight_type} {bias_type} { {k: v for k, v in full.items() if k != 'class_weight'} } {checked}"
        like = "float16" if "tf32" in full and dtype == "float32" else None
        # dZ is rounded, then the part of a device; XLA rounds their sums.
        compare(name, split(lambda v, m, b=None: over(v, m, targets, bias=b, **full), *specs, checked=checked),
                lambda v, m, b=0.0: exact_entropy(v @ m.T + b, targets, **known_options)[0], arrays, up, 6, like=like)
        if k % 4:
            continue
        ups = up, 512 * normal(7, tokens), 512 * normal(5, tokens)
        compare(f"{name} with lse and entropy", split(lambda v, m, b=None: with_aux(over(
            v, m, targets, bias=b, **full, aux=("lse", "entropy"))), *specs, checked=checked),
            lambda v, m, b=0.0: with_aux(exact_entropy(v @ m.T + b, targets, **known_options)), arrays, ups, 6)
        aux = split(lambda v, m, b=None: over(v, m, targets, bias=b, **full, aux=known), *specs, checked=checked)(*arrays)[1]
        with jax.enable_x64(True):
            f64 = [np.asarray(a, np.float64) for a in arrays]
            expected = exact_entropy(jnp.asarray(f64[0] @ f64[1].T + (f64[2] if bias_type else 0)), targets, **known_options)[1]
        for n in known:
            close(f"{name} {n}", aux[n].astype(jnp.float32), expected[n], 2)
    for dtype in ("float16", "bfloat16"):  # half an ulp of every logit, which are below 8
        x, m, t = normal(7, tokens, hidden, dtype=dtype), weights.astype(dtype), integers(3, vocab, tokens)
        found = split(lambda v, m: over(v, m, t, fast_logits=True, reduction="none"), P(), 0)(x, m)
        expected = exactly(lambda v, m: exact_entropy(v @ m.T, t, "none")[0], x, m, upstream=jnp.ones(tokens))[0]
        check(f"head {dtype} fast_logits", bool((jnp.abs(found - expected) <= 16 * ROUNDING[dtype]).all()), found - expected)
    # Only what is wanted, a masked column, tokens of two axes.
    x, t, masked = normal(1, 2, 3, hidden), integers(2, 39, 2, 3), jnp.zeros(vocab).at[39].set(-jnp.inf)
    f = split(lambda v, m: over(v, m, t, bias=jax.lax.dynamic_slice(masked, [10 * jax.lax.axis_index("vocab")], [10])), P(), 0)
    compare("head, a masked column", f, lambda v, m: exact_entropy(v @ m[:39].T, t)[0], [x, weights], jnp.float32(3), 6)
    for wanted, made in ((0, "dx"), (1, "dweight"), ((0, 1), "dweight dx")):
        calls = calls_in(jax.grad(f, wanted), x, weights)
        check(f"head, only the gradient of {made}", [c[2] for c in calls if "backward" in c[0]] == [f"{made} workspace"], calls)
    for checked in (True, False):
        text = jax.jit(jax.grad(split(lambda v, m: over(v, m, t), P(), 0, checked=checked))).lower(x, weights).compile().as_text()
        check("head, one sum of dx", sums_in(text, "2,3,24") == 1, text)


def ranks_linear_ids():
    P, over = jax.sharding.PartitionSpec, functools.partial(lk.linear_cross_entropy_ids, axis_name="vocab")
    tokens, hidden, vocab = 11, 24, 40
    weights, bias = normal(8, vocab, hidden, scale=0.3), normal(9, vocab)
    options_of = [{}, {"ignore_index": None, "softcap": 5.0}, {"ignore_index": 3, "z_loss": 0.01},
                  {"tf32": True, "workspace_mib": 1},
                  dict(z_loss=0.01, softcap=8.0, logit_scale=1.5, temperature=2.0, ignore_index=1, denominator=2.5)]
    modes = itertools.cycle((True, False))
    for dtype, n, (k, options) in itertools.product(DTYPES, (5, 1), enumerate(options_of)):
        if (dtype == "float16" or n == 1) and k % 4:
            continue
        x, r, ignored = normal(7, tokens, hidden, dtype=dtype), np.array(normal(6, tokens)), options.get("ignore_index", -100)
        ids, w = ids_case(3, vocab, n, tokens, ignore_index=ignored)
        if ignored is not None:
            r[0] = np.nan
        reduction, checked = ("mean", "none", "sum", "none", "mean")[k], next(modes)
        weight_type, bias_type = ((dtype, dtype), (dtype, None), ("float32", "float32"))[k % 3]
        arrays = [x, weights.astype(dtype).astype(weight_type)] + ([bias.astype(bias_type)] if bias_type else [])
        full = dict(options, reduction=reduction)
        known = {k: v for k, v in full.items() if k not in ("tf32", "workspace_mib")}
        ups = 4096 / n * jnp.abs(normal(6, *((tokens,) if reduction == "none" else ()))), 512 * normal(7, tokens, n)
        name = f"head's ids {dtype} {weight_type} {bias_type} n={n} {full} {'' if checked else 'unchecked'}"
        like = "float16" if "tf32" in full and dtype == "float32" else None
        plain = np.where(w == 0, 2, ids)
        for what, i, q, more in (("weights", ids, w, {}), ("no weights", plain, None, {"row_weight": r})):
            compare(f"{name} {what}", split(lambda v, m, b=None: tuple(over(v, m, i, q, bias=b, **full, **more)),
                                            *(P(), 0, 0)[:len(arrays)], checked=checked),
                    lambda v, m, b=0.0: exact_ids(v @ m.T + b, i, q, **known, **more), arrays, ups, 4, like=like)
        if k:
            continue
        for by in jnp.abs(normal(9, tokens)), None:
            i = np.where(ids == 2**31 - 1, 2, ids)
            compare(f"{name} tail", split(lambda v, m, b=None: tuple(over(v, m, i, w, bias=b, reduction="none", tail_weight=by,
                                                                          tail=True)), *(P(), 0, 0)[:len(arrays)], checked=checked),
                    lambda v, m, b=0.0: exact_tail(v @ m.T + b, i, w, by, "none"), arrays,
                    (4096 / n * jnp.abs(normal(6, tokens)), ups[1], 512 * normal(5, tokens)), 6)
    # The results of one device, a chunk of tokens at a time; ids of a row in one device and in several, bad ones, none.
    v, m, k = normal(1, 700, 8, dtype="bfloat16"), normal(2, 40, 8, dtype="bfloat16"), ids_case(5, 40, 3, 700)
    compare("head's ids, chunks", split(lambda v, m: tuple(over(v, m, *k, workspace_mib=0.0645)), P(), 0),
            lambda v, m: exact_ids(v @ m.T, *k), [v, m], (jnp.float32(1024), normal(3, 700, 3)), 6)
    i, w = np.where(k[0] == 2**31 - 1, 2, k[0]), k[1]
    compare("head's ids, a tail in chunks", split(lambda v, m: tuple(over(v, m, i, w, workspace_mib=0.1, tail=True)), P(), 0),
            lambda v, m: exact_tail(v @ m.T, i, w, None, "mean"), [v, m], (jnp.float32(1024), normal(3, 700, 3), normal(4, 700)), 6)
    x = normal(7, 2, 3, hidden)
    ids = np.array([[[3, 3, 9, 3], [4, 39, 14, 20], [40, 2, 3, 4]], [[-1, 2, -100, 99], [-100] * 4, [-101, 1, 1, 2]]], np.int32)
    f = lambda axis: lambda v, m: tuple(lk.linear_cross_entropy_ids(v, m, ids, reduction="none", axis_name=axis, tail=True))
    near("head's_ids, special rows", split(f("vocab"), P(), 0)(x, weights), f(None)(x, weights))
    near("head's_ids, special rows, gradient", gradients(split(f("vocab"), P(), 0))(x, weights), gradients(f(None))(x, weights))
    each = split(lambda v, m: [a[None] for a in f("vocab")(v, m)], P(), 0, out=P("vocab"), checked=False)(x, weights)
    same = all(np.array_equal(a[:1].repeat(4, 0), a, equal_nan=True) for a in each)
    check("head's ids, the same bits on all devices", same, each)
    none = split(lambda v, m: tuple(over(v, m, ids[:0], reduction="none")), P(), 0)
    check("head's ids of no tokens", [a.shape for a in none(x[:0], weights)] == [(0, 3), (0, 3, 4)] and
          not jax.grad(lambda m: none(x[:0], m)[1].sum())(weights).any())
    for dtype in ("float16", "bfloat16"):  # half an ulp of every logit, which are below 8
        v, m, (i, w) = normal(7, tokens, hidden, dtype=dtype), weights.astype(dtype), ids_case(3, vocab, 5, tokens)
        ours = split(lambda v, m: tuple(over(v, m, i, w, fast_logits=True, reduction="none")), P(), 0)(v, m)
        exact = lambda v, m: exact_ids(v @ m.T, i, w, "none")
        for a, b in zip(ours, exactly(exact, v, m, upstream=(jnp.ones(tokens), jnp.ones((tokens, 5))))[0]):
            check(f"head's ids {dtype} fast_logits", bool((jnp.abs(a - b) <= 32 * ROUNDING[dtype]).all()), a - b)
    # What runs: only what is wanted, one all-gather and one sum of dx.
    back, head = "linear_cross_entropy_ids_parallel_backward_f32", split(lambda v, m: over(v, m, ids).loss, P(), 0)
    read = "x weight target_ids lse lse_low others upstream"
    for wanted, made in ((0, "dx"), (1, "dweight"), ((0, 1), "dweight dx")):
        calls = calls_in(jax.grad(head, wanted), x, weights)
        check(f"head's ids, the gradient of {made}", calls == [
            ("linear_cross_entropy_ids_parallel_forward_f32", "x weight target_ids", "states workspace"),
            ("linear_cross_entropy_ids_parallel_finish_f32", "target_ids all_states", "loss lse logp lse_low others workspace"),
            (back, read, f"{made} workspace")], calls)
    calls = calls_in(jax.grad(split(lambda v, m: over(v, m, ids, tail=True).tail.sum(), P(), 0)), x, weights)
    check("head's ids, the gradient of tail", calls == [
        ("linear_cross_entropy_ids_parallel_forward_f32", "x weight target_ids", "states tail workspace"),
        ("linear_cross_entropy_ids_parallel_finish_f32", "target_ids all_states", "loss lse logp tail lse_low others workspace"),
        (back, "x weight target_ids lse lse_low others tail dtail", "dx workspace")], calls)
    for checked in (True, False):
        text = jax.jit(jax.grad(split(lambda v, m: over(v, m, ids).loss, P(), 0, checked=checked))).lower(
            x, weights).compile().as_text()
        check("head's ids, collectives", len(re.findall(r" all-gather(?:-start)?\(", text)) == 1 and
              sums_in(text, "2,3,24") == 1, text)


def ranks_support():
    P, over = jax.sharding.PartitionSpec, functools.partial(lk.linear_support, axis_name="vocab")
    tokens, hidden, vocab = 7, 24, 40
    weights, bias = normal(8, vocab, hidden, scale=0.3), normal(9, vocab)
    modes = itertools.cycle((True, False))
    for dtype, (k, options) in itertools.product(DTYPES, enumerate(SUPPORT_OPTIONS)):
        if dtype == "float16" and k % 3:  # the others say it
            continue
        ids, offsets, targets = supports(k, tokens, vocab, (3, 12, 40, 12, 1)[k])  # in one device and in several
        ids, checked = jnp.asarray(ids), next(modes)
        if k == 3:
            targets[2], targets[5] = 3, 3
        teacher = teacher_of(ids)
        ups = [256 * normal(20 + i, *((tokens,) if i < 4 else (len(ids),))) for i in range(5)]
        x, weight_type, bias_type = normal(7, tokens, hidden, dtype=dtype), *((dtype, None), (dtype, dtype), ("float32",) * 2)[k % 3]
        arrays = [x, weights.astype(dtype).astype(weight_type)] + ([bias.astype(bias_type)] if bias_type else [])
        specs, rest = (P(), 0, 0)[:len(arrays)], {n: o for n, o in options.items() if n != "ignore_index"}
        for what, f, exact, up in (
                ("all", lambda g: lambda v, m, b=None: some_results(g(
                    v, m, ids, offsets, targets, bias=b, teacher_logp=teacher, **options)),
                 lambda v, m, b=None: exact_linear_support(v, m, b, ids, offsets, targets, teacher, **options), tuple(ups)),
                ("no targets, no teacher", lambda g: lambda v, m, b=None: some_results(g(v, m, ids, offsets, bias=b, **rest)),
                 lambda v, m, b=None: exact_linear_support(v, m, b, ids, offsets, **rest), (ups[1], ups[2], ups[4]))):
            name = f"support {dtype} {weight_type} {bias_type} {options} {what} {'' if checked else 'unchecked'}"
            ours = split(f(over), *specs, checked=checked)
            compare(name, ours, exact, arrays, up, 8, like=dtype)
            equal(f"{name}, the bits of one device", ours(*arrays), jax.jit(f(lk.linear_support))(*arrays))
    # Ids that are bad, and what looks like one elsewhere; a target that is none of the ids, none at all; entries of no token.
    x, m = normal(7, tokens, hidden), weights
    ids, offsets = np.array([-1, -2, 7, 1, 39, vocab, 3, 3, 9, -3, 5, 38, 20, 1, 99]), np.array([3, 5, 6, 9, 10, 12, 12, 14])
    targets, up = np.array([39, vocab, 3, -3, 9, 1, -2]), tuple(normal(i, *s) for i, s in enumerate([(tokens,)] * 4 + [(len(ids),)]))
    f = lambda axis: lambda v, m: tuple(lk.linear_support(
        v, m, ids, offsets, targets, teacher_logp=np.full(len(ids), -1.0, np.float32), ignore_index=-2, axis_name=axis))
    for checked in (True, False):
        ours, pull = jax.vjp(split(f("vocab"), P(), 0, checked=checked), x, m)
        right, right_pull = jax.vjp(f(None), x, m)
        check("support, special tokens", all(np.array_equal(a, b, equal_nan=True) for a, b in zip(ours, right)), f"{ours} {right}")
        check("support, special tokens, which", np.isnan(ours[0]).tolist() == [False, True, False, True, True, True, False], ours[0])
        near("support, special tokens, gradient", pull(up), right_pull(up))
    each = split(lambda v, m: [a[None] for a in f("vocab")(v, m)], P(), 0, out=P("vocab"), checked=False)(x, m)
    same = all(np.array_equal(a[:1].repeat(4, 0), a, equal_nan=True) for a in each)
    check("support, the same bits on all devices", same, each)
    masked = jnp.zeros(vocab).at[jnp.array([1, 38])].set(-jnp.inf)
    ids, offsets, targets = supports(1, tokens, vocab, 9)
    f = lambda axis: lambda v, m, b: lk.linear_support(v, m, ids, offsets, bias=b, axis_name=axis).support_logp
    equal("support, masked columns", split(f("vocab"), P(), 0, 0)(x, m, masked), f(None)(x, m, masked))
    alone = split(lambda v, m, i: over(v, m, i, np.arange(4) * 0, np.full(3, -100)).logp, P(), 0, P())
    check("support, no ids", not alone(x[:3], m, jnp.zeros(0, jnp.int32)).any())
    none = split(lambda v, m: over(v, m, ids[:0], np.array([0])).lse.sum(), P(), 0)
    check("support of no tokens", not jax.grad(none, 1)(x[:0], m).any())
    # What runs: only what is wanted, one sum of the logits and one of dx.
    ids, offsets, targets = supports(1, 5, vocab, 4)
    x, forward, back = x[:5], "linear_support_forward_f32", "linear_support_backward_f32"
    head = lambda checked: split(lambda v, m: over(v, m, ids, offsets, targets).logp.sum(), P(), 0, checked=checked)
    for wanted, made in ((0, "dx"), (1, "dweight"), ((0, 1), "dx dweight")):
        calls = calls_in(jax.value_and_grad(head(True), wanted), x, m)
        check(f"support, the gradient of {made}", sorted(calls) == [
            (back, "x weight ids offsets target logits dlogp", f"{made} workspace"),
            (forward, "ids offsets target logits", "logp lse entropy support_logp workspace"),
            (forward, "x weight ids offsets target", "logits workspace")], calls)
    for checked in (True, False):
        text = jax.jit(jax.value_and_grad(head(checked))).lower(x, m).compile().as_text()
        check("support, collectives", sums_in(text, len(ids)) == sums_in(text, "5,24") == 1 and " all-gather" not in text, text)


def ranks_support_of_logits():
    P, over = jax.sharding.PartitionSpec, functools.partial(lk.support, axis_name="vocab")
    vocab, modes = 40, itertools.cycle((True, False))
    for dtype, (k, options) in itertools.product(DTYPES, enumerate(SUPPORT_OPTIONS)):
        if dtype == "float16" and k % 3:  # the others say it
            continue
        shape, checked = ((7,), (2, 3))[k % 2], next(modes)
        ids, offsets, targets = supports(k, math.prod(shape), vocab, (3, 12, 40, 12, 1)[k])  # in one device and in several
        ids, targets = jnp.asarray(ids), targets.reshape(shape)
        if k == 3:
            targets[0, 2], targets[1, 1] = 3, 3
        teacher, rest = teacher_of(ids), {n: o for n, o in options.items() if n != "ignore_index"}
        x = normal(4, *shape, vocab, dtype=dtype, scale=2)
        ups = [64 * normal(20 + i, *(shape if i < 4 else ids.shape)) for i in range(5)]
        for what, f, exact, up in (
                ("all", lambda g: lambda v: some_results(g(v, ids, offsets, targets, teacher_logp=teacher, **options)),
                 lambda v: exact_support(v, ids, offsets, targets, teacher, **options), tuple(ups)),
                ("no targets, no teacher", lambda g: lambda v: some_results(g(v, ids, offsets, **rest)),
                 lambda v: exact_support(v, ids, offsets, **rest), (ups[1], ups[2], ups[4]))):
            name, alone = f"logits {dtype} {options} {what} {'' if checked else 'unchecked'}", jax.jit(f(lk.support))
            ours = split(f(over), len(shape), checked=checked)
            compare(name, ours, exact, [x], up)
            equal(f"{name}, the bits of one device", ours(x), alone(x))
            equal(f"{name}, the bits of one device's gradient", jax.vjp(ours, x)[1](up), jax.vjp(alone, x)[1](up))
    # Ids that are bad, and what looks like one elsewhere, or come twice; a target that is none of them, no ids; entries of no token.
    x = normal(7, 7, vocab).at[0, 7].set(-jnp.inf)
    ids, offsets = np.array([-1, -2, 7, 1, 39, 39, vocab, 3, 3, 9, -3, 5, 38, 20, 1, 99]), np.array([2, 6, 7, 10, 11, 13, 13, 15])
    targets, teacher = np.array([39, vocab, 3, -3, 9, 1, -2]), np.where(ids == 7, -np.inf, -1.0).astype(np.float32)
    up = tuple(normal(i, *s) for i, s in enumerate([(7,)] * 4 + [(len(ids),)]))
    f = lambda axis: lambda v: tuple(lk.support(
        v, ids, offsets, targets, teacher_logp=teacher, ignore_index=-2, axis_name=axis))
    for checked in (True, False):
        ours, pull = jax.vjp(split(f("vocab"), 1, checked=checked), x)
        right, right_pull = jax.vjp(f(None), x)
        check("logits, special tokens", all(np.array_equal(a, b, equal_nan=True) for a, b in zip(ours, right)), f"{ours} {right}")
        (dx,), (right,) = pull(up), right_pull(up)
        check("logits, special tokens, gradient", np.array_equal(dx, right, equal_nan=True), dx)
        which = [np.flatnonzero(bad).tolist() for bad in (np.isnan(ours[0]), np.isnan(dx).all(1), np.isnan(dx).any(1))]
        check("logits, special tokens, which", which == [[1, 3, 4, 5]] * 3, which)
    each = split(lambda v: [a[None] for a in f("vocab")(v)], 1, out=P("vocab"), checked=False)(x)
    same = all(np.array_equal(a[:1].repeat(4, 0), a, equal_nan=True) for a in each)
    check("logits, the same bits on all devices", same, each)
    x = normal(7, 5, vocab)
    ids, offsets, targets = supports(1, 5, vocab, 4)
    one = split(lambda v: over(v, ids % 4, offsets).support_logp, 1)
    equal("logits, a column for each device", one(x[:, :4]), lk.support(x[:, :4], ids % 4, offsets).support_logp)
    none = split(lambda v: over(v, ids, np.array([0])).lse.sum(), 1)
    check("logits of no tokens", jax.grad(none)(x[:0]).shape == (0, vocab))
    alone = split(lambda v: over(v, ids[:0], np.zeros(6, np.int32), np.full(5, -100)).logp, 1)
    check("logits, no ids", not alone(x).any() and not jax.grad(lambda v: alone(v).sum())(x).any())
    # What runs: one sum of the entries' logits, none of a gradient. Nothing keeps the logits for backward.
    forward, back = "linear_support_forward_f32", "linear_support_backward_f32"
    for checked in (True, False):
        loss = split(lambda v: over(v, ids, offsets, targets).logp.sum(), 1, checked=checked)
        calls = calls_in(jax.value_and_grad(loss), x)
        check("logits, calls", sorted(calls) == [
            (back, "ids offsets target logits dlogp", "dfull_logits workspace"),
            (forward, "full_logits ids offsets target", "logits workspace"),
            (forward, "ids offsets target logits", "logp lse entropy support_logp workspace")], calls)
        text = jax.jit(jax.value_and_grad(loss)).lower(x).compile().as_text()
        sums = re.findall(r"= (\S+) all-reduce(?:-start)?\(", text)
        check("logits, collectives", sums_in(text, len(ids)) == 1 and " all-gather" not in text and not any(
            "5,10]" in a or "5,40]" in a for a in sums), text)
        kept = jax.tree.leaves(jax.jit(lambda v: jax.vjp(loss, v)[1])(x))
        check("logits, what is kept for backward", not any(a.size >= x.size for a in kept), [a.shape for a in kept])


def ranks_topk():
    P, over = jax.sharding.PartitionSpec, functools.partial(lk.linear_topk, axis_name="vocab")
    hidden, vocab = 24, 120
    weights, bias = normal(8, vocab, hidden, scale=0.3), normal(9, vocab)
    modes = itertools.cycle((True, False))
    for dtype, (i, options), size in itertools.product(DTYPES, enumerate(TOPK_OPTIONS), (2, 4)):
        if dtype == "float16" and i % 3:  # the others say it
            continue
        x, k, checked = normal(7, *((5,), (2, 3), (4,))[i % 3], hidden, dtype=dtype), (7, 64, 1, 50, 30)[i], next(modes)
        m, b, mesh = weights.astype(dtype), bias.astype(dtype), mesh_of(vocab=size)  # a quarter has 30 columns, fewer than k
        name = f"topk {dtype} {options} k={k} {size} devices {'' if checked else 'unchecked'}"
        ours = split(lambda v, w: over(v, w, k, **options), P(), 0, mesh=mesh, checked=checked)
        same_topk(name, ours(x, m), exact_topk(x, m, k, None, *topk_scale(options)), 2)
        ours = split(lambda v, w, c: over(v, w, k, bias=c, **options), P(), 0, 0, mesh=mesh, checked=checked)
        same_topk(f"{name}, bias", ours(x, m, b), exact_topk(x, m, k, b, *topk_scale(options)), 2)
    x, m = normal(7, 5, hidden), weights
    value = jnp.abs(normal(6, 5)) + 0.5
    ours = split(lambda v, w, t: over(v, w, 8, temperature=t), P(), 0, P())(x, m, value)
    out = split(lambda v, w, c: over(v, w, 3, bias=c), P(), 0, 0)(x, m[:8], jnp.zeros(8).at[jnp.array([1, 6])].set(jnp.array([jnp.inf, jnp.nan])))
    check("topk, NaN before +inf", bool((out.ids[:, :2] == jnp.array([6, 1])).all()), out)
    keys = jax.random.split(jax.random.key(1), 2000)
    few, same = m[:8] / 4, jnp.repeat(x[:1], 2000, 0)
    drawn, p = split(lambda v, w, s: over(v, w, 2, seed=s), P(), 0, P())(same, few, keys), jax.nn.softmax(same[0] @ few.T)
    share = jnp.bincount(drawn.ids[:, 0], length=8) / 2000
    check("topk, draws", bool((abs(share - p) <= 4.5 * jnp.sqrt(p * (1 - p) / 2000)).all()), (share, p))
    near("topk, logp of draws", drawn.logp, jnp.log(p)[drawn.ids])
    same_topk("topk, a temperature of each token", ours, exact_topk(x / value[:, None], m, 8), 2)
    same_topk("topk, all columns", split(lambda v, w: over(v, w, 64), P(), 0)(x, m[:64]), exact_topk(x, m[:64], 64), 2)
    same_topk("topk, a column for each device", split(lambda v, w: over(v, w, 3), P(), 0)(x, m[:4]), exact_topk(x, m[:4], 3), 2)
    # Equal columns, whose lse is equal on all devices too.
    same = m[:1].repeat(40, 0)
    same_topk("topk, all columns equal", split(lambda v, w: over(v, w, 33), P(), 0)(x, same), exact_topk(x, same, 33), 2)
    # Devices all of whose columns are masked, and all devices' columns.
    for first in (7, 30, 60):
        masked = jnp.zeros(vocab).at[first:].set(-jnp.inf)
        with np.errstate(invalid="ignore"):
            same_topk(f"topk, columns masked from {first} on", split(lambda v, w, c: over(v, w, 64, bias=c), P(), 0, 0)(x, m, masked),
                      exact_topk(x, m, 64, masked), 2)
    out = split(lambda v, w, c: over(v, w, 40, bias=c), P(), 0, 0)(x, m, jnp.full(vocab, -jnp.inf))
    check("topk, nothing but masked columns", bool((out.ids == jnp.arange(40)).all() and jnp.isnan(out.logp).all() and (
        out.lse == -jnp.inf).all()), out)
    out = split(lambda v, w, c: over(v, w, 40, bias=c), P(), 0, 0)(x, m, bias.at[77].set(jnp.nan))
    check("topk, NaN comes first", bool((out.ids[:, 0] == 77).all() and jnp.isnan(out.logp).all() and jnp.isnan(out.lse).all()), out)
    out = split(lambda v, w: over(v, w, 40), P(), 0)(x[:0], m)
    check("topk, no tokens", [a.shape for a in out] == [(0, 40), (0, 40), (0,)], out)
    each = split(lambda v, w: [a[None] for a in over(v, w, 40)], P(), 0, out=P("vocab"), checked=False)(x, m)
    check("topk, the same bits on all devices", all(np.array_equal(a[:1].repeat(4, 0), a) for a in each), each)
    # Transformations. Tokens over another axis, columns over two.
    tokens, two = normal(5, 4, 6, hidden), mesh_of(data=2, vocab=2)
    alone = lk.linear_topk(tokens, m, 9)
    for how, ours in (("vmap inside", split(jax.vmap(lambda v, w: over(v, w, 9), (0, None)), P(), 0)),
                      ("vmap outside", jax.vmap(split(lambda v, w: over(v, w, 9), P(), 0), (0, None))),
                      ("scan", split(lambda v, w: jax.lax.scan(lambda c, a: (c, over(a, w, 9)), 0, v)[1], P(), 0)),
                      ("data and vocab", split(lambda v, w: over(v, w, 9), P("data"), P("vocab"), out=P("data"), mesh=two))):
        near(f"topk {how}", ours(tokens, m), alone)
    for axes in (("data", "vocab"), ("vocab", "data")):
        near(f"topk, columns over {axes}", split(lambda v, w: lk.linear_topk(v, w, 9, axis_name=axes), P(), P(axes), mesh=two)(
            tokens, m), alone)
    for checked in (True, False):
        loss = split(lambda v, w: over(v, w, 9).logp.sum(), P(), 0, checked=checked)
        check("topk, gradients are 0", not any(g.any() for g in jax.jit(jax.grad(loss, (0, 1)))(x, m)))
        text = jax.jit(loss).lower(x, m).compile().as_text()
        check("topk, one all-gather", len(re.findall(r" all-gather(?:-start)?\(", text)) == 1 and " all-reduce" not in text, text)
    no_axis = "axis_name is 'model', and there is no such axis here; call inside jax.shard_map, over a mesh that has it"
    for kind, expected, f in [
            (ValueError, no_axis, lambda: lk.linear_topk(x, m, 2, axis_name="model")),
            (ValueError, "k is 9; it must be 1 to 8, the number of columns", lambda: split(lambda v, w: over(v, w, 9), P(), 0)(x, m[:8])),
            (ValueError, "bias has the shape (5,); it must have (2,)", lambda: split(
                lambda v, w: over(v, w, 2, bias=x[:, 0]), P(), 0)(x, m[:8])),
            (ValueError, "weight does not vary along the axis 'vocab'; each device must have columns of its own",
             lambda: split(lambda v, w: over(v, w, 2), P(), P())(x, m))]:
        refused(expected, f, kind, "^" + re.escape(expected))


def ranks_kl():
    over, P = functools.partial(lk.kl, axis_name="vocab"), jax.sharding.PartitionSpec
    modes, weights = itertools.cycle((True, False)), jnp.asarray([[0.5, 0.0, 2.0], [1.0, 1.5, 0.25]])
    options_of = [{}, {"reduction": "none", "row_weight": weights}, {"temperature": 2.0, "softcap": 5.0, "reduction": "sum"},
                  {"beta": 0.1, "logit_scale": 0.5, "teacher_scale": 1.5, "teacher_softcap": 4.0, "row_weight": weights}]
    for dtype, divergence, (k, options) in itertools.product(DTYPES, lk.DIVERGENCES, enumerate(options_of)):
        if dtype == "float16" and k % 3:  # the others say it
            continue
        x, y, checked = normal(1, 2, 3, 52, dtype=dtype, scale=2), normal(2, 2, 3, 52, dtype=dtype, scale=2), next(modes)
        full = dict(options, divergence=divergence)
        ours = split(lambda v, w: over(v, w, **full), 2, 2, checked=checked)
        up = normal(3, *lk.kl(x, y, **full).shape)
        compare(f"kl {dtype} {full} {'' if checked else 'unchecked'}", lambda v: ours(v, y), exact_kl(y, **full), [x], up, 2)
        compare(f"kl {dtype} {full}, vmap", lambda v: split(jax.vmap(lambda a, b: over(a, b, "none", **{
            k: v for k, v in full.items() if k not in ("row_weight", "reduction")})), 2, 2)(v, y), exact_kl(y, **{
                **full, "row_weight": None, "reduction": "none"}), [x], normal(3, 2, 3), 2)
    x, y = normal(4, 3, 40), normal(5, 3, 40)
    near_x = x + 1e-4 * y
    compare("kl where the two nearly agree", lambda v: split(lambda v, w: over(v, w, "none"), 1, 1)(v, near_x),
            exact_kl(near_x, reduction="none"), [x], jnp.ones(3), like="bfloat16")
    for divergence, between in (("reverse", []), ("jensen_shannon", [("kl_parallel_between_f32", "logits teacher all_states", "states")])):
        f = split(lambda v, w: over(v, w, divergence=divergence), 1, 1)
        calls = calls_in(jax.grad(f), x, y)
        check(f"kl, {divergence}, calls", calls == [
            ("kl_parallel_forward_f32", "logits teacher", "states"), *between, ("kl_parallel_finish_f32", "all_states", "loss states"),
            ("kl_parallel_backward_f32", "logits teacher states upstream", "dlogits")], calls)
        each = split(lambda v, w: over(v, w, "none", divergence=divergence)[None], 1, 1, out=P("vocab"), checked=False)(x, y)
        check(f"kl, {divergence}, the same bits on all devices", np.array_equal(each[:1].repeat(4, 0), each), each)
        text = jax.jit(jax.grad(f)).lower(x, y).compile().as_text()
        check(f"kl, {divergence}, collectives", len(re.findall(r" all-gather(?:-start)?\(", text)) == 1 + len(between), text)
    heads = functools.partial(lk.linear_kl, axis_name="vocab")
    tokens, hidden, wide, vocab = (2, 3), 24, 16, 40
    for dtype, divergence, (k, options) in itertools.product(DTYPES, lk.DIVERGENCES, enumerate(options_of)):
        if dtype == "float16" and k % 3:
            continue
        bias_type, checked = (dtype if k % 2 else None), next(modes)
        arrays = [normal(7, *tokens, hidden, dtype=dtype), normal(8, vocab, hidden, scale=0.3).astype(dtype)]
        arrays += [normal(9, vocab, dtype=bias_type)] if bias_type else []
        other, m = normal(10, *tokens, wide, dtype=dtype), normal(11, vocab, wide, scale=0.3).astype(dtype)
        full = dict(options, divergence=divergence)
        f = split(lambda v, w, b, y, m: heads(v, w, y, m, bias=b, workspace_mib=1, **full), P(), 0, 0, P(), 0, checked=checked)
        ours = lambda v, w, b=None: f(v, w, jnp.zeros(vocab, dtype) if b is None else b, other, m)
        teacher = np.asarray(other, np.float64) @ np.asarray(m, np.float64).T
        up = normal(3, *lk.linear_kl(*arrays[:2], other, m, **full).shape)
        compare(f"linear_kl {dtype} {full} {'' if checked else 'unchecked'}", ours,
                lambda v, w, b=0.0: exact_kl(teacher, **full)(v @ w.T + b), arrays, up, 6)
    v, w, other, m = normal(7, 5, hidden), normal(8, vocab, hidden, scale=0.3), normal(10, 5, wide), normal(11, vocab, wide, scale=0.3)
    for divergence, matmuls in (("forward", "forward"), ("jensen_shannon", "forward between")):
        f = split(lambda *a: heads(*a, divergence=divergence), P(), 0, P(), 0)
        calls = calls_in(jax.grad(f, (0, 1)), v, w, other, m)
        check(f"linear_kl, {divergence}, calls", [c[0] for c in calls] == [
            f"linear_kl_parallel_{n}_f32" for n in (*matmuls.split(), "finish", "backward")], calls)
        each = split(lambda *a: heads(*a, reduction="none", divergence=divergence)[None], P(), 0, P(), 0, out=P("vocab"), checked=False)
        found = each(v, w, other, m)
        check(f"linear_kl, {divergence}, the same bits on all devices", np.array_equal(found[:1].repeat(4, 0), found), found)
    for divergence in lk.DIVERGENCES:  # the entropy over devices
        of_all, single = lk.kl(x, y, divergence=divergence, return_entropy=True), lk.linear_kl(v, w, other, m, return_entropy=True)
        found = split(lambda a, b: over(a, b, divergence=divergence, return_entropy=True), 1, 1)(x, y)
        near(f"kl, {divergence}, entropy", found, of_all)
        f = split(lambda *a: heads(*a, divergence=divergence, return_entropy=True), P(), 0, P(), 0)
        near(f"linear_kl, {divergence}, entropy", f(v, w, other, m)[1], single[1])
        near(f"linear_kl, {divergence}, gradient beside entropy", jax.grad(lambda v: f(v, w, other, m)[0])(v), jax.grad(
            lambda v: lk.linear_kl(v, w, other, m, divergence=divergence))(v))
    mapped = (0, None, 0, None)
    inside = split(jax.vmap(lambda *a: heads(*a, reduction="none"), mapped), P(), 0, P(), 0)
    alone = jax.vmap(lambda *a: lk.linear_kl(*a, reduction="none"), mapped)
    v, other = normal(7, 2, 5, hidden), normal(10, 2, 5, wide)
    near("linear_kl vmap", inside(v, w, other, m), alone(v, w, other, m))
    none = split(lambda v, w: over(v, w, "none"), 1, 1)
    check("kl of no rows", none(x[:0], x[:0]).shape == (0,))


def ranks_transforms():
    P = jax.sharding.PartitionSpec
    x, m, t, r = normal(1, 4, 6, 24), normal(2, 40, 24, scale=0.3), jnp.asarray(integers(3, 40, 4, 6)), normal(4, 4, 6)
    z, ids = jnp.einsum("abh,vh->abv", x, m), jnp.asarray(integers(5, 40, 4, 6, 3))
    entropy = lambda axis, **o: lambda v, t: lk.cross_entropy(v, t, axis_name=axis, **o)
    head = lambda axis, **o: lambda v, m, t: lk.linear_cross_entropy(v, m, t, axis_name=axis, **o)
    some = lambda axis, **o: lambda v, i: tuple(lk.cross_entropy_ids(v, i, axis_name=axis, **o))
    headed = lambda axis, **o: lambda v, m, i: tuple(lk.linear_cross_entropy_ids(v, m, i, axis_name=axis, tail=True, **o))

    def support(axis, **o):  # three ids of each token, the first of them its target
        def f(v, m, i):
            out = lk.linear_support(v, m, i.ravel(), jnp.arange(0, i.size + 1, 3), i[..., 0], axis_name=axis, **o)
            return out.logp, out.lse, out.entropy, out.support_logp.reshape(i.shape)
        return f
    def chosen(axis, **o):  # the same of logits
        def f(v, i):
            out = lk.support(v, i.ravel(), jnp.arange(0, i.size + 1, 3), i[..., 0], axis_name=axis, **o)
            return out.logp, out.lse, out.entropy, out.support_logp.reshape(i.shape)
        return f
    # x of this device's tokens alone: an all-gather before the call, whose gradient is a reduce-scatter.
    teacher = lambda v, m: jax.lax.stop_gradient((v[::-1] * 2, m * 0.5))
    kl_of = lambda axis: lambda v, m, i: lk.linear_kl(v, m, *teacher(v, m), axis_name=axis)
    for name, f, targets in (("linear", head, t), ("linear_ids", headed, ids), ("support", support, ids), ("linear_kl", kl_of, t)):
        gathers = lambda v, *a: f("vocab")(jax.lax.all_gather(v, "vocab", tiled=True), *a)
        inside, alone = split(gathers, P("vocab"), 0, P()), f(None)
        near(f"{name} of a device's tokens, value", inside(x, m, targets), alone(x, m, targets))
        total = lambda g: jax.grad(lambda v, m: sum(jnp.sin(a).sum() for a in jax.tree.leaves(g(v, m, targets))), (0, 1))
        near(f"{name} of a device's tokens, gradient", total(inside)(x, m), total(alone)(x, m))
        text = jax.jit(total(inside)).lower(x, m).compile().as_text()
        sums = [len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in ("reduce-scatter", "all-reduce")]
        check(f"{name} of a device's tokens: one reduce-scatter sums", sums == [1, int(name == "support")], sums)  # its logits
    every = dict(aux=("lse", "entropy", "argmax", "mean_logits"), reduction="none")
    # vmap inside and outside of the shard_map, scan, checkpoint: as without.
    for name, f, arrays, specs in (
            ("cross_entropy", entropy, (z, t), (2, P())), ("none", lambda a: entropy(a, **every), (z, t), (2, P())),
            ("ids", some, (z, ids), (2, P())), ("logits' support", chosen, (z, ids), (2, P())),
            ("linear", head, (x, m, t), (P(), 0, P())),
            ("linear_ids", headed, (x, m, ids), (P(), 0, P())), ("support", support, (x, m, ids), (P(), 0, P()))):
        mapped = tuple(None if a is m else 0 for a in arrays)
        alone = jax.vmap(f(None), mapped)
        inside = split(jax.vmap(f("vocab"), mapped), *specs)
        single = tuple(s if a is m else s - 1 if isinstance(s, int) else s for a, s in zip(arrays, specs))
        def steps(*arrays):
            rest = [a for a, k in zip(arrays, mapped) if k is None]
            body = lambda c, a: (c, f("vocab")(*([a[0], *rest, *a[1:]] if rest else a)))
            return jax.lax.scan(body, 0, tuple(a for a, k in zip(arrays, mapped) if k is not None))[1]
        for how, g in (("vmap inside", inside), ("vmap outside", jax.vmap(split(f("vocab"), *single), mapped)),
                       ("scan", split(steps, *specs)), ("checkpoint", split(jax.checkpoint(jax.vmap(f("vocab"), mapped)), *specs))):
            near(f"{name} {how} value", g(*arrays), alone(*arrays))
            near(f"{name} {how} gradient", jax.jit(gradients(g))(*arrays), gradients(alone)(*arrays))
    # Rows over one axis and columns over another; columns over two axes, in both orders.
    two = mesh_of(data=2, vocab=2)
    for name, f, arrays, specs in (
            ("cross_entropy", lambda a: entropy(a, reduction="none"), (z, t), (P("data", None, "vocab"), P("data"))),
            ("ids", lambda a: some(a, reduction="none"), (z, ids), (P("data", None, "vocab"), P("data"))),
            ("logits' support", chosen, (z, ids), (P("data", None, "vocab"), P("data"))),
            ("linear", lambda a: head(a, reduction="none"), (x, m, t), (P("data"), P("vocab"), P("data"))),
            ("linear_ids", lambda a: headed(a, reduction="none"), (x, m, ids), (P("data"), P("vocab"), P("data"))),
            ("support", support, (x, m, ids), (P("data"), P("vocab"), P("data")))):
        for checked in (True, False):
            g = split(f("vocab"), *specs, out=P("data"), mesh=two, checked=checked)
            near(f"{name} data and vocab, value", g(*arrays), f(None)(*arrays))
            near(f"{name} data and vocab, gradient", jax.jit(gradients(g))(*arrays), gradients(f(None))(*arrays))
    for axes in (("data", "vocab"), ("vocab", "data")):
        g = split(entropy(axes, **every), P(None, None, axes), P(), mesh=two)
        near(f"columns over {axes}, value", g(z, t), entropy(None, **every)(z, t))
        near(f"columns over {axes}, gradient", jax.jit(gradients(g))(z, t), gradients(entropy(None, **every))(z, t))
        g = split(support(axes), P(), P(axes), P(), mesh=two)
        equal(f"a support, columns over {axes}", g(x, m, ids), support(None)(x, m, ids))
        near(f"a support, columns over {axes}, gradient", jax.jit(gradients(g))(x, m, ids), gradients(support(None))(x, m, ids))
        g = split(chosen(axes), P(None, None, axes), P(), mesh=two)
        equal(f"logits' support, columns over {axes}", g(z, ids), chosen(None)(z, ids))
        near(f"logits' support, columns over {axes}, gradient", jax.jit(gradients(g))(z, ids), gradients(chosen(None))(z, ids))
    # Numbers that are operands, and their gradients; a gradient inside of the shard_map.
    for checked in (True, False):
        for name, o in (("number", lambda s: dict(logit_scale=s.mean(), z_loss=s[0, 0] / 8)),
                        ("numbers", lambda s: dict(temperature=s))):
            s = 0.5 + jnp.abs(r)
            ours = split(lambda v, s: entropy("vocab", **o(s), row_weight=r)(v, t), 2, P(), checked=checked)
            near(f"{name} gradient", gradients(ours)(z, s), gradients(lambda v, s: entropy(None, **o(s), row_weight=r)(v, t))(z, s))
            ours = split(lambda v, m, s: head("vocab", **o(s))(v, m, t), P(), 0, P(), checked=checked)
            near(f"head, {name} gradient", gradients(ours)(x, m, s),
                 gradients(lambda v, m, s: head(None, **o(s))(v, m, t))(x, m, s))
            ours = split(lambda v, m, s: headed("vocab", **o(s))(v, m, ids), P(), 0, P(), checked=checked)
            near(f"head's_ids, {name} gradient", gradients(ours)(x, m, s),
                 gradients(lambda v, m, s: headed(None, **o(s))(v, m, ids))(x, m, s))
            only = lambda s: {n: a for n, a in o(s).items() if n != "z_loss"}
            # Of logp alone: in the derivative by a logit_scale the four results cancel, to a hundredth.
            ours = split(lambda v, m, s: support("vocab", **only(s))(v, m, ids)[0], P(), 0, P(), checked=checked)
            near(f"support, {name} gradient", gradients(ours)(x, m, s),
                 gradients(lambda v, m, s: support(None, **only(s))(v, m, ids)[0])(x, m, s))
            ours = split(lambda v, s: chosen("vocab", **only(s))(v, ids)[0], 2, P(), checked=checked)
            near(f"logits' support, {name} gradient", gradients(ours)(z, s),
                 gradients(lambda v, s: chosen(None, **only(s))(v, ids)[0])(z, s))
        # Unchecked, JAX differentiates the sum of the losses of four devices.
        inside = split(lambda v: jax.grad(lambda v: entropy("vocab")(v, t))(v), 2, out=P(None, None, "vocab"), checked=checked)
        near("inside gradient", inside(z) / (1 if checked else 4), jax.grad(entropy(None))(z, t))
    inside = split(lambda v, m: jax.value_and_grad(head("vocab"), (0, 1))(v, m, t), P(), 0, out=(P(), (P(), P("vocab"))))
    near("head, inside gradient", inside(x, m), jax.value_and_grad(head(None), (0, 1))(x, m, t))
    total = lambda axis: lambda v, m: sum(jnp.sin(a).sum() for a in support(axis)(v, m, ids))
    inside = split(lambda v, m: jax.value_and_grad(total("vocab"), (0, 1))(v, m), P(), 0, out=(P(), (P(), P("vocab"))))
    near("support, inside gradient", inside(x, m), jax.value_and_grad(total(None), (0, 1))(x, m))
    total = lambda axis: lambda v: sum(jnp.sin(a).sum() for a in chosen(axis)(v, ids))
    for checked in (True, False):
        inside = split(lambda v: jax.grad(total("vocab"))(v), 2, out=P(None, None, "vocab"), checked=checked)
        near("logits' support, inside gradient", inside(z) / (1 if checked else 4), jax.grad(total(None))(z))


def ranks_mistakes():
    P = jax.sharding.PartitionSpec
    x, t, m, v, ids = normal(1, 4, 8), jnp.zeros(4, jnp.int32), normal(2, 8, 6), normal(3, 4, 6), jnp.zeros((4, 2), jnp.int32)
    i, offsets = jnp.zeros(8, jnp.int32), jnp.arange(0, 9, 2)
    no_axis = "axis_name is 'model', and there is no such axis here; call inside jax.shard_map, over a mesh that has it"
    for kind, expected, f in [
        (ValueError, no_axis, lambda: lk.cross_entropy(x, t, axis_name="model")),
        (ValueError, no_axis, lambda: lk.cross_entropy_ids(x, ids, axis_name="model")),
        (ValueError, no_axis, lambda: split(lambda v, m: lk.linear_cross_entropy(v, m, t, axis_name="model"), P(), 0)(v, m)),
        (ValueError, no_axis, lambda: split(lambda v, m: lk.linear_cross_entropy_ids(
            v, m, ids, axis_name="model").loss, P(), 0)(v, m)),
        (ValueError, no_axis, lambda: lk.linear_support(v, m, i, offsets, axis_name="model")),
        (ValueError, no_axis, lambda: lk.support(x, i, offsets, axis_name="model")),
        (ValueError, "logits does not vary along the axis 'vocab'; each device must have columns of its own",
         lambda: split(lambda x: lk.support(x, i, offsets, axis_name="vocab").lse, P())(x)),
        (ValueError, "with axis_name there is no max_counted", lambda: split(lambda v, m: lk.linear_cross_entropy_ids(
            v, m, ids, axis_name="vocab", max_counted=2).loss, P(), 0)(v, m)),
        (ValueError, "logits does not vary along the axis 'vocab'; each device must have columns of its own",
         lambda: split(lambda x: lk.cross_entropy(x, t, axis_name="vocab"), P())(x)),
        (ValueError, "weight does not vary along the axis 'vocab'; each device must have columns of its own",
         lambda: split(lambda v, m: lk.linear_cross_entropy(v, m, t, axis_name="vocab"), P(), P())(v, m)),
        (ValueError, "targets varies along the axis 'vocab'; all its devices must have the same",
         lambda: split(lambda x, t: lk.cross_entropy(x, t, axis_name="vocab"), P("vocab"), P("vocab"))(x, t)),
        (ValueError, "weight does not vary along the axis 'vocab'; each device must have columns of its own",
         lambda: split(lambda v, m: lk.linear_cross_entropy_ids(v, m, ids, axis_name="vocab").loss, P(), P())(v, m)),
        (ValueError, "target_ids varies along the axis 'vocab'; all its devices must have the same",
         lambda: split(lambda v, m, i: lk.linear_cross_entropy_ids(v, m, i, axis_name="vocab").loss, P(), 0, 1)(v, m, jnp.zeros(
             (4, 8), jnp.int32))),
        (ValueError, "target_weight varies along the axis 'vocab'; all its devices must have the same",
         lambda: split(lambda x: lk.cross_entropy_ids(x, ids, x, axis_name="vocab"), 1)(x)),
        (ValueError, "class_weight has the shape (2,); it must have (8,)",
         lambda: split(lambda x: lk.cross_entropy(x, t, class_weight=x[0], axis_name="vocab"), 1)(x)),
        (ValueError, "bias has the shape (8,); it must have (2,)",
         lambda: split(lambda v, m: lk.linear_cross_entropy(v, m, t, bias=x[0], axis_name="vocab"), P(), 0)(v, m)),
        (ValueError, "tail_weight varies along the axis 'vocab'; all its devices must have the same",
         lambda: split(lambda x: lk.cross_entropy_ids(x, ids, tail_weight=x[:, 0], axis_name="vocab").loss, 1)(x)),
        (ValueError, "weight does not vary along the axis 'vocab'; each device must have columns of its own",
         lambda: split(lambda v, m: lk.linear_support(v, m, i, offsets, axis_name="vocab").lse, P(), P())(v, m)),
        *((ValueError, f"{name} varies along the axis 'vocab'; all its devices must have the same",
           lambda name=name, a=a: split(lambda v, m, a: lk.linear_support(v, m, **{
               "ids": i, "offsets": offsets, name: a}, axis_name="vocab").lse, P(), 0, P("vocab"))(v, m, a))
          for name, a in (("ids", jnp.zeros(32, jnp.int32)), ("offsets", jnp.arange(20)), ("targets", jnp.zeros(16, jnp.int32)),
                          ("teacher_logp", jnp.zeros(32)))),
        *((ValueError, f"{name} varies along the axis 'vocab'; all its devices must have the same",
           lambda name=name, a=a: split(lambda v, a: lk.support(v, **{
               "ids": i, "offsets": offsets, name: a}, axis_name="vocab").lse, 1, P("vocab"))(x, a))
          for name, a in (("ids", jnp.zeros(32, jnp.int32)), ("offsets", jnp.arange(20)), ("targets", jnp.zeros(16, jnp.int32)),
                          ("teacher_logp", jnp.zeros(32)))),
        (TypeError, "teacher_logp would need a gradient", lambda: jax.grad(lambda q: split(lambda v, q: lk.support(
            v, i, offsets, teacher_logp=q, axis_name="vocab").kl.sum(), 1, P())(x, q))(jnp.zeros(8))),
        (ValueError, "bias has the shape (8,); it must have (2,)",
         lambda: split(lambda v, m: lk.linear_support(v, m, i, offsets, bias=x[0], axis_name="vocab").lse, P(), 0)(v, m)),
        (TypeError, "teacher_logp would need a gradient", lambda: jax.grad(lambda q: split(lambda v, m, q: lk.linear_support(
            v, m, i, offsets, teacher_logp=q, axis_name="vocab").kl.sum(), P(), 0, P())(v, m, q))(jnp.zeros(8))),
        (ValueError, "workspace_mib is 9.53674e-07; linear_", lambda: split(lambda v, m: lk.linear_cross_entropy_ids(
            v, m, ids, workspace_mib=1e-6, axis_name="vocab").loss, P(), 0)(v, m)),
        (ValueError, "batch_invariant needs", lambda: split(lambda v, m: lk.linear_cross_entropy(
            v, m, t, batch_invariant=True, axis_name="vocab"), P(), 0)(v, m)),
        (TypeError, "class_weight would need a gradient", lambda: jax.grad(lambda c: split(lambda x, c: lk.cross_entropy(
            x, t, class_weight=c, axis_name="vocab"), 1, P())(x, c))(jnp.ones(8))),
    ]:
        try:
            jax.block_until_ready(f())
            check(expected, False, "no error")
        except (TypeError, ValueError) as error:
            check(expected, type(error) is kind and expected in str(error), f"a {type(error).__name__}: {error}")
    os.environ["LK_CHECK_TARGETS"] = "1"
    try:
        f = split(lambda x, t: lk.cross_entropy(x, t, axis_name="vocab"), 1, P())
        check("LK_CHECK_TARGETS, a column of another device", bool(jnp.isfinite(f(x, t.at[2].set(7)))))
        f = split(lambda v, m, i: lk.linear_cross_entropy_ids(v, m, i, axis_name="vocab").loss, P(), 0, P())
        check("LK_CHECK_TARGETS, an id of another device", bool(jnp.isfinite(f(v, m, ids.at[2].set(7)))))
        f = split(lambda v, m, i: lk.linear_support(v, m, i, offsets, i[::2], axis_name="vocab").logp.sum(), P(), 0, P())
        check("LK_CHECK_TARGETS, an id of another device's support", bool(jnp.isfinite(f(v, m, i.at[2].set(7)))))
        f = split(lambda x, i: lk.support(x, i, offsets, i[::2], axis_name="vocab").logp.sum(), 1, P())
        check("LK_CHECK_TARGETS, an id of another device's columns", bool(jnp.isfinite(f(x, i.at[2].set(7)))))
        jax.effects_barrier()
    finally:
        del os.environ["LK_CHECK_TARGETS"]


def slices():
    """vocab_slices: results have the bits of a call without axis_name on any number of devices; gradients are those of plain calls."""
    P, modes, differ = jax.sharding.PartitionSpec, itertools.cycle((True, False)), 0
    tokens, hidden, wide, vocab = 7, 24, 16, 96
    still, class_weight = jax.lax.stop_gradient, np.abs(normal(5, vocab)) + 0.1
    t, (ids, w) = integers(3, vocab, tokens), ids_case(3, vocab, 4, tokens)
    t[2], ids, q, r = -100, np.where(ids == 2**31 - 1, 2, ids), jnp.abs(normal(9, tokens)), np.abs(normal(4, tokens))
    cut = lambda f, n, specs, **o: split(lambda *a: f(*a, axis_name="vocab", **o), *specs, mesh=mesh_of(vocab=n),
                                         checked=next(modes))
    for dtype, reduction in itertools.product(("float32", "bfloat16"), ("none", "mean")):
        z, y = normal(1, tokens, vocab, dtype=dtype, scale=2), normal(2, tokens, vocab, dtype=dtype, scale=2)
        x, other = normal(7, tokens, hidden, dtype=dtype), normal(10, tokens, wide, dtype=dtype)
        m, teacher = (normal(i, vocab, n, scale=0.3).astype(dtype) for i, n in ((8, hidden), (11, wide)))
        b, c = normal(9, vocab, dtype=dtype), normal(12, vocab, dtype=dtype)
        every = dict(reduction=reduction, class_weight=class_weight, label_smoothing=0.1, z_loss=0.01, softcap=8.0, row_weight=r,
                     aux=("lse", "z_loss", "entropy", "argmax", "valid_rows", "weight_sum", *STATISTICS))
        some = dict(reduction=reduction, tail_weight=q, tail=True)
        cases = [
            ("cross_entropy", lambda z, **o: lk.cross_entropy(z, t, reduction=reduction, **o), (z,), (1,)),
            ("cross_entropy, every option", lambda z, **o: lk.cross_entropy(z, t, **every, **o), (z,), (1,)),
            ("ids", lambda z, **o: tuple(lk.cross_entropy_ids(z, ids, w, **some, **o)), (z,), (1,)),
            ("head", lambda x, m, **o: lk.linear_cross_entropy(x, m, t, reduction=reduction, **o), (x, m), (P(), 0)),
            ("head, every option", lambda x, m, b, **o: lk.linear_cross_entropy(x, m, t, bias=b, **every, **o), (x, m, b),
             (P(), 0, 0)),
            ("head's ids", lambda x, m, b, **o: tuple(lk.linear_cross_entropy_ids(x, m, ids, w, bias=b, **some, **o)), (x, m, b),
             (P(), 0, 0))]
        for divergence in ("forward", "jensen_shannon", "total_variation"):
            full = dict(reduction=reduction, divergence=divergence, return_entropy=True, row_weight=r)
            cases += [(f"kl, {divergence}", lambda z, y, full=full, **o: lk.kl(z, still(y), **full, **o), (z, y), (1, 1)),
                      (f"linear_kl, {divergence}", lambda x, m, b, y, w, c, full=full, **o: lk.linear_kl(
                          x, m, *still((y, w)), bias=b, teacher_bias=still(c), **full, **o), (x, m, b, other, teacher, c),
                       (P(), 0, 0, P(), 0, 0))]
        for k, (name, f, arrays, specs) in enumerate(cases):
            name, alone = f"{dtype} {reduction} {name}", functools.partial(f, vocab_slices=6)
            one = jax.jit(alone)(*arrays)
            near(name, one, f(*arrays))
            if "kl" not in name or reduction == "none":  # XLA sums these, in an order that may differ from program to program
                equal(f"{name}, not under jit", alone(*arrays), one)
            for n in (2, 3, *([1, 6] if reduction == "none" else [])):
                equal(f"{name}, {n} devices", cut(f, n, specs, vocab_slices=6)(*arrays), one)
            free = cut(f, 2, specs)(*arrays)
            differ += any(not np.array_equal(u, v) for u, v in zip(jax.tree.leaves(free), jax.tree.leaves(one), strict=True))
            right = gradients(f)(*arrays)
            for where, g in (("", alone), (f", {2 + k % 2} devices", cut(f, 2 + k % 2, specs, vocab_slices=6))):
                for i, (u, v) in enumerate(zip(jax.jit(gradients(g))(*arrays), right, strict=True)):
                    close(f"{name}{where}, gradient {i}", u, v, 8)
    check("without vocab_slices bits differ", differ > 0)
    # A column for each slice; columns over two axes; ties; vmap; any number of tokens.
    f = lambda z, **o: lk.cross_entropy(z, t, reduction="none", ignore_index=None, aux=("argmax", "entropy"), **o)
    few, t = normal(1, 8, 6), np.array([*range(6), -1, 6], np.int32)
    few = few.at[0].set(1.0).at[1, 2:].set(5.0).at[2, :3].set(-jnp.inf)
    bits = lambda f: lambda *a: jax.tree.map(lambda u: jnp.nan_to_num(u, nan=77), f(*a))
    one = bits(functools.partial(f, vocab_slices=6))(few)
    near("a column for each slice", one, bits(f)(few))
    for n in (2, 3, 6):
        equal(f"a column for each slice, {n} devices", bits(cut(f, n, (1,), vocab_slices=6))(few), one)
    two, t = mesh_of(data=2, vocab=3), integers(3, vocab, tokens)
    z, x, m = normal(1, tokens, vocab, scale=2), normal(7, 2, tokens, hidden), normal(8, vocab, hidden, scale=0.3)
    one = f(z, vocab_slices=12)
    for axes in (("data", "vocab"), ("vocab", "data")):
        equal(f"columns over {axes}", split(lambda z: f(z, axis_name=axes, vocab_slices=12), P(None, axes), mesh=two)(z), one)
    head = lambda x, m, **o: lk.linear_cross_entropy(x, m, t, reduction="none", aux=("lse", "entropy"), **o)
    rows = split(lambda z, t: lk.cross_entropy(z, t, reduction="none", vocab_slices=4), P("data"), P("data"), mesh=two, out=P("data"))
    near("tokens over an axis", rows(z[:6], t[:6]), lk.cross_entropy(z[:6], t[:6], reduction="none"))
    for name, g in (("one device", jax.vmap(functools.partial(head, vocab_slices=6), (0, None))),
                    ("devices", split(jax.vmap(functools.partial(head, axis_name="vocab", vocab_slices=6), (0, None)), P(), 0,
                                      mesh=mesh_of(vocab=3)))):
        near(f"vmap, {name}", g(x, m), jax.vmap(head, (0, None))(x, m))
        near(f"vmap, {name}, gradient", jax.jit(gradients(g))(x, m), gradients(jax.vmap(head, (0, None)))(x, m))
    with jax.enable_x64(True):
        wide = jnp.asarray(t, jnp.int64)
        found = lk.cross_entropy(z, wide, reduction="none", aux=("argmax",), vocab_slices=6)
        equal("64-bit targets", split(lambda z: lk.cross_entropy(z, wide, reduction="none", aux=("argmax",), axis_name=("vocab",),
                                                                 vocab_slices=6), 1, mesh=mesh_of(vocab=3))(z), found)
        near("64-bit targets, without", found, lk.cross_entropy(z, wide, reduction="none", aux=("argmax",)))
    t, v, w = integers(3, 768, 70), normal(1, 70, 64, dtype="bfloat16"), normal(2, 768, 64, dtype="bfloat16", scale=0.3)
    head = lambda a, b, **o: lambda v, w: lk.linear_cross_entropy(v, w, t[a:b], reduction="none", aux=("lse", "entropy"),
                                                                  batch_invariant=True, vocab_slices=6, **o)
    one = head(0, 70)(v, w)
    for a, b in ((0, 70), (0, 1), (5, 8), (33, 70)):
        part, expected = (v[a:b], w), jax.tree.map(lambda u: u[a:b], one)
        equal(f"batch_invariant, tokens {a} to {b}", head(a, b)(*part), expected)
        equal(f"batch_invariant, tokens {a} to {b}, 2 devices",
              split(head(a, b, axis_name="vocab"), P(), 0, mesh=mesh_of(vocab=2))(*part), expected)
    calls = [c[0] for c in calls_in(jax.grad(lambda z: lk.cross_entropy(z, t[:7], vocab_slices=3)), z)]
    check("what runs", calls == [*["cross_entropy_parallel_forward_f32"] * 3, "cross_entropy_parallel_finish_f32",
                                 "cross_entropy_parallel_backward_f32"], calls)
    i, t = jnp.zeros((7, 2), jnp.int32), t[:7]
    x, r = x[0], jnp.ones(7)
    for what, f in (("cross_entropy", lambda **o: lk.cross_entropy(z, t, **o)), ("kl", lambda **o: lk.kl(z, z, **o)),
                    ("ids", lambda **o: lk.cross_entropy_ids(z, i, **o)), ("linear_kl", lambda **o: lk.linear_kl(x, m, x, m, **o)),
                    ("head", lambda **o: lk.linear_cross_entropy(x, m, t, **o)),
                    ("head's ids", lambda **o: lk.linear_cross_entropy_ids(x, m, i, **o))):
        refused(f"{what}, below 0", lambda: f(vocab_slices=-1), ValueError, "vocab_slices is -1; it must be 0 or more")
        refused(f"{what}, no divisor", lambda: f(vocab_slices=7), ValueError,
                "vocab_slices is 7; it must divide the number of columns of all devices, 96")
        refused(f"{what}, no number", lambda: f(vocab_slices=2.5), TypeError, "vocab_slices is 2.5; it must be a whole number")
    sliced = lambda n: split(lambda z: lk.cross_entropy(z, t, axis_name="vocab", vocab_slices=n), 1, mesh=mesh_of(vocab=2))(z)
    refused("no multiple of devices", lambda: sliced(3), ValueError,
            "vocab_slices is 3; it must be a multiple of the number of devices, 2")
    refused("no divisor, devices", lambda: sliced(10), ValueError,
            "vocab_slices is 10; it must divide the number of columns of all devices, 96")
    refused("max_counted", lambda: lk.linear_cross_entropy_ids(x, m, i, max_counted=3, vocab_slices=6), ValueError,
            "with vocab_slices there is no max_counted")
    refused("linear_kl, max_counted", lambda: lk.linear_kl(x, m, x, m, row_weight=r, max_counted=3, vocab_slices=6), ValueError,
            "with vocab_slices there is no max_counted")


def invariant():
    """batch_invariant: rows have the bits that they have among 120, alone and under jax.grad. Without it some have not."""
    rows, simulated = 120, jax.default_backend() == "cpu"
    places = ((0, 1), (rows - 1, 1), (59, 2), (40, 40))
    still, differ = jax.lax.stop_gradient, {}
    every = ("lse", "z_loss", "entropy", "argmax", *STATISTICS)

    def same(kind, name, f, arrays, option=True):
        """f(option)(*arrays): results of rows, of arrays of rows. option: counts where bits differ without it."""
        part = lambda a, n: [v[a:a + n] for v in arrays]
        for on in (True, False) if option else (True,):
            g = jax.jit(f(on))
            whole = g(*arrays)
            for a, n in places:
                some, expected = g(*part(a, n)), jax.tree.map(lambda v: v[a:a + n], whole)
                if on:
                    equal(f"{name}, {n} rows from {a} on", some, expected)
                else:
                    differ[kind] = differ.get(kind, 0) + (not all(map(np.array_equal, *map(jax.tree.leaves, (some, expected)))))

    for i, (dtype, cols) in enumerate(itertools.product(("float32", "bfloat16"), (1000, 20000))):
        z, y = (normal(k, rows, cols, dtype=dtype, scale=2) for k in (1, 2))
        t, weight = integers(3, cols, rows), normal(4, cols, dtype=dtype)
        for options in (dict(), dict(aux=every, z_loss=0.01), dict(softcap=20.0, label_smoothing=0.1, aux=("lse",))):
            same("cross_entropy", f"{dtype} {cols} {options}", lambda on: lambda z, t: lk.cross_entropy(
                z, t, reduction="none", batch_invariant=on, **options), (z, t))
        for divergence in ("forward", "jensen_shannon", "total_variation")[i % 2:]:
            same("kl", f"{dtype} {cols} {divergence}", lambda on: lambda z, y: lk.kl(
                z, y, "none", divergence=divergence, return_entropy=True, batch_invariant=on), (z, y))
        same("rms_norm", f"{dtype} {cols} norm", lambda on: lambda z: lk.rms_norm(z, batch_invariant=on), (z,))
        same("rms_norm", f"{dtype} {cols} weight, bias", lambda on: lambda z: lk.rms_norm(
            z, weight, bias=weight, batch_invariant=on), (z,))
        same("add_rms_norm", f"{dtype} {cols} residual", lambda on: lambda z, y: lk.add_rms_norm(
            z, y, weight, batch_invariant=on), (z, y))
        for first in (False, True):
            same("gate", f"{dtype} {cols} gate, {first}", lambda on: lambda z, y: lk.rms_norm(
                z, weight, gate=y, gate_first=first, batch_invariant=on), (z, y))
        # Under jax.grad. One row's loss is the reduced one.
        alone = lk.cross_entropy(z, t, reduction="none", z_loss=0.01, aux=("z_loss",), batch_invariant=True)
        teacher = lk.kl(z, y, "none", batch_invariant=True)
        for reduction, in_place in (("sum", False), ("mean", True)):
            f = lambda z, t: lk.cross_entropy(z, t, reduction=reduction, z_loss=0.01, aux=("z_loss",), in_place=in_place,
                                              grad_scale=jnp.float32(1), batch_invariant=True)
            g = jax.jit(jax.value_and_grad(f, has_aux=True))
            for a, n in places:
                (loss, aux), dz = g(z[a:a + n], t[a:a + n])
                if n == 1:
                    equal(f"{dtype} {cols} {reduction} under grad, row {a}", (loss, aux["z_loss"].reshape(())),
                          (alone[0][a], alone[1]["z_loss"][a]))
            calls = [name for name, *_ in calls_in(g, z, t)]
            kinds = [f"cross_entropy_{d}_{'f32' if dtype == 'float32' else 'bf16'}" for d in ("forward", "backward")]
            check(f"{dtype} {cols} {reduction} calls", calls == kinds, calls)
        compare(f"{dtype} {cols} gradient", lambda z: lk.cross_entropy(z, t[:2], batch_invariant=True),
                lambda z: exact_entropy(z, t[:2])[0], [z[:2]], 4096 * jnp.float32(1), 3)
        g = jax.jit(jax.value_and_grad(lambda z, y: lk.kl(z, still(y), batch_invariant=True)))
        for a in (0, rows - 1):
            equal(f"{dtype} {cols} kl under grad, loss of row {a}", g(z[a:a + 1], y[a:a + 1])[0], teacher[a])
        pull = lambda f: lambda *a: jax.vjp(f, *a)[0]
        same("", f"{dtype} {cols} rows under grad", lambda on: pull(lambda z: lk.cross_entropy(
            z, jnp.zeros(len(z), jnp.int32), reduction="none", batch_invariant=on)), (z,), option=False)
        same("", f"{dtype} {cols} rows of kl under grad", lambda on: lambda z, y: pull(lambda z: lk.kl(
            z, y, "none", batch_invariant=on))(z), (z, y), option=False)
        same("", f"{dtype} {cols} norm under grad", lambda on: pull(lambda z: lk.rms_norm(z, weight, batch_invariant=on)), (z,),
             option=False)
        # Slices of the columns, and two devices.
        f = lambda on: lambda z, t: lk.cross_entropy(z, t, reduction="none", aux=every, batch_invariant=on, vocab_slices=2)
        same("cross_entropy, slices", f"{dtype} {cols} slices", f, (z, t))
        kl = lambda on, kind, **o: lambda z, y: lk.kl(z, y, "none", divergence=kind, return_entropy=True, batch_invariant=on, **o)
        for kind in ("forward", "jensen_shannon", "total_variation")[i % 2:] if (dtype, cols) != ("bfloat16", 1000) else ():  # 1000 bytes
            same("kl, slices", f"{dtype} {cols} {kind} slices", lambda on: kl(on, kind, vocab_slices=2), (z, y))
            for a, n in places if simulated else ():
                equal(f"{dtype} {cols} {kind}, 2 devices, {n} rows from {a} on", split(
                    kl(True, kind, axis_name="vocab"), 1, 1, mesh=mesh_of(vocab=2))(z[a:a + n], y[a:a + n]),
                      jax.tree.map(lambda b: b[a:a + n], kl(True, kind, vocab_slices=2)(z, y)))
        if simulated:
            for a, n in places:
                equal(f"{dtype} {cols} 2 devices, {n} rows from {a} on", split(
                    lambda v, u: lk.cross_entropy(v, u, reduction="none", aux=every, batch_invariant=True, axis_name="vocab"),
                    1, jax.sharding.PartitionSpec(), mesh=mesh_of(vocab=2))(z[a:a + n], t[a:a + n]),
                      jax.tree.map(lambda b: b[a:a + n], f(True)(z, t)))
    heads = normal(5, 2, 500)
    same("", "weight of heads", lambda on: lambda x: lk.rms_norm(x, heads, batch_invariant=on), (normal(1, rows, 2, 500),),
         option=False)
    if simulated:
        for kind, count in differ.items():
            check(f"{kind} without batch_invariant has other bits somewhere", count > 0)


def graphs():
    """Every call in a CUDA graph of its own: the flag of this process makes graphs of single calls."""
    for name, (f, mapped, others) in functions().items():
        whole = jax.jit(gradients(f))
        first = tuple(a[0] for a in mapped)
        expected = gradients(f)(*first, *others)
        for i in range(3):  # a graph is made in the first runs and launched later
            (near if name in BY_XLA else equal)(f"{name} gradient run {i}", whole(*first, *others), expected)


def worker(name):
    """The process of one group."""
    global group
    began, group = time.time(), name
    counts[group] = [0, 0, 0.0]
    globals()[name]()
    passed, failed, worst = counts[group]
    print(f"{group:24} {passed:5} passed {failed:3} failed   largest error / limit {worst:5.2f}   {time.time() - began:5.1f} s",
          flush=True)


def child(name):
    """(passed, failed) of a group. Its output is printed at once, when it is over."""
    env = {**os.environ, **SETTINGS.get(name, {}), "LK_JAX_GROUP": name}
    found = subprocess.run([sys.executable, os.path.abspath(__file__)], text=True, env=env, stdout=subprocess.PIPE,
                           stderr=subprocess.STDOUT)
    counted = re.search(rf"^{name} +(\d+) passed +(\d+) failed", found.stdout, re.M)
    good = counted and not found.returncode
    print(found.stdout.rstrip()[-3000:] + ("" if good else f"\nFAIL {name}: exit status {found.returncode}"), flush=True)
    return (int(counted[1]), int(counted[2]) + (not good)) if counted else (0, 1)


def main():
    began = time.time()
    groups = ["cross_entropy", "with_grad", "linear_cross_entropy", "cross_entropy_ids", "linear_cross_entropy_ids", "numbers",
              "support", "linear_support", "linear_topk", "md_lrpe_cosine", "logsumexp", "kl", "linear_kl", "ports", "rms_norm", "glu", "rope", "fp8",
              "scales", "invariant", "launches", "transforms", "everywhere", "mistakes", "x64",
              *(("graphs",) if lk.platform() == "CUDA" else ("devices", "ranks", "slices", "meshes"))]
    chosen = sys.argv[1:] or groups
    if set(chosen) - set(groups):
        sys.exit(f"there are the groups {', '.join(groups)}")
    workers = min(4, os.cpu_count())
    print(f"lk_jax for {lk.platform()}, JAX {jax.__version__}, {len(chosen)} groups, {workers} processes at a time", flush=True)
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        found = list(pool.map(child, chosen))
    passed, failed = (sum(f[i] for f in found) for i in (0, 1))
    print(f"{time.time() - began:.0f} s\n{passed} passed, {failed} failed", flush=True)
    sys.exit(failed > 0)


if __name__ == "__main__":
    if "LK_JAX_GROUP" in os.environ:
        worker(os.environ["LK_JAX_GROUP"])
    else:
        main()
