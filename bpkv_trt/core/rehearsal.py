"""What entries receive while their tokens are repeated: measured for some, carried over to the others."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bpkv_trt.core.held_rows import HeldRows
from bpkv_trt.core.traits import ModelTraits

RIDGE = 30.0  # of 3 to 100, which hardly differ (profiles/quality/NOTES.md)
LEAST = 1e-6  # attention below this is all alike


@dataclass(frozen=True)
class Rehearsal:
    """Some entries of a sequence of which nothing has been evicted, and the most attention each of them got from the
    queries of a repetition of its own passage.
    """

    positions: Tensor  # [m] int64, logical, ascending
    attention: Tensor  # [L, Hkv, m] fp32; layers outside the budget hold 0


@torch.no_grad()
def carried_over(rehearsal: Rehearsal, view: HeldRows, traits: ModelTraits) -> Tensor:
    """The logarithm of the attention that every entry would receive if its passage were repeated, [L, Hkv, T] fp32.

    Measured where it was rehearsed. Elsewhere each head has a ridge regression of its own on its keys and values and
    their norms, all standardised: in closed form, w = (X' X + r I)^-1 X' (y - mean y). Layers outside the budget
    hold 0.
    """
    table = torch.zeros(traits.layers, traits.kv_heads, int(view.lengths.max()), device=rehearsal.attention.device)
    for layer in traits.compactable_layers:
        for head in range(traits.kv_heads):
            k, v = view.keys(layer, head).float(), view.values(layer, head).float()
            known = rehearsal.attention[layer, head].clamp_min(LEAST).log()
            table[layer, head, : k.shape[0]] = _regressed(_features(k, v), rehearsal.positions, known)
    return table


def _features(k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([k, v, k.norm(dim=-1, keepdim=True), v.norm(dim=-1, keepdim=True)], dim=-1)  # [n, 2 D + 2]


def _regressed(features: Tensor, rows: Tensor, known: Tensor) -> Tensor:
    # features [n, F], known [m] of `rows` -> [n]
    spread, middle = torch.std_mean(features[rows], dim=0, correction=0)
    x = (features - middle) / spread.clamp_min(LEAST)
    own, mean = x[rows], known.mean()
    normal = own.T @ own + RIDGE * torch.eye(x.shape[1], device=x.device)
    estimate: Tensor = x @ torch.linalg.solve(normal, own.T @ (known - mean)) + mean
    estimate[rows] = known
    return estimate
