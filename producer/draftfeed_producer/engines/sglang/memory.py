"""How much memory the machine has left."""

from pathlib import Path

from draftfeed_producer.errors import EngineError


def available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise EngineError("/proc/meminfo does not tell how much memory is available")
