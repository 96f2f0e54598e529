"""Drive sequences through an engine with given tokens, and remember what a masked reference needs to repeat it."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

import torch
from torch import Tensor

from bpkv_trt.models.loading import LoadedModel
from bpkv_trt.pool.plan import CompactionPlan
from bpkv_trt.runtime.engine import Engine
from bpkv_trt.runtime.event import CompactionEvent
from tests.runtime.masked_reference import NEVER, MaskedReference, in_float64

ROUNDING = 5.0  # times the error of another way to round the same; 0.6 to 2.3 was measured


@dataclass
class Trail:
    """One sequence: the tokens fed, the logits after each feed, and from which query on each entry was gone."""

    engine: Engine
    sequence: int
    tokens: list[int] = field(default_factory=list)
    logits: dict[int, Tensor] = field(default_factory=dict)  # by index of the last token fed, [V]
    evicted_at: list[tuple[int, Tensor]] = field(default_factory=list)  # (first query without them, [L, Hkv, N] bool)
    events: list[CompactionEvent] = field(default_factory=list)

    def settle(self, logits: Tensor, event: CompactionEvent | None) -> None:
        self.logits[len(self.tokens) - 1] = logits
        if event is not None:
            self.events.append(event)
        view = self.engine.pool.view(self.sequence)
        gone = torch.ones(*view.lengths.shape, len(self.tokens), dtype=torch.bool)
        for layer in range(gone.shape[0]):
            for head in range(gone.shape[1]):
                gone[layer, head, view.positions(layer, head).long().cpu()] = False
        gone[sorted(self.engine.host.traits.sliding_layers)] = False  # the window hides these by itself
        self.evicted_at.append((len(self.tokens), gone))
        self.engine.pool.check_integrity()

    def hidden_from(self) -> Tensor:
        """[L, Hkv, N] int64."""
        layers, heads, _ = self.evicted_at[-1][1].shape
        hidden = torch.full((layers, heads, len(self.tokens)), NEVER)
        for index, gone in reversed(self.evicted_at):
            hidden[:, :, : gone.shape[2]][gone] = index
        return hidden


def follow(engine: Engine, prompts: Sequence[Sequence[int]], continuations: Sequence[Sequence[int]]) -> list[Trail]:
    """Encode all prompts as one packed batch, then feed the continuations a token a step, packed while they last."""
    trails = [Trail(engine, engine.open()) for _ in prompts]
    logits = engine.encode([(trail.sequence, prompt) for trail, prompt in zip(trails, prompts, strict=True)])
    for trail, prompt, row in zip(trails, prompts, logits, strict=True):
        trail.tokens += prompt
        trail.settle(row, engine.compactor.on_context_step_end(trail.sequence))
    for step in range(max(map(len, continuations))):
        feed(*((trail, [new[step]]) for trail, new in zip(trails, continuations, strict=True) if step < len(new)))
    return trails


def feed(*turns: tuple[Trail, list[int]]) -> None:
    """The next tokens of several sequences, packed."""
    engine = turns[0][0].engine
    logits = engine.decode([(trail.sequence, tokens) for trail, tokens in turns])
    for (trail, tokens), row in zip(turns, logits, strict=True):
        trail.tokens += tokens
        trail.settle(row, engine.compactor.on_generation_step_end(trail.sequence))


def keep(engine: Engine, sequence: int, kept: dict[tuple[int, int], Sequence[int]]) -> int:
    """Evict all but `kept` rows of the named (layer, KV head); returns the pages freed."""
    view = engine.pool.view(sequence)
    evict = torch.zeros(*view.lengths.shape, int(view.lengths.max()), dtype=torch.bool)
    for (layer, head), rows in kept.items():
        evict[layer, head] = True
        evict[layer, head, list(rows)] = False
    plan = CompactionPlan.from_eviction(view, evict)
    engine.statistics.compacted(sequence, plan)
    return engine.pool.apply(plan)


def assert_masked(loaded: LoadedModel, trails: list[Trail]) -> None:
    """All logits are those of the full cache with what each trail lost hidden from then on (L2).

    Up to rounding: they are about as far from the truth, which is in float64, as transformers' own attention is that
    hides the same in the model's type. So the bound knows the type, and how much the model amplifies.
    """
    traits = loaded.traits
    sliding = dict.fromkeys(traits.sliding_layers, traits.sliding_window or 0)
    rounded, exact = (MaskedReference(make(loaded.model), sliding) for make in (copy.deepcopy, in_float64))
    ours: list[float] = []  # squared errors
    theirs: list[float] = []
    for trail in trails:
        hidden = trail.hidden_from()
        truth = exact.logits(trail.tokens, hidden)
        ours += [float((logits - truth[index]).square_().mean()) for index, logits in trail.logits.items()]
        errors = rounded.logits(trail.tokens, hidden).double().sub_(truth).square_()
        theirs += errors.mean(-1).tolist()  # at every position: some amplify far more than others
    assert (fmean(ours) / fmean(theirs)) ** 0.5 < ROUNDING
