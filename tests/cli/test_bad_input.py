"""Bad input that needs no model, or a damaged one: exit 2, one paragraph, no traceback, nothing written."""

import json
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from bpkv_trt.cli import main
from bpkv_trt.config import BpkvConfig
from bpkv_trt.documents import document, write_json

ROOT = Path(__file__).resolve().parents[2]
LLAMA = ROOT / "tests" / "assets" / "tiny-llama"
TABLE = ["layer-table", "--model", "m", "--output"]


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    path = tmp_path / "prompt.txt"
    path.write_text("A prompt.")
    return path


def refusal(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The paragraph that a command line is refused with."""
    assert main([str(argument) for argument in arguments]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith("bpkv: ") and output.err.endswith("\n") and output.err.count("\n") == 1
    assert "Traceback" not in output.err
    return output.err


def generate(capsys: pytest.CaptureFixture[str], prompt: Path, *arguments: object) -> str:
    return refusal(capsys, "generate", "--model", "smollm2", "--prompt-file", prompt, *arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["COMMAND", "bpkv --help"]),
        (["generat"], ["generat", "generate"]),
        (["generate"], ["--prompt-file", "bpkv generate --help"]),
        (["generate", "--prompt-file", "f"], ["Neither --model nor --engine-dir is given", "--model or an engine"]),
        (["generate", "--model", "m", "--engine-dir", "e", "--prompt-file", "f"], ["Both are given"]),
        (["generate", "--model", "m", "--prompt-file", "f", "--budgett", "1"], ["--budgett"]),
        (["generate", "--model", "m", "--prompt-file", "f", "--budg", "1"], ["--budg"]),
        (["generate", "--model", "m", "--prompt-file", "f", "--dtype", "int3"], ["--dtype", "float32"]),
        (["generate", "--model", "m", "--prompt-file", "f", "--max-new-tokens", "x"], ["--max-new-tokens", "'x'"]),
        (["doctor", "--json"], ["--json"]),
    ],
)
def test_usage(capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]) -> None:
    message = refusal(capsys, *arguments)
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b" \n\t\n", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"\x7fELF\x00\x01", "is binary"),
        (b"caf\xe9", "is not UTF-8 (byte 3 is 0xe9)"),
        (b"\xff\xfeh\x00i\x00", "is binary"),
    ],
)
def test_prompt_files_that_are_not_text(
    capsys: pytest.CaptureFixture[str], prompt: Path, content: bytes, words: str
) -> None:
    prompt.write_bytes(content)
    message = generate(capsys, prompt)
    assert str(prompt) in message and words in message


def test_prompt_files_that_are_not_there(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "does not exist" in generate(capsys, tmp_path / "absent.txt")
    assert "is a directory" in generate(capsys, tmp_path)
    assert "cannot be read" in generate(capsys, tmp_path / ("x" * 300))


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--budget", "0", "budget is '0'"),
        ("--budget", "1.5", "a fraction above 1"),
        ("--budget", "-0.2", "budget is '-0.2'"),
        ("--budget", "nan", "not a budget"),
        ("--budget", "lots", "not a budget"),
        ("--budget", "35t", "36 tokens per head are protected"),
        ("--generation-budget", "20%", "tokens per head"),
        ("--regime", "prefill,later", "choose from prefill, deferred, generation"),
        ("--scope", "model", "'head', 'layer' or 'global'"),
        ("--readout", "both", "'direct' or 'exact'"),
        ("--sinks", "four", "sinks is 'four'"),
        ("--recent", "7", "recent >= 8"),
        ("--epsilon", "nan", "finite"),
        ("--policy", "snapkw", "'snapkw', which is not a policy; choose from bpkv, full"),
        ("--memory-limit", "4", "--memory-limit is '4'"),
        ("--config", "absent.yaml", "absent.yaml does not exist"),
        ("--layer-table", "absent.json", "absent.json does not exist"),
    ],
)
def test_options(capsys: pytest.CaptureFixture[str], prompt: Path, option: str, value: str, words: str) -> None:
    destination = prompt.with_name("out.json")
    assert words in generate(capsys, prompt, f"{option}={value}", "--json", destination)
    assert [file.name for file in prompt.parent.iterdir()] == ["prompt.txt"], "nothing was written"


def test_a_mistake_in_a_configuration_file_is_told_with_its_name(
    capsys: pytest.CaptureFixture[str], prompt: Path
) -> None:
    config = prompt.with_name("bpkv.yaml")
    config.write_text("budget: 2\n")
    assert f"{config}: budget is '2'" in generate(capsys, prompt, "--config", config)


def test_output_that_could_not_be_written_is_refused_before_the_run(
    capsys: pytest.CaptureFixture[str], prompt: Path
) -> None:
    absent = prompt.with_name("absent")
    assert f"{absent} for out.json" in generate(capsys, prompt, "--json", absent / "out.json")
    assert "is a directory" in generate(capsys, prompt, "--json", prompt.parent)
    assert "The output - is no file" in generate(capsys, prompt, "--json", "-")
    assert "does not exist" in refusal(capsys, "doctor", "--json", absent / "out.json")


def test_output_never_takes_the_place_of_a_device_a_pipe_or_an_input(
    capsys: pytest.CaptureFixture[str], prompt: Path, tmp_path: Path
) -> None:
    pipe, text = tmp_path / "pipe", prompt.read_bytes()
    os.mkfifo(pipe)
    for path in ("/dev/null", "/dev/full", pipe):
        assert "a device or a pipe" in generate(capsys, prompt, "--json", path)
        assert not Path(path).is_file()
    assert "would overwrite" in generate(capsys, prompt, "--json", prompt)
    assert prompt.read_bytes() == text


def test_what_a_user_keeps_in_a_file_is_never_overwritten(
    capsys: pytest.CaptureFixture[str], prompt: Path, tmp_path: Path
) -> None:
    """By any command: neither an input, whatever it looks like, nor any file that no run of ours wrote."""
    table, config = tmp_path / "table.json", tmp_path / "own.yaml"
    write_json(table, document(BpkvConfig(), {"weights": [1.0]}))  # ours, so that only being an input protects it
    config.write_text(f"layer_table: {table}\n")
    for given in (["--layer-table", table], ["--config", config]):
        assert "--json would overwrite the file given to --layer-table" in generate(
            capsys, prompt, *given, "--json", table
        )
    assert "--json would overwrite the file given to --config" in generate(
        capsys, prompt, "--config", config, "--json", config
    )
    for content in (b"", b"notes", b"\xff", b"[" * 10**5, b'{"model_type": "llama"}', b'{"schema_version": 1}', b"[1]"):
        for command in (["generate", "--model", "m", "--prompt-file", prompt, "--json"], ["doctor", "--json"], TABLE):
            (tmp_path / "mine").write_bytes(content)
            assert "mine is there and is no document of bpkv" in refusal(capsys, *command, tmp_path / "mine")
            assert (tmp_path / "mine").read_bytes() == content


def test_documents_of_ours_are_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bpkv_trt.cli.examine", lambda *given: [])
    out, link = tmp_path / "out.json", tmp_path / "link.json"
    link.symlink_to(out)
    for path in (out, link, out):
        assert main(["doctor", "--json", str(path)]) == 0
    assert json.loads(out.read_text())["findings"] == [] and link.is_symlink()


@pytest.mark.skipif(not Path("/dev/stdout").exists(), reason="needs a name for the standard output")
@pytest.mark.parametrize(("stream", "name"), [(">out.txt", "/dev/stdout"), ("2>out.txt", "/dev/stderr")])
def test_what_the_output_goes_to_is_not_overwritten(tmp_path: Path, stream: str, name: str) -> None:
    (tmp_path / "link.json").symlink_to(tmp_path / "out.txt")
    for path in (name, tmp_path / "out.txt", tmp_path / "link.json"):
        done = closed(f"{stream.replace('out', str(tmp_path / 'out'))}", "doctor", "--json", str(path))
        message = done.stderr or (tmp_path / "out.txt").read_text()
        assert done.returncode == 2 and "--json would overwrite what the standard" in message


@pytest.mark.parametrize("flag", ["--prompt-file", "--config", "--layer-table"])
def test_only_files_are_read_and_only_as_much_as_they_could_hold(
    capsys: pytest.CaptureFixture[str], prompt: Path, tmp_path: Path, flag: str
) -> None:
    pipe, large = tmp_path / "pipe", tmp_path / "large"
    os.mkfifo(pipe)
    with large.open("wb") as file:
        file.truncate((64 << 20) + 1)
    for path, words in [
        ("/dev/zero", "is a device or a pipe"),
        (pipe, "is a device or a pipe"),
        (large, "MiB, more than is read of one"),
        (tmp_path, "is a directory"),
        (tmp_path / "absent", f"absent does not exist; check the path given to {flag}"),
        ("", "empty"),
    ]:
        assert words in generate(capsys, prompt, flag, path)


@pytest.mark.parametrize("flag", ["--prompt-file", "--config", "--layer-table", "--json"])
def test_an_empty_name_of_a_file_is_called_empty(capsys: pytest.CaptureFixture[str], prompt: Path, flag: str) -> None:
    assert "empty" in generate(capsys, prompt, flag, "")


def test_a_question_in_another_encoding_is_refused(capsys: pytest.CaptureFixture[str], prompt: Path) -> None:
    assert "not text in this terminal's encoding" in generate(capsys, prompt, "--question", "caf\udce9")


@pytest.mark.parametrize("flag", ["--question", "--question-after"])
@pytest.mark.parametrize("question", ["", " \n"])
def test_an_empty_question_is_refused(
    capsys: pytest.CaptureFixture[str], prompt: Path, flag: str, question: str
) -> None:
    assert f"{flag} is empty" in generate(capsys, prompt, flag, question)


def test_a_broken_chat_template_is_told_and_raw_does_without_it(
    capsys: pytest.CaptureFixture[str], prompt: Path, tmp_path: Path
) -> None:
    model, destination = shutil.copytree(LLAMA, tmp_path / "model"), tmp_path / "out.json"
    (model / "chat_template.jinja").write_text("{{ broken {% ")
    arguments = ["--model", model, "--max-new-tokens", "1", "--json", destination]
    message = generate(capsys, prompt, *arguments)
    assert "chat template fails (TemplateSyntaxError" in message and "--raw" in message
    assert not destination.exists()
    command = ["generate", "--prompt-file", prompt, "--raw", *arguments]
    assert main([str(argument) for argument in command]) == 0 and destination.exists()


def test_a_model_without_a_name_is_refused(capsys: pytest.CaptureFixture[str], prompt: Path) -> None:
    assert "--model is empty" in generate(capsys, prompt, "--model", "")


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a directory that even root cannot write to")
def test_output_in_a_protected_directory_is_refused(capsys: pytest.CaptureFixture[str], prompt: Path) -> None:
    assert "/proc/self cannot be written to" in generate(capsys, prompt, "--json", "/proc/self/out.json")


def test_the_real_command_exits_with_2_and_one_paragraph(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bpkv_trt", "generate", "--model", "smollm2", "--prompt-file", "absent.txt"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == ("bpkv: The prompt file absent.txt does not exist; check the path given to --prompt-file.\n")


def test_an_interrupt_is_no_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, prompt: Path
) -> None:
    def interrupted(path: Path) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("bpkv_trt.generate_command.read_prompt", interrupted)
    assert main(["generate", "--model", "m", "--prompt-file", str(prompt)]) == 130
    assert capsys.readouterr().err == "bpkv: interrupted.\n"


@pytest.mark.parametrize("entry", [["-m", "bpkv_trt"], ["-c", "import sys; from bpkv_trt.cli import main; main()"]])
def test_an_interrupt_while_modules_are_imported_is_no_traceback(tmp_path: Path, entry: list[str]) -> None:
    """By either way in: `python -m bpkv_trt`, and the script that installing the package makes.

    Interrupts are as a terminal's job has them: a background job of a script ignores them, and so would all it starts.
    """
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich" / "__init__.py").write_text("import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, *entry, "--help"],
        env=environment,
        capture_output=True,
        text=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "bpkv: interrupted.\n")


def closed(stream: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The real command, started by a shell with a stream closed, such as `>&-`."""
    command = ["sh", "-c", f'exec "$@" {stream}', "sh", sys.executable, "-m", "bpkv_trt", *arguments]
    return subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True)


@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell")
@pytest.mark.parametrize("both", [False, True])
def test_without_standard_output_nothing_is_run(tmp_path: Path, both: bool) -> None:
    """A file opened later would take its place, and be printed into."""
    done = closed(">&- 2>&-" if both else ">&-", "doctor", "--json", str(tmp_path / "out.json"))
    words = "bpkv: the standard output is closed; send it to a file, or to /dev/null.\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", "" if both else words)
    assert not any(tmp_path.iterdir())


@pytest.mark.skipif(os.name == "nt", reason="needs a POSIX shell")
def test_without_standard_error_messages_go_nowhere() -> None:
    """Least of all to standard output, which a script may read."""
    done = closed("2>&-", "nonsense")
    assert (done.returncode, done.stdout) == (2, "")
