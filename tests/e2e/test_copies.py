"""The line of report and model card that copies published results, run as written with the programs of the Hub, oras and AWS."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from finetune_trainer.context import RunContext
from finetune_trainer.release.commands import copy_command
from finetune_trainer.release.files import CHECKSUMS
from tests.support.finished_run import finished_run, publish_arguments, published_files
from tests.support.hub import running_hub
from tests.support.registry import running_registry
from tests.unit.finetune_trainer.release.example import example
from tools.cluster.binaries import ensure_binaries, ensure_programs
from tools.s3 import REGION, running_s3

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(900)]

LARGE = (20_000_000, 3000)


def published(context: RunContext, directory: Path) -> None:
    command = [sys.executable, "-m", "finetune_trainer", *publish_arguments(context, directory, directory / "credentials")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def documented_line(destination: str, directory: Path) -> str:
    line = copy_command(example(directory, {"output.destination": destination}).facts())
    assert line is not None
    return line


def copied(line: str, folder: Path, programs: Path, **variables: str) -> dict[str, bytes]:
    """What lies in a new folder after a line of bash; the list that came along has proven it."""
    folder.mkdir()
    environment = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}", **variables}
    checked = f"set -e\n{line}\nsha256sum --quiet --check {CHECKSUMS}"
    done = subprocess.run(["bash", "-c", checked], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_oras_copies_what_is_in_a_registry(tmp_path: Path) -> None:
    (oras,) = ensure_programs("oras")
    with running_registry(tmp_path / "registry", needs_login=True) as registry:
        address = f"oci://{registry.host}/team/tuned:v1"
        context = finished_run(tmp_path / "run", address, weight_bytes=LARGE, plain_http_registries=[registry.host])
        login = tmp_path / "run" / "credentials" / "registry" / "config.json"
        login.parent.mkdir(parents=True)
        login.write_text(registry.docker_config())
        published(context, tmp_path / "run")
        # People's registries speak HTTPS.
        line = documented_line(address, tmp_path / "example").replace("oras pull", "oras pull --plain-http")
        found = copied(line, tmp_path / "copy", oras.parent, DOCKER_CONFIG=str(login.parent))
    assert found == published_files(context)


def test_the_client_of_aws_copies_what_is_in_a_bucket(tmp_path: Path) -> None:
    programs = tmp_path / "aws" / "bin"
    uv = [sys.executable, "-m", "uv"]
    subprocess.run([*uv, "venv", "--quiet", programs.parent], check=True)
    subprocess.run([*uv, "pip", "install", "--quiet", "--python", programs.parent, "awscli"], check=True)
    with running_s3(ensure_binaries().versitygw, tmp_path / "s3") as server:
        server.make_bucket("results")
        address = "s3://results/runs/tuned"
        context = finished_run(tmp_path / "run", address, weight_bytes=LARGE, s3_endpoint=server.address, s3_region=REGION)
        for name, value in server.environment().items():
            place = tmp_path / "run" / "credentials" / "s3" / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(value)
        published(context, tmp_path / "run")
        variables = {**server.environment(), "AWS_ENDPOINT_URL": server.address, "AWS_DEFAULT_REGION": REGION}
        found = copied(documented_line(address, tmp_path / "example"), tmp_path / "copy", programs, **variables)
    assert found == published_files(context)


def test_the_client_of_the_hub_copies_both_repositories(tmp_path: Path) -> None:
    """The Hub itself is played (tests/support/hub.py)."""
    line = documented_line("hf://team/tuned", tmp_path / "example")
    with running_hub() as hub:
        hub.writes.tokens = {"hf_token"}
        context = finished_run(tmp_path / "run", "hf://team/tuned", weight_bytes=LARGE, hub_endpoint=hub.address)
        token = tmp_path / "run" / "credentials" / "hub" / "token"
        token.parent.mkdir(parents=True)
        token.write_text("hf_token")
        published(context, tmp_path / "run")
        variables = {"HF_ENDPOINT": hub.address, "HF_TOKEN": "hf_token", "HF_HOME": str(tmp_path / "home")}
        found = copied(line, tmp_path / "copy", Path(sys.executable).parent, **variables, NO_PROXY="127.0.0.1")
    weights = {name: content for name, content in published_files(context).items() if name.endswith(".safetensors")}
    assert weights.items() <= found.items()
