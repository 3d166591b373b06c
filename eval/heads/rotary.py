"""What turns the heads of a model: its tables, and what AdaRoPE learned."""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ropex.seam import rope_of_model
from ropex.tables import table


def pairing(model: PreTrainedModel) -> tuple[int, bool]:
    """Channel pairs a head's rotary covers, and whether neighbours turn together."""
    rope, spec = rope_of_model(model), _spec(model)
    return rope.pairs, (spec.pairing if spec else rope.pairing) == "interleaved"


def trained_window(model: PreTrainedModel) -> int:
    """Tokens that the model's table was made for: what an extension aimed at, or the native window."""
    spec = _spec(model)
    return spec.target if spec else rope_of_model(model).window


def tables(model: PreTrainedModel) -> dict[int, Tensor]:
    """theta [Hkv or 1, D/2] of every layer, radians per token, channels outside of the rotary at 0."""
    rope = rope_of_model(model)
    out = {layer: torch.zeros(1, rope.head_dim // 2) for layer in range(rope.layers)}
    for own in (rope, rope.local):
        if own is not None:
            theta = table("rope", own, {}).theta
            for layer in own.turning:
                out[layer] = _padded(theta[None], rope.head_dim)
    for layer, rotary in rotaries_by_layer(model).items():
        out[layer] = _padded(rotary.theta().float().cpu(), rope.head_dim)
    return out


def facts(model: PreTrainedModel, lengths: list[int]) -> dict[int, list[dict[str, Any]]]:
    """Of every query head of the layers that learned: "theta_ratio" [F], its frequencies over those it started from;
    "tau", "gamma", and "lambda" at each length and at every doubling of the native window up to the trained one."""
    spec, rope = _spec(model), rope_of_model(model)
    if spec is None or not spec.learned:
        return {}
    doublings = [spec.window * 2**i for i in range(max(1, spec.target // spec.window).bit_length())]
    lengths = sorted({*lengths, *doublings})
    at = torch.tensor([lengths]) - 1
    out = {}
    for layer, rotary in rotaries_by_layer(model).items():
        ratio = rotary.delta.detach().float().exp().cpu()
        ratio = ratio.repeat_interleave(rope.heads // len(ratio), 0)
        scale = rotary.scale(at.to(rotary.tau.device))[0].detach().cpu().expand(rope.heads, -1)
        tau, gamma = (value.detach().float().cpu().expand(rope.heads) for value in (rotary.tau, rotary.gamma))
        out[layer] = [
            {
                "theta_ratio": ratio[h].tolist(),
                "tau": float(tau[h]),
                "gamma": float(gamma[h]),
                "lambda": {str(length): float(scale[h, i]) for i, length in enumerate(lengths)},
            }
            for h in range(rope.heads)
        ]
    return out


def _spec(model: PreTrainedModel) -> Any:
    return getattr(model, "ropex_spec", None)


def rotaries_by_layer(model: PreTrainedModel) -> dict[int, Any]:
    """The AdaRotary of each converted layer, by its number."""
    layers: list[Any] = [m for m in model.modules() if hasattr(m, "adarope") and hasattr(m, "layer_idx")]
    return {layer.layer_idx: layer.adarope for layer in layers}


def _padded(theta: Tensor, head_dim: int) -> Tensor:
    return torch.cat((theta, theta.new_zeros(len(theta), head_dim // 2 - theta.shape[1])), 1)
