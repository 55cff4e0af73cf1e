"""`kubectl finetune` as Krew installs it: its manifest, and at night Krew itself, without a network."""

import hashlib
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.support.documented import MAKE, as_written, blocks_of, path_with
from tools.cluster.binaries import ensure_binaries, ensure_programs
from tools.krew import __main__ as krew
from tools.krew.manifest import manifest
from tools.krew.platforms import PLATFORMS, own_platform

ROOT = Path(__file__).parents[2]
URL = "https://downloads.example.com/finetune/"
DIGESTS = {one: hashlib.sha256(one.name.encode()).hexdigest() for one in PLATFORMS}


def test_the_manifest_names_an_archive_for_each_platform() -> None:
    document = yaml.safe_load(yaml.safe_dump(manifest("0.2.0", URL, DIGESTS), sort_keys=False))
    assert (document["apiVersion"], document["kind"]) == ("krew.googlecontainertools.github.com/v1alpha2", "Plugin")
    assert (document["metadata"]["name"], document["spec"]["version"]) == ("finetune", "v0.2.0")
    platforms = document["spec"]["platforms"]
    labels = [tuple(one["selector"]["matchLabels"].values()) for one in platforms]
    assert labels == [("linux", "amd64"), ("linux", "arm64"), ("darwin", "amd64"), ("darwin", "arm64")]
    assert {one["bin"] for one in platforms} == {"kubectl-finetune"}
    assert platforms[3]["uri"] == f"{URL}kubectl-finetune-v0.2.0-darwin-arm64.tar.gz"
    caveats = document["spec"]["caveats"]
    assert "On macOS, python3.11 must be on PATH" in caveats
    assert "On Linux, the plugin contains its own Python" in caveats


def test_where_every_archive_brings_its_python_there_is_no_caveat() -> None:
    of_linux = {target: digest for target, digest in DIGESTS.items() if target.os == "linux"}
    assert "caveats" not in manifest("0.2.0", URL, of_linux)["spec"]


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
    (line,) = re.findall(r"^make krew-bundle .*$", (ROOT / "docs/how-to/release.md").read_text(), re.MULTILINE)
    shown = subprocess.run([*shlex.split(line), "-n"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "-m tools.krew --version 0.2.0 --url https://downloads.example.com/finetune" in shown


@dataclass(frozen=True)
class User:
    """Somebody with `kubectl`, Krew and nothing else, and without a network."""

    home: Path
    root: Path
    """Of Krew."""

    def run(self, script: str, **variables: str) -> tuple[int, str]:
        """In a shell; its exit code and output."""
        path = ":".join([str(self.root / "bin"), str(self.home / "bin"), "/usr/bin", "/bin"])
        done = subprocess.run(
            ["unshare", "--net", "bash", "-euc", script],
            env={"PATH": path, "HOME": str(self.home), "KREW_ROOT": str(self.root), **variables},
            cwd=self.home,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr


@pytest.fixture
def user(tmp_path: Path) -> User:
    """Krew has an index, without which it removes nothing."""
    krew_program, _ = ensure_programs("krew")
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/kubectl-krew").symlink_to(krew_program)
    kubectl = tmp_path / "bin/kubectl"
    kubectl.write_text(f'#!/bin/sh\nexec {ensure_binaries().kube} kubectl "$@"\n')
    kubectl.chmod(0o755)
    made = User(tmp_path, tmp_path / "krew")
    code, said = made.run("git init -q index && kubectl krew index add team file://$HOME/index")
    assert code == 0, said
    return made


def documented_installation() -> str:
    """What docs/how-to/release.md tells people to type, for this machine's platform."""
    (block,) = [block for block in blocks_of(ROOT / "docs/how-to/release.md") if "krew install" in block.text]
    return as_written(block, {"linux-amd64": own_platform()})


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_krew_installs_a_bundle_and_removes_all_of_it(user: User) -> None:
    # The environment that runs this is there; what is made does not belong into the tree that is tested.
    options = {"PATH": path_with(user.home / "made", {"make": MAKE}), "OPTIONS": f"--output {user.home}"}
    line = as_written("make krew-bundle VERSION=0.2.0 URL=https://downloads.example.com/finetune", played=("make",))
    subprocess.run(["bash", "-c", line], cwd=ROOT, env=os.environ | options, check=True, timeout=600)
    (user.home / "job.yaml").write_text((ROOT / "examples/quickstart.yaml").read_text())
    before = set(user.root.rglob("*"))

    code, said = user.run(documented_installation())
    assert code == 0, said
    assert "Installed plugin: finetune" in said
    assert "FineTuneJob quickstart: accepted" in said
    store = (user.root / "bin/kubectl-finetune").resolve().parent
    assert store.is_relative_to(user.root / "store/finetune/v0.2.0")
    assert user.run("kubectl finetune --version") == (0, "finetune 0.2.0\n")
    assert user.run("kubectl finetune list")[0] == 2

    assert user.run(as_written("kubectl krew uninstall finetune")) == (0, "Uninstalled plugin: finetune\n")
    assert set(user.root.rglob("*")) == before


@pytest.mark.nightly
def test_the_index_of_krew_takes_the_manifest_of_all_platforms(tmp_path: Path) -> None:
    _, judge = ensure_programs("krew")
    written = tmp_path / "finetune.yaml"
    written.write_text(yaml.safe_dump(manifest("0.2.0", URL, DIGESTS)))
    done = subprocess.run([judge, "-skip-install", "-manifest", written], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "no overlapping spec.platform[].selector" in done.stderr
