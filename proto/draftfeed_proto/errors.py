"""Errors of the wire and record formats.

ProtoError (ValueError)
├── MalformedMessage      bytes that are not a message of this protocol
├── LimitExceeded         a length or count above its limit, refused before anything is allocated
├── UnknownCodec          a codec this build does not know
├── UnavailableISA        the environment forces an implementation that cannot be used here
├── DescriptorMismatch    the consumer expects something else than the producer serves
├── TooFewLayers          no DFlash default for a target this shallow: name the layer ids
├── IncompatibleVersion   the two ends speak different major versions
├── KeyFileError          a CURVE key that cannot be used, or that others may read
└── ChunkError            one chunk of a sample is bad; the sample can be sent again
    ├── MalformedChunk    its header contradicts itself or its payload
    └── ChecksumMismatch  its bytes changed between encoder and reader
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

MAX_REASON_CHARS = 500
"""Reasons quote the other end's bytes, and are sent back to it: they must fit into a message."""


class ProtoError(ValueError):
    """Base of every error in this package."""


class MalformedMessage(ProtoError):
    def __init__(self, reason: str) -> None:
        self.reason = reason[:MAX_REASON_CHARS]
        super().__init__(f"malformed message: {self.reason}")


class LimitExceeded(ProtoError):
    def __init__(self, what: str, value: int, limit: int) -> None:
        super().__init__(f"{what} is {value}, the limit is {limit}")
        self.what, self.value, self.limit = what, value, limit


class UnknownCodec(ProtoError):
    def __init__(self, codec: str | int, known: list[str]) -> None:
        super().__init__(f"unknown codec {codec!r}; this build knows {', '.join(known)}")
        self.codec, self.known = codec, known


class UnavailableISA(ProtoError):
    def __init__(
        self, variable: str, forced: str, known: Sequence[str], able: Sequence[str], lacking: str
    ) -> None:
        """lacking: why `able` are so few; empty when it is the processor."""
        what = "which this machine cannot run" if forced in known else "which is unknown"
        why = f" (the C is not there: {lacking})" if lacking else ""
        super().__init__(
            f"{variable} is {forced!r}, {what}; it may be {' or '.join(able)} here{why}, and "
            "without it the fastest is taken"
        )
        self.forced, self.able = forced, able


class DescriptorMismatch(ProtoError):
    def __init__(self, field: str, expected: Any, served: Any) -> None:
        super().__init__(
            f"{field}: the consumer expects {expected!r}, the producer serves {served!r}"
        )
        self.field, self.expected, self.served = field, expected, served


class TooFewLayers(ProtoError):
    def __init__(self, num_layers: int, n: int) -> None:
        super().__init__(f"{num_layers} layers are too few for {n} DFlash taps; name the layer ids")
        self.num_layers, self.n = num_layers, n


class IncompatibleVersion(ProtoError):
    def __init__(self, ours: tuple[int, int], theirs: tuple[int, int]) -> None:
        super().__init__(
            f"protocol {theirs[0]}.{theirs[1]} cannot talk to {ours[0]}.{ours[1]}: "
            "upgrade the older end, major versions must be equal"
        )
        self.ours, self.theirs = ours, theirs


class KeyFileError(ProtoError):
    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"key file {path}: {reason}")
        self.path, self.reason = path, reason


class ChunkError(ProtoError):
    """Base of what can be wrong with one chunk."""


class MalformedChunk(ChunkError):
    def __init__(self, reason: str) -> None:
        super().__init__(f"malformed chunk: {reason}")
        self.reason = reason


class ChecksumMismatch(ChunkError):
    def __init__(self, expected: int, actual: int) -> None:
        super().__init__(f"chunk checksum is {actual:016x}, its header says {expected:016x}")
        self.expected, self.actual = expected, actual
