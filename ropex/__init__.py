"""ropex: convert, extend, measure and export the rotary embedding of language-model checkpoints.

`ropex.load(path)` gives a ready transformers model; the rest of the public API is imported on first use, so that
`import ropex` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ropex.loading import load, load_tokenizer
    from ropex.seam import attach, method_of
    from ropex.spec import RotarySpec, make_spec

_WHERE = {
    "load": "ropex.loading",
    "load_tokenizer": "ropex.loading",
    "attach": "ropex.seam",
    "method_of": "ropex.seam",
    "RotarySpec": "ropex.spec",
    "make_spec": "ropex.spec",
}
__all__ = ["RotarySpec", "attach", "load", "load_tokenizer", "make_spec", "method_of"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module 'ropex' has no attribute {name!r}")
