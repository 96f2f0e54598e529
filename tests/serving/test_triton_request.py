"""Tensors of a request become a ServingRequest; what the server itself checks, types and shapes, is tested on it."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bpkv_trt.errors import BpkvError, InputError
from bpkv_trt.models.conversation import Turn
from bpkv_trt.runtime.serving_request import ServingRequest
from bpkv_trt.runtime.triton_request import asks_to_stop, read_request, request_name
from bpkv_trt.serving_settings import ServingSettings

SETTINGS = ServingSettings("smollm2", timeout_s=30, most_text_bytes=20)


def text(*strings: str) -> Any:
    return np.array([string.encode() for string in strings], dtype=object)


def test_every_input_has_its_place() -> None:
    tensors = {
        "text_input": text("Grüße"),
        "streaming": np.array([True]),
        "return_finish_reason": np.array([True]),
        "sampling_param_max_tokens": np.array([7], dtype=np.int32),
        "sampling_param_temperature": np.array([0.5], dtype=np.float32),
        "sampling_param_top_p": np.array([0.25], dtype=np.float32),
        "sampling_param_seed": np.array([2**63 - 1], dtype=np.uint64),
        "sampling_param_ignore_eos": np.array([True]),
        "sampling_param_stop": text("a", "ß"),
        "bpkv_budget": text("0.3"),
        "bpkv_policy": text("snapkv"),
        "bpkv_regime": text("prefill"),
        "bpkv_question": text("Why?"),
        "bpkv_raw": np.array([True]),
        "bpkv_timeout_s": np.array([1.5], dtype=np.float32),
    }
    asked = read_request(tensors, {"triton_enable_empty_final_response": True, "id": "x"}, SETTINGS)
    options = {"budget": "0.3", "policy": "snapkv", "regime": "prefill"}
    expected = ServingRequest("Grüße", "Why?", True, 7, 0.5, 0.25, 2**63 - 1, ("a", "ß"), True, options, 1.5)
    assert asked.serving == expected and asked.streaming and asked.with_finish_reason
    assert type(asked.serving.seed) is int and type(asked.serving.raw) is bool
    asked.serving.check()


def test_a_conversation_is_read_in_place_of_a_text() -> None:
    said = '[{"role":"user","content":"ä"}]'
    settings = replace(SETTINGS, most_text_bytes=len(said.encode()))
    asked = read_request({"bpkv_messages": text(said)}, {}, settings)
    assert asked.serving == ServingRequest(messages=(Turn(role="user", content="ä"),), timeout_s=30)
    asked.serving.check()
    with pytest.raises(InputError, match="32 bytes; this server takes up to 31"):
        read_request({"bpkv_messages": text(said)}, {}, replace(SETTINGS, most_text_bytes=31))


@pytest.mark.parametrize(
    "beside, told",
    [
        ({"question": "Why?"}, "into the last one of the user"),
        ({"raw": True}, "chat template, which raw is to do without"),
        ({"text": "a"}, "both text and messages"),
        ({"messages": (Turn(role="user", content=" "),)}, "messages is empty"),
    ],
)
def test_what_a_conversation_cannot_have_is_refused(beside: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        ServingRequest(**{"messages": (Turn(role="user", content="a"),), **beside}).check()


def test_what_is_left_out_is_as_usual_but_for_the_servers_time_limit() -> None:
    asked = read_request({"text_input": text("a")}, {}, SETTINGS)
    assert asked.serving == ServingRequest("a", timeout_s=30)
    assert not asked.streaming and not asked.with_finish_reason


def test_a_request_is_named_by_its_id_or_its_parameter() -> None:
    assert request_name("a", {}) == "a" and request_name("", {"id": "b"}) == "b" and request_name("", {}) == ""
    assert asks_to_stop({"stop": np.array([True])}) and not asks_to_stop({"stop": np.array([False])})
    assert not asks_to_stop({})


@pytest.mark.parametrize(
    "tensors, parameters, told",
    [
        ({}, {}, "text_input and bpkv_messages are both missing"),
        ({"text_input": text("a"), "bpkv_messages": text("[]")}, {}, "are both given"),
        ({"bpkv_messages": text("a", "b")}, {}, r"bpkv_messages has shape \[2\]"),
        ({"bpkv_messages": text("a")}, {}, "bpkv_messages cannot be used .*JSON"),
        ({"text_input": np.array([], dtype=object)}, {}, r"text_input has shape \[0\]"),  # as numpy 2 breaks old stubs
        ({"text_input": text("a", "b")}, {}, r"text_input has shape \[2\]"),
        ({"text_input": np.array([b"ab\xff"], dtype=object)}, {}, r"not UTF-8 \(byte 2\)"),
        ({"text_input": text("a" * 15), "bpkv_question": text("b" * 6)}, {}, "21 bytes; this server takes up to 20"),
        ({"text_input": text("a"), "bpkv_timeout_s": np.array([np.nan], dtype=np.float32)}, {}, "timeout_s is nan"),
        ({"text_input": text("a")}, {"max_tokens": 3}, "did you mean sampling_param_max_tokens"),
        ({"text_input": text("a")}, {"sampling_param_max_tokens": 3}, "sent as a parameter; send it as a tensor"),
        ({"bpkv_messages": text("[]")}, {}, r"bpkv_messages cannot be used \(it is empty\)"),
        ({"text_input": text("a")}, {"x" * 1000: 3}, "is no input"),
    ],
)
def test_what_cannot_be_meant_is_refused(tensors: dict[str, Any], parameters: dict[str, Any], told: str) -> None:
    with pytest.raises(BpkvError, match=told) as error:
        read_request(tensors, parameters, SETTINGS)
    assert len(str(error.value)) < 600


def test_a_switch_of_two_values_is_refused() -> None:
    with pytest.raises(InputError, match="stop has shape"):
        asks_to_stop({"stop": np.array([True, False])})
