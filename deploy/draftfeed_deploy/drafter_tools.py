"""`draftfeed evaluate` and `draftfeed drafter`: what a run has trained, judged and handed on."""

import argparse
import contextlib
import sys
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console

from draftfeed_deploy import exits, packages
from draftfeed_deploy.errors import ConfigError, OutputError

if TYPE_CHECKING:
    from draftfeed_deploy.evaluation import Findings

HELDOUT_PROMPTS = 16
"""Shipped in data/heldout.jsonl; the demo does not train on them."""
DRAFTER_HELP = (
    "a checkpoint; or a run's [trainer] output_dir, for its newest checkpoint; or a directory with "
    "config.json and model.safetensors"
)
EVALUATE_EPILOG = f"""\
what it does:
  It decodes each prompt greedily, twice: with the drafter, whose drafts the target verifies a
  block at a time, and with the target alone. Both must give the same tokens. Exit code 0 when they
  do for every prompt; 1 when not, and the prompts are named.

how to read it:
  accepted length  new tokens per verifying pass of the target, one of its own included. 1.00 is no
                   draft accepted; the most is the drafter's block size. It counts passes: whether
                   that saves time depends on the machine and on what serves the model.
  by position      how often the drafts up to this place of the block were all accepted. They add
                   up to the accepted length less 1.
  same but for rounding  the outputs part at a token that the target likes as much as the other, as
                   far as its dtype tells. It happens in bfloat16, for a pass over a block and
                   passes over single tokens add in another order. It is counted as the same.
  Few tokens a prompt make it smaller: the last block is often cut off.

examples:
  draftfeed evaluate runs/demo/checkpoints --target ~/.cache/draftfeed/smollm2-135m-instruct
  draftfeed evaluate checkpoints/drafter-1.4-step200 --target models/Qwen3-8B \\
      --heldout heldout.jsonl --max-new-tokens 512 --device cuda --dtype bfloat16

Without --heldout it takes the {HELDOUT_PROMPTS} prompts that the demo keeps back. Judge a drafter
of your own on prompts like yours, in the form that the producer takes; none of them may be among
those it was trained on.
"""
EXPORT_EPILOG = """\
It writes model.safetensors and config.json, with the fields that z-lab's DFlash drafters have. The
directory holds no embedding and no head: they are the target's, and whoever loads a drafter takes
them from there. SGLang, SpecForge and speculators' converter read it; docs/trainers.md says how.
The layer ids in it are those of the stream (k is the output of block k).
With --dtype float32 the weights are exactly those that were trained. To serve such a directory,
name a dtype: SGLang would choose float16 for it, in which a drafter's states can overflow.

example:
  draftfeed drafter export runs/demo/checkpoints runs/demo/drafter
"""


def add_commands(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `evaluate` and `drafter` to the `draftfeed` command."""
    _add_evaluate(commands)
    drafter = commands.add_parser(
        "drafter",
        help="hand a trained drafter on to those who serve it",
        description="What to do with a drafter that a run has trained.",
    )
    actions = drafter.add_subparsers(required=True, metavar="ACTION")
    export = actions.add_parser(
        "export",
        help="as a Hugging Face directory",
        description="Write a drafter as a Hugging Face directory, which serving engines and other "
        "trainers load.",
        epilog=EXPORT_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    export.add_argument("drafter", type=Path, metavar="CHECKPOINT", help=DRAFTER_HELP)
    export.add_argument("out", type=Path, metavar="OUT", help="empty or not there yet")
    export.add_argument(
        "--dtype",
        default="bfloat16",
        choices=["float32", "bfloat16"],
        help="of the weights (default: bfloat16, in which drafters are served); see below",
    )
    export.set_defaults(command=_export)


def _add_evaluate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = commands.add_parser(
        "evaluate",
        help="how many tokens a target call a drafter gets accepted",
        description="Decode held-out prompts with a drafter and its target, and count what the "
        "target accepts.",
        epilog=EVALUATE_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("drafter", type=Path, metavar="DRAFTER", help=DRAFTER_HELP)
    parser.add_argument(
        "--target", type=Path, required=True, metavar="DIR", help="the target's model directory"
    )
    parser.add_argument(
        "--heldout", type=Path, metavar="FILE", help="prompts as JSON lines; see below"
    )
    parser.add_argument(
        "--prompts", type=_positive, metavar="N", help="only the first N (default: all)"
    )
    parser.add_argument(
        "--max-new-tokens",
        type=_drafted,
        default=64,
        metavar="N",
        help="for each prompt (default: 64)",
    )
    parser.add_argument("--device", default="cpu", help="such as cuda or cuda:1 (default: cpu)")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=["float32", "bfloat16"],
        help="of target and drafter (default: float32)",
    )
    parser.add_argument("--json", action="store_true", help="with each prompt's, for programs")
    parser.set_defaults(command=_evaluate)


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def _drafted(text: str) -> int:
    number = int(text)
    if number < 2:
        raise argparse.ArgumentTypeError("must be at least 2: no draft comes before the first")
    return number


def _evaluate(arguments: argparse.Namespace, console: Console) -> int:
    packages.require_for_drafters()
    from draftfeed_deploy.evaluation import Setting, measure, read_prompts
    from draftfeed_deploy.spool_contents import Progressing

    _check_device(arguments.device)
    with _heldout(arguments.heldout) as heldout:
        setting = Setting(
            drafter=arguments.drafter,
            target=arguments.target.expanduser(),
            heldout=heldout,
            prompts=arguments.prompts,
            max_new_tokens=arguments.max_new_tokens,
            device=arguments.device,
            dtype=arguments.dtype,
        )
        prompts = read_prompts(setting)
    with Progressing(console, len(prompts.prompts), "decoding") as progress:
        findings = measure(setting, prompts, lambda: progress.add(1))
    text = msgspec.json.format(msgspec.json.encode(findings)).decode() if arguments.json else None
    sys.stdout.write((text or "\n".join(lines_of(findings))) + "\n")
    return exits.DONE if findings.same_as_greedy else exits.FAILED


def _check_device(name: str) -> None:
    """Raises ConfigError."""
    import torch

    try:
        torch.empty(0, device=name)
    # torch has an error of its own for each way in which a device is not there.
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"--device {name}", str(error).partition("\n")[0]) from None


@contextlib.contextmanager
def _heldout(path: Path | None) -> Iterator[Path]:
    if path is not None:
        yield path
        return
    with resources.as_file(resources.files("draftfeed_deploy.data") / "heldout.jsonl") as shipped:
        yield shipped


def lines_of(findings: "Findings") -> Iterator[str]:
    positions = enumerate(findings.acceptance_by_position, start=1)
    yield f"drafter          {findings.drafter}"
    yield f"target           {findings.target}, {findings.dtype} on {findings.device}"
    yield f"prompts          {len(findings.prompts)} of {findings.heldout}"
    yield (
        f"decoded          {findings.new_tokens} tokens in {findings.target_calls} target calls, "
        f"at most {findings.max_new_tokens} a prompt"
    )
    yield f"accepted length  {findings.accepted_length:.2f} tokens a target call"
    yield "by position      " + "  ".join(f"{place}: {share:.0%}" for place, share in positions)
    yield f"greedy output    {_against_greedy(findings)}"


def _against_greedy(findings: "Findings") -> str:
    if findings.different:
        return f"DIFFERENT from the target's own for {', '.join(findings.different)}"
    rounded = [prompt.key for prompt in findings.prompts if prompt.greedy == "rounding"]
    if rounded:
        return f"the target's own, but for rounding in {', '.join(rounded)}"
    return "the target's own for every prompt"


def _export(arguments: argparse.Namespace, _: Console) -> int:
    packages.require_for_drafters()
    from draftfeed_consumer import drafter_files

    drafter, out = drafter_files.read(arguments.drafter), arguments.out
    drafter_files.load(drafter)  # what is damaged is not handed on
    fix = "choose another OUT"
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(out.iterdir()):
            raise ConfigError(str(out), f"is not empty; {fix}")
        drafter_files.export(drafter, out, arguments.dtype)
    except OSError as error:
        raise OutputError(out, error, fix) from None
    sys.stdout.write(f"{drafter.path} as a Hugging Face directory in {out}\n")
    return exits.DONE
