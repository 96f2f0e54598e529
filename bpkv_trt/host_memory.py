"""Main memory that a process can still take: what the machine has free, within what its container may use."""

from pathlib import Path

import psutil

ROOT = Path("/")


def free_host_bytes(root: Path = ROOT) -> int:
    """Bytes of main memory that can still be allocated here; `root` is where /proc and /sys lie."""
    return min([int(psutil.virtual_memory().available), *_headrooms(root)])


def _headrooms(root: Path) -> list[int]:
    """What every control group around this process leaves of its limit; none where there are no control groups."""
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:  # not Linux
        return []
    found = []
    for membership in memberships:
        _, controllers, path = membership.split(":", 2)
        if controllers == "":
            mount, files = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            mount = root / "sys/fs/cgroup/memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        own = mount / path.strip("/")
        found += [_headroom(group, *files) for group in (own, *own.parents) if group.is_relative_to(mount)]
    return [headroom for headroom in found if headroom is not None]


def _headroom(group: Path, limit: str, usage: str, reclaimable: str) -> int | None:
    # Usage counts the page cache, which gives way: files just read, such as the weights, must not count as taken.
    try:
        bound = (group / limit).read_text().strip()
        if bound == "max":
            return None
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        used = int((group / usage).read_text()) - int(statistics.get(reclaimable, 0))
        return max(int(bound) - used, 0)
    except OSError:  # no such group in this container's view, or no limit at the root of all
        return None
