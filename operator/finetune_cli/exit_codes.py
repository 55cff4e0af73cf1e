"""Exit codes of `finetune`, and the error that ends a command with one of them."""

from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes that callers may rely on."""

    DONE = 0
    """Accepted, or done."""
    REFUSED = 1
    """A rule or preflight says that the job cannot work. For `wait`: the job failed or needs a person. For `audit` and
    `reproduce`: something differs."""
    UNUSABLE = 2
    """The input cannot be used, or an argument is wrong, such as the name of a job that does not exist."""
    FAILED = 3
    """A run failed, the cluster could not be read, or the API server rejected the request. For `wait`: the time ran out."""
    INTERRUPTED = 130
    """Interrupted by SIGINT or SIGTERM; a run can be continued."""


class LocalError(Exception):
    """An error that ends a command. Its message names what is wrong, its value, the reason and the fix."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.UNUSABLE) -> None:
        super().__init__(message)
        self.exit_code = exit_code
