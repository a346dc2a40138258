"""The host process: runs `sgl.Engine` for a producer that does not import sglang.

    python -m draftfeed_producer.engines.sglang.host COMMANDS TOLD

COMMANDS and TOLD are ZeroMQ addresses. The first line of standard input is a `messages.Start`;
standard input is at its end when the producer is. A crash of SGLang's takes its whole process
tree along; that is why it has one of its own.
"""

# SGLang is not installed where this is checked.
# pyright: reportMissingImports=false

import asyncio
import importlib
import os
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from draftfeed_producer.engines.sglang import messages, plugin
from draftfeed_producer.engines.sglang.messages import (
    Abort,
    Failed,
    Progress,
    Quit,
    Response,
    Start,
    Started,
    Submit,
)

_WATCHED_TOKENS = 8
"""Of a response, between two words of its progress: fewer, and the host would be busy with them."""


def main(commands_address: str, told_address: str) -> None:
    start = msgspec.json.decode(sys.stdin.buffer.readline(), type=Start)
    directory = Path(commands_address.removeprefix("ipc://")).parent
    threading.Thread(target=_end_with_producer, args=(directory,), daemon=True).start()
    context: zmq.Context[Any] = zmq.Context()
    commands, told = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    commands.connect(commands_address)
    told.connect(told_address)
    try:
        engine, version = _start_engine(start)
    # SGLang refuses arguments in a dozen ways; the user needs the one line of it.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        told.send(messages.encode(Failed(_one_line(error))))
        told.close(linger=5000)
        sys.exit(1)
    told.send(messages.encode(_started(engine, version)))
    asynchronous = zmq.asyncio.Socket.from_socket(commands)
    engine.loop.run_until_complete(_Host(engine, told).serve(asynchronous))
    engine.shutdown()


def _end_with_producer(directory: Path) -> None:
    """The producer was killed: so is all that it started, however busy. `directory` holds the
    sockets, which it would have removed.

    Not through `sys.stdin`: its lock would be held when the interpreter ends, and abort it.
    """
    while os.read(0, 1):
        pass
    shutil.rmtree(directory, ignore_errors=True)
    os.killpg(os.getpgrp(), signal.SIGKILL)


class _Host:
    def __init__(self, engine: Any, told: Any) -> None:
        self._engine, self._told = engine, told
        self._requests: set[asyncio.Task[None]] = set()

    async def serve(self, commands: Any) -> None:
        """Until Quit."""
        while True:
            match messages.decode_command(await commands.recv()):
                case Submit() as submit:
                    task = asyncio.ensure_future(self._generate(submit))
                    self._requests.add(task)
                    task.add_done_callback(self._requests.discard)
                case Abort():
                    self._engine.tokenizer_manager.abort_request(abort_all=True)
                case Quit():
                    return

    async def _generate(self, submit: Submit) -> None:
        try:
            out = await (self._watch(submit) if submit.watched else self._start(submit))
            response = _response(submit.handle, out)
        except Exception as error:  # noqa: BLE001
            # A request that SGLang does not take is that request's trouble.
            response = Response(
                handle=submit.handle, output_ids=[], finish_reason="abort", error=_one_line(error)
            )
        self._told.send(messages.encode(response))

    def _start(self, submit: Submit, **options: Any) -> Any:
        return self._engine.async_generate(
            input_ids=submit.input_ids,
            rid=plugin.rid_of(submit.handle),
            cache_salt=plugin.rid_of(submit.handle) if submit.uncached else None,
            **{"sampling_params": submit.sampling, **options},
        )

    async def _watch(self, submit: Submit) -> dict[str, Any]:
        """The last of its parts, with all tokens, where parts have those that are new only."""
        sampling = {**submit.sampling, "stream_interval": _WATCHED_TOKENS}
        ids: list[int] = []
        out: dict[str, Any] = {}
        async for out in await self._start(submit, sampling_params=sampling, stream=True):
            now = time.monotonic()
            tokens, new = out["meta_info"]["completion_tokens"], list(out["output_ids"])
            ids = new if len(new) == tokens else [*ids, *new]
            progress = Progress(handle=submit.handle, tokens=tokens, at=now)
            self._told.send(messages.encode(progress))
        return {**out, "output_ids": ids}


def _start_engine(start: Start) -> tuple[Any, str]:
    # Not here, but where `[engine] python` is.
    sglang: Any = importlib.import_module("sglang")
    version = str(sglang.__version__)
    if version not in start.known_versions:
        known = ", ".join(start.known_versions)
        raise ValueError(
            f"SGLang is {version}; the capture is written for {known}, whose functions it hooks"
        )
    engine = sglang.Engine(**start.args)
    if start.captures:
        _check_plugin()
    return engine, version


def _check_plugin() -> None:
    """SGLang only logs when a plugin does not load."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    if plugin.loaded is None:
        named = os.environ.get("SGLANG_PLUGINS")
        why = f"SGLANG_PLUGINS={named} leaves it out"
        if named is None:
            why = f"is draftfeed installed for {sys.executable}, not only on its path?"
        raise ValueError(f"SGLang did not load the plugin `draftfeed`: {why}")
    if plugin.SAMPLE not in HookRegistry._patched:
        raise ValueError(f"SGLang loaded the plugin, but did not hook {plugin.SAMPLE}")


def _response(handle: int, out: dict[str, Any]) -> Response:
    reason = out["meta_info"]["finish_reason"] or {"type": "abort"}
    return Response(
        handle=handle,
        output_ids=list(out["output_ids"]),
        finish_reason=reason["type"],
        error=str(reason.get("message", "")),
    )


def _started(engine: Any, version: str) -> Started:
    info = engine._scheduler_init_result.scheduler_infos[0]
    return Started(
        version=version,
        kv_tokens=int(info["max_total_num_tokens"]),
        # SGLang refuses an input of exactly so many.
        most_input_tokens=int(info["max_req_input_len"]) - 1,
    )


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{lines[0]} ({type(error).__name__})" if lines else type(error).__name__


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
