"""The server of HTTP."""

import signal
from types import FrameType

import uvicorn
from fastapi import FastAPI

EXIT_TIMEOUT_S = 30  # that running answers get after SIGTERM or the first Ctrl-C


class HttpServer(uvicorn.Server):
    """uvicorn's; a second Ctrl-C ends the process at once, as one ends a program that does nothing about it."""

    def __init__(self, app: FastAPI) -> None:
        super().__init__(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=EXIT_TIMEOUT_S))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
