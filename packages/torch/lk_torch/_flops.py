# SPDX-License-Identifier: MIT
"""What torch.utils.flop_counter counts for a call of a head: the matmuls that it makes, as PyTorch counts those
of a linear layer. Imported with the counter."""
import math

import torch
from torch.utils.flop_counter import register_flop_formula

_ops = torch.ops.lk


def _matmul(x, weight, most=0):
    """Of one matmul. Shapes are those of [..., hidden] and [classes, hidden]."""
    tokens = math.prod(x[:-1])
    return 2 * (min(tokens, most) if most > 0 else tokens) * weight[0] * weight[1]


def _register(op, x, *matmuls):
    """matmuls: how many, of x and the weight behind it; and of the next two tensors."""
    names = [a.name for a in op.default._schema.arguments]
    most = names.index("max_counted") if "max_counted" in names else None
    parts = names.index("parts") if "parts" in names else None  # x has one of so many

    def formula(*args, out_shape=None, **kwargs):
        split = () if parts is None else (args[parts],)
        return sum(number(args) * _matmul((*split, *args[at]), args[at + 1], args[most] if most else 0)
                   for at, number in zip((x, x + 2), matmuls))
    register_flop_formula(op)(formula)


def _register_support(op, x, products):
    """Likewise, of a product of each entry with hidden. Logits without a weight have none."""
    def formula(*args, out_shape=None, **kwargs):
        return 0 if args[x + 1] is None else products(args) * 2 * math.prod(args[x + 2]) * args[x][-1]
    register_flop_formula(op)(formula)


_register_support(_ops.linear_support_forward, 0, lambda a: 1)
_register_support(_ops.linear_support_backward, 6, lambda a: a[-3] + a[-2])
_register(_ops.linear_cross_entropy_forward, 0, lambda a: 1)
_register(_ops.linear_cross_entropy_stats_forward, 0, lambda a: 1)
_register(_ops.linear_cross_entropy_parallel_forward, 0, lambda a: 1)
_register(_ops.linear_cross_entropy_ids_forward, 0, lambda a: 1)
_register(_ops.linear_cross_entropy_ids_parallel_forward, 0, lambda a: 1)
# The last three arguments say which gradients are wanted. The bias's takes no matmul.
_register(_ops.linear_cross_entropy_forward_backward, 0, lambda a: 1 + a[-3] + a[-2])
# The logits are computed again where forward has not saved them.
_register(_ops.linear_cross_entropy_ids_backward, 6, lambda a: 1 + a[-3] + a[-2])
_register(_ops.linear_cross_entropy_ids_parallel_backward, 7, lambda a: 1 + a[-3] + a[-2])
_register(_ops.linear_cross_entropy_backward, 7, lambda a: (a[6] is None) + a[-3] + a[-2])
_register(_ops.linear_cross_entropy_parallel_backward, 8, lambda a: (a[7] is None) + a[-3] + a[-2])
_register(_ops.linear_topk_forward, 0, lambda a: 1)
_register(_ops.linear_kl_forward, 0, *(lambda a: 1,) * 2)
_register(_ops.linear_kl_forward_backward, 0, lambda a: 1 + a[-3] + a[-2], lambda a: 1)
_register(_ops.linear_kl_backward, 1, lambda a: 1 + a[-3] + a[-2], lambda a: 1)
_register(_ops.linear_kl_parallel_backward, 2, lambda a: 1 + a[-3] + a[-2], lambda a: 1)
# "jensen_shannon" and "total_variation", which are 2 and 3, have a second pass.
_register(_ops.linear_kl_parallel_forward, 0, *(lambda a: 1 + (a[8] >= 2),) * 2)
