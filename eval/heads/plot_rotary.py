"""Figures of what AdaRoPE learned."""

import math
from pathlib import Path
from typing import Any

from ropex.eval.heads.canvas import (
    COLOURS,
    class_legend,
    draw,
    length_axis,
    mark_window,
    plain_numbers,
    tidy,
    whole_ticks,
)


def plot_theta(report: dict[str, Any], path: Path) -> None:
    """theta / theta_0 of every key/value head and pair, logarithmic: orange now turns slower, purple faster."""
    heads = [head for head in report["heads"] if "adarope" in head]
    rows = {(head["layer"], head["kv_head"]): head["adarope"]["theta_ratio"] for head in heads}
    values = [[100 * math.log(ratio) for ratio in row] for row in rows.values()]
    most = max(1e-3, max(abs(value) for row in values for value in row))
    first = [i for i, (_, kv_head) in enumerate(rows) if kv_head == 0]

    def fill(figure: Any) -> None:
        panel = figure.subplots()
        drawn = panel.imshow(values, cmap="PuOr", vmin=-most, vmax=most, aspect="auto")
        step = max(1, len(first) // 16)
        panel.set_yticks(first[::step], [list(rows)[i][0] for i in first[::step]])
        panel.set(xlabel="channel pair, fastest first", ylabel="layer, key/value heads below one another")
        whole_ticks(panel.xaxis)
        figure.colorbar(drawn, ax=panel, label="ln(theta / theta_0), percent")

    draw(path, (7.5, 1.4 + max(2.4, 0.07 * len(rows))), fill)


def plot_scale(report: dict[str, Any], path: Path) -> None:
    """tau and gamma against E_2 at the longest length, a dot a query head; and lambda by length, a line a head."""
    heads = [head for head in report["heads"] if "adarope" in head]
    lengths, scaled = report["lengths"], [int(length) for length in heads[0]["adarope"]["lambda"]]
    reach = [head["e2"][str(lengths[-1])] for head in heads]
    colours = [COLOURS[head["class"]] for head in heads]

    def fill(figure: Any) -> None:
        panels = figure.subplots(1, 3)
        for panel, name in zip(panels, ("tau", "gamma"), strict=False):
            panel.scatter(reach, [head["adarope"][name] for head in heads], c=colours, s=22, alpha=0.85, linewidth=0)
            panel.set_xscale("log")
            plain_numbers(panel.xaxis)
            tidy(panel, xlabel=f"E_2 at {lengths[-1]:,} (tokens)", ylabel=name)
        for head, colour in zip(heads, colours, strict=True):
            panels[2].plot(
                scaled, list(head["adarope"]["lambda"].values()), color=colour, alpha=0.6, linewidth=1, marker="."
            )
        length_axis(panels[2], scaled)
        tidy(panels[2], xlabel="context length (tokens)", ylabel="lambda, the query's scale")
        mark_window(panels[2], report["native_window"], scaled[-1])
        class_legend(figure, heads)

    draw(path, (12.0, 4.0), fill)
