"""Pictures: as many panels as there is to show, and files that are images and not blank."""

import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib import image

from bpkv_trt.errors import InputError
from bpkv_trt.evaluation import plots
from bpkv_trt.evaluation.cells import measure_sample
from bpkv_trt.evaluation.results import result_document
from bpkv_trt.picture import check_pictures
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
    check_pictures(tmp_path / "plots", plots.NAMES)
    for file in files:
        drawn = file.read_bytes()
        file.write_bytes(b"theirs")
        with pytest.raises(InputError, match=f"{file.name} is there and was not drawn by bpkv"):
            check_pictures(tmp_path / "plots", plots.NAMES)
        file.write_bytes(drawn)


def test_a_full_disk_is_told_with_the_picture_s_name_and_leaves_no_part_of_it(
    document: dict[str, Any], tmp_path: Path
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))  # less than a picture has, so writing it fails for real
    try:
        with pytest.raises(InputError, match=r"kl_prefill\.png cannot be written \(File too large\)"):
            plots.draw_all(document, tmp_path / "plots")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)
    assert [*(tmp_path / "plots").iterdir()] == []


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
    assert len(table.axes) == 2 and len(table.axes[0].texts) == (4 + 1) * 3 * 2  # and the colour bar
    assert [label.get_text() for label in table.axes[0].get_xticklabels()][-1].startswith("tasks with answers\nbudget")
    maps = plots.retention_maps(rows)
    assert len(maps.axes) == 4 + 1  # and the colour bar
    assert maps.get_suptitle() == (
        "rows kept, all tasks, regime prefill, budget 0.3 (the smallest)\nevicts nothing, not drawn: full"
    )
    assert curves.get_suptitle().endswith("regime prefill\nKL 0, not drawn: full")
    scatter = plots.score_against_kl(document, "prefill", "blocks")
    assert len(scatter.axes) == 4 and all(len(ax.collections[0].get_offsets()) == 4 * 3 for ax in scatter.axes)


def test_what_there_is_not_is_not_drawn(document: dict[str, Any], tmp_path: Path) -> None:
    rows = [row for row in document["rows"] if row["policy"] == "full"]
    files = plots.draw_all({**document, "rows": rows, "mask_study": []}, tmp_path)
    assert [file.stem for file in files] == ["accuracy_prefill", "retention_prefill"]


@pytest.mark.parametrize("masks", [1, 2, 3, 10, 11, 40])
def test_means_stand_at_the_ranks_of_few_masks_and_at_tenths_of_many(masks: int) -> None:
    """Against a plain loop; the greatest rank belongs to the last tenth, and no mask to two of them."""
    ranks = [place / max(1, masks - 1) for place in range(masks)] * 3
    costs = np.random.default_rng(masks).random(3 * masks)
    groups: dict[float, list[tuple[float, float]]] = {}
    for rank, cost in zip(ranks, costs.tolist(), strict=True):
        groups.setdefault(rank if masks <= 10 else min(int(rank * 10), 9), []).append((rank, cost))
    expected = [np.mean(groups[key], axis=0) for key in sorted(groups)]
    found = np.transpose(plots.mean_by_rank(np.array(ranks), costs))
    assert found == pytest.approx(np.array(expected)) and len(found) == min(masks, 10)


def test_one_sample_is_drawn_without_intervals_and_its_sizes_can_be_read(document: dict[str, Any]) -> None:
    asked = comparison("snapkv,h2o,full", budgets="0.3", masks=2, horizon=6, tokens=500)
    alone = result_document(asked, [measure_sample(tiny_llama(), asked, "passkey", 3)])
    table = plots.accuracy_table(alone["rows"])
    assert all("–" not in text.get_text() for text in table.axes[0].texts) and "interval" not in table.get_suptitle()
    scatter = plots.score_against_kl(alone, "prefill", "random")
    for ax in scatter.axes:
        low, high = ax.get_ylim()
        assert "±" not in ax.get_title() and ax.get_title().count("[") == 0
        assert sum(low <= tick <= high for tick in ax.yaxis.get_majorticklocs()) >= 3
        assert ax.lines[0].get_xdata().tolist() == [0, 1]
    assert len(scatter.legends[0].texts) == 2
    plots.kl_against_budget(alone["rows"])


def test_contenders_stay_nearer_to_their_budget_than_to_the_next() -> None:
    for ticks in ([0.2], [0.1, 0.2], [0.2, 0.25, 0.9]):
        shifts = [plots._shift(place, 19, ticks) for place in range(19)]
        assert shifts == sorted(shifts) and shifts[9] == 1 and np.prod(shifts) == pytest.approx(1)
        for low, high in zip(ticks, ticks[1:], strict=False):
            assert low * shifts[-1] < high * shifts[0]


@pytest.mark.parametrize(
    ("label", "width", "lines"),
    [
        ("bpkv", 20, ["bpkv"]),
        ("bpkv[refine=0,readout=direct]", 20, ["bpkv", "[refine=0,", "readout=direct]"]),
        ("inertiakv_score_free", 16, ["inertiakv_score_", "free"]),
        (
            "ripplekv[layer_table=a/b/table_of_layers.json]",
            20,
            ["ripplekv", "[layer_table=a/b/", "table_of_", "layers.json]"],
        ),
    ],
)
def test_long_labels_are_broken_between_words(label: str, width: int, lines: list[str]) -> None:
    assert plots._wrapped(label, width).splitlines() == lines
