"""What the heads of a checkpoint do, in the terminal."""

from statistics import fmean
from typing import Any

from ropex.cli.common import note, stdout, table

LETTERS = {"retrieval": "R", "off-by-one": "1", "local": "L", "sink": "S", "global": "G", "mixed": "·"}
_SHADES = ("#440154", "#414487", "#2a788e", "#22a884", "#7ad151", "#fde725")  # viridis, dark to light


def show_heads(report: dict[str, Any]) -> None:
    """A map of all heads, layers down: the letter is the class, the colour E_2; then means by class and length."""
    from rich.text import Text

    console = stdout()
    longest = str(report["lengths"][-1])
    title = f"{report['checkpoint']} ({report['method']}): heads by layer; colour is E_2 at {int(longest):,} tokens"
    console.print(title)
    layers: dict[int, list[dict[str, Any]]] = {}
    for head in report["heads"]:
        layers.setdefault(head["layer"], []).append(head)
    reach = [head["e2"][longest] for head in report["heads"]]
    for layer, heads in layers.items():
        line = Text(f"  {layer:>3}  ")
        for head in heads:
            shade = _shade(head["e2"][longest], min(reach), max(reach))
            line.append(f" {LETTERS[head['class']]} ", f"{'black' if shade > 3 else 'white'} on {_SHADES[shade]}")
        console.print(line)
    legend = Text(f"  E_2 {min(reach):.3g} ")
    for colour in _SHADES:
        legend.append("   ", f"on {colour}")
    console.print(legend.append(f" {max(reach):.3g} tokens"))
    lengths = [str(length) for length in report["lengths"]]
    columns = [f"{name} {int(length):,}" for name in ("E_2", "sink") for length in lengths]
    shown = table("Means by class", "class", "heads", *columns)
    for name, count in report["classes"].items():
        if not count:
            continue
        heads = [head for head in report["heads"] if head["class"] == name]
        means = [f"{fmean(head['e2'][x] for head in heads):.1f}" for x in lengths]
        means += [f"{fmean(head['sink'][x] for head in heads):.0%}" for x in lengths]
        shown.add_row(f"{LETTERS[name]} {name}", str(count), *means)
    console.print(shown)
    spread = max(head["e2_error"][longest] / head["e2"][longest] for head in report["heads"])
    if spread:
        note(
            f"standard errors of E_2 at {int(longest):,} are {spread:.0%} at most, over sampled queries of these texts"
        )


def show_compared(report: dict[str, Any]) -> None:
    """Both maps, the heads that changed class, and rank correlations."""
    for side in ("before", "after"):
        show_heads(report[side])
    console = stdout()
    kinds: dict[tuple[str, str], list[str]] = {}
    for change in report["changes"]:
        kinds.setdefault((change["from"], change["to"]), []).append(f"{change['layer']}.{change['head']}")
    shown = table(
        f"{len(report['changes'])} of {len(report['after']['heads'])} heads changed class", "from, to", "heads"
    )
    for (old, new), heads in kinds.items():
        more = f" and {len(heads) - 12} more" if len(heads) > 12 else ""
        shown.add_row(f"{old} -> {new}", ", ".join(heads[:12]) + more)
    console.print(shown)
    shown = table("Rank correlations over heads", "", *(f"{int(x):,}" for x in report["relations"]))
    for name, what in (
        ("gamma_e2", "gamma with E_2 after"),
        ("tau_e2", "tau with E_2 after"),
        ("e2_change", "E_2 before with its growth"),
    ):
        values = [relation[name] for relation in report["relations"].values()]
        if any(value is not None for value in values):
            shown.add_row(what, *("–" if value is None else f"{value:+.2f}" for value in values))
    console.print(shown)


def show_reverted(report: dict[str, Any], most: int = 15) -> None:
    """The heads that a checkpoint would miss most."""
    console = stdout()
    console.print(f"{report['checkpoint']}: NLL {report['nll']:.4f} in windows of {report['length']:,} tokens")
    shown = table("What putting a row back costs", "part", "layer", "head", "NLL, nats a token")
    for row in report["heads"][:most]:
        of = "keys'" if row["part"] == "frequencies" else "queries'"
        shown.add_row(row["part"], str(row["layer"]), f"{of} {row['head']}", f"{row['cost']:+.5f}")
    console.print(shown)
    if len(report["heads"]) > most:
        note(f"{len(report['heads']) - most} more rows cost less; --json has them all")


def _shade(value: float, least: float, most: float) -> int:
    """Which of the shades, by the logarithm of the value."""
    from math import log

    span = log(most / least) if most > least else 1.0
    return min(len(_SHADES) - 1, int(log(value / least) / span * len(_SHADES)))
