"""Exact budgets: the grammar, and how many entries each unit of competition must give up."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Quota:
    """How many entries to evict, by unit: the heads that compete with one another share a unit."""

    unit: Tensor  # [L, Hkv] int64, the unit of every head; -1 for heads outside the budget
    evict: Tensor  # [U] int64
