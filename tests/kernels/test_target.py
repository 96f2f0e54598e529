"""Which kernels a GPU runs, by the cases that hold the plugin's own rule."""

import re
from itertools import permutations
from pathlib import Path

import pytest

from bpkv_trt.kernels.aot import TARGETS
from bpkv_trt.kernels.target import Target, choose_target

PLUGINS_TESTS = Path(__file__).resolve().parents[2] / "plugins" / "tests" / "target_test.cpp"


def test_the_target_of_a_gpu_is_the_plugins() -> None:
    source = PLUGINS_TESTS.read_text()
    table = re.findall(r'\{\{(\d+), (\d+)\}, "(\w+)"\}', source)
    assert len(table) == 11 and {target for *_, target in table} == {*TARGETS, "none"}
    for major, minor, target in table:
        for targets in (list(TARGETS), list(reversed(TARGETS))):
            assert (choose_target(targets, (int(major), int(minor))) or "none") == target
    cases = re.findall(r'choice\(\{((?:"\w+"(?:, )?)+)\}, \{(\d+), (\d+)\}\), "(\w+)"\)', source)
    assert len(cases) == 5
    for names, major, minor, target in cases:
        for targets in permutations(re.findall(r"\w+", names)):
            assert (choose_target(targets, (int(major), int(minor))) or "none") == target


def test_targets_are_named_as_in_the_plugin() -> None:
    source = PLUGINS_TESTS.read_text()
    names = re.search(r'const name : \{((?:"\w+"(?:, )?)+)\}\)', source)
    others = re.search(r'const\* name : \{((?:"[^"]*"(?:, )?)+)\}\)', source)
    assert names is not None and others is not None
    for name in re.findall(r"\w+", names[1]):
        target = Target.parse(name)
        assert f"{target.major}{target.minor}{'a' * target.exact}" == name
    refused = re.findall(r'"([^"]*)"', others[1])
    assert len(refused) == 11
    for name in refused:
        with pytest.raises(ValueError, match="names no target"):
            Target.parse(name)
