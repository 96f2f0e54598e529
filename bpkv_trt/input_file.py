"""Files that a user names: read whole, only where they are files, and no more of them than they could be for."""

import stat
from pathlib import Path

from bpkv_trt.errors import BpkvError, InputError


def read_file(path: Path, limit: int, what: str, flag: str, error: type[BpkvError] = InputError) -> bytes:
    """What a file holds, at most `limit` bytes.

    Raises `error`, which names the file as `what` and the option it was given to, where it is missing, no regular file
    (a device has no end, and nobody may ever write to a pipe), unreadable or larger.
    """
    content = read_start(path, limit + 1, what, flag, error)
    if len(content) > limit:
        raise error(
            f"The {what} {path} has more than {limit >> 20} MiB, more than is read of one; check the path given to "
            f"{flag}, or give a part of it."
        )
    return content


def read_start(path: Path, count: int, what: str, flag: str, error: type[BpkvError] = InputError) -> bytes:
    """The first `count` bytes of a file, or all that it has; refused as `read_file` does."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise error(f"The {what} {path} is a directory; give a file to {flag}.")
        if not stat.S_ISREG(mode):
            raise error(f"The {what} {path} is a device or a pipe; save what it gives, and give that file to {flag}.")
        with path.open("rb") as file:
            return file.read(count)
    except FileNotFoundError:
        raise error(f"The {what} {path} does not exist; check the path given to {flag}.") from None
    except OSError as problem:
        raise error(f"The {what} {path} cannot be read ({problem.strerror}); check path and permissions.") from None
    except ValueError as problem:  # a NUL in the name
        raise error(f"The {what} {str(path)!r} cannot be read ({problem}); check the path given to {flag}.") from None
