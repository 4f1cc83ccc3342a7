#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""summary.py RESULTS.csv COMPARE.csv README.md PAGE.md: writes between the marks of both files what the CSVs say.

README.md   table     an op a line: what it computes; time and share of the limit of the largest case that was compared, forward
                      and backward; how many times as long the next best library takes
            reference where lk stands beside xopes, where its ops come from
            frontier  the plot of linear_cross_entropy's time against its memory, where that was measured
            losses    in how many cases another library is faster
            hunt      what `make hunt` found, a sentence a card; nothing before a card was measured
PAGE.md     table     an op and direction a line, with the range of all cases compared
            losses    the cases in which another library is faster
            hunt      a table a card, worst first

The limit is the time of a kernel that only moves the same bytes; for linear_cross_entropy, of the matmuls alone. Ops that COMPARE
does not have are those of an H100's CSV.
"""
import collections
import csv
import os
import pathlib
import re
import sys

import plot

XOPES, XOPES_PAGE = "bench/results/*-reference.csv", "bench/results/reference.md"
HUNTS = "bench/results/*-hunt.csv"
H100, H100_COMPARE = "bench/results/h100.csv", "bench/results/h100-compare.csv"
# What an op computes, for someone who has not met it, and how README writes its sizes. An op that is not here: its header's sentence.
OPS = {
    "cross_entropy": ("a classifier's loss from its logits: PyTorch's `F.cross_entropy`, with options of language models such as "
                      "z-loss and softcap", "{rows} x {vocab}"),
    "glu": ("the activation of an MLP times its other half: SwiGLU, GeGLU and their kin, gpt-oss' too", "{rows} x {cols}"),
    "kl": ("Kullback-Leibler divergence of a teacher's and a student's logits, the loss of distillation: forward, reverse, "
           "Jensen-Shannon; and total variation", "{rows} x {vocab}"),
    "linear_cross_entropy": ("a language model's last layer (LM head) and its cross entropy, fused: never stores all logits",
                             "{tokens} tokens, hidden {hidden}, vocabulary {vocab}"),
    "linear_kl": ("Kullback-Leibler divergence of two LM heads, a teacher's and a student's, from their hidden states: never stores all "
                  "logits of either", "{tokens} tokens, hidden {hidden} and {teacher}, vocabulary {vocab}"),
    "logsumexp": ("the log of a sum of exponentials, over any one dimension of a tensor", "{rows} x {cols}"),
    "md_lrpe_cosine": ("position encoding for linear attention, similar to RoPE: multiplies features by the cosine and sine of a "
                       "position's angle. Tokens lie on a grid of 1 to 8 axes: text, images, video", "{batch} x {heads} x {shape} x {dim}"),
    "rope": ("rotary position embedding of queries and keys in one launch, with or without a norm of each head",
             "{tokens} tokens, {heads} heads of {dim}"),
    "srms_norm": ("RMSNorm with weight, bias and residual; each of the three can be left out", "{rows} x {cols}"),
    "srms_norm_gated": ("RMSNorm with a gate of each element, as Mamba-2 and Gated DeltaNet have it", "{rows} x {cols}"),
}
EXTRAS = re.compile(r" (workspace|path|lse_low|target_prob|offset|bias|groups|weights|ids|divergence|fast_logits|dlogits|upstream|"
                    r"halves|interleaved|activation|row_weight|rotary|norm|tables|positions|gate_first)=")  # no plain case


def what(op):
    if op in OPS:
        return OPS[op][0]
    text = " ".join(line.lstrip("/* ") for line in pathlib.Path(f"lk/{op}.cuh").read_text().split("\n")[1:4])
    return re.match(rf"{op}\.cuh - (.*?)\.( |$)", text)[1]


Case = collections.namedtuple("Case", "name ms limit size")  # of a results CSV; size: what it moves, or multiplies


def read_results(path):
    """{op: {direction: {name: Case}}} of the plain cases in bf16. A name is as the compare CSVs have it."""
    rows = collections.defaultdict(dict)
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            if row["dtype"] == "bf16" and not EXTRAS.search(row["case"]):
                name = row["case"]
                if row["op"] == "linear_cross_entropy":
                    name = name.replace(" dweight=bf16", " reduction=mean")
                rows[row["op"], row["direction"], name][row["provider"]] = row
    found = collections.defaultdict(lambda: collections.defaultdict(dict))
    for (op, direction, name), row_of in rows.items():
        lk, limit = row_of.get("lk"), row_of.get("bare") or row_of.get("ceiling")
        if lk and limit:
            size = float(lk["tflop_per_s"] or lk["gb_per_s"]) * float(lk["ms"])
            found[op][direction][name] = Case(name, float(lk["ms"]), float(limit["ms"]), size)
    return found


def both(directions):
    """Forward and backward: one call where there is such a call, else the sum of two."""
    forward, backward = directions["forward"], directions["backward"]
    return directions["forward_backward"] or {name: Case(name, *(a + b for a, b in zip(case[1:], backward[name][1:])))
                                              for name, case in forward.items() if name in backward}


def largest(cases):
    """Of cases that differ by rounding alone the first one."""
    most = None
    for case in cases:
        if most is None or case.size > 1.001 * most.size:
            most = case
    return most


def next_best(row_of):
    """(the fastest other library, its time over lk's) of the kernels alone, or None."""
    mine = plot.number(row_of["lk"]["kernel_ms"]) if "lk" in row_of else None
    name, theirs = plot.best(row_of, "kernel_ms")
    return (name, theirs / mine) if mine and theirs else None


def card_of(row):
    return row["gpu"].split("-")[0].upper()


def readme_table(results, groups, card):
    yield f"| op | what it computes | largest case on an {card}: time, share of the limit | next best: its time / lk's |"
    yield "|---|---|---|---|"
    for op in sorted(results):
        cases = both(results[op])
        compared = {case: row_of for (of, case, direction), row_of in groups.items()
                    if (of, direction) == (op, "forward_backward") and case in cases and next_best(row_of)}
        case = largest([cases[name] for name in cases if name in compared] or list(cases.values()))
        if case is None:  # a header with forward alone: the pages of bench/results have it
            continue
        sizes = OPS[op][1].format(**plot.parts(case.name)) if op in OPS else case.name
        times = "not measured"
        if case.name in compared:
            (name, ratio), there = next_best(compared[case.name]), card_of(compared[case.name]["lk"])
            times = f"{ratio:.2f} ({name}{f', on an {there}' if there != card else ''})"
        yield f"| [{op}](lk/{op}.cuh) | {what(op)} | {sizes}: {case.ms:.3g} ms, {case.limit / case.ms:.0%} | {times} |"


def page_table(results, older, groups, card):
    """`older`: the results of another card."""
    yield f"| op | direction | largest case | ms | share of the limit on an {card} | on an H100 | times the next best, all cases |"
    yield "|---|---|---|---|---|---|---|"
    for op in sorted(results):
        for direction in plot.DIRECTIONS:
            if not both(results[op]) and not results[op].get(direction):
                continue  # a header with forward alone
            of_all = [both(measured[op]) if direction == "forward_backward" else measured[op][direction] for measured in (results, older)]
            case, there = (largest(cases.values()) for cases in of_all)
            ratios = [next_best(row_of)[1] for (of, _, way), row_of in groups.items()
                      if (of, way) == (op, direction) and next_best(row_of)]
            share, other = (f"{c.limit / c.ms:.2f}" if c else "-" for c in (case, there))
            name, ms = (case.name, f"{case.ms:.4g}") if case else ("-", "-")
            times = f"{plot.span(ratios)} ({len(ratios)} cases)" if ratios else "-"
            yield f"| [{op}](../../lk/{op}.cuh) | {plot.TITLE[direction]} | {name} | {ms} | {share} | {other} | {times} |"


def frontier(path):
    stem = path.replace("-compare.csv", "-frontier")
    if os.path.exists(f"{stem}.svg"):
        card = os.path.basename(stem).split("-")[0].upper()
        yield ("linear_cross_entropy also runs in less memory, and is slower then. In the plot "
               f"({card}), each point of lk is one size of the workspace (its")
        yield "scratch memory). *lk*: one call. *lk separate*: a forward call, then a backward call that recomputes the logits."
        yield ""
        yield plot.picture(stem, "linear_cross_entropy: time against memory, lk with workspaces of several sizes, and others")


def readme_losses(groups, older):
    """older: lk's code has changed since the comparison."""
    found = {key: next_best(row_of)[1] for key, row_of in groups.items() if next_best(row_of)}
    slow = {key: ratio for key, ratio in found.items() if plot.SLOWER * ratio < 1}
    if not slow:
        yield f"In none of {len(found)} compared cases another library is more than {plot.SLOWER - 1:.0%} faster."
        return
    (op, most), = collections.Counter(key[0] for key in slow).most_common(1)
    yield (f"In [{len(slow)} of {len(found)} cases](bench/results/README.md#where-another-library-is-faster) another library is more "
           f"than {plot.SLOWER - 1:.0%} faster, {most} of them {op}. In the worst, lk takes {1 / min(slow.values()):.2f} times the other's time."
           + older * " These cases, and the last column of the table, compare an earlier version of lk: the page says which.")


def page_losses(rows, newer, path):
    """`newer`: rows of H100_COMPARE, which stand for all rows of their ops."""
    ops = sorted({row["op"] for row in newer})
    older, stem = [row for row in rows if row["op"] not in ops], os.path.basename(path).removesuffix(".csv")
    kernels, count, compared = plot.slower(plot.grouped(older + newer), "kernel_ms")
    how, _, called, calls = plot.called(older, path)
    yield f"lk's kernels are more than {plot.SLOWER - 1:.0%} slower than the fastest other library's in {count} of {compared} cases:"
    yield ""
    yield from kernels
    yield ""
    yield "\\*: timed by a profiler, which does not count the gaps between kernels."
    yield ""
    yield f"Called from Python, lk is more than {plot.SLOWER - 1:.0%} slower in {called} of {calls} cases ({how})" + ("" if newer else ".")
    if newer:
        _, _, called_newer, calls_newer = plot.called(newer, H100_COMPARE)
        yield f"and in {called_newer} of {calls_newer} cases of {', '.join(ops)}. That op was compared on an H100, at {plot.commits_of(newer)}. The other"
        yield f"ops were compared on an {card_of(older[0])}, at {plot.commits_of(older)}."
    else:
        yield f"All was compared at {plot.commits_of(older)}."
    yield f"[{stem}.md]({stem}.md) lists those cases, and the ops whose code has changed since."


def hunts():
    """(card, rows) of each card that `make hunt` measured."""
    for path in sorted(map(str, pathlib.Path().glob(HUNTS)), reverse=True):
        with open(path, newline="") as file:
            rows = list(csv.DictReader(file))
        if rows:
            yield card_of(rows[0]), rows


QUESTIONS = {"torch": ("beside PyTorch", "1.05 times PyTorch's time"),
             "neighbour": ("beside a shape a little larger", "1.15 times the time of a shape a little larger"),
             "layout": ("beside packed rows without options", "1.15 times the time of packed rows without options")}


def hunt_sentence(rows):
    """How many cases of each question fall short."""
    parts = []
    for question, (_, limit) in QUESTIONS.items():
        mine = [row for row in rows if row["question"] == question]
        if mine:
            short, cases = (sum(int(row[name]) for row in mine) for name in ("short", "cases"))
            parts.append(f"{short} of {cases} calls take more than {limit}")
    return "; ".join(parts) + ", or than what bench/hunt.py allows where it says why"


def readme_hunt():
    for card, rows in hunts():
        yield (f"At shapes, types, options and layouts that `make hunt` drew on an {card} ({rows[0]['commit']}), {hunt_sentence(rows)}. "
               "[Which](bench/results/README.md#what-the-hunt-finds)")


def page_hunt():
    for card, rows in hunts():
        yield (f"{card}, at {rows[0]['commit']}, seed {rows[0]['seed']}, {rows[0]['seconds']} s: {hunt_sentence(rows)}. Geometric means of each "
               f"call ([CSV]({rows[0]['gpu']}-hunt.csv)):")
        yield ""
        yield "| | call | direction | cases | above 1.05 | above 1.15 | fall short | mean | worst | its limit | at |"
        yield "|---|---|---|---|---|---|---|---|---|---|---|"
        for row in rows:
            yield "| " + " | ".join([QUESTIONS[row["question"]][0], *(row[name] for name in (
                "call", "direction", "cases", "above_1.05", "above_1.15", "short", "mean", "worst", "worst_limit", "worst_case"))]) + " |"
        yield ""


def put(text, mark, lines):
    begin, end = f"<!-- {mark} -->", f"<!-- end of {mark} -->"
    head, rest = text.split(begin, 1)
    return head + begin + "\n" + "".join(f"{line}\n" for line in lines) + end + rest.split(end, 1)[1]


def main():
    if len(sys.argv) != 5:
        sys.exit(__doc__)
    results, compare, readme, page = sys.argv[1:]
    rows = plot.with_calls(compare)
    ops = {row["op"] for row in rows}
    newer = [row for row in plot.read(H100_COMPARE) if row["op"] not in ops]
    groups, measured, older = plot.grouped(rows + newer), read_results(results), read_results(H100)
    card, commit = card_of(rows[0]), plot.commits_of(plot.read(results))
    beside = max(map(str, pathlib.Path().glob(XOPES)), default="")  # an H200's before an H100's
    for path, parts in ((readme, {"table": readme_table(measured, groups, card), "frontier": frontier(compare),
                                  "reference": plot.reference_line(beside, XOPES_PAGE),
                                  "losses": readme_losses(groups, plot.commits_of(rows) != commit), "hunt": readme_hunt()}),
                        (page, {"table": page_table(measured, older, groups, card), "losses": page_losses(rows, newer, compare),
                                "hunt": page_hunt()})):
        text = pathlib.Path(path).read_text()
        for mark, lines in parts.items():
            text = put(text, mark, lines)
        pathlib.Path(path).write_text(text)
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
