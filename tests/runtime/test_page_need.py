"""Pages that requests need: never less than any outcome of a compaction takes."""

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bpkv_trt.core.quota import Quota
from bpkv_trt.runtime.page_need import PageNeed, _pages_left
from tests.runtime.random_models import engine_of, random_tokens


def most_pages(heads: int, keep: int, tokens: int, further: int, page_size: int) -> int:
    """Over every way in which the heads of a unit may share what it keeps."""
    ways = (shares for shares in itertools.product(range(tokens + 1), repeat=heads) if sum(shares) == keep)
    return max(sum(-(-(share + further) // page_size) for share in shares) for shares in ways)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.integers(1, 3), st.integers(1, 7), st.integers(0, 6), st.integers(1, 4), st.booleans())
def test_no_sharing_of_a_budget_takes_more(
    data: st.DataObject, heads: int, tokens: int, further: int, page_size: int, windowed: bool
) -> None:
    """The most for one unit, beside a head outside the budget; exact where a head has a budget to itself."""
    keep = data.draw(st.integers(0, heads * tokens))
    unit = torch.tensor([[0] * heads + [-1] * windowed])
    counted = torch.where(unit == 0, tokens, 0)
    left = _pages_left(Quota(unit, torch.tensor([heads * tokens - keep]), counted), tokens, further, page_size)
    left -= windowed * -(-(tokens + further) // page_size)
    most = most_pages(heads, keep, tokens, further, page_size)
    assert most <= left <= most + heads - 1


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("scope", ["head", "layer", "global"])
@pytest.mark.parametrize(("tokens", "answer"), [(60, 20), (33, 1), (9, 30), (70, 3)])
def test_what_is_left_of_a_prompt_and_its_answer_is_within_the_need(
    name: str, scope: str, tokens: int, answer: int
) -> None:
    options: dict[str, Any] = {"lookahead": 3, "rehearsal": 0, "regime": "prefill", "budget": "0.3"}
    engine = engine_of(name, scope=scope, **options)
    need, sequence, free = PageNeed.of(engine, tokens, answer), engine.open(), engine.pool.free_pages
    engine.encode([(sequence, random_tokens(1, tokens))])
    assert free - engine.pool.free_pages <= need.pages
    engine.compactor.on_context_step_end(sequence)
    at_its_end = engine.pool.owned_pages(sequence) + engine.pool.pages_to_grow(sequence, answer)
    assert at_its_end <= need.pages
    assert need.pages < PageNeed.whole(engine, tokens, answer).pages or tokens == 9 or answer == 1


def test_evictions_that_may_come_too_late_are_not_counted_on() -> None:
    for options in ({"policy": "full"}, {"regime": "deferred", "defer": 4}, {"regime": "generation"}):
        engine = engine_of("llama", **options)
        assert PageNeed.of(engine, 50, 30).pages == engine.pool.pages_for(80), options
