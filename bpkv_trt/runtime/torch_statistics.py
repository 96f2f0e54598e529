"""Forward statistics of a model on the torch host."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from bpkv_trt.config import BpkvConfig
from bpkv_trt.core.divergence import position_weights
from bpkv_trt.core.readout import DirectReadout
from bpkv_trt.core.rehearsal import Rehearsal
from bpkv_trt.core.running_attention import RunningAttention
from bpkv_trt.core.statistics import ForwardStatistics, Readout
from bpkv_trt.core.topk import topk_distribution
from bpkv_trt.models.modules import inverse_frequencies, rope_can_be_undone
from bpkv_trt.models.prompt_encoder import PromptEncoder
from bpkv_trt.policies.base import Requirement
from bpkv_trt.pool.plan import CompactionPlan
from bpkv_trt.profiling import Trace
from bpkv_trt.runtime.exact_readout import ExactReadout
from bpkv_trt.runtime.lookahead import Draft, Guess, draft, look_ahead
from bpkv_trt.runtime.observers.query_moments import QueryMomentsObserver
from bpkv_trt.runtime.observers.received_attention import ReceivedAttention
from bpkv_trt.runtime.rehearsal import rehearse
from bpkv_trt.runtime.repetition import repeated_attention
from bpkv_trt.runtime.step import Observer
from bpkv_trt.runtime.torch_host import Replay, TorchHost


class TorchStatistics:
    """What the torch host can tell a policy: a replay of the scoring positions, and what observers saw go by."""

    def __init__(
        self,
        host: TorchHost,
        config: BpkvConfig,
        requires: frozenset[Requirement],
        rules: Sequence[RunningAttention] = (RunningAttention(),),
        encoder: PromptEncoder | None = None,
        stop_tokens: frozenset[int] = frozenset(),
    ) -> None:
        """`rules` of received attention: the policy's own, which `collect` reports, then those that others adopt.
        `encoder`: without the model's tokenizer nothing can be replayed. `stop_tokens`: a draft ends before them.
        """
        self.host, self.config, self.requires, self.rules = host, config, requires, tuple(rules)
        self.encoder = encoder
        self.stop_tokens = stop_tokens
        self.received: dict[int, ReceivedAttention] = {}
        self.moments: dict[int, QueryMomentsObserver] = {}
        self.drafts: dict[int, Draft] = {}  # made at the end of a prompt that is compacted later
        self.guesses: dict[int, Guess] = {}  # of the latest look ahead

    @property
    def offers(self) -> frozenset[Requirement]:
        """All that this host can observe; query moments only where RoPE turns halves, as `QueryMoments` means it."""
        offers: set[Requirement] = {"last_queries", "received_attention", "readout", "output_projection"}
        if rope_can_be_undone(self.host.model):
            offers.add("query_moments")
        if self.encoder is not None:
            offers.add("replay")
        return frozenset(offers)

    def open(self, sequence: int) -> None:
        """Start observing what the policy requires of a new sequence."""
        if "received_attention" in self.requires:
            self.received[sequence] = ReceivedAttention(self.host.pool, self.host.traits, sequence, self.rules)
        if "query_moments" in self.requires:
            frequencies = tuple(inverse_frequencies(self.host.model, layer) for layer in range(self.host.traits.layers))
            self.moments[sequence] = QueryMomentsObserver(self.host.traits, self.config.sinks, frequencies)

    def adopt(self, source: "TorchStatistics", sequence: int, copy: int) -> None:
        """`copy` was forked from another host's `sequence`: take over what was observed of it, as far as required.

        `source` must have observed all that is required here, over the same pool.
        """
        if "received_attention" in self.requires:
            self.received[copy] = source.received[sequence].forked(copy, self.rules)
        if "query_moments" in self.requires:
            self.moments[copy] = source.moments[sequence].forked(copy)
        if source is self and sequence in self.drafts:
            self.drafts[copy] = self.drafts[sequence]

    def observers(self, sequence: int) -> list[Observer]:
        """The observers that every chunk of the sequence must pass."""
        return [seen[sequence] for seen in (self.received, self.moments) if sequence in seen]

    def prompt_ended(self, sequence: int) -> None:
        """What comes of the sequence from here on is decoded."""
        if sequence in self.received:
            self.received[sequence].prompt_ended()

    def draft_answer(self, sequence: int, count: int, trace: Trace) -> None:
        """Remember how the model would go on from here, for a later `look_ahead`; the sequence is as before.

        Raises PoolExhausted where the pool has no room for `count` tokens.
        """
        before = len(self.host.tokens[sequence])
        try:
            with trace.range("readout", payload=count):
                self.drafts[sequence] = draft(self.host, sequence, count, self.stop_tokens)
        finally:
            self.host.retract(sequence, len(self.host.tokens[sequence]) - before)

    def close(self, sequence: int) -> None:
        """Forget a sequence."""
        self.received.pop(sequence, None)
        self.moments.pop(sequence, None)
        self.drafts.pop(sequence, None)
        self.guesses.pop(sequence, None)

    def compacted(self, sequence: int, plan: CompactionPlan) -> None:
        """Move what belongs to entries."""
        for observer in self.observers(sequence):
            observer.compacted(plan)

    def rehearse(self, sequence: int, count: int, trace: Trace) -> Rehearsal | None:
        """Let the model repeat some `count` tokens of the sequence (`rehearsal.rehearse`), which is as before.

        Raises PoolExhausted where the pool has no room for a passage.
        """
        if not count:
            return None
        with trace.range("readout", payload=count):
            return rehearse(self.host, sequence, count, self.config.sinks)

    @contextmanager
    def look_ahead(self, sequence: int, count: int, trace: Trace) -> Iterator[tuple[float, ...]]:
        """Let tokens that may come follow the sequence (`lookahead.look_ahead`): gives the weight of each.

        They are taken back at the end, also where that is an error. Raises PoolExhausted where the pool has no room.
        """
        before, weights = len(self.host.tokens[sequence]), tuple[float, ...]()
        try:
            if count:
                with trace.range("readout", payload=count):
                    weights = look_ahead(self.host, sequence, count, self.stop_tokens, self.drafts.get(sequence))
            self.guesses[sequence] = Guess(self.host.tokens[sequence][before:], weights)
            yield weights
        finally:
            self.host.retract(sequence, len(self.host.tokens[sequence]) - before)

    def collect(self, sequence: int, positions: int, trace: Trace, drafted: Sequence[float] = ()) -> ForwardStatistics:
        """Statistics at the last `positions` logical positions, of which the last ones are `drafted`, with weights.

        Raises NumericalError where a logit is NaN or Inf.
        """
        with trace.range("readout", payload=positions):
            replay = self.host.replay(sequence, positions)
            ids, p, covered = topk_distribution(replay.logits, self.config.top_k, self.host.traits.vocabulary)
            received, moments = self.received.get(sequence), self.moments.get(sequence)
            return ForwardStatistics(
                q=replay.q,
                context=replay.context,
                residual=replay.residual,
                topk_ids=ids,
                topk_p=p,
                covered_mass=covered,
                positions=replay.positions,
                drafted=len(drafted),
                readout=self._readout(sequence, replay, ids, p, drafted) if "readout" in self.requires else None,
                received_attention=None if received is None else received.result(self.rules[0]),
                replay_attention=self._replayed(sequence),
                query_moments=None if moments is None else moments.result(),
                projections=self.host.weights if "output_projection" in self.requires else None,
            )

    def _replayed(self, sequence: int) -> torch.Tensor | None:
        if "replay" not in self.requires:
            return None
        assert self.encoder is not None
        return repeated_attention(self.host, self.encoder, sequence, self.config.sinks)

    def _readout(
        self, sequence: int, replay: Replay, ids: torch.Tensor, p: torch.Tensor, drafted: Sequence[float]
    ) -> Readout:
        host, config = self.host, self.config
        weights = position_weights(ids.shape[0], drafted, ids.device)
        if config.readout == "exact":
            probes = config.probes_at(ids.shape[0])
            return ExactReadout(host, sequence, replay, ids, p, probes, config.seed, weights)
        return DirectReadout.of(replay.context, replay.residual, ids, p, host.traits, host.weights, weights)
