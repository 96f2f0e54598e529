"""The options of `bpkv openai-front`."""

import argparse
import os
import re
import socket

from rich.console import Console

from bpkv_trt.errors import ConfigError, quoted
from bpkv_trt.model_repository import MODEL_NAME
from bpkv_trt.options import importing

ADDRESS = re.compile(r"([\w.-]+|\[[0-9a-fA-F:.]+\]):([0-9]+)")  # the latter of IPv6


def add_openai_front(parser: argparse.ArgumentParser) -> None:
    """`bpkv openai-front`."""
    parser.add_argument(
        "--server",
        required=True,
        type=_address,
        metavar="HOST:PORT",
        help="the gRPC endpoint of a Triton server, as localhost:8001",
    )
    parser.add_argument("--host", default="127.0.0.1", help="where to listen (default 127.0.0.1: this machine alone)")
    parser.add_argument("--port", type=_port, default=9000, metavar="P", help="0: any that is free (default 9000)")
    parser.add_argument(
        "--model-name", default=MODEL_NAME, type=_name, metavar="M", help=f"on the server (default {MODEL_NAME})"
    )
    parser.set_defaults(run=_openai_front)


def _address(text: str) -> str:
    found = ADDRESS.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not HOST:PORT, such as localhost:8001")
    _port(found[2], least=1)
    return text


def _port(text: str, least: int = 0) -> int:
    if not (re.fullmatch("[0-9]{1,5}", text) and least <= int(text) < 2**16):
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not a port, a number from {least} to 65535")
    return int(text)


def _name(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise argparse.ArgumentTypeError(f"{quoted(text)} is not the name of a model, such as {MODEL_NAME}")
    return text


def _openai_front(options: argparse.Namespace) -> None:
    with importing("openai-front", "openai"):
        from bpkv_trt.openai_front.app import make_app
        from bpkv_trt.openai_front.http_server import HttpServer
    if not options.host:
        raise ConfigError("--host is empty, which would be every address of this machine; name one, such as 127.0.0.1.")
    with _listening(options.host, options.port) as listening:
        app = make_app(options.server, options.model_name)
        place = f"http://{options.host}:{listening.getsockname()[1]}"
        Console().print(f"Listening on {place}/v1, for the server at {options.server}", soft_wrap=True)
        HttpServer(app).run(sockets=[listening])


def _listening(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=2048)
    except (OSError, UnicodeError) as error:  # the latter of a host that no name can be
        number = getattr(error, "errno", None) or 0  # below 0 where a name is not found
        reason = os.strerror(number) if number > 0 else error
        raise ConfigError(f"{host}:{port} cannot be listened on ({reason}); give another --host or --port.") from None
