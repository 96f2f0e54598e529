"""Errors as OpenAI's API has them."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from bpkv_trt.errors import quoted

STATUS = {"INVALID_ARG": 400, "UNAVAILABLE": 503}  # by the code that the server's messages begin with; others: 500

NAMES = {"sampling_param_": "", "bpkv_messages": "messages"}  # of the server's inputs: as the front's fields are called


class Refusal(Exception):
    """A request that is not answered, or not to its end."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    @classmethod
    def by_server(cls, message: str) -> "Refusal":
        """Of a message of the server: `CODE: what, why, what to do`, or one of Triton's own."""
        code, _, why = message.partition(": ")
        if code not in STATUS:
            return cls(500, message)
        for theirs, ours in NAMES.items():
            why = why.replace(theirs, ours)
        return cls(STATUS[code], why, code=code.lower())

    @classmethod
    def of_json(cls, error: ValueError | RecursionError) -> "Refusal":
        """Of what Python's reader of JSON raised at a body."""
        if isinstance(error, json.JSONDecodeError):
            why = f"{error.msg}, at character {error.pos}"
        elif isinstance(error, UnicodeDecodeError):
            why = f"{error.reason}, at byte {error.start}"
        elif isinstance(error, RecursionError):
            why = "lists or objects are nested too deeply"
        else:
            why = "a number has too many digits"
        return cls(400, f"The body is not JSON ({why}); send one JSON object, in UTF-8.")

    @classmethod
    def of_fields(cls, problems: Iterable[Mapping[str, Any]]) -> "Refusal":
        """Of what pydantic found wrong with a body; the first is told."""
        problem = next(iter(problems))
        if isinstance(problem.get("input"), bytes):
            return cls(400, "The body is not said to be JSON; send the header Content-Type: application/json.")
        name = ".".join(str(part) for part in problem["loc"][1:])[:100]  # the first is `body`
        if problem["type"] == "missing":
            return cls(400, f"{name or 'The body'} is missing; give it.", name or None)
        if problem["type"] == "extra_forbidden":
            return cls(400, f"{name} cannot be honoured by this server; leave it out.", name, "unsupported_parameter")
        told = problem["msg"].removeprefix("Value error, ")
        rule = told[:1].lower() + told[1:200]
        return cls(400, f"{name or 'The body'} is {quoted(problem.get('input'))}: {rule}.", name or None)

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}
