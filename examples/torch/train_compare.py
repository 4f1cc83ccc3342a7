#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Trains the GPT of train.py with PyTorch's operations and with lk's, and compares speed, memory and loss curves.

    train_compare.py --csv F --plot F.svg    PyTorch and lk, eager and compiled, one after another, in at most --budget seconds
    train_compare.py --from-csv F --plot F.svg   the tables and the plot once more, from the rows of such a run, without a GPU
    train_compare.py --check                 a test of some seconds, on a CPU too: lk and PyTorch have the same curves
"""
import csv
import importlib.util
import multiprocessing
import sys
import time

from train import SHARES, chosen, complete, milliseconds, name_of, parser_of, text, tokenise, train


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
            for panel, value, label in ((speed, run[0]["tokens"] / ms, "{:.0f}" + ratio),
                                       (memory, run[0]["peak_mib"] / 1024, "{:.1f}")):
                panel.bar_label(panel.bar(place, value, 0.19, color=colour), fmt=label, fontsize=8.5, padding=2)
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


def arguments():
    parser = parser_of("train_compare.py [options]; --help lists them", __doc__)
    add = parser.add_argument
    add("--budget", type=float, default=240, metavar="SECONDS", help="ends the comparison in time; it says what it left out")
    add("--check", action="store_true", help="exit status 1 where lk and PyTorch do not agree; implies --tiny")
    add("--vocab", type=int, nargs="+", help="50257 and 128256")
    add("--plot", metavar="FILE", help="draw losses, speed and memory; needs matplotlib")
    add("--from-csv", metavar="FILE", help="run nothing: table and plot of the rows that are there")
    options = parser.parse_args()
    options.tiny = options.tiny or options.check
    if options.plot and not importlib.util.find_spec("matplotlib"):
        parser.error("--plot needs matplotlib; write a --csv here, and use --from-csv and --plot where matplotlib is")
    options = complete(parser, options, not options.from_csv, steps=80, every=20, vocab=[50257, 128256])
    if not isinstance(options.vocab, list):
        options.vocab = [options.vocab]
    return options


def main():
    options = arguments()
    if options.check:
        options.shares = False
        passed, wrong = check(options, text(options))
        print(f"{passed} passed, {wrong} failed")
        sys.exit(wrong > 0)
    left_out, failed = [], []
    if options.from_csv:
        with open(options.from_csv, newline="") as file:
            rows = list(csv.DictReader(file))
        if not rows:
            sys.exit(f"{options.from_csv} has no rows")
        report(rows)
    else:
        rows, left_out, failed = compare(options, text(options))
    if options.plot and rows:
        plot(rows, options.plot)
    for what, names in (("left out for lack of time", left_out), ("failed", failed)):
        if names:
            print(f"{what}: {'; '.join(names)}")
    print(f"done in {time.perf_counter() - options.began:.0f} s" if not failed else f"{len(failed)} variants FAILED")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
