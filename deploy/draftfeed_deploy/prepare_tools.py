"""`draftfeed prepare` and `draftfeed quality`: a look at a data set before days are spent on it."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console

from draftfeed_deploy import exits, packages
from draftfeed_deploy.errors import ConfigError, OutputError
from draftfeed_deploy.spool_tools import say

if TYPE_CHECKING:
    from draftfeed_deploy.prepare_report import Report
    from draftfeed_producer.quality import QualityConfig
    from draftfeed_producer.target import Target

PREPARE_EPILOG = """\
what it does:
  It reads OpenAI's `messages` and ShareGPT's `conversations`, tool calls included, and lines as
  the producer takes them, from JSONL or Parquet (.parquet), and writes a prompt file. Broken rows,
  duplicates and those that are too long are left out, and named by their number. Beside it lie
  OUT.report.json and OUT.report.html.
  It ends with 0 when the file is written; with 1 when what was checked does not hold, and then
  nothing is written but the reports; with 2 when the input cannot be used.

--mode live: the target is to answer; a response that is there is cut off.
--mode prefill: the responses are captured as they are ([capture] mode = "prefill"); the quality
  gate looks at them, too.

--thinking is the producer's [prompts] thinking. The chat template is tried with it on, off and left
  alone. With responses that exist, one that drops thinking from the loss mask, or writes some that
  nobody thought, is an error.

example:
  draftfeed prepare sharegpt.jsonl prompts.jsonl --target models/Qwen3-8B --thinking on
"""
QUALITY_EPILOG = """\
what it does:
  The producer's quality gate looks at the responses in a file, in its order: would it stop there?
  It ends with 0 when not, with 1 when it would. Rows that are broken are named and left out.

example:
  draftfeed quality completions.jsonl --target models/Qwen3-8B
"""


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `prepare` and `quality` to the `draftfeed` command."""
    _add_prepare(commands)
    _add_quality(commands)


def _add_prepare(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "prepare",
        help="a published chat set into a checked prompt file",
        description="A published chat set into a checked prompt file, with a report.",
        epilog=PREPARE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", type=Path, metavar="SOURCE", help="JSONL, or Parquet")
    parser.add_argument("out", type=Path, metavar="OUT", help="the prompt file; not there yet")
    _add_target(parser)
    parser.add_argument("--mode", default="live", choices=["live", "prefill"])
    parser.add_argument("--max-prompt-tokens", type=int, metavar="N")
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=512,
        metavar="N",
        help="room for a response, as in [engine.sampling] (default: 512)",
    )
    parser.add_argument(
        "--drafter",
        type=Path,
        metavar="DIR",
        help="also say which layers this drafter reads, from its config.json",
    )
    _add_thresholds(parser)
    parser.set_defaults(command=_prepare)


def _add_quality(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "quality",
        help="whether the producer would stop at the responses in a file",
        description="Whether the producer would stop at the responses in a file.",
        epilog=QUALITY_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="JSONL, or Parquet; see prepare")
    _add_target(parser)
    _add_thresholds(parser)
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    parser.set_defaults(command=_quality)


def _add_target(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--target", type=Path, required=True, metavar="DIR", help="for its tokenizer and template"
    )
    parser.add_argument("--thinking", default="template", choices=["on", "off", "template"])


def _add_thresholds(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="quality.KEY=VALUE",
        help="override one value of [quality], as in producer.toml; may be repeated",
    )


def _prepare(arguments: argparse.Namespace, console: Console) -> int:
    packages.require_for_prepare(arguments.source.suffix == ".parquet")
    from draftfeed_deploy.config import build
    from draftfeed_deploy.prepare import Options, prepare
    from draftfeed_deploy.prepare_report import lines_of
    from draftfeed_producer.engines.config import SamplingConfig
    from draftfeed_producer.prompts import PromptsConfig

    prompts = {"path": str(arguments.out), "max_prompt_tokens": arguments.max_prompt_tokens}
    sampling = {"max_new_tokens": arguments.max_new_tokens}
    options = Options(
        source=arguments.source,
        out=arguments.out,
        mode=arguments.mode,
        thinking=arguments.thinking,
        prompts=build(prompts, PromptsConfig, "--max-prompt-tokens"),
        sampling=build(sampling, SamplingConfig, "--max-new-tokens"),
        quality=_thresholds(arguments.set),
        drafter=arguments.drafter,
    )
    report = prepare(options, _target(arguments.target), console)
    _write_reports(report, arguments.out)
    say(lines_of(report))
    return exits.DONE if report.passed else exits.FAILED


def _quality(arguments: argparse.Namespace, console: Console) -> int:
    packages.require_for_quality(arguments.file.suffix == ".parquet")
    from draftfeed_deploy.prepare_quality import examine, lines_of

    thresholds, target = _thresholds(arguments.set), _target(arguments.target)
    found = examine(arguments.file, target, arguments.thinking, thresholds, console)
    if arguments.json:
        say([msgspec.json.format(msgspec.json.encode(found)).decode()])
    else:
        say(lines_of(found))
    return exits.DONE if found.closes_after is None else exits.FAILED


def _thresholds(settings: list[str]) -> "QualityConfig":
    from draftfeed_deploy import config
    from draftfeed_producer.quality import QualityConfig

    table: config.Table = {}
    for text in settings:
        config.override(table, text)
    if set(table) - {"quality"}:
        raise ConfigError("--set", "only keys of [quality] can be set here")
    return config.build(table.get("quality", {}), QualityConfig, "--set quality")


def _target(path: Path) -> "Target":
    from draftfeed_producer.target import TargetConfig, load_target

    return load_target(TargetConfig(path=str(path)))


def _write_reports(report: "Report", out: Path) -> None:
    from draftfeed_deploy.prepare_html import render

    contents = {
        "json": msgspec.json.format(msgspec.json.encode(report)),
        "html": render(report).encode(),
    }
    for kind, content in contents.items():
        path = out.with_name(f"{out.name}.report.{kind}")
        try:
            path.write_bytes(content)
        except OSError as error:
            raise OutputError(path, error, f"{out} is whole, and has no report") from None
