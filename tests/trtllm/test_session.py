"""The session, replayed on the CPU: TensorRT-LLM's steps and blocks around a network that torch evaluates."""

import copy
import random

import numpy as np
import pytest
import torch

from bpkv_trt.errors import BpkvError, PoolExhausted
from bpkv_trt.runtime.engine import Engine, make_pool
from bpkv_trt.runtime.generator import Generator
from bpkv_trt.runtime.sampling import SamplingParams
from tests.runtime.masked_reference import MaskedReference
from tests.trtllm.built_network import PAGE, engine_settings
from tests.trtllm.session_place import SessionPlace, answers
from tests.trtllm.watched_session import FRESH, hidden_from, open_session

PROMPTS = [
    [5, 9, 33, 12, 60, 7, 7, 21, 48, 3, 17, 40, 2, 51, 9, 11, 36],
    [44, 2, 8, 51, 30, 19, 6, 25, 25, 13, 57, 4],
    [19, 6, 30, 41],
]
NEW = 24
OPTIONS = {"sinks": 1, "refine": 8, "interval": 6, "defer": 2, "recent": 5, "generation_budget": "8t"}
REGIMES = ["prefill", "prefill,generation", "deferred", "deferred,generation", "generation"]


@pytest.fixture(scope="module")
def place(trt, tensorrt_10):
    made = SessionPlace(
        trt, tensorrt_10, "llama_bias_rope", settings=engine_settings(**OPTIONS, regime="deferred,generation")
    )
    with made.installed(*FRESH):
        yield made


def on_the_host(place, config, prompt, new, stop=frozenset()):
    """The request of the same settings on the torch host, alone."""
    loaded = place.built.loaded
    generator = Generator(Engine(loaded, config, make_pool(loaded, len(prompt) + new, PAGE)))
    request = generator.add([prompt], SamplingParams(new, stop_tokens=stop))
    generator.generate([request])
    return request


def evictions(events, new):
    """But for what the layout of the pool decides, and after the last run, which the stock session prepares no step
    after: there the host may still compact, for nothing."""
    done = [each for each in events if each.entries_after < each.entries_before and each.step < new - 1]
    return [(each.step, each.regime, each.entries_before, each.entries_after, each.note) for each in done]


@pytest.mark.parametrize("regime", REGIMES)
@pytest.mark.parametrize("budget", ["0.3", "0.7"])
def test_the_text_is_that_of_the_torch_host(place, regime, budget):
    used = {"budget": budget} if regime != "generation" else {}
    config = place.built.settings.configured(regime=regime, **used)
    session = open_session(place, config)
    got = answers(place.decode(session, PROMPTS, NEW), PROMPTS, NEW)
    for index, prompt in enumerate(PROMPTS):
        request = on_the_host(place, config, prompt, NEW)
        assert got[index] == request.generated
        assert evictions(session.events[index], NEW) == evictions(request.events, NEW)
    assert any(each.entries_after < each.entries_before for own in session.events for each in own)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_every_architecture_compacts_as_on_the_torch_host(trt, tensorrt_10, name):
    place = SessionPlace(trt, tensorrt_10, name, settings=engine_settings(**OPTIONS, budget="0.4"))
    with place.installed(*FRESH):
        session = open_session(place)
        got = answers(place.decode(session, PROMPTS, NEW), PROMPTS, NEW)
        assert got == [on_the_host(place, place.built.settings.config, each, NEW).generated for each in PROMPTS]
        assert place.fakes.unverified == set()


@pytest.mark.parametrize("regime", REGIMES)
def test_l2_logits_are_those_of_the_full_cache_with_what_was_evicted_masked(place, regime):
    session = open_session(place, place.built.settings.configured(regime=regime))
    outputs = place.decode(session, PROMPTS, NEW, return_dict=True, output_generation_logits=True)
    reference = MaskedReference(copy.deepcopy(place.built.loaded.model), {})
    for index, (prompt, answer) in enumerate(zip(PROMPTS, answers(outputs["output_ids"], PROMPTS, NEW), strict=True)):
        tokens = [*prompt, *answer[:-1]]
        hidden = hidden_from(session, index, tokens)
        truth = reference.logits(tokens, hidden)[len(prompt) - 1 :]
        got = torch.stack([step[index] for step in outputs["generation_logits"]])
        assert (got - truth).abs().max() <= 5e-5 * truth.abs().max()
        assert index == 2 or (hidden < len(tokens)).any()


def test_a_poisoned_live_block_changes_the_logits(place):
    """The pool is what attention reads."""

    def logits(spoil):
        session = open_session(place)
        stock = type(session)._get_next_step_shape_buffer

        def spoiled(self, *given, **named):
            tensors = stock(self, *given, **named)
            if spoil and self.pool.logical_length(0) == len(PROMPTS[0]) + 3:
                self._memory_pool_allocator._pool_pointers[0][self.pool._parts[0].table.blocks(0)[0]] += 1
            return tensors

        type(session)._get_next_step_shape_buffer = spoiled
        outputs = place.decode(session, PROMPTS, 8, return_dict=True, output_generation_logits=True)
        return torch.stack(outputs["generation_logits"])

    clean, spoiled = logits(False), logits(True)
    assert torch.equal(clean[:4], spoiled[:4]) and torch.equal(clean[:, 1:4], spoiled[:, 1:4])
    assert not torch.equal(clean[4, 0], spoiled[4, 0])


def test_l1_a_budget_of_everything_is_the_stock_session(place):
    from tests.trtllm.test_stock_session import unscored

    session = open_session(place, place.built.settings.configured(budget="1", regime="prefill"))
    options = {"return_dict": True, "output_generation_logits": True}
    ours, stock = (place.decode(each, PROMPTS, NEW, **options) for each in (session, unscored(place)))
    assert torch.equal(torch.stack(ours["generation_logits"]), torch.stack(stock["generation_logits"]))
    assert [[each.note for each in own] for own in session.events] == [["within the budget 1"]] * 3


def test_a_stream_gives_every_step_and_then_what_was_compacted(place):
    config = place.built.settings.configured(regime="prefill,generation")
    whole, streamed = open_session(place, config), open_session(place, config)
    final = place.decode(whole, PROMPTS, NEW)
    steps = list(place.decode(streamed, PROMPTS, NEW, streaming=True))
    full = answers(final, PROMPTS, NEW)
    for index, output in enumerate(steps[:NEW]):
        assert [own[: index + 1] for own in answers(output, PROMPTS, NEW)] == [own[: index + 1] for own in full]
    assert [evictions(own, NEW) for own in streamed.events] == [evictions(own, NEW) for own in whole.events]
    assert any(evictions(own, NEW) for own in whole.events)

    few = place.decode(streamed, PROMPTS, NEW, streaming=True)
    next(few)
    few.close()
    assert [own[0].regime for own in streamed.events] == ["prefill"] * 3
    assert torch.equal(place.decode(streamed, PROMPTS, NEW), final)  # nothing is left of it


def test_a_stream_ends_with_its_own_batch(place):
    session = open_session(place)
    expected = place.decode(session, PROMPTS, NEW)
    first = place.decode(session, PROMPTS[:1], NEW, streaming=True)
    next(first)
    second = place.decode(session, PROMPTS, NEW, streaming=True)
    next(second)
    with pytest.raises(BpkvError, match="This stream's batch has ended, since its session began another"):
        next(first)
    *_, last = second
    assert torch.equal(last, expected)


def test_stop_words_are_found_by_logical_length(place):
    session = open_session(place, place.built.settings.configured(regime="prefill,generation"))
    full = answers(place.decode(session, PROMPTS[:1], NEW), PROMPTS[:1], NEW)[0]
    at = next(at for at in range(14, NEW - 1) if full[at : at + 2] not in [full[i : i + 2] for i in range(at)])
    words = np.array([[full[at : at + 2], [2, -1]]], dtype=np.int32)
    given = {"return_dict": True, "output_sequence_lengths": True, "stop_words_list": words}
    outputs = place.decode(session, PROMPTS[:1], NEW, **given)
    assert outputs["sequence_lengths"].item() == len(PROMPTS[0]) + at + 2
    assert answers(outputs["output_ids"], PROMPTS[:1], NEW)[0][: at + 2] == full[: at + 2]
    assert len(evictions(session.events[0], at)) > 1


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_l8_logits_that_are_no_numbers_evict_nothing(place, value, monkeypatch):
    stock = place.engine._run

    def spoiled(feed):
        outputs = stock(feed)
        if len(outputs["bpkv_covered_mass"]):
            outputs["bpkv_covered_mass"][[1, -1]] = value  # a row of each sequence
        return outputs

    monkeypatch.setattr(place.engine, "_run", spoiled)
    session = open_session(place, place.built.settings.configured(regime="prefill"))
    place.decode(session, PROMPTS[:2], 6)
    assert all("scores are NaN or Inf" in own[0].note for own in session.events)
    assert all(own[0].entries_after == own[0].entries_before for own in session.events)


def test_a_session_begins_anew_with_every_decode(place):
    session = open_session(place)
    first, second = ([PROMPTS[0]], PROMPTS[1:]), (PROMPTS[1:], [PROMPTS[0]])
    outputs = [[answers(place.decode(session, own, NEW), own, NEW) for own in order] for order in (first, second)]
    assert outputs[0] == outputs[1][::-1]


def test_a_bounded_cache_holds_what_compactions_leave(place):
    """Of a long answer that is a small part of all rows; blocks would run out otherwise."""
    config = place.built.settings.configured(regime="prefill,generation", budget="0.4", interval=5)
    whole, bounded = open_session(place, config), open_session(place, config, bounded=True)
    new = 60
    assert torch.equal(place.decode(whole, PROMPTS, new), place.decode(bounded, PROMPTS, new))
    blocks = [each.pools_kv_cache_manager._kv_cache_managers[0].blocks_manager.num_blocks for each in (whole, bounded)]
    rows = 17 * 4 // 10 + 8 + 5  # of the prompt, and of the answer before it is compacted
    assert blocks == [3 * -(-(17 + new) // PAGE), 3 * -(-(rows + 1) // PAGE)]


def test_a_bounded_cache_says_so_where_a_compaction_did_not_take_place(place, monkeypatch):
    stock = place.engine._run

    def spoiled(feed):
        outputs = stock(feed)
        outputs["bpkv_covered_mass"].fill_(torch.nan)
        return outputs

    monkeypatch.setattr(place.engine, "_run", spoiled)
    config = place.built.settings.configured(regime="prefill,generation", budget="0.4", interval=5)
    with pytest.raises(
        PoolExhausted, match="one did not take place .not compacted: .* scores are NaN or Inf.* bounded"
    ):
        place.decode(open_session(place, config, bounded=True), PROMPTS, 60)


def test_hundreds_of_random_batches(place):
    """Blocks balance after every step, and each text is that of the sequence alone on the torch host."""
    chance = random.Random(7)
    evicted = 0
    for _ in range(200):
        prompts = [[chance.randrange(3, 64) for _ in range(chance.randint(1, 20))] for _ in range(chance.randint(1, 4))]
        new, regime = chance.randint(1, 16), chance.choice(REGIMES)
        options = {"regime": regime, "interval": chance.randint(3, 9), "generation_budget": f"{chance.randint(5, 9)}t"}
        if "deferred" in regime:
            options["interval"] = max(options["interval"], 5)
        if regime != "generation":
            options["budget"] = str(chance.randint(1, 10) / 10)
        config = place.built.settings.configured(**options)
        end = chance.randrange(3, 64)
        session = open_session(place, config, bounded=chance.random() < 0.5)
        outputs = place.decode(session, prompts, new, end_id=end, return_dict=True, output_sequence_lengths=True)
        lengths, got = outputs["sequence_lengths"][:, 0].tolist(), answers(outputs["output_ids"], prompts, new)
        evicted += sum(each.entries_before - each.entries_after for own in session.events for each in own)
        [manager] = session.pools_kv_cache_manager._kv_cache_managers
        blocks = manager.blocks_manager
        assert len(blocks.free_blocks) == blocks.num_blocks and not manager.sequences
        if chance.random() < 0.15:  # which takes as long as all the rest
            for index, prompt in enumerate(prompts):
                request = on_the_host(place, config, prompt, new, frozenset([end]))
                if request.generated:  # the stock sampler never ends with the first token
                    count = lengths[index] - len(prompt)
                    assert got[index][:count] == request.generated
                    assert evictions(session.events[index], new) == evictions(request.events, new)
    assert evicted > 3000, evicted
