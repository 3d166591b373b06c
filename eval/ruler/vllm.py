"""Answers by vLLM, where it is installed, for checkpoints that stock transformers reads."""

import hashlib
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import GenerationConfig, PreTrainedTokenizerBase

from ropex.checkpoint import is_gguf, is_run, locate, open_checkpoint, split_method
from ropex.errors import OptionError
from ropex.eval.ruler.generate import Answer, Ask, stop_ids
from ropex.eval.share import processes
from ropex.loading import as_dtype
from ropex.spec import method_name

_ROWS = 256  # prompts handed over at a time; the engine makes its own batches of them


def check_vllm(checkpoints: Sequence[str], longest: int, batch_size: int | None) -> None:
    """Raise OptionError, before anything is loaded, where vLLM is missing or cannot read a checkpoint or a length."""
    if find_spec("vllm") is None:
        raise OptionError("vLLM is not installed: pip install vllm, or leave --backend out")
    if processes().num_processes > 1:
        raise OptionError("vLLM takes all GPUs by itself: start one process")
    if batch_size is not None:
        raise OptionError("vLLM makes batches of its own: leave --batch-size out")
    for checkpoint in checkpoints:
        path, name, _ = split_method(checkpoint)
        folder = locate(path)
        if name is not None or is_run(folder) or is_gguf(folder) or open_checkpoint(folder).spec is not None:
            raise OptionError(
                f"vLLM reads what stock transformers reads, and {checkpoint} it does not: give a stock checkpoint or "
                "export, or leave --backend out"
            )
        known = int(open_checkpoint(folder).config.get("max_position_embeddings") or longest)
        if longest > known:
            raise OptionError(
                f"vLLM reads no more than the {known} tokens of {checkpoint}: use shorter ones, or leave --backend out"
            )


class Vllm:
    """One checkpoint's engine, for prompts and answers that take up to `longest` tokens together."""

    def __init__(
        self, checkpoint: str, dtype: str | torch.dtype | None, tokenizer: PreTrainedTokenizerBase, longest: int
    ) -> None:
        from vllm import LLM

        found = open_checkpoint(locate(checkpoint))
        self.tokenizer, self.notes = tokenizer, list[str]()
        self.method = method_name(found.config)
        self.dtype = str(as_dtype(dtype or found.dtype))
        self.weights = _digest([found.path / "config.json", *found.shards])
        has_settings = (found.path / "generation_config.json").exists()
        settings = GenerationConfig.from_pretrained(found.path) if has_settings else None
        self._stops = stop_ids(settings, tokenizer)
        gpus, heads, kv_heads = torch.cuda.device_count(), found.rope.heads, found.rope.kv_heads
        divides = gpus and heads % gpus == 0 and (kv_heads % gpus == 0 or gpus % kv_heads == 0)
        self._engine = LLM(
            model=str(found.path),
            dtype=self.dtype.removeprefix("torch."),
            max_model_len=longest,
            tensor_parallel_size=gpus if divides else 1,
            skip_tokenizer_init=True,
            seed=0,
        )

    def rows(self, length: int) -> int:
        """Prompts that are handed over at a time, of which the engine makes batches of its own."""
        return _ROWS

    def answers(self, asks: Sequence[Ask], length: int, tokens_to_generate: int) -> list[Answer]:
        """The most likely continuation of each prompt, up to EOS or the limit."""
        from vllm import SamplingParams

        greedy = SamplingParams(
            temperature=0.0, max_tokens=tokens_to_generate, stop_token_ids=self._stops, detokenize=False
        )
        prompts = [{"prompt_token_ids": list(ask.input_ids)} for ask in asks]
        answers = []
        for told in self._engine.generate(prompts, greedy, use_tqdm=False):
            said = told.outputs[0]
            ids = list(said.token_ids)
            text = str(self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
            answers.append(Answer(text, len(ids), "eos" if said.finish_reason == "stop" else "limit"))
        return answers


def _digest(files: Sequence[Path]) -> str:
    """A hash of their content."""
    whole = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    return whole.hexdigest()[:16]
