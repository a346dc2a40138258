"""What does it cost to move samples from one process to another, by draftfeed and by what people
would use instead?

    .venv/bin/python benchmarks/transport.py

README.md beside this file says what is measured and how.
"""

import argparse
import signal
import sys
import tempfile
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from report import leave, options_of, say
from rounds import Spread, in_turn
from this_machine import this_machine
from transport_report import FIGURES, NOTES, goals, versions, words
from transport_run import Absent, Amount, Cell, Damaged, Passage, run
from transport_sets import Recipe, prepare
from transport_states import load

LIMIT = "tcp"
PEERS = (LIMIT, "pyzmq", "mooncake", "files", "grpc")
OURS = "draftfeed"
ENCRYPTING = ("pyzmq", OURS)
SHORT = (
    *(Cell(peer, "wide") for peer in PEERS),
    Cell(OURS, "wide"),
    Cell(OURS, "wide", same_host=True),
    Cell(OURS, "wide", keys=True),
    Cell(LIMIT, "wide", producers=4, consumers=2),
    Cell(OURS, "wide", producers=4, consumers=2),
    Cell(LIMIT, "smollm2"),
    Cell(OURS, "smollm2"),
)
STAGED = (Cell(OURS, "wide"), Cell(OURS, "wide", same_host=True))
STAGED_RUNS = 3


class Set(NamedTuple):
    """Of samples, and how many of them go through a run."""

    recipe: Recipe
    warm: int
    """Before anything is measured, of all producers together: draftfeed's spools have been
    written, freed and written again by then, and everybody's buffers have been full."""
    measured: int
    edge: int
    """Of each consumer, before and after what is measured of the stored ones."""
    commit_steps: int
    segment_bytes: int
    """Of all producers together."""

    def amount(self, cell: Cell) -> Amount:
        """Each link has as many as any other."""
        warm, measured = (
            max(1, count // (cell.producers * cell.consumers)) * cell.consumers
            for count in (self.warm, self.measured)
        )
        edge = max(1, self.edge * cell.consumers // cell.producers)
        return Amount(
            warm,
            warm + measured,
            measured + 2 * edge,
            edge,
            self.commit_steps,
            self.segment_bytes // cell.producers,
        )


SETS = {
    "wide": Set(Recipe(6, 800), 32, 24, 8, 4, 64 << 20),
    "smollm2": Set(Recipe(32, 128), 384, 480, 64, 64, 16 << 20),
}
QUICK = {
    "wide": Set(Recipe(2, 16), 1, 6, 1, 1, 1 << 20),
    "smollm2": Set(Recipe(2, 4), 1, 6, 1, 1, 1 << 20),
}


class Row(NamedTuple):
    """One line of the table: a cell, and which of its passages."""

    cell: Cell
    what: str


Round = dict[Row, Passage]


def main() -> int:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # no end outlives it
    machine = this_machine()
    head = f"{machine['processor']}, {machine['cores']} cores, load {machine['load']} before"
    say(options, head)
    with tempfile.TemporaryDirectory(prefix="draftfeed-transport-", dir=options.dir) as name:
        result = Bench(options, Path(name)).run()
    result = {"machine": machine, "versions": versions(), **result}
    result["goals"] = goals(result)
    for line in words(result):
        say(options, line)
    leave(options, result)
    return 0


class Bench:
    """All cells that can be run here, in turns."""

    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        self._options, self._directory = options, directory
        self._sets = QUICK if options.quick else SETS
        self._cells = [
            cell
            for cell in (matrix() if options.matrix else SHORT)
            if cell.transport in options.only and cell.states in options.states
        ]
        tell = lambda line: say(options, line)  # noqa: E731
        names = dict.fromkeys(cell.states for cell in self._cells)
        self._states = {name: prepare(name, self._sets[name].recipe, tell) for name in names}
        self._not_run: dict[str, str] = {}

    def run(self) -> dict[str, Any]:
        """The document, but for what it ran on."""
        options = self._options
        rounds = []
        for number in range(options.rounds):
            rounds.append(self._round(number))
            say(options, f"round {number + 1} of {options.rounds}: {_line(rounds[-1])}")
        return {
            "setup": {"rounds": options.rounds, "matrix": options.matrix, "quick": options.quick},
            "sets": {name: self._set(name) for name in self._states},
            "notes": NOTES,
            "not_run": self._not_run,
            "cells": [_cell(row, rounds) for row in rounds[0]],
            "stages": self._stages(),
        }

    def _round(self, number: int) -> Round:
        found = {}
        for cell in in_turn(self._cells, number):
            if cell.name in self._not_run:
                continue
            try:
                passages = self._passages(cell)
            except Absent as error:
                self._not_run[cell.name] = str(error)
                say(self._options, f"not run: {cell.name}: {error}")
                continue
            except Damaged as error:
                raise SystemExit(f"{cell.name}: {error} is not what was sent") from None
            found.update({Row(cell, what): passage for what, passage in passages.items()})
        return {row: found[row] for row in self._in_order(found)}

    def _in_order(self, rows: Iterable[Row]) -> list[Row]:
        return sorted(rows, key=lambda row: self._cells.index(row.cell))

    def _passages(self, cell: Cell, *, stages: bool = False) -> dict[str, Passage]:
        amount, states = self._sets[cell.states].amount(cell), self._states[cell.states]
        corrupt = self._options.corrupt
        return run(cell, amount, states, self._directory, corrupt=corrupt, stages=stages)

    def _set(self, name: str) -> dict[str, Any]:
        states = load(self._states[name])
        return {
            "samples": len(states.samples),
            "rows": sum(map(len, states.samples)),
            "layers_hidden": states.samples[0].shape[1:],
            "mean_sample_bytes": sum(one.nbytes for one in states.samples) / len(states.samples),
        }

    def _stages(self) -> dict[str, Any]:
        """CPU seconds a GB: by cell, passage, role and stage; medians. In runs of their own: to
        look at the clock takes time, too."""
        stages: dict[str, Any] = {}
        for cell in STAGED:
            if cell not in self._cells or cell.name in self._not_run:
                continue
            runs = 1 if self._options.quick else STAGED_RUNS
            told = [self._passages(cell, stages=True) for _ in range(runs)]
            stages[cell.name] = {
                what: {
                    role: {
                        stage: median(
                            one[what].stages[role][stage] / one[what].bytes * 1e9 for one in told
                        )
                        for stage in told[0][what].stages[role]
                    }
                    for role in told[0][what].stages
                }
                for what in told[0]
            }
        return stages


def matrix() -> list[Cell]:
    """Everything that goes together."""
    cells = []
    for states, producers, consumers in product(SETS, (1, 4), (1, 2)):
        for transport in (*PEERS, OURS):
            plain = Cell(transport, states, producers, consumers)
            cells.append(plain)
            if transport == OURS:
                cells.append(plain._replace(same_host=True))
            if transport in ENCRYPTING:
                cells.append(plain._replace(keys=True))
    return cells


def _cell(row: Row, rounds: list[Round]) -> dict[str, Any]:
    """Of the document: figures, and those of raw TCP in the same layout and round that they are
    to be compared with."""
    cell = row.cell
    limit = Row(Cell(LIMIT, cell.states, cell.producers, cell.consumers), "live")
    figures = {name: [figure(one[row]) for one in rounds] for name, figure in FIGURES.items()}
    of_limit = {
        name: Spread.of(figure(one[row]) / figure(one[limit]) for one in rounds)._asdict()
        for name, figure in FIGURES.items()
        if limit in rounds[0]
    }
    return {
        **cell._asdict(),
        "what": row.what,
        "name": f"{cell.name}, stored" if row.what == "stored" else cell.name,
        "layout": cell.layout,
        **{name: Spread.of(values)._asdict() for name, values in figures.items()},
        "of_limit": of_limit,
        "rounds": [{**one[row]._asdict(), "stages": None} for one in rounds],
    }


def _line(one: Round) -> str:
    return ", ".join(
        f"{row.cell.name} {row.what} {FIGURES['cpu_seconds_per_gb'](passage):.2f}"
        for row, passage in one.items()
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="draftfeed beside other ways to move samples.")
    parser.add_argument("--rounds", type=int, default=5, help="of all cells")
    parser.add_argument("--matrix", action="store_true", help="every cell there is; two hours")
    every = (*PEERS, OURS)
    parser.add_argument("--only", nargs="+", choices=every, default=every, help="these transports")
    parser.add_argument("--states", nargs="+", choices=SETS, default=[*SETS], help="these sets")
    parser.add_argument("--dir", type=Path, help="where spools are made; default: TMPDIR")
    parser.add_argument("--quick", action="store_true", help="next to nothing, one round: a test")
    parser.add_argument("--corrupt", action="store_true", help="spoil a sample: it must be noticed")
    return options_of(parser, "transport.json")


if __name__ == "__main__":
    sys.exit(main())
