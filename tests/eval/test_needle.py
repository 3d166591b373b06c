from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from ropex.errors import DataError, OptionError
from ropex.eval.needle import mixed_document, needle_accuracy, needle_sample
from ropex.haystack import DIGITS, KEYS, Haystack, encode_lines

DEMO = Path(__file__).parents[2] / "demo"
TEXT = (DEMO / "text" / "dev.txt").read_text()


@pytest.fixture(scope="module")
def nano() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(DEMO / "nano")


@pytest.fixture(scope="module")
def haystack(nano: PreTrainedTokenizerFast) -> Haystack:
    return encode_lines(nano, TEXT)


@pytest.mark.parametrize("length", [200, 256, 1024, 2048])
@pytest.mark.parametrize("index", [0, 1, 7])
def test_a_sample_fills_its_length_and_holds_its_answer_once(
    nano: PreTrainedTokenizerFast, haystack: Haystack, length: int, index: int
) -> None:
    sample = needle_sample(nano, haystack, length, index)
    assert len(sample.prompt) + len(sample.answer) == length
    assert sample.prompt[0] == nano.bos_token_id
    prompt, answer = nano.decode(sample.prompt[1:]), nano.decode(sample.answer)
    *_, query = prompt.split("\n")
    assert query.startswith("((") and query.endswith("=")
    assert prompt.count(answer) == 1
    assert prompt.count(query) == 1
    assert f"\n[[{query[2:]}{answer}]]\n" in f"\n{prompt}"
    assert prompt.count("=") == 2 + length // 32  # the needle, the query, the distractors


def test_samples_depend_on_seed_length_and_index_alone(nano: PreTrainedTokenizerFast, haystack: Haystack) -> None:
    asked = [(seed, length, index) for seed in (0, 1) for length in (256, 300) for index in (0, 1)]
    first, again = ([needle_sample(nano, haystack, n, i, s) for s, n, i in asked] for _ in range(2))
    assert first == again
    assert len({tuple(sample.prompt) for sample in first}) == len(asked)


@pytest.mark.parametrize("seed", range(3))
def test_the_needle_moves_over_all_depths(nano: PreTrainedTokenizerFast, haystack: Haystack, seed: int) -> None:
    tenths = [0] * 10
    for index in range(40):
        sample = needle_sample(nano, haystack, 2048, index, seed)
        key = sample.prompt[-1]
        assert abs(sample.prompt.index(key) / 2048 - sample.depth) < 0.05
        tenths[int(10 * sample.depth)] += 1
    assert min(tenths) >= 2


@settings(max_examples=30, deadline=None)
@given(length=st.integers(120, 3000), pairs=st.integers(0, 60), seed=st.integers(0, 9))
def test_a_document_fills_its_length_and_asks_only_for_what_it_stated(
    nano: PreTrainedTokenizerFast, haystack: Haystack, length: int, pairs: int, seed: int
) -> None:
    pairs = min(pairs, length // 30)
    document = mixed_document(nano, haystack, length, pairs, seed)
    assert document == mixed_document(nano, haystack, length, pairs, seed)
    assert len(document.ids) == length
    assert len(document.stated) == pairs * DIGITS <= len(document.asked)
    known: dict[int, list[int]] = {}
    for at in sorted(document.stated + document.asked)[::DIGITS]:
        key, digits = document.ids[at - 1], document.ids[at : at + DIGITS]
        assert (key in known) == (at in document.asked)
        assert nano.decode(document.ids[at - 2]) == ("((" if at in document.asked else "[[")
        assert known.setdefault(key, digits) == digits
        assert nano.decode(digits).isdecimal()
    assert len(known) == pairs


def test_distances_in_long_documents_reach_over_the_whole_document(
    nano: PreTrainedTokenizerFast, haystack: Haystack
) -> None:
    document = mixed_document(nano, haystack, 4096, 90)
    stated = {document.ids[at - 1]: at for at in document.stated[::DIGITS]}
    reach = sorted((at - stated[document.ids[at - 1]]) / 4096 for at in document.asked[::DIGITS])
    assert reach[0] < 0.1 and reach[-1] > 0.9
    assert 0.3 < reach[len(reach) // 2] < 0.6


def test_a_document_survives_decoding(nano: PreTrainedTokenizerFast, haystack: Haystack) -> None:
    """Its text, written to a file and tokenised again, gives the same ids."""
    ids = mixed_document(nano, haystack, 2048, 40).ids
    assert nano.encode(nano.decode(ids[1:])) == ids


def test_every_key_is_one_token(nano: PreTrainedTokenizerFast) -> None:
    assert len(set(KEYS)) == len(KEYS)
    assert all(len(nano.encode(f"{key}=", add_special_tokens=False)) == 1 for key in KEYS)


def test_what_does_not_fit_is_refused(nano: PreTrainedTokenizerFast, haystack: Haystack) -> None:
    with pytest.raises(OptionError, match="greater length"):
        needle_sample(nano, haystack, 12, 0)
    with pytest.raises(OptionError, match="number from 0"):
        mixed_document(nano, haystack, 4096, len(KEYS) + 1)
    with pytest.raises(DataError, match="longer text"):
        needle_sample(nano, encode_lines(nano, "To be,\nor not.\n"), 256, 0)


def test_other_tokenizers_work(tokenizers: Callable[..., PreTrainedTokenizerFast]) -> None:
    other = tokenizers(bos=False)
    sample = needle_sample(other, encode_lines(other, TEXT), 512, 3)
    assert len(sample.prompt) + len(sample.answer) == 512
    assert other.decode(sample.answer).strip() in other.decode(sample.prompt)


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(DEMO / "nano", dtype=torch.float32).eval()


def test_the_shipped_checkpoint_retrieves_within_its_window(
    nano: PreTrainedTokenizerFast, model: torch.nn.Module
) -> None:
    assert needle_accuracy(model, nano, TEXT, 256, samples=40) >= 0.9


def test_accuracy_is_that_of_greedy_decoding(
    nano: PreTrainedTokenizerFast, haystack: Haystack, model: torch.nn.Module
) -> None:
    length, right = 512, 0  # past the window, where some answers are wrong
    for index in range(12):
        sample = needle_sample(nano, haystack, length, index, seed=5)
        prompt = torch.tensor([sample.prompt])
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=DIGITS,
            do_sample=False,
            pad_token_id=0,
        )
        right += out[0, len(sample.prompt) :].tolist() == sample.answer
    assert needle_accuracy(model, nano, TEXT, length, samples=12, seed=5) == right / 12


@pytest.mark.parametrize("asks", [2, 6])
def test_every_key_is_asked_for_as_often_as_wanted(
    nano: PreTrainedTokenizerFast, haystack: Haystack, asks: int
) -> None:
    document = mixed_document(nano, haystack, 2048, 10, asks=asks)
    assert len(document.stated) == 10 * DIGITS and len(document.asked) == 10 * asks * DIGITS
