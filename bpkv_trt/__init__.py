"""Behavior-preserving KV-cache compression: evict only what the model's own next-token distribution does not miss."""

from pathlib import Path

__version__ = "0.1.0"


def get_library_path() -> Path:
    """Where the TensorRT plugin's library is, checked against its sidecar: for LD_PRELOAD, or trtexec --dynamicPlugins.

    Raises BpkvError where there is none, where it was changed or is damaged, or where it is of another version.
    """
    from bpkv_trt.trtllm.plugin_library import PluginLibrary

    return PluginLibrary.find().path
