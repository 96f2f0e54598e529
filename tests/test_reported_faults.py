"""Kinds of faults that users of other KV-cache compressors reported, each with the value that is right."""

import copy
import gc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bpkv_trt.config import BpkvConfig
from bpkv_trt.core.evidence import score_entries
from bpkv_trt.core.evidence_source import EvidenceSource
from bpkv_trt.errors import ConfigError
from bpkv_trt.evaluation.ranks import spearman
from bpkv_trt.evaluation.verify import verify
from bpkv_trt.models.loading import LoadedModel
from bpkv_trt.runtime.engine import Engine
from bpkv_trt.runtime.generator import Generator
from bpkv_trt.runtime.sampling import SamplingParams
from bpkv_trt.runtime.step import Chunk
from tests.runtime.conftest import loaded as trained
from tests.runtime.conftest import prompt_tokens
from tests.runtime.masked_reference import MaskedReference
from tests.runtime.own_path import OwnPath
from tests.runtime.random_models import (
    BOS,
    COMPACTABLE,
    SMALL,
    engine_of,
    engine_on,
    model_with,
    model_with_a_sink,
    random_tokens,
    wrapped,
)
from tests.runtime.trail import assert_masked, feed, follow, keep

SINKS, RECENT = SMALL["sinks"], SMALL["recent"]
PROTECTED = SINKS + RECENT
POLICIES = ("bpkv", "snapkv", "h2o", "expected_attention", "streaming_llm", "random")


def every_head(loaded: LoadedModel, rows: Sequence[int]) -> dict[tuple[int, int], Sequence[int]]:
    traits = loaded.traits
    return {(layer, head): rows for layer in traits.compactable_layers for head in range(traits.kv_heads)}


# Positions and masks


@pytest.mark.parametrize("policy", ["full", "h2o"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3"])
@pytest.mark.parametrize("ragged", [0, 3])
def test_layers_and_heads_of_different_lengths(name: str, policy: str, ragged: int) -> None:
    """huggingface/transformers#35168, Zefan-Cai/KVCache-Factory#27: by token, by turn and replayed, packed with a full
    sequence."""
    loaded = model_with(name, layers=4)
    engine = engine_on(loaded, policy=policy, regime="prefill", budget="1.0")
    trail, whole = follow(engine, [random_tokens(1, 48), random_tokens(2, 30)], [[], []])
    draw = torch.Generator().manual_seed(0)
    kept = {
        (layer, head): torch.randperm(48, generator=draw)[: (16, 7, 31, 2)[layer] + ragged * head].tolist()
        for layer, head in every_head(loaded, ())
    }
    keep(engine, trail.sequence, kept)
    trail.settle(trail.logits[47], None)
    for step in range(3):
        feed((trail, [20 + step]), (whole, [30 + step]))
    feed((whole, random_tokens(3, 5)), (trail, random_tokens(4, 7)))
    assert_masked(loaded, [trail, whole])
    replayed = engine.host.replay(trail.sequence, SMALL["positions"]).logits[-1]
    assert torch.allclose(replayed, trail.logits[57], rtol=0, atol=1e-5 * float(replayed.abs().max()))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3"])
def test_interior_evictions_do_not_renumber_what_follows(name: str) -> None:
    """rajveer43/VeloxQuant-MLX#137: an interior third goes, 16 tokens follow."""
    loaded = wrapped(name)
    engine = engine_of(name, policy="full")
    (trail,) = follow(engine, [random_tokens(1, 64)], [[]])
    keep(engine, trail.sequence, every_head(loaded, [*range(21), *range(43, 64)]))
    trail.settle(trail.logits[63], None)
    for step, token in enumerate(random_tokens(2, 16)):
        feed((trail, [token]))
        assert int(engine.pool.positions(trail.sequence, loaded.traits.layers - 1, 0)[-1]) == 64 + step
    assert_masked(loaded, [trail])


@pytest.mark.parametrize("name", ["llama", "llama_bias_rope", "qwen3"])
def test_positions_beyond_the_trained_length_stay_true(name: str) -> None:
    """NVIDIA/kvpress#16: the prompt is longer than the model's positions, what is kept of it is shorter."""
    loaded = wrapped(name)
    assert loaded.traits.max_positions == 128
    (trail,) = follow(engine_of(name, budget="40t"), [random_tokens(1, 180)], [random_tokens(2, 9)])
    assert trail.events[0].entries_after == 40 * loaded.traits.layers * loaded.traits.kv_heads
    assert_masked(loaded, [trail])


@pytest.mark.parametrize(
    ("prefix", "suffix", "page", "chunk"), [(7, 5, 4, 3), (16, 16, 4, 5), (33, 9, 16, 42), (1, 30, 8, 7)]
)
def test_in_one_layer_a_kept_suffix_is_a_run_over_the_suffix_alone(
    prefix: int, suffix: int, page: int, chunk: int
) -> None:
    """awslabs/keys_values#140: RoPE is relative, so where a lone layer's sequence begins does not matter."""
    loaded, tokens = model_with("llama", layers=1), random_tokens(1, prefix + suffix)
    engine = engine_on(loaded, policy="full", page_size=page)
    evicted, alone = engine.open(), engine.open()
    for start in range(0, len(tokens), chunk):
        engine.encode([(evicted, tokens[start : start + chunk])])
    engine.encode([(alone, tokens[prefix:])])
    keep(engine, evicted, every_head(loaded, range(prefix, len(tokens))))
    ours, truth = engine.decode([(evicted, [9]), (alone, [9])])
    assert torch.allclose(ours, truth, rtol=0, atol=2e-5 * float(truth.abs().max()))


# State that outlives its request


@pytest.mark.parametrize("policy", ["bpkv", "h2o"])
def test_every_request_is_compacted_and_not_the_first_alone(policy: str) -> None:
    """Zefan-Cai/KVCache-Factory#15: three prompts in a row through one object."""
    options: dict[str, Any] = {"policy": policy, "budget": "0.4", "regime": "prefill"}
    generator = Generator(engine_of("llama", **options))
    for length in (50, 90, 50):
        request = generator.add([random_tokens(length, length)], SamplingParams(max_new_tokens=6))
        alone = Generator(engine_of("llama", **options))
        (truth,) = alone.generate([alone.add(request.turns, request.sampling)])
        generator.generate([request])
        assert request.generated == truth.generated
        for events in (request.events, truth.events):
            assert [(e.entries_before, e.entries_after) for e in events] == [(4 * length, 4 * int(0.4 * length))]


def test_rows_move_up_when_a_member_of_the_batch_finishes() -> None:
    """Zefan-Cai/R-KV#25 and #4, jundot/omlx#2172: lengths 20, 60, 40; the first ends, a new one takes its place."""
    loaded = wrapped("llama")
    for policy in ("bpkv", "h2o", "expected_attention"):
        engine = engine_of("llama", policy=policy, budget="0.4")
        first, second, third = follow(
            engine, [random_tokens(seed, length) for seed, length in enumerate((20, 60, 40))], [[5, 6, 7]] * 3
        )
        engine.close(first.sequence)
        (fourth,) = follow(engine, [random_tokens(9, 33)], [[]])
        for token in random_tokens(4, 30):
            feed((third, [token]), (second, [token]), (fourth, [token]))
        for trail in (first, second, third, fourth):
            assert trail.events[-1].entries_after < trail.events[-1].entries_before
            assert_masked(loaded, [trail])
        for trail in (second, third, fourth):
            engine.close(trail.sequence)
        assert engine.pool.live_pages == 0


def test_a_request_after_an_aborted_one_starts_at_position_0() -> None:
    """awslabs/keys_values#45: the one before was left in the middle of its answer."""
    engine = engine_of("llama", rows=80 + 16, caches=1, budget="0.4", lookahead=16, rehearsal=0)
    generator = Generator(engine)
    doomed = generator.add([random_tokens(1, 60)], SamplingParams(max_new_tokens=20))
    for _ in range(12):
        generator.step()
    generator.abort(doomed)
    engine.pool.check_integrity()
    assert engine.pool.free_pages == engine.pool.pages
    (trail,) = follow(engine, [random_tokens(2, 60)], [random_tokens(3, 10)])
    assert engine.pool.positions(trail.sequence, 0, 0)[0] == 0
    assert_masked(wrapped("llama"), [trail])


# Edges of the budget


@pytest.mark.parametrize(
    ("policy", "budget"),
    [(policy, "0.01") for policy in POLICIES]
    + [("bpkv", budget) for budget in ("0.5", f"{PROTECTED}t", "9999t", "1GiB", "1")],
)
def test_short_prompts_are_neither_emptied_nor_cut_in_silence(policy: str, budget: str) -> None:
    """NVIDIA/kvpress#264, #134: the whole prompt stays up to the protected tokens, one entry more goes if it may."""
    loaded = wrapped("llama")
    lengths = (1, 2, 3, SINKS, PROTECTED, PROTECTED + 1)
    prompts = [random_tokens(seed, length) for seed, length in enumerate(lengths)]
    trails = follow(engine_of("llama", caches=8, policy=policy, budget=budget), prompts, [[5, 6, 7] * 3] * len(prompts))
    for length, trail in zip(lengths, trails, strict=True):
        kept = PROTECTED if length > PROTECTED and budget in ("0.01", "0.5", f"{PROTECTED}t") else length
        prefill, *later = trail.events
        assert prefill.entries_before == 4 * length and prefill.entries_after == 4 * kept
        assert (prefill.note is None) == (kept < length and budget == f"{PROTECTED}t")
        assert [event.step for event in later] == [8]
        assert_masked(loaded, [trail])


@pytest.mark.parametrize("policy", POLICIES)
def test_a_budget_of_one_entry_keeps_one(policy: str) -> None:
    """The smallest protected set there can be; a budget of 0 is refused."""
    options: dict[str, Any] = {"sinks": 0, "recent": 1, "positions": 1, "generation_budget": "1t", "interval": 1}
    engine = engine_of("llama", policy=policy, budget="1t", scope="head", **options)
    for trail in follow(engine, [random_tokens(1, 1), random_tokens(2, 2), random_tokens(3, 30)], [[5, 6, 7]] * 3):
        prompt = min(len(trail.tokens) - 3, 1)
        assert (engine.pool.lengths(trail.sequence) == prompt + 1).all()
        assert_masked(wrapped("llama"), [trail])
    for nothing in ("0", "0%", "0t", "0MiB"):
        with pytest.raises(ConfigError, match="an empty cache"):
            BpkvConfig(budget=nothing)


@pytest.mark.parametrize("policy", POLICIES)
def test_attention_sinks_stay_unless_that_is_switched_off(policy: str) -> None:
    """awslabs/keys_values#140: only filler and the first token went, and every answer was lost."""
    loaded, new = model_with_a_sink(), random_tokens(4, 8)
    assert BpkvConfig().sinks > 0

    def log_p(policy: str, sinks: int) -> Tensor:
        options: dict[str, Any] = {"policy": policy, "sinks": sinks, "scope": "head", "regime": "prefill"}
        (trail,) = follow(engine_on(loaded, budget="0.5", **options), [[BOS, *random_tokens(1, 99)]], [new])
        assert_masked(loaded, [trail])
        return torch.stack([trail.logits[100 + step] for step in range(8)]).double().log_softmax(-1)

    full = log_p("full", 0)
    kl = {sinks: float((full.exp() * (full - log_p(policy, sinks))).sum(-1).mean()) for sinks in (0, 1, 4)}
    assert kl[1] < 1e-5 and kl[4] < 1e-5
    blind = policy in ("expected_attention", "streaming_llm", "random")  # to what the sink is attended to
    assert kl[0] > 0.05 if blind else kl[0] < 1e-5


@pytest.mark.slow
def test_attention_sinks_of_a_real_model() -> None:
    """The same on SmolLM2, for whatever its first four tokens are."""
    model, tokens = trained("smollm2"), prompt_tokens("smollm2", 100, 300)
    kl = {}
    for sinks in (0, 4):
        options: dict[str, Any] = {"policy": "streaming_llm", "sinks": sinks, "scope": "head", "regime": "prefill"}
        engine = engine_on(model, rows=320, caches=2, budget="0.8", page_size=16, **options)
        kl[sinks] = verify(engine, [tokens], frozenset(), max_new_tokens=10).future_kl_mean
    assert kl[0] > 5 * kl[4]


# Heads


def test_pages_hold_kv_heads_and_not_query_heads() -> None:
    """FasterDecoding/SnapKV#16: 8 query heads and 2 KV heads; bytes are those of kept entries, and the rest is free."""
    loaded = model_with("llama", layers=2, num_attention_heads=8, num_key_value_heads=2, hidden_size=64, head_dim=8)
    engine = engine_on(loaded, rows=64, caches=1, policy="snapkv", budget="0.5", regime="prefill", scope="head")
    (trail,) = follow(engine, [random_tokens(1, 64)], [[]])
    (event,) = trail.events
    assert event.bytes_before == 2 * (2 * 2 * 64) * 8 * 4 == engine.pool.pages * engine.pool.page_bytes
    assert event.bytes_after == 2 * event.entries_after * 8 * 4 == event.bytes_before // 2


def allocated_bytes() -> int:
    gc.collect()
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in gc.get_objects()
        if issubclass(type(each), Tensor)  # isinstance would wake lazy objects
    }
    return sum(storages.values())


@pytest.mark.parametrize("policy", ["bpkv", "random"])
def test_what_a_compaction_frees_admits_a_request_of_that_size(policy: str) -> None:
    """FMInference/H2O#12: half of every head goes; free pages rise by that number, and no memory is taken."""
    options = {"budget": "0.5", "regime": "prefill", "scope": "head", "lookahead": 0, "rehearsal": 0}
    engine = engine_of("llama", rows=80, caches=1, policy=policy, **options)
    sequence = engine.open()
    engine.encode([(sequence, random_tokens(1, 80))])
    before, pages = allocated_bytes(), engine.pool.pages
    assert engine.pool.free_pages == 0
    event = engine.compactor.on_context_step_end(sequence)
    assert event is not None and event.pages_freed == engine.pool.free_pages == pages // 2
    second = engine.open()
    engine.encode([(second, random_tokens(2, 40))])
    assert engine.pool.free_pages == 0 and allocated_bytes() <= before
    engine.pool.check_integrity()


@pytest.mark.parametrize(
    ("policy", "scope"), [(policy, "global") for policy in POLICIES] + [("bpkv", "head"), ("bpkv", "layer")]
)
def test_equal_scores_give_equal_kept_sets(policy: str, scope: str) -> None:
    """KV-Compress's README, "non-determinism": one token over and over under uniform attention, run twice."""
    loaded = model_with("llama", layers=2)
    for layer in loaded.model.model.layers:
        layer.self_attn.q_proj.weight.zero_()
    engines = [engine_on(loaded, policy=policy, scope=scope, budget="0.4") for _ in range(2)]
    first, second = (follow(engine, [[7] * 60, [9] * 33], [[7] * 20] * 2) for engine in engines)
    for ours, theirs in zip(first, second, strict=True):
        assert torch.equal(ours.hidden_from(), theirs.hidden_from())
        assert all(torch.equal(row, theirs.logits[at]) for at, row in ours.logits.items())
    assert np.array_equal(*(engine.pool.page_table(first[0].sequence) for engine in engines))


# Scores are of the model's own attention


@torch.no_grad()
@pytest.mark.parametrize("name", COMPACTABLE)
@pytest.mark.parametrize("budget", ["1.0", "0.4"])
def test_scored_attention_is_the_attention_of_the_forward(name: str, budget: str) -> None:
    """NVIDIA/kvpress#76, #275: QK norm, local and global RoPE, scale and softcap, before and after a compaction."""
    engine = engine_of(name, budget=budget, regime="prefill")
    (trail,) = follow(engine, [random_tokens(1, 50)], [random_tokens(2, SMALL["positions"])])
    statistics = engine.statistics.collect(trail.sequence, SMALL["positions"], engine.trace)
    view, traits = engine.pool.view(trail.sequence), engine.host.traits
    source, truth = EvidenceSource(statistics, view, traits), OwnPath(name, trail.tokens, trail.hidden_from()).whole
    for layer in traits.compactable_layers:
        for head in range(traits.kv_heads):
            held, group = source.attention(layer, head), slice(head * traits.group, (head + 1) * traits.group)
            own = truth.weights[layer][group, -SMALL["positions"] :][..., view.positions(layer, head).long()]
            assert torch.allclose(held.a, own, rtol=0, atol=1e-5)
            assert torch.allclose((held.a @ held.v).transpose(0, 1), held.c, rtol=1e-4, atol=1e-5)


# Prefill


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma3", "mistral_sliding"])
@pytest.mark.parametrize("chunk", [1, 7, 32])
def test_a_prompt_in_chunks_is_the_prompt_at_once(name: str, chunk: int) -> None:
    """raullenchai/Rapid-MLX#1107, ekryski/mlx-swift-lm#202: lengths that no block divides, past the window."""
    tokens, engine = random_tokens(1, 75), engine_of(name, policy="full")
    at_once, pieces = engine.open(), engine.open()
    truth = engine.encode([(at_once, tokens)])
    for start in range(0, len(tokens), chunk):
        logits = engine.encode([(pieces, tokens[start : start + chunk])])
    assert torch.allclose(logits, truth, rtol=0, atol=1e-5 * float(truth.abs().max()))


# Several questions, shared prefixes


def asked(engine: Engine, sequence: int, question: list[int]) -> Tensor:
    """[n, V] logits of a greedy answer, from a fork of the sequence."""
    copy_, rows = engine.host.fork(sequence), list[Tensor]()
    tokens = question
    for _ in range(6):
        rows.append(engine.host.forward([Chunk(copy_, tokens)])[0])
        tokens = [int(rows[-1].argmax())]
    engine.host.release(copy_)
    engine.pool.check_integrity()
    return torch.stack(rows)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_questions_on_one_compacted_cache_do_not_influence_one_another(name: str) -> None:
    """NVIDIA/kvpress#30: the second answer is the one it has when asked alone, and so in any order."""

    def answers(*questions: list[int]) -> list[Tensor]:
        engine = engine_of(name, budget="0.4", regime="prefill")
        (trail,) = follow(engine, [random_tokens(1, 60)], [[]])
        return [asked(engine, trail.sequence, question) for question in questions]

    first, second = random_tokens(2, 9), random_tokens(3, 4)
    (alone,) = answers(second)
    both, turned, twice = answers(first, second), answers(second, first), answers(second, second)
    assert all(torch.equal(alone, each) for each in (both[1], turned[0], *twice))
    assert torch.equal(both[0], turned[1]) and not torch.equal(both[0], alone)


@pytest.mark.parametrize("evict_in", ["original", "copy"])
def test_an_eviction_in_one_of_two_forks_leaves_the_other_as_it_was(evict_in: str) -> None:
    """ovg-project/kvcached#362, vllm-project/vllm-ascend#10296: the other's logits are unchanged to the bit."""

    def run(evict: bool) -> Tensor:
        engine = engine_of("llama", policy="full")
        (trail,) = follow(engine, [random_tokens(1, 3 * SMALL["page_size"])], [[]])
        pair = [trail.sequence, engine.host.fork(trail.sequence)]
        victim, other = pair if evict_in == "original" else pair[::-1]
        if evict:
            assert keep(engine, victim, every_head(wrapped("llama"), [0, 5, 11])) > 0
            (newcomer,) = follow(engine, [random_tokens(5, 30)], [[]])  # takes the pages that this freed
            engine.host.forward([Chunk(victim, [3]), Chunk(newcomer.sequence, [4])])
        rows = [engine.host.forward([Chunk(other, [token])]) for token in (5, 6, 7)]
        engine.pool.check_integrity()
        return torch.cat(rows)

    assert torch.equal(run(evict=True), run(evict=False))


# Specific to this method


def test_padding_rows_of_a_tied_head_are_never_judged() -> None:
    """The tokenizer knows 40 of 64 ids, and the others would win; more logits than ids are asked for."""
    loaded = model_with("llama", layers=2, tie_word_embeddings=True)
    assert loaded.traits.tied_head
    loaded.model.lm_head.weight[40:] *= 50
    loaded = replace(loaded, traits=replace(loaded.traits, vocabulary=40))
    engine = engine_on(loaded, budget="0.4", top_k=1000, regime="prefill")
    (trail,) = follow(engine, [random_tokens(1, 50)], [[]])
    assert int(trail.logits[49].argmax()) >= 40
    statistics = engine.statistics.collect(trail.sequence, SMALL["positions"], engine.trace)
    assert statistics.topk_ids.sort(-1).values.tolist() == [list(range(40))] * SMALL["positions"]
    assert trail.events[0].covered_mass == 1.0 and trail.events[0].entries_after == 4 * 20
    assert_masked(loaded, [trail])


@pytest.mark.parametrize("scope", ["head", "layer", "global"])
@pytest.mark.parametrize("epsilon", [0.5, 0.999])
def test_where_epsilon_rejects_the_candidates_it_is_relaxed_and_reported(scope: str, epsilon: float) -> None:
    """The budget stays exact; what was relaxed is in the event."""
    options: dict[str, Any] = {"budget": "0.3", "regime": "prefill", "scope": scope}
    strict, loose = (
        follow(engine_of("llama", epsilon=each, **options), [random_tokens(1, 50)], [[]])[0] for each in (epsilon, 1e-6)
    )
    assert strict.events[0].entries_after == loose.events[0].entries_after == 4 * 15
    assert strict.events[0].epsilon_relaxed > 0 == loose.events[0].epsilon_relaxed
    assert_masked(wrapped("llama"), [strict])


@pytest.mark.parametrize("refine", [0, 64])
def test_of_two_exact_duplicates_one_stays(refine: int) -> None:
    """Two equal rows hold nearly all of a head's attention. Each alone is among the cheapest; not both may go."""
    engine = engine_of("llama", budget="0.3", regime="prefill", scope="head", refine=refine)
    sequence = engine.open()
    engine.encode([(sequence, random_tokens(1, 50))])
    view, traits = engine.pool.view(sequence), engine.host.traits
    direction = engine.host.replay(sequence, SMALL["positions"]).q[1, :, : traits.group].mean((0, 1))
    view.keys(1, 0)[[10, 20]] = direction / direction.norm() * 16
    view.values(1, 0)[[10, 20]] = torch.full((traits.head_dim,), 3.0)
    statistics = engine.statistics.collect(sequence, SMALL["positions"], engine.trace)
    scores = score_entries(
        EvidenceSource(statistics, engine.pool.view(sequence), traits), statistics.readout.divergence
    )[1, 0]
    assert scores[10] == scores[20] < scores[SINKS:-RECENT].median() / 100
    event = engine.compactor.on_context_step_end(sequence)
    assert event is not None and event.rejected > 0 and event.entries_after == 4 * 15
    kept = engine.pool.positions(sequence, 1, 0).tolist()
    assert (10 in kept) != (20 in kept)


def test_a_flat_distribution_reports_the_little_mass_that_its_top_holds() -> None:
    """Of 64 nearly equal ids 4 hold a fifteenth; all of them hold all."""
    loaded = model_with("llama", layers=2, tie_word_embeddings=False)
    loaded.model.lm_head.weight.mul_(0.01)
    for top_k in (4, 64):
        engine = engine_on(loaded, budget="0.4", regime="prefill", top_k=top_k, lookahead=0)
        (trail,) = follow(engine, [random_tokens(1, 50)], [[]])
        reference = MaskedReference(copy.deepcopy(loaded.model), {})
        logits = reference.logits(trail.tokens, torch.full((2, 2, 50), 99))[-SMALL["positions"] :]
        held = torch.softmax(logits.double(), -1).topk(top_k).values.sum(-1).mean()
        assert trail.events[0].covered_mass == pytest.approx(float(held), abs=1e-6)
        assert float(held) < 1.2 * top_k / 64


def test_entries_that_move_only_what_the_top_does_not_hold_are_rare() -> None:
    """A trained model: beside the whole vocabulary of 479, the likeliest 32 rank entries nearly alike."""
    model, tokens, scores = trained("tiny-llama"), prompt_tokens("tiny-llama", 100, 256), {}
    for top_k in (32, model.traits.vocabulary):
        engine = engine_on(model, rows=300, caches=1, policy="bpkv", readout="direct", top_k=top_k)
        sequence = engine.open()
        engine.encode([(sequence, tokens)])
        statistics = engine.statistics.collect(sequence, SMALL["positions"], engine.trace)
        of_sequence = score_entries(
            EvidenceSource(statistics, engine.pool.view(sequence), model.traits), statistics.readout.divergence
        )
        scores[top_k] = of_sequence[..., SINKS:-RECENT].flatten()
    ours, truth = scores.values()
    assert float((ours < 0.1 * truth).float().mean()) < 0.01
    assert spearman(ours.tolist(), truth.tolist()) > 0.99
