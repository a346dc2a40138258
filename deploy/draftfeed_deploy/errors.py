"""Errors of the command line.

DeployError (ValueError)
├── ConfigError   a configuration file or a --set that cannot be used
└── DemoError     the demo could not be run; its own checks failing is not an error but a result
"""


class DeployError(ValueError):
    """Base of every error in this package."""


class ConfigError(DeployError):
    def __init__(self, where: str, reason: str) -> None:
        super().__init__(f"{where}: {reason}")
        self.where, self.reason = where, reason


class DemoError(DeployError):
    """A service of the demo ended before its time; the message names its log."""
