"""Why a local run cannot start."""

from finetune_cli.exit_codes import ExitCode


class LocalError(Exception):
    """The message names what is wrong, its value, the reason and the fix."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.UNUSABLE) -> None:
        super().__init__(message)
        self.exit_code = exit_code
