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
    tensor of all logits is made; lk chooses the size of a chunk, and chunk_size is for the mean of capped logits alone."""
    if not torch.is_autocast_enabled(hidden.device.type):
        weight, bias = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
    head = dict(linear_bias=bias, softcap=final_logit_softcapping or 0.0, logit_scale=logit_scale)
    if not {"entropy", "is_top1", "log_sum_sq_probs"} & set(outputs):
        loss = linear_cross_entropy(hidden, weight, targets, reduction="none", temperature=temperature, **head)
        out = None
    else:
        out = linear_cross_entropy_stats(hidden, weight, targets, reduction="none", temperature=temperature, **head)
        loss = out.loss
    squares = mean = None
    with torch.no_grad():
        if "log_sum_sq_probs" in outputs:  # p^2 = exp(2 z - 2 lse), and 2 z are the logits at half the temperature
            twice = linear_cross_entropy_stats(hidden, weight, targets, reduction="none", temperature=temperature / 2, **head)
            squares = twice.lse - 2 * out.lse
        if "mean_logits" in outputs:
            mean = _mean(hidden, weight, bias, chunk_size, final_logit_softcapping, logit_scale) / temperature
    return (-loss, out.entropy if "entropy" in outputs else None, squares, mean,
            out.argmax == targets if "is_top1" in outputs else None)


def _mean(hidden, weight, bias, chunk_size, cap, scale):
    hidden = hidden.float()
    if cap is None:
        mean = hidden @ weight.mean(0, dtype=torch.float32)
        return scale * (mean if bias is None else mean + bias.mean(dtype=torch.float32))
    total = hidden.new_zeros(hidden.shape[0])
    for i in range(0, weight.shape[0], chunk_size):
        rows = slice(i, i + chunk_size)
        z = torch.nn.functional.linear(hidden, weight[rows].float(), None if bias is None else bias[rows].float())
        total += (cap * torch.tanh(z * (scale / cap))).sum(-1)
    return total / weight.shape[0]


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
