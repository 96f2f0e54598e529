"""What is printed of a report."""

from typing import Any

import pytest
from rich.console import Console

from bpkv_trt.summary import print_generate


def report(**changes: Any) -> dict[str, Any]:
    return {
        "text": "The [bold]with[/bold] statement.",
        "prompt_tokens": 2850,
        "generated_tokens": 21,
        "policy": "bpkv",
        "regime": ["prefill", "generation"],
        "scope": "global",
        "budget": {
            "requested": "0.2", "entries_total": 256500, "entries_kept": 51300, "fraction": 0.2, "clamped": False
        },
        "pool": {"page_size": 32, "bytes_before": 131 * 2**20, "bytes_after": 27 * 2**20, "pages_freed": 6400},
        "timings_s": {"load": 1.5, "prefill": 4.25, "verify": 0.0},
        "events": [],
        "notes": [],
        **changes,
    }  # fmt: skip


def test_every_number_that_a_user_asks_for_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    verify = {"future_kl_mean": 0.0123, "future_kl_max": 0.5, "top1_agreement": 0.952, "tokens": 21}
    for terminal in (False, True):
        console = Console(force_terminal=terminal, width=160, color_system=None)
        print_generate(report(verify=verify), console)
        output = capsys.readouterr().out
        assert output.startswith("The [bold]with[/bold] statement.\n"), "the text comes first, as it is"
        for words in ("2,850 of prompt, 21 generated", "51,300 of 256,500 (20.00%, asked for 0.2)"):
            assert words in output
        for words in ("131.0 -> 27.0 MiB", "6,400 pages freed", "load 1.50, prefill 4.25", "1.23e-02", "95.2% of 21"):
            assert words in output
        assert "verify 0.00" not in output


def test_what_did_not_happen_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    nothing = {"future_kl_mean": None, "future_kl_max": None, "top1_agreement": None, "tokens": 0}
    events = [{"note": "nothing is evicted: 20 tokens"}, {"note": None}]
    clamped = {**report()["budget"], "clamped": True}
    print_generate(report(verify=nothing, events=events, budget=clamped), Console(force_terminal=False))
    output = capsys.readouterr().out
    assert "notes: nothing is evicted: 20 tokens\n" in output
    assert "nothing to compare" in output and "raised to the protected tokens" in output
