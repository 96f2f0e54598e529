"""Stage 2 and compaction by compiled kernels, through a stand-in for CUDA's driver, are what Triton's launches do."""

import gc
import json
import struct
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from types import ModuleType
from unittest.mock import Mock

import pytest
import torch

from bpkv_trt.core.divergence import FisherDivergence, position_weights
from bpkv_trt.core.evidence import score_entries
from bpkv_trt.core.evidence_source import EvidenceSource
from bpkv_trt.core.quota import Quota
from bpkv_trt.core.two_stage import two_stage
from bpkv_trt.errors import BpkvError, InputError
from bpkv_trt.kernels import compiled_kernels
from bpkv_trt.kernels.aot import variants_of
from bpkv_trt.kernels.bundle import MAGIC, VERSION, sealed, unpack, unsealed
from bpkv_trt.kernels.compact import compact
from bpkv_trt.kernels.compiled_kernels import CompiledKernels, Stream
from bpkv_trt.kernels.configuration import KernelConfiguration, Sizes, launch_all, session_launches
from bpkv_trt.kernels.launch import launched_by, recorded
from bpkv_trt.kernels.lse import log_sum_exp
from bpkv_trt.kernels.paged import CacheType, PagedCache
from bpkv_trt.kernels.variant import Variant
from bpkv_trt.policies.evidence import evidence_of
from bpkv_trt.pool.plan import CompactionPlan
from tests.core.conftest import FixedReadout, make_sequence
from tests.plugin import session_calls
from tests.plugin.configurations import SESSION, SESSIONS
from tests.plugin.conftest import COMPILED, ROOT
from tests.pool.stock_session import StockSession

pytest.importorskip("cuda.bindings.driver", reason="needs cuda-bindings")

ROWS, GONE, REFINE = 61, 19, 5  # of every head; an odd number of rows: rows of a mask begin anywhere
DEVICE, STREAM = 1, 0x5EED
CALLED = {
    "partial_log_sum_exp",
    "combined_log_sum_exp",
    "partial_statistics",
    "nominate_entries",
    "weigh_candidates",
    "evict_cheapest",
    "pack_rows",
}


@pytest.fixture
def session_file(session_files):
    return session_files["logits"]


@pytest.fixture
def of_the_cpu(monkeypatch):
    """Tensors of the CPU are taken as if these lay on a GPU."""
    monkeypatch.setattr(compiled_kernels, "current_stream", lambda device: Stream(DEVICE, STREAM))


@pytest.fixture
def kernels(session_file, driver, of_the_cpu):
    kernels = CompiledKernels.read(session_file)
    yield kernels
    kernels.unload()


@dataclass
class Outcome:
    evict: torch.Tensor
    estimated_kl: float
    memory: torch.Tensor


def compacted(configuration: KernelConfiguration, positions: int) -> Outcome:
    """A sequence in a session's blocks: scored, as the engine does, then refined and compacted."""
    sequence = make_sequence(rows=ROWS, positions=positions)
    statistics, pages = sequence.statistics, {"head_dim": configuration.head_dim, "tokens_per_block": SESSION.page_size}
    if configuration.probes:
        divergence = FisherDivergence(position_weights(positions, (0.1,)))
        statistics = replace(statistics, readout=FixedReadout(statistics.readout.rows, divergence))
    fp8 = {"dtype": torch.float8_e4m3fn, "scales": [1.0, 0.5], "storage": torch.int8}
    quantised = configuration.cache == CacheType.FP8
    session = StockSession([ROWS], 8, [(0, 0), (0, 1)], kernels=True, **pages, **fp8 if quantised else {})
    session.memories[0].zero_()
    for layer in range(2):
        k, v = (torch.stack(side[layer]) for side in (sequence.view.k, sequence.view.v))
        if quantised:
            k, v = (side.to(torch.float8_e4m3fn).view(torch.int8) for side in (k, v))
        session.write(session.table(), 0, layer, 0, k, v)
    session.pool.extend(0, ROWS)
    session.step()
    view, divergence = session.pool.view(0), statistics.readout.divergence
    scores = score_entries(EvidenceSource(statistics, view, sequence.traits), divergence)
    eligible = (torch.arange(ROWS) < ROWS - positions).expand(scores.shape).contiguous()
    quota = Quota(torch.arange(4).view(2, 2), torch.full((4,), GONE), torch.full((2, 2), ROWS))
    statistics = replace(statistics, q=statistics.q.to(configuration.activations))
    source = evidence_of(statistics, view, sequence.traits)
    chosen = two_stage(scores, eligible, quota, source, divergence, epsilon=0.02, refine=REFINE)
    session.pool.apply(CompactionPlan.from_eviction(view, chosen.evict))
    return Outcome(chosen.evict, chosen.estimated_kl, session.memories[0])


@pytest.mark.parametrize(
    "name, positions",
    [(name, positions) for name, each in SESSIONS.items() for positions in range(1, each.positions + 1)],
)
def test_a_session_is_compacted_by_compiled_kernels_bit_for_bit_as_by_triton(
    session_files, driver, of_the_cpu, name, positions
):
    expected = compacted(SESSIONS[name], positions)
    assert driver.launched == []
    kernels = CompiledKernels.read(session_files[name])
    with launched_by(kernels):
        ours = compacted(SESSIONS[name], positions)
    assert torch.equal(ours.evict, expected.evict) and ours.estimated_kl == expected.estimated_kl
    assert torch.equal(ours.memory, expected.memory)
    names = [each.kernel for each in driver.launched]
    assert set(names) == CALLED and names.count("pack_rows") == 1
    assert names.count("weigh_candidates") == names.count("evict_cheapest") == REFINE
    assert {(each.device, each.stream) for each in driver.launched} == {(DEVICE, STREAM)}
    assert driver.count("loads") == len(CALLED), "each is loaded once"
    kernels.unload()


def test_every_number_of_positions_has_its_kernels():
    known = set(variants_of(session_launches(SESSION)))
    assert {variant.name for variant in known} == CALLED
    for positions in range(1, SESSION.positions + 1):
        with recorded() as notes:
            launch_all(SESSION, Sizes(positions, sequences=2, tokens=10**positions))
        assert {each for each in variants_of(notes) if each.name in CALLED} <= known


def small_cache(page_size: int = SESSION.page_size) -> tuple[torch.Tensor, PagedCache]:
    """(rows in memory, one sequence of 16 of them)"""
    memory = torch.randn(2, 2, 2, page_size, SESSION.head_dim)  # blocks, K or V
    pages = torch.tensor([[[0, 2]]], dtype=torch.int32)
    start = torch.tensor([memory.data_ptr()] * 2)
    lengths = torch.full((1, 2), 16, dtype=torch.int32)
    options = {"page_size": page_size, "head_dim": SESSION.head_dim, "shared_pages": True}
    return memory, PagedCache(start, pages, pages + 1, lengths, SESSION.cache, **options)


def pack(cache: PagedCache) -> None:
    compact(KEPT, OFFSETS, cache, None)


KEPT, OFFSETS = torch.tensor([0, 2, 1, 3, 4], dtype=torch.int32), torch.tensor([0, 2, 5])


def test_the_context_of_a_thread_is_that_of_the_tensors_while_a_kernel_is_launched(kernels, driver):
    """In threads of no context, of another GPU's and of this one's, at once; all share what is loaded."""
    barrier, seen = threading.Barrier(6), []

    def work(device: int) -> None:
        driver.c.stand_in_set_device(device)
        memory, cache = small_cache()
        barrier.wait()
        with launched_by(kernels):
            pack(cache)
        seen.append((device, driver.current_device()))

    threads = [threading.Thread(target=work, args=(device,)) for device in (-1, 0, DEVICE) * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 6 and all(before == after for before, after in seen), "a thread's context was changed"
    assert [each.device for each in driver.launched] == [DEVICE] * 6 and driver.count("loads") == 1


def test_a_gpu_of_its_own_each(kernels, driver, monkeypatch):
    driver.c.stand_in_set_capability(3, 8, 0)
    memory, cache = small_cache()
    for device in (0, 2, 3):
        monkeypatch.setattr(compiled_kernels, "current_stream", lambda _, device=device: Stream(device, 0))
        with launched_by(kernels):
            if device != 3:
                pack(cache)
                continue
            with pytest.raises(
                BpkvError,
                match=r"have none for GPU 3, of compute capability 8.0: they are compiled for 90a\. Build .*targets",
            ):
                pack(cache)
    assert [(each.device, each.stream) for each in driver.launched] == [(0, 0), (2, 0)]


def test_shared_memory_above_what_needs_no_asking_is_asked_for_once(session_file, driver, of_the_cpu):
    bundle, least = unsealed(session_file.read_bytes()), 48 * 1024
    [own] = [kernel.shared_bytes for kernel in unpack(bundle)[1] if kernel.name == "pack_rows"]
    memory, cache = small_cache()
    for shared, asked in ((own, 0), (least, 0), (least + 1, 1)):
        place = b"pack_rows" + struct.pack("<I", 256)
        assert bundle.count(place + struct.pack("<I", own)) == 1
        changed = bundle.replace(place + struct.pack("<I", own), place + struct.pack("<I", shared))
        with launched_by(CompiledKernels(changed)):
            pack(cache)
            pack(cache)
        assert driver.launched[-1].shared_bytes == shared and driver.count("attributes") == asked


def test_without_triton_the_driver_is_asked_for_what_triton_would_run(native, session_file, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['triton'] = None\n")
    environment = COMPILED | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, session_calls.__file__, native / "stand_in" / "libcuda.so.1", session_file]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    with recorded() as notes:
        session_calls.call_all()
    assert told["asked"] == [session_calls.described(launch) for launch in notes]
    assert {each["kernel"] for each in told["asked"]} == CALLED and told["loaded"] == []
    run, pool = told["refusals"]
    assert run.startswith("The kernel partial_log_sum_exp cannot run: Triton is not installed. pip install")
    assert "its kernels need Triton, which is not installed" in pool


def test_kernels_that_nobody_holds_are_unloaded(session_file, driver, of_the_cpu):
    kernels = CompiledKernels.read(session_file)
    memory, cache = small_cache()
    for loads in (1, 2):
        with launched_by(kernels):
            pack(cache)
        assert (driver.count("loads"), driver.count("live")) == (loads, 1)
        kernels.unload()
        assert driver.count("live") == 0
    with launched_by(kernels):
        pack(cache)
    del kernels
    gc.collect()
    assert driver.count("live") == 0


def test_what_there_is_no_kernel_for_is_told_and_nothing_runs(kernels, driver):
    memory, cache = small_cache(page_size=16)
    before = memory.clone()
    with launched_by(kernels), pytest.raises(BpkvError) as refusal:
        pack(cache)
    said = str(refusal.value)
    assert said.startswith("There is no compiled kernel pack_rows of 256 threads for HEADS=2, PAGE_SIZE=16, TILE=64")
    assert "there are 1 others of this name" in said and said.endswith(
        "build the engine again, with this version of bpkv-trt."
    )
    assert torch.equal(memory, before) and driver.launched == [] and driver.count("loads") == 0


def test_other_arguments_than_a_kernel_takes(kernels, driver, monkeypatch):
    memory, cache = small_cache()
    before = memory.clone()
    shifted = torch.zeros(6, dtype=torch.int32)[1:]
    shifted.copy_(KEPT)
    with launched_by(kernels):
        with pytest.raises(ValueError, match="rows does not begin at a multiple of 16 bytes, .*; give a copy"):
            compact(shifted, OFFSETS, cache, None)
        q = torch.randn(4, 6, SESSION.head_dim)
        with pytest.raises(ValueError, match=r"window is 2147483648; compiled kernels count in 32 bits"):
            log_sum_exp(q, torch.tensor([0, 4], dtype=torch.int32), cache, scale=1.0, window=2**31, positions=4)
        monkeypatch.undo()
        with pytest.raises(ValueError, match="tensors on cpu; compiled ones run on a GPU"):
            pack(cache)
        with pytest.raises(ValueError, match="tensors on meta"):
            launch_all(SESSION, Sizes(1))
    assert torch.equal(memory, before) and driver.launched == []


@pytest.mark.parametrize(
    "function, launches",
    [
        ("cuDevicePrimaryCtxRetain", 0),
        ("cuCtxGetCurrent", 0),
        ("cuCtxPushCurrent", 0),
        ("cuDeviceGetAttribute", 0),
        ("cuLibraryLoadData", 0),
        ("cuLibraryGetKernel", 0),
        ("cuKernelGetFunction", 0),
        ("cuLaunchKernel", 0),
        ("cuCtxPopCurrent", 1),
    ],
)
def test_a_driver_that_refuses_is_quoted_and_asked_again(kernels, driver, function, launches):
    memory, cache = small_cache()
    driver.c.stand_in_fail(function.encode(), 2)
    with launched_by(kernels):
        with pytest.raises(BpkvError, match=f"{function} failed with CUDA_ERROR_OUT_OF_MEMORY: an error of the stand"):
            pack(cache)
        assert len(driver.launched) == launches
        driver.c.stand_in_fail(function.encode(), 0)
        driver.c.stand_in_set_device(0)
        pack(cache)
    assert len(driver.launched) == launches + 1


def test_a_machine_without_cuda_python_or_a_driver(kernels, driver, monkeypatch):
    memory, cache = small_cache()
    with launched_by(kernels):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "cuda.bindings", None)
            with pytest.raises(BpkvError, match=r"cuda-python, which is not installed; pip install 'cuda-bindings"):
                pack(cache)
        absent = ModuleType("driver")
        absent.cuInit = Mock(side_effect=RuntimeError("Failed to dlopen libcuda.so.1"))
        with monkeypatch.context() as patch:
            patch.setattr(sys.modules["cuda.bindings"], "driver", absent)
            with pytest.raises(BpkvError, match=r"cannot be used \(Failed to dlopen libcuda.so.1\); run on a"):
                pack(cache)
        pack(cache)
    assert len(driver.launched) == 1


def test_a_file_that_is_missing_or_damaged(session_file, tmp_path, driver):
    content = session_file.read_bytes()
    flipped = bytearray(content)
    flipped[len(content) // 2] ^= 4
    path = tmp_path / "bpkv_kernels.bundle"
    for damaged in (bytes(flipped), content[:-1], content + b"\0", content[:20], b"", unsealed(content)):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=rf"kernels {path} are damaged: bytes are missing or changed; build the"):
            CompiledKernels.read(path)
    with pytest.raises(InputError, match=r"kernels .*absent cannot be read \(No such file or directory\); keep the"):
        CompiledKernels.read(tmp_path / "absent")
    assert driver.count("loads") == 0


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda data: b"BPKVKRNX" + data[8:], "they are no bundle of kernels"),
        (lambda data: MAGIC + bytes([VERSION + 1]) + data[9:], "they are of version 2, not 1"),
        (lambda data: data[:-1], "bytes are missing at their end"),
        (lambda data: data + b"\0", "bytes follow the last kernel"),
        (lambda data: data.replace(b"90a", b"9Qa", 1), "'9Qa' names no target"),
        (lambda data: data.replace(b"rows_per", b"rows\xff\xfeer", 1), "can't decode"),
    ],
    ids=["magic", "version", "short", "long", "target", "text"],
)
def test_bytes_that_are_no_bundle(session_file, tmp_path, change, reason):
    path = tmp_path / "kernels"
    path.write_bytes(sealed(change(unsealed(session_file.read_bytes()))))
    with pytest.raises(InputError, match=rf"kernels {path} cannot be used: .*{reason}.*; build the engine again"):
        CompiledKernels.read(path)


def test_a_variant_and_its_compiled_kernel_have_one_identity(kernels):
    compiled = kernels._by_target["90a"]
    assert {variant.identity for variant in map(Variant.of, session_launches(SESSION))} == set(compiled)
