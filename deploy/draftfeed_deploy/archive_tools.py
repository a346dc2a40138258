"""`draftfeed archive`: what an archive holds, whether it is whole, and its samples as files."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console

from draftfeed_deploy import exits
from draftfeed_deploy.spool_tools import say

if TYPE_CHECKING:
    from draftfeed_producer.archive.reader import ArchiveReader

EXPORT_EPILOG = """\
--format npz writes what `draftfeed spool export` writes: samples as they were captured, one .npz
each, and samples.jsonl. specforge and speculators are those of `draftfeed export`, whose help says
what is in them. The archive may be in use meanwhile.

examples:
  draftfeed archive export /archive/a /archive/b --out looked-at --ids q-17
  draftfeed archive export /archive/a /archive/b --format specforge --out runs/mine/specforge

exit codes: 0 done; 1 done, but without what is damaged; 2 nothing was exported
"""


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `archive` to the `draftfeed` command."""
    archive = commands.add_parser(
        "archive",
        help="list, verify or export what was archived",
        description="Look into an archive: all of its roots together. It may be in use; nothing "
        "is changed.",
    )
    actions = archive.add_subparsers(required=True, metavar="ACTION")
    ls = actions.add_parser("ls", help="stream, samples, segments, and which prompts are missing")
    _add_roots(ls)
    ls.add_argument("--json", action="store_true", help="as one JSON object")
    ls.set_defaults(command=_ls)
    verify = actions.add_parser(
        "verify",
        help="read every byte, decode every chunk; exit code 1 when one is damaged or missing",
    )
    _add_roots(verify)
    verify.set_defaults(command=_verify)
    export = actions.add_parser(
        "export",
        help="samples as files, to look at or for another trainer",
        epilog=EXPORT_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_roots(export)
    export.add_argument(
        "--out", type=Path, required=True, metavar="OUT", help="empty or not there yet"
    )
    export.add_argument("--format", default="npz", choices=["npz", "specforge", "speculators"])
    export.add_argument(
        "--ids", nargs="+", default=[], metavar="ID", help="only these, for npz; ids or keys"
    )
    export.add_argument(
        "--target", type=Path, metavar="DIR", help="for speculators: as in `draftfeed export`"
    )
    export.set_defaults(command=_export)


def _add_roots(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "roots", type=Path, nargs="+", metavar="ROOT", help="all of [archive] roots"
    )


def _ls(arguments: argparse.Namespace, console: Console) -> int:
    from draftfeed_deploy.archive_contents import facts_lines, facts_of, unique
    from draftfeed_producer.archive.reader import ArchiveReader

    facts = facts_of(ArchiveReader(unique(arguments.roots)))
    if arguments.json:
        say([msgspec.json.format(msgspec.json.encode(facts)).decode()])
    else:
        say(facts_lines(facts))
    return exits.DONE


def _verify(arguments: argparse.Namespace, console: Console) -> int:
    from draftfeed_deploy.archive_contents import missing_line, unique, verdict_lines, verify
    from draftfeed_producer.archive.reader import ArchiveReader
    from draftfeed_proto import codecs

    codecs.PACKED.prepare()
    reader = ArchiveReader(unique(arguments.roots))
    verdict = verify(reader, console)
    say(verdict_lines(verdict, missing_line(reader)))
    return exits.FAILED if verdict.damaged else exits.DONE


def _export(arguments: argparse.Namespace, console: Console) -> int:
    from draftfeed_deploy import packages
    from draftfeed_deploy.archive_contents import unique
    from draftfeed_deploy.errors import ConfigError
    from draftfeed_deploy.spool_contents import export
    from draftfeed_producer.archive.reader import ArchiveReader
    from draftfeed_proto import codecs

    if arguments.format == "npz" and arguments.target is not None:
        raise ConfigError("--target", "is for --format speculators")
    if arguments.format != "npz" and arguments.ids:
        raise ConfigError("--ids", "is for --format npz")
    codecs.PACKED.prepare()
    if arguments.format != "npz":
        packages.require_for_export(arguments.format)
        return _export_for_trainer(arguments, console)
    reader = ArchiveReader(unique(arguments.roots))
    written, bad = export(reader, arguments.out, arguments.ids, console)
    say(f"damaged, left out: {item.name}: {item.reason}" for item in bad)
    say([f"{written} samples in {arguments.out}"])
    return _code(reader, damaged=bool(bad))


def _export_for_trainer(arguments: argparse.Namespace, console: Console) -> int:
    from draftfeed_deploy.foreground import interrupt, on_signal

    with on_signal(interrupt):
        from draftfeed_deploy.archive_contents import unique
        from draftfeed_deploy.export import export
        from draftfeed_deploy.export_tools import lines_of
        from draftfeed_producer.archive.reader import ArchiveReader

        reader = ArchiveReader(unique(arguments.roots))
        done = export(reader, arguments.format, arguments.out, console, arguments.target)
    say(lines_of(done, arguments.out))
    return _code(reader, damaged=bool(done.bad))


def _code(reader: "ArchiveReader", *, damaged: bool) -> int:
    """Of an export: a pair that is not whole has samples that are left out, too."""
    gone = [(fault, key) for fault in reader.faults for _, key in fault.gone]
    say(f"lost, left out: key {key!r}: {fault.path}: {fault.reason}" for fault, key in gone)
    return exits.FAILED if damaged or gone else exits.DONE
