"""What a client of Triton Inference Server asks for, read from the tensors of its request."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bpkv_trt.errors import ConfigError, InputError, quoted
from bpkv_trt.models.conversation import Turn, read_turns
from bpkv_trt.runtime.serving_request import ServingRequest
from bpkv_trt.serving_settings import ServingSettings

Tensors = Mapping[str, NDArray[Any]]  # by the names in config.pbtxt; of those that the client sent

# Of the request, by the input that gives them; `options` are those of BpkvConfig that a client may change.
FIELDS = {
    "text_input": "text",
    "bpkv_question": "question",
    "bpkv_raw": "raw",
    "sampling_param_max_tokens": "max_tokens",
    "sampling_param_temperature": "temperature",
    "sampling_param_top_p": "top_p",
    "sampling_param_seed": "seed",
    "sampling_param_ignore_eos": "ignore_eos",
    "bpkv_timeout_s": "timeout_s",
}
OPTIONS = {"bpkv_budget": "budget", "bpkv_policy": "policy", "bpkv_regime": "regime"}
SWITCHES = ("streaming", "stop", "return_finish_reason")
MESSAGES = "bpkv_messages"
STOP_STRINGS = "sampling_param_stop"
NAMES = (*FIELDS, *OPTIONS, *SWITCHES, MESSAGES, STOP_STRINGS)
LONGEST_OPTION = 200  # characters
ID = "id"
SERVERS_OWN = "triton_"  # parameters that Triton or its clients add


@dataclass(frozen=True)
class TritonRequest:
    """One request for text, and how its answer is to be sent."""

    serving: ServingRequest
    streaming: bool
    with_finish_reason: bool


def asks_to_stop(tensors: Tensors) -> bool:
    """Whether this is no request of its own: it ends those that run under its id."""
    return bool(_one(tensors, "stop", False))


def request_name(request_id: str, parameters: Mapping[str, Any]) -> str:
    """What a request is stopped by: Triton's request id, or, over /generate, `id` in the body, which it passes on."""
    return request_id or str(parameters.get(ID, ""))


def read_request(tensors: Tensors, parameters: Mapping[str, Any], settings: ServingSettings) -> TritonRequest:
    """Raises InputError or ConfigError for what cannot be meant, ServingLoop for what cannot be served.

    parameters: what a client wrote beside the inputs, and over /generate also what no input is called.
    """
    _refuse_unknown(parameters)
    given = {field: _one(tensors, name, None) for name, field in FIELDS.items() if name in tensors}
    if ("text_input" in tensors) == (MESSAGES in tensors):
        found = "are both given" if MESSAGES in tensors else "are both missing"
        raise InputError(f"text_input and {MESSAGES} {found}; give the text to answer, or the conversation.")
    options = {option: _one(tensors, name, None) for name, option in OPTIONS.items() if name in tensors}
    for name, option in OPTIONS.items():
        if len(str(options.get(option, ""))) > LONGEST_OPTION:
            raise ConfigError(f"{name} has more than {LONGEST_OPTION} characters; give a short text.")
    stop = tuple(_value(STOP_STRINGS, element) for element in tensors.get(STOP_STRINGS, np.array([])).reshape(-1))
    messages = _messages(tensors, settings) if MESSAGES in tensors else None
    serving = ServingRequest(**given, stop=stop, options=options, messages=messages)
    return TritonRequest(
        _within(serving, settings),
        streaming=bool(_one(tensors, "streaming", False)),
        with_finish_reason=bool(_one(tensors, "return_finish_reason", False)),
    )


def _within(serving: ServingRequest, settings: ServingSettings) -> ServingRequest:
    """The request, with the server's time limit where it gives none; ConfigError for more than the server gives."""
    _require_size(serving.text + (serving.question or ""), settings)
    if not 1 <= serving.max_tokens <= settings.most_new_tokens:
        raise ConfigError(
            f"sampling_param_max_tokens is {serving.max_tokens}; this server gives 1 to {settings.most_new_tokens}."
        )
    seconds = settings.timeout_s if serving.timeout_s is None else serving.timeout_s
    if not 0 < seconds <= settings.timeout_s:  # also where it is no number
        raise ConfigError(f"bpkv_timeout_s is {seconds:g}; give seconds, more than 0, at most {settings.timeout_s:g}.")
    return replace(serving, timeout_s=seconds)


def _messages(tensors: Tensors, settings: ServingSettings) -> tuple[Turn, ...]:
    text = _one(tensors, MESSAGES, None)
    _require_size(text, settings)
    return read_turns(MESSAGES, text)


def _require_size(text: str, settings: ServingSettings) -> None:
    size = len(text.encode())
    if size > settings.most_text_bytes:
        raise InputError(f"The text has {size} bytes; this server takes up to {settings.most_text_bytes}. Shorten it.")


def _refuse_unknown(parameters: Mapping[str, Any]) -> None:
    for name in parameters:
        if name in NAMES:
            raise InputError(f"{name} is an input of this model, and was sent as a parameter; send it as a tensor.")
        if name != ID and not name.startswith(SERVERS_OWN):
            short = [each for each in NAMES if each.endswith(f"_{name}")]  # max_tokens, as others call it
            near = short or difflib.get_close_matches(name[:100], NAMES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"the inputs are {', '.join(NAMES)}."
            raise InputError(f"{quoted(name)} is no input of this model; {hint}")


def _one(tensors: Tensors, name: str, default: Any) -> Any:
    """The only element of a tensor as a Python value, text as str; `default` where it was not sent."""
    if name not in tensors:
        return default
    if tensors[name].size != 1:
        raise InputError(f"{name} has shape {list(tensors[name].shape)}, and takes one value; give shape [1].")
    return _value(name, tensors[name].reshape(-1)[0])


def _value(name: str, element: Any) -> Any:
    if isinstance(element, np.generic):
        return element.item()
    try:
        return bytes(element).decode("utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8 (byte {error.start}); send text in UTF-8.") from None
