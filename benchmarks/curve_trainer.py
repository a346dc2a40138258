"""A trainer that does nothing but take samples, and writes down what the stream cost both ends."""

import json
import os
import time
from pathlib import Path

from draftfeed_consumer.stream import HiddenStateStream
from draftfeed_consumer.trainers import TrainerRun


def train(stream: HiddenStateStream, run: TrainerRun) -> None:
    producer: int = run.options["producer_pid"]
    assert stream.descriptor
    began = time.monotonic(), time.process_time(), cpu_seconds(producer)
    for step, item in enumerate(stream, start=1):
        stream.trained([item["id"]], step)
    ended = time.monotonic(), time.process_time(), cpu_seconds(producer)
    wall, own, other = (after - before for before, after in zip(began, ended, strict=True))
    stream.committed(stream.state_dict())
    result = {
        "seconds": wall,
        "consumer_cpu_seconds": own,
        "producer_cpu_seconds": other,
        "wire_bytes": stream.statistics().client.wire_bytes,
    }
    (run.output_dir / "cost.json").write_text(json.dumps(result))


def cpu_seconds(pid: int) -> float:
    """Of all its threads, in user mode and in the kernel (proc(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
