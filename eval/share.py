"""Evaluations shared by several processes, each with the whole model: what `accelerate launch` and torchrun start."""

from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

Value = TypeVar("Value")


def processes() -> PartialState:
    """This process, or all that were started together."""
    return PartialState(cpu=not torch.cuda.is_available())


def gather(value: Value) -> list[Value]:
    """What every process gave, in the order of the processes; each has to call."""
    return [value] if processes().num_processes == 1 else list(gather_object([value]))
