"""Tensor parallelism of a network as TensorRT-LLM's own collectives do it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tensorrt_llm._common import default_net, default_trtnet
from tensorrt_llm.functional import AllReduceParams, AllReduceStrategy, _create_tensor, allgather, allreduce

from bpkv_trt.trtllm.graph import ITensor
from bpkv_trt.trtllm.ranks import Ranks


def wrapped(tensor: ITensor) -> Any:
    """A tensor of the network as TensorRT-LLM's functions take it, which want to know the layer that it is from."""
    layer = default_trtnet().add_identity(tensor)
    return _create_tensor(layer.get_output(0), layer)


def ranks_of(mapping: Any) -> Ranks:
    """The ranks of a `Mapping`. One all-gather of [S, 2 K + 1] fp32 and one all-reduce of [S, K, d] in each step."""

    def over_ranks(collective: Callable[[Any], Any]) -> Callable[[ITensor], ITensor]:
        def call(tensor: ITensor) -> ITensor:
            given = wrapped(tensor)
            with _unrounded(tensor):
                return collective(given).trt_tensor

        return call

    if mapping.tp_size == 1:
        return Ranks()
    nccl = AllReduceParams(strategy=AllReduceStrategy.NCCL)  # takes no rows, too, and needs no workspace
    return Ranks(
        mapping.tp_size,
        mapping.tp_rank,
        all_gather=over_ranks(lambda tensor: allgather(tensor, mapping.tp_group, gather_dim=-1)),
        all_reduce=over_ranks(lambda tensor: allreduce(tensor, mapping.tp_group, all_reduce_params=nccl)),
    )


@contextmanager
def _unrounded(tensor: ITensor) -> Iterator[None]:
    """TensorRT-LLM casts what it sends to the type of its NCCL plugin: token ids would be rounded to bf16."""
    config = default_net().plugin_config
    names = {"FLOAT": "float32", "HALF": "float16", "BF16": "bfloat16"}
    before, config.nccl_plugin = config.nccl_plugin, names[tensor.dtype.name]
    try:
        yield
    finally:
        config.nccl_plugin = before
