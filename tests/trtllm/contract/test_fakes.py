"""The generated package has what the contract has, and refuses the rest."""

import inspect
import sys

import pytest

from tests.trtllm.contract.entries import Unknown
from tests.trtllm.contract.fakes import Fakes, implementations_of


@pytest.fixture
def fakes():
    with Fakes().installed() as installed:
        yield installed


def test_an_import_finds_the_tree_only_while_it_is_installed():
    assert "tensorrt_llm" not in sys.modules
    with Fakes().installed() as fakes:
        from tensorrt_llm.runtime.generation import GenerationSession

        assert GenerationSession is fakes["tensorrt_llm.runtime.generation.GenerationSession"]
    assert not [name for name in sys.modules if name.partition(".")[0] == "tensorrt_llm"]


@pytest.mark.parametrize(
    ("statement", "error"),
    [
        ("from tensorrt_llm.functional import embeding", ImportError),
        ("import tensorrt_llm.modules", ModuleNotFoundError),
        ("import tensorrt_llm; tensorrt_llm.functional.embeding", AttributeError),
        ("import tensorrt_llm; tensorrt_llm.functional.embeding = 1", AttributeError),
        ("from tensorrt_llm.builder import Engine; Engine.write", AttributeError),
        ("from tensorrt_llm.builder import BuildConfig; BuildConfig().max_tokens", AttributeError),
        ("from tensorrt_llm.builder import BuildConfig; BuildConfig().max_tokens = 1", AttributeError),
        ("from tensorrt_llm.functional import PositionEmbeddingType; PositionEmbeddingType.rope", AttributeError),
    ],
)
def test_a_name_that_the_contract_lacks_fails(fakes, statement, error):
    with pytest.raises(error, match="contract has no|No module named|cannot import name|^rope$|no attribute .write"):
        exec(statement)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        ("", "missing a required argument: 'layer'"),
        ("1, 2, 3", "missing a required argument: 'pfc'"),
        ("1, 2, 3, 4, 5", "too many positional arguments"),
        ("1, 2, 3, fields=4", "missing a required argument: 'pfc'"),
        ("1, 2, 3, 4, creator=5", "unexpected keyword argument 'creator'"),
        ("1, 2, 3, 4, layer=5", "multiple values for argument 'layer'"),
    ],
)
def test_arguments_that_do_not_fit_fail(fakes, arguments, what):
    from tensorrt_llm.functional import _add_plugin_info

    with pytest.raises(TypeError, match=f"tensorrt_llm.functional._add_plugin_info: .*{what}"):
        eval(f"call({arguments})", {"call": _add_plugin_info})


def test_a_misplaced_argument_fails_where_the_contract_has_keywords_only(fakes):
    from tensorrt_llm.functional import gpt_attention
    from tensorrt_llm.plugin.plugin import PluginConfig

    with pytest.raises(TypeError, match="too many positional"):
        gpt_attention("qkv", None)
    with pytest.raises(TypeError, match="gemm_pluggin"):
        PluginConfig(gemm_pluggin="auto")


def test_methods_bind_as_the_contract_says(fakes):
    from tensorrt_llm.builder import Engine

    with pytest.raises(TypeError, match="Engine.save: missing a required argument: 'engine_dir'"):
        Engine(None, None).save()
    with pytest.raises(TypeError, match="Engine.from_dir: .*unexpected keyword argument 'folder'"):
        Engine.from_dir("x", folder="y")


def test_a_function_without_behaviour_says_so(fakes):
    from tensorrt_llm.functional import cast

    with pytest.raises(NotImplementedError, match="tensorrt_llm.functional.cast"):
        cast(1, "float16")


def test_behaviour_gets_the_contracts_defaults():
    def cumsum(input, dim, prefer_plugin):
        return input, dim, prefer_plugin

    with Fakes({"tensorrt_llm.functional.cumsum": cumsum}).installed():
        from tensorrt_llm.functional import cumsum as generated

        assert generated(dim=2, input=1) == (1, 2, True)


def test_behaviour_may_take_all_arguments_by_name():
    with Fakes({"tensorrt_llm.functional.cumsum": lambda **arguments: arguments}).installed():
        from tensorrt_llm.functional import cumsum

        assert cumsum(1, 2) == {"input": 1, "dim": 2, "prefer_plugin": True}
        with pytest.raises(TypeError, match="unexpected keyword argument 'axis'"):
            cumsum(1, 2, axis=3)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda input: None,
        lambda input, type: None,
        lambda dtype, input: None,
        lambda input, dtype, extra=None: None,
        lambda input, *, dtype: None,
        lambda *given: None,
        lambda input, **arguments: None,
    ],
)
def test_behaviour_with_other_parameters_is_refused(wrong):
    with pytest.raises(TypeError, match="tensorrt_llm.functional.cast is"):
        Fakes({"tensorrt_llm.functional.cast": wrong})


@pytest.mark.parametrize("name", ["functional.cats", "builder.BuildConfig.max_input_len", "plugin"])
def test_behaviour_for_what_the_contract_lacks_is_refused(name):
    with pytest.raises(TypeError, match="the contract has no"):
        Fakes({f"tensorrt_llm.{name}": lambda: None})


def test_properties_take_properties():
    class Tensor:
        def _get(self):
            return self._name

        def _set(self, name):
            self._name = name

        name = property(_get, _set)

    with Fakes(implementations_of("tensorrt_llm.functional.Tensor", Tensor)).installed():
        from tensorrt_llm.functional import Tensor as generated

        tensor = generated.__new__(generated)
        tensor.name = "x"
        assert tensor.name == "x"
    with pytest.raises(TypeError, match="a property with a setter"):
        Fakes({"tensorrt_llm.functional.Tensor.name": property(lambda self: 1)})


def test_a_constructors_arguments_become_attributes_of_the_contract(fakes):
    from tensorrt_llm.layers import AttentionParams
    from tensorrt_llm.models.modeling_utils import PretrainedConfig

    assert AttentionParams(sequence_length=3).sequence_length == 3
    with pytest.raises(AttributeError, match="the contract has no .*AttentionParams.lengths to set"):
        AttentionParams().lengths = 3
    config = PretrainedConfig(
        architecture="A", dtype="float16", hidden_size=1, num_hidden_layers=1, num_attention_heads=1, rotary_base=5.0
    )
    assert (config.dtype, config.norm_epsilon, config.rotary_base) == ("float16", 1e-05, 5.0)
    config.bpkv = {}  # takes any name, as TensorRT-LLM's does
    with pytest.raises(AttributeError, match="contract has no"):
        config.rotary_scaling  # noqa: B018


def test_fields_have_the_contracts_defaults(fakes):
    from tensorrt_llm.builder import BuildConfig
    from tensorrt_llm.runtime.generation import ModelConfig

    assert BuildConfig(max_seq_len=7).max_seq_len == 7
    assert BuildConfig().max_num_tokens == 8192
    assert isinstance(BuildConfig().lora_config, Unknown)
    with pytest.raises(TypeError, match="missing a required"):
        ModelConfig(max_batch_size=1)


def test_subclasses_are_free_and_inherit_the_contract(fakes):
    from tensorrt_llm.models import MODEL_MAP

    class Ours(MODEL_MAP["LlamaForCausalLM"]):
        pass

    model = Ours.__new__(Ours)
    model.ours = 1
    assert model.ours == 1
    assert list(inspect.signature(Ours.forward).parameters)[:3] == ["self", "input_ids", "position_ids"]
    with pytest.raises(TypeError, match="DecoderModelForCausalLM.forward: .*'scores'"):
        model.forward(None, scores=1)


def test_an_instance_may_change_to_a_subclass(fakes):
    from tensorrt_llm.layers import Attention

    class Ours(Attention):
        pass

    attention = Attention(local_layer_idx=0, hidden_size=8, num_attention_heads=2)
    attention.__class__ = Ours
    assert attention.local_layer_idx == 0


def test_enumerations_have_the_contracts_numbers(fakes):
    from tensorrt_llm.functional import PositionEmbeddingType
    from tensorrt_llm.quantization import QuantMode

    assert PositionEmbeddingType(2) is PositionEmbeddingType.rope_gpt_neox
    assert QuantMode.INT8_KV_CACHE | QuantMode.FP8_QDQ == 64 + 256
    with pytest.raises(NotImplementedError):
        PositionEmbeddingType.alibi.is_rope()


def test_a_module_global_may_be_replaced_for_a_while(fakes):
    import tensorrt_llm.layers.attention as attention

    stock = attention.gpt_attention
    attention.gpt_attention = len
    assert attention.gpt_attention is len
    attention.gpt_attention = stock
    assert attention.gpt_attention is stock


def test_unverified_names_that_the_package_uses_are_reported():
    def use(source: str, user: str) -> set[str]:
        with Fakes().installed() as fakes:
            exec(source, {"__name__": user})
        return fakes.unverified

    source = "from tensorrt_llm.functional import concat; from tensorrt_llm._common import default_net"
    assert use(source, "bpkv_trt.trtllm.example") == {"tensorrt_llm.functional.concat"}
    assert use(source, "tests.example") == set()
    source = "import tensorrt_llm.functional as f; f.Tensor.__new__(f.Tensor).shape"
    with pytest.raises(NotImplementedError):
        use(source, "bpkv_trt.trtllm.example")


def test_every_entry_has_a_place():
    fakes = Fakes()
    assert len(fakes.entries) > 600 and "--model_cls_file" in fakes.options
    for entry in fakes.entries:
        if entry.owner and entry.kind in ("method", "classmethod", "staticmethod", "property"):
            assert hasattr(fakes[f"{entry.module}.{entry.owner}"], entry.short), entry
        elif not entry.owner:
            assert entry.name in fakes.modules[entry.module].members, entry
    assert fakes.unverified == set()
