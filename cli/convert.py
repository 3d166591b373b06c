"""ropex convert"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from ropex.cli.common import length, note, one_of, print_json, progress, settings, stdout, table
from ropex.tables import METHODS


def convert(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SRC", help="A checkpoint folder (Hugging Face or Meta), a .gguf file, a Hub id, or 'nano'."
        ),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", help="The new folder.")],
    to: Annotated[
        str | None, typer.Option(help=f"The method: {', '.join(METHODS)}. Without one only the pairing changes.")
    ] = None,
    init: Annotated[str | None, typer.Option(help="adarope: the method it starts from. \\[default: rope]")] = None,
    factor: Annotated[float | None, typer.Option(help="How many times the native window.")] = None,
    target: Annotated[str | None, typer.Option(help="The new window, such as 16k, in place of --factor.")] = None,
    tunables: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A tunable of the method; may be repeated.")
    ] = None,
    share_heads: Annotated[bool, typer.Option("--share-heads", help="adarope: one table for all heads.")] = False,
    sliding: Annotated[
        bool, typer.Option("--sliding-layers", help="Also convert sliding-window layers that have their own table.")
    ] = False,
    pairing: Annotated[
        str, typer.Option(help="Order of q's and k's rows: half-split, interleaved, or auto, the family's own.")
    ] = "auto",
    from_pairing: Annotated[
        str | None,
        typer.Option(help="How the source's rows really lie, if not as its family's code runs them."),
    ] = None,
    adapter: Annotated[
        str | None, typer.Option(help="A PEFT LoRA adapter (a folder or a Hub id) to merge into the source first.")
    ] = None,
    window: Annotated[
        str | None, typer.Option(help="The native window of a folder of Meta's, where its files do not say it.")
    ] = None,
    link: Annotated[
        bool, typer.Option("--link", help="Hard-link shards that do not change: both folders then share their files.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be written, and write nothing.")] = False,
    per: Annotated[str, typer.Option("--length", help="What L is in the scale: position or sequence.")] = "position",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a folder that ropex wrote.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Swap the rotary embedding or the pairing; everything else is copied byte for byte.

    [bold]Examples[/bold]
      ropex convert nano -o nano-ada --to adarope
      ropex convert ./SmolLM2-135M -o smol-yarn --to yarn --factor 2
      ropex convert ./SmolLM2-135M -o smol-ada --to adarope --init yarn --target 16k --link
      ropex convert ./Meta-Llama-3-8B -o llama-hf --to rope
      ropex convert ./mislabelled -o mended --from-pairing interleaved
    """
    one_of("--length", per, "position", "sequence")
    one_of("--pairing", pairing, "auto", "half-split", "interleaved")
    one_of("--from-pairing", from_pairing or "half-split", "half-split", "interleaved")
    tokens = length(target, "--target") if target else None
    from ropex.convert.convert import convert as run

    with progress() as say:
        result = run(
            source,
            out,
            to,
            init=init,
            factor=factor,
            target=tokens,
            params=settings(tunables or []) or None,
            share_heads=share_heads,
            sliding=sliding,
            length=per,  # type: ignore[arg-type]
            pairing=None if pairing == "auto" else pairing,  # type: ignore[arg-type]
            from_pairing=from_pairing,  # type: ignore[arg-type]
            adapter=adapter,
            window=length(window, "--window") if window else None,
            link=link,
            dry_run=dry_run,
            overwrite=overwrite,
            progress=say,
        )
    if as_json:
        print_json(result)
        return
    if tally := result.get("adapter"):
        stdout().print(", ".join(f"{count} {what.replace('_', ' ')}" for what, count in tally.items()))
    if dry_run:
        show_plan(result["plan"])
    effect = "unchanged by design: the source's logits" if result["unchanged"] else "the heads turn differently now"
    stdout().print(
        f"{result['out']}: {result['method']}, {result['format']} format, {result['pairing']}, window "
        f"{result['window']:,} -> {result['target']:,}, {result['added_parameters']:,} parameters added, {effect}"
        + (" (dry run: nothing was written)" if dry_run else "")
    )
    for remark in result["notes"]:
        note(remark)


def show_plan(plan: dict[str, Any]) -> None:
    """The shards, the tensors that change, the config that changes."""
    console = stdout()
    shards = table("Shards", "name", "how", "MB", "reordered")
    for shard in plan["shards"]:
        size = f"{shard['bytes'] / 1e6:,.1f}"
        shards.add_row(shard["name"], shard["how"], size, str(shard["reordered"]))
    if plan["shards"]:
        console.print(shards)
    else:
        console.print("every tensor is written anew")
    for kind, count in plan["reordered"].items():
        console.print(f"rows reordered: {kind} ({count})")
    for key, (before, after) in plan["config"].items():
        console.print(f"config.json {key}: {json.dumps(before)} -> {json.dumps(after)}")
    console.print(f"{plan['bytes'] / 1e6:,.1f} MB to write, {plan['peak_memory'] / 1e6:,.1f} MB of memory for tensors")
