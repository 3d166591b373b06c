"""ropex eval recall"""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from ropex.cli.common import (
    Checkpoints,
    Dtype,
    Json,
    Out,
    Plot,
    goes_on,
    lengths,
    names,
    note,
    print_json,
    progress,
    stdout,
    table,
)

_FEW = 5  # windows, below which an interval over them says little


def recall(
    checkpoints: Checkpoints,
    at: Annotated[str, typer.Option("--lengths", help="Lengths of the windows, such as 8k,16k.")],
    formats: Annotated[
        str, typer.Option(help="How facts are put: lines, which nano learned, sentence, code, quote. \\[default: all]")
    ] = "",
    windows: Annotated[int, typer.Option(help="Of each length.", min=1)] = 8,
    data: Annotated[
        list[str] | None, typer.Option(help="Text to put facts into. \\[default: a play that ships with ropex]")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the facts and the texts.")] = 0,
    dtype: Dtype = None,
    out: Out = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Is what a long text said said again when asked for, by how far back it was? And how well is the text read?

    [bold]Example[/bold]
      ropex eval recall ./SmolLM2-135M ./SmolLM2-135M@yarn:2 my-run --lengths 8k,16k --plot recall.png
    """
    from ropex.facts import MEASURED, check_formats

    sizes, chosen = lengths(at), names(formats) or list(MEASURED)
    check_formats(chosen)
    from ropex.eval.plot import check_plot, plot_recall
    from ropex.eval.recall import evaluate_recall

    if plot:
        check_plot(plot)
    elif out:
        plot = out / "recall.png"
    with progress() as listener:
        report = evaluate_recall(
            checkpoints, sizes, formats=chosen, windows=windows, data=data or (), seed=seed, dtype=dtype, out=out,
            progress=listener,
        )  # fmt: skip
    if not goes_on():
        return
    if as_json:
        print_json(report)
    else:
        show_recall(report)
    if windows < _FEW:
        note(f"an interval over {windows} window(s) says little: give --windows {_FEW} or more")
    if plot:
        plot_recall(report, plot)


def show_recall(report: dict[str, Any]) -> None:
    """A table for each length: what is measured down, checkpoints side by side."""
    console, border = stdout(), report["settings"]["border"]
    for size in dict.fromkeys(result["length"] for result in report["results"]):
        rows = [r for r in report["results"] if r["length"] == size]
        near, far = ((rows[0][group] or {"questions": 0})["questions"] for group in ("near", "far"))
        title = (
            f"Recall in {rows[0]['windows']} window(s) of {size:,} tokens [95% interval]\n"
            f"near: {near} questions, last answered at most {border:,} tokens before; far: {far}, further back"
        )
        shown = table(title, "", *(f"{row['checkpoint']} ({row['method']})" for row in rows))
        _compare(shown.add_row, rows)
        shown.add_section()
        shown.add_row("right, log-prob.")
        for name in rows[0]["formats"]:
            for group in ("near", "far"):
                found = [row["formats"][name][group] for row in rows]
                if found[0]:
                    shown.add_row(f"{name}, {group}", *(f"{f['accuracy']:.0%}  {f['logprob']:.2f}" for f in found))
        if len(rows) > 1:
            shown.add_section()
            shown.add_row("less the first")
            _compare(shown.add_row, [row["difference"] for row in rows], "+")
        console.print(shown)


def _compare(add_row: Callable[..., None], rows: Sequence[dict[str, Any] | None], sign: str = "") -> None:
    """Rows for the text, near and far, of checkpoints or of their differences, of which the first has none."""
    add_row("text, NLL", *("" if row is None else _text(row["text"], sign) for row in rows))
    for group in ("near", "far"):
        found = [row and row[group] for row in rows]
        if any(found):
            add_row(f"{group}, log-prob.", *(_cell(f, "logprob", f"{sign}.2f") for f in found))
            add_row(f"{group}, right", *(_cell(f, "accuracy", f"{sign}.0%") for f in found))


def _text(text: dict[str, Any], sign: str) -> str:
    return f"{text['nll']:{sign}.3f}" + _bounds(text["interval"], f"{sign}.3f")


def _cell(group: dict[str, Any] | None, name: str, form: str) -> str:
    return f"{group[name]:{form}}" + _bounds(group[f"{name}_interval"], form) if group else ""


def _bounds(bounds: Sequence[float] | None, form: str) -> str:
    return f" [{', '.join(f'{bound:{form}}' for bound in bounds)}]" if bounds else ""
