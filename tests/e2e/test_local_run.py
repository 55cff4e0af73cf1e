"""`finetune run` as its user runs it: to a verified model, through a kill, and into each kind of bad input."""

import fcntl
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import yaml

from tests.support.hub import running_hub
from tools.cluster.binaries import ensure_binaries
from tools.cluster.errors import wait_until
from tools.s3 import REGION, SECRET_KEY, running_s3
from tools.stack import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]
FINETUNE = Path(sys.executable).parent / "finetune"
EXAMPLE = ROOT / "examples/quickstart.yaml"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Claims with the quickstart's model and data."""
    claims = tmp_path_factory.mktemp("inputs")
    subprocess.run([sys.executable, "-m", "tools.quickstart", claims], cwd=ROOT, check=True, timeout=300)
    return claims


def start(claims: Path, manifest: Path = EXAMPLE, environment: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [FINETUNE, "run", manifest, "--claims", claims],
        cwd=claims,
        env=os.environ | dict(environment or {}),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )


def run(claims: Path, manifest: Path = EXAMPLE, environment: Mapping[str, str] | None = None) -> tuple[int, str]:
    process = start(claims, manifest, environment)
    output, _ = process.communicate(timeout=600)
    return process.returncode, output


@pytest.fixture(scope="module")
def not_rehearsed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same manifest without the rehearsal, of which the undisturbed run has one."""
    manifest = yaml.safe_load(EXAMPLE.read_text())
    manifest["spec"]["preflight"] = {"rehearsal": "Skip"}
    path = tmp_path_factory.mktemp("manifests") / "not-rehearsed.yaml"
    path.write_text(json.dumps(manifest))
    return path


@pytest.fixture(scope="module")
def undisturbed(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    claims = tmp_path_factory.mktemp("undisturbed") / "claims"
    shutil.copytree(inputs, claims)
    code, output = run(claims)
    assert code == 0, output
    return claims, output


def adapter(claims: Path) -> bytes:
    return (claims / "models-out/quickstart/adapter/adapter_model.safetensors").read_bytes()


def test_it_ends_with_a_verified_model_that_needs_no_peft(undisturbed: tuple[Path, str]) -> None:
    claims, output = undisturbed
    result = claims / "models-out/quickstart"
    verification = json.loads((result / "verification.json").read_text())
    assert verification["passed"] is True
    assert str(result / "merged") in output.replace("\n", "")
    assert (result / "report.html").read_text().count("<dt>Tuned model</dt>") == 3
    assert str(result / "report.html") in output.replace("\n", "")
    (events,) = (claims / "workspace").glob("*/trackers/tensorboard/events.out.tfevents.*")
    assert b"learning_rate" in events.read_bytes()
    history = next((claims / "workspace").glob("*/history.jsonl")).read_text()
    losses = [line["eval_loss"] for line in map(json.loads, history.splitlines()) if line.get("eval_loss") is not None]
    assert losses[-1] < 0.9 * losses[0]
    subprocess.run([sys.executable, "-m", "tools.plain_load", result / "merged"], cwd=ROOT, check=True, timeout=300)


def as_alpaca(inputs: Path, split: str) -> bytes:
    pairs = [json.loads(line) for line in (inputs / f"data/{split}.jsonl").read_text().splitlines()]
    records = [{"instruction": pair["prompt"], "input": "", "output": pair["completion"]} for pair in pairs]
    return "".join(f"{json.dumps(record)}\n" for record in records).encode()


def test_a_killed_command_and_inputs_elsewhere_change_no_byte(
    inputs: Path, undisturbed: tuple[Path, str], not_rehearsed: Path, tmp_path: Path
) -> None:
    """The model comes from a hub, the records from an S3 server, and the results go there; the command is killed while it trains.

    The records have Alpaca's form, in a directory whose file names tell the splits apart. `python -m tests.kill` kills the ranks.
    """
    claims, token = tmp_path / "claims", "hf_token_of_the_test"
    claims.mkdir()
    with running_hub() as hub, running_s3(ensure_binaries().versitygw, tmp_path / "s3") as s3:
        model = {path.name: path.read_bytes() for path in (inputs / "models/tiny-llama").iterdir()}
        commit = hub.add("org/tiny-llama", model | {"pytorch_model.bin": b"pickle"}, token=token)
        s3.upload("sets", {f"docs/{split}-00000-of-00001.jsonl": as_alpaca(inputs, split) for split in ("train", "validation")})
        manifest = yaml.safe_load(not_rehearsed.read_text())
        manifest["spec"]["model"] |= {"source": "hf://org/tiny-llama", "revision": commit}
        manifest["spec"]["data"] |= {
            "source": "s3://sets/docs",
            "mapping": {"preset": "Alpaca", "separator": ""},
            "validation": {"source": "s3://sets/docs"},
        }
        manifest["spec"]["output"] = {"destination": "s3://results/tuned"}
        s3.make_bucket("results")
        path = tmp_path / "job.yaml"
        path.write_text(json.dumps(manifest))
        endpoints = {"HF_ENDPOINT": hub.address, "AWS_ENDPOINT_URL": s3.address, "AWS_REGION": REGION, "NO_PROXY": "127.0.0.1"}
        environment = endpoints | s3.environment() | {"HF_TOKEN": token, "HF_HUB_OFFLINE": "1"}
        kill_in_training(claims, path, environment)
        code, output = run(claims, path, environment)
        published = s3.buckets / "results/tuned"
        assert code == 0, output
        assert (published / "adapter/adapter_model.safetensors").read_bytes() == adapter(undisturbed[0])
        subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=published, check=True)
        written = json.loads((published / "adapter/adapter_config.json").read_text())
    assert "s3://results/tuned" in output
    logs = "".join(log.read_text() for log in (claims / ".finetune").rglob("*") if log.is_file())
    assert token not in output + logs
    assert SECRET_KEY not in output + logs
    assert written["base_model_name_or_path"] == "org/tiny-llama"


def on_terminal(claims: Path, manifest: Path) -> tuple[subprocess.Popen[bytes], int]:
    """The command as the leader of a terminal's session, and our end of that terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [FINETUNE, "run", manifest, "--claims", claims],
        cwd=claims,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - a system call and no lock
    )
    os.close(theirs)
    os.set_blocking(ours, False)
    return process, ours


def shown_on(terminal: int) -> str:
    """What has come since the last look."""
    try:
        return os.read(terminal, 65_536).decode(errors="replace")
    except OSError:  # nothing new, or nobody writes to it any more
        return ""


ENDS: dict[str, Callable[[int, int], object]] = {
    "Ctrl-C": lambda _pid, terminal: os.write(terminal, b"\x03"),
    "SIGTERM twice": lambda pid, _terminal: [os.kill(pid, signal.SIGTERM) for _ in range(2)],
    "a lost terminal": lambda _pid, terminal: os.close(terminal),
}


@pytest.mark.nightly
@pytest.mark.parametrize("end", ENDS)
def test_an_end_by_its_user_is_told_within_a_second_and_changes_no_byte(
    end: str, inputs: Path, undisturbed: tuple[Path, str], not_rehearsed: Path, tmp_path: Path
) -> None:
    claims = tmp_path / "claims"
    shutil.copytree(inputs, claims)
    process, terminal = on_terminal(claims, not_rehearsed)
    said = ""

    def has_checkpoint() -> bool:
        nonlocal said
        said += shown_on(terminal)
        assert process.poll() is None, said
        return bool(checkpoints(claims))

    with process:
        try:
            wait_until(has_checkpoint, "a checkpoint", 300)
            asked, said = time.monotonic(), ""
            ENDS[end](process.pid, terminal)
            while process.poll() is None and time.monotonic() - asked < 120:
                if end != "a lost terminal":
                    said += shown_on(terminal)
                    assert "stopping: " in said or time.monotonic() - asked < 1, said
                time.sleep(0.02)
            assert process.poll() == 130, said
        finally:
            process.kill()
    state = subprocess.run([FINETUNE, "status", "--claims", claims], capture_output=True, text=True, check=True).stdout
    assert "stopped in train" in state
    code, output = run(claims, not_rehearsed)
    assert code == 0, output
    assert adapter(claims) == adapter(undisturbed[0])


def test_merge_as_a_command_gives_the_bytes_of_the_run(inputs: Path, undisturbed: tuple[Path, str], tmp_path: Path) -> None:
    result = undisturbed[0] / "models-out/quickstart"
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("The first prompt\nThe second prompt\n")
    command: list[str | Path] = [FINETUNE, "merge", "--base", inputs / "models/tiny-llama", "--adapter", result / "adapter"]
    command += ["--output", tmp_path / "merged", "--prompts", prompts]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "passed" in finished.stdout
    assert str(tmp_path / "merged") in finished.stdout
    weights = sorted(path.name for path in (result / "merged").glob("*.safetensors"))
    assert weights
    for name in weights:
        assert (tmp_path / "merged" / name).read_bytes() == (result / "merged" / name).read_bytes()


def kill_in_training(claims: Path, manifest: Path, environment: Mapping[str, str]) -> None:
    """Kill the command alone once there is a checkpoint. Its ranks save their state and end; until then other commands say so."""
    process = start(claims, manifest, environment)

    def has_checkpoint() -> bool:
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        return bool(checkpoints(claims))

    wait_until(has_checkpoint, "a checkpoint", 300)
    process.kill()
    process.wait()
    command = [FINETUNE, "status", "--claims", claims]

    def state() -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[1]

    wait_until(lambda: "stopped in train" in state(), "the ranks to end", 60)


def checkpoints(claims: Path) -> set[str]:
    return {path.parent.name for path in (claims / "workspace").glob("*/checkpoints/step-*[0-9]/manifest.json")}


def test_missing_data_are_refused_before_training(inputs: Path, not_rehearsed: Path, tmp_path: Path) -> None:
    """The tests of preflight have the other kinds of bad input."""
    claims = tmp_path / "claims"
    shutil.copytree(inputs, claims)
    (claims / "data/train.jsonl").unlink()
    code, output = run(claims, not_rehearsed)
    assert code == 1, output
    for word in ("train.jsonl", "spec.data.source"):
        assert word in " ".join(output.split()), output
    assert "Traceback" not in output
    left = [path for path in (claims / "workspace").rglob("*") if "prepared" in path.parts or ".tmp" in path.name]
    assert left == []
    assert not (claims / "models-out").exists() or not any((claims / "models-out").rglob("*.safetensors"))
