"""The part of config.pbtxt that model.py relies on: a server takes any, and would fail at its requests."""

import re
from collections.abc import Mapping
from typing import Any

from bpkv_trt.errors import ConfigError
from bpkv_trt.model_repository import template

_TENSOR = re.compile(r'{ name: "(\w+)" data_type: (\w+) dims: \[ (-?\d+) \](?: optional: (true))? }')


def check_description(config: Mapping[str, Any]) -> None:
    """Raise ConfigError where a model that was loaded is described otherwise than `bpkv model-repository` does it.

    config: as Triton hands it to the model, read from its JSON. What does not change how requests reach the model may
    be edited.
    """
    inputs, outputs = (template() / "config.pbtxt").read_text(encoding="utf-8").split("\noutput [")
    _check_tensors("input", config.get("input", []), inputs)
    _check_tensors("output", config.get("output", []), outputs)
    if not config.get("model_transaction_policy", {}).get("decoupled"):
        raise _refusal("has no decoupled: true")
    if config.get("max_batch_size"):
        raise _refusal("has a max_batch_size other than 0")
    if sum(group["count"] for group in config["instance_group"]) != 1:
        raise _refusal("has more than one instance")


def _check_tensors(kind: str, found: list[Mapping[str, Any]], template: str) -> None:
    own = {(each["name"], each["data_type"], *map(int, each["dims"]), each.get("optional", False)) for each in found}
    needed = {(name, type_, int(size), bool(optional)) for name, type_, size, optional in _TENSOR.findall(template)}
    if other := sorted(own ^ needed):
        raise _refusal(f"differs at its {kind} {other[0][0]}")


def _refusal(what: str) -> ConfigError:
    return ConfigError(
        f"config.pbtxt {what}, which the model cannot serve; write the repository again with `bpkv model-repository`."
    )
