"""The command `bpkv`."""

import sys

try:
    import argparse
    import io
    import os
    from collections.abc import Sequence

    from rich.console import Console

    from bpkv_trt import __version__
    from bpkv_trt.compare_command import add_compare
    from bpkv_trt.doctor import examine, print_findings
    from bpkv_trt.documents import SCHEMA_VERSION, check_destination, deliver, library_versions
    from bpkv_trt.errors import BpkvError, ConfigError, InputError
    from bpkv_trt.generate_command import add_generate
    from bpkv_trt.model_repository_command import add_model_repository
    from bpkv_trt.openai_front_command import add_openai_front
    from bpkv_trt.options import MODEL_HELP, CommandParser, file_path, importing
    from bpkv_trt.profile_command import add_profile
    from bpkv_trt.progress import progress_on
    from bpkv_trt.request import read_prompt
    from bpkv_trt.summary import print_layer_table
except KeyboardInterrupt:  # they take a while where the machine is busy
    print("bpkv: interrupted.", file=sys.stderr)
    sys.exit(130)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="bpkv", description="Behavior-preserving KV-cache compression.")
    parser.add_argument("--version", action="version", version=f"bpkv {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    add_generate(commands.add_parser("generate", help="run a long prompt, compact its cache, generate"))
    add_compare(commands.add_parser("compare", help="measure policies side by side on the same samples"))
    table = "measure how sensitive a model's layers are, for --layer-table"
    _add_layer_table(commands.add_parser("layer-table", help=table))
    add_profile(commands.add_parser("profile", help="where time goes: run a latency profile, report on a trace"))
    repository = "write a folder that Triton Inference Server serves a model from"
    add_model_repository(commands.add_parser("model-repository", help=repository))
    add_openai_front(commands.add_parser("openai-front", help="an OpenAI-style API in front of such a server"))
    doctor = commands.add_parser("doctor", help="what of this machine can be used, and what to do about the rest")
    doctor.add_argument("--json", type=file_path, metavar="OUT", help="also write the findings there")
    doctor.add_argument("--engine-dir", type=file_path, metavar="DIR", help="also look at the engine in this folder")
    doctor.add_argument("--plugin-lib", type=file_path, metavar="L", help="the plugin library, if not found")
    doctor.set_defaults(run=_doctor)
    return parser


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
    deliver(lambda: print_layer_table(table, Console()), options.output, table)


def _doctor(options: argparse.Namespace) -> None:
    if options.json is not None:
        check_destination(options.json, [("--plugin-lib", options.plugin_lib)])
    findings = examine(options.engine_dir, options.plugin_lib)
    found = [vars(finding) for finding in findings]
    content = {"schema_version": SCHEMA_VERSION, "versions": library_versions(), "findings": found}
    deliver(lambda: print_findings(findings, Console()), options.json, content)
    named = {"engine": options.engine_dir, "plugin library": options.plugin_lib}
    for finding in findings:
        if named.get(finding.name) is not None and finding.status != "ok":
            raise InputError(f"The {finding.name} that was named cannot be used: {finding.detail}")


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
