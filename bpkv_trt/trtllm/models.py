"""TensorRT-LLM's model classes with scores in their networks; `trtllm-build` takes one by --model_cls_name.

Importing this module imports TensorRT-LLM. Classes are of the module, so that other processes of a build unpickle them.
"""

import inspect
from typing import Any

import tensorrt as trt
from tensorrt_llm._common import default_net, default_trtnet
from tensorrt_llm.functional import Tensor
from tensorrt_llm.models import MODEL_MAP

from bpkv_trt.errors import BpkvError
from bpkv_trt.trtllm.checkpoint import Checkpoint
from bpkv_trt.trtllm.collectives import ranks_of
from bpkv_trt.trtllm.conflicts import CONFLICTS, refuse_conflicts
from bpkv_trt.trtllm.coverage import check_attention, check_inputs, check_prepared
from bpkv_trt.trtllm.network_record import KEY
from bpkv_trt.trtllm.plugin import ScorePlugin
from bpkv_trt.trtllm.plugin_library import PluginLibrary
from bpkv_trt.trtllm.score_kernels import compile_score_kernels
from bpkv_trt.trtllm.scored_network import ScoredNetwork, rotary_table
from bpkv_trt.trtllm.scoring_inputs import ScoringInputs, most_rows
from bpkv_trt.trtllm.settings import EngineSettings

Llama: Any = MODEL_MAP["LlamaForCausalLM"]
Mistral: Any = MODEL_MAP["MistralForCausalLM"]
Qwen2: Any = MODEL_MAP["Qwen2ForCausalLM"]
Qwen3: Any = MODEL_MAP["Qwen3ForCausalLM"]


class BpkvNetwork:
    """Comes before a DecoderModelForCausalLM among the bases of a class; the engine's settings are `config.bpkv`."""

    config: Any
    transformer: Any

    def __init__(self, config: Any) -> None:
        """Settings are the checkpoint's own, in its `bpkv`, or those of the build that this process belongs to.

        Raises ModelError for a checkpoint that is not covered, BpkvError where there are no settings.
        """
        Checkpoint.of(config.to_dict())
        given = getattr(config, "bpkv", None)
        settings = EngineSettings.of_this_build() if given is None else _settings(config)
        config.bpkv = settings.document()
        super().__init__(config)  # type: ignore[call-arg]

    def prepare_inputs(self, *args: Any, **options: Any) -> dict[str, Any]:
        """The stock inputs of the network under construction, and ours. ConfigError for what BP-KV cannot go with."""
        stock = super().prepare_inputs  # type: ignore[misc]
        given = inspect.signature(stock).bind(*args, **options).arguments
        settings, plugins = _settings(self.config), default_net().plugin_config
        refuse_conflicts({name: getattr(plugins, name) for name in CONFLICTS if hasattr(plugins, name)})
        for layer, module in enumerate(self.transformer.layers):
            check_attention(layer, module.attention)
        check_inputs(given, len(rotary_table(self)))
        inputs: dict[str, Any] = stock(*args, **options)
        check_prepared(inputs, plugins.tokens_per_block, settings.config.page_size)
        return inputs | self._scoring_inputs(given["max_batch_size"], given["max_num_tokens"])._asdict()

    def _scoring_inputs(self, sequences: int, tokens: int) -> ScoringInputs:
        options, config = _settings(self.config).config, self.config
        rows = most_rows(
            sequences=sequences,
            positions=options.positions,
            tokens=tokens,
            logits=config.vocab_size // config.mapping.tp_size,
            readout=options.top_k * config.hidden_size,
        )
        return ScoringInputs.declare(Tensor, trt, sequences=sequences, positions=options.positions, rows=rows)

    def forward(self, **inputs: Any) -> Any:
        """Add the stock network, scores of every layer, and their outputs (see `ScoredNetwork`)."""
        scoring = ScoringInputs(*(inputs.pop(name) for name in ScoringInputs._fields))
        network = ScoredNetwork(self, score_plugin(self.config), scoring, inputs)
        with network.build_stock():
            outputs = super().forward(**inputs)  # type: ignore[misc]
        network.add_scores(ranks_of(self.config.mapping))
        setattr(self.config, KEY, network.record().document())  # which the engine's configuration is written from
        return outputs


class BpkvLlamaForCausalLM(BpkvNetwork, Llama):  # type: ignore[misc]
    pass


class BpkvMistralForCausalLM(BpkvNetwork, Mistral):  # type: ignore[misc]
    pass


class BpkvQwen2ForCausalLM(BpkvNetwork, Qwen2):  # type: ignore[misc]
    pass


class BpkvQwen3ForCausalLM(BpkvNetwork, Qwen3):  # type: ignore[misc]
    pass


CLASSES = {
    "LlamaForCausalLM": BpkvLlamaForCausalLM.__name__,
    "MistralForCausalLM": BpkvMistralForCausalLM.__name__,
    "Qwen2ForCausalLM": BpkvQwen2ForCausalLM.__name__,
    "Qwen3ForCausalLM": BpkvQwen3ForCausalLM.__name__,
}


def score_plugin(config: Any) -> ScorePlugin:
    """The plugin for the network under construction, in TensorRT's registry, with kernels for this rank.

    Raises BpkvError for a library or kernels other than those that the build began with.
    """
    settings = _settings(config)
    library = PluginLibrary.find()
    if library.sidecar.sha256 != settings.plugin_sha256:
        raise BpkvError(
            f"The plugin library {library.path} is not the one that this build began with; it was replaced meanwhile. "
            "Start the build again."
        )
    library.register(trt)
    configuration = Checkpoint.of(config.to_dict()).kernel_configuration(settings.config)
    kernels = compile_score_kernels(configuration, settings.targets)
    if kernels.checksum != settings.kernels:
        raise BpkvError(
            "The kernels compiled for this rank are not those that the build began with: the checkpoint's "
            "configuration or the installed Triton changed meanwhile. Start the build again."
        )
    return ScorePlugin(trt, default_trtnet(), kernels)


def _settings(config: Any) -> EngineSettings:
    return EngineSettings.from_document(config.bpkv, "the checkpoint's configuration (bpkv)")
