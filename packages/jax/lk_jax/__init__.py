# SPDX-License-Identifier: MIT
"""lk's operations of language-model training in JAX: logsumexp, cross_entropy, cross_entropy_ids, glu, kl,
linear_cross_entropy, linear_cross_entropy_ids, linear_kl, linear_support, linear_topk, md_lrpe_cosine, rms_norm, rope,
support.

Every function works under jit, grad, vmap, scan, checkpoint, shard_map and jax.export. Arrays are float32, float16 or bfloat16.
Sums are float32. An option that is off costs nothing. The comment at the top of lk/<op>.cuh has the formulas and the accuracy.
"""
import functools
import math
import numbers
import operator
import os
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from ._ffi import TYPES, axes_of, call, platform, public, rescale as _rescale, same_axes, spread, targets

__all__ = ["logsumexp", "cross_entropy", "cross_entropy_with_grad",
           "cross_entropy_ids", "CrossEntropyIdsOutput", "CrossEntropyIdsTailOutput", "kl", "linear_cross_entropy",
           "linear_cross_entropy_ids", "linear_kl", "support", "linear_support", "SupportOutput", "linear_topk", "TopkOutput",
           "md_lrpe_cosine", "rms_norm", "add_rms_norm", "srms_norm", "glu", "rope", "platform", "targets"]
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
DIVERGENCES = {"forward": 0, "reverse": 1, "jensen_shannon": 2, "total_variation": 3}
SCALINGS = {"tensor": 0, "row": 1, "block128": 2, "mx": 3}
SCALE_ROUNDINGS = {"up": 0, "floor": 1}
ACTIVATIONS = {None: 0, "relu": 1, "sigmoid": 2, "silu": 3, "softmax": 4, "softmax_tokens": 5}
GATES = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "sigmoid": 4}
_f32 = jnp.float32
_of = jax.ShapeDtypeStruct

# ---- Checks that need JAX's types; lk itself checks sizes and options, see _ffi.py -------------------------------------------
# A wrong type is a TypeError, a wrong value or shape a ValueError.


def _demand(good, sentence, error=ValueError):
    if not good:
        raise error(sentence)


def _read(a, name, dtype=None):
    try:
        return jnp.asarray(a, dtype)
    except (TypeError, ValueError):  # JAX's own sentences do not say which argument
        raise TypeError(f"{name} is of the type {type(a).__name__}; it must be an array") from None
    except OverflowError as error:
        raise ValueError(f"{name}: {error}") from None


def _floats(a, name):
    """An operand as float32."""
    given = getattr(a, "dtype", _f32)
    _demand(not jnp.issubdtype(given, jnp.complexfloating), f"{name} is {given}; it must be of real numbers", TypeError)
    return _read(a, name, _f32)


def _array(a, name, rank=0):
    a = _read(a, name)
    _demand(a.dtype.name in TYPES, f"{name} is {a.dtype.name}; it must be float32, float16 or bfloat16", TypeError)
    _demand(a.ndim >= rank, f"{name} has the shape {a.shape}; it must have {rank} dimensions or more")
    return a


def _dtype(value, name):
    try:
        return jnp.dtype(value)
    except TypeError:
        raise TypeError(f"{name} is {value!r}; it must be a type of arrays") from None


def _or_float32(dtype):
    return "float32" if dtype == _f32 else f"{jnp.dtype(dtype).name} or float32"


def _beside(a, name, dtype, shape):
    """Checks a second tensor of an op: of the type of the first, or float32 (lk's number 1)."""
    a = _array(a, name)
    _demand(a.dtype == dtype or a.dtype == _f32, f"{name} is {a.dtype.name}; it must be {_or_float32(dtype)}", TypeError)
    _demand(a.shape == shape, f"{name} has the shape {a.shape}; it must have {shape}")
    return a


def _dtype_field(a, dtype):
    return int(a is not None and a.dtype != dtype)


def _like(a):
    return None if a is None else _of(a.shape, a.dtype)


def _choice(value, choices, name):
    _demand(isinstance(value, (str, type(None))) and value in choices,
            f"{name} is {value!r}; it must be one of {', '.join(map(repr, choices))}")
    return choices[value]


def _flag(value, name):
    _demand(isinstance(value, (bool, np.bool_, int)) and value in (0, 1), f"{name} is {value!r}; it must be True or False",
            TypeError)
    return int(value)


def _names(aux):
    _demand(isinstance(aux, (tuple, list)) and all(isinstance(n, str) for n in aux),
            f"aux is {aux!r}; it must be a tuple of names", TypeError)
    return tuple(aux)


def _operand(value):
    """Whether an option is an operand of the compiled program: an array of JAX, or several numbers. Others are part of it."""
    return isinstance(value, (jax.Array, list, tuple)) or np.ndim(value) > 0


def _number(value, name, kind=numbers.Real):
    """A number of Python, numpy, or an array of JAX whose value is known."""
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{name} is traced, by jit or grad; it must be a number of Python, since it is part of the compiled "
                        "program and gets no gradient")
    if isinstance(value, (jax.Array, np.ndarray)) and value.size == 1:
        value = value.item()
    whole = kind is numbers.Integral
    _demand(isinstance(value, kind), f"{name} is {value!r}; it must be a{' whole' if whole else ''} number", TypeError)
    return operator.index(value) if whole else float(value)


def _factor(value, name, shape=(), of=None):
    """An operand that is a factor: one number, or one for each row; float32."""
    value = _read(value, name)
    _demand(jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer),
            f"{name} is {value.dtype.name}; it must be of numbers", TypeError)
    _demand(value.ndim == 0 or value.shape == shape or value.size == 1,
            f"{name} has the shape {value.shape}; it must be one number" + (f", or have {shape}, one for each {of}" if of else ""))
    return (value.reshape(()) if value.size == 1 and value.shape != shape else value).astype(_f32)


def _times(a, factor):
    """a times a factor of its rows, rounded once to a's type."""
    return (a.astype(_f32) * (factor[..., None] if factor.ndim else factor)).astype(a.dtype)


def _targets(targets, shape, of, vocab, ignore_index):
    targets = _whole(targets, "targets")
    _demand(targets.shape == shape, f"targets has the shape {targets.shape}; the shape of {of} asks for {shape}")
    _check_targets("targets", vocab, ignore_index, targets)
    return targets


def _whole(targets, name):
    if isinstance(targets, np.ndarray) and targets.size and not jax.config.jax_enable_x64 and targets.dtype == np.int64:
        most = max(targets.max(), -targets.min() - 1)
        _demand(most < 2**31, f"{name} has a number outside of int32, which JAX would cut off without jax_enable_x64")
    targets = _read(targets, name)
    _demand(targets.dtype in (jnp.int32, jnp.int64, jnp.uint8), f"{name} is {targets.dtype.name}; it must be int32, int64 or uint8",
            TypeError)
    return targets.astype(jnp.int32) if targets.dtype == jnp.uint8 else targets


def _check_targets(name, vocab, ignore_index, *arrays):
    if os.environ.get("LK_CHECK_TARGETS", "0") not in ("", "0"):
        look = functools.partial(_look_at_targets, name, vocab, ignore_index)
        if any(isinstance(a, jax.core.Tracer) for a in arrays):
            jax.debug.callback(look, *arrays)
        else:
            look(*arrays)


def _look_at_targets(name, vocab, ignore_index, targets, weight=1):
    """LK_CHECK_TARGETS=1: a target that would make the loss NaN is an error."""
    targets = np.asarray(targets)
    bad = ((targets < 0) | (targets >= vocab)) & (np.asarray(weight) != 0)
    if ignore_index is not None:
        bad &= targets != ignore_index
    if bad.any():
        at = tuple(int(i) for i in np.argwhere(bad)[0])
        ignored = "" if ignore_index is None else f" or ignore_index, {ignore_index}"
        raise ValueError(f"{name}{list(at) if at else ''} is {targets[at]}; it must be in [0, {vocab}){ignored}")


# ---- custom_vjp: what is differentiated --------------------------------------------------------------------------------------
# With symbolic_zeros a forward rule knows which arguments are differentiated. What must be known in the backward rule goes there
# as the shapes of arrays without elements. What is saved has the same tree whatever is wanted, the same arguments in it, and the
# same dimensions of vmap: where one function under shard_map is differentiated by several sets of arguments, JAX 0.10 gives
# backward the arrays of one set with the tree of another.


def _wanted(**primals):
    """The names of arguments that are differentiated."""
    return [name for name, p in primals.items() if p is not None and p.perturbed]


def _flags(wanted, names):
    return {name: np.zeros((int(name in wanted), 0), bool) for name in names}


def _flagged(flags):
    return [name for name, flag in flags.items() if flag.shape[0]]


def _made(found, wanted, names):
    """Gradients that are made in forward, to be saved; empty where they are not wanted, and under vmap all have its dimension."""
    return {name: found[name] if name in wanted else found["loss"].ravel()[:0] for name in names}


def _constants(**primals):
    """Refuses a gradient that lk does not have."""
    for name, p in primals.items():
        _demand(p is None or not p.perturbed, f"{name} would need a gradient, and gets none; give jax.lax.stop_gradient of it",
                TypeError)


def _values(*primals):
    return [None if p is None else p.value for p in primals]


def _given(cotangent, ranks=None):
    """The gradient of an output, None where it is certainly 0. Without check_vma each of `ranks` has its own, for a loss of its
    own: JAX differentiates their sum."""
    if type(cotangent) is SymbolicZero:
        return None
    return cotangent if ranks is None or ranks.checked else jax.lax.psum(cotangent, ranks.axis)


def _upstream(cotangents, ranks):
    """Of a cross entropy: the gradients of loss, lse and entropy."""
    loss, aux = cotangents
    return _given(loss, ranks), *(_given(aux[n], ranks) if n in aux else None for n in _SMOOTH)


def _saved(saved, dentropy):
    """What backward reads. lk takes the entropy together with its gradient."""
    return {n: a for n, a in saved.items() if n != "entropy" or dentropy is not None}


def _scaled(gradients, factor, grad_scale):
    """Gradients {name: array} times the upstream gradient of a reduced loss. Where that is the constant 1 XLA removes all of it,
    and else fuses it with what reads the gradient; so this is not a call of lk, which would stay.
    Those that are empty are not there.
    With a grad_scale they have that factor already: they are multiplied in place by the quotient, which is 1 where it was right.
    Not by lax.cond: its branch that changes nothing copies, and on a GPU the host waits for the condition."""
    gradients = {name: a for name, a in gradients.items() if a.size}
    if grad_scale is None:
        return {name: _times(a, factor) for name, a in gradients.items()}
    return {name: _rescale(a, factor, grad_scale) for name, a in gradients.items()}


# ---- logsumexp ---------------------------------------------------------------------------------------------------------------


@public
def logsumexp(a, axis=None, keepdims=False, *, scale=1.0, dtype=None):
    """log sum exp(scale a) over one axis, neighbouring axes or, with None, all axes, like jax.nn.logsumexp.

    dtype: of the result; None is a's, as in JAX. float32 keeps all digits of 16-bit a. scale: a number of Python, or a traced
    one, by which a is multiplied before, in a pass of its own; it has a gradient.
    """
    a = _array(a, "a")
    if _operand(scale):
        a, scale = _times(a, _factor(scale, "scale")), 1.0
    scale = _number(scale, "scale")
    dtype = a.dtype if dtype is None else _dtype(dtype, "dtype")
    _demand(dtype == a.dtype or dtype == _f32, f"dtype is {dtype.name}; it must be {_or_float32(a.dtype)}", TypeError)
    _demand(np.float32(scale) != 0, "scale is 0; it must be another number")
    axes = range(a.ndim) if axis is None else _axes(axis, "axis")
    for i in axes:
        _demand(-a.ndim <= i < a.ndim, f"axis {i} does not exist in the shape {a.shape}")
    axes = sorted(i % a.ndim for i in axes)
    first, count = (axes[0], len(axes)) if axes else (a.ndim, 0)
    _demand(axes == list(range(first, first + count)), f"axis is {axis}; lk sums over axes that are neighbours")
    sizes = [math.prod(s) for s in (a.shape[:first], a.shape[first:first + count], a.shape[first + count:])]
    if not sizes[2]:  # an empty result; lk takes inner = 0 for 1
        sizes[0], sizes[2] = 0, 1
    shape = tuple(1 if i in axes else n for i, n in enumerate(a.shape) if keepdims or i not in axes)
    return _logsumexp(scale, dtype.name, *sizes, shape)(a)


@functools.lru_cache(None)
def _logsumexp(scale, dtype, outer, cols, inner, row):
    """row: the shape of the result. x is not reshaped: XLA may copy what gets a dimension of one element."""
    fields = dict(outer=outer, cols=cols, inner=inner, scale=scale)

    def forward(x, save):
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
            return None,
        upstream = "dlse" if dlse.dtype == _f32 else "dlse_rounded"
        found = call(f"logsumexp_backward_{TYPES[x.dtype.name]}",
                     {"x": x, "lse": lse, "lse_low": lse_low, upstream: dlse}, {"dx": _like(x)}, fields, "outer")
        return found["dx"],

    f.defvjp(fwd, bwd, symbolic_zeros=True)
    return f


# ---- kl and linear_kl --------------------------------------------------------------------------------------------------------


def _kl_divisor(reduction, denominator, zero_when_empty, shape, row_weight):
    """What the sum of kl or linear_kl is divided by, float32; None: nothing."""
    if reduction == "batchmean":
        _demand(denominator is None, "reduction is 'batchmean'; with a denominator it must be 'mean'")
        return jnp.asarray(max(shape[0], 1) if shape else 1, _f32)
    mean = _choice(reduction, REDUCTIONS, "reduction") == 1
    over = _denominator(denominator, reduction)
    if over is None:
        over = None if not mean else jnp.asarray(math.prod(shape), _f32) if row_weight is None else row_weight.sum()
    return over if over is None or not _flag(zero_when_empty, "zero_when_empty") else over + (over == 0)


@public
def kl(logits, teacher, reduction="mean", *, divergence="forward", beta=0.5, temperature=1.0, row_weight=None, logit_scale=1.0,
       teacher_scale=1.0, softcap=None, teacher_softcap=None, denominator=None, zero_when_empty=False, return_entropy=False,
       batch_invariant=False, axis_name=None, vocab_slices=0):
    """The Kullback-Leibler divergence of a teacher's and a student's softmax, for distillation. logits: the student's, [..., vocab];
    teacher: the teacher's logits, of the same shape and type, a constant. float32; of rows for "none".

    divergence: "forward" is KL(teacher || student), "reverse" KL(student || teacher), "jensen_shannon" beta KL(teacher || m) +
    (1 - beta) KL(student || m) with m = beta teacher + (1 - beta) student; beta 0 is "forward" and 1 "reverse", as in TRL;
    "total_variation" sum |teacher - student| / 2, the share of a draft's tokens that speculative decoding rejects, with the draft as
    student. temperature divides both logits. row_weight: a factor of each row's loss, or a mask; rows of weight 0 are not read. A mean is over all rows, or
    with row_weight over the sum of the weights, or over denominator, that of all micro-batches, say, which may be traced.
    zero_when_empty: a mean over nothing is 0, not NaN. "batchmean" divides the sum by the first size. return_entropy: (loss, entropy),
    the student's entropy of each row, float32, without a gradient; it is not multiplied by row_weight, but 0 where that is 0. All
    other numbers are part of the compiled program.
    batch_invariant=True: each row's results have the same bits for any number of rows, if rows lie alike modulo 16 bytes; few long
    rows take longer. Gradients have no such promise.

    axis_name: as in cross_entropy; logits and teacher are of the same columns of a device. Forward has one all-gather of 32 bytes a
    row, two for "jensen_shannon" and "total_variation". vocab_slices: as in linear_cross_entropy; but XLA sums a reduced loss, in an
    order that may differ from program to program.
    """
    logits = _array(logits, "logits", 1)
    ranks = _ranks(axis_name, logits.shape[-1], vocab_slices)
    teacher = _array(teacher, "teacher")
    _demand(teacher.dtype == logits.dtype, f"teacher is {teacher.dtype.name}; it must be {logits.dtype.name}, as logits are", TypeError)
    _demand(teacher.shape == logits.shape, f"teacher has the shape {teacher.shape}; it must have {logits.shape}")
    rows, row_weight = logits.shape[:-1], _row_weight(row_weight, logits.shape[:-1])
    fields = dict(rows=math.prod(rows), batch_invariant=_flag(batch_invariant, "batch_invariant"), **_kl_fields(
        divergence, beta, temperature, logit_scale, teacher_scale, softcap, teacher_softcap))
    arrays = _placed(ranks, "logits", ("teacher",), logits=logits, teacher=teacher, row_weight=row_weight)
    loss, *entropy = _kl(tuple(fields.items()), ranks, bool(_flag(return_entropy, "return_entropy")))(*arrays)
    over = _kl_divisor(reduction, denominator, zero_when_empty, rows, row_weight)
    loss = loss if reduction == "none" else loss.sum() if over is None else loss.sum() / over
    return (loss, *map(jax.lax.stop_gradient, entropy)) if entropy else loss


def _kl_fields(divergence, beta, temperature, logit_scale, teacher_scale, softcap, teacher_softcap):
    """The options that kl and linear_kl share, as fields. A temperature divides the logits after the softcap."""
    temperature, beta = 1.0 if temperature is None else _number(temperature, "temperature"), _number(beta, "beta")
    _demand(temperature > 0, f"temperature is {temperature}; it must be above 0")
    _demand(0 <= beta <= 1, f"beta is {beta}; it must be 0 to 1")
    if divergence == "jensen_shannon" and beta in (0, 1):  # the ends that TRL gives it
        divergence = "reverse" if beta else "forward"
    beta = beta if 0 < beta < 1 else 0.5  # not used
    scales = {name: (1.0 if value is None else _number(value, name)) / temperature for name, value in (
        ("logit_scale", logit_scale), ("teacher_scale", teacher_scale))}
    _demand(all(scales.values()), "a scale is 0; it must be above 0")
    caps = {name: 0.0 if value is None else _number(value, name) / temperature for name, value in (
        ("softcap", softcap), ("teacher_softcap", teacher_softcap))}
    return dict(beta=beta, divergence=_choice(divergence, DIVERGENCES, "divergence"), **scales, **caps)


@functools.lru_cache(None)
def _kl(fields, ranks, entropy):
    """The function of (loss,), or of (loss, entropy)."""
    fields, names = {**dict(fields), **(ranks.fields if ranks else {})}, ("loss", "entropy")[:1 + entropy]

    def run(direction, arrays, inputs, outputs, **more):
        own = {} if direction == "finish" else {"logits": arrays[0], "teacher": arrays[1]}
        return call(f"kl_{'parallel_' if ranks else ''}{direction}_{TYPES[arrays[0].dtype.name]}",
                    {**own, "row_weight": arrays[2], **inputs}, outputs, dict(fields, vocab=arrays[0].shape[-1], **more), "rows",
                    behind=("all_states",))

    def forward(arrays, save):
        return _forward_kl(ranks, run, arrays, {0: -1, 1: -1}, arrays[0].shape[:-1], fields["divergence"], save, entropy)

    @jax.custom_vjp
    def f(*arrays):
        found = forward(arrays, save=False)
        return tuple(found[name] for name in names)

    def fwd(*primals):
        _constants(teacher=primals[1], row_weight=primals[2])
        arrays = _values(*primals)
        found = forward(arrays, save=True)
        return tuple(found.pop(name) for name in names), (arrays, found)

    def bwd(kept, given):
        arrays, saved = kept
        if (upstream := _given(given[0], ranks)) is None:
            return None, None, None
        outputs = {"dlogits": _like(arrays[0])}
        found = run("backward", arrays, {**saved, "upstream": upstream}, outputs, upstream_per_row=1)
        return found["dlogits"], None, None

    f.defvjp(fwd, bwd, symbolic_zeros=True)
    return f


@public
def linear_kl(x, weight, teacher_x, teacher_weight, reduction="mean", *, bias=None, teacher_bias=None, divergence="forward",
              beta=0.5, temperature=1.0, row_weight=None, logit_scale=1.0, teacher_scale=1.0, softcap=None, teacher_softcap=None,
              denominator=None, zero_when_empty=False, return_entropy=False, max_counted=None, fast_logits=False, tf32=False,
              workspace_mib=None, axis_name=None, vocab_slices=0):
    """kl of two heads, from their hidden states: of the logits x @ weight.T + bias and teacher_x @ teacher_weight.T + teacher_bias,
    without storing all logits of either. For distillation over the whole vocabulary. float32; of tokens for "none".

    x [..., hidden], weight [vocab, hidden], bias [vocab]: the student's, with gradients. teacher_x [..., teacher_hidden],
    teacher_weight [vocab, teacher_hidden], teacher_bias [vocab]: the teacher's, constants; its hidden size may be another one. All
    have the type of x, but weight may be float32 beside 16-bit x: the matmuls then have x's type, and its gradient is float32,
    not rounded. Vocabularies of different lengths: pass the rows of both weights that stand for the same tokens.

    divergence, beta, temperature, logit_scale, teacher_scale, softcap, teacher_softcap, row_weight, reduction, denominator,
    zero_when_empty and return_entropy are those of kl. A bias of -inf masks a column. A token with row_weight 0 has loss 0 and adds
    nothing to gradients; keep its x and teacher_x finite.
    max_counted: an upper bound of the tokens whose row_weight is not 0, a Python int; it needs row_weight. The matmuls then have so many
    rows, and x and teacher_x of the other tokens may be anything. If more count, the loss and all gradients are NaN. Not with
    axis_name or vocab_slices.
    fast_logits: logits are stored in x's type, which takes less memory and time. tf32: float32 matmuls may use TF32.
    workspace_mib: the most scratch memory to use; None: what the fastest plan takes, at most a sixteenth of the device's memory.
    Too little, for backward too where a gradient is wanted, is a ValueError in forward, which says the least.
    axis_name: as in linear_cross_entropy; both weights and biases are of the same columns of a device. Forward has one all-gather of
    32 bytes a token. "jensen_shannon" and "total_variation" have two, and compute the logits once more. vocab_slices: as in kl.

    A reduced loss makes its gradients together with the loss: 4 matmuls for 6. Not in float16, whose gradients need the upstream
    gradient before they are rounded; nor with "none", axis_name or vocab_slices. lk/linear_kl.cuh has the formulas, lk/linear_kl.md
    the accuracy.
    """
    x, weight = _array(x, "x", 1), _array(weight, "weight", 2)
    weight = _beside(weight, "weight", x.dtype, (weight.shape[0], x.shape[-1]))
    shape, vocab = x.shape[:-1], weight.shape[0]
    ranks = _ranks(axis_name, vocab, vocab_slices)
    teacher_x = _array(teacher_x, "teacher_x", 1)
    others = dict(bias=(bias, (vocab,)), teacher_x=(teacher_x, (*shape, teacher_x.shape[-1])),
                  teacher_weight=(teacher_weight, (vocab, teacher_x.shape[-1])), teacher_bias=(teacher_bias, (vocab,)))
    others = {name: None if a is None else _alike(a, name, x.dtype, wanted) for name, (a, wanted) in others.items()}
    row_weight = _row_weight(row_weight, shape)
    _demand(max_counted is None or row_weight is not None, "max_counted needs row_weight, which says which tokens count")
    fields = dict(_kl_fields(divergence, beta, temperature, logit_scale, teacher_scale, softcap, teacher_softcap),
                  max_counted=min(_bound(max_counted, ranks), 2**31 - 1),
                  fast_logits=_flag(fast_logits, "fast_logits"), tf32=_flag(tf32, "tf32"), workspace_bytes=_budget(workspace_mib))
    divisor = _kl_divisor(reduction, denominator, zero_when_empty, shape, row_weight)
    arrays = _placed(ranks, "weight", ("x", "bias", "teacher_x", "teacher_weight", "teacher_bias"), x=x, weight=weight, **others,
                     row_weight=row_weight, divisor=divisor)
    loss, *entropy = _linear_kl(tuple(fields.items()), reduction != "none", ranks, bool(_flag(return_entropy, "return_entropy")))(*arrays)
    return (loss, *map(jax.lax.stop_gradient, entropy)) if entropy else loss


def _bound(max_counted, ranks=None):
    """max_counted as lk has it, 0 for none. ranks: of a call that has none of it with them."""
    if max_counted is None:
        return 0
    max_counted = _number(max_counted, "max_counted", numbers.Integral)
    _demand(max_counted > 0, f"max_counted is {max_counted}; it must be 1 or more")
    _demand(not ranks, f"with {'axis_name' if ranks and ranks.axis else 'vocab_slices'} there is no max_counted")
    return max_counted


def _alike(a, name, dtype, shape, of="x"):
    """Checks a tensor that must have x's type."""
    a = _array(a, name)
    _demand(a.dtype == dtype, f"{name} is {a.dtype.name}; it must be {dtype.name}, as {of} is", TypeError)
    _demand(a.shape == shape, f"{name} has the shape {a.shape}; it must have {shape}")
    return a


_HEAD = ("dx", "dweight", "dbias")


@functools.lru_cache(None)
def _linear_kl(options, reduced, ranks, entropy):
    """The function of (loss,), or of (loss, entropy). divisor: of a mean; None for a sum."""

    def run(direction, arrays, inputs, outputs, upstream_per_token=0):
        x, weight, bias, teacher_x, teacher_weight, teacher_bias, row_weight, _ = arrays
        fields = dict(options, tokens=math.prod(x.shape[:-1]), hidden=x.shape[-1], teacher_hidden=teacher_x.shape[-1],
                      vocab=weight.shape[0], upstream_per_token=upstream_per_token,
                      dweight_dtype=_dtype_field(outputs.get("dweight"), x.dtype), **(ranks.fields if ranks else {}))
        heads = {} if direction == "finish" else {
            "x": x, "weight": weight.astype(x.dtype), "bias": bias, "teacher_x": teacher_x, "teacher_weight": teacher_weight,
            "teacher_bias": teacher_bias}
        return call(f"linear_kl_{'parallel_' if ranks else ''}{direction}_{TYPES[x.dtype.name]}",
                    {**heads, "row_weight": row_weight, **inputs}, outputs, fields, "tokens",
                    ("teacher_weight", "teacher_bias", *_shared(False, upstream_per_token)), behind=("all_states",))

    def forward(arrays, save):
        own = {1: 0, 2: 0, 4: 0, 5: 0}
        return _forward_kl(ranks, run, arrays, own, arrays[0].shape[:-1], dict(options)["divergence"], save, entropy)

    def results(found, divisor):
        loss = found["loss"].sum() if reduced else found["loss"]
        return (loss if divisor is None else loss / divisor, *([found["entropy"]] if entropy else []))

    def outputs(arrays, wanted=()):
        x, weight, bias, *_ = arrays
        rows = ("loss", "entropy")[:1 + entropy]
        return {**{n: _of(x.shape[:-1], _f32) for n in rows}, **{n: _like(dict(dx=x, dweight=weight, dbias=bias)[n]) for n in wanted}}

    @jax.custom_vjp
    def f(*arrays):
        return results(forward(arrays, save=False), arrays[-1])

    def fwd(*primals):
        arrays = x, *_, divisor = _values(*primals)
        _constants(teacher_x=primals[3], teacher_weight=primals[4], teacher_bias=primals[5], row_weight=primals[6])
        wanted = _wanted(dx=primals[0], dweight=primals[1], dbias=primals[2])
        if reduced and x.dtype != jnp.float16 and not ranks:
            found = run("forward_backward", arrays, {"upstream": None if divisor is None else 1 / divisor}, outputs(arrays, wanted))
            return results(found, divisor), {"made": _made(found, wanted, _HEAD)}
        found = forward(arrays, save=True)
        out = results(found, divisor)
        kept = {"arrays": arrays, "saved": {n: a for n, a in found.items() if n == "states"}, "wanted": _flags(wanted, _HEAD)}
        _check_backward(dict(options), bwd, kept, out)
        return out, kept

    def bwd(kept, given):
        if (dloss := _given(given[0], ranks)) is None:
            return (None,) * 8
        if "made" in kept:
            made = _scaled(kept["made"], dloss, None)
        else:
            arrays = kept["arrays"]
            likes = {name: like for name, like in outputs(arrays, _flagged(kept["wanted"])).items() if name in _HEAD}
            upstream = dloss if arrays[-1] is None else dloss / arrays[-1]
            made = run("backward", arrays, {**kept["saved"], "upstream": upstream}, likes, int(not reduced))
        return made.get("dx"), made.get("dweight"), made.get("dbias"), None, None, None, None, None

    f.defvjp(fwd, bwd, symbolic_zeros=True)
    return f


# ---- Columns over the devices of an axis -------------------------------------------------------------------------------------
# Forward leaves the states of a device's columns, an all-gather follows, and lk's finish computes the results from all of them.
# Backward is of a device's columns again. lk wants to know the first of them on the host, where it is a traced number. So each
# device counts all columns from its own first one on, the last column being followed by column 0: its own begin at 0.
# With vocab_slices forward leaves the states of each slice of these columns, as a device would that has no others. It counts columns
# from the slice's first one on. So states do not depend on the device that computes them.


class _Ranks(NamedTuple):
    axis: str | tuple  # () without axis_name
    size: int
    checked: bool  # shard_map knows along which axes an array varies: check_vma
    vocab: int  # columns of all devices
    slices: int  # of a device's columns

    @property
    def axes(self):
        return frozenset(self.axis if isinstance(self.axis, tuple) else [self.axis])

    @property
    def fields(self):
        return {"parallel.vocab_total": self.vocab, "parallel.ranks": self.size * self.slices}


def _ranks(axis_name, vocab, vocab_slices=0):
    """How columns are split, None where they are not. vocab: those of this device."""
    slices = _number(vocab_slices, "vocab_slices", numbers.Integral)
    _demand(slices >= 0, f"vocab_slices is {slices}; it must be 0 or more")
    if axis_name is None and not slices:
        return None
    axis = () if axis_name is None else tuple(axis_name) if isinstance(axis_name, list) else axis_name
    try:
        size, checked = jax.lax.axis_size(axis), axis_name is None or bool(axes_of(jax.lax.axis_index(axis)))
    except (NameError, TypeError, ValueError):
        raise ValueError(f"axis_name is {axis!r}, and there is no such axis here; call inside jax.shard_map, over a mesh that "
                         "has it") from None
    _demand(slices % size == 0, f"vocab_slices is {slices}; it must be a multiple of the number of devices, {size}")
    _demand(not slices or vocab * size % slices == 0,
            f"vocab_slices is {slices}; it must divide the number of columns of all devices, {vocab * size}")
    return _Ranks(axis, size, checked, vocab * size, max(slices // size, 1))


def _placed(ranks, own, others, **arrays):
    """same_axes of the arrays. own: that of a device's columns, which with ranks has to vary along the axis; others: those that
    vary there too; no other one may."""
    if not (ranks and ranks.checked):
        return same_axes(*arrays.values())
    _demand(ranks.axes <= axes_of(arrays[own]),
            f"{own} does not vary along the axis {ranks.axis!r}; each device must have columns of its own")
    for name, a in arrays.items():
        _demand(name == own or name in others or a is None or not ranks.axes & axes_of(a),
                f"{name} varies along the axis {ranks.axis!r}; all its devices must have the same")
    rest = frozenset().union(*(axes_of(a) for a in arrays.values() if a is not None)) - ranks.axes
    return [spread(a, rest | ranks.axes if name == own or name in others else rest) for name, a in arrays.items()]


def _first_column(ranks, i=0):
    """The first column of slice i of this device."""
    return (jax.lax.axis_index(ranks.axis) * ranks.slices + i).astype(jnp.int32) * (ranks.vocab // (ranks.size * ranks.slices))


def _own_first(ranks, columns, ignored=None, i=0):
    """Numbers of columns, counted from the first one of slice i of this device on. `ignored` becomes -1, and a bad one -2: neither
    is a column then."""
    first, total = _first_column(ranks, i), ranks.vocab
    found = jnp.where((columns >= 0) & (columns < total), (columns - first.astype(columns.dtype)) % total, -2)
    return found if ignored is None else jnp.where(columns == ignored, -1, found)


def _of_rank(ranks, direction, options, targets, class_weight=None, i=0):
    """Targets and class_weight as the call of slice i of a device gets them, and more fields. i=0: also that of all its columns."""
    if not ranks:
        return targets, class_weight, {}
    if direction == "finish":  # of all columns
        return targets, class_weight, ranks.fields
    targets = _own_first(ranks, targets, options["ignore_index"] if options["use_ignore_index"] else None, i)
    class_weight = None if class_weight is None else jnp.roll(class_weight, -_first_column(ranks, i))
    return targets, class_weight, {**ranks.fields, "ignore_index": -options["use_ignore_index"]}


def _gathered(ranks, arrays, own, step):
    """The states of all slices of all devices, in order. step(arrays, i): those of slice i of this device. own: the arrays that have
    columns, {number: dimension}."""
    parts = [jnp.split(a, ranks.slices, own[k]) if k in own and a is not None else [a] * ranks.slices for k, a in enumerate(arrays)]
    states = jnp.stack([step(part, i) for i, part in enumerate(zip(*parts))])
    if not ranks.axis:
        return states
    return jax.lax.all_gather(states, ranks.axis, tiled=True, to="invarying" if ranks.checked else "varying")


def _forward(ranks, run, arrays, own, outputs, options, shape, statistics):
    """Forward of cross_entropy or linear_cross_entropy. own: as in _gathered."""
    if not ranks:
        return run("forward", arrays, {}, outputs)
    larger = {n: a for n, a in outputs.items() if n in ("entropy", "argmax")}  # finish writes them; a state is larger for them
    words = 10 if statistics else 8 if larger or options["label_smoothing"] else 4

    def step(arrays, i):
        states = run("forward", arrays, {}, {"states": _of((*shape, words), jnp.int32), **larger}, i=i)["states"]
        # Word 6, the low half of lk_ce_top, is less by 1 for each column; without an argmax all stays below others.
        return states - _first_column(ranks, i) * (jnp.arange(words) == 6) if "argmax" in larger else states
    return run("finish", arrays, {"all_states": _gathered(ranks, arrays, own, step)}, outputs)


def _forward_kl(ranks, run, arrays, own, shape, divergence, save, entropy):
    """Forward of kl or linear_kl: the loss, entropy if wanted, and the states of all columns where ranks have to save them for
    backward. own: as in _gathered."""
    outputs, states = {n: _of(shape, _f32) for n in ("loss", "entropy")[:1 + entropy]}, {"states": _of((*shape, 8), jnp.int32)}
    if not ranks:
        return run("forward", arrays, {}, outputs)
    part = {**states, "entropy": outputs.get("entropy")}  # finish writes the entropy; a state has a part of it then
    found = _gathered(ranks, arrays, own, lambda arrays, i: run("forward", arrays, {}, part)["states"])
    if divergence >= DIVERGENCES["jensen_shannon"]:  # the terms need the sums of all columns
        first = {"all_states": found}
        found = _gathered(ranks, arrays, own, lambda arrays, i: run("between", arrays, first, part)["states"])
    return run("finish", arrays, {"all_states": found}, {**outputs, **(states if save else {})})


def _forward_ids(ranks, run, arrays, own, outputs, ids, itemsize):
    """Forward of cross_entropy_ids or linear_cross_entropy_ids. own: as in _gathered. itemsize: of a logit as it is gathered."""
    if not ranks:
        return run("forward", arrays, {}, outputs)
    # The states of all rows lie before the logits of all ids, so that they are no rows of one array.
    words = 4 + -(-ids.shape[-1] * itemsize // 16) * 4
    states = {"states": _of((math.prod(ids.shape[:-1]) * words,), jnp.int32)}
    states |= {n: a for n, a in outputs.items() if n == "tail"}  # finish writes it; a state has a part of it then
    found = _gathered(ranks, arrays, own, lambda arrays, i: run("forward", arrays, {}, states, i=i)["states"])
    return run("finish", arrays, {"all_states": found}, outputs)


# ---- cross_entropy, linear_cross_entropy, and both with ids ------------------------------------------------------------------


def _loss_fields(reduction, ignore_index, label_smoothing, z_loss, softcap, logit_scale, zero_when_empty):
    """The options that these ops share, as fields. Those that are operands are off."""
    logit_scale, z_loss = (off if v is None or _operand(v) else _number(v, name) for v, name, off in (
        (logit_scale, "logit_scale", 1), (z_loss, "z_loss", 0)))
    _demand(np.float32(logit_scale) != 0, "logit_scale is 0; it must be above 0")
    return dict(reduction=_choice(reduction, REDUCTIONS, "reduction"), use_ignore_index=int(ignore_index is not None),
                ignore_index=0 if ignore_index is None else _number(ignore_index, "ignore_index", numbers.Integral),
                label_smoothing=_number(0.0 if label_smoothing is None else label_smoothing, "label_smoothing"), z_loss=float(z_loss),
                softcap=0.0 if softcap is None else _number(softcap, "softcap"),
                logit_scale=0.0 if logit_scale == 1 else float(logit_scale),
                zero_when_empty=_flag(zero_when_empty, "zero_when_empty"))


def _tempered(temperature, logit_scale, softcap):
    """logit_scale and softcap of logits that are divided by a temperature at the end. A softcap stands before that."""
    logit_scale = 1.0 if logit_scale is None else logit_scale
    if temperature is None:
        return logit_scale, softcap
    if not _operand(temperature):
        temperature = _number(temperature, "temperature")
        _demand(temperature > 0, f"temperature is {temperature}; it must be above 0")
        logit_scale = logit_scale if _operand(logit_scale) else _number(logit_scale, "logit_scale")
        return logit_scale / temperature, None if softcap is None else _number(softcap, "softcap") / temperature
    _demand(softcap is None or not _number(softcap, "softcap"), "temperature is an array, and there is a softcap; it must be a "
            "number of Python then, since softcap / temperature is part of the compiled program", TypeError)
    return _floats(logit_scale, "logit_scale") / _floats(temperature, "temperature"), softcap


def _add_z_loss(call, z_loss, fields, denominator, row_weight, ignored, aux):
    """The loss and aux of call(aux), with the part of a traced z_loss, which is computed from lse. ignored(): which rows are."""
    if not _operand(z_loss):
        return call(aux)
    z_loss = _factor(z_loss, "z_loss")
    counted = fields["reduction"] == 1 and denominator is None
    loss, found = call(tuple(dict.fromkeys((*aux, "lse", *(["valid_rows"] if counted else [])))))
    part = z_loss * jnp.square(found["lse"])  # lse is 0 in an ignored row
    if row_weight is not None:  # which may be anything there
        part = part * jnp.where(ignored(), 0, row_weight)
    if fields["reduction"]:
        part = part.sum()
    if counted:
        valid = found["valid_rows"][0].astype(_f32)
        part = part / jnp.maximum(valid, 1) if fields["zero_when_empty"] else part / valid
    elif denominator is not None:
        part = part / denominator
    return loss + part, {name: part if name == "z_loss" else found[name] for name in aux}


_STATISTICS = ("log_sum_sq_probs", "mean_logits", "top_logprob")  # lk writes them behind the entropy, in that array
_AUX = ("lse", "z_loss", "entropy", "argmax", "valid_rows", "weight_sum", *_STATISTICS)
_SMOOTH = ("lse", "entropy")  # those that have a gradient


def _has_statistics(aux):
    return any(name in _STATISTICS for name in aux)


def _split(found, statistics):
    """The outputs of forward, the statistics by their own names."""
    if not statistics:
        return found
    entropy, *more = found["entropy"]
    return {**found, "entropy": entropy, **dict(zip(_STATISTICS, more))}


def _result(aux, found):
    """The loss, and the results named in aux, of a call's outputs."""
    found = {"z_loss" if n == "z_loss_out" else n: a for n, a in found.items()}
    return found["loss"], {name: found[name] for name in aux}


def _loss_outputs(aux, known, reduced, shape):
    """The outputs of forward: the loss and those that aux names."""
    for name in aux:
        _demand(name in known, f"aux has {name!r}; it may have {', '.join(map(repr, known))}")
    loss, statistics = _of(() if reduced else shape, _f32), _has_statistics(aux)
    # lk's int64 numbers are two int32 each, since JAX has no int64 by default. The first is the low half.
    all_ = {"loss": loss, "lse": _of(shape, _f32), "z_loss": loss, "entropy": _of((4, *shape) if statistics else shape, _f32),
            "argmax": _of((*shape, 2), jnp.int32), "valid_rows": _of((2,), jnp.int32), "weight_sum": _of((), _f32)}
    fields = {"z_loss": "z_loss_out", **{name: "entropy" for name in _STATISTICS}}
    return {fields.get(name, name): all_["entropy" if name in _STATISTICS else name] for name in ("loss", *aux)}


def _shared(reduced, upstream_per_row=0):
    """The inputs and outputs that have no rows."""
    return ("weight", "bias", "class_weight", "denominator", "valid_rows", "weight_sum", "dweight", "dbias",
            *(() if upstream_per_row else ("upstream",)), *(("loss", "z_loss_out") if reduced else ()))


def _upstream_of_loss(dloss, reduced):
    """upstream, and whether it is one per row. A loss that is not used has one 0 for all rows: None would be 1, and an array
    would have to be filled."""
    return (jnp.zeros((), _f32), 0) if dloss is None else (dloss, int(not reduced))


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
    denominator = _floats(denominator, "denominator")
    _demand(denominator.size == 1, f"denominator has the shape {denominator.shape}; it must be one number")
    return denominator.reshape(())


def _grad_scale(grad_scale, reduction):
    if grad_scale is None:
        return None
    _demand(reduction != "none", "reduction is 'none'; with a grad_scale it must be 'mean' or 'sum'")
    if not _operand(grad_scale):
        _demand(_number(grad_scale, "grad_scale") != 0, "grad_scale is 0; it must be another number")
    grad_scale = _floats(grad_scale, "grad_scale")
    _demand(grad_scale.size == 1, f"grad_scale has the shape {grad_scale.shape}; it must be one number")
    return grad_scale.reshape(())


def _class_weight(class_weight, vocab):
    if class_weight is not None:
        class_weight = _floats(class_weight, "class_weight")
        _demand(class_weight.shape == (vocab,), f"class_weight has the shape {class_weight.shape}; it must have {(vocab,)}")
    return class_weight


def _row_weight(row_weight, shape, name="row_weight"):
    if row_weight is not None:
        row_weight = _read(row_weight, name)
        row_weight = row_weight.astype(_f32) if row_weight.dtype == bool else _floats(row_weight, name)
        _demand(row_weight.shape == shape, f"{name} has the shape {row_weight.shape}; it must have {shape}")
    return row_weight


@public
def cross_entropy(logits, targets, *, reduction="mean", ignore_index=-100, label_smoothing=0.0, z_loss=0.0, softcap=0.0,
                  logit_scale=1.0, temperature=None, class_weight=None, zero_when_empty=False, denominator=None,
                  row_weight=None, grad_scale=None, in_place=False, batch_invariant=False, aux=(), axis_name=None,
                  vocab_slices=0):
    """Softmax cross entropy of logits [..., vocab] with integer targets [...], float32.

    reduction: "mean" over the targets that count, "sum", or "none", as optax.softmax_cross_entropy_with_integer_labels has it.
    ignore_index: such targets count nowhere; None: none. z_loss k adds k lse^2. logit_scale multiplies the logits, before
    softcap s makes them s tanh(logits / s). None is off, for all of these. temperature divides them at the end: it is logit_scale /
    temperature and softcap / temperature. class_weight [vocab]: a factor per class. zero_when_empty: a mean over nothing is 0,
    not NaN. denominator: what a mean divides by instead of its own count, the targets of all micro-batches, say; it may be
    traced. row_weight [...]: a factor of each target's loss and gradient, advantages, say, or a mask. A mean divides by what it divides by
    without it; for a weighted mean pass denominator=row_weight.sum().
    logit_scale, temperature and z_loss may be arrays of JAX, also traced; they then have gradients. The first two may have one
    number per target. README.md says what that costs.
    grad_scale: the upstream gradient of a reduced loss, where it is known before: a loss scale, or 1 / the number of
    micro-batches; it may be traced. It saves the passes that multiply the gradients later, and makes float16 as fast as
    bfloat16. Gradients are right for any other upstream gradient too.
    in_place: the gradient takes the memory of the logits. That saves as much where the logits come from the same jit and
    nothing else reads them; where they are an argument of jit, or are read again, XLA copies them before.
    aux: names of more results, which are then returned as a dictionary beside the loss: "lse", "z_loss" (its part of the
    loss), "entropy", "argmax", "valid_rows" (the number of targets that count), "weight_sum"; and of each target's logits
    "log_sum_sq_probs" (log sum_j p_j^2), "mean_logits" (after logit_scale, softcap and temperature), "top_logprob" (of argmax).
    Of them lse and entropy have gradients.
    A target outside [0, vocab) that is not ignored makes the loss NaN, unless its row_weight is 0.
    batch_invariant=True: each row's results have the same bits for any number of rows, if rows lie alike modulo 16 bytes; few long
    rows take longer. Gradients are then made in backward, have no such promise, and grad_scale has no effect.
    axis_name: a mesh axis, or a tuple of them, over whose devices the columns are split, in a jax.shard_map under jit. logits are
    the columns of this device, as many as each of the others has, in the order of the axis; vocab above counts those of all. All
    devices pass the same targets and options, class_weight for all columns, and get the same results, bit for bit. The gradient
    is that of this device's logits, made in backward, so grad_scale has no effect. Forward has one all-gather, of 16 bytes for each
    target, 32 with label_smoothing, entropy or argmax, 40 with one of the last three of aux; backward has none. Where the devices
    do not divide vocab, pad the last columns with -inf; with label_smoothing or a softcap these count. With check_vma=False JAX
    takes each device's loss for one of its own, and differentiates their sum: backward then adds up their upstream gradients.
    vocab_slices: as in linear_cross_entropy; XLA copies the slices of the logits.
    """
    logits = _array(logits, "logits", 1)
    ranks = _ranks(axis_name, logits.shape[-1], vocab_slices)
    shape, vocab = logits.shape[:-1], ranks.vocab if ranks else logits.shape[-1]
    logit_scale, softcap = _tempered(temperature, logit_scale, softcap)
    fields = _loss_fields(reduction, ignore_index, label_smoothing, z_loss, softcap, logit_scale, zero_when_empty)
    fields.update(batch_invariant=_flag(batch_invariant, "batch_invariant"))
    targets = _targets(targets, shape, "logits", vocab, ignore_index)
    aux = _names(aux)
    _loss_outputs(aux, _AUX, False, shape)
    if _operand(logit_scale):
        logits = _times(logits, _factor(logit_scale, "logit_scale", shape, "target"))
    denominator = _denominator(denominator, reduction)
    row_weight = _row_weight(row_weight, shape)
    arrays = _placed(ranks, "logits", (), logits=logits, targets=targets, class_weight=_class_weight(class_weight, vocab),
                     denominator=denominator, row_weight=row_weight, grad_scale=_grad_scale(grad_scale, reduction))
    call = lambda aux: _cross_entropy(tuple(fields.items()), bool(in_place), aux, ranks)(*arrays)
    ignored = lambda: False if ignore_index is None else targets == ignore_index
    return _loss_result(aux, *_add_z_loss(call, z_loss, fields, denominator, row_weight, ignored, aux))


@functools.lru_cache(None)
def _cross_entropy(options, in_place, aux, ranks):
    options = dict(options)
    reduced = bool(options["reduction"])
    smooth, statistics = [n for n in _SMOOTH if n in aux], _has_statistics(aux)

    def run(direction, arrays, inputs, outputs, upstream_per_row=0, i=0):
        logits, targets, class_weight, denominator, row_weight, _ = arrays
        finish = direction == "finish"
        targets, class_weight, more = _of_rank(ranks, direction, options, targets, class_weight, i)
        fields = dict(options, rows=targets.size, vocab=logits.shape[-1], target_dtype=int(targets.dtype == jnp.int32),
                      upstream_per_row=upstream_per_row, statistics=int(statistics and direction in ("forward", "finish")), **more)
        found = call(f"cross_entropy_{'parallel_' if ranks else ''}{direction}_{TYPES[logits.dtype.name]}",
                     {"logits": None if finish else logits, "target": targets, "class_weight": class_weight,
                      "denominator": denominator, "row_weight": row_weight, **inputs}, outputs, fields, "rows",
                     _shared(reduced, upstream_per_row),
                     [("logits", "dlogits")] if in_place and "dlogits" in outputs else [],
                     ("all_states", "entropy")[:1 + fields["statistics"]])
        return _split(found, fields["statistics"])

    def outputs(targets, more=()):
        names = dict.fromkeys((*aux, *more))
        return _loss_outputs(names, names, reduced, targets.shape)

    def forward(arrays, outputs):
        return _forward(ranks, run, arrays, {0: -1}, outputs, options, arrays[1].shape, statistics)

    @jax.custom_vjp
    def f(*arrays):
        return _result(aux, forward(arrays, outputs(arrays[1])))

    def fwd(*primals):
        arrays = logits, targets, class_weight, *_, grad_scale = _values(*primals)
        _constants(class_weight=primals[2], denominator=primals[3], row_weight=primals[4], grad_scale=primals[5])
        # A reduced loss has one upstream gradient, almost always 1. So the gradient is made together with the loss, and
        # multiplied later: the logits are read once and not twice. Not for float16, whose gradients need a loss scale before
        # they are rounded, unless that is known; not where lse or entropy has a gradient of its own; not with statistics, which
        # forward alone computes, nor with batch_invariant, which it alone promises; and not where all devices have to be asked
        # before a gradient is known.
        early = logits.dtype != jnp.float16 or grad_scale is not None
        if reduced and early and not smooth and not statistics and not options["batch_invariant"] and not ranks:
            found = run("forward_backward", arrays, {"upstream": grad_scale}, {**outputs(targets), "dlogits": _like(logits)})
            return _result(aux, found), {"made": {"dlogits": found["dlogits"]}, "grad_scale": grad_scale}
        more = ["lse", *smooth, *(["valid_rows"] if options["reduction"] == 1 else []),
                *(["weight_sum"] if options["reduction"] == 1 and class_weight is not None else [])]
        beside = dict.fromkeys(("lse_low", "others") if ranks else ("lse_low",), _of(targets.shape, _f32))
        found = forward(arrays, {**outputs(targets, more), **beside})
        saved = {n: found[n] for n in (*more, *beside)}
        return _result(aux, found), {"arrays": arrays, "saved": saved}

    def bwd(kept, cotangents):
        dloss, dlse, dentropy = _upstream(cotangents, ranks)
        if dloss is None and dlse is None and dentropy is None:
            return (None,) * 6
        if "made" in kept:
            return _scaled(kept["made"], dloss, kept["grad_scale"]).get("dlogits"), None, None, None, None, None
        logits = kept["arrays"][0]
        dloss, each = _upstream_of_loss(dloss, reduced)
        found = run("backward", kept["arrays"], {**_saved(kept["saved"], dentropy), "upstream": dloss, "dlse": dlse,
                                                 "dentropy": dentropy}, {"dlogits": _like(logits)}, each)
        return found["dlogits"], None, None, None, None, None

    f.defvjp(fwd, bwd, symbolic_zeros=True)
    return f


_DLOGITS = {"float32": 1, "float16": 2, "bfloat16": 3, "float8_e5m2": 4}  # LK_DTYPE_*


@public
def cross_entropy_with_grad(logits, targets, *, reduction="mean", ignore_index=-100, label_smoothing=0.0, z_loss=0.0, softcap=0.0,
                            logit_scale=1.0, temperature=None, class_weight=None, zero_when_empty=False, denominator=None,
                            row_weight=None, grad_scale=None, dlogits_dtype=None):
    """(loss, dlogits) of cross_entropy, from one reading of the logits: for a backward of your own. Neither has a gradient.

    dlogits is the gradient of grad_scale * loss, with reduction "none" of their sum; None means 1. dlogits_dtype: the logits'
    type, float8_e5m2, or of float32 logits also float16 or bfloat16. float8_e5m2 is for a matrix product of 8 bits: rounded to
    nearest even, at most 57344 in size; what is at most 2^-17 becomes 0. Let grad_scale put a power of two in, and take it out in
    the product: with grad_scale=2**15, times the number of targets for a mean, all fits and only p below 2^-32 is lost.
    The other arguments are those of cross_entropy; logit_scale, temperature and z_loss are numbers of Python.
    """
    logits = _array(logits, "logits", 1)
    shape, vocab = logits.shape[:-1], logits.shape[-1]
    logit_scale, softcap = _tempered(temperature, logit_scale, softcap)
    fields = _loss_fields(reduction, ignore_index, label_smoothing, _number(z_loss, "z_loss"), softcap,
                          _number(logit_scale, "logit_scale"), zero_when_empty)
    targets = _targets(targets, shape, "logits", vocab, ignore_index)
    dtype = logits.dtype if dlogits_dtype is None else _dtype(dlogits_dtype, "dlogits_dtype")
    fields.update(rows=targets.size, vocab=vocab, target_dtype=int(targets.dtype == jnp.int32),
                  dlogits_dtype=_choice(dtype.name, _DLOGITS, "dlogits_dtype"))
    arrays = same_axes(logits, targets, _class_weight(class_weight, vocab), _denominator(denominator, reduction),
                       _row_weight(row_weight, shape), _grad_scale(grad_scale, "sum"))
    reduced = bool(fields["reduction"])
    found = call(f"cross_entropy_forward_backward_{TYPES[logits.dtype.name]}",
                 dict(zip(("logits", "target", "class_weight", "denominator", "row_weight", "upstream"), arrays)),
                 {**_loss_outputs((), (), reduced, shape), "dlogits": _of(logits.shape, dtype)}, fields, "rows", _shared(reduced))
    return found["loss"], found["dlogits"]


class CrossEntropyIdsOutput(NamedTuple):
    """Of cross_entropy_ids and linear_cross_entropy_ids. Both have gradients."""
    loss: jax.Array
    logp: jax.Array


class CrossEntropyIdsTailOutput(NamedTuple):
    """The same with a tail, the log of the probability that no id of the row has. It has a gradient too."""
    loss: jax.Array
    logp: jax.Array
    tail: jax.Array


@public
def cross_entropy_ids(logits, target_ids, target_weight=None, *, reduction="mean", ignore_index=-100, z_loss=0.0, softcap=0.0,
                      logit_scale=1.0, temperature=None, zero_when_empty=False, denominator=None, row_weight=None,
                      tail_weight=None, tail=False, axis_name=None, vocab_slices=0):
    """Several weighted targets per row, and their log-probabilities: a CrossEntropyIdsOutput, float32. lk/cross_entropy_ids.cuh has
    the formulas.

    logits [..., vocab], target_ids [..., n], n from 1 to 128, target_weight [..., n], None for 1. logp is
    take_along_axis(log_softmax(logits), target_ids, -1), and 0 where an id is ignore_index. loss is -(target_weight * logp).sum(-1)
    for each row; a mean divides by the number of rows that have an id, or by denominator. Ids may repeat. A weight of 0 skips its
    id, which may be any number then. Any other id outside [0, vocab) that is not ignored makes loss and logp of its row NaN.
    Weights and ids get no gradient: where the weights have one, or depend on the logits, build the loss of logp.

    Distillation from a teacher's largest n probabilities q: `cross_entropy_ids(logits, ids, q).loss`, or with the student's own
    probabilities as weights, `q = jnp.exp(logp); (q * (logp - teacher_logp)).sum(-1)`.

    tail=True: also tail [...], log of the probability of all columns that are none of the row's ids, a CrossEntropyIdsTailOutput.
    With tail_weight [...] too, and the loss has -tail_weight * tail more. tail is not 1 minus a sum where that would be inexact,
    and is -inf where nothing is left. With `tail_weight=1 - q.sum(-1)` the loss is, up to the teacher's entropy, the KL of n
    classes and the rest.

    axis_name: as in cross_entropy; ids are columns of all devices. Forward's all-gather is of 16 bytes a row and the logits of its
    ids. vocab_slices: as in linear_cross_entropy.

    The other arguments are those of cross_entropy; logit_scale and temperature may have one number per row. Gradients are made in
    backward, with any reduction.
    """
    logits = _array(logits, "logits", 1)
    ranks = _ranks(axis_name, logits.shape[-1], vocab_slices)
    shape, vocab = logits.shape[:-1], ranks.vocab if ranks else logits.shape[-1]
    logit_scale, softcap = _tempered(temperature, logit_scale, softcap)
    fields = _loss_fields(reduction, ignore_index, 0.0, z_loss, softcap, logit_scale, zero_when_empty)
    ids, target_weight, ignored = _ids(target_ids, target_weight, shape, "logits", vocab, ignore_index)
    if _operand(logit_scale):
        logits = _times(logits, _factor(logit_scale, "logit_scale", shape, "row"))
    denominator = _denominator(denominator, reduction)
    row_weight = _row_weight(row_weight, shape)
    tail_weight = _row_weight(tail_weight, shape, "tail_weight")
    arrays = _placed(ranks, "logits", (), logits=logits, target_ids=ids, target_weight=target_weight, denominator=denominator,
                     row_weight=row_weight, tail_weight=tail_weight)
    call = lambda aux: _cross_entropy_ids(tuple(fields.items()), aux, ranks)(*arrays)
    return _ids_result(tail, tail_weight, call, z_loss, fields, denominator, row_weight, ignored)


def _ids_result(tail, tail_weight, *call):
    """With a tail or without. call: what _add_z_loss takes before aux."""
    tail = bool(tail) or tail_weight is not None
    loss, found = _add_z_loss(*call, ("logp", "tail") if tail else ("logp",))
    return CrossEntropyIdsTailOutput(loss, found["logp"], found["tail"]) if tail else CrossEntropyIdsOutput(loss, found["logp"])


def _ids(target_ids, target_weight, shape, of, vocab, ignore_index):
    """The ids, their weights, and ignored(): which rows have no id that counts."""
    ids = _whole(target_ids, "target_ids")
    _demand(ids.ndim == len(shape) + 1 and ids.shape[:-1] == shape,
            f"target_ids has the shape {ids.shape}; the shape of {of} asks for {shape} and the number of ids")
    if target_weight is not None:
        target_weight = _floats(target_weight, "target_weight")
        _demand(target_weight.shape == ids.shape, f"target_weight has the shape {target_weight.shape}; it must have {ids.shape}")
    _check_targets("target_ids", vocab, ignore_index, ids, *(() if target_weight is None else (target_weight,)))

    def ignored():
        skipped = False if ignore_index is None else ids == ignore_index
        if target_weight is not None:
            skipped |= (target_weight == 0) & ((ids < 0) | (ids >= vocab))
        return jnp.all(jnp.broadcast_to(skipped, ids.shape), -1)
    return ids, target_weight, ignored


def _ids_outputs(aux, reduced, ids, more=()):
    names = [n for n in dict.fromkeys((*aux, *more)) if n not in ("logp", "tail")]
    tail = {"tail": _of(ids.shape[:-1], _f32)} if "tail" in aux else {}
    return {**_loss_outputs(names, names, reduced, ids.shape[:-1]), "logp": _of(ids.shape, _f32), **tail}


def _ids_upstream(cotangents, reduced, ranks):
    """upstream, whether it is one per row, and dlogp, dlse and dtail; None where all are certainly 0."""
    loss, others = cotangents
    dloss = _given(loss, ranks)
    dlogp, dlse, dtail = (_given(others[n], ranks) if n in others else None for n in ("logp", "lse", "tail"))
    if all(d is None for d in (dloss, dlogp, dlse, dtail)):
        return None
    # Beside dlogp and dtail lk takes a NULL upstream for 0.
    up = (None, 0) if dloss is None and not (dlogp is None and dtail is None) else _upstream_of_loss(dloss, reduced)
    return (*up, dlogp, dlse, dtail)


def _ids_saved(kept, dtail):
    """What backward reads: the tail where it has a gradient, or a weight, which is the last of the arrays."""
    return {n: v for n, v in kept["saved"].items() if n != "tail" or dtail is not None or kept["arrays"][-1] is not None}


@functools.lru_cache(None)
def _cross_entropy_ids(options, aux, ranks):
    """aux: logp, perhaps tail, and lse and valid_rows where a traced z_loss needs them."""
    options = dict(options)
    reduced = bool(options["reduction"])

    def run(direction, arrays, inputs, outputs, upstream_per_row=0, i=0):
        logits, ids, target_weight, denominator, row_weight, tail_weight = arrays
        finish = direction == "finish"
        ids, _, more = _of_rank(ranks, direction, options, ids, i=i)
        fields = dict(options, rows=math.prod(ids.shape[:-1]), vocab=logits.shape[-1], ids_per_row=ids.shape[-1],
                      target_dtype=int(ids.dtype == jnp.int32), upstream_per_row=upstream_per_row, **more)
        return call(f"cross_entropy_ids_{'parallel_' if ranks else ''}{direction}_{TYPES[logits.dtype.name]}",
                    {"logits": None if finish else logits, "target_ids": ids, "target_weight": target_weight,
                     "denominator": denominator, "row_weight": row_weight, "tail_weight": tail_weight, **inputs}, outputs, fields,
                    "rows", ("states", "all_states", *_shared(reduced, upstream_per_row)))

    def forward(arrays, outputs):
        logits, ids, *_ = arrays
        return _forward_ids(ranks, run, arrays, {0: -1}, outputs, ids, logits.dtype.itemsize)

    @jax.custom_vjp
    def f(*arrays):
        return _result(aux, forward(arrays, _ids_outputs(aux, reduced, arrays[1])))

    def fwd(*primals):
        _constants(target_weight=primals[2], denominator=primals[3], row_weight=primals[4], tail_weight=primals[5])
        arrays = _values(*primals)
        more = ["lse", *(["valid_rows"] if options["reduction"] == 1 else [])]
        beside = dict.fromkeys(("lse_low", "others") if ranks else ("lse_low",), _of(arrays[1].shape[:-1], _f32))
        found = forward(arrays, {**_ids_outputs(aux, reduced, arrays[1], more), **beside})
        more += ["tail"] if "tail" in aux else []
        return _result(aux, found), {"arrays": arrays, "saved": {n: found[n] for n in (*more, *beside)}}

    def bwd(kept, cotangents):
        if (ups := _ids_upstream(cotangents, reduced, ranks)) is None:
            return (None,) * 6
        dloss, each, dlogp, dlse, dtail = ups
        saved = _ids_saved(kept, dtail)
        found = run("backward", kept["arrays"], {**saved, "upstream": dloss, "dlse": dlse, "dlogp": dlogp, "dtail": dtail},
                    {"dlogits": _like(kept["arrays"][0])}, each)
        return found["dlogits"], None, None, None, None, None

    f.defvjp(fwd, bwd, symbolic_zeros=True)
    return f


@public
def linear_cross_entropy(x, weight, targets, *, bias=None, reduction="mean", ignore_index=-100, label_smoothing=0.0, z_loss=0.0,
                         softcap=0.0, logit_scale=1.0, temperature=None, class_weight=None, zero_when_empty=False,
                         denominator=None, row_weight=None, grad_scale=None, max_counted=None, fast_logits=False,
                         tf32=False, batch_invariant=False, workspace_mib=None, aux=(), axis_name=None, vocab_slices=0):
    """cross_entropy of the logits x @ weight.T + bias, without storing all of them. x [..., hidden], weight [vocab, hidden].

    The other options are those of cross_entropy; aux may have them all.
    weight and bias may be float32 beside 16-bit x. The matmuls then have x's type; the gradients are float32, rounded never.
    max_counted: an upper bound of the targets that are not ignored, a Python int. The matmuls then have so many rows. If more targets
    count, the loss and all gradients are NaN. fast_logits: chunks of logits are stored
    in x's type. tf32: float32 matmuls may use TF32. workspace_mib: the most scratch memory to use; None: what the
    fastest plan takes, at most a sixteenth of the device's memory. Too little, for backward too where a gradient is wanted, is a
    ValueError in forward, which says the least. An array as logit_scale or temperature multiplies x; one
    number per token is not for use with a bias.
    batch_invariant: a token's loss has the same bits whatever the other tokens are, in bfloat16 on sm_90a; gradients are then
    made in backward.
    axis_name: as in cross_entropy. weight, bias and their gradients are of this device's columns; x is of all tokens. Backward
    computes the logits again: 4 matmuls in all. A device's part of the gradient of x is rounded to x's type. Where all devices
    have the same x, JAX adds up the parts, in that type. Pad the last columns by a bias of -inf.
    vocab_slices=n: the columns of all devices are in n slices of as many. Forward computes each slice by itself, and then merges
    them all. So the loss and all of aux have the same bits on any number of devices that divides n, and without axis_name: with
    vocab_slices=8 on 1, 2, 4 and 8 devices. With batch_invariant=True a token's have the same bits for any number of tokens too:
    a sampler and a trainer compute equal log-probabilities. Gradients have no such promise. It costs a forward of smaller matmuls;
    gradients are made in backward, as with axis_name, and grad_scale has no effect.
    """
    x, weight = _array(x, "x", 1), _array(weight, "weight", 2)
    weight = _beside(weight, "weight", x.dtype, (weight.shape[0], x.shape[-1]))
    ranks = _ranks(axis_name, weight.shape[0], vocab_slices)
    shape, vocab = x.shape[:-1], ranks.vocab if ranks else weight.shape[0]
    bias = None if bias is None else _beside(bias, "bias", x.dtype, weight.shape[:1])
    logit_scale, softcap = _tempered(temperature, logit_scale, softcap)
    fields = _loss_fields(reduction, ignore_index, label_smoothing, z_loss, softcap, logit_scale, zero_when_empty)
    targets = _targets(targets, shape, "x", vocab, ignore_index)
    fields.update(max_counted=_bound(max_counted), fast_logits=_flag(fast_logits, "fast_logits"), tf32=_flag(tf32, "tf32"),
                  batch_invariant=_flag(batch_invariant, "batch_invariant"), workspace_bytes=_budget(workspace_mib))
    aux = _names(aux)
    _loss_outputs(aux, _AUX, False, shape)
    x, bias = _scaled_head(x, bias, logit_scale)
    denominator = _denominator(denominator, reduction)
    row_weight = _row_weight(row_weight, shape)
    arrays = _placed(ranks, "weight", ("x", "bias"), x=x, weight=weight, targets=targets, bias=bias,
                     class_weight=_class_weight(class_weight, vocab), denominator=denominator, row_weight=row_weight,
                     grad_scale=_grad_scale(grad_scale, reduction))
    call = lambda aux: _linear_cross_entropy(tuple(fields.items()), aux, ranks)(*arrays)
    ignored = lambda: False if ignore_index is None else targets == ignore_index
    return _loss_result(aux, *_add_z_loss(call, z_loss, fields, denominator, row_weight, ignored, aux))


def _budget(workspace_mib):
    """The field workspace_bytes. 0: lk's own choice, what lk_<op>_<direction>_workspace_bytes says."""
    if workspace_mib is None:
        return 0
    workspace_mib = _number(workspace_mib, "workspace_mib")
    _demand(1 <= workspace_mib * 2**20 < 2**63, f"workspace_mib is {workspace_mib}; it must be above 0, and finite")
    return int(workspace_mib * 2**20)


def _check_backward(options, bwd, kept, results):
    """Refuses in forward a workspace_mib that is too small for backward, which is traced and not run. All results that have
    gradients get them here; vmap, which adds tokens, asks again."""
    if options["workspace_bytes"]:
        jax.eval_shape(lambda cotangents: bwd(kept, cotangents), results)


def _head(direction, x, weight, bias, outputs, fields):
    """What the two cross entropies of a head share: tensors and fields of a call."""
    fields = dict(fields, tokens=math.prod(x.shape[:-1]), hidden=x.shape[-1], vocab=weight.shape[0],
                  bias_dtype=_dtype_field(bias, x.dtype))
    for name in ("dweight", "dbias"):
        fields[f"{name}_dtype"] = _dtype_field(outputs.get(name), x.dtype)
    if direction == "finish":  # which has no plan, so no budget
        return {}, {**fields, "workspace_bytes": 0}
    return {"x": x, "weight": weight.astype(x.dtype), "bias": bias}, fields


@functools.lru_cache(None)
def _linear_cross_entropy(options, aux, ranks):
    options = dict(options)
    reduced = bool(options["reduction"])
    smooth, statistics = [n for n in _SMOOTH if n in aux], _has_statistics(aux)

    def run(direction, arrays, inputs, outputs, upstream_per_token=0, i=0):
        x, weight, targets, bias, class_weight, denominator, row_weight, _ = arrays
        targets, class_weight, more = _of_rank(ranks, direction, options, targets, class_weight, i)
        head, fields = _head(direction, x, weight, bias, outputs, dict(
            options, target_dtype=int(targets.dtype == jnp.int32), upstream_per_token=upstream_per_token,
            statistics=int(statistics and direction in ("forward", "finish")), **more))
        found = call(f"linear_cross_entropy_{'parallel_' if ranks else ''}{direction}_{TYPES[x.dtype.name]}",
                     {**head, "target": targets, "class_weight": class_weight, "denominator": denominator,
                      "row_weight": row_weight, **inputs}, outputs, fields, "tokens", _shared(reduced, upstream_per_token),
                     behind=("all_states", "entropy")[:1 + fields["statistics"]])
        return _split(found, fields["statistics"])

    def outputs(targets, more=()):
        names = dict.fromkeys((*aux, *more))
        return _loss_outputs(names, names, reduced, targets.shape)

    def forward(arrays, outputs):
        return _forward(ranks, run, arrays, {1: 0, 3: 0}, outputs, options, arrays[2].shape, statistics)

    @jax.custom_vjp
    def f(*arrays):
        return _result(aux, forward(arrays, outputs(arrays[2])))

    def fwd(*primals):
        arrays = x, weight, targets, bias, *_, grad_scale = _values(*primals)
        _constants(class_weight=primals[4], denominator=primals[5], row_weight=primals[6], grad_scale=primals[7])
        wanted = _wanted(dx=primals[0], dweight=primals[1], dbias=primals[3])
        likes = {name: _like(dict(dx=x, dweight=weight, dbias=bias)[name]) for name in wanted}
        # As in cross_entropy. Here it also saves one of four matmuls, since backward computes the logits again.
        early = x.dtype != jnp.float16 or grad_scale is not None
        if reduced and early and not smooth and not statistics and not options["batch_invariant"] and not ranks:
            found = run("forward_backward", arrays, {"upstream": grad_scale}, {**outputs(targets), **likes})
            return _result(aux, found), {"made": _made(found, wanted, _HEAD), "grad_scale": grad_scale}
        beside = dict.fromkeys(("lse_low", "others") if ranks else ("lse_low",), _of(targets.shape, _f32))
        found = forward(arrays, {**outputs(targets, ["lse", *smooth]), **beside})
        kept = {"arrays": arrays, "saved": {n: found[n] for n in ("lse", *smooth, *beside)}, "wanted": _flags(wanted, _HEAD)}
        _check_backward(options, bwd, kept, _result(aux, found))
        return _result(aux, found), kept

    def bwd(kept, cotangents):
        dloss, dlse, dentropy = _upstream(cotangents, ranks)
        if dloss is None and dlse is None and dentropy is None:
            return (None,) * 8
        if "made" in kept:
            made = _scaled(kept["made"], dloss, kept["grad_scale"])
        else:
            x, weight, _, bias, *_ = kept["arrays"]
            dloss, each = _upstream_of_loss(dloss, reduced)
            likes = {name: _like(dict(dx=x, dweight=weight, dbias=bias)[name]) for name in _flagged(kept["wanted"])}
            made = run("backward", kept["arrays"], {**_saved(kept["saved"], dentropy), "upstream": dloss, "dlse": dlse,
                                                    "dentropy": dentropy}, likes, each)
        return made.get("dx"), made.get("dweight"), None, made.get("dbias"), None, None, None, None

    f.defvjp(fwd, bwd, symbolic_zeros=True)
    return f


@public
def linear_cross_entropy_ids(x, weight, target_ids, target_weight=None, *, bias=None, reduction="mean", ignore_index=-100,
                             z_loss=0.0, softcap=0.0, logit_scale=1.0, temperature=None, zero_when_empty=False, denominator=None,
                             row_weight=None, tail_weight=None, tail=False, max_counted=None, fast_logits=False, tf32=False,
                             workspace_mib=None, axis_name=None, vocab_slices=0):
    """cross_entropy_ids of the logits x @ weight.T + bias, without storing all of them: a CrossEntropyIdsOutput, float32. For
    distillation from a teacher's largest probabilities, several targets per token, policies over some tokens.

    x [..., hidden], weight [vocab, hidden], bias [vocab]; target_ids [..., n], n from 1 to 128, target_weight [..., n]. loss and
    logp, ids that are ignored, skipped or bad, and the other arguments are those of cross_entropy_ids. For a token with a bad id,
    loss, logp, tail and the gradient of x are NaN; it adds nothing to those of weight and bias.
    tail=True or tail_weight [...]: a CrossEntropyIdsTailOutput, as in cross_entropy_ids. Such a call stores logits, in chunks, also
    where one without a tail stores none in bfloat16.
    max_counted: an upper bound of the tokens that count, a Python int. The matmuls then have so many rows, and x of the other tokens may
    be anything. If more count, all results and gradients are NaN. A token counts unless each of its ids is ignore_index, or outside
    the vocabulary with a weight of 0: an id of the vocabulary counts even if its weight is 0. Not with axis_name or vocab_slices.
    weight and bias may be float32 beside 16-bit x, as in linear_cross_entropy, whose fast_logits, tf32 and workspace_mib these are.
    An array as logit_scale or temperature multiplies x; one number per token is not for use with a bias.
    axis_name: as in linear_cross_entropy; ids are columns of all devices. Forward's all-gather is of 16 bytes a token and the
    logits of its ids, in float32, or with fast_logits in x's type. Logits are stored, in chunks. vocab_slices: as there.

    x, weight and bias have gradients, of loss, logp and tail, made in backward, which computes the logits again: 4 matmuls in all.
    """
    x, weight = _array(x, "x", 1), _array(weight, "weight", 2)
    weight = _beside(weight, "weight", x.dtype, (weight.shape[0], x.shape[-1]))
    ranks = _ranks(axis_name, weight.shape[0], vocab_slices)
    shape, vocab = x.shape[:-1], ranks.vocab if ranks else weight.shape[0]
    bias = None if bias is None else _beside(bias, "bias", x.dtype, weight.shape[:1])
    logit_scale, softcap = _tempered(temperature, logit_scale, softcap)
    fields = _loss_fields(reduction, ignore_index, 0.0, z_loss, softcap, logit_scale, zero_when_empty)
    fields.update(max_counted=_bound(max_counted, ranks), fast_logits=_flag(fast_logits, "fast_logits"), tf32=_flag(tf32, "tf32"),
                  workspace_bytes=_budget(workspace_mib))
    ids, target_weight, ignored = _ids(target_ids, target_weight, shape, "x", vocab, ignore_index)
    x, bias = _scaled_head(x, bias, logit_scale)
    denominator = _denominator(denominator, reduction)
    row_weight = _row_weight(row_weight, shape)
    tail_weight = _row_weight(tail_weight, shape, "tail_weight")
    arrays = _placed(ranks, "weight", ("x", "bias"), x=x, weight=weight, target_ids=ids, bias=bias, target_weight=target_weight,
                     denominator=denominator, row_weight=row_weight, tail_weight=tail_weight)
    call = lambda aux: _linear_cross_entropy_ids(tuple(fields.items()), aux, ranks)(*arrays)
    return _ids_result(tail, tail_weight, call, z_loss, fields, denominator, row_weight, ignored)


def _scaled_head(x, bias, logit_scale):
    """x and bias, times a logit_scale that is an operand."""
    if not _operand(logit_scale):
        return x, bias
    logit_scale = _factor(logit_scale, "logit_scale", x.shape[:-1], "token")
    _demand(bias is None or logit_scale.ndim == 0,
            f"logit_scale has the shape {logit_scale.shape}; with a bias it must be one number")
    return _times(x, logit_scale), None if bias is None else bias.astype(_f32) * logit_scale


@functools.lru_cache(None)
def _linear_cross_entropy_ids(options, aux, ranks):
    """aux: as in _cross_entropy_ids."""
    options = dict(options)
    reduced = bool(options["reduction"])

    def run(direction, arrays, inputs, outputs, upstream_per_token=0, i=0):
        x, weight, ids, bias, target_weight, denominator, row_weight, tail_weight = arrays
        ids, _, more = _of_rank(ranks, direction, options, ids, i=i)
        head, fields = _head(direction, x, weight, bias, outputs, dict(
            options, ids_per_row=ids.shape[-1], target_dtype=int(ids.dtype == jnp.int32), upstream_per_token=upstream_per_token,
            **more))
        return call(f"linear_cross_entropy_ids_{'parallel_' if ranks else ''}{direction}_{TYPES[x.dtype.name]}",
                    {**head, "target_ids": ids, "target_weight": target_weight, "denominator": denominator,
                     "row_weight": row_weight, "tail_weight": tail_weight, **inputs}, outputs, fields, "tokens",
                    ("states", "all_states", *_shared(reduced, upstream_per_token)))

    def forward(arrays, outputs):
        x, _, ids, *_ = arrays
        return _forward_ids(ranks, run, arrays, {1: 0, 3: 0}, outputs, ids, x.dtype.itemsize if options["fast_logits"] else 4)

    @jax.custom_vjp
    def f(*arrays):
        return _result(aux, forward(arrays, _ids_outputs(aux, reduced, arrays[2])))

    def fwd(*primals):
        _constants(target_weight=primals[4], denominator=primals[5], row_weight=primals[6], tail_weight=primals[7])
        arrays = _values(*primals)
        beside = dict.fromkeys(("lse_low", "others") if ranks else ("lse_low",), _of(arrays[2].shape[:-1], _f32))
        found = forward(arrays, {**_ids_outputs(aux, reduced, arrays[2], ["lse"]), **beside})
        wanted = _wanted(dx=primals[0], dweight=primals[1], dbias=primals[3])
        saved = {n: found[n] for n in ("lse", "tail", *beside) if n in found}
        kept = {"arrays": arrays, "saved": saved, "wanted": _flags(wanted, _HEAD)}
        _check_backward(options, bwd, kept, _result(aux, found))
        return _result(aux, found), kept

    def bwd(kept, cotangents):
        if (ups := _ids_upstream(cotangents, reduced, ranks)) is None:
            return (None,) * 8
        dloss, each, dlogp, dlse, dtail = ups
        x, weight, _, bias, *_ = kept["arrays"]
        saved = _ids_saved(kept, dtail)
        likes = {name: _like(dict(dx=x, dweight=weight, dbias=bias)[name]) for name in _flagged(kept["wanted"])}
        made = run("backward", kept["arrays"], {**saved, "upstream": dloss, "dlse": dlse, "dlogp": dlogp, "dtail": dtail}, likes,
                   each)
        return made.get("dx"), made.get("dweight"), None, made.get("dbias"), None, None, None, None

    f.defvjp(fwd, bwd, symbolic_zeros=True)
    return f


# ---- support and linear_support ----------------------------------------------------------------------------------------------


class SupportOutput(NamedTuple):
    """Of support and linear_support: logp, lse, entropy and kl [...], support_logp [entries]. All have gradients. logp is None without
    targets, kl without teacher_logp."""
    logp: jax.Array | None
    lse: jax.Array
    entropy: jax.Array
    kl: jax.Array | None
    support_logp: jax.Array


@public
def support(logits, ids, offsets, targets=None, *, teacher_logp=None, ignore_index=-100, softcap=0.0, logit_scale=1.0,
            temperature=None, axis_name=None):
    """Log-probabilities over a support, from logits: of each token a softmax over the logits of some ids alone, as a sampler's top-p
    and top-k kept them: a SupportOutput, float32. It is linear_support where the logits are there already.

    logits [..., vocab]; ids [entries] are columns of it. Token t, in the order of the rows of logits, has the ids
    ids[offsets[t]:offsets[t + 1]]. An id that comes twice in a support counts twice. offsets, targets, teacher_logp, the results, and
    what is ignored or bad, are as in linear_support.

    lk reads only the logits that ids name. Their gradient is dense, of their type: 0 at all other columns. A bad token's is NaN at all
    columns, or 0 if all its cotangents are 0. Backward reads no logits: JAX need not keep them for it.
    softcap, logit_scale and temperature are as in cross_entropy; an array as logit_scale or temperature multiplies all logits. Under
    vmap lk runs once for each element.
    axis_name: as in cross_entropy; ids and targets are columns of all devices. Forward sums 4 bytes for each entry over the devices,
    backward nothing: the gradient is of this device's columns. The results have the bits of one device. Where the devices do not divide
    vocab, pad logits with any columns: no id names them.
    """
    logits = _array(logits, "logits", 1)
    ranks = _ranks(axis_name, logits.shape[-1])
    logit_scale, softcap = _tempered(temperature, logit_scale, softcap)
    fields, rest = _support_of("logits", logits.shape[:-1], logits.shape[-1], ranks, ids, offsets, targets, teacher_logp,
                               ignore_index, softcap, logit_scale)
    if _operand(logit_scale):
        logits = _times(logits, _factor(logit_scale, "logit_scale", logits.shape[:-1], "token"))
    logits, *rest = _placed(ranks, "logits", (), logits=logits, **rest)
    found = _linear_support(fields, ranks)(logits, None, None, *rest)
    return SupportOutput(*map(found.get, SupportOutput._fields))


@public
def linear_support(x, weight, ids, offsets, targets=None, *, bias=None, teacher_logp=None, ignore_index=-100, softcap=0.0,
                   logit_scale=1.0, temperature=None, axis_name=None):
    """Log-probabilities over a support: of each token the logits of some ids alone, as a sampler's top-p and top-k kept them, and a
    softmax over these: a SupportOutput, float32. lk/linear_support.cuh has the formulas.

    x [..., hidden], weight [vocab, hidden], bias [vocab]. ids [entries] are rows of weight. Token t, in the order of x's rows, has
    the ids ids[offsets[t]:offsets[t + 1]]. offsets is [tokens + 1]; each is 0 to entries, and not below the one before. ids, offsets
    and targets are int32, int64 or uint8. support_logp [entries] is the log-probability of each id among the ids of its token, logp
    [...] that of targets [...]. lse [...] is the log-sum-exp over the support, entropy [...] its entropy. kl [...] is sum q
    (teacher_logp - support_logp) with q = exp(teacher_logp). teacher_logp [entries] may be -inf, and gets no gradient. For another
    loss, such as the reverse KL, use support_logp.

    lk does not compute the logits of all columns. For a token it reads only the rows of weight that its ids name. The gradient of
    weight is dense.

    A token whose target is ignore_index has results and gradients of 0. Where a token has no ids, an id outside the vocabulary, or a
    target that is none of its ids, its results are NaN. Its gradient of x is NaN too, or 0 if all its cotangents are 0.
    weight and bias may be float32 beside 16-bit x, softcap, logit_scale and temperature are as in linear_cross_entropy; an array as
    logit_scale or temperature multiplies x. Under vmap lk runs once for each element.
    axis_name: as in linear_cross_entropy; ids and targets are columns of all devices. Forward sums 4 bytes for each entry over
    the devices, and backward does not compute the logits again. The results have the bits of one device. Where the devices do not
    divide vocab, pad weight with any rows: no id names them.

    x, weight and bias have gradients.
    """
    x, weight = _array(x, "x", 1), _array(weight, "weight", 2)
    weight = _beside(weight, "weight", x.dtype, (weight.shape[0], x.shape[-1]))
    ranks = _ranks(axis_name, weight.shape[0])
    bias = None if bias is None else _beside(bias, "bias", x.dtype, weight.shape[:1])
    logit_scale, softcap = _tempered(temperature, logit_scale, softcap)
    fields, rest = _support_of("x", x.shape[:-1], weight.shape[0], ranks, ids, offsets, targets, teacher_logp, ignore_index, softcap,
                               logit_scale)
    x, bias = _scaled_head(x, bias, logit_scale)
    arrays = _placed(ranks, "weight", ("x", "bias"), x=x, weight=weight, bias=bias, **rest)
    found = _linear_support(fields, ranks)(*arrays)
    return SupportOutput(*map(found.get, SupportOutput._fields))


def _support_of(of, shape, vocab, ranks, ids, offsets, targets, teacher_logp, ignore_index, softcap, logit_scale):
    """What support and linear_support share: the options as fields, and the arrays that are neither logits nor of the head. of: the
    array whose rows are the tokens, of the shape `shape`. vocab: the columns of a device."""
    columns, tokens = ranks.vocab if ranks else vocab, math.prod(shape)
    fields = _loss_fields("none", ignore_index, 0.0, 0.0, softcap, logit_scale, False)
    fields = {name: fields[name] for name in ("use_ignore_index", "ignore_index", "softcap", "logit_scale")}
    ids, offsets = _whole(ids, "ids"), _whole(offsets, "offsets")
    _demand(ids.ndim == 1, f"ids has the shape {ids.shape}; it must have one dimension")
    _demand(offsets.shape == (tokens + 1,), f"offsets has the shape {offsets.shape}; the shape of {of} asks for {(tokens + 1,)}")
    if targets is None:
        fields.update(use_ignore_index=0, ignore_index=0)
    else:
        targets = _targets(targets, shape, of, columns, ignore_index)
        ids, targets = (a.astype(jnp.promote_types(ids.dtype, targets.dtype)) for a in (ids, targets))
    if teacher_logp is not None:
        teacher_logp = _floats(teacher_logp, "teacher_logp")
        _demand(teacher_logp.shape == ids.shape, f"teacher_logp has the shape {teacher_logp.shape}; it must have {ids.shape}")
    if os.environ.get("LK_CHECK_TARGETS", "0") not in ("", "0"):
        at = jnp.arange(len(ids))
        used = (at >= offsets[0]) & (at < offsets[-1])
        if fields["use_ignore_index"]:
            used &= targets.ravel()[jnp.searchsorted(offsets, at, side="right") - 1] != ignore_index
        _check_targets("ids", columns, None, ids, used)
    return tuple({**fields, "vocab": vocab}.items()), dict(ids=ids, offsets=offsets, targets=targets, teacher_logp=teacher_logp)


@functools.lru_cache(None)
def _linear_support(options, ranks):
    """The function of both. Without weight x is the logits; backward then has x without columns, and does not read it."""
    options = dict(options)
    vocab, total = options["vocab"], ranks.vocab if ranks else options["vocab"]
    # One call for each element of vmap.
    of_entries = ("weight", "bias", "ids", "offsets", "teacher_logp", "logits", "support_logp", "dsupport_logp", "dweight", "dbias",
                  "dx", "dfull_logits")

    def run(direction, arrays, inputs, outputs):
        """The direction "finish" is forward from the logits of all columns."""
        x, weight, bias, ids, offsets, targets, teacher_logp = arrays
        fields = dict(options, entries=ids.shape[0], target_dtype=int(ids.dtype == jnp.int32),
                      offsets_dtype=int(offsets.dtype == jnp.int32))
        if weight is None:
            fields |= {"tokens": math.prod(x.shape[:-1]), "hidden": 1}
            head = {"full_logits": x} if direction == "forward" else {}
        else:
            head, fields = _head(direction, x, weight, bias, outputs, fields)
        if direction == "finish":
            direction, fields = "forward", {**fields, "vocab": total, "logits_given": 1}
        elif ranks:
            ignored = options["ignore_index"] if options["use_ignore_index"] else None
            ids = _own_first(ranks, ids)
            targets = None if targets is None else _own_first(ranks, targets, ignored)
            fields = {**fields, "vocab_total": total, "ignore_index": -options["use_ignore_index"]}
        return call(f"linear_support_{direction}_{TYPES[x.dtype.name]}",
                    {**head, "ids": ids, "offsets": offsets, "target": targets, "teacher_logp": teacher_logp, **inputs}, outputs,
                    fields, "tokens", of_entries)

    def forward(arrays):
        x, _, _, ids, _, targets, teacher_logp = arrays
        row, each = _of(x.shape[:-1], _f32), _of(ids.shape, _f32)
        outputs = {"logp": None if targets is None else row, "lse": row, "entropy": row,
                   "kl": None if teacher_logp is None else row, "support_logp": each}
        if not ranks:
            return run("forward", arrays, {}, {"logits": each, **outputs})
        parts = run("forward", (*arrays[:-1], None), {}, {"logits": each})["logits"]  # 0 for the ids of other devices
        logits = {"logits": jax.lax.psum(parts, ranks.axis)}
        return {**logits, **run("finish", arrays, logits, outputs)}

    def results(found):
        return {name: a for name, a in found.items() if name != "logits"}

    @jax.custom_vjp
    def f(*arrays):
        return results(forward(arrays))

    def fwd(*primals):
        _constants(teacher_logp=primals[6])
        arrays = _values(*primals)
        found = forward(arrays)
        if arrays[1] is None:
            arrays = [arrays[0][..., :0], *arrays[1:]]
        return results(found), (arrays, found["logits"], _flags(_wanted(dx=primals[0], dweight=primals[1], dbias=primals[2]), _HEAD))

    def bwd(kept, cotangents):
        arrays, logits, flags = kept
        names = dict(logp="dlogp", lse="dlse", entropy="dentropy", kl="dkl", support_logp="dsupport_logp")
        ups = {names[name]: _given(c, ranks) for name, c in cotangents.items()}
        if all(up is None for up in ups.values()):
            return (None,) * 7
        likes = {name: _like(a) for name, a in zip(_HEAD, arrays) if name in _flagged(flags)}
        if arrays[1] is None:
            likes = {"dfull_logits": _of((*arrays[0].shape[:-1], vocab), arrays[0].dtype)}
        made = run("backward", arrays, {"logits": logits, **ups}, likes)
        return made.get("dfull_logits", made.get("dx")), made.get("dweight"), made.get("dbias"), None, None, None, None

    f.defvjp(fwd, bwd, symbolic_zeros=True)
    return f


# ---- linear_topk -------------------------------------------------------------------------------------------------------------


class TopkOutput(NamedTuple):
    """Of linear_topk: logp [..., k], float32; ids [..., k], int32; lse [...], float32, over all columns. They have no gradients."""
    logp: jax.Array
    ids: jax.Array
    lse: jax.Array


@public
def linear_topk(x, weight, k, *, bias=None, seed=None, softcap=0.0, logit_scale=1.0, temperature=None, tf32=False,
                workspace_mib=None, axis_name=None):
    """The k largest logits of each token of a head, or a draw of k ids, with log-probabilities, without storing the logits of all
    tokens: a TopkOutput. For distillation over the student's own ids, and for a sampler. lk/linear_topk.cuh has the formulas.

    x [..., hidden], weight [vocab, hidden], bias [vocab]; weight and bias may be float32 beside 16-bit x, and are rounded to its type.
    k: a Python int, 1 to 64 and at most vocab. ids are rows of weight, the largest logit first; of equal ones the smallest id comes
    first. logp is take_along_axis(log_softmax(logits), ids, -1), of the softmax over all columns. A bias of -inf masks a column: it
    comes after all others, with logp -inf. NaN comes before all numbers; logp of such a token are NaN.

    seed: a threefry key for each token, as jax.random.split(key, tokens) or jax.random.key_data of it, uint32 [..., 2]. Then ids are
    drawn with the probabilities exp(log_softmax(logits)), without replacement and in the order of drawing: ids[..., 0] is a sample of
    the model, and logp its log-probability. A draw follows from its key and the token's logits, not from the batch; with axis_name also from the
    number of devices.

    Gradients through the results are 0. For a gradient, pass the ids to linear_cross_entropy_ids, whose logp are these
    log-probabilities, or to linear_support, which takes the softmax over the k ids alone.
    softcap, logit_scale and temperature are as in linear_cross_entropy; if one of the last two is an array, x is multiplied
    by logit_scale / temperature. tf32 and workspace_mib: as there too.
    axis_name: as in linear_cross_entropy; weight and bias are of this device's columns, k is at most the columns of all, and ids are
    rows of the whole weight. There is one all-gather, of 8k + 4 bytes a token, with seed of 12k + 4. If the number of devices
    does not divide vocab, pad weight with rows whose bias is -inf. With a softcap such columns count: z is -softcap there.
    """
    x, weight = _array(x, "x", 1), _array(weight, "weight", 2)
    weight = _beside(weight, "weight", x.dtype, (weight.shape[0], x.shape[-1]))
    columns, shape = weight.shape[0], x.shape[:-1]
    ranks = _ranks(axis_name, columns)
    vocab = ranks.vocab if ranks else columns
    bias = None if bias is None else _beside(bias, "bias", x.dtype, (columns,))
    k = _number(k, "k", numbers.Integral)
    _demand(1 <= k <= min(64, vocab), f"k is {k}; it must be 1 to {min(64, vocab)}{'' if vocab > 64 else ', the number of columns'}")
    logit_scale, softcap = _tempered(temperature, logit_scale, softcap)
    fields = _loss_fields("none", None, 0.0, 0.0, softcap, logit_scale, False)
    x, bias = _scaled_head(x, bias, logit_scale)
    seed, offset = _keys(seed, shape), None
    if seed is not None and ranks:  # each device has noise of its own
        offset = jnp.stack([jnp.full(shape, jax.lax.axis_index(ranks.axis), jnp.uint32), jnp.zeros(shape, jnp.uint32)], -1)
    *arrays, seed, offset = _placed(ranks, "weight", ("x", "bias", "offset"), x=x, weight=weight, bias=bias, seed=seed, offset=offset)
    head = {n: None if a is None else jax.lax.stop_gradient(a).astype(x.dtype) for n, a in zip(("x", "weight", "bias"), arrays)}
    own = min(k, columns)
    found = call(f"linear_topk_forward_{TYPES[x.dtype.name]}", dict(head, seed=seed, offset=offset),
                 {"ids": _of((*shape, own), jnp.int32), "logp": _of((*shape, own), _f32), "lse": _of(shape, _f32),
                  **({"score": _of((*shape, own), _f32)} if ranks else {})},
                 dict(tokens=math.prod(shape), hidden=x.shape[-1], vocab=columns, k=own, ids_dtype=1, softcap=fields["softcap"],
                      logit_scale=fields["logit_scale"], tf32=_flag(tf32, "tf32"), workspace_bytes=_budget(workspace_mib)),
                 "tokens", ("weight", "bias"))
    return _topk_of_ranks(ranks, k, seed is not None, **found) if ranks else TopkOutput(**found)


def _keys(seed, shape):
    """uint32 [*shape, 2], or None."""
    if seed is None:
        return None
    if isinstance(seed, jax.Array) and jnp.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    _demand(hasattr(seed, "dtype") and seed.dtype == np.uint32, f"seed is {getattr(seed, 'dtype', type(seed).__name__)}; it must be "
            "keys, or their uint32 data", TypeError)
    _demand(seed.shape == (*shape, 2), f"seed has the shape {tuple(seed.shape)}; it must have {(*shape, 2)}: two words for each token, as "
            "the data of threefry's keys")
    return jnp.asarray(seed)


def _topk_of_ranks(ranks, k, draws, ids, logp, lse, score):
    """The k largest of all devices, from those of each. Devices come in the order of their columns, and the sort is stable: of equal
    ones the smallest id stays first. Where all columns of a device are masked its logp are NaN, but its logits -inf. score is z unless
    ids are drawn."""
    own, lse = ids.shape[-1], lse[..., None]
    z = [jnp.where(lse == -jnp.inf, lse, logp + lse)] if draws else []
    words = [*(jax.lax.bitcast_convert_type(a, jnp.int32) for a in (score, *z, lse)), ids + _first_column(ranks)]
    words = jax.lax.all_gather(jnp.concatenate(words, -1), ranks.axis, axis=ids.ndim - 1, to="invarying" if ranks.checked else "varying")
    floats, ids = jax.lax.bitcast_convert_type(words[..., :-own], _f32), words[..., -own:]
    score, z, ids = (a.reshape(*a.shape[:-2], ranks.size * own) for a in (floats[..., :own], floats[..., -own - 1:-1], ids))
    _, _, z, ids = (a[..., :k] for a in jax.lax.sort((~jnp.isnan(score), -score, z, ids), num_keys=2))
    lse = jax.nn.logsumexp(floats[..., -1], -1)
    return TopkOutput(jnp.where(jnp.isfinite(lse)[..., None], z - lse[..., None], jnp.nan), ids, lse)


# ---- md_lrpe_cosine ----------------------------------------------------------------------------------------------------------


def _axes(given, name):
    return tuple(_number(n, name, numbers.Integral) for n in (given if isinstance(given, (tuple, list)) else (given,)))


def _offset(offset, shape):
    """int32 [axes], or None: offsets are operands, so that the position of a decoder makes no new program."""
    if offset is None:
        return None
    if not isinstance(offset, jax.Array):
        offset = np.atleast_1d(offset) if isinstance(offset, np.ndarray) else offset
        offset = list(offset) if isinstance(offset, (tuple, list, np.ndarray)) else [offset]
        if not any(isinstance(n, jax.Array) for n in offset):
            offset = _axes(offset, "offset")
            for i, (first, cells) in enumerate(zip(offset, shape)):
                _demand(-2**31 < first and first + cells <= 2**31,
                        f"offset[{i}] {first} and shape[{i}] {cells} make a position outside (-2^31, 2^31)")
            if not any(offset):
                return None if len(offset) == len(shape) else offset
            return np.asarray(offset, np.int32)
        offset = jnp.stack([jnp.asarray(n).reshape(()) for n in offset])
    _demand(jnp.issubdtype(offset.dtype, jnp.integer), f"offset is {offset.dtype.name}; it must be of whole numbers", TypeError)
    return offset.reshape(-1).astype(jnp.int32)


@public
def md_lrpe_cosine(x, theta, shape, prefix=0, activation=None, *, offset=None, layout="BHTD"):
    """Linearised relative positional encoding in cosine form: act(x) cos(phi) and act(x) sin(phi) along the last dimension.

    x [..., heads, tokens, dim], or with layout="BTHD" [..., tokens, heads, dim]; the result has 2 dim in the last dimension.
    theta [heads, e]: radians per position; e is the number of features of an axis, dim / len(shape) rounded up or more. Heads
    may share a row, features a column: [1, e], [heads, 1] or [1, 1]; so may its gradient.
    shape: of the grid of 1 to 8 axes; tokens = prefix + the product of shape. offset: the position of the grid's first cell. It
    may be an array, also traced: one compiled program then decodes every token.
    activation: None, "relu", "sigmoid", "silu", "softmax" over dim or "softmax_tokens" over tokens.
    """
    x = _array(x, "x", 3)
    shape, prefix = _axes(shape, "shape"), _number(prefix, "prefix", numbers.Integral)
    _demand(1 <= len(shape) <= 8, f"shape is {shape}; it must have 1 to 8 axes")
    offset = _offset(offset, shape)
    _demand(offset is None or len(offset) == len(shape), f"offset is {offset}; it must have as many axes as shape, {len(shape)}")
    _demand(layout in ("BHTD", "BTHD"), f"layout is {layout!r}; it must be 'BHTD' or 'BTHD'")
    heads, tokens = x.shape[-3:-1] if layout == "BHTD" else x.shape[-2:-4:-1]
    grid = prefix + math.prod(shape)
    _demand(tokens == grid, f"x has the shape {x.shape} with {tokens} tokens; prefix and shape ask for {grid}")
    theta = _array(theta, "theta", 2)
    theta = _beside(theta, "theta", x.dtype, (1 if theta.shape[0] == 1 else heads, theta.shape[-1]))
    options = (shape, prefix, _choice(activation, ACTIVATIONS, "activation"), layout)
    return _md_lrpe_cosine(*options)(*same_axes(x, theta, None if offset is None else jnp.asarray(offset)))


@functools.lru_cache(None)
def _md_lrpe_cosine(shape, prefix, activation, layout):
    def run(direction, x, theta, offset, inputs, outputs, like):
        """like: an array or a type with x's shape; x itself is not given where backward does not need it."""
        first, second, dim = like.shape[-3:]
        heads, tokens = (first, second) if layout == "BHTD" else (second, first)
        fields = dict(batch=math.prod(like.shape[:-3]), heads=heads, dim=dim, prefix=prefix, axes=len(shape),
                      e=-(-dim // len(shape)) if theta.shape[1] == 1 else theta.shape[1], theta_heads=theta.shape[0],
                      theta_features=theta.shape[1], activation=activation, theta_dtype=_dtype_field(theta, like.dtype),
                      **{f"shape{i}": n for i, n in enumerate(shape)})
        if layout == "BTHD":
            for name in {"x", "y"} if direction == "forward" else {"x", "dy", "dx"}:
                row = dim * (2 if name in ("y", "dy") else 1)
                fields.update({f"{name}_batch_stride": tokens * heads * row, f"{name}_head_stride": row,
                               f"{name}_token_stride": heads * row})
        return call(f"md_lrpe_cosine_{direction}_{TYPES[like.dtype.name]}",
                    {"x": x, "theta": theta, "offset_device": offset, **inputs}, outputs, fields, "batch",
                    ("theta", "offset_device", "dtheta"))

    def forward(x, theta, offset):
        return run("forward", x, theta, offset, {}, {"y": _of((*x.shape[:-1], 2 * x.shape[-1]), x.dtype)}, x)["y"]

    f = jax.custom_vjp(forward)

    def fwd(x, theta, offset):
        wanted = _wanted(dx=x, dtheta=theta)
        x, theta, offset = _values(x, theta, offset)
        return forward(x, theta, offset), (x, theta, offset, _flags(wanted, ("dx", "dtheta")))

    def bwd(kept, dy):
        x, theta, offset, flags = kept
        wanted = _flagged(flags)
        if _given(dy) is None:
            return None, None, None
        like = _of((*dy.shape[:-1], dy.shape[-1] // 2), dy.dtype)
        likes = {"dx": like, "dtheta": _of(theta.shape, _f32)}
        x = x if activation or "dtheta" in wanted else None
        made = run("backward", x, theta, offset, {"dy": dy}, {name: likes[name] for name in wanted}, like)
        return made.get("dx"), made["dtheta"].astype(theta.dtype) if "dtheta" in made else None, None

    f.defvjp(fwd, bwd, symbolic_zeros=True)
    return f


# ---- rms_norm ----------------------------------------------------------------------------------------------------------------


@public
def rms_norm(x, weight=None, eps=1e-6, *, bias=None, weight_offset=0.0, out_dtype=None, scaling="row", scale=None,
             power_of_two=False, scale_rounding="up", amax=False, transposed=False, gate=None, gate_first=False,
             batch_invariant=False):
    """x / sqrt(mean(x^2) + eps) * (weight_offset + weight) + bias over the last axis. Without weight the factor is 1.

    gate, of x's shape and type: rms_norm(x) * silu(gate), or with gate_first=True rms_norm(x * silu(gate)), in one call: the gated norms
    of Mamba-2 (whose norm_before_gate is not gate_first), of Gated DeltaNet, of Qwen3-Next. There is no bias and no out_dtype then.

    batch_invariant=True: each row's results have the same bits for any number of rows, if rows lie alike modulo 16 bytes; few long
    rows take longer. Gradients have no such promise. Not with out_dtype.

    weight and bias [cols] are of one type, x's or float32. They may have more of x's last axes: a weight [heads, cols] is one
    for each head of x [..., heads, cols]. weight_offset is 1 in Gemma; it may be traced, and has a gradient then.

    out_dtype: jnp.float8_e4m3fn or jnp.float8_e5m2. Then the result is (y, scale), and y * scale is nearly the norm; from one
    reading of x. lk/srms_norm_fp8.md says how exact. scaling:
      "tensor"    one number, the argument scale (float32; None is 1), which is known from earlier steps. amax=True: the largest
                  |y| of this call comes behind scale
      "row"       float32 [..., 1]
      "block128"  float32 [..., cols / 128], one for each 128 columns
      "mx"        float8_e8m0fnu [..., cols / 32]
    power_of_two: scales are powers of two, as those of "mx" always are. scale_rounding: "up" is the least one with which no y
    saturates (torchao's RCEIL), "floor" 2^(floor(log2 max |y|) - 8), of E5M2 - 15, with which the largest may (OCP's rule,
    torchao's FLOOR). An infinity or a NaN makes its scale NaN, and all y that have it.
    transposed=True: (y.T, its scale) come behind these, for the product that is the weight's gradient: y.T is [cols, rows], with
    scales along its rows; not with "row".
    JAX rounds a gradient of y to y's type, so y has none. Write the product as a custom_vjp of x and weight, and take the norm's
    gradient, straight through the rounding, by jax.vjp(lk_jax.rms_norm, x, weight)[1](dy): XLA drops its forward call.
    """
    x, invariant = _array(x, "x", 1), _invariant(batch_invariant, out_dtype)
    if gate is not None:
        _demand(bias is None and out_dtype is None, "bias or out_dtype is given; with gate there is neither")
        gate = _array(gate, "gate")
        _demand(gate.dtype == x.dtype, f"gate is {gate.dtype.name}; it must be {x.dtype.name}, as x is", TypeError)
        _demand(gate.shape == x.shape, f"gate has the shape {gate.shape}; it must have {x.shape}")
        return _norm(x, None, weight, None, eps, weight_offset, invariant, gate, _flag(gate_first, "gate_first"))[0]
    _demand(not gate_first, "gate_first is given without gate")
    if out_dtype is not None:
        _demand(bias is None, "bias is given; with out_dtype there is none")
        return _norm_fp8(x, None, weight, eps, weight_offset, out_dtype, scaling, scale, power_of_two, scale_rounding, amax,
                         transposed)
    return _norm(x, None, weight, bias, eps, weight_offset, invariant)[0]


@public
def add_rms_norm(x, residual, weight=None, eps=1e-6, *, bias=None, weight_offset=0.0, out_dtype=None, scaling="row", scale=None,
                 power_of_two=False, scale_rounding="up", amax=False, transposed=False, batch_invariant=False, round_sum=False):
    """s = x + residual; returns rms_norm(s), of x's type, and s, of residual's type: x's or float32. With out_dtype s comes last,
    behind what rms_norm returns, and has no gradient either.

    The norm is that of the float32 sum. With round_sum=True it is that of s as it is returned, rounded to residual's type, as
    where the sum is an operation of its own."""
    x, invariant = _array(x, "x", 1), _invariant(batch_invariant, out_dtype)
    rounds = _flag(round_sum, "round_sum")
    residual = _beside(residual, "residual", x.dtype, x.shape)
    if out_dtype is not None:
        _demand(bias is None, "bias is given; with out_dtype there is none")
        return _norm_fp8(x, residual, weight, eps, weight_offset, out_dtype, scaling, scale, power_of_two, scale_rounding, amax,
                         transposed, rounds)
    return _norm(x, residual, weight, bias, eps, weight_offset, invariant, round_sum=rounds)


def _invariant(batch_invariant, out_dtype):
    """The field of a norm."""
    _demand(not _flag(batch_invariant, "batch_invariant") or out_dtype is None,
            "batch_invariant is given; with out_dtype there is none")
    return int(batch_invariant)


def _norm_fp8(x, residual, weight, eps, weight_offset, out_dtype, scaling, scale, power_of_two, scale_rounding, amax, transposed,
              round_sum=0):
    formats = {jnp.dtype(t): i for i, t in enumerate((jnp.float8_e4m3fn, jnp.float8_e5m2))}
    _demand(jnp.dtype(out_dtype) in formats, f"out_dtype is {jnp.dtype(out_dtype).name}; it must be float8_e4m3fn or float8_e5m2")
    number, rounding = _choice(scaling, SCALINGS, "scaling"), _choice(scale_rounding, SCALE_ROUNDINGS, "scale_rounding")
    _demand(number == 0 or scale is None and not amax, f"scale and amax belong to scaling 'tensor', and scaling is {scaling!r}")
    _demand(not rounding or number == 3 or number and power_of_two, "scale_rounding belongs to scales that are powers of two: those "
            "of 'mx', and with power_of_two those of 'row' and 'block128'")
    _demand(not (transposed and number == 1),
            "scales of rows are no scales of the transposed copy's rows; scaling must not be 'row'")
    if weight is not None:
        weight = _beside(weight, "weight", x.dtype, x.shape[-1:])
    weight, weight_offset = _with_offset(weight, weight_offset)
    if scale is not None:
        scale = _factor(scale, "scale")
    weight_offset, out_dtype = _number(weight_offset, "weight_offset") if weight is not None else 0.0, jnp.dtype(out_dtype)
    options = (_number(eps, "eps"), weight_offset, out_dtype.name, formats[out_dtype], number, bool(power_of_two), rounding,
               bool(amax), bool(transposed), round_sum)
    found = dict(_rms_norm_fp8(*options)(*same_axes(x, residual, weight, scale)))
    if number == 0:
        found["scale"] = jnp.ones((), _f32) if scale is None else scale
        found["transposed_scale"] = found["scale"] if transposed else None
    names = ("q", "scale", "amax", "q_transposed", "transposed_scale", "residual_out")
    return tuple(found[name] for name in names if found.get(name) is not None)


@functools.lru_cache(None)
def _rms_norm_fp8(eps, weight_offset, dtype, format, scaling, power_of_two, scale_rounding, amax, transposed, round_sum):
    def scales(rows, cols):
        per, kind = (32, jnp.float8_e8m0fnu) if scaling == 3 else (128 if scaling == 2 else cols, _f32)
        return _of((*rows, -(-cols // max(per, 1))), kind) if scaling else None

    @jax.custom_vjp
    def f(x, residual, weight, scale):
        cols, rows = x.shape[-1], math.prod(x.shape[:-1])
        fields = dict(rows=rows, cols=cols, eps=eps, weight_offset=weight_offset, residual_dtype=_dtype_field(residual, x.dtype),
                      weight_dtype=_dtype_field(weight, x.dtype), scaling=scaling, format=format, power_of_two=int(power_of_two),
                      scale_rounding=scale_rounding, round_sum=round_sum)
        start = jnp.zeros((), _f32) if amax else None  # lk raises it, in its own memory
        outputs = {"q": _of(x.shape, dtype), "scale": scales(x.shape[:-1], cols), "amax": _like(start),
                   "q_transposed": _of((cols, rows), dtype) if transposed else None,
                   "transposed_scale": scales((cols,), rows) if transposed else None, "residual_out": _like(residual)}
        return call(f"srms_norm_fp8_forward_{TYPES[x.dtype.name]}",
                    {"weight": weight, "x": x, "residual": residual, "tensor_scale": scale, "amax": start}, outputs, fields, "rows",
                    ("weight", "tensor_scale", "amax", "q_transposed", "transposed_scale"), [("amax", "amax")] if amax else ())

    def fwd(x, residual, weight, scale):
        perturbed = _wanted(x=x, residual=residual, weight=weight, scale=scale)
        _demand(not perturbed, f"{' and '.join(perturbed)} would need a gradient through 8 bits; lk_jax.rms_norm says how",
                TypeError)
        return f(*_values(x, residual, weight, scale)), None

    f.defvjp(fwd, lambda kept, cotangents: (None, None, None, None), symbolic_zeros=True)
    return f


def _with_offset(weight, weight_offset):
    """The two of a norm; an offset that is an operand is added here."""
    if not _operand(weight_offset):
        return weight, weight_offset
    weight_offset = _factor(weight_offset, "weight_offset")
    return None if weight is None else weight.astype(_f32) + weight_offset, 0.0


def srms_norm(x, eps=1e-6):
    """rms_norm without weight: each row gets the length sqrt(cols)."""
    return rms_norm(x, None, eps)


def _norm(x, residual, weight, bias, eps, weight_offset, batch_invariant=0, gate=None, gate_first=0, round_sum=0):
    eps, ends = _number(eps, "eps"), [x.shape[i:] for i in range(x.ndim)]
    given = {name: _array(a, name, 1) for name, a in (("weight", weight), ("bias", bias)) if a is not None}
    for name, a in given.items():
        _beside(a, name, x.dtype, a.shape if a.shape in ends else x.shape[-1:])
    _demand(len({a.shape for a in given.values()}) < 2, f"weight and bias have the shapes {[a.shape for a in given.values()]}; "
            "they must have one")
    weight, bias = given.get("weight"), given.get("bias")
    if _operand(weight_offset):
        weight, weight_offset = _with_offset(weight, weight_offset)
        bias = None if bias is None else bias.astype(_f32)
    _demand(len({a.dtype for a in given.values()}) < 2, f"weight is {getattr(weight, 'dtype', '')} and bias "
            f"{getattr(bias, 'dtype', '')}; they must have one type", TypeError)
    weight_offset = _number(weight_offset, "weight_offset") if weight is not None else 0.0
    if gate is not None:
        return (_rms_norm_gated(eps, weight_offset, batch_invariant, gate_first)(*same_axes(x, gate, weight)),)
    return _rms_norm(eps, weight_offset, batch_invariant, round_sum)(*same_axes(x, residual, weight, bias))


@functools.lru_cache(None)
def _rms_norm_gated(eps, weight_offset, batch_invariant, gate_first):
    def run(direction, x, weight, inputs, outputs):
        groups = 0 if weight is None else math.prod(weight.shape[:-1])
        fields = dict(rows=math.prod(x.shape[:-1]), cols=x.shape[-1], groups=0 if groups == 1 else groups, eps=eps,
                      weight_offset=weight_offset, batch_invariant=batch_invariant, gate_first=gate_first,
                      weight_dtype=_dtype_field(weight, x.dtype), dweight_dtype=_dtype_field(weight, x.dtype))
        return call(f"srms_norm_gated_{direction}_{TYPES[x.dtype.name]}", {"weight": weight, "x": x, **inputs}, outputs, fields,
                    "rows", ("weight", "dweight"))

    @jax.custom_vjp
    def f(x, gate, weight):
        return run("forward", x, weight, {"gate": gate}, {"y": _like(x)})["y"]

    def fwd(x, gate, weight):
        wanted = _wanted(dx=x, dgate=gate, dweight=weight)
        x, gate, weight = _values(x, gate, weight)
        return f(x, gate, weight), (x, gate, weight, _flags(wanted, ("dx", "dgate", "dweight")))

    def bwd(kept, dy):  # rstd is not saved, as above
        x, gate, weight, flags = kept
        wanted = _flagged(flags)
        if _given(dy) is None or not wanted:
            return None, None, None
        outputs = {name: _like(a) for name, a in (("dx", x), ("dgate", gate), ("dweight", weight)) if name in wanted}
        made = run("backward", x, weight, {"gate": gate, "dy": dy}, outputs)
        return made.get("dx"), made.get("dgate"), made.get("dweight")

    f.defvjp(fwd, bwd, symbolic_zeros=True)
    return f


@functools.lru_cache(None)
def _rms_norm(eps, weight_offset, batch_invariant, round_sum):
    def run(direction, dtype, shape, residual, weight, bias, inputs, outputs):
        like = weight if bias is None else bias
        groups = 0 if like is None else math.prod(like.shape[:-1])
        fields = dict(rows=math.prod(shape[:-1]), cols=shape[-1], groups=0 if groups == 1 else groups, eps=eps,
                      weight_offset=weight_offset, residual_dtype=_dtype_field(residual, dtype),
                      weight_dtype=_dtype_field(like, dtype), dweight_dtype=_dtype_field(like, dtype),
                      batch_invariant=batch_invariant, round_sum=round_sum)
        return call(f"srms_norm_{direction}_{TYPES[jnp.dtype(dtype).name]}", {"weight": weight, **inputs}, outputs, fields,
                    "rows", ("weight", "bias", "dweight", "dbias"))

    @jax.custom_vjp
    def f(x, residual, weight, bias):
        found = run("forward", x.dtype, x.shape, residual, weight, bias, {"bias": bias, "x": x, "residual": residual},
                    {"y": _like(x), "residual_out": _like(residual)})
        return found["y"], found.get("residual_out")

    def fwd(x, residual, weight, bias):
        wanted = _wanted(dx=x, dresidual=residual, dweight=weight, dbias=bias)
        x, residual, weight, bias = _values(x, residual, weight, bias)
        y, s = f(x, residual, weight, bias)
        return (y, s), (x if s is None else None, s, weight, bias, _flags(wanted, ("dx", "dresidual", "dweight", "dbias")))

    def bwd(kept, cotangents):
        # rstd is not saved: backward finds it in the pass that it makes anyway, and a forward call whose y nobody reads goes.
        x, s, weight, bias, flags = kept
        wanted = _flagged(flags)
        dy, ds = cotangents[0], None if s is None else _given(cotangents[1])
        if _given(dy) is None:  # y is not used; s is the sum of x and residual
            return (None if ds is None or "dx" not in wanted else ds.astype(dy.dtype),
                    None if "dresidual" not in wanted else ds, None, None)
        two = s is not None and s.dtype != dy.dtype  # else dx and dresidual are the same array
        outputs = {"dx": _like(dy) if "dx" in wanted or ("dresidual" in wanted and not two) else None,
                   "dresidual": _like(s) if "dresidual" in wanted and two else None,
                   "dweight": _like(weight) if "dweight" in wanted else None,
                   "dbias": _like(bias) if "dbias" in wanted else None}
        made = run("backward", dy.dtype, dy.shape, s, weight, bias,
                   {"x": x, "residual_out": s, "dy": dy, "dresidual_out": ds}, outputs)
        return (made["dx"] if "dx" in wanted else None, made["dresidual" if two else "dx"] if "dresidual" in wanted else None,
                made.get("dweight"), made.get("dbias"))

    f.defvjp(fwd, bwd, symbolic_zeros=True)
    return f


# ---- glu ---------------------------------------------------------------------------------------------------------------------


@public
def glu(gate, up=None, activation="silu", *, alpha=1.0, limit=None, up_offset=0.0, row_weight=None, interleaved=False):
    """row_weight * act(gate) * (up + up_offset), a gated linear unit: SwiGLU, GeGLU, ReGLU, and others. The result has gate's
    type, and is rounded once. Backward computes act(gate) again; gate, up and row_weight alone are kept for it.

    gate and up have one shape, [..., n], and one type. Without up, gate is [..., 2 n] and has both: the first half is the gate
    and the second half up, or with interleaved=True the even columns and the odd ones. The result is [..., n]. Give one array
    with both where one product makes both: XLA copies slices of it. Its gradient is one array.

    activation: "silu" is gate * sigmoid(alpha * gate); no other one has alpha. "gelu" is jax.nn.gelu with approximate=False,
    "gelu_tanh" with approximate=True. The others are "relu" and "sigmoid". limit: gate is at most limit, and up is at most
    limit in size; gradients are 0 beyond it. gpt-oss has alpha=1.702, limit=7.0, up_offset=1.0 and interleaved=True. These
    numbers are part of the compiled program.

    row_weight [...] is a factor of each row: the weight of an expert for a token, say; float32, with a gradient in its own
    type. It may be a mask of bool.

    JAX's own takes the gate from the second half: jax.nn.glu(x) is glu(x[..., n:], x[..., :n], "sigmoid").
    """
    gate = _array(gate, "gate", 1)
    turns = _flag(interleaved, "interleaved")
    if up is not None:
        _demand(not turns, "up is given; with interleaved gate has both, and up must be None")
        up = _alike(up, "up", gate.dtype, gate.shape, "gate")
    else:
        _demand(gate.shape[-1] % 2 == 0, f"gate has the shape {gate.shape}; without up it has both in its last dimension, "
                "whose size must be even")
    number, alpha = _choice(activation, GATES, "activation"), _number(alpha, "alpha")
    _demand(number == 0 or alpha == 1, f"alpha is {alpha}; it is for activation 'silu', and activation is {activation!r}")
    _demand(np.float32(alpha) != 0, "alpha is 0; it must be another finite number")
    limit = None if limit is None else _number(limit, "limit")
    _demand(limit is None or np.float32(limit) > 0, f"limit is {limit}; it must be above 0, or None")
    fields = dict(activation=number, interleaved=turns, alpha=0.0 if alpha == 1 else alpha, limit=limit or 0.0,
                  up_offset=_number(up_offset, "up_offset"))
    row_weight = _row_weight(row_weight, gate.shape[:-1])
    return _glu(tuple(fields.items()))(*same_axes(gate, up, row_weight))


@functools.lru_cache(None)
def _glu(fields):
    def run(direction, gate, up, row_weight, inputs, outputs):
        cols = gate.shape[-1] // (2 if up is None else 1)
        return call(f"glu_{direction}_{TYPES[gate.dtype.name]}", {"gate": gate, "up": up, "row_weight": row_weight, **inputs},
                    outputs, dict(fields, rows=math.prod(gate.shape[:-1]), cols=cols), "rows")

    @jax.custom_vjp
    def f(gate, up, row_weight):
        y = _of((*gate.shape[:-1], gate.shape[-1] // (2 if up is None else 1)), gate.dtype)
        return run("forward", gate, up, row_weight, {}, {"y": y})["y"]

    def fwd(gate, up, row_weight):
        wanted = _wanted(dgate=gate, dup=up, drow_weight=row_weight)
        arrays = _values(gate, up, row_weight)
        return f(*arrays), (arrays, _flags(wanted, ("dgate", "dup", "drow_weight")))

    def bwd(kept, dy):
        arrays, flags = kept
        if _given(dy) is None:
            return None, None, None
        names, wanted = ("dgate", "dup", "drow_weight"), _flagged(flags)
        outputs = {name: _like(a) if name in wanted else None for name, a in zip(names, arrays)}
        made = run("backward", *arrays, {"dy": dy}, outputs)
        return tuple(map(made.get, names))

    f.defvjp(fwd, bwd, symbolic_zeros=True)
    return f


# ---- rope --------------------------------------------------------------------------------------------------------------------


@public
def rope(q, k=None, *, inv_freq=None, position=None, cos=None, sin=None, rotary_dim=None, interleaved=False, heads_first=False,
         offset=0, scale=1.0, pair_axis=None, q_weight=None, k_weight=None, eps=1e-6, weight_offset=0.0):
    """Rotary position embedding of q, or of q and k in one launch: y_q, or (y_q, y_k). With q_weight or k_weight, each head of
    q or of k gets an RMS norm first (QK norm). All is computed in float32, and a result is rounded once.

    q is [batch, tokens, heads, dim] or [tokens, heads, dim]; with heads_first=True [batch, heads, tokens, dim] or
    [heads, tokens, dim]. k may have another number of heads.

    The pairs of a head are (x[j], x[j + rotary_dim / 2]), or with interleaved=True (x[2 j], x[2 j + 1]). rotary_dim=None is
    dim; features from rotary_dim on are not rotated. A pair is rotated by its angle, and multiplied by scale, YaRN's attention
    factor. The angles are those of inv_freq, or of cos and sin:
      inv_freq    position * inv_freq radians, as exact at large positions as at small ones. inv_freq is float32
                  [rotary_dim / 2]. position is int32 or int64 [tokens], [batch, tokens] or [axes, batch, tokens]; None is
                  offset, offset + 1, ... offset may be an array, also traced: one compiled program then decodes every token.
                  With several axes pair_axis, int32 [rotary_dim / 2], says which of them a pair has
      cos, sin    tables of the tokens, [tokens, w] or [batch or 1, tokens, w], in q's type or float32. w is rotary_dim / 2, or
                  rotary_dim: then each number stands twice, in both halves, or side by side if interleaved

    q_weight and k_weight are [dim], of one type, q's or float32; the factor is weight_offset + weight, and Gemma's
    weight_offset is 1; it may be traced, and has a gradient then. dim is at most 256 with a norm; eps is the norm's. Backward
    keeps q and k where they have a norm, and computes the norm again; else it keeps the angles alone. The angles have no
    gradients; scale and eps are part of the compiled program.
    """
    q = _array(q, "q")
    first = _flag(heads_first, "heads_first")
    kind = "heads, tokens, dim]" if first else "tokens, heads, dim]"
    _demand(q.ndim in (3, 4), f"q has the shape {q.shape}; it must be [batch, {kind} or [{kind}")
    batch, tokens, dim = math.prod(q.shape[:-3]), q.shape[-2 if first else -3], q.shape[-1]
    if k is not None:
        k = _array(k, "k")
        _demand(k.dtype == q.dtype, f"k is {k.dtype.name}; it must be {q.dtype.name}, as q is", TypeError)
        at = k.ndim - (3 if first else 2)
        _demand(k.ndim == q.ndim and (*k.shape[:at], *k.shape[at + 1:]) == (*q.shape[:at], *q.shape[at + 1:]),
                f"k has the shape {k.shape}, and q {q.shape}; they may differ in heads alone")
    rotary = dim if rotary_dim is None else _number(rotary_dim, "rotary_dim", numbers.Integral)
    _demand(0 < rotary <= dim and rotary % 2 == 0,
            f"rotary_dim is {rotary}; it must be even, above 0, and at most dim, which is {dim}")
    _demand(cos is None or sin is not None, "cos is given without sin")
    _demand(sin is None or cos is not None, "sin is given without cos")
    _demand(inv_freq is not None or cos is not None, "inv_freq is needed, or cos and sin")
    _demand(inv_freq is None or cos is None, "inv_freq is given, and so are cos and sin; give one of both")
    _demand(position is None or inv_freq is not None, "position is for inv_freq; cos and sin are those of the tokens already")
    moved = isinstance(offset, jax.Array)
    if not moved:
        offset = _number(offset, "offset", numbers.Integral)
    _demand((not moved and offset == 0) or (inv_freq is not None and position is None),
            f"offset is {offset}; it is for inv_freq without position")
    fields = dict(rotary=rotary, interleaved=_flag(interleaved, "interleaved"), scale=_number(scale, "scale"),
                  eps=_number(eps, "eps"))
    _demand(np.float32(fields["scale"]) != 0, "scale is 0; it must be another finite number")
    if moved:  # an operand: positions are computed on the device
        whole = jnp.issubdtype(offset.dtype, jnp.integer)
        _demand(whole, f"offset is {offset.dtype.name}; it must be a whole number", TypeError)
        _demand(offset.shape == (), f"offset has the shape {offset.shape}; it must be one number")
        position, offset = offset.astype(jnp.int32) + jnp.arange(tokens, dtype=jnp.int32), 0
    fields["offset"] = offset
    if inv_freq is not None:
        inv_freq = _read(inv_freq, "inv_freq")
        _demand(inv_freq.dtype == _f32, f"inv_freq is {inv_freq.dtype.name}; it must be float32", TypeError)
        _demand(inv_freq.shape == (rotary // 2,),
                f"inv_freq has the shape {inv_freq.shape}; with rotary_dim {rotary} it must have {(rotary // 2,)}")
    if position is not None:
        position = _read(position, "position")
        _demand(position.dtype in (jnp.int32, jnp.int64), f"position is {position.dtype.name}; it must be int32 or int64",
                TypeError)
        many = position.shape[-2] if position.ndim > 1 else 1
        _demand(1 <= position.ndim <= 3 and position.shape[-1] == tokens and many in (1, batch),
                f"position has the shape {position.shape}; it must be [{tokens}], [{batch} or 1, {tokens}] or "
                f"[axes, {batch} or 1, {tokens}]")
        # Of one batch they are its own: vmap over them makes one call.
        fields.update(position_dtype=int(position.dtype == jnp.int32), shared_positions=int(many == 1 and batch != 1))
        if position.ndim == 3:
            fields["axes"] = position.shape[0]
            _demand(1 <= position.shape[0] <= 8, f"position has {position.shape[0]} axes; it must have 1 to 8")
    axes = fields.get("axes", 0)
    _demand(axes < 2 or pair_axis is not None, f"position has {axes} axes, so pair_axis is needed")
    if pair_axis is not None:
        pair_axis = _read(pair_axis, "pair_axis")
        _demand(axes, "pair_axis is for a position of [axes, batch, tokens]")
        _demand(pair_axis.dtype == jnp.int32, f"pair_axis is {pair_axis.dtype.name}; it must be int32", TypeError)
        _demand(pair_axis.shape == (rotary // 2,),
                f"pair_axis has the shape {pair_axis.shape}; with rotary_dim {rotary} it must have {(rotary // 2,)}")
    if cos is not None:
        cos, sin = _array(cos, "cos"), _array(sin, "sin")
        many = cos.shape[0] if cos.ndim == 3 else 1
        fits = cos.ndim in (2, 3) and cos.shape[-2] == tokens and cos.shape[-1] in (rotary // 2, rotary)
        _demand(fits and many in (1, batch),
                f"cos has the shape {cos.shape}; it must be [{tokens}, {rotary // 2} or {rotary}] or [{batch} or 1, {tokens}, "
                f"{rotary // 2} or {rotary}]")
        _beside(cos, "cos", q.dtype, cos.shape)
        _demand(sin.shape == cos.shape, f"sin has the shape {sin.shape}; it must have {cos.shape}, as cos has")
        _demand(sin.dtype == cos.dtype, f"sin is {sin.dtype.name}; it must be {cos.dtype.name}, as cos is", TypeError)
        fields.update(table_dtype=_dtype_field(cos, q.dtype), shared_positions=int(many == 1), table_stride1=cos.shape[-1],
                      table_step=2 if fields["interleaved"] and cos.shape[-1] == rotary else 1)
    _demand(k_weight is None or k is not None, "k_weight is given without k")
    q_weight, k_weight = (None if w is None else _beside(w, name, q.dtype, (dim,))
                          for name, w in (("q_weight", q_weight), ("k_weight", k_weight)))
    if _operand(weight_offset):
        (q_weight, _), (k_weight, _) = (_with_offset(w, weight_offset) for w in (q_weight, k_weight))
        weight_offset = 0.0
    _demand(q_weight is None or k_weight is None or q_weight.dtype == k_weight.dtype,
            f"k_weight is {getattr(k_weight, 'dtype', '')}; it must be {getattr(q_weight, 'dtype', '')}, as q_weight is",
            TypeError)
    fields["weight_offset"] = _number(weight_offset, "weight_offset")
    angles = dict(inv_freq=inv_freq, position=position, cos=cos, sin=sin, pair_axis=pair_axis)
    names = tuple(name for name, a in angles.items() if a is not None)
    arrays = same_axes(q, k, q_weight, k_weight, *(angles[name] for name in names))
    out = _rope(names, first, tuple(fields.items()))(*arrays)
    return out[0] if k is None else out


@functools.lru_cache(None)
def _rope(names, heads_first, fields):
    """names: of the angles, which come behind q, k and both weights."""
    sides, ups_of = ("q", "k"), ("dq_out", "dk_out")

    def run(direction, arrays, inputs, outputs):
        """arrays: of q and k, of which a side that takes no part is None, of both weights and of the angles."""
        like = next(a for a in arrays[:2] if a is not None)
        weights = {f"{name}_weight": None if a is None else w for name, a, w in zip(sides, arrays[:2], arrays[2:4])}
        angles = dict(zip(names, arrays[4:]))
        token, head = (-2, -3) if heads_first else (-3, -2)
        more = dict(fields, batch=math.prod(like.shape[:-3]), tokens=like.shape[token], dim=like.shape[-1])
        for name, count, a in zip(sides, ("q_heads", "k_heads"), arrays):
            if a is None:
                continue
            more[count] = heads = a.shape[head]
            if not heads_first:
                continue
            strides = heads * a.shape[token] * a.shape[-1], a.shape[-1], a.shape[token] * a.shape[-1]
            for given in (name, f"{name}_out") if direction == "forward" else (name, f"d{name}_out", f"d{name}"):
                more |= {f"{given}_stride{i}": n for i, n in enumerate(strides)}
        weight = next((w for w in weights.values() if w is not None), None)
        more["weight_dtype"] = _dtype_field(weight, like.dtype)
        if weight is None:
            more["weight_offset"] = 0.0
        shared = {"inv_freq", "pair_axis", "q_weight", "k_weight", "dq_weight", "dk_weight"}
        shared |= {"position", "cos", "sin"} if more.get("shared_positions") else set()
        behind = ("position",) if more.get("axes") and not more["shared_positions"] else ()
        return call(f"rope_{direction}_{TYPES[like.dtype.name]}", {**inputs, **angles, **weights}, outputs, more, "batch",
                    shared, behind=behind)

    @jax.custom_vjp
    def f(*arrays):
        q, k = arrays[:2]
        if not q.size and (k is None or not k.size):
            return q, k
        made = run("forward", arrays, {"q": q, "k": k}, {"q_out": _like(q), "k_out": _like(k)})
        return made["q_out"], made.get("k_out")

    def fwd(*primals):
        wanted = _wanted(**dict(zip(_ROPE, primals)))
        _constants(**dict(zip(names, primals[4:])))
        arrays = _values(*primals)
        kept = [a if w is not None else None for a, w in zip(arrays, arrays[2:4])]  # without a norm backward needs no q or k
        return f(*arrays), (kept, arrays[2:], _flags(wanted, _ROPE))

    def bwd(saved, cotangents):
        kept, rest, flags = saved
        wanted, none = _flagged(flags), (None,) * len(names)
        ups = [None if dy is None else _given(dy) for dy in cotangents]
        ups = [dy if f"d{name}" in wanted or f"d{name}_weight" in wanted else None for name, dy in zip(sides, ups)]
        made, given = {}, [dy for dy in ups if dy is not None]
        there = [name for name, dy in zip(sides, ups) if dy is not None]
        likes = {name: like for name, like in zip(_ROPE, (*ups, *rest[:2])) if name in wanted and name[1] in there}
        if any(dy.size for dy in given):
            inputs = {name: a if dy is not None else None for name, a, dy in zip(sides, kept, ups)}
            made = run("backward", (*ups, *rest), {**inputs, **dict(zip(ups_of, ups))}, {n: _like(a) for n, a in likes.items()})
        elif given:
            made = {name: jnp.zeros_like(a) for name, a in likes.items()}
        return (*map(made.get, _ROPE), *none)

    f.defvjp(fwd, bwd, symbolic_zeros=True)
    return f


_ROPE = ("dq", "dk", "dq_weight", "dk_weight")
