"""Evidence of a sequence by kernels against that of PyTorch, head by head; both from the same rows of one pool."""

from collections.abc import Callable
from dataclasses import astuple, replace

import pytest
import torch
from torch import Tensor

from bpkv_trt.core.candidates import choose as choose_in_core
from bpkv_trt.core.deletion import Retained
from bpkv_trt.core.divergence import FisherDivergence, position_weights
from bpkv_trt.core.evidence import LayerEvidence, mask_shift, score_entries
from bpkv_trt.core.evidence_source import EvidenceSource
from bpkv_trt.core.quota import Quota
from bpkv_trt.core.two_stage import two_stage
from bpkv_trt.kernels.evidence_source import KernelEvidenceSource
from bpkv_trt.kernels.refinement import MOST_CHANNELS
from bpkv_trt.pool.plan import CompactionPlan
from bpkv_trt.pool.pool import PagedKvPool
from tests.core.conftest import FixedReadout, Sequence, make_sequence
from tests.kernels.test_refinement import converted, random_pool

HEAD, LONGEST = 16, 60
Sources = tuple[EvidenceSource, KernelEvidenceSource]


def in_a_pool(sequence: Sequence) -> PagedKvPool:
    """Its rows in pages, as what a compaction left: heads of unequal lengths, each with its last rows."""
    lengths = sequence.view.lengths
    pool = PagedKvPool(layers=2, kv_heads=2, head_dim=HEAD, pages=80, page_size=8, poison=True, kernels=True)
    handle = pool.admit()
    pool.extend(handle, LONGEST)
    for layer in range(2):
        sides = [torch.full((2, LONGEST, HEAD), torch.nan) for _ in range(2)]
        for side, rows in zip(sides, (sequence.view.k[layer], sequence.view.v[layer]), strict=True):
            for head, each in enumerate(rows):
                side[head, LONGEST - len(each) :] = each
        pool.write(handle, layer, *sides)
    gone = torch.arange(LONGEST) < LONGEST - torch.from_numpy(lengths).unsqueeze(-1)
    pool.apply(CompactionPlan.from_eviction(pool.view(handle), gone))
    return pool


@pytest.fixture(params=[LONGEST, [[60, 41], [33, 60]]], ids=["equal", "ragged"])
def sources_of(request: pytest.FixtureRequest) -> Callable[..., Sources]:
    def make(fisher: bool = False, **options: object) -> Sources:
        sequence = make_sequence(rows=request.param, **options)
        statistics = sequence.statistics
        if fisher:
            weights = position_weights(statistics.q.shape[1], (0.1,))
            readout = FixedReadout(statistics.readout.rows, FisherDivergence(weights))
            statistics = replace(statistics, readout=readout)
        pool = in_a_pool(sequence)
        view = pool.view(0)
        assert (view.lengths == sequence.view.lengths).all()
        given = statistics, view, sequence.traits
        return EvidenceSource(*given), KernelEvidenceSource(*given)

    return make


def masks(source: EvidenceSource, share: float) -> Tensor:
    """[L, Hkv, T] bool of some rows of every head; none past its end, nor of the scoring positions' own."""
    evict = torch.rand(source.empty_table().shape) < share
    last = torch.from_numpy(source.view.lengths).unsqueeze(-1) - source.statistics.q.shape[1]
    return evict & (torch.arange(evict.shape[-1]) < last)


def layers(source: EvidenceSource) -> dict[int, LayerEvidence]:
    return dict(source.layers())


def assert_close(ours: Tensor, truth: Tensor, bound: float = 1e-5) -> None:
    """Relative to the largest: what cancels within a sum is not asked for."""
    assert ours.shape == truth.shape
    assert float((ours - truth).abs().max()) <= bound * float(truth.abs().max())


@pytest.mark.parametrize("fisher", [False, True])
@pytest.mark.parametrize("options", [{}, {"sinks": True}, {"softcap": 3.0, "group": 1}], ids=str)
def test_scores_of_entries_and_shifts_of_masks(sources_of, fisher: bool, options: dict[str, object]) -> None:
    plain, kernels = sources_of(fisher, **options)
    divergence = plain.statistics.readout.divergence
    truth = score_entries(plain, divergence)
    torch.testing.assert_close(score_entries(kernels, divergence), truth, rtol=1e-4, atol=1e-12)
    for share in (0.0, 0.1, 0.9):
        evict = masks(plain, share)
        assert_close(mask_shift(kernels, evict), mask_shift(plain, evict))


@pytest.mark.parametrize("sinks", [False, True])
def test_what_stays_of_every_head_and_what_one_entry_more_would_do(sources_of, sinks: bool) -> None:
    plain, kernels = sources_of(sinks=sinks)
    slopes = torch.randn(2, 3, 4, HEAD)
    for layer, held in layers(plain).items():
        evict = masks(plain, 0.5)[layer]
        ours, theirs = layers(kernels)[layer].retained(evict), held.retained(evict)
        assert_close(ours.mass, theirs.mass)
        assert_close(ours.shift, theirs.shift)
        # The centres differ; what has been taken off differs with them, by the same in every context.
        apart = kernels.centre(layer) - torch.stack([plain.view.values(layer, head).mean(0) for head in range(2)])
        assert_close(ours.context + apart[:, None, None], theirs.context)
        least = torch.tensor([0.02, 0.4])
        (first, free), (first_truth, free_truth) = (
            each.nomination(evict, slopes, least) for each in (layers(kernels)[layer], held)
        )
        assert_close(first, first_truth)
        assert torch.equal(free, free_truth) and 0 < free.float().mean() < 1


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_the_boundary_is_read_for_its_own_heads_alone(sources_of, softcap: float | None) -> None:
    plain, kernels = sources_of(softcap=softcap)
    for layer, held in layers(plain).items():
        members = masks(plain, 0.2)[layer]
        members[1 - layer] = False
        before, after = masks(plain, 0.5)[layer], masks(plain, 0.5)[layer]
        ours = layers(kernels)[layer].boundary(members, before, after)
        theirs = held.boundary(members, before, after)
        assert ours.a.shape == (int(members.sum()), 3, 4) and ours.before.mass.shape == (1, 3, 4)
        assert_close(ours.a, theirs.a)
        for mine, other in ((ours.before, theirs.before), (ours.after, theirs.after)):
            assert_close(mine.mass, other.mass)
            assert_close(mine.shift, other.shift)
            assert isinstance(mine, Retained) and len(astuple(mine)) == 3
        difference = ours.values - theirs.values
        assert_close(difference, difference[:1].expand_as(difference), 1e-4)


@pytest.mark.parametrize("fisher", [False, True])
def test_a_selection_of_both_stages_is_the_same(sources_of, fisher: bool) -> None:
    plain, kernels = sources_of(fisher)
    divergence = plain.statistics.readout.divergence
    eligible = masks(plain, 1.0)
    unit = torch.zeros(2, 2, dtype=torch.int64)
    quota = Quota(unit, torch.tensor([100]), torch.from_numpy(plain.view.lengths).long())
    chosen = [
        two_stage(score_entries(source, divergence), eligible, quota, source, divergence, epsilon=0.02, refine=12)
        for source in (plain, kernels)
    ]
    assert torch.equal(chosen[0].evict, chosen[1].evict)
    assert chosen[0].estimated_kl < chosen[0].estimated_kl_stage1
    assert chosen[1].estimated_kl == pytest.approx(chosen[0].estimated_kl, rel=1e-5)


def test_more_channels_than_kernels_take_are_chosen_from_all_the_same() -> None:
    torch.manual_seed(1)
    pool = random_pool(2, channels=MOST_CHANNELS + 1)
    base, shares = torch.zeros(3, MOST_CHANNELS + 1), torch.tensor([4])
    given = base, torch.zeros(20).long(), shares, torch.zeros(20), FisherDivergence(position_weights(3))
    source = object.__new__(KernelEvidenceSource)
    (chosen, _), (expected, _) = (
        each(converted(pool, torch.clone), *given) for each in (source.choose, choose_in_core)
    )
    assert torch.equal(chosen, expected) and chosen.sum() == 4


def test_a_divergence_that_kernels_do_not_know_is_refused(sources_of) -> None:
    _, kernels = sources_of()
    with pytest.raises(TypeError, match="divergence is a object"):
        next(iter(layers(kernels).values())).singleton_scores(object())
