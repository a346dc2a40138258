"""What the dashboard shows: for each panel its queries, and what a healthy one looks like."""

from typing import NamedTuple

GREEN, YELLOW, RED, BLUE, GREY = "green", "yellow", "red", "blue", "text"


class Query(NamedTuple):
    text: str
    """`@` stands for the matchers of the variables: x@ or x{a="b", @}."""
    legend: str = "{{instance}}"


class Panel(NamedTuple):
    title: str
    words: str
    """What a healthy one looks like, and what to look at when it does not."""
    queries: tuple[Query, ...]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    height: int = 7
    steps: tuple[tuple[float, str], ...] = ()
    """(from this value on, colour)"""
    stacked: bool = False
    least: float | None = 0
    most: float | None = None
    states: tuple[str, ...] = ()
    """What the values 0, 1, 2 ... are called."""
    colours: tuple[str, ...] = ()
    """Of those."""


class Row(NamedTuple):
    title: str
    panels: tuple[Panel, ...]


def stat(
    title: str,
    words: str,
    query: str,
    unit: str = "short",
    steps: tuple[tuple[float, str], ...] = (),
) -> Panel:
    return Panel(title, words, (Query(query, title),), unit, "stat", 4, 4, steps)


AT_A_GLANCE = Row(
    "At a glance",
    (
        stat(
            "Stream",
            "Bytes on the wire, all producers together. 0 while samples wait: see stalls.",
            "sum(instance:draftfeed_producer_sent_bytes:rate1m@)",
            "Bps",
            ((0, RED), (1000, GREEN)),
        ),
        stat(
            "Generated",
            "Tokens of responses a second, over samples that were finished.",
            "sum(rate(draftfeed_producer_generated_tokens_total@[5m]))",
            "cps",
        ),
        stat(
            "Trained",
            "Share of the producers' prompts that a durable checkpoint of the trainer has.",
            'sum(draftfeed_producer_samples{state="trained", @})'
            " / sum(draftfeed_producer_prompts@)",
            "percentunit",
        ),
        stat(
            "Oldest not in a checkpoint",
            "Age of the oldest sample that a lost trainer would have to train again.",
            "max(draftfeed_producer_oldest_uncommitted_seconds@)",
            "s",
            ((0, GREEN), (3600, YELLOW), (7200, RED)),
        ),
        stat(
            "Bad values",
            "Values that are no numbers, and rows of zeros, since the producers began. 0 is right.",
            'sum(draftfeed_producer_values_total{kind="nonfinite", @})'
            " + sum(draftfeed_producer_zero_rows_total@)",
            "short",
            ((0, GREEN), (1, RED)),
        ),
        stat(
            "Alerts",
            "Of rules.yml, firing now.",
            'count(ALERTS{alertname=~"Draftfeed.*", alertstate="firing", @}) or vector(0)',
            "short",
            ((0, GREEN), (1, RED)),
        ),
        Panel(
            "Producers",
            "What each of them does.",
            (
                Query(
                    'sum by (instance) (draftfeed_producer_phase{phase="generating", @})'
                    ' + 2 * sum by (instance) (draftfeed_producer_phase{phase="delivering", @})'
                    ' + 3 * sum by (instance) (draftfeed_producer_phase{phase="done", @})'
                ),
            ),
            kind="state-timeline",
            width=12,
            height=5,
            states=("loading", "generating", "delivering", "done"),
            colours=(YELLOW, GREEN, BLUE, GREY),
        ),
        Panel(
            "Links",
            "Each consumer's link to each producer.",
            (
                Query(
                    'sum by (instance, producer) (draftfeed_consumer_link{state="open", @})'
                    " + 2 * sum by (instance, producer)"
                    ' (draftfeed_consumer_link{state=~"done|out", @})',
                    "{{instance}} from {{producer}}",
                ),
            ),
            kind="state-timeline",
            width=12,
            height=5,
            states=("not open", "open", "ended"),
            colours=(RED, GREEN, GREY),
        ),
    ),
)

FLOW = Row(
    "How fast",
    (
        Panel(
            "Bandwidth",
            "On the wire, as sent and as received: the same, but for what is under way.",
            (
                Query("instance:draftfeed_producer_sent_bytes:rate1m@", "{{instance}} sends"),
                Query(
                    "instance:draftfeed_consumer_received_bytes:rate1m@", "{{instance}} receives"
                ),
            ),
            "Bps",
        ),
        Panel(
            "Tokens",
            "Rows captured, received and, as samples, trained. Each should follow the one before.",
            (
                Query(
                    "sum(rate(draftfeed_producer_captured_rows_total@[$__rate_interval]))",
                    "captured",
                ),
                Query(
                    "sum(rate(draftfeed_consumer_received_tokens_total@[$__rate_interval]))",
                    "received",
                ),
            ),
            "cps",
        ),
        Panel(
            "Samples",
            "Finished, received and trained, a second.",
            (
                Query(
                    "sum(rate(draftfeed_producer_generated_samples_total@[$__rate_interval]))",
                    "finished",
                ),
                Query(
                    "sum(rate(draftfeed_consumer_received_samples_total@[$__rate_interval]))",
                    "received",
                ),
                Query(
                    "sum(rate(draftfeed_consumer_trained_samples_total@[$__rate_interval]))",
                    "trained",
                ),
            ),
            "cps",
        ),
        Panel(
            "Compression",
            "Hidden states over their encoded bytes. bf16 states shrink by about 1.48; a fall says "
            "that the states have become other ones.",
            (Query("instance:draftfeed_producer_compression:ratio_rate5m@"),),
            "none",
            least=1,
        ),
        Panel(
            "Bandwidth by member",
            "What each rank of the trainer is sent.",
            (
                Query(
                    "sum by (member)"
                    " (rate(draftfeed_producer_sent_bytes_total@[$__rate_interval]))",
                    "{{member}}",
                ),
            ),
            "Bps",
            stacked=True,
        ),
        Panel(
            "The target's files",
            "Sent to new training nodes, beside the stream.",
            (Query("sum by (instance) (draftfeed_producer_asset_bytes_total@)"),),
            "decbytes",
        ),
    ),
)

WAITS = Row(
    "What it waits for",
    (
        Panel(
            "Producers wait",
            "Share of time. spool_full, output_full: generation pauses, for want of space in "
            "the spool, or for conversations. no_credit: samples are there and the trainer has "
            "no room. link_full: it has, and the link takes no more.",
            (
                Query(
                    "rate(draftfeed_producer_stall_seconds_total@[$__rate_interval])",
                    "{{instance}} {{cause}}",
                ),
            ),
            "percentunit",
            most=1,
        ),
        Panel(
            "Trainers wait",
            "Share of time. buffer_empty: no sample was there, or too few to shuffle. link_down: a "
            "producer was away.",
            (
                Query(
                    "rate(draftfeed_consumer_stall_seconds_total@[$__rate_interval])",
                    "{{instance}} {{cause}}",
                ),
            ),
            "percentunit",
            most=1,
        ),
        Panel(
            "Spool",
            "Share of what it may take. A saw whose teeth are checkpoints is healthy.",
            (
                Query(
                    "draftfeed_producer_spool_bytes@"
                    " / (draftfeed_producer_spool_capacity_bytes@ > 0)"
                ),
            ),
            "percentunit",
            most=1,
            steps=((0, GREEN), (0.8, YELLOW), (0.95, RED)),
        ),
        Panel(
            "Buffer",
            "Of the trainer's machine, share that is filled.",
            (
                Query(
                    "draftfeed_consumer_buffer_bytes@ / draftfeed_consumer_buffer_capacity_bytes@"
                ),
            ),
            "percentunit",
            most=1,
        ),
        Panel(
            "Credit",
            "Encoded bytes that members may be sent beside what is under way. 0: the link is full.",
            (Query("draftfeed_producer_credit_bytes@", "{{instance}} {{member}}"),),
            "decbytes",
        ),
        Panel(
            "Loops",
            "Since the loop that moves data came round. More than a few seconds: it hangs.",
            (
                Query("draftfeed_producer_loop_age_seconds@"),
                Query("draftfeed_consumer_loop_age_seconds@"),
            ),
            "s",
            steps=((0, GREEN), (30, RED)),
        ),
    ),
)

DATA = Row(
    "Is the data right",
    (
        Panel(
            "Values by layer",
            "In a second: nonfinite are no numbers, saturated are clamped to fp16, inexact are "
            "rounded. The first must be 0; a few of the others are usual.",
            (
                Query(
                    "sum by (layer, kind)"
                    " (rate(draftfeed_producer_values_total@[$__rate_interval]))",
                    "{{layer}} {{kind}}",
                ),
            ),
            "cps",
        ),
        Panel(
            "Rows of zeros",
            "Since the producers began, by layer. They were never written: must be 0.",
            (Query("sum by (layer) (draftfeed_producer_zero_rows_total@)", "{{layer}}"),),
            steps=((0, GREEN), (1, RED)),
        ),
        Panel(
            "Degenerate responses",
            "Share of those that the quality gate looks at. At [quality] max_share it closes.",
            (Query("instance:draftfeed_producer_degenerate:ratio@"),),
            "percentunit",
            most=1,
            steps=((0, GREEN), (0.25, YELLOW), (0.5, RED)),
        ),
        Panel(
            "Length of responses",
            "Tokens, half of them and nine tenths of them are shorter.",
            tuple(
                Query(
                    f"histogram_quantile({share}, sum by (le)"
                    " (rate(draftfeed_producer_response_tokens_bucket@[30m])))",
                    name,
                )
                for share, name in ((0.5, "half"), (0.9, "nine tenths"))
            ),
        ),
        Panel(
            "Made again",
            "recaptured lacked rows, regenerated was damaged on the disk. Both arrive whole.",
            (
                Query("draftfeed_producer_recaptured_samples_total@", "{{instance}} recaptured"),
                Query("draftfeed_producer_regenerated_samples_total@", "{{instance}} regenerated"),
            ),
        ),
        Panel(
            "Loss",
            "What the trainer said of its last step.",
            (Query("draftfeed_consumer_loss@"),),
            "none",
            least=None,
        ),
    ),
)

PROGRESS = Row(
    "How far",
    (
        Panel(
            "Samples by state",
            "Of all producers. leased: members have them. spooled: nobody has them yet.",
            (Query("sum by (state) (draftfeed_producer_samples@)", "{{state}}"),),
            stacked=True,
        ),
        Panel(
            "Checkpoints",
            "Since the last one that is durable.",
            (Query("draftfeed_producer_commit_age_seconds@"),),
            "s",
        ),
        Panel(
            "Trained and in no checkpoint",
            "Samples. They would be trained again by another node.",
            (Query("draftfeed_consumer_commit_lag_samples@"),),
        ),
        Panel(
            "Steps",
            "Of the optimizer.",
            (Query("draftfeed_consumer_step@"),),
        ),
        Panel(
            "Term",
            "Rises when another consumer takes the stream.",
            (Query("max by (instance) (draftfeed_producer_term@)"),),
        ),
        Panel(
            "Members",
            "Ranks of the trainer that are attached.",
            (Query("draftfeed_producer_members@"),),
        ),
    ),
)

ROWS = (AT_A_GLANCE, FLOW, WAITS, DATA, PROGRESS)
