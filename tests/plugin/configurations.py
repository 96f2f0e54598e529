"""Small models whose kernels are compiled once for all tests of the plugin."""

from dataclasses import replace

import torch

from bpkv_trt.kernels.configuration import KernelConfiguration
from bpkv_trt.kernels.paged import CacheType

FP32 = KernelConfiguration(
    query_heads=4,
    kv_heads=2,
    head_dim=16,
    page_size=16,
    cache=CacheType.FP32,
    activations=torch.float32,
    shared_pages=True,
    positions=16,
    channels=3,
)
CONFIGURATIONS = {
    "fp32": FP32,
    "fp16": replace(FP32, cache=CacheType.FP16, activations=torch.float16, positions=4, query_heads=6),
    "bf16": replace(FP32, cache=CacheType.BF16, activations=torch.bfloat16, positions=4, softcap=5.0),
    "fp8": replace(FP32, cache=CacheType.FP8, activations=torch.bfloat16, positions=4, page_size=32),
    "int8": replace(FP32, cache=CacheType.INT8, activations=torch.float16, positions=4, head_dim=32),
    "probes": replace(FP32, positions=4, channels=2, probes=True),
}
SESSION = replace(FP32, query_heads=6, page_size=8, positions=4, channels=12)  # of the sequences of the core's tests
SESSIONS = {
    "logits": SESSION,
    "probes": replace(SESSION, positions=3, probes=True, cache=CacheType.FP8, activations=torch.bfloat16),
}
TARGETS = {name: ("80", "90a") if name == "fp32" else ("90a",) for name in CONFIGURATIONS}
