"""Recall: the windows with facts, what is read off one pass over them, and how checkpoints are compared."""

import copy
import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from ropex.cli import app
from ropex.errors import DataError, OptionError, UnsupportedError
from ropex.eval import pieces, recall
from ropex.eval.models import default_bos, load_model, load_tokenizer
from ropex.eval.plot import plot_recall
from ropex.eval.recall import evaluate_recall, window_of
from ropex.facts import ASKS, MEASURED, Quiz, facts_in
from ropex.haystack import Haystack, encode_lines, shipped_text

TOKENIZER = load_tokenizer("nano")
BOS = default_bos(TOKENIZER)
PLAY = encode_lines(TOKENIZER, shipped_text())
ALL = tuple(MEASURED)
LINES = ["lines"]


def quiz_of(length: int, formats: tuple[str, ...] = ALL, seed: int = 0, text: Haystack = PLAY) -> Quiz:
    return window_of(TOKENIZER, text, length, formats, BOS, str(seed))


def facts_of(length: int, formats: Sequence[str]) -> int:
    return facts_in(length, {name: MEASURED[name] for name in formats})


def find(ids: list[int], part: list[int]) -> list[int]:
    return [i for i in range(len(ids) - len(part) + 1) if ids[i : i + len(part)] == part]


@given(
    length=st.integers(420, 1024),
    formats=st.lists(st.sampled_from(ALL), min_size=1, max_size=len(ALL), unique=True).map(tuple),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=60, deadline=None)
def test_a_window_is_full_and_every_answer_was_said_where_it_should_be(
    length: int, formats: tuple[str, ...], seed: int
) -> None:
    quiz = quiz_of(length, formats, seed)
    assert len(quiz.ids) == length and quiz.ids[: len(BOS)] == BOS
    assert quiz == quiz_of(length, formats, seed)
    asked = [question.format for question in quiz.questions]
    assert {name: asked.count(name) for name in formats} == dict.fromkeys(formats, ASKS * facts_of(length, formats))
    places = set(quiz.text)
    inserted = [at for at in range(len(BOS), length) if at not in places]
    assert quiz.text == sorted(places) and len(inserted) + len(places) + len(BOS) == length
    keyed = [question for question in quiz.questions if question.format != "quote"]
    first = {tuple(quiz.ids[q.start : q.end]): q.start - q.distance for q in reversed(keyed)}  # where it is stated
    assert quiz.stated == sorted(at for value, start in first.items() for at in range(start, start + len(value)))
    for question in quiz.questions:
        answer = quiz.ids[question.start : question.end]
        assert len(answer) > 1 and places.isdisjoint(range(question.start, question.end))
        said = question.start - question.distance
        assert quiz.ids[said : said + len(answer)] == answer
        nearer = [at for at in find(quiz.ids, answer) if said < at < question.start]
        assert not set(nearer) & set(inserted)  # not in the question's own words either, nor in another fact's
        assert not nearer or question.format != "quote"  # what is quoted, the text has once
        assert said in set(inserted) or question.format == "quote"


@given(length=st.integers(420, 1024), seed=st.integers(0, 10**6))
@settings(max_examples=40, deadline=None)
def test_the_text_is_a_stretch_of_the_haystack_and_what_is_quoted_is_in_it(length: int, seed: int) -> None:
    quiz = quiz_of(length, ALL, seed)
    text = [quiz.ids[at] for at in quiz.text]
    begins = find(PLAY.ids, text)
    assert begins and any(begin + len(text) in PLAY.ends for begin in begins)
    for question in quiz.questions:
        if question.format == "quote":
            words = quiz.ids[question.start - 6 : question.end]  # the cue and the answer
            (place,) = find(text, words)
            assert question.start - quiz.text[place + 6] >= question.distance
            assert begins[0] + place in PLAY.ends  # it begins a line


@pytest.mark.parametrize("kind", [{"bos": True}, {"metaspace": True, "size": 300}, {"llama3": True}])
def test_answers_are_said_before_in_the_tokens_of_other_tokenizers(
    tokenizers: Callable[..., Any], kind: dict[str, Any]
) -> None:
    other = tokenizers(**kind)
    quiz = window_of(other, encode_lines(other, shipped_text()), 2048, ALL, default_bos(other), "0")
    assert len(quiz.ids) == 2048 and {q.format for q in quiz.questions} == set(ALL)
    assert {q.end - q.start for q in quiz.questions if q.format == "quote"} == {6}  # a line end may be two tokens
    for question in quiz.questions:
        answer = quiz.ids[question.start : question.end]
        assert quiz.ids[question.start - question.distance :][: len(answer)] == answer
        said = other.decode(answer).strip()
        assert re.fullmatch(r"\w{6}" if question.format == "code" else r"\d{4}", said) or question.format == "quote"


def test_facts_read_as_documented_and_no_two_share_a_key_or_a_value() -> None:
    drawn = []
    for seed in range(2):
        text, facts = TOKENIZER.decode(quiz_of(8192, ALL, seed).ids[len(BOS) :]), facts_of(8192, ALL)
        stated: list[tuple[str, str]] = []
        for said, asked in (
            (r"^\[\[(\w+)=(\d{4})\]\]$", r"^\(\((\w+)=(\d{4})\)\)$"),
            (r"^The number of the (\w+) is (\d{4})\.$", r"^Remember that the (\w+) has the number (\d{4})\.$"),
            (r'^access\["(\w+)"\] = "(\w{6})"$', r'^assert access\["(\w+)"\] == "(\w{6})"$'),
        ):
            pairs = re.findall(said, text, re.MULTILINE)
            assert sorted(re.findall(asked, text, re.MULTILINE)) == sorted(pairs * ASKS) and len(pairs) == facts == 16
            stated += pairs
        assert len({key for key, _ in stated}) == len({value for _, value in stated}) == 3 * facts
        quotes = re.findall(r"^It was said before:\n(.+)$", text, re.MULTILINE)
        assert len(set(quotes)) == facts and len(quotes) == ASKS * facts
        assert all(f"\n{quote}" in text.replace(f"before:\n{quote}", "") for quote in quotes)  # a line of the text
        drawn.append(stated)
    assert not set(drawn[0]) & set(drawn[1])


def test_distances_cover_the_window() -> None:
    found = [q.distance / 1024 for seed in range(60) for q in quiz_of(1024, ("lines",), seed).questions]
    assert min(found) < 0.03 and max(found) > 0.9
    for low in (0.0, 0.25, 0.5):
        assert sum(low <= d < low + 0.25 for d in found) > len(found) / 20


def test_text_that_does_not_do_is_refused() -> None:
    short = encode_lines(TOKENIZER, "A line of some length that could be quoted, if more were here.\n" * 3)
    with pytest.raises(DataError, match="give a longer text"):
        quiz_of(1024, text=short)
    terse = encode_lines(TOKENIZER, "".join(f"So {i}.\n" for i in range(900)))
    with pytest.raises(DataError, match="leave 'quote' out"):
        quiz_of(1024, text=terse)
    same = encode_lines(TOKENIZER, "This very line, which is long enough, comes again and again and again.\n" * 90)
    with pytest.raises(DataError, match="leave 'quote' out"):  # none begins like no other
        quiz_of(1024, text=same)
    begun = encode_lines(
        TOKENIZER, "".join(f"{i:06d} and so it goes on and on for ever and ever.\n" for i in range(90))
    )
    with pytest.raises(DataError, match="leave 'quote' out"):  # nor goes on like no other
        quiz_of(1024, text=begun)
    assert len(quiz_of(1024, ("lines", "code"), text=terse).ids) == 1024
    with pytest.raises(OptionError, match="ask for a greater length"):
        quiz_of(100)


@pytest.mark.parametrize(
    "wrong",
    [{"formats": []}, {"formats": ["lines", "lines"]}, {"formats": ["poem"]}, {"windows": 0}, {"lengths": []}],
)
def test_options_that_make_no_sense_are_refused_before_a_model_is_read(wrong: dict[str, Any]) -> None:
    with pytest.raises(OptionError):
        evaluate_recall(["no such checkpoint"], **{"lengths": [256], **wrong})


@torch.no_grad()
@pytest.mark.parametrize("piece", [None, 61])
def test_one_pass_tells_what_greedy_decoding_says_and_how_likely_it_was(
    monkeypatch: pytest.MonkeyPatch, piece: int | None
) -> None:
    model = load_model("nano@yarn:2", "float32")
    quiz = quiz_of(400, ("lines", "sentence"), 3)
    if piece:  # a window that is read in pieces, which cut through answers
        monkeypatch.setattr(pieces, "WHOLE", 32)
        monkeypatch.setattr(pieces, "PIECE", piece)
    told = recall._answers(model, quiz)
    ids = torch.tensor([quiz.ids])
    likely = model(ids).logits[0].double().log_softmax(-1)
    assert len(told["questions"]) == len(quiz.questions) >= 4
    for (name, distance, logprob, right), question in zip(told["questions"], quiz.questions, strict=True):
        answer = quiz.ids[question.start : question.end]
        said = model.generate(
            ids[:, : question.start], attention_mask=torch.ones(1, question.start), do_sample=False,
            max_new_tokens=len(answer), min_new_tokens=len(answer),
        )[0, question.start :].tolist()  # fmt: skip
        assert (name, distance, right) == (question.format, question.distance, said == answer)
        expected = sum(likely[at - 1, quiz.ids[at]].item() for at in range(question.start, question.end))
        assert logprob == pytest.approx(expected, abs=1e-4)
    assert {right for *_, right in told["questions"]} == {True, False}
    text = -sum(likely[at - 1, quiz.ids[at]].item() for at in quiz.text)
    assert told["text"] == [pytest.approx(text, rel=1e-5), len(quiz.text)]


def rows_of(*windows: list[tuple[str, int, float, bool]], nats: float = 0.0) -> list[dict[str, Any]]:
    """What the log keeps of windows, from their questions; each has ten tokens of text with so many nats each, and
    one more in every further window."""
    return [
        {"text": [10 * (nats + number), 10], "questions": [list(q) for q in window]}
        for number, window in enumerate(windows)
    ]


def entry(rows: list[dict[str, Any]], name: str = "a") -> dict[str, Any]:
    return {"checkpoint": name, "method": "rope", "length": 1024, "rows": rows}


def test_a_difference_is_paired_by_window_and_question() -> None:
    """By hand. The windows are far apart, but every answer is 1 nat more likely in the first, 3 in the second: drawn
    anew together, the mean difference lies between these, whatever the windows are like."""
    base = rows_of([("lines", 10, -1.0, True), ("code", 300, -2.0, False)], [("lines", 20, -9.0, False)], nats=2)
    other = rows_of([("lines", 10, 0.0, True), ("code", 300, -1.0, True)], [("lines", 20, -6.0, True)], nats=2.5)
    first = entry(base)
    found = recall._summary(entry(other, "b"), first, ["lines", "code"], 256)
    assert found["near"]["logprob"] == -3 and found["near"]["questions"] == 2
    assert found["formats"]["code"]["far"]["accuracy"] == 1 and found["formats"]["code"]["near"] is None
    less = found["difference"]
    assert less["to"] == "a" and less["text"] == {"nll": 0.5, "interval": [0.5, 0.5], "tokens": 20}
    assert less["near"]["logprob"] == 2 and less["near"]["logprob_interval"] == [1, 3]
    assert less["near"]["accuracy"] == 0.5 and less["near"]["accuracy_interval"] == [0, 1]
    assert less["far"]["logprob"] == 1 and less["far"]["logprob_interval"] is None  # one window alone has any
    assert recall._summary(first, first, ["lines", "code"], 256)["difference"] is None


def test_an_interval_is_the_bootstrap_over_windows_weighted_by_their_questions() -> None:
    sums, counts = np.array([-4.0, -3.0, -30.0, -1.0]), np.array([4.0, 1.0, 5.0, 2.0])
    rng = np.random.default_rng(0)
    means = []
    for _ in range(2000):
        drawn = rng.integers(4, size=4)
        means.append(sum(sums[i] for i in drawn) / sum(counts[i] for i in drawn))
    assert recall._interval(sums, counts) == pytest.approx(np.percentile(means, [2.5, 97.5]).tolist())
    assert recall._interval(sums[:1], counts[:1]) is None
    assert recall._interval(np.array([0.0, -3.0]), np.array([0.0, 2.0])) is None


def test_what_was_said_exactly_the_native_window_ago_is_near() -> None:
    at = [("lines", distance, -1.0, True) for distance in (255, 256, 257)]
    found = recall._summary(entry(rows_of(at, at)), entry(rows_of(at, at)), LINES, 256)
    assert (found["near"]["questions"], found["far"]["questions"]) == (4, 2)
    assert [(b["start"], b["end"], b["questions"]) for b in found["distances"]] == [(128, 256, 2), (256, 512, 4)]
    assert recall._summary(entry(rows_of(at[:1])), entry(rows_of(at[:1])), LINES, 256)["far"] is None


def test_nano_recalls_inside_its_window_and_not_far_beyond_and_a_stopped_run_goes_on(tmp_path: Path) -> None:
    names, ask = ["nano", "nano@yarn:4", "nano"], {"formats": LINES, "windows": 4, "seed": 1}
    whole = evaluate_recall(names, [1024, 192], **ask, out=tmp_path / "a")  # type: ignore[arg-type]
    assert [(row["checkpoint"], row["length"]) for row in whole["results"]] == [
        (n, x) for n in names for x in (192, 1024)
    ]
    inside, beyond, _, yarn, again, _ = whole["results"]
    assert inside["near"]["accuracy"] == 1 and inside["far"] is None and inside["windows"] == 4
    assert beyond["far"]["accuracy"] < 0.5 < 0.9 < yarn["far"]["accuracy"]
    less = yarn["difference"]
    assert less["text"]["interval"][1] < 0 < less["far"]["logprob_interval"][0]  # better, beyond doubt
    assert whole["settings"]["border"] == 256 and beyond["difference"] is None
    questions = sum(b["questions"] for b in beyond["distances"])
    assert beyond["near"]["questions"] + beyond["far"]["questions"] == questions == 4 * ASKS * facts_of(1024, LINES)
    for name in ("logprob", "accuracy"):  # the same checkpoint once more
        assert again["difference"]["near"][name] == 0 and again["difference"]["near"][f"{name}_interval"] == [0, 0]
    assert again["difference"]["text"]["nll"] == 0 and again["difference"]["text"]["interval"] == [0, 0]

    lines = (tmp_path / "a" / "recall.jsonl").read_text().splitlines(keepends=True)
    assert len(lines) == 2 * 2 * 4
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "recall.jsonl").write_text("".join(lines[:10]) + lines[10][:30])
    answers, measured = recall._answers, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recall, "_answers", lambda model, quiz: measured.append(len(quiz.ids)) or answers(model, quiz))
        assert evaluate_recall(names, [1024, 192], **ask, out=tmp_path / "b") == whole  # type: ignore[arg-type]
        assert measured == [192] * 2 + [1024] * 4
        assert json.loads((tmp_path / "b" / "report.json").read_text()) == whole
        measured.clear()
        for changed in ({"seed": 2}, {"formats": ["sentence"]}, {"windows": 5}):
            evaluate_recall(["nano"], [192], **(ask | changed), out=tmp_path / "b")  # type: ignore[arg-type]
    assert measured == [192] * (4 + 4 + 1)  # windows of another number are the same ones, and one more
    plot_recall(whole, tmp_path / "r.png")
    assert (tmp_path / "r.png").stat().st_size > 5000


def test_the_formats_of_the_first_window_have_no_say_in_their_order() -> None:
    asked = ["quote", "code", "lines"]
    (row,) = evaluate_recall(["nano"], [512], formats=asked, windows=1)["results"]
    assert list(row["formats"]) == asked
    assert row["near"]["logprob_interval"] is row["near"]["accuracy_interval"] is row["text"]["interval"] is None
    assert row["near"]["questions"] + row["far"]["questions"] == 3 * ASKS * facts_of(512, asked)


def test_the_text_can_be_given_and_windows_take_documents_in_turn(
    save_checkpoint: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save_checkpoint(tmp_path / "ckpt", bos=True)
    for name in ("a", "b", "d"):
        words = "".join(f"{name}{i} says that it is {name}{i + 1} that it says, of all.\n" for i in range(90))
        (tmp_path / f"{name}.txt").write_text(words)
    (tmp_path / "c.txt").write_text("far too short\n")
    (tmp_path / "e.txt").write_bytes(b"\xff")  # would be an error, if it were read
    texts = [tmp_path / f"{name}.txt" for name in "abcde"]
    seen: list[list[int]] = []
    answers = recall._answers
    monkeypatch.setattr(recall, "_answers", lambda model, quiz: seen.append(quiz.ids) or answers(model, quiz))
    (row,) = evaluate_recall([path], [300], formats=["lines", "quote"], windows=3, data=texts)["results"]
    tokenizer = load_tokenizer(path)
    for name, ids in zip("abd", seen, strict=True):
        text = tokenizer.decode(ids)
        assert ids[0] == 0 and set(re.findall(r"([abd])\d+ says", text)) == {name}
    assert row["near"]["accuracy"] == 0  # of random weights
    with pytest.raises(DataError, match="give a longer text"):
        evaluate_recall([path], [300], data=[tmp_path / "c.txt"])


def test_checkpoints_that_tokenise_otherwise_are_refused_before_any_is_measured(checkpoint: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recall, "load_model", lambda *args: pytest.fail("a model was loaded"))
        with pytest.raises(OptionError, match="tokenise the text differently"):
            evaluate_recall(["nano", checkpoint], [256], formats=LINES)


def test_a_family_that_changes_its_logits_unknown_to_us_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = copy.deepcopy(load_model("nano"))
    odd.lm_head.register_forward_hook(lambda module, args, output: output * 0.5)
    monkeypatch.setattr(recall, "load_model", lambda *args: odd)
    with pytest.raises(UnsupportedError, match="does not know"):
        evaluate_recall(["nano"], [192], formats=LINES, windows=1)


def test_the_command_shows_what_was_measured(tmp_path: Path) -> None:
    words = ["eval", "recall", "nano", "nano@yarn:4", "--lengths", "512", "--formats", "lines,code", "--seed", "1"]
    done = CliRunner().invoke(app, [*words, "--windows", "2", "-o", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "interval over 2 window(s) says little" in done.stderr
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (tmp_path / "out" / "recall.png").stat().st_size > 5000
    base, yarn = report["results"]
    lines = {line.split("  ")[1].strip(): line for line in done.stdout.splitlines() if line.startswith("  ")}
    assert f"{yarn['difference']['text']['nll']:+.3f}" in lines["text, NLL"]  # the last line of that name
    assert f"{base['formats']['lines']['near']['accuracy']:.0%}" in lines["lines, near"]
    assert f"{yarn['formats']['code']['near']['logprob']:.2f}" in lines["code, near"]
    near = base["near"]
    low, high = near["logprob_interval"]
    assert f"{near['logprob']:.2f} [{low:.2f}, {high:.2f}]" in done.stdout
    assert max(map(len, done.stdout.splitlines())) < 100

    drawn = CliRunner().invoke(app, [*words, "--windows", "5", "--plot", str(tmp_path / "r.svg"), "--json"])
    assert json.loads(drawn.stdout)["settings"]["formats"] == ["lines", "code"] and (tmp_path / "r.svg").exists()
    assert "says little" not in drawn.stderr
