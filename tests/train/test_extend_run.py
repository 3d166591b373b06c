"""extend as a whole: what it writes, what loads, and what it refuses."""

import io
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import ropex
from ropex.errors import DataError, OptionError, OutputError, RopexError
from ropex.rotary import AdaRotary
from ropex.seam import rotary_state
from ropex.train.devices import launched
from ropex.train.extend import extend
from ropex.train.settings import Settings

IDS = torch.randint(257, (1, 150), generator=torch.Generator().manual_seed(5))


class Said(io.StringIO):
    """A stderr to read back."""


@pytest.fixture
def said() -> Said:
    return Said()


@pytest.fixture
def run(checkpoint: Path, text: Path, tmp_path: Path, said: Said) -> Callable[..., dict[str, Any]]:
    """extend on the tiny checkpoint, with changes to the arguments; out is tmp_path/run."""

    def call(**changes: Any) -> dict[str, Any]:
        given = {
            "src": checkpoint, "out": tmp_path / "run", "target": 256, "window": 64, "data": [str(text)],
            "steps_warmup": 4, "steps_joint": 4, "save_steps": 2, "lr_lora": 1e-2, "console": Console(file=said),
        }  # fmt: skip
        given |= changes
        return extend(given.pop("src"), given.pop("out"), **given)

    return call


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The models that extend loads, to look at afterwards."""
    import sys

    models: list[Any] = []
    module = sys.modules["ropex.train.extend"]
    load = module.load
    monkeypatch.setattr(module, "load", lambda *a, **k: models.append(load(*a, **k)) or models[-1])
    return models


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(IDS).logits


def test_the_run_loads_as_the_model_that_was_trained(
    run: Callable, live: list, tmp_path: Path, checkpoint: Path
) -> None:
    summary = run()
    assert summary["finished"]
    loaded, parent = ropex.load(tmp_path / "run"), ropex.load(checkpoint)
    exact = ropex.load(tmp_path / "run").double()  # in float32 the forward's own rounding is larger than the merge's
    torch.testing.assert_close(logits(exact), logits(live[0].double()), rtol=0, atol=5e-6)
    warmup = ropex.load(tmp_path / "run" / "warmup")
    assert (logits(loaded) - logits(warmup)).abs().max() > 1e-2
    assert (logits(warmup) - logits(parent)).abs().max() > 1e-2
    joint = ropex.load(tmp_path / "run" / "joint")
    assert torch.equal(logits(joint), logits(loaded))
    assert torch.equal(warmup.model.layers[0].self_attn.q_proj.weight, parent.model.layers[0].self_attn.q_proj.weight)


def test_the_run_says_how_it_was_made(run: Callable, tmp_path: Path, checkpoint: Path) -> None:
    run()
    block = json.loads((tmp_path / "run" / "run.json").read_text())
    assert block["source"] == str(checkpoint)
    assert block["spec"] == ropex.load(tmp_path / "run").ropex_spec.block()
    assert block["lora"] == {"r": 16, "alpha": 16, "targets": ["q_proj", "k_proj"]}
    assert json.loads((tmp_path / "run/warmup/run.json").read_text())["lora"] is None
    assert block["settings"]["window"] == 64
    assert block["settings"]["grad_ckpt"] is False
    assert block["seed"] == 0
    assert set(block["versions"]) == {"ropex", "torch", "transformers", "peft"}
    assert block["data"]["documents"] == 3
    lines = [json.loads(line) for line in (tmp_path / "run/log.jsonl").read_text().splitlines()]
    assert [(line["stage"], line["step"]) for line in lines] == [
        (s, n) for s in ("warmup", "joint") for n in (1, 2, 3, 4)
    ]
    assert lines[0]["windows"] == [0, 0]
    assert lines[4]["windows"] == [4, 4]  # the second stage sees other windows
    assert set(lines[0]["lr"]) == {"freq", "scale"}
    assert set(lines[4]["lr"]) == {"freq", "scale", "lora"}
    for line in lines:
        assert {"loss", "tokens_per_second", "grad_norm"} <= set(line)
        for kind in ("tau", "gamma", "|delta|"):
            low, middle, high = line[kind]
            assert low <= middle <= high
    assert lines[-1]["|delta|"][2] > 0


def test_the_console_lists_what_is_trained_and_the_memory(
    run: Callable, said: Said, capsys: pytest.CaptureFixture
) -> None:
    run()
    lines = said.getvalue().splitlines()
    trains = [line for line in lines if " trains " in line]
    assert trains[0] == "stage warmup trains 64 numbers: delta 32 in 2, tau 16 in 2, gamma 16 in 2 tensors"
    assert "lora_A 8,192 in 4, lora_B 5,120 in 4 tensors" in trains[1]
    assert sum("of memory" in line for line in lines) == 2
    assert any("tokens/s" in line and "loss" in line for line in lines)
    assert capsys.readouterr().out == ""


def test_the_warmup_alone_has_no_lora(run: Callable, live: list, tmp_path: Path) -> None:
    run(strategy="warmup")
    assert json.loads((tmp_path / "run/run.json").read_text())["lora"] is None
    torch.testing.assert_close(logits(ropex.load(tmp_path / "run")), logits(live[0]), rtol=1e-5, atol=1e-5)
    assert not (tmp_path / "run" / "joint").exists()


def test_a_run_can_be_the_source_of_another(run: Callable, tmp_path: Path) -> None:
    run(strategy="warmup")
    before = rotary_state(ropex.load(tmp_path / "run"))
    run(src=tmp_path / "run", out=tmp_path / "more", target=None, strategy="warmup", steps_warmup=1)
    after = rotary_state(ropex.load(tmp_path / "more"))
    moved = [(after[n] - before[n]).abs().max() for n in before if n.endswith("tau")]
    assert all(0 < m < 0.02 for m in moved)  # one step of 1e-2 from where the first run ended
    with pytest.raises(OptionError, match="256"):
        run(src=tmp_path / "run", out=tmp_path / "other", target=512)


def test_ablations_train_their_part_only(run: Callable, tmp_path: Path) -> None:
    run(ada_freq=False, out=tmp_path / "scale", strategy="warmup")
    run(ada_scale=False, out=tmp_path / "freq", strategy="warmup")
    run(share_heads=True, out=tmp_path / "shared", strategy="warmup")
    scale, freq, shared = (rotary_state(ropex.load(tmp_path / n)) for n in ("scale", "freq", "shared"))
    name = "model.layers.{}.self_attn.adarope.{}"
    assert not scale[name.format(0, "delta")].any()
    assert scale[name.format(0, "gamma")].any()
    assert freq[name.format(0, "delta")].any()
    assert not freq[name.format(0, "gamma")].any()
    assert shared[name.format(0, "delta")].shape == (1, 8)
    assert torch.equal(shared[name.format(0, "delta")], shared[name.format(1, "delta")])
    assert shared[name.format(0, "delta")].any()


def test_gradient_checkpointing_gives_the_same_run(run: Callable, tmp_path: Path) -> None:
    run(out=tmp_path / "off", grad_ckpt=False, strategy="warmup")
    run(out=tmp_path / "on", grad_ckpt=True, strategy="warmup")
    off, on = (rotary_state(ropex.load(tmp_path / n)) for n in ("off", "on"))
    for name in off:
        torch.testing.assert_close(on[name], off[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"target": 32, "window": None}, OptionError, "below the native window of 64"),
        ({"window": 512}, OptionError, "above the target 256"),
        ({"window": 8}, OptionError, "at least 16"),
        ({"target": None}, OptionError, "give the target"),
        ({"strategy": "wish"}, OptionError, "warmup-joint, warmup"),
        ({"steps_joint": 0, "lr_freq": -1.0}, OptionError, "steps_joint is 0.*lr_freq is -1"),
        ({"ada_freq": False, "ada_scale": False}, OptionError, "leave one"),
        ({"dtype": "float16"}, OptionError, "bf16"),
        ({"init": "wish"}, OptionError, "choose one of"),
        ({"data": ["gone.txt"]}, DataError, "gone.txt"),
        ({"data": []}, DataError, "--data"),
        ({"src": "gone"}, RopexError, "gone"),
        ({"resume": True, "overwrite": True}, OptionError, "one of them"),
        ({"window": None, "target": 100_000}, DataError, "no document has the 100000 tokens"),
    ],
)
def test_wrong_arguments_are_named_and_leave_nothing(
    run: Callable, tmp_path: Path, changes: dict[str, Any], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        run(**changes)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_tensor_that_would_not_train_stops_it_before_a_step(
    run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theta = AdaRotary.theta
    monkeypatch.setattr(AdaRotary, "theta", lambda self: theta(self).detach())
    with pytest.raises(RopexError, match=r"no gradient reaches model\.layers\.0\.self_attn\.adarope\.delta"):
        run()
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_kept_unless_it_is_a_run_to_replace(run: Callable, tmp_path: Path) -> None:
    place = tmp_path / "run"
    place.mkdir()
    (place / "thesis.txt").write_text("years of work")
    for wish in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(OutputError):
            run(**wish)
    assert (place / "thesis.txt").read_text() == "years of work"
    (place / "thesis.txt").unlink()
    run(strategy="warmup")  # an empty folder is as good as none
    (place / "thesis.txt").write_text("again")
    with pytest.raises(OutputError, match="thesis.txt"):
        run(overwrite=True)
    (place / "thesis.txt").unlink()
    with pytest.raises(OutputError, match="--overwrite"):
        run()
    with pytest.raises(DataError):
        run(overwrite=True, data=["gone.txt"])
    assert ropex.load(place)  # the older run stands until the new one can begin
    run(overwrite=True, strategy="warmup", seed=5)
    assert json.loads((place / "run.json").read_text())["seed"] == 5
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run"]


def test_the_output_is_not_the_source_nor_a_file(run: Callable, checkpoint: Path, tmp_path: Path) -> None:
    for place in (checkpoint, checkpoint.parent):
        with pytest.raises(OutputError):
            run(out=place, overwrite=True)
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="is a file"):
        run(out=tmp_path / "file")


def test_a_full_disk_is_seen_before_the_start(run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    monkeypatch.setattr(shutil, "disk_usage", lambda p: shutil._ntuple_diskusage(100, 90, 10))
    with pytest.raises(OutputError, match="free some space"):
        run()
    assert list(tmp_path.iterdir()) == []


def test_resuming_under_other_settings_is_refused_by_name(run: Callable, tmp_path: Path, text: Path) -> None:
    run(strategy="warmup")
    for changes, words in (
        ({"lr_scale": 0.5}, "lr_scale was 0.01 and is 0.5"),
        ({"steps_warmup": 9}, "steps_warmup was 4 and is 9"),
        ({"window": 32}, "window was 64 and is 32"),
    ):
        with pytest.raises(OptionError, match=words):
            run(strategy="warmup", resume=True, **changes)
    other = tmp_path / "other.txt"
    other.write_text("other words " * 100)
    (tmp_path / "run" / "trained.safetensors").unlink()
    with pytest.raises(OptionError, match="params was"):
        run(strategy="warmup", resume=True, params={"beta_fast": 4.0})
    with pytest.raises(OptionError, match="data was"):
        run(strategy="warmup", resume=True, data=[str(other)])


def test_a_run_resumes_only_with_the_windows_that_it_began_with(run: Callable, tmp_path: Path) -> None:
    run(strategy="warmup", plain_skip=True)
    (tmp_path / "run" / "trained.safetensors").unlink()
    with pytest.raises(OptionError, match="plain_skip was True and is False"):
        run(strategy="warmup", resume=True)
    block = json.loads((tmp_path / "run" / "run.json").read_text())
    (tmp_path / "run" / "run.json").write_text(json.dumps(block | {"weighed": True}))
    with pytest.raises(OptionError, match="--plain-skip\\) was True and is False"):
        run(strategy="warmup", plain_skip=True, resume=True)
    (tmp_path / "run" / "run.json").write_text(json.dumps(block | {"series": 1}))
    with pytest.raises(OptionError, match="whose training windows are others"):
        run(strategy="warmup", plain_skip=True, resume=True)
    (tmp_path / "run" / "run.json").write_text(json.dumps(block))
    assert run(strategy="warmup", plain_skip=True, resume=True)["finished"]


def test_auto_takes_flash_where_the_model_and_its_windows_let_it(
    tiny_llama: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    module, devices, taken = sys.modules["ropex.train.extend"], launched(), list[str]()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module, "_installed_flash", lambda: ["flash_attention_2"])

    def takes(settings: Settings, dtype: torch.dtype = torch.bfloat16, **config: Any) -> bool:
        model = tiny_llama(**config).to(dtype)
        monkeypatch.setattr(model, "set_attn_implementation", taken.append)
        module._take_flash(model, settings, devices)
        return bool(taken) and taken.pop() == "flash_attention_2"

    whole, skips = Settings(512, window=512), Settings(512, window=64)
    assert takes(whole) and not takes(whole, torch.float32)
    assert not takes(skips) and takes(replace(skips, plain_skip=True))
    assert takes(skips, layer_types=["sliding_attention", "full_attention"])  # which have no use for the mask


def test_resuming_a_finished_run_says_so(run: Callable, tmp_path: Path, said: Said) -> None:
    first = run(strategy="warmup")
    content = (tmp_path / "run" / "trained.safetensors").stat().st_mtime_ns
    assert run(strategy="warmup", resume=True) == first
    assert "is finished" in said.getvalue()
    assert (tmp_path / "run" / "trained.safetensors").stat().st_mtime_ns == content


def test_a_finished_run_is_known_under_another_spelling_and_a_converted_source(run: Callable, tmp_path: Path) -> None:
    run(out=tmp_path / "first", strategy="warmup", init="rope", share_heads=True)
    given = {"src": tmp_path / "first", "strategy": "warmup", "target": None}
    run(**given, dtype="bf16")
    assert run(**given, dtype="bfloat16", resume=True)["finished"]
    (tmp_path / "run" / "trained.safetensors").unlink()
    (tmp_path / "run" / "warmup" / "trained.safetensors").unlink()
    assert run(**given, dtype="bf16", resume=True)["finished"]
    with pytest.raises(OptionError, match="dtype was 'bfloat16' and is 'float32'"):
        run(**given, dtype="float32", resume=True)


STRATEGIES = {
    "warmup-lora": ({}, {"warmup", "lora"}),
    "joint": ({}, {"joint"}),
    "lora": ({"to": "yarn"}, {"lora"}),
    "joint of a table": ({"strategy": "joint", "to": "rope-id", "params": {"train_length": 128}}, {"joint"}),
    "full": ({"to": "rope-id", "params": {"train_length": 128}, "dtype": "float32", "lr_full": 1e-3}, {"full"}),
    "full with heads": ({"strategy": "full", "dtype": "float32", "lr_full": 1e-3}, {"full"}),
}


@pytest.mark.parametrize("name", STRATEGIES)
@torch.no_grad()
def test_a_strategy_trains_its_stages_and_what_it_trained_is_what_is_exported(
    run: Callable, tmp_path: Path, checkpoint: Path, name: str
) -> None:
    from ropex.convert.export import export

    asked, stages = STRATEGIES[name]
    with torch.enable_grad():
        result = run(**{"strategy": name, **asked})
    assert set(result["stages"]) == stages and result["finished"]
    ids = torch.randint(0, 257, (1, 200), generator=torch.Generator().manual_seed(4))
    live = ropex.load(tmp_path / "run")
    tables = asked.get("to") == "rope-id"
    export(tmp_path / "run", tmp_path / "out", **({"bake_length": 200} if tables else {}))
    exported = ropex.load(tmp_path / "out")
    untrained = ropex.load(checkpoint)
    assert not torch.equal(live(ids).logits, untrained(ids).logits)
    if not tables:  # a baked scale is another function of the length
        assert (exported(ids).logits - live(ids).logits).abs().max() <= 1e-4
    words = "model.embed_tokens.weight"
    changed = not torch.equal(exported.state_dict()[words], untrained.state_dict()[words])
    assert changed == (result["settings"]["strategy"] == "full")


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"to": "yarn"}, "nothing that a warm-up trains: give --strategy lora, joint or full"),
        ({"strategy": "full", "dtype": "bfloat16"}, "full trains float32"),
        ({"window": 256, "plain_skip": True}, "plain_skip is for windows shorter than the target: --no-plain-skip"),
        ({"recall_share": 1.5}, "recall_share is 1.5: give a share of the windows, from 0 to 1"),
        ({"recall_share": 0.5, "pack": True, "window": None}, "packed documents are left as they are"),
        ({"attn": "flash"}, "attn is 'flash': give one of auto, sdpa, eager, flash_attention_2"),
        ({"strategy": "backwards"}, "unknown strategy 'backwards': choose one of warmup-joint, warmup-lora"),
    ],
)
def test_a_strategy_that_cannot_be_is_refused_before_anything_loads(run: Callable, wish: dict, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        run(**wish)


def test_every_argument_arrives_where_it_belongs(run: Callable, tmp_path: Path) -> None:
    given = {
        "target": 200, "strategy": "warmup", "window": 48, "plain_skip": True, "recall_share": 0.25,
        "pack": False, "all_pairs": True, "steps_warmup": 2, "steps_joint": 3, "batch_size": 4,
        "accumulation": 5, "lr_freq": 0.006, "lr_scale": 0.007, "lr_lora": 0.008,
        "lr_full": 0.009, "lora_r": 9, "lora_alpha": 10, "to": "adarope", "init": "pi", "ada_freq": False,
        "ada_scale": True, "share_heads": True, "dtype": "bfloat16", "attn": "eager", "seed": 11, "save_steps": 12,
        "keep": 3, "grad_ckpt": True, "report_to": "none",
    }  # fmt: skip
    assert run(**given)["settings"] == given


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_after_its_step_and_it_goes_on_to_the_same_end(
    run: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: Said, number: int
) -> None:
    from ropex.train import runfolder

    run(out=tmp_path / "whole", save_steps=50)
    append = runfolder.append_log

    def append_then_signal(place: Path, line: dict[str, Any]) -> None:
        append(place, line)
        if (line["stage"], line["step"]) == ("joint", 1):
            os.kill(os.getpid(), number)

    monkeypatch.setattr(runfolder, "append_log", append_then_signal)
    handlers = [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)]
    assert run(save_steps=50)["finished"] is False
    assert [signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT)] == handlers
    assert "--resume" in said.getvalue().splitlines()[-1]
    assert (tmp_path / "run/joint/checkpoint-2").is_dir()
    with pytest.raises(RopexError, match="--resume"):
        ropex.load(tmp_path / "run")
    monkeypatch.undo()
    assert run(save_steps=50, resume=True)["finished"] is True
    ended, expected = (Path(tmp_path / n / "trained.safetensors").read_bytes() for n in ("run", "whole"))
    assert ended == expected
