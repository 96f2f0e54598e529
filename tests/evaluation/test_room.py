"""A sample has the room that all its copies take at once."""

import pytest

from bpkv_trt.errors import InputError
from bpkv_trt.evaluation.cells import measure_sample
from bpkv_trt.evaluation.room import fitting_sample
from bpkv_trt.runtime import engine
from tests.evaluation.small_comparison import comparison, tiny_llama


@pytest.mark.parametrize("regime", ["prefill", "deferred"])
def test_drafts_longer_than_what_is_measured_have_room_behind_both_caches(
    monkeypatch: pytest.MonkeyPatch, regime: str
) -> None:
    monkeypatch.setattr(engine, "stop_tokens_of", lambda *_: frozenset())  # no draft ends early
    compared = comparison("bpkv[lookahead=150]", (regime,), "0.97", horizon=2)
    (cell,) = measure_sample(tiny_llama(), compared, "passkey", 3)["cells"]
    assert cell["entries_after"] < cell["entries_before"] and cell["one_step_kl"] is not None


def test_too_few_tokens_are_named_as_they_were_given_with_the_fewest_that_would_do() -> None:
    """The chat frame is part of --tokens: neither number leaves it out."""

    def fits(tokens: int) -> bool:
        try:
            fitting_sample(tiny_llama(), comparison("snapkv", tokens=tokens), "passkey", 3)
        except InputError:
            return False
        return True

    fewest = next(tokens for tokens in range(50, 400) if fits(tokens))
    for tokens in (10, fewest - 1):
        with pytest.raises(InputError, match=rf"^{tokens} tokens are too few .* takes {fewest} or more"):
            fitting_sample(tiny_llama(), comparison("snapkv", tokens=tokens), "passkey", 3)
