"""PyramidKV: SnapKV, with more rows for the lower layers."""

from collections.abc import Sequence
from fractions import Fraction
from typing import ClassVar

from bpkv_trt.config import Regime
from bpkv_trt.core.budget import ResolvedBudget, Scope, allocate
from bpkv_trt.policies.observation_window import ObservationWindowPolicy

BETA = 20  # the last layer gets 1 / 20 of the mean before clipping: the published shape


class PyramidKv(ObservationWindowPolicy):
    """SnapKV's score; rows per head fall in equal steps from the first layer to the last.

    With n rows per head on average: from 2n - n/20 down to n/20. Where the first layer would exceed the T - M rows
    before the window it gets T - M, and the last 2n - (T - M). Where the last would have fewer than M rows, or the
    order would turn round, all layers get n.

    Source: Cai et al., arXiv:2406.02069; kvpress PyramidKVPress 0.5.5 (`get_layer_budget`), which rounds every layer by
    itself, so that its total misses the budget by up to half a row per layer. Here the total is exact (largest
    remainder), no layer falls below the protected rows, and sliding-window layers are left out of the count. The
    published rule is for a prompt, so there is no generation regime.
    """

    name: ClassVar[str] = "pyramidkv"
    source: ClassVar[str] = "arXiv:2406.02069"
    scopes: ClassVar[tuple[Scope, ...]] = ("head",)
    regimes: ClassVar[tuple[Regime, ...]] = ("prefill", "deferred")
    takes_layer_table: ClassVar[bool] = False

    def layer_counts(self, budget: ResolvedBudget, layers: int) -> Sequence[int] | None:
        if layers == 0:
            return None
        shares = pyramid(budget.per_head, budget.tokens, self.config.scoring_positions, layers)
        return allocate(layers * budget.per_head, shares, budget.protected, budget.tokens)


def pyramid(per_head: int, tokens: int, window: int, layers: int) -> list[Fraction]:
    """Rows per head of every layer before rounding; they add up to layers x per_head wherever layers > 1."""
    least = Fraction(per_head, BETA)
    most = 2 * per_head - least
    if most >= tokens - window:
        most = Fraction(tokens - window)
        least = 2 * per_head - most
    if not tokens >= most >= least >= window:
        return [Fraction(per_head)] * layers
    step = (most - least) / max(1, layers - 1)
    return [most - layer * step for layer in range(layers)]
