"""ropex eval needle"""

from typing import Annotated, Any

import typer

from ropex.cli.common import Checkpoints, Dtype, Json, Out, Plot, goes_on, lengths, print_json, progress, stdout, table


def needle(
    checkpoints: Checkpoints,
    at: Annotated[str, typer.Option("--lengths", help="Lengths of the whole prompt, such as 2k,4k,8k.")],
    depths: Annotated[int, typer.Option(help="How many depths, from the start of the text to its end.")] = 11,
    samples: Annotated[int, typer.Option(help="Of each length and depth.")] = 5,
    style: Annotated[str, typer.Option(help="passkey: sentences; lines: what nano learned.")] = "passkey",
    data: Annotated[
        list[str] | None, typer.Option(help="Text to hide needles in. \\[default: a play that ships with ropex]")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the keys and the texts.")] = 0,
    dtype: Dtype = None,
    out: Out = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Is a pass key found, by how deep it lies and how long the text is?

    [bold]Example[/bold]
      ropex eval needle ./SmolLM2-135M ./SmolLM2-135M@yarn:2 --lengths 4k,8k,16k --plot needle.png
    """
    sizes = lengths(at)
    from ropex.eval.grid import evaluate_needle
    from ropex.eval.plot import check_plot, plot_needle

    if plot:
        check_plot(plot)
    elif out:
        plot = out / "needle.png"
    with progress() as listener:
        report = evaluate_needle(
            checkpoints, sizes, depths=depths, samples=samples, style=style, data=data or (), seed=seed, dtype=dtype,
            out=out, progress=listener,
        )  # fmt: skip
    if not goes_on():
        return
    if as_json:
        print_json(report)
    else:
        show_needle(report)
    if plot:
        plot_needle(report, plot)


def show_needle(report: dict[str, Any]) -> None:
    """A table for each checkpoint: depths down, lengths across."""
    console = stdout()
    for row in report["results"]:
        title = f"{row['checkpoint']} ({row['method']}): share of pass keys found, {row['samples']} a cell"
        shown = table(title, "depth", *(f"{length:,}" for length in row["lengths"]))
        for i, depth in enumerate(row["depths"]):
            shown.add_row(f"{depth:.0%}", *(f"{line[i]:.0%}" for line in row["accuracy"]))
        shown.add_section()
        shown.add_row("mean", *(f"{sum(line) / len(line):.0%}" for line in row["accuracy"]))
        console.print(shown)
