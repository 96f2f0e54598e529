"""What kernels are compiled for: the launches that a model and its cache need, whatever the sizes at run time."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bpkv_trt.core.candidates import CandidatePool
from bpkv_trt.core.divergence import FisherDivergence, TopKDivergence
from bpkv_trt.errors import ConfigError
from bpkv_trt.kernels.compact import compact
from bpkv_trt.kernels.decode import MAX_SPLITS, paged_decode_attention
from bpkv_trt.kernels.deletion import deletion_statistics, nomination
from bpkv_trt.kernels.launch import Launch, recorded
from bpkv_trt.kernels.lse import log_sum_exp
from bpkv_trt.kernels.paged import ROW_BYTES, CacheType, PagedCache
from bpkv_trt.kernels.positions import BLOCK_ROWS
from bpkv_trt.kernels.refinement import MOST_CHANNELS, choose
from bpkv_trt.kernels.score import singleton_scores

SMALLEST_HEAD, LARGEST_HEAD = 16, 256  # numbers; more than 256 have no tiles that fit
MOST_KV_HEADS = 2**16 - 1  # of a grid's second dimension
MOST_ROWS = 2**20  # of a page; kernels count rows in int32
LEAST_SOFTCAP, LARGEST_SOFTCAP = 0.001, torch.finfo(torch.float32).max
MOST_ELEMENTS = 2**31  # of one sequence's readout: kernels count them in int32


@dataclass(frozen=True)
class KernelConfiguration:
    """One model, cache and readout. What is not here is an argument of the launch: lengths, scales, windows, counts."""

    query_heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    page_size: int = 32  # rows
    cache: CacheType = CacheType.BF16
    activations: torch.dtype = torch.bfloat16  # of queries, readout and attention output
    shared_pages: bool = False  # TensorRT-LLM's blocks of all KV heads, in place of pages of one
    softcap: float | None = None
    positions: int = 16  # scoring positions of a sequence, at most
    channels: int = 32  # of the readout: logits, or probes
    probes: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigError, with the reason, for what has no kernels."""
        for name in ("query_heads", "kv_heads", "page_size", "positions", "channels"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give 1 or more.")
        if self.query_heads % self.kv_heads or self.query_heads > BLOCK_ROWS * self.kv_heads:
            raise ConfigError(
                f"query_heads is {self.query_heads} with {self.kv_heads} KV heads; give a multiple of these, at most "
                f"{BLOCK_ROWS} times as many."
            )
        unit = ROW_BYTES // self.cache.itemsize
        if not SMALLEST_HEAD <= self.head_dim <= LARGEST_HEAD or self.head_dim % unit:
            raise ConfigError(
                f"head_dim is {self.head_dim}; give a multiple of {unit} from {SMALLEST_HEAD} to {LARGEST_HEAD}, so "
                f"that rows in {self.cache.value} are multiples of {ROW_BYTES} bytes."
            )
        for name, most in (("kv_heads", MOST_KV_HEADS), ("page_size", MOST_ROWS), ("channels", MOST_CHANNELS)):
            if getattr(self, name) > most:
                raise ConfigError(f"{name} is {getattr(self, name)}; give at most {most}.")
        if self.positions * self.channels * self.query_heads * self.head_dim > MOST_ELEMENTS:
            raise ConfigError(
                f"positions is {self.positions} with {self.channels} channels of {self.query_heads} heads of "
                f"{self.head_dim}, more than {MOST_ELEMENTS:,} numbers; give fewer of one of them."
            )
        if self.softcap is not None and not LEAST_SOFTCAP <= self.softcap <= LARGEST_SOFTCAP:
            raise ConfigError(f"softcap is {self.softcap}; give a number from {LEAST_SOFTCAP}, or none.")
        try:
            self.cache.operand(self.activations)
        except TypeError as error:
            fitting = self.cache.value if self.cache.itemsize > 1 else "bf16"
            raise ConfigError(f"{error} Give --activations {fitting}, or another type of cache.") from None

    def document(self) -> dict[str, Any]:
        """Its fields, as a manifest has them."""
        return asdict(self) | {"cache": self.cache.value, "activations": CacheType.of(self.activations).value}


@dataclass(frozen=True)
class Sizes:
    """What differs from one launch to the next."""

    positions: int
    splits: int = 1  # of decode attention
    sequences: int = 1
    tokens: int = 1  # rows of the longest head, and candidates of stage 2


def launches(configuration: KernelConfiguration) -> list[Launch]:
    """All that may be launched under a configuration, with tensors on `meta`; many differ in sizes alone.

    Constants of the kernels that follow from sizes at run time are powers of two, and each of these is here: a larger
    one would serve too, but take a lane's time for nothing (at one position four times the products).
    """
    with recorded() as notes:
        for positions in _powers_up_to(configuration.positions):
            launch_all(configuration, Sizes(positions))
        for splits in _powers_up_to(MAX_SPLITS):
            _decode(configuration, Sizes(1, splits))
    return notes


def score_launches(configuration: KernelConfiguration) -> list[Launch]:
    """Those of `launches` that score, for an attention output in the type of the queries: what an engine carries."""
    with recorded() as notes:
        for positions in _powers_up_to(configuration.positions):
            sizes = Sizes(positions)
            _singleton_scores(configuration, sizes, _normalise(configuration, sizes), (configuration.activations,))
    return notes


def session_launches(configuration: KernelConfiguration) -> list[Launch]:
    """Those of `launches` that follow the scores of an engine: the choice of a mask, and the packing of what stays."""
    with recorded() as notes:
        for positions in _powers_up_to(configuration.positions):
            sizes = Sizes(positions)
            _judge_masks(configuration, sizes, _normalise(configuration, sizes))
        _refine(configuration, Sizes(configuration.positions))
        _compact(configuration, Sizes(1))
    return notes


def launch_all(configuration: KernelConfiguration, sizes: Sizes) -> None:
    """Call every launcher once, or once for every type that an argument may have."""
    _score(configuration, sizes)
    _refine(configuration, sizes)
    _compact(configuration, sizes)
    _decode(configuration, sizes)


def _powers_up_to(most: int) -> Iterator[int]:
    number = 1
    while number < most:
        yield number
        number *= 2
    yield most


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _cache(configuration: KernelConfiguration, sizes: Sizes) -> PagedCache:
    lists = 1 if configuration.shared_pages else configuration.kv_heads
    pages = _empty(sizes.sequences, lists, -(-sizes.tokens // configuration.page_size), dtype=torch.int32)
    return PagedCache(
        addresses=_empty(2, dtype=torch.int64),
        key_pages=pages,
        value_pages=pages,
        lengths=_empty(sizes.sequences, configuration.kv_heads, dtype=torch.int32),
        type=configuration.cache,
        page_size=configuration.page_size,
        head_dim=configuration.head_dim,
        shared_pages=configuration.shared_pages,
    )


def _score(configuration: KernelConfiguration, sizes: Sizes) -> None:
    """The pass of stage 1, and those of stage 2 that read the cache."""
    normalised = _normalise(configuration, sizes)
    _singleton_scores(configuration, sizes, normalised, (configuration.activations, torch.float32))
    _judge_masks(configuration, sizes, normalised)


class _Normalised(NamedTuple):
    """What both stages take, the cache's logarithms of the softmax's denominators among it."""

    q: Tensor
    offsets: Tensor
    cache: PagedCache
    lse: Tensor
    options: dict[str, Any]


def _normalise(configuration: KernelConfiguration, sizes: Sizes) -> _Normalised:
    cache = _cache(configuration, sizes)
    rows, heads, width = sizes.sequences * sizes.positions, configuration.query_heads, configuration.head_dim
    q = _empty(rows, heads, width, dtype=configuration.activations)
    offsets = _empty(sizes.sequences + 1, dtype=torch.int32)
    options: dict[str, Any] = {"scale": 1.0, "softcap": configuration.softcap, "positions": sizes.positions}
    return _Normalised(q, offsets, cache, log_sum_exp(q, offsets, cache, **options), options)


def _judge_masks(configuration: KernelConfiguration, sizes: Sizes, normalised: _Normalised) -> None:
    q, offsets, cache, lse, options = normalised
    heads, width = q.shape[1:]
    entries = cache.lengths.shape
    evict, centre = _empty(*entries, sizes.tokens, dtype=torch.bool), _empty(*entries, width)
    sums = deletion_statistics(q, evict, centre, offsets, cache, lse, **options)
    state = (sums.kept_mass, sums.kept_sum, _empty(len(q), heads, width), _empty(*entries))
    nomination(q, evict, centre, *state, offsets, cache, lse, **options)


def _singleton_scores(
    configuration: KernelConfiguration, sizes: Sizes, normalised: _Normalised, contexts: tuple[torch.dtype, ...]
) -> None:
    """Stage 1, for each type that the attention output may have."""
    q, offsets, cache, lse, options = normalised
    rows, heads, width = q.shape
    readout = _empty(rows, configuration.channels, heads, width, dtype=configuration.activations)
    p, weights = None if configuration.probes else _empty(rows, configuration.channels), _empty(rows)
    for dtype in dict.fromkeys(contexts):
        context = _empty(rows, heads, width, dtype=dtype)
        singleton_scores(q, context, readout, p, weights, offsets, cache, lse, longest=sizes.tokens, **options)


def _refine(configuration: KernelConfiguration, sizes: Sizes) -> None:
    group = configuration.query_heads // configuration.kv_heads
    positions, channels = sizes.positions, configuration.channels
    index = _empty(sizes.tokens, dtype=torch.int64)
    pool = CandidatePool(
        layer=index,
        head=index,
        row=index,
        owner=index,
        a=_empty(sizes.tokens, group, positions),
        values=_empty(sizes.tokens, positions, channels, group),
        mass=_empty(1, group, positions),
        contexts=_empty(1, positions, channels, group),
    )
    weights = _empty(positions)
    divergence = (
        FisherDivergence(weights) if configuration.probes else TopKDivergence(_empty(positions, channels), weights)
    )
    choose(pool, _empty(positions, channels), index, index[:1], _empty(sizes.tokens), divergence)


def _compact(configuration: KernelConfiguration, sizes: Sizes) -> None:
    cache = _cache(configuration, sizes)
    heads = sizes.sequences * configuration.kv_heads
    rows, offsets = _empty(heads * sizes.tokens, dtype=torch.int32), _empty(heads + 1, dtype=torch.int64)
    positions = None if configuration.shared_pages else _empty(1, configuration.page_size, dtype=torch.int32)
    compact(rows, offsets, cache, positions)  # with the offsets of a `CompactionPlan`


def _decode(configuration: KernelConfiguration, sizes: Sizes) -> None:
    q = _empty(sizes.sequences, configuration.query_heads, configuration.head_dim, dtype=configuration.activations)
    cache = _cache(configuration, sizes)
    paged_decode_attention(q, cache, scale=1.0, softcap=configuration.softcap, splits=sizes.splits)
