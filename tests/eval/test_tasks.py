"""lm-eval's tasks through ropex, on task folders made here: no test needs the network."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
import yaml
from huggingface_hub import constants
from processes import in_two

from ropex.errors import DataError, OptionError
from ropex.eval import harness, tasks
from ropex.eval.models import load_model, load_tokenizer
from ropex.eval.report import write_report
from ropex.eval.tasks import SETS, evaluate_tasks

pytest.importorskip("lm_eval")

WORDS = ("one", "two words", "three", "seventeen of them")


def write_task(folder: Path, name: str, docs: list[dict[str, Any]], **settings: Any) -> None:
    """A task folder as lm-eval has them: a YAML file and the documents as JSON lines."""
    folder.mkdir(exist_ok=True)
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{text}}",
    }
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(task | settings))


def choices(count: int = 12, **changes: Any) -> list[dict[str, Any]]:
    return [{"text": f"Item {7 * i} of {i} is", "label": i % 4} | changes for i in range(count)]


CHOOSE: dict[str, Any] = {
    "output_type": "multiple_choice",
    "doc_to_choice": list(WORDS),
    "doc_to_target": "label",
    "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
}
SAY: dict[str, Any] = {
    "output_type": "generate_until",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"max_gen_toks": 6, "until": ["\n\n"], "do_sample": False},
    "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two tasks to choose in, and a group of them."""
    place = tmp_path / "mine"
    write_task(place, "tiny_choice", choices(), **CHOOSE)
    write_task(place, "tiny_more", choices(5), **CHOOSE)
    group = {"group": "tiny", "task": ["tiny_choice", "tiny_more"], "aggregate_metric_list": [{"metric": "acc"}]}
    (place / "tiny.yaml").write_text(yaml.safe_dump(group))
    return place


def log_likelihoods(checkpoint: str, text: str) -> list[float]:
    """Of each of WORDS after the text, by the model itself."""
    model, tokenizer = load_model(checkpoint), load_tokenizer(checkpoint)
    start, found = len(tokenizer(text)["input_ids"]), []
    for word in WORDS:
        ids = torch.tensor([tokenizer(f"{text} {word}")["input_ids"]])
        with torch.no_grad():
            scores = model(ids).logits[0, :-1].float().log_softmax(-1)
        found.append(float(scores.gather(1, ids[0, 1:, None])[start - 1 :].sum()))
    return found


def value(report: dict[str, Any], checkpoint: str, task: str, metric: str) -> float:
    (row,) = [
        row
        for row in report["results"]
        if (row["checkpoint"], row["task"], row["metric"]) == (checkpoint, task, metric)
    ]
    return float(row["value"])


def test_values_are_those_of_the_models_own_log_likelihoods(checkpoint: str, other: str, folder: Path) -> None:
    report = evaluate_tasks([checkpoint, other], ["tiny_choice"], include_path=folder)
    for name in (checkpoint, other):
        right = normed = 0
        for doc in choices():
            scores = log_likelihoods(name, doc["text"])
            right += scores.index(max(scores)) == doc["label"]
            by_length = [score / len(word) for score, word in zip(scores, WORDS, strict=True)]
            normed += by_length.index(max(by_length)) == doc["label"]
        assert value(report, name, "tiny_choice", "acc") == pytest.approx(right / 12)
        assert value(report, name, "tiny_choice", "acc_norm") == pytest.approx(normed / 12)
    for row in report["results"]:
        share = row["value"]
        assert row["stderr"] == pytest.approx((share * (1 - share) / 11) ** 0.5)
        assert (row["samples"], row["num_fewshot"], row["cut"], row["max_length"]) == (12, 0, 0, 512)
    assert [row["main"] for row in report["results"]] == [True, False] * 2


def test_an_answer_is_what_the_model_says_by_itself(checkpoint: str, folder: Path) -> None:
    model, tokenizer = load_model(checkpoint), load_tokenizer(checkpoint)
    docs = []
    for i in range(3):
        ids = tokenizer(f"Say {i}", return_tensors="pt")
        out = model.generate(**ids, max_new_tokens=6, do_sample=False, pad_token_id=0)
        said = tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        docs.append({"text": f"Say {i}", "answer": said if i else said + " and more"})
    write_task(folder, "tiny_say", docs, **SAY)
    report = evaluate_tasks([checkpoint], ["tiny_say"], include_path=folder)
    assert value(report, checkpoint, "tiny_say", "exact_match") == pytest.approx(2 / 3)


def test_limit_and_examples_are_taken_as_given(checkpoint: str, folder: Path) -> None:
    plain = evaluate_tasks([checkpoint], ["tiny_choice"], include_path=folder, limit=5)
    shots = evaluate_tasks([checkpoint], ["tiny_choice"], include_path=folder, limit=5, num_fewshot=2)
    assert {row["samples"] for row in plain["results"] + shots["results"]} == {5}
    assert [report["results"][0]["num_fewshot"] for report in (plain, shots)] == [0, 2]
    write_task(folder, "tiny_fixed", choices(), **CHOOSE, num_fewshot=0)
    fixed = evaluate_tasks([checkpoint], ["tiny_fixed"], include_path=folder, limit=5, num_fewshot=2)
    assert fixed["results"][0]["num_fewshot"] == 0  # a task that says 0 means it


def test_a_group_stands_for_its_members(checkpoint: str, folder: Path, index: Any) -> None:
    report = evaluate_tasks([checkpoint], ["tiny"], include_path=folder)
    both = [value(report, checkpoint, task, "acc") for task in ("tiny_choice", "tiny_more")]
    assert value(report, checkpoint, "tiny", "acc") == pytest.approx((12 * both[0] + 5 * both[1]) / 17)
    assert [(row["task"], row["samples"]) for row in report["results"] if row["main"]] == [("tiny", 17)]


def test_inputs_beyond_the_window_are_counted_and_said(folder: Path) -> None:
    docs = choices(3) + [{"text": "long " * 300, "label": 1}]
    write_task(folder, "tiny_long", docs, **CHOOSE)
    report = evaluate_tasks(["nano", "nano@yarn:8"], ["tiny_long"], include_path=folder)
    lengths = {row["checkpoint"]: (row["max_length"], row["cut"]) for row in report["results"]}
    assert lengths == {"nano": (256, 4), "nano@yarn:8": (2048, 0)}  # each choice is an input
    assert report["note"] == "nano: inputs longer than 256 tokens lost their beginnings: tiny_long (4)."
    same = evaluate_tasks(["nano", "nano@yarn:8"], ["tiny_long"], include_path=folder, max_length=128)
    assert {(row["max_length"], row["cut"]) for row in same["results"]} == {(128, 4)}


def test_a_set_is_its_tasks_and_has_a_mean(
    checkpoint: str, other: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SETS, "ours", {"tiny_choice": "acc_norm", "tiny_more": "acc", "tiny_gone": "acc"})
    write_task(folder, "tiny_gone", choices(), **CHOOSE)
    (folder / "tiny_gone.jsonl").unlink()
    report = evaluate_tasks([checkpoint, other], ["ours"], include_path=folder)
    assert [row["task"] for row in report["not_run"]] == ["tiny_gone"]
    for mean in report["means"]:
        here = [r for r in report["results"] if r["main"] and r["checkpoint"] == mean["checkpoint"]]
        assert [(r["task"], r["metric"]) for r in here] == [("tiny_choice", "acc_norm"), ("tiny_more", "acc")]
        assert mean["value"] == pytest.approx((here[0]["value"] + here[1]["value"]) / 2)
        assert mean["stderr"] == pytest.approx((here[0]["stderr"] ** 2 + here[1]["stderr"] ** 2) ** 0.5 / 2)
        assert (mean["set"], mean["tasks"], mean["of"]) == ("ours", 2, 3)
    assert len(report["means"]) == 2


def test_what_is_done_is_kept_and_not_done_again(
    checkpoint: str, other: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RX-45."""
    asked: list[str] = []
    plain, killed = tasks.run, {"tiny_more"}

    def watched(model: Any, tokenizer: Any, task: Any, **words: Any) -> Any:
        (name,) = task.tasks
        if name in killed:
            raise KeyboardInterrupt
        asked.append(name)
        return plain(model, tokenizer, task, **words)

    monkeypatch.setattr(tasks, "run", watched)

    def again(**words: Any) -> dict[str, Any]:
        asked.clear()
        names = [checkpoint, other], ["tiny_choice", "tiny_more"]
        return evaluate_tasks(*names, include_path=folder, **{"out": tmp_path / "out", **words})

    with pytest.raises(KeyboardInterrupt):
        again()
    assert asked == ["tiny_choice"] and not (tmp_path / "out" / "report.json").exists()
    killed.clear()
    resumed = again()
    assert asked == ["tiny_more", "tiny_choice", "tiny_more"]
    assert json.loads((tmp_path / "out" / "report.json").read_text()) == resumed == again()
    assert asked == []
    assert again(out=None) == resumed and len(asked) == 4
    again(limit=3)
    assert len(asked) == 4
    write_task(folder, "tiny_more", choices(5, label=3), **CHOOSE)
    again()
    assert asked == ["tiny_more"] * 2  # other documents, other answers


def test_a_task_that_fails_does_not_take_the_others_along(checkpoint: str, folder: Path) -> None:
    endless = SAY | {"generation_kwargs": {"max_gen_toks": 600, "until": [], "do_sample": False}}
    write_task(folder, "tiny_say", [{"text": "Say", "answer": "so"}], **endless)
    report = evaluate_tasks([checkpoint], ["tiny_say", "tiny_more"], include_path=folder)
    assert [row["task"] for row in report["results"]] == ["tiny_more"] * 2
    (failed,) = report["not_run"]
    assert (failed["task"], failed["checkpoint"]) == ("tiny_say", checkpoint)
    assert "it failed" in failed["why"] and "maximum sequence length" in failed["why"]
    with pytest.raises(DataError, match="nothing could be run: tiny_say: it failed"):
        evaluate_tasks([checkpoint], ["tiny_say"], include_path=folder)


def test_data_out_of_reach_is_one_line_and_is_tried_once(
    checkpoint: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("away_one", "away_two"):
        write_task(folder, name, [], **CHOOSE, dataset_path=f"some/{name}")
    tried: list[bool] = []
    plain = datasets.load_dataset

    def load(path: str, *args: Any, **words: Any) -> Any:
        if not path.startswith("some/"):
            return plain(path, *args, **words)
        tried.append(datasets.config.HF_HUB_OFFLINE)
        raise ConnectionError(f"Couldn't reach '{path}' on the Hub\nat all")

    monkeypatch.setattr(datasets, "load_dataset", load)
    report = evaluate_tasks([checkpoint], ["away_one", "tiny_more", "away_two"], include_path=folder)
    assert [row["task"] for row in report["not_run"]] == ["away_one", "away_two"]
    why = report["not_run"][0]["why"]
    assert "Couldn't reach 'some/away_one' on the Hub" in why and "run it once where there is network" in why
    assert "\n" not in why
    assert tried == [False, True] and not datasets.config.HF_HUB_OFFLINE and not constants.HF_HUB_OFFLINE
    assert {row["task"] for row in report["results"]} == {"tiny_more"}
    with pytest.raises(DataError, match="nothing could be run: away_one: its data set cannot be reached"):
        evaluate_tasks([checkpoint], ["away_one"], include_path=folder)


def test_where_memory_runs_out_fewer_inputs_go_at_a_time(
    checkpoint: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RX-45."""
    sizes: list[int] = []
    plain = tasks.run

    def small(*args: Any, batch_size: int, **words: Any) -> Any:
        sizes.append(batch_size)
        if batch_size > 2:
            raise torch.OutOfMemoryError("no room")
        return plain(*args, batch_size=batch_size, **words)

    monkeypatch.setattr(tasks, "run", small)
    report = evaluate_tasks([checkpoint], ["tiny_choice", "tiny_more"], include_path=folder)
    assert sizes == [8, 4, 2, 2] and len(report["results"]) == 4
    assert report["note"] == f"{checkpoint}: memory ran out, so 2 inputs at a time from tiny_choice on."


@pytest.fixture(scope="module")
def whole_index() -> Any:
    from lm_eval.tasks import TaskManager

    return TaskManager()


@pytest.fixture
def index(whole_index: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """lm-eval's own tasks with those of the folder, read once: its thousands take their time."""
    from lm_eval.tasks import TaskManager

    own = TaskManager(include_path=str(folder), include_defaults=False)
    both = TaskManager(include_path=str(folder), include_defaults=False)
    both._index = whole_index._index | own._index
    both._all_tasks = sorted(both._index)
    monkeypatch.setattr(harness, "_manager", lambda names, place: both)
    return both


def test_the_sets_are_tasks_of_lm_eval(index: Any) -> None:
    for names in SETS.values():
        assert set(names) <= set(index.all_tasks)
    assert (len(SETS["nlu"]), len(SETS["longbench"])) == (7, 16)


def test_a_name_that_is_none_is_refused_with_those_near_it(checkpoint: str, index: Any) -> None:
    with pytest.raises(OptionError, match=r"no task, group or tag 'hellaswagg' \(near: hellaswag"):
        evaluate_tasks([checkpoint], ["nlu", "hellaswagg"])


def test_without_lm_eval_the_way_to_get_it_is_named(checkpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"pip install 'ropex\[eval\]'"):
        evaluate_tasks([checkpoint], ["nlu"])


def test_options_that_make_no_sense_are_refused(checkpoint: str, folder: Path) -> None:
    def refused(said: str, names: list[str] | None = None, **words: Any) -> None:
        with pytest.raises(OptionError, match=said):
            evaluate_tasks([checkpoint], names if names is not None else ["tiny_more"], include_path=folder, **words)

    refused("limit is 0: give 1 or more", limit=0)
    refused("num fewshot is -1: give 0 or more", num_fewshot=-1)
    refused("name at least one checkpoint and one task", names=[])
    with pytest.raises(OptionError, match="is no folder"):
        evaluate_tasks([checkpoint], ["x"], include_path=folder / "no")


def test_nothing_is_printed_and_nothing_stays_changed(
    checkpoint: str, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from tqdm import tqdm

    steps: list[tuple[str, int, int]] = []
    before = tqdm.__init__
    evaluate_tasks(
        [checkpoint], ["tiny_choice", "tiny_more"], include_path=folder, num_fewshot=1,
        progress=lambda *step: steps.append(step),
    )  # fmt: skip
    assert capfd.readouterr() == ("", "")
    assert tqdm.__init__ is before
    assert steps[-1] == ("done", 17, 17) and [done for _, done, _ in steps] == sorted(done for _, done, _ in steps)
    assert (f"{checkpoint}: tiny_choice", 6, 17) in steps  # it moves within a task


def test_the_command_prints_a_table_or_json_and_leaves_what_the_page_shows(
    folder: Path, tmp_path: Path, run_ropex: Callable[..., Any]
) -> None:
    out = tmp_path / "results" / "tasks"
    words = ["eval", "tasks", "nano", "nano@yarn:2", "--tasks", "tiny_choice", "--include-path", folder, "-o", out]
    done = run_ropex(*words, "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0 and report == json.loads((out / "report.json").read_text())
    assert sorted(path.name for path in out.iterdir()) == ["report.json", "tasks.jsonl", "tasks.png"]
    shown = run_ropex(*words).stdout
    row = report["results"][0]
    assert "nano (rope)" in shown and "nano@yarn:2 (yarn)" in shown
    assert f"{row['value']:.4f} ± {row['stderr']:.4f}" in shown
    assert "\r" not in done.stderr and "%|" not in done.stderr  # no bars in a log
    page = tmp_path / "report.html"
    write_report([tmp_path / "results"], page)
    assert f"{row['value']:.4f} <small>± {row['stderr']:.4f}</small>" in page.read_text(encoding="utf-8")


@pytest.fixture
def run_ropex() -> Callable[..., Any]:
    import subprocess

    script = "import sys; from ropex.cli import main; main()"
    return lambda *words: subprocess.run(
        [sys.executable, "-c", script, *map(str, words)], capture_output=True, text=True, timeout=300
    )


TASKS = """
import json, sys
from pathlib import Path
from accelerate import PartialState
from ropex.eval.tasks import evaluate_tasks
src, out, words = json.loads(sys.argv[1])
names = ["tiny_choice", "tiny_long", "tiny_say"]
report = evaluate_tasks([src, src + "@yarn:2"], names, include_path=Path(words["folder"]), out=Path(out))
json.dump(report, open(f"{out}-{PartialState().process_index}.json", "w"))
PartialState().destroy_process_group()
"""


def test_two_processes_share_the_documents_and_say_the_same(checkpoint: str, folder: Path, tmp_path: Path) -> None:
    write_task(folder, "tiny_long", choices(6) + [{"text": "long " * 600, "label": 1}], **CHOOSE)
    write_task(folder, "tiny_say", [{"text": f"Say {i}", "answer": "so"} for i in range(3)], **SAY)
    names = ["tiny_choice", "tiny_long", "tiny_say"]
    alone = evaluate_tasks([checkpoint, f"{checkpoint}@yarn:2"], names, include_path=folder)
    out = tmp_path / "two"
    for _ in range(2):  # the second takes it all from the folder
        in_two(Path(checkpoint), out, {"folder": str(folder)}, TASKS)
        first, second = (json.loads((tmp_path / f"two-{i}.json").read_text()) for i in range(2))
        assert first == second == json.loads((out / "report.json").read_text())
        assert first["results"] == [pytest.approx(row) for row in alone["results"]]
        assert first | {"results": []} == alone | {"results": []}
    assert len((out / "tasks.jsonl").read_text().splitlines()) == 6
