"""What kernels are compiled for, and which GPU runs which: the rule of `plugins/src/target.cpp`, in Python."""

import re
from collections.abc import Iterable
from typing import NamedTuple

Capability = tuple[int, int]  # compute capability of a GPU: major, minor


class Target(NamedTuple):
    """Such as 80, or 90a; ordered by which is to be preferred where both run."""

    exact: bool  # an `a` behind it: for this compute capability alone
    major: int
    minor: int

    @classmethod
    def parse(cls, text: str) -> "Target":
        """Raises ValueError for what names no target."""
        found = re.fullmatch(r"([1-9][0-9]?)([0-9])(a?)", text, re.ASCII)
        if found is None:
            raise ValueError(f"{text!r} names no target")
        return cls(bool(found[3]), int(found[1]), int(found[2]))

    def runs_on(self, device: Capability) -> bool:
        major, minor = device
        return self.major == major and (self.minor == minor if self.exact else self.minor <= minor)


def choose_target(targets: Iterable[str], device: Capability) -> str | None:
    """The one of these whose kernels a GPU runs best; None where it runs none of them."""
    running = [name for name in targets if Target.parse(name).runs_on(device)]
    return max(running, key=Target.parse, default=None)
