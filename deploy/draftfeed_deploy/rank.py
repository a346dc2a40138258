"""A process that is one rank of `draftfeed consumer --ranks N`, before it has imported torch."""

import ctypes
import os
import signal

PR_SET_PDEATHSIG = 1
PARENT = "DRAFTFEED_RANKS_PARENT"
"""Its process id, in the environment."""


def is_rank() -> bool:
    """Whether this process was started by torchrun, or by us."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def end_with_parent() -> None:
    """SIGTERM when whoever started it is gone. Its session is its own, so nothing else would tell
    it, and it would train on beside its successors."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.environ.get(PARENT, str(os.getppid())) != str(os.getppid()):  # it had gone before that
        os.kill(os.getpid(), signal.SIGTERM)
