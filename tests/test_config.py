"""One validated configuration: what is refused, in which words, and that a file reads back to itself."""

from itertools import pairwise
from pathlib import Path

import pytest

from bpkv_trt.config import BpkvConfig
from bpkv_trt.errors import ConfigError
from bpkv_trt.policies.registry import settled


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget": "0"}, ["budget is '0'", "64MiB"]),
        ({"budget": 2}, ["budget is '2'", "2t"]),
        ({"budget": float("nan")}, ["budget is 'nan'"]),
        ({"budget": True}, ["budget is True"]),
        ({"budget": "35t"}, ["35t", "36t", "sinks + recent"]),
        ({"generation_budget": "0.5"}, ["generation_budget is 0.5", "512t"]),
        ({"generation_budget": "31t"}, ["generation_budget is 31t", "32t"]),
        ({"budget": "64mib"}, ["budget is '64mib'", "letter case", "did you mean 64MiB"]),
        ({"budget": "1Kb"}, ["did you mean 1kB"]),
        ({"budget": "64T"}, ["did you mean 64t"]),
        ({"budget": "0.5T"}, ["tokens per head are whole"]),
        ({"regime": "prefil"}, ["regime", "'prefil'", "prefill, deferred, generation"]),
        ({"regime": ""}, ["regime", "prefill, deferred, generation"]),
        ({"regime": ","}, ["regime is ','", "nothing where a name should be"]),
        ({"regime": [["prefill"]]}, ["['prefill'] is not a regime"]),
        ({"regime": []}, ["regime", "prefill, deferred, generation"]),
        ({"regime": 3}, ["regime is 3"]),
        ({"regime": "prefill,deferred"}, ["prefill and deferred", "choose one"]),
        ({"scope": "heads"}, ["scope is 'heads'", "'head', 'layer' or 'global'"]),
        ({"readout": "fisher"}, ["readout is 'fisher'", "'direct' or 'exact'"]),
        ({"recent": 7}, ["recent is 7", "positions is 8", "recent >= 8"]),
        ({"recent": 0}, ["recent is 0", "greater than or equal to 1"]),
        ({"sinks": -1}, ["sinks is -1"]),
        ({"positions": "many"}, ["positions is 'many'", "integer"]),
        ({"epsilon": 0}, ["epsilon is 0"]),
        ({"epsilon": 1.0}, ["epsilon is 1.0"]),
        ({"epsilon": float("nan")}, ["epsilon is nan", "finite"]),
        ({"page_size": 0}, ["page_size is 0"]),
        ({"seed": -1}, ["seed is -1"]),
        ({"bugdet": "0.2"}, ["bugdet is not an option", "did you mean budget"]),
        ({"sinks": -1, "top_k": 1}, ["sinks is -1", "top_k is 1"]),
    ],
)
def test_refusals_name_the_option_its_value_and_what_is_allowed(options: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        BpkvConfig(**options)
    message = str(refusal.value)
    assert "\n" not in message and "pydantic" not in message
    assert all(word in message for word in words), message


def test_regimes_have_one_order() -> None:
    for given in ("generation,prefill", " prefill , generation", ["generation", "prefill", "prefill"]):
        assert BpkvConfig(regime=given).regime == ("prefill", "generation")


def test_it_cannot_be_changed_but_replaced() -> None:
    config = BpkvConfig()
    with pytest.raises(ConfigError, match="recent is 2 "):
        config.replace(recent=2)
    assert config.replace(budget="0.5").budget.amount * 2 == 1
    assert config == BpkvConfig(), "the original is untouched"


def test_a_file_reads_back_to_itself_and_the_command_line_wins(tmp_path: Path) -> None:
    config = BpkvConfig(budget="64MiB", regime="deferred", epsilon=0.1, layer_table="table.json", scope="layer")
    path = tmp_path / "bpkv.yaml"
    path.write_text(config.to_yaml())
    assert BpkvConfig.from_yaml(path) == config
    assert BpkvConfig.from_yaml(path, scope="head") == config.replace(scope="head")


def test_an_unquoted_number_in_a_file_is_a_budget_and_an_empty_file_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "bpkv.yaml"
    path.write_text("budget: 0.29\n")
    assert str(BpkvConfig.from_yaml(path).budget) == "0.29"
    path.write_text("# nothing\n")
    assert BpkvConfig.from_yaml(path) == BpkvConfig()


NESTED = "\n".join(f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]" for before, name in pairwise("abcdefgh"))
BOMB = f"a: &a [x, x]\n{NESTED}\nbudget: *h\n".encode()
NUMBERS = ["1_0", "1:30", "010", "0x10", "0b11", "1_0.5", "1:30.5", "1" * 5000, "2024-02-31"]


@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_that_yaml_reads_otherwise_than_people_are_refused(tmp_path: Path, number: str) -> None:
    path = tmp_path / "bpkv.yaml"
    for option in ("recent", "epsilon", "budget"):
        path.write_text(f"{option}: {number}\n")
        with pytest.raises(ConfigError, match=r"bpkv\.yaml") as refusal:
            BpkvConfig.from_yaml(path)
        assert len(str(refusal.value)) < 1000


@pytest.mark.parametrize(("number", "value"), [("0.25", 0.25), (".25", 0.25), ("2.5e-1", 0.25), ("+0.25", 0.25)])
def test_plain_numbers_are_taken(tmp_path: Path, number: str, value: float) -> None:
    (tmp_path / "bpkv.yaml").write_text(f"epsilon: {number}\nrecent: 40\n")
    config = BpkvConfig.from_yaml(tmp_path / "bpkv.yaml")
    assert (config.epsilon, config.recent) == (value, 40)


@pytest.mark.parametrize("option", ["budget", "regime", "recent", "scope", "policy", "readout", "x"])
@pytest.mark.parametrize("value", ["y" * 10**5, "[" * 10**6, "- " * 20_000, f"[{'z, ' * 500}]", "!!bool x"])
def test_whatever_a_file_holds_the_refusal_is_short(tmp_path: Path, option: str, value: str) -> None:
    path = tmp_path / "bpkv.yaml"
    for text in (f"{option}: {value}\n", f"{value}: {option}\n", f"{option}:\n {value}"):
        path.write_text(text)
        with pytest.raises(ConfigError) as refusal:
            settled(BpkvConfig.from_yaml(path))
        assert len(str(refusal.value)) < 1000 and "\n" not in str(refusal.value)


@pytest.mark.parametrize("given", ["page-size", "Page_Size", "pagesize", "page_sizes"])
def test_an_option_that_is_nearly_one_is_told_which(given: str) -> None:
    with pytest.raises(ConfigError, match=f"{given} is not an option; did you mean page_size"):
        BpkvConfig(**{given: 3})


@pytest.mark.parametrize(
    "content", [BOMB, b"- 1\n", b"a: [", b"\xff\xfe", b"budget: -1\n", b"1: 2\n", b"refine: 0\nrefine: 0\n"]
)
def test_an_unusable_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"broken\.yaml") as refusal:
        BpkvConfig.from_yaml(path)
    assert "\n" not in str(refusal.value)
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        BpkvConfig.from_yaml(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pooling": 4}, ["pooling is 4", "odd"]),
        ({"pooling": 0}, ["pooling is 0"]),
        ({"pooling": 65}, ["pooling is 65"]),
        ({"lookahead": -1}, ["lookahead is -1"]),
        ({"lookahead": 513}, ["lookahead is 513"]),
        ({"rehearsal": -1}, ["rehearsal is -1"]),
        ({"safeguard": 1.5}, ["safeguard is 1.5"]),
        ({"refine": 10**8}, ["refine is 100000000"]),
        ({"probes": 10**6}, ["probes is 1000000"]),
        ({"top_k": 10**6}, ["top_k is 1000000"]),
        ({"lookahead": True}, ["lookahead is True", "no option is a switch"]),
        ({"rehearsal": 10, "safeguard": 0}, ["rehearsal is 10 and safeguard is 0", "leave rehearsal out"]),
        ({"rehearsal": 10, "regime": "generation"}, ["rehearsal is 10 and regime is generation", "deferred"]),
        ({"lookahead": 10, "regime": "generation"}, ["lookahead is 10 and regime is generation", "deferred"]),
        ({"preset": "published"}, ["preset is 'published'", "'default' or 'paper'"]),
    ],
)
def test_what_bpkv_alone_has_is_refused_in_the_same_way(options: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        BpkvConfig(**options)
    assert all(word in str(refusal.value) for word in words), str(refusal.value)


@pytest.mark.parametrize(
    ("regime", "scoring", "replayed"),
    [
        ("prefill", 8, 13),
        ("prefill,generation", 8, 13),
        ("deferred", 11, 21),
        ("deferred,generation", 11, 21),
        ("generation", 8, 8),
    ],
)
def test_what_is_run_again_counts_what_is_drafted(regime: str, scoring: int, replayed: int) -> None:
    """An answer's compaction does not look ahead, and a deferred one may follow an earlier draft."""
    drafts = {} if regime == "generation" else {"lookahead": 5}
    config = BpkvConfig(regime=regime, positions=8, defer=3, **drafts)
    assert (config.scoring_positions, config.replayed_positions) == (scoring, replayed)
    assert config.drafted == replayed - scoring
    assert BpkvConfig(lookahead=1).drafted == 1 and BpkvConfig(lookahead=0).drafted == 0


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"preset": "paper"},
        {"preset": "paper", "lookahead": 8, "readout": "exact"},
        {"policy": "snapkv"},
        {"policy": "snapkv", "lookahead": 8},
        {"policy": "deferkv", "budget": "64MiB"},
        {"policy": "full", "pooling": 7},
        {"regime": "deferred", "pooling": 1, "probes": 4, "safeguard": 0},
    ],
    ids=str,
)
def test_a_file_settles_as_what_it_was_written_from(tmp_path: Path, options: dict[str, object]) -> None:
    """What was not given is not written as if it had been: a policy or a preset may settle it."""
    config, path = BpkvConfig(**options), tmp_path / "bpkv.yaml"
    for written in (config, settled(config)):
        path.write_text(written.to_yaml())
        read = BpkvConfig.from_yaml(path)
        assert read == written and read.model_fields_set == written.model_fields_set
        assert settled(read) == settled(config) == settled(settled(config))


@pytest.mark.parametrize(("positions", "probes"), [(1, 64), (8, 8), (40, 1), (63, 1), (72, 1)])
def test_probes_are_dealt_over_the_positions_unless_given(positions: int, probes: int) -> None:
    assert BpkvConfig().probes_at(positions) == probes
    assert BpkvConfig(probes=3).probes_at(positions) == 3


def test_neighbours_are_averaged_where_nothing_was_rehearsed_unless_given() -> None:
    assert BpkvConfig().pooled_rows(rehearsed=False) == 5 and BpkvConfig().pooled_rows(rehearsed=True) == 1
    for given in (1, 3):
        assert BpkvConfig(pooling=given).pooled_rows(True) == BpkvConfig(pooling=given).pooled_rows(False) == given
