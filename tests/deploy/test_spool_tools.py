"""`draftfeed spool`, `shards` and `trace`: what they print of real spools, and how they end."""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest
from rich.console import Console

from archive_helpers import archive_samples, archiving, opened, segments
from draftfeed_deploy import exits, spool_tools
from draftfeed_producer.spool import Spool, SpoolConfig
from draftfeed_producer.spool.control import Term
from draftfeed_producer.spool.reader import Reader
from draftfeed_proto.ids import IdSet, SampleId, Shards
from samples import DATASET, DESCRIPTOR, sample

SHARDS = Shards(DATASET, 0, (0, 10))


class Ended(NamedTuple):
    code: int
    out: str
    error: str


def draftfeed(capsys: pytest.CaptureFixture[str], *arguments: object) -> Ended:
    """The command, with errors ended as `draftfeed` ends them."""
    parser = argparse.ArgumentParser()
    spool_tools.add_commands(parser.add_subparsers(required=True))
    parsed = parser.parse_args([str(argument) for argument in arguments])
    try:
        code, line = parsed.command(parsed, Console(stderr=True)), ""
    except ValueError as error:
        known = exits.code_of(error)
        if known is None:
            raise
        code, line = known, str(error)
    return Ended(code, capsys.readouterr().out, line)


def make_spool(directory: Path, count: int = 5, **options: object) -> Spool:
    config = SpoolConfig(dir=directory, audit=True, **options)  # type: ignore[arg-type]
    spool = Spool(config, DESCRIPTOR, SHARDS)
    for ordinal in range(count):
        spool.append(sample(ordinal))
    return spool


def flip(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def test_inspect_tells_what_a_running_producer_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spool = make_spool(tmp_path)
    spool.grant(Term(3, "run-a", "i", 2))
    spool.tombstone(sample(1).id, "rejected", "too short")
    spool.commit(7, IdSet([sample(0).id]), term=3)
    ended = draftfeed(capsys, "spool", "inspect", tmp_path)
    assert ended.code == 0
    assert "3 deliverable, 1 committed, 1 with a tombstone" in ended.out
    assert "3 of group 'run-a', 2 members" in ended.out
    assert "commit       7 of term 3: 1 samples" in ended.out
    facts = json.loads(draftfeed(capsys, "spool", "inspect", tmp_path, "--json").out)
    assert (facts["samples"], facts["deliverable"]) == (5, 3)
    assert facts["tombstones"] == {"rejected": 1}
    assert facts["bytes"] == spool.statistics().bytes
    spool.close()


def test_no_tool_changes_a_byte_of_the_spool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_spool(tmp_path / "spool").close()
    segment = tmp_path / "spool" / "00000001.seg"
    os.truncate(segment, segment.stat().st_size - 100)  # a torn tail, which a producer would cut
    before = content(tmp_path / "spool")
    for command in (["inspect"], ["verify"]):
        assert draftfeed(capsys, "spool", *command, tmp_path / "spool").code == 0
    assert draftfeed(capsys, "spool", "export", tmp_path / "spool", tmp_path / "out").code == 0
    assert draftfeed(capsys, "trace", tmp_path / "spool", "key-0").code == 0
    assert draftfeed(capsys, "shards", "show", tmp_path / "spool").code == 0
    assert content(tmp_path / "spool") == before


def test_verify_names_the_sample_with_a_flipped_byte_and_exits_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spool = make_spool(tmp_path)
    records = list(spool.deliverable())
    spool.close()
    assert "ok: 5 samples decode, 5 of them" in draftfeed(capsys, "spool", "verify", tmp_path).out
    flip(tmp_path / "00000001.seg", records[2].chunks[1][0] + 99)
    ended = draftfeed(capsys, "spool", "verify", tmp_path)
    assert ended.code == 1
    assert f"{sample(2).id}, key 'key-2'" in ended.out
    assert "DAMAGED: 4 samples decode" in ended.out


def test_verify_finds_a_sample_whose_header_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spool = make_spool(tmp_path)
    records = list(spool.deliverable())
    spool.close()
    offset, size = records[1].chunks[-1]
    flip(tmp_path / "00000001.seg", offset + size + 40)  # in the header that closes the record
    ended = draftfeed(capsys, "spool", "verify", tmp_path)
    assert ended.code == 1
    assert "a sample without a name: segment 1" in ended.out
    assert "4 samples decode" in ended.out


def test_verify_knows_what_the_producer_makes_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spool = make_spool(tmp_path)
    (record,) = (r for r in spool.deliverable() if r.header.id == sample(2).id)
    flip(tmp_path / "00000001.seg", record.chunks[1][0] + 99)
    assert not spool.whole(sample(2).id)
    spool.void(sample(2).id, "checksum")
    spool.append(sample(2))
    ended = draftfeed(capsys, "spool", "verify", tmp_path)
    assert ended.code == 0
    assert "5 samples decode" in ended.out
    assert "1 known to be damaged" in ended.out
    spool.close()


def test_verify_of_a_damaged_control_log_exits_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_spool(tmp_path).close()
    log = tmp_path / "control.log"
    flip(log, 40)
    with log.open("r+b") as file:  # a whole record behind the damage
        whole = content(tmp_path)["control.log"].rstrip(b"\0")
        file.seek(len(whole))
        make_spool(tmp_path / "other").close()
        file.write(content(tmp_path / "other")["control.log"].rstrip(b"\0"))
    ended = draftfeed(capsys, "spool", "verify", tmp_path)
    assert ended.code == 1
    assert "DAMAGED" in ended.out


def test_exported_samples_are_those_that_were_captured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_spool(tmp_path / "spool").close()
    ended = draftfeed(capsys, "spool", "export", tmp_path / "spool", tmp_path / "out")
    assert (ended.code, ended.out) == (0, f"5 samples in {tmp_path / 'out'}\n")
    lines = (tmp_path / "out" / "samples.jsonl").read_text().splitlines()
    for ordinal, line in enumerate(map(json.loads, lines)):
        made = sample(ordinal)
        assert SampleId.parse(line["id"]) == made.id
        assert (line["key"], line["sampling"]) == (made.key, made.sampling)
        assert line["counters"][0].keys() == {"saturated", "nonfinite", "inexact", "zero_rows"}
        with np.load(tmp_path / "out" / line["file"]) as tensors:
            again = msgspec.structs.replace(made, **dict(tensors))
        assert again.digest() == made.digest()


def test_a_final_state_is_told_from_the_tapped_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has their shape, and is the last of them."""
    stream = msgspec.structs.replace(DESCRIPTOR, layer_ids=(1, 4), final="postnorm")
    spool = Spool(SpoolConfig(dir=tmp_path / "spool", audit=True), stream, SHARDS)
    spool.append(sample(0))
    spool.close()
    ended = draftfeed(capsys, "spool", "inspect", tmp_path / "spool")
    assert ended.code == 0
    assert ": tiny, layers 1,4 and final state postnorm, hidden 64, fp16" in ended.out
    facts = json.loads(draftfeed(capsys, "spool", "inspect", tmp_path / "spool", "--json").out)
    assert (facts["layer_ids"], facts["final"]) == ([1, 4], "postnorm")
    assert draftfeed(capsys, "spool", "verify", tmp_path / "spool").code == 0
    assert draftfeed(capsys, "spool", "export", tmp_path / "spool", tmp_path / "out").code == 0
    line = json.loads((tmp_path / "out" / "samples.jsonl").read_text())
    assert line["layer_names"] == ["1", "4", "postnorm"]
    with np.load(tmp_path / "out" / line["file"]) as tensors:
        assert tensors["hidden_states"].shape[1] == len(line["layer_names"])


def test_export_of_some_by_id_or_key_and_never_into_a_directory_that_has_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spool, out = tmp_path / "spool", tmp_path / "out"
    make_spool(spool).close()
    ended = draftfeed(capsys, "spool", "export", spool, out, "--ids", sample(3).id, "key-1")
    assert (ended.code, len(list(out.glob("*.npz")))) == (0, 2)
    ended = draftfeed(capsys, "spool", "export", spool, out)
    assert ended.code == 2
    assert "it is not empty" in ended.error
    ended = draftfeed(capsys, "spool", "export", spool, tmp_path / "new", "--ids", "nobody")
    assert ended.code == 2
    assert "'nobody': no stored sample has this id or key" in ended.error
    assert not (tmp_path / "new").exists()


def test_export_leaves_out_what_is_damaged_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spool = make_spool(tmp_path / "spool")
    records = list(spool.deliverable())
    spool.close()
    flip(tmp_path / "spool" / "00000001.seg", records[2].chunks[1][0] + 99)
    ended = draftfeed(capsys, "spool", "export", tmp_path / "spool", tmp_path / "out")
    assert ended.code == 1
    assert f"damaged, left out: {sample(2).id}" in ended.out
    assert "4 samples" in ended.out


def test_trace_tells_a_samples_story_in_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spool = make_spool(tmp_path)
    spool.void(sample(2).id, "checksum 1 instead of 2")
    spool.append(sample(2))
    spool.suspect({sample(2).id: 2})
    spool.commit(4, IdSet([sample(1).id]), term=1)
    spool.commit(5, IdSet([sample(1).id, sample(2).id]), term=2)
    ended = draftfeed(capsys, "trace", tmp_path, "key-2")
    words = [line.split(" ")[0] for line in ended.out.splitlines() if not line.startswith(" ")]
    story = ["sample", "stored", "void", "stored", "again", "suspect", "committed", "now"]
    assert words == story, ended.out
    assert f"digest {sample(2).digest()}" in ended.out
    assert "first in commit 5 of term 2; the log still has 4 to 5" in ended.out
    assert "committed, its record is kept" in ended.out
    by_id = draftfeed(capsys, "trace", tmp_path, sample(2).id)
    assert by_id.out == ended.out
    spool.close()


def test_trace_of_a_rejected_sample_says_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spool = make_spool(tmp_path)
    spool.tombstone(sample(1).id, "rejected", "saturated values in layer 4")
    spool.close()
    out = draftfeed(capsys, "trace", tmp_path, "key-1").out
    assert "tombstone  rejected: saturated values in layer 4" in out


def test_trace_of_a_freed_sample_goes_by_id_and_says_that_its_key_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spool = make_spool(tmp_path, segment_bytes=1, keep_checkpoints=1)
    spool.commit(1, IdSet(sample(k).id for k in range(4)), term=1)
    spool.close()
    out = draftfeed(capsys, "trace", tmp_path, sample(0).id).out
    assert "committed, freed: its key and its tensors are gone" in out
    ended = draftfeed(capsys, "trace", tmp_path, "key-0")
    assert ended.code == 2
    assert "The key of a sample that was freed" in ended.error
    assert f"{DATASET}/0/0/0" in ended.error


def test_trace_of_a_freed_sample_finds_it_in_the_archive(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was called gone."""
    root, spool = tmp_path / "archive", tmp_path / "spool"
    with opened(root) as archive:
        archive_samples(spool, archive, range(3))
    alone = draftfeed(capsys, "trace", spool, sample(1).id).out
    assert "unless they were archived (--archive ROOT)" in alone
    for name in (sample(1).id, "key-1"):
        out = draftfeed(capsys, "trace", spool, name, "--archive", root).out
        assert f"sample     {sample(1).id}, key 'key-1'" in out
        assert f"archived   {root}/" in out
        assert f"digest {sample(1).digest()}" in out
        assert "now        committed, freed here, and archived" in out
    later = draftfeed(capsys, "trace", spool, sample(1).id.in_epoch(2), "--archive", root).out
    assert "now        in the archive: to be served from there" in later
    missing = draftfeed(capsys, "trace", spool, sample(9).id.in_epoch(2), "--archive", root).out
    assert "now        not generated yet" in missing
    unknown = draftfeed(capsys, "trace", spool, "key-9", "--archive", root)
    assert (unknown.code, "no stored or archived sample has this key" in unknown.error) == (2, True)
    for segment in segments(root):
        segment.unlink()
    gone = draftfeed(capsys, "trace", spool, sample(1).id, "--archive", root).out
    assert "this is all that is known" in gone


def test_trace_of_a_later_epoch_whose_line_is_still_in_the_spool(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with opened(tmp_path / "a") as archive, archiving(tmp_path / "spool", archive) as spool:
        spool.append(sample(0))
        command = ("trace", tmp_path / "spool", sample(0).id.in_epoch(1))
        out = draftfeed(capsys, *command, "--archive", tmp_path / "a").out
        assert "now        in the spool under another epoch's id" in out


def test_trace_of_samples_that_are_not_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_spool(tmp_path, shards="0-4").close()
    assert "not generated yet" in draftfeed(capsys, "trace", tmp_path, f"{DATASET}/0/1/17").out
    assert "does not own" in draftfeed(capsys, "trace", tmp_path, f"{DATASET}/0/7/112").out
    other = draftfeed(capsys, "trace", tmp_path, "fedcba9876543210/0/1/17")
    assert other.code == 2
    assert "is not of this spool's prompts" in other.error


@pytest.mark.parametrize(
    "command",
    [["spool", "inspect"], ["spool", "verify"], ["shards", "show"]],
)
def test_directory_that_is_no_spool_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    ended = draftfeed(capsys, *command, tmp_path)
    assert ended.code == 2
    assert f"{tmp_path} is not a spool" in ended.error
    assert list(tmp_path.iterdir()) == []


def test_shards_move_from_one_spool_to_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    make_spool(one, shards="0-4").close()
    make_spool(two, count=0, shards="5-9").close()
    assert draftfeed(capsys, "shards", "give", one, "3-4").out == f"{one} owns shards 0-2\n"
    assert draftfeed(capsys, "shards", "take", two, "3-4").out == f"{two} owns shards 3-9\n"
    ended = draftfeed(capsys, "shards", "show", one, two)
    assert ended.code == 0
    assert f"{one}: owns shards 0-2 of 0-9" in ended.out
    make_spool(one, count=0, shards="0-4").close()  # configured as when it was made
    spool = make_spool(two, count=0, shards="5-9")
    assert spool.shards.ranges == (3, 10)
    assert spool.lost.ranges == ()
    spool.close()


def test_two_spools_that_own_one_shard_are_shown_with_exit_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    make_spool(one, count=0, shards="0-4").close()
    make_spool(two, count=0, shards="4-9").close()
    ended = draftfeed(capsys, "shards", "show", one, two)
    assert ended.code == 2
    assert f"{one} and {two} both own 4" in ended.out


def test_begun_shards_stay_where_their_samples_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spool = make_spool(tmp_path)
    spool.tombstone(SampleId(DATASET, 0, 3, 50), "rejected", "x")
    spool.commit(1, IdSet([SampleId(DATASET, 0, 5, 80)]), term=1)
    spool.close()
    for shard in ("0-1", "3", "2-5"):
        ended = draftfeed(capsys, "shards", "give", tmp_path, shard)
        assert ended.code == 2
    assert "shard 3,5 is begun" in ended.error
    assert "begun 0,3,5" in draftfeed(capsys, "shards", "show", tmp_path).out
    assert draftfeed(capsys, "shards", "give", tmp_path, "1-2").code == 0


def test_shards_that_cannot_be_moved_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spool = make_spool(tmp_path, count=0, shards="0-4")
    for action in ("give", "take"):
        ended = draftfeed(capsys, "shards", action, tmp_path, "3")
        assert ended.code == 2
        assert "stop it first" in ended.error
    spool.close()
    for action, ranges, words in (
        ("give", "7", "does not own shards 7; it has 0-4"),
        ("take", "8-12", "the prompt file has shards 0-9, not 10-12"),
        ("take", "4-5", "has shards 4 already"),
        ("take", "5-", "'5-' is not a number or a range"),
    ):
        ended = draftfeed(capsys, "shards", action, tmp_path, ranges)
        assert ended.code == 2
        assert words in ended.error


def test_tools_start_without_torch() -> None:
    """An operator's look at a spool must not take the seconds that importing a trainer does."""
    program = (
        "import sys, draftfeed_deploy.spool_tools, draftfeed_deploy.spool_facts, "
        "draftfeed_deploy.spool_contents, draftfeed_producer.spool.shards; "
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_reader_of_a_spool_without_a_control_log_sees_an_empty_one(tmp_path: Path) -> None:
    make_spool(tmp_path, count=0, shards="2-3").close()
    (tmp_path / "control.log").unlink()
    assert Reader(tmp_path).shards.ranges == (2, 4)
