"""The figures of heads, each drawn from what evaluate_heads or compare_heads returned."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ropex.eval.heads.canvas import (
    AFTER,
    BEFORE,
    COLOURS,
    band,
    class_legend,
    class_map,
    draw,
    grid,
    label_grid,
    layers_of,
    length_axis,
    mark_window,
    plain_numbers,
    tidy,
    whole_ticks,
)
from ropex.eval.heads.plot_rotary import plot_scale, plot_theta

Report = dict[str, Any]
Plot = Callable[[Report, Path], None]


def figures(report: Report) -> dict[str, tuple[str, Plot]]:
    """{name: (what it shows, in a sentence, and how it is drawn)} for a probed checkpoint or two compared."""
    pair = report["kind"] == "heads compared"
    after = report["after"] if pair else report
    shown: dict[str, tuple[str, Plot]] = {"classes": ("Every head's class, and how far it looks", plot_classes)}
    if pair:
        shown["scatter"] = ("How far each head looks, before and after", plot_scatter)
    shown |= {
        "reach": ("Effective attention length by context length, a line a head", plot_reach),
        "failure": ("Weight on the first token and largest logit, by query position", plot_failure),
        "geometry": ("Clouds of queries and keys, before and after rotation", plot_geometry),
        "pairs": ("What each channel pair adds to the logits", plot_pairs),
    }
    if any("adarope" in head for head in after["heads"]):
        shown["theta"] = ("Learned frequencies over those that they started from", _of_after(plot_theta))
        shown["scale"] = ("Learned attention scales", _of_after(plot_scale))
    return shown


def _of_after(plot: Plot) -> Plot:
    return lambda report, path: plot(report.get("after", report), path)


def sides(report: Report) -> list[Report]:
    """The probed checkpoints of a report: one, or before and after."""
    return [report["before"], report["after"]] if report["kind"] == "heads compared" else [report]


def name_of(report: Report) -> str:
    return f"{report['checkpoint'].rstrip('/').rpartition('/')[2]} ({report['method']})"


def plot_classes(report: Report, path: Path) -> None:
    """Layers down, heads across: classes, and E_2 at the longest length."""
    shown = sides(report)
    heads = shown[0]["heads"]
    length = shown[0]["lengths"][-1]
    reach = [grid(side["heads"], lambda head: head["e2"][str(length)]) for side in shown]

    def fill(figure: Any) -> None:
        from matplotlib.colors import LogNorm

        panels = figure.subplots(1, 2 * len(shown), sharey=True, squeeze=False)[0]
        values = [value for one in reach for row in one for value in row if value == value]
        norm = LogNorm(min(values), max(max(values), min(values) * 1.01))
        for i, (side, values_of) in enumerate(zip(shown, reach, strict=True)):
            class_map(panels[i], side, name_of(side))
            drawn = panels[len(shown) + i].imshow(values_of, cmap="cividis", norm=norm, aspect="auto")
            label_grid(panels[len(shown) + i], heads, f"E_2 at {length:,} tokens")
        bar = figure.colorbar(drawn, ax=panels, label="effective attention length E_2 (tokens)")
        plain_numbers(bar.ax.yaxis)
        class_legend(figure, [head for side in shown for head in side["heads"]])

    width = max(2.4, 0.28 * (1 + max(head["head"] for head in heads)))
    draw(path, (1.8 + 2 * len(shown) * width, 1.9 + max(1.6, 0.22 * len(layers_of(heads)))), fill)


def plot_reach(report: Report, path: Path) -> None:
    """E_2 by context length, logarithmic both ways; the dotted line is a head that averages all it may see."""
    shown = sides(report)

    def fill(figure: Any) -> None:
        panels = figure.subplots(1, len(shown), sharey=True, squeeze=False)[0]
        for panel, side in zip(panels, shown, strict=True):
            lengths = side["lengths"]
            for head in side["heads"]:
                values = [head["e2"][str(length)] for length in lengths]
                panel.plot(lengths, values, color=COLOURS[head["class"]], alpha=0.6, linewidth=1, marker=".")
            panel.plot(lengths, [(length + 1) / 2 for length in lengths], ":", color="grey")
            length_axis(panel, lengths)
            panel.set_yscale("log")
            plain_numbers(panel.yaxis)
            mark_window(panel, side["native_window"], lengths[-1])
            tidy(panel, xlabel="context length (tokens)")
            panel.set_title(name_of(side), fontsize="medium", pad=18)
        panels[0].set_ylabel("E_2, mean over queries (tokens)")
        class_legend(figure, [head for side in shown for head in side["heads"]])

    draw(path, (1.2 + 4.2 * len(shown), 4.4), fill)


def plot_scatter(report: Report, path: Path) -> None:
    """E_2 after against E_2 before, a dot a head, coloured by its class before; on the diagonal nothing changed."""
    before, after = report["before"], report["after"]
    lengths = before["lengths"]
    chosen = [length for length in lengths if length >= before["native_window"]] or lengths[-1:]
    chosen = list(dict.fromkeys([chosen[0], chosen[-1]]))

    def fill(figure: Any) -> None:
        panels = figure.subplots(1, len(chosen), squeeze=False)[0]
        for panel, length in zip(panels, chosen, strict=True):
            x = [head["e2"][str(length)] for head in before["heads"]]
            y = [head["e2"][str(length)] for head in after["heads"]]
            panel.scatter(x, y, c=[COLOURS[head["class"]] for head in before["heads"]], s=26, alpha=0.85, linewidth=0)
            ends = (min(x + y) * 0.85, max(x + y) * 1.15)
            panel.plot(ends, ends, "--", color="grey", linewidth=1)
            panel.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
            plain_numbers(panel.xaxis)
            plain_numbers(panel.yaxis)
            tidy(panel, xlabel=f"E_2 before (tokens): {name_of(before)}", ylabel=f"after: {name_of(after)}")
            panel.set_title(f"at {length:,} tokens", fontsize="medium")
        class_legend(figure, before["heads"])

    draw(path, (0.6 + 4.4 * len(chosen), 4.9), fill)


def plot_failure(report: Report, path: Path) -> None:
    """Weight on the first token, and the largest logit, by query position: medians over heads and their middle halves.

    Weight is shown of the heads that rest on the first token most, a quarter of all: others have none to lose.
    """
    shown = sides(report)
    edges = shown[0]["positions"]["edges"]
    middles = [(a + b) / 2 for a, b in zip(edges[:-1], edges[1:], strict=True)]
    first = shown[0]["heads"]
    resting = sorted(range(len(first)), key=lambda i: -(first[i]["by_position"]["sink"][0] or 0))
    kept = sorted(resting[: max(1, len(first) // 4)])

    def fill(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        for side, colour, style in zip(shown, (BEFORE, AFTER), ("o-", "s-"), strict=False):
            of_heads = [head["by_position"] for head in side["heads"]]
            options: Any = {"marker": style[0], "markersize": 4, "label": name_of(side)}
            band(left, middles, [of_heads[i]["sink"] for i in kept], colour, **options)
            band(right, middles, [one["largest"] for one in of_heads], colour, **options)
        left.set_title(f"the {len(kept)} heads that rest on it most at first", fontsize="medium", pad=18)
        right.set_title(f"all {len(first)} heads", fontsize="medium", pad=18)
        left.set_ylim(0, None)
        for panel, what in ((left, "weight on the first token"), (right, "largest logit of a query")):
            tidy(panel, xlabel="query position (tokens)", ylabel=f"{what}, median over heads")
            mark_window(panel, shown[0]["native_window"], edges[-1])
            whole_ticks(panel.xaxis)
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)

    draw(path, (9.0, 4.2), fill)


def plot_geometry(report: Report, path: Path) -> None:
    """Stable ranks of the clouds and the cosine of their means by length: before rotation, and after it."""
    side = sides(report)[-1]
    lengths = side["lengths"]
    kinds = {
        "q_stable_rank": ("queries", "stable rank"),
        "k_stable_rank": ("keys", "stable rank"),
        "k_first_singular": ("keys", "first singular value / sqrt(N)"),
        "mean_cosine": ("mean query and mean key", "cosine"),
    }

    def fill(figure: Any) -> None:
        panels = figure.subplots(1, len(kinds))
        for panel, (kind, (of, what)) in zip(panels, kinds.items(), strict=True):
            for at, colour, marker in ((0, BEFORE, "o"), (1, AFTER, "s")):
                rows = [[head["geometry"][str(n)][kind][at] for n in lengths] for head in side["heads"]]
                name = ("before rotation", "after rotation")[at]
                band(panel, lengths, rows, colour, marker=marker, markersize=4, label=name)
            length_axis(panel, lengths)
            tidy(panel, xlabel="context length (tokens)", ylabel=what)
            panel.set_title(of, fontsize="medium")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False)
        figure.suptitle(f"{name_of(side)}: medians over heads, and their middle halves", fontsize="medium")

    draw(path, (12.5, 3.9), fill)


def plot_pairs(report: Report, path: Path) -> None:
    """The share of |q_f . k_f| in the sum over pairs: by layer, by distance, and how uneven it is by head."""
    side = sides(report)[-1]
    heads = side["heads"]
    layers = layers_of(heads)

    def mean(rows: Sequence[Sequence[float]]) -> list[float]:
        return [sum(column) / len(column) for column in zip(*rows, strict=True)]

    by_layer = [mean([head["pairs"]["shares"] for head in heads if head["layer"] == layer]) for layer in layers]
    distances = side["distances"][: len(heads[0]["pairs"]["by_distance"])]
    near = [mean([head["pairs"]["by_distance"][i] for head in heads]) for i in range(len(distances))]
    near, distances = near[: _last_used(near)], distances[: _last_used(near)]
    variation = grid(heads, lambda head: head["pairs"]["variation"])

    def fill(figure: Any) -> None:
        panels = figure.subplots(1, 3)
        for panel, values, title in (
            (panels[0], by_layer, "by layer, mean over heads"), (panels[1], near, "by distance, mean over heads"),
        ):  # fmt: skip
            drawn = panel.imshow([[100 * v for v in row] for row in values], cmap="cividis", vmin=0, aspect="auto")
            panel.set_xlabel("channel pair, fastest first")
            whole_ticks(panel.xaxis)
            panel.set_title(title, fontsize="medium")
            figure.colorbar(drawn, ax=panel, label="share of |q.k| (percent)")
        panels[0].set_yticks(range(0, len(layers), max(1, len(layers) // 16)), layers[:: max(1, len(layers) // 16)])
        panels[0].set_ylabel("layer")
        panels[1].set_yticks(range(len(distances)), [f"{d:,}" for d in distances])
        panels[1].set_ylabel("distance, from (tokens)")
        drawn = panels[2].imshow(variation, cmap="cividis", aspect="auto")
        label_grid(panels[2], heads, "unevenness, by head")
        panels[2].set_ylabel("layer")
        figure.colorbar(drawn, ax=panels[2], label="coefficient of variation over pairs")
        figure.suptitle(name_of(side), fontsize="medium")

    draw(path, (13.0, 1.4 + max(2.6, 0.16 * len(layers))), fill)


def _last_used(rows: Sequence[Sequence[float]]) -> int:
    """How many rows there are up to the last that is not empty."""
    return max(i for i, row in enumerate(rows) if sum(row) > 0) + 1
