"""Long windows read in pieces, each after the keys and values of those before, so that activations stay small."""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ropex.errors import RopexError

WHOLE, PIECE, SMALLEST = 16_384, 4096, 256  # tokens: read at once up to WHOLE, beyond it PIECE at a time

Result = TypeVar("Result")


class NoMemoryError(RopexError):
    """Not even a short piece of the window fits."""


def hidden_states(model: PreTrainedModel, input_ids: Tensor, piece: int) -> Iterator[tuple[int, Tensor]]:
    """(where it starts, the decoder's last hidden states [B, piece, H]) of each piece of input_ids [B, T]."""
    cache, length = None, input_ids.shape[1]
    for start in range(0, length, piece):
        ids = input_ids[:, start : start + piece]
        at = torch.arange(start, start + ids.shape[1], device=ids.device)[None]
        out = model.get_decoder()(input_ids=ids, position_ids=at, cache=cache, use_cache=piece < length)
        cache = out.cache
        yield start, out.last_hidden_state


def in_pieces(model: PreTrainedModel, length: int, run: Callable[[int], Result], most: int | None = None) -> Result:
    """run(tokens a piece) for a window of `length` tokens, whole up to `most`; a piece that does not fit in memory is
    halved.

    Errors: NoMemoryError where the smallest does not fit either."""
    spec: Any = getattr(model, "ropex_spec", None)
    whole = spec is not None and spec.length == "sequence"  # such a scale needs the whole row
    piece = length if whole or length <= (most or WHOLE) else PIECE
    while True:
        try:
            return run(piece)
        except RuntimeError as error:
            if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
                raise
            if whole or piece <= SMALLEST:
                raise NoMemoryError(
                    f"memory ran out at {length} tokens: use shorter lengths, or --dtype bfloat16"
                ) from None
        piece = min(PIECE, piece // 2)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
