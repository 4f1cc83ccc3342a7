#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Trains a GPT of GPT-2's size (124 million parameters) with PyTorch's operations or with lk's, and compares the two.

    train.py --ops torch                     normalisation, loss and head by PyTorch
    train.py --ops lk --compile              by lk, inside torch.compile
    train.py --ops lk --head lk-logits       lk's cross entropy of stored logits; --norm and --head choose one by one
    train.py --compare --csv F --plot F.svg  PyTorch and lk, eager and compiled, one after another, in at most --budget seconds
    train.py --from-csv F --plot F.svg       the table and the plot once more,  from the rows of such a run, without a GPU
    train.py --tiny --check                  a test of some seconds, on a CPU too: lk and PyTorch have the same curves

Model       Pre-norm with RMSNorm, rotary positions, GELU, one matrix for embedding and head. With --positions lrpe it is
            md_lrpe_cosine of q and k: twice as many features go into the attention.
Precision   As in nanoGPT: parameters, their gradients, the residual stream and AdamW in float32, under autocast to bf16. So the
            matmuls are bf16, and the head's weight is rounded to bf16 once a step.
Vocabulary  GPT-2's 50257 is odd, and cuBLAS is slow with rows of odd length. nanoGPT pads it: --vocab 50304.
Text        Python's own standard library, which is on every machine. A token is a word; a rare word is spelt in bytes. Every
            variant gets the same batches and the same first weights.
Times       By CUDA events from step to step, the median without the first steps. Memory: the largest amount that PyTorch's
            allocator gave out at once, lk's workspace included, in the same steps.
Compile     Each block is compiled by itself, and so is the head. 12 blocks share one graph, or two where the first gets
            float32, so there is less to compile than in the whole model.
"""
import argparse
import collections
import contextlib
import csv
import importlib.util
import itertools
import multiprocessing
import os
import re
import statistics
import sys
import sysconfig
import time

import torch
from torch import nn
from torch.nn import functional as F

try:
    from lk_torch import BACKEND, functional as LF
except ImportError as error:  # PyTorch's own operations run without lk
    BACKEND, LF, MISSING = None, None, error

EPS = 1e-6

# ---- The model --------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention and MLP. It takes the normalised input of its attention and returns that of the next block, so that each
    addition to the stream stands beside the normalisation that reads the sum."""

    def __init__(self, width, heads, norm, positions):
        super().__init__()
        self.heads, self.norm, self.positions = heads, norm, positions
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.mlp_norm = nn.Parameter(torch.ones(width))
        self.next_norm = nn.Parameter(torch.ones(width))

    def forward(self, y, stream):
        q, k, v = self.qkv(y).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each [batch, heads, tokens, dim]
        y = F.scaled_dot_product_attention(self.positions(q), self.positions(k), v, is_causal=True)
        y, stream = self.norm(self.out(y.transpose(1, 2).flatten(2)), stream, self.mlp_norm)
        return self.norm(self.down(F.gelu(self.up(y))), stream, self.next_norm)


class GPT(nn.Module):
    def __init__(self, vocab, layers, heads, width, norm, positions, head):
        super().__init__()
        self.norm, self.head = norm, head
        self.embedding = nn.Embedding(vocab, width)
        self.first_norm = nn.Parameter(torch.ones(width))
        self.blocks = nn.ModuleList(Block(width, heads, norm, positions) for _ in range(layers))
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:  # what is added to the stream 2 layers times starts smaller
                last = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (2 * layers) ** 0.5 if last else 0.02)

    def trunk(self, ids):
        y, stream = self.norm(self.embedding(ids), None, self.first_norm)
        for block in self.blocks:
            y, stream = block(y, stream)
        return y

    def loss(self, y, target):
        return self.head(y, self.embedding.weight, target)


class Rope(nn.Module):
    def __init__(self, tokens, dim):
        super().__init__()
        angle = torch.arange(tokens)[:, None] * 10000 ** -(torch.arange(dim // 2) / (dim // 2)).repeat(2)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def forward(self, x):
        a, b = x.chunk(2, -1)
        return x * self.cos.to(x.dtype) + torch.cat((-b, a), -1) * self.sin.to(x.dtype)


class Lrpe(nn.Module):
    """md_lrpe_cosine with silu."""

    def __init__(self, tokens, heads, dim, ops):
        super().__init__()
        self.ops = ops
        self.register_buffer("theta", (10000 ** -(torch.arange(dim) / dim)).repeat(heads, 1))
        if ops == "torch":  # tables; lk computes its cosines
            angle = torch.arange(tokens)[:, None] * self.theta[:, None]
            self.register_buffer("cos", angle.cos())
            self.register_buffer("sin", angle.sin())

    def forward(self, x):
        if self.ops == "lk":
            return LF.md_lrpe_cosine(x, self.theta, (x.shape[2],), activation="silu")
        y = F.silu(x)
        return torch.cat((y * self.cos.to(x.dtype), y * self.sin.to(x.dtype)), -1)


# ---- The parts that PyTorch or lk computes ----------------------------------------------------------------------------------


def torch_norm(x, residual, weight):
    """The normalised sum and the sum."""
    s = x if residual is None else residual + x
    return F.rms_norm(s, weight.shape, weight, EPS), s


def lk_norm(x, residual, weight):
    if residual is None:
        return LF.rms_norm(x, weight.shape, weight, EPS), x
    return LF.add_rms_norm(x, residual, weight.shape, weight, EPS)


def torch_head(y, weight, target):
    logits = F.linear(y, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # bf16 to float32
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


def lk_logits_head(y, weight, target):
    return LF.cross_entropy(F.linear(y, weight).flatten(0, -2), target.flatten())


def lk_head(y, weight, target):
    return LF.linear_cross_entropy(y, weight, target)


NORMS = {"torch": torch_norm, "lk": lk_norm}
HEADS = {"torch": torch_head, "lk": lk_head, "lk-logits": lk_logits_head}

# ---- Text -------------------------------------------------------------------------------------------------------------------


def read_words(most):
    """About `most` characters of the standard library's sources, cut into words, each with the space before it."""
    texts, size = [], 0
    for folder, folders, files in os.walk(sysconfig.get_paths()["stdlib"]):
        folders[:] = sorted(name for name in folders if name not in ("site-packages", "dist-packages", "__pycache__"))
        for name in sorted(files):
            if name.endswith(".py") and size < most:
                with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as file:
                    texts.append(file.read())
                size += len(texts[-1])
    return re.findall(r" ?\w+| ?[^\w\s]+|\s+", "".join(texts)[:most])


def tokenise(words, vocab):
    """The words as token ids. Ids 0 to 255 are bytes; then come the most frequent words."""
    table = {word: word.encode() for word in set(words)}
    for rank, (word, _) in enumerate(collections.Counter(words).most_common(vocab - 256)):
        table[word] = (256 + rank,)
    return list(itertools.chain.from_iterable(map(table.__getitem__, words)))


# ---- Training ---------------------------------------------------------------------------------------------------------------

# A kernel of the blocks is in the first group whose pattern its name has.
GROUPS = (("attention", "flash|fmha|sdpa|attention"), ("matmuls of the blocks", "gemm|nvjet|cutlass|splitk|::mm|::bmm|addmm"),
          ("norm", "norm|gammabeta|rsqrt"))
SHARES = [name for name, _ in GROUPS] + ["other", "head and loss", "optimiser"]


class Trainer:
    def __init__(self, options, ids):
        torch.manual_seed(options.seed)
        self.options, device, dim = options, options.device, options.width // options.heads
        with torch.device(device):
            if options.positions == "rope":
                positions = Rope(options.context, dim)
            else:
                positions = Lrpe(options.context, options.heads, dim, options.ops)
            self.model = GPT(options.vocab, options.layers, options.heads, options.width, NORMS[options.norm], positions,
                             HEADS[options.head]).to(torch.float64 if options.precision == "f64" else torch.float32)
        self.parameters = list(self.model.parameters())
        self.optimiser = torch.optim.AdamW([{"params": [p for p in self.parameters if p.dim() > 1], "weight_decay": 0.1},
                                            {"params": [p for p in self.parameters if p.dim() == 1], "weight_decay": 0.0}],
                                           betas=(0.9, 0.95), eps=options.eps, fused=True)
        if options.compile:
            for block in self.model.blocks:
                block.compile()
            self.model.loss = torch.compile(self.model.loss)
        window = options.context + 1
        starts = torch.randint(len(ids) - window, (options.steps, options.batch, 1))
        batches = torch.tensor(ids)[starts + torch.arange(window)].to(device)
        self.inputs, self.targets = batches[..., :-1].contiguous(), batches[..., 1:].contiguous()

    def autocast(self):
        if self.options.precision != "bf16":
            return contextlib.nullcontext()
        return torch.autocast(self.options.device, torch.bfloat16)

    def step(self, number):
        """The loss and the gradient's norm, on the device: a step does not wait for the device."""
        for group in self.optimiser.param_groups:
            group["lr"] = self.options.rate * min(1.0, (number + 1) / self.options.warmup)
        with self.autocast():
            loss = self.model.loss(self.model.trunk(self.inputs[number]), self.targets[number])
        loss.backward()
        return loss.detach(), self.update()

    def update(self):
        norm = nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad()
        return norm

    def shares(self):
        """Milliseconds of the device's kernels in one step, by group. The step is cut between blocks and head, so that a part
        is known by when it runs and only the kernels of the blocks by their names."""
        found, cuda = dict.fromkeys(SHARES, 0.0), self.options.device == "cuda"
        activity = torch.profiler.ProfilerActivity.CUDA if cuda else torch.profiler.ProfilerActivity.CPU

        def measure(part, call):
            with torch.profiler.profile(activities=[activity], acc_events=True) as profile:
                result = call()
                if cuda:
                    torch.cuda.synchronize()
            for event in profile.events():
                if not cuda:
                    us = event.self_cpu_time_total
                elif event.device_type == torch.autograd.DeviceType.CUDA and not getattr(event, "is_user_annotation", False):
                    us = event.time_range.elapsed_us()
                else:
                    continue
                group = part or next((group for group, names in GROUPS if re.search(names, event.name.lower())), "other")
                found[group] += us / 1e3
            return result

        with self.autocast():
            y = measure("", lambda: self.model.trunk(self.inputs[-1]))
            cut = y.detach().requires_grad_()
            loss = measure("head and loss", lambda: self.model.loss(cut, self.targets[-1]))
        measure("head and loss", loss.backward)
        measure("", lambda: y.backward(cut.grad))
        measure("optimiser", self.update)
        return found


def name_of(options):
    return options.ops if options.norm == options.head == options.ops else f"norm {options.norm}, head {options.head}"


def train(options, ids):
    """A row for each step, and the shares of one more step."""
    cuda = options.device == "cuda"
    device = torch.cuda.get_device_name() if cuda else f"CPU, {torch.get_num_threads()} threads"
    name, mode, tokens = name_of(options), "compile" if options.compile else "eager", options.batch * options.context
    trainer = Trainer(options, ids)
    parameters = sum(p.numel() for p in trainer.parameters)
    print(f"{name}, {mode}, {options.positions}, {options.precision}: {device}, torch {torch.__version__}, lk_torch for "
          f"{BACKEND or 'nothing: not installed'}; {parameters / 1e6:.1f} M parameters, "
          f"vocabulary {options.vocab}, {options.batch} x {options.context} = {tokens} tokens a step", flush=True)

    def stamp():
        if not cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    results, stamps, last, began = [], [stamp()], 0, time.perf_counter()
    for number in range(1, options.steps + 1):
        if cuda and number - 1 == warm(options.steps):
            torch.cuda.reset_peak_memory_stats()
        results.append(trainer.step(number - 1))
        stamps.append(stamp())
        if number == 1 or number % options.every == 0 or number == options.steps:
            loss, gradient = (value.item() for value in results[-1])  # waits for the device
            now = time.perf_counter()
            print(f"  step {number:4d}  loss {loss:7.4f}  gradient norm {gradient:7.4f}  "
                  f"{(number - last) * tokens / (now - began):9.0f} tokens/s", flush=True)
            last, began = number, now
    peak = torch.cuda.max_memory_allocated() / 2**20 if cuda else 0
    rows = [{"ops": name, "mode": mode, "positions": options.positions, "vocab": options.vocab, "step": number,
             "loss": loss.item(), "gradient_norm": gradient.item(), "ms": a.elapsed_time(b) if cuda else 1e3 * (b - a),
             "tokens": tokens, "parameters": parameters, "peak_mib": round(peak), "device": device, "torch": torch.__version__}
            for number, ((loss, gradient), a, b) in enumerate(zip(results, stamps, stamps[1:]), 1)]
    if options.csv:
        new = not os.path.exists(options.csv)
        with open(options.csv, "a", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            if new:
                writer.writeheader()
            writer.writerows(rows)
    ms = milliseconds(rows)
    print(f"  {tokens / ms * 1e3:.0f} tokens/s, {ms:.2f} ms a step (median of the steps after {warm(options.steps)}), peak "
          f"memory {peak:.0f} MiB, final loss {rows[-1]['loss']:.4f}", flush=True)
    return rows, trainer.shares() if options.shares else {}


def warm(steps):
    """The first steps do not count: they compile, and fill the caches of PyTorch's allocator and of cuBLAS."""
    return min(10, steps // 2)


def milliseconds(rows):
    return statistics.median(row["ms"] for row in rows[warm(len(rows)):])


# ---- Comparison -------------------------------------------------------------------------------------------------------------


def child(sender, options, ids):
    sender.send(train(options, ids))


def compare(options, words):
    """Trains every variant in a process of its own, since memory and compiled code must not be shared."""
    end, spawn = options.began + options.budget, multiprocessing.get_context("spawn")
    rows, shares, left_out, failed, longest = [], {}, [], [], {False: 0.0, True: 0.0}
    for vocab in options.vocab:
        ids = tokenise(words, vocab)
        for compiled in (False, True):
            for change in ({"ops": "torch", "norm": None, "head": None}, {"ops": "lk"}):
                variant = chosen(options, vocab=vocab, compile=compiled, **change)
                name = f"{name_of(variant)}, {'compile' if compiled else 'eager'}, vocabulary {vocab}"
                began = time.perf_counter()
                if end - began < longest[compiled]:
                    left_out.append(name)
                    continue
                receiver, sender = spawn.Pipe(duplex=False)
                process = spawn.Process(target=child, args=(sender, variant, ids))
                process.start()
                sender.close()
                try:
                    if receiver.poll(max(0.0, end - time.perf_counter())):
                        result = receiver.recv()
                        rows += result[0]
                        shares[name] = result[1]
                    else:
                        process.kill()
                        left_out.append(name)
                except EOFError:
                    failed.append(name)
                process.join(20)
                process.kill()  # one that has not ended by then
                longest[compiled] = max(longest[compiled], time.perf_counter() - began)
                print(f"  {time.perf_counter() - began:.0f} s, {max(0.0, end - time.perf_counter()):.0f} s left\n", flush=True)
    if rows:
        report(rows)
        print("\nMilliseconds of kernels in one step. Blocks: attention, matmuls, norm (by kernels' names) and other, which is "
              "casts, additions, GELU, positions, embedding.\n")
        print("| variant | " + " | ".join(SHARES) + " | all |", "|---|" + "---|" * (len(SHARES) + 1), sep="\n")
        for name, found in shares.items():
            whole = sum(found.values())
            print(f"| {name} | " + " | ".join(f"{found[g]:.2f} ({found[g] / whole:.0%})" for g in SHARES) + f" | {whole:.2f} |")
    return rows, left_out, failed


def settings_of(rows):
    """{(positions, vocabulary): {(ops, mode): rows}}. Of a variant that ran twice the second run counts."""
    settings = {}
    for row in rows:
        variants = settings.setdefault((row["positions"], int(row["vocab"])), {})
        run = variants.setdefault((row["ops"], row["mode"]), [])
        if int(row["step"]) == 1:
            run.clear()
        run.append({**row, **{column: float(row[column]) for column in ("loss", "ms", "tokens", "peak_mib")}})
    return settings


def apart(run, other):
    return max(abs(a["loss"] - b["loss"]) for a, b in zip(run, other))


def report(rows):
    """The differences are those of the loss at any step."""
    print(f"{rows[0]['device']}, torch {rows[0]['torch']}\n\n| positions | vocabulary | ops | mode | ms a step | tokens/s "
          "| speed-up over PyTorch in the same mode | peak MiB | final loss | largest difference from PyTorch eager |",
          "|" + "---|" * 10, sep="\n")
    for (positions, vocab), variants in settings_of(rows).items():
        for (ops, mode), run in variants.items():
            ms, same, eager = milliseconds(run), variants.get(("torch", mode)), variants.get(("torch", "eager"))
            print(f"| {positions} | {vocab} | {ops} | {mode} | {ms:.2f} | {run[0]['tokens'] / ms * 1e3:.0f} | "
                  f"{f'{milliseconds(same) / ms:.3f}' if same else '-'} | {run[0]['peak_mib']:.0f} | {run[-1]['loss']:.4f} | "
                  f"{f'{apart(run, eager):.4f}' if eager else '-'} |")


# Colour, and width of the curve: the later ones are narrower, so that all can be seen where they lie on each other.
LOOKS = {("torch", "eager"): ("#9ca3af", 8, "PyTorch"), ("torch", "compile"): ("#0a64b4", 5.2, "torch.compile"),
         ("lk", "eager"): ("#f0713c", 3, "lk"), ("lk", "compile"): ("#7c1d06", 1, "lk in torch.compile")}


def plot(rows, path):
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot
    ink = dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), "#1f2328")
    pyplot.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "lk", "axes.titlesize": 10.5, "axes.spines.top": False,
                            "axes.spines.right": False, "axes.grid": True, "axes.axisbelow": True, "grid.color": "#d8dee4",
                            **ink})
    settings = settings_of(rows)
    figure = pyplot.figure(figsize=(9.2, 7.2), layout="constrained", facecolor="white")
    above, below = figure.subfigures(2, 1)
    panels = above.subplots(1, len(settings), sharey=True, squeeze=False)[0]
    for panel, ((_, vocab), variants) in zip(panels, settings.items()):
        for (ops, mode), run in variants.items():
            colour, width, label = LOOKS["torch" if ops == "torch" else "lk", mode]
            panel.plot([int(row["step"]) for row in run], [row["loss"] for row in run], color=colour, linewidth=width,
                       zorder=10 - width, label=label)
        first = next(iter(variants.values()))
        panel.set(xlabel="step", title=f"loss, vocabulary {vocab}: curves differ by at most "
                                       f"{max(apart(run, first) for run in variants.values()):.2g}")
    above.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    speed, memory = below.subplots(1, 2)
    for group, variants in enumerate(settings.values()):
        for at, ((ops, mode), run) in enumerate(variants.items()):
            colour = LOOKS["torch" if ops == "torch" else "lk", mode][0]
            place, ms, same = group + 0.21 * (at - (len(variants) - 1) / 2), milliseconds(run), variants.get(("torch", mode))
            ratio = f"\n{milliseconds(same) / ms:.2f}x" if same and ops != "torch" else ""
            for panel, value, text in ((speed, run[0]["tokens"] / ms, "{:.0f}" + ratio),
                                       (memory, run[0]["peak_mib"] / 1024, "{:.1f}")):
                panel.bar_label(panel.bar(place, value, 0.19, color=colour), fmt=text, fontsize=8.5, padding=2)
    for panel, title in ((speed, "thousand tokens per second; lk: over PyTorch's"), (memory, "peak memory, GiB")):
        panel.set_xticks(range(len(settings)), [f"vocabulary {vocab}" for _, vocab in settings])
        panel.set_title(title)
        panel.margins(y=0.14)
        panel.grid(False, axis="x")
    figure.suptitle(f"A GPT of {float(rows[0]['parameters']) / 1e6:.0f} M parameters, {rows[0]['tokens']} tokens a step, bf16, "
                    f"{rows[0]['device']}", fontsize=11)
    figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)
    print(f"wrote {path}")


def check(options, words):
    """Every variant's curves against those of PyTorch in float64. The limit is 32 units of the type: so many roundings follow
    each other on the way through two blocks and the head and back. The gradient's norm is compared too, as neither clipping nor
    AdamW lets a gradient's scale be seen in the loss."""
    ids, passed, failed = tokenise(words, options.vocab[0]), 0, 0

    def curves(ops, head, **changes):
        rows, _ = train(chosen(options, vocab=options.vocab[0], ops=ops, norm=ops, head=head, **changes), ids)
        return [[row[column] for row in rows] for column in ("loss", "gradient_norm")]

    for positions in ("rope", "lrpe"):
        right = curves("torch", "torch", positions=positions, precision="f64", compile=False)
        for precision, unit in (("f32", 2.0**-24), ("bf16", 2.0**-9)):
            for ops, head in (("torch", "torch"), ("lk", "lk"), ("lk", "lk-logits")):
                found = curves(ops, head, positions=positions, precision=precision)
                results = [(f"{name}: relative error", max(abs(a - b) / b for a, b in zip(values, exact)), 32 * unit)
                           for name, values, exact in zip(("loss", "gradient norm"), found, right)]
                results.append(("the loss falls: last, first", found[0][-1], found[0][0]))
                for name, value, limit in results:
                    good = value < limit
                    passed, failed = passed + good, failed + (not good)
                    print(f"{'ok  ' if good else 'FAIL'}  {positions}, {precision}, {ops}, head {head}: {name} {value:.3g}, "
                          f"limit {limit:.3g}", flush=True)
    return passed, failed


# ---- Command line -----------------------------------------------------------------------------------------------------------

FULL = {"layers": 12, "heads": 12, "width": 768, "context": 1024, "batch": 16, "steps": 300, "rate": 6e-4, "eps": 1e-8,
        "warmup": 20, "every": 10, "characters": 16 << 20, "vocab": [50257]}
# A large eps of AdamW, since its first step is the rate times the sign of each gradient, and roundings change signs.
TINY = {"layers": 2, "heads": 2, "width": 32, "context": 8, "batch": 2, "steps": 3, "rate": 2e-2, "eps": 1e-3,
        "warmup": 1, "every": 1, "characters": 80, "vocab": [300]}
SIZES = ("layers", "heads", "width", "context", "batch", "steps")
COMPARED = {"steps": 80, "every": 20, "vocab": [50257, 128256]}


def chosen(options, **changes):
    """The options of one run. norm and head follow ops where they were not asked for."""
    options = argparse.Namespace(**{**vars(options), **changes})
    options.norm, options.head = options.norm or options.ops, options.head or options.ops
    return options


def arguments():
    parser = argparse.ArgumentParser(usage="train.py [options]; --help lists them", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--ops", choices=("torch", "lk"), default="torch", help="norm, head and lrpe by PyTorch or lk")
    add("--norm", choices=NORMS, help="the normalisations alone")
    add("--head", choices=HEADS, help="head and loss alone; lk: linear_cross_entropy, lk-logits: cross_entropy")
    add("--positions", choices=("rope", "lrpe"), default="rope")
    add("--precision", choices=("bf16", "f32", "f64"), default="bf16", help="bf16: autocast; f64 without lk")
    add("--compile", action="store_true", help="torch.compile of each block and of the head")
    add("--compare", action="store_true", help="PyTorch and lk, eager and compiled, in turn")
    add("--budget", type=float, default=240, metavar="SECONDS", help="--compare ends in time; it says what it left out")
    add("--tiny", action="store_true", help="a model for a CPU: 2 layers, width 32, vocabulary 300, 3 steps")
    add("--check", action="store_true", help="with --tiny: exit status 1 where lk and PyTorch do not agree")
    add("--vocab", type=int, nargs="+", help="50257; --compare: 50257 and 128256")
    for name in SIZES:
        add(f"--{name}", type=int, help=str(FULL[name]))
    add("--seed", type=int, default=0)
    add("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--csv", metavar="FILE", help="append a row for each step")
    add("--plot", metavar="FILE", help="draw losses, speed and memory of a comparison; needs matplotlib")
    add("--from-csv", metavar="FILE", help="run nothing: table and plot of the rows that are there")
    options = parser.parse_args()
    defaults = {**FULL, **(COMPARED if options.compare else {}), **(TINY if options.tiny else {})}
    for name, value in defaults.items():
        if getattr(options, name, None) is None:
            setattr(options, name, value)
    lk = options.compare or options.check or "lk" in (options.ops, options.norm) or (options.head or "").startswith("lk")
    if options.check and not options.tiny:
        parser.error("--check needs --tiny: the full model is too large for float64")
    if options.plot and not (options.compare or options.from_csv):
        parser.error("--plot needs --compare or --from-csv")
    if options.plot and not importlib.util.find_spec("matplotlib"):
        parser.error("--plot needs matplotlib; write a --csv here, and use --from-csv and --plot where matplotlib is")
    if len(options.vocab) > 1 and not options.compare:
        parser.error("more than one --vocab needs --compare")
    if min(options.vocab) < 256:
        parser.error("--vocab must be at least 256: the first ids are bytes")
    if min(getattr(options, name) for name in SIZES) < 1:
        parser.error(f"{', '.join(SIZES)} must be at least 1")
    if options.width % (2 * options.heads):
        parser.error("--width must be a multiple of 2 * heads: the positions turn pairs of features")
    if options.precision == "f64" and lk:
        parser.error("--precision f64 needs --ops torch: lk has no float64")
    if lk and not options.from_csv and not LF:
        parser.error(f"lk_torch cannot be imported ({MISSING}); README.md beside this file says how to build it")
    if lk and not options.from_csv and BACKEND != options.device:
        parser.error(f"lk_torch was built for {BACKEND}, but the device is {options.device}: choose --device {BACKEND}")
    return options


def main():
    options = arguments()
    options.began, options.shares = time.perf_counter(), not options.check
    left_out, failed = [], []
    if options.from_csv:
        with open(options.from_csv, newline="") as file:
            rows = list(csv.DictReader(file))
        if not rows:
            sys.exit(f"{options.from_csv} has no rows")
        report(rows)
    else:
        words = read_words(options.characters)
        print(f"text: {len(words)} words of the standard library, {time.perf_counter() - options.began:.1f} s", flush=True)
        if options.check:
            passed, wrong = check(options, words)
            print(f"{passed} passed, {wrong} failed")
            sys.exit(wrong > 0)
        if options.compare:
            rows, left_out, failed = compare(options, words)
        else:
            options = chosen(options, vocab=options.vocab[0])
            _, shares = train(options, tokenise(words, options.vocab))
            print("  milliseconds of kernels in one step: " + ", ".join(f"{group} {ms:.2f}" for group, ms in shares.items()))
    if options.plot and rows:
        plot(rows, options.plot)
    for what, names in (("left out for lack of time", left_out), ("failed", failed)):
        if names:
            print(f"{what}: {'; '.join(names)}")
    print(f"done in {time.perf_counter() - options.began:.0f} s" if not failed else f"{len(failed)} variants FAILED")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
