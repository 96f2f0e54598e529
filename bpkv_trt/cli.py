"""The command `bpkv`."""

import sys

try:
    import argparse
    import io
    import os
    from collections.abc import Callable, Sequence
    from dataclasses import replace
    from pathlib import Path
    from typing import Any

    from rich.console import Console

    from bpkv_trt import __version__
    from bpkv_trt.compare_command import add_compare
    from bpkv_trt.core.budget import parse_bytes
    from bpkv_trt.doctor import examine, print_findings
    from bpkv_trt.documents import SCHEMA_VERSION, check_destination, document, library_versions, write_json
    from bpkv_trt.errors import BpkvError, ConfigError, InputError
    from bpkv_trt.options import (
        MODEL_HELP,
        CommandParser,
        add_config_options,
        add_placement_options,
        config_from,
        file_path,
        importing,
    )
    from bpkv_trt.profile_command import add_profile
    from bpkv_trt.progress import progress_on
    from bpkv_trt.request import GenerateRequest, read_prompt
    from bpkv_trt.summary import print_generate, print_layer_table
except KeyboardInterrupt:  # they take a while where the machine is busy
    print("bpkv: interrupted.", file=sys.stderr)
    sys.exit(130)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="bpkv", description="Behavior-preserving KV-cache compression.")
    parser.add_argument("--version", action="version", version=f"bpkv {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_generate(commands.add_parser("generate", help="run a long prompt, compact its cache, generate"))
    add_compare(commands.add_parser("compare", help="measure policies side by side on the same samples"))
    table = "measure how sensitive a model's layers are, for --layer-table"
    _add_layer_table(commands.add_parser("layer-table", help=table))
    add_profile(commands.add_parser("profile", help="where time goes: run a latency profile, report on a trace"))
    doctor = commands.add_parser("doctor", help="what of this machine can be used, and what to do about the rest")
    doctor.add_argument("--json", type=file_path, metavar="OUT", help="also write the findings there")
    doctor.add_argument("--engine-dir", type=file_path, metavar="DIR", help="also look at the engine in this folder")
    doctor.set_defaults(run=_doctor)
    return parser


def _add_generate(parser: argparse.ArgumentParser) -> None:
    run = parser.add_argument_group("what to run")
    run.add_argument("--model", required=True, help=MODEL_HELP)
    run.add_argument("--prompt-file", required=True, type=file_path, metavar="F", help="UTF-8 text")
    run.add_argument("--question", metavar="Q", help="put after the prompt, before compaction")
    run.add_argument("--question-after", metavar="Q", help="asked of the compacted cache")
    run.add_argument("--raw", action="store_true", help="do not apply the model's chat template")
    run.add_argument("--max-new-tokens", type=int, default=GenerateRequest.max_new_tokens, metavar="N")
    run.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 is greedy (default)")
    run.add_argument("--top-p", type=float, default=1.0, metavar="X")
    add_placement_options(run)
    run.add_argument("--allow-extrapolation", action="store_true", help="run past the positions the model knows")
    run.add_argument("--verify", action="store_true", help="also run the full cache and report future KL and agreement")
    run.add_argument("--json", type=file_path, metavar="OUT", help="write the whole report there")
    run.add_argument(
        "--trace", type=file_path, metavar="OUT", help="write when every range ran (Chrome's trace format)"
    )
    add_config_options(parser.add_argument_group("what to keep"))
    parser.set_defaults(run=_generate)


def _generate(options: argparse.Namespace) -> None:
    for flag, text in (("--question", options.question), ("--question-after", options.question_after)):
        if text is not None and any("\ud800" <= letter <= "\udfff" for letter in text):
            raise InputError(f"{flag} is not text in this terminal's encoding; give it as UTF-8.")
        if text is not None and not text.strip():
            raise InputError(f"{flag} is empty; give a question, or leave it out.")
    request = GenerateRequest(
        model=options.model,
        prompt=read_prompt(options.prompt_file),
        config=config_from(options),
        question=options.question,
        question_after=options.question_after,
        raw=options.raw,
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        dtype=options.dtype,
        device=options.device,
        allow_extrapolation=options.allow_extrapolation,
        memory_limit=options.memory_limit and parse_bytes(options.memory_limit, "--memory-limit"),
        verify=options.verify,
        trace=options.trace,
    )
    inputs = [("--prompt-file", options.prompt_file), ("--config", options.config)]
    inputs.append(("--layer-table", request.config.layer_table))
    if options.json is not None:
        check_destination(options.json, inputs)
    if options.trace is not None:
        check_destination(options.trace, inputs, flag="--trace")
        if options.json is not None and options.trace.resolve() == options.json.resolve():
            raise InputError(f"--trace and --json are both {options.json}; give them different names.")
    with importing("generate"):
        from bpkv_trt.generate import run_generate
        from bpkv_trt.policies.registry import refuse_idle, settled
    given = request.config.model_fields_set
    request = replace(request, config=settled(request.config))  # what a policy cannot have is refused before the model
    refuse_idle(given, [request.config])
    with progress_on(Console(stderr=True)) as progress:
        report: dict[str, Any] = run_generate(request, progress)
    _deliver(lambda: print_generate(report, Console()), options.json, document(request.config, report))


def _add_layer_table(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help=MODEL_HELP)
    parser.add_argument("--output", required=True, type=file_path, metavar="FILE", help="JSON, for --layer-table")
    parser.add_argument("--text", type=file_path, metavar="F", help="UTF-8 text (default Python's own documentation)")
    parser.add_argument(
        "--samples", type=int, default=8, metavar="N", help="stretches of it, 512 tokens each (default 8)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the stretches and the noise (default 0)")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16", "float16"), default="auto")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.set_defaults(run=_layer_table)


def _layer_table(options: argparse.Namespace) -> None:
    check_destination(options.output, [("--text", options.text)], flag="--output")
    if options.output.suffix == ".safetensors":
        raise InputError(f"The layer table is written as JSON; give --output another ending than {options.output}.")
    for flag, value, least in (("--samples", options.samples, 1), ("--seed", options.seed, 0)):
        if not least <= value < 2**63:
            raise ConfigError(f"{flag} is {value}; give {least} or more.")
    own = (
        {}
        if options.text is None
        else {"text": read_prompt(options.text, "calibration text", "--text"), "text_name": options.text.name}
    )
    with importing("layer-table"):
        from bpkv_trt.calibrate import CalibrationRequest, run_calibration
    chosen = {name: getattr(options, name) for name in ("model", "samples", "seed", "dtype", "device")}
    with progress_on(Console(stderr=True)) as progress:
        table = run_calibration(CalibrationRequest(**chosen, **own), progress)
    _deliver(lambda: print_layer_table(table, Console()), options.output, table)


def _doctor(options: argparse.Namespace) -> None:
    if options.json is not None:
        check_destination(options.json)
    findings = examine(options.engine_dir)
    found = [vars(finding) for finding in findings]
    content = {"schema_version": SCHEMA_VERSION, "versions": library_versions(), "findings": found}
    _deliver(lambda: print_findings(findings, Console()), options.json, content)


def _deliver(show: Callable[[], None], path: Path | None, content: dict[str, Any]) -> None:
    """Neither a full disk loses what is printed, nor a reader of our output that has gone what is written."""
    try:
        show()
    finally:
        if path is not None:
            write_json(path, content)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 2 for what the user can mend, 130 when interrupted."""
    if sys.stderr is None:  # closed, as by `2>&-`
        sys.stderr = open(os.devnull, "w")
    if sys.stdout is None:
        print("bpkv: the standard output is closed; send it to a file, or to /dev/null.", file=sys.stderr)
        return 2
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a model may write what the terminal's encoding lacks
    try:
        options = _parser().parse_args(arguments)
        options.run(options)
        sys.stdout.flush()
    except BpkvError as error:
        print("bpkv: " + " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        print(" ".join(["bpkv: interrupted.", *map(str, error.args)]), file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `bpkv doctor | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        print(
            f"bpkv: the output cannot be written ({error.strerror}); free space, or send it elsewhere.", file=sys.stderr
        )
        return 2
    return 0
