"""`bpkv openai-front` before a server, in a process of its own."""

import os
import re
import subprocess
import sys
from types import TracebackType
from typing import IO

from tests.serving.triton_server import ROOT


class Front:
    """Listens on a free port of this machine until the end of the `with` block."""

    def __init__(self, grpc_port: int, model: str = "bpkv", log: IO[bytes] | None = None) -> None:
        """log: the file that errors are printed to; None: where the tests print theirs."""
        self.model = model
        command = ["openai-front", "--server", f"127.0.0.1:{grpc_port}", "--port", "0", "--model-name", model]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "bpkv_trt", *command],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def __enter__(self) -> "Front":
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        found = re.match(r"Listening on http://127\.0\.0\.1:(\d+)/v1, for the server at ", said)
        assert found, f"it did not start: {said}"
        self.port = int(found[1])
        return self

    @property
    def url(self) -> str:
        """What clients of OpenAI's API call their base URL."""
        return f"http://127.0.0.1:{self.port}/v1"

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.process.terminate()
        self.process.wait(60)
        assert self.process.stdout is not None
        self.process.stdout.close()
