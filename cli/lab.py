"""ropex lab"""

from pathlib import Path
from typing import Annotated

import typer

from ropex.cli.common import length, lengths, note, print_json, progress, stdout, table

app = typer.Typer(help="The papers' arguments on the smallest things that show them.", no_args_is_help=True)

Plot = Annotated[Path | None, typer.Option(help="Draw it into this .png.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@app.command()
def nrw(
    at: Annotated[str, typer.Option("--widths", help="Window widths, tokens.")] = "8,16,32,64",
    row: Annotated[str, typer.Option("--length", help="Tokens a row.")] = "256",
    pairs: Annotated[int, typer.Option(help="Channel pairs of the head.")] = 4,
    steps: Annotated[int, typer.Option(help="Training steps.")] = 600,
    seed: Annotated[int, typer.Option(help="Of the weights and the rows.")] = 0,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Needles in a window: fixed against learned frequencies in a model of one head.

    [bold]Example[/bold]
      ropex lab nrw --widths 8,16,32,64 --plot nrw.png
    """
    widths, tokens = lengths(at, "--widths"), length(row, "--length")
    from ropex.eval.lab.nrw import plot_nrw, run_nrw
    from ropex.eval.plot import check_plot

    if plot:
        check_plot(plot)
    with progress() as listener:
        report = run_nrw(widths, length=tokens, pairs=pairs, steps=steps, seed=seed, progress=listener)
    if plot:
        plot_nrw(report, plot)
    if as_json:
        print_json(report)
        return
    note(f"needles rightly told as inside or outside of a window, in rows of {tokens:,} tokens; guessing gives half")
    shown = table("Needles told", "window", "fixed", "learned")
    for width in widths:
        found = {one["learned"]: f"{one['accuracy']:.1%}" for one in report["results"] if one["width"] == width}
        shown.add_row(f"{width:,}", found[False], found[True])
    stdout().print(shown)


@app.command()
def geometry(
    trained: Annotated[str, typer.Option("--window", help="Training window, tokens.")] = "4k",
    head_dim: Annotated[int, typer.Option(help="Channels of the head.")] = 64,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """What rotation does to a cloud of keys that all point one way, by method and length.

    [bold]Example[/bold]
      ropex lab geometry --window 4k --plot geometry.png
    """
    window = length(trained, "--window")
    from ropex.eval.lab.geometry import plot_geometry, run_geometry
    from ropex.eval.plot import check_plot

    if plot:
        check_plot(plot)
    report = run_geometry(window, head_dim)
    if plot:
        plot_geometry(report, plot)
    if as_json:
        print_json(report)
        return
    sizes = [size for size in (window // 16, window, 16 * window) if size in report["lengths"]]
    columns = [f"shrink at {size:,}" for size in sizes]
    shown = table("Rank-1 clouds of keys", "method", *columns, "mean left", "bounded", "turns", "reached")
    for one in report["results"]:
        rule = one["criteria"]
        fallen = [f"{one['shrink'][report['lengths'].index(size)]:.2f}" for size in sizes]
        turns = "–" if rule["turns"] is None else f"{rule['turns']:.2g}"
        answers = ("yes" if rule[name] else "no" for name in ("bounded", "reached"))
        bounded, reached = answers
        shown.add_row(one["method"], *fallen, f"{rule['limit']:.0%}", bounded, turns, reached)
    stdout().print(shown)
