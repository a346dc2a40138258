"""A trainer that does nothing but take samples, and writes down what the stream cost both ends."""

import json
import time

from draftfeed_consumer.stream import HiddenStateStream
from draftfeed_consumer.trainers import TrainerRun
from rounds import cpu_seconds


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
