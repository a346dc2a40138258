"""The `draftfeed` command. Every error of ours is one line on stderr; `exits.py` has the codes."""

import argparse
import importlib.metadata
import logging
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, TypeAlias

from rich.console import Console
from rich.logging import RichHandler

from draftfeed_deploy import (
    archive_tools,
    audit,
    bench_tools,
    doctor,
    drafter_tools,
    exits,
    export_tools,
    install_units,
    keygen,
    plan_tools,
    prepare_tools,
    rank,
    spool_tools,
    target_tools,
    top_tools,
)
from draftfeed_proto.limits import MAX_EPOCHS

if TYPE_CHECKING:
    from draftfeed_deploy.consumer_file import ConsumerFile
    from draftfeed_producer.config import ProducerConfig

DEMO_PROMPTS = 200
"""Shipped in data/prompts.jsonl."""
GIVE_UP_SECONDS = 15.0
"""How much longer than the consumer `draftfeed drain` waits: the consumer says how it ended."""
EPILOG = f"""\
examples:
  draftfeed demo                                 the whole line on this machine, no GPU needed
  draftfeed plan b-split                         what a run takes: days, bandwidth, memory, cost
  draftfeed producer -c producer.toml --check    before a long run: a few prompts, judged
  draftfeed producer -c producer.toml            generate, capture, spool, serve
  draftfeed replay -c replay.toml                serve an archive again, without a target
  draftfeed consumer -c consumer.toml            receive and train
  draftfeed consumer -c consumer.toml --takeover the same on another node, while generation goes on
  draftfeed target fetch -c consumer.toml        the target's embedding and head, in advance
  draftfeed keygen keys/producers                keys, before others can reach the stream
  draftfeed install-units --dry-run              the same under systemd
  draftfeed top --once                           what running services do, as text; without --once
                                                 on one screen that follows them
  draftfeed doctor -c producer.toml              what stands in the way, and how to mend it
  draftfeed drain -c consumer.toml               end a consumer with everything committed
  draftfeed audit -c producer.toml               where every prompt is
  draftfeed export --from runs/demo/spool --format specforge files
                                                 the samples as files for another trainer
  draftfeed evaluate checkpoints --target models/Qwen3-8B    what its drafter gets accepted
  draftfeed bench target -c producer.toml        what the target puts out at each batch
  draftfeed bench codec --from runs/demo/spool   what the codecs make of your own states

{exits.SUMMARY}"""
PRODUCER_EPILOG = """\
--check is for the hour before a long run. It reads the whole prompt file, starts the engine that
  is configured, and takes the first three prompts, with at most 32 new tokens each, through tap,
  codec, a spool, the server and a consumer. Then it captures the same tokens once more, in one
  pass, and those of one sample with another token in the middle. It ends with 0 (PASSED) when each
  token has its row, when what arrives is what was made, when both captures agree within what the
  target's dtype allows, when the other token changes its own row and none before it, when no value
  is infinite and no row zero, and when the disk and the memory hold what is configured; else with
  1 (FAILED), and with 2 when the configuration cannot be used. It touches neither [spool] dir nor
  [server] bind: spool and server are temporary ones, the spool where temporary files go (TMPDIR).
  It needs the consumer's packages, and an engine that runs a target.
"""
CONSUMER_EPILOG = """\
SIGTERM and Ctrl-C drain: no more samples are taken, the trainer ends with its usual last
checkpoint, and the producers confirm it. Again, or after [trainer] drain_seconds, it stops at
once; what was trained since the last checkpoint is then trained again by the next one.

--takeover moves training to another node while generation goes on. Start the new consumer with
  the same group, and with access to the old one's checkpoints. Every producer hands it the
  stream and from then on accepts nothing of the old one, whose samples without a checkpoint come
  again. If no checkpoint of the old one is in your [trainer] output_dir, this one is refused and
  the old one has ended all the same. The old node need not be reachable. If it lives it hears of
  it at its next message, within about a second: it stops, commits nothing more and ends with exit
  code 3. Do not restart it. Without --takeover a consumer waits until the one before has left, or
  has been cut off for the producers' [server] session_timeout_seconds. It is an option and no
  configuration, because two services that take over whenever they start would do so from each
  other for ever.

--rollback is needed when the checkpoint lacks samples that the producers know as trained: it is
  not the last one, or the last one is lost. "deliver" (if you name none) has them delivered once
  more, and is refused when some have left the spool, which keeps what the last two commits
  added. "regenerate" has those generated again: that takes its time and may give other text.
  Either way the newer checkpoints are worth nothing any more. To go on from one of them would
  train those samples twice.
"""
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(argv: Sequence[str] | None = None) -> int:
    """Whoever has read enough of the output, as `head` does, may go."""
    try:
        return _main(argv)
    except BrokenPipeError:
        if not _unread(sys.stdout):
            raise
        return exits.DONE
    finally:
        if _unread(sys.stdout):  # Python would write the rest at its end, and complain
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _main(argv: Sequence[str] | None) -> int:
    arguments = _parser().parse_args(argv)
    console = Console(stderr=True)
    _log_to(console, arguments.log_level)
    command: Callable[[argparse.Namespace, Console], int] = arguments.command
    try:
        return command(arguments, console)
    except KeyboardInterrupt:
        print("draftfeed: interrupted", file=sys.stderr)
        return exits.INTERRUPTED
    except ValueError as error:
        code = exits.code_of(error)
        if code is None:
            raise
        print(f"draftfeed: {error}", file=sys.stderr)
        return code


def _unread(output: TextIO) -> bool:
    """Whether it is a pipe, and its reader has gone."""
    try:
        found = select.poll()
        found.register(output, select.POLLOUT)
        return any(events & select.POLLERR for _, events in found.poll(0))
    except (OSError, ValueError):  # it is none of the system's, as under a test
        return False


def _producer(arguments: argparse.Namespace, console: Console) -> int:
    if not arguments.check:
        _ignore_hangups()
    from draftfeed_deploy import config
    from draftfeed_deploy.producer import run_producer
    from draftfeed_deploy.producer_file import ProducerFile

    skip_bad = ["prompts.skip_bad=true"] if arguments.skip_bad else []
    loaded = config.load(arguments.config, ProducerFile, [*arguments.set, *skip_bad])
    if arguments.check:
        return _check_producer(loaded, str(arguments.config), console)
    done = run_producer(loaded, arguments.run_dir, console)
    return exits.DONE if done else exits.INTERRUPTED


def _ignore_hangups() -> None:
    """Until the service knows what to do at a SIGHUP, which may be sent to all of them at once."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _check_producer(config: "ProducerConfig", where: str, console: Console) -> int:
    from draftfeed_deploy import packages

    packages.require_for_check()
    from draftfeed_deploy.check import run_check
    from draftfeed_deploy.check_report import lines_of
    from draftfeed_deploy.foreground import interrupt, on_signal

    with on_signal(interrupt):
        findings = run_check(config, where, console)
    lines, passed = lines_of(config, where, findings)
    print("\n".join(lines))
    return exits.DONE if passed else exits.FAILED


def _replay(arguments: argparse.Namespace, console: Console) -> int:
    from draftfeed_deploy import config
    from draftfeed_deploy.errors import ConfigError
    from draftfeed_deploy.producer import run_producer
    from draftfeed_deploy.producer_file import ProducerFile
    from draftfeed_producer.engines import ReplayConfig

    loaded = config.load(arguments.config, ProducerFile, arguments.set)
    if not isinstance(loaded.engine, ReplayConfig):
        name = 'a replay needs [engine] name = "archive"; this file is for `draftfeed producer`'
        raise ConfigError(str(arguments.config), name)
    done = run_producer(loaded, arguments.run_dir, console)
    return exits.DONE if done else exits.INTERRUPTED


def _consumer(arguments: argparse.Namespace, console: Console) -> int:
    _ignore_hangups()
    if arguments.ranks > 1 and rank.is_rank():
        rank.end_with_parent()  # before anything that takes its time
    from draftfeed_deploy import packages

    packages.require_for_consumer()
    config = _consumer_config(arguments)
    if arguments.ranks > 1 and not rank.is_rank():
        from draftfeed_deploy.rank_group import run_ranks

        return run_ranks(arguments.ranks)
    from draftfeed_consumer.actions import Attach
    from draftfeed_deploy.consumer import run_consumer

    attach = Attach(
        takeover=arguments.takeover,
        rollback=arguments.rollback,
        without=tuple(arguments.without),
    )
    run_consumer(config, arguments.run_dir, console, attach)
    return exits.DONE


def _consumer_config(arguments: argparse.Namespace) -> "ConsumerFile":
    from draftfeed_deploy import config
    from draftfeed_deploy.consumer_file import ConsumerFile

    return config.load(arguments.config, ConsumerFile, arguments.set)


def _drain(arguments: argparse.Namespace, console: Console) -> int:
    from draftfeed_deploy import packages
    from draftfeed_deploy.drain import drain

    packages.require_for_consumer()
    trainer = _consumer_config(arguments).trainer
    timeout_seconds = arguments.timeout
    if timeout_seconds is None:
        timeout_seconds = trainer.drain_seconds + GIVE_UP_SECONDS
    return exits.DONE if drain(trainer.output_dir, timeout_seconds) else exits.FAILED


def _demo(arguments: argparse.Namespace, console: Console) -> int:
    from draftfeed_deploy import packages
    from draftfeed_deploy.foreground import interrupt, on_signal

    packages.require_for_demo()
    with on_signal(interrupt):
        from draftfeed_deploy.demo import DemoOptions, run_demo
        from draftfeed_deploy.report import summary_lines

        options = DemoOptions(
            directory=arguments.dir,
            prompts=arguments.prompts,
            max_new_tokens=arguments.max_new_tokens,
            engine=arguments.engine,
            swap=arguments.swap,
            epochs=arguments.epochs,
        )
        report = run_demo(options, console)
    print("\n".join(summary_lines(report)))
    print(f"report: {arguments.dir / 'report.html'}")
    return exits.DONE if report.passed else exits.FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="draftfeed",
        description="Stream a target model's hidden states, captured while it generates, "
        "into the trainer of its drafter.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = importlib.metadata.version("draftfeed")
    parser.add_argument("--version", action="version", version=f"draftfeed {version}")
    parser.add_argument(
        "--log-level", default="info", choices=["debug", "info", "warning", "error"]
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_producer(commands)
    _add_service(commands, "replay", "serve what was archived again, without a target", _replay)
    _add_consumer(commands)
    _add_drain(commands)
    keygen.add_command(commands)
    install_units.add_command(commands)
    audit.add_command(commands)
    spool_tools.add_commands(commands)
    archive_tools.add_command(commands)
    export_tools.add_command(commands)
    bench_tools.add_command(commands)
    drafter_tools.add_commands(commands)
    target_tools.add_commands(commands)
    plan_tools.add_command(commands)
    prepare_tools.add_commands(commands)
    top_tools.add_command(commands)
    doctor.add_command(commands)
    _add_demo(commands)
    return parser


def _add_producer(commands: Commands) -> None:
    parser = _add_service(commands, "producer", "generate, capture, spool and serve", _producer)
    parser.formatter_class, parser.epilog = argparse.RawDescriptionHelpFormatter, PRODUCER_EPILOG
    parser.add_argument(
        "--skip-bad",
        action="store_true",
        help="count lines of the prompt file that cannot be used and go on (prompts.skip_bad)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="run a few prompts through the whole line, judge what arrives, and end; see below",
    )


def _add_consumer(commands: Commands) -> None:
    parser = _add_service(commands, "consumer", "receive samples and train on them", _consumer)
    parser.formatter_class, parser.epilog = argparse.RawDescriptionHelpFormatter, CONSUMER_EPILOG
    parser.add_argument(
        "--ranks",
        type=_positive,
        default=1,
        metavar="N",
        help="train in N processes on this machine, one for each GPU, as torchrun starts them; "
        "the trainer has to be one for several (default: 1)",
    )
    parser.add_argument(
        "--takeover",
        action="store_true",
        help="take the stream from the consumer that has it; see below",
    )
    parser.add_argument(
        "--rollback",
        nargs="?",
        const="deliver",
        default="",
        choices=["deliver", "regenerate"],
        help="go back to a checkpoint that is older than the last commit; see below",
    )
    parser.add_argument(
        "--without",
        action="append",
        default=[],
        metavar="ADDRESS",
        help="begin although this producer cannot be reached: until it is, another consumer may "
        "still be training from it; may be repeated",
    )


def _add_drain(commands: Commands) -> None:
    parser = commands.add_parser(
        "drain",
        help="end a running consumer with everything committed",
        description="Find the consumer that was started on this machine with this configuration "
        "(by draftfeed.pid in its [trainer] output_dir) and end it as SIGTERM does: it takes no "
        "more samples, finishes its step, makes a last checkpoint and waits until the producers "
        "have stored what that contains. Ends with 0 when it did, with 1 when it has not within "
        "the time or ended otherwise, with 2 when no such consumer runs.",
    )
    parser.set_defaults(command=_drain)
    _add_config(parser, "consumer")
    parser.add_argument(
        "--timeout",
        type=float,
        metavar="SECONDS",
        help=f"default: [trainer] drain_seconds + {GIVE_UP_SECONDS:.0f}",
    )


def _add_config(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument(
        "-c",
        "--config",
        type=Path,
        required=True,
        metavar=f"{name}.toml",
        help="docs/configuration.md has every key",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="TABLE.KEY=VALUE",
        help="override one value of the configuration; may be repeated",
    )


def _add_service(
    commands: Commands,
    name: str,
    summary: str,
    command: Callable[[argparse.Namespace, Console], int],
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=summary, description=f"{summary}.".capitalize())
    parser.set_defaults(command=command)
    _add_config(parser, name)
    parser.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="write statistics and one line per sample here, as JSON lines",
    )
    return parser


def _add_demo(commands: Commands) -> None:
    parser = commands.add_parser(
        "demo",
        help="the whole line on this machine, proven by a report",
        description="Generate with SmolLM2-135M on the CPU, stream its hidden states to a second "
        "process, train a DFlash drafter there with SpecForge, and check that every sample "
        "arrived intact and was trained exactly once. Takes a few minutes; ends with exit code 0 "
        "when every check holds.",
    )
    parser.set_defaults(command=_demo)
    parser.add_argument(
        "--dir", type=Path, default=Path("runs/demo"), help="output (default: runs/demo)"
    )
    parser.add_argument(
        "--prompts",
        type=_demo_prompts,
        metavar="N",
        help=f"use the first N of the {DEMO_PROMPTS} prompts",
    )
    parser.add_argument(
        "--max-new-tokens", type=_positive, default=64, metavar="N", help="default: 64"
    )
    parser.add_argument(
        "--engine",
        default="transformers",
        choices=["transformers", "sglang"],
        help="what runs the target (default: transformers); sglang, in its CPU build, needs "
        "`make sglang` once and takes a minute longer to start",
    )
    parser.add_argument(
        "--swap",
        action="store_true",
        help="let a second consumer take over in the middle of the run",
    )
    parser.add_argument(
        "--epochs",
        type=_epochs,
        default=1,
        metavar="N",
        help="train every prompt N times: it is generated once, and comes out of an archive in the "
        "later epochs (default: 1)",
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _epochs(text: str) -> int:
    number = _positive(text)
    if number > MAX_EPOCHS:
        raise argparse.ArgumentTypeError(f"at most {MAX_EPOCHS}")
    return number


def _demo_prompts(text: str) -> int:
    number = _positive(text)
    if number > DEMO_PROMPTS:
        raise argparse.ArgumentTypeError(f"the demo has {DEMO_PROMPTS}")
    return number


def _log_to(console: Console, level: str) -> None:
    if console.is_terminal:
        handler: logging.Handler = RichHandler(console=console, show_path=False)
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=level.upper(), handlers=[handler])


if __name__ == "__main__":
    sys.exit(main())
