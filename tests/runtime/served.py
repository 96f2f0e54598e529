"""Requests of many kinds for a serving batch, each with the answer that a plain generator gives it alone."""

import random
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from bpkv_trt.config import BpkvConfig
from bpkv_trt.models.loading import LoadedModel
from bpkv_trt.pool.pool import PagedKvPool
from bpkv_trt.profiling import Trace
from bpkv_trt.runtime.engine import Engine, make_pool
from bpkv_trt.runtime.engines import Engines
from bpkv_trt.runtime.generator import Generator
from bpkv_trt.runtime.sampling import SamplingParams
from bpkv_trt.runtime.serving_batch import BatchedRequest, ServingBatch
from tests.runtime.random_models import SMALL, random_tokens, wrapped

OPTIONS: dict[str, Any] = {**SMALL, "generation_budget": "14t", "lookahead": 3, "rehearsal": 0, "refine": 4}
KINDS: tuple[dict[str, Any], ...] = (
    {"budget": "0.3"},
    {"budget": "0.3", "scope": "head", "regime": "prefill"},
    {"budget": "20t", "rehearsal": 10},
    {"budget": "0.4", "regime": "deferred", "defer": 4},
    {"regime": "generation"},
    {"policy": "full"},
    {"policy": "h2o", "budget": "0.4"},
    {"policy": "streaming_llm", "budget": "0.25", "scope": "layer"},
    {"policy": "random", "budget": "1"},
)
DOUBLE = torch.float64  # of the model: another order of additions, as other batches bring, then hardly ever shows


@dataclass(frozen=True, eq=False)
class Kind:
    """A request as it is asked."""

    options: dict[str, Any]
    number: int
    tokens: int
    sampling: SamplingParams

    @property
    def prompt(self) -> list[int]:
        return random_tokens(self.number, self.tokens)


@cache
def kinds(name: str, count: int) -> tuple[Kind, ...]:
    """As many requests, all different, of unequal prompts and answers, greedy ones and sampled ones."""
    draw, chosen = random.Random(name), []
    for number in range(count):
        temperature = draw.choice((0.0, 1.0))
        stop = frozenset(range(3, 8)) if number % 3 == 0 else frozenset()
        new, top_p = draw.choice((1, 2, 5, 9, 17, 30)), 0.95 if temperature else 1.0
        sampling = SamplingParams(new, temperature, top_p, seed=number, stop_tokens=stop)
        tokens = draw.choice((1, 3, 9, 20, 33, 47, 60))
        chosen.append(Kind(KINDS[number % len(KINDS)], number, tokens, sampling))
    return tuple(chosen)


@cache
def alone(name: str, kind: Kind) -> list[int]:
    """The answer of a request that has an engine to itself and its prompt run in one piece."""
    loaded = wrapped(name, DOUBLE)
    pool = make_pool(loaded, 200, OPTIONS["page_size"])
    config = Engines(loaded, BpkvConfig(**OPTIONS), pool, Trace()).configured(kind.options)
    engine = Engine(loaded, config, pool)
    generator = Generator(engine)
    request = generator.add([kind.prompt], kind.sampling)
    generator.generate([request])
    return request.generated


def borrowed(batched: BatchedRequest) -> int:
    """Pages that the compaction of a prompt will take and give back, if it is yet to come."""
    regime, done = batched.engine.compactor.config.regime, {event.regime for event in batched.request.events}
    to_come = {"prefill", "deferred"} & set(regime) - done
    return batched.engine.scratch_pages([len(batched.prompt)]) if to_come else 0


class Served:
    """A batch over a poisoned pool of `rows` rows in every layer and head."""

    def __init__(
        self,
        name: str,
        rows: int,
        chunk_tokens: int = 8,
        most_running: int = 16,
        model: LoadedModel | None = None,
    ) -> None:
        """`model`: in place of the one of that name."""
        loaded, trace, config = model or wrapped(name, DOUBLE), Trace(), BpkvConfig(**OPTIONS)
        self.name = name
        self.pool: PagedKvPool = make_pool(loaded, rows, config.page_size, poison=True)
        self.engines = Engines(loaded, config, self.pool, trace)
        self.batch = ServingBatch(self.engines, trace, chunk_tokens=chunk_tokens, most_running=most_running)
        self.asked: dict[BatchedRequest, Kind] = {}

    def prepare(self, kind: Kind) -> BatchedRequest:
        engine = self.engines.of(kind.options)
        return self.batch.prepare_tokens(engine, kind.prompt, kind.sampling)

    def add(self, kind: Kind) -> BatchedRequest:
        batched = self.prepare(kind)
        self.batch.add(batched)
        self.asked[batched] = kind
        return batched

    def remove(self, batched: BatchedRequest) -> None:
        self.batch.remove(batched)
        self.asked.pop(batched, None)

    def step(self) -> list[BatchedRequest]:
        """One step, after which the pool is sound and promises nothing that it has not."""
        took_part = self.batch.step()
        self.pool.check_integrity()
        promised = sum(each.promised for each in self.batch.running)
        scratch = max(map(borrowed, self.batch.running), default=0)
        assert promised + scratch <= self.pool.free_pages, "the pool is over-committed"
        for each in took_part:
            if each.request.finished is not None:
                kind = self.asked.pop(each)
                assert each.error is None and each.request.generated == alone(self.name, kind), kind
        return took_part

    def run(self) -> None:
        while self.asked:
            assert self.step()
        self.assert_empty()

    def assert_empty(self) -> None:
        """Nothing of any request is left."""
        assert not self.batch.waiting and not self.batch.running
        assert self.pool.live_pages == 0 and self.pool.sequences == () and self.engines.host.tokens == {}
