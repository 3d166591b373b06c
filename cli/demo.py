"""ropex demo"""

from pathlib import Path
from typing import Annotated

import typer

from ropex.cli.common import print_json, progress, stdout, table


def demo(
    out: Annotated[Path | None, typer.Option("-o", "--out", help="Keep every step's folder here.")] = None,
    seed: Annotated[int, typer.Option(help="Everything follows from this.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """The whole job on the checkpoint that ships with ropex: inspect, convert, extend 8x, evaluate, export.

    [bold]Example[/bold]
      ropex demo -o my-demo
    """
    from ropex.demo.run import run_demo

    with progress() as listener:
        report = run_demo(out, seed=seed, progress=listener)
    if as_json:
        print_json(report)
        return
    sizes = list(report["rows"][0]["nll"])
    window = int(sizes[0])
    columns = [f"{int(s) // window}x ({s})" for s in sizes]
    shown = table(
        "nano, native window 256: NLL in nats a token (lower is better), needles found (higher is better)",
        "checkpoint",
        *(f"NLL {c}" for c in columns),
        *(f"needle {c}" for c in columns),
    )
    for row in report["rows"]:
        nll, needle = ([f"{row['nll'][s]:.3f}" for s in sizes], [f"{row['needle'][s]:.0%}" for s in sizes])
        shown.add_row(row["name"], *nll, *needle)
    console = stdout()
    console.print(shown)
    console.print(f"{report['seconds']:.0f} s" + (f"; the exported checkpoint is {out / 'exported'}" if out else ""))
