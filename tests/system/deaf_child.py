"""A consumer's link that does not read for a while: `deaf_child.py ADDRESS`.

Prints a line when it is up and "alive" at the end.
"""

import sys
import time
from contextlib import suppress

import zmq

from draftfeed_consumer.link import HEARTBEAT_MS, Link, LinkDown
from draftfeed_proto import messages as m

DEAF_SECONDS = 2.5 * HEARTBEAT_MS / 1000


def main(address: str) -> None:
    with zmq.Context() as context:
        link = Link(context, address)
        while not link.check():
            time.sleep(0.01)
        link.send(m.Inquire())
        say("up")
        time.sleep(DEAF_SECONDS)
        while link.receive() is not None:
            pass
        with suppress(LinkDown):
            link.check()
        link.close()


def say(words: str) -> None:
    sys.stdout.write(words + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
    say("alive")
