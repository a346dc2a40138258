"""`draftfeed plan --from`: what running producers have measured, beside what was assumed."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, NamedTuple

from msgspec import Struct

from draftfeed_deploy.errors import ServiceUnreachable
from draftfeed_deploy.forecast import (
    Forecast,
    Outlook,
    Reading,
    TooEarly,
    forecast,
    mean_rows,
    together,
)
from draftfeed_deploy.lengths import deviation
from draftfeed_deploy.plan import Plan
from draftfeed_deploy.plan_inputs import Inputs, Measured
from draftfeed_deploy.plan_measured import same_name, target_name
from draftfeed_deploy.plan_units import Unit
from draftfeed_deploy.scrapes import Scrape, scrape

P = "draftfeed_producer_"
STATES = ("trained", "leased", "spooled", "rejected", "quarantined", "tail")
MOST_WATCH_SECONDS = 3600.0


class Running(NamedTuple):
    """A producer, asked twice."""

    url: str
    model: str
    phase: str
    first: Scrape
    last: Scrape
    outlook: Outlook

    @property
    def now(self) -> Reading:
        return reading(self.last)


class Seen(Struct, frozen=True):
    """What a run's producers have measured. Rates are of one producer, as in a plan; tokens per
    second of responses, with the time of their prompts' prefill."""

    samples: float
    prompts: float
    prompt_tokens: float
    """Mean."""
    response_tokens: float
    output_tokens_per_second: float
    """Over the time so far."""
    recent_output_tokens_per_second: float
    """Over the seconds between the two looks."""
    rows_per_second: float
    ratio: float | None
    """None where nothing is encoded yet."""
    states_bytes_per_second: float
    """Of all producers, over the time so far."""
    generation_seconds: float
    """All prompts of these producers at the rate so far; the last producer decides."""


class Deviation(Struct, frozen=True):
    """One assumption, or what follows from them, against the run."""

    key: str
    unit: Unit | Literal["number"]
    assumed: float
    measured: float
    note: str = ""

    @property
    def factor(self) -> float:
        return self.measured / self.assumed


def watch(urls: Sequence[str], seconds: float) -> list[Running]:
    """Asks each producer twice, so many seconds apart. Raises ServiceUnreachable."""
    with ThreadPoolExecutor(len(urls)) as pool:
        first = list(pool.map(_scraped, urls))
        threading.Event().wait(seconds)
        last = list(pool.map(_scraped, urls))
    return [_running(*one) for one in zip(urls, first, last, strict=True)]


def _scraped(url: str) -> Scrape:
    found = scrape(url)
    if found.has(P + "prompts") or not found.values:  # none: it has only just begun
        _check(url, found)
        return found
    if any(name.startswith("draftfeed_consumer") for name, _ in found.values):
        raise ServiceUnreachable(url, "is a consumer; only producers have a forecast")
    raise ServiceUnreachable(url, "is no producer")


def _check(url: str, found: Scrape) -> None:
    try:
        reading(found)
    except (ValueError, OverflowError) as error:
        raise ServiceUnreachable(url, f"its metrics make no sense: {error}") from None


def _running(url: str, first: Scrape, last: Scrape) -> Running:
    phases = last.by(P + "phase", "phase")
    phase = next((name for name, on in phases.items() if on), "")
    info = last.labels(P[:-1] + "_info")
    before, now = (one.labels(P[:-1] + "_info").get("stream_id") for one in (first, last))
    if before and now and before != now:  # unknown while the engine loads
        raise ServiceUnreachable(url, "another producer answered at the second look")
    outlook = forecast([reading(first), reading(last)])
    return Running(url, info.get("model", ""), phase, first, last, outlook)


def reading(found: Scrape) -> Reading:
    samples = int(found.value(P + "generated_samples_total"))
    tokens = found.value(P + "generated_tokens_total")
    states = found.by(P + "samples", "state")
    return Reading(
        seconds=found.seconds,
        prompts=int(found.value(P + "prompts")),
        done=int(sum(states.get(state, 0.0) for state in STATES)),
        samples=samples,
        rows=int(found.value(P + "fed_tokens_total")),
        captured=int(found.value(P + "captured_rows_total")),
        generating_seconds=found.value(P + "generating_seconds_total"),
        deviation_tokens=deviation(_lengths(found), tokens / samples) if samples else 0.0,
        replayed=int(found.value(P + "replayed_samples_total")),
    )


def _lengths(found: Scrape) -> list[float]:
    """Counts by class, out of Prometheus' cumulative ones."""
    buckets = found.by(P + "response_tokens_bucket", "le")
    rising = [buckets[bound] for bound in sorted(buckets, key=float)]
    return [after - before for before, after in zip([0.0, *rising], rising, strict=False)]


def outlook_of(running: Sequence[Running]) -> Outlook:
    return together(one.outlook for one in running)


def seen(running: Sequence[Running]) -> Seen | None:
    """None as long as it is too early for one of them."""
    if any(isinstance(one.outlook, TooEarly) for one in running):
        return None
    measured = [
        one for one in running if one.now.rows and one.now.captured and one.now.generating_seconds
    ]
    if not measured:
        return None
    readings = [one.now for one in measured]
    samples = sum(now.samples for now in readings)
    rows = sum(now.samples * mean_rows(now) for now in readings) / samples
    fed = sum(now.rows for now in readings)
    finished = _sum(measured, "generated_tokens_total")
    prompt = (fed - finished) / samples + 1  # a sample of p and r tokens has p + r - 1 rows
    response = rows + 1 - prompt
    share = response / rows / len(measured)
    rates = [now.captured / now.generating_seconds for now in readings]
    recent = [
        one.outlook.recent_rows_per_second for one in measured if isinstance(one.outlook, Forecast)
    ]
    encoded, logical = _sum(measured, "encoded_bytes_total"), _sum(measured, "logical_bytes_total")
    packed = encoded and not _sum(measured, "same_host_members")  # for those nothing is made small
    return Seen(
        samples=samples,
        prompts=sum(one.now.prompts for one in running),
        prompt_tokens=prompt,
        response_tokens=response,
        output_tokens_per_second=share * sum(rates),
        recent_output_tokens_per_second=share * sum(recent),
        rows_per_second=sum(rates) / len(measured),
        ratio=logical / encoded if packed else None,
        states_bytes_per_second=logical / fed * sum(rates) if fed else 0.0,
        generation_seconds=max(
            now.prompts * mean_rows(now) / rate for now, rate in zip(readings, rates, strict=True)
        ),
    )


def _sum(running: Sequence[Running], name: str) -> float:
    return sum(one.last.value(P + name) for one in running)


def measured(found: Seen, inputs: Inputs) -> Measured:
    """What replaces a plan's assumptions. Responses that are captured in a second pass give the
    rate of that pass, and nothing of how they were generated."""
    lengths = Measured(
        prompt_tokens=found.prompt_tokens,
        response_tokens=found.response_tokens,
        ratio=found.ratio,
    )
    fields = {name: getattr(lengths, name) for name in Measured.__struct_fields__}
    if inputs.layout.capture == "prefill":
        fields["prefill_tokens_per_second"] = found.rows_per_second
    else:
        fields["output_tokens_per_second"] = found.output_tokens_per_second
        fields["output_includes_prefill"] = True
    return Measured(**fields)


def deviations(found: Seen, inputs: Inputs, plan: Plan) -> list[Deviation]:
    """inputs, plan: as they were before anything was measured."""
    work = inputs.workload
    rows = [
        Deviation("workload.prompts", "number", work.prompts, found.prompts, "of these producers"),
        Deviation("workload.prompt_tokens", "number", work.prompt_tokens, found.prompt_tokens),
        Deviation(
            "workload.response_tokens", "number", work.response_tokens, found.response_tokens
        ),
    ]
    if inputs.layout.capture == "prefill":
        assumed = inputs.rates.prefill_tokens_per_second
        rows.append(
            Deviation(
                "rates.prefill_tokens_per_second",
                "tokens/s",
                assumed,
                found.rows_per_second,
                "rows of one producer",
            )
        )
    else:
        rows += _output(found, assumed_output(inputs))
    if found.ratio is not None:
        rows.append(Deviation("stream.ratio", "number", inputs.stream.ratio, found.ratio))
    rows.append(
        Deviation(
            "stream_bytes_per_second",
            "bytes/s",
            plan.bandwidth.mean,
            found.states_bytes_per_second,
            "of all producers",
        )
    )
    an_epoch = capturing_seconds(inputs, plan)
    rows.append(
        Deviation(
            "generation_seconds",
            "seconds",
            an_epoch * found.prompts / work.prompts,
            found.generation_seconds,
            "of these prompts, once",
        )
    )
    return [row for row in rows if row.assumed > 0]


def doubts(running: Sequence[Running], inputs: Inputs) -> tuple[str, ...]:
    """Why what they measured may not be the plan's, one line each."""
    planned = target_name(inputs)
    models = sorted({one.model for one in running if one.model})
    if not planned:
        named = ", ".join(models)
        return (f"measured with target {named}; the plan names none to compare",) if named else ()
    return tuple(
        f"measured with target {model}; the plan's is {planned}"
        for model in models
        if not same_name(model, planned)
    )


def capturing_seconds(inputs: Inputs, plan: Plan) -> float:
    """Of the plan, for what a producer captures of one epoch: while it generates, or in a pass
    over responses that exist. What later epochs capture once more is not in it."""
    volume, times = plan.volume, plan.times
    if inputs.layout.capture == "prefill":
        return times.second_pass * volume.rows_of_an_epoch / max(volume.second_pass_rows, 1e-9)
    return (times.output + times.prefill) / max(volume.generated_epochs, 1e-9)


def _output(found: Seen, assumed: float) -> list[Deviation]:
    key, note = "rates.output_tokens_per_second", "one producer, prefill included"
    return [
        Deviation(key, "tokens/s", assumed, found.output_tokens_per_second, f"{note}, so far"),
        Deviation(
            key,
            "tokens/s",
            assumed,
            found.recent_output_tokens_per_second,
            f"{note}, in the last seconds",
        ),
    ]


def assumed_output(inputs: Inputs) -> float:
    """Tokens of responses per second of one replica, with their prompts' prefill in the time."""
    rates, work = inputs.rates, inputs.workload
    decoding = work.response_tokens / rates.output_tokens_per_second
    if rates.prefill_share is not None:
        return work.response_tokens / (decoding * (1 + rates.prefill_share))
    if rates.output_includes_prefill:
        return rates.output_tokens_per_second
    return work.response_tokens / (decoding + work.prompt_tokens / rates.prefill_tokens_per_second)
