#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Multi-token prediction with lk_torch: a head's loss at several depths by one call of linear_cross_entropy, against a call for
each depth, and against plain PyTorch in float64.

    PYTHONPATH=packages/torch python3 examples/torch/mtp.py [--device cpu|cuda] [--check]

Depth 1 predicts the next token, depth k the one k places on; the last k tokens of a sequence have none. All depths have one head.
With D depths beyond the first

    loss = L_1 + lambda / D (L_2 + ... + L_{D+1}),    L_k: the sum of depth k's cross entropies, divided by the targets of depth 1

This is one mean with a weight for each token. Hidden states and targets of all depths lie side by side, as more tokens. row_weight
is 1 at depth 1 and lambda / D at the others. denominator is the number of targets of depth 1; without it the mean would divide by
those of all depths. For each depth's own mean, multiply its row_weight by the targets of depth 1 divided by its own.

One call makes one gradient of the weight. A call for each depth makes one each, and autograd adds them up.
The loss is that of DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024.
"""
import argparse
import statistics
import sys

import torch
import torch.nn.functional as F
from lk_torch import functional as LF

IGNORE = -100
LAMBDA, D = 0.3, 3
FACTORS = [1.0] + [LAMBDA / D] * D  # of depths 1 to D + 1


def targets(ids):
    """Of token ids [sequences, length] those that each depth predicts, a list of the same shapes."""
    return [F.pad(ids[:, k:], (0, k), value=IGNORE) for k in range(1, D + 2)]


def one_call(target, weight, *hidden):
    """The loss. hidden: [sequences, length, hidden] of each depth. Where a model writes them side by side, there is no cat."""
    row_weight = torch.tensor(FACTORS, device=weight.device).repeat_interleave(target[0].shape[1]).repeat(len(target[0]), 1)
    return LF.linear_cross_entropy(torch.cat(hidden, 1), weight, torch.cat(target, 1), ignore_index=IGNORE, row_weight=row_weight,
                                   denominator=(target[0] != IGNORE).sum())


def a_call_each(target, weight, *hidden):
    """The same by a call for each depth. grad_scale: the factor of its loss, so that its gradients have it from the start."""
    tokens = (target[0] != IGNORE).sum()
    return sum(factor * LF.linear_cross_entropy(x, weight, t, ignore_index=IGNORE, denominator=tokens, grad_scale=factor)
               for factor, x, t in zip(FACTORS, hidden, target))


def plain(target, weight, *hidden):
    """The same by PyTorch, with the logits of all depths."""
    losses = [F.cross_entropy(F.linear(x, weight).flatten(0, 1), t.flatten(), ignore_index=IGNORE, reduction="sum")
              for x, t in zip(hidden, target)]
    return sum(factor * loss for factor, loss in zip(FACTORS, losses)) / (target[0] != IGNORE).sum()


def results(function, target, *tensors):
    """The loss, and the gradients of the weight and of the hidden states of each depth."""
    leaves = [t.detach().requires_grad_() for t in tensors]
    loss = function(target, *leaves)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def measure(function, *given):
    """Milliseconds of forward and backward, a median, and MiB that they take beside the weight and the hidden states."""
    before, times = torch.cuda.memory_allocated(), []
    for i in range(13):
        if i == 3:
            torch.cuda.reset_peak_memory_stats()  # the first calls choose plans
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record(), results(function, *given), ended.record()
        torch.cuda.synchronize()
        times.append(began.elapsed_time(ended))
    return statistics.median(times[3:]), (torch.cuda.max_memory_allocated() - before) / 2**20


def inputs(sequences, length, hidden, vocab, dtype, device):
    """Targets, weight, and the hidden states of each depth."""
    ids = torch.randint(vocab, (sequences, length), device=device)
    ids[0, length // 2:] = IGNORE  # padding
    make = lambda *shape, spread: (torch.randn(shape, device=device) * spread).to(dtype)
    return targets(ids), make(vocab, hidden, spread=hidden**-0.5), *(make(sequences, length, hidden, spread=1) for _ in FACTORS)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--check", action="store_true", help="only check, do not measure")
    options = parser.parse_args()
    torch.manual_seed(1)
    passed = failed = 0
    for dtype, limit in ((torch.float32, 2e-5), (torch.bfloat16, 6e-3)):
        target, *tensors = inputs(3, 17, 32, 307, dtype, options.device)
        right = results(plain, target, *(t.double() for t in tensors))
        for kind, function in (("one call", one_call), ("a call each", a_call_each)):
            for i, (ours, exact) in enumerate(zip(results(function, target, *tensors), right)):
                off, most = float((ours.double() - exact).norm() / exact.norm()), limit if i else 1e-6
                name = ("loss", "gradient of the weight")[i] if i < 2 else f"gradient of the hidden states of depth {i - 1}"
                passed, failed = passed + (off <= most), failed + (not off <= most)
                print(f"{'ok  ' if off <= most else 'FAIL'}  {dtype}, {kind}, {name}: off by {off:.2g}, at most {most:.2g}")
    if options.device == "cpu" or options.check:
        print("      not measured: that takes a GPU, and no --check")
    else:
        given = inputs(2, 2048, 2048, 128256, torch.bfloat16, options.device)
        for kind, function in (("one call", one_call), ("a call each", a_call_each), ("PyTorch", plain)):
            print("      {}: {:.2f} ms, {:.0f} MiB".format(kind, *measure(function, *given)))
    print(f"{passed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
