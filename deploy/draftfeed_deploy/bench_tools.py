"""`draftfeed bench`: what a part of draftfeed does on the user's own data and machine."""

import argparse
import sys
from pathlib import Path

import msgspec
from rich.console import Console

from draftfeed_deploy import exits

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


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `bench` to the `draftfeed` command."""
    bench = commands.add_parser(
        "bench",
        help="measure the codecs on your own states",
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


def _codec(arguments: argparse.Namespace, console: Console) -> int:
    from draftfeed_deploy import bench_spool

    result = bench_spool.measure(arguments.spool, console)
    if arguments.json:
        text = msgspec.json.format(msgspec.json.encode(result)).decode()
    else:
        text = "\n".join(bench_spool.lines_of(result))
    sys.stdout.write(text + "\n")
    return exits.DONE
