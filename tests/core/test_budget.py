"""Budgets are exact in every scope; the independent truth is counting and brute force over small integers."""

from decimal import Decimal
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bpkv_trt.core.budget import Budget, ResolvedBudget, allocate, parse_bytes, resolve
from bpkv_trt.core.quota import quotas
from bpkv_trt.errors import ConfigError

SINKS, RECENT = 4, 32
PROTECTED = SINKS + RECENT


def resolved(
    text: str | Budget, tokens: int, *, layers: int = 3, kv_heads: int = 2, protected: int = PROTECTED
) -> ResolvedBudget:
    budget = Budget.parse(text) if isinstance(text, str) else text
    return resolve(
        budget, tokens=tokens, layers=layers, kv_heads=kv_heads, head_dim=64, itemsize=2, protected=protected
    )


@pytest.mark.parametrize(
    ("text", "kind", "amount"),
    [
        ("0.2", "fraction", "0.2"),
        (".5", "fraction", "0.5"),
        ("20%", "fraction", "0.2"),
        ("12.5%", "fraction", "0.125"),
        ("1", "fraction", "1"),
        ("1.0", "fraction", "1"),
        ("100%", "fraction", "1"),
        ("512t", "tokens", "512"),
        (" 1t ", "tokens", "1"),
        ("64MiB", "bytes", str(64 * 1024 * 1024)),
        ("1.5kB", "bytes", "1500"),
        ("2GB", "bytes", "2000000000"),
    ],
)
def test_grammar(text: str, kind: str, amount: str) -> None:
    budget = Budget.parse(text)
    assert (budget.kind, budget.amount) == (kind, Fraction(amount))
    assert str(budget) == text.strip()


@pytest.mark.parametrize(
    "text",
    ["", "0", "0.0", "0t", "0MiB", "-1", "-0.2", "1.1", "2", "101%", "512", "nan", "inf", "-inf", "1e-1", "half"]
    + ["1.5t", "512T", "64mib", "64 MiB", "0.2.1", "1/5", "٢", "0x10", "9" * 5000, "0.0000001kB"],
)
def test_what_is_not_a_budget_is_refused_with_the_grammar(text: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        Budget.parse(text, "--budget")
    message = str(refusal.value)
    assert message.startswith(f"--budget is {text!r}") and "64MiB" in message and "\n" not in message


def test_a_bare_integer_is_asked_about() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 512t"):
        Budget.parse("512")


@pytest.mark.parametrize("text", ["64", "20%", "12t", "MiB", "0kB"])
def test_sizes_need_a_unit_of_bytes(text: str) -> None:
    with pytest.raises(ConfigError, match="--memory-limit"):
        parse_bytes(text, "--memory-limit")


def test_a_fraction_is_a_decimal_and_never_a_float() -> None:
    assert int(1000 * (1 - 0.8)) == 199, "the float arithmetic that peers use loses a token"
    assert resolved("0.2", 1000).per_head == 200
    assert resolved("20%", 1000).per_head == 200
    assert resolved("0.29", 100).per_head == max(29, PROTECTED)
    assert resolved("0.29", 100, protected=1).per_head == 29, "int(0.29 * 100) is 28 in floats"
    assert int(0.29 * 100) == 28


@given(percent=st.integers(1, 100), tokens=st.integers(1, 5000), layers=st.integers(1, 4), kv_heads=st.integers(1, 4))
def test_a_fraction_keeps_its_floor_or_the_protected(percent: int, tokens: int, layers: int, kv_heads: int) -> None:
    found = resolved(f"{percent}%", tokens, layers=layers, kv_heads=kv_heads)
    floor = percent * tokens // 100
    assert found.per_head == max(floor, min(PROTECTED, tokens))
    assert found.total == layers * kv_heads * found.per_head
    assert found.clamped == (found.per_head > floor) == (found.note is not None)


@pytest.mark.parametrize("tokens", [1, 2, 3, SINKS, SINKS + RECENT, SINKS + RECENT + 1])
@pytest.mark.parametrize("text", ["0.01", "0.2", "1", "36t", "1GiB"])
def test_short_sequences_are_never_emptied(text: str, tokens: int) -> None:
    found = resolved(text, tokens)
    assert found.per_head == (tokens if text in ("1", "1GiB") else min(tokens, PROTECTED))
    if tokens <= PROTECTED and text in ("0.01", "0.2"):
        assert found.per_head == tokens and found.clamped and "nothing is evicted" in str(found.note)


@pytest.mark.parametrize("text", ["35t", "1t", "1kB", "55kB"])
def test_tokens_or_bytes_below_the_protected_set_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"{PROTECTED}t"):
        resolved(text, 1000)
    assert resolved(text, PROTECTED).per_head == PROTECTED, "a prompt without anything to evict runs as full"


def test_bytes_tokens_and_fraction_say_the_same_budget() -> None:
    row = 2 * 3 * 2 * 64 * 2  # K and V, layers, heads, head_dim, fp16
    for text in ("0.2", "200t"):
        assert resolved(text, 1000).total == 3 * 2 * 200
    for spare in (0, row - 1):
        assert resolved(Budget("bytes", Decimal(200 * row + spare), "exact"), 1000).total == 3 * 2 * 200
    assert resolved("300kB", 1000).per_head == 300_000 // row
    assert resolved("1GiB", 1000).per_head == 1000 and not resolved("1GiB", 1000).clamped


@given(
    weights=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6),
    floor=st.integers(0, 5),
    room=st.integers(0, 20),
    data=st.data(),
)
def test_allocation_is_exact_and_bounded(weights: list[float], floor: int, room: int, data: st.DataObject) -> None:
    cap = floor + room
    total = data.draw(st.integers(len(weights) * floor, len(weights) * cap))
    shares = allocate(total, weights, floor, cap)
    assert sum(shares) == total
    assert all(floor <= share <= cap for share in shares)
    by_weight = [share for _, share in sorted(zip(weights, shares, strict=True))]
    assert by_weight == sorted(by_weight), "a heavier layer never keeps fewer rows"


def test_allocation_is_proportional_where_no_bound_is_met() -> None:
    assert allocate(600, [1, 2, 3], 0, 1000) == [100, 200, 300]
    assert allocate(10, [1, 1, 1], 0, 10) == [4, 3, 3], "the largest remainder, the earliest in a tie"
    assert allocate(300, [1, 1, 98], 20, 200) == [50, 50, 200], "what a cap refuses goes to the others"
    assert allocate(120, [1, 1, 10], 30, 100) == [30, 30, 60], "what a floor takes comes from the others"


@given(
    scope=st.sampled_from(["head", "layer", "global"]),
    percent=st.integers(1, 100),
    tokens=st.integers(1, 200),
    weights=st.none() | st.lists(st.floats(0.01, 100), min_size=4, max_size=4),
)
def test_every_scope_keeps_the_same_total(scope: str, percent: int, tokens: int, weights: list[float] | None) -> None:
    compactable, kv_heads, protected = (0, 2, 3), 2, 6  # layer 1 has a sliding window
    budget = resolved(f"{percent}%", tokens, protected=protected)
    lengths = torch.full((4, kv_heads), tokens)
    quota = quotas(budget, scope, lengths, compactable, weights)
    assert quota.unit.dtype == quota.evict.dtype == torch.int64
    assert quota.unit[1].tolist() == [-1, -1]
    kept = len(compactable) * kv_heads * tokens - int(quota.evict.sum())
    assert kept == budget.total
    for unit, evict in enumerate(quota.evict.tolist()):
        members = int((quota.unit == unit).sum())
        assert members == {"head": 1, "layer": kv_heads, "global": len(compactable) * kv_heads}[scope]
        assert 0 <= evict <= members * (tokens - min(protected, tokens)), "the protected rows of every member can stay"


def test_ragged_heads_reach_the_budget_and_short_ones_are_left_alone() -> None:
    budget = resolved("10t", 40, protected=2)
    lengths = torch.tensor([[40, 12], [10, 8], [25, 10]])
    assert quotas(budget, "head", lengths, (0, 1, 2)).evict.tolist() == [30, 2, 0, 0, 15, 0]
    assert quotas(budget, "layer", lengths, (0, 1, 2)).evict.tolist() == [32, 0, 15]
    assert quotas(budget, "global", lengths, (0, 1, 2)).evict.tolist() == [105 - 60]


def test_a_layer_table_moves_rows_between_layers_only() -> None:
    budget, lengths = resolved("50%", 40, protected=4), torch.full((3, 2), 40)
    assert quotas(budget, "head", lengths, (0, 1, 2), [1, 2, 3]).evict.tolist() == [30, 30, 20, 20, 10, 10]
    assert quotas(budget, "layer", lengths, (0, 1, 2), [1, 2, 3]).evict.tolist() == [60, 40, 20]
    assert quotas(budget, "global", lengths, (0, 1, 2), [1, 2, 3]).evict.tolist() == [120]


def test_a_model_without_compactable_layers_has_nothing_to_evict() -> None:
    budget = resolved("1GiB", 40, layers=0)
    for scope in ("head", "layer", "global"):
        quota = quotas(budget, scope, torch.full((2, 2), 40), ())
        assert int(quota.evict.sum()) == 0 and bool((quota.unit == -1).all())
