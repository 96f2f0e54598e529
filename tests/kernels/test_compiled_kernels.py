"""Compiled kernels on a GPU, through CUDA's own driver, beside Triton's launches; tests/plugin has what needs none."""

from pathlib import Path

import pytest
import torch

from bpkv_trt.kernels.aot import TARGETS
from bpkv_trt.kernels.compiled_kernels import CompiledKernels
from bpkv_trt.kernels.launch import launched_by
from bpkv_trt.kernels.target import choose_target
from bpkv_trt.trtllm.session_kernels import compile_session_kernels
from tests.plugin.configurations import SESSION
from tests.plugin.session_calls import call_all


def test_a_gpu_runs_them_as_it_runs_tritons(device: torch.device, tmp_path: Path) -> None:
    if device.type != "cuda":
        pytest.skip("needs a GPU, and TRITON_INTERPRET=0")
    pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")
    target = choose_target(TARGETS, torch.cuda.get_device_capability(device))
    assert target is not None, "kernels are compiled for no such GPU"
    compile_session_kernels(SESSION, [target], tmp_path).write(tmp_path / "kernels")
    expected = call_all("cuda")
    kernels = CompiledKernels.read(tmp_path / "kernels")
    stream = torch.cuda.Stream()
    with launched_by(kernels):
        ours = call_all("cuda")
        with torch.cuda.stream(stream):
            beside = call_all("cuda")
    stream.synchronize()
    for one, other, truth in zip(ours, beside, expected, strict=True):
        assert torch.equal(one, other)
        torch.testing.assert_close(one, truth, rtol=1e-5, atol=1e-6)
