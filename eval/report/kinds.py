"""What each kind of evaluation shows: its tables and figures, checkpoints side by side."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ropex.eval.plot import on_a_scale, plot_needle, plot_nll, plot_recall, plot_ruler, plot_tasks
from ropex.eval.report.figures import drawn, verbatim
from ropex.eval.report.find import Report, names
from ropex.eval.report.parts import Block, Cell, Figure, Table, between, number, plainly

Rows = Sequence[dict[str, Any]]
_NOTHING = Cell("")


@dataclass(frozen=True)
class Kind:
    """A section of the page. about: one sentence on how to read it. fill: adds the reports' results to a block."""

    title: str
    about: str
    fill: Callable[[Block, Sequence[Report], Rows], None]


def labelled(reports: Sequence[Report]) -> list[dict[str, Any]]:
    """The rows of all the reports, each with the "name" of its checkpoint, and with name and method as its "label"."""
    called = names(reports)
    rows = []
    for at, report in enumerate(reports):
        for row in report.rows:
            name = called[at, row["checkpoint"], row["method"]]
            rows.append(row | {"name": name, "label": f"{name} ({row['method']})"})
    return rows


def _nll(block: Block, reports: Sequence[Report], rows: Rows) -> None:
    for length in _distinct(rows, "length"):
        here = [row for row in rows if row["length"] == length]
        lines = [
            (f"{b['start']:,} to {b['end'] - 1:,}", [_bucket(row, i) for row in here])
            for i, b in enumerate(here[0]["buckets"])
        ]
        foot = [("mean", [Cell(number(r["mean"], 4), between(r.get("interval"), 3)) for r in here])]
        if any(row.get("difference") for row in here):
            bases = {row["difference"]["to"] for row in here if row.get("difference")}
            named = dict.fromkeys(row["name"] for row in here if row["checkpoint"] in bases)
            cells = [_difference(row.get("difference")) for row in here]
            foot.append((f"less the mean of {' or '.join(named)}", cells))
        foot.append(("perplexity", [Cell(number(row.get("perplexity"), 2)) for row in here]))
        title = (
            f"Windows of {length:,} tokens, {here[0]['tokens']:,} tokens scored, {len(here[0]['documents']):,} text(s)"
        )
        block.tables.append(Table(title, ["positions", *(r["label"] for r in here)], [*lines, *foot], len(foot)))
        figure = drawn(plot_nll, {"results": _drawable(here)})
        block.figures.append(Figure(f"NLL by position in windows of {length:,} tokens", figure))


def _bucket(row: dict[str, Any], place: int) -> Cell:
    return Cell(number(row["buckets"][place]["nll"], 4)) if place < len(row["buckets"]) else _NOTHING


def _difference(difference: dict[str, Any] | None) -> Cell:
    if difference is None:
        return Cell("–")
    return Cell(f"{difference['mean']:+.4f}", between(difference["interval"], 3))


def _needle(block: Block, reports: Sequence[Report], rows: Rows) -> None:
    lengths = sorted({length for row in rows for length in row["lengths"]})
    means = []
    for row in rows:
        columns = [f"{length:,}" for length in row["lengths"]]
        depths = [f"{depth:.0%}" for depth in row["depths"]]
        grid = [[100 * at_length[d] for at_length in row["accuracy"]] for d in range(len(depths))]
        mean = {length: 100 * fmean(at) for length, at in zip(row["lengths"], row["accuracy"], strict=True)}
        means.append((row["label"], [Cell(number(mean[x], 1)) if x in mean else _NOTHING for x in lengths]))
        block.figures.append(Figure(row["label"], drawn(plot_needle, {"results": _drawable([row])})))
        cells = [(depth, [Cell(number(value, 1)) for value in line]) for depth, line in zip(depths, grid, strict=True)]
        block.tables.append(Table(f"{row['label']}: percent by depth, {_samples(row)}", ["depth", *columns], cells))
    block.tables.insert(0, Table("Mean over depths, percent", ["checkpoint", *(f"{x:,}" for x in lengths)], means))


def _samples(row: dict[str, Any]) -> str:
    return f"{row['samples']:,} samples a cell"


def _recall(block: Block, reports: Sequence[Report], rows: Rows) -> None:
    for length in _distinct(rows, "length"):
        here = [row for row in rows if row["length"] == length]
        differences = [row.get("difference") for row in here]
        bases = {difference["to"] for difference in differences if difference}
        named = " or ".join(dict.fromkeys(row["name"] for row in here if row["checkpoint"] in bases))
        foot = [(f"{what}, less that of {named}", cells) for what, cells in _recalled(differences, "+")]
        title = f"{here[0]['windows']:,} window(s) of {length:,} tokens [95% interval]"
        labels = [row["label"] for row in here]
        block.tables.append(Table(title, ["", *labels], [*_recalled(here), *foot], len(foot)))
        formats = [
            (f"{name}, {what}", cells)
            for name in here[0]["formats"]
            for what, cells in _answers([row["formats"][name] for row in here])
        ]
        block.tables.append(Table(f"By format, in windows of {length:,} tokens", ["", *labels], formats))
        figure = drawn(plot_recall, {"results": _drawable(here), "settings": reports[0].settings})
        block.figures.append(Figure(f"Recall by distance in windows of {length:,} tokens", figure))


def _recalled(rows: Sequence[dict[str, Any] | None], sign: str = "") -> list[tuple[str, list[Cell]]]:
    """Lines for the text and the answers, of checkpoints or of their differences, where any has them."""
    texts = [
        Cell(f"{row['text']['nll']:{sign}.4f}", between(row["text"]["interval"], 3)) if row else Cell("–")
        for row in rows
    ]  # fmt: skip
    return [("NLL of the text", texts), *_answers(rows, sign)] if any(rows) else []


def _answers(rows: Sequence[dict[str, Any] | None], sign: str = "") -> list[tuple[str, list[Cell]]]:
    """Lines for the questions near and far, where there are any."""
    lines = []
    for group in ("near", "far"):
        found = [row and row[group] for row in rows]
        if count := next((one["questions"] for one in found if one), 0):
            logprobs = [_answer(one, "logprob", 1, f"{sign}.2f") for one in found]
            shares = [_answer(one, "accuracy", 100, f"{sign}.1f") for one in found]
            name = f"{group} ({count:,})"
            lines += [(f"{name}, log-probability", logprobs), (f"{name}, right, %", shares)]
    return lines


def _answer(group: dict[str, Any] | None, what: str, scale: float, form: str) -> Cell:
    if group is None:
        return Cell("–")
    bounds = group[f"{what}_interval"] or []
    return Cell(f"{scale * group[what]:{form}}", f"[{', '.join(f'{scale * b:{form}}' for b in bounds)}]" * bool(bounds))


def _ruler(block: Block, reports: Sequence[Report], rows: Rows) -> None:
    lengths, tasks = sorted(_distinct(rows, "length")), _distinct(rows, "task")
    checkpoints = _distinct(rows, "label")
    block.tables.append(_ruler_means(reports, lengths))
    cells = {(row["label"], row["length"], row["task"]): row for row in rows}
    for length in lengths:
        lines = [(task, [_score(cells.get((name, length, task))) for name in checkpoints]) for task in tasks]
        lines = [line for line in lines if any(cell is not _NOTHING for cell in line[1])]
        block.tables.append(Table(f"{length:,} tokens, percent [95% interval]", ["task", *checkpoints], lines))
    for name, means in _ruler_entries(reports).items():
        here = _drawable([row for row in rows if row["label"] == name])
        figure = drawn(plot_ruler, {"results": here, "means": [means | {"checkpoint": here[0]["checkpoint"]}]})
        block.figures.append(Figure(name, figure))
    block.tables.append(_ruler_prompts(rows, checkpoints, lengths))


def _ruler_entries(reports: Sequence[Report]) -> dict[str, dict[str, Any]]:
    """Each checkpoint's means over tasks, by its label."""
    called = names(reports)
    return {
        f"{called[at, entry['checkpoint'], entry['method']]} ({entry['method']})": entry
        for at, report in enumerate(reports)
        for entry in report.content["means"]
    }


def _ruler_means(reports: Sequence[Report], lengths: Sequence[int]) -> Table:
    lines = []
    for name, entry in _ruler_entries(reports).items():
        means = {row["length"]: row for row in entry["lengths"]}
        cells = [
            Cell(number(means[x]["mean"], 1), f"{between(means[x]['interval'], 0)} of {means[x]['tasks']}")
            if x in means
            else _NOTHING
            for x in lengths
        ]
        effective = entry["effective_length"]
        lines.append((name, [*cells, Cell(f"{effective:,}" if effective else "none of these")]))
    head = ["checkpoint", *(f"{length:,}" for length in lengths), "effective length"]
    return Table("Mean over tasks, percent [95% interval] of so many tasks", head, lines)


def _ruler_prompts(rows: Rows, checkpoints: Sequence[str], lengths: Sequence[int]) -> Table:
    """What the prompts and answers were like, so that a score is not mistaken for what it is not."""
    lines = []
    for name in checkpoints:
        for length in lengths:
            here = [row for row in rows if row["label"] == name and row["length"] == length]
            if not here:
                continue
            lines.append(
                (
                    f"{name} at {length:,}",
                    [
                        Cell(number(100 * fmean(row["fill"] for row in here), 1)),
                        Cell(number(100 * fmean(row["truncated"] for row in here), 1)),
                        Cell(number(fmean(row["score_whole_numbers"] for row in here), 1)),
                        Cell(plainly(here[0]["bos"])),
                    ],
                )
            )
    head = ["prompts and answers", "filled, %", "cut off, %", "whole numbers only, %", "BOS"]
    title = "Share of the length that is used; answers cut off by the limit; mean if a longer number does not count"
    return Table(title, head, lines)


def _score(row: dict[str, Any] | None) -> Cell:
    return _NOTHING if row is None else Cell(number(row["score"], 1), between(row["interval"], 0))


def _tasks(block: Block, reports: Sequence[Report], rows: Rows) -> None:
    checkpoints = _distinct(rows, "label")
    cells = {(row["label"], row["task"], row["metric"]): row for row in rows}
    measured = list(dict.fromkeys((row["task"], row["metric"]) for row in rows))
    lines = [
        (f"{task}, {metric}", [_measured(cells.get((name, task, metric))) for name in checkpoints])
        for task, metric in measured
    ]
    foot = _set_means(reports, checkpoints)
    block.tables.append(Table("Value ± standard error", ["task, metric", *checkpoints], [*lines, *foot], len(foot)))
    if any(map(on_a_scale, rows)):
        figure = drawn(plot_tasks, {"results": _drawable(rows)})
        block.figures.append(Figure("Each task's main metric, where it lies between 0 and 1", figure))


def _set_means(reports: Sequence[Report], columns: Sequence[str]) -> list[tuple[str, list[Cell]]]:
    called = names(reports)
    found: dict[str, dict[str, Cell]] = {}
    for at, report in enumerate(reports):
        for entry in report.content.get("means", []):
            name = f"{called[at, entry['checkpoint'], entry['method']]} ({entry['method']})"
            title = f"mean of {entry['set']}, {entry['tasks']} of {entry['of']}"
            found.setdefault(title, {})[name] = _measured(entry)
    return [(title, [by_name.get(name, _NOTHING) for name in columns]) for title, by_name in found.items()]


def _measured(row: dict[str, Any] | None) -> Cell:
    if row is None:
        return _NOTHING
    return Cell(number(row["value"], 4), "" if row["stderr"] is None else f"± {row['stderr']:.4f}")


def _drawable(rows: Rows) -> list[dict[str, Any]]:
    return [row | {"checkpoint": verbatim(row["name"])} for row in rows]


def _distinct(rows: Rows, name: str) -> list[Any]:
    return list(dict.fromkeys(row[name] for row in rows))


KINDS = {
    "nll": Kind(
        "NLL by position",
        "Negative log-likelihood of a token given what stands before it in its window, in nats; lower is better.",
        _nll,
    ),
    "needle": Kind(
        "Needle in a haystack",
        "How often a value stated somewhere in a long text is said again at its end; depth 0% is the text's start.",
        _needle,
    ),
    "recall": Kind(
        "Recall",
        "Facts that a long text states and asks for later, near (last said within the native window) or far: "
        "log-probability of the answers in nats and share of right ones, higher is better.",
        _recall,
    ),
    "ruler": Kind(
        "RULER",
        "Long-context tasks; higher is better. The effective length is the longest whose mean is at least 85.6%.",
        _ruler,
    ),
    "tasks": Kind(
        "Tasks",
        "Tasks of lm-evaluation-harness with its own metrics.",
        _tasks,
    ),
}
