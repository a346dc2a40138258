"""`draftfeed keygen`: a pair of CURVE keys in two files."""

import argparse
import os
import sys
from pathlib import Path

import zmq
from rich.console import Console

from draftfeed_deploy import exits
from draftfeed_deploy.errors import OutputError
from draftfeed_producer.access import PUBLIC_SUFFIX
from draftfeed_proto.keys import KeyPair, file_text

EPILOG = f"""\
It writes NAME.secret, readable by you alone, and NAME{PUBLIC_SUFFIX}. The secret file stays on the
machine that it is for; the public one goes to the other side. All producers of a run may share a
pair, since a consumer names one key for them.

example, with producers on one node and a training node:
  on the inference node       draftfeed keygen keys/producers
  on the training node        draftfeed keygen keys/train-a
  then copy keys/producers{PUBLIC_SUFFIX} to the training node, and keys/train-a{PUBLIC_SUFFIX}
  to the inference node, there into a directory of its own, say keys/clients

  producer.toml   [server]
                  key = "keys/producers.secret"
                  clients = ["keys/clients"]
  consumer.toml   [producer]
                  key = "keys/train-a.secret"
                  server_key = "keys/producers{PUBLIC_SUFFIX}"

A node that is to replace train-a gets a pair of its own, and its public file goes into
keys/clients before it is needed: producers read them when they start, and at SIGHUP.
"""


def add_command(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds `keygen` to the `draftfeed` command."""
    parser = commands.add_parser(
        "keygen",
        help="make the keys that encrypt a stream and say who may take it",
        description="Make a pair of CURVE keys: for the producers of a run, or for one consumer.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", type=Path, metavar="NAME", help="of the files, without the ending")
    parser.set_defaults(command=_keygen)


def _keygen(arguments: argparse.Namespace, _: Console) -> int:
    secret, public = write_pair(arguments.name.expanduser())
    sys.stdout.write(f"{secret}  keep it here\n{public}  give it to the other side\n")
    return exits.DONE


def write_pair(name: Path) -> tuple[Path, Path]:
    """(secret file, public file). Neither replaces one that is there; both are written, or none.
    Raises OutputError."""
    if not name.name:
        raise OutputError(name, OSError(0, "it is no name of a file"), "choose another NAME")
    keys = KeyPair(*zmq.curve_keypair())
    secret = name.with_name(f"{name.name}.secret")
    public = name.with_name(f"{name.name}{PUBLIC_SUFFIX}")
    written: list[Path] = []
    try:
        name.parent.mkdir(parents=True, exist_ok=True)
        for path, mode, is_secret in ((secret, 0o600, True), (public, 0o644, False)):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            written.append(path)
            with open(descriptor, "w") as file:
                os.fchmod(descriptor, mode)  # whatever the umask is: services have to read it
                file.write(file_text(keys, secret=is_secret))
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        for path in written:
            path.unlink()
        raise OutputError(Path(error.filename or name), error, "choose another NAME") from None
    return secret, public
