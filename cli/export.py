"""ropex export"""

from pathlib import Path
from typing import Annotated

import typer

from ropex.cli.common import length, note, one_of, print_json, stderr, stdout


def export(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run of `ropex extend`, or a converted checkpoint.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The new folder.")],
    to: Annotated[str, typer.Option("--format", help="safetensors, or gguf for llama.cpp.")] = "safetensors",
    dtype: Annotated[str | None, typer.Option(help="Cast the weights: float32, bfloat16 or float16.")] = None,
    max_shard_size: Annotated[str, typer.Option(help="The largest file, such as 5GB or 200MB.")] = "5GB",
    bake_length: Annotated[
        str | None, typer.Option(help="One table for all heads: fold the scale at this length into q.")
    ] = None,
    no_scale: Annotated[bool, typer.Option("--no-scale", help="One table for all heads: drop the scale.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a folder that ropex wrote.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Merge what a run trained and write what other tools load.

    [bold]Examples[/bold]
      ropex export my-run -o my-model --dtype bfloat16
      ropex export smol-rope-id -o smol-stock --bake-length 16k
      ropex export smol-yarn -o smol-gguf --format gguf
    """
    one_of("--format", to, "safetensors", "gguf")
    tokens = length(bake_length, "--bake-length") if bake_length else None
    from ropex.convert.export import export as write

    with stderr().status("exporting"):
        result = write(
            run,
            out,
            to=to,  # type: ignore[arg-type]
            dtype=dtype,
            max_shard_size=max_shard_size,
            bake_length=tokens,
            scale=not no_scale,
            overwrite=overwrite,
        )
    if as_json:
        print_json(result)
        return
    how = {
        "stock": "needs no code",
        "gguf": "for llama.cpp",
        "per-head": "load with trust_remote_code=True, or with ropex.load",
    }[result["format"]]
    stdout().print(
        f"{result['out']}: {result['format']} format ({how}), {result['parameters']:,} parameters, "
        f"{result['merged']} weights merged, {result['dtype']}, window {result['target']:,}"
    )
    for remark in result["notes"]:
        note(remark)
