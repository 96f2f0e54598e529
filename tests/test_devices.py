"""The torch host keeps to the device of its pool: on a make-believe accelerator it does what it does on the CPU.

Equal to the bit, estimates aside: of devices that PyTorch does not know it takes the gradient of SiLU in steps.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from bpkv_trt.config import BpkvConfig
from bpkv_trt.evaluation.cells import measure_sample
from bpkv_trt.evaluation.estimate import study
from bpkv_trt.evaluation.layer_sensitivity import layer_sensitivity
from bpkv_trt.evaluation.masks import masks_of, scattered
from bpkv_trt.evaluation.verify import verify
from bpkv_trt.models.loading import LoadedModel
from bpkv_trt.policies.registry import policy_class, policy_names, settled
from bpkv_trt.pool.view import SequenceView
from bpkv_trt.runtime.engine import Engine, make_pool
from bpkv_trt.runtime.event import CompactionEvent
from bpkv_trt.runtime.generator import Generator
from bpkv_trt.runtime.sampling import SamplingParams
from bpkv_trt.runtime.scratch import scratch_rows
from tests.accelerator import DEVICE, Accelerator, DeviceMix, accelerated, plain_attention
from tests.evaluation.small_comparison import comparison, tiny_llama
from tests.runtime.random_models import SMALL, random_tokens, wrapped

PROMPTS, ANSWER = (random_tokens(1, 40), random_tokens(2, 30)), random_tokens(3, 16)
OPTIONS: dict[str, Any] = {**SMALL, "positions": 3, "budget": "0.5", "generation_budget": "12t"}
WHOLE: dict[str, Any] = {"lookahead": 3, "rehearsal": 8, "refine": 4}  # all that bpkv has, in little
DISTINCT = ("llama_bias_rope", "qwen2_sliding", "qwen3", "gemma2", "gemma3", "cohere_qk_norm", "granite")
ESTIMATES = ("estimated_kl", "estimated_kl_stage1")

T = TypeVar("T")
Run = tuple[list[Tensor], list[CompactionEvent]]


def on_both(work: Callable[[LoadedModel], T], loaded: LoadedModel) -> tuple[T, T]:
    """What comes of the same work on the CPU and on the accelerator."""
    with plain_attention():
        here = work(loaded)
    with Accelerator():
        return here, work(accelerated(loaded))


def engine_for(loaded: LoadedModel, **options: Any) -> Engine:
    config = settled(BpkvConfig(**{**OPTIONS, **options}))
    scratch = scratch_rows(config, loaded.encoder, [max(map(len, PROMPTS))])
    pool = make_pool(loaded, 80, config.page_size, caches=4, scratch=scratch, kernels=False)
    return Engine(loaded, config, pool)


def compacting(**options: Any) -> Callable[[LoadedModel], Run]:
    """Two prompts packed, each followed by an answer: logits and kept positions, and what was compacted."""

    def work(loaded: LoadedModel) -> Run:
        engine = engine_for(loaded, **options)
        sequences = [engine.open() for _ in PROMPTS]
        tensors, events = [engine.encode(list(zip(sequences, PROMPTS, strict=True)))], list[CompactionEvent]()
        for sequence in sequences:
            event = engine.compactor.on_context_step_end(sequence)
            logits, later = engine.follow(sequence, ANSWER)
            events += [] if event is None else [event]
            events += later
            tensors += [logits, engine.pool.view(sequence).position_table()]
        assert all(tensor.device == engine.pool.device for tensor in tensors)
        return [tensor.cpu() for tensor in tensors], events

    return work


def assert_alike(work: Callable[[LoadedModel], Run], loaded: LoadedModel, compactions: bool = True) -> None:
    (tensors, events), (others, other_events) = on_both(work, loaded)
    assert all(torch.equal(*pair) for pair in zip(tensors, others, strict=True))
    assert all(map(alike, events, other_events)) and len(events) == len(other_events)
    assert any(event.entries_after < event.entries_before for event in events) == compactions


def alike(event: CompactionEvent, other: CompactionEvent) -> bool:
    def facts(of: CompactionEvent) -> CompactionEvent:
        return replace(of, seconds={}, **dict.fromkeys(ESTIMATES))

    estimates = [[getattr(of, name) or 0.0 for name in ESTIMATES] for of in (event, other)]
    return facts(event) == facts(other) and estimates[0] == pytest.approx(estimates[1], rel=1e-4)


def regimes_of(policy: str) -> list[tuple[str, ...]]:
    """Every regime that a policy can have, in as few runs as that takes."""
    offered = policy_class(policy).regimes
    runs = [("prefill", "generation"), ("deferred",)]
    return [own for run in runs if (own := tuple(regime for regime in run if regime in offered))]


@pytest.mark.parametrize(
    ("policy", "regime"), [(policy, regime) for policy in policy_names() for regime in regimes_of(policy)]
)
def test_policies(tmp_path: Path, policy: str, regime: tuple[str, ...]) -> None:
    needed, options = policy_class(policy).requires, {"policy": policy, "regime": regime}
    if "score_table" in needed:
        options["layer_table"] = table_of(tmp_path, [2.0, 1.0])
    loaded = tiny_llama() if "replay" in needed else wrapped("llama")
    work = compacting(**options, **(WHOLE if policy == "bpkv" else {}))
    assert_alike(work, loaded, compactions=not policy_class(policy).evicts_nothing)


@pytest.mark.parametrize(
    ("name", "readout"),
    [*((name, "exact") for name in DISTINCT), *((name, "direct") for name in ("qwen3", "gemma2", "cohere_qk_norm"))],
)
def test_architectures(name: str, readout: str) -> None:
    assert_alike(compacting(readout=readout, **WHOLE), wrapped(name))


@pytest.mark.parametrize(
    ("scope", "weights"), [("head", [2.0, 1.0]), ("layer", [[2.0, 1.0]] * 2), ("global", [[2.0, 1.0]] * 2)]
)
def test_layer_tables(tmp_path: Path, scope: str, weights: list[Any]) -> None:
    assert_alike(compacting(scope=scope, layer_table=table_of(tmp_path, weights), **WHOLE), wrapped("llama"))


def table_of(directory: Path, weights: Sequence[Any]) -> str:
    path = directory / "table.json"
    path.write_text(json.dumps({"weights": weights}))
    return str(path)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_generation(temperature: float) -> None:
    def work(loaded: LoadedModel) -> list[list[int]]:
        generator = Generator(engine_for(loaded, regime="deferred,generation", defer=2, **WHOLE))
        sampling = SamplingParams(8, temperature, seed=5)
        requests = [generator.add([prompt, ANSWER], sampling) for prompt in PROMPTS]
        return [request.generated for request in generator.generate(requests)]

    here, there = on_both(work, wrapped("qwen3"))
    assert here == there and all(len(tokens) == 8 for tokens in here)


def test_copies() -> None:
    """A compacted sequence is forked, and one of another engine adopted."""

    def work(loaded: LoadedModel) -> list[Tensor]:
        engine = engine_for(loaded, policy="inertiakv", regime="prefill,generation")
        sequence = engine.open()
        engine.encode([(sequence, PROMPTS[0])])
        other = Engine(loaded, engine.compactor.config, engine.pool)
        adopted = other.adopt(engine, sequence)
        other.compactor.on_context_step_end(adopted)
        copy = other.fork(adopted)
        return [other.follow(each, ANSWER)[0].cpu() for each in (adopted, copy)]

    here, there = on_both(work, wrapped("llama"))
    assert all(torch.equal(*pair) for pair in zip(here, there, strict=True))


def test_teacher_forcing() -> None:
    here, there = on_both(
        lambda loaded: verify(engine_for(loaded, **WHOLE), [PROMPTS[0], ANSWER], frozenset(), 6), wrapped("gemma2")
    )
    assert here == there and here.tokens > 0


def test_comparisons() -> None:
    contenders = "bpkv[rehearsal=16,lookahead=4,refine=4],h2o"
    asked = comparison(contenders, ("deferred",), "0.4", tokens=200, horizon=4, masks=1)

    def work(loaded: LoadedModel) -> dict[str, Any]:
        return measure_sample(loaded, asked, "passkey", 3)

    here, there = on_both(work, tiny_llama())
    assert here["full"] == there["full"] and len(here["masks"]) == len(there["masks"]) > 0
    for cell, other in zip(here["cells"], there["cells"], strict=True):
        assert measured(cell) == pytest.approx(measured(other), rel=1e-4, abs=1e-9)


def measured(cell: dict[str, Any]) -> dict[str, float]:
    names = ("future_kl_mean", "top1", "entries_after", "pages_freed", "estimated_kl", "one_step_kl")
    return {name: cell[name] or 0.0 for name in names}


def test_estimates() -> None:
    def work(loaded: LoadedModel) -> tuple[float, ...]:
        engines = {readout: engine_for(loaded, readout=readout) for readout in ("exact", "direct")}
        found = study(engines, PROMPTS[0], masks_of(scattered, loaded.traits, len(PROMPTS[0]), 2, seed=0, recent=12), 3)
        return tuple(found.truth) + tuple(value for values in found.estimates.values() for value in values)

    here, there = on_both(work, wrapped("llama"))
    assert here == pytest.approx(there, rel=1e-4)


def test_layer_sensitivity() -> None:
    here, there = on_both(lambda loaded: layer_sensitivity(loaded, [PROMPTS[0]], seed=1), wrapped("gemma3"))
    assert here == there


def test_a_press() -> None:
    pytest.importorskip("kvpress", exc_type=ImportError)
    from transformers import DynamicCache

    from bpkv_trt.integrations.kvpress import BpkvPress

    @torch.no_grad()
    def work(loaded: LoadedModel) -> list[Tensor]:
        cache, model = DynamicCache(), loaded.model
        model.set_attn_implementation("eager")
        tokens = torch.tensor([PROMPTS[0]], device=model.device)
        with BpkvPress(0.5, recent=12, positions=3, sinks=2, **WHOLE)(model):
            model.model(input_ids=tokens, past_key_values=cache)
        return [held.cpu() for layer in cache.layers for held in (layer.keys, layer.values)]

    here, there = on_both(work, wrapped("llama"))
    assert all(torch.equal(*pair) for pair in zip(here, there, strict=True))
    assert here[0].shape[2] == 20


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x + torch.ones(3),
        lambda x: torch.ones(3) + x[0],
        lambda x: torch.cat([x, torch.ones(3)]),
        lambda x: x.index_copy_(0, torch.tensor([0]), x[:1]),
        lambda x: torch.ones(3)[x > 0],
        lambda x: torch.ones(3).index_add_(0, torch.tensor([0]), x[:1]),
        lambda x: torch.ones(()).add_(x[0]),
        lambda x: x.masked_fill(torch.ones(3) > 0, 0.0),
        lambda x: torch.rand(3, generator=torch.Generator(), device=x.device),
    ],
)
def test_two_devices_do_not_mix(mix: Callable[[Tensor], Tensor]) -> None:
    with Accelerator(), pytest.raises(DeviceMix):
        mix(torch.ones(3, device=DEVICE))


def test_numpy_is_not_shown_an_accelerator() -> None:
    with Accelerator(), pytest.raises(RuntimeError):
        torch.ones(3, device=DEVICE).numpy()


def test_what_cuda_allows_is_allowed() -> None:
    with Accelerator():
        x = torch.arange(3.0, device=DEVICE)
        x[torch.tensor([0, 1])] = torch.tensor(5.0)
        x[2:] = torch.ones(1)
        assert (x * torch.tensor(2.0)).tolist() == [10, 10, 2]


def test_a_fault_of_the_host_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    table = SequenceView.position_table
    monkeypatch.setattr(SequenceView, "position_table", lambda view: table(view).cpu())
    with Accelerator(), pytest.raises(DeviceMix):
        compacting(policy="h2o")(accelerated(wrapped("llama")))
