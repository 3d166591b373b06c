"""Two processes with half of the backbone each (FSDP2) train what one process with all of it does.

On the CPU the windows of a step are summed in the same order either way, so what is compared is the same arithmetic;
the tolerances leave room for the order alone in which gradients of whole weights are added up.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import tiny
from processes import EXTEND, SHARDED, assert_same_run, in_two, log_of

import ropex
from ropex.convert.export import export
from ropex.errors import OptionError, UnsupportedError
from ropex.families import FAMILIES
from ropex.train import devices
from ropex.train.extend import extend

# Looks at the model after the run: half of the backbone is here, and what a stage trains is whole and float32.
LOOKED_AT = (
    """
import torch
from torch.distributed.tensor import DTensor
import ropex.train.extend as module
from ropex.seam import rotaries
from ropex.train.devices import held
from ropex.train.trainable import lora_matrices

models, shard = [], module.shard
module.shard = lambda model: (models.append(model), shard(model))
extend = module.extend
"""
    + EXTEND.replace("from ropex.train.extend import extend\n", "")
    + """
model = models[0]
small = [p for r in rotaries(model) for p in r.parameters()]
small += [p for _, a, b in lora_matrices(model) for p in (a, b)]
assert len(small) == 14 and all(p.dtype == torch.float32 and not isinstance(p, DTensor) for p in small)
backbone = [p for p in model.parameters() if not any(p is s for s in small)]
assert all(isinstance(p, DTensor) and p.dtype == torch.bfloat16 for p in backbone)
here, all_of_it = (sum(p.numel() for p in ps) for ps in ([held(p) for p in backbone], backbone))
assert abs(here / all_of_it - 0.5) < 0.01, (here, all_of_it)
"""
)


@pytest.fixture(scope="module")
def arguments(text: Path) -> dict[str, Any]:
    return {
        "target": 256, "window": 64, "data": [str(text)], "steps_warmup": 3, "steps_joint": 3, "save_steps": 2,
        "lr_lora": 1e-2,
    }  # fmt: skip


def test_stages_in_bfloat16_and_the_export(checkpoint: Path, arguments: dict[str, Any], tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    asked = arguments | {"dtype": "bfloat16", "grad_ckpt": True}
    extend(checkpoint, one, accumulation=2, **asked)
    said = in_two(checkpoint, two, asked, LOOKED_AT, **SHARDED)
    assert "2 processes, the backbone in shards (FSDP2)" in said
    assert_same_run(two, one, rtol=1e-5, atol=1e-6, loss=1e-6, norm=1e-5)
    assert {p.name for p in (two / "joint").iterdir()} == {p.name for p in (one / "joint").iterdir()}
    export(two, tmp_path / "exported", dtype="float32")
    ids = torch.randint(257, (1, 150), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        logits, loaded = (ropex.load(p, "float32")(ids).logits for p in (tmp_path / "exported", two))
    torch.testing.assert_close(logits, loaded, rtol=1e-5, atol=1e-5)


def test_whole_weights_with_shared_tensors_and_accumulation(
    tiny_llama: Callable, byte_tokenizer: Any, arguments: dict[str, Any], tmp_path: Path
) -> None:
    tied = tmp_path / "tied"
    tiny_llama(tie_word_embeddings=True).save_pretrained(tied)
    byte_tokenizer.save_pretrained(tied)
    asked = arguments | {"strategy": "full", "share_heads": True, "dtype": "float32", "lr_full": 1e-3}
    extend(tied, tmp_path / "one", accumulation=4, **asked)
    in_two(tied, tmp_path / "two", asked | {"accumulation": 2}, **SHARDED)
    # Adam's first steps are the gradient's sign: where one is all but 0, another order of adding it up may turn it
    assert_same_run(tmp_path / "two", tmp_path / "one", rtol=1e-4, atol=1e-5, loss=1e-5, norm=1e-5)


# Both processes kill themselves after a step.
KILLED = """
import os, signal
from ropex.train.report import Report
def step(self, line):
    if (line["stage"], line["step"]) == ({stage!r}, 3):
        os.kill(os.getpid(), signal.SIGKILL)
Report.step = step
"""


@pytest.mark.parametrize(("strategy", "stage"), [("warmup-joint", "joint"), ("full", "full")])
def test_a_killed_run_resumes_to_the_same_bits(
    checkpoint: Path, arguments: dict[str, Any], tmp_path: Path, strategy: str, stage: str
) -> None:
    asked = arguments | {"strategy": strategy, "dtype": "float32", "steps_warmup": 1}
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    in_two(checkpoint, whole, asked, **SHARDED)
    in_two(checkpoint, killed, asked, KILLED.format(stage=stage) + EXTEND, fails=True, **SHARDED)
    assert (killed / stage / "checkpoint-2").is_dir()
    assert not (killed / "trained.safetensors").exists()
    said = in_two(checkpoint, killed, asked | {"resume": True}, **SHARDED)
    assert f"stage {stage} continues after step 2" in said
    assert log_of(killed) == log_of(whole)
    assert (killed / "trained.safetensors").read_bytes() == (whole / "trained.safetensors").read_bytes()


def test_a_run_resumes_with_as_many_readers_as_it_began_with(
    checkpoint: Path, arguments: dict[str, Any], tmp_path: Path
) -> None:
    extend(checkpoint, tmp_path / "run", **arguments | {"strategy": "warmup", "steps_warmup": 1})
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["readers"] == 1
    (tmp_path / "run" / "run.json").write_text(json.dumps(run | {"readers": 2}))
    (tmp_path / "run" / "trained.safetensors").unlink()
    with pytest.raises(OptionError, match="processes was 2 and is 1"):
        extend(checkpoint, tmp_path / "run", resume=True, **arguments | {"strategy": "warmup", "steps_warmup": 1})


def test_the_command_of_the_readme(checkpoint: Path, text: Path, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0", "--num_processes", "2"]
    ropex_ = [str(Path(sys.executable).with_name("ropex")), "extend", str(checkpoint), "-o", str(tmp_path / "run")]
    asked = ["--target", "256", "--window", "64", "--data", str(text), "--strategy", "warmup", "--steps-warmup", "1"]
    run = subprocess.run(
        [*launch, "--use_fsdp", "--fsdp_version", "2", *ropex_, *asked, "--eval-data", str(text / "one.txt"), "--json"],
        capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[:6000]
    assert "2 processes, the backbone in shards (FSDP2)" in run.stderr
    assert "nll" in json.loads(run.stdout)  # once, from the first process


@pytest.mark.parametrize(
    ("asked", "error", "said"),
    [
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, UnsupportedError, "DeepSpeed is not supported"),
        ({"ACCELERATE_USE_FSDP": "true"}, OptionError, "add --fsdp_version 2"),
        (SHARDED | {"FSDP_ACTIVATION_CHECKPOINTING": "true"}, OptionError, "--grad-ckpt"),
        (SHARDED | {"FSDP_OFFLOAD_PARAMS": "true"}, OptionError, "fsdp_offload_params"),
        (SHARDED | {"ACCELERATE_MIXED_PRECISION": "bf16"}, OptionError, "--dtype"),
        (
            SHARDED | {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_TP_SIZE": "2"},
            UnsupportedError,
            "dp_shard_size and cp_size",
        ),
        (
            SHARDED | {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_CP_SIZE": "2"},
            OptionError,
            "for 2 processes, and there are 1",
        ),
        (
            {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_CP_SIZE": "2"},
            OptionError,
            "--use_fsdp --fsdp_version 2",
        ),
    ],
)
def test_what_another_engine_would_do_is_refused(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, str], error: type[Exception], said: str
) -> None:
    monkeypatch.setattr(devices.dist, "is_initialized", lambda: True)
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(error, match=said):
        devices.launched()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_layers_to_shard_are_found(name: str) -> None:
    model = tiny(name)
    assert len(devices.layers_of(model)) == model.config.num_hidden_layers
    assert devices.layers_of(model)[0] in model.get_decoder().modules()


def test_no_process_is_left_without_a_piece_of_a_tensor() -> None:
    shapes = {
        (4, 3): 0,
        (7, 3): 0,
        (257, 64): 0,
        (1, 64): 1,
        (5, 64): 1,
        (6, 3, 8): 2,
        (1, 3): None,
        (1,): None,
        (): None,
    }
    assert {shape: devices._cut(torch.empty(shape), 4) for shape in shapes} == shapes
