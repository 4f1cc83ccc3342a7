#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""summary.py RESULTS.csv COMPARE.csv README.md: writes README's table of ops, its plot of linear_cross_entropy's time against
memory, where that was measured, and its list of losses between their marks.

An op's line: what its header's second line says it computes; of the largest case of forward, backward and both, ceiling / lk (for
linear_cross_entropy the matmuls alone / lk), here and on an H100; over all cases compared, the best other library's kernels / lk's.
Ops that were compared on an H100 have those rows here, which are newer.
"""
import collections, csv, pathlib, re, sys

import plot

H100, H100_COMPARE = "bench/results/h100.csv", "bench/results/h100-compare.csv"
DIRECTIONS = ("forward", "backward", "forward_backward")


def what(op):
    """What the header's first sentence says."""
    lines = pathlib.Path(f"lk/{op}.cuh").read_text().split("\n")
    text = " ".join(line.lstrip("/* ") for line in lines[1:4])
    return re.match(rf"{op}\.cuh - (.*?)\.( |$)", text)[1]


def shares(path):
    """{op: {direction: (share, mark)}} of the largest plain case. Of cases that differ by rounding alone the first one counts."""
    largest = collections.defaultdict(dict)
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            share = row["of_gemm"] or row["of_ceiling"]
            if row["provider"] != "lk" or not share or re.search(r" (workspace|path|lse_low|target_prob|offset|bias|groups)=", row["case"]):
                continue
            rate = row["tflop_per_s"] or row["gb_per_s"]
            size = float(rate) * float(row["ms"])
            mark = "†" if "invalid" in row.get("note", "") else ""
            if size > 1.001 * largest[row["op"]].get(row["direction"], (0,))[0]:
                largest[row["op"]][row["direction"]] = size, float(share), mark
    return largest


def ratios(groups):
    """{(op, direction): [best other / lk]} of the kernels alone."""
    found = collections.defaultdict(list)
    for (op, case, direction), row_of in groups.items():
        mine = plot.number(row_of["lk"]["kernel_ms"]) if "lk" in row_of else None
        _, theirs = plot.best(row_of, "kernel_ms")
        if mine and theirs:
            found[op, direction].append(theirs / mine)
    return found


def table(results, groups):
    largest, ratio, h100 = shares(results), ratios(groups), shares(H100)
    yield "| op | what it computes | of ceiling on an H200: forward, backward, both | of ceiling on an H100 | best other / lk: forward, backward, both |"
    yield "|---|---|---|---|---|"
    for op in sorted(largest):
        of, there = (", ".join(f"{share[1]:.2f}{share[2]}" if share else "-" for share in map(card[op].get, DIRECTIONS))
                     if op in card else "not measured" for card in (largest, h100))
        peers = [ratio.get((op, d)) for d in DIRECTIONS]
        other = ", ".join(f"{min(p):.2f} to {max(p):.2f}" if p else "-" for p in peers)
        yield f"| [{op}](lk/{op}.cuh) | {what(op)} | {of} | {there} | {other} |"


def losses(rows, newer, path):
    """`newer`: rows of H100_COMPARE, which stand for all rows of their ops."""
    ops = sorted({row["op"] for row in newer})
    older, stem = [row for row in rows if row["op"] not in ops], path.removesuffix(".csv")
    kernels, count, compared = plot.slower(plot.grouped(older + newer), "kernel_ms")
    how, _, called, calls = plot.called(older, path)
    _, _, called_newer, calls_newer = plot.called(newer, H100_COMPARE)
    yield f"lk's kernels are more than {plot.SLOWER - 1:.0%} slower than the best other library's in {count} of {compared} cases (\\*: timed by a profiler, without gaps between kernels). The four worst groups, and calls from Python:"
    yield ""
    yield from kernels[:4]
    yield f"- Called from Python, lk is more than {plot.CALLS_SLOWER - 1:.0%} slower in {called_newer} of {calls_newer} cases of {', '.join(ops)}"
    yield f"  and in {called} of {calls} of the other ops ({how})."
    yield ""
    yield f"{', '.join(ops)} was compared on an H100 at {plot.commits_of(newer)}, the other ops on an H200 at {plot.commits_of(older)};"
    yield "each page lists all cases of its card. The H200's page also names the ops whose code has changed since."
    yield ""
    yield (f"[All losses, plots and errors]({stem}.md), [those of the H100]({H100_COMPARE.removesuffix('.csv')}.md) · "
           f"[all of lk's own rows]({stem.removesuffix('-compare')}.md)")


def put(text, mark, lines):
    begin, end = f"<!-- {mark} -->", f"<!-- end of {mark} -->"
    head, rest = text.split(begin, 1)
    return head + begin + "\n" + "\n".join(lines) + "\n" + end + rest.split(end, 1)[1]


def main():
    if len(sys.argv) != 4:
        sys.exit(__doc__)
    results, compare, path = sys.argv[1:]
    rows, newer = plot.with_calls(compare), plot.read(H100_COMPARE)
    ops = {row["op"] for row in newer}
    readme = pathlib.Path(path)
    compared = plot.grouped([row for row in rows if row["op"] not in ops] + newer)
    text = put(readme.read_text(), "table", table(results, compared))
    text = put(text, "frontier", plot.frontier_lines(H100_COMPARE))
    readme.write_text(put(text, "losses", losses(rows, newer, compare)))
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
