"""The last words of a local run."""

from __future__ import annotations

from finetune_cli.exit_codes import ExitCode
from finetune_cli.local.summary import Summary
from finetune_cli.render.run import summary_text


def test_an_interrupted_run_says_how_to_continue():
    text = summary_text(ExitCode.INTERRUPTED, Summary(losses=None, step=7, adapter=None, merged=None, verification=None))
    assert "Run the same command again to continue" in text
    assert "last step:     7" in text
