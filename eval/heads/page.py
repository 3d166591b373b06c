"""The figures of heads as files in a folder, and on one page with tables, in the layout of `ropex report`."""

from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from statistics import fmean
from typing import Any

from ropex.errors import OutputError
from ropex.eval.files import write_whole
from ropex.eval.heads.plot import figures, name_of, sides
from ropex.eval.report.figures import drawn
from ropex.eval.report.parts import Block, Cell, Figure, Table, number, plainly

_ABOUT = (
    "What each attention head does with a text: how many tokens it looks at (E_2), how that grows with the context, "
    "how much of it rests on the first token, and the class that follows. Means are over query positions; "
    "docs/heads.md in ropex explains every measure and figure."
)


@dataclass(frozen=True)
class _Section:
    title: str
    about: str


def check_files(html: Path | None, png: Path | None) -> None:
    """Can the page and the folder be written? Asked before the heads are probed, not after."""
    if html and html.suffix.lower() not in (".html", ".htm"):
        raise OutputError(f"{html} is no name for a page: end it in .html")
    if html and not html.absolute().parent.is_dir():
        raise OutputError(f"{html.parent} does not exist: make that folder, or name another file")
    if png and png.exists() and not png.is_dir():
        raise OutputError(f"{png} is a file: name a folder for the figures")


def write_pictures(report: dict[str, Any], folder: Path) -> None:
    """Every figure as FOLDER/heads-NAME.png, over earlier ones."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder} cannot be made ({error.strerror}): name another folder") from error
    for name, (_, plot) in figures(report).items():
        plot(report, folder / f"heads-{name}.png")


def write_page(report: dict[str, Any], out: Path) -> None:
    """One HTML page that needs nothing but itself, over an earlier one: tables, every figure, every head."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    block = Block(title="heads")
    shown = sides(report)
    for side in shown:
        block.tables.append(_classes(side))
    if len(shown) > 1:
        block.tables.append(_changes(report))
    for caption, plot in figures(report).values():
        block.figures.append(Figure(caption, drawn(plot, report)))
    for side in shown:
        block.tables.append(_heads(side))
        facts = {name: side[name] for name in ("lengths", "queries", "windows", "trained_window", "thresholds")}
        block.facts += [(f"{name.replace('_', ' ')}", plainly(value)) for name, value in facts.items()]
        block.sources.append((side["checkpoint"], side["method"]))
    environment = Environment(
        loader=PackageLoader("ropex.eval.report", "."), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    section = {"id": "heads", "kind": asdict(_Section("What the heads do", _ABOUT)), "blocks": [block]}
    page = environment.get_template("page.html").render(
        sections=[section], made=f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M} UTC", version=version("ropex"),
        folders=len(shown),
    )  # fmt: skip
    write_whole(out, lambda part: part.write_text(page, encoding="utf-8"))


def _classes(report: dict[str, Any]) -> Table:
    lengths = [str(length) for length in report["lengths"]]
    rows = []
    for name, count in report["classes"].items():
        heads = [head for head in report["heads"] if head["class"] == name]
        if heads:
            reach = [Cell(number(fmean(head["e2"][x] for head in heads), 1)) for x in lengths]
            sink = [Cell(f"{fmean(head['sink'][x] for head in heads):.0%}") for x in lengths]
            rows.append((name, [Cell(str(count)), *reach, *sink]))
    columns = [f"{what} {int(x):,}" for what in ("E_2 at", "first token at") for x in lengths]
    return Table(f"{name_of(report)}: heads by class, means", ["class", "heads", *columns], rows)


def _changes(report: dict[str, Any]) -> Table:
    counts: dict[str, int] = {}
    for change in report["changes"]:
        kind = f"{change['from']} to {change['to']}"
        counts[kind] = counts.get(kind, 0) + 1
    return Table("Heads of another class", ["class", "heads"], [(n, [Cell(str(c))]) for n, c in counts.items()])


def _heads(report: dict[str, Any]) -> Table:
    longest = str(report["lengths"][-1])
    rows = []
    for head in report["heads"]:
        needle = next(iter(head["needle"].values()))["mass"] if "needle" in head else None
        cells = [
            Cell(head["class"]),
            Cell(number(head["e2"][longest], 1), f"± {head['e2_error'][longest]:.1f}"),
            Cell(number(head["growth"], 2)),
            *(Cell(f"{head[name][longest]:.0%}") for name in ("sink", "local", "previous")),
            Cell("–" if needle is None else f"{needle:.0%}"),
            Cell(number(head["largest"][longest], 1)),
        ]
        rows.append((f"{head['layer']}.{head['head']}", cells))
    head_row = ["layer.head", "class", "E_2", "growth", "first token", "last 8", "token before", "needle", "largest"]
    return Table(f"{name_of(report)}: every head, at {int(longest):,} tokens", head_row, rows)
