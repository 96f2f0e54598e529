"""What finished samples must have, wherever they are read back: files are edited, and cut off."""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeInt, ValidationError

from bpkv_trt.errors import quoted

Number = float | None


class _Recorded(BaseModel):
    model_config = ConfigDict(strict=True)


class _Cell(_Recorded):
    """What the rows of a comparison are made of."""

    task: str
    seed: int
    contender: str
    policy: str
    regime: str
    scope: str
    budget: str
    tokens: NonNegativeInt
    future_kl_mean: Number
    future_kl_max: Number
    future_kl_first: Number
    top1: Number
    common_prefix: Number
    correct: list[bool]
    correct_full: list[bool]
    entries_fraction: Number
    bytes_before: Number
    bytes_after: Number
    pages_freed: NonNegativeInt
    estimated_kl: Number
    one_step_kl: Number
    epsilon_relaxed: NonNegativeInt
    compactions: NonNegativeInt
    compress_s: Number
    decode_s: Number
    notes: list[str]
    retention: list[list[float]]


class _Study(_Recorded):
    regime: str
    budget: str
    defer: int
    kind: str
    truth: list[float]
    scores: dict[str, list[Number]]


class _Skipped(_Recorded):
    task: str
    seed: int
    skipped: str


class _Sample(_Recorded):
    task: str
    seed: int
    full: dict[str, Any]
    cells: list[_Cell]
    masks: list[_Study]


_MEASURED = ("future_kl_mean", "future_kl_max", "future_kl_first", "top1", "common_prefix")


def check_records(records: Iterable[Mapping[str, Any]], settings: Mapping[str, Any]) -> None:
    """Raise ValueError, in words for a user, unless every sample is one that these settings lead to, and whole."""
    arms = Counter((arm["contender"], arm["regime"], arm["budget"]) for arm in settings["arms"])
    shapes = set()
    for record in records:
        name = f"the sample {quoted(record.get('task'))}, seed {quoted(record.get('seed'))}"
        try:
            if "skipped" in record:
                _Skipped.model_validate(record)
                continue
            sample = _Sample.model_validate(record)
        except ValidationError as error:
            problem = error.errors(include_url=False)[0]
            place = ".".join(map(str, problem["loc"]))
            lacking = problem["type"] == "missing"
            found = f"lacks {place}" if lacking else f"has {place} {quoted(problem['input'])}: {problem['msg'].lower()}"
            raise ValueError(f"{name} {found}") from None
        if Counter((cell.contender, cell.regime, cell.budget) for cell in sample.cells) != arms:
            raise ValueError(f"{name} has not one cell for each contender, regime and budget")
        if any((cell.task, cell.seed) != (sample.task, sample.seed) for cell in sample.cells):
            raise ValueError(f"{name} has a cell of another sample")
        if len({cell.tokens for cell in sample.cells}) > 1 or not all(map(_agrees, sample.cells)):
            raise ValueError(f"{name} has cells whose numbers contradict one another")
        shapes |= {tuple(map(len, cell.retention)) for cell in sample.cells}
        if len(shapes) > 1 or 0 in next(iter(shapes)):
            raise ValueError(f"{name} has a retention of another number of layers or heads")


def _agrees(cell: _Cell) -> bool:
    measured = cell.tokens == 0 or all(getattr(cell, name) is not None for name in _MEASURED)
    return measured and len(cell.correct) == len(cell.correct_full)
