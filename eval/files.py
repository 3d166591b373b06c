"""Files that appear whole or not at all."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ropex.errors import OutputError


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Have write(path) make the file beside its place, then move it there, over one of the same name."""
    part = path.with_name(f".{path.stem}-{os.getpid()}{path.suffix}")
    try:
        write(part)
        part.replace(path)
    except OSError as error:
        raise OutputError(f"{path} cannot be written ({error.strerror}): check folder and disk") from error
    finally:
        part.unlink(missing_ok=True)
