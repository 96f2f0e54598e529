"""The session's JSON: written whole or not at all, again after every record, so that a killed run leaves what was done.

Unlike `bpkv_trt.documents` this needs no pydantic, which a machine that only runs kernels may lack.
"""

import json
import math
import os
from pathlib import Path
from typing import Any


def write(path: Path, content: dict[str, Any]) -> None:
    """Replace a file by a document; NaN and infinities become null."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(_finite(content), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def _finite(value: Any) -> Any:
    match value:
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
    return value
