"""Who is compared: a policy, with options of its own where they are given in brackets."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from bpkv_trt.config import BpkvConfig
from bpkv_trt.errors import ConfigError

# Set for all contenders alike: what is compared at what, and one pool that all share.
SHARED = ("policy", "budget", "generation_budget", "regime", "page_size")
_FORM = re.compile(r"([^\[\],=]+)(?:\[([^\[\]]*)\])?")
_SYNTAX = "write a policy's name, with options of its own in brackets, such as bpkv or bpkv[readout=direct,refine=0]"


@dataclass(frozen=True)
class Contender:
    """One of those compared; `label` is the text it was given as."""

    label: str
    policy: str
    options: Mapping[str, str]  # of BpkvConfig, none of `SHARED`


def parse_contenders(text: str) -> tuple[Contender, ...]:
    """Read `bpkv,bpkv[readout=direct,refine=0],snapkv`; commas within brackets do not separate.

    Raises ConfigError for what cannot be read, for unknown options, and where one contender is given twice. Whether
    the values are allowed is for BpkvConfig to say.
    """
    contenders = [_parse(item.strip()) for item in re.split(r",(?![^\[]*\])", text)]
    labels = [contender.label for contender in contenders]
    if twice := [label for label in dict.fromkeys(labels) if labels.count(label) > 1]:
        raise ConfigError(f"policies has {', '.join(twice)} more than once; give every contender once.")
    return tuple(contenders)


def _parse(label: str) -> Contender:
    found = _FORM.fullmatch(label)
    if found is None:
        raise ConfigError(f"policies has {label!r}, which is not a contender; {_SYNTAX}.")
    options = dict[str, str]()
    for item in (found[2] or "").split(",") if found[2] is not None else ():
        name, equals, value = (part.strip() for part in item.partition("="))
        name = name.replace("-", "_")
        if not equals or not value or name in options:
            raise ConfigError(
                f"In the contender {label}: {item.strip()!r} is not one option with its value; {_SYNTAX}."
            )
        _check_option(label, name)
        options[name] = value
    return Contender(label, found[1].strip(), MappingProxyType(options))


def _check_option(label: str, name: str) -> None:
    own = [option for option in BpkvConfig.model_fields if option not in SHARED]
    if name in SHARED:
        raise ConfigError(
            f"In the contender {label}: {name} is the same for all contenders and cannot be set for one; its own "
            f"options are {', '.join(own)}."
        )
    if name not in own:
        raise ConfigError(f"In the contender {label}: {name} is not an option; choose from {', '.join(own)}.")
