"""The room that a sample takes with all its copies: whether it fits, and an engine with a pool of that size."""

from collections.abc import Sequence

from bpkv_trt.core.running_attention import RunningAttention
from bpkv_trt.errors import InputError
from bpkv_trt.evaluation.comparison import Comparison
from bpkv_trt.evaluation.encoded import EncodedSample, encode_sample
from bpkv_trt.evaluation.tasks import make_sample
from bpkv_trt.models.loading import LoadedModel
from bpkv_trt.policies.registry import policy_class
from bpkv_trt.runtime.engine import Engine, make_pool
from bpkv_trt.runtime.memory import activation_bytes, pool_bytes, require_memory
from bpkv_trt.runtime.scratch import scratch_rows


def sample_bytes(loaded: LoadedModel, comparison: Comparison, turns: Sequence[int], rows: int) -> int:
    """What measuring a sample holds at once beside the weights: turns of so many tokens, `rows` with the answer."""
    page_size = comparison.common.page_size
    cache = 3 * pool_bytes(loaded, rows, page_size)
    cache += pool_bytes(loaded, _further_cache(loaded, comparison, turns, rows), page_size)
    return cache + max(activation_bytes(loaded, sum(turns), arm.config) for arm in comparison.arms)


def fitting_sample(loaded: LoadedModel, comparison: Comparison, task: str, seed: int) -> EncodedSample:
    """The sample of a task and seed; InputError where the tokens, the model or the memory do not suffice."""
    count = loaded.encoder.count
    frame = sum(map(len, loaded.encoder.encode("a"))) - count("a")
    answer = comparison.untouched + comparison.horizon
    text = make_sample(
        task, seed, comparison.tokens, count, comparison.lead_tokens, answer_tokens=answer, frame_tokens=frame
    )
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


def engine_for(loaded: LoadedModel, comparison: Comparison, sample: EncodedSample) -> Engine:
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
