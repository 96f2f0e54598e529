from itertools import combinations

import pytest
import torch

from bpkv_trt.core.evidence import mask_divergence, score_entries
from bpkv_trt.core.evidence_source import EvidenceSource
from bpkv_trt.core.quota import Quota
from bpkv_trt.core.selection import lowest_scores
from bpkv_trt.core.stability import LEAST_MASS
from bpkv_trt.core.two_stage import two_stage


class Case:
    """A sequence, its scores, and what may leave."""

    def __init__(self, sequence, protected=5):
        self.sequence = sequence
        self.source = EvidenceSource(sequence.statistics, sequence.view, sequence.traits)
        self.scores = score_entries(self.source, sequence.statistics.readout.divergence)
        self.divergence = sequence.statistics.readout.divergence
        self.eligible = torch.zeros_like(self.scores, dtype=torch.bool)
        for layer, lengths in enumerate(sequence.view.lengths.tolist()):
            for head, length in enumerate(lengths):
                self.eligible[layer, head, 1 : length - protected] = True

    def quota(self, scope, per_head):
        unit = {
            "head": torch.arange(4).view(2, 2),
            "layer": torch.tensor([[0, 0], [1, 1]]),
            "global": torch.zeros(2, 2, dtype=torch.int64),
        }[scope]
        return Quota(unit, torch.bincount(unit.flatten()) * per_head, torch.zeros_like(unit))

    def select(self, quota, epsilon=0.02, refine=0):
        return two_stage(self.scores, self.eligible, quota, self.source, self.divergence, epsilon, refine)

    def retained_mass(self, evict):
        """[L, Hkv]: the least that any query head and position keeps."""
        least = torch.ones(2, 2)
        for layer in range(2):
            for head in range(2):
                a = self.source.attention(layer, head).a
                left = a[:, :, ~evict[layer, head, : a.shape[-1]]].double().sum(-1)
                least[layer, head] = left.min()
        return least


def evicted_by_unit(evict, quota):
    return [int(evict[quota.unit == unit].sum()) for unit in range(quota.evict.shape[0])]


@pytest.mark.parametrize("scope", ["head", "layer", "global"])
@pytest.mark.parametrize("refine", [0, 1, 8, 30, 10_000])
@pytest.mark.parametrize("rows", [60, [[60, 40], [33, 60]]])
def test_quotas_are_exact_and_only_eligible_entries_leave(sequence_of, scope, refine, rows):
    case = Case(sequence_of(rows=rows))
    quota = case.quota(scope, 20)
    selection = case.select(quota, refine=refine)
    assert evicted_by_unit(selection.evict, quota) == quota.evict.tolist()
    assert not (selection.evict & ~case.eligible).any()
    assert selection.estimated_kl <= selection.estimated_kl_stage1
    if selection.epsilon_relaxed == 0:
        assert case.retained_mass(selection.evict).min() >= 0.02 - 1e-6


@pytest.mark.parametrize("scope", ["head", "global"])
def test_refinement_lowers_the_true_kl_of_the_mask_and_says_by_how_much(sequence_of, scope):
    case = Case(sequence_of(rows=60))
    quota = case.quota(scope, 30)
    before, after = case.select(quota), case.select(quota, refine=24)
    assert before.estimated_kl == before.estimated_kl_stage1 == after.estimated_kl_stage1
    assert after.estimated_kl < 0.9 * before.estimated_kl
    for selection in (before, after):
        assert selection.estimated_kl == pytest.approx(case.sequence.exact_kl(selection.evict), rel=1e-4)


def test_without_pressure_stage_1_is_the_lowest_scores(sequence_of):
    case = Case(sequence_of(rows=60))
    quota = case.quota("layer", 6)
    selection = case.select(quota)
    assert torch.equal(selection.evict, lowest_scores(case.scores, case.eligible, quota).evict)
    assert selection.rejected == selection.epsilon_relaxed == 0


def test_the_epsilon_rule_passes_over_and_the_budget_stays_exact(sequence_of):
    case = Case(sequence_of(rows=60))
    quota = case.quota("global", 30)
    selection = case.select(quota, epsilon=0.6)
    assert selection.rejected > 0 and selection.epsilon_relaxed == 0
    assert case.retained_mass(selection.evict).min() >= 0.6 - 1e-6
    assert int(selection.evict.sum()) == 120


def test_epsilon_is_halved_until_the_quota_can_be_filled(sequence_of):
    case = Case(sequence_of(rows=60))
    quota = case.quota("head", 54)  # everything that may leave
    selection = case.select(quota, epsilon=0.9, refine=4)
    assert selection.epsilon_relaxed >= 4
    assert torch.equal(selection.evict, case.eligible)
    mild = case.select(case.quota("head", 40), epsilon=0.5)
    assert 0 < mild.epsilon_relaxed < selection.epsilon_relaxed
    assert evicted_by_unit(mild.evict, case.quota("head", 40)) == [40] * 4


def test_a_quota_that_takes_all_the_mass_is_filled_and_has_no_estimate(sequence_of):
    sequence = sequence_of(rows=60)
    sequence.view.k[0][0][2:] = 0.0
    sequence.view.k[0][0][1] = sequence.statistics.q[0, :, 0].mean(0) * 100  # one row takes all, in fp32
    sequence.statistics.q[0, :, :3] = sequence.statistics.q[0, :, :1].mean(0)
    case = Case(sequence)
    assert 1 - case.source.attention(0, 0).a[0, 0, 1] < LEAST_MASS
    assert case.scores[0, 0, 1] == torch.finfo(torch.float32).max
    free = case.select(case.quota("head", 40), refine=8)
    assert not free.evict[0, 0, 1] and free.epsilon_relaxed == 0
    forced = case.select(case.quota("head", 54), refine=8)
    assert torch.equal(forced.evict, case.eligible)
    assert forced.epsilon_relaxed >= 8
    assert forced.estimated_kl is None or forced.estimated_kl > 0


def test_of_two_copies_that_cost_nothing_alone_one_stays(sequence_of):
    # The data of the redundancy identity: two equal rows hold nearly all of a head's mass, and each is free while the
    # other stays. The entries of another head cost more than each copy alone, and far less than both.
    sequence = sequence_of(rows=20, readout_scale=0.05)
    k, v, q = sequence.view.k[1][0], sequence.view.v[1][0], sequence.statistics.q[1, :, :3]
    q[:] = q[0, 0] / q[0, 0].norm() * 4.5
    k[:] = -q[0, 0] * 0.5 + torch.randn(20, 16) * 0.05
    k[3] = k[7] = q[0, 0] * 1.5
    v[3] = v[7] = torch.randn(16) * 5
    for layer in range(2):
        sequence.statistics.context[layer] = sequence.exact_context(layer, torch.ones(2, 20, dtype=torch.bool)).float()
    case = Case(sequence)
    quota = Quota(torch.tensor([[-1, 0], [0, -1]]), torch.tensor([16]), torch.zeros(2, 2, dtype=torch.int64))
    both = torch.zeros_like(case.eligible)
    both[1, 0, [3, 7]] = True
    alone = case.scores[1, 0, [3, 7]]
    assert alone[0] == alone[1] < 1e-4 * mask_divergence(case.source, case.divergence, both)
    greedy, refined = case.select(quota, epsilon=1e-6), case.select(quota, epsilon=1e-6, refine=6)
    assert greedy.evict[both].tolist() == [True, True]
    assert refined.evict[both].sum() == 1
    assert refined.estimated_kl < 0.1 * greedy.estimated_kl
    assert refined.estimated_kl == pytest.approx(sequence.exact_kl(refined.evict), rel=1e-3)


def test_refining_against_brute_force_on_choose_3_of_8(sequence_of):
    ratios, singles = [], []
    for seed in range(20):
        case = Case(sequence_of(rows=20, seed=seed))
        case.eligible[:] = False
        case.eligible[0, 0, 2:6] = case.eligible[1, 1, 8:12] = True
        members = case.eligible.nonzero()
        best = float("inf")
        for chosen in combinations(range(8), 3):
            evict = torch.zeros_like(case.eligible)
            evict[tuple(members[list(chosen)].T)] = True
            best = min(best, mask_divergence(case.source, case.divergence, evict))
        unit = torch.zeros(2, 2, dtype=torch.int64)
        quota = Quota(unit, torch.tensor([3]), unit)
        selection = case.select(quota, epsilon=0.0, refine=3)
        ratios.append(selection.estimated_kl / best)
        singles.append(selection.estimated_kl_stage1 / best)
    ratio, single = torch.tensor(ratios), torch.tensor(singles)
    print(f"KL over the optimum: stage 1 {single.mean():.3f}, stage 2 mean {ratio.mean():.3f} max {ratio.max():.3f}")
    assert ratio.min() > 1 - 1e-4
    assert ratio.mean() < 1.1 and ratio.mean() < single.mean()


def test_the_same_input_gives_the_same_mask(sequence_of):
    case = Case(sequence_of(rows=60))
    quota = case.quota("layer", 25)
    first, second = case.select(quota, refine=16), case.select(quota, refine=16)
    assert torch.equal(first.evict, second.evict)
