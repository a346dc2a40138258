"""Live views of a service: a panel on a terminal, a line every ten seconds elsewhere."""

import logging
import time

from rich.console import Console, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table

from draftfeed_deploy.records import ConsumerSnapshot, ProducerSnapshot, Snapshot

logger = logging.getLogger(__name__)

LINE_SECONDS = 10.0
RATE_SECONDS = 10.0
Row = tuple[str, str, tuple[int, int] | None]
"""(label, text, (part, whole) of a bar)"""


class Rates:
    """Rates over the last ten seconds of cumulative counters."""

    def __init__(self) -> None:
        self._past: list[Snapshot] = []

    def add(self, snapshot: Snapshot) -> None:
        self._past.append(snapshot)
        oldest = snapshot.time_seconds - RATE_SECONDS
        while len(self._past) > 2 and self._past[1].time_seconds <= oldest:
            self._past.pop(0)

    def __call__(self, counter: str) -> float:
        """Per second."""
        first, last = self._past[0], self._past[-1]
        seconds = last.time_seconds - first.time_seconds
        return (getattr(last, counter) - getattr(first, counter)) / seconds if seconds > 0 else 0.0


class Lines:
    """For a journal or a pipe."""

    def __init__(self, name: str) -> None:
        self._name, self._rates = name, Rates()
        self._due = time.monotonic() + LINE_SECONDS

    def show(self, snapshot: Snapshot) -> None:
        self._rates.add(snapshot)
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + LINE_SECONDS
            words = [f"{label} {text}" for label, text, _ in rows(snapshot, self._rates)]
            logger.info("%s: %s", self._name, "; ".join(words))


class Panels:
    """One panel for each service on a terminal. Enter it before the first `show`."""

    def __init__(self, console: Console, names: list[str]) -> None:
        self._rates = {name: Rates() for name in names}
        self._panels: dict[str, RenderableType] = {
            name: Panel("starting", title=name) for name in names
        }
        self._live = Live(self.picture(), console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> "Panels":
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()

    def view(self, name: str) -> "PanelView":
        return PanelView(self, name)

    def show(self, name: str, snapshot: Snapshot) -> None:
        rates = self._rates[name]
        rates.add(snapshot)
        self._panels[name] = Panel(_table(snapshot, rates), title=name, width=72)
        self._live.update(self.picture())

    def picture(self) -> Table:
        grid = Table.grid()
        for panel in self._panels.values():
            grid.add_row(panel)
        return grid


class PanelView:
    def __init__(self, panels: Panels, name: str) -> None:
        self._panels, self._name = panels, name

    def show(self, snapshot: Snapshot) -> None:
        self._panels.show(self._name, snapshot)


def rows(snapshot: Snapshot, rates: Rates) -> list[Row]:
    """The lines of a service's view."""
    match snapshot:
        case ProducerSnapshot():
            return _producer_rows(snapshot, rates)
        case ConsumerSnapshot():
            return _consumer_rows(snapshot, rates)


def _producer_rows(now: ProducerSnapshot, rates: Rates) -> list[Row]:
    spool = now.spool_bytes, now.spool_quota_bytes
    alarm = f", PAUSED: {now.alarm}" if now.alarm else ""
    again = f" ({now.regenerated} made again)" if now.regenerated else ""
    return [
        ("phase", now.phase, None),
        ("samples", f"{now.made} of {now.prompts}{again}", (now.made, now.prompts)),
        ("capture", f"{rates('captured'):.1f} tokens/s", None),
        ("members", _members(now), None),
        ("stream", _stream(now, rates), None),
        ("spool", f"{readable_bytes(spool[0])} of {readable_bytes(spool[1])}{alarm}", spool),
        ("committed", f"{now.committed} ({now.leased} leased)", None),
        ("stalls", _stalls(now), None),
    ]


def _consumer_rows(now: ConsumerSnapshot, rates: Rates) -> list[Row]:
    buffer = now.buffer_bytes, now.buffer_capacity_bytes
    loss = "" if now.loss is None else f", loss {now.loss:.3f}"
    return [
        ("link", _link(now), None),
        ("received", f"{now.samples} samples, {rates('tokens'):.1f} tokens/s", None),
        ("stream", _stream(now, rates), None),
        ("buffer", f"{readable_bytes(buffer[0])} of {readable_bytes(buffer[1])}", buffer),
        ("trained", f"{now.trained} ({now.held} held)", None),
        ("step", f"{now.step}{loss}", None),
        ("stalls", _stalls(now), None),
    ]


def _members(now: ProducerSnapshot) -> str:
    ranks = f" ({', '.join(now.members)})" if now.members else ""
    local = here(len(now.same_host), len(now.members))
    names = f"{len(now.members) or 'none'} attached{ranks}{local}"
    return f"{names}, term {now.term}" if now.term else names


def _link(now: ConsumerSnapshot) -> str:
    linked = [state in ("granted", "open") for state in now.producers.values()]
    count = f" to {sum(linked)} of {len(linked)} producers" if len(linked) > 1 else ""
    if not now.attached:
        return f"attached{count}" if any(linked) else "waiting for the producer"
    draining = ", draining" * now.draining
    local = here(len(now.same_host), sum(linked))
    return f"attached{count}{local}, term {now.term}{draining}"


def here(local: int, links: int) -> str:
    """How many of the links are to this host's own, behind other words."""
    if not local:
        return ""
    return ", on this host" if local == links else f", {local} of {links} on this host"


def _stream(now: Snapshot, rates: Rates) -> str:
    ratio = now.logical_bytes / max(1, now.encoded_bytes)
    logical, wire = rates("logical_bytes") / 1e6, rates("wire_bytes") / 1e6
    return f"{logical:.2f} MB/s logical, {wire:.2f} MB/s wire, ratio {ratio:.2f}"


def _stalls(now: Snapshot) -> str:
    seconds = now.stall_seconds.items()
    return ", ".join(f"{cause.replace('_', ' ')} {value:.0f} s" for cause, value in seconds)


def readable_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


def _table(snapshot: Snapshot, rates: Rates) -> Table:
    table = Table.grid(padding=(0, 2))
    for label, text, bar in rows(snapshot, rates):
        drawn = ProgressBar(total=max(1, bar[1]), completed=bar[0], width=16) if bar else ""
        table.add_row(label, text, drawn)
    return table
