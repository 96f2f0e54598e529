"""What a journal says of a file that it cannot go on with."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bpkv_trt.errors import InputError
from bpkv_trt.evaluation.journal import Journal

SAMPLES = [{"task": "passkey", "seed": seed, "skipped": "too long"} for seed in range(3)]


def written(tmp_path: Path) -> tuple[Path, list[bytes]]:
    """A journal of three samples, and its lines: the header's first."""
    journal = Journal(tmp_path / "out.json", {"tokens": 500, "arms": []})
    for sample in SAMPLES:
        journal.append(sample)
    return journal.path, journal.path.read_bytes().splitlines(keepends=True)


@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda line: line[:1] + line[2:], "at column"),
        (lambda line: line[: len(line) // 2] + b"\n", "at column"),
        (lambda line: b"\n", "at column 1"),
        (lambda line: b'{"task": "\xff"}\n', "not a sample as JSON"),
    ],
    ids=["a quote less", "cut off", "empty", "no UTF-8"],
)
def test_a_damaged_line_is_named_by_its_number_in_the_file(
    tmp_path: Path, number: int, damage: Callable[[bytes], bytes], words: str
) -> None:
    path, lines = written(tmp_path)
    lines[number - 1] = damage(lines[number - 1])
    path.write_bytes(b"".join(lines))
    with pytest.raises(InputError, match=rf"cannot be read: line {number} is damaged \(.*{words}.*--overwrite"):
        Journal(tmp_path / "out.json", {"tokens": 500, "arms": []})
    assert path.read_bytes() == b"".join(lines)


@pytest.mark.parametrize("value", [{"task": "passkey"}, {}, [], 3, None], ids=str)
def test_a_line_that_is_no_sample_is_named_too(tmp_path: Path, value: object) -> None:
    path, lines = written(tmp_path)
    path.write_bytes(b"".join([*lines[:2], json.dumps(value).encode() + b"\n", lines[3]]))
    with pytest.raises(InputError, match="line 3 is damaged"):
        Journal(tmp_path / "out.json", {"tokens": 500, "arms": []})


@pytest.mark.parametrize("kept", range(5))
def test_whole_lines_are_read_and_a_cut_off_one_is_not(tmp_path: Path, kept: int) -> None:
    path, lines = written(tmp_path)
    cut = lines[kept][:-5] if kept < len(lines) else b""
    path.write_bytes(b"".join(lines[:kept]) + cut)
    journal = Journal(tmp_path / "out.json", {"tokens": 500, "arms": []})
    assert [*journal.records.values()] == SAMPLES[: max(0, kept - 1)]
    journal.append({"task": "vt", "seed": 9, "skipped": "too long"})
    again = Journal(tmp_path / "out.json", {"tokens": 500, "arms": []})
    assert [*again.records] == [*journal.records] and ("vt", 9) in again.records
