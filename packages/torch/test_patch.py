# SPDX-License-Identifier: MIT
"""lk_torch.patch on tiny random models of transformers' own configs, against the same models unpatched.

    python packages/torch/test_patch.py         # needs transformers, and peft for its group; V=1 prints each check

Both are held against the unpatched model in a wider type: the loss and each parameter's gradient, by the norm. The patched
model may be off by twice what the unpatched one is, and by some units of the type."""
import collections
import contextlib
import copy
import functools
import importlib.util
import inspect
import io
import itertools
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import types
import warnings

from testing import D, quiet, totals, verdict

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"], os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "error", "1"

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import lk_torch

AT_IMPORT = "transformers" in sys.modules
F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
# Transformers' norms compute in float32, in a model of float64 too. In bfloat16 each result is rounded to 2^-8.
FLOOR = {F32: 2.0**-19, BF16: 2.0**-8}
VOCAB = 131


def attempt(name, f, *args):
    try:
        f(*args)
    except Exception as error:
        traceback.print_exc()
        verdict(name, False, f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")


def build(name, dtype=F32, **more):
    """A tiny model whose norms' weights are not those that they begin with."""
    import transformers
    kw = dict(vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
              num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(1)
    cls = getattr(transformers, name + "ForCausalLM")
    model = cls(cls.config_class(**kw, **more))
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2) if p.dim() > 1 else p.data.add_(torch.randn(p.shape) * 0.2)
    return model.to(D, dtype).train()


def batch():
    ids = torch.randint(3, VOCAB, (2, 11), generator=torch.Generator().manual_seed(2)).to(D)
    labels = ids.clone()
    labels[0, :5] = labels[1, 8] = -100
    return ids, labels


def gradients(model, **more):
    model.zero_grad(set_to_none=True)
    ids, labels = batch()
    out = model(input_ids=ids, labels=labels, **more)
    out.loss.backward()
    return out, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def off(a, b):
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


def compare(name, ours, theirs, wide, floor, logits=False, others=lambda: ()):
    """Each is (output, gradients); wide is theirs in a wider type. others() are more of theirs, each with other roundings."""
    verdict(f"{name}: logits", logits == ("logits" in ours[0]) == (ours[0].logits is not None))
    kept = [k for k in theirs[0] if logits or k != "logits"]
    verdict(f"{name}: the rest of the output", list(ours[0]) == kept, f"{list(ours[0])}, not {kept}")
    verdict(f"{name}: type of the loss", ours[0].loss.dtype == theirs[0].loss.dtype == F32)
    verdict(f"{name}: which gradients", list(ours[1]) == list(theirs[1]))
    for key in ("loss", *theirs[1]):
        of = lambda side: side[0].loss.detach() if key == "loss" else side[1][key]
        error, limit = off(of(ours), of(wide)), 2 * off(of(theirs), of(wide)) + floor
        if error > limit:
            limit = max([limit, *(2 * off(of(other), of(wide)) + floor for other in others())])
        verdict(f"{name}: {key}", error <= limit, f"relative error {error:.3g}, at most {limit:.3g}")


MOE = dict(num_local_experts=4, num_experts_per_tok=2, experts_implementation="batched_mm")
FAMILIES = {  # norms, norms that go with a rotation, MLPs, rotations, and more of the config
    "Llama": (5, 0, 2, 2, {}), "Mistral": (5, 0, 2, 2, {}), "Qwen2": (5, 0, 2, 2, {}), "Qwen3": (9, 4, 2, 2, {}),
    "Qwen3Moe": (9, 4, 2, 2, dict(MOE, num_experts=4, moe_intermediate_size=16)),
    "Gemma": (5, 0, 2, 2, {}), "Gemma2": (9, 0, 2, 2, dict(final_logit_softcapping=3.0)), "Gemma3": (13, 4, 2, 2, {}),
    "Gemma4": (16, 4, 2, 4, dict(num_kv_shared_layers=0, vocab_size_per_layer_input=VOCAB, hidden_size_per_layer_input=8,
                                 global_head_dim=8)),  # turns q and k apart, with tokens before heads
    "Mixtral": (5, 0, 0, 2, {**MOE, "output_router_logits": True, "experts_implementation": "eager"}),  # its own loop of experts
    "GptOss": (5, 0, 2, 2, MOE),  # a clamped gate beside each up, tables of half the width
    "Phi3": (5, 0, 2, 2, {}), "Glm": (5, 0, 2, 2, {}),  # neighbours, half of the head, from the first half of a table
    "Granite": (5, 0, 2, 2, dict(logits_scaling=4.0)), "Cohere": (0, 0, 2, 2, dict(logit_scale=0.25)), "Phi": (0, 0, 0, 2, {}),
    "OPT": (0, 0, 0, 0, dict(ffn_dim=48, word_embed_proj_dim=32, dropout=0.0)),  # its logits are made contiguous()
    "Qwen3_5": (8, 2, 2, 1, dict(layer_types=["linear_attention", "full_attention"], linear_num_value_heads=4, linear_num_key_heads=2,
                                 linear_key_head_dim=8, linear_value_head_dim=8)),  # Gated DeltaNet: a norm with a gate
    "Mamba": (3, 0, 0, 0, dict(state_size=8))}  # its forward reads lm_head.weight.dtype


class Seen(TorchDispatchMode):
    """lk's ops that run, by name; the shapes of all results, and the values of workspace_mib."""

    def __init__(self):
        super().__init__()
        self.ops, self.shapes, self.workspaces = collections.Counter(), set(), []

    def __torch_dispatch__(self, f, kinds, args=(), kwargs=None):
        out = f(*args, **(kwargs or {}))
        self.shapes |= {tuple(t.shape) for t in tree_flatten(out)[0] if isinstance(t, torch.Tensor)}
        self.workspaces.extend(v for a, v in zip(f._schema.arguments, args) if a.name == "workspace_mib")
        self.ops.update([f._schema.name] * f._schema.name.startswith("lk"))
        return out


def ops_of(call):
    """How many norms, MLPs and rotations lk computes in it."""
    with Seen() as seen, torch.no_grad():
        call()
    return tuple(sum(n for name, n in seen.ops.items() if f"::{op}" in name) for op in ("rms_norm", "glu", "rope"))


def families():
    for name, (*counts, more) in FAMILIES.items():
        # in bfloat16 a rounding sends a token to another expert
        for dtype in (F32, BF16) if name not in ("Mixtral", "Qwen3Moe", "GptOss") else (F32,):
            attempt(name, family, name, *counts, more, dtype)


def family(name, norms, turned, mlps, ropes, more, dtype):
    theirs = build(name, dtype, **more)
    ours, wide = copy.deepcopy(theirs), copy.deepcopy(theirs).to(F64 if dtype == F32 else F32)
    said = lk_torch.patch(ours)
    label = f"{name} {str(dtype)[6:]}"
    ids, labels = batch()
    found = said.norms, said.heads, said.mlps, said.ropes
    wanted = norms, 1, mlps, min(ropes, 2)
    verdict(f"{label}: what was patched", found == wanted, f"{found}, not {wanted}\n{said}")
    verdict(f"{label}: weight_offset", ("weight_offset 1" in repr(said)) == (name in ("Gemma", "Gemma2", "Gemma3", "Qwen3_5")), f"\n{said}")
    ran = ops_of(lambda: ours(ids))
    wanted = norms - turned - (label == "Mamba bfloat16"), mlps, ropes  # its last norm's input is float32
    verdict(f"{label}: what lk computes", ran == wanted, f"{ran}, not {wanted}\n{said}")
    for items in (None, 9, torch.tensor(9)) if dtype == F32 else (torch.tensor(9),):
        def eager():  # by PyTorch's other attention its own error is another
            other = copy.deepcopy(theirs)
            other.set_attn_implementation("eager")
            return (gradients(other, num_items_in_batch=items),)
        compare(f"{label}, items {items!r}", *(gradients(m, num_items_in_batch=items) for m in (ours, theirs, wide)), FLOOR[dtype],
                others=eager)
    ours.eval(), theirs.eval()
    with torch.no_grad():
        a, b = ours(ids, labels=labels), theirs(ids, labels=labels)
        verdict(f"{label}: logits in eval()", off(a.logits, b.logits) <= 8 * FLOOR[dtype], f"{off(a.logits, b.logits):.3g}")
        lk_torch.unpatch(ours)
        lk_torch.patch(ours, norms=False, mlp=False, rope=False)
        a, b = ours(ids), theirs(ids)
        verdict(f"{label}: the head without labels", torch.equal(a.logits, b.logits) and list(a) == list(b))
    lk_torch.unpatch(ours)
    verdict(f"{label}: unpatched", [type(m) for m in ours.modules()] == [type(m) for m in theirs.modules()])
    ours.train(), theirs.train()
    a, b = gradients(ours), gradients(theirs)
    verdict(f"{label}: the unpatched model's bits", torch.equal(a[0].logits, b[0].logits) and torch.equal(a[0].loss, b[0].loss) and
            all(torch.equal(a[1][k], b[1][k]) for k in b[1]))


def generation():
    for name in ("Llama", "Gemma2", "Qwen3"):
        theirs = build(name).eval()
        ours = copy.deepcopy(theirs)
        lk_torch.patch(ours)
        a, b = (m.generate(batch()[0], max_new_tokens=6, do_sample=False) for m in (ours, theirs))
        verdict(f"{name}: generate", torch.equal(a, b), f"{a.tolist()}, not {b.tolist()}")


def structure():
    theirs = build("Qwen3")
    ours = copy.deepcopy(theirs)
    said = lk_torch.patch(ours)
    verdict("the table", all(f"Qwen3{part}" in repr(said) for part in ("RMSNorm", "MLP", "Attention")) and "lm_head" in repr(said) and repr(lk_torch.patch(ours)) == repr(said))
    verdict("names", [type(m).__name__ for m in ours.modules()] == [type(m).__name__ for m in theirs.modules()])
    verdict("isinstance", all(isinstance(a, type(b)) for a, b in zip(ours.modules(), theirs.modules())))
    verdict("state_dict", list(ours.state_dict()) == list(theirs.state_dict()))
    verdict("signature", inspect.signature(ours.forward) == inspect.signature(theirs.forward))
    verdict("import", not AT_IMPORT, "importing lk_torch imports transformers")
    first = gradients(ours)[1]
    for how, made in (("copy", copy.deepcopy(ours)), ("pickle", pickle.loads(pickle.dumps(ours)))):
        out, grads = gradients(made)
        verdict(how, out.logits is None and all(torch.equal(grads[k], first[k]) for k in first))
        made.compile(backend="eager")
        verdict(f"{how} of a compiled model", copy.deepcopy(made)._compiled_call_impl is None)
        made.lm_head.weight.data.zero_()
        verdict(f"{how}: of its own weights", gradients(ours)[0].loss != gradients(made)[0].loss)
    ids, labels = batch()
    pair = ours(ids, labels=labels, return_dict=False), theirs(ids, labels=labels, return_dict=False)
    verdict("a tuple", [type(v) for v in pair[0]] == [type(v) if i != 1 else type(None) for i, v in enumerate(pair[1])] and
            len(pair[1]) > 2 and off(pair[0][0], pair[1][0]) < FLOOR[F32], f"{[type(v).__name__ for v in pair[0]]}")
    named = ours(ids, labels=labels)
    verdict("by a name and by a number", named.logits is named.get("logits") is None and type(named[1]) is type(pair[1][2]))
    shift = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:]
    verdict("shift_labels", ours(ids, labels=labels, shift_labels=shift).loss == ours(ids, labels=labels).loss)
    verdict("ignore_index", off(ours(ids, labels=labels.masked_fill(labels < 0, 7), ignore_index=7).loss,
                                theirs(ids, labels=labels.masked_fill(labels < 0, 7), ignore_index=7).loss) < FLOOR[F32])
    verdict("all ignored", ours(ids, labels=torch.full_like(labels, -100)).loss.isnan())
    verdict("labels by position", ours(ids, *[None] * 4, labels).logits is None)
    with torch.autocast(D, BF16):
        verdict("autocast", off(ours(ids, labels=labels).loss, theirs(ids, labels=labels).loss) < 4 * FLOOR[BF16])
    ours.eval()
    a, b = ours.train()(ids), theirs(ids)
    verdict("train() without labels", list(a) == list(b) and off(a.logits, b.logits) < FLOOR[F32])
    ours.eval()
    verdict("eval_logits", ours(ids, labels=labels).logits is not None)
    lk_torch.patch(ours, eval_logits=False)
    verdict("eval_logits=False", ours(ids, labels=labels).logits is None)
    ours.train()
    seen = Seen()
    for mib in (None, 7):
        lk_torch.patch(ours, workspace_mib=mib)
        with seen:
            gradients(ours)
    verdict("no tensor of all logits", not any(s[-1:] == (VOCAB,) for s in seen.shapes), f"{seen.shapes}")
    verdict("workspace_mib", seen.workspaces == [0, 7], f"{seen.workspaces}")
    try:
        lk_torch.patch(ours, workspace_mib=0)
        verdict("workspace_mib=0", False, "it raises nothing")
    except ValueError as error:
        verdict("workspace_mib=0", "workspace_mib is 0" in str(error), str(error))


class Halved(torch.nn.Module):
    """Looks like an RMS norm, and is none."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = torch.nn.Parameter(torch.ones(8)), 1e-6

    divisor, factor = 2, 1.0

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) / self.divisor + self.factor * self.eps) * self.weight


def left():
    """What is left to the model's own code."""
    from transformers import LlamaForCausalLM
    said = lk_torch.patch(torch.nn.Sequential(Halved(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 8)))
    double = Halved()
    double.divisor, double.factor = 1, 2.0
    verdict("another eps than its own", lk_torch.patch(double).norms == 0)
    double.factor = 1.0
    verdict("the same with its own", lk_torch.patch(double).norms == 1)
    verdict("no RMS norm", said.norms == said.heads == 0 and "left" in repr(said), f"\n{said}")
    verdict("nothing", "nothing" in repr(lk_torch.patch(torch.nn.Linear(2, 2))))
    config = build("Llama").config
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        said = lk_torch.patch(model), lk_torch.patch(model)
    said = *said, lk_torch.patch(model)
    verdict("meta", all((t.norms, t.heads, t.mlps, t.ropes) == (5, 1, 2, 2) for t in said), f"\n{said}")
    plain = torch.nn.RMSNorm(8, device=D)
    x, before = torch.randn(3, 8, device=D), plain(torch.ones(3, 8, device=D))
    verdict("torch.nn.RMSNorm", lk_torch.patch(plain).norms == 1 and off(plain(torch.ones(3, 8, device=D)), before) < 2**-20)
    verdict("float64", plain.double()(x.double()).dtype == F64)
    ids, labels = batch()

    for name, change in (("a loss that was set", lambda m: setattr(m, "loss_function", lambda logits, **k: logits.sum())),
                         ("a model in float64", lambda m: m.double())):
        ours, theirs = build("Llama"), build("Llama")
        lk_torch.patch(ours), change(ours), change(theirs)
        a, b = ours(ids, labels=labels), theirs(ids, labels=labels)
        verdict(name, off(a.loss, b.loss) < FLOOR[F32])
    for part in ("", "lm_head"):
        hooked = build("Llama")
        module = hooked.get_submodule(part)
        module.forward = functools.partial(type(module).forward, module)
        verdict(f"a forward that was replaced, {part}", lk_torch.patch(hooked).heads == 0)

    class Gated(Halved):  # a norm as long as there is no gate
        divisor = 1

        def forward(self, x, gate=None):
            return super().forward(x if gate is None else x * gate.sigmoid())

    class Wide(Halved):  # of bfloat16 it makes float32
        divisor = 1

        def forward(self, x):
            return super().forward(x.float()) if x.dtype == BF16 else super().forward(x)
    gated, x = Gated().to(D), torch.randn(3, 8, device=D)  # that is no gate of lk's
    before = gated(x), gated(x, x)
    verdict("a gate", lk_torch.patch(gated).norms == 1 and off(gated(x), before[0]) < FLOOR[F32] and
            torch.equal(gated(x, x), before[1]))
    verdict("a norm that makes another type", lk_torch.patch(Wide()).norms == 0)


class GatedNorm(torch.nn.Module):
    """A norm with a gate: Qwen3-Next's, and with first=True Mamba-2's, which may be without."""

    def __init__(self, first, width=16):
        super().__init__()
        self.weight, self.eps, self.first = torch.nn.Parameter(torch.rand(width) + 0.5), 1e-3, first

    def forward(self, x, gate=None):
        silu = torch.nn.functional.silu(gate.float()) if gate is not None or not self.first else 1.0
        v = x.float() * silu if self.first else x.float()
        v = self.weight * (v * torch.rsqrt(v.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype)
        return (v if self.first else v * silu).to(x.dtype)


def gated_norms():
    """Norms with a gate, and when their own code runs."""
    x, gate = (torch.randn(6, 16, generator=torch.Generator().manual_seed(i)).to(D) for i in (7, 8))
    for first, dtype in itertools.product((False, True), (F32, BF16)):
        torch.manual_seed(9)
        ours = GatedNorm(first).to(D, dtype)
        theirs, name = copy.deepcopy(ours), f"gated norm, first={first}, {str(dtype)[6:]}"
        said = lk_torch.patch(ours)
        verdict(f"{name}: taken", said.norms == 1 and ("with a gate first, or without" if first else "with a gate") in repr(said), f"{said}")
        sides = []
        for m in (ours, theirs, copy.deepcopy(theirs).double()):
            v, g = (t.to(m.weight.dtype, copy=True).requires_grad_() for t in (x, gate))
            y = m(v, gate=g) if m is ours else m(v, g)
            y.backward(torch.ones_like(y))
            sides.append((y.detach(), v.grad, g.grad, m.weight.grad))
        for i, (a, b, wide) in enumerate(zip(*sides)):
            error, limit = off(a, wide), 2 * off(b, wide) + FLOOR[dtype]
            verdict(f"{name} [{i}]", error <= limit and a.dtype == b.dtype, f"{error:.3g}, at most {limit:.3g}")
        a, g = x.to(dtype), gate.to(dtype)
        verdict(f"{name}: lk's", ops_of(lambda: ours(a, g)) == (1, 0, 0), ops_of(lambda: ours(a, g)))
        verdict(f"{name}: not of another type", ops_of(lambda: ours(a, g.double())) == (0, 0, 0))
        if first:
            verdict(f"{name}: without", ops_of(lambda: ours(a)) == (1, 0, 0) and off(ours(a), theirs(a)) <= 2 * FLOOR[dtype])
        lk_torch.unpatch(ours)
        verdict(f"{name}: unpatch", torch.equal(ours(a, g), theirs(a, g)))


class Gated(torch.nn.Module):
    """An MLP with a gate."""

    def __init__(self, act, width=8, inner=12):
        super().__init__()
        self.one, self.two = torch.nn.Linear(width, inner), torch.nn.Linear(width, inner, bias=False)
        self.three, self.act = torch.nn.Linear(inner, width), act

    def forward(self, x):
        return self.three(self.two(x) * self.act(self.one(x)))


class Merged(Gated):
    """Both Linears before the product in one."""

    def __init__(self, act, width=8, inner=12):
        torch.nn.Module.__init__(self)
        self.out, self.both, self.act = torch.nn.Linear(inner, width), torch.nn.Linear(width, 2 * inner), act
        self.swiglu_limit = 1.5

    def forward(self, x):
        gate, up = self.both(x).chunk(2, -1)
        return self.out(self.act(gate.clamp(max=self.swiglu_limit)) * up.clamp(-self.swiglu_limit, self.swiglu_limit))


def mlps():
    """Which MLPs are taken, and when their own code runs."""
    nn = torch.nn
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(5)).to(D)

    def kind(forward, base=Gated, **more):
        return type("Other", (base,), dict(forward=forward, **more))
    large = Merged(nn.GELU())
    large.swiglu_limit = 1000.0
    alternate = lambda m, x: m.out(m.act(m.both(x)[..., ::2]) * (m.both(x)[..., 1::2]))
    torch.manual_seed(6)
    taken = {
        "silu": (Gated(nn.SiLU()), "glu: silu"), "gelu": (Gated(nn.GELU()), "glu: gelu"), "relu": (Gated(nn.ReLU()), "glu: relu"),
        "gelu_tanh": (Gated(nn.GELU("tanh")), "glu: gelu_tanh"), "sigmoid": (Gated(nn.Sigmoid()), "glu: sigmoid"),
        "a function": (Gated(nn.functional.silu), "glu: silu"), "square": (Gated(nn.SiLU(), 8, 8), "glu: silu"),
        "limit": (Merged(nn.SiLU()), "glu: silu, limit 1.5"), "a large limit": (large, "glu: gelu, limit 1000"),
        "neighbours": (kind(alternate, Merged)(nn.SiLU()), "interleaved True")}
    for name, (ours, what) in taken.items():
        ours = ours.to(D)
        theirs = copy.deepcopy(ours)
        said = lk_torch.patch(ours)
        verdict(f"mlp {name}: taken", said.mlps == 1 and what in repr(said), f"{said}")
        for dtype in (F32,) if name == "limit" else (F32, BF16):  # in bfloat16 gates are at the limit, or not, by a rounding
            sides = []
            for m in (ours.to(dtype), theirs.to(dtype), copy.deepcopy(theirs).double()):
                v = x.to(next(m.parameters()).dtype, copy=True).requires_grad_()
                y = m(v)
                y.backward(torch.ones_like(y))
                sides.append((y.detach(), v.grad))
            for a, b, wide in zip(*sides):
                error, limit = off(a, wide), 2 * off(b, wide) + FLOOR[dtype]
                right = error <= limit and a.dtype == b.dtype
                verdict(f"mlp {name} {str(dtype)[6:]}", right, f"{error:.3g}, at most {limit:.3g}")
        verdict(f"mlp {name}: lk's", ops_of(lambda: ours(x.to(dtype))) == (0, 1, 0))

    class Swish(nn.Module):
        def __init__(self):
            super().__init__()
            self.beta = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return x * torch.sigmoid(self.beta * x)

    def sliced(m, x):  # as Llama's pretraining_tp
        return m.three(m.act(nn.functional.linear(x, m.one.weight, m.one.bias)) * m.two(x))
    dropped, mixed = Gated(nn.SiLU()), Gated(nn.functional.silu)
    dropped.drop = mixed.drop = nn.Dropout(0.0)
    scaled = Gated(nn.SiLU())
    scaled.scale = nn.Parameter(torch.ones(8))
    refused = {
        "tanh": Gated(nn.Tanh()), "hardswish": Gated(nn.Hardswish()), "relu6": Gated(nn.ReLU6()),
        "a clamp": kind(lambda m, x: m.three(m.act(m.one(x)).clamp(max=100) * m.two(x)))(nn.SiLU()), "a dropout": dropped, "a dropout alone": mixed,
        "a factor of its own": scaled,
        "a trained activation": Gated(Swish()), "weights taken": kind(sliced)(nn.SiLU()),
        "another input": kind(lambda m, x: m.three(m.act(m.one(x)) * m.two(2 * x)))(nn.SiLU()),
        "another output": kind(lambda m, x: m.three(m.act(m.one(x)) * m.two(x)) + x[..., :1])(nn.SiLU()),
        "a factor": kind(lambda m, x: m.three(m.act(m.one(x)) * m.two(x) * 1.001))(nn.SiLU()),
        "no last Linear": kind(lambda m, x: m.act(m.one(x)) * m.two(x))(nn.SiLU()),
        "another type": kind(lambda m, x: m.three((m.act(m.one(x)) * m.two(x)).float()))(nn.SiLU())}
    for name, m in refused.items():
        said = lk_torch.patch(m)
        verdict(f"mlp {name}: left", said.mlps == 0 and "left" in repr(said), f"{said}")
    verdict("mlp, none asked for", lk_torch.patch(Gated(nn.SiLU()), mlp=False).mlps == 0)
    square = nn.Module()
    square.q, square.k, square.v, square.act = *(nn.Linear(8, 8) for _ in range(3)), nn.SiLU()
    verdict("three Linears of one size", "nothing" in repr(lk_torch.patch(square)))

    ours = Gated(nn.SiLU()).to(D)
    theirs = copy.deepcopy(ours)
    lk_torch.patch(ours)
    for name, call, ops in (("float64", lambda m: copy.deepcopy(m).double()(x.double()), 0), ("by name", lambda m: m(x=x), 0),
                            ("no rows", lambda m: m(x[:0]), 1), ("one dimension", lambda m: m(x[0, 0]), 1)):
        a, b = call(ours), call(theirs)
        verdict(f"mlp {name}", a.dtype == b.dtype and a.shape == b.shape and off(a, b) < FLOOR[F32])
        verdict(f"mlp {name}: lk's", ops_of(lambda: call(ours)) == (0, ops, 0))
    with torch.autocast(D, BF16):
        verdict("mlp autocast", ours(x).dtype == theirs(x).dtype == BF16 and off(ours(x), theirs(x)) < 2 * FLOOR[BF16])
    ours.two.register_forward_hook(lambda m, args, y: y.double() if y.dtype == F32 else None)
    ours.three.double()
    verdict("mlp of two types", ours(x).dtype == F64)
    calls = []
    ours, theirs = copy.deepcopy(theirs), theirs
    lk_torch.patch(ours)
    for name in ("one", "two", "three"):
        getattr(ours, name).register_forward_hook(lambda m, args, y, name=name: calls.append(name))
    verdict("hooks of Linears", ops_of(lambda: ours(x)) == (0, 1, 0) and sorted(calls) == ["one", "three", "two"], f"{calls}")
    ours.act.register_forward_hook(lambda m, args, y: calls.append("act"))
    verdict("a hook of the activation", ops_of(lambda: ours(x)) == (0, 0, 0) and "act" in calls, f"{calls}")
    lk_torch.unpatch(ours)
    model, ids = build("Qwen3Moe", **FAMILIES["Qwen3Moe"][-1]), batch()[0]
    lk_torch.patch(model)
    calls.clear()
    model.model.layers[0].mlp.experts.act_fn.register_forward_hook(lambda m, args, y: calls.append("act"))
    verdict("a hook of the experts' activation", ops_of(lambda: model(ids))[1] == len(calls) == 1, f"{calls}")
    verdict("mlp unpatched", type(ours) is Gated and torch.equal(ours(x), theirs(x)))


def changes():
    """A norm's eps, an MLP's activation and limit that are set to others after patch."""
    nn = torch.nn
    x = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(5)).to(D)

    def made(m):
        """The module, and its patched copy."""
        m = m.to(D)
        ours = copy.deepcopy(m)
        lk_torch.patch(ours)
        return ours, m

    def same(name, ours, theirs, ops, x=x):
        a, b = ours(x), theirs(x)
        verdict(f"{name}, then set", off(a, b) <= FLOOR[F32], f"{off(a, b):.3g}")
        ran = ops_of(lambda: ours(x))
        verdict(f"{name}, then set: what lk computes", ran == ops, f"{ran}, not {ops}")

    def each(ours, theirs, name, change, ops):
        """For the module itself, copies of it before and after the change, and one that is compiled before."""
        sides = [("", ours, theirs), ("copied", copy.deepcopy(ours), copy.deepcopy(theirs))]
        if name not in ("a function", "experts", "a limit"):  # whose classes or functions have no place in a module
            sides.append(("pickled", pickle.loads(pickle.dumps(ours)), copy.deepcopy(theirs)))
        for how, a, b in sides:
            same(f"{name} {how}, not", a, b, (1, 0, 0) if "eps" in name else (0, 1, 0))
            torch._dynamo.reset()
            fast = torch.compile(a, backend="eager", fullgraph=True)
            verdict(f"{name} {how} compiled", off(fast(x), b(x)) <= FLOOR[F32])
            change(a), change(b)
            same(f"{name} {how}", a, b, ops)
            verdict(f"{name} {how} compiled, then set", off(fast(x), b(x)) <= FLOOR[F32], f"{off(fast(x), b(x)):.3g}")
            same(f"{name} {how}, a copy", copy.deepcopy(a), b, ops)
    sets = lambda name, value: lambda m: setattr(m, name, value)
    plain = nn.RMSNorm(8, eps=1e-6)
    for name, eps, ops in (("eps", 0.5, (1, 0, 0)), ("eps None", None, (1, 0, 0)), ("eps 0", 0, (1, 0, 0)),
                           ("eps a tensor", torch.tensor(0.5, device=D), (0, 0, 0))):
        each(*made(copy.deepcopy(plain) if "tensor" not in name else Tensored()), name, sets("eps", eps), ops)
    ours, theirs = made(nn.RMSNorm(8, eps=1e-6))
    fast = torch.compile(ours, backend="eager", fullgraph=True)
    for eps in (0.5, 0.25, 1e-6, 2.0):
        ours.eps = theirs.eps = eps
        verdict(f"eps {eps} compiled", off(fast(x), theirs(x)) <= FLOOR[F32], f"{off(fast(x), theirs(x)):.3g}")

    each(*made(Gated(nn.SiLU())), "an activation", sets("act", nn.GELU()), (0, 0, 0))
    each(*made(Gated(nn.SiLU())), "the same activation", sets("act", nn.SiLU()), (0, 1, 0))
    each(*made(Gated(nn.GELU())), "another gelu", sets("act", nn.GELU("tanh")), (0, 0, 0))
    each(*made(Gated(nn.functional.silu)), "a function", sets("act", torch.relu), (0, 0, 0))
    each(*made(Merged(nn.SiLU())), "a limit", sets("swiglu_limit", 0.25), (0, 0, 0))
    ours, theirs = made(Gated(nn.SiLU()))
    replica = lambda m: m._replicate_for_data_parallel()
    parallel = replica(ours)
    for name, child in ours._modules.items():  # as DataParallel does
        parallel._modules[name] = replica(child)
        parallel._modules[name].__dict__.update(child._parameters)
    same("a replica, not", parallel, theirs, (0, 1, 0))
    ids = batch()[0]
    theirs = build("Qwen3Moe", **FAMILIES["Qwen3Moe"][-1])
    ours = copy.deepcopy(theirs)
    lk_torch.patch(ours)
    for m in (ours, theirs):
        m.model.layers[0].mlp.experts.act_fn = nn.GELU()
    verdict("experts, then set", ops_of(lambda: ours(ids))[1] == 1 and off(ours(ids).logits, theirs(ids).logits) < 8 * FLOOR[F32])

    theirs = Heads().to(D)
    ours, v, angles = copy.deepcopy(theirs), torch.randn(2, 7, 16, device=D), tables()
    lk_torch.patch(ours)
    for name, eps, ops in (("both eps", (0.5, 0.5), (0, 0, 1)), ("one eps", (0.5, 0.25), (2, 0, 0)), ("no eps", (None, None), (2, 0, 0))):
        for m in (ours, theirs):
            m.q_norm.eps, m.k_norm.eps = eps
        a, b = ours(v, angles), theirs(v, angles)
        ran = ops_of(lambda: ours(v, angles))
        verdict(f"norms before a rotation, {name}", all(off(p, q) < 4 * FLOOR[F32] for p, q in zip(a, b)) and
                ran == ops, f"{[off(p, q) for p, q in zip(a, b)]}, {ran}")


class Tensored(Halved):
    divisor = 1


def halves(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    turn = lambda x: torch.cat([-x[..., x.shape[-1] // 2:], x[..., :x.shape[-1] // 2]], -1)
    return tuple(x * cos + turn(x) * sin for x in (q, k))


def backwards(q, k, cos, sin):  # turns the other way
    return halves(q, k, cos, -sin)


def apart(q, k, cos, sin):  # neighbours come in halves
    y = [x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for x in (q, k)]
    return halves(*y, cos, sin)


def wider(q, k, cos, sin):  # always float32
    return halves(q.float(), k.float(), cos.float(), sin.float())


def alone(q, k, cos, sin):  # no k
    return halves(q, k, cos, sin)[:1]


def decorated(f):
    @functools.wraps(f)
    def run(*args, **kwargs):
        return f(*args, **kwargs)
    return run


class Decorated:
    def __init__(self, f):
        functools.update_wrapper(self, f)

    def __get__(self, owner, kind=None):
        return functools.partial(self.__wrapped__, owner)


class Heads(torch.nn.Module):
    """What an attention does up to its products: q and k of heads, with norms, turned."""
    turn, between = "halves", staticmethod(lambda q: q)

    def __init__(self):
        super().__init__()
        self.q, self.k = torch.nn.Linear(16, 32), torch.nn.Linear(16, 16)
        self.q_norm, self.k_norm = (torch.nn.RMSNorm(8, eps=1e-5) for _ in range(2))

    @decorated
    def forward(self, x, position_embeddings=None, scale=None, *, more=1.0):
        q = self.q_norm(self.q(x).unflatten(-1, (-1, 8))).transpose(1, 2)
        k = self.k_norm(self.k(x).unflatten(-1, (-1, 8))).transpose(1, 2)
        q = self.between(q)
        if position_embeddings is not None:
            q, k = halves(q, k, *position_embeddings)
        return q * more, k if scale is None else k * scale


def tables(dtype=F32, width=8):
    c = torch.arange(7.0)[:, None] * 0.7 ** torch.arange(width // 2)
    return [torch.cat([t, t], -1)[None].to(D, dtype) for t in (c.cos(), c.sin())]


def rotations():
    """Which rotations are taken, and when their own code runs."""
    from transformers.models.qwen3 import modeling_qwen3
    before = modeling_qwen3.apply_rotary_pos_emb
    other, model = build("Qwen3"), build("Qwen3")
    ids = batch()[0]
    first = other(ids).logits
    lk_torch.patch(model)
    verdict("transformers' own function", modeling_qwen3.apply_rotary_pos_emb is before and
            ops_of(lambda: other(ids)) == (0, 0, 0) and torch.equal(other(ids).logits, first))
    verdict("rope=False", lk_torch.patch(model, rope=False).ropes == 0)

    scope = globals()
    x = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(7)).to(D)

    def pair(**body):
        torch.manual_seed(8)
        ours = type("Heads", (Heads,), body)().to(D)
        for p in (ours.q_norm.weight, ours.k_norm.weight):
            p.data.add_(torch.rand(8, device=D))
        return ours, copy.deepcopy(ours)

    def near(ours, theirs, call, ops, name, floor=4 * FLOOR[F32]):
        a, b = call(ours), call(theirs)
        verdict(f"rope {name}", all(p.dtype == q.dtype and p.shape == q.shape and off(p, q) < floor for p, q in zip(a, b)),
                f"{[off(p, q) for p, q in zip(a, b)]}")
        ran = ops_of(lambda: call(ours))
        verdict(f"rope {name}: what lk computes", ran == ops, f"{ran}, not {ops}")
    ours, theirs = pair()
    said = lk_torch.patch(ours)
    verdict("rope: taken, with its norms", said.ropes == 1 and "rope, with q_norm and k_norm" in repr(said), f"{said}")
    angles = tables()
    each = [[t.repeat(2, 1, 1) for t in angles], [t.expand(2, -1, -1) for t in angles]]
    for name, ops, call in (
            ("one batch of tables", (0, 0, 1), lambda m: m(x, angles)), ("a batch each", (0, 0, 1), lambda m: m(x, each[0])),
            ("expanded tables", (0, 0, 1), lambda m: m(x, position_embeddings=each[1])), ("no angles", (2, 0, 0), lambda m: m(x)),
            ("other arguments", (0, 0, 1), lambda m: m(x, angles, 3.0, more=2.0)),
            ("float64", (0, 0, 0), lambda m: copy.deepcopy(m).double()(x.double(), tables(F64))),
            ("tables of another type", (2, 0, 0), lambda m: m(x, tables(F64)))):
        near(ours, theirs, call, ops, name)
    half = [copy.deepcopy(m).bfloat16() for m in (ours, theirs)]
    near(*half, lambda m: m(x.bfloat16(), tables(BF16)), (0, 0, 1), "bfloat16", 4 * FLOOR[BF16])
    near(*half, lambda m: m(x.bfloat16(), angles), (2, 0, 0), "float32 tables, of which it makes float32", 4 * FLOOR[BF16])
    grads = []
    for m in (ours, theirs):
        c = [t.clone().requires_grad_() for t in angles]
        sum(y.square().sum() for y in m(x, c)).backward()
        grads.append([t.grad for t in c])
    verdict("rope: gradients of the tables", all(off(a, b) < 2 * FLOOR[F32] for a, b in zip(*grads)))

    seen = []
    handle = ours.k_norm.register_forward_hook(lambda m, args, y: seen.append(type(y)))
    near(ours, theirs, lambda m: m(x, angles), (1, 0, 1), "a hook of a norm")
    verdict("rope: the hook gets a tensor", set(seen) == {torch.Tensor}, f"{seen}")
    handle.remove()
    lk_torch.patch(ours, norms=False)
    lk_torch.unpatch(ours)
    verdict("rope unpatched", ops_of(lambda: ours(x, angles)) == (0, 0, 0) and [type(m) for m in ours.modules()] == [
        type(m) for m in theirs.modules()] and all(torch.equal(a, b) for a, b in zip(ours(x, angles), theirs(x, angles))))
    verdict("rope, norms=False", "with" not in repr(lk_torch.patch(ours, norms=False)))
    near(ours, theirs, lambda m: m(x, angles), (0, 0, 1), "norms=False")
    verdict("rope, norms=False: no trace", vars(ours.q_norm).keys() == vars(theirs.q_norm).keys())
    try:
        ours(x, tables(width=4))
        verdict("rope: narrow tables", False, "it raises nothing")
    except RuntimeError as error:
        verdict("rope: narrow tables", "must match" in str(error), str(error))

    # What stands between a norm and the rotation: its class is tried, and where a call goes another way it gets the tensor.
    for name, between, ops in (("a product", lambda q: 2.0 * q, (1, 0, 1)), ("contiguous", lambda q: q.contiguous(), (1, 0, 1)),
                               ("in place", lambda q: q.mul_(2.0), (1, 0, 1)),
                               ("two transpositions", lambda q: q.transpose(-1, 2).transpose(2, 3), (1, 0, 1)),
                               ("a cat", lambda q: torch.cat([q, q], 1), (1, 0, 1)), ("an alias", alias, (1, 0, 1)),
                               ("an alias of what is written", aliased, (1, 0, 1))):
        ours, theirs = pair(between=staticmethod(between))
        said = lk_torch.patch(ours)
        one = name in ("a product", "contiguous", "a cat")
        verdict(f"rope after {name}: said", ("rope, with k_norm" in repr(said)) == one, f"{said}")
        near(ours, theirs, lambda m: m(x, angles), ops, f"after {name}")

    kinds = []
    ours, _ = pair(between=staticmethod(lambda q: kinds.append(type(q)) or q))
    lk_torch.patch(ours)
    kinds.clear()
    ours(x), ours(x, None)
    verdict("rope: a tensor where there are no angles", kinds == [torch.Tensor] * 2, f"{kinds}")

    for name in ("backwards", "apart", "wider", "alone"):
        kind = type("Heads", (Heads,), dict(forward=types.FunctionType(Heads.forward.__wrapped__.__code__,
                                                                       {**scope, "halves": scope[name]})))
        said = lk_torch.patch(kind())
        verdict(f"rope {name}: left", said.ropes == 0 and "left: halves: " in repr(said), f"{said}")

    # lk reads one of each two numbers of cos and sin. A rotary embedding shows whether they are alike.
    ids = batch()[0]
    for name, taken in (("Llama", lambda t: t), ("Gemma3", lambda t: t), ("Cohere", lambda t: t), ("Llama", uneven), ("Gemma3", uneven),
                        ("Cohere", uneven), ("Llama", neighbours)):
        theirs, one = build(name), taken is not uneven and taken is not neighbours
        rotary = theirs.model.rotary_emb
        rotary.__class__ = type("Rotary", (type(rotary),), dict(forward=of_tables(type(rotary).forward, taken)))
        ours, bare = copy.deepcopy(theirs), copy.deepcopy(theirs.model)
        empty = copy.deepcopy(theirs).to("meta")
        said, meta = lk_torch.patch(ours), lk_torch.patch(empty)
        label = f"rope, {name}'s tables, {getattr(taken, '__name__', '')}"
        verdict(f"{label}: taken", said.ropes == meta.ropes == 2 * one and ("sin differ" in repr(said)) != one, f"\n{said}")
        error = off(ours(ids).logits, theirs(ids).logits)
        verdict(f"{label}", error < 8 * FLOOR[F32], f"{error:.3g}")
        verdict(f"{label}: nothing changes", vars(rotary).keys() == vars(ours.model.rotary_emb).keys() and all(
            torch.equal(a, b) for a, b in zip(rotary.buffers(), ours.model.rotary_emb.buffers())))
        if taken is uneven:
            own, both = build(name).model.rotary_emb, torch.nn.ModuleDict(dict(tower=bare, text=build(name)))
            verdict(f"{label}: of another part", lk_torch.patch(both).ropes == 2)
            for layer in bare.layers:
                layer.self_attn.rotary_emb = own
            verdict(f"{label}: of its own", lk_torch.patch(bare).ropes == 2)
    kind = type("Heads", (Heads,), dict(forward=Decorated(Heads.forward.__wrapped__)))
    verdict("a forward that is no function", lk_torch.patch(kind()).ropes == 0)


def uneven(t):  # numbers of their own in each half, and in each pair
    return t * torch.linspace(0.5, 1.0, t.shape[-1], device=t.device)


def neighbours(t):
    return t[..., :t.shape[-1] // 2].repeat_interleave(2, -1)


def of_tables(forward, change):
    """A rotary embedding's forward, with another cos and sin."""
    @functools.wraps(forward)
    def run(*args, **kwargs):
        return tuple(map(change, forward(*args, **kwargs)))
    return run


def alias(q):
    turned = q.transpose(1, 2)
    turned.mul_(2.0)
    return q


def aliased(q):
    turned = q.transpose(1, 2)
    q.mul_(2.0)
    return turned.transpose(1, 2)


def steps():
    """What stands between a head and its loss: it passes, or all logits are made by the model's own code, and a warning says so."""
    from transformers import LlamaForCausalLM
    few, alone = VOCAB - 3, dict(norms=False, mlp=False, rope=False)

    def written(z):
        z.view(-1, VOCAB)[:, 5] = -9.0
        return z

    def written_later(z):
        twice = z * 2.0
        z[..., 5] = -9.0
        return twice
    told = lambda h, z: (isinstance(h, torch.nn.Linear) and h.weight.dtype == z.dtype and h.bias is None and
                         z.device == h.weight.device and z.shape[-1] == z.size(2) == h.out_features and
                         (z.ndim, z.dim(), len(z), z.size()) == (3, 3, 2, z.shape))
    passes = {
        "contiguous": lambda h, z: z.contiguous(), "float": lambda h, z: z.float(), "type_as": lambda h, z: z.type_as(z),
        "to": lambda h, z: z.to(F32).to(dtype=h.weight.dtype).to(z.device).to(z), "double": lambda h, z: z.to(F64),
        "view": lambda h, z: z.view(-1, z.shape[-1]).view((2, -1, VOCAB)), "reshape": lambda h, z: z.reshape(2 * 11, VOCAB),
        "classes": lambda h, z: z[..., :few], "first classes": lambda h, z: z[:, :, 0:few].contiguous()[..., :VOCAB],
        "attributes": lambda h, z: z * (0.5 if told(h, z) else 7.0), "Tanh": lambda h, z: torch.nn.Tanh()(z),
        "products": lambda h, z: 3.0 * torch.tanh(torch.div(torch.mul(z, 2.0), 3.0)) / 2}
    made = {
        "other classes": lambda h, z: z[..., 3:], "clamp": lambda h, z: z.clamp(-1.0, 1.0), "mul_": lambda h, z: z.mul_(2.0),
        "where": lambda h, z: torch.where(z > 0, z, 0.5 * z) + 1, "a tensor": lambda h, z: z * z.new_ones(()),
        "zero": lambda h, z: z * 0.0, "a negative factor": lambda h, z: z * -1.0, "two tanh": lambda h, z: z.tanh().tanh(),
        "detach": lambda h, z: z.detach() + z, "weight": lambda h, z: z @ h.weight.new_ones(VOCAB, VOCAB),
        "a view that is written": lambda h, z: written(z), "float, written": lambda h, z: written(z.float()),
        "a product before it is written": lambda h, z: written_later(z)}
    others = "zero", "a negative factor", "a product before it is written"  # some are made, but not those of the output

    class Stepped(LlamaForCausalLM):
        def forward(self, input_ids, labels=None, **kwargs):
            logits = self.step(self.lm_head, self.lm_head(self.model(input_ids).last_hidden_state))
            return self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1]), logits
    for dtype in (F32, BF16):
        first = build("Llama", dtype)
        first.__class__ = Stepped
        for name, step in {**passes, **made}.items():
            if dtype == BF16 and name not in ("to", "classes", "products", "float, written", "clamp"):
                continue
            ours, theirs = copy.deepcopy(first), copy.deepcopy(first)
            ours.step = theirs.step = step
            said, (ids, labels) = lk_torch.patch(ours, **alone), batch()
            labels = labels.clamp(max=few - 1)
            with warnings.catch_warnings(record=True) as words:
                warnings.simplefilter("always")
                a, b = ([m(ids, labels=labels) for _ in range(2)][1] for m in (ours, theirs))
            words = [str(w.message) for w in words]
            again, label = repr(lk_torch.patch(ours, **alone)), f"{name} {str(dtype)[6:]}"
            if name in passes:
                verdict(f"{label}: no logits", len(a) == 2 and a[1] is None and not words and "not so" not in again, f"{words}")
            else:
                once = len(words) == 1 and "makes all logits" in words[0] and "not so" in again
                verdict(f"{label}: said once", once, f"{words}")
                if name in others:
                    right = a[1] is None
                else:
                    right = torch.equal(a[1], b[1]) and a[1].dtype == b[1].dtype
                verdict(f"{label}: logits", len(a) == 2 and right)
            for out, m in ((a, ours), (b, theirs)):
                out[0].backward()
            exact = name in made and name not in others
            dw, dw_theirs = ours.lm_head.weight.grad, theirs.lm_head.weight.grad
            for key, p, q in (("loss", a[0].detach(), b[0].detach()), ("dweight", dw, dw_theirs)):
                right = torch.equal(p, q) or not exact and off(p, q) <= 4 * FLOOR[dtype]
                verdict(f"{label}: {key}", right, f"{off(p, q):.3g}")


def heads():
    """Heads that change after patch, or that lk does not take."""
    from torch.testing._internal.two_tensor import TwoTensor
    ids, labels = batch()

    def quantize(m):  # as torchao's types do: its own dispatch, the type of what it stands for
        w = m.lm_head.weight.detach()
        m.lm_head.weight = torch.nn.Parameter(TwoTensor(w, w.clone()))

    def hook(m):
        m.lm_head.forward = functools.partial(type(m.lm_head).forward, m.lm_head)
    for name, change, again in (("a tensor subclass", quantize, 0), ("a hook of accelerate", hook, 0),
                                ("more classes", lambda m: m.resize_token_embeddings(VOCAB + 5), 1),
                                ("another Linear", lambda m: setattr(m, "lm_head", torch.nn.Linear(32, VOCAB)), 1)):
        ours, theirs = build("Llama"), build("Llama")
        for m in (ours, theirs):
            torch.manual_seed(4)
            lk_torch.patch(m) if m is ours else None
            change(m)
        with warnings.catch_warnings(record=True) as words:
            warnings.simplefilter("always")
            a, b = ours(ids, labels=labels), theirs(ids, labels=labels)
        words = [str(w.message) for w in words]
        verdict(f"{name}: said", sum("makes all logits" in w for w in words) == 1, f"{words}")
        verdict(name, off(a.loss.detach(), b.loss.detach()) < FLOOR[F32] and off(a.logits, b.logits) < 8 * FLOOR[F32])
        said = lk_torch.patch(ours)
        verdict(f"{name}: patched again", said.heads == again and ("left" in repr(said)) != again, f"\n{said}")
        a = ours(ids, labels=labels)
        verdict(f"{name}: then", (a.logits is None) == again and off(a.loss.detach(), b.loss.detach()) < FLOOR[F32])
    ours, theirs = build("Llama"), build("Llama")
    lk_torch.patch(ours)
    shift = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, -3:].contiguous()
    last = dict(logits_to_keep=3, labels=labels, shift_labels=shift)
    verdict("logits_to_keep", off(ours(ids, **last).loss, theirs(ids, **last).loss) < FLOOR[F32])


def checkpointing():
    theirs = build("Qwen3")
    ours, wide = copy.deepcopy(theirs), copy.deepcopy(theirs).double()
    lk_torch.patch(ours)
    ours.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    compare("checkpointing", *(gradients(m, use_cache=False) for m in (ours, theirs, wide)), FLOOR[F32])


def trainer():
    """Steps of the Trainer with micro-batches, so with num_items_in_batch, and a model that was saved."""
    from transformers import LlamaForCausalLM, Trainer, TrainingArguments
    (ids, labels), losses = batch(), []
    rows = [dict(input_ids=ids[i % 2], labels=labels[i % 2]) for i in range(16)]
    for patched in (False, True):
        model = build("Llama")
        if patched:
            lk_torch.patch(model)
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            args = TrainingArguments(folder, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=4,
                                     report_to=[], use_cpu=D == "cpu", logging_steps=1, save_strategy="no", disable_tqdm=True,
                                     learning_rate=1e-2)
            run = Trainer(model, args, train_dataset=rows, eval_dataset=rows[:4])
            run.train()
            losses.append([line["loss"] for line in run.state.log_history if "loss" in line] + [run.evaluate()["eval_loss"]])
            model.save_pretrained(folder)
            loaded = LlamaForCausalLM.from_pretrained(folder)
        same = all(torch.equal(a.cpu(), b) for a, b in zip(model.state_dict().values(), loaded.state_dict().values()))
        verdict(f"save_pretrained, patched: {patched}", same and model.config.architectures == ["LlamaForCausalLM"])
    ours, theirs = map(torch.tensor, losses[::-1])
    # Adam divides a gradient by its magnitude: a step is off by what the gradients are, not by less.
    verdict("Trainer", len(ours) == 5 and off(ours, theirs) < 16 * FLOOR[F32], f"{ours.tolist()}, not {theirs.tolist()}")


def peft():
    from peft import LoraConfig, get_peft_model
    for targets, fused in ((["q_proj", "v_proj", "gate_proj", "down_proj"], True), (["q_proj", "lm_head"], False)):
        for order in ("patch, then LoRA", "LoRA, then patch"):
            theirs = build("Llama")
            ours = copy.deepcopy(theirs)
            if order.startswith("patch"):
                lk_torch.patch(ours)
            models = []
            for m in (ours, theirs):
                torch.manual_seed(3)
                models.append(get_peft_model(m, LoraConfig(target_modules=targets, r=4, init_lora_weights=False)).train())
            ours, theirs = models
            if order.startswith("LoRA"):
                said = lk_torch.patch(ours)
                verdict(f"{order}, {targets}: heads", said.heads == fused, f"\n{said}")
            elif not fused:  # once more, now that there is an adapter of the head
                verdict(f"{order}, {targets}: patched again", lk_torch.patch(ours).heads == 0)
            wide, name = copy.deepcopy(theirs).double(), f"{order}, {targets}"
            if fused:
                compare(name, gradients(ours), gradients(theirs), gradients(wide), FLOOR[F32])
            else:
                (a, da), (b, db) = gradients(ours), gradients(theirs)
                verdict(name, off(a.loss, b.loss) < FLOOR[F32] and all(off(da[k], db[k]) < 8 * FLOOR[F32] for k in db))


def compiled():
    for name, ops in dict(Llama=(5, 2, 2), Gemma2=(9, 2, 2), Qwen3=(5, 2, 2)).items():
        theirs = build(name)
        ours, wide = copy.deepcopy(theirs), copy.deepcopy(theirs).double()
        lk_torch.patch(ours)
        torch._dynamo.reset()
        count = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
        fast = torch.compile(ours, backend=count, fullgraph=True)
        ids, labels = batch()
        out = fast(input_ids=ids, labels=labels, use_cache=False)
        out.loss.backward()
        grads = {k: p.grad for k, p in ours.named_parameters()}
        verdict(f"compile {name}: a second call", fast(input_ids=ids, labels=labels, use_cache=False).loss == out.loss)
        compare(f"compile {name}", (out, grads), gradients(theirs, use_cache=False), gradients(wide, use_cache=False), FLOOR[F32])
        verdict(f"compile {name}: graphs", count.frame_count == 1, f"{count.frame_count}, not 1")
        targets = [str(node.target) for graph in count.graphs for node in graph.graph.nodes]
        ran = tuple(targets.count(f"lk.{op}.default") for op in ("rms_norm", "glu", "rope"))
        verdict(f"compile {name}: what lk computes", ran == ops, f"{ran}, not {ops}")


def sharded(rank, ranks, port):
    """FSDP2 of all blocks and the root; each rank has a row of the batch."""
    from torch.distributed.fsdp import fully_shard
    dist.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=ranks)
    ids, labels = batch()
    for own_head in (False, True):
        plain = build("Qwen3")
        model = copy.deepcopy(plain)
        lk_torch.patch(model)
        for part in [*model.model.layers, *([model.lm_head] if own_head else [])]:
            fully_shard(part)
        fully_shard(model)
        out = model(ids[rank:rank + 1], labels=labels[rank:rank + 1], num_items_in_batch=7)
        out.loss.backward()
        losses = [plain(ids[i:i + 1], labels=labels[i:i + 1], num_items_in_batch=7).loss for i in range(ranks)]
        torch.stack(losses).mean().backward()
        verdict(f"rank {rank}: loss", out.logits is None and off(out.loss.detach(), losses[rank].detach()) < FLOOR[F32])
        for (key, p), q in zip(model.named_parameters(), plain.parameters()):
            error = off(p.grad.full_tensor(), q.grad)
            verdict(f"rank {rank}: {key}", error < 8 * FLOOR[F32], f"relative error {error:.3g}")
        verdict("unpatch", lk_torch.unpatch(model) == 15)
        out = model(ids[rank:rank + 1], labels=labels[rank:rank + 1], num_items_in_batch=7)
        verdict(f"rank {rank}: unpatched", out.logits is not None and off(out.loss.detach(), losses[rank].detach()) < FLOOR[F32])
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
    for before in (False, True):  # a head of several ranks, a part of the classes on each
        plain = build("Llama")
        model = copy.deepcopy(plain)
        said = lk_torch.patch(model) if before else None
        plan = {"lm_head": ColwiseParallel(output_layouts=Replicate())}
        parallelize_module(model, init_device_mesh("cpu", (ranks,)), plan)
        said = said or lk_torch.patch(model)
        verdict(f"tensor parallel, {before}: heads", said.heads == before and ("DTensor" in repr(said)) != before, f"\n{said}")
        (a, da), (b, db) = gradients(model), gradients(plain)
        verdict(f"tensor parallel, {before}: loss", a.logits is not None and off(a.loss.detach(), b.loss.detach()) < FLOOR[F32])
        errors = [off(p.full_tensor() if hasattr(p, "full_tensor") else p, db[k]) for k, p in da.items()]
        verdict(f"tensor parallel, {before}", max(errors) < 8 * FLOOR[F32], f"{max(errors):.3g}")
    dist.barrier()
    print(f"{totals[0]} passed, {totals[1]} failed", flush=True)
    os._exit(totals[1] > 0)


def fsdp():
    if D == "cuda":
        return print("  skipped: fsdp is tested with CPU tensors")
    with socket.socket() as s:
        s.bind(("localhost", 0))
        port = s.getsockname()[1]
    command = [sys.executable, os.path.abspath(__file__), "--rank"]
    started = [subprocess.Popen([*command, str(rank), "2", str(port)], stdout=subprocess.PIPE, text=True, stderr=subprocess.STDOUT)
               for rank in range(2)]
    for rank, process in enumerate(started):
        try:
            lines = process.communicate(timeout=300)[0].splitlines()
        except subprocess.TimeoutExpired:
            process.kill()
            lines = [*process.communicate()[0].splitlines(), "it hangs"]
        words = lines[-1].split() if lines else []
        if words[1:2] == ["passed,"]:
            totals[0] += int(words[0])
            totals[1] += int(words[2])
        else:
            verdict(f"rank {rank}", False, "it ended before its last line")
        if process.returncode:
            print(*lines, sep="\n")


def main():
    try:
        import transformers
    except ImportError:
        print("skip  patch: transformers is not installed: pip install transformers peft")
        return print("0 passed, 0 failed")
    print(f"lk_torch.patch ({lk_torch.BACKEND}) in PyTorch {torch.__version__}, transformers {transformers.__version__}")
    groups = dict(families=families, generation=generation, structure=structure, left=left, gated_norms=gated_norms, mlps=mlps, changes=changes, rotations=rotations, steps=steps, heads=heads,
                  checkpointing=checkpointing, trainer=trainer, peft=peft, compiled=compiled, fsdp=fsdp)
    for name in sys.argv[1:] or groups:
        needs = dict(peft="peft", trainer="accelerate").get(name)
        if needs and importlib.util.find_spec(needs) is None:
            print(f"skip  patch, {name}: {needs} is not installed: pip install peft")
            continue
        before, began = sum(totals), time.time()
        attempt(name, groups[name])
        print(f"{name:16}{sum(totals) - before:6d} checks{time.time() - began:7.1f} s", flush=True)
    print(f"{totals[0]} passed, {totals[1]} failed")
    sys.exit(totals[1] > 0)


if __name__ == "__main__":
    import torch._dynamo.testing
    quiet()
    torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other
    sharded(*map(int, sys.argv[2:])) if sys.argv[1:2] == ["--rank"] else main()
