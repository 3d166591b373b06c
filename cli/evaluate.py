"""ropex eval"""

from typing import Annotated, Any

import typer

from ropex.cli.common import (
    Checkpoints,
    Dtype,
    Json,
    Out,
    Plot,
    goes_on,
    length,
    lengths,
    print_json,
    progress,
    stdout,
    table,
)
from ropex.cli.everything import everything
from ropex.cli.needle import needle
from ropex.cli.recall import recall
from ropex.cli.ruler import ruler
from ropex.cli.tasks import tasks

app = typer.Typer(help="Measure checkpoints side by side on the same inputs.", no_args_is_help=True)
app.command()(needle)
app.command()(recall)
app.command()(ruler)
app.command()(tasks)
app.command("all")(everything)


@app.command()
def nll(
    checkpoints: Checkpoints,
    data: Annotated[
        list[str],
        typer.Option(help="A .txt, .md, .jsonl or .parquet file, folder, Hub dataset (owner/name:split), or pg19."),
    ],
    at: Annotated[str, typer.Option("--lengths", help="Window lengths, such as 4k,8k,16k.")],
    buckets: Annotated[int, typer.Option(help="Buckets of positions a window.")] = 8,
    windows: Annotated[int | None, typer.Option(help="Windows a document at most. \\[default: all]")] = None,
    documents: Annotated[int | None, typer.Option(help="The first so many documents that are long enough.")] = None,
    stride: Annotated[
        str | None,
        typer.Option(help="Slide the window by so many tokens, scoring the new ones. \\[default: side by side]"),
    ] = None,
    dtype: Dtype = None,
    out: Out = None,
    plot: Plot = None,
    as_json: Json = False,
) -> None:
    """Token NLL by position bucket, with 95% intervals over documents.

    [bold]Example[/bold]
      ropex eval nll ./SmolLM2-135M ./SmolLM2-135M@yarn:2 my-run --data book.txt --lengths 8k,16k --plot nll.png
    """
    sizes, step = lengths(at), None if stride is None else length(stride, "--stride")
    from ropex.eval.nll import evaluate_nll
    from ropex.eval.plot import check_plot, plot_nll

    if plot:
        check_plot(plot)
    elif out:
        plot = out / "nll.png"
    with progress() as listener:
        report = evaluate_nll(
            checkpoints, data, sizes, dtype=dtype, buckets=buckets, windows=windows, documents=documents, stride=step,
            out=out, progress=listener,
        )  # fmt: skip
    if not goes_on():
        return
    if as_json:
        print_json(report)
    else:
        show_nll(report)
    if plot:
        plot_nll(report, plot)


def show_nll(report: dict[str, Any]) -> None:
    """A table for each length: positions down, checkpoints side by side."""
    console = stdout()
    for size in dict.fromkeys(result["length"] for result in report["results"]):
        rows = [r for r in report["results"] if r["length"] == size]
        scored = f"{rows[0]['tokens']:,} tokens of {len(rows[0]['documents'])} document(s) scored"
        title = f"NLL (nats per token) in windows of {size:,} tokens, {scored}"
        shown = table(title, "positions", *(f"{row['checkpoint']} ({row['method']})" for row in rows))
        for buckets in zip(*(row["buckets"] for row in rows), strict=True):
            values = ["" if b["nll"] is None else f"{b['nll']:.4f}" for b in buckets]
            shown.add_row(f"{buckets[0]['start']:,} to {buckets[0]['end']:,}", *values)
        shown.add_section()
        shown.add_row("mean", *(f"{row['mean']:.4f}" for row in rows))
        if rows[0]["interval"]:
            shown.add_row("95% interval, over documents", *(_interval(row["interval"]) for row in rows))
        if len(rows) > 1:
            shown.add_row("difference from the first", "", *(f"{row['difference']['mean']:+.4f}" for row in rows[1:]))
            if rows[0]["interval"]:
                shown.add_row(
                    "its 95% interval", "", *(_interval(row["difference"]["interval"], "+") for row in rows[1:])
                )
        console.print(shown)


def _interval(bounds: list[float], sign: str = "") -> str:
    return " to ".join(f"{bound:{sign}.4f}" for bound in bounds)
