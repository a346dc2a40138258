"""What the ranks of one training run tell each other, over a gloo group of their own.

A group of its own because the trainer's collectives may run in another thread and on a GPU. Every
call is collective: all ranks make the same ones in the same order.
"""

import os
import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

import msgspec
import torch
import torch.distributed as dist

from draftfeed_consumer.errors import ConsumerError, LauncherError, StateError, StreamClosed
from draftfeed_consumer.ledger import LedgerState, union

WAIT_TIMEOUT = timedelta(days=7)
"""Of a collective. Ranks wait for a producer for as long as it takes; one that died is noticed at
once by its connection."""
POLL_SECONDS = (0.000_5, 0.02)
"""Between two looks at a collective: at first, and when it takes long."""


class Life(msgspec.Struct, frozen=True):
    """What the leader tells the others before they attach."""

    incarnation: str
    term: int
    """0: the leader did not get the stream."""
    reason: str = ""


class Agreement(NamedTuple):
    """The same on every rank."""

    step: bool
    """Some rank has a batch: all take the step, those without one with a weight of zero."""
    checkpoint: bool
    """A producer asked some rank for a checkpoint: all make one after this step."""
    draining: bool
    """Some rank was told to stop: all stop after this step."""
    over: bool
    """No step, and no batch will come: the run is at its end."""


class Ranks:
    """Rank 0 leads: it begins terms and commits."""

    def __init__(self) -> None:
        """torch.distributed is initialised, with all ranks. Collective."""
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.incarnation = secrets.token_hex(8) if self.rank == 0 else ""
        """Of the group; known to all after `share`."""
        group = dist.new_group(backend="gloo", timeout=WAIT_TIMEOUT)
        assert isinstance(group, dist.ProcessGroup)  # every rank is in it
        self._group = group

    @classmethod
    def from_environment(cls) -> "Ranks | None":
        """What torchrun started, or None when there is one process only.

        Initialises torch.distributed when nobody has: a trainer that would do so itself asks
        `torch.distributed.is_initialized()` first, as torchrun's examples do.

        Raises LauncherError.
        """
        if int(os.environ.get("WORLD_SIZE", "1")) < 2:
            return None
        if not dist.is_initialized():
            _check_launcher()
            gpu = torch.cuda.is_available()
            dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo")
        return cls()

    @property
    def leader(self) -> bool:
        return self.rank == 0

    def share(self, life: Life | None, given_up: Callable[[], bool] = lambda: False) -> Life:
        """The leader's, on every rank. The others pass None and wait, until `given_up`.

        Raises StreamClosed when it is.
        """
        shared = self._broadcast(life, given_up)
        self.incarnation = shared.incarnation
        return shared

    def union(self, state: LedgerState) -> LedgerState:
        """One state of the group: the leader's, with what every rank trained."""
        states = [msgspec.json.decode(part, type=LedgerState) for part in self._gather(state)]
        return union(states)

    def all_true(self, here: bool) -> bool:
        """Whether it is so on every rank."""
        return not any(self._largest([not here]))

    def barrier(self) -> None:
        """Every rank has come as far."""
        _wait_for(dist.barrier(group=self._group, async_op=True))

    def agree(
        self,
        have_batch: bool,
        began: tuple[int, int] = (0, 0),
        *,
        more: Callable[[], bool] = lambda: False,
        checkpoint: bool = False,
        draining: bool = False,
    ) -> Agreement:
        """Before each step: whether all take it, so that no rank waits for ever in the gradients'
        all-reduce for one that has run out of samples.

        began: (term, number) of the checkpoint that this rank loaded. more: whether its stream has
        not ended; asked when it has no batch.

        The end is voted on twice. Between the votes of two ranks, what the later one had refused
        may have been offered to the earlier one. That is known to whoever got the offer before the
        other one can be told that nothing is left, so that the second vote finds it.

        Raises StateError when they began differently: what one of them takes for trained is then
        not in the weights of another.
        """
        agreed = self._vote(have_batch, began, more, checkpoint=checkpoint, draining=draining)
        if agreed.over and not agreed.draining:
            agreed = self._vote(False, began, more, checkpoint=checkpoint, draining=draining)
        return agreed

    def _vote(
        self,
        have_batch: bool,
        began: tuple[int, int],
        more: Callable[[], bool],
        *,
        checkpoint: bool,
        draining: bool,
    ) -> Agreement:
        flags = [have_batch, not have_batch and more(), checkpoint, draining]
        *agreed, term, less_term, number, less_number = self._largest(
            [*map(int, flags), began[0], -began[0], began[1], -began[1]]
        )
        if (term, number) != (-less_term, -less_number):
            raise StateError(
                f"the ranks began with different checkpoints, rank {self.rank} with number "
                f"{began[1]} of term {began[0]}; let the first one choose, for all"
            )
        step, any_more, checkpoint, draining = map(bool, agreed)
        return Agreement(step, checkpoint, draining, over=not step and (draining or not any_more))

    def close(self) -> None:
        dist.destroy_process_group(self._group)

    def _largest(self, values: list[int]) -> list[int]:
        """Of each of these, over all ranks."""
        votes = torch.tensor(values, dtype=torch.int64)
        _wait_for(dist.all_reduce(votes, dist.ReduceOp.MAX, group=self._group, async_op=True))
        return [int(vote) for vote in votes]

    def _broadcast(self, life: Life | None, given_up: Callable[[], bool]) -> Life:
        data = msgspec.json.encode(life) if self.leader else b""
        size = torch.tensor([len(data)])
        _wait_for(dist.broadcast(size, 0, group=self._group, async_op=True), given_up)
        buffer = bytearray(data or bytes(int(size)))
        payload = torch.frombuffer(buffer, dtype=torch.uint8)
        _wait_for(dist.broadcast(payload, 0, group=self._group, async_op=True), given_up)
        return msgspec.json.decode(buffer, type=Life)

    def _gather(self, state: LedgerState) -> list[bytes]:
        data = msgspec.json.encode(state)
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        own_size = torch.tensor([len(data)])
        _wait_for(dist.all_gather(sizes, own_size, group=self._group, async_op=True))
        longest = int(max(sizes))
        parts = [torch.zeros(longest, dtype=torch.uint8) for _ in range(self.size)]
        padded = torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8)
        _wait_for(dist.all_gather(parts, padded, group=self._group, async_op=True))
        return [bytes(part.numpy()[: int(n)]) for part, n in zip(parts, sizes, strict=True)]


def _check_launcher() -> None:
    """Unless told otherwise, torchrun keeps one store for all the times it starts its ranks. Those
    of a restart find the addresses of the ones before in it, and fail or wait for ever
    (github.com/pytorch/pytorch/issues/135712)."""
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"
    if restarts and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise LauncherError


def _wait_for(work: dist.Work | None, given_up: Callable[[], bool] = lambda: False) -> None:
    """In steps, so that a signal is heard: a rank may wait for one that never comes.

    Raises StreamClosed when given up, and ConsumerError when a rank has died: that is no fault of
    the samples that this one was at work on.
    """
    assert work is not None
    pause_seconds, longest = POLL_SECONDS
    while not work.is_completed():
        if given_up():
            raise StreamClosed
        time.sleep(pause_seconds)
        pause_seconds = min(2 * pause_seconds, longest)
    try:
        work.wait()
    except RuntimeError as error:
        words = "another rank is gone; start the whole group again"
        raise ConsumerError(f"{words} ({str(error).splitlines()[0]})") from error
