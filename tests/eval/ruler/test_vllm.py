"""vLLM itself runs on GPUs alone. Its stand-in takes what LLM and SamplingParams take, and answers by transformers."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ropex.errors import OptionError
from ropex.eval.ruler import evaluate_ruler

pytest.importorskip("lm_eval")
pytest.importorskip("wonderwords")

STAND_IN = """
from types import SimpleNamespace

import torch
from transformers import AutoModelForCausalLM


class SamplingParams:
    def __init__(self, *, temperature, max_tokens, stop_token_ids, detokenize):
        assert temperature == 0 and not detokenize
        self.max_tokens, self.stops = max_tokens, stop_token_ids


class LLM:
    def __init__(self, model, *, dtype, max_model_len, tensor_parallel_size, skip_tokenizer_init, seed):
        assert skip_tokenizer_init and tensor_parallel_size == 1
        self.model = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval()
        self.longest = max_model_len

    @torch.no_grad()
    def generate(self, prompts, sampling_params, *, use_tqdm):
        for prompt in prompts:
            ids, given = list(prompt["prompt_token_ids"]), len(prompt["prompt_token_ids"])
            assert given + sampling_params.max_tokens <= self.longest
            while len(ids) - given < sampling_params.max_tokens and ids[-1] not in sampling_params.stops:
                ids.append(int(self.model(torch.tensor([ids])).logits[0, -1].argmax()))
            ended = "stop" if ids[-1] in sampling_params.stops else "length"
            said = SimpleNamespace(token_ids=ids[given:], finish_reason=ended)
            yield SimpleNamespace(outputs=[said])
"""


@pytest.fixture()
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "vllm.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(tmp_path / "site")
    yield
    sys.modules.pop("vllm", None)


@pytest.mark.usefixtures("stand_in")
def test_both_backends_give_the_same_answers(checkpoint: str, tmp_path: Path) -> None:
    asked = (["fwe", "niah_single_1"], [500], 2)
    ours = evaluate_ruler([checkpoint], *asked, out=tmp_path / "hf")
    theirs = evaluate_ruler([checkpoint], *asked, backend="vllm", out=tmp_path / "vllm")
    assert [r["score"] for r in theirs["results"]] == [r["score"] for r in ours["results"]]
    assert [r["method"] for r in theirs["results"]] == ["rope", "rope"]
    read = [(tmp_path / name / "answers.jsonl").read_text().splitlines() for name in ("hf", "vllm")]
    hf, vllm = (
        [(r["index"], r["prompt_sha256"], r["prediction"], r["stop"]) for r in map(json.loads, lines)] for lines in read
    )
    assert hf == vllm
    assert evaluate_ruler([checkpoint], *asked, backend="vllm", out=tmp_path / "vllm") == theirs


@pytest.mark.usefixtures("stand_in")
def test_what_only_ropex_reads_is_refused_before_anything_is_loaded(checkpoint: str) -> None:
    for only_ours in (f"{checkpoint}@yarn:2", "nano@adarope:2"):
        with pytest.raises(OptionError, match="give a stock checkpoint or export"):
            evaluate_ruler([checkpoint, only_ours], ["fwe"], [300], backend="vllm")


@pytest.mark.usefixtures("stand_in")
def test_what_vllm_would_refuse_is_refused_before_it_is_started(checkpoint: str) -> None:
    with pytest.raises(OptionError, match="no more than the 512 tokens"):
        evaluate_ruler([checkpoint], ["fwe"], [400, 700], backend="vllm")
    with pytest.raises(OptionError, match="leave --batch-size out"):
        evaluate_ruler([checkpoint], ["fwe"], [400], backend="vllm", batch_size=2)


def test_without_vllm_the_error_says_what_to_install(checkpoint: str) -> None:
    with pytest.raises(OptionError, match="pip install vllm"):
        evaluate_ruler([checkpoint], ["fwe"], [300], backend="vllm")
    with pytest.raises(OptionError, match="choose from hf, vllm"):
        evaluate_ruler([checkpoint], ["fwe"], [300], backend="onnx")
