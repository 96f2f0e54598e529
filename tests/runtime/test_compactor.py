"""When sequences are compacted, to how much, and what is refused before anything runs."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from bpkv_trt.config import BpkvConfig
from bpkv_trt.core.statistics import ForwardStatistics
from bpkv_trt.errors import ConfigError, StalePlan
from bpkv_trt.policies import bpkv
from bpkv_trt.policies.base import Policy, Requirement
from bpkv_trt.policies.registry import make_policy, settled
from bpkv_trt.pool.plan import CompactionPlan
from bpkv_trt.pool.view import SequenceView
from bpkv_trt.runtime.compactor import Compactor
from bpkv_trt.runtime.event import CompactionEvent
from bpkv_trt.runtime.generator import Generator
from bpkv_trt.runtime.sampling import SamplingParams
from tests.runtime.random_models import COMPACTABLE, SMALL, engine_of, random_tokens, wrapped
from tests.runtime.spoiled import spoil_scores
from tests.runtime.trail import Trail, follow

PROMPT = random_tokens(1, 50)


def schedule(events: list[CompactionEvent]) -> list[tuple[str, int]]:
    return [(event.regime, event.step) for event in events]


def driven(steps: int = 30, prompt: list[int] = PROMPT, **options: object) -> Trail:
    engine = engine_of("llama", **{"budget": "0.4", "defer": 5, **options})
    return follow(engine, [prompt], [random_tokens(2, steps)])[0]


@pytest.mark.parametrize(
    ("regime", "expected"),
    [
        ("prefill", [("prefill", 0)]),
        ("deferred", [("deferred", 5)]),
        ("generation", [("generation", 8), ("generation", 16), ("generation", 24)]),
        ("prefill,generation", [("prefill", 0), ("generation", 8), ("generation", 16), ("generation", 24)]),
        ("deferred,generation", [("deferred", 5), ("generation", 8), ("generation", 16), ("generation", 24)]),
    ],
)
def test_each_regime_acts_at_its_time(regime: str, expected: list[tuple[str, int]]) -> None:
    assert schedule(driven(regime=regime).events) == expected


def test_a_deferral_that_ends_with_an_interval_compacts_once_then() -> None:
    trail = driven(regime="deferred,generation", interval=5)
    assert schedule(trail.events)[:3] == [("deferred", 5), ("generation", 10), ("generation", 15)]


def test_generation_waits_for_a_deferred_compaction() -> None:
    trail = driven(regime="deferred,generation", interval=3)
    assert schedule(trail.events)[:3] == [("deferred", 5), ("generation", 6), ("generation", 9)]


@pytest.mark.parametrize("regime", ["prefill,generation", "deferred,generation", "generation"])
@pytest.mark.parametrize("scope", ["head", "layer", "global"])
def test_each_budget_is_exact_at_its_time(regime: str, scope: str) -> None:
    """The prompt's right after its compaction; the answer's after each interval, whatever the prompt has left."""
    trail = driven(regime=regime, scope=scope)
    heads = trail.engine.host.traits.layers * trail.engine.host.traits.kv_heads
    for event in trail.events:
        if event.regime in ("prefill", "deferred"):
            assert event.entries_after == int((len(PROMPT) + event.step) * 0.4) * heads
    positions = trail.engine.pool.view(trail.sequence).position_table()
    after_last = 30 - trail.events[-1].step
    assert int((positions >= len(PROMPT)).sum()) == (14 + after_last) * heads


@pytest.mark.parametrize("regime", ["generation", "prefill,generation", "deferred,generation"])
def test_the_recent_window_is_never_touched_and_nor_is_the_prompt_by_the_generation_regime(regime: str) -> None:
    engine = engine_of("llama", regime=regime, budget="0.4", defer=5, scope="global")
    (trail,) = follow(engine, [PROMPT], [[]])
    stays: list[int] | None = None
    for step, token in enumerate(random_tokens(2, 26), start=1):
        engine.decode([(trail.sequence, [token])])
        event = engine.compactor.on_generation_step_end(trail.sequence)
        positions = engine.pool.view(trail.sequence).position_table()
        logical = len(PROMPT) + step
        protected = {*range(SMALL["sinks"]), *range(logical - SMALL["recent"], logical)}
        for head in positions.flatten(0, 1).tolist():
            assert protected <= set(head)
        of_prompt = [sum(0 <= p < len(PROMPT) for p in head) for head in positions.flatten(0, 1).tolist()]
        if event is not None and event.regime == "deferred" or stays is None and "deferred" not in regime:
            stays = of_prompt
        assert stays is None or of_prompt == stays


def test_a_deferred_compaction_scores_what_was_decoded_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, list[int]]] = []
    engine = engine_of("llama", regime="deferred,generation", budget="0.4", defer=6, lookahead=0)
    collect = engine.statistics.collect

    def kept(sequence: int, positions: int, trace: object, drafted: Sequence[float]) -> ForwardStatistics:
        statistics = collect(sequence, positions, engine.trace, drafted)
        asked.append((positions, statistics.positions.tolist()))
        return statistics

    monkeypatch.setattr(engine.statistics, "collect", kept)
    follow(engine, [PROMPT], [random_tokens(2, 16)])
    assert asked[0] == (11, list(range(len(PROMPT) + 6 - 11, len(PROMPT) + 6)))
    assert all(positions == SMALL["positions"] for positions, _ in asked[1:]) and len(asked) > 1


@pytest.mark.parametrize(
    ("regime", "recent", "valid"),
    [
        ("deferred", 12, False),
        ("deferred", 13, True),
        ("deferred,generation", 12, False),
        ("deferred,generation", 13, True),
        ("prefill", 12, True),
        ("prefill,generation", 5, True),
        ("prefill,generation", 4, False),
    ],
)
def test_all_scoring_positions_lie_within_the_recent_window(regime: str, recent: int, valid: bool) -> None:
    options = {"regime": regime, "recent": recent, "positions": 5, "defer": 8, "generation_budget": "14t"}
    if valid:
        assert BpkvConfig(**options).recent == recent
        return
    with pytest.raises(ConfigError, match=f"recent is {recent} and positions is 5"):
        BpkvConfig(**options)


def table(path: Path, weights: Sequence[float] | Sequence[list[float]]) -> str:
    path.write_text(f'{{"weights": {weights}}}')
    return str(path)


@pytest.mark.parametrize("scope", ["head", "layer"])
def test_a_layer_table_shares_the_budget_out(tmp_path: Path, scope: str) -> None:
    """0.4 of 50 tokens is 20 per head: 1 : 1 gives both layers as much, 2 : 3 gives 16 and 24."""
    for weights, share in (([1, 1], (20, 20)), ([2, 3], (16, 24)), ([6, 4], (24, 16)), ([1, 100], (14, 26))):
        options = {"layer_table": table(tmp_path / "table.json", weights), "scope": scope, "regime": "prefill"}
        trail = driven(steps=0, **options)
        lengths = trail.engine.pool.lengths(trail.sequence)  # [L, Hkv]
        assert lengths.sum() == 2 * 2 * 20
        assert lengths.sum(axis=1).tolist() == [2 * count for count in share]
        if scope == "head":
            assert lengths.tolist() == [[count] * 2 for count in share]


def test_in_global_scope_a_layer_table_multiplies_scores(tmp_path: Path) -> None:
    """The mask is that of the unweighted scores times the table; the total does not move."""
    options = {"scope": "global", "regime": "prefill", "policy": "snapkv"}
    flat = driven(steps=0, **options, layer_table=table(tmp_path / "flat.json", [3, 3]))
    none = driven(steps=0, **options)
    assert torch.equal(flat.hidden_from(), none.hidden_from())
    engine = engine_of("llama", **options, budget="1.0")
    (whole,) = follow(engine, [PROMPT], [[]])
    view = engine.pool.view(whole.sequence)
    statistics = engine.statistics.collect(whole.sequence, SMALL["positions"], engine.trace)
    scores = engine.compactor.policy.score(statistics, view) * torch.tensor([1.0, 5.0])[:, None, None]
    scores = scores[..., SMALL["sinks"] : len(PROMPT) - SMALL["recent"]]
    threshold = scores.flatten().sort().values[2 * 2 * 30]
    trail = driven(steps=0, **options, layer_table=table(tmp_path / "steep.json", [1, 5]))
    gone = trail.hidden_from()[..., SMALL["sinks"] : len(PROMPT) - SMALL["recent"]] == len(PROMPT)
    assert torch.equal(gone, scores < threshold)
    assert not torch.equal(trail.hidden_from(), none.hidden_from())


def test_weights_of_heads_share_layers_out_by_their_mean_and_weigh_scores(tmp_path: Path) -> None:
    """In scope layer 2 : 3 gives 16 and 24 a head; within a layer the mask is that of the weighted scores."""
    weights = [[1.0, 3.0], [4.0, 2.0]]
    options = {"scope": "layer", "regime": "prefill", "policy": "snapkv"}
    trail = driven(steps=0, **options, layer_table=table(tmp_path / "table.json", weights))
    lengths = trail.engine.pool.lengths(trail.sequence)
    assert lengths.sum(axis=1).tolist() == [2 * 16, 2 * 24]
    (whole,) = follow(engine := engine_of("llama", **options, budget="1.0"), [PROMPT], [[]])
    statistics = engine.statistics.collect(whole.sequence, SMALL["positions"], engine.trace)
    scores = engine.compactor.policy.score(statistics, engine.pool.view(whole.sequence))
    scores = (scores * torch.tensor(weights)[..., None])[..., SMALL["sinks"] : len(PROMPT) - SMALL["recent"]]
    gone = trail.hidden_from()[..., SMALL["sinks"] : len(PROMPT) - SMALL["recent"]] == len(PROMPT)
    for layer, kept in enumerate((16, 24)):
        threshold = scores[layer].flatten().sort().values[2 * (50 - kept)]
        assert torch.equal(gone[layer], scores[layer] < threshold)


def test_a_small_weight_lowers_a_negative_score_too(tmp_path: Path) -> None:
    """Most of R-KV's scores are negative: those of the layer of small weight go first, all of them."""
    options = {"scope": "global", "regime": "prefill", "policy": "rkv"}
    (whole,) = follow(engine := engine_of("llama", **options, budget="1.0"), [PROMPT], [[]])
    statistics = engine.statistics.collect(whole.sequence, SMALL["positions"], engine.trace)
    scores = engine.compactor.policy.score(statistics, engine.pool.view(whole.sequence))
    negative = (scores < 0)[..., SMALL["sinks"] : len(PROMPT) - SMALL["recent"]]
    assert negative[0].sum() > 30
    trail = driven(steps=0, **options, budget="0.85", layer_table=table(tmp_path / "table.json", [1e-6, 1]))
    gone = trail.hidden_from()[..., SMALL["sinks"] : len(PROMPT) - SMALL["recent"]] == len(PROMPT)
    assert gone.sum() == 4 * 8 and not gone[1].any() and not (gone & ~negative).any()


def test_a_layer_table_for_another_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="3 weights and the model 2 layers"):
        engine_of("llama", layer_table=table(tmp_path / "table.json", [1, 2, 3]))


@pytest.mark.parametrize("policy", ["bpkv", "h2o", "snapkv", "expected_attention"])
def test_a_policy_that_needs_what_the_host_does_not_offer_is_refused_by_name(policy: str) -> None:
    class Bare:
        offers: frozenset[Requirement] = frozenset()

    engine, config = engine_of("llama"), settled(BpkvConfig(policy=policy))
    chosen = make_policy(config, engine.host.traits)
    with pytest.raises(ConfigError) as refusal:
        Compactor(config, chosen, engine.host.traits, engine.pool, Bare())  # type: ignore[arg-type]
    assert policy in str(refusal.value) and all(need in str(refusal.value) for need in chosen.requires)


def test_a_policy_that_needs_nothing_special_runs_on_any_host() -> None:
    class Bare:
        offers: frozenset[Requirement] = frozenset()

    engine = engine_of("llama")
    for policy in ("random", "streaming_llm", "full"):
        config = settled(BpkvConfig(policy=policy))
        chosen = make_policy(config, engine.host.traits)
        Compactor(config, chosen, engine.host.traits, engine.pool, Bare())  # type: ignore[arg-type]


def test_a_policy_that_lets_the_sequence_change_under_it_cannot_have_its_plan_applied() -> None:
    """The hooks plan and apply in one call; a plan made before anything else happened to the sequence is refused."""
    engine = engine_of("llama", budget="0.4", regime="prefill")
    (trail,) = follow(engine, [PROMPT], [[]])
    policy, honest = engine.compactor.policy, type(engine.compactor.policy).select
    before: list[CompactionPlan] = []

    def select(self: Policy, *args: object) -> object:
        selection = honest(self, *args)  # type: ignore[arg-type]
        view = args[-1]
        assert isinstance(view, SequenceView)
        before.append(CompactionPlan.from_eviction(view, selection.evict))
        return selection

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(policy), "select", select)
        (second,) = follow(engine, [PROMPT], [[]])
    (stale,) = before
    keys = engine.pool.keys.clone()
    for change in (
        lambda: None,
        lambda: engine.decode([(second.sequence, [5])]),
        lambda: engine.close(second.sequence),
    ):
        change()
        keys = engine.pool.keys.clone()
        with pytest.raises(StalePlan):
            engine.pool.apply(stale)
        assert torch.equal(engine.pool.keys.view(torch.int32), keys.view(torch.int32))
    assert engine.pool.sequences == (trail.sequence,)


@pytest.mark.parametrize("name", COMPACTABLE)
def test_events_count_what_the_pool_holds(name: str) -> None:
    engine = engine_of(name, budget="0.4")
    (trail,) = follow(engine, [PROMPT], [random_tokens(2, 8)])
    first, last = trail.events
    traits, pool = wrapped(name).traits, engine.pool
    heads = len(traits.compactable_layers) * traits.kv_heads
    assert (first.entries_before, first.entries_after) == (50 * heads, 20 * heads)
    assert last.entries_after == int(pool.lengths(trail.sequence)[list(traits.compactable_layers)].sum())
    assert last.bytes_after == pool.bytes_of(trail.sequence) == pool.live_pages * pool.page_bytes
    assert first.bytes_before - first.bytes_after == first.pages_freed * pool.page_bytes > 0
    assert first.covered_mass is not None and 0 < first.covered_mass <= 1
    assert set(first.seconds) == {"readout", "score", "select", "compact"}
    assert all(seconds > 0 for seconds in first.seconds.values())


def test_a_layer_table_only_has_ratios(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest finite score, which an entry gets that is all its head attends to, stays finite under any table."""
    spoil_scores(monkeypatch, (0, 0, 10), torch.finfo(torch.float32).max)
    kept = []
    for weight in (1.0, 1000.0):
        table = tmp_path / f"{weight}.json"
        table.write_text(json.dumps({"weights": [weight] * wrapped("llama").traits.layers}))
        trail = driven(regime="prefill", scope="global", layer_table=table)
        assert trail.events[0].note is None
        kept.append(trail.hidden_from())
    assert torch.equal(*kept)


def test_neighbours_that_are_each_all_that_a_head_attends_to_both_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their largest finite scores are averaged with one another, and stay finite."""
    honest = bpkv.score_entries

    def two_sole_entries(*args: object) -> torch.Tensor:
        scores = honest(*args)  # type: ignore[arg-type]
        scores[0, 0, 10:12] = torch.finfo(torch.float32).max
        return scores

    monkeypatch.setattr(bpkv, "score_entries", two_sole_entries)
    trail = driven(steps=0, regime="prefill", scope="global", refine=0)
    assert trail.events[0].note is None and trail.events[0].entries_after < trail.events[0].entries_before
    assert {10, 11} <= set(trail.engine.pool.positions(trail.sequence, 0, 0).tolist())


def test_a_budget_of_prompts_means_nothing_where_prompts_are_left_alone() -> None:
    trail = driven(regime="generation", budget="0.3kB")
    assert {regime for regime, _ in schedule(trail.events)} == {"generation"}
    Generator(trail.engine).add([PROMPT], SamplingParams(max_new_tokens=20))


def test_a_budget_that_a_later_compaction_cannot_honour_is_refused_before_the_run() -> None:
    short = random_tokens(1, 10)
    engine = engine_of("llama", regime="deferred", defer=5, budget="0.3kB")
    with pytest.raises(ConfigError, match="protected"):
        Generator(engine).add([short], SamplingParams(max_new_tokens=20))
    assert engine.pool.live_pages == 0
    full = Generator(engine_of("llama", regime="deferred", defer=5, budget="0.3kB", policy="full"))
    (request,) = full.generate([full.add([short], SamplingParams(max_new_tokens=20))])
    assert request.finished == "length"
