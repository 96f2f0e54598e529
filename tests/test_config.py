"""One validated configuration: what is refused, in which words, and that a file reads back to itself."""

from pathlib import Path

import pytest

from bpkv_trt.config import BpkvConfig
from bpkv_trt.errors import ConfigError


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
        ({"regime": "prefil"}, ["regime", "'prefil'", "prefill, deferred, generation"]),
        ({"regime": ""}, ["regime", "prefill, deferred, generation"]),
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
        ({"bugdet": "0.2"}, ["bugdet is not an option", "budget"]),
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


@pytest.mark.parametrize("content", [b"- 1\n", b"a: [", b"\xff\xfe", b"budget: -1\n", b"1: 2\n"])
def test_an_unusable_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"broken\.yaml") as refusal:
        BpkvConfig.from_yaml(path)
    assert "\n" not in str(refusal.value)
    with pytest.raises(ConfigError, match=r"absent\.yaml"):
        BpkvConfig.from_yaml(tmp_path / "absent.yaml")
