"""How far the next-token distribution moves: top-K KL (`direct`) and its Fisher form by random probes (`exact`)."""

from typing import Protocol

from torch import Tensor


class Divergence(Protocol):
    """KL, averaged over the scoring positions, of a shift read out as [..., M, K or R]; all fp32, all >= 0 but increments."""

    def of(self, shift: Tensor) -> Tensor:
        """[..., M, C] -> [...]: the divergence that this shift of the full distribution causes."""

    def increment(self, base: Tensor, shift: Tensor) -> Tensor:
        """`of(base + shift) - of(base)` for base [M, C] and shift [..., M, C], without subtracting two divergences."""

    def gradient(self, base: Tensor) -> Tensor:
        """[M, C]: derivative of `of` at base, for nominating candidates by first order."""
