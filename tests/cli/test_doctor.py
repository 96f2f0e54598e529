"""`bpkv doctor` on machines with packages that are absent, broken, or crash the interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from bpkv_trt import doctor
from bpkv_trt.cli import main
from bpkv_trt.doctor import Finding, examine, print_findings

ROOT = Path(__file__).resolve().parents[2]

BROKEN = {
    "tensorrt": "raise OSError('libnvinfer.so.10: cannot open shared object file')",
    "tensorrt_llm": "__version__ = '1.3.0'",
    "triton": "import os; os.abort()",
    "transformers": "raise ImportError('half installed')",
}


def test_broken_packages_are_findings_and_the_exit_code_is_0(tmp_path: Path) -> None:
    for package, source in BROKEN.items():
        (tmp_path / f"{package}.py").write_text(source)
    binary = tmp_path / "tritonserver"
    binary.write_text("#!/bin/sh\necho 'libcuda.so.1 not found' >&2\nexit 3\n")
    binary.chmod(0o755)
    library = tmp_path / "plugin.so"
    library.write_bytes(b"not a library")
    environment = {
        **os.environ,
        "PYTHONPATH": f"{tmp_path}:{ROOT}",
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "BPKV_PLUGIN_PATH": str(library),
        "BPKV_CACHE_DIR": str(library),
    }
    report = tmp_path / "doctor.json"
    command = [sys.executable, "-m", "bpkv_trt", "doctor", "--json", str(report)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    findings = {finding["name"]: finding for finding in json.loads(report.read_text())["findings"]}
    for name, words in {
        "TensorRT": "libnvinfer.so.10",
        "TensorRT-LLM": "1.3.0: engines need TensorRT-LLM 1.0 to 1.2",
        "Triton compiler": "crashed with signal 6",
        "transformers": "half installed",
        "Triton server": "libcuda.so.1 not found",
        "plugin library": "plugin.so",
        "cache directory": "cannot be written",
    }.items():
        assert findings[name]["status"] == "broken" and words in findings[name]["detail"], findings[name]
        assert findings[name]["advice"]
        assert f"{name}: broken: " in done.stdout
    assert findings["Python"]["status"] == "ok"
    assert all(len(line) > 10 for line in done.stdout.splitlines()), "one line per finding, unwrapped"
    assert len(done.stdout.splitlines()) == len(findings)


@pytest.mark.parametrize("flag, name", [("--engine-dir", "engine"), ("--plugin-lib", "plugin library")])
def test_what_is_named_and_cannot_be_used_is_a_mistake(
    flag: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is merely looked for is not."""
    monkeypatch.setattr(doctor, "_probe", lambda name, advice, *command: Finding(name, "broken", "as all here", advice))
    assert main(["doctor"]) == 0
    capsys.readouterr()
    assert main(["doctor", flag, str(tmp_path / "nothing"), "--json", str(tmp_path / "out.json")]) == 2
    said = capsys.readouterr()
    (finding,) = [each for each in json.loads((tmp_path / "out.json").read_text())["findings"] if each["name"] == name]
    assert finding["detail"] in said.out and finding["detail"] in said.err and "Traceback" not in said.err


def test_a_reader_that_has_gone_loses_no_report(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    program = (
        "import sys, bpkv_trt.cli as cli; from bpkv_trt.doctor import Finding\n"
        "cli.examine = lambda *named: [Finding('Python', 'ok', 'works')]\n"
        "sys.exit(cli.main(['doctor', '--json', 'out.json']))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert done.returncode != 0 and done.stderr == ""
    assert json.loads((tmp_path / "out.json").read_text())["findings"][0]["name"] == "Python"


def test_what_is_absent_comes_with_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    monkeypatch.setattr(doctor.ctypes.util, "find_library", lambda name: None)
    monkeypatch.setenv("BPKV_PLUGIN_PATH", str(tmp_path / "absent.so"))
    monkeypatch.setenv("CXX", "no-such-wrapper c++")
    findings = {finding.name: finding for finding in examine()}
    assert findings["C++ build tools"].detail == "no no-such-wrapper on the PATH"
    for name in ("PyTorch", "GPU", "transformers", "Triton compiler", "TensorRT", "TensorRT-LLM", "plugin library"):
        assert findings[name].status == "missing" and findings[name].advice, findings[name]


def test_a_terminal_gets_a_table_that_takes_text_literally(capsys: pytest.CaptureFixture[str]) -> None:
    findings = [Finding("PyTorch", "missing", "not installed", "pip install 'bpkv-trt[torch]'")]
    print_findings(findings, Console(force_terminal=True, width=120, color_system=None))
    output = capsys.readouterr().out
    assert "what to do" in output and "bpkv-trt[torch]" in output, "brackets are not markup"


def test_a_gpu_tells_its_compute_capability(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("class cuda:\n    get_device_capability = staticmethod(lambda device: (9, 0))\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert doctor._compute_capability() == (9, 0)
    (tmp_path / "torch.py").write_text(
        "class cuda:\n    def get_device_capability(): raise RuntimeError('no driver')\n"
    )
    assert doctor._compute_capability() is None
