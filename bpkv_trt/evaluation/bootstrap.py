"""Intervals by resampling: what would have come out with other samples of the same tasks."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
LEVEL = 0.95

Values = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """A statistic of the samples at hand, and the bounds of its percentile interval at `LEVEL`.

    They are None where no stratum has two samples that count: every resample is the same then, and says nothing.
    """

    value: float
    low: float | None
    high: float | None


class Bootstrap:
    """Resamples with replacement, within each stratum, the same for every statistic: so differences are paired."""

    def __init__(self, strata: Sequence[str], seed: int = 0, resamples: int = RESAMPLES) -> None:
        """strata: the stratum of every sample, such as its task."""
        generator, count = np.random.default_rng(seed), len(strata)
        self.names = names = np.asarray(strata)
        self.chosen = np.empty((resamples, count), dtype=np.intp)  # [B, n] samples by number
        for name in dict.fromkeys(strata):
            members = np.flatnonzero(names == name)
            self.chosen[:, members] = generator.choice(members, (resamples, len(members)))

    def mean(self, values: Sequence[float]) -> Interval:
        """The mean of one value per sample."""
        array = np.asarray(values, dtype=np.float64)
        return self._interval(float(array.mean()), array[self.chosen].mean(1), np.ones(len(array), dtype=bool))

    def ratio(self, parts: Sequence[float], wholes: Sequence[float]) -> Interval | None:
        """sum(parts) / sum(wholes); None where there is nothing to divide by. Resamples without any do not count."""
        part, whole = np.asarray(parts, dtype=np.float64), np.asarray(wholes, dtype=np.float64)
        if whole.sum() == 0:
            return None
        drawn = whole[self.chosen].sum(1)
        ratios = part[self.chosen].sum(1)[drawn > 0] / drawn[drawn > 0]
        return self._interval(float(part.sum() / whole.sum()), ratios, whole > 0)

    def _interval(self, value: float, resampled: Values, counted: NDArray[np.bool_]) -> Interval:
        """The percentile interval of a statistic from its values [B] on resamples."""
        _, members = np.unique(self.names[counted], return_counts=True)
        if members.max() < 2:
            return Interval(value, None, None)
        low, high = np.percentile(resampled, [50 * (1 - LEVEL), 50 * (1 + LEVEL)])
        return Interval(value, float(low), float(high))
