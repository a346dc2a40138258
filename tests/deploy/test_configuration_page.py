"""docs/configuration.md names every key, with the default that it has."""

import json
import re
import tomllib
from pathlib import Path

import msgspec
import pytest

from draftfeed_consumer.assets import AssetsConfig
from draftfeed_consumer.buffer import BufferConfig
from draftfeed_consumer.client import ClientConfig
from draftfeed_consumer.config import ConsumerConfig
from draftfeed_consumer.policy import Policy
from draftfeed_consumer.trainers import TrainerConfig
from draftfeed_consumer.trainers.specforge_options import SpecForgeOptions
from draftfeed_deploy.config import build
from draftfeed_deploy.status import StatusConfig
from draftfeed_producer.archive import ArchiveConfig
from draftfeed_producer.config import ProducerConfig
from draftfeed_producer.conversations import OutputConfig
from draftfeed_producer.engines import (
    ReplayConfig,
    SGLangConfig,
    SyntheticConfig,
    TransformersConfig,
)
from draftfeed_producer.engines.config import CaptureConfig, SamplingConfig
from draftfeed_producer.listener import ServerConfig
from draftfeed_producer.prompts import PromptsConfig
from draftfeed_producer.quality import QualityConfig
from draftfeed_producer.spool import SpoolConfig
from draftfeed_producer.target import TargetConfig
from draftfeed_proto.descriptor import Expectation

PAGE = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
TABLES: dict[str, type[msgspec.Struct]] = {
    '`[engine]` with `name = "transformers"`': TransformersConfig,
    '`[engine]` with `name = "sglang"`': SGLangConfig,
    "\n`[engine.sampling]`": SamplingConfig,
    '`[engine]` with `name = "synthetic"`': SyntheticConfig,
    '`[engine]` with `name = "archive"`': ReplayConfig,
    "`[archive]`:": ArchiveConfig,
    "\n`[capture]`": CaptureConfig,
    "`[target]`\n": TargetConfig,
    "`[prompts]`\n": PromptsConfig,
    "`[spool]`": SpoolConfig,
    "`[server]`": ServerConfig,
    "`[quality]`:": QualityConfig,
    "`[output]`:": OutputConfig,
    "`[status]`,": StatusConfig,
    "`[producer]`": ClientConfig,
    "`[buffer]`": BufferConfig,
    "`[trainer]`": TrainerConfig,
    "`[trainer.assets]`:": AssetsConfig,
    "`[trainer.policy]`:": Policy,
    '`[trainer.options]` with `kind = "specforge"`': SpecForgeOptions,
}


@pytest.mark.parametrize("heading", TABLES)
def test_every_key_is_on_the_page_with_its_default(heading: str) -> None:
    assert PAGE.count(heading) == 1
    table = PAGE.partition(heading)[2].partition("|---|---|---|\n")[2].partition("\n\n")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) ?\|", table, re.MULTILINE))
    fields = msgspec.structs.fields(TABLES[heading])
    assert list(rows) == [field.name for field in fields]
    for field in fields:
        assert (rows[field.name] == "*needed*") is field.required, field.name
        if rows[field.name].startswith("`"):
            shown = tomllib.loads(f"value = {rows[field.name].strip('`')}")["value"]
            # A table that is left out is the one with all its defaults.
            assert shown == ({} if shown == {} else plain(field.default)), field.name
        elif not field.required:
            assert field.default in (None, ""), field.name


def plain(default: object) -> object:
    return json.loads(msgspec.json.encode(default))


def test_every_expectation_is_on_the_page() -> None:
    line = next(line for line in PAGE.splitlines() if line.startswith("`[expect]`"))
    names = re.findall(r"`(\w+)`", line)
    assert names == list(Expectation.__struct_fields__)


def test_the_shortest_files_are_valid() -> None:
    producer, consumer = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    build(tomllib.loads(producer), ProducerConfig, "producer.toml")
    build(tomllib.loads(consumer), ConsumerConfig, "consumer.toml")
