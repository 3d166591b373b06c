"""ropex inspect"""

from statistics import median
from typing import Annotated

import typer

from ropex.cli.common import note, print_json, stdout, table


def inspect(
    checkpoint: Annotated[str, typer.Argument(help="A checkpoint folder, a .gguf file, a run, a Hub id, or 'nano'.")],
    check_pairing: Annotated[
        bool,
        typer.Option(
            "--check-pairing", help="Run a short text under both pairings: which were the weights trained with?"
        ),
    ] = False,
    head_norms: Annotated[
        bool, typer.Option("--head-norms", help="Also read q and k, and give the norm of every head's rows.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Say what a checkpoint's heads are and how they rotate. Reads headers only.

    [bold]Examples[/bold]
      ropex inspect nano
      ropex inspect ./SmolLM2-135M --json
      ropex inspect ./converted-by-someone --check-pairing
    """
    from ropex.convert.inspect import inspect as read

    facts = read(checkpoint)
    if head_norms:
        from ropex.convert.inspect import head_norms as norms

        facts["head_norms"] = norms(checkpoint)
    if check_pairing:
        from ropex.convert.pairing_check import check_pairing as run

        facts["check"] = run(checkpoint)
    if as_json:
        print_json(facts)
        return
    shown = table(f"{checkpoint}", "", "")
    shown.columns[1].justify = "left"
    for name, value in _rows(facts):
        shown.add_row(name, value)
    console = stdout()
    console.print(shown)
    if (scale := facts.get("scale")) and facts["method"] == "adarope":
        heads = table("Scale by head", "layer", "tau: least", "median", "most", "gamma: least", "median", "most")
        for layer in scale:
            spread = [f(layer[kind]) for kind in ("tau", "gamma") for f in (min, median, max)]
            heads.add_row(str(layer["layer"]), *(f"{value:.4f}" for value in spread))
        console.print(heads)
    if norms_by_layer := facts.get("head_norms"):
        norms_table = table(
            "Norms of the heads' rows", "layer", "q: least", "median", "most", "k: least", "median", "most"
        )
        for layer in norms_by_layer:
            spread = [f(layer[kind]) for kind in ("q", "k") for f in (min, median, max)]
            norms_table.add_row(str(layer["layer"]), *(f"{value:.3f}" for value in spread))
        console.print(norms_table)
    if check := facts.get("check"):
        losses = table("A short text", "pairing", "NLL, nats a token")
        for pairing in ("half-split", "interleaved"):
            losses.add_row(pairing, f"{check[pairing]:.3f}")
        console.print(losses)
        console.print(_verdict(check))
    for remark in facts["notes"]:
        note(remark)


def _verdict(check: dict) -> str:
    margin = f"by {check['margin']:.3f} nats a token"
    if not check["decided"]:
        return f"undecided: the two differ {margin} only"
    if check["trained"] == check["labelled"]:
        return f"trained as {check['trained']}, as labelled: likelier {margin}"
    return (
        f"trained as {check['trained']}, and labelled {check['labelled']}: likelier {margin}. "
        f"Mend it with `ropex convert ... --from-pairing {check['trained']}`"
    )


def _local(facts: dict) -> list[tuple[str, str]]:
    """The sliding layers with a table of their own."""
    if not (local := facts["local"]):
        return []
    rope = ", ".join([local["rope"]["type"], *(f"{k} {v}" for k, v in local["rope"].items() if k != "type")])
    return [
        ("layers of that rope", ", ".join(map(str, facts["turning"]))),
        (
            "sliding layers",
            f"{', '.join(map(str, local['layers']))}: theta {local['rope_theta']:g}, {rope}, window {local['window']}",
        ),
    ]


def _rows(facts: dict) -> list[tuple[str, str]]:
    scaling = {k: v for k, v in facts["rope"].items() if k != "type" and not isinstance(v, list)}
    rope = ", ".join([facts["rope"]["type"], *(f"{k} {v}" for k, v in scaling.items())])
    rows = [
        ("family", facts["family"]),
        ("parameters", f"{facts['parameters']:,} ({facts['dtype']}{', tied embeddings' if facts['tied'] else ''})"),
        ("layers", str(facts["layers"])),
        ("heads", f"{facts['heads']} query, {facts['kv_heads']} key/value"),
        ("head_dim", f"{facts['head_dim']}, of which {facts['rotary_dim']} rotate"),
        ("pairing", f"{facts['pairing']}: channel f turns with f + {facts['pair_offset']}"),
        ("method", facts["method"]),
        ("rope", f"theta {facts['rope_theta']:g}, {rope}"),
        *([("norms of q and k", facts["norms"])] if facts.get("norms") else []),
        *_local(facts),
        ("native window", f"{facts['window']:,} tokens"),
        ("config claims", f"{facts['claims']:,} tokens"),
        *([("adarope would add", f"{facts['adds']['adarope']:,} trained numbers")] if facts["adds"] else []),
        ("shards", f"{len(facts['shards'])} ({facts['tensors']} tensors)"),
    ]
    if spec := facts.get("spec"):
        tunables = {k: v for k, v in spec["params"].items() if v is not None and not isinstance(v, list)}
        settings = ", ".join(f"{k} {v:g}" for k, v in tunables.items())
        rows.append(("conversion", f"{spec['method']}, from {spec['init']}, {settings}"))
    return rows
