"""How an answer begins."""

from bpkv_trt.errors import ConfigError
from bpkv_trt.evaluation.tasks.sample import Count

_OPENINGS = (
    "I have read the text above from its beginning to its end, and I kept in mind what I was asked to remember.",
    "Here is my answer.",
    "It follows from the text alone, which I take as it is written, without adding anything of my own to it.",
    "Where the text repeats itself I looked at every line, since any of them may matter.",
    "I then compared what I found with the question, word by word, to be sure that it is what was asked for.",
    "I made no guess: what I write down stands in the text just as I give it.",
    "I will be brief and write down nothing but what was asked for, in the order in which the text has it.",
)


def lengthened(lead: str, tokens: int, count: Count) -> str:
    """`lead` with as many opening sentences before it as it takes to have at least `tokens` tokens.

    A compaction that is deferred takes place within the lead, so that every token of the answer comes after it.
    ConfigError where all openings are not enough.
    """
    for used in range(len(_OPENINGS) + 1):
        text = " ".join((*_OPENINGS[:used], lead))
        if count(text) >= tokens:
            return text
    raise ConfigError(
        f"lead_tokens is {tokens}, but the longest beginning of an answer has {count(text)} tokens: an answer cannot "
        f"begin later. Use at most {count(text)}, or defer the compaction by fewer tokens."
    )
