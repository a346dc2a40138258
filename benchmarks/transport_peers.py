"""What any program could move samples with: a plain socket, and ZeroMQ. Buffers are used again, and
messages are large."""

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from transport_orders import Order
from transport_states import StateSet

PIECE_BYTES = 4 << 20
"""Of a message where a sample is sent as several, as in draftfeed."""
AHEAD = 4
"""Samples that a producer makes ready before the first of them was fetched."""


class Source(Protocol):
    """The end of a producer, with one link to each consumer."""

    address: str

    def await_consumers(self) -> None: ...

    def send(self, link: int, index: int) -> None:
        """A sample of the set to a consumer; waits where too much is on its way."""
        ...

    def finish(self) -> None:
        """Everything was sent, and must arrive."""
        ...


class Sink(Protocol):
    """The end of a consumer, with one link to each producer."""

    def receive(self, producer: int, size: int) -> Iterator[memoryview]:
        """The next sample's bytes, in pieces: each is valid until the next is asked for."""
        ...


def bytes_of(states: StateSet) -> list[memoryview]:
    return [sample.reshape(-1).view(np.uint8).data for sample in states.samples]


def pieces_of(data: memoryview, size: int = PIECE_BYTES) -> list[memoryview]:
    return [data[start : start + size] for start in range(0, len(data), size)]


class Lines:
    """One TCP connection to each consumer."""

    def __init__(self, order: Order) -> None:
        self._listener = socket.create_server((order.host, 0))
        self.address = f"{order.host}:{self._listener.getsockname()[1]}"
        self._links: dict[int, socket.socket] = {}
        self._consumers = order.consumers

    def await_all(self) -> list[socket.socket]:
        """In the order of the consumers."""
        while len(self._links) < self._consumers:
            link, _ = self._listener.accept()
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._links[read_exactly(link, 1)[0]] = link
        return [self._links[number] for number in range(self._consumers)]


def read_exactly(link: socket.socket, size: int) -> bytes:
    data = link.recv(size, socket.MSG_WAITALL)
    if len(data) < size:
        raise SystemExit("the other end has gone")
    return data


def dial(address: str, number: int) -> socket.socket:
    """To a producer's `Lines`, by a consumer."""
    host, _, port = address.rpartition(":")
    link = socket.create_connection((host, int(port)))
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.sendall(bytes([number]))
    return link


class TcpSource:
    def __init__(self, order: Order, states: StateSet) -> None:
        self._data = bytes_of(states)
        self._lines = Lines(order)
        self.address = self._lines.address

    def await_consumers(self) -> None:
        self._links = self._lines.await_all()

    def send(self, link: int, index: int) -> None:
        left = self._data[index]
        while left:
            left = left[self._links[link].sendmsg([left]) :]

    def finish(self) -> None:
        """The kernel delivers."""


class TcpSink:
    def __init__(self, order: Order, states: StateSet) -> None:
        self._buffer = memoryview(bytearray(states.largest_bytes))
        self._links = [dial(address, order.number) for address in order.addresses]

    def receive(self, producer: int, size: int) -> Iterator[memoryview]:
        link = self._links[producer]
        for place in pieces_of(self._buffer[:size]):
            if link.recv_into(place, flags=socket.MSG_WAITALL) < len(place):
                raise SystemExit("the producer has gone")
            yield place


class ZmqSource:
    def __init__(self, order: Order, states: StateSet) -> None:
        import zmq

        self._pieces = [pieces_of(data) for data in bytes_of(states)]
        self._context = zmq.Context()
        self._sockets = [self._context.socket(zmq.PUSH) for _ in range(order.consumers)]
        for push in self._sockets:
            push.setsockopt(zmq.SNDHWM, 8)
            if order.keys is not None:
                own = _key_pair(order.keys / "producers.secret")
                push.setsockopt(zmq.CURVE_SERVER, 1)
                push.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
            push.bind(f"tcp://{order.host}:*")
        self.address = " ".join(push.get_string(zmq.LAST_ENDPOINT) for push in self._sockets)

    def await_consumers(self) -> None:
        """A PUSH socket waits for its peer."""

    def send(self, link: int, index: int) -> None:
        for piece in self._pieces[index]:
            self._sockets[link].send(piece, copy=False)

    def finish(self) -> None:
        self._context.destroy()  # lingers until all is sent


class ZmqSink:
    def __init__(self, order: Order, states: StateSet) -> None:
        import zmq

        context = zmq.Context()
        self._sockets = [context.socket(zmq.PULL) for _ in order.addresses]
        for pull, addresses in zip(self._sockets, order.addresses, strict=True):
            pull.setsockopt(zmq.RCVHWM, 8)
            if order.keys is not None:
                own = _key_pair(order.keys / "clients" / "consumer.secret")
                pull.setsockopt(zmq.CURVE_SERVERKEY, _key_pair(order.keys / "producers.secret")[0])
                pull.setsockopt(zmq.CURVE_PUBLICKEY, own.public)
                pull.setsockopt(zmq.CURVE_SECRETKEY, own.secret)
            pull.connect(addresses.split()[order.number])

    def receive(self, producer: int, size: int) -> Iterator[memoryview]:
        while size:
            frame = self._sockets[producer].recv(copy=False)
            yield frame.buffer
            size -= len(frame)


def _key_pair(path: Path) -> Any:
    import zmq

    from draftfeed_proto import keys

    return keys.read_secret(path, zmq.curve_public)


OWN = {"tcp": (TcpSource, TcpSink), "pyzmq": (ZmqSource, ZmqSink)}
