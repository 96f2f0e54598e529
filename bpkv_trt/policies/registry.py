"""Policies by name: those of the package, and those that other packages register."""

from importlib.metadata import EntryPoint, entry_points

from bpkv_trt.config import BpkvConfig
from bpkv_trt.core.traits import ModelTraits
from bpkv_trt.errors import ConfigError
from bpkv_trt.policies.base import Policy
from bpkv_trt.policies.bpkv import Bpkv
from bpkv_trt.policies.expected_attention import ExpectedAttention
from bpkv_trt.policies.full import Full
from bpkv_trt.policies.h2o import H2o
from bpkv_trt.policies.random import Random
from bpkv_trt.policies.snapkv import SnapKv
from bpkv_trt.policies.streaming_llm import StreamingLlm

ENTRY_POINTS = "bpkv.policies"  # the group in which a package names its Policy classes

_BUILT_IN: dict[str, type[Policy]] = {
    policy.name: policy for policy in (Bpkv, Full, Random, StreamingLlm, SnapKv, H2o, ExpectedAttention)
}


def policy_names() -> tuple[str, ...]:
    """All names that `policy_class` knows: the package's own first, then those of other packages, sorted."""
    others = {entry.name for entry in entry_points(group=ENTRY_POINTS)} - _BUILT_IN.keys()
    return (*_BUILT_IN, *sorted(others))


def policy_class(name: str) -> type[Policy]:
    """The policy of that name; a package cannot replace a built-in one. Raises ConfigError, naming the choices."""
    if name in _BUILT_IN:
        return _BUILT_IN[name]
    found = tuple(entry_points(group=ENTRY_POINTS, name=name))
    if not found:
        raise ConfigError(f"policy is {name!r}, which is not a policy; choose from {', '.join(policy_names())}.")
    return _load(found[0])


def make_policy(config: BpkvConfig, traits: ModelTraits) -> Policy:
    """The configured policy for a model. Raises ConfigError where it cannot have the configured scope or regime."""
    policy = policy_class(config.policy)
    if not policy.evicts_nothing:
        _require(config.policy, "scope", (config.scope,), policy.scopes)
        _require(config.policy, "regime", config.regime, policy.regimes)
    return policy(config, traits)


def _require(policy: str, option: str, given: tuple[str, ...], allowed: frozenset[str]) -> None:
    refused = [value for value in given if value not in allowed]
    if refused:
        raise ConfigError(
            f"{option} is {','.join(given)}, which the policy {policy} cannot have: it works with "
            f"{', '.join(sorted(allowed))} only. Change {option}, or choose another policy."
        )


def _load(entry: EntryPoint) -> type[Policy]:
    origin = f"The policy {entry.name}, registered as {entry.value} in {ENTRY_POINTS},"
    try:
        loaded = entry.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{origin} cannot be loaded: {error}. Reinstall or remove its package.") from error
    if not (isinstance(loaded, type) and issubclass(loaded, Policy)):
        raise ConfigError(f"{origin} is not a subclass of bpkv_trt.policies.base.Policy. Tell its package's author.")
    return loaded
