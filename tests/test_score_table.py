"""Tables of layer and head weights: what is read, what is refused, and what they do to shares and scores."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

from bpkv_trt.errors import ConfigError
from bpkv_trt.score_table import ScoreTable


def written(path: Path, weights: object) -> Path:
    path.write_text(json.dumps({"weights": weights}))
    return path


@pytest.mark.parametrize("weights", [[1.0, 0.5, 3.0], [[1.0, 0.5], [0.25, 2.0], [3.0, 8.0]]])
def test_both_formats_agree(tmp_path: Path, weights: list[object]) -> None:
    written(tmp_path / "table.json", weights)
    loaded = ScoreTable.load(tmp_path / "table.json")
    for dtype in (np.float64, np.float32, np.float16):
        save_file({"weights": np.array(weights, dtype=dtype)}, tmp_path / "table.safetensors")
        assert ScoreTable.load(tmp_path / "table.safetensors") == loaded
    assert np.array_equal(np.array(loaded.weights).reshape(np.shape(weights)), weights)


def test_a_layer_shares_by_the_mean_of_its_heads(tmp_path: Path) -> None:
    by_head = ScoreTable.load(written(tmp_path / "table.json", [[1, 3], [0.5, 0.5]]))
    assert by_head.layer_weights == (2.0, 0.5)
    assert by_head.score_weights("global") == by_head.score_weights("layer") == ((1 / 3, 1.0), (0.5 / 3, 0.5 / 3))
    by_layer = ScoreTable.load(written(tmp_path / "table.json", [2, 0.5]))
    assert by_layer.layer_weights == (2.0, 0.5)
    assert by_layer.score_weights("global") == ((1.0,), (0.25,))
    assert by_layer.score_weights("layer") is None and by_layer.score_weights("head") is None


@pytest.mark.parametrize("weights", [[1e308, 1e308], [[1e308, 1e308], [1e300, 1e308]], [1e-320, 2e-320], [10**300] * 2])
def test_only_ratios_matter_however_large_or_small(tmp_path: Path, weights: list[object]) -> None:
    table = ScoreTable.load(written(tmp_path / "table.json", weights))
    scores = table.score_weights("global")
    assert scores is not None
    assert all(0 < weight <= 1 for row in scores for weight in row)
    assert all(0 < weight < float("inf") for weight in table.layer_weights)
    assert bool(torch.isfinite(torch.tensor(scores)).all())


@pytest.mark.parametrize("weights", [[1e308, 1e-320], [1, 1e-10], [[1, 1], [1, 1e-12]]])
def test_ratios_that_rounding_would_lose_are_refused(tmp_path: Path, weights: list[object]) -> None:
    with pytest.raises(ConfigError, match=r"table\.json has positive weights from .* to .*ratio of 1e\+09"):
        ScoreTable.load(written(tmp_path / "table.json", weights))


@pytest.mark.parametrize(
    "content",
    ["", "[1, 2]", '{"weight": [1]}', '{"weights": 1}', '{"weights": []}', '{"weights": [1, 0]}', '{"weights": [-1]}']
    + ['{"weights": [NaN]}', '{"weights": [1e999]}', '{"weights": [true]}', '{"weights": ["1"]}', '{"weights": [[]]}']
    + ['{"weights": [[[1]]]}', '{"weights": [1, [1]]}', '{"weights": [[1], [1, 2]]}', '{"weights": null}']
    + [f'{{"weights": [1{"0" * 400}]}}', f'{{"weights": [1{"0" * 5000}]}}', "[" * 100_000, '{"weights": [-Infinity]}']
    + ['{"weights": [1], "weights": [2]}', '{"weights": [1], "model": {"a": 1, "a": 1}}', "caf\xe9", '{"weights": [1'],
)
def test_unusable_tables_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "table.json").write_text(content, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"table\.json.*positive") as refusal:
        ScoreTable.load(tmp_path / "table.json")
    assert len(str(refusal.value)) < 1000 and "\n" not in str(refusal.value)
    assert "Error" not in str(refusal.value) and "b'" not in str(refusal.value), "nothing as Python says it"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.bool, torch.int64])
def test_tensors_of_other_types_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    save_torch({"weights": torch.ones(3).to(dtype)}, tmp_path / "table.safetensors")
    with pytest.raises(ConfigError, match=r"table\.safetensors.*float16, float32 or float64") as refusal:
        ScoreTable.load(tmp_path / "table.safetensors")
    assert "Error" not in str(refusal.value)


def test_other_tensors_beside_the_weights_are_refused(tmp_path: Path) -> None:
    for names in (["weights", "bias"], ["weight"]):
        save_file({name: np.ones(3) for name in names}, tmp_path / "table.safetensors")
        with pytest.raises(ConfigError, match=f"its tensors are .*{sorted(names)[0]}"):
            ScoreTable.load(tmp_path / "table.safetensors")


@pytest.mark.parametrize("shape", [(), (0,), (2, 0), (2, 2, 2)])
def test_tensors_of_other_shapes_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    save_file({"weights": np.ones(shape)}, tmp_path / "table.safetensors")
    with pytest.raises(ConfigError, match=r"table\.safetensors"):
        ScoreTable.load(tmp_path / "table.safetensors")


def test_missing_and_damaged_tables_are_refused(tmp_path: Path) -> None:
    (tmp_path / "damaged.safetensors").write_bytes(b"\x00" * 20)
    (tmp_path / "flat.safetensors").write_bytes(b"")
    (tmp_path / "directory.json").mkdir()
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    for name in ("absent.json", "absent.safetensors", "damaged.safetensors", "flat.safetensors", "directory.json"):
        with pytest.raises(ConfigError, match=name):
            ScoreTable.load(tmp_path / name)
    with pytest.raises(ConfigError, match=r"bytes\.json"):
        ScoreTable.load(tmp_path / "bytes.json")


def test_a_table_fits_its_model_and_scope_or_is_refused(tmp_path: Path) -> None:
    by_layer = ScoreTable.load(written(tmp_path / "table.json", [1, 2, 3]))
    by_layer.check(3, 5, "head")
    with pytest.raises(ConfigError, match="3 weights and the model 4 layers"):
        by_layer.check(4, 5, "head")
    by_head = ScoreTable.load(written(tmp_path / "table.json", [[1, 2], [3, 4]]))
    by_head.check(2, 2, "layer")
    by_head.check(2, 2, "global")
    with pytest.raises(ConfigError, match="2 heads a layer and the model 3 KV heads"):
        by_head.check(2, 3, "global")
    with pytest.raises(ConfigError, match="in scope head all heads of a layer keep the same"):
        by_head.check(2, 2, "head")
    ScoreTable.load(written(tmp_path / "table.json", [[1], [3]])).check(2, 1, "head")  # one head a layer
