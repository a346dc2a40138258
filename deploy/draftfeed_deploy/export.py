"""A spool's samples as files for another trainer, made whole or not at all.

They are written beside OUT, into OUT.part-PID, which takes the name OUT when all of them are on the
disk: no trainer finds half a file, or half of the files, however this ends.
"""

import logging
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import msgspec
import torch
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import save_file

from draftfeed_consumer.checkpoints import fsync_path
from draftfeed_consumer.errors import ExportError
from draftfeed_consumer.final_norm import FinalNorm, read_final_norm
from draftfeed_consumer.policy import Policy, verdict
from draftfeed_consumer.stream import to_item
from draftfeed_consumer.trainers import Item, exports
from draftfeed_consumer.trainers.exports import NOTE, Format, Note
from draftfeed_deploy.errors import NothingToExport, OutputError
from draftfeed_deploy.spool_contents import Bad, Progressing, decoded, of_damage
from draftfeed_producer.spool.reader import Reader
from draftfeed_producer.spool.segments import Damage, Record
from draftfeed_proto.descriptor import Descriptor

logger = logging.getLogger(__name__)

SAMPLES = "samples.jsonl"
FREED = "freed by their producer meanwhile"
NO_LABEL = "without two adjacent supervised tokens that have rows"
REJECTED = "with values that are not finite, or rows that are all zero"
ARROW_ROWS = 64
"""In memory between two writes; by default it is 1,000, which can be gigabytes of ids."""


class Exported(NamedTuple):
    note: Note
    bad: list[Bad]
    """Damaged in the spool."""


class Files(Protocol):
    """The files of one format, in a directory."""

    @property
    def layer_ids(self) -> tuple[int, ...]: ...
    def fault(self, item: Item) -> str:
        """Why the trainer could not use the sample, or nothing."""
        ...

    def write(self, item: Item) -> str:
        """Returns the name of the file with its states."""
        ...

    def finish(self) -> None: ...


def export(
    reader: Reader, format: Format, out: Path, console: Console, target: Path | None = None
) -> Exported:
    """Every sample of the spool that is whole and can be trained on, one at a time in memory.

    target: its directory, where the final state before its norm is to be computed from the one
        after it, or to be checked.

    Raises ExportError when the stream lacks what the format needs or has another final state than
    it says, FinalNormError when the target's norm cannot be undone, NothingToExport when there is
    no such sample, OutputError when `out` is not empty or cannot be written. Then there is no
    `out`.
    """
    descriptor = reader.owner.descriptor
    segments = reader.segments()
    total = sum(segment.bytes for segment in segments)
    with _whole(out) as folder:
        files = _open(format, folder, descriptor, target)
        with (
            (folder / SAMPLES).open("wb") as lines,
            Progressing(console, total, "exporting") as progress,
        ):
            run = _Run(reader, files, lines)
            for segment in segments:
                for found in reader.scan(segment):
                    run.add(found)
                    progress.add(found.header.encoded_bytes if isinstance(found, Record) else 0)
        if not run.samples:
            raise NothingToExport(reader.directory, {**run.left_out, "damaged": len(run.bad)})
        files.finish()
        note = Note(
            format=format,
            layer_ids=files.layer_ids,
            samples=run.samples,
            left_out=dict(run.left_out),
            descriptor=descriptor,
        )
        (folder / NOTE).write_bytes(msgspec.json.format(msgspec.json.encode(note)))
    return Exported(note, run.bad)


class _Run:
    """Takes what a spool holds, record by record. No sample outlives its call: it can be 1.7 GB."""

    def __init__(self, reader: Reader, files: Files, lines: BinaryIO) -> None:
        self._reader, self._files, self._lines = reader, files, lines
        self._descriptor = reader.owner.descriptor
        self.samples = 0
        self.left_out: Counter[str] = Counter()
        self.bad: list[Bad] = []

    def add(self, found: Record | Damage) -> None:
        if self._reader.is_void(found):
            return
        if isinstance(found, Damage):
            self.bad.append(of_damage(found))
            return
        known = len(self.bad)
        sample = decoded(self._reader, found, self.bad)
        if sample is not None:
            self._take(to_item(sample, self._descriptor))
        elif len(self.bad) == known:
            self.left_out[FREED] += 1

    def _take(self, item: Item) -> None:
        if reason := _rejected(item) or self._files.fault(item):
            self.left_out[reason] += 1
            return
        line = {"id": str(item["id"]), "key": item["key"], "file": self._files.write(item)}
        self._lines.write(msgspec.json.encode(line) + b"\n")
        self.samples += 1


def _rejected(item: Item) -> str:
    """As the trainer of a stream would, unless configured otherwise. The log names the sample."""
    judged = verdict(Policy(), item)
    if judged.reason:
        logger.warning("sample %s: %s", item["id"], judged.reason)
    return REJECTED if judged.action == "reject" else ""


def _open(format: Format, folder: Path, descriptor: Descriptor, target: Path | None) -> Files:
    if format == "specforge":
        if target is not None:
            raise ExportError("--target is for --format speculators: SpecForge gets no final state")
        return SpecForgeFiles(folder, descriptor)
    return SpeculatorsFiles(folder, descriptor, target)


class SpecForgeFiles:
    def __init__(self, folder: Path, descriptor: Descriptor) -> None:
        self.layer_ids = exports.specforge_layers(descriptor)
        self._folder = folder

    def fault(self, item: Item) -> str:
        return "" if exports.has_label(item) else NO_LABEL

    def write(self, item: Item) -> str:
        id = item["id"]
        name = f"{id.epoch}-{id.shard}-{id.ordinal:08d}.ckpt"
        with (self._folder / name).open("wb") as file, _honest():
            torch.save(exports.specforge_tensors(item), file)
        return name

    def finish(self) -> None:
        """Nothing: SpecForge lists the directory."""


class SpeculatorsFiles:
    """Row k of the Arrow data set goes with hs_k.safetensors."""

    def __init__(self, folder: Path, descriptor: Descriptor, target: Path | None) -> None:
        """Raises ExportError when the stream lacks the last block's output and what it could be
        computed from, FinalNormError."""
        from datasets import Features, List, Value
        from datasets.arrow_writer import ArrowWriter

        self.layer_ids = exports.speculators_layers(descriptor)
        self._descriptor, self._norm = descriptor, _norm(descriptor, target)
        self._folder, self._rows = folder, folder / "rows"
        self._rows.mkdir()
        (folder / "hidden_states").mkdir()
        ids, count = List(Value("int64")), Value("int64")
        self._arrow = ArrowWriter(
            path=str(self._rows / "rows.arrow"),
            features=Features(input_ids=ids, loss_mask=ids, seq_len=count),
            writer_batch_size=ARROW_ROWS,
        )
        self._count = 0

    def fault(self, item: Item) -> str:
        return ""  # speculators packs it with others, which have labels

    def write(self, item: Item) -> str:
        name = exports.speculators_file(self._count)
        tensors = exports.speculators_tensors(item, self._descriptor, self._norm)
        ids, mask = tensors["token_ids"], tensors.pop("loss_mask")
        with _honest():
            save_file(tensors, self._folder / name)
        self._arrow.write(
            {"input_ids": ids.numpy(), "loss_mask": mask.numpy(), "seq_len": len(ids)}
        )
        self._count += 1
        return name

    def finish(self) -> None:
        """From a file of rows to the directory that `load_from_disk` takes, by memory map."""
        import datasets

        self._arrow.finalize()
        datasets.disable_progress_bars()  # there is one already
        rows = datasets.Dataset.from_file(str(self._rows / "rows.arrow"))
        rows.with_format("torch").save_to_disk(self._folder)
        shutil.rmtree(self._rows)


def _norm(descriptor: Descriptor, target: Path | None) -> FinalNorm | None:
    """Raises ExportError, FinalNormError."""
    if target is not None:
        return read_final_norm(target)
    if exports.needs_norm(descriptor):
        raise ExportError(
            "the stream has the final state after the target's norm, and speculators wants the "
            f"one before it: say --target DIR, the directory of {descriptor.model}"
        )
    return None


@contextmanager
def _whole(out: Path) -> Iterator[Path]:
    """A directory to fill, which becomes `out` at the end, or is removed. Raises OutputError."""
    out = out.absolute()
    folder = out.with_name(f"{out.name}.part-{os.getpid()}")
    try:
        _check_free(out)
        folder.mkdir(parents=True)
        try:
            yield folder
            _sync(folder)
            folder.rename(out)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
    except OSError as error:
        cause = error if error.strerror else OSError(0, str(error))
        raise OutputError(out, cause, "choose another OUT") from error


def _check_free(out: Path) -> None:
    """Now, and not after hours."""
    if out.is_mount():
        raise FileExistsError(0, "it is a mount point, which cannot be replaced")
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(0, "it is not empty")


def _sync(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        fsync_path(path)


@contextmanager
def _honest() -> Iterator[None]:
    """torch and safetensors tell of a full disk by errors of their own. Raises OSError."""
    try:
        yield
    except SafetensorError as error:
        raise OSError(0, str(error)) from error
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise
