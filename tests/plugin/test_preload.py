"""LD_PRELOAD registers the plugin: the way into a server that has no option for plugins of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugin.bindings import stand_in_libraries

ROOT = Path(__file__).resolve().parents[2]
LOOK = """
import sys
from pathlib import Path
from tests.plugin.bindings import import_tensorrt
trt = import_tensorrt(Path(sys.argv[1]))
print([(c.name, c.plugin_version, c.plugin_namespace) for c in trt.get_plugin_registry().all_creators])
"""


@pytest.fixture(scope="module")
def libraries(tmp_path_factory, dispatch):
    folder = tmp_path_factory.mktemp("libraries")
    stand_in_libraries(folder, dispatch)
    return folder


def run(*command, **environment):
    return subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)} | environment, capture_output=True, text=True
    )


@pytest.mark.parametrize("preloaded", [True, False])
def test_a_process_that_knows_nothing_of_it_has_the_plugin(plugin, libraries, preloaded):
    variables = {"LD_PRELOAD": str(plugin)} if preloaded else {}
    done = run(sys.executable, "-c", LOOK, libraries, LD_LIBRARY_PATH=str(libraries), **variables)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("('BpkvScore', '1', 'bpkv')" in done.stdout) == preloaded


def test_without_tensorrt_the_process_runs_on_and_is_told(plugin, tmp_path):
    done = run("/bin/true", LD_PRELOAD=str(plugin), LD_LIBRARY_PATH=str(tmp_path))
    assert done.returncode == 0
    assert done.stderr.startswith("bpkv: ") and "libnvinfer.so.10" in done.stderr and done.stderr.count("\n") == 1
