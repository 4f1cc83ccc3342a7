#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The heads of Megatron-LM and TransformerEngine, split by vocabulary over all GPUs of this machine, beside bench/parallel.c.

    python bench/parallel_peers.py [--case TEXT]     # a process per GPU, with NCCL; --device cpu --smoke: tiny, with gloo

Their formulas, written here in PyTorch:
  Megatron     logits = x W^T in bf16, then as float: max (all-reduce), the target's logit (all-reduce), sum of exponentials
               (all-reduce); gradient softmax - onehot, rounded to bf16
  TE           likewise with one all-gather of (max, sum, target's logit) per token; the gradient overwrites the logits
Both compile their elementwise work with torch.compile. dx is summed over ranks on a stream of NCCL's, beside dweight's matmul.
Where lk_torch is installed, its form over a process group is timed too, with autograd, by itself and under torch.compile.
Mean loss, bf16, forward + backward in one step, timed as bench/parallel.c does: 0.4 s back to back after as long a warm-up.
Loss and dx are held against the formula in float before anything is timed. Rows go to BENCH_CSV."""
import argparse
import os
import socket
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

try:
    from lk_torch.functional import linear_cross_entropy
except ImportError:
    linear_cross_entropy = None

SHAPES = [(t, h, v) for v in (131072, 32000) for t in (8192, 2048) for h in (4096, 2048)]
SMOKE = [(64, 32, 128)]


def exponentials(logits, target, first):
    """This rank's max, sum of exponentials and target's logit of each row; the logits as float stay in registers."""
    z = logits.float()
    top = z.amax(1)
    column = target - first
    here = (column >= 0) & (column < z.shape[1])
    hit = torch.where(here, z.gather(1, column.clamp(0, z.shape[1] - 1)[:, None])[:, 0], 0.0)
    return top, (z - top[:, None]).exp().sum(1), hit, here


def gradient(logits, lse, target, first, factor):
    z = logits.float()
    columns = torch.arange(first, first + z.shape[1], device=z.device)
    return (((z - lse[:, None]).exp() - (columns[None, :] == target[:, None]).float()) * factor).to(logits.dtype)


def max_and_target(logits, target, first):
    z = logits.float()
    column = target - first
    here = (column >= 0) & (column < z.shape[1])
    return z.amax(1), torch.where(here, z.gather(1, column.clamp(0, z.shape[1] - 1)[:, None])[:, 0], 0.0)


def sum_exp(logits, top):
    return (logits.float() - top[:, None]).exp().sum(1)


class Peer:
    def __init__(self, compiled):
        wrap = (lambda f: torch.compile(f, dynamic=False)) if compiled else (lambda f: f)
        self.exponentials, self.gradient = wrap(exponentials), wrap(gradient)
        self.max_and_target, self.sum_exp = wrap(max_and_target), wrap(sum_exp)

    def megatron_lse(self, logits, target, first):
        top, hit = self.max_and_target(logits, target, first)
        dist.all_reduce(top, dist.ReduceOp.MAX)
        dist.all_reduce(hit)
        total = self.sum_exp(logits, top)
        dist.all_reduce(total)
        return top + total.log(), hit

    def te_lse(self, logits, target, first):
        top, total, hit, _ = self.exponentials(logits, target, first)
        mine = torch.stack([top, total, hit])
        every = torch.empty(dist.get_world_size() * 3, mine.shape[1], device=mine.device)
        dist.all_gather_into_tensor(every, mine)
        every = every.view(-1, 3, mine.shape[1])
        most = every[:, 0].amax(0)
        return most + (every[:, 1] * (every[:, 0] - most).exp()).sum(0).log(), every[:, 2].sum(0)

    def step(self, name, x, weight, target, first):
        """The loss, dx summed over ranks, this rank's dweight."""
        logits = x @ weight.T
        lse, hit = (self.megatron_lse if name == "Megatron" else self.te_lse)(logits, target, first)
        loss = (lse - hit).mean()
        dz = self.gradient(logits, lse, target, first, 1.0 / x.shape[0])
        dx = dz @ weight
        work = dist.all_reduce(dx, async_op=True)
        dweight = dz.T @ x
        work.wait()
        return loss, dx, dweight


def lk_step(loss_of):
    def step(x, weight, target, first):
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        loss = loss_of(x, weight, target)
        return loss.detach(), *torch.autograd.grad(loss, (x, weight))
    return step


def steps_of(smoke):
    """name -> the step."""
    peer = Peer(compiled=not smoke)
    all_of = {f"{name}'s formula": lambda *args, name=name: peer.step(name, *args) for name in ("Megatron", "TE")}
    if linear_cross_entropy:
        head = lambda x, weight, target: linear_cross_entropy(x, weight, target, group=dist.group.WORLD)  # noqa: E731
        all_of["lk_torch"] = lk_step(head)
        if not smoke:
            all_of["lk_torch; compiled"] = lk_step(torch.compile(head, dynamic=False))
    return all_of


def sync(device):
    if device == "cuda":
        torch.cuda.synchronize()


def milliseconds(call, device, seconds):
    """The mean of calls back to back, of the slowest rank."""
    for _ in range(3):
        call()
    sync(device)
    start = time.perf_counter()
    for _ in range(3):
        call()
    sync(device)
    calls = torch.tensor([max(5, int(seconds / ((time.perf_counter() - start) / 3)))], device=device)
    dist.broadcast(calls, 0)
    calls = int(calls)
    for _ in range(calls):
        call()
    sync(device)
    dist.barrier()
    sync(device)
    start = time.perf_counter()
    for _ in range(calls):
        call()
    sync(device)
    each = torch.tensor([(time.perf_counter() - start) / calls * 1e3], device=device)
    dist.all_reduce(each, dist.ReduceOp.MAX)
    return float(each)


def run(rank, ranks, port, args):
    device = args.device
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if device == "cuda" else "gloo", rank=rank, world_size=ranks)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    csv = open(os.environ["BENCH_CSV"], "a") if rank == 0 and os.environ.get("BENCH_CSV") else None
    for tokens, hidden, vocab in SMOKE if args.smoke else SHAPES:
        case = f"tokens={tokens} hidden={hidden} vocab={vocab}"
        if args.case not in case:
            continue
        torch.manual_seed(1)
        first, end = vocab * rank // ranks, vocab * (rank + 1) // ranks
        x = torch.randn(tokens, hidden, device=device, dtype=dtype)
        whole = torch.randn(vocab, hidden, device=device, dtype=dtype) * hidden**-0.5
        weight, target = whole[first:end].contiguous(), torch.arange(tokens, device=device) * 7919 % vocab
        some = slice(0, 64)  # the formula in float, for some tokens
        z = x[some].float() @ whole.float().T
        want_loss = torch.nn.functional.cross_entropy(x.float() @ whole.float().T, target) if tokens * vocab < 1 << 29 else None
        p = z.softmax(1)
        p[torch.arange(p.shape[0]), target[some]] -= 1.0
        want_dx = p @ whole.float() / tokens
        del whole, z, p
        for name, step in steps_of(args.smoke).items():
            call = lambda: step(x, weight, target, first)  # noqa: E731
            loss, dx, _ = call()
            error = float((dx[some].float() - want_dx).norm() / want_dx.norm())
            off = 0.0 if want_loss is None else float((loss - want_loss).abs())
            if error > 0.02 or off > 0.01 or not torch.isfinite(loss):
                raise SystemExit(f"{name} is wrong here: dx by {error:.3g}, loss by {off:.3g}")
            ms = milliseconds(call, device, 0.01 if args.smoke else 0.4)
            if rank == 0:
                size = tokens * (16 if "lk" in name else 12)
                print(f"| {tokens} x {hidden} x {vocab} | forward_backward | {ranks} | {name} | {ms:.4f} |  | {size} |", flush=True)
                if csv:
                    csv.write(f"linear_cross_entropy,forward_backward,bf16,{case},{ranks},{name},{ms:.5g},,{size},"
                              f"{os.environ.get('BENCH_GPU', '')},{os.environ.get('COMMIT', '')}\n")
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="", help="only cases that hold this")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--smoke", action="store_true", help="a tiny shape, not compiled")
    args = parser.parse_args()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    ranks = torch.cuda.device_count() if args.device == "cuda" else 2
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    start = time.perf_counter()
    mp.spawn(run, (ranks, port, args), nprocs=ranks)
    print(f"parallel_peers: done in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
