"""The host process of each arm of capture.py: the producer's own, as it is, without its plugin, or
with its stages timed.

    ARM=... python -m capture_host COMMANDS TOLD

SGLang's scheduler is spawned, and a spawned process imports the module that its parent ran: what
stands here outside of the last `if` happens there, too, before SGLang loads any plugin.
"""

import os
import sys

from draftfeed_producer.engines.sglang import host
from draftfeed_producer.engines.sglang.messages import VARIABLE

ARM = "DRAFTFEED_BENCHMARK_ARM"
"""off, aux, on or timed; see capture.py."""
STAGES = "DRAFTFEED_BENCHMARK_STAGES"
"""Where the scheduler of the timed arm leaves its figures."""


def _nothing_to_check() -> None:
    """Without the plugin there is nothing that could have failed to load."""


if os.environ.get(ARM) in ("off", "aux"):
    os.environ.pop(VARIABLE, None)
    host._check_plugin = _nothing_to_check
elif os.environ.get(ARM) == "timed":
    import capture_stages

    capture_stages.install(os.environ[STAGES])

if __name__ == "__main__":
    host.main(sys.argv[1], sys.argv[2])
