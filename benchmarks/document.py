"""Writes docs/benchmarks.md and its plots from benchmarks/results/.

    .venv/bin/python benchmarks/document.py

The page has what was measured last; nothing on it is written by hand.
"""

import argparse
import importlib
import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib import rc_context
from matplotlib.figure import Figure

from report import RESULTS
from rounds import Spread
from transport_report import FIGURES

DOCS = Path(__file__).parents[1] / "docs"
PAGE = "benchmarks.md"
PLOTS = "benchmarks-{}.svg"
HEAD = (
    "# Benchmarks\n\nWhat was measured last, beside what people would use instead. This page is "
    "written by `benchmarks/document.py` from `benchmarks/results/`; how each figure is taken, and "
    "what it does not tell, is in [benchmarks/README.md](../benchmarks/README.md). Medians of all "
    "rounds, in brackets the least and the most. Compare within a section: each is one run on one "
    "machine.\n"
)
OURS, LIMIT, OTHER = "#1f6fb2", "#222222", "#9a9a9a"


class Section(NamedTuple):
    result: str
    """File name, without its ending."""
    script: str
    title: str


SECTIONS = (
    Section("transport", "transport", "Moving samples, beside what people would use instead"),
    Section("link", "link", "On slow links"),
    Section("scale", "scale", "Many producers, many ranks"),
    Section("soak", "soak", "Hours, with a swap every few minutes"),
    Section("codec", "codec", "The codec, beside memcpy and other compressors"),
    Section("curve", "curve", "What keys cost"),
    Section("archive", "archive", "The archive, beside the drive"),
    Section("swap", "swap", "Generation while the training node is swapped"),
    Section("trainer-feed", "trainer_feed", "What a trainer waits for data"),
    Section("capture-cpu", "capture", "What capture costs SGLang's scheduler, on a CPU"),
)


class Page(NamedTuple):
    text: str
    plots: dict[str, str]
    """SVG, by file name."""


def page(results: Path) -> Page:
    """Of all results that are there."""
    parts, plots, missing = [HEAD], {}, []
    for section in SECTIONS:
        path = results / f"{section.result}.json"
        if not path.exists():
            missing.append(f"`benchmarks/{section.script}.py`")
            continue
        document = json.loads(path.read_text())
        parts.append(f"## {section.title}\n\n{_head(section, document)}")
        if section.result == "transport":
            plots = _plots(document)
            parts += _transport(document, plots)
        elif section.result == "codec":
            parts += _codec(document)
        else:
            parts += _plain(section, document)
    if missing:
        parts.append(f"## No document yet\n\n{', '.join(missing)}\n")
    return Page("\n".join(parts), plots)


def main() -> int:
    options = _options()
    made = page(options.results)
    files = {PAGE: made.text, **made.plots}
    there = {path.name for path in options.docs.glob(PLOTS.format("*"))}
    if options.check:
        return _check(options.docs, files, there)
    for name in there - files.keys():
        (options.docs / name).unlink()
    for name, text in files.items():
        (options.docs / name).write_text(text)
    print(f"written: {', '.join(files)}")
    return 0


def _check(docs: Path, files: dict[str, str], there: set[str]) -> int:
    """Whether that is what lies in docs/. Processors round the last digits of a plot's places
    differently."""
    wrong = sorted(there - files.keys())
    for name, text in files.items():
        path = docs / name
        if not path.exists() or _rounded(path.read_text()) != _rounded(text):
            wrong.append(name)
    if wrong:
        print(f"not what the results say: {', '.join(wrong)}; run benchmarks/document.py")
    return 1 if wrong else 0


def _rounded(text: str) -> str:
    return re.sub(r"\d+\.\d{4,}", lambda found: f"{float(found[0]):.2f}", text)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Writes docs/benchmarks.md.")
    parser.add_argument("--results", type=Path, default=RESULTS, help="documents to read")
    parser.add_argument("--docs", type=Path, default=DOCS, help="directory to write to")
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    return parser.parse_args()


def _head(section: Section, document: dict[str, Any]) -> str:
    machine, rounds = document["machine"], _rounds(document)
    counted = f"; {rounds} round{'s' if rounds > 1 else ''}" if rounds else ""
    return (
        f"`benchmarks/{section.script}.py`, on {machine['processor']}, {machine['cores']} cores, "
        f"load {machine['load']} before it; kernel {machine['kernel']}, Python "
        f"{machine['python']}{counted}.\n"
    )


def _rounds(document: dict[str, Any]) -> int:
    """How many there were; 0 where it does not say."""
    [first, *_] = document.get("sets", [{}])
    places = (document.get("setup", {}), document, first)
    found = next((place["rounds"] for place in places if "rounds" in place), 0)
    return found if isinstance(found, int) else len(found)


def _table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def _goals(goals: list[dict[str, Any]]) -> Iterator[str]:
    """A value that is no text is in the verdict, too."""
    if goals:
        rows = [
            [goal["what"], goal["value"] if isinstance(goal["value"], str) else "", goal["verdict"]]
            for goal in goals
        ]
        yield _table(["goal", "measured", ""], rows)


# transport


def _transport(document: dict[str, Any], plots: dict[str, str]) -> Iterator[str]:
    yield "Rounds are in turns. A GB is 10^9 bytes of states.\n"
    yield from _goals(document["goals"])
    for layout in _layouts(document):
        yield f"### {layout}\n"
        name = _plot_name(layout)
        if name in plots:
            yield f"![CPU seconds for each GB, {layout}]({name})\n"
        rows = [_transport_row(cell) for cell in document["cells"] if cell["layout"] == layout]
        header = ["", "GB/s", "of raw TCP", "GB per consumer CPU s", "of raw TCP"]
        yield _table([*header, "CPU s a GB", "of raw TCP"], rows)
    yield from _stages(document["stages"])
    yield "### How each is set\n"
    yield "".join(f"* **{name}**: {note}\n" for name, note in document["notes"].items())
    yield "".join(f"* not run: {name}: {why}\n" for name, why in document["not_run"].items())
    versions = ", ".join(f"{name} {version}" for name, version in document["versions"].items())
    yield f"Versions: {versions}.\n"


def _layouts(document: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(cell["layout"] for cell in document["cells"]))


def _transport_row(cell: dict[str, Any]) -> list[str]:
    row = [f"**{cell['name']}**" if cell["transport"] == "draftfeed" else cell["name"]]
    for figure in FIGURES:
        limit = cell["of_limit"].get(figure)
        row += [Spread(**cell[figure]).times(1, 2), f"{limit['median']:.2f}" if limit else ""]
    return row


def _stages(stages: dict[str, Any]) -> Iterator[str]:
    """One table for each cell: stages down, passages across."""
    for cell, whats in stages.items():
        yield f"### Where {cell}'s CPU time goes\n"
        yield "CPU seconds for each GB of states, medians of runs of their own.\n"
        names = dict.fromkeys(
            (role, stage) for roles in whats.values() for role in roles for stage in roles[role]
        )
        rows = [
            [f"{role}: {stage}", *(f"{roles[role].get(stage, 0):.3f}" for roles in whats.values())]
            for role, stage in names
        ]
        sums = (sum(sum(one.values()) for one in roles.values()) for roles in whats.values())
        rows.append(["all", *(f"{total:.3f}" for total in sums)])
        yield _table(["", *whats], rows)


def _plot_name(layout: str) -> str:
    return PLOTS.format(re.sub(r"[^a-z0-9]+", "-", layout))


def _plots(document: dict[str, Any]) -> dict[str, str]:
    """One for each layout in which there is something to compare."""
    found = {}
    for layout in _layouts(document):
        cells = [cell for cell in document["cells"] if cell["layout"] == layout]
        if len(cells) > 1:
            found[_plot_name(layout)] = _bars(cells, layout)
    return found


def _bars(cells: list[dict[str, Any]], layout: str) -> str:
    """CPU seconds a GB, the cheapest on top; lines from the least to the most."""
    cells = sorted(cells, key=lambda cell: -cell["cpu_seconds_per_gb"]["median"])
    spreads = [Spread(**cell["cpu_seconds_per_gb"]) for cell in cells]
    colours = {"draftfeed": OURS, "tcp": LIMIT}
    figure = Figure(figsize=(7.5, 0.6 + 0.32 * len(cells)), layout="constrained")
    axes = figure.subplots()
    axes.barh(
        [cell["name"] for cell in cells],
        [spread.median for spread in spreads],
        color=[colours.get(cell["transport"], OTHER) for cell in cells],
        xerr=[
            [spread.median - spread.least for spread in spreads],
            [spread.most - spread.median for spread in spreads],
        ],
        error_kw={"linewidth": 0.8, "ecolor": "#555555"},
        height=0.62,
    )
    axes.set_xlabel(f"CPU seconds of both ends for each GB of states ({layout})")
    axes.spines[["top", "right"]].set_visible(False)
    return _svg(figure, layout)


def _svg(figure: Figure, salt: str) -> str:
    text = io.StringIO()
    anonymous = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        figure.savefig(text, format="svg", metadata=anonymous)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


# others


def _codec(document: dict[str, Any]) -> Iterator[str]:
    yield from _goals(document["goals"])
    for data in document["sets"]:
        yield f"### {data['name']}\n\n{data['note']}.\n"
        header = ["", *(f"ratio, {text}" for text in data["chunks"])]
        header += ["encode GB/s", "of memcpy", "decode GB/s", "of memcpy"]
        rows = [
            [
                name,
                *(f"{ratio:.3f}" for ratio in coder["ratio"].values()),
                *(
                    Spread(**coder[figure]).times(1, 2)
                    for figure in ("encode", "encode_memcpy", "decode", "decode_memcpy")
                ),
            ]
            for name, coder in data["coders"].items()
        ]
        yield _table(header, rows)


def _plain(section: Section, document: dict[str, Any]) -> Iterator[str]:
    """In the script's own words where it has `words` for a document, else every spread in it."""
    yield from _goals(document.get("goals", []))
    words = getattr(importlib.import_module(section.script), "words", None)
    if words is not None:
        text = "\n".join(words(document)).strip("\n")
        yield f"```text\n{text}\n```\n"
        return
    rows = [[name, f"{value.times(1, 3)}"] for name, value in _spreads(document, "")]
    yield _table(["", "median (least to most)"], rows)


def _spreads(node: Any, name: str) -> Iterator[tuple[str, Spread]]:
    """Those of a document, under what leads to them."""
    if not isinstance(node, dict):
        return
    if set(Spread._fields) <= node.keys():
        yield name, Spread(*(node[field] for field in Spread._fields))
        return
    for key, value in node.items():
        words = key.replace("_", " ")
        yield from _spreads(value, words if name in ("", "summary") else f"{name}, {words}")


if __name__ == "__main__":
    sys.exit(main())
