import copy
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from families import tiny
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaForCausalLM

from ropex import attach
from ropex.errors import DataError, OptionError, RopexError, UnsupportedError
from ropex.eval import nll, pieces
from ropex.eval.models import encode, load_model, load_tokenizer, weights_fingerprint
from ropex.eval.nll import bucket_edges, cut_windows, evaluate_nll, summarise, token_nll, token_scores
from ropex.eval.plot import plot_nll
from ropex.seam import rope_of_model, rotaries
from ropex.spec import make_spec


def full_logit_nll(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
    with torch.no_grad():
        logits = model(ids).logits[:, :-1].float()
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")


def random_ids(*shape: int) -> Tensor:
    return torch.randint(0, 1500, shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("chunk", [2**26, 1500 * 7])
def test_token_nll_is_the_loss_of_the_full_logits(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(nll, "_CHUNK_VALUES", chunk)
    ids = random_ids(3, 101)
    mine = token_nll(model, ids)
    assert mine.dtype == torch.float32
    assert mine.shape == (3, 100)
    torch.testing.assert_close(mine, full_logit_nll(model, ids), atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("chunk", [2**26, 1500 * 7])
def test_token_scores_tell_the_most_likely_tokens(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(nll, "_CHUNK_VALUES", chunk)
    start = random_ids(2, 30)
    ids = model.generate(start, attention_mask=torch.ones_like(start), max_new_tokens=10, min_new_tokens=10)
    ids = torch.cat([ids, random_ids(2, 20)], 1)
    losses, likely = token_scores(model, ids)
    assert torch.equal(losses, token_nll(model, ids))
    assert torch.equal(likely, model(ids).logits[:, :-1].argmax(-1) == ids[:, 1:])
    assert likely[:, 29:39].all() and not likely.all()


def test_one_token_has_no_loss(model: LlamaForCausalLM) -> None:
    assert [scores.shape for scores in token_scores(model, random_ids(2, 1))] == [(2, 0)] * 2


def test_logits_exist_for_a_chunk_only(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nll, "_CHUNK_VALUES", 1500 * 10)
    widest = 0

    def watched(logits: Tensor, *args: object, **kwargs: object) -> Tensor:
        nonlocal widest
        widest = max(widest, logits.shape[0])
        return cross_entropy(logits, *args, **kwargs)

    cross_entropy = F.cross_entropy
    monkeypatch.setattr(nll.F, "cross_entropy", watched)
    token_nll(model, random_ids(1, 64))
    assert widest == 10


def test_a_family_that_changes_its_logits_unknown_to_us_is_refused(model: LlamaForCausalLM) -> None:
    odd = copy.deepcopy(model)
    odd.lm_head.register_forward_hook(lambda module, args, output: output * 0.5)
    with pytest.raises(UnsupportedError, match="does not know"):
        nll.check_head(odd, "odd", random_ids(1, 16))
    nll.check_head(model, "even", random_ids(1, 16))


@given(
    sizes=st.lists(st.integers(0, 40), max_size=6),
    length=st.integers(3, 12),
    bos=st.sampled_from([[], [99]]),
    limit=st.none() | st.integers(1, 3),
)
def test_windows_hold_each_token_once_and_never_two_documents(
    sizes: list[int], length: int, bos: list[int], limit: int | None
) -> None:
    documents = [[100 * (d + 1) + i for i in range(size)] for d, size in enumerate(sizes)]
    windows = cut_windows(documents, length, bos, limit)
    width = length - len(bos)
    expected = []
    for ids in documents:
        count = len(ids) // width if limit is None else min(limit, len(ids) // width)
        expected += ids[: count * width]
    assert sum([w.ids[len(bos) :] for w in windows], []) == expected
    for window in windows:
        assert len(window.ids) == length and window.ids[: len(bos)] == bos and window.first == 1
        assert {token // 100 for token in window.ids[len(bos) :]} == {window.document + 1}


@given(
    sizes=st.lists(st.integers(0, 60), max_size=5),
    length=st.integers(3, 12),
    stride=st.integers(1, 12),
    bos=st.sampled_from([[], [99]]),
)
def test_a_sliding_window_scores_every_token_but_the_first_once(
    sizes: list[int], length: int, stride: int, bos: list[int]
) -> None:
    """RX-44: also where a document is shorter than the window, and where the stride is the window."""
    stride = min(stride, length)
    documents = [[1000 * (d + 1) + i for i in range(size)] for d, size in enumerate(sizes)]
    scored: list[int] = []
    for window in cut_windows(documents, length, bos, None, stride):
        ids = window.ids
        assert 1 <= window.first < len(ids) <= length and ids[: len(bos)] == bos
        assert {token // 1000 for token in ids[len(bos) :]} == {window.document + 1}
        scored += ids[window.first :]
        begins = documents[window.document][0] == ids[len(bos)]
        assert begins or window.first >= min(length - stride, length - 1)  # the context that was promised
    assert scored == sum([ids if bos else ids[1:] for ids in documents], [])


@pytest.mark.parametrize("stride", [64, 256])
def test_sliding_totals_are_those_of_each_token_with_its_own_window(
    checkpoint: str, tmp_path: Path, stride: int
) -> None:
    """RX-44's thousand tokens."""
    (tmp_path / "a.txt").write_text(" ".join(f"word{i * 7 % 101}" for i in range(400)))
    (tmp_path / "b.txt").write_text("far shorter than a window")
    (row,) = evaluate_nll([checkpoint], [tmp_path], [256], stride=stride)["results"]
    model, tokenizer = load_model(checkpoint), load_tokenizer(checkpoint)
    total, count = 0.0, 0
    for name in ("a", "b"):
        ids = encode(tokenizer, (tmp_path / f"{name}.txt").read_text())
        for window in cut_windows([ids], 256, (), None, stride):
            losses = full_logit_nll(model, torch.tensor([window.ids]))[0, window.first - 1 :].double()
            total, count = total + float(losses.sum()), count + len(losses)
        assert count >= 1
    assert row["tokens"] == count and row["documents_left_out"] == 0
    assert row["mean"] == pytest.approx(total / count, abs=1e-6)
    assert row["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-6)
    assert sum(d["tokens"] for d in row["documents"]) == count == sum(b["tokens"] for b in row["buckets"])


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3_next"])
@torch.no_grad()
def test_a_window_read_in_pieces_has_the_losses_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Full attention, sliding windows beside it, and a recurrence; converted, with a scale that grows."""
    model = tiny(name)
    attach(model, make_spec("adarope", rope_of_model(model), init="yarn", factor=4.0))
    for rotary in rotaries(model):
        rotary.gamma.normal_()
        rotary.delta.normal_(std=0.1)
    ids = torch.randint(3, 90, (1, 300), generator=torch.Generator().manual_seed(0))
    whole = token_nll(model, ids)
    monkeypatch.setattr(pieces, "WHOLE", 64)
    for piece in (300, 77, 256):
        monkeypatch.setattr(pieces, "PIECE", piece)
        torch.testing.assert_close(token_nll(model, ids), whole, atol=1e-5, rtol=1e-5)  # a recurrence adds up otherwise


def test_a_piece_that_does_not_fit_is_halved(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def crowded(model: LlamaForCausalLM, ids: Tensor, piece: int) -> Any:
        asked.append(piece)
        if piece > 1000:
            raise torch.OutOfMemoryError("no room")
        return states(model, ids, piece)

    states = nll.hidden_states
    ids = random_ids(1, 120)
    whole = token_nll(model, ids)
    monkeypatch.setattr(pieces, "WHOLE", 64)
    monkeypatch.setattr(nll, "hidden_states", crowded)
    torch.testing.assert_close(token_nll(model, ids), whole, atol=1e-5, rtol=0)
    assert asked == [4096, 2048, 1024, 512]


@given(length=st.integers(2, 200), buckets=st.integers(1, 250), width=st.none() | st.integers(1, 250))
def test_buckets_cover_every_position_once(length: int, buckets: int, width: int | None) -> None:
    edges = bucket_edges(length, buckets, width)
    assert edges[0] == 0
    assert edges[-1] == length
    assert all(a < b for a, b in zip(edges, edges[1:], strict=False))
    if width is not None:
        assert all(b - a == width for a, b in zip(edges[:-2], edges[1:-1], strict=True))


def test_a_bucket_without_tokens_has_no_value() -> None:
    got = summarise(torch.tensor([0.0, 6.0, 2.0]).double(), torch.tensor([0, 2, 1]), [0, 1, 2, 3])
    assert [(b["nll"], b["tokens"]) for b in got["buckets"]] == [(None, 0), (3.0, 2), (2.0, 1)]
    assert got["mean"] == 8 / 3  # by tokens; the mean of the buckets would be 2.5
    assert got["perplexity"] == math.exp(8 / 3)


@pytest.fixture()
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name, words in {"long": 300, "middle": 120, "short": 4}.items():
        (folder / f"{name}.txt").write_text(" ".join(f"{name}{i * 7 % 101}" for i in range(words)))
    return folder


def test_losses_that_depend_on_position_end_in_their_bucket(
    checkpoint: str, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With loss = position, every bucket mean and the overall mean are known."""
    monkeypatch.setattr(nll, "token_nll", lambda model, ids: torch.arange(1.0, ids.shape[1]).expand(ids.shape[0], -1))
    monkeypatch.setattr(nll, "check_head", lambda *args: None)
    (row,) = evaluate_nll([checkpoint], [texts], [64], bucket_width=16)["results"]
    assert [(b["start"], b["end"]) for b in row["buckets"]] == [(0, 16), (16, 32), (32, 48), (48, 64)]
    assert [b["nll"] for b in row["buckets"]] == [8.0, 23.5, 39.5, 55.5]
    assert [b["tokens"] for b in row["buckets"]] == [n * row["windows"] for n in (15, 16, 16, 16)]
    assert row["tokens"] == 63 * row["windows"]
    assert row["mean"] == 32.0


@pytest.mark.parametrize("bos", [False, True])
def test_the_totals_are_those_of_window_by_window_losses(
    tmp_path: Path, texts: Path, bos: bool, save_checkpoint: Callable[..., str]
) -> None:
    path = save_checkpoint(tmp_path / "ckpt", bos=bos)
    result = evaluate_nll([path], [texts], [64, 200], windows=2)["results"]
    model, tokenizer = load_model(path), load_tokenizer(path)
    for row, length in zip(result, (64, 200), strict=True):
        losses, used, width = [], 0, length - bos
        for name in ("long", "middle", "short"):
            ids = encode(tokenizer, (texts / f"{name}.txt").read_text())
            count = min(2, len(ids) // width)
            used += count > 0
            for i in range(count):
                window = [0] * bos + ids[i * width : (i + 1) * width]
                losses.append(full_logit_nll(model, torch.tensor([window]))[0].double())
        assert row["tokens"] == sum(len(loss) for loss in losses)
        assert row["mean"] == pytest.approx(torch.cat(losses).mean().item(), abs=1e-6)
        assert len(row["documents"]) == used
        assert used + row["documents_left_out"] == 3
        total = sum(b["nll"] * b["tokens"] for b in row["buckets"] if b["tokens"])
        assert total == pytest.approx(row["mean"] * row["tokens"], rel=1e-12)


def test_every_checkpoint_is_scored_on_the_same_tokens(
    checkpoint: str, other: str, texts: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []
    plain = token_nll
    monkeypatch.setattr(nll, "token_nll", lambda m, ids: seen.append(ids[0].tolist()) or plain(m, ids))
    monkeypatch.setattr(nll, "check_head", lambda *args: None)
    one, two, again = evaluate_nll([checkpoint, other, checkpoint], [texts], [64])["results"]
    half = len(seen) // 2  # what was asked twice is measured once
    assert seen[:half] == seen[half:] and len(seen) == one["windows"] + two["windows"]
    assert again["difference"] == {"to": checkpoint, "mean": 0.0, "interval": [0.0, 0.0]}
    assert one | {"difference": None} == again | {"difference": None}
    assert one["mean"] != two["mean"]
    assert two["difference"]["mean"] == two["mean"] - one["mean"]
    assert {"checkpoint", "method", "length", "mean", "tokens", "buckets"} <= set(one)
    assert one["method"] == "rope"
    assert one["native_window"] == 512


def test_tokenizers_that_differ_are_refused(
    tmp_path: Path, checkpoint: str, texts: Path, save_checkpoint: Callable[..., str]
) -> None:
    with_bos = save_checkpoint(tmp_path / "ckpt", bos=True)
    with pytest.raises(OptionError, match="differently"):
        evaluate_nll([checkpoint, with_bos], [texts], [64])


def test_texts_that_are_all_too_short_name_the_longest(checkpoint: str, texts: Path) -> None:
    with pytest.raises(DataError, match=r"5000 tokens; the longest, .*long\.txt, has \d+"):
        evaluate_nll([checkpoint], [texts], [64, 5000])


@pytest.mark.parametrize(
    "wrong", [{"buckets": 0}, {"windows": 0}, {"bucket_width": -1}, {"stride": 0}, {"documents": 0}]
)
def test_options_below_one_are_refused(checkpoint: str, texts: Path, wrong: dict[str, int]) -> None:
    with pytest.raises(OptionError, match="1 or more"):
        evaluate_nll([checkpoint], [texts], [64], **wrong)  # type: ignore[arg-type]


def results() -> dict[str, Any]:
    buckets = [
        {"start": 0, "end": 1, "nll": None, "tokens": 0},
        {"start": 1, "end": 600, "nll": 2.0, "tokens": 9},
        {"start": 600, "end": 1024, "nll": 3.0, "tokens": 9},
    ]
    row = {"method": "rope", "length": 1024, "mean": 2.5, "buckets": buckets, "native_window": 512}
    return {"results": [row | {"checkpoint": name} for name in ("a", "b")]}


@pytest.mark.parametrize("suffix", ["png", "svg", "pdf"])
def test_a_figure_is_written_and_nothing_beside_it(tmp_path: Path, suffix: str) -> None:
    plot_nll(results(), tmp_path / f"loss.{suffix}")
    assert [p.name for p in tmp_path.iterdir()] == [f"loss.{suffix}"]


def test_a_figure_shows_each_checkpoint_and_the_native_window(tmp_path: Path) -> None:
    import matplotlib

    with matplotlib.rc_context({"svg.fonttype": "none"}):
        plot_nll(results(), tmp_path / "loss.svg")
    drawn = (tmp_path / "loss.svg").read_text()
    for text in ("a (rope), mean 2.500", "b (rope), mean 2.500", "native window 512", "NLL (nats per token"):
        assert text in drawn


def test_a_figure_that_fails_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    from ropex.errors import OutputError

    path = tmp_path / "loss.png"
    path.write_bytes(b"old")

    def fail(self: Figure, target: Path, **kwargs: object) -> None:
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Figure, "savefig", fail)
    with pytest.raises(OutputError, match="No space left"):
        plot_nll(results(), path)
    assert path.read_bytes() == b"old"
    assert [p.name for p in tmp_path.iterdir()] == ["loss.png"]
    with pytest.raises(OptionError, match=".png, .svg or .pdf"):
        plot_nll(results(), tmp_path / "loss.docx")


def test_a_method_applied_on_the_fly_is_measured_beside_its_parent(checkpoint: str, texts: Path) -> None:
    base, yarn = evaluate_nll([checkpoint, f"{checkpoint}@yarn:2"], [texts], [128])["results"]
    assert (base["method"], yarn["method"]) == ("rope", "yarn")
    assert base["tokens"] == yarn["tokens"]
    assert base["mean"] != yarn["mean"]
    assert base["native_window"] == yarn["native_window"] == 512


def test_intervals_are_over_documents_and_differences_are_paired(
    checkpoint: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Documents differ by far more than checkpoints: only a paired interval sees that one is better in every one."""
    for i, words in enumerate((70, 90, 110, 130, 150, 170)):
        (tmp_path / f"{i}.txt").write_text(" ".join(f"w{i}{j}" for j in range(words)))
    first: list[int] = []

    def losses(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
        first.append(ids.shape[1])
        better = 0.1 if len(first) > 6 else 0.0
        return torch.full((1, ids.shape[1] - 1), ids.shape[1] / 100 - better)

    monkeypatch.setattr(nll, "token_nll", losses)
    monkeypatch.setattr(nll, "check_head", lambda *args: None)
    one, two = evaluate_nll([checkpoint, other], [tmp_path], [2000], stride=100)["results"]
    assert one["interval"][0] < one["mean"] < one["interval"][1]
    assert one["interval"][1] - one["interval"][0] > 0.5
    assert two["difference"]["interval"] == pytest.approx([-0.1, -0.1], abs=1e-6)


def test_a_single_document_has_no_interval(checkpoint: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("word " * 80)
    (row,) = evaluate_nll([checkpoint], [tmp_path / "a.txt"], [64])["results"]
    assert row["interval"] is None


def test_a_killed_evaluation_goes_on_where_it_was(
    checkpoint: str, other: str, texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RX-45: what is done is on disk, the report is that of an undisturbed run, and nothing stale is taken."""
    ask = [checkpoint, other], [texts], [64, 100]
    whole = evaluate_nll(*ask, out=tmp_path / "whole")
    plain, calls = token_nll, []

    def killed(model: LlamaForCausalLM, ids: Tensor) -> Tensor:
        calls.append(ids.shape[1])
        if ids.shape[1] == 100:
            raise KeyboardInterrupt
        return plain(model, ids)

    monkeypatch.setattr(nll, "token_nll", killed)
    with pytest.raises(KeyboardInterrupt):
        evaluate_nll(*ask, out=tmp_path / "cut")
    assert not (tmp_path / "cut" / "report.json").exists()
    with (tmp_path / "cut" / "nll.jsonl").open("a") as file:
        file.write('{"checkpoint": "half a li')
    calls.clear()
    monkeypatch.setattr(nll, "token_nll", lambda model, ids: calls.append(ids.shape[1]) or plain(model, ids))
    assert evaluate_nll(*ask, out=tmp_path / "cut") == whole
    assert json.loads((tmp_path / "cut" / "report.json").read_text()) == whole
    again = len(calls)
    evaluate_nll(*ask, out=tmp_path / "cut")
    assert len(calls) == again and again > 0
    (texts / "long.txt").write_text("another " * 300)
    evaluate_nll(*ask, out=tmp_path / "cut")
    assert len(calls) > again


def test_nothing_stale_is_taken(checkpoint: str, tmp_path: Path) -> None:
    """Another text of the same windows, and a single weight that changed."""
    text = " ".join(f"w{i}" for i in range(200))
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(text)
    (tmp_path / "tiny.txt").write_text("tiny")
    ask = {"windows": 1, "out": tmp_path / "out"}
    (first,) = evaluate_nll([checkpoint], [tmp_path / "a.txt"], [100], **ask)["results"]  # type: ignore[arg-type]
    (row,) = evaluate_nll([checkpoint], [tmp_path / "b.txt", tmp_path / "tiny.txt"], [100], **ask)["results"]  # type: ignore[arg-type]
    assert row["documents"][0]["name"].endswith("b.txt") and row["documents_left_out"] == 1
    assert row["mean"] == first["mean"]


@torch.no_grad()
def test_a_fingerprint_changes_with_any_one_value(model: LlamaForCausalLM) -> None:
    changed = copy.deepcopy(model)
    before = weights_fingerprint(changed)
    assert before == weights_fingerprint(model)
    for weight in (changed.model.layers[1].self_attn.o_proj.weight, changed.model.embed_tokens.weight):
        for place in ((0, 0), (3, 5), (-1, -1)):
            was = weight[place].clone()
            weight[place] += 1e-3
            assert weights_fingerprint(changed) != before
            weight[place] = was
        weight[[2, 3]] = weight[[3, 2]]
        assert weights_fingerprint(changed) != before
        weight[[2, 3]] = weight[[3, 2]]
    assert weights_fingerprint(changed) == before


def test_a_window_that_never_fits_is_one_line(checkpoint: str, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crowded(*args: object) -> None:
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate much")

    monkeypatch.setattr(nll, "check_head", lambda *args: None)
    monkeypatch.setattr(nll, "hidden_states", crowded)
    with pytest.raises(RopexError, match="memory ran out at 64 tokens"):
        evaluate_nll([checkpoint], [texts], [64])


def test_names_are_no_formulas(tmp_path: Path) -> None:
    row = results()
    row["results"][0]["checkpoint"] = "na$x^{$no"
    plot_nll(row, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size > 5000


def test_only_so_many_documents_are_read(checkpoint: str, tmp_path: Path) -> None:
    for name, words in {"a": 20, "b": 200, "c": 30, "d": 250}.items():
        (tmp_path / f"{name}.txt").write_text(" ".join(f"{name}{i}" for i in range(words)))
    (tmp_path / "e.txt").write_bytes(b"\xff")  # would be an error, if it were read
    (row,) = evaluate_nll([checkpoint], [tmp_path], [100], documents=2, windows=1)["results"]
    assert [Path(d["name"]).stem for d in row["documents"]] == ["b", "d"] and row["windows"] == 2
    (tmp_path / "e.txt").unlink()
    with pytest.raises(DataError, match=r"d\.txt, has"):
        evaluate_nll([checkpoint], [tmp_path], [5000], documents=2)
