"""ropex inspect"""

from typing import Annotated

import typer

from ropex.cli.common import note, print_json, stdout, table


def inspect(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint folder, a .gguf file, a run, or 'nano'.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Say what a checkpoint's heads are and how they rotate. Reads headers only.

    [bold]Examples[/bold]
      ropex inspect nano
      ropex inspect ./SmolLM2-135M --json
    """
    from ropex.convert.inspect import inspect as read

    facts = read(checkpoint)
    if as_json:
        print_json(facts)
        return
    shown = table(f"{checkpoint}", "", "")
    shown.columns[1].justify = "left"
    for name, value in _rows(facts):
        shown.add_row(name, value)
    console = stdout()
    console.print(shown)
    if facts["adds"]:
        added = table("What a conversion adds", "--to", "trainable parameters")
        for method, count in facts["adds"].items():
            added.add_row(method, f"{count:,}")
        console.print(added)
    for remark in facts["notes"]:
        note(remark)


def _rows(facts: dict) -> list[tuple[str, str]]:
    scaling = {k: v for k, v in facts["rope"].items() if k != "type" and not isinstance(v, list)}
    rope = ", ".join([facts["rope"]["type"], *(f"{k} {v}" for k, v in scaling.items())])
    rows = [
        ("family", facts["family"]),
        ("parameters", f"{facts['parameters']:,} ({facts['dtype']}{', tied embeddings' if facts['tied'] else ''})"),
        ("layers", str(facts["layers"])),
        ("heads", f"{facts['heads']} query, {facts['kv_heads']} key/value"),
        ("head_dim", f"{facts['head_dim']}, of which {facts['rotary_dim']} rotate"),
        ("pairing", facts["pairing"]),
        ("method", facts["method"]),
        ("rope", f"theta {facts['rope_theta']:g}, {rope}"),
        ("native window", f"{facts['window']:,} tokens"),
        ("config claims", f"{facts['claims']:,} tokens"),
        ("shards", f"{len(facts['shards'])} ({facts['tensors']} tensors)"),
    ]
    if spec := facts.get("spec"):
        tunables = {k: v for k, v in spec["params"].items() if v is not None and not isinstance(v, list)}
        settings = ", ".join(f"{k} {v:g}" for k, v in tunables.items())
        rows.append(("conversion", f"{spec['method']}, from {spec['init']}, {settings}"))
    return rows
