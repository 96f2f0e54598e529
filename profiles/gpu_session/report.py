"""Everything that a session found, as tables for people."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from profiles.gpu_session.floors import Ceilings, Work
from profiles.gpu_session.part import Record
from profiles.gpu_session.targets import ceilings_of

Parts = dict[str, dict[str, Any]]
SHOWN_PROBLEMS = 12  # lines of a process that failed


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Lines of a markdown table."""
    return ["", "| " + " | ".join(head) + " |", "|" + "---|" * len(head)] + [
        "| " + " | ".join(map(str, row)) + " |" for row in rows
    ]


def with_floors(times: list[Record], ceilings: Ceilings | None) -> list[Record]:
    """Each time with its floor, what binds it, and what share of that ceiling was reached."""
    if ceilings is None:
        return times
    complete = []
    for record in times:
        work = Work(record["flops"], record["bytes"])
        floor = ceilings.floor_ms(work)
        complete.append(record | {"floor_ms": floor, "binds": ceilings.binds(work), "reached": floor / record["ms"]})
    return complete


def problems(parts: Parts) -> list[str]:
    """Parts that did not run to their end, and what their processes last said."""
    lines = []
    for name, part in parts.items():
        if part["skipped"]:
            lines.append(f"{name}: not run: {part['skipped']}")
        for problem in part["problems"]:
            first, *rest = problem.splitlines()
            lines += [f"{name}: {first}", *("    " + line for line in rest[-SHOWN_PROBLEMS:])]
    return lines


def checks(records: list[Record]) -> list[str]:
    """The largest error of every check over all its cases, and whatever failed."""
    by_check: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        by_check[record["check"]].append(record)
    rows = []
    for name, group in by_check.items():
        worst = max(group, key=lambda each: each["error"] / max(each["tolerance"], 1e-300))
        runs = sum(each.get("repeats", 1) for each in group)
        verdict = "passed" if all(each["passed"] for each in group) else "FAILED"
        rows.append((name, runs, f"{worst['error']:.1e}", f"{worst['tolerance']:.1e}", verdict, worst["case"]))
    failed = [f"FAILED {each['check']}: {each['error']:.2e} > {each['tolerance']:.1e}; {each['case']}"
              for each in records if not each["passed"]]  # fmt: skip
    return table(("check", "runs", "largest error", "allowed", "", "in the case"), rows) + failed


def kernel_times(times: list[Record]) -> list[str]:
    """A row for every kernel of a model, a column for every length: time, floor (what binds), share of the ceiling."""
    lengths = sorted({record["tokens"] for record in times})
    rows: dict[tuple[str, str, int], dict[int, str]] = defaultdict(dict)
    for record in times:
        cell = f"{record['ms']:.3g}"
        if "floor_ms" in record:
            cell += f" / {record['floor_ms']:.3g} {record['binds'][0]} {record['reached']:.0%}"
        rows[record["model"], record["kernel"], record["batch"]][record["tokens"]] = cell
    body = [(*key, *(cells.get(length, "") for length in lengths)) for key, cells in rows.items()]
    return table(("model", "kernel", "batch", *(f"{length} tokens" for length in lengths)), body)


def hosts(records: list[Record]) -> list[str]:
    """Seconds of the host's stages, and how far its pools agree."""
    timed = [each for each in records if "prefill_s" in each]
    rows = [
        (
            each["pool"], each["tokens"], each["sequences"], f"{each['prefill_s']:.3f}",
            ", ".join(f"{stage} {seconds:.3f}" for stage, seconds in each["compaction_s"].items()),
            f"{1e3 * each['decode_full_s']:.2f}", f"{1e3 * each['decode_kept_s']:.2f}", f"{each['kept']:.3f}",
        )
        for each in timed
    ]  # fmt: skip
    head = ("pool", "tokens", "sequences", "prefill s", "compaction s", "decode ms", "at 20 % ms", "kept")
    lines = table(head, rows)
    for each in (record for record in records if "compared" in record):
        lines.append(
            f"{' against '.join(each['compared'])}, {each['tokens']} tokens: next-token KL {each['kl_full']:.1e}, and "
            f"{each['kl_kept']:.1e} after the compaction; {each['entries']} kept, {each['in_common']:.0%} shared: "
            + ("passed" if each["passed"] else "FAILED")
        )
    return lines


def targets(records: list[Record]) -> list[str]:
    """Every target with its number."""
    words = {True: "met", False: "MISSED", None: "not measured"}
    rows = [
        (
            each["target"],
            "" if each["value"] is None else f"{each['value']:.3g}",
            f">= {each['least']}" if each["least"] is not None else f"<= {each['most']}",
            words[each["met"]],
        )
        for each in records
    ]
    return table(("target", "measured", "wanted", ""), rows)


def text(document: dict[str, Any]) -> str:
    """The whole report; parts that have not run yet are left out."""
    parts: Parts = document["parts"]

    def of(name: str) -> list[Record]:
        records: list[Record] = parts[name]["records"] if name in parts else []
        return records

    heading = "GPU session" + (": a rehearsal on a CPU, whose times mean nothing" if document["rehearsal"] else "")
    lines = [f"# {heading}", ""]
    lines += [f"{name}: {value}" for name, value in (document["machine"] | document["versions"]).items()]
    lines += [f"commit: {document['commit']}", f"seed: {document['seed']}"]
    lines += table(("part", "s"), ((name, f"{part['seconds']:.0f}") for name, part in parts.items()))
    lines += ["", *problems(parts)]
    if of("kernel_tests"):
        counts = {
            name: sum(each.get(name, 0) for each in of("kernel_tests")) for name in ("passed", "failed", "skipped")
        }
        lines += ["", "tests/kernels: " + ", ".join(f"{count} {name}" for name, count in counts.items())]
        lines += [f"FAILED {failure}" for each in of("kernel_tests") for failure in each["failures"]]
    if of("checks") or of("races"):
        lines += checks(of("checks") + of("races"))
    if of("sanitizer"):
        lines += table(("memory checker", "status", "s"), (
            (each["tool"], each["status"], f"{each['seconds']:.0f}") for each in of("sanitizer")
        ))  # fmt: skip
        lines += [line for each in of("sanitizer") if each["status"] != "nothing found" for line in each["said"]]
    if of("ceilings"):
        lines += table(("ceiling", "size", "ms", "a second"), (
            (each["ceiling"], each["size"], f"{each['ms']:.3f}", f"{each['per_second']:.4g}") for each in of("ceilings")
        ))  # fmt: skip
    if of("kernel_times"):
        lines += ["", "Milliseconds / floor, what binds it (products or bytes), and the share of that ceiling."]
        lines += kernel_times(with_floors(of("kernel_times"), ceilings_of(of("ceilings"))))
    if of("host_times"):
        lines += hosts(of("host_times"))
    return "\n".join(lines + targets(document["targets"])) + "\n"
