"""The `draftfeed` command. Every error of ours is one line on stderr; `exits.py` has the codes."""

import argparse
import importlib.metadata
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler

from draftfeed_deploy import exits

EPILOG = f"""\
examples:
  draftfeed demo                                 the whole line on this machine, no GPU needed
  draftfeed producer -c producer.toml            generate, capture, spool, serve
  draftfeed consumer -c consumer.toml            receive and train
  draftfeed consumer -c consumer.toml --set producer.address=tcp://10.0.0.1:5550

{exits.SUMMARY}"""


def main(argv: Sequence[str] | None = None) -> int:
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


def _producer(arguments: argparse.Namespace, console: Console) -> int:
    from draftfeed_deploy import config
    from draftfeed_deploy.producer import run_producer
    from draftfeed_producer.config import ProducerConfig

    skip_bad = ["prompts.skip_bad=true"] if arguments.skip_bad else []
    loaded = config.load(arguments.config, ProducerConfig, [*arguments.set, *skip_bad])
    done = run_producer(loaded, arguments.run_dir, console)
    return exits.DONE if done else exits.INTERRUPTED


def _consumer(arguments: argparse.Namespace, console: Console) -> int:
    from draftfeed_deploy import config, packages

    packages.require_for_consumer()
    from draftfeed_consumer.config import ConsumerConfig
    from draftfeed_deploy.consumer import run_consumer

    loaded = config.load(arguments.config, ConsumerConfig, arguments.set)
    run_consumer(loaded, arguments.run_dir, console)
    return exits.DONE


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
    producer = _add_service(commands, "producer", "generate, capture, spool and serve", _producer)
    producer.add_argument(
        "--skip-bad",
        action="store_true",
        help="count lines of the prompt file that cannot be used and go on (prompts.skip_bad)",
    )
    _add_service(commands, "consumer", "receive samples and train on them", _consumer)
    _add_demo(commands)
    return parser


def _add_service(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
    name: str,
    summary: str,
    command: Callable[[argparse.Namespace, Console], int],
) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=summary, description=f"{name}: {summary}.")
    parser.set_defaults(command=command)
    parser.add_argument("-c", "--config", type=Path, required=True, metavar=f"{name}.toml")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="TABLE.KEY=VALUE",
        help="override one value of the configuration; may be repeated",
    )
    parser.add_argument(
        "--run-dir",
        type=Path,
        metavar="DIR",
        help="write statistics and one line per sample here, as JSON lines",
    )
    return parser


def _add_demo(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
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
        "--prompts", type=_positive, metavar="N", help="use the first N of the 200 prompts"
    )
    parser.add_argument(
        "--max-new-tokens", type=_positive, default=64, metavar="N", help="default: 64"
    )


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
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
