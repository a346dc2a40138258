"""`draftfeed plan`: what a run takes, before its hardware is paid for."""

import argparse
from pathlib import Path

import msgspec
from rich.console import Console

from draftfeed_deploy import exits
from draftfeed_deploy.errors import ConfigError
from draftfeed_deploy.spool_tools import say

PLAN_EPILOG = """\
what it does:
  It computes what a run takes from a small file: tokens, days, bandwidth, spool, buffers, storage,
  GPU memory, training time and cost. Every figure stands beside the assumptions that drive it and
  where each comes from: given in the file, measured, or a default of ours. It runs nothing.

how to read it:
  IMPOSSIBLE   more than the hardware can do, by its own data sheet
  20% less, 20% more   how long the run takes when that assumption is off by so much; those that
               matter most come first. Measure these before you believe the rest.
  claims       figures that others have computed, reckoned once on their terms and once on ours

examples:
  draftfeed plan --list
  draftfeed plan --scenario a-pro6000
  draftfeed plan --scenario b-split --scenario e-replay --scenario f-prefill-later
  draftfeed plan --scenario my.toml --set layout.batch=32
  draftfeed plan --scenario my.toml --measured target.json --json
"""
MOST_SCENARIOS = 8


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `plan` to the `draftfeed` command."""
    parser = commands.add_parser(
        "plan",
        help="what a run takes: days, bandwidth, memory, disk, cost",
        description="What a run takes: days, bandwidth, memory, disk and cost, from a small file.",
        epilog=PLAN_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--scenario",
        action="append",
        default=[],
        metavar="NAME|FILE",
        help="one that is shipped, or a file of yours (docs/plan.md); again for several side by "
        "side",
    )
    parser.add_argument("--list", action="store_true", help="the scenarios that are shipped")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="TABLE.KEY=VALUE",
        help="override one value of every scenario; may be repeated",
    )
    parser.add_argument(
        "--measured",
        type=Path,
        metavar="FILE",
        help="what `draftfeed bench target` has written: replaces the rates",
    )
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    parser.set_defaults(command=_plan)


def _plan(arguments: argparse.Namespace, console: Console) -> int:
    from draftfeed_deploy import plan_outcome
    from draftfeed_deploy.plan_lines import comparison_lines, lines_of, list_lines

    names = list(arguments.scenario)
    if arguments.list:
        say(list_lines())
        return exits.DONE
    if not names:
        raise ConfigError("draftfeed plan", "needs --scenario NAME or FILE; --list shows names")
    if len(names) > MOST_SCENARIOS:
        raise ConfigError("--scenario", f"{MOST_SCENARIOS} fit side by side, not {len(names)}")
    outcomes = [plan_outcome.outcome(name, arguments.set, arguments.measured) for name in names]
    if arguments.json:
        report = [plan_outcome.as_json(outcome) for outcome in outcomes]
        say([msgspec.json.format(msgspec.json.encode(report)).decode()])
    else:
        say(lines_of(outcomes[0]) if len(outcomes) == 1 else comparison_lines(outcomes))
    return exits.DONE
