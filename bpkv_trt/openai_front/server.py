"""The Triton server that answers."""

import asyncio
import re
import uuid
from asyncio import Queue, Task
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import InferInput
from tritonclient.grpc.aio import InferenceServerClient
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from bpkv_trt.openai_front.asked import Inputs
from bpkv_trt.openai_front.refusal import Refusal

NUMBERS = (
    "bpkv_prompt_tokens",
    "bpkv_generated_tokens",
    "bpkv_entries_kept",
    "bpkv_entries_total",
    "bpkv_bytes_freed",
)
CHANNEL = [
    ("grpc.max_send_message_length", -1),  # the front and the server have limits of their own
    ("grpc.max_receive_message_length", -1),
    ("grpc.initial_reconnect_backoff_ms", 500),
    ("grpc.max_reconnect_backoff_ms", 1000),  # by default minutes, in which a server that is back is not seen
]
AGAIN_S = 0.5  # between requests to stop what goes on
CLOSE_S = 5.0  # the most that closing waits for the server
Response = tuple[Any, Refusal | None]  # what came of a request, or why nothing does

# What Triton itself says where the model is not there, or not any more; no code of ours begins so.
NOT_READY = re.compile(
    r"(\[request id: [^]]*\] )?"
    r"(Request for unknown model|Server not ready|Server is stopping|Stub process '[^']*' is not healthy)"
)


@dataclass(frozen=True)
class Piece:
    """What came of an answer; the last piece says why it ended, and has the server's NUMBERS."""

    text: str
    finish_reason: str | None
    numbers: dict[str, int]


class Server:
    """One of its models, by gRPC; to be made and used within one event loop."""

    def __init__(self, address: str, model: str) -> None:
        self.address, self.model = address, model
        self._client = InferenceServerClient(address, channel_args=CHANNEL)
        self._tasks: set[Task[None]] = set()  # asyncio itself forgets them

    async def close(self) -> None:
        """Once the requests have ended whose clients have left."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_S)
        await self._client.close()

    async def check(self) -> None:
        """Raises Refusal where it cannot be reached, or has not loaded the model."""
        try:
            ready = await self._client.is_model_ready(self.model, client_timeout=5)
        except InferenceServerException as error:
            if not NOT_READY.match(error.message()):
                raise Refusal(503, f"The server at {self.address} does not answer ({error.message()}).") from None
            ready = False
        if not ready:
            raise self._not_ready()

    async def answer(self, inputs: Inputs) -> AsyncIterator[Piece]:
        """Pieces as they come. Raises Refusal. Closed before its end, it ends the request on the server too."""
        request = {"model_name": self.model, "request_id": uuid.uuid4().hex, "inputs": _tensors(inputs)}
        arrived: Queue[Response] = Queue()
        reading = self._started(self._read(request, arrived))
        ended = False
        try:
            while not ended:
                result, refusal = await arrived.get()
                if refusal is not None:
                    ended = True
                    raise refusal
                piece = _piece(result)
                ended = piece.finish_reason is not None
                yield piece
        finally:
            if not ended:
                self._started(self._stop(request, reading))

    async def _read(self, request: dict[str, Any], arrived: Queue[Response]) -> None:
        """A stream to its own end, whoever has left meanwhile: Triton 2.51 may lose a request whose stream is cancelled
        when its last response is under way, and then waits for it for ever when it is to end."""
        refusal = Refusal(503, f"The server at {self.address} left the answer without an end; ask again later.")
        try:
            async for result, error in self._client.stream_infer(_once(request)):
                arrived.put_nowait((result, error and self._refusal(error.message())))
        except grpc.aio.AioRpcError as error:
            refusal = Refusal(503, f"The server at {self.address} cannot be reached ({error.details()}).")
        finally:
            arrived.put_nowait((None, refusal))

    async def _stop(self, request: dict[str, Any], reading: Task[None]) -> None:
        """By a stream of its own: Triton 2.51 was seen to die once where both were in one."""
        stop = request | {"inputs": _tensors({"stop": np.array([True])})}
        while not reading.done():
            await self._read(stop, Queue())
            await asyncio.wait([reading], timeout=AGAIN_S)  # in case it overtook the request

    def _started(self, work: Coroutine[Any, Any, None]) -> Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _refusal(self, message: str) -> Refusal:
        return self._not_ready() if NOT_READY.match(message) else Refusal.by_server(message)

    def _not_ready(self) -> Refusal:
        why = "it is starting, ending or broken, or has none of this name (--model-name of the front)"
        return Refusal(
            503, f"The server at {self.address} has no model {self.model} that is ready: {why}; ask again later."
        )


async def _once(request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    yield request


def _tensors(inputs: Inputs) -> list[InferInput]:
    tensors = [InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype)) for name, array in inputs.items()]
    return [tensor.set_data_from_numpy(array) for tensor, array in zip(tensors, inputs.values(), strict=True)]


def _piece(result: Any) -> Piece:
    found = {output.name: result.as_numpy(output.name)[0] for output in result.get_response().outputs}
    reason = found.get("finish_reason")
    numbers = {name: int(found[name]) for name in NUMBERS if name in found}
    return Piece(found["text_output"].decode(), None if reason is None else reason.decode(), numbers)
