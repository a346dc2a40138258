"""Is an archive read as fast as the drive or the link, and what does keeping it cost?

    .venv/bin/python benchmarks/archive.py

README.md beside this file says what is measured and how.
"""

import argparse
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from archive_files import (
    direct_possible,
    forget,
    read_all,
    seal_all,
    size_of,
    through_loopback,
    timed,
    write_all,
)
from archive_peer import decode, receive
from archive_producers import Generated, Replayed, Size, generate, replay
from draftfeed_consumer.memory import keep_chunks_mapped
from draftfeed_producer.archive.roots import read_contents
from report import leave, options_of, say
from rounds import Spread, in_turn
from this_machine import this_machine

REPLAY_BAR, GENERATION_BAR = 0.8, 0.99
DRIVE = ("read", "read direct")
WRITE = ("write", "write direct")
SEALING = ("seal, linked", "seal, copied")
REPLAYS = ("received", "received, as stored", "received, warm", "decoded")
QUICK = Size(samples=8, tokens=24, hidden=256, segment_bytes=65_536)

Round = dict[str, float]


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # no producer outlives it
    torch.set_num_threads(1)
    keep_chunks_mapped()
    size = QUICK if options.quick else Size(options.samples, options.tokens, 5120, 256 << 20)
    machine = this_machine()
    head = f"{machine['processor']}, {machine['cores']} cores, load {machine['load']} before"
    say(options, head)
    with tempfile.TemporaryDirectory(prefix="draftfeed-archive-", dir=options.dir) as name:
        directory = Path(name)
        direct = direct_possible(directory)
        say(options, "O_DIRECT and dropped page cache" if direct else "dropped page cache only")
        made = _generating(directory, size, options)
        bench = Bench(directory, size, direct)
        say(options, f"{len(bench.segments)} segments, {bench.bytes / 1e6:.1f} MB are archived")
        rounds = [bench.round(number) for number in range(options.rounds)]
        for number, one in enumerate(rounds, start=1):
            words = ", ".join(f"{arm} {rate / 1e6:.0f}" for arm, rate in one.items())
            say(options, f"round {number}, MB/s: {words}")
    summary = {**_summarise(rounds), **_summarise_generation(made, bench.bytes)}
    for line in _words(summary):
        say(options, line)
    result = {
        "machine": machine,
        "setup": {**size._asdict(), "rate": options.rate, "archived_bytes": bench.bytes},
        "direct": direct,
        "rounds": rounds,
        "generation": [{arm: _figures(one[arm]) for arm in one} for one in made],
        "summary": {figure: spread._asdict() for figure, spread in summary.items()},
    }
    leave(options, result)
    return 0


class Bench:
    """All arms on one archive, which was made before."""

    def __init__(self, directory: Path, size: Size, direct: bool) -> None:
        self._directory, self._samples = directory, size.samples
        self.segments = sorted((directory / "archive").glob("*.seg"))
        self.bytes = size_of(self.segments)
        self._stream_id = read_contents(directory / "archive").descriptor.stream_id()
        self._spooled = self._as_spool()
        files: dict[str, Callable[[], float]] = {
            "read": lambda: self._cold(lambda: read_all(self.segments, direct=False)),
            "read direct": lambda: self._cold(lambda: read_all(self.segments, direct=True)),
            "write": lambda: self._write(direct=False),
            "write direct": lambda: self._write(direct=True),
            "seal, linked": lambda: self._seal(link=True),
            "seal, copied": lambda: self._seal(link=False),
            "link": lambda: through_loopback(self.bytes),
        }
        self._arms = {
            arm: seconds for arm, seconds in files.items() if direct or not arm.endswith("direct")
        }
        self._replays: dict[str, Callable[[], Replayed]] = {
            "received": lambda: replay(directory, receive, "samples"),
            "received, as stored": lambda: replay(directory, receive, "stored"),
            "received, warm": lambda: replay(directory, receive, "samples", cold=False),
            "decoded": lambda: replay(directory, decode, "samples"),
        }

    def round(self, number: int) -> Round:
        """Bytes/s of each arm; who is first goes round."""
        return {arm: self._rate(arm) for arm in in_turn([*self._arms, *self._replays], number)}

    def _rate(self, arm: str) -> float:
        if arm in self._arms:
            return self.bytes / self._arms[arm]()
        if arm == "received, warm":
            read_all(self.segments, direct=False)
        replayed = self._replays[arm]()
        taken = replayed.taken
        if taken.samples != self._samples:
            raise SystemExit(f"{arm}: {taken.samples} of {self._samples} samples came")
        cold = "warm" not in arm
        if cold and replayed.drive_bytes < 0.9 * taken.encoded_bytes:
            raise SystemExit(
                f"{arm}: only {replayed.drive_bytes} of {taken.encoded_bytes} bytes came from the "
                "drive; here the page cache cannot be dropped"
            )
        return taken.encoded_bytes / taken.seconds

    def _cold(self, work: Callable[[], object]) -> float:
        forget(self.segments)
        return timed(work)

    def _write(self, *, direct: bool) -> float:
        read_all(self.segments, direct=False)
        copies = self._directory / "copies"
        return timed(lambda: write_all(self.segments, copies, direct=direct))

    def _seal(self, *, link: bool) -> float:
        """Segments lie in the page cache, where they were written to not long ago."""
        read_all(self._spooled, direct=False)
        root = self._directory / "sealed"
        return timed(lambda: seal_all(self._spooled, root, self._stream_id, link=link))

    def _as_spool(self) -> list[Path]:
        """The same files under names that a spool gives."""
        spooled = self._directory / "spooled"
        spooled.mkdir()
        names = [spooled / f"{n:08d}.seg" for n in range(len(self.segments))]
        for segment, name in zip(self.segments, names, strict=True):
            name.hardlink_to(segment)
        return names


def _generating(
    directory: Path, size: Size, options: argparse.Namespace
) -> list[dict[str, Generated]]:
    """Without and with an archive, paced and as fast as it can; the last one's archive stays."""
    rounds = []
    for number in range(options.rounds):
        order = (True, False) if number % 2 == 0 else (False, True)
        one = {}
        for pace, rate in (("paced", options.rate), ("flat out", 0.0)):
            for archive in order:
                name = f"{pace}, {'archived' if archive else 'deleted'}"
                one[name] = generate(directory, size, rate, archive=archive)
        alike = [made.digests for made in one.values()]
        if any(digests != alike[0] for digests in alike):
            raise SystemExit("the arms did not make the same samples")
        words = ", ".join(
            f"{name} {made.tokens_per_second:.0f} tokens/s, {made.cpu_seconds:.2f} CPU s"
            for name, made in one.items()
        )
        say(options, f"generation {number + 1}: {words}")
        rounds.append(one)
    return rounds


def _figures(made: Generated) -> dict[str, Any]:
    return {
        "tokens": made.tokens,
        "seconds": made.seconds,
        "cpu_seconds": made.cpu_seconds,
        "tokens_per_second": made.tokens_per_second,
    }


def _limit(one: Round) -> float:
    """What a replay is measured by: the drive's sequential read or the link's rate, the lower."""
    return min(_best(one, DRIVE), one["link"])


def _best(one: Round, arms: tuple[str, ...]) -> float:
    """With the page cache or past it, where that is possible."""
    return max(one[arm] for arm in arms if arm in one)


def _summarise(rounds: list[Round]) -> dict[str, Spread]:
    """Bytes/s of each arm, and ratios of arms of the same round."""

    def ratio(arm: str, others: Callable[[Round], float]) -> Spread:
        return Spread.of([one[arm] / others(one) for one in rounds])

    return {
        **{arm: Spread.of([one[arm] for one in rounds]) for arm in rounds[0]},
        **{f"{arm} / limit": ratio(arm, _limit) for arm in REPLAYS},
        "limit": Spread.of([_limit(one) for one in rounds]),
        "copied / write": ratio("seal, copied", lambda one: _best(one, WRITE)),
    }


def _summarise_generation(
    rounds: list[dict[str, Generated]], archived_bytes: int
) -> dict[str, Spread]:
    summary = {}
    for pace in ("paced", "flat out"):
        pairs = [(one[f"{pace}, deleted"], one[f"{pace}, archived"]) for one in rounds]
        ratios = [kept.tokens_per_second / none.tokens_per_second for none, kept in pairs]
        costs = [none.cpu_seconds / kept.cpu_seconds for none, kept in pairs]
        added = [(kept.cpu_seconds - none.cpu_seconds) / archived_bytes for none, kept in pairs]
        summary[f"{pace}: tokens/s, archived / deleted"] = Spread.of(ratios)
        summary[f"{pace}: CPU time, deleted / archived"] = Spread.of(costs)
        summary[f"{pace}: CPU seconds a byte"] = Spread.of(added)
    return summary


def _words(summary: dict[str, Spread]) -> list[str]:
    lines = ["medians (and all from ... to) over the rounds, MB/s"]
    for arm in (*DRIVE, "link", *REPLAYS, *WRITE, *SEALING):
        if arm in summary:
            ratio = summary.get(f"{arm} / limit")
            bar = f"   {ratio.times(1, 2)} of the limit" if ratio else ""
            bar += f"   {_verdict(ratio, REPLAY_BAR)}" if ratio and "warm" not in arm else ""
            lines.append(f"  {arm:20} {summary[arm].times(1e-6, 0):24}{bar}".rstrip())
    lines.append(f"  copied, of the faster write   {summary['copied / write'].times(1, 2)}")
    lines.append("generation with an archive, over without")
    for pace in ("paced", "flat out"):
        ratio = summary[f"{pace}: tokens/s, archived / deleted"]
        added = summary[f"{pace}: CPU seconds a byte"].times(1e9, 2)
        verdict = _verdict(ratio, GENERATION_BAR)
        lines.append(f"  {pace:10} tokens/s {ratio.times(1, 3)}   {verdict}")
        lines.append(f"  {'':10} CPU seconds more for each GB archived {added}")
    return lines


def _verdict(figure: Spread, bar: float) -> str:
    return f"{'holds' if figure.median >= bar else 'MISSED'}: >= {bar}"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Replaying an archive, and what keeping it costs.")
    parser.add_argument("--rounds", type=int, default=5, help="of all arms")
    parser.add_argument("--samples", type=int, default=64, help="in the archive")
    parser.add_argument("--tokens", type=int, default=800, help="mean length of a sample")
    parser.add_argument("--rate", type=float, default=2500.0, help="tokens/s of the paced arms")
    parser.add_argument("--dir", type=Path, help="where the archive is made; default: TMPDIR")
    parser.add_argument("--quick", action="store_true", help="next to nothing, one round: a test")
    return options_of(parser, "archive.json")


if __name__ == "__main__":
    sys.exit(main())
