"""How a long evaluation says where it is, without knowing who listens."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with what is being measured, the steps done, and the steps in all."""


def silent(what: str, done: int, total: int) -> None:
    """The listener when nobody listens."""
