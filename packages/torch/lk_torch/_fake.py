# SPDX-License-Identifier: MIT
"""What the kernels return, in shape and type alone: torch.compile asks for that, and a call with tensors on meta. An output that is
not wanted has no elements: AOTInductor takes no None where a schema says Tensor.

A size may be a symbol. torch.Size.numel() makes a number of it, and the program is for that size alone; math.prod does not."""
import functools
import math

import torch
from torch._prims_common import is_contiguous_or_false
from torch.fx.experimental.symbolic_shapes import guard_or_false

from . import _C

F32 = torch.float32


def public_name(op, name):
    """The name that functional.py has for an argument, as in csrc/lk_torch.h."""
    if name in ("weight", "bias") and op.startswith("linear_"):
        return f"linear_{name}"
    return {"x": "input", "logits": "input", "class_weight": "weight", "offset_device": "offset"}.get(name, name)


def fake(function):
    """Registers it. The dispatcher takes it where one tensor alone is on meta, so it compares their devices, as the kernels do."""
    op = function.__name__

    @functools.wraps(function)
    def beside(*args):
        tensors = [(i, t) for i, t in enumerate(args) if isinstance(t, torch.Tensor)]
        device = tensors[0][1].device
        for i, t in tensors:
            if t.device != device:
                name = getattr(getattr(torch.ops, _C.NAMESPACE), op).default._schema.arguments[i].name
                raise ValueError(f"lk: {public_name(op, name)} is on {t.device}, but {device} is needed")
        first = tensors[0][1]
        out = function(*args)
        nothing = lambda t: first.new_empty(0, dtype=F32) if t is None else t
        return tuple(map(nothing, out)) if isinstance(out, tuple) else out
    torch.library.register_fake(f"{_C.NAMESPACE}::{op}", beside)


def distance(x):
    """From a row of x to the next, as struct Rows in csrc/lk_torch.h sees them; None: x is copied."""
    cols, stride, packed = x.shape[-1], None, None  # packed: the stride that the next dimension must have
    if is_contiguous_or_false(x):
        return cols
    if not (guard_or_false(x.stride(-1) == 1) or guard_or_false(cols == 1)):
        return None
    for size, step in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1])):
        if guard_or_false(size == 1):
            continue
        if not (guard_or_false(step >= cols) and guard_or_false(step > 0) if packed is None else guard_or_false(step == packed)):
            return None
        stride, packed = step if packed is None else stride, step * size
    return cols if stride is None else stride


def gradient(x, dtype=None):
    """As make_gradient in csrc/lk_torch.h lays it out. Residues of symbols stay symbols: no program is for one of them alone."""
    apart, cols, vec = distance(x), x.shape[-1], 16 // x.element_size()
    pad, offset = (0, 0) if apart is None else ((apart - cols) % vec, x.storage_offset() % vec)
    packed = type(pad) is int and type(offset) is int and not pad and not offset
    if packed or guard_or_false(x.numel() == 0) or guard_or_false(8 * pad > cols):
        return x.new_empty(x.shape, dtype=dtype)
    strides, step, end = [1], cols + pad, cols
    for size in reversed(x.shape[:-1]):
        strides.insert(0, step)
        end, step = end + (size - 1) * step, step * size
    return x.new_empty(offset + end, dtype=dtype).as_strided(x.shape, strides, offset)


def rows(target):
    """The shape of class numbers, or of the rows of class probabilities."""
    return target.shape[:-1] if target.is_floating_point() else target.shape


def loss(x, target, reduction):
    return x.new_empty([] if reduction else rows(target), dtype=F32)


@fake
def rms_norm_forward(x, residual, weight, bias, eps, weight_offset, round_sum, keep):
    return (x.new_empty(x.shape), None if residual is None else residual.new_empty(x.shape),
            x.new_empty(x.shape[:-1], dtype=F32) if keep else None)


@fake
def rms_norm_gated_forward(x, gate, weight, eps, weight_offset, gate_first, keep):
    return x.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=F32) if keep else None


@fake
def rms_norm_gated_backward(dy, x, gate, rstd, weight, weight_offset, gate_first, want_dx, want_dgate, want_dweight):
    return (x.new_empty(x.shape) if want_dx else None, gate.new_empty(gate.shape) if want_dgate else None,
            weight.new_empty(weight.shape) if want_dweight else None)


@fake
def glu_forward(gate, up, *options):
    return gate.new_empty((*gate.shape[:-1], gate.shape[-1] if up is not None else gate.shape[-1] // 2))


@fake
def glu_backward(dy, gate, up, row_weight, *options):
    return tuple(t.new_empty(t.shape) if want else None for t, want in zip((gate, up, row_weight), options[-3:]))


def in_order(x):
    """As make_in_order in csrc/rope.cpp lays it out: no gaps, and its dimensions in the order of x's. A copy of x is packed."""
    n, stride, order = x.dim(), x.stride(), []
    last = guard_or_false(stride[-1] == 1) or guard_or_false(x.shape[-1] <= 1)
    if not last or any(guard_or_false(size > 1) and guard_or_false(step == 0) for size, step in zip(x.shape[:-1], stride[:-1])):
        return x.new_empty(x.shape)
    for i in range(n):
        at = i
        while at and i < n - 1 and guard_or_false(stride[order[at - 1]] < stride[i]):
            at -= 1
        order.insert(at, i)
    made = x.new_empty([x.shape[i] for i in order])
    return made if order == sorted(order) else made.permute([order.index(i) for i in range(n)])


@fake
def rope_forward(q, k, *options):
    return in_order(q), None if k is None else in_order(k)


@fake
def rope_backward(dy_q, dy_k, *options):
    q_weight, k_weight = options[7:9]
    want_q, want_k, want_q_weight, want_k_weight = options[-4:]
    return (in_order(dy_q) if want_q else None, in_order(dy_k) if want_k else None,
            q_weight.new_empty(q_weight.shape) if want_q_weight else None,
            k_weight.new_empty(k_weight.shape) if want_k_weight else None)


def fp8_scales(x, rows, cols, scaling):
    """As the kernel lays them out; None in TENSOR."""
    if scaling == 3:
        return x.new_empty([rows, (cols + 31) // 32], dtype=torch.float8_e8m0fnu)
    return x.new_empty([1 if scaling == 1 else (cols + 127) // 128, rows], dtype=F32).t() if scaling else None


@fake
def rms_norm_fp8_forward(x, residual, weight, eps, weight_offset, scaling, e5m2, power_of_two, scale_rounding, scale, want_amax,
                         want_transposed, round_sum, keep):
    dtype, cols = torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn, x.shape[-1]
    rows = math.prod(x.shape[:-1])
    scales = fp8_scales(x, rows, cols, scaling)
    return (x.new_empty(x.shape, dtype=dtype), None if scales is None else scales.view(*x.shape[:-1], scales.shape[1]),
            x.new_empty([], dtype=F32) if want_amax else None,
            x.new_empty([cols, rows], dtype=dtype) if want_transposed else None,
            fp8_scales(x, cols, rows, scaling) if want_transposed else None,
            None if residual is None else residual.new_empty(x.shape), x.new_empty(x.shape[:-1], dtype=F32) if keep else None)


@fake
def rms_norm_backward(dy, dsum, s, rstd, weight, bias, weight_offset, is_sum, want_dx, want_dweight):
    return (dy.new_empty(s.shape) if want_dx else None,
            s.new_empty(s.shape) if want_dx and is_sum and s.dtype != dy.dtype else None,
            weight.new_empty(weight.shape) if want_dweight else None, None if bias is None else bias.new_empty(bias.shape))


@fake
def logsumexp_forward(x, dim, keepdim, scale, dtype, keep):
    shape = list(x.shape)
    if shape:
        shape[dim:dim + 1] = [1] if keepdim else []
    out = x.new_empty(shape, dtype=dtype)
    return out, x.new_empty(out.numel() * (1 if dtype == F32 else 2), dtype=F32) if keep else None


@fake
def logsumexp_backward(dout, x, out, state, dim, scale):
    return gradient(x) if x.dim() and dim == x.dim() - 1 else x.new_empty(x.shape)


def of_rows(x):
    return x.new_empty(x.shape[:-1], dtype=F32)


@fake
def kl_forward(x, *options):
    return of_rows(x), of_rows(x) if options[-1] else None


@fake
def kl_backward(dloss, x, *options):
    return gradient(x)


@fake
def kl_parallel_forward(x, *options):
    return of_rows(x), of_rows(x) if options[-1] else None, x.new_empty((math.prod(x.shape[:-1]), 8), dtype=F32)


@fake
def kl_parallel_backward(dloss, x, *options):
    return gradient(x)


@fake
def md_lrpe_cosine_forward(x, theta, shape, prefix, offset, offset_device, activation):
    return x.new_empty([*x.shape[:3], 2 * x.shape[3]])


@fake
def md_lrpe_cosine_backward(dy, x, theta, shape, prefix, offset, offset_device, activation, want_dx, want_dtheta):
    return x.new_empty(x.shape) if want_dx else None, theta.new_empty(theta.shape) if want_dtheta else None


def even(n):
    return (n + 1) // 2 * 2


def state(logits, target, class_weight, reduction, floats):
    counts = reduction == 1 and not target.is_floating_point()
    head = (2 if class_weight is None else 4) if counts else 0
    return logits.new_empty(head + even(floats * math.prod(rows(target))), dtype=F32)


@fake
def cross_entropy_forward(logits, target, class_weight, reduction, *options):
    return loss(logits, target, reduction), state(logits, target, class_weight, reduction, 2) if options[-1] else None


def more(x, rows, statistics):
    return x.new_empty([3, *rows], dtype=F32) if statistics else None


@fake
def cross_entropy_stats_forward(logits, target, class_weight, reduction, *options):
    a, b, c, d = (loss(logits, target, r) for r in (reduction, 0, reduction, 0))
    return (a, b, c, d, target.new_empty(rows(target), dtype=torch.int64), more(logits, rows(target), options[-1]),
            state(logits, target, class_weight, reduction, 1))


@fake
def cross_entropy_forward_backward(logits, target, class_weight, reduction, *options):
    return loss(logits, target, reduction), gradient(logits, options[-1])


@fake
def cross_entropy_backward(dloss, dlse, dentropy, logits, *rest):
    return gradient(logits)


@fake
def cross_entropy_parallel_forward(logits, target, class_weight, reduction, *options):
    stats, statistics = options[-2:]
    a, b, c, d = (loss(logits, target, r) for r in (reduction, 0, reduction, 0))
    return (a, b, c, d, *(target.new_empty(target.shape, dtype=t) if stats else None for t in (F32, torch.int64)),
            more(logits, target.shape, statistics), state(logits, target, class_weight, reduction, 1))


@fake
def cross_entropy_parallel_backward(dloss, dlse, dentropy, logits, *rest):
    return gradient(logits)


def ids(x, target_ids, reduction, want_tail):
    """loss, logp and tail."""
    rows = target_ids.shape[:-1]
    return (x.new_empty([] if reduction else rows, dtype=F32), x.new_empty(target_ids.shape, dtype=F32),
            x.new_empty(rows, dtype=F32) if want_tail else None)


@fake
def cross_entropy_ids_forward(logits, target_ids, target_weight, tail_weight, reduction, *options):
    rows = math.prod(logits.shape[:-1])
    return *ids(logits, target_ids, reduction, options[-1]), logits.new_empty((2 if reduction == 1 else 0) + 2 * rows, dtype=F32)


@fake
def cross_entropy_ids_backward(dloss, dlogp, dtail, logits, *rest):
    return gradient(logits)


@fake
def cross_entropy_ids_parallel_forward(logits, target_ids, target_weight, tail_weight, reduction, *options):
    rows = math.prod(logits.shape[:-1])
    return *ids(logits, target_ids, reduction, options[-1]), logits.new_empty((2 if reduction == 1 else 0) + even(3 * rows), dtype=F32)


@fake
def cross_entropy_ids_parallel_backward(dloss, dlogp, dtail, logits, *rest):
    return gradient(logits)


def head(x, weight, bias, want_dx, want_dweight, want_dbias):
    return (x.new_empty(x.shape) if want_dx else None, weight.new_empty(weight.shape) if want_dweight else None,
            bias.new_empty(bias.shape) if want_dbias else None)


@fake
def linear_cross_entropy_forward(x, weight, target, bias, class_weight, reduction, *options):
    *wants, saved_bytes = options[-4:]
    return (loss(x, target, reduction), *(x.new_empty(rows(target), dtype=F32) if any(wants) else None for _ in range(2)),
            x.new_empty(saved_bytes, dtype=torch.uint8) if saved_bytes else None)


@fake
def linear_cross_entropy_forward_backward(x, weight, target, bias, class_weight, reduction, *options):
    return loss(x, target, reduction), *head(x, weight, bias, *options[-3:])


@fake
def linear_cross_entropy_stats_forward(x, weight, target, bias, class_weight, reduction, *options):
    per_token = [x.new_empty(rows(target), dtype=t) for t in (F32, F32, torch.int64)]
    return (loss(x, target, reduction), *per_token, more(x, rows(target), options[-1]), x.new_empty(rows(target), dtype=F32))


@fake
def linear_cross_entropy_backward(dloss, dlse, dentropy, lse, lse_low, entropy, saved, x, weight, target, bias, *options):
    return head(x, weight, bias, *options[-3:])


@fake
def linear_kl_forward(x, weight, teacher_input, teacher_weight, bias, teacher_bias, row_weight, reduction, *options):
    return x.new_empty([] if reduction else x.shape[:-1], dtype=F32), of_rows(x) if options[-4] else None


@fake
def linear_kl_forward_backward(x, weight, teacher_input, teacher_weight, bias, *options):
    return x.new_empty([], dtype=F32), of_rows(x) if options[-4] else None, *head(x, weight, bias, *options[-3:])


@fake
def linear_kl_backward(dloss, x, weight, teacher_input, teacher_weight, bias, *options):
    return head(x, weight, bias, *options[-3:])


@fake
def linear_kl_parallel_forward(x, weight, teacher_input, teacher_weight, bias, teacher_bias, row_weight, reduction, *options):
    parts, want_entropy = options[-5:-3]
    rows = x.shape[:-1] if parts == 1 else (x.shape[0] * parts, *x.shape[1:-1])
    return (x.new_empty([] if reduction else rows, dtype=F32), x.new_empty(rows, dtype=F32) if want_entropy else None,
            x.new_empty((math.prod(rows), 8), dtype=F32))


@fake
def linear_kl_parallel_backward(dloss, states, x, weight, teacher_input, teacher_weight, bias, *options):
    return head(x, weight, bias, *options[-3:])


@fake
def linear_cross_entropy_ids_forward(x, weight, target_ids, target_weight, tail_weight, bias, reduction, *options):
    return *ids(x, target_ids, reduction, options[-1]), *(x.new_empty(x.shape[:-1], dtype=F32) for _ in range(2))


@fake
def linear_cross_entropy_ids_backward(dloss, dlogp, dtail, lse, lse_low, tail, x, weight, target_ids, target_weight, tail_weight,
                                      bias, *options):
    return head(x, weight, bias, *options[-3:])


@fake
def linear_cross_entropy_ids_parallel_forward(x, weight, target_ids, target_weight, tail_weight, bias, reduction, *options):
    return *ids(x, target_ids, reduction, options[-1]), *(x.new_empty(target_ids.shape[:-1], dtype=F32) for _ in range(3))


@fake
def linear_cross_entropy_ids_parallel_backward(dloss, dlogp, dtail, lse, lse_low, tail, others, x, weight, target_ids, target_weight,
                                               tail_weight, bias, *options):
    return head(x, weight, bias, *options[-3:])


@fake
def linear_topk_forward(x, weight, bias, seed, offset, k, *options):
    rows, of_ids = x.shape[:-1], (*x.shape[:-1], k)
    return (x.new_empty(of_ids, dtype=F32), x.new_empty(of_ids, dtype=torch.int64), x.new_empty(rows, dtype=F32),
            x.new_empty(of_ids, dtype=F32))


@fake
def linear_support_forward(x, weight, ids, offsets, target, bias, teacher_logp, *options):
    parts = options[-1]
    rows = x.shape[:-1] if parts == 1 else (x.shape[0] * parts, *x.shape[1:-1])
    tokens = [x.new_empty(rows, dtype=F32) if there else None for there in (target is not None, True, True, teacher_logp is not None)]
    return *tokens, *(x.new_empty(ids.shape, dtype=F32) for _ in range(2))


@fake
def linear_support_backward(dlogp, dlse, dentropy, dkl, dsupport_logp, logits, x, weight, ids, offsets, target, bias, *options):
    return head(x, weight, bias, *options[-3:])


@fake
def linear_cross_entropy_parallel_forward(x, weight, target, bias, class_weight, reduction, *options):
    stats, statistics, saved_bytes = options[-3:]
    per_token = [x.new_empty(target.shape, dtype=F32) for _ in range(3)]
    with_stats = [x.new_empty(target.shape, dtype=t) if stats else None for t in (F32, torch.int64)]
    return (loss(x, target, reduction), *per_token, *with_stats, more(x, target.shape, statistics),
            x.new_empty(saved_bytes, dtype=torch.uint8) if saved_bytes else None)


@fake
def linear_cross_entropy_parallel_backward(dloss, dlse, dentropy, lse, lse_low, others, entropy, saved, x, weight, target, bias,
                                           *options):
    return head(x, weight, bias, *options[-3:])
