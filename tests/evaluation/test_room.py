"""A sample has the room that all its copies take at once."""

import pytest

from bpkv_trt.evaluation.cells import measure_sample
from bpkv_trt.runtime import engine
from tests.evaluation.small_comparison import comparison, tiny_llama


@pytest.mark.parametrize("regime", ["prefill", "deferred"])
def test_drafts_longer_than_what_is_measured_have_room_behind_both_caches(
    monkeypatch: pytest.MonkeyPatch, regime: str
) -> None:
    monkeypatch.setattr(engine, "stop_tokens", lambda *_: frozenset())  # no draft ends early
    compared = comparison("bpkv[lookahead=150]", (regime,), "0.97", horizon=2)
    (cell,) = measure_sample(tiny_llama(), compared, "passkey", 3)["cells"]
    assert cell["entries_after"] < cell["entries_before"] and cell["one_step_kl"] is not None
