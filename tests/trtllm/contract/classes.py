"""The classes of the contract, generated."""

import enum
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from tests.trtllm.contract.entries import CALLABLE, Entry

if TYPE_CHECKING:
    from tests.trtllm.contract.fakes import Fakes

REQUIRED = "(required)"
WRAPPERS: dict[str, Callable[[Any], Any]] = {"classmethod": classmethod, "staticmethod": staticmethod}


class FakeObject:
    """An instance of a class of the contract. Names that begin with an underscore are the test's own."""

    fakes: "Fakes"
    dotted: str
    contract: Mapping[str, Entry]  # of the class and its bases
    is_open: bool  # takes any attribute, as its constructor takes any keyword

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("__"):
            kind = type(self)
            kind.fakes.touch(kind.contract.get(name))
        return super().__getattribute__(name)

    def __getattr__(self, name: str) -> Any:
        if name in type(self).contract:
            raise AttributeError(f"{type(self).dotted}.{name}: this test gives it no value")
        raise AttributeError(f"the contract has no {type(self).dotted}.{name}")

    def __setattr__(self, name: str, value: Any) -> None:
        """A subclass from elsewhere may have attributes of its own."""
        kind = type(self)
        generated = "dotted" in vars(kind)
        if generated and not (kind.is_open or name.startswith("_") or name in kind.contract):
            raise AttributeError(f"the contract has no {kind.dotted}.{name} to set")
        super().__setattr__(name, value)


class FakeClasses(dict[str, type]):
    """By dotted name."""

    def __init__(self, fakes: "Fakes") -> None:
        super().__init__()
        self.fakes = fakes
        self.members: dict[str, dict[str, Entry]] = {}
        for entry in fakes.entries:
            if entry.kind == "class":
                self.members.setdefault(entry.dotted, {})
            elif entry.owner:
                self.members.setdefault(f"{entry.module}.{entry.owner}", {})[entry.short] = entry
        self.homes = {dotted.rpartition(".")[2]: dotted for dotted in self.members}
        for dotted in self.members:
            self._make(dotted)

    def by_short_name(self) -> dict[str, type]:
        return {short: self[dotted] for short, dotted in self.homes.items()}

    def fill(self) -> None:
        """Give the classes what they do; their defaults may name each other."""
        for dotted, kind in self.items():
            for name, entry in self.members[dotted].items():
                if name == "__init__":
                    setattr(kind, name, self._constructor(entry))
                elif entry.kind in CALLABLE:
                    function = self.fakes.callable(entry)
                    setattr(kind, name, WRAPPERS.get(entry.kind, lambda plain: plain)(function))
                elif entry.kind == "property":
                    setattr(kind, name, self._property(entry))
            fields = [each for each in self.members[dotted].values() if each.kind == "field"]
            if fields and "__init__" not in self.members[dotted]:
                vars_of = [each for each in fields if "init=False" not in str(each.value)]
                setattr(kind, "__init__", self._constructor(_of_fields(dotted, vars_of)))  # noqa: B010

    def _make(self, dotted: str) -> type:
        if dotted in self:
            return self[dotted]
        module, _, name = dotted.rpartition(".")
        entry = self.fakes.by_name.get(dotted)
        bases = entry.bases if entry is not None else ()
        if set(bases) & {"IntEnum", "IntFlag"}:
            values = {short: int(each.value) for short, each in self.members[dotted].items() if each.kind == "const"}
            self[dotted] = getattr(enum, bases[0])(name, values, module=module)
            return self[dotted]
        parents = tuple(self._make(self.homes[base]) for base in bases if base in self.homes) or (FakeObject,)
        contract: dict[str, Entry] = {}
        for parent in reversed(parents):
            contract.update(getattr(parent, "contract", {}))
        contract.update(self.members[dotted])
        start = contract.get("__init__")
        namespace = {
            "__module__": module,
            "fakes": self.fakes,
            "dotted": dotted,
            "contract": contract,
            "is_open": start is not None and "**" in start.signature,
        }
        self[dotted] = type(name, parents, namespace)
        return self[dotted]

    def _constructor(self, entry: Entry) -> Callable[..., None]:
        """Without an implementation, arguments become the attributes that the contract has of the same names."""
        fakes, signature = self.fakes, self.fakes.signature(entry)
        free = next((each.name for each in signature.parameters.values() if each.kind is each.VAR_KEYWORD), "")

        def start(*given: Any, **named: Any) -> None:
            fakes.touch(entry)
            bound = bind(entry.dotted, signature, given, named)
            if entry.dotted in fakes.implementations:
                run(fakes.implementations[entry.dotted], bound)
                return
            made = bound.arguments["self"]
            known = {name: value for name, value in bound.arguments.items() if name in type(made).contract}
            for name, value in (known | bound.arguments.get(free, {})).items():
                setattr(made, name, value)

        start.__signature__ = signature  # type: ignore[attr-defined]
        return start

    def _property(self, entry: Entry) -> property:
        def accessors() -> property:
            implementation = self.fakes.implementations.get(entry.dotted)
            if implementation is None:
                raise NotImplementedError(f"{entry.dotted}: this test gives it nothing to do")
            assert isinstance(implementation, property)
            return implementation

        def put(self: Any, value: Any) -> None:
            accessors().__set__(self, value)

        return property(lambda self: accessors().__get__(self), put if entry.settable else None)


def bind(dotted: str, signature: inspect.Signature, given: Any, named: Any) -> inspect.BoundArguments:
    """The arguments with the contract's defaults. TypeError, with the name, for what does not fit."""
    try:
        bound = signature.bind(*given, **named)
    except TypeError as error:
        raise TypeError(f"{dotted}: {error}") from None
    bound.apply_defaults()
    return bound


def run(implementation: Any, bound: inspect.BoundArguments) -> Any:
    if takes_names(implementation):
        return implementation(**bound.arguments)
    return implementation(*bound.args, **bound.kwargs)


def takes_names(implementation: Callable[..., Any]) -> bool:
    parameters = inspect.signature(implementation).parameters
    return [(each.name, each.kind) for each in parameters.values()] == [("arguments", inspect.Parameter.VAR_KEYWORD)]


def _of_fields(dotted: str, fields: list[Entry]) -> Entry:
    """The constructor of a class that is described by its fields."""
    required = [each.short for each in fields if each.value == REQUIRED]
    defaulted = [f"{each.short}={each.value}" for each in fields if each.value != REQUIRED]
    module, _, name = dotted.rpartition(".")
    signature = f"(self, *, {', '.join(required + defaulted)})"
    return Entry(module, f"{name}.__init__", "method", fields[0].verified, signature)
