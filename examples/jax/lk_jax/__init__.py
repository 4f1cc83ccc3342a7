# SPDX-License-Identifier: MIT
"""lk's operations of language-model training in JAX: logsumexp, cross_entropy, linear_cross_entropy, md_lrpe_cosine, rms_norm.

Every function works under jit, grad, vmap, scan, checkpoint and shard_map. Arrays are float32, float16 or bfloat16. Sums are
float32. An option that is off costs nothing. The comment at the top of lk/<op>.cuh has the formulas and the accuracy.
"""
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from ._ffi import TYPES, call, platform, same_axes

__all__ = ["logsumexp", "cross_entropy", "linear_cross_entropy", "md_lrpe_cosine", "rms_norm", "add_rms_norm", "srms_norm",
           "platform"]
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
ACTIVATIONS = {None: 0, "relu": 1, "sigmoid": 2, "silu": 3, "softmax": 4, "softmax_tokens": 5}
_f32 = jnp.float32
_of = jax.ShapeDtypeStruct

# ---- Checks that need JAX's types; lk itself checks sizes and options, see _ffi.py -------------------------------------------


def _demand(good, sentence):
    if not good:
        raise ValueError(sentence)


def _array(a, name, rank=0):
    a = jnp.asarray(a)
    _demand(a.dtype.name in TYPES, f"{name} is {a.dtype.name}; it must be float32, float16 or bfloat16")
    _demand(a.ndim >= rank, f"{name} has the shape {a.shape}; it must have {rank} dimensions or more")
    return a


def _or_float32(dtype):
    return "float32" if dtype == _f32 else f"{jnp.dtype(dtype).name} or float32"


def _beside(a, name, dtype, shape):
    """Checks a second tensor of an op: of the type of the first, or float32 (lk's number 1)."""
    a = _array(a, name)
    _demand(a.dtype == dtype or a.dtype == _f32, f"{name} is {a.dtype.name}; it must be {_or_float32(dtype)}")
    _demand(a.shape == shape, f"{name} has the shape {a.shape}; it must have {shape}")
    return a


def _dtype_field(a, dtype):
    return int(a is not None and a.dtype != dtype)


def _like(a):
    return None if a is None else _of(a.shape, a.dtype)


def _choice(value, choices, name):
    _demand(value in choices, f"{name} is {value!r}; it must be one of {', '.join(map(repr, choices))}")
    return choices[value]


def _targets(targets, shape, of):
    targets = jnp.asarray(targets)
    _demand(targets.dtype in (jnp.int32, jnp.int64), f"targets is {targets.dtype.name}; it must be int32 or int64")
    _demand(targets.shape == shape, f"targets has the shape {targets.shape}; the shape of {of} asks for {shape}")
    return targets


# ---- custom_vjp: what is differentiated --------------------------------------------------------------------------------------
# With symbolic_zeros a forward rule knows which arguments are differentiated. What must be known in the backward rule goes
# there as the keys of a dictionary: they are part of the type of what is saved.


def _wanted(**primals):
    return {name: None for name, p in primals.items() if p is not None and p.perturbed}


def _values(*primals):
    return [None if p is None else p.value for p in primals]


def _given(cotangent):
    """The gradient of an output, None where it is certainly 0."""
    return None if type(cotangent) is SymbolicZero else cotangent


def _upstream(cotangents):
    """Of a cross entropy: the gradients of loss, lse and entropy."""
    loss, aux = cotangents
    return _given(loss), *(_given(aux[n]) if n in aux else None for n in _SMOOTH)


def _saved(saved, dentropy):
    """What backward reads. lk takes the entropy together with its gradient."""
    return {n: a for n, a in saved.items() if n != "entropy" or dentropy is not None}


def _scaled(gradient, factor):
    """gradient times the upstream gradient of a reduced loss. Where that is the constant 1 XLA removes all of it."""
    return None if gradient is None else (gradient.astype(_f32) * factor).astype(gradient.dtype)


# ---- logsumexp ---------------------------------------------------------------------------------------------------------------


def logsumexp(a, axis=None, keepdims=False, *, scale=1.0, dtype=None):
    """log sum exp(scale a) over one axis, neighbouring axes or, with None, all axes, like jax.nn.logsumexp.

    dtype: of the result; None is a's, as in JAX. float32 keeps all digits of 16-bit a.
    """
    a = _array(a, "a")
    dtype = jnp.dtype(a.dtype if dtype is None else dtype)
    _demand(dtype == a.dtype or dtype == _f32, f"dtype is {dtype.name}; it must be {_or_float32(a.dtype)}")
    _demand(np.float32(scale) != 0, "scale is 0; it must be another number")
    axes = range(a.ndim) if axis is None else axis if isinstance(axis, (tuple, list)) else (axis,)
    for i in axes:
        _demand(-a.ndim <= i < a.ndim, f"axis {i} does not exist in the shape {a.shape}")
    axes = sorted(i % a.ndim for i in axes)
    first, count = (axes[0], len(axes)) if axes else (a.ndim, 0)
    _demand(axes == list(range(first, first + count)), f"axis is {axis}; lk sums over axes that are neighbours")
    sizes = [math.prod(s) for s in (a.shape[:first], a.shape[first:first + count], a.shape[first + count:])]
    if not sizes[2]:  # an empty result; lk takes inner = 0 for 1
        sizes[0], sizes[2] = 0, 1
    shape = tuple(1 if i in axes else n for i, n in enumerate(a.shape) if keepdims or i not in axes)
    return _logsumexp(float(scale), dtype.name)(a.reshape(sizes)).reshape(shape)


@functools.lru_cache(None)
def _logsumexp(scale, dtype):
    def forward(x, save):
        fields = dict(zip(("outer", "cols", "inner"), x.shape), scale=scale)
        row = (x.shape[0], x.shape[2])
        low = dtype != "float32"
        found = call(f"logsumexp_forward_{TYPES[x.dtype.name]}", {"x": x}, {
            "lse": _of(row, _f32) if save or not low else None, "lse_low": _of(row, _f32) if save else None,
            "lse_rounded": _of(row, x.dtype) if low else None}, fields, "outer")
        return found["lse_rounded" if low else "lse"], (found.get("lse"), found.get("lse_low"))

    @jax.custom_vjp
    def f(x):
        return forward(x, save=False)[0]

    def fwd(x):
        lse, kept = forward(x.value, save=True)
        return lse, (x.value, *kept)

    def bwd(kept, dlse):
        x, lse, lse_low = kept
        if _given(dlse) is None:
            return jnp.zeros(x.shape, x.dtype),
        found = call(f"logsumexp_backward_{TYPES[x.dtype.name]}",
                     {"x": x, "lse": lse, "lse_low": lse_low, "dlse": dlse.astype(_f32)}, {"dx": _like(x)},
                     dict(zip(("outer", "cols", "inner"), x.shape), scale=scale), "outer")
        return found["dx"],

    f.defvjp(fwd, bwd, symbolic_zeros=True)
    return f


# ---- cross_entropy and linear_cross_entropy ----------------------------------------------------------------------------------


def _loss_fields(reduction, ignore_index, label_smoothing, z_loss, softcap, logit_scale, zero_when_empty):
    """The options that both ops share, as fields."""
    _demand(np.float32(logit_scale) != 0, "logit_scale is 0; it must be above 0")
    return dict(reduction=_choice(reduction, REDUCTIONS, "reduction"), use_ignore_index=int(ignore_index is not None),
                ignore_index=int(ignore_index or 0), label_smoothing=float(label_smoothing), z_loss=float(z_loss),
                softcap=float(softcap or 0), logit_scale=0.0 if logit_scale == 1 else float(logit_scale),
                zero_when_empty=int(zero_when_empty))


_AUX = ("lse", "z_loss", "entropy", "argmax", "valid_rows", "weight_sum")
_SMOOTH = ("lse", "entropy")  # those that have a gradient


def _result(aux, found):
    """The loss, and the results named in aux, of a call's outputs."""
    found = {"z_loss" if n == "z_loss_out" else n: a for n, a in found.items()}
    return found["loss"], {name: found[name] for name in aux}


def _loss_outputs(aux, known, reduced, shape):
    """The outputs of forward: the loss and those that aux names."""
    for name in aux:
        _demand(name in known, f"aux has {name!r}; it may have {', '.join(map(repr, known))}")
    loss = _of(() if reduced else shape, _f32)
    # lk's int64 numbers are two int32 each, since JAX has no int64 by default. The first is the low half.
    all_ = {"loss": loss, "lse": _of(shape, _f32), "z_loss": loss, "entropy": _of(shape, _f32),
            "argmax": _of((*shape, 2), jnp.int32), "valid_rows": _of((2,), jnp.int32), "weight_sum": _of((), _f32)}
    return {"z_loss_out" if name == "z_loss" else name: all_[name] for name in ("loss", *aux)}


def _shared(reduced):
    """The inputs and outputs that have no rows."""
    return ("weight", "bias", "class_weight", "denominator", "valid_rows", "weight_sum", "dweight", "dbias",
            *(("loss", "z_loss_out", "upstream") if reduced else ()))


def _loss_result(aux, loss, found):
    """What the user gets: the loss, with aux also {name: array}. Only loss, lse and entropy have gradients."""
    if not aux:
        return loss
    halves = {name: found[name][..., 0] for name in ("argmax", "valid_rows") if name in aux}
    return loss, {n: found[n] if n in _SMOOTH else jax.lax.stop_gradient(halves.get(n, found[n])) for n in aux}


def _denominator(denominator, reduction):
    if denominator is None:
        return None
    _demand(reduction == "mean", f"reduction is {reduction!r}; with a denominator it must be 'mean'")
    denominator = jnp.asarray(denominator, _f32)
    _demand(denominator.size == 1, f"denominator has the shape {denominator.shape}; it must be one number")
    return jax.lax.stop_gradient(denominator.reshape(()))


def _class_weight(class_weight, vocab):
    if class_weight is not None:
        class_weight = jnp.asarray(class_weight, _f32)
        _demand(class_weight.shape == (vocab,), f"class_weight has the shape {class_weight.shape}; it must have {(vocab,)}")
        class_weight = jax.lax.stop_gradient(class_weight)
    return class_weight


def cross_entropy(logits, targets, *, reduction="mean", ignore_index=-100, label_smoothing=0.0, z_loss=0.0, softcap=0.0,
                  logit_scale=1.0, class_weight=None, zero_when_empty=False, denominator=None, in_place=False, aux=()):
    """Softmax cross entropy of logits [..., vocab] with integer targets [...], float32.

    reduction: "mean" over the targets that count, "sum", or "none", as optax.softmax_cross_entropy_with_integer_labels has it.
    ignore_index: such targets count nowhere; None: none. z_loss k adds k lse^2. softcap s makes logits s tanh(logits / s); 0 or
    None is off. class_weight [vocab]: a factor per class. zero_when_empty: a mean over nothing is 0, not NaN. denominator: what
    a mean divides by instead of its own count, the targets of all micro-batches, say; it may be traced.
    in_place: the gradient takes the memory of the logits. That saves as much where the logits come from the same jit and
    nothing else reads them; where they are an argument of jit, or are read again, XLA copies them before.
    aux: names of more results, which are then returned as a dictionary beside the loss: "lse", "z_loss" (its part of the
    loss), "entropy", "argmax", "valid_rows" (the number of targets that count), "weight_sum". Of them lse and entropy have
    gradients.
    A target outside [0, vocab) that is not ignored makes the loss NaN.
    """
    logits = _array(logits, "logits", 1)
    shape, vocab = logits.shape[:-1], logits.shape[-1]
    targets = _targets(targets, shape, "logits")
    fields = _loss_fields(reduction, ignore_index, label_smoothing, z_loss, softcap, logit_scale, zero_when_empty)
    aux = tuple(aux)
    _loss_outputs(aux, _AUX, False, shape)
    arrays = same_axes(logits, targets, _class_weight(class_weight, vocab), _denominator(denominator, reduction))
    return _loss_result(aux, *_cross_entropy(tuple(fields.items()), bool(in_place), aux)(*arrays))


@functools.lru_cache(None)
def _cross_entropy(options, in_place, aux):
    options = dict(options)
    reduced = bool(options["reduction"])
    smooth = [n for n in _SMOOTH if n in aux]

    def run(direction, arrays, inputs, outputs):
        logits, targets, class_weight, denominator = arrays
        fields = dict(options, rows=targets.size, vocab=logits.shape[-1], target_dtype=int(targets.dtype == jnp.int32))
        if direction == "backward":
            fields["upstream_per_row"] = int(not reduced)
        return call(f"cross_entropy_{direction}_{TYPES[logits.dtype.name]}",
                    {"logits": logits, "target": targets, "class_weight": class_weight, "denominator": denominator, **inputs},
                    outputs, fields, "rows", _shared(reduced),
                    [("logits", "dlogits")] if in_place and "dlogits" in outputs else [])

    def outputs(targets, more=()):
        names = dict.fromkeys((*aux, *more))
        return _loss_outputs(names, names, reduced, targets.shape)

    @jax.custom_vjp
    def f(*arrays):
        return _result(aux, run("forward", arrays, {}, outputs(arrays[1])))

    def fwd(*primals):
        arrays = logits, targets, class_weight, _ = _values(*primals)
        # A reduced loss has one upstream gradient, almost always 1. So the gradient is made together with the loss, and
        # multiplied later: the logits are read once and not twice. Not for float16, whose gradients need a loss scale before
        # they are rounded, and not where lse or entropy has a gradient of its own.
        if reduced and logits.dtype != jnp.float16 and not smooth:
            found = run("forward_backward", arrays, {}, {**outputs(targets), "dlogits": _like(logits)})
            return _result(aux, found), {"dlogits": found["dlogits"]}
        more = ["lse", *smooth, *(["valid_rows"] if options["reduction"] == 1 else []),
                *(["weight_sum"] if options["reduction"] == 1 and class_weight is not None else [])]
        low = {"lse_low": _of(targets.shape, _f32)}
        found = run("forward", arrays, {}, {**outputs(targets, more), **low})
        saved = {n: found[n] for n in (*more, "lse_low")}
        return _result(aux, found), {"arrays": arrays, "saved": saved}

    def bwd(kept, cotangents):
        dloss, dlse, dentropy = _upstream(cotangents)
        if "dlogits" in kept:
            return None if dloss is None else _scaled(kept["dlogits"], dloss), None, None, None
        logits, targets, *_ = kept["arrays"]
        if dloss is None and dlse is None and dentropy is None:
            return None, None, None, None
        dloss = jnp.zeros(() if reduced else targets.shape, _f32) if dloss is None else dloss
        found = run("backward", kept["arrays"], {**_saved(kept["saved"], dentropy), "upstream": dloss, "dlse": dlse,
                                                 "dentropy": dentropy}, {"dlogits": _like(logits)})
        return found["dlogits"], None, None, None

    f.defvjp(fwd, bwd, symbolic_zeros=True)
    return f


def linear_cross_entropy(x, weight, targets, *, bias=None, reduction="mean", ignore_index=-100, label_smoothing=0.0, z_loss=0.0,
                         softcap=0.0, logit_scale=1.0, class_weight=None, zero_when_empty=False, denominator=None,
                         max_counted=None, fast_logits=False, tf32=False, batch_invariant=False, workspace_bytes=None, aux=()):
    """cross_entropy of the logits x @ weight.T + bias, without storing all of them. x [..., hidden], weight [vocab, hidden].

    The other options are those of cross_entropy; aux may have them all.
    weight and bias may be float32 beside 16-bit x. The matmuls then have x's type; the gradients are float32, rounded never.
    max_counted: no more targets than this count, and the matmuls are as much smaller. fast_logits: chunks of logits are stored
    in x's type. tf32: float32 matmuls may use TF32. workspace_bytes: the most scratch memory to use, 1 GiB where None.
    batch_invariant: a token's loss has the same bits whatever the other tokens are, in bfloat16 on sm_90a; gradients are then
    made in backward.
    """
    x = _array(x, "x", 1)
    weight = _array(weight, "weight", 2)
    weight = _beside(weight, "weight", x.dtype, (weight.shape[0], x.shape[-1]))
    shape, vocab = x.shape[:-1], weight.shape[0]
    targets = _targets(targets, shape, "x")
    bias = None if bias is None else _beside(bias, "bias", x.dtype, (vocab,))
    fields = _loss_fields(reduction, ignore_index, label_smoothing, z_loss, softcap, logit_scale, zero_when_empty)
    fields.update(max_counted=int(max_counted or 0), fast_logits=int(fast_logits), tf32=int(tf32),
                  batch_invariant=int(batch_invariant), workspace_bytes=int(workspace_bytes or 0))
    _demand(max_counted is None or max_counted > 0, f"max_counted is {max_counted}; it must be 1 or more")
    aux = tuple(aux)
    _loss_outputs(aux, _AUX, False, shape)
    arrays = same_axes(x, weight, targets, bias, _class_weight(class_weight, vocab), _denominator(denominator, reduction))
    return _loss_result(aux, *_linear_cross_entropy(tuple(fields.items()), aux)(*arrays))


@functools.lru_cache(None)
def _linear_cross_entropy(options, aux):
    options = dict(options)
    reduced = bool(options["reduction"])
    smooth = [n for n in _SMOOTH if n in aux]

    def run(direction, arrays, inputs, outputs):
        x, weight, targets, bias, class_weight, denominator = arrays
        fields = dict(options, tokens=targets.size, hidden=x.shape[-1], vocab=weight.shape[0],
                      target_dtype=int(targets.dtype == jnp.int32), bias_dtype=_dtype_field(bias, x.dtype))
        if direction == "backward":
            fields["upstream_per_token"] = int(not reduced)
        for name in ("dweight", "dbias"):
            fields[f"{name}_dtype"] = _dtype_field(outputs.get(name), x.dtype)
        return call(f"linear_cross_entropy_{direction}_{TYPES[x.dtype.name]}",
                    {"x": x, "weight": weight.astype(x.dtype), "target": targets, "bias": bias, "class_weight": class_weight,
                     "denominator": denominator, **inputs}, outputs, fields, "tokens", _shared(reduced))

    def outputs(targets, more=()):
        names = dict.fromkeys((*aux, *more))
        return _loss_outputs(names, names, reduced, targets.shape)

    @jax.custom_vjp
    def f(*arrays):
        return _result(aux, run("forward", arrays, {}, outputs(arrays[2])))

    def fwd(*primals):
        arrays = x, weight, targets, bias, *_ = _values(*primals)
        wanted = _wanted(dx=primals[0], dweight=primals[1], dbias=primals[3])
        likes = {name: _like(dict(dx=x, dweight=weight, dbias=bias)[name]) for name in wanted}
        # As in cross_entropy. Here it also saves one of four matmuls, since backward computes the logits again.
        if reduced and x.dtype != jnp.float16 and not smooth and not options["batch_invariant"]:
            found = run("forward_backward", arrays, {}, {**outputs(targets), **likes})
            return _result(aux, found), {"made": {name: found[name] for name in wanted}}
        found = run("forward", arrays, {}, outputs(targets, ["lse", *smooth]))
        return _result(aux, found), {"arrays": arrays, "saved": {n: found[n] for n in ("lse", *smooth)}, "wanted": wanted}

    def bwd(kept, cotangents):
        dloss, dlse, dentropy = _upstream(cotangents)
        if dloss is None and dlse is None and dentropy is None:
            return (None,) * 6
        if "made" in kept:
            made = {name: _scaled(a, dloss) for name, a in kept["made"].items()}
        else:
            x, weight, targets, bias, *_ = kept["arrays"]
            dloss = jnp.zeros(() if reduced else targets.shape, _f32) if dloss is None else dloss
            likes = {name: _like(dict(dx=x, dweight=weight, dbias=bias)[name]) for name in kept["wanted"]}
            made = run("backward", kept["arrays"], {**_saved(kept["saved"], dentropy), "upstream": dloss, "dlse": dlse,
                                                    "dentropy": dentropy}, likes)
        return made.get("dx"), made.get("dweight"), None, made.get("dbias"), None, None

    f.defvjp(fwd, bwd, symbolic_zeros=True)
    return f


# ---- md_lrpe_cosine ----------------------------------------------------------------------------------------------------------


def _axes(numbers):
    return tuple(int(n) for n in (numbers if isinstance(numbers, (tuple, list)) else (numbers,)))


def md_lrpe_cosine(x, theta, shape, prefix=0, activation=None, *, offset=None, layout="BHTD"):
    """Linearised relative positional encoding in cosine form: act(x) cos(phi) and act(x) sin(phi) along the last dimension.

    x [..., heads, tokens, dim], or with layout="BTHD" [..., tokens, heads, dim]; the result has 2 dim in the last dimension.
    theta [heads, e]: radians per position; e is the number of features of an axis, dim / len(shape) rounded up or more. Heads
    may share a row, features a column: [1, e], [heads, 1] or [1, 1]; so may its gradient.
    shape: of the grid of 1 to 8 axes; tokens = prefix + the product of shape. offset: the position of the grid's first cell.
    activation: None, "relu", "sigmoid", "silu", "softmax" over dim or "softmax_tokens" over tokens.
    """
    x = _array(x, "x", 3)
    shape = _axes(shape)
    offset = (0,) * len(shape) if offset is None else _axes(offset)
    _demand(1 <= len(shape) <= 8, f"shape is {shape}; it must have 1 to 8 axes")
    _demand(len(offset) == len(shape), f"offset is {offset}; it must have as many axes as shape, {len(shape)}")
    _demand(layout in ("BHTD", "BTHD"), f"layout is {layout!r}; it must be 'BHTD' or 'BTHD'")
    heads, tokens = x.shape[-3:-1] if layout == "BHTD" else x.shape[-2:-4:-1]
    grid = prefix + math.prod(shape)
    _demand(tokens == grid, f"x has the shape {x.shape} with {tokens} tokens; prefix and shape ask for {grid}")
    theta = _array(theta, "theta", 2)
    theta = _beside(theta, "theta", x.dtype, (1 if theta.shape[0] == 1 else heads, theta.shape[-1]))
    options = (shape, offset, int(prefix), _choice(activation, ACTIVATIONS, "activation"), layout)
    return _md_lrpe_cosine(*options)(*same_axes(x, theta))


@functools.lru_cache(None)
def _md_lrpe_cosine(shape, offset, prefix, activation, layout):
    def run(direction, x, theta, inputs, outputs, like):
        """like: an array or a type with x's shape; x itself is not given where backward does not need it."""
        first, second, dim = like.shape[-3:]
        heads, tokens = (first, second) if layout == "BHTD" else (second, first)
        fields = dict(batch=math.prod(like.shape[:-3]), heads=heads, dim=dim, prefix=prefix, axes=len(shape),
                      e=-(-dim // len(shape)) if theta.shape[1] == 1 else theta.shape[1], theta_heads=theta.shape[0],
                      theta_features=theta.shape[1], activation=activation, theta_dtype=_dtype_field(theta, like.dtype),
                      **{f"shape{i}": n for i, n in enumerate(shape)}, **{f"offset{i}": n for i, n in enumerate(offset)})
        if layout == "BTHD":
            for name in {"x", "y"} if direction == "forward" else {"x", "dy", "dx"}:
                row = dim * (2 if name in ("y", "dy") else 1)
                fields.update({f"{name}_batch_stride": tokens * heads * row, f"{name}_head_stride": row,
                               f"{name}_token_stride": heads * row})
        return call(f"md_lrpe_cosine_{direction}_{TYPES[like.dtype.name]}", {"x": x, "theta": theta, **inputs}, outputs, fields,
                    "batch", ("theta", "dtheta"))

    def forward(x, theta):
        return run("forward", x, theta, {}, {"y": _of((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)}, x)["y"]

    f = jax.custom_vjp(forward)

    def fwd(x, theta):
        wanted = _wanted(dx=x, dtheta=theta)
        x, theta = _values(x, theta)
        return forward(x, theta), (x if activation or "dtheta" in wanted else None, theta, wanted)

    def bwd(kept, dy):
        x, theta, wanted = kept
        if _given(dy) is None:
            return None, None
        like = _of((*dy.shape[:-1], dy.shape[-1] // 2), dy.dtype)
        likes = {"dx": like, "dtheta": _of(theta.shape, _f32)}
        made = run("backward", x, theta, {"dy": dy}, {name: likes[name] for name in wanted}, like)
        return made.get("dx"), made["dtheta"].astype(theta.dtype) if "dtheta" in made else None

    f.defvjp(fwd, bwd, symbolic_zeros=True)
    return f


# ---- rms_norm ----------------------------------------------------------------------------------------------------------------


def rms_norm(x, weight=None, eps=1e-6):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis. weight [cols] of x's type or float32; None: 1."""
    x = _array(x, "x", 1)
    weight = None if weight is None else _beside(weight, "weight", x.dtype, x.shape[-1:])
    return _rms_norm(float(eps))(*same_axes(x, None, weight))[0]


def add_rms_norm(x, residual, weight=None, eps=1e-6):
    """s = x + residual; returns rms_norm(s), of x's type, and s, of residual's type: x's or float32."""
    x = _array(x, "x", 1)
    residual = _beside(residual, "residual", x.dtype, x.shape)
    weight = None if weight is None else _beside(weight, "weight", x.dtype, x.shape[-1:])
    return _rms_norm(float(eps))(*same_axes(x, residual, weight))


def srms_norm(x, eps=1e-6):
    """rms_norm without weight: each row gets the length sqrt(cols)."""
    return rms_norm(x, None, eps)


@functools.lru_cache(None)
def _rms_norm(eps):
    def run(direction, dtype, shape, residual, weight, inputs, outputs):
        fields = dict(rows=math.prod(shape[:-1]), cols=shape[-1], eps=eps, residual_dtype=_dtype_field(residual, dtype),
                      weight_dtype=_dtype_field(weight, dtype), dweight_dtype=_dtype_field(weight, dtype))
        return call(f"srms_norm_{direction}_{TYPES[jnp.dtype(dtype).name]}", {"weight": weight, **inputs}, outputs, fields,
                    "rows", ("weight", "dweight"))

    @jax.custom_vjp
    def f(x, residual, weight):
        found = run("forward", x.dtype, x.shape, residual, weight, {"x": x, "residual": residual},
                    {"y": _like(x), "residual_out": _like(residual)})
        return found["y"], found.get("residual_out")

    def fwd(x, residual, weight):
        wanted = _wanted(dx=x, dresidual=residual, dweight=weight)
        x, residual, weight = _values(x, residual, weight)
        y, s = f(x, residual, weight)
        return (y, s), (x if s is None else None, s, weight, wanted)

    def bwd(kept, cotangents):
        # rstd is not saved: backward finds it in the pass that it makes anyway, and a forward call whose y nobody reads goes.
        x, s, weight, wanted = kept
        dy, ds = cotangents[0], None if s is None else _given(cotangents[1])
        if _given(dy) is None:
            dy = jnp.zeros(dy.shape, dy.dtype)
        two = s is not None and s.dtype != dy.dtype  # else dx and dresidual are the same array
        outputs = {"dx": _like(dy) if "dx" in wanted or ("dresidual" in wanted and not two) else None,
                   "dresidual": _like(s) if "dresidual" in wanted and two else None,
                   "dweight": _like(weight) if "dweight" in wanted else None}
        made = run("backward", dy.dtype, dy.shape, s, weight,
                   {"x": x, "residual_out": s, "dy": dy, "dresidual_out": ds}, outputs)
        return (made["dx"] if "dx" in wanted else None, made["dresidual" if two else "dx"] if "dresidual" in wanted else None,
                made.get("dweight"))

    f.defvjp(fwd, bwd, symbolic_zeros=True)
    return f
