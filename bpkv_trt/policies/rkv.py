"""R-KV: what the last tokens attend to, less what other keys say already."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from bpkv_trt.config import Regime
from bpkv_trt.core.attention import softcapped
from bpkv_trt.core.budget import Scope
from bpkv_trt.core.statistics import ForwardStatistics
from bpkv_trt.policies.base import Requirement
from bpkv_trt.policies.headwise import HeadwisePolicy
from bpkv_trt.pool.view import SequenceView

LAMBDA = 0.07  # share of the attention; the rest is redundancy
KERNEL = 7  # rows over which the attention's maximum is taken
THRESHOLD = 0.5  # cosine from which two keys are alike
BLOCK = 256  # keys compared with all others at a time, so that memory is linear in the rows


class RKv(HeadwisePolicy):
    """Score: 0.07 max-pooled window attention - 0.93 redundancy, by head.

    Attention: the largest logit of the group at each window position, softmax over the rows before the window, mean
    over the window, maximum over 7 neighbouring rows. Redundancy: the cosine of a row's key to every other row's, mean
    over those, softmax over the rows; each key leaves out its last like one (cosine above 0.5; the head's first row
    where there is none), so that of a group of like rows the newest stays.

    Source: Cai et al., arXiv:2505.24133, and the authors' code (rkv/compression/r1_kv.py), whose defaults these are.
    The window is the M scoring positions (8 there too), and its rows rank above all others. Made for long answers:
    regime `generation` first, every `interval` tokens (128 there too); there the prompt competes with the answer, here
    it has a compaction of its own. A sink logit stands outside a softmax over earlier rows, as in the code.
    """

    name: ClassVar[str] = "rkv"
    source: ClassVar[str] = "arXiv:2505.24133"
    scopes: ClassVar[tuple[Scope, ...]] = ("head", "layer", "global")
    regimes: ClassVar[tuple[Regime, ...]] = ("generation", "deferred", "prefill")
    requires: ClassVar[frozenset[Requirement]] = frozenset({"last_queries"})

    def score_head(self, statistics: ForwardStatistics, view: SequenceView, layer: int, head: int) -> Tensor:
        group = slice(head * self.traits.group, (head + 1) * self.traits.group)
        queries = statistics.q[layer, :, group].float()  # [M, G, D]
        keys, window = view.keys(layer, head).float(), queries.shape[0]
        if keys.shape[0] <= window:
            return keys.new_ones(keys.shape[0])
        logits = (queries @ keys[:-window].T).mul_(self.traits.attention_scale)  # [M, G, n - M]
        largest = softcapped(logits, self.traits.attention_softcap).amax(1)
        attention = torch.softmax(largest, dim=-1).mean(0)
        pooled = F.max_pool1d(attention[None], KERNEL, stride=1, padding=KERNEL // 2)[0]
        scores = LAMBDA * pooled - (1 - LAMBDA) * redundancy(keys)[:-window]
        return F.pad(scores, (0, window), value=1.0)  # no share of attention exceeds 1


def redundancy(keys: Tensor) -> Tensor:
    """[n] softmax over rows of their mean cosine to the others' keys [n, D]; of each, its last like one is left out."""
    unit, n = F.normalize(keys, dim=-1, eps=1e-8), keys.shape[0]
    rows, total = torch.arange(n, device=keys.device), keys.new_zeros(n)
    for start in range(0, n, BLOCK):
        own = rows[start : start + BLOCK, None]
        cosines = (unit[start : start + BLOCK] @ unit.T).scatter_(1, own, 0.0)  # [block, n]
        last = torch.where(cosines > THRESHOLD, rows, 0).amax(1, keepdim=True)
        total += cosines.scatter_(1, last, 0.0).sum(0)
    return torch.softmax(total / n, dim=0)
