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
    told = (event.get("note") for event in report["events"])
    if notes := dict.fromkeys([*report["notes"], *filter(None, told)]):
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
