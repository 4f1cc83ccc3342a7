#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""A leaderboard's cross entropy beside lk's: the CUDA kernel of modded-nanogpt (bench/fetch_peers), on its own shapes.

    leaderboard.py [--csv FILE] [--case TEXT] [--device cpu --smoke]

The loss of a row is the sum over its targets of weight * cross entropy, of the logits z = 23 sigmoid((x + shift) / 7.5). Targets
are the next tokens, with the weights that its three stages begin with, and a prefix of the next token. One kernel of one block per
row computes loss and gradient; the gradient is fp8 e5m2, over a factor. With softcap 11.5 and logit_scale 23 / 30 lk computes the
same z without the shift, which lk does not have, less a constant, which a softmax does not see. The shift is 0 here.

Providers  modded-nanogpt; lk ids: cross_entropy_ids, forward and backward; lk: cross_entropy, one call, where there is one target;
           lk e5m2: cross_entropy_with_grad, the same in the kernel's type, times 2^15. The other gradients of lk are bf16.
Times      call_ms and kernel_ms as in compare.py; gb_per_s: logits read once and the gradient written once, over kernel_ms.
Errors     relative, against float64, of the loss summed over all rows and of the gradient. The gradient's last two rows are left
           out: the kernel counts targets there that do not exist.
Rows       go to bench/results/<gpu>-leaderboard.csv.
"""
import argparse
import importlib.metadata
import sys

import compare
import torch

COLUMNS = ("op", "direction", "dtype", "case", "provider", "version", "call_ms", "kernel_ms", "kernel_clock", "gb_per_s", "errors",
           "note", "gpu", "commit")
VOCAB, A, C = 50304, 23.0, 7.5
SCALE = 0.75 / 448  # of its gradient
STAGES = ((16384, (1.0, 0.5, 0.25), 0.25), (32768, (1.0, 0.5), 0.25), (49152, (1.0,), 0.0))  # rows, weights, the prefix's
OPTIONS = {"softcap": A / 2, "logit_scale": A / (4 * C), "reduction": "sum"}


def inputs_of(env, rows, weights, prefix, vocab):
    g = torch.Generator(device=env.device).manual_seed(1)
    logits = torch.empty(rows, vocab, dtype=torch.bfloat16, device=env.device).normal_(generator=g).mul_(5)
    target, prefixes = (torch.randint(vocab, (rows,), device=env.device, generator=g) for _ in range(2))
    ids = torch.stack([target.roll(-k) for k in range(len(weights))] + [prefixes] * bool(prefix), 1)
    weight = torch.tensor([*weights, prefix][:ids.shape[1]], device=env.device).expand(ids.shape).contiguous()
    return logits, target, prefixes, ids, weight


def right(logits, ids, weight):
    """The rows' losses and the logits' gradient, in float64, in slices."""
    for s in compare.slices(*logits.shape):
        u = torch.tanh(logits[s].double() / (2 * C))
        logp = torch.log_softmax(A / 2 * u, 1)
        w = weight[s].double()
        dz = logp.exp().mul_(w.sum(1, keepdim=True)).scatter_add_(1, ids[s], -w)
        yield s, -(w * logp.gather(1, ids[s])).sum(1), dz.mul_(1 - u * u).mul_(A / (4 * C))


def errors_of(loss, gradient, expected, last):
    """`gradient` gives the rows of a slice in float64, `loss` is that of all rows."""
    total = off = norm = 0.0
    for s, losses, dx in expected:
        total += float(losses.sum())
        rows = slice(s.start, min(s.stop, last))
        dx = dx[:rows.stop - rows.start]
        off += float((gradient(rows) - dx).square().sum())
        norm += float(dx.square().sum())
    return f"loss={abs(float(loss) / total - 1):.2e} dlogits={(off / norm)**0.5:.2e}"


def providers(env, logits, target, prefixes, ids, weight, weights, prefix):
    """name -> (version, call that gives loss and gradient, the gradient's factor)."""
    leaf = logits.detach().requires_grad_()

    def with_gradient(loss):
        return loss.detach(), torch.autograd.grad(loss, leaf)[0]

    yield "lk ids", env.version, lambda _: with_gradient(env.lk.cross_entropy_ids(leaf, ids, weight, **OPTIONS).loss), 1.0
    if ids.shape[1] == 1:
        yield "lk", env.version, lambda _: with_gradient(env.lk.cross_entropy(leaf, target, **OPTIONS)), 1.0
        narrow = {"grad_scale": torch.tensor(2.0**15, device=env.device), "dlogits_dtype": torch.float8_e5m2}
        yield "lk e5m2", env.version, lambda _: env.lk.cross_entropy_with_grad(logits, target, **OPTIONS, **narrow), 2.0**-15
    if env.cuda:
        peer = compare.imported("modded_nanogpt")
        if isinstance(peer, Exception):
            print(f"missing: modded-nanogpt: {peer}")
            return
        mtp, first = (torch.tensor(values, device=env.device) for values in (weights, [prefix]))

        def kernel(_):
            losses = torch.empty(len(logits), device=env.device)
            gradient = torch.empty(logits.shape, dtype=torch.float8_e5m2, device=env.device)
            peer.ce_fwd_bwd(logits, target, mtp, prefixes, first, losses, gradient, len(logits), len(weights), A, 0.0, C, SCALE,
                            1.0)
            return losses, gradient
        yield "modded-nanogpt", f"modded-nanogpt {importlib.metadata.version('modded-nanogpt')}", kernel, SCALE


def main():
    parser = argparse.ArgumentParser(description="modded-nanogpt's cross entropy beside lk's; the file's first comment says how")
    parser.add_argument("--csv", help="instead of bench/results/<gpu>-leaderboard.csv; build/cpu-leaderboard.csv with --smoke")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--smoke", action="store_true", help="lk alone on tiny cases, to try the program itself")
    parser.add_argument("--case", default="", help="only cases whose name holds this")
    parser.set_defaults(calls=False, quick=False, list=False, reference=False, provider=[], budget=None)  # compare.Environment's
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"PyTorch {torch.__version__} sees no GPU here, so nothing was measured")
        return 0
    env = compare.Environment(options)
    print(env.version)
    folder = "build" if env.smoke else "bench/results"
    rows = compare.Rows(options.csv or f"{compare.ROOT}/{folder}/{env.gpu}-leaderboard.csv", COLUMNS)
    progress, wrong = compare.Progress(len(STAGES)), 0
    for count, weights, prefix in STAGES:
        count, vocab = (9, 304) if env.smoke else (count, VOCAB)
        case = compare.Case("cross_entropy_ids", f"rows={count} vocab={vocab} ids={len(weights) + bool(prefix)} softcap=11.5", {},
                            (), (), (), None, {}, [])
        progress.done += 1
        if options.case not in case.name:
            continue
        tensors = inputs_of(env, count, weights, prefix, vocab)
        logits, _, _, ids, weight = tensors
        for name, version, call, factor in providers(env, *tensors, weights, prefix):
            row = {"provider": name, "version": version, "direction": "forward_backward"}
            try:
                loss, gradient = call(0)
                row["errors"] = errors_of(loss.double().sum(), lambda s: gradient[s].double() * factor, right(logits, ids, weight),
                                          count - 2)
                size = logits.numel() * (logits.element_size() + gradient.element_size())
                loss = gradient = None
                call_ms, = compare.call_clock(env, [call], [lambda: None], 1)
                if isinstance(call_ms, Exception):
                    raise call_ms
                row["call_ms"] = f"{call_ms:.5g}"
                if env.cuda:
                    ms, row["kernel_clock"], row["note"] = compare.kernel_clock(env, call, 1, call_ms)
                    if ms is not None:
                        row.update(kernel_ms=f"{ms:.5g}", gb_per_s=f"{size / ms * 1e-6:.5g}")
            except Exception as error:  # a peer may fail in any way
                row["note"] = f"failed: {type(error).__name__}: {error}"
            wrong += not (row.get("call_ms") and compare.plot.right({"errors": "", **row}, 0.1))
            compare.say(env, rows, progress, case, row)
            compare.give_back(env)
    rows.finish()
    print(f"{rows.path}: {len(env.rows)} rows, {wrong} failed")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
