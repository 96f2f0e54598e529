"""Our replay scores as kvpress's KVzipPress does: same model, same tokens, same parts, float32.

What had to be made equal: a tokenizer without a chat template, since the press leaves a template's beginning out of the
context and we repeat it with the rest; and no recent window, which the press does not have.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from bpkv_trt.config import BpkvConfig
from bpkv_trt.models.loading import load_model
from bpkv_trt.policies.registry import settled
from bpkv_trt.runtime import repetition
from bpkv_trt.runtime.engine import Engine, make_pool
from bpkv_trt.runtime.scratch import scratch_rows
from build_scripts.recall_text import recall_prompt

kvpress = pytest.importorskip("kvpress", reason="pip install 'bpkv-trt[kvpress]'", exc_type=ImportError)

TINY = Path(__file__).parents[1] / "assets" / "tiny-llama"
PART = 120


@pytest.fixture
def plain(tmp_path: Path) -> str:
    """The model without its chat template."""
    shutil.copytree(TINY, tmp_path / "plain")
    path = tmp_path / "plain" / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    del settings["chat_template"]
    path.write_text(json.dumps(settings))
    return str(path.parent)


def press_scores(model: str, tokens: list[int], monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """[L, Hkv, T], as the press has them before it selects."""
    kept: list[Tensor] = []
    monkeypatch.setattr(
        kvpress.KVzipPress, "compress_post", lambda press, _: kept.append(press.score_val[:, 0].clone())
    )
    theirs: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa").eval()
    with torch.no_grad(), kvpress.KVzipPress(0.5, chunk_size=PART)(theirs):
        theirs(torch.tensor([tokens]), past_key_values=DynamicCache())
    return kept[0]


@pytest.mark.parametrize("length", [100, 290])
def test_scores_and_kept_entries_are_the_same(plain: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one part and in three; all layers and heads compete, as there."""
    monkeypatch.setattr(repetition, "PART", PART)
    loaded = load_model(plain)
    tokens = loaded.encoder.encode_raw(recall_prompt(1, 400)[0])[:length]
    truth = press_scores(plain, tokens, monkeypatch)
    options: dict[str, Any] = {"regime": "prefill", "budget": "0.5", "recent": 1, "positions": 1}
    config = settled(BpkvConfig(policy="kvzip", **options))
    scratch = scratch_rows(config, loaded.encoder, [length])
    engine = Engine(loaded, config, make_pool(loaded, length, 8, scratch=scratch, poison=True))
    sequence = engine.open()
    engine.encode([(sequence, tokens)])
    ours = engine.statistics.collect(sequence, 1, engine.trace).replay_attention
    assert ours is not None and torch.allclose(ours, truth, rtol=1e-4, atol=1e-6)
    engine.compactor.on_context_step_end(sequence)
    kept = torch.zeros(truth.shape, dtype=torch.bool)
    for layer, head in ((layer, head) for layer in range(truth.shape[0]) for head in range(truth.shape[1])):
        kept[layer, head, engine.pool.positions(sequence, layer, head).long()] = True
    truth[..., :4] = truth[..., -1:] = 2  # what neither side evicts
    order = truth.flatten().argsort()
    evicted = truth.numel() - int(0.5 * length) * truth.shape[0] * truth.shape[1]
    assert torch.equal(kept.flatten()[order], torch.arange(truth.numel()) >= evicted)
