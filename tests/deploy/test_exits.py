"""Which errors mean "mend your configuration" and which "the run failed"."""

import errno
from pathlib import Path

import pytest

from draftfeed_consumer import errors as consumer
from draftfeed_deploy import errors as deploy
from draftfeed_deploy import exits
from draftfeed_producer import errors as producer
from draftfeed_proto import errors as proto

FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    "error",
    [
        producer.CaptureError("a/0/0/1", 2, 9),
        producer.SpoolFull(Path("spool"), FULL),
        consumer.StreamLost("tcp://h:1", 600),
        consumer.ProducerClosing("tcp://h:1", "stopped"),
        consumer.StreamClosed(),
        consumer.ConsumerError("the client stopped: a bug"),
        deploy.ServiceFailed("the consumer ended with exit code 1"),
        deploy.CommitUnknown(),
        deploy.StatusBindError("10.0.0.1:9640", "cannot assign", absent=True),
        producer.BindError("tcp://10.0.0.1:1", "cannot assign", absent=True),
        proto.MalformedMessage("not a map"),
        proto.ChecksumMismatch(1, 2),
    ],
    ids=lambda error: type(error).__name__,
)
def test_failure_of_a_run_that_was_configured_rightly_is_1(error: ValueError) -> None:
    assert exits.code_of(error) == 1


@pytest.mark.parametrize(
    "error",
    [
        deploy.ConfigError("producer.toml", "is not TOML"),
        deploy.OutputError(Path("run"), FULL, "choose another"),
        deploy.MissingPackage("the demo", "matplotlib", "pip install matplotlib"),
        deploy.SmolLM2Unavailable("the demo", "gguf", "pip install gguf"),
        deploy.DemoError("not empty"),
        deploy.DirectoryInUse(Path("out"), "7 on here"),
        deploy.NothingToDrain("no consumer runs"),
        deploy.NothingToExport(Path("spool"), {"damaged": 1}),
        producer.PromptError("p.jsonl", 3, "no prompt"),
        producer.SpoolBusy(Path("spool")),
        producer.BindError("tcp://h:1", "in use"),
        deploy.StatusBindError("10.0.0.1:9640", "in use"),
        consumer.StreamRefused("tcp://h:1", "mismatch", "other layers"),
        consumer.TrainerError("target is missing"),
        consumer.ExportError("no last block"),
        consumer.StateError("not a draftfeed state"),
        proto.TooFewLayers(6, 5),
    ],
    ids=lambda error: type(error).__name__,
)
def test_wrong_configuration_or_input_is_2(error: ValueError) -> None:
    assert exits.code_of(error) == 2


def test_consumer_that_was_replaced_is_3_so_that_nothing_restarts_it() -> None:
    assert exits.code_of(consumer.Fenced("tcp://h:1", "term 2 was granted", 2)) == 3
    assert "3 another process took over" in exits.SUMMARY


def test_error_of_nobodys_has_no_code_so_that_its_traceback_is_seen() -> None:
    assert exits.code_of(ValueError("a bug")) is None
