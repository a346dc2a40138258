"""How a service is, for whoever manages it: its stage, and one line of rate, lag and state."""

from collections.abc import Callable

from draftfeed_deploy.notify import Condition
from draftfeed_deploy.progress import Rates, readable_bytes
from draftfeed_deploy.records import ConsumerSnapshot, ProducerSnapshot

OVER = ("done", "out")
"""Producers that need nothing of a consumer any more."""


class ProducerLook:
    """It runs when it serves and its engine is up: loading a target takes minutes.

    Looked at twice in a row: an engine in processes of its own begins to load when it is given the
    first prompt, which is a moment after everything else is there.
    """

    def __init__(
        self, snapshot: Callable[[], ProducerSnapshot], turn_seconds: Callable[[], float]
    ) -> None:
        """turn_seconds: of the server's loop; 0 before there is one."""
        self._snapshot, self._turn_seconds = snapshot, turn_seconds
        self._rates = Rates()
        self._was_up = False

    def __call__(self) -> Condition:
        now = self._snapshot()
        self._rates.add(now)
        words = _producer_words(now, self._rates)
        turn_seconds = self._turn_seconds()
        up, self._was_up = self._was_up, now.phase != "loading"
        if not (up and self._was_up):
            return Condition("starting", words, turn_seconds)
        return Condition("ending" if now.phase == "done" else "running", words, turn_seconds)


class ConsumerLook:
    """It runs when it looks for its producers, and not only when it has found them: services of two
    machines start in any order, and one that boots must not wait for the other."""

    def __init__(self) -> None:
        self.rates = Rates()

    def __call__(self, now: ConsumerSnapshot, turn_seconds: float) -> Condition:
        """turn_seconds: of the client's loop."""
        self.rates.add(now)
        over = bool(now.producers) and all(state in OVER for state in now.producers.values())
        words = _consumer_words(now, self.rates)
        return Condition("ending" if over else "running", words, turn_seconds)


def _producer_words(now: ProducerSnapshot, rates: Rates) -> str:
    members = f"{len(now.members)} attached" if now.members else "nobody attached"
    words = [now.phase, f"{_rate(rates)} to members, {members}"]
    words.append(f"{now.made} of {now.prompts} prompts, {rates('captured'):.0f} tokens/s")
    lag = f"{now.spooled + now.leased} samples not committed"
    if now.oldest_uncommitted_seconds:
        lag += f", the oldest for {now.oldest_uncommitted_seconds:.0f} s"
    words.append(lag)
    if now.alarm:
        words.append(f"PAUSED: {now.alarm}")
    return "; ".join(words)


def _consumer_words(now: ConsumerSnapshot, rates: Rates) -> str:
    state = f"attached, term {now.term}" if now.attached else "waiting for the producer"
    if now.draining:
        state = "draining"
    buffer = f"{readable_bytes(now.buffer_bytes)} of {readable_bytes(now.buffer_capacity_bytes)}"
    return "; ".join(
        [
            f"{state}, {_rate(rates)}",
            f"step {now.step}, {now.trained} samples trained",
            f"{now.uncommitted} in no checkpoint, {now.held} held, buffer {buffer}",
        ]
    )


def _rate(rates: Rates) -> str:
    return f"{rates('wire_bytes') / 1e6:.1f} MB/s"
