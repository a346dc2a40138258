"""What a benchmark of the target found, in lines."""

from collections.abc import Iterator

from draftfeed_deploy.bench_target_result import (
    MeasuredPoint,
    Ratio,
    Result,
    by_batch,
    rates,
    ratio,
)
from draftfeed_deploy.bench_target_sweep import FLAT, knee
from draftfeed_deploy.plan_measured import BUSY_CORES


def lines_of(result: Result) -> Iterator[str]:
    layers = ",".join(map(str, result.layer_ids))
    yield f"target   {result.target}: {result.engine}, {result.dtype}, layers {layers}"
    gpus = f", {result.gpus_per_replica:g} GPUs" if result.gpus_per_replica > 1 else ""
    yield f"on       {result.device}{gpus}; {result.cores} cores"
    yield (
        f"prompts  {result.prompts} of the prompt file, {result.prompt_tokens:.0f} tokens on "
        f"average; {result.response_tokens:.0f} new tokens each, whatever they are"
    )
    yield from _table(result)
    yield from _footnotes(result)
    if result.cut:
        yield f"ended    {result.cut}"
    if result.others_cores > BUSY_CORES:
        yield (
            f"busy     other processes used {result.others_cores:.1f} of {result.cores} cores "
            "meanwhile: measure again when they do not"
        )
    yield f"advice   {_advice(result)}"


def _footnotes(result: Result) -> Iterator[str]:
    order = "" if result.in_turns else "; all with capture came before all without"
    yield f"medians of up to three rounds, of with/without the least and the most, too{order}"
    yield f"memory is the {result.memory_of}"


def _table(result: Result) -> Iterator[str]:
    yield (
        f"{'':6}{'output tokens/s':>16}{'with/without':>18}{'prefill tokens/s':>18}"
        f"{'first token, s':>16}{'memory, GB':>18}"
    )
    yield (
        f"{'batch':6}"
        + f"{'with':>8}{'without':>8}{'':18}{'with':>10}{'without':>8}"
        + (f"{'with':>8}{'without':>8}{'with':>9}{'without':>9}")
    )
    captured, bare = by_batch(result, True), by_batch(result, False)
    for batch in sorted(captured | bare):
        yield _row(batch, captured.get(batch), bare.get(batch), result.in_turns)


def _row(
    batch: int, captured: MeasuredPoint | None, bare: MeasuredPoint | None, in_turns: bool
) -> str:
    both = _both(ratio(captured, bare, in_turns)) if captured and bare else "-"
    output, prefill, first, memory = (
        [shown(one) if one else "-" for one in (captured, bare)]
        for shown in (_output, _prefill, _first, _memory)
    )
    return (
        f"{batch:<6}{output[0]:>8}{output[1]:>8}{both:>18}{prefill[0]:>10}{prefill[1]:>8}"
        f"{first[0]:>8}{first[1]:>8}{memory[0]:>9}{memory[1]:>9}"
    )


def _output(one: MeasuredPoint) -> str:
    return _rate(one.output_tokens_per_second)


def _prefill(one: MeasuredPoint) -> str:
    return _rate(one.prefill_tokens_per_second)


def _first(one: MeasuredPoint) -> str:
    return "-" if one.first_token_seconds is None else f"{one.first_token_seconds:.3f}"


def _memory(one: MeasuredPoint) -> str:
    return "-" if one.memory_bytes is None else f"{one.memory_bytes / 1e9:.2f}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _both(found: Ratio) -> str:
    return f"{found.median:.3f} {found.least:.2f}-{found.most:.2f}"


def _advice(result: Result) -> str:
    captured, bare = by_batch(result, True), by_batch(result, False)
    best = knee(rates(captured)).batch
    if best < max(captured):
        where = f"batch {best}: doubling it gives less than {FLAT:.0%} more output"
    elif len(captured) == 1:
        where = f"batch {best} alone was measured"
    elif result.cut:
        where = f"batch {best}, the largest that was measured: output still rises there"
    else:
        where = (
            f"batch {best}, the largest that was tried: output still rises, --max-batch "
            f"{2 * best} tries more"
        )
    if best not in bare:
        return f"{where}; what the capture costs there was not measured"
    return f"{where}; {_cost(captured[best], bare[best], result.in_turns)}"


def _cost(captured: MeasuredPoint, bare: MeasuredPoint, in_turns: bool) -> str:
    found = ratio(captured, bare, in_turns)
    if min(len(captured.rounds), len(bare.rounds)) == 1:
        return f"output with capture was {found.median:.3f} of that without, in one round only"
    cost, least, most = (100 * (1 - one) for one in (found.median, found.most, found.least))
    rounds = f"{least:.1f}% to {most:.1f}%, by round"
    if least <= 0:
        return f"what the capture costs there is within the noise ({rounds})"
    return f"the capture costs {cost:.1f}% of the output there ({rounds})"
