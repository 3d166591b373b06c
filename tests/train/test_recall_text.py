"""Windows with facts in their text."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ropex.facts import MEASURED
from ropex.haystack import shipped_text
from ropex.loading import load_tokenizer
from ropex.train.loss import IGNORED
from ropex.train.recall import TAUGHT, with_facts
from ropex.train.windows import Corpus, Windows, skip_positions

TOKENIZER = load_tokenizer("nano")
PLAY = np.array(TOKENIZER.encode(shipped_text(), add_special_tokens=False), dtype=np.uint32)
CORPUS = Corpus(PLAY, np.array([0]), np.array([len(PLAY)]), 0, len(PLAY), "")


def read(positions: np.ndarray) -> np.ndarray:
    return PLAY[500 + positions].astype(np.int64)


@given(st.integers(0, 2**32), st.integers(500, 1500), st.integers(0, 9000))
@settings(max_examples=40, deadline=None)
def test_a_window_with_facts_is_as_long_and_jumps_as_far(seed: int, window: int, room: int) -> None:
    rng = np.random.default_rng(seed)
    plain = skip_positions(rng, window, window + room)
    ids, positions, told = with_facts(TOKENIZER, read, plain, rng)
    assert len(ids) == len(positions) == len(told) == window
    steps, jumps = np.diff(positions), np.diff(plain)
    assert positions[0] == 0 and (steps >= 1).all()
    assert positions[-1] == plain[-1]
    assert sorted(steps[steps > 1]) == sorted(jumps[jumps > 1])
    assert (np.abs(np.flatnonzero(steps > 1) - np.flatnonzero(jumps > 1)) < window / 4).all()
    assert 4 <= (~told).sum() < window / 8
    assert ids.tolist() != read(plain).tolist()


def test_what_is_asked_for_was_said_before_and_mostly_in_an_earlier_piece() -> None:
    far = []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        ids, positions, told = with_facts(TOKENIZER, read, skip_positions(rng, 1000, 9000), rng)
        piece = np.cumsum(np.diff(positions, prepend=-1) != 1)
        for start in np.flatnonzero(~told & np.r_[True, told[:-1]]):  # where a value is stated
            end = start + int(np.argmax(np.r_[told[start:], True]))
            value = ids[start:end]
            again = [i for i in range(end, 1000 - len(value) + 1) if (ids[i : i + len(value)] == value).all()]
            assert len(again) >= 2, TOKENIZER.decode(value)
            far.append(bool(piece[again[0]] > piece[start]))
    assert len(far) > 200 and np.mean(far) > 0.6


def test_no_format_is_both_taught_and_measured_but_the_lines_of_nano() -> None:
    assert {f.asked for f in TAUGHT.values()} & {f.asked for f in MEASURED.values()} == {TAUGHT["lines"].asked}


@pytest.mark.parametrize("window", [16, 64])
def test_where_facts_do_not_fit_the_text_is_as_it_was(window: int) -> None:
    rng = np.random.default_rng(0)
    plain = skip_positions(rng, window, 500)
    ids, positions, told = with_facts(TOKENIZER, read, plain, rng)
    assert (ids == read(plain)).all() and (positions == plain).all() and told.all()


def test_text_without_line_ends_takes_facts_between_words() -> None:
    words = TOKENIZER.encode(" ".join(f"word number {i} of a text" for i in range(900)), add_special_tokens=False)
    text = np.array(words)
    rng = np.random.default_rng(0)
    ids, _, told = with_facts(TOKENIZER, lambda at: text[at], np.arange(900), rng)
    assert not told.all()
    assert "\n" in TOKENIZER.decode(ids)


def test_a_share_of_the_windows_has_facts_and_no_label_that_nothing_tells() -> None:
    windows = Windows(CORPUS, 600, 4000, 0, 0, 60, recall=0.5, tokenizer=TOKENIZER)
    masked = [(w["labels"] == IGNORED).any().item() for w in windows]
    assert 18 <= sum(masked) <= 42
    for window in windows:
        kept = window["labels"] != IGNORED
        assert torch.equal(window["labels"][kept], window["input_ids"][kept])
    again = Windows(CORPUS, 600, 4000, 0, 20, 60, recall=0.5, tokenizer=TOKENIZER)
    assert all(torch.equal(windows[25][name], again[5][name]) for name in windows[25])
    none = Windows(CORPUS, 600, 4000, 0, 0, 60, tokenizer=TOKENIZER)
    assert not any((w["labels"] == IGNORED).any() for w in none)
