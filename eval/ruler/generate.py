"""Greedy answers, cut short as soon as their score is settled."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)

from ropex.errors import OptionError
from ropex.eval.ruler.score import settled


@dataclass(frozen=True)
class Answer:
    """What the model said, in how many tokens, and why it stopped."""

    text: str
    tokens: int
    stop: Literal["eos", "settled", "limit"]


class _Settled(StoppingCriteria):
    """Stops once the text after the prompt holds all that it is scored for."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: int, references: Sequence[str]) -> None:
        self.tokenizer, self.prompt, self.references = tokenizer, prompt, references

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        text = _text(self.tokenizer, input_ids[0, self.prompt :].tolist())
        return torch.tensor([settled(text, self.references)], device=input_ids.device)


def greedy_answer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    input_ids: Sequence[int],
    references: Sequence[str],
    tokens_to_generate: int,
) -> Answer:
    """The most likely continuation, token by token, with a key/value cache.

    The prompt's logits are computed at its last position only. The checkpoint's own sampling settings
    (temperature, penalties) play no part. Raises OptionError where the accelerator's memory runs out.
    """
    stops = stop_ids(model, tokenizer)
    prompt = torch.tensor([list(input_ids)], device=model.device)
    config = GenerationConfig(
        do_sample=False,
        num_beams=1,
        max_new_tokens=tokens_to_generate,
        use_cache=True,
        eos_token_id=stops or None,
        pad_token_id=stops[0] if stops else 0,
    )
    own, model.generation_config = model.generation_config, config
    try:
        output = cast(GenerationMixin, model).generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            stopping_criteria=StoppingCriteriaList([_Settled(tokenizer, len(input_ids), references)]),
        )
    except torch.OutOfMemoryError as error:
        raise OptionError(
            f"memory ran out at a prompt of {len(input_ids)} tokens: use shorter lengths or a 16-bit dtype; "
            "answers already written to the log are kept"
        ) from error
    finally:
        model.generation_config = own
    new = output[0, len(input_ids) :].tolist()
    text = _text(tokenizer, new)
    if new and new[-1] in stops:
        return Answer(text, len(new), "eos")
    return Answer(text, len(new), "settled" if settled(text, references) else "limit")


def _text(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def stop_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The ids that end an answer: the checkpoint's generation settings' and the tokenizer's EOS."""
    named = model.generation_config.eos_token_id if model.generation_config else None
    listed = named if isinstance(named, list) else [named]
    return sorted({int(i) for i in [*listed, tokenizer.eos_token_id] if i is not None})
