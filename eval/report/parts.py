"""What a page is made of, and how numbers are written on it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Cell:
    """A value, and in smaller print how sure it is."""

    text: str
    small: str = ""


@dataclass(frozen=True)
class Table:
    """rows: a name, and a cell for each further column of `head`. The last `foot` rows are set apart."""

    title: str
    head: Sequence[str]
    rows: Sequence[tuple[str, Sequence[Cell]]]
    foot: int = 0


@dataclass(frozen=True)
class Figure:
    """svg: markup that is safe to put into a page as it is."""

    caption: str
    svg: str


@dataclass
class Block:
    """Results that were measured alike. not_run: (what, why); facts: (name, value); sources: (folder, its content)."""

    tables: list[Table] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    not_run: list[tuple[str, str]] = field(default_factory=list)
    facts: list[tuple[str, str]] = field(default_factory=list)
    sources: list[tuple[str, str]] = field(default_factory=list)
    title: str = ""


def number(value: Any, digits: int) -> str:
    """A number with so many decimals, and a dash where there is none."""
    return "–" if value is None else f"{value:,.{digits}f}"


def between(bounds: Sequence[float] | None, digits: int) -> str:
    """[low, high], or nothing."""
    return "" if bounds is None else f"[{bounds[0]:.{digits}f}, {bounds[1]:.{digits}f}]"


def plainly(value: Any) -> str:
    """A setting as a person would write it."""
    if value is None or value == [] or value == {}:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, list):
        return ", ".join(map(plainly, value))
    if isinstance(value, dict):
        return "; ".join(f"{name}: {plainly(item)}" for name, item in value.items())
    return str(value)
