# SPDX-License-Identifier: MIT
"""The shared library of `make lib`, driven through ctypes, against PyTorch: `make test-torch`.

    against_torch.py LIBRARY cpu|cuda

What is expected is what torch computes in float64 from the same inputs (cross_entropy, logsumexp, rms_norm, their autograd), so
that lk is held against another hand's definition of every option; formulas of our own are in tests/<op>.cu. The options of a
case form a grid where they interact and are drawn where they do not; the last lines count every draw. Where lk differs from
torch on purpose, differences() has a case that shows both and says why.

The limits are those of the headers: 0.5 ulp of the output's type, and 16 U, U = 2^-24, of the magnitudes of the terms, since an
exponential or a logarithm is within 2 ulp, sums are made of short chains, and at most eight operations round once each. Gradients
that forward_backward rounds twice have 2^-10 of themselves more.
"""
import collections
import ctypes
import itertools
import math
import os
import random
import re
import subprocess
import sys
import tempfile
import textwrap

try:
    import torch
    import torch.nn.functional as F
except ImportError as error:
    print(f"FAIL {sys.executable}: {error}. For Debian: apt-get install python3-torch; make test-torch PYTHON=/usr/bin/python3")
    print("0 passed, 1 failed")
    sys.exit(1)

import liblk

OPS = ("cross_entropy", "logsumexp", "srms_norm", "srms_norm_fp8")
TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
DTYPE = {"f32": 1, "f16": 2, "bf16": 3}  # LK_DTYPE_*
NONE, MEAN, SUM = 0, 1, 2
verbose = os.environ.get("V") == "1"  # a line per case
U = 2.0**-24
HALF_ULP = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
LEAST = {torch.float32: 2.0**-126, torch.float16: 2.0**-25, torch.bfloat16: 2.0**-126}  # half of f16's least; others may flush
INF, NAN = math.inf, math.nan

passed = failed = 0
groups = {}  # by name: cases, failed, the largest share of a limit
drawn = collections.Counter()
rng = random.Random(1)
generator = torch.Generator().manual_seed(1)

# ---- The library ------------------------------------------------------------------------------------------------------------


def check_layouts(op, structs):
    """Sizes and offsets as the C compiler has them; a field that ctypes has and C has not does not compile."""
    lines = []
    for name, struct in structs.items():
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        lines += [f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));' for field, _ in struct._fields_]
    with tempfile.TemporaryDirectory() as folder:
        with open(f"{folder}/layout.c", "w") as file:
            file.write(f'#include <stdio.h>\n#include "lk/{op}.cuh"\nint main(void) {{ {" ".join(lines)} return 0; }}\n')
        compiler = os.environ.get("CC", "cc")
        subprocess.run([compiler, "-std=c11", "-I.", f"{folder}/layout.c", "-o", f"{folder}/layout"], check=True)
        output = subprocess.run([f"{folder}/layout"], check=True, capture_output=True, text=True).stdout
    compiled = dict(line.split() for line in output.splitlines())
    for name, struct in structs.items():
        ours = {name: ctypes.sizeof(struct), **{f"{name}.{f}": getattr(struct, f).offset for f, _ in struct._fields_}}
        wrong = [key for key in ours if ours[key] != int(compiled[key])]
        verdict(f"layout of {name}, {len(struct._fields_)} fields", not wrong, f"differs: {wrong}")


# ---- Verdicts ---------------------------------------------------------------------------------------------------------------


def verdict(case, right, why="", worst=None):
    """One case. Its group is what its name begins with: up to the type, or a colon, or `layout`."""
    global passed, failed
    passed, failed = passed + right, failed + (not right)
    name = re.match(r"layout|[^:]*?\b(?:f32|f16|bf16)\b|[^:]*", case)[0]
    group = groups.setdefault(name, [0, 0, None])
    group[0], group[1] = group[0] + 1, group[1] + (not right)
    if worst is not None:
        group[2] = max(worst, group[2] or 0.0)
    if not right or verbose:
        print(f"ok    {case}" if right else f"FAIL  {case}  {why}")


def print_groups():
    print(f"{'group':44s} {'cases':>6s}  largest share of a limit")
    for name, (cases, wrong, worst) in groups.items():
        print(f"{name:44s} {cases:6d} {'-' if worst is None else f'{worst:.3f}':>25s}{f'   {wrong} FAILED' if wrong else ''}")


def share(value, expected, limit):
    """The worst error as a share of its limit, and its place; infinite where a NaN, an infinity or a shape is wrong."""
    value, expected = value.detach().double().cpu(), expected.detach().double().cpu()
    if value.shape != expected.shape:
        return INF, f"shape {tuple(value.shape)}, not {tuple(expected.shape)}"
    if value.numel() == 0:
        return 0.0, ""
    limit = torch.as_tensor(limit, dtype=torch.float64).cpu().expand_as(expected)
    part = (value - expected).abs() / limit
    part = torch.where((value == expected) | (value.isnan() & expected.isnan()), torch.zeros_like(part), part)
    part = torch.where(part.isnan() | (value.isfinite() != expected.isfinite()) & (part != 0), torch.full_like(part, INF), part)
    at = int(part.argmax())
    return float(part.flatten()[at]), f"[{at}] is {value.flatten()[at]:.9g}, not {expected.flatten()[at]:.9g}"


def compare(case, *outputs):
    """Each output is (name, value, expected, limit)."""
    shares = [(name, *share(value, expected, limit)) for name, value, expected, limit in outputs]
    wrong = [f"{name}{where} ({part:.3g} of the limit)" for name, part, where in shares if not part <= 1]
    verdict(case + "".join(f"  {name} {part:.3f}" for name, part, _ in shares), not wrong, "; ".join(wrong),
            max(part for _, part, _ in shares))


def rounded(expected, error, dtype):
    """The limit of an output of this type whose float is within `error`."""
    expected = expected.detach()
    return torch.nan_to_num(expected.abs(), posinf=0.0) * HALF_ULP[dtype] + error + LEAST[dtype]


# ---- Inputs -----------------------------------------------------------------------------------------------------------------


def draw(option, values):
    value = rng.choice(values)
    for name in dict.fromkeys(map(str, values)):
        drawn[f"{option}={name}"] += name == str(value)
    return value


def normal(*shape, sigma=1.0):
    return torch.randn(*shape, generator=generator) * sigma


def matrix(values, dtype, stride, shift, fill=NAN):
    """A [rows, cols] tensor of this type with a row stride, `shift` elements behind an aligned address; `fill` between rows."""
    rows, cols = values.shape
    flat = torch.full((shift + rows * stride,), fill, device=device).to(dtype)
    view = flat[shift:].view(rows, stride)[:, :cols]
    view.copy_(values.to(device))
    return view


def spoil(x, kinds):
    """Writes special values into rows of x, one kind a row at most: how models meet them. Returns the kinds' names."""
    rows, cols = x.shape
    for row in range(rows):
        kind = draw("row", kinds)
        if kind == "some -inf":
            x[row, torch.rand(cols, generator=generator) < 0.4] = -INF
        elif kind == "-inf but one":
            keep = rng.randrange(cols)
            x[row, :] = torch.where(torch.arange(cols) == keep, x[row], torch.tensor(-INF))
        elif kind == "-inf":
            x[row, :] = -INF
        elif kind in ("+inf", "nan", "1e4"):
            x[row, rng.randrange(cols)] = {"+inf": INF, "nan": NAN, "1e4": 1e4}[kind]
        elif kind == "0":
            x[row, :] = 0.0
    return x


def finite(d):
    """Magnitudes for a limit: what is not finite has no rounding error."""
    return torch.nan_to_num(d.abs(), nan=0.0, posinf=0.0)


# ---- cross_entropy ----------------------------------------------------------------------------------------------------------

ROW_KINDS = ["plain"] * 8 + ["some -inf", "-inf but one", "-inf", "+inf", "nan", "1e4"]
SHAPES = [(1, 1), (3, 7), (5, 8), (9, 65), (6, 257), (4, 1031), (3, 2056), (2, 5003)]
Options = collections.namedtuple("Options", "reduction smoothing weight z_loss scale softcap ignore_index")


def capped(x, o):
    z = x * o.scale
    return o.softcap * torch.tanh(z / o.softcap) if o.softcap else z


def torch_cross_entropy(x, target, o):
    """(loss, its z-loss part, lse, counted) by torch, in the type of x."""
    z = capped(x, o)
    lse = torch.logsumexp(z, 1)
    counted = target != o.ignore_index if o.ignore_index is not None else torch.ones_like(target, dtype=torch.bool)
    name = ("none", "mean", "sum")[o.reduction]
    weight = None if o.weight is None else o.weight.to(x.dtype)
    loss = F.cross_entropy(z, target, weight, ignore_index=-100 if o.ignore_index is None else o.ignore_index, reduction=name,
                           label_smoothing=o.smoothing)
    extra = torch.where(counted, o.z_loss * lse**2, torch.zeros_like(lse)) if o.z_loss else torch.zeros_like(lse)
    if o.reduction != NONE:
        extra = extra.sum() / (counted.sum() if o.reduction == MEAN else 1)
    return loss + extra, extra, lse, counted


def cross_entropy_limits(x, target, o, counted, upstream, dlse):
    """Limits of lse, loss, z-loss, entropy and the float of backward's and of forward_backward's dlogits; x in float64."""
    rows, vocab = x.shape
    z = capped(x, o)
    lse = torch.logsumexp(z, 1)
    z_y = z.gather(1, target[:, None])[:, 0]
    p = finite(torch.exp(z - lse[:, None]))
    largest = torch.where(z.isfinite(), z, torch.full_like(z, -INF)).amax(1)
    largest = torch.where(largest.isfinite(), largest, torch.zeros_like(largest))
    apart = finite(z - largest[:, None])
    magnitude = finite(z).amax(1)
    cap = 8 * U * (magnitude + 2 * o.softcap) if o.softcap else torch.zeros_like(magnitude)  # tanh is within a few ulp of z
    base = math.log(vocab) + 1
    lse_limit = 8 * U * (magnitude + base) + cap
    w = torch.ones(vocab, device=x.device).double() if o.weight is None else o.weight.double()
    w_y, total = w[target], w.sum()
    each = o.smoothing / vocab
    row = (1 - o.smoothing) * w_y * (16 * U * (finite(largest - z_y) + base) + cap)
    row = row + each * (16 * U * (total * base + (w * apart).sum(1)) + 2 * total * cap)
    z_limit = o.z_loss * (2 * finite(lse) * lse_limit + 4 * U * finite(lse) ** 2)
    # The entropy subtracts sum p (z - max) from log sum.
    entropy = 16 * U * (base + (p * apart).sum(1)) + 2 * cap
    row, z_limit = row * counted, z_limit * counted
    loss, extra = row + z_limit, z_limit
    if o.reduction != NONE:  # a sum over rows rounds to 16 U of the magnitudes of what it adds
        terms = finite(torch_cross_entropy(x, target, o._replace(reduction=NONE))[0])
        over = (w_y * counted).sum() if o.reduction == MEAN else 1.0
        count = counted.sum() if o.reduction == MEAN else 1.0
        z_terms = o.z_loss * finite(lse) ** 2 * counted
        extra = (z_limit.sum() + 16 * U * z_terms.sum()) / count
        loss = (row.sum() + 16 * U * terms.sum()) / over + extra
    f = upstream.double() / ((w_y * counted).sum() if o.reduction == MEAN else 1.0)
    h = upstream.double() / (counted.sum() if o.reduction == MEAN else 1.0)
    f, h = f.expand(rows).abs(), h.expand(rows).abs()
    rise = f * ((1 - o.smoothing) * w_y + each * total)
    spare = 2 * o.z_loss * h * finite(lse)
    spare_error = 2 * o.z_loss * h * lse_limit + 8 * U * spare
    if dlse is not None:
        spare = spare + dlse.double().abs()
    is_target = torch.arange(vocab, device=x.device) == target[:, None]
    slope, twice = torch.ones_like(z), torch.zeros_like(z)
    if o.softcap:  # 1 - tanh^2 by an exponential of twice the argument
        slope = (1 - torch.tanh(x * o.scale / o.softcap) ** 2) * (1 + 4 * U)
        twice = 2 * finite(x * o.scale / o.softcap)
    fall = (f * each)[:, None] * w
    p_y = p.gather(1, target[:, None])[:, 0]
    errors = []
    # A p[j] as the header has it, from the lse that forward rounded or from the sum that the row's threads share.
    for shared in (lse_limit, 16 * U * base + cap):
        relative = (4 + finite(z - lse[:, None])) * 2 * U + (shared + 2 * cap)[:, None]
        error = (rise + spare)[:, None] * p * (relative + 16 * U) + spare_error[:, None] * p + fall * 16 * U
        others = (torch.where(is_target, torch.zeros_like(p), p) * (relative + 16 * U)).sum(1)
        own = rise * others + spare * p_y * (relative.gather(1, target[:, None])[:, 0] + 16 * U) + spare_error * p_y
        own = own + f * each * total * 16 * U
        error = torch.where(is_target, own[:, None].expand_as(error), error)
        if o.softcap:
            gradient = (rise + spare)[:, None] * p + fall + is_target * (rise + f * each * total)[:, None]
            error = (error + gradient * (8 + 2 * twice) * 2 * U) * slope + gradient * 2.0**-59  # a slope of 16 bits ends at 2^-60
        errors.append(torch.nan_to_num(error * o.scale))
    return lse_limit, loss, extra, entropy, errors


def room_for_gradients(dtype, logits, stride, shift):
    """Where dlogits go, drawn: their rows with the padding, the arguments that say so, and a name."""
    rows, vocab = logits.shape
    T = TYPES[dtype]
    out_type = draw("dlogits", [dtype] + ["f16", "bf16"] * (dtype == "f32"))
    placed, padding = draw("placed", ["apart", "in place"]), draw("zero_padding", [0, 1])
    D = TYPES[out_type]
    if placed == "in place":
        storage = logits.as_strided((rows, stride), (stride, 1))
        # 16-bit gradients of f32 logits take the first half of each row.
        dlogits, d_stride, pointer = storage.view(D) if D != T else storage, stride * (2 if D != T else 1), logits
    else:
        d_stride = vocab + draw("dstride-vocab", [0, 3, 8])
        pointer = matrix(torch.full((rows, vocab), NAN), D, d_stride, draw("dshift", [0, shift, 1]))
        dlogits = pointer.as_strided((rows, d_stride), (d_stride, 1), pointer.storage_offset())
    if padding or placed == "apart":
        dlogits = dlogits[:, :stride if placed == "in place" and D != T else d_stride]
    else:
        dlogits = dlogits[:, :vocab]
    given = dict(dlogits=pointer, dlogits_stride=d_stride, zero_padding=padding, dlogits_dtype=0 if D == T else DTYPE[out_type])
    return dlogits, given, f"{out_type} {placed}"


def cross_entropy_case(dtype, shape, o):
    """One forward, one backward and one forward_backward; everything that is not in `o` is drawn."""
    rows, vocab = shape
    T = TYPES[dtype]
    stride = vocab + draw("stride-vocab", [0, 0, 1, 5, 8])
    shift = draw("shift", [0, 0, 1, 3])
    path = draw("path", [0, 1, 2] + [3] * clusters)
    target_type = draw("target", ["int64", "int32"])
    logits = matrix(spoil(normal(rows, vocab, sigma=3.0), ROW_KINDS if vocab > 1 else ["plain"]), T, stride, shift)
    target = torch.randint(vocab, (rows,), generator=generator).to(device)
    if o.ignore_index is not None:
        target[torch.rand(rows, generator=generator).to(device) < 0.3] = o.ignore_index
        target[rng.randrange(rows)] = rng.randrange(vocab) if o.ignore_index < 0 else (o.ignore_index + 1) % vocab
    x = logits.double()
    counted = target != o.ignore_index if o.ignore_index is not None else torch.ones_like(target, dtype=torch.bool)
    if o.weight is not None and float(o.weight[target[counted]].sum()) == 0:
        o.weight[target[counted][0]] = 0.5  # a mean over a weight of 0 is one of the differences
    # Special values in ignored rows are another difference: torch gets 0 there, lk what it must not read.
    clean = torch.where(counted[:, None] | x.isfinite(), x, torch.zeros_like(x)).requires_grad_()
    safe = torch.where(target < 0, torch.zeros_like(target), target)
    expected, expected_z, expected_lse, _ = torch_cross_entropy(clean, target, o)
    upstream_kind = draw("upstream", ["NULL", "one"] + ["rows"] * (o.reduction == NONE))
    upstream = {"NULL": torch.ones(1), "one": normal(1), "rows": normal(rows)}[upstream_kind].to(device)
    dlse = normal(rows).to(device) if draw("dlse", [False, True]) else None

    scalar = [] if o.reduction else [rows]
    extras = draw("outputs", ["all", "loss and lse"])

    def poisoned():
        given = {name: torch.full(scalar, NAN, device=device) for name in ("loss", "z_loss_out")}
        given.update({name: torch.full((rows,), NAN, device=device) for name in ("lse", "entropy")})
        given["argmax"] = torch.full((rows,), -7, dtype=torch.int64, device=device)
        given["valid_rows"] = torch.full((1,), -7, dtype=torch.int64, device=device)
        given["weight_sum"] = torch.full((1,), NAN, device=device)
        return given if extras == "all" else {k: given[k] for k in ("loss", "lse", "valid_rows", "weight_sum")}

    outputs, both_outputs = poisoned(), poisoned()
    common = dict(target=target.int() if target_type == "int32" else target, rows=rows, vocab=vocab,
                  target_dtype=1 if target_type == "int32" else 0, logits_stride=stride, logit_scale=o.scale,
                  softcap=o.softcap, label_smoothing=o.smoothing, z_loss=o.z_loss, reduction=o.reduction, path=path,
                  use_ignore_index=o.ignore_index is not None, ignore_index=o.ignore_index or 0)
    if o.weight is not None:
        common["class_weight"] = o.weight
    given = {} if upstream_kind == "NULL" else dict(upstream=upstream, upstream_per_row=upstream_kind == "rows")
    if dlse is not None:
        given["dlse"] = dlse
    again = matrix(logits, T, stride, shift)  # in place destroys the first
    launch("cross_entropy_forward", dtype, logits=logits, **common, **outputs)
    dlogits, where, placed = room_for_gradients(dtype, logits, stride, shift)
    padding = where["zero_padding"]
    counts = {k: outputs[k] for k in ("valid_rows", "weight_sum")} if o.reduction == MEAN else {}
    launch("cross_entropy_backward", dtype, logits=logits, lse=outputs["lse"], **common, **where, **given, **counts)
    both_dlogits, where, both_placed = room_for_gradients(dtype, again, stride, shift)
    both_padding = where["zero_padding"]
    launch("cross_entropy_forward_backward", dtype, logits=again, **common, **both_outputs, **where, **given)

    limits = cross_entropy_limits(clean.detach(), safe, o, counted, upstream, dlse)
    lse_limit, loss_limit, z_limit, entropy_limit, errors = limits
    one = torch.float32
    zero = torch.zeros(rows, dtype=torch.float64, device=device)
    lse = torch.where(counted, expected_lse.detach(), zero)
    weights = torch.ones(vocab, device=device) if o.weight is None else o.weight
    weight_sum = (weights.double()[safe] * counted).sum()
    surrogate = (expected * upstream.double()).sum()
    if dlse is not None:
        surrogate = surrogate + torch.where(counted, expected_lse * dlse.double(), zero).sum()
    gradient, = torch.autograd.grad(surrogate, clean)
    gradient = torch.where(counted[:, None], gradient, torch.zeros_like(gradient))
    logp = capped(clean.detach(), o) - expected_lse.detach()[:, None]
    p = torch.exp(logp)
    entropy = -torch.where(p == 0, p, p * logp).sum(1)
    entropy = torch.where(counted, torch.where(expected_lse.isfinite(), entropy, zero + NAN), zero)
    argmax = torch.where(counted, x.argmax(1), torch.full_like(target, -1))
    checks = []
    for one_pass, found in enumerate((outputs, both_outputs)):
        which = "both " * one_pass
        checks += [(which + "loss", found["loss"], expected, rounded(expected, loss_limit, one)),
                   (which + "lse", found["lse"], lse, rounded(lse, lse_limit, one)),
                   (which + "valid", found["valid_rows"], counted.sum()[None], 0.5),
                   (which + "weights", found["weight_sum"], weight_sum[None], 16 * U * weight_sum)]
        if extras == "all":
            checks += [(which + "z_loss", found["z_loss_out"], expected_z, rounded(expected_z, z_limit, one)),
                       (which + "entropy", found["entropy"], entropy, rounded(entropy, entropy_limit, one)),
                       (which + "argmax", found["argmax"], argmax, 0.5)]
        written = both_dlogits if one_pass else dlogits
        codes = one_pass and extras != "all" and dtype != "f32" and written.dtype == torch.bfloat16 and not o.smoothing
        kept = 2.0**-10 if codes and 0 < o.softcap <= 32 else 0.0  # such gradients are rounded twice: lk/cross_entropy.md
        limit = rounded(gradient, errors[one_pass] + gradient.abs() * kept, written.dtype)
        pad = written[:, vocab:]
        zeroed = both_padding if one_pass else padding
        checks += [(which + "dlogits", written[:, :vocab], gradient, limit),
                   (which + "padding", pad, torch.full(pad.shape, 0.0 if zeroed else NAN), 0.0)]
    name = f"cross_entropy {dtype} {rows}x{vocab} {('none', 'mean', 'sum')[o.reduction]} e={o.smoothing:g} " \
           f"w={o.weight is not None} k={o.z_loss:g} a={o.scale} s={o.softcap} ignore={o.ignore_index} path={path} " \
           f"{target_type} upstream={upstream_kind} dlse={dlse is not None} {placed} both {both_placed} +{shift} " \
           f"stride+{stride - vocab}"
    compare(name, *checks)


def cross_entropy_grid():
    shapes = itertools.cycle(SHAPES)
    for dtype, reduction, smoothing, weighted, z_loss, (scale, softcap) in itertools.product(
            TYPES, (NONE, MEAN, SUM), (0.0, 0.1, 1.0), (False, True), (0.0, 1e-2), ((1.0, 0.0), (0.5, 0.0), (1.5, 8.0))):
        shape = next(shapes)
        weight = (torch.rand(shape[1], generator=generator) * 2).to(device) if weighted else None
        if weighted and shape[1] > 7:
            weight[::3] = 0.0
            weight[1] = 1.0
        ignore_index = draw("ignore_index", [None, -100, 2 if shape[1] > 2 else -1])
        # float64 has the options as lk is given them: as floats.
        smoothing, z_loss = (ctypes.c_float(v).value for v in (smoothing, z_loss))
        o = Options(reduction, smoothing, weight, z_loss, scale, softcap, ignore_index)
        cross_entropy_case(dtype, shape, o)


# ---- logsumexp --------------------------------------------------------------------------------------------------------------


def logsumexp_case(dtype, shape, scale):
    outer, cols, inner = shape
    T = TYPES[dtype]
    kinds = draw("values", ["plain", "special"])
    flat = normal(outer * inner, cols, sigma=2.0)
    if kinds == "special" and cols > 1:
        flat = spoil(flat, ROW_KINDS)
    values = flat.view(outer, inner, cols).transpose(1, 2)
    col_stride = inner + draw("col_stride-inner", [0, 0, 3])
    outer_stride = cols * col_stride + draw("outer_stride-packed", [0, 0, 5])
    shift = draw("shift", [0, 0, 1])
    contiguous = inner == 1 and col_stride == 1
    path = draw("path", [0, 4] + ([1, 2] + [3] * clusters if contiguous else []))
    storage = torch.full((shift + outer * outer_stride + inner,), NAN, device=device).to(T)
    x = storage.as_strided((outer, cols, inner), (outer_stride, col_stride, 1), shift)
    x.copy_(values.to(device))
    leaf = x.double().requires_grad_()
    expected = torch.logsumexp(leaf * scale, 1)
    lse = torch.full((outer, inner), NAN, device=device)
    in_t = lse.to(T)
    common = dict(x=x, outer=outer, cols=cols, inner=inner, outer_stride=outer_stride, col_stride=col_stride, scale=scale)
    forward = dict(common, lse=lse, path=path)
    if draw("lse_rounded", [False, True]):
        forward["lse_rounded"] = in_t
    launch("logsumexp_forward", dtype, **forward)
    magnitude = finite(leaf.detach() * scale).amax(1) if cols else torch.zeros_like(expected)
    limit = 8 * U * (magnitude + math.log(max(cols, 1)) + 1)  # the header's
    checks = [("lse", lse, expected, limit)]
    if "lse_rounded" in forward:
        checks.append(("rounded", in_t, expected, rounded(expected, limit, T)))
    if cols:
        dlse = normal(outer, inner).to(device) if draw("dlse", [False, True]) else None
        ones = torch.ones_like(expected) if dlse is None else dlse.double()
        gradient, = torch.autograd.grad((expected * ones).sum(), leaf)
        # A row of -inf: 0 here, NaN in torch; see DIFFERENCES.
        gradient = torch.where((expected == -INF)[:, None], torch.zeros_like(gradient), gradient)
        backward = dict(common, lse=lse, path=0 if path == 3 else path)
        if dlse is not None:
            backward["dlse"] = dlse
        if draw("placed", ["apart", "in place"]) == "in place":
            dx = x
            backward.update(dx_outer_stride=outer_stride, dx_col_stride=col_stride)
        else:
            dx = torch.full((outer, cols, inner), NAN, device=device).to(T)
        z = leaf.detach() * scale
        error = gradient.abs() * ((4 + finite(z - expected.detach()[:, None])) * 2 * U + limit[:, None])
        launch("logsumexp_backward", dtype, dx=dx, **backward)
        checks.append(("dx", dx, gradient, rounded(gradient, torch.nan_to_num(error), T)))
    compare(f"logsumexp {dtype} {outer}x{cols}x{inner} scale={scale} path={path} {kinds} +{shift} strides {outer_stride} "
            f"{col_stride}", *checks)


def logsumexp_grid():
    shapes = [(1, 1, 1), (5, 7, 1), (9, 64, 1), (6, 257, 1), (3, 2056, 1), (2, 9001, 1), (3, 5, 4), (2, 33, 17), (1, 130, 64),
              (4, 0, 1), (0, 8, 1)]
    for dtype, shape, scale, _ in itertools.product(TYPES, shapes, (1.0, 0.5, -2.0), range(2)):
        logsumexp_case(dtype, shape, scale)


# ---- srms_norm --------------------------------------------------------------------------------------------------------------


def rms_norm(s, weight, eps):
    if hasattr(F, "rms_norm"):
        return F.rms_norm(s, s.shape[-1:], weight, eps)
    y = s * torch.rsqrt(s.pow(2).mean(-1, keepdim=True) + eps)  # its definition, for a torch older than 2.4
    return y if weight is None else y * weight


def srms_norm_case(dtype, shape, residual_type, weight_type):
    rows, cols = shape
    T = TYPES[dtype]
    eps = ctypes.c_float(draw("eps", [1e-6, 1e-5, 0.1])).value
    path = draw("path", [0, 1, 2] + [3] * clusters)
    stride, shift = cols + draw("stride-cols", [0, 0, 1, 8]), draw("shift", [0, 0, 1])
    kinds = ["plain"] * 9 + ["0", "nan"]
    x = matrix(spoil(normal(rows, cols, sigma=1.5), kinds), T, stride, shift)
    arguments = dict(rows=rows, cols=cols, eps=eps, path=path, x_stride=stride)
    R, W = (TYPES.get(kind) for kind in (residual_type, weight_type))
    s = x.double()
    forward = dict(arguments, x=x)
    if R:
        residual = normal(rows, cols).to(device).to(R)
        residual_out = torch.full((rows, cols), NAN, device=device).to(R)
        forward.update(residual=residual, residual_out=residual_out, residual_dtype=DTYPE[residual_type])
        s = s + residual.double()
    weight = None
    if W:
        weight = normal(cols).to(device).to(W)
        forward.update(weight=weight, weight_dtype=DTYPE[weight_type])
    placed = draw("placed", ["apart", "in place"])
    original = x.clone()
    y = x if placed == "in place" else torch.full((rows, cols), NAN, device=device).to(T)
    rstd = torch.full((rows,), NAN, device=device)
    launch("srms_norm_forward", dtype, y=y, y_stride=stride if placed == "in place" else 0, rstd=rstd, **forward)
    w = None if weight is None else weight.double()
    expected = rms_norm(s, w, eps)
    root = torch.rsqrt(s.pow(2).mean(1) + eps)
    checks = [("y", y, expected, rounded(expected, 16 * U * expected.abs(), T)), ("rstd", rstd, root, root * 16 * U)]
    if R:
        checks.append(("residual_out", residual_out, s, rounded(s, 2 * U * s.abs(), R)))
        s = residual_out.double()  # backward starts from what forward wrote

    leaf = s.detach().requires_grad_()
    w_leaf = None if w is None else w.clone().requires_grad_()
    dy = normal(rows, cols).to(device).to(T)
    backward = dict(rows=rows, cols=cols, eps=eps, path=path, dy=dy)
    if R:
        backward.update(residual_out=residual_out, residual_dtype=DTYPE[residual_type])
    else:
        backward.update(x=original.clone().contiguous())
    given_rstd = draw("rstd", ["given", "recomputed"])
    if given_rstd == "given":
        backward["rstd"] = rstd
    surrogate = (rms_norm(leaf, w_leaf, eps) * dy.double()).sum()
    upstream = torch.zeros_like(s)
    if R and draw("dresidual_out", [False, True]):
        dresidual_out = normal(rows, cols).to(device).to(R)
        backward["dresidual_out"] = dresidual_out
        upstream = dresidual_out.double()
        surrogate = surrogate + (leaf * upstream).sum()
    if weight is not None:
        backward.update(weight=weight, weight_dtype=DTYPE[weight_type])
    gradients = torch.autograd.grad(surrogate, [leaf] if w_leaf is None else [leaf, w_leaf])
    if weight is not None:
        V = TYPES[draw("dweight", [dtype, "f32"])]
        accumulate = draw("accumulate", [0, 1])
        start = normal(cols).to(device).to(V) if accumulate else torch.full((cols,), NAN, device=device).to(V)
        before = start.double() if accumulate else torch.zeros_like(gradients[1])
        backward.update(dweight=start, dweight_dtype=DTYPE["f32"] if V == torch.float32 else 0, accumulate=accumulate)
    g = dy.double() * (1 if w is None else w)
    scale = torch.rsqrt(s.pow(2).mean(1, keepdim=True) + eps)
    h = s * scale
    terms = scale * (g.abs() + h.abs() * (g * h).abs().mean(1, keepdim=True))
    # rstd is that of the unrounded sum, and s here is the rounded one.
    stale = 2 * HALF_ULP[R] if R and given_rstd == "given" else 0
    limit = 16 * U * (terms + upstream.abs()) + stale * terms
    dx = dy if draw("dx", ["apart", "dy"]) == "dy" else torch.full((rows, cols), NAN, device=device).to(T)
    if weight is not None:
        w_limit = (dy.double() * h).abs().sum(0) * (16 * U + stale) + 2 * U * before.abs()
    if R and draw("dresidual", [False, True]):
        dresidual = torch.full((rows, cols), NAN, device=device).to(R)
        backward["dresidual"] = dresidual
        checks.append(("dresidual", dresidual, gradients[0], rounded(gradients[0], limit, R)))
    launch("srms_norm_backward", dtype, dx=dx, **backward)
    checks.append(("dx", dx, gradients[0], rounded(gradients[0], limit, T)))
    if weight is not None:
        total = gradients[1] + before
        checks.append(("dweight", start, total, rounded(total, w_limit, V)))
    compare(f"srms_norm {dtype} {rows}x{cols} residual={residual_type} weight={weight_type} eps={eps:.0e} path={path} {placed} "
            f"rstd {given_rstd} +{shift} stride+{stride - cols}", *checks)


def srms_norm_grid():
    for dtype, shape in itertools.product(TYPES, [(1, 1), (5, 7), (9, 64), (4, 257), (3, 1031), (3, 2048), (2, 8200)]):
        types = list(dict.fromkeys(["none", dtype, "f32"]))
        for residual_type, weight_type in itertools.product(types, types):
            srms_norm_case(dtype, shape, residual_type, weight_type)


def srms_norm_fp8_grid():
    """With scales that are powers of two the bytes are those of PyTorch's conversion of the float32 y, and the scales those of its
    largest numbers, rounded up to a power of two, or by the exponent alone; other scales are its quotients."""
    if not hasattr(torch, "float8_e4m3fn"):  # of PyTorch 2.1
        return
    shapes = [(5, 7), (9, 128), (130, 260), (3, 2056)]
    for shape, scaling, format, (narrow, floor) in itertools.product(shapes, range(4), range(2), ((0, 0), (1, 0), (1, 1))):
        if floor and scaling == 0:
            continue
        (rows, cols), kind, most = shape, (torch.float8_e4m3fn, torch.float8_e5m2)[format], (448.0, 57344.0)[format]
        x = spoil(normal(rows, cols, sigma=1.5), ["plain"] * 9 + ["0"]).to(device)
        y, q = torch.full_like(x, NAN), torch.zeros(rows, cols, dtype=torch.uint8, device=device)
        turned = torch.zeros(cols, rows, dtype=torch.uint8, device=device)
        common, outputs = dict(x=x, y=y, weight=normal(cols).to(device), rows=rows, cols=cols, eps=1e-6), dict(q=q)
        if scaling != 1:
            outputs["q_transposed"] = turned
        blank = lambda n, cols: torch.zeros(n, -(-cols // (32 if scaling == 3 else 128 if scaling == 2 else cols)),
                                            dtype=torch.uint8 if scaling == 3 else torch.float32, device=device)
        number = torch.tensor([2.0**-6 if narrow else 0.0131], device=device)
        scales = [blank(rows, cols), blank(cols, rows)]
        if scaling == 0:
            outputs.update(tensor_scale=number)
        else:
            outputs.update(scale=scales[0], **(dict(transposed_scale=scales[1]) if scaling > 1 else {}))
        launch("srms_norm_fp8_forward", "f32", common=common, scaling=scaling, format=format, power_of_two=narrow,
               scale_rounding=floor, **outputs)
        narrow_too, problems = narrow or scaling == 3, []
        both = (("q", q, scales[0], y), ("q_transposed", turned, scales[1], y.t().contiguous()))
        for name, bytes_, scale, of in both[:1 if scaling == 1 else 2]:
            n, m = of.shape
            if scaling == 0:
                factor = number.expand(n, m)
            else:
                per = 32 if scaling == 3 else 128 if scaling == 2 else m
                amax = F.pad(of.abs(), (0, -m % per)).view(n, -1, per).amax(-1)
                right, of_zeros = torch.where(amax > 0, amax / most, 1.0), 2.0**-127 if scaling == 3 else 1.0
                if narrow_too:  # exact: frexp gives 1/2 to 1 below 2^exponent
                    part, exponent = torch.frexp(amax)
                    power = exponent - (9 if format == 0 else 16) + (0 if floor else (part > 0.875).int())
                    right = torch.where(amax > 0, torch.ldexp(torch.ones_like(amax), power), of_zeros)
                found = torch.ldexp(torch.ones_like(amax), scale.int() - 127) if scaling == 3 else scale
                if not torch.equal(found, right):
                    problems.append(f"{name}: {int((found != right).sum())} scales differ")
                factor = found.repeat_interleave(per, 1)[:, :m]
            bytes_right = (of / factor).clamp(-most, most).to(kind).view(torch.uint8)
            differ = int((bytes_right != bytes_).sum())
            if differ > (0 if narrow_too else of.numel() // 1000):  # a quotient next to a tie may fall on its other side
                problems.append(f"{name}: {differ} of {of.numel()} numbers differ")
        verdict(f"srms_norm_fp8 f32: {rows}x{cols} scaling {scaling} format {format} powers of two {narrow} floor {floor}", not problems,
                "; ".join(problems))


# ---- Where lk differs from torch on purpose ---------------------------------------------------------------------------------


def say(text):
    if verbose:
        print(f"      {text}")


def off(value, right):
    return f"{float((value.double() - right).detach().abs().max()):.2g}"


def shown(tensor):
    return [float(f"{v:.9g}") for v in tensor.detach().double().flatten().tolist()]


def simple(x, target, dtype="f32", reduction=NONE, **options):
    """lk's loss, lse and dlogits of a plain call."""
    x = x.to(TYPES[dtype]).to(device).contiguous()
    rows, vocab = x.shape
    target = torch.tensor(target, device=device)
    loss, lse = torch.full((1 if reduction else rows,), NAN, device=device), torch.full((rows,), NAN, device=device)
    valid, total = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(1, device=device)
    dlogits = torch.full_like(x, NAN)
    both = dict(logits=x, target=target, rows=rows, vocab=vocab, reduction=reduction)
    both.update({k: v for k, v in options.items() if k not in ("zero_when_empty", "bad_targets")})
    only = {k: v for k, v in options.items() if k in ("zero_when_empty", "bad_targets")}
    launch("cross_entropy_forward", dtype, loss=loss, lse=lse, valid_rows=valid, weight_sum=total, **both, **only)
    launch("cross_entropy_backward", dtype, lse=lse, valid_rows=valid, weight_sum=total, dlogits=dlogits, **both)
    return loss, lse, dlogits


def in_one_pass(x, target):
    """lk's loss and dlogits of a plain call of forward_backward."""
    x = x.float().to(device).contiguous()
    rows, vocab = x.shape
    loss, dlogits = torch.full((rows,), NAN, device=device), torch.full_like(x, NAN)
    launch("cross_entropy_forward_backward", "f32", logits=x, target=torch.tensor(target, device=device), loss=loss,
           dlogits=dlogits, rows=rows, vocab=vocab)
    return loss, dlogits


def torch_gradient(x, target, **options):
    leaf = x.to(device).clone().requires_grad_()
    loss = F.cross_entropy(leaf, torch.tensor(target, device=device), **options)
    loss.sum().backward()
    return loss, leaf.grad


def differences():
    zeros = torch.zeros
    ignored = dict(use_ignore_index=1, ignore_index=-100)

    x = torch.full((2, 9), -INF)
    x[1] = 1.0
    leaf = x.to(device).requires_grad_()
    torch.logsumexp(leaf, 1).sum().backward()
    lse, dx, at = torch.full((2,), NAN, device=device), torch.full((2, 9), NAN, device=device), x.to(device)
    launch("logsumexp_forward", "f32", x=at, lse=lse, outer=2, cols=9)
    launch("logsumexp_backward", "f32", x=at, lse=lse, dx=dx, outer=2, cols=9)
    expected = torch.stack([zeros(9), torch.full((9,), 1 / 9)]).double()
    compare("difference: logsumexp of a row of -inf has gradient 0", ("dx", dx, expected, 1e-6))
    say(f"torch: {shown(leaf.grad[0])[:2]}..., exp(-inf - -inf). A masked row then poisons every weight behind it; lse depends")
    say("on no one value of the row, so lk says 0")

    x = normal(4, 1000, sigma=2.0).to(torch.bfloat16).to(device)
    right = torch.logsumexp(x.double(), 1)
    theirs = torch.logsumexp(x, 1)
    lse, in_t = torch.full((4,), NAN, device=device), torch.full((4,), NAN, device=device).to(torch.bfloat16)
    launch("logsumexp_forward", "bf16", x=x, lse=lse, lse_rounded=in_t, outer=4, cols=1000)
    compare("difference: lse is float for 16-bit inputs", ("lse", lse, right, 1e-5),
            ("lse_rounded, as torch's", in_t, theirs.double(), right.abs() * 2 * HALF_ULP[torch.bfloat16]))
    say(f"torch's bf16 lse is off by {off(theirs, right)}, which is a relative error of every gradient made from it;")
    say("lse_rounded is torch's result for who wants it")

    x = normal(3, 50).to(device)
    loss, _ = torch_gradient(x, [-100] * 3)
    for switch, expected in ((0, NAN), (1, 0.0)):
        ours, _, dlogits = simple(x, [-100] * 3, reduction=MEAN, zero_when_empty=switch, **ignored)
        compare(f"difference: a mean over nothing, zero_when_empty={switch}", ("loss", ours, torch.tensor([expected]), 0.0),
                ("dlogits", dlogits, zeros(3, 50), 0.0))
    say(f"torch: loss {shown(loss)}; lk's NaN is torch's, and the switch spares a training step that got nothing but padding")

    weight = torch.ones(50, device=device)
    weight[7] = 0.0
    loss, grad = torch_gradient(x, [7, 7, 7], weight=weight)
    ours, _, dlogits = simple(x, [7, 7, 7], reduction=MEAN, class_weight=weight)
    compare("difference: a mean over rows of class weight 0 has gradient 0", ("loss", ours, torch.tensor([NAN]), 0.0),
            ("dlogits", dlogits, zeros(3, 50), 0.0))
    say(f"torch: loss {shown(loss)}, gradient {shown(grad[0])[:2]}...; lk treats a sum of weights of 0 as no rows at all")

    bad = x.clone()
    bad[1] = NAN
    loss, grad = torch_gradient(bad, [3, -100, 5], reduction="none")
    clean = x.clone()
    clean[1] = 0.0
    _, right = torch_gradient(clean.double(), [3, -100, 5], reduction="none")
    ours, _, dlogits = simple(bad, [3, -100, 5], **ignored)
    compare("difference: an ignored row's gradient is 0 whatever the row holds", ("dlogits", dlogits, right, 1e-6),
            ("loss", ours[1:2], zeros(1), 0.0))
    say(f"torch: loss {shown(loss)[1]}, gradient {shown(grad[1])[:2]}..., 0 times NaN; lk does not read ignored rows")

    count = torch.zeros(1, dtype=torch.int32, device=device)
    ours, _, dlogits = simple(x, [3, 50, 5], bad_targets=count)
    loss, right = torch_gradient(x.double(), [3, 0, 5], reduction="none")
    loss, right = loss.detach().clone(), right.clone()
    loss[1], right[1] = NAN, NAN
    compare("difference: a target outside the vocabulary makes its row NaN and is counted", ("loss", ours, loss, 1e-5),
            ("dlogits", dlogits, right, 1e-6), ("bad_targets", count, torch.ones(1), 0.0))
    if device == "cpu":  # on a GPU torch asserts, and the process can do no more
        try:
            F.cross_entropy(x, torch.tensor([3, 50, 5]))
            say("torch: no error")
        except (IndexError, RuntimeError) as error:
            say(f"torch raises {type(error).__name__}: {error}; lk does not look at device memory from the host")

    x = zeros(1, 1000, dtype=torch.float64)
    x[0, 3] = math.log(999 * (1e6 - 1))  # p of the target is 1 - 1e-6
    x = x.float()
    _, right = torch_gradient(x.double(), [3], reduction="none")
    _, theirs = torch_gradient(x, [3], reduction="none")
    _, _, dlogits = simple(x, [3])
    # lse is about 20.7: half an ulp of it is 16 U, and that is a relative error of every p; then as much for p itself.
    compare("difference: the target's gradient is minus the sum of the others",
            ("dlogits", dlogits, right, right.abs() * 64 * U),
            ("in one pass", in_one_pass(x, [3])[1], right, right.abs() * 64 * U))
    say(f"float64 {shown(right[0, 3])}, lk {shown(dlogits[0, 3])}, torch in float {shown(theirs[0, 3])}: p - 1 has no")
    say("digits left where p is all but 1")

    x = (normal(3, 50) + 1e4).to(device)
    loss, right = torch_gradient(x.double(), [3, 4, 5], reduction="none")
    theirs, their_gradient = torch_gradient(x, [3, 4, 5], reduction="none")
    ours, _, _ = simple(x, [3, 4, 5])
    once, dlogits = in_one_pass(x, [3, 4, 5])
    compare("as torch: an offset of 1e4 on all logits costs the loss nothing", ("loss", ours, loss, 1e-5),
            ("loss in one pass", once, loss, 1e-5), ("dlogits in one pass", dlogits, right, right.abs() * 1e-5))
    say(f"error: lk {off(ours, loss)}, torch in float {off(theirs, loss)}")
    say(f"error of the gradient: lk in one pass {off(dlogits, right)}, torch in float {off(their_gradient, right)}")


# ---- lk_scale ---------------------------------------------------------------------------------------------------------------


def scale_grid():
    """What autograd does with forward_backward: gradients for an upstream of 1, then times the upstream that comes later."""
    for dtype, factor in itertools.product(TYPES, (1.0, 0.0, -0.3, 65536.0)):
        x, target = normal(5, 1031).to(TYPES[dtype]).to(device), torch.tensor([0, 7, 1030, 512, 3], device=device)
        loss, dlogits = torch.full((5,), NAN, device=device), torch.full_like(x, NAN)
        launch("cross_entropy_forward_backward", dtype, logits=x, target=target, loss=loss, dlogits=dlogits, rows=5, vocab=1031)
        upstream = torch.tensor([factor], device=device)
        expected = (dlogits.float() * upstream).to(TYPES[dtype])  # one product and one rounding, as in lk: the same bits
        status = binding.scale(dtype, dlogits, upstream)
        verdict(f"scale: {dtype}, by {factor:g}", status == 0 and bool((dlogits == expected).all()),
                f"status {status}, off by {off(dlogits, expected.double())}")


# ---- Errors -----------------------------------------------------------------------------------------------------------------


def errors():
    x, target = torch.zeros(2, 8, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    loss = torch.full((2,), NAN, device=device)
    for name, function, fields, sentence in (
            ("logits", "cross_entropy_forward", dict(target=target, loss=loss, rows=2, vocab=8), "logits is NULL"),
            ("vocab", "cross_entropy_forward", dict(logits=x, target=target, loss=loss, rows=2), "vocab is 0"),
            ("softcap", "cross_entropy_forward", dict(logits=x, target=target, loss=loss, rows=2, vocab=8, softcap=-1.0),
             "softcap is -1"),
            ("lse", "cross_entropy_backward", dict(logits=x, target=target, dlogits=x, rows=2, vocab=8), "lse is NULL"),
            ("dlogits", "cross_entropy_forward_backward", dict(logits=x, target=target, loss=loss, rows=2, vocab=8),
             "dlogits is NULL"),
            ("path", "logsumexp_forward", dict(x=x, lse=loss, outer=2, cols=8, path=9), "path is 9"),
            ("eps", "srms_norm_forward", dict(x=x, y=x, rows=2, cols=8, eps=-1.0), "eps is -1")):
        status = call(function, "f32", **fields)
        text = lk.lk_last_error().decode()
        verdict(f"error: {function}, {name}: {text}", status < 0 and sentence in text and bool(loss.isnan().all()),
                f"status {status}, expected '{sentence}'")


library, device = sys.argv[1:3]
if device == "cuda" and not torch.cuda.is_available():
    print(f"FAIL {library} is for a GPU, and PyTorch {torch.__version__} sees none: make BACKEND=cpu test-torch")
    print("0 passed, 1 failed")
    sys.exit(1)
binding = liblk.Library(library, OPS, device)
lk, call, launch = binding.lk, binding.call, binding.launch
clusters = device == "cpu" or torch.cuda.get_device_capability()[0] >= 9
print(f"PyTorch {torch.__version__} against {library} on",
      f"{torch.cuda.get_device_name() if device == 'cuda' else 'the simulator'}; numbers: errors as shares of their limits")
for op in OPS:
    check_layouts(op, liblk.structs_of(op, binding.structs))
cross_entropy_grid()
logsumexp_grid()
srms_norm_grid()
srms_norm_fp8_grid()
scale_grid()
differences()
errors()
if verbose:
    print(textwrap.fill("drawn: " + ", ".join(f"{option} {count}" for option, count in sorted(drawn.items())), 128))
verdict("every value of every option was drawn", all(drawn.values()),
        "none of: " + ", ".join(option for option, count in drawn.items() if not count))
if not verbose:
    print_groups()
print(f"{passed} passed, {failed} failed")
sys.exit(failed > 0)
