#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""A sampler's and a trainer's log-probabilities, equal in every bit: by lk_torch, for any batch and any number of ranks.

    PYTHONPATH=packages/torch python3 examples/torch/parity.py [--device cpu|cuda] [--check]

A sampler computes the log-probabilities of the tokens that it draws, some tokens at a time, on one GPU or a few. A trainer computes
those of the same tokens again, all at a time, with the classes split over other GPUs. Policy gradients take exp(trainer's - sampler's),
which is 1 before the first step. It is not 1 if sums come in another order: then the first step is already off the policy.

    out = LF.linear_cross_entropy_stats(x, w, y, reduction="none", batch_invariant=True, vocab_slices=8, group=group)

batch_invariant=True: a token's results do not depend on the tokens beside it. vocab_slices=8: the classes are in 8 slices, each rank
has some of them, and all merge the 8 states in one order. So 1, 2, 4 and 8 ranks get the same bits. Each rank's rows of the weight
are whole slices: rank r of n has slices 8 r / n to 8 (r + 1) / n - 1. bfloat16 on sm_90a (H100, H200), or on the simulator.

Here a sampler without a group takes 1, 2, 3, 8, 33 and 64 tokens at a time. Trainers with 2 and 4 ranks (GPUs, or processes) take
all 64. Their log-probabilities and entropies are compared bit by bit, and the trainers' first ratios with 1. The gradients are
compared with those of plain PyTorch in float64. Then the same tokens without vocab_slices, to see that it matters.
"""
import argparse
import socket
import statistics
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lk_torch import functional as LF

TOKENS, HIDDEN, CLASSES, SLICES = 64, 64, 8 * 760, 8
TEMPERATURE = 0.7
BATCHES, RANKS = (1, 2, 3, 8, 33, 64), (2, 4)


def inputs(device):
    """The same on all ranks: hidden states, weight, targets, advantages."""
    made = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(shape, generator=made)
    x, w, advantage = draw(TOKENS, HIDDEN).bfloat16(), (3 * draw(CLASSES, HIDDEN) / HIDDEN**0.5).bfloat16(), draw(TOKENS)
    y = torch.randint(CLASSES, (TOKENS,), generator=made)
    return [t.to(device) for t in (x, w, y, advantage)]


def head(x, w, y, slices=SLICES, group=None):
    """Log-probabilities of the targets, and entropies."""
    out = LF.linear_cross_entropy_stats(x, w, y, reduction="none", temperature=TEMPERATURE, batch_invariant=True,
                                        vocab_slices=slices, group=group)
    return -out.loss, out.entropy


def sample(x, w, y, tokens, slices=SLICES):
    """What a sampler finds, so many tokens at a time."""
    parts = [head(x[i:i + tokens], w, y[i:i + tokens], slices) for i in range(0, len(x), tokens)]
    return [torch.cat(part) for part in zip(*parts)]


def step(x, w, y, advantage, old, logp):
    """The gradients of the first step's loss, and its ratios."""
    ratio = (logp - old).exp()
    return torch.autograd.grad(-(ratio * advantage).mean(), (x, w)), ratio


def train(rank, ranks, port, folder, device):
    """A rank of a trainer. It leaves its results in a file."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", f"tcp://localhost:{port}", rank=rank, world_size=ranks)
    x, w, y, advantage = inputs(device)
    x, w = x.requires_grad_(), w.chunk(ranks)[rank].clone().requires_grad_()
    old = torch.load(f"{folder}/sampled")[0].to(device)
    logp, entropy = head(x, w, y, group=dist.group.WORLD)
    (dx, dw), ratio = step(x, w, y, advantage, old, logp)
    free = head(x, w, y, 0, dist.group.WORLD)[0]  # without vocab_slices
    torch.save([t.detach().cpu() for t in (logp, entropy, ratio, dx, dw, free)], f"{folder}/{ranks}.{rank}")
    dist.barrier()
    dist.destroy_process_group()


def run(ranks, folder, device):
    """The results of all ranks of a trainer."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    torch.multiprocessing.spawn(train, (ranks, port, folder, device), ranks)
    return [torch.load(f"{folder}/{ranks}.{rank}") for rank in range(ranks)]


def measure(tokens, hidden=4096, classes=151936):
    """Milliseconds of the head's forward: plain calls, batch invariant ones, and with slices too."""
    x, w = (torch.randn(n, hidden, device="cuda", dtype=torch.bfloat16) * 0.02 for n in (tokens, classes))
    y = torch.randint(classes, (tokens,), device="cuda")

    def time(**more):
        times = []
        for i in range(25):
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            for _ in range(10):
                LF.linear_cross_entropy(x, w, y, reduction="none", **more)
            ended.record(), torch.cuda.synchronize()
            times.append(began.elapsed_time(ended) / 10)
        return statistics.median(times[5:])

    with torch.no_grad():
        return time(), time(batch_invariant=True), time(batch_invariant=True, vocab_slices=SLICES)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--check", action="store_true", help="only check, do not measure")
    options = parser.parse_args()
    counts = [0, 0]

    def verdict(name, right, why=""):
        counts[not right] += 1
        print(f"{'ok  ' if right else 'FAIL'}  {name}{why}", flush=True)

    def differ(a, b):
        return int((a.cpu() != b.cpu()).sum())

    if options.device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        return print("skipped: batch_invariant is for sm_90a (H100, H200)\n0 passed, 0 failed")
    x, w, y, advantage = inputs(options.device)
    plain = (x.double().requires_grad_(), w.double().requires_grad_())
    right = -F.cross_entropy(F.linear(*plain) / TEMPERATURE, y, reduction="none")
    exact = torch.autograd.grad(-((right - right.detach()).exp() * advantage).mean(), plain)
    with tempfile.TemporaryDirectory() as folder:
        sampled = sample(x, w, y, 8)
        torch.save([t.cpu() for t in sampled], f"{folder}/sampled")
        off = float((sampled[0].double() - right.detach()).abs().max())
        verdict(f"log-probabilities: off by {off:.2g} from float64, at most 1e-05", off <= 1e-5)
        for n in BATCHES:
            counted = [differ(a, b) for a, b in zip(sample(x, w, y, n), sampled)]
            verdict(f"sampler, {n} tokens at a time: {counted[0]} of {TOKENS} log-probabilities and {counted[1]} entropies differ",
                    counted == [0, 0])
        for ranks in RANKS:
            if options.device == "cuda" and torch.cuda.device_count() < ranks:
                print(f"      skipped: a trainer with {ranks} ranks needs {ranks} GPUs, and there is {torch.cuda.device_count()}")
                continue
            print(f"      a trainer with {ranks} ranks starts", flush=True)
            results = run(ranks, folder, options.device)
            for rank, (logp, entropy, ratio, dx, dw, _) in enumerate(results):
                counted = differ(logp, sampled[0]), differ(entropy, sampled[1]), differ(ratio, torch.ones(TOKENS))
                verdict(f"trainer, rank {rank} of {ranks}: {counted[0]} log-probabilities and {counted[1]} entropies differ, "
                        f"{counted[2]} ratios are not 1", counted == (0, 0, 0))
            dx, dw = results[0][3], torch.cat([r[4] for r in results])
            for name, ours, theirs in (("x", dx, exact[0]), ("the weight", dw, exact[1])):
                off = float((ours.double() - theirs.cpu()).norm() / theirs.norm())
                verdict(f"trainer with {ranks} ranks, gradient of {name}: off by {off:.2g}, at most 0.02", off <= 0.02)
            print(f"      without vocab_slices {differ(results[0][5], sample(x, w, y, 8, 0)[0])} of {TOKENS} log-probabilities differ")
    if options.device == "cpu" or options.check:
        print("      not measured: that takes a GPU, and no --check")
    else:
        for tokens in (1, 8, 64, 256, 4096):
            print("      {} tokens x 4096 x 151936: {:.3f} ms, batch invariant {:.3f}, in 8 slices {:.3f}".format(tokens, *measure(tokens)))
    print(f"{counts[0]} passed, {counts[1]} failed")
    return counts[1] > 0


if __name__ == "__main__":
    sys.exit(main())
