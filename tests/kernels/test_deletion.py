"""Sums over evicted and kept rows, and what one entry more or less costs, against attending in float64."""

import pytest
import torch

from bpkv_trt.kernels.deletion import deletion_statistics, nomination
from tests.kernels.attended import Attended

BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
SHAPES = [
    {"cache": BF16, "queries": BF16, "group": 4, "head_dim": 128, "page_size": 32},
    {"cache": FP16, "queries": FP16, "group": 3, "head_dim": 24, "options": {"window": 20}},
    {"cache": FP8, "queries": BF16, "group": 1, "key_scale": 0.3, "value_scale": 0.7, "shared_pages": True},
    {"common": 10.0, "options": {"softcap": 5.0}},
    {"group": 8, "head_dim": 256},  # two blocks of positions for the sums, eight parts of a row for the slopes
]


class Case:
    """Positions, a random mask of their rows, and all that the kernels ask for."""

    def __init__(self, device, lengths, counts, share=0.5, **shape):
        self.attended = Attended.random(lengths, counts, device=device, **shape)
        self.device, self.cache = device, self.attended.laid.cache
        self.longest = max(map(max, lengths)) + 3
        self.evict = torch.rand(len(lengths), len(lengths[0]), self.longest, device=device) < share
        self.values = [
            [rows.double() * self.cache.value_scale for rows in heads] for heads in self.attended.values
        ]  # [B][Hkv] of [T, D]
        centres = [[rows.mean(0) for rows in heads] for heads in self.values]
        self.centre = torch.stack([torch.stack(each) for each in centres]).float().to(device)
        rows, heads, _ = self.attended.q.shape
        self.group = heads // len(lengths[0])
        lse = torch.zeros(rows, heads)
        for sequence, head, columns in self.heads():
            lse[columns] = self.attended.logits(sequence, head).logsumexp(-1).T.float()
        self.lse = lse.to(device)

    def heads(self):
        """(sequence, KV head, where its positions and query heads lie in [S, Hq])."""
        for sequence, heads in enumerate(self.attended.keys):
            for head in range(len(heads)):
                own = slice(head * self.group, (head + 1) * self.group)
                yield sequence, head, (self.attended.sequence(sequence), own)

    def gone(self, sequence, head):
        """[T] bool."""
        return self.evict[sequence, head, : len(self.values[sequence][head])].cpu()

    def run(self, kernel, *state):
        attended = self.attended
        given = (attended.q, self.evict, self.centre, *state, attended.offsets, self.cache, self.lse)
        return kernel(*given, **attended.options)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_sides_are_those_of_the_rows_each_position_sees(device, shape):
    torch.manual_seed(0)
    case = Case(device, [[70, 41], [33, 90]], [5, 2], sharpness=2.0, **shape)
    sums = case.run(deletion_statistics)
    for sequence, head, columns in case.heads():
        a, gone = case.attended.logits(sequence, head).softmax(-1), case.gone(sequence, head)  # [G, n, T]
        values = case.values[sequence][head]
        away = values - case.centre[sequence, head].cpu().double()
        for mass, total, side in (
            (sums.gone_mass, sums.gone_sum, gone),
            (sums.kept_mass, sums.kept_sum, ~gone),
        ):
            weights = (a * side).transpose(0, 1)  # [n, G, T]
            torch.testing.assert_close(mass[columns].cpu().double(), weights.sum(-1), rtol=5e-6, atol=1e-7)
            error = (total[columns].cpu().double() - weights @ away).norm() / (weights @ away).norm()
            assert error < 5e-6


@pytest.mark.parametrize("share", [0.03, 0.97])
def test_the_shift_of_the_context_is_right_where_values_share_a_large_part(device, share):
    torch.manual_seed(0)
    case = Case(device, [[600]], [3], share, common=10.0, sharpness=2.0)  # two splits
    sums = case.run(deletion_statistics)
    (_, _, columns), a = next(case.heads()), case.attended.logits(0, 0).softmax(-1).transpose(0, 1)
    kept = a * ~case.gone(0, 0)
    truth = kept @ case.values[0][0] / kept.sum(-1, keepdim=True) - a @ case.values[0][0]
    context = sums.gone_sum + sums.kept_sum
    by_removed = (sums.gone_mass[..., None] * context - sums.gone_sum) / (1 - sums.gone_mass)[..., None]
    by_kept = sums.kept_sum / sums.kept_mass[..., None] - context
    shift = (by_removed if share < 0.5 else by_kept)[columns].cpu().double()
    assert (shift - truth).norm() / truth.norm() < 1e-5


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nomination_is_the_derivative_of_each_entry_and_the_epsilon_rule(device, shape):
    torch.manual_seed(0)
    case = Case(device, [[70, 41], [33, 90]], [5, 2], sharpness=2.0, **shape)
    slopes = torch.randn(case.attended.q.shape)
    mass, contexts = torch.zeros(slopes.shape[:2]), torch.zeros(slopes.shape)
    least = torch.tensor([[0.3, 0.0], [0.4, 0.3]])
    expected = torch.zeros(case.evict.shape, dtype=torch.float64)
    margin = torch.full(case.evict.shape, -torch.inf, dtype=torch.float64)  # of the tightest attention
    for sequence, head, columns in case.heads():
        a, gone = case.attended.logits(sequence, head).softmax(-1).transpose(0, 1), case.gone(sequence, head)
        retained = (a * ~gone).sum(-1)  # [n, G]
        away = case.values[sequence][head] - case.centre[sequence, head].cpu().double()
        context = (a * ~gone) @ away / retained.unsqueeze(-1)
        mass[columns], contexts[columns] = retained.float(), context.float()
        slope = slopes[columns].double()
        left = retained.unsqueeze(-1) + torch.where(gone, a, -a)
        pull = (slope * context).sum(-1, keepdim=True) - slope @ away.T
        place = (sequence, head, slice(len(away)))
        expected[place] = (a / left * pull).sum((0, 1))
        margin[place] = (left - least[sequence, head]).amin((0, 1))
    state = (each.to(device) for each in (mass, contexts, slopes, least))
    first_order, admissible = (each.cpu() for each in case.run(nomination, *state))
    clear = margin.abs() > 1e-5
    assert torch.equal(admissible[clear], margin[clear] >= 0) and 0 < admissible.sum() < (margin > -torch.inf).sum()
    compared = margin > 0.01
    torch.testing.assert_close(first_order.double()[compared], expected[compared], rtol=1e-4, atol=1e-5)
    assert (first_order[margin == -torch.inf] == 0).all()


def test_a_sequence_without_positions_leaves_nothing_behind(device):
    case = Case(device, [[20], [30]], [0, 2])
    sums = case.run(deletion_statistics)
    assert sums.gone_sum.shape == case.attended.q.shape and sums.gone_mass.isfinite().all()
    state = (sums.kept_mass, sums.kept_sum, torch.randn_like(sums.kept_sum), torch.zeros(2, 1, device=device))
    first_order, admissible = case.run(nomination, *state)
    assert (first_order[0] == 0).all() and not admissible[0].any() and admissible[1].any()


@pytest.mark.parametrize(
    "change, error, said",
    [
        ({"evict": torch.zeros(1, 2, 20)}, TypeError, "evict is torch.float32; expected torch.bool or torch.uint8"),
        ({"evict": torch.zeros(1, 4, 20).bool()[:, ::2]}, ValueError, "evict has strides"),
        ({"centre": torch.zeros(2, 16)}, ValueError, r"centre has shape \(2, 16\); expected \(1, 2, 16\)"),
        ({"lse": torch.zeros(3, 2)}, ValueError, "lse has shape"),
        ({"q": torch.zeros(3, 3, 16)}, ValueError, "multiple of the cache's 2"),
        ({"q": torch.zeros(3, 0, 16)}, ValueError, "q has 0 heads"),
        ({"scale": torch.nan}, ValueError, "scale is nan"),
        ({"positions": 3.0}, TypeError, "positions is a float"),
    ],
)
def test_what_does_not_fit_is_refused(device, change, error, said):
    case = Case(device, [[20, 20]], [3])
    given = {"q": case.attended.q, "evict": case.evict, "centre": case.centre, "offsets": case.attended.offsets}
    given |= {"cache": case.cache, "lse": case.lse} | case.attended.options
    with pytest.raises(error, match=said):
        deletion_statistics(
            **given | {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in change.items()}
        )
