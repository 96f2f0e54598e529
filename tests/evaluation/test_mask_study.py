"""Masks of a fixed size, and what contenders think of them beside what they cost."""

import pytest
import torch

from bpkv_trt.evaluation.cells import measure_sample
from bpkv_trt.evaluation.mask_rows import mask_rows
from bpkv_trt.evaluation.mask_study import KINDS
from bpkv_trt.evaluation.masks import masks_of
from bpkv_trt.models.loading import load_model
from tests.evaluation.small_comparison import LLAMA, comparison, tiny_llama
from tests.evaluation.test_cells import SEED, predictions, sample_of
from tests.runtime.masked_reference import MaskedReference


def drawn(kind: str, count: int, number: int = 5, tokens: int = 300) -> list[torch.Tensor]:
    return list(masks_of(KINDS[kind](count), tiny_llama().traits, tokens, number, seed=2, sinks=4, recent=16))


@pytest.mark.parametrize("kind", ["blocks", "random"])
@pytest.mark.parametrize("count", [1, 777, 4 * 2 * 280])
def test_masks_have_the_size_asked_for_and_spare_what_is_protected(kind: str, count: int) -> None:
    masks = drawn(kind, count)
    assert all(int(mask.sum()) == count and mask.shape == (4, 2, 300) for mask in masks)
    assert not any(mask[..., :4].any() or mask[..., -16:].any() for mask in masks)
    assert count == 4 * 2 * 280 or not torch.equal(masks[0], masks[1])


def test_blocks_are_long_and_keep_to_some_layers() -> None:
    def runs(mask: torch.Tensor) -> float:
        starts = (mask[..., 1:] & ~mask[..., :-1]).sum()
        return float(mask.sum() / starts)

    def spread(mask: torch.Tensor) -> float:
        return float(mask.double().mean((1, 2)).std())

    blocks, scattered = drawn("blocks", 700, 20), drawn("random", 700, 20)
    assert min(map(runs, blocks)) > 8 and max(map(runs, scattered)) < 2
    assert sum(map(spread, blocks)) > 5 * sum(map(spread, scattered))


def test_the_truth_is_that_of_masked_forwards_and_scores_are_sums() -> None:
    asked = comparison("snapkv[scope=global],bpkv,full", masks=4, horizon=8)
    record = measure_sample(tiny_llama(), asked, "passkey", SEED)
    sample, truth = sample_of("passkey", asked.lead_tokens), MaskedReference(load_model(LLAMA).model, {})
    prompt = len(sample.turns[0])
    evict = 4 * 2 * (prompt - int(0.3 * prompt))
    given = [*sample.turns[0], *sample.lead]
    for _ in range(record["full"]["continuation_tokens"] - 1):
        given.append(int(predictions(truth, given, None, 0, 1).argmax()))
    count = record["full"]["continuation_tokens"]
    full = predictions(truth, given, None, 0, count)
    assert [study["kind"] for study in record["masks"]] == ["blocks", "random"]
    for study in record["masks"]:
        assert study["scores"].keys() == {"snapkv[scope=global]", "bpkv"}
        masks = masks_of(KINDS[study["kind"]](evict), tiny_llama().traits, prompt, 4, SEED, sinks=4, recent=16)
        for mask, measured in zip(masks, study["truth"], strict=True):
            ours = predictions(truth, given, mask, prompt, count)
            assert measured == pytest.approx(float((full.exp() * (full - ours)).sum(-1).mean()), rel=1e-3)
        assert all(0 < score < 4 * 2 for score in study["scores"]["snapkv[scope=global]"])


Scores = list[float | None]


def record(task: str, seed: int, **scores: Scores) -> dict[str, object]:
    study = {"regime": "prefill", "budget": "0.2", "defer": 0, "kind": "blocks", "truth": [0.1, 0.2, 0.3]}
    return {"task": task, "seed": seed, "masks": [{**study, "scores": scores}]}


def test_rows_average_the_correlation_of_each_sample() -> None:
    samples: list[tuple[str, int, Scores]] = [
        ("t", 0, [1, 2, 3]), ("t", 1, [3, 2, 1]), ("u", 0, [2, 1, 3]), ("u", 1, [1, 1, 1])
    ]  # fmt: skip
    rows = mask_rows([record(task, seed, a=scores) for task, seed, scores in samples])
    assert [(row["task"], row["samples"]) for row in rows] == [("t", 2), ("u", 1), ("all", 3)]
    assert [row["spearman"] for row in rows] == pytest.approx([0.0, 0.5, 0.5 / 3])
    (alone,) = mask_rows([record("t", 0, a=[None, 1, 2])])
    assert alone["spearman"] == pytest.approx(1.0) and alone["low"] is alone["high"] is None
    assert [row["low"] is None for row in rows] == [False, True, False]


def test_contenders_are_compared_on_the_samples_that_count_for_both() -> None:
    rows = mask_rows(
        [
            record("t", 0, a=[1, 2, 3], b=[3, 2, 1]),
            record("t", 1, a=[1, 2, 3], b=[1, 2, 3]),
            record("t", 2, a=[3, 2, 1], b=[1, 1, 1]),
        ]
    )
    assert [(row["contender"], row["samples"]) for row in rows] == [("a", 3), ("b", 2)]
    ours, theirs = (row["paired"][0] for row in rows)
    assert (ours["against"], ours["samples"], ours["difference"]) == ("b", 2, pytest.approx(1.0))
    assert theirs["difference"] == pytest.approx(-1.0)
    assert (ours["low"], ours["high"]) == pytest.approx((0.0, 2.0))  # of two samples both may be drawn twice
