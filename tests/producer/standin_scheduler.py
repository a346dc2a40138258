"""The scheduler of the stand-in: batches of requests without a model, and the real tap.

    standin_scheduler.py ADDRESS

waits at the Unix socket and forks a scheduler for each host that connects.
"""

import multiprocessing.connection as connections
import os
import select
import signal
import sys
import threading
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from draftfeed_producer.engines.sglang import messages
from draftfeed_producer.engines.sglang.messages import Abort, Copied, Response, Settings, Submit
from draftfeed_producer.engines.sglang.tap import Pass, RequestTap
from standin_model import (
    ABORT_ALWAYS,
    ABORT_LATE,
    ABORT_ONCE,
    FINISHED_FIRST,
    FOREIGN_ONCE,
    GARBAGE,
    KILLER,
    NO_ANSWER,
    NOT_FINISHED,
    ONCE,
    SKIP_ALWAYS,
    SKIP_ONCE,
    TOO_LONG,
    TWICE,
    VOCAB,
    WRONG_POSITIONS,
    WRONG_SLAB,
    Knobs,
    next_token,
    states,
)

BAD_ROW = 2
"""Position of a row that does not come, or is another's."""
LATE_PASSES = 2


@dataclass(eq=False)
class Request:
    handle: int
    prompt: list[int]
    max_new_tokens: int
    ends: frozenset[int]
    trick: int
    """0: none."""
    tokens: list[int]
    """Of the prompt and the answer, those included that nobody has looked at yet."""
    computed: int = 0
    """Tokens whose pass was launched, or found in the cache."""
    answered: int = 0
    """Tokens of the answer that were looked at."""
    slots: list[int] = field(default_factory=list)
    finished: bool = False
    uncached: bool = False

    @property
    def fed(self) -> int:
        return len(self.prompt) + self.answered - 1

    @property
    def response(self) -> list[int]:
        return self.tokens[len(self.prompt) : len(self.prompt) + self.answered]


class Part(NamedTuple):
    request: Request
    start: int
    n: int
    samples: bool
    """The pass gives its next token."""


class Launched(NamedTuple):
    parts: list[Part]
    taken: Pass | None


class Slots:
    """KV slots; those of finished requests serve whoever begins alike, until they are needed."""

    def __init__(self, count: int, *, cached: bool) -> None:
        self._free = list(range(1, count))
        self._users: Counter[int] = Counter()
        self._cached: OrderedDict[tuple[int, ...], list[int]] = OrderedDict()
        self._keeps = cached

    def take(self, n: int) -> list[int]:
        while len(self._free) < n:
            self.release(self._cached.popitem(last=False)[1])
        taken, self._free = self._free[:n], self._free[n:]
        self._users.update(taken)
        return taken

    def release(self, slots: list[int]) -> None:
        self._users.subtract(slots)
        self._free += [slot for slot in slots if not self._users[slot]]

    def keep(self, tokens: list[int], slots: list[int], *, cached: bool) -> None:
        """Instead of releasing them."""
        if not self._keeps or not cached or tuple(tokens) in self._cached:
            self.release(slots)
        else:
            self._cached[tuple(tokens)] = slots

    def find(self, prompt: list[int]) -> list[int]:
        """Those of its longest beginning that is there; its last token is always computed."""
        best: list[int] = []
        for tokens, slots in self._cached.items():
            pairs = enumerate(zip(tokens, prompt[:-1], strict=False))
            same = next((i for i, (a, b) in pairs if a != b), min(len(tokens), len(prompt) - 1))
            best = max(best, slots[:same], key=len)
        self._users.update(best)
        return list(best)


class Scheduler:
    def __init__(self, host: Any, raw_settings: str, args: dict[str, Any], mortal: bool) -> None:
        self._host, self._mortal = host, mortal
        self._knobs = knobs = msgspec.convert(args["standin"], Knobs)
        self._most = args["max_running_requests"]
        settings = msgspec.json.decode(raw_settings, type=Settings)
        self._by_slot = settings.by_slot
        longest = knobs.longest or knobs.chunk + self._most
        self._tap = RequestTap(settings, torch.device("cpu"), longest)
        self._tap.attached(knobs.kv_tokens)
        self._pool = Slots(knobs.kv_tokens, cached=settings.by_slot)
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._tried: Counter[tuple[int, ...]] = Counter()
        self._late: list[tuple[int, int]] = []
        """Pass, and handle that is said to be finished then."""
        self._passes = self._decodes = 0

    def run(self) -> None:
        pending: Launched | None = None
        while True:
            self._hear(block=not (pending or self._waiting or self._running))
            if self._retracts():
                pending = self._process(pending)
                self._retract()
            launched = self._launch(self._batch())
            pending = self._process(pending)
            pending = launched if self._knobs.overlap else self._process(launched)

    def _hear(self, *, block: bool) -> None:
        while block or self._host.poll():
            match messages.decode_command(self._host.recv_bytes()):
                case Submit() as submit:
                    self._submit(submit)
                case Abort():
                    self._abort()
            block = False

    def _submit(self, submit: Submit) -> None:
        prompt = submit.input_ids
        trick = prompt[0] if prompt[0] > VOCAB else 0
        self._tried[tuple(prompt)] += 1
        if trick in ONCE and self._tried[tuple(prompt)] > 1:
            trick = 0
        if 0 < self._knobs.refuses_tokens <= len(prompt):
            self._answer(submit.handle, [], "abort", f"{len(prompt)} tokens are too many")
            return
        if trick in (ABORT_ONCE, ABORT_ALWAYS, ABORT_LATE):
            self._answer(submit.handle, [], "abort", "so it was asked")
            self._late.append((self._passes + LATE_PASSES, submit.handle))
            return
        sampling = submit.sampling
        ends = () if sampling.get("ignore_eos") else sampling["stop_token_ids"]
        most = sampling["max_new_tokens"] + (trick == TOO_LONG)
        request = Request(submit.handle, prompt, most, frozenset(ends), trick, list(prompt))
        request.uncached = submit.uncached
        if self._by_slot and not submit.uncached:
            request.slots = self._pool.find(prompt)
            request.computed = len(request.slots)
        self._waiting.append(request)

    def _abort(self) -> None:
        for request in [*self._waiting, *self._running]:
            self._answer(request.handle, request.response, "abort", "all were aborted")
            request.finished = True
            self._pool.release(request.slots)
            request.slots = []
        self._waiting.clear()
        self._running.clear()

    def _batch(self) -> list[Part]:
        parts: list[Part] = []
        room = self._knobs.chunk
        while self._waiting and room and len(self._running) < self._most:
            request = self._waiting[0]
            n = min(room, len(request.tokens) - request.computed)
            parts.append(self._part(request, n))
            room -= n
            if request.computed < len(request.tokens):
                break
            self._running.append(self._waiting.pop(0))
        prefilled = {part.request for part in parts}
        if not parts or self._knobs.mixed:
            self._decodes += 1
            parts += [self._part(r, 1) for r in self._running if r not in prefilled]
        for part in parts:
            if part.samples:
                request = part.request
                request.tokens.append(next_token(request.tokens[-1], len(request.tokens) - 1))
        return parts

    def _part(self, request: Request, n: int) -> Part:
        start = request.computed
        request.computed += n
        request.slots += self._pool.take(n)
        return Part(request, start, n, request.computed == len(request.tokens))

    def _launch(self, parts: list[Part]) -> Launched | None:
        if not parts:
            return None
        self._passes += 1
        self._perhaps_die(after_copy=False)
        handles = np.concatenate([np.full(p.n, p.request.handle, np.int32) for p in parts])
        positions = np.concatenate([np.arange(p.start, p.start + p.n) for p in parts])
        tokens = np.concatenate([p.request.tokens[p.start : p.start + p.n] for p in parts])
        slots = np.concatenate([p.request.slots[p.start : p.start + p.n] for p in parts])
        tricks = np.concatenate([np.full(p.n, p.request.trick) for p in parts])
        bad = positions == BAD_ROW
        tokens[bad & (tricks == FOREIGN_ONCE)] += 1
        wanted = np.flatnonzero(~(bad & np.isin(tricks, (SKIP_ONCE, SKIP_ALWAYS))))
        if not len(wanted):
            return Launched(parts, None)
        packed = torch.from_numpy(states(tokens, positions)).flatten(1).to(torch.bfloat16)
        told = np.where(tricks == WRONG_POSITIONS, positions[::-1] * 50, positions)
        taken = self._tap.take_pass(
            packed,
            wanted,
            handles[wanted],
            told[wanted].astype(np.int32),
            torch.from_numpy(tokens.astype(np.int64)),
            torch.from_numpy(slots.astype(np.int64)) if self._by_slot else None,
        )
        # The next pass writes over it.
        packed.fill_(float("nan"))
        self._tap.copy_pass(taken, torch.Tensor.clone)
        return Launched(parts, taken)

    def _process(self, launched: Launched | None) -> None:
        if launched is None:
            return
        for request in (part.request for part in launched.parts if part.samples):
            self._look_at(request)
        for request in (part.request for part in launched.parts):
            if request.finished and request.trick == FINISHED_FIRST:
                self._tell_finished(request)
        if launched.taken is not None:
            self._tap.hand_over(launched.taken)
        for request in (part.request for part in launched.parts):
            # Once more when it was in the pass that was launched meanwhile.
            if request.finished and request.trick != FINISHED_FIRST:
                self._tell_finished(request)
        self._perhaps_die(after_copy=True)
        self._tell_late()

    def _look_at(self, request: Request) -> None:
        if request.finished:
            return
        request.answered += 1
        if request.trick == KILLER and request.answered == self._knobs.kill_at:
            os._exit(1)
        token = request.response[-1]
        if token not in request.ends and request.answered < request.max_new_tokens:
            return
        request.finished = True
        self._running.remove(request)
        self._answer_badly(request)
        if request.trick != NO_ANSWER:
            reason = "stop" if token in request.ends else "length"
            for _ in range(1 + (request.trick == TWICE)):
                self._answer(request.handle, request.response, reason, "")

    def _answer_badly(self, request: Request) -> None:
        if request.trick == GARBAGE:
            self._tap._told.send(b"\xc1 no such thing")
        if request.trick == WRONG_SLAB:
            one = np.zeros(1, np.int32).tobytes()
            self._tap._tell(Copied(slab=99, handles=one, positions=one, tokens=one))

    def _tell_finished(self, request: Request) -> None:
        if request.trick == NOT_FINISHED:
            return
        slots = np.array(request.slots[: request.fed], np.int32) if request.slots else None
        for _ in range(1 + (request.trick == TWICE)):
            self._tap.finished(request.handle, slots if self._by_slot else None)
        if request.slots:
            fed = slice(0, request.fed)
            self._pool.keep(request.tokens[fed], request.slots[fed], cached=not request.uncached)
            self._pool.release(request.slots[request.fed :])
            request.slots = []

    def _tell_late(self) -> None:
        for at, handle in self._late:
            if at <= self._passes:
                self._tap.finished(handle, np.arange(3) if self._by_slot else None)
        self._late = [late for late in self._late if late[0] > self._passes]

    def _retracts(self) -> bool:
        every = self._knobs.retract_every
        return bool(every) and len(self._running) > 1 and self._decodes >= every

    def _retract(self) -> None:
        self._decodes = 0
        if not self._running:
            return
        request = self._running.pop()
        self._pool.release(request.slots)
        request.slots, request.computed = [], 0
        self._waiting.insert(0, request)

    def _answer(self, handle: int, ids: list[int], reason: str, error: str) -> None:
        response = Response(handle=handle, output_ids=ids, finish_reason=reason, error=error)
        self._host.send_bytes(messages.encode(response))

    def _perhaps_die(self, *, after_copy: bool) -> None:
        mortal = self._mortal and self._knobs.die_after_copy == after_copy
        if mortal and self._passes == self._knobs.die_at_pass:
            os._exit(1)


def serve(address: str) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    torch.set_num_threads(1)
    listener = connections.Listener(address, "AF_UNIX")
    threading.Thread(target=_end_with_tests, daemon=True).start()
    while True:
        host = listener.accept()
        if os.fork():
            host.close()
            continue
        threading.Thread(target=_end_with_host, args=[host.fileno()], daemon=True).start()
        try:
            Scheduler(host, *host.recv()).run()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            pass
        finally:
            sys.stderr.flush()
            os._exit(1)


def _end_with_tests() -> None:
    sys.stdin.read()
    os._exit(0)


def _end_with_host(fd: int) -> None:
    hangup = select.poll()
    hangup.register(fd, 0)
    hangup.poll()
    os._exit(0)


if __name__ == "__main__":
    serve(sys.argv[1])
