from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from ropex import attach, make_spec
from ropex.errors import DataError
from ropex.seam import rope_of_model
from ropex.train.loss import batch_loss
from ropex.train.windows import Corpus, Windows, skip_positions


def corpus(*lengths: int) -> Corpus:
    """Documents whose tokens count on: document 0 from 0, document 1 from 1000, ..."""
    tokens = [np.arange(1000 * n, 1000 * n + length, dtype=np.uint32) for n, length in enumerate(lengths)]
    return Corpus(np.concatenate(tokens), np.cumsum(lengths), 0, max(lengths), "")


@given(st.integers(0, 2**32), st.integers(16, 300), st.integers(0, 5000))
def test_positions_climb_within_the_target_in_at_most_four_pieces(seed: int, window: int, room: int) -> None:
    positions = skip_positions(np.random.default_rng(seed), window, window + room)
    steps = np.diff(positions)
    assert len(positions) == window
    assert positions[0] == 0
    assert positions[-1] < window + room
    assert (steps >= 1).all()
    assert (steps > 1).sum() <= (3 if room else 0)


def test_the_jumps_add_up_to_a_uniform_number_and_reach_both_ends() -> None:
    rng = np.random.default_rng(0)
    window, target, draws = 64, 1063, 8000
    drawn = [skip_positions(rng, window, target) for _ in range(draws)]
    jumped = np.sort([p[-1] - (window - 1) for p in drawn])
    distance = np.abs(jumped / (target - window) - np.arange(draws) / draws).max()
    assert distance < 1.63 / draws**0.5  # Kolmogorov-Smirnov at 1%
    assert jumped[0] == 0
    assert jumped[-1] == target - window
    pieces = np.bincount([(np.diff(p) > 1).sum() + 1 for p in drawn], minlength=5) / draws
    assert pieces[2:5] == pytest.approx([1 / 3] * 3, abs=0.03)


def test_pieces_are_cut_anywhere_in_the_window() -> None:
    rng = np.random.default_rng(0)
    cuts = np.concatenate([np.flatnonzero(np.diff(skip_positions(rng, 16, 4000)) > 1) for _ in range(3000)])
    shares = np.bincount(cuts, minlength=15) / len(cuts)
    assert len(shares) == 15
    assert shares == pytest.approx([1 / 15] * 15, abs=0.015)


def test_a_window_of_the_target_has_plain_positions() -> None:
    assert (skip_positions(np.random.default_rng(0), 50, 50) == np.arange(50)).all()


def test_a_window_depends_on_seed_and_index_alone() -> None:
    texts = corpus(500, 700)
    early, late = Windows(texts, 32, 400, 3, 0, 20), Windows(texts, 32, 400, 3, 5, 20)
    for name in ("input_ids", "position_ids"):
        assert torch.equal(early[12][name], late[7][name])
        assert not torch.equal(early[12][name], early[13][name])
        assert not torch.equal(early[12][name], Windows(texts, 32, 400, 4, 0, 20)[12][name])


def test_a_window_is_a_stretch_of_one_document_and_each_is_as_likely() -> None:
    texts = corpus(16, 18, 20)  # 1, 3 and 5 windows of 16
    windows = Windows(texts, 16, 16, 0, 0, 9000)
    seen: dict[int, int] = {}
    for sample in windows:
        ids = sample["input_ids"]
        assert torch.equal(ids, torch.arange(int(ids[0]), int(ids[0]) + 16))
        assert torch.equal(sample["labels"], ids)
        seen[int(ids[0])] = seen.get(int(ids[0]), 0) + 1
        if len(seen) > 9:
            break
    assert sorted(seen) == [0, 1000, 1001, 1002, 2000, 2001, 2002, 2003, 2004]
    assert all(count == pytest.approx(1000, abs=150) for count in seen.values())


def test_no_document_long_enough_is_an_error() -> None:
    empty = Corpus(np.empty(0, np.uint32), np.empty(0, np.int64), 4, 15, "")
    with pytest.raises(DataError, match="the longest has 15"):
        Windows(empty, 16, 16, 0, 0, 1)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("rows", [1, 2])
def test_tokens_after_a_jump_attend_to_those_before_it(tiny_llama: Callable, attention: str, rows: int) -> None:
    model = tiny_llama(attn_implementation=attention)
    attach(model, make_spec("adarope", rope_of_model(model), target=512, init="yarn"))
    texts = Corpus(np.arange(200, dtype=np.uint32), np.array([200]), 0, 200, "")
    windows = Windows(texts, 64, 512, 1, 0, rows)
    batch = {k: torch.stack([w[k] for w in windows]) for k in windows[0]}
    assert (batch["position_ids"].diff() > 1).any(-1).all()

    reference = tiny_llama(attn_implementation="eager")
    attach(reference, model.ropex_spec)
    causal = torch.full((64, 64), float("-inf")).triu(1).expand(rows, 1, 64, 64)

    def loss(mask: torch.Tensor | None) -> torch.Tensor:
        logits = reference(
            batch["input_ids"], position_ids=batch["position_ids"], attention_mask=mask, use_cache=False
        ).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    with torch.no_grad():
        ours = batch_loss(model, batch, rows * 63)
        torch.testing.assert_close(ours, loss(causal), rtol=1e-5, atol=1e-5)
        assert abs(ours - loss(None)) > 1e-3  # without a mask the jump is taken for a new document

        changed = {k: v.clone() for k, v in batch.items()}
        changed["input_ids"][:, 0] = 250
        before, after = (
            model.get_decoder()(**{k: b[k] for k in b if k != "labels"}, use_cache=False).last_hidden_state
            for b in (batch, changed)
        )
        assert ((before - after)[:, -1].abs().amax(-1) > 1e-4).all()
