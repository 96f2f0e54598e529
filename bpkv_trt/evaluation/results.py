"""The document of a comparison: made of finished samples, and read back to be continued."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from bpkv_trt.documents import SCHEMA_VERSION, library_versions, machine
from bpkv_trt.errors import InputError
from bpkv_trt.evaluation.comparison import Comparison
from bpkv_trt.evaluation.journal import KIND, Key, Record, check_header
from bpkv_trt.evaluation.mask_rows import mask_rows
from bpkv_trt.evaluation.provenance import commit
from bpkv_trt.evaluation.recorded import check_records
from bpkv_trt.evaluation.rows import rows_of


def result_document(comparison: Comparison, records: Iterable[Record]) -> dict[str, Any]:
    """The whole document; the order in which the samples were finished does not show."""
    arms = {(arm.contender, arm.regime, arm.budget): place for place, arm in enumerate(comparison.arms)}
    tasks = list(comparison.tasks)
    ordered = sorted(records, key=lambda record: (_place(tasks, record["task"]), record["seed"]))
    done = [record for record in ordered if "skipped" not in record]
    skipped = [record for record in ordered if "skipped" in record]
    cells = [cell for record in done for cell in record["cells"]]
    cells.sort(key=lambda cell: arms[cell["contender"], cell["regime"], cell["budget"]])
    cells.sort(key=lambda cell: _place(tasks, cell["task"]))  # stable: by task, arm, seed
    return {
        "schema_version": SCHEMA_VERSION,
        "kind": KIND,
        "settings": comparison.settings(),
        "tasks": tasks,
        "seeds": sorted({record["seed"] for record in ordered}),
        "contenders": list(comparison.contenders),
        "regimes": list(comparison.regimes),
        "budgets": list(comparison.budgets),
        "tokens": comparison.tokens,
        "horizon": comparison.horizon,
        "commit": commit(),
        "commits": sorted({record["commit"] for record in ordered if record.get("commit")}),
        "versions": library_versions(),
        "machine": machine(),
        "rows": rows_of(comparison.model, cells, skipped),
        "mask_study": mask_rows(done),
        "skipped": skipped,
        "samples": [{key: value for key, value in record.items() if key != "cells"} for record in done],
        "cells": cells,
    }


def _place(tasks: list[str], task: str) -> int:
    if task not in tasks:
        tasks.append(task)  # of an earlier run of the same settings
    return tasks.index(task)


def earlier_records(path: Path, settings: Mapping[str, Any], overwrite: bool) -> dict[Key, Record]:
    """The samples of a finished document, none where there is no file or it will be overwritten.

    Raises InputError where the file is no comparison of this schema with these settings.
    """
    if overwrite or not path.exists():
        return {}
    what, advice = f"The output {path}", "It was not touched: give --json another name, or --overwrite it."
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        raise InputError(f"{what} is there and is not a result of bpkv compare. {advice}") from None
    check_header(what, found, {"settings": settings}, advice)
    try:
        records = {(each["task"], each["seed"]): {**each, "cells": []} for each in found["samples"]}
        for cell in found["cells"]:
            records[cell["task"], cell["seed"]]["cells"].append(cell)
        records |= {(each["task"], each["seed"]): each for each in found["skipped"]}
    except (KeyError, TypeError):
        raise InputError(f"{what} lacks a part that such a result has. {advice}") from None
    try:
        check_records(records.values(), settings)
    except ValueError as problem:
        raise InputError(f"{what} is damaged: {problem}. {advice}") from None
    return records
