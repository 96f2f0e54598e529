"""The epsilon rule: no head may lose so much of its attention that renormalising what is left means nothing."""

import torch
from torch import Tensor

LEAST_MASS = 2.0**-24  # what an epsilon of 0 still asks for: a retained mass that fp32 tells from none


def admissible_walk(a: Tensor, order: Tensor, epsilon: float, limit: int | None = None) -> Tensor:
    """Take rows in `order`, skipping every one that would leave some (query head, position) less than epsilon.

    a [G, M, T] weights of one KV head, order [N] int64 distinct rows, best first; stops after `limit` rows. Returns
    [T] bool, the rows taken: what a walk one row at a time takes, in rounds of cumulative sums. A round takes the
    longest prefix that fits, drops the row after it and all that no longer fit alone (slack only shrinks, so the walk
    would skip them too).
    """
    taken = torch.zeros(a.shape[-1], dtype=torch.bool, device=a.device)
    wanted = order.shape[0] if limit is None else min(limit, order.shape[0])
    mass = a.flatten(0, 1)[:, order].double()  # [G M, N]
    slack = torch.full((mass.shape[0], 1), 1.0 - max(epsilon, LEAST_MASS), dtype=torch.float64, device=a.device)
    while order.shape[0] > 0 and wanted > 0:
        removed = mass.cumsum(1)
        fitting = int((removed <= slack).all(0).sum())
        taken[order[: min(fitting, wanted)]] = True
        wanted -= min(fitting, wanted)
        if fitting > 0:
            slack = slack - removed[:, fitting - 1 : fitting]
        mass, order = mass[:, fitting + 1 :], order[fitting + 1 :]
        alone = (mass <= slack).all(0)
        mass, order = mass[:, alone], order[alone]
    return taken
