"""Figures of the client: one object that metrics, the terminal and a progress bar all read."""

from typing import NamedTuple


class ProducerStatistics(NamedTuple):
    address: str
    state: str
    """"down", "linked", "fenced", "granted", "open", "done" or "out"."""
    attached: bool
    term: int
    """In which it granted the stream; 0 = not yet."""
    offers: int
    """Samples it has ready and there is no room for."""
    due_bytes: int
    """Decoded, asked for and not complete."""
    logical_bytes: int
    """Decoded, of samples received since the process began."""
    wire_bytes: int
    """Read from its sockets, and from its files where it is on this host."""
    same_host: bool = False
    """Samples are read out of its files."""


class ClientStatistics(NamedTuple):
    attached: bool
    """To every producer that must be there."""
    samples: int
    tokens: int
    logical_bytes: int
    encoded_bytes: int
    """Of chunk frames only."""
    wire_bytes: int
    link_down_seconds: float
    """Time in which a producer was away that had been attached, and was still needed."""
    turn_seconds: float = 0.0
    """Since the client's loop last came round; more than a few say that it hangs. 0 when it has
    ended."""
    producers: tuple[ProducerStatistics, ...] = ()
