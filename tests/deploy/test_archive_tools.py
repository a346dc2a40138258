"""`draftfeed archive` and `draftfeed replay`: what they say of real archives, and how they end."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from archive_helpers import archive_samples, archiving, opened, read, segments
from draftfeed_deploy.cli import main
from draftfeed_proto.ids import SampleId
from samples import sample

COUNT = 5


class Ended(NamedTuple):
    code: int
    out: str
    error: str


Draftfeed = Callable[..., Ended]


@pytest.fixture
def draftfeed(capsys: pytest.CaptureFixture[str]) -> Draftfeed:
    def run(*arguments: object) -> Ended:
        code = main([str(argument) for argument in arguments])
        said = capsys.readouterr()
        return Ended(code, said.out, said.err)

    return run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Five samples, each in a segment of its own."""
    with opened(tmp_path / "root") as archive:
        archive_samples(tmp_path / "spool", archive, range(COUNT))
    return tmp_path / "root"


def segment_of(root: Path, ordinal: int) -> Path:
    with opened(root) as archive:
        return archive.path_of(sample(ordinal).id).with_suffix(".seg")


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x10
    path.write_bytes(content)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_ls_tells_what_is_there_and_which_prompts_are_missing(
    root: Path, draftfeed: Draftfeed
) -> None:
    ended = draftfeed("archive", "ls", root)
    assert ended.code == 0
    assert "samples      5 of 1600 prompts" in ended.out
    assert "in 5 segments" in ended.out
    assert "missing      1595 prompts have no sample: lines 5-1599, from 0" in ended.out
    assert "fault" not in ended.out
    facts = json.loads(draftfeed("archive", "ls", root, "--json").out)
    assert facts["missing"] == [5, 1600]
    assert facts["bytes"] == sum(path.stat().st_size for path in segments(root))
    assert facts["roots"] == [{"dir": str(root), "segments": 5, "bytes": facts["bytes"]}]


def test_no_tool_changes_a_byte_of_an_archive(
    root: Path, tmp_path: Path, draftfeed: Draftfeed
) -> None:
    (root / "host-1-2.part").write_bytes(b"begun")
    before = contents(root)
    assert draftfeed("archive", "ls", root).code == 0
    assert draftfeed("archive", "verify", root).code == 0
    assert draftfeed("archive", "export", root, "--out", tmp_path / "out").code == 0
    assert contents(root) == before


def test_verify_of_a_whole_archive_ends_with_0(root: Path, draftfeed: Draftfeed) -> None:
    ended = draftfeed("archive", "verify", root)
    assert ended.code == 0
    assert (
        "ok: 5 segments have their digest, 5 samples decode, 5 of them to the digest" in ended.out
    )


def test_verify_names_the_sample_with_a_flipped_byte(root: Path, draftfeed: Draftfeed) -> None:
    victim = segment_of(root, 2)
    flip(victim, victim.stat().st_size // 2)
    ended = draftfeed("archive", "verify", root)
    assert ended.code == 1
    assert f"{sample(2).id}, key 'key-2'" in ended.out
    assert f"{victim}: its digest is" in ended.out
    assert "DAMAGED: 4 segments have their digest, 4 samples decode" in ended.out
    assert "1 samples cannot be served" in ended.out


def test_verify_finds_a_flipped_byte_that_is_in_no_sample(root: Path, draftfeed: Draftfeed) -> None:
    victim = segment_of(root, 2)
    flip(victim, victim.stat().st_size - 1)  # of the header that closes the record
    ended = draftfeed("archive", "verify", root)
    assert ended.code == 1
    assert "every sample in it decodes all the same" in ended.out
    assert "cannot be served" not in ended.out


@pytest.mark.parametrize("action", ["ls", "verify"])
def test_lost_segment_is_named_with_the_keys_that_are_gone(
    root: Path, draftfeed: Draftfeed, action: str
) -> None:
    victim = segment_of(root, 3)
    victim.unlink()
    ended = draftfeed("archive", action, root)
    assert ended.code == (1 if action == "verify" else 0)
    assert f"its segment, {victim.name}, is missing" in ended.out
    assert "gone: 'key-3'" in ended.out
    assert "1596 prompts have no sample: lines 3,5-1599, from 0" in ended.out


@pytest.mark.parametrize("how", ["torn", "flipped", "missing"])
def test_damaged_index_is_named_and_its_samples_are_found_in_the_segment(
    root: Path, draftfeed: Draftfeed, how: str
) -> None:
    index = segment_of(root, 1).with_suffix(".idx")
    if how == "torn":
        os.truncate(index, index.stat().st_size - 10)
    elif how == "flipped":
        flip(index, index.stat().st_size // 2)
    else:
        index.unlink()
    ended = draftfeed("archive", "verify", root)
    assert ended.code == 1
    assert index.stem in ended.out
    assert "1 samples are found in the segment" in ended.out
    assert "5 samples decode" in ended.out
    assert "gone" not in ended.out


def test_torn_segment_is_named_with_the_keys_that_are_gone(
    tmp_path: Path, draftfeed: Draftfeed
) -> None:
    root = tmp_path / "root"
    with (
        opened(root) as archive,
        archiving(tmp_path / "spool", archive, segment_bytes=1 << 20) as spool,
    ):
        for ordinal in range(COUNT):
            spool.append(sample(ordinal))
        spool.archive_rest()
    (victim,) = segments(root)
    os.truncate(victim, victim.stat().st_size // 2)
    ended = draftfeed("archive", "verify", root)
    assert ended.code == 1
    assert f"{victim.stem}.idx: its segment is not the one of" in ended.out
    assert "2 samples are found in the segment" in ended.out
    assert "gone: 'key-2', 'key-3', 'key-4'" in ended.out


def test_copy_in_another_root_makes_up_for_a_lost_one(
    root: Path, tmp_path: Path, draftfeed: Draftfeed
) -> None:
    shutil.copytree(root, tmp_path / "copy")
    segment_of(root, 3).unlink()
    ended = draftfeed("archive", "verify", root, tmp_path / "copy")
    assert ended.code == 1
    assert "is missing" in ended.out
    assert "gone" not in ended.out
    facts = json.loads(draftfeed("archive", "ls", root, tmp_path / "copy", "--json").out)
    assert (facts["samples"], facts["copies"]) == (5, 4)


@pytest.mark.parametrize("command", [["rsync", "-a", "--ignore-existing"], ["cp", "-rn"]])
def test_copy_of_the_files_is_an_archive_and_goes_on_where_it_was(
    root: Path, tmp_path: Path, draftfeed: Draftfeed, command: list[str]
) -> None:
    """Files never change, so a second round copies only what is new."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"needs {command[0]}")
    elsewhere = tmp_path / "elsewhere"
    subprocess.run([*command, f"{root}/.", elsewhere], check=True)
    inodes = {path.name: path.stat().st_ino for path in elsewhere.iterdir()}
    with opened(root) as archive:
        archive_samples(tmp_path / "spool", archive, range(COUNT, COUNT + 2))
    subprocess.run([*command, f"{root}/.", elsewhere], check=True)
    assert {name: (elsewhere / name).stat().st_ino for name in inodes} == inodes
    shutil.rmtree(root)
    assert draftfeed("archive", "verify", elsewhere).code == 0
    with opened(elsewhere) as archive:
        for ordinal in range(COUNT + 2):
            assert read(archive, sample(ordinal).id) == sample(ordinal).digest()


def test_export_writes_what_was_captured(root: Path, tmp_path: Path, draftfeed: Draftfeed) -> None:
    ended = draftfeed("archive", "export", root, "--out", tmp_path / "out", "--ids", "key-2")
    assert ended.code == 0
    (line,) = (tmp_path / "out" / "samples.jsonl").read_text().splitlines()
    file = np.load(tmp_path / "out" / json.loads(line)["file"])
    assert np.array_equal(file["hidden_states"], sample(2).hidden_states)


def test_export_for_a_trainer_leaves_out_and_names_what_is_lost(
    root: Path, tmp_path: Path, draftfeed: Draftfeed
) -> None:
    victim = segment_of(root, 2)
    flip(victim, victim.stat().st_size // 2)
    segment_of(root, 3).unlink()
    out = tmp_path / "out"
    ended = draftfeed("archive", "export", root, "--format", "specforge", "--out", out)
    assert ended.code == 1
    assert "key 'key-2'" in ended.out
    assert "lost, left out: key 'key-3'" in ended.out
    assert "3 samples in" in ended.out
    assert len(list(out.glob("*.ckpt"))) == 3


def test_export_gives_each_line_once_where_there_are_copies(
    root: Path, tmp_path: Path, draftfeed: Draftfeed
) -> None:
    shutil.copytree(root, tmp_path / "copy")
    out = tmp_path / "out"
    ended = draftfeed("archive", "export", root, tmp_path / "copy", root, "--out", out)
    assert ended.code == 0
    ids = [json.loads(line)["id"] for line in (out / "samples.jsonl").read_text().splitlines()]
    assert [SampleId.parse(id).ordinal for id in sorted(ids)] == list(range(COUNT))


@pytest.mark.parametrize("action", ["ls", "verify", "export"])
def test_directory_that_is_no_archive_is_one_line_and_exit_code_2(
    tmp_path: Path, draftfeed: Draftfeed, action: str
) -> None:
    more = ["--out", tmp_path / "out"] if action == "export" else []
    ended = draftfeed("archive", action, tmp_path, *more)
    assert ended.code == 2
    assert ended.error.count("\n") == 1
    assert "is no archive: archive.json" in ended.error


def test_roots_of_two_archives_are_refused(
    root: Path, tmp_path: Path, draftfeed: Draftfeed
) -> None:
    shutil.copytree(root, tmp_path / "other")
    text = (root / "archive.json").read_text()
    (tmp_path / "other" / "archive.json").write_text(text.replace('"r1"', '"r2"'))
    ended = draftfeed("archive", "verify", root, tmp_path / "other")
    assert ended.code == 2
    assert "revision 'r2', this is 'r1'" in ended.error


@pytest.mark.parametrize("option", ["--target=models/x", "--ids=key-1"])
def test_options_of_the_other_format_are_refused(
    root: Path, tmp_path: Path, draftfeed: Draftfeed, option: str
) -> None:
    format = "npz" if option.startswith("--target") else "specforge"
    out = ["--out", tmp_path / "out", "--format", format]
    ended = draftfeed("archive", "export", root, *out, option)
    assert ended.code == 2
    assert option.partition("=")[0] in ended.error


def test_replay_of_a_configuration_for_a_target_is_refused(
    tmp_path: Path, draftfeed: Draftfeed
) -> None:
    config = tmp_path / "producer.toml"
    config.write_text('[engine]\nname = "synthetic"\n[spool]\ndir = "spool"\n')
    ended = draftfeed("replay", "-c", config)
    assert ended.code == 2
    assert 'a replay needs [engine] name = "archive"' in ended.error


def test_doctor_looks_at_the_roots_of_a_replay_and_not_for_a_target(
    root: Path, tmp_path: Path, draftfeed: Draftfeed
) -> None:
    config = tmp_path / "replay.toml"
    text = '[engine]\nname = "archive"\n[spool]\ndir = "{}/s"\n[archive]\nroots = ["{}"]\n'
    config.write_text(text.format(tmp_path, root))
    whole = draftfeed("doctor", "-c", config).out
    assert "ok    archive: 1 roots of tiny" in whole
    assert "target" not in whole
    (root / "archive.json").unlink()
    gone = draftfeed("doctor", "-c", config)
    assert gone.code == 1
    assert "FAIL  archive" in gone.out
