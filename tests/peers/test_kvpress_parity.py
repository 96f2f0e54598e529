"""Our peers keep the entries that kvpress's own presses keep: same model, same tokens, same counts, float32.

Disagreement is allowed at ties alone: entries whose score in the press is within 1e-6, relatively, of its boundary.
What had to be made equal: our recent window is protected in the press too; ExpectedAttentionPress gets the epsilon of
kvpress's evaluations; H2O's sum stands where ObservedAttentionPress has a mean (`observed_attention` is held to that
press as it is). CriticalKVPress does not protect the window where that exceeds half of the budget (ratio 0.9 here), and
takes its first half from the ratio, in floating point, where ours is half of the count; neither shows in these cases.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from bpkv_trt.config import BpkvConfig
from bpkv_trt.models.loading import LoadedModel, load_model
from bpkv_trt.runtime.engine import Engine, make_pool
from build_scripts.recall_text import recall_prompt

kvpress = pytest.importorskip(
    "kvpress", reason="pip install 'bpkv-trt[kvpress]' (Python below 3.13)", exc_type=ImportError
)

TINY = str(Path(__file__).parents[1] / "assets" / "tiny-llama")
WINDOW = 16
TIE = 1e-6


@cache
def ours(name: str) -> LoadedModel:
    return load_model(name)


@cache
def theirs(name: str) -> PreTrainedModel:
    """The same weights in a model of its own, which no host has touched."""
    loaded = ours(name)
    model = AutoModelForCausalLM.from_config(loaded.model.config, dtype=torch.float32)
    model.load_state_dict(loaded.model.state_dict())
    return model.eval()


@cache
def prompt_tokens(name: str, seed: int, tokens: int) -> tuple[int, ...]:
    return tuple(ours(name).encoder.encode_raw(recall_prompt(seed, tokens)[0]))


@dataclass(frozen=True)
class Pair:
    """A press and our policy with the settings under which both protect the same rows."""

    policy: str
    press: Callable[[float], Any]
    options: dict[str, int] = field(default_factory=dict)
    eager: bool = False

    @property
    def config(self) -> dict[str, Any]:
        return {"policy": self.policy, "scope": "head", "regime": "prefill", "sinks": 0, **self.options}


@dataclass(frozen=True)
class Kept:
    """What a press did: the rows it kept, by its own cache, and the scores it went by."""

    rows: Tensor  # [L, Hkv, T] bool
    scores: Tensor  # [L, Hkv, T]


def press_keeps(name: str, press: Any, tokens: tuple[int, ...], recent: int, eager: bool) -> Kept:
    """Run a press whose last `recent` rows rank above all others, as our recent window does."""
    model = theirs(name)
    model.set_attn_implementation("eager" if eager else "sdpa")
    scores: dict[int, Tensor] = {}
    score = press.score

    def watched(module: Any, *arguments: Any) -> Tensor:
        own = score(module, *arguments)
        own[..., -recent:] = own.max() + 1
        scores[module.layer_idx] = own[0]
        return own

    press.score = watched
    full, cut = DynamicCache(), DynamicCache()
    with torch.no_grad():
        model(input_ids=torch.tensor([tokens]), past_key_values=full)
        with press(model):
            model(input_ids=torch.tensor([tokens]), past_key_values=cut)
    rows = [found(before.keys[0], after.keys[0]) for before, after in zip(full.layers, cut.layers, strict=True)]
    return Kept(torch.stack(rows), torch.stack([scores[layer] for layer in range(len(scores))]))


def found(full: Tensor, cut: Tensor) -> Tensor:
    """[H, T] bool: the rows of full [H, T, D] that cut [H, n, D] holds, recognised by their keys."""
    same = (full[:, :, None] == cut[:, None]).all(-1)  # [H, T, n]
    assert bool((same.sum(1) == 1).all()), "every kept key is one of the full cache's"
    return same.any(-1)


def policy_keeps(name: str, config: dict[str, Any], budget: int, tokens: tuple[int, ...]) -> Tensor:
    """[L, Hkv, T] bool rows that our engine keeps."""
    loaded = ours(name)
    engine = Engine(loaded, BpkvConfig(**config, budget=f"{budget}t"), make_pool(loaded, len(tokens), 8, poison=True))
    sequence = engine.open()
    engine.encode([(sequence, tokens)])
    event = engine.compactor.on_context_step_end(sequence)
    assert event is not None and event.entries_after < event.entries_before
    kept = torch.zeros(loaded.traits.layers, loaded.traits.kv_heads, len(tokens), dtype=torch.bool)
    for layer in range(loaded.traits.layers):
        for head in range(loaded.traits.kv_heads):
            kept[layer, head, engine.pool.positions(sequence, layer, head).long()] = True
    engine.close(sequence)
    return kept


def beyond_ties(press: Kept, policy: Tensor) -> tuple[int, int]:
    """Rows kept by one side only: how many of them are ties at the press's boundary, and how many are not."""
    boundary = press.scores.masked_fill(~press.rows, torch.inf).amin(-1, keepdim=True)  # [L, Hkv, 1]
    differ = press.rows != policy
    tied = ((press.scores - boundary).abs() <= TIE * boundary.abs()) & differ
    return int(tied.sum()), int((differ & ~tied).sum())


class H2oPress(kvpress.ObservedAttentionPress):  # type: ignore[name-defined,misc]
    """H2O's sum where ObservedAttentionPress has the mean over the queries that could see an entry."""

    def score(self, *arguments: Any) -> Tensor:
        scores = super().score(*arguments)
        return scores * torch.arange(scores.shape[-1], 0, -1)


def snapkv(ratio: float) -> Any:
    return kvpress.SnapKVPress(ratio, window_size=WINDOW)


WINDOWED = {"recent": WINDOW, "positions": WINDOW}
SNAPKV = Pair("snapkv", snapkv, WINDOWED)
PYRAMID = Pair(
    "pyramidkv", lambda ratio: kvpress.PyramidKVPress(ratio, window_size=2), {"recent": 2, "positions": 2}
)  # a window short enough for a pyramid at every ratio
PAIRS = [
    Pair("streaming_llm", kvpress.StreamingLLMPress, {"sinks": 4, "recent": 1, "positions": 1}),
    SNAPKV,
    Pair("tova", kvpress.TOVAPress, {"recent": 1, "positions": 1}),
    Pair("h2o", H2oPress, {"recent": WINDOW, "positions": 1}, eager=True),
    Pair("observed_attention", kvpress.ObservedAttentionPress, {"recent": WINDOW, "positions": 1}, eager=True),
    Pair(
        "expected_attention",
        lambda ratio: kvpress.ExpectedAttentionPress(ratio, epsilon=0.01),
        {"sinks": 4, "recent": 1, "positions": 1},
    ),
    Pair("pyramidkv", lambda ratio: kvpress.PyramidKVPress(ratio, window_size=WINDOW), WINDOWED),
    PYRAMID,
    Pair("criticalkv", lambda ratio: kvpress.CriticalKVPress(snapkv(ratio)), WINDOWED),
]


def compared(name: str, pair: Pair, ratio: float, tokens: tuple[int, ...]) -> tuple[int, int]:
    """Rows that one side alone keeps, ties and others, of a prompt that both compress to the same counts."""
    press = press_keeps(name, pair.press(ratio), tokens, pair.options["recent"], pair.eager)
    layers, heads, _ = press.rows.shape
    policy = policy_keeps(name, pair.config, int(press.rows.sum()) // (layers * heads), tokens)
    assert torch.equal(policy.sum(-1), press.rows.sum(-1)), "counts differ, so nothing is compared"
    return beyond_ties(press, policy)


def same(outcome: tuple[int, int]) -> bool:
    """Whether both sides keep the same rows but for a tie or two."""
    tied, other = outcome
    return other == 0 and tied <= 4


# Lengths at which PyramidKVPress's rounding, layer by layer, adds up to the budget that our counts meet exactly.
@pytest.mark.parametrize(("seed", "length"), [(1, 280), (2, 490)])
@pytest.mark.parametrize("ratio", [0.5, 0.8, 0.9])
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.policy)
def test_the_same_entries_stay(pair: Pair, ratio: float, seed: int, length: int) -> None:
    assert same(compared(TINY, pair, ratio, prompt_tokens(TINY, seed, 500)[:length]))


@pytest.mark.slow
@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.policy)
def test_the_same_entries_of_a_real_model_stay(pair: Pair) -> None:
    assert same(compared("smollm2", pair, 0.8, prompt_tokens("smollm2", 3, 300)))


def test_layers_of_the_pyramid_differ() -> None:
    press = press_keeps(TINY, PYRAMID.press(0.8), prompt_tokens(TINY, 1, 500)[:280], 2, eager=False)
    assert len(set(press.rows.sum(-1).flatten().tolist())) == press.rows.shape[0]


@pytest.mark.parametrize(
    "changes",
    [{"policy": "random"}, {"policy": "tova"}, {"recent": WINDOW + 1, "positions": WINDOW + 1}],
    ids=str,
)
def test_another_policy_or_window_is_told_apart(changes: dict[str, Any]) -> None:
    tokens = prompt_tokens(TINY, 1, 500)[:280]
    press = press_keeps(TINY, snapkv(0.8), tokens, WINDOW, eager=False)
    other = policy_keeps(TINY, {**SNAPKV.config, **changes}, int(press.rows[0, 0].sum()), tokens)
    assert not same(beyond_ties(press, other))
