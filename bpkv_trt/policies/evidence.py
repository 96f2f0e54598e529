"""Where a policy that judges entries by their effect gets its evidence."""

from bpkv_trt.core.evidence import Evidence
from bpkv_trt.core.evidence_source import EvidenceSource
from bpkv_trt.core.statistics import ForwardStatistics
from bpkv_trt.core.traits import ModelTraits
from bpkv_trt.pool.view import SequenceView


def evidence_of(statistics: ForwardStatistics, view: SequenceView, traits: ModelTraits) -> Evidence:
    """From kernels where the view's pool is worked on by them, else head by head in PyTorch."""
    if not view.by_kernels:
        return EvidenceSource(statistics, view, traits)
    from bpkv_trt.kernels.evidence_source import KernelEvidenceSource

    return KernelEvidenceSource(statistics, view, traits)
