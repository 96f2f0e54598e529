"""One batch of a TensorRT-LLM session: which tokens its runs score, and what is compacted between them."""

from collections.abc import Sequence
from dataclasses import replace

from bpkv_trt.config import BpkvConfig
from bpkv_trt.core.readout import BranchWeights
from bpkv_trt.core.traits import ModelTraits
from bpkv_trt.policies.registry import make_policy
from bpkv_trt.pool.block_pool import BlockPool
from bpkv_trt.profiling import Trace
from bpkv_trt.runtime.compactor import Compactor
from bpkv_trt.runtime.event import CompactionEvent
from bpkv_trt.runtime.scored_tokens import ScoredTokens
from bpkv_trt.runtime.session_statistics import Outputs, SessionStatistics


class SessionBatch:
    """From the managers' admission of B sequences to their end; sequences are in the batch's order throughout.

    `prompts`, then after every run of the engine and the managers' step `after_run` and `next_tokens`.
    """

    def __init__(
        self, config: BpkvConfig, traits: ModelTraits, pool: BlockPool, weights: BranchWeights, trace: Trace
    ) -> None:
        self.pool = pool
        self.sequences = pool.sequences
        self.statistics = SessionStatistics(traits, pool, weights)
        policy = make_policy(config, traits)
        self.compactor = Compactor(config, policy, traits, pool, self.statistics, trace=trace)
        self.events: list[list[CompactionEvent]] = [[] for _ in self.sequences]
        self._scored = ScoredTokens((), (0,) * len(self.sequences), ())
        self._prompts = [0] * len(self.sequences)
        self._bytes = [0] * len(self.sequences)
        for sequence in self.sequences:
            self.compactor.on_request_init(sequence)

    def prompts(self, lengths: Sequence[int]) -> ScoredTokens:
        """What the first run scores, of prompts of so many tokens. ConfigError for one that the budget cannot hold."""
        for length in lengths:
            self.compactor.check_budget([length])
        self._prompts = list(lengths)
        self._bytes = [self.pool.bytes_of(sequence) for sequence in self.sequences]
        self._scored = ScoredTokens.last_of(lengths, [self.compactor.scored_in_prompt(length) for length in lengths])
        return self._scored

    def after_run(self, rows: Sequence[int], going_on: Sequence[bool], outputs: Outputs) -> None:
        """The engine has run, so that every sequence holds so many rows; those that go on are compacted when due."""
        first = not any(self.pool.logical_length(sequence) for sequence in self.sequences)
        grown = [count - held for count, held in zip(rows, self.rows, strict=True)]
        for index, sequence in enumerate(self.sequences):
            self.pool.extend(sequence, grown[index])  # one that has ended writes its last row again
            self.pool.trim(sequence)
            if grown[index] and self._scored.counts[index]:
                self.statistics.note(sequence, outputs, index, self._scored.span(index))
        hook = self.compactor.on_context_step_end if first else self.compactor.on_generation_step_end
        for index, sequence in enumerate(self.sequences):
            event = hook(sequence) if going_on[index] and grown[index] else None
            if event is not None:
                self.statistics.forget(sequence)
                self.events[index].append(event)
            self._bytes[index] = self.pool.bytes_of(sequence)

    def next_tokens(self) -> ScoredTokens:
        """What the next run scores: its token of every sequence, or none."""
        totals = [self.compactor.scored_next(sequence) for sequence in self.sequences]
        self._scored = ScoredTokens.last_of([1] * len(totals), [(min(total, 1), total) for total in totals])
        return self._scored

    def ended(self, index: int) -> list[CompactionEvent]:
        """If a sequence's answer ended now, though its batch goes on: what was compacted, and what never came due."""
        sequence, size = self.sequences[index], self._bytes[index]
        missed = [replace(each, bytes_before=size, bytes_after=size) for each in self.compactor.missed(sequence)]
        if not self.pool.logical_length(sequence):
            missed = [self._one_step(index, event) for event in missed]
        return self.events[index] + missed

    def finish(self) -> list[list[CompactionEvent]]:
        """The batch has ended, and its blocks may have been freed: what was compacted, and what never came due."""
        self.events = [self.ended(index) for index in range(len(self.sequences))]
        for sequence in self.sequences:
            self.compactor.on_request_finish(sequence)
        return self.events

    def _one_step(self, index: int, event: CompactionEvent) -> CompactionEvent:
        # The stock session prepares nothing after its last step, so that nobody told of what the first one wrote.
        entries = self._prompts[index] * self.pool.layers * self.pool.kv_heads
        note = "not compacted: the answer has one token, and after the last one the session prepares no step"
        return replace(event, entries_before=entries, entries_after=entries, note=note)

    @property
    def rows(self) -> list[int]:
        """[B] rows that each sequence holds, the same in every layer and head."""
        return [int(self.pool.lengths(sequence).flat[0]) for sequence in self.sequences]

    @property
    def evicted(self) -> list[int]:
        """[B] tokens that each sequence has seen and holds no row of."""
        return [
            self.pool.logical_length(sequence) - held for sequence, held in zip(self.sequences, self.rows, strict=True)
        ]
