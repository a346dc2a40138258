"""Several epochs out of one generation: what each of them was made of, by what both ends wrote."""

from collections.abc import Iterator

import msgspec

from draftfeed_deploy.records import GeneratedSample, ReceivedSample
from draftfeed_deploy.report_records import RunFiles
from draftfeed_proto.ids import SampleId


class EpochReport(msgspec.Struct, frozen=True, kw_only=True):
    epoch: int
    """From 1; in ids they count from 0."""
    generated: int
    """Samples that the target made for it. The others are replayed: out of the archive, or once
    more out of the spool when their segment has not gone there yet."""
    delivered: int
    trained: int
    """Uses by completed optimizer steps."""
    equal: int
    """Delivered with the very tensors of the first epoch, by their digests."""
    seconds: float
    """From its first sample's arrival to its last."""


def epoch_reports(files: RunFiles, epochs: int) -> list[EpochReport]:
    """Empty when there was one epoch."""
    return [_report(files, epoch) for epoch in range(epochs)] if epochs > 1 else []


def _report(files: RunFiles, epoch: int) -> EpochReport:
    first = {in_epoch(sample.id, epoch): sample for sample in delivered(files, 0)}
    here = delivered(files, epoch)
    times = [sample.time_seconds for sample in here]
    used = [id for step in files.steps for id in step.ids]
    return EpochReport(
        epoch=epoch + 1,
        generated=sum(epoch_of(sample.id) == epoch for sample in files.generated),
        delivered=len({sample.id for sample in here}),
        trained=sum(epoch_of(id) == epoch for id in used),
        equal=len({s.id for s in here if s.id in first and first[s.id].digest == s.digest}),
        seconds=max(times) - min(times) if times else 0.0,
    )


def epoch_lines(epochs: list[EpochReport]) -> list[str]:
    """For a terminal: one."""
    parts = [_words(one) for one in epochs]
    return [f"  epochs     {'; '.join(parts)}"] if parts else []


def _words(one: EpochReport) -> str:
    replayed = one.delivered - one.generated
    made = f"{one.generated} generated" if one.generated else ""
    kept = f"{replayed} replayed" if replayed > 0 else ""
    return f"{one.epoch}: {', '.join(filter(None, (made, kept)))}, {one.seconds:.1f} s"


def delivered(files: RunFiles, epoch: int) -> list[ReceivedSample]:
    return [sample for sample in files.received if epoch_of(sample.id) == epoch]


def sources(files: RunFiles, epochs: int) -> Iterator[tuple[str, GeneratedSample]]:
    """What the target made, by the ids that it was to be served under: in the epoch that it was
    made for, and in each after it for which nothing was made again; the last of each id counts."""
    for sample in sorted(files.generated, key=lambda sample: epoch_of(sample.id)):
        yield sample.id, sample
        for epoch in range(epoch_of(sample.id) + 1, epochs):
            yield in_epoch(sample.id, epoch), sample


def epoch_of(id: str) -> int:
    """From 0; 0 for what is no id."""
    try:
        return SampleId.parse(id).epoch
    except ValueError:
        return 0


def in_epoch(id: str, epoch: int) -> str:
    """The same prompt's sample there; what is no id stays as it is."""
    try:
        return str(msgspec.structs.replace(SampleId.parse(id), epoch=epoch))
    except ValueError:
        return id
