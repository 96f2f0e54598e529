"""Policies by name: those of the package, and those that other packages register."""

from collections.abc import Callable, Collection, Mapping
from importlib.metadata import EntryPoint, entry_points

from bpkv_trt.config import BpkvConfig
from bpkv_trt.core.traits import ModelTraits
from bpkv_trt.errors import ConfigError, quoted
from bpkv_trt.policies.adakv import AdaKv
from bpkv_trt.policies.base import METHOD_OPTIONS, Policy
from bpkv_trt.policies.bpkv import Bpkv
from bpkv_trt.policies.criticalkv import CriticalKv
from bpkv_trt.policies.deferkv import DeferKv
from bpkv_trt.policies.dropkv import DropKv
from bpkv_trt.policies.expected_attention import ExpectedAttention
from bpkv_trt.policies.full import Full
from bpkv_trt.policies.h2o import H2o
from bpkv_trt.policies.inertiakv import InertiaKv
from bpkv_trt.policies.inertiakv_lazy import InertiaKvLazy
from bpkv_trt.policies.inertiakv_score_free import InertiaKvScoreFree
from bpkv_trt.policies.kvzip import KvZip
from bpkv_trt.policies.observed_attention import ObservedAttention
from bpkv_trt.policies.pyramidkv import PyramidKv
from bpkv_trt.policies.random import Random
from bpkv_trt.policies.ripplekv import RippleKv
from bpkv_trt.policies.rkv import RKv
from bpkv_trt.policies.snapkv import SnapKv
from bpkv_trt.policies.streaming_llm import StreamingLlm
from bpkv_trt.policies.tova import Tova

# Options that some runs have no use for: when one has, and how to say so.
_USED: Mapping[str, tuple[Callable[[BpkvConfig], bool], str]] = {
    "budget": (
        lambda run: run.regime != ("generation",),
        "it bounds a prompt's entries, which the regime generation never evicts; give generation_budget for the "
        "answer's, or add prefill or deferred to regime",
    ),
    "generation_budget": (lambda run: "generation" in run.regime, "it is for the regime generation"),
    "interval": (lambda run: "generation" in run.regime, "it is for the regime generation"),
    "defer": (lambda run: "deferred" in run.regime, "it is for the regime deferred"),
    "probes": (lambda run: run.readout == "exact", "they are those of the readout exact"),
    "positions": (
        lambda run: "last_queries" in policy_class(run.policy).requires,
        "it is for policies that score by the latest queries",
    ),
    "top_k": (
        lambda run: "readout" in policy_class(run.policy).requires,
        "it is for policies that read out the next token's distribution, as bpkv does",
    ),
}
ENTRY_POINTS = "bpkv.policies"  # the group in which a package names its Policy classes

_BUILT_IN: dict[str, type[Policy]] = {
    policy.name: policy
    for policy in (
        Bpkv,
        Full,
        Random,
        StreamingLlm,
        H2o,
        ObservedAttention,
        SnapKv,
        Tova,
        PyramidKv,
        AdaKv,
        DropKv,
        CriticalKv,
        ExpectedAttention,
        DeferKv,
        RKv,
        InertiaKv,
        InertiaKvLazy,
        InertiaKvScoreFree,
        RippleKv,
        KvZip,
    )
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
        raise ConfigError(f"policy is {quoted(name)}, which is not a policy; choose from {', '.join(policy_names())}.")
    return _load(found[0])


def settled(config: BpkvConfig) -> BpkvConfig:
    """The configuration with the policy's own scope, regime and defaults where the user gave none.

    To try another policy, change `policy` first and settle afterwards: what was settled counts as given. Raises
    ConfigError for an unknown policy, for a scope, regime or layer table that the policy cannot have, and where the
    policy's defaults contradict what the user gave.
    """
    policy = policy_class(config.policy)
    if policy.evicts_nothing:
        return config if config.lookahead == config.rehearsal == 0 else config.replace(lookahead=0, rehearsal=0)
    _check_table(config, policy)
    _check_lookahead(config, policy)
    _check_options(config, policy)
    if config.scope not in policy.scopes:
        _refuse_if_given(config, "scope", config.scope, policy.scopes)
    ahead = {} if policy.looks_ahead else {"lookahead": 0}
    rehearsal = {} if "rehearsal" in policy.options else {"rehearsal": 0}
    own = {"scope": policy.scopes[0], **ahead, **rehearsal, **_preset(config, policy)}
    changes = {option: value for option, value in own.items() if option not in config.model_fields_set}
    refused = [regime for regime in config.regime if regime not in policy.regimes]
    if refused and "regime" not in changes:
        _refuse_if_given(config, "regime", ",".join(refused), policy.regimes)
        changes["regime"] = [regime for regime in config.regime if regime in policy.regimes] or policy.regimes[:1]
    return config.replace(**changes)


def refuse_idle(given: Collection[str], runs: Collection[BpkvConfig]) -> None:
    """Raise ConfigError for an option that was given and changes nothing in any of these runs, which are settled.

    A run that evicts nothing takes whatever is given.
    """
    evicting = [run for run in runs if not policy_class(run.policy).evicts_nothing]
    for name, (uses, reason) in _USED.items():
        if evicting and name in given and not any(map(uses, evicting)):
            raise ConfigError(
                f"{name} is {getattr(evicting[0], name)}, which changes nothing here: {reason}. Leave it out."
            )


def make_policy(config: BpkvConfig, traits: ModelTraits) -> Policy:
    """The policy of a settled configuration, for a model."""
    assert settled(config) == config, "the configuration was not settled for its policy"
    return policy_class(config.policy)(config, traits)


def _preset(config: BpkvConfig, policy: type[Policy]) -> Mapping[str, object]:
    if config.preset == "default":
        return policy.defaults
    if policy.published is None:
        raise ConfigError(
            f"preset is paper, but the policy {config.policy} has one form only, the published one: leave preset out."
        )
    return policy.published


def _check_lookahead(config: BpkvConfig, policy: type[Policy]) -> None:
    if config.lookahead and "lookahead" in config.model_fields_set and "last_queries" not in policy.requires:
        raise ConfigError(
            f"lookahead is {config.lookahead}, but the policy {config.policy} does not score by the latest queries, "
            "so drafted ones would change nothing: leave lookahead out."
        )


def _check_options(config: BpkvConfig, policy: type[Policy]) -> None:
    given = (METHOD_OPTIONS - policy.options) & config.model_fields_set
    idle = sorted(name for name in given if (name, getattr(config, name)) != ("rehearsal", 0))
    if idle:
        each = ", ".join(f"{name} is {getattr(config, name)}" for name in idle)
        raise ConfigError(
            f"{each}, which would change nothing: the policy {config.policy} has no such part. Leave it out; in a "
            f"comparison give it to the contender that has, as in bpkv[{idle[0]}={getattr(config, idle[0])}]."
        )


def _check_table(config: BpkvConfig, policy: type[Policy]) -> None:
    if config.layer_table is not None and not policy.takes_layer_table:
        raise ConfigError(
            f"layer_table is {config.layer_table}, but the policy {config.policy} shares its budget over the layers by "
            "a rule of its own. Leave the table out, or choose another policy."
        )
    if config.layer_table is None and "score_table" in policy.requires:
        raise ConfigError(
            f"The policy {config.policy} shares its budget over the layers by a table made for the model, and "
            "layer_table is not given. Make one with `bpkv layer-table --model M --output table.json`, and give it to "
            "--layer-table; a server takes it when its repository is written."
        )


def _refuse_if_given(config: BpkvConfig, option: str, value: str, allowed: tuple[str, ...]) -> None:
    if option in config.model_fields_set:
        raise ConfigError(
            f"{option} is {value}, which the policy {config.policy} cannot have: it works with {', '.join(allowed)} "
            f"only. Change or leave out {option}, or choose another policy."
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
