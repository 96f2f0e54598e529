"""Model classes that networks with BP-KV are built from, by the architecture that a checkpoint names."""

from typing import Any

import tensorrt
from tensorrt_llm.models import LLaMAForCausalLM

from bpkv_trt.trtllm.rank_build import RankBuild

CLASSES = {"LlamaForCausalLM": "BpkvLlamaForCausalLM", "MistralForCausalLM": "BpkvLlamaForCausalLM"}


class BpkvLlamaForCausalLM(LLaMAForCausalLM):  # type: ignore[misc]
    def __init__(self, config: Any) -> None:
        build = RankBuild.of_this_process(config.to_dict(), tensorrt)
        config.bpkv = build.settings.document()
        super().__init__(config)
