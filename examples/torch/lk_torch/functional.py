# SPDX-License-Identifier: MIT
"""lk's ops as functions. Where PyTorch has the function, its arguments come first, with its names and defaults."""
import math
from typing import NamedTuple

import torch
from torch.compiler import is_compiling

from . import _C

_ops = torch.ops.lk
_REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
_ACTIVATIONS = {None: 0, "none": 0, "relu": 1, "sigmoid": 2, "silu": 3, "softmax": 4, "softmax_tokens": 5}


class CrossEntropyOutput(NamedTuple):
    """Of cross_entropy_stats. loss, lse and entropy have gradients, the others have none. argmax of an ignored row is -1."""
    loss: torch.Tensor
    lse: torch.Tensor
    z_loss: torch.Tensor
    entropy: torch.Tensor
    argmax: torch.Tensor


class LinearCrossEntropyOutput(NamedTuple):
    """Of linear_cross_entropy_stats, likewise."""
    loss: torch.Tensor
    lse: torch.Tensor
    entropy: torch.Tensor
    argmax: torch.Tensor


def _value(table, name, key):
    if key not in table:
        raise ValueError(f"lk: {name} is {key!r}; it must be one of {', '.join(repr(k) for k in table)}")
    return table[key]


def logsumexp(input, dim, keepdim=False, *, scale=1.0, dtype=None):
    """log(sum(exp(scale * input))) over dim, as torch.logsumexp. dtype=torch.float32 returns it unrounded."""
    shape = None
    if not isinstance(dim, int):
        n = max(input.dim(), 1)
        dims = sorted(d % n for d in dim if -n <= d < n)
        if not dims or len(set(dims)) < len(dim):
            raise IndexError(f"lk: dim is {dim}; it must name dimensions of an input of shape {list(input.shape)}, none twice")
        if len(dims) > 1:  # one dimension of all of them; copied where they do not lie side by side
            shape = [1 if i in dims else n for i, n in enumerate(input.shape)]
            input = input.movedim(dims, tuple(range(-len(dims), 0))).flatten(-len(dims))
        dim = dims[0] if len(dims) == 1 else -1
    op = _ops.logsumexp.default if is_compiling() else _C.logsumexp
    out = op(input, dim, keepdim and shape is None, float(scale), dtype)
    return out.view(shape) if keepdim and shape is not None else out


def _norm(name, input, residual, normalized_shape, weight, eps, weight_offset):
    op = getattr(_ops, name).default if is_compiling() else getattr(_C, name)
    first = (input,) if residual is None else (input, residual)
    n = len(normalized_shape)
    if n == 1:
        return op(*first, normalized_shape[0], weight, eps, float(weight_offset))
    if n == 0 or tuple(normalized_shape) != tuple(input.shape[-n:]):
        raise ValueError(f"lk: normalized_shape is {list(normalized_shape)}, but input has shape {list(input.shape)}")
    if residual is not None and residual.shape != input.shape:
        raise ValueError(f"lk: residual has shape {list(residual.shape)} and input {list(input.shape)}")
    if weight is not None and weight.shape != input.shape[-n:]:
        raise ValueError(f"lk: weight has shape {list(weight.shape)}; it must be {list(normalized_shape)}")
    flat = [t.flatten(-n) for t in first]
    out = op(*flat, flat[0].shape[-1], None if weight is None else weight.flatten(), eps, float(weight_offset))
    return out.view(input.shape) if residual is None else tuple(t.view(input.shape) for t in out)


def rms_norm(input, normalized_shape, weight=None, eps=None, *, weight_offset=0.0):
    """F.rms_norm. weight has input's type or is float32; the result has input's type. The factor is weight_offset + weight;
    Gemma's weight_offset is 1."""
    return _norm("rms_norm", input, None, normalized_shape, weight, eps, weight_offset)


def add_rms_norm(input, residual, normalized_shape, weight=None, eps=None, *, weight_offset=0.0):
    """s = input + residual; returns (rms_norm(s), s), s in residual's type."""
    return _norm("add_rms_norm", input, residual, normalized_shape, weight, eps, weight_offset)


def srms_norm(input, eps=1e-6):
    """rms_norm over the last dimension, without weight."""
    return rms_norm(input, input.shape[-1:], None, eps)


def _grad_scale(grad_scale):
    """A number as a tensor of the CPU, which waits for no device."""
    if grad_scale is None or isinstance(grad_scale, torch.Tensor):
        return grad_scale
    if not (math.isfinite(grad_scale) and grad_scale):
        raise ValueError(f"lk: grad_scale is {grad_scale}; it must be finite and not 0")
    return torch.tensor(float(grad_scale))


def _loss(name, input, target, weight, ignore_index, reduction, label_smoothing, z_loss, softcap, logit_scale, zero_when_empty,
          denominator, *more):
    if input.dim() > 2:  # the classes last; logits of [N, C, d] are copied
        input = input.movedim(1, -1)
        if target.dim() > 2 and target.is_floating_point():  # probabilities of classes
            target = target.movedim(1, -1)
    op = getattr(_ops, name).default if is_compiling() else getattr(_C, name)
    return op(input, target, weight, _value(_REDUCTIONS, "reduction", reduction), ignore_index, float(label_smoothing),
              float(z_loss), float(softcap), float(logit_scale), zero_when_empty, denominator, *more)


def cross_entropy(input, target, weight=None, ignore_index=-100, reduction="mean", label_smoothing=0.0, *, z_loss=0.0,
                  softcap=0.0, logit_scale=1.0, zero_when_empty=False, denominator=None, grad_scale=None, inplace=False):
    """F.cross_entropy; the loss is float32. lk/cross_entropy.cuh has the formulas of all options.

    target: class numbers, or probabilities of classes in input's shape, of input's type or float32. They get no gradient.

    denominator, a tensor of one number, is what a mean divides by, instead of its own count (or sum of weights): the targets of
    all micro-batches, say. It gets no gradient.

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
    says so. Under torch.compile, and where no gradient is wanted, nothing is overwritten."""
    return _loss("cross_entropy", input, target, weight, ignore_index, reduction, label_smoothing, z_loss, softcap, logit_scale,
                 zero_when_empty, denominator, _grad_scale(grad_scale), inplace)


def cross_entropy_stats(input, target, weight=None, ignore_index=-100, reduction="mean", label_smoothing=0.0, *, z_loss=0.0,
                        softcap=0.0, logit_scale=1.0, zero_when_empty=False, denominator=None):
    """cross_entropy, and what the same reading of the logits knows besides: a CrossEntropyOutput."""
    return CrossEntropyOutput(*_loss("cross_entropy_stats", input, target, weight, ignore_index, reduction, label_smoothing,
                                     z_loss, softcap, logit_scale, zero_when_empty, denominator))


def _mib(workspace_mib):
    if workspace_mib is None:
        return 0
    if workspace_mib < 1:
        raise ValueError(f"lk: workspace_mib is {workspace_mib}; it must be at least 1")
    return workspace_mib


def _linear_loss(name, input, linear_weight, target, linear_bias, weight, reduction, ignore_index, label_smoothing, z_loss,
                 softcap, logit_scale, zero_when_empty, denominator, workspace_mib, fast_logits, max_counted, batch_invariant,
                 group, shards, *more):
    ranks = ()
    if group is not None:
        name += "_parallel"
        shards = [linear_weight.shape[0]] * group.size() if shards is None else shards
        if len(shards) != group.size():
            raise ValueError(f"lk: shards is {list(shards)}; it must have a number for each of {group.size()} ranks")
        ranks = (group.group_name, shards, group.rank())
    elif shards is not None:
        raise ValueError("lk: shards are those of a group; group is None")
    op = getattr(_ops, name).default if ranks or is_compiling() else getattr(_C, name)
    return op(input, linear_weight, target, linear_bias, weight, _value(_REDUCTIONS, "reduction", reduction), ignore_index,
              float(label_smoothing), float(z_loss), float(softcap), float(logit_scale), zero_when_empty, denominator,
              _mib(workspace_mib), fast_logits, max_counted, batch_invariant, *ranks, *more)


def shards_of(linear_weight, group):
    """How many rows each rank of the group has, for linear_cross_entropy's `shards`. It is a collective: call it once."""
    sizes = linear_weight.new_empty(group.size(), dtype=torch.int64)
    torch.distributed.all_gather_into_tensor(sizes, sizes.new_tensor([linear_weight.shape[0]]), group=group)
    return sizes.tolist()


def linear_cross_entropy(input, linear_weight, target, *, linear_bias=None, weight=None, reduction="mean", ignore_index=-100,
                         label_smoothing=0.0, z_loss=0.0, softcap=0.0, logit_scale=1.0, zero_when_empty=False,
                         denominator=None, workspace_mib=None, fast_logits=False, max_counted=0, batch_invariant=False,
                         group=None, shards=None, keep=False, grad_scale=None):
    """cross_entropy(F.linear(input, linear_weight, linear_bias), target) without storing all logits.

    input is [..., hidden], target [...]. workspace_mib bounds the memory for logits; None: what the fastest plan takes, at most
    a sixteenth of the device's memory. fast_logits stores them in input's type. grad_scale: as in cross_entropy.
    max_counted, if not 0, bounds the targets that are not ignored; the matmuls then have only so many rows. denominator: as in
    cross_entropy. batch_invariant=True: a token's loss has the same bits whatever the other tokens are, in bfloat16 on sm_90a;
    gradients are then made in backward.

    keep=True is for a loss per token, reduction="none", or one in float16, whose gradients are made in backward. Forward keeps
    all logits for it until the graph is freed, whatever workspace_mib says, and backward does not compute them again: two
    matmuls, not three. A logit takes 4 bytes; with fast_logits and a 16-bit input it takes 2. In bfloat16 on sm_90a (H100,
    H200) without label_smoothing, exponentials of 2 bytes are kept instead, if there are more than 2 * hidden classes, or more
    than 2048 and no multiple of 8. For these, hidden must be a multiple of 8, or nothing is kept. Any other mean or sum makes
    its gradients in forward. There, and with batch_invariant, keep changes nothing.

    group: a ProcessGroup of torch.distributed whose ranks each have some of the classes, a vocabulary-parallel head. Then
    linear_weight and linear_bias are this rank's rows, and ranks have them in order; all ranks have as many, or shards says how
    many each has (shards_of finds out; 0 is good). input, target, weight and denominator are those of all classes, and alike on
    all ranks, as are the options. The results are the same bits on all ranks. backward gives input the sum of all ranks'
    gradients, and must get the same upstream gradient on each. It makes all gradients; keep=True then is good for any
    reduction, and keeps exponentials or nothing. All ranks make the call."""
    return _linear_loss("linear_cross_entropy", input, linear_weight, target, linear_bias, weight, reduction, ignore_index,
                        label_smoothing, z_loss, softcap, logit_scale, zero_when_empty, denominator, workspace_mib, fast_logits,
                        max_counted, batch_invariant, group, shards, keep, *(() if group else (_grad_scale(grad_scale),)))


def linear_cross_entropy_stats(input, linear_weight, target, *, linear_bias=None, weight=None, reduction="mean",
                               ignore_index=-100, label_smoothing=0.0, z_loss=0.0, softcap=0.0, logit_scale=1.0,
                               zero_when_empty=False, denominator=None, workspace_mib=None, fast_logits=False, max_counted=0,
                               batch_invariant=False, group=None, shards=None):
    """linear_cross_entropy, and what the same logits give besides: a LinearCrossEntropyOutput."""
    return LinearCrossEntropyOutput(*_linear_loss(
        "linear_cross_entropy_stats", input, linear_weight, target, linear_bias, weight, reduction, ignore_index,
        label_smoothing, z_loss, softcap, logit_scale, zero_when_empty, denominator, workspace_mib, fast_logits, max_counted,
        batch_invariant, group, shards))


def md_lrpe_cosine(x, theta, shape, prefix=0, activation=None, offset=()):
    """Rotates act(x) [b, h, n, d] by position: [b, h, n, 2 d]. theta is [h, e], n = prefix + the product of shape.

    theta may have one row for all heads, [1, e], one angle for all features of a head, [h, 1], or both; its gradient likewise.
    activation: None, "relu", "sigmoid", "silu", "softmax" over d or "softmax_tokens" over n. offset, a number per axis of shape,
    is added to positions: the next token after n others has shape (1,), offset (n,)."""
    return _ops.md_lrpe_cosine.default(x, theta, shape, prefix, offset, _value(_ACTIVATIONS, "activation", activation))
