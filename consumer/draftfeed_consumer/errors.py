"""Errors of the consumer.

ConsumerError (ValueError)
├── BufferTooSmall       the buffer cannot hold what the trainer needs at once
├── TrainerError         the [trainer] table names nothing that can be run
├── StateError           a checkpoint's state that is not this stream's, or none at all
├── AddressError         an address ZeroMQ does not understand
└── StreamError          the stream ended otherwise than at the end of its samples
    ├── StreamRefused    the producer will not serve this consumer: configuration, not weather
    ├── ProducerClosing  the producer was shut down in an orderly way and did not come back
    ├── StreamLost       the link was down for longer than allowed
    ├── Fenced           another consumer took over: this one stops and does not come back
    └── StreamClosed     this consumer closed it
"""


class ConsumerError(ValueError):
    """Base of every error in this package."""


class BufferTooSmall(ConsumerError):
    def __init__(self, needed_bytes: int, capacity_bytes: int, why: str) -> None:
        super().__init__(
            f"the buffer of {capacity_bytes} bytes is too small: {why}; "
            f"set [buffer] capacity_bytes to {needed_bytes} or more"
        )
        self.needed_bytes, self.capacity_bytes, self.why = needed_bytes, capacity_bytes, why


class TrainerError(ConsumerError):
    def __init__(self, reason: str) -> None:
        super().__init__(f"[trainer] {reason}")
        self.reason = reason


class StateError(ConsumerError):
    """Not a state of ours, of another stream, or given when samples had already come."""


class AddressError(ConsumerError):
    def __init__(self, address: str, reason: str) -> None:
        super().__init__(
            f"cannot connect to {address!r}: {reason}; [producer] addresses are of the form "
            '"tcp://HOST:PORT"'
        )
        self.address, self.reason = address, reason


class StreamError(ConsumerError):
    """Base of every end of a stream that is not the end of its samples."""


class StreamRefused(StreamError):
    def __init__(self, address: str, code: str, reason: str) -> None:
        super().__init__(f"{address} refused this consumer: {reason}")
        self.address, self.code, self.reason = address, code, reason


class ProducerClosing(StreamError):
    def __init__(self, address: str, reason: str) -> None:
        super().__init__(f"{address} was shut down ({reason}) and did not come back")
        self.address, self.reason = address, reason


class StreamLost(StreamError):
    def __init__(self, address: str, seconds: float) -> None:
        super().__init__(f"{address} has been out of reach for {seconds:.0f} s")
        self.address, self.seconds = address, seconds


class Fenced(StreamError):
    """Whatever was trained since the last durable checkpoint is trained by somebody else."""

    def __init__(self, address: str, reason: str, term: int) -> None:
        super().__init__(f"another consumer took over at {address}: {reason}")
        self.address, self.reason, self.term = address, reason, term


class StreamClosed(StreamError):
    def __init__(self) -> None:
        super().__init__("the stream was closed")
