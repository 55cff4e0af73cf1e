"""Lines of the pages for one machine, run as they stand there, in one directory and in the order of a user.

The default place of claims is the DIR of the pages, and `.venv` the environment of the tests.
"""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.documented import ROOT, as_written
from tools.cluster.errors import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.nightly, pytest.mark.timeout(1800)]
ANSWERS = "pvc://models/tiny-llama\npvc://data/train.jsonl\n2\n\n"
"""Model, data, devices, and the usual format in case the records are not found."""


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the examples and, as DIR, the claims of the quickstart."""
    desk = tmp_path_factory.mktemp("desk")
    subprocess.run([sys.executable, "-m", "tools.quickstart", desk / "DIR"], cwd=ROOT, check=True, timeout=300)
    (desk / "examples").symlink_to(ROOT / "examples")
    (desk / ".venv").symlink_to(Path(sys.executable).parents[1])
    (desk / "runs").mkdir()
    (desk / "runs/claims").symlink_to(desk / "DIR")
    return desk


ENVIRONMENT = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def done(desk: Path, line: str, asked: str = "") -> str:
    """What the line prints to its standard output. asked: answers that are typed on its terminal."""
    ours, theirs = pty.openpty()
    os.write(ours, asked.encode())
    command = ["bash", "-euo", "pipefail", "-c", line]
    ended = subprocess.run(
        command, cwd=desk, env=ENVIRONMENT, stdin=theirs, capture_output=True, text=True, timeout=900, check=False
    )
    for end in (ours, theirs):
        os.close(end)
    assert ended.returncode == 0, f"{line}\n{ended.stdout}{ended.stderr}"
    return ended.stdout


def write_job(desk: Path, written: dict[str, Any], **training: int) -> None:
    """Three epochs of the records would take an hour, and these are prompts and completions."""
    written["spec"]["training"] = {"maxSteps": 4, "globalBatchSize": 4} | training
    written["spec"]["data"] |= {"format": "PromptCompletion", "maxSequenceLength": 128}
    (desk / "job.yaml").write_text(yaml.safe_dump(written))


@pytest.fixture(scope="module")
def written(desk: Path) -> dict[str, Any]:
    """The manifest that `finetune init` writes."""
    manifest: dict[str, Any] = yaml.safe_load(done(desk, as_written("finetune init"), ANSWERS))
    return manifest


def test_lines_for_one_machine_are_run_as_they_are_written(desk: Path, written: dict[str, Any]) -> None:
    write_job(desk, written)
    assert "the same bytes" in done(desk, as_written("finetune rehearse job.yaml"))
    done(desk, as_written(".venv/bin/finetune run job.yaml"))
    tuned = desk / "DIR" / written["spec"]["output"]["destination"].removeprefix("pvc://")
    assert json.loads((tuned / "report.json").read_text())["verdict"]["outcome"] == "Passed"
    done(desk, as_written("finetune run examples/quickstart.yaml --claims DIR"))
    result = desk / "DIR/models-out/quickstart"
    assert "FAILED" not in done(result, as_written("sha256sum --check SHA256SUMS"))
    base, adapter, merged = desk / "DIR/models/tiny-llama", result / "adapter", desk / "merged"
    given = {"--base DIR": f"--base {base}", "--adapter DIR": f"--adapter {adapter}", "--output DIR": f"--output {merged}"}
    done(desk, as_written("finetune merge --base DIR --adapter DIR --output DIR", given))
    for path in sorted((result / "merged").glob("*.safetensors")):
        assert (merged / path.name).read_bytes() == path.read_bytes()
    for line in ("finetune audit NAME --intervals 3", "finetune reproduce NAME --local"):
        assert "nothing differs" in done(desk, as_written(line, {"NAME": "quickstart"}))


def test_a_run_is_followed_and_stopped_from_another_terminal(desk: Path, written: dict[str, Any]) -> None:
    name = "looked-after"
    written["metadata"]["name"] = name
    written["spec"]["output"]["destination"] = f"pvc://models-out/{name}"
    write_job(desk, written, maxSteps=100_000)
    command = ["bash", "-c", f"exec {as_written('finetune run job.yaml')}"]
    with (
        (desk / "said").open("w") as said,
        subprocess.Popen(
            command, cwd=desk, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=said, stderr=subprocess.STDOUT, text=True
        ) as run,
    ):
        try:
            wait_until(lambda: f"{name}: train" in (desk / "said").read_text() or run.poll() is not None, "training", 600)
            assert run.poll() is None, (desk / "said").read_text()
            follow = ["bash", "-c", f"exec {as_written('finetune attach NAME', {'NAME': name})}"]
            with subprocess.Popen(follow, cwd=desk, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as attached:
                assert attached.stdout is not None
                assert attached.stdout.readline()
                done(desk, as_written("finetune stop NAME", {"NAME": name}))
                attached.communicate(timeout=120)
            assert run.wait(timeout=120) != 0
        finally:
            run.terminate()
    assert "stopped in train" in done(desk, "finetune status")
