"""Command line: episodes one after another until enough faults have happened."""

import argparse
import json
import os
import random
import secrets
import shutil
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from chaos import hosts
from chaos.episode import Result, run
from chaos.plan import SOURCES, Link, Source, draw
from chaos.schedule import counts, overlaps

FAULTS_PER_EPISODE = 15


def main() -> int:
    options = _parser().parse_args()
    if reason := hosts.missing():
        say(f"cannot run here: {reason}")
        return 2
    if not options.sheltered:
        again = [sys.executable, "-m", "chaos", *sys.argv[1:], "--sheltered"]
        os.execvp("unshare", hosts.shelter([*again, "--seed", str(options.seed)]))
    directory: Path = options.dir / f"seed{options.seed}"
    sources = [options.source] if options.source else SOURCES
    return _campaign(options.faults, options.seed, sources, options.link, directory.resolve())


def _campaign(
    faults: int, seed: int, sources: Sequence[Source], link: Link, directory: Path
) -> int:
    rng = random.Random(seed)
    results: list[Result] = []
    shutil.rmtree(directory, ignore_errors=True)
    while (left := faults - sum(len(result.happened) for result in results)) > 0:
        of = min(FAULTS_PER_EPISODE, left)
        number = len(results)
        source = sources[number % len(sources)]
        producers = 1 + number % 2
        plan = draw(rng.randrange(1 << 31), of, producers, source=source, link=link)
        episode = directory / f"episode{len(results)}"
        say(f"episode {len(results)} of seed {seed}, {faults - left} of {faults} faults: {plan}")
        results.append(run(plan, episode, say))
        report(results, seed, directory)
        if results[-1].broken:
            say("\n".join([f"BROKEN, seed {seed}; kept in {episode}", *results[-1].broken]))
            say((episode / "last-words.txt").read_text())
            say((episode / "events.jsonl").read_text())
            return 1
        say(f"held: {results[-1].trained} samples trained once")
        shutil.rmtree(episode)
    say(table(results))
    return 0


def report(results: list[Result], seed: int, directory: Path) -> None:
    """report.json: the sums; faults.jsonl: what was broken, and when."""
    text = json.dumps(summary(results, seed), indent=1)
    (directory / "report.json").write_text(text + "\n")
    number, last = len(results) - 1, results[-1]
    with (directory / "faults.jsonl").open("a") as log:
        for one in last.happened:
            log.write(json.dumps({"episode": number, **one._asdict()}) + "\n")


def summary(results: list[Result], seed: int) -> dict[str, Any]:
    return {
        "seed": seed,
        "episodes": len(results),
        "faults": _sorted(counts(result.happened) for result in results),
        "overlaps": _sorted(overlaps(result.happened) for result in results),
        "trained": sum(result.trained for result in results),
        "terminal": sum(result.terminal for result in results),
        "seconds": round(sum(result.seconds for result in results), 1),
        "broken": [sentence for result in results for sentence in result.broken],
    }


def table(results: list[Result]) -> str:
    made = _sorted(counts(result.happened) for result in results)
    both = _sorted(overlaps(result.happened) for result in results)
    seconds = sum(result.seconds for result in results)
    lines = [f"{sum(made.values())} faults in {seconds:.0f} s, {len(results)} episodes"]
    lines += [f"{count:6d}  {kind}" for kind, count in made.items()]
    lines += ["two at once:", *(f"{count:6d}  {pair}" for pair, count in both.items())]
    return "\n".join(lines)


def _sorted(counters: Iterable[Counter[str]]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for counter in counters:
        total += counter
    return dict(sorted(total.items()))


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m chaos", description=__doc__)
    parser.add_argument("--faults", type=int, default=30)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 31))
    parser.add_argument("--source", choices=SOURCES, help="of samples; default: each in turn")
    parser.add_argument("--link", choices=["tcp", "local"], default="tcp", help="to the producers")
    parser.add_argument("--dir", type=Path, default=Path("runs/chaos"))
    parser.add_argument("--sheltered", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
