import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import in_two
from transformers import LlamaForCausalLM

from ropex.errors import OptionError
from ropex.eval import grid, pieces
from ropex.eval.grid import STYLES, evaluate_needle, found, make_sample
from ropex.eval.models import load_tokenizer
from ropex.eval.nll import evaluate_nll
from ropex.eval.plot import plot_needle
from ropex.eval.recall import evaluate_recall
from ropex.eval.ruler import evaluate_ruler
from ropex.haystack import encode_lines

TEXT = "".join(f"Line {i} says something of no importance at all.\n" for i in range(60))


@given(
    length=st.integers(120, 900),
    depth=st.sampled_from([0.0, 0.3, 1.0]),
    index=st.integers(0, 50),
    style=st.sampled_from(list(STYLES)),
)
@settings(max_examples=40, deadline=None)
def test_a_sample_fills_its_length_and_holds_its_key_where_it_should(
    length: int, depth: float, index: int, style: str
) -> None:
    tokenizer = load_tokenizer("nano")
    haystack = encode_lines(tokenizer, TEXT)
    prompt, answer = make_sample(tokenizer, haystack, length, depth, index, 0, STYLES[style])
    assert len(prompt) + len(answer) == length
    assert (prompt, answer) == make_sample(tokenizer, haystack, length, depth, index, 0, STYLES[style])
    value = tokenizer.decode(answer).strip()
    text = tokenizer.decode(prompt)
    assert len(value) == STYLES[style].digits and value.isdigit()
    assert text.count(value) == STYLES[style].needle.count("{value}")
    body = len(text) - len(STYLES[style].intro) - len(STYLES[style].question)
    assert abs((text.index(value) - len(STYLES[style].intro)) / body - depth) < 0.25 + 100 / body


def test_depth_moves_the_needle_and_index_changes_the_key() -> None:
    tokenizer = load_tokenizer("nano")
    haystack = encode_lines(tokenizer, TEXT)
    texts = [tokenizer.decode(make_sample(tokenizer, haystack, 600, d, 0)[0]) for d in (0.0, 0.25, 0.5, 0.75, 1.0)]
    places = [text.index("The pass key is") for text in texts]
    assert places == sorted(places) and len(set(places)) == 5
    answers = {tuple(make_sample(tokenizer, haystack, 600, 0.5, i)[1]) for i in range(20)}
    assert len(answers) == 20


def test_depth_is_true_where_the_text_has_no_line_ends() -> None:
    tokenizer = load_tokenizer("nano")
    haystack = encode_lines(tokenizer, " ".join(f"word{i}" for i in range(900)))
    for depth in (0.25, 0.5, 0.75):
        text = tokenizer.decode(make_sample(tokenizer, haystack, 1500, depth, 0)[0])
        assert abs(text.index("The pass key is") / len(text) - depth) < 0.1


def test_no_room_names_the_length_that_has_some() -> None:
    tokenizer = load_tokenizer("nano")
    haystack = encode_lines(tokenizer, TEXT)
    with pytest.raises(OptionError, match=r"give (\d+) or more") as caught:
        make_sample(tokenizer, haystack, 20, 0.5, 0)
    least = int(str(caught.value).split("give ")[1].split()[0])
    make_sample(tokenizer, haystack, least + 20, 0.5, 0)


@torch.no_grad()
def test_found_is_what_greedy_decoding_says(model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = torch.randint(5, 1400, (1, 90), generator=torch.Generator().manual_seed(3))
    said = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False)
    right = said[0, 90:].tolist()
    for whole in (16_384, 32):  # at once, and in pieces that cut through the answer
        monkeypatch.setattr(pieces, "WHOLE", whole)
        monkeypatch.setattr(pieces, "PIECE", 31)
        assert found(model, prompt[0].tolist(), right)
        for place in range(6):
            wrong = list(right)
            wrong[place] = (wrong[place] + 1) % 1400
            assert not found(model, prompt[0].tolist(), wrong)


def test_nano_finds_needles_inside_its_window_and_loses_them_far_beyond(tmp_path: Path) -> None:
    """And a run that was stopped goes on to the same report."""
    ask = dict(depths=3, samples=4, style="lines")
    whole = evaluate_needle(["nano", "nano@yarn:4"], [1024, 192], **ask, out=tmp_path / "a")  # type: ignore[arg-type]
    base, yarn = whole["results"]
    assert base["lengths"] == [192, 1024] and base["depths"] == [0, 0.5, 1]
    inside, beyond = (sum(line) / 3 for line in base["accuracy"])
    assert inside == 1 and beyond < 0.75 < sum(yarn["accuracy"][1]) / 3
    lines = (tmp_path / "a" / "needle.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 12
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "needle.jsonl").write_text("".join(lines[:7]) + lines[7][:20])
    asked: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid, "found", lambda *sample: asked.append(1) or found(*sample))
        again = evaluate_needle(["nano", "nano@yarn:4"], [1024, 192], **ask, out=tmp_path / "b")  # type: ignore[arg-type]
    assert again == whole == json.loads((tmp_path / "b" / "report.json").read_text())
    assert len(asked) == 5 * 4
    plot_needle(whole, tmp_path / "n.png")
    assert (tmp_path / "n.png").stat().st_size > 5000


BOTH = """
import json, sys
from pathlib import Path
from accelerate import PartialState
from ropex.eval.grid import evaluate_needle
from ropex.eval.nll import evaluate_nll
from ropex.eval.recall import evaluate_recall
from ropex.eval.ruler import evaluate_ruler
src, out, words = json.loads(sys.argv[1])
report = [
    evaluate_nll(["nano", "nano@yarn:4"], [words["text"]], [300], windows=5, out=Path(out) / "nll"),
    evaluate_needle(["nano"], [192, 400], depths=2, samples=3, style="lines", out=Path(out) / "needle"),
    evaluate_ruler(["nano"], ["niah_single_1", "fwe"], [512], 5, batch_size=2, out=Path(out) / "ruler"),
    evaluate_recall(["nano", "nano@yarn:4"], [192, 400], formats=["lines"], windows=3, out=Path(out) / "recall"),
]
json.dump(report, open(f"{out}-{PartialState().process_index}.json", "w"))
PartialState().destroy_process_group()
"""


def test_two_processes_share_windows_needles_facts_and_prompts_and_say_the_same(tmp_path: Path) -> None:
    pytest.importorskip("lm_eval")
    text = Path(__file__).parents[2] / "demo" / "text" / "dev.txt"
    nll = evaluate_nll(["nano", "nano@yarn:4"], [text], [300], windows=5)
    needle = evaluate_needle(["nano"], [192, 400], depths=2, samples=3, style="lines")
    ruler = evaluate_ruler(["nano"], ["niah_single_1", "fwe"], [512], 5, batch_size=2)
    recall = evaluate_recall(["nano", "nano@yarn:4"], [192, 400], formats=["lines"], windows=3)
    for _ in range(2):  # the second takes it all from the folders
        in_two(Path("nano"), tmp_path / "two", {"text": str(text)}, BOTH)
        first, second = (json.loads((tmp_path / f"two-{i}.json").read_text()) for i in range(2))
        assert first == second
        assert first[0] == json.loads((tmp_path / "two" / "nll" / "report.json").read_text())
        assert first[1] == needle and first[2]["results"] == ruler["results"] and first[3] == recall
        for mine, theirs in zip(nll["results"], first[0]["results"], strict=True):
            assert theirs["mean"] == pytest.approx(mine["mean"], rel=1e-9)
            assert [d["tokens"] for d in theirs["documents"]] == [d["tokens"] for d in mine["documents"]]
            assert [b["nll"] for b in theirs["buckets"]] == pytest.approx([b["nll"] for b in mine["buckets"]], rel=1e-9)
    assert len((tmp_path / "two" / "nll" / "nll.jsonl").read_text().splitlines()) == 2
    assert len((tmp_path / "two" / "recall" / "recall.jsonl").read_text().splitlines()) == 2 * 2 * 3


@pytest.mark.parametrize("wrong", [{"depths": 0}, {"samples": 0}, {"style": "hay"}])
def test_options_that_make_no_sense_are_refused(checkpoint: str, wrong: dict) -> None:
    with pytest.raises(OptionError):
        evaluate_needle([checkpoint], [256], **wrong)


def test_the_text_can_be_given(save_checkpoint: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text(TEXT)
    path = save_checkpoint(tmp_path / "ckpt", bos=True)
    (row,) = evaluate_needle([path], [300], depths=1, samples=2, data=[tmp_path / "t.txt"])["results"]
    assert row["accuracy"] == [[0.0]]  # of random weights
