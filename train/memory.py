"""How much memory a stage will want, roughly, from shapes alone."""

from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from ropex.seam import rope_of_model
from ropex.train.devices import held, layers_of
from ropex.train.loss import chunk_tokens
from ropex.train.settings import Settings
from ropex.train.trainable import Trained

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def estimate(model: "PreTrainedModel", tensors: list[Trained], settings: Settings, pieces: int = 1) -> dict[str, int]:
    """Bytes of a process by what holds them: parameters, gradients and optimiser, activations, logits, what is gathered
    of a backbone in shards, and their sum, `total`. pieces: processes that share a window's tokens.

    Activations count what the backward pass keeps of each layer: norms in float32, projections, the two inner states
    of the MLP; with gradient checkpointing, each layer's input and one layer's rest. Attention is counted as linear in
    the window, which flash and SDPA kernels are and eager is not.
    """
    config, trained = model.config, sum(held(t.parameter).numel() for t in tensors)
    width = next(model.parameters()).element_size()
    tokens = settings.batch_size * settings.sample_tokens // pieces
    rope = rope_of_model(model)
    heads, kv_heads, head_dim, layers = rope.heads, rope.kv_heads, rope.head_dim, rope.layers
    hidden = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    layer = tokens * (hidden * (4 * 4 + 4 * width) + head_dim * (heads + kv_heads) * 6 * width + inner * 5 * width)
    kept = layers * tokens * hidden * width + layer if settings.grad_ckpt else layers * layer
    parts = {
        "parameters": sum(size_of(held(p)) for p in model.parameters()),
        "optimiser": trained * 4 * 3,
        "activations": kept,
        "logits": min(chunk_tokens(config.vocab_size), tokens) * config.vocab_size * (width + 4 * 3),
    }
    if whole := _gathered(model):
        parts["gathered"] = whole
    return parts | {"total": sum(parts.values())}


def size_of(tensor: torch.Tensor) -> int:
    """Bytes of its numbers; of all of them, where it is in shards."""
    return tensor.numel() * tensor.element_size()


def _gathered(model: "PreTrainedModel") -> int:
    """Bytes that are whole at once of a backbone in shards: a layer, the next one, and all that is no layer's."""
    shards = [p for p in model.parameters() if isinstance(p, DTensor)]
    layers = [sum(size_of(p) for p in layer.parameters() if isinstance(p, DTensor)) for layer in layers_of(model)]
    return sum(map(size_of, shards)) - sum(layers) + 2 * max(layers)
