"""Figures as SVG markup for a page: vector, with the page's own colour of text, so that they fit light and dark."""

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

_INK = "#010203"  # stands for the page's colour of text until the markup is made
_DIM = "#696969"  # dimgrey, in which plot_nll names native windows: too dark for a dark page


def drawn(plot: Callable[[dict[str, Any], Path], None], results: dict[str, Any]) -> str:
    """The <svg> element that one of ropex.eval.plot's functions draws: no prologue, no metadata, no names that a second
    figure has too, no black but the page's own. Text stays text, and is shown as it is."""
    from matplotlib import rc_context

    style: Any = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _INK)
    style |= dict.fromkeys(("axes.facecolor", "figure.facecolor", "savefig.facecolor"), "none")
    style |= {"svg.fonttype": "none", "svg.hashsalt": "ropex", "text.parse_math": False, "hatch.linewidth": 0.5}
    with rc_context(style), tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "figure.svg"
        plot(results, path)
        text = path.read_text(encoding="utf-8")
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'<g id="[^"<>]*"', "<g", text)
    return re.sub(rf"{_INK}|#000000|{_DIM}", "currentColor", text)


def verbatim(name: str) -> str:
    """A name that the figures show whole: they drop what stands before a slash, and matplotlib leaves those that begin
    with an underscore out of legends."""
    return ("\u200b" if name.startswith("_") else "") + name.replace("/", "\u2215")
