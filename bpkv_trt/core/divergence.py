"""How far the next-token distribution moves: top-K KL (`direct`) and its Fisher form by random probes (`exact`)."""

import math
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

SERIES_LIMIT = 0.3  # beyond it expm1(x) - x loses less than the series would
OVERFLOW_LIMIT = 60.0  # e^60 is far from fp32's largest number and a KL of that size is not told from its log-sum-exp


class Divergence(Protocol):
    """KL, averaged over the scoring positions by their weights, of a shift read out as [..., M, C], C = K or R; fp32.

    Nothing but an increment is negative.
    """

    def of(self, shift: Tensor) -> Tensor:
        """[..., M, C] -> [...]: the divergence that this shift of the full distribution causes."""

    def increment(self, base: Tensor, shift: Tensor) -> Tensor:
        """`of(base + shift) - of(base)` for base [M, C] and shift [..., M, C], without subtracting two divergences."""

    def gradient(self, base: Tensor) -> Tensor:
        """[M, C]: derivative of `of` at base, for nominating candidates by first order."""


class TopKDivergence:
    """KL(p || p e^shift / Z) on the top-K support.

    At the size of one entry (1e-11) the textbook form, log-sum-exp minus dot, is rounding noise. With the shift
    centred under p, KL = log1p(sum p phi(shift)), phi(x) = e^x - 1 - x, where every term is positive.
    """

    def __init__(self, p: Tensor, weights: Tensor | None = None) -> None:
        """p [M, K] fp32, rows summing to 1; `weights` [M], as `position_weights` gives them, equal by default."""
        self.p = p
        self.weights = position_weights(p.shape[0], device=p.device) if weights is None else weights
        self.log_p = p.log()

    def of(self, shift: Tensor) -> Tensor:
        return self._log_mean_exp(self.p, self.log_p, self._centred(self.p, shift)) @ self.weights

    def increment(self, base: Tensor, shift: Tensor) -> Tensor:
        """log sum p' e^shift - sum p shift, for p' ~ p e^base and the shift centred under p'."""
        tilt = self._tilt(base)
        tilted = self.p * tilt.exp()
        centred = self._centred(tilted, shift)
        linear = torch.einsum("...mk,mk->...m", centred, self.p * tilt.expm1())  # (p' - p) . shift, not by subtraction
        return (self._log_mean_exp(tilted, self.log_p + tilt, centred) + linear) @ self.weights

    def gradient(self, base: Tensor) -> Tensor:
        return self.p * self._tilt(base).expm1() * self.weights.unsqueeze(-1)

    def _tilt(self, base: Tensor) -> Tensor:
        # log(p' / p) [M, K] for p' ~ p e^base
        centred = self._centred(self.p, base)
        return centred - self._log_mean_exp(self.p, self.log_p, centred).unsqueeze(-1)

    @staticmethod
    def _centred(p: Tensor, shift: Tensor) -> Tensor:
        return shift - torch.einsum("...mk,mk->...m", shift, p).unsqueeze(-1)

    @staticmethod
    def _log_mean_exp(p: Tensor, log_p: Tensor, x: Tensor) -> Tensor:
        # log sum_k p e^x for x [..., M, K] centred under p -> [..., M]
        if x.numel() == 0:
            return x.new_zeros(x.shape[:-1])
        low, high = (side.item() for side in torch.aminmax(x))
        small = torch.log1p(torch.einsum("...mk,mk->...m", _phi(x, max(-low, high)), p))
        if high <= OVERFLOW_LIMIT:
            return small
        return torch.where(x.amax(-1) > OVERFLOW_LIMIT, torch.logsumexp(log_p + x, dim=-1), small)


class FisherDivergence:
    """Second-order KL, 1/2 mean over (m, r) of (dz . xi)^2, where a shift is already read out by the probes xi."""

    def __init__(self, weights: Tensor) -> None:
        """weights [M], as `position_weights` gives them."""
        self.weights = weights

    def of(self, shift: Tensor) -> Tensor:
        return shift.square().mean(-1) @ self.weights / 2

    def increment(self, base: Tensor, shift: Tensor) -> Tensor:
        return (shift * (base + shift / 2)).mean(-1) @ self.weights

    def gradient(self, base: Tensor) -> Tensor:
        return base * (self.weights.unsqueeze(-1) / base.shape[-1])


def position_weights(positions: int, drafted: Sequence[float] = (), device: torch.device | str = "cpu") -> Tensor:
    """[M] fp32 on `device`, summing to 1: equal, but that the last positions have those of `drafted`, relative to 1."""
    weights = torch.ones(positions, device=device)
    if drafted:
        weights[-len(drafted) :] = torch.tensor(drafted, device=device)
    return weights / weights.sum()


def _phi(x: Tensor, bound: float) -> Tensor:
    """e^x - 1 - x, where |x| <= bound: only as many terms of the series as fp32 can see."""
    series = _phi_series(x, min(bound, SERIES_LIMIT))
    if not bound >= SERIES_LIMIT:
        return series
    return torch.where(x.abs() < SERIES_LIMIT, series, torch.expm1(x) - x)


def _phi_series(x: Tensor, bound: float) -> Tensor:
    # x^2 (1/2 + x/6 + x^2/24 + ...) by Horner in place; the first term left out is below 2^-25 of the first.
    terms = 2
    while 2 * bound**terms / math.factorial(terms + 2) > 2**-25:
        terms += 1
    coefficients = [1 / math.factorial(n + 2) for n in range(terms)]
    series = x * coefficients[-1]
    for coefficient in reversed(coefficients[1:-1]):
        series.add_(coefficient).mul_(x)
    return series.add_(coefficients[0]).mul_(x).mul_(x)
