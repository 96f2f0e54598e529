"""One sample of a comparison: the full cache once, then every arm on it, each a cell of the result."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict

from bpkv_trt.core.running_attention import RunningAttention
from bpkv_trt.errors import InputError
from bpkv_trt.evaluation.arm import Arm
from bpkv_trt.evaluation.comparison import Comparison
from bpkv_trt.evaluation.encoded import EncodedSample, encode_sample
from bpkv_trt.evaluation.journal import Record
from bpkv_trt.evaluation.mask_study import study_masks
from bpkv_trt.evaluation.reference import Reference, reference_of
from bpkv_trt.evaluation.tasks import make_sample
from bpkv_trt.evaluation.trial import Trial, run_trial
from bpkv_trt.models.loading import LoadedModel
from bpkv_trt.models.stop_tokens import stop_tokens
from bpkv_trt.policies.registry import policy_class
from bpkv_trt.runtime.engine import Engine, make_pool
from bpkv_trt.runtime.event import CompactionEvent
from bpkv_trt.runtime.memory import activation_bytes, pool_bytes, require_memory
from bpkv_trt.runtime.scratch import scratch_rows


def measure_sample(loaded: LoadedModel, comparison: Comparison, task: str, seed: int) -> Record:
    """All cells of one sample, or `skipped` with the reason where its prompt does not fit."""
    try:
        sample = _fitting_sample(loaded, comparison, task, seed)
    except InputError as error:
        return {"task": task, "seed": seed, "skipped": str(error)}
    engine = _engine(loaded, comparison, sample)
    with reference_of(
        engine, sample, comparison.decoded, comparison.untouched, stop_tokens(loaded.model, loaded.tokenizer)
    ) as reference:
        cells = []
        for arm in comparison.arms:
            trial = run_trial(loaded, arm.seeded(seed), reference)
            cells.append(_cell(task, seed, sample, arm, trial, reference))
        masks = study_masks(loaded, comparison, reference, seed) if comparison.masks else []
    return {"task": task, "seed": seed, "full": _facts(loaded, reference), "cells": cells, "masks": masks}


def sample_bytes(loaded: LoadedModel, comparison: Comparison, turns: Sequence[int], rows: int) -> int:
    """What measuring a sample holds at once beside the weights: turns of so many tokens, `rows` with the answer."""
    page_size = comparison.common.page_size
    cache = 3 * pool_bytes(loaded, rows, page_size)
    cache += pool_bytes(loaded, _further_cache(loaded, comparison, turns, rows), page_size)
    return cache + max(activation_bytes(loaded, sum(turns), arm.config) for arm in comparison.arms)


def _fitting_sample(loaded: LoadedModel, comparison: Comparison, task: str, seed: int) -> EncodedSample:
    count = loaded.encoder.count
    frame = sum(map(len, loaded.encoder.encode("a"))) - count("a")
    answer = comparison.untouched + comparison.horizon
    text = make_sample(task, seed, comparison.tokens - frame, count, comparison.lead_tokens, answer_tokens=answer)
    sample = encode_sample(loaded, text)
    rows, known = _rows(comparison, sample), loaded.traits.max_positions
    if known and rows > known:
        raise InputError(
            f"The sample takes {rows} positions with its answer, and {comparison.model} knows {known}; use fewer "
            "--tokens or a shorter --horizon."
        )
    turns = [len(turn) for turn in sample.turns]
    require_memory(sample_bytes(loaded, comparison, turns, rows), loaded.model.device, comparison.memory_limit)
    return sample


def _rows(comparison: Comparison, sample: EncodedSample) -> int:
    return sample.prompt_tokens + len(sample.lead) + max(comparison.decoded, len(sample.answer))


def _further_cache(loaded: LoadedModel, comparison: Comparison, turns: Sequence[int], rows: int) -> int:
    # Beside the reference, the trial and the full cache that its estimate is held to: the trial's copy that is asked
    # for the answer, or a scoring pass's own; and the drafts that follow both sides of that estimate.
    drafted = max(arm.config.drafted for arm in comparison.arms)
    return max(rows, *(scratch_rows(arm.config, loaded.encoder, turns) for arm in comparison.arms)) + 2 * drafted


def _engine(loaded: LoadedModel, comparison: Comparison, sample: EncodedSample) -> Engine:
    """An engine that evicts nothing and observes what the arms' policies require."""
    configs = [arm.config for arm in comparison.arms]
    policies = [policy_class(config.policy) for config in configs]
    rules: list[RunningAttention] = [
        policy.running_attention for policy in policies if "received_attention" in policy.requires
    ]
    turns, rows = [len(turn) for turn in sample.turns], _rows(comparison, sample)
    scratch = _further_cache(loaded, comparison, turns, rows)
    pool = make_pool(loaded, rows, comparison.common.page_size, caches=3, scratch=scratch)
    return Engine(
        loaded,
        comparison.common.replace(policy="full"),
        pool,
        observed=frozenset().union(*(policy.requires for policy in policies)),
        replayed=max(config.replayed_positions for config in configs),
        rules=rules,
    )


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
