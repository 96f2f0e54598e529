"""Paged KV storage, and its compaction."""

from bpkv_trt.pool.block_pool import BlockPool
from bpkv_trt.pool.plan import CompactionPlan
from bpkv_trt.pool.pool import PagedKvPool
from bpkv_trt.pool.view import SequenceView

__all__ = ["BlockPool", "CompactionPlan", "PagedKvPool", "SequenceView"]
