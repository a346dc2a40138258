"""`[archive]` of producer.toml."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec

Order = Literal["samples", "segments", "stored"]


class ArchiveConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where segments are kept when the spool has done with them, and how they are served again."""

    roots: Annotated[tuple[Path, ...], msgspec.Meta(min_length=1)]
    """Directories, best on drives of their own: a segment goes to the one with most space left.
    Each is made when it is missing; what mounts them must be there first."""
    quota_bytes: int = 0
    """Of all roots together; 0: what the drives hold. When it is reached the stream goes on and
    nothing more is archived: later epochs generate those samples again. A process counts what is
    there when it starts and what it adds, and not what others add meanwhile."""
    min_free_bytes: int = 1 << 30
    """A root is full when its drive has less than this left, or less than the spool on the same
    drive may still grow by."""
    order: Order = "samples"
    """In which an epoch is served: `samples`, each anywhere; `segments`, one segment after the
    other in random order, and its samples in random order: fewer seeks, for drives that seek;
    `stored`, as they lie in the archive. What is drawn anew goes through the consumer's window."""
    seed: int = 0
    """With the epoch it fixes that order."""

    def __post_init__(self) -> None:
        for field in ("quota_bytes", "min_free_bytes", "seed"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} is {getattr(self, field)}, it must not be negative")
        if len(set(self.roots)) < len(self.roots):
            raise ValueError("roots names a directory twice")
