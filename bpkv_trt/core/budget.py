"""Exact budgets: the grammar, and how many entries stay; counted in integers and exact fractions, without torch."""

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from fractions import Fraction
from typing import Literal

from bpkv_trt.errors import ConfigError

BudgetKind = Literal["fraction", "tokens", "bytes"]
Scope = Literal["head", "layer", "global"]

GRAMMAR = (
    "a fraction of the entries such as 0.2 or 20% (1 keeps all), tokens per head such as 512t, "
    "or bytes of keys and values such as 64MiB (KiB, MiB, GiB, kB, MB, GB)"
)
_UNITS = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_QUANTITY = re.compile(r"([0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})(%|t|[kMG]B|[KMG]iB)?")


def parse_bytes(text: str, what: str) -> int:
    """The bytes in a size such as `64MiB` or `1.5GB`, rounded down; `what` names the option in the ConfigError."""
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or match[2] not in _UNITS or (size := int(Fraction(match[1]) * _UNITS[match[2]])) < 1:
        raise ConfigError(f"{what} is {text!r}, which is not a size; write it as 64MiB, 1.5GiB or 200MB.")
    return size


@dataclass(frozen=True)
class Budget:
    """How much of the cache may stay, protected entries counted."""

    kind: BudgetKind
    amount: Decimal  # a fraction in (0, 1], tokens per head, or bytes over all heads
    text: str = field(compare=False)

    @classmethod
    def parse(cls, text: str, what: str = "budget") -> "Budget":
        """Read a budget; raises ConfigError, which names the option as `what` and states the grammar."""
        text = text.strip()
        match = _QUANTITY.fullmatch(text)
        if match is None:
            raise ConfigError(f"{what} is {text!r}, which is not a budget; give {GRAMMAR}.")
        number, unit = Decimal(match[1]), match[2]
        if number == 0:
            raise ConfigError(f"{what} is {text!r}: an empty cache cannot answer anything; give {GRAMMAR}.")
        if unit in _UNITS:
            return cls("bytes", Decimal(parse_bytes(text, what)), text)
        if unit == "t":
            if number != int(number):
                raise ConfigError(f"{what} is {text!r}: tokens per head are whole; give {GRAMMAR}.")
            return cls("tokens", number, text)
        fraction = number.scaleb(-2) if unit == "%" else number
        if fraction > 1:
            bare = unit is None and number == int(number)
            hint = f"did you mean {text}t (tokens per head)? Otherwise " if bare else ""
            raise ConfigError(f"{what} is {text!r}, a fraction above 1: {hint}give {GRAMMAR}.")
        return cls("fraction", fraction, text)

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class ResolvedBudget:
    """A budget in entries, for a sequence of a known length."""

    requested: Budget
    tokens: int  # rows per head before
    per_head: int  # rows per head after, on average over the compactable heads
    total: int  # entries kept over all compactable heads, the same in every scope
    protected: int  # rows that no head may go below: min(protected tokens, tokens)
    clamped: bool  # more is kept than was asked for
    note: str | None = None  # why, in a sentence, where that is so


def resolve(
    budget: Budget, *, tokens: int, layers: int, kv_heads: int, head_dim: int, itemsize: int, protected: int
) -> ResolvedBudget:
    """Turn a budget into entries: n rows per head, layers x kv_heads x n in total.

    `layers` counts the compactable layers, `itemsize` is the bytes of one number in the cache. A fraction gives
    n = floor(fraction x tokens); bytes give the largest n whose K and V rows fit (a pool that rounds every head up to a
    whole page may hold up to one page per head more). A sequence no longer than the protected tokens keeps all. A
    fraction below the protected tokens is raised to them; tokens or bytes below them raise ConfigError.
    """
    row_bytes = 2 * layers * kv_heads * head_dim * itemsize  # K and V of one token in every compactable head
    match budget.kind:
        case "fraction":
            asked = int(Fraction(budget.amount) * tokens)
        case "tokens":
            asked = int(budget.amount)
        case "bytes":
            asked = int(budget.amount) // row_bytes if row_bytes else tokens
    per_head, note = min(asked, tokens), None
    if per_head < min(protected, tokens):
        if tokens > protected and budget.kind != "fraction":
            raise ConfigError(
                f"The budget {budget} leaves {asked} tokens per head, but {protected} are protected (attention sinks "
                f"and the recent window); give at least {protected}t ({protected * row_bytes} bytes for this model), "
                "or protect fewer."
            )
        per_head = min(protected, tokens)
        note = (
            f"the budget {budget} is {asked} tokens per head; raised to the {protected} protected ones"
            if tokens > protected
            else f"nothing is evicted: {tokens} tokens are not more than the {protected} protected ones"
        )
    return ResolvedBudget(
        requested=budget,
        tokens=tokens,
        per_head=per_head,
        total=layers * kv_heads * per_head,
        protected=min(protected, tokens),
        clamped=note is not None,
        note=note,
    )


def allocate(total: int, weights: Sequence[float | Fraction], floor: int, cap: int) -> list[int]:
    """Split `total` in proportion to positive `weights`, every share within [floor, cap]; the sum is exact.

    Shares are min(max(level x weight, floor), cap) with the level at which they add up to `total`, rounded by the
    largest remainder (the earliest wins a tie). Needs len(weights) x floor <= total <= len(weights) x cap.
    """
    assert len(weights) * floor <= total <= len(weights) * cap
    exact = [Fraction(weight) for weight in weights]

    def shares(level: Fraction) -> list[Fraction]:
        return [min(max(level * weight, Fraction(floor)), Fraction(cap)) for weight in exact]

    def filled(level: Fraction) -> Fraction:
        return sum(shares(level), Fraction())

    bends = sorted({Fraction(bound) / weight for weight in exact for bound in (floor, cap)})
    above = bisect_left(bends, Fraction(total), key=filled)
    level = bends[above]
    if surplus := filled(level) - total:
        below = bends[above - 1]  # between two bends the sum is linear in the level
        level -= surplus * (level - below) / (filled(level) - filled(below))
    kept = [int(share) for share in shares(level)]
    remainders = [share - whole for share, whole in zip(shares(level), kept, strict=True)]
    for index in sorted(range(len(kept)), key=lambda i: -remainders[i])[: total - sum(kept)]:
        kept[index] += 1
    return kept
