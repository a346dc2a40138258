from collections.abc import Iterator
from pathlib import Path

import pytest

import tiny_models
from draftfeed_deploy import smollm2
from standin_engine import Standin


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_qwen3(tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture(scope="session")
def tiny_qwen35(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_qwen35(tmp_path_factory.mktemp("models") / "qwen35")


@pytest.fixture(scope="session")
def tiny_qwen35_multimodal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "qwen35_multimodal"
    return tiny_models.make_qwen35_multimodal(path)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """Made once per machine, in the user's cache."""
    return smollm2.prepare()


@pytest.fixture(scope="session")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standin]:
    one = Standin(tmp_path_factory.mktemp("standin"))
    yield one
    one.close()
