"""What every consumer of transport.py does with what arrives, whatever brought it."""

import time
from collections.abc import Iterable

import xxhash

from transport_orders import Order, Talk
from transport_states import StateSet


class Check:
    """That every sample arrived as it was sent: the same for every transport."""

    def __init__(self, order: Order, states: StateSet, talk: Talk) -> None:
        self._order, self._states, self._talk = order, states, talk
        self.begin(order.warm)

    def begin(self, warm: int) -> None:
        """What came before does not count, nor do the first samples of each producer."""
        self._warm = warm
        self._samples = self._bytes = 0
        self._cpu_seconds = 0.0

    def sample(self, producer: int, n: int, pieces: Iterable[memoryview]) -> None:
        """pieces: of the sample's bytes, in order; each is valid until the next is asked for."""
        index = self._order.index(producer, n, len(self._states.samples))
        state, size = xxhash.xxh3_128(), 0
        for piece in pieces:
            self._add(state, piece)
            size += len(piece)
        if state.hexdigest() != self._states.digests[index]:
            self._talk.tell("damaged", producer=producer, sample=n)
            raise SystemExit(f"sample {n} of producer {producer} is not what was sent")
        if n < self._warm:
            self.begin(self._warm)
            self._talk.tell("warm")
        else:
            self._samples += 1
            self._bytes += size

    def _add(self, state: xxhash.xxh3_128, piece: memoryview) -> None:
        began = time.thread_time()
        state.update(piece)
        self._cpu_seconds += time.thread_time() - began

    def done(self) -> None:
        facts = {"samples": self._samples, "bytes": self._bytes, "check_seconds": self._cpu_seconds}
        self._talk.tell("done", **facts)
