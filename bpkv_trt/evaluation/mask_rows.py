"""Mask studies of all samples summed up: how well each contender ranks masks."""

import math
from collections.abc import Mapping, Sequence

from bpkv_trt.evaluation.bootstrap import Bootstrap, Interval
from bpkv_trt.evaluation.journal import Record
from bpkv_trt.evaluation.ranks import spearman
from bpkv_trt.evaluation.rows import ALL

Setting = tuple[str, str, int, str]  # regime, budget, defer, kind of mask
Sample = tuple[str, int]  # task, seed


def mask_rows(records: Sequence[Record]) -> list[Record]:
    """Spearman of a contender's mask scores with the masks' future KL, within each sample, mean over the samples.

    records: finished samples, with `masks` as `mask_study` leaves them. A score that is no number does not count, nor
    does a sample in which a contender gives every mask the same score. `paired` has the mean difference to every other
    contender, over the samples that count for both.
    """
    rows = []
    tasks = list(dict.fromkeys(record["task"] for record in records if record.get("masks")))
    for task in (*tasks, ALL) if len(tasks) > 1 else tasks:
        settings: dict[Setting, dict[str, dict[Sample, float]]] = {}
        masks = 0
        for record in records:
            if task in (record["task"], ALL):
                for study in record.get("masks", ()):
                    masks = len(study["truth"])
                    _collect(settings, (record["task"], record["seed"]), study)
        for setting, contenders in settings.items():
            rows += [_row(task, masks, setting, label, contenders) for label in contenders]
    return rows


def _collect(settings: dict[Setting, dict[str, dict[Sample, float]]], sample: Sample, study: Record) -> None:
    setting = (study["regime"], study["budget"], study["defer"], study["kind"])
    for label, scores in study["scores"].items():
        known = [place for place, score in enumerate(scores) if score is not None]
        correlation = spearman([scores[i] for i in known], [study["truth"][i] for i in known])
        if not math.isnan(correlation):
            settings.setdefault(setting, {}).setdefault(label, {})[sample] = correlation


def _row(
    task: str, masks: int, setting: Setting, label: str, contenders: Mapping[str, Mapping[Sample, float]]
) -> Record:
    own = contenders[label]
    mean = _mean(own)
    regime, budget, defer, kind = setting
    return {
        "task": task,
        "contender": label,
        "kind": kind,
        "regime": regime,
        "budget": budget,
        "defer": defer,
        "masks": masks,
        "samples": len(own),
        "spearman": mean.value,
        "low": mean.low,
        "high": mean.high,
        "paired": [_paired(own, other, contenders[other]) for other in contenders if other != label],
    }


def _paired(own: Mapping[Sample, float], other: str, others: Mapping[Sample, float]) -> Record:
    common = {sample: own[sample] - others[sample] for sample in own if sample in others}
    if not common:
        return {"against": other, "samples": 0, "difference": None, "low": None, "high": None}
    mean = _mean(common)
    return {
        "against": other,
        "samples": len(common),
        "difference": mean.value,
        "low": mean.low,
        "high": mean.high,
    }


def _mean(values: Mapping[Sample, float]) -> Interval:
    return Bootstrap([task for task, _ in values]).mean(list(values.values()))
