"""L4 for every policy there is: exact budgets in every regime and scope that it can have, the extreme ones included."""

import json
from pathlib import Path
from typing import Any

import pytest

from bpkv_trt.config import Regime
from bpkv_trt.policies.registry import policy_class, policy_names
from tests.runtime.conftest import MakeEngine, loaded, prompt_tokens
from tests.runtime.trail import Trail, follow

NAME, DEFER, INTERVAL = "tiny-llama", 6, 16
PROTECTED = 4 + 16  # sinks and the recent window of these engines


def of_regime(regime: Regime) -> list[tuple[str, str]]:
    classes = {name: policy_class(name) for name in policy_names()}
    return [(name, regime) for name, of in classes.items() if regime in of.regimes and not of.evicts_nothing]


def options_of(policy: str, path: Path) -> dict[str, Any]:
    if "score_table" not in policy_class(policy).requires:
        return {"policy": policy, "defer": DEFER}
    path.write_text(json.dumps({"weights": [3.0, 2.0, *[1.0] * (loaded(NAME).traits.layers - 2)]}))
    return {"policy": policy, "defer": DEFER, "layer_table": str(path)}


def check(trail: Trail, budget: str) -> None:
    """Heads hold what the budget says together, and none less than its protected rows."""
    traits, regime = trail.engine.host.traits, trail.events[0].regime
    tokens = len(trail.tokens)
    share = {"0.001": 0, f"{PROTECTED}t": PROTECTED, "0.37": tokens * 37 // 100, "0.999": tokens * 999 // 1000}
    per_head = max(PROTECTED, share.get(budget, tokens))
    lengths = trail.engine.pool.lengths(trail.sequence)
    assert lengths.sum() == per_head * traits.layers * traits.kv_heads, (regime, budget)
    assert trail.events[0].entries_after == lengths.sum() and lengths.min() >= PROTECTED
    assert trail.events[0].clamped == (budget == "0.001")
    scope = trail.engine.compactor.config.scope
    takes_table = trail.engine.compactor.table is not None
    if scope == "layer" and not takes_table:
        assert set(lengths.sum(axis=1).tolist()) == {per_head * traits.kv_heads}
    if scope == "head":
        assert (lengths == lengths[:, :1]).all()


@pytest.mark.parametrize(("policy", "regime"), [*of_regime("prefill"), *of_regime("deferred")])
def test_a_prompt_keeps_exactly_its_budget(make_engine: MakeEngine, tmp_path: Path, policy: str, regime: str) -> None:
    prompt, more = prompt_tokens(NAME, 1, 120), prompt_tokens(NAME, 2, 40)[:DEFER]
    own, *others = policy_class(policy).scopes
    cases = [(own, budget) for budget in ("0.001", f"{PROTECTED}t", "0.37", "0.999", "1")]
    for scope, budget in [*cases, *((scope, "0.37") for scope in others)]:
        options = options_of(policy, tmp_path / "table.json")
        engine = make_engine(NAME, **options, scope=scope, regime=regime, budget=budget)
        (trail,) = follow(engine, [prompt], [more if regime == "deferred" else []])
        check(trail, budget)


@pytest.mark.parametrize(("policy", "regime"), of_regime("generation"))
def test_an_answer_keeps_exactly_its_tokens(make_engine: MakeEngine, tmp_path: Path, policy: str, regime: str) -> None:
    prompt, more = prompt_tokens(NAME, 1, 60), prompt_tokens(NAME, 2, 120)[: 2 * INTERVAL]
    scopes = policy_class(policy).scopes
    for index, budget in enumerate((17, 16, 31)):
        options = options_of(policy, tmp_path / "table.json") | {"generation_budget": f"{budget}t"}
        scope = scopes[index % len(scopes)]
        engine = make_engine(NAME, **options, scope=scope, regime=regime, interval=INTERVAL)
        (trail,) = follow(engine, [prompt], [more])
        traits = engine.host.traits
        positions = engine.pool.view(trail.sequence).position_table()
        assert [event.step for event in trail.events] == [INTERVAL, 2 * INTERVAL]
        answer = (positions >= len(prompt)).sum(-1)
        assert int(answer.sum()) == budget * traits.layers * traits.kv_heads
        assert int(answer.min()) >= 16  # the recent window
        assert bool(((positions >= 0) & (positions < len(prompt))).sum(-1).eq(len(prompt)).all())
