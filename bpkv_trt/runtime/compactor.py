"""When to score, select and compact. Host-independent: the host supplies statistics, the pool applies the plan."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from bpkv_trt.config import BpkvConfig, Regime
from bpkv_trt.core.budget import Budget, ResolvedBudget, resolve
from bpkv_trt.core.quota import Quota, quotas
from bpkv_trt.core.selection import Selection
from bpkv_trt.core.traits import ModelTraits
from bpkv_trt.errors import ConfigError
from bpkv_trt.policies.base import Policy
from bpkv_trt.pool.plan import CompactionPlan
from bpkv_trt.pool.view import SequenceView
from bpkv_trt.profiling import Trace
from bpkv_trt.runtime.demand import Demand
from bpkv_trt.runtime.event import CompactionEvent
from bpkv_trt.runtime.interfaces import CompactablePool, StatisticsSource
from bpkv_trt.score_table import ScoreTable

KEEP_ALL = Budget.parse("1")
STAGES = ("readout", "score", "select", "compact")


@dataclass
class _Request:
    prompt_length: int = 0
    generated: int = 0
    drafting: float = 0.0  # seconds, at the end of the prompt
    reported: set[Regime] = field(default_factory=set)  # regimes that came due, whether or not anything was evicted


@dataclass(frozen=True)
class _Choice:
    """What a policy selected, and what it was told."""

    selection: Selection
    covered_mass: float
    drafted: int
    rehearsed: int


class Compactor:
    """Decides when a sequence is compacted and what goes; hooks named as in TensorRT-LLM's compression framework."""

    def __init__(
        self,
        config: BpkvConfig,
        policy: Policy,
        traits: ModelTraits,
        pool: CompactablePool,
        source: StatisticsSource,
        table: ScoreTable | None = None,
        trace: Trace | None = None,
    ) -> None:
        """Raises ConfigError where the policy needs what the host cannot supply."""
        missing = policy.requires - source.offers - {"score_table"}  # a table comes from the user
        if missing:
            raise ConfigError(
                f"The policy {policy.name} needs {', '.join(sorted(missing))}, which this host cannot supply "
                f"for {traits.architecture} models; choose another policy."
            )
        self.config, self.policy, self.traits, self.pool, self.source = config, policy, traits, pool, source
        self.table = table
        self.trace = trace or Trace()
        self.requests: dict[int, _Request] = {}

    def on_request_init(self, sequence: int) -> None:
        """A sequence was admitted; nothing of an earlier request is left to meet it."""
        self.requests[sequence] = _Request()

    def on_request_fork(self, sequence: int, copy: int) -> None:
        """A sequence was copied: the copy goes on from where it stands."""
        request = self.requests[sequence]
        self.requests[copy] = replace(request, reported=set(request.reported))

    def on_context_step_end(self, sequence: int) -> CompactionEvent | None:
        """The prompt, or a later turn of it, has been encoded; its entries are protected in the generation regime."""
        request = self.requests[sequence]
        request.prompt_length = self.pool.logical_length(sequence)
        self.source.prompt_ended(sequence)
        if "deferred" in self.config.regime and self.config.lookahead:
            self._draft_answer(sequence)
        if "prefill" not in self.config.regime or "prefill" in request.reported:
            return None
        return self._compact(sequence, self._prompt_demand(sequence, "prefill", self.config.positions))

    def _draft_answer(self, sequence: int) -> None:
        # For the compaction that comes later, if it will have something to evict.
        demand = self._prompt_demand(sequence, "deferred", self.config.positions)
        if self._reason_to_keep_all(demand, int(self._quota(demand.budget, demand.counted).evict.sum())) is None:
            before = self.trace.seconds()["readout"]
            self.source.draft_answer(sequence, self.config.lookahead, self.trace)
            self.requests[sequence].drafting += self.trace.seconds()["readout"] - before

    def on_generation_step_end(self, sequence: int) -> CompactionEvent | None:
        """One generated token has been run through the model, and its row is in the pool."""
        request = self.requests[sequence]
        request.generated += 1
        if "deferred" in self.config.regime and "deferred" not in request.reported:
            if request.generated < self.config.defer:
                return None
            return self._compact(sequence, self._prompt_demand(sequence, "deferred", self.config.scoring_positions))
        if "generation" in self.config.regime and request.generated % self.config.interval == 0:
            return self._compact(sequence, self._answer_demand(sequence))
        return None

    def tokens_until_due(self, sequence: int) -> int | None:
        """How many more decoded tokens it takes for the next compaction to come due; None where none will."""
        request = self.requests[sequence]
        if "deferred" in self.config.regime and "deferred" not in request.reported:
            return max(1, self.config.defer - request.generated)
        if "generation" in self.config.regime:
            return self.config.interval - request.generated % self.config.interval
        return None

    def scored_in_prompt(self, tokens: int) -> tuple[int, int]:
        """Of a prompt of so many tokens: how many of its last ones will be scoring positions, and of how many in all.

        For a host that scores positions as they pass, as `scored_next` is.
        """
        if "generation" in self.config.regime and len(self.config.regime) == 1:
            return 0, 0
        own = min(self.config.positions, tokens)
        return own, own + (self.config.defer if "deferred" in self.config.regime else 0)

    def scored_next(self, sequence: int) -> int:
        """Of how many scoring positions the next decoded token will be one; 0 where it will be none."""
        request, until = self.requests[sequence], self.tokens_until_due(sequence)
        if until is None:
            return 0
        if "deferred" in self.config.regime and "deferred" not in request.reported:
            return self.scored_in_prompt(request.prompt_length)[1]
        return self.config.positions if until <= self.config.positions else 0

    def on_request_finish(self, sequence: int) -> list[CompactionEvent]:
        """Forget the request; every regime that never came due is reported as such."""
        events = self.missed(sequence)
        del self.requests[sequence]
        return events

    def missed(self, sequence: int) -> list[CompactionEvent]:
        """If the request ended now: every regime that did not come due."""
        request = self.requests[sequence]
        missed = [regime for regime in self.config.regime if regime not in request.reported]
        due = {
            "prefill": "the end of its prompt",
            "deferred": f"the {self.config.defer} of defer",
            "generation": f"the {self.config.interval} of interval",
        }
        note = f"not compacted: the request ended after {request.generated} decoded tokens, before "
        return [self._unchanged(sequence, regime, note + due[regime]) for regime in missed]

    def check_budget(self, turns: Sequence[int]) -> None:
        """Raise ConfigError where the budget cannot be honoured for a prompt of turns of so many tokens.

        For a request that is yet to run: a budget in tokens or bytes below the protected entries is refused here and
        not in the middle of an answer. The regime generation leaves a prompt alone.
        """
        if self.config.regime == ("generation",):
            return
        compacted = turns[0] if "prefill" in self.config.regime else sum(turns) + self.config.defer
        self._resolve(self.config.budget, compacted, self.config.protected)

    def prompt_quota(self, tokens: int) -> Quota:
        """What the compaction of a prompt of so many tokens will ask of every unit, told before the prompt runs."""
        budget = self._resolve(self.config.budget, tokens, self.config.protected)
        return self._quota(budget, torch.full((self.traits.layers, self.traits.kv_heads), tokens))

    def size_of(self, sequence: int) -> tuple[int, int]:
        """Entries that the budget counts, and bytes of all the pages that the sequence owns."""
        lengths = self.pool.lengths(sequence)[list(self.traits.compactable_layers)]
        return int(lengths.sum()), self.pool.bytes_of(sequence)

    def _prompt_demand(self, sequence: int, regime: Regime, positions: int) -> Demand:
        budget = self._resolve(self.config.budget, self.pool.logical_length(sequence), self.config.protected)
        counted = torch.from_numpy(self.pool.lengths(sequence))
        positions = min(positions, budget.tokens)
        return Demand(
            regime, budget, counted, self.config.sinks, positions, self.config.lookahead, self.config.rehearsed
        )

    def _answer_demand(self, sequence: int) -> Demand:
        prompt = self.requests[sequence].prompt_length
        counted = (self.pool.view(sequence).position_table() >= prompt).sum(-1).cpu()
        longest = self.pool.logical_length(sequence) - prompt
        budget = self._resolve(self.config.generation_budget, longest, self.config.recent)
        return Demand("generation", budget, counted, prompt, self.config.positions)

    def _resolve(self, budget: Budget, tokens: int, protected: int) -> ResolvedBudget:
        return resolve(
            KEEP_ALL if self.policy.evicts_nothing else budget,
            tokens=tokens,
            layers=len(self.traits.compactable_layers),
            kv_heads=self.traits.kv_heads,
            head_dim=self.traits.head_dim,
            itemsize=self.pool.itemsize,
            protected=protected,
        )

    def _compact(self, sequence: int, demand: Demand) -> CompactionEvent:
        request = self.requests[sequence]
        request.reported.add(demand.regime)
        quota = self._quota(demand.budget, demand.counted)
        reason = self._reason_to_keep_all(demand, int(quota.evict.sum()))
        if reason is not None:
            return self._unchanged(sequence, demand.regime, reason, demand.budget.clamped)
        before, (entries, size) = self.trace.seconds(), self.size_of(sequence)
        chosen = self._choose(sequence, demand, quota)
        if isinstance(chosen, int):
            note = f"not compacted: {chosen} scores are NaN or Inf"
            return replace(self._unchanged(sequence, demand.regime, note), broken_scores=chosen)
        with self.trace.range("compact", payload=int(quota.evict.sum())):
            view = self.pool.view(sequence)
            plan = CompactionPlan.from_eviction(view, chosen.selection.evict[..., : view.lengths.max()])
            pages_freed = self.pool.apply(plan)
            self.source.compacted(sequence, plan)
        entries_after, size_after = self.size_of(sequence)
        return CompactionEvent(
            step=request.generated,
            regime=demand.regime,
            entries_before=entries,
            entries_after=entries_after,
            bytes_before=size,
            bytes_after=size_after,
            pages_freed=pages_freed,
            drafted=chosen.drafted,
            rehearsed=chosen.rehearsed,
            estimated_kl=chosen.selection.estimated_kl,
            estimated_kl_stage1=chosen.selection.estimated_kl_stage1,
            covered_mass=chosen.covered_mass,
            epsilon_relaxed=chosen.selection.epsilon_relaxed,
            rejected=chosen.selection.rejected,
            clamped=demand.budget.clamped,
            note=demand.budget.note,
            seconds=self._seconds_since(before, request.drafting if demand.regime == "deferred" else 0.0),
        )

    def _seconds_since(self, before: Mapping[str, float], drafting: float) -> dict[str, float]:
        seconds = {stage: self.trace.seconds()[stage] - before[stage] for stage in STAGES}
        return {**seconds, "readout": seconds["readout"] + drafting}

    def _quota(self, budget: ResolvedBudget, counted: Tensor) -> Quota:
        compactable = self.traits.compactable_layers
        weights = None if self.table is None else self.table.layer_weights
        shares = self.policy.layer_counts(budget, len(compactable))
        given = budget, self.config.scope, counted, compactable, weights, shares
        return quotas(*given, self.pool.device)

    def _choose(self, sequence: int, demand: Demand, quota: Quota) -> _Choice | int:
        """What goes, or how many scores are NaN or Inf. Drafted tokens are scoring positions, and never counted."""
        rehearsal = self.source.rehearse(sequence, demand.rehearsal, self.trace)
        with self.source.look_ahead(sequence, demand.lookahead, self.trace) as drafted:
            view = self.pool.view(sequence)
            statistics = self.source.collect(sequence, demand.positions + len(drafted), self.trace, drafted)
            statistics = replace(statistics, rehearsal=rehearsal)
            with self.trace.range("score", payload=int(demand.counted.sum())):
                scores = self._weighted(self.policy.score(statistics, view))
            eligible = self._eligible(view, demand.first, view.logical_length - len(drafted) - self.config.recent)
            broken = int((~torch.isfinite(scores[eligible])).sum())
            if broken:
                return broken
            with self.trace.range("select", payload=int(quota.evict.sum())):
                selection = self.policy.select(scores, eligible, quota, statistics, view)
        rehearsed = 0 if rehearsal is None else len(rehearsal.positions)
        return _Choice(selection, float(statistics.covered_mass.mean()), len(drafted), rehearsed)

    def _reason_to_keep_all(self, demand: Demand, evicted: int) -> str | None:
        if self.policy.evicts_nothing:
            return f"the policy {self.policy.name} evicts nothing"
        if not self.traits.compactable_layers:
            return "every layer of the model has a sliding window, and such entries stand outside the budget"
        return None if evicted else demand.budget.note or f"within the budget {demand.budget.requested}"

    def _weighted(self, scores: Tensor) -> Tensor:
        # Where layers or heads compete, a table cannot set their counts, so it weighs their scores; at most by 1, since
        # only ratios matter and a large score must stay finite.
        weights = None if self.table is None else self.table.score_weights(self.config.scope)
        if weights is None:
            return scores
        factors = torch.tensor(weights, dtype=scores.dtype, device=scores.device)[..., None]
        return torch.where(scores < 0, scores / factors, scores * factors)  # a small weight always lowers the rank

    def _eligible(self, view: SequenceView, first: int, end: int) -> Tensor:
        """[L, Hkv, T] bool: rows whose logical position is at least `first` and before `end`."""
        positions = view.position_table()
        eligible = (positions >= first) & (positions < end)
        for layer in self.traits.sliding_layers:
            eligible[layer] = False
        return eligible

    def _unchanged(self, sequence: int, regime: Regime, note: str, clamped: bool = False) -> CompactionEvent:
        entries, size = self.size_of(sequence)
        step = self.requests[sequence].generated
        return CompactionEvent(step, regime, entries, entries, size, size, clamped=clamped, note=note)
