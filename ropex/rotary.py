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
        self.peers = [self]  # the layers of a model whose tables have this one's shapes and options

    def _apply(self, fn: Any, recurse: bool = True) -> "AdaRotary":
        """Follow the model to its device, never to its dtype."""

        def move(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(move, recurse)

    def kind(self) -> tuple[Any, ...]:
        """What two layers must share to have their tables made together."""
        shapes = self.theta0.shape, self.delta.shape, self.tau.shape
        options = self.window, self.log_coef, self.interleaved, self.length, self.upcast, self.turn_scale
        return (*shapes, *options)

    def theta(self) -> torch.Tensor:
        """Frequencies [Hkv or 1, F], radians per token."""
        return self.theta0 * self.delta.exp()

    def scale(self, position_ids: torch.Tensor) -> torch.Tensor:
        """lambda [B, Hq or 1, T] of queries at position_ids [B, T]; L is position + 1, or the whole row's length."""
        _, ratio, growth = _of_positions(position_ids, self.window, self.length)
        return self._scale(self.gamma[:, None], self.tau[:, None], ratio, growth)

    def _scale(self, gamma: torch.Tensor, tau: torch.Tensor, ratio: torch.Tensor, growth: torch.Tensor) -> torch.Tensor:
        scale = (gamma * growth).exp() / tau
        return scale * (1 + self.log_coef * ratio.log()).square() if self.log_coef else scale

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate q [B, Hq, T, D] and k [B, Hkv, T, D] at position_ids [B, T] or [1, T]; only q is scaled."""
        if q.shape[2] == 1 and not torch.is_grad_enabled():
            return self._decode(q, k, position_ids)
        # Angles and their cosines in float32, cast once: 16-bit positions collapse neighbouring tokens. Nothing here is
        # a matrix product, so autocast changes nothing.
        at, ratio, growth = _of_positions(position_ids, self.window, self.length)
        cos, sin = self._cast(at * self.theta()[:, None], q.dtype)
        if cos.shape[1] > 1:  # query heads of a group share their key's rotation
            groups = q.shape[1] // cos.shape[1]
            q_cos, q_sin = cos.repeat_interleave(groups, 1), sin.repeat_interleave(groups, 1)
        else:
            q_cos, q_sin = cos, sin
        if self.turn_scale != 1:
            q_cos, q_sin = q_cos * self.turn_scale, q_sin * self.turn_scale
        rotated = rotate(q, q_cos, q_sin, self.interleaved).to(q.dtype)
        k = rotate(k, cos, sin, self.interleaved).to(k.dtype)
        scale = self._scale(self.gamma[:, None], self.tau[:, None], ratio, growth)
        return (rotated * scale[..., None]).to(q.dtype), k

    def _cast(self, angles: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin of angles, in the precision that the architecture rotates in."""
        cos, sin = angles.cos(), angles.sin()
        if self.upcast != "throughout":
            cos, sin = cos.to(dtype), sin.to(dtype)
        return (cos.float(), sin.float()) if self.upcast else (cos, sin)

    def _decode(
        self, q: torch.Tensor, k: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """forward for one token a row, which is bound by the number of operations: q and k turn in one go, by tables
        that the first layer makes for all its peers."""
        kept = _kept(position_ids)
        found = None if kept is None else kept.pop(self, None)  # once only: the next pass may find other values
        if found is None or found[0] != self._state(q, position_ids):
            peers = [self] if kept is None else [p for p in self.peers if p.delta.device == q.device]
            made = {
                peer: (peer._state(q, position_ids), tables)
                for peer, tables in zip(peers, self._tables(peers, q, k, position_ids), strict=True)
            }
            found = made.pop(self)
            if kept is not None:
                kept.update(made)
        cos, sin, scale = found[1]
        both, span = torch.cat((q, k), 1), cos.shape[-1]
        turning = both[..., :span]
        if self.interleaved:
            swapped = turning.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
        else:
            swapped = turning.roll(span // 2, -1)
        turned = (turning * cos + swapped * sin).to(q.dtype)
        both = turned if span == both.shape[-1] else torch.cat((turned, both[..., span:]), -1)
        rotated, k = both.split((q.shape[1], k.shape[1]), 1)
        return (rotated * scale).to(q.dtype), k

    def _state(self, q: torch.Tensor, position_ids: torch.Tensor) -> tuple[Any, ...]:
        """Tables made in another state are of no use."""
        tensors = (position_ids, self.theta0, self.delta, self.tau, self.gamma)
        return (q.dtype, q.device, *(t._version for t in tensors if not t.is_inference()))

    def _tables(
        self, peers: "list[AdaRotary]", q: torch.Tensor, k: torch.Tensor, position_ids: torch.Tensor
    ) -> "list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]":
        """Of each peer: cos and sin [B, Hq + Hkv or 1, 1, R] of q's and then k's heads, sin with the signs that the
        swapped channels take, and lambda [B, Hq or 1, 1, 1]."""
        at, ratio, growth = _of_positions(position_ids, self.window, self.length)
        theta0, delta = torch.stack([p.theta0 for p in peers]), torch.stack([p.delta for p in peers])
        cos, sin = self._cast(at * (theta0[:, None] * delta.exp())[:, None, :, None], q.dtype)
        if self.interleaved:
            cos, sin = cos.repeat_interleave(2, -1), torch.stack((-sin, sin), -1).flatten(-2)
        else:
            cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        if cos.shape[2] > 1 or self.turn_scale != 1:
            groups = q.shape[1] // cos.shape[2]
            q_cos, q_sin = cos.repeat_interleave(groups, 2), sin.repeat_interleave(groups, 2)
            if self.turn_scale != 1:
                q_cos, q_sin = q_cos * self.turn_scale, q_sin * self.turn_scale
            heads = (-1, -1, k.shape[1], -1, -1)
            cos, sin = torch.cat((q_cos, cos.expand(heads)), 2), torch.cat((q_sin, sin.expand(heads)), 2)
        tau, gamma = torch.stack([p.tau for p in peers]), torch.stack([p.gamma for p in peers])
        scale = self._scale(gamma[:, None, :, None], tau[:, None, :, None], ratio, growth)
        return list(zip(cos.unbind(), sin.unbind(), scale[..., None].unbind(), strict=True))


def _kept(position_ids: torch.Tensor) -> dict[Any, Any] | None:
    """What layers of one forward pass share, which get the same positions, so that it stays with those.

    None in inference mode, where a tensor that was changed in place cannot be told from what it was.
    """
    if torch.compiler.is_compiling() or torch.is_inference_mode_enabled() or position_ids.is_inference():
        return None
    return position_ids.__dict__.setdefault("_adarope", {})


def _of_positions(
    position_ids: torch.Tensor, window: int, length: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The positions in float32 [B, 1, T, 1], max(L, window)/window and ln ln(1 + that), each [B, 1, T]."""
    kept = _kept(position_ids)
    kept = {} if kept is None else kept
    key = (window, length, 0 if position_ids.is_inference() else position_ids._version)
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
    for rotary in rotaries:
        rotary.peers = [other for other in rotaries if other.kind() == rotary.kind()]
    if layers:
        model.get_decoder().register_forward_pre_hook(count_from_first_token, with_kwargs=True)
    return rotaries
