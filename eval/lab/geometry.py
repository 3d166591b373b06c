"""The stable-rank argument: what rotation does to a cloud of keys that all point one way.

RoPE-ID (ICLR 2026) sees a trained model's queries and keys, before rotation, as clouds of rank close to 1. Rotation by
a token's position keeps every vector's length, so the Frobenius norm of the cloud stays, but spreads it over the
turning pairs: its first singular value falls by sqrt(2) when one pair holds all of it, by sqrt(D) when D/2 pairs share
it, and by sqrt(1 / share at rest) where some pairs rest. What falls on beyond the training window is what a model never
saw.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ropex.config import Rope, rope_of
from ropex.errors import OptionError
from ropex.eval.heads.measures import Cloud, criteria, overlap
from ropex.rotary import rotate
from ropex.spec import make_spec

METHODS = ("rope", "half-rope", "high-freq", "rope-id")
_BLOCK = 8192  # tokens rotated at a time


def made_up_rope(head_dim: int, window: int, theta: float = 10_000.0) -> Rope:
    """The rotary embedding of a llama with this head_dim, training window (tokens) and base."""
    if head_dim < 4 or head_dim % 4:
        raise OptionError(f"a head_dim of {head_dim} has no halves of pairs: give a multiple of 4")
    return rope_of(
        {
            "model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 1, "hidden_size": head_dim,
            "head_dim": head_dim, "max_position_embeddings": window, "rope_theta": theta,
        }
    )  # fmt: skip


def run_geometry(window: int = 4096, head_dim: int = 64, methods: Sequence[str] = METHODS) -> dict[str, Any]:
    """Rank-1 clouds under each method's table, up to 16 windows of tokens.

    Returns {"kind", "window", "head_dim", "lengths", "results": [{"method", "shrink" [lengths], "stable_rank",
    "frobenius", "overlap", "criteria"}]}. shrink: first singular value before rotation over that after. frobenius: the
    norm after over that before. overlap and criteria: see ropex.eval.heads.measures.
    """
    rope = made_up_rope(head_dim, window)
    lengths = [2**i for i in range(4, (16 * window).bit_length())]
    results = []
    for name in methods:
        theta = make_spec(name, rope).table(rope).theta
        clouds = [spread(theta, length) for length in lengths]
        results.append(
            {
                "method": name,
                "shrink": [1 / float(cloud.first_singular_value()) for cloud in clouds],
                "stable_rank": [float(cloud.stable_rank()) for cloud in clouds],
                "frobenius": [float((cloud.stable_rank()) ** 0.5 * cloud.first_singular_value()) for cloud in clouds],
                "overlap": overlap(theta, lengths),
                "criteria": criteria(theta, window),
            }
        )
    return {"kind": "lab geometry", "window": window, "head_dim": head_dim, "lengths": lengths, "results": results}


def spread(theta: Tensor, tokens: int, direction: Tensor | None = None) -> Cloud:
    """The cloud of one unit vector [D], alike in all channels unless given, turned to positions 0 to tokens - 1."""
    size = 2 * len(theta)
    vector = torch.full((size,), size**-0.5, dtype=torch.float64) if direction is None else direction.double()
    cloud = Cloud()
    for start in range(0, tokens, _BLOCK):
        angles = torch.arange(start, min(start + _BLOCK, tokens)).double()[:, None] * theta.double()
        cloud.add(rotate(vector.expand(len(angles), -1), angles.cos(), angles.sin())[None])
    return cloud


def plot_geometry(report: dict[str, Any], path: Path) -> None:
    """How far the first singular value has fallen, and how much of a cluster's mean is left, by length."""
    from ropex.eval.heads.canvas import draw, mark_window, plain_numbers, tidy

    colours = ("#D55E00", "#E69F00", "#56B4E9", "#0072B2")

    def fill(figure: Any) -> None:
        left, right = figure.subplots(1, 2)
        for row, colour, marker in zip(report["results"], colours * 2, "osv^" * 2, strict=False):
            options: Any = {"color": colour, "marker": marker, "markersize": 4, "label": row["method"]}
            left.plot(report["lengths"], row["shrink"], **options)
            right.plot(report["lengths"], row["overlap"], **options)
        for value, name in ((2**0.5, "sqrt(2)"), (report["head_dim"] ** 0.5, f"sqrt({report['head_dim']})")):
            left.axhline(value, color="grey", linestyle=":", linewidth=1)
            left.annotate(name, (report["lengths"][0], value), color="dimgrey", fontsize="small", va="bottom")
        left.set(xscale="log", yscale="log")
        right.set(xscale="log", ylim=(0, 1.02))
        plain_numbers(left.yaxis)
        for panel, what in (
            (left, "first singular value, before / after rotation"), (right, "share of the mean that is left"),
        ):  # fmt: skip
            plain_numbers(panel.xaxis)
            tidy(panel, xlabel="tokens", ylabel=what)
            mark_window(panel, report["window"], report["lengths"][-1], "training window")
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)

    draw(path, (10.0, 4.4), fill)
