"""Exit codes of the `draftfeed` command, by class of the error that ended it.

0    done, drained, or stopped before it had begun
1    the run failed: RunFailed, CaptureError, SpoolFull, ArchiveGone, ChunkError,
     MalformedMessage, every StreamError that is not named below, a ConsumerError that is nothing
     narrower (the client stopped); an address to listen at that no interface has yet; a check of
     the demo that does not hold; and a drafter with which `draftfeed evaluate` decodes something
     else than the target alone
2    wrong configuration or input: StreamRefused, and every other error of ours
3    Fenced: another process took over the stream. A supervisor that restarts services must not
     restart this one: it would only wait, or take over in its turn
130  interrupted

An error of nobody's is a bug: it has no code, and its traceback is shown.
"""

from draftfeed_consumer.errors import ConsumerError, Fenced, StreamError, StreamRefused
from draftfeed_deploy.errors import DeployError, RunFailed, StatusBindError
from draftfeed_producer.errors import ArchiveGone, BindError, CaptureError, ProducerError, SpoolFull
from draftfeed_proto.errors import ChunkError, MalformedMessage, ProtoError

DONE, FAILED, WRONG_INPUT, FENCED, INTERRUPTED = 0, 1, 2, 3, 130
SUMMARY = """\
exit codes: 0 done, or drained; 1 the run failed, or what was checked does not hold;
            2 wrong configuration or input; 3 another process took over the stream:
            do not restart this one; 130 interrupted
"""

_OURS = (DeployError, ProtoError, ProducerError, ConsumerError)
_FAILURES = (
    *(RunFailed, CaptureError, SpoolFull, ArchiveGone),
    *(ChunkError, MalformedMessage, StreamError),
)


def code_of(error: ValueError) -> int | None:
    """The exit code, or None for an error that is not ours."""
    if not isinstance(error, _OURS):
        return None
    if isinstance(error, Fenced):
        return FENCED
    if isinstance(error, StreamRefused):
        return WRONG_INPUT
    if isinstance(error, BindError | StatusBindError) and error.absent:
        return FAILED
    failed = isinstance(error, _FAILURES) or type(error) is ConsumerError
    return FAILED if failed else WRONG_INPUT
