"""plan: what a run would need of memory, from the checkpoint's headers alone; and the refusal of what cannot fit."""

from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import torch

from ropex.checkpoint import is_gguf, is_run, locate, open_checkpoint, run_source
from ropex.errors import OptionError, UnsupportedError
from ropex.loading import as_dtype, backbone_config
from ropex.seam import attach, rope_of_model
from ropex.spec import make_spec, spec_of
from ropex.train.devices import held
from ropex.train.memory import estimate, size_of
from ropex.train.report import size
from ropex.train.settings import Settings, check, resolve
from ropex.train.stages import Stage
from ropex.train.trainable import Trained, add_lora, choose, trainable

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def plan(source: str, devices: int = 1, **asked: Any) -> dict[str, Any]:
    """Memory of each stage of `extend(source, **asked)` on each of so many devices, over which FSDP2 shards the
    backbone: {"stages": {name: {part: bytes}}, "device", "available", "notes", "settings"}. No weight is read. Errors:
    OptionError for settings that cannot be."""
    if devices < 1:
        raise OptionError(f"a plan for {devices} devices: give 1 or more")
    names = {f.name for f in fields(Settings)}
    settings = Settings(**{"target": None, **{k: v for k, v in asked.items() if k in names}})
    check(settings)
    model = _skeleton(source, settings, asked.get("params"))
    spec: Any = model.ropex_spec
    settings = resolve(settings, spec.target, str(model.dtype).removeprefix("torch."))
    device, available = _device()
    stages, notes = {}, []
    for stage in settings.stages:
        if stage.lora:
            add_lora(model, settings.lora_r, settings.lora_alpha, settings.seed)
        choose(model, stage, settings.ada_freq, settings.ada_scale, settings.all_pairs)
        stages[stage.name] = estimate(model, trainable(model), settings, shards=devices)
        if said := too_large(model, stage, trainable(model), settings, available, shards=devices):
            notes.append(said)
    return {"stages": stages, "device": device, "available": available, "notes": notes, "settings": settings.block()}


def require_fit(model: "PreTrainedModel", stage: Stage, settings: Settings, pieces: int = 1) -> None:
    """Refuse a stage that cannot fit, with the setting that would. pieces: processes that share a window's tokens."""
    loaded = sum(size_of(held(p)) for p in model.parameters())
    on_device = next(model.parameters()).device.type != "cpu" or not torch.cuda.is_available()
    _, available = _device()
    free = available + (loaded if on_device else 0)
    if said := too_large(model, stage, trainable(model), settings, free, pieces):
        raise OptionError(said)


def too_large(
    model: "PreTrainedModel",
    stage: Stage,
    tensors: list[Trained],
    settings: Settings,
    available: int,
    pieces: int = 1,
    shards: int = 1,
) -> str | None:
    """What to say of a stage that needs more than there is, or None. Estimates are rough: half as much again passes."""

    def total(settings: Settings) -> int:
        return estimate(model, tensors, settings, pieces, shards)["total"]

    needed = total(settings)
    if needed <= 1.5 * available:
        return None
    plain = replace(settings, plain_skip=True)  # no change where nothing stands for skipped tokens
    cures = [
        ("--grad-ckpt", replace(settings, grad_ckpt=True)),
        ("--plain-skip", plain),
        ("--plain-skip and --grad-ckpt", replace(plain, grad_ckpt=True)),
        ("--batch-size 1 with --accumulation", replace(settings, batch_size=1)),
        ("--grad-ckpt and --batch-size 1", replace(settings, grad_ckpt=True, batch_size=1)),
    ]
    window = settings.sample_tokens
    while not settings.pack and window > 1024:
        window //= 2
        cures.append(
            (f"--window {window} and --grad-ckpt", replace(settings, grad_ckpt=True, window=window, batch_size=1))
        )
    fits = next((name for name, wish in cures if total(wish) <= available), None)
    cure = f"{fits} would fit" if fits else "no setting makes it fit: take more memory, or FSDP2 over more devices"
    return f"stage {stage.name} needs about {size(needed)} and there are {size(available)}: {cure}"


def _device() -> tuple[str, int]:
    """What a process trains on, and the bytes that are free there."""
    import psutil

    if torch.cuda.is_available():
        return torch.cuda.get_device_name(), torch.cuda.mem_get_info()[0]
    return "the CPU", psutil.virtual_memory().available


def _skeleton(source: str, settings: Settings, params: Any) -> "PreTrainedModel":
    """The converted model without its weights, on torch's meta device."""
    from transformers import AutoModelForCausalLM

    folder = locate(source)
    while is_run(folder):
        folder = run_source(folder)
    if is_gguf(folder):
        raise UnsupportedError("--plan reads a checkpoint folder: convert the GGUF file first, or start the run")
    checkpoint = open_checkpoint(folder)
    dtype = as_dtype(settings.dtype) or as_dtype(checkpoint.dtype)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(backbone_config(checkpoint.config), dtype=dtype)
    spec = spec_of(checkpoint.config)
    if spec is None:
        if settings.target is None:
            raise OptionError("the checkpoint is not converted yet: give the target, such as --target 16k")
        init = settings.init if settings.to == "adarope" else None
        spec = make_spec(
            settings.to, rope_of_model(model), target=settings.target, init=init, params=params,
            ada_freq=settings.ada_freq, ada_scale=settings.ada_scale, share_heads=settings.share_heads,
        )  # fmt: skip
    return attach(model, spec)
