"""The scale benchmark runs, and the simulation that goes on from it gets known cases right."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import document
import simulate
from simulation import CREDIT_BYTES, Cost, Costs, Layout, Simulation

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FREE = Costs()
MB = 1e6


@pytest.mark.timeout(300)
def test_every_member_gets_its_share_from_every_producer(tmp_path: Path) -> None:
    """It ends by itself when a sample is lost."""
    command = [sys.executable, str(BENCHMARKS / "scale.py"), "--quick", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    printed = json.loads(done.stdout)
    (cell,) = printed["rounds"]["4x2"]
    assert len(cell["member_bytes"]) == 2
    assert all(cell["member_bytes"])
    threads = {"producer MainThread", "producer server", "member client", "member codec"}
    assert threads < cell["cpu_seconds"].keys()
    assert printed["summary"]["1x1"]["cost"]["median"] > 0
    assert printed["summary"]["1x1"]["control_messages_per_sample"]["median"] >= 2
    assert printed["summary"]["1x1"]["chunks_per_sample"]["median"] >= 1
    (tmp_path / "scale.json").write_text(done.stdout)
    text = document.page(tmp_path).text
    assert "; 1 round.\n" in text
    assert "\n1x1 " in text


def layout(producers: int = 2, members: int = 2, rate: float = 100 * MB, **fields: float) -> Layout:
    return Layout(producers, members, rate, 5 * MB)._replace(**fields)


def test_what_was_made_is_delivered_or_still_there() -> None:
    simulation = Simulation(layout(members=3), Costs(client=Cost(per_gb=5)))
    outcome = simulation.run(20)
    assert outcome.made_bytes == pytest.approx(2000 * MB, rel=0.2)
    assert outcome.delivered_bytes + outcome.left_bytes == pytest.approx(outcome.made_bytes)
    assert sum(outcome.member_bytes) == pytest.approx(outcome.delivered_bytes)
    assert 0 <= outcome.left_bytes < 0.1 * outcome.made_bytes


def test_with_plenty_of_everything_all_is_delivered_to_all_alike() -> None:
    outcome = simulate.simulate(layout(members=4), FREE, 30)
    assert outcome.bytes_per_second == pytest.approx(100 * MB, rel=0.1)
    assert min(outcome.member_bytes) > 0.95 * max(outcome.member_bytes)


@pytest.mark.parametrize(
    ("costs", "stage", "nodes", "expected"),
    [
        (Costs(client=Cost(per_gb=2)), "client", (4, 1), 500 * MB),
        (Costs(client=Cost(per_gb=2)), "client", (4, 2), 1000 * MB),
        (Costs(server=Cost(per_gb=4)), "server", (1, 4), 250 * MB),
        (Costs(make=Cost(per_gb=5)), "make", (2, 1), 400 * MB),
        (Costs(decode=Cost(per_gb=4)), "decode", (4, 1), 500 * MB),
        (Costs(client=Cost(per_sample=0.01)), "client", (4, 1), 500 * MB),
    ],
)
def test_the_slowest_stage_sets_the_rate(
    costs: Costs, stage: str, nodes: tuple[int, int], expected: float
) -> None:
    outcome = simulate.simulate(layout(*nodes, rate=3000 * MB), costs, 10)
    assert outcome.bytes_per_second == pytest.approx(expected, rel=0.05)
    assert outcome.bottleneck == stage
    assert outcome.busy[stage] == pytest.approx(1, abs=0.02)


def test_a_link_passes_its_rate_times_the_ratio() -> None:
    each = layout(4, 1, 3000 * MB, link_bytes_per_second=125 * MB, ratio=1.5)
    outcome = simulate.simulate(each, FREE, 20)
    assert outcome.bytes_per_second == pytest.approx(187.5 * MB, rel=0.02)
    assert outcome.bottleneck == "member's link"
    shared = layout(4, 4, 3000 * MB, link_bytes_per_second=125 * MB, ratio=1.5)
    outcome = simulate.simulate(shared._replace(shared_link=True), FREE, 20)
    assert outcome.bytes_per_second == pytest.approx(187.5 * MB, rel=0.02)
    assert outcome.bottleneck == "producer's link"


@pytest.mark.parametrize("gbit", [1, 2.5, 10])
def test_limit_of_a_link_is_what_its_bytes_decode_to(gbit: float) -> None:
    """It was half of it: delivered was compared with a rate that is only the mean of what is
    made."""
    link = gbit * simulate.GBIT
    tokens, outcome = simulate.limit((8, 8), FREE, shared_link=True, link_bytes_per_second=link)
    assert tokens == pytest.approx(link * 1.48 / simulate.TOKEN_BYTES, rel=0.02)
    assert outcome.bottleneck == "producer's link"


def test_credit_bounds_what_a_long_way_carries() -> None:
    """A window for each round trip."""
    far = layout(1, 1, 3000 * MB, delay_seconds=0.1, ratio=1.5)
    outcome = simulate.simulate(far, FREE, 20)
    assert outcome.bytes_per_second == pytest.approx(CREDIT_BYTES * 1.5 / 0.2, rel=0.1)


def test_cores_bound_what_all_stages_together_get() -> None:
    costs = Costs(server=Cost(4), client=Cost(4), decode=Cost(4))
    full = layout(8, 2, 3000 * MB)._replace(producer_cores=2, one_machine=True)
    outcome = simulate.simulate(full, costs, 20)
    assert outcome.bytes_per_second == pytest.approx(2 / 12 * 1000 * MB, rel=0.1)
    assert outcome.cpu_per_gb == pytest.approx(12, rel=0.2)


def test_a_trainer_that_is_slow_leaves_the_rest_in_the_spool() -> None:
    slow = layout(2, 1, 500 * MB, trainer_bytes_per_second=100 * MB, buffer_bytes=200 * MB)
    outcome = simulate.simulate(slow, FREE, 20)
    assert outcome.delivered_bytes == pytest.approx(2000 * MB, rel=0.1)
    assert outcome.left_bytes > 7000 * MB


def test_costs_are_fitted_back_from_cells_that_have_them() -> None:
    """1 s a GB and 10 ms a sample, 1 ms of it for each producer."""

    def cell(producers: int, sample_bytes: float, client: float) -> dict[str, object]:
        return {
            "producers": producers,
            "members": 1,
            "megabytes_per_second": {"median": 100},
            "sample_bytes": {"median": sample_bytes},
            "cost_by_thread": {"member client": {"median": client}},
            "idle_by_thread": {},
        }

    measured = {
        "setup": {"synthetic_seconds_per_gb": 1.0},
        "summary": {
            "1x1": cell(1, 5e6, 1 + 0.01 / 0.005),
            "1x1L": cell(1, 40e6, 1 + 0.01 / 0.04),
            "32x1": cell(32, 5e6, 1 + (0.009 + 32 * 0.001) / 0.005),
        },
    }
    client = simulate.costs_of(measured).client
    assert client == pytest.approx(Cost(1, 0.009, 0.001))


def test_page_is_what_the_committed_figures_make() -> None:
    if not simulate.MEASURED.exists():
        pytest.skip("no figures were left yet")
    measured = json.loads(simulate.MEASURED.read_text())
    assert simulate.PAGE.read_text() == simulate.page(measured)
