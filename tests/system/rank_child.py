"""One rank of a data-parallel run, in a process of its own: `rank_child.py ADDRESSES CHECKPOINT`.

The "model" counts how often each sample was trained; its gradients are an all-reduce. Rank 0
writes the checkpoint. RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT come from the environment.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from draftfeed_consumer.buffer import BufferConfig
from draftfeed_consumer.client import ClientConfig
from draftfeed_consumer.ranks import Ranks
from draftfeed_consumer.stream import HiddenStateStream, StreamConfig

BATCH = 2
SAVE_STEPS = 4


def main(addresses: list[str], checkpoint: Path) -> None:
    ranks = Ranks.from_environment()
    # Room for a few: a rank that attaches first must not take them all.
    buffer = BufferConfig(
        capacity_bytes=70_000, window_samples=2, batch_samples=BATCH, stall_seconds=0.1
    )
    config = StreamConfig(producer=ClientConfig(addresses=tuple(addresses)), buffer=buffer)
    stream = HiddenStateStream(config, ranks=ranks)
    _ = stream.descriptor
    counts: dict[str, int] = {}
    if checkpoint.exists():
        saved = json.loads(checkpoint.read_text())
        stream.load_state_dict(saved["stream"])
        counts = saved["counts"] if ranks is None or ranks.leader else {}
    step = 0
    while True:
        items = stream.batch(BATCH)
        agreed = stream.agree(bool(items))
        if agreed.step:
            gradient = torch.tensor([float(len(items))])
            if ranks is not None:
                dist.all_reduce(gradient)
            step += 1
            for item in items:
                counts[str(item["id"])] = counts.get(str(item["id"]), 0) + 1
            stream.trained([item["id"] for item in items], step)
        if agreed.checkpoint or agreed.over or (agreed.step and step % SAVE_STEPS == 0):
            save(stream, ranks, counts, checkpoint)
        if agreed.over:
            break
    assert stream.wait_committed(30)
    stream.close()
    sys.stdout.write(json.dumps({"steps": step, "trained": counts}))


def save(
    stream: HiddenStateStream, ranks: Ranks | None, counts: dict[str, int], checkpoint: Path
) -> None:
    """The state is collective, so is the model's: every rank's counts, added up."""
    state = stream.state_dict()
    parts: list[dict[str, int]] = [counts]
    if ranks is not None:
        gathered: list[dict[str, int] | None] = [None] * ranks.size
        dist.all_gather_object(gathered, counts)
        parts = [part for part in gathered if part is not None]
    if ranks is None or ranks.leader:
        total: dict[str, int] = {}
        for part in parts:
            for id, times in part.items():
                total[id] = total.get(id, 0) + times
        temporary = checkpoint.with_suffix(".part")
        temporary.write_text(json.dumps({"stream": state, "counts": total}))
        os.replace(temporary, checkpoint)
    stream.committed(state)


if __name__ == "__main__":
    main(sys.argv[1].split(","), Path(sys.argv[2]))
