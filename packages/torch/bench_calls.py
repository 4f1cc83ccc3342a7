# SPDX-License-Identifier: MIT
"""What a call costs from Python: lk_torch beside PyTorch, bf16, in one process, on the same inputs, in turns.

    python packages/torch/bench_calls.py [--csv FILE]

host   us that Python's thread needs per call, while the GPU works behind it (20 calls in a row, the GPU idle before)
wall   us per call of many in a row, the GPU waited for at the end
graph  us per call inside a CUDA graph: the kernels alone
ratio  lk's time over PyTorch's, below 1 lk is faster

forward runs under no_grad. train is forward and backward through autograd.
"""
import csv
import glob
import logging
import os
import sys
import time
import warnings

HERE = os.path.dirname(os.path.abspath(__file__))
if not glob.glob(HERE + "/lk_torch/_C*"):  # not built in this folder: take the installed package
    sys.path = [p for p in sys.path if os.path.abspath(p or ".") != HERE]
os.environ["TORCHINDUCTOR_FORCE_DISABLE_CACHES"] = "1"  # a graph on disk may have been compiled with an older lk_torch

import torch
import torch.nn.functional as F

import lk_torch
from lk_torch import functional as LF

CUDA = lk_torch.BACKEND == "cuda"
D = "cuda" if CUDA else "cpu"
SHAPES = [(4096, 1024), (256, 1024), (8192, 4096), (4096, 32768)] if CUDA else [(8, 32)]
SPREAD = 1.02  # two medians of the same thing differ by up to this
rows_out = []
failures = {"host of forward": [], "cross_entropy in 12 us": [], "wall of train": [], "compiled": []}


def median(values):
    return sorted(values)[len(values) // 2]


def wait():
    if CUDA:
        torch.cuda.synchronize()


def timed(f, calls, waits):
    wait()
    start = time.perf_counter()
    for _ in range(calls):
        f()
    if waits:
        wait()
    return (time.perf_counter() - start) / calls * 1e6


def in_turns(functions, calls, repeats, waits):
    """Medians of us per call. The functions take turns, so that a drift of the clocks meets all of them."""
    times = [[] for _ in functions]
    for _ in range(repeats):
        for f, found in zip(functions, times):
            found.append(timed(f, calls, waits))
    return [median(found) for found in times]


def graph_of(f):
    """A CUDA graph of 10 calls."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            f()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            f()
    return graph


def measure(functions):
    """host, wall and graph of each function."""
    for f in functions:
        for _ in range(3):
            f()
    slow = max(timed(f, 3, True) for f in functions)  # us
    calls = max(5, min(100, int(2e4 / slow)))
    host = in_turns(functions, 20 if CUDA else 3, 15 if CUDA else 3, False)
    wall = in_turns(functions, calls if CUDA else 3, 9 if CUDA else 3, True)
    graph = [None] * len(functions)
    if CUDA:
        graphs = [graph_of(f) for f in functions]
        graph = [t / 10 for t in in_turns([g.replay for g in graphs], max(1, calls // 10), 9, True)]
    return list(zip(host, wall, graph))


def show(op, direction, shape, names, found):
    cells = "".join(f"{host:10.1f}{wall:10.1f}{graph:10.1f}" if graph else f"{host:10.1f}{wall:10.1f}{'-':>10}"
                    for host, wall, graph in found)
    ratios = "".join("-".rjust(7) if a is None else f"{a / b:7.2f}" for a, b in zip(*found))
    print(f"{op:22}{direction:9}{' x '.join(map(str, shape)):20}{cells}{ratios}", flush=True)
    for name, (host, wall, graph) in zip(names, found):
        rows_out.append([op, direction, " x ".join(map(str, shape)), name, f"{host:.2f}", f"{wall:.2f}",
                         f"{graph:.2f}" if graph else ""])


def training(f, leaves):
    """A step: forward, then gradients of all leaves for upstream gradients that are made once."""
    outs = f(*leaves)
    outs = outs if isinstance(outs, tuple) else (outs,)
    ups = [torch.randn_like(out) if out.dim() else None for out in outs]

    def step():
        outs = f(*leaves)
        torch.autograd.grad(outs, leaves, ups if isinstance(outs, tuple) else ups[0])
    return step


def case(op, shape, ours, theirs, leaves):
    with torch.no_grad():
        found = measure([lambda: ours(*leaves), lambda: theirs(*leaves)])
    show(op, "forward", shape, ("lk", "torch"), found)
    name = f"{op} {' x '.join(map(str, shape))}"
    (lk_host, *_), (torch_host, *_) = found
    if lk_host > 1.05 * torch_host:
        failures["host of forward"].append((lk_host / torch_host, f"{name} {lk_host / torch_host:.2f}"))
    if op == "cross_entropy mean" and lk_host > 12:
        failures["cross_entropy in 12 us"].append((lk_host, f"{name} {lk_host:.1f}"))
    found = measure([training(ours, leaves), training(theirs, leaves)])
    show(op, "train", shape, ("lk", "torch"), found)
    ratio = found[0][1] / found[1][1]
    if ratio > SPREAD:
        failures["wall of train"].append((ratio, f"{name} {ratio:.2f}"))


def plain_lrpe(x, theta):
    phi = torch.arange(x.shape[2], device=x.device)[None, :, None] * theta[:, None, :]
    return torch.cat([x * phi.cos(), x * phi.sin()], -1).to(x.dtype)


def leaf(*shape, factor=1.0, dtype=torch.bfloat16):
    return (torch.randn(*shape, device=D) * factor).to(dtype).requires_grad_()


def turned(x, cos, sin):
    """As transformers has it, with tokens before heads."""
    return x * cos[:, None] + torch.cat(((-x).chunk(2, -1)[1], x.chunk(2, -1)[0]), -1) * sin[:, None]


def ops_at(rows, cols):
    x, r, w = leaf(rows, cols), leaf(rows, cols), leaf(cols)
    t = torch.randint(cols, (rows,), device=D)
    shape, size = (rows, cols), (cols,)
    case("logsumexp", shape, lambda x: LF.logsumexp(x, 1), lambda x: torch.logsumexp(x, 1), [x])
    case("srms_norm", shape, lambda x: LF.srms_norm(x), lambda x: F.rms_norm(x, size, None, 1e-6), [x])
    case("rms_norm", shape, lambda x, w: LF.rms_norm(x, size, w, 1e-6), lambda x, w: F.rms_norm(x, size, w, 1e-6), [x, w])

    case("glu", shape, lambda x, r: LF.glu(x, r), lambda x, r: F.silu(x) * r, [x, r])
    case("add_rms_norm", shape, lambda x, r, w: LF.add_rms_norm(x, r, size, w, 1e-6),
         lambda x, r, w: (F.rms_norm(s := x + r, size, w, 1e-6), s), [x, r, w])
    for reduction in ("mean", "none"):
        case(f"cross_entropy {reduction}", shape, lambda x: LF.cross_entropy(x, t, reduction=reduction),
             lambda x: F.cross_entropy(x, t, reduction=reduction), [x])
    heads, dim = 8, 128 if CUDA else 4
    if rows * cols <= 8192 * 4096:
        tokens = max(1, rows * cols // (heads * dim))
        q, theta = leaf(1, heads, tokens, dim), leaf(heads, dim, dtype=torch.float32)
        case("md_lrpe_cosine", q.shape, lambda q, th: LF.md_lrpe_cosine(q, th, (tokens,)), plain_lrpe, [q, theta])
        q, k, position = leaf(1, tokens, heads, dim), leaf(1, tokens, heads // 4, dim), torch.arange(tokens, device=D)
        angles = position[:, None] * 10000.0 ** -(torch.arange(dim, device=D) % (dim // 2) * 2 / dim)
        cos, sin = (f(angles).to(q.dtype) for f in (torch.cos, torch.sin))
        case("rope", q.shape, lambda q, k: LF.rope(q, k, cos=cos, sin=sin),
             lambda q, k: (turned(q, cos, sin), turned(k, cos, sin)), [q, k])
        vocab = 4 * cols
        head, labels = leaf(vocab, cols, factor=cols**-0.5), torch.randint(vocab, (rows,), device=D)
        case("linear_cross_entropy", (rows, cols, vocab), lambda x, h: LF.linear_cross_entropy(x, h, labels),
             lambda x, h: F.cross_entropy(F.linear(x, h), labels), [x, head])


def post_training(tokens, hidden, vocab, n, k):
    """n ids of each token, and the k largest."""
    x, head, logits = leaf(tokens, hidden), leaf(vocab, hidden, factor=hidden**-0.5), leaf(tokens, vocab)
    ids, offsets = torch.randint(vocab, (tokens, n), device=D), torch.arange(0, tokens * n + 1, n, device=D)
    flat, y = ids.flatten(), ids[:, 0].contiguous()
    with torch.no_grad():
        found = measure([lambda: LF.linear_topk(x, head, k), lambda: F.linear(x, head).float().log_softmax(-1).topk(k)])
    show("linear_topk", "forward", (tokens, hidden, vocab), ("lk", "torch"), found)
    case("linear_support", (tokens, hidden, vocab), lambda x, h: LF.linear_support(x, h, flat, offsets, y).logp,
         lambda x, h: torch.einsum("td,tnd->tn", x, h[ids]).float().log_softmax(-1)[:, 0], [x, head])
    case("support", (tokens, vocab), lambda z: LF.support(z, flat, offsets, y).logp,
         lambda z: z.gather(1, ids).float().log_softmax(-1)[:, 0], [logits])


def blocks(rows, cols, vocab):
    """Norm, linear, cross entropy: compiled with lk's functions in it and with PyTorch's."""
    leaves = [leaf(rows, cols), leaf(cols), leaf(vocab, cols, factor=cols**-0.5)]
    t = torch.randint(vocab, (rows,), device=D)

    def ours(x, w, head):
        return LF.cross_entropy(F.linear(LF.rms_norm(x, (cols,), w, 1e-6), head), t)

    def theirs(x, w, head):
        return F.cross_entropy(F.linear(F.rms_norm(x, (cols,), w, 1e-6), head), t)
    for mode in ("default", "reduce-overhead") if CUDA else ("default",):
        steps = []
        for f in (ours, theirs):
            fast = torch.compile(f, fullgraph=True, mode=mode)

            def step(fast=fast):
                torch.compiler.cudagraph_mark_step_begin()
                torch.autograd.grad(fast(*leaves), leaves)
            for _ in range(5):
                step()
            steps.append(step)
        host = in_turns(steps, 20 if CUDA else 3, 15 if CUDA else 3, False)
        wall = in_turns(steps, 50 if CUDA else 3, 9 if CUDA else 3, True)
        found = [(h, w, None) for h, w in zip(host, wall)]
        show(f"block, {mode}", "compiled", (rows, cols, vocab), ("lk", "torch"), found)
        if wall[0] > SPREAD * wall[1]:
            failures["compiled"].append((wall[0] / wall[1], f"{mode} {wall[0] / wall[1]:.2f}"))


def main():
    file = sys.argv[sys.argv.index("--csv") + 1] if "--csv" in sys.argv[1:-1] else None
    if sys.argv[1:] and not file:
        sys.exit("usage: bench_calls.py [--csv FILE]")
    if CUDA and not torch.cuda.is_available():
        sys.exit(f"lk_torch was built for a GPU, and PyTorch {torch.__version__} sees none; build it with LK_BACKEND=cpu")
    start = time.time()
    where = torch.cuda.get_device_name() if CUDA else "the simulator: tiny sizes show that the program works, times say nothing"
    print(f"lk_torch ({lk_torch.BACKEND}) beside PyTorch {torch.__version__}, bf16, {where}")
    three = f"{'host':>10}{'wall':>10}{'graph':>10}"
    print(f"{'':51}{'lk, us a call':^30}{'PyTorch, us a call':^30}{'lk / PyTorch':^21}")
    print(f"{'op':22}{'':9}{'shape':20}{three}{three}{'host':>7}{'wall':>7}{'graph':>7}")
    torch.manual_seed(1)
    if not CUDA:
        torch.set_num_threads(1)  # tiny tensors: more threads only wait for each other
    empty = leaf(*SHAPES[0]).detach()
    least, = in_turns([lambda: torch.empty_like(empty)], 20, 9, False)
    print(f"torch.empty_like, the least that a call costs: host {least:.1f} us")
    for rows, cols in SHAPES:
        ops_at(rows, cols)
    post_training(*((4096, 4096, 151936, 16, 64) if CUDA else (8, 16, 64, 3, 5)))
    blocks(*SHAPES[0], 4 * SHAPES[0][1])
    if file:
        with open(file, "w", newline="") as out:
            csv.writer(out).writerows([["op", "direction", "shape", "provider", "host_us", "wall_us", "graph_us"], *rows_out])
        print(f"{len(rows_out)} rows in {file}")
    print(f"{time.time() - start:.0f} seconds")
    if not CUDA:
        return print("goals: not judged without a GPU")
    words = {"host of forward": "host time of forward at most 1.05 of PyTorch's",
             "cross_entropy in 12 us": "cross_entropy mean at most 12 us", "wall of train": "forward + backward no slower",
             "compiled": "compiled no slower"}
    print("goals: " + "; ".join(f"{words[goal]}: " + (f"fails in {len(found)}, worst {max(found)[1]}" if found else "holds")
                                for goal, found in failures.items()))


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)  # it says that there is no GPU; the first line does
    main()
