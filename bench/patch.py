#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Training steps of a Llama of 1 B parameters as transformers has it, as Liger-Kernel patches it, and as lk_torch.patch does:
`make compare-patch`. Needs transformers; Liger-Kernel where it imports (bench/requirements.txt).

    patch.py [--quick] [--budget SECONDS] [--csv FILE] [--case TEXT] [--provider NAME]... [--workspace MIB]
    patch.py --from-csv FILE             the table once more, without a GPU
    patch.py --device cpu --smoke        a tiny model, to try the program itself; exit status 1 where a gradient is wrong

Model      Llama-3.2-1B's shape, random weights, bf16, attention by PyTorch (sdpa). All providers share one set of weights.
Providers  transformers           its own modules
           liger                  apply_liger_kernel_to_llama's defaults: rope, RMSNorm, SwiGLU, the head with its loss
           liger norms+head       RMSNorm and the head with its loss alone
           lk, lk 1024            lk_torch.patch(model): norms, rope, MLPs, the head; with workspace_mib=1024 (--workspace)
           lk norms+head, lk 1024 norms+head  the same two with mlp=False, rope=False
           lk + liger, lk 1024 + liger  norms and head by lk, after Liger's rope and SwiGLU
Step       Forward with labels, backward, a fused AdamW with a rate of 0, so that all steps compute the same; no cache of keys.
           The providers take turns, a step each; medians. The GPU is idle before a step. ms by events.
Memory     peak_mib: the most that PyTorch's allocator had given out in a step, weights, AdamW's state and workspaces included.
Right      loss_float32 is the loss of the same weights in float32, by transformers. grad_error: the relative error of the
           gradients of all weights together, of the first sequence, against float32's. Where a parameter's gradient, or a
           loss, is off by over twice what transformers' own is in bf16, and 2^-8 more, it is wrong, and the exit status is 1.
           A provider with a wrong gradient is not timed.
"""
import argparse
import copy
import csv
import gc
import importlib.metadata
import os
import statistics
import sys
import time

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # or what others left in the cache may not be of use
os.environ["HF_HUB_OFFLINE"], os.environ["TRANSFORMERS_VERBOSITY"] = "1", "error"

import compare  # noqa: E402: beside this file; it also puts packages/torch on the path
import torch  # noqa: E402

try:
    import transformers
    from transformers.models.llama import modeling_llama
except ImportError:
    transformers = None

COLUMNS = ("case", "provider", "version", "rounds", "forward_ms", "backward_ms", "adamw_ms", "step_ms", "step_ms_least",
           "step_ms_most", "tokens_per_s", "peak_mib", "loss", "loss_float32", "grad_error", "note", "gpu", "commit")
SHAPES = ((4, 2048), (8, 2048))
LLAMA = dict(vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32,
             num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, rms_norm_eps=1e-5, tie_word_embeddings=True)
TINY = dict(LLAMA, vocab_size=257, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=16)
FLOOR = 2.0**-8  # one rounding to bf16, as in packages/torch/test_patch.py
MIB = 2.0**20


def lk(workspace=None, **which):
    import lk_torch
    return lambda model: lk_torch.patch(model, workspace_mib=workspace, **which)


def liger(**which):
    def change(model):  # and returns nothing, where lk_torch.patch has a table
        from liger_kernel.transformers import apply_liger_kernel_to_llama
        apply_liger_kernel_to_llama(model=model, **which)
    return change


def providers(workspace):
    """Name -> what is done to the model, in this order."""
    rest = liger(rms_norm=False, fused_linear_cross_entropy=False)  # rope and SwiGLU
    own = dict(mlp=False, rope=False)  # norms and head
    return {"transformers": [], "liger": [liger()], "liger norms+head": [liger(rope=False, swiglu=False)],
            "lk": [lk()], f"lk {workspace}": [lk(workspace)],
            "lk norms+head": [lk(**own)], f"lk {workspace} norms+head": [lk(workspace, **own)],
            "lk + liger": [rest, lk(**own)], f"lk {workspace} + liger": [rest, lk(workspace, **own)]}


class Provider:
    """A model that shares the parameters of another one. Liger's patch of a model also sets names of transformers' module: they
    are taken back at once, and the one that is read in each call, rope's, is set for this model's calls alone."""
    names = "apply_rotary_pos_emb", "LlamaRMSNorm", "LlamaMLP"

    def __init__(self, name, model, changes):
        self.name, own = name, {key: getattr(modeling_llama, key) for key in self.names}
        self.model = copy.deepcopy(model, {id(p): p for p in model.parameters()})
        self.said = [change(self.model) for change in changes]
        self.rope, self.own_rope = modeling_llama.apply_rotary_pos_emb, own["apply_rotary_pos_emb"]
        for key, value in own.items():
            setattr(modeling_llama, key, value)

    def loss(self, ids):
        modeling_llama.apply_rotary_pos_emb = self.rope
        try:
            return self.model(input_ids=ids, labels=ids, use_cache=False).loss
        finally:
            modeling_llama.apply_rotary_pos_emb = self.own_rope


def build(smoke, device):
    config = transformers.LlamaConfig(**(TINY if smoke else LLAMA))
    torch.manual_seed(1)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").train()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 1:  # the norms' weights are 1, which would hide some mistakes
                p.add_(torch.randn_like(p) * 0.2)
    return model


def gradients(loss, model):
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def reference(model, batches):
    """By float32: the loss of each batch, a sequence at a time, and the gradients of the first sequence."""
    wide = copy.deepcopy(model).float()
    run = lambda ids: wide(input_ids=ids, labels=ids, use_cache=False).loss
    with torch.no_grad():
        losses = [statistics.fmean(run(row[None]).item() for row in ids) for ids in batches]
    return losses, gradients(run(batches[0][:1]), wide)


def check(provider, ids, right):
    """The relative error of all gradients, and that of each parameter's."""
    found = gradients(provider.loss(ids), provider.model)
    off = {name: ((found[name].float() - g).norm(), g.norm()) for name, g in right.items()}
    total = [sum(pair[i].double()**2 for pair in off.values()).sqrt() for i in (0, 1)]
    return (total[0] / total[1]).item(), {name: (e / g).item() for name, (e, g) in off.items()}


def stamp(cuda):
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def step(provider, ids, optimiser, cuda):
    """[ms of forward, of backward, of AdamW], peak MiB, MiB that are still held, the loss."""
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    stamps = [stamp(cuda)]
    loss = provider.loss(ids)
    stamps.append(stamp(cuda))
    loss.backward()
    stamps.append(stamp(cuda))
    optimiser.step()
    optimiser.zero_grad()
    stamps.append(stamp(cuda))
    loss = loss.item()  # waits for the device
    if not cuda:
        return [1e3 * (b - a) for a, b in zip(stamps, stamps[1:])], 0.0, 0.0, loss
    return ([a.elapsed_time(b) for a, b in zip(stamps, stamps[1:])], torch.cuda.max_memory_allocated() / MIB,
            (torch.cuda.memory_allocated() - before) / MIB, loss)


def attempt(provider, ids, optimiser, cuda):
    """A step, or None where the memory does not suffice."""
    try:
        return step(provider, ids, optimiser, cuda)
    except torch.OutOfMemoryError:
        pass  # here the error still holds the step's tensors
    optimiser.zero_grad()
    gc.collect()
    torch.cuda.empty_cache()
    return None


def measure(env, running, ids, optimiser, rounds, end):
    """Steps in turns, until there are so many rounds of them or the time is over. Returns the steps and a note by provider."""
    steps, notes, running = {p: [] for p in running}, dict.fromkeys(running, ""), list(running)
    for turn in range(2 + rounds):  # the first two compile, and let lk see which upstream gradient comes
        began = time.monotonic()
        for provider in list(running):
            found = attempt(provider, ids, optimiser, env.cuda)
            if found is None:
                running.remove(provider)
                notes[provider] = "out of memory"
            elif turn > 1:
                steps[provider].append(found)
                if found[2] > 1:
                    notes[provider] = f"holds {found[2]:.0f} MiB after a step"
        if turn > 3 and time.monotonic() + (time.monotonic() - began) > end:
            break
    return steps, notes


def columns_of(steps, tokens):
    if not steps:
        return {}
    times, peaks, _, losses = zip(*steps)
    whole = [sum(t) for t in times]
    parts = {name: f"{statistics.median(ms):.3f}" for name, ms in zip(("forward_ms", "backward_ms", "adamw_ms"), zip(*times))}
    return dict(parts, rounds=len(whole), step_ms=f"{statistics.median(whole):.3f}", step_ms_least=f"{min(whole):.3f}",
                step_ms_most=f"{max(whole):.3f}", tokens_per_s=f"{1e3 * tokens / statistics.median(whole):.0f}",
                peak_mib=f"{max(peaks):.0f}", loss=f"{losses[-1]:.6f}")


def write(path, rows):
    """The rows of other cases and providers stay."""
    new = {(row["case"], row["provider"]) for row in rows}
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    if os.path.exists(path):
        with open(path, newline="") as file:
            rows = [row for row in csv.DictReader(file) if (row["case"], row["provider"]) not in new] + rows
    with open(f"{path}.part", "w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    os.replace(f"{path}.part", path)


def ratios(rows, case, of, over):
    """Tokens per second and peak memory of a provider over another's, or None."""
    pair = [next((row for row in rows if (row["case"], row["provider"]) == (case, name) and row["step_ms"]), None)
            for name in (of, over)]
    if None in pair:
        return None
    return [float(pair[0][column]) / float(pair[1][column]) for column in ("tokens_per_s", "peak_mib") if float(pair[1][column])]


def report(rows):
    print("\n| case | provider | tokens/s | of transformers' | forward, backward, AdamW ms | step ms | peak MiB | loss | float32's "
          "| gradients' error | note |", "|" + "---|" * 11, sep="\n")
    for row in rows:
        speed = ratios(rows, row["case"], row["provider"], "transformers")
        print(f"| {row['case']} | {row['provider']} | {row['tokens_per_s']} | {f'{speed[0]:.3f}' if speed else '-'} | "
              f"{', '.join(filter(None, (row['forward_ms'], row['backward_ms'], row['adamw_ms'])))} | {row['step_ms']} | "
              f"{row['peak_mib']} | "
              f"{row['loss']} | {row['loss_float32']} | {row['grad_error']} | {row['note']} |")
    print()
    ahead = {}
    for case in dict.fromkeys(row["case"] for row in rows):
        for name in dict.fromkeys(row["provider"] for row in rows if row["provider"].startswith("lk")):
            for over in ("liger", "liger norms+head"):
                found = ratios(rows, case, name, over)
                if found and len(found) == 2:
                    print(f"{case}: {name} over {over}: tokens/s {found[0]:.3f}, peak memory {found[1]:.3f}")
                    if over == "liger":
                        ahead.setdefault(name, []).append(found[0] > 1 and found[1] < 1)
    if ahead:
        print("goal, ahead of liger in both: " + "; ".join(f"{name} in {sum(found)} of {len(found)} cases"
                                                            for name, found in ahead.items()))


def arguments():
    parser = argparse.ArgumentParser(description="a Llama, patched and not; the file's first comment says how it measures")
    add = parser.add_argument
    add("--csv", metavar="FILE", help="instead of bench/results/<gpu>-patch.csv; build/cpu-patch.csv with --smoke")
    add("--from-csv", metavar="FILE", help="run nothing: the table of the rows that are there")
    add("--device", default="cuda", choices=["cuda", "cpu"])
    add("--smoke", action="store_true", help="a tiny model, to try the program itself")
    add("--quick", action="store_true", help="3 rounds instead of 9")
    add("--budget", type=float, default=100.0, metavar="SECONDS", help="ends the rounds in time")
    add("--case", default="", help="only cases whose name holds this: batch=4 length=2048")
    add("--provider", action="append", help="only this one, several times for several; transformers is always there")
    add("--workspace", type=int, default=1024, metavar="MIB", help="of lk's second row")
    parser.set_defaults(calls=True, list=False, reference=False)  # of compare.Environment
    options = parser.parse_args()
    if options.device == "cpu" and not options.smoke:
        parser.error("--device cpu needs --smoke: the model is too large for the simulator")
    return options


def main():
    options = arguments()
    if options.from_csv:
        with open(options.from_csv, newline="") as file:
            return report(list(csv.DictReader(file)))
    if options.device == "cuda" and not torch.cuda.is_available():
        return print(f"PyTorch {torch.__version__} sees no GPU here, so nothing was measured")
    if transformers is None:
        return print("skip  patch.py: transformers is not installed: pip install transformers\n0 passed, 0 failed")
    wanted, options.provider = options.provider, None  # Environment takes names of its own
    env = compare.Environment(options)
    env.lk, env.flush = env.lk or env.load_lk(), None  # flush would be part of the peak
    packages = [name for name in ("transformers", "liger-kernel", "nvidia-cutlass-dsl") if compare.has_package(name)]
    versions = "; ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)
    say = lambda text: print(f"{time.monotonic() - env.started:6.1f} s  {text}", flush=True)
    print(f"{env.version}\n{versions}")
    known = providers(options.workspace)
    if unknown := set(wanted or ()) - set(known):
        sys.exit(f"no provider {', '.join(sorted(unknown))}; there are: {', '.join(known)}")
    names = [name for name in known if not wanted or name in wanted or name == "transformers"]
    if "liger-kernel" not in packages or not env.cuda and os.environ.get("TRITON_INTERPRET") != "1":
        names = [name for name in names if "liger" not in name]
        print("left out: liger, which " + ("is not installed" if env.cuda else "needs a GPU, or TRITON_INTERPRET=1"))
    shapes = [(2, 24)] if options.smoke else SHAPES
    cases = {name: shape for shape in shapes if options.case in (name := f"batch={shape[0]} length={shape[1]}")}
    if not cases:
        sys.exit(f"no case has {options.case!r} in its name")

    model = build(options.smoke, options.device)
    batches = [torch.randint(model.config.vocab_size, shape, device=options.device) for shape in cases.values()]
    say(f"a Llama of {sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters")
    wide, right = reference(model, batches)
    say(f"float32: losses {', '.join(f'{loss:.6f}' for loss in wide)}")
    every, wrong, own = [Provider(name, model, known[name]) for name in names], {}, None
    for provider in every:
        provider.error, errors = check(provider, batches[0][:1], right)
        own = own or errors
        bad = [f"{key} {e:.3g}, transformers' {own[key]:.3g}" for key, e in errors.items() if not e <= 2 * own[key] + FLOOR]
        if bad:
            wrong[provider.name] = f"{len(bad)} gradients wrong: {bad[0]}"
        said = [line for table in provider.said if table for line in str(table).splitlines()]
        say("\n            ".join([f"{provider.name}: gradients' error {provider.error:.3e}", *said]))
    del right
    gc.collect()
    optimiser = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, fused=True)
    running = [provider for provider in every if provider.name not in wrong]
    rows, path = [], options.csv or f"{compare.ROOT}/{'build' if env.smoke else 'bench/results'}/{env.gpu}-patch.csv"
    for number, (case, (batch, length)) in enumerate(cases.items()):
        left = env.left()
        if left < 0:
            print(f"left out for want of time: {case}")
            continue
        steps, notes = measure(env, running, batches[number], optimiser, 3 if options.quick or env.smoke else 9,
                               time.monotonic() + left / (len(cases) - number))
        off = {p.name: abs(found[-1][3] - wide[number]) for p, found in steps.items() if found}
        for name, error in off.items():
            if not error <= 2 * off.get("transformers", 0.0) + FLOOR * wide[number]:
                wrong[name] = f"loss off by {error:.3g}"
        for p in every:
            row = dict.fromkeys(COLUMNS, "")
            row.update(case=case, provider=p.name, version=f"{env.version}; {versions}", loss_float32=f"{wide[number]:.6f}",
                       grad_error=f"{p.error:.3e}", note=wrong.get(p.name) or notes[p], gpu=env.gpu, commit=env.commit,
                       **columns_of(steps.get(p), batch * length))
            rows.append(row)
        write(path, rows)
        say(f"{case}: {max(map(len, steps.values()))} rounds")
    report(rows)
    for name, text in wrong.items():
        print(f"WRONG  {name}: {text}")
    lost = sum(row["note"] == "out of memory" for row in rows)
    print(f"{path}: {len(rows)} rows, {lost} of them out of memory, {len(wrong)} providers wrong, "
          f"{time.monotonic() - env.started:.0f} s of {options.budget:.0f}")
    if env.smoke:
        print(f"{len(names) - len(wrong)} passed, {len(wrong)} failed")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
