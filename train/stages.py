"""What is trained when: a strategy is a list of stages, and a stage names the kinds of tensors that it trains."""

from dataclasses import dataclass

from ropex.errors import OptionError


@dataclass(frozen=True)
class Stage:
    """name: its folder in the run, and `steps_<name>` its length. rotary, lora: what it trains."""

    name: str
    rotary: bool = True
    lora: bool = False


WARMUP = Stage("warmup")
JOINT = Stage("joint", lora=True)

STRATEGIES: dict[str, tuple[Stage, ...]] = {
    "warmup-joint": (WARMUP, JOINT),
    "warmup": (WARMUP,),
}


def stages_of(strategy: str) -> tuple[Stage, ...]:
    """The stages of a strategy, or an error that lists the names."""
    try:
        return STRATEGIES[strategy]
    except KeyError:
        raise OptionError(f"unknown strategy '{strategy}': choose one of {', '.join(STRATEGIES)}") from None
