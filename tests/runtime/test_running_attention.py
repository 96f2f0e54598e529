"""Running scores of entries against eager attention matrices, summed query by query in float64."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from bpkv_trt.config import BpkvConfig
from bpkv_trt.core.running_attention import RunningAttention
from bpkv_trt.policies.base import Requirement
from bpkv_trt.policies.registry import policy_class
from bpkv_trt.runtime.engine import Engine, make_pool
from bpkv_trt.runtime.observers.received_attention import ReceivedAttention
from tests.runtime.conftest import ASSETS, MakeEngine, loaded, prompt_tokens
from tests.runtime.own_path import OwnPath
from tests.runtime.random_models import COMPACTABLE, engine_of, random_tokens
from tests.runtime.trail import Trail, feed, follow

SUM, MEAN = RunningAttention(), RunningAttention(decay=0.9)
LAZY, ONCE = RunningAttention(decay=0.8, every=4), RunningAttention(decay=0.9, steps=1)
RULES = (SUM, MEAN, LAZY, ONCE)
NAME, PROMPT, STEPS = "tiny-llama", 90, 30


def by_query(rule: RunningAttention, weights: Tensor, prompt: int) -> Tensor:
    """[N] scores of one head from its attention, mean over the group [N, N], one query at a time; NaN: not scored."""
    score = torch.zeros(weights.shape[-1], dtype=torch.float64)
    scored = 0
    for query, attention in enumerate(weights.double()):
        step = query - prompt + 1  # 1 is the first decode step
        if step >= 1 and (step % rule.every or (rule.steps is not None and step > rule.steps)):
            continue
        if rule.decay is None:
            score += attention
        else:
            for _ in range(rule.every if step >= 1 else 1):  # as if it had been seen at each of the steps it stands for
                score = rule.decay * score + (1 - rule.decay) * attention
        scored = query + 1
    score[scored:] = torch.nan
    return score


def check(engine: Engine, sequence: int, rule: RunningAttention, weights: Sequence[Tensor], prompt: int) -> None:
    """weights: by layer [Hq, N, N]."""
    traits, view = engine.host.traits, engine.pool.view(sequence)
    result = engine.statistics.received[sequence].result(rule)
    assert result.dtype == torch.float32 and result.shape == (*view.lengths.shape, int(view.lengths.max()))
    assert result[sorted(traits.sliding_layers)].abs().sum() == 0
    for layer in traits.compactable_layers:
        grouped = weights[layer].detach().unflatten(0, (traits.kv_heads, traits.group)).mean(1)
        for head in range(traits.kv_heads):
            positions = view.positions(layer, head).long()
            truth = by_query(rule, grouped[head], prompt)[positions]
            truth = torch.where(truth.isnan(), truth.nanmean(), truth)  # newer than the last query that counted
            ours = result[layer, head, : len(positions)].double()
            assert torch.allclose(ours, truth, rtol=1e-4, atol=1e-6), (rule, layer, head)
            assert result[layer, head, len(positions) :].abs().sum() == 0


def observing(engine: Engine) -> Engine:
    engine.statistics.requires = frozenset({"received_attention"})
    engine.statistics.rules = RULES
    return engine


def eager_attention(tokens: list[int]) -> tuple[Tensor, ...]:
    model = AutoModelForCausalLM.from_pretrained(ASSETS / NAME, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.no_grad():
        return tuple(layer[0] for layer in model(torch.tensor([tokens]), output_attentions=True).attentions)


def test_a_trained_models_scores_are_those_of_its_attention_matrices(make_engine: MakeEngine) -> None:
    engine = observing(make_engine(NAME, policy="full"))
    tokens = prompt_tokens(NAME, 1, PROMPT + STEPS)[: PROMPT + STEPS]
    (trail,) = follow(engine, [tokens[:PROMPT]], [[]])
    weights = eager_attention(tokens)
    for rule in RULES:  # at the end of the prompt
        check(engine, trail.sequence, rule, [layer[:, :PROMPT, :PROMPT] for layer in weights], PROMPT)
    for token in tokens[PROMPT:]:
        engine.decode([(trail.sequence, [token])])
    for rule in RULES:
        check(engine, trail.sequence, rule, weights, PROMPT)


@pytest.mark.parametrize("policy", ["inertiakv", "inertiakv_lazy", "inertiakv_score_free", "h2o"])
@pytest.mark.parametrize("name", COMPACTABLE)
def test_scores_move_with_the_entries_that_stay(name: str, policy: str) -> None:
    """Over a deferred compaction and three of the answer; the truth is recomputed from scratch, with masked queries."""
    options = {"policy": policy, "regime": "deferred,generation", "defer": 5, "budget": "0.5"}
    engine = engine_of(name, **options)
    prompt = random_tokens(1, 50)
    (trail,) = follow(engine, [prompt], [random_tokens(2, 34)])
    assert sum(event.entries_after < event.entries_before for event in trail.events) >= 3
    weights = OwnPath(name, trail.tokens, trail.hidden_from()).whole.weights
    rule = engine.compactor.policy.running_attention
    check(engine, trail.sequence, rule, [weights[layer] for layer in range(engine.host.traits.layers)], len(prompt))


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_chunk_is_as_many_single_steps(name: str) -> None:
    prompt, answer = random_tokens(3, 50), random_tokens(4, 22)

    def gathered(prompts: list[list[int]], answers: list[list[int]]) -> dict[RunningAttention, Tensor]:
        engine = observing(engine_of(name, policy="full"))
        sequence = engine.open()
        for piece in prompts:
            engine.encode([(sequence, piece)])
        engine.compactor.on_context_step_end(sequence)
        for piece in answers:
            engine.decode([(sequence, piece)])
        return {rule: engine.statistics.received[sequence].result(rule) for rule in RULES}

    singly = gathered([[token] for token in prompt], [[token] for token in answer])
    for prompts in ([prompt], [prompt[:1], prompt[1:30], prompt[30:]]):
        for answers in ([answer], [answer[:3], answer[3:9], answer[9:]]):
            for rule, ours in gathered(prompts, answers).items():
                assert torch.allclose(ours, singly[rule], rtol=1e-4, atol=1e-6), rule


def test_one_prefill_feeds_many_policies(make_engine: MakeEngine) -> None:
    """Each sees on its copy what it would have seen alone, and what the shared prefill saw stays."""
    tokens = prompt_tokens(NAME, 1, PROMPT + STEPS)[: PROMPT + STEPS]
    policies = ("h2o", "inertiakv", "inertiakv_lazy", "inertiakv_score_free")
    rules = [policy_class(policy).running_attention for policy in policies]
    config, pool = BpkvConfig(policy="full", page_size=8), make_pool(loaded(NAME), 2000, 8, poison=True)
    observed: frozenset[Requirement] = frozenset({"received_attention"})
    source = Engine(loaded(NAME), config, pool, observed=observed, replayed=20, rules=rules)
    shared = source.open()
    source.encode([(shared, tokens[:PROMPT])])
    before = [source.statistics.received[shared].result(rule) for rule in rules]
    for policy, rule in zip(policies, rules, strict=True):
        alone = make_engine(NAME, policy=policy, regime="deferred,generation", defer=4, budget="0.5")
        (truth,) = follow(alone, [tokens[:PROMPT]], [tokens[PROMPT:]])
        engine = Engine(loaded(NAME), alone.compactor.config, pool)
        trail = continued(engine, engine.adopt(source, shared), tokens)
        assert torch.equal(truth.hidden_from(), trail.hidden_from()) and len(trail.events) > 1
        seen, other = engine.statistics.received[trail.sequence], alone.statistics.received[truth.sequence]
        assert torch.allclose(seen.result(rule), other.result(rule), rtol=1e-5, atol=1e-7)
    for rule, scores in zip(rules, before, strict=True):
        assert torch.equal(source.statistics.received[shared].result(rule), scores)


def continued(engine: Engine, sequence: int, tokens: list[int]) -> Trail:
    trail = Trail(engine, sequence, tokens[:PROMPT])
    trail.settle(torch.zeros(1), engine.compactor.on_context_step_end(sequence))
    for token in tokens[PROMPT:]:
        feed((trail, [token]))
    return trail


def test_a_lazy_rule_looks_at_no_attention_between_its_steps(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it saves is the point of it."""
    looked = []
    honest = ReceivedAttention._received
    monkeypatch.setattr(ReceivedAttention, "_received", lambda *args: looked.append(args) or honest(*args))
    engine = make_engine(NAME, policy="inertiakv_lazy", regime="generation", generation_budget="400t")
    tokens = prompt_tokens(NAME, 1, PROMPT)
    follow(engine, [tokens], [[]])
    looked.clear()
    follow(engine, [tokens], [tokens[:16]])
    heads = len(engine.host.traits.compactable_layers) * engine.host.traits.kv_heads
    assert len(looked) == heads * (1 + 2)  # the prompt, and steps 8 and 16
