"""Checkpoints as the evaluations see them. Every evaluation opens its models and tokenizers here."""

import hashlib
import json
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import ropex
from ropex.errors import CheckpointError
from ropex.seam import rope_of_model

_CHUNK = 2**22  # values of a tensor that are summed at once
_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of a value


def load_model(checkpoint: str, dtype: str | torch.dtype | None = None) -> PreTrainedModel:
    """The checkpoint (`PATH` or `PATH@method:factor`) in eval mode, on the GPU where there is one."""
    return ropex.load(checkpoint, dtype=dtype, device="cuda" if torch.cuda.is_available() else None)


def load_tokenizer(checkpoint: str) -> PreTrainedTokenizerBase:
    """The checkpoint's tokenizer, checked to produce tokens at all (an empty vocabulary measures nothing)."""
    tokenizer = ropex.load_tokenizer(checkpoint)
    if not encode(tokenizer, "The quick brown fox."):
        raise CheckpointError(f"{checkpoint} has a tokenizer that gives no tokens: restore its files")
    return tokenizer


def method_of(model: PreTrainedModel) -> str:
    """The name of the model's rotary method, such as "rope" or "adarope"."""
    return ropex.method_of(model)


def native_window(model: PreTrainedModel) -> int:
    """The length, in tokens, that the checkpoint was trained for before any extension."""
    return rope_of_model(model).window


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of the text alone: no BOS, no EOS, no truncation."""
    return tokenizer.encode(text, add_special_tokens=False, truncation=False, verbose=False)


def encode_all(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text alone, as `encode` gives them, on as many cores as the tokenizer takes."""
    if not texts:
        return []
    ids: list[list[int]] = tokenizer(
        list(texts), add_special_tokens=False, truncation=False, verbose=False, return_attention_mask=False,
        return_token_type_ids=False,
    ).input_ids  # fmt: skip
    return ids


def versions(*more: str) -> dict[str, str]:
    """Of ropex, torch, transformers and the packages named, for reports; those that are not installed are left out."""
    found = {}
    for name in ("ropex", "torch", "transformers", *more):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def default_bos(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The BOS id, as a list of one, if the tokenizer starts its texts with it unasked; else an empty list."""
    bos = tokenizer.bos_token_id
    if bos is None or tokenizer.encode("a")[:1] != [bos] or encode(tokenizer, "a")[:1] == [bos]:
        return []
    return [bos]


def weights_fingerprint(model: PreTrainedModel) -> str:
    """A hash of what the model computes with: rope settings, and all bits of every parameter and buffer."""
    digest = hashlib.sha256()
    rope = getattr(model.config.get_text_config(), "rope_parameters", None)
    digest.update(json.dumps([rope, getattr(model, "ropex_spec", None)], default=repr).encode())
    for kind in (model.named_parameters(), model.named_buffers()):
        for name, tensor in kind:
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {_checksum(tensor)}".encode())
    return digest.hexdigest()[:16]


def _checksum(tensor: torch.Tensor) -> int:
    """A sum of all bits, on the tensor's device: each value, as a whole number, times an odd number that tells its
    place, modulo 2**64. A change of any one value changes it."""
    flat = tensor.detach().reshape(-1)
    flat = flat.contiguous().view(_WHOLE[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, len(flat), _CHUNK):
        part = flat[start : start + _CHUNK].long()
        total += (part * torch.arange(2 * start + 1, 2 * (start + len(part)), 2, device=flat.device)).sum()
    return int(total)


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """A hash of the vocabulary and of how a probe text is cut: equal for tokenizers that cut texts alike."""
    probe = "One of 1234567 words, VAR ABCDE = 98765;\n  12. été ... 'xqzjkv'\t<html>"
    vocabulary = sorted(tokenizer.get_vocab().items())
    parts: list[Any] = [vocabulary, encode(tokenizer, probe), default_bos(tokenizer)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]
