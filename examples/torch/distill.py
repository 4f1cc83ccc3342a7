#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""On-policy distillation with lk_torch: a student samples, a frozen teacher scores each token that it sampled, and the student
learns from the divergence of its head from the teacher's, over all words, without the logits of either in memory. Checked
against plain PyTorch in float64, which makes all logits.

    PYTHONPATH=packages/torch python3 examples/torch/distill.py [--device cpu|cuda]

The loss is KL(student || teacher), "reverse": it asks of the student to leave what the teacher thinks improbable. The samples
are the student's own, so it is trained where it will be. lk computes it from the hidden states of both, whose
sizes differ, and gives gradients to the student's alone. row_weight leaves out the prompt and what follows the end.

On-policy distillation: Agarwal et al., "On-Policy Distillation of Language Models", 2023.
"""
import argparse
import sys

import torch
import torch.nn.functional as F
from lk_torch import functional as LF

VOCAB, END, PROMPT, LENGTH, BATCH = 83, 0, 3, 14, 16
STEPS, RATE, PARTS = 31, 3e-2, 2  # of training; the parts are micro-batches


class Model(torch.nn.Module):
    """A language model small enough for a CPU: words, a recurrent layer, a head."""

    def __init__(self, hidden, spread):
        super().__init__()
        self.words = torch.nn.Embedding(VOCAB, hidden)
        self.layer = torch.nn.GRU(hidden, hidden, batch_first=True)
        self.head = torch.nn.Parameter(torch.randn(VOCAB, hidden) * spread)

    def forward(self, ids, state=None):
        """Hidden states [batch, length, hidden], each for the word after it, and the state to go on from."""
        return self.layer(self.words(ids), state)


@torch.no_grad()
def sample(student, prompt):
    """Ids [batch, LENGTH], by the student's own probabilities, and whether the word after each counts: of the answer, up to its
    end."""
    ids, (x, state) = prompt, student(prompt)
    while ids.shape[1] < LENGTH:
        new = torch.multinomial(F.softmax(x[:, -1] @ student.head.t(), -1), 1)
        ids, (x, state) = torch.cat([ids, new], 1), student(new, state)
    ended = (ids[:, PROMPT:] == END).cumsum(1) > 0             # from the first END on
    counted = torch.zeros_like(ids, dtype=torch.bool)
    counted[:, PROMPT - 1] = True                              # the last word of the prompt predicts the answer's first
    counted[:, PROMPT:] = ~ended                               # a word that is no END predicts one that counts
    counted[:, -1] = False                                     # nothing was sampled after it
    return ids, counted


def distance(x, weight, teacher_x, teacher_weight, row_weight):
    """The divergence, by lk: a sum over tokens times their weights."""
    return LF.linear_kl(x, weight, teacher_x, teacher_weight, divergence="reverse", reduction="sum", row_weight=row_weight)


def plain_distance(x, weight, teacher_x, teacher_weight, row_weight):
    """The same by PyTorch, with logits [..., VOCAB]."""
    logp, logq = F.log_softmax(x @ weight.t(), -1), F.log_softmax(teacher_x @ teacher_weight.t(), -1)
    return ((logp.exp() * (logp - logq)).sum(-1) * row_weight).sum()


def results(function, x, weight, *others):
    """The loss, and the gradients of the student's hidden states and of its head."""
    leaves = [t.detach().requires_grad_() for t in (x, weight)]
    loss = function(*leaves, *others)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    device = parser.parse_args().device
    passed = failed = 0

    def check(name, good, found):
        nonlocal passed, failed
        passed, failed = passed + bool(good), failed + (not good)
        print(f"{'ok  ' if good else 'FAIL'}  {name}: {found}")

    def close(name, ours, exact, limit):
        off = float((ours.double() - exact).norm() / exact.norm())
        check(name, off <= limit, f"off by {off:.2g}, at most {limit:.2g}")

    for dtype, limit in ((torch.float32, 2e-5), (torch.bfloat16, 6e-3)):  # of the heads and what they read
        torch.manual_seed(1)
        teacher, student = Model(32, 0.5).to(device).requires_grad_(False), Model(24, 0.2).to(device)
        optimizer, losses = torch.optim.Adam(student.parameters(), RATE), []
        for step in range(STEPS):
            ids, counted = sample(student, torch.randint(1, VOCAB, (BATCH, PROMPT), device=device))
            optimizer.zero_grad()
            total = 0.0
            for rows in torch.arange(BATCH, device=device).chunk(PARTS):
                x, weight = student(ids[rows])[0].to(dtype), student.head.to(dtype)
                teacher_x, teacher_weight = teacher(ids[rows])[0].to(dtype), teacher.head.to(dtype)
                row_weight = counted[rows] / counted.sum()     # so that all parts together are a mean over all counted tokens
                given = x, weight, teacher_x, teacher_weight, row_weight
                loss = distance(*given)
                loss.backward()
                total += loss.detach()
            if step in (0, STEPS - 1):                         # the last part, from the same hidden states
                name = f"{dtype}, step {step}"
                found, right = (results(f, *tensors) for f, tensors in (
                    (distance, given), (plain_distance, [t.double() for t in given])))
                close(f"{name}: loss", found[0], right[0], 1e-4)
                close(f"{name}: gradient of the hidden states", found[1], right[1], limit)
                close(f"{name}: gradient of the head's weight", found[2], right[2], limit)
                left_out = found[1][~counted[rows]]
                check(f"{name}: tokens that do not count have no gradient", not left_out.any(), f"{len(left_out)} tokens")
            optimizer.step()
            losses.append(float(total))
            if step % 10 == 0 or step == STEPS - 1:
                print(f"      {dtype}, step {step}: {int(counted.sum())} tokens, divergence {losses[-1]:.4f}")
        check(f"{dtype}: the divergence falls to less than half", losses[-1] < losses[0] / 2,
              f"{losses[0]:.4f} to {losses[-1]:.4f}")
    print(f"{passed} passed, {failed} failed")
    return failed > 0


if __name__ == "__main__":
    sys.exit(main())
