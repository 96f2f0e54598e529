"""What a session cannot do is refused by name before anything runs."""

import importlib

import pytest

from bpkv_trt.errors import BpkvError, ConfigError
from tests.trtllm.built_network import POSITIONS, engine_settings
from tests.trtllm.session_place import BUFFER, SessionPlace
from tests.trtllm.watched_session import FRESH, built_engine, open_session

PROMPT = [5, 9, 33, 12, 60, 7, 7, 21]


@pytest.fixture(scope="module")
def place(trt, tensorrt_10):
    made = SessionPlace(trt, tensorrt_10, settings=engine_settings(), max_num_tokens=4 * POSITIONS - 1)
    with made.installed(*FRESH):
        yield made


MODELS = {
    "ranks": ({"world_size": 2}, "world_size is 2.*agree"),
    "no plugin": ({"gpt_attention_plugin": False}, "no attention plugin with packed tokens"),
    "padded": ({"remove_input_padding": False}, "no attention plugin with packed tokens"),
    "medusa": ({"max_medusa_tokens": 4}, "drafts tokens"),
    "redrafter": ({"redrafter_num_beams": 2}, "drafts tokens"),
    "cross": ({"cross_attention": True}, "cross attention"),
    "streamed weights": ({"gpu_weights_percent": 0.5}, "gpu_weights_percent is 0.5.*Give 1"),
}


@pytest.mark.parametrize(("changes", "words"), MODELS.values(), ids=MODELS)
def test_an_engine_that_cannot_be_compacted(place, changes, words):
    to_model_config = place.fakes["tensorrt_llm.runtime.model_runner._engine_config_to_model_config"]
    config = to_model_config(place.engine_config(), gpu_weights_percent=1)
    mapping = place.fakes["tensorrt_llm.mapping.Mapping"]()
    for name, value in changes.items():
        setattr(mapping if name == "world_size" else config, name, value)
    with pytest.raises(ConfigError, match=f"cannot compact its KV cache: .*{words}"):
        importlib.import_module(FRESH[0]).BpkvSession(config, BUFFER, mapping, built_engine(place))


def test_cuda_graphs(place):
    with pytest.raises(ConfigError, match="cuda_graph_mode is on, and a graph holds the lengths"):
        stock = place.session(lambda *given, **named: (given, named))[0]
        importlib.import_module(FRESH[0]).BpkvSession(*stock, built_engine(place), cuda_graph_mode=True)


SETUPS = {
    "beams": ({"beam_width": 2}, "beam_width is 2.*Give 1"),
    "window": ({"max_attention_window_size": 9}, "max_attention_window_size is 9 and a sequence may have 12.*Give 12"),
    "windows by layer": ({"max_attention_window_size": [12, 9]}, "max_attention_window_size is 9"),
    "sinks": ({"sink_token_length": 4}, "sink_token_length is 4.*BP-KV keeps the first tokens itself"),
    "medusa": ({"medusa_choices": [[0]]}, "medusa_choices is given"),
    "lora": ({"lora_uids": ["0"]}, "lora_uids is given"),
    "encoder": ({"encoder_max_input_length": 5}, "encoder_max_input_length is given"),
    "batch": ({"batch_size": 5}, "batch_size is 5.*at most 4"),
    "prompt": ({"max_context_length": 65}, "max_context_length is 65.*at most 64"),
    "answer": ({"max_new_tokens": 89}, "max_context_length . max_new_tokens is 97.*at most 96"),
    "rows": ({"batch_size": 4}, "4 sequences have 12 scoring positions .3 each.*built for 11.*Run 3 sequences"),
}


@pytest.mark.parametrize(("changes", "words"), SETUPS.values(), ids=SETUPS)
def test_a_set_up_that_cannot_be_compacted(place, changes, words):
    session = open_session(place)
    with pytest.raises(ConfigError, match=words):
        session.setup(**{"batch_size": 1, "max_context_length": len(PROMPT), "max_new_tokens": 4} | changes)
    assert not hasattr(session, "_memory_pool_allocator"), "memory was taken"
    session.setup(3, len(PROMPT), 4, max_attention_window_size=12, sink_token_length=0)


DECODES = {
    "beams": ({"num_beams": 2}, "num_beams is 2"),
    "encoder": ({"encoder_output": 1}, "encoder_output is given"),
    "mask": ({"cross_attention_mask": 1}, "cross_attention_mask is given"),
}


@pytest.mark.parametrize(("changes", "words"), DECODES.values(), ids=DECODES)
def test_a_decode_that_cannot_be_compacted(place, changes, words):
    with pytest.raises(ConfigError, match=words):
        place.decode(open_session(place), [PROMPT], 4, **changes)


def test_prompts_that_are_more_than_one_run_takes(place):
    with pytest.raises(ConfigError, match="The prompts have 12 tokens, and one run of the engine takes 11"):
        place.decode(open_session(place), [[5, 9, 33, 2], PROMPT], 4)


def test_a_budget_below_what_is_protected_of_one_prompt(place):
    ran = []
    session = open_session(place, place.built.settings.configured(budget="2KiB", sinks=1, recent=4))
    session.runtime._run = lambda *given: ran.append(given)
    with pytest.raises(ConfigError, match="budget.*2KiB.*protected"):
        place.decode(session, [[5, 9, 33], PROMPT], 4)
    assert not ran


def test_an_engine_without_our_outputs(place, monkeypatch):
    names = list(map(place.engine.get_tensor_name, range(place.engine.num_io_tensors)))
    without = [name for name in names if name != "bpkv_readout"]
    monkeypatch.setattr(type(place.engine), "num_io_tensors", property(lambda self: len(without)))
    monkeypatch.setattr(place.engine, "get_tensor_name", without.__getitem__)
    with pytest.raises(ConfigError, match="The engine lacks bpkv_readout: it was not built by this version of bpkv"):
        open_session(place)
    monkeypatch.setattr(type(place.engine), "num_io_tensors", property(lambda self: len(names) + 1))
    monkeypatch.setattr(place.engine, "get_tensor_name", [*names, "bpkv_more"].__getitem__)
    with pytest.raises(ConfigError, match="The engine has bpkv_more, unknown here"):
        open_session(place)


def test_pools_of_different_heads(place, monkeypatch):
    session = open_session(place)
    session.setup(1, len(PROMPT), 4)
    pools = session._memory_pool_allocator._pool_pointers
    pools.append(pools[0])
    with pytest.raises(BpkvError, match="The session has 2 KV pools, and an engine with BP-KV scores one"):
        session._pool()
