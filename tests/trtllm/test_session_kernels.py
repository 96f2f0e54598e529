"""On a GPU a session's stage 2 and moves are done by the kernels that were compiled with its engine."""

import importlib
from functools import partial

import pytest
import torch

from bpkv_trt.kernels.configuration import KernelConfiguration, session_launches
from bpkv_trt.kernels.launch import run_by_triton
from bpkv_trt.kernels.paged import CacheType
from bpkv_trt.kernels.variant import Variant
from tests.kernels import interpreter  # noqa: F401
from tests.trtllm.built_network import PAGE, engine_settings
from tests.trtllm.session_place import SessionPlace, answers
from tests.trtllm.watched_session import FRESH, open_session

PROMPTS = [[5, 9, 33, 12, 60, 7, 7, 21, 48, 3, 17, 40], [44, 2, 8, 51, 30, 19, 6]]
NEW = 13
PARTS = {"stage 2": "weigh_candidates", "masks": "partial_statistics", "moves": "pack_rows"}


class Compiled:
    """As if compiled: what it is asked for runs in Triton's interpreter."""

    def __init__(self, configuration):
        self.known = {Variant.of(launch) for launch in session_launches(configuration)}
        self.launched = []

    def launch(self, launch):
        assert Variant.of(launch) in self.known, f"{launch.kernel.__name__} was not compiled"
        self.launched.append(launch.kernel.__name__)
        run_by_triton(launch)


@pytest.mark.parametrize("regime", ["prefill,generation", "deferred"])
def test_all_that_a_session_launches_was_compiled_with_its_engine(trt, tensorrt_10, monkeypatch, regime):
    options = {"budget": "0.5", "sinks": 1, "refine": 4, "interval": 5, "defer": 2, "recent": 5}
    settings = engine_settings(**options, generation_budget="6t", regime=regime)
    place, config = SessionPlace(trt, tensorrt_10, "llama", settings=settings), settings.config
    with place.installed(*FRESH) as installed:
        plain = open_session(installed)
        expected = answers(place.decode(plain, PROMPTS, NEW), PROMPTS, NEW)

        traits = place.built.loaded.traits
        configuration = KernelConfiguration(
            query_heads=traits.query_heads,
            kv_heads=traits.kv_heads,
            head_dim=traits.head_dim,
            page_size=PAGE,
            cache=CacheType.FP32,
            activations=torch.float32,
            shared_pages=True,
            positions=config.scoring_positions,
            channels=config.top_k,
        )
        session = open_session(installed, kernels=Compiled(configuration))
        module = importlib.import_module(FRESH[0])
        monkeypatch.setattr(module, "BlockPool", partial(module.BlockPool, kernels=True))  # as on a GPU
        assert answers(place.decode(session, PROMPTS, NEW), PROMPTS, NEW) == expected
        assert set(PARTS.values()) <= set(session.built.kernels.launched)
        assert [len(own) for own in session.events] == [len(own) for own in plain.events]
