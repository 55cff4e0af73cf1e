"""A release in a real registry that asks for a login: digests, signatures, attestations, chart, and the page's own commands."""

import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from finetune_trainer.errors import DestinationRefusedError
from finetune_trainer.network.retry import TransientError
from finetune_trainer.release.checksums import read_release
from finetune_trainer.release.sign import signed
from tests.support.documented import MAKE, as_written, blocks_of, path_with, spans_of
from tests.support.finished_run import finished_run
from tests.support.registry import PASSWORD, USER, Registry, running_registry
from tools.cluster.binaries import ensure_binaries, ensure_programs
from tools.cluster.requirements import ensure_packages, install_packages
from tools.images import ImageError, build
from tools.images.sources import REPOSITORY
from tools.release import __main__ as command
from tools.release.attach import MANIFEST_TYPE, Layer, attach, repository
from tools.release.publication import Published, Release, source_commit
from tools.release.signing import read_key

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]

COMMIT = "0123456789abcdef0123456789abcdef01234567"
VERSION = "0.9.0"
PAGE = REPOSITORY / "docs" / "how-to" / "release.md"


@dataclass(frozen=True)
class Released:
    """The operator's image and the chart, published once for all tests."""

    registry: Registry
    release: Release
    image: Published
    chart: Published
    folder: Path
    """With finetune.key, finetune.pub, and the configuration that knows the registry's login."""

    def run(self, script: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run lines of bash in the folder, with helm on PATH."""
        helm = ensure_binaries().helm.parent
        return subprocess.run(
            ["bash", "-c", script],
            cwd=self.folder,
            env={**os.environ, "PATH": f"{helm}:{os.environ['PATH']}", **_logins(self.folder), **variables},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )


def _logins(folder: Path) -> dict[str, str]:
    config = str(folder / "config.json")
    return {"DOCKER_CONFIG": str(folder), "REGISTRY_AUTH_FILE": config, "HELM_REGISTRY_CONFIG": config, "CURL_HOME": str(folder)}


def _new_key(path: Path, *options: str) -> None:
    curve = ("-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256")
    subprocess.run(["openssl", "genpkey", *(options or curve), "-out", path], check=True, capture_output=True)


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Released]:
    ensure_packages()
    install_packages([program for program in ("curl", "jq", "skopeo") if shutil.which(program) is None])
    ensure_binaries()
    folder = tmp_path_factory.mktemp("release")
    with running_registry(folder / "registry", needs_login=True) as registry, pytest.MonkeyPatch.context() as patch:
        (folder / "config.json").write_text(registry.docker_config())
        (folder / ".curlrc").write_text(f'user = "{USER}:{PASSWORD}"\n')
        for name, value in _logins(folder).items():
            patch.setenv(name, value)
        _new_key(folder / "finetune.key")
        key = read_key(folder / "finetune.key")
        (folder / "finetune.pub").write_text(key.public_key)
        release = Release(f"{registry.host}/team", VERSION, key, COMMIT, plain_http=True)
        image = release.publish_image("operator")
        yield Released(registry, release, image, release.publish_chart([image]), folder)
        # At night it has gigabytes of the trainer, which pytest would keep.
        shutil.rmtree(registry.storage)


def _lines(beginning: str, released: Released, *, played: tuple[str, ...] = (), **more: str) -> str:
    """The block of docs/how-to/release.md that begins so, for the registry of this test, and with more words replaced."""
    (block,) = [block for block in blocks_of(PAGE) if block.text.startswith(beginning)]
    given = dict(more)
    if "https://registry.example" in block.text:
        given["https://registry.example"] = f"http://{released.registry.host}"
    elif "registry.example" in block.text:
        given["registry.example"] = released.registry.host
    return as_written(block, given, played)


def _printed(released: Released) -> str:
    return command.instructions(released.release, [released.image], released.chart)


def test_registry_has_what_was_released_under_its_digests(released: Released) -> None:
    assert released.image.reference == f"{released.registry.host}/team/finetune-operator"
    assert released.image.digest == released.registry.digest("team/finetune-operator", VERSION)
    assert released.chart.digest == released.registry.digest("team/charts/finetune-operator", VERSION)


def test_documented_commands_verify_signature_and_bill(released: Released) -> None:
    script = _lines("set -euo pipefail", released) + _lines('curl -fsS -H "$accept" "$url/manifests/${DIGEST/:/-}.att"', released)
    done = released.run(script, DIGEST=released.image.digest)
    assert (done.returncode, done.stdout) == (0, "Verified OK\ntrue\nVerified OK\ntrue\n"), done.stderr
    with build("operator").mounted() as root:
        assert json.loads((released.folder / "sbom.cdx.json").read_text()) == json.loads(
            (root / "opt/finetune/sbom.cdx.json").read_text()
        )


@pytest.mark.parametrize(
    ("before", "after"), [("finetune.pub", "other.pub"), ("openssl dgst", "sed -i s/team/meat/ payload.json\nopenssl dgst")]
)
def test_documented_commands_refuse_another_key_and_a_changed_byte(released: Released, before: str, after: str) -> None:
    _new_key(released.folder / "other.key")
    (released.folder / "other.pub").write_text(read_key(released.folder / "other.key").public_key)
    done = released.run(_lines("set -euo pipefail", released).replace(before, after), DIGEST=released.image.digest)
    assert (done.returncode, done.stdout) == (1, "Verification failure\n")


def test_documented_commands_refuse_a_signature_of_something_else(released: Released) -> None:
    with repository(released.image.reference, plain_http=True) as place:
        what = f"manifests/{released.image.digest.replace(':', '-')}.sig"
        signature = place.send("GET", place.url(what), {"Accept": MANIFEST_TYPE}, what=what).content
        pushed = place.send("GET", place.url(what.replace(".sig", ".att")), {"Accept": MANIFEST_TYPE}, what=what)
        other = f"sha256:{hashlib.sha256(pushed.content).hexdigest()}"
        url = place.url(f"manifests/{other.replace(':', '-')}.sig")
        assert place.send("PUT", url, {"Content-Type": MANIFEST_TYPE}, signature, what=what).succeeded
    done = released.run(_lines("set -euo pipefail", released), DIGEST=other)
    assert (done.returncode, done.stdout) == (1, "Verified OK\nfalse\n")


def _statements(released: Released, name: str, digest: str) -> dict[str, dict[str, Any]]:
    manifest = released.registry.manifest(f"team/{name}", f"{digest.replace(':', '-')}.att")
    found = {}
    for layer in manifest["layers"]:
        envelope = json.loads(released.registry._get(f"team/{name}", f"blobs/{layer['digest']}"))
        found[layer["annotations"]["predicateType"]] = json.loads(base64.b64decode(envelope["payload"]))
    return found


def test_provenance_names_source_locks_and_base(released: Released) -> None:
    statements = _statements(released, "finetune-operator", released.image.digest)
    assert set(statements) == {"https://slsa.dev/provenance/v1", "https://cyclonedx.org/bom", "https://openvex.dev/ns"}
    stated = statements["https://slsa.dev/provenance/v1"]
    assert stated["_type"] == "https://in-toto.io/Statement/v1"
    assert stated["subject"] == [
        {"name": released.image.reference, "digest": {"sha256": released.image.digest.removeprefix("sha256:")}}
    ]
    definition = stated["predicate"]["buildDefinition"]
    assert definition["externalParameters"] == {"containerfile": "operator/Containerfile", "version": VERSION}
    materials = {one["name"]: one["digest"] for one in definition["resolvedDependencies"]}
    assert materials["source"] == {"gitCommit": COMMIT}
    sums = subprocess.run(["sha256sum", "operator/requirements.lock"], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert materials["operator/requirements.lock"] == {"sha256": sums.stdout.split()[0]}
    assert re.fullmatch("[0-9a-f]{64}", materials["base"]["sha256"])
    assert "compiler" not in materials, "the operator's image compiles nothing"
    assert set(_statements(released, "charts/finetune-operator", released.chart.digest)) == {"https://slsa.dev/provenance/v1"}


def test_printed_line_installs_the_released_chart_with_the_released_digests(released: Released) -> None:
    (line,) = re.findall(r"^helm install .*(?:\\\n.*)+", _printed(released), re.MULTILINE)
    done = released.run(line.replace("helm install", "helm template --plain-http").replace("--wait", ""))
    assert done.returncode == 0, done.stderr
    (images,) = {tuple(re.findall(r"^ *image: (\S+)$", done.stdout, re.MULTILINE))}
    assert set(images) == {f"{released.image.reference}@{released.image.digest}"}
    assert f"helm.sh/chart: finetune-operator-{VERSION}" in done.stdout


def _annotations(released: Released, chart: str, version: str) -> dict[str, str]:
    done = released.run(f"helm show chart --plain-http oci://{released.registry.host}/{chart} --version {version}")
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = yaml.safe_load(done.stdout)["annotations"]
    return {name.removeprefix("artifacthub.io/"): value for name, value in found.items()}


def test_the_released_chart_names_its_images_by_digest(released: Released) -> None:
    annotations = _annotations(released, "team/charts/finetune-operator", VERSION)
    image = f"{released.image.reference}@{released.image.digest}"
    assert yaml.safe_load(annotations["images"]) == [{"name": "finetune-operator", "image": image}]
    assert annotations["prerelease"] == "false"
    assert {"category", "crds", "crdsExamples", "license"} < annotations.keys(), "those of the source stay"
    assert not {"links", "signKey"} & annotations.keys()


def test_make_push_brings_the_image_to_the_registry(released: Released) -> None:
    registry = f"{released.registry.host}/pushed"
    # The environment that runs this is there.
    options = ("--no-print-directory", "-o", "environment", f"REGISTRY={registry}", "IMAGES=operator", "OPTIONS=--plain-http")
    done = subprocess.run(["make", "push", *options], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # The same bytes as the release, though pushed on their own.
    assert done.stdout.splitlines()[-1] == f"--set image.registry={registry},image.digest={released.image.digest}"
    assert released.registry.digest("pushed/finetune-operator", build("operator").tag) == released.image.digest


def test_command_publishes_the_same_image_and_prints_what_verifies_it(
    released: Released, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    registry = f"{released.registry.host}/again"
    arguments = (
        f"--registry {registry} --version 0.9.1-rc.1 --images operator --plain-http --key {released.folder / 'finetune.key'}"
    )
    links = "--link source=https://git.example/finetune?at=1 --link support=https://chat.example"
    monkeypatch.setattr("sys.argv", ["release", *arguments.split(), *links.split()])
    monkeypatch.setattr(command, "source_commit", lambda tree: COMMIT)
    assert command.main() == 0
    printed = capsys.readouterr().out
    image = f"{registry}/finetune-operator@{released.image.digest}"
    assert f"\ncosign verify --key finetune.pub --insecure-ignore-tlog=true {image}\n" in printed
    assert (released.folder / "finetune.pub").read_text() in printed
    assert f"helm install finetune oci://{registry}/charts/finetune-operator --version 0.9.1-rc.1 " in printed
    annotations = _annotations(released, "again/charts/finetune-operator", "0.9.1-rc.1")
    assert yaml.safe_load(annotations["links"]) == [
        {"name": "source", "url": "https://git.example/finetune?at=1"},
        {"name": "support", "url": "https://chat.example"},
    ]
    assert annotations["prerelease"] == "true"


def test_make_release_says_what_it_needs() -> None:
    made = ["make", "-o", "environment", "release", "REGISTRY=registry.example/team", "VERSION=0.2.0", "KEY="]
    done = subprocess.run(made, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "KEY=finetune.key: name all three" in done.stderr


def test_mirror_takes_signatures_along(released: Released) -> None:
    mirror = f"{released.registry.host}/finetune"
    script = _lines("for tag in 0.2.0", released, **{"0.2.0": VERSION, "mirror.example/finetune": mirror})
    # The registry of the test has no certificate.
    without_tls = released.folder / ".config/containers/registries.conf"
    without_tls.parent.mkdir(parents=True)
    without_tls.write_text(f'[[registry]]\nlocation = "{released.registry.host}"\ninsecure = true\n')
    done = released.run(f"set -e\n{script}", DIGEST=released.image.digest, HOME=str(released.folder))
    assert done.returncode == 0, done.stderr
    verify = _lines("set -euo pipefail", released).replace("/v2/team/", "/v2/finetune/")
    done = released.run(verify, DIGEST=released.image.digest)
    assert done.returncode == 0, done.stderr


def test_signatures_of_others_stay(released: Released) -> None:
    digest = f"sha256:{'1' * 64}"
    with repository(f"{released.registry.host}/team/shared", plain_http=True) as place:
        attach(place, digest, "sig", [Layer(b"theirs", "text/plain")])
        attach(place, digest, "sig", [Layer(b"ours", "text/plain", {"by": "us"})])
    layers = released.registry.manifest("team/shared", f"{digest.replace(':', '-')}.sig")["layers"]
    assert [(layer["size"], layer.get("annotations")) for layer in layers] == [(6, None), (4, {"by": "us"})]


def test_key_of_another_kind_is_refused(tmp_path: Path) -> None:
    _new_key(tmp_path / "finetune.key", "-algorithm", "ED25519")
    with pytest.raises(ImageError, match=r"finetune\.key is not a key on the curve P-256.*openssl genpkey"):
        read_key(tmp_path / "finetune.key")


def test_encrypted_key_opens_with_its_password_and_asks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    curve = ("-algorithm", "EC", "-pkeyopt", "ec_paramgen_curve:P-256")
    _new_key(tmp_path / "finetune.key", *curve, "-aes256", "-pass", "pass:secret")
    with pytest.raises(ImageError, match=r"openssl pkey"):
        read_key(tmp_path / "finetune.key")
    monkeypatch.setenv("KEY_PASSWORD", "secret")
    assert len(base64.b64decode(read_key(tmp_path / "finetune.key").sign(b"data"))) in range(66, 74)


def test_tree_with_changes_is_not_released(tmp_path: Path) -> None:
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.com")
    (tmp_path / "file").write_text("1")
    for arguments in (("init", "-q"), ("add", "."), ("commit", "-qm", "One")):
        subprocess.run([*git, *arguments], check=True)
    assert re.fullmatch("[0-9a-f]{40}", source_commit(tmp_path))
    (tmp_path / "file").write_text("2")
    with pytest.raises(ImageError, match="has uncommitted changes"):
        source_commit(tmp_path)


def test_keys_that_the_pages_make_in_the_tree_are_no_changes() -> None:
    """A release would be refused, and what it says then, that they be committed, is the worst that can be done with a key."""
    for page in ("docs/how-to/release.md", "docs/how-to/results.md"):
        made = re.findall(r"-out (\S+\.(?:key|pub))$", (REPOSITORY / page).read_text(), re.MULTILINE)
        assert len(made) == 2, page
        for name in made:
            subprocess.run(["git", "check-ignore", "--quiet", "--no-index", name], cwd=REPOSITORY, check=True)


def test_registry_that_refuses_or_does_not_answer_ends_the_release(released: Released, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", "/nonexistent")
    with repository(released.image.reference, plain_http=True) as place, pytest.raises(DestinationRefusedError, match="401"):
        attach(place, released.image.digest, "sig", [])
    with repository("127.0.0.1:9/team/finetune-operator", plain_http=True) as place, pytest.raises(TransientError):
        attach(place, released.image.digest, "sig", [])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--registry r.example --version 1 --key k", "--version 1: a version has three numbers"),
        ("--registry r.example --version 1.0.0 --key /nonexistent", "openssl pkey"),
        ("--registry r.example --version 1.0.0 --key k --link source", "--link source: a link is a name and an address"),
        ("--registry r.example --version 1.0.0 --key k --link a=git.example", "--link a=git.example: a link is a name and an"),
    ],
)
def test_command_says_what_is_wrong(
    arguments: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["release", *arguments.split()])
    try:
        status = command.main()
    except SystemExit as end:
        status = int(str(end.code))
    assert status != 0
    assert said in capsys.readouterr().err


def test_documented_commands_make_a_release(released: Released, tmp_path: Path) -> None:
    """In a clone, which has no changes; a key of its own, both images and the chart."""
    place = tmp_path / "clone"
    subprocess.run(["git", "clone", "--quiet", REPOSITORY, place], check=True, timeout=300)
    # A link in its place would be a change.
    (place / ".venv").mkdir()
    for path in Path(sys.executable).parents[1].iterdir():
        (place / ".venv" / path.name).symlink_to(path)
    host = released.registry.host
    script = _lines("openssl genpkey", released, played=("make",))
    # The registry of the test has no certificate.
    path = path_with(tmp_path / "programs", {"make": MAKE})
    environment = os.environ | _logins(released.folder) | {"OPTIONS": "--plain-http", "PATH": path}
    command = ["bash", "-euo", "pipefail", "-c", script]
    done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=1000, check=False)
    assert done.returncode == 0, done.stderr
    assert (place / "finetune.pub").read_text() in done.stdout
    assert f"helm install finetune oci://{host}/team/charts/finetune-operator --version 0.2.0 " in done.stdout
    digests = {name: released.registry.digest(f"team/finetune-{name}", "0.2.0") for name in ("operator", "trainer")}
    assert all(digest in done.stdout for digest in digests.values())
    verify = _lines("set -euo pipefail", released).replace("finetune.pub", str(place / "finetune.pub"))
    for name, digest in digests.items():
        checked = released.run(verify.replace("/finetune-operator", f"/finetune-{name}"), DIGEST=digest)
        assert (checked.returncode, checked.stdout) == (0, "Verified OK\ntrue\n"), checked.stderr


def test_cosign_verifies_what_was_released_and_nothing_else(released: Released, tmp_path: Path) -> None:
    path = _path_with_cosign(tmp_path)
    lines = [line for line in _printed(released).splitlines() if line.startswith("cosign ")]
    image, *documented = _lines("image=registry.example", released).splitlines()
    lines += [f"{image}\n{line}" for line in documented]
    assert len(lines) == 4 + 2 + 3
    _new_key(tmp_path / "other.key")
    (released.folder / "other.pub").write_text(read_key(tmp_path / "other.key").public_key)
    for line in lines:
        good = released.run(line, DIGEST=released.image.digest, PATH=path)
        assert good.returncode == 0, f"{line}\n{good.stderr}"
        refused = released.run(line.replace("finetune.pub", "other.pub"), DIGEST=released.image.digest, PATH=path)
        assert refused.returncode != 0, line
        assert re.search("invalid signature|no matching attestations", refused.stderr), refused.stderr


def test_cosign_verifies_signed_results(tmp_path: Path) -> None:
    _new_key(tmp_path / "signing.key")
    (tmp_path / "signing.pub").write_text(read_key(tmp_path / "signing.key").public_key)
    release = read_release(finished_run(tmp_path / "run", "s3://bucket/tuned"))
    signed(release, (tmp_path / "signing.key").read_text(), tmp_path)
    with release.manifest.open() as file:
        (tmp_path / "SHA256SUMS").write_bytes(file.read())
    (line,) = [line for line in spans_of(REPOSITORY / "docs/how-to/results.md") if line.startswith("cosign verify-blob ")]
    environment = os.environ | {"PATH": _path_with_cosign(tmp_path)}
    command = ["bash", "-c", as_written(line)]
    assert subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False).returncode == 0
    with (tmp_path / "SHA256SUMS").open("a") as file:
        file.write("\n")
    refused = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert refused.returncode != 0
    assert "invalid signature" in refused.stderr


def _path_with_cosign(folder: Path) -> str:
    (folder / "programs").mkdir()
    (folder / "programs/cosign").symlink_to(*ensure_programs("cosign"))
    return f"{folder / 'programs'}:{os.environ['PATH']}"
