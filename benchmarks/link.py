"""How much more goes through a link that is the bottleneck, compressed?

    sudo .venv/bin/python benchmarks/link.py

README.md beside this file says what is measured and how.
"""

import argparse
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from link_network import ADDRESSES, Network, NoNetwork
from report import leave, options_of, say
from rounds import Spread, in_turn
from this_machine import this_machine
from transport_run import Absent, Amount, Cell, Damaged, Hosts, Passage, run
from transport_sets import Recipe, prepare

LIMIT = "tcp"
TRANSPORTS = (LIMIT, "pyzmq", "draftfeed")
BAR = 1.35
"""Of states, over what raw TCP carries of them through the same link."""
BARRED = ("1 Gb/s", "10 Gb/s")


class Link(NamedTuple):
    gbit: float
    samples: int
    """That go through it while it is measured."""
    delay_ms: float = 0.0
    loss_percent: float = 0.0

    @property
    def name(self) -> str:
        words = f"{self.gbit:g} Gb/s"
        return f"{words}, {self.delay_ms:g} ms, {self.loss_percent:g}%" if self.delay_ms else words


LINKS = (Link(1, 24), Link(2.5, 16), Link(10, 32), Link(1, 8, 10, 0.1))
WIDE, QUICK = Recipe(6, 800), Recipe(2, 16)
WARM = 2
SEGMENT_BYTES = 64 << 20
Row = tuple[str, str]
"""Link, and arm."""


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # no end outlives it
    machine = this_machine()
    say(options, f"{machine['processor']}, {machine['cores']} cores, load {machine['load']} before")
    try:
        with (
            Network() as network,
            tempfile.TemporaryDirectory(prefix="draftfeed-link-", dir=options.dir) as name,
        ):
            result = measure(options, network, Path(name))
    except NoNetwork as error:
        print(f"not run: {error}", file=sys.stderr)
        return 2
    for line in words(result):
        say(options, line)
    leave(options, {"machine": machine, **result})
    return 0


def measure(options: argparse.Namespace, network: Network, directory: Path) -> dict[str, Any]:
    """The document, but for the machine."""
    recipe = QUICK if options.quick else WIDE
    states = prepare("wide", recipe, lambda line: say(options, line))
    links = [Link(1, 4)] if options.quick else list(LINKS)
    not_run: dict[str, str] = {}
    rates: dict[Row, list[float]] = {}
    for number in range(options.rounds):
        for link in links:
            if link.name in not_run:
                continue
            try:
                _set(network, link)
            except NoNetwork as error:
                not_run[link.name] = str(error)
                say(options, f"not run: {link.name}: {error}")
                continue
            for transport in in_turn(TRANSPORTS, number):
                for arm, passage in _passages(transport, link, states, network, directory).items():
                    rates.setdefault((link.name, arm), []).append(passage.bytes / passage.seconds)
            say(options, f"round {number + 1} of {options.rounds}: {link.name} done")
    return {
        "setup": {"rounds": options.rounds, "quick": options.quick, "rows": recipe.tokens},
        "not_run": not_run,
        "links": {
            link.name: _figures(link.name, rates) for link in links if link.name not in not_run
        },
    }


def _set(network: Network, link: Link) -> None:
    if link.delay_ms:
        network.impair(link.gbit, link.delay_ms, link.loss_percent)
    else:
        network.limit(link.gbit)


def _passages(
    transport: str, link: Link, states: Path, network: Network, directory: Path
) -> dict[str, Passage]:
    hosts = Hosts(ADDRESSES["producer"], {role: network.enter(role) for role in ADDRESSES})
    amount = Amount(WARM, WARM + link.samples, link.samples + 2 * WARM, WARM, WARM, SEGMENT_BYTES)
    try:
        found = run(Cell(transport, "wide"), amount, states, directory, hosts)
    except (Absent, Damaged) as error:
        raise SystemExit(f"{transport}: {error}") from None
    return {_arm(transport, what): passage for what, passage in found.items()}


def _arm(transport: str, what: str) -> str:
    return transport if what == "live" else f"{transport}, {what}"


def _figures(link: str, rates: dict[Row, list[float]]) -> dict[str, Any]:
    """By arm: bytes of states a second, and over raw TCP's in the same round."""
    limit = rates[link, LIMIT]
    return {
        arm: {
            "bytes_per_second": Spread.of(found)._asdict(),
            "of_limit": Spread.of(a / b for a, b in zip(found, limit, strict=True))._asdict(),
        }
        for (name, arm), found in rates.items()
        if name == link
    }


def words(result: dict[str, Any]) -> list[str]:
    lines = []
    for link, arms in result["links"].items():
        lines += [f"{link}: MB/s of states, medians (least to most), and over raw TCP's"]
        for arm, figures in arms.items():
            rate, ratio = (Spread(**figures[what]) for what in ("bytes_per_second", "of_limit"))
            judged = link in BARRED and arm.startswith("draftfeed") and not result["setup"]["quick"]
            verdict = "holds" if ratio.median >= BAR else "MISSED"
            bar = f"   {verdict}: >= {BAR}" if judged else ""
            lines.append(f"  {arm:20} {rate.times(1e-6, 0):26} {ratio.times(1, 3)}{bar}")
    return lines + [f"not run: {link}: {why}" for link, why in result["not_run"].items()]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Through links that are slower than the ends.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, help="where spools are made; default: TMPDIR")
    parser.add_argument("--quick", action="store_true", help="one link, next to nothing: a test")
    return options_of(parser, "link.json")


if __name__ == "__main__":
    sys.exit(main())
