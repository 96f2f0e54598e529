"""Clients of a server, over HTTP and gRPC, as the documentation shows them."""

import http.client
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np
import tritonclient.grpc as grpc_client

from tests.serving.triton_server import TritonServer

WAIT_S = 120
DTYPES = {bool: ("BOOL", np.bool_), str: ("BYTES", np.object_), float: ("FP32", np.float32), int: ("INT32", np.int32)}


class Refused(Exception):
    """An error that the server answered with."""

    def __init__(self, message: str, status: Any) -> None:
        super().__init__(message)
        self.message, self.status = message, status


@dataclass(frozen=True)
class Answered:
    text: str
    pieces: Sequence[str]  # as they came
    last: dict[str, Any]  # outputs of the last response


def post(server: TritonServer, endpoint: str, body: bytes, **headers: str) -> tuple[int, str]:
    """Status and body of a POST to the model."""
    connection = http.client.HTTPConnection("127.0.0.1", server.http, timeout=WAIT_S)
    try:
        connection.request("POST", f"/v2/models/bpkv/{endpoint}", body, headers)
        response = connection.getresponse()
        return response.status, response.read().decode()
    finally:
        connection.close()


def generate(server: TritonServer, text: str | None, **inputs: Any) -> Answered:
    """/generate: the answer at once."""
    status, body = post(server, "generate", json.dumps({**_prompt(text), **inputs}).encode())
    content = json.loads(body)
    if "error" in content:
        raise Refused(content["error"], status)
    return Answered(content["text_output"], [content["text_output"]], content)


def generate_stream(server: TritonServer, text: str | None, **inputs: Any) -> Answered:
    """/generate_stream: server-sent events."""
    body = json.dumps({**_prompt(text), "streaming": True, **inputs}).encode()
    status, events = post(server, "generate_stream", body)
    pieces = [json.loads(line.removeprefix("data: ")) for line in events.splitlines() if line.startswith("data: ")]
    pieces = pieces or [json.loads(events)]
    return _answered(pieces, status)


def infer_stream(server: TritonServer, text: str | None, request_id: str = "", **inputs: Any) -> Answered:
    """gRPC ModelStreamInfer."""
    with grpc_client.InferenceServerClient(f"127.0.0.1:{server.grpc}") as client:
        return _answered(list(_responses(client, text, request_id, inputs)), None)


def tensors(inputs: dict[str, Any]) -> list[grpc_client.InferInput]:
    """Named values as tensors of the types in config.pbtxt."""
    made = []
    for name, value in inputs.items():
        values = value if isinstance(value, list) else [value]
        datatype, dtype = DTYPES[type(values[0])] if name != "sampling_param_seed" else ("UINT64", np.uint64)
        tensor = grpc_client.InferInput(name, [len(values)], datatype)
        tensor.set_data_from_numpy(np.array(values, dtype=dtype))
        made.append(tensor)
    return made


def _prompt(text: str | None) -> dict[str, Any]:
    """None: what is asked is among the other inputs."""
    return {} if text is None else {"text_input": text}


def _responses(client: Any, text: str | None, request_id: str, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
    arrived: SimpleQueue[Any] = SimpleQueue()
    client.start_stream(lambda result, error: arrived.put((result, error)))
    sent = tensors({**_prompt(text), "streaming": True, **inputs})
    client.async_stream_infer("bpkv", sent, request_id=request_id, enable_empty_final_response=True)
    while True:
        result, error = arrived.get(timeout=WAIT_S)
        if error is not None:
            yield {"error": error.message(), "status": error.status()}
            return
        response = result.get_response()
        if response.outputs:
            yield {output.name: _plain(result.as_numpy(output.name)[0]) for output in response.outputs}
        if response.parameters["triton_final_response"].bool_param:
            return


def _plain(value: Any) -> Any:
    return value.decode() if isinstance(value, bytes) else value.item()


def _answered(pieces: list[dict[str, Any]], status: Any) -> Answered:
    for piece in pieces:
        if "error" in piece:
            raise Refused(piece["error"], piece.get("status", status))
    texts = [piece["text_output"] for piece in pieces]
    return Answered("".join(texts), texts, pieces[-1])
