"""What is kept by another measure first, against plain sorts: of each head by itself, and of the heads of each unit."""

from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bpkv_trt.core.quota import Quota
from bpkv_trt.core.safeguard import secured_by_head, secured_by_unit
from bpkv_trt.core.selection import count_by_unit, lowest_scores

LAYERS, HEADS, ROWS = 3, 2, 12
UNITS = {
    "head": torch.arange(6).view(3, 2),
    "layer": torch.tensor([[0, 0], [1, 1], [2, 2]]),
    "global": torch.zeros(3, 2, dtype=torch.int64),
    "a layer outside": torch.tensor([[0, 0], [-1, -1], [0, 0]]),
}


@dataclass
class Case:
    """Ragged heads of which some rows may go, protected rows among the counted ones, and scores with ties."""

    scores: Tensor
    eligible: Tensor
    quota: Quota

    @property
    def units(self) -> range:
        return range(self.quota.evict.numel())

    def heads_of(self, unit: int) -> list[tuple[int, int]]:
        return [(layer, head) for layer, head in (self.quota.unit == unit).nonzero().tolist()]

    def kept_in(self, unit: int) -> int:
        return sum(int(self.quota.counted[each]) for each in self.heads_of(unit)) - int(self.quota.evict[unit])

    def best(self, heads: list[tuple[int, int]], count: int) -> Tensor:
        """The highest scores of some heads, as many as it takes for `count` rows to stay; ties to the earliest row."""
        rows = [(row, *each) for each in heads for row in self.eligible[each].nonzero().flatten().tolist()]
        protected = sum(int(self.quota.counted[each]) for each in heads) - len(rows)
        best = sorted(rows, key=lambda at: (-float(self.scores[at[1], at[2], at[0]]), at))
        safe = torch.zeros_like(self.eligible)
        for row, layer, head in best[: max(count - protected, 0)]:
            safe[layer, head, row] = True
        return safe


@st.composite
def cases(draw: st.DrawFn, scope: str) -> Case:
    unit = UNITS[scope]
    values = st.lists(st.sampled_from([0.0, 1e-6, 0.5, 1.0, 3.0]), min_size=72, max_size=72)
    scores = torch.tensor(draw(values)).view(LAYERS, HEADS, ROWS)
    lengths = torch.tensor(draw(st.lists(st.integers(3, ROWS), min_size=6, max_size=6))).view(LAYERS, HEADS)
    row = torch.arange(ROWS)
    eligible = (row >= 1) & (row < lengths[..., None] - draw(st.integers(0, 2))) & (unit >= 0)[..., None]
    counted = torch.where(unit >= 0, lengths, 0)
    available = [int(eligible[unit == u].sum()) for u in range(int(unit.max()) + 1)]
    return Case(scores, eligible, Quota(unit, torch.tensor([draw(st.integers(0, n)) for n in available]), counted))


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("scope", UNITS)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_every_head_keeps_its_best_up_to_its_share(scope: str, share: float, data: st.DataObject) -> None:
    """And what is left is enough for the quota."""
    case = data.draw(cases(scope))
    safe, truth = secured_by_head(case.scores, case.eligible, case.quota, share), torch.zeros_like(case.eligible)
    for unit in case.units:
        heads = case.heads_of(unit)
        for each in heads:
            truth |= case.best([each], int(share * (case.kept_in(unit) // len(heads))))
    assert torch.equal(safe, truth)
    if share == 0:
        assert not safe.any()
    left = count_by_unit(case.eligible & ~safe, case.quota.unit, len(case.units))
    protected = case.quota.protected(case.eligible).max()
    for unit in case.units:
        if case.kept_in(unit) // len(case.heads_of(unit)) >= protected:  # a budget covers what is protected of a head
            assert left[unit] >= case.quota.evict[unit]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("scope", UNITS)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_every_unit_keeps_its_best_up_to_its_share(scope: str, share: float, data: st.DataObject) -> None:
    """Whichever heads they are in; and what is left is enough for the quota."""
    case = data.draw(cases(scope))
    safe, truth = secured_by_unit(case.scores, case.eligible, case.quota, share), torch.zeros_like(case.eligible)
    for unit in case.units:
        truth |= case.best(case.heads_of(unit), int(share * case.kept_in(unit)))
    assert torch.equal(safe, truth)
    left = count_by_unit(case.eligible & ~safe, case.quota.unit, len(case.units))
    assert (left >= case.quota.evict).all()


@pytest.mark.parametrize("scope", ["head", "layer", "global"])
def test_heads_of_one_length_keep_their_whole_even_part(scope: str) -> None:
    """A share of 1 leaves no choice: every head keeps as many rows, its best ones, and the quota is met."""
    unit, scores = UNITS[scope], torch.rand(LAYERS, HEADS, ROWS, generator=torch.Generator().manual_seed(0))
    eligible = torch.ones_like(scores, dtype=torch.bool)
    eligible[..., [0, 10, 11]] = False  # 3 protected
    heads = 6 // (int(unit.max()) + 1)
    evict = torch.full((int(unit.max()) + 1,), heads * (ROWS - 7))
    quota = Quota(unit, evict, torch.full((LAYERS, HEADS), ROWS))
    safe = secured_by_head(scores, eligible, quota, 1.0)
    assert (safe.sum(-1) == 7 - 3).all() and not (safe & ~eligible).any()
    gone = lowest_scores(-scores, eligible & ~safe, quota).evict  # by the opposite of what is safe
    assert (gone.sum(-1) == ROWS - 7).all() and not (gone & safe).any()
    best = torch.where(eligible, scores, -1).topk(4, dim=-1).indices.sort(-1).values
    assert torch.equal(safe.nonzero()[:, 2].view(LAYERS, HEADS, 4), best)
