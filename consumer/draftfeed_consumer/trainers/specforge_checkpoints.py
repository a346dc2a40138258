"""Where SpecForge's checkpoints lie when several nodes, one after the other, save to one place.

    output_dir/
        drafter-3.17-step4200/        term 3, checkpoint 17 of the run, optimizer step 4200
            training_state_rank0.pt
            training_state.pt         comes last: without it the directory is no checkpoint

A node that was replaced may still be saving when its successor starts, and may finish long after
that. It does no harm:

* A term belongs to one node, so no two of them ever write to one directory.
* The newest checkpoint is that of the highest (term, number), whatever its steps or its date.
  There is no pointer to it, for the one who writes last would win, and that may be the old node.
* A successor looks for it when every producer has granted it the stream, which is what
  `stream.descriptor` waits for. From then on no older node can commit: every checkpoint that a
  producer was told of is there to be found, and one that is finished later counts for nothing,
  unless its successor dies before it has made one. Then it is the newest again, rightly.
"""

import logging
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

logger = logging.getLogger(__name__)

RUN_ID = "drafter"
STATE_FILE = "training_state.pt"
_NAME = re.compile(rf"{RUN_ID}-(\d+)\.(\d+)-step(\d+)")


class Saved(NamedTuple):
    """A checkpoint's directory; they sort from the oldest to the newest."""

    term: int
    number: int
    step: int
    path: Path

    @property
    def complete(self) -> bool:
        return (self.path / STATE_FILE).is_file()


def checkpoint_name(state: dict[str, Any], step: int) -> str:
    """state: of the stream."""
    return f"{RUN_ID}-{state['term']}.{state['number']}-step{step}"


def saved_checkpoints(output_dir: Path) -> list[Saved]:
    """Oldest first, those that are not complete included."""
    saved = []
    for path in output_dir.iterdir() if output_dir.is_dir() else ():
        if match := _NAME.fullmatch(path.name):
            term, number, step = map(int, match.groups())
            saved.append(Saved(term, number, step, path))
    return sorted(saved)


def latest_checkpoint(output_dir: Path) -> Path | None:
    """The newest complete checkpoint, or None when there is none."""
    complete = [saved.path for saved in saved_checkpoints(output_dir) if saved.complete]
    return complete[-1] if complete else None


def rotate(output_dir: Path, made: Path, count: int) -> None:
    """Delete what is older than the newest `count` complete checkpoints. What cannot be deleted
    stays for the next time.

    made: the one just made. When a newer one is there, nothing is deleted: it is of a node that
    took over, or this run was resumed from a checkpoint behind it.
    """
    saved = saved_checkpoints(output_dir)
    complete = [one for one in saved if one.complete]
    if complete[-1].path != made:
        logger.warning("%s is not the newest checkpoint: %s is", made, complete[-1].path)
        return
    for old in saved:
        if old < complete[-count:][0]:
            shutil.rmtree(old.path, ignore_errors=True)
