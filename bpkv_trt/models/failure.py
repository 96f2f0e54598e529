"""What a library raised, told within one paragraph of ours."""

import textwrap


def told(error: Exception) -> str:
    """Its type and words, on one line, cut between words where they are many."""
    if "weights_only" in str(error):  # torch advises to run what code the file may hold
        return f"{type(error).__name__}: it is damaged, or holds more than weights"
    words = textwrap.shorten(str(error), 300, placeholder=" ...")
    return f"{type(error).__name__}: {words}" if words else type(error).__name__
