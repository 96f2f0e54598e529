"""What a budget asks of every unit of competition: how many entries each must give up."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bpkv_trt.core.budget import ResolvedBudget, Scope, allocate


@dataclass(frozen=True)
class Quota:
    """How many entries to evict, by unit: the heads that compete with one another share a unit.

    Lies where the entries' scores do.
    """

    unit: Tensor  # [L, Hkv] int64, the unit of every head; -1 for heads outside the budget
    evict: Tensor  # [U] int64
    counted: Tensor  # [L, Hkv] int64, rows that the budget counts, protected ones among them; 0 for unit -1

    def keep(self) -> Tensor:
        """[U] int64 counted rows that stay in every unit."""
        inside = self.unit >= 0
        return torch.zeros_like(self.evict).index_add_(0, self.unit[inside], self.counted[inside]) - self.evict

    def protected(self, eligible: Tensor) -> Tensor:
        """[L, Hkv] int64 counted rows that may not go, where `eligible` [L, Hkv, T] may."""
        return self.counted - eligible.sum(-1)


def quotas(
    resolved: ResolvedBudget,
    scope: Scope,
    lengths: Tensor,
    compactable: Sequence[int],
    layer_weights: Sequence[float] | None = None,
    layer_counts: Sequence[int] | None = None,
    device: torch.device | str = "cpu",
) -> Quota:
    """How many entries every unit must evict to reach the budget from `lengths` [L, Hkv], the rows each head has now.

    Counted on the CPU, where `lengths` is; the result lies on `device`.

    With `layer_weights` (one per layer of the model) layers keep rows in proportion to them, never below the protected
    rows and never above the sequence; in `global` scope counts follow the scores, so the weights do not enter here.
    `layer_counts` (one per compactable layer, adding up to the budget) are such rows per head already shared out.
    A unit that already holds no more than its share evicts nothing.
    """
    heads = lengths.shape[1]
    layers = torch.tensor(list(compactable), dtype=torch.int64)
    unit = torch.full(lengths.shape, -1, dtype=torch.int64)
    keep = torch.full((len(layers),), resolved.per_head, dtype=torch.int64)  # per head, by compactable layer
    if layer_counts is not None:
        assert scope != "global" and sum(layer_counts) == int(keep.sum())
        assert all(resolved.protected <= count <= resolved.tokens for count in layer_counts)
        keep = torch.tensor(layer_counts, dtype=torch.int64)
    elif layer_weights is not None and scope != "global" and len(layers):
        assert len(layer_weights) == lengths.shape[0]
        weights = [layer_weights[layer] for layer in compactable]
        keep = torch.tensor(allocate(int(keep.sum()), weights, resolved.protected, resolved.tokens))
    rows = lengths.long()[layers]  # [compactable, Hkv]
    counted = torch.zeros(lengths.shape, dtype=torch.int64).index_copy_(0, layers, rows)
    match scope:
        case "head":
            unit[layers] = torch.arange(rows.numel()).view_as(rows)
            surplus = (rows - keep[:, None]).flatten()
        case "layer":
            unit[layers] = torch.arange(len(layers))[:, None].expand_as(rows)
            surplus = rows.sum(dim=1) - heads * keep
        case "global":
            unit[layers] = 0
            surplus = (rows.sum() - heads * keep.sum())[None]
    surplus = surplus.clamp(min=0)
    assert int(rows.sum() - surplus.sum()) <= resolved.total, "more would stay than the budget has"
    return Quota(*(part.to(device) for part in (unit, surplus, counted)))
