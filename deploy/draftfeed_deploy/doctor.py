"""`draftfeed doctor`: what stands in the way on this machine, and how to mend it."""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from rich.console import Console

from draftfeed_deploy import exits
from draftfeed_deploy.doctor_finding import Finding
from draftfeed_deploy.errors import ConfigError
from draftfeed_deploy.spool_tools import say

TOKENS_PER_SECOND = 1500.0
"""Of one producer, when nothing else is said: a replica that generates 1,250 and its prompts."""
EPILOG = """\
what it does:
  It looks at Python, the codec, the kernel's limits, the clock and the GPUs. With a configuration
  also at what that needs: target, prompt file, SGLang and its plugin, memory, the spool's disk
  (100 MB are written there, timed, and gone), ports and who has them, producers' addresses, keys.
  It changes nothing, and leaves nothing behind.

how to read it:
  ok     as it should be
  warn   it runs, and may be slow or stop some day
  FAIL   it will not run, or what runs is not safe; the exit code is then 1
  the line below says how to mend it

examples:
  draftfeed doctor
  draftfeed doctor -c producer.toml --tokens-per-second 5000
  draftfeed doctor -c consumer.toml --json
"""


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `doctor` to the `draftfeed` command."""
    parser = commands.add_parser(
        "doctor",
        help="look for what stands in the way on this machine",
        description="Look for what stands in the way on this machine, and say how to mend it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "-c",
        "--config",
        type=Path,
        metavar="FILE",
        help="producer.toml or consumer.toml; without it: the machine only",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="TABLE.KEY=VALUE",
        help="override one value of the configuration; may be repeated",
    )
    parser.add_argument(
        "--tokens-per-second",
        type=float,
        default=TOKENS_PER_SECOND,
        metavar="N",
        help="that the producer is planned to capture, prompts included; its disk has to keep up "
        f"(default: {TOKENS_PER_SECOND:g})",
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(command=_doctor)


def _doctor(arguments: argparse.Namespace, _: Console) -> int:
    findings = []
    for finding in look(arguments.config, arguments.set, arguments.tokens_per_second):
        findings.append(finding)
        if not arguments.json:
            say(lines_of(finding))
    passed = all(finding.level != "FAIL" for finding in findings)
    if arguments.json:
        report = {"ok": passed, "findings": findings}
        say([msgspec.json.format(msgspec.json.encode(report)).decode()])
    else:
        say(["", summary(findings)])
    return exits.DONE if passed else exits.FAILED


def look(
    path: Path | None, overrides: Sequence[str] = (), tokens_per_second: float = TOKENS_PER_SECOND
) -> Iterator[Finding]:
    """path: of a configuration; None: only the machine. Raises ConfigError."""
    from draftfeed_deploy import doctor_machine

    if not 0 < tokens_per_second < float("inf"):
        raise ConfigError("--tokens-per-second", f"must be above 0, not {tokens_per_second:g}")
    if path is None:
        if overrides:
            raise ConfigError("--set", "needs -c")
        return doctor_machine.machine()
    return _of_service(path, overrides, tokens_per_second)


def _of_service(
    path: Path, overrides: Sequence[str], tokens_per_second: float
) -> Iterator[Finding]:
    from draftfeed_deploy import config, doctor_machine

    tables = config.read(path)
    if "engine" in tables:
        from draftfeed_deploy.doctor_producer import producer
        from draftfeed_deploy.producer_file import ProducerFile

        own = producer(config.load(path, ProducerFile, overrides), tokens_per_second)
    elif "trainer" in tables:
        from draftfeed_deploy.consumer_file import ConsumerFile
        from draftfeed_deploy.doctor_consumer import consumer

        own = consumer(config.load(path, ConsumerFile, overrides))
    else:
        raise ConfigError(str(path), "has neither [engine], as a producer's, nor [trainer]")
    # What the service asks for replaces what is said of the machine without it.
    found = list(own)
    named = {finding.check for finding in found}
    yield from (one for one in doctor_machine.machine() if one.check not in named)
    yield from found


def lines_of(finding: Finding) -> Iterator[str]:
    yield f"{finding.level:<4}  {finding.check}: {finding.found}"
    if finding.fix:
        yield f"      {finding.fix}"


def summary(findings: Sequence[Finding]) -> str:
    count = {level: sum(f.level == level for f in findings) for level in ("ok", "warn", "FAIL")}
    return ", ".join(f"{number} {level}" for level, number in count.items())
