"""Every launcher of a session, called once; by itself, through the stand-in driver, it prints what that was asked for.

python session_calls.py LIBCUDA KERNELS
"""

import json
import sys
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bpkv_trt.core.candidates import CandidatePool
from bpkv_trt.core.divergence import TopKDivergence
from bpkv_trt.errors import ConfigError
from bpkv_trt.kernels import compiled_kernels
from bpkv_trt.kernels.bundle import unpack, unsealed
from bpkv_trt.kernels.compact import compact
from bpkv_trt.kernels.compiled_kernels import CompiledKernels, Stream
from bpkv_trt.kernels.configuration import session_launches
from bpkv_trt.kernels.deletion import deletion_statistics, nomination
from bpkv_trt.kernels.launch import Launch, launched_by
from bpkv_trt.kernels.lse import log_sum_exp
from bpkv_trt.kernels.paged import PagedCache
from bpkv_trt.kernels.refinement import choose
from tests.plugin.configurations import SESSION
from tests.plugin.stand_in_driver import StandInDriver
from tests.pool.stock_session import StockSession

ROWS, POSITIONS, CANDIDATES = 13, 3, 20


def call_all(device: str = "cpu") -> list[Tensor]:
    """On random numbers, in a cache of one sequence; returns what the launchers give."""
    torch.manual_seed(0)
    heads, width, group = SESSION.query_heads, SESSION.head_dim, SESSION.query_heads // SESSION.kv_heads
    channels = SESSION.channels
    with torch.device(device):
        memory = torch.randn(2, 2, SESSION.kv_heads, SESSION.page_size, width)
        pages = torch.tensor([[[0, 2]]], dtype=torch.int32)
        lengths = torch.full((1, SESSION.kv_heads), ROWS, dtype=torch.int32)
        sizes = {"page_size": SESSION.page_size, "head_dim": width, "shared_pages": True, "key_scale": 0.75}
        cache = PagedCache(torch.tensor([memory.data_ptr()] * 2), pages, pages + 1, lengths, SESSION.cache, **sizes)
        q, offsets = torch.randn(POSITIONS, heads, width), torch.tensor([0, POSITIONS], dtype=torch.int32)
        options: dict[str, Any] = {"scale": 0.25, "positions": POSITIONS, "window": 9}
        evict, centre = torch.rand(1, SESSION.kv_heads, ROWS) < 0.3, torch.zeros(1, SESSION.kv_heads, width)
        slopes, least = torch.randn(POSITIONS, heads, width), torch.full((1, SESSION.kv_heads), 0.1)
        index = torch.zeros(CANDIDATES, dtype=torch.int64)
        pool = CandidatePool(
            *[index] * 4,
            a=0.01 * torch.rand(CANDIDATES, group, POSITIONS),
            values=torch.randn(CANDIDATES, POSITIONS, channels, group),
            mass=torch.ones(1, group, POSITIONS),
            contexts=torch.randn(1, POSITIONS, channels, group),
        )
        base, floor = torch.zeros(POSITIONS, channels), torch.zeros(CANDIDATES)
        p = torch.rand(1 + POSITIONS * channels)[1:].view(POSITIONS, channels)  # parts of a batch begin anywhere
        p /= p.sum(-1, keepdim=True)
        divergence = TopKDivergence(p, torch.full((1 + POSITIONS,), 1 / POSITIONS)[1:])
        shares = torch.tensor([2])
        kept, ends = torch.tensor([0, 2, 1], dtype=torch.int32), torch.tensor([0, 2, 3])

    lse = log_sum_exp(q, offsets, cache, **options)
    sums = deletion_statistics(q, evict, centre, offsets, cache, lse, **options)
    state = sums.kept_mass, sums.kept_sum / sums.kept_mass[..., None], slopes, least
    nominated = nomination(q, evict, centre, *state, offsets, cache, lse, **options)
    chosen = choose(pool, base, index, shares, floor, divergence)
    compact(kept, ends, cache, None)
    return [lse, *astuple(sums), *nominated, *chosen, memory]


def make_pool() -> None:
    StockSession([4], 4, [(0, 0)], kernels=True)


def described(launch: Launch) -> dict[str, Any]:
    """What does not depend on where tensors lie."""
    x, y, z = (*launch.grid, 1, 1)[:3]
    names = launch.kernel.arg_names
    given = {name: value for name, value in zip(names, launch.arguments, strict=False) if value is not None}
    return {
        "kernel": launch.kernel.__name__,
        "grid": [x, y, z],
        "threads": 32 * launch.warps,
        "tensors": [name for name, value in given.items() if isinstance(value, torch.Tensor)],
        "numbers": {name: value for name, value in given.items() if not isinstance(value, torch.Tensor)},
    }


def main(library: Path, kernels: Path) -> None:
    driver = StandInDriver(library)
    driver.knows(unpack(unsealed(kernels.read_bytes()))[1], session_launches(SESSION))
    driver.reset()
    driver.only_records = True
    compiled_kernels.current_stream = lambda device: Stream(0, 0)
    with launched_by(CompiledKernels.read(kernels)):
        call_all()
        make_pool()
    asked = [
        {
            "kernel": each.kernel,
            "grid": list(each.grid),
            "threads": each.threads,
            "tensors": [name for name, kind in each.types.items() if kind.startswith("*")],
            "numbers": {name: each.arguments[name] for name, kind in each.types.items() if not kind.startswith("*")},
        }
        for each in driver.launched
    ]
    refusals = []
    for attempt in (call_all, make_pool):
        try:
            attempt()
        except ConfigError as error:
            refusals.append(str(error))
    loaded = [name for name, module in sys.modules.items() if name.partition(".")[0] == "triton" and module is not None]
    print(json.dumps({"asked": asked, "refusals": refusals, "loaded": loaded}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
