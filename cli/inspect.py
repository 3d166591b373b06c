"""ropex inspect"""

from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer

from ropex.cli.common import known_dtype, lengths, note, print_json, progress, settings, stdout, table

_PROBE = "What the heads do (with --probe or --against)"


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
    probe: Annotated[bool, typer.Option("--probe", help="Run it on a text and see what each head does.")] = False,
    against: Annotated[
        str | None, typer.Option(help="Probe this checkpoint too: CKPT before, this one after.", rich_help_panel=_PROBE)
    ] = None,
    revert_heads: Annotated[
        bool,
        typer.Option(
            "--revert-heads",
            help="Put one head's learned frequencies or scale back at a time: what does each cost, in NLL?",
            rich_help_panel=_PROBE,
        ),
    ] = False,
    data: Annotated[list[str] | None, typer.Option(help="The text, as for eval nll.", rich_help_panel=_PROBE)] = None,
    at: Annotated[str, typer.Option("--lengths", help="Context lengths.", rich_help_panel=_PROBE)] = "1k,4k",
    queries: Annotated[int, typer.Option(help="Query positions measured a window.", rich_help_panel=_PROBE)] = 256,
    windows: Annotated[int, typer.Option(help="Windows of text at each length.", rich_help_panel=_PROBE)] = 1,
    needles: Annotated[int, typer.Option(help="Planted needles at each length.", rich_help_panel=_PROBE)] = 4,
    style: Annotated[
        str, typer.Option(help="Of the needles: passkey, or lines, which nano learned.", rich_help_panel=_PROBE)
    ] = "passkey",
    thresholds: Annotated[
        list[str] | None,
        typer.Option("--threshold", help="Where a class begins, such as sink=0.4.", rich_help_panel=_PROBE),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(callback=known_dtype, help="Compute in float32, bfloat16 or float16.", rich_help_panel=_PROBE),
    ] = None,
    known: Annotated[
        Path | None,
        typer.Option(help="Known heads to mark in the figures: JSON scores, or a TSV.", rich_help_panel=_PROBE),
    ] = None,
    scores: Annotated[
        Path | None, typer.Option(help="Write retrieval scores into this .json.", rich_help_panel=_PROBE)
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write one page of figures.", rich_help_panel=_PROBE)] = None,
    png: Annotated[
        Path | None, typer.Option(help="Draw every figure into this folder.", rich_help_panel=_PROBE)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Say what a checkpoint's heads are and how they rotate. Reads headers only, unless told to probe.

    [bold]Examples[/bold]
      ropex inspect nano
      ropex inspect ./SmolLM2-135M --json
      ropex inspect ./converted-by-someone --check-pairing
      ropex inspect ./SmolLM2-135M --probe --data book.txt --lengths 1k,4k --html heads.html
      ropex inspect ./SmolLM2-135M --against ./run --data book.txt --lengths 4k,16k
    """
    pictured = bool(known or scores or html or png or thresholds)
    if (pictured or data) and not (probe or against or revert_heads):
        raise typer.BadParameter("a text and figures are for heads that are probed: add --probe", param_hint="--probe")
    if probe or against or revert_heads:
        if not data:
            raise typer.BadParameter("heads are probed on a text: give one, as in --data book.txt", param_hint="--data")
        if revert_heads and (probe or against or pictured):
            raise typer.BadParameter("--revert-heads gives a ranking alone: leave --probe and the figures out")
        sizes = lengths(at)
        if revert_heads:
            _revert(checkpoint, data, sizes[-1], windows, dtype, as_json)
            return
        asked = {"queries": queries, "windows": windows, "needles": needles, "style": style, "dtype": dtype}
        _probe(checkpoint, against, data, sizes, settings(thresholds or []), asked, (known, scores, html, png), as_json)
        return
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


def _probe(
    checkpoint: str,
    against: str | None,
    data: list[str],
    sizes: list[int],
    limits: dict[str, Any],
    asked: dict[str, Any],
    files: tuple[Path | None, Path | None, Path | None, Path | None],
    as_json: bool,
) -> None:
    from ropex.cli.heads import show_compared, show_heads
    from ropex.eval.heads.classes import thresholds
    from ropex.eval.heads.compare import compare_heads
    from ropex.eval.heads.page import check_files, write_page, write_pictures
    from ropex.eval.heads.probe import evaluate_heads
    from ropex.eval.heads.scores import read_scores, write_scores

    known, scores, html, png = files
    check_files(html, png)
    asked["thresholds"] = thresholds(limits)
    with progress() as listener:
        if against:
            report = compare_heads(checkpoint, against, data, sizes, **asked, progress=listener)
        else:
            report = evaluate_heads(checkpoint, data, sizes, **asked, progress=listener)
    after = report["after"] if against else report
    if known:
        after["known"] = read_scores(known, after["heads"])
    if scores:
        write_scores(after["heads"], scores)
    if html:
        write_page(report, html)
    if png:
        write_pictures(report, png)
    if as_json:
        print_json(report)
    else:
        (show_compared if against else show_heads)(report)


def _revert(checkpoint: str, data: list[str], length: int, windows: int, dtype: str | None, as_json: bool) -> None:
    from ropex.cli.heads import show_reverted
    from ropex.eval.heads.revert import revert_heads

    with progress() as listener:
        report = revert_heads(checkpoint, data, length, windows=windows, dtype=dtype, progress=listener)
    if as_json:
        print_json(report)
    else:
        show_reverted(report)


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
