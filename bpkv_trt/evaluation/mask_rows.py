"""Mask studies of all samples summed up: how well each contender ranks masks."""

import math
from collections.abc import Sequence

from bpkv_trt.evaluation.bootstrap import Bootstrap
from bpkv_trt.evaluation.journal import Record
from bpkv_trt.evaluation.ranks import spearman
from bpkv_trt.evaluation.rows import ALL

Setting = tuple[str, str, int, str]  # regime, budget, defer, kind of mask


def mask_rows(records: Sequence[Record]) -> list[Record]:
    """Spearman of a contender's mask scores with the masks' future KL, within each sample, mean over the samples.

    records: finished samples, with `masks` as `mask_study` leaves them. A score that is no number does not count, nor
    does a sample in which a contender gives every mask the same score.
    """
    rows = []
    tasks = list(dict.fromkeys(record["task"] for record in records if record.get("masks")))
    for task in (*tasks, ALL) if len(tasks) > 1 else tasks:
        correlations: dict[tuple[Setting, str], list[tuple[str, float]]] = {}
        masks = 0
        for record in records:
            if task in (record["task"], ALL):
                for study in record.get("masks", ()):
                    masks = len(study["truth"])
                    _collect(correlations, record["task"], study)
        rows += [_row(task, masks, *key, values) for key, values in correlations.items()]
    return rows


def _collect(correlations: dict[tuple[Setting, str], list[tuple[str, float]]], task: str, study: Record) -> None:
    setting = (study["regime"], study["budget"], study["defer"], study["kind"])
    for label, scores in study["scores"].items():
        known = [place for place, score in enumerate(scores) if score is not None]
        correlation = spearman([scores[i] for i in known], [study["truth"][i] for i in known])
        if not math.isnan(correlation):
            correlations.setdefault((setting, label), []).append((task, correlation))


def _row(task: str, masks: int, setting: Setting, label: str, values: Sequence[tuple[str, float]]) -> Record:
    mean = Bootstrap([of for of, _ in values]).mean([value for _, value in values])
    regime, budget, defer, kind = setting
    return {
        "task": task,
        "contender": label,
        "kind": kind,
        "regime": regime,
        "budget": budget,
        "defer": defer,
        "masks": masks,
        "samples": len(values),
        "spearman": mean.value,
        "low": mean.low,
        "high": mean.high,
    }
