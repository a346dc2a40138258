"""A service whose loop that moves data stands still, while its other threads live, from the moment
on when there is a file `stuck`: `stuck_child.py producer|consumer OPTIONS`."""

import sys
import threading
from pathlib import Path
from typing import Any

from draftfeed_consumer.client import Client
from draftfeed_deploy.cli import main
from draftfeed_producer.server import Server

STUCK = Path("stuck")


def stand_still(owner: type[Any], name: str) -> None:
    """In a call that each turn of the loop makes."""
    method = getattr(owner, name)

    def instead(self: Any, *arguments: Any) -> Any:
        if STUCK.exists():
            threading.Event().wait()
        return method(self, *arguments)

    setattr(owner, name, instead)


if __name__ == "__main__":
    stand_still(Server, "_ping")
    stand_still(Client, "_wait")
    sys.exit(main())
