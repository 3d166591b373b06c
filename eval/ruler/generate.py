"""Greedy answers: prompts are read one at a time, their answers are written together.

B rows of a batch, T tokens of a prompt, H heads, D head_dim.

A prompt is read alone, without padding or a mask, so that attention takes its fastest way at any length; what it shares
with the prompt read before is taken from that one's cache. The caches, padded on the left, then form one batch, in
which a token of every answer costs little more than a token of one. A row's answer ends with EOS, with the limit of
tokens, or once its score can no longer change.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import DynamicCache, GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.cache_utils import DynamicLayer

from ropex.eval.ruler.score import Metric, settled

_SHARED = 0.5  # of a prompt: with less in common it is read from its start, which needs no mask and skips half of it
_MASK_VALUES = 2**28  # a rest of the prompt that is read after a cache needs a mask of rest times prompt


@dataclass(frozen=True)
class Answer:
    """What the model said, in how many tokens, and why it stopped."""

    text: str
    tokens: int
    stop: Literal["eos", "settled", "limit"]


@dataclass(frozen=True)
class Ask:
    """A prompt's token ids and what its answer is scored for."""

    input_ids: Sequence[int]
    references: Sequence[str]
    metric: Metric = "all"


@torch.no_grad()
def greedy_answers(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, asks: Sequence[Ask], tokens_to_generate: int
) -> list[Answer]:
    """The most likely continuation of each prompt, token by token, with a key/value cache.

    Logits of a prompt are computed at its last position only. The checkpoint's own sampling settings (temperature,
    penalties) play no part. Raises torch.OutOfMemoryError where there is not enough for all rows at once.
    """
    stops, answers = stop_ids(model.generation_config, tokenizer), dict[int, Answer]()
    together = _turns_by_position(model)
    read: list[tuple[int, Any, Tensor]] = []  # row, cache, the first token's logits
    for row in sorted(range(len(asks)), key=lambda i: list(asks[i].input_ids)):
        before = (asks[read[-1][0]].input_ids, read[-1][1]) if read else None
        cache, logits = _read(model, asks[row].input_ids, before)
        if together and _is_plain(cache):
            read.append((row, cache, logits))
        else:
            (answers[row],) = _write(model, tokenizer, [asks[row]], cache, logits, [0], tokens_to_generate, stops)
    if read:
        rows = [row for row, _, _ in read]
        widths = [len(asks[row].input_ids) for row in rows]
        first = torch.cat([logits for _, _, logits in read])
        cache = _batch(model, [cache for _, cache, _ in read], tokens_to_generate)
        pads = [max(widths) - width for width in widths]
        told = _write(model, tokenizer, [asks[row] for row in rows], cache, first, pads, tokens_to_generate, stops)
        answers.update(zip(rows, told, strict=True))
    return [answers[row] for row in range(len(asks))]


def _read(model: PreTrainedModel, ids: Sequence[int], before: tuple[Sequence[int], Any] | None) -> tuple[Any, Tensor]:
    """The cache of the prompt and the logits [1, V] of the token after it."""
    cache, shared = None, 0
    if before is not None:
        shared = min(_common(before[0], ids), len(ids) - 1)
        if shared >= _SHARED * len(ids) and (len(ids) - shared) * len(ids) <= _MASK_VALUES:
            cache = DynamicCache(config=model.config)
            layers: list[Any] = cache.layers
            for layer, old in zip(layers, before[1].layers, strict=True):
                layer.update(old.keys[:, :, :shared], old.values[:, :, :shared])
        else:
            shared = 0
    return _forward(model, torch.tensor([list(ids[shared:])], device=model.device), cache)


def _forward(model: PreTrainedModel, input_ids: Tensor, cache: Any, **inputs: Any) -> tuple[Any, Tensor]:
    """The cache with these tokens in it, and the logits [B, V] at the last of them."""
    name = "cache" if "cache" in signature(model.forward).parameters else "past_key_values"  # as transformers calls it
    output = model(input_ids=input_ids, use_cache=True, logits_to_keep=1, **{name: cache}, **inputs)
    return getattr(output, name), output.logits[:, -1]


def _write(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    asks: Sequence[Ask],
    cache: Any,
    logits: Tensor,
    pads: Sequence[int],
    limit: int,
    stops: Sequence[int],
) -> list[Answer]:
    """Answers of B rows from the cache of their prompts, of which each has `pads` places of padding on its left."""
    width = len(asks[0].input_ids) + pads[0]
    padded = torch.tensor(pads, device=model.device)
    mask = (torch.arange(width + limit, device=model.device) >= padded[:, None]).long() if any(pads) else None
    said: list[list[int]] = [[] for _ in asks]
    answers: list[Answer | None] = [None] * len(asks)
    for step in range(limit):
        tokens = logits.float().argmax(-1)
        for row, token in enumerate(tokens.tolist()):
            if answers[row] is None:
                said[row].append(token)
                answers[row] = _ended(tokenizer, said[row], asks[row], limit, stops)
        if all(answers) or step == limit - 1:
            break
        step_mask, positions = None, None
        if mask is not None:
            step_mask, positions = mask[:, : width + step + 1], (width + step - padded)[:, None]
        cache, logits = _forward(model, tokens[:, None], cache, attention_mask=step_mask, position_ids=positions)
    return [answer for answer in answers if answer is not None]


def _ended(
    tokenizer: PreTrainedTokenizerBase, said: list[int], ask: Ask, limit: int, stops: Sequence[int]
) -> Answer | None:
    """The answer if it has ended."""
    text = str(tokenizer.decode(said, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    if said[-1] in stops:
        return Answer(text, len(said), "eos")
    if settled(text, ask.references, ask.metric):
        return Answer(text, len(said), "settled")
    return Answer(text, len(said), "limit") if len(said) == limit else None


class _Row(DynamicLayer):
    """One layer's keys and values [B, H, T, D] of a batch, with room in which new ones are written in place."""

    def __init__(self, rows: Sequence[Any], room: int) -> None:
        super().__init__()
        self.filled = max(row.keys.shape[2] for row in rows)
        self.whole = [self._stack([getattr(row, name) for row in rows], room) for name in ("keys", "values")]
        self.dtype, self.device = self.whole[0].dtype, self.whole[0].device
        self.is_initialized = True
        self._show()

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        start, self.filled = self.filled, self.filled + key_states.shape[2]
        for whole, new in zip(self.whole, (key_states, value_states), strict=True):
            whole[:, :, start : self.filled] = new
        return self._show()

    def _show(self) -> tuple[Tensor, Tensor]:
        self.keys, self.values = (whole[:, :, : self.filled] for whole in self.whole)
        return self.keys, self.values

    def _stack(self, rows: Sequence[Tensor], room: int) -> Tensor:
        _, heads, _, dim = rows[0].shape
        whole = rows[0].new_zeros(len(rows), heads, self.filled + room, dim)
        for i, row in enumerate(rows):
            whole[i, :, self.filled - row.shape[2] : self.filled] = row[0]
        return whole


def _batch(model: PreTrainedModel, caches: Sequence[Any], room: int) -> DynamicCache:
    """One cache of B rows, padded on the left; those of the rows are emptied layer by layer."""
    cache = DynamicCache(config=model.config)
    for i in range(len(cache.layers)):
        cache.layers[i] = _Row([one.layers[i] for one in caches], room)
        for one in caches:
            one.layers[i].reset()
    return cache


def _is_plain(cache: Any) -> bool:
    """Whether every layer keeps all keys and values of all tokens: no sliding window, no state of another kind."""
    layers = getattr(cache, "layers", [])
    return bool(layers) and all(type(layer) is DynamicLayer and layer.is_initialized for layer in layers)


def _turns_by_position(model: PreTrainedModel) -> bool:
    """Whether a token's rotation depends on its position alone, whatever the length of the row that it is in."""
    spec: Any = getattr(model, "ropex_spec", None)
    if spec is not None and spec.length != "position":
        return False
    parameters = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    tables = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return not any(table.get("rope_type") in ("dynamic", "longrope") for table in tables)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens both begin with."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if a[low:middle] == b[low:middle] else (low, middle - 1)
    return low


def stop_ids(settings: GenerationConfig | None, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that end an answer: the checkpoint's generation settings' and the tokenizer's EOS."""
    named = settings.eos_token_id if settings else None
    listed = named if isinstance(named, list) else [named]
    return sorted({int(i) for i in [*listed, tokenizer.eos_token_id] if i is not None})
