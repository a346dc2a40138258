"""Targets that transformers and SGLang both load. These tests run in the main environment; SGLang
runs where `[engine] python` says, in .venv-sglang."""

from pathlib import Path

import pytest

import tiny_models
from draftfeed_deploy import smollm2


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make_qwen3(tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture(scope="session")
def tiny_qwen35(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The hybrid as a text model."""
    return tiny_models.make_qwen35(tmp_path_factory.mktemp("models") / "qwen35")


@pytest.fixture(scope="session")
def tiny_qwen35_multimodal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The hybrid as it is published. SGLang loads it with `enable_multimodal=False`: otherwise it
    looks for an image processor beside the weights."""
    path = tmp_path_factory.mktemp("models") / "qwen35_multimodal"
    return tiny_models.make_qwen35_multimodal(path)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """Made once per machine, in the user's cache."""
    return smollm2.prepare()
