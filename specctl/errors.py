"""What a person can do wrong, said in one line: what went wrong, where, what to do.

Knows nothing about terminals. The command line prints the message and exits with `exit_code`.
"""


class SpecctlError(Exception):
    """The work could not be done (exit code 1)."""

    exit_code = 1


class UsageError(SpecctlError):
    """The request itself was wrong: a config, a flag, a missing file (exit code 2)."""

    exit_code = 2


class NumericalError(SpecctlError):
    """A model produced NaN or infinite values; the message names the model and the step."""


class Interrupted(SpecctlError):
    """Ctrl+C arrived; the message says what was saved (exit code 130)."""

    exit_code = 130
