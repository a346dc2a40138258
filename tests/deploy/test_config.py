"""What a wrong configuration file says to the person who wrote it."""

from pathlib import Path
from typing import Any

import pytest

from draftfeed_consumer.config import ConsumerConfig
from draftfeed_consumer.errors import TrainerError
from draftfeed_consumer.trainers.specforge_options import parse_options
from draftfeed_deploy.config import load
from draftfeed_deploy.errors import ConfigError
from draftfeed_producer.config import ProducerConfig
from draftfeed_producer.engines import SyntheticConfig, TransformersConfig

GOOD = """
[engine]
name = "synthetic"
samples = 7
[spool]
dir = "spool"
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "producer.toml"
    path.write_text(text)
    return path


def test_tables_become_structs_with_defaults(tmp_path: Path) -> None:
    config = load(write(tmp_path, GOOD), ProducerConfig)
    assert isinstance(config.engine, SyntheticConfig)
    assert config.engine.samples == 7
    assert config.spool.dir == Path("spool")
    assert config.server.bind.startswith("tcp://127.0.0.1:")


@pytest.mark.parametrize(
    ("override", "check"),
    [
        ("engine.samples=9", lambda c: c.engine.samples == 9),
        ("server.bind=tcp://127.0.0.1:7", lambda c: c.server.bind == "tcp://127.0.0.1:7"),
        ('server.bind="tcp://localhost:7"', lambda c: c.server.bind == "tcp://localhost:7"),
        ("engine.layer_ids=[3, 9]", lambda c: c.engine.layer_ids == (3, 9)),
        ("spool.audit=true", lambda c: c.spool.audit is True),
    ],
)
def test_set_overrides_one_value(tmp_path: Path, override: str, check) -> None:  # type: ignore[no-untyped-def]
    assert check(load(write(tmp_path, GOOD), ProducerConfig, [override]))


def test_engine_is_chosen_by_its_name(tmp_path: Path) -> None:
    text = GOOD.replace("synthetic", "transformers").replace("samples", "batch_size")
    assert isinstance(load(write(tmp_path, text), ProducerConfig).engine, TransformersConfig)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[engine\n", "is not TOML"),
        ("\xff", "is not TOML"),
        (GOOD + "qouta_bytes = 5\n", "unknown key 'spool.qouta_bytes'; did you mean 'quota_bytes'"),
        (GOOD + "[sever]\n", "unknown key 'sever'; did you mean 'server'"),
        (GOOD.replace("samples", "smaples"), "unknown key 'engine.smaples'"),
        (GOOD.replace("synthetic", "vllm"), "'transformers', 'synthetic', 'archive', not 'vllm'"),
        (GOOD.replace('name = "synthetic"\n', ""), "engine.name must be one of"),
        (GOOD.replace("7", '"seven"'), "Expected `int`, got `str` - at engine.samples"),
        (GOOD.replace("[spool]\ndir", "[server]\nbind"), "required field `spool`"),
        (GOOD + "fsync = 'sometimes'\n", "spool.fsync must be one of"),
        ("engine = 5\n", "engine"),
        (GOOD + '[capture]\nmode = "prefill"\n', "the synthetic engine has no responses for"),
        (GOOD + "[capture]\nprefix_cache = true\n", 'is for [engine] name = "sglang": remove it'),
        (GOOD + '[capture]\nmode = "replay"\n', "capture.mode must be one of 'live', 'prefill'"),
        (GOOD + "[capture]\nmode = 3\n", "capture.mode"),
        (GOOD.replace('"spool"', '""'), "expected a path, not an empty string - at spool.dir"),
        (GOOD + "[server]\nkey = ''\n", "expected a path, not an empty string - at server.key"),
        (GOOD + "[server]\nclients = ['']\n", "not an empty string - at server.clients"),
        (GOOD + "[target]\npath = ''\n", "length >= 1 - at target.path"),
        (GOOD + "[prompts]\npath = ''\n", "length >= 1 - at prompts.path"),
        (
            GOOD + "[target]\npath = 'x'\nfinal = 'post'\n",
            "target.final must be one of 'none', 'postnorm', 'prenorm', not 'post'",
        ),
        (GOOD + "[capture]\nstaging_bytes = 0\n", "staging_bytes is 0, it must be at least 1"),
    ],
)
def test_wrong_file_is_named_with_the_place_in_it(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "producer.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError) as caught:
        load(path, ProducerConfig)
    assert says in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


CONSUMER = """
[trainer]
function = "mine:train"
output_dir = "checkpoints"
"""


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        (GOOD, ConsumerConfig, "is a producer's file, with [engine]; a consumer's is needed here"),
        (
            CONSUMER,
            ProducerConfig,
            "is a consumer's file, with [trainer]; a producer's is needed here",
        ),
        (GOOD + "[trainer]\n", ProducerConfig, "unknown key 'trainer'"),  # it is a producer's
    ],
)
def test_the_other_services_file_is_called_that(
    tmp_path: Path, text: str, kind: type[ConsumerConfig | ProducerConfig], says: str
) -> None:
    """The first of its tables was called an unknown key."""
    with pytest.raises(ConfigError) as caught:
        load(write(tmp_path, text), kind)
    assert says in str(caught.value)


@pytest.mark.parametrize("field", ["key", "server_key"])
def test_an_empty_path_of_a_consumer_is_refused(tmp_path: Path, field: str) -> None:
    with pytest.raises(ConfigError, match=f"not an empty string - at producer.{field}"):
        load(write(tmp_path, CONSUMER), ConsumerConfig, [f"producer.{field}="])


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            {"algorithm": "eagel"},
            "options.algorithm must be one of 'dflash', 'eagle3', not 'eagel'",
        ),
        ({"dtype": "float16"}, "options.dtype must be one of 'float32', 'bfloat16', not 'float16'"),
        ({"init": ["target"]}, "options.init must be one of 'random', 'target', not ['target']"),
    ],
)
def test_a_trainers_option_that_is_no_choice_names_the_choices(
    options: dict[str, Any], says: str
) -> None:
    with pytest.raises(TrainerError) as caught:
        parse_options(options)
    assert says in str(caught.value)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.toml: cannot be read: No such file"):
        load(tmp_path / "nowhere.toml", ProducerConfig)


@pytest.mark.parametrize("override", ["spool", "=3", "spool.=3", "spool..dir=3", "engine.name.x=3"])
def test_override_that_names_nothing_is_refused(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match="--set"):
        load(write(tmp_path, GOOD), ProducerConfig, [override])
