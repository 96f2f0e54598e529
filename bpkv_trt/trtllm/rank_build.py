"""What a process that builds one rank of an engine needs: settings, the plugin in TensorRT, and its kernels."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from bpkv_trt.errors import BpkvError, ConfigError
from bpkv_trt.trtllm.checkpoint import Checkpoint
from bpkv_trt.trtllm.plugin_library import PluginLibrary
from bpkv_trt.trtllm.score_kernels import ScoreKernels, compile_score_kernels
from bpkv_trt.trtllm.settings import EngineSettings


@dataclass(frozen=True)
class RankBuild:
    settings: EngineSettings
    kernels: ScoreKernels

    @classmethod
    def of_this_process(cls, config: Mapping[str, Any], trt: ModuleType) -> "RankBuild":
        """As `bpkv-trtllm-build` prepared it; the plugin is registered.

        config: the model's, `PretrainedConfig.to_dict()`. trt: the module tensorrt. Raises BpkvError outside of such a
        build, and where library or kernels are not those that it was prepared with.
        """
        settings = EngineSettings.of_this_build()
        library = PluginLibrary.find()
        if library.sidecar.sha256 != settings.plugin_sha256:
            raise ConfigError(
                f"The plugin library {library.path} was replaced while the engine was built; start the build again."
            )
        library.register(trt)
        configuration = Checkpoint.of(config).kernel_configuration(settings.config)
        kernels = compile_score_kernels(configuration, settings.targets)  # those in the cache
        if kernels.checksum != settings.kernels:
            raise BpkvError(
                "The kernels that were compiled for this build are not those of this model; start the build again, "
                "and report it if that does not help."
            )
        return cls(settings, kernels)
