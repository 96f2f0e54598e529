"""A compaction that is due."""

from dataclasses import dataclass

from torch import Tensor

from bpkv_trt.config import Regime
from bpkv_trt.core.budget import ResolvedBudget


@dataclass(frozen=True)
class Demand:
    """What is asked of a policy and of the host: which rows may go, how many stay, and where it is judged."""

    regime: Regime
    budget: ResolvedBudget
    counted: Tensor  # [L, Hkv] rows that the budget counts, on the CPU
    first: int  # the first logical position that may go; the recent window bounds them from above
    positions: int  # scoring positions among the tokens of the sequence
    lookahead: int = 0  # further ones, drafted
    rehearsal: int = 0  # tokens to repeat
