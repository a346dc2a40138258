"""Trainers: other people's, fed from a stream.

A trainer is a function `train(stream, run)`: it iterates the stream, acknowledges what an
optimizer step has used, makes checkpoints that hold the stream's state, and returns at the end
of the samples. `[trainer] kind = "specforge"` is the one we ship; `function = "module:function"`
is anyone's.
"""

import importlib
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from draftfeed_consumer.assets import AssetsConfig, is_partial
from draftfeed_consumer.errors import TrainerError
from draftfeed_consumer.policy import Policy
from draftfeed_proto.descriptor import Descriptor, Expectation
from draftfeed_proto.ids import SampleId

Item = dict[str, Any]


class SampleStream(Protocol):
    """What a trainer needs of `HiddenStateStream`, where each call is explained.

    Iteration may run in another thread than the rest.
    """

    @property
    def descriptor(self) -> Descriptor: ...
    def __iter__(self) -> Iterator[Item]: ...
    def release(self, ids: Iterable[SampleId]) -> None: ...
    def trained(
        self, ids: Iterable[SampleId], step: int, metrics: dict[str, float] | None = None
    ) -> None: ...
    def reject(self, id: SampleId, reason: str) -> None: ...
    def tail(self, ids: Iterable[SampleId]) -> None: ...
    @property
    def draining(self) -> bool: ...
    def on_idle_checkpoint(self, save: Callable[[], object]) -> None: ...
    def checkpoint_every(self, samples: int) -> None: ...
    @property
    def checkpoint_wanted(self) -> bool: ...
    def state_dict(self) -> dict[str, Any]: ...
    def load_state_dict(self, state: dict[str, Any]) -> None: ...
    def committed(self, state: dict[str, Any]) -> None: ...


class TrainerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    kind: str | None = None
    """A trainer we ship: "specforge"."""
    function: str | None = None
    """Anyone's: "module:function", called as `function(stream, run)`."""
    target: Path | None = None
    """Model directory of the target: config, tokenizer, embedding and head are read from it.
    None: these come from the producers (`assets`)."""
    assets: AssetsConfig = AssetsConfig()
    output_dir: Path
    threads: int = 1
    """Of torch."""
    policy: Policy = Policy()
    drain_seconds: float = 60.0
    """How long the trainer may take to end normally after SIGTERM or SIGINT."""
    options: dict[str, Any] = {}
    """The trainer's own."""


class TrainerRun(msgspec.Struct, frozen=True, kw_only=True):
    """What a training function is given beside the stream."""

    output_dir: Path
    target: Path | None
    """None: there is none, or it is to be fetched."""
    options: dict[str, Any]
    partial: bool = False
    """The target comes from the producers: config, tokenizer, embedding, final norm and head, and
    none of the blocks."""
    threads: int = 1
    policy: Policy = Policy()

    @property
    def target_dir(self) -> Path:
        """Raises TrainerError when there is none."""
        if self.target is None:
            raise TrainerError("target is missing: the path of the target's model directory")
        return self.target

    def with_target(self, directory: Path) -> "TrainerRun":
        """Once its files have come."""
        return msgspec.structs.replace(self, target=directory)


class TrainResult(NamedTuple):
    steps: int
    """Optimizer steps, those before a resume included."""
    trained: int
    """Samples, in this process."""
    rejected: int
    tail: tuple[SampleId, ...]
    """Received but not trained, because they did not fill an optimizer step."""
    checkpoint: Path | None
    """The last one that is durable."""


Train = Callable[[SampleStream, TrainerRun], Any]


def load(config: TrainerConfig) -> tuple[Train, TrainerRun]:
    """The training function and its arguments, checked as far as can be without a stream, and
    without what is still to be fetched: `TrainerRun.with_target` follows then.

    Raises TrainerError.
    """
    if (config.kind is None) == (config.function is None):
        raise TrainerError(
            'needs kind = "specforge" or function = "module:function", one and not both'
        )
    if config.target is not None and not (config.target / "config.json").is_file():
        raise TrainerError(f"target {config.target} is not a model directory: no config.json")
    if config.threads < 1:
        raise TrainerError(f"threads is {config.threads}; at least one is needed")
    _check_writable(config.output_dir)
    run = TrainerRun(
        output_dir=config.output_dir,
        target=config.target,
        options=config.options,
        partial=is_partial(config.target) if config.target else config.assets.fetch,
        threads=config.threads,
        policy=config.policy,
    )
    if config.function is not None:
        return resolve(config.function), run
    return _shipped(config.kind, run), run


def expectation(config: TrainerConfig, run: TrainerRun, expect: Expectation) -> Expectation:
    """What a trainer of ours needs of a stream, with what the user expects; to be called with a
    target that is there, before a stream is taken from another node. Raises TrainerError."""
    if config.kind is None:
        return expect
    from draftfeed_consumer.trainers import specforge

    return specforge.expectation(run, expect)


def _check_writable(output_dir: Path) -> None:
    """Now, and not when the first checkpoint is due. The directory is made if it is missing."""
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output_dir):
            pass
    except OSError as error:
        raise TrainerError(f"output_dir {output_dir} cannot be written: {error.strerror}") from None


def resolve(name: str) -> Train:
    """ "module:function" as the function. Raises TrainerError."""
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise TrainerError(f'function = {name!r} is not of the form "module:function"')
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise TrainerError(
            f"cannot import {module_name!r} of function = {name!r}: {error}; its folder must be on "
            "PYTHONPATH"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise TrainerError(f"{module_name!r} has no function {function_name!r}")
    return function  # type: ignore[no-any-return]


def _shipped(kind: str | None, run: TrainerRun) -> Train:
    if kind != "specforge":
        raise TrainerError(f'kind = {kind!r} is not known; there is "specforge"')
    from draftfeed_consumer.trainers import specforge

    specforge.check(run)
    return specforge.train
