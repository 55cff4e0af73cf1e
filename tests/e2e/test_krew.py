"""`kubectl finetune` as Krew installs it: its manifest by Krew's rules, and the archive where nothing else is installed."""

from __future__ import annotations

import hashlib
import io
import os
import re
import shlex
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import krew
from tests.support.cluster.binaries import ensure_binaries

ROOT = Path(__file__).parents[2]
URL = "https://downloads.example.com/finetune/"
SEMANTIC = r"v\d+\.\d+\.\d+(-[0-9A-Za-z.-]+)?"


def check_manifest(document: dict[str, Any], file: str) -> None:
    """What Krew asks of a manifest before it installs anything."""
    assert document["apiVersion"] == "krew.googlecontainertools.github.com/v1alpha2"
    assert document["kind"] == "Plugin"
    assert re.fullmatch(r"[\w-]+", document["metadata"]["name"])
    assert file == f"{document['metadata']['name']}.yaml"
    spec = document["spec"]
    assert re.fullmatch(SEMANTIC, spec["version"])
    assert spec["shortDescription"]
    assert "\n" not in spec["shortDescription"]
    assert spec["platforms"]
    for one in spec["platforms"]:
        assert set(one) == {"selector", "uri", "sha256", "bin"}
        assert set(one["selector"]["matchLabels"]) == {"os", "arch"}
        assert one["uri"].startswith(URL)
        assert re.fullmatch(r"[0-9a-f]{64}", one["sha256"])
        assert one["bin"] == "kubectl-finetune"


def test_the_manifest_names_an_archive_for_each_platform() -> None:
    document = krew.manifest("0.2.0", URL, {one: hashlib.sha256(one.name.encode()).hexdigest() for one in krew.PLATFORMS})
    check_manifest(yaml.safe_load(yaml.safe_dump(document)), "finetune.yaml")
    labels = [tuple(one["selector"]["matchLabels"].values()) for one in document["spec"]["platforms"]]
    assert labels == [("linux", "amd64"), ("linux", "arm64"), ("darwin", "amd64"), ("darwin", "arm64")]
    assert document["spec"]["platforms"][3]["uri"] == f"{URL}kubectl-finetune-v0.2.0-darwin-arm64.tar.gz"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--version", "v0.2", "--url", URL), "three numbers"),
        (("--version", "0.2.0", "--url", "http://a.example"), "begins with https://"),
        (("--version", "0.2.0", "--url", URL, "--platform", "plan9-mips"), "invalid choice"),
    ],
)
def test_what_krew_would_refuse_is_refused(
    arguments: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["krew", *arguments])
    with pytest.raises(SystemExit, match="2"):
        krew.main()
    assert said in capsys.readouterr().err


def test_the_documented_command_makes_a_bundle() -> None:
    (line,) = re.findall(r"^make krew-bundle .*$", (ROOT / "docs/release.md").read_text(), re.MULTILINE)
    shown = subprocess.run([*shlex.split(line), "-n"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "-m tests.support.krew --version 0.2.0 --url https://downloads.example.com/finetune" in shown


def unpacked(archive: bytes, directory: Path) -> Path:
    """As Krew does, which knows directories and plain files and nothing else."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as opened:
        entries = opened.getmembers()
        assert [one.name for one in entries if not (one.isdir() or one.isreg())] == []
        assert [one.name for one in entries if one.name.startswith("/") or ".." in Path(one.name).parts] == []
        opened.extractall(directory, filter="data")
    return directory


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_the_bundle_needs_python_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["krew", "--version", "0.9.9", "--url", URL, "--output", str(tmp_path / "made")])
    assert krew.main() == 0
    document = yaml.safe_load((tmp_path / "made/finetune.yaml").read_text())
    check_manifest(document, "finetune.yaml")
    [platform] = document["spec"]["platforms"]
    archive = (tmp_path / "made" / platform["uri"].removeprefix(URL)).read_bytes()
    assert hashlib.sha256(archive).hexdigest() == platform["sha256"]
    [target] = [one for one in krew.PLATFORMS if one.name == krew.own_platform()]
    assert krew.bundle("0.9.9", target) == archive, "equal sources give equal bytes"
    store = unpacked(archive, tmp_path / "store/finetune/v0.9.9")
    assert "Apache License" in (store / "LICENSE").read_text()
    assert [path.name for path in (store / "lib").iterdir() if path.name in {"torch", "transformers", "kopf"}] == []
    # Krew puts links to the programs of all plugins into one directory.
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/kubectl-finetune").symlink_to(store / platform["bin"])
    kubectl = tmp_path / "bin/kubectl"
    kubectl.write_text(f'#!/bin/sh\nexec {ensure_binaries().kube} kubectl "$@"\n')
    kubectl.chmod(0o755)
    path = f"{tmp_path / 'bin'}:{Path(sys.executable).resolve().parent}:/usr/bin:/bin"
    bare = {"PATH": path, "HOME": str(tmp_path / "home")}

    def finetune(*arguments: str, **variables: str) -> tuple[int, str]:
        done = subprocess.run(
            [kubectl, "finetune", *arguments], env=bare | variables, cwd=tmp_path, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout + done.stderr

    code, said = finetune("validate", "-f", str(ROOT / "examples/quickstart.yaml"))
    assert (code, said.splitlines()[0]) == (0, "FineTuneJob quickstart: accepted")
    # What is installed for the interpreter, or named by the environment, is not looked at.
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/pathlib.py").write_text("raise SystemExit(77)")
    assert finetune("--version", PYTHONPATH=str(tmp_path / "elsewhere")) == (0, "finetune 0.9.9\n")
    assert finetune("list")[0] == 2
    code, said = finetune("--version", FINETUNE_PYTHON="no-such-python")
    assert code == 2
    assert "needs Python 3.11: there is no no-such-python on PATH. Install it, or set FINETUNE_PYTHON" in said
    assert os.access(store / "kubectl-finetune", os.X_OK)
