"""ropex convert"""

from pathlib import Path
from typing import Annotated

import typer

from ropex.cli.common import length, note, print_json, settings, stderr, stdout
from ropex.tables import METHODS


def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint folder, a .gguf file, or 'nano'.")],
    out: Annotated[Path, typer.Option("-o", "--out", help="The new folder.")],
    to: Annotated[str, typer.Option(help=f"The method: {', '.join(METHODS)}.")],
    init: Annotated[str | None, typer.Option(help="adarope: the method it starts from. [default: rope]")] = None,
    factor: Annotated[float | None, typer.Option(help="How many times the native window.")] = None,
    target: Annotated[str | None, typer.Option(help="The new window, such as 16k, in place of --factor.")] = None,
    tunables: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A tunable of the method; may be repeated.")
    ] = None,
    share_heads: Annotated[bool, typer.Option("--share-heads", help="adarope: one table for all heads.")] = False,
    per: Annotated[str, typer.Option("--length", help="What L is in the scale: position or sequence.")] = "position",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a folder that ropex wrote.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Swap the rotary embedding; every existing weight is copied byte for byte.

    [bold]Examples[/bold]
      ropex convert nano -o nano-ada --to adarope
      ropex convert ./SmolLM2-135M -o smol-yarn --to yarn --factor 2
      ropex convert ./SmolLM2-135M -o smol-ada --to adarope --init yarn --target 16k
    """
    if per not in ("position", "sequence"):
        raise typer.BadParameter(f"'{per}': choose position or sequence", param_hint="--length")
    tokens = length(target) if target else None
    from ropex.convert.convert import convert as run

    with stderr().status("converting"):
        result = run(
            source,
            out,
            to,
            init=init,
            factor=factor,
            target=tokens,
            params=settings(tunables or []),
            share_heads=share_heads,
            length=per,  # type: ignore[arg-type]
            overwrite=overwrite,
        )
    if as_json:
        print_json(result)
        return
    effect = "unchanged by design: the parent's logits" if result["unchanged"] else "the heads turn differently now"
    stdout().print(
        f"{result['out']}: {result['method']}, {result['format']} format, window {result['window']:,} -> "
        f"{result['target']:,}, {result['added_parameters']:,} parameters added, {effect}"
    )
    for remark in result["notes"]:
        note(remark)
