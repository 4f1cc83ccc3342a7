# SPDX-License-Identifier: MIT
"""Every public function and module of lk_torch through what PyTorch does with a call: tensors on meta, of another device or of a
subclass, second derivatives, torch.func, torch.fx, torch.compile with a number that changes, export, AOTInductor, copies, forks and
inference mode. Each gives the values of the plain call, or raises one sentence of lk's.

    python packages/torch/test_transforms.py              # all rows; V=1 in the environment prints each check
    python packages/torch/test_transforms.py kl RMSNorm   # these rows

ROWS and MODULES are the table: a public function or module that has no row fails. What a group does is in test_parallel.py."""
import copy
import inspect
import io
import os
import pickle
import sys
import tempfile
import time
import traceback

from testing import CUDA, D, VERBOSE, quiet, totals, verdict

import torch
import torch._dynamo
from torch.utils._python_dispatch import TorchDispatchMode

import lk_torch
from lk_torch import functional as LF

OTHERS = ("meta", "cpu") if CUDA else ("meta",)  # devices of a tensor that does not lie beside the others


def attempt(name, f):
    try:
        f()
    except Exception as error:
        verdict(name, False, f"{type(error).__name__}: {error}")
        if VERBOSE:
            traceback.print_exc()


def refused(name, f, *words):
    """f raises one sentence of lk's that has the words."""
    try:
        f()
    except Exception as error:
        text = str(error).splitlines()[0]
        return verdict(name, "lk: " in text and all(word in text for word in words), f"{type(error).__name__}: {text}")
    verdict(name, False, "no exception")


def flat(out):
    return tuple(out) if isinstance(out, (tuple, list)) else (out,)


def close(name, ours, theirs, tolerance=1e-5):
    ours, theirs = flat(ours), flat(theirs)
    shapes = [(tuple(t.shape), t.dtype) for t in ours], [(tuple(t.shape), t.dtype) for t in theirs]
    right = shapes[0] == shapes[1] and all(
        torch.allclose(a.detach().float(), b.detach().float(), rtol=tolerance, atol=tolerance, equal_nan=True)
        for a, b in zip(ours, theirs))
    verdict(name, right, f"{shapes}, {[(a, b) for a, b in zip(ours, theirs)]}" if not right else "")


# ---- The table --------------------------------------------------------------------------------------------------------------

N, HIDDEN, CLASSES = 3, 8, 11  # odd ones: a part of a batch lies where no whole tensor does


class Row:
    """A call f(**tensors, **options). tensors: a function that draws them. learns: those that get gradients. numbers: of an option, the
    values that it changes to."""

    def __init__(self, f, tensors, options=None, learns=(), numbers=None):
        self.f, self.options, self.numbers = f, options or {}, numbers or {}
        self.draw = tensors
        self.learns = learns

    def tensors(self, seed=0, grad=True):
        generator = torch.Generator().manual_seed(seed)
        normal = lambda *shape: torch.randn(shape, generator=generator).to(D)
        some = lambda *shape: torch.rand(shape, generator=generator).to(D) + 0.5
        ids = lambda *shape: torch.randint(CLASSES, shape, generator=generator).to(D)
        drawn = self.draw(normal, some, ids)
        return {k: t.requires_grad_() if grad and k in self.learns else t for k, t in drawn.items()}

    def __call__(self, tensors, **options):
        return self.f(**tensors, **{**self.options, **options})


def learned(out):
    """One number of all results that have a gradient."""
    return sum((t.float() * (i + 1)).sum() for i, t in enumerate(flat(out)) if t.requires_grad)


def apart(t):
    """The rows of t in a wider tensor, from its second column on."""
    return torch.nn.functional.pad(t, (1, 0))[:, 1:]


LOSS = dict(z_loss=(0.25, 0.5), temperature=(2.0, 3.0), ignore_index=(1, 2, 3), denominator=(2.0, 3.0))
KL = dict(temperature=(2.0, 3.0), beta=(0.25, 0.75))
NORM = dict(normalized_shape=[HIDDEN], eps=1e-5)
FLOAT8 = dict(normalized_shape=HIDDEN, out_dtype=torch.float8_e4m3fn)

loss = lambda n, s, i: dict(input=n(N, CLASSES), target=i(N), weight=s(CLASSES), row_weight=s(N))
of_ids = lambda n, s, i: dict(target_ids=i(N, 2), target_weight=s(N, 2), tail_weight=s(N), row_weight=s(N))
head = lambda n, s, i: dict(input=n(N, HIDDEN), linear_weight=n(CLASSES, HIDDEN), linear_bias=n(CLASSES))
HEAD = ("input", "linear_weight", "linear_bias")


def of_a_support(n, s, i):
    """Two ids of each token, the first of them its target."""
    ids = i(N, 2)
    return dict(ids=ids.flatten(), offsets=torch.arange(0, 2 * N + 1, 2, device=D), target=ids[:, 0].contiguous(), teacher_logp=-s(2 * N))


ROWS = {
    "logsumexp": Row(LF.logsumexp, lambda n, s, i: dict(input=n(N, CLASSES)), dict(dim=-1), ("input",),
                     dict(dim=(1, 0, -1), scale=(0.5, 0.25))),
    "kl": Row(LF.kl, lambda n, s, i: dict(input=n(N, CLASSES), teacher=n(N, CLASSES), row_weight=s(N)), {}, ("input",), KL),
    "rms_norm": Row(LF.rms_norm, lambda n, s, i: dict(input=n(N, HIDDEN), weight=n(HIDDEN), bias=n(HIDDEN)), NORM,
                    ("input", "weight", "bias"), dict(eps=(1e-5, 1e-6), weight_offset=(1.0, 2.0))),
    "add_rms_norm": Row(LF.add_rms_norm, lambda n, s, i: dict(input=n(N, HIDDEN), residual=n(N, HIDDEN), weight=n(HIDDEN)), NORM,
                        ("input", "residual", "weight"), dict(eps=(1e-5, 1e-6), weight_offset=(1.0, 2.0))),
    "rms_norm, gate": Row(LF.rms_norm, lambda n, s, i: dict(input=n(N, HIDDEN), weight=n(HIDDEN), gate=n(N, HIDDEN)),
                          dict(NORM, gate_first=True), ("input", "weight", "gate"), dict(eps=(1e-5, 1e-6), weight_offset=(1.0, 2.0))),
    "srms_norm": Row(LF.srms_norm, lambda n, s, i: dict(input=n(N, HIDDEN)), {}, ("input",), dict(eps=(1e-5, 1e-6))),
    "glu": Row(LF.glu, lambda n, s, i: dict(gate=n(N, HIDDEN), up=n(N, HIDDEN), row_weight=s(N)), dict(up_offset=0.5),
               ("gate", "up", "row_weight"), dict(alpha=(1.702, 0.5), limit=(1.0, 2.0), up_offset=(1.0, 2.0))),
    "glu, halves": Row(LF.glu, lambda n, s, i: dict(gate=n(N, 2 * HIDDEN)), dict(activation="gelu"), ("gate",)),
    "glu, in turns": Row(LF.glu, lambda n, s, i: dict(gate=n(N, 2 * HIDDEN), row_weight=s(N)),
                         dict(limit=2.0, interleaved=True), ("gate", "row_weight")),
    "rope": Row(LF.rope, lambda n, s, i: dict(q=n(2, N, 2, HIDDEN), k=n(2, N, 1, HIDDEN), inv_freq=s(4), q_weight=n(HIDDEN),
                                              k_weight=n(HIDDEN)), dict(weight_offset=1.0), ("q", "k", "q_weight", "k_weight"),
                dict(offset=(1, 2, 5), scale=(1.5, 0.5), eps=(1e-5, 1e-2), weight_offset=(1.0, 2.0))),
    "rope, tables": Row(LF.rope, lambda n, s, i: dict(q=n(2, 2, N, HIDDEN), k=n(2, 2, N, HIDDEN), cos=n(1, N, HIDDEN),
                                                      sin=n(1, N, HIDDEN)), dict(heads_first=True), ("q", "k")),
    "rope, axes": Row(LF.rope, lambda n, s, i: dict(q=n(2, N, 2, HIDDEN), inv_freq=s(3), position=i(2, 2, N),
                                                    pair_axis=(i(3) % 2).int(), q_weight=n(HIDDEN)),
                      dict(rotary_dim=6, interleaved=True), ("q", "q_weight")),
    "rms_norm, 8 bits": Row(LF.rms_norm, lambda n, s, i: dict(input=n(N, HIDDEN), weight=n(HIDDEN)), FLOAT8, (),
                            dict(eps=(1e-5, 1e-6))),
    "add_rms_norm, 8 bits": Row(LF.add_rms_norm, lambda n, s, i: dict(input=n(N, HIDDEN), residual=n(N, HIDDEN)),
                                dict(FLOAT8, scaling="tensor", amax=True, transposed=True), (), dict(eps=(1e-5, 1e-6))),
    "cross_entropy": Row(LF.cross_entropy, loss, {}, ("input",), dict(LOSS, grad_scale=(1.0, 0.5, 2))),
    "cross_entropy, probabilities": Row(
        LF.cross_entropy, lambda n, s, i: dict(input=n(N, CLASSES), target=n(N, CLASSES).softmax(1), weight=s(CLASSES)), {}, ("input",)),
    "cross_entropy, in place": Row(
        lambda input, target, weight, row_weight: LF.cross_entropy(input * 1.0, target, weight, row_weight=row_weight, inplace=True),
        loss, {}, ("input",)),
    "cross_entropy, none": Row(LF.cross_entropy, loss, dict(reduction="none"), ("input",)),
    "cross_entropy_with_grad": Row(LF.cross_entropy_with_grad, loss, {}, (), dict(grad_scale=(1.0, 0.5))),
    "cross_entropy_stats": Row(LF.cross_entropy_stats, loss, dict(label_smoothing=0.25), ("input",), LOSS),
    "cross_entropy_ids": Row(LF.cross_entropy_ids, lambda n, s, i: dict(input=n(N, CLASSES), **of_ids(n, s, i)), {}, ("input",), LOSS),
    "linear_cross_entropy": Row(
        LF.linear_cross_entropy, lambda n, s, i: dict(head(n, s, i), target=i(N), weight=s(CLASSES), row_weight=s(N)), {}, HEAD,
        dict(LOSS, grad_scale=(1.0, 0.5, 2), workspace_mib=(4, 5, 6), max_counted=(5, 6, 7))),
    "linear_cross_entropy, none": Row(LF.linear_cross_entropy, lambda n, s, i: dict(head(n, s, i), target=i(N)),
                                      dict(reduction="none", keep=True), HEAD),
    "linear_cross_entropy_stats": Row(LF.linear_cross_entropy_stats, lambda n, s, i: dict(head(n, s, i), target=i(N), row_weight=s(N)),
                                      {}, HEAD, dict(LOSS, workspace_mib=(4, 5, 6))),
    "linear_cross_entropy_ids": Row(LF.linear_cross_entropy_ids, lambda n, s, i: dict(head(n, s, i), **of_ids(n, s, i)), {}, HEAD,
                                    dict(LOSS, workspace_mib=(4, 5, 6))),
    "linear_support": Row(LF.linear_support, lambda n, s, i: dict(head(n, s, i), **of_a_support(n, s, i)), {}, HEAD,
                          dict(temperature=(2.0, 3.0), softcap=(4.0, 5.0), ignore_index=(1, 2, 3))),
    "linear_topk": Row(LF.linear_topk, lambda n, s, i: head(n, s, i), dict(k=3), (),
                       dict(temperature=(2.0, 3.0), softcap=(4.0, 5.0), workspace_mib=(40, 50, 60))),
    "linear_topk, a draw": Row(LF.linear_topk, lambda n, s, i: dict(head(n, s, i), seed=i(N), offset=i(N)), dict(k=3), ()),
    "support": Row(LF.support, lambda n, s, i: dict(logits=n(N, CLASSES), **of_a_support(n, s, i)), {}, ("logits",),
                   dict(temperature=(2.0, 3.0), softcap=(4.0, 5.0), ignore_index=(1, 2, 3))),
    "linear_kl": Row(LF.linear_kl, lambda n, s, i: dict(head(n, s, i), teacher_input=n(N, 5), teacher_weight=n(CLASSES, 5),
                                                        teacher_bias=n(CLASSES), row_weight=s(N)), {}, HEAD,
                     dict(KL, grad_scale=(1.0, 0.5, 2), workspace_mib=(4, 5, 6))),
    "linear_kl, none": Row(LF.linear_kl, lambda n, s, i: dict(head(n, s, i), teacher_input=n(N, 5), teacher_weight=n(CLASSES, 5)),
                           dict(reduction="none", divergence="jensen_shannon"), HEAD),
    "md_lrpe_cosine": Row(LF.md_lrpe_cosine, lambda n, s, i: dict(x=n(1, 2, 5, 8), theta=n(2, 8)), dict(shape=(4,), prefix=1),
                          ("x", "theta"), dict(offset=((1,), (2,), (3,)))),
    "md_lrpe_cosine, an offset on the device": Row(
        LF.md_lrpe_cosine, lambda n, s, i: dict(x=n(1, 2, 5, 8), theta=n(2, 8), offset=i(1)), dict(shape=(4,), prefix=1), ("x", "theta")),
    # Rows beside multiples of 16 bytes, and apart: so are the gradients.
    "logsumexp, apart": Row(LF.logsumexp, lambda n, s, i: dict(input=apart(n(N, CLASSES))), dict(dim=-1), ("input",)),
    "kl, apart": Row(LF.kl, lambda n, s, i: dict(input=apart(n(N, CLASSES)), teacher=apart(n(N, CLASSES))), {}, ("input",)),
    "cross_entropy, apart": Row(LF.cross_entropy, lambda n, s, i: dict(input=apart(n(N, CLASSES)), target=i(N)), {}, ("input",),
                                dict(z_loss=(0.25, 0.5))),
    "cross_entropy, none, apart": Row(LF.cross_entropy, lambda n, s, i: dict(input=apart(n(N, CLASSES)), target=i(N)),
                                      dict(reduction="none"), ("input",)),
    "cross_entropy, probabilities, apart": Row(
        LF.cross_entropy, lambda n, s, i: dict(input=apart(n(N, CLASSES)), target=apart(n(N, CLASSES).softmax(1))), {}, ("input",)),
    "cross_entropy_with_grad, apart": Row(LF.cross_entropy_with_grad, lambda n, s, i: dict(input=apart(n(N, CLASSES)), target=i(N))),
    "cross_entropy_stats, apart": Row(LF.cross_entropy_stats, lambda n, s, i: dict(input=apart(n(N, CLASSES)), target=i(N)), {}, ("input",)),
    "cross_entropy_ids, apart": Row(LF.cross_entropy_ids, lambda n, s, i: dict(input=apart(n(N, CLASSES)), **of_ids(n, s, i)), {}, ("input",)),
    "support, apart": Row(LF.support, lambda n, s, i: dict(logits=apart(n(N, CLASSES)), **of_a_support(n, s, i)), {}, ("logits",)),
    "glu, apart": Row(LF.glu, lambda n, s, i: dict(gate=apart(n(N, HIDDEN)), up=apart(n(N, HIDDEN))), {}, ("gate", "up")),
    "rope, apart": Row(LF.rope, lambda n, s, i: dict(q=apart(n(2 * N, HIDDEN)).unflatten(0, (N, 2)), cos=apart(n(N, HIDDEN)),
                                                     sin=apart(n(N, HIDDEN))), {}, ("q",)),
    "rms_norm, apart": Row(LF.rms_norm, lambda n, s, i: dict(input=apart(n(N, HIDDEN)), weight=apart(n(1, HIDDEN))[0]),
                           dict(normalized_shape=[HIDDEN]), ("input", "weight")),
}
ELSEWHERE = {"shards_of", "set_batch_invariant"}  # a collective, in test_parallel.py; what takes no tensor, in test.py

MODULES = {  # how one is made, the row of its function, and which of that row's tensors its call takes
    "RMSNorm": (lambda **o: lk_torch.RMSNorm(HIDDEN, bias=True, **o), "rms_norm", ("input",)),
    "AddRMSNorm": (lambda **o: lk_torch.AddRMSNorm(HIDDEN, weight_offset=1.0, **o), "add_rms_norm", ("input", "residual")),
    "SRMSNorm": (lambda **o: lk_torch.SRMSNorm(), "srms_norm", ("input",)),
    "GatedRMSNorm": (lambda **o: lk_torch.GatedRMSNorm(HIDDEN, **o), "rms_norm, gate", ("input", "gate")),
    "GLU": (lambda **o: lk_torch.GLU("gelu_tanh", limit=2.0), "glu", ("gate", "up", "row_weight")),
    "CrossEntropyLoss": (lambda **o: lk_torch.CrossEntropyLoss(torch.arange(1.0, CLASSES + 1, device=D), z_loss=0.25), "cross_entropy",
                         ("input", "target")),
    "LinearCrossEntropyLoss": (lambda **o: lk_torch.LinearCrossEntropyLoss(HIDDEN, CLASSES, True, softcap=8.0, **o),
                               "linear_cross_entropy", ("input", "target")),
    "LinearKLLoss": (lambda **o: lk_torch.LinearKLLoss(HIDDEN, CLASSES, True, divergence="reverse", **o), "linear_kl",
                     ("input", "teacher_input", "teacher_weight")),
    "MdLrpeCosine": (lambda **o: lk_torch.MdLrpeCosine(2, 8, **o), "md_lrpe_cosine", ("x",)),
}


def complete():
    public = {name for name, f in vars(LF).items() if inspect.isfunction(f) and f.__module__ == LF.__name__ and name[0] != "_"}
    rows = {name.split(",")[0] for name in ROWS}
    verdict("every public function has a row", public == rows | ELSEWHERE, f"{sorted(public ^ (rows | ELSEWHERE))}")
    public = {name for name, c in vars(lk_torch.nn).items() if inspect.isclass(c) and c.__module__ == lk_torch.nn.__name__ and name[0] != "_"}
    verdict("every module has a row", public == set(MODULES), f"{sorted(public ^ set(MODULES))}")


# ---- Tensors that are no plain ones beside the first ------------------------------------------------------------------------


class Wrapper(torch.Tensor):
    """A tensor that holds another one, and calls each op with that."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device,
                                                   requires_grad=inner.requires_grad)

    def __init__(self, inner):
        self.inner = inner.detach()

    @classmethod
    def __torch_dispatch__(cls, op, types, args=(), kwargs=None):
        args, kwargs = torch.utils._pytree.tree_map_only(Wrapper, lambda t: t.inner, (args, kwargs or {}))
        return torch.utils._pytree.tree_map_only(torch.Tensor, Wrapper, op(*args, **kwargs))


class Plain(torch.Tensor):
    """A subclass that changes nothing."""


def elsewhere(name, row):
    plain = row(row.tensors())
    on_meta = lambda: {k: t.detach().to("meta").requires_grad_(t.requires_grad) for k, t in row.tensors().items()}
    out = row(on_meta())
    shapes = lambda out: [(tuple(t.shape), t.dtype) for t in flat(out)]
    verdict(f"{name}: all on meta", shapes(out) == shapes(plain) and all(t.is_meta for t in flat(out)), f"{shapes(out)}, {shapes(plain)}")
    if row.learns:
        learns = on_meta()
        for k, g in zip(row.learns, torch.autograd.grad(learned(row(learns)), [learns[k] for k in row.learns])):
            verdict(f"{name}: the gradient of {k} on meta", g.is_meta and g.shape == learns[k].shape, f"{g.device}, {tuple(g.shape)}")
    for k, t in row.tensors().items():
        for device in OTHERS:
            if device == "meta" and len(row.tensors()) == 1:
                continue
            for grad in (False, True):
                moved = lambda t: t.detach().to(device).requires_grad_(t.requires_grad)
                refused(f"{name}: {k} alone on {device}", lambda: row({**row.tensors(grad=grad), k: moved(t)}))
                refused(f"{name}: {k} alone on {device}, empty", lambda: row({**row.tensors(grad=grad), k: moved(t[:0])}))
            rest = lambda: {j: t if j == k else moved(t) for j, t in row.tensors().items()}
            if len(row.tensors()) > 1:
                refused(f"{name}: all but {k} on {device}", lambda: row(rest()))


def subclasses(name, row):
    plain = row.tensors()
    expected = [row(plain), torch.autograd.grad(learned(row(plain)), [plain[k] for k in row.learns]) if row.learns else ()]
    for k in (*plain, "all"):
        for kind in (Wrapper, Plain):
            one = lambda t: Wrapper(t) if kind is Wrapper else t.detach().as_subclass(Plain).requires_grad_(t.requires_grad)
            inner = lambda t: t.inner if isinstance(t, Wrapper) else t.as_subclass(torch.Tensor)

            def check():
                given = {j: one(t) if k in (j, "all") else t for j, t in row.tensors().items()}
                out = row(given)
                close(f"{name}: {k} of {kind.__name__}", tuple(map(inner, flat(out))), expected[0])
                if row.learns:
                    gradients = torch.autograd.grad(learned(out), [given[k] for k in row.learns])
                    close(f"{name}: gradients with {k} of {kind.__name__}", tuple(map(inner, gradients)), expected[1])
            attempt(f"{name}: {k} of {kind.__name__}", check)


# ---- Derivatives ------------------------------------------------------------------------------------------------------------


def second(name, row):
    """A gradient is right with create_graph, and to differentiate it raises."""
    if not row.learns:
        return
    t = row.tensors()
    leaves = [t[k] for k in row.learns]
    plain = torch.autograd.grad(learned(row(t)), leaves)
    made = lambda: torch.autograd.grad(learned(row(t)), leaves, create_graph=True)
    close(f"{name}: create_graph", made(), plain)
    close(f"{name}: create_graph, then a use that is no derivative", [g.detach() * 2 for g in made()], [g * 2 for g in plain])
    words = "no second derivative"
    for i, k in enumerate(row.learns):
        refused(f"{name}: backward of the gradient of {k}", lambda: made()[i].square().sum().backward(), words)
        for j, leaf in enumerate(leaves):
            refused(f"{name}: the gradient of {k}, differentiated for {row.learns[j]}",
                    lambda: torch.autograd.grad(made()[i].square().sum(), leaf), words)
        refused(f"{name}: a gradient penalty on {k}",
                lambda: torch.autograd.grad(learned(row(t)) + made()[i].square().sum(), leaves[0]), words)
        f = lambda leaf: learned(row({**t, k: leaf}))
        v = torch.ones_like(leaves[i])
        for what, g in (("hessian", lambda: torch.autograd.functional.hessian(f, leaves[i])),
                        ("vhp", lambda: torch.autograd.functional.vhp(f, leaves[i], v)),
                        ("hvp", lambda: torch.autograd.functional.hvp(f, leaves[i], v)),
                        ("jvp", lambda: torch.autograd.functional.jvp(f, leaves[i], v))):
            refused(f"{name}: functional.{what} of {k}", g, words)
        refused(f"{name}: torch.func.jvp of {k}", lambda: torch.func.jvp(f, (t[k].detach(),), (v,)), "forward-mode")
    factor = torch.ones((), device=D, requires_grad=True)
    g = torch.autograd.grad(learned(row(t)), leaves[0], factor, create_graph=True)[0]
    refused(f"{name}: differentiated for what came from above", lambda: torch.autograd.grad(g.sum(), factor), words)
    inner = [leaf * 1.5 for leaf in leaves]  # no leaf itself
    g = torch.autograd.grad(learned(row({**t, **dict(zip(row.learns, inner))})), inner[0], create_graph=True)[0]
    refused(f"{name}: differentiated for what is further below", lambda: torch.autograd.grad(g.sum(), leaves[0]), words)


def transforms(name, row):
    """vmap of grad, of class weights and rows of odd numbers, and jacrev. A call in place writes its input, so it is not in them."""
    if not row.learns or name.endswith("in place"):
        return
    t, fixed = row.tensors(), row.tensors(grad=False)
    for k in row.learns:
        f = lambda v: sum((o.float() * (i + 1)).sum() for i, o in enumerate(flat(row({**fixed, k: v}))) if o.is_floating_point())
        batch = torch.stack([row.tensors(seed, grad=False)[k] for seed in range(3)])
        loop = torch.stack([torch.autograd.grad(f(v), v)[0] for v in batch.clone().requires_grad_().unbind()])
        attempt(f"{name}: vmap of grad of {k}", lambda: close(f"{name}: vmap of grad of {k}", torch.func.vmap(torch.func.grad(f))(batch), loop))
        if k != row.learns[0]:
            continue
        last = torch.stack([v for v in batch], -1)
        attempt(f"{name}: vmap of the last dimension",
                lambda: close(f"{name}: vmap of the last dimension", torch.func.vmap(torch.func.grad(f), -1)(last), loop))
        first = lambda v: flat(row({**fixed, k: v}))[0]
        out = first(t[k])
        rows = torch.stack([torch.autograd.grad(o, t[k], retain_graph=True)[0] for o in out.reshape(-1)]).view(*out.shape, *t[k].shape)
        for what, jac in (("jacrev", torch.func.jacrev), ("jacrev by parts", lambda f: torch.func.jacrev(f, chunk_size=2))):
            attempt(f"{name}: {what}", lambda: close(f"{name}: {what}", jac(first)(t[k].detach()), rows))
        attempt(f"{name}: is_grads_batched", lambda: close(
            f"{name}: is_grads_batched", torch.autograd.grad(out, t[k], torch.eye(out.numel(), device=D).view(-1, *out.shape),
                                                             is_grads_batched=True)[0].view_as(rows), rows))
        # the state that is saved comes back at another place
        odd = lambda s: s if s.numel() == 0 or s.dtype != torch.float32 else torch.cat([s.new_zeros(1), s.detach().flatten()])[1:].view_as(s)
        with torch.autograd.graph.saved_tensors_hooks(odd, lambda s: s):
            moved = learned(row(t))
        attempt(f"{name}: saved tensors that lie elsewhere", lambda: close(
            f"{name}: saved tensors that lie elsewhere", torch.autograd.grad(moved, t[k])[0], torch.autograd.grad(learned(row(t)), t[k])[0]))


# ---- Programs ---------------------------------------------------------------------------------------------------------------


def numbers(name, row):
    """A number that changes, under torch.compile(fullgraph=True): from its second value on it is a symbol."""
    for option, values in row.numbers.items():
        def check():
            torch._dynamo.reset()
            t = row.tensors()
            f = lambda t, value: row(t, **{option: value})
            fast = torch.compile(f, fullgraph=True, backend="aot_eager" if option == "grad_scale" else "eager")
            for value in values:
                close(f"{name}: compiled, {option}={value}", fast(t, value), f(t, value))
        attempt(f"{name}: compiled, {option}", check)
    if "normalized_shape" in row.options:
        def any_columns():
            torch._dynamo.reset()
            f = lambda t, n: row({k: v[..., :n] for k, v in t.items()}, normalized_shape=n)
            fast = torch.compile(f, fullgraph=True, backend="eager")
            for n in (8, 4, 6):
                close(f"{name}: compiled, normalized_shape={n}", fast(row.tensors(), n), f(row.tensors(), n))
        attempt(f"{name}: compiled, normalized_shape", any_columns)


class Called(torch.nn.Module):
    """The calls of rows, as a module."""

    def __init__(self, *rows):
        super().__init__()
        self.rows = rows

    def forward(self, *tensors):
        return sum((flat(row(t)) for row, t in zip(self.rows, tensors)), ())


def exported(name, row):
    t = row.tensors(grad=False)
    program = torch.export.export(Called(row), (t,), strict=False)
    close(f"{name}: torch.export", program.module()(t), row(t))


class Outputs(TorchDispatchMode):
    """Remembers the kernels that return None."""

    def __init__(self):
        super().__init__()
        self.none, self.seen = set(), set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        if op.namespace == "lk":
            self.seen.add(str(op))
            if any(t is None for t in flat(out)):
                self.none.add(str(op))
        return out


def ahead_of_time(rows):
    """AOTInductor takes no kernel that returns None for a Tensor. One program of all calls is compiled and run with V=1, and on a GPU:
    its g++ takes 25 seconds."""
    for device in (D, "meta"):
        for name, row in rows.items():
            t = {k: v.detach().to(device).requires_grad_(v.requires_grad) for k, v in row.tensors().items()}
            with Outputs() as outputs:
                out = row(t)
                if row.learns:
                    torch.autograd.grad(learned(out), t[row.learns[0]])
            with torch.no_grad(), outputs:
                row(t)
            verdict(f"{name} on {device}: no kernel returns None", outputs.seen and not outputs.none, f"{outputs.none or 'no kernel'}")
    if not (CUDA or VERBOSE):
        return
    from torch._inductor import aoti_compile_and_package, aoti_load_package
    given, i = tuple(row.tensors(grad=False) for row in rows.values()), 0
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        program = torch.export.export(Called(*rows.values()), given, strict=False)
        path = aoti_compile_and_package(program, package_path=folder + "/lk.pt2")
        out = aoti_load_package(path)(*given)
        for (name, row), t in zip(rows.items(), given):
            expected = flat(row(t))
            close(f"{name}: AOTInductor", tuple(out[i:i + len(expected)]), expected)
            i += len(expected)


# ---- A budget that backward has too -------------------------------------------------------------------------------------------


def budgets():
    """A workspace_mib is refused in forward, with the least that works, or backward runs in it."""
    normal = lambda *shape: torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(D, torch.bfloat16)
    x, w, t = normal(256, 512).requires_grad_(), (normal(1030, 512) / 20).requires_grad_(), torch.arange(256, device=D)
    ids, other = torch.stack([t, t + 16], 1), w.detach().flip(0)
    for name, f in {
            "linear_cross_entropy, none": lambda m: LF.linear_cross_entropy(x, w, t, reduction="none", workspace_mib=m),
            "linear_cross_entropy_ids": lambda m: learned(LF.linear_cross_entropy_ids(x, w, ids, workspace_mib=m)),
            "linear_cross_entropy_ids, tail": lambda m: learned(LF.linear_cross_entropy_ids(x, w, ids, tail=True, workspace_mib=m)),
            "linear_kl, none": lambda m: LF.linear_kl(x, w, x.detach(), other, reduction="none", workspace_mib=m)}.items():
        def least(mib):
            try:
                out = f(mib)
            except ValueError as error:
                verdict(f"{name}: {mib} MiB", f"workspace_mib is {mib}; " in str(error), str(error))
                return int(str(error).split()[-1])
            torch.autograd.grad(out.sum(), [x, w])
            return mib
        first = least(1)
        verdict(f"{name}: the least that works", least(first) == first, f"{least(first)}, but it said {first}")
        if first > 1:
            verdict(f"{name}: one less", least(first - 1) == first)
            with torch.no_grad():
                attempt(f"{name}: 1 MiB without a gradient", lambda: f(1))


# ---- Processes and modes ----------------------------------------------------------------------------------------------------


def inference(name, row):
    t = row.tensors(grad=False)
    with torch.inference_mode():
        out = row(t)
        made = row.tensors(grad=False)
        close(f"{name}: tensors of inference_mode", row(made), out)
    close(f"{name}: inference_mode", out, row(t))
    if not row.learns:
        return
    t = row.tensors()
    leaves = [t[k] for k in row.learns]
    mixed = {k: t[k] if k in row.learns else v for k, v in made.items()}  # all that is constant is of inference_mode
    close(f"{name}: gradients beside tensors of inference_mode", torch.autograd.grad(learned(row(mixed)), leaves),
          torch.autograd.grad(learned(row(t)), leaves))


def forked():
    """A child that was forked behind a call computes the same."""
    if CUDA:
        return  # PyTorch refuses that
    row = ROWS["linear_cross_entropy"]
    value = float(row(row.tensors()))
    child = os.fork()
    if not child:
        os._exit(float(row(row.tensors())) != value)
    verdict("a forked child", os.waitpid(child, 0)[1] == 0)


def module(name):
    make, of, arguments = MODULES[name]
    torch.manual_seed(0)
    row = ROWS[of]
    given = [row.tensors(grad=False)[k] for k in arguments]
    shape = ((4,), 1) if name == "MdLrpeCosine" else ()
    m = make(device=D)
    expected = m(*given, *shape)
    for how, f in (("deepcopy", copy.deepcopy), ("pickle", lambda m: pickle.loads(pickle.dumps(m)))):
        attempt(f"{name}: {how}", lambda: close(f"{name}: {how}", f(m)(*given, *shape), expected))

    def saved():
        file = io.BytesIO()
        torch.save(m, file)
        file.seek(0)
        close(f"{name}: torch.save", torch.load(file, weights_only=False)(*given, *shape), expected)
    attempt(f"{name}: torch.save", saved)

    def traced():
        graph = torch.fx.symbolic_trace(m)
        calls = [n.target.__name__ for n in graph.graph.nodes if n.op == "call_function"]
        verdict(f"{name}: torch.fx has one node of lk's", of.split(",")[0] in calls, f"{calls}")
        close(f"{name}: torch.fx.symbolic_trace", graph(*given, *shape), expected)
        close(f"{name}: its copy", pickle.loads(pickle.dumps(graph))(*given, *shape), expected)
    attempt(f"{name}: torch.fx.symbolic_trace", traced)
    attempt(f"{name}: torch.export", lambda: close(
        f"{name}: torch.export", torch.export.export(m, (*given, *shape), strict=False).module()(*given, *shape), expected))
    if list(m.parameters()):
        refused(f"{name}: built on meta, called with real tensors", lambda: make(device="meta")(*given, *shape), "meta")
        empty = make(device="meta").to_empty(device=D)
        empty.load_state_dict(m.state_dict())
        attempt(f"{name}: built on meta, then filled", lambda: close(f"{name}: built on meta, then filled", empty(*given, *shape), expected))


def main():
    chosen = sys.argv[1:]
    unknown = [name for name in chosen if name not in {**ROWS, **MODULES}]
    if unknown:
        sys.exit(f"{unknown[0]} is no row; there are: {', '.join([*ROWS, *MODULES])}")
    if not CUDA:
        torch.set_num_threads(1)
    start = time.time()
    print(f"lk_torch ({lk_torch.BACKEND}) in PyTorch {torch.__version__}, calls under PyTorch's transforms", flush=True)
    complete()
    rows = {name: row for name, row in ROWS.items() if not chosen or name in chosen}
    for check in (elsewhere, subclasses, second, transforms, numbers, exported, inference):
        before, began = list(totals), time.time()
        for name, row in rows.items():
            attempt(f"{name}: {check.__name__}", lambda: check(name, row))
        print(f"{check.__name__:16}{sum(totals) - sum(before):6d} checks{time.time() - began:8.1f} seconds", flush=True)
    began = time.time()
    for name in MODULES:
        if not chosen or name in chosen:
            attempt(name, lambda: module(name))
    attempt("a forked child", forked)
    attempt("budgets", budgets)
    print(f"modules{time.time() - began:29.1f} seconds", flush=True)
    began = time.time()
    attempt("AOTInductor", lambda: ahead_of_time(rows))
    print(f"AOTInductor{time.time() - began:25.1f} seconds", flush=True)
    print(f"{time.time() - start:.0f} seconds\n{totals[0]} passed, {totals[1]} failed")
    sys.exit(totals[1] > 0)


if __name__ == "__main__":
    quiet()
    main()
