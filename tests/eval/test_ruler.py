import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ropex.errors import OptionError, OutputError
from ropex.eval import ruler
from ropex.eval.models import load_model
from ropex.eval.ruler import evaluate_ruler, generate
from ropex.eval.ruler.generate import Answer, greedy_answer

pytest.importorskip("lm_eval")
pytest.importorskip("wonderwords")

Lines = Callable[[Path], list[dict[str, Any]]]


@pytest.fixture()
def reader(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """In the model's place a reader who finds every second answer; gives the prompts that it was shown."""
    shown: list[list[int]] = []

    def read(model: object, tokenizer: object, ids: list[int], references: list[str], limit: int) -> Answer:
        shown.append(ids)
        return Answer(" ".join(references) if len(shown) % 2 else "no idea", limit, "limit")

    monkeypatch.setattr(ruler, "greedy_answer", read)
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
    assert [row["bos"] for row in table["results"]] == [False, True]


def test_a_run_that_was_stopped_ends_as_if_it_had_not_been(
    tmp_path: Path, checkpoint: str, other: str, lines: Lines
) -> None:
    whole, cut = tmp_path / "whole.jsonl", tmp_path / "sub" / "cut.jsonl"
    arguments = [checkpoint, other], ["fwe", "niah_single_1"], [512]
    expected = evaluate_ruler(*arguments, samples=2, out=whole)
    assert len(lines(whole)) == 8
    written = whole.read_bytes()
    third = [m.end() for m in re.finditer(b"\n", written)][2]
    cut.parent.mkdir()
    cut.write_bytes(written[: third + 40])  # three answers, and a fourth cut off by the crash
    calls: list[int] = []
    plain = ruler.greedy_answer

    def counted(*args: Any) -> Answer:
        calls.append(1)
        return plain(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ruler, "greedy_answer", counted)
        assert evaluate_ruler(*arguments, samples=2, out=cut) == expected
        assert len(calls) == 5
        assert evaluate_ruler(*arguments, samples=2, out=cut) == expected
        assert len(calls) == 5
    assert cut.read_bytes() == written


def test_answers_are_on_disk_as_they_come(
    tmp_path: Path, checkpoint: str, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "answers.jsonl"
    given = iter([Answer("one", 1, "eos"), Answer("two", 1, "eos")])
    monkeypatch.setattr(ruler, "greedy_answer", lambda *args: next(given))
    with pytest.raises(StopIteration):
        evaluate_ruler([checkpoint], ["fwe"], [512], samples=3, out=out)
    assert [record["prediction"] for record in lines(out)] == ["one", "two"]


def test_other_weights_settings_or_seeds_are_answered_anew(
    tmp_path: Path, reader: list[list[int]], save_checkpoint: Callable[..., str]
) -> None:
    path, out = save_checkpoint(tmp_path / "ckpt", chat=True), tmp_path / "answers.jsonl"

    def asked(**options: Any) -> int:
        before = len(reader)
        evaluate_ruler([path], ["fwe"], [512], samples=1, out=out, **options)
        return len(reader) - before

    assert asked() == 1
    assert asked() == 0
    assert asked(seed=1) == 1
    assert asked(dtype="bfloat16") == 1
    assert asked(chat_template=True) == 1
    save_checkpoint(tmp_path / "ckpt", seed=7, chat=True)
    assert asked() == 1
    assert asked() == 0


@pytest.mark.parametrize("content", ["some notes\n", "some notes", '{"a": 1}\n', "[]\n"])
def test_a_file_that_is_no_log_is_left_alone(tmp_path: Path, checkpoint: str, content: str) -> None:
    out = tmp_path / "notes.txt"
    out.write_text(content)
    with pytest.raises(OutputError, match="name another file"):
        evaluate_ruler([checkpoint], ["fwe"], [512], samples=1, out=out)
    assert out.read_text() == content


def test_a_length_too_short_stops_the_run_before_any_model_is_loaded(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ruler, "load_model", lambda *args: pytest.fail("loaded"))
    with pytest.raises(OptionError, match="cwe does not fit length 300"):
        evaluate_ruler([checkpoint], ["fwe", "cwe"], [4096, 300])
    for wrong in ({"samples": 0}, {"tasks": ["qa"]}, {"lengths": []}):
        with pytest.raises(OptionError):
            evaluate_ruler(**{"checkpoints": [checkpoint], "tasks": ["fwe"], "lengths": [512], **wrong})


def by_hand(model: LlamaForCausalLM, ids: list[int], steps: int) -> list[int]:
    """Greedy without a cache."""
    ids = list(ids)
    for _ in range(steps):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[-steps:]


def test_answers_are_greedy_and_prompt_logits_are_computed_at_one_position(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    ids = torch.randint(2, 1500, (50,), generator=torch.Generator().manual_seed(0)).tolist()
    expected = by_hand(model, ids, 12)
    odd = copy.deepcopy(model)
    odd.generation_config = GenerationConfig(do_sample=True, temperature=3.0, repetition_penalty=9.0, eos_token_id=1)
    widths: list[int] = []

    def watch(module: object, args: tuple[Tensor], output: Tensor) -> None:
        widths.append(output.shape[1])

    odd.lm_head.register_forward_hook(watch)
    answer = greedy_answer(odd, tokenizer, ids, ["never said"], 12)
    assert answer == Answer(tokenizer.decode(expected), 12, "limit")
    assert widths == [1] * 12
    assert odd.generation_config.temperature == 3.0


def test_an_answer_ends_at_eos_or_once_its_score_is_settled(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    ids = torch.randint(2, 1500, (50,), generator=torch.Generator().manual_seed(0)).tolist()
    said = by_hand(model, ids, 12)
    odd = copy.deepcopy(model)
    stop = said[5]
    odd.generation_config.eos_token_id = [1, stop]
    answer = greedy_answer(odd, tokenizer, ids, ["never said"], 12)
    assert (answer.stop, answer.tokens) == ("eos", said.index(stop) + 1)

    text = tokenizer.decode(said)
    reference = next(c for c in text if c.isalpha())
    answer = greedy_answer(model, tokenizer, ids, [reference], 12)
    assert answer.stop == "settled"
    assert answer.tokens < 12
    assert reference in answer.text


def test_memory_that_runs_out_is_one_line(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.\nlong story")

    monkeypatch.setattr(type(model), "generate", fail)
    with pytest.raises(OptionError, match="50 tokens") as caught:
        generate.greedy_answer(model, tokenizer, [2] * 50, ["x"], 5)
    assert "\n" not in str(caught.value)


def test_an_answer_with_a_converted_rotary_is_greedy_too(checkpoint: str, tokenizer: PreTrainedTokenizerFast) -> None:
    converted = load_model(f"{checkpoint}@yarn:2")
    ids = torch.randint(2, 1500, (50,), generator=torch.Generator().manual_seed(0)).tolist()
    expected = tokenizer.decode(by_hand(converted, ids, 8))
    assert greedy_answer(converted, tokenizer, ids, ["never said"], 8).text == expected
