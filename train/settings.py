"""What the user asked of a run, resolved and checked before anything is loaded or written."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ropex.config import ADAROPE
from ropex.errors import OptionError
from ropex.train.stages import FULL, WARMUP, Stage, stages_of

SHORTEST_WINDOW = 16
FLASH = tuple(f"flash_attention_{n}" for n in (2, 3, 4))
ATTENTIONS = ("auto", "sdpa", "eager", *FLASH)
RECALL_SHARE = 0.5  # of windows whose positions jump
CHECKPOINT_FROM = 4096  # tokens a window; below, activations fit and recomputing them only costs time
_SAVES_A_STAGE = 10


@dataclass(frozen=True)
class Settings:
    """One run. None stands for what the checkpoint or another setting decides, until `resolve`.

    target, window: tokens; no window means the target, and in a shorter one positions jump. plain_skip: no tokens stand
    for those that are jumped over. recall_share: of the windows, get facts to recall put into their text; unless given,
    RECALL_SHARE of those whose positions jump. pack: whole documents side by side in a window. to: the method
    that an unconverted source gets; init: where adarope starts from. all_pairs: train the frequencies of slow
    pairs too. steps_warmup: optimiser steps of the warm-up;
    steps_joint: of the stage after it, or of the only one. lr_freq: delta; lr_scale: tau and gamma; lr_lora: LoRA
    matrices; lr_full: all weights. save_steps: steps between checkpoints, a tenth of the longest stage unless given.
    keep: checkpoints of a stage that stay, the newest, and others to fall back to should it be damaged. grad_ckpt:
    recompute activations in the backward pass. attn: one of ATTENTIONS; auto takes flash attention on a GPU where it is
    installed and can do what the windows ask for. report_to: a tracker that transformers knows, such as tensorboard.
    """

    target: int | None
    strategy: str = "warmup-joint"
    window: int | None = None
    plain_skip: bool = False
    recall_share: float | None = None
    pack: bool = False
    steps_warmup: int = 40
    steps_joint: int = 60
    batch_size: int = 1
    accumulation: int = 1
    lr_freq: float = 1e-2
    lr_scale: float = 1e-2
    lr_lora: float = 2e-4
    lr_full: float = 5e-5
    lora_r: int = 16
    lora_alpha: int = 16
    to: str = "adarope"
    init: str = "yarn"
    ada_freq: bool = True
    ada_scale: bool = True
    all_pairs: bool = False
    share_heads: bool = False
    dtype: str | None = None
    attn: str = "auto"
    seed: int = 0
    save_steps: int | None = None
    keep: int = 2
    grad_ckpt: bool | None = None
    report_to: str | None = None

    @property
    def stages(self) -> tuple[Stage, ...]:
        return stages_of(self.strategy)

    @property
    def skips(self) -> bool:
        """Whether positions jump, so that windows shorter than the target show its distances."""
        return not self.pack and self.window is not None and (self.target is None or self.window < self.target)

    @property
    def sample_tokens(self) -> int:
        """Tokens a sample: the window, or the target where no window was given."""
        return self.window or self.target or 0

    def steps(self, stage: Stage) -> int:
        return self.steps_warmup if stage == WARMUP else self.steps_joint

    @property
    def samples_a_step(self) -> int:
        return self.batch_size * self.accumulation

    def block(self) -> dict[str, Any]:
        """What run.json keeps."""
        return asdict(self)


def check(settings: Settings) -> None:
    """Every value that cannot be right is named in one OptionError."""
    steps = ["steps_warmup"] * (WARMUP in settings.stages) + ["steps_joint"] * (settings.stages != (WARMUP,))
    wrong = [
        f"{name} is {getattr(settings, name)}, not a whole number of 1 or more"
        for name in ("batch_size", "accumulation", "lora_r", "keep", *steps)
        if getattr(settings, name) < 1
    ]
    for name in ("lr_freq", "lr_scale", "lr_lora", "lr_full", "lora_alpha"):
        value = getattr(settings, name)
        if not (math.isfinite(value) and value > 0):
            wrong.append(f"{name} is {value}, not a number above 0")
    if settings.save_steps is not None and settings.save_steps < 1:
        wrong.append(f"save_steps is {settings.save_steps}: checkpoints come every 1 or more steps")
    if settings.seed < 0:
        wrong.append(f"seed is {settings.seed}: give 0 or more")
    window = settings.window if settings.window is not None else settings.target
    if window is not None and window < SHORTEST_WINDOW:
        wrong.append(f"window is {window}: give at least {SHORTEST_WINDOW} tokens")
    if settings.pack and settings.window not in (None, settings.target):
        wrong.append("packed documents have positions of their own, which cannot jump: leave the window out, or pack")
    if settings.plain_skip and not settings.skips:
        wrong.append("plain_skip is for windows shorter than the target: --no-plain-skip, or give such a window")
    if settings.recall_share is not None and not 0 <= settings.recall_share <= 1:
        wrong.append(f"recall_share is {settings.recall_share}: give a share of the windows, from 0 to 1")
    if settings.pack and settings.recall_share:
        wrong.append("packed documents are left as they are: give no recall_share, or do not pack")
    if settings.attn not in ATTENTIONS:
        wrong.append(f"attn is '{settings.attn}': give one of {', '.join(ATTENTIONS)}")
    if settings.target is not None and window is not None and window > settings.target:
        wrong.append(f"window {window} is above the target {settings.target}: leave it out or give a shorter one")
    if settings.to == ADAROPE and not (settings.ada_freq or settings.ada_scale) and settings.stages[0].rotary:
        wrong.append("without AdaFreq and without AdaScale nothing of the heads is trained: leave one switch out")
    if settings.to != ADAROPE and WARMUP in settings.stages:
        wrong.append(f"'{settings.to}' has nothing that a warm-up trains: give --strategy lora, joint or full")
    if FULL in settings.stages and settings.dtype not in (None, "float32"):
        wrong.append(
            f"dtype is {settings.dtype}: small steps of whole weights vanish in 16 bits, so full trains float32"
        )
    if wrong:
        raise OptionError("; ".join(wrong))


def resolve(settings: Settings, target: int, dtype: str) -> Settings:
    """Fill in what was left open, once the checkpoint is known."""
    longest = max(settings.steps(s) for s in settings.stages)
    window = settings.window or target
    share = RECALL_SHARE if window < target and not settings.pack else 0.0
    settings = replace(
        settings,
        target=target,
        window=window,
        dtype=dtype,
        recall_share=share if settings.recall_share is None else settings.recall_share,
        save_steps=settings.save_steps or max(1, longest // _SAVES_A_STAGE),
        grad_ckpt=window >= CHECKPOINT_FROM if settings.grad_ckpt is None else settings.grad_ckpt,
    )
    check(settings)
    return settings


def differing(before: Mapping[str, Any], now: Mapping[str, Any], open_too: bool = True) -> list[str]:
    """Sentences on settings that two runs do not share. open_too: False passes over those left open now (None).
    One that a run's version did not have yet is passed over."""
    return [
        f"{name} was {before[name]!r} and is {now[name]!r}"
        for name in now
        if name in before and before[name] != now[name] and (open_too or now[name] is not None)
    ]
