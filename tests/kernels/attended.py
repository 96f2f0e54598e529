"""Scoring positions over a paged cache, and what they attend to, in float64."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.kernels.paged_caches import LaidOut, Rows, laid_out, random_rows


@dataclass
class Attended:
    """Positions `counts[b]` of every sequence b, packed; `options` are those of the kernels."""

    q: Tensor  # [S, Hq, D]
    offsets: Tensor  # [B + 1] int32
    counts: list[int]
    keys: Rows
    values: Rows
    layout: dict[str, Any]  # of `laid_out`
    options: dict[str, Any]
    laid: LaidOut = field(init=False)

    def __post_init__(self) -> None:
        self.laid = laid_out(self.keys, self.values, self.q.device, **self.layout)

    @classmethod
    def random(
        cls,
        lengths: list[list[int]],
        counts: list[int],
        *,
        device: torch.device,
        group: int = 2,
        head_dim: int = 16,
        cache: torch.dtype = torch.float32,
        queries: torch.dtype = torch.float32,
        sharpness: float = 1.0,
        common: float = 0.0,
        options: dict[str, Any] | None = None,
        **layout: Any,
    ) -> "Attended":
        """Logits of about `sharpness`; values around a vector of `common` in every element."""
        q = torch.randn(sum(counts), len(lengths[0]) * group, head_dim).to(queries)
        keys = random_rows(lengths, cache, head_dim)
        values = random_rows(lengths, cache, head_dim, common=common)
        spread = keys[0][0].float().std().item() * layout.get("key_scale", 1.0)
        options = {"scale": sharpness / spread / head_dim**0.5, "positions": max(counts)} | (options or {})
        offsets = torch.tensor([0, *counts]).cumsum(0).int()
        return cls(q.to(device), offsets.to(device), counts, keys, values, layout, options)

    def sequence(self, index: int) -> slice:
        """Of the packed positions."""
        return slice(sum(self.counts[:index]), sum(self.counts[: index + 1]))

    def logits(self, sequence: int, head: int) -> Tensor:
        """[G, n, T] float64, -inf where a position does not look."""
        keys = self.keys[sequence][head].double() * self.laid.cache.key_scale
        group = self.q.shape[1] // len(self.keys[0])
        q = self.q[self.sequence(sequence), head * group : (head + 1) * group].cpu().double()
        logits = torch.einsum("mgd,td->gmt", q, keys) * self.options["scale"]
        cap, window = self.options.get("softcap"), self.options.get("window")
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        row = torch.arange(len(keys))
        own = len(keys) - len(q) + torch.arange(len(q)).unsqueeze(1)  # the row that each position owns
        seen = (row <= own) & (row > own - (window or len(keys)))
        return logits.masked_fill(~seen, -torch.inf)
