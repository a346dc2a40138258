"""Errors of the consumer.

ConsumerError (ValueError)
├── BufferTooSmall       the buffer cannot hold what the trainer needs at once
├── TrainerError         the [trainer] table names nothing that can be run
├── DrafterError         a drafter's files cannot be used, or not with this target
├── ExportError          files for another trainer that cannot be made, or not trained on
├── FinalNormError       the final norm of a target that cannot be undone, or not of these states
├── StateError           a checkpoint's state that is not this stream's, or none at all
├── BudgetExceeded       samples that a packed batch has no room for
├── InWorkerProcess      a DataLoader with workers: each would be a member of its own
├── AddressError         an address ZeroMQ does not understand
├── LauncherError        torchrun was started so that its restarts cannot work
├── AssetError           the target's files cannot be had, or are not what was said
│   └── NoAssets         no producer has any
└── StreamError          the stream ended otherwise than at the end of its samples
    ├── StreamRefused    the producer will not serve this consumer: configuration, not weather
    ├── ProducerClosing  the producer was shut down in an orderly way and did not come back
    ├── StreamLost       the link was down for longer than allowed
    ├── AssetsLost       nothing more of the target's files came for longer than allowed
    ├── Fenced           another consumer took over: this one stops and does not come back
    └── StreamClosed     this consumer closed it
"""

from collections.abc import Mapping


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


class ExportError(ConsumerError):
    """Files for another trainer that cannot be made of this stream, or not trained on so."""


class FinalNormError(ConsumerError):
    """The final norm of this target cannot be undone, or did not put out these states."""


class DrafterError(ConsumerError):
    """A drafter's files cannot be used, or not with this target."""


class StateError(ConsumerError):
    """Not a state of ours, of another stream, or given when samples had already come."""


class BudgetExceeded(ConsumerError):
    def __init__(self, rows: int, samples: int, token_budget: int) -> None:
        super().__init__(
            f"{rows} rows in {samples} sample{'s' * (samples > 1)} do not fit into token_budget = "
            f"{token_budget}; make it larger, or reject samples that are longer"
        )
        self.rows, self.samples, self.token_budget = rows, samples, token_budget


class InWorkerProcess(ConsumerError):
    def __init__(self, told: str = "") -> None:
        """told: what a DataLoader adds when it raises this again for its worker: where in there
        it was, which helps nobody."""
        super().__init__(
            "a stream is one member of its group, and a worker process would be another: use "
            "DataLoader(stream, num_workers=0); receiving and decoding have threads of their own"
        )


class AddressError(ConsumerError):
    def __init__(self, address: str, reason: str) -> None:
        super().__init__(
            f"cannot connect to {address!r}: {reason}; [producer] addresses are of the form "
            '"tcp://HOST:PORT"'
        )
        self.address, self.reason = address, reason


class LauncherError(ConsumerError):
    def __init__(self) -> None:
        super().__init__(
            "torchrun's restarts do not work with the store that its ranks share; start it with "
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and --standalone or --rdzv-backend c10d, or "
            "without --max-restarts"
        )


class AssetError(ConsumerError):
    """The target's files cannot be had, stored or trusted; the message says which of these."""


class NoAssets(AssetError):
    def __init__(self, reasons: Mapping[str, str]) -> None:
        """reasons: by address."""
        told = "; ".join(f"{address}: {reason}" for address, reason in reasons.items())
        super().__init__(
            f"no producer serves the target's embedding and head ({told}); set [trainer] target "
            "to the target's model directory"
        )
        self.reasons = dict(reasons)


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


class AssetsLost(StreamError):
    def __init__(self, address: str, missing: str, seconds: float, reason: str) -> None:
        super().__init__(
            f"{address} sent nothing more of the target's files for {seconds:.0f} s ({reason}); "
            f"missing is {missing}; what has come is kept, and the next start goes on from there"
        )
        self.address, self.missing, self.seconds = address, missing, seconds


class Fenced(StreamError):
    """Whatever was trained since the last durable checkpoint is trained by somebody else."""

    def __init__(self, address: str, reason: str, term: int) -> None:
        super().__init__(f"another consumer took over at {address}: {reason}")
        self.address, self.reason, self.term = address, reason, term


class StreamClosed(StreamError):
    def __init__(self) -> None:
        super().__init__("the stream was closed")
