"""TensorRT-LLM's model classes with scores in their networks, by the architecture that a checkpoint names."""

from typing import Any

import tensorrt as trt
from tensorrt_llm._common import default_trtnet
from tensorrt_llm.models import MODEL_MAP

from bpkv_trt.errors import BpkvError
from bpkv_trt.trtllm.checkpoint import Checkpoint
from bpkv_trt.trtllm.plugin import ScorePlugin
from bpkv_trt.trtllm.plugin_library import PluginLibrary
from bpkv_trt.trtllm.score_kernels import compile_score_kernels
from bpkv_trt.trtllm.settings import EngineSettings

CLASSES = {"LlamaForCausalLM": "BpkvLlamaForCausalLM"}
Llama: Any = MODEL_MAP["LlamaForCausalLM"]


class BpkvLlamaForCausalLM(Llama):  # type: ignore[misc]
    def __init__(self, config: Any) -> None:
        config.bpkv = EngineSettings.of_this_build().document()
        super().__init__(config)


def score_plugin(config: Any) -> ScorePlugin:
    settings = EngineSettings.from_document(config.bpkv, "the checkpoint's configuration (bpkv)")
    library = PluginLibrary.find()
    if library.sidecar.sha256 != settings.plugin_sha256:
        raise BpkvError("The plugin library was replaced; start the build again.")
    library.register(trt)
    configuration = Checkpoint.of(config.to_dict()).kernel_configuration(settings.config)
    kernels = compile_score_kernels(configuration, settings.targets)
    if kernels.checksum != settings.kernels:
        raise BpkvError("The kernels are others; start the build again.")
    return ScorePlugin(trt, default_trtnet(), kernels)
