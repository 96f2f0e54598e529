"""Pictures: as many panels as there is to show, and files that are images and not blank."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import image

from bpkv_trt.evaluation import plots
from bpkv_trt.evaluation.cells import measure_sample
from bpkv_trt.evaluation.results import result_document
from tests.evaluation.small_comparison import comparison, tiny_llama


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    asked = comparison("bpkv,snapkv[scope=global],h2o,tova,full", budgets="0.5,0.3", masks=3, horizon=6, tokens=500)
    samples = [(task, seed) for task in ("passkey", "redundant_facts") for seed in (3, 4)]
    return result_document(asked, [measure_sample(tiny_llama(), asked, *sample) for sample in samples])


def test_every_picture_is_drawn(document: dict[str, Any], tmp_path: Path) -> None:
    files = plots.draw_all(document, tmp_path / "plots")
    names = ["kl_prefill", "accuracy_prefill", "retention_prefill", "masks_blocks_prefill", "masks_random_prefill"]
    assert [file.stem for file in files] == names
    for file in files:
        picture = image.imread(file)
        assert picture.shape[0] > 200 and picture.shape[1] > 200 and len(np.unique(picture)) > 20


def test_there_is_a_panel_for_everything(document: dict[str, Any]) -> None:
    rows = document["rows"]
    curves = plots.kl_against_budget(rows)
    assert [ax.get_title() for ax in curves.axes] == [
        "passkey (n = 2)", "redundant_facts (n = 2)", "all tasks (n = 4)",
    ]  # fmt: skip
    assert [text.get_text() for text in curves.legends[0].texts] == ["bpkv", "snapkv[scope=global]", "h2o", "tova"]
    means = [row["future_kl_mean"] for row in rows if (row["task"], row["contender"]) == ("passkey", "bpkv")]
    assert curves.axes[0].containers[0].lines[0].get_ydata().tolist() == means[::-1]  # from few entries to many
    table = plots.accuracy_table(rows)
    assert len(table.axes) == 1 and len(table.axes[0].texts) == (4 + 1) * 3 * 2
    maps = plots.retention_maps(rows)
    assert len(maps.axes) == 4 + 1  # and the colour bar
    assert maps.get_suptitle() == "all tasks, budget 0.3"
    scatter = plots.score_against_kl(document, "prefill", "blocks")
    assert len(scatter.axes) == 4 and all(len(ax.collections[0].get_offsets()) == 4 * 3 for ax in scatter.axes)


def test_what_there_is_not_is_not_drawn(document: dict[str, Any], tmp_path: Path) -> None:
    rows = [row for row in document["rows"] if row["policy"] == "full"]
    files = plots.draw_all({**document, "rows": rows, "mask_study": []}, tmp_path)
    assert [file.stem for file in files] == ["accuracy_prefill", "retention_prefill"]
