"""What `draftfeed producer --check` prints: what was seen, and what it means."""

from collections.abc import Iterator
from pathlib import Path

from draftfeed_deploy.check import Findings
from draftfeed_deploy.progress import readable_bytes
from draftfeed_deploy.report_checks import Check
from draftfeed_producer.config import ProducerConfig
from draftfeed_producer.engines import TARGETLESS, SGLangConfig
from draftfeed_producer.service import describe
from draftfeed_producer.spool.files import free_bytes
from draftfeed_proto.sample import LayerCounters, Sample


def lines_of(config: ProducerConfig, where: str, findings: Findings) -> tuple[list[str], bool]:
    """(for people, whether it passed)"""
    checks = [*_checks(findings), _memory(config, findings), _disk(config)]
    passed = all(check.passed for check in checks)
    verdicts = [
        f"{'ok' if check.passed else 'FAILED':8}{check.name}: {check.detail}" for check in checks
    ]
    seen = [*_samples(findings), "", *_layers(findings), "", *_rates(config, findings)]
    head = f"{where}: {describe(findings.descriptor)}"
    last = "PASSED" if passed else "FAILED"
    return [head, "", *seen, "", *verdicts, "", last], passed


# what was seen


def _samples(findings: Findings) -> Iterator[str]:
    head = ("sample", "prompt", "response", "rows", "finish", "arrived", "captured again")
    yield _row(*head)
    for sample in findings.live.samples.values():
        response = int(sample.loss_mask.sum())
        compared = findings.compared.get(sample.id)
        yield _row(
            sample.key,
            len(sample.input_ids) - response,
            response,
            len(sample.hidden_states),
            sample.finish_reason,
            "equal" if _arrived(findings, sample) else "DIFFERS",
            f"off by {compared.worst}" if compared else "MISSING",
        )


def _row(key: object, *cells: object) -> str:
    widths = (7, 9, 7, 8, 9)
    texts = [f"{cell:>{w}}" for cell, w in zip(cells, widths, strict=False)]
    return f"{key!s:12}{''.join(texts)}  {cells[-1]}".rstrip()


def _layers(findings: Findings) -> Iterator[str]:
    names = [field.replace("_", " ") for field in LayerCounters._fields]
    yield f"{'layer':12}" + "".join(f"{name:>12}" for name in names)
    for layer, counters in zip(findings.descriptor.layer_names, _totals(findings), strict=False):
        yield f"{layer:<12}" + "".join(f"{count:>12,}" for count in counters)


def _totals(findings: Findings) -> list[LayerCounters]:
    samples = [sample.counters for sample in findings.live.samples.values()]
    return [
        LayerCounters(*(sum(column) for column in zip(*layer, strict=True)))
        for layer in zip(*samples, strict=True)
    ]


def _rates(config: ProducerConfig, findings: Findings) -> Iterator[str]:
    live, again, passage = findings.live, findings.again, findings.passage
    yield f"capture     {_rate(live.rows_per_second)} ({config.capture.mode})"
    yield f"one pass    {_rate(again.rows_per_second)}"
    if passage is None:
        return
    megabytes = passage.logical_bytes / 1e6
    ratio = passage.logical_bytes / passage.encoded_bytes
    encode = megabytes / max(passage.encode_seconds, 1e-6)
    loopback = megabytes / max(passage.loopback_seconds, 1e-6)
    spool = config.spool
    threads = f"encode_threads = {spool.encode_threads}"
    yield f"encode      {spool.codec}, ratio {ratio:.3f}, {encode:,.0f} MB/s with {threads}"
    yield f"loopback    {loopback:,.0f} MB/s, {megabytes:.1f} MB of hidden states"


def _rate(rows_per_second: float | None) -> str:
    return "unknown" if rows_per_second is None else f"{rows_per_second:,.1f} tokens/s"


# what it means


def _checks(findings: Findings) -> Iterator[Check]:
    yield _complete(findings)
    yield _intact(findings)
    yield _reproduced(findings)
    yield _in_place(findings)
    yield from _final(findings)
    yield _values(findings)


def _complete(findings: Findings) -> Check:
    samples = findings.live.samples.values()
    faults = [
        f"sample {sample.key} has {len(sample.hidden_states)} rows for {fed} fed tokens"
        for sample in samples
        if len(sample.hidden_states) != (fed := len(sample.input_ids) - 1)
    ]
    if len(samples) < len(findings.prompts):
        faults.append("the others were not finished in time")
    if findings.recaptured:
        faults.append(f"{findings.recaptured} had to be made again: rows were missing")
    detail = f"{len(samples)} of {len(findings.prompts)}"
    return _check("samples with a row for every fed token", faults, detail)


def _intact(findings: Findings) -> Check:
    samples = findings.live.samples.values()
    faults = [
        f"sample {sample.key} did not arrive as it was made"
        for sample in samples
        if not _arrived(findings, sample)
    ]
    if findings.passage is None:
        faults.append("nothing was sent")
    elif not findings.passage.committed:
        faults.append("the producer did not store that they are trained")
    detail = f"{len(samples)} digests compared, commit acknowledged"
    return _check("spool, server and consumer leave them as they are", faults, detail)


def _arrived(findings: Findings, sample: Sample) -> bool:
    passage = findings.passage
    return passage is not None and passage.digests.get(sample.id) == sample.digest()


def _reproduced(findings: Findings) -> Check:
    name = "the same tokens in one pass give the same rows"
    faults = []
    for sample in findings.live.samples.values():
        compared = findings.compared.get(sample.id)
        if compared is None:
            faults.append(f"sample {sample.key} was not finished in time")
        elif compared.first is not None:
            faults.append(f"sample {sample.key} is off by {compared.first}")
    rows = sum(compared.rows for compared in findings.compared.values())
    computed = min(rows, findings.again.computed)
    detail = f"{computed} rows, at most {findings.tolerance} allowed"
    if computed < rows:
        detail += f"; {rows - computed} more came from the prefix cache and prove nothing"
    return _check(name, faults, detail, none=not rows)


def _in_place(findings: Findings) -> Check:
    """Ids and rows that are off by one train without complaint."""
    name = "another token changes its own row and none before it"
    changed = findings.changed
    if changed is None:
        return Check(name, False, "there was no sample to change")
    faults = []
    if changed.before.first is not None:
        faults.append(f"a row before it is off by {changed.before.first}")
    if changed.own.first is None:
        faults.append("its own row is the same")
    return _check(name, faults, f"at position {changed.position}")


def _final(findings: Findings) -> Iterator[Check]:
    if (final := findings.final) is None:
        return
    name = f"final states are {findings.descriptor.final}"
    if final.unknown:
        yield Check(name, True, f"not checked: {final.unknown}")
    else:
        detail = f"{final.rows} rows, divided by the weights of the target's norm"
        yield _check(name, final.faults, detail, none=not final.rows)


def _values(findings: Findings) -> Check:
    totals = _totals(findings)
    layers = list(zip(findings.descriptor.layer_names, totals, strict=False))
    faults = [
        f"layer {layer}: {counters.nonfinite} non-finite values, {counters.zero_rows} zero rows"
        for layer, counters in layers
        if counters.nonfinite or counters.zero_rows
    ]
    saturated = sum(counters.saturated for counters in totals)
    detail = f"{saturated} values beyond fp16 were clamped" if saturated else "none clamped"
    return _check("no non-finite values, no rows of zeros", faults, detail, none=not totals)


def _memory(config: ProducerConfig, findings: Findings) -> Check:
    assert not isinstance(config.engine, TARGETLESS)
    descriptor, rows = findings.descriptor, findings.longest_rows
    sample_bytes = rows * descriptor.row_bytes()
    fits = config.capture.staging_bytes // sample_bytes
    if isinstance(config.engine, SGLangConfig):
        at_once = f"concurrency is {config.engine.concurrency}"
    else:
        at_once = f"batch_size is {config.engine.batch_size}"
    detail = (
        f"{fits} of the longest kind ({rows:,} rows, {readable_bytes(sample_bytes)}) in "
        f"[capture] staging_bytes, {readable_bytes(config.capture.staging_bytes)}; "
        f"[engine] {at_once}"
    )
    faults = [] if fits else [detail]
    return _check("samples fit into memory while they are made", faults, detail)


def _disk(config: ProducerConfig) -> Check:
    """The configured directory is only looked at."""
    spool = config.spool
    used = sum(path.stat().st_size for path in spool.dir.glob("*.seg"))
    room = used + free_bytes(_existing(spool.dir)) - spool.min_free_bytes
    detail = (
        f"{readable_bytes(max(0, room))} for the spool in {spool.dir}, min_free_bytes left "
        f"alone; quota_bytes is {readable_bytes(spool.quota_bytes)}"
    )
    faults = [] if room >= spool.quota_bytes else [detail]
    return _check("the disk holds what the spool may hold", faults, detail)


def _existing(path: Path) -> Path:
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _check(name: str, faults: list[str], detail: str, none: bool = False) -> Check:
    """none: there was nothing to look at."""
    if faults:
        return Check(name, False, "; ".join(faults))
    return Check(name, not none, "there was nothing to look at" if none else detail)
