"""Small checkpoints with random weights. 8 query and 2 key/value heads, since 9/3 and 4/2 cannot reveal a wrong count;
a head_dim that is not hidden/heads; a theta that is no library's default."""

import json
import os
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

WINDOW = 128


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory):
    os.environ["ROPEX_CACHE"] = str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(autouse=True, scope="session")
def neutral_folder(tmp_path_factory):
    """Python started at the repository's root would take its folder `ropex` for the installed package."""
    os.chdir(tmp_path_factory.mktemp("cwd"))


def tiny_config(**changes) -> LlamaConfig:
    base = {
        "hidden_size": 64,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "num_hidden_layers": 3,
        "vocab_size": 97,
        "intermediate_size": 96,
        "max_position_embeddings": WINDOW,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return LlamaConfig(**(base | changes))


def tiny_llama(seed: int = 0, **changes) -> LlamaForCausalLM:
    """Weights large enough that attention is far from uniform and logits far from zero."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(tiny_config(**changes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.25)
    return model


@pytest.fixture
def model() -> LlamaForCausalLM:
    return tiny_llama()


@pytest.fixture
def make_model():
    return tiny_llama


@pytest.fixture
def make_config():
    return tiny_config


@pytest.fixture
def tokens() -> torch.Tensor:
    """[2, 200]: positions well past 0, and past the window of 128."""
    return torch.randint(3, 97, (2, 200), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def folder(tmp_path, model) -> Path:
    """The model on disk, as transformers saves it."""
    path = tmp_path / "T-llama"
    model.save_pretrained(path)
    return path


@pytest.fixture
def sharded(tmp_path, model) -> Path:
    """The model on disk in several shards."""
    path = tmp_path / "T-llama-sharded"
    model.save_pretrained(path, max_shard_size="100KB")
    return path


@pytest.fixture
def edit_config():
    def edit(path: Path, drop: tuple[str, ...] = (), **changes) -> None:
        config = json.loads((path / "config.json").read_text())
        config = {k: v for k, v in config.items() if k not in drop} | changes
        (path / "config.json").write_text(json.dumps(config))

    return edit


@pytest.fixture
def stir():
    """Move every learned rotary value far from the identity, differently for every head."""

    def move(model, seed: int = 5) -> None:
        from ropex.seam import rotaries

        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for rotary in rotaries(model):
                rotary.delta.copy_(0.3 * torch.randn(rotary.delta.shape, generator=generator))
                rotary.tau.copy_(0.5 + torch.rand(rotary.tau.shape, generator=generator))
                rotary.gamma.copy_(2 * torch.randn(rotary.gamma.shape, generator=generator))

    return move
