"""Progress on a terminal, and none elsewhere."""

import io

from rich.console import Console

from bpkv_trt.progress import progress_on


def written(terminal: bool) -> str:
    stream = io.StringIO()
    with progress_on(Console(file=stream, force_terminal=terminal, width=80)) as progress:
        progress.advance()  # before any stage: nothing to advance
        progress.stage("prefill", total=2)
        progress.advance(2)
        progress.stage("decode")
        progress.advance()
    return stream.getvalue()


def test_a_terminal_sees_the_stages_and_a_pipe_nothing() -> None:
    assert written(terminal=False) == ""
    assert "decode" in written(terminal=True)
