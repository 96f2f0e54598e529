"""Stage 2's choice on the device against the core's, in float64 where the two may differ in rounding."""

from dataclasses import fields, replace

import pytest
import torch

from bpkv_trt.core.candidates import CandidatePool
from bpkv_trt.core.candidates import choose as choose_in_core
from bpkv_trt.core.divergence import FisherDivergence, TopKDivergence, position_weights
from bpkv_trt.kernels import refinement
from bpkv_trt.kernels.refinement import choose


def random_pool(heads, *, candidates=20, group=2, positions=3, channels=5, mass=1.0):
    """Candidates in ascending heads, whose weights are up to 0.08 of each attention."""
    owner = torch.randint(heads, (candidates,)).sort().values
    entry = torch.arange(candidates)
    return CandidatePool(
        layer=owner,
        head=torch.zeros_like(owner),
        row=entry,
        owner=owner,
        a=0.08 * torch.rand(candidates, group, positions) ** 2,
        values=torch.randn(candidates, positions, channels, group),
        mass=torch.full((heads, group, positions), mass),
        contexts=torch.randn(heads, positions, channels, group),
    )


def converted(pool, convert):
    return CandidatePool(**{each.name: convert(getattr(pool, each.name)) for each in fields(pool)})


def divergence_of(kind, positions, channels, convert=lambda x: x):
    weights = position_weights(positions, [0.5])
    if kind == "probes":
        return FisherDivergence(convert(weights))
    return TopKDivergence(convert(torch.softmax(2 * torch.randn(positions, channels), -1)), convert(weights))


def double(x):
    return x.double() if x.is_floating_point() else x.clone()


def both(device, pool, base, unit, shares, floor, kind):
    """(chosen, shift, pool) of the kernels, and of the core in float64."""
    state = torch.get_rng_state()
    answers = []
    for run, convert in ((choose, lambda x: x.clone().to(device)), (choose_in_core, double)):
        torch.set_rng_state(state)
        own = converted(pool, convert)
        divergence = divergence_of(kind, *base.shape, convert)
        chosen, shift = run(own, convert(base), convert(unit), convert(shares), convert(floor), divergence)
        answers.append((chosen.cpu(), shift.cpu().double(), converted(own, lambda x: x.cpu())))
    return answers


@pytest.mark.parametrize(
    "kind, shape",
    [
        ("top K", {"heads": 4}),
        ("probes", {"heads": 3, "mass": 0.6}),
        ("probes", {"heads": 1, "group": 1, "positions": 40, "channels": 1}),
        ("top K", {"heads": 2, "group": 3, "positions": 6, "channels": 64}),  # several blocks of positions
    ],
    ids=str,
)
def test_it_chooses_what_the_core_chooses(device, kind, shape):
    torch.manual_seed(1)
    pool = random_pool(**shape)
    base = 0.3 * torch.randn(*pool.contexts.shape[1:3])
    unit = pool.owner % 2
    shares = torch.tensor([4, 2])
    floor = torch.full(unit.shape, 0.45)
    ours, core = both(device, pool, base, unit, shares, floor, kind)
    assert torch.equal(ours[0], core[0]) and ours[0].any()
    torch.testing.assert_close(ours[1], core[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours[2].mass.double(), core[2].mass, rtol=1e-6, atol=0)
    torch.testing.assert_close(ours[2].contexts.double(), core[2].contexts, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["top K", "probes"])
def test_of_two_equal_entries_the_first_leaves_and_the_other_stays(device, kind):
    # The two hold 0.45 each of their head, the rest of it 0.1: alone each is nearly free, but the second takes all.
    torch.manual_seed(2)
    pool = random_pool(2, candidates=4)
    pool.owner[:] = torch.tensor([0, 0, 1, 1])
    pool.a[:] = torch.tensor([0.45, 0.45, 0.1, 0.1])[:, None, None]
    apart = 3 * torch.randn(3, 5, 2)
    pool.values[1] = pool.values[0]
    pool.contexts[0] = pool.values[0] + 0.1 * apart
    pool.values[2:] = pool.contexts[1] + apart
    unit, floor = torch.zeros(4, dtype=torch.int64), torch.zeros(4)
    ours, core = both(device, pool, torch.zeros(3, 5), unit, torch.tensor([2]), floor, kind)
    assert torch.equal(ours[0], core[0]) and ours[0].tolist() == [True, False, True, False]


def test_a_floor_that_binds_and_a_closed_unit_leave_the_shares_short(device):
    torch.manual_seed(3)
    pool = random_pool(2, mass=0.5)
    unit = pool.owner.clone()
    floor = torch.where(unit == 0, 0.45, 0.0)
    ours, core = both(device, pool, torch.zeros(3, 5), unit, torch.tensor([8, 2]), floor, "top K")
    assert torch.equal(ours[0], core[0])
    assert ours[0][unit == 0].sum() < 8 and ours[0][unit == 1].sum() == 2
    assert (ours[2].mass[0] >= 0.45).all()


def test_a_candidate_without_a_number_is_passed_over(device):
    torch.manual_seed(4)
    pool = random_pool(2)
    pool.values[3, 1, 2, 0] = torch.nan
    unit, floor = torch.zeros(20, dtype=torch.int64), torch.zeros(20)
    ours, core = both(device, pool, torch.zeros(3, 5), unit, torch.tensor([20]), floor, "top K")
    assert torch.equal(ours[0], core[0]) and ours[0].sum() == 19 and not ours[0][3]
    assert ours[1].isfinite().all()


def test_among_many_tiles_the_cheapest_is_found_and_of_equals_the_first(device, monkeypatch):
    torch.manual_seed(5)
    monkeypatch.setattr(refinement, "ELEMENTS", 16)  # of the results of 19 tiles at a time
    pool = random_pool(1, candidates=300, group=1, positions=2, channels=2)
    pool.a[[70, 290]] = 1e-5  # in the first and the second 16 tiles
    pool.values[290] = pool.values[70]
    unit, floor = torch.zeros(300, dtype=torch.int64), torch.zeros(300)
    for share, expected in ((1, [70]), (2, [70, 290])):
        ours, core = both(device, pool, torch.zeros(2, 2), unit, torch.tensor([share]), floor, "probes")
        assert torch.equal(ours[0], core[0]) and ours[0].nonzero().flatten().tolist() == expected


def test_nothing_to_choose_is_chosen_without_a_launch(device):
    pool = random_pool(2, candidates=6)
    unit, floor, base = torch.zeros(6, dtype=torch.int64), torch.zeros(6), torch.randn(3, 5)
    ours, _ = both(device, pool, base, unit, torch.tensor([0]), floor, "probes")
    assert not ours[0].any() and torch.equal(ours[1], base.double())


def test_what_does_not_fit_is_refused(device):
    pool = converted(random_pool(2, candidates=6), lambda x: x.to(device))
    unit, floor = torch.zeros(6, dtype=torch.int64, device=device), torch.zeros(6, device=device)
    shares, base = torch.tensor([1], device=device), torch.zeros(3, 5, device=device)
    divergence = FisherDivergence(position_weights(3, device=device))
    with pytest.raises(TypeError, match="divergence is a object; expected a TopKDivergence or FisherDivergence"):
        choose(pool, base, unit, shares, floor, object())
    with pytest.raises(TypeError, match="unit is torch.int32; expected torch.int64"):
        choose(pool, base, unit.int(), shares, floor, divergence)
    with pytest.raises(ValueError, match=r"floor has shape \(5,\); expected \(6\)"):
        choose(pool, base, unit, shares, floor[:5], divergence)
    with pytest.raises(ValueError, match="pool.values has strides"):
        values = pool.values.transpose(1, 2).contiguous().transpose(1, 2)
        choose(replace(pool, values=values), base, unit, shares, floor, divergence)


@pytest.mark.parametrize(
    "change, said",
    [
        ({"a": torch.zeros(6, 2)}, r"pool.a has shape \(6, 2\); expected \(any, any, any\)"),
        ({"base": torch.zeros(3, 0)}, "base has 0 channels; expected 1 to 128"),
        ({"base": torch.zeros(3, 129)}, "base has 129 channels"),
        ({"base": torch.zeros(3)}, r"base has shape \(3,\); expected \(3, any\)"),
        ({"mass": torch.zeros(())}, r"pool.mass has shape \(\); expected \(any, 2, 3\)"),
        ({"mass": torch.zeros(0, 2, 3)}, r"pool.mass has shape \(0, 2, 3\); expected a head"),
        ({"shares": torch.tensor([2, -1])}, "shares has -1; expected 0 or more"),
    ],
    ids=str,
)
def test_pools_of_no_shape_that_kernels_take_are_refused(device, change, said):
    pool = converted(random_pool(2, candidates=6), lambda x: x.to(device))
    given = {
        "base": torch.zeros(3, 5),
        "unit": torch.zeros(6).long(),
        "shares": torch.tensor([1]),
        "floor": torch.zeros(6),
    }
    given = {name: change.get(name, x).to(device) for name, x in (given | {"floor": torch.zeros(6)}).items()}
    held = {name: x.to(device) for name, x in change.items() if name not in given}
    with pytest.raises(ValueError, match=said):
        choose(replace(pool, **held), **given, divergence=FisherDivergence(position_weights(3, device=device)))
