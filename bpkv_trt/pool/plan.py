"""Which rows of a sequence survive a compaction."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from bpkv_trt.errors import StalePlan
from bpkv_trt.pool.view import SequenceView


@dataclass(frozen=True)
class CompactionPlan:
    """Kept rows of every (layer, KV head), and the state of the sequence for which they were chosen.

    Lengths only ever fall while the logical length stands still, so the two together name one state.
    """

    sequence: int
    lengths: NDArray[np.int32]  # [L, Hkv] rows held when the plan was made
    logical_length: int
    offsets: NDArray[np.int64]  # [L * Hkv + 1] where each head's kept rows begin in `rows`
    rows: NDArray[np.int32]  # [offsets[-1]] kept rows, counted from the head's first, ascending per head

    @classmethod
    def from_eviction(cls, view: SequenceView, evict: Tensor) -> "CompactionPlan":
        """Plan the eviction of `evict` [L, Hkv, T] bool, T the longest length; flags past a head's end do not count.

        Raises StalePlan if the mask is not of the view's shape, or would empty a head that holds rows.
        """
        layers, heads = view.lengths.shape
        longest = int(view.lengths.max(initial=0))
        if tuple(evict.shape) != (layers, heads, longest):
            raise StalePlan(
                f"The eviction mask has shape {tuple(evict.shape)} where the sequence has {(layers, heads, longest)} "
                "(layers, KV heads, longest head): it was made for another state. Score the sequence again."
            )
        kept = ~evict.cpu().numpy() & (np.arange(longest) < view.lengths[..., None])  # [L, Hkv, T]
        counts = kept.sum(axis=-1)
        rows = (np.flatnonzero(kept) % max(longest, 1)).astype(np.int32)
        offsets = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        plan = cls(view.sequence, view.lengths, view.logical_length, offsets, rows)
        plan.validate(view.lengths, view.logical_length)
        return plan

    @property
    def counts(self) -> NDArray[np.int64]:
        """[L, Hkv] rows kept."""
        return np.diff(self.offsets).reshape(self.lengths.shape)

    def kept(self, layer: int, head: int) -> NDArray[np.int32]:
        """[n] rows kept of one head, ascending."""
        index = layer * self.lengths.shape[1] + head
        return self.rows[self.offsets[index] : self.offsets[index + 1]]

    def validate(self, lengths: NDArray[np.int32], logical_length: int) -> None:
        """Raise StalePlan unless the plan fits a sequence in this state and keeps a row of every head that has one."""
        if logical_length != self.logical_length or not np.array_equal(lengths, self.lengths):
            raise self._refusal("was made for another state of the sequence, which has grown or been compacted since")
        heads = lengths.size
        if self.offsets.shape != (heads + 1,) or self.offsets[0] != 0 or self.offsets[-1] != self.rows.size:
            raise self._refusal(f"does not list the kept rows of {heads} heads")
        counts = np.diff(self.offsets)
        if (counts < 0).any():
            raise self._refusal("has offsets that descend")
        emptied = np.flatnonzero((counts == 0) & (lengths.ravel() > 0))
        if emptied.size:
            layer, head = divmod(int(emptied[0]), lengths.shape[1])
            raise self._refusal(f"evicts every row of layer {layer}, KV head {head}; attention needs at least one")
        self._validate_rows(np.repeat(np.arange(heads), counts), lengths.ravel())

    def _validate_rows(self, head: NDArray[np.int64], lengths: NDArray[np.int32]) -> None:
        if ((self.rows < 0) | (self.rows >= lengths[head])).any():
            raise self._refusal("keeps rows that do not exist")
        if (np.diff(self.rows)[np.diff(head) == 0] <= 0).any():
            raise self._refusal("has a head whose kept rows do not ascend")

    def _refusal(self, reason: str) -> StalePlan:
        return StalePlan(
            f"The compaction plan for sequence {self.sequence} {reason}. Nothing was moved. "
            "Score the sequence again and make a new plan."
        )
