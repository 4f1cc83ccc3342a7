#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Trains a GPT of GPT-2's size (124 million parameters) with PyTorch's operations or with lk's.

    train.py --ops torch                     normalisation, loss and head by PyTorch
    train.py --ops lk --compile              by lk, inside torch.compile
    train.py --ops lk --head lk-logits       lk's cross entropy of stored logits; --norm and --head choose one by one

train_compare.py beside this file runs both, one after another, and draws what they did.

Model     Pre-norm with RMSNorm, rotary positions, GELU, one matrix for embedding and head. With --positions lrpe it is
          md_lrpe_cosine of q and k: twice as many features go into the attention.
Precision As in nanoGPT: parameters, their gradients, the residual stream and AdamW in float32, under autocast to bf16. So the
          matmuls are bf16, and the head's weight is rounded to bf16 once a step.
          GPT-2's vocabulary of 50257 is odd, and cuBLAS is slow with such rows: nanoGPT pads it, --vocab 50304.
Text      Python's own standard library, which is on every machine. A token is a word; a rare word is spelt in bytes. Every
          variant gets the same batches and the same first weights.
Times     By CUDA events from step to step, the median without the first steps. Memory: the largest amount that PyTorch's
          allocator gave out at once, lk's workspace included, in the same steps.
Compile   Each block is compiled by itself, and the head: 12 blocks are one graph, so it takes seconds and not a minute.
"""
import argparse
import collections
import contextlib
import csv
import itertools
import os
import re
import statistics
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

    def loss(self, y, target, accumulate):
        return self.head(y, self.embedding.weight, target, accumulate)


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


def torch_head(y, weight, target, accumulate):
    logits = F.linear(y, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # bf16 to float32
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())


# lk computes the gradients in forward. grad_scale says what backward multiplies them by, so that it need not touch them again.
def lk_logits_head(y, weight, target, accumulate):
    logits = F.linear(y, weight).flatten(0, -2)
    return LF.cross_entropy(logits, target.flatten(), grad_scale=1 / accumulate, inplace=True)


def lk_head(y, weight, target, accumulate):
    return LF.linear_cross_entropy(y, weight, target, grad_scale=1 / accumulate)


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
        total, pieces = 0.0, self.options.accumulate
        for inputs, targets in zip(self.inputs[number].chunk(pieces), self.targets[number].chunk(pieces)):
            with self.autocast():
                loss = self.model.loss(self.model.trunk(inputs), targets, pieces)
            (loss / pieces).backward()
            total = total + loss.detach() / pieces
        return total, self.update()

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
            loss = measure("head and loss", lambda: self.model.loss(cut, self.targets[-1], 1))
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


# ---- Command line -----------------------------------------------------------------------------------------------------------

FULL = {"layers": 12, "heads": 12, "width": 768, "context": 1024, "batch": 16, "steps": 300, "rate": 6e-4, "eps": 1e-8,
        "warmup": 20, "every": 10, "characters": 16 << 20, "vocab": 50257}
# A large eps of AdamW, since its first step is the rate times the sign of each gradient, and roundings change signs.
TINY = {"layers": 2, "heads": 2, "width": 32, "context": 8, "batch": 2, "steps": 3, "rate": 2e-2, "eps": 1e-3,
        "warmup": 1, "every": 1, "characters": 80, "vocab": 300}
SIZES = ("layers", "heads", "width", "context", "batch", "steps")


def chosen(options, **changes):
    """The options of one run. norm and head follow ops where they were not asked for."""
    options = argparse.Namespace(**{**vars(options), **changes})
    options.norm, options.head = options.norm or options.ops, options.head or options.ops
    return options


def parser_of(usage, description):
    """What train_compare.py takes too."""
    parser = argparse.ArgumentParser(usage=usage, description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--norm", choices=NORMS, help="the normalisations alone")
    add("--head", choices=HEADS, help="head and loss alone; lk: linear_cross_entropy, lk-logits: cross_entropy")
    add("--positions", choices=("rope", "lrpe"), default="rope")
    add("--precision", choices=("bf16", "f32", "f64"), default="bf16", help="bf16: autocast; f64 without lk")
    add("--compile", action="store_true", help="torch.compile of each block and of the head")
    add("--tiny", action="store_true", help="a model for a CPU: 2 layers, width 32, vocabulary 300, 3 steps")
    for name in SIZES:
        add(f"--{name}", type=int, help=str(FULL[name]))
    add("--accumulate", type=int, default=1, metavar="N", help="a step's batch in N pieces, whose gradients are added")
    add("--seed", type=int, default=0)
    add("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    add("--csv", metavar="FILE", help="append a row for each step")
    return parser


def complete(parser, options, lk, **defaults):
    """Fills in sizes, and refuses what cannot be."""
    for name, value in {**FULL, **defaults, **(TINY if options.tiny else {})}.items():
        if getattr(options, name, None) is None:
            setattr(options, name, value)
    if min(options.vocab if isinstance(options.vocab, list) else [options.vocab]) < 256:
        parser.error("--vocab must be at least 256: the first ids are bytes")
    if min(getattr(options, name) for name in SIZES) < 1:
        parser.error(f"{', '.join(SIZES)} must be at least 1")
    if options.accumulate < 1 or options.batch % options.accumulate:
        parser.error("--batch must be a multiple of --accumulate")
    if options.width % (2 * options.heads):
        parser.error("--width must be a multiple of 2 * heads: the positions turn pairs of features")
    if options.precision == "f64" and lk:
        parser.error("--precision f64 needs --ops torch: lk has no float64")
    if lk and not LF:
        parser.error(f"lk_torch cannot be imported ({MISSING}); packages/torch/README.md says how to build it")
    if lk and BACKEND != options.device:
        parser.error(f"lk_torch was built for {BACKEND}, but the device is {options.device}: choose --device {BACKEND}")
    options.began, options.shares = time.perf_counter(), True
    return options


def text(options):
    words = read_words(options.characters)
    print(f"text: {len(words)} words of the standard library, {time.perf_counter() - options.began:.1f} s", flush=True)
    return words


def main():
    parser = parser_of("train.py [options]; --help lists them", __doc__)
    parser.add_argument("--ops", choices=("torch", "lk"), default="torch", help="norm, head and lrpe by PyTorch or lk")
    parser.add_argument("--vocab", type=int, help="50257")
    options = parser.parse_args()
    lk = "lk" in (options.ops, options.norm) or (options.head or "").startswith("lk")
    options = chosen(complete(parser, options, lk))
    _, shares = train(options, tokenise(text(options), options.vocab))
    print("  milliseconds of kernels in one step: " + ", ".join(f"{group} {ms:.2f}" for group, ms in shares.items()))
    print(f"done in {time.perf_counter() - options.began:.0f} s")


if __name__ == "__main__":
    main()
