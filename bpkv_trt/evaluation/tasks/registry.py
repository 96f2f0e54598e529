"""Tasks by name, and samples of the size asked for."""

import random
from collections.abc import Callable
from dataclasses import replace

from bpkv_trt.errors import ConfigError, InputError
from bpkv_trt.evaluation.tasks.common_words import cwe
from bpkv_trt.evaluation.tasks.counting import counting
from bpkv_trt.evaluation.tasks.frequent_words import fwe
from bpkv_trt.evaluation.tasks.lead import lengthened
from bpkv_trt.evaluation.tasks.long_text import long_text
from bpkv_trt.evaluation.tasks.niah import niah_multikey, niah_multiquery, niah_multivalue, niah_single
from bpkv_trt.evaluation.tasks.passkey import passkey
from bpkv_trt.evaluation.tasks.redundant_facts import redundant_facts
from bpkv_trt.evaluation.tasks.sample import Count, Draft, Outline, Request, Sample
from bpkv_trt.evaluation.tasks.sizing import largest
from bpkv_trt.evaluation.tasks.system_rule import system_rule
from bpkv_trt.evaluation.tasks.two_questions import two_questions
from bpkv_trt.evaluation.tasks.variable_tracking import vt

_TASKS: dict[str, Callable[[random.Random, Request], Outline]] = {
    "passkey": passkey,
    "niah_single": niah_single,
    "niah_multikey": niah_multikey,
    "niah_multivalue": niah_multivalue,
    "niah_multiquery": niah_multiquery,
    "vt": vt,
    "cwe": cwe,
    "fwe": fwe,
    "redundant_facts": redundant_facts,
    "two_questions": two_questions,
    "system_rule": system_rule,
    "long_text": long_text,
    "counting": counting,
}
_VARIANTS = {"niah_multikey": ("needle",), "two_questions": ("first",)}


def task_names() -> tuple[str, ...]:
    """The tasks, each in its plain form."""
    return tuple(_TASKS)


def variant_names() -> tuple[str, ...]:
    """What a task can be besides its plain form, written `task:variant`."""
    return tuple(f"{task}:{variant}" for task, variants in _VARIANTS.items() for variant in variants)


def make_sample(
    task: str,
    seed: int,
    tokens: int,
    count: Count,
    lead_tokens: int = 16,
    *,
    answer_tokens: int = 256,
    frame_tokens: int = 0,
) -> Sample:
    """The sample of a task and seed with the largest haystack whose prompt, lead and answer fit `tokens` tokens.

    `count` counts tokens without special ones; `frame_tokens` of the `tokens` are what a chat template adds. The lead
    has at least `lead_tokens` tokens. `answer_tokens` is the length of the answer where the task writes a long one
    (counting, which has no haystack). The same arguments give the same sample everywhere.

    Raises ConfigError for a name that is neither in `task_names()` nor in `variant_names()`, InputError where `tokens`
    is too small for the task, naming the fewest.
    """
    if task not in (*_TASKS, *variant_names()):
        raise ConfigError(
            f"task is {task!r}, which is not a task; choose from {', '.join((*task_names(), *variant_names()))}."
        )
    name, _, variant = task.partition(":")
    request = Request(name, variant or None, seed, tokens - frame_tokens, count, lead_tokens, answer_tokens)
    outline = _outline(request)
    if (fewest := _fewest(request)) > request.tokens:
        raise InputError(
            f"{tokens} tokens are too few for the task {task} with seed {seed}: it takes {fewest + frame_tokens} or "
            "more. Give --tokens as many, or leave the task out."
        )
    if not outline.grows:
        return _sample(outline.draft(outline.smallest), request)
    units = largest(
        lambda n: sample_tokens(_sample(outline.draft(n), request), count), request.tokens, outline.smallest
    )
    assert units is not None, "the smallest sample fits"
    return _sample(outline.draft(units), request)


def _outline(request: Request) -> Outline:
    return _TASKS[request.task](random.Random(f"{request.task} {request.seed}"), request)


def _fewest(request: Request) -> int:
    """The tokens of the smallest sample, or, where that is too large, the fewest that would do: with more of them the
    smallest may be larger, as its example is.
    """
    outline = _outline(request)
    tokens = sample_tokens(_sample(outline.draft(outline.smallest), request), request.count)
    return tokens if tokens <= request.tokens else _fewest(replace(request, tokens=tokens))


def sample_tokens(sample: Sample, count: Count) -> int:
    """Tokens of a sample's prompt, lead and answer, counted in the parts that are encoded one after the other."""
    prompt = sample.context if sample.question is None else f"{sample.context}\n\n{sample.question}"
    after = "" if sample.question_after is None else f"\n\n{sample.question_after}"
    return sum(count(part) for part in (prompt, after, sample.lead, sample.joined) if part)


def _sample(draft: Draft, request: Request) -> Sample:
    return Sample(
        task=request.task,
        variant=draft.variant,
        seed=request.seed,
        context=draft.context,
        question=draft.question,
        question_after=draft.question_after,
        lead=lengthened(draft.lead, request.lead_tokens, request.count),
        answers=draft.answer.references,
        joined=draft.answer.joined,
        spans=draft.answer.spans,
        generation=draft.generation,
    )
