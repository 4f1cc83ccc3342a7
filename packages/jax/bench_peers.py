# SPDX-License-Identifier: MIT
"""lk beside XLA's own and tokamax in JAX, time, memory and errors: python bench_peers.py [--csv FILE] [--case TEXT]
[--provider NAME] [--device cpu]

A call is the loss and all gradients, or a norm and its gradients, in one compiled program, in bf16. XLA's cross entropy is written
in the form that XLA fuses best, as in bench_calls.py; its head has logits in float32, or, "XLA bf16", in bf16. tokamax
(bench/fetch_peers; PYTHONPATH=build/peers) is its head for GPUs, chunked_xla, with the blocks that its API takes, 1024 x 2048; its
weight is [hidden, vocab], which is how it gets it here.

call_ms    calls back to back for half a second, the mean; the median of three such turns
extra_mb   the peak of device.memory_stats() of one call beyond inputs and results, in MiB. Each provider has a process of its
           own for each case, since JAX cannot reset the peak.
temp_mb    what XLA says that the compiled program takes beside them
errors     relative, against float32 with products in full precision, by slices of 1024 rows

Rows are appended to bench/results/<gpu>-jax.csv; the newest of each key counts. --device cpu: tiny shapes on lk's simulator.
"""
import argparse
import csv
import functools
import json
import os
import statistics
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.dirname(os.path.dirname(HERE))
COLUMNS = ("op", "direction", "dtype", "case", "provider", "version", "call_ms", "errors", "extra_mb", "temp_mb", "note", "gpu",
           "commit")
HEADS = ((8192, 4096, 131072), (32768, 2560, 128256))
OTHERS = (("cross_entropy", 8192, 128256), ("rms_norm", 32768, 4096), ("add_rms_norm", 32768, 4096))
EPS = 1e-6
SECONDS = 0.5


def cases(small):
    """(op, case, sizes, providers)"""
    for op, rows, cols in OTHERS:
        rows, cols = (8, 64) if small else (rows, cols)
        yield op, f"rows={rows} {'vocab' if op == 'cross_entropy' else 'cols'}={cols}", (rows, cols), ("lk", "XLA")
    for sizes in [(16, 64, 2048)] if small else HEADS:
        yield ("linear_cross_entropy", "tokens={} hidden={} vocab={} reduction=mean".format(*sizes), sizes,
               ("lk", "XLA", "XLA bf16", "tokamax"))


def entropy(logits, target):
    import jax
    import jax.numpy as jnp
    logits = logits.astype(jnp.float32)
    own = jnp.where(jax.lax.broadcasted_iota(jnp.int32, logits.shape, 1) == target[:, None], logits, 0).sum(-1)
    return (jax.nn.logsumexp(logits, -1) - own).mean()


def head(x, weight, target):
    import jax.numpy as jnp
    return entropy(jnp.dot(x, weight.T, preferred_element_type=jnp.float32), target)


def head_in_bf16(x, weight, target):
    return entropy(x @ weight.T, target)


def norm(x, weight):
    import jax
    import jax.numpy as jnp
    s = x.astype(jnp.float32)
    return (s * jax.lax.rsqrt(jnp.mean(s * s, -1, keepdims=True) + EPS) * weight.astype(jnp.float32)).astype(x.dtype)


def add_norm(x, residual, weight):
    s = (x.astype("float32") + residual.astype("float32")).astype(x.dtype)
    return norm(s, weight), s


def tokamax_head():
    """The loss of x, weight [hidden, vocab], target."""
    import jax
    import tokamax_head as m
    blocks = dict(b_block_sz=1024, v_block_sz=2048, reduction="mean")

    def save(x, weight, target):
        loss, lse = m.linear_softmax_cross_entropy_loss_fwd_chunked_xla(x, target, weight, **blocks)
        return loss.astype("float32"), (lse, x, weight, target)

    def pull(saved, upstream):
        lse, x, weight, target = saved
        return *m.linear_softmax_cross_entropy_loss_bwd_chunked_xla(upstream, lse, x, target, weight, **blocks), None

    loss = jax.custom_vjp(lambda *inputs: save(*inputs)[0])
    loss.defvjp(save, pull)
    return loss


def function_of(op, provider):
    """(function, the plain formula)"""
    plain = {"cross_entropy": entropy, "rms_norm": norm, "add_rms_norm": add_norm, "linear_cross_entropy": head}[op]
    if provider == "tokamax":
        return tokamax_head(), plain
    if provider.startswith("XLA"):
        return head_in_bf16 if provider == "XLA bf16" else plain, plain
    import lk_jax
    return (functools.partial(getattr(lk_jax, op), eps=EPS) if op.endswith("norm") else getattr(lk_jax, op)), plain


def inputs_of(op, sizes):
    """(what is differentiated, what is not: targets, or the upstream gradients of a norm)"""
    import jax
    import jax.numpy as jnp

    def normal(seed, *shape, sigma=1.0):
        return jax.jit(lambda: sigma * jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16))()  # no array beside it

    rows, cols = sizes[0], sizes[-1]
    target = jax.random.randint(jax.random.key(9), (rows,), 0, cols, jnp.int32)
    x = normal(0, *sizes[:2])
    return {"cross_entropy": lambda: ((x,), (target,)), "rms_norm": lambda: ((x, normal(1, cols)), (normal(2, rows, cols),)),
            "add_rms_norm": lambda: ((x, normal(3, rows, cols), normal(1, cols)), (normal(2, rows, cols), normal(4, rows, cols))),
            "linear_cross_entropy": lambda: ((x, normal(1, cols, sizes[1], sigma=sizes[1]**-0.5)), (target,))}[op]()


def with_gradients(op, f):
    """call(inputs, others): the outputs, and the inputs' gradients."""
    import jax

    def of_norm(inputs, upstream):
        outputs, pull = jax.vjp(f, *inputs)
        return outputs, pull(upstream if isinstance(outputs, tuple) else upstream[0])

    def of_loss(inputs, target):
        return jax.value_and_grad(f, tuple(range(len(inputs))))(*inputs, *target)

    return of_norm if op.endswith("norm") else of_loss


def errors_of(op, plain, results, inputs, others):
    """By slices of rows: what has as many rows is sliced, the gradients of weights are summed."""
    import jax
    import jax.numpy as jnp
    rows, step = len(inputs[0]), min(1024, len(inputs[0]))

    @jax.jit
    def right(*given):
        with jax.default_matmul_precision("highest"):
            return jax.tree.leaves(with_gradients(op, plain)(given[:len(inputs)], given[len(inputs):]))

    def slices(arrays, at):
        return [a[at:at + step] if len(a) == rows else a for a in arrays]

    parts, mean = None, 1.0 if op.endswith("norm") else step / rows
    found, given = jax.tree.leaves(results), [a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a for a in (*inputs, *others)]
    off, size, sums = [0.0] * len(found), [0.0] * len(found), {}
    for at in range(0, rows, step):
        parts = right(*slices(given, at))
        for k, (part, mine) in enumerate(zip(parts, found)):
            if mine.ndim and len(mine) == rows:
                off[k] += float(jnp.sum((mine[at:at + step].astype(jnp.float32) - part * mean)**2))
                size[k] += float(jnp.sum((part * mean)**2))
            else:
                sums[k] = sums.get(k, 0) + part * mean
    for k, total in sums.items():
        off[k], size[k] = (float(jnp.sum(v**2)) for v in (found[k].astype(jnp.float32) - total, total))
    names = {"cross_entropy": "loss dlogits", "rms_norm": "y dx dweight", "add_rms_norm": "y residual_out dx dresidual dweight",
             "linear_cross_entropy": "loss dx dweight"}[op].split()
    return " ".join(f"{name}={(a / b)**0.5:.2e}" for name, a, b in zip(names, off, size))


def worker(args):
    """The child process: one case of one provider; prints its columns as JSON."""
    import jax
    sys.path.insert(0, HERE)
    op, _, sizes, _ = next(case for case in cases(args.device == "cpu") if case[1] == args.case and case[0] == args.op)
    device = jax.devices()[0]
    version = f"JAX {jax.__version__}"
    if args.worker == "lk":
        version = f"lk_jax {args.commit}; {version}"
    if args.worker == "tokamax":
        import importlib.metadata
        version = f"tokamax {importlib.metadata.version('tokamax')}; {version}"
    f, plain = function_of(op, args.worker)
    inputs, others = inputs_of(op, sizes)
    own = (inputs[0], inputs[1].T.copy()) if args.worker == "tokamax" else inputs
    if args.worker == "tokamax":
        inputs = None
    jax.block_until_ready((own, others))
    program = jax.jit(with_gradients(op, f)).lower(own, others).compile()
    row = {"version": version, "gpu": device.device_kind}

    def memory(key):
        return (device.memory_stats() or {}).get(key)

    before, peak = memory("bytes_in_use"), memory("peak_bytes_in_use")
    results = jax.block_until_ready(program(own, others))
    if before is not None:
        bytes_of = sum(a.nbytes for a in jax.tree.leaves(results))
        row["extra_mb"] = f"{max(0, memory('peak_bytes_in_use') - before - bytes_of) / 2**20:.6g}"
        row["note"] = "extra_mb is at most that: the peak is of XLA's own trials" * (memory("peak_bytes_in_use") == peak)
    analysis = program.memory_analysis()
    row["temp_mb"] = f"{analysis.temp_size_in_bytes / 2**20:.6g}" if analysis else ""
    if args.worker == "tokamax":
        inputs, results = (own[0], own[1].T), (results[0], (results[1][0], results[1][1].T))
    row["errors"] = errors_of(op, plain, results, inputs, others)
    results = None
    times = []
    for turn in range(4):
        count = 1 if turn == 0 or args.device == "cpu" else max(3, min(2000, int(1e3 * SECONDS / times[0])))
        start = time.perf_counter()
        for _ in range(count):
            results = program(own, others)
        jax.block_until_ready(results)
        times.append((time.perf_counter() - start) / count * 1e3)
    row["call_ms"] = f"{statistics.median(times[1:]):.5g}"
    print(json.dumps(row), flush=True)


def child(args, op, case, provider):
    """The columns that a child measured, or a note why there are none."""
    env = dict(os.environ, XLA_PYTHON_CLIENT_PREALLOCATE="false", XLA_PYTHON_CLIENT_MEM_FRACTION="0.95", TF_CPP_MIN_LOG_LEVEL="3",
               **({"JAX_PLATFORMS": "cpu"} if args.device == "cpu" else {}))
    command = [sys.executable, os.path.abspath(__file__), "--worker", provider, "--op", op, "--case", case, "--device", args.device,
               "--commit", args.commit]
    try:
        found = subprocess.run(command, env=env, text=True, capture_output=True, timeout=args.seconds)
    except subprocess.TimeoutExpired:
        return {"note": f"failed: more than {args.seconds} s"}
    lines = [line for line in found.stdout.splitlines() if line.startswith("{")]
    if found.returncode or not lines:
        last = (found.stderr.strip().splitlines() or ["no output"])[-1]
        return {"note": f"failed: {' '.join(last.replace(',', ';').split())[:200]}"}
    return json.loads(lines[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--csv", help="instead of bench/results/<gpu>-jax.csv; build/cpu-jax.csv with --device cpu")
    parser.add_argument("--case", default="", help="only cases whose op and name hold this")
    parser.add_argument("--provider", default="", help="only this one: lk, XLA, tokamax")
    parser.add_argument("--device", choices=["gpu", "cpu"], default="gpu")
    parser.add_argument("--seconds", type=int, default=60, help="a provider may take for a case")
    parser.add_argument("--commit", default=os.environ.get("COMMIT", ""))
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--op", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        return worker(args)
    args.commit = args.commit or subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True,
                                                cwd=HERE).stdout.strip() or "none"
    shown = [c for c in COLUMNS if c not in ("direction", "dtype", "version", "gpu", "commit")]
    print("| " + " | ".join(shown) + " |", flush=True)
    failed = 0
    for op, case, _, names in cases(args.device == "cpu"):
        for provider in names if args.case in f"{op} {case}" else ():
            if args.provider not in ("", provider):
                continue
            row = {**dict.fromkeys(COLUMNS, ""), "op": op, "direction": "forward_backward", "dtype": "bf16", "case": case,
                   "provider": provider, "commit": args.commit, **child(args, op, case, provider)}
            row["gpu"] = row["gpu"].removeprefix("NVIDIA ").lower().translate(str.maketrans(" /,", "---"))
            print("| " + " | ".join(row[c] for c in shown) + " |", flush=True)
            failed += not row["call_ms"]
            if row["gpu"]:
                folder = "build" if args.device == "cpu" else "bench/results"
                path = args.csv or f"{ROOT}/{folder}/{row['gpu']}-jax.csv"
                new = not os.path.exists(path)
                with open(path, "a", newline="") as file:
                    writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                    if new:
                        writer.writeheader()
                    writer.writerow(row)
    print(f"bench_peers: {failed} failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
