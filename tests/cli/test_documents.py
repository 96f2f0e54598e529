"""Documents reach the disk whole or not at all, and say what they were made with."""

import json
import os
import stat
from pathlib import Path

import pytest

from bpkv_trt import __version__
from bpkv_trt.config import BpkvConfig
from bpkv_trt.documents import check_destination, document, write_json
from bpkv_trt.errors import InputError


def test_a_document_names_configuration_versions_and_machine(tmp_path: Path) -> None:
    config = BpkvConfig(budget="20%", regime="deferred")
    write_json(tmp_path / "out.json", document(config, {"text": "é\u2028", "kl": float("nan"), "rows": (1, [2.5])}))
    read = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert read["schema_version"] == 1
    assert BpkvConfig(**read["config"]) == config
    assert read["versions"]["bpkv_trt"] == __version__ and read["versions"]["python"]
    assert read["machine"]["cores"] >= 1 and read["machine"]["processor"]
    assert (read["text"], read["kl"], read["rows"]) == ("é\u2028", None, [1, [2.5]])
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE((tmp_path / "out.json").stat().st_mode) == 0o666 & ~mask


def test_an_interrupt_leaves_no_half_of_a_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_json(tmp_path / "out.json", {"run": 1})
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_document_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.json"
    write_json(path, {"run": 1})

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(InputError, match="No space left"):
        write_json(path, {"run": 2})
    assert [file.name for file in tmp_path.iterdir()] == ["out.json"]
    assert json.loads(path.read_text()) == {"run": 1}


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    target.write_text("{}")
    link.symlink_to(target)
    write_json(link, {"key": 1})
    assert link.is_symlink() and json.loads(target.read_text()) == {"key": 1}


def test_a_document_of_ours_is_replaced_however_large(tmp_path: Path) -> None:
    """A server's trace may have hundreds of megabytes, and must not keep it from being started again."""
    path = tmp_path / "trace.json"
    write_json(path, document(BpkvConfig(), {}))
    with path.open("a") as file:
        file.write(" " * (100 << 20))
    check_destination(path)
    path.write_text('{"another": "tool"}')
    with pytest.raises(InputError, match="is no document of bpkv"):
        check_destination(path)
