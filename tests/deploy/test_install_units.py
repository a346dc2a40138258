"""`draftfeed install-units`: what it writes is valid, and what a person edited stays."""

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from draftfeed_deploy.cli import main
from draftfeed_deploy.config import build, override
from draftfeed_deploy.consumer_file import ConsumerFile
from draftfeed_deploy.install_units import FILES, GPU, RECORD, contents
from draftfeed_deploy.producer_file import ProducerFile
from draftfeed_producer.engines import SGLangConfig

CONFIG = Path("etc/draftfeed/producer.toml")
SERVICES = ("draftfeed-producer@0.service", "draftfeed-consumer.service")
needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd is not installed"
)


def installed(root: Path, *options: str) -> Path:
    assert main(["install-units", "--root", str(root), "--bin", "/usr/bin", *options]) == 0
    return root


def files(root: Path) -> dict[Path, bytes]:
    found = [path for path in root.rglob("*") if path.is_file()]
    return {path.relative_to(root): path.read_bytes() for path in found}


def test_dry_run_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    installed(tmp_path, "--dry-run")
    assert not list(tmp_path.iterdir())
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(FILES) + len(GPU)
    assert all(line.startswith("write ") for line in lines)


def test_everything_is_there_and_a_second_time_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = files(installed(tmp_path))
    assert set(first) == {*FILES.values(), *GPU, RECORD}
    assert (tmp_path / "etc/draftfeed/keys").stat().st_mode & 0o777 == 0o700
    capsys.readouterr()
    assert files(installed(tmp_path)) == first
    assert all(line.startswith("unchanged") for line in capsys.readouterr().out.splitlines())


def test_edited_file_stays_and_force_keeps_it_beside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    installed(tmp_path)
    (tmp_path / CONFIG).write_text("mine")
    capsys.readouterr()
    installed(tmp_path)
    assert (tmp_path / CONFIG).read_text() == "mine"
    assert re.search(r"^keep +\S+producer.toml  edited", capsys.readouterr().out, re.MULTILINE)
    installed(tmp_path, "--force")
    assert (tmp_path / CONFIG).read_bytes() == contents("/usr/bin", gpu=True)[CONFIG]
    assert (tmp_path / f"{CONFIG}.before").read_text() == "mine"
    (tmp_path / CONFIG).write_text("mine again")
    installed(tmp_path, "--force")
    assert (tmp_path / f"{CONFIG}.before").read_text() == "mine"
    assert (tmp_path / f"{CONFIG}.before.2").read_text() == "mine again"


def test_what_only_root_may_read_stays_so(tmp_path: Path) -> None:
    """An environment file is where people put tokens."""
    path = installed(tmp_path) / FILES["producer.env"]
    path.write_text("HF_TOKEN=s")
    path.chmod(0o600)
    installed(tmp_path, "--force")
    for one in (path, path.with_name(f"{path.name}.before")):
        assert one.stat().st_mode & 0o777 == 0o600


def test_replacement_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    """Such as on a full disk: a unit without its environment file does not start."""
    path = installed(tmp_path) / FILES["producer.env"]
    path.write_text("mine")
    (path.parent / f".{path.name}.part").mkdir()
    options = ["--root", str(tmp_path), "--bin", "/usr/bin", "--force"]
    assert main(["install-units", *options]) == 2
    assert path.read_text() == "mine"


def test_masked_unit_is_kept_and_its_successor_is_nobody_elses_to_write(tmp_path: Path) -> None:
    """/dev/null, which it is a link to, may be written by everybody."""
    unit = installed(tmp_path) / FILES["draftfeed-consumer.service"]
    unit.unlink()
    unit.symlink_to("/dev/null")
    installed(tmp_path)
    assert unit.is_symlink()
    installed(tmp_path, "--force")
    assert unit.lstat().st_mode & 0o777 == 0o644
    assert unit.with_name(f"{unit.name}.before").is_symlink()


def test_file_that_was_removed_stays_away(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or an upgrade would open the sandbox again."""
    path = installed(tmp_path) / GPU[0]
    path.unlink()
    capsys.readouterr()
    installed(tmp_path)
    assert not path.exists()
    assert f"gone       {path}  removed: left alone" in capsys.readouterr().out
    installed(tmp_path, "--force")
    assert path.exists()


def test_without_gpus_the_drop_ins_that_are_there_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    installed(tmp_path)
    capsys.readouterr()
    installed(tmp_path, "--no-gpu")
    assert f"{tmp_path / GPU[0]} is there and opens the sandbox" in capsys.readouterr().err


def test_strict_umask_hides_nothing_from_services(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        installed(tmp_path / "root")
    finally:
        os.umask(before)
    directories = [path for path in (tmp_path / "root").rglob("*") if path.is_dir()]
    modes = {path.name: path.stat().st_mode & 0o777 for path in directories}
    assert modes.pop("keys") == 0o700
    assert set(modes.values()) == {0o755}


@pytest.mark.parametrize("directory", ["/opt/my apps/bin", "/opt/100%/bin", '/opt/"/bin'])
def test_path_that_a_unit_cannot_name_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], directory: str
) -> None:
    assert main(["install-units", "--root", str(tmp_path), "--bin", directory]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_older_file_of_ours_is_updated(tmp_path: Path) -> None:
    """Installed with the command elsewhere, and never edited."""
    unit = tmp_path / FILES["draftfeed-consumer.service"]
    assert main(["install-units", "--root", str(tmp_path), "--bin", "/srv/old"]) == 0
    assert "ExecStart=/srv/old/draftfeed consumer" in unit.read_text()
    installed(tmp_path)
    assert "ExecStart=/usr/bin/draftfeed consumer" in unit.read_text()


def test_without_a_record_a_file_that_differs_counts_as_edited(tmp_path: Path) -> None:
    installed(tmp_path)
    (tmp_path / RECORD).unlink()
    (tmp_path / CONFIG).write_text("from elsewhere")
    installed(tmp_path)
    assert (tmp_path / CONFIG).read_text() == "from elsewhere"


def test_place_that_cannot_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "etc").write_text("a file")
    assert main(["install-units", "--root", str(tmp_path), "--bin", "/usr/bin"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert str(tmp_path) in error


@pytest.mark.parametrize("directory", ["/root/venv/bin", "/tmp/venv/bin"])
def test_command_that_services_cannot_see_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], directory: str
) -> None:
    assert main(["install-units", "--root", str(tmp_path), "--bin", directory]) == 0
    assert f"{directory} is hidden from services" in capsys.readouterr().err


def test_command_that_is_not_there_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["install-units", "--root", str(tmp_path), "--bin", "/opt/nothing"]) == 0
    assert "there is no /opt/nothing/draftfeed yet" in capsys.readouterr().err


def test_root_that_is_a_file_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "file"
    root.write_text("")
    assert main(["install-units", "--root", str(root), "--bin", "/usr/bin"]) == 2
    assert "choose another --root" in capsys.readouterr().err


def test_no_unit_takes_the_stream_from_another() -> None:
    for path, content in contents("/usr/bin", gpu=True).items():
        lines = [line for line in content.decode().splitlines() if not line.startswith("#")]
        assert not any("--takeover" in line for line in lines), path


def test_examples_are_valid_with_what_the_units_set() -> None:
    shipped = contents("/usr/bin", gpu=True)
    for instance in (0, 3):
        producer = tomllib.loads(shipped[CONFIG].decode())
        unit = shipped[FILES["draftfeed-producer@.service"]].decode()
        for text in re.findall(r"--set (\S+=[^\s\"]+)", unit):
            value = text.replace("%i", str(instance)).replace("%d", "/run/credentials")
            value = value.replace("%S", "/var/lib")
            override(producer, re.sub(r"\$\{\w+_HOST\}", "127.0.0.1", value))
        config = build(producer, ProducerFile, "producer.toml")
        assert isinstance(config.engine, SGLangConfig)
        assert config.engine.replica == instance
        assert config.server.bind == f"tcp://127.0.0.1:555{instance}"
        assert config.status.bind == f"127.0.0.1:964{instance}"
        assert config.spool.dir == Path(f"/var/lib/draftfeed-producer-{instance}/spool")
    text = shipped[FILES["consumer.toml"]].decode()
    assert build(tomllib.loads(text), ConsumerFile, "consumer.toml").trainer.kind == "specforge"


@needs_systemd
def test_systemd_finds_nothing_to_complain_of(tmp_path: Path) -> None:
    root = installed(tmp_path)
    units = [
        root / FILES[name] for name in FILES if name.startswith("draftfeed") and "sys" not in name
    ]
    (tmp_path / "units").mkdir()
    for unit in units:
        text = unit.read_text().replace("/usr/bin/draftfeed", "/bin/true")
        (tmp_path / "units" / unit.name.replace("@.", "@0.")).write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--recursive-errors=no", "--man=no"]
        + [str(path) for path in (tmp_path / "units").iterdir()],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@needs_systemd
@pytest.mark.parametrize(("options", "limit"), [(["--no-gpu"], 2.0), ([], 4.5)])
@pytest.mark.parametrize("unit", SERVICES)
def test_exposure_is_small(tmp_path: Path, unit: str, options: list[str], limit: float) -> None:
    root = installed(tmp_path, *options)
    done = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", f"--root={root}", unit],
        capture_output=True,
        text=True,
    )
    found = re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)
    assert found, done.stdout + done.stderr
    assert float(found[1]) <= limit
    relaxed = "✗ PrivateDevices" in done.stdout
    assert relaxed == (not options), "the drop-in was not looked at"


def test_every_relaxation_for_gpus_has_its_reason() -> None:
    lines = contents("/usr/bin", gpu=True)[GPU[0]].decode().splitlines()
    begins = lines.index("[Service]") + 1
    reason = False
    for line in lines[begins:]:
        reason = line.startswith("#") or reason
        assert reason, line
