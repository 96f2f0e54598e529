"""The laws that every change keeps, on trained models (L1-L9 of docs/structure.md)."""

import gc
import itertools
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bpkv_trt.models.modules import rotary
from bpkv_trt.runtime.engine import Engine
from tests.runtime.conftest import TRAINED, MakeEngine, loaded, prompt_tokens
from tests.runtime.spoiled import spoil_scores
from tests.runtime.trail import assert_masked, follow

LENGTHS = (150, 61, 230)  # a batch of unequal prompts
STEPS = (40, 9, 25)


def batch(name: str, seed: int = 0) -> tuple[list[list[int]], list[list[int]]]:
    prompts = [prompt_tokens(name, seed + index, length) for index, length in enumerate(LENGTHS)]
    more = [prompt_tokens(name, seed + 10 + index, 2 * steps)[1 : 1 + steps] for index, steps in enumerate(STEPS)]
    return prompts, more


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_l1_keeping_all_is_the_full_cache_bit_for_bit(make_engine: MakeEngine, name: str, dtype: str) -> None:
    prompts, more = batch(name)
    kept = follow(make_engine(name, dtype, budget="1.0", regime="prefill"), prompts, more)
    full = follow(make_engine(name, dtype, policy="full"), prompts, more)
    for ours, theirs in zip(kept, full, strict=True):
        assert ours.logits.keys() == theirs.logits.keys()
        assert all(torch.equal(ours.logits[index], theirs.logits[index]) for index in ours.logits)
    assert_masked(loaded(name, dtype), full)


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scope", ["head", "layer", "global"])
@pytest.mark.parametrize("readout", ["direct", "exact"])
def test_l2_evicted_is_masked(make_engine: MakeEngine, name: str, dtype: str, scope: str, readout: str) -> None:
    ahead = {"lookahead": 0} if readout == "direct" else {}  # as on an engine, and by default
    engine = make_engine(name, dtype, scope=scope, readout=readout, budget="0.25", **ahead)
    trails = follow(engine, *batch(name))
    for trail, steps in zip(trails, STEPS, strict=True):
        assert len(trail.events) == 1 + steps // engine.compactor.config.interval
    assert_masked(loaded(name, dtype), trails)


@pytest.mark.parametrize("name", TRAINED)
def test_l2_a_deferred_eviction_is_masked(make_engine: MakeEngine, name: str) -> None:
    engine = make_engine(name, regime="deferred", budget="0.25", defer=5)
    prompts, more = batch(name)
    trails = follow(engine, prompts, more)
    for trail in trails:
        assert [(event.regime, event.step) for event in trail.events] == [("deferred", 5)]
    assert_masked(loaded(name), trails)


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("policy", ["random", "streaming_llm", "snapkv", "h2o", "expected_attention"])
def test_l2_holds_for_every_policy(make_engine: MakeEngine, name: str, policy: str) -> None:
    trails = follow(make_engine(name, policy=policy, scope="head", budget="0.3"), *batch(name))
    for trail in trails:
        assert trail.events[0].entries_after < trail.events[0].entries_before
    assert_masked(loaded(name), trails)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "length"), [("smollm2", 220), ("gemma3-270m", 540)])  # past Gemma's window of 512
def test_l1_and_l2_on_real_models(make_engine: MakeEngine, name: str, length: int) -> None:
    tokens = loaded(name).encoder.encode_raw(topics["try"])[: length + 24]
    prompt, more = [tokens[:length]], [tokens[length:]]
    options = {"regime": "prefill,generation", "interval": 12, "generation_budget": "16t", "rows": length + 128}
    (kept,) = follow(make_engine(name, **{**options, "generation_budget": "999t"}, budget="1.0"), prompt, more)
    (full,) = follow(make_engine(name, **options, policy="full"), prompt, more)
    assert all(torch.equal(kept.logits[index], full.logits[index]) for index in full.logits)
    (trail,) = follow(make_engine(name, **options, budget="0.2"), prompt, more)
    assert [event.regime for event in trail.events] == ["prefill", "generation", "generation"]
    assert trail.events[0].entries_after < trail.events[0].entries_before / 4
    assert_masked(loaded(name), [trail])


@pytest.mark.parametrize("name", TRAINED)
def test_l2_attention_reads_the_pages(make_engine: MakeEngine, name: str) -> None:
    """Spoiling the first page of any head, in K or in V, changes the next logits; a free page changes nothing."""
    tokens = prompt_tokens(name, 3, 120)

    def logits_with(side: str, page: tuple[int, int] | None) -> Tensor:
        engine = make_engine(name, budget="0.5", regime="prefill")
        (trail,) = follow(engine, [tokens], [[7]])
        table = engine.pool.page_table(trail.sequence)  # [L, Hkv, P]
        free = next(number for number in range(engine.pool.pages) if number not in table)
        getattr(engine.pool, side)[free if page is None else int(table[page[0], page[1], 0])] = 3.0
        return engine.decode([(trail.sequence, [9])])

    traits, untouched = loaded(name).traits, logits_with("keys", None)
    for side in ("keys", "values"):
        assert torch.equal(logits_with(side, None), untouched)
        for page in itertools.product(traits.compactable_layers, range(traits.kv_heads)):
            assert not torch.allclose(logits_with(side, page), untouched, atol=1e-4)


def living_tensors() -> list[Tensor]:
    gc.collect()
    return [each for each in gc.get_objects() if issubclass(type(each), Tensor)]


@pytest.mark.parametrize("name", TRAINED)
def test_there_is_no_second_copy_of_the_cache(make_engine: MakeEngine, name: str) -> None:
    """Among the tensors made since; those of other tests are kept alive, so that none made since has their identity."""
    earlier = {id(tensor): tensor for tensor in living_tensors()}
    engine = make_engine(name, budget="0.5", regime="prefill")
    (trail,) = follow(engine, [prompt_tokens(name, 3, 200)], [[7, 9]])
    pool, traits = engine.pool, engine.host.traits
    own = (pool.keys, pool.values, pool.row_positions, *engine.host.model.parameters())
    known = {tensor.untyped_storage().data_ptr() for tensor in own}
    rows = int(pool.lengths(trail.sequence).min())
    strays = [
        tensor.shape
        for tensor in living_tensors()
        if id(tensor) not in earlier
        and tensor.untyped_storage().data_ptr() not in known
        and tensor.shape[-1:] == (traits.head_dim,)
        and tensor.numel() >= rows * traits.head_dim
    ]
    assert strays == []


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("scope", ["head", "layer", "global"])
@pytest.mark.parametrize("budget", ["0.2", "0.37", "40t", "1"])
def test_l4_the_budget_is_exact(make_engine: MakeEngine, name: str, scope: str, budget: str) -> None:
    engine = make_engine(name, scope=scope, budget=budget, regime="prefill")
    (trail,) = follow(engine, [prompt_tokens(name, 1, 217)], [[5]])
    length, traits = len(trail.tokens) - 1, engine.host.traits
    per_head = {"0.2": length * 2 // 10, "0.37": length * 37 // 100, "40t": 40, "1": length}[budget]
    layers = list(traits.compactable_layers)
    assert trail.events[0].entries_after == per_head * len(layers) * traits.kv_heads
    kept = engine.pool.lengths(trail.sequence)[layers] - 1  # the decoded token
    assert kept.sum() == trail.events[0].entries_after
    assert kept.min() >= engine.compactor.config.protected
    if scope == "head":
        assert (kept == per_head).all()
    if scope == "layer":
        assert (kept.sum(axis=1) == per_head * traits.kv_heads).all()


@pytest.mark.parametrize("name", TRAINED)
def test_l4_generation_keeps_its_tokens_per_head_and_the_whole_prompt(make_engine: MakeEngine, name: str) -> None:
    engine = make_engine(name, regime="generation", scope="head", generation_budget="18t")
    prompt, traits = prompt_tokens(name, 1, 90), engine.host.traits
    (trail,) = follow(engine, [prompt], [prompt_tokens(name, 2, 120)[:48]])
    assert [event.step for event in trail.events] == [16, 32, 48]
    for layer in traits.compactable_layers:
        for head in range(traits.kv_heads):
            positions = engine.pool.positions(trail.sequence, layer, head)
            assert int((positions < len(prompt)).sum()) == len(prompt)
            assert int((positions >= len(prompt)).sum()) == 18
            assert positions[-16:].tolist() == list(range(len(prompt) + 32, len(prompt) + 48))


@pytest.mark.parametrize("name", TRAINED)
def test_l5_nothing_survives_a_request(make_engine: MakeEngine, name: str) -> None:
    """Whatever ran before, to its end or not, a sequence gets the same logits to the bit."""
    first, second = (prompt_tokens(name, seed, 140) for seed in (5, 6))
    alone = follow(make_engine(name, budget="0.3", readout="exact"), [second], [[4, 5, 6]])[0]
    engine = make_engine(name, budget="0.3", readout="exact")
    for tokens, steps in ((first, 20), (second, 2)):
        (trail,) = follow(engine, [tokens], [tokens[1 : 1 + steps]])
        engine.close(trail.sequence)
        assert engine.pool.live_pages == 0
    again = follow(engine, [second], [[4, 5, 6]])[0]
    assert again.events[0].entries_after == alone.events[0].entries_after
    assert all(torch.equal(again.logits[index], alone.logits[index]) for index in alone.logits)


@pytest.mark.parametrize("name", TRAINED)
def test_l6_rope_gets_logical_positions(make_engine: MakeEngine, name: str) -> None:
    engine, seen = make_engine(name, budget="0.2"), list[list[int]]()

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        position_ids = kwargs["position_ids"] if "position_ids" in kwargs else args[1]
        seen.append(position_ids[0].tolist())

    prompt = prompt_tokens(name, 1, 150)
    (trail,) = follow(engine, [prompt], [[]])
    handle = rotary(engine.host.model).register_forward_pre_hook(note, with_kwargs=True)
    try:
        for token in range(3):
            engine.decode([(trail.sequence, [token])])
    finally:
        handle.remove()
    assert sorted({tuple(positions) for positions in seen}) == [(len(prompt) + step,) for step in range(3)]


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any operation's output had."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else (output,):
            if isinstance(tensor, Tensor):
                self.elements = max(self.elements, tensor.numel())
        return output


@pytest.mark.parametrize("readout", ["direct", "exact"])
def test_l7_scoring_grows_linearly_and_repeats_no_head(make_engine: MakeEngine, readout: str) -> None:
    def largest(tokens: int) -> int:
        engine = make_engine("tiny-llama", readout=readout, regime="prefill", budget="0.2")
        sequence = engine.open()
        engine.encode([(sequence, (prompt_tokens("tiny-llama", 1, 240) * 4)[:tokens])])
        with LargestTensor() as seen:
            engine.compactor.on_context_step_end(sequence)
        return seen.elements

    short, long = largest(200), largest(800)
    assert long <= 4.2 * short
    traits, config = loaded("tiny-llama").traits, make_engine("tiny-llama").compactor.config
    positions = config.replayed_positions
    per_token = config.probes_at(positions) * positions * traits.query_heads  # weights' gradients, all probes at once
    candidates = 2 * config.refine * config.replayed_positions * config.top_k * traits.group  # however long the prompt
    assert long <= max(candidates, 800 * max(per_token, traits.layers * traits.kv_heads * traits.head_dim))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_l8_a_broken_score_evicts_nothing(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch, value: float
) -> None:
    spoil_scores(monkeypatch, (0, 0, 30), value)
    engine = make_engine("tiny-llama", budget="0.2")
    (trail,) = follow(engine, [prompt_tokens("tiny-llama", 1, 120)], [[5]])
    (event,) = trail.events
    assert event.entries_after == event.entries_before and event.pages_freed == 0
    assert event.note is not None and "1 scores are NaN or Inf" in event.note


def test_l8_broken_scores_of_protected_entries_do_not_matter(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt_tokens("tiny-llama", 1, 120)
    fine = follow(make_engine("tiny-llama", budget="0.3"), [tokens], [[5]])[0]
    spoil_scores(monkeypatch, (slice(None), slice(None), slice(4)), float("nan"))
    spoilt = follow(make_engine("tiny-llama", budget="0.3"), [tokens], [[5]])[0]
    assert torch.equal(fine.hidden_from(), spoilt.hidden_from())


def notes(engine: Engine, tokens: list[int], steps: int) -> list[str]:
    (trail,) = follow(engine, [tokens], [tokens[:steps]])
    events = [*trail.events, *engine.close(trail.sequence)]
    assert {event.regime for event in events} == set(engine.compactor.config.regime)
    return [event.note for event in events if event.note is not None]


def test_l9_compression_that_did_not_happen_is_reported(make_engine: MakeEngine) -> None:
    tokens = prompt_tokens("tiny-llama", 1, 120)
    (short,) = notes(make_engine("tiny-llama", regime="prefill"), tokens[:18], 1)
    assert "not more than the 20 protected" in short
    (full,) = notes(make_engine("tiny-llama", policy="full", regime="prefill"), tokens, 1)
    assert "evicts nothing" in full
    (early,) = notes(make_engine("tiny-llama", regime="deferred", defer=8), tokens, 3)
    assert "ended after 3 decoded tokens, before the 8 of defer" in early
    (brief,) = notes(make_engine("tiny-llama", regime="prefill,generation", budget="0.3"), tokens, 15)
    assert "ended after 15 decoded tokens, before the 16 of interval" in brief
    (clamped,) = notes(make_engine("tiny-llama", regime="prefill", budget="0.05"), tokens, 1)
    assert "raised to the 20 protected" in clamped


def test_l9_keeping_more_than_was_asked_for_is_clamped(make_engine: MakeEngine) -> None:
    for budget, length in (("0.2", 18), ("0.05", 120)):
        engine = make_engine("tiny-llama", regime="prefill", budget=budget)
        (trail,) = follow(engine, [prompt_tokens("tiny-llama", 1, 130)[:length]], [[5]])
        assert trail.events[0].clamped
