"""The code of each error. The real server of the other tests does not tell it to clients: this stands in for it."""

import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from bpkv_trt.errors import ConfigError, InputError, PoolExhausted, QueueFull
from bpkv_trt.model_repository import template
from bpkv_trt.runtime.serving_metrics import ServingMetrics
from bpkv_trt.runtime.serving_request import ServingOutput
from bpkv_trt.serving_settings import ServingSettings

MODEL = "/models/secret"


class Sender:
    """Keeps what was sent: the code and message of an error, or None, and whether it was the last."""

    def __init__(self) -> None:
        self.sent: list[tuple[Any, bool]] = []

    def send(self, response: Any, flags: int) -> None:
        self.sent.append((response, flags == 1))


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    backend = ModuleType("triton_python_backend_utils")
    codes = {code: code for code in ("INVALID_ARG", "UNAVAILABLE", "NOT_FOUND", "CANCELLED", "INTERNAL")}
    backend.__dict__.update(
        TritonError=type("TritonError", (), {**codes, "__new__": lambda kind, why, code: (code, why)}),
        InferenceResponse=lambda outputs=None, error=None: error,
        Tensor=lambda name, array: SimpleNamespace(name=name, as_numpy=lambda: array),
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=1,
        Logger=SimpleNamespace(log_error=lambda text: None, log_warn=lambda text: None),
        get_input_tensor_by_name=lambda request, name: request.tensors.get(name),
    )
    monkeypatch.setitem(sys.modules, backend.__name__, backend)
    found = importlib.util.spec_from_file_location("served_model", template() / "1" / "model.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def taken(module: ModuleType, error: Exception) -> tuple[str, str]:
    """Code and message for a request that the loop refuses with this error."""

    class Loop:
        metrics = ServingMetrics()

        def submit(self, request: Any, receive: Any) -> int:
            raise error

    served = module.TritonPythonModel()
    served.__dict__.update(
        _settings=ServingSettings(MODEL), _loop=Loop(), _running=set(), _guard=module.threading.Lock()
    )
    sender = Sender()
    tensor = SimpleNamespace(as_numpy=lambda: np.array([b"a"], dtype=object))
    request = SimpleNamespace(
        tensors={"text_input": tensor},
        get_response_sender=lambda: sender,
        parameters=lambda: "",
        request_id=lambda: "",
    )
    served.execute([request])
    ((answer, last),) = sender.sent
    counted = Loop.metrics.snapshot().requests
    assert last and not served._running and sum(counted.values()) == 1
    assert counted["error" if answer[0] == "INTERNAL" else "refused"] == 1
    return answer


@pytest.mark.parametrize(
    "error, code",
    [
        (InputError("a"), "INVALID_ARG"),
        (ConfigError("a"), "INVALID_ARG"),
        (PoolExhausted("a"), "INVALID_ARG"),
        (QueueFull("a"), "UNAVAILABLE"),
        (KeyError("a"), "INTERNAL"),
    ],
)
def test_what_is_refused(model: ModuleType, error: Exception, code: str) -> None:
    told = taken(model, error)
    assert told[0] == code and told[1].startswith(f"{code}: "), "also to those who are told the message alone"


def test_neither_the_place_of_the_model_nor_a_fault_of_ours_is_told(model: ModuleType) -> None:
    assert taken(model, InputError(f"{MODEL} knows 7"))[1] == "INVALID_ARG: the model knows 7"
    assert "secret" not in taken(model, ValueError(f"in {MODEL}, line 7"))[1]
    served, sender = model.TritonPythonModel(), Sender()
    served.__dict__.update(_settings=ServingSettings(MODEL), _running=set(), _guard=model.threading.Lock())
    answer = model.Answer("", sender, SimpleNamespace(streaming=False, with_finish_reason=False))
    served._send_one(answer, ServingOutput("", 0, "refused", error=f"{MODEL} knows\n7"))
    ((told, _),) = sender.sent
    assert told[1] == "INVALID_ARG: the model knows 7"


@pytest.mark.parametrize(
    "reason, code",
    [("cancelled", "CANCELLED"), ("timeout", "UNAVAILABLE"), ("error", "INTERNAL"), ("refused", "INVALID_ARG")],
)
def test_how_a_request_ends(model: ModuleType, reason: Any, code: str) -> None:
    sender = Sender()
    answer = model.Answer("", sender, SimpleNamespace(streaming=False, with_finish_reason=False))
    answer.receive(ServingOutput("a", 1))
    answer.receive(ServingOutput("b", 2, reason, error="NaN" if reason in ("error", "refused") else None))
    ((error, last),) = sender.sent
    assert last and error[0] == code


def test_nobody_is_named_nothing_and_stopped(model: ModuleType) -> None:
    served, sender = model.TritonPythonModel(), Sender()
    answer = SimpleNamespace(name="", handle=1)
    cancel = SimpleNamespace(cancel=lambda handle: True)
    served.__dict__.update(_running=[answer], _guard=model.threading.Lock(), _loop=cancel)
    served._stop("", sender)
    ((error, last),) = sender.sent
    assert last and error[0] == "NOT_FOUND"
