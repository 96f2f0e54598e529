"""Free memory within the limits of control groups, on trees of files such as Linux shows."""

from pathlib import Path

import psutil
import pytest

from bpkv_trt.host_memory import free_host_bytes

MIB = 1 << 20


def write(root: Path, files: dict[str, str]) -> Path:
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    return root


def group(path: str, limit: str, usage: int, inactive: int = 0) -> dict[str, str]:
    """A group of version 2."""
    return {
        f"{path}/memory.max": f"{limit}\n",
        f"{path}/memory.current": f"{usage}\n",
        f"{path}/memory.stat": f"anon 1\ninactive_file {inactive}\n",
    }


def old_group(path: str, limit: int, usage: int, inactive: int = 0) -> dict[str, str]:
    """A group of version 1."""
    return {
        f"{path}/memory.limit_in_bytes": f"{limit}\n",
        f"{path}/memory.usage_in_bytes": f"{usage}\n",
        f"{path}/memory.stat": f"cache 1\ninactive_file 7\ntotal_inactive_file {inactive}\n",
    }


V2 = {"proc/self/cgroup": "0::/pod/job\n"}
V1 = {"proc/self/cgroup": "5:cpu,cpuacct:/\n4:memory:/docker/7f\n0::/\n"}
HERE, HERE_V1 = "sys/fs/cgroup", "sys/fs/cgroup/memory"


@pytest.mark.parametrize(
    ("files", "free"),
    [
        (V2 | group(f"{HERE}/pod/job", str(64 * MIB), 40 * MIB), 24 * MIB),
        (V2 | group(f"{HERE}/pod/job", str(64 * MIB), 60 * MIB, inactive=20 * MIB), 24 * MIB),
        (V2 | group(f"{HERE}/pod/job", "max", 40 * MIB) | group(f"{HERE}/pod", str(50 * MIB), 40 * MIB), 10 * MIB),
        (V2 | group(HERE, str(30 * MIB), 10 * MIB), 20 * MIB),  # a container sees its own group as the root
        (V2 | group(f"{HERE}/pod/job", str(64 * MIB), 65 * MIB), 0),
        (V1 | old_group(f"{HERE_V1}/docker/7f", 64 * MIB, 40 * MIB, inactive=MIB), 25 * MIB),
        (V1 | old_group(HERE_V1, 32 * MIB, 2 * MIB), 30 * MIB),
    ],
)
def test_the_tightest_limit_around_the_process_counts(tmp_path: Path, files: dict[str, str], free: int) -> None:
    assert free_host_bytes(write(tmp_path, files)) == free


@pytest.mark.parametrize(
    "files",
    [{}, V2, V1, V2 | group(f"{HERE}/pod/job", "max", MIB), V1 | old_group(HERE_V1, 2**63 - 4096, 40 * MIB)],
)
def test_without_a_limit_the_machine_decides(tmp_path: Path, files: dict[str, str]) -> None:
    free, available = free_host_bytes(write(tmp_path, files)), psutil.virtual_memory().available
    assert abs(free - available) < available / 10, "other processes take and give in between"
