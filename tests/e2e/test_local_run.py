"""`finetune run` as its user runs it: to a verified model, through a power cut, and into each kind of bad input."""

import copy
import fcntl
import json
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_cli.jobs.diagnosis import diagnose
from finetune_cli.jobs.next_manifest import fork_of, parse_change, start_changes
from finetune_cli.jobs.seen import seen_job
from finetune_cli.local.claims import LOCAL_UID
from finetune_job.finding import FieldChange
from tests.support.forked_program import run_forked
from tests.support.hub import running_hub
from tests.unit.finetune_cli.jobs import objects
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


def test_a_killed_command_a_power_cut_and_inputs_elsewhere_change_no_byte(
    inputs: Path, undisturbed: tuple[Path, str], not_rehearsed: Path, tmp_path: Path
) -> None:
    """The model from a hub, the records from an S3 server and the results to it, ended twice in training: the same adapter.

    The same records are told in Alpaca's form, in a directory whose file names tell the splits apart.
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
        end_in_training(claims, path, environment, kill_command_alone(claims))
        end_in_training(claims, path, environment, _kill_tree)
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


def test_a_rehearsal_by_hand_says_what_it_changed_and_what_every_stage_gave(inputs: Path, tmp_path: Path) -> None:
    claims = tmp_path / "claims"
    shutil.copytree(inputs, claims)
    command = [FINETUNE, "rehearse", EXAMPLE, "--claims", claims]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    for stage in ("build", "train", "resume", "save", "compare", "merge"):
        assert stage in finished.stdout
    assert not list(claims.glob("models-out/**/*.safetensors"))
    assert not list(claims.glob("workspace/**/*.safetensors"))


def test_a_rehearsal_by_hand_ends_after_the_time_that_it_is_given(inputs: Path, tmp_path: Path) -> None:
    claims = tmp_path / "claims"
    shutil.copytree(inputs, claims)
    command = [FINETUNE, "rehearse", EXAMPLE, "--claims", claims, "--timeout", "2"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert finished.returncode == 3, finished.stdout + finished.stderr
    assert "it did not end in" in finished.stdout


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
    wrong = tmp_path / "adapter-of-another-rank"
    shutil.copytree(result / "adapter", wrong)
    settings = json.loads((wrong / "adapter_config.json").read_text())
    (wrong / "adapter_config.json").write_text(json.dumps(settings | {"r": settings["r"] + 1}))
    command[command.index("--adapter") + 1] = wrong
    command[command.index("--output") + 1] = tmp_path / "refused"
    refused = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert refused.returncode == 1, refused.stdout + refused.stderr
    assert "lora_A" in refused.stdout
    assert "Traceback" not in refused.stdout
    assert not (tmp_path / "refused").exists()


@pytest.mark.nightly
def test_it_is_reproduced_with_its_merged_model(undisturbed: tuple[Path, str]) -> None:
    claims, _ = undisturbed
    command = [FINETUNE, "reproduce", "quickstart", "--claims", claims, "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    document = json.loads(done.stdout)
    assert (document["outcome"], document["findings"], document["comparedMerged"]) == ("same", [], True)


def end_in_training(claims: Path, manifest: Path, environment: Mapping[str, str], end: Callable[[int], None]) -> None:
    """Run until there is a further checkpoint, and end it, given the command's process."""
    process, before = start(claims, manifest, environment), checkpoints(claims)

    def has_another() -> bool:
        assert process.poll() is None, process.stdout.read() if process.stdout else ""
        return bool(checkpoints(claims) - before)

    wait_until(has_another, "a checkpoint", 300)
    end(process.pid)
    process.wait()


def checkpoints(claims: Path) -> set[str]:
    return {path.parent.name for path in (claims / "workspace").glob("*/checkpoints/step-*[0-9]/manifest.json")}


def kill_command_alone(claims: Path) -> Callable[[int], None]:
    """Its ranks save their state and end by themselves; until then other commands say so."""

    def end(pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        shown = [FINETUNE, "status", "--claims", claims]

        def state() -> str:
            return subprocess.run(shown, capture_output=True, text=True, check=True).stdout.splitlines()[1]

        wait_until(lambda: "stopped in train" in state(), "what the command left to end", 60)

    return end


def _kill_tree(pid: int) -> None:
    """SIGKILL a process and all its descendants, the parents first, so that nobody restarts anything."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(pid, signal.SIGKILL)
    except (FileNotFoundError, ProcessLookupError):
        return
    for child in children:
        _kill_tree(int(child))


def _write(path: str, text: str) -> Callable[[Path], None]:
    return lambda claims: (claims / path).write_text(text) and None


def _truncate_a_shard(claims: Path) -> None:
    shard = min((claims / "models/tiny-llama").glob("model-*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])


def _only_pickles(claims: Path) -> None:
    for shard in (claims / "models/tiny-llama").glob("*.safetensors*"):
        shard.unlink()
    (claims / "models/tiny-llama/pytorch_model.bin").write_bytes(b"\x80\x04.")


def _no_weights(claims: Path) -> None:
    for shard in (claims / "models/tiny-llama").glob("*.safetensors*"):
        shard.unlink()


AT_NIGHT = pytest.mark.nightly
"""By day the tests of preflight have these."""


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        pytest.param(lambda claims: (claims / "data/train.jsonl").unlink(), ["train.jsonl", "spec.data.source"], id="missing"),
        pytest.param(
            _write("data/train.jsonl", '{"prompt": "a", "text": "b"}\n'),
            ["line 1", "completion"],
            id="key missing",
            marks=AT_NIGHT,
        ),
        pytest.param(_no_weights, ["safetensors", "spec.model.source"], id="no weights", marks=AT_NIGHT),
        pytest.param(_only_pickles, ["pytorch_model.bin", "spec.model.source"], id="pickles only", marks=AT_NIGHT),
        pytest.param(_truncate_a_shard, ["model-00001-of", "spec.model.source"], id="truncated shard"),
    ],
)
def test_bad_input_is_refused_before_training(
    inputs: Path, not_rehearsed: Path, tmp_path: Path, damage: Callable[[Path], Any], words: list[str]
) -> None:
    claims = tmp_path / "claims"
    shutil.copytree(inputs, claims)
    damage(claims)
    code, output = run(claims, not_rehearsed)
    flat = " ".join(output.split())
    assert code == 1, output
    for word in words:
        assert word in flat, output
    assert "Traceback" not in output
    left = [path for path in (claims / "workspace").rglob("*") if "prepared" in path.parts or ".tmp" in path.name]
    assert left == []
    assert not (claims / "models-out").exists() or not any((claims / "models-out").rglob("*.safetensors"))


def test_validate_gives_the_verdicts_of_the_examples() -> None:
    for path in sorted((ROOT / "examples/refused").glob("*.yaml")):
        head = dict(
            line.removeprefix("# ").split(": ", 1)
            for line in path.read_text().splitlines()
            if line.startswith("# ") and ": " in line
        )
        expected = 1 if (head["verdict"], head.get("gate")) == ("refused", "rules") else 0
        result = run_forked("finetune_cli", "validate", "-f", path, "-o", "json")
        assert result.returncode == expected, (path, result.stdout, result.stderr)


def test_a_manifest_is_needed(tmp_path: Path) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text("spec: [unclosed")
    result = subprocess.run([FINETUNE, "validate", "-f", broken], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "line 2" in result.stdout + result.stderr


FAILED = {
    "DeviceOutOfMemory": ("training", {"microBatchSize": 4}, {"microBatchSize": 2}),
    "DeviceOutOfMemory, one record at a time": ("training", {"microBatchSize": 1}, {"activationCheckpointing": "Full"}),
    "NonFinite": ("training", {"learningRate": "3e-4"}, {"learningRate": "0.00015"}),
    "Stalled": ("training", {"stepTimeoutSeconds": 60}, {"stepTimeoutSeconds": 120}),
    "DiskFull": ("checkpoint", {"keep": 6}, {"keep": 2}),
}
"""Where the settings are with which a job has failed, they themselves, and those of the patch."""


def failed(case: str) -> dict[str, Any]:
    """The quickstart at toy size, which has failed so."""
    section, settings, _ = FAILED[case]
    document: dict[str, Any] = yaml.safe_load(EXAMPLE.read_text())
    spec = document["spec"]
    spec["training"] |= {"maxSteps": 4}
    spec["checkpoint"] = {"everySteps": 2}
    spec |= {"preflight": {"rehearsal": "Skip"}, "merge": {"enabled": False}}
    spec[section] |= settings
    document["status"] = copy.deepcopy(objects.FAILED["status"])
    document["status"]["attempts"][-1]["failure"] = case.partition(",")[0]
    return document


def advised(document: Mapping[str, Any]) -> tuple[Mapping[str, Any] | None, list[FieldChange]]:
    """What `finetune explain job/quickstart` says then: the patch, and the changes of its command."""
    found = diagnose(seen_job(document), datetime.now(UTC))
    (command,) = found.commands
    fork, submit = command.split(" | ")
    assert submit.startswith("finetune submit - -n ")
    words = shlex.split(fork)
    return found.patch, [parse_change(value) for option, value in pairwise(words) if option == "--set"]


def run_document(claims: Path, document: Mapping[str, Any]) -> dict[str, Any]:
    """To its end; the plan."""
    name = document["metadata"]["name"]
    manifest = claims / f"{name}.yaml"
    manifest.write_text(json.dumps({key: value for key, value in document.items() if key != "status"}))
    code, output = run(claims, manifest)
    assert code == 0, output
    assert (claims / f"models-out/{name}/adapter/adapter_model.safetensors").is_file()
    plan: dict[str, Any] = json.loads(next((claims / ".finetune").glob(f"*.{name}/plan.json")).read_text())
    return plan


@pytest.mark.nightly
@pytest.mark.parametrize("case", FAILED)
def test_a_fork_with_the_advised_patch_runs(case: str, inputs: Path, tmp_path: Path) -> None:
    """Done as it says."""
    section, _, expected = FAILED[case]
    document = failed(case)
    patch, changes = advised(document)
    assert patch == {"spec": {section: expected}}
    claims = tmp_path / "claims"
    shutil.copytree(inputs, claims)
    plan = run_document(claims, fork_of(document, "quickstart-2", changes))
    ((name, value),) = expected.items()
    in_plan = {**plan["training"], **plan["checkpoint"]}[re.sub(r"([A-Z])", lambda found: f"_{found[1].lower()}", name)]
    assert str(in_plan) == str(value)


@pytest.mark.nightly
def test_a_fork_with_the_advised_patch_begins_with_a_checkpoint_of_the_job(inputs: Path, tmp_path: Path) -> None:
    """As `finetune fork --from 2` makes it: what was learnt before the failure is kept."""
    document = failed("NonFinite")
    document["metadata"]["uid"] = LOCAL_UID
    claims = tmp_path / "claims"
    shutil.copytree(inputs, claims)
    run_document(claims, document)
    fork = fork_of(document, "quickstart-2", [*advised(document)[1], *start_changes(document, 2)])
    plan = run_document(claims, fork)
    assert plan["training"]["start_from"]["path"] == "quickstart-local/checkpoints/step-0000000002"
    assert str(plan["training"]["learning_rate"]) == "0.00015"
    before, after = (history(claims, name) for name in ("quickstart", "quickstart-2"))
    assert after[0] < before[0], "the same batch as that of the first step, of which the base model knew nothing"


def history(claims: Path, name: str) -> list[float]:
    """Losses of the steps."""
    lines = map(json.loads, (claims / f"workspace/{name}-local/history.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line.get("loss") is not None]
