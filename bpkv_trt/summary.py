"""What commands print of their reports."""

from typing import Any

from rich.console import Console
from rich.table import Table


def print_generate(report: dict[str, Any], console: Console) -> None:
    """The text, then what was kept of the cache, what it cost, and how far the model's predictions moved."""
    console.out(report["text"], highlight=False)
    facts = _facts(report)
    if not console.is_terminal:
        for name, value in facts.items():
            console.out(f"{name}: {value}", highlight=False)
        return
    table = Table(show_header=False)
    for name, value in facts.items():
        table.add_row(name, value)
    console.print(table)


def _facts(report: dict[str, Any]) -> dict[str, str]:
    budget, pool = report["budget"], report["pool"]
    clamped = "; raised to the protected tokens" if budget["clamped"] else ""
    facts = {
        "tokens": f"{report['prompt_tokens']:,} of prompt, {report['generated_tokens']:,} generated",
        "policy": f"{report['policy']}, regime {','.join(report['regime'])}, scope {report['scope']}",
        "entries kept": f"{budget['entries_kept']:,} of {budget['entries_total']:,} "
        f"({budget['fraction']:.2%}, asked for {budget['requested']}{clamped})",
        "cache": f"{pool['bytes_before'] / 2**20:,.1f} -> {pool['bytes_after'] / 2**20:,.1f} MiB, "
        f"{pool['pages_freed']:,} pages freed",
        "seconds": ", ".join(f"{stage} {seconds:.2f}" for stage, seconds in report["timings_s"].items() if seconds),
    }
    notes = dict.fromkeys(event["note"] for event in report["events"] if event.get("note"))
    if notes:
        facts["notes"] = "; ".join(notes)
    if verify := report.get("verify"):
        facts["against the full cache"] = _agreement(verify)
    return facts


def _agreement(verify: dict[str, Any]) -> str:
    if not verify["tokens"]:
        return "no token came after the compaction, so there is nothing to compare"
    return (
        f"future KL {verify['future_kl_mean']:.2e} nats on average, {verify['future_kl_max']:.2e} at most, "
        f"same next token {verify['top1_agreement']:.1%} of {verify['tokens']}"
    )


def print_layer_table(table: dict[str, Any], console: Console) -> None:
    """The weights of a model's layers, and the KL (nats) that they come from."""
    rows = Table("layer", "KL under noise (nats)", "weight", box=None)
    for layer, (kl, weight) in enumerate(zip(table["sensitivity_kl"], table["weights"], strict=True)):
        rows.add_row(str(layer), f"{kl:.2e}", f"{weight:.3f}")
    console.print(rows)


_COLUMNS = ("task", "regime", "budget", "contender")


def print_compare(document: dict[str, Any], console: Console) -> None:
    """One line per row of the comparison, what was left out, and why."""
    header = (*_COLUMNS, "future KL", "low", "high", "top-1", "right", "of full's", "entries", "MiB", "compact s")
    lines = [_compare_line(row) for row in document["rows"]]
    if console.is_terminal:
        table = Table(*header)
        for line in lines:
            table.add_row(*line)
        console.print(table)
    else:
        for line in (header, *lines):
            console.out("\t".join(line), highlight=False)
    reasons = dict.fromkeys(each["skipped"] for each in document["skipped"])
    if reasons:
        console.out(f"{len(document['skipped'])} samples skipped: {' '.join(reasons)}", highlight=False)
    if len(document["commits"]) > 1:
        console.out(f"measured by several states of the code: {', '.join(document['commits'])}", highlight=False)


def _compare_line(row: dict[str, Any]) -> tuple[str, ...]:
    size = None if row["bytes_after"] is None else row["bytes_after"] / 2**20
    return (
        *(str(row[name]) for name in _COLUMNS),
        *(_shown(row[f"future_kl_{name}"], ".3g") for name in ("mean", "low", "high")),
        *(
            _shown(row[name], ".1%")
            for name in ("top1_agreement", "accuracy", "accuracy_over_full", "entries_fraction")
        ),
        _shown(size, ".2f"),
        _shown(row["compress_s"], ".3f"),
    )


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
