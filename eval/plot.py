"""What was measured, as figures."""

import math
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

from ropex.errors import OptionError, OutputError
from ropex.eval.files import write_whole

_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito's
_MARKERS = "os^Dvpx"
_HATCHES = ("", "//", "..", "xx", "\\\\", "--", "++")


def _as_written(plot: Callable[[dict[str, Any], Path], None]) -> Callable[[dict[str, Any], Path], None]:
    """Names are no formulas, whatever dollar signs they hold."""

    @wraps(plot)
    def drawn(results: dict[str, Any], path: Path) -> None:
        import matplotlib

        with matplotlib.rc_context({"text.parse_math": False}):
            plot(results, path)

    return drawn


def check_plot(path: Path) -> None:
    """Can a figure be written there? Asked before an hour of evaluation, not after it."""
    if path.suffix.lower() not in (".png", ".svg", ".pdf"):
        raise OptionError(f"{path} cannot be drawn: end the name of the figure in .png, .svg or .pdf")
    if not path.absolute().parent.is_dir():
        raise OutputError(f"{path.parent} does not exist: make that folder, or name another figure")


@_as_written
def plot_nll(results: dict[str, Any], path: Path) -> None:
    """Draw what `evaluate_nll` returned: one panel a length, one line a checkpoint, native windows dashed.

    The suffix of `path` names the format (.png, .svg, .pdf). The file appears whole or not at all, and
    replaces one of the same name.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    path = Path(path)
    check_plot(path)
    rows = results["results"]
    lengths = list(dict.fromkeys(row["length"] for row in rows))
    names = list(dict.fromkeys(row["checkpoint"] for row in rows))
    short = _short(names)
    figure = Figure(figsize=(1.5 + 5.5 * len(lengths), 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(lengths), sharey=True, squeeze=False)[0]
    for panel, length in zip(panels, lengths, strict=True):
        here = [row for row in rows if row["length"] == length]
        for row in here:
            style = names.index(row["checkpoint"])
            shown = [bucket for bucket in row["buckets"] if bucket["nll"] is not None]
            panel.plot(
                [(bucket["start"] + bucket["end"]) / 2 for bucket in shown],
                [bucket["nll"] for bucket in shown],
                color=_COLOURS[style % len(_COLOURS)],
                marker=_MARKERS[style % len(_MARKERS)],
                label=f"{short[row['checkpoint']]} ({row['method']}), mean {row['mean']:.3f}",
            )
        for window in sorted({row.get("native_window") for row in here} - {None}):
            if window < length:
                panel.axvline(window, color="grey", linestyle="--", linewidth=1)
                panel.annotate(
                    f"native window {window:,}", (window, 1.01), xycoords=("data", "axes fraction"),
                    ha="center", color="dimgrey", fontsize="small",
                )  # fmt: skip
        panel.set(xlim=(0, length), xlabel="position in the window (tokens)")
        panel.set_title(f"windows of {length:,} tokens", pad=20)
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
        panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), frameon=False)
    panels[0].set_ylabel("NLL (nats per token, lower is better)")
    _save(figure, path)


@_as_written
def plot_needle(results: dict[str, Any], path: Path) -> None:
    """Draw what `evaluate_needle` returned: one panel a checkpoint, lengths across, depths down, brighter is better.

    Written as plot_nll writes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    path = Path(path)
    check_plot(path)
    rows = results["results"]
    lengths, depths = rows[0]["lengths"], rows[0]["depths"]
    size = (2.2 + len(rows) * max(2.6, 0.75 * len(lengths)), 1.8 + 0.3 * len(depths))
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    panels, crossed = figure.subplots(1, len(rows), sharey=True, squeeze=False)[0], False
    for panel, row in zip(panels, rows, strict=True):
        values = [list(line) for line in zip(*row["accuracy"], strict=True)]  # [depth][length]
        drawn = panel.imshow(values, cmap="cividis", vmin=0, vmax=1, aspect="auto")
        panel.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45, ha="right")
        panel.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
        inside = sum(length <= row["native_window"] for length in lengths)
        if 0 < inside < len(lengths):
            panel.axvline(inside - 0.5, color="black", linewidth=3)
            panel.axvline(inside - 0.5, color="white", linestyle="--", linewidth=1.5)
        mean = sum(map(sum, values)) / (len(lengths) * len(depths))
        panel.set_title(f"{row['checkpoint'].rpartition('/')[2]} ({row['method']}), mean {mean:.0%}", fontsize="medium")
        crossed = crossed or 0 < inside < len(lengths)
    figure.supxlabel("length (tokens)" + ("; dashed: native window" if crossed else ""), fontsize="medium")
    panels[0].set_ylabel("depth of the needle")
    figure.colorbar(drawn, ax=panels, label="share found", format=lambda share, _: f"{share:.0%}")
    _save(figure, path)


@_as_written
def plot_recall(results: dict[str, Any], path: Path) -> None:
    """Draw what `evaluate_recall` returned: two panels a length, log-probability and share right by distance; one line
    a checkpoint, 95% intervals shaded, the native window dashed. Written as plot_nll writes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    path = Path(path)
    check_plot(path)
    rows, border = results["results"], results["settings"]["border"]
    lengths = list(dict.fromkeys(row["length"] for row in rows))
    names = list(dict.fromkeys(row["checkpoint"] for row in rows))
    short = _short(names)
    figure = Figure(figsize=(1.5 + 5.5 * len(lengths), 6.5), layout="constrained")
    FigureCanvasAgg(figure)
    columns = figure.subplots(2, len(lengths), sharex="col", sharey="row", squeeze=False).T
    for (upper, lower), length in zip(columns, lengths, strict=True):
        here = [row for row in rows if row["length"] == length]
        for row in here:
            style = names.index(row["checkpoint"])
            look = {"color": _COLOURS[style % len(_COLOURS)], "marker": _MARKERS[style % len(_MARKERS)]}
            shares = [f"{group} {row[group]['accuracy']:.0%}" for group in ("near", "far") if row[group]]
            label = f"{short[row['checkpoint']]} ({row['method']}), {', '.join(shares)}"
            for panel, what in ((upper, "logprob"), (lower, "accuracy")):
                bins = row["distances"]
                middles = [math.sqrt(max(b["start"], b["end"] / 4) * b["end"]) for b in bins]
                panel.plot(middles, [b[what] for b in bins], label=label, **look)
                sure = [(x, *at) for x, b in zip(middles, bins, strict=True) if (at := b[f"{what}_interval"])]
                if sure:
                    panel.fill_between(*zip(*sure, strict=True), color=look["color"], alpha=0.12, linewidth=0)
        for panel in (upper, lower):
            panel.set_xscale("log", base=2)
            panel.grid(alpha=0.3)
            panel.spines[["top", "right"]].set_visible(False)
            if border < length:
                panel.axvline(border, color="grey", linestyle="--", linewidth=1)
        if border < length:
            upper.annotate(
                f"native window {border:,}", (border, 1.01), xycoords=("data", "axes fraction"),
                ha="center", color="dimgrey", fontsize="small",
            )  # fmt: skip
        upper.set_title(f"windows of {length:,} tokens", pad=20)
        edges = sorted({b["end"] for row in here for b in row["distances"]})
        lower.set_xticks(edges, [f"{edge:,}" for edge in edges], rotation=45, ha="right")
        lower.minorticks_off()
        lower.set(xlabel="distance of the answer (tokens)", ylim=(-0.03, 1.03))
        lower.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
        lower.legend(loc="upper center", bbox_to_anchor=(0.5, -0.3), frameon=False)
    columns[0][0].set_ylabel("log-probability (nats an answer)")
    columns[0][1].set_ylabel("answers that are right")
    _save(figure, path)


@_as_written
def plot_ruler(results: dict[str, Any], path: Path) -> None:
    """Draw what `evaluate_ruler` returned: one panel a checkpoint, lengths across, tasks and their mean down.

    Written as plot_nll writes.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    path = Path(path)
    check_plot(path)
    rows, entries = results["results"], results["means"]
    lengths = sorted({row["length"] for row in rows})
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    size = (2.6 + len(entries) * max(2.6, 0.8 * len(lengths)), 1.8 + 0.32 * len(tasks))
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(entries), sharey=True, squeeze=False)[0]
    for panel, entry in zip(panels, entries, strict=True):
        scores = {(r["task"], r["length"]): r["score"] for r in rows if r["checkpoint"] == entry["checkpoint"]}
        means = {row["length"]: row["mean"] for row in entry["lengths"]}
        values = [[scores.get((task, length), math.nan) for length in lengths] for task in tasks]
        values.append([means.get(length, math.nan) for length in lengths])
        drawn = panel.imshow(values, cmap="cividis", vmin=0, vmax=100, aspect="auto")
        for down, line in enumerate(values):
            for across, value in enumerate(line):
                if not math.isnan(value):
                    colour = "black" if value > 55 else "white"
                    panel.text(across, down, f"{value:.0f}", ha="center", va="center", color=colour, fontsize="small")
        panel.axhline(len(tasks) - 0.5, color="white", linewidth=2)
        panel.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], rotation=45, ha="right")
        panel.set_yticks(range(len(tasks) + 1), [*tasks, "mean"])
        panel.set_title(f"{entry['checkpoint'].rpartition('/')[2]} ({entry['method']})", fontsize="medium")
        panel.set_xlabel("length (tokens)")
    figure.colorbar(drawn, ax=panels, label="RULER score (percent)")
    _save(figure, path)


@_as_written
def plot_tasks(results: dict[str, Any], path: Path) -> None:
    """Draw what `evaluate_tasks` returned: a bar for each task and checkpoint, with its standard error as a whisker.

    Only main metrics with values from 0 to 1 are drawn: others have no common scale. Written as plot_nll writes.
    """
    from matplotlib import rcParams
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    path = Path(path)
    check_plot(path)
    shown = [row for row in results["results"] if on_a_scale(row)]
    tasks = list(dict.fromkeys((row["task"], row["metric"]) for row in shown))
    names = list(dict.fromkeys((row["checkpoint"], row["method"]) for row in results["results"]))
    thick = 0.8 / len(names)
    figure = Figure(figsize=(8.5, 1.2 + len(tasks) * max(0.34, 0.2 * len(names))), layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    for i, (checkpoint, method) in enumerate(names):
        here = [row for row in shown if (row["checkpoint"], row["method"]) == (checkpoint, method)]
        panel.barh(
            [tasks.index((row["task"], row["metric"])) + (i + 0.5) * thick - 0.4 for row in here],
            [row["value"] for row in here],
            height=thick * 0.9,
            xerr=[row["stderr"] or 0.0 for row in here],
            color=_COLOURS[i % len(_COLOURS)],
            hatch=_HATCHES[i % len(_HATCHES)],
            edgecolor=rcParams["axes.edgecolor"],
            ecolor=rcParams["axes.edgecolor"],
            linewidth=0.6,
            capsize=2.5,
            label=f"{checkpoint.rpartition('/')[2]} ({method})",
        )
    panel.set_yticks(range(len(tasks)), [f"{task}, {metric}" for task, metric in tasks])
    panel.set_ylim(len(tasks) - 0.5, -0.5)
    panel.set(xlim=(0, 1), xlabel="value, with its standard error")
    panel.grid(axis="x", alpha=0.3)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", frameon=False)
    _save(figure, path)


def on_a_scale(row: dict[str, Any]) -> bool:
    """Is this the row of a task's main metric, with a value that can be drawn beside others?"""
    return bool(row["main"] and row["value"] is not None and 0 <= row["value"] <= 1)


def _short(names: Sequence[str]) -> dict[str, str]:
    """The last part of each path, where that tells them apart."""
    short = {name: name.rpartition("/")[2] for name in names}
    return short if len(set(short.values())) == len(names) else {name: name for name in names}


def _save(figure: Any, path: Path) -> None:
    write_whole(path, lambda part: figure.savefig(part, dpi=150, bbox_inches="tight"))
