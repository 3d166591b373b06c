"""load: a ready transformers model for a stock checkpoint and for everything that ropex writes."""

from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ropex.checkpoint import (
    RUN,
    TRAINED,
    Checkpoint,
    is_gguf,
    is_run,
    locate,
    open_checkpoint,
    open_gguf,
    run_source,
    split_method,
)
from ropex.config import ADAROPE, canonical, read_json, rope_of
from ropex.errors import CheckpointError, OptionError, UnsupportedError, first_line
from ropex.lora import LORA_A, LORA_B, merge_into
from ropex.seam import ROTARY_TENSORS, attach, load_rotary_state
from ropex.spec import RotarySpec, make_spec

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

DTYPES = {
    "float32": torch.float32, "fp32": torch.float32, "bfloat16": torch.bfloat16, "bf16": torch.bfloat16,
    "float16": torch.float16, "fp16": torch.float16,
}  # fmt: skip


Tensors = dict[str, torch.Tensor]


def load(
    path: str | Path,
    dtype: str | torch.dtype | None = None,
    *,
    device: str | torch.device | None = None,
    attn: str | None = None,
) -> "PreTrainedModel":
    """A model in eval mode from a checkpoint folder, a .gguf file, a run of `ropex extend`, or `nano`.

    `PATH@yarn:2` applies a method on the fly, here YaRN by a factor of 2. dtype: as stored unless given (a GGUF file:
    float32); rotary tensors are float32 always. attn: transformers' attention implementation (sdpa, eager, ...).
    Errors: CheckpointError for what is missing or damaged, UnsupportedError for an unknown architecture.
    """
    argument, name, factor = split_method(str(path))
    model = _load(locate(argument), as_dtype(dtype), attn)
    if name is not None:
        attach(model, make_spec(name, rope_of(model.config.to_dict()), factor=factor))
    return model.to(torch.device(device)).eval() if device is not None else model.eval()  # type: ignore[arg-type]


def load_tokenizer(path: str | Path) -> "PreTrainedTokenizerBase":
    """The checkpoint's tokenizer. No code from the checkpoint is run."""
    from transformers import AutoTokenizer

    folder = _source(locate(split_method(str(path))[0]))
    with quiet():
        try:
            if is_gguf(folder):
                return AutoTokenizer.from_pretrained(folder.parent, gguf_file=folder.name)
            config = backbone_config(read_json(folder / "config.json"))
            return AutoTokenizer.from_pretrained(folder, config=config, trust_remote_code=False)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{folder} has no usable tokenizer ({first_line(error)})") from None


def as_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    if isinstance(dtype, str):
        if dtype not in DTYPES:
            raise OptionError(f"unknown dtype '{dtype}': choose one of {', '.join(DTYPES)}")
        return DTYPES[dtype]
    return dtype


def backbone_config(config: dict[str, Any]) -> "PreTrainedConfig":
    """The stock config inside a checkpoint's config.json."""
    from transformers import AutoConfig

    rope_of(config)  # contradictions surface here, before transformers picks a side
    plain = {k: v for k, v in canonical(config).items() if k not in (ADAROPE, "auto_map", "model_type")}
    model_type = config[ADAROPE]["backbone"] if ADAROPE in config else config["model_type"]
    try:
        return AutoConfig.for_model(model_type, **plain)
    except Exception as error:  # transformers' validators raise many kinds
        raise CheckpointError(f"config.json is not a valid {model_type} config: {first_line(error)}") from None


def _source(path: Path) -> Path:
    """The checkpoint behind a run, or the path itself."""
    while is_run(path):
        path = run_source(path)
    return path


def _load(path: Path, dtype: torch.dtype | None, attn: str | None) -> "PreTrainedModel":
    if is_gguf(path):
        return _load_gguf(path, dtype, attn)
    if is_run(path):
        return _load_run(path, dtype, attn)
    return load_checkpoint(open_checkpoint(path), dtype, attn)


def load_checkpoint(
    checkpoint: Checkpoint, dtype: torch.dtype | None = None, attn: str | None = None
) -> "PreTrainedModel":
    """The model of a folder whose headers were read."""
    from safetensors import SafetensorError, safe_open
    from transformers import AutoModelForCausalLM

    with quiet():
        config = backbone_config(checkpoint.config)
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                checkpoint.path, config=config, dtype=dtype or "auto", attn_implementation=attn,
                use_safetensors=True, output_loading_info=True,
            )  # fmt: skip
        except (ImportError, OSError, RuntimeError, TypeError, ValueError, SafetensorError) as error:
            raise CheckpointError(f"{checkpoint.path} does not load: {first_line(error)}") from None
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise CheckpointError(f"{checkpoint.path} lacks the tensor {missing[0]}: the checkpoint is incomplete")
    rotary_names = [n for n in checkpoint.tensors if n.rpartition(".")[0].endswith(f".{ADAROPE}")]
    unknown = sorted(n for n in set(info["unexpected_keys"]) - set(rotary_names) if not n.endswith("inv_freq"))
    if unknown:
        raise CheckpointError(f"{checkpoint.path} has the tensor {unknown[0]}, which {config.model_type} does not know")
    spec = checkpoint.spec
    if spec is None:
        if rotary_names:
            raise CheckpointError(f"{checkpoint.path} has rotary tensors but config.json lacks the '{ADAROPE}' block")
        return model
    attach(model, spec)
    tensors = {}
    for name in rotary_names:
        with safe_open(checkpoint.tensors[name].file, "pt") as shard:
            tensors[name] = shard.get_tensor(name)
    load_rotary_state(model, tensors, str(checkpoint.path))
    return model


def _load_gguf(path: Path, dtype: torch.dtype | None, attn: str | None) -> "PreTrainedModel":
    from transformers import AutoModelForCausalLM, GgufConfig

    _refuse_lost_rope(path)
    with quiet(), redirect_stderr(StringIO()):  # its dequantising bar goes straight to stderr
        try:
            model = AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, quantization_config=GgufConfig(dequantize=True),
                dtype=dtype or torch.float32, attn_implementation=attn,
            )  # fmt: skip
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise CheckpointError(
                f"{path} does not load as GGUF ({first_line(error)}): try `ropex convert {path} -o OUT --to rope`"
            ) from None
    rope_of(model.config.to_dict())
    return model


def _refuse_lost_rope(path: Path) -> None:
    """transformers reads neither per-pair factors nor scaling from a GGUF file: its model would turn otherwise."""
    reader = open_gguf(path)
    scaling = {key.split(".", 1)[1]: field.contents() for key, field in reader.fields.items() if ".rope.scal" in key}
    scaled = scaling.get("rope.scaling.type", "linear") != "none" and (
        scaling.get("rope.scaling.factor", scaling.get("rope.scale_linear", 1.0)) != 1.0
    )
    factors = any(tensor.name == "rope_freqs.weight" for tensor in reader.tensors)
    if factors or scaled or scaling.get("rope.scaling.attn_factor", 1.0) != 1.0:
        raise UnsupportedError(
            f"{path} changes its frequencies in a way that transformers would drop: write it as a folder first, with "
            f"`ropex convert {path} -o OUT --to rope`"
        )


def _load_run(path: Path, dtype: torch.dtype | None, attn: str | None) -> "PreTrainedModel":
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    run = read_json(path / RUN)
    if not (path / TRAINED).exists():
        raise CheckpointError(f"{path} is a run that has not finished: continue it with `ropex extend --resume`")
    model = _load(run_source(path), dtype, attn)
    try:
        tensors = load_file(path / TRAINED)
    except SafetensorError as error:
        raise CheckpointError(f"{path / TRAINED} is damaged: {error}") from None
    rotary, lora, weights = split_trained(tensors)
    if not hasattr(model, "ropex_spec"):
        attach(model, RotarySpec(**run["spec"]))
    load_rotary_state(model, rotary, str(path / TRAINED))
    set_weights(model, weights, str(path / TRAINED))
    merge_into(model, lora, run["lora"]["alpha"] / run["lora"]["r"] if lora else 1.0)
    return model


@torch.no_grad()
def set_weights(model: "PreTrainedModel", weights: Tensors, where: str) -> None:
    """Copy whole weights that a run trained into the model that they belong to."""
    places = dict(model.named_parameters())
    for name, value in weights.items():
        if name not in places or places[name].shape != value.shape:
            raise CheckpointError(f"{where} holds {name} {list(value.shape)}, which the model does not have")
        places[name].copy_(value)


def split_trained(tensors: dict[str, torch.Tensor]) -> tuple[Tensors, Tensors, Tensors]:
    """What a run trained, by name: (rotary tensors, LoRA matrices, whole weights)."""
    rotary = {n: t for n, t in tensors.items() if n.rpartition(".")[2] in ROTARY_TENSORS}
    lora = {n: t for n, t in tensors.items() if n.endswith((LORA_A, LORA_B))}
    return rotary, lora, {n: t for n, t in tensors.items() if n not in rotary and n not in lora}


@contextmanager
def quiet() -> Iterator[None]:
    """transformers' notices and bars off: what matters is checked here and raised."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    bars = logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
