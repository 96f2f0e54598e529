"""docs/serving.md names what there is, and nothing else."""

import argparse
import re

from bpkv_trt.model_repository import template
from bpkv_trt.model_repository_command import LIMITS
from bpkv_trt.openai_front.asked import ChatAsked, CompletionAsked
from bpkv_trt.openai_front_command import add_openai_front
from bpkv_trt.runtime.serving_metrics import COUNTERS, GAUGES, HISTOGRAMS, OUTCOMES, REQUESTS
from bpkv_trt.runtime.triton_request import NAMES
from tests.serving.triton_server import ROOT

PAGE = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")


def first_column(heading: str, number: int = 1) -> list[str]:
    """The names in backticks that begin the rows of a table: of those with such a heading, the one so numbered."""
    table = PAGE.split(f"| {heading} |")[number].partition("\n\n")[0]
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


def test_fields_of_the_fronts_endpoints() -> None:
    completions, chats = CompletionAsked.model_fields.keys(), ChatAsked.model_fields.keys()
    table = PAGE.split("| field | endpoint |")[1].partition("\n\n")[0]
    documented: dict[str, list[str]] = {"both": [], "completions": [], "chats": []}
    for names, endpoint in re.findall(r"^\| (`[^|]*) \| ([^|]*) \|", table, re.MULTILINE):
        documented[endpoint] += [name.partition(".")[0] for name in re.findall(r"`([^`]+)`", names)]
    assert sorted(documented["both"]) == sorted(completions & chats)
    assert sorted(documented["completions"]) == sorted(completions - chats)
    assert sorted(documented["chats"]) == sorted(chats - completions)


def test_options_of_the_front() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    add_openai_front(parser)
    assert sorted(first_column("option", 2)) == sorted(re.findall(r"--[a-z-]+", parser.format_usage()))
