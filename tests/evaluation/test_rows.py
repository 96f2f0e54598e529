"""Rows of a comparison from cells made by hand."""

import math
from typing import Any

import pytest

from bpkv_trt.evaluation.rows import FLOOR, rows_of

ENDS = ("low", "high")


def cell(
    contender: str, seed: int, kl: float | None, right: list[bool], task: str = "t", **more: Any
) -> dict[str, Any]:
    known = kl is not None
    return {
        "task": task, "variant": "v", "seed": seed, "contender": contender, "policy": contender, "regime": "prefill",
        "scope": "head", "budget": "0.2", "tokens": 4 if known else 0, "future_kl_mean": kl, "future_kl_median": kl,
        "future_kl_max": kl and 2 * kl, "future_kl_first": kl and kl / 2, "top1": 0.5 if known else None,
        "common_prefix": 1 if known else None, "correct": right, "correct_full": [True, False], "entries_before": 100,
        "entries_after": 20, "entries_fraction": 0.2, "bytes_before": 1000, "bytes_after": 200, "pages_freed": 3,
        "estimated_kl": None, "one_step_kl": None, "epsilon_relaxed": 0, "rejected": 0, "compress_s": 0.1,
        "decode_s": 0.01, "compactions": 1, "notes": [], "retention": [[0.2, 0.2]], **more,
    }  # fmt: skip


def test_a_contender_that_loses_less_has_a_negative_log_ratio() -> None:
    cells = [cell("a", seed, 0.1 * 2**seed, [True, False]) for seed in range(5)]
    cells += [cell("b", seed, 0.2 * 2**seed, [False, False]) for seed in range(5)]
    a, b = rows_of("m", cells, [])
    assert a["paired"][0] == {
        "against": "b",
        "log_ratio": pytest.approx(-math.log(2), abs=1e-6),
        "low": pytest.approx(-math.log(2), abs=1e-6),  # the same ratio in every sample: no width
        "high": pytest.approx(-math.log(2), abs=1e-6),
    }
    assert b["paired"][0]["log_ratio"] == pytest.approx(math.log(2), abs=1e-6)
    assert a["future_kl_mean"] == pytest.approx(0.1 * 31 / 5) and a["future_kl_median"] == pytest.approx(0.4)
    assert a["future_kl_max"] == pytest.approx(3.2) and a["future_kl_low"] < a["future_kl_mean"] < a["future_kl_high"]


def test_two_that_lose_nothing_are_equal_and_zero_is_finite() -> None:
    cells = [cell(name, 0, kl, [True, True]) for name, kl in (("a", 0.0), ("b", 0.0), ("c", 0.5))]
    a, _, _ = rows_of("m", cells, [])
    assert [each["log_ratio"] for each in a["paired"]] == [0.0, pytest.approx(math.log(FLOOR / (0.5 + FLOOR)))]


def test_accuracy_is_over_answers_and_over_those_the_full_cache_has() -> None:
    cells = [cell("a", 0, 0.1, [True, True]), cell("a", 1, 0.1, [False, True]), cell("a", 2, 0.1, [True, False])]
    (row,) = rows_of("m", cells, [])
    assert row["answers"] == 6 and row["accuracy"] == pytest.approx(4 / 6)
    assert row["accuracy_full"] == 0.5 and row["accuracy_over_full"] == pytest.approx(2 / 3)


def test_samples_that_say_nothing_count_as_samples_but_not_in_the_divergence() -> None:
    (row,) = rows_of("m", [cell("a", 0, None, [True, False]), cell("a", 1, 0.3, [True, False])], [])
    assert (row["samples"], row["continued"], row["tokens"]) == (2, 1, 4)
    assert row["future_kl_mean"] == pytest.approx(0.3)
    (row,) = rows_of("m", [cell("a", 0, None, [])], [])
    assert row["future_kl_mean"] is None and row["accuracy"] is None and row["paired"] == []


def test_one_sample_has_no_interval() -> None:
    cells = [cell(name, seed, 0.3, [True, False]) for name in ("a", "b") for seed in range(2)]
    for chosen, missing in ((cells, False), (cells[::2], True)):
        row = rows_of("m", chosen, [])[0]
        bounds = [row[f"{name}_{end}"] for name in ("future_kl", "accuracy", "accuracy_over_full") for end in ENDS]
        bounds += [row["paired"][0][end] for end in ENDS]
        assert all((bound is None) == missing for bound in bounds), bounds


def test_rows_over_all_tasks_and_what_was_skipped() -> None:
    cells = [cell("a", 0, 0.1, [True, False]), cell("a", 0, 0.3, [False, False], task="u")]
    rows = rows_of("m", cells, [{"task": "u", "seed": 1, "skipped": "too long"}])
    assert [(row["task"], row["samples"], row["skipped"]) for row in rows] == [("t", 1, 0), ("u", 1, 1), ("all", 2, 1)]
    assert rows[2]["future_kl_mean"] == pytest.approx(0.2) and rows[2]["accuracy"] == 0.25


def test_the_estimate_beside_its_truth() -> None:
    pairs = [(0.1, 0.2), (0.2, 0.2), (0.6, 0.3)]
    cells = [
        cell("a", seed, 0.1, [True, False], estimated_kl=estimate, one_step_kl=truth + seed * 1e-9)
        for seed, (estimate, truth) in enumerate(pairs)
    ]
    (row,) = rows_of("m", cells, [])
    assert row["estimate_ratio"] == pytest.approx(1.0) and row["estimate_spearman"] == pytest.approx(1.0)
