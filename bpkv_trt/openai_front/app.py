"""The endpoints."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException

from bpkv_trt.errors import quoted
from bpkv_trt.openai_front.asked import Asked, ChatAsked, CompletionAsked
from bpkv_trt.openai_front.body_limit import BodyLimit
from bpkv_trt.openai_front.ending import Ending
from bpkv_trt.openai_front.refusal import Refusal
from bpkv_trt.openai_front.reply import ChatReply, CompletionReply, Reply
from bpkv_trt.openai_front.server import Piece, Server

LARGEST_BODY = 64 << 20  # bytes, as Triton's own endpoints take; the model has a limit of its own
FAILED = "The front failed at this request; its log says why. Other requests are not affected."
LEFT = 499  # for the log: nobody reads it
T = TypeVar("T")


class ClientLeft(Exception):
    """The connection was closed before there was anything to send."""


def make_app(address: str, model: str) -> FastAPI:
    """The application: a client of the model so called on the Triton server whose gRPC endpoint is at `address`."""

    @asynccontextmanager
    async def connected(app: FastAPI) -> AsyncIterator[None]:
        app.state.server = Server(address, model)
        yield
        await app.state.server.close()

    app = FastAPI(lifespan=connected, openapi_url=None)  # nor pages about it, whose scripts would come from elsewhere
    app.add_middleware(BodyLimit, most_bytes=LARGEST_BODY)
    app.add_middleware(Ending)
    app.add_api_route("/v1/completions", completions, methods=["POST"])
    app.add_api_route("/v1/chat/completions", chat_completions, methods=["POST"])
    app.add_api_route("/v1/models", models, methods=["GET", "HEAD"])
    app.add_api_route("/v1/models/{name:path}", model_so_called, methods=["GET"])
    app.add_api_route("/health", health, methods=["GET", "HEAD"])
    app.add_exception_handler(Exception, told)
    for kind in (Refusal, RequestValidationError, HTTPException, ClientLeft):
        app.add_exception_handler(kind, told)
    return app


async def completions(asked: CompletionAsked, request: Request) -> Response:
    """A text goes on."""
    return await answer(asked, CompletionReply(asked.model), request)


async def chat_completions(asked: ChatAsked, request: Request) -> Response:
    """A conversation goes on."""
    return await answer(asked, ChatReply(asked.model), request)


async def models(request: Request) -> dict[str, Any]:
    """The one that is served."""
    return {"object": "list", "data": [await model_so_called(request.app.state.server.model, request)]}


async def model_so_called(name: str, request: Request) -> dict[str, Any]:
    """What is told of a model: that it can be asked."""
    server: Server = request.app.state.server
    _check_name(name, server)
    await server.check()
    return {"id": server.model, "object": "model", "created": 0, "owned_by": "bpkv-trt"}


async def health(request: Request) -> dict[str, str]:
    """Whether the server can be reached and has loaded the model."""
    await request.app.state.server.check()
    return {"status": "ok"}


async def answer(asked: Asked, reply: Reply, request: Request) -> Response:
    """Raises Refusal for what fails before anything is sent."""
    server: Server = request.app.state.server
    _check_name(asked.model, server)
    pieces = server.answer(asked.inputs())
    if not asked.stream:
        return JSONResponse(reply.whole(await _unless_left(request, _all(pieces))))
    first = await _unless_left(request, anext(pieces))
    events = _events(first, pieces, reply, asked.stream_options.include_usage)
    return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def told(request: Request, error: Exception) -> Response:
    """What a client is told of an error."""
    if isinstance(error, ClientLeft):
        return Response(status_code=LEFT)
    cause = error.__cause__  # FastAPI raises both of these from what Python's reader of JSON raised
    if isinstance(error, RequestValidationError | HTTPException) and isinstance(cause, ValueError | RecursionError):
        refusal = Refusal.of_json(cause)
    elif isinstance(error, RequestValidationError):
        refusal = Refusal.of_fields(error.errors())
    elif isinstance(error, HTTPException):
        refusal = Refusal(error.status_code, f"{request.method} {request.url.path:.100}: {error.detail}.")
    else:
        refusal = error if isinstance(error, Refusal) else Refusal(500, FAILED)
    return JSONResponse(refusal.body(), refusal.status)


def _check_name(name: str, server: Server) -> None:
    if name != server.model:
        told = f"There is no model {quoted(name)}; this server has {server.model}."
        raise Refusal(404, told, "model", "model_not_found")


async def _all(pieces: AsyncIterator[Piece]) -> list[Piece]:
    return [piece async for piece in pieces]


async def _unless_left(request: Request, awaited: Awaitable[T]) -> T:
    """What is awaited, which is cancelled where the client closes the connection meanwhile: then ClientLeft."""
    result, leaving = asyncio.ensure_future(awaited), asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((result, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not result.done():
            raise ClientLeft
        return result.result()
    finally:
        result.cancel()
        leaving.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _events(first: Piece, further: AsyncIterator[Piece], reply: Reply, with_usage: bool) -> AsyncIterator[str]:
    """Server-sent events of a whole answer; an error that comes meanwhile is one of them."""
    for body in (*reply.opening(), reply.part(first)):
        yield _event(body)
    last = first
    try:
        async for last in further:
            yield _event(reply.part(last))
        if with_usage:
            yield _event(reply.usage(last))
    except Refusal as refusal:
        yield _event(refusal.body())
    yield "data: [DONE]\n\n"


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
