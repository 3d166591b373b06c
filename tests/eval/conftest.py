"""A tiny random Llama and small tokenizers, built here: no test needs the network."""

import contextlib
import json
import random
import string
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from ropex.errors import RopexError
from ropex.eval.ruler.wording import load_wording, load_words

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<u>{{ m['content'] }}</u>{% endfor %}"
    "{% if add_generation_prompt %}<a>{% endif %}"
)


LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
VOCABULARY = 1500


@cache
def corpus() -> list[str]:
    """Words, numbers and letters at random; and RULER's English where its packages are there."""
    rng = random.Random(0)
    texts = ["".join(rng.choices(string.ascii_letters + string.digits, k=7)) for _ in range(400)]
    with contextlib.suppress(RopexError):
        texts += [text for text in asdict(load_wording()).values() for _ in range(30)]
        texts += [" " + word for words in load_words().values() for word in words]
    return texts


@cache
def make_tokenizer(
    *,
    bos: bool = False,
    chat: bool = False,
    metaspace: bool = False,
    uncut: bool = False,
    llama3: bool = False,
    size: int = VOCABULARY,
) -> PreTrainedTokenizerFast:
    """A byte-level BPE, or one whose words start with a mark put before the text too (as Llama 2's do).

    uncut: the latter, without cutting the text into words first. llama3: words as Llama 3 cuts them. With a BOS that
    it adds, and a chat template that writes one, if asked.
    """
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = (
        pre_tokenizers.Metaspace(prepend_scheme="always")
        if metaspace
        else pre_tokenizers.ByteLevel(add_prefix_space=False)
    )
    if uncut:
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        core.pre_tokenizer = None
    if llama3:
        words = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
        core.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    core.decoder = decoders.Metaspace() if metaspace or uncut else decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=[*string.printable] if metaspace or uncut else pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(corpus(), trainer)
    if bos:
        core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>")
    if chat:
        tokenizer.chat_template = TEMPLATE
    return tokenizer


def make_model(seed: int = 0) -> LlamaForCausalLM:
    """Random weights: 8 query heads on 2 key/value heads, head_dim 16, base 500000, window 512."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        bos_token_id=0,
        eos_token_id=1,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config).eval()


def _save(folder: Path, *, seed: int = 0, **tokenizer: bool) -> str:
    make_model(seed).save_pretrained(folder)
    make_tokenizer(**tokenizer).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def save_checkpoint() -> Callable[..., str]:
    """save_checkpoint(folder, seed=, bos=, chat=) writes a checkpoint and gives its path."""
    return _save


@pytest.fixture(scope="session")
def tokenizers() -> Callable[..., PreTrainedTokenizerFast]:
    """tokenizers(bos=, chat=, metaspace=, size=) builds one."""
    return make_tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="session")
def model() -> LlamaForCausalLM:
    return make_model()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return _save(tmp_path_factory.mktemp("tiny") / "base")


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Other weights, the same tokenizer."""
    return _save(tmp_path_factory.mktemp("tiny") / "other", seed=1)


@pytest.fixture(scope="session")
def lines() -> Callable[[Path], list[dict[str, Any]]]:
    """Reads a JSON-lines file."""
    return lambda path: [json.loads(line) for line in path.read_text().splitlines()]
