"""The tables of a comparison's results, as Markdown: python profiles/quality/tables.py RESULT.json [CONTENDER]

Future KL of the contender (default bpkv) over that of each other one, geometric mean over samples with its 95 %
interval, and the answers that are right of those that the full cache gets right.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def table(rows: list[Row], contender: str) -> str:
    """One table for every regime and budget of rows."""
    cases = dict.fromkeys((row["regime"], row["budget"]) for row in rows)
    return "\n\n".join(
        _case([row for row in rows if (row["regime"], row["budget"]) == case], case, contender) for case in cases
    )


def _case(rows: list[Row], case: tuple[str, str], contender: str) -> str:
    own = {row["task"]: row for row in rows if row["contender"] == contender}
    ratios = {task: {pair["against"]: pair for pair in row["paired"]} for task, row in own.items()}
    names = list(dict.fromkeys(row["contender"] for row in rows))
    shares = {(row["task"], row["contender"]): _share(row) for row in rows}
    tasks = [f"{task} ({row['samples']} samples)" for task, row in own.items()]
    answered = {task: row["answers"] for task, row in own.items() if row["answers"]}
    lines = [f"{case[0]}, budget {case[1]}", "", *_head([f"{contender} over", *tasks])]
    lines += [_line([name, *(_ratio(ratios[task].get(name)) for task in own)]) for name in names if name != contender]
    if answered:
        lines += ["", *_head(["right", *(f"{task} ({answers} answers)" for task, answers in answered.items())])]
        lines += [_line([name, *(shares[task, name] for task in answered)]) for name in names]
    return "\n".join(lines)


def _head(cells: list[str]) -> list[str]:
    return [_line(cells), "|" + "---|" * len(cells)]


def _ratio(pair: Row | None) -> str:
    if pair is None:
        return ""
    if pair["low"] is None:  # one sample
        return "{:.2g}".format(*_exp(pair["log_ratio"]))
    return "{:.2g} ({:.2g} to {:.2g})".format(*_exp(pair["log_ratio"], pair["low"], pair["high"]))


def _exp(*logs: float) -> list[float]:
    return [math.exp(each) for each in logs]


def _share(row: Row) -> str:
    found = [row[f"accuracy_over_full{end}"] for end in ("", "_low", "_high")]
    return "" if None in found else "{:.0%} ({:.0%} to {:.0%})".format(*found)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text())["rows"], sys.argv[2] if len(sys.argv) > 2 else "bpkv"))
