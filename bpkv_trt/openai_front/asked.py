"""Bodies of requests, and the server's inputs that they become."""

import json
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator

Inputs = dict[str, NDArray[Any]]  # of the server, by name

# Fields that are inputs of the server by other names, or by the same; what is left out is as the server has it.
PASSED = {
    "temperature": ("sampling_param_temperature", np.float32),
    "top_p": ("sampling_param_top_p", np.float32),
    "seed": ("sampling_param_seed", np.uint64),
    "ignore_eos": ("sampling_param_ignore_eos", np.bool_),
    "bpkv_budget": ("bpkv_budget", np.object_),
    "bpkv_policy": ("bpkv_policy", np.object_),
    "bpkv_regime": ("bpkv_regime", np.object_),
    "bpkv_timeout_s": ("bpkv_timeout_s", np.float32),
}


def _whole_characters(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:  # which JSON can write
        raise ValueError(f"half a surrogate pair at {error.start} is no text") from None
    return text


Text = Annotated[str, AfterValidator(_whole_characters)]
# What an input of the server holds; the server has limits
Tokens = Annotated[int, Field(ge=-(2**31), lt=2**31)]
LARGEST = float(np.finfo(np.float32).max)
Number = Annotated[float, Field(ge=-LARGEST, le=LARGEST, allow_inf_nan=False)]


class _Body(BaseModel):
    """`null` is as good as left out, and what cannot be honoured is refused: nothing is ignored in silence."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


def _as_list(given: Any) -> Any:
    return [given] if isinstance(given, str) else given


def _one_text(given: Any) -> Any:
    if not isinstance(given, list):
        return given
    if given and isinstance(given[0], int | list):
        raise ValueError("token ids are not taken, send the text itself")
    if len(given) != 1:
        raise ValueError("a request has one prompt; send each in a request of its own")
    return given[0]


def _in_quotes(given: Any) -> Any:
    if type(given) in (int, float):
        raise ValueError(f'it is text, so write it in quotes: "{given}"')
    return given


def _no_other(value: object) -> AfterValidator:
    """Beside a type: a Literal would take `true` for 1."""

    def check(given: object) -> object:
        if given != value:
            raise ValueError(f"input should be {json.dumps(value)}")
        return given

    return AfterValidator(check)


class StreamOptions(_Body):
    include_usage: bool = False


class Asked(_Body):
    """What both endpoints take."""

    model: str
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    max_tokens: Tokens | None = None
    temperature: Number | None = None
    top_p: Number | None = None
    seed: Annotated[int, Field(ge=0, lt=2**64)] | None = None
    ignore_eos: bool = False
    stop: Annotated[list[Text], BeforeValidator(_as_list)] = []
    bpkv_budget: Annotated[Text, BeforeValidator(_in_quotes)] | None = None
    bpkv_policy: Text | None = None
    bpkv_regime: Text | None = None
    bpkv_timeout_s: Number | None = None
    # What changes nothing as long as it has these values
    user: str = ""
    n: Annotated[int, _no_other(1)] = 1
    presence_penalty: Annotated[float, _no_other(0)] = 0
    frequency_penalty: Annotated[float, _no_other(0)] = 0
    logit_bias: Annotated[dict[str, float], _no_other({})] = {}

    def inputs(self) -> Inputs:
        """The server's inputs, each of shape [1] but for the strings that end the answer."""
        given = {name: getattr(self, name) for name in PASSED}
        inputs: Inputs = {
            name: np.array([given[field]], dtype) for field, (name, dtype) in PASSED.items() if given[field] is not None
        }
        if (tokens := self.most_tokens()) is not None:
            inputs["sampling_param_max_tokens"] = np.array([tokens], np.int32)
        if self.stop:
            inputs["sampling_param_stop"] = np.array(self.stop, np.object_)
        return inputs | {"streaming": np.array([self.stream]), "return_finish_reason": np.array([True])}

    def most_tokens(self) -> int | None:
        """Of the answer; None: as the server has it."""
        return self.max_tokens


class CompletionAsked(Asked):
    """A text to go on with, as it is: no chat template."""

    prompt: Annotated[Text, BeforeValidator(_one_text)]
    best_of: Annotated[int, _no_other(1)] = 1
    echo: Annotated[bool, _no_other(False)] = False

    def inputs(self) -> Inputs:
        return super().inputs() | {"text_input": np.array([self.prompt], np.object_), "bpkv_raw": np.array([True])}


class Part(_Body):
    type: Literal["text"]
    text: Text


def _as_parts(given: Any) -> Any:
    return [{"type": "text", "text": given}] if isinstance(given, str) else given


class Message(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[Part], BeforeValidator(_as_parts)]

    def turn(self) -> dict[str, str]:
        """The same as the server takes it: it has no developers, whom OpenAI's API puts in the system's place."""
        text = "".join(part.text for part in self.content)
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatAsked(Asked):
    """A conversation to answer; the server puts it through the model's chat template."""

    messages: list[Message]
    max_completion_tokens: Tokens | None = None
    logprobs: Annotated[bool, _no_other(False)] = False
    tools: Annotated[list[Any], _no_other([])] = []
    tool_choice: Literal["none", "auto"] = "auto"  # of none at all
    response_format: "TextFormat | None" = None

    @model_validator(mode="after")
    def _one_limit(self) -> "ChatAsked":
        if self.max_tokens is not None and self.max_completion_tokens not in (None, self.max_tokens):
            raise ValueError("max_tokens is another name of max_completion_tokens; give one of them")
        return self

    def most_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def inputs(self) -> Inputs:
        said = json.dumps([message.turn() for message in self.messages], ensure_ascii=False)
        return super().inputs() | {"bpkv_messages": np.array([said], np.object_)}


class TextFormat(_Body):
    type: Literal["text"]
