"""One end of transport.py: a process that sends samples, or one that receives and checks them."""

import sys

from draftfeed_consumer.memory import keep_chunks_mapped
from transport_check import Check
from transport_orders import Order, Talk, order_of
from transport_others import OTHERS
from transport_peers import OWN, Source
from transport_states import StateSet, load


def main() -> int:
    order = order_of(sys.argv[1])
    talk = Talk()
    keep_chunks_mapped()  # as both of `draftfeed`'s services do
    states = load(order.states)
    if order.corrupt and order.role == "producer":
        states.samples[0].view("u2")[0, 0, 0] ^= 1
    if order.stages:
        import transport_stages

        talk.on_word = transport_stages.install(order.role, talk)
    try:
        if order.transport == "draftfeed":
            _draftfeed(order, states, talk)
        else:
            _peer(order, states, talk)
    except ImportError as error:
        talk.tell("absent", why=str(error))
    talk.wait("bye")
    return 0


def _draftfeed(order: Order, states: StateSet, talk: Talk) -> None:
    if order.role == "producer":
        import transport_producer

        transport_producer.serve(order, states, talk)
    else:
        import transport_consumer

        transport_consumer.receive(order, states, Check(order, states, talk), talk)


def _peer(order: Order, states: StateSet, talk: Talk) -> None:
    source, sink_of = {**OWN, **OTHERS}[order.transport]
    if order.role == "producer":
        _send(order, states, talk, source(order, states))
        return
    sink = sink_of(order, states)
    check = Check(order, states, talk)
    for n in range(order.number, order.samples, order.consumers):
        for producer in range(order.producers):
            size = states.samples[order.index(producer, n, len(states.samples))].nbytes
            check.sample(producer, n, sink.receive(producer, size))
    check.done()


def _send(order: Order, states: StateSet, talk: Talk, source: Source) -> None:
    talk.tell("serving", address=source.address)
    source.await_consumers()
    for n in range(order.samples):
        if n == order.warm:
            talk.wait("live")
        index = order.index(order.number, n, len(states.samples))
        source.send(n % order.consumers, index)
    source.finish()


if __name__ == "__main__":
    sys.exit(main())
