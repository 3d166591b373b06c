"""From hidden states to logits, for whoever applies the output embedding itself, a few tokens at a time."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def scale_logits(logits: torch.Tensor, model: "PreTrainedModel") -> torch.Tensor:
    """What some families do between the output embedding and the softmax, to logits of any shape."""
    config = model.config.get_text_config()
    if divisor := getattr(config, "logits_scaling", None):  # Granite
        logits = logits / divisor
    if factor := getattr(config, "logit_scale", None):  # Cohere
        logits = logits * factor
    if cap := getattr(config, "final_logit_softcapping", None):  # Gemma
        logits = cap * torch.tanh(logits / cap)
    return logits


def scales_logits(model: "PreTrainedModel") -> bool:
    """Whether scale_logits changes anything."""
    probe = torch.tensor([1.0])
    return not torch.equal(scale_logits(probe, model), probe)
