import pytest
import torch
from torch import Tensor

from bpkv_trt.core.divergence import Divergence, FisherDivergence, TopKDivergence, position_weights


def distribution(positions: int = 8, logits: int = 32) -> Tensor:
    return torch.softmax(torch.randn(positions, logits) * 3, -1)


def centred(p: Tensor, shift: Tensor) -> Tensor:
    return shift - (p * shift).sum(-1, keepdim=True)


@pytest.mark.parametrize("scale", [1e-6, 1e-5, 1e-3, 0.05, 0.2, 1.0, 5.0])
def test_kl_is_right_from_1e_12_to_large(kl_of, scale):
    p = distribution()
    shift = centred(p, torch.randn(500, 8, 32) * scale)
    exact = kl_of(p, shift)
    relative = (TopKDivergence(p).of(shift).double() - exact).abs() / exact
    assert relative.max() < 1e-5
    if scale == 1e-6:
        assert exact.min() < 1e-12


def test_the_textbook_form_is_noise_at_the_scale_of_one_entry(kl_of):
    p = distribution()
    shift = centred(p, torch.randn(500, 8, 32) * 5e-6)
    exact = kl_of(p, shift)
    naive = (torch.logsumexp(p.log() + shift, -1) - (p * shift).sum(-1)).mean(-1)
    wrong = ((naive.double() - exact).abs() / exact) > 0.1
    assert wrong.double().mean() > 0.9


def test_tiles_that_mix_tiny_and_huge_shifts(kl_of):
    p = distribution()
    scales = torch.tensor([1e-6, 1e-2, 0.29, 0.31, 3.0, 50.0, 400.0])
    shift = centred(p.double(), (torch.randn(7, 8, 32) * scales[:, None, None]).double())
    log_form = (torch.logsumexp(p.double().log() + shift, -1) - (p.double() * shift).sum(-1)).mean(-1)
    exact = torch.where(scales > 1, log_form, kl_of(p, shift))
    result = TopKDivergence(p).of(shift.float())
    assert torch.isfinite(result).all()
    torch.testing.assert_close(result.double(), exact, rtol=1e-5, atol=0)


def test_a_constant_shift_and_zero_probabilities_move_nothing():
    p = torch.tensor([[0.5, 0.5, 0.0, 0.0]])
    divergence = TopKDivergence(p)
    assert divergence.of(torch.full((1, 4), 3.0)) == 0
    assert divergence.of(torch.tensor([[0.0, 0.0, 2.0, -2.0]])) == 0


def test_nan_and_inf_are_left_for_the_caller():
    divergence = TopKDivergence(distribution(2, 4))
    shift = torch.zeros(3, 2, 4)
    shift[1, 0, 0], shift[2, 1, 1] = float("nan"), float("inf")
    assert torch.isfinite(divergence.of(shift)).tolist() == [True, False, False]
    assert divergence.of(torch.zeros(0, 2, 4)).shape == (0,)


@pytest.mark.parametrize("base_scale", [0.0, 1e-2, 1.0])
@pytest.mark.parametrize("step", [1e-5, 1e-2, 0.5])
def test_an_increment_is_the_difference_of_two_divergences(kl_of, base_scale, step):
    p = distribution()
    base, shift = torch.randn(8, 32) * base_scale, torch.randn(100, 8, 32) * step
    exact = kl_of(p, base.double() + shift.double()) - kl_of(p, base)
    result = TopKDivergence(p).increment(base, shift).double()
    # Positive and negative parts may cancel: the error is measured against the size of the parts.
    size = exact.abs() + base_scale * step * 0.1
    assert ((result - exact).abs() / size).max() < 3e-5


def test_increments_survive_where_differences_do_not(kl_of):
    p = distribution()
    base, shift = torch.randn(8, 32) * 1e-2, torch.randn(400, 8, 32) * 1e-6
    exact = kl_of(p, base.double() + shift.double()) - kl_of(p, base)
    divergence = TopKDivergence(p)
    error = (divergence.increment(base, shift) - exact).abs() / exact.abs()
    difference = ((divergence.of(base + shift) - divergence.of(base)) - exact).abs() / exact.abs()
    assert error.median() < 1e-5 < 1e-3 < difference.median()


@pytest.mark.parametrize("fisher", [False, True])
def test_the_gradient_is_the_derivative(kl_of, fisher):
    p = distribution().double()
    base = (torch.randn(8, 32) * 0.3).double().requires_grad_()
    value = base.square().mean() / 2 if fisher else kl_of(p, base)
    (exact,) = torch.autograd.grad(value, base)
    divergence = FisherDivergence(position_weights(8)) if fisher else TopKDivergence(p.float())
    torch.testing.assert_close(divergence.gradient(base.detach().float()).double(), exact, rtol=1e-4, atol=1e-9)


def test_fisher_is_half_the_mean_square_and_its_increment_the_difference():
    divergence = FisherDivergence(position_weights(4))
    base, shift = torch.randn(4, 8), torch.randn(50, 4, 8)
    exact = shift.double().square().mean((1, 2)) / 2
    torch.testing.assert_close(divergence.of(shift).double(), exact, rtol=1e-6, atol=0)
    grown = (base.double() + shift.double()).square().mean((1, 2)) / 2 - base.double().square().mean() / 2
    torch.testing.assert_close(divergence.increment(base, shift).double(), grown, rtol=1e-5, atol=1e-6)


def plain(p: Tensor, shift: Tensor, weights: Tensor, fisher: bool) -> Tensor:
    """One shift [M, C] -> the weighted mean, one position after the other, in float64."""
    total = torch.zeros((), dtype=torch.float64)
    for m in range(p.shape[0]):
        row, moved = p[m].double() / p[m].double().sum(), shift[m].double()
        kl = torch.logsumexp(row.log() + moved, 0) - (row * moved).sum()
        total = total + weights[m].double() * (moved.square().sum() / len(moved) / 2 if fisher else kl)
    return total / weights.double().sum()


def weighted(p: Tensor, weights: Tensor, fisher: bool) -> Divergence:
    shares = weights / weights.sum()
    return FisherDivergence(shares) if fisher else TopKDivergence(p, shares)


@pytest.mark.parametrize("fisher", [False, True])
def test_with_weights_all_three_are_those_of_the_weighted_mean(fisher):
    p, weights = distribution(6, 12), torch.tensor([1.0, 1.0, 0.1, 3.0, 0.0, 0.1])
    base, shifts = torch.randn(6, 12) * 0.3, torch.randn(20, 6, 12) * 0.5
    divergence = weighted(p, weights, fisher)
    exact = torch.stack([plain(p, shift, weights, fisher) for shift in shifts])
    torch.testing.assert_close(divergence.of(shifts).double(), exact, rtol=1e-5, atol=0)
    grown = torch.stack([plain(p, base + shift, weights, fisher) for shift in shifts]) - plain(p, base, weights, fisher)
    torch.testing.assert_close(divergence.increment(base, shifts).double(), grown, rtol=1e-4, atol=1e-6)
    point = base.double().requires_grad_()
    (slope,) = torch.autograd.grad(plain(p, point, weights, fisher), point)
    torch.testing.assert_close(divergence.gradient(base).double(), slope, rtol=1e-4, atol=1e-8)
    assert (divergence.gradient(base)[4] == 0).all()


@pytest.mark.parametrize("fisher", [False, True])
def test_equal_weights_are_a_plain_mean(fisher):
    p, shifts = distribution(), torch.randn(50, 8, 32) * 0.1
    divergence = weighted(p, torch.full((8,), 0.1), fisher)
    alone = [weighted(p[m : m + 1], torch.ones(1), fisher).of(shifts[:, m : m + 1]) for m in range(8)]
    torch.testing.assert_close(divergence.of(shifts), torch.stack(alone).mean(0), rtol=1e-5, atol=0)
    if not fisher:
        assert torch.equal(TopKDivergence(p).of(shifts), TopKDivergence(p, position_weights(8)).of(shifts))


@pytest.mark.parametrize("drafted", [(), (1.0, 1.0), (1.0, 0.1, 0.1), (0.1,) * 7])
def test_position_weights_sum_to_one_and_keep_their_ratios(drafted):
    weights = position_weights(7, drafted)
    relative = [1.0] * (7 - len(drafted)) + [*drafted]
    assert weights.dtype == torch.float32
    torch.testing.assert_close(weights.double(), torch.tensor(relative).double() / sum(relative), rtol=1e-6, atol=0)
    assert float(weights.double().sum()) == pytest.approx(1, abs=1e-6)
