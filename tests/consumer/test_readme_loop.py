"""The training loop in README.md, as it is printed there."""

import re
from pathlib import Path
from typing import Any

import tiny_target
from memory_stream import MemoryStream

README = (Path(__file__).parents[2] / "README.md").read_text()
[LOOP] = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_it_makes_the_checkpoint_that_a_producer_with_a_full_spool_waits_for() -> None:
    """One at the end alone would never come: the producer generates no more until there is one."""
    saved: list[int] = []

    def save(model: object, state: dict[str, Any]) -> None:
        saved.append(len(state["trained"]))

    names: dict[str, Any] = {"my_step": lambda *_: 1.0, "my_model": None, "save": save}
    exec(LOOP, names)
    stream = MemoryStream(tiny_target.DESCRIPTOR, tiny_target.items(4))
    stream.checkpoint_wanted = True
    names["train"](stream, None)
    assert saved == [1, 4]
    assert stream.committed_numbers == [1, 2]
