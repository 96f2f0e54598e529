"""What compaction asks of its surroundings: a pool of any layout, and a host that runs the model."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from bpkv_trt.core.rehearsal import Rehearsal
from bpkv_trt.core.statistics import ForwardStatistics
from bpkv_trt.policies.base import Requirement
from bpkv_trt.pool.plan import CompactionPlan
from bpkv_trt.pool.view import SequenceView
from bpkv_trt.profiling import Trace


class CompactablePool(Protocol):
    """What deciding and applying a compaction needs of a pool, whatever its layout."""

    @property
    def device(self) -> torch.device:
        """Where its rows are."""

    @property
    def itemsize(self) -> int:
        """Bytes of one number in it."""

    def lengths(self, sequence: int) -> NDArray[np.int32]:
        """[L, Hkv] rows held."""

    def logical_length(self, sequence: int) -> int:
        """Tokens seen, evicted or not."""

    def view(self, sequence: int) -> SequenceView:
        """What a policy sees of a sequence now."""

    def bytes_of(self, sequence: int) -> int:
        """Bytes of the pages that a sequence owns."""

    def apply(self, plan: CompactionPlan) -> int:
        """Keep only the planned rows; returns the pages freed. StalePlan, with nothing moved, where it does not fit."""


class StatisticsSource(Protocol):
    """The host's side: what it can tell about a sequence, and what it must move when entries go."""

    @property
    def offers(self) -> frozenset[Requirement]:
        """What `Policy.requires` may ask of this host."""

    def prompt_ended(self, sequence: int) -> None:
        """A prompt, or a later turn of one, has been encoded; what comes next is decoded."""

    def draft_answer(self, sequence: int, count: int, trace: Trace) -> None:
        """Remember up to `count` tokens that the model would write now, for a `look_ahead` that comes later."""

    def rehearse(self, sequence: int, count: int, trace: Trace) -> Rehearsal | None:
        """Let the model repeat some `count` tokens of a sequence of which nothing was evicted; None where none are."""

    def look_ahead(self, sequence: int, count: int, trace: Trace) -> AbstractContextManager[Sequence[float]]:
        """Let tokens that may come, `count` in the first draft, follow the sequence; gives the weight of each.

        Meanwhile they belong to it: to its view, its lengths and what `collect` sees.
        """

    def collect(self, sequence: int, positions: int, trace: Trace, drafted: Sequence[float] = ()) -> ForwardStatistics:
        """Statistics at the last `positions` positions, the `drafted` included, with what the policy requires."""

    def compacted(self, sequence: int, plan: CompactionPlan) -> None:
        """The plan was applied: move all state that belongs to entries."""
