"""Scores of the plugin, from creation through NVIDIA's registry to the kernels' work, are the core's."""

import pytest
import torch

from bpkv_trt.kernels.launch import recorded
from bpkv_trt.kernels.lse import log_sum_exp
from bpkv_trt.kernels.paged import PagedCache
from bpkv_trt.kernels.score import singleton_scores
from tests.plugin.configurations import CONFIGURATIONS
from tests.plugin.host import DATA_TYPES, RUNTIME
from tests.plugin.scored_layers import ScoredLayers

UNEQUAL = [40, 17, 90, 33], [3, 0, 4, 1]  # rows and scoring positions of four sequences


def built(host, bundle, layers, layer, *, carried=True):
    """The plugin of a layer as an execution context has it: built, serialized, made again, attached."""
    first = host.create(layers.fields(layer, bundle, carried=carried))
    inputs = layers.inputs(layer)
    output = torch.empty(first.output_shape(inputs))
    assert first.supports(inputs, output) and first.output_type(inputs) == DATA_TYPES[torch.float32]
    assert first.configure(inputs, output) == 0
    fields = first.fields()
    first.destroy()
    again = host.create(fields, RUNTIME)
    attached = again.attach()
    again.destroy()
    return attached


def assert_scores(layers, layer, scores):
    expected, allowed = layers.truth(layer, scores.shape[2])
    error = (scores.double() - expected).abs()
    assert expected.any() and (scores[expected == 0] == 0).all()
    assert (error <= 1e-5 * expected.amax(-1, keepdim=True)).all()
    assert (error <= allowed).all(), f"{(error / allowed)[allowed > 0].max():.1f} times the error of fp32"


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_every_cache_and_both_readouts_score_as_the_core_does(host, bundles, driver, name):
    layers = ScoredLayers.random(CONFIGURATIONS[name], *UNEQUAL, layers=2)
    first = built(host, bundles[name], layers, 0)
    second = built(host, bundles[name], layers, 1, carried=False)
    for layer, plugin in ((1, second), (0, first)):
        assert_scores(layers, layer, plugin.run(layers.inputs(layer)))
        plugin.destroy()
    assert [each.kernel for each in driver.launched] == 2 * [
        "partial_log_sum_exp",
        "combined_log_sum_exp",
        "read_context",
        "score_entries",
    ]


def test_one_plugin_follows_the_shapes_of_its_steps(host, bundles, driver):
    prompt = ScoredLayers.random(CONFIGURATIONS["fp32"], [70, 50], [16, 9])
    plugin = built(host, bundles["fp32"], prompt, 0)
    for lengths, counts in (
        ([70, 50], [16, 9]),
        ([71, 51, 20], [1, 1, 1]),
        ([600], [1]),
        ([30, 40], [0, 2]),
        ([60, 9, 9, 9], [16, 1, 1, 0]),
    ):
        step = ScoredLayers.random(CONFIGURATIONS["fp32"], lengths, counts)
        # The scale is a field.
        for each in step.attended:
            each.options["scale"] = prompt.attended[0].options["scale"]
        assert_scores(step, 0, plugin.run(step.inputs(0)))
    plugin.destroy()
    blocks = [each.constants["BLOCK"] for each in driver.launched if each.kernel == "score_entries"]
    assert blocks == ["16", "8", "8", "8", "8"], "as many positions at a time as a sequence has on average"


def test_without_scoring_rows_nothing_is_launched_and_nothing_comes_out(host, bundles, driver):
    layers = ScoredLayers.random(CONFIGURATIONS["fp32"], *UNEQUAL)
    plugin = built(host, bundles["fp32"], layers, 0)
    inputs = layers.inputs(0)
    none = [tensor[:0] for tensor in inputs[:5]] + [torch.zeros_like(inputs[5])] + inputs[6:]
    assert plugin.output_shape(none) == (4, 2, 0)
    plugin.run(none)
    plugin.destroy()
    assert driver.launched == [] and driver.count("loads") == 0


@pytest.mark.parametrize("lengths, count", [([70, 50], 16), ([600, 900, 700], 1), ([2000], 3)])
def test_launches_are_those_of_the_launchers_in_python(host, bundles, driver, lengths, count):
    configuration = CONFIGURATIONS["fp32"]
    layers = ScoredLayers.random(configuration, lengths, [count] * len(lengths))
    plugin = built(host, bundles["fp32"], layers, 0)
    driver.only_records = True
    inputs = layers.inputs(0)
    plugin.run(inputs)
    plugin.destroy()
    expected = recorded_by_python(layers, len(lengths), count)
    assert len(driver.launched) == len(expected) == 4
    for done, wanted in zip(driver.launched, expected, strict=True):
        assert done.kernel == wanted.kernel.fn.__name__ and done.threads == 32 * wanted.warps
        numbers = {
            name: value for name, value in zip(wanted.kernel.arg_names, wanted.arguments, strict=False)
            if isinstance(value, int | float)
        }  # fmt: skip
        given = {name: done.arguments[name] for name in numbers}
        # Python knows how many positions a sequence has; the plugin only that it has no more than there are rows.
        at_once = -(-min(configuration.positions, len(inputs[0])) // int(done.constants.get("BLOCK", 1)))
        grid = wanted.grid + (1,) * (3 - len(wanted.grid))
        if "blocks" in numbers:
            grid = (grid[0] // numbers["blocks"] * at_once, *grid[1:])
            numbers["blocks"] = at_once
        assert given == pytest.approx(numbers, rel=1e-7) and done.grid == grid


def recorded_by_python(layers, sequences, count):
    """What `log_sum_exp` and `singleton_scores` launch for the same sequences."""
    configuration, given, attended = layers.configuration, layers.readings[0], layers.attended[0]
    cache = PagedCache(
        torch.zeros(2, dtype=torch.int64),
        layers.block_offsets[1, :, :1],
        layers.block_offsets[1, :, 1:],
        layers.lengths.unsqueeze(1).expand(-1, configuration.kv_heads),
        configuration.cache,
        configuration.page_size,
        configuration.head_dim,
        first_page=2,
        shared_pages=True,
    )
    options = {"scale": attended.options["scale"], "positions": count}
    with recorded() as launches:
        lse = log_sum_exp(attended.q, attended.offsets, cache, **options)
        longest = layers.block_offsets.shape[-1] * configuration.page_size
        singleton_scores(
            **{name: given[name] for name in ("q", "context", "readout", "p", "weights")},
            offsets=attended.offsets,
            cache=cache,
            lse=lse,
            longest=longest,
            **options,
        )
    return launches
