"""`draftfeed bench codec`: what it measures is what the spool holds, and decodes to it."""

import json
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console

from draftfeed_deploy import bench_codec, bench_spool
from draftfeed_deploy.bench_codec import Comparison, Encoded, Memcpy, own_coders, speed_of
from draftfeed_deploy.cli import main
from draftfeed_deploy.errors import NotLossless
from draftfeed_producer.spool import Spool, SpoolConfig
from draftfeed_producer.spool.reader import Reader
from draftfeed_proto.codecs import packed
from draftfeed_proto.ids import Shards
from draftfeed_proto.sample import Sample
from samples import DATASET, DESCRIPTOR, sample

SHARDS = Shards(DATASET, 0, (0, 10))
IMPLEMENTATIONS = list(packed.available().implementations)


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long they are is for the figures, which no test looks at."""
    monkeypatch.setattr(bench_codec, "MEMORY_BYTES", 1)
    monkeypatch.setattr(bench_spool, "ROUNDS", 3)


def make_spool(directory: Path, count: int = 3, dtype: str = "fp16", **options: object) -> Spool:
    descriptor = msgspec.structs.replace(DESCRIPTOR, dtype=dtype)
    config = SpoolConfig(dir=directory, **options)  # type: ignore[arg-type]
    spool = Spool(config, descriptor, SHARDS)
    for ordinal in range(count):
        spool.append(states_as(sample(ordinal, rows=60), dtype))
    return spool


def states_as(made: Sample, dtype: str) -> Sample:
    if dtype == "fp16":
        return made
    wide = made.hidden_states.astype(np.float32).view(np.uint32)
    return msgspec.structs.replace(made, hidden_states=(wide >> 16).astype(np.uint16))


def result_of(capsys: pytest.CaptureFixture[str], spool: Path) -> dict:
    assert main(["bench", "codec", "--from", str(spool), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def fails(capsys: pytest.CaptureFixture[str], spool: Path, code: int = 2) -> str:
    assert main(["bench", "codec", "--from", str(spool)]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = [line for line in captured.err.splitlines() if line.startswith("draftfeed: ")]
    return line


def chunk(seed: int = 0, rows: int = 30) -> np.ndarray:
    return sample(seed, rows).hidden_states


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_every_codec_is_measured_on_the_states_of_a_running_producers_spool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], dtype: str
) -> None:
    spool = make_spool(tmp_path, dtype=dtype)
    result = result_of(capsys, tmp_path)
    spool.close()
    names = ["memcpy", "raw", "zstd", *(f"packed {name}" for name in IMPLEMENTATIONS)]
    assert list(result["sizes"]) == names
    assert (result["samples"], result["descriptor"]["dtype"]) == (3, dtype)
    assert result["states_bytes"] == 3 * 60 * DESCRIPTOR.row_bytes()
    packed_bytes = {
        tuple(result["sizes"][f"packed {name}"]["encoded_bytes"]) for name in IMPLEMENTATIONS
    }
    assert len(packed_bytes) == 1, "implementations that write the same bytes"
    assert [list(turns) for turns in result["rounds"]] == [names] * 3
    assert all(rates["decode"] > 0 for turns in result["rounds"] for rates in turns.values())


def test_the_table_has_a_line_for_each_codec_and_marks_the_implementation_in_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_spool(tmp_path).close()
    assert main(["bench", "codec", "--from", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("tiny, 3 layers, hidden 64, fp16")
    assert "0.1 MB in 3 chunks of 3 samples; as stored ratio 1." in lines[1]
    table = [line for line in lines if re.match(r"(memcpy|raw|zstd|packed)", line)]
    assert len(table) == 3 + len(IMPLEMENTATIONS)
    assert [line.split()[1] for line in table if " * " in line] == IMPLEMENTATIONS[:1]
    absent = [name for name in packed.NAMES if name not in IMPLEMENTATIONS]
    assert any(line.startswith("not run: packed") for line in lines) == bool(absent)


def test_states_are_read_as_they_were_captured(tmp_path: Path) -> None:
    make_spool(tmp_path, chunk_bytes=20 * DESCRIPTOR.row_bytes()).close()
    taken = bench_spool.take(Reader(tmp_path))
    assert len(taken.chunks) == 9
    for ordinal in range(3):
        rows = [chunk.states for chunk in taken.chunks[3 * ordinal : 3 * ordinal + 3]]
        assert np.array_equal(np.concatenate(rows), sample(ordinal, 60).hidden_states)


def test_no_more_is_read_than_the_limit_and_of_a_long_sample_only_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples may be gigabytes, and spools terabytes."""
    row_bytes = DESCRIPTOR.row_bytes()
    make_spool(tmp_path, count=5, chunk_bytes=10 * row_bytes).close()
    assert len(bench_spool.take(Reader(tmp_path)).chunks) == 5 * bench_spool.CHUNKS_OF_A_SAMPLE
    monkeypatch.setattr(bench_spool, "MAX_BYTES", 100 * row_bytes)
    taken = bench_spool.take(Reader(tmp_path))
    assert (len(taken.chunks), taken.samples) == (10, 3)
    monkeypatch.setattr(bench_spool, "MAX_BYTES", 1)
    assert len(bench_spool.take(Reader(tmp_path)).chunks) == 1


@pytest.mark.parametrize("byte", [23, 99], ids=["header", "payload"])
def test_a_damaged_chunk_is_left_out(
    byte: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spool = make_spool(tmp_path)
    offset, _ = next(iter(spool.deliverable())).chunks[1]
    spool.close()
    with (tmp_path / "00000001.seg").open("r+b") as file:
        file.seek(offset + byte)
        file.write(b"damaged")
    result = result_of(capsys, tmp_path)
    assert (result["samples"], len(result["sizes"]["raw"]["encoded_bytes"])) == (2, 2)


def test_a_segment_that_its_producer_deletes_meanwhile_is_passed_over(tmp_path: Path) -> None:
    make_spool(tmp_path, segment_bytes=1).close()
    reader = Reader(tmp_path)
    records = list(reader.records())
    (tmp_path / "00000002.seg").unlink()
    assert reader.frame(records[1], 1) is None
    assert reader.frame(records[0], 1) is not None
    assert bench_spool.take(reader).samples == 2


@pytest.mark.parametrize("there", [True, False])
def test_a_directory_that_is_no_spool_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], there: bool
) -> None:
    directory = tmp_path if there else tmp_path / "nowhere"
    assert f"{directory} is not a spool" in fails(capsys, directory)


def test_a_spool_without_samples_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_spool(tmp_path, count=0).close()
    line = fails(capsys, tmp_path)
    assert f"{tmp_path} has no samples" in line
    assert "let its producer make a few first" in line


def test_a_forced_implementation_that_is_not_here_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_spool(tmp_path).close()
    monkeypatch.setattr(bench_spool.codecs, "PACKED", packed.Packed())
    monkeypatch.setenv(packed.VARIABLE, "sse9")
    assert "DRAFTFEED_CODEC_ISA is 'sse9', which is unknown" in fails(capsys, tmp_path)


class Forgetful(Memcpy):
    """Loses a bit when it decodes for the second time."""

    name = "forgetful"
    times = 0

    def decode(self, encoded: Encoded, out: np.ndarray) -> np.ndarray:
        super().decode(encoded, out)
        self.times += 1
        out.view(np.uint16)[-1, -1, -1] ^= self.times > 1
        return out


class Spoiling(Memcpy):
    """Overwrites what it was given to encode."""

    name = "spoiling"

    def encode(self, values: np.ndarray, out: memoryview) -> Encoded:
        encoded = super().encode(values, out)
        values.view(np.uint16)[0, 0, 0] ^= 1
        return encoded


@pytest.mark.parametrize("coder", [Forgetful(), Spoiling()], ids=lambda coder: coder.name)
def test_no_speed_is_told_of_a_coder_that_loses_something(coder: Memcpy) -> None:
    with pytest.raises(NotLossless, match=coder.name):
        Comparison([Memcpy(), coder], [chunk()])


def test_chunks_that_nothing_shrinks_are_left_to_raw_and_do_not_grow() -> None:
    noise = np.random.default_rng(0).integers(0, 1 << 16, (100, 3, 64), np.uint16)
    comparison = Comparison(own_coders(), [noise])
    for name, sizes in comparison.sizes.items():
        assert sizes.encoded_bytes == [noise.nbytes]
        left = "" if name in ("memcpy", "raw") else "raw 1 of 1"
        assert sizes.left_to_others(name) == left


def test_each_coder_is_first_in_its_turn_and_progress_is_told_of_each() -> None:
    order: list[str] = []

    class Noting(Memcpy):
        def __init__(self, name: str) -> None:
            self.name = name

        def encode(self, values: np.ndarray, out: memoryview) -> Encoded:
            order.append(self.name)
            return super().encode(values, out)

    comparison = Comparison([Noting("a"), Noting("b"), Noting("c")], [chunk()])
    order.clear()
    told: list[None] = []
    rounds = list(comparison.rounds(4, lambda: told.append(None)))
    assert "".join(order) == "abcbcacababc"
    assert len(told) == 12
    assert [list(turns) for turns in rounds] == [["a", "b", "c"]] * 4


def test_ratios_to_memcpy_are_those_of_the_same_round() -> None:
    rates = bench_codec.Rates
    rounds = [
        {"memcpy": rates(10, 10), "x": rates(5, 1)},
        {"memcpy": rates(2, 20), "x": rates(4, 2)},
        {"memcpy": rates(1, 30), "x": rates(1, 3)},
    ]
    speed = speed_of("x", rounds)
    assert speed.encode == (4, 1, 5)
    assert speed.encode_memcpy == (1, 0.5, 2)
    assert speed.decode_memcpy == pytest.approx((0.1, 0.1, 0.1))


def test_nothing_of_the_spool_is_changed(tmp_path: Path) -> None:
    make_spool(tmp_path).close()
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    bench_spool.measure(tmp_path, Console(stderr=True))
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
