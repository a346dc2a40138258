"""`draftfeed export`: a spool's samples as files for another trainer."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from draftfeed_deploy import exits

if TYPE_CHECKING:
    from draftfeed_deploy.export import Exported

EPILOG = """\
what it writes, for a sample of n tokens fed through L layers of width H:
  specforge     one .ckpt each: input_ids, loss_mask int64[n], hidden_states bf16[n, L*H].
                For offline DFlash of SpecForge 0.2.0: [data] hidden_states_path.
  speculators   an Arrow data set with input_ids, loss_mask and seq_len, and for each row k
                hidden_states/hs_k.safetensors: token_ids int64[n], hidden_states [n, L, H] in the
                stream's dtype. For speculators 0.9.0: --data-path. The last of the L layers is
                the output of the target's last block, before the norm: speculators makes its
                labels from it, and does not give it to the drafter. It is in the stream as a
                tapped layer or with [target] final = "prenorm"; from a stream with "postnorm",
                which is what SGLang gives, it is computed with --target.
  both          draftfeed.json: the layers in the numbers of that trainer, and the stream.
                samples.jsonl: the id and key of the sample in each file.

The last token of a sample was sampled and never fed, so it has no states and is left out. A sample
is left out when it has values that are not finite or rows of zeros, when it is damaged, and for
specforge when no two adjacent supervised tokens have states. All are counted.

OUT appears when everything is in it. What a killed export leaves is OUT.part-NUMBER; delete it.
The producer may be running. The files are not compressed: about 1.5 times what the spool takes.
A sample that has been trained and freed is not in the spool any more, so for a whole set let the
producer run without a consumer, with room in [spool] quota_bytes. Nothing here counts what is
trained: exactly once is a promise of the stream alone.

examples:
  draftfeed export --from runs/mine/spool --format specforge runs/mine/specforge
  draftfeed export --from runs/mine/spool --format speculators runs/mine/speculators

exit codes: 0 done; 1 done, but without the samples that are damaged; 2 nothing was exported
"""


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `export` to the `draftfeed` command."""
    export = commands.add_parser(
        "export",
        help="write a spool's samples as files for SpecForge or speculators",
        description="Write the samples of a spool as files that another trainer reads.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    export.add_argument(
        "--from", dest="spool", type=Path, required=True, metavar="SPOOL", help="its directory"
    )
    export.add_argument("--format", required=True, choices=["specforge", "speculators"])
    export.add_argument(
        "--target",
        type=Path,
        metavar="DIR",
        help="the target's model directory, for speculators: its final norm is undone in a stream "
        "whose final state is postnorm, and one that says prenorm is checked",
    )
    export.add_argument("out", type=Path, metavar="OUT", help="empty or not there yet")
    export.set_defaults(command=_export)


def _export(arguments: argparse.Namespace, console: Console) -> int:
    from draftfeed_deploy import packages
    from draftfeed_deploy.foreground import interrupt, on_signal

    packages.require_for_export(arguments.format)
    with on_signal(interrupt):
        from draftfeed_deploy.export import export
        from draftfeed_producer.spool.reader import Reader
        from draftfeed_proto import codecs

        codecs.PACKED.prepare()
        done = export(
            Reader(arguments.spool), arguments.format, arguments.out, console, arguments.target
        )
    sys.stdout.write("\n".join(lines_of(done, arguments.out)) + "\n")
    return exits.FAILED if done.bad else exits.DONE


def lines_of(done: "Exported", out: Path) -> list[str]:
    """For people."""
    bad = [f"damaged, left out: {bad.name}: {bad.reason}" for bad in done.bad]
    counted = [f"left out: {count} {reason}" for reason, count in done.note.left_out.items()]
    name = "target_layer_ids" if done.note.format == "specforge" else "--target-layer-ids"
    layers = " ".join(map(str, done.note.layer_ids))
    return [*bad, *counted, f"{done.note.samples} samples in {out}; {name} {layers}"]
