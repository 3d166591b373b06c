"""Needles in a window: can one head learn to look W tokens back and no farther?

A row of L tokens carries values, and six of the tokens are needles. Each lies, by the toss of a coin, among the last W
tokens or among the 3W before them; asked at the end, the model is to say of each needle's value whether it lay inside.
Only the distance tells, so the head has to shape a box W tokens wide out of its few frequencies, fixed or free to move
(AdaRoPE, ICML 2026, holds that a head trains better when they may). One layer of one head: embeddings, q, k and v,
softmax, output.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ropex.errors import OptionError
from ropex.eval.heads.measures import pair_logits
from ropex.eval.lab.geometry import made_up_rope
from ropex.eval.progress import Progress, silent
from ropex.rotary import rotate
from ropex.spec import make_spec

VALUES, NEEDLES, WIDTH = 16, 6, 32  # values a token may carry, needles a row, channels of the embedding
BATCH, TESTS = 64, 1024
RATE, RATE_FREQUENCIES = 1e-2, 1e-2


class OneHead(nn.Module):
    """Tells from L tokens which needles' values lie in the window; theta [F], radians a token."""

    def __init__(self, theta: Tensor, learned: bool) -> None:
        super().__init__()
        size = 2 * len(theta)
        self.theta0 = nn.Buffer(theta)
        self.delta = nn.Parameter(torch.zeros_like(theta), requires_grad=learned)
        self.values = nn.Embedding(VALUES, WIDTH)
        self.needle = nn.Parameter(torch.randn(WIDTH))
        self.query = nn.Parameter(torch.randn(size))
        self.key, self.value = nn.Linear(WIDTH, size, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, VALUES)

    def theta(self) -> Tensor:
        return self.theta0 * self.delta.exp()

    def keys(self, values: Tensor, needles: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings [B, L, WIDTH] and keys [B, L, D], turned back by their distance to the question, 1 to L."""
        x = self.values(values) + needles[..., None] * self.needle
        distance = torch.arange(values.shape[1], 0, -1, dtype=torch.float32)
        angles = -distance[:, None] * self.theta()
        return x, rotate(self.key(x), angles.cos(), angles.sin())

    def forward(self, values: Tensor, needles: Tensor) -> Tensor:
        """Logits [B, VALUES], above 0 for a value inside of the window, from values [B, L] and needles [B, L]."""
        x, keys = self.keys(values, needles)
        alpha = (keys @ self.query / len(self.query) ** 0.5).softmax(-1)
        return self.out((alpha[..., None] * self.value(x)).sum(1))


Rows = tuple[Tensor, Tensor, Tensor, Tensor]


def draw_rows(count: int, length: int, width: int, generator: torch.Generator) -> Rows:
    """values [B, L]; needles [B, L], 1.0 or 0.0; the needles' values [B, 6], which differ; and which of them lie inside
    of the window [B, 6]."""
    values = torch.randint(VALUES, (count, length), generator=generator)
    inside = torch.rand(count, NEEDLES, generator=generator) < 0.5
    near = torch.rand(count, width, generator=generator).topk(NEEDLES, -1).indices
    far = width + torch.rand(count, min(4 * width, length) - width, generator=generator).topk(NEEDLES, -1).indices
    at = length - 1 - torch.where(inside, near, far)
    carried = torch.rand(count, VALUES, generator=generator).argsort(-1)[:, :NEEDLES]
    needles = torch.zeros(count, length).scatter_(1, at, 1.0)
    return values.scatter_(1, at, carried), needles, carried, inside


def run_nrw(
    widths: Sequence[int] = (8, 16, 32, 64),
    *,
    length: int = 256,
    pairs: int = 4,
    steps: int = 600,
    seed: int = 0,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Train the model at each window width, with rope's frequencies fixed and with these free to move.

    Returns {"kind", "length", "pairs", "steps", "results": [{"width", "learned", "accuracy", "theta" [F], "shares"
    [F]}]}. accuracy: of the needles of 1,024 new rows, told rightly as inside or outside; guessing gives half. shares:
    of each pair in the sum of |q_f . k_f| over the needles.
    """
    if not widths or min(widths) < NEEDLES or max(widths) > length - NEEDLES:
        raise OptionError(
            f"windows are {NEEDLES} to {length - NEEDLES} tokens wide in rows of {length}: give such widths"
        )
    say, done, results = progress or silent, 0, []
    for width in widths:
        for learned in (False, True):
            say(f"a window of {width}, {'learned' if learned else 'fixed'} frequencies", done, 2 * len(widths))
            results.append({"width": width, "learned": learned} | train(width, learned, length, pairs, steps, seed))
            done += 1
    say("done", done, done)
    return {"kind": "lab nrw", "length": length, "pairs": pairs, "steps": steps, "results": results}


def train(width: int, learned: bool, length: int, pairs: int, steps: int, seed: int) -> dict[str, Any]:
    """One model: {"accuracy", "theta", "shares"}."""
    torch.manual_seed(seed)
    rope = made_up_rope(2 * pairs, length)
    model = OneHead(make_spec("rope", rope).table(rope).theta, learned)
    generator = torch.Generator().manual_seed(seed)
    own = [p for name, p in model.named_parameters() if name != "delta"]
    groups = [{"params": own, "lr": RATE}, {"params": [model.delta], "lr": RATE_FREQUENCIES}]
    optimizer = torch.optim.Adam(groups)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        values, needles, carried, inside = draw_rows(BATCH, length, width, generator)
        optimizer.zero_grad()
        told = model(values, needles).gather(1, carried)
        F.binary_cross_entropy_with_logits(told, inside.float()).backward()
        optimizer.step()
        schedule.step()
    return measure(model, width, length)


@torch.no_grad()
def measure(model: OneHead, width: int, length: int) -> dict[str, Any]:
    """{"accuracy", "theta", "shares"} on rows that training did not draw."""
    values, needles, carried, inside = draw_rows(TESTS, length, width, torch.Generator().manual_seed(1_000_003))
    right = (model(values, needles).gather(1, carried) > 0) == inside
    _, keys = model.keys(values[:256], needles[:256])
    found = keys[needles[:256] > 0]
    parts = pair_logits(model.query[None], found[None], len(model.theta0), False)[0].sum(-1)
    return {
        "accuracy": float(right.float().mean()), "theta": model.theta().tolist(),
        "shares": (parts / parts.sum()).tolist(),
    }  # fmt: skip


def plot_nrw(report: dict[str, Any], path: Path) -> None:
    """Accuracy by window width, and which wavelengths make the logits, a panel a width."""
    from math import pi

    from ropex.eval.heads.canvas import AFTER, BEFORE, draw, length_axis, plain_numbers, tidy

    widths = list(dict.fromkeys(row["width"] for row in report["results"]))
    kinds = ((False, BEFORE, "o", "fixed"), (True, AFTER, "s", "learned"))

    def fill(figure: Any) -> None:
        first, *others = figure.subplots(1, 1 + len(widths))
        for learned, colour, marker, name in kinds:
            rows = [row for row in report["results"] if row["learned"] == learned]
            first.plot(widths, [100 * row["accuracy"] for row in rows], color=colour, marker=marker, label=name)
            for panel, row in zip(others, rows, strict=True):
                turns = [2 * pi / theta for theta in row["theta"]]
                panel.plot(turns, [100 * s for s in row["shares"]], color=colour, marker=marker, linewidth=1)
        first.axhline(50, color="grey", linestyle=":", linewidth=1)
        length_axis(first, widths)
        tidy(first, xlabel="window width (tokens)", ylabel="accuracy (percent)", ylim=(45, 101))
        first.set_title("needles told; dotted: guessing", fontsize="medium")
        for panel, width in zip(others, widths, strict=True):
            panel.axvline(width, color="grey", linestyle="--", linewidth=1)
            panel.set_xscale("log")
            plain_numbers(panel.xaxis, (1,))
            panel.set_title(f"window of {width}", fontsize="medium")
            tidy(panel, xlabel="wavelength (tokens a turn)", ylim=(0, None))
        others[0].set_ylabel("share of |q.k| by pair (percent)")
        figure.legend(*first.get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)

    draw(path, (3.0 * (1 + len(widths)), 3.7), fill)
