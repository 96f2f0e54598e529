"""What every head keeps for its own sake, against a plain sort of each head by itself."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bpkv_trt.core.quota import Quota
from bpkv_trt.core.safeguard import secured
from bpkv_trt.core.selection import count_by_unit, lowest_scores

LAYERS, HEADS, ROWS = 3, 2, 12
UNITS = {
    "head": torch.arange(6).view(3, 2),
    "layer": torch.tensor([[0, 0], [1, 1], [2, 2]]),
    "global": torch.zeros(3, 2, dtype=torch.int64),
    "a layer outside": torch.tensor([[0, 0], [-1, -1], [0, 0]]),
}


def by_sorting(scores: Tensor, eligible: Tensor, quota: Quota, share: float) -> Tensor:
    """The definition, one head after the other."""
    safe = torch.zeros_like(eligible)
    for layer in range(LAYERS):
        for head in range(HEADS):
            unit = int(quota.unit[layer, head])
            if unit < 0:
                continue
            members = (quota.unit == unit).nonzero().tolist()
            kept = sum(int(quota.counted[one, other]) for one, other in members) - int(quota.evict[unit])
            rows = eligible[layer, head].nonzero().flatten().tolist()
            protected = int(quota.counted[layer, head]) - len(rows)
            wanted = max(int(share * (kept // len(members))) - protected, 0)
            best = sorted(rows, key=lambda row: (-float(scores[layer, head, row]), row))  # noqa: B023 (used at once)
            safe[layer, head, best[:wanted]] = True
    return safe


def unit_sizes(unit: Tensor) -> Tensor:
    return unit[unit >= 0].bincount()


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("scope", UNITS)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_every_head_keeps_its_best_up_to_its_share(scope: str, share: float, data: st.DataObject) -> None:
    """Ragged heads, protected rows among the counted ones, ties; and what is left is enough for the quota."""
    unit = UNITS[scope]
    values = st.lists(st.sampled_from([0.0, 1e-6, 0.5, 1.0, 3.0]), min_size=72, max_size=72)
    scores = torch.tensor(data.draw(values)).view(LAYERS, HEADS, ROWS)
    lengths = torch.tensor(data.draw(st.lists(st.integers(3, ROWS), min_size=6, max_size=6))).view(LAYERS, HEADS)
    row = torch.arange(ROWS)
    eligible = (row >= 1) & (row < lengths[..., None] - data.draw(st.integers(0, 2))) & (unit >= 0)[..., None]
    counted = torch.where(unit >= 0, lengths, 0)
    available = [int(eligible[unit == u].sum()) for u in range(int(unit.max()) + 1)]
    quota = Quota(unit, torch.tensor([data.draw(st.integers(0, n)) for n in available]), counted)
    safe = secured(scores, eligible, quota, share)
    assert torch.equal(safe, by_sorting(scores, eligible, quota, share))
    if share == 0:
        assert not safe.any()
    left, even = count_by_unit(eligible & ~safe, unit, len(available)), quota.keep() // unit_sizes(unit)
    enough = even >= quota.protected(eligible).max()  # where a budget covers what is protected of every head
    assert (left >= quota.evict)[enough].all()


@pytest.mark.parametrize("scope", ["head", "layer", "global"])
def test_heads_of_one_length_keep_their_whole_even_part(scope: str) -> None:
    """A share of 1 leaves no choice: every head keeps as many rows, its best ones, and the quota is met."""
    unit, scores = UNITS[scope], torch.rand(LAYERS, HEADS, ROWS, generator=torch.Generator().manual_seed(0))
    eligible = torch.ones_like(scores, dtype=torch.bool)
    eligible[..., [0, 10, 11]] = False  # 3 protected
    heads = 6 // (int(unit.max()) + 1)
    evict = torch.full((int(unit.max()) + 1,), heads * (ROWS - 7))
    quota = Quota(unit, evict, torch.full((LAYERS, HEADS), ROWS))
    safe = secured(scores, eligible, quota, 1.0)
    assert (safe.sum(-1) == 7 - 3).all() and not (safe & ~eligible).any()
    gone = lowest_scores(-scores, eligible & ~safe, quota).evict  # by the opposite of what is safe
    assert (gone.sum(-1) == ROWS - 7).all() and not (gone & safe).any()
    best = torch.where(eligible, scores, -1).topk(4, dim=-1).indices.sort(-1).values
    assert torch.equal(safe.nonzero()[:, 2].view(LAYERS, HEADS, 4), best)
