"""Every test here has a model cache of its own, unless it asks for the user's."""

from pathlib import Path

import pytest


@pytest.fixture
def model_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty model cache."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("BPKV_CACHE_DIR", str(cache))
    return cache
