"""A stand-in for the host process of the SGLang engine, which has no SGLang and no torch.

    standin_host.py -m draftfeed_producer.engines.sglang.host COMMANDS TOLD

It speaks as `host.py` does. Its scheduler, which has the real tap, is forked for it by the process
of `standin_scheduler.py`, because importing torch takes longer than all the rest. With that,
starting it takes a quarter of a second.
"""

import multiprocessing.connection as connections
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import zmq

from draftfeed_producer.engines.sglang import messages
from draftfeed_producer.engines.sglang.messages import Abort, Failed, Quit, Start, Started, Submit
from standin_model import Knobs

ZYGOTE = "DRAFTFEED_STANDIN"


def main(commands_address: str, told_address: str) -> None:
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=Start)
    threading.Thread(target=_end_with_producer, daemon=True).start()
    knobs = msgspec.convert(start.args["standin"], Knobs)
    children = [subprocess.Popen(["sleep", "1000"]) for _ in range(knobs.children)]
    context: zmq.Context[Any] = zmq.Context()
    commands, told = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    commands.connect(commands_address)
    told.connect(told_address)
    life = _count(knobs)
    if life in knobs.die_at_start:
        _die(knobs)
    if knobs.failed:
        told.send(messages.encode(Failed(knobs.failed)))
        told.close(linger=5000)
        sys.exit(1)
    if life in knobs.silent:
        signal.pause()
    scheduler = connections.Client(os.environ[ZYGOTE], "AF_UNIX")
    mortal = knobs.die_at_pass and life <= knobs.deaths
    scheduler.send((os.environ[messages.VARIABLE], start.args, bool(mortal)))
    most = knobs.most_input_tokens or knobs.kv_tokens - 7
    started = Started(version="0.0", kv_tokens=knobs.kv_tokens, most_input_tokens=most)
    told.send(messages.encode(started))
    _serve(knobs, commands, told, scheduler)
    for child in children:
        child.kill()
    told.close(linger=1000)


def _serve(knobs: Knobs, commands: Any, told: Any, scheduler: Any) -> None:
    poller = zmq.Poller()
    poller.register(commands, zmq.POLLIN)
    poller.register(scheduler.fileno(), zmq.POLLIN)
    while True:
        for ready, _ in poller.poll():
            if ready is not commands:
                try:
                    told.send(scheduler.recv_bytes())
                except (EOFError, ConnectionResetError):
                    _die(knobs)
                continue
            raw = commands.recv()
            for line in range(knobs.chatter):
                print("line", line, "x" * 200)  # noqa: T201
            match messages.decode_command(raw):
                case Submit() | Abort():
                    scheduler.send_bytes(raw)
                case Quit() if not knobs.deaf:
                    return


def _end_with_producer() -> None:
    while os.read(0, 1):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _count(knobs: Knobs) -> int:
    """Which life this is, from 1 on."""
    if not knobs.lives:
        return 1
    with Path(knobs.lives).open("ab") as file:
        file.write(b"x")
    return Path(knobs.lives).stat().st_size


def _die(knobs: Knobs) -> None:
    print("RuntimeError: the scheduler is gone")  # noqa: T201
    print("and this is only noise", flush=True)  # noqa: T201
    if not knobs.die_by:
        os._exit(7)
    os.kill(os.getpid(), knobs.die_by)
    signal.pause()


if __name__ == "__main__":
    main(*sys.argv[-2:])
