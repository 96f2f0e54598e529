"""The estimate held to the truth: masks whose divergence is both estimated and measured by masked forwards."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bpkv_trt.core.evidence import mask_divergence
from bpkv_trt.core.evidence_source import EvidenceSource
from bpkv_trt.core.statistics import ForwardStatistics
from bpkv_trt.core.traits import ModelTraits
from bpkv_trt.evaluation.ranks import spearman
from bpkv_trt.pool.view import SequenceView
from bpkv_trt.runtime.engine import Engine

Masks = Iterator[Tensor]  # [L, Hkv, T] bool each


@dataclass(frozen=True)
class Study:
    """Many masks of one kind on one sequence: what each really costs, and what was thought of it."""

    truth: tuple[float, ...]  # KL, mean over the scoring positions, whole vocabulary
    estimates: dict[str, tuple[float, ...]]  # by readout, and SnapKV's sum of attention

    def spearman(self) -> dict[str, float]:
        """Rank correlation of every estimate with the truth."""
        return {name: spearman(values, self.truth) for name, values in self.estimates.items()}


def study(engines: dict[str, Engine], tokens: Sequence[int], masks: Masks, positions: int) -> Study:
    """Estimate and measure each mask on a sequence of `tokens`.

    engines: by readout, of one model. The truth is the last `positions` tokens run again with the mask's entries
    hidden, all other K and V frozen as they were cached.
    """
    sequences = {name: engine.open(len(tokens)) for name, engine in engines.items()}
    for name, engine in engines.items():
        engine.encode([(sequences[name], tokens)])
    collected = {
        name: engine.statistics.collect(sequences[name], positions, engine.trace) for name, engine in engines.items()
    }
    name, engine = next(iter(engines.items()))
    host, sequence, view = engine.host, sequences[name], engine.pool.view(sequences[name])
    attention = attention_sums(collected[name], view, host.traits)
    full = torch.log_softmax(host.replay(sequence, positions).logits.double(), -1)
    truth, estimates = list[float](), {key: list[float]() for key in (*engines, "attention")}
    for mask in (each.to(attention.device) for each in masks):
        masked = torch.log_softmax(host.replay(sequence, positions, mask).logits.double(), -1)
        truth.append(float((full.exp() * (full - masked)).sum(-1).mean()))
        estimates["attention"].append(float(attention[mask].sum()))
        for key, statistics in collected.items():
            assert statistics.readout is not None
            source = EvidenceSource(statistics, engines[key].pool.view(sequences[key]), host.traits)
            estimates[key].append(mask_divergence(source, statistics.readout.divergence, mask))
    for key, each in engines.items():
        each.close(sequences[key])
    return Study(tuple(truth), {key: tuple(values) for key, values in estimates.items()})


def attention_sums(statistics: ForwardStatistics, view: SequenceView, traits: ModelTraits) -> Tensor:
    """[L, Hkv, T]: attention from the scoring positions, mean over positions and group (SnapKV's score, not pooled)."""
    source = EvidenceSource(statistics, view, traits)
    sums = statistics.q.new_zeros(traits.layers, traits.kv_heads, int(view.lengths.max()), dtype=torch.float32)
    for layer in traits.compactable_layers:
        for head in range(traits.kv_heads):
            a = source.attention(layer, head).a
            sums[layer, head, : a.shape[-1]] = a.mean((0, 1))
    return sums
