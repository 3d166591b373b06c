"""How much memory a stage will want, roughly, from shapes alone."""

from typing import TYPE_CHECKING

from ropex.seam import rope_of_model
from ropex.train.loss import chunk_tokens
from ropex.train.settings import Settings
from ropex.train.trainable import Trained

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def estimate(model: "PreTrainedModel", tensors: list[Trained], settings: Settings) -> dict[str, int]:
    """Bytes by what holds them: parameters, gradients and optimiser, activations, logits, and their sum, `total`.

    Activations count what the backward pass keeps of each layer: norms in float32, projections, the two inner states
    of the MLP; with gradient checkpointing, each layer's input and one layer's rest. Attention is counted as linear in
    the window, which flash and SDPA kernels are and eager is not.
    """
    config, trained = model.config, sum(t.parameter.numel() for t in tensors)
    width = next(model.parameters()).element_size()
    tokens = settings.batch_size * settings.sample_tokens
    rope = rope_of_model(model)
    heads, kv_heads, head_dim, layers = rope.heads, rope.kv_heads, rope.head_dim, rope.layers
    hidden = config.hidden_size
    inner = getattr(config, "intermediate_size", None) or 4 * hidden
    layer = tokens * (hidden * (4 * 4 + 4 * width) + head_dim * (heads + kv_heads) * 6 * width + inner * 5 * width)
    kept = layers * tokens * hidden * width + layer if settings.grad_ckpt else layers * layer
    parts = {
        "parameters": sum(p.numel() * p.element_size() for p in model.parameters()),
        "optimiser": trained * 4 * 3,
        "activations": kept,
        "logits": min(chunk_tokens(config.vocab_size), tokens) * config.vocab_size * (width + 4 * 3),
    }
    return parts | {"total": sum(parts.values())}
