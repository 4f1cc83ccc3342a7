# SPDX-License-Identifier: MIT
"""The loss head in the interface of TRL 1.16: the functions of its trl/kernels, with their arguments and results."""
import torch
from torch import Tensor

from .functional import cross_entropy_stats, linear_cross_entropy, linear_cross_entropy_stats

OPTIONAL_OUTPUTS = ("entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def chunked_log_probs(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature: float, chunk_size: int,
                      final_logit_softcapping: float | None = None, logit_scale: float = 1.0,
                      outputs: tuple[str, ...] = OPTIONAL_OUTPUTS):
    """(logprobs, entropy, log_sum_sq_probs, mean_logits, is_top1) of each token, float32 and bool: trl.kernels'
    ChunkedLogProbFunction.apply. What is not in `outputs` is None. logprobs and entropy have gradients.

    hidden is [N, H], weight [V, H], bias [V] or None, targets [N], numbers of classes. The logits are
    softcap(logit_scale * (hidden @ weight.T + bias)) / temperature, in float32: TRL's are rounded to hidden's type before. No
    tensor of all logits is made, and all outputs come from one matmul; lk chooses the size of a chunk, whatever chunk_size is."""
    if not torch.is_autocast_enabled(hidden.device.type):
        weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
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


class ChunkedLogProbFunction:
    """Has `apply` alone, for code that calls TRL's torch.autograd.Function of this name."""
    apply = staticmethod(chunked_log_probs)


def selective_log_softmax_and_entropy(logits: Tensor, index: Tensor, temperature: float = 1.0, row_mask: Tensor | None = None):
    """(logprobs, entropy) of each row, float32, with gradients: trl.kernels' function of this name. logits are [..., V], index
    and row_mask [...]; where row_mask is 0 both are 0."""
    classes = logits.shape[-1]
    if row_mask is not None:
        index = index.masked_fill(row_mask == 0, -100)
    out = cross_entropy_stats(logits.reshape(-1, classes), index.reshape(-1), reduction="none", temperature=temperature)
    logprobs, entropy = -out.loss.view(index.shape), out.entropy.view(index.shape)
    return logprobs, entropy if row_mask is None else entropy.masked_fill(row_mask == 0, 0.0)
