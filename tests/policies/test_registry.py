"""Policies by name, those of other packages included."""

import sys
from pathlib import Path

import pytest

from bpkv_trt.config import BpkvConfig
from bpkv_trt.core.traits import ModelTraits
from bpkv_trt.errors import ConfigError
from bpkv_trt.policies.base import METHOD_OPTIONS, Policy
from bpkv_trt.policies.registry import make_policy, policy_class, policy_names, refuse_idle, settled

BUILT_IN = (
    "bpkv",
    "full",
    "random",
    "streaming_llm",
    "h2o",
    "observed_attention",
    "snapkv",
    "tova",
    "pyramidkv",
    "adakv",
    "dropkv",
    "criticalkv",
    "expected_attention",
    "deferkv",
)
TRAITS = ModelTraits(
    architecture="test",
    layers=1,
    query_heads=1,
    kv_heads=1,
    head_dim=4,
    width=4,
    vocabulary=9,
    attention_scale=0.5,
)
OUTSIDE = """
from bpkv_trt.policies.random import Random

class Outside(Random):
    name = "outside"
    scopes = ("head",)
    regimes = ("prefill",)
    takes_layer_table = False
    defaults = {"defer": 1, "recent": 24, "generation_budget": "64t"}

NOT_A_POLICY = 3
"""
ENTRY_POINTS = """[bpkv.policies]
outside = outside_policy:Outside
gone = outside_policy:Gone
absent = no_such_module:Policy
number = outside_policy:NOT_A_POLICY
full = outside_policy:Outside
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another package with policies, on the path as an installer leaves it."""
    (tmp_path / "outside_policy.py").write_text(OUTSIDE)
    information = tmp_path / "outside_policy-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: outside-policy\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "outside_policy", raising=False)


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_policies_state_their_name_and_source(name: str) -> None:
    policy = policy_class(name)
    assert policy.name == name and policy.source
    assert isinstance(make_policy(settled(BpkvConfig(policy=name)), TRAITS), policy)


@pytest.mark.parametrize(
    ("name", "requires"),
    [
        ("h2o", {"received_attention"}),
        ("observed_attention", {"received_attention"}),
        ("criticalkv", {"last_queries", "output_projection"}),
        ("tova", {"last_queries"}),
        ("expected_attention", {"query_moments"}),
        ("snapkv", {"last_queries"}),
        ("random", set()),
        ("streaming_llm", set()),
        ("full", set()),
    ],
)
def test_policies_say_what_they_require(name: str, requires: set[str]) -> None:
    assert policy_class(name).requires == requires


def test_an_unknown_name_is_refused_with_the_choices() -> None:
    with pytest.raises(ConfigError) as refusal:
        make_policy(BpkvConfig(policy="snapvk"), TRAITS)
    assert "'snapvk'" in str(refusal.value) and all(name in str(refusal.value) for name in BUILT_IN)
    assert policy_names()[0] == "bpkv" and set(BUILT_IN) <= set(policy_names())


@pytest.mark.usefixtures("installed")
def test_an_installed_package_adds_policies() -> None:
    assert "outside" in policy_names() and policy_names().count("full") == 1
    policy = policy_class("outside")
    assert issubclass(policy, Policy) and policy.__module__ == "outside_policy"
    assert policy_class("full").__module__ == "bpkv_trt.policies.full"  # a built-in one cannot be replaced


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "reason"), [("gone", "cannot be loaded"), ("absent", "no_such_module"), ("number", "not a subclass")]
)
def test_a_broken_registration_is_named(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"The policy {name}, registered as .*{reason}"):
        policy_class(name)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"scope": "global"}, "scope is global, which the policy outside cannot have: it works with head only"),
        ({"regime": "prefill,generation"}, "regime is generation, which .* works with prefill only"),
        ({"layer_table": "table.json"}, "layer_table is table.json, but the policy outside shares its budget"),
    ],
)
def test_what_the_policy_cannot_have_is_refused(options: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        settled(BpkvConfig(policy="outside", **options))


@pytest.mark.usefixtures("installed")
def test_a_policy_brings_its_own_scope_and_regime_where_none_are_given() -> None:
    config = settled(BpkvConfig(policy="outside", budget="0.3"))
    assert (config.scope, config.regime, str(config.budget)) == ("head", ("prefill",), "0.3")
    assert make_policy(config, TRAITS).config == config
    assert settled(config) == config


@pytest.mark.usefixtures("installed")
def test_a_policy_brings_other_defaults_of_its_own() -> None:
    own = settled(BpkvConfig(policy="outside"))
    assert (own.defer, own.recent, str(own.generation_budget)) == (1, 24, "64t")
    given = settled(BpkvConfig(policy="outside", defer=8, generation_budget="32t"))
    assert (given.defer, given.recent, str(given.generation_budget)) == (8, 24, "32t")  # 8 is also the general default
    with pytest.raises(ConfigError, match="recent is 24 and positions is 30"):
        settled(BpkvConfig(policy="outside", positions=30))  # valid with the general default of 32


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name not in ("bpkv", "full")])
def test_peers_run_in_their_published_scope_unless_another_is_given(name: str) -> None:
    published = policy_class(name).scopes[0]
    assert published == ("layer" if name == "adakv" else "head")
    assert settled(BpkvConfig(policy=name)).scope == published
    for scope in ("head", "layer", "global"):
        config = BpkvConfig(policy=name, scope=scope)
        if scope in policy_class(name).scopes:
            assert settled(config).scope == scope
        else:
            with pytest.raises(ConfigError, match=f"scope is {scope}, which the policy {name} cannot have"):
                settled(config)


@pytest.mark.parametrize(
    ("name", "option", "value", "allowed"),
    [
        ("adakv", "scope", "head", "layer"),
        ("pyramidkv", "scope", "global", "head"),
        ("pyramidkv", "regime", "generation", "prefill, deferred"),
        ("deferkv", "regime", "prefill", "deferred"),
    ],
)
def test_what_makes_a_policy_what_it_is_cannot_be_changed(name: str, option: str, value: str, allowed: str) -> None:
    with pytest.raises(ConfigError, match=f"{option} is {value}, which .* {name} cannot have: it works with {allowed}"):
        settled(BpkvConfig(policy=name, **{option: value}))


def test_pyramidkv_takes_no_layer_table() -> None:
    with pytest.raises(ConfigError, match="layer_table is table.json, but the policy pyramidkv shares its budget"):
        settled(BpkvConfig(policy="pyramidkv", layer_table="table.json"))


def test_deferkv_waits_for_one_token_unless_told_otherwise() -> None:
    config = settled(BpkvConfig(policy="deferkv"))
    assert (config.regime, config.defer, config.scoring_positions) == (("deferred",), 1, config.positions + 1)
    assert settled(BpkvConfig(policy="deferkv", defer=4)).defer == 4
    assert settled(BpkvConfig(policy="snapkv", regime="deferred")).defer == 8


def test_the_default_policy_keeps_the_defaults() -> None:
    assert settled(BpkvConfig()) == BpkvConfig()
    nothing_to_judge = BpkvConfig(policy="full", lookahead=0, rehearsal=0)
    assert settled(BpkvConfig(policy="full")) == settled(nothing_to_judge) == nothing_to_judge
    assert settled(BpkvConfig(policy="full", lookahead=8, rehearsal=100)) == nothing_to_judge


PUBLISHED = {
    "readout": "direct",
    "positions": 32,
    "recent": 40,
    "top_k": 64,
    "lookahead": 0,
    "rehearsal": 0,
    "pooling": 1,
    "safeguard": 0.0,
}


def test_the_preset_paper_is_the_published_form() -> None:
    """What the paper describes, and what it leaves open as by default; nothing else moves."""
    paper, own = settled(BpkvConfig(preset="paper")), settled(BpkvConfig())
    changed = {name for name in BpkvConfig.model_fields if getattr(paper, name) != getattr(own, name)}
    assert {name: getattr(paper, name) for name in changed} == {**PUBLISHED, "preset": "paper"}
    assert paper.scope == own.scope == "global" and own.lookahead > 0 and own.readout == "exact"
    assert make_policy(paper, TRAITS).config == settled(paper) == paper


@pytest.mark.parametrize(
    "given",
    [
        {"lookahead": 8},
        {"rehearsal": 100, "safeguard": 0.5},
        {"readout": "exact", "probes": 4},
        {"positions": 6, "top_k": 32},
        {"pooling": 5, "safeguard": 0.25, "scope": "head"},
        {"readout": "exact", "lookahead": 32, "safeguard": 0.6},  # the general defaults, given
    ],
    ids=str,
)
def test_an_option_that_is_given_wins_over_the_preset(given: dict[str, object]) -> None:
    paper, config = settled(BpkvConfig(preset="paper")), settled(BpkvConfig(preset="paper", **given))
    for name in BpkvConfig.model_fields:
        assert getattr(config, name) == given.get(name, getattr(paper, name))


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name not in ("bpkv", "full", "ripplekv")])
def test_peers_have_one_form_and_look_ahead_where_that_is_given_and_changes_something(name: str) -> None:
    with pytest.raises(ConfigError, match=f"preset is paper, but the policy {name} has one form only"):
        settled(BpkvConfig(policy=name, preset="paper"))
    assert settled(BpkvConfig(policy=name)).lookahead == settled(BpkvConfig(policy=name, lookahead=0)).lookahead == 0
    if "last_queries" in policy_class(name).requires:
        assert settled(BpkvConfig(policy=name, lookahead=8)).lookahead == 8
    else:
        with pytest.raises(ConfigError, match=f"lookahead is 8, but the policy {name} does not score by the latest"):
            settled(BpkvConfig(policy=name, lookahead=8))
    assert settled(BpkvConfig(policy=name).replace(lookahead=0)).lookahead == 0


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name not in ("bpkv", "full")])
def test_peers_rehearse_nothing_and_say_so(name: str) -> None:
    """Nothing that is not asked for: a rehearsal is neither run for them nor left standing in their configuration."""
    assert settled(BpkvConfig(policy=name)).rehearsal == settled(BpkvConfig(policy=name, rehearsal=0)).rehearsal == 0
    with pytest.raises(ConfigError) as refusal:
        settled(BpkvConfig(policy=name, rehearsal=100))
    assert str(refusal.value).startswith(f"rehearsal is 100, which would change nothing: the policy {name} has no such")


GIVEN = {
    "readout": "exact",
    "probes": 4,
    "pooling": 5,
    "rehearsal": 100,
    "safeguard": 0.5,
    "epsilon": 0.02,
    "refine": 64,
}


@pytest.mark.parametrize("option", sorted(METHOD_OPTIONS))
@pytest.mark.parametrize("name", [name for name in BUILT_IN if name not in ("bpkv", "full")])
def test_a_peer_refuses_options_of_a_part_that_it_does_not_have(name: str, option: str) -> None:
    """Even at their defaults: who gives one expects it to matter."""
    with pytest.raises(ConfigError) as refusal:
        settled(BpkvConfig(policy=name, **{option: GIVEN[option]}))
    words = (f"{option} is {GIVEN[option]}", f"the policy {name} has no such part", f"bpkv[{option}={GIVEN[option]}]")
    assert all(word in str(refusal.value) for word in words)
    assert settled(BpkvConfig(**{option: GIVEN[option]})) == BpkvConfig(**{option: GIVEN[option]})


def test_the_paper_s_recent_window_holds_its_positions_and_a_deferral() -> None:
    config = settled(BpkvConfig(preset="paper", regime="deferred"))
    assert (config.recent, config.positions, config.replayed_positions) == (40, 32, 40)
    with pytest.raises(ConfigError, match="recent is 32 and positions is 32 and defer is 8"):
        settled(BpkvConfig(preset="paper", regime="deferred", recent=32))


IDLE: list[dict[str, object]] = [
    {"budget": "0.3", "regime": "generation"},
    {"generation_budget": "64t", "regime": "prefill"},
    {"interval": 16, "regime": "deferred"},
    {"defer": 4},
    {"defer": 4, "regime": "prefill,generation"},
    {"probes": 4, "readout": "direct"},
    {"probes": 4, "preset": "paper"},
    *({"policy": name, "positions": 4} for name in ("random", "streaming_llm", "h2o", "kvzip", "expected_attention")),
    *({"policy": name, "top_k": 4} for name in ("random", "streaming_llm", "h2o", "snapkv", "tova")),
]


@pytest.mark.parametrize("options", IDLE, ids=str)
def test_options_that_change_nothing_are_refused(options: dict[str, object]) -> None:
    config = BpkvConfig(**options)
    idle = [name for name in options if name not in ("policy", "regime", "readout", "preset")]
    with pytest.raises(ConfigError, match=f"{idle[0]} is .* changes nothing here: .* Leave it out"):
        refuse_idle(config.model_fields_set, [settled(config)])
    refuse_idle(config.model_fields_set, [settled(config), settled(BpkvConfig(regime="deferred,generation"))])
    refuse_idle(config.model_fields_set, [settled(BpkvConfig(**{**options, "policy": "full"}))])


@pytest.mark.parametrize(
    "options",
    [
        *({"policy": name} for name in BUILT_IN),
        {"preset": "paper"},
        {"interval": 16, "generation_budget": "64t"},
        {"policy": "deferkv", "defer": 2},
        {"policy": "inertiakv", "defer": 2, "interval": 4},
        {"policy": "snapkv", "positions": 4},
        {"positions": 4, "top_k": 8, "probes": 2},
    ],
    ids=str,
)
def test_what_is_used_or_was_not_given_is_not_idle(options: dict[str, object]) -> None:
    refuse_idle(options, [settled(BpkvConfig(**options))])
