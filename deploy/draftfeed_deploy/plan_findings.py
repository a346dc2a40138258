"""What a plan has to say beside its figures: what cannot be, and what is easily overlooked."""

from collections.abc import Iterable, Iterator
from typing import Literal

from msgspec import Struct

from draftfeed_deploy.plan import Plan
from draftfeed_deploy.plan_inputs import Inputs
from draftfeed_deploy.plan_units import show

LINKS = (1e9, 2.5e9, 10e9, 25e9, 40e9, 50e9, 100e9, 200e9, 400e9, 800e9)
"""Bits per second of what can be bought."""


MOST_FILLED = 0.9
"""Of a drive, beyond which it becomes slow."""
MOST_WORN = 0.1
"""Of a drive, by one run."""


class Finding(Struct, frozen=True):
    grade: Literal["impossible", "warning", "note"]
    text: str


def findings(inputs: Inputs, plan: Plan, doubts: Iterable[str] = ()) -> list[Finding]:
    """The worst first. doubts: about what was measured."""
    found = [
        *(Finding("warning", text) for text in doubts),
        *_of_the_gpus(inputs, plan),
        *_of_memory(inputs, plan),
        *_of_prefill(inputs, plan),
        *_of_the_link(inputs, plan),
        *_of_training(inputs, plan),
        *_of_epochs(inputs),
        *_of_drives(inputs, plan),
        *_of_prices(inputs),
    ]
    grades = ("impossible", "warning", "note")
    return sorted(found, key=lambda finding: grades.index(finding.grade))


def _of_the_gpus(inputs: Inputs, plan: Plan) -> Iterator[Finding]:
    hardware, layout, limits = inputs.hardware, inputs.layout, plan.limits
    used = layout.replicas * layout.gpus_per_replica
    if used > hardware.gpus:
        yield Finding(
            "impossible",
            f"{layout.replicas:g} replicas on {layout.gpus_per_replica:g} GPUs each need "
            f"{used:g} GPUs; there are {hardware.gpus:g}",
        )
    if limits.prefill_of_peak > 1:
        rate = inputs.rates.prefill_tokens_per_second
        peak = hardware.flops * layout.gpus_per_replica
        yield Finding(
            "impossible",
            f"{rate:,.0f} prefill tokens/s of a replica take {show(limits.prefill_flops, 'flops')}"
            f" and its GPUs have {show(peak, 'flops')} at their peak",
        )
    bound = limits.output_bound_tokens_per_second
    if inputs.rates.output_tokens_per_second > bound:
        yield Finding(
            "impossible",
            f"{inputs.rates.output_tokens_per_second:,.0f} output tokens/s of a replica: reading "
            f"its weights once a pass allows {bound:,.0f} at batch {layout.batch:g}",
        )
    if layout.tokens_per_pass > 1 and layout.capture == "live":
        yield Finding(
            "impossible",
            "speculative decoding cannot be captured live: rejected drafts leave rows of tokens "
            'that are not in the response; set layout.capture = "prefill"',
        )


def _of_memory(inputs: Inputs, plan: Plan) -> Iterator[Finding]:
    memory, batch = plan.memory, inputs.layout.batch
    if memory is None:
        yield Finding(
            "warning",
            "whether it fits into memory is not known: give target.config, or kv_layers, kv_heads "
            "and head_dim",
        )
    elif memory.weights >= memory.budget:
        yield Finding("impossible", "the weights do not fit on the GPUs of a replica")
    elif memory.fits_longest >= batch:
        fits = show(memory.fits_longest, "requests")
        yield Finding("note", f"memory: batch {batch:g} fits; {fits} of the longest would")
    elif memory.fits_mean >= batch:
        yield Finding(
            "warning",
            f"memory: batch {batch:g} fits at mean lengths; of the longest samples only "
            f"{memory.fits_longest:,.0f} do at a time, and the engine takes requests back",
        )
    else:
        yield Finding(
            "impossible",
            f"memory: batch {batch:g} does not fit; {memory.fits_mean:,.0f} of mean length do, "
            f"{memory.fits_longest:,.0f} of the longest",
        )


def _of_prefill(inputs: Inputs, plan: Plan) -> Iterator[Finding]:
    if inputs.rates.prefill_share is not None:
        implied = plan.limits.implied_prefill_tokens_per_second
        yield Finding(
            "warning",
            f"prefill as a share of {inputs.rates.prefill_share:.0%} is nobody's measurement: it "
            f"stands for {implied:,.0f} prefill tokens/s of all replicas together",
        )


def _of_the_link(inputs: Inputs, plan: Plan) -> Iterator[Finding]:
    if not inputs.layout.network:
        return
    link, width = inputs.stream.link_bits_per_second, plan.bandwidth
    burst = 8 * width.burst / inputs.stream.ratio
    enough = next((size for size in LINKS if size >= width.link_bits_needed), None)
    if link is None:
        words = show(enough, "bits/s") if enough else "several links"
        yield Finding("note", f"link: {words} is the next that there is")
        return
    if link < 8 * width.wire:
        if _link_decides(inputs, plan):
            yield Finding("warning", "link: slower than the mean of the stream, so it decides")
        else:
            yield Finding(
                "warning",
                "link: slower than the mean of the stream, but what decides is slower still: "
                f"{plan.times.bottleneck}",
            )
    elif link < width.link_bits_needed:
        yield Finding("warning", "link: holds the mean, but has not the headroom asked for")
    if link < burst:
        yield Finding(
            "note",
            f"link: a burst of prefill makes {show(burst, 'bits/s')} encoded, more than it "
            "carries; the spool takes what is over",
        )


def _link_decides(inputs: Inputs, plan: Plan) -> bool:
    """With the training after it, over the making of samples."""
    times = plan.times
    if inputs.layout.training == "after":
        return times.link > max(times.generation, times.encode)
    return "link" in times.bottleneck.split(", then ")


def _of_training(inputs: Inputs, plan: Plan) -> Iterator[Finding]:
    layout, times = inputs.layout, plan.times
    kept = show(plan.storage.archive, "bytes")
    if layout.training == "after":
        yield Finding("warning", f"training begins when generation has ended: {kept} are kept")
    elif times.training > times.generation and layout.later_epochs != "replay":
        longer = show(times.training - times.generation, "seconds")
        yield Finding(
            "warning",
            f"the trainer takes {longer} longer than generation, which waits for it at a full "
            "spool",
        )
    if layout.training == "streamed" and not layout.network:
        spare = inputs.hardware.gpus - layout.replicas * layout.gpus_per_replica
        if inputs.training.gpus > spare:
            yield Finding(
                "impossible",
                f"the trainer has {spare:g} GPUs of this node left, not {inputs.training.gpus:g}",
            )
    if inputs.training.samples_per_second is None:
        yield Finding("note", "training time is arithmetic: set training.samples_per_second")


def _of_epochs(inputs: Inputs) -> Iterator[Finding]:
    later = inputs.layout.later_epochs
    if later != "generate" and inputs.workload.epochs > 1:
        how = "replayed from an archive" if later == "replay" else "captured again by prefill"
        yield Finding(
            "warning",
            f"all {inputs.workload.epochs:g} epochs train on the same responses: those after the "
            f"first are {how}, not generated",
        )


def _of_drives(inputs: Inputs, plan: Plan) -> Iterator[Finding]:
    """When an archive is full, later epochs generate again what is not in it."""
    drives, archive = plan.drives, inputs.archive
    if drives is None:
        return
    words = f"{archive.drives:g} of {show(archive.drive_bytes, 'bytes')}"
    kept = show(plan.storage.archive, "bytes")
    if drives.filled > 1:
        yield Finding(
            "impossible",
            f"an archive of {kept} does not fit on {words}; what does not is generated in every "
            "epoch",
        )
    elif drives.filled > MOST_FILLED:
        yield Finding("warning", f"an archive of {kept} on {words} leaves less than a tenth free")
    if drives.worn > MOST_WORN:
        yield Finding(
            "warning", f"one run takes {drives.worn:.0%} of the endurance of the archive's drives"
        )


def _of_prices(inputs: Inputs) -> Iterator[Finding]:
    prices = inputs.prices
    nodes = prices.generating_node_per_hour, prices.training_node_per_hour
    if not any((*nodes, prices.storage_per_terabyte_month)):
        yield Finding(
            "note",
            "no cost is shown: [prices] has none; set prices.generating_node_per_hour and "
            "prices.training_node_per_hour",
        )
