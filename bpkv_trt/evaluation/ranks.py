"""Rank correlation."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation, ties at their mean rank; NaN where all of one side are equal."""
    ranks = [mean_ranks(np.asarray(values, dtype=np.float64)) for values in (first, second)]
    if any(np.ptp(each) == 0 for each in ranks):
        return math.nan
    return float(np.corrcoef(ranks[0], ranks[1])[0, 1])


def mean_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Ranks from 0 of values [n], equal ones sharing the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = counts.cumsum() - 1
    mean: NDArray[np.float64] = last - (counts - 1) / 2
    return mean[inverse]
