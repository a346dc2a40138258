"""`draftfeed audit`: whether every prompt is somewhere, once."""

import argparse
import sys
from pathlib import Path

import msgspec
from rich.console import Console

from draftfeed_deploy import exits
from draftfeed_deploy.errors import ConfigError


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """`draftfeed audit`, among the others."""
    parser = commands.add_parser(
        "audit",
        help="where every prompt is, and whether the sums agree",
        description="Ask running producers where each of their prompts is, and compare the sum "
        "with the prompt file. Ends with exit code 0 when they agree and 1 when not. A producer "
        "that does not answer is audited from its spool directory.",
    )
    parser.set_defaults(command=run_audit)
    parser.add_argument(
        "-c",
        "--config",
        type=Path,
        action="append",
        required=True,
        metavar="producer.toml",
        help="repeat it for all producers of a group: what they share or none owns is named",
    )
    parser.add_argument(
        "--address",
        action="append",
        default=[],
        help="where the producer listens, when not at its [server] bind; once for each -c",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="TABLE.KEY=VALUE",
        help="override one value in each configuration; may be repeated",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="how long to wait for each producer before its spool is read instead (default: 5)",
    )
    parser.add_argument("--json", action="store_true", help="for programs")


def run_audit(arguments: argparse.Namespace, _: Console) -> int:
    """Raises ConfigError, SpoolError and ProtoError."""
    from draftfeed_deploy.reckoning import audit_of, combine, lines_of

    paths, addresses = arguments.config, arguments.address
    if addresses and len(addresses) != len(paths):
        reason = f"given {len(addresses)} times for {len(paths)} configurations"
        raise ConfigError("--address", reason)
    audits = [
        audit_of(path, arguments.set, address, arguments.timeout)
        for path, address in zip(paths, addresses or [""] * len(paths), strict=True)
    ]
    audit = combine(audits)
    text = msgspec.json.format(msgspec.json.encode(audit)).decode() if arguments.json else None
    sys.stdout.write((text or "\n".join(lines_of(audit))) + "\n")
    return exits.DONE if audit.agrees else exits.FAILED
