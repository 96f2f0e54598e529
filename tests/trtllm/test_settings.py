"""Settings of an engine: what it can have, and that they come back as they were."""

import json
from pathlib import Path

import pytest

from bpkv_trt.config import BpkvConfig
from bpkv_trt.errors import BpkvError, ConfigError, InputError
from bpkv_trt.trtllm.settings import VARIABLE, EngineSettings, for_engine


def settings(**options: object) -> EngineSettings:
    return EngineSettings(
        config=for_engine(BpkvConfig(**options)),
        targets=("90a",),
        plugin_abi=1,
        plugin_sha256="0f" * 32,
        kernels=-(2**63),
    )


def test_what_an_engine_can_only_have_is_its_default() -> None:
    config = for_engine(BpkvConfig())
    assert (config.scope, config.readout, config.lookahead, config.rehearsal) == ("head", "direct", 0, 0)
    assert config.budget == BpkvConfig().budget and config.regime == BpkvConfig().regime


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"scope": "global"}, ["scope is global", "one length for all heads", "give head, or leave it out"]),
        ({"scope": "layer"}, ["scope is layer", "every head keeps the same number"]),
        ({"readout": "exact"}, ["readout is exact", "cannot be differentiated", "give direct"]),
        ({"probes": 8}, ["probes is 8", "leave it out"]),
        ({"lookahead": 32}, ["lookahead is 32", "take back tokens"]),
        ({"rehearsal": 512}, ["rehearsal is 512", "For an engine give 0"]),
        ({"policy": "snapkv"}, ["policy is snapkv", "give bpkv"]),
        ({"layer_table": "table.json"}, ["layer_table is table.json", "every layer keeps the same number"]),
        ({"interval": 7}, ["interval is 7", "last 8 positions", "as they pass: give interval 8"]),
        (
            {"interval": 12, "regime": "deferred,generation", "defer": 5},
            ["interval is 12 and defer is 5", "give interval 13"],
        ),
    ],
    ids=str,
)
def test_what_an_engine_cannot_have_is_refused_by_name(options: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        for_engine(BpkvConfig(**options))
    assert all(word in str(refused.value) for word in words), refused.value
    given = {**for_engine(BpkvConfig()).model_dump(), **options}
    with pytest.raises(ConfigError, match=str(next(iter(options)))):  # however they are made
        EngineSettings(config=given, targets=("80",), plugin_abi=1, plugin_sha256="0" * 64, kernels=1)


def test_an_interval_that_holds_the_positions_is_an_engines() -> None:
    """Defer and interval as they meet: at 21 and then at 24 tokens there are 3 between."""
    for options in ({"interval": 8}, {"interval": 4, "regime": "prefill"}):
        for_engine(BpkvConfig(**options))
    shared = {"regime": "deferred,generation", "defer": 21, "recent": 40}
    for_engine(BpkvConfig(**shared, interval=8, positions=3))
    with pytest.raises(ConfigError, match="give interval 9"):
        for_engine(BpkvConfig(**shared, interval=8, positions=4))


def test_they_come_back_from_json_as_they_were() -> None:
    one = settings(budget="20%", regime="deferred,generation", positions=4, defer=3, epsilon=0.1)
    document = json.loads(json.dumps(one.document()))
    assert EngineSettings.from_document(document, "here") == one
    assert document["config"]["budget"] == "20%" and document["config"]["regime"] == ["deferred", "generation"]
    assert document["kernels"] == -(2**63)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema_version": 2}, r"settings in here are of version 2, .* reads 1: build the engine again"),
        ({"kernels": "many"}, r"settings in here are damaged \(kernels: "),
        ({"plugin_sha256": "0f"}, r"damaged \(plugin_sha256: "),
        ({"targets": []}, r"damaged \(targets: "),
        ({"more": 1}, r"damaged \(more: "),
        ({"config": {"budget": "2"}}, r"damaged \(budget is '2', a fraction above 1"),
        ({"config": {"scope": "layer"}}, r"damaged \(scope is layer, which an engine cannot have"),
    ],
    ids=str,
)
def test_what_another_version_wrote_or_nobody_is_refused(change: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        EngineSettings.from_document({**settings().document(), **change}, "here")
    with pytest.raises(InputError, match="of version None"):
        EngineSettings.from_document(None, "here")


def test_the_processes_of_a_build_find_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(BpkvError, match="BPKV_BUILD_CONFIG is not set: .* `bpkv-trtllm-build --plugin bpkv`"):
        EngineSettings.of_this_build()
    path = tmp_path / "settings.json"
    monkeypatch.setenv(VARIABLE, str(path))
    with pytest.raises(InputError, match="settings.json does not exist; check the path given to BPKV_BUILD_CONFIG"):
        EngineSettings.of_this_build()
    path.write_text("{")
    with pytest.raises(InputError, match="settings.json are no JSON; start the build again"):
        EngineSettings.of_this_build()
    path.write_text(json.dumps(settings(top_k=16).document()))
    assert EngineSettings.of_this_build() == settings(top_k=16)


def test_a_runtime_changes_what_is_not_compiled_in() -> None:
    built = settings(positions=8, top_k=32, budget="0.2")
    assert str(built.configured(budget="0.5", positions=4, interval=64).budget) == "0.5"
    assert built.configured() == built.config
    for options, said in (
        ({"positions": 9, "recent": 64}, "positions is 9, and the engine was built for at most 8"),
        (
            {"regime": "deferred", "defer": 4},
            r"regime is deferred, .* positions \+ defer, 8 \+ 4, .* at most 8 together: give fewer positions or a "
            "smaller defer, or build an engine with --bpkv_regime deferred --bpkv_defer 4",
        ),
        ({"top_k": 16}, "top_k is 16, and the engine was built for 32"),
        ({"page_size": 64}, "page_size is 64, and the engine was built for 32"),
        ({"scope": "layer"}, "scope is layer, which an engine cannot have"),
    ):
        with pytest.raises(ConfigError, match=said):
            built.configured(**options)


def test_an_engine_is_deferred_within_what_it_was_built_for() -> None:
    """Positions and defer share what there are kernels for: more of one for less of the other."""
    assert settings(positions=8).configured(regime="deferred", positions=5, defer=3).scoring_positions == 8
    built = settings(positions=8, regime="deferred", defer=4)
    assert built.configured(positions=2, defer=10).scoring_positions == 12
    with pytest.raises(
        ConfigError, match=r"2 \+ 11, .* at most 12 together: .* --bpkv_regime deferred --bpkv_defer 11"
    ):
        built.configured(positions=2, defer=11)
    assert settings(positions=8, regime="deferred", defer=11).configured(positions=2).defer == 11, "as advised"
