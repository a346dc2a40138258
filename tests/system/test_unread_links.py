"""A link that is cut while much of what came over it is unread: libzmq may abort the process."""

import subprocess
import sys
from pathlib import Path

import zmq

from draftfeed_proto import messages as m

MESSAGES = 3_000
CHILD = Path(__file__).with_name("deaf_child.py")


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
