"""The command line of `draftfeed top`."""

import argparse
import shutil
import sys
import time
from typing import TYPE_CHECKING

from rich.console import Console

from draftfeed_deploy import exits
from draftfeed_deploy.errors import ConfigError, ServiceUnreachable

if TYPE_CHECKING:
    from draftfeed_deploy.top_watch import Watch

TOP_EPILOG = """\
what it shows:
  The bandwidth of the last ten minutes: hidden states as the target made them, and what of it is
  on the wire; tokens per second; when the prompts will be generated; for each producer and
  consumer its spool or buffer, leases, term and members; what it waited for in the last minute;
  members that get, or train, less than the others; the last warnings. A service that goes away is
  shown as gone, and comes back by itself.

keys: q ends it; arrows and the wheel scroll.

examples:
  draftfeed top                                      the services of this machine
  draftfeed top http://node1:9640 http://node2:9640 http://trainer:9640
  draftfeed top --once                               one picture, as text
"""


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `top` to the `draftfeed` command."""
    parser = commands.add_parser(
        "top",
        help="what running producers and consumers do, on one screen",
        description="What running producers and consumers do, on one screen.",
        epilog=TOP_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "urls",
        nargs="*",
        metavar="URL",
        help="where a service has its status page, as its log says; without one, those of this "
        "machine (ports 9640 to 9739 of 127.0.0.1)",
    )
    parser.add_argument("--once", action="store_true", help="print one picture and end")
    parser.set_defaults(command=_top)


def _top(arguments: argparse.Namespace, console: Console) -> int:
    from draftfeed_deploy.scrapes import base_url
    from draftfeed_deploy.top_watch import MOST_SERVICES, Watch

    urls = list(dict.fromkeys(map(base_url, arguments.urls)))
    if len(urls) > MOST_SERVICES:
        raise ConfigError("draftfeed top", f"{MOST_SERVICES} services at most, not {len(urls)}")
    show = _once if arguments.once else _screen
    return show(Watch(urls))


def _once(watch: "Watch") -> int:
    from draftfeed_deploy.spool_tools import say
    from draftfeed_deploy.top_view import picture

    with watch:
        watch.wait()
        services = watch.services()
    if not any(one.document for one in services):
        why = "; ".join(f"{one.name}: {one.why}" for one in services)
        raise ServiceUnreachable("draftfeed top", why or "no service runs on this machine")
    width = shutil.get_terminal_size().columns
    say(line.plain.rstrip() for line in picture(services, width, time.time()))
    return exits.DONE


def _screen(watch: "Watch") -> int:
    from draftfeed_deploy import packages

    packages.require_for_top()
    from draftfeed_deploy.top import Top

    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigError("draftfeed top", "needs a terminal; --once prints one picture")
    with watch:
        Top(watch).run()
    return exits.DONE
