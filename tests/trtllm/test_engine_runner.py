"""An engine run from its folder, on TensorRT-LLM's stand-in: answers of the torch host, and what is refused."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bpkv_trt.config import BpkvConfig
from bpkv_trt.errors import BpkvError, ConfigError, InputError
from bpkv_trt.runtime import engine_runner
from bpkv_trt.runtime.engine import Engine, make_pool
from bpkv_trt.runtime.engine_runner import EngineRunner, find_gpu, sampling_config, stop_words
from bpkv_trt.runtime.generator import Generator
from bpkv_trt.runtime.sampling import SamplingParams
from bpkv_trt.trtllm.projections import Projections
from build_scripts.recall_text import recall_prompt
from tests.trtllm.runner_place import BUILT, LIMITS

NEW = 6


@pytest.fixture(scope="module")
def prompts(loaded):
    return [loaded.encoder.encode_raw(recall_prompt(seed, size)[0]) for seed, size in ((3, 150), (4, 90), (5, 120))]


def on_the_host(loaded, config: BpkvConfig, prompt, sampling):
    generator = Generator(Engine(loaded, config, make_pool(loaded, len(prompt) + NEW, config.page_size)))
    request = generator.add([prompt], sampling)
    generator.generate([request])
    return request


def timeless(answer):
    return answer.tokens, [replace(event, seconds={}) for event in answer.events]


def test_a_batch_is_answered_as_the_torch_host_answers_each(place, loaded, prompts):
    runner = place.open(budget="0.25")
    seen = []
    free = SamplingParams(NEW)
    answers = runner.generate(prompts, free, seen.append)
    for answer, prompt in zip(answers, prompts, strict=True):
        expected = on_the_host(loaded, runner.config, prompt, free)
        assert (answer.tokens, answer.finished) == (expected.generated, "length")
        (event, missed), (hosts, _) = answer.events, expected.events  # the answer is shorter than an interval
        assert (event.entries_before, event.entries_after) == (hosts.entries_before, hosts.entries_after)
        assert event.entries_after == len(prompt) // 4 * 8 < event.entries_before
        assert missed.regime == "generation" and missed.entries_before == missed.entries_after
    assert [len(each[0]) for each in seen][:NEW] == list(range(1, NEW + 1))
    assert seen[-1] == [answer.tokens for answer in answers]
    again = runner.generate(prompts[::-1], free)[::-1]
    assert [timeless(answer) for answer in again] == [timeless(answer) for answer in answers], "nothing is left of it"


def test_a_bounded_cache_gives_the_same_answers_from_fewer_blocks(place, prompts):
    options = {"budget": "0.25", "generation_budget": "12t", "interval": 12}
    answers, blocks = [], []
    for bounded in (False, True):
        runner = EngineRunner.open(place.folder, options=options, bounded=bounded)
        answers.append([answer.tokens for answer in runner.generate(prompts, SamplingParams(60))])
        (manager,) = runner.session.pools_kv_cache_manager._kv_cache_managers
        blocks.append(len(manager.blocks_manager.free_blocks))
    assert answers[0] == answers[1]
    longest = max(map(len, prompts))
    assert blocks[0] == 3 * -(-(longest + 60) // 8) and blocks[1] <= 3 * -(-(longest + 12) // 8) < blocks[0]


@pytest.mark.parametrize("also", [frozenset(), frozenset({470, 471})], ids=["one end", "several"])
def test_what_ends_an_answer_is_no_part_of_it(place, loaded, prompts, also):
    """Ends at different steps, by the smallest of the tokens, which is the session's, and by the others."""
    runner = place.open()
    free = [answer.tokens for answer in runner.generate(prompts, SamplingParams(NEW))]
    assert not also & {token for tokens in free for token in tokens}
    for at in (0, 2):
        ends = also | {free[0][at], free[1][3]}
        sampling = SamplingParams(NEW, stop_tokens=ends)
        for answer, prompt in zip(runner.generate(prompts, sampling), prompts, strict=True):
            expected = on_the_host(loaded, runner.config, prompt, sampling)
            assert (answer.tokens, answer.finished) == (expected.generated, expected.finished)


def test_sampling_is_told_in_tensorrt_llms_words(place):
    greedy = sampling_config(SamplingParams(NEW, seed=3))
    assert (greedy.top_k, greedy.end_id, greedy.min_length, greedy.temperature) == (1, -1, 0, 1.0)
    drawn = sampling_config(SamplingParams(NEW, 0.7, 0.9, 3, frozenset({9, 2, 5})))
    assert (drawn.top_k, drawn.top_p, drawn.temperature, drawn.random_seed) == (0, 0.9, 0.7, 3)
    assert (drawn.end_id, drawn.pad_id) == (2, 2)
    words = stop_words(SamplingParams(NEW, stop_tokens=frozenset({9, 2, 5})), 2)
    assert words.dtype == "int32" and words.tolist() == [[[5, 9], [1, 2]]] * 2
    assert stop_words(SamplingParams(NEW, stop_tokens=frozenset({9})), 2) is None


def test_answers_are_drawn_by_their_seed(place, prompts):
    runner = place.open()
    one, same, other = (runner.generate(prompts[:1], SamplingParams(NEW, 5.0, seed=seed)) for seed in (1, 1, 2))
    assert one[0].tokens == same[0].tokens != other[0].tokens


def test_the_runner_of_tensorrt_llm_takes_the_session(place, loaded, prompts):
    runner = place.open()
    ids = [torch.tensor(prompt) for prompt in prompts]
    config = sampling_config(SamplingParams(NEW))
    output = runner.model_runner().generate(ids, sampling_config=config, max_new_tokens=NEW)
    for row, prompt in zip(output[:, 0].tolist(), prompts, strict=True):
        expected = on_the_host(loaded, runner.config, prompt, SamplingParams(NEW))
        assert row[len(prompt) :][:NEW] == expected.generated


def test_a_step_that_fails_is_told_in_one_paragraph(place, prompts, monkeypatch):
    runner = place.open()
    monkeypatch.setattr(runner.session.runtime, "_run", lambda *given: False)
    with pytest.raises(BpkvError, match="could not go on with the batch .RuntimeError: Executing TRT engine failed"):
        runner.generate(prompts, SamplingParams(NEW))


@pytest.mark.parametrize("error", [RuntimeError("a fault of the user's own"), KeyboardInterrupt()])
def test_what_a_users_callback_raises_is_the_users(place, prompts, error):
    """The stream ends there, though its traceback be kept, and the next batch knows nothing of it."""
    runner, free = place.open(), SamplingParams(NEW)
    expected = [answer.tokens for answer in runner.generate(prompts, free)]

    def fail(answers):
        raise error

    with pytest.raises(type(error)) as kept:
        runner.generate(prompts, free, fail)
    assert kept.value is error
    seen = []
    assert [answer.tokens for answer in runner.generate(prompts, free, seen.append)] == expected == seen[-1]


def test_a_stream_may_have_another_configuration_and_be_left(place, loaded, prompts, monkeypatch):
    """The engine stops at that step, and what the runner does by itself is as before."""
    runner, free = place.open(budget="0.25"), SamplingParams(NEW)
    expected = [timeless(answer) for answer in runner.generate(prompts, free)]
    run, runs = place.session_place.engine._run, []
    monkeypatch.setattr(place.session_place.engine, "_run", lambda feed: (runs.append(1), run(feed))[1])
    half = runner.configured({"budget": "0.5"})
    stream = runner.stream(prompts, free, half)
    _, answers = next(stream), next(stream)
    stream.close()
    assert len(runs) == 2 and runner.session.running_pool is None and runner.session.config == runner.config != half
    for answer, prompt in zip(answers, prompts, strict=True):
        assert answer.tokens == on_the_host(loaded, half, prompt, free).generated[:2] and answer.finished is None
        (event,) = answer.events
        assert event.entries_after == len(prompt) // 2 * 8
    assert [timeless(answer) for answer in runner.generate(prompts, free)] == expected


@pytest.mark.parametrize("place_of_it", ["open", "setup", "run"])
def test_a_gpu_without_room_is_told(place, prompts, monkeypatch, place_of_it):
    def full(*given, **named):
        raise torch.OutOfMemoryError("CUDA out of memory")

    if place_of_it == "open":
        monkeypatch.setattr(Projections, "load", full)
        with pytest.raises(InputError, match="The GPU has no room for the engine in .*Free its memory"):
            place.open()
        return
    runner = place.open()
    owner, name = (runner.session, "setup") if place_of_it == "setup" else (runner.session.runtime, "_run")
    monkeypatch.setattr(owner, name, full)
    with pytest.raises(InputError, match="The GPU has no room for .*KV cache"):
        runner.generate(prompts, SamplingParams(NEW))


def test_an_answer_of_one_token_is_reported_with_what_its_prompt_holds(place, prompts):
    """The stock session prepares no step after its last."""
    runner = place.open()
    traits = runner.built.traits
    for answer, prompt in zip(runner.generate(prompts, SamplingParams(1)), prompts, strict=True):
        assert len(answer.tokens) == 1
        for event in answer.events:
            assert event.entries_before == event.entries_after == len(prompt) * traits.layers * traits.kv_heads
            assert event.bytes_before == event.bytes_after > 0 and "the answer has one token" in event.note


def test_prompts_may_be_tensors_and_must_be_token_ids(place, prompts):
    runner, few = place.open(), SamplingParams(2)
    expected = [answer.tokens for answer in runner.generate(prompts, few)]
    for kind in (torch.tensor, np.array, tuple):
        assert [answer.tokens for answer in runner.generate([kind(each) for each in prompts], few)] == expected
    for strange in ([5, 6], ["abc"], [[5.0, 6.0]], [[True, False]], [torch.tensor([5.5])]):
        with pytest.raises(InputError, match="expected the ids of its tokens"):
            runner.generate(strange, few)


def test_only_what_the_contract_knows_of_1_x_is_used(place, prompts):
    place.open().generate(prompts[:1], SamplingParams(2))
    assert place.fakes.unverified == set()


def test_the_plugin_is_registered_before_the_engine_is_loaded(place, monkeypatch):
    order = []
    registry, runtime = place.fakes.tensorrt, "tensorrt_llm.runtime.generation._Runtime.__init__"
    start = place.fakes.implementations[runtime]
    monkeypatch.setattr(type(registry), "get_creator", lambda *given: order.append("registered") or object())
    monkeypatch.setitem(place.fakes.implementations, runtime, lambda *given: order.append("loaded") or start(*given))
    place.open()
    assert order == ["registered", "loaded"]


@pytest.mark.parametrize(
    ("batch", "new", "words"),
    [
        ([[5] * 401], 1, f"max_context_length is 401, and the engine was built for at most {LIMITS['max_input_len']}"),
        ([[5] * 400], 81, "max_context_length + max_new_tokens is 481, and the engine was built for at most 480"),
        ([[5] * 9] * 4, 1, "batch_size is 4, and the engine was built for at most 3"),
        ([[5] * 301, [5] * 300], 1, "The prompts have 601 tokens, and one run of the engine takes 600"),
        ([[5, 479]], 1, "The prompt has token 479, and the engine's model knows 0 to 478"),
        ([[5], []], 1, "The prompt has no tokens"),
        ([], 1, "The prompt has no tokens"),
    ],
    ids=["prompt", "answer", "batch", "tokens", "vocabulary", "empty", "none"],
)
def test_more_than_the_engine_was_built_for(place, monkeypatch, batch, new, words):
    runner = place.open()
    monkeypatch.setattr(place.session_place.engine, "_run", lambda feed: pytest.fail("the engine was run"))
    with pytest.raises(BpkvError, match=words.replace("+", r"\+")):
        runner.generate(batch, SamplingParams(new))


def test_no_room_for_the_cache(place, monkeypatch, prompts):
    runner = place.open()

    def full(*given):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    setup = "tensorrt_llm.runtime.generation.GenerationSession.setup"
    monkeypatch.setitem(place.fakes.implementations, setup, full)
    with pytest.raises(InputError, match="no room for the KV cache of 1 sequences of up to .* Nothing was run"):
        runner.generate(prompts[:1], SamplingParams(NEW))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scope": "layer"}, "scope is layer, which an engine cannot have: the pools of TensorRT-LLM"),
        ({"readout": "exact"}, "readout is exact, which an engine cannot have"),
        ({"lookahead": 3}, "lookahead is 3, which an engine cannot have"),
        ({"policy": "snapkv"}, "policy is snapkv, which an engine cannot have"),
        ({"positions": 5}, "positions is 5, and the engine was built for at most 4"),
        ({"page_size": 32}, f"page_size is 32, and the engine was built for {BUILT['page_size']}"),
        ({"preset": "paper"}, "preset is paper, and the engine was built for default"),
        ({"regime": "prefill", "interval": 9}, "interval is 9, which changes nothing here"),
        ({"budget": "5t"}, "budget is 5t, but 14 tokens per head are protected"),
        ({"budgt": "0.2"}, "budgt is not an option; did you mean budget"),
    ],
    ids=str,
)
def test_options_that_the_engine_cannot_have(place, options, words):
    with pytest.raises(ConfigError, match=words):
        place.open(**options)


def test_there_must_be_a_gpu_that_the_engine_has_kernels_for(place, monkeypatch):
    assert engine_runner.find_gpu is not find_gpu, "replaced for the other tests"
    with pytest.raises(BpkvError, match="PyTorch sees no GPU here, and engines run on one"):
        find_gpu()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(engine_runner, "find_gpu", find_gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    with pytest.raises(ConfigError, match=r"kernels for 90a, and the GPU, of compute capability 8.9, runs none"):
        place.open()


def without_projections(folder: Path) -> None:
    (folder / "rank0_bpkv_projections.safetensors").unlink()


def damaged_projections(folder: Path) -> None:
    path = folder / "rank0_bpkv_projections.safetensors"
    path.write_bytes(b"\xff" * path.stat().st_size)


def without_kernels(folder: Path) -> None:
    (folder / "bpkv_kernels.bundle").unlink()


def damaged_kernels(folder: Path) -> None:
    path = folder / "bpkv_kernels.bundle"
    path.write_bytes(b"\0" * path.stat().st_size)


def edited_sidecar(folder: Path) -> None:
    path = folder / "bpkv_config.json"
    path.write_text(path.read_text().replace('"0.3"', '"0.9"'))


def without_sidecar(folder: Path) -> None:
    (folder / "bpkv_config.json").unlink()


def stock_engine(folder: Path) -> None:
    without_sidecar(folder)
    config = json.loads((folder / "config.json").read_text())
    del config["pretrained_config"]["bpkv"]
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without_projections, "lacks rank0_bpkv_projections.safetensors: copy all files"),
        (damaged_projections, "its bpkv_config.json was written for: rank0_bpkv_projections.safetensors changed since"),
        (without_kernels, "lacks bpkv_kernels.bundle: copy all files"),
        (damaged_kernels, "its bpkv_config.json was written for: bpkv_kernels.bundle changed since"),
        (edited_sidecar, "was edited or is damaged: its checksum does not fit"),
        (without_sidecar, "was built with BP-KV, and its bpkv_config.json is missing"),
        (stock_engine, "was built without BP-KV: it has no bpkv_config.json. To compact, build"),
        (shutil.rmtree, "config.json does not exist; check the path given to --engine-dir"),
    ],
)
def test_a_folder_that_is_not_whole(place, tmp_path, damage, words):
    folder = Path(shutil.copytree(place.folder, tmp_path / "engine"))
    damage(folder)
    with pytest.raises(InputError, match=words):
        EngineRunner.open(folder)


def test_another_plugin_library(place, tmp_path):
    other = Path(shutil.copytree(place.library.parent, tmp_path / "other")) / place.library.name
    content = other.read_bytes() + b"\0"
    other.write_bytes(content)
    sidecar = json.loads(other.with_suffix(".json").read_text())
    other.with_suffix(".json").write_text(json.dumps(sidecar | {"sha256": hashlib.sha256(content).hexdigest()}))
    with pytest.raises(ConfigError, match="built with another plugin library .* give that one to --plugin-lib"):
        EngineRunner.open(place.folder, other)


@pytest.mark.parametrize(
    ("module", "version", "words"),
    [
        ("tensorrt", "10.16.0", "built with tensorrt 10.14.1, and here is 10.16.0: TensorRT loads engines of its own"),
        ("tensorrt_llm", "1.1.0", "built with tensorrt_llm 1.2.1, and here is 1.1.0"),
        ("tensorrt_llm", "0.21.0", "TensorRT-LLM is 0.21.0, which is too old"),
        ("tensorrt_llm", "1.3.0", "TensorRT-LLM is 1.3.0: engines were removed from TensorRT-LLM in 1.3"),
    ],
)
def test_other_versions(place, monkeypatch, module, version, words):
    if module == "tensorrt":
        monkeypatch.setattr(place.fakes.tensorrt, "__version__", version)
    else:
        monkeypatch.setitem(place.fakes.modules[module].members, "__version__", version)
    with pytest.raises(BpkvError, match=words):
        place.open()


def test_an_engine_that_tensorrt_does_not_load(place, monkeypatch):
    def start(*given):
        raise AssertionError

    monkeypatch.setitem(place.fakes.implementations, "tensorrt_llm.runtime.generation._Runtime.__init__", start)
    with pytest.raises(InputError, match=r"TensorRT does not load the engine .* \(AssertionError\); .* build it"):
        place.open()


def test_an_engine_that_lacks_our_inputs(place, monkeypatch):
    engine = place.session_place.engine
    for known in (engine._inputs, engine._tensors):
        monkeypatch.delitem(known, "bpkv_score_rows")
    with pytest.raises(ConfigError, match="The engine lacks bpkv_score_rows: it was not built by this version of bpkv"):
        place.open()
