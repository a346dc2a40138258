"""The spool against a model of it a page long, under random operations and restarts."""

import random
from pathlib import Path

import pytest

from draftfeed_producer.spool import Spool
from draftfeed_proto.ids import IdSet
from samples import sample
from spool_helpers import ids, open_spool, ordinals, segment_files

SAMPLES = 24
KEEP = 2


class Model:
    """What a spool must know; ordinals stand for ids."""

    def __init__(self) -> None:
        self.stored: set[int] = set()
        """Have had a good record that was not voided since; it may be freed by now."""
        self.commits: list[set[int]] = []
        self.ended: set[int] = set()
        self.may_be_freed: set[int] = set()
        """Were allowed to be freed at some time since they were stored."""
        self.regenerated: set[int] = set()

    @property
    def committed(self) -> set[int]:
        return self.commits[-1] if self.commits else set()

    def note_freed(self) -> None:
        """What the oldest of the last K commits contains, or has a tombstone, may be freed now."""
        oldest = self.commits[0] if len(self.commits) == KEEP else set[int]()
        self.may_be_freed |= oldest | self.ended


class Run:
    def __init__(self, directory: Path, rng: random.Random) -> None:
        self.directory, self.rng = directory, rng
        self.model = Model()
        self.number = 0
        self.spool = self.opened()

    def opened(self) -> Spool:
        return open_spool(self.directory, segment_bytes=20_000, keep_checkpoints=KEEP)

    def step(self) -> None:
        operations = [self.append] * 5 + [self.commit, self.end, self.void, self.restart]
        self.rng.choice([*operations, self.rollback, self.commit_again])()
        self.model.note_freed()
        self.check()

    def append(self) -> None:
        todo = [k for k in range(SAMPLES) if not self.spool.finished(sample(k).id)]
        if todo:
            k = self.rng.choice(todo)
            self.spool.append(sample(k))
            self.model.stored.add(k)
            self.model.may_be_freed.discard(k)

    def commit(self) -> None:
        more = self.some(self.deliverable() - self.model.ended)
        self.store(self.model.committed | more)

    def commit_again(self) -> None:
        """Of a server that does not know whether it was written."""
        if self.model.commits:
            self.spool.commit(self.number, ids(*self.model.committed), term=1)

    def rollback(self) -> None:
        fewer = self.some(self.model.committed)
        lost = self.model.committed - fewer
        gone = {k for k in lost if self.spool.header_of(sample(k).id) is None} - self.model.ended
        assert gone <= self.model.may_be_freed
        self.model.stored -= gone
        self.model.regenerated |= gone
        self.number += 1
        self.spool.commit(self.number, ids(*fewer), term=1, rollback=True)
        self.model.commits = [fewer]

    def store(self, trained: set[int]) -> None:
        self.number += 1
        self.spool.commit(self.number, ids(*trained), term=1)
        self.model.commits = [*self.model.commits, trained][-KEEP:]

    def end(self) -> None:
        for k in list(self.deliverable())[:1]:
            self.spool.tombstone(sample(k).id, "rejected", "x")
            self.model.ended.add(k)

    def void(self) -> None:
        for k in self.some(self.deliverable()):
            self.spool.void(sample(k).id, "checksum")
            self.model.stored.discard(k)
            self.model.regenerated.add(k)

    def restart(self) -> None:
        self.spool.close()
        self.spool = self.opened()

    def deliverable(self) -> set[int]:
        return set(ordinals(self.spool))

    def some(self, of: set[int]) -> set[int]:
        return {k for k in sorted(of) if self.rng.random() < 0.5}

    def check(self) -> None:
        model, spool = self.model, self.spool
        assert spool.committed == ids(*model.committed)
        assert spool.regenerated == ids(*model.regenerated)
        assert self.deliverable() == model.stored - model.committed - model.ended
        for k in model.stored - model.may_be_freed:  # a checkpoint may need it again
            assert spool.whole(sample(k).id), k
        finished = {k for k in range(SAMPLES) if spool.finished(sample(k).id)}
        assert finished == model.stored | model.committed | model.ended
        sizes = [path.stat().st_size for path in segment_files(self.directory)]
        # The last may be written over an old file that is longer.
        assert sum(sizes[:-1]) <= spool.statistics().bytes <= sum(sizes)


@pytest.mark.parametrize("seed", range(3))
def test_random_operations_and_restarts_keep_every_sample_that_a_checkpoint_may_need(
    tmp_path: Path, seed: int
) -> None:
    """R2, R7: finished means record, commit or tombstone; nothing is freed before K checkpoints."""
    run = Run(tmp_path, random.Random(seed))
    for _ in range(80):
        run.step()
    assert run.spool.committed - IdSet(sample(k).id for k in range(SAMPLES)) == IdSet()
    run.spool.close()
