"""Two ranks in the consumer's unit: systemd sees one service, and its sandbox lets them meet."""

from collections.abc import Iterator

import pytest

import sdbox
from unit_hosts import Hosts, audit, consumer
from waiting import eventually

pytestmark = [
    pytest.mark.timeout(110),
    pytest.mark.skipif(bool(sdbox.missing()), reason=f"no systemd of our own: {sdbox.missing()}"),
]
PRODUCER, CONSUMER = "draftfeed-producer@0", "draftfeed-consumer"
TRAINED = "draftfeed_consumer_trained_samples_total"
PATH = "/opt/source/tests/system:/opt/source/tests:/opt/source/docs/examples"
DROP_IN = f"""[Service]
RestartSec=100ms
TimeoutStopSec=5
Environment=OMP_NUM_THREADS=1
Environment=PYTHONPATH={PATH}
Environment="RANKS=--ranks 2"
EnvironmentFile=
Environment=LD_LIBRARY_PATH=/opt/python/lib
"""
OPTIONS = "{ samples = 2, save_steps = 2 }"


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    with Hosts(tmp_path_factory.mktemp("hosts"), ("inf", "tr1")) as hosts:
        yield hosts


def rank_pids(hosts: Hosts) -> list[int]:
    """As the box numbers them: its main process started them."""
    main = hosts.boxes["tr1"].show(CONSUMER, "MainPID")["MainPID"]
    found = hosts.boxes["tr1"].run("pgrep", "--parent", main, check=False).stdout
    return [int(pid) for pid in found.split()]


def wait_for_both(hosts: Hosts) -> None:
    """Until both ranks train."""

    def train() -> bool:
        return all(hosts.value("tr1", port, TRAINED) >= 4 for port in (9660, 9661))

    try:
        eventually(train, "both ranks train")
    except AssertionError as error:
        raise AssertionError(f"{error}\n{hosts.boxes['tr1'].journal(CONSUMER)}") from None


def test_ranks_start_restart_and_drain_as_one_service(hosts: Hosts) -> None:
    hosts.fresh(4000, rate=1600)
    text = consumer(5).replace("stub_trainer", "ddp_faults")
    text = text.replace("{ checkpoint_steps = 5 }", OPTIONS)
    hosts.put("tr1", "/etc/draftfeed/consumer.toml", text)
    hosts.drop_in("tr1", f"{CONSUMER}.service", DROP_IN)
    hosts.inf.systemctl("start", PRODUCER)
    box = hosts.boxes["tr1"]

    box.systemctl("start", CONSUMER)  # returns at the first rank's READY=1
    wait_for_both(hosts)
    box.wait(CONSUMER, StatusText=lambda text: "attached, term 1, " in text)
    ranks = rank_pids(hosts)
    assert len(ranks) == 2

    box.run("kill", "-KILL", str(ranks[1]))
    box.wait(CONSUMER, NRestarts="1", ActiveState="active")
    wait_for_both(hosts)
    assert not {*ranks} & {*rank_pids(hosts)}

    box.systemctl("stop", CONSUMER)
    state = box.show(CONSUMER, "Result", "ExecMainStatus")
    said = box.journal(CONSUMER)
    assert state == {"Result": "success", "ExecMainStatus": "0"}, said
    assert "samples trained and committed" in said
    assert "held by members       0" in audit(hosts)
