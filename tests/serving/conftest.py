from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from bpkv_trt.cli import main
from tests.serving.triton_server import ROOT, TritonServer

TINY = ROOT / "tests" / "assets" / "tiny-llama"
Serve = Callable[..., AbstractContextManager[TritonServer]]


@pytest.fixture(scope="module")
def serve(tritonserver: Path, tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Starts a server on a new repository; options are those of `bpkv model-repository`."""

    @contextmanager
    def started(*options: str, model: str = str(TINY), **environment: str) -> Iterator[TritonServer]:
        folder = tmp_path_factory.mktemp("server")
        assert main(["model-repository", "--output", str(folder / "models"), "--model", model, *options]) == 0
        with TritonServer(tritonserver, folder / "models", folder / "log", **environment) as server:
            yield server

    return started


@pytest.fixture
def every_page_comes_back(server: TritonServer) -> Iterator[None]:
    """After a test of a file's own `server`, to which nothing is left."""
    yield
    left = server.metrics_when("bpkv_running", 0)
    assert left["bpkv_pages_live"] == 0 and left["bpkv_queue_length"] == 0 and left["bpkv_healthy"] == 1
