"""How much memory this process may still take."""

from collections.abc import Iterator
from pathlib import Path

from draftfeed_producer.errors import EngineError

_CGROUPS = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """The least of what the machine has and what each control group leaves, a container's or a
    service's: whoever takes more is killed. Raises EngineError."""
    return min([_machine_bytes(), *_group_bytes()])


def _machine_bytes() -> int:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(x.split()[1]) << 10 for x in lines if x.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        raise EngineError("/proc/meminfo does not tell how much memory is available") from None


def _group_bytes() -> Iterator[int]:
    """Of those that have a limit, from this process's group upwards (cgroup v2)."""
    try:
        groups = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    own = next((line[3:].strip("/") for line in groups if line.startswith("0::")), None)
    if own is None:
        return
    group = _CGROUPS / own
    for directory in (group, *group.parents):
        if directory.is_relative_to(_CGROUPS):
            yield from _left(directory)


def _left(group: Path) -> Iterator[int]:
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return
    # Cached pages of files are counted as used, and given up before anybody is killed.
    cached = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
    if limit != "max":
        yield max(0, int(limit) - used + cached)
