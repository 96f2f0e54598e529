"""How drafted tokens are judged: as if they were real, and not where only the latest attention has a say."""

import itertools

import pytest
import torch
from torch import Tensor

from bpkv_trt.core.evidence import score_entries
from bpkv_trt.core.evidence_source import EvidenceSource
from bpkv_trt.policies.snapkv import SnapKv
from tests.runtime.drafts import AHEAD, OPTIONS, PROMPT
from tests.runtime.random_models import COMPACTABLE, engine_of, wrapped


@pytest.mark.parametrize("name", COMPACTABLE)
@pytest.mark.parametrize("readout", ["direct", "exact"])
@pytest.mark.usefixtures("endless")
def test_drafted_positions_are_those_of_a_real_sequence(name: str, readout: str) -> None:
    """Scores of the prompt's entries are those of a sequence that has the draft as its own last tokens."""
    drafting, real = (engine_of(name, **OPTIONS, readout=readout) for _ in range(2))
    count = drafting.compactor.config.positions + AHEAD
    sequence, other = drafting.open(), real.open()
    drafting.encode([(sequence, PROMPT)])
    with drafting.statistics.look_ahead(sequence, AHEAD, drafting.trace) as drafted:
        assert drafted == (1.0,) * AHEAD
        real.encode([(other, drafting.host.tokens[sequence])])
        both = [
            (engine.statistics.collect(one, count, engine.trace, behind), engine.pool.view(one))
            for engine, one, behind in ((drafting, sequence, drafted), (real, other, ()))
        ]
        (ours, theirs) = both
        assert torch.equal(ours[0].positions, theirs[0].positions)
        assert torch.equal(ours[0].topk_ids, theirs[0].topk_ids)
        for field in ("q", "context", "residual", "topk_p", "covered_mass"):
            assert_near(getattr(ours[0], field), getattr(theirs[0], field))
        layers = list(wrapped(name).traits.compactable_layers)
        sources = [EvidenceSource(*each, wrapped(name).traits) for each in both]
        divergences = [statistics.readout.divergence for statistics, _ in both]
        entries = [score_entries(*each)[layers, :, : len(PROMPT)] for each in zip(sources, divergences, strict=True)]
        assert_near(*(each.log() for each in entries))


def assert_near(ours: Tensor, theirs: Tensor) -> None:
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-3


@pytest.mark.parametrize("name", COMPACTABLE)
@pytest.mark.parametrize("scope", ["global", "layer"])
@pytest.mark.usefixtures("endless")
def test_drafted_tokens_have_no_say_in_what_a_head_keeps_by_its_latest_attention(name: str, scope: str) -> None:
    """The highest of SnapKV's scores of the sequence without a draft stay in every head, up to its share."""
    engine = engine_of(name, **OPTIONS, scope=scope, safeguard=0.8)
    config, traits, sequence = engine.compactor.config, wrapped(name).traits, engine.open()
    engine.encode([(sequence, PROMPT)])
    plain = engine.statistics.collect(sequence, config.positions, engine.trace)
    scores = SnapKv(config, traits).score(plain, engine.pool.view(sequence))
    event = engine.compactor.on_context_step_end(sequence)
    assert event is not None and event.drafted == AHEAD
    even, eligible = int(0.4 * len(PROMPT)), range(config.sinks, len(PROMPT) - config.recent)
    for layer, head in itertools.product(traits.compactable_layers, range(traits.kv_heads)):
        count = int(0.8 * even) - config.protected
        best = sorted(eligible, key=lambda row: float(-scores[layer, head, row]))[:count]  # noqa: B023 (used at once)
        assert count > 0 and set(best) <= set(engine.pool.positions(sequence, layer, head).tolist())
