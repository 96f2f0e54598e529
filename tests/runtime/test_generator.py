"""Requests through one generator: alone, together, in turn, aborted and failing."""

import itertools
from collections.abc import Callable, Sequence

import pytest
import torch

from bpkv_trt.errors import InputError, PoolExhausted
from bpkv_trt.runtime.engine import Engine, Turn
from bpkv_trt.runtime.generator import Generator, Request
from bpkv_trt.runtime.sampling import SamplingParams
from tests.runtime.masked_reference import MaskedReference
from tests.runtime.random_models import engine_of, plain_copy, random_tokens, wrapped

PROMPTS = [random_tokens(seed, length) for seed, length in enumerate((50, 7, 33, 21))]
GREEDY = SamplingParams(max_new_tokens=20)
MODELS = ["llama", "gemma3", "cohere"]


def sampled(seed: int, **options: object) -> SamplingParams:
    return SamplingParams(**{"max_new_tokens": 20, "temperature": 1.0, "top_p": 0.95, "seed": seed, **options})


def run(engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[list[int]]:
    """All at once through a new generator."""
    generator = Generator(engine)
    requests = [generator.add([prompt], each) for prompt, each in zip(prompts, params, strict=True)]
    generator.generate(requests)
    assert_empty(engine, generator)
    return [request.generated for request in requests]


def assert_empty(engine: Engine, generator: Generator) -> None:
    """Nothing of any request is left."""
    engine.pool.check_integrity()
    assert engine.pool.live_pages == 0 and engine.pool.sequences == ()
    assert not generator.waiting and not generator.running
    state = (engine.host.tokens, engine.compactor.requests, engine.statistics.received, engine.statistics.moments)
    assert state == ({}, {}, {}, {})


@pytest.mark.parametrize("name", MODELS)
def test_the_full_cache_generates_what_transformers_generates(name: str) -> None:
    answers = run(engine_of(name, policy="full"), PROMPTS, [GREEDY] * len(PROMPTS))
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        ids = torch.tensor([prompt])
        whole = plain_copy(name).generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20, eos_token_id=None
        )
        assert answer == whole[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", ["bpkv", "h2o"])
@pytest.mark.parametrize("regime", ["prefill,generation", "deferred"])
def test_a_request_does_not_notice_the_others_of_its_batch(name: str, policy: str, regime: str) -> None:
    options = {"policy": policy, "budget": "0.4", "regime": regime, "defer": 4}
    params = [GREEDY, sampled(1), sampled(2), GREEDY]
    together = run(engine_of(name, **options), PROMPTS, params)
    assert together == [run(engine_of(name, **options), [p], [s])[0] for p, s in zip(PROMPTS, params, strict=True)]
    assert len({tuple(answer) for answer in together}) == len(together)


@pytest.mark.parametrize("policy", ["bpkv", "h2o"])
def test_requests_in_any_order_through_one_object(policy: str) -> None:
    engine = engine_of("llama", policy=policy, budget="0.4")
    generator, params = Generator(engine), {0: GREEDY, 1: sampled(1), 2: sampled(2)}
    answers: dict[int, set[tuple[int, ...]]] = {index: set() for index in params}
    for order in itertools.permutations(params):
        for index in order:
            request = generator.add([PROMPTS[index]], params[index])
            generator.generate([request])
            answers[index].add(tuple(request.generated))
            assert_empty(engine, generator)
    assert all(len(seen) == 1 for seen in answers.values())


def test_stop_tokens_end_an_answer_and_are_not_part_of_it() -> None:
    (answer,) = run(engine_of("llama", policy="full"), PROMPTS[:1], [sampled(3)])
    stop = answer[7]
    engine = engine_of("llama", policy="full")
    generator = Generator(engine)
    request = generator.add([PROMPTS[0]], sampled(3, stop_tokens=frozenset({stop})))
    generator.generate([request])
    assert request.finished == "stop" and request.generated == answer[: answer.index(stop)]
    assert_empty(engine, generator)


def test_a_stop_token_at_once_leaves_an_empty_answer() -> None:
    (answer,) = run(engine_of("llama", policy="full"), PROMPTS[:1], [GREEDY])
    first = SamplingParams(max_new_tokens=5, stop_tokens=frozenset(answer[:1]))
    assert run(engine_of("llama", policy="full"), PROMPTS[:1], [first]) == [[]]


@pytest.mark.parametrize("count", [1, 2, 9])
def test_max_new_tokens(count: int) -> None:
    engine = engine_of("llama", policy="full")
    generator = Generator(engine)
    request = generator.add([PROMPTS[0]], SamplingParams(max_new_tokens=count))
    generator.generate([request])
    assert request.finished == "length" and len(request.generated) == count


@pytest.mark.parametrize("turns", [[], [[]], [[5], []]])
def test_an_empty_turn_is_refused(turns: list[list[int]]) -> None:
    generator = Generator(engine_of("llama"))
    with pytest.raises(InputError, match="no tokens"):
        generator.add(turns, GREEDY)
    assert not generator.waiting


@pytest.mark.parametrize("policy", ["bpkv", "h2o", "expected_attention"])
@pytest.mark.parametrize("steps", [0, 1, 2, 8, 12])
def test_an_abort_returns_all_pages_at_every_stage(policy: str, steps: int) -> None:
    """Waiting, just encoded, in the middle of decoding, after a compaction of the answer; the other goes on."""
    engine = engine_of("llama", policy=policy, budget="0.4")
    (alone,) = run(engine, PROMPTS[1:2], [GREEDY])
    generator = Generator(engine)
    doomed, other = generator.add([PROMPTS[0]], GREEDY), generator.add([PROMPTS[1]], GREEDY)
    for _ in range(steps):
        generator.step()
    sequence = doomed.sequence
    generator.abort(doomed)
    generator.abort(doomed)
    assert doomed.finished == "aborted" and sequence not in engine.pool.sequences and len(doomed.generated) == steps
    generator.generate([other])
    assert other.generated == alone
    assert_empty(engine, generator)


class Interrupted(Exception):
    """What a caller's code might raise."""


@pytest.mark.parametrize("policy", ["bpkv", "h2o", "expected_attention"])
@pytest.mark.parametrize("tokens", [1, 5, 30])
def test_an_exception_of_the_caller_leaves_nothing_behind(policy: str, tokens: int) -> None:
    engine, seen = engine_of("llama", policy=policy, budget="0.4"), list[Request]()
    generator = Generator(engine)
    requests = [generator.add([prompt], GREEDY) for prompt in PROMPTS]

    def on_token(request: Request) -> None:
        seen.append(request)
        if len(seen) == tokens:
            raise Interrupted

    with pytest.raises(Interrupted):
        generator.generate(requests, on_token)
    assert all(request.finished is not None for request in requests)
    assert_empty(engine, generator)


@pytest.mark.parametrize("policy", ["bpkv", "h2o", "expected_attention"])
@pytest.mark.parametrize("call", [0, 1, 5])
@pytest.mark.parametrize("layer", [0, 1])
def test_an_exception_inside_the_models_forward_leaves_nothing_behind(policy: str, call: int, layer: int) -> None:
    engine, calls = engine_of("llama", policy=policy, budget="0.4"), itertools.count()
    (alone,) = run(engine, PROMPTS[1:2], [GREEDY])
    generator = Generator(engine)
    requests = [generator.add([prompt], GREEDY) for prompt in PROMPTS[:2]]

    def fail(*_: object) -> None:
        if next(calls) == call:
            raise Interrupted

    handle = engine.host.model.model.layers[layer].mlp.register_forward_hook(fail)
    try:
        with pytest.raises(Interrupted):
            generator.generate(requests)
    finally:
        handle.remove()
    assert_empty(engine, generator)
    assert run(engine, PROMPTS[1:2], [GREEDY]) == [alone], "the engine is as good as new"


def pages(rows: int, page_size: int = 4) -> int:
    return -(-rows // page_size) * page_size


def test_where_the_pool_holds_one_the_second_waits_until_the_first_is_done() -> None:
    engine = engine_of("llama", rows=pages(50 + 20), caches=1, policy="full")
    generator = Generator(engine)
    first, second = (generator.add([PROMPTS[0]], GREEDY) for _ in range(2))
    while first.finished is None:
        assert second.sequence is None and second in generator.waiting
        generator.step()
    generator.generate([second])
    assert first.generated == second.generated
    assert_empty(engine, generator)


def test_pages_that_a_compaction_freed_admit_the_next_request() -> None:
    options = {"budget": "0.3", "scope": "head", "regime": "prefill", "lookahead": 0, "rehearsal": 0}
    engine = engine_of("llama", rows=pages(70) * 8 // 5, caches=1, **options)
    generator = Generator(engine)
    first, second = (generator.add([PROMPTS[0]], GREEDY) for _ in range(2))
    generator.step()
    assert second.sequence is None
    generator.step()
    assert second.sequence is not None and first.finished is None
    generator.generate([first, second])
    assert first.generated == second.generated
    assert_empty(engine, generator)


def test_a_request_that_can_never_fit_is_refused_with_numbers() -> None:
    engine = engine_of("llama", rows=pages(60), caches=1, lookahead=0, rehearsal=0)
    generator = Generator(engine)
    traits = wrapped("llama").traits
    needed = pages(70) // 4 * traits.layers * traits.kv_heads
    with pytest.raises(PoolExhausted, match=f"need {needed} pages, and the pool has {engine.pool.pages} in all"):
        generator.add([PROMPTS[0]], GREEDY)
    assert_empty(engine, generator)


def test_a_pool_held_by_others_is_reported_and_not_waited_for() -> None:
    engine = engine_of("llama", rows=pages(100), caches=1, policy="full")
    held = engine.open()
    engine.encode([(held, PROMPTS[0])])
    generator = Generator(engine)
    request = generator.add([PROMPTS[0]], GREEDY)
    with pytest.raises(PoolExhausted, match="held"):
        generator.generate([request])
    assert request.finished == "aborted"
    engine.close(held)
    assert_empty(engine, generator)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("policy", ["bpkv", "h2o"])
def test_a_second_turn_reads_the_compacted_cache(name: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one batch with a request of one turn; L2 for every logit of the second turn and of the answer."""
    engine = engine_of(name, policy=policy, budget="0.4", regime="prefill")
    turns, traits = [PROMPTS[0], PROMPTS[3]], engine.host.traits
    logits: dict[int, list[torch.Tensor]] = {}

    def keeping(run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def kept(given: Sequence[Turn]) -> torch.Tensor:
            output = run(given)
            for (sequence, _), row in zip(given, output, strict=True):
                logits.setdefault(sequence, []).append(row)
            return output

        return kept

    monkeypatch.setattr(engine, "encode", keeping(engine.encode))
    monkeypatch.setattr(engine, "decode", keeping(engine.decode))
    generator = Generator(engine)
    other, request = generator.add([PROMPTS[2]], GREEDY), generator.add(turns, GREEDY)
    generator.step()
    sequence, view = request.handle, engine.pool.view(request.handle)
    hidden = torch.full((traits.layers, traits.kv_heads, 200), 1 << 30)
    for layer in traits.compactable_layers:
        for head in range(traits.kv_heads):
            gone = sorted(set(range(len(turns[0]))) - set(view.positions(layer, head).tolist()))
            hidden[layer, head, gone] = len(turns[0])
    generator.generate([other, request])
    assert [event.regime for event in request.events] == ["prefill"]
    assert request.events[0].entries_after < request.events[0].entries_before
    tokens = [*turns[0], *turns[1], *request.generated]
    reference = MaskedReference(plain_copy(name), dict.fromkeys(traits.sliding_layers, traits.sliding_window or 0))
    truth = reference.logits(tokens, hidden[..., : len(tokens)])
    ends = [len(turns[0]) - 1, *range(len(turns[0]) + len(turns[1]) - 1, len(tokens) - 1)]
    assert len(ends) == len(logits[sequence])
    for end, row in zip(ends, logits[sequence], strict=True):
        assert float((row - truth[end]).abs().max() / truth[end].abs().max()) < 1e-5
    assert_empty(engine, generator)
