"""docs/layouts.md: every file of it is valid, and the files of a layout fit together."""

import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from draftfeed_consumer.config import ConsumerConfig
from draftfeed_consumer.trainers.specforge_options import parse_options
from draftfeed_deploy.config import build
from draftfeed_producer.config import ProducerConfig
from draftfeed_proto.keys import local

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "layouts.md").read_text()
SECTIONS = dict(re.findall(r"^## ([ABCD]): .*?\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE))
TABLES = {
    layout: [tomllib.loads(text) for text in re.findall(r"```toml\n(.*?)```", section, re.DOTALL)]
    for layout, section in SECTIONS.items()
}
COUNTS = {"A": 2, "B": 2, "C": 2, "D": 3}
ALL_TABLES = [(layout, tables) for layout, found in TABLES.items() for tables in found]


def test_there_are_files_for_each_of_the_four_layouts() -> None:
    assert {layout: len(found) for layout, found in TABLES.items()} == COUNTS


@pytest.mark.parametrize(("layout", "tables"), ALL_TABLES)
def test_each_file_is_valid(layout: str, tables: dict[str, Any]) -> None:
    kind = ProducerConfig if "spool" in tables else ConsumerConfig
    build(tables, kind, f"{layout}.toml")


@pytest.mark.parametrize("layout", SECTIONS)
def test_consumers_connect_to_where_producers_listen(layout: str) -> None:
    binds = [one["server"]["bind"] for one in TABLES[layout] if "spool" in one]
    addresses = [one["producer"]["addresses"] for one in TABLES[layout] if "spool" not in one]
    assert all(bind in addresses[0] for bind in binds)
    assert {local(bind) for bind in binds} == {layout != "B"}


def test_replicas_of_every_layout_generate_responses_of_the_same_length() -> None:
    engines = [
        one["engine"] for _, one in ALL_TABLES if one.get("engine", {}).get("name") == "sglang"
    ]
    assert [engine["sampling"]["max_new_tokens"] for engine in engines] == [2048] * 4


def test_a_trainer_that_is_started_again_is_not_refused() -> None:
    trainers = [one["trainer"] for _, one in ALL_TABLES if "trainer" in one]
    ready_made = [trainer for trainer in trainers if "kind" in trainer]
    assert [parse_options(one["options"]).resume_from for one in ready_made] == ["latest"] * 2


def test_the_filler_of_the_page_is_there() -> None:
    names = [one["trainer"].get("function") for one in TABLES["D"] if "trainer" in one]
    assert names == ["archive_filler:train"]
    path = DOCS / "examples" / "archive_filler.py"
    spec = importlib.util.spec_from_file_location("archive_filler", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert callable(module.train)
