"""extend: train a checkpoint's rotary embedding, and then LoRA with it, for a longer context."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from accelerate import PartialState

from ropex.config import ADAROPE
from ropex.errors import OptionError, RopexError
from ropex.loading import as_dtype, load, load_tokenizer, quiet
from ropex.seam import attach, rope_of_model
from ropex.spec import RotarySpec, make_spec
from ropex.train import runfolder
from ropex.train.devices import Devices, check_pieces, launched, shard, weighs_skipped
from ropex.train.documents import sources, tokenise
from ropex.train.loss import fuses, loss_as_forward
from ropex.train.memory import estimate
from ropex.train.plan import require_fit
from ropex.train.recipe import RECIPE, write_recipe
from ropex.train.report import Report, size
from ropex.train.settings import FLASH, Settings, check, differing, resolve
from ropex.train.stages import Stage
from ropex.train.trainable import (
    add_lora,
    check_gradients,
    choose,
    counts,
    lora_targets,
    restore,
    trainable,
    trained_state,
)  # fmt: skip
from ropex.train.trainer import StageTrainer, Stop
from ropex.train.windows import Corpus, Windows

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_OF_THE_SOURCE = ("to", "init", "ada_freq", "ada_scale", "share_heads")  # a converted checkpoint decides these itself
SERIES = 2  # what a seed's windows hold and which pairs are trained; a change here ends the resuming of older runs
_LONG_ON_CPU = 4096  # tokens of a window
_PROBE_TOKENS = 256  # enough for every tensor to get a gradient, and short beside any real window


def extend(
    src: str | Path,
    out: str | Path,
    *,
    target: int | None,
    data: Sequence[str],
    strategy: str = "warmup-joint",
    window: int | None = None,
    plain_skip: bool = False,
    recall_share: float | None = None,
    pack: bool = False,
    steps_warmup: int = 40,
    steps_joint: int = 60,
    batch_size: int = 1,
    accumulation: int = 1,
    lr_freq: float = 1e-2,
    lr_scale: float = 1e-2,
    lr_lora: float = 2e-4,
    lr_full: float = 5e-5,
    lora_r: int = 16,
    lora_alpha: int = 16,
    to: str = "adarope",
    init: str = "yarn",
    params: Mapping[str, Any] | None = None,
    ada_freq: bool = True,
    ada_scale: bool = True,
    all_pairs: bool = False,
    share_heads: bool = False,
    dtype: str | None = None,
    seed: int = 0,
    save_steps: int | None = None,
    keep: int = 2,
    grad_ckpt: bool | None = None,
    attn: str = "auto",
    report_to: str | None = None,
    resume: bool = False,
    overwrite: bool = False,
    console: "Console | None" = None,
) -> dict[str, Any]:
    """Train `src` for a context of `target` tokens on `data`, into the run folder `out`.

    src: whatever ropex.load takes; one that is not converted gets the method `to`, adarope starting from `init`, with
    the tunables `params`. data: .txt, .md, .jsonl and .parquet files, folders of them, Hub datasets
    (owner/name[:split]). window: tokens a sample; below the target its positions jump. The other values are those of
    Settings. resume: continue a run of the same settings.

    Returns {"out", "finished", "settings", "data", "stages"}; "finished" is False when a signal ended it early.
    Errors: OptionError, DataError, CheckpointError, OutputError before anything is written; RopexError when the loss
    stops being a number.
    """
    asked = Settings(
        target=target, strategy=strategy, window=window, plain_skip=plain_skip, recall_share=recall_share, pack=pack,
        steps_warmup=steps_warmup, steps_joint=steps_joint, batch_size=batch_size, accumulation=accumulation,
        lr_freq=lr_freq, lr_scale=lr_scale, lr_lora=lr_lora, lr_full=lr_full, lora_r=lora_r, lora_alpha=lora_alpha,
        to=to, init=init, ada_freq=ada_freq, ada_scale=ada_scale, all_pairs=all_pairs, share_heads=share_heads,
        dtype=_spelled(dtype), seed=seed, save_steps=save_steps, keep=keep, grad_ckpt=grad_ckpt, attn=attn,
        report_to=report_to,
    )  # fmt: skip
    check(asked)
    if resume and overwrite:
        raise OptionError("resume continues the run that overwrite would replace: give one of them")
    everyone = PartialState(cpu=not torch.cuda.is_available())  # one process, or what torchrun and accelerate started
    devices = launched()
    if "@" in Path(src).name and not Path(src).exists():
        raise OptionError(f"{src}: a method on the fly cannot be trained; leave '@...' out and choose it with --init")
    report = Report(console, everyone.is_main_process)
    place, source = Path(out).expanduser(), runfolder.source_name(src)
    place = place.resolve() if place.is_symlink() else place  # a rename would replace the link
    runfolder.check_place(place, source, resume, overwrite)
    before = runfolder.read_run(place) if resume else None
    if before is not None:
        _same_run(place, before, {"source": source}, {"source": before.get("source")})
        _same_run(place, before, {k: v for k, v in asked.block().items() if k not in _OF_THE_SOURCE}, open_too=False)
        if runfolder.finished(place):
            report.say(f"{place} is finished: nothing to resume")
            return _summary(place, before, True)
        if before.get("series") != SERIES:
            raise OptionError(
                f"{place} was begun by a version of ropex whose training windows are others: resume it with that one, "
                "or use --overwrite"
            )
    elif resume:
        report.say(f"{place} does not exist yet: starting from the beginning")
    sources(data)  # a missing file should not wait for the model to load

    model, settings, spec = _model(source, asked, params, devices)
    check_pieces(model, settings, devices)
    report.say("reading the training text")
    tokenizer = load_tokenizer(source)
    with everyone.main_process_first():  # the others find its tokens in the cache
        corpus = tokenise(data, tokenizer, settings.sample_tokens, model.config.vocab_size, settings.pack, report.say)
    weighed = weighs_skipped(model, settings, devices.pieces)
    _say_corpus(report, corpus, settings, weighed)
    loss = "liger-kernel" if everyone.device.type == "cuda" and fuses(model) else "in chunks"
    report.say(
        f"attention: {model.config._attn_implementation}, loss: {loss}, device: {everyone.device}{_shared(devices)}"
    )
    if everyone.device.type == "cpu" and settings.sample_tokens > _LONG_ON_CPU:
        report.say(
            f"windows of {settings.sample_tokens:,} tokens take long on a CPU: --window 2048 trains the same positions "
            "in short ones"
        )
    run = {
        "source": source,
        "spec": spec.block(),
        "lora": _lora_block(model, settings, settings.stages[-1]),
        "settings": settings.block(),
        "data": {
            "given": [str(d) for d in data],
            "documents": corpus.documents,
            "left_out": corpus.left_out,
            "tokens": corpus.size,
            "fingerprint": corpus.fingerprint,
        },
        "versions": runfolder.versions(),
        "series": SERIES,
        "readers": devices.readers,  # windows of a step follow from it
        "weighed": weighed,
        "seed": settings.seed,
    }
    if before is not None:
        _same_run(place, before, settings.block())
        _same_run(place, before, {"data": corpus.fingerprint}, {"data": before["data"]["fingerprint"]})
        _same_run(place, before, json.loads(json.dumps(spec.block())), before["spec"])
        readers, kind = devices.readers, "standing for skipped tokens (else: --plain-skip)"
        _same_run(place, before, {"processes": readers}, {"processes": before["readers"]})
        _same_run(place, before, {kind: weighed}, {kind: before["weighed"]})
        if before["versions"] != run["versions"]:
            report.say(f"versions differ from those that began the run: {before['versions']}")
        run = before
    _check_space(place, model, settings)
    everyone.wait_for_everyone()
    if before is None and everyone.is_main_process:
        runfolder.create(place, run)
        asked_again = {"source": source, "data": list(data), **({"params": dict(params)} if params else {})}
        write_recipe(place / RECIPE, asked_again | settings.block())
    everyone.wait_for_everyone()
    if devices.sharded:
        shard(model)
    try:
        finished = _train(model, settings, corpus, tokenizer, place, run, report, devices)
    except RopexError:
        if before is None and everyone.is_main_process and not runfolder.read_log(place):  # it failed before a step
            shutil.rmtree(place)
        raise
    return _summary(place, run, finished)


def _model(
    source: str, asked: Settings, params: Mapping[str, Any] | None, devices: Devices
) -> tuple["PreTrainedModel", Settings, RotarySpec]:
    """The converted model, the resolved settings, and the spec."""
    model = load(source, asked.dtype, attn=_attention(asked, devices))
    spec: RotarySpec | None = getattr(model, "ropex_spec", None)
    if spec is None:
        if asked.target is None:
            raise OptionError("the checkpoint is not converted yet: give the target, such as --target 16k")
        ada = asked.to == ADAROPE
        spec = make_spec(
            asked.to, rope_of_model(model), target=asked.target, init=asked.init if ada else None, params=params,
            ada_freq=asked.ada_freq, ada_scale=asked.ada_scale, share_heads=asked.share_heads,
        )  # fmt: skip
        attach(model, spec)
    elif params:
        raise OptionError(f"{source} is converted already, with tunables of its own: leave --set out")
    if asked.target not in (None, spec.target):
        raise OptionError(f"{source} was converted for {spec.target} tokens: give that target, or extend its parent")
    if asked.share_heads and not spec.share_heads:
        raise OptionError(f"{source} was converted with a table for each head: leave share_heads out")
    if model.dtype == torch.float16:
        raise OptionError("float16 loses small gradients: train with --dtype bf16 or float32")
    freq, scale = asked.ada_freq and spec.ada_freq, asked.ada_scale and spec.ada_scale
    asked = replace(asked, to=spec.method, init=spec.init, ada_freq=freq, ada_scale=scale, share_heads=spec.share_heads)
    settings = resolve(asked, spec.target, str(_spelled(model.dtype)))
    if settings.attn == "auto":
        _take_flash(model, settings, devices)
    return model, settings, spec


def _attention(settings: Settings, devices: Devices) -> str | None:
    """transformers' name of the attention to load with; None lets it choose (sdpa where the family has it)."""
    if settings.attn in FLASH and settings.attn not in _installed_flash():
        raise OptionError(f"{settings.attn} is not installed here: leave --attn out, or install it where a GPU is")
    if settings.attn == "auto":
        return "sdpa" if devices.pieces > 1 else None
    return settings.attn


def _take_flash(model: "PreTrainedModel", settings: Settings, devices: Devices) -> None:
    """What `--attn auto` takes in place of transformers' choice, once the model is known."""
    able = torch.cuda.is_available() and model.dtype != torch.float32 and model._supports_flash_attn
    if able and devices.pieces == 1 and not weighs_skipped(model, settings) and (installed := _installed_flash()):
        model.set_attn_implementation(installed[0])


def _installed_flash() -> list[str]:
    from transformers.utils import import_utils

    return [name for name in FLASH if getattr(import_utils, f"is_flash_attn_{name[-1]}_available")()]


def _spelled(dtype: str | torch.dtype | None) -> str | None:
    """One spelling a dtype, so that bf16 and bfloat16 are the same setting."""
    return None if dtype is None else str(as_dtype(dtype)).removeprefix("torch.")


def _train(
    model: "PreTrainedModel",
    settings: Settings,
    corpus: Corpus,
    tokenizer: "PreTrainedTokenizerBase",
    place: Path,
    run: dict[str, Any],
    report: Report,
    devices: Devices,
) -> bool:
    """Make the stages that are not done yet; True when all are."""
    if settings.grad_ckpt:
        # Re-entrant checkpointing gives a frozen backbone no gradients, or a table that all layers share a crash.
        model.activation_checkpointing_enable({"use_reentrant": False})
        model.disable_input_require_grads()  # only the re-entrant kind needs it
    first = 0
    with Stop(report.say) as stop, quiet():
        for number, stage in enumerate(settings.stages):
            folder, count = place / stage.name, settings.steps(stage) * settings.samples_a_step * devices.readers
            if stage.lora:
                add_lora(model, settings.lora_r, settings.lora_alpha, settings.seed + number)
            state = runfolder.read_trained(folder, report.say)
            if state is not None:
                restore(model, state, str(folder))
                report.say(f"stage {stage.name} is done already")
            else:
                windows = Windows(
                    corpus, settings.sample_tokens, settings.target or 0, settings.seed, first, count, settings.pack,
                    settings.recall_share or 0.0, tokenizer,
                )  # fmt: skip
                if not _make_stage(model, stage, settings, windows, place, report, stop, devices):
                    return False
                _write(folder, run | {"lora": _lora_block(model, settings, stage)}, model)
            first += count
    _write(place, run, model)
    return True


def _write(folder: Path, block: dict[str, Any], model: "PreTrainedModel") -> None:
    """A folder that ropex.load takes, written by the first process from what all of them hold."""
    everyone = PartialState()
    state = trained_state(model, keep=everyone.is_main_process)
    if everyone.is_main_process:
        runfolder.write_trained(folder, block, state)
    everyone.wait_for_everyone()


def _make_stage(
    model: "PreTrainedModel",
    stage: Stage,
    settings: Settings,
    windows: Windows,
    place: Path,
    report: Report,
    stop: Stop,
    devices: Devices,
) -> bool:
    """Train one stage from its newest checkpoint or its beginning; False when a signal ended it early."""
    folder, steps = place / stage.name, settings.steps(stage)
    choose(model, stage, settings.ada_freq, settings.ada_scale, settings.all_pairs)
    _say_stage(report, stage, model, settings, devices)
    require_fit(model, stage, settings, devices.pieces)

    def record(line: dict[str, Any]) -> None:
        if PartialState().is_main_process:
            runfolder.append_log(place, line)
        report.step(line)

    trainer = StageTrainer(model, stage, settings, windows, folder, record, stop, devices)
    model.train()
    with loss_as_forward(model):
        check_gradients(model, lambda: model(_probe(windows, model.device), _PROBE_TOKENS))
    done, checkpoint = runfolder.newest_whole(folder, report.say) or (0, None)
    if checkpoint:
        report.say(f"stage {stage.name} continues after step {done}")
    earlier = [s.name for s in settings.stages[: settings.stages.index(stage)]]
    with PartialState().main_process_first():
        if PartialState().is_main_process:
            runfolder.rewind_log(place, stage, done, earlier)
    with report.stage(stage.name, steps, done):
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    if trainer.state.global_step < steps:
        report.say(f"stopped after step {trainer.state.global_step} of stage {stage.name}: continue with --resume")
        return False
    return True


def _probe(windows: Windows, device: torch.device) -> dict[str, torch.Tensor]:
    """A batch of one short row: tokens of the first window, from all over it at their own positions, or its first ones
    where documents are packed."""
    sample = windows[0]
    length = len(sample["input_ids"])
    last = min(length, _PROBE_TOKENS) if windows.pack else length
    picked = torch.linspace(0, last - 1, min(length, _PROBE_TOKENS)).long()
    return {name: tensor[picked][None].to(device) for name, tensor in sample.items()}


def _same_run(
    place: Path,
    before: dict[str, Any],
    now: dict[str, Any],
    then: dict[str, Any] | None = None,
    open_too: bool = True,
) -> None:
    """Refuse to continue a run under other settings, naming them."""
    if changed := differing(before["settings"] if then is None else then, now, open_too):
        raise OptionError(
            f"{place} was begun otherwise ({'; '.join(changed)}): resume it as it was, or use --overwrite"
        )


def _lora_block(model: "PreTrainedModel", settings: Settings, stage: Stage) -> dict[str, Any] | None:
    if not stage.lora:
        return None
    return {"r": settings.lora_r, "alpha": settings.lora_alpha, "targets": lora_targets(model)}


def _check_space(place: Path, model: "PreTrainedModel", settings: Settings) -> None:
    """Checkpoints hold weights and two moments in float32; each stage keeps some, and one more while it is written."""
    rope = rope_of_model(model)
    kv = rope.kv_heads * rope.head_dim
    lora = rope.layers * settings.lora_r * (2 * model.config.hidden_size + rope.heads * rope.head_dim + kv)
    rotary = rope.layers * (rope.kv_heads * rope.pairs + 2 * rope.heads)  # at most
    last = settings.stages[-1]
    numbers = rotary + (lora if last.lora else 0) + (sum(p.numel() for p in model.parameters()) if last.full else 0)
    runfolder.check_space(place, numbers * 4 * 3 * (settings.keep + 1) * len(settings.stages))


def _say_corpus(report: Report, corpus: Corpus, settings: Settings, weighed: bool) -> None:
    few = f"; {corpus.left_out} shorter than the window left out" if corpus.left_out else ""
    kind = f"{'packed' if settings.pack else 'whole'} windows of {settings.sample_tokens:,} tokens"
    if settings.skips:
        stand = "tokens stand for those skipped" if weighed else "nothing stands for those skipped"
        kind = f"windows of {settings.sample_tokens:,} tokens with positions up to {settings.target:,}, {stand}"
    facts = f"; facts to recall in {settings.recall_share:.0%} of them" if settings.recall_share else ""
    report.say(f"{corpus.documents} documents, {corpus.size:,} tokens{few}; {kind}{facts}")


def _shared(devices: Devices) -> str:
    """How processes share the work, to be said after the device."""
    processes = PartialState().num_processes
    if processes == 1 and not devices.sharded:
        return ""
    said = f", {processes} processes"
    said += ", the backbone in shards (FSDP2)" if devices.sharded else ", each with the whole model"
    return said + (f", a window over {devices.pieces} of them" if devices.pieces > 1 else "")


def _say_stage(report: Report, stage: Stage, model: "PreTrainedModel", settings: Settings, devices: Devices) -> None:
    tensors = trainable(model)
    listed = ", ".join(f"{kind} {n['numbers']:,} in {n['tensors']}" for kind, n in counts(tensors).items())
    total = sum(t.parameter.numel() for t in tensors)
    report.say(f"stage {stage.name} trains {total:,} numbers: {listed} tensors")
    parts = estimate(model, tensors, settings, devices.pieces)
    listed = ", ".join(f"{name} {size(held)}" for name, held in parts.items() if name != "total")
    report.say(f"stage {stage.name} needs about {size(parts['total'])} of memory: {listed}")


def _summary(place: Path, run: dict[str, Any], finished: bool) -> dict[str, Any]:
    """What the run came to, from its log."""
    stages: dict[str, dict[str, Any]] = {}
    for line in runfolder.read_log(place):
        stage = stages.setdefault(line["stage"], {"steps": 0, "loss_first": line["loss"], "seconds": 0.0})
        stage |= {
            "steps": line["step"],
            "loss_last": line["loss"],
            "seconds": stage["seconds"] + line["seconds"],
        }
        stages[line["stage"]] = stage
    return {
        "out": str(place), "finished": finished, "settings": run["settings"], "data": run["data"], "stages": stages,
    }  # fmt: skip
