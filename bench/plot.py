#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What bench/compare.py measured, as plots and tables: `make compare-plots`.

    plot.py CSV            writes CSV's Markdown tables beside it, and plots for light and dark pages; the plots
                           need matplotlib
    plot.py --readme CSV   prints the section at the head of that page (bench/readme puts it in its place)
    plot.py --ladder CSV README
                           writes what `make bench-ladder` measured: tables into README, between two marks, and a plot beside
                           CSV, `make ladder-plots`
    plot.py --scaling CSV REAL...
                           a plot beside CSV of what `make bench-parallel` measured: a GPU that plays one rank of P (CSV), and
                           that many GPUs (REAL, a file for each number of them), `make scaling-plots`

    plot.py --reference CSV PAGE
                           writes PAGE: lk beside xopes on the shapes of xopes' benchmark pages, which
                           `compare.py --reference` measured, `make reference`

CSV is <gpu>-compare.csv. Calls from Python are those of <gpu>-calls.csv beside it, as far as that has them. The plots of time
against memory and their page are from <gpu>-frontier.csv, which bench/frontier.py measures, where that is there.

A plot is an op: a column a direction, time above, share of the ceiling below. Lines are the reference tables' shapes, hollow
marks others. Full lines are the kernels alone, dotted ones calls from Python. linear_cross_entropy has time against memory
instead.
"""
import collections
import csv
import os
import sys

DIRECTIONS = ("forward", "backward", "forward_backward")
TITLE = {"forward": "forward", "backward": "backward", "forward_backward": "forward + backward"}
# Ratios from which on lk counts as slower, kernels alone and calls alike; and as less accurate: what runs differ by, and errors.
SLOWER, WORSE = 1.02, 1.05
WRONG = 0.5  # a relative error from which on a result is none, and its time is not compared


def key_of(row):
    return row["op"], row["direction"], row["case"], row["provider"]


def read(path):
    """The newest row of each key, in order of first appearance."""
    rows = {}
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            rows[key_of(row)] = row
    return list(rows.values())


def calls_of(path):
    """The rows of compare.py --calls, with the errors of the compare CSV beside it, so that wrong results do not count. None
    where there is no such file."""
    if not os.path.exists(path):
        return []
    compare, rows = path.replace("-calls", "-compare"), read(path)
    known = {key_of(row): row.get("errors", "") for row in read(compare)} if os.path.exists(compare) else {}
    return [{**row, "errors": known.get(key_of(row), "")} for row in rows]


def with_calls(path):
    """The rows of the compare CSV, with the calls of compare.py --calls where its CSV has them. It leaves out what compiles for
    seconds where lk's call is long; the compare CSV's own calls stay there, by the same clock."""
    rows, timed = read(path), {key_of(row): row["call_ms"] for row in calls_of(path.replace("-compare", "-calls"))}
    return [{**row, "call_ms": timed.get(key_of(row), row["call_ms"])} for row in rows]


def number(text):
    try:
        return float(text)
    except ValueError:
        return None


def parts(case):
    return dict(part.split("=", 1) for part in case.split())


def errors_of(row):
    return {name: number(value) for name, value in (part.split("=") for part in row.get("errors", "").split())}


def unique(values):
    return list(dict.fromkeys(values))


def grouped(rows):
    """{(op, case, direction): {provider: row}}"""
    groups = {}
    for row in rows:
        if row["direction"]:
            groups.setdefault((row["op"], row["case"], row["direction"]), {})[row["provider"]] = row
    return groups


# ---- Plots ------------------------------------------------------------------------------------------------------------------


def axes_of(case):
    return case.get("shape", "").count("x") + 1


def tokens_of(case):
    product = 1
    for size in case["shape"].split("x"):
        product *= int(size)
    return product


PLOTTED = ("4096", "8192")  # rows
# Name, op, which cases are meant at all, which of them form the line, the size, its name, what the hollow marks are.
FIGURES = (
    ("logsumexp", "logsumexp", lambda c: c["rows"] in PLOTTED and "upstream" not in c, lambda c: c["rows"] == "4096",
     lambda c: int(c["cols"]), "columns", "4096 rows; hollow: 8192 rows"),
    ("cross_entropy", "cross_entropy", lambda c: c["rows"] in PLOTTED and "upstream" not in c and c["reduction"] == "mean",
     lambda c: c["rows"] == "4096", lambda c: int(c["vocab"]), "vocabulary", "mean, 4096 rows; hollow: 8192 rows"),
    ("srms_norm", "srms_norm", lambda c: c["residual"] == "0" and c["cols"] == "2048", lambda c: "weight" not in c,
     lambda c: int(c["rows"]), "rows", "2048 columns; hollow: with weight"),
    ("srms_norm-residual", "srms_norm", lambda c: c["residual"] == "1" and c["cols"] == "2048", lambda c: "weight" not in c,
     lambda c: int(c["rows"]), "rows", "residual in and out, 2048 columns; hollow: with weight"),
    ("md_lrpe_cosine", "md_lrpe_cosine", lambda c: c["prefix"] == "0" and c["batch"] == "12", lambda c: axes_of(c) == 1,
     tokens_of, "tokens", "batch 12, 12 heads, dim 128; 1 axis; hollow: 2 and 3 axes"),
)
STYLES = {  # colour on light, colour on dark, mark
    "lk": ("#d1410c", "#ff7b4a", "o"),
    "torch": ("#6b7280", "#9ca3af", "s"),
    "torch.compile": ("#0a64b4", "#58a6ff", "^"),
    "torch.rms_norm": ("#0e9bb5", "#4dd0e1", "v"),
    "liger": ("#15803d", "#4ade80", "D"),
    "fla": ("#9333a8", "#d38bea", "P"),
    "quack": ("#c2185b", "#ff7eb6", "<"),
    "lk separate": ("#e59a7a", "#a85c3f", "o"),
    "liger Triton": ("#15803d", "#4ade80", "D"),
    "liger FLSCE": ("#0f766e", "#2dd4bf", "d"),
    "liger FLCE": ("#65a30d", "#a3e635", "h"),
    "liger Triton 4": ("#15803d", "#4ade80", "D"),
    "liger Triton 16": ("#15803d", "#4ade80", "D"),
    "torch2.15 chunks": ("#374151", "#d1d5db", "X"),
    "torch2.15 CuTe": ("#b45309", "#fbbf24", "X"),
}
THEMES = {"": {"background": "#ffffff", "ink": "#1f2328", "grid": "#d8dee4"},
          "-dark": {"background": "#0d1117", "ink": "#e6edf3", "grid": "#30363d"}}


def short(size, _=None):
    size = int(round(size))
    return f"{size >> 10}k" if size >= 1024 and size % 1024 == 0 else str(size)


def set_text(plt, ink):
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "lk", "font.size": 9, "text.color": ink, "axes.edgecolor": ink,
                         "axes.labelcolor": ink, "xtick.color": ink, "ytick.color": ink})


def set_panel(panel, theme):
    panel.set_facecolor(theme["background"])
    panel.grid(True, color=theme["grid"], linewidth=0.7)
    panel.set_axisbelow(True)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)


def draw(plt, ticker, rows, figure, theme, path):
    _, op, meant, lined, size_of, label, subtitle = figure
    rows = [row for row in rows if row["op"] == op and row["direction"] and row["case"] and meant(parts(row["case"]))]
    providers = [p for p in unique(row["provider"] for row in rows) if p in STYLES]
    directions = [d for d in DIRECTIONS if any(row["direction"] == d and number(row["kernel_ms"]) for row in rows)]
    if not directions:
        return False
    ink, dark = theme["ink"], theme is THEMES["-dark"]
    set_text(plt, ink)
    plot, panels = plt.subplots(2, len(directions), figsize=(1.2 + 3.6 * len(directions), 6.6), squeeze=False, sharex=True,
                                sharey="row", facecolor=theme["background"])
    shown = {}
    for column, direction in enumerate(directions):
        time, share = panels[0][column], panels[1][column]
        for provider in sorted(providers, key="lk".__eq__):  # lk last, on top
            colour, marker = STYLES[provider][dark], STYLES[provider][2]
            look = dict(color=colour, linewidth=2.4 if provider == "lk" else 1.3, markersize=5.5 if provider == "lk" else 4.5)
            mine = [row for row in rows if row["provider"] == provider and row["direction"] == direction]
            for panel, value, style in ((time, "kernel_ms", "-"), (time, "call_ms", ":"), (share, "of_ceiling", "-")):
                line, marks = [], []
                for row in mine:
                    case = parts(row["case"])
                    if number(row[value]):
                        (line if lined(case) else marks).append((size_of(case), number(row[value])))
                if style == ":":
                    panel.plot(*zip(*sorted(line)) if line else ((), ()), ":", color=colour, linewidth=1, alpha=0.75)
                    continue
                drawn = panel.plot(*zip(*sorted(line)) if line else ((), ()), "-", marker=marker, **look)
                panel.plot(*zip(*sorted(marks)) if marks else ((), ()), linestyle="none", marker=marker, color=colour,
                           markerfacecolor="none", markersize=look["markersize"] + 1)
                if mine:
                    shown[provider] = drawn[0]
        time.set_title(TITLE[direction], color=ink)
        time.set_xscale("log", base=2)
        time.set_yscale("log")
        time.minorticks_off()
        time.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        share.xaxis.set_major_formatter(ticker.FuncFormatter(short))
        share.set_xlabel(label)
        share.axhline(1.0, color=ink, linewidth=0.8, linestyle="--")
        share.set_ylim(0, max([1.08] + [1.05 * (number(row["of_ceiling"]) or 0) for row in rows]))
        for panel in (time, share):
            set_panel(panel, theme)
    panels[0][0].set_ylabel("milliseconds (dotted: a call from Python)")
    panels[1][0].set_ylabel("share of the ceiling")
    plot.suptitle(f"{op}, bf16, {rows[0]['gpu'].upper()}: {subtitle}", color=ink, fontsize=10.5)
    names = [p for p in STYLES if p in shown]
    plot.legend([shown[p] for p in names], names, loc="lower center", ncols=len(names), frameon=False, labelcolor=ink)
    plot.tight_layout(rect=(0, 0.045, 1, 1))
    save(plot, path, theme)
    plt.close(plot)
    return True


def plots(rows, stem):
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib import ticker
    for figure in FIGURES:
        for suffix, theme in THEMES.items():
            path = f"{stem}-{figure[0]}{suffix}"
            if not draw(plt, ticker, rows, figure, theme, path) and not suffix:
                print(f"no plot of {figure[0]}: no kernels were timed")


# ---- Time against memory ----------------------------------------------------------------------------------------------------


def frontier_of(rows):
    """{case: {provider: (MiB, sustained time over that of the three matmuls alone)}}, in the order of the rows."""
    found = {}
    for row in rows:
        share, memory = number(row["of_matmuls"]), number(row["extra_mb"])
        if share and memory is not None and right(row):
            found.setdefault(row["case"], {})[row["provider"]] = max(1.0, memory), 1 / share
    return found


def draw_frontier(plt, ticker, gpu, found, theme, path):
    """A panel a case."""
    ink, dark, columns = theme["ink"], theme is THEMES["-dark"], 1 if len(found) == 1 else 2
    lines = -(-len(found) // columns)
    set_text(plt, ink)
    plot, panels = plt.subplots(lines, columns, figsize=(7.6 if columns == 1 else 12, 4.4 * lines), squeeze=False,
                                facecolor=theme["background"])
    for panel in panels.flat[len(found):]:
        panel.set_visible(False)
    for panel, (case, points) in zip(panels.flat, found.items()):
        memory, times = zip(*points.values())
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.set_xlim(min(memory) / 1.5, 2.2 * max(memory))
        panel.set_ylim(0.95, 1.1 * max(times))
        panel.yaxis.set_major_locator(ticker.FixedLocator((1, 1.1, 1.2, 1.3, 1.5, 1.7, 2, 2.5, 3, 4, 6, 8, 12, 16)))
        panel.yaxis.set_minor_locator(ticker.NullLocator())
        panel.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        panel.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        set_panel(panel, theme)
        panel.axhline(1.0, color=ink, linewidth=0.8, linestyle="--")
        panel.set_title(", ".join(f"{size} {name}" if name == "tokens" else f"{name} {size}" for name, size in
                                  parts(case).items() if name != "reduction"), color=ink)
        panel.set_xlabel("MiB beyond inputs and results")
        panel.set_ylabel("time / time of the three matmuls alone")
        names = []  # what is written, where, in which colour
        for provider in ("lk separate", "lk"):
            line = sorted(point for name, point in points.items() if name.rpartition(" ")[0] == provider)
            if line:
                panel.plot(*zip(*line), "o-", color=STYLES[provider][dark], markersize=5.5, linewidth=2.4, zorder=3)
                names.append((provider, line[0], STYLES[provider][dark]))
        for provider, point in points.items():
            if provider in STYLES:
                colour, marker = STYLES[provider][dark], STYLES[provider][2]
                panel.plot(*point, linestyle="none", marker=marker, color=colour, markersize=7, zorder=4)
                names.append((provider, point, colour))
        plot.tight_layout(rect=(0, 0, 1, 0.95))
        write_names(plot, panel, names, list(points.values()))
    plot.suptitle(f"linear_cross_entropy, bf16, {gpu.upper()}: forward + backward, calls back to back", color=ink,
                  fontsize=10.5)
    save(plot, path, theme)
    plt.close(plot)


def write_names(plot, panel, names, points):
    """Each name beside its point, on the first side where it meets no other name and hides no point."""
    taken, renderer = [], plot.canvas.get_renderer()
    marks = [panel.transData.transform(point) for point in points]
    for name, point, colour in names:
        for x, y in ((8, 4), (8, -11), (-8, 4), (-8, -11), (8, 14), (8, -21), (-8, 14), (-8, -21)):
            text = panel.annotate(name, point, (x, y), textcoords="offset points", color=colour,
                                  ha="left" if x > 0 else "right")
            box = text.get_window_extent(renderer)
            if not any(box.overlaps(other) for other in taken) and not any(box.contains(*mark) for mark in marks):
                break
            text.remove()
        else:
            panel.add_artist(text)  # there is no such side: the last one
        taken.append(box)


def save(plot, path, theme):
    plot.savefig(f"{path}.svg", facecolor=theme["background"], metadata={"Date": None})
    print(f"wrote {path}.svg")


def frontier_plots(rows, stem):
    """Of the first case, for README, and of all."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib import ticker
    found = frontier_of(rows)
    first = dict(list(found.items())[:1])
    for suffix, theme in THEMES.items() if found else ():
        draw_frontier(plt, ticker, rows[0]["gpu"], first, theme, f"{stem}{suffix}")
        draw_frontier(plt, ticker, rows[0]["gpu"], found, theme, f"{stem}-all{suffix}")


def frontier_table(rows, path):
    versions = unique(row["version"] for row in rows if row["version"])
    with open(path, "w") as file:
        say = lambda *lines: print(*lines, sep="\n", file=file)  # noqa: E731
        say(f"# linear_cross_entropy: time against memory, {rows[0]['gpu']}", "",
            "Made by `make compare-plots` from the CSV of the same name, which `make frontier` measured; bench/frontier.py",
            "says how. bf16, mean loss, forward and backward; matmul is forward's product alone, matmuls all three. MiB: peak",
            "memory beyond inputs and results. burst, sustained: ms of a call after a rest, and in calls back to back. of",
            "matmuls: the sustained time of the matmuls over the provider's. plan: what lk does in its workspace. Errors:",
            f"relative, against float64. Measured at {commits_of(rows)}.", "",
            picture(os.path.basename(os.path.splitext(path)[0]) + "-all", "time against memory, all cases"), "",
            *(f"- {version}" for version in versions), "",
            *(f"- {row['provider']}: {row['note']}" for row in rows if not row["case"]), "")
        for case in unique(row["case"] for row in rows if row["case"]):
            mine = [row for row in rows if row["case"] == case]
            say(f"## {case}", "", "| provider | MiB | burst | sustained | of matmuls | errors | workspace MiB | plan |",
                "|---|---|---|---|---|---|---|---|")
            for row in mine:
                cells = (row[column] for column in ("extra_mb", "burst_ms", "sustained_ms", "of_matmuls", "errors",
                                                    "workspace_mb", "plan"))
                name = "matmul" if row["direction"] == "forward" else row["provider"]
                say(f"| {name} | " + " | ".join(cells) + " |" if not row["note"] else f"| {name} | | | | {row['note']} | | | |")
            say("")
    print(f"wrote {path}")


# ---- The ladder -------------------------------------------------------------------------------------------------------------


def draw_ladder(plt, ticker, rows, theme, path):
    """The climb: a panel an op, rungs from top to bottom, the rate to the right, times at the edge."""
    ink, dark = theme["ink"], theme is THEMES["-dark"]
    set_text(plt, ink)
    ops = unique(row["op"] for row in rows)
    plot, panels = plt.subplots(1, len(ops), figsize=(6.4 * len(ops), 4.4), squeeze=False, facecolor=theme["background"])
    for panel, op in zip(panels[0], ops):
        mine = [row for row in rows if row["op"] == op]
        rungs, rate = unique((row["rung"], row["idea"]) for row in mine), ladder_rate(mine)
        for direction, style in (("forward", "lk"), ("forward_backward", "torch.compile")):
            points = [(number(row[rate]), rungs.index((row["rung"], row["idea"]))) for row in mine
                      if row["direction"] == direction]
            if points:
                panel.plot(*zip(*points), "o-", color=STYLES[style][dark], linewidth=1.6, markersize=5, label=TITLE[direction])
        for at, rung in enumerate(rungs):
            of_rung = [row for row in mine if (row["rung"], row["idea"]) == rung]
            text = ", ".join(f"{number(row['ms']):.3g}" for row in of_rung) + " ms"
            if of_rung[0]["case"] != mine[-1]["case"]:
                text += f", {of_rung[0]['case'].split()[-1].replace('=', ' ')}"
            panel.text(1.02, at, text, transform=panel.get_yaxis_transform(), color=ink, va="center", fontsize=8)
        panel.set_yticks(range(len(rungs)), [f"{idea}  {rung}" if rung != "lk" else idea for rung, idea in rungs])
        panel.set_ylim(len(rungs) - 0.5, -0.7)
        panel.set_xscale("log")
        panel.xaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        panel.margins(x=0.08)
        panel.set_xlabel("GB/s" if rate == "gb_per_s" else "TFLOP/s")
        panel.set_title(f"{op}\n{mine[-1]['case'].replace('=', ' ')}", color=ink, fontsize=10)
        set_panel(panel, theme)
        if len(unique(row["direction"] for row in mine)) > 1:
            panel.legend(loc="lower left", frameon=False, labelcolor=ink)
    plot.suptitle(f"The ladder, bf16, {rows[0]['gpu'].upper()}", color=ink, fontsize=10.5)
    plot.tight_layout(rect=(0, 0, 1, 0.97))
    save(plot, path, theme)
    plt.close(plot)


def ladder_rate(rows):
    return "gb_per_s" if rows[0]["gb_per_s"] else "tflop_per_s"


def ladder_lines(rows, stem):
    """README's section: a table an op, a line a rung."""
    yield f"Measured on an {rows[0]['gpu'].upper()} at {commits_of(rows)}, in bf16. GB/s: the least traffic over the time;"
    yield "TFLOP/s: that of the matmul. scratch: memory for logits and what else lies between the kernels."
    if os.path.exists(f"{stem}.svg"):
        yield ""
        yield picture(stem, "the ladder: the rate of each rung of cross_entropy and linear_cross_entropy")
    for op in unique(row["op"] for row in rows):
        mine = [row for row in rows if row["op"] == op]
        directions, rate = unique(row["direction"] for row in mine), ladder_rate(mine)
        full, unit = mine[-1]["case"], "GB/s" if rate == "gb_per_s" else "TFLOP/s"
        yield ""
        yield f"**{op}**, {full.replace('=', ' ')}"
        yield ""
        yield "| rung | " + " | ".join(f"{TITLE[direction]} ms | {unit}" for direction in directions) + " | scratch MiB |"
        yield "|---|" + "---|---|" * len(directions) + "---|"
        for rung, idea in unique((row["rung"], row["idea"]) for row in mine):
            cells, of_rung = [], [row for row in mine if row["rung"] == rung]
            for direction in directions:
                row = next((row for row in of_rung if row["direction"] == direction), None)
                size = f" ({row['case'].split()[-1].replace('=', ' ')})" if row and row["case"] != full else ""
                cells += [f"{number(row['ms']):.4g}{size}", f"{number(row[rate]):.4g}"] if row else ["", ""]
            name = f"{rung}: {idea}" if rung != "lk" else idea
            yield f"| {name} | " + " | ".join(cells) + f" | {number(of_rung[0]['workspace_mb']):.4g} |"


def ladder(path, readme):
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        sys.exit(f"{path} has no rows")
    stem = os.path.splitext(path)[0]
    missing = None
    try:
        import matplotlib
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
        from matplotlib import ticker
        for suffix, theme in THEMES.items():
            draw_ladder(plt, ticker, rows, theme, f"{stem}{suffix}")
    except ImportError as error:
        missing = error
    with open(readme) as file:
        text = file.read()
    before, found, rest = text.partition("<!-- ladder -->\n")
    _, end, after = rest.partition("<!-- end of ladder -->")
    if not found or not end:
        sys.exit(f"{readme} lacks the marks of the ladder")
    link = os.path.relpath(stem, os.path.dirname(readme))
    lines = (line.replace(stem, link) for line in ladder_lines(rows, stem))
    with open(readme, "w") as file:
        file.write("\n".join([before + "<!-- ladder -->", *lines, end + after]))
    print(f"wrote {readme}")
    if missing:
        sys.exit(f"no plot: {missing}; pip install matplotlib, or run this where it is: it needs the CSV and no GPU")


# ---- Several GPUs -----------------------------------------------------------------------------------------------------------


def draw_scaling(plt, local, reals, theme, path):
    """1/P of one GPU's time over a rank's, against P: a rank's own work as lines, GPUs with their collectives as hollow marks."""
    ink, dark = theme["ink"], theme is THEMES["-dark"]
    set_text(plt, ink)
    plot, panel = plt.subplots(figsize=(6.6, 3.8), facecolor=theme["background"])
    for case, style in zip(unique(row["case"] for row in local), ("lk", "torch.compile", "liger", "quack")):
        colour, mark = STYLES[style][dark], STYLES[style][2]
        points = [(int(row["ranks"]), number(row["efficiency"])) for row in local if row["case"] == case and row["efficiency"]]
        panel.plot(*zip(*points), "-", marker=mark, color=colour, linewidth=1.6, markersize=5, label=case.replace("=", " "))
        points = [(0.94 * int(row["ranks"]), number(row["efficiency"])) for real in reals for row in real
                  if row["case"] == case and row["efficiency"]]
        if points:
            panel.plot(*zip(*points), mark, color=colour, markersize=7, fillstyle="none")
    ranks = sorted({int(row["ranks"]) for row in local if row["efficiency"]})
    counts = " and ".join(real[-1]["ranks"] for real in reals)
    panel.set_xscale("log", base=2)
    panel.set_xticks(ranks, [str(rank) for rank in ranks])
    panel.set_xlabel("ranks P")
    panel.set_ylim(0.75, 1.05)
    panel.set_ylabel("1/P of one GPU's time, over a rank's")
    panel.set_title(f"linear_cross_entropy, {TITLE['forward_backward']}, bf16, {local[0]['gpu'].upper()}\n"
                    f"lines: a rank's own work; hollow: {counts} GPUs with NCCL", color=ink, fontsize=10)
    set_panel(panel, theme)
    panel.legend(loc="lower left", frameon=False, labelcolor=ink)
    plot.tight_layout()
    save(plot, path, theme)
    plt.close(plot)


def scaling(*paths):
    found = []
    for path in paths:
        with open(path, newline="") as file:
            found.append([row for row in csv.DictReader(file) if row["direction"] == "forward_backward"])
    if not all(found):
        sys.exit(f"{' or '.join(paths)} has no rows of forward_backward")
    try:
        import matplotlib
        matplotlib.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        sys.exit(f"no plot: {error}; pip install matplotlib, or run this where it is: it needs the CSVs and no GPU")
    for suffix, theme in THEMES.items():
        draw_scaling(plt, found[0], found[1:], theme, f"{os.path.splitext(paths[0])[0]}{suffix}")


# ---- Tables -----------------------------------------------------------------------------------------------------------------


def right(row, wrong=WRONG):
    return all(value is not None and value < wrong for value in errors_of(row).values())


def peers_of(row_of):
    return {provider: row for provider, row in row_of.items() if provider.split()[0] not in ("lk", "all") and right(row)}


def best(row_of, column):
    """(provider, value) of the peer with the least."""
    values = {provider: number(row[column]) for provider, row in peers_of(row_of).items()}
    values = {provider: value for provider, value in values.items() if value}
    return min(values.items(), key=lambda item: item[1]) if values else (None, None)


def cell(row):
    if row is None:
        return ""
    if not (row["kernel_ms"] or row["call_ms"]):
        return row["note"].split(":")[0]
    mark = "*" if row["kernel_clock"] == "profiler" else ""
    return f"{row['kernel_ms'] or '-'}{mark} / {row['call_ms'] or '-'}"


def tables(rows, path):
    gpu, versions = rows[0]["gpu"], unique(row["version"] for row in rows if row["version"])
    with open(path, "w") as file:
        say = lambda *lines: print(*lines, sep="\n", file=file)  # noqa: E731
        say(f"# lk beside other libraries, {gpu}", "",
            "Made by `make compare-plots` from the CSV of the same name, which `make compare` measured. Calls are those of",
            "`make compare-calls` as far as its CSV has them. Times in ms: the",
            "kernels alone / a call from Python; \\* the kernels by the profiler, others by CUDA graph. bf16. Errors:",
            "relative, against float64. MiB: peak memory beyond inputs and results. Medians of 21 calls, or replays of a graph",
            "of calls; of 7 to 20 in newer rows where 21 would have taken long. bench/compare.py says more.", "",
            *(f"- {version}" for version in sorted(versions)), "")
        gone = [row for row in rows if not row["direction"] and row["note"]]
        say(*(f"- {row['op']} {row['case']}: {row['provider']}: {row['note']}" for row in gone), "")
        for op in unique(row["op"] for row in rows):
            groups = {key: row_of for key, row_of in grouped(rows).items() if key[0] == op}
            names = unique(provider for row_of in groups.values() for provider in row_of)
            say(f"## {op}", "", "| case | direction | ceiling | of ceiling | " + " | ".join(names) + " |",
                "|" + "---|" * (4 + len(names)))
            for (_, case, direction), row_of in groups.items():
                known = next((row for row in row_of.values() if row["ceiling_ms"]), None)
                ceiling = f"{known['ceiling_ms']} ({known['ceiling_from']})" if known else ""
                share = row_of["lk"]["of_ceiling"] if "lk" in row_of else ""
                say(f"| {case} | {TITLE[direction]} | {ceiling} | {share} | "
                    + " | ".join(cell(row_of.get(name)) for name in names) + " |")
            say("", "Errors, and MiB:", "", "| case | direction | " + " | ".join(names) + " |", "|" + "---|" * (2 + len(names)))
            for (_, case, direction), row_of in groups.items():
                there = [row_of.get(name) for name in names]
                cells = [f"{row['errors']}; {row['extra_mb']}" if row and row["errors"] else "" for row in there]
                say(f"| {case} | {TITLE[direction]} | " + " | ".join(cells) + " |")
            failed = [(key, name, row) for key, row_of in groups.items() for name, row in row_of.items() if row["note"]]
            say("", *(f"- {case}, {TITLE[direction]}, {name}: {row['note']}" for (_, case, direction), name, row in failed), "")
    print(f"wrote {path}")


# ---- Beside xopes ----------------------------------------------------------------------------------------------------------

# In the order of the reference pages: the op, its part of the page, which of the op's cases that is.
PAGES = (
    ("cross_entropy", "upstream 1", lambda c: "upstream" not in c),
    ("cross_entropy", "upstream random", lambda c: "upstream" in c),
    ("linear_cross_entropy", "upstream 1", lambda c: "upstream" not in c),
    ("linear_cross_entropy", "upstream random", lambda c: "upstream" in c),
    ("logsumexp", "", lambda c: True),
    *(("md_lrpe_cosine", f"{axes}d, prefix {prefix}", lambda c, axes=axes, prefix=prefix:
       axes_of(c) == axes and c["prefix"] == str(prefix)) for axes in (1, 2, 3) for prefix in (0, 10)),
    ("srms_norm", "with residual", lambda c: c["residual"] == "1"),
    ("srms_norm", "without residual", lambda c: c["residual"] == "0"),
)


def fastest(row_of, first):
    """(name without its first word, row) of the quickest kernels among the providers of that first word."""
    mine = [(number(row["kernel_ms"]), name, row) for name, row in row_of.items()
            if name.split()[0] == first and number(row["kernel_ms"]) and right(row)]
    if not mine:
        return "", None
    _, name, row = min(mine, key=lambda found: found[0])
    return name.partition(" ")[2], row


def product_root(values):
    result = 1.0
    for value in values:
        result *= value ** (1 / len(values))
    return result


def beside_xopes(rows):
    """{(op, direction): [xopes' best / lk]}, lk as it is called by default."""
    found = {}
    for (op, case, direction), row_of in grouped(rows).items():
        _, theirs = fastest(row_of, "xopes")
        mine = number(row_of["lk"]["kernel_ms"]) if "lk" in row_of else None
        if mine and theirs:
            found.setdefault((op, direction), []).append(number(theirs["kernel_ms"]) / mine)
    return found


def worst_error(row):
    errors = [error for error in errors_of(row).values() if error is not None] if row and row["errors"] else []
    return f"{max(errors):.1e}" if errors else ""


def reference_cells(row_of):
    """A line's cells, times, ratio, memory and errors; the ratio, and xopes' row that it is of."""
    def ms(row):
        return f"{row['kernel_ms']}{'*' * (row['kernel_clock'] == 'profiler')}" if row and row["kernel_ms"] else ""
    name, theirs = fastest(row_of, "xopes")
    lk, torch = row_of.get("lk"), row_of.get("torch")
    ratio = number(theirs["kernel_ms"]) / number(lk["kernel_ms"]) if theirs and lk and number(lk["kernel_ms"]) else None
    memory = [f"{number(row['extra_mb']):.4g}" if row and row["extra_mb"] else "" for row in (theirs, lk)]
    return [f"{ms(theirs)} ({name})" if theirs else "", ms(torch), ms(lk), f"{ratio:.2f}" if ratio else "", *memory,
            worst_error(theirs), worst_error(lk)], ratio, theirs


def reference(path, page):
    rows = read(path)
    measured = [row for row in rows if row["direction"]]
    for what in ("gpu", "commit"):
        if len(unique(row[what] for row in measured)) != 1:
            sys.exit(f"{path} has rows of no or of several values of {what}: {unique(row[what] for row in measured)}")
    versions = sorted(unique(row["version"] for row in measured if row["version"]))
    groups = grouped(rows)
    with open(page, "w") as file:
        say = lambda *lines: print(*lines, sep="\n", file=file)  # noqa: E731
        say("# lk beside xopes", "",
            f"Made by `make reference` from {os.path.basename(path)}, which `bench/compare.py --reference` measured on an",
            f"{measured[0]['gpu'].upper()} at {measured[0]['commit']}. lk's ops come from xopes' benchmark pages; these are their",
            "shapes, page by page.",
            "ms of the kernels alone; \\* by the profiler, which leaves out gaps between kernels, others by CUDA graph. xopes: the",
            "quicker of its variants. xopes / lk: above 1, lk is quicker. MiB: peak memory beyond inputs, upstream gradients and",
            "results. Error: the largest of the relative errors of outputs and gradients, against float64. bf16. xopes' cross",
            "entropies compute the gradient in the logits' memory; *lk inplace* does so too. The forward of its Triton and tr computes",
            "the gradients whether they are wanted or not, so the backward of its Triton is a product. tr_lce stores logits in bf16; so",
            "does *lk fast_logits*. Its backward destroys what forward kept, so it is not timed by itself. lk's backward of a loss is",
            "that of losses per row. A random upstream is a number in device memory that is not 1. linear_cross_entropy: all by the",
            "profiler, since xopes' synchronises.", "",
            *(f"- {version}" for version in versions), "",
            *(f"- {row['op']}: {row['provider']}: {row['note']}" for row in rows if not row["direction"]), "")
        for op in unique(op for op, _, _ in PAGES):
            names = [(part, meant) for name, part, meant in PAGES if name == op]
            mine = {key: row_of for key, row_of in groups.items() if key[0] == op}
            second = {"cross_entropy": "lk inplace", "linear_cross_entropy": "lk fast_logits"}.get(op)
            inplace = any(second in row_of for row_of in mine.values())
            head = ["shape", "direction", "xopes", "torch", "lk", "xopes / lk", "xopes MiB", "lk MiB", "xopes error", "lk error"]
            head += [second, f"xopes / {second}", "MiB"] * inplace
            say(f"## {op}", "", "| " + " | ".join(head) + " |", "|" + "---|" * len(head))
            means = []
            for part, meant in names:
                ratios = {}
                for direction in DIRECTIONS:
                    chosen = [(case, row_of) for (_, case, way), row_of in mine.items()
                              if way == direction and meant(parts(case))]
                    for case, row_of in sorted(chosen, key=lambda item: sizes_of(item[0])):
                        cells, ratio, theirs = reference_cells(row_of)
                        if ratio:
                            ratios.setdefault(direction, []).append(ratio)
                        if inplace:
                            other = row_of.get(second)
                            time = number(other["kernel_ms"]) if other and right(other) else None
                            cells += [other["kernel_ms"] + "*" * (other["kernel_clock"] == "profiler"),
                                      f"{number(theirs['kernel_ms']) / time:.2f}" if theirs else "",
                                      other["extra_mb"]] if time else ["", "", ""]
                        say("| " + " | ".join([case, TITLE[direction], *cells]) + " |")
                if ratios:
                    means.append(f"- {part + ': ' if part else ''}" + ", ".join(
                        f"{TITLE[direction]} {product_root(values):.2f} ({len(values)} shapes)"
                        for direction, values in ratios.items()))
            say("", "Geometric means of xopes / lk:" if means else "xopes was not measured.", "", *means, "")
            failed = [(key, name, row) for key, row_of in mine.items() for name, row in row_of.items() if row["note"]]
            say(*(f"- {case}, {TITLE[direction]}, {name}: {row['note']}" for (_, case, direction), name, row in failed), "")
    print(f"wrote {page}")


def sizes_of(case):
    """Numbers to sort a part's cases by."""
    return [tokens_of(parts(case)) if name == "shape" else int(value) for name, value in parts(case).items()
            if name == "shape" or value.isdigit()]


def reference_line(path, page):
    """README's sentence, where xopes was measured."""
    rows = [row for row in read(path) if row["direction"]] if os.path.exists(path) else []
    found, ops = beside_xopes(rows), {}
    for (op, direction), ratios in found.items():
        ops.setdefault(op, {})[direction] = ratios
    if not ops:
        return
    texts = [f"{op} " + ", ".join(f"{product_root(ways[d]):.2f}" if d in ways else "-" for d in DIRECTIONS)
             for op, ways in sorted(ops.items())]
    card, commits = rows[0]["gpu"].split("-")[0].upper(), sorted({row["commit"] for row in rows if row["provider"] == "lk"})
    yield ("Beside [xopes](https://github.com/Doraemonzzz/xopes), where these ops come from, on the shapes of its benchmark pages (xopes' "
           f"best / lk, forward, backward, both, geometric means; {card}, lk at {', '.join(commits)}): {'; '.join(texts)}. [All shapes, memory and errors]({page}).")


# ---- README -----------------------------------------------------------------------------------------------------------------


def listed(items, most=6):
    return "; ".join(items[:most]) + (f"; and {len(items) - most} more" if len(items) > most else "")


def slower(groups, column, limit=SLOWER):
    """Where lk's time by this clock is over `limit` times the best peer's: a text for each op, direction and peer, worst first;
    the number of those cases, and of all that were compared."""
    found, compared = collections.defaultdict(list), 0
    for (op, case, direction), row_of in groups.items():
        mine = number(row_of["lk"][column]) if "lk" in row_of else None
        name, theirs = best(row_of, column)
        if mine and theirs:
            compared += 1
            if mine > limit * theirs:
                mark = "*" if column == "kernel_ms" and row_of[name]["kernel_clock"] == "profiler" else ""
                found[op, TITLE[direction], name + mark].append((mine / theirs, case))
    texts = []
    for (op, title, name), cases in sorted(found.items(), key=lambda item: max(item[1]), reverse=True):
        ratios = [ratio for ratio, _ in cases]
        times = " to ".join(unique(f"{ratio:.2f}" for ratio in (min(ratios), max(ratios))))
        names = "; ".join(case for _, case in cases) if len(cases) < 4 else f"{len(cases)} cases, the worst {max(cases)[1]}"
        texts.append(f"- {op} {title}: lk takes {times} times as long as {name} ({names})")
    return texts, sum(map(len, found.values())), compared


def commits_of(rows):
    return ", ".join(sorted({row["commit"] for row in rows if row["commit"]}))


def how_called(rows):
    """How Python called lk in these rows: lk_torch's rows name it in their version."""
    mine = [row for row in rows if row["provider"] == "lk" and row["call_ms"]]
    old = [row for row in mine if not row["version"].startswith("lk_torch")]
    if not old:
        return "through lk_torch"
    costs = "which costs more than a small op's kernels"
    if len(old) == len(mine):
        return f"by ctypes, {costs}"
    return f"through lk_torch, and in {len(old)} of {len(mine)} rows by ctypes ({commits_of(old)}), {costs}"


def called(rows, path):
    """Calls from Python in rows of with_calls(path): how lk was called, and what slower() says."""
    timed = calls_of(path.replace("-compare", "-calls"))
    how = f"{how_called(timed)} at {commits_of(timed)}" if timed else how_called(rows)
    ops = {row["op"] for row in timed}
    rest = [row for row in rows if row["provider"] == "lk" and row["call_ms"] and row["op"] not in ops]
    if timed and rest:
        how += f", {', '.join(sorted({row['op'] for row in rest}))} at {commits_of(rest)}"
    return how, *slower(grouped(rows), "call_ms", SLOWER)


def less_accurate(groups):
    """Where a peer's error is below lk's: a text for each op and output, worst first."""
    found = collections.defaultdict(list)
    for (op, case, _), row_of in groups.items():
        for output, mine in (errors_of(row_of["lk"]) if "lk" in row_of else {}).items():
            theirs = {name: errors_of(row).get(output) for name, row in peers_of(row_of).items()}
            theirs = {name: value for name, value in theirs.items() if value is not None and value == value}
            if not theirs or mine is None:
                continue
            name = min(theirs, key=theirs.get)
            ratio = mine / theirs[name] if theirs[name] else float("inf") if mine else 0.0
            if not ratio <= WORSE:
                found[op, output].append((ratio, case, f"{mine:.2g}, {name} {theirs[name]:.2g}"))
    texts = []
    for (op, output), worse in sorted(found.items(), key=lambda item: max(item[1]), reverse=True):
        count, (_, case, errors) = len({case for _, case, _ in worse}), max(worse)
        texts.append(f"{op} {output}, {f'{count} cases, the worst ' * (count > 1)}{case} ({errors})")
    return texts


def sentence(texts, count, compared, start):
    if not compared:
        return f"{start}: not measured.\n"
    return "\n".join([f"{start}, in {count} of {compared} cases" + (":" if texts else "."), "", *texts, ""])


def picture(stem, alt):
    """A plot for light and dark pages."""
    return (f'<picture><source media="(prefers-color-scheme: dark)" srcset="{stem}-dark.svg">'
            f'<img alt="{alt}" src="{stem}.svg"></picture>')


def frontier_lines(path):
    """What README says of time against memory, where that was measured."""
    stem = path.replace("-compare.csv", "-frontier")
    if os.path.exists(f"{stem}.svg"):
        yield "linear_cross_entropy runs in almost any amount of memory. Lower is faster, further left takes less memory."
        yield "Each of lk's points is a budget of workspace. *lk*: loss and gradients in one call; *lk separate*: forward, and a"
        yield "backward that makes the logits again."
        rows = read(f"{stem}.csv")
        card = rows[0]["gpu"].split("-")[0].upper()
        yield f"[All shapes, errors and lk's plans]({stem}.md), measured on an {card} at {commits_of(rows)}."
        yield ""
        yield picture(stem, "linear_cross_entropy: time against memory, lk at several budgets and others")
        yield ""


def span(values):
    return f"{min(values):.2f} to {max(values):.2f}" if values else ""


def readme(rows, path):
    groups, stem = grouped(rows), os.path.splitext(path)[0]
    print("lk, PyTorch and other libraries on the same tensors, in one process, except for those named below and for the case at",
          "which a stopped run was continued (`--resume`)",
          f"({rows[0]['gpu'].upper()}, bf16, cold L2; [all rows]({stem}.md), errors and memory too). Full lines and `kernels`:",
          "the kernels alone; dotted lines and `call`: a call from Python.",
          f"Python called lk {called(rows, path)[0]}.",
          sep="\n", end="\n\n")
    for name, op, *_ in FIGURES:
        if os.path.exists(f"{stem}-{name}.svg"):
            print(picture(f"{stem}-{name}", f"{op}: time and share of the ceiling against size, lk and others") + "\n")
    for line in frontier_lines(path):
        print(line)
    if all(row["op"] != "linear_cross_entropy" for row in rows):
        print("linear_cross_entropy was compared on an H100: [all rows](h100-compare.md), [time against memory](h100-frontier.md).\n")
    print("| op | direction | largest case | lk kernels, call | best other kernels, call | best other / lk: kernels, all cases"
          " | call, all cases |", "|---|---|---|---|---|---|---|", sep="\n")
    ratios, most = collections.defaultdict(lambda: ([], [])), {}
    for (op, case, direction), row_of in groups.items():
        if "lk" not in row_of or not row_of["lk"]["call_ms"]:
            continue
        for values, column in zip(ratios[op, direction], ("kernel_ms", "call_ms")):
            mine, (_, theirs) = number(row_of["lk"][column]), best(row_of, column)
            if mine and theirs:
                values.append(theirs / mine)
        size = number(row_of["lk"]["kernel_ms"]) or number(row_of["lk"]["call_ms"])
        if size >= most.get((op, direction), (0,))[0]:
            most[op, direction] = size, case, row_of
    for (op, direction), (kernels, calls) in ratios.items():
        _, case, row_of = most[op, direction]
        (name, kernel), (caller, call) = best(row_of, "kernel_ms"), best(row_of, "call_ms")
        lk = row_of["lk"]
        print(f"| {op} | {TITLE[direction]} | {case} | {lk['kernel_ms'] or '-'}, {lk['call_ms']} | "
              f"{f'{kernel:g} ({name})' if name else '-'}, {f'{call:g} ({caller})' if caller else '-'} | {span(kernels)} | "
              f"{span(calls)} |")
    texts, count, compared = slower(groups, "kernel_ms")
    print("", sentence(texts, count, compared, f"Where lk loses by more than {SLOWER - 1:.0%}: kernels alone"), sep="\n")
    if any(text.startswith("- linear_cross_entropy backward") for text in texts):
        print("linear_cross_entropy's backward makes the logits again, which PyTorch has kept since forward.\n")
    if any("* (" in text for text in texts):
        print("\\* By the profiler, since it cannot be captured: its kernels' times, without the gaps between them. In rows before "
              "d768638 time in which two of them run counts twice.\n")
    how, *calls = called(rows, path)
    print(sentence(*calls, f"Where lk loses by more than {SLOWER - 1:.0%}: called from Python, lk {how}"))
    if calls_of(path.replace("-compare", "-calls")):
        print("torch.compile, FLA and quack compile or tune for seconds. Where lk's call takes 1 ms or more, their calls are of",
              "the same run as the kernels.\n", sep="\n")
    worse = listed(less_accurate(groups), 8)
    print(f"Where lk is less accurate than the most accurate of the others, by more than {WORSE - 1:.0%}:",
          worse + "." if worse else "nowhere.")
    broken = [f"{op} {TITLE[direction]}, {case}: {row_of['lk']['note'] or row_of['lk']['errors']}"
              for (op, case, direction), row_of in groups.items()
              if "lk" in row_of and not (row_of["lk"]["call_ms"] and right(row_of["lk"]))]
    if broken:
        print(f"lk failed: {listed(broken)}.")
    separate = collections.defaultdict(dict)
    for (op, *_), row_of in groups.items():
        separate[op].update({row["provider"]: None for row in row_of.values() if row["commit"] != row_of.get("lk", row)["commit"]})
    separate = [f"{op} ({', '.join(providers)})" for op, providers in separate.items() if providers]
    if separate:
        print(f"In some cases in a separate run, not beside lk: {'; '.join(separate)}.")
    gone = unique(f"{row['provider']} ({row['note'].removeprefix('missing: ')})" for row in rows
                  if not row["direction"] and row["note"].startswith("missing"))
    if gone:
        print(f"Not there when this was measured: {'; '.join(gone)}.")


def main():
    if len(sys.argv) == 4 and sys.argv[1] == "--ladder":
        ladder(*sys.argv[2:])
        return
    if len(sys.argv) >= 4 and sys.argv[1] == "--scaling":
        scaling(*sys.argv[2:])
        return
    if len(sys.argv) == 4 and sys.argv[1] == "--reference":
        reference(*sys.argv[2:])
        return
    arguments = [argument for argument in sys.argv[1:] if argument != "--readme"]
    if len(arguments) != 1:
        sys.exit(__doc__)
    rows = with_calls(arguments[0])
    if not rows:
        sys.exit(f"{arguments[0]} has no rows")
    if "--readme" in sys.argv:
        readme(rows, arguments[0])
        return
    stem = os.path.splitext(arguments[0])[0]
    frontier = stem.replace("-compare", "-frontier")
    tables(rows, f"{stem}.md")
    measured = read(f"{frontier}.csv") if os.path.exists(f"{frontier}.csv") else []
    if measured:
        frontier_table(measured, f"{frontier}.md")
    else:
        print(f"no plot of time against memory: no {frontier}.csv is there; `make frontier` measures it")
    try:
        plots(rows, stem)
        frontier_plots(measured, frontier)
    except ImportError as error:
        sys.exit(f"no plots: {error}; pip install matplotlib, or run this where it is: it needs the CSV and no GPU")


if __name__ == "__main__":
    main()
