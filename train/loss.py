"""Next-token loss without the window's logits: they exist for one chunk of tokens at a time, forward and backward.

B batch, T tokens, H hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from ropex.head import scale_logits, scales_logits

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IGNORED = -100
_CHUNK_LOGITS = {"cpu": 2**24, "cuda": 2**27}  # elements: long enough that the matmul does not notice

Scale = Callable[[torch.Tensor], torch.Tensor]


def chunk_tokens(vocabulary: int) -> int:
    """Tokens whose logits are held at once."""
    return max(16, _CHUNK_LOGITS["cuda" if torch.cuda.is_available() else "cpu"] // vocabulary)


def _summed(hidden: torch.Tensor, labels: torch.Tensor, head: nn.Module, scale: Scale) -> torch.Tensor:
    """NLL in nats, summed in float32 over hidden [n, H] with labels [n]."""
    return F.cross_entropy(scale(head(hidden).float()), labels, ignore_index=IGNORED, reduction="sum")


def summed_nll(
    hidden: torch.Tensor, labels: torch.Tensor, head: nn.Module, chunk: int, scale: Scale = lambda logits: logits
) -> torch.Tensor:
    """NLL in nats summed over every label but IGNORED; 0, with a gradient of 0, where there is none.

    hidden [B, T, H] predicts labels [B, T] one by one. scale: what the family does to logits.
    """
    states, targets = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    total = torch.zeros((), dtype=torch.float32, device=hidden.device)
    for part, wanted in zip(states.split(chunk), targets.split(chunk), strict=True):
        # preserve_rng_state: the head draws nothing, and reading the generator's state costs a sync on a GPU
        total = total + checkpoint(_summed, part, wanted, head, scale, use_reentrant=False, preserve_rng_state=False)
    return total


def fused_nll(hidden: torch.Tensor, labels: torch.Tensor, head: nn.Linear) -> torch.Tensor:
    """summed_nll by liger-kernel's fused linear cross entropy, whose gradient is made in the forward pass."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED, reduction="sum")
    return loss(head.weight, hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1), head.bias)


def fuses(model: "PreTrainedModel") -> bool:
    """Whether liger-kernel can compute this model's loss on a GPU: it is installed, and logits are the head's own."""
    plain = type(model.get_output_embeddings()) is nn.Linear and not scales_logits(model)
    return plain and find_spec("liger_kernel") is not None


def batch_loss(
    model: "PreTrainedModel",
    batch: dict[str, torch.Tensor],
    items: torch.Tensor | int,
    chunk: int | None = None,
) -> torch.Tensor:
    """Summed NLL of a batch over `items`, the labels of the whole optimiser step: micro-batches then add up to the
    token-weighted mean. The batch holds input_ids, position_ids and labels, each [B, T], and where no
    documents are packed an attention_mask."""
    states = model.get_decoder()(
        input_ids=batch["input_ids"],
        attention_mask=batch.get("attention_mask"),
        position_ids=batch["position_ids"],
        use_cache=False,
    ).last_hidden_state
    targets = batch.get(
        "shift_labels"
    )  # already moved where a window is cut along its tokens, which borders would lose
    if targets is None:
        states, targets = states[:, :-1], batch["labels"][:, 1:]
    head: Any = model.get_output_embeddings()
    if states.is_cuda and chunk is None and fuses(model):
        total = fused_nll(states, targets, head)
    else:
        chunk = chunk or chunk_tokens(head.weight.shape[0])
        total = summed_nll(states, targets, head, chunk, lambda logits: scale_logits(logits, model))
    return total / torch.as_tensor(items, device=total.device).clamp(min=1)


@contextmanager
def loss_as_forward(model: "PreTrainedModel") -> Iterator[None]:
    """Inside, calling the model with (batch, items), or calling what wraps it to train on several devices, gives
    batch_loss: such wrappers add up gradients of what went through their own forward alone."""
    changed: Any = model
    changed.forward = lambda batch, items: batch_loss(model, batch, items)
    try:
        yield
    finally:
        del changed.forward
