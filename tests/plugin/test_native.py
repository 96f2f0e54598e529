"""The plugin's own tests in C++, which need no TensorRT, also under sanitizers; its sources' style, and its library."""

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SANITIZERS = {"plain": "", "memory": "address,undefined"}  # for threads by hand, as plugins/README.md says
MOST_BYTES = 1_000_000  # without kernels
SYSTEM = {"libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "ld-linux-x86-64.so.2"}
EXPORTS = {"getCreators", "setLoggerFinder", "initBpkvPlugins"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", SANITIZERS)
def test_the_tests_in_cpp(native_build, kind):
    folder = native_build(kind, SANITIZERS[kind])
    done = subprocess.run(["ctest", "--test-dir", folder, "--output-on-failure"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"100% tests passed, 0 tests failed out of \d\d", done.stdout), done.stdout


def test_sources_are_formatted():
    formatter = pytest.importorskip("clang_format", reason="needs the package clang-format").get_executable(
        "clang-format"
    )
    files = [*(ROOT / "plugins").rglob("*.h"), *(ROOT / "plugins").rglob("*.cpp")]
    done = subprocess.run([formatter, "--dry-run", "--Werror", *files], capture_output=True, text=True)
    assert len(files) > 20 and done.returncode == 0, done.stderr


def test_the_library_is_small_and_links_nothing_of_nvidia(plugin):
    assert plugin.stat().st_size < MOST_BYTES
    dynamic = subprocess.run(["readelf", "-dW", plugin], capture_output=True, text=True, check=True).stdout
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", dynamic))
    assert needed and needed <= SYSTEM
    symbols = subprocess.run(["nm", "-D", "--defined-only", plugin], capture_output=True, text=True, check=True).stdout
    assert {line.split()[-1].partition("@")[0] for line in symbols.splitlines() if " T " in line} == EXPORTS


def test_the_library_knows_no_path_of_the_machine(plugin):
    content = plugin.read_bytes()
    assert str(ROOT).encode() not in content and os.fsencode(Path.home()) not in content


def test_the_build_says_what_it_cannot_use_and_leaves_nothing(build_environment, tmp_path):
    wrong = build_environment | {"TENSORRT_INCLUDE_DIR": str(tmp_path)}
    for options, words in (
        (["--output", str(tmp_path / "out")], "TENSORRT_INCLUDE_DIR"),
        (["--output"], "--output"),
        (["--speed", "9"], "--speed"),
        ([], "--output"),
    ):
        command = ["bash", ROOT / "build_scripts" / "build_plugin.sh", *options]
        done = subprocess.run(command, env=wrong, capture_output=True, text=True)
        assert done.returncode == 2 and words in done.stderr and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_build_that_fails_leaves_no_folder_that_it_made(build_environment, tmp_path):
    (tmp_path / "was here").mkdir()
    failing = build_environment | {"CXX": "false g++"}  # found, with an argument of its own
    for output in ("was here", "was here/one/two", "three"):
        command = ["bash", ROOT / "build_scripts" / "build_plugin.sh", "--output", output]
        done = subprocess.run(command, env=failing, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 1 and "the build failed" in done.stderr
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")] == ["was here"]


def test_the_build_refuses_a_checkout_whose_path_cmake_would_cut(build_environment, tmp_path):
    clone = tmp_path / "one;two"
    (clone / "plugins").mkdir(parents=True)
    (clone / "build_scripts").symlink_to(ROOT / "build_scripts")
    command = ["bash", clone / "build_scripts" / "build_plugin.sh", "--output", tmp_path / "out"]
    done = subprocess.run(command, env=build_environment, capture_output=True, text=True)
    assert done.returncode == 2 and "one;two" in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_the_build_does_not_follow_cdpath(build_environment, tmp_path):
    for folder in ("here/headers", "elsewhere/headers"):
        (tmp_path / folder).mkdir(parents=True)
        for file in ("NvInferRuntime.h", "NvInferVersion.h"):
            (tmp_path / folder / file).touch()
    environment = build_environment | {"TENSORRT_INCLUDE_DIR": "headers", "CDPATH": str(tmp_path / "elsewhere")}
    command = ["bash", ROOT / "build_scripts" / "build_plugin.sh", "--cmake-options"]
    done = subprocess.run(command, env=environment, cwd=tmp_path / "here", capture_output=True, text=True)
    assert done.stdout.splitlines()[0] == f"-DTENSORRT_INCLUDE_DIR={tmp_path}/here/headers"
