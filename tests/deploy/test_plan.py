"""`draftfeed plan`: figures that decided hardware for a week, reckoned again.

They come from a workload of 914,000 prompts whose plan had mixed units, left prefill out of two of
four options, and took prefill for ten percent of everything.
"""

import json
import re
from typing import Any

import pytest

from draftfeed_deploy.cli import main
from draftfeed_deploy.plan import plan
from draftfeed_deploy.plan_files import WHOLE, load
from draftfeed_deploy.plan_outcome import as_json, outcome
from draftfeed_deploy.plan_results import results
from draftfeed_deploy.plan_units import plain

Report = dict[str, Any]


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[Report]:
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def report(capsys: pytest.CaptureFixture[str], scenario: str, *settings: str) -> Report:
    changes = [word for setting in settings for word in ("--set", setting)]
    (only,) = planned(capsys, "--scenario", scenario, *changes)
    return only


def value(found: Report, key: str) -> float:
    return found["results"][key]["value"]


STATED = [
    ("first-estimate", "output_seconds", 106, "d", 1),
    ("first-estimate", "output_seconds", 2539, "h", 1),
    ("first-estimate", "response_rows_bytes_per_second", 15, "MB/s", 1),
    ("a-pro6000", "generation_seconds", 7, "d", 1),
    ("a-pro6000", "generation_seconds", 6.98, "d", 0.01),
    ("a-pro6000", "response_rows_bytes_per_second", 244, "MiB/s", 1),
    ("a-pro6000", "stream_bytes_per_second", 385, "MB/s", 1),
    ("a-pro6000", "generation_seconds", 11, "d", 1),
    ("a-pro6000", "generation_seconds", 4.4, "d", 0.1),
    ("a-pro6000", "generation_seconds", 60, "%", 1),
    ("a-pro6000", "prefill_seconds", 25, "h", 1),
    ("a-pro6000", "generation_seconds", 8, "d", 0.1),
    ("a-pro6000", "prefill_flops", 1.08, "PFLOPS", 0.01),
    ("a-pro6000", "prefill_of_peak", 135, "%", 1),
    ("a-pro6000", "epoch_bytes", 35, "TiB", 1),
    ("a-pro6000", "epoch_bytes", 35.2, "TiB", 0.1),
    ("a-pro6000", "epoch_bytes", 38.7, "TB", 0.1),
    ("a-pro6000", "moved_bytes", 0, "GB", 1),
    ("b-split", "generation_seconds", 7, "d", 1),
    ("b-split", "moved_bytes", 5, "GB", 1),
    ("c-b200-shared", "output_seconds", 2.6, "d", 0.1),
    ("c-b200-shared", "moved_bytes", 57, "GB", 1),
    ("d-b200-then-train", "output_seconds", 1.3, "d", 0.1),
    ("b200-measured", "response_rows_bytes_per_second", 0.77, "GB/s", 0.01),
    ("b200-measured", "response_rows_bytes_per_second", 1.5, "GB/s", 0.1),
]


@pytest.mark.parametrize(("scenario", "key", "stated", "unit", "rounding"), STATED)
def test_every_figure_is_reproduced_on_its_own_terms(
    capsys: pytest.CaptureFixture[str],
    scenario: str,
    key: str,
    stated: float,
    unit: str,
    rounding: float,
):
    found = [
        one
        for one in report(capsys, scenario)["claims"]
        if (one["claim"]["result"], one["claim"]["value"], one["claim"]["unit"])
        == (key, stated, unit)
    ]
    assert found
    assert found[0]["reproduced"]
    assert found[0]["claim"]["rounding"] == rounding
    high = found[0]["claim"]["high"] or stated
    assert stated - rounding / 2 <= found[0]["on_its_terms"] <= high + rounding / 2


def test_the_figures_are_what_the_arithmetic_gives(capsys: pytest.CaptureFixture[str]):
    """The claims above could agree with a plan that is wrong in the same way."""
    found = report(capsys, "a-pro6000", "rates.prefill_share=0.1")
    responses = 914_000 * 500 * 6
    assert value(found, "response_tokens") == responses == 2_742_000_000
    assert value(found, "prompt_tokens") == 914_000 * 328 * 6
    assert value(found, "output_seconds") == pytest.approx(responses / 5000)
    assert value(found, "generation_seconds") == pytest.approx(1.1 * responses / 5000)
    assert value(found, "epoch_bytes") == 914_000 * 828 * 51_200
    assert value(found, "implied_prefill") == pytest.approx(32_800)
    assert value(found, "memory_token_bytes") == 32_768
    assert value(found, "memory_ring_bytes") == pytest.approx(0.43e9, rel=0.01)
    assert value(found, "staging_bytes") == pytest.approx(7.8e9, rel=0.01)


def test_what_is_moved_is_weights_and_prompts(capsys: pytest.CaptureFixture[str]):
    """57 GB came out because the prompts' size was taken from them."""
    found = report(capsys, "c-b200-shared")
    prompts = 914_000 * 328 * 4
    assert value(found, "moved_bytes") == pytest.approx(55e9 + prompts)
    claim = next(one for one in found["claims"] if one["claim"]["value"] == 57)
    assert claim["planned"] == pytest.approx(56.2, abs=0.05)
    assert not claim["agrees"]
    split = value(report(capsys, "b-split"), "moved_bytes")
    assert split == 2 * 248_320 * 5120 * 2  # embedding and head, bf16


@pytest.mark.parametrize(
    ("scenario", "with_prefill"), [("c-b200-shared", 2.91), ("d-b200-then-train", 1.45)]
)
def test_two_options_were_reckoned_without_the_prefill_that_the_others_had(
    capsys: pytest.CaptureFixture[str], scenario: str, with_prefill: float
):
    claims = report(capsys, scenario)["claims"]
    (equal,) = [one for one in claims if "with the 10%" in one["claim"]["says"]]
    assert not equal["reproduced"]
    assert equal["on_its_terms"] == pytest.approx(with_prefill, abs=0.006)


def test_prefill_takes_a_day_and_not_ten_percent(capsys: pytest.CaptureFixture[str]):
    found = report(capsys, "a-pro6000")
    assert value(found, "prefill_seconds") / 3600 == pytest.approx(25, abs=0.1)
    assert value(found, "prefill_seconds") > 0.1 * value(found, "output_seconds")
    exact = next(one for one in found["claims"] if one["claim"]["value"] == 6.98)
    assert exact["reproduced"]
    assert not exact["agrees"]


def test_a_prefill_rate_above_the_peak_of_its_cards_is_impossible(
    capsys: pytest.CaptureFixture[str],
):
    found = report(capsys, "a-pro6000", "rates.prefill_tokens_per_second=20000")
    (impossible,) = [one["text"] for one in found["findings"] if one["grade"] == "impossible"]
    assert "1.08 PFLOPS" in impossible
    assert "800 TFLOPS" in impossible
    fits = report(capsys, "a-pro6000", "rates.prefill_tokens_per_second=14000")
    assert not [one for one in fits["findings"] if one["grade"] == "impossible"]


def test_a_share_in_place_of_a_prefill_rate_is_named(capsys: pytest.CaptureFixture[str]):
    found = report(capsys, "a-pro6000", "rates.prefill_share=0.1")
    assert any("nobody's measurement" in one["text"] for one in found["findings"])


@pytest.mark.parametrize("scenario", ["e-replay", "f-prefill-later"])
def test_training_on_the_same_responses_every_epoch_is_said(
    capsys: pytest.CaptureFixture[str], scenario: str
):
    found = report(capsys, scenario)
    assert any("the same responses" in one["text"] for one in found["findings"])
    assert value(found, "response_tokens") == 914_000 * 500
    other = report(capsys, "b-split")
    assert not any("the same responses" in one["text"] for one in other["findings"])


def test_generating_once_needs_an_archive_or_a_second_pass(capsys: pytest.CaptureFixture[str]):
    replay, prefill = planned(capsys, "--scenario", "e-replay", "--scenario", "f-prefill-later")
    epoch = 914_000 * 828
    assert value(replay, "archive_bytes") == pytest.approx(epoch * 51_200 / 1.48)
    assert value(prefill, "archive_bytes") == 0
    assert value(prefill, "second_pass_tokens") == 5 * epoch
    assert value(prefill, "second_pass_seconds") == pytest.approx(5 * epoch / 20_000)


def test_speculative_decoding_is_captured_in_a_second_pass(capsys: pytest.CaptureFixture[str]):
    """400 tokens/s a card were measured with what cannot be captured live."""
    found = report(capsys, "pro6000-measured")
    assert value(found, "output_seconds") == pytest.approx(2.742e9 / 3200)
    assert value(found, "second_pass_tokens") == 6 * 914_000 * 828
    live = report(capsys, "pro6000-measured", "layout.capture=live")
    assert any("cannot be captured live" in one["text"] for one in live["findings"])


def of_the_link(found: Report) -> str:
    texts = [one["text"] for one in found["findings"]]
    (said,) = [text for text in texts if text.startswith("link: slower than the mean")]
    return said


def test_the_slowest_stage_decides(capsys: pytest.CaptureFixture[str]):
    slow = report(capsys, "b-split", "stream.link_bits_per_second=1e9")
    assert slow["bottleneck"] == "link"
    encoded = 6 * 914_000 * 828 * 51_200 / 1.48
    assert value(slow, "elapsed_seconds") == pytest.approx(8 * encoded / 1e9)
    assert report(capsys, "b-split")["bottleneck"] == "generation"
    trainer = report(capsys, "b-split", "training.samples_per_second=1")
    assert trainer["bottleneck"] == "training"
    assert value(trainer, "elapsed_seconds") == pytest.approx(6 * 914_000)
    slower = report(
        capsys, "b-split", "stream.link_bits_per_second=1e9", "training.samples_per_second=0.01"
    )
    assert slower["bottleneck"] == "training"
    assert of_the_link(slower).endswith("what decides is slower still: training")
    assert of_the_link(slow).endswith("so it decides")
    after = report(capsys, "a-pro6000")
    sides = value(after, "generation_seconds") + value(after, "training_seconds")
    assert value(after, "elapsed_seconds") == pytest.approx(sides)


@pytest.mark.parametrize(
    ("settings", "grade", "words"),
    [
        ((), "note", "batch 64 fits"),
        (("workload.longest_tokens=32768",), "warning", "at mean lengths"),
        (("layout.batch=600",), "impossible", "519 of mean length"),
        (("layout.gpus_per_replica=1", "layout.batch=200"), "impossible", "127 of mean length"),
        (("hardware.memory_bytes=24e9",), "impossible", "weights do not fit"),
        (("layout.replicas=5",), "impossible", "need 10 GPUs"),
        (("rates.output_tokens_per_second=3600",), "impossible", "3,491"),
    ],
)
def test_verdict_on_memory_and_gpus(
    capsys: pytest.CaptureFixture[str], settings: tuple[str, ...], grade: str, words: str
):
    found = report(capsys, "b-split", *settings)
    assert [one for one in found["findings"] if one["grade"] == grade and words in one["text"]]


def test_only_layers_with_full_attention_have_a_cache(capsys: pytest.CaptureFixture[str]):
    hybrid = report(capsys, "b-split")
    dense = report(capsys, "b-split", "target.kv_layers=64", "target.request_state_bytes=0")
    assert value(dense, "memory_token_bytes") == 4 * value(hybrid, "memory_token_bytes")
    assert value(hybrid, "memory_state_bytes") == pytest.approx(77e6, rel=0.01)


GENERATING = 6 * 914_000 * (500 / 5000 + 328 / 20_000)
"""Seconds of b-split."""
STATES = 6 * 914_000 * 828 * 51_200
"""Bytes that it makes."""


def test_a_spool_holds_three_checkpoint_intervals_and_the_swap(
    capsys: pytest.CaptureFixture[str],
):
    found = report(capsys, "b-split", "layout.swap_minutes=10", "layout.checkpoint_minutes=5")
    per_replica = STATES / GENERATING / 4
    assert value(found, "spool_bytes") == pytest.approx(per_replica * 25 * 60)
    assert value(found, "spool_encoded_bytes") == pytest.approx(per_replica * 25 * 60 / 1.48)


def test_a_link_is_to_carry_the_mean_with_headroom(capsys: pytest.CaptureFixture[str]):
    found = report(capsys, "b-split", "stream.headroom=2", "stream.link_bits_per_second=3e9")
    wire = STATES / GENERATING / 1.48
    assert value(found, "wire_bytes_per_second") == pytest.approx(wire)
    assert value(found, "link_bits_needed") == pytest.approx(8 * wire * 2)
    assert value(found, "link_seconds") == pytest.approx(8 * STATES / 1.48 / 3e9)
    assert value(found, "burst_bytes_per_second") == 20_000 * 51_200
    assert value(found, "streamed_bytes") == pytest.approx(STATES / 1.48)
    node = report(capsys, "b-split", "layout.network=false")
    assert not {"wire_bytes_per_second", "link_bits_needed"} & node["results"].keys()
    assert value(node, "streamed_bytes") == 0


def test_a_replay_needs_the_link_that_its_trainer_can_fill(capsys: pytest.CaptureFixture[str]):
    found = report(capsys, "e-replay", "training.samples_per_second=20")
    wire = 20 * 828 * 51_200 / 1.48
    assert value(found, "later_bytes_per_second") == pytest.approx(20 * 828 * 51_200)
    assert value(found, "link_bits_needed") == pytest.approx(8 * wire * 1.3)


BURST = "a burst of prefill makes 5.54 Gbit/s encoded"


@pytest.mark.parametrize(
    ("gbits", "words"),
    [
        (None, ["2.5 Gbit/s is the next that there is"]),
        (1.8, ["slower than the mean of the stream, so it decides", BURST]),
        (2.1, ["holds the mean, but has not the headroom asked for", BURST]),
        (5, [BURST]),
        (6, []),
    ],
)
def test_what_a_link_is_good_for_is_said(
    capsys: pytest.CaptureFixture[str], gbits: float | None, words: list[str]
):
    """The mean is 1.97 Gbit/s, and with the headroom 2.36."""
    given = () if gbits is None else (f"stream.link_bits_per_second={gbits}e9",)
    found = report(capsys, "b-split", "stream.headroom=1.2", *given)
    links = [one["text"] for one in found["findings"] if one["text"].startswith("link: ")]
    assert len(links) == len(words)
    assert all(text.startswith(f"link: {said}") for text, said in zip(links, words, strict=True))


def test_a_buffer_has_room_for_the_longest_and_for_the_window(capsys: pytest.CaptureFixture[str]):
    found = report(capsys, "b-split", "stream.batch_samples=4", "stream.window_samples=100")
    assert value(found, "buffer_least_bytes") == 5 * 2375 * 51_200
    assert value(found, "buffer_bytes") == 104 * 828 * 51_200


def test_encoders_are_of_the_replicas_and_decoders_of_the_trainer(
    capsys: pytest.CaptureFixture[str],
):
    found = report(
        capsys,
        "b-split",
        "stream.encode_bytes_per_second=2e9",
        "stream.decode_bytes_per_second=1e9",
        "stream.decode_threads=3",
    )
    assert value(found, "encode_seconds") == pytest.approx(STATES / (4 * 2e9))
    assert value(found, "decode_seconds") == pytest.approx(STATES / (3 * 1e9))


def test_a_trainers_time_is_that_of_its_operations(capsys: pytest.CaptureFixture[str]):
    """Blocks of 16 at each of 500 tokens, a drafter of 2e9, a head of 248,320 x 5,120."""
    found = report(capsys, "b-split")
    operations = 16 * 500 * (6 * 2e9 + 4 * 248_320 * 5120)
    rate = 8 * 900e12 * 0.3 / operations
    assert value(found, "samples_per_second") == pytest.approx(rate)
    assert value(found, "training_seconds") == pytest.approx(6 * 914_000 / rate)
    assert value(found, "drafter_bytes") == 4e9


def test_cost_is_of_both_nodes_and_the_archive(capsys: pytest.CaptureFixture[str]):
    assert "cost" not in report(capsys, "e-replay")["results"]
    found = report(
        capsys,
        "e-replay",
        "prices.generating_node_per_hour=10",
        "prices.training_node_per_hour=30",
        "prices.storage_per_terabyte_month=20",
    )
    hours = value(found, "elapsed_seconds") / 3600
    stored = 20 * hours / 720 * value(found, "archive_bytes") / 1e12
    assert value(found, "cost") == pytest.approx(40 * hours + stored)


def test_sensitivity_is_sorted_and_is_what_the_plan_would_say(capsys: pytest.CaptureFixture[str]):
    found = report(capsys, "b-split")
    spreads = [abs(one["more_seconds"] - one["less_seconds"]) for one in found["sensitivity"]]
    assert spreads == sorted(spreads, reverse=True)
    assert found["sensitivity"][0]["key"] == "layout.replicas"
    by_key = {one["key"]: one for one in found["sensitivity"]}
    slower = report(capsys, "b-split", "rates.output_tokens_per_second=1000")
    faster = report(capsys, "b-split", "rates.output_tokens_per_second=1500")
    output = by_key["rates.output_tokens_per_second"]
    assert output["less_seconds"] == pytest.approx(value(slower, "elapsed_seconds"))
    assert output["more_seconds"] == pytest.approx(value(faster, "elapsed_seconds"))
    assert "hardware.memory_bytes" not in by_key


PRICED = (
    "prices.generating_node_per_hour=10",
    "prices.training_node_per_hour=30",
    "prices.storage_per_terabyte_month=20",
)
VARIED: list[tuple[str, tuple[str, ...]]] = [
    ("a-pro6000", PRICED),
    ("b-split", ("stream.link_bits_per_second=3e9", "rates.prefill_share=0.1", *PRICED)),
    ("c-b200-shared", ("workload.prompts_bytes=3e9", "training.samples_per_second=9")),
    ("e-replay", PRICED),
    ("pro6000-measured", ("stream.link_bits_per_second=1e9",)),
]
CHOICES: dict[str, tuple[str, ...]] = {
    "layout.capture": ("live", "prefill"),
    "layout.later_epochs": ("generate", "replay", "prefill"),
    "layout.training": ("streamed", "after"),
}


def others(key: str, value: Any) -> list[Any]:
    """Of a choice all, of a number some, none of a name."""
    if key in CHOICES:
        return [one for one in CHOICES[key] if one != value]
    if isinstance(value, bool):
        return [str(not value).lower()]
    if isinstance(value, str) or value is None:
        return []
    if key in WHOLE:
        return [value + 1, 2 * value]
    return [0.7 * value, min(1.0, 1.4 * value) if value < 1 else 1.4 * value]


@pytest.mark.parametrize(("scenario", "settings"), VARIED)
def test_a_result_that_an_assumption_moves_names_it(scenario: str, settings: tuple[str, ...]):
    """Some named none of what they rest on, and some assumptions were printed nowhere."""
    found = as_json(outcome(scenario, settings))
    moved: set[tuple[str, str]] = set()
    for key, assumed in found["assumptions"].items():
        for other in others(key, assumed.value):
            inputs = load(scenario, [*settings, f"{key}={other}"]).inputs
            after = {one.key: one.value for one in results(inputs, plan(inputs))}
            moved |= {
                (name, key)
                for name, result in found["results"].items()
                if after.get(name) != pytest.approx(result["value"], rel=1e-9)
            }
    named = {(name, key) for name, one in found["results"].items() for key in one["inputs"]}
    assert moved <= named
    assert {name for name, _ in named} == set(found["results"])
    assert len(moved) > 150


def test_what_drives_the_days_and_the_stream_is_what_one_would_expect(
    capsys: pytest.CaptureFixture[str],
):
    found = report(capsys, "b-split")["results"]
    lengths = {"workload.prompt_tokens", "workload.response_tokens"}
    rates = {
        "rates.output_tokens_per_second",
        "rates.prefill_tokens_per_second",
        "rates.output_includes_prefill",
        "layout.replicas",
        "layout.capture",
    }
    work = {"workload.prompts", "workload.epochs", "layout.later_epochs", *lengths}
    row = {"target.hidden_size", "target.tapped_layers"}
    assert set(found["generation_seconds"]["inputs"]) == work | rates
    assert set(found["stream_bytes_per_second"]["inputs"]) == lengths | rates | row
    assert set(found["link_bits_needed"]["inputs"]) == (
        lengths | rates | row | {"layout.later_epochs", "layout.network"}
    ) | {"stream.ratio", "stream.headroom"}


def test_what_follows_from_an_assumption_is_varied_with_it(capsys: pytest.CaptureFixture[str]):
    """The prompt file's size and the trainer's peak are taken from others where nothing is said."""
    settings = ("layout.data_is_there=false", "training.samples_per_second=1e9")
    moved = report(capsys, "a-pro6000", *settings)["results"]["moved_bytes"]["inputs"]
    assert {"workload.prompts", "workload.prompt_tokens", "workload.prompts_bytes"} <= set(moved)
    given = report(capsys, "c-b200-shared", "workload.prompts_bytes=3e9")
    own = given["results"]["moved_bytes"]["inputs"]
    assert "workload.prompts" not in own
    slower, base = (report(capsys, "a-pro6000", *more) for more in (("hardware.flops=320e12",), ()))
    by_key = {one["key"]: one for one in base["sensitivity"]}
    less = by_key["hardware.flops"]["less_seconds"]
    assert less == pytest.approx(value(slower, "elapsed_seconds"))
    assert less > value(base, "elapsed_seconds")


def test_each_assumption_says_where_it_is_from(capsys: pytest.CaptureFixture[str]):
    assumptions = report(capsys, "a-pro6000")["assumptions"]
    assert assumptions["stream.ratio"]["source"] == "default"
    assert "docs/status.md" in assumptions["stream.ratio"]["note"]
    assert assumptions["layout.replicas"]["source"] == "given"


def test_the_table_shows_assumptions_beside_results_and_claims_below(
    capsys: pytest.CaptureFixture[str],
):
    assert main(["plan", "--scenario", "a-pro6000"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    (begin,) = [i for i, line in enumerate(lines) if "the same, encoded" in line]
    (end,) = [i for i, line in enumerate(lines) if "all epochs, encoded" in line]
    assert "26.2 TB" in lines[begin]
    assert "given: workload.prompts 914,000; workload.prompt_tokens 328;" in lines[begin]
    assert lines[end - 1].endswith("default: stream.ratio 1.48 (SmolLM2-135M, docs/status.md)")
    assert (
        "claimed 6.98 d; on its terms 6.982, reproduced; by this plan 7.388 d, which differs"
        in text
    )
    assert max(map(len, lines)) < 160


@pytest.mark.parametrize(("scenario", "settings"), VARIED)
def test_every_assumption_is_printed(
    capsys: pytest.CaptureFixture[str], scenario: str, settings: tuple[str, ...]
):
    changes = [word for setting in settings for word in ("--set", setting)]
    assert main(["plan", scenario, *changes]) == 0
    text = capsys.readouterr().out
    for key, one in report(capsys, scenario, *settings)["assumptions"].items():
        assert (f" {key} {plain(one['value'])}" in text) == (one["value"] is not None)


def test_several_side_by_side(capsys: pytest.CaptureFixture[str]):
    scenarios = ["b-split", "e-replay", "f-prefill-later"]
    assert main(["plan", *(word for name in scenarios for word in ("--scenario", name))]) == 0
    head, *rest = capsys.readouterr().out.splitlines()
    assert head.split() == scenarios
    (row,) = [line for line in rest if line.startswith("archive_bytes")]
    assert row.split(maxsplit=1)[1].split("  ")[0] == "0 B"
    assert "26.2 TB" in row
    (differs,) = [line for line in rest if "layout.later_epochs" in line]
    given = ["generate (default)", "replay (given)", "prefill (given)"]
    assert re.split("  +", differs.strip())[1:] == given
    same = " ".join(line.strip() for line in rest)
    assert "layout.replicas 4; rates.output_tokens_per_second 1,250;" in same
    assert "layout.training streamed" in same


def test_the_list_has_every_option(capsys: pytest.CaptureFixture[str]):
    assert main(["plan", "--list"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert [name for name in names if name[1] == "-"] == [
        "a-pro6000",
        "b-split",
        "c-b200-shared",
        "d-b200-then-train",
        "e-replay",
        "f-prefill-later",
    ]


def test_a_setting_changes_the_plan_and_not_what_was_claimed(capsys: pytest.CaptureFixture[str]):
    found = report(capsys, "a-pro6000", "layout.replicas=2")
    exact = next(one for one in found["claims"] if one["claim"]["value"] == 6.98)
    assert exact["reproduced"]
    assert exact["planned"] == pytest.approx(2 * 7.388, abs=0.001)
