"""One sample of a comparison: the full cache once, then every arm on it, each a cell of the result."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict

from bpkv_trt.errors import InputError
from bpkv_trt.evaluation.arm import Arm
from bpkv_trt.evaluation.comparison import Comparison
from bpkv_trt.evaluation.encoded import EncodedSample
from bpkv_trt.evaluation.journal import Record
from bpkv_trt.evaluation.mask_study import study_masks
from bpkv_trt.evaluation.reference import Reference, reference_of
from bpkv_trt.evaluation.room import engine_for, fitting_sample
from bpkv_trt.evaluation.trial import Trial, run_trial
from bpkv_trt.models.loading import LoadedModel
from bpkv_trt.models.stop_tokens import stop_tokens_of
from bpkv_trt.runtime.event import CompactionEvent


def measure_sample(loaded: LoadedModel, comparison: Comparison, task: str, seed: int) -> Record:
    """All cells of one sample, or `skipped` with the reason where its prompt does not fit."""
    try:
        sample = fitting_sample(loaded, comparison, task, seed)
    except InputError as error:
        return {"task": task, "seed": seed, "skipped": str(error)}
    engine = engine_for(loaded, comparison, sample)
    with reference_of(
        engine, sample, comparison.decoded, comparison.untouched, stop_tokens_of(loaded.model, loaded.tokenizer)
    ) as reference:
        cells = []
        for arm in comparison.arms:
            trial = run_trial(loaded, arm.seeded(seed), reference)
            cells.append(_cell(task, seed, sample, arm, trial, reference))
        masks = study_masks(loaded, comparison, reference, seed) if comparison.masks else []
    return {"task": task, "seed": seed, "full": _facts(loaded, reference), "cells": cells, "masks": masks}


def _facts(loaded: LoadedModel, reference: Reference) -> Record:
    sample = reference.sample
    return {
        "variant": sample.variant,
        "prompt_tokens": sample.prompt_tokens,
        "lead_tokens": len(sample.lead),
        "continuation": loaded.tokenizer.decode(list(reference.continuation)),
        "continuation_tokens": len(reference.continuation),
        "first_measured": reference.first,
        "correct": list(reference.correct),
        "measured": list(reference.measured),
    }


def _cell(task: str, seed: int, sample: EncodedSample, arm: Arm, trial: Trial, reference: Reference) -> Record:
    cell: Record = {
        "task": task,
        "variant": sample.variant,
        "seed": seed,
        "contender": arm.contender,
        "policy": arm.config.policy,
        "regime": arm.regime,
        "scope": arm.config.scope,
        "budget": arm.budget,
        **_agreement(trial),
        "correct": list(trial.correct),
        "correct_full": [right for right, late in zip(reference.correct, reference.measured, strict=True) if late],
        **_compaction(trial.events),
        "one_step_kl": trial.one_step_kl,
        "decode_s": trial.decode_s,
        "retention": [[round(share, 4) for share in layer] for layer in trial.retention.tolist()],
    }
    return cell


def _agreement(trial: Trial) -> Record:
    gap = trial.gap
    if gap is None:
        names = ("mean", "median", "max", "first")
        return {"tokens": 0, **{f"future_kl_{name}": None for name in names}, "top1": None, "common_prefix": None}
    return {
        "tokens": len(gap.kl),
        "future_kl_mean": statistics.fmean(gap.kl),
        "future_kl_median": statistics.median(gap.kl),
        "future_kl_max": max(gap.kl),
        "future_kl_first": gap.kl[0],
        "top1": sum(gap.top1) / len(gap.top1),
        "common_prefix": gap.common_prefix,
    }


def _compaction(events: Sequence[CompactionEvent]) -> Record:
    """Of the prompt's compaction where there is one, else of the answer's last; times and pages over all."""
    of_prompt = [event for event in events if event.regime != "generation"]
    main = of_prompt[0] if of_prompt else events[-1] if events else None
    notes = list(dict.fromkeys(event.note for event in events if event.note))
    facts = {} if main is None else asdict(main)
    before = facts.get("entries_before")
    return {
        "entries_before": before,
        "entries_after": facts.get("entries_after"),
        "entries_fraction": facts["entries_after"] / before if before else None,
        "bytes_before": facts.get("bytes_before"),
        "bytes_after": facts.get("bytes_after"),
        "pages_freed": sum(event.pages_freed for event in events),
        "estimated_kl": facts.get("estimated_kl"),
        "epsilon_relaxed": sum(event.epsilon_relaxed for event in events),
        "rejected": sum(event.rejected for event in events),
        "compress_s": sum(sum(event.seconds.values()) for event in events),
        "compactions": sum(event.entries_after < event.entries_before for event in events),
        "notes": notes if notes or events else ["not compacted: no compaction came due"],
    }
