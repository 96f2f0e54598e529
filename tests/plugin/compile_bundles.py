"""Compile the kernels of every configuration that these tests have, for two targets at most, into a folder.

A process of its own: the tests themselves run where kernels are interpreted.
"""

import sys
from pathlib import Path

from bpkv_trt.trtllm.score_kernels import compile_score_kernels
from bpkv_trt.trtllm.session_kernels import compile_session_kernels
from bpkv_trt.trtllm.sidecar import KERNELS
from tests.plugin.configurations import CONFIGURATIONS, SESSIONS, TARGETS

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for name, configuration in CONFIGURATIONS.items():
        kernels = compile_score_kernels(configuration, TARGETS[name], folder / "cache")
        (folder / f"{name}.bundle").write_bytes(kernels.bundle)
    for name, configuration in SESSIONS.items():
        kernels = compile_session_kernels(configuration, ["90a"], folder / "session_cache")
        kernels.write(folder)
        (folder / KERNELS).rename(folder / f"{name}.kernels")
