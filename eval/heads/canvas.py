"""What the figures of heads share: colours, maps of layers by heads, and how they are kept."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ropex.eval.files import write_whole

COLOURS = {
    "retrieval": "#D55E00", "off-by-one": "#56B4E9", "local": "#0072B2", "sink": "#E69F00", "global": "#009E73",
    "mixed": "#999999",
}  # fmt: skip
BEFORE, AFTER = "#D55E00", "#0072B2"  # Okabe and Ito's, as all of these
LETTERS = {"retrieval": "R", "off-by-one": "1", "local": "L", "sink": "S", "global": "G", "mixed": "·"}

Heads = Sequence[dict[str, Any]]


def draw(path: Path, size: tuple[float, float], fill: Callable[[Any], None]) -> None:
    """Make a figure of `size` inches, have fill(figure) draw into it, and write it whole; the suffix is its format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    fill(figure)
    write_whole(path, lambda part: figure.savefig(part, dpi=150, bbox_inches="tight"))


def layers_of(heads: Heads) -> list[int]:
    return sorted({head["layer"] for head in heads})


def grid(heads: Heads, value: Callable[[dict[str, Any]], Any]) -> list[list[Any]]:
    """value(head) by layer and head; NaN where a layer has none."""
    width = 1 + max(head["head"] for head in heads)
    rows = {layer: [math.nan] * width for layer in layers_of(heads)}
    for head in heads:
        rows[head["layer"]][head["head"]] = value(head)
    return list(rows.values())


def label_grid(panel: Any, heads: Heads, title: str, across: str = "query head") -> None:
    layers = layers_of(heads)
    step = max(1, len(layers) // 16)
    panel.set_yticks(range(0, len(layers), step), layers[::step])
    panel.set(xlabel=across, ylabel="layer" if panel.get_subplotspec().is_first_col() else "")
    whole_ticks(panel.xaxis)
    panel.set_title(title, fontsize="medium")


def whole_ticks(axis: Any) -> None:
    """Ticks at whole numbers, for things that are counted."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(7, integer=True))


def plain_numbers(axis: Any, steps: tuple[int, ...] = (1, 3)) -> None:
    """A logarithmic axis whose ticks read 1, 3, 10, not powers."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_major_locator(LogLocator(10, steps))
    axis.set_major_formatter(StrMethodFormatter("{x:,g}"))
    axis.set_minor_formatter(NullFormatter())


def class_map(panel: Any, report: dict[str, Any], title: str) -> None:
    """Heads by layer, coloured and lettered by class; known retrieval heads, where a list was read, are ringed."""
    from matplotlib.colors import to_rgb

    heads = report["heads"]
    white = (1.0, 1.0, 1.0)
    found = grid(heads, lambda head: head["class"])
    panel.imshow([[to_rgb(COLOURS[c]) if c in COLOURS else white for c in row] for row in found], aspect="auto")
    for y, row in enumerate(found):
        for x, name in enumerate(row):
            if name in LETTERS:
                colour = "white" if name in ("local", "retrieval", "global") else "#111111"
                panel.text(x, y, LETTERS[name], ha="center", va="center", color=colour, fontsize="small")
    for head, score in zip(heads, report.get("known", []), strict=False):
        if score >= 0.5:
            place = head["head"], layers_of(heads).index(head["layer"])
            panel.plot(*place, "o", markersize=11, markerfacecolor="none", markeredgecolor="#F0E442", markeredgewidth=2)
    label_grid(panel, heads, title)


def class_legend(figure: Any, heads: Heads, **options: Any) -> None:
    """The classes that occur."""
    from matplotlib.patches import Patch

    found = {head["class"] for head in heads}
    patches = [Patch(color=COLOURS[n], label=f"{LETTERS[n]}  {n}") for n in COLOURS if n in found]
    figure.legend(
        handles=patches,
        loc="outside lower center",
        ncols=min(6 if figure.get_figwidth() > 6 else 3, len(patches)),
        frameon=False,
        **options,
    )


def quartiles(rows: Sequence[Sequence[float | None]]) -> list[tuple[float, float, float]]:
    """First quartile, median and third of each column over the rows that have it."""
    import numpy as np

    columns = [[value for value in column if value is not None] for column in zip(*rows, strict=True)]
    return [tuple(np.percentile(column, (25, 50, 75))) if column else (math.nan,) * 3 for column in columns]


def band(panel: Any, x: Sequence[float], rows: Sequence[Sequence[float | None]], colour: str, **options: Any) -> None:
    """The median over rows as a line, and the middle half of them as a band."""
    low, middle, high = zip(*quartiles(rows), strict=True)
    panel.fill_between(x, low, high, color=colour, alpha=0.18, linewidth=0)
    panel.plot(x, middle, color=colour, **options)


def tidy(panel: Any, **labels: Any) -> None:
    panel.set(**labels)
    panel.grid(alpha=0.3)
    panel.spines[["top", "right"]].set_visible(False)


def length_axis(panel: Any, lengths: Sequence[int]) -> None:
    """Context lengths on a logarithmic axis, ticked at themselves."""
    panel.set_xscale("log", base=2)
    panel.set_xticks(lengths, [f"{length:,}" for length in lengths], rotation=45, ha="right")
    panel.minorticks_off()


def mark_window(panel: Any, window: int, most: int, name: str = "native window") -> None:
    """Where the model was trained to, if that lies inside."""
    if window < most:
        panel.axvline(window, color="grey", linestyle="--", linewidth=1)
        panel.annotate(
            f"{name} {window:,}", (window, 1.01), xycoords=("data", "axes fraction"), ha="center", color="dimgrey",
            fontsize="small",
        )  # fmt: skip
