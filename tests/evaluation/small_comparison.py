"""Small comparisons on a trained model."""

from functools import cache
from pathlib import Path
from typing import Any

from bpkv_trt.config import BpkvConfig
from bpkv_trt.evaluation.arm import arms_of
from bpkv_trt.evaluation.comparison import Comparison
from bpkv_trt.evaluation.contender import parse_contenders
from bpkv_trt.models.loading import LoadedModel, load_model

LLAMA = str(Path(__file__).parents[1] / "assets" / "tiny-llama")


@cache
def tiny_llama() -> LoadedModel:
    return load_model(LLAMA)


def comparison(
    policies: str, regimes: tuple[str, ...] = ("prefill",), budgets: str = "0.3", **given: Any
) -> Comparison:
    common = BpkvConfig(recent=16, positions=6, defer=6, page_size=8, interval=16)
    arms = arms_of(parse_contenders(policies), common, regimes, budgets.split(","))
    settings: dict[str, Any] = {"tasks": ("passkey",), "seeds": range(3, 5), "tokens": 400, "horizon": 12}
    return Comparison(model=LLAMA, arms=arms, common=common, **{**settings, **given})
