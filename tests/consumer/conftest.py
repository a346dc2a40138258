from pathlib import Path

import pytest

import tiny_target
from draftfeed_deploy import smollm2
from memory_stream import Item
from smollm2_samples import make_samples


@pytest.fixture(scope="session")
def tiny_target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target.make(tmp_path_factory.mktemp("tiny_target"))


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """Made once per machine, in the user's cache."""
    return smollm2.prepare()


@pytest.fixture(scope="session")
def smollm2_items(smollm2_dir: Path) -> list[Item]:
    """32 samples of 16 greedy tokens."""
    return make_samples(smollm2_dir, new_tokens=16)
