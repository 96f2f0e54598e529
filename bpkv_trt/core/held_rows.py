"""The rows of one sequence, as the core sees them."""

from typing import TYPE_CHECKING, Protocol

from torch import Tensor

if TYPE_CHECKING:  # kernels are compiled where NumPy may be missing
    import numpy as np
    from numpy.typing import NDArray


class HeldRows(Protocol):
    """The rows of one sequence, as a pool's `SequenceView` shows them; the core knows no pool."""

    @property
    def lengths(self) -> "NDArray[np.int32]":
        """[L, Hkv] rows held."""

    def keys(self, layer: int, head: int) -> Tensor:
        """[n, D] keys of one head."""

    def values(self, layer: int, head: int) -> Tensor:
        """[n, D] values of one head."""
