#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""GRPO with lk_torch: log-probabilities and entropies of a language model's head, and their gradients, without its logits in
memory. Checked against plain PyTorch in float64, which makes all logits.

    PYTHONPATH=packages/torch python3 examples/torch/grpo.py [--device cpu|cuda]

The log-probability of a token is minus its cross entropy: reduction "none", and a temperature. What the loss
does with it (a ratio, clipping, a KL term) is PyTorch's; autograd brings one upstream gradient per token back to lk. Tokens of
the prompt and of the padding have the target IGNORE: their gradients are 0, and they count nowhere.

Group relative policy optimization: Shao et al., "DeepSeekMath", 2024. Here with a bonus for entropy, and a mean over all
tokens.
"""
import argparse
import sys

import torch
import torch.nn.functional as F
from lk_torch import functional as LF

IGNORE = -100
TEMPERATURE, CLIP, BETA, BONUS = 0.7, 0.2, 0.04, 0.01  # of sampling; of the ratio; of the KL term; of the entropy


def head(x, weight, target):
    """Log-probabilities of the targets and entropies, by lk. Both are 0 where the target is IGNORE."""
    out = LF.linear_cross_entropy_stats(x, weight, target, reduction="none", ignore_index=IGNORE, temperature=TEMPERATURE)
    return -out.loss, out.entropy


def plain_head(x, weight, target):
    """The same by PyTorch, with logits [..., vocab]."""
    logp = F.log_softmax(x @ weight.t() / TEMPERATURE, -1)
    counted = target != IGNORE
    own = logp.gather(-1, target.clamp(min=0)[..., None])[..., 0]
    return torch.where(counted, own, 0.0), torch.where(counted, -(logp.exp() * logp).sum(-1), 0.0)


def advantages(reward):
    """Of completions [prompts, group]: how much better than the others of the same prompt."""
    return (reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)


def loss_of(logp, entropy, old, reference, advantage, counted, tokens):
    """The part of these completions [n, length] in the mean over `tokens` tokens. advantage is [n, 1]."""
    ratio = torch.exp(logp - old)
    gain = torch.minimum(ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage)
    apart = reference - logp
    kl = torch.exp(apart) - apart - 1
    return -((gain - BETA * kl + BONUS * entropy) * counted).sum() / tokens


def step(policy, x, weight, target, old, reference, advantage, parts):
    """Loss, and gradients of x and weight, summed over micro-batches: a mean over the tokens of all of them."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    counted, total = target != IGNORE, 0.0
    for rows in torch.arange(len(target), device=target.device).chunk(parts):
        logp, entropy = policy(x[rows], weight, target[rows])
        loss = loss_of(logp, entropy, old[rows], reference[rows], advantage[rows], counted[rows], counted.sum())
        loss.backward()
        total += loss.detach()
    return total, x.grad, weight.grad


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    torch.manual_seed(1)
    prompts, group, length, hidden, vocab, steps, rate = 3, 4, 10, 32, 307, 4, 0.3
    passed = failed = 0

    def check(name, good, found):
        nonlocal passed, failed
        passed, failed = passed + bool(good), failed + (not good)
        print(f"{'ok  ' if good else 'FAIL'}  {name}: {found}")

    def close(name, ours, exact, limit):
        off = float((ours.double() - exact).norm() / exact.norm())
        check(name, off <= limit, f"off by {off:.2g}, at most {limit:.2g}")

    for dtype, limit in ((torch.float32, 2e-5), (torch.bfloat16, 6e-3)):
        n = prompts * group
        x = torch.randn(n, length, hidden, device=device).to(dtype)  # what the model below the head gives
        start = (torch.randn(vocab, hidden, device=device) * 2 * hidden**-0.5).to(dtype)
        target = torch.randint(vocab, (n, length), device=device)
        target[:, :2] = IGNORE                                        # the prompt
        for i in range(n):
            target[i, length - i % 4:] = IGNORE                       # the padding
        advantage = advantages(torch.rand(prompts, group, device=device)).view(n, 1)
        with torch.no_grad():
            old, _ = head(x, start, target)                           # as the completions were sampled
            again, _ = head(x, start, target)
        check(f"{dtype}: all ratios before the first step are 1", torch.equal(again, old), "the same bits from two calls")
        reference, _ = plain_head(x.double(), start.double() * 0.9, target)
        weight, losses = start, []
        for i in range(steps):  # several steps on the same completions, so that ratios leave 1 and some are clipped
            loss, dx, dweight = step(head, x, weight, target, old, reference.float(), advantage, 2)
            right = step(plain_head, x.double(), weight.double(), target, old.double(), reference.float().double(),
                         advantage.double(), 1)
            name = f"{dtype}, step {i}"
            close(f"{name}: loss", loss, right[0], 1e-4)
            close(f"{name}: gradient of the hidden states", dx, right[1], limit)
            close(f"{name}: gradient of the head's weight", dweight, right[2], limit)
            losses.append(float(right[0]))
            weight = (weight.float() - rate * dweight.float()).to(dtype)
        logp, _ = plain_head(x.double(), weight.double(), target)
        clipped = int(((torch.exp(logp - old.double()) - 1).abs() > CLIP).sum())
        check(f"{dtype}: some ratios are clipped", clipped > 0, f"{clipped} of {int((target != IGNORE).sum())} tokens")
        check(f"{dtype}: the loss falls", losses[-1] < losses[0], f"{losses[0]:.4f} to {losses[-1]:.4f}")
    print(f"{passed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
