"""What kernels find of a TensorRT-LLM session's pool, and what its compaction by kernels leaves."""

from typing import Any, ClassVar

import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import invariant

from bpkv_trt.core.evidence import mask_shift, score_entries
from bpkv_trt.core.evidence_source import EvidenceSource
from bpkv_trt.kernels.evidence_source import KernelEvidenceSource
from bpkv_trt.policies.evidence import evidence_of
from bpkv_trt.pool.plan import CompactionPlan
from tests.core.conftest import make_sequence
from tests.pool.stock_session import StockSession
from tests.pool.test_block_pool_machine import TOKENS, WIDTH, BlockMachine


class KernelMachine(BlockMachine):
    """As the pool's own machine; what the caches lead to is read after every step too."""

    options: ClassVar[dict[str, Any]] = {"kernels": True}

    @invariant()
    def caches_lead_to_the_rows(self) -> None:
        sequences = sorted(self.rows)
        if not sequences:
            return
        for layer, cache in enumerate(self.pool.caches(sequences)):
            flat = self.session.memories[self.session.mapping[layer, 0]].flatten(0, 2)
            assert cache.addresses.tolist() == [flat.data_ptr()] * 2 and cache.shared_pages
            for index, sequence in enumerate(sequences):
                for head, length in enumerate(cache.lengths[index].tolist()):
                    expected = torch.tensor(self.rows[sequence][layer, head], dtype=torch.float32).view(-1, 3)
                    assert length == len(expected)
                    row = torch.arange(length)
                    for pages, numbers in zip((cache.key_pages, cache.value_pages), expected.T[1:], strict=True):
                        page = pages[index, 0].long()[row // TOKENS] + cache.first_page
                        assert torch.equal(flat[page, head, row % TOKENS], numbers[:, None].expand(-1, WIDTH))


KernelMachine.TestCase.settings = settings(BlockMachine.TestCase.settings, max_examples=3, stateful_step_count=6)
TestBlockPoolByKernels = KernelMachine.TestCase


HEAD, ROWS, KEPT = 16, 36, 21


@pytest.mark.parametrize(
    ("mapping", "dtype"),
    [
        ([(0, 0), (0, 1)], torch.float8_e4m3fn),
        ([(1, 0), (0, 0)], torch.int8),
        ([(1, 0), (0, 0)], torch.float32),
    ],
    ids=str,
)
def test_evidence_by_kernels_is_that_of_the_rows_as_numbers(mapping: list[tuple[int, int]], dtype: torch.dtype) -> None:
    """After a compaction that left every head its own rows; of a quantised cache both sides see the rounded numbers."""
    sequence = make_sequence(rows=ROWS)
    quantised = dtype != torch.float32
    scales = [0.02, 0.05] if quantised else None
    options = {"dtype": dtype, "scales": scales, "storage": torch.int8} if quantised else {}
    session = StockSession([ROWS], 8, mapping, head_dim=HEAD, tokens_per_block=8, kernels=True, **options)
    table = session.table()
    for layer in range(2):
        k, v = torch.stack(sequence.view.k[layer]), torch.stack(sequence.view.v[layer])
        if scales is not None:
            k, v = (stored(rows / scales[layer], dtype) for rows in (k, v))
        session.write(table, 0, layer, 0, k, v)
    session.pool.extend(0, ROWS)
    session.step()
    gone = (
        torch.rand(2, 2, ROWS - 8).argsort(-1).argsort(-1) < ROWS - KEPT
    )  # never the last, which are scoring positions
    evict = torch.cat([gone, torch.zeros(2, 2, 8, dtype=torch.bool)], dim=-1)
    session.pool.apply(CompactionPlan.from_eviction(session.pool.view(0), evict))
    view = session.pool.view(0)
    assert view.lengths.tolist() == [[KEPT] * 2] * 2

    kernels = evidence_of(sequence.statistics, view, sequence.traits)
    assert isinstance(kernels, KernelEvidenceSource)
    plain = EvidenceSource(sequence.statistics, view, sequence.traits)
    assert sequence.statistics.readout is not None
    divergence = sequence.statistics.readout.divergence
    truth = score_entries(plain, divergence)
    torch.testing.assert_close(score_entries(kernels, divergence), truth, rtol=1e-4, atol=1e-12)
    some = torch.rand(truth.shape) < 0.3
    some[..., -8:] = False
    ours, theirs = (mask_shift(source, some) for source in (kernels, plain))
    assert float((ours - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max())


def stored(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Rows as a quantised cache has them, in torch.int8."""
    if dtype == torch.int8:
        return rows.round().clamp(-127, 127).to(dtype)
    return rows.clamp(-448, 448).to(dtype).view(torch.int8)
