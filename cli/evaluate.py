"""ropex eval"""

from pathlib import Path
from typing import Annotated, Any

import typer

from ropex.cli.common import lengths, names, note, print_json, progress, stdout, table

app = typer.Typer(help="Measure checkpoints side by side on the same inputs.", no_args_is_help=True)

Checkpoints = Annotated[
    list[str], typer.Argument(metavar="CKPT...", help="Checkpoints; PATH@yarn:2 applies a method on the fly.")
]
Dtype = Annotated[str | None, typer.Option(help="Compute in float32, bfloat16 or float16. \\[default: as stored]")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@app.command()
def nll(
    checkpoints: Checkpoints,
    data: Annotated[list[Path], typer.Option(help="A .txt or .md file, or a folder of them; may be repeated.")],
    at: Annotated[str, typer.Option("--lengths", help="Window lengths, such as 4k,8k,16k.")],
    buckets: Annotated[int, typer.Option(help="Buckets of positions a window.")] = 8,
    windows: Annotated[int | None, typer.Option(help="Windows a document at most. \\[default: all]")] = None,
    dtype: Dtype = None,
    plot: Annotated[Path | None, typer.Option(help="Draw NLL by position into this .png.")] = None,
    as_json: Json = False,
) -> None:
    """Token NLL by position bucket.

    [bold]Example[/bold]
      ropex eval nll ./SmolLM2-135M ./SmolLM2-135M@yarn:2 my-run --data book.txt --lengths 8k,16k --plot nll.png
    """
    sizes = lengths(at)
    from ropex.eval.nll import evaluate_nll
    from ropex.eval.plot import check_plot, plot_nll

    if plot:
        check_plot(plot)
    with progress() as listener:
        report = evaluate_nll(
            checkpoints, data, sizes, dtype=dtype, buckets=buckets, windows=windows, progress=listener
        )
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
        title = f"NLL (nats a token) in windows of {size:,} tokens, {rows[0]['tokens']:,} tokens scored"
        shown = table(title, "positions", *(f"{row['checkpoint']} ({row['method']})" for row in rows))
        for buckets in zip(*(row["buckets"] for row in rows), strict=True):
            values = ["" if b["nll"] is None else f"{b['nll']:.4f}" for b in buckets]
            shown.add_row(f"{buckets[0]['start']:,} to {buckets[0]['end']:,}", *values)
        shown.add_section()
        shown.add_row("mean", *(f"{row['mean']:.4f}" for row in rows))
        console.print(shown)


@app.command()
def ruler(
    checkpoints: Checkpoints,
    at: Annotated[str, typer.Option("--lengths", help="Context lengths, such as 4k,8k.")],
    tasks: Annotated[str, typer.Option(help="Tasks, separated by commas.")] = "niah_single_1,vt,cwe,fwe",
    samples: Annotated[int, typer.Option(help="Samples a task and length.")] = 20,
    seed: Annotated[int, typer.Option(help="The samples are a function of this.")] = 0,
    chat_template: Annotated[bool, typer.Option("--chat-template", help="Wrap prompts in the chat template.")] = False,
    dtype: Dtype = None,
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="Keep answers in this .jsonl; a rerun resumes.")
    ] = None,
    as_json: Json = False,
) -> None:
    """RULER tasks that need no download; needs lm-eval: pip install lm-eval wonderwords==2.2.0.

    [bold]Example[/bold]
      ropex eval ruler ./SmolLM2-135M ./SmolLM2-135M@yarn:2 --tasks niah_single_1,vt --lengths 4k,8k --samples 20
    """
    sizes = lengths(at)
    from ropex.eval.ruler import evaluate_ruler

    with progress() as listener:
        report = evaluate_ruler(
            checkpoints,
            names(tasks),
            sizes,
            samples,
            seed,
            dtype=dtype,
            chat_template=chat_template,
            out=out,
            progress=listener,
        )
    if as_json:
        print_json(report)
        return
    shown = table(f"RULER, {samples} samples each, in percent", "checkpoint", "task", *(f"{s:,}" for s in sizes))
    for checkpoint in dict.fromkeys(r["checkpoint"] for r in report["results"]):
        for task in names(tasks):
            cells = {
                r["length"]: r["score"]
                for r in report["results"]
                if r["checkpoint"] == checkpoint and r["task"] == task
            }
            shown.add_row(checkpoint, task, *(f"{cells[s]:.1f}" for s in sizes))
    stdout().print(shown)
    if "note" in report:
        note(report["note"])
