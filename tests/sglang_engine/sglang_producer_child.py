"""A producer of its own, to be killed: python sglang_producer_child.py MODEL

Prints the host's process id, and "captured N" as rows come.
"""

import itertools
import logging
import sys
import threading
from pathlib import Path

import msgspec

from draftfeed_producer.target import TargetConfig, load_target
from draftfeed_proto.ids import SampleId
from engine_suite import make_prompts
from sglang_engines import Case, make_engine


def main(path: Path) -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    target = load_target(TargetConfig(path=str(path)))
    engine = make_engine(Case("", (0, 2, 4)), target, max_new_tokens=200)
    prompt = make_prompts([9])[0]
    prompts = (
        msgspec.structs.replace(prompt, id=SampleId("f" * 16, 0, 0, i)) for i in itertools.count()
    )
    threading.Thread(target=lambda: list(engine.run(prompts)), daemon=True).start()
    pause = threading.Event()
    while True:
        pause.wait(0.2)
        logging.info("captured %d", engine.captured)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
