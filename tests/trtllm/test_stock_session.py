"""The stand-in for TensorRT-LLM's session does what that does: independent of any session of ours."""

import re

import numpy as np
import pytest
import torch

from bpkv_trt.runtime.step import Chunk
from bpkv_trt.trtllm.sidecar import EngineSidecar
from tests.trtllm.device_address import Address
from tests.trtllm.session_place import SessionPlace, answers

PROMPTS = [[5, 9, 33, 12, 60, 7, 7, 21, 48, 3, 17], [44, 2, 8, 51], [19, 6, 30, 30, 41, 9, 22, 14]]
NEW = 9


@pytest.fixture(scope="module")
def place(trt, tensorrt_10):
    made = SessionPlace(trt, tensorrt_10, "llama_bias_rope")
    with made.installed():
        yield made


def unscored(place, change=lambda tensors: None):
    """A session that never scores. change: what else is done to the tensors of a step."""
    from tensorrt_llm.runtime.generation import GenerationSession, RuntimeTensor

    class Unscored(GenerationSession):
        def __init__(self, *given, **named):
            super().__init__(*given, debug_mode=True, **named)
            self.debug_mode = False

        def _get_context_shape_buffer(self, *given, **named):
            return self.bound(super()._get_context_shape_buffer(*given, **named))

        def _get_next_step_shape_buffer(self, *given, **named):
            return self.bound(super()._get_next_step_shape_buffer(*given, **named))

        def bound(self, tensors):
            def bind(name, value, shape=None):
                tensors[name] = RuntimeTensor.from_torch(name, value, override_shape=shape)

            bind("bpkv_score_rows", torch.zeros(1, dtype=torch.int32), [0])
            bind("bpkv_score_weights", torch.zeros(1), [0])
            bind("bpkv_score_offsets", torch.zeros(self.batch_size + 1, dtype=torch.int32))
            bind("bpkv_pool_pointers", torch.tensor([[self._memory_pool_allocator._pool_pointers[0].data_ptr()] * 2]))
            for name in self.runtime.output_tensor_names - {"logits"}:
                bind(name, torch.zeros(1, dtype=self._tensor_dtype(name)))
            change(tensors)
            return tensors

    return place.session(Unscored)


def greedy(place, prompt, count):
    """By transformers."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": count}
    model = place.built.loaded.model
    model.set_attn_implementation("eager")
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_greedy_answers_are_the_models(trt, tensorrt_10, name):
    place = SessionPlace(trt, tensorrt_10, name)
    with place.installed():
        session = unscored(place)
        for lengths in ([4, 1, 7], [8, 8], [3], [2, 5, 9, 12]):
            prompts = [torch.randint(3, 64, (length,)).tolist() for length in lengths]
            got = answers(place.decode(session, prompts, NEW), prompts, NEW)
            assert got == [greedy(place, prompt, NEW) for prompt in prompts]
    assert place.fakes.unverified == set()


def test_logits_are_the_torch_hosts(place):
    outputs = place.decode(unscored(place), PROMPTS, NEW, return_dict=True, output_generation_logits=True)
    answered, host = answers(outputs["output_ids"], PROMPTS, NEW), place.built.host()
    sequences = [host.admit() for _ in PROMPTS]
    tokens = PROMPTS
    for step, got in enumerate(outputs["generation_logits"]):
        logits = host.forward([Chunk(sequence, own) for sequence, own in zip(sequences, tokens, strict=True)])
        assert (got - logits).abs().max() <= 2e-5 * logits.abs().max()
        tokens = [[own[step]] for own in answered]
    assert step == NEW - 1


def test_a_sequence_that_ends_does_not_grow_by_its_end_and_the_others_go_on(place):
    session = unscored(place)
    full = answers(place.decode(session, PROMPTS, NEW), PROMPTS, NEW)
    end = full[1][3]
    places = [own.index(end) if end in own else NEW for own in full]
    assert places[1] == 3 and min(places) > 0
    outputs = place.decode(session, PROMPTS, NEW, end_id=end, return_dict=True, output_sequence_lengths=True)
    expected = [own[:count] + [end] * (NEW - count) for own, count in zip(full, places, strict=True)]
    assert answers(outputs["output_ids"], PROMPTS, NEW) == expected
    lengths = [len(prompt) + count for prompt, count in zip(PROMPTS, places, strict=True)]
    assert outputs["sequence_lengths"][:, 0].tolist() == lengths
    assert session.finished[1].item() == 1


def test_a_batch_stops_when_all_have_ended(place):
    steps = []
    session = unscored(place, lambda tensors: steps.append(tensors))
    full = answers(place.decode(session, PROMPTS[:1], NEW), PROMPTS[:1], NEW)[0]
    end = next(token for token in full[1:] if token != full[0])
    at = full.index(end)
    steps.clear()
    place.decode(session, PROMPTS[:1], NEW, end_id=end)
    assert len(steps) == min(at + 2, NEW)  # one is prepared before it is known that all have ended
    assert at < NEW - 2


def test_the_end_cannot_come_first(place):
    session = unscored(place)
    first = answers(place.decode(session, PROMPTS, 1), PROMPTS, 1)[0][0]
    got = answers(place.decode(session, PROMPTS, 2, end_id=first), PROMPTS, 2)[0]
    assert got[0] != first


def test_stop_words_end_a_sequence_with_them(place):
    session = unscored(place)
    full = answers(place.decode(session, PROMPTS, NEW), PROMPTS, NEW)
    word = full[0][2:4]
    assert all(word != own[at : at + 2] for own in full for at in range(NEW - 1) if (own, at) != (full[0], 2))
    none = [[0, 0, 0], [-1, -1, -1]]
    words = np.array([[[63, *word], [1, 3, -1]], none, none], dtype=np.int32)
    assert 63 not in full[0]
    outputs = place.decode(session, PROMPTS, NEW, stop_words_list=words, return_dict=True, output_sequence_lengths=True)
    got = answers(outputs["output_ids"], PROMPTS, NEW)
    assert got == [full[0][:4] + [-1] * (NEW - 4), *full[1:]]
    assert outputs["sequence_lengths"][:, 0].tolist() == [len(PROMPTS[0]) + 4, *(len(p) + NEW for p in PROMPTS[1:])]


def test_streaming_yields_after_every_step_and_again_where_the_last_was_not_the_end(place):
    session = unscored(place)
    full = place.decode(session, PROMPTS, NEW)
    yielded = list(place.decode(session, PROMPTS, NEW, streaming=True))
    assert len(yielded) == NEW + 1 and torch.equal(yielded[-1], full)
    final = answers(full, PROMPTS, NEW)
    for step, each in enumerate(yielded[:NEW]):
        expected = [own[: step + 1] + [-1] * (NEW - step - 1) for own in final]
        assert answers(each, PROMPTS, NEW) == expected
    even = [prompt[:4] for prompt in PROMPTS]  # the length of every sequence reaches its limit at the last step
    assert len(list(place.decode(session, even, NEW, streaming=True))) == NEW


@pytest.mark.parametrize("stop", [False, True])
def test_all_blocks_come_back(place, stop):
    session = unscored(place)
    end = answers(place.decode(session, PROMPTS[:1], NEW), PROMPTS[:1], NEW)[0][2]
    place.decode(session, PROMPTS[:1] if stop else PROMPTS, NEW, end_id=end if stop else -1)
    [manager] = session.pools_kv_cache_manager._kv_cache_managers
    blocks, _ = session._get_num_paged_blocks(session.max_attention_window_size, 0)
    assert manager.sequences == manager.lens == [] and not manager.blocks_manager.allocated_blocks
    assert sorted(block.idx for block in manager.blocks_manager.free_blocks) == list(range(blocks))


def test_tensors_of_the_next_step_are_asked_for_before_the_last_token_is_known(place):
    """The pool is complete; blocks have room for one more; lengths and the answer are those of the step before."""
    from tensorrt_llm.runtime.generation import GenerationSession

    seen = []

    class Watched(type(unscored(place))):
        def _get_next_step_shape_buffer(self, *given, **named):
            step, [manager] = given[3], self.pools_kv_cache_manager._kv_cache_managers
            lengths = [len(prompt) + step for prompt in PROMPTS]
            assert self.sequence_length_buffer.tolist() == lengths
            assert given[6].tolist() == lengths and given[12] is not given[11]
            assert manager.lens == [max(map(len, PROMPTS)) + step + 1] * len(PROMPTS)
            ahead = [self.output_ids[row, length].item() for row, length in enumerate(lengths)]
            seen.append(ahead)
            tensors = super()._get_next_step_shape_buffer(*given, **named)
            assert tensors["sequence_length"].to_torch() is self.sequence_length_buffer
            assert tensors["host_past_key_value_lengths"].to_torch().tolist() == [max(map(len, PROMPTS)) + step] * 3
            return tensors

    assert issubclass(Watched, GenerationSession)
    place.decode(place.session(Watched), PROMPTS, NEW)
    assert len(seen) == NEW - 1
    assert all(token in (0, -1) for ahead in seen for token in ahead)  # what pads prompts, or the end


def test_a_finished_sequence_keeps_running_at_its_last_row(place):
    runs = []
    session = unscored(place, lambda tensors: runs.append(tensors))
    full = answers(place.decode(session, PROMPTS, NEW), PROMPTS, NEW)
    end = full[1][2]
    runs.clear()
    place.decode(session, PROMPTS, NEW, end_id=end)
    lengths = runs[-1]["sequence_length"].to_torch()
    assert lengths[1] == len(PROMPTS[1]) + full[1].index(end)
    assert runs[-1]["input_ids"].to_torch()[1] == full[1][full[1].index(end) - 1]
    assert runs[-1]["position_ids"].to_torch()[1] == len(PROMPTS[1]) + NEW - 2


def test_sampling_goes_by_its_seed_and_its_bounds(place):
    session = unscored(place)
    options = {"top_k": 0, "top_p": 0.95, "temperature": 2.0}
    one, same, other = (place.decode(session, PROMPTS, NEW, random_seed=seed, **options) for seed in (3, 3, 4))
    assert torch.equal(one, same) and not torch.equal(one, other)
    narrow = place.decode(session, PROMPTS, NEW, top_k=0, top_p=1e-6, random_seed=3)
    assert torch.equal(narrow, place.decode(session, PROMPTS, NEW))


def test_of_top_k_the_likeliest_are_picked(place):
    options = {"top_k": 2, "temperature": 50.0, "random_seed": 1}
    outputs = place.decode(unscored(place), PROMPTS, NEW, return_dict=True, output_generation_logits=True, **options)
    picked = torch.tensor(answers(outputs["output_ids"], PROMPTS, NEW)).T  # [NEW, B]
    likeliest = torch.stack([logits.topk(2).indices for logits in outputs["generation_logits"]])  # [NEW, B, 2]
    second = picked == likeliest[..., 1]
    assert (second | (picked == likeliest[..., 0])).all() and 0 < second.sum() < second.numel()


def test_positions_may_be_the_callers(place):
    steps = []
    session = unscored(place, lambda tensors: steps.append(tensors["position_ids"].to_torch().tolist()))
    own = [torch.arange(len(prompt), dtype=torch.int32) * 2 for prompt in PROMPTS]
    place.decode(session, PROMPTS, 4, position_ids=own)
    ends = [2 * len(prompt) - 2 for prompt in PROMPTS]
    assert steps == [torch.cat(own).tolist(), *([end + step for end in ends] for step in (1, 2, 3))]


ROWS = "bpkv_score_rows"
REFUSED = {  # each is given the step's tensors, and how one is put among them
    "no elements": (lambda tensors, put: put(ROWS, torch.zeros(0, dtype=torch.int32)), f"{ROWS}: .*non-null"),
    "made without elements": (lambda tensors, put: tensors.pop("bpkv_topk_ids"), "bpkv_topk_ids: .*non-null"),
    "no shape": (lambda tensors, put: tensors.pop(ROWS), f"inputs {ROWS} have no shape"),
    "no address": (lambda tensors, put: tensors.pop("bpkv_pool_pointers"), "bpkv_pool_pointers: .*non-null"),
    "too many": (lambda tensors, put: put(ROWS, torch.zeros(13, dtype=torch.int32)), r"between \(0,\) and \(12,\)"),
    "too wide": (lambda tensors, put: put(ROWS, torch.zeros(1, 1, dtype=torch.int32)), r"shape of \(1, 1\)"),
    "another type": (lambda tensors, put: put("bpkv_score_weights", torch.zeros(1).double(), [0]), "have 8 bytes"),
    "too small": (lambda tensors, put: put("logits", torch.zeros(3, 63)), "logits: its memory ends before"),
    "host differs": (lambda tensors, put: tensors["host_context_lengths"].to_torch().add_(1), "differs on the host"),
    "another pool": (lambda tensors, put: put("host_kv_cache_pool_pointers", torch.tensor([[8, 0]])), "no pool begins"),
    "one block twice": (lambda tensors, put: share_a_block(tensors), "blocks of their own"),
    "no blocks": (lambda tensors, put: move_offsets(tensors), "are no blocks"),
    "too short a table": (lambda tensors, put: narrow_tables(tensors, put), "11 rows, and a table of 2"),
}


def share_a_block(tensors):
    for name in ("kv_cache_block_offsets", "host_kv_cache_block_offsets"):
        table = tensors[name].to_torch()
        table[0, 1, 0, :, 0] = table[0, 0, 0, :, 0]


def move_offsets(tensors):
    for name in ("kv_cache_block_offsets", "host_kv_cache_block_offsets"):
        tensors[name].to_torch().add_(1)


def narrow_tables(tensors, put):
    for name in ("kv_cache_block_offsets", "host_kv_cache_block_offsets"):
        put(name, tensors[name].to_torch()[:, :, 0, :, :2])


@pytest.mark.parametrize(("change", "words"), REFUSED.values(), ids=REFUSED)
def test_what_an_engine_cannot_run_with_fails_the_step(place, caplog, change, words):
    from tensorrt_llm.runtime.generation import RuntimeTensor

    def changed(tensors):
        def put(name, value, shape=None):
            tensors[name] = RuntimeTensor.from_torch(name, value, override_shape=shape)

        change(tensors, put)

    with pytest.raises(RuntimeError, match="Executing TRT engine failed step=0"):
        place.decode(unscored(place, changed), PROMPTS, NEW)
    assert re.search(words, caplog.text)


def test_memory_that_nobody_holds_fails_the_step_that_reads_it(place, caplog):
    """A step binds what it is given; what it is not given stays bound as it was two steps before."""
    steps = []

    def forget(tensors):
        steps.append(len(steps))
        if len(steps) == 3:
            tensors.pop("position_ids")

    with pytest.raises(RuntimeError, match="failed step=2"):
        place.decode(unscored(place, forget), PROMPTS, NEW)
    assert "position_ids: nobody holds its memory any more" in caplog.text


def test_a_shape_that_was_refused_is_not_the_one_before(place, caplog):
    from tensorrt_llm.runtime.generation import RuntimeTensor

    steps = []

    def widen(tensors):
        steps.append(tensors)
        if len(steps) == 3:
            tensors[ROWS] = RuntimeTensor.from_torch(ROWS, torch.zeros(13, dtype=torch.int32))

    with pytest.raises(RuntimeError, match="failed step=2"):
        place.decode(unscored(place, widen), PROMPTS, NEW)
    assert f"shapes outside of the profile: {{'{ROWS}': (13,)}}" in caplog.text


def test_past_lengths_below_what_is_cached_fail(place, caplog):
    def shorten(tensors):
        if tensors["host_request_types"].to_torch().any():
            tensors["host_past_key_value_lengths"].to_torch().fill_(len(PROMPTS[0]) - 1)

    with pytest.raises(RuntimeError, match="failed step=1"):
        place.decode(unscored(place, shorten), PROMPTS, NEW)
    assert "host_past_key_value_lengths are less than what is cached" in caplog.text


def test_an_engine_with_other_tensors_is_refused_unless_for_debugging(place):
    with pytest.raises(RuntimeError, match="Tensor names in engine are not the same as expected"):
        place.session()
    session = place.session(debug_mode=True)
    with pytest.raises(AssertionError, match="every tensor of every step goes to a file"):
        place.decode(session, PROMPTS, NEW)


def test_an_output_that_is_not_given_is_made_of_the_shape_that_the_run_has(place):
    """The engine itself compares the two."""
    from tensorrt_llm.runtime.generation import RuntimeTensor

    steps, rows = [], [3, 10, 14]  # of the first and second sequence

    def score(tensors):
        steps.append(tensors)
        if len(steps) == 1:
            for name, value in (
                (ROWS, torch.tensor(rows, dtype=torch.int32)),
                ("bpkv_score_weights", torch.tensor([0.5, 0.5, 1.0])),
                ("bpkv_score_offsets", torch.tensor([0, 2, 3, 3], dtype=torch.int32)),
            ):
                tensors[name] = RuntimeTensor.from_torch(name, value)
            for name in place.engine._outputs.keys() - {"logits"}:
                del tensors[name]

    place.decode(unscored(place, score), PROMPTS, 2)
    traits = place.built.loaded.traits
    made = {name: steps[0][name].to_torch() for name in place.engine._outputs}
    width = traits.query_heads, traits.head_dim
    assert made["bpkv_q_1"].shape == made["bpkv_context_0"].shape == (3, *width)
    assert made["bpkv_residual"].shape == (3, traits.width)
    scores = made["bpkv_scores_1"]
    assert scores.shape == (3, traits.kv_heads, 4 * 4)  # 13 rows at most in blocks of 4
    assert (scores[0, :, :10] > 0).all() and (scores[1, :, :4] >= 0).all() and (scores[2] == 0).all()


def test_a_runner_loads_the_engines_folder_and_generates(place, tmp_path):
    from tensorrt_llm.builder import Engine
    from tensorrt_llm.runtime.model_runner import ModelRunner, _engine_config_to_model_config

    engine = Engine.from_dir(str(place.save(tmp_path)), 0)
    assert EngineSidecar.read(tmp_path).settings.document() == engine.config.pretrained_config.bpkv
    model_config = _engine_config_to_model_config(engine.config, gpu_weights_percent=1)
    session = type(unscored(place))(model_config, engine.engine, engine.config.pretrained_config.mapping)
    runner = ModelRunner(session, 4, 64, 96, 1, model_config.kv_cache_type)
    prompts = [torch.tensor(prompt) for prompt in PROMPTS]
    config = place.sampling(return_dict=True)
    got = runner.generate(prompts, sampling_config=config, max_new_tokens=NEW, output_generation_logits=True)
    assert answers(got["output_ids"], PROMPTS, NEW) == [greedy(place, prompt, NEW) for prompt in PROMPTS]
    assert got["generation_logits"].shape == (3, 1, NEW, 64)
    with pytest.raises(RuntimeError, match=r"new tokens \(111\) exceeds .* \(96\)"):
        runner.generate(prompts, sampling_config=config, max_new_tokens=100)


def test_the_engine_has_names_of_tensorrt_10s_alone(place, tensorrt_10):
    engine, context = place.engine, place.engine.create_execution_context()
    for made, kind in ((engine, "ICudaEngine"), (context, "IExecutionContext")):
        assert {name for name in dir(made) if not name.startswith("_")} <= set(tensorrt_10[kind])
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    assert {name for name in names if engine.get_tensor_mode(name).name == "OUTPUT"} == set(engine._outputs)
    assert engine.get_tensor_shape(ROWS) == (-1,) and engine.get_tensor_profile_shape(ROWS, 0) == [(0,), (3,), (12,)]
    assert engine.get_tensor_profile_shape("bpkv_pool_pointers", 0) == [(1, 2)] * 3
    table = engine.get_tensor_profile_shape("kv_cache_block_offsets", 0)
    assert table == [(1, 1, 2, 1), (1, 2, 2, 12), (2, 4, 2, 24)]


def test_an_address_shows_what_is_written_there_later():
    tensor = torch.arange(6)
    address = Address.of(tensor[2:])
    seen = address.view(torch.int64, (3,))
    tensor.add_(10)
    assert seen.tolist() == [12, 13, 14]
    with pytest.raises(ValueError, match="ends before"):
        address.view(torch.int64, (5,))
    del tensor, seen
    with pytest.raises(ValueError, match="nobody holds"):
        address.view(torch.int64, (3,))
    assert Address.of(torch.zeros(0)) == 0
