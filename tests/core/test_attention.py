import pytest
import torch

from bpkv_trt.core.attention import attention_weights
from bpkv_trt.core.evidence_source import EvidenceSource


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("rows", [4, 5, 60])
def test_weights_are_the_softmax_over_what_each_position_sees(sequence_of, softcap, sinks, rows):
    sequence = sequence_of(rows=rows, softcap=softcap, sinks=sinks)
    source = EvidenceSource(sequence.statistics, sequence.view, sequence.traits)
    everything = torch.ones(sequence.traits.kv_heads, rows, dtype=torch.bool)
    for layer in range(2):
        exact = sequence.exact_weights(layer, everything).unflatten(0, (2, 3))
        for head in range(2):
            a = source.attention(layer, head).a
            assert a.dtype == torch.float32
            torch.testing.assert_close(a.double(), exact[head], rtol=1e-5, atol=1e-9)


def test_rows_of_later_positions_weigh_exactly_zero():
    a = attention_weights(torch.randn(4, 2, 8), torch.randn(9, 8), 0.3)
    for m in range(4):
        assert (a[:, m, 6 + m :] == 0).all() and (a[:, m, : 6 + m] > 0).all()
    torch.testing.assert_close(a.sum(-1), torch.ones(2, 4))


def test_a_sink_takes_its_share_and_keys_keep_their_ratios():
    q, k, sink = torch.randn(2, 3, 8), torch.randn(9, 8), torch.tensor([0.0, 1.0, -2.0])
    plain, with_sink = attention_weights(q, k, 0.3), attention_weights(q, k, 0.3, sink=sink)
    mass = with_sink.sum(-1)
    assert (mass < 1).all()
    torch.testing.assert_close(with_sink / mass[..., None], plain)


def test_half_precision_inputs_are_computed_in_fp32():
    q, k = torch.randn(2, 3, 8).bfloat16(), torch.randn(9, 8).bfloat16()
    assert torch.equal(attention_weights(q, k, 0.3), attention_weights(q.float(), k.float(), 0.3))


def test_a_position_without_a_row_of_its_own_is_refused():
    with pytest.raises(AssertionError, match="rows of their own"):
        attention_weights(torch.randn(4, 1, 8), torch.randn(3, 8), 1.0)
