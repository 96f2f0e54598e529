"""A conversation, as it is put through a model's chat template."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from bpkv_trt.errors import InputError


class Turn(BaseModel):
    """What one side said."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)
    role: Literal["system", "user", "assistant"]
    content: str


_TURNS = TypeAdapter(Annotated[tuple[Turn, ...], Field(min_length=1)])


def read_turns(name: str, text: str) -> tuple[Turn, ...]:
    """The turns of a JSON list of {role, content}. InputError, which calls it `name`, for anything else."""
    try:
        return _TURNS.validate_json(text)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in problem["loc"])
        rule = "it is empty" if problem["type"] == "too_short" else problem["msg"][:1].lower() + problem["msg"][1:200]
        raise InputError(
            f"{name}{place:.100} cannot be used ({rule}); give a JSON "
            "list of one or more objects with role (system, user or assistant) and content, a string."
        ) from None
