"""docs/plan.md: its commands print what it shows, and its files can be read."""

import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from draftfeed_deploy.cli import main
from draftfeed_deploy.plan_inputs import Inputs, Measured
from draftfeed_deploy.plan_measured import TargetBenchmark, measured
from draftfeed_deploy.plan_units import FACTORS

PAGE = (Path(__file__).parents[2] / "docs" / "plan.md").read_text()
SESSIONS = re.findall(r"^    \$ draftfeed (plan .*)\n((?:    .*\n)+)", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("command", "shown"), SESSIONS)
def test_a_command_prints_what_the_page_shows(
    capsys: pytest.CaptureFixture[str], command: str, shown: str
):
    assert main(command.split()) == 0
    printed = capsys.readouterr().out.splitlines()
    lines = [line.removeprefix("    ") for line in shown.splitlines()]
    assert [line for line in lines if line != "..." and line not in printed] == []


def test_there_are_sessions():
    commands = [command.split()[1] for command, _ in SESSIONS]
    assert commands == ["--list", "--scenario", "--scenario", "--scenario"]


def test_the_claims_that_are_shown_are_printed(capsys: pytest.CaptureFixture[str]):
    for scenario in ("a-pro6000", "c-b200-shared"):
        assert main(["plan", "--scenario", scenario]) == 0
    printed = capsys.readouterr().out.splitlines()
    shown = [line[4:] for line in PAGE.splitlines() if line.startswith("        claimed ")]
    assert len(shown) == 4
    assert set(shown) <= set(printed)


def test_the_files_can_be_read():
    mine, _, measurements = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    known = {field.name: field.type for field in msgspec.structs.fields(Inputs)}
    for name, part in tomllib.loads(mine).items():
        if isinstance(part, dict):
            fields = {field.name for field in msgspec.structs.fields(known[name])}
            assert set(part) <= fields
    msgspec.convert(tomllib.loads(measurements)["measured"], Measured)
    (benchmark,) = re.findall(r"```json\n(.*?)```", PAGE, re.DOTALL)
    found = measured(msgspec.json.decode(benchmark, type=TargetBenchmark), True, "target.json")
    assert (found.batch, found.prefill_tokens_per_second) == (64, 5100)


def test_every_key_is_on_the_page_with_its_default():
    """They were to be read in the source."""
    _, text, _ = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    page = tomllib.loads(text)
    msgspec.convert(page, Inputs)
    parts = {field.name: field.type for field in msgspec.structs.fields(Inputs)}
    assert page.keys() == parts.keys() - {"claims"}
    for name in page.keys() - {"title", "extends"}:
        fields = {field.name: field for field in msgspec.structs.fields(parts[name])}
        assert page[name].keys() == fields.keys()
        for key, field in fields.items():
            if field.default is not msgspec.NODEFAULT and field.default is not None:
                assert page[name][key] == field.default, f"{name}.{key}"
            comment = re.search(rf"^{key} = .*?(#.*)?$", _table(text, name), re.MULTILINE)
            assert comment
            assert field.required == ("# needed" in comment[0]) or key == "hidden_size"


def _table(text: str, name: str) -> str:
    return text.partition(f"[{name}]")[2].partition("\n[")[0]


def test_every_unit_is_on_the_page():
    line = next(line for line in PAGE.splitlines() if line.startswith("Units are "))
    words = line.removeprefix("Units are ").partition(". ")[0].replace(" and ", ", ")
    assert words.split(", ") == list(FACTORS)
