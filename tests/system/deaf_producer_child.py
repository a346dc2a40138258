"""A producer's socket that is not read until its input ends. It prints where it listens, and then
how many messages it has read, when nothing more comes."""

import sys

import zmq

from draftfeed_producer.listener import Listener, ServerConfig

QUIET_MS = 500

listener = Listener(ServerConfig(bind="tcp://127.0.0.1:*"))
print(listener.address, flush=True)  # noqa: T201
sys.stdin.read()
messages = 0
while listener.socket.poll(QUIET_MS, zmq.POLLIN):
    listener.socket.recv_multipart()
    messages += 1
listener.close()
print(messages, flush=True)  # noqa: T201
