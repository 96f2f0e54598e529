"""The attention that entries receive, gathered while queries pass; it moves with the entries."""

from collections.abc import Sequence

import torch
from torch import Tensor

from bpkv_trt.core.attention import attention_weights
from bpkv_trt.core.running_attention import NEGLIGIBLE, RunningAttention
from bpkv_trt.core.traits import ModelTraits
from bpkv_trt.pool.plan import CompactionPlan
from bpkv_trt.pool.pool import PagedKvPool
from bpkv_trt.runtime.attention import QUERY_BLOCK
from bpkv_trt.runtime.step import Rope


class ReceivedAttention:
    """Running scores of every entry of one sequence, by any number of rules over the same attention weights.

    A rule's score of a head covers the rows up to the last query that counted for it; newer rows have none yet. Scores
    lie on the pool's device; which queries count, and for how much, is settled on the CPU.
    """

    needs_rope = False

    def __init__(
        self, pool: PagedKvPool, traits: ModelTraits, sequence: int, rules: Sequence[RunningAttention]
    ) -> None:
        self.pool, self.traits, self.sequence, self.rules = pool, traits, sequence, tuple(dict.fromkeys(rules))
        nothing = pool.keys.new_zeros(0, dtype=torch.float32)
        self.scores = {
            (layer, head): dict.fromkeys(self.rules, nothing)
            for layer in traits.compactable_layers
            for head in range(traits.kv_heads)
        }
        self.decoded: list[int] | None = None  # by layer, queries since the prompt ended

    def see(self, layer: int, q: Tensor, rope: Rope | None) -> None:
        if layer in self.traits.sliding_layers:
            return
        count, decoded = q.shape[1], None if self.decoded is None else self.decoded[layer]
        entering = {rule: rule.contributions(count, decoded) for rule in self.rules}
        entering = {rule: (carry, weights) for rule, (carry, weights) in entering.items() if bool(weights.any())}
        if entering:
            self._update(layer, q, entering)
        if self.decoded is not None:
            self.decoded[layer] += count

    def _update(self, layer: int, q: Tensor, entering: dict[RunningAttention, tuple[float, Tensor]]) -> None:
        view, group, count = self.pool.view(self.sequence), self.traits.group, q.shape[1]
        weights = torch.stack([weights for _, weights in entering.values()]).float()  # [R, n]
        first = int((weights > NEGLIGIBLE).any(0).nonzero()[0])
        weights = weights[:, first:].to(q.device)
        for head in range(self.traits.kv_heads):
            queries = q[head * group : (head + 1) * group, first:].transpose(0, 1)  # [n - first, G, D]
            received = self._received(queries, view.keys(layer, head), weights)
            for (rule, (carry, counted)), new in zip(entering.items(), received, strict=True):
                last = int(counted.nonzero()[-1])
                new = new[: new.shape[0] - (count - 1 - last)].clone()
                before = self.scores[layer, head][rule]
                new[: before.shape[0]] += carry * before
                self.scores[layer, head] |= {rule: new}

    def _received(self, queries: Tensor, k: Tensor, weights: Tensor) -> Tensor:
        """[R, T]: attention of the last n queries [n, G, D], mean over the group, summed with weights [R, n]."""
        n, length = queries.shape[0], k.shape[0]
        received = torch.zeros(weights.shape[0], length, device=k.device)
        for start in range(0, n, QUERY_BLOCK):
            stop = min(start + QUERY_BLOCK, n)
            seen = length - n + stop
            a = attention_weights(
                queries[start:stop], k[:seen], self.traits.attention_scale, softcap=self.traits.attention_softcap
            )  # [G, block, seen]
            received[:, :seen] += weights[:, start:stop] @ a.mean(0)
        return received

    def prompt_ended(self) -> None:
        """What was seen so far was a prompt, or a further turn of one; what comes is decoded."""
        self.decoded = [0] * self.traits.layers

    def forked(self, sequence: int, rules: Sequence[RunningAttention]) -> "ReceivedAttention":
        """Some rules' scores, for a copy of the sequence; neither sees what the other will."""
        copy = ReceivedAttention(self.pool, self.traits, sequence, rules)
        assert set(copy.rules) <= set(self.rules), "a rule is adopted that the shared sequence was not opened with"
        # `see` and `compacted` put new tensors in place of these
        copy.scores = {key: {rule: scores[rule] for rule in copy.rules} for key, scores in self.scores.items()}
        copy.decoded = None if self.decoded is None else list(self.decoded)
        return copy

    def compacted(self, plan: CompactionPlan) -> None:
        """Keep what the plan keeps, in its order."""
        for (layer, head), scores in self.scores.items():
            kept = torch.from_numpy(plan.kept(layer, head)).long()
            for rule, score in scores.items():
                scores[rule] = score[kept[kept < score.shape[0]].to(score.device)]

    def result(self, rule: RunningAttention) -> Tensor:
        """[L, Hkv, T] fp32, zero beyond a head's length and in sliding-window layers.

        Rows that the rule has not scored yet get the mean of those of their head that it has.
        """
        lengths = self.pool.lengths(self.sequence)
        longest = int(lengths.max())
        result = torch.zeros(self.traits.layers, self.traits.kv_heads, longest, device=self.pool.device)
        for (layer, head), scores in self.scores.items():
            score, length = scores[rule], int(lengths[layer, head])
            scored = score.shape[0]
            result[layer, head, :scored] = score
            if 0 < scored < length:
                result[layer, head, scored:length] = score.mean()
        return result
