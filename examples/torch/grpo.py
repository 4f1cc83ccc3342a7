#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""GRPO with lk_torch: log-probabilities and entropies of a language model's head, and their gradients, without its logits in
memory. Checked against plain PyTorch in float64, which makes all logits.

    PYTHONPATH=packages/torch python3 examples/torch/grpo.py [--device cpu|cuda]

The log-probability of a token is minus its cross entropy: reduction "none", and a temperature. What the loss
does with it (a ratio, clipping, a KL term) is PyTorch's; autograd brings one upstream gradient per token back to lk. Tokens of
the prompt and of the padding have the target IGNORE: their gradients are 0, and they count nowhere.

Then the same where the sampler drew from the largest probabilities that add up to TOP_P, and returned the ids that it kept. The
trainer takes log-probabilities among these ids: linear_support. Over the whole vocabulary they would be those of another policy,
and the ratios before the first step would not be 1.

Group relative policy optimization: Shao et al., "DeepSeekMath", 2024. Here with a bonus for entropy, and a mean over all
tokens.
"""
import argparse
import functools
import sys

import torch
import torch.nn.functional as F
from lk_torch import functional as LF

IGNORE = -100
TEMPERATURE, CLIP, BETA, BONUS = 0.7, 0.2, 0.04, 0.01  # of sampling; of the ratio; of the KL term; of the entropy
TOP_P = 0.8


def head(x, weight, target, rows=None):
    """Log-probabilities of the targets and entropies, by lk. Both are 0 where the target is IGNORE."""
    out = LF.linear_cross_entropy_stats(x, weight, target, reduction="none", ignore_index=IGNORE, temperature=TEMPERATURE)
    return -out.loss, out.entropy


def plain_head(x, weight, target, rows=None, kept=None):
    """The same by PyTorch, with logits [..., vocab]; of the classes that are kept, a mask of all tokens."""
    logits = x @ weight.t() / TEMPERATURE
    if kept is not None:
        logits = logits.masked_fill(~(kept if rows is None else kept[rows]), -torch.inf)
    logp = F.log_softmax(logits, -1)
    counted = target != IGNORE
    own = logp.gather(-1, target.clamp(min=0)[..., None])[..., 0]
    terms = torch.where(logp == -torch.inf, 0.0, logp.exp() * logp.clamp(min=-1e9))
    return torch.where(counted, own, 0.0), torch.where(counted, -terms.sum(-1), 0.0)


def top_p(logits):
    """Which classes a sampler keeps: the largest probabilities, until they add up to TOP_P."""
    p, order = logits.softmax(-1).sort(-1, descending=True)
    kept = p.cumsum(-1) - p < TOP_P
    return torch.zeros_like(kept).scatter(-1, order, kept)


class Support:
    """A sampler's answer for tokens [n, length]: the ids that it kept, of one token after another, and where each token's begin."""

    def __init__(self, kept):
        self.length, self.ids = kept.shape[1], kept.flatten(0, 1).nonzero()[:, 1]
        self.offsets = F.pad(kept.sum(-1).flatten().cumsum(0), (1, 0))

    def head(self, x, weight, target, rows=None):
        """As head, among the ids. rows: which of the n; neighbours. Their offsets may begin behind 0: other entries are not read."""
        first, last = (0, len(self.offsets) - 1) if rows is None else (int(rows[0]) * self.length, int(rows[-1] + 1) * self.length)
        out = LF.linear_support(x, weight, self.ids, self.offsets[first:last + 1], target, ignore_index=IGNORE, temperature=TEMPERATURE)
        return out.logp, out.entropy


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
        logp, entropy = policy(x[rows], weight, target[rows], rows)
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
        kept = top_p(x.double() @ start.double().t() / TEMPERATURE)
        support = Support(kept)
        drawn = torch.multinomial(kept.flatten(0, 1).float(), 1).view(n, length)
        ignored = torch.zeros(n, length, dtype=torch.bool, device=device)
        ignored[:, :2] = True                                         # the prompt
        for i in range(n):
            ignored[i, length - i % 4:] = True                        # the padding
        advantage = advantages(torch.rand(prompts, group, device=device)).view(n, 1)
        for kind, target, policy, exact in (
                ("all ids", torch.randint(vocab, (n, length), device=device).masked_fill(ignored, IGNORE), head, plain_head),
                ("the ids of top-p", drawn.masked_fill(ignored, IGNORE), support.head, functools.partial(plain_head, kept=kept))):
            with torch.no_grad():
                old, _ = policy(x, start, target)                     # as the completions were sampled
                again, _ = policy(x, start, target)
            check(f"{dtype}, {kind}: all ratios before the first step are 1", torch.equal(again, old), "the same bits from two calls")
            reference, _ = exact(x.double(), start.double() * 0.9, target)
            weight, losses = start, []
            for i in range(steps):  # several steps on the same completions, so that ratios leave 1 and some are clipped
                loss, dx, dweight = step(policy, x, weight, target, old, reference.float(), advantage, 2)
                right = step(exact, x.double(), weight.double(), target, old.double(), reference.float().double(),
                             advantage.double(), 1)
                name = f"{dtype}, {kind}, step {i}"
                close(f"{name}: loss", loss, right[0], 1e-4)
                close(f"{name}: gradient of the hidden states", dx, right[1], limit)
                close(f"{name}: gradient of the head's weight", dweight, right[2], limit)
                losses.append(float(right[0]))
                weight = (weight.float() - rate * dweight.float()).to(dtype)
            logp, _ = exact(x.double(), weight.double(), target)
            clipped = int(((torch.exp(logp - old.double()) - 1).abs() > CLIP).sum())
            check(f"{dtype}, {kind}: some ratios are clipped", clipped > 0, f"{clipped} of {int((target != IGNORE).sum())} tokens")
            check(f"{dtype}, {kind}: the loss falls", losses[-1] < losses[0], f"{losses[0]:.4f} to {losses[-1]:.4f}")
        print(f"      {len(support.ids)} ids were kept, of {kept.numel()}")
    print(f"{passed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
