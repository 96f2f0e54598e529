"""Device time of every kernel at the sizes of real models, with the work that each cannot do without."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bpkv_trt.core.deletion import DeletionStatistics
from bpkv_trt.core.divergence import TopKDivergence, position_weights
from bpkv_trt.core.quota import Quota
from bpkv_trt.core.selection import lowest_scores
from bpkv_trt.kernels.compact import compact
from bpkv_trt.kernels.decode import paged_decode_attention
from bpkv_trt.kernels.deletion import deletion_statistics, nomination
from bpkv_trt.kernels.lse import log_sum_exp
from bpkv_trt.kernels.paged import CacheType, PagedCache
from bpkv_trt.kernels.refinement import choose
from bpkv_trt.kernels.score import singleton_scores
from profiles.gpu_session import floors
from profiles.gpu_session.checks import candidate_pool
from profiles.gpu_session.floors import Shape, Work
from profiles.gpu_session.part import Record, Session, run_part
from profiles.gpu_session.stopwatch import Stopwatch

SHAPES: tuple[Shape, ...] = (
    Shape("Llama-3.1-8B", 32, 8, 128, 32, 8.03e9),
    Shape("Llama-3.1-70B", 64, 8, 128, 80, 70.6e9),
    Shape("Qwen3-8B", 32, 8, 128, 36, 8.19e9),
)
LENGTHS: tuple[int, ...] = (65536, 32768, 8192, 131072)  # tokens; first what the targets are about
REHEARSED: tuple[tuple[Shape, ...], tuple[int, ...]] = ((Shape("rehearsal", 4, 2, 32, 2, 1e6),), (64,))
PAGE = 32
LIST = 16  # page lists are multiples of it: Triton compiles a kernel again for a size that 16 does not divide
KEPT = 0.2  # of the rows
POSITIONS, TOP_K = 16, 32  # scoring positions, and logits that the distribution is followed on
PROBED = 40  # scoring positions of the default configuration, with one probe each
BATCHES = (1, 8)
CHOICES = ((8192, 4096), (128, 64))  # candidates, and how many leave; the last as in the default configuration
CHOICES_REHEARSED = ((30, 2),)
HEADS = 256  # that the candidates belong to
REPEATS = 20
FREE = 0.8  # of the device's free memory, for the cache of all layers
BF16 = torch.bfloat16

Timed = tuple[str, Callable[[], object], Work]


@dataclass(frozen=True)
class Layer:
    """A cache, and the memory that its addresses name."""

    cache: PagedCache
    memory: list[Tensor]


def layer(shape: Shape, lengths: Tensor) -> Layer:
    """Random rows in pages in random order, for heads of the given lengths [B, Hkv] int32."""
    device = lengths.device
    pages = -(-int(lengths.max()) // (PAGE * LIST)) * LIST
    table = torch.randperm(lengths.numel() * pages, device=device).view(*lengths.shape, pages).int()
    memory = [torch.randn(table.numel(), PAGE, shape.head_dim, dtype=BF16, device=device) for _ in range(2)]
    addresses = torch.tensor([each.data_ptr() for each in memory], device=device)
    return Layer(PagedCache(addresses, table, table, lengths, CacheType.BF16, PAGE, shape.head_dim), memory)


def full(shape: Shape, sequences: int, rows: int, device: torch.device) -> Tensor:
    """[B, Hkv] equal lengths."""
    return torch.full((sequences, shape.kv_heads), rows, dtype=torch.int32, device=device)


class Scoring:
    """What reads one layer at the scoring positions; the readout has `channels` rows, logits or probes."""

    def __init__(self, held: Layer, shape: Shape, tokens: int, positions: int, channels: int) -> None:
        device = held.cache.device
        heads = (positions, shape.query_heads, shape.head_dim)
        self.held, self.tokens = held, tokens
        self.terms = {"scale": shape.head_dim**-0.5, "positions": positions}
        self.q = torch.randn(heads, dtype=BF16, device=device)
        self.offsets = torch.tensor([0, positions], dtype=torch.int32, device=device)
        self.weights = position_weights(positions, device=device)
        self.context, self.slopes = (torch.randn(heads, device=device) for _ in range(2))
        self.readout = 1e-2 * torch.randn(positions, channels, *heads[1:], dtype=BF16, device=device)
        self.p = torch.softmax(torch.randn(positions, channels, device=device), -1) if channels == TOP_K else None
        self.evict = torch.rand(1, shape.kv_heads, tokens, device=device) >= KEPT
        self.centre = torch.randn(1, shape.kv_heads, shape.head_dim, device=device)
        self.least = torch.zeros(1, shape.kv_heads, device=device)
        self.sums = self.lse()
        self.kept_mass = self.deletion().kept_mass

    def lse(self) -> Tensor:
        return log_sum_exp(self.q, self.offsets, self.held.cache, **self.terms)

    def score(self) -> Tensor:
        given = (self.q, self.context, self.readout, self.p, self.weights, self.offsets, self.held.cache, self.sums)
        return singleton_scores(*given, longest=self.tokens, **self.terms)

    def deletion(self) -> DeletionStatistics:
        given = (self.q, self.evict, self.centre, self.offsets, self.held.cache, self.sums)
        return deletion_statistics(*given, **self.terms)

    def nomination(self) -> tuple[Tensor, Tensor]:
        state = (self.kept_mass, self.context, self.slopes, self.least)
        given = (self.q, self.evict, self.centre, *state, self.offsets, self.held.cache, self.sums)
        return nomination(*given, **self.terms)


def scoring(shape: Shape, tokens: int, device: torch.device) -> Iterator[Timed]:
    """The published method's positions with all its kernels, and those of the default configuration."""
    held = layer(shape, full(shape, 1, tokens, device))
    given, of = (shape, tokens, POSITIONS), f"M {POSITIONS}"
    published = Scoring(held, shape, tokens, POSITIONS, TOP_K)
    yield f"lse, {of}", published.lse, floors.lse(*given)
    yield f"score, {of}, K {TOP_K}", published.score, floors.score(*given, TOP_K)
    yield f"deletion, {of}", published.deletion, floors.deletion(*given)
    yield f"nomination, {of}", published.nomination, floors.nomination(*given)
    probed = Scoring(held, shape, tokens, PROBED, 1)
    yield f"lse, M {PROBED}", probed.lse, floors.lse(shape, tokens, PROBED)
    yield f"score, M {PROBED}, 1 probe", probed.score, floors.score(shape, tokens, PROBED, 1)


def decoding(shape: Shape, tokens: int, batch: int, device: torch.device) -> Iterator[Timed]:
    """One layer's attention of one token: over all rows, a fifth of them, and a fifth shared out unequally."""
    few = round(KEPT * tokens)
    ragged = (few * (0.25 + 1.5 * torch.rand(batch, shape.kv_heads, device=device))).int().clamp_min(1)
    q = torch.randn(batch, shape.query_heads, shape.head_dim, dtype=BF16, device=device)
    for name, lengths in (
        ("decode", full(shape, batch, tokens, device)),
        ("decode, a fifth", full(shape, batch, few, device)),
        ("decode, a ragged fifth", ragged),
    ):
        held, rows = layer(shape, lengths), lengths.double().mean().item()
        yield (
            name,
            lambda: paged_decode_attention(q, held.cache, scale=shape.head_dim**-0.5),  # noqa: B023 (run at once)
            floors.decode(shape, rows, batch),
        )


def compaction(shape: Shape, tokens: int, device: torch.device) -> tuple[int, Timed]:
    """All layers in one launch, or as many as there is memory for; and how many those are."""
    layers, size = shape.layers, 4.0 * shape.kv_heads * tokens * shape.head_dim
    if device.type == "cuda":
        torch.cuda.empty_cache()
        layers = max(1, min(layers, int(FREE * torch.cuda.mem_get_info()[0] / size)))
    held = layer(shape, full(shape, layers, tokens, device))
    kept = torch.rand(layers * shape.kv_heads, tokens, device=device) < KEPT
    head, row = kept.nonzero(as_tuple=True)
    offsets = torch.cat([head.new_zeros(1), kept.sum(1).cumsum(0)])
    moved = int((row != torch.arange(len(row), device=device) - offsets[head]).sum())
    rows = row.int()
    positions = torch.zeros(held.cache.key_pages.numel(), PAGE, dtype=torch.int32, device=device)
    return layers, ("compact", lambda: compact(rows, offsets, held.cache, positions), floors.compact(shape, moved))


def ranking(shape: Shape, tokens: int, device: torch.device) -> Timed:
    """Stage 1 over all layers, by torch: the lowest scores of all."""
    scores = torch.rand(shape.layers, shape.kv_heads, tokens, device=device)
    unit = torch.zeros(scores.shape[:2], dtype=torch.int64, device=device)
    leave = torch.tensor([round((1 - KEPT) * scores.numel())], device=device)
    quota = Quota(unit, leave, torch.full_like(unit, tokens))
    eligible = torch.ones(scores.shape, dtype=torch.bool, device=device)
    return "rank", lambda: lowest_scores(scores, eligible, quota), floors.rank(scores.numel())


def choosing(candidates: int, evictions: int, shape: Shape, device: torch.device) -> Timed:
    """Stage 2's choice, one eviction after the other; a repeat goes on from where the last one ended."""
    heads, group = min(HEADS, candidates), shape.query_heads // shape.kv_heads
    sizes = {"candidates": candidates, "heads": heads, "group": group, "positions": POSITIONS, "channels": TOP_K}
    pool = candidate_pool(**sizes, device=device)
    unit = torch.zeros(candidates, dtype=torch.int64, device=device)
    p = torch.softmax(torch.randn(POSITIONS, TOP_K, device=device), -1)
    divergence = TopKDivergence(p, position_weights(POSITIONS, device=device))
    given = (
        torch.zeros_like(p),
        unit,
        torch.tensor([evictions], device=device),
        torch.zeros(candidates, device=device),
    )
    work = floors.choose(candidates, evictions, POSITIONS, TOP_K, heads, group)
    return f"choose {evictions} of {candidates}", lambda: choose(pool, *given, divergence), work


def measure(session: Session) -> Iterator[Record]:
    torch.manual_seed(session.seed)
    device = session.device
    shapes, lengths = REHEARSED if session.rehearse else (SHAPES, LENGTHS)
    if session.small:
        lengths = lengths[2:3]
    watch = Stopwatch(device, 1 if session.tiny else REPEATS)

    def record(shape: Shape, tokens: int, timed: Timed, *, at_once: bool = False, **more: int) -> Record:
        name, run, work = timed
        ms = watch.once(run) if at_once else watch.milliseconds(run)
        if session.small:
            return {"compiled": f"{shape.name}: {name}"}
        return {"model": shape.name, "kernel": name, "tokens": tokens, "batch": 1, "ms": ms,
                "flops": work.flops, "bytes": work.bytes} | more  # fmt: skip

    for shape in shapes[session.share :: session.shares]:
        for tokens in lengths:
            for timed in scoring(shape, tokens, device):
                yield record(shape, tokens, timed)
            for batch in BATCHES:
                for timed in decoding(shape, tokens, batch, device):
                    yield record(shape, tokens, timed, batch=batch)
            layers, timed = compaction(shape, tokens, device)
            yield record(shape, tokens, timed, layers=layers)
            del timed
            timed = ranking(shape, tokens, device)
            timed[1]()  # warms up
            yield record(shape, tokens, timed, at_once=True, layers=shape.layers)
            if shape == shapes[0] and tokens == lengths[0]:
                for candidates, evictions in CHOICES if session.device.type == "cuda" else CHOICES_REHEARSED:
                    choosing(candidates, 2, shape, device)[1]()  # compiles
                    yield record(shape, tokens, choosing(candidates, evictions, shape, device), at_once=True)


if __name__ == "__main__":
    run_part(measure)
