"""How small and how fast is `packed`, next to copying the bytes and to other compressors?

    .venv/bin/python benchmarks/codec.py

README.md beside this file says what is measured and how.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import zstandard

import codec_peers
from codec_states import DataSet, data_sets
from draftfeed_deploy.bench_codec import (
    SPEED_HEADER,
    Comparison,
    Round,
    Sizes,
    Speed,
    own_coders,
    speed_of,
)
from draftfeed_producer.target import Target, TargetConfig, load_target
from draftfeed_proto.codecs import packed
from draftfeed_proto.sample import DEFAULT_CHUNK_BYTES
from report import leave, options_of, say
from this_machine import this_machine

CPU_FLAGS = ("avx2", "bmi2", "avx512f", "avx512bw", "avx512vl", "avx512vbmi", "avx512_vbmi2")
"""What the implementations of `packed` ask for."""
FROM_BF16 = ("fp16 from bf16", "bf16")
"""The sets that the goals are about: real states that were bf16."""


class Goal(NamedTuple):
    coder: str
    figure: str
    """ratio, of the text that it is worse for, or the median of a field of Speed."""
    least: float


FIGURES = {
    "ratio": "ratio",
    "encode_memcpy": "encode, x memcpy",
    "decode_memcpy": "decode, x memcpy",
    "decode": "decode, GB/s",
}
GOALS = (
    *(Goal(f"packed {name}", "ratio", 1.44) for name in packed.NAMES),
    Goal("packed avx512", "encode_memcpy", 0.5),
    Goal("packed avx512", "decode_memcpy", 0.65),
    Goal("packed avx2", "encode_memcpy", 0.4),
    Goal("packed avx2", "decode_memcpy", 0.4),
    Goal("packed c", "decode", 1.0),
    Goal("packed numpy", "decode", 0.5),
)


class Measured(NamedTuple):
    data: DataSet
    sizes: dict[str, Sizes]
    rounds: list[Round]

    def ratios(self, coder: str) -> dict[str, float]:
        """By text."""
        sizes = iter(self.sizes[coder].encoded_bytes)
        return {
            text: sum(chunk.nbytes for chunk in chunks) / sum(next(sizes) for _ in chunks)
            for text, chunks in self.data.chunks.items()
        }

    def speed(self, coder: str) -> Speed:
        return speed_of(coder, self.rounds)


def main() -> int:
    options = _options()
    tell = partial(say, options)
    machine = this_machine() | {"flags": _cpu_flags()}
    tell(f"{machine['processor']}, load {machine['load']} before")
    missing = codec_peers.missing()
    not_run = missing | _not_run_of_ours()
    for name, reason in not_run.items():
        tell(f"not run: {name}: {reason}")
    if missing:
        tell("for them: .venv/bin/pip install -c constraints.txt -e '.[bench]'")
    target = _target(options)
    sets = list(data_sets(target, options.layers, options.chunks, tell))
    _one_core()
    measured = []
    for data in sets:
        measured.append(_measure(data, missing, options.rounds))
        tell("\n".join(_table(measured[-1])))
    result = {
        "machine": machine,
        "versions": _versions(missing),
        "target": target.name,
        "chunk_bytes": DEFAULT_CHUNK_BYTES,
        "not_run": not_run,
        "notes": codec_peers.NOTES,
        "goals": _goals(measured),
        "sets": [_document(item) for item in measured],
    }
    tell("\n".join(["", *_words(result)]))
    leave(options, result)
    return 0


def _not_run_of_ours() -> dict[str, str]:
    here = packed.available()
    absent = [name for name in packed.NAMES if name not in here.implementations]
    return {f"packed {name}": here.lacking or "not on this processor" for name in absent}


def _measure(data: DataSet, missing: dict[str, str], rounds: int) -> Measured:
    coders = [*own_coders(), *codec_peers.peers(data.bf16, missing)]
    chunks = [chunk for text in data.chunks.values() for chunk in text]
    comparison = Comparison(coders, chunks)
    return Measured(data, comparison.sizes, list(comparison.rounds(rounds)))


def _table(measured: Measured) -> list[str]:
    data = measured.data
    chunks = sum(map(len, data.chunks.values()))
    title = f"{data.name}: {data.note}; {chunks} chunks; medians of {len(measured.rounds)} rounds"
    lines = [
        "",
        title,
        f"{'':14}{''.join(f'{text:>9}' for text in data.chunks)}{SPEED_HEADER}".rstrip(),
    ]
    for name, sizes in measured.sizes.items():
        ratios = "".join(f"{ratio:9.3f}" for ratio in measured.ratios(name).values())
        lines.append(
            f"{name:14}{ratios}{measured.speed(name)}  {sizes.left_to_others(name)}".rstrip()
        )
    return lines


def _goals(measured: Sequence[Measured]) -> list[dict[str, Any]]:
    by_name = {item.data.name: item for item in measured}
    return [_judged(goal, by_name[name]) for goal in GOALS for name in FROM_BF16]


def _judged(goal: Goal, measured: Measured) -> dict[str, Any]:
    what = f"{goal.coder}, {measured.data.name}: {FIGURES[goal.figure]} >= {goal.least}"
    if goal.coder not in measured.sizes:
        return {"what": what, "value": None, "verdict": "not run here"}
    if goal.figure == "ratio":
        value = min(measured.ratios(goal.coder).values())
    else:
        value = getattr(measured.speed(goal.coder), goal.figure).median
    verdict = "holds" if value >= goal.least else "MISSED"
    return {"what": what, "value": value, "verdict": f"{value:.3f} {verdict}"}


def _words(result: dict[str, Any]) -> Iterator[str]:
    for name, note in result["notes"].items():
        yield f"{name + ':':8}{note}"
    for goal in result["goals"]:
        yield f"goal:   {goal['what']}: {goal['verdict']}"


def _document(measured: Measured) -> dict[str, Any]:
    data = measured.data
    (first, *_), *_ = data.chunks.values()
    return {
        "name": data.name,
        "note": data.note,
        "chunks": {text: len(chunks) for text, chunks in data.chunks.items()},
        "rows_layers_hidden": first.shape,
        "coders": {
            name: {
                "ratio": measured.ratios(name),
                "codecs": sizes.codecs,
                **{key: value._asdict() for key, value in measured.speed(name)._asdict().items()},
            }
            for name, sizes in measured.sizes.items()
        },
        "rounds": msgspec.to_builtins(measured.rounds),
    }


def _target(options: argparse.Namespace) -> Target:
    path = options.target
    if path is None:
        from draftfeed_deploy import smollm2

        path = smollm2.prepare()
    return load_target(TargetConfig(path=str(path)))


def _ids(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _one_core() -> None:
    """Whatever a library starts, it has one core in all."""
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def _cpu_flags() -> list[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    found = {flag for line in lines if line.startswith("flags") for flag in line.split()}
    return [flag for flag in CPU_FLAGS if flag in found]


def _versions(missing: dict[str, str]) -> dict[str, str]:
    import torch
    import transformers

    return {
        "numpy": np.__version__,
        "zstd": ".".join(map(str, zstandard.ZSTD_VERSION)),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        **codec_peers.versions(missing),
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="How small and how fast is the codec?")
    parser.add_argument("--rounds", type=int, default=20, help="of all coders")
    parser.add_argument("--chunks", type=int, default=2, help="4 MiB each, of each text")
    parser.add_argument("--target", help="model directory; by default SmolLM2-135M")
    parser.add_argument("--layers", type=_ids, help="ids to take; by default five of them")
    return options_of(parser, "codec.json")


if __name__ == "__main__":
    sys.exit(main())
