"""Where the library is looked for, and what is refused before anything is loaded."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

import bpkv_trt
from bpkv_trt.errors import BpkvError, ConfigError, InputError
from bpkv_trt.trtllm import plugin_library
from bpkv_trt.trtllm.plugin_library import FILE, PluginLibrary, locate

SIDECAR = {"schema_version": 1, "abi": 1, "tensorrt": "10.14.1", "targets": ["80", "90a"], "more": "is ignored"}


def library(folder: Path, content: bytes = b"library", **changed: object) -> Path:
    """A pair of files as the build leaves them, but for what is changed."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / FILE
    path.write_bytes(content)
    sidecar = SIDECAR | {"sha256": hashlib.sha256(content).hexdigest()} | changed
    path.with_suffix(".json").write_text(json.dumps({key: each for key, each in sidecar.items() if each is not None}))
    return path


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package without a library, in the folder that is returned."""
    monkeypatch.delenv("BPKV_PLUGIN_PATH", raising=False)
    monkeypatch.setattr(plugin_library, "PACKAGE", tmp_path / "checkout" / "bpkv_trt")
    return tmp_path / "checkout"


def test_places_are_tried_in_order(nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"is not in the package; build it with .* BPKV_PLUGIN_PATH .* --plugin-lib"):
        locate()
    for folder in (nowhere / "out" / "plugin", nowhere / "bpkv_trt"):
        assert locate_after(library(folder)) == folder / FILE
    named = library(tmp_path / "named")
    monkeypatch.setenv("BPKV_PLUGIN_PATH", str(named))
    assert locate() == named and bpkv_trt.get_library_path() == named
    chosen = library(tmp_path / "chosen")
    assert locate(chosen) == chosen and PluginLibrary.find(chosen).sidecar.targets == ["80", "90a"]


def locate_after(made: Path) -> Path:
    assert made.is_file()
    return locate()


def test_what_was_named_and_is_missing_is_not_replaced_by_another(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library(nowhere / "bpkv_trt")
    with pytest.raises(InputError, match="absent.so given by --plugin-lib does not exist"):
        locate(nowhere / "absent.so")
    monkeypatch.setenv("BPKV_PLUGIN_PATH", str(nowhere / "absent.so"))
    with pytest.raises(InputError, match="absent.so given by BPKV_PLUGIN_PATH does not exist"):
        bpkv_trt.get_library_path()


def test_a_name_is_followed_to_the_file_that_has_a_sidecar(
    nowhere: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = library(tmp_path / "real")
    link = tmp_path / "link.so"
    link.symlink_to(path)
    assert PluginLibrary.find(link).path == path
    monkeypatch.chdir(path.parent)
    monkeypatch.setenv("BPKV_PLUGIN_PATH", FILE)
    assert bpkv_trt.get_library_path() == path
    with pytest.raises(InputError, match=f"given by --plugin-lib is a folder; name the file {FILE} in it"):
        locate(path.parent)


@pytest.mark.parametrize(
    "change, error, said",
    [
        ({"abi": 2}, ConfigError, "has interface 2, and this version of bpkv speaks 1"),
        ({"sha256": "0" * 64}, InputError, "one of them was changed or is damaged"),
        ({"sha256": None}, InputError, r"damaged or of another version \(sha256: Field required\)"),
        ({"schema_version": 2}, InputError, r"damaged or of another version \(schema_version: "),
        ({"targets": "80"}, InputError, r"\(targets: "),
        ({"abi": "1"}, InputError, r"\(abi: "),
    ],
    ids=str,
)
def test_a_sidecar_that_does_not_fit(tmp_path: Path, change: dict, error: type[BpkvError], said: str) -> None:
    with pytest.raises(error, match=said):
        PluginLibrary.find(library(tmp_path, **change))


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00"])
def test_a_sidecar_that_is_no_document(tmp_path: Path, text: str) -> None:
    path = library(tmp_path)
    path.with_suffix(".json").write_text(text)
    with pytest.raises(InputError, match=r"libbpkv_plugin.json of the plugin library is damaged"):
        PluginLibrary.find(path)


def test_a_library_without_a_sidecar(tmp_path: Path) -> None:
    path = library(tmp_path)
    path.with_suffix(".json").unlink()
    with pytest.raises(InputError, match="no readable sidecar libbpkv_plugin.json beside it"):
        PluginLibrary.find(path)


def test_targets_that_it_would_never_choose(tmp_path: Path) -> None:
    found = PluginLibrary.find(library(tmp_path))
    found.check_targets(["90a"])
    with pytest.raises(ConfigError, match="knows no target 100a, 75; it knows 80, 90a"):
        found.check_targets(["100a", "80", "75"])


def test_another_tensorrt_is_refused_before_the_library_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"was built for TensorRT 10.14.1, and 11.0.0 is installed"):
        PluginLibrary.find(library(tmp_path)).register(SimpleNamespace(__version__="11.0.0"))


def test_what_is_no_library_does_not_load(tmp_path: Path) -> None:
    with pytest.raises(BpkvError, match="does not load"):
        PluginLibrary.find(library(tmp_path)).register(SimpleNamespace(__version__="10.13.3"))
