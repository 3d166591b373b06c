"""A tiny Llama with a byte tokenizer, as objects and as a checkpoint folder, and text for it."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WINDOW = 64


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
