"""The main job on the default model and a long real text, held to what it promises."""

import json
from collections.abc import Sequence
from pydoc_data.topics import topics
from typing import Any

import pytest

from bpkv_trt.cli import main
from bpkv_trt.config import BpkvConfig
from bpkv_trt.models.loading import LoadedModel, load_model
from bpkv_trt.pool.storage import pages_of
from bpkv_trt.runtime.engine import Engine, make_pool
from bpkv_trt.runtime.generator import Generator
from bpkv_trt.runtime.sampling import SamplingParams
from build_scripts.demo_prompt import PAGES

pytestmark = pytest.mark.slow

TEXT, QUESTION = "\n\n".join(topics[page] for page in PAGES), "What does the with statement do?"
HEADS, PAGE = 30 * 3, 32  # layers x KV heads of SmolLM2; rows in a page
PAGE_BYTES = PAGE * 2 * 64 * 4  # K and V, head size 64, fp32
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def document(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The report of one run at 20 %."""
    home = tmp_path_factory.mktemp("run")
    prompt, out = home / "prompt.txt", home / "out.json"
    prompt.write_text(TEXT, encoding="utf-8")
    options = ["--question", QUESTION, "--budget", "0.2", "--verify", "--max-new-tokens", str(NEW_TOKENS)]
    assert main(["generate", "--model", "smollm2", "--prompt-file", str(prompt), "--json", str(out), *options]) == 0
    report: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return report


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    return load_model("smollm2")


def test_a_fifth_of_the_cache_is_kept_and_its_pages_are_free(document: dict[str, Any]) -> None:
    tokens, budget, pool = document["prompt_tokens"], document["budget"], document["pool"]
    assert tokens > 2000 and budget["entries_total"] == HEADS * tokens
    assert budget["entries_kept"] == HEADS * (tokens // 5)
    assert pool["bytes_before"] == HEADS * pages_of(tokens, PAGE) * PAGE_BYTES
    assert pool["bytes_after"] <= 0.2 * pool["bytes_before"] + HEADS * PAGE_BYTES
    assert pool["bytes_before"] - pool["bytes_after"] == pool["pages_freed"] * PAGE_BYTES
    assert document["verify"]["tokens"] >= document["generated_tokens"] - 1 > 0


def regret(engine: Engine, prompt: int, answer: Sequence[int]) -> float:
    """Mean nats by which the model, with its full cache, would have preferred another token of the answer."""
    copy, total = engine.host.fork(prompt), 0.0
    logits = engine.decode([(copy, answer[:1])])
    for token in answer[1:]:
        log_p = logits[0].log_softmax(-1)
        total += float(log_p.max() - log_p[token])
        logits = engine.decode([(copy, [token])])
    engine.host.release(copy)
    return total / (len(answer) - 1)


def test_the_answer_is_one_that_the_full_model_could_have_given(document: dict[str, Any], smollm2: LoadedModel) -> None:
    """Fluent: to the full model every token is, in the geometric mean, at least 1 / e as likely as its favourite there.

    Sampling from the model at temperature 1 costs about its entropy, 1 nat or so; the same tokens in another order
    cost several. A loop is cheap as well, so the words must also differ.
    """
    (prompt,) = smollm2.encoder.encode(TEXT, QUESTION)
    answer: list[int] = smollm2.tokenizer.encode(document["text"], add_special_tokens=False)
    engine = Engine(smollm2, BpkvConfig(policy="full"), make_pool(smollm2, len(prompt) + NEW_TOKENS, PAGE, caches=2))
    sequence = engine.open()
    engine.encode([(sequence, prompt)])
    assert regret(engine, sequence, answer) < 1.0
    assert regret(engine, sequence, answer[::-1]) > 3.0, "the criterion tells word salad from language"
    words = document["text"].split()
    assert len(words) > NEW_TOKENS / 2 and len(set(words)) > len(words) / 2


def test_a_second_request_of_the_freed_size_is_admitted(document: dict[str, Any], smollm2: LoadedModel) -> None:
    """In a pool that the first prompt fills to its last page."""
    (prompt,) = smollm2.encoder.encode(TEXT, QUESTION)
    rows = pages_of(len(prompt) + 2, PAGE) * PAGE
    config = BpkvConfig(budget="0.2", scope="head", lookahead=0, rehearsal=0)  # which would need room of its own
    engine = Engine(smollm2, config, make_pool(smollm2, rows, PAGE))
    generator = Generator(engine)
    first = generator.add([prompt], SamplingParams(max_new_tokens=rows - len(prompt)))
    freed = rows // PAGE - pages_of(len(prompt) // 5 + rows - len(prompt), PAGE)  # pages of every head
    second = generator.add([prompt[: freed * PAGE - 1]], SamplingParams(max_new_tokens=1))
    generator.step()
    assert second.sequence is None and first.events[0].pages_freed >= HEADS * freed
    generator.step()
    assert second.finished == "length" and first.finished is None
    generator.generate([first])
    assert engine.pool.live_pages == 0
