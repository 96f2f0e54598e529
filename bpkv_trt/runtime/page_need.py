"""How many pages a request takes, told before it runs."""

from dataclasses import dataclass

import torch

from bpkv_trt.core.quota import Quota
from bpkv_trt.pool.storage import pages_of
from bpkv_trt.runtime.engine import Engine


@dataclass(frozen=True)
class PageNeed:
    """The most pages that a request owns at once, and what a compaction of its prompt borrows meanwhile."""

    pages: int
    scratch: int

    @classmethod
    def of(cls, engine: Engine, prompt: int, answer: int) -> "PageNeed":
        """For so many tokens of the prompt and, at most, of the answer.

        A prompt that is compacted before its first answer token needs its own pages only until then; afterwards what
        is kept of it, and the answer. All other evictions come too late to be counted on: a deferred one may find the
        tokens before it already written, and one of an answer depends on its length.
        """
        compactor = engine.compactor
        if compactor.policy.evicts_nothing or "prefill" not in compactor.config.regime:
            return cls.whole(engine, prompt, answer)
        left = _pages_left(compactor.prompt_quota(prompt), prompt, answer, engine.pool.page_size)
        return cls(max(engine.pool.pages_for(prompt), left), engine.scratch_pages([prompt]))

    @classmethod
    def whole(cls, engine: Engine, prompt: int, answer: int) -> "PageNeed":
        """The same where nothing is ever evicted."""
        return cls(engine.pool.pages_for(prompt + answer), engine.scratch_pages([prompt]))

    @property
    def total(self) -> int:
        """Pages without which the request cannot even run alone."""
        return self.pages + self.scratch


def _pages_left(quota: Quota, tokens: int, further: int, page_size: int) -> int:
    """The most pages that heads of `tokens` rows own after the quota's evictions and `further` rows in every head.

    Heads of a unit share in any way what it keeps, and each may leave all but a row of its last page empty.
    """
    inside = quota.unit >= 0
    heads = torch.bincount(quota.unit[inside], minlength=len(quota.evict))  # [U]
    uneven = (quota.keep() + heads * (further + page_size - 1)) // page_size
    unevicted = pages_of(tokens + further, page_size)
    return int(torch.minimum(uneven, heads * unevicted).sum()) + int((~inside).sum()) * unevicted
