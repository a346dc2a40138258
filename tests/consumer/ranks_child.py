"""One rank of two, in a process of its own: `ranks_child.py SCENARIO RANK PORT`.

Prints what it saw, as one line of JSON.
"""

import json
import os
import signal
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from draftfeed_consumer.errors import ConsumerError, StateError
from draftfeed_consumer.ledger import Ledger, parse, plain
from draftfeed_consumer.ranks import Life, Ranks
from draftfeed_proto.ids import SampleId

BATCHES = (3, 1)
"""How many each rank has."""


def ends(ranks: Ranks) -> object:
    """A data-parallel run in which rank 1 has fewer batches; the gradients are an all-reduce."""
    left, steps, weights = BATCHES[ranks.rank], 0, []
    while not (agreed := ranks.agree(left > 0)).over:
        assert agreed.step
        weight = 1.0 if left else 0.0
        gradient = torch.tensor([weight])
        dist.all_reduce(gradient)  # hangs when the other rank has left
        left, steps = max(0, left - 1), steps + 1
        weights.append(float(gradient))
    return {"steps": steps, "weights": weights}


def wishes(ranks: Ranks) -> object:
    """Rank 1 alone is asked for a checkpoint, and then told to stop."""
    second = ranks.rank == 1
    seen = [
        ranks.agree(True, checkpoint=second),
        ranks.agree(True, draining=second),
        ranks.agree(False, more=lambda: second),
        ranks.agree(False, more=lambda: second, draining=second),
    ]
    return [list(agreed) for agreed in seen]


def states(ranks: Ranks) -> object:
    """Each rank trained other samples; they share one state, and one rank alone loads it."""
    ledger = Ledger()
    ledger.follow(2, 7 + ranks.rank)
    own = [SampleId("0123456789abcdef", 0, 0, 10 * ranks.rank + n) for n in range(ranks.rank + 1)]
    for id in own:
        ledger.hold(id)
    ledger.train(own)
    merged = ranks.union(parse(ledger.state("s")))
    ledger.join(merged)
    ranks.barrier()
    again = Ledger()
    again.load(plain(merged))
    return {
        "state": plain(merged),
        "next": parse(ledger.state("s")).number,
        "loaded": [str(id) for id in own if again.hold(id)],
    }


def life(ranks: Ranks) -> object:
    shared = ranks.share(Life(ranks.incarnation, 5) if ranks.leader else None)
    return {"term": shared.term, "incarnation": ranks.incarnation, "all": ranks.all_true(True)}


def begins(ranks: Ranks) -> object:
    """Rank 1 found an older checkpoint, and then the same one."""
    try:
        ranks.agree(True, began=(3, 18 - ranks.rank))
    except StateError as error:
        return [str(error), ranks.agree(True, began=(3, 18)).step]
    return "nothing"


def dies(ranks: Ranks) -> object:
    if ranks.rank == 1:
        os._exit(1)
    try:
        ranks.agree(True)
    except ConsumerError as error:
        return str(error)
    return "nothing"


def interrupted(ranks: Ranks) -> object:
    """Rank 1 never comes; rank 0 is told to stop meanwhile."""
    if ranks.rank == 1:
        try:
            dist.barrier()  # until rank 0 is gone
        except RuntimeError:
            return "left alone"
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        ranks.agree(True)
    except KeyboardInterrupt:
        return "interrupted"
    return "nothing"


if __name__ == "__main__":
    scenario, rank, port = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    made = Ranks.from_environment()
    assert made is not None
    sys.stdout.write(json.dumps(globals()[scenario](made)))
    sys.stdout.flush()
    os._exit(0)  # the other rank may be gone: nothing is left to agree on
