"""Plugins of one process: what they share, on which device they run, and what happens where that fails."""

import random
import threading

import pytest
import torch

from tests.plugin.configurations import CONFIGURATIONS
from tests.plugin.host import RUNTIME
from tests.plugin.scored_layers import ScoredLayers
from tests.plugin.test_scores import UNEQUAL, assert_scores, built

KERNELS = 4  # of one target
UNSUPPORTED = (7, 5)


@pytest.fixture(scope="module")
def layers():
    torch.manual_seed(0)
    return ScoredLayers.random(CONFIGURATIONS["bf16"], *UNEQUAL, layers=3)


def refused(plugin, inputs):
    """Whether an enqueue ends with an error."""
    output = torch.full(plugin.output_shape(inputs), torch.nan)
    workspace = torch.empty(plugin.workspace_bytes(inputs, output) // 4)
    return plugin.enqueue(inputs, output, workspace) != 0 and bool(output.isnan().all())


@pytest.mark.parametrize("seed", range(3))
def test_layers_share_kernels_in_whatever_order_they_are_destroyed(host, bundles, driver, layers, seed):
    plugins = [built(host, bundles["bf16"], layers, layer, carried=layer == 1) for layer in (1, 0, 2)]
    plugins += [plugins[1].clone(), plugins[0].clone()]
    order = random.Random(seed).sample(range(5), 5)
    of = (1, 0, 2, 0, 1)
    for place in order:
        assert_scores(layers, of[place], plugins[place].run(layers.inputs(of[place])))
        assert driver.count("loads") == driver.count("live") == KERNELS
        plugins[place].destroy()
    assert driver.count("live") == 0


def test_plugins_of_an_engine_that_is_being_built_launch_nothing(host, bundles, driver, layers):
    plugin = host.create(layers.fields(0, bundles["bf16"], carried=True))
    clone = plugin.clone()
    attached = clone.attach()
    for each in (plugin, clone, attached):
        assert each.run(layers.inputs(0)).isnan().all()
        each.destroy()
    assert driver.launched == [] and driver.count("loads") == 0


def test_two_threads_on_two_devices_score_at_once(host, bundles, driver):
    layers = ScoredLayers.random(CONFIGURATIONS["fp32"], *UNEQUAL, layers=2)
    driver.c.stand_in_set_capability(1, 8, 9)
    plugins = [built(host, bundles["fp32"], layers, 0), built(host, bundles["fp32"], layers, 1, carried=False)]
    scores = {}

    def work(device):
        driver.c.stand_in_set_device(device)
        for turn in range(2):
            scores[device, turn] = plugins[device].run(layers.inputs(device))

    threads = [threading.Thread(target=work, args=(device,)) for device in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for (device, _), result in scores.items():
        assert_scores(layers, device, result)
    assert len(scores) == 4 and {each.device for each in driver.launched} == {0, 1}
    # The target of the other device is another cubin: sm_90a asks for more shared memory than sm_80 here.
    shared = {device: {each.shared_bytes for each in driver.launched if each.device == device} for device in range(2)}
    assert shared[0] != shared[1] and driver.count("loads") == 2 * 6
    for plugin in plugins:
        plugin.destroy()


def test_a_device_that_no_kernels_are_for_is_named_with_the_targets_that_are_there(
    host, bundles, driver, layers, capfd
):
    plugin = built(host, bundles["bf16"], layers, 0)
    driver.c.stand_in_set_capability(0, *UNSUPPORTED)
    assert refused(plugin, layers.inputs(0)) and driver.launched == []
    line = capfd.readouterr().err
    assert line.startswith("bpkv: ") and "7.5" in line and "90a" in line
    plugin.destroy()


def test_kernels_that_nobody_carries(host, bundles, driver, layers, capfd):
    carrier = host.create(layers.fields(0, bundles["bf16"], carried=True))
    fields = [field for field in carrier.fields() if field.name != "kernels"]
    carrier.destroy()
    plugin = host.create(fields, RUNTIME)
    assert plugin is not None, "engines are read layer by layer, in any order"
    inputs = layers.inputs(0)
    output = torch.full(plugin.output_shape(inputs), torch.nan)
    assert plugin.enqueue(inputs, output, torch.empty(10**6)) != 0 and output.isnan().all()
    assert "no layer carries the kernels" in capfd.readouterr().err
    plugin.destroy()


@pytest.mark.parametrize("function", ["cuLibraryLoadData", "cuLibraryGetKernel", "cuLaunchKernel", "cuCtxGetDevice"])
def test_what_the_driver_refuses_is_an_error_of_this_step_alone(host, bundles, driver, layers, capfd, function):
    plugin = built(host, bundles["bf16"], layers, 0)
    driver.c.stand_in_fail(function.encode(), 700)
    assert refused(plugin, layers.inputs(0))
    assert f"{function} failed with error 700" in capfd.readouterr().err
    driver.c.stand_in_fail(function.encode(), 0)
    assert_scores(layers, 0, plugin.run(layers.inputs(0)))
    plugin.destroy()


def test_kernels_of_another_model_are_refused(host, bundles, driver, layers, capfd):
    assert host.create(layers.fields(0, bundles["fp8"], carried=True)) is None
    assert "bpkv: " in capfd.readouterr().err
    damaged = bytearray(bundles["bf16"])
    damaged[len(damaged) // 2] ^= 1
    fields = layers.fields(0, bundles["bf16"], carried=True)
    fields[-1].data = bytes(damaged)
    assert host.create(fields, RUNTIME) is None
    assert "damaged" in capfd.readouterr().err


def test_another_version_of_the_plugin_is_not_there(host):
    assert host.creator(version="1") and not host.creator(version="2") and not host.creator(namespace="tensorrt_llm")
