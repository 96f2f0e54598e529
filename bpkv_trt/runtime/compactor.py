"""When to score, select and compact. Host-independent: the host supplies statistics, the pool applies the plan."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from bpkv_trt.config import BpkvConfig, Regime
from bpkv_trt.core.budget import Budget, ResolvedBudget, resolve
from bpkv_trt.core.quota import quotas
from bpkv_trt.core.statistics import ForwardStatistics
from bpkv_trt.core.traits import ModelTraits
from bpkv_trt.errors import ConfigError
from bpkv_trt.policies.base import Policy, Requirement
from bpkv_trt.pool.plan import CompactionPlan
from bpkv_trt.pool.pool import PagedKvPool
from bpkv_trt.pool.view import SequenceView
from bpkv_trt.profiling import Trace

STAGES = ("readout", "score", "select", "compact")


class StatisticsSource(Protocol):
    """The host's side: what it can tell about a sequence, and what it must move when entries go."""

    @property
    def offers(self) -> frozenset[Requirement]:
        """What `Policy.requires` may ask of this host."""

    def collect(self, sequence: int, positions: int, trace: Trace) -> ForwardStatistics:
        """Statistics at the last `positions` logical positions, with what the policy requires."""

    def compacted(self, sequence: int, plan: CompactionPlan) -> None:
        """The plan was applied: move all state that belongs to entries."""


@dataclass(frozen=True)
class CompactionEvent:
    """One compaction, or one that did not happen and why (`note`)."""

    step: int  # generated tokens so far
    regime: Regime
    entries_before: int
    entries_after: int
    bytes_before: int
    bytes_after: int
    pages_freed: int = 0
    estimated_kl: float | None = None
    estimated_kl_stage1: float | None = None
    covered_mass: float | None = None
    epsilon_relaxed: int = 0
    rejected: int = 0
    clamped: bool = False
    note: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class _Request:
    prompt_length: int = 0
    generated: int = 0
    prompt_settled: bool = False  # the prompt's one compaction has happened, or been found unnecessary


class Compactor:
    """Decides when a sequence is compacted and what goes; hooks named as in TensorRT-LLM's compression framework."""

    def __init__(
        self,
        config: BpkvConfig,
        policy: Policy,
        traits: ModelTraits,
        pool: PagedKvPool,
        source: StatisticsSource,
        layer_weights: Sequence[float] | None = None,
        trace: Trace | None = None,
    ) -> None:
        """Raises ConfigError where the policy needs what the host cannot supply."""
        missing = policy.requires - source.offers
        if missing:
            raise ConfigError(
                f"The policy {policy.name} needs {', '.join(sorted(missing))}, which this host cannot supply "
                f"for {traits.architecture} models; choose another policy."
            )
        self.config, self.policy, self.traits, self.pool, self.source = config, policy, traits, pool, source
        self.layer_weights = layer_weights
        self.trace = trace or Trace()
        self.requests: dict[int, _Request] = {}

    def on_request_init(self, sequence: int) -> None:
        """A sequence was admitted; nothing of an earlier request is left to meet it."""
        self.requests[sequence] = _Request()

    def on_context_step_end(self, sequence: int) -> CompactionEvent | None:
        """The prompt, or a later turn of it, has been encoded; its entries are protected in the generation regime."""
        request = self.requests[sequence]
        request.prompt_length = self.pool.logical_length(sequence)
        if "prefill" not in self.config.regime or request.prompt_settled:
            return None
        return self._compact_prompt(sequence, request, "prefill", self.config.positions)

    def on_generation_step_end(self, sequence: int) -> CompactionEvent | None:
        """One generated token has been run through the model, and its row is in the pool."""
        request = self.requests[sequence]
        request.generated += 1
        if "deferred" in self.config.regime and not request.prompt_settled:
            if request.generated < self.config.defer:
                return None
            return self._compact_prompt(sequence, request, "deferred", self.config.scoring_positions)
        if "generation" in self.config.regime and request.generated % self.config.interval == 0:
            return self._compact_generated(sequence, request)
        return None

    def on_request_finish(self, sequence: int) -> CompactionEvent | None:
        """Forget the request; a deferred compaction that never came due is reported."""
        request = self.requests.pop(sequence)
        if "deferred" not in self.config.regime or request.prompt_settled or self.policy.evicts_nothing:
            return None
        note = (
            f"not compacted: the answer ended after {request.generated} tokens, before the {self.config.defer} of defer"
        )
        return self._unchanged(sequence, request, "deferred", note)

    def resolve_prompt(self, tokens: int) -> ResolvedBudget:
        """What the budget means for a prompt of so many tokens; raises ConfigError where it cannot be honoured."""
        return self._resolve(self.config.budget, tokens, self.config.protected)

    def size_of(self, sequence: int) -> tuple[int, int]:
        """Entries that the budget counts, and bytes of all the pages that the sequence owns."""
        lengths = self.pool.lengths(sequence)[list(self.traits.compactable_layers)]
        return int(lengths.sum()), self.pool.bytes_of(sequence)

    def _compact_prompt(self, sequence: int, request: _Request, regime: Regime, positions: int) -> CompactionEvent:
        request.prompt_settled = True
        resolved = self.resolve_prompt(self.pool.logical_length(sequence))
        lengths = torch.from_numpy(self.pool.lengths(sequence))
        return self._compact(sequence, request, regime, resolved, lengths, first=self.config.sinks, positions=positions)

    def _compact_generated(self, sequence: int, request: _Request) -> CompactionEvent:
        generated = (self.pool.view(sequence).position_table() >= request.prompt_length).sum(-1)
        longest = self.pool.logical_length(sequence) - request.prompt_length
        resolved = self._resolve(self.config.generation_budget, longest, self.config.recent)
        return self._compact(
            sequence, request, "generation", resolved, generated, request.prompt_length, self.config.positions
        )

    def _resolve(self, budget: Budget, tokens: int, protected: int) -> ResolvedBudget:
        return resolve(
            budget,
            tokens=tokens,
            layers=len(self.traits.compactable_layers),
            kv_heads=self.traits.kv_heads,
            head_dim=self.traits.head_dim,
            itemsize=self.pool.keys.element_size(),
            protected=protected,
        )

    def _compact(
        self,
        sequence: int,
        request: _Request,
        regime: Regime,
        resolved: ResolvedBudget,
        counted: Tensor,
        first: int,
        positions: int,
    ) -> CompactionEvent:
        """Bring the `counted` [L, Hkv] rows down to the budget; positions from `first` to the recent window may go."""
        if self.policy.evicts_nothing:
            return self._unchanged(sequence, request, regime, f"the policy {self.policy.name} evicts nothing")
        if not self.traits.compactable_layers:
            note = "every layer of the model has a sliding window, and such entries stand outside the budget"
            return self._unchanged(sequence, request, regime, note)
        counted = counted.to(self.pool.keys.device)
        quota = quotas(resolved, self.config.scope, counted, self.traits.compactable_layers, self.layer_weights)
        if int(quota.evict.sum()) == 0:
            return self._unchanged(
                sequence, request, regime, resolved.note or f"within the budget {resolved.requested}"
            )
        before, size = self.trace.seconds(), self.size_of(sequence)
        positions = min(positions, self.pool.logical_length(sequence))
        view = self.pool.view(sequence)
        statistics = self.source.collect(sequence, positions, self.trace)
        with self.trace.range("score", payload=int(counted.sum())):
            scores = self._weighted(self.policy.score(statistics, view))
        eligible = self._eligible(view, first)
        if not bool(torch.isfinite(scores[eligible]).all()):
            broken = int((~torch.isfinite(scores[eligible])).sum())
            return self._unchanged(sequence, request, regime, f"not compacted: {broken} scores are NaN or Inf")
        with self.trace.range("select", payload=int(quota.evict.sum())):
            selection = self.policy.select(scores, eligible, quota, statistics, view)
        with self.trace.range("compact", payload=int(quota.evict.sum())):
            plan = CompactionPlan.from_eviction(view, selection.evict)
            result = self.pool.apply(plan)
            self.source.compacted(sequence, plan)
        entries_before, bytes_before = size
        entries_after, bytes_after = self.size_of(sequence)
        return CompactionEvent(
            step=request.generated,
            regime=regime,
            entries_before=entries_before,
            entries_after=entries_after,
            bytes_before=bytes_before,
            bytes_after=bytes_after,
            pages_freed=result.pages_freed,
            estimated_kl=selection.estimated_kl,
            estimated_kl_stage1=selection.estimated_kl_stage1,
            covered_mass=float(statistics.covered_mass.mean()),
            epsilon_relaxed=selection.epsilon_relaxed,
            rejected=selection.rejected,
            clamped=resolved.clamped,
            note=resolved.note,
            seconds={
                stage: seconds - before[stage] for stage, seconds in self.trace.seconds().items() if stage in STAGES
            },
        )

    def _weighted(self, scores: Tensor) -> Tensor:
        # Where all layers compete, a layer table cannot set counts, so it weighs the scores.
        if self.layer_weights is None or self.config.scope != "global":
            return scores
        return scores * torch.tensor(self.layer_weights, dtype=scores.dtype, device=scores.device)[:, None, None]

    def _eligible(self, view: SequenceView, first: int) -> Tensor:
        """[L, Hkv, T] bool: rows whose logical position is at least `first` and before the recent window."""
        positions = view.position_table()
        eligible = (positions >= first) & (positions < view.logical_length - self.config.recent)
        for layer in self.traits.sliding_layers:
            eligible[layer] = False
        return eligible.to(self.pool.keys.device)

    def _unchanged(self, sequence: int, request: _Request, regime: Regime, note: str) -> CompactionEvent:
        entries, size = self.size_of(sequence)
        return CompactionEvent(request.generated, regime, entries, entries, size, size, note=note)
