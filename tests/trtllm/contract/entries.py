"""What is known of TensorRT-LLM's Python interface: one entry for every name, read from `tensorrt_llm.json`."""

import builtins
import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("tensorrt_llm.json")
CALLABLE = ("function", "method", "classmethod", "staticmethod")


@dataclass(frozen=True)
class Entry:
    """`name` within its module: `build`, `Engine.save`."""

    module: str
    name: str
    kind: str  # class, one of CALLABLE, property, attribute, field, const, alias
    verified: str  # the sources that it was read in; what begins with 0.16 may be otherwise in 1.x
    signature: str = "()"  # of what can be called
    value: Any = None  # of a const, a field's default or an alias's target: as source text, or as it is
    bases: tuple[str, ...] = ()
    settable: bool = False

    @property
    def dotted(self) -> str:
        return f"{self.module}.{self.name}"

    @property
    def owner(self) -> str:
        """The class that it belongs to, or nothing."""
        return self.name.rpartition(".")[0]

    @property
    def short(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def unverified(self) -> bool:
        return self.verified.startswith("0.16 only")

    def bound(self, namespace: Mapping[str, Any]) -> inspect.Signature:
        """The signature with its defaults' values; a default that the namespace cannot give stays its source text."""
        return inspect.signature(eval(f"lambda {self.signature[1:-1]}: None", {}, _Lenient(namespace)))


class _Lenient(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        return Unknown(name)


class Unknown:
    """A default that the contract only names."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __getattr__(self, name: str) -> "Unknown":
        if name.startswith("__"):
            raise AttributeError(name)
        return Unknown(f"{self.text}.{name}")

    def __call__(self, *given: Any, **named: Any) -> "Unknown":
        return Unknown(f"{self.text}(...)")

    def __repr__(self) -> str:
        return self.text


def read(path: Path = FILE) -> tuple[list[Entry], list[str]]:
    """All entries, and the options that `trtllm-build` takes."""
    document = json.loads(path.read_text())
    entries = [
        Entry(module, name, **{key: tuple(value) if key == "bases" else value for key, value in entry.items()})
        for module, members in document["modules"].items()
        for name, entry in members.items()
    ]
    return entries, document["options"]
