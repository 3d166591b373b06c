"""The error tree. The command line turns each of these into one line and an exit code."""


class RopexError(Exception):
    """Something the user can mend. The message says what, where, and what to do about it."""


class CheckpointError(RopexError):
    """A checkpoint is missing, incomplete, damaged or contradicts itself."""


class UnsupportedError(RopexError):
    """A known thing that ropex does not handle: an architecture, a format, a combination."""


class OptionError(RopexError):
    """A value that the user gave makes no sense: an unknown method, a target below the window."""


class OutputError(RopexError):
    """The output cannot be written: it exists, it is the source, the disk is full."""


class DataError(RopexError):
    """Training or evaluation text is missing or too short."""


def first_line(error: BaseException) -> str:
    """What another library's error says, in one line."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
