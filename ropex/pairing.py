"""Which channels turn together, as index maps over the rows of a projection. Needs numpy alone.

half-split: channel f turns with f + R/2 (Hugging Face, GPT-NeoX). interleaved: 2f turns with 2f + 1 (Meta, GPT-J,
GGUF's llama). The same weights serve the other pairing after the rows of q and k are permuted, each head by itself,
in the rotary span only.
"""

import numpy as np

from ropex.families import Pairing


def head_permutation(source: Pairing, target: Pairing, head_dim: int, rotary_dim: int) -> np.ndarray:
    """Index map [D]: row d of the target layout is row map[d] of the source layout, within one head.

    Channels at rotary_dim and beyond do not turn and stay where they are.
    """
    index = np.arange(head_dim)
    if source == target:
        return index
    half = rotary_dim // 2
    pairs = np.arange(rotary_dim).reshape(2, half)  # half-split: row 0 the first channels of the pairs
    index[:rotary_dim] = pairs.T.reshape(-1) if target == "interleaved" else pairs.reshape(half, 2).T.reshape(-1)
    return index


def repeat_heads(index: np.ndarray, heads: int) -> np.ndarray:
    """The index map of one head's rows, for `heads` heads that lie one after the other."""
    return (np.arange(heads)[:, None] * len(index) + index).reshape(-1)
