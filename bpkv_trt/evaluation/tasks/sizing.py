"""The largest haystack that fits."""

from collections.abc import Callable


def largest(size: Callable[[int], int], limit: int, smallest: int) -> int | None:
    """The largest n >= `smallest` with size(n) <= limit, for a `size` that never decreases; None if there is none.

    Haystacks grow almost evenly, so the next n tried is interpolated, every other time halved: a few evaluations of
    texts no longer than twice the limit.
    """
    low, at_low = smallest, size(smallest)
    if at_low > limit:
        return None
    high, at_high = low + 1, size(low + 1)
    while at_high <= limit:
        low, at_low, high = high, at_high, 2 * high
        at_high = size(high)
    halve = False
    while high - low > 1:
        ahead = (high - low) // 2 if halve else (limit - at_low) * (high - low) // (at_high - at_low)
        middle = min(max(low + ahead, low + 1), high - 1)
        at_middle = size(middle)
        if at_middle <= limit:
            low, at_low = middle, at_middle
        else:
            high, at_high = middle, at_middle
        halve = not halve
    return low
