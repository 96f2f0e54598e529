"""GGUF files become cached folders once: exact, verified, safe against crashes and against one another."""

import errno
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from bpkv_trt.errors import ModelError
from bpkv_trt.models import checkpoint_cache
from bpkv_trt.models.checkpoint_cache import MANIFEST, cached_checkpoint
from bpkv_trt.models.gguf_file import GgufFile, sha256_of
from bpkv_trt.models.loading import load_model
from tests.models.small_gguf import permuted, small_llama, write_gguf

TOKENS = torch.randint(4, 290, (1, 20), generator=torch.Generator().manual_seed(2))
BUILD = "import sys; from bpkv_trt.models.loading import load_model; load_model(sys.argv[1]); print('loaded')"


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return small_llama()


@pytest.fixture
def source(tmp_path: Path, model: PreTrainedModel) -> Path:
    return write_gguf(tmp_path / "small.gguf", model)


def folders(cache: Path) -> list[Path]:
    models = cache / "models"
    return [entry for entry in models.iterdir() if entry.suffix != ".lock"] if models.exists() else []


def checkpoint(source: Path) -> GgufFile:
    return GgufFile(source.name, (source,))


def in_pieces(source: Path) -> tuple[Path, Path]:
    """The same file, cut in two."""
    data, pieces = source.read_bytes(), (source.with_name("small.part0"), source.with_name("small.part1"))
    pieces[0].write_bytes(data[:5000])
    pieces[1].write_bytes(data[5000:])
    return pieces


def test_weights_survive_the_way_through_gguf_and_cache(
    source: Path, model: PreTrainedModel, model_cache: Path
) -> None:
    loaded = load_model(str(source))
    for name, parameter in model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], parameter), name
    loaded.model.set_attn_implementation("eager")
    torch.testing.assert_close(loaded.model(TOKENS).logits, model(TOKENS).logits, rtol=1e-5, atol=1e-5)
    assert not loaded.model.training and not any(p.requires_grad for p in loaded.model.parameters())
    assert loaded.traits.vocabulary == 300 and loaded.encoder.adds_bos


def test_quantised_weights_are_dequantised_as_gguf_itself_does(
    tmp_path: Path, model: PreTrainedModel, model_cache: Path
) -> None:
    loaded = load_model(str(write_gguf(tmp_path / "q8.gguf", model, quantised=True)))
    kind = gguf.GGMLQuantizationType.Q8_0
    for name, heads in (("k_proj", 2), ("q_proj", 4)):
        key = f"model.layers.1.self_attn.{name}.weight"
        original = permuted(model.state_dict()[key].numpy(), heads)
        expected = gguf.quants.dequantize(gguf.quants.quantize(original, kind), kind)
        assert np.array_equal(permuted(loaded.model.state_dict()[key].numpy(), heads), expected)


def test_second_load_builds_nothing(source: Path, model_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = cached_checkpoint(checkpoint(source))
    monkeypatch.setattr(checkpoint_cache, "dequantise", lambda *_: pytest.fail("built twice"))
    assert cached_checkpoint(checkpoint(source)) == first
    manifest = json.loads((first / MANIFEST).read_text())
    assert manifest["sha256"]["model.safetensors"] == sha256_of([first / "model.safetensors"])
    assert {"config.json", "tokenizer.json"} < set(manifest["sha256"])


def test_checkpoint_in_pieces_equals_the_whole(source: Path, model_cache: Path) -> None:
    pieces = in_pieces(source)
    whole, joined = checkpoint(source), GgufFile("joined", pieces)
    assert whole.sha256() == joined.sha256()
    folder = cached_checkpoint(joined)
    assert cached_checkpoint(whole) == folder
    assert not list(folder.glob("*.gguf"))


@pytest.mark.parametrize(
    ("victim", "how"),
    [
        ("model.safetensors", "bit flip"),
        ("model.safetensors", "truncated"),
        ("config.json", "deleted"),
        ("tokenizer.json", "bit flip"),
        (MANIFEST, "bit flip"),
        (MANIFEST, "truncated"),
    ],
)
def test_damaged_cache_is_reported_and_rebuilt(
    victim: str, how: str, source: Path, model_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = cached_checkpoint(checkpoint(source))
    file = folder / victim
    data = bytearray(file.read_bytes())
    if how == "deleted":
        file.unlink()
    elif how == "truncated":
        file.write_bytes(data[: len(data) // 2])
    else:
        position = data.index(b'"sha256"') + 2 if victim == MANIFEST else len(data) // 2
        data[position] ^= 1
        file.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        assert cached_checkpoint(checkpoint(source)) == folder
    assert "damaged" in caplog.text and "rebuilding" in caplog.text
    hashes = json.loads((folder / MANIFEST).read_text())["sha256"]
    assert all(sha256_of([folder / name]) == digest for name, digest in hashes.items())


def build_in_a_process(source: Path, cache: Path) -> subprocess.Popen[str]:
    environment = os.environ | {"BPKV_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", BUILD, str(source)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def test_two_processes_at_once_build_one_folder(source: Path, model_cache: Path) -> None:
    both = [build_in_a_process(source, model_cache) for _ in range(2)]
    for process in both:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0 and out == "loaded\n", err
        assert "it/s" not in err, "progress bars belong on a terminal only"
    assert len(folders(model_cache)) == 1


def test_killed_half_way_leaves_no_folder_that_could_be_taken_for_whole(source: Path, model_cache: Path) -> None:
    process = build_in_a_process(source, model_cache)
    deadline = time.monotonic() + 60
    while not folders(model_cache) and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    assert [entry.suffix for entry in folders(model_cache)] == [".partial"]
    folder = cached_checkpoint(checkpoint(source))
    assert folders(model_cache) == [folder]


def test_full_disk_leaves_nothing_and_says_so(source: Path, model_cache: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # the weights are larger, so writing them fails for real
    try:
        with pytest.raises(ModelError, match="BPKV_CACHE_DIR"):
            cached_checkpoint(checkpoint(source))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert folders(model_cache) == []
    cached_checkpoint(checkpoint(source))


def test_cache_directory_that_cannot_be_made(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("BPKV_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match="cannot be used"):
        cached_checkpoint(checkpoint(source))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_piece_that_cannot_be_read_is_told_by_its_own_name(
    victim: int, source: Path, model_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = in_pieces(source)
    opened = Path.open

    def forbidden(path: Path, *options: Any, **named: Any) -> Any:
        if path == pieces[victim]:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *options, **named)

    monkeypatch.setattr(Path, "open", forbidden)  # root may read everything
    with pytest.raises(ModelError, match=f"part{victim} .*cannot be read .Permission denied") as caught:
        cached_checkpoint(GgufFile("joined", pieces))
    assert "BPKV_CACHE_DIR" not in str(caught.value)


def test_a_piece_that_vanishes_while_it_is_joined_is_no_fault_of_the_cache(
    source: Path, model_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = in_pieces(source)
    digest = GgufFile.sha256

    def then_vanish(checkpoint: GgufFile) -> str:
        found = digest(checkpoint)
        pieces[1].unlink()
        return found

    monkeypatch.setattr(GgufFile, "sha256", then_vanish)
    with pytest.raises(ModelError, match=r"part1 .*cannot be read \(No such file") as caught:
        cached_checkpoint(GgufFile("joined", pieces))
    assert "BPKV_CACHE_DIR" not in str(caught.value) and folders(model_cache) == []


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.3, 0.999])
def test_truncated_gguf_is_refused_and_nothing_is_cached(kept: float, source: Path, model_cache: Path) -> None:
    data = source.read_bytes()
    source.write_bytes(data[: int(len(data) * kept)])
    with pytest.raises(ModelError) as caught:
        load_model(str(source))
    assert "\n" not in str(caught.value) and "Traceback" not in str(caught.value)
    assert folders(model_cache) == []


@pytest.mark.parametrize("position", (4, 9, 22, 40))
def test_flipped_bit_in_the_header_is_an_error(position: int, source: Path, model_cache: Path) -> None:
    data = bytearray(source.read_bytes())
    data[position] ^= 0x40
    source.write_bytes(data)
    with pytest.raises(ModelError) as caught:
        load_model(str(source))
    assert "\n" not in str(caught.value)
    assert folders(model_cache) == []


def test_published_hash_reveals_a_flipped_weight(source: Path, model_cache: Path) -> None:
    published = checkpoint(source).sha256()
    data = bytearray(source.read_bytes())
    data[-100] ^= 1
    source.write_bytes(data)
    with pytest.raises(ModelError, match="damaged"):
        cached_checkpoint(GgufFile("small", (source,), published))
    assert folders(model_cache) == []


def test_gguf_without_a_tensor_is_refused(tmp_path: Path, model: PreTrainedModel, model_cache: Path) -> None:
    source = write_gguf(tmp_path / "hole.gguf", model, without=("blk.1.attn_output.weight",))
    with pytest.raises(ModelError, match="lacks 1 of .*layers.1.self_attn.o_proj"):
        load_model(str(source))
    assert folders(model_cache) == []


def test_gguf_with_nan_is_refused_before_it_is_cached(tmp_path: Path, model_cache: Path) -> None:
    damaged = small_llama()
    damaged.model.layers[0].mlp.up_proj.weight[3, 4] = float("nan")
    with pytest.raises(ModelError, match="NaN"):
        load_model(str(write_gguf(tmp_path / "nan.gguf", damaged)))
    assert folders(model_cache) == []
