"""Lines of README and of docs/results.md for one machine, run as they stand there, in one directory and in the order of a user.

Stand-ins: the placeholders NAME and DIR have values, and the default place of claims is the DIR of the pages.
"""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.documented import ROOT, blocks_of

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(1800)]
PAGES = ("README.md", "docs/results.md")
LINES = {"init": "", "rehearse": "", "run": "job.yaml", "merge": "", "audit": "", "reproduce": "--local"}
"""Verb -> words of its line, if the pages have several."""
ANSWERS = "pvc://models/tiny-llama\npvc://data/train.jsonl\n2\n"
"""Model, data, devices."""


def line_of(verb: str, having: str | None = None) -> str:
    """The one line with this verb and these words in the pages' blocks, without what is said of it."""
    written = [line for page in PAGES for block in blocks_of(ROOT / page) for line in block.text.splitlines()]
    words = LINES[verb] if having is None else having
    (found,) = {line.partition("  ")[0] for line in written if f"finetune {verb} " in f"{line} " and words in line}
    return found.removeprefix(".venv/bin/")


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the examples and, as DIR, the claims of the quickstart."""
    desk = tmp_path_factory.mktemp("desk")
    subprocess.run([sys.executable, "-m", "tests.support.quickstart", desk / "DIR"], cwd=ROOT, check=True, timeout=300)
    (desk / "examples").symlink_to(ROOT / "examples")
    (desk / "runs").mkdir()
    (desk / "runs/claims").symlink_to(desk / "DIR")
    return desk


def done(desk: Path, line: str, asked: str = "") -> str:
    """What the line prints to its standard output. asked: answers that are typed on its terminal."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    ours, theirs = pty.openpty()
    os.write(ours, asked.encode())
    command = ["bash", "-euo", "pipefail", "-c", line]
    ended = subprocess.run(
        command, cwd=desk, env=environment, stdin=theirs, capture_output=True, text=True, timeout=900, check=False
    )
    for end in (ours, theirs):
        os.close(end)
    assert ended.returncode == 0, f"{line}\n{ended.stdout}{ended.stderr}"
    return ended.stdout


def test_lines_for_one_machine_are_run_as_they_are_written(desk: Path) -> None:
    (desk / "job.yaml").write_text(done(desk, line_of("init"), ANSWERS))
    written = yaml.safe_load((desk / "job.yaml").read_text())
    # Three epochs of the records would take an hour, and these are prompts and completions.
    written["spec"]["training"] = {"maxSteps": 4, "globalBatchSize": 4}
    written["spec"]["data"] |= {"format": "PromptCompletion", "maxSequenceLength": 128}
    (desk / "job.yaml").write_text(yaml.safe_dump(written))
    assert "the same bytes" in done(desk, line_of("rehearse"))
    done(desk, line_of("run"))
    tuned = desk / "DIR" / written["spec"]["output"]["destination"].removeprefix("pvc://")
    assert json.loads((tuned / "report.json").read_text())["verdict"]["outcome"] == "Passed"
    done(desk, line_of("run", "quickstart.yaml"))
    result = desk / "DIR/models-out/quickstart"
    subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=result, check=True)
    base, adapter, merged = desk / "DIR/models/tiny-llama", result / "adapter", desk / "merged"
    merge = line_of("merge").replace("--base DIR", f"--base {base}").replace("--adapter DIR", f"--adapter {adapter}")
    done(desk, merge.replace("--output DIR", f"--output {merged}"))
    for path in sorted((result / "merged").glob("*.safetensors")):
        assert (merged / path.name).read_bytes() == path.read_bytes()
    for verb in ("audit", "reproduce"):
        assert "nothing differs" in done(desk, line_of(verb).replace("NAME", "quickstart"))
