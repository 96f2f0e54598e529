"""A report is written beside what it is made of, and never over it."""

import json
from pathlib import Path

import pytest

from bpkv_trt.cli import main
from bpkv_trt.latency.results_folder import ResultsFolder


@pytest.mark.parametrize("name", ["runs.json", "trace.json", "environment.json"])
def test_a_report_never_overwrites_what_a_session_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    content = json.dumps({"schema_version": 1})
    for file in ResultsFolder(tmp_path).session:
        file.write_text(content)
    assert main(["profile", "report", str(tmp_path), "--json", str(tmp_path / name)]) == 2
    assert "overwrite" in capsys.readouterr().err
    assert (tmp_path / name).read_text() == content
