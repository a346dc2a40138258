"""docs/deploy-pro6000.md, and what docs/trainers.md has for the same run: the files are valid, and
what is said to be refused is refused."""

import re
import tomllib
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from draftfeed_consumer.config import ConsumerConfig
from draftfeed_consumer.trainers.specforge_options import parse_options
from draftfeed_deploy.config import build
from draftfeed_deploy.errors import ConfigError
from draftfeed_producer.config import ProducerConfig
from draftfeed_producer.engines import SGLangConfig

PAGE = (Path(__file__).parents[2] / "docs" / "deploy-pro6000.md").read_text()
PRODUCER, CONSUMER, *CHANGES = (
    tomllib.loads(text) for text in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
)


def changed(tables: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """The producer's file with some keys of others."""
    result = deepcopy(tables)
    for key, value in change.items():
        within = isinstance(value, dict) and key in result
        result[key] = changed(result[key], value) if within else value
    return result


def producer(change: dict[str, Any]) -> ProducerConfig:
    return build(changed(PRODUCER, change), ProducerConfig, "producer-0.toml")


def test_the_files_are_valid():
    consumer = build(CONSUMER, ConsumerConfig, "consumer.toml")
    assert parse_options(consumer.trainer.options).resume_from == "latest"
    assert producer({})
    assert [producer(change).capture.mode for change in CHANGES] == ["live", "prefill"]


def test_the_training_nodes_file_is_valid_and_of_the_same_run():
    page = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text()
    section = page.partition("## Qwen3.6-27B, DFlash, on a B200")[2].partition("\n## ")[0]
    [text] = re.findall(r"```toml\n(.*?)```", section, re.DOTALL)
    config = build(tomllib.loads(text), ConsumerConfig, "consumer.toml")
    assert parse_options(config.trainer.options).device == "cuda"
    for name in ("producer", "expect"):
        assert tomllib.loads(text)[name] == CONSUMER[name]


def test_four_replicas_share_neither_cards_nor_shards_nor_addresses():
    row = r"^\| `producer-\d.toml` \| `(\d)` \|.*\| `\"(.+?)\"` \| port (\d+)"
    rows = re.findall(row, PAGE, re.MULTILINE)
    assert [int(replica) for replica, _, _ in rows] == [0, 1, 2, 3]
    ends = [tuple(map(int, shards.split("-"))) for _, shards, _ in rows]
    assert [last + 1 for _, last in ends[:-1]] == [first for first, _ in ends[1:]]
    assert (ends[0][0], ends[-1][1]) == (0, -(-914_000 // 4096) - 1)
    ports = [f"tcp://10.0.0.1:{port}" for _, _, port in rows]
    assert CONSUMER["producer"]["addresses"] == ports
    replica, shards, _ = rows[0]
    assert PRODUCER["engine"]["replica"] == int(replica)
    assert (PRODUCER["spool"]["shards"], PRODUCER["server"]["bind"]) == (shards, ports[0])


def patterns_in_the_table() -> list[str]:
    """The names between backticks in the first column of what is refused; `begins_...` is for
    all that begin so."""
    section = PAGE.partition("## What cannot be captured live")[2].partition("\n## ")[0]
    cells = re.findall(r"^\|(.*?)\|", section, re.MULTILINE)
    names = (name for cell in cells for name in re.findall(r"`(\w+(?:\.\.\.)?)`", cell))
    return [name.replace("...", r"\w+") for name in names]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("speculative_algorithm", "NEXTN"),
        ("enable_hierarchical_cache", True),
        ("hicache_ratio", 2.0),
        ("enable_hisparse", True),
        ("pp_size", 2),
        ("dp_size", 4),
    ],
)
def test_what_the_page_says_is_refused_is_refused(name: str, value: Any):
    assert any(re.fullmatch(pattern, name) for pattern in patterns_in_the_table())
    with pytest.raises(ConfigError, match=name):
        producer({"engine": {"args": {name: value}}})


def test_the_arithmetic_of_rows():
    config = producer({}).engine
    assert isinstance(config, SGLangConfig)
    layers = len(PRODUCER["target"]["layer_ids"])
    row = 2 * layers * 5120
    assert f"{row:,} bytes" in PAGE
    chunk = config.args["chunked_prefill_size"]
    ring = 2 * (chunk + config.concurrency) * (row + 16 * layers)
    assert f"| {ring / 1e9:.2f} |" in PAGE
    held = config.concurrency * (328 + config.sampling.max_new_tokens - 1) * (row + 16 * layers)
    assert f"| {held / 1e9:.1f} |" in PAGE
    assert held <= PRODUCER["capture"]["staging_bytes"]
