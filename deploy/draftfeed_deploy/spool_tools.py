"""`draftfeed spool`, `draftfeed shards` and `draftfeed trace`: a look into spool directories."""

import argparse
import itertools
import os
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec
from rich.console import Console

from draftfeed_deploy import exits


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `spool`, `shards` and `trace` to the `draftfeed` command."""
    _add_spool(commands)
    _add_shards(commands)
    trace = commands.add_parser(
        "trace",
        help="what happened to one sample of a spool",
        description="Tell what happened to one sample, in order. Its producer may be running.",
    )
    _add_dir(trace)
    trace.add_argument("sample", metavar="SAMPLE", help="id (dataset/epoch/shard/line) or key")
    trace.add_argument(
        "--archive",
        type=Path,
        nargs="+",
        metavar="ROOT",
        help="look into the archive, too: all of [archive] roots",
    )
    trace.set_defaults(command=_trace)


def _add_spool(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    spool = commands.add_parser(
        "spool",
        help="inspect, verify or export what a producer has stored",
        description="Look into a spool directory. Its producer may be running: nothing is changed.",
    )
    actions = spool.add_subparsers(required=True, metavar="ACTION")
    inspect = actions.add_parser("inspect", help="what it holds")
    _add_dir(inspect)
    inspect.add_argument("--json", action="store_true", help="as one JSON object")
    inspect.set_defaults(command=_inspect)
    verify = actions.add_parser(
        "verify", help="read every byte, decode every chunk; exit code 1 when one is damaged"
    )
    _add_dir(verify)
    verify.set_defaults(command=_verify)
    export = actions.add_parser(
        "export",
        help="samples as they were captured, to look at: one .npz each, and samples.jsonl; for "
        "files to train on there is `draftfeed export`",
    )
    _add_dir(export)
    export.add_argument("out", type=Path, metavar="OUT", help="empty or not there yet")
    export.add_argument(
        "--ids", nargs="+", default=[], metavar="ID", help="only these; ids or keys"
    )
    export.set_defaults(command=_export)


def _add_shards(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    shards = commands.add_parser(
        "shards",
        help="which spool owns which shards of the prompt file, and moving them",
        description="Shards that are not begun can be moved from one spool to another: give them "
        "away here, then take them there. Stop both producers first.",
    )
    actions = shards.add_subparsers(required=True, metavar="ACTION")
    show = actions.add_parser("show", help="who owns what; exit code 2 when two own the same")
    show.add_argument("dirs", type=Path, nargs="+", metavar="DIR")
    show.set_defaults(command=_show)
    give = actions.add_parser("give", help="this spool owns them no more")
    take = actions.add_parser("take", help="this spool owns them too")
    for action, command in ((give, _give), (take, _take)):
        _add_dir(action)
        action.add_argument("ranges", metavar="RANGES", help='such as "0-3,8"')
        action.set_defaults(command=command)
    take.add_argument(
        "--lost",
        action="store_true",
        help="the spool they were in is gone for good: what the trainer has not trained of them "
        "is generated again",
    )


def _add_dir(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", type=Path, metavar="DIR", help="the spool's directory")


def _inspect(arguments: argparse.Namespace, console: Console) -> int:
    from draftfeed_deploy.spool_facts import inspect, inspect_lines
    from draftfeed_producer.spool.reader import Reader

    facts = inspect(Reader(arguments.dir))
    if arguments.json:
        say([msgspec.json.format(msgspec.json.encode(facts)).decode()])
    else:
        say(inspect_lines(facts))
    return exits.DONE


def _verify(arguments: argparse.Namespace, console: Console) -> int:
    from draftfeed_deploy.spool_contents import verify, verify_lines
    from draftfeed_producer.errors import SpoolDamaged
    from draftfeed_producer.spool.directory import CONTROL_LOG
    from draftfeed_producer.spool.reader import Reader
    from draftfeed_proto import codecs

    codecs.PACKED.prepare()  # what it has to say of this machine is not to be said of the samples
    try:
        reader = Reader(arguments.dir)
        if reader.control.owned is None and reader.segments():
            raise SpoolDamaged(arguments.dir / CONTROL_LOG, "is lost or empty")
        verdict = verify(reader, console)
    except SpoolDamaged as error:  # of the control log: the samples mean nothing without it
        say([f"DAMAGED: {error}"])
        return exits.FAILED
    say(verify_lines(verdict))
    return exits.FAILED if verdict.bad else exits.DONE


def _export(arguments: argparse.Namespace, console: Console) -> int:
    from draftfeed_deploy.spool_contents import export
    from draftfeed_producer.spool.reader import Reader
    from draftfeed_proto import codecs

    codecs.PACKED.prepare()
    written, bad = export(Reader(arguments.dir), arguments.out, arguments.ids, console)
    say(f"damaged, left out: {item.name}: {item.reason}" for item in bad)
    say([f"{written} samples in {arguments.out}"])
    return exits.FAILED if bad else exits.DONE


def _trace(arguments: argparse.Namespace, console: Console) -> int:
    from draftfeed_deploy.archive_contents import unique
    from draftfeed_deploy.spool_facts import trace
    from draftfeed_producer.archive.reader import ArchiveReader
    from draftfeed_producer.spool.reader import Reader

    archive = ArchiveReader(unique(arguments.archive)) if arguments.archive else None
    say(trace(Reader(arguments.dir), arguments.sample, archive))
    return exits.DONE


def _show(arguments: argparse.Namespace, console: Console) -> int:
    from draftfeed_producer.spool.ranges import format_ranges
    from draftfeed_producer.spool.reader import Reader
    from draftfeed_producer.spool.shards import begun

    readers = [Reader(directory) for directory in arguments.dirs]
    for reader in readers:
        owned, prompts = reader.control.owned, reader.owner.prompts
        lost = owned.lost.ranges if owned else ()
        started = format_ranges(begun(reader))
        say(
            [
                f"{reader.directory}: owns shards {format_ranges(reader.shards.ranges)} of "
                f"{format_ranges(prompts.ranges)} (data set {prompts.dataset}, epoch "
                f"{prompts.epoch}); begun {started}; lost elsewhere {format_ranges(lost)}"
            ]
        )
    overlaps = [
        f"{one.directory} and {two.directory} both own {format_ranges(tuple(both))}"
        for one, two in itertools.combinations(readers, 2)
        if (both := one.shards & two.shards)
    ]
    say(overlaps)
    return exits.WRONG_INPUT if overlaps else exits.DONE


def _give(arguments: argparse.Namespace, console: Console) -> int:
    from draftfeed_producer.spool import shards
    from draftfeed_producer.spool.ranges import format_ranges, parse_ranges

    left = shards.give(arguments.dir, parse_ranges(arguments.ranges))
    say([f"{arguments.dir} owns shards {format_ranges(left.ranges)}"])
    return exits.DONE


def _take(arguments: argparse.Namespace, console: Console) -> int:
    from draftfeed_producer.spool import shards
    from draftfeed_producer.spool.ranges import format_ranges, parse_ranges

    owned = shards.take(arguments.dir, parse_ranges(arguments.ranges), lost=arguments.lost)
    say([f"{arguments.dir} owns shards {format_ranges(owned.ranges)}"])
    return exits.DONE


def say(lines: Iterable[str]) -> None:
    """Whoever has read enough of it, as `head` does, may go. What a log cannot hold, such as cron's
    in ASCII, is a question mark."""
    encoding = sys.stdout.encoding or "utf-8"
    try:
        for line in lines:
            sys.stdout.write(line.encode(encoding, "replace").decode(encoding) + "\n")
        sys.stdout.flush()
    except BrokenPipeError:
        # Python would write the rest at its end, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
