# SPDX-License-Identifier: MIT
"""The kernel in build/hub, as Hugging Face's `kernels` loads it: its ops by name, its layers in tiny random models of
transformers' own configs, the head in TRL's interface.

    python packages/hub/test.py [cpu | gpu] [group ...]     # after build.py; V=1 prints each check

A result is held against the same in a wider type. lk may be off by twice what PyTorch is in the same type, and by some units of
that type."""
import ast
import contextlib
import copy
import importlib.metadata
import importlib.util
import inspect
import itertools
import logging
import math
import os
import re
import subprocess
import sys
import time
import traceback
import types
import warnings
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"], os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "error", "1"

import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

HERE = Path(__file__).resolve().parent
HUB = HERE.parent.parent / "build" / "hub"
F32, BF16, F64 = torch.float32, torch.bfloat16, torch.float64
# Sums of some dozen numbers in float32. In bfloat16 each result is rounded to 2^-8.
FLOOR = {F32: 2.0**-19, BF16: 2.0**-8}
VOCAB = 131
D, kernel = "cpu", None
totals = [0, 0]


def verdict(name, right, why=""):
    totals[not right] += 1
    if not right or os.environ.get("V") == "1":
        print(f"  {'ok  ' if right else 'FAIL'}  {name}  {why}", flush=True)


def attempt(name, f, *args):
    try:
        f(*args)
    except Exception as error:
        traceback.print_exc()
        verdict(name, False, f"{type(error).__name__}: {' '.join(str(error).split())[:500]}")


def compare(name, ours, theirs, wide, floor):
    """Results and gradients by name, of lk, of PyTorch, of PyTorch in a wider type."""
    verdict(f"{name}: the results", list(ours) == list(wide), f"{list(ours)}, not {list(wide)}")
    for key, c in wide.items():
        off = lambda t: float((t.detach().double() - c.double()).norm() / c.double().norm().clamp(min=1e-30))
        error, limit = off(ours[key]), 2 * off(theirs[key]) + (floor if key.startswith("d ") else FLOOR[F32])
        verdict(f"{name}: {key}", error <= limit, f"relative error {error:.3g}, at most {limit:.3g}")


class Called(TorchDispatchMode):
    """Which ops of lk's run inside."""

    def __init__(self):
        super().__init__()
        self.spaces = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "lk" in func.namespace:
            self.spaces.add(func.namespace)
        return func(*args, **(kwargs or {}))


# ---- Loading ----------------------------------------------------------------------------------------------------------------


def loading():
    import kernels
    folder = Path(kernel.__file__).parent
    about = kernels.Metadata.read_from_file(folder / "metadata.json")
    verdict("the module's name", kernel.__name__ == about.id, kernel.__name__)
    verdict("its folder", folder.parent == HUB, str(folder))
    verdict("its version", about.version == 0 and str(about.name) == "lk")
    verdict("its backend", str(about.backend.backend_type).lower() == D, str(about.backend))
    verdict("a second time", kernels.get_local_kernel(folder) is kernel)
    verdict("lk_torch is not needed", "lk_torch" not in sys.modules and "rms_norm" not in dir(torch.ops.lk))
    ops = getattr(torch.ops, about.id)
    x, weight = torch.randn(3, 40, device=D), torch.randn(40, device=D)
    y = ops.rms_norm(x, 40, weight, None, 1e-6, 0.0)
    verdict("an op by its name", torch.equal(y, kernel.rms_norm(x, (40,), weight, 1e-6)))
    logits, target = torch.randn(5, 33, device=D), torch.arange(5, device=D)
    verdict("a loss", (kernel.cross_entropy(logits, target) - F.cross_entropy(logits, target)).abs() < 1e-5)
    sys.path.insert(0, str(HERE.parent / "torch"))
    try:
        import lk_torch
    except ImportError as error:
        return print(f"skip  hub, beside lk_torch: {error}")
    for who, space in ((kernel, about.id), (lk_torch.functional, "lk")):
        leaf = x.clone().requires_grad_()
        with Called() as seen:
            out = who.add_rms_norm(leaf, x, (40,), weight, 1e-6)
            (out[0] * x + out[1]).sum().backward()
            who.linear_cross_entropy(leaf, x, target[:3]).backward()
        verdict(f"beside lk_torch: whose ops, {space}", seen.spaces == {space}, str(seen.spaces))
        verdict(f"beside lk_torch: the bits, {space}", torch.equal(who.rms_norm(x, (40,), weight, 1e-6), y))


# ---- What Hugging Face asks of a kernel: docs/source/kernel-requirements.md of github.com/huggingface/kernels ----------------

# The newest versions of symbols that manylinux_2_28 has.
MOST = {"GLIBC": (2, 28), "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
# Of the simulator's threads, where g++ is 12 or later: nobody publishes the simulator.
SIMULATORS = {"_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE"}
# Besides PyTorch's, CUDA's and what each system has.
LIBRARIES = (r"lib(torch|torch_cpu|torch_cuda|c10|c10_cuda|cudart|cublasLt|stdc\+\+|gcc_s|m|c|pthread|dl|rt)\.so[.\d]*"
             r"|ld-linux-.*")


def requirements():
    import kernels
    from kernels import _rust
    from kernels.variants import parse_variant
    folder = Path(kernel.__file__).parent
    about = kernels.Metadata.read_from_file(folder / "metadata.json")
    number = "torch" + "".join(torch.__version__.split(".")[:2]) + "-cxx11"
    device = "cpu" if D == "cpu" else "cu" + torch.version.cuda.replace(".", "")
    verdict("the variant's name", folder.name == f"{number}-{device}-{os.uname().machine}-linux", folder.name)
    verdict("and kernels reads it", parse_variant(folder.name).variant_str == folder.name)
    verdict("the license", about.license == "MIT")
    about.digest.validate(_rust.Digest.hash_variant(about.digest.algorithm, folder))  # as verify-signature does; raises
    verdict("the digest has each file", set(about.digest.files) | {"metadata.json"} ==
            {path.name for path in folder.iterdir() if path.name != "__pycache__"}, str(list(about.digest.files)))

    for path in sorted(folder.glob("*.py")):
        tree = ast.parse(path.read_text(), feature_version=(3, 9))  # raises
        imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
        later = any(getattr(node, "module", None) == "__future__" for node in imports)
        hints = [getattr(node, field, None) for node in ast.walk(tree) for field in ("annotation", "returns")]
        unions = [ast.unparse(t) for t in hints if t and any(isinstance(n, ast.BitOr) for n in ast.walk(t))]
        verdict(f"{path.name}: annotations that Python 3.9 reads", later or not unions, str(unions))
        names = {name.name for node in imports if isinstance(node, ast.Import) for name in node.names}
        names |= {node.module for node in imports if isinstance(node, ast.ImportFrom) and not node.level}
        roots = {name.split(".")[0] for name in names} - sys.stdlib_module_names
        verdict(f"{path.name}: imports PyTorch and its own files alone", roots <= {"torch"}, str(roots))
    missing = [name for name in kernel.__all__ if not hasattr(kernel, name)]
    verdict("all of __all__ is there, layers too", not missing and "layers" in kernel.__all__, str(missing))
    for name, cls in inspect.getmembers(kernel.layers, inspect.isclass):
        own = set(vars(cls)) - {"__module__", "__doc__", "__annotations__", "__firstlineno__", "__static_attributes__",
                                "__annotate_func__", "__annotations_cache__"}
        verdict(f"{name} is pure", issubclass(cls, torch.nn.Module) and own == {"forward", "has_backward", "can_torch_compile"},
                str(own))

    path = folder / f"{about.id}.abi3.so"
    verdict("one library", list(folder.glob("*.so*")) == [path])
    readelf = lambda *options: subprocess.check_output(["readelf", "-W", *options, path], text=True)
    needs = re.findall(r"NEEDED.*\[(.*)\]", readelf("-d"))
    verdict("it needs PyTorch's and CUDA's libraries alone", all(re.fullmatch(LIBRARIES, lib) for lib in needs), str(needs))
    verdict("it looks nowhere else for them", not re.search(r"\((RPATH|RUNPATH)\)", readelf("-d")))
    undefined = re.findall(r" UND (\S+)", readelf("--dyn-syms"))
    verdict("it needs no Python", not [name for name in undefined if re.match("_?Py", name)])
    newer = [name for name in undefined for dep, version in re.findall(r"@(GLIBC|GLIBCXX|CXXABI|GCC)_([\d.]+)", name)
             if tuple(map(int, version.split("."))) > MOST[dep] and not (D == "cpu" and name.split("@")[0] in SIMULATORS)]
    if importlib.util.find_spec("ziglang"):
        verdict("manylinux_2_28", undefined and not newer, str(newer))
    else:
        print("skip  hub, manylinux_2_28: ziglang is not installed, so the library is for this system: pip install ziglang")
    try:
        import kernel_abi_check
    except ImportError:
        return print("skip  hub, Hugging Face's own check: kernel-abi-check is not installed: pip install kernel-abi-check")
    theirs = kernel_abi_check.ObjectFile(path)
    verdict("Hugging Face's check: ABI of Python 3.9", theirs.check_python_abi("3.9") == [])
    found = [f"{s.name}: {s.dep} {s.version}" for s in theirs.check_manylinux("manylinux_2_28")
             if not (D == "cpu" and s.name in SIMULATORS)]
    if importlib.util.find_spec("ziglang"):
        verdict("Hugging Face's check: manylinux_2_28", not found, str(found))


# ---- Models -----------------------------------------------------------------------------------------------------------------


def build(name, dtype):
    """A tiny model whose norms' weights are not those that they begin with."""
    import transformers
    config = getattr(transformers, name + "Config")(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(1)
    model = getattr(transformers, name + "ForCausalLM")(config)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.2) if p.dim() > 1 else p.data.add_(torch.randn(p.shape) * 0.2)
    return model.to(D, dtype).train()


def results(model):
    """Its loss, and the gradients of it."""
    model.zero_grad(set_to_none=True)
    ids = torch.randint(3, VOCAB, (2, 11), generator=torch.Generator().manual_seed(2)).to(D)
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return {"loss": loss, **{"d " + n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


def replaced(model, layer):
    return sum(getattr(m.forward, "__func__", None) is layer.forward and "forward" in vars(m) for m in model.modules())


def layer(name):
    import kernels
    return kernels.LocalLayerRepository(Path(kernel.__file__).parent, layer_name=name)


def models():
    """By `kernels` alone, in each mode. Last, since it gives transformers' norms names of its own."""
    import kernels
    from transformers.models.gemma import modeling_gemma
    from transformers.models.llama import modeling_llama
    for name, cls in (("Llama", modeling_llama.LlamaRMSNorm), ("Gemma", modeling_gemma.GemmaRMSNorm)):
        kernels.replace_kernel_forward_from_hub(cls, "Lk" + name)
        which = "LkRMSNorm" if name == "Llama" else "LkGemmaRMSNorm"
        for dtype in (F32, BF16):
            theirs = build(name, dtype)
            ours, wide = copy.deepcopy(theirs), copy.deepcopy(theirs).to(F64 if dtype == F32 else F32)
            with kernels.use_kernel_mapping({"Lk" + name: {D: layer(which)}}):
                for mode in (kernels.Mode.INFERENCE, kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE, kernels.Mode.TRAINING):
                    kernels.kernelize(ours, mode=mode, device=D)  # it leaves other layers
                    count = replaced(ours, getattr(kernel.layers, which))
                    verdict(f"{name} {dtype}, {mode}: norms", count == 5, f"{count} of 5")
            with Called() as seen:
                found = results(ours)
            verdict(f"{name} {dtype}: whose ops", seen.spaces == {kernel.__name__}, str(seen.spaces))
            compare(f"{name} {dtype}", found, results(theirs), results(wide), FLOOR[dtype])


def use_kernels():
    """By transformers' own switch. KernelConfig takes no CPU; a mapping that is registered does."""
    import kernels
    import transformers
    from transformers.utils import import_utils
    if not import_utils.is_kernels_available():
        wanted = [getattr(import_utils, f"KERNELS_{m}_VERSION", "?") for m in ("MIN", "MAX")]
        return print(f"skip  hub, use_kernels: transformers {transformers.__version__} wants kernels from {wanted[0]} to below "
                     f"{wanted[1]}; {kernels.__version__} is installed")
    for dtype in (F32, BF16):
        theirs = build("Llama", dtype)
        ours, wide = copy.deepcopy(theirs), copy.deepcopy(theirs).to(F64 if dtype == F32 else F32)
        if D == "cpu":
            kernels.register_kernel_mapping({"RMSNorm": {D: layer("LkRMSNorm")}})
            ours.use_kernels = True
        else:
            where = f"{Path(kernel.__file__).parent}:LkRMSNorm"
            config = transformers.KernelConfig({"RMSNorm": where}, use_local_kernel=True)
            ours.set_use_kernels(True, config)
        count = replaced(ours, kernel.layers.LkRMSNorm)
        verdict(f"use_kernels {dtype}: norms", count == 5, f"{count} of 5")
        compare(f"use_kernels {dtype}", results(ours), results(theirs), results(wide), FLOOR[dtype])
        if D == "cpu":
            ours.eval()
            count = replaced(ours, kernel.layers.LkRMSNorm)
            verdict(f"use_kernels {dtype}: norms in eval()", count == 5, f"{count} of 5")


# ---- Layers and functions ---------------------------------------------------------------------------------------------------


def norms():
    """torch.nn.RMSNorm, torch.compile, and the norm of a sum."""
    import kernels

    class Norm(torch.nn.RMSNorm):
        def forward(self, x):
            return super().forward(x)
    kernels.replace_kernel_forward_from_hub(Norm, "LkNorm")
    plain = Norm(48, eps=1e-5, device=D)
    torch.nn.init.normal_(plain.weight)
    ours = copy.deepcopy(plain)
    with kernels.use_kernel_mapping({"LkNorm": {D: layer("LkRMSNorm")}}):
        kernels.kernelize(ours, mode=kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE, device=D, use_fallback=False)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    x, residual, up = (torch.randn(6, 48, device=D) for _ in range(3))

    def of(norm, dtype=F32):
        leaf, weight = x.to(dtype).requires_grad_(), norm.weight.to(dtype)
        y = norm(leaf) if dtype == F32 else F.rms_norm(leaf, (48,), weight, 1e-5)
        grads = torch.autograd.grad(y, [leaf, norm.weight], up.to(dtype))
        return {"y": y, "d x": grads[0], "d weight": grads[1]}
    compare("torch.nn.RMSNorm", of(ours), of(plain), of(plain, F64), FLOOR[F32])
    same = zip(of(ours).values(), of(compiled).values())
    verdict("torch.nn.RMSNorm: compiled, the same bits", all(torch.equal(a, b) for a, b in same))

    def added(f, dtype):
        leaves = [t.to(dtype).requires_grad_() for t in (x, residual, plain.weight.detach())]
        y, total = f(*leaves)
        grads = torch.autograd.grad([y, total], leaves, [up.to(dtype), 2 * up.to(dtype)])
        return {"y": y, "sum": total, **dict(zip(("d x", "d residual", "d weight"), grads))}
    formula = lambda x, r, w: (F.rms_norm(x + r, (48,), w, 1e-5), x + r)
    compare("add_rms_norm", added(lambda x, r, w: kernel.add_rms_norm(x, r, (48,), w, 1e-5), F32), added(formula, F32),
            added(formula, F64), FLOOR[F32])


# ---- TRL --------------------------------------------------------------------------------------------------------------------

NAMES = ("logprobs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")


def formula(hidden, weight, bias, targets, temperature, cap, scale):
    z = F.linear(hidden, weight, bias) * scale
    z = (z if cap is None else cap * torch.tanh(z / cap)).to(F32 if z.dtype == BF16 else z.dtype) / temperature
    logp = z.log_softmax(-1)
    p = logp.exp()
    return (logp.gather(-1, targets[:, None])[:, 0], -(p * logp).sum(-1), p.square().sum(-1).log(), z.mean(-1),
            z.argmax(-1) == targets)


def head_cases():
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(shape, generator=generator).to(D)
    tokens, hidden, classes = 9, 24, 67
    targets = torch.randint(classes, (tokens,), generator=generator).to(D)
    for dtype in (F32, BF16):
        h, w, b = draw(tokens, hidden).to(dtype), draw(classes, hidden).mul(0.3).to(dtype), draw(classes).mul(0.3).to(dtype)
        targets[:3] = F.linear(h, w)[:3].argmax(-1)
        for bias in (None, b):
            for temperature, cap, scale in ((1.0, None, 1.0), (0.7, None, 0.5), (1.3, 2.0, 1.0), (0.7, 3.0, 1.5)):
                yield dtype, (h, w, bias, targets), temperature, cap, scale


def head():
    up = [torch.linspace(-1, 2, 9, device=D), torch.linspace(0.5, -0.3, 9, device=D)]

    def of(f, tensors, dtype):
        h, w, b, targets = tensors
        leaves = [None if t is None else t.to(dtype).detach().requires_grad_() for t in (h, w, b)]
        out = f(*leaves, targets)
        wanted = [t for t in leaves if t is not None]
        grads = torch.autograd.grad(out[:2], wanted, [u.to(out[0].dtype) for u in up])
        return {**dict(zip(NAMES, out)), **dict(zip(("d hidden", "d weight", "d bias"), grads))}
    for dtype, tensors, temperature, cap, scale in head_cases():
        label = f"head {dtype}, bias {tensors[2] is not None}, temperature {temperature}, softcap {cap}, scale {scale}"
        lk = lambda *t: kernel.ChunkedLogProbFunction.apply(*t, temperature, 32, cap, scale)
        torchs = lambda *t: formula(*t, temperature, cap, scale)
        ours, theirs, wide = of(lk, tensors, dtype), of(torchs, tensors, dtype), of(torchs, tensors, F64)
        verdict(f"{label}: is_top1", torch.equal(ours.pop("is_top1"), wide.pop("is_top1")) and theirs.pop("is_top1").any())
        verdict(f"{label}: types", all(v.dtype == (dtype if k[:2] == "d " else F32) for k, v in ours.items()))
        compare(label, ours, theirs, wide, FLOOR[dtype])
    apply = kernel.ChunkedLogProbFunction.apply
    for outputs in ((), ("entropy",), ("log_probs", "mean_logits"), ("is_top1",), ("log_sum_sq_probs",)):
        out = apply(*tensors, temperature, 32, cap, scale, outputs)
        verdict(f"outputs {outputs}", [n for n, v in zip(NAMES, out) if v is not None] ==
                ["logprobs", *(n for n in NAMES if n in outputs)])
        verdict(f"outputs {outputs}: logprobs", torch.allclose(out[0], ours["logprobs"], rtol=FLOOR[F32], atol=0))
    none = [t[:0] if i in (0, 3) else t for i, t in enumerate(tensors)]
    verdict("no tokens", apply(*none, 1.0, 32)[0].shape == (0,))
    wide = [t.float().requires_grad_() for t in tensors[1:3]]
    mixed = apply(tensors[0], *wide, tensors[3], temperature, 32, cap, scale)
    verdict("float32 weights beside bfloat16", torch.equal(mixed[0], ours["logprobs"]))
    verdict("and their gradients", all(g.dtype == F32 for g in torch.autograd.grad(mixed[0].sum(), wide)))
    with torch.autocast(D, dtype=BF16):
        cast = apply(*(t.float() for t in tensors[:3]), tensors[3], temperature, 32, cap, scale)
    verdict("autocast", torch.equal(cast[0], ours["logprobs"]))


def divergence_formula(student, teacher, beta, temperature, scales, caps):
    def log_softmax(h, w, b, scale, cap):
        z = F.linear(h, w, b) * scale
        return ((z if cap is None else cap * torch.tanh(z / cap)) / temperature).log_softmax(-1)
    lp, lq = (log_softmax(*head, scale, cap) for head, scale, cap in zip((student, teacher), scales, caps))
    kl = lambda a, b: (a.exp() * (a - b)).sum(-1)
    if beta in (0.0, 1.0):
        loss = kl(lp, lq) if beta else kl(lq, lp)
    else:
        mean = torch.logaddexp(lq + math.log(beta), lp + math.log1p(-beta))
        loss = beta * kl(lq, mean) + (1 - beta) * kl(lp, mean)
    return loss, -(lp.exp() * lp).sum(-1)


def divergence_cases():
    generator = torch.Generator().manual_seed(5)
    draw = lambda *shape: torch.randn(shape, generator=generator).to(D)
    for dtype, beta, biases in itertools.product((F32, BF16), (0.0, 1.0, 0.5, 0.1), (False, True)):
        heads = [[draw(9, size).to(dtype), draw(67, size).mul(0.3).to(dtype), draw(67).mul(0.3).to(dtype) if biases else None]
                 for size in (24, 16)]
        for temperature, scales, caps in ((1.0, (1.0, 1.0), (None, None)), (0.7, (0.5, 1.5), (3.0, None)), (1.3, (1.0, 2.0), (2.0, 4.0))):
            yield dtype, heads, beta, temperature, scales, caps


def of_divergence(f, heads, dtype):
    """What f of both heads gives, and the student's gradients."""
    student, teacher = ([None if t is None else t.to(dtype) for t in head] for head in heads)
    leaves = [None if t is None else t.detach().requires_grad_() for t in student]
    divergence, entropy = f(*leaves, *teacher)
    up = torch.linspace(-1, 2, 9, device=D, dtype=divergence.dtype)
    wanted = [t for t in leaves if t is not None]
    return {"divergence": divergence, "entropy": entropy.detach(), **dict(zip(("d hidden", "d weight", "d bias"),
                                                                             torch.autograd.grad(divergence, wanted, up)))}


def divergence():
    apply = kernel.ChunkedDivergenceFunction.apply
    for dtype, heads, beta, temperature, scales, caps in divergence_cases():
        label = f"divergence {dtype}, beta {beta}, bias {heads[0][2] is not None}, temperature {temperature}, softcaps {caps}"
        lk = lambda *t: apply(*t, beta, temperature, scales[0], caps[0], scales[1], caps[1])
        torchs = lambda *t: divergence_formula(t[:3], t[3:], beta, temperature, scales, caps)
        ours, theirs, wide = of_divergence(lk, heads, dtype), of_divergence(torchs, heads, dtype), of_divergence(torchs, heads, F64)
        verdict(f"{label}: types", all(v.dtype == (dtype if k[:2] == "d " else F32) for k, v in ours.items()))
        compare(label, ours, theirs, wide, FLOOR[dtype])
    (h, w, b), teacher = heads
    verdict("no gradient of the entropy", not apply(h, w.clone().requires_grad_(), b, *teacher, 0.5)[1].requires_grad)
    trained = [t.clone().requires_grad_() for t in teacher]
    loss = apply(h.clone().requires_grad_(), w, b, *trained, 0.5)[0].sum()
    verdict("the teacher has no gradient", torch.autograd.grad(loss, trained, allow_unused=True) == (None,) * 3)
    none = apply(h[:0], w, b, teacher[0][:0], *teacher[1:], 0.5)
    verdict("divergence of no tokens", all(t.shape == (0,) for t in none))
    leaf = w.float().requires_grad_()
    mixed = apply(h, leaf, b.float(), teacher[0].float(), teacher[1].float(), teacher[2].float(), 0.5)
    verdict("types of a master copy", torch.equal(mixed[0], apply(h, w, b, *teacher, 0.5)[0]))
    verdict("and its gradient", torch.autograd.grad(mixed[0].sum(), leaf)[0].dtype == F32)
    with torch.autocast(D, dtype=BF16):
        cast = apply(*(t.float() for t in (h, w, b, *teacher)), 0.5)
    verdict("divergence: autocast", torch.equal(cast[0], mixed[0]))


def logits():
    for dtype in (F32, BF16):
        generator = torch.Generator().manual_seed(4)
        z = torch.randn(2, 5, 77, generator=generator).mul(3).to(D, dtype)
        index = torch.randint(77, (2, 5), generator=generator).to(D)
        mask = (torch.arange(10, device=D).view(2, 5) % 3 != 1).long()
        for row_mask in (None, mask):
            def formula(z, dtype):
                logp = (z.to(dtype) / 0.7).log_softmax(-1)
                both = logp.gather(-1, index[..., None])[..., 0], -(logp.exp() * logp).sum(-1)
                return both if row_mask is None else tuple(t.masked_fill(row_mask == 0, 0) for t in both)

            def of(f, z):
                leaf = z.detach().requires_grad_()
                out = f(leaf)
                up = torch.linspace(-1, 2, 10, device=D, dtype=out[0].dtype).view(2, 5)
                return {"logprobs": out[0], "entropy": out[1], "d logits": torch.autograd.grad(out, leaf, [up, up * up])[0]}
            ours = of(lambda z: kernel.selective_log_softmax_and_entropy(z, index, 0.7, row_mask), z)
            compare(f"logits {dtype}, mask {row_mask is not None}", ours, of(lambda z: formula(z, F32), z),
                    of(lambda z: formula(z, F64), z.double()), FLOOR[dtype])


def trl():
    """TRL's own functions: the same arguments, and on the CPU, where they need no Triton, the same results."""
    folder = Path(importlib.util.find_spec("trl").submodule_search_locations[0]) / "kernels"
    for name, path in (("alone", None), ("alone.kernels", folder), ("alone.trainer", None), ("alone.trainer.utils", None)):
        sys.modules[name] = types.ModuleType(name)  # TRL without the rest of it, and what that needs
        sys.modules[name].__path__ = [str(path)] if path else []
    sys.modules["alone.trainer.utils"].maybe_gather_lm_head_ctx = lambda *parameters: contextlib.nullcontext()
    module = lambda name: importlib.import_module(f"alone.kernels.{name}")
    same = lambda a, b: [(p.name, p.default) for p in a] == [(p.name, p.default) for p in b]
    chunked = module("chunked_logprob")
    _, *theirs = inspect.signature(chunked.ChunkedLogProbFunction.forward).parameters.values()
    ours = inspect.signature(kernel.ChunkedLogProbFunction.apply).parameters.values()
    verdict("arguments of ChunkedLogProbFunction", same(ours, theirs), f"{list(ours)}, not {theirs}")
    if importlib.util.find_spec("triton"):
        theirs = inspect.signature(module("logprob_entropy").selective_log_softmax_and_entropy).parameters.values()
        ours = inspect.signature(kernel.selective_log_softmax_and_entropy).parameters.values()
        verdict("arguments of selective_log_softmax_and_entropy", same(ours, theirs), f"{list(ours)}, not {list(theirs)}")
    for dtype, tensors, temperature, cap, scale in head_cases():
        arguments = (*tensors, temperature, 32, cap, scale)
        ours, theirs = kernel.ChunkedLogProbFunction.apply(*arguments), chunked.ChunkedLogProbFunction.apply(*arguments)
        doubles = [t.double() if t is not None and t.is_floating_point() else t for t in tensors]
        wide = formula(*doubles, temperature, cap, scale)
        named = [dict(zip(NAMES[:4], out)) for out in (ours, theirs, wide)]
        compare(f"TRL's {dtype}, bias {tensors[2] is not None}, softcap {cap}", *named, FLOOR[dtype])
    theirs_of = module("chunked_divergence").ChunkedDivergenceFunction
    ours_of = kernel.ChunkedDivergenceFunction
    _, *theirs = inspect.signature(theirs_of.forward).parameters.values()
    ours = inspect.signature(ours_of.apply).parameters.values()
    verdict("arguments of ChunkedDivergenceFunction", same(ours, theirs), f"{list(ours)}, not {theirs}")
    for dtype, heads, beta, temperature, scales, caps in divergence_cases():
        options = (beta, temperature, scales[0], caps[0], scales[1], caps[1])
        ours, theirs = (of_divergence(lambda *t: f.apply(*t, *options), heads, dtype) for f in (ours_of, theirs_of))
        wide = of_divergence(lambda *t: divergence_formula(t[:3], t[3:], beta, temperature, scales, caps), heads, F64)
        compare(f"TRL's divergence {dtype}, beta {beta}, bias {heads[0][2] is not None}, softcaps {caps}", ours, theirs, wide,
                FLOOR[dtype])


def main():
    global D, kernel
    words = sys.argv[1:]
    backend = words.pop(0) if words[:1] in (["cpu"], ["gpu"]) else "gpu"
    D = "cpu" if backend == "cpu" else "cuda"
    if importlib.util.find_spec("kernels") is None:
        print("skip  hub: kernels is not installed: pip install kernels transformers")
        return print("0 passed, 0 failed")
    if D == "cuda" and not torch.cuda.is_available():
        print("skip  hub: there is no GPU, so the kernel is built and not run")
        return print("0 passed, 0 failed")
    import kernels
    began = time.time()
    try:
        kernel = kernels.get_local_kernel(HUB, backend=D)
    except FileNotFoundError as error:
        sys.exit(f"{error}\nlk: packages/hub/build.py {backend} builds it")
    print(f"lk for kernels {kernels.__version__} ({backend}) in PyTorch {torch.__version__}: {Path(kernel.__file__).parent.name}"
          f", loaded in {time.time() - began:.1f} s", flush=True)
    groups = dict(loading=loading, requirements=requirements, norms=norms, use_kernels=use_kernels, head=head, divergence=divergence,
                  logits=logits, trl=trl, models=models)
    for name in words or groups:
        needs = dict(models="transformers", use_kernels="transformers", trl="trl").get(name)
        if needs and importlib.util.find_spec(needs) is None:
            print(f"skip  hub, {name}: {needs} is not installed: pip install {needs}")
            continue
        before, began = sum(totals), time.time()
        attempt(name, groups[name])
        if sum(totals) > before:
            print(f"{name:16}{sum(totals) - before:6d} checks{time.time() - began:7.1f} s", flush=True)
    print(f"{totals[0]} passed, {totals[1]} failed")
    sys.exit(totals[1] > 0)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.getLogger("kernels").setLevel(logging.ERROR)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it says that there is no GPU
    torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other
    main()
