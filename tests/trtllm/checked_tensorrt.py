"""TensorRT-RTX, as far as TensorRT 10.14 has the same: its bindings' own signatures say what that is."""

import re
from typing import Any

Description = dict[str, dict[str, Any]]


class CheckedModule:
    """TensorRT-RTX, as far as TensorRT 10 has the same."""

    def __init__(self, trt: Any, described: Description) -> None:
        self._trt, self._described = trt, described

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python's own, of modules
            raise AttributeError(name)
        assert name in self._described, f"TensorRT 10 has no {name}"
        return getattr(self._trt, name)


class CheckedNetwork:
    """A network of TensorRT-RTX that takes only calls that TensorRT 10 takes."""

    def __init__(self, network: Any, described: Description, called: set[str]) -> None:
        self._network, self._described, self._called = network, described, called

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            returned = self.check(name, *given, **named)
            result = getattr(self._network, name)(*given, **named)
            return CheckedLayer(result, self._described[returned]) if returned.endswith("Layer") else result

        return call

    def check(self, name: str, *given: Any, **named: Any) -> str:
        """The type that the call returns."""
        overloads = signatures(self._described["INetworkDefinition"].get(name, ""), name)
        returned = [kind for names, kinds, kind in overloads if self._fits(names, kinds, given, named)]
        assert returned, f"TensorRT 10 does not take {name} with {given} and {named}: {overloads}"
        self._called.add(name)
        return returned[0]

    def _fits(self, names: list[str], kinds: list[str], given: Any, named: dict[str, Any]) -> bool:
        if len(given) > len(names) or sorted(names[len(given) :]) != sorted(named):
            return False
        arguments = dict(zip(names, given, strict=False)) | named
        enumerations = [
            (kinds[names.index(name)], value) for name, value in arguments.items() if hasattr(value, "value")
        ]
        return all(value.name in self._described[kind] for kind, value in enumerations)


class CheckedLayer:
    def __init__(self, layer: Any, members: dict[str, str]) -> None:
        vars(self).update(layer=layer, members=members)

    def __getattr__(self, name: str) -> Any:
        assert name in self.members
        return getattr(self.layer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        assert name in self.members, f"TensorRT 10's layer has no {name}"
        setattr(self.layer, name, value)


def signatures(docstring: str, name: str) -> list[tuple[list[str], list[str], str]]:
    """The parameters' names, their types, and the type returned, of every overload."""
    found = re.findall(rf"{name}\(self: [\w.]+, (.*)\) -> [\w.]*?(\w+)$", docstring, re.MULTILINE)
    parameters = [([each.partition(": ") for each in listed.split(", ")], returned) for listed, returned in found]
    return [
        ([name for name, _, _ in each], [kind.rpartition(".")[2] for _, _, kind in each], returned)
        for each, returned in parameters
    ]
