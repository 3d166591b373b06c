"""AdaRotary, and the one place where it enters a transformers model.

This file needs torch and nothing of ropex: export writes its source into every per-head checkpoint, so that what was
trained and what is served are the same lines.

B batch, T tokens, Hq query heads, Hkv key/value heads, D head_dim, R rotary dims, F = R/2 pairs.
"""

import functools
import sys
from typing import Any

import torch
from torch import nn


class AdaRotary(nn.Module):
    """Rotary embedding with frequencies per key/value head and an attention scale per query head.

    theta = theta0 * exp(delta), radians per token; the query is scaled by
    lambda(L) = (1/tau) * ln(1 + max(L, window)/window)^gamma * (1 + log_coef * ln max(1, L/window))^2
    (AdaRoPE, ICML 2026, with delta = xi - ln theta0; the last factor is RoPE-ID's, ICLR 2026, and 1 elsewhere).
    delta = 0, tau = 1, gamma = 0, log_coef = 0 is plain rope with the table theta0, bit for bit.

    Tensors, all float32 whatever the model's dtype: theta0 [F] (a buffer; 0 means the pair does not rotate),
    delta [Hkv, F], tau [Hq], gamma [Hq]; one row instead of Hkv or Hq where heads share.
    """

    def __init__(
        self,
        pairs: int,
        query_heads: int,
        kv_heads: int,
        window: int,
        *,
        log_coef: float = 0.0,
        interleaved: bool = False,
        length: str = "position",
        upcast: str = "",
        turn_scale: float = 1.0,
        device: torch.device | None = None,
    ) -> None:
        """upcast: rotate q and k in float32 whatever their dtype, as some architectures do: "throughout", or "of
        rounded cosines", which have q's dtype first. turn_scale: a factor on the query's turning channels alone, as
        transformers applies YaRN's where only a part of the head turns."""
        super().__init__()
        self.window, self.log_coef, self.interleaved, self.length = window, log_coef, interleaved, length
        self.upcast, self.turn_scale = upcast, turn_scale
        float32: Any = {"dtype": torch.float32, "device": device}
        self.theta0 = nn.Buffer(torch.full((pairs,), torch.nan, **float32))  # NaN: a table that never came is loud
        self.delta = nn.Parameter(torch.zeros(kv_heads, pairs, **float32))
        self.tau = nn.Parameter(torch.ones(query_heads, **float32))
        self.gamma = nn.Parameter(torch.zeros(query_heads, **float32))

    def _apply(self, fn: Any, recurse: bool = True) -> "AdaRotary":
        """Follow the model to its device, never to its dtype."""

        def move(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(move, recurse)

    def theta(self) -> torch.Tensor:
        """Frequencies [Hkv or 1, F], radians per token."""
        return self.theta0 * self.delta.exp()

    def scale(self, position_ids: torch.Tensor) -> torch.Tensor:
        """lambda [B, Hq or 1, T] of queries at position_ids [B, T]; L is position + 1, or the whole row's length."""
        _, ratio, growth = _of_positions(position_ids, self.window, self.length)
        return self._scale(ratio, growth)

    def _scale(self, ratio: torch.Tensor, growth: torch.Tensor) -> torch.Tensor:
        scale = (self.gamma[:, None] * growth).exp() / self.tau[:, None]
        return scale * (1 + self.log_coef * ratio.log()).square() if self.log_coef else scale

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate q [B, Hq, T, D] and k [B, Hkv, T, D] at position_ids [B, T] or [1, T]; only q is scaled."""
        # Angles and their cosines in float32, cast once: 16-bit positions collapse neighbouring tokens. Nothing here is
        # a matrix product, so autocast changes nothing.
        at, ratio, growth = _of_positions(position_ids, self.window, self.length)
        angles = at * self.theta()[:, None]
        cos, sin = angles.cos(), angles.sin()
        if self.upcast != "throughout":
            cos, sin = cos.to(q.dtype), sin.to(q.dtype)
        if self.upcast:
            cos, sin = cos.float(), sin.float()
        if cos.shape[1] > 1:  # query heads of a group share their key's rotation
            groups = q.shape[1] // cos.shape[1]
            q_cos, q_sin = cos.repeat_interleave(groups, 1), sin.repeat_interleave(groups, 1)
        else:
            q_cos, q_sin = cos, sin
        if self.turn_scale != 1:
            q_cos, q_sin = q_cos * self.turn_scale, q_sin * self.turn_scale
        if q.shape[2] == 1:  # decoding a token is bound by the number of operations: q and k in one go
            if q_cos is not cos:
                apart = [(q_cos, q.shape[1]), (cos, k.shape[1])], [(q_sin, q.shape[1]), (sin, k.shape[1])]
                cos, sin = (torch.cat([x.expand(-1, heads, -1, -1) for x, heads in part], 1) for part in apart)
            both = rotate(torch.cat((q, k), 1), cos, sin, self.interleaved).to(q.dtype)
            rotated, k = both.split((q.shape[1], k.shape[1]), 1)
        else:
            rotated = rotate(q, q_cos, q_sin, self.interleaved).to(q.dtype)
            k = rotate(k, cos, sin, self.interleaved).to(k.dtype)
        return (rotated * self._scale(ratio, growth)[..., None]).to(q.dtype), k


def _of_positions(
    position_ids: torch.Tensor, window: int, length: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The positions in float32 [B, 1, T, 1], max(L, window)/window and ln ln(1 + that), each [B, 1, T].

    All layers of a forward pass get the same positions, so these stay with them; not in inference mode, where a tensor
    that was changed in place cannot be told from what it was.
    """
    keeps = not (torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or position_ids.is_inference())
    kept = position_ids.__dict__.setdefault("_adarope", {}) if keeps else {}
    key = (window, length, position_ids._version if keeps else 0)
    if key not in kept:
        at = position_ids.float()
        ratio = (at + 1) / window
        if length == "sequence":
            ratio = ratio.amax(-1, keepdim=True).expand_as(ratio)
        ratio = ratio.clamp(min=1)[:, None]
        kept[key] = (at[:, None, :, None], ratio, ratio.log1p().log())
    return kept[key]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Turn the first R = 2F channels of x [..., T, D] by angles whose cos and sin are [..., T, F]; the rest stay."""
    span = 2 * cos.shape[-1]
    turning, rest = x[..., :span], x[..., span:]
    first, second = (turning[..., ::2], turning[..., 1::2]) if interleaved else turning.chunk(2, -1)
    a, b = first * cos - second * sin, second * cos + first * sin
    out = torch.stack((a, b), -1).flatten(-2) if interleaved else torch.cat((a, b), -1)
    return torch.cat((out, rest), -1) if rest.shape[-1] else out


class RotaryCall:
    """What a converted layer gets in place of the cosines: its own rotary and its own positions."""

    def __init__(self, rotary: AdaRotary, position_ids: torch.Tensor) -> None:
        self.rotary, self.position_ids = rotary, position_ids

    def turn_heads(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q [B, Hq, T, D] and k [B, Hkv, T, D], rotated."""
        return self.rotary(q, k, self.position_ids)


def hand_over(module: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Forward pre-hook of a converted attention layer: its rotary stands in for (cos, sin)."""
    positions = kwargs.get("position_ids")
    if positions is None:
        raise ValueError(f"{type(module).__name__} was called without position_ids: AdaRotary needs them")
    kwargs["position_embeddings"] = (RotaryCall(module.adarope, positions), None)
    if "flash" in str(module.config._attn_implementation) and bool((positions.diff(dim=-1) > 0).all()):
        # Flash attention reads a jump in the positions as a new document; one that only moves forward is none.
        kwargs["position_ids"] = None
    return args, kwargs


def count_from_first_token(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """Forward pre-hook of the decoder: with left padding a row's positions start at its first real token."""
    mask, tokens = kwargs.get("attention_mask"), kwargs.get("input_ids")
    if kwargs.get("position_ids") is None and isinstance(mask, torch.Tensor) and mask.ndim == 2:
        tokens = args[0] if tokens is None and args else tokens
        width = (kwargs["inputs_embeds"] if tokens is None else tokens).shape[1]
        kwargs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -width:]
    return args, kwargs


def dispatch(apply_rotary_pos_emb: Any) -> Any:
    """A layer that hands over a RotaryCall is turned by its own rotary; every other layer as before."""

    @functools.wraps(apply_rotary_pos_emb)
    def apply(q: Any, k: Any, cos: Any, *args: Any, **kwargs: Any) -> Any:
        if hasattr(cos, "turn_heads"):  # not isinstance: an exported checkpoint brings a RotaryCall of its own
            return cos.turn_heads(q, k)
        return apply_rotary_pos_emb(q, k, cos, *args, **kwargs)

    apply.dispatches_adarope = True  # type: ignore[attr-defined]
    return apply


def install(model: Any, attention: str, numbers: Any, make: Any) -> list[AdaRotary]:
    """Give the layers of class name `attention` with these numbers the AdaRotary that make(layer) returns; return them
    in layer order.

    The layer's own modeling file gets a dispatching apply_rotary_pos_emb, once a process. No attention is rewritten.
    """
    wanted = set(numbers)
    layers: list[Any] = [m for m in model.modules() if type(m).__name__ == attention and m.layer_idx in wanted]
    rotaries = []
    for layer in layers:
        layer.adarope = make(layer)
        if hasattr(layer, "rotary_ndims") and hasattr(layer, "head_dim"):
            # Such a layer hands over the turning channels alone, and the scale is for the whole query.
            layer.rotary_ndims = layer.head_dim
        layer.register_forward_pre_hook(hand_over, with_kwargs=True)
        rotaries.append(layer.adarope)
        modeling: Any = sys.modules[type(layer).__module__]
        if not hasattr(modeling.apply_rotary_pos_emb, "dispatches_adarope"):
            modeling.apply_rotary_pos_emb = dispatch(modeling.apply_rotary_pos_emb)
    if layers:
        model.get_decoder().register_forward_pre_hook(count_from_first_token, with_kwargs=True)
    return rotaries
