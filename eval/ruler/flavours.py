"""NVIDIA's rules and lm-eval's, where they are not the same."""

from dataclasses import dataclass

from ropex.errors import OptionError


@dataclass(frozen=True)
class Flavour:
    """One set of rules. Prompt, prefix and answer stay within the length under either."""

    name: str
    nvidia_wording: bool  # the table of departures in `wording` is applied
    best_reference: bool  # QA scores the best reference; else the share of the references found
    cwe_example: bool  # cwe's worked example is prompted; else it is built and dropped
    repeats: bool  # essays and documents start again where they end; else the prompt stays short
    fwe_reserve: int  # tokens taken off the length before a fiftieth of it gives fwe's vocabulary
    vt_example_tokens: int  # room for vt's worked example without its answer
    coarse: bool  # haystacks grow in steps (25 lines, 500 words, 10 documents, ...); else unit by unit


FLAVOURS = {
    flavour.name: flavour
    for flavour in (
        Flavour("nvidia", True, True, True, True, 50, 500, False),
        Flavour("lm-eval", False, False, False, False, 0, 470, True),
    )
}


def get_flavour(name: str) -> Flavour:
    """The rules of that name. Raises OptionError for an unknown one."""
    if name not in FLAVOURS:
        raise OptionError(f"unknown flavour {name!r} of RULER: choose from {', '.join(FLAVOURS)}")
    return FLAVOURS[name]
