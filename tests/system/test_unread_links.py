"""A link that is cut while much of what came over it is unread: libzmq may abort the process."""

import socket
import struct
import subprocess
import sys
from pathlib import Path

import zmq

from draftfeed_proto import messages as m

MESSAGES = 3_000
CHILD = Path(__file__).with_name("deaf_child.py")
PRODUCER_CHILD = Path(__file__).with_name("deaf_producer_child.py")

# ZMTP 3.0 (rfc.zeromq.org/spec/23) of a DEALER without keys, said by hand: a heartbeat is to lie
# between messages, and libzmq sends one when its clock says so.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)


def command(name: bytes, body: bytes) -> bytes:
    return frame(0x04, bytes([len(name)]) + name + body)


def frame(flags: int, body: bytes) -> bytes:
    return bytes([flags, len(body)]) + body


def ready() -> bytes:
    kind = b"DEALER"
    return command(b"READY", b"\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind)


def heartbeat() -> bytes:
    return command(b"PING", struct.pack(">H", 150))


def test_producer_that_dies_while_the_trainer_holds_the_interpreter_does_not_end_it() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    command = [sys.executable, str(CHILD), f"tcp://127.0.0.1:{port}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "up\n"
            member, _ = router.recv_multipart()
            for _ in range(MESSAGES):
                router.send_multipart([member, m.encode(m.Ping(term=1, session="s"))])
            router.close(linger=1_000)
            output, _ = child.communicate(timeout=60)
        finally:
            child.kill()
            context.destroy(linger=0)
    assert (output, child.returncode) == ("alive\n", 0)


def test_member_that_goes_while_a_frozen_producer_reads_nothing_does_not_end_it() -> None:
    """A machine that was suspended: libzmq stops reading at a high-water mark, the connection is
    reset, and what it reads behind the mark when all goes on begins with a heartbeat."""
    said = frame(0, m.encode(m.AtWork(term=1, session="s", ids=[])))
    some = b"".join([heartbeat(), *[said] * 30])
    with subprocess.Popen(
        [sys.executable, str(PRODUCER_CHILD)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        try:
            assert child.stdout is not None
            port = int(child.stdout.readline().rpartition(":")[2])
            with socket.create_connection(("127.0.0.1", port)) as member:
                member.sendall(GREETING + ready())
                _until(member, b"READY")
                member.sendall(some * (MESSAGES // 30))
                # To be reset, and not closed in good order.
                member.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                _until(member, b"PONG")
            output, _ = child.communicate(timeout=60)
        finally:
            child.kill()
    assert child.returncode == 0
    assert int(output) > 0


def _until(member: socket.socket, words: bytes) -> None:
    came = b""
    while words not in came:
        data = member.recv(4096)
        assert data, f"no {words!r} in {came!r}"
        came += data
