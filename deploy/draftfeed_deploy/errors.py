"""Errors of the command line.

DeployError (ValueError)
├── ConfigError         a configuration file or a --set that cannot be used
├── OutputError         a file or directory that cannot be written
├── MissingPackage      an optional dependency is not installed
│   └── SmolLM2Unavailable  the one that carries the demo's model
├── DemoError           a directory that the demo will not write to
├── StatusBindError     the address of [status] cannot be listened at
├── ServiceUnreachable  a running service that does not answer, or is none
├── DirectoryInUse      another consumer trains into the same output directory
├── NothingToDrain      no consumer that could be drained from here
├── NothingToMeasure    a spool without a sample
├── NothingToExport     a spool without a sample that the trainer could use
└── RunFailed           what was configured rightly and failed nevertheless
    ├── ServiceFailed   a service of the demo ended before its time, or stands still
    ├── NotLossless     a codec did not give back what it was given
    ├── BenchmarkFailed an engine that gave nothing to measure
    └── CommitUnknown   the producer has not confirmed the last checkpoint
"""

from pathlib import Path


class DeployError(ValueError):
    """Base of every error in this package."""


class ConfigError(DeployError):
    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}")
        self.where, self.reason = where, reason


class OutputError(DeployError):
    def __init__(self, path: Path, cause: OSError, fix: str) -> None:
        super().__init__(f"{path} cannot be written: {cause.strerror}; {fix}")
        self.path, self.cause, self.fix = path, cause, fix


class MissingPackage(DeployError):
    """draftfeed is in no package registry: extras are installed from a checkout of it."""

    def __init__(self, command: str, package: str, install: str) -> None:
        super().__init__(
            f"{command} needs {package}, which is not installed; in the checkout run: {install}"
        )
        self.command, self.package, self.install = command, package, install


class SmolLM2Unavailable(MissingPackage):
    """Something that is needed to make the model directory is not installed."""


class DemoError(DeployError):
    """A directory that the demo will not write to."""


class StatusBindError(DeployError):
    def __init__(self, address: str, reason: str, *, absent: bool = False) -> None:
        """absent: no interface has the address, which may come while a machine boots."""
        super().__init__(f"[status] bind: cannot listen at {address}: {reason.lower()}")
        self.address, self.reason, self.absent = address, reason, absent


class ServiceUnreachable(DeployError):
    def __init__(self, url: str, reason: str) -> None:
        super().__init__(f"{url}: {reason}")
        self.url, self.reason = url, reason


class DirectoryInUse(DeployError):
    def __init__(self, directory: Path, holder: str) -> None:
        super().__init__(
            f"{directory} is in use by the consumer {holder}; end that one first (draftfeed "
            "drain), choose another [trainer] output_dir, or take its place with --takeover"
        )
        self.directory, self.holder = directory, holder


class NothingToDrain(DeployError):
    """No consumer that could be drained from here; the message says which case it is."""


class NothingToMeasure(DeployError):
    def __init__(self, directory: Path, damaged: int) -> None:
        why = (
            f"the {damaged} chunks that were tried are damaged; `draftfeed spool verify` tells more"
            if damaged
            else "let its producer make a few first"
        )
        super().__init__(f"{directory} has no samples to measure with: {why}")
        self.directory, self.damaged = directory, damaged


class NothingToExport(DeployError):
    def __init__(self, directory: Path, left_out: dict[str, int]) -> None:
        """left_out: how many, by reason; none where there was no sample at all."""
        why = "; ".join(f"{count} {reason}" for reason, count in left_out.items() if count)
        super().__init__(
            f"{directory} has no samples to export: "
            + (f"left out are {why}" if why else "let its producer make a few first")
        )
        self.directory, self.left_out = directory, left_out


class RunFailed(DeployError):
    """Base of failures that no other configuration would have prevented."""


class ServiceFailed(RunFailed):
    """A service of the demo ended before its time or stands still; the message names its log."""


class NotLossless(RunFailed):
    def __init__(self, name: str) -> None:
        super().__init__(f"{name} did not give back the states that it was given, or changed them")
        self.name = name


class BenchmarkFailed(RunFailed):
    """The target was run and there are no figures; the message says why."""


class CommitUnknown(RunFailed):
    def __init__(self) -> None:
        super().__init__(
            "training ended and its last checkpoint is on the disk, but the producer has not "
            "confirmed it; start both again from that checkpoint, unless the producer's log says "
            "that all prompts are terminal"
        )
