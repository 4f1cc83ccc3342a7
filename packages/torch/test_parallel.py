# SPDX-License-Identifier: MIT
"""cross_entropy, linear_cross_entropy, both calls of several ids, kl and linear_kl with their classes split over the ranks of a group, against the call
of one rank.

    python packages/torch/test_parallel.py      # 2 and 3 processes, on GPUs 4 too: gloo on the simulator, nccl where there are as many GPUs

test.py runs this, too. A process is a rank. All ranks draw the same numbers, so each also makes the call of all classes."""
import functools
import itertools
import math
import os
import random
import socket
import subprocess
import sys
import time

from testing import CUDA, VERBOSE, quiet, totals

os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # NVLink's multicast needs more rights than a container may have

import torch
import torch.distributed as dist

import lk_torch
from lk_torch import functional as LF

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
HALF = {F32: 2.0**-24, F16: 2.0**-11, BF16: 2.0**-8}  # half a unit of the type, relative


def verdict(name, right, why=""):
    totals[not right] += 1
    if not right or VERBOSE:
        print(f"  {'ok  ' if right else 'FAIL'}  rank {dist.get_rank()} of {dist.get_world_size()}: {name}  {why}", flush=True)


def close(name, ours, theirs, tolerance):
    """By the norm."""
    a, b = ours.detach().double(), theirs.detach().double()
    if a.shape != b.shape or not b.numel():
        return verdict(name, a.shape == b.shape, f"shape {tuple(a.shape)}, not {tuple(b.shape)}")
    same = torch.where(a.isnan() & b.isnan() | (a == b), 0.0, a - b)
    error = float(same.norm() / b.nan_to_num(posinf=0.0).norm().clamp(min=1e-30))
    verdict(name, error <= tolerance, f"relative error {error:.3g}, at most {tolerance:.3g}")


def identical(name, t):
    """The same bits on all ranks."""
    all_of = [torch.empty_like(t) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of, t.detach().contiguous())
    verdict(f"{name}: the same bits on all ranks", all(torch.equal(v.nan_to_num(7.0), t.nan_to_num(7.0)) for v in all_of))


class Case:
    """A call of all classes, and the same of this rank's. `more`: options."""

    def __init__(self, dtype, spread, hidden, sizes, bias=None, ignored=0.0, **more):
        rank, vocab, group = dist.get_rank(), sum(sizes), dist.group.WORLD
        first = sum(sizes[:rank])
        mine = slice(first, first + sizes[rank])
        tensor = lambda *shape, sigma=1.0, dtype=dtype: (torch.randn(shape) * sigma).to(device, dtype)
        self.whole = [tensor(*spread, hidden), tensor(vocab, hidden, sigma=2 * hidden**-0.5)]
        self.whole += [tensor(vocab, dtype=bias)] if bias else []
        self.part = [self.whole[0].clone(), *(t[mine].clone() for t in self.whole[1:])]
        for t in self.whole + self.part:
            t.requires_grad_()
        self.target = torch.where(torch.rand(spread) < ignored, -100, torch.randint(vocab, spread)).to(device)
        if "max_counted" in more:
            more["max_counted"] = max(1, int((self.target != -100).sum()))
        self.ups = [torch.randn(spread if n or more.get("reduction") == "none" else ()).to(device) for n in range(3)]
        self.mine, self.more, self.dtype = mine, more, dtype
        self.split = dict(group=group) if len(set(sizes)) == 1 else dict(group=group, shards=sizes)
        self.name = f"{dtype} {spread} x {hidden} x {sizes}, bias {bias}, {sorted(more)} {more.get('reduction', 'mean')}"

    def loss(self, x, w, b=None, keep=False, **split):
        return LF.linear_cross_entropy(x, w, self.target, linear_bias=b, keep=keep, **self.more, **split)

    def stats(self, x, w, b=None, **split):
        return LF.linear_cross_entropy_stats(x, w, self.target, linear_bias=b, **self.more, **split)

    def compare(self, kind, ours, theirs, leaves=None):
        """Results, and gradients of `leaves`, of the split call and of that of all classes."""
        ours, theirs = (out if isinstance(out, tuple) else (out,) for out in (ours, theirs))
        for i, (a, b) in enumerate(zip(ours, theirs)):
            identical(f"{self.name}, {kind}, result {i}", a)
            if i != 3:
                close(f"{self.name}, {kind}, result {i}", a, b, 2e-6 if self.dtype == F32 else 2e-5)
            else:
                verdict(f"{self.name}, {kind}, argmax", torch.equal(a, b), f"{a}, not {b}")
        wanted = [i for i in range(len(self.part)) if leaves is None or i in leaves]
        if not wanted:
            return
        found, right = (torch.autograd.grad(out[:3], [leaf[i] for i in wanted], self.ups[:len(out[:3])], materialize_grads=True)
                        for out, leaf in ((ours, self.part), (theirs, self.whole)))
        for i, a, b in zip(wanted, found, right):
            if i == 0:
                identical(f"{self.name}, {kind}, dx", a)
            # dZ is rounded, each rank's sum is, and so are the sums of those; by the plan FUSED dZ and x are once more.
            slack = 32 * HALF[F32] if self.dtype == F32 else (2 + 2 * CUDA + dist.get_world_size()) * HALF[self.dtype]
            close(f"{self.name}, {kind}, {('dx', 'dweight', 'dbias')[i]}", a, b[self.mine] if i else b, slack)


def options(rng, vocab):
    """Each option with a chance of 0.4. All of them are drawn, so that ranks go on with the same numbers."""
    values = dict(label_smoothing=0.125, softcap=6.0, z_loss=0.01, logit_scale=0.75, weight=torch.rand(vocab).to(device) + 0.5,
                  zero_when_empty=True, ignored=0.4, max_counted=9, workspace_mib=1)
    return {k: v for k, v in values.items() if rng.random() < 0.4}


def against_one_rank(ranks):
    rng = random.Random(ranks)  # alike on all ranks
    shards = {2: ([32, 32], [41, 9], [0, 50]), 3: ([24, 24, 24], [17, 40, 7], [50, 0, 13])}[ranks]
    for dtype, reduction, sizes in itertools.product((F32, F16, BF16), ("none", "mean", "sum"), shards):
        case = Case(dtype, rng.choice(((6,), (3, 4), (9,))), 16, sizes, rng.choice((None, dtype, F32)), reduction=reduction,
                    **options(rng, sum(sizes)))
        case.compare("loss", case.loss(*case.part, **case.split), case.loss(*case.whole))
        case.compare("stats", case.stats(*case.part, **case.split), case.stats(*case.whole))
        case.compare("statistics", case.stats(*case.part, statistics=True, **case.split), case.stats(*case.whole, statistics=True))
        case.compare("keep", case.loss(*case.part, keep=True, **case.split), case.loss(*case.whole))
    for sizes in ([4096] * ranks, list(range(4000, 4000 + ranks))) if CUDA else ():
        case = Case(BF16, (512,), 256, sizes)
        for keep in (False, True):
            case.compare(f"keep={keep}", case.loss(*case.part, keep=keep, **case.split), case.loss(*case.whole))
    case = Case(F32, (6,), 16, shards[1], F32)
    for leaves in ((0,), (1,), (2,), (0, 2), (1, 2)):
        for i, (a, b) in enumerate(zip(case.part, case.whole)):
            a.requires_grad_(i in leaves), b.requires_grad_(i in leaves)
        case.compare(f"gradients of {leaves}", case.loss(*case.part, **case.split), case.loss(*case.whole), leaves)
    empty = Case(F32, (6,), 16, [0] * (ranks - 1) + [50], F32)  # ranks without rows, whose dweight is an empty tensor
    empty.part[0].requires_grad_(False), empty.whole[0].requires_grad_(False)
    empty.compare("gradients of (1, 2)", empty.loss(*empty.part, **empty.split), empty.loss(*empty.whole), (1, 2))
    with torch.no_grad():
        case.compare("no_grad", case.loss(*case.part, **case.split), case.loss(*case.whole), ())
    for name, more in (("denominator", dict(denominator=torch.full((), 3.0, device=device))),
                       ("row_weight", dict(row_weight=torch.linspace(-1, 2, 6, device=device), z_loss=0.01)),
                       ("all ignored", dict(ignored=1.1)),
                       ("all ignored, zero_when_empty", dict(ignored=1.1, zero_when_empty=True))):
        case = Case(F32, (6,), 16, shards[1], **more)
        case.compare(name, case.loss(*case.part, **case.split), case.loss(*case.whole))
    case = Case(F32, (0,), 16, shards[1], zero_when_empty=True)
    case.compare("no tokens", case.loss(*case.part, **case.split), case.loss(*case.whole))
    case = Case(F32, (6,), 16, shards[1], F32)
    case.target[3] = sum(shards[1])
    case.compare("a bad target", case.stats(*case.part, **case.split), case.stats(*case.whole), ())
    case = Case(F32, (6,), 16, shards[0])
    case.dtype = BF16
    with torch.autocast(device.type, BF16):
        case.compare("autocast", case.loss(*case.part, **case.split), case.loss(*case.whole))


def module(ranks):
    """A head beside its split form, and how its shards are found."""
    sizes, rank = list(range(20, 20 + ranks)), dist.get_rank()
    heads = []
    for rows in (sum(sizes), sizes[rank]):
        more = {} if rows == sum(sizes) else dict(group=dist.group.WORLD, shards=sizes)
        heads.append(lk_torch.LinearCrossEntropyLoss(16, rows, bias=True, device=device, **more))
    first = sum(sizes[:rank])
    with torch.no_grad():
        for p in heads[0].parameters():
            dist.broadcast(p, 0)
        for whole, part in zip(heads[0].parameters(), heads[1].parameters()):
            part.copy_(whole[first:first + sizes[rank]])
    verdict("shards_of", LF.shards_of(heads[1].weight, dist.group.WORLD) == sizes)
    torch.manual_seed(2)  # the weights of this rank's head took some numbers
    x, t = torch.randn(6, 16).to(device), torch.randint(sum(sizes), (6,)).to(device)
    for head in heads:
        head(x, t).backward()
    close("a module's dweight", heads[1].weight.grad, heads[0].weight.grad[first:first + sizes[rank]], 2e-6)
    close("a module's dbias", heads[1].bias.grad, heads[0].bias.grad[first:first + sizes[rank]], 2e-6)


def learned(ranks):
    """logit_scale and temperature as tensors, and their gradients."""
    for dtype, per_row, which in itertools.product((F32, BF16), (False, True), ("logit_scale", "temperature")):
        case = Case(dtype, (6,), 16, [24] * ranks, reduction="sum", label_smoothing=0.125)
        scales = [(torch.rand(6) if per_row else torch.rand(())).add(0.5).to(device).requires_grad_()] * 2
        found = []
        for leaves, split, s in zip((case.part, case.whole), (case.split, {}), scales):
            loss = case.loss(*leaves, **split, **{which: s})
            found.append((loss, *torch.autograd.grad(loss, [s, leaves[0]])))
        for name, a, b in zip(("loss", "gradient", "dx"), *found):
            identical(f"{which} of {list(scales[0].shape)}, {dtype}, {name}", a)
            close(f"{which} of {list(scales[0].shape)}, {dtype}, {name}", a, b, 64 * HALF[dtype])


class Ids:
    """cross_entropy_ids of all logits, and of this rank's. `more`: options."""

    def __init__(self, dtype, spread, n, sizes, **more):
        first, vocab = sum(sizes[:dist.get_rank()]), sum(sizes)
        self.mine, self.more, self.dtype = slice(first, first + sizes[dist.get_rank()]), more, dtype
        self.whole = (2 * torch.randn(*spread, vocab)).to(device, dtype).requires_grad_()
        self.part = self.whole.detach()[..., self.mine].clone().requires_grad_()
        self.ids = torch.where(torch.rand(*spread, n) < 0.2, -100, torch.randint(vocab, (*spread, n))).to(device)
        self.weight = torch.rand(*spread, n).to(device)
        self.ups = [torch.randn(s).to(device) for s in (spread if more.get("reduction") == "none" else (), (*spread, n), spread)]
        self.split = dict(group=dist.group.WORLD) if len(set(sizes)) == 1 else dict(group=dist.group.WORLD, shards=sizes)
        self.name = f"ids: {dtype} {spread} x {sizes}, n={n}, {sorted(more)} {more.get('reduction', 'mean')}"

    def __call__(self, x, **split):
        return tuple(LF.cross_entropy_ids(x, self.ids, self.weight, **self.more, **split))

    def compare(self, kind, ours, theirs, wants=None):
        wants = range(len(ours)) if wants is None else wants
        for name, a, b in zip(("loss", "logp", "tail"), ours, theirs):
            identical(f"{self.name}, {kind}, {name}", a)
            close(f"{self.name}, {kind}, {name}", a, b, 2e-6)
        found, right = (torch.autograd.grad([out[i] for i in wants], leaf, [self.ups[i] for i in wants])[0]
                        for out, leaf in ((ours, self.part), (theirs, self.whole)))
        close(f"{self.name}, {kind}, gradient of {wants}", found, right[..., self.mine], 2e-6 + 2 * HALF[self.dtype])


class Logits(Case):
    """cross_entropy and its stats of all classes' logits, and of this rank's."""

    def __init__(self, dtype, spread, sizes, **more):
        super().__init__(dtype, spread, 4, sizes, **more)
        first = sum(sizes[:dist.get_rank()])
        self.mine = slice(first, first + sizes[dist.get_rank()])
        self.whole = [(2 * torch.randn(*spread, sum(sizes))).to(device, dtype).requires_grad_()]
        self.part = [self.whole[0].detach()[..., self.mine].clone().requires_grad_()]
        self.name = f"of logits: {self.name}"

    def __call__(self, x, stats=False, **more):
        x = x.movedim(-1, 1) if x.dim() > 2 else x
        if stats:
            return LF.cross_entropy_stats(x, self.target, **self.more, **more)
        return LF.cross_entropy(x, self.target, **self.more, **more)

    def compare(self, kind, ours, theirs):
        """Results that have gradients, and the gradient of this rank's logits."""
        ours, theirs = (out if isinstance(out, tuple) else (out,) for out in (ours, theirs))
        for i, (a, b) in enumerate(zip(ours, theirs)):
            identical(f"{self.name}, {kind}, result {i}", a)
            close(f"{self.name}, {kind}, result {i}", a, b, 2e-6)
        found, right = (torch.autograd.grad(out, leaf, self.ups[:len(out)])[0] for out, leaf in ((ours, *self.part), (theirs, *self.whole)))
        close(f"{self.name}, {kind}, gradient", found, right[..., self.mine], 4e-6 + 2 * HALF[self.dtype])


def of_logits(ranks):
    rng = random.Random(ranks)
    shards = {2: ([32, 32], [41, 9], [0, 50]), 3: ([24, 24, 24], [17, 40, 7], [50, 0, 13])}[ranks]
    for dtype, reduction, sizes in itertools.product((F32, F16, BF16), ("none", "mean", "sum"), shards):
        more = {k: v for k, v in options(rng, sum(sizes)).items() if k not in ("max_counted", "workspace_mib")}
        case = Logits(dtype, rng.choice(((6,), (3, 4), (9,))), sizes, reduction=reduction, **more)
        for stats, statistics in ((False, False), (True, False), (True, True)):
            more = dict(stats=stats, **(dict(statistics=True) if statistics else {}))
            ours, theirs = case(*case.part, **more, **case.split), case(*case.whole, **more)
            case.compare("of logits", *((o[:2] + o[3:4] if stats else o) for o in (ours, theirs)))
            if stats:
                for name, a, b in zip(ours._fields[2:], ours[2:], theirs[2:]):
                    close(f"{case.name}: {name}", a, b, 2e-5)
                    identical(f"{case.name}: {name}", a.float())
    for name, more in (("denominator", dict(denominator=torch.full((), 3.0, device=device))),
                       ("row_weight", dict(row_weight=torch.linspace(-1, 2, 6, device=device), z_loss=0.01)),
                       ("all ignored", dict(ignored=1.1)), ("zero_when_empty", dict(ignored=1.1, zero_when_empty=True))):
        case = Logits(F32, (6,), shards[1], **more)
        case.compare(name, case(*case.part, **case.split), case(*case.whole))
    case = Logits(F32, (0,), shards[1], zero_when_empty=True)
    case.compare("no rows", case(*case.part, **case.split), case(*case.whole))
    case = Logits(F32, (6,), shards[1])
    with torch.no_grad():
        verdict("of logits: no_grad", not case(*case.part, **case.split).requires_grad)
    for backend in ("aot_eager", "inductor"):
        torch._dynamo.reset()
        fast = torch.compile(lambda x, **split: case(x, **split), fullgraph=True, backend=backend)
        case.compare(backend, fast(*case.part, **case.split), case(*case.whole))
    whole = dict(group=dist.group.WORLD)
    for name, word, call in (
            ("a learned scale", "logit_scale", lambda: case(*case.part, temperature=torch.ones(6, device=device).requires_grad_(), **case.split)),
            ("grad_scale", "grad_scale", lambda: case(*case.part, grad_scale=2.0, **case.split)),
            ("inplace", "inplace", lambda: case(*case.part, inplace=True, **case.split)),
            ("probabilities", "probabilities", lambda: LF.cross_entropy(case.part[0], case.part[0].detach().softmax(1), **case.split)),
            ("shards without group", "shards", lambda: case(*case.part, shards=shards[1])),
            ("another rank's shard", "classes", lambda: case(*case.part, shards=[25] * ranks, **whole))):
        refused(f"of logits: {name}", word, call)


def several_ids(ranks):
    rng = random.Random(3)
    shards = [24] * ranks, list(range(20, 20 + ranks)), [0] * (ranks - 1) + [50]
    for dtype, reduction, sizes in itertools.product((F32, F16, BF16), ("none", "mean", "sum"), shards):
        spread = rng.choice(((6,), (3, 4), (9,)))
        values = dict(softcap=6.0, z_loss=0.01, logit_scale=0.75, row_weight=torch.rand(spread).to(device), tail=True,
                      tail_weight=torch.rand(spread).to(device))
        values |= dict(denominator=3.5) if reduction == "mean" else {}
        case = Ids(dtype, spread, rng.choice((1, 5, 40)), sizes, reduction=reduction,
                   **{k: v for k, v in values.items() if rng.random() < 0.4})
        for wants in None, (0,), (1,), (2,):
            ours, theirs = case(case.part, **case.split), case(case.whole)
            if wants != (2,) or len(ours) == 3:
                case.compare("cross_entropy_ids", ours, theirs, wants)
    case = Ids(F32, (6,), 5, shards[1])
    case.weight, case.ids = None, case.ids.int()
    case.compare("int32, weights of 1", case(case.part, **case.split), case(case.whole))
    one, target = LF.cross_entropy_ids(case.part, case.ids[:, :1], **case.split), case.ids[:, 0].long()
    close("ids: one id", one.loss, torch.nn.functional.cross_entropy(case.whole, target), 2e-6)
    case = Ids(F32, (6,), 5, shards[1])
    case.ids[2, 1] = sum(shards[1])
    out = case(case.part, reduction="none", **case.split)
    verdict("ids: a bad id", bool(out[1][2].isnan().all()) and not out[1][3].isnan().any() and bool(out[0][2].isnan()))
    case = Ids(F32, (0,), 5, shards[1], zero_when_empty=True)
    case.compare("no rows", case(case.part, **case.split), case(case.whole))
    with torch.no_grad():
        out = case(case.part, **case.split)
    verdict("ids: no_grad", not out[0].requires_grad and not out[1].requires_grad)
    case = Ids(F32, (6,), 5, shards[1], tail=True, tail_weight=torch.rand(6).to(device))
    with torch.no_grad():  # five ids, of several ranks, have all of p but 1e-5
        case.ids.copy_(torch.arange(5, device=device) * 4)
        for leaf, first in (case.whole, 0), (case.part, case.mine.start):
            for i in range(0, 20, 4):
                if 0 <= i - first < leaf.shape[-1]:
                    leaf[:, i - first] += 16
    ours, theirs = case(case.part, **case.split), case(case.whole)
    verdict("ids: a tail far below", bool((ours[2] < -8).all()), ours[2])
    case.compare("a tail far below", ours, theirs)
    for case, backend in ((Ids(F32, (6,), 5, shards[1]), "aot_eager"),
                          (Ids(BF16, (3, 4), 7, shards[0], reduction="sum", tail=True), "inductor")):
        torch._dynamo.reset()
        fast = torch.compile(lambda x, **split: case(x, **split), fullgraph=True, backend=backend)
        case.compare(backend, fast(case.part, **case.split), case(case.whole))
    case, scale = Ids(F32, (6,), 5, shards[0]), torch.ones(6, device=device).requires_grad_()
    for name, word, call in (
            ("a learned weight of tails", "tail_weight", lambda: case(case.part, tail_weight=scale, **case.split)),
            ("a learned scale", "logit_scale", lambda: case(case.part, temperature=scale, **case.split)),
            ("too few shards", "shards", lambda: case(case.part, group=dist.group.WORLD, shards=[24])),
            ("another rank's shard", "classes", lambda: case(case.part, group=dist.group.WORLD, shards=[25] * ranks)),
            ("one rank has fewer classes", "classes", lambda: case(case.part[:, dist.get_rank():], group=dist.group.WORLD,
                                                                   shards=[24] * (ranks - 1) + [24 + ranks])),
            ("shards without group", "shards", lambda: case(case.part, shards=[24] * ranks))):
        refused(f"ids: {name}", word, call)


class HeadIds(Case):
    """linear_cross_entropy_ids of all classes, and of this rank's."""

    def __init__(self, dtype, spread, n, hidden, sizes, bias=None, **more):
        super().__init__(dtype, spread, hidden, sizes, bias, **more)
        self.ids = torch.where(torch.rand(*spread, n) < 0.2, -100, torch.randint(sum(sizes), (*spread, n))).to(device)
        self.weight = torch.rand(*spread, n).to(device)
        self.ups = [self.ups[0], torch.randn(*spread, n).to(device), torch.randn(spread).to(device)]
        self.name = f"ids of a head, n={n}: {self.name}"

    def __call__(self, x, w, b=None, **split):
        return tuple(LF.linear_cross_entropy_ids(x, w, self.ids, self.weight, linear_bias=b, **self.more, **split))


def ids_of_a_head(ranks):
    rng = random.Random(5)
    shards = [24] * ranks, list(range(20, 20 + ranks)), [0] * (ranks - 1) + [50]
    for dtype, reduction, sizes in itertools.product((F32, F16, BF16), ("none", "mean", "sum"), shards):
        spread = rng.choice(((6,), (3, 4), (9,)))
        values = dict(softcap=6.0, z_loss=0.01, logit_scale=0.75, row_weight=torch.rand(spread).to(device), workspace_mib=1,
                      tail=True, tail_weight=torch.rand(spread).to(device))
        values |= dict(denominator=3.5) if reduction == "mean" else {}
        case = HeadIds(dtype, spread, rng.choice((1, 5, 40)), 16, sizes, rng.choice((None, dtype, F32)), reduction=reduction,
                       **{k: v for k, v in values.items() if rng.random() < 0.4})
        ours, theirs = case(*case.part, **case.split), case(*case.whole)
        case.compare("both", ours, theirs)
        for i in range(len(ours)):  # the gradient of the loss alone, of logp alone, and of tail alone
            found, right = (torch.autograd.grad(case(*leaves, **split)[i], leaves[1], case.ups[i])[0]
                            for leaves, split in ((case.part, case.split), (case.whole, {})))
            close(f"{case.name}, dweight of {('loss', 'logp', 'tail')[i]}", found, right[case.mine], 2e-6 + 4 * HALF[dtype])
    case = HeadIds(F32, (6,), 5, 16, shards[1], F32)
    for leaves in ((0,), (1,), (2,), (0, 2), (1, 2)):
        for i, (a, b) in enumerate(zip(case.part, case.whole)):
            a.requires_grad_(i in leaves), b.requires_grad_(i in leaves)
        case.compare(f"gradients of {leaves}", case(*case.part, **case.split), case(*case.whole), leaves)
    with torch.no_grad():
        out = case(*case.part, **case.split)
    verdict("ids of a head: no_grad", not out[0].requires_grad and not out[1].requires_grad)
    case = HeadIds(BF16, (6,), 5, 16, shards[1], fast_logits=True)
    case.more["fast_logits"], whole = False, case(*case.whole)
    case.more["fast_logits"] = True
    for name, a, b in zip(("loss", "logp"), case(*case.part, **case.split), whole):
        identical(f"ids of a head, fast_logits, {name}", a)
        close(f"ids of a head, fast_logits, {name}", a, b, 16 * HALF[BF16])
    case = HeadIds(F32, (6,), 5, 16, shards[1], reduction="none")
    case.weight, case.ids = None, case.ids.int()
    case.compare("int32, weights of 1", case(*case.part, **case.split), case(*case.whole))
    case.ids[2, 1] = sum(shards[1])
    out = case(*case.part, **case.split)
    verdict("ids of a head: a bad id", bool(out[1][2].isnan().all()) and not out[1][3].isnan().any() and bool(out[0][2].isnan()))
    case = HeadIds(F32, (0,), 5, 16, shards[1], zero_when_empty=True)
    case.compare("no tokens", case(*case.part, **case.split), case(*case.whole))
    case = HeadIds(F32, (6,), 5, 16, shards[0])
    case.dtype = BF16
    with torch.autocast(device.type, BF16):
        case.compare("autocast", case(*case.part, **case.split), case(*case.whole))
    for dtype, scale in itertools.product((F32, BF16), (torch.ones(6), torch.ones(()))):
        case = HeadIds(dtype, (6,), 5, 16, shards[0])
        scales = [scale.to(device).mul(0.7).requires_grad_() for _ in range(2)]
        found = [torch.autograd.grad(case(*leaves, logit_scale=s, **split)[0], [s, leaves[0]])
                 for leaves, split, s in zip((case.part, case.whole), (case.split, {}), scales)]
        for name, a, b in zip(("logit_scale", "dx"), *found):
            identical(f"ids of a head, {dtype}, {name} of {list(scale.shape)}", a)
            close(f"ids of a head, {dtype}, {name} of {list(scale.shape)}", a, b, 64 * HALF[dtype])
    for case, backend in ((HeadIds(F32, (6,), 5, 16, shards[1], F32), "aot_eager"),
                          (HeadIds(BF16, (3, 4), 7, 16, shards[0], tail=True), "inductor")):
        torch._dynamo.reset()
        fast = torch.compile(lambda *leaves, **split: case(*leaves, **split), fullgraph=True, backend=backend)
        case.compare(backend, fast(*case.part, **case.split), case(*case.whole))
    case, scale = HeadIds(F32, (6,), 5, 16, shards[0], F32), torch.ones(6, device=device).requires_grad_()
    x, w, b = case.part
    for name, word, call in (
            ("a learned weight of tails", "tail_weight", lambda: case(x, w, tail_weight=scale, **case.split)),
            ("a learned scale with a bias", "linear_bias", lambda: case(x, w, b, temperature=scale, **case.split)),
            ("too few shards", "shards", lambda: case(x, w, group=dist.group.WORLD, shards=[24])),
            ("another rank's shard", "linear_weight", lambda: case(x, w, group=dist.group.WORLD, shards=[25] * ranks)),
            ("one rank has fewer rows", "linear_weight", lambda: case(x, w[dist.get_rank():], group=dist.group.WORLD,
                                                                      shards=[24] * (ranks - 1) + [24 + ranks])),
            ("shards without group", "shards", lambda: case(x, w, shards=[24] * ranks))):
        refused(f"ids of a head: {name}", word, call)


def draw_support(case, spread, sizes):
    """Ids among all classes, their offsets, targets and a teacher's log-probabilities."""
    lengths = torch.randint(1, 9, (math.prod(spread),))
    case.offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]).to(device)
    case.ids = torch.randint(sum(sizes), (int(lengths.sum()),)).to(device)
    case.target = case.ids[case.offsets[:-1]].reshape(spread)
    case.teacher = torch.randn(len(case.ids)).to(device) - 2


class HeadSupport(Case):
    """linear_support of all classes, and of this rank's: the same logits, so the same bits."""

    def __init__(self, dtype, spread, hidden, sizes, bias=None, **more):
        super().__init__(dtype, spread, hidden, sizes, bias, **more)
        draw_support(self, spread, sizes)
        self.ups = [torch.randn(spread).to(device) for _ in range(3)]
        self.name = f"a support: {self.name}"

    def __call__(self, x, w, b=None, **split):
        return tuple(LF.linear_support(x, w, self.ids, self.offsets, self.target, linear_bias=b, teacher_logp=self.teacher, **self.more,
                                       **split))


def draws_of_a_head(ranks, x, w):
    """Ranks draw what one device draws. w: this rank's 24 rows, or another number; each rank has 24 here."""
    weight = torch.randn(24 * ranks, x.shape[1], generator=torch.Generator().manual_seed(5)).to(x)
    seed = torch.arange(len(x), device=x.device)
    own = weight[24 * dist.get_rank():][:24]
    for bias in (None, torch.linspace(-1, 1, 24 * ranks, device=x.device)):
        one = LF.linear_topk(x, weight, 5, linear_bias=bias, seed=seed, offset=seed)
        ours = None if bias is None else bias[24 * dist.get_rank():][:24]
        out = LF.linear_topk(x, own, 5, linear_bias=ours, seed=seed, offset=seed, group=dist.group.WORLD)
        verdict("topk: ranks draw the ids of one device", torch.equal(one.ids, out.ids), f"{out.ids}, not {one.ids}")
        close("topk: logp of draws", out.logp, one.logp, 2e-6)
    if ranks > 1:  # a rank without classes, behind a number of them that 4 does not divide
        sizes = [22 * ranks] + [0] * (ranks - 1)
        all_of_one, first = weight[:22 * ranks], sum(sizes[:dist.get_rank()])
        one, out = LF.linear_topk(x, all_of_one, 5, seed=seed), LF.linear_topk(
            x, all_of_one[first:first + sizes[dist.get_rank()]], 5, seed=seed, group=dist.group.WORLD, shards=sizes)
        verdict("topk: draws, ranks without classes", torch.equal(one.ids, out.ids), f"{out.ids}, not {one.ids}")
        odd = [23] * (ranks - 1) + [24 * ranks - 23 * (ranks - 1)]
        first = 23 * dist.get_rank()
        refused("topk: draws from the middle of four", "multiple of 4", lambda: LF.linear_topk(
            x, weight[first:first + odd[dist.get_rank()]], 5, seed=seed, group=dist.group.WORLD, shards=odd))


def topk_of_a_head(ranks):
    rng = random.Random(8)
    shards = [24] * ranks, list(range(20, 20 + ranks)), [0] * (ranks - 1) + [50], [3] * (ranks - 1) + [40]
    for dtype, sizes, k in itertools.product((F32, F16, BF16), shards, (1, 5, 40)):
        case = Case(dtype, rng.choice(((6,), (3, 4), (9,))), 16, sizes, rng.choice((None, dtype, F32)),
                    **{k: v for k, v in dict(softcap=6.0, logit_scale=0.75, temperature=0.5).items() if rng.random() < 0.5})
        call = lambda x, w, b=None, **split: LF.linear_topk(x.detach(), w, k, linear_bias=b, **case.more, **split)
        ours, theirs = call(*case.part, **case.split), call(*case.whole)
        for name, a, b in zip(ours._fields, ours, theirs):
            identical(f"topk {case.name} k={k}: {name}", a)
            if name == "ids":
                verdict(f"topk {case.name} k={k}: ids of one device", torch.equal(a, b), f"{a}, not {b}")
            else:
                close(f"topk {case.name} k={k}: {name}", a, b, 2e-6)
    case = Case(F32, (6,), 16, [24] * ranks, F32)
    x, w, b = (t.detach() for t in case.part)
    for what, bias, zeros in (("equal logits", b * 0, 0), ("all classes of all ranks masked but two", torch.full_like(b, -torch.inf), 1)):
        if zeros and dist.get_rank() == ranks - 1:
            bias[3], bias[7] = 0, 0
        out = LF.linear_topk(x, w * zeros, 6, linear_bias=bias, **case.split)
        first = 24 * (ranks - 1)
        right = [0, 1, 2, 3, 4, 5] if not zeros else [0, 1, 2, 3, first + 3, first + 7]
        verdict(f"topk: {what}", all(sorted(r) == right for r in out.ids.tolist()) and (zeros == 0 or bool(out.logp[:, 2:].eq(-torch.inf).all())),
                f"{out}")
    torch._dynamo.reset()
    fast = torch.compile(lambda x, w: LF.linear_topk(x, w, 5, **case.split), fullgraph=True, backend="aot_eager")
    verdict("topk compiled", all(map(torch.equal, fast(x, w), LF.linear_topk(x, w, 5, **case.split))))
    draws_of_a_head(ranks, x, w)
    for name, word, call in (("too few shards", "shards", lambda: LF.linear_topk(x, w, 3, group=dist.group.WORLD, shards=[24])),
                             ("k above all classes", "k is 200", lambda: LF.linear_topk(x, w, 200, **case.split)),
                             ("shards without group", "shards", lambda: LF.linear_topk(x, w, 3, shards=[24] * ranks))):
        refused(f"topk: {name}", word, call)
    case = Case(F32, (6,), 16, [0] * (ranks - 1) + [50], F32)  # ranks without classes refuse what the last one does
    (x, w, b), split = (t.detach() for t in case.part), dict(case.split, linear_bias=case.part[2].detach())
    for name, word, call in (
            ("an input with a gradient", "input requires", lambda: LF.linear_topk(x.clone().requires_grad_(), w, 3, **split)),
            ("a learned temperature", "temperature requires", lambda: LF.linear_topk(
                x, w, 3, temperature=torch.ones(6, device=device).requires_grad_(), **case.split)),
            ("a softcap", "softcap", lambda: LF.linear_topk(x, w, 3, softcap=-1.0, **split)),
            ("a hidden size", "linear_weight", lambda: LF.linear_topk(x[:, 1:], w, 3, **split)),
            ("a bias", "linear_bias", lambda: LF.linear_topk(x, w, 3, **dict(case.split, linear_bias=torch.cat([b, b[:0] if len(b) else x[0]])[1:])))):
        refused(f"topk, ranks without classes: {name}", word, call)
    nothing = LF.linear_topk(x[:0], w, 3, **split)
    verdict("topk: no tokens", nothing.ids.shape == (0, 3) and nothing.lse.shape == (0,))


def supports_of_a_head(ranks):
    rng = random.Random(6)
    shards = [24] * ranks, list(range(20, 20 + ranks)), [0] * (ranks - 1) + [50]
    for dtype, sizes in itertools.product((F32, F16, BF16), shards):
        case = HeadSupport(dtype, rng.choice(((6,), (3, 4), (9,))), 16, sizes, rng.choice((None, dtype, F32)),
                           **{k: v for k, v in dict(softcap=6.0, logit_scale=0.75, temperature=0.5).items() if rng.random() < 0.5})
        ours, theirs = case(*case.part, **case.split), case(*case.whole)
        for i, (a, b) in enumerate(zip(ours, theirs)):
            verdict(f"{case.name}, result {i} has the bits of one device", torch.equal(a, b), f"{a}, not {b}")
        case.compare("support", ours, theirs)
    case = HeadSupport(F32, (6,), 16, shards[1], F32)
    for leaves in ((0,), (1,), (2,), (0, 2), (1, 2)):
        for i, (a, b) in enumerate(zip(case.part, case.whole)):
            a.requires_grad_(i in leaves), b.requires_grad_(i in leaves)
        case.compare(f"gradients of {leaves}", case(*case.part, **case.split), case(*case.whole), leaves)
    case = HeadSupport(F32, (6,), 16, shards[1])
    case.ids[case.offsets[2]] = sum(shards[1])
    out = case(*case.part, **case.split)
    verdict("a support: a bad id", bool(out[1][2].isnan()) and not out[1][3].isnan())
    case = HeadSupport(F32, (6,), 16, shards[1])
    case.ids, case.teacher, case.offsets = case.ids[:0], case.teacher[:0], case.offsets * 0
    case.target = torch.full((6,), -100, device=device)
    case.compare("tokens without ids, all ignored", case(*case.part, **case.split), case(*case.whole))
    for case, backend in ((HeadSupport(F32, (6,), 16, shards[1], F32), "aot_eager"), (HeadSupport(BF16, (3, 4), 16, shards[0]), "inductor")):
        torch._dynamo.reset()
        fast = torch.compile(lambda *leaves, **split: case(*leaves, **split), fullgraph=True, backend=backend)
        case.compare(backend, fast(*case.part, **case.split), case(*case.whole))
    case = HeadSupport(F32, (6,), 16, shards[0])
    x, w = case.part
    for name, word, call in (("too few shards", "shards", lambda: case(x, w, group=dist.group.WORLD, shards=[24])),
                             ("another rank's shard", "linear_weight", lambda: case(x, w, group=dist.group.WORLD, shards=[25] * ranks)),
                             ("shards without group", "shards", lambda: case(x, w, shards=[24] * ranks))):
        refused(f"a support: {name}", word, call)
    if dist.get_rank() == ranks - 1:  # it refuses before its first collective
        try:
            case(x, w, softcap=-1.0, **case.split)
            verdict("a support: a softcap on one rank", False, "no exception")
        except ValueError as error:
            verdict("a support: a softcap on one rank", "softcap" in str(error), str(error))
    case.compare("the call behind", case(x, w, **case.split), case(*case.whole))


class LogitsSupport(Logits):
    """support of all classes' logits, and of this rank's."""

    def __init__(self, dtype, spread, sizes, **more):
        super().__init__(dtype, spread, sizes, **more)
        draw_support(self, spread, sizes)
        self.ups = [torch.randn(spread).to(device) for _ in range(4)] + [torch.randn(len(self.ids)).to(device)]
        self.name = f"a support: {self.name}"

    def __call__(self, x, **split):
        return tuple(LF.support(x, self.ids, self.offsets, self.target, teacher_logp=self.teacher, **self.more, **split))


def supports_of_logits(ranks):
    rng = random.Random(7)
    shards = [24] * ranks, list(range(20, 20 + ranks)), [0] * (ranks - 1) + [50]
    for dtype, sizes in itertools.product((F32, F16, BF16), shards):
        case = LogitsSupport(dtype, rng.choice(((6,), (3, 4), (9,))), sizes,
                             **{k: v for k, v in dict(softcap=6.0, logit_scale=0.75, temperature=0.5).items() if rng.random() < 0.5})
        ours, theirs = case(*case.part, **case.split), case(*case.whole)
        for i, (a, b) in enumerate(zip(ours, theirs)):
            verdict(f"{case.name}, result {i} has the bits of one device", torch.equal(a, b), f"{a}, not {b}")
        case.compare("support", ours, theirs)
        found, right = (torch.autograd.grad(case(*leaf, **split), leaf, case.ups)[0]
                        for leaf, split in ((case.part, case.split), (case.whole, {})))
        same = torch.equal(found, right[..., case.mine])
        verdict(f"{case.name}, the gradient has the bits of one device", same, f"{found}, not {right}")
    case = LogitsSupport(F32, (6,), shards[1])
    case.ids[case.offsets[2]] = sum(shards[1])
    out = case(*case.part, **case.split)
    dx, = torch.autograd.grad(out[1].sum(), case.part)
    verdict("a support of logits: a bad id", bool(out[1][2].isnan() and dx[2].isnan().all()) and not dx[3].isnan().any())
    case = LogitsSupport(F32, (6,), shards[1])
    case.ids, case.teacher, case.offsets, case.ups[4] = case.ids[:0], case.teacher[:0], case.offsets * 0, case.ups[4][:0]
    case.target = torch.full((6,), -100, device=device)
    case.compare("tokens without ids, all ignored", case(*case.part, **case.split), case(*case.whole))
    for case, backend in ((LogitsSupport(F32, (6,), shards[1]), "aot_eager"), (LogitsSupport(BF16, (3, 4), shards[0]), "inductor")):
        torch._dynamo.reset()
        fast = torch.compile(lambda x, **split: case(x, **split), fullgraph=True, backend=backend)
        case.compare(backend, fast(*case.part, **case.split), case(*case.whole))
    case, scale = LogitsSupport(F32, (6,), shards[0]), torch.ones(6, device=device).requires_grad_()
    x, = case.part
    for name, word, call in (("a learned scale", "logit_scale", lambda: case(x, temperature=scale, **case.split)),
                             ("too few shards", "shards", lambda: case(x, group=dist.group.WORLD, shards=[24])),
                             ("another rank's shard", "logits has", lambda: case(x, group=dist.group.WORLD, shards=[25] * ranks)),
                             ("shards without group", "shards", lambda: case(x, shards=[24] * ranks))):
        refused(f"a support of logits: {name}", word, call)
    case = LogitsSupport(F32, (6,), shards[2])  # all ranks but the last have no columns
    if dist.get_rank() == 0:  # it refuses before its first collective
        try:
            case(*case.part, softcap=-1.0, **case.split)
            verdict("a support of logits: a softcap on one rank", False, "no exception")
        except ValueError as error:
            verdict("a support of logits: a softcap on one rank", "softcap" in str(error), str(error))
    case.compare("the call behind", case(*case.part, **case.split), case(*case.whole))


def refused(name, word, call):
    """A ValueError that has the word, on each rank."""
    try:
        call()
        verdict(name, False, "no exception")
    except ValueError as error:
        dist.barrier()  # which all ranks come to
        verdict(name, word in str(error), str(error))


def entropies(case, part, whole):
    """kl or linear_kl with the entropy: the loss keeps its bits, and the entropy is that of all classes."""
    (loss, ours), (_, theirs) = (case(*leaves, **split, return_entropy=True) for leaves, split in ((part, case.split), (whole, {})))
    identical(f"{case.name}, entropy", ours)
    close(f"{case.name}, entropy", ours, theirs, 4e-6)
    verdict(f"{case.name}, entropy: the loss keeps its bits", torch.equal(loss, case(*part, **case.split)) and not ours.requires_grad)


class Divergence:
    """kl of all logits, and of this rank's. `more`: options."""

    def __init__(self, dtype, spread, sizes, **more):
        first, vocab = sum(sizes[:dist.get_rank()]), sum(sizes)
        self.mine, self.more, self.dtype = slice(first, first + sizes[dist.get_rank()]), more, dtype
        self.whole = (2 * torch.randn(*spread, vocab)).to(device, dtype).requires_grad_()
        self.teacher = (2 * torch.randn(*spread, vocab)).to(device, dtype)
        self.part = self.whole.detach()[..., self.mine].clone().requires_grad_()
        self.up = torch.randn(spread if more.get("reduction") == "none" else ()).to(device)
        self.split = dict(group=dist.group.WORLD) if len(set(sizes)) == 1 else dict(group=dist.group.WORLD, shards=sizes)
        self.name = f"kl: {dtype} {spread} x {sizes}, {sorted(more)} {more.get('divergence')} {more.get('reduction', 'mean')}"

    def __call__(self, x, **split):
        teacher = self.teacher[..., self.mine] if "group" in split else self.teacher
        return LF.kl(x, teacher, **{**self.more, **split})

    def compare(self, kind, ours, theirs):
        identical(f"{self.name}, {kind}", ours)
        close(f"{self.name}, {kind}", ours, theirs, 2e-6)
        found, right = torch.autograd.grad(ours, self.part, self.up)[0], torch.autograd.grad(theirs, self.whole, self.up)[0]
        close(f"{self.name}, {kind}, gradient", found, right[..., self.mine], 4e-6 + 2 * HALF[self.dtype])


def divergences(ranks):
    rng = random.Random(5)
    shards = [24] * ranks, list(range(20, 20 + ranks)), [0] * (ranks - 1) + [50]
    names = ("forward", "reverse", "jensen_shannon", "total_variation")
    for dtype, reduction, sizes, divergence in itertools.product((F32, F16, BF16), ("none", "mean", "sum"), shards, names):
        spread = rng.choice(((6,), (3, 4), (9,)))
        weights = torch.where(torch.rand(spread) < 0.3, 0.0, torch.rand(spread)).to(device)
        values = dict(beta=0.3, temperature=2.0, softcap=6.0, teacher_softcap=8.0, teacher_scale=0.75, row_weight=weights)
        case = Divergence(dtype, spread, sizes, divergence=divergence, reduction=reduction,
                          **{k: v for k, v in values.items() if rng.random() < 0.4})
        case.compare("eager", case(case.part, **case.split), case(case.whole))
        entropies(case, [case.part], [case.whole])
    case = Divergence(F32, (), shards[1], reduction="batchmean")  # over the classes of all ranks
    case.compare("no batch", case(case.part, **case.split), case(case.whole))
    case = Divergence(F32, (0,), shards[1], reduction="sum")
    case.compare("no rows", case(case.part, **case.split), case(case.whole))
    with torch.no_grad():
        verdict("kl: no_grad", not case(case.part, **case.split).requires_grad)
    for divergence, backend in zip(names, ("aot_eager", "inductor", "aot_eager")):
        torch._dynamo.reset()
        case = Divergence(F32, (6,), shards[1], divergence=divergence)
        fast = torch.compile(lambda x, **split: case(x, **split), fullgraph=True, backend=backend)
        case.compare(backend, fast(case.part, **case.split), case(case.whole))
    case = Divergence(F32, (6,), shards[0])
    for name, word, split in (("too few shards", "shards", dict(group=dist.group.WORLD, shards=[24])),
                              ("another rank's shard", "classes", dict(group=dist.group.WORLD, shards=[25] * ranks)),
                              ("shards without group", "shards", dict(shards=[24] * ranks))):
        refused(f"kl: {name}", word, lambda: case(case.part, **split))


class Heads:
    """linear_kl of all classes, and of this rank's. `more`: options."""

    def __init__(self, dtype, spread, sizes, bias=None, **more):
        first, vocab = sum(sizes[:dist.get_rank()]), sum(sizes)
        self.mine, self.more, self.dtype = slice(first, first + sizes[dist.get_rank()]), more, dtype
        x, w = torch.randn(*spread, 16).to(device, dtype), torch.randn(vocab, 16).div(4).to(device, dtype)
        b = () if bias is None else (torch.randn(vocab).to(device, bias),)
        self.whole = [v.requires_grad_() for v in (x, w, *b)]
        self.part = [v.detach().clone().requires_grad_() for v in (x, w[self.mine], *(v[self.mine] for v in b))]
        self.teacher = [torch.randn(*spread, 24).to(device, dtype), torch.randn(vocab, 24).div(5).to(device, dtype)]
        self.up = torch.randn(spread if more.get("reduction") == "none" else ()).to(device)
        self.split = dict(group=dist.group.WORLD) if len(set(sizes)) == 1 else dict(group=dist.group.WORLD, shards=sizes)
        self.name = f"heads: {dtype} {spread} x {sizes}, {sorted(more)} {more.get('divergence')} {more.get('reduction', 'mean')}"

    def __call__(self, x, w, b=None, **split):
        y, v = self.teacher
        y = y.chunk(dist.get_world_size())[dist.get_rank()] if split.get("sequence_parallel") else y
        return LF.linear_kl(x, w, y, v[self.mine] if "group" in split else v, linear_bias=b, **{**self.more, **split})

    def compare(self, kind, ours, theirs, wants=None):
        identical(f"{self.name}, {kind}", ours)
        close(f"{self.name}, {kind}", ours, theirs, 4e-6)
        wants = range(len(self.part)) if wants is None else wants
        found, right = (torch.autograd.grad(loss, [leaves[i] for i in wants], self.up) for loss, leaves in (
            (ours, self.part), (theirs, self.whole)))
        for i, a, b in zip(wants, found, right):
            mine = b if i == 0 else b[self.mine]
            close(f"{self.name}, {kind}, gradient {i}", a, mine, 2e-5 + 6 * HALF[self.dtype])
            if i == 0:
                identical(f"{self.name}, {kind}, gradient of input", a)


def divergences_of_heads(ranks):
    rng = random.Random(7)
    shards = [24] * ranks, list(range(20, 20 + ranks)), [0] * (ranks - 1) + [50]
    names = ("forward", "reverse", "jensen_shannon", "total_variation")
    for dtype, reduction, sizes, divergence in itertools.product((F32, F16, BF16), ("none", "mean", "sum"), shards, names):
        if (dtype is F16) == (reduction != "none"):  # the others say it
            continue
        spread = rng.choice(((6,), (3, 4), (9,)))
        weights = torch.where(torch.rand(spread) < 0.3, 0.0, torch.rand(spread)).to(device)
        values = dict(beta=0.3, temperature=2.0, softcap=6.0, teacher_softcap=8.0, teacher_scale=0.75, row_weight=weights,
                      fast_logits=dtype is F32, workspace_mib=1)
        case = Heads(dtype, spread, sizes, rng.choice((None, dtype)), divergence=divergence, reduction=reduction,
                     **{k: v for k, v in values.items() if rng.random() < 0.4})
        case.compare("eager", case(*case.part, **case.split), case(*case.whole))
        entropies(case, case.part, case.whole)
    case = Heads(F32, (6,), shards[2], F32)
    for wants in (0,), (1,), (2,), (1, 2):
        case.compare(f"{wants} alone", case(*case.part, **case.split), case(*case.whole), wants)
    case = Heads(F32, (), shards[1], reduction="batchmean")
    case.compare("no batch", case(*case.part, **case.split), case(*case.whole))
    case = Heads(F32, (0,), shards[1], reduction="sum")
    case.compare("no tokens", case(*case.part, **case.split), case(*case.whole))
    with torch.no_grad():
        verdict("heads: no_grad", not case(*case.part, **case.split).requires_grad)
    for divergence, backend in zip(names, ("aot_eager", "inductor", "aot_eager")):
        torch._dynamo.reset()
        case = Heads(F32, (6,), shards[1], divergence=divergence)
        fast = torch.compile(lambda *leaves, **split: case(*leaves, **split), fullgraph=True, backend=backend)
        case.compare(backend, fast(*case.part, **case.split), case(*case.whole))
    case = Heads(F32, (6,), shards[0])
    with torch.autocast(device.type, BF16):
        loss = case(*case.part, **case.split)
    close("heads: autocast", loss, case(*case.whole), 0.05)
    for name, word, split in (("too few shards", "shards", dict(group=dist.group.WORLD, shards=[24])),
                              ("another rank's shard", "linear_weight", dict(group=dist.group.WORLD, shards=[25] * ranks)),
                              ("grad_scale", "grad_scale", dict(group=dist.group.WORLD, grad_scale=2.0)),
                              ("shards without group", "shards", dict(shards=[24] * ranks))):
        refused(f"heads: {name}", word, lambda: case(*case.part, **split))


def sequence_parallel(ranks):
    """Each rank's tokens alone, against the same call of all tokens. All bits are the same, but those of sums over three ranks or
    more, which may be added in another order."""
    from torch.utils.checkpoint import checkpoint
    from torch.utils.flop_counter import FlopCounterMode
    rng, rank, world = random.Random(8), dist.get_rank(), dist.group.WORLD
    calls = {"loss": Case.loss, "keep": lambda c, *leaves, **more: c.loss(*leaves, keep=True, **more), "stats": Case.stats,
             "statistics": lambda c, *leaves, **more: c.stats(*leaves, statistics=True, **more)}

    def equal(name, a, b):
        a, b = a.nan_to_num(7.0), b.nan_to_num(7.0)
        verdict(name, a.dtype == b.dtype and torch.equal(a, b), f"{a.flatten()[:3]}, not {b.flatten()[:3]}")

    def compare(kind, case, call, cut=lambda x: x, more=(), compiled=None):
        """call(x, w, b, *more, **split) of part of x, and of x. cut: what is done with the part before. more: leaves of all tokens."""
        x, *rest = case.part
        n, found = len(x) // ranks, []
        part = slice(rank * n, (rank + 1) * n)
        for parts in (True, False):
            input = cut(x.detach()[part].clone()).requires_grad_(x.requires_grad) if parts else x
            split = dict(case.split, sequence_parallel=True) if parts else case.split
            out = (compiled if parts and compiled else call)(input, *rest, *more, **split)
            out = out if isinstance(out, tuple) else (out,)
            wanted, used = [v for v in (input, *rest, *more) if v.requires_grad], [v for v in out if v.requires_grad]
            ups = [torch.linspace(-1, 2, v.numel(), device=device).view(v.shape) if v.dim() else v.new_tensor(1.5) for v in used]
            gradients = list(torch.autograd.grad(used, wanted, ups, materialize_grads=True)) if used else []
            if x.requires_grad and used and not parts:
                terms = float((gradients[0].double() * x.detach().double()).abs().sum())  # of a scale's gradient, but for the scale
                gradients[0] = gradients[0][part]
            found.append((out, gradients))
        name = f"in parts: {case.name}, {kind}"
        for i, (a, b) in enumerate(zip(*(out for out, _ in found))):
            equal(f"{name}, result {i}", a, b)
        verdict(f"{name}, as many", len({(len(out), len(gradients)) for out, gradients in found}) == 1)
        for i, (a, b) in enumerate(zip(*(gradients for _, gradients in found))):
            if i == 0 and x.requires_grad and ranks > 2:  # each rank's part is rounded, and so are their sums
                close(f"{name}, dx", a, b, (2 + ranks) * HALF[case.dtype] if case.dtype != F32 else 32 * HALF[F32])
            elif more and i == len(gradients) - 1:  # a sum of products with dx; the scale is at least a half
                close(f"{name}, gradient {i}", a, b, 2 * (2 + ranks) * HALF[case.dtype] * terms / max(float(b.norm()), 1e-30))
            else:
                equal(f"{name}, gradient {i}", a, b)

    uneven, some = list(range(20, 20 + ranks)), [0] * (ranks - 1) + [50]
    for dtype, sizes in itertools.product((F32, F16, BF16), ([24] * ranks, uneven, some)):
        spread = rng.choice(((2 * ranks,), (ranks, 4), (2 * ranks, 1, 3)))
        for kind, call in calls.items():
            case = Case(dtype, spread, 16, sizes, rng.choice((None, dtype, F32)), reduction=rng.choice(("none", "mean", "sum")),
                        **options(rng, sum(sizes)))
            compare(kind, case, functools.partial(call, case))
        case = HeadIds(dtype, spread, 5, 16, sizes, rng.choice((None, dtype, F32)), tail=rng.random() < 0.5)
        compare("ids", case, case)
        case = HeadSupport(dtype, spread, 16, sizes, rng.choice((None, dtype, F32)))
        compare("support", case, case)
        weights = torch.where(torch.rand(spread) < 0.3, 0.0, torch.rand(spread)).to(device)
        reduction = rng.choice(("none", "mean", "sum", "batchmean"))
        case = Heads(dtype, spread, sizes, rng.choice((None, dtype)), divergence=rng.choice(("forward", "jensen_shannon")),
                     reduction=reduction, row_weight=weights if rng.random() < 0.5 else None,
                     zero_when_empty=reduction == "mean" and rng.random() < 0.5, return_entropy=rng.random() < 0.5)
        compare("kl", case, case)
    of = lambda case: (case, case.loss if type(case) is Case else case)
    kinds = lambda dtype=F32, sizes=uneven, bias=None, spread=(2 * ranks,): (
        Case(dtype, spread, 16, sizes, bias), HeadIds(dtype, spread, 5, 16, sizes, bias), HeadSupport(dtype, spread, 16, sizes, bias),
        Heads(dtype, spread, sizes, bias, divergence="reverse"))
    for sizes, leaves in itertools.product((uneven, some), ((0,), (1,), (2,), (1, 2), ())):  # also of ranks without rows
        for case in kinds(F32, sizes, F32):
            for i, leaf in enumerate(case.part):
                leaf.requires_grad_(i in leaves)
            compare(f"gradients of {leaves}", *of(case))
    for case in kinds():
        compare("not contiguous", *of(case), cut=lambda x: x.t().contiguous().t())
        compare("wider rows", *of(case), cut=lambda x: torch.cat([x, x], 1)[:, :16])
        with torch.no_grad():
            compare("no_grad", *of(case))
        call = of(case)[1]
        compare("checkpoint", case, lambda *leaves, **split: checkpoint(call, *leaves, use_reentrant=False, **split))
        two = lambda x, *rest, **split: first_of(call(x, *rest, **split)).sum() + (x * x).sum(0).sum()  # input has another use
        x, w = case.part
        mine = x.detach().chunk(ranks)[rank].clone().requires_grad_()
        once, = torch.autograd.grad(first_of(call(mine, w, sequence_parallel=True, **case.split)).sum(), mine)
        twice, = torch.autograd.grad(two(mine, w, sequence_parallel=True, **case.split), mine)
        close(f"in parts: {case.name}, another use of input", twice, once + 2 * mine, 4 * HALF[F32])
        counted = []
        for input, parts in ((mine, True), (x, False)):
            with FlopCounterMode(display=False) as counter:
                first_of(call(input, w, sequence_parallel=parts, **case.split)).sum().backward()
            counted.append(counter.get_total_flops())
        verdict(f"in parts: {case.name}, flops", counted[0] == counted[1] > 0, f"{counted}")
    for spread in (0,), (2 * ranks, 0):
        for case in (Case(F32, spread, 16, uneven, zero_when_empty=True), HeadIds(F32, spread, 5, 16, uneven, zero_when_empty=True),
                     Heads(F32, spread, uneven, reduction="sum")):
            compare("no tokens", *of(case))
    case = HeadSupport(F32, (ranks,), 16, uneven)
    case.ids, case.teacher, case.target = case.ids[:0], case.teacher[:0], case.target[:0]
    case.offsets, case.part[0] = case.offsets[:1] * 0, case.part[0].detach()[:0].requires_grad_()
    compare("no tokens", *of(case))
    for per_token, which in itertools.product((False, True), ("logit_scale", "temperature")):
        for case in kinds(spread=(ranks, 2))[:3]:
            scale = (torch.rand(ranks, 2) if per_token else torch.rand(())).add(0.5).to(device).requires_grad_()
            call = lambda x, w, s, **split: of(case)[1](x, w, **{which: s}, **split)
            compare(f"{which}, per token {per_token}", case, call, more=(scale,))
    for case in kinds(sizes=[24] * ranks):
        with torch.autocast(device.type, BF16):
            case.dtype = BF16
            compare("autocast", *of(case))
    for backend, case in (*(("aot_eager", case) for case in kinds()), *(("inductor", case) for case in kinds(BF16, spread=(ranks, 3)))):
        torch._dynamo.reset()
        call = of(case)[1]
        fast = torch.compile(lambda *leaves, **split: call(*leaves, **split), fullgraph=True, backend=backend,
                             dynamic=backend == "inductor")
        compare(backend, case, call, compiled=fast)
    for case in kinds()[:3]:
        torch._dynamo.reset()
        call = lambda x, w, s, **split: of(case)[1](x, w, logit_scale=s, **split)
        compare("a learned scale, compiled", case, call, more=(torch.full((), 0.75, device=device).requires_grad_(),),
                compiled=torch.compile(lambda *leaves, **split: call(*leaves, **split), fullgraph=True, backend="aot_eager"))
    torch._dynamo.reset()
    for members in ([ranks - 2, ranks - 1], *([i] for i in range(ranks))):  # a group of some ranks, and of one
        group = dist.new_group(members)
        x, w, t = torch.randn(4, 16).to(device), torch.randn(12 * len(members), 16).to(device), torch.arange(4, device=device)
        if rank in members:
            n, first = 4 // len(members), 12 * group.rank()
            found = [LF.linear_cross_entropy(a, w[first:first + 12], t, group=group, sequence_parallel=parts)
                     for parts, a in ((True, x[group.rank() * n:][:n]), (False, x))]
            verdict(f"in parts: a group of {members}", torch.equal(*found), found)
    head = lk_torch.LinearCrossEntropyLoss(16, 24, group=world, sequence_parallel=True, device=device)
    x, t = torch.randn(2 * ranks, 16).to(device), torch.randint(24 * ranks, (2 * ranks,)).to(device)
    loss = head(x.chunk(ranks)[rank], t)
    verdict("in parts: a module", torch.equal(loss, LF.linear_cross_entropy(x, head.weight, t, group=world)))
    case, ids, support, heads = kinds(sizes=[24] * ranks)
    heads.more["row_weight"] = torch.rand(2 * ranks).to(device)
    refused("in parts: heads: a token less", "and row_weight [", lambda: heads(heads.part[0].detach().chunk(ranks)[rank][1:],
                                                                              heads.part[1], sequence_parallel=True, **heads.split))
    mine = lambda case: case.part[0].detach().chunk(ranks)[rank]
    more = dict(case.split, sequence_parallel=True)
    for case, call, names in ((case, case.loss, "target"), (case, case.stats, "target"), (ids, ids, "target_ids"),
                              (support, support, "target")):
        w = case.part[1]
        refused(f"in parts: {case.name}: all tokens", f"and {names} [", lambda: call(case.part[0], w, **more))
        refused(f"in parts: {case.name}: a token less", f"and {names} [", lambda: call(mine(case)[1:], w, **more))
        refused(f"in parts: {case.name}: without a group", "group is None", lambda: call(mine(case), w, sequence_parallel=True))
        refused(f"in parts: {case.name}: other rows", "linear_weight", lambda: call(mine(case)[:, :8], w, **more))
        if rank == ranks - 1:  # it refuses before its first collective
            for what, wrong in (("a softcap", dict(softcap=-1.0)), ("a scale", dict(logit_scale=torch.ones(7, device=device)))):
                try:
                    call(mine(case), w, **wrong, **more)
                    verdict(f"in parts: {case.name}: {what} on one rank", False, "no exception")
                except ValueError as error:
                    verdict(f"in parts: {case.name}: {what} on one rank", what.split()[1] in str(error), str(error))
        compare("the call behind", case, call)
    ids, offsets = support.ids, support.offsets
    refused("in parts: offsets", "offsets", lambda: LF.linear_support(mine(support)[1:], support.part[1], ids, offsets, **more))
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh
    sharded = distribute_tensor(case.part[0].detach(), init_device_mesh(device.type, (ranks,)), [Shard(0)])
    try:
        call(sharded, case.part[1], **more)
        verdict("in parts: a DTensor", False, "no exception")
    except TypeError as error:
        verdict("in parts: a DTensor", "to_local" in str(error), str(error))
    leaf = mine(case).requires_grad_()
    scale = torch.ones((), device=device).requires_grad_()
    loss = LF.linear_cross_entropy(leaf, case.part[1], case.target, logit_scale=scale, **more)
    try:
        torch.autograd.grad(loss, scale, create_graph=True)[0].backward()
        verdict("in parts: a second derivative", False, "no exception")
    except RuntimeError as error:
        verdict("in parts: a second derivative", "once" in str(error) or "second" in str(error), str(error))


def slices(ranks):
    """vocab_slices: results have the same bits on all ranks, and in a call without a group; gradients are those of plain calls. 6 is
    a multiple of both numbers of ranks that run on the CPU, so their results have the same bits too."""
    count, rank = 12 if ranks == 4 else 6, dist.get_rank()

    def compare(case, call, part, whole):
        """call(leaves, **split). Its first case.outputs results have gradients; case.cut is a rank's part of them."""
        equal = lambda a, b: torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
        results = lambda out: out if isinstance(out, tuple) else (out,)
        one, split, plain = (results(f) for f in (call(whole, vocab_slices=count), call(part, vocab_slices=count, **case.split), call(whole)))
        for i, (a, b) in enumerate(zip(split, one)):
            verdict(f"slices: {case.name}, result {i}: the bits of one rank", equal(a, b), f"{a}, not {b}")
        for i, (a, b) in enumerate(zip(one, plain)):
            close(f"slices: {case.name}, result {i}", a.float(), b.float(), 2e-5)
        ups = [torch.randn(t.shape).to(device) for t in one[:case.outputs]]
        found = torch.autograd.grad(split[:case.outputs], part, ups, materialize_grads=True)
        alone = torch.autograd.grad(one[:case.outputs], whole, ups, materialize_grads=True)
        right = torch.autograd.grad(plain[:case.outputs], whole, ups, materialize_grads=True)
        slack = 4e-5 + 8 * HALF[case.dtype]
        for i, (a, b, c) in enumerate(zip(found, alone, right)):
            close(f"slices: {case.name}, gradient {i} of one rank", b, c, slack)
            close(f"slices: {case.name}, gradient {i}", a, case.cut(i, c), slack)

    rows = lambda case: lambda i, g: g[case.mine] if i else g
    columns = lambda case: lambda i, g: g[..., case.mine]
    for dtype, sizes, reduction in itertools.product((F32, BF16), ([count * 8] * ranks, [count * 3] * (ranks - 1) + [count * 3 - 1]), ("none", "mean")):
        vocab, each = sum(sizes), -(-sum(sizes) // count)
        if any(sum(sizes[:i]) % (each * (count // ranks)) for i in range(ranks)):
            verdict(f"slices: {sizes} are whole slices", False)
        options = dict(reduction=reduction, softcap=5.0) if reduction == "none" else dict(reduction=reduction, z_loss=0.01)
        case = Case(dtype, (3, 4), 16, sizes, dtype, ignored=0.2, **options)
        case.outputs, case.cut = 1, rows(case)
        compare(case, lambda leaves, **o: case.loss(*leaves, **o), case.part, case.whole)
        case.outputs = 3
        compare(case, lambda leaves, **o: case.stats(*leaves, statistics=True, **o), case.part, case.whole)
        head = HeadIds(dtype, (9,), 3, 16, sizes, dtype, reduction=reduction, tail=True)
        head.outputs, head.cut = 3, rows(head)
        compare(head, lambda leaves, **o: head(*leaves, **o), head.part, head.whole)
        for divergence in ("forward", "jensen_shannon"):
            heads = Heads(dtype, (6,), sizes, dtype, reduction=reduction, divergence=divergence)
            heads.outputs, heads.cut = 1, rows(heads)
            compare(heads, lambda leaves, **o: heads(*leaves, return_entropy=True, **o), heads.part, heads.whole)
        if each % 8:  # rows of logits that lie otherwise modulo 16 bytes are added up in another order
            continue
        logits = Logits(dtype, (5,), sizes, ignored=0.2, **options)
        logits.outputs, logits.cut = 1, columns(logits)
        compare(logits, lambda leaves, **o: logits(*leaves, **o), logits.part, logits.whole)
        logits.outputs = 3
        in_order = lambda out: (out.loss, out.lse, out.entropy, out.z_loss, out.argmax)
        compare(logits, lambda leaves, **o: in_order(logits(*leaves, stats=True, **o)), logits.part, logits.whole)
        several = Ids(dtype, (7,), 3, sizes, reduction=reduction, tail=True)
        several.outputs, several.cut = 3, columns(several)
        compare(several, lambda leaves, **o: several(*leaves, **o), [several.part], [several.whole])
        for divergence in ("forward", "jensen_shannon"):
            case = Divergence(dtype, (6,), sizes, reduction=reduction, divergence=divergence)
            case.outputs, case.cut = 1, columns(case)
            compare(case, lambda leaves, **o: case(*leaves, return_entropy=True, **o), [case.part], [case.whole])
    # Where a rank's classes are no whole slices, or nothing can be divided so.
    case = Case(F32, (6,), 16, [24] * ranks)
    for name, word, leaves, more in (("no multiple of the ranks", "multiple of the number of ranks", case.part, dict(case.split, vocab_slices=ranks + 1)),
                                     ("below 0", "at least 0", case.part, dict(case.split, vocab_slices=-1)),
                                     ("no whole slices", "its slices have", [case.part[0], case.whole[1][:23 + rank]],
                                      dict(group=dist.group.WORLD, shards=[23 + i for i in range(ranks)], vocab_slices=count)),
                                     ("grad_scale", "grad_scale", case.whole, dict(vocab_slices=count, grad_scale=1.0))):
        refused(f"slices: {name}", word, lambda: LF.linear_cross_entropy(*leaves, case.target, **more))
    refused("slices: inplace", "inplace", lambda: LF.cross_entropy(case.whole[1].detach(), torch.zeros(24 * ranks, dtype=torch.int64,
                                                                   device=device), vocab_slices=count, inplace=True))
    refused("slices: max_counted", "max_counted", lambda: LF.linear_cross_entropy_ids(*case.whole, case.target[:, None], max_counted=3,
                                                                                      vocab_slices=count))
    if not CUDA or torch.cuda.get_device_capability() == (9, 0):  # any number of tokens
        case = Case(BF16, (70,), 64, [768 * count // ranks] * ranks, reduction="none")
        call = lambda x, w, t, **o: LF.linear_cross_entropy_stats(x, w, t, reduction="none", batch_invariant=True, vocab_slices=count, **o)
        for name, leaves, split in (("one rank", case.whole, {}), ("ranks", case.part, case.split)):
            x, w = (t.detach() for t in leaves)
            all_of = call(x, w, case.target, **split)
            for first, end in ((0, 1), (5, 8), (0, 64), (33, 70)):
                some = call(x[first:end], w, case.target[first:end], **split)
                verdict(f"slices: batch_invariant, {name}, tokens {first} to {end}",
                        all(torch.equal(u[first:end], v) for u, v in zip(all_of, some)))


def first_of(out):
    return out[0] if isinstance(out, tuple) else out


def dtensors(ranks):
    """Rows that lie on several ranks: the results and gradients of all rows."""
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
    from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module
    mesh = init_device_mesh(device.type, (ranks,))
    whole = lambda v: v.full_tensor() if isinstance(v, DTensor) else v

    def compare(name, f, leaves, placements, more=()):
        given = [distribute_tensor(v.detach(), mesh, [p]).requires_grad_(v.requires_grad) for v, p in zip(leaves, placements)]
        found = []
        for of in (given, leaves):
            out = f(*of)
            out = out if isinstance(out, tuple) else (out,)
            total = sum((whole(v) * (i + 1)).sum() for i, v in enumerate(out) if v.requires_grad)
            wanted = [v for v in of if v.requires_grad]
            found.append([*map(whole, out), *map(whole, torch.autograd.grad(total, wanted))])
        for i, (a, b) in enumerate(zip(*found)):
            close(f"DTensor: {name}, {i}", a, b, 1e-5)
    tensor = lambda *shape: torch.randn(shape).to(device).requires_grad_()
    x, r, w, heads = tensor(5, 4, 16), tensor(5, 4, 16), tensor(16), tensor(4, 16)
    for p in (Shard(0), Shard(1), Shard(2), Shard(-1), Replicate()):
        same = [p, Replicate()]
        compare(f"rms_norm {p}", lambda x, w: LF.rms_norm(x, 16, w), [x, w], same)
        compare(f"rms_norm with bias {p}", lambda x, w, b: LF.rms_norm(x, 16, w, bias=b), [x, w, tensor(16)],
                [*same, Shard(0) if p.is_shard() else p])
        compare(f"rms_norm with groups {p}", lambda x, w: LF.rms_norm(x, 16, w, groups=4), [x, heads], same)
        compare(f"rms_norm of two dims {p}", lambda x, w: LF.rms_norm(x, (4, 16), w), [x, heads], same)
        compare(f"add_rms_norm {p}", lambda x, r, w: LF.add_rms_norm(x, r, 16, w), [x, r, w], [p, Replicate(), Replicate()])
        compare(f"glu {p}", LF.glu, [x], [p])
        compare(f"glu, in turns {p}", lambda x: LF.glu(x, None, "gelu", interleaved=True), [x], [p])
        compare(f"glu, apart {p}", lambda x, u: LF.glu(x, u, limit=1.0), [x, r], [p, Shard(0)])
        for q in (p if p.is_shard() and p.dim in (0, 1) else Replicate(), Shard(0)):
            compare(f"glu, row_weight {p} {q}", lambda x, u, m: LF.glu(x, u, up_offset=1.0, row_weight=m), [x, r, tensor(5, 4)],
                    [p, p, q])
            compare(f"glu, halves, row_weight {p} {q}", lambda x, m: LF.glu(x, row_weight=m), [x, tensor(5, 4)], [p, q])
        q, k, u = tensor(4, 3, 5, 8), tensor(4, 3, 4, 8), tensor(8)
        table, at = torch.randn(4, 3, 8).to(device), torch.randint(999, (2, 4, 3)).to(device)
        spread = [p if p.is_shard() else Shard(3), Shard(0)]  # of q and k
        compare(f"rope {p}", lambda q, k, c: LF.rope(q, k, cos=c, sin=c), [q, k, table], [*spread, Replicate()])
        compare(f"rope, heads first {p}", lambda q, at, w: LF.rope(
            q, inv_freq=table[0, 0, :4], position=at, pair_axis=torch.tensor([0, 1, 1, 0], dtype=torch.int32, device=device),
            heads_first=True, q_weight=w), [tensor(4, 5, 3, 8), at, u], [p, Shard(1), Replicate()])
        compare(f"rope, three dimensions {p}",
                lambda q, k, f, w: LF.rope(q, k, inv_freq=f, offset=3, k_weight=w, weight_offset=1.0),
                [tensor(3, 5, 8), tensor(3, 4, 8), table[0, 0, :4], u], [p, Replicate(), Replicate(), Replicate()])
        for dim, keepdim in ((1, False), (-1, True), ((0, 2), False), ((0, 2), True)):
            compare(f"logsumexp {p}, {dim}, {keepdim}", lambda x: LF.logsumexp(x, dim, keepdim, scale=0.5), [x], [p])
    weight, target = torch.rand(16).to(device) + 0.5, torch.randint(16, (5,)).to(device)
    target[1] = -100
    for p, reduction in itertools.product((Shard(0), Shard(1), Replicate()), ("none", "mean", "sum")):
        for options in ({}, dict(z_loss=0.01, label_smoothing=0.125), dict(weight=weight, z_loss=0.01), dict(denominator=3)):
            if "denominator" in options and reduction != "mean":
                continue
            f = lambda x, t: LF.cross_entropy(x, t, reduction=reduction, **options)
            compare(f"cross_entropy {p}, {reduction}, {sorted(options)}", f, [tensor(5, 16), target], [p, Shard(0)])
        f = lambda x, t, r: LF.cross_entropy(x, t, reduction=reduction, row_weight=r)
        compare(f"cross_entropy with row_weight {p}, {reduction}", f, [tensor(5, 16), target, torch.randn(5).to(device)],
                [p, Shard(0), Replicate()])
        f = lambda x, t: tuple(LF.cross_entropy_stats(x, t, reduction=reduction))
        compare(f"cross_entropy_stats {p}, {reduction}", f, [tensor(5, 16), target], [p, Replicate()])
        f = lambda x, t: tuple(LF.cross_entropy_stats(x, t, reduction=reduction, statistics=True))
        compare(f"cross_entropy_stats with statistics {p}, {reduction}", f, [tensor(5, 16), target], [p, Replicate()])
        probable = torch.softmax(torch.randn(5, 16), 1).to(device)
        f = lambda x, t: LF.cross_entropy(x, t, reduction=reduction)
        compare(f"cross_entropy of probabilities {p}, {reduction}", f, [tensor(5, 16), probable], [p, p])
        labels = torch.randint(16, (2, 5)).to(device)
        compare(f"cross_entropy of [N, C, d] {p}, {reduction}", f, [tensor(2, 16, 5), labels], [p, Shard(1)])
    norm, plain = lk_torch.RMSNorm(16, bias=True, device=device), torch.nn.RMSNorm(16, device=device)
    x = torch.randn(2, 3 * ranks, 16).to(device)
    parallelize_module(norm, mesh, SequenceParallel())
    out, right = norm(x.chunk(ranks, 1)[dist.get_rank()]), plain(x)  # it takes a plain input for a shard
    verdict("SequenceParallel: sharded", out.placements == (Shard(1),), str(out.placements))
    close("SequenceParallel", whole(out), right, 1e-5)
    whole(out).square().sum().backward(), right.square().sum().backward()
    close("SequenceParallel, dweight", whole(norm.weight.grad), plain.weight.grad, 1e-5)
    x = tensor(2 * ranks, 16)
    given = distribute_tensor(x.detach(), mesh, [Shard(0)]).requires_grad_()
    fast = torch.compile(lambda x: LF.logsumexp(LF.srms_norm(x), 1), backend="aot_eager", fullgraph=True)
    out, right = fast(given), torch.logsumexp(LF.srms_norm(x), 1)
    close("DTensor: compiled", whole(out), right, 1e-5)
    close("DTensor: compiled, dx", whole(torch.autograd.grad(whole(out).sum(), given)[0]),
          torch.autograd.grad(right.sum(), x)[0], 1e-5)
    x, w = tensor(2 * ranks, 16), tensor(16)  # what is plain beside a DTensor is that of all ranks
    given = distribute_tensor(x.detach(), mesh, [Shard(0)]).requires_grad_()
    ours, theirs = LF.rms_norm(given, 16, w), LF.rms_norm(x, 16, w)
    close("a DTensor and a plain weight", whole(ours), theirs, 1e-6)
    mine, right = (torch.autograd.grad(y.square().sum(), [leaf, w]) for y, leaf in ((whole(ours), given), (theirs, x)))
    close("a DTensor and a plain weight, dx", whole(mine[0]), right[0], 1e-5)
    close("a DTensor and a plain weight, dweight", whole(mine[1]) if hasattr(mine[1], "full_tensor") else mine[1], right[1], 1e-5)
    target = (torch.arange(2 * ranks, device=device) * 5) % 16
    for reduction in ("mean", "none"):
        ours, theirs = (LF.cross_entropy(v, target, reduction=reduction) for v in (given, x))
        close(f"a DTensor and a plain target, {reduction}", whole(ours), theirs, 1e-6)
        mine, right = (torch.autograd.grad(loss.sum(), leaf)[0] for loss, leaf in ((whole(ours), given), (theirs, x)))
        close(f"a DTensor and a plain target, {reduction}, dx", whole(mine), right, 1e-5)


def compiled(ranks):
    """In one graph, with the results of eager mode."""
    uneven = list(range(20, 20 + ranks))
    cases = [Case(F32, (6,), 16, [24] * ranks, F32), Case(F32, (3, 4), 16, uneven, label_smoothing=0.125, ignored=0.3),
             Case(BF16, (9,), 16, uneven, reduction="none")]
    for case, backend in [*((case, "aot_eager") for case in cases), (cases[1], "inductor")]:
        def step(*leaves, stats=False, **split):
            loss = case.loss(*leaves, **split)
            return (2 * loss, *case.stats(*leaves, **split)[1:]) if stats else 2 * loss
        for stats in (False, True) if backend == "aot_eager" else (True,):
            torch._dynamo.reset()
            fast = torch.compile(step, fullgraph=True, backend=backend, dynamic=backend == "inductor")
            ours, theirs = fast(*case.part, stats=stats, **case.split), step(*case.whole, stats=stats)
            case.compare(f"{backend}, stats={stats}", ours, theirs)


def mistakes(ranks):
    case = Case(F32, (6,), 16, [22] * ranks)
    more = dict(group=dist.group.WORLD)
    for name, split, leaves in (("too few shards", dict(more, shards=[22]), case.part),
                                ("another rank's shard", dict(more, shards=[25] * ranks), case.part),
                                ("shards without group", dict(shards=[22] * ranks), case.part),
                                ("one rank's wrong number", dict(more, shards=[22] * (ranks - 1) + [25]), case.part),
                                ("a wrong number on one rank", dict(more, shards=[22, 22, 22 - dist.get_rank()][-ranks:]),
                                 case.part),
                                ("one rank has too few shards", dict(more, shards=[22] * min(ranks, 1 + dist.get_rank())),
                                 case.part),
                                ("one rank has fewer rows", more, [case.part[0], case.part[1][dist.get_rank():]]),
                                ("a learned scale with a bias", dict(more, logit_scale=torch.ones(6).to(device)),
                                 [*case.part[:2], case.part[1][:, 0]]),
                                ("rows of another length", more, [case.part[0], case.part[1][:, :8]])):
        try:
            case.loss(*leaves, **split)
            verdict(name, False, "no exception")
        except ValueError as error:
            dist.barrier()  # which all ranks come to
            verdict(name, any(word in str(error) for word in ("shards", "linear_weight", "linear_bias")), str(error))


def mistakes_of_one_rank(ranks):
    """What the last rank refuses, it refuses before its first collective: no other rank is in one, and the next call is right. These are
    all functions with a group."""
    sizes, rank = [22] * ranks, dist.get_rank()
    first, vocab = 22 * rank, 22 * ranks
    group, one = dict(group=dist.group.WORLD), torch.ones(6, device=device)
    draw = lambda *shape: torch.randn(shape).to(device)
    x, w, t, w_teacher = draw(6, 16), draw(vocab, 16), torch.randint(vocab, (6,)).to(device), draw(vocab, 16)
    ids, logits, other = torch.randint(vocab, (6, 3)).to(device), draw(6, vocab), draw(6, vocab)
    mine = lambda v, dim=0: v.narrow(dim, first, 22).contiguous()
    rows = {"linear_cross_entropy": lambda f, c, **o: f(x, c(w), t, **o), "linear_cross_entropy_stats": lambda f, c, **o: f(x, c(w), t, **o),
            "linear_cross_entropy_ids": lambda f, c, **o: f(x, c(w), ids, **o),
            "cross_entropy": lambda f, c, **o: f(c(logits, 1), t, **o), "cross_entropy_stats": lambda f, c, **o: f(c(logits, 1), t, **o),
            "cross_entropy_ids": lambda f, c, **o: f(c(logits, 1), ids, **o), "kl": lambda f, c, **o: f(c(logits, 1), c(other, 1), **o),
            "linear_kl": lambda f, c, **o: f(x, c(w), x + 1, c(w_teacher), **o)}
    public = {name for name, f in vars(LF).items() if name[0] != "_" and "group" in (getattr(f, "__kwdefaults__", None) or ())}
    public -= {"linear_support", "linear_topk", "support"}  # which have no row_weight and no reduction: groups of their own
    verdict("every function with a group has a row", public == set(rows), f"{sorted(public ^ set(rows))}")
    for name, call in rows.items():
        f = getattr(LF, name)
        part = lambda **o: first_of(call(f, mine, **group, **o))
        part()  # the ranks agree on the shards
        if rank == ranks - 1:
            for what, wrong in (("row_weight's shape", dict(row_weight=one[:5])), ("row_weight's type", dict(row_weight=one.long())),
                                ("row_weight on meta", dict(row_weight=one.to("meta"))), ("a softcap", dict(softcap=-1.0)),
                                ("a reduction", dict(reduction="all"))):
                try:
                    part(**wrong)
                    verdict(f"{name}: {what} on one rank", False, "no exception")
                except (ValueError, TypeError) as error:
                    verdict(f"{name}: {what} on one rank", str(error).startswith("lk"), str(error))
        close(f"{name}: the call behind", part(row_weight=one), first_of(call(f, lambda v, dim=0: v, row_weight=one)), 2e-6)
    try:
        LF.linear_cross_entropy(x, mine(w), t, grad_scale=2.0, **group)
        verdict("grad_scale with a group", False, "no exception")
    except ValueError as error:
        verdict("grad_scale with a group", "grad_scale" in str(error), str(error))


def worker(rank, ranks, port):
    global device
    device = torch.device("cuda", rank) if CUDA else torch.device("cpu")
    if CUDA:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if CUDA else "gloo", f"tcp://localhost:{port}", rank=rank, world_size=ranks)
    for group in (against_one_rank, of_logits, several_ids, ids_of_a_head, topk_of_a_head, supports_of_a_head, supports_of_logits, divergences,
                  divergences_of_heads, slices, module, learned, sequence_parallel, dtensors, compiled, mistakes,
                  mistakes_of_one_rank):  # in this order: shards that ranks have agreed on are not compared again
        torch.manual_seed(1)
        group(ranks)
    print(f"{totals[0]} passed, {totals[1]} failed", flush=True)
    dist.barrier()
    if rank == 0:  # which has the store that the others may ask until they have left
        time.sleep(1)
    dist.destroy_process_group()
    sys.exit(totals[1] > 0)


def main():
    passed = failed = 0
    for ranks in (2, 3, 4)[:3 if CUDA else 2]:
        if CUDA and torch.cuda.device_count() < ranks:
            print(f"  skipped: {ranks} ranks need {ranks} GPUs; this machine has {torch.cuda.device_count()}")
            continue
        with socket.socket() as s:
            s.bind(("localhost", 0))
            port = s.getsockname()[1]
        command = [sys.executable, os.path.abspath(__file__)]
        started = [subprocess.Popen([*command, str(rank), str(ranks), str(port)], stdout=subprocess.PIPE, text=True,
                                    stderr=subprocess.STDOUT) for rank in range(ranks)]
        for rank, process in enumerate(started):
            try:
                lines = process.communicate(timeout=600)[0].rstrip().splitlines() or [""]
            except subprocess.TimeoutExpired:
                process.kill()
                lines = process.communicate()[0].rstrip().splitlines() + ["it hangs"]
            last = [line for line in lines if line.split()[1:2] == ["passed,"]][-1:]
            if last:
                words = last[0].split()
                passed, failed = passed + int(words[0]), failed + int(words[2])
                lines.remove(last[0])
                if process.returncode < 0:
                    failed += 1
                    lines.append(f"  FAIL  rank {rank} of {ranks} ended with {process.returncode} behind its last line: {lines[-1:]}")
            else:
                failed += 1
                lines.append(f"  FAIL  rank {rank} of {ranks} ended with {process.returncode} before its last line")
            print(*lines, sep="\n", end="\n" if lines else "", flush=True)
    print(f"{passed} passed, {failed} failed")
    sys.exit(failed > 0)


if __name__ == "__main__":
    quiet()
    worker(*map(int, sys.argv[1:])) if sys.argv[1:] else main()
