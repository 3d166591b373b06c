"""revert_heads: what each head's learned frequencies and scale are worth, in NLL."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ropex.errors import DataError, OptionError
from ropex.eval.heads.rotary import rotaries_by_layer
from ropex.eval.models import default_bos, encode, load_model, load_tokenizer
from ropex.eval.nll import cut_windows, token_nll
from ropex.eval.progress import Progress, silent
from ropex.seam import rope_of_model
from ropex.text import read_all


def revert_heads(
    checkpoint: str,
    data: Sequence[str | Path],
    length: int,
    *,
    windows: int = 1,
    dtype: str | torch.dtype | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Put one head's frequencies (of a key/value head) or scale (of a query head) back at a time to what its
    conversion gave it, and measure the mean NLL of `windows` windows of `length` tokens; see ranked().

    Returns {"kind": "heads reverted", "checkpoint", "length", "windows", "nll", "heads"}. One forward pass a window
    for each learned row. Errors: OptionError for a checkpoint whose heads learned nothing of their own.
    """
    model, tokenizer = load_model(checkpoint, dtype), load_tokenizer(checkpoint)
    tokens = [encode(tokenizer, document.text) for document in read_all(data, "test")]
    cut = cut_windows(tokens, length, default_bos(tokenizer), windows)[:windows]
    if not cut:
        raise DataError(f"no text reaches {length} tokens: ask for a shorter length")
    ids = torch.tensor([window.ids for window in cut], device=model.device)
    nll, heads = ranked(model, ids, progress or silent)
    about = {"kind": "heads reverted", "checkpoint": checkpoint, "length": length, "windows": len(cut)}
    return about | {"nll": nll, "heads": heads}


@torch.no_grad()
def ranked(
    model: PreTrainedModel, ids: torch.Tensor, progress: Progress = silent
) -> tuple[float, list[dict[str, Any]]]:
    """The mean NLL of ids [B, T], nats a token, and for each learned row {"layer", "part" ("frequencies" or "scale"),
    "head" (of keys for frequencies, of queries for a scale), "cost"}: how much worse it is without, dearest first."""
    spec, rope = getattr(model, "ropex_spec", None), rope_of_model(model)
    if spec is None or not spec.learned or spec.share_heads:
        raise OptionError("this checkpoint has no heads that learned for themselves: --revert-heads is for adarope")
    rotaries, ropes = rotaries_by_layer(model), spec.layers(rope)
    rows = [
        (layer, part, head)
        for layer, rotary in rotaries.items()
        for part, count in (("frequencies", len(rotary.delta)), ("scale", len(rotary.tau)))
        for head in range(count)
    ]
    whole = _nll(model, ids)
    found = []
    for done, (layer, part, head) in enumerate(rows):
        progress("reverting heads", done, len(rows))
        rotary, fresh = rotaries[layer], spec.fresh(ropes[layer])
        names = ("delta",) if part == "frequencies" else ("tau", "gamma")
        kept = {name: getattr(rotary, name)[head].clone() for name in names}
        for name in names:
            getattr(rotary, name)[head] = fresh[name][head]
        cost = _nll(model, ids) - whole
        for name in names:
            getattr(rotary, name)[head] = kept[name]
        found.append({"layer": layer, "part": part, "head": head, "cost": cost})
    progress("done", len(rows), len(rows))
    return whole, sorted(found, key=lambda row: -row["cost"])


def _nll(model: PreTrainedModel, ids: torch.Tensor) -> float:
    return float(torch.cat([token_nll(model, row[None]) for row in ids]).double().mean())
