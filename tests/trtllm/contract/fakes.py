"""A package `tensorrt_llm` generated from the contract: what the contract has exists, and nothing else does.

Its functions take the arguments that the contract says, and do what a test gives them to do.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np

from tests.trtllm.contract.classes import FakeClasses, bind, run, takes_names
from tests.trtllm.contract.entries import CALLABLE, Entry, read

PACKAGE = "tensorrt_llm"
OURS = "bpkv_trt"
Implementation = Callable[..., Any] | property


class Fakes:
    """One package tree. `unverified`: names used by bpkv_trt that were read in 0.16 only."""

    def __init__(
        self, implementations: Mapping[str, Implementation] | None = None, *, tensorrt: ModuleType | None = None
    ) -> None:
        """implementations: by dotted name, each with the contract's own parameters, or with `**arguments` alone, which
        gets them all by name. tensorrt: installed beside it.

        Raises TypeError for an implementation that the contract has no place for.
        """
        self.entries, self.options = read()
        self.by_name = {entry.dotted: entry for entry in self.entries}
        self.tensorrt = tensorrt
        self.unverified: set[str] = set()
        self.implementations: dict[str, Implementation] = {}
        self.classes = FakeClasses(self)
        self.namespace = {"np": np, "field": _default} | self.classes.by_short_name()
        if tensorrt is not None:
            self.namespace["trt"] = tensorrt
        self.classes.fill()
        self.modules: dict[str, FakeModule] = {}
        for entry in self.entries:
            self._module(entry.module)
        for entry in self.entries:
            self._module(entry.module).members.update(self._member(entry))
        for entry in self.entries:
            if entry.kind == "alias":
                self.modules[entry.module].members[entry.name] = self[entry.value]
        self.implement(implementations or {})

    def implement(self, implementations: Mapping[str, Implementation]) -> None:
        for dotted, implementation in implementations.items():
            self._check(dotted, implementation)
            self.implementations[dotted] = implementation

    def __getitem__(self, dotted: str) -> Any:
        """A class, or a module's function or constant; KeyError for what the contract lacks."""
        if dotted in self.classes:
            return self.classes[dotted]
        module, _, name = dotted.rpartition(".")
        return self.modules[module].members[name]

    @contextmanager
    def installed(self, *fresh: str) -> Iterator["Fakes"]:
        """Import statements find this tree meanwhile. fresh: modules that hold names of it, imported anew inside."""
        ours = self.modules | ({"tensorrt": self.tensorrt} if self.tensorrt is not None else {})
        before = {name: sys.modules.pop(name) for name in [*ours, *fresh] if name in sys.modules}
        sys.modules.update(ours)
        try:
            yield self
        finally:
            for name in [*ours, *fresh]:
                sys.modules.pop(name, None)
            sys.modules.update(before)

    def signature(self, entry: Entry) -> inspect.Signature:
        return entry.bound(self.namespace)

    def touch(self, entry: Entry | None) -> None:
        """Keep the name of an entry that bpkv_trt itself uses and that may be otherwise in 1.x."""
        if entry is not None and entry.unverified and _user().partition(".")[0] == OURS:
            self.unverified.add(entry.dotted)

    def callable(self, entry: Entry) -> Callable[..., Any]:
        signature = self.signature(entry)

        def call(*given: Any, **named: Any) -> Any:
            self.touch(entry)
            bound = bind(entry.dotted, signature, given, named)
            implementation = self.implementations.get(entry.dotted)
            if implementation is None:
                raise NotImplementedError(f"{entry.dotted}: this test gives it nothing to do")
            return run(implementation, bound)

        call.__name__, call.__qualname__, call.__module__ = entry.short, entry.name, entry.module
        call.__signature__ = signature  # type: ignore[attr-defined]
        return call

    def _module(self, name: str) -> "FakeModule":
        if name not in self.modules:
            self.modules[name] = FakeModule(self, name)
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(self._module(parent), child, self.modules[name])
        return self.modules[name]

    def _member(self, entry: Entry) -> dict[str, Any]:
        """What the entry puts into its module; aliases wait for what they stand for."""
        top = entry.name.partition(".")[0]
        if f"{entry.module}.{top}" in self.classes:
            return {top: self.classes[f"{entry.module}.{top}"]}
        if entry.kind == "function":
            return {entry.name: self.callable(entry)}
        if entry.kind == "const":
            return {entry.name: self._constant(entry.value)}
        assert entry.kind == "alias", f"{entry.dotted} is a {entry.kind} outside of a class"
        return {}

    def _constant(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self.classes[dotted] for key, dotted in value.items()}
        return eval(value, {}) if isinstance(value, str) else value

    def _check(self, dotted: str, implementation: Implementation) -> None:
        entry = self.by_name.get(dotted)
        if entry is None or entry.kind not in (*CALLABLE, "property"):
            raise TypeError(f"the contract has no {dotted} that does something")
        if entry.kind == "property":
            if not isinstance(implementation, property) or (implementation.fset is not None) != entry.settable:
                raise TypeError(f"{dotted} is a property {'with' if entry.settable else 'without'} a setter")
            return
        assert callable(implementation)
        if takes_names(implementation):
            return
        wanted, given = self.signature(entry), inspect.signature(implementation)
        parameters = [[(each.name, each.kind) for each in side.parameters.values()] for side in (wanted, given)]
        if parameters[0] != parameters[1]:
            raise TypeError(f"{dotted} is {wanted} in the contract and {given} here")


class FakeModule(ModuleType):
    """Has its members, each recorded where it is taken, and the modules inside it."""

    def __init__(self, fakes: Fakes, name: str) -> None:
        super().__init__(name)
        vars(self).update(fakes=fakes, members={}, __path__=[])

    def __getattr__(self, name: str) -> Any:
        if name not in self.members:
            raise AttributeError(f"the contract has no {self.__name__}.{name}")
        self.fakes.touch(self.fakes.by_name.get(f"{self.__name__}.{name}"))
        return self.members[name]

    def __setattr__(self, name: str, value: Any) -> None:
        """A name that the contract has may be replaced for a while."""
        if not (name.startswith("__") or isinstance(value, ModuleType) or name in self.members):
            raise AttributeError(f"the contract has no {self.__name__}.{name} to replace")
        super().__setattr__(name, value)


def implementations_of(dotted: str, kind: type) -> dict[str, Implementation]:
    """What a class of the test's writes for the contract's class; names that begin with _ are its own helpers."""
    return {
        f"{dotted}.{name}": value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
        for name, value in vars(kind).items()
        if name in ("__init__", "__call__") or not name.startswith("_")
    }


def _default(default: Any = None, default_factory: Callable[[], Any] = lambda: None, init: bool = True) -> Any:
    """The default that `dataclasses.field` states."""
    return default_factory() if default is None else default


def _user() -> str:
    """The module that uses a name of the tree."""
    frame = sys._getframe(1)
    own = __name__.rpartition(".")[0]
    while frame.f_back is not None and frame.f_globals.get("__name__", own).startswith(own):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", ""))
