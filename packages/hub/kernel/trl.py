# SPDX-License-Identifier: MIT
"""The heads' losses in the interface of TRL 1.16: the functions of its trl/kernels, with their arguments and results."""
from __future__ import annotations

import torch
from torch import Tensor

from .functional import cross_entropy_stats, linear_cross_entropy, linear_cross_entropy_stats, linear_kl

OPTIONAL_OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def chunked_log_probs(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, chunk_size: int,
                      final_logit_softcapping: float | None = None, logit_scale: float = 1.0,
                      outputs: tuple[str, ...] = OPTIONAL_OUTPUTS):
    """(logprobs, entropy, log_sum_sq_probs, mean_logits, is_top1) of each token, float32 and bool: trl.kernels'
    ChunkedLogProbFunction.apply. What is not in `outputs` is None. logprobs and entropy have gradients.

    hidden is [N, H], weight [V, H], bias [V] or None, targets [N], numbers of classes. The logits are
    softcap(logit_scale * (hidden @ weight.T + bias)) / temperature, in float32: TRL's are rounded to hidden's type before. No
    tensor of all logits is made, and all outputs come from one matmul; lk chooses the size of a chunk, whatever chunk_size is. A
    float32 weight or bias beside 16-bit hidden states keeps its type, and so does its gradient."""
    weight, bias = _beside(weight, hidden), _beside(bias, hidden)
    head = dict(linear_bias=bias, softcap=final_logit_softcapping or 0.0, logit_scale=logit_scale)
    if not set(OPTIONAL_OUTPUTS) & set(outputs):
        loss = linear_cross_entropy(hidden, weight, targets, reduction="none", temperature=temperature, **head)
        return -loss, None, None, None, None
    statistics = bool({"log_sum_sq_probs", "mean_logits"} & set(outputs))
    out = linear_cross_entropy_stats(hidden, weight, targets, reduction="none", temperature=temperature, statistics=statistics,
                                     **head)
    return (-out.loss, out.entropy if "entropy" in outputs else None,
            out.log_sum_sq_probs if "log_sum_sq_probs" in outputs else None,
            out.mean_logits if "mean_logits" in outputs else None, out.argmax == targets if "is_top1" in outputs else None)


def _beside(t: Tensor | None, hidden: Tensor) -> Tensor | None:
    """In hidden's type, but float32, and under autocast, as it is."""
    if t is None or t.dtype == torch.float32 or torch.is_autocast_enabled(hidden.device.type):
        return t
    return t.to(hidden.dtype)


class ChunkedLogProbFunction:
    """Has `apply` alone, for code that calls TRL's torch.autograd.Function of this name."""
    apply = staticmethod(chunked_log_probs)


def chunked_divergence(student_hidden: Tensor, student_weight: Tensor, student_bias: Tensor | None, teacher_hidden: Tensor,
                       teacher_weight: Tensor, teacher_bias: Tensor | None, beta: float, temperature: float = 1.0,
                       student_logit_scale: float = 1.0, student_final_logit_softcapping: float | None = None,
                       teacher_logit_scale: float = 1.0, teacher_final_logit_softcapping: float | None = None):
    """(divergence, entropy) of each token, float32: TRL's ChunkedDivergenceFunction.apply. The student's three tensors have gradients,
    the teacher's none; entropy, the student's, has none.

    beta 0 is the forward KL(teacher || student), 1 the reverse one, and between them the generalized Jensen-Shannon divergence. The
    hidden states are [N, H], each model with an H of its own, the weights [V, H], the biases [V] or None. The teacher's tensors are
    read in student_hidden's type, its weight in float32 too. linear_kl rounds a bias to that type."""
    teacher = [t if t is None else t.detach() for t in (teacher_hidden, teacher_weight, teacher_bias)]
    if not torch.is_autocast_enabled(student_hidden.device.type):
        teacher[0] = teacher[0].to(student_hidden.dtype)
    return linear_kl(student_hidden, _beside(student_weight, student_hidden), teacher[0], _beside(teacher[1], student_hidden),
                     linear_bias=student_bias, teacher_bias=teacher[2], divergence="jensen_shannon", beta=beta,
                     temperature=temperature, reduction="none", logit_scale=student_logit_scale, teacher_scale=teacher_logit_scale,
                     softcap=student_final_logit_softcapping or 0.0, teacher_softcap=teacher_final_logit_softcapping or 0.0,
                     return_entropy=True)


class ChunkedDivergenceFunction:
    """Likewise."""
    apply = staticmethod(chunked_divergence)


def selective_log_softmax_and_entropy(logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None):
    """(logprobs, entropy) of each row, float32, with gradients: trl.kernels' function of this name. logits are [..., V], index
    and row_mask [...]; where row_mask is 0 both are 0."""
    classes = logits.shape[-1]
    if row_mask is not None:
        index = index.masked_fill(row_mask == 0, -100)
    out = cross_entropy_stats(logits.reshape(-1, classes), index.reshape(-1), reduction="none", temperature=temperature)
    logprobs, entropy = -out.loss.view(index.shape), out.entropy.view(index.shape)
    return logprobs, entropy if row_mask is None else entropy.masked_fill(row_mask == 0, 0.0)
