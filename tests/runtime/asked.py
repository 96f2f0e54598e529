"""Requests of a serving loop on a trained model, and the answers that a plain generator gives."""

from typing import Any

from bpkv_trt.config import BpkvConfig
from bpkv_trt.runtime.engine import Engine, make_pool
from bpkv_trt.runtime.engines import Engines
from bpkv_trt.runtime.generator import Generator
from bpkv_trt.runtime.serving_request import ServingRequest
from build_scripts.recall_text import recall_prompt
from tests.runtime.conftest import SERVED, SMALL, loaded


def asked(number: int, tokens: int = 120, **options: Any) -> ServingRequest:
    return ServingRequest(**{"text": recall_prompt(number, tokens)[0], "raw": True, "max_tokens": 12, **options})


def alone(request: ServingRequest) -> str:
    """What a plain generator answers to a request without stop strings."""
    model = loaded("tiny-llama")
    pool = make_pool(model, 900, SMALL["page_size"])
    base = Engine(model, BpkvConfig(**SERVED), pool)
    config = Engines(model, BpkvConfig(**SERVED), pool, base.trace).configured(request.options)
    engine = Engine(model, config, pool)
    generator = Generator(engine)
    turns = model.encoder.encode(request.text, request.question, raw=request.raw)
    answer = generator.add(turns, request.sampling(engine.statistics.stop_tokens, engine.compactor.config.seed))
    generator.generate([answer])
    return str(model.tokenizer.decode(answer.generated, skip_special_tokens=True))
