# SPDX-License-Identifier: MIT
"""What a call costs from JAX: lk beside XLA's own fusions, in microseconds per call. python bench_calls.py [--hlo]

one call   a compiled call that is waited for: what the host needs to start it, plus the kernels
in a loop  50 calls in one compiled loop, each on the results of the last
in a row   16 such calls in one compiled program without a loop, as the layers of a model are

A loop keeps its state in one place. Results that are not made in place are copied there, after each call: lk's, and those of
XLA's Triton fusions, but not those of its other fusions. In a row nothing is copied.

Every result of a call is used, by the next one, so XLA cannot leave any of it out. XLA's own is written in the form that XLA
fuses best: cross entropy by comparing columns with the target, where a gather would need a scatter in backward. After the table
come other XLA flags, at the smallest shape, each in a process of its own. --hlo prints instead what XLA made of the loops:
calls, fusions and copies of one iteration. --device cpu tries the program on lk's simulator, on tiny shapes.
"""
import argparse
import functools
import json
import os
import re
import statistics
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
SHAPES = [(4096, 1024), (4096, 4096), (8192, 32768)]
LOOP, ROW = 50, 16
VARIANTS = [
    "",
    "--xla_gpu_graph_min_graph_size=1",
    "--xla_gpu_graph_min_graph_size=1 --xla_gpu_enable_command_buffer=+WHILE",
    "--xla_gpu_graph_min_graph_size=1 --xla_gpu_enable_command_buffer=+WHILE --xla_gpu_command_buffer_unroll_loops=true",
    "--xla_gpu_enable_while_loop_unrolling=WHILE_LOOP_UNROLLING_DOUBLE_BUFFER",
]


def cases(rows, cols, small):
    """(op, direction, state, lk's step, XLA's step): a step takes the state, a tuple of arrays, to the next one."""
    import jax
    import jax.numpy as jnp

    import lk_jax as lk

    f32, bf16 = jnp.float32, jnp.bfloat16

    def normal(seed, *shape):
        return jax.random.normal(jax.random.key(seed), shape, bf16)

    def rms(s, weight):
        s = s.astype(f32)
        return (s * jax.lax.rsqrt(jnp.mean(s * s, -1, keepdims=True) + 1e-6) * weight.astype(f32)).astype(bf16)

    def add_rms(x, residual, weight):
        s = x.astype(f32) + residual.astype(f32)
        return rms(s, weight), s.astype(bf16)

    def logsumexp(v):
        return jax.nn.logsumexp(v.astype(f32), -1).astype(bf16)

    def entropy(v, target):
        v = v.astype(f32)
        own = jnp.where(jax.lax.broadcasted_iota(jnp.int32, v.shape, 1) == target[:, None], v, 0).sum(-1)
        return (jax.nn.logsumexp(v, -1) - own).mean()

    def linear_entropy(x, weight, target):
        return entropy(jnp.dot(x, weight.T, preferred_element_type=f32), target)

    def with_gradient(f):
        def step(x, dy):
            y, pull = jax.vjp(f, x)
            return y, pull(dy)[0]
        return step

    def add_with_gradient(f):
        def step(x, residual, dy, ds, weight, dweight):
            results, pull = jax.vjp(f, x, residual, weight)
            dx, dresidual, dweight = pull((dy, ds))
            return *results, dx, dresidual, weight, dweight
        return step

    x, dy, weight, target = normal(0, rows, cols), normal(1, rows, cols), normal(2, cols), jnp.arange(rows) % cols
    yield "rms_norm", "forward", (x, weight), *((lambda v, w, f=f: (f(v, w), w)) for f in (lk.rms_norm, rms))
    yield "rms_norm", "both", (x, dy), *(with_gradient(lambda v, f=f: f(v, weight)) for f in (lk.rms_norm, rms))
    yield ("add_rms_norm", "both", (x, dy, dy, x, weight, weight), *(add_with_gradient(f) for f in (lk.add_rms_norm, add_rms)))
    yield ("logsumexp", "forward", (x, x[:, 0]),
           *((lambda v, last, f=f: (v.at[0, 0].set(last[0]), f(v))) for f in (lambda v: lk.logsumexp(v, -1), logsumexp)))
    yield ("logsumexp", "both", (x, x[:, 0]),
           *((lambda v, d, f=f: with_gradient(f)(v, d)[::-1]) for f in (lambda v: lk.logsumexp(v, -1), logsumexp)))
    yield ("cross_entropy", "forward", (x, f32(0), target),
           *((lambda v, last, t, f=f: (v.at[0, 0].set(last.astype(bf16)), f(v, t), t)) for f in (lk.cross_entropy, entropy)))
    in_place = functools.partial(lk.cross_entropy, in_place=True)
    for name, ours in (("cross_entropy", lk.cross_entropy), ("  in place", in_place)):
        yield (name, "both", (x, f32(0), target),
               *((lambda v, _, t, f=f: (*jax.value_and_grad(f)(v, t)[::-1], t)) for f in (ours, entropy)))
    if (rows, cols) in (SHAPES[0], small):  # one shape: rows tokens of cols hidden, 32 columns of the vocabulary per hidden one
        matrix, wide = normal(3, 32 * cols, cols), jnp.arange(rows) % (32 * cols)
        yield ("linear_cross_entropy", "both", (x, matrix, f32(0), wide),
               *((lambda v, m, _, t, f=f: (*jax.value_and_grad(f, (0, 1))(v, m, t)[::-1], t)) for f in (
                   lk.linear_cross_entropy, linear_entropy)))


def flat(step):
    """(dx, dweight), loss, ... as one state."""
    def run(*state):
        first, *rest = step(*state)
        return (*first, *rest) if isinstance(first, tuple) else (first, *rest)
    return run


def compiled(step, state, how):
    """The program, and the number of its calls."""
    import jax
    step = flat(step)

    def row(*s):
        for _ in range(ROW):
            s = step(*s)
        return s
    run, calls = {"one": (step, 1), "row": (row, ROW),
                  "loop": (lambda *s: jax.lax.fori_loop(0, LOOP, lambda _, s: step(*s), s), LOOP)}[how]
    return jax.jit(run).lower(*state).compile(), calls


def microseconds(step, state, how):
    import jax
    program, calls = compiled(step, state, how)
    times, began = [], time.perf_counter()
    jax.block_until_ready(program(*state))
    while len(times) < 5 or (len(times) < 30 and time.perf_counter() - began < 0.3):
        start = time.perf_counter()
        jax.block_until_ready(program(*state))
        times.append(time.perf_counter() - start)
    return statistics.median(times) / calls * 1e6


def summary(text):
    """The instructions of the loop's body and of what surrounds it, without those that only name a value."""
    lines, computation = [], None
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.-]+) \(", line)
        computation = head and line.endswith("{") and (head[1] or "body" in line or "(s32[]" in line) and head[2] or (
            None if head else computation)
        found = re.match(r"\s+(?:ROOT )?%?[\w.-]+ = (.*?) (custom-call|copy|fusion|while|copy-start|call)\((.*?)\)", line)
        if computation and found:
            target = re.search(r'custom_call_target="([^"]+)"', line)
            names = re.search(r'inputs ?= ?"([^"]*)".*?outputs ?= ?"([^"]*)"', line)
            kind = re.search(r"kind=(\w+)", line)
            note = (target[1] if target else kind[1] if kind else "") + (f" {names[1]} -> {names[2]}" if names else "")
            lines.append(f"    {computation:20} {found[2]:12} {re.sub(r'{[^}]*}', '', found[1])[:60]:60} {note}")
    return "\n".join(lines)


def worker(args):
    """The child process: prints rows, or with --hlo the programs."""
    import jax
    sys.path.insert(0, HERE)
    device = jax.devices()[0]
    small = (16, 64)
    if args.device == "cpu":
        global LOOP, ROW
        LOOP, ROW = 3, 2
    shapes = [small] if args.device == "cpu" else SHAPES[:args.shapes]
    hows = ["one", "loop", "row"]
    if not args.hlo and not args.flags:
        print(f"JAX {jax.__version__} on {device.device_kind}, bf16; us per call, median", flush=True)
        print(f"{'op':21}{'shape':>11}  {'direction':9}" + "".join(
            f"{f'{how}: lk':>15}{'XLA':>9}{'XLA / lk':>9}" for how in ("one call", "in a loop", "in a row")), flush=True)
    for shape in shapes:
        size = "x".join(map(str, shape))
        for op, direction, state, *steps in cases(*shape, small):
            if time.time() - args.began > args.seconds:
                print(f"{op:21}{size:>11}  {direction:9} not measured: {args.seconds} s are over", flush=True)
            elif args.hlo:
                for name, step in zip(("lk", "XLA"), steps):
                    found = summary(compiled(step, state, "loop")[0].as_text())
                    print(f"{op} {size} {direction}, {name}:\n{found}", flush=True)
            elif args.flags:
                times = [microseconds(step, state, how) for how in hows[1:] for step in steps]
                print(json.dumps([op, direction, *times]), flush=True)
            else:
                times = [[microseconds(step, state, how) for step in steps] for how in hows]
                print(f"{op:21}{size:>11}  {direction:9}" + "".join(
                    f"{a:15.1f}{b:9.1f}{b / a:9.2f}" for a, b in times), flush=True)


def child(flags, shapes, args, capture):
    flags_of_all = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    env = dict(os.environ, XLA_FLAGS=flags_of_all, XLA_PYTHON_CLIENT_PREALLOCATE="false", TF_CPP_MIN_LOG_LEVEL="3",
               PYTHONPATH=f"{HERE}:{os.environ.get('PYTHONPATH', '')}",
               **({"JAX_PLATFORMS": "cpu"} if args.device == "cpu" else {}))
    command = [sys.executable, os.path.abspath(__file__), "--worker", "--device", args.device, "--seconds", str(args.seconds),
               "--began", str(args.began), "--shapes", str(shapes), *([f"--flags={flags}"] if capture else []),
               *(["--hlo"] if args.hlo else [])]
    return subprocess.run(command, env=env, text=True, **({"capture_output": True} if capture else {}))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hlo", action="store_true", help="print what XLA made of the loops at the smallest shape")
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--seconds", type=int, default=95, help="no case begins after these")
    parser.add_argument("--began", type=float, default=time.time(), help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help=argparse.SUPPRESS)
    parser.add_argument("--flags", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args)
    status = child("", 1 if args.hlo else len(SHAPES), args, False).returncode
    if not args.hlo and not status and args.device == "gpu":
        print(f"\nXLA flags at {SHAPES[0][0]}x{SHAPES[0][1]}, us per call: in a loop lk, XLA; in a row lk, XLA", flush=True)
        for flags in VARIANTS[1:]:
            if time.time() - args.began > args.seconds:
                print(f"{flags}: not measured: {args.seconds} s are over")
                continue
            found = child(flags, 1, args, True)
            print(flags, flush=True)
            for line in found.stdout.splitlines():
                if line.startswith("["):
                    op, direction, *times = json.loads(line)
                    print(f"    {op:21} {direction:9}" + "".join(f"{t:9.1f}" for t in times), flush=True)
            if found.returncode:
                print("    failed:", found.stderr.strip()[-300:], flush=True)
    print(f"bench_calls: {'failed' if status else 'done'} in {time.time() - args.began:.0f} s", flush=True)
    sys.exit(status)


if __name__ == "__main__":
    main()
