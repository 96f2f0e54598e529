import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bpkv_trt.core.quota import Quota
from bpkv_trt.core.selection import lowest_scores
from bpkv_trt.core.stability import LEAST_MASS, admissible_walk

LAYERS, HEADS, ROWS = 3, 2, 7
UNITS = {
    "head": torch.arange(6).view(3, 2),
    "layer": torch.tensor([[0, 0], [1, 1], [2, 2]]),
    "global": torch.zeros(3, 2, dtype=torch.int64),
    "a layer outside": torch.tensor([[0, 0], [-1, -1], [0, 0]]),
}


def one_at_a_time(scores: Tensor, eligible: Tensor, quota: Quota) -> Tensor:
    """The definition: entries in order of (score, row, layer, head), taken while their unit still owes."""
    owed = quota.evict.tolist()
    evict = torch.zeros_like(eligible)
    entries = [
        (float(scores[layer, head, row]), row, layer, head)
        for layer, head, row in eligible.nonzero().tolist()
        if quota.unit[layer, head] >= 0
    ]
    for _, row, layer, head in sorted(entries):
        unit = int(quota.unit[layer, head])
        if owed[unit] > 0:
            owed[unit] -= 1
            evict[layer, head, row] = True
    return evict


@pytest.mark.parametrize("scope", UNITS)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_the_lowest_of_every_unit_ties_to_the_earliest_row(scope, data):
    unit = UNITS[scope]
    values = st.lists(st.sampled_from([0.0, 1e-12, 1.0, 2.0, 3e38]), min_size=42, max_size=42)
    scores = torch.tensor(data.draw(values)).view(LAYERS, HEADS, ROWS)
    eligible = torch.tensor(data.draw(st.lists(st.booleans(), min_size=42, max_size=42))).view(LAYERS, HEADS, ROWS)
    available = [int(eligible[unit == u].sum()) for u in range(int(unit.max()) + 1)]
    quota = Quota(unit, torch.tensor([data.draw(st.integers(0, n)) for n in available]), torch.zeros_like(unit))
    selection = lowest_scores(scores, eligible, quota)
    assert torch.equal(selection.evict, one_at_a_time(scores, eligible, quota))
    assert selection.estimated_kl is None and selection.epsilon_relaxed == selection.rejected == 0


def test_a_unit_that_owes_more_than_it_has_is_an_error():
    eligible = torch.zeros(1, 2, 4, dtype=torch.bool)
    eligible[0, 0] = True
    with pytest.raises(AssertionError, match="fewer eligible"):
        lowest_scores(
            torch.zeros(1, 2, 4), eligible, Quota(torch.tensor([[0, 1]]), torch.tensor([1, 1]), torch.zeros(1, 2))
        )


def walk_one_at_a_time(a: Tensor, order: list[int], epsilon: float, limit: int | None) -> list[int]:
    left = torch.ones(a.shape[:2], dtype=torch.float64)
    taken: list[int] = []
    for row in order:
        if limit is not None and len(taken) == limit:
            break
        after = left - a[:, :, row].double()
        if bool((after >= max(epsilon, LEAST_MASS)).all()):
            left = after
            taken.append(row)
    return taken


@settings(deadline=None, max_examples=300)
@given(
    sixteenths=st.lists(st.lists(st.integers(0, 6), min_size=9, max_size=9), min_size=4, max_size=4),
    order=st.permutations(range(9)).flatmap(lambda rows: st.integers(0, 9).map(lambda n: rows[:n])),
    epsilon=st.sampled_from([0.0, 0.0625, 0.25, 0.5, 1.0]),
    limit=st.none() | st.integers(0, 9),
)
def test_the_walk_in_rounds_takes_what_a_walk_by_rows_takes(sixteenths, order, epsilon, limit):
    # Sixteenths are exact in binary, so that ties with the bound are real ties.
    a = torch.tensor(sixteenths).float().view(2, 2, 9) / 16
    taken = admissible_walk(a, torch.tensor(order, dtype=torch.int64), epsilon, limit)
    assert sorted(walk_one_at_a_time(a, order, epsilon, limit)) == taken.nonzero().flatten().tolist()


@pytest.mark.parametrize("epsilon", [0.01, 0.2, 0.6])
def test_the_walk_on_peaked_attention(epsilon):
    a = torch.softmax(torch.randn(3, 4, 500) * 4, -1)
    order = torch.randperm(500)
    taken = admissible_walk(a, order, epsilon)
    assert sorted(walk_one_at_a_time(a, order.tolist(), epsilon, None)) == taken.nonzero().flatten().tolist()
    assert 0 < taken.sum() < 500
    assert (1 - a[:, :, taken].double().sum(-1) >= epsilon).all()
