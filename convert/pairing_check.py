"""Which pairing were these weights trained with? The one under which a text is far likelier."""

import math
from importlib.resources import files
from pathlib import Path
from typing import Any

from ropex.errors import CheckpointError, DataError
from ropex.spec import make_spec
from ropex.tables import two_lengths

TOKENS, WINDOWS = 256, 4
DECISIVE = 0.1  # nats a token


def check_pairing(checkpoint: str | Path, text: Path | None = None) -> dict[str, Any]:
    """Mean NLL of a short text (a play, unless `text` is given) under both pairings, in nats a token.

    Wrongly paired heads still see their nearest neighbours, so the text stays fluent; its loss does not.
    Returns {"half-split", "interleaved", "labelled" (what the checkpoint is taken for), "trained" (the likelier one),
    "margin" (nats between the two), "decided" (whether the margin says anything)}.
    """
    import torch

    from ropex.loading import load, load_tokenizer
    from ropex.seam import attach, rope_of_model, rotaries

    words = text.read_text(encoding="utf-8") if text else _play()
    ids = load_tokenizer(checkpoint).encode(words[: TOKENS * WINDOWS * 40], truncation=False, verbose=False)
    if len(ids) < TOKENS * WINDOWS:
        raise DataError(f"the text has {len(ids)} tokens and {TOKENS * WINDOWS} are needed: give a longer one")
    windows = torch.tensor(ids[: TOKENS * WINDOWS]).view(WINDOWS, TOKENS)
    model = load(checkpoint)
    labelled = _pairing_of(model)
    found = {labelled: _loss(model, windows)}
    other = "interleaved" if labelled == "half-split" else "half-split"
    if not rotaries(model):
        rope = rope_of_model(model)
        params = {"table": "short"} if two_lengths(rope) else {}
        attach(model, make_spec("rope", rope, params=params, sliding=rope.local is not None))
    for rotary in rotaries(model):
        rotary.interleaved = other == "interleaved"
    found[other] = _loss(model, windows)
    if not all(map(math.isfinite, found.values())):
        raise CheckpointError(f"{checkpoint} gives a loss that is no finite number: it is damaged")
    margin = abs(found["half-split"] - found["interleaved"])
    return found | {
        "labelled": labelled,
        "trained": min(found, key=lambda pairing: found[pairing]),
        "margin": margin,
        "decided": margin >= DECISIVE,
    }


def _pairing_of(model: Any) -> str:
    from ropex.seam import rope_of_model

    spec = getattr(model, "ropex_spec", None)
    return spec.pairing if spec else rope_of_model(model).pairing


def _loss(model: Any, windows: Any) -> float:
    import torch

    with torch.inference_mode():
        logits = model(windows, use_cache=False).logits[:, :-1].float()
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()))


def _play() -> str:
    return (files("ropex.demo") / "text" / "dev.txt").read_text(encoding="utf-8")
