"""`draftfeed target`: what a training node has of the target."""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from draftfeed_deploy import exits, packages

if TYPE_CHECKING:
    from draftfeed_consumer.assets_fetch import Fetched

FETCH_EPILOG = """\
what it is for:
  A training node needs a little of the target: the embedding and the head, which most drafters
  share with it, the final norm, the configuration and the tokenizer. Without [trainer] target,
  `draftfeed consumer` fetches them from the producers before it asks for the stream. This command
  does that alone, so that a node is ready before it takes over.

  What is in the cache already does not travel again, and a fetch that was cut off goes on where it
  was. The files are checked against the SHA-256 that the producer gives. They are no whole model:
  nothing can be generated with them.

  Exit code 0 when they are there; 1 when the producers fell silent; 2 when they serve no such
  files, or what they send is not what they say; 130 when interrupted.

example:
  draftfeed target fetch -c consumer.toml
"""


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `target` to the `draftfeed` command."""
    target = commands.add_parser(
        "target",
        help="fetch the target's embedding, head and tokenizer to this node",
        description="What a training node has of the target.",
    )
    actions = target.add_subparsers(required=True, metavar="ACTION")
    fetch = actions.add_parser(
        "fetch",
        help="from the producers into the cache",
        description="Fetch the target's embedding, head, norm, configuration and tokenizer from "
        "the producers of a consumer.toml, as that consumer would.",
        epilog=FETCH_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    fetch.add_argument("-c", "--config", type=Path, required=True, metavar="consumer.toml")
    fetch.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="TABLE.KEY=VALUE",
        help="override one value of the configuration; may be repeated",
    )
    fetch.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="how long to wait for a producer to answer at all (default: 600)",
    )
    fetch.set_defaults(command=_fetch)


def _fetch(arguments: argparse.Namespace, _: Console) -> int:
    packages.require_for_consumer()
    from draftfeed_consumer.assets_fetch import fetch_target
    from draftfeed_deploy import config
    from draftfeed_deploy.consumer_file import ConsumerFile
    from draftfeed_deploy.foreground import interrupt, on_signal

    loaded = config.load(arguments.config, ConsumerFile, arguments.set)
    began = time.monotonic()
    with on_signal(interrupt):
        fetched = fetch_target(
            loaded.producer,
            loaded.trainer.assets,
            expect=loaded.expect,
            patience_seconds=arguments.timeout,
        )
    lines = list(lines_of(fetched, time.monotonic() - began))
    if loaded.trainer.target is not None:
        lines.append(f"unused     [trainer] target is set: {loaded.trainer.target}")
    sys.stdout.write("\n".join(lines) + "\n")
    return exits.DONE


def lines_of(fetched: "Fetched", seconds: float) -> Iterator[str]:
    directory, travelled = fetched.directory, fetched.fetched_bytes
    total = sum(file.bytes for file in directory.files)
    came = f"{travelled:,} bytes in {seconds:.1f} s" if travelled else "nothing, all was there"
    yield f"directory  {directory.path}"
    yield f"identity   {directory.identity}"
    yield f"files      {len(directory.files)}, {total:,} bytes"
    yield f"fetched    {came}"
    yield f"stream     {fetched.stream_id}"
