import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ropex.errors import DataError, OptionError, OutputError
from ropex.eval.ruler import TASKS, batches, evaluate_ruler
from ropex.eval.ruler.generate import Answer, Ask

pytest.importorskip("lm_eval")
pytest.importorskip("wonderwords")

Lines = Callable[[Path], list[dict[str, Any]]]


@pytest.fixture()
def reader(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """In the model's place a reader who finds every second answer; gives the prompts that it was shown."""
    shown: list[list[int]] = []

    def read(model: object, tokenizer: object, asks: list[Ask], limit: int) -> list[Answer]:
        answers = []
        for ask in asks:
            shown.append(list(ask.input_ids))
            answers.append(Answer(" ".join(ask.references) if len(shown) % 2 else "no idea", limit, "limit"))
        return answers

    monkeypatch.setattr(batches, "greedy_answers", read)
    return shown


def test_rows_come_in_the_order_asked_with_scores_in_percent(
    checkpoint: str, other: str, reader: list[list[int]]
) -> None:
    table = evaluate_ruler([checkpoint, other], ["fwe", "niah_single_1"], [512, 1024], samples=4)
    rows = table["results"]
    assert [(r["checkpoint"], r["length"], r["task"]) for r in rows] == [
        (c, n, t) for c in (checkpoint, other) for n in (512, 1024) for t in ("fwe", "niah_single_1")
    ]
    for row in rows:
        assert row["score"] == row["score_whole_numbers"] == 50
        assert row["interval"][0] < 50 < row["interval"][1]
        assert row["truncated"] == 0.5
        assert row["samples"] == 4
        assert 0.9 <= row["fill"] <= 1
        assert row["method"] == "rope"
        assert row["bos"] is False
    assert "note" not in table
    json.dumps(table, allow_nan=False)


def test_every_checkpoint_reads_the_same_prompts(checkpoint: str, other: str, reader: list[list[int]]) -> None:
    evaluate_ruler([checkpoint, other], ["vt", "fwe"], [1024], samples=3)
    assert reader[:6] == reader[6:]
    assert len({tuple(ids) for ids in reader}) == 6


def test_other_tokenizers_size_their_own_prompts_and_the_table_says_so(
    tmp_path: Path, checkpoint: str, reader: list[list[int]], save_checkpoint: Callable[..., str]
) -> None:
    with_bos = save_checkpoint(tmp_path / "bos", bos=True)
    table = evaluate_ruler([checkpoint, with_bos], ["fwe"], [512], samples=1)
    assert "tokenizers differ" in table["note"]
    with pytest.raises(OptionError, match="tokens will do") as caught:
        evaluate_ruler([checkpoint, with_bos], ["vt"], [300], samples=1)
    floor = int(str(caught.value).split()[-4])
    assert evaluate_ruler([checkpoint, with_bos], ["vt"], [floor], samples=1)["results"]
    assert [row["bos"] for row in table["results"]] == [False, True]


def test_a_run_that_was_stopped_ends_as_if_it_had_not_been(
    tmp_path: Path, checkpoint: str, other: str, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RX-45. A batch of which an answer is missing is asked again as a whole."""
    whole, cut = tmp_path / "whole", tmp_path / "sub" / "cut"
    arguments = [checkpoint, other], ["fwe", "niah_single_1"], [512]
    options: dict[str, Any] = {"samples": 4, "batch_size": 2}
    expected = evaluate_ruler(*arguments, **options, out=whole)
    written = (whole / "answers.jsonl").read_bytes()
    assert len(lines(whole / "answers.jsonl")) == 16
    third = [m.end() for m in re.finditer(b"\n", written)][2]
    cut.mkdir(parents=True)
    (cut / "answers.jsonl").write_bytes(written[: third + 40])  # three answers, and a fourth cut off by the crash
    asked: list[int] = []
    plain = batches.greedy_answers

    def counted(model: Any, tokenizer: Any, asks: list[Ask], limit: int) -> list[Answer]:
        asked.append(len(asks))
        return plain(model, tokenizer, asks, limit)

    monkeypatch.setattr(batches, "greedy_answers", counted)
    assert evaluate_ruler(*arguments, **options, out=cut) == expected
    assert asked == [2] * 7
    assert evaluate_ruler(*arguments, **options, out=cut) == expected
    assert asked == [2] * 7
    assert (cut / "answers.jsonl").read_bytes() == written
    assert json.loads((cut / "report.json").read_text()) == json.loads((whole / "report.json").read_text()) == expected


def test_more_samples_go_on_from_those_there(
    tmp_path: Path, checkpoint: str, reader: list[list[int]], lines: Lines
) -> None:
    evaluate_ruler([checkpoint], ["fwe"], [512], samples=4, batch_size=4, out=tmp_path / "out")
    evaluate_ruler([checkpoint], ["fwe"], [512], samples=6, batch_size=4, out=tmp_path / "out")
    assert [record["index"] for record in lines(tmp_path / "out" / "answers.jsonl")] == [0, 1, 2, 3, 4, 5]
    assert len(reader) == 6


def test_answers_are_on_disk_as_they_come(
    tmp_path: Path, checkpoint: str, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = iter([[Answer("one", 1, "eos")], [Answer("two", 1, "eos")]])
    monkeypatch.setattr(batches, "greedy_answers", lambda *args: next(given))
    with pytest.raises(StopIteration):
        evaluate_ruler([checkpoint], ["fwe"], [512], samples=3, batch_size=1, out=tmp_path / "out")
    records = lines(tmp_path / "out" / "answers.jsonl")
    assert [record["prediction"] for record in records] == ["one", "two"]
    assert {"checkpoint", "task", "length", "index", "references", "score", "fill", "prompt_tokens"} <= set(records[0])


def test_other_weights_settings_or_seeds_are_answered_anew(
    tmp_path: Path, reader: list[list[int]], save_checkpoint: Callable[..., str]
) -> None:
    path, out = save_checkpoint(tmp_path / "ckpt", chat=True), tmp_path / "out"

    def asked(**options: Any) -> int:
        before = len(reader)
        evaluate_ruler([path], ["fwe"], [512], samples=1, out=out, **options)
        return len(reader) - before

    assert asked() == 1
    assert asked() == 0
    assert asked(seed=1) == 1
    assert asked(flavour="lm-eval") == 1
    assert asked(dtype="bfloat16") == 1
    assert asked(chat_template=True) == 1
    save_checkpoint(tmp_path / "ckpt", seed=7, chat=True)
    assert asked() == 1
    assert asked() == 0


def test_other_data_is_answered_anew(tmp_path: Path, checkpoint: str, reader: list[list[int]]) -> None:
    essays, out = tmp_path / "essays.txt", tmp_path / "out"
    asked = []
    for text in ("One two three. " * 50, "Two three four. " * 50):
        essays.write_text(text)
        for _ in range(2):
            evaluate_ruler([checkpoint], ["niah_single_2", "fwe"], [512], samples=1, essays=essays, out=out)
            asked.append(len(reader))
    assert asked == [2, 2, 3, 3]


@pytest.mark.parametrize("content", ["some notes\n", "some notes", '{"a": 1}\n', "[]\n"])
def test_a_folder_that_is_no_log_is_left_alone(tmp_path: Path, checkpoint: str, content: str) -> None:
    for name in ("notes.txt", "out/answers.jsonl", "other/notes.txt"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(content)
        with pytest.raises(OutputError, match="name a"):
            evaluate_ruler([checkpoint], ["fwe"], [512], samples=1, out=file if name == "notes.txt" else file.parent)
        assert file.read_text() == content
        assert [*file.parent.glob("*.json")] == []


def test_a_length_too_short_stops_the_run_before_any_model_is_loaded(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "load_model", lambda *args: pytest.fail("loaded"))
    with pytest.raises(OptionError, match="cwe does not fit length 300"):
        evaluate_ruler([checkpoint], ["cwe", "fwe"], [5000, 300])
    for wrong in ({"samples": 0}, {"tasks": ["qa"]}, {"lengths": []}, {"batch_size": 0}, {"flavour": "meta"}):
        with pytest.raises(OptionError):
            evaluate_ruler(**{"checkpoints": [checkpoint], "tasks": ["fwe"], "lengths": [512], **wrong})


def test_without_data_the_rest_runs_and_the_report_says_what_did_not(checkpoint: str, reader: list[list[int]]) -> None:
    table = evaluate_ruler([checkpoint], None, [3000, 600], samples=1)
    ran = {(row["task"], row["length"]) for row in table["results"]}
    left = {(row["task"], row["length"]): row["why"] for row in table["not_run"]}
    assert ran | set(left) == {(name, length) for name in TASKS for length in (3000, 600)}
    assert {task for task, length in ran if length == 3000} == {
        "niah_single_1", "niah_multikey_2", "niah_multikey_3", "vt", "cwe", "fwe",
    }  # fmt: skip
    assert "--essays PATH" in left["niah_single_2", 3000]
    assert "--prepare" in left["qa_1", 3000]
    assert "cwe does not fit length 600" in left["cwe", 600]
    assert [row["tasks"] for row in table["means"][0]["lengths"]] == [6, 4]
    with pytest.raises(OptionError, match="nothing can be run: no squad here"):
        evaluate_ruler([checkpoint], ["qa_1"], [3000], samples=1)


@pytest.mark.parametrize(("option", "task"), [("essays", "niah_single_2"), ("squad", "qa_1"), ("hotpot", "qa_2")])
@pytest.mark.parametrize("content", [None, "{", '{"data": 3}', '{"data": []}', "[]", '{"text": ""}'])
def test_data_that_cannot_be_used_is_one_line(
    tmp_path: Path, checkpoint: str, option: str, task: str, content: str | None
) -> None:
    path = tmp_path / "data.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(DataError, match="data.json") as caught:
        evaluate_ruler([checkpoint], [task], [2048], samples=1, **{option: path})
    assert "\n" not in str(caught.value)


def test_questions_are_scored_by_the_best_answer_and_by_lm_evals_share(
    checkpoint: str, data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NVIDIA takes the best reference; lm-eval the share of those found."""
    monkeypatch.setattr(
        batches, "greedy_answers", lambda m, t, asks, n: [Answer(a.references[0], n, "eos") for a in asks]
    )
    scores = {
        flavour: evaluate_ruler(
            [checkpoint], ["qa_1", "qa_2"], [2048], samples=2, squad=data.squad, hotpot=data.hotpot, flavour=flavour
        )["results"]
        for flavour in ("nvidia", "lm-eval")
    }
    assert [row["score"] for row in scores["nvidia"]] == [100, 100]
    assert [row["score"] for row in scores["lm-eval"]] == [50, 100]


def test_batches_are_halved_where_memory_runs_out(
    checkpoint: str, reader: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """RX-45. For that length alone, and the table says so."""
    read, sizes = batches.greedy_answers, []

    def tight(model: object, tokenizer: object, asks: list[Ask], limit: int) -> list[Answer]:
        sizes.append(len(asks))
        if sum(len(ask.input_ids) for ask in asks) > 2200:
            raise torch.OutOfMemoryError("CUDA out of memory.\nlong story")
        return read(model, tokenizer, asks, limit)

    monkeypatch.setattr(batches, "greedy_answers", tight)
    table = evaluate_ruler([checkpoint], ["fwe"], [1024, 512], samples=8, batch_size=4)
    assert sizes == [4, 2, 2, 2, 2, 4, 4]
    assert len(reader) == 16
    assert "memory ran out at 1024 with batches of 4" in table["note"]
    table = evaluate_ruler([checkpoint], ["fwe"], [512, 4096], samples=8)
    assert [row["length"] for row in table["results"]] == [512]
    assert "memory ran out at a prompt of 4096 tokens" in table["not_run"][0]["why"]
    with pytest.raises(OptionError, match="prompt of 4096 tokens") as caught:
        evaluate_ruler([checkpoint], ["fwe"], [4096], samples=8)
    assert "\n" not in str(caught.value)
