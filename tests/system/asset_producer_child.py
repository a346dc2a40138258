"""A producer of nothing but a target's files, in a process that can be killed. It prints where it
listens, and when its input ends how many bytes of them it has sent.

asset_producer_child.py SPOOL TARGET BIND
"""

import sys
from pathlib import Path

from harness import Producer

spool, target, bind = sys.argv[1:]
producer = Producer(Path(spool), bind, target=Path(target))
print(producer.address, flush=True)  # noqa: T201
sys.stdin.read()
print(producer.server.statistics().asset_bytes, flush=True)  # noqa: T201
producer.close()
