"""What SpecForge needs of its process while it trains, given for that time and taken back."""

import io
import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout

from draftfeed_consumer.errors import TrainerError

logger = logging.getLogger(__name__)

ENVIRONMENT = {
    "FSDP_SHARDING": "NO_SHARD",  # plain DDP, which one process needs no more of
    "SPECFORGE_STREAM_WAIT_LOG_INTERVAL": "0",  # it prints
    "LOADER_PREFETCH": "0",  # fetching is a dictionary look-up here
    "CLONE_ON_FETCH": "0",  # the shelf's tensors are copies already
}


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
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
def threads(count: int) -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def process_group(device: str) -> Iterator[None]:
    """A group of one: its store lives in this process, so no port is opened for it."""
    import torch.distributed as dist

    if dist.is_initialized():
        raise TrainerError("a torch process group exists already; train in a process of its own")
    store = dist.HashStore()  # type: ignore[attr-defined]  # pyright: ignore  # exported, not by name
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def quiet() -> Iterator[None]:
    """SpecForge prints while it assembles, and calls torch in ways that torch warns about."""
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()) as printed:
        warnings.simplefilter("ignore")
        yield
    if text := printed.getvalue().strip():
        logger.debug("%s", text)
