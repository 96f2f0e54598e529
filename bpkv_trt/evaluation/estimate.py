"""The estimate held to the truth: masks whose divergence is both estimated and measured by masked forwards."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bpkv_trt.core.evidence import EvidenceSource, mask_divergence
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


def half_of_a_layer(
    shape: tuple[int, int, int], layers: Sequence[int], rows: slice, generator: torch.Generator
) -> Tensor:
    """Half of the entries of one layer within `rows`, at random: every mask is of the same size."""
    return _random_share(shape, [_pick(layers, generator)], rows, 0.5, generator)


def block_of_heads(
    shape: tuple[int, int, int], layers: Sequence[int], rows: slice, generator: torch.Generator
) -> Tensor:
    """A tenth of the rows, side by side, in one KV head of one layer: every mask is of the same size."""
    mask = torch.zeros(shape, dtype=torch.bool)
    width = (rows.stop - rows.start) // 10
    first = rows.start + int(torch.randint(rows.stop - rows.start - width + 1, (), generator=generator))
    mask[_pick(layers, generator), _pick(range(shape[1]), generator), first : first + width] = True
    return mask


def scattered(shape: tuple[int, int, int], layers: Sequence[int], rows: slice, generator: torch.Generator) -> Tensor:
    """Half of all entries within `rows`, at random over all layers: of one size, without structure."""
    return _random_share(shape, layers, rows, 0.5, generator)


def scattered_of_mixed_size(
    shape: tuple[int, int, int], layers: Sequence[int], rows: slice, generator: torch.Generator
) -> Tensor:
    """From a twentieth to nearly all entries within `rows`, at random over all layers."""
    share = 0.05 + 0.9 * float(torch.rand((), generator=generator))
    return _random_share(shape, layers, rows, share, generator)


MaskKind = Callable[[tuple[int, int, int], Sequence[int], slice, torch.Generator], Tensor]


def masks_of(
    kind: MaskKind, traits: ModelTraits, tokens: int, count: int, seed: int, *, sinks: int = 4, recent: int = 32
) -> Masks:
    """`count` masks over the rows of a sequence that are neither sinks nor recent."""
    generator = torch.Generator().manual_seed(seed)
    shape, rows = (traits.layers, traits.kv_heads, tokens), slice(sinks, tokens - recent)
    for _ in range(count):
        yield kind(shape, traits.compactable_layers, rows, generator)


def _pick(choices: Sequence[int], generator: torch.Generator) -> int:
    return choices[int(torch.randint(len(choices), (), generator=generator))]


def _random_share(
    shape: tuple[int, int, int], layers: Sequence[int], rows: slice, share: float, generator: torch.Generator
) -> Tensor:
    size = (len(layers), shape[1], rows.stop - rows.start)
    drawn = torch.zeros(size, dtype=torch.bool).flatten()
    drawn[torch.randperm(drawn.numel(), generator=generator)[: int(share * drawn.numel())]] = True
    mask = torch.zeros(shape, dtype=torch.bool)
    mask[list(layers), :, rows] = drawn.view(size)
    return mask
