"""Keys: who gets the stream, and what everybody else is told."""

import os
import signal
import socket
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from bare_member import BareMember
from draftfeed_consumer import credentials
from draftfeed_consumer.client import ClientConfig
from draftfeed_consumer.link import Link, LinkDown
from draftfeed_deploy.accounts import ask
from draftfeed_deploy.cli import main
from draftfeed_deploy.keygen import write_pair
from draftfeed_producer.listener import Listener, ServerConfig
from draftfeed_proto import messages as m
from draftfeed_proto.errors import KeyFileError
from draftfeed_proto.ids import IdSet
from draftfeed_proto.keys import read_secret
from harness import producing
from processes import Run
from waiting import eventually

pytestmark = pytest.mark.timeout(120)


class Keys:
    """Pairs in a directory; `clients` has the public ones of those that are known."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.clients = directory, directory / "clients"
        self.clients.mkdir()
        for name in ("producers", "other-producers", "known", "stranger"):
            write_pair(directory / name)
        self.let_in("known")

    def let_in(self, name: str) -> None:
        (self.clients / f"{name}.pub").write_bytes((self.directory / f"{name}.pub").read_bytes())

    def server(self, bind: str = "tcp://127.0.0.1:*") -> ServerConfig:
        return ServerConfig(
            bind=bind, key=self.directory / "producers.secret", clients=(self.clients,)
        )

    def client(self, name: str, server: str = "producers") -> credentials.Credentials:
        return credentials.read(self.directory / f"{name}.secret", self.directory / f"{server}.pub")

    def options(self, name: str, server: str = "producers") -> list[str]:
        if name == "producer":
            return [
                *("--set", f"server.key={self.directory / 'producers.secret'}"),
                *("--set", f"server.clients=['{self.clients}']"),
            ]
        return [
            *("--set", f"producer.key={self.directory / f'{name}.secret'}"),
            *("--set", f"producer.server_key={self.directory / f'{server}.pub'}"),
        ]


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    directory = tmp_path / "run"
    directory.mkdir()
    run = Run(directory, rate=0)
    yield run
    run.kill_all()


def outcome(address: str, own: credentials.Credentials | None) -> str:
    """ "up", or why not."""
    with zmq.Context() as context:
        link = Link(context, address, own)
        pause = threading.Event()
        try:
            for _ in range(200):
                if link.check():
                    return "up"
                pause.wait(0.02)
            return "neither up nor down"
        except LinkDown as down:
            return str(down)
        finally:
            link.close()


def test_a_run_with_keys_ends_with_every_sample_trained_once(keys: Keys, run: Run) -> None:
    producer = run.start("producer", *keys.options("producer"))
    consumer = run.start("consumer", *keys.options("known"))
    run.succeeds(consumer)
    run.succeeds(producer)
    assert run.trained() == run.expected()


def test_stranger_is_told_and_gets_nothing(keys: Keys, run: Run) -> None:
    producer = run.start("producer", *keys.options("producer"))
    stranger = run.start("consumer", *keys.options("stranger"))
    run.wait_for(stranger, "it does not know our key: add it to the producer's [server] clients")
    stranger.terminate()
    assert run.ended(stranger)[0] == 0
    run.wait_for(producer, "refused a client with the unknown public key")
    assert not (run.directory / "consumer").exists() or not run.steps("consumer")


def test_client_that_is_added_gets_in_after_a_hangup_signal(keys: Keys, run: Run) -> None:
    """The node that replaces another one: its key comes while the producer runs."""
    producer = run.start("producer", *keys.options("producer"))
    stranger = run.start("consumer", *keys.options("stranger"))
    run.wait_for(producer, "refused a client with the unknown public key")
    keys.let_in("stranger")
    producer.send_signal(signal.SIGHUP)
    run.wait_for(producer, "2 clients are known")
    run.succeeds(stranger)
    run.succeeds(producer)
    assert run.trained() == run.expected()


@pytest.mark.parametrize(
    ("name", "server", "words"),
    [
        ("known", "producers", "up"),
        ("stranger", "producers", "it does not know our key"),
        ("known", "other-producers", "it speaks without keys, or with others"),
        (None, "producers", "does it want keys?"),
    ],
)
def test_each_wrong_key_has_words_of_its_own(
    keys: Keys, name: str | None, server: str, words: str
) -> None:
    listener = Listener(keys.server())
    try:
        own = keys.client(name, server) if name else None
        assert words in outcome(listener.address, own)
    finally:
        listener.close()


def test_keys_where_none_are_wanted(keys: Keys) -> None:
    listener = Listener(ServerConfig(bind="tcp://127.0.0.1:*"))
    try:
        words = outcome(listener.address, keys.client("known"))
        assert "it speaks without keys, or with others" in words
    finally:
        listener.close()


def test_client_that_is_added_gets_in_without_a_restart(keys: Keys) -> None:
    listener = Listener(keys.server())
    try:
        assert listener.access is not None
        assert "does not know our key" in outcome(listener.address, keys.client("stranger"))
        keys.let_in("stranger")
        assert listener.access.reload() == (2, [])
        assert outcome(listener.address, keys.client("stranger")) == "up"
    finally:
        listener.close()


def test_key_that_is_taken_out_is_out_whatever_else_is_wrong(keys: Keys) -> None:
    """Also when it was the last one, or another file was damaged by the same edit."""
    keys.let_in("stranger")
    listener = Listener(keys.server())
    try:
        assert listener.access is not None
        (keys.clients / "known.pub").write_text("nonsense")
        (keys.clients / "stranger.pub").unlink()
        clients, faults = listener.access.reload()
        assert clients == 1
        assert ["known.pub: it has no public-key" in str(fault) for fault in faults] == [True]
        assert outcome(listener.address, keys.client("known")) == "up"
        assert "does not know our key" in outcome(listener.address, keys.client("stranger"))
        (keys.clients / "known.pub").unlink()
        assert listener.access.reload() == (0, [])
        assert "does not know our key" in outcome(listener.address, keys.client("known"))
    finally:
        listener.close()


def test_directory_that_cannot_be_listed_is_said(keys: Keys, tmp_path: Path) -> None:
    """And not taken for an empty one."""
    with unreadable(keys.clients), pytest.raises(KeyFileError, match="cannot be read: Permission"):
        Listener(keys.server())
    listener = Listener(keys.server())
    try:
        assert listener.access is not None
        with unreadable(keys.clients):
            clients, faults = listener.access.reload()
        assert clients == 1
        assert "cannot be read: Permission denied" in str(faults[0])
    finally:
        listener.close()


@contextmanager
def unreadable(directory: Path) -> Iterator[None]:
    """For this process, which may be root's."""
    directory.chmod(0)
    directory.parent.chmod(0o711)
    uid = os.geteuid()
    if uid == 0:
        os.chown(directory.parent / "producers.secret", 65534, -1)
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(uid)
        directory.chmod(0o755)
        if uid == 0:
            os.chown(directory.parent / "producers.secret", 0, -1)


def test_connection_of_a_key_that_was_taken_out_gets_nothing_more(
    keys: Keys, tmp_path: Path
) -> None:
    """ZeroMQ asks for keys at the handshake only: one that was shut out must not go on, and not
    take the stream from the node that has it since."""
    keys.let_in("stranger")
    secret = keys.directory / "producers.secret"
    with producing(tmp_path / "spool", key=secret, clients=[keys.clients]) as producer:
        shut_out = BareMember(producer.address, credentials=keys.client("stranger"))
        shut_out.open()
        producer.generate(range(3))
        shut_out.receive(3)
        (keys.clients / "stranger.pub").unlink()
        assert producer.access is not None
        assert producer.access.reload() == (1, [])
        producer.server.shut_out()
        assert shut_out.until(m.Refused).reason == "your key is not known here any more"
        eventually(lambda: not producer.server.statistics().members, "its session is over")
        other = BareMember(producer.address, term=2, credentials=keys.client("known"))
        answer = shut_out.take_again(term=3)
        assert isinstance(answer, m.Refused)
        assert answer.code == "session"
        shut_out.say(m.Commit, number=1, trained=IdSet(shut_out.received).to_wire())
        assert "any more" in shut_out.until(m.Refused).reason
        other.open()
        assert len(other.receive(3)) == 3
        for member in (shut_out, other):
            member.close()


def test_what_is_sent_cannot_be_read_on_the_way(keys: Keys) -> None:
    """Through a tap on the cable: with keys, no word of a message; without, all of them."""
    marker = b"a name that is nowhere else"
    for config, own in (
        (ServerConfig(bind="tcp://127.0.0.1:*"), None),
        (keys.server(), keys.client("known")),
    ):
        listener = Listener(config)
        try:
            with Tap(listener.address) as tap, zmq.Context() as context:
                link = Link(context, tap.address, own)
                eventually(link.check, "a link")
                link.send(_fence(marker))
                eventually(lambda listener=listener: listener.socket.poll(0) != 0, "the message")
                link.close()
                assert (marker in tap.seen) == (own is None)
        finally:
            listener.close()


def _fence(marker: bytes) -> m.Message:
    return m.Fence(
        version=m.VERSION,
        group=marker.decode(),
        member="0",
        incarnation="i",
        process="p",
        term=1,
    )


class Tap:
    """A relay that keeps what goes through it."""

    def __init__(self, address: str) -> None:
        self._to = int(address.rpartition(":")[2])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.seen = b""
        self._sockets: list[socket.socket] = []

    def __enter__(self) -> "Tap":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        for one in (self._listener, *self._sockets):
            one.close()

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError:
            return
        server = socket.create_connection(("127.0.0.1", self._to))
        self._sockets += [client, server]
        for one, other in ((client, server), (server, client)):
            threading.Thread(target=self._copy, args=(one, other), daemon=True).start()

    def _copy(self, one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(1 << 16):
                self.seen += data
                other.sendall(data)
        except OSError:
            return


def test_audit_asks_a_producer_that_has_keys(
    keys: Keys, run: Run, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run.start("producer", *keys.options("producer"))
    run.wait_for_lines("producer/samples.jsonl", 60)
    monkeypatch.chdir(run.directory)
    assert main(["audit", "-c", "producer.toml", *keys.options("producer")]) == 0
    assert "(running, " in capsys.readouterr().out


def test_secret_that_others_may_read_is_refused(keys: Keys, run: Run) -> None:
    for name, secret in (("producer", "producers"), ("known", "known")):
        path = keys.directory / f"{secret}.secret"
        path.chmod(0o640)
        service = "producer" if name == "producer" else "consumer"
        code, output = run.ended(run.start(service, *keys.options(name)))
        assert code == 2
        assert f"key file {path}: others may read it (mode 0640): chmod 600" in output


def test_secret_from_systemd_may_show_other_permissions(
    keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    (keys.directory / "known.secret").chmod(0o440)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(keys.directory))
    assert keys.client("known").own.public
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", "/nowhere")
    with pytest.raises(KeyFileError, match="others may read it"):
        keys.client("known")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ServerConfig(bind="tcp://0.0.0.0:5550"), "other machines can read the stream"),
        (lambda: ServerConfig(bind="tcp://*:5550"), "other machines can read the stream"),
        (lambda: ServerConfig(bind="tcp://eth0:5550"), "other machines can read the stream"),
        (lambda: ServerConfig(bind="tcp://[::]:5550"), "other machines can read the stream"),
        (lambda: ServerConfig(key=Path("x")), "clients is empty"),
        (lambda: ServerConfig(clients=(Path("x"),)), "no key"),
        (lambda: ClientConfig(addresses=("tcp://10.0.0.1:1",)), "is on another machine"),
        (lambda: ClientConfig(key=Path("x")), "belong together"),
        (lambda: ClientConfig(server_key=Path("x")), "belong together"),
    ],
)
def test_what_others_could_reach_needs_keys(make: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "address",
    ["tcp://127.0.0.1:1", "tcp://127.3.2.1:*", "tcp://localhost:1", "tcp://[::1]:1", "ipc://x"],
)
def test_this_machine_needs_none(address: str) -> None:
    assert ServerConfig(bind=address).key is None
    assert ClientConfig(addresses=(address,)).key is None


def test_without_keys_only_if_it_is_said() -> None:
    assert ServerConfig(bind="tcp://0.0.0.0:5550", insecure=True)
    assert ClientConfig(addresses=("tcp://10.0.0.1:1",), insecure=True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it has no public-key"),
        ('curve\n    public-key = "short"\n', "is not 40 characters of Z85"),
        ('curve\n    public-key = "' + "~" * 40 + '"\n', "is not 40 characters of Z85"),
        ("\x00\xff" * 100, "it has no public-key"),
    ],
)
def test_damaged_key_file_is_named_in_one_line(keys: Keys, text: str, words: str) -> None:
    path = keys.directory / "producers.pub"
    path.write_text(text)
    with pytest.raises(KeyFileError, match=words) as caught:
        keys.client("known")
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_public_file_is_no_secret(keys: Keys) -> None:
    (keys.directory / "known.pub").chmod(0o600)
    with pytest.raises(KeyFileError, match="it has no secret-key; it is the public one"):
        credentials.read(keys.directory / "known.pub", keys.directory / "producers.pub")


def test_secret_file_is_no_public_one(keys: Keys) -> None:
    """Who copies the wrong file has given the producers' secret to a training node."""
    secret = keys.directory / "producers.secret"
    with pytest.raises(KeyFileError, match="it holds a secret, which stays where it was made"):
        credentials.read(keys.directory / "known.secret", secret)
    (keys.clients / "wrong.pub").write_bytes(secret.read_bytes())
    with pytest.raises(KeyFileError, match=r"wrong\.pub: it holds a secret"):
        Listener(keys.server())


def test_keygen_writes_a_secret_that_is_one_and_replaces_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = tmp_path / "keys" / "node-a.1"
    assert main(["keygen", str(name)]) == 0
    secret, public = name.with_name("node-a.1.secret"), name.with_name("node-a.1.pub")
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert "secret" not in public.read_text()
    assert secret.read_text().split('"')[3] not in capsys.readouterr().out
    before = secret.read_bytes()
    assert main(["keygen", str(name)]) == 2
    assert secret.read_bytes() == before
    assert "choose another NAME" in capsys.readouterr().err


def test_keygen_under_a_strict_umask_makes_a_public_file_that_is_one(tmp_path: Path) -> None:
    """Or the copy that `cp -p` makes of it could not be read by a service."""
    before = os.umask(0o077)
    try:
        secret, public = write_pair(tmp_path / "node")
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (secret, public)] == [0o600, 0o644]


@pytest.mark.parametrize("name", ["", "."])
def test_keygen_without_a_name_is_one_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["keygen", name]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_keygen_leaves_no_half_of_a_pair(tmp_path: Path) -> None:
    (tmp_path / "node.pub").write_text("somebody's")
    assert main(["keygen", str(tmp_path / "node")]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["node.pub"]
    assert (tmp_path / "node.pub").read_text() == "somebody's"


def test_secret_file_of_two_pairs_is_named(keys: Keys) -> None:
    """A connection made with it is refused for reasons that lead elsewhere."""
    public = (keys.directory / "stranger.pub").read_text().split('"')[1]
    path = keys.directory / "known.secret"
    own = (keys.directory / "known.pub").read_text().split('"')[1]
    path.write_text(path.read_text().replace(own, public))
    with pytest.raises(KeyFileError, match=r"known\.secret: its public-key is not that of its"):
        keys.client("known")


def test_nobody_gets_in_while_nobody_is_there_to_ask(keys: Keys) -> None:
    listener = Listener(keys.server())
    assert listener.access is not None
    listener.access.close()
    try:
        assert outcome(listener.address, keys.client("known")) != "up"
    finally:
        listener.socket.close(linger=0)
        listener.context.term()


def test_fifo_among_the_keys_does_not_hold_the_reload_up(keys: Keys) -> None:
    os.mkfifo(keys.clients / "fifo.pub")
    with pytest.raises(KeyFileError, match=r"fifo\.pub: it is no regular file"):
        Listener(keys.server())


@pytest.mark.parametrize(
    "make",
    [
        lambda: ServerConfig(bind="tcp://127.0.0.1:99999"),
        lambda: ServerConfig(bind="tcp://127.0.0.1:-1"),
        lambda: ServerConfig(bind="tcp://127.0.0.1:5550/x"),
        lambda: ServerConfig(bind="tcp://127.0.0.1:"),
        lambda: ClientConfig(addresses=("tcp://[::1]:65536",)),
    ],
)
def test_what_is_no_port_is_refused(make: Callable[[], object]) -> None:
    """ZeroMQ would take another one, which nobody looks for."""
    with pytest.raises(ValueError, match="is no port"):
        make()


def test_ipv6_address_is_listened_at_and_found(keys: Keys) -> None:
    listener = Listener(keys.server("tcp://[::1]:*"))
    try:
        assert listener.address.startswith("tcp://[::1]:")
        assert outcome(listener.address, keys.client("known")) == "up"
    finally:
        listener.close()


def test_a_pair_does_not_print_its_secret(keys: Keys) -> None:
    own = keys.client("known").own
    assert own.secret.decode() not in f"{own} {own!r}"


def test_audit_asks_over_ipv6(keys: Keys, tmp_path_factory: pytest.TempPathFactory) -> None:
    spool = tmp_path_factory.mktemp("spool")
    secret = keys.directory / "producers.secret"
    with producing(spool, bind="tcp://[::1]:*", key=secret, clients=[keys.clients]) as made:
        own = read_secret(secret, zmq.curve_public)
        assert ask(made.address, 20.0, own) is not None
