"""What lies beside an engine tells when it no longer is that engine's."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bpkv_trt import __version__, doctor
from bpkv_trt.cli import main
from bpkv_trt.config import BpkvConfig
from bpkv_trt.doctor import Finding, engine_finding
from bpkv_trt.errors import BpkvError, ConfigError, InputError
from bpkv_trt.trtllm import sidecar
from bpkv_trt.trtllm.plugin_library import PluginLibrary, Sidecar
from bpkv_trt.trtllm.settings import EngineSettings, for_engine
from bpkv_trt.trtllm.sidecar import FILE, EngineSidecar, withdrawn

SETTINGS = EngineSettings(
    config=for_engine(BpkvConfig(budget="0.3")), targets=("90a",), plugin_abi=1, plugin_sha256="0f" * 32, kernels=-7
)

VERSIONS = {"tensorrt": "10.14.1", "tensorrt_llm": "1.2.1"}


def save_engine(folder: Path, bpkv: object = None, ranks: int = 2) -> Path:
    """As TensorRT-LLM does: what model and build were given in config.json, and a file for every rank."""
    folder.mkdir(exist_ok=True)
    pretrained = {"architecture": "LlamaForCausalLM", "mapping": {"world_size": ranks, "tp_size": ranks}}
    if bpkv is not None:
        pretrained["bpkv"] = bpkv
    (folder / "config.json").write_text(json.dumps({"version": "1.2.1", "pretrained_config": pretrained}, indent=4))
    for rank in range(ranks):
        (folder / f"rank{rank}.engine").write_bytes(bytes(100 + rank))
    return folder


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    """An engine with its sidecar."""
    folder = save_engine(tmp_path / "engine", SETTINGS.document())
    EngineSidecar.write(folder, SETTINGS, VERSIONS)
    return folder


def rewritten(engine: Path, change: Callable[[dict], object], *, signed: bool = False) -> None:
    """Edit a sidecar, by hand or as another version would have written it."""
    path = engine / FILE
    content = json.loads(path.read_text())
    change(content)
    if signed:
        content.pop("checksum")
        content["checksum"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    path.write_text(json.dumps(content))


def test_it_is_read_back_as_it_was_written(engine: Path) -> None:
    found = EngineSidecar.read(engine)
    assert found.settings == SETTINGS and found.versions.items() >= (VERSIONS | {"bpkv_trt": __version__}).items()
    content = json.loads((engine / FILE).read_text())
    assert content["engine"] == {
        "config.json": hashlib.sha256((engine / "config.json").read_bytes()).hexdigest(),
        "rank0.engine": 100,
        "rank1.engine": 101,
    }
    rewritten(engine, lambda content: None)  # other spaces and lines say nothing else
    assert EngineSidecar.read(engine) == found


def test_an_engine_without_one(tmp_path: Path, engine: Path) -> None:
    with pytest.raises(InputError, match=r"built without BP-KV: it has no bpkv_config.json. To compact, build"):
        EngineSidecar.read(save_engine(tmp_path / "stock"))
    (engine / FILE).unlink()
    with pytest.raises(InputError, match="was built with BP-KV, and its bpkv_config.json is missing: copy all files"):
        EngineSidecar.read(engine)
    with pytest.raises(InputError, match="nothing/config.json does not exist; check the path given to --engine-dir"):
        EngineSidecar.read(tmp_path / "nothing")


@pytest.mark.parametrize(
    ("change", "signed", "error", "said"),
    [
        (lambda c: c["settings"]["config"].update(budget="0.5"), False, InputError, "was edited or is damaged"),
        (lambda c: c.pop("checksum"), False, InputError, "was edited or is damaged"),
        (lambda c: c.update(more=1), False, InputError, "was edited or is damaged"),
        (
            lambda c: c.update(schema_version=2),
            True,
            ConfigError,
            "is of version 2, .* reads 1: build the engine again",
        ),
        (lambda c: c["settings"].update(plugin_abi=2), True, ConfigError, "a plugin of interface 2, .* speaks 1"),
        (lambda c: c["settings"].update(schema_version=3), True, InputError, "are of version 3"),
        (lambda c: c["settings"].update(kernels=8), True, InputError, "have different settings"),
    ],
)
def test_another_one_than_was_written(
    engine: Path, change: Callable[[dict], object], signed: bool, error: type[BpkvError], said: str
) -> None:
    rewritten(engine, change, signed=signed)
    with pytest.raises(error, match=said):
        EngineSidecar.read(engine)


@pytest.mark.parametrize("content", ["", "{", "[]", "null"])
def test_what_is_no_sidecar(engine: Path, content: str) -> None:
    (engine / FILE).write_text(content)
    with pytest.raises(InputError, match="bpkv_config.json is no JSON object, so it is damaged"):
        EngineSidecar.read(engine)


def test_another_engine_than_it_was_written_for(engine: Path) -> None:
    config = (engine / "config.json").read_text()
    (engine / "config.json").write_text(config + " ")
    with pytest.raises(InputError, match="not the one that its bpkv_config.json was written for: config.json changed"):
        EngineSidecar.read(engine)
    (engine / "config.json").write_text(config)
    (engine / "rank1.engine").write_bytes(bytes(102))
    with pytest.raises(InputError, match="rank1.engine changed since"):
        EngineSidecar.read(engine)
    (engine / "rank1.engine").unlink()
    with pytest.raises(InputError, match="lacks rank1.engine: copy all files"):
        EngineSidecar.read(engine)


def test_an_engine_that_was_not_built_so_gets_none(tmp_path: Path) -> None:
    other = EngineSettings(**{**SETTINGS.document(), "kernels": 1})
    for bpkv in (None, other.document()):
        with pytest.raises(BpkvError, match="was not built with these settings"):
            EngineSidecar.write(save_engine(tmp_path / "engine", bpkv), SETTINGS, VERSIONS)
    folder = save_engine(tmp_path / "engine", SETTINGS.document())
    (folder / "rank1.engine").unlink()
    with pytest.raises(InputError, match="lacks rank1.engine"):
        EngineSidecar.write(folder, SETTINGS, VERSIONS)
    assert not (folder / FILE).exists()


def test_the_library_is_the_one_that_the_engine_was_built_with(engine: Path) -> None:
    def library(sha256: str) -> PluginLibrary:
        return PluginLibrary(
            Path("p.so"), Sidecar(schema_version=1, sha256=sha256, abi=1, tensorrt="10.14.1", targets=["90a"])
        )

    found = EngineSidecar.read(engine)
    found.check_library(library("0f" * 32))
    with pytest.raises(ConfigError, match=r"\(SHA-256 0f0f0f0f0f0f0f0f...\) than p.so \(ffffffffffffffff...\): give"):
        found.check_library(library("f" * 64))


def test_a_build_that_saves_nothing_leaves_the_sidecar(engine: Path) -> None:
    before = (engine / FILE).read_bytes()
    with withdrawn(engine):
        assert not (engine / FILE).exists()
    assert (engine / FILE).read_bytes() == before
    with withdrawn(engine):
        EngineSidecar.write(engine, SETTINGS, {"tensorrt": "10.15"})
    assert EngineSidecar.read(engine).versions["tensorrt"] == "10.15", "the new one is not undone"


def test_a_build_that_fails_leaves_the_sidecar_only_of_an_engine_that_it_did_not_touch(engine: Path) -> None:
    before = (engine / FILE).read_bytes()
    with pytest.raises(KeyboardInterrupt), withdrawn(engine):
        assert not (engine / FILE).exists()
        raise KeyboardInterrupt
    assert (engine / FILE).read_bytes() == before and EngineSidecar.read(engine).settings == SETTINGS
    with pytest.raises(RuntimeError), withdrawn(engine):
        save_engine(engine, SETTINGS.document())
        EngineSidecar.write(engine, SETTINGS, VERSIONS)
        raise RuntimeError
    assert not (engine / FILE).exists()
    with withdrawn(engine):
        EngineSidecar.write(engine, SETTINGS, VERSIONS)
    assert (engine / FILE).exists()
    with pytest.raises(RuntimeError), withdrawn(engine.parent / "new"):
        raise RuntimeError
    assert not (engine.parent / "new").exists()


def test_the_interface_is_the_plugins(monkeypatch: pytest.MonkeyPatch, engine: Path) -> None:
    """An engine of today under a bpkv whose plugin speaks otherwise."""
    monkeypatch.setattr(sidecar, "ABI", 2)
    with pytest.raises(ConfigError, match="a plugin of interface 1, and this version of bpkv speaks 2"):
        EngineSidecar.read(engine)


def test_the_doctor_tells_whether_an_engine_goes_with_what_is_here(
    tmp_path: Path, engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = tmp_path / "libbpkv_plugin.so"
    library.write_bytes(b"library")
    sha256 = hashlib.sha256(b"library").hexdigest()
    told = {"schema_version": 1, "sha256": sha256, "abi": 1, "tensorrt": "10.14.1", "targets": ["90a"]}
    library.with_suffix(".json").write_text(json.dumps(told))
    monkeypatch.setenv("BPKV_PLUGIN_PATH", str(library))
    finding = engine_finding(engine)
    assert finding.status == "broken" and "was built with another plugin library" in finding.detail

    settings = SETTINGS.model_copy(update={"plugin_sha256": sha256})
    EngineSidecar.write(save_engine(engine, settings.document()), settings, VERSIONS)
    monkeypatch.setattr(doctor, "version", {"tensorrt": "10.14.1", "tensorrt_llm": "1.1.0"}.get)
    finding = engine_finding(engine)
    assert finding.status == "broken" and "built with tensorrt_llm 1.2.1, and here is 1.1.0" in finding.detail
    monkeypatch.setattr(doctor, "version", VERSIONS.get)
    for capability, status, words in (
        (None, "ok", "kernels for 90a, and no GPU here"),
        ((9, 0), "ok", "kernels for 90a, which the GPU here runs"),
        ((10, 0), "broken", "kernels for 90a, and the GPU, of compute capability 10.0, runs none of them"),
    ):
        monkeypatch.setattr(doctor, "_compute_capability", lambda capability=capability: capability)
        finding = engine_finding(engine)
        assert finding.status == status and words in finding.detail
    built = {**VERSIONS, "tensorrt": "11.0.0"}
    EngineSidecar.write(engine, settings, built)
    monkeypatch.setattr(doctor, "version", built.get)
    finding = engine_finding(engine)
    assert finding.status == "broken"
    assert "was built for TensorRT 10.14.1, and 11.0.0 is installed" in finding.detail
    assert "does not exist" in engine_finding(tmp_path / "nothing").detail


def test_the_doctor_takes_a_library_that_lies_elsewhere(
    tmp_path: Path, engine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In place of what is found; both findings go by it, and the report does not overwrite it."""
    monkeypatch.setenv("BPKV_PLUGIN_PATH", str(tmp_path / "absent.so"))
    monkeypatch.setattr(doctor, "version", VERSIONS.get)
    monkeypatch.setattr(doctor, "_compute_capability", lambda: None)
    monkeypatch.setattr(doctor, "_module", lambda name, *_: Finding(name, "ok", ""))  # takes a minute
    library = tmp_path / "elsewhere.so"
    library.write_bytes(b"library")
    sha256 = hashlib.sha256(b"library").hexdigest()
    told = {"schema_version": 1, "sha256": sha256, "abi": 1, "tensorrt": "10.14.1", "targets": ["90a"]}
    library.with_suffix(".json").write_text(json.dumps(told))
    settings = SETTINGS.model_copy(update={"plugin_sha256": sha256})
    EngineSidecar.write(save_engine(engine, settings.document()), settings, VERSIONS)

    def said(*options: object) -> dict[str, str]:
        assert main(["doctor", "--engine-dir", str(engine), *map(str, options)]) == 2  # nobody can load that library
        lines = capsys.readouterr().out.splitlines()
        return {name: rest for name, _, rest in (line.partition(": ") for line in lines)}

    without, given = said(), said("--plugin-lib", library)
    assert without["engine"].startswith("broken: ") and "absent.so" in without["engine"]
    assert given["engine"].startswith("ok: ")
    assert "absent.so" in without["plugin library"]
    assert "absent.so" not in given["plugin library"] and "elsewhere.so" in given["plugin library"]
    assert main(["doctor", "--plugin-lib", str(library), "--json", str(library)]) == 2
    assert "--plugin-lib" in capsys.readouterr().err and library.read_bytes() == b"library"


def test_the_doctor_asks_for_the_folder_of_an_engine(engine: Path) -> None:
    for name in ("rank0.engine", "config.json"):
        finding = engine_finding(engine / name)
        assert finding.status == "broken"
        assert finding.detail == f"{engine / name} is a file; give the engine's folder, {engine}, to --engine-dir"
