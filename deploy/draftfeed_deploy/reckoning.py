"""Where every prompt of some producers is, and whether that adds up to the prompt list.

The list is read again from the prompt file, and no ledger of ours is asked for it.
"""

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import combinations
from pathlib import Path

import msgspec
import zmq

from draftfeed_deploy import config as configuration
from draftfeed_deploy.accounts import Source, ask, read_spool
from draftfeed_deploy.errors import ConfigError
from draftfeed_deploy.producer_file import ProducerFile
from draftfeed_producer.config import ProducerConfig
from draftfeed_producer.engines import ReplayConfig, SyntheticConfig
from draftfeed_producer.engines.synthetic import synthetic_ids
from draftfeed_producer.prompts import line_ids
from draftfeed_producer.service import open_archive
from draftfeed_producer.spool.ranges import difference, format_ranges
from draftfeed_proto.ids import IdSet, Shards, WireRanges
from draftfeed_proto.keys import read_secret

logger = logging.getLogger(__name__)

NAMED = 5
"""Ids spelled out in a difference."""
STATES = ("rejected", "quarantined", "tail")


class PromptList(msgspec.Struct, frozen=True):
    """All prompts of a file, whoever owns them."""

    shards: Shards
    ids: IdSet
    """Of every line, prompt or not."""


class Difference(msgspec.Struct, frozen=True):
    count: int
    first: list[str]

    @classmethod
    def of(cls, ids: IdSet) -> "Difference":
        return cls(len(ids), [str(id) for id, _ in zip(ids, range(NAMED), strict=False)])

    def __str__(self) -> str:
        more = ", ..." if self.count > len(self.first) else ""
        return f"{self.count} ({', '.join(self.first)}{more})" if self.count else "0"


class ProducerAudit(msgspec.Struct, frozen=True, kw_only=True):
    """Of one producer. Numbers are prompts."""

    config: str
    asked: str
    """The address that answered, or the spool directory that was read instead."""
    running: bool
    group: str
    term: int
    members: list[str]
    dataset: str
    shards: str
    prompts: int
    """Lines in the owned shards of the file."""
    skipped: int
    trained: int
    held: int | None
    """None: nobody could be asked."""
    deliverable: int
    ended: dict[str, int]
    """By state: rejected, quarantined, tail."""
    to_be_generated: int
    regenerated: int
    """Counted above too."""
    regenerated_ids: WireRanges = []
    """Which."""
    sum: int
    missing: Difference
    """In the prompt file, and nowhere at the producer."""
    extra: Difference
    """At the producer, and not in the owned part of the prompt file."""
    twice: Difference
    """In two places at once."""

    @property
    def agrees(self) -> bool:
        return not (self.missing.count or self.extra.count or self.twice.count)


class Audit(msgspec.Struct, frozen=True, kw_only=True):
    agrees: bool
    producers: list[ProducerAudit]
    overlapping: list[str]
    """Shards that two of them own."""
    unowned: list[str]
    """Shards that none of them owns; looked for only when several producers are asked."""


def audit_of(
    path: Path, overrides: Sequence[str], address: str, timeout_seconds: float
) -> tuple[ProducerAudit, Shards, Shards]:
    """(the audit, its shards, all shards of the file)

    Raises ConfigError, KeyFileError, SpoolError and ProtoError.
    """
    config = configuration.load(path, ProducerFile, overrides)
    prompts = prompt_list(config)
    keys = read_secret(config.server.key, zmq.curve_public) if config.server.key else None
    source = ask(address or config.server.bind, timeout_seconds, keys)
    if source is None:
        roots = config.archive.roots if config.archive else ()
        source = read_spool(config.spool.dir, prompts.ids, roots)
        logger.warning(
            "nobody answers at %s: reading %s instead; which samples members hold, and which lines "
            "are no prompts, is then unknown",
            address or config.server.bind,
            config.spool.dir,
        )
    return judge(str(path), prompts, source), source.account.shards, prompts.shards


def prompt_list(config: ProducerConfig) -> PromptList:
    """Raises ConfigError when the prompt file cannot be read."""
    if isinstance(config.engine, SyntheticConfig):
        return PromptList(config.engine.shards, synthetic_ids(config.engine))
    if isinstance(config.engine, ReplayConfig):
        with ExitStack() as stack:
            source = open_archive(config, config.engine, stack)
        return PromptList(source.shards, source.ids)
    prompts = config.needed()[1]
    digest, lines, last = hashlib.sha256(), 0, b"\n"
    try:
        with Path(prompts.path).open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
                lines += block.count(b"\n")
                last = block
    except OSError as error:
        raise ConfigError(prompts.path, f"cannot be read: {error.strerror}") from None
    lines += not last.endswith(b"\n")
    count = -(-lines // prompts.shard_size)
    shards = Shards(digest.hexdigest()[:16], prompts.epoch, (0, count), prompts.epochs)
    return PromptList(shards, line_ids(shards, lines, prompts.shard_size))


def judge(config: str, prompts: PromptList, source: Source) -> ProducerAudit:
    """Compare what a producer says with its part of the prompt list."""
    account = source.account
    committed, leased = IdSet.from_wire(account.committed), IdSet.from_wire(account.leased)
    deliverable, pending = IdSet.from_wire(account.deliverable), IdSet.from_wire(account.pending)
    ended = {state: IdSet.from_wire(ids) for state, ids in account.terminal.items()}
    skipped = IdSet.from_wire(account.skipped)
    places = [committed, leased, deliverable, pending, skipped, *ended.values()]
    expected, found = prompts.ids.within(account.shards), IdSet.union(places)
    return ProducerAudit(
        config=config,
        asked=source.asked,
        running=source.running,
        group=account.group,
        term=account.term,
        members=list(account.members),
        dataset=account.shards.dataset,
        shards=format_ranges(account.shards.ranges),
        prompts=len(expected),
        skipped=len(skipped),
        trained=len(committed),
        held=len(leased) if source.running else None,
        deliverable=len(deliverable),
        ended={state: len(ids) for state, ids in ended.items()},
        to_be_generated=len(pending),
        regenerated=len(IdSet.from_wire(account.regenerated)),
        regenerated_ids=account.regenerated,
        sum=sum(map(len, places)),
        missing=Difference.of(expected - found),
        extra=Difference.of(found - expected),
        twice=Difference.of(IdSet.union(_both(a, b) for a, b in combinations(places, 2))),
    )


def combine(audits: Sequence[tuple[ProducerAudit, Shards, Shards]]) -> Audit:
    """What producers share and what none of them owns, beside the audit of each."""
    overlapping = [
        f"{one.config} and {other.config} both own shards {format_ranges(tuple(shared))}"
        for (one, mine, _), (other, theirs, _) in combinations(audits, 2)
        if (shared := mine & theirs)
    ]
    unowned = list(_unowned(audits)) if len(audits) > 1 else []
    agrees = all(audit.agrees for audit, _, _ in audits) and not overlapping and not unowned
    return Audit(
        agrees=agrees,
        producers=[audit for audit, _, _ in audits],
        overlapping=overlapping,
        unowned=unowned,
    )


def _unowned(audits: Sequence[tuple[ProducerAudit, Shards, Shards]]) -> Iterator[str]:
    files = {(whole.dataset, whole.epoch): whole for _, _, whole in audits}
    for whole in files.values():
        rest = whole.ranges
        for _, owned, _ in audits:
            rest = difference(rest, tuple(whole & owned))
        if rest:
            yield f"nobody owns shards {format_ranges(rest)} of prompt file {whole.dataset}"


def lines_of(audit: Audit) -> list[str]:
    """For people."""
    lines = [line for one in audit.producers for line in [*_table(one), ""]]
    lines += [f"ERROR: {fault}" for fault in (*audit.overlapping, *audit.unowned)]
    verdict = "agree with" if audit.agrees else "DIFFER from"
    return [*lines, f"the sums {verdict} the prompt list"]


def _table(audit: ProducerAudit) -> list[str]:
    state = f"running, {len(audit.members)} attached" if audit.running else "it does not answer"
    group = f", group {audit.group}, term {audit.term}" if audit.group else ""
    rows: list[tuple[str, object]] = [
        ("prompts in the file", f"{audit.prompts:,}  (shards {audit.shards} of {audit.dataset})"),
        ("", ""),
        ("skipped lines", audit.skipped),
        ("trained (committed)", audit.trained),
        ("held by members", "unknown" if audit.held is None else audit.held),
        ("deliverable", audit.deliverable),
        *((state, audit.ended.get(state, 0)) for state in {**dict.fromkeys(STATES), **audit.ended}),
        ("to be generated", audit.to_be_generated),
        ("sum", audit.sum),
        ("", ""),
        ("regenerated", _regenerated(audit)),
        ("missing", audit.missing),
        ("extra", audit.extra),
        ("in two places", audit.twice),
    ]
    head = f"{audit.config}: {audit.asked} ({state}{group})"
    return [head, *(_row(name, value) for name, value in rows)]


def _regenerated(audit: ProducerAudit) -> str:
    """They may have other text than what was lost, so they are named."""
    named = Difference.of(IdSet.from_wire(audit.regenerated_ids))
    return f"{named}  (counted above)"


def _row(name: str, value: object) -> str:
    text = f"{value:,}" if isinstance(value, int) else str(value)
    return f"  {name:20}  {text}".rstrip()


def _both(left: IdSet, right: IdSet) -> IdSet:
    return left - (left - right)
