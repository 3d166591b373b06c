"""Answers in batches are those that each prompt gets alone, and those that greedy decoding without a cache gives."""

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

from ropex.eval.models import load_model
from ropex.eval.ruler import generate
from ropex.eval.ruler.generate import Answer, Ask, greedy_answers
from ropex.eval.ruler.score import score


def prompts(*lengths: int, shared: int = 0, seed: int = 0) -> list[list[int]]:
    """Random ids; all begin with the same `shared` ones."""
    generator = torch.Generator().manual_seed(seed)
    head = torch.randint(2, 1500, (shared,), generator=generator).tolist()
    return [head + torch.randint(2, 1500, (n - shared,), generator=generator).tolist() for n in lengths]


def by_hand(model: torch.nn.Module, ids: Sequence[int], steps: int) -> list[int]:
    """Greedy without a cache."""
    said = list(ids)
    for _ in range(steps):
        with torch.no_grad():
            said.append(int(model(torch.tensor([said])).logits[0, -1].argmax()))
    return said[-steps:]


def answers(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, ids: list[list[int]], steps: int
) -> list[Answer]:
    return greedy_answers(model, tokenizer, [Ask(one, ["never said"]) for one in ids], steps)


@pytest.mark.parametrize("method", ["", "@yarn:2", "@rope-id", "@adarope"])
@pytest.mark.parametrize(("lengths", "shared"), [((50,), 0), ((50, 61, 37), 0), ((40, 40), 0), ((300, 280, 310), 200)])
def test_a_batch_gives_what_each_prompt_gets_alone(
    method: str, lengths: tuple[int, ...], shared: int, checkpoint: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    model = load_model(checkpoint + method)
    ids = prompts(*lengths, shared=shared)
    expected = [tokenizer.decode(by_hand(model, one, 9)) for one in ids]
    got = answers(model, tokenizer, ids, 9)
    assert [answer.text for answer in got] == expected
    assert len(set(expected)) == len(expected)


def test_what_prompts_share_is_read_once(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    ids = prompts(300, 280, 310, shared=200)
    widths: list[int] = []
    handle = model.model.layers[0].register_forward_hook(lambda m, args, output: widths.append(args[0].shape[1]))
    answers(model, tokenizer, ids, 3)
    handle.remove()
    first, *rest = (len(one) for one in sorted(ids))
    assert widths == [first, *(width - 200 for width in rest), 1, 1]


def test_rows_that_turn_by_their_length_are_read_alone(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    odd = copy.deepcopy(model)
    odd.config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 500000.0, "factor": 2.0}
    assert not generate._turns_by_position(odd)
    assert generate._turns_by_position(model)
    ids = prompts(50, 61)
    widths: list[tuple[int, int]] = []
    odd.lm_head.register_forward_hook(lambda m, args, output: widths.append(output.shape[:2]))
    answers(odd, tokenizer, ids, 3)
    assert widths == [(1, 1)] * 6


def test_a_sliding_window_is_answered_row_by_row(tokenizer: PreTrainedTokenizerFast) -> None:
    torch.manual_seed(0)
    config = MistralConfig(
        vocab_size=1500, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, head_dim=16, sliding_window=32, initializer_range=0.3,
    )  # fmt: skip
    model = MistralForCausalLM(config).eval()
    ids = prompts(50, 61, 200)
    assert [a.text for a in answers(model, tokenizer, ids, 6)] == [
        tokenizer.decode(by_hand(model, one, 6)) for one in ids
    ]


def test_16_bit_answers_are_close_to_those_alone(checkpoint: str, tokenizer: PreTrainedTokenizerFast) -> None:
    """The first token, before rounding has grown."""
    model = load_model(checkpoint, "bfloat16")
    ids = prompts(50, 61, 37)
    alone = [answers(model, tokenizer, [one], 1)[0].text for one in ids]
    assert [answer.text for answer in answers(model, tokenizer, ids, 1)] == alone


def test_answers_are_greedy_and_prompt_logits_are_computed_at_one_position(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    (ids,) = prompts(50)
    odd = copy.deepcopy(model)
    odd.generation_config = GenerationConfig(do_sample=True, temperature=3.0, repetition_penalty=9.0, eos_token_id=1)
    widths: list[int] = []

    def watch(module: object, args: tuple[Tensor], output: Tensor) -> None:
        widths.append(output.shape[1])

    odd.lm_head.register_forward_hook(watch)
    assert answers(odd, tokenizer, [ids], 12) == [Answer(tokenizer.decode(by_hand(model, ids, 12)), 12, "limit")]
    assert widths == [1] * 12
    assert odd.generation_config.temperature == 3.0


def test_each_answer_ends_at_its_eos_or_once_its_score_is_settled(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Scores are what the whole answers get."""
    ids = prompts(50, 61)
    said = [by_hand(model, one, 12) for one in ids]
    odd = copy.deepcopy(model)
    stop = said[0][5]
    odd.generation_config.eos_token_id = [1, stop]
    first, second = answers(odd, tokenizer, ids, 12)
    assert (first.stop, first.tokens) == ("eos", said[0].index(stop) + 1)
    assert stop in said[1] or (second.stop, second.tokens) == ("limit", 12)

    texts = [tokenizer.decode(one) for one in said]
    wanted = [next(c for c in text if c.isalpha()) for text in texts]
    for metric, references in (("all", [[w] for w in wanted]), ("part", [[w, "never said"] for w in wanted])):
        asks = [Ask(one, refs, metric) for one, refs in zip(ids, references, strict=True)]  # type: ignore[arg-type]
        for answer, text, ask in zip(greedy_answers(model, tokenizer, asks, 12), texts, asks, strict=True):
            assert answer.stop == "settled"
            assert answer.tokens < 12
            assert text.startswith(answer.text)
            assert score(answer.text, ask.references, ask.metric) == score(text, ask.references, ask.metric) == 1
