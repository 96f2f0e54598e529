"""The estimate ranks masks as masked forwards do: Spearman over masks of one size, on trained models and on SmolLM2.

Bounds: 0.75 for the exact readout, 0.65 for the direct one. The mean over prompts is held to
them; what each prompt, and masks without structure, give is in `profiles/results`.
"""

import statistics

import pytest

from bpkv_trt.config import BpkvConfig
from bpkv_trt.evaluation.estimate import study
from bpkv_trt.evaluation.masks import MaskKind, block_of_heads, half_of_a_layer, masks_of
from bpkv_trt.evaluation.ranks import spearman
from bpkv_trt.runtime.engine import Engine, make_pool
from profiles.estimate_truth import prompt
from tests.runtime.conftest import TRAINED, loaded, prompt_tokens

POSITIONS = 8


def correlations(name: str, prompts: list[list[int]], kind: MaskKind, count: int) -> dict[str, float]:
    model = loaded(name)
    configs = {readout: BpkvConfig(readout=readout, positions=POSITIONS) for readout in ("direct", "exact")}
    engines = {
        readout: Engine(model, config, make_pool(model, max(map(len, prompts)), config.page_size))
        for readout, config in configs.items()
    }
    found = []
    for seed, tokens in enumerate(prompts):
        masks = masks_of(kind, model.traits, len(tokens), count, 1000 + seed)
        found.append(study(engines, tokens, masks, POSITIONS).spearman())
    return {key: statistics.mean(each[key] for each in found) for key in found[0]}


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("kind", [half_of_a_layer, block_of_heads])
def test_trained_models(name: str, kind: MaskKind) -> None:
    found = correlations(name, [prompt_tokens(name, 1000 + seed, 300) for seed in range(4)], kind, 30)
    assert found["exact"] >= 0.75
    assert found["direct"] >= 0.65


@pytest.mark.slow
@pytest.mark.parametrize("kind", [half_of_a_layer, block_of_heads])
def test_smollm2(kind: MaskKind) -> None:
    encode = loaded("smollm2").encoder.encode_raw
    found = correlations("smollm2", [encode(prompt(1000 + seed))[:300] for seed in range(3)], kind, 24)
    assert found["exact"] >= 0.75
    assert found["direct"] >= 0.65


def test_spearman_is_the_correlation_of_ranks() -> None:
    assert spearman([1.0, 2.0, 3.0, 4.0], [10.0, 100.0, 1000.0, 1e9]) == pytest.approx(1)
    # d = (0, 1, -1, 0): 1 - 6 * 2 / (4 * 15)
    assert spearman([1.0, 2.0, 3.0, 4.0], [1.0, 3.0, 2.0, 4.0]) == pytest.approx(0.8)
