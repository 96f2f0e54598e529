"""The folder that a profiling session leaves: what was run, on what, and what came of it."""

import json
from pathlib import Path
from typing import Any

from bpkv_trt.documents import LARGEST_DOCUMENT, check_directory, write_json, write_whole
from bpkv_trt.errors import InputError
from bpkv_trt.input_file import read_file
from bpkv_trt.latency.answer_table import ANSWERS
from bpkv_trt.latency.budget_table import BudgetTable, Row
from bpkv_trt.latency.load_table import LOADS
from bpkv_trt.latency.profile import Measured

TABLES: dict[Measured, BudgetTable] = {"answers": ANSWERS, "loads": LOADS}


class ResultsFolder:
    """Names of its files, and how they are written and read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.environment = path / "environment.json"
        self.profile = path / "profile.yaml"
        self.runs = path / "runs.json"
        self.trace = path / "trace.json"
        self.nsys_report = path / "trace.nsys-rep"
        self.nsys_database = path / "trace.sqlite"
        self.nsys_log = path / "nsys.log"
        self.report = path / "report.json"
        self.report_text = path / "report.txt"

    @property
    def session(self) -> tuple[Path, ...]:
        """What a session left, of which the report is made."""
        return self.environment, self.profile, self.runs, self.trace, self.nsys_report, self.nsys_database

    def check_new(self) -> None:
        """Raise InputError where results could not be written, or others are there."""
        check_directory(self.path)
        if self.path.is_dir() and any(self.path.iterdir()):
            raise InputError(f"The folder {self.path} is not empty, and is left as it is; give --output another name.")

    def write(self, file: Path, content: dict[str, Any] | str) -> None:
        """One of the files, a document or text; raises InputError where the disk refuses it."""
        self.path.mkdir(exist_ok=True)
        if isinstance(content, dict):
            write_json(file, content)
            return
        try:
            write_whole(file, content.encode())
        except OSError as error:
            raise InputError(f"The output {file} cannot be written ({error.strerror}); free space.") from None

    def read_runs(self) -> tuple[Measured, list[Row]]:
        """What was measured, and a row for every run; raises InputError where they are damaged."""
        content = read_file(self.runs, LARGEST_DOCUMENT, "runs", "bpkv profile report")
        try:
            document = json.loads(content)
            measured, runs = document["measured"], document["runs"]
            whole = TABLES[measured].are_whole(runs)
        except (ValueError, RecursionError, TypeError, KeyError, AttributeError):
            whole = False
        if not whole:
            raise InputError(f"The file {self.runs} is damaged: it is not what a session writes. Run it again.")
        return measured, runs
