"""ropex eval"""

from pathlib import Path
from typing import Annotated

import typer

from ropex.cli.common import lengths, names, note, print_json, progress, stdout, table

app = typer.Typer(help="Measure checkpoints side by side on the same inputs.", no_args_is_help=True)

Checkpoints = Annotated[
    list[str], typer.Argument(metavar="CKPT...", help="Checkpoints; PATH@yarn:2 applies a method on the fly.")
]
Dtype = Annotated[str | None, typer.Option(help="Compute in float32, bfloat16 or float16. [default: as stored]")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


@app.command()
def nll(
    checkpoints: Checkpoints,
    data: Annotated[list[Path], typer.Option(help="A .txt or .md file, or a folder of them; may be repeated.")],
    at: Annotated[str, typer.Option("--lengths", help="Window lengths, such as 4k,8k,16k.")],
    buckets: Annotated[int, typer.Option(help="Buckets of positions a window.")] = 8,
    windows: Annotated[int | None, typer.Option(help="Windows a document at most. [default: all]")] = None,
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
    from ropex.eval.plot import plot_nll

    with progress() as listener:
        report = evaluate_nll(
            checkpoints, data, sizes, dtype=dtype, buckets=buckets, windows=windows, progress=listener
        )
    if plot:
        plot_nll(report, plot)
    if as_json:
        print_json(report)
        return
    console = stdout()
    for size in sizes:
        rows = [r for r in report["results"] if r["length"] == size]
        edges = [f"{b['start']:,}-{b['end']:,}" for b in rows[0]["buckets"]]
        title = f"NLL (nats a token) in windows of {size:,} tokens, {rows[0]['tokens']:,} tokens scored"
        shown = table(title, "checkpoint", "method", "mean", *edges)
        for row in rows:
            values = ["" if b["nll"] is None else f"{b['nll']:.3f}" for b in row["buckets"]]
            shown.add_row(row["checkpoint"], row["method"], f"{row['mean']:.4f}", *values)
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
    """RULER tasks that need no download; needs the extra: pip install 'ropex\\[eval]'.

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
