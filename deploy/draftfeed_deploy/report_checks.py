"""The promises of a run, each checked against what both sides wrote down.

The expected ids come from the prompt file itself. A ledger that lost a sample would also have
lost it from the expectation.
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from draftfeed_deploy.records import (
    Evaluation,
    GeneratedSample,
    ProducerSnapshot,
    ReceivedSample,
)
from draftfeed_deploy.report_epochs import delivered, epoch_of, in_epoch, sources
from draftfeed_deploy.report_records import RunFiles
from draftfeed_proto.ids import SampleId

REQUIRED_LOSS_DROP = 0.25
MOST_PLAUSIBLE_RATIO = 4.0
"""Lossless packing of hidden states ends near 1.5: far above it, bytes were lost, not packed."""


class Check(msgspec.Struct, frozen=True):
    """One promise, whether it held, and the numbers that say so."""

    name: str
    passed: bool
    detail: str


class Expected(msgspec.Struct, frozen=True):
    """Identity of every prompt of the prompt file, in every epoch: sample id -> the name people
    know it by."""

    dataset: str
    names: dict[str, str]
    problem: str = ""
    file: str = ""
    epochs: int = 1

    def listing(self, ids: Iterable[str], most: int = 4) -> str:
        """The first few ids in words: `code-017 (line 18), de-002 (line 40) and 3 more`."""
        ids = sorted(ids, key=_natural)
        words = ", ".join(self.names.get(id, id) for id in ids[:most])
        return words if len(ids) <= most else f"{words} and {len(ids) - most} more"


def run_checks(files: RunFiles, expected: Expected) -> list[Check]:
    return [
        _check_readable(files),
        _check_accounted(files, expected),
        _check_trained(files, expected),
        _check_once(files, expected),
        _check_checkpoint(files, expected),
        _check_audit(files),
        _check_digests(files, expected),
        _check_rows(files, expected),
        _check_wire(files, expected),
        _check_loss(files),
        _check_values(files.producer[-1] if files.producer else None),
        *([_check_swap(files)] if len(files.consumers) > 1 else []),
        *(_check_epochs(files, expected) if expected.epochs > 1 else []),
    ]


def _check_readable(files: RunFiles) -> Check:
    read = len(files.producer) + len(files.consumer) + len(files.generated)
    read += len(files.received) + len(files.steps)
    return _check("every record readable", f"{read:,} records read", files.problems)


def _check_accounted(files: RunFiles, expected: Expected) -> Check:
    """Every prompt was generated or refused by name, and nothing came from elsewhere."""
    generated = dict(sources(files, expected.epochs)).keys()
    rejected = {rejection.id for rejection in files.rejected}
    faults = [expected.problem] if expected.problem else []
    if lost := expected.names.keys() - generated - rejected:
        faults.append(f"{len(lost)} neither generated nor rejected: {expected.listing(lost)}")
    if strange := (generated | rejected) - expected.names.keys():
        faults.append(f"{len(strange)} not in the prompt file: {expected.listing(strange)}")
    several = expected.epochs > 1
    what, how = ("samples", "generated or replayed") if several else ("prompts", "generated")
    detail = f"{len(expected.names)} {what} = {len(generated - rejected)} {how}"
    detail += f" + {len(rejected)} rejected"
    return _check("every prompt accounted for", detail, faults)


def _check_trained(files: RunFiles, expected: Expected) -> Check:
    rejected = {rejection.id for rejection in files.rejected}
    generated = dict(sources(files, expected.epochs)).keys() - rejected
    trained = uses(files).keys()
    detail = f"{len(generated | rejected)} samples = {len(trained)} trained"
    if files.rejected:
        reasons = [f"{expected.listing([r.id])}: {r.reason}" for r in files.rejected]
        more = f" and {len(reasons) - 4} more" if len(reasons) > 4 else ""
        detail += f" + {len(rejected)} rejected ({', '.join(reasons[:4])}{more})"
    faults = []
    if lost := generated - trained:
        faults.append(f"{len(lost)} generated but not trained: {expected.listing(lost)}")
    if strange := trained - generated - rejected:
        faults.append(f"{len(strange)} trained but not generated: {expected.listing(strange)}")
    if unwanted := trained & rejected:
        faults.append(f"{len(unwanted)} trained although rejected: {expected.listing(unwanted)}")
    return _check("samples generated = samples trained", detail, faults)


def _check_once(files: RunFiles, expected: Expected) -> Check:
    counts = uses(files)
    again = [id for id, times in counts.items() if times > 1]
    faults = [f"{len(again)} trained more than once: {expected.listing(again)}"] if again else []
    if not counts:
        faults.append("no sample was trained")
    detail = f"{counts.total()} uses of {len(counts)} samples in {len(files.steps)} optimizer steps"
    if files.undone_steps:
        detail += f"; {files.undone_steps} more that were in no checkpoint at the swap are undone"
    return _check("each trained exactly once", detail, faults)


def _check_checkpoint(files: RunFiles, expected: Expected) -> Check:
    """What was logged, step by step, against what the drafter's own file says it is made of."""
    name = "the last checkpoint says the same"
    if files.checkpoint is None:
        return Check(name, False, files.checkpoint_problem)
    logged, saved = uses(files).keys(), set(files.checkpoint.trained)
    faults = []
    if lost := logged - saved:
        faults.append(f"{len(lost)} trained and not in it: {expected.listing(lost)}")
    if strange := saved - logged:
        faults.append(f"{len(strange)} in it and in no step: {expected.listing(strange)}")
    step = files.steps[-1].step if files.steps else 0
    if step != files.checkpoint.step:
        faults.append(f"it is of step {files.checkpoint.step}, the last one is {step}")
    return _check(name, f"{len(saved)} samples at step {step}", faults)


def _check_audit(files: RunFiles) -> Check:
    """What the producer's spool says about the lines of the prompt file."""
    name, audit = "sums of the audit agree with the prompt list", files.audit
    if audit is None:
        return Check(name, False, files.audit_problem)
    ends = {"trained": audit.trained, **audit.ended}
    detail = f"{audit.prompts} prompts = {' + '.join(f'{n} {end}' for end, n in ends.items())}"
    sides = {"missing": audit.missing, "extra": audit.extra, "in two places": audit.twice}
    faults = [f"{side}: {ids}" for side, ids in sides.items() if ids.count]
    if left := audit.deliverable + audit.to_be_generated:
        faults.append(f"{left} not terminal")
    return _check(name, detail, faults)


def _check_swap(files: RunFiles) -> Check:
    """The first consumer trained, a second one took the stream from it, and trained on."""
    code = files.swap.first_exit_code if files.swap else None
    counted = len(files.steps) - len(files.consumers[1].steps)
    term = files.producer[-1].term if files.producer else 0
    faults = [f"the first consumer ended with exit code {code}, not 3"] if code != 3 else []
    faults += [f"the producer is in term {term}, not 2"] if term != 2 else []
    faults += ["none of the first consumer's steps remains"] if counted < 1 else []
    faults += [] if files.consumers[1].steps else ["the second consumer trained nothing"]
    detail = f"{counted} steps by the first consumer, {len(files.consumers[1].steps)} by the second"
    return _check("a second consumer took over in mid-run", detail, faults)


def _check_epochs(files: RunFiles, expected: Expected) -> list[Check]:
    return [
        _check_generated_once(files, expected),
        _check_delivered(files, expected),
        _check_equal(files, expected),
        _check_archived(files, expected),
    ]


def _check_generated_once(files: RunFiles, expected: Expected) -> Check:
    counts = Counter(in_epoch(sample.id, 0) for sample in files.generated)
    again = [id for id, times in counts.items() if times > 1]
    faults = [f"{len(again)} more than once: {expected.listing(again)}"] if again else []
    later = {sample.id for sample in files.generated if epoch_of(sample.id)}
    if unarchived := later - set(again):
        faults.append(f"{len(unarchived)} for a later epoch: {expected.listing(unarchived)}")
    snapshot = files.producer[-1].samples if files.producer else 0
    if snapshot != len(files.generated):
        faults.append(f"the producer counted {snapshot} samples and listed {len(files.generated)}")
    detail = f"{len(files.generated)} samples for {len(expected.names)} in {expected.epochs} epochs"
    return _check("the target generated each prompt once", detail, faults)


def _check_delivered(files: RunFiles, expected: Expected) -> Check:
    """A sample that a swap brings twice is a second consumer's."""
    counts = Counter(sample.id for sample in files.received)
    faults, sizes = [], []
    for epoch in range(expected.epochs):
        due = {id for id in expected.names if epoch_of(id) == epoch}
        due -= {rejection.id for rejection in files.rejected}
        got = {sample.id for sample in delivered(files, epoch)}
        sizes.append(str(len(got)))
        if lost := due - got:
            faults.append(f"{len(lost)} never in epoch {epoch + 1}: {expected.listing(lost)}")
    if again := [id for id, times in counts.items() if times > len(files.consumers)]:
        faults.append(f"{len(again)} more than once: {expected.listing(again)}")
    detail = f"{', '.join(sizes)} samples in epochs 1 to {expected.epochs}"
    return _check("every epoch delivered every prompt once", detail, faults)


def _check_equal(files: RunFiles, expected: Expected) -> Check:
    """Digests of the tensors: the producer's from before it encoded them for the first epoch, and
    the consumer's of each sample that it decoded."""
    made = {s.id: s.digest for s in files.generated if epoch_of(s.id) == 0}
    first = {sample.id: sample.digest for sample in delivered(files, 0)}
    later = [sample for sample in files.received if epoch_of(sample.id)]
    wanted = {s.id: {side.get(in_epoch(s.id, 0)) for side in (made, first)} for s in later}
    differing = {sample.id for sample in later if wanted[sample.id] != {sample.digest}}
    faults = [f"{len(differing)} differ: {expected.listing(differing)}"] if differing else []
    faults += [] if later else ["no sample of a later epoch came"]
    detail = f"{len(later)} samples equal to epoch 1's, as generated and as received there"
    return _check("later epochs are byte for byte the first", detail, faults)


def _check_archived(files: RunFiles, expected: Expected) -> Check:
    """Later epochs may come out of the spool as long as segments wait there: that they were right
    does not say that anything was archived."""
    name, archived = "the archive holds every prompt, undamaged", files.archived
    if archived is None:
        return Check(name, False, files.archived_problem)
    made = {(in_epoch(s.id, 0), s.digest) for s in files.generated}
    held = {in_epoch(id, 0): digest for id, digest in archived.digests.items()}
    rejected = {in_epoch(rejection.id, 0) for rejection in files.rejected}
    due = {id for id, _ in made if id in expected.names}
    faults = []
    if missing := due - rejected - held.keys():
        faults.append(f"{len(missing)} are not in it: {expected.listing(missing)}")
    if differing := {id for id in due & held.keys() if (id, held[id]) not in made}:
        faults.append(f"{len(differing)} are others there: {expected.listing(differing)}")
    if archived.damaged:
        damaged = expected.listing(archived.damaged)
        faults.append(f"{len(archived.damaged)} are damaged there: {damaged}")
    detail = f"{len(held)} prompts in {archived.segments} segments, {archived.bytes:,} bytes"
    return _check(name, detail, faults)


def _check_digests(files: RunFiles, expected: Expected) -> Check:
    trained = uses(files).keys()
    made = {id: source.digest for id, source in sources(files, expected.epochs)}
    got = [sample for sample in files.received if sample.id in trained]
    differing = {s.id for s in got if s.id in made and made[s.id] != s.digest}
    # A digest that only one side wrote down proves nothing.
    unproven = trained - (made.keys() & {sample.id for sample in got})
    faults = [f"{len(differing)} differ: {expected.listing(differing)}"] if differing else []
    if unproven:
        faults.append(f"{len(unproven)} known to one side only: {expected.listing(unproven)}")
    if not trained:
        faults.append("no sample was trained")
    return _check("tensors equal on both sides", f"{len(trained)} digests compared", faults)


def _check_rows(files: RunFiles, expected: Expected) -> Check:
    """The last token of a sample was never fed, so a sample of n+1 tokens has n rows."""
    made = dict(sources(files, expected.epochs))
    faults = []
    sides: dict[str, Sequence[GeneratedSample | ReceivedSample]] = {
        "producer": files.generated,
        "consumer": files.received,
    }
    for side, samples in sides.items():
        if wrong := {sample.id for sample in samples if sample.rows != sample.tokens - 1}:
            listing = expected.listing(wrong)
            faults.append(f"{len(wrong)} where rows are not tokens - 1 at the {side}: {listing}")
    if unequal := {s.id for s in files.received if s.id in made and made[s.id].rows != s.rows}:
        faults.append(f"{len(unequal)} where the sides differ in rows: {expected.listing(unequal)}")
    rows = sum(sample.rows for sample in files.received)
    if not rows:
        faults.append("no row was received")
    detail = f"{rows:,} rows in {len(files.received)} samples"
    return _check("a row for every fed token", detail, faults)


def _check_wire(files: RunFiles, expected: Expected) -> Check:
    consumers = [one.snapshots[-1] for one in files.consumers if one.snapshots]
    received = sum(last.logical_bytes for last in consumers)
    made = files.producer[-1].logical_bytes if files.producer else 0
    sent = files.producer[-1].wire_bytes if files.producer else 0
    # What a second consumer got again, and a later epoch, was made once and sent twice.
    several = len(files.consumers) > 1 or expected.epochs > 1
    moved = max(made, received) if several else made
    sides = {
        "producer": (moved, sent),
        "consumer": (received, sum(last.wire_bytes for last in consumers)),
    }
    texts = {side: f"{pair[0]:,} logical, {pair[1]:,} wire" for side, pair in sides.items()}
    faults = [
        f"not plausible at the {side}: {texts[side]}"
        for side, (logical, wire) in sides.items()
        if not 0 < wire <= logical <= wire * MOST_PLAUSIBLE_RATIO
    ]
    producer, consumer = texts.values()
    same = producer == consumer
    detail = f"{producer} on both sides" if same else f"producer {producer} / consumer {consumer}"
    return _check("wire bytes within logical bytes", detail, faults)


def _check_loss(files: RunFiles) -> Check:
    name = f"held-out loss {REQUIRED_LOSS_DROP:.0%} below untrained, and below uniform guessing"
    evaluation = files.evaluation
    if evaluation is None:
        return Check(name, False, files.evaluation_problem)
    allowed = evaluation.untrained_loss * (1 - REQUIRED_LOSS_DROP)
    fell = 0 <= evaluation.trained_loss <= allowed and evaluation.untrained_loss > 0
    # An initialisation worse than guessing would make a fall of 25% easy.
    learned = fell and evaluation.trained_loss < evaluation.uniform_loss
    return Check(name, learned, loss_words(evaluation))


def _check_values(last: ProducerSnapshot | None) -> Check:
    """A residual stream has no row of zeros: one that is all zero was never written."""
    name = "no non-finite values, no all-zero rows"
    if last is None or last.nonfinite is None or last.zero_rows is None:
        return Check(name, False, "the producer recorded no count")
    counts = {"non-finite": last.nonfinite, "all-zero rows": last.zero_rows}
    detail = "; ".join(f"{what} per layer: {_listed(n)}" for what, n in counts.items())
    return Check(name, not any(last.nonfinite) and not any(last.zero_rows), detail)


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


def _check(name: str, detail: str, faults: list[str], most: int = 3) -> Check:
    more = [f"{len(faults) - most} more"] if len(faults) > most else []
    return Check(name, not faults, "; ".join(faults[:most] + more) if faults else detail)


def expected_prompts(path: Path, shard_size: int, epochs: int = 1) -> Expected:
    """Identity of every prompt of a file in its first epochs; shards hold `shard_size` lines."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        return Expected("", {}, f"{path.name} cannot be read: {error.strerror}", path.name, epochs)
    dataset = hashlib.sha256(raw).hexdigest()[:16]
    names = {
        str(SampleId(dataset, epoch, ordinal // shard_size, ordinal)): _name(line, ordinal, epoch)
        for ordinal, line in enumerate(raw.split(b"\n"))
        if line.strip()
        for epoch in range(epochs)
    }
    problem = "" if names else f"{path.name} holds no prompt"
    return Expected(dataset, names, problem, path.name, epochs)


def _name(line: bytes, ordinal: int, epoch: int) -> str:
    """Epochs are counted from 1; the first goes without saying."""
    later = f", epoch {epoch + 1}" if epoch else ""
    return f"{_key(line, ordinal)} (line {ordinal + 1}{later})"


def _key(line: bytes, ordinal: int) -> str:
    try:
        fields: Any = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return str(ordinal)
    return str(fields.get("id", ordinal)) if isinstance(fields, dict) else str(ordinal)


def uses(files: RunFiles) -> Counter[str]:
    """How often a completed optimizer step used each sample, by id."""
    return Counter(id for step in files.steps for id in step.ids)


def _natural(id: str) -> tuple[str, int]:
    head, _, ordinal = id.rpartition("/")
    return head, int(ordinal) if ordinal.isdecimal() else -1


def loss_words(evaluation: Evaluation) -> str:
    before, after = evaluation.untrained_loss, evaluation.trained_loss
    change = f" ({after / before - 1:+.1%})" if before > 0 else ""
    return (
        f"{before:.3f} untrained, {after:.3f} trained{change}, "
        f"{evaluation.uniform_loss:.3f} by uniform guessing"
    )
