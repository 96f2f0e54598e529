"""Finished samples on disk while a comparison runs, so that a killed run continues where it was."""

import json
import os
from pathlib import Path
from typing import Any

from bpkv_trt.documents import SCHEMA_VERSION
from bpkv_trt.errors import InputError
from bpkv_trt.evaluation.recorded import check_records

KIND = "compare"
Record = dict[str, Any]  # JSON: of one finished or skipped sample
Key = tuple[str, int]  # task and seed


class Journal:
    """One JSON line per finished sample behind a header line; a last line that was cut off counts as not written."""

    def __init__(self, output: Path, settings: dict[str, Any], overwrite: bool = False) -> None:
        """The journal of a document that will be `output`. Raises InputError, with the file untouched, where one is
        there that other settings, another schema or something else wrote; with `overwrite` it gives way to the first
        sample.
        """
        self.path = output.with_name(output.name + ".partial.jsonl")
        self.header: dict[str, Any] = {"kind": KIND, "schema_version": SCHEMA_VERSION, "settings": settings}
        self.records: dict[Key, Record] = {}
        self._size = 0  # bytes that are known to be whole
        if self.path.exists():
            try:
                self._read()
            except InputError:
                if not overwrite:
                    raise

    def append(self, record: Record) -> None:
        """Add a sample and see it through to the disk."""
        lines = [record] if self._size else [self.header, record]
        data = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
        try:
            with self.path.open("r+b" if self._size else "wb") as file:
                file.seek(self._size)
                file.truncate()
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise InputError(
                f"The finished samples in {self.path} cannot be added to ({error.strerror}); free space, then run the "
                "same command again: it continues."
            ) from None
        self._size += len(data)
        self.records[record["task"], record["seed"]] = record

    def remove(self) -> None:
        """The document is written; what led to it may go."""
        self.path.unlink(missing_ok=True)

    def _read(self) -> None:
        try:
            whole, _, _ = self.path.read_bytes().rpartition(b"\n")
        except OSError as error:
            raise InputError(f"{self._refusal()} cannot be read ({error.strerror}). {self._advice()}") from None
        lines = [self._parsed(*each) for each in enumerate(whole.split(b"\n"), start=1)] if whole else []
        if lines:
            check_header(self._refusal(), lines[0], self.header, self._advice())
            try:
                check_records(lines[1:], self.header["settings"])
            except ValueError as problem:
                raise InputError(f"{self._refusal()} is damaged: {problem}. {self._advice()}") from None
        self.records = {(record["task"], record["seed"]): record for record in lines[1:]}
        self._size = len(whole) + 1 if lines else 0

    def _parsed(self, number: int, line: bytes) -> Any:
        try:
            value = json.loads(line)
            if number == 1 or {"task", "seed"} <= value.keys():
                return value
            reason = "it has no task and seed"
        except json.JSONDecodeError as error:
            reason = f"{error.msg} at column {error.colno}"
        except (ValueError, AttributeError, RecursionError):
            reason = "it is not a sample as JSON"
        raise InputError(f"{self._refusal()} cannot be read: line {number} is damaged ({reason}). {self._advice()}")

    def _refusal(self) -> str:
        return f"The file {self.path}, where finished samples would be kept,"

    def _advice(self) -> str:
        return "Nothing was run and the file is as it was: give --json another name, or --overwrite it."


def check_header(what: str, found: Any, expected: dict[str, Any], advice: str) -> None:
    """Raise InputError where a file is not a comparison of this schema with these settings, telling what differs."""
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise InputError(f"{what} is not a result of bpkv compare. {advice}")
    if found.get("schema_version") != SCHEMA_VERSION:
        raise InputError(
            f"{what} has schema version {found.get('schema_version')}, and this is {SCHEMA_VERSION}. {advice}"
        )
    try:
        differences = _differences(found.get("settings"), json.loads(json.dumps(expected["settings"])))
    except (KeyError, TypeError, ValueError):  # arms that are none
        raise InputError(f"{what} has damaged settings. {advice}") from None
    if differences:
        raise InputError(f"{what} was made with other settings: {'; '.join(differences[:4])}. {advice}")


def _differences(found: Any, asked: Any, name: str = "") -> list[str]:
    """What is not the same in two JSON values, by the innermost name."""
    if isinstance(found, dict) and isinstance(asked, dict):
        keys = dict.fromkeys((*found, *asked))
        return [each for key in keys for each in _differences(found.get(key), asked.get(key), str(key))]
    if name == "arms" and isinstance(found, list) and isinstance(asked, list):
        return _arm_differences(found, asked)
    return [] if found == asked else [f"{name} was {found!s:.100} and is now {asked!s:.100}"]


def _arm_differences(found: list[Any], asked: list[Any]) -> list[str]:
    for part in ("contender", "regime", "budget"):
        sides = [list(dict.fromkeys(arm[part] for arm in side)) for side in (found, asked)]
        if sides[0] != sides[1]:
            return [f"the {part}s were {', '.join(sides[0])} and are now {', '.join(sides[1])}"]
    changed = [
        f"{each} (contender {arm['contender']})"
        for before, arm in zip(found, asked, strict=True)
        for each in _differences(before["config"], arm["config"])
    ]
    return list(dict.fromkeys(changed))
