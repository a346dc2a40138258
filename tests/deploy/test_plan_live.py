"""`draftfeed plan --from`: a running producer's figures in the place of assumptions."""

import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from draftfeed_deploy.cli import main
from draftfeed_deploy.lengths import class_of, no_lengths
from draftfeed_deploy.metrics import Identity
from draftfeed_deploy.plan_live import assumed_output, capturing_seconds
from draftfeed_deploy.plan_outcome import outcome
from draftfeed_deploy.records import ProducerSnapshot
from samples import DESCRIPTOR
from shown import shown
from snapshots import consumed, produced

MADE, ROWS, PROMPT, RESPONSE = 2000, 1000, 401, 600
"""Samples, rows of each: of p and r tokens, p + r - 1."""


def steady(
    rate: float, prompts: int = 10_000, standing: bool = False, same_host: tuple[str, ...] = ()
) -> Callable[[], Any]:
    """A producer that has made MADE samples at that many rows a second, and goes on."""
    began, rows = time.monotonic(), MADE * ROWS
    lengths = no_lengths()
    lengths[class_of(RESPONSE)] = MADE

    def snapshot() -> ProducerSnapshot:
        since = 0.0 if standing else time.monotonic() - began
        return produced(
            time.monotonic(),
            prompts=prompts,
            samples=MADE,
            tokens=rows,
            captured=rows + int(rate * since),
            response_tokens=MADE * RESPONSE,
            response_lengths=lengths,
            generating_seconds=rows / rate + (time.monotonic() - began),
            logical_bytes=rows * 640,
            encoded_bytes=rows * 400,
            spooled=MADE,
            members=("0", "1"),
            same_host=same_host,
        )

    return snapshot


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["plan", "--for", "1", "--json", *arguments]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", "--for", "1", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1, error
    return error


def test_finish_has_a_range_and_the_rate_is_measured_twice(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with shown(steady(5000)) as url:
        found = planned(capsys, "--from", url)["running"]["forecast"]
    left = 8000 * ROWS / 5000
    assert found["left"] == 8000
    assert found["seconds"] == pytest.approx(left, rel=0.05)
    assert found["earliest"] < left < found["latest"]
    assert found["rows_per_second"] == pytest.approx(5000, rel=0.01)
    assert found["recent_rows_per_second"] == pytest.approx(5000, rel=0.1)
    assert found["window_seconds"] >= 1


def test_last_of_several_producers_decides(capsys: pytest.CaptureFixture[str]) -> None:
    with shown(steady(5000)) as fast, shown(steady(1000)) as slow:
        running = planned(capsys, "--from", fast, "--from", f"{slow}/metrics")["running"]
    assert [one["url"] for one in running["producers"]] == [fast, slow]
    assert running["forecast"]["seconds"] == pytest.approx(8000 * ROWS / 1000, rel=0.05)
    assert running["forecast"]["left"] == 16_000


def test_ratio_of_samples_that_were_not_compressed_is_not_taken_for_the_networks(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A plan for two nodes, made from a trial on one, asked for half as much network again."""
    with shown(steady(5000, same_host=("0",))) as url:
        found = planned(capsys, "--scenario", "b-split", "--from", url)
    assert "stream.ratio" not in {row["key"] for row in found["running"]["deviations"]}
    assert found["plans"][0]["assumptions"]["stream.ratio"]["source"] != "measured"


def test_measurements_replace_assumptions_and_are_compared_with_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assumed = outcome("b-split").case.inputs
    with shown(steady(5000)) as one, shown(steady(3000)) as other:
        found = planned(capsys, "--scenario", "b-split", "--from", one, "--from", other)
    rows = {row["key"]: row for row in found["running"]["deviations"][::-1]}
    assert rows["workload.response_tokens"]["assumed"] == assumed.workload.response_tokens
    assert rows["workload.response_tokens"]["measured"] == pytest.approx(RESPONSE, rel=0.01)
    assert rows["workload.response_tokens"]["factor"] == pytest.approx(1.2, rel=0.01)
    assert rows["workload.prompt_tokens"]["measured"] == pytest.approx(PROMPT, rel=0.01)
    assert rows["stream.ratio"]["measured"] == pytest.approx(1.6)
    output = rows["rates.output_tokens_per_second"]
    assert output["measured"] == pytest.approx(4000 * RESPONSE / ROWS, rel=0.01)
    assert output["assumed"] == assumed_output(assumed)
    assert output["assumed"] < assumed.rates.output_tokens_per_second
    (plan,) = found["plans"]
    for key in ("workload.response_tokens", "rates.output_tokens_per_second", "stream.ratio"):
        assert plan["assumptions"][key]["source"] == "measured"
        assert plan["assumptions"][key]["note"].startswith("this run")
    assert plan["assumptions"]["rates.output_includes_prefill"]["value"] is True
    assert plan["assumptions"]["workload.prompts"]["source"] == "given"


def test_second_pass_has_its_own_rate(capsys: pytest.CaptureFixture[str]) -> None:
    """Prefill mode: its rows per second say nothing of how responses were generated."""
    with shown(steady(5000)) as url:
        settings = ["--scenario", "b-split", "--set", "layout.capture=prefill"]
        found = planned(capsys, *settings, "--from", url)
    keys = [row["key"] for row in found["running"]["deviations"]]
    assert "rates.prefill_tokens_per_second" in keys
    assert "rates.output_tokens_per_second" not in keys
    assumptions = found["plans"][0]["assumptions"]
    assert assumptions["rates.prefill_tokens_per_second"]["value"] == pytest.approx(5000, rel=0.01)
    assert assumptions["rates.output_tokens_per_second"]["source"] == "given"


def test_plan_on_the_assumed_terms_is_the_plan() -> None:
    """The factor compares like with like: a run that is as assumed has the factor 1."""
    found = outcome("b-split")
    inputs, times = found.case.inputs, found.plan.times
    tokens = found.plan.volume.response_tokens
    rate = assumed_output(inputs) * inputs.layout.replicas
    assert tokens / rate == pytest.approx(times.generation)


@pytest.mark.parametrize("epochs", [1, 6])
@pytest.mark.parametrize(
    ("scenario", "capture"),
    [("f-prefill-later", "live"), ("b-split", "live"), ("b-split", "prefill")],
)
def test_capturing_is_compared_with_capturing(scenario: str, capture: str, epochs: int) -> None:
    """A producer says nothing of how responses were made that it only captures, nor of the passes
    of later epochs: a run that is as assumed has the factor 1."""
    settings = [f"layout.capture={capture}", f"workload.epochs={epochs}"]
    found = outcome(scenario, settings)
    inputs = found.case.inputs
    work, rates = inputs.workload, inputs.rates
    rate = assumed_output(inputs) * inputs.layout.replicas
    seconds = work.prompts * work.response_tokens / rate
    if capture == "prefill":
        rows = work.prompts * (work.prompt_tokens + work.response_tokens)
        seconds = rows / (rates.prefill_tokens_per_second * inputs.layout.replicas)
    assert capturing_seconds(inputs, found.plan) == pytest.approx(seconds)


def test_text_says_it_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    with shown(steady(5000)) as url:
        assert main(["plan", "--for", "1", "--scenario", "b-split", "--from", url]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("1 producer, asked twice within 1")
    assert "2,000 of 10,000 prompts; 5,000 rows/s so far, " in lines[1]
    assert lines[2].startswith("  generated in 26.")
    assert "; between " in lines[2]
    row = next(line for line in lines if line.startswith("  workload.response_tokens"))
    assert re.fullmatch(r"  workload\.response_tokens +500 +60\d(\.\d)? +1\.20", row)
    beside = "measured: workload.response_tokens 60"
    assert any(beside in line and "(this run, assumed 500)" in line for line in lines)


def test_beginning_is_too_early_and_replaces_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    def snapshot() -> ProducerSnapshot:
        return produced(1.0, prompts=100, samples=3, captured=300, generating_seconds=2.0)

    with shown(snapshot) as url:
        assert main(["plan", "--for", "1", "--scenario", "b-split", "--from", url]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[2].startswith("  too early to say when it ends: 3 samples are finished")
        assert len(lines) == 3
        found = planned(capsys, "--from", url, "--scenario", "b-split")
    assert found["running"]["forecast"] is None
    assert found["running"]["deviations"] == []
    assert all(one["source"] != "measured" for one in found["plans"][0]["assumptions"].values())


def test_replay_is_told_from_a_run_that_has_just_begun(capsys: pytest.CaptureFixture[str]) -> None:
    """It never generates, so it never has the 30 samples that a forecast was promised from."""

    def snapshot() -> ProducerSnapshot:
        return produced(1.0, prompts=1344, spooled=1292, replayed=1292)

    with shown(snapshot) as url:
        assert main(["plan", "--for", "1", "--from", url]) == 0
    words = capsys.readouterr().out
    assert "1292 samples were made before and none now; only generating is forecast" in words
    assert "samples are finished" not in words


def test_run_that_stands_still_has_no_latest_end(capsys: pytest.CaptureFixture[str]) -> None:
    with shown(steady(5000, standing=True)) as url:
        assert planned(capsys, "--from", url)["running"]["forecast"]["latest"] is None
        assert main(["plan", "--for", "1", "--from", url]) == 0
    words = capsys.readouterr().out
    assert "nothing was made in the last 1" in words
    assert "; not before 20" in words


def test_run_whose_prompts_are_generated_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with shown(steady(5000, prompts=MADE)) as url:
        assert main(["plan", "--for", "1", "--from", url]) == 0
    assert "every prompt is generated" in capsys.readouterr().out


def test_what_cannot_be_asked_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with shown(lambda: consumed(1.0)) as url:
        assert "is a consumer" in refusal(capsys, "--from", url)
    assert "connection refused" in refusal(capsys, "--from", url)
    assert "is not the address of a service" in refusal(capsys, "--from", "ftp://host")
    assert "is not the address of a service" in refusal(capsys, "--from", "http://[1")
    for odd in ("http://a..b:9640", f"http://{'a' * 70}.b:9640", f"{url}/st\u00e4tus"):
        assert "is not an address that can be asked" in refusal(capsys, "--from", odd)
    assert "goes with one scenario" in refusal(
        capsys, "--from", url, "--scenario", "b-split", "--scenario", "e-replay"
    )
    assert "must be from 1 to 3600 s" in refusal(capsys, "--from", url, "--for", "0")
    assert "must be from 1 to 3600 s" in refusal(capsys, "--from", url, "--for", "nan")


class Odd(BaseHTTPRequestHandler):
    """Anything but the metrics of a producer."""

    body: bytes = b""

    def do_GET(self) -> None:
        if self.path.startswith("/moved"):
            self.send_response(302)
            self.send_header("Location", "/metrics")
            self.end_headers()
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, format: str, *args: object) -> None:
        """Nobody is interested."""


@pytest.fixture
def odd() -> Iterator[Callable[[bytes], str]]:
    with ExitStack() as stack:

        def serve(body: bytes) -> str:
            handler = type("Handler", (Odd,), {"body": body})
            server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            return f"http://127.0.0.1:{server.server_address[1]}"

        yield serve


P = b"draftfeed_producer_"
CONFIG = {
    "num_hidden_layers": 4,
    "hidden_size": 5120,
    "num_attention_heads": 40,
    "num_key_value_heads": 4,
    "vocab_size": 1000,
}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"<html>hello", "its metrics cannot be read"),
        (b"up 1\n", "is no producer"),
        (b"\xff\xfe\x00", "cannot be read"),
        (b"a" * (5 << 20), "more than 4194304 bytes"),
        (
            P
            + b"prompts 1\n"
            + P
            + b"generated_samples_total 1\n"
            + P
            + b'response_tokens_bucket{le="x"} 1\n',
            "make no sense",
        ),
    ],
)
def test_another_server_is_one_line(
    capsys: pytest.CaptureFixture[str], odd: Callable[[bytes], str], body: bytes, says: str
) -> None:
    assert says in refusal(capsys, "--from", odd(body))


def test_figures_that_are_no_numbers_are_as_good_as_none(
    capsys: pytest.CaptureFixture[str], odd: Callable[[bytes], str]
) -> None:
    body = P + b"prompts 10\n" + P + b"captured_rows_total NaN\n" + P + b"fed_tokens_total +Inf\n"
    assert main(["plan", "--for", "1", "--from", odd(body)]) == 0
    assert "too early" in capsys.readouterr().out


INFO = P + b'info{model="%s",stream_id="%s"} 1\n' + P + b"prompts 10\n"


def test_what_a_producer_is_called_does_nothing_to_a_terminal(
    capsys: pytest.CaptureFixture[str], odd: Callable[[bytes], str]
) -> None:
    body = INFO % (b"\x1b[31mred\\n\\nPASSED", b"1")
    assert main(["plan", "--for", "1", "--from", odd(body)]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown
    assert r"\x1b[31mred\n\nPASSED" in shown
    assert "PASSED" not in shown.splitlines()


def test_another_producer_at_the_second_look_is_one_line(
    capsys: pytest.CaptureFixture[str], odd: Callable[[bytes], str]
) -> None:
    """Its counters were taken for those of the first."""
    looks = itertools.count()

    class Changing(Odd):
        @property
        def body(self) -> bytes:  # type: ignore[override]
            return INFO % (b"m", b"%d" % next(looks))

    server = ThreadingHTTPServer(("127.0.0.1", 0), Changing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        url = f"http://127.0.0.1:{server.server_address[1]}"
        assert "another producer answered" in refusal(capsys, "--from", url)
    finally:
        server.shutdown()
        server.server_close()


def test_a_run_of_another_target_is_doubted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """SmolLM2's rates went into the plan of a 27B without a word."""
    (tmp_path / "Other").mkdir()
    (tmp_path / "Other" / "config.json").write_text(json.dumps(CONFIG))
    mine = tmp_path / "mine.toml"
    mine.write_text('extends = "b-split"\n[target]\nconfig = "Other"\n')
    with shown(steady(5000), identity=lambda: Identity("1", DESCRIPTOR)) as url:
        assert main(["plan", str(mine), "--for", "1", "--from", url]) == 0
        words = capsys.readouterr().out
        assert main(["plan", "b-split", "--for", "1", "--from", url]) == 0
        unnamed = capsys.readouterr().out
    assert "warning  measured with target tiny; the plan's is Other" in words
    assert "the plan names none to compare" in unnamed


def test_redirection_is_not_followed(
    capsys: pytest.CaptureFixture[str], odd: Callable[[bytes], str]
) -> None:
    assert "answers with 302" in refusal(capsys, "--from", f"{odd(b'')}/moved")
