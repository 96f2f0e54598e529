"""docs/serving.md names what there is, and nothing else."""

import re

from bpkv_trt.model_repository import template
from bpkv_trt.model_repository_command import LIMITS
from bpkv_trt.runtime.serving_metrics import COUNTERS, GAUGES, HISTOGRAMS, OUTCOMES, REQUESTS
from bpkv_trt.runtime.triton_request import NAMES
from tests.serving.triton_server import ROOT

PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")


def first_column(heading: str) -> list[str]:
    """The names in backticks that begin the rows of the table under a heading."""
    table = PAGE.partition(f"| {heading} |")[2].partition("\n\n")[0]
    return [
        name for row in re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE) for name in re.findall(r"`([^`]+)`", row)
    ]


def test_inputs_and_outputs() -> None:
    assert sorted(first_column("input")) == sorted(NAMES)
    outputs = (template() / "config.pbtxt").read_text().split("\noutput [")[1]
    assert first_column("output") == re.findall(r'name: "(\w+)"', outputs)


def test_metrics() -> None:
    documented = first_column("family")
    assert sorted(documented) == sorted([REQUESTS, "bpkv_heartbeat_seconds", *COUNTERS, *GAUGES, *HISTOGRAMS])
    assert f"`outcome`: {', '.join(OUTCOMES)}" in PAGE


def test_limits() -> None:
    assert {"--" + name.replace("_", "-") for name in LIMITS} <= set(first_column("option"))
