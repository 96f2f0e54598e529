"""Where this package keeps, for a user, what it can make again."""

import os
from pathlib import Path


def user_cache_directory() -> Path:
    """`$BPKV_CACHE_DIR`, else `bpkv-trt` under `$XDG_CACHE_HOME` or `~/.cache`."""
    chosen = os.environ.get("BPKV_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "bpkv-trt"
