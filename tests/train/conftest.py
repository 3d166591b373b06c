"""A tiny Llama with a byte tokenizer, as objects and as a checkpoint folder, and text for it."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WINDOW = 64
SHARDED = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}  # what `accelerate launch` sets
EXTEND = """
import json, sys
from ropex.train.extend import extend
src, out, arguments = json.loads(sys.argv[1])
extend(src, out, **arguments)
"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, after a beginning-of-sequence token."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({"<s>": 0} | {c: i for i, c in enumerate(letters, 1)}, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>")


def make_llama(**changes: object) -> LlamaForCausalLM:
    """8 query and 2 key/value heads of 16 channels, native window 64; weights that make attention uneven."""
    torch.manual_seed(0)
    config = LlamaConfig(
        **{
            "vocab_size": 257, "hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": 2,
            "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": WINDOW,
            "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}, "initializer_range": 0.1,
        }
        | changes
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def tiny_llama() -> Callable[..., LlamaForCausalLM]:
    """Makes the model, with changes to its config."""
    return make_llama


@pytest.fixture
def byte_tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    make_llama().save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three documents of some 2,000 words."""
    folder = tmp_path_factory.mktemp("text")
    draw = random.Random(1)
    words = [
        "ash",
        "birch",
        "cedar",
        "elm",
        "fir",
        "hazel",
        "larch",
        "maple",
        "oak",
        "pine",
        "rowan",
        "willow",
    ]
    for name in ("one.txt", "two.md", "three.txt"):
        (folder / name).write_text(" ".join(draw.choices(words, k=2000)))
    return folder


@pytest.fixture
def in_two(tmp_path: Path) -> Callable[..., str]:
    """Runs a script with (source, out, arguments) in two gloo processes, and returns what it said."""

    def launch(
        source: Path, out: Path, arguments: dict[str, Any], script: str = EXTEND, fails: bool = False, **env: str
    ) -> str:
        (tmp_path / "run.py").write_text(script)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        run = subprocess.run(
            [*command, str(tmp_path / "run.py"), json.dumps([str(source), str(out), arguments])],
            capture_output=True, text=True, timeout=300, env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
        )  # fmt: skip
        assert (run.returncode != 0) == fails, run.stderr[:6000]
        return run.stderr

    return launch


@pytest.fixture
def log_of() -> Callable[[Path], list[dict[str, Any]]]:
    """Reads the log of a run, without the lines' times."""

    def read(run: Path) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
        return [{k: v for k, v in line.items() if k not in ("seconds", "tokens_per_second")} for line in lines]

    return read


@pytest.fixture
def assert_same_run(log_of: Callable) -> Callable[..., None]:
    """Holds a run to another: what they logged, and what they trained."""

    def compare(run: Path, other: Path, rtol: float, atol: float, loss: float, norm: float) -> None:
        ours, theirs = log_of(run), log_of(other)
        assert [line["windows"] for line in ours] == [line["windows"] for line in theirs]
        for a, b in zip(ours, theirs, strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=loss)
            assert a["grad_norm"] == pytest.approx(b["grad_norm"], rel=norm)
        first, second = (load_file(folder / "trained.safetensors") for folder in (run, other))
        assert first.keys() == second.keys()
        for name, tensor in first.items():
            assert tensor.dtype == second[name].dtype
            torch.testing.assert_close(tensor, second[name], rtol=rtol, atol=atol)

    return compare
