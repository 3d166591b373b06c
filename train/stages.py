"""What is trained when: a strategy is a list of stages, and a stage names the kinds of tensors that it trains."""

from dataclasses import dataclass

from ropex.errors import OptionError


@dataclass(frozen=True)
class Stage:
    """name: its folder in the run. rotary, lora, full: what it trains; full: every weight of the backbone."""

    name: str
    rotary: bool = True
    lora: bool = False
    full: bool = False


WARMUP = Stage("warmup")
JOINT = Stage("joint", lora=True)
LORA = Stage("lora", rotary=False, lora=True)
FULL = Stage("full", full=True)

STRATEGIES: dict[str, tuple[Stage, ...]] = {
    "warmup-joint": (WARMUP, JOINT),
    "warmup-lora": (WARMUP, LORA),
    "warmup": (WARMUP,),
    "joint": (JOINT,),
    "lora": (LORA,),
    "full": (FULL,),
}


def stages_of(strategy: str) -> tuple[Stage, ...]:
    """The stages of a strategy, or an error that lists the names."""
    try:
        return STRATEGIES[strategy]
    except KeyError:
        raise OptionError(f"unknown strategy '{strategy}': choose one of {', '.join(STRATEGIES)}") from None
