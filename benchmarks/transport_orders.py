"""What transport.py tells each end, and how the two talk: orders on the command line, words on
standard input, events as JSON lines on what was standard output."""

import os
import queue
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

LOOPBACK = "127.0.0.1"
COMMITS_AHEAD = 4


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """For one end."""

    role: str
    """producer or consumer"""
    transport: str
    number: int
    """Among the producers, or among the consumers."""
    producers: int
    consumers: int
    states: Path
    """Directory of the set."""
    warm: int
    """Samples of each producer that are sent before anything is measured."""
    samples: int
    """Of each producer that are sent while they are made, with those."""
    stored: int
    """And that are sent out of its spool afterwards; draftfeed's."""
    edge: int
    """Of those, how many come before what is measured, and how many after it."""
    commit_steps: int
    """After how many of its trainer's steps draftfeed commits."""
    segment_bytes: int
    """Of draftfeed's spools."""
    directory: Path
    """For what this end writes to a disk."""
    shared: Path
    """The same for both ends, in memory."""
    keys: Path | None = None
    """Directory with both pairs; None: no encryption."""
    same_host: bool = False
    host: str = LOOPBACK
    """Where producers listen."""
    rendezvous: str = ""
    """Address on which several consumers find each other."""
    corrupt: bool = False
    """A producer's first sample gets one wrong bit: the other end must notice."""
    stages: bool = False
    addresses: list[str] = []
    """Of the producers; a consumer's."""

    @property
    def all_samples(self) -> int:
        """Of each producer."""
        return self.samples + self.stored

    @property
    def buffered(self) -> int:
        """Samples for which a consumer of draftfeed has room: what comes before the measured part
        has been everywhere in it."""
        return -(-self.edge * self.producers // self.consumers) + 1

    @property
    def ahead(self) -> int:
        """Samples that a producer of draftfeed makes beyond those that were committed: so many that
        nobody waits for the next commit."""
        return max(2, COMMITS_AHEAD * self.commit_steps * self.consumers // self.producers)

    def index(self, producer: int, n: int, size: int) -> int:
        """Which of a set's samples is the n-th of a producer."""
        return (producer * self.all_samples + n) % size

    def words(self) -> str:
        """For a command line; `order_of` reads it."""
        return msgspec.json.encode(self, enc_hook=str).decode()


def order_of(words: str) -> Order:
    return msgspec.json.decode(words, type=Order, dec_hook=lambda kind, value: kind(value))


class Talk:
    """With transport.py. This process ends when that says so, and when that ends."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # libraries print there
        self._telling = threading.Lock()
        self._words: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.on_word: Callable[[str], None] = lambda word: None
        """Called in another thread, as soon as it is said."""
        threading.Thread(target=self._listen, name="talk", daemon=True).start()

    def tell(self, event: str, **facts: Any) -> None:
        with self._telling:
            self._out.write(msgspec.json.encode({"event": event, **facts}).decode() + "\n")
            self._out.flush()

    def wait(self, word: str) -> None:
        """Until that is said; what was said before it is passed over."""
        while self._words.get() != word:
            pass

    def _listen(self) -> None:
        for line in sys.stdin:
            word = line.strip()
            if word == "bye":
                os._exit(0)
            self.on_word(word)
            self._words.put(word)
        os._exit(1)
