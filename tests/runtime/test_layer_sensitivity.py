"""RippleKV's table: noise in one layer's cached values, against a transformers cache that is disturbed by hand."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from bpkv_trt.cli import main
from bpkv_trt.errors import InputError
from bpkv_trt.evaluation.layer_sensitivity import (
    NOISE,
    POSITIONS,
    calibration_samples,
    layer_sensitivity,
    layer_weights,
)
from bpkv_trt.policies.registry import settled
from bpkv_trt.score_table import ScoreTable
from tests.runtime.conftest import ASSETS, MakeEngine, loaded, prompt_tokens
from tests.runtime.trail import follow

NAME = "tiny-llama"
MODEL = str(ASSETS / NAME)


def true_sensitivity(tokens: list[int], seed: int) -> list[float]:
    """Every last token on its own, over a cache of the tokens before it with the layer's values disturbed."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float64).eval()
    generator, result = torch.Generator().manual_seed(seed), []
    with torch.no_grad():
        cache = DynamicCache(config=model.config)
        full = model(torch.tensor([tokens]), past_key_values=cache).logits[0].log_softmax(-1)
        for layer in range(model.config.num_hidden_layers):
            v = cache.layers[layer].values[0]  # [Hkv, n, D]
            normal = torch.randn(v.shape, generator=generator).double()
            noise = NOISE * v.norm(dim=-1, keepdim=True) * normal / math.sqrt(v.shape[-1])
            divergences = []
            for position in range(len(tokens) - POSITIONS, len(tokens)):
                copy = DynamicCache(config=model.config)
                for index, rows in enumerate(cache.layers):
                    values = rows.values + noise if index == layer else rows.values
                    copy.update(rows.keys[:, :, :position], values[:, :, :position], index)
                ids, at = torch.tensor([[tokens[position]]]), torch.tensor([[position]])
                disturbed = model(ids, position_ids=at, past_key_values=copy).logits[0, -1].log_softmax(-1)
                divergences.append(float((full[position].exp() * (full[position] - disturbed)).sum()))
            result.append(sum(divergences) / POSITIONS)
    return result


def test_sensitivity_is_the_divergence_under_noise_in_a_layers_values() -> None:
    tokens = prompt_tokens(NAME, 1, 90)
    ours = layer_sensitivity(loaded(NAME), [tokens], seed=3)
    assert ours == pytest.approx(true_sensitivity(tokens, 3), rel=1e-3, abs=1e-8)
    assert max(ours) > 1e-5


def test_the_model_and_its_other_layers_stay_as_they_were() -> None:
    """Samples do not disturb one another, and the mean is theirs."""
    first, second = prompt_tokens(NAME, 1, 90), prompt_tokens(NAME, 2, 120)
    assert layer_sensitivity(loaded(NAME), [first], seed=3) == layer_sensitivity(loaded(NAME), [first], seed=3)
    both = layer_sensitivity(loaded(NAME), [first, second], seed=3)
    alone = layer_sensitivity(loaded(NAME), [first], seed=3)
    assert all(2 * mean >= one for mean, one in zip(both, alone, strict=True))


def test_layers_with_a_window_are_not_measured() -> None:
    measured = layer_sensitivity(loaded("tiny-gemma"), [prompt_tokens("tiny-gemma", 1, 90)], seed=0)
    assert [value > 0 for value in measured] == [False, True, False, True]
    weights = layer_weights(measured, loaded("tiny-gemma").traits.compactable_layers)
    assert weights[0] == weights[2] == 1 and weights[1] + weights[3] == pytest.approx(2)


def test_weights_are_an_exponential_map_of_mean_one() -> None:
    weights = layer_weights([0.0, 2.0, 1.0], [0, 1, 2])
    assert sum(weights) == pytest.approx(3)
    assert weights[1] / weights[0] == pytest.approx(math.e) and weights[2] / weights[0] == pytest.approx(math.e**0.5)
    assert layer_weights([0.0, 0.0], [0, 1]) == (1.0, 1.0) and layer_weights([0.0], []) == (1.0,)


def test_samples_are_stretches_of_the_text_by_seed() -> None:
    encoder, text = loaded(NAME).encoder, " ".join(f"word{number}" for number in range(2000))
    drawn = calibration_samples(encoder, text, 3, 100, seed=1)
    assert (
        drawn
        == calibration_samples(encoder, text, 3, 100, seed=1)
        != calibration_samples(encoder, text, 3, 100, seed=2)
    )
    decode = loaded(NAME).tokenizer.decode
    for tokens in drawn:
        assert 64 <= len(tokens) <= 100 and decode(tokens[1:]) in text
    with pytest.raises(InputError, match="gives only 4 tokens, and 64 are the least"):
        calibration_samples(encoder, "abc", 1, 100, seed=1)


def test_the_command_writes_a_table_that_any_policy_takes(tmp_path: Path, make_engine: MakeEngine) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "table.json"
    text.write_text(" ".join(f"the code of lamp {number} is amber." for number in range(300)))
    options = ["--samples", "2", "--seed", "5", "--text", str(text)]
    assert main(["layer-table", "--model", MODEL, "--output", str(out), *options]) == 0
    written: dict[str, Any] = json.loads(out.read_text())
    table = ScoreTable.load(out)
    assert [row[0] for row in table.weights] == written["weights"] and sum(written["weights"]) == pytest.approx(4)
    assert written["text"]["name"] == "text.txt" and written["model"] == MODEL and written["seed"] == 5
    assert written["samples"] == 2 and "torch" in written["versions"]
    prompt = prompt_tokens(NAME, 1, 200)
    for policy in ("ripplekv", "tova", "bpkv"):
        for scope in ("head", "layer", "global"):
            engine = make_engine(NAME, policy=policy, scope=scope, layer_table=out, regime="prefill", budget="0.3")
            (trail,) = follow(engine, [prompt], [[]])
            kept = engine.pool.lengths(trail.sequence).sum(axis=1)
            assert kept.sum() == int(0.3 * len(prompt)) * 4 * 2
            if scope != "global":
                assert kept[0] == max(kept) and kept[0] > min(kept)
            assert settled(engine.compactor.config) == engine.compactor.config


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--samples", "0"], "--samples is 0; give 1 or more"),
        (["--seed", "-1"], "--seed is -1; give 0 or more"),
        (["--text", "absent.txt"], "The calibration text absent.txt does not exist; check the path given to --text"),
        (["--output", "absent/table.json"], "The directory absent for table.json does not exist"),
        (["--output", "table.safetensors"], "written as JSON"),
        (["--model", "absent/model"], "There is no model"),
        (["--samples", "many"], "invalid int value"),
    ],
)
def test_mistakes_are_told_before_the_work(
    options: list[str], reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["layer-table", "--model", MODEL, "--output", "table.json", *options]) == 2
    printed = capsys.readouterr()
    if "absent/model" not in options:
        assert reason in printed.err
    assert printed.err.startswith("bpkv: ") and printed.err.count("\n") == 1 and printed.out == ""
    assert list(tmp_path.iterdir()) == []


def test_the_text_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some text")
    assert main(["layer-table", "--model", MODEL, "--output", str(text), "--text", str(text)]) == 2
    assert "--output would overwrite the file given to --text" in capsys.readouterr().err
    assert text.read_text() == "some text"
