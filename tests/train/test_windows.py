from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from ropex import attach, make_spec
from ropex.errors import DataError
from ropex.seam import rope_of_model, rotaries
from ropex.train.loss import batch_loss
from ropex.train.windows import Corpus, Windows, skip_positions, text_places, weigh_skipped


def corpus(*lengths: int) -> Corpus:
    """Documents whose tokens count on: document 0 from 0, document 1 from 1000, ..."""
    tokens = [np.arange(1000 * n, 1000 * n + length, dtype=np.uint32) for n, length in enumerate(lengths)]
    ends = np.cumsum(lengths)
    return Corpus(np.concatenate(tokens), ends - lengths, ends, 0, max(lengths), "")


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


@given(st.integers(0, 2**32), st.integers(16, 300), st.integers(0, 3000), st.integers(0, 3000), st.floats(0, 1))
def test_text_jumps_with_the_positions_as_far_as_the_document_goes(
    seed: int, window: int, room: int, rest: int, share: float
) -> None:
    positions = skip_positions(np.random.default_rng(seed), window, window + room)
    places = text_places(positions, round(share * rest), window + rest)
    assert places[0] >= 0 and places[-1] < window + rest
    steps, jumps = np.diff(places), np.diff(positions)
    assert (steps[jumps == 1] == 1).all() and (steps >= 1).all()
    if positions[-1] < window + rest:
        assert (steps == jumps).all()
        assert places[0] == (0 if share == 0 else window + rest - 1 - positions[-1] if share == 1 else places[0])
    else:
        assert places[0] == 0 and places[-1] == window + rest - 1  # all that there is


def test_a_window_of_a_long_document_holds_the_tokens_of_its_positions() -> None:
    for sample in Windows(corpus(5000), 32, 400, 3, 0, 50):
        ids, positions = sample["input_ids"], sample["position_ids"]
        assert torch.equal(ids - ids[0], positions)


def test_no_document_long_enough_is_an_error() -> None:
    empty = Corpus(np.empty(0, np.uint32), *np.empty((2, 0), np.int64), 4, 15, "")
    with pytest.raises(DataError, match="the longest has 15"):
        Windows(empty, 16, 16, 0, 0, 1)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("rows", [1, 2])
def test_tokens_after_a_jump_attend_to_those_before_it(tiny_llama: Callable, attention: str, rows: int) -> None:
    model = tiny_llama(attn_implementation=attention)
    attach(model, make_spec("adarope", rope_of_model(model), target=512, init="yarn"))
    texts = Corpus(np.arange(200, dtype=np.uint32), np.array([0]), np.array([200]), 0, 200, "")
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


@given(st.integers(0, 2**32), st.integers(16, 200), st.integers(0, 5000))
def test_the_weights_of_what_a_query_sees_add_up_to_the_positions_before_it(seed: int, window: int, room: int) -> None:
    rng = np.random.default_rng(seed)
    positions = torch.from_numpy(np.stack([skip_positions(rng, window, window + room) for _ in range(3)]))
    ids = torch.from_numpy(rng.integers(0, [[1], [2], [10**6]], (3, window)))  # from nothing but repeats to none
    bias = weigh_skipped(positions, ids, torch.float64)
    assert bias.shape == (3, 1, window, window)
    assert torch.equal(bias.isinf(), torch.ones(window, window).triu(1).bool().expand_as(bias))
    torch.testing.assert_close(bias.exp().sum(-1)[:, 0], positions + 1.0, rtol=1e-5, atol=0, check_dtype=False)
    pieces = (positions - torch.arange(window))[:, None]  # how far positions are ahead of the tokens
    same = pieces[..., None] == pieces[..., None, :]
    assert (bias[same & ~bias.isinf()] == 0).all()
    assert (bias[~same & ~bias.isinf()] >= 0).all()


def test_weights_by_hand() -> None:
    """The first four tokens are the sink: two more stand for the six other positions up to the next piece, three for
    thirteen; the last piece is itself."""
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 10, 11, 12, 23, 24]])
    bias = weigh_skipped(positions, torch.arange(11)[None], torch.float64)[0, 0]
    first, second = np.log(6 / 2), np.log(13 / 3)
    assert bias[-1].tolist() == pytest.approx([0] * 4 + [first] * 2 + [second] * 3 + [0] * 2)
    assert bias[7].tolist()[:8] == pytest.approx([0] * 4 + [first] * 2 + [0] * 2)


def test_a_first_piece_of_sink_alone_stands_for_what_is_skipped() -> None:
    bias = weigh_skipped(torch.tensor([[0, 1, 9, 10, 11]]), torch.arange(5)[None], torch.float64)[0, 0]
    assert bias[-1].tolist() == pytest.approx([np.log(9 / 2)] * 2 + [0] * 3)


def test_what_a_later_piece_says_again_keeps_the_weight_of_one_key() -> None:
    """A span of five tokens that is said again after the jump does not multiply, one of four does; nor does a span keep
    the weight 1 for being said twice in its own piece."""
    said, short = [50, 51, 52, 53, 54], [60, 61, 62, 63]
    first = [0, 1, 2, 3, *said, 4, *short, 5, 5, 5, 5, 5, 5]
    ids = torch.tensor([[*first, *said, 6, *short, 7]])
    positions = torch.arange(ids.shape[1])[None].clone()
    positions[:, len(first) :] += 100
    bias = weigh_skipped(positions, ids, torch.float64)[0, 0, -1, : len(first)]
    once = [*range(4), *range(4, 9)]
    others = [i for i in range(len(first)) if i not in once]
    assert bias[once].tolist() == [0] * len(once)
    stands = np.log((len(first) + 100 - len(once)) / len(others))
    assert bias[others].tolist() == pytest.approx([stands] * len(others))


def test_packed_windows_hold_whole_documents_side_by_side_and_predict_no_first_token() -> None:
    texts = corpus(20, 30, 25, 200)
    for sample in Windows(texts, 90, 90, 0, 0, 50, pack=True):
        ids, positions, labels = (sample[k].numpy() for k in ("input_ids", "position_ids", "labels"))
        assert len(ids) == len(positions) == len(labels) == 90 and "attention_mask" not in sample
        starts = np.flatnonzero(positions == 0)
        assert starts[0] == 0 and (labels[starts] == -100).all()
        for begin, end in zip(starts, [*starts[1:], 90], strict=True):
            assert (np.diff(ids[begin:end]) == 1).all() and (positions[begin:end] == np.arange(end - begin)).all()
            assert (labels[begin + 1 : end] == ids[begin + 1 : end]).all()
            document = ids[begin] // 1000
            whole = end - begin == [20, 30, 25, 200][document] and ids[begin] % 1000 == 0
            assert whole or end == 90  # only the last is cut


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.no_grad()
def test_packed_documents_do_not_see_each_other(tiny_llama: Callable, attention: str) -> None:
    """RX-10: every document gives what it gives alone, its scale included."""
    model = tiny_llama(attn_implementation=attention)
    attach(model, make_spec("adarope", rope_of_model(model), target=512, init="yarn"))
    for rotary in rotaries(model):
        rotary.gamma.fill_(1.5)
    tokens = np.random.default_rng(0).integers(0, 257, 400).astype(np.uint32)
    ends = np.array([90, 100, 180, 400])
    texts = Corpus(tokens, np.append(0, ends[:-1]), ends, 0, 220, "")
    batch = [Windows(texts, 256, 512, 3, 0, 2, pack=True)[i] for i in range(2)]
    rows = {k: torch.stack([w[k] for w in batch]) for k in batch[0]}
    together = model.get_decoder()(
        input_ids=rows["input_ids"], position_ids=rows["position_ids"], use_cache=False
    ).last_hidden_state
    total, labels = 0.0, 0
    for row in range(2):
        starts = np.flatnonzero(rows["position_ids"][row].numpy() == 0)
        assert len(starts) > 1
        for begin, end in zip(starts, [*starts[1:], 256], strict=True):
            ids = rows["input_ids"][row : row + 1, begin:end]
            alone = model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state
            torch.testing.assert_close(together[row, begin:end], alone[0], rtol=1e-4, atol=1e-4)
            logits = model(ids, use_cache=False).logits
            total += F.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="sum").item() if end - begin > 1 else 0.0
            labels += int(end - begin) - 1
    assert batch_loss(model, rows, labels).item() == pytest.approx(total / labels, rel=1e-5)
