"""The state of a pool to the bit, to be compared with what becomes of it."""

from collections.abc import Iterator

import torch
from torch import Tensor

from bpkv_trt.pool import PagedKvPool


class Snapshot:
    """Every byte of a pool that matters."""

    def __init__(self, pool: PagedKvPool) -> None:
        self.pool, self.before = pool, list(self._state(pool))

    @classmethod
    def equal(cls, pool: PagedKvPool, other: PagedKvPool) -> bool:
        """Whether two pools hold the same, at the same places."""
        both = list(zip(cls._state(pool), cls._state(other), strict=True))
        return all(torch.equal(*each) for each in both)

    @staticmethod
    def _state(pool: PagedKvPool) -> Iterator[Tensor]:
        yield from (pool.keys.view(torch.int32).clone(), pool.values.view(torch.int32).clone())  # bits: NaN == NaN
        yield from (pool.row_positions.clone(), torch.tensor(pool.free_pages), torch.tensor(pool.sequences))
        for sequence in pool.sequences:
            yield from (torch.from_numpy(pool.page_table(sequence)), torch.from_numpy(pool.lengths(sequence)))
            yield torch.tensor(pool.logical_length(sequence))

    def assert_unchanged(self) -> None:
        after = list(self._state(self.pool))
        assert len(after) == len(self.before)
        assert all(map(torch.equal, after, self.before))
        self.pool.check_integrity()
