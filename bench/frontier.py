#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Time against memory of a language model's head, linear_cross_entropy with all gradients: `make frontier`.

    frontier.py [--case TEXT] [--provider TEXT] [--budget SECONDS] [--csv FILE] [--device cpu --smoke]

bf16, x ~ N(0, 1), weight ~ N(0, 1 / hidden), uniform targets, mean loss. A call is forward and backward: loss, dx and dweight.
All run in one process on the same tensors.

Providers  matmuls: the bare products by torch, the yardstick: forward's one, and all three. They are always measured.
           lk 128, ..., lk 3300: lk_torch with so many MiB of workspace; one call makes loss and gradients. lk separate 128,
           ..., lk separate 3300: the loss per token, then its mean by torch. Its backward makes the logits again, with the
           lse that forward kept. A budget whose plan is that of a smaller one is left out. To save time, only the first and
           the last case have lk separate, unless --provider names it.
           liger FLSCE, liger FLCE: Liger's CuTe DSL kernels for Hopper. FLSCE makes the logits again too, and its mean is
           torch's; its check of the targets, which waits for the GPU, is off. FLCE keeps bf16 logits.
           liger Triton 4, 16: the Triton head with so many times the memory, its chunk_mem_const, that its default has.
           liger Triton, quack, torch, torch.compile and torch2.15's four as in compare.py. bench/requirements.txt has their
           versions.
Times      burst_ms: the GPU rests for 0.1 s, then 3 calls back to back; the median of two such turns. The providers take turns.
           sustained_ms: calls back to back for 1 s by the fastest call of the bursts, the mean of the second half: a card that
           reaches its power limit is slower then. of_matmuls: sustained_ms of the three matmuls, over that of the provider.
Memory     extra_mb: the peak during a call beyond inputs and results, in MiB. workspace_mb: what lk's plan uses of its budget.
           plan: the plan in words. Errors and memory are measured as in compare.py.
Rows       are appended to bench/results/<gpu>-frontier.csv after each case. The newest row of each case and provider stays. The
           last case has errors and memory alone. --budget: a case is not begun if the longest one before it took more time than
           is left. It is named, and a later run with --case adds it. `make compare-plots` draws the plot.
"""
import argparse
import ctypes
import dataclasses
import glob
import importlib
import itertools
import math
import os
import statistics
import sys
import time

import compare
import torch

sys.path.append(f"{compare.ROOT}/tests")
import liblk  # noqa: E402: lk's functions by ctypes, for the plans, which lk_torch does not tell

COLUMNS = ("op", "direction", "dtype", "case", "provider", "version", "burst_ms", "sustained_ms", "of_matmuls", "errors",
           "extra_mb", "workspace_mb", "plan", "note", "gpu", "commit")
SHAPES = ((8192, 4096, 131072), (8192, 4096, 128256), (4096, 4096, 128256), (16384, 2048, 131072), (4096, 4096, 32768))
SEPARATE = SHAPES[0], SHAPES[-1]  # the cases with lk separate
ERRORS_ALONE = SHAPES[-1]
BUDGETS = (128, 256, 512, 700, 1200, 2200, 3300, 4700)  # MiB
REST, CALLS, TURNS, SECONDS = 0.1, 3, 2, 1.0
BOTH = "forward_backward"


class Run:
    """A provider's call on a case, and its row."""

    def __init__(self, call, row):
        self.call, self.row, self.bursts = call, {"direction": BOTH, **row}, []

    def times(self, env, count):
        """Milliseconds of each of `count` calls back to back."""
        if env.cuda:
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
            torch.cuda.synchronize()
            time.sleep(REST)
            marks[0].record()
            for mark in marks[1:]:
                self.call()
                mark.record()
            torch.cuda.synchronize()
            return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)]
        marks = [time.perf_counter()]
        for _ in range(count):
            self.call()
            marks.append(time.perf_counter())
        return [(b - a) * 1e3 for a, b in itertools.pairwise(marks)]

    def burst(self, env):
        self.bursts += self.times(env, 1 if env.smoke else CALLS)
        self.row["burst_ms"] = f"{statistics.median(self.bursts):.5g}"

    def sustained(self, env):
        count = 2 if env.smoke else max(4, math.ceil(1e3 * SECONDS / min(self.bursts)))
        self.row["sustained_ms"] = f"{statistics.mean(self.times(env, count)[count // 2:]):.5g}"


# ---- Providers --------------------------------------------------------------------------------------------------------------


def plan_of(env, shape, mib, name):
    """(workspace_mb, plan) of lk with so many MiB; of "lk separate" both calls' plans, and the larger workspace."""
    structs, library = env.library.structs, env.library.lk
    sizes, texts = [], []
    for direction in [BOTH] if name == "lk" else ["forward", "backward"]:
        given = ["x", "weight", "target", "loss", "dx", "dweight"] + {BOTH: [], "forward": ["lse"]}.get(
            direction, ["lse", "upstream"])
        pointers = dict.fromkeys(given, 1 << 20)  # they are only asked whether they are NULL, and what they are aligned to
        args = structs["lk_linear_cross_entropy_args"](**dict(zip(("tokens", "hidden", "vocab"), shape)), **pointers,
                                                       reduction=name == "lk", use_ignore_index=1, upstream_per_token=1)
        plan = structs["lk_linear_cross_entropy_plan"]()
        call = getattr(library, f"lk_linear_cross_entropy_{direction}_plan_bf16")
        if call(ctypes.byref(args), ctypes.c_size_t(mib << 20), ctypes.byref(plan)):
            return "", library.lk_last_error().decode()  # lk_torch's call fails with this sentence too
        sizes.append(plan.workspace_bytes)
        texts.append(plan.text.decode() if name == "lk" else f"{direction}: {plan.text.decode()}")
    return f"{max(sizes) / compare.MIB:.6g}", " ".join("; ".join(texts).replace(",", ";").split())


def lk_providers(env, shape):
    """lk at each budget, in both ways: (provider, (workspace_mb, plan))."""
    found, seen, both_ways = [], set(), env.smoke or shape in SEPARATE or "separate" in env.options.provider
    for mib in [1, 4] if env.smoke else BUDGETS:
        def together(x, weight, target, reduction="mean", mib=mib):
            return env.lk.linear_cross_entropy(x, weight, target, reduction=reduction, workspace_mib=mib)

        def separate(x, weight, target, together=together):
            return together(x, weight, target, reduction="none").mean()

        for name, call in (("lk", together), ("lk separate", separate))[:1 + both_ways]:
            plan = plan_of(env, shape, mib, name)
            if (name, plan) in seen:
                print(f"{name} {mib}: its plan is that of a smaller budget")
                continue
            seen.add((name, plan))
            found.append((compare.Provider(f"{name} {mib}", lambda call=call: (env.version, call), (BOTH,)), plan))
    return found


def liger_kernel(name, function, make):
    """One of Liger's kernels for Hopper."""
    os.environ.setdefault("LIGER_SCALED_CE_SM90_VALIDATE_TARGETS", "0")
    module = f"liger_kernel.ops.cutedsl.ops.{function}"
    return compare.peer("liger", module, make, label=f"liger {name}", directions=(BOTH,))


def peers(env, shape):
    """The others, as lk_providers() has lk; they have no plans."""
    known = {p.name: p for p in compare.linear_cross_entropy_providers(env)}
    flsce = liger_kernel("FLSCE", "fused_scaled_cross_entropy_sm90", lambda m: lambda x, weight, target:
                         m.LigerFusedScaledCrossEntropySM90Function.apply(x, weight, target).mean())
    flce = liger_kernel("FLCE", "fused_linear_cross_entropy_sm90", lambda m: lambda x, weight, target:
                        m.liger_fused_linear_cross_entropy_sm90(x, weight, target))
    triton = [dataclasses.replace(known["liger"], name="liger Triton")]
    for times in (4, 16):
        triton.append(compare.peer("liger", "liger_kernel.transformers.functional", lambda m, times=times: lambda x, weight, target:
                                   m.liger_fused_linear_cross_entropy(x, weight, target, chunk_mem_const=times),
                                   label=f"liger Triton {times}", directions=(BOTH,)))
    newer = [dataclasses.replace(p, directions=(BOTH,)) for name, p in known.items() if name.startswith("torch2.15")]
    chosen = [flsce, flce, known["quack"], known["torch"], known["torch.compile"], *newer, *triton]
    return [(provider, ("", "")) for provider in ([known["torch"], newer[0]] if env.smoke else chosen)]


def matmuls(inputs):
    """The bare products: forward's, and all three. dz is random, since the power that a matmul takes depends on its data."""
    x, weight = inputs["x"], inputs["weight"]
    dz = torch.randn(len(x), len(weight), dtype=x.dtype, device=x.device) / len(x)
    row = {"provider": "matmuls", "version": f"torch {torch.__version__}"}

    def all_three():
        x @ weight.T, dz @ weight, dz.T @ x

    return [Run(lambda: x @ weight.T, {**row, "direction": "forward"}), Run(all_three, row)]


# ---- The run ----------------------------------------------------------------------------------------------------------------


def case_of(shape):
    tokens, hidden, vocab = shape
    return compare.Case("linear_cross_entropy", f"tokens={tokens} hidden={hidden} vocab={vocab} reduction=mean",
                        {"x": compare.normal(tokens, hidden), "weight": compare.normal(vocab, hidden, sigma=hidden**-0.5),
                         "target": compare.targets(tokens, vocab)},
                        ("x", "weight"), ("loss",), (None,), compare.of_head(compare.cross_entropy_formula), {}, [])


def run_case(env, rows, progress, case, shape):
    def say(row):
        compare.say(env, rows, progress, case, row)

    def those_that(step, what, runs):
        """The runs whose step does not fail; of the others there is a row that says why."""
        fine, names = [], runs[0].row["provider"] if len(runs) == 1 else f"{len(runs)} providers"
        progress.clear()
        print(f"{time.monotonic() - env.started:4.0f} s  {case.name}: {what} of {names}", flush=True)
        for run in runs:
            progress.show(f"{case.name}: {what} of {run.row['provider']}")
            try:
                step(run)
                fine.append(run)
            except Exception as error:  # a peer may fail in any way
                say({**run.row, "note": f"failed: {what}: {type(error).__name__}: {error}"})
        return fine

    sets, upstreams, refill = compare.make_sets(env, case)
    with torch.no_grad():
        right = case.reference(sets[0], [None])
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    timed = shape != ERRORS_ALONE
    runs = matmuls(sets[0]) if timed else []
    for provider, (workspace, plan) in lk_providers(env, shape) + peers(env, shape):
        if env.options.provider not in provider.name or not compare.ready(env, rows, progress, case, provider):
            continue
        subject = compare.Subject(case, provider, sets, upstreams, refill)

        def check(run, subject=subject):
            with compare.Deadline(compare.LONGEST):
                compare.first_calls(env, subject, BOTH)
                run.row.update(compare.checked(env, subject, BOTH, right))

        runs += those_that(check, "errors and memory", [Run(lambda subject=subject: subject.forward_backward(0), {
            "provider": provider.name, "version": provider.version, "workspace_mb": workspace, "plan": plan})])
    right = None
    if timed:
        for turn in range(TURNS):
            runs = those_that(lambda run: run.burst(env), f"bursts {turn + 1}", runs)
        runs = those_that(lambda run: run.sustained(env), "sustained calls", runs)
        whole = [run.row for run in runs if run.row["direction"] == BOTH]  # the matmuls are its first
        for row in whole if whole and whole[0]["provider"] == "matmuls" else []:
            row["of_matmuls"] = f"{float(whole[0]['sustained_ms']) / float(row['sustained_ms']):.3f}"
    for run in runs:
        say(run.row)


def main():
    parser = argparse.ArgumentParser(description="time against memory; the file's first comment says how it measures")
    parser.add_argument("--csv", help="instead of bench/results/<gpu>-frontier.csv; build/cpu-frontier.csv with --smoke")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--smoke", action="store_true", help="lk and torch on a tiny case, to try the program itself")
    parser.add_argument("--budget", type=float, help="seconds that the run may take")
    parser.add_argument("--case", default="", help="only cases whose name holds this")
    parser.add_argument("--provider", default="", help="only providers whose name holds this; the matmuls besides")
    parser.set_defaults(calls=True, quick=False, list=False, reference=False)  # of compare.Environment; calls: one set of inputs
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print(f"PyTorch {torch.__version__} sees no GPU here, so nothing was measured")
        return 0
    env = compare.Environment(options)
    env.lk = env.lk or env.load_lk()
    beside = glob.glob(f"{env.where}/liblk*")  # lk_torch's own library; where it has none, it took that of the wheel lk-kernels
    env.library = liblk.Library(beside[0] if beside else importlib.import_module("lk").library(), ["linear_cross_entropy"],
                                options.device)
    for line in env.head():
        print(line)
    rows = compare.Rows(options.csv or f"{compare.ROOT}/{'build' if env.smoke else 'bench/results'}/{env.gpu}-frontier.csv",
                        COLUMNS)
    cases = [(case_of(shape), shape) for shape in ([(24, 64, 20000)] if env.smoke else SHAPES)]
    cases = [(case, shape) for case, shape in cases if options.case in case.name]
    print("burst_ms: after a rest; sustained_ms: after half a second of calls; of_matmuls: of sustained_ms; errors: relative,\n"
          "against float64; extra_mb: peak beyond inputs and results, MiB; workspace_mb, plan: lk's own\n")
    print("| # | " + " | ".join(column for column in compare.SHOWN if column in COLUMNS) + " |", flush=True)
    progress, left_out, longest = compare.Progress(len(cases)), [], 0.0
    try:
        for case, shape in cases:
            progress.done += 1
            if env.left() < longest:
                left_out.append(case.name)
                continue
            began = time.monotonic()
            try:
                run_case(env, rows, progress, case, shape)
            except torch.OutOfMemoryError as error:  # the case itself; a provider's own ends in its row
                compare.say(env, rows, progress, case, {"provider": "all", "note": f"failed: {error}"})
            compare.give_back(env)
            longest = max(longest, time.monotonic() - began)
    finally:
        progress.clear()
        rows.finish()
    for name in left_out:
        print(f"left out for want of time: {name}")
    failed = [row["provider"] for row in env.rows if row["note"].startswith("failed")]
    print(f"{rows.path}: {len(env.rows)} rows, {len(failed)} of them failed, {len(left_out)} cases left out, "
          f"{time.monotonic() - env.started:.0f} s" + "; `make compare-plots` draws them" * (not env.smoke))
    if env.smoke:
        passed = sum(bool(row["sustained_ms"]) and compare.plot.right(row, compare.WRONG) for row in env.rows)
        print(f"{passed} passed, {len(env.rows) - passed} failed")
        return passed < len(env.rows)
    return any(name.startswith("lk") for name in failed)


if __name__ == "__main__":
    sys.exit(main())
