"""A make-believe accelerator: a device whose memory is the CPU's, and which tensors of the CPU must not meet.

What runs on it is what runs on the CPU, to the bit, and an operation whose operands lie on both is refused by the rules
that CUDA has. Nothing is registered: outside of `with Accelerator():` there is no such device.
"""

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from bpkv_trt.models.loading import LoadedModel

aten = torch.ops.aten

# A name that PyTorch knows and has no kernels for. Of such devices autograd would run their part of a graph on a thread
# of theirs, but for this one, which it takes with the CPU.
DEVICE = torch.device("lazy", 0)
COPIES = {aten.copy_.default}  # between any devices
INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
NUMBERS = {aten.fill_.Tensor, aten.masked_fill.Tensor, aten.masked_fill_.Tensor}  # beside all that is pointwise


class DeviceMix(RuntimeError):
    """An operation was given tensors of two devices."""


class Accelerator(TorchDispatchMode):
    """Within, `DEVICE` can be given wherever PyTorch takes a device."""

    def __enter__(self) -> "Accelerator":
        self._lifted = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor makes it on the CPU, then moves it
        self._settings = ExitStack()
        self._settings.enter_context(plain_attention())
        # transformers asks by device, and PyTorch knows not of this one
        self._settings.enter_context(patch("torch.is_autocast_enabled", return_value=False))
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._settings.close()
        torch._C._set_only_lift_cpu_tensors(self._lifted)

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(operation, args, kwargs or {})


class AcceleratorTensor(Tensor):
    """A tensor on `DEVICE`; `near` holds its numbers."""

    near: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, near: Tensor) -> "AcceleratorTensor":
        tensor: AcceleratorTensor = Tensor._make_wrapper_subclass(
            cls, near.shape, near.stride(), near.storage_offset(), dtype=near.dtype, device=DEVICE
        )
        tensor.near = near
        return tensor

    @classmethod
    def __torch_dispatch__(
        cls, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _run(operation, args, kwargs or {})

    def tolist(self) -> Any:
        """Copied to the CPU, as from any device; PyTorch has it not for subclasses."""
        return self.cpu().tolist()


def _run(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation on the CPU, as if every `AcceleratorTensor` were elsewhere."""
    operands = [*_tensors(args), *_tensors(kwargs.values())]
    far = [isinstance(operand, AcceleratorTensor) for operand in operands]
    result_far, given = any(far), kwargs.get("device")
    if given is not None:
        result_far = torch.device(given).type == DEVICE.type
        kwargs = {**kwargs, "device": torch.device("cpu")} if result_far else kwargs
    if result_far and kwargs.get("generator") is not None:
        raise DeviceMix(f"{operation} draws on {DEVICE} with a generator of the CPU")
    if any(far) and not all(far) and operation not in COPIES:
        _check_devices(operation, args, operands)
    result = operation(*_near(args), **{name: _near(value) for name, value in kwargs.items()})
    if _in_place(operation):
        assert args[0].shape == _near(args[0]).shape, f"{operation} changes the shape of its operand"
        return args[0]
    return _far(result) if result_far else result


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _near(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_near, value))
    return value.near if isinstance(value, AcceleratorTensor) else value


def _far(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_far, value))
    return AcceleratorTensor(value) if isinstance(value, Tensor) else value


@cache
def _in_place(operation: Any) -> bool:
    """Whether what an operation returns is its first operand."""
    returned = operation._schema.returns
    return len(returned) == 1 and returned[0].alias_info is not None and returned[0].alias_info.is_write


def _check_devices(operation: Any, args: tuple[Any, ...], operands: Sequence[Tensor]) -> None:
    """Raise DeviceMix where CUDA would: a CPU tensor beside the accelerator's, unless it is an index or a number."""
    own, needs_own = isinstance(args[0], AcceleratorTensor), _in_place(operation) or operation in INDEXING
    numbers = torch.Tag.pointwise in operation.tags or operation in NUMBERS | INDEXING
    indices = list(_tensors(args[1])) if operation in INDEXING and own else []
    excused = [*indices, *(operand for operand in operands if operand.dim() == 0 and numbers)]
    refused = [each for each in operands if not isinstance(each, AcceleratorTensor) and not _among(each, excused)]
    if refused or (needs_own and not own):
        found = ", ".join(f"{each.device.type} {tuple(each.shape)}" for each in operands)
        raise DeviceMix(f"{operation} was given tensors of two devices: {found}")


def _among(tensor: Tensor, others: Iterable[Tensor]) -> bool:
    return any(tensor is other for other in others)


def accelerated(loaded: LoadedModel) -> LoadedModel:
    """A copy of a model, on `DEVICE`."""
    return replace(loaded, model=copy.deepcopy(loaded.model).to(DEVICE))


@contextmanager
def plain_attention() -> Iterator[None]:
    """PyTorch chooses between kinds of attention by device; this is the one that every device has."""
    with sdpa_kernel(SDPBackend.MATH):
        yield
