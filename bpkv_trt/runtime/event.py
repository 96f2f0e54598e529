"""What a compaction did."""

from dataclasses import dataclass, field

from bpkv_trt.config import Regime


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
    drafted: int = 0  # tokens of the lookahead
    rehearsed: int = 0  # tokens that the model repeated
    estimated_kl: float | None = None
    estimated_kl_stage1: float | None = None
    covered_mass: float | None = None
    epsilon_relaxed: int = 0
    rejected: int = 0
    clamped: bool = False
    broken_scores: int = 0  # NaN or Inf, for which nothing was evicted
    note: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)
