"""Queries and keys where attention reads them, layer by layer, in a stock or converted model.

transformers hands every attention layer's rotated q and k to an attention function that it looks up by name. Ours shows
them to whoever watches and lets torch's attention do the rest, so no attention forward is copied. What q and k were
before their rotation is seen at `apply_rotary_pos_emb`, which all families call right before.

Hq query heads, Hkv key/value heads, Tq tokens of this call, Tk keys that they may look at, D head_dim.
"""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ropex.errors import UnsupportedError
from ropex.seam import rope_of_model

_NAME = "ropex_heads"
_BLOCK_VALUES = 2**23  # float32 logits of all heads held at once: 32 MiB


@dataclass(frozen=True)
class Seen:
    """One layer's attention over one row of tokens.

    q [Hq, Tq, D] and k [Hkv, Tk, D] are rotated (and q scaled) as attention reads them; bare_q [Hq, Tq, D] and bare_k
    [Hkv, Tq, D] are the same tokens before, and equal to them in a layer that does not turn. mask: [Tq, Tk], True where
    a query may look or added to the logits; None for plain causal attention. scaling multiplies q.k; softcap, where
    there is one, then bends it by cap * tanh(x / cap). start: position of the first query; the keys are the last Tk
    tokens up to the last query's own.
    """

    layer: int
    q: Tensor
    k: Tensor
    bare_q: Tensor
    bare_k: Tensor
    mask: Tensor | None
    scaling: float
    softcap: float | None
    start: int

    @property
    def first_key(self) -> int:
        """Position of the first key: above 0 where a sliding layer's cache has dropped the earlier ones."""
        return self.start + self.q.shape[1] - self.k.shape[1]

    def rows(self, index: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """(index part, logits [Hq, n, Tk] float32, -inf where a query may not look) of the queries in `index`, in
        blocks of a bounded size."""
        heads, kv_heads, keys = self.q.shape[0], self.k.shape[0], self.k.shape[1]
        k = self.k.float().repeat_interleave(heads // kv_heads, 0).transpose(1, 2)
        for part in index.split(max(1, _BLOCK_VALUES // (heads * keys))):
            logits = (self.q[:, part].float() @ k) * self.scaling
            if self.softcap is not None:
                logits = self.softcap * torch.tanh(logits / self.softcap)
            yield part, self._masked(logits, part)

    def _masked(self, logits: Tensor, part: Tensor) -> Tensor:
        if self.mask is None:
            positions = torch.arange(logits.shape[-1], device=logits.device) + self.first_key
            return logits.masked_fill_(positions > (part + self.start)[:, None], -torch.inf)
        mask = self.mask[part]
        return logits.masked_fill_(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Any:
    """The attention function that a watched layer calls; shapes as in transformers, B = 1."""
    watch: _Watch = module.ropex_watch
    seen = watch.of(module, query, key, mask, options)
    watch.see(seen)
    if seen.softcap is None:
        return sdpa_attention_forward(module, query, key, value, mask, **options)
    return _capped(seen, value[0]), None


def _capped(seen: Seen, value: Tensor) -> Tensor:
    """Attention [1, Tq, Hq, D] with a cap on its logits, which torch's has not, in blocks of queries."""
    value = value.float().repeat_interleave(seen.q.shape[0] // value.shape[0], 0)
    everyone = torch.arange(seen.q.shape[1], device=seen.q.device)
    parts = [logits.softmax(-1) @ value for _, logits in seen.rows(everyone)]
    return torch.cat(parts, 1).transpose(0, 1)[None].to(seen.q.dtype)


AttentionInterface.register(_NAME, _attention)
AttentionMaskInterface.register(_NAME, sdpa_mask)


class _Watch:
    """What the layers of one model report to, and what it has to remember between them."""

    def __init__(self, see: Callable[[Seen], None]) -> None:
        self.see = see
        self.bare: tuple[Tensor, Tensor] | None = None
        self.read: dict[int, int] = {}

    def of(self, module: Any, query: Tensor, key: Tensor, mask: Tensor | None, options: dict[str, Any]) -> Seen:
        q, k, tokens = query[0], key[0], query.shape[2]
        bare_q, bare_k = q, k[:, -tokens:]
        if self.bare is not None:
            bare_q, bare_k = _whole(self.bare[0][0], bare_q), _whole(self.bare[1][0], bare_k)
            self.bare = None
        start = self.read.get(module.layer_idx, 0)
        self.read[module.layer_idx] = start + tokens
        scaling = options.get("scaling")
        return Seen(
            module.layer_idx, q, k, bare_q, bare_k,
            None if mask is None else mask[0, 0, :, : k.shape[1]],
            q.shape[-1] ** -0.5 if scaling is None else scaling,
            options.get("softcap"), start,
        )  # fmt: skip


def _whole(part: Tensor, rotated: Tensor) -> Tensor:
    """Some families hand over the turning channels alone; the others are the same before and after."""
    return torch.cat((part, rotated[..., part.shape[-1] :]), -1) if part.shape[-1] < rotated.shape[-1] else part


@contextmanager
def watched(model: PreTrainedModel, see: Callable[[Seen], None]) -> Iterator[None]:
    """While this lasts, every attention layer of `model` shows see() its queries and keys; the model computes what it
    computes with torch's attention. One row of tokens at a time, read once from its start, whole or in pieces.

    Raises UnsupportedError for a model whose attention layers do not look their attention up by name.
    """
    family = rope_of_model(model).family
    layers = [m for m in model.modules() if type(m).__name__ == family.attention]
    modeling: Any = sys.modules[type(layers[0]).__module__]
    apply, implementation = modeling.apply_rotary_pos_emb, model.config._attn_implementation
    watch = _Watch(see)

    @functools.wraps(apply)
    def seen_before(q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Any:
        watch.bare = (q, k)
        return apply(q, k, *args, **kwargs)

    modeling.apply_rotary_pos_emb = seen_before
    for layer in layers:
        layer.ropex_watch = watch  # type: ignore[assignment]
    model.config._attn_implementation = _NAME
    try:
        yield
    finally:
        model.config._attn_implementation = implementation
        for layer in layers:
            del layer.ropex_watch
        modeling.apply_rotary_pos_emb = apply
    if len(watch.read) != len(layers):
        raise UnsupportedError(f"{type(model).__name__} attends in a way that ropex cannot watch")
