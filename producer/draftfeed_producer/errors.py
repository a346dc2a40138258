"""Errors of the producer.

ProducerError (ValueError)
├── PromptError           the prompt file, or one line of it, cannot be used
├── LineError             why not; who has the file makes a PromptError of it
├── ModelError            a directory that is not a model this engine can run
├── LayerIdError          layer ids the target does not have, or not in rising order
├── MissingPackageError   an optional dependency is not installed
├── TapLayoutError        a tensor that the tap cannot read or write as it lies in memory
├── CaptureError          a sample whose rows are incomplete even after it was made again
├── RingTooSmall          more rows at once than the staging ring has slots
├── EngineError           the engine cannot start, or keeps dying
├── BindError             the server cannot listen on its address
├── OutputFileError       the file for conversations cannot be used
└── SpoolError            the spool cannot be used
    ├── SpoolBusy         another producer owns it
    ├── SpoolMismatch     it was made for another stream or prompt file
    ├── SpoolDamaged      bytes of it are not what was written, and it matters
    ├── ShardError        shards that are not there, or may not be moved
    ├── UnknownSample     it has no sample of that name
    ├── ArchiveError      an archive cannot be used, or is of another stream or prompt file
    │   ├── ArchiveDamaged    a sealed segment, or its index, is not what was written
    │   └── ArchiveGone       a file that was there cannot be read, and may still be whole
    └── SpoolFull         the disk is; space comes back with commits
"""

from collections.abc import Sequence
from pathlib import Path


class ProducerError(ValueError):
    """Base of every error in this package."""


class PromptError(ProducerError):
    """`line` is 1-based, None when the whole file is meant."""

    def __init__(self, path: str | Path, line: int | None, reason: str) -> None:
        where = f"{path}, line {line}" if line is not None else str(path)
        super().__init__(f"{where}: {reason}")
        self.path, self.line, self.reason = str(path), line, reason


class LineError(ProducerError):
    """What is wrong with a line, whichever it is."""


class ModelError(ProducerError):
    def __init__(self, path: str | Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = str(path), reason


class LayerIdError(ProducerError):
    def __init__(self, layer_ids: Sequence[int], num_layers: int, reason: str) -> None:
        super().__init__(
            f"layer ids {list(layer_ids)}: {reason}; "
            f"valid are rising ids from 0 to {num_layers - 1} (outputs of the decoder blocks)"
        )
        self.layer_ids, self.num_layers, self.reason = tuple(layer_ids), num_layers, reason


class MissingPackageError(ProducerError):
    """draftfeed is in no package registry: extras are installed from a checkout of it."""

    def __init__(self, package: str, extra: str) -> None:
        super().__init__(
            f"{package} is not installed; in the checkout run: pip install '.[{extra}]'"
        )
        self.package, self.extra = package, extra


class CaptureError(ProducerError):
    def __init__(
        self,
        sample_id: str,
        missing: int,
        fed: int,
        cause: str = "the model does not call every tapped decoder block in each forward pass",
    ) -> None:
        super().__init__(f"sample {sample_id}: {missing} of {fed} fed tokens left no row; {cause}")
        self.sample_id, self.missing, self.fed = sample_id, missing, fed


class RingTooSmall(ProducerError):
    def __init__(self, rows: int, slots: int) -> None:
        super().__init__(
            f"{rows} rows were asked for at once, and the staging ring has {slots} slots; "
            "make the ring larger, or gather in smaller pieces"
        )
        self.rows, self.slots = rows, slots


class EngineError(ProducerError):
    """An engine that runs in processes of its own cannot start, or keeps dying."""


class TapLayoutError(ProducerError):
    def __init__(self, argument: str, found: str, wanted: str) -> None:
        super().__init__(f"{argument} is {found}; it must be {wanted}")
        self.argument, self.found, self.wanted = argument, found, wanted


class BindError(ProducerError):
    def __init__(self, address: str, reason: str, *, absent: bool = False) -> None:
        """absent: no interface has the address, which may come while a machine boots."""
        super().__init__(
            f"cannot listen on {address}: {reason}; choose another [server] bind, of the form "
            '"tcp://ADDRESS:PORT"'
        )
        self.address, self.reason, self.absent = address, reason, absent


class OutputFileError(ProducerError):
    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}")
        self.path, self.reason = path, reason


class SpoolError(ProducerError):
    """Base of what can be wrong with a spool directory."""


class SpoolBusy(SpoolError):
    def __init__(self, directory: Path) -> None:
        super().__init__(f"{directory}: another producer owns this spool; stop it first")
        self.directory = directory


class SpoolMismatch(SpoolError):
    def __init__(self, directory: Path, field: str, there: object, here: object) -> None:
        super().__init__(
            f"{directory}: the spool was made with {field} {there!r}, the configuration gives "
            f"{here!r}; choose another [spool] dir, or delete this one if its samples may go"
        )
        self.directory, self.field, self.there, self.here = directory, field, there, here


class SpoolDamaged(SpoolError):
    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path} {reason}")
        self.path, self.reason = path, reason


class ShardError(SpoolError):
    """Shards that are not there, are written wrongly, or may not be moved."""


class UnknownSample(SpoolError):
    def __init__(self, directory: Path, name: str, reason: str) -> None:
        super().__init__(f"{directory}: {name}: {reason}")
        self.directory, self.name, self.reason = directory, name, reason


class ArchiveError(SpoolError):
    """`root`: the directory that cannot be used."""

    def __init__(self, root: Path, reason: str) -> None:
        super().__init__(f"{root}: {reason}")
        self.root, self.reason = root, reason


class ArchiveDamaged(ArchiveError):
    """`root`: the file that is damaged."""


class ArchiveGone(ArchiveError):
    """`root`: the file that the system does not give."""


class SpoolFull(SpoolError):
    def __init__(self, directory: Path, cause: OSError) -> None:
        super().__init__(f"{directory}: {cause.strerror}")
        self.directory, self.cause = directory, cause
