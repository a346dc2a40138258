"""The requests of a run: those to be submitted again, and those given up."""

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from draftfeed_producer.engines.sglang.messages import Response
from draftfeed_producer.errors import EngineError
from draftfeed_producer.prompts import Prompt
from draftfeed_proto.ids import SampleId

logger = logging.getLogger(__name__)

SUSPECT_DEATHS = 2
MOST_FAULTS = 8
"""Prompts in a row that cannot be made, without a sample in between: then it is the engine."""

GiveUp = Callable[[SampleId, str], None]


@dataclass(eq=False)
class Request:
    prompt: Prompt
    fed: list[int]
    """What is submitted: the prompt, and a given response but for its last token."""
    most_rows: int
    tries: int = 1
    deaths: int = 0
    """Of the engine, while it was in there."""
    response: Response | None = None
    answered_at: float = 0.0
    finished: bool = False

    @property
    def aborted(self) -> bool:
        return self.response is not None and self.response.finish_reason == "abort"

    @property
    def complete(self) -> bool:
        return self.response is not None and (self.finished or self.aborted)

    @property
    def suspect(self) -> bool:
        return self.deaths >= SUSPECT_DEATHS


class Peekable:
    def __init__(self, prompts: Iterator[Prompt]) -> None:
        self._prompts = prompts
        self._next: Prompt | None = None

    def peek(self) -> Prompt | None:
        """None at the end. May block."""
        if self._next is None:
            self._next = next(self._prompts, None)
        return self._next

    def pop(self) -> None:
        self._next = None


class Lost:
    """What was in an engine that died. Suspects come first, each with nobody else in the engine:
    whoever was merely there when it died is cleared, and whatever kills it is found."""

    def __init__(self) -> None:
        self._suspects: deque[Request] = deque()
        self._others: list[Request] = []

    def add(self, request: Request) -> None:
        (self._suspects if request.suspect else self._others).append(request)

    def take(self) -> list[Request]:
        """What may be submitted now, unless a suspect is in the engine."""
        if self._suspects:
            return [self._suspects.popleft()]
        others, self._others = self._others, []
        return others


class Faults:
    """Prompts that cannot be made. Of one whose engine died or refused it, others hear only when
    the engine has made another sample: a broken engine must not use up the list of prompts."""

    def __init__(self, give_up: GiveUp | None = None) -> None:
        self._give_up = give_up
        self._held: list[tuple[SampleId, str]] = []

    def certain(self, id: SampleId, reason: str) -> None:
        """Raises EngineError when there is nobody to tell."""
        if self._give_up is None:
            raise EngineError(f"sample {id}: {reason}")
        self._give_up(id, reason)

    def likely(self, id: SampleId, reason: str) -> None:
        """Raises EngineError when there is nobody to tell, or these are too many in a row."""
        if self._give_up is None:
            raise EngineError(f"sample {id}: {reason}")
        logger.warning("sample %s: %s", id, reason)
        self._held.append((id, reason))
        if len(self._held) == MOST_FAULTS:
            raise EngineError(
                f"sample {id}: {reason}; {MOST_FAULTS} prompts in a row, so it is not the prompts"
            )

    def settle(self) -> None:
        """The engine works, or there is nothing left that could show it."""
        held, self._held = self._held, []
        for id, reason in held:
            self.certain(id, reason)
