"""Tables as lines of text, for people and for tools that go by columns."""

from collections.abc import Sequence


def aligned(table: Sequence[Sequence[str]], texts: int) -> list[str]:
    """The lines of a table of cells, [rows][columns]: the first `texts` columns to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place < texts else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in table
    ]
