"""LD_PRELOAD registers the plugin: the way into a server that has no option for plugins of its own."""

import os
import subprocess
import sys

import pytest

from tests.tensorrt_folder import tensorrt_folder

LOOK = """
import tensorrt_bindings as trt
print([(c.name, c.plugin_version, c.plugin_namespace) for c in trt.get_plugin_registry().all_creators])
"""


@pytest.mark.parametrize("preloaded", [True, False])
def test_a_process_that_knows_nothing_of_it_has_the_plugin(plugin, tmp_path, preloaded):
    environment = tensorrt_folder(tmp_path) | ({"LD_PRELOAD": str(plugin)} if preloaded else {})
    done = subprocess.run([sys.executable, "-c", LOOK], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("('BpkvScore', '1', 'bpkv')" in done.stdout) == preloaded


def test_without_tensorrt_the_process_runs_on_and_is_told(plugin, tmp_path):
    environment = os.environ | {"LD_PRELOAD": str(plugin), "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run("/bin/true", env=environment, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr.startswith("bpkv: ") and "libnvinfer.so.10" in done.stderr and done.stderr.count("\n") == 1
