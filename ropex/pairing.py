"""Which channels turn together, as index maps over the rows of a projection.

half-split: channel f turns with f + R/2 (Hugging Face, GPT-NeoX). interleaved: 2f turns with 2f + 1 (Meta, GPT-J,
GGUF's llama). The same weights serve the other pairing after the rows of q and k are permuted, each head by itself,
in the rotary span only.
"""

import torch

from ropex.families import Pairing


def head_permutation(source: Pairing, target: Pairing, head_dim: int, rotary_dim: int) -> torch.Tensor:
    """Index map [D]: row d of the target layout is row map[d] of the source layout, within one head.

    Channels at rotary_dim and beyond do not turn and stay where they are.
    """
    index = torch.arange(head_dim)
    if source == target:
        return index
    half = rotary_dim // 2
    pairs = torch.arange(rotary_dim).view(2, half)  # half-split: row 0 the first channels of the pairs
    index[:rotary_dim] = pairs.T.reshape(-1) if target == "interleaved" else pairs.view(half, 2).T.reshape(-1)
    return index


def permute_rows(tensor: torch.Tensor, heads: int, source: Pairing, target: Pairing, rotary_dim: int) -> torch.Tensor:
    """Permute the leading dimension [heads * D, ...] of a q or k weight or bias from one pairing to the other.

    `heads` is the tensor's own number: query heads for q, key/value heads for k.
    """
    rows = tensor.shape[0]
    if rows % heads:
        raise ValueError(f"{rows} rows do not divide into {heads} heads")
    head_dim = rows // heads
    index = head_permutation(source, target, head_dim, rotary_dim)
    offsets = torch.arange(heads)[:, None] * head_dim
    return tensor[(offsets + index).reshape(-1)]
