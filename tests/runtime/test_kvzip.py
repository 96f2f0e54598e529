"""KVzip's replay against eager attention over a transformers cache, and what it leaves behind: nothing."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from bpkv_trt.config import BpkvConfig
from bpkv_trt.errors import ConfigError, PoolExhausted
from bpkv_trt.policies.registry import settled
from bpkv_trt.runtime import repetition
from bpkv_trt.runtime.engine import Engine, make_pool
from bpkv_trt.runtime.generator import Generator
from bpkv_trt.runtime.rehearsal import ROWS
from bpkv_trt.runtime.repetition import repeated_attention, repetitions
from bpkv_trt.runtime.sampling import SamplingParams
from bpkv_trt.runtime.scratch import scratch_rows
from tests.runtime.conftest import ASSETS, MakeEngine, loaded, prompt_tokens
from tests.runtime.random_models import engine_of
from tests.runtime.trail import follow, keep

NAMES, LENGTH, SINKS = ("tiny-llama", "tiny-gemma"), 120, 4
OPTIONS: dict[str, Any] = {"policy": "kvzip", "regime": "prefill", "budget": "0.4"}


@pytest.fixture
def short_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repetition, "PART", 50)


def eager_scores(name: str, context: list[int]) -> Tensor:
    """[L, Hq, T] float64: by part, the context's attention renormalised over sinks, part and the repetition itself."""
    encoder = loaded(name).encoder
    model = AutoModelForCausalLM.from_pretrained(ASSETS / name, attn_implementation="eager", dtype=torch.float32).eval()
    scores = torch.zeros(model.config.num_hidden_layers, model.config.num_attention_heads, len(context)).double()
    for start in range(0, len(context), 50):
        stop = min(start + 50, len(context))
        text = "\n\nRepeat the previous context exactly."
        if start:
            text = "\n\nRepeat the part of the previous context exactly, starting with"
        tokenizer = loaded(name).tokenizer
        instruction = tokenizer(text, add_special_tokens=False)["input_ids"] + context[max(0, start - 8) : start]
        tokens = instruction + encoder.encode_answer_start() + context[start:stop]
        with torch.no_grad():
            cache = DynamicCache(config=model.config)
            model(torch.tensor([context]), past_key_values=cache)
            attentions = model(torch.tensor([tokens]), past_key_values=cache, output_attentions=True).attentions
        for layer, weights in enumerate(attentions):
            if weights.shape[-1] < len(context) + len(tokens):
                continue  # a sliding window
            sinks = weights[0][..., : min(SINKS, start)].double()
            part, own = weights[0][..., start:stop].double(), weights[0][..., len(context) :].double()
            total = sum(share.sum(-1, keepdim=True) for share in (sinks, part, own))
            scores[layer, :, start:stop] = (part / total).amax(1)
    return scores


@pytest.mark.usefixtures("short_parts")
@pytest.mark.parametrize("name", NAMES)
def test_scores_are_the_largest_attention_while_the_context_is_repeated(make_engine: MakeEngine, name: str) -> None:
    engine = make_engine(name, **OPTIONS)
    context = prompt_tokens(name, 1, LENGTH)
    sequence = engine.open()
    engine.encode([(sequence, context)])
    free = engine.pool.free_pages
    ours = engine.statistics.collect(sequence, 6, engine.trace).replay_attention
    assert ours is not None and engine.pool.free_pages == free and engine.pool.sequences == (sequence,)
    traits, truth = engine.host.traits, eager_scores(name, context)
    for layer in traits.compactable_layers:
        grouped = truth[layer].unflatten(0, (traits.kv_heads, traits.group)).amax(1)  # [Hkv, T]
        assert torch.allclose(ours[layer, :, : len(context)].double(), grouped, rtol=1e-3, atol=1e-5)
        assert grouped.min() > 0


@pytest.mark.usefixtures("short_parts")
def test_rows_that_are_gone_have_no_score_and_the_others_find_their_own(make_engine: MakeEngine) -> None:
    """After an eviction heads are ragged; scores stand at the rows of the parts' tokens."""
    engine = make_engine("tiny-llama", **OPTIONS)
    context = prompt_tokens("tiny-llama", 1, LENGTH)
    sequence = engine.open()
    engine.encode([(sequence, context)])
    kept = sorted(torch.randperm(len(context), generator=torch.Generator().manual_seed(1))[:70].tolist())
    keep(engine, sequence, {(1, 0): kept, (2, 1): range(60, len(context))})  # no row of a first part there
    scores = repeated_attention(engine.host, loaded("tiny-llama").encoder, sequence, SINKS)
    assert scores.shape[-1] == len(context)
    assert bool((scores[1, 0, :70] > 0).all()) and scores[1, 0, 70:].abs().sum() == 0
    assert bool((scores[2, 1, : len(context) - 60] > 0).all())


def test_parts_cover_the_context_once_and_lead_in_from_the_part_before() -> None:
    encoder = loaded("tiny-llama").encoder
    context = list(range(5000))
    parts = repetitions(encoder, context)
    assert [token for each in parts for token in each.part] == context
    assert [len(each.part) for each in parts] == [2048, 2048, 904]
    answer = encoder.encode_answer_start()
    for each in parts:
        assert list(each.tokens[-len(each.part) :]) == list(each.part)
        before = list(each.tokens[: -len(each.part)])
        assert before[-len(answer) :] == answer
        if each.part.start:
            assert before[-len(answer) - 8 : -len(answer)] == list(range(each.part.start - 8, each.part.start))


@pytest.mark.parametrize("scope", ["global", "layer", "head"])
@pytest.mark.parametrize("regime", ["prefill", "deferred"])
def test_what_is_repeated_leaves_an_answer_as_it_would_be(make_engine: MakeEngine, scope: str, regime: str) -> None:
    """Counts are exact, and the pool is as another policy would have left it."""
    options = {**OPTIONS, "scope": scope, "regime": regime, "defer": 5}
    prompt, more = prompt_tokens("tiny-llama", 1, LENGTH), prompt_tokens("tiny-llama", 2, LENGTH)[:8]
    engine = make_engine("tiny-llama", **options)
    (trail,) = follow(engine, [prompt], [more])
    event = trail.events[0]
    tokens = len(prompt) + (5 if regime == "deferred" else 0)
    assert event.note is None and event.entries_after == int(0.4 * tokens) * 4 * 2
    assert engine.pool.sequences == (trail.sequence,) and list(engine.host.tokens) == [trail.sequence]
    assert engine.pool.logical_length(trail.sequence) == len(prompt) + len(more)


def small_engine(rows: int, scratch: int, caches: int = 1, **options: Any) -> Engine:
    model, config = loaded("tiny-llama"), BpkvConfig(**{**OPTIONS, "recent": 16, "page_size": 8, **options})
    return Engine(model, config, make_pool(model, rows, 8, caches=caches, scratch=scratch, poison=True))


def test_without_room_for_the_copy_nothing_is_run_and_the_request_is_whole() -> None:
    prompt = prompt_tokens("tiny-llama", 1, LENGTH)
    engine = small_engine(2 * len(prompt), 0)  # the copy fits, its growth does not
    sequence = engine.open()
    logits = engine.encode([(sequence, prompt)])
    lengths, free = engine.pool.lengths(sequence), engine.pool.free_pages
    with pytest.raises(PoolExhausted, match="repeating it over a copy of its cache.*Nothing was run or evicted"):
        engine.compactor.on_context_step_end(sequence)
    assert (engine.pool.lengths(sequence) == lengths).all() and engine.pool.free_pages == free
    engine.pool.check_integrity()
    token = int(logits[0].argmax())
    after = engine.decode([(sequence, [token])])
    reference = small_engine(2 * len(prompt), 0, policy="full")
    other = reference.open()
    reference.encode([(other, prompt)])
    assert torch.equal(after, reference.decode([(other, [token])]))


@pytest.mark.parametrize("regime", ["prefill", "deferred"])
def test_the_generator_keeps_room_for_one_copy(regime: str) -> None:
    prompts = [prompt_tokens("tiny-llama", seed, LENGTH) for seed in (1, 2, 3)]
    longest = max(map(len, prompts))
    config = settled(BpkvConfig(**{**OPTIONS, "regime": regime}))
    scratch = scratch_rows(config, loaded("tiny-llama").encoder, [longest])
    with pytest.raises(PoolExhausted, match="the pool has"):
        Generator(small_engine(longest + 12, 0, regime=regime)).add([prompts[0]], SamplingParams(max_new_tokens=12))
    engine = small_engine(longest + 12, scratch, caches=2, regime=regime)  # two at a time and one copy
    generator = Generator(engine)
    requests = [generator.add([prompt], SamplingParams(max_new_tokens=12)) for prompt in prompts]
    generator.generate(requests)
    for request in requests:
        assert request.finished == "length" and request.events[0].note is None
        assert request.events[0].entries_after < request.events[0].entries_before
    assert engine.pool.live_pages == 0
    engine.pool.check_integrity()


def test_scratch_is_what_a_copy_a_draft_or_a_passage_takes_and_nothing_for_others() -> None:
    encoder = loaded("tiny-llama").encoder

    def rows(*turns: int, **options: Any) -> int:
        return scratch_rows(settled(BpkvConfig(**{**OPTIONS, **options})), encoder, turns)

    (whole,) = repetitions(encoder, [0] * 100)
    assert rows(100) == rows(100, 50) == 100 + len(whole.tokens)
    assert rows(100, regime="deferred", defer=8) == 108 + len(whole.tokens) + 8
    assert rows(5000) == 5000 + max(len(each.tokens) for each in repetitions(encoder, [0] * 5000))
    assert rows(5000, policy="snapkv") == rows(5000, policy="full", lookahead=8) == 0
    assert rows(5000, policy="snapkv", lookahead=8) == 8
    ours = {"policy": "bpkv", "lookahead": 32, "rehearsal": 0}
    assert rows(5000, **ours) == 32 and rows(5000, **ours, regime="deferred") == 2 * 32
    assert rows(5000, policy="bpkv", regime="generation") == 0
    rehearsing = {**ours, "rehearsal": 200}  # a passage at a time, before anything is drafted
    assert rows(5000, **{**rehearsing, "lookahead": 0}) == ROWS
    assert rows(5000, **{**rehearsing, "lookahead": ROWS}) == ROWS
    assert rows(5000, **{**rehearsing, "lookahead": ROWS}, regime="deferred") == 2 * ROWS


def test_a_model_without_a_tokenizer_cannot_repeat() -> None:
    with pytest.raises(ConfigError, match="kvzip needs replay"):
        engine_of("llama", policy="kvzip", regime="prefill")
