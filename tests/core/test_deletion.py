import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bpkv_trt.core.deletion import HeadAttention, read_shift, retained, singleton_scores
from bpkv_trt.core.divergence import FisherDivergence, TopKDivergence, position_weights
from bpkv_trt.core.evidence import mask_divergence, mask_shift, score_entries
from bpkv_trt.core.evidence_source import EvidenceSource


def scored(sequence):
    source = EvidenceSource(sequence.statistics, sequence.view, sequence.traits)
    return score_entries(source, sequence.statistics.readout.divergence)


def without(sequence, layer, head, row):
    evict = torch.zeros(sequence.traits.layers, sequence.traits.kv_heads, int(sequence.view.lengths.max())).bool()
    evict[layer, head, row] = True
    return evict


@pytest.mark.parametrize("share", [0.05, 0.5, 0.95])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_deleted_set_equals_attention_over_the_survivors(sequence_of, share, sinks, softcap):
    sequence = sequence_of(sinks=sinks, softcap=softcap)
    source = EvidenceSource(sequence.statistics, sequence.view, sequence.traits)
    evict = torch.rand(2, 2, 60) < share
    evict[..., 5] = True
    evict[..., 0] = share > 0.9  # the sink row leaves too: nearly all mass
    evict[..., -4:] = False  # every position keeps its own row
    for layer in range(2):
        weights = sequence.exact_weights(layer, torch.ones(2, 60, dtype=torch.bool)).unflatten(0, (2, 3))
        before = sequence.exact_context(layer, torch.ones(2, 60, dtype=torch.bool))
        moved = (sequence.exact_context(layer, ~evict[layer]) - before).unflatten(1, (2, 3))  # [M, Hkv, G, D]
        for head in range(2):
            state = retained(source.attention(layer, head), evict[layer, head])
            mass = 1 - weights[head][..., evict[layer, head]].sum(-1)
            torch.testing.assert_close(state.mass.double(), mass, rtol=2e-5, atol=2e-7 if sinks else 1e-12)
            error = (state.shift.transpose(0, 1).double() - moved[:, head]).norm() / moved[:, head].norm()
            assert error < 2e-5


def test_small_retained_mass_keeps_its_digits():
    # 1 - mu in fp32 would know 1e-5 to two digits; the sum over the kept rows knows all of them.
    logits = torch.tensor([20.0, 8.5, 8.3, 8.1]).double()
    a, v = torch.softmax(logits, 0), torch.randn(4, 8).double()
    evict = torch.tensor([True, False, False, False])
    held = HeadAttention(a.float()[None, None], (a @ v).float()[None, None], v.float())
    state = retained(held, evict)
    assert a[1:].sum() < 3e-5
    torch.testing.assert_close(state.mass.double().squeeze(), a[1:].sum(), rtol=1e-6, atol=0)
    exact = torch.softmax(logits[1:], 0) @ v[1:] - a @ v
    torch.testing.assert_close(state.shift.double().squeeze(), exact, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sinks", [False, True])
def test_singleton_scores_match_attending_again_in_float64(sequence_of, kl_of, sinks):
    sequence = sequence_of(layers=1, rows=300, sharpness=3.0, readout_scale=2e-2, sinks=sinks)
    scores = scored(sequence)
    exact = torch.tensor(
        [[[sequence.exact_kl(without(sequence, 0, head, row)) for row in range(300)] for head in range(2)]]
    )
    tested = exact > 1e-12
    assert exact.min() < 1e-11 and tested.double().mean() > 0.9
    relative = ((scores - exact).abs() / exact)[tested]
    assert relative.max() < 1e-5


def test_tiles_and_the_last_partial_tile_agree_with_one_pass(sequence_of, monkeypatch):
    sequence = sequence_of(rows=333)
    whole = scored(sequence)
    monkeypatch.setattr("bpkv_trt.core.deletion.TILE_ELEMENTS", 1)
    torch.testing.assert_close(scored(sequence), whole, rtol=1e-5, atol=0)


def test_ragged_heads_are_scored_over_their_own_rows(sequence_of):
    sequence = sequence_of(rows=[[9, 60], [4, 31]])
    scores = scored(sequence)
    assert scores.shape == (2, 2, 60)
    for layer, head, length in ((0, 0, 9), (0, 1, 60), (1, 0, 4), (1, 1, 31)):
        assert (scores[layer, head, length:] == 0).all()
        assert (scores[layer, head, :length] > 0).all()


def test_fisher_scores_are_the_square_of_the_read_shift(sequence_of):
    sequence = sequence_of()
    source = EvidenceSource(sequence.statistics, sequence.view, sequence.traits)
    layer, whole = next(source.layers())
    held, g = source.attention(layer, 1), whole.rows[:, :, 1]
    scores = singleton_scores(held.a, held.c, held.v, g, FisherDivergence(position_weights(4)))
    for row in (0, 7, 55):
        shift = (
            sequence.exact_context(layer, ~without(sequence, layer, 1, row)[layer]).float()
            - (sequence.statistics.context[layer])
        )
        exact = read_shift(shift[:, 3:].transpose(0, 1)[None], g[:, :, None]).square().mean() / 2
        torch.testing.assert_close(scores[row], exact, rtol=1e-3, atol=1e-12)


@pytest.mark.parametrize("fisher", [False, True])
def test_weighted_scores_are_the_weighted_mean_of_each_positions_own(sequence_of, fisher):
    sequence, drafted = sequence_of(), (1.0, 0.1, 0.1)
    source, p = EvidenceSource(sequence.statistics, sequence.view, sequence.traits), sequence.statistics.topk_p
    layer, whole = next(source.layers())
    held, g = source.attention(layer, 1), whole.rows[:, :, 1]

    def scores(of: slice, weights: torch.Tensor) -> torch.Tensor:
        divergence = FisherDivergence(weights) if fisher else TopKDivergence(p[of], weights)
        return singleton_scores(held.a[:, of], held.c[of], held.v, g[of], divergence)

    alone = [scores(slice(m, m + 1), torch.ones(1)) for m in range(4)]
    mean = sum(weight * score.double() for weight, score in zip((1.0, *drafted), alone, strict=True)) / 2.2
    ours = scores(slice(None), position_weights(4, drafted))
    torch.testing.assert_close(ours.double(), mean, rtol=1e-5, atol=0)
    assert not torch.allclose(ours, scores(slice(None), position_weights(4)), rtol=1e-2)


def test_an_entry_that_is_all_a_position_sees_goes_last():
    a = torch.zeros(1, 2, 3)
    a[0, 0, 0], a[0, 1, :2] = 1.0, torch.tensor([0.25, 0.75])
    v = torch.randn(3, 4)
    scores = singleton_scores(
        a, (a[0] @ v)[:, None], v, torch.randn(2, 5, 1, 4), TopKDivergence(torch.full((2, 5), 0.2))
    )
    assert scores[0] == torch.finfo(torch.float32).max
    assert torch.isfinite(scores).all() and scores[2] == 0 < scores[1]


def test_weights_near_one_are_not_clamped(kl_of):
    logits, v, g = torch.tensor([9.2, 0.0, 0.1]).double(), torch.randn(3, 4), torch.randn(1, 5, 1, 4)
    p = torch.full((1, 5), 0.2)
    a = torch.softmax(logits, 0)
    c = a @ v.double()
    score = singleton_scores(a.float()[None, None], c.float()[None, None], v, g, TopKDivergence(p))[0]
    assert a[0] > 0.999
    moved = torch.softmax(logits[1:], 0) @ v[1:].double() - c
    exact = kl_of(p, torch.einsum("d,mcgd->mc", moved, g.double()))
    torch.testing.assert_close(score.double(), exact, rtol=3e-3, atol=0)  # fp32 knows 1 - a = 2e-4 to 3e-4 of itself


def test_a_mask_adds_up_over_heads_and_layers(sequence_of, kl_of):
    sequence = sequence_of()
    source = EvidenceSource(sequence.statistics, sequence.view, sequence.traits)
    evict = torch.rand(2, 2, 60) < 0.4
    evict[..., -4:] = False
    exact = sequence.exact_shift(evict)
    torch.testing.assert_close(mask_shift(source, evict).double(), exact, rtol=1e-4, atol=1e-6)
    estimate = mask_divergence(source, sequence.statistics.readout.divergence, evict)
    assert estimate == pytest.approx(float(kl_of(sequence.statistics.topk_p, exact)), rel=2e-5)
    nothing = torch.zeros_like(evict)
    assert mask_divergence(source, sequence.statistics.readout.divergence, nothing) == 0


class LargestTensor(TorchDispatchMode):
    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.elements = max(self.elements, leaf.untyped_storage().nbytes() // leaf.element_size())
        return result


def test_no_tensor_of_scoring_grows_faster_than_the_tokens(sequence_of):
    largest = {}
    for rows in (2000, 4000):
        sequence = sequence_of(layers=1, kv_heads=1, rows=rows)
        with LargestTensor() as watch:
            scored(sequence)
        largest[rows] = watch.elements
    group, positions, width = 3, 4, 16
    assert largest[4000] <= max(2**19, 4000 * max(group * positions, width))
    assert largest[4000] <= 2 * largest[2000]
