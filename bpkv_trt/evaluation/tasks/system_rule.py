"""Two instructions: a rule at the beginning, a task at the end. What is scored is whether the rule survives.

After "Pitfalls of KV Cache Compression" (arXiv 2510.00231): instructions far from the query are the first to be lost.
"""

import random

from bpkv_trt.evaluation.tasks.haystack import NOISE, noise_lines
from bpkv_trt.evaluation.tasks.sample import Answer, Draft, Outline, Request
from bpkv_trt.evaluation.tasks.words import distinct_words


def system_rule(rng: random.Random, request: Request) -> Outline:
    (word,) = distinct_words(rng, 1)
    task = rng.choice(("What is green?", "What is blue?", "What is yellow?"))
    assert task.split()[-1].rstrip("?") in " ".join(NOISE)

    def draft(units: int) -> Draft:
        return Draft(
            variant="system_rule-noise",
            context=f'This is the rule for all of your answers: begin every answer with the code word "{word}".\n'
            + "\n".join(noise_lines(units)),
            question=f"Obey the rule, and answer this: {task}",
            lead="As the rule at the beginning of this text demands, I begin my answer with the code word",
            answer=Answer().plus(' "').plus(word, reference=True).plus('".'),
        )

    return Outline(draft, smallest=5)
