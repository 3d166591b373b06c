"""Checkpoints by their name on the Hugging Face Hub, kept in the Hub's own cache."""

import re
import sys
from pathlib import Path

from ropex.errors import CheckpointError

_FILES = ["*.json", "*.safetensors", "*.model", "*.tiktoken", "*.txt", "*.jinja", "LICENSE*"]
_PICKLES = ["pytorch_model*.bin", "adapter_model.bin"]
_NOT = ["*/*", "consolidated*"]  # other formats of the same weights
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def looks_like_hub_id(text: str) -> bool:
    """True for `org/name` where no such file or folder is here."""
    return bool(_NAME.fullmatch(text)) and not text.endswith(".gguf") and not Path(text).exists()


def fetch(name: str) -> Path:
    """The folder of `org/name` in the Hub's cache, downloaded if it is not there: config, tokenizer and safetensors
    weights, or PyTorch's own where there are no others; no code. The Hub's library shows its bars on stderr. Errors:
    CheckpointError when the Hub cannot be reached or does not give it."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        folder = Path(snapshot_download(name, allow_patterns=_FILES, ignore_patterns=_NOT))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(name, allow_patterns=_FILES + _PICKLES, ignore_patterns=_NOT))
    except Exception as error:  # the Hub's own errors, its HTTP client's, and the disk's
        raise CheckpointError(_told(name, error)) from None
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise CheckpointError(f"{name} on the Hub holds no safetensors and no pytorch_model.bin: choose another")
    return folder


def _told(name: str, error: Exception) -> str:
    """What went wrong and what to do, without the error's own text: it may show a request's headers."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return f"{name} is gated: accept its terms on its page on the Hub, then set HF_TOKEN to a token of yours"
    if isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        return f"{name} is neither a folder here nor public on the Hub: correct it, or set HF_TOKEN if it is private"
    if isinstance(error, errors.HfHubHTTPError):
        status = error.response.status_code
        return f"the Hub refused {name} with status {status}: try again later, or give a folder with the checkpoint"
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        return f"{name} could not be written to the Hub's cache ({error.strerror}): free some space or set HF_HOME"
    why = type(error.__cause__ or error).__name__
    return (
        f"{name} is no folder here and the Hub cannot be reached ({why}): correct the path, or download it elsewhere "
        "and give the folder"
    )
