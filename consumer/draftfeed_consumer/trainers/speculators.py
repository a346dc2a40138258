"""`speculators train` with the backend `draftfeed`, also where there is no GPU.

    python -m draftfeed_consumer.trainers.speculators --hidden-states-backend draftfeed \\
        --data-path EXPORT --target-layer-ids ... --verifier-name-or-path ...

Every argument is speculators' own. It looks for backends once, while it is imported, and has no
other way to name one than to import it first. On the CPU add `--draft-attn-impl sdpa
--loss-implementation eager`: its defaults are compiled for GPUs.

Exit codes: 0 done, 2 wrong input, and whatever speculators ends with.
"""

import importlib
import importlib.metadata
import sys
from collections.abc import Sequence

from draftfeed_consumer.errors import ConsumerError, ExportError

VERSION = "0.9.0"
BACKEND = "draftfeed_consumer.trainers.speculators_backend"
INSTALL = (
    "in the checkout run: pip install '.[speculators]' && "
    f"pip install --no-deps speculators=={VERSION} "
    f"hs-connectors=={VERSION}"
)


def main(argv: Sequence[str] | None = None) -> int:
    try:
        check_installed()
        train(list(sys.argv[1:] if argv is None else argv))
    except ConsumerError as error:
        sys.stderr.write(f"draftfeed: {error}\n")
        return 2
    return 0


def check_installed() -> None:
    """Raises ExportError."""
    for package in ("speculators", "hs-connectors"):
        try:
            found = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            raise ExportError(f"{package} is not installed; {INSTALL}") from None
        if found != VERSION:
            raise ExportError(f"works with {package} {VERSION}, found {found}; {INSTALL}")


def train(argv: list[str]) -> None:
    """Raises ExportError, SystemExit for arguments that speculators refuses, and what it raises."""
    import torch

    importlib.import_module(BACKEND)  # registers itself; the next one looks for what there is
    from speculators.train import cli
    from speculators.train.config import TrainConfig

    config = TrainConfig.resolve(argv)
    if not torch.accelerator.is_available():
        _run_on_cpu()
    cli.main(config)


def _run_on_cpu() -> None:
    """Where it takes for granted that there is an accelerator."""
    import torch
    from speculators.train import checkpointer, cli, trainer

    class CpuTrainer(trainer.Trainer):  # type: ignore[misc]
        """Both are assigned in the constructor: an index of a device, and "cuda"."""

        local_rank = property(lambda self: "cpu", lambda self, value: None)
        device_type = property(lambda self: "cpu", lambda self, value: None)

    cli.Trainer = CpuTrainer  # pyright: ignore
    checkpointer.get_current_device = lambda: "cpu"  # pyright: ignore
    torch.accelerator.synchronize = lambda device=None: None


if __name__ == "__main__":
    sys.exit(main())
