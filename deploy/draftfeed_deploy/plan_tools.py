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
  where each comes from: given in the file, in one that it extends, measured, or a default of
  ours. It runs nothing.
  With --from it asks running producers twice, says when they will have generated their prompts,
  and puts what they measured into the plan, beside what was assumed.

how to read it:
  IMPOSSIBLE   more than the hardware can do, by its own data sheet
  20% less, 20% more   how long the run takes when that assumption is off by so much; those that
               matter most come first. Measure these before you believe the rest.
  claims       figures that others have computed, reckoned once on their terms and once on ours
  factor       with --from: what was measured over what was assumed

examples:
  draftfeed plan --list
  draftfeed plan --scenario a-pro6000
  draftfeed plan --scenario b-split --scenario e-replay --scenario f-prefill-later
  draftfeed plan my.toml --set layout.batch=32
  draftfeed plan my.toml --measured bench-target.json --json
  draftfeed plan --from http://node1:9640 --from http://node2:9640
  draftfeed plan my.toml --from 127.0.0.1:9640 --for 60
"""
MOST_SCENARIOS = 8
MOST_RUNNING = 64


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
        "scenarios",
        nargs="*",
        default=[],
        metavar="NAME|FILE",
        help="the same as --scenario",
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
    parser.add_argument(
        "--from",
        dest="running",
        action="append",
        default=[],
        metavar="URL",
        help="where a running producer's metrics are, as its log says; again for each producer of "
        "the run",
    )
    parser.add_argument(
        "--for",
        dest="seconds",
        type=float,
        default=10.0,
        metavar="SECONDS",
        help="with --from, between the two times that producers are asked (default: 10)",
    )
    parser.add_argument("--json", action="store_true", help="everything, for programs")
    parser.set_defaults(command=_plan)


def _plan(arguments: argparse.Namespace, console: Console) -> int:
    from draftfeed_deploy import plan_outcome
    from draftfeed_deploy.plan_lines import comparison_lines, lines_of, list_lines

    names = _names(arguments)
    if arguments.list:
        say(list_lines())
        return exits.DONE
    if arguments.running:
        return _plan_running(arguments)
    if not names:
        raise ConfigError("draftfeed plan", "needs NAME or FILE, or --from URL; --list shows names")
    if len(names) > MOST_SCENARIOS:
        raise ConfigError("--scenario", f"{MOST_SCENARIOS} fit side by side, not {len(names)}")
    outcomes = [plan_outcome.outcome(name, arguments.set, arguments.measured) for name in names]
    if arguments.json:
        report = [plan_outcome.as_json(outcome) for outcome in outcomes]
        say([msgspec.json.format(msgspec.json.encode(report)).decode()])
    else:
        say(lines_of(outcomes[0]) if len(outcomes) == 1 else comparison_lines(outcomes))
    return exits.DONE


def _plan_running(arguments: argparse.Namespace) -> int:
    """What producers have measured; with a scenario, what that makes of its plan."""
    from draftfeed_deploy import plan_live, plan_live_lines, plan_outcome
    from draftfeed_deploy.plan_lines import lines_of

    names, urls = _names(arguments), _urls(arguments)
    if len(names) > 1:
        raise ConfigError("--from", f"goes with one scenario, not {len(names)}")
    assumed = [plan_outcome.outcome(name, arguments.set, arguments.measured) for name in names]
    running = plan_live.watch(urls, arguments.seconds)
    seen = plan_live.seen(running)
    deviations: list[plan_live.Deviation] = []
    doubts: tuple[str, ...] = ()
    planned = assumed
    if seen is not None and assumed:
        inputs = assumed[0].case.inputs
        deviations = plan_live.deviations(seen, inputs, assumed[0].plan)
        found = plan_live.measured(seen, inputs)
        doubts = plan_live.doubts(running, inputs)
        planned = [
            plan_outcome.outcome(names[0], arguments.set, arguments.measured, found),
        ]
    if arguments.json:
        report = {
            "running": plan_live_lines.as_json(running, seen, deviations),
            "doubts": doubts,
            "plans": [plan_outcome.as_json(one) for one in planned],
        }
        say([msgspec.json.format(msgspec.json.encode(report)).decode()])
        return exits.DONE
    say(plan_live_lines.running_lines(running))
    if deviations:
        say(["", *(f"  warning  {doubt}" for doubt in doubts)])
        say(plan_live_lines.deviation_lines(deviations))
    for one in planned if deviations else ():
        say(["", *lines_of(one)])
    return exits.DONE


def _names(arguments: argparse.Namespace) -> list[str]:
    return [*arguments.scenario, *arguments.scenarios]


def _urls(arguments: argparse.Namespace) -> list[str]:
    from draftfeed_deploy.plan_live import MOST_WATCH_SECONDS
    from draftfeed_deploy.scrapes import base_url

    urls = list(dict.fromkeys(map(base_url, arguments.running)))
    if len(urls) > MOST_RUNNING:
        raise ConfigError("--from", f"{MOST_RUNNING} producers at most, not {len(urls)}")
    if not 1 <= arguments.seconds <= MOST_WATCH_SECONDS:
        most = f"{MOST_WATCH_SECONDS:g}"
        raise ConfigError("--for", f"must be from 1 to {most} s, not {arguments.seconds:g}")
    return urls
