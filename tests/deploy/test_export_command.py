"""`draftfeed export`: what it writes of a spool, what it leaves out, and that it is whole."""

import json
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from draftfeed_deploy.cli import main
from draftfeed_deploy.export import SpecForgeFiles
from draftfeed_producer.spool import Spool, SpoolConfig
from draftfeed_producer.spool.control import Term
from draftfeed_proto.descriptor import Descriptor, Final
from draftfeed_proto.ids import IdSet, Shards
from draftfeed_proto.sample import Sample
from samples import DATASET, DESCRIPTOR, sample

SHARDS = Shards(DATASET, 0, (0, 10))
LAST = msgspec.structs.replace(DESCRIPTOR, layer_ids=(1, 4, 9))
"""The last layer is the last of ten blocks."""
FORMATS = ("specforge", "speculators")


class Ended(NamedTuple):
    code: int
    out: str
    error: str


def export(
    capsys: pytest.CaptureFixture[str], spool: Path, format: str, out: Path, *more: str
) -> Ended:
    code = main(["export", "--from", str(spool), "--format", format, str(out), *more])
    said = capsys.readouterr()
    return Ended(code, said.out, said.err)


def make_spool(
    directory: Path, samples: list[Sample], stream: Descriptor = LAST, **options: Any
) -> Spool:
    spool = Spool(SpoolConfig(dir=directory, **options), stream, SHARDS)
    for made in samples:
        spool.append(made)
    return spool


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 0x10
    path.write_bytes(content)


def files_below(directory: Path) -> list[str]:
    return sorted(str(p.relative_to(directory)) for p in directory.rglob("*") if p.is_file())


def test_specforge_gets_rows_ids_and_mask_of_one_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last sampled token has no row: with it, ids and rows are off by one."""
    make_spool(tmp_path / "spool", [sample(0), sample(17, rows=9)]).close()
    out = tmp_path / "out"
    ended = export(capsys, tmp_path / "spool", "specforge", out)
    assert (ended.code, ended.out) == (0, f"2 samples in {out}; target_layer_ids 1 4 9\n")
    names = ["0-0-00000000.ckpt", "0-1-00000017.ckpt"]
    assert files_below(out) == [*names, "draftfeed.json", "samples.jsonl"]
    for name, made in zip(names, [sample(0), sample(17, rows=9)], strict=True):
        tensors = torch.load(out / name, weights_only=True)
        rows = len(made.hidden_states)
        assert {key: (tuple(t.shape), t.dtype) for key, t in tensors.items()} == {
            "input_ids": ((rows,), torch.int64),
            "loss_mask": ((rows,), torch.int64),
            "hidden_states": ((rows, 3 * 64), torch.bfloat16),
        }
        assert tensors["input_ids"].tolist() == made.input_ids[:-1].tolist()
        assert tensors["loss_mask"].tolist() == made.loss_mask[:-1].tolist()
        # What was bf16 in the target is so again: nothing is rounded on the way.
        states = torch.from_numpy(made.hidden_states).flatten(1)
        assert torch.equal(tensors["hidden_states"].half(), states)
    lines = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert [line["file"] for line in lines] == names
    assert lines[1]["id"] == str(sample(17).id)


def test_speculators_gets_each_sample_by_its_row_in_the_data_set(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = [sample(0), sample(5, rows=9), sample(2, rows=21)]
    make_spool(tmp_path / "spool", samples).close()
    out = tmp_path / "out"
    ended = export(capsys, tmp_path / "spool", "speculators", out)
    assert (ended.code, ended.out) == (0, f"3 samples in {out}; --target-layer-ids 2 5\n")
    rows: Any = datasets.load_from_disk(out)
    assert len(rows) == 3
    for index, made in enumerate(samples):
        tensors = load_file(out / f"hidden_states/hs_{index}.safetensors")
        assert tensors["token_ids"].dtype == torch.int64
        assert torch.equal(rows[index]["input_ids"], tensors["token_ids"])
        assert rows[index]["input_ids"].tolist() == made.input_ids[:-1].tolist()
        assert rows[index]["loss_mask"].tolist() == made.loss_mask[:-1].tolist()
        assert rows[index]["seq_len"] == len(made.hidden_states)
        assert np.array_equal(tensors["hidden_states"].numpy(), made.hidden_states)


def test_speculators_is_refused_a_stream_without_the_last_block(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Any layer has the shape of the final state: in its place it would be trained on as labels."""
    spool = Spool(SpoolConfig(dir=tmp_path / "spool"), DESCRIPTOR, SHARDS)
    spool.append(sample(0))
    spool.close()
    ended = export(capsys, tmp_path / "spool", "speculators", tmp_path / "out")
    assert ended.code == 2
    assert "layer 9 here, and the stream has neither that nor the final state" in ended.error
    assert '[target] final = "prenorm"' in ended.error
    assert os.listdir(tmp_path) == ["spool"]


def with_final(final: Final, layer_ids: tuple[int, ...] = (1, 4)) -> Descriptor:
    """A stream of which the third layer of `sample` is the final state."""
    return msgspec.structs.replace(DESCRIPTOR, layer_ids=layer_ids, final=final)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What is read of one to undo its final norm."""
    folder = tmp_path_factory.mktemp("target")
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    weight = torch.linspace(0.25, 4.0, 64).to(torch.bfloat16)
    save_file({"model.norm.weight": weight}, folder / "model.safetensors")
    return folder


def normed(made: Sample, target: Path, layer: int = 2) -> Sample:
    """What the target's norm makes of that layer is its final state."""
    weight = load_file(target / "model.safetensors")["model.norm.weight"].float().numpy()
    states = made.hidden_states.copy()
    x = states[:, layer].astype(np.float32)
    states[:, layer] = weight * x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-6)
    return msgspec.structs.replace(made, hidden_states=states)


@pytest.mark.parametrize("final", ["prenorm", "postnorm"])
def test_specforge_gets_the_tapped_layers_and_no_final_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], final: Final
) -> None:
    """As one layer more it would be a drafter's input; as part of a file, bytes for nobody."""
    make_spool(tmp_path / "spool", [sample(0)], with_final(final)).close()
    out = tmp_path / "out"
    ended = export(capsys, tmp_path / "spool", "specforge", out)
    assert (ended.code, ended.out) == (0, f"1 samples in {out}; target_layer_ids 1 4\n")
    [states] = [torch.load(out / "0-0-00000000.ckpt", weights_only=True)["hidden_states"]]
    tapped = torch.from_numpy(sample(0).hidden_states[:, :2].copy())
    assert torch.equal(states.half(), tapped.flatten(1))
    assert states.untyped_storage().nbytes() == states.nbytes


def test_a_final_state_before_the_norm_is_the_last_layer_for_speculators(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target: Path
) -> None:
    make_spool(tmp_path / "spool", [sample(0)], with_final("prenorm")).close()
    for name, more in {"plain": (), "checked": ("--target", str(target))}.items():
        out = tmp_path / name
        ended = export(capsys, tmp_path / "spool", "speculators", out, *more)
        assert (ended.code, ended.out) == (0, f"1 samples in {out}; --target-layer-ids 2 5\n")
        tensors = load_file(out / "hidden_states/hs_0.safetensors")
        assert np.array_equal(tensors["hidden_states"].numpy(), sample(0).hidden_states)


def test_a_final_state_after_the_norm_is_undone_for_speculators(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target: Path
) -> None:
    spool = make_spool(tmp_path / "spool", [normed(sample(0), target)], with_final("postnorm"))
    spool.close()
    out = tmp_path / "out"
    ended = export(capsys, tmp_path / "spool", "speculators", out, "--target", str(target))
    assert (ended.code, ended.out) == (0, f"1 samples in {out}; --target-layer-ids 2 5\n")
    states = load_file(out / "hidden_states/hs_0.safetensors")["hidden_states"].numpy()
    true = sample(0).hidden_states
    assert np.array_equal(states[:, :2], true[:, :2])
    x = true[:, 2].astype(np.float32)
    np.testing.assert_allclose(
        states[:, 2].astype(np.float32),
        x / np.sqrt((x * x).mean(1, keepdims=True)),
        rtol=2e-3,
        atol=1e-6,
    )


def test_the_last_block_as_a_tapped_layer_is_taken_though_there_is_a_final_state(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is the true state, of a target that nobody has to name."""
    stream = with_final("postnorm", layer_ids=(1, 9))
    make_spool(tmp_path / "spool", [sample(0)], stream).close()
    out = tmp_path / "out"
    ended = export(capsys, tmp_path / "spool", "speculators", out)
    assert (ended.code, ended.out) == (0, f"1 samples in {out}; --target-layer-ids 2\n")
    states = load_file(out / "hidden_states/hs_0.safetensors")["hidden_states"]
    assert np.array_equal(states.numpy(), sample(0).hidden_states[:, :2])


@pytest.mark.parametrize(
    ("said", "is_normed", "says"),
    [
        ("postnorm", False, f"sample {sample(0).id}: row .* is not what the norm of .* puts out"),
        ("prenorm", True, f"sample {sample(0).id}: the stream says prenorm, and its final state"),
    ],
)
def test_a_stream_that_says_the_wrong_kind_of_final_state_is_found_out(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    target: Path,
    said: Final,
    is_normed: bool,
    says: str,
) -> None:
    """Pre-norm and post-norm final state mixed up: same shape, no error, other labels."""
    made = normed(sample(0), target) if is_normed else sample(0)
    make_spool(tmp_path / "spool", [made], with_final(said)).close()
    ended = export(
        capsys, tmp_path / "spool", "speculators", tmp_path / "out", "--target", str(target)
    )
    assert (ended.code, ended.error.count("\n")) == (2, 1)
    assert re.search(says, ended.error)
    assert os.listdir(tmp_path) == ["spool"]


def test_what_is_missing_to_undo_a_norm_is_one_line_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], target: Path
) -> None:
    make_spool(tmp_path / "spool", [sample(0)], with_final("postnorm")).close()
    unknown = tmp_path / "unknown"
    unknown.mkdir()
    (unknown / "config.json").write_text('{"model_type": "gemma3_text"}')
    before = sorted(os.listdir(tmp_path))
    for format, more, says in (
        ("speculators", (), "say --target DIR, the directory of tiny"),
        ("speculators", ("--target", str(tmp_path / "none")), "none/config.json cannot be read"),
        ("speculators", ("--target", str(unknown)), "is a gemma3_text"),
        ("specforge", ("--target", str(target)), "--target is for --format speculators"),
    ):
        ended = export(capsys, tmp_path / "spool", format, tmp_path / "out", *more)
        assert (ended.code, ended.error.count("\n")) == (2, 1)
        assert says in ended.error
        assert sorted(os.listdir(tmp_path)) == before


def test_samples_that_a_trainer_cannot_use_are_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lonely = np.zeros(41, np.uint8)
    lonely[[10, 39, 40]] = 1  # 39 and 40 are adjacent, but 40 has no row
    infinite = sample(2).hidden_states.copy()
    infinite[7, 1, 3] = np.inf
    unwritten = sample(3).hidden_states.copy()
    unwritten[7, 1] = 0
    samples = [
        sample(0),
        msgspec.structs.replace(sample(1), loss_mask=lonely),
        msgspec.structs.replace(sample(2), hidden_states=infinite),
        msgspec.structs.replace(sample(3), hidden_states=unwritten),
    ]
    make_spool(tmp_path / "spool", samples).close()
    for format, written in (("specforge", 1), ("speculators", 2)):
        out = tmp_path / format
        ended = export(capsys, tmp_path / "spool", format, out)
        assert ended.code == 0
        assert "left out: 2 with values that are not finite, or rows that are all zero" in ended.out
        alone = "left out: 1 without two adjacent supervised tokens that have rows"
        assert (alone in ended.out) == (format == "specforge")
        note = json.loads((out / "draftfeed.json").read_text())
        assert note["samples"] == written == len((out / "samples.jsonl").read_text().splitlines())
        assert sum(note["left_out"].values()) == 4 - written


@pytest.mark.parametrize("format", FORMATS)
def test_damaged_samples_are_named_and_the_others_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], format: str
) -> None:
    spool = make_spool(tmp_path / "spool", [sample(k) for k in range(5)])
    records = list(spool.deliverable())
    spool.close()
    segment = tmp_path / "spool" / "00000001.seg"
    flip(segment, records[2].chunks[1][0] + 99)
    offset, size = records[3].chunks[-1]
    flip(segment, offset + size + 40)  # in the header that closes the record
    ended = export(capsys, tmp_path / "spool", format, tmp_path / "out")
    assert ended.code == 1
    assert f"damaged, left out: {sample(2).id}, key 'key-2'" in ended.out
    assert ended.out.count("damaged, left out") == 2
    assert "3 samples in" in ended.out


def test_a_running_producers_spool_is_exported_and_not_touched(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spool = make_spool(tmp_path / "spool", [sample(k) for k in range(6)], segment_bytes=1)
    spool.grant(Term(1, "run", "i", 1))
    spool.commit(1, IdSet([sample(0).id, sample(1).id]), term=1)
    spool.commit(2, IdSet([sample(0).id, sample(1).id]), term=1)
    before = {p.name: p.read_bytes() for p in (tmp_path / "spool").iterdir()}
    ended = export(capsys, tmp_path / "spool", "specforge", tmp_path / "out")
    assert "4 samples in" in ended.out  # two are trained and freed
    assert {p.name: p.read_bytes() for p in (tmp_path / "spool").iterdir()} == before
    spool.close()


@pytest.mark.parametrize("format", FORMATS)
def test_out_that_is_not_empty_is_refused_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], format: str
) -> None:
    make_spool(tmp_path / "spool", [sample(0)]).close()
    out = tmp_path / "out"
    out.mkdir()
    assert export(capsys, tmp_path / "spool", format, out).code == 0  # empty
    before = files_below(out)
    ended = export(capsys, tmp_path / "spool", format, out)
    assert ended.code == 2
    assert "it is not empty" in ended.error
    assert files_below(out) == before
    ended = export(capsys, tmp_path / "spool", format, out / "draftfeed.json")
    assert (ended.code, "Not a directory" in ended.error) == (2, True)


def test_nothing_to_export_and_no_spool_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_spool(tmp_path / "spool", []).close()
    ended = export(capsys, tmp_path / "spool", "specforge", tmp_path / "out")
    assert (ended.code, "let its producer make a few first" in ended.error) == (2, True)
    unsupervised = msgspec.structs.replace(sample(0), loss_mask=np.zeros(41, np.uint8))
    make_spool(tmp_path / "spool", [unsupervised]).close()
    ended = export(capsys, tmp_path / "spool", "specforge", tmp_path / "out")
    assert (ended.code, "left out are 1 without two adjacent" in ended.error) == (2, True)
    ended = export(capsys, tmp_path / "nowhere", "specforge", tmp_path / "out")
    assert (ended.code, "is not a spool" in ended.error) == (2, True)
    assert os.listdir(tmp_path) == ["spool"]


@pytest.fixture
def small_files() -> Iterator[None]:
    """No file of this process may be larger than 20 kB: to the writer it is a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("format", FORMATS)
def test_full_disk_leaves_nothing_that_could_pass_for_an_export(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    format: str,
    request: pytest.FixtureRequest,
) -> None:
    """A reader sees a half-written sample."""
    make_spool(tmp_path / "spool", [sample(0, rows=10), sample(1, rows=80)]).close()
    request.getfixturevalue("small_files")  # the second sample's states alone are 31 kB
    ended = export(capsys, tmp_path / "spool", format, tmp_path / "out")
    assert ended.code == 2
    assert "File too large" in ended.error
    assert os.listdir(tmp_path) == ["spool"]


KILLED = """
import os, sys
from draftfeed_deploy.cli import main
from draftfeed_deploy.export import SpecForgeFiles

write = SpecForgeFiles.write
def killed(self, item):
    if item["id"].ordinal == 2:
        os.kill(os.getpid(), 9)
    return write(self, item)

SpecForgeFiles.write = killed
main(sys.argv[1:])
"""


def test_export_that_is_killed_midway_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Half of the files would train without complaint."""
    spool, out = tmp_path / "spool", tmp_path / "out"
    make_spool(spool, [sample(k) for k in range(4)]).close()
    arguments = ["export", "--from", str(spool), "--format", "specforge", str(out)]
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, *arguments], capture_output=True, timeout=100
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    (left,) = (name for name in os.listdir(tmp_path) if name != "spool")
    assert left.startswith("out.part-")
    assert len(list((tmp_path / left).glob("*.ckpt"))) == 2
    assert export(capsys, spool, "specforge", out).code == 0
    assert len(list(out.glob("*.ckpt"))) == 4


def test_sigterm_ends_an_export_and_leaves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(self: SpecForgeFiles, item: Any) -> str:
        os.kill(os.getpid(), signal.SIGTERM)
        return write(self, item)

    write = SpecForgeFiles.write
    monkeypatch.setattr(SpecForgeFiles, "write", end)
    make_spool(tmp_path / "spool", [sample(0)]).close()
    assert export(capsys, tmp_path / "spool", "specforge", tmp_path / "out").code == 130
    assert os.listdir(tmp_path) == ["spool"]
