# SPDX-License-Identifier: MIT
"""lk's ops as functions. Where PyTorch has the function, its arguments come first, with its names and defaults."""
import math
import operator
import os
import sys
from typing import NamedTuple

import torch
from torch import Tensor
from torch.compiler import is_compiling

from . import _C

# Set: a target outside of the classes raises, in eager mode. Each loss then waits for the device.
CHECK_TARGETS = os.environ.get("LK_CHECK_TARGETS") == "1"

_ops = getattr(torch.ops, _C.NAMESPACE)  # lk; a kernel of packages/hub has another
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
_TYPES = (torch.float32, torch.float16, torch.bfloat16)
_DIVERGENCES = {"forward": 0, "reverse": 1, "jensen_shannon": 2, "total_variation": 3}
_FP8 = {torch.float8_e4m3fn: False, torch.float8_e5m2: True}
_SCALINGS = {"tensor": 0, "row": 1, "block128": 2, "mx": 3}
_SCALE_ROUNDINGS = {"up": 0, "floor": 1}
_ACTIVATIONS = {None: 0, "none": 0, "relu": 1, "sigmoid": 2, "silu": 3, "softmax": 4, "softmax_tokens": 5}
_GATES = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "sigmoid": 4}


class CrossEntropyOutput(NamedTuple):
    """Of cross_entropy_stats. loss, lse and entropy have gradients, the others have none. argmax of an ignored row is -1."""
    loss: torch.Tensor
    lse: torch.Tensor
    z_loss: torch.Tensor
    entropy: torch.Tensor
    argmax: torch.Tensor


class CrossEntropyStatisticsOutput(NamedTuple):
    """Of cross_entropy_stats with statistics=True: log sum_j p_j^2, the mean of the logits after logit_scale and softcap, and the
    log-probability of argmax. These three have no gradients, and are 0 where a row is ignored."""
    loss: torch.Tensor
    lse: torch.Tensor
    z_loss: torch.Tensor
    entropy: torch.Tensor
    argmax: torch.Tensor
    log_sum_sq_probs: torch.Tensor
    mean_logits: torch.Tensor
    top_logprob: torch.Tensor


class CrossEntropyIdsOutput(NamedTuple):
    """Of cross_entropy_ids and linear_cross_entropy_ids. Both have gradients."""
    loss: torch.Tensor
    logp: torch.Tensor


class CrossEntropyIdsTailOutput(NamedTuple):
    """The same with a tail, the log of the probability that no id of the row has. It has a gradient too."""
    loss: torch.Tensor
    logp: torch.Tensor
    tail: torch.Tensor


class LinearCrossEntropyOutput(NamedTuple):
    """Of linear_cross_entropy_stats, likewise."""
    loss: torch.Tensor
    lse: torch.Tensor
    entropy: torch.Tensor
    argmax: torch.Tensor


class LinearCrossEntropyStatisticsOutput(NamedTuple):
    """The same of linear_cross_entropy_stats."""
    loss: torch.Tensor
    lse: torch.Tensor
    entropy: torch.Tensor
    argmax: torch.Tensor
    log_sum_sq_probs: torch.Tensor
    mean_logits: torch.Tensor
    top_logprob: torch.Tensor


class SupportOutput(NamedTuple):
    """Of linear_support and support: logp, lse, entropy and kl [...], support_logp [entries]. All have gradients. logp is None without
    target, kl without teacher_logp."""
    logp: torch.Tensor
    lse: torch.Tensor
    entropy: torch.Tensor
    kl: torch.Tensor
    support_logp: torch.Tensor


class TopkOutput(NamedTuple):
    """Of linear_topk: logp and ids [..., k], lse [...]. None has a gradient."""
    logp: torch.Tensor
    ids: torch.Tensor
    lse: torch.Tensor


def _value(table, name, key):
    if key not in table:
        raise ValueError(f"lk: {name} is {key!r}; it must be one of {', '.join(repr(k) for k in table)}")
    return table[key]


def _number(name, value, off=None):
    """A float. What float() would silently take for a constant is refused. off: that of None."""
    if value is None and off is not None:
        return off
    if isinstance(value, Tensor):
        if value.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"lk: {name} requires a gradient, and gets none; detach it")
        if value.numel() != 1:
            raise ValueError(f"lk: {name} has shape {list(value.shape)}; it must be one number")
        if is_compiling():
            raise TypeError(f"lk: {name} is a tensor, and a compiled program has it as a constant; pass a number")
        if value.device.type != "cpu":
            raise TypeError(f"lk: {name} is a tensor on {value.device}, and reading it waits for the device; pass a number")
    elif isinstance(value, (str, bytes)):
        raise TypeError(f"lk: {name} is {value!r}; it must be a number")
    try:
        return float(value)
    except TypeError:
        raise TypeError(f"lk: {name} is {value!r}; it must be a number") from None


def _integer(name, value):
    """An int, or the symbol of one; likewise."""
    if isinstance(value, (int, torch.SymInt)):
        return value
    if isinstance(value, Tensor) and value.device.type != "cpu":
        raise TypeError(f"lk: {name} is a tensor on {value.device}, and reading it waits for the device; pass a number")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"lk: {name} is {value!r}; it must be an integer") from None


def _constant(name, value):
    """An int, also of a symbol: a program that torch.compile makes has it as a constant."""
    return operator.index(_integer(name, value))


def _counted(max_counted, group, vocab_slices):
    """max_counted of a head that has none with a group."""
    if type(max_counted) is not int or is_compiling():
        max_counted = _constant("max_counted", max_counted)
    if max_counted and (group is not None or vocab_slices):
        raise ValueError(f"lk: with {_splitter(group)} there is no max_counted")
    return max_counted


def _ignored(ignore_index):
    """A number. None is -100, as in F.linear_cross_entropy."""
    return -100 if ignore_index is None else _constant("ignore_index", ignore_index)


def _tensors(**tensors):
    for name, t in tensors.items():
        if not isinstance(t, Tensor):
            raise TypeError(f"lk: {name} is of type {type(t).__name__}; it must be a tensor")


def _sharded(input):
    """Whether it is a DTensor, whose module is not imported for the question."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(input, module.DTensor)


def _plain(function, **tensors):
    """Refuses DTensors: PyTorch would say that the op has no sharding strategy."""
    if is_compiling():
        return
    for name, t in tensors.items():
        if type(t) is not Tensor and type(t) is not torch.nn.Parameter and _sharded(t):
            raise TypeError(f"lk: {name} is a DTensor, which {function} does not take; pass its local tensor, {name}.to_local(), and "
                            "where it has some of the classes a group")


def logsumexp(input, dim, keepdim=False, *, scale=1.0, dtype=None):
    """log(sum(exp(scale * input))) over dim, as torch.logsumexp. dtype=torch.float32 returns it unrounded."""
    compiling = is_compiling()
    if type(input) is not Tensor and _sharded(input):
        from . import _dtensor
        dims = {_integer("dim", d) % input.dim() for d in (dim if hasattr(dim, "__iter__") else (dim,))}
        return _dtensor.logsumexp(lambda x: logsumexp(x, dim, keepdim, scale=scale, dtype=dtype), input, dims, keepdim)
    shape = None
    if type(dim) is int or not hasattr(dim, "__iter__") or isinstance(dim, Tensor):
        dim = dim if type(dim) is int and not compiling else _constant("dim", dim)
    else:
        n, dim = max(input.dim(), 1), [_constant("dim", d) for d in dim]
        dims = sorted(d % n for d in dim if -n <= d < n)
        if not dims or len(set(dims)) < len(dim):
            raise IndexError(f"lk: dim is {dim}; it must name dimensions of an input of shape {list(input.shape)}, none twice")
        if len(dims) > 1:  # one dimension of all of them; copied where they do not lie side by side
            shape = [1 if i in dims else n for i, n in enumerate(input.shape)]
            input = input.movedim(dims, tuple(range(-len(dims), 0))).flatten(-len(dims))
        dim = dims[0] if len(dims) == 1 else -1
    if type(scale) is not float:
        scale = _number("scale", scale)
    op = _ops.logsumexp.default if compiling else _C.logsumexp
    out = op(input, dim, keepdim and shape is None, scale, dtype)
    return out.view(shape) if keepdim and shape is not None else out


def _kl_options(divergence, beta, temperature, logit_scale, teacher_scale, softcap, teacher_softcap):
    """divergence, beta, logit_scale, teacher_scale, softcap, teacher_softcap, as the ops take them."""
    temperature = _number("temperature", temperature, 1.0)
    if not temperature > 0:
        raise ValueError(f"lk: temperature is {temperature}; it must be above 0")
    inverse = 1 / temperature
    scales = [_number(name, scale, 1.0) * inverse for name, scale in (("logit_scale", logit_scale), ("teacher_scale", teacher_scale))]
    caps = [_number(name, cap, 0.0) * inverse for name, cap in (("softcap", softcap), ("teacher_softcap", teacher_softcap))]
    beta = _number("beta", beta)
    if not 0 <= beta <= 1:
        raise ValueError(f"lk: beta is {beta}; it must be 0 to 1")
    if divergence == "jensen_shannon" and beta in (0, 1):  # the ends that TRL gives it
        divergence = "reverse" if beta else "forward"
    beta = beta if 0 < beta < 1 else 0.5  # not used
    return _value(_DIVERGENCES, "divergence", divergence), beta, *scales, *caps


def _computed(input):
    """The type in which a call computes: autocast's, if it is on."""
    device = input.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else input.dtype


def _kl_reduction(reduction, denominator, input, classes):
    """The op's reduction, and what its sum is divided by besides."""
    if reduction == "batchmean":
        if denominator is not None:
            raise ValueError("lk: denominator is what a mean divides by; reduction must be 'mean'")
        return 2, max(input.shape[0] if input.dim() > 1 else classes, 1)
    reduced = _value(_REDUCTIONS, "reduction", reduction)
    if denominator is None:
        return reduced, None
    if reduced != 1:
        raise ValueError("lk: denominator is what a mean divides by; reduction must be 'mean'")
    denominator = _denominator(denominator, input)
    if denominator.numel() != 1 or denominator.is_complex() or denominator.requires_grad:
        raise ValueError(f"lk: denominator has shape {list(denominator.shape)} and type {denominator.dtype}; it must be one real number, "
                         "which gets no gradient")
    return 2, denominator.to(input.device, torch.float32).reshape(())


def kl(input, teacher, *, divergence="forward", beta=0.5, temperature=1.0, row_weight=None, reduction="mean", logit_scale=1.0,
       teacher_scale=1.0, softcap=0.0, teacher_softcap=0.0, denominator=None, zero_when_empty=False, return_entropy=False, group=None,
       shards=None, vocab_slices=0):
    """The Kullback-Leibler divergence of a teacher's and a student's softmax, for distillation. input: the student's logits
    [..., classes]; teacher: the teacher's, of the same shape and type; it gets no gradient. In float32, [...] for "none".

    divergence: "forward" is KL(teacher || student), as F.kl_div(input.log_softmax(-1), teacher.softmax(-1)) sums it; "reverse" is
    KL(student || teacher); "jensen_shannon" is beta KL(teacher || m) + (1 - beta) KL(student || m), m = beta teacher + (1 - beta)
    student; beta 0 is "forward" and 1 is "reverse", as in TRL. "total_variation" is sum |teacher - student| / 2: the share of a
    draft's tokens that speculative decoding rejects, with the draft as student. Temperature divides both logits; multiply the loss
    by temperature**2 where gradients should not shrink with it. logit_scale and softcap are the student's, teacher_scale and teacher_softcap the
    teacher's. row_weight [...]: a factor of each row's loss, or a mask; rows of weight 0, padding say, are not read. A mean is over
    all rows, or with row_weight over the sum of the weights, or over denominator: that of all micro-batches, say.
    zero_when_empty=True: a mean over weights that are all 0 is 0 and not NaN. "batchmean" divides the sum by input.shape[0], as
    F.kl_div does; for [classes] that is the number of classes. return_entropy=True: (loss, entropy), the student's entropy of each row, float32 [...], without a gradient. It is
    not multiplied by row_weight, but 0 where that is 0.

    group: a ProcessGroup of torch.distributed whose ranks each have some of the classes: input and teacher are this rank's logits of
    the same classes. All ranks pass the same row_weight and options, and get the same loss, bit for bit; the gradient is that of
    this rank's logits. shards is how many classes each rank has; without it all have as many. Forward has one all-gather of 32
    bytes a row, two in "jensen_shannon" and "total_variation"; backward has none. vocab_slices: as in cross_entropy."""
    _tensors(input=input, teacher=teacher)
    _plain("kl", input=input, teacher=teacher)
    options = _kl_options(divergence, beta, temperature, logit_scale, teacher_scale, softcap, teacher_softcap)
    classes = input.shape[-1] if input.dim() else 0
    ranks = _split(group, shards, vocab_slices, classes, input.device, "input has {} classes")
    reduced, over = _kl_reduction(reduction, denominator, input, sum(ranks[1]) if ranks else classes)
    if ranks:
        loss, entropy = _ops.kl_parallel.default(input, teacher, row_weight, *options, *ranks, bool(return_entropy))
    else:
        loss, entropy = (_ops.kl.default if is_compiling() else _C.kl)(input, teacher, row_weight, *options, bool(return_entropy))
    if over is None and reduced != 1:
        loss = loss.sum() if reduced else loss
    elif over is None and row_weight is None:
        loss = loss.sum() if zero_when_empty and not loss.numel() else loss.mean()
    else:
        over = row_weight.sum(dtype=torch.float32) if over is None else over
        loss = loss.sum() / (over + (over == 0) if zero_when_empty else over)
    return (loss, entropy) if return_entropy else loss


def _norm(name, input, residual, normalized_shape, weight, eps, bias, weight_offset, groups, *more):
    if type(input) is not Tensor and _sharded(input):
        from . import _dtensor
        local = lambda x, r, w, b: _norm(name, x, r, normalized_shape, w, eps, b, weight_offset, groups, *more)
        dims = len(normalized_shape) if hasattr(normalized_shape, "__len__") else 1
        return _dtensor.norm(local, input, residual, dims, groups, weight, bias)
    op = name if callable(name) else getattr(_ops, name).default if is_compiling() else getattr(_C, name)
    first = (input,) if residual is None else (input, residual)
    if input.dtype == torch.float32:
        weight, bias = _bias_beside(weight, input), _bias_beside(bias, input)
    if type(weight_offset) is not float:
        weight_offset = _number("weight_offset", weight_offset)
    if eps is not None and type(eps) is not float:
        eps = _number("eps", eps)
    if type(normalized_shape) is int or not hasattr(normalized_shape, "__len__"):
        normalized_shape = (_integer("normalized_shape", normalized_shape),)
    n = len(normalized_shape)
    if n == 1 and groups == 1:  # the op checks the rest
        if weight is not None and getattr(weight, "ndim", 0) != 1 or bias is not None and getattr(bias, "ndim", 0) != 1:
            _affine_shape(normalized_shape, weight, bias)
        return op(*first, normalized_shape[0], weight, bias, eps, weight_offset, *more)
    shape = list(input.shape)
    if n == 0 or list(normalized_shape) != shape[-n:]:
        raise ValueError(f"lk: normalized_shape is {list(normalized_shape)}, but input has shape {shape}")
    if residual is not None and residual.shape != input.shape:
        raise ValueError(f"lk: residual has shape {list(residual.shape)} and input {shape}")
    wanted = list(normalized_shape)
    if groups != 1:
        if groups < 1 or len(shape) == n or shape[-n - 1] != groups:
            raise ValueError(f"lk: groups is {groups}, but input has shape {shape}; it must be [..., groups, "
                             f"{str(wanted)[1:]}")
        wanted = [groups, *wanted]
    _affine_shape(wanted, weight, bias)
    affine = [None if t is None else t.flatten(-n) for t in (weight, bias)]
    flat = [t.flatten(-n) for t in first]
    out = op(*flat, flat[0].shape[-1], *affine, eps, weight_offset, *more)
    return out.view(shape) if residual is None else tuple(t.view(shape) for t in out)


def _norm_gated(input, gate, normalized_shape, weight, eps, weight_offset, groups, gate_first):
    _tensors(**{name: t for name, t in (("input", input), ("gate", gate), ("weight", weight)) if t is not None})
    _plain("rms_norm with a gate", input=input, gate=gate)
    if gate.shape != input.shape:
        raise ValueError(f"lk: gate has shape {list(gate.shape)} and input {list(input.shape)}")
    op = _ops.rms_norm_gated.default if is_compiling() else _C.rms_norm_gated
    norm = lambda x, cols, w, b, eps, offset: op(x, gate.reshape(x.shape), cols, w, eps, offset, bool(gate_first))
    return _norm(norm, input, None, normalized_shape, weight, eps, None, weight_offset, groups)


def _affine_shape(wanted, weight, bias):
    _tensors(**{name: t for name, t in (("weight", weight), ("bias", bias)) if t is not None})
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and list(t.shape) != list(wanted):
            raise ValueError(f"lk: {name} has shape {list(t.shape)}; it must be {list(wanted)}")


def _norm_fp8(input, residual, normalized_shape, weight, eps, bias, weight_offset, groups, out_dtype, scaling, scale, power_of_two,
              scale_rounding, amax, transposed, round_sum=False):
    given = (("input", input), ("residual", residual), ("weight", weight), ("scale", scale))
    _tensors(**{name: t for name, t in given if t is not None})
    e5m2, number = _value(_FP8, "out_dtype", out_dtype), _value(_SCALINGS, "scaling", scaling)
    rounding = _value(_SCALE_ROUNDINGS, "scale_rounding", scale_rounding)
    if type(input) is not Tensor and _sharded(input):
        raise TypeError("lk: input is a DTensor; with out_dtype it must be a plain tensor")
    if type(normalized_shape) is int or not hasattr(normalized_shape, "__len__"):
        normalized_shape = (normalized_shape,)
    if len(normalized_shape) != 1 or groups != 1 or bias is not None:
        raise ValueError("lk: with out_dtype a norm is over one dimension, and has neither bias nor groups")
    if number and (scale is not None or amax):
        raise ValueError(f"lk: scale and amax belong to scaling 'tensor', and scaling is {scaling!r}")
    if rounding and number != 3 and (number == 0 or not power_of_two):
        raise ValueError("lk: scale_rounding belongs to scales that are powers of two: those of 'mx', and with power_of_two those of "
                         "'row' and 'block128'")
    if transposed and number == 1:
        raise ValueError("lk: scales of rows are no scales of the transposed copy's rows; scaling must not be 'row'")
    cols = _integer("normalized_shape", normalized_shape[0])
    _affine_shape([cols], weight, None)
    op = _ops.rms_norm_fp8.default if is_compiling() else _C.rms_norm_fp8
    eps, weight_offset = None if eps is None else _number("eps", eps), _number("weight_offset", weight_offset)
    y, scales, most, turned, turned_scales, total = op(input, residual, cols, weight, eps, weight_offset, number, e5m2,
                                                       bool(power_of_two), rounding, scale, bool(amax), bool(transposed), bool(round_sum))
    if number == 0:
        scales = torch.ones((), device=input.device) if scale is None else scale
        turned_scales = scales if transposed else None
    more = (most, turned, turned_scales, total)
    return (y, scales, *(t for t in more if t is not None))


def rms_norm(input, normalized_shape, weight=None, eps=None, *, bias=None, weight_offset=0.0, groups=1, out_dtype=None,
             scaling="row", scale=None, power_of_two=False, scale_rounding="up", amax=False, transposed=False, gate=None,
             gate_first=False):
    """F.rms_norm. weight has input's type or is float32, or has 16 bits beside a float32 input; the result has input's type. The
    factor is weight_offset + weight; Gemma's weight_offset is 1. bias, of weight's shape and type, is added.

    gate, of input's shape and type: rms_norm(input) * F.silu(gate), or with gate_first=True rms_norm(input * F.silu(gate)), in one
    call, rounded once: the gated norms of Mamba-2 (whose norm_before_gate is not gate_first), of Gated DeltaNet, of Qwen3-Next. There
    is no bias and no out_dtype then.

    groups: weight and bias are [groups, *normalized_shape], for an input of [..., groups, *normalized_shape]: one for each head
    of [batch, tokens, heads, head_dim], say.

    out_dtype: torch.float8_e4m3fn or float8_e5m2. Then the result is (y, scale), and y.float() * scale is nearly the norm; from one
    reading of input. lk/srms_norm_fp8.md says how exact. scaling:
      "tensor"    one number, the argument scale (float32 on the device; None is 1), which is known from earlier steps.
                  amax=True: the largest |y| of this call comes behind scale
      "row"       float32 [..., 1], as torch._scaled_mm takes it
      "block128"  float32 [..., cols / 128], one for each 128 columns, the scales of a block next to one another in memory
      "mx"        float8_e8m0fnu [..., cols / 32]
    power_of_two: scales are powers of two, as those of "mx" always are. scale_rounding: "up" is the least one with which no y
    saturates (torchao's RCEIL), "floor" 2^(floor(log2 max |y|) - 8), of E5M2 - 15, with which the largest may (OCP's rule,
    torchao's FLOOR). An infinity or a NaN makes its scale NaN, and all y that have it.
    transposed=True: (y.T, its scale) come behind these, for the product that is the weight's gradient: y.T is [cols, rows] with
    rows contiguous, with scales along its rows; not with "row".
    y has a gradient, in input's type: that of the norm, straight through the rounding. Give y itself to what has that gradient, an
    autograd.Function; of a view of y PyTorch would round it to 8 bits."""
    if gate is not None:
        if bias is not None or out_dtype is not None:
            raise ValueError("lk: with gate a norm has neither bias nor out_dtype")
        return _norm_gated(input, gate, normalized_shape, weight, eps, weight_offset, groups, gate_first)
    if gate_first:
        raise ValueError("lk: gate_first is given without gate")
    if out_dtype is not None:
        return _norm_fp8(input, None, normalized_shape, weight, eps, bias, weight_offset, groups, out_dtype, scaling, scale,
                         power_of_two, scale_rounding, amax, transposed)
    return _norm("rms_norm", input, None, normalized_shape, weight, eps, bias, weight_offset, groups)


def add_rms_norm(input, residual, normalized_shape, weight=None, eps=None, *, bias=None, weight_offset=0.0, groups=1,
                 out_dtype=None, scaling="row", scale=None, power_of_two=False, scale_rounding="up", amax=False,
                 transposed=False, round_sum=False):
    """s = input + residual; returns (rms_norm(s), s), s in residual's type. With out_dtype s comes last, behind what rms_norm
    returns.

    The norm is that of the float32 sum. With round_sum=True it is that of s as it is returned, rounded to residual's type, as
    where PyTorch adds and then normalises. rms_norm(s) has the same bits then, if weight, input and residual have one type, there
    are no groups and no bias, a row has at most 32 KiB of whole 16 bytes, and all tensors lie on 16 bytes. Backward of both reads
    s."""
    if out_dtype is not None:
        return _norm_fp8(input, residual, normalized_shape, weight, eps, bias, weight_offset, groups, out_dtype, scaling, scale,
                         power_of_two, scale_rounding, amax, transposed, round_sum)
    return _norm("add_rms_norm", input, residual, normalized_shape, weight, eps, bias, weight_offset, groups, bool(round_sum))


def srms_norm(input, eps=1e-6):
    """rms_norm over the last dimension, without weight."""
    return rms_norm(input, input.shape[-1:], None, eps)


def glu(gate, up=None, activation="silu", *, alpha=1.0, limit=None, up_offset=0.0, row_weight=None, interleaved=False):
    """row_weight * act(gate) * (up + up_offset), a gated linear unit: SwiGLU, GeGLU, ReGLU, and others. The result has gate's
    type, and is rounded once. Backward computes act(gate) again; it keeps gate, up and row_weight alone.

    gate and up have one shape, [..., n], and one type. Without up, gate is [..., 2 n] and has both: the first half is the gate
    and the second half up, or with interleaved=True the even columns and the odd ones. The result is [..., n]. Rows at one
    distance are read where they lie, so the two halves of x.chunk(2, -1) cost no copy. The gradient of a gate that has both is
    one tensor.

    activation: "silu" is gate * sigmoid(alpha * gate); no other one has alpha. "gelu" is F.gelu, "gelu_tanh" F.gelu with
    approximate="tanh". The others are "relu" and "sigmoid". limit: gate is at most limit, and up is at most limit in size;
    gradients are 0 beyond it. alpha, limit and up_offset are numbers. gpt-oss has alpha=1.702, limit=7.0, up_offset=1.0 and
    interleaved=True.

    row_weight [...] is a factor of each row: the weight of an expert for a token, say. It is used in float32, and its gradient
    has its own type. It may be a mask of bool, which gets none.

    PyTorch's own takes the gate from the second half: F.glu(x) is glu(x[..., n:], x[..., :n], "sigmoid")."""
    if type(gate) is not Tensor and _sharded(gate):
        from . import _dtensor
        local = lambda g, u, r: glu(g, u, activation, alpha=alpha, limit=limit, up_offset=up_offset, row_weight=r,
                                    interleaved=interleaved)
        return _dtensor.glu(local, gate, up, row_weight)
    if type(alpha) is not float:
        alpha = _number("alpha", alpha)
    if type(up_offset) is not float:
        up_offset = _number("up_offset", up_offset)
    if limit is not None and type(limit) is not float:
        limit = _number("limit", limit)
    number = _value(_GATES, "activation", activation)
    if number and alpha != 1.0:
        raise ValueError(f"lk: alpha is {alpha}; it is for activation 'silu', and activation is {activation!r}")
    op = _ops.glu.default if is_compiling() else _C.glu
    return op(gate, up, row_weight, number, alpha, limit, up_offset, bool(interleaved))


def rope(q, k=None, *, inv_freq=None, position=None, cos=None, sin=None, rotary_dim=None, interleaved=False, heads_first=False,
         offset=0, scale=1.0, pair_axis=None, q_weight=None, k_weight=None, eps=1e-6, weight_offset=0.0):
    """Rotary position embedding of q, or of q and k in one launch: y_q, or (y_q, y_k). With q_weight or k_weight, each head of
    q or of k gets an RMS norm first (QK norm). All is computed in float32, and a result is rounded once.

    q is [batch, tokens, heads, dim] or [tokens, heads, dim]; with heads_first=True [batch, heads, tokens, dim], as transformers
    has it. k may have another number of heads. Both may be views, parts of a packed qkv say: they are read where they lie if
    their last dimension is contiguous and they are not expanded, and copied once else. A result has q's shape, and its
    dimensions lie in memory in the order of q's.

    The pairs of a head are (x[j], x[j + rotary_dim / 2]), or with interleaved=True (x[2 j], x[2 j + 1]). rotary_dim=None is
    dim; features from rotary_dim on are not rotated. A pair is rotated by its angle, and multiplied by scale, YaRN's attention
    factor. The angles are those of inv_freq, or of cos and sin:
      inv_freq    position * inv_freq radians, as exact at large positions as at small ones. inv_freq is float32
                  [rotary_dim / 2]. position is int64 or int32 [tokens], [batch, tokens] or [axes, batch, tokens], with
                  values in (-2^31, 2^31): of another one the low 32 bits are taken, and nothing says so. None is
                  offset, offset + 1, ... With several axes pair_axis, int32 [rotary_dim / 2], says which of them a pair has
      cos, sin    tables of the tokens, [tokens, w] or [batch or 1, tokens, w], in q's type or float32. w is rotary_dim / 2, or
                  rotary_dim as transformers has it: each number stands twice, in both halves, or side by side if interleaved

    q_weight and k_weight are [dim], in q's type or float32; the factor is weight_offset + weight, and Gemma's weight_offset is
    1. dim is at most 256 then; eps is the norm's. Backward keeps q and k where they have a norm, and computes the norm again;
    else it keeps the angles alone. q, k and both weights have gradients; the angles have none."""
    if type(q) is not Tensor and _sharded(q):
        from . import _dtensor
        options = dict(rotary_dim=rotary_dim, interleaved=interleaved, heads_first=heads_first, offset=offset, scale=scale,
                       eps=eps, weight_offset=weight_offset)
        local = lambda q, k, position, cos, sin, q_weight, k_weight, inv_freq, pair_axis: rope(
            q, k, inv_freq=inv_freq, position=position, cos=cos, sin=sin, pair_axis=pair_axis, q_weight=q_weight,
            k_weight=k_weight, **options)
        return _dtensor.rope(local, q, k, heads_first, position, cos, sin, (q_weight, k_weight), (inv_freq, pair_axis))
    if type(offset) is not int:
        offset = _integer("offset", offset)
    if type(scale) is not float:
        scale = _number("scale", scale)
    if type(eps) is not float:
        eps = _number("eps", eps)
    if type(weight_offset) is not float:
        weight_offset = _number("weight_offset", weight_offset)
    if rotary_dim is None:
        rotary_dim = 0
    else:
        rotary_dim = _constant("rotary_dim", rotary_dim)
        if rotary_dim <= 0:
            raise ValueError(f"lk: rotary_dim is {rotary_dim}; it must be even, above 0, and at most dim")
    op = _ops.rope.default if is_compiling() else _C.rope
    out = op(q, k, inv_freq, position, cos, sin, pair_axis, q_weight, k_weight, rotary_dim, bool(interleaved),
             bool(heads_first), offset, scale, eps, weight_offset)
    return out[0] if k is None else out


def _grad_scale(grad_scale):
    """A number as a tensor of the CPU, which waits for no device."""
    if grad_scale is None or isinstance(grad_scale, torch.Tensor):
        return grad_scale
    if type(grad_scale) is not float:
        grad_scale = _number("grad_scale", grad_scale)
    if not (-math.inf < grad_scale < math.inf and grad_scale):  # math.isfinite takes no symbol
        raise ValueError(f"lk: grad_scale is {grad_scale}; it must be finite and not 0")
    return torch.tensor(grad_scale)


def _splitter(group):
    return "vocab_slices" if group is None else "group"


def _no_grad_scale(grad_scale, group):
    if grad_scale is not None:
        raise ValueError(f"lk: with {_splitter(group)} there is no grad_scale; gradients are computed in backward")


def _scales(logit_scale, softcap, temperature):
    """logit_scale and softcap as numbers, and what the logits are to be multiplied with before, a tensor or None."""
    values, factor = [], None
    for name, value in (("logit_scale", logit_scale), ("temperature", temperature)):
        if isinstance(value, Tensor) and (is_compiling() or value.numel() != 1 or value.device.type != "cpu" or
                                                value.requires_grad and torch.is_grad_enabled()):
            value = value.to(torch.float32)
            if name == "temperature":
                if softcap:
                    raise ValueError("lk: temperature is a tensor; with softcap, which it divides too, it must be a number")
                factor = 1 / value if factor is None else factor / value
            else:
                factor = value
            value = 1.0
        values.append(_number(name, value, 1.0))
    if not values[1] > 0:
        raise ValueError(f"lk: temperature is {temperature}; it must be above 0")
    return values[0] / values[1], softcap / values[1], factor


def _per_row(factor, rows):
    """One number, or one for each row, to multiply [*rows, n] with."""
    if factor.dim() == 0 or factor.shape == (1,):
        return factor.reshape(())
    if factor.shape != rows:
        raise ValueError(f"lk: logit_scale or temperature has shape {list(factor.shape)}; "
                         f"it must be one number or {list(rows)}")
    return factor.unsqueeze(-1)


def _scaled_logits(logits, factor, group):
    """logits, or in float32 their product with a tensor that is logit_scale or temperature. A wrong type is the op's to refuse."""
    if factor is None:
        return logits
    if group is not None:  # whose other ranks have the rest of the gradient
        raise ValueError("lk: with group logit_scale and temperature must be numbers")
    return logits.float() * _per_row(factor, logits.shape[:-1]) if logits.dtype in _TYPES and logits.dim() else logits


def _options(label_smoothing, z_loss, softcap, logit_scale, temperature):
    """The first four as numbers, and the factor of _scales."""
    if type(label_smoothing) is not float:
        label_smoothing = _number("label_smoothing", label_smoothing, 0.0)
    if type(z_loss) is not float:
        z_loss = _number("z_loss", z_loss, 0.0)
    if type(softcap) is not float:
        softcap = _number("softcap", softcap, 0.0)
    factor = None
    if type(logit_scale) is not float or type(temperature) is not float or temperature != 1.0:
        logit_scale, softcap, factor = _scales(logit_scale, softcap, temperature)
    return label_smoothing, z_loss, softcap, logit_scale, factor


def _denominator(value, input):
    if value is None or isinstance(value, Tensor):
        return value
    return torch.full((), _number("denominator", value), dtype=torch.float32, device=input.device)


def _check_targets(target, ignore_index, classes, name="target"):
    bad = (target < 0) | (target >= classes)
    if ignore_index is not None:
        bad &= target != ignore_index
    if bad.any():
        at = bad.nonzero()[0].tolist()
        value, more = int(target[tuple(at)]), "" if ignore_index is None else f", or ignore_index, {ignore_index}"
        raise ValueError(f"lk: {name}{at} is {value}; it must be 0 to {classes - 1}{more}")


def _loss(name, input, target, weight, ignore_index, reduction, label_smoothing, z_loss, softcap, logit_scale, zero_when_empty,
          denominator, row_weight, temperature, *more, group=None, shards=None, vocab_slices=0):
    if not (isinstance(input, Tensor) and isinstance(target, Tensor)):
        _tensors(input=input, target=target)
    if type(input) is not Tensor and _sharded(input):
        if group is not None:
            raise TypeError("lk: input is a DTensor; with group it must be a plain tensor, of this rank's classes")
        if isinstance(logit_scale, Tensor) or isinstance(temperature, Tensor):
            raise TypeError("lk: input is a DTensor; logit_scale and temperature must be numbers")
        from . import _dtensor
        local = lambda x, t, w, d, r: _loss(name, x, t, w, ignore_index, reduction, label_smoothing, z_loss, softcap,
                                            logit_scale, zero_when_empty, d, r, temperature, *more, vocab_slices=vocab_slices)
        return _dtensor.loss(local, input, target, weight, ignore_index, reduction, denominator, row_weight, (0, 2))
    if input.dim() > 2:  # the classes last; logits of [N, C, d] are copied
        input = input.movedim(1, -1)
        if target.dim() > 2 and target.is_floating_point():  # probabilities of classes
            target = target.movedim(1, -1)
    label_smoothing, z_loss, softcap, logit_scale, factor = _options(label_smoothing, z_loss, softcap, logit_scale, temperature)
    if type(ignore_index) is not int or is_compiling():
        ignore_index = _ignored(ignore_index)
    if factor is not None and input.dtype in _TYPES and input.dim() and target.dtype in _TYPES:  # as the logits
        target = target.float()
    input = _scaled_logits(input, factor, group)
    classes = input.shape[-1] if input.dim() else 0
    ranks = ()
    if group is not None or shards is not None or vocab_slices:
        ranks = _split(group, shards, vocab_slices, classes, input.device, "input has {} classes")
        classes = sum(ranks[1])
    if CHECK_TARGETS and not is_compiling() and not target.is_floating_point() and input.dim():
        _check_targets(target, ignore_index, classes)
    if denominator is not None:
        denominator = _denominator(denominator, input)
    options = (input, target, weight, _value(_REDUCTIONS, "reduction", reduction), ignore_index, label_smoothing, z_loss,
               softcap, logit_scale, zero_when_empty, denominator, row_weight)
    if ranks:
        stats = name == "cross_entropy_stats"
        out = _ops.cross_entropy_parallel.default(*options, *ranks, stats, stats and more[0])
        return _with_statistics(out) if stats else out[0]
    op = getattr(_ops, name).default if is_compiling() else getattr(_C, name)
    out = op(*options, *more)
    return _with_statistics(out) if name == "cross_entropy_stats" else out


def _with_statistics(out):
    """The results, with the last one, a tensor of three or None, spread out."""
    *first, statistics = out
    return tuple(first) if statistics is None else (*first, *statistics.unbind(0))


def cross_entropy(input, target, weight=None, ignore_index=-100, reduction="mean", label_smoothing=0.0, *, z_loss=0.0,
                  softcap=0.0, logit_scale=1.0, zero_when_empty=False, denominator=None, row_weight=None, temperature=1.0,
                  grad_scale=None, inplace=False, group=None, shards=None, vocab_slices=0):
    """F.cross_entropy; the loss is float32. lk/cross_entropy.cuh has the formulas of all options.

    target: class numbers, or probabilities of classes in input's shape, of input's type or float32. They get no gradient.

    denominator, one number or a tensor of one, is what a mean divides by, instead of its own count (or sum of weights): the
    targets of all micro-batches, say. It gets no gradient.

    row_weight, a tensor of a number for each target, multiplies its loss and gradient: advantages, say. They may be negative.
    A mean divides by what it divides by without; for a weighted mean pass denominator=row_weight.sum(). It gets no gradient.

    temperature: the logits, after softcap, are divided by it: logit_scale and softcap are.

    logit_scale and temperature may be tensors: one number, or one for each target. They get gradients, and are read on the
    device, where their values are not checked. It costs a float32 product of the logits, and its gradient. With softcap
    temperature must be a number.

    A mean or sum computes its gradient in forward, where the logits are read anyway, so backward's upstream gradient has to be
    known there. grad_scale says what it will be: a number, or a tensor of one number, such as 1 / the steps of gradient
    accumulation, or the scale of a GradScaler. Where that is right, backward neither reads nor writes the gradient. Where it
    is wrong, backward multiplies by upstream / grad_scale, and rounds to input's type once more. It changes nothing else.
    grad_scale=None: what came twice in a row in earlier calls is expected, at first 1. So the first gradients after a change are
    rounded twice (products with powers of two are exact). Under torch.use_deterministic_algorithms(True) it is 1 always, so
    that no bit depends on earlier calls. In float16 without grad_scale, without a reduction, and under torch.compile, the
    gradient is computed in backward.

    inplace=True writes the gradient of a mean or sum over the logits, which saves their size in memory. After the call input has
    no logits any more. It must be contiguous and no leaf. Where another op needs the logits for its backward, PyTorch's error
    says so. Under torch.compile, and where no gradient is wanted, nothing is overwritten.

    group: a ProcessGroup of torch.distributed whose ranks each have some of the classes: input is this rank's logits. All ranks pass
    the same target, class numbers among those of all ranks, weight for all classes and options. They get the same loss, bit for bit;
    the gradient is that of this rank's logits, computed in backward: there are no grad_scale and no inplace. shards is how many
    classes each rank has; without it all have as many. logit_scale and temperature are numbers then. Forward has one all-gather of
    16 to 40 bytes a row; backward has none.

    vocab_slices=n: the classes are in n slices, as many in each, and the results' bits do not depend on how many ranks have them,
    and are those without a group: ranks have whole slices, each as many. linear_cross_entropy says more. All slices of all rows must
    lie alike modulo 16 bytes: each has a multiple of 8 classes, say, in 16 bits. There are no grad_scale and no inplace."""
    if group is not None or vocab_slices:
        _no_grad_scale(grad_scale, group)
        if inplace:
            raise ValueError(f"lk: with {_splitter(group)} there is no inplace; the gradient is computed in backward")
    return _loss("cross_entropy", input, target, weight, ignore_index, reduction, label_smoothing, z_loss, softcap, logit_scale,
                 zero_when_empty, denominator, row_weight, temperature, _grad_scale(grad_scale), inplace, group=group, shards=shards,
                 vocab_slices=vocab_slices)


def cross_entropy_with_grad(input, target, weight=None, ignore_index=-100, reduction="mean", label_smoothing=0.0, *, z_loss=0.0,
                            softcap=0.0, logit_scale=1.0, zero_when_empty=False, denominator=None, row_weight=None,
                            temperature=1.0, grad_scale=None, dlogits_dtype=None):
    """(loss, dlogits), from one reading of the logits and without autograd: for a backward of your own.

    dlogits, in input's shape, is the gradient of grad_scale * loss, with reduction="none" of their sum. grad_scale is a number or
    a tensor of one; None means 1. dlogits_dtype: input's type, float8_e5m2, or of float32 input also float16 or bfloat16.
    Where input's rows do not lie as packed ones, modulo 16 bytes, neither do those of dlogits: it is no contiguous tensor then.

    float8_e5m2, for a matrix product of 8 bits: rounded to nearest even, at most 57344 in size; what is at most 2^-17 becomes 0.
    Let grad_scale put a power of two in, and take it out in the product: with grad_scale=2**15, times the number of targets for a
    mean, all fits and only p below 2^-32 is lost. Not for probabilities of classes. The other arguments are cross_entropy's;
    logit_scale and temperature must be numbers."""
    if isinstance(logit_scale, Tensor) or isinstance(temperature, Tensor):
        raise TypeError("lk: logit_scale and temperature must be numbers in cross_entropy_with_grad")
    if _sharded(input):
        raise TypeError("lk: input is a DTensor; cross_entropy_with_grad takes plain tensors")
    loss, dlogits = _loss("cross_entropy_with_grad", input, target, weight, ignore_index, reduction, label_smoothing, z_loss,
                          softcap, logit_scale, zero_when_empty, denominator, row_weight, temperature, _grad_scale(grad_scale),
                          dlogits_dtype)
    return loss, dlogits.movedim(-1, 1) if input.dim() > 2 else dlogits


def cross_entropy_stats(input, target, weight=None, ignore_index=-100, reduction="mean", label_smoothing=0.0, *, z_loss=0.0,
                        softcap=0.0, logit_scale=1.0, zero_when_empty=False, denominator=None, row_weight=None, temperature=1.0,
                        statistics=False, group=None, shards=None, vocab_slices=0):
    """cross_entropy, and what the same reading of the logits knows besides: a CrossEntropyOutput. statistics=True: a
    CrossEntropyStatisticsOutput, which has log_sum_sq_probs, mean_logits and top_logprob too. Not for probabilities of classes.
    group, shards and vocab_slices: as in cross_entropy; all results have the same bits on all ranks."""
    kind = CrossEntropyStatisticsOutput if statistics else CrossEntropyOutput
    return kind(*_loss("cross_entropy_stats", input, target, weight, ignore_index, reduction, label_smoothing, z_loss, softcap,
                       logit_scale, zero_when_empty, denominator, row_weight, temperature, bool(statistics), group=group,
                       shards=shards, vocab_slices=vocab_slices))


def cross_entropy_ids(input, target_ids, target_weight=None, ignore_index=-100, reduction="mean", *, z_loss=0.0, softcap=0.0,
                      logit_scale=1.0, zero_when_empty=False, denominator=None, row_weight=None, temperature=1.0,
                      tail_weight=None, tail=False, group=None, shards=None, vocab_slices=0):
    """Several weighted targets per row, and their log-probabilities: a CrossEntropyIdsOutput. lk/cross_entropy_ids.cuh has the
    formulas.

    input [..., classes], target_ids [..., n] of class numbers, n from 1 to 128, target_weight [..., n], None for 1. logp is
    log_softmax(input).gather(-1, target_ids) in float32, and 0 where an id is ignore_index. loss is -(target_weight *
    logp).sum(-1) for each row; a mean divides by the number of rows that have an id, or by denominator. Ids may repeat. An id
    with a weight of 0 adds nothing to the loss, and may be any number; outside the classes it is skipped. Weights and ids get no
    gradient: where the weights have one, or are no constants, build the loss of logp.

    Distillation from a teacher's largest n probabilities q: `cross_entropy_ids(logits, ids, q).loss`, or with the student's own
    probabilities as weights, `q = logp.exp(); (q * (logp - teacher_logp)).sum(-1)`.

    tail=True: also tail [...], log of the probability of all classes that are none of the row's ids, a CrossEntropyIdsTailOutput.
    With tail_weight [...] too, and the loss has -tail_weight * tail more. tail is not 1 minus a sum where that would be inexact,
    and is -inf where nothing is left. With `tail_weight=1 - q.sum(-1)` the loss is, but for the teacher's entropy, the KL of n
    classes and the rest.

    group: a ProcessGroup of torch.distributed whose ranks each have some of the classes: input is this rank's logits. All ranks
    pass the same ids, weights and options, and get the same results, bit for bit; the gradient is that of this rank's logits.
    shards is how many classes each rank has; without it all have as many. logit_scale and temperature are numbers then. Forward
    has one all-gather, of 16 bytes a row and the logits of its ids; backward has none. vocab_slices: as in cross_entropy.

    The other arguments are those of cross_entropy."""
    _tensors(input=input, target_ids=target_ids)
    _plain("cross_entropy_ids", input=input, target_ids=target_ids)
    _, z_loss, softcap, logit_scale, factor = _options(0.0, z_loss, softcap, logit_scale, temperature)
    if type(ignore_index) is not int or is_compiling():
        ignore_index = _ignored(ignore_index)
    input = _scaled_logits(input, factor, group)
    classes = input.shape[-1] if input.dim() else 0
    ranks = _split(group, shards, vocab_slices, classes, input.device, "input has {} classes")
    if ranks:
        classes = sum(ranks[1])
    if CHECK_TARGETS and not is_compiling() and input.dim():
        used = target_ids if target_weight is None else target_ids.masked_fill(target_weight == 0, ignore_index)
        _check_targets(used, ignore_index, classes, "target_ids")
    if denominator is not None:
        denominator = _denominator(denominator, input)
    op = _ops.cross_entropy_ids.default if is_compiling() else _C.cross_entropy_ids
    if ranks:
        op = _ops.cross_entropy_ids_parallel.default
    loss, logp, rest = op(input, target_ids, target_weight, tail_weight, _value(_REDUCTIONS, "reduction", reduction), ignore_index, 0.0,
                          z_loss, softcap, logit_scale, zero_when_empty, denominator, row_weight, *ranks, bool(tail))
    return CrossEntropyIdsOutput(loss, logp) if rest is None else CrossEntropyIdsTailOutput(loss, logp, rest)


def _mib(workspace_mib):
    if workspace_mib is None:
        return 0
    if workspace_mib < 1:
        raise ValueError(f"lk: workspace_mib is {workspace_mib}; it must be at least 1")
    return _constant("workspace_mib", workspace_mib) if is_compiling() else workspace_mib


def _linear_loss(name, input, linear_weight, target, linear_bias, weight, reduction, ignore_index, label_smoothing, z_loss,
                 softcap, logit_scale, zero_when_empty, denominator, row_weight, workspace_mib, fast_logits, max_counted,
                 batch_invariant, group, shards, sequence_parallel, vocab_slices, temperature, *more):
    if not (isinstance(input, Tensor) and isinstance(linear_weight, Tensor) and isinstance(target, Tensor)):
        _tensors(input=input, linear_weight=linear_weight, target=target)
    _plain(name, input=input, linear_weight=linear_weight, target=target)
    label_smoothing, z_loss, softcap, logit_scale, factor = _options(label_smoothing, z_loss, softcap, logit_scale, temperature)
    if type(ignore_index) is not int or is_compiling():
        ignore_index = _ignored(ignore_index)
    if type(max_counted) is not int or is_compiling():
        max_counted = _constant("max_counted", max_counted)
    parts = _parts(sequence_parallel, group, input, target)
    input, linear_bias = _scaled_head(input, linear_bias, factor, group, parts, "target")
    ranks = _split(group, shards, vocab_slices, linear_weight.shape[0], linear_weight.device, "linear_weight has {} rows")
    if CHECK_TARGETS and not is_compiling() and not target.is_floating_point():
        _check_targets(target, ignore_index, sum(ranks[1]) if ranks else linear_weight.shape[0])
    if ranks:
        name, ranks = name + "_parallel", (*ranks, parts)
    op = getattr(_ops, name).default if ranks or is_compiling() else getattr(_C, name)
    return op(input, linear_weight, target, linear_bias, weight, _value(_REDUCTIONS, "reduction", reduction), ignore_index,
              label_smoothing, z_loss, softcap, logit_scale, zero_when_empty, _denominator(denominator, input),
              row_weight, _mib(workspace_mib), fast_logits, max_counted, batch_invariant, *ranks, *more)


def set_batch_invariant(on=True):
    """For all later calls of the process: whether the results of a row have the same bits for any number of rows. Returns what was
    set before.

    It is for forward of rms_norm (with a gate too), add_rms_norm, kl, cross_entropy and cross_entropy_stats, with a group too. A
    mean or sum still depends on all rows, and so may gradients. Rows have to lie alike modulo 16 bytes: in 16 bits, sizes that are
    multiples of 8. Few long rows take longer, since they get the kernels that many rows get. Several ids, probabilities of classes and
    results of 8 bits do not look at it. linear_cross_entropy and its _stats have an argument of their own, batch_invariant; other
    heads have none. Programs of torch.compile look when they run, CUDA graphs when they are captured."""
    return _ops.set_batch_invariant.default(bool(on))


_agreed = set()


def _split(group, shards, vocab_slices, rows, device, what):
    """How classes are split, as ops take it: a group's name, the classes of each slice, this rank, and the slices of each rank. ()
    where all are on one rank in one piece. rows: how many classes this rank has; what: the words for them."""
    if group is None and shards is not None:
        raise ValueError("lk: shards are those of a group; group is None")
    vocab_slices = _constant("vocab_slices", vocab_slices)
    if vocab_slices < 0:
        raise ValueError(f"lk: vocab_slices is {vocab_slices}; it must be at least 0")
    if group is None:
        return ("", _slices(operator.index(rows), vocab_slices), 0, vocab_slices) if vocab_slices else ()
    shards, rank = _agreed_shards(group, shards, rows, device, what), group.rank()
    if not vocab_slices:
        return group.group_name, shards, rank, 1
    if vocab_slices % len(shards):
        raise ValueError(f"lk: vocab_slices is {vocab_slices}; it must be a multiple of the number of ranks, {len(shards)}")
    slices, each = _slices(sum(shards), vocab_slices), vocab_slices // len(shards)
    for i, has in enumerate(shards):
        mine = slices[i * each:(i + 1) * each]
        if sum(mine) != has:
            raise ValueError(f"lk: {what.format(has)} on rank {i}, but its slices have {mine}: with vocab_slices {vocab_slices} each "
                             f"of them has {slices[0]} of {sum(shards)}, and the last ones what is left")
    return group.group_name, slices, rank, each


def _slices(classes, n):
    """The classes of n slices: as many in each, and in the last ones what is left."""
    each = -(-classes // n)
    return [max(min(each, classes - i * each), 0) for i in range(n)]


def _agreed_shards(group, shards, rows, device, what):
    """The shards of a group. The first call with them compares all ranks' shards and rows, so that a wrong number raises on each rank, and
    none waits for one that has raised. Later calls with the same ones are not compared, which would wait for the device."""
    rows, ranks = operator.index(rows), _size(group)  # of a symbol, its number
    shards = [rows] * ranks if shards is None else [operator.index(_integer("shards", n)) for n in shards]
    _agree(group.group_name, tuple(shards), rows, device, what)
    return shards


def _size(group):
    if isinstance(group, str):
        raise ValueError(f"lk: group is {group!r}, the name of one that this process lacks; set the head's options['group']")
    return group.size()


def _parts(sequence_parallel, group, input, target, name="target"):
    """Into how many parts the tokens are split, of which input has this rank's: 1, or as many as there are ranks."""
    if not sequence_parallel:
        return 1
    if group is None:
        raise ValueError("lk: sequence_parallel is for the ranks of a group; group is None")
    parts = _size(group)
    if target is not None and input.dim() and target.dim() and input.shape[0] * parts != target.shape[0]:
        raise ValueError(f"lk: input has shape {list(input.shape)} and {name} {list(target.shape)}; with sequence_parallel the first "
                         f"dimension of {name} must be that of input times {parts}, the number of ranks")
    return parts


class _Shared(torch.autograd.Function):
    """A tensor that is alike on all ranks, of which each rank uses what its tokens need. Its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx, tensor, group):
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient):
        ops = torch.ops._c10d_functional
        return ops.wait_tensor.default(ops.all_reduce.default(gradient.contiguous(), "sum", ctx.group)), None


@torch.compiler.assume_constant_result
def _agree(name, shards, rows, device, what):
    group = torch.distributed.distributed_c10d._resolve_process_group(name)
    key, ranks = (id(group), name, shards, what), group.size()
    if key in _agreed or device.type == "meta" or device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    mine = torch.tensor([rows, *(shards if len(shards) == ranks else [-1] * ranks)], device=device)
    every = mine.new_empty(ranks * (ranks + 1))
    torch.distributed.all_gather_into_tensor(every, mine, group=group)
    every = every.view(ranks, ranks + 1).tolist()
    for i, (_, *theirs) in enumerate(every):
        if -1 in theirs:
            raise ValueError(f"lk: on rank {i} shards has not a number, of at least 0, for each of {ranks} ranks")
        for j, (has, *_) in enumerate(every):
            if theirs[j] != has:
                raise ValueError(f"lk: {what.format(has)} on rank {j}, but on rank {i} shards is {theirs}")
    _agreed.add(key)


def shards_of(linear_weight, group):
    """How many rows each rank of the group has, for linear_cross_entropy's `shards`. It is a collective: call it once."""
    sizes = linear_weight.new_empty(group.size(), dtype=torch.int64)
    torch.distributed.all_gather_into_tensor(sizes, sizes.new_tensor([linear_weight.shape[0]]), group=group)
    return sizes.tolist()


def linear_cross_entropy(input, linear_weight, target, *, linear_bias=None, weight=None, reduction="mean", ignore_index=-100,
                         label_smoothing=0.0, z_loss=0.0, softcap=0.0, logit_scale=1.0, zero_when_empty=False,
                         denominator=None, row_weight=None, workspace_mib=None, fast_logits=False, max_counted=0,
                         batch_invariant=False, group=None, shards=None, sequence_parallel=False, vocab_slices=0, keep=False,
                         temperature=1.0, grad_scale=None, options=None):
    """cross_entropy(F.linear(input, linear_weight, linear_bias), target) without storing all logits.

    linear_weight has input's type; a float32 one beside an input of 16 bits is rounded to that type in each call, and its gradient
    is float32. ignore_index=None is -100. options: what F.linear_cross_entropy takes to choose its chunks; lk chooses its own, and
    does not use them.

    input is [..., hidden], target [...], or as a probability for each class [..., classes], float32 or of input's type: the loss
    is then that of F.cross_entropy for probabilities. They need logits in memory, some tokens at a time, and are copied to
    float32 where they are not, unless with fast_logits; there is no group, max_counted, batch_invariant or statistics, and keep
    changes nothing. workspace_mib bounds the memory for logits; None: what the fastest plan takes, at most a sixteenth of the
    device's memory. fast_logits stores them in input's type. grad_scale: as in cross_entropy; there is none with group, where
    backward computes the gradients. max_counted, if not 0, is an upper bound of the targets that are not ignored. The matmuls
    then have so many rows. If more targets count, the loss and all gradients are NaN. denominator and row_weight: as in
    cross_entropy. batch_invariant=True: a token's loss has the same bits whatever the other tokens are, in bfloat16 on sm_90a;
    gradients are then made in backward.

    logit_scale and temperature as in cross_entropy. As tensors they multiply input, and linear_bias: the product is rounded to
    input's type. With linear_bias they must be one number.

    keep=True is for a loss per token, reduction="none", or one in float16, whose gradients are made in backward. Forward keeps
    all logits for it until the graph is freed, whatever workspace_mib says, and backward does not compute them again: two
    matmuls, not three. A logit takes 4 bytes; with fast_logits and a 16-bit input it takes 2. In bfloat16 on sm_90a (H100,
    H200) without label_smoothing, exponentials of 2 bytes are kept instead, if there are more than 2 * hidden classes, or more
    than 2048 and no multiple of 8, and if logits would take more time: many tokens. For these, hidden must be a multiple of 8.
    Where it is not, keep changes nothing. Nor does it with batch_invariant, or for any other mean or sum, which makes its
    gradients in forward.

    group: a ProcessGroup of torch.distributed whose ranks each have some of the classes, a vocabulary-parallel head. Then
    linear_weight and linear_bias are this rank's rows, and ranks have them in order; all ranks have as many, or shards says how
    many each has: shards_of asks all ranks, and a rank may have 0. input, target, weight, denominator and row_weight are those of
    all classes, and alike on all ranks, as are the options. The results are the same bits on all ranks. backward gives input the
    sum of all ranks' gradients, and must get the same upstream gradient on each. It makes all gradients; keep=True then is good
    for any reduction, and keeps exponentials or nothing. All ranks make the call.

    sequence_parallel=True, with group: input is this rank's tokens alone. All tokens are split evenly over the ranks along input's
    first dimension, in the order of ranks: target's first dimension is that of input times the number of ranks. All other tensors,
    and the results, are of all tokens, and alike on all ranks. Forward gathers input, and backward gathers it again, so that only
    this rank's tokens are kept in between. The gradient of input is that of this rank's tokens, summed by a reduce-scatter.

    vocab_slices=n: the classes of all ranks are in n slices of equal size; the last ones may be smaller. Forward computes each slice
    by itself, and then merges them all. So loss, lse and the other results have the same bits on any number of ranks that have
    whole slices, each as many, and without a group: with vocab_slices=8 on 1, 2, 4 and 8 ranks. With batch_invariant=True they have
    the same bits for any number of tokens too: a sampler and a trainer compute equal log-probabilities. Gradients have no such
    promise. It costs a forward of smaller matmuls; backward computes the logits again, keep or not, and there is no grad_scale."""
    if group is not None or vocab_slices:
        _no_grad_scale(grad_scale, group)
    return _linear_loss("linear_cross_entropy", input, linear_weight, target, linear_bias, weight, reduction, ignore_index,
                        label_smoothing, z_loss, softcap, logit_scale, zero_when_empty, denominator, row_weight, workspace_mib,
                        fast_logits, max_counted, batch_invariant, group, shards, sequence_parallel, vocab_slices, temperature, keep,
                        *(() if group or vocab_slices else (_grad_scale(grad_scale),)))


def linear_cross_entropy_stats(input, linear_weight, target, *, linear_bias=None, weight=None, reduction="mean",
                               ignore_index=-100, label_smoothing=0.0, z_loss=0.0, softcap=0.0, logit_scale=1.0,
                               zero_when_empty=False, denominator=None, row_weight=None, workspace_mib=None, fast_logits=False,
                               max_counted=0, batch_invariant=False, group=None, shards=None, sequence_parallel=False,
                               vocab_slices=0, temperature=1.0, statistics=False):
    """linear_cross_entropy, and what the same logits give besides: a LinearCrossEntropyOutput. statistics=True: a
    LinearCrossEntropyStatisticsOutput, which has log_sum_sq_probs, mean_logits and top_logprob too, from the same matmul."""
    kind = LinearCrossEntropyStatisticsOutput if statistics else LinearCrossEntropyOutput
    return kind(*_with_statistics(_linear_loss(
        "linear_cross_entropy_stats", input, linear_weight, target, linear_bias, weight, reduction, ignore_index,
        label_smoothing, z_loss, softcap, logit_scale, zero_when_empty, denominator, row_weight, workspace_mib, fast_logits,
        max_counted, batch_invariant, group, shards, sequence_parallel, vocab_slices, temperature, bool(statistics))))


def linear_cross_entropy_ids(input, linear_weight, target_ids, target_weight=None, ignore_index=-100, reduction="mean", *,
                             linear_bias=None, z_loss=0.0, softcap=0.0, logit_scale=1.0, zero_when_empty=False,
                             denominator=None, row_weight=None, temperature=1.0, tail_weight=None, tail=False,
                             workspace_mib=None, fast_logits=False, max_counted=0, group=None, shards=None,
                             sequence_parallel=False, vocab_slices=0):
    """cross_entropy_ids of a head, without storing all logits: several weighted targets per token and their log-probabilities, a
    CrossEntropyIdsOutput, with gradients for input, linear_weight and linear_bias. For distillation from a teacher's largest
    probabilities, and for several targets per token.

        cross_entropy_ids(F.linear(input, linear_weight, linear_bias), target_ids, target_weight, ...)

    With a teacher's largest n probabilities q, `tail_weight=1 - q.sum(-1)` gives the KL of n classes and the rest.

    input is [..., hidden], linear_weight [classes, hidden], linear_bias [classes]; target_ids and target_weight [..., n], n from 1
    to 128, as in cross_entropy_ids. logp is float32 [..., n]. Logits are float32, whatever the type of input.

    tail=True or tail_weight [...]: a CrossEntropyIdsTailOutput, as in cross_entropy_ids. Such a call stores logits, in chunks, also
    where one without a tail stores none in bfloat16.

    workspace_mib and fast_logits: as in linear_cross_entropy. Where a gradient is wanted, forward refuses a workspace_mib in which
    backward would not run. backward computes the logits again. A linear_weight of 16 bits gets its gradient from sums in float.
    There is no keep: backward has no saved logits to read. The other arguments are those of cross_entropy.

    max_counted, if not 0, is an upper bound of the tokens that count. The matmuls then have so many rows, and the input of the
    other tokens may be anything. If more count, all results and gradients are NaN. A token counts unless each of its ids is
    ignore_index, or outside the classes with a weight of 0. So an id of the classes counts even if its weight, or row_weight, is
    0. There is no max_counted with group. If none count, give 1: 0 is no bound.

    group and shards: as in linear_cross_entropy, whose ranks each have some of the classes; ids are those of all classes, and
    alike on all ranks, as are their weights. The results have the same bits on all ranks. Forward has one all-gather, of 16 bytes
    a token and the logits of its ids; backward sums the gradient of input. Logits are stored.

    sequence_parallel=True: input is this rank's tokens alone, as in linear_cross_entropy; target_ids has the ids of all.
    vocab_slices: as there, without max_counted."""
    _tensors(input=input, linear_weight=linear_weight, target_ids=target_ids)
    _plain("linear_cross_entropy_ids", input=input, linear_weight=linear_weight, target_ids=target_ids)
    _, z_loss, softcap, logit_scale, factor = _options(0.0, z_loss, softcap, logit_scale, temperature)
    if type(ignore_index) is not int or is_compiling():
        ignore_index = _ignored(ignore_index)
    max_counted = _counted(max_counted, group, vocab_slices)
    parts = _parts(sequence_parallel, group, input, target_ids, "target_ids")
    input, linear_bias = _scaled_head(input, linear_bias, factor, group, parts)
    classes = linear_weight.shape[0]
    ranks = _split(group, shards, vocab_slices, classes, linear_weight.device, "linear_weight has {} rows")
    if ranks:
        classes = sum(ranks[1])
    if CHECK_TARGETS and not is_compiling() and input.dim():
        used = target_ids if target_weight is None else target_ids.masked_fill(target_weight == 0, ignore_index)
        _check_targets(used, ignore_index, classes, "target_ids")
    if denominator is not None:
        denominator = _denominator(denominator, input)
    options = (input, linear_weight, target_ids, target_weight, tail_weight, linear_bias,
               _value(_REDUCTIONS, "reduction", reduction), ignore_index, 0.0, z_loss, softcap, logit_scale, zero_when_empty,
               denominator, row_weight, _mib(workspace_mib), fast_logits, max_counted)
    op = _ops.linear_cross_entropy_ids.default if is_compiling() else _C.linear_cross_entropy_ids
    if ranks:
        op, ranks = _ops.linear_cross_entropy_ids_parallel.default, (*ranks, parts)
    loss, logp, rest = op(*options, *ranks, bool(tail))
    return CrossEntropyIdsOutput(loss, logp) if rest is None else CrossEntropyIdsTailOutput(loss, logp, rest)


def linear_support(input, linear_weight, ids, offsets, target=None, ignore_index=-100, *, linear_bias=None, teacher_logp=None,
                   softcap=0.0, logit_scale=1.0, temperature=1.0, group=None, shards=None, sequence_parallel=False):
    """Log-probabilities over a support: of each token the logits of some ids alone, as a sampler's top-p and top-k kept them, and a
    softmax over these. A SupportOutput, with gradients for input, linear_weight and linear_bias. Per token, without the loop:

        mine = slice(offsets[t], offsets[t + 1])
        z = logit_scale * F.linear(input[t], linear_weight[ids[mine]], linear_bias[ids[mine]])
        z = softcap * torch.tanh(z / softcap) if softcap else z
        lse[t], support_logp[mine] = z.logsumexp(-1), z.log_softmax(-1)
        logp[t] = support_logp[mine][ids[mine] == target[t]]             # of the first one, where an id comes twice
        entropy[t] = -(support_logp[mine].exp() * support_logp[mine]).sum()
        kl[t] = (teacher_logp[mine].exp() * (teacher_logp[mine] - support_logp[mine])).sum()

    Where a factor exp(...) is 0, its term is 0, not NaN. Results are float32.

    input is [..., hidden], linear_weight [classes, hidden], linear_bias [classes]; the last two may be float32 beside 16 bits. ids
    [entries] and offsets [tokens + 1] are int64 or int32; tokens is the product of [...]. Each offset is 0 to entries, and not below
    the one before. target is [...]. teacher_logp is [entries], and -inf where the teacher's probability is 0. It gets no gradient. For
    another loss, such as the reverse KL, use support_logp.

    lk does not compute the logits of all classes. For a token it reads only the rows of linear_weight that its ids name. The gradient
    of linear_weight is dense. A token's results do not depend on the other tokens.

    An ignored token, whose target is ignore_index, has results and gradients of 0. Where a token has no ids, an id outside the
    classes, or a target that is none of its ids, its results are NaN. Its gradient of input is NaN too, or 0 if all its upstream
    gradients are 0; it adds nothing to the other gradients. LK_CHECK_TARGETS=1 raises for an id or a target outside the classes.
    softcap, logit_scale and temperature as in linear_cross_entropy.

    group and shards: as in linear_cross_entropy, whose ranks each have some of the classes; ids and target are those of all classes
    and alike on all ranks. Forward sums 4 bytes for each entry over the ranks, backward the gradient of input.

    sequence_parallel=True: input is this rank's tokens alone, as in linear_cross_entropy; ids, offsets and target are of all."""
    _tensors(input=input, linear_weight=linear_weight, ids=ids, offsets=offsets)
    _plain("linear_support", input=input, linear_weight=linear_weight, ids=ids, offsets=offsets)
    _, _, softcap, logit_scale, factor = _options(0.0, 0.0, softcap, logit_scale, temperature)
    parts = _parts(sequence_parallel, group, input, target)
    input, linear_bias = _scaled_head(input, linear_bias, factor, group, parts)
    classes = linear_weight.shape[0]
    ranks = _split(group, shards, 0, classes, linear_weight.device, "linear_weight has {} rows")
    return _support(input, linear_weight, ids, offsets, target, ignore_index, linear_bias, teacher_logp, softcap, logit_scale, classes,
                    ranks, parts)


def _support(input, weight, ids, offsets, target, ignore_index, bias, teacher_logp, softcap, logit_scale, classes, ranks, parts=1):
    """linear_support, or without a weight support. classes: of this rank; ranks: of _split."""
    of_op = ("", 0, 0, 1)
    if ranks:
        group, shards, rank, _ = ranks
        classes = sum(shards)
        of_op = (group, sum(shards[:rank]), classes, parts)
    if type(ignore_index) is not int or is_compiling():
        ignore_index = _ignored(ignore_index)
    if CHECK_TARGETS and not is_compiling() and input.dim():
        used = ids[int(offsets[0]):int(offsets[-1])]
        if target is not None:
            _check_targets(target, ignore_index, classes)
            used = used.masked_fill((target == ignore_index).flatten().repeat_interleave(offsets.diff()), 0)
        _check_targets(used, None, classes, "ids")
    return SupportOutput(*_ops.linear_support.default(input, weight, ids, offsets, target, bias, teacher_logp, softcap, logit_scale,
                                                      ignore_index, *of_op))


def support(logits, ids, offsets, target=None, ignore_index=-100, *, teacher_logp=None, softcap=0.0, logit_scale=1.0, temperature=1.0,
            group=None, shards=None):
    """linear_support of logits [..., classes] that are there already: a SupportOutput, with a gradient for logits. Per token, without
    the loop:

        mine = slice(offsets[t], offsets[t + 1])
        z = logit_scale * logits[t, ids[mine]].float()
        z = softcap * torch.tanh(z / softcap) if softcap else z
        lse[t], support_logp[mine] = z.logsumexp(-1), z.log_softmax(-1)

    and logp, entropy and kl from these, as there. The other arguments are those of linear_support. Ignored tokens, and tokens with
    wrong ids or a wrong target, have the results that they have there. The gradient of a wrong one is NaN in all its columns, or 0 if
    all its upstream gradients are 0.

    Of a row lk reads only the logits that its ids name. Rows may lie at any one distance, as those of logits[..., :classes] do. Any other
    tensor is copied, logits[:, :-1] of [batch, tokens, classes] say: rather give its last tokens no ids, and ignore_index as target. The
    gradient is dense, in logits' type, and 0 at all other classes. backward does not read logits: no memory of them is kept, and they
    may be overwritten before it. Autocast changes nothing.

    logit_scale and temperature may be tensors, and get gradients: one number, or one for each token, as in cross_entropy. It costs a
    float32 product of the logits, and its gradient.

    group: a ProcessGroup of torch.distributed whose ranks each have some of the classes: logits are this rank's columns, and the
    gradient is that of them. ids and target are those of all classes and alike on all ranks. shards is how many classes each rank has;
    without it all have as many. logit_scale and temperature are numbers then. Forward sums 4 bytes for each entry over the ranks;
    backward has no collective."""
    _tensors(logits=logits, ids=ids, offsets=offsets)
    _plain("support", logits=logits, ids=ids, offsets=offsets)
    _, _, softcap, logit_scale, factor = _options(0.0, 0.0, softcap, logit_scale, temperature)
    logits = _scaled_logits(logits, factor, group)
    classes = logits.shape[-1] if logits.dim() else 0
    ranks = _split(group, shards, 0, classes, logits.device, "logits has {} classes")
    return _support(logits, None, ids, offsets, target, ignore_index, None, teacher_logp, softcap, logit_scale, classes, ranks)


def linear_topk(input, linear_weight, k, *, linear_bias=None, seed=None, offset=None, softcap=0.0, logit_scale=1.0, temperature=1.0,
                workspace_mib=None, group=None, shards=None):
    """The k largest logits of each token of a head, or a draw of k ids, without storing the logits of all tokens: a TopkOutput. With
    the softmax over all classes:

        z = logit_scale * F.linear(input, linear_weight, linear_bias).float()
        z = softcap * torch.tanh(z / softcap) if softcap else z
        lse = z.logsumexp(-1)
        logp, ids = torch.topk(z - lse[..., None], k)

    input is [..., hidden], linear_weight [classes, hidden], linear_bias [classes]; the last two may be float32 beside 16 bits. k is 1 to
    64, and at most the number of classes. The largest comes first, of equal logits the one of the smallest class. logp [..., k] and
    lse [...] are float32, ids [..., k] int64. Logits are float32, whatever the type.

    The results have no gradient. An input that requires one is a ValueError: detach it, or call this under torch.no_grad(). linear_weight
    may require one. For a loss over these ids, such as the reverse KL over the student's own top k, give them to
    linear_cross_entropy_ids, whose logp have the softmax over all classes, or to linear_support, whose softmax is over these k:

        ids = linear_topk(x.detach(), weight, k).ids
        offsets = torch.arange(0, ids.numel() + 1, k, device=ids.device)
        logp = linear_support(x, weight, ids.flatten(), offsets).support_logp

    seed, int64 [...], a number for each token: the ids are drawn instead, with the probabilities exp(z - lse), without replacement and in
    the order of drawing. So ids[..., 0] is a sample of the model, and logp its log-probability. offset, int64 [...], is a second number;
    the draw follows from both, and from the logits, but not from the batch: give each token a pair of its own, such as the request's
    seed and the position.

        draw = linear_topk(x.detach(), weight, 1, seed=torch.full((tokens,), 1234, device=x.device), offset=position)

    A bias of -inf masks a class, which then comes after all others, with logp -inf; with a softcap nothing is masked. NaN comes first,
    and makes logp and lse of its token NaN. softcap, logit_scale and temperature: as in linear_cross_entropy. workspace_mib: as in
    linear_kl.

    group and shards: as in linear_cross_entropy, whose ranks each have some of the classes. ids are those of all classes, and all ranks
    have the same results. One all-gather has 8 k + 4 bytes for each token and rank, 4 k more with seed. seed and offset have to be the
    same on all ranks, and each rank's first class a multiple of 4."""
    _tensors(input=input, linear_weight=linear_weight, **{n: t for n, t in (("seed", seed), ("offset", offset)) if t is not None})
    _plain("linear_topk", input=input, linear_weight=linear_weight)
    if offset is not None and seed is None:
        raise ValueError("lk: offset is given without seed")
    _, _, softcap, logit_scale, factor = _options(0.0, 0.0, softcap, logit_scale, temperature)
    if factor is not None and factor.requires_grad and torch.is_grad_enabled():
        raise ValueError("lk: logit_scale or temperature requires a gradient, and gets none; detach it")
    input, linear_bias = _scaled_head(input, linear_bias, factor, group, 1)
    classes, k, mib = linear_weight.shape[0], _constant("k", k), _mib(workspace_mib)
    ranks = _split(group, shards, 0, classes, linear_weight.device, "linear_weight has {} rows")
    most = sum(ranks[1]) if ranks else classes
    if not 1 <= k <= 64 or k > most:
        raise ValueError(f"lk: k is {k}; it must be 1 to {min(64, most)}")
    if not ranks:
        return TopkOutput(*_ops.linear_topk.default(input, linear_weight, linear_bias, seed, offset, k, softcap, logit_scale, 0, mib)[:3])
    name, shards, rank, _ = ranks
    if seed is not None and any(n and sum(shards[:r]) % 4 for r, n in enumerate(shards)):
        raise ValueError(f"lk: shards is {list(shards)}; with seed each rank's first class must be a multiple of 4")
    counts = [min(k, n) for n in shards]
    own, rows = counts[rank], input.shape[:-1]
    if not own:  # a class that does not count: the op refuses here what it refuses on the other ranks
        linear_weight = torch.nn.functional.pad(linear_weight, (0, 0, 0, 1))
        linear_bias = None if linear_bias is None else torch.nn.functional.pad(linear_bias, (0, 1))
    logp, ids, lse, score = _ops.linear_topk.default(input, linear_weight, linear_bias, seed, offset, max(own, 1), softcap, logit_scale,
                                                     sum(shards[:rank]) if own else 0, mib)
    if not own:
        logp, ids, lse, score = logp[..., :0], ids[..., :0], torch.full_like(lse, -torch.inf), score[..., :0]
    parts = [score.view(torch.int32), ids.int()]
    if seed is not None:  # else score is z
        parts.append(torch.where(lse[..., None] == -torch.inf, -torch.inf, logp + lse[..., None]).view(torch.int32))
    bits = [torch.nn.functional.pad(t, (0, k - own)) for t in parts] + [lse[..., None].view(torch.int32)]
    ops, wide = torch.ops._c10d_functional, len(parts) * k + 1
    every = torch.cat(bits, -1).reshape(-1, wide)
    every = ops.wait_tensor.default(ops.all_gather_into_tensor.default(every, len(shards), name)).view(len(shards), *rows, wide)
    score, ids, *z = (torch.cat([every[i, ..., at:at + n] for i, n in enumerate(counts)], -1) for at in range(0, wide - 1, k))
    lse = every[..., -1].contiguous().view(torch.float32).logsumexp(0)
    # Of equal ones the first rank's come first, whose ids are smaller.
    score, order = score.view(torch.float32).sort(dim=-1, descending=True, stable=True)
    z = z[0].view(torch.float32).gather(-1, order[..., :k]) if z else score[..., :k]
    logp = torch.where(lse.isfinite()[..., None], z - lse[..., None], torch.nan)
    return TopkOutput(logp, ids.gather(-1, order[..., :k]).long(), lse)


def linear_kl(input, linear_weight, teacher_input, teacher_weight, *, linear_bias=None, teacher_bias=None, divergence="forward",
              beta=0.5, temperature=1.0, row_weight=None, reduction="mean", logit_scale=1.0, teacher_scale=1.0, softcap=0.0,
              teacher_softcap=0.0, denominator=None, zero_when_empty=False, return_entropy=False, workspace_mib=None,
              fast_logits=False, max_counted=0, grad_scale=None, group=None, shards=None, sequence_parallel=False,
              vocab_slices=0):
    """kl of two heads from their hidden states, without storing all logits of either: distillation, with gradients for input,
    linear_weight and linear_bias. The teacher's tensors get none: its weight and bias may be Parameters, but hidden states that
    require a gradient are refused: detach them, or run the teacher under torch.no_grad().

        kl(F.linear(input, linear_weight, linear_bias), F.linear(teacher_input, teacher_weight, teacher_bias))

    input is [..., hidden], linear_weight [classes, hidden], linear_bias [classes]. The teacher's are [..., teacher_hidden],
    [classes, teacher_hidden] and [classes]; its hidden size may be another one. teacher_input has input's type; weights and
    biases too, or they are float32 beside 16 bits. Where one vocabulary is padded, pass the first rows alone:
    teacher_weight[:classes]. A bias of -inf masks a class. Logits are float32, whatever the type. The loss is float32, [...] for
    "none".

    divergence, beta, temperature, scales, softcaps, reduction, denominator, zero_when_empty, return_entropy: as in kl.
    row_weight [...] is a factor of each token's loss and gradient: 0 for the prompt and padding, whose input and teacher_input
    must be finite unless max_counted is given. A mean is over all tokens, or with row_weight over the sum of the weights. Over
    the tokens of several micro-batches: reduction="sum" and row_weight=mask / tokens.

    max_counted, if not 0, is an upper bound of the tokens whose row_weight is not 0; it needs row_weight. The matmuls then have
    so many rows, and input and teacher_input of the other tokens may be anything. If more count, the loss and all gradients are
    NaN. If none count, give 1: 0 is no bound.

    workspace_mib bounds the memory for logits; None: what the fastest plan takes, at most a sixteenth of the device's memory.
    A small one computes the tokens in several chunks; a gradient of linear_weight in 16 bits may then be rounded after each of
    them (lk/linear_kl.md). fast_logits stores logits in input's type: less memory and traffic, and a rounding of each.

    A mean or sum computes its gradients in forward, in four matmuls, for the upstream gradient that is expected. grad_scale
    says which, as in cross_entropy. With reduction="none", and in float16 without grad_scale, backward computes the logits
    again, with an upstream gradient for each token: six matmuls. Nothing waits for the device.

    group and shards: as in linear_cross_entropy, whose ranks each have some of the classes: the same rows of both weights. The loss
    has the same bits on all ranks. Forward has one all-gather of 32 bytes a token; backward computes the logits again and sums the
    gradient of input. "jensen_shannon" and "total_variation" have a second all-gather, and compute the logits once more. There is no
    grad_scale and no max_counted then.

    sequence_parallel=True: input and teacher_input are this rank's tokens alone, as in linear_cross_entropy; row_weight is of all.
    Both are gathered in forward, and in backward again. Without row_weight nothing checks that all ranks have equally many.
    vocab_slices: as there, without grad_scale and max_counted."""
    _tensors(input=input, linear_weight=linear_weight, teacher_input=teacher_input, teacher_weight=teacher_weight)
    _plain("linear_kl", input=input, linear_weight=linear_weight, teacher_input=teacher_input, teacher_weight=teacher_weight)
    classes = linear_weight.shape[0]
    ranks = _split(group, shards, vocab_slices, classes, linear_weight.device, "linear_weight has {} rows")
    parts = _parts(sequence_parallel, group, input, row_weight, "row_weight")
    batchmean = reduction == "batchmean"
    reduced, over = _kl_reduction(reduction, denominator, input, sum(ranks[1]) if ranks else classes)
    over = over * parts if batchmean else over
    if reduced == 1 and zero_when_empty:
        rows = max(input.numel() * parts // max(input.shape[-1], 1), 1)
        reduced, over = 2, rows if row_weight is None else row_weight.sum(dtype=torch.float32)
    if zero_when_empty and over is not None:
        over = over + (over == 0)
    max_counted = _counted(max_counted, group, vocab_slices)
    options = _kl_options(divergence, beta, temperature, logit_scale, teacher_scale, softcap, teacher_softcap)
    linear_bias = _bias_beside(linear_bias, input)
    teacher_weight, teacher_bias = (t.detach() if isinstance(t, torch.nn.Parameter) else t for t in (teacher_weight, teacher_bias))
    arguments = (input, linear_weight, teacher_input, teacher_weight, linear_bias, _bias_beside(teacher_bias, input), row_weight, reduced,
                 *options, _mib(workspace_mib), fast_logits, max_counted)
    if ranks:
        _no_grad_scale(grad_scale, group)
        loss, entropy = _ops.linear_kl_parallel.default(*arguments, *ranks, parts, bool(return_entropy))
    else:
        if over is not None and (grad_scale is not None or _computed(input) != torch.float16):  # what reaches the op then
            grad_scale = (1.0 if grad_scale is None else grad_scale) / over
        op = _ops.linear_kl.default if is_compiling() else _C.linear_kl
        loss, entropy = op(*arguments, _grad_scale(grad_scale), bool(return_entropy))
    loss = loss if over is None else loss / over
    return (loss, entropy) if return_entropy else loss


def _scaled_head(input, linear_bias, factor, group, parts, row="token"):
    """input and linear_bias times the factor of _scales; linear_bias in a type that its op takes. row: what input has one of each."""
    if factor is not None and input.dtype in _TYPES and input.dim():
        if parts == 1:
            factor = _per_row(factor, input.shape[:-1])
        else:
            n = input.shape[0]
            factor = _per_row(_Shared.apply(factor.to(input.device), group.group_name), (n * parts, *input.shape[1:-1]))
            factor = factor.narrow(0, group.rank() * n, n) if factor.dim() else factor
        input = (input.float() * factor).to(input.dtype)
        if linear_bias is not None:
            if group is not None:  # whose other ranks have the rest of the gradient
                raise ValueError("lk: with group and linear_bias, logit_scale and temperature must be numbers")
            if factor.dim():
                raise ValueError(f"lk: logit_scale or temperature has a number for each {row}; with linear_bias it must be one")
            linear_bias = linear_bias.float() * factor
    if linear_bias is not None and input.dtype == torch.float32:
        linear_bias = _bias_beside(linear_bias, input)
    return input, linear_bias


def _bias_beside(bias, input):
    """A bias in input's type, where that is another floating type than its own."""
    if not isinstance(bias, Tensor) or bias.dtype == input.dtype or bias.dtype not in _TYPES or input.dtype not in _TYPES:
        return bias
    return bias.to(input.dtype)


def md_lrpe_cosine(x, theta, shape, prefix=0, activation=None, offset=()):
    """Rotates act(x) [b, h, n, d] by position: [b, h, n, 2 d]. theta is [h, e], n = prefix + the product of shape.

    theta may have one row for all heads, [1, e], one angle for all features of a head, [h, 1], or both; its gradient likewise.
    activation: None, "relu", "sigmoid", "silu", "softmax" over d or "softmax_tokens" over n. offset, a number per axis of shape,
    is added to positions: the next token after n others has shape (1,), offset (n,). It may be a tensor of int32 or int64 on
    the device of x, which is read there: one CUDA graph or compiled program then decodes every token. Nothing checks its numbers;
    all positions must be in (-2^31, 2^31)."""
    _tensors(x=x, theta=theta)
    moved = None
    if isinstance(offset, Tensor):
        moved, offset = offset.to(torch.int32) if offset.dtype == torch.int64 else offset, ()
    shape, offset = [_integer("shape", n) for n in shape], [_integer("offset", n) for n in offset]
    prefix, activation = _integer("prefix", prefix), _value(_ACTIVATIONS, "activation", activation)
    return _ops.md_lrpe_cosine.default(x, theta, shape, prefix, offset, moved, activation)


# torch.fx.symbolic_trace takes each of them as one node: they look at their arguments, which a Proxy does not allow.
for _name in ("logsumexp", "kl", "rms_norm", "add_rms_norm", "srms_norm", "glu", "rope", "cross_entropy",
              "cross_entropy_with_grad", "cross_entropy_stats", "cross_entropy_ids", "linear_cross_entropy", "linear_cross_entropy_stats",
              "linear_cross_entropy_ids", "linear_kl", "linear_support", "linear_topk", "support", "md_lrpe_cosine"):
    torch.fx.wrap(_name)
