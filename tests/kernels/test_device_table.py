"""What kernels find of a pool, and what its compaction by kernels leaves, whatever was done to it before."""

from typing import Any

import numpy as np
import pytest
import torch
import triton
from hypothesis import Phase, settings
from hypothesis.stateful import invariant, run_state_machine_as_test

from bpkv_trt.errors import ConfigError
from bpkv_trt.pool.device_table import DeviceTable
from bpkv_trt.pool.pool import PagedKvPool
from tests.pool.test_pool_machine import PAGE, WIDTH, PoolMachine


class KernelPool(PagedKvPool):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options, kernels=True)


class KernelMachine(PoolMachine):
    """As the pool's own machine; what its tables lead to is read after every step too."""

    pool_class = KernelPool

    @invariant()
    def tables_lead_to_the_rows(self) -> None:
        sequences = sorted(self.reference)
        for batch in ([sequence] for sequence in sequences), [sequences] if len(sequences) > 1 else []:
            for chosen in batch:
                self.compare(chosen)

    def compare(self, sequences: list[int]) -> None:
        for layer, cache in enumerate(self.pool.caches(sequences)):
            for index, sequence in enumerate(sequences):
                for head, length in enumerate(cache.lengths[index].tolist()):
                    rows = torch.arange(length)
                    page = cache.key_pages[index, head].long()[rows // PAGE]
                    expected = self.reference[sequence].rows[layer, head]
                    assert length == len(expected)
                    keys = torch.tensor([key for _, key, _ in expected], dtype=torch.float32)
                    assert torch.equal(self.pool.keys[page, rows % PAGE], keys[:, None].expand(-1, WIDTH))


KernelMachine.TestCase.settings = settings(PoolMachine.TestCase.settings, max_examples=25)
TestKernelPool = KernelMachine.TestCase


class ForgetsChanges(DeviceTable):
    def _bring_up_to_date(self, slot: int) -> None:
        pass


class ForgetsTheLast(DeviceTable):
    def pack(self, slot: int, offsets: Any, rows: Any) -> None:
        super().pack(slot, np.append(offsets[:-1], offsets[-1] - 1), rows)


@pytest.mark.parametrize("mutant", [ForgetsChanges, ForgetsTheLast])
def test_the_machine_finds_a_seeded_bug(mutant: type[DeviceTable]) -> None:
    class MutantPool(KernelPool):
        def _make_device_table(self) -> DeviceTable:
            return mutant(self._table, self._storage)

    machine = type(f"{mutant.__name__}Machine", (KernelMachine,), {"pool_class": MutantPool})
    search = settings(
        PoolMachine.TestCase.settings, max_examples=100, derandomize=True, database=None, phases=[Phase.generate]
    )
    with pytest.raises((AssertionError, IndexError)):
        run_state_machine_as_test(machine, settings=search)


def test_rows_that_kernels_cannot_read_are_refused_by_size() -> None:
    options: dict[str, Any] = {"layers": 1, "kv_heads": 1, "head_dim": 20, "pages": 2, "dtype": torch.float16}
    with pytest.raises(ConfigError, match=r"row of this model's cache is 40 bytes \(head size 20, torch.float16\)"):
        PagedKvPool(**options, kernels=True)
    assert not PagedKvPool(**options).by_kernels
    with pytest.raises(AssertionError, match="no kernels"):
        PagedKvPool(**options).caches([])


SMALL: dict[str, Any] = {"layers": 1, "kv_heads": 1, "head_dim": 16, "pages": 2}


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"dtype": torch.float64}, r"cache is torch.float64; kernels read torch.float32, torch.float16"),
        ({"dtype": torch.int32}, r"cache is torch.int32; kernels read torch.float32, torch.float16"),
        ({"head_dim": 264}, "cache is 264; kernels are compiled for at most 256"),
    ],
)
def test_a_pool_that_kernels_cannot_read_is_refused(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        PagedKvPool(**SMALL | change, kernels=True)
    assert not PagedKvPool(**SMALL | change).by_kernels


def test_on_a_cpu_kernels_need_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(ConfigError, match="on cpu, where kernels need Triton's interpreter. Set TRITON_INTERPRET=1"):
        PagedKvPool(**SMALL, kernels=True)
