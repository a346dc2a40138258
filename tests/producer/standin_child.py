"""A producer over the stand-in, for tests that kill it: standin_child.py PYTHON TARGET

Prints the process of its engine when that has made a sample, and waits.
"""

import sys

from draftfeed_producer.engines import SGLangConfig
from draftfeed_producer.engines.sglang.engine import SGLangEngine
from draftfeed_producer.target import TargetConfig, load_target
from standin_engine import LAYER_IDS, make_prompts

if __name__ == "__main__":
    config = SGLangConfig(python=sys.argv[1], args={"standin": {"children": 2, "deaf": True}})
    target = load_target(TargetConfig(path=sys.argv[2], revision="r"))
    engine = SGLangEngine(config, target, LAYER_IDS)
    next(engine.run(iter(make_prompts([5, 6]))))
    assert engine._engine._host is not None
    print(engine._engine._host.pid, flush=True)  # noqa: T201
    sys.stdin.read()
