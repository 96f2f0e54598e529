"""How contenders are written, and which configurations they become."""

import pytest

from bpkv_trt.config import BpkvConfig
from bpkv_trt.errors import ConfigError
from bpkv_trt.evaluation.arm import arms_of, refuse_idle_options
from bpkv_trt.evaluation.contender import parse_contenders


def test_commas_in_brackets_do_not_separate() -> None:
    found = parse_contenders("bpkv, bpkv[readout=direct,refine=0],snapkv[scope=global]")
    assert [each.label for each in found] == ["bpkv", "bpkv[readout=direct,refine=0]", "snapkv[scope=global]"]
    assert [each.policy for each in found] == ["bpkv", "bpkv", "snapkv"]
    assert dict(found[1].options) == {"readout": "direct", "refine": "0"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("bpkv,bpkv", ["bpkv", "more than once"]),
        ("bpkv[refine]", ["refine", "bpkv[readout=direct,refine=0]"]),
        ("bpkv[refine=1", ["bpkv[refine=1"]),
        ("bpkv[refine=1,refine=2]", ["refine=2"]),
        ("bpkv,,snapkv", ["''"]),
        ("bpkv[budgett=1]", ["budgett", "choose from", "readout"]),
        *((f"bpkv[{name}=1]", [name, "same for all"]) for name in ("policy", "budget", "regime", "page_size")),
    ],
)
def test_what_is_refused(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        parse_contenders(text)
    assert all(word in str(error.value) for word in words), error.value


def test_every_contender_in_every_regime_at_every_budget() -> None:
    common = BpkvConfig(positions=4, defer=6)
    contenders = parse_contenders("bpkv[refine=3],snapkv")
    arms = arms_of(contenders, common, ["prefill", "deferred"], ["0.5", "64t"])
    assert [(arm.contender, arm.regime, arm.budget) for arm in arms] == [
        (label, regime, budget)
        for label in ("bpkv[refine=3]", "snapkv")
        for regime in ("prefill", "deferred")
        for budget in ("0.5", "64t")
    ]
    assert all((arm.config.positions, arm.config.defer) == (4, 6) for arm in arms)
    assert [arm.config.refine for arm in arms] == [3] * 4 + [64] * 4
    assert [arm.config.scope for arm in arms] == ["global"] * 4 + ["head"] * 4
    assert [str(arm.config.budget) for arm in arms] == [arm.budget for arm in arms]


def test_the_budget_of_an_answer_is_in_tokens() -> None:
    (arm,) = arms_of(parse_contenders("bpkv"), BpkvConfig(), ["generation"], ["48t"])
    assert str(arm.config.generation_budget) == "48t"
    with pytest.raises(ConfigError, match="64t"):
        arms_of(parse_contenders("bpkv"), BpkvConfig(), ["generation"], ["0.2"])


def test_samples_seed_what_is_random_unless_it_was_given() -> None:
    given, own = arms_of(parse_contenders("random[seed=5],random"), BpkvConfig(), ["prefill"], ["0.2"])
    assert (given.seeded(1003).seed, own.seeded(1003).seed) == (5, 1003)


@pytest.mark.parametrize(
    ("contender", "regimes", "words"),
    [
        ("snapkw", ["prefill"], ["snapkw", "snapkv"]),
        ("deferkv", ["prefill"], ["deferkv", "prefill"]),
        ("bpkv[refine=x]", ["prefill"], ["bpkv[refine=x]", "refine"]),
        ("bpkv", ["prefill", "prefill"], ["prefill", "more than once"]),
        ("bpkv", ["prefill,generation", "generation, prefill"], ["prefill,generation", "more than once"]),
        ("bpkv", ["decode"], ["decode", "deferred"]),
        ("bpkv[refine=0],bpkv[refine=00]", ["prefill"], ["bpkv[refine=0] and bpkv[refine=00]", "same"]),
        ("bpkv,bpkv[refine=64]", ["prefill"], ["bpkv and bpkv[refine=64]", "same"]),
        ("snapkv[safeguard=0.5]", ["prefill"], ["safeguard"]),
        ("expected_attention[sinks=2]", ["prefill"], ["expected_attention", "--sinks"]),
    ],
)
def test_contenders_that_cannot_be(contender: str, regimes: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        arms_of(parse_contenders(contender), BpkvConfig(), regimes, ["0.2"])
    assert all(word in str(error.value) for word in words), error.value


def test_an_option_is_idle_only_where_no_regime_uses_it() -> None:
    def check(policies: str, regimes: list[str], **common: object) -> None:
        given, contenders = BpkvConfig(**common), parse_contenders(policies)
        refuse_idle_options(contenders, given, arms_of(contenders, given, regimes, ["0.5"]))

    check("bpkv,random", ["prefill", "deferred"], defer=4, positions=4)
    check("bpkv,full", ["prefill,generation"], interval=4, generation_budget="64t")
    check("bpkv[defer=3]", ["prefill", "deferred"])
    check("full", ["prefill"], interval=4)
    for policies, words, common in [
        ("bpkv", "defer is 4", {"defer": 4}),
        ("snapkv,random", "interval is 4", {"interval": 4}),
        ("random,h2o", "positions is 4", {"positions": 4}),
        ("bpkv,bpkv[interval=4]", r"In the contender bpkv\[interval=4\]: interval is 4", {}),
        ("bpkv,random[top_k=4]", r"In the contender random\[top_k=4\]: top_k is 4", {}),
    ]:
        with pytest.raises(ConfigError, match=words):
            check(policies, ["prefill"], **common)


SAME = [["1", "1"], ["0.5", "50%"], ["64t", "64.0t"], ["1MiB", "1024KiB"], ["0.5", "0.50"]]


@pytest.mark.parametrize("budgets", SAME)
def test_one_budget_written_in_two_ways_is_given_twice(budgets: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"budgets has {budgets[0]} and {budgets[1]}, which are the same"):
        arms_of(parse_contenders("bpkv"), BpkvConfig(), ["prefill"], budgets)
