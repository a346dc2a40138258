"""Everything is broken, at random and several at once: in the end each sample counts once."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import zmq

from chaos import audit, hosts
from chaos.faults import KINDS
from chaos.relay import Relay
from chaos.schedule import Happened, overlaps

FAULTS = 45
LOCAL_FAULTS = 12
SEED = os.environ.get("CHAOS_SEED", "1")
LIMIT_SECONDS = 540
"""On two cores that other tests share; alone it takes less than half of it."""

GENERATED = {"a": "content of a", "b": "content of b", "c": "content of c"}
EXPECTED = {id: {content} for id, content in GENERATED.items()}
ONCE = {"a": 1, "b": 1, "c": 1}


@pytest.mark.timeout(LIMIT_SECONDS + 60)
def test_samples_count_once_whatever_is_killed_cut_filled_flipped_or_replaced(
    tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    if reason := hosts.missing():
        pytest.skip(reason)
    ended = subprocess.run(
        [sys.executable, "-m", "chaos", "--faults", str(FAULTS), "--seed", SEED, "--dir", "runs"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    report = json.loads((tmp_path / "runs" / f"seed{SEED}" / "report.json").read_text())
    for name in ("seed", "faults", "overlaps", "trained", "terminal", "seconds"):
        record_property(name, report[name])
    assert sum(report["faults"].values()) >= FAULTS
    assert report["overlaps"]
    # Two decks of all kinds at most are dealt; one that finds nothing to break is not counted.
    assert len(report["faults"]) > len(KINDS) // 2


@pytest.mark.timeout(LIMIT_SECONDS)
def test_samples_count_once_on_one_host_too(tmp_path: Path) -> None:
    """Where nodes read the producers' files, which are truncated, flipped and freed meanwhile."""
    if reason := hosts.missing():
        pytest.skip(reason)
    options = ["--link", "local", "--faults", str(LOCAL_FAULTS), "--seed", SEED, "--dir", "runs"]
    ended = subprocess.run(
        [sys.executable, "-m", "chaos", *options, "--source", "generated"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=LIMIT_SECONDS - 60,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_run_in_which_every_sample_counts_once_passes_the_audit() -> None:
    assert audit.faults(EXPECTED, ONCE, GENERATED, {}) == []
    without_c = dict.fromkeys("ab", 1)
    assert audit.faults(EXPECTED, without_c, GENERATED, {"c": "quarantined: damaged"}) == []


@pytest.mark.parametrize(
    ("counts", "digests", "terminal", "words"),
    [
        ({**ONCE, "b": 2}, GENERATED, {}, "1 trained more than once: b"),
        ({"a": 1, "c": 1}, GENERATED, {}, "1 lost: neither trained nor reported as terminal: b"),
        ({**ONCE, "b": 0}, GENERATED, {}, "1 lost: neither trained nor reported as terminal: b"),
        (ONCE, {**GENERATED, "c": "content of b"}, {}, "1 trained on other content"),
        (ONCE, {}, {}, "3 trained on other content than was generated: a, b, c"),
        (ONCE, GENERATED, {"a": "rejected"}, "1 trained and reported as terminal: a"),
        ({**ONCE, "z": 1}, GENERATED, {}, "1 not in the prompt list: z"),
    ],
)
def test_broken_trainer_is_found_by_the_audit(
    counts: dict[str, int], digests: dict[str, str], terminal: dict[str, str], words: str
) -> None:
    (fault,) = audit.faults(EXPECTED, counts, digests, terminal)
    assert words in fault


def test_flipping_relay_damages_payloads_and_nothing_else() -> None:
    sent = [(b"header %d" % k * 50, bytes(1 + 300 * k)) for k in range(40)]
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        port = router.bind_to_random_port("tcp://127.0.0.1")
        listener = socket.create_server(("127.0.0.1", 0))
        near = listener.getsockname()[1]
        relay = Relay(listener, lambda: socket.create_connection(("127.0.0.1", port)), seed=1)
        with closing(relay), context.socket(zmq.DEALER) as dealer:
            dealer.connect(f"tcp://127.0.0.1:{near}")
            dealer.send(b"here")
            identity, _ = router.recv_multipart()
            relay.flip(5)
            for header, payload in sent:
                router.send_multipart([identity, b"alone" * 100])
                router.send_multipart([identity, header, payload])
            got = [dealer.recv_multipart() for _ in range(2 * len(sent))]
    assert got[::2] == [[b"alone" * 100]] * len(sent)
    assert [header for header, _ in got[1::2]] == [header for header, _ in sent]
    flipped = sum(bin(byte).count("1") for _, payload in got[1::2] for byte in payload)
    assert flipped == relay.flipped == 5


def test_faults_that_were_active_at_once_are_counted_as_a_pair() -> None:
    happened = [
        Happened("kill", 0, 2, ""),
        Happened("cut", 1, 3, ""),
        Happened("cut", 2.5, 4, ""),
        Happened("fill", 4, 5, ""),
    ]
    assert overlaps(happened) == {"cut + kill": 1, "cut + cut": 1}
