"""Sizes rounded up, as grids and tiles are."""


def ceil_div(number: int, unit: int) -> int:
    """How many units it takes to hold so many."""
    return -(-number // unit)


def next_power_of_2(number: int) -> int:
    """The least power of two that is no less than a positive number."""
    return 1 << (number - 1).bit_length()
