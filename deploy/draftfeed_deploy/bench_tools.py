"""`draftfeed bench`: what a part of draftfeed does on the user's own data and machine."""

import argparse
import errno
import math
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.console import Console

from draftfeed_deploy import exits
from draftfeed_deploy.errors import OutputError

CODEC_EPILOG = """\
what it does:
  It takes up to 32 MB of states from the spool, a few chunks of each sample, and encodes and
  decodes them again with every codec that [spool] codec can name, in turns, in about ten seconds.
  Everything that was decoded is compared with what was encoded first. A few samples suffice; more
  kinds of prompts make the ratio more typical. Nothing in the spool is changed, and its producer
  may be running; then it, too, uses the machine, which the figures will show.

how to read it:
  ratio      bytes of the states over bytes encoded. Without loss bf16 values get to about 1.5, as
             fp16 too if that is where they came from, and true fp16 values to about 1.17.
  GB/s       10^9 bytes of states per second, by one thread: the median of the rounds, and the
             least and the most of them. A stream needs its tokens/s times layers times hidden
             size times 2 bytes: encoding on the producer's side, decoding on the consumer's.
  x memcpy   the same over what copying the bytes makes in the same round.
  zstd 2 of 13, behind a line: so many chunks were left to that codec, since the line's own would
             have saved too little. The time for finding out is in the figures.
  *          the implementation of `packed` that draftfeed takes on this machine; all write the
             same bytes. DRAFTFEED_CODEC_ISA forces one.

example:
  draftfeed bench codec --from runs/demo/spool
"""

TARGET_EPILOG = """\
what it does:
  It runs the engine that is configured, on prompts from all over the configured prompt file, with
  1, 2, 4 requests at a time and so on, in up to three rounds each, with capture and without. The
  largest batch is --max-batch, which by default is [engine] batch_size or concurrency. It stops
  before that when two doublings in a row give less than 5% more output each, or when the time is
  up, and says so. Tokens are drawn as configured, but none ends a response: all are --tokens long.
  Nothing is encoded, stored or sent; spool and server of the configuration are not touched.

how to read it:
  output     new tokens per second of decoding, while every request has its first token and none
             its last. A longer response decodes slower at its end than a short one.
  prefill    prompt tokens per second of requests that stop at their first token; nothing comes out
             of a prefix cache.
  first token   from submitting a request to its first token, the median of them
  without    transformers: the same process without hooks. SGLang: another start, without the plugin
             and without the arguments that keep layers. With and without take turns, but for SGLang
             on a GPU, which has room for one: there all with capture comes first.
  memory     on a CPU the most that the engine's processes had resident; on a GPU what its tensors
             took (transformers), or what nvidia-smi says is in use (SGLang). No GPU has run this.

examples:
  draftfeed bench target -c producer.toml
  draftfeed bench target -c producer.toml --max-batch 128 --minutes 20 --out b200.json
  draftfeed plan --scenario my.toml --measured bench-target.json
"""
_OTHER_OUT = "choose another --out"
MOST_BATCH, FEWEST_TOKENS, MOST_TOKENS, MOST_MINUTES = 4096, 8, 4096, 1440.0


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `bench` to the `draftfeed` command."""
    bench = commands.add_parser(
        "bench",
        help="measure the target, or the codecs on your own states",
        description="Measure a part of draftfeed on this machine, with your own data.",
    )
    what = bench.add_subparsers(required=True, metavar="WHAT")
    codec = what.add_parser(
        "codec",
        help="ratio and speed of each codec on the states of a spool",
        description="How small each codec makes the hidden states in a spool, and how fast.",
        epilog=CODEC_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    codec.add_argument(
        "--from",
        dest="spool",
        type=Path,
        required=True,
        metavar="SPOOL",
        help="the spool's directory, which is [spool] dir of its producer",
    )
    codec.add_argument("--json", action="store_true", help="every round's figures, for programs")
    codec.set_defaults(command=_codec)
    _add_target(what)


def _add_target(what: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    target = what.add_parser(
        "target",
        help="output, prefill, first token and memory of the target at each batch",
        description="What the configured engine makes of its target at each batch, with capture "
        "and without.",
        epilog=TARGET_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    target.add_argument(
        "-c", "--config", type=Path, required=True, metavar="producer.toml", help="as it is to run"
    )
    target.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="TABLE.KEY=VALUE",
        help="override one value of the configuration; may be repeated",
    )
    target.add_argument(
        "--max-batch", type=_whole(1, MOST_BATCH), metavar="N", help="default: as configured"
    )
    target.add_argument(
        "--tokens",
        type=_whole(FEWEST_TOKENS, MOST_TOKENS),
        metavar="N",
        help="of each response; default: 32 on a CPU, 128 on a GPU",
    )
    target.add_argument(
        "--minutes",
        type=_minutes,
        metavar="M",
        help="for all of it, loading and starting included; default: 2 on a CPU, 20 on a GPU. "
        "The first batch is measured once, whatever that takes",
    )
    target.add_argument(
        "--out",
        type=Path,
        default=Path("bench-target.json"),
        metavar="FILE",
        help="for `draftfeed plan --measured`; never overwritten (default: bench-target.json)",
    )
    target.add_argument("--json", action="store_true", help="the same as the file, on stdout")
    target.set_defaults(command=_target)


def _whole(least: int, most: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        if text.isascii() and text.isdigit() and least <= int(text[:9]) <= most:
            return int(text)
        raise argparse.ArgumentTypeError(f"must be a number from {least} to {most}")

    return number


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        minutes = math.nan
    if not 0 < minutes <= MOST_MINUTES:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most {MOST_MINUTES:.0f}")
    return minutes


def _target(arguments: argparse.Namespace, console: Console) -> int:
    began = time.monotonic()
    from draftfeed_deploy import config
    from draftfeed_deploy.foreground import interrupt, on_signal
    from draftfeed_producer.config import ProducerConfig

    configured = config.load(arguments.config, ProducerConfig, arguments.set)
    _check_writable(arguments.out)
    with on_signal(interrupt):
        from draftfeed_deploy import bench_target, bench_target_report

        options = bench_target.Options(
            arguments.max_batch, arguments.tokens, arguments.minutes, began
        )
        result = bench_target.measure(configured, str(arguments.config), options, console)
    text = msgspec.json.format(msgspec.json.encode(result))
    shown = [text.decode()] if arguments.json else bench_target_report.lines_of(result)
    sys.stdout.write("\n".join(shown) + "\n")
    _write(arguments.out, text)
    if not arguments.json:
        sys.stdout.write(f"written  {arguments.out}\n")
    return exits.DONE


def _check_writable(path: Path) -> None:
    """Before minutes are spent. Raises OutputError."""
    try:
        if path.exists() or path.is_symlink():
            raise FileExistsError(errno.EEXIST, "it is there already")
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise OutputError(path, error, _OTHER_OUT) from None


def _write(path: Path, text: bytes) -> None:
    """Raises OutputError."""
    try:
        with path.open("xb") as file:
            file.write(text + b"\n")
    except OSError as error:
        raise OutputError(path, error, _OTHER_OUT) from None


def _codec(arguments: argparse.Namespace, console: Console) -> int:
    from draftfeed_deploy import bench_spool

    result = bench_spool.measure(arguments.spool, console)
    if arguments.json:
        text = msgspec.json.format(msgspec.json.encode(result)).decode()
    else:
        text = "\n".join(bench_spool.lines_of(result))
    sys.stdout.write(text + "\n")
    return exits.DONE
