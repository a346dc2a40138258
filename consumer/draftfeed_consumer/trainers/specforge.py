"""SpecForge 0.2.0 trains a DFlash drafter from a live stream, in one process on the CPU."""

import difflib
import importlib.metadata
import importlib.util
import io
import logging
import os
import re
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from draftfeed_consumer.errors import TrainerError
from draftfeed_consumer.trainers import SampleStream, TrainerRun, TrainResult

if TYPE_CHECKING:
    from draftfeed_consumer.trainers.dflash import DraftConfig
    from draftfeed_consumer.trainers.specforge_hooks import AckLedger, Checkpoints, Shelf

logger = logging.getLogger(__name__)

VERSION = "0.2.0"
INSTALL = f"pip install 'draftfeed[specforge]' && pip install --no-deps specforge=={VERSION}"
RUN_ID = "drafter"
SCHEDULE_STEPS = 1 << 20
"""SpecForge gives warm-up as a fraction of a length that a live stream does not have."""

ENVIRONMENT = {
    "FSDP_SHARDING": "NO_SHARD",  # plain DDP; FSDP proper wants a GPU
    "SPECFORGE_DEVICE": "cpu",
    "SPECFORGE_STREAM_WAIT_LOG_INTERVAL": "0",  # it prints
    "LOADER_PREFETCH": "0",  # fetching is a dictionary look-up here
    "CLONE_ON_FETCH": "0",  # the shelf's tensors are copies already
}


class SpecForgeOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`[trainer.options]` of kind = "specforge"."""

    num_layers: int = 1
    block_size: int = 8
    mask_token_id: int | None = None
    """Default: the last spare special token of the target's tokenizer."""
    num_anchors: int = 16
    """Blocks a sample is trained on. The cost of a step is proportional to anchors x block."""
    gamma: float = 4.0
    """Label k of a block weighs exp(-(k-1)/gamma)."""
    init: Literal["random", "target"] = "random"
    """"target" starts from the target's last blocks: learns several times faster."""
    learning_rate: float = 1e-3
    warmup_steps: int = 20
    max_grad_norm: float = 1.0
    batch_size: int = 1
    accumulation_steps: int = 1
    save_interval_steps: int = 100
    max_checkpoints: int = 2
    log_interval_steps: int = 10
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"
    objective_chunk_blocks: int = 0
    """Blocks whose logits exist at a time; each part is computed twice. 0: all, once."""
    resume_from: str | None = None
    """A checkpoint directory, or "latest": the newest one in output_dir, if there is one."""

    def __post_init__(self) -> None:
        for name in (
            "num_layers",
            "num_anchors",
            "batch_size",
            "accumulation_steps",
            "save_interval_steps",
            "max_checkpoints",
            "log_interval_steps",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.block_size < 2:
            raise ValueError("block_size must be at least 2: its first token is given")

    @property
    def window(self) -> int:
        """Samples of one optimizer step."""
        return self.batch_size * self.accumulation_steps


def check(run: TrainerRun) -> None:
    """Raises TrainerError for options that cannot work, and when SpecForge is not installed."""
    parse_options(run.options)
    _ = run.target_dir
    for package in ("torch", "transformers", "accelerate", "pydantic", "yaml", "psutil"):
        if importlib.util.find_spec(package) is None:
            raise TrainerError(f"kind = 'specforge' needs {package}; run: {INSTALL}")
    try:
        found = importlib.metadata.version("specforge")
    except importlib.metadata.PackageNotFoundError:
        raise TrainerError(f"SpecForge is not installed; run: {INSTALL}") from None
    if found != VERSION:
        raise TrainerError(f"works with SpecForge {VERSION}, found {found}; run: {INSTALL}")


def parse_options(options: dict[str, Any]) -> SpecForgeOptions:
    known = SpecForgeOptions.__struct_fields__
    for key in options.keys() - set(known):
        near = difflib.get_close_matches(key, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
        raise TrainerError(f"unknown key 'options.{key}'; {hint}")
    try:
        return msgspec.convert(options, SpecForgeOptions)
    except msgspec.ValidationError as error:
        raise TrainerError(re.sub(r"`\$\.?([^`]*)`", r"options.\1", str(error))) from None


def draft_config(run: TrainerRun, layer_ids: tuple[int, ...]) -> "DraftConfig":
    """The drafter that `run` trains on a stream of these layers. Raises TrainerError."""
    from draftfeed_consumer.trainers.dflash import DraftConfig, pick_mask_token, read_architecture

    options = parse_options(run.options)
    architecture, blocks = read_architecture(run.target_dir)
    mask = options.mask_token_id
    return DraftConfig(
        layer_ids=layer_ids,
        num_target_layers=blocks,
        architecture=architecture,
        num_layers=options.num_layers,
        block_size=options.block_size,
        mask_token_id=pick_mask_token(run.target_dir) if mask is None else mask,
        num_anchors=options.num_anchors,
        gamma=options.gamma,
        objective_chunk_blocks=options.objective_chunk_blocks,
        init=options.init,
        seed=options.seed,
        dtype=options.dtype,
    )


def train(stream: SampleStream, run: TrainerRun) -> TrainResult:
    """Train until the stream ends; a checkpoint every so many steps and one at the end.

    Raises TrainerError, and whatever the stream raises when it does not end normally: then the
    last checkpoint made before stays the newest.
    """
    check(run)
    options = parse_options(run.options)
    resume = _resume_from(options, run.output_dir)
    config = draft_config(run, stream.descriptor.layer_ids)
    _check_target(stream, config)
    run.output_dir.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        stack.enter_context(_environment(ENVIRONMENT))
        stack.enter_context(_threads(run.threads))
        stack.enter_context(_process_group())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="draftfeed-")))
        training = _Training(stream, run, options, config, resume, folder)
        stack.callback(training.close)
        return training.fit()


class _Training:
    """One call of `train`: SpecForge's trainer and our parts of it."""

    def __init__(
        self,
        stream: SampleStream,
        run: TrainerRun,
        options: SpecForgeOptions,
        config: "DraftConfig",
        resume: Path | None,
        folder: Path,
    ) -> None:
        from specforge.runtime.data_plane.streaming_ref_channel import StreamingRefChannel

        from draftfeed_consumer.trainers import dflash
        from draftfeed_consumer.trainers.specforge_hooks import Feeder, Shelf

        dflash.save_config(config, run.output_dir)
        step = _load_stream_state(stream, resume) if resume else None
        # One optimizer step under way and the next one waiting.
        self._shelf: Shelf = Shelf(capacity=2 * options.window)
        channel = StreamingRefChannel(str(folder / "samples.jsonl"))
        self._feeder: Feeder = Feeder(stream, self._shelf, channel, run.policy)
        self._trainer, self._ledger, self._checkpoints = _assemble(
            stream, self._shelf, channel, run, options, config, resume, step
        )

    def fit(self) -> TrainResult:
        self._feeder.start()
        try:
            steps = self._trainer.fit()
        except RuntimeError as error:
            # SpecForge passes on the text of an error; this is the error itself.
            cause = self._feeder.error or self._ledger.error or self._checkpoints.error
            if cause is not None:
                raise cause from error
            raise
        return self._result(steps)

    def close(self) -> None:
        self._feeder.stop()

    def _result(self, steps: int) -> TrainResult:
        tail = tuple(self._shelf.tail)
        if tail:
            names = ", ".join(str(id) for id in tail)
            logger.warning("%d samples did not fill a last step, untrained: %s", len(tail), names)
        return TrainResult(
            steps, self._ledger.trained, self._feeder.rejected, tail, self._checkpoints.last
        )


def _assemble(
    stream: SampleStream,
    shelf: "Shelf",
    channel: Any,
    run: TrainerRun,
    options: SpecForgeOptions,
    config: "DraftConfig",
    resume: Path | None,
    step: int | None,
) -> tuple[Any, "AckLedger", "Checkpoints"]:
    import torch
    from specforge.algorithms.dflash.providers import create_registration
    from specforge.launch import build_disagg_online_consumer

    from draftfeed_consumer.trainers import dflash
    from draftfeed_consumer.trainers.specforge_hooks import AckLedger, Checkpoints, ShelfStore

    algorithm = create_registration()
    model = dflash.build_training_model(config, run.target_dir)
    ledger = AckLedger(stream, shelf, lambda: _numbers(trainer._controller.last_metrics), step)
    torch.manual_seed(options.seed)  # anchors are drawn from this
    with _quiet():
        trainer = build_disagg_online_consumer(
            algorithm=algorithm,
            feature_store=ShelfStore(shelf, config.torch_dtype),
            channel=channel,
            draft_model=model,
            optimizer_factory=_optimizer_factory(options),
            run_id=RUN_ID,
            output_dir=str(run.output_dir),
            batch_size=options.batch_size,
            accumulation_steps=options.accumulation_steps,
            save_interval=options.save_interval_steps,
            metadata_store=ledger,
            logger=_log_step,
            log_interval=options.log_interval_steps,
            strategy_kwargs=_resume_contract(algorithm, model, config),
            max_checkpoints=options.max_checkpoints,
            resume_from=str(resume) if resume else None,
        )
    checkpoints = Checkpoints(
        stream,
        ledger,
        output_dir=str(run.output_dir),
        run_id=RUN_ID,
        max_checkpoints=options.max_checkpoints,
    )
    trainer._controller._checkpoint_mgr = checkpoints
    ledger.on_step = partial(_checkpoint_when_wanted, stream, trainer._controller, options)
    trainer._controller._make_progress_bar = lambda: None  # the terminal is not ours
    return trainer, ledger, checkpoints


def _checkpoint_when_wanted(
    stream: SampleStream, controller: Any, options: SpecForgeOptions
) -> None:
    """SpecForge looks at its interval after every step: with 1 it saves after this one."""
    controller.save_interval = 1 if stream.checkpoint_wanted else options.save_interval_steps


def _optimizer_factory(options: SpecForgeOptions) -> Any:
    from specforge.optimizer import BF16Optimizer

    def make(module: Any) -> Any:
        return BF16Optimizer(
            module,
            lr=options.learning_rate,
            max_grad_norm=options.max_grad_norm,
            lr_scheduler="constant",
            total_steps=SCHEDULE_STEPS,
            warmup_ratio=options.warmup_steps / SCHEDULE_STEPS,
        )

    return make


def _resume_contract(algorithm: Any, model: Any, config: "DraftConfig") -> Any:
    """What must be the same when a checkpoint is resumed; SpecForge compares it."""
    from specforge.algorithms.common.providers import (
        MODEL_PROVENANCE_CONTRACT_KEY,
        StepRuntimeConfig,
    )

    contract = dict(algorithm.providers.step.resume_contract(None, model.draft_model, model))
    contract[MODEL_PROVENANCE_CONTRACT_KEY] = tuple(sorted(config.architecture.items()))
    return StepRuntimeConfig(
        options={}, resume_contract=contract, allowed_missing_checkpoint_keys=frozenset()
    )


def _resume_from(options: SpecForgeOptions, output_dir: Path) -> Path | None:
    from draftfeed_consumer.trainers.specforge_hooks import latest_checkpoint

    newest = latest_checkpoint(output_dir)
    if options.resume_from is None and newest is not None:
        raise TrainerError(
            f"output_dir {output_dir} holds the checkpoints of another run, which this one would "
            f'overwrite; set options.resume_from = "latest" or choose another directory'
        )
    if options.resume_from is None or options.resume_from == "latest":
        return newest
    return Path(options.resume_from).expanduser()


def _load_stream_state(stream: SampleStream, checkpoint: Path) -> int:
    """Tell the stream what the checkpoint has trained; returns its step. Raises TrainerError."""
    from draftfeed_consumer.trainers import dflash

    state = dflash.read_state(checkpoint)
    if "draftfeed" not in state:
        raise TrainerError(f"{checkpoint} was not made by this trainer: it has no stream state")
    stream.load_state_dict(state["draftfeed"])
    return int(state["global_step"])


def _check_target(stream: SampleStream, config: "DraftConfig") -> None:
    served = stream.descriptor
    for name in ("hidden_size", "vocab_size"):
        ours, theirs = config.architecture[name], getattr(served, name)
        if ours != theirs:
            raise TrainerError(f"the target's {name} is {ours}, the stream's is {theirs}")
    if served.num_layers != config.num_target_layers:
        raise TrainerError(
            f"the target has {config.num_target_layers} layers, the stream's {served.num_layers}"
        )


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    numbers = {name: value for name, value in metrics.items() if isinstance(value, (int, float))}
    return {name: float(value) for name, value in numbers.items()}


def _log_step(metrics: dict[str, Any], step: int) -> None:
    logger.info("step %d: loss %.3f, accuracy %.3f", step, metrics["loss"], metrics["acc"])


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """SpecForge reads these at scattered places; restored afterwards."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _threads(count: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _process_group() -> Iterator[None]:
    """A gloo group of one: its store lives in this process, so no port is opened for it."""
    import torch.distributed as dist

    if dist.is_initialized():
        raise TrainerError("a torch process group exists already; train in a process of its own")
    store = dist.HashStore()  # type: ignore[attr-defined]  # pyright: ignore  # exported, not by name
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _quiet() -> Iterator[None]:
    """SpecForge prints while it assembles, and calls torch in ways that torch warns about."""
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()) as printed:
        warnings.simplefilter("ignore")
        yield
    if text := printed.getvalue().strip():
        logger.debug("%s", text)
