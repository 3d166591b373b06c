"""How much memory a stage will want, roughly, from shapes alone."""

from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from ropex.seam import rope_of_model
from ropex.train.devices import held, layers_of, weighs_skipped
from ropex.train.loss import chunk_tokens
from ropex.train.settings import Settings
from ropex.train.trainable import WEIGHT, Trained

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def estimate(
    model: "PreTrainedModel", tensors: list[Trained], settings: Settings, pieces: int = 1, shards: int = 1
) -> dict[str, int]:
    """Bytes of a process by what holds them: parameters, gradients and optimiser, activations, logits, what is gathered
    of a backbone in shards, and their sum, `total`. pieces: processes that share a window's tokens. shards: processes
    that are to share the backbone of a model which is whole yet.

    Activations count what the backward pass keeps of each layer: norms in float32, projections, the two inner states
    of the MLP; with gradient checkpointing, each layer's input and one layer's rest. Attention is counted as linear in
    the window, which flash and SDPA kernels are and eager is not; what stands for skipped positions is a mask of its
    square.
    """
    config = model.config
    whole = {id(t.parameter) for t in tensors if t.kind != WEIGHT}
    spread = {id(p) for p in model.parameters() if isinstance(p, DTensor) or (shards > 1 and id(p) not in whole)}

    def own(tensor: torch.Tensor) -> int:
        """Numbers of it that one process has."""
        return held(tensor).numel() // (shards if id(tensor) in spread else 1)

    width = next(model.parameters()).element_size()
    tokens = settings.batch_size * settings.sample_tokens // pieces
    rope = rope_of_model(model)
    heads, kv_heads, head_dim, layers = rope.heads, rope.kv_heads, rope.head_dim, rope.layers
    hidden = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    layer = tokens * (hidden * (4 * 4 + 4 * width) + head_dim * (heads + kv_heads) * 6 * width + inner * 5 * width)
    kept = layers * tokens * hidden * width + layer if settings.grad_ckpt else layers * layer
    if weighs_skipped(model, settings, pieces):  # the mask, and one of which keys lie in a query's own piece
        kept += tokens * settings.sample_tokens * (width + 1)
    parts = {
        "parameters": sum(own(p) * p.element_size() for p in model.parameters()),
        "optimiser": sum(own(t.parameter) for t in tensors) * 4 * 3,
        "activations": kept,
        "logits": min(chunk_tokens(config.vocab_size), tokens) * config.vocab_size * (width + 4 * 3),
    }
    if spread:
        parts["gathered"] = _gathered(model, spread)
    return parts | {"total": sum(parts.values())}


def size_of(tensor: torch.Tensor) -> int:
    """Bytes of its numbers; of all of them, where it is in shards."""
    return tensor.numel() * tensor.element_size()


def _gathered(model: "PreTrainedModel", spread: set[int]) -> int:
    """Bytes that are whole at once of a backbone in shards: a layer, the next one, and all that is no layer's."""
    layers = [sum(size_of(p) for p in layer.parameters() if id(p) in spread) for layer in layers_of(model)]
    return sum(size_of(p) for p in model.parameters() if id(p) in spread) - sum(layers) + 2 * max(layers)
