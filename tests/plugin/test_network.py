"""The plugin's layers as Python adds them, through NVIDIA's own bindings."""

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from bpkv_trt.kernels.bundle import checksum
from bpkv_trt.trtllm.plugin import ScorePlugin
from bpkv_trt.trtllm.score_kernels import ScoreKernels
from tests.plugin.configurations import FP32
from tests.tensorrt_folder import tensorrt_folder

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import json, re, sys
from pathlib import Path
import tensorrt_bindings as trt
import numpy as np
from bpkv_trt.errors import BpkvError
from bpkv_trt.trtllm.plugin import ScoreInputs, ScorePlugin
from bpkv_trt.trtllm.plugin_library import PluginLibrary
from bpkv_trt.trtllm.score_kernels import ScoreKernels
from tests.plugin.configurations import FP32


class Network:
    # No builder, no network: it takes what NVIDIA's own takes, by the same names.
    taken = re.search(r"add_plugin_v3\\((.*?)\\) ->", trt.INetworkDefinition.add_plugin_v3.__doc__)[1]
    names = re.findall(r"(\\w+): ", taken)
    layers = []

    def add_plugin_v3(self, *given):
        assert len(given) == len(self.names) - 1 and isinstance(given[-1], trt.IPluginV3)
        self.layers.append(Layer(*given))
        return self.layers[-1]


class Layer:
    def __init__(self, inputs, shape_inputs, plugin):
        self.inputs, self.shape_inputs, self.plugin = inputs, shape_inputs, plugin

    def get_output(self, index):
        return index, self.name


def collected(fields):
    given.append({field.name: (str(field.type).rpartition(".")[2], value_of(field)) for field in fields})
    return collection(fields)


def value_of(field):
    # Of text the bindings read the first letter back, as often as there are letters.
    text = field.type in (trt.PluginFieldType.CHAR, trt.PluginFieldType.UNKNOWN)
    return field.size if text else np.asarray(field.data).item()


given, collection = [], trt.PluginFieldCollection
trt.PluginFieldCollection = collected  # the bindings read fields of plugins written in Python only
bundle = Path(sys.argv[1]).read_bytes()
kernels = ScoreKernels(FP32, ("80", "90a"), bundle)
inputs = ScoreInputs(*ScoreInputs._fields)
messages = []
try:
    ScorePlugin(trt, Network(), kernels).add_layer(inputs, name="early", layer_in_pool=0, scale=1.0)
except BpkvError as error:
    messages.append(str(error))
for _ in range(2):
    PluginLibrary.find().register(trt)
creator = trt.get_plugin_registry().get_creator("BpkvScore", "1", "bpkv")
plugins = ScorePlugin(trt, Network(), kernels)
outputs = [
    plugins.add_layer(
        inputs, name=f"layer {layer}", layer_in_pool=layer, pool=4 - layer, scale=0.25, key_scale=2.0, value_scale=0.5
    )
    for layer in range(3)
]
damaged = ScorePlugin(trt, Network(), ScoreKernels(FP32, ("80", "90a"), bundle[:-4]))
try:
    damaged.add_layer(inputs, name="bad", layer_in_pool=0, scale=1.0)
except BpkvError as error:
    messages.append(str(error))
print(json.dumps({
    "version": trt.__version__,
    "field_names": [field.name for field in creator.field_names],
    "outputs": outputs,
    "inputs": [layer.inputs for layer in Network.layers],
    "shape_inputs": [layer.shape_inputs for layer in Network.layers],
    "given": given,
    "messages": messages,
    "registered": [c.name for c in trt.get_plugin_registry().all_creators if c.plugin_namespace == "bpkv"],
}))
"""


@pytest.fixture(scope="module")
def report(tmp_path_factory, plugin, bundle_files):
    folder = tmp_path_factory.mktemp("bindings")
    script = folder / "script.py"
    script.write_text(SCRIPT)
    environment = tensorrt_folder(folder) | {"BPKV_PLUGIN_PATH": str(plugin), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, script, bundle_files["fp32"]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) | {"log": done.stderr}


def test_the_plugin_is_registered_once_by_name(report):
    assert report["registered"] == ["BpkvScore"]
    assert report["messages"][0].startswith("The plugin BpkvScore is not in TensorRT's registry")


def test_a_layer_takes_the_tensors_in_order_and_gives_one(report):
    assert report["inputs"][0] == "q context readout p weights offsets block_offsets lengths pool_addresses".split()
    assert report["shape_inputs"] == 3 * [[]]
    assert report["outputs"] == [[0, f"layer {layer}"] for layer in range(3)]


def test_the_first_layer_carries_the_kernels_and_every_layer_its_own_numbers(report, bundles):
    for layer, fields in enumerate(report["given"][:3]):
        numbers = {
            "abi": 1,
            "layer_in_pool": layer,
            "pool": 4 - layer,
            "query_heads": 4,
            "kv_heads": 2,
            "head_dim": 16,
            "tokens_per_block": 16,
            "top_k": 3,
            "positions": 16,
        }
        expected = {name: ["INT32", number] for name, number in numbers.items()}
        expected |= {"scale": ["FLOAT32", 0.25], "key_scale": ["FLOAT32", 2.0], "value_scale": ["FLOAT32", 0.5]}
        expected |= {"cache": ["CHAR", len("fp32")], "activations": ["CHAR", len("fp32")]}
        expected["kernels_checksum"] = ["INT64", checksum(bundles["fp32"])]
        if layer == 0:
            expected["kernels"] = ["UNKNOWN", len(bundles["fp32"])]
        assert fields == expected and set(fields) | {"kernels"} == set(report["field_names"])


@pytest.mark.parametrize(
    "change, error, said",
    [
        ({"layer_in_pool": 1.7}, TypeError, "layer_in_pool is a float"),
        ({"layer_in_pool": -1}, ValueError, "layer_in_pool is -1"),
        ({"pool": 2**40}, ValueError, "pool is 1099511627776"),
        ({"scale": float("nan")}, ValueError, "scale is nan"),
        ({"key_scale": 1e39}, ValueError, "key_scale is 1e"),
    ],
    ids=str,
)
def test_numbers_that_a_layer_cannot_have(change, error, said):
    plugin = ScorePlugin(ModuleType("tensorrt"), None, ScoreKernels(FP32, ("80",), b""))
    with pytest.raises(error, match=said):
        plugin.add_layer(None, name="layer", **{"layer_in_pool": 0, "scale": 1.0} | change)


def test_what_the_plugin_refuses_is_an_error_with_a_line_that_says_why(report):
    assert "could not be added as bad" in report["messages"][1]
    assert report["log"].startswith("bpkv: ") and "the kernels" in report["log"]
