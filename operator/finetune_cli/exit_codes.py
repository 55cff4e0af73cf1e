"""Exit codes of `finetune`, and the error that carries one to the end of a command."""

from enum import IntEnum


class ExitCode(IntEnum):
    """What the caller of a command may rely on."""

    DONE = 0
    """Accepted, or run to the end."""
    REFUSED = 1
    """A rule or preflight says that the job cannot work; of `wait`: the job failed, or waits until a human acts;
    of `audit` and `reproduce`: something differs."""
    UNUSABLE = 2
    """The input cannot be read as what it should be; also wrong arguments, such as the name of a job that does not exist."""
    FAILED = 3
    """A run failed. Also: a cluster did not give what was asked for; of `wait`: the time ran out."""
    INTERRUPTED = 130
    """Ended by SIGINT or SIGTERM; a run can be continued."""


class LocalError(Exception):
    """The message names what is wrong, its value, the reason and the fix."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.UNUSABLE) -> None:
        super().__init__(message)
        self.exit_code = exit_code
