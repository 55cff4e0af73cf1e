"""The container images: what they hold, whom they run as, and that they run as Kubernetes will run them."""

import ast
import ensurepip
import hashlib
import json
import os
import re
import shlex
import shutil
import sqlite3
import stat
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import pytest

from tests.e2e.snapshot_archive import snapshot_archive
from tests.support.documented import blocks_of
from tools.cluster.cache import cache_root
from tools.images import Image, ImageError, build, locks, rebuilt_manifest
from tools.images.base import KINDS, SNAPSHOT_VARIABLE, base_archive, package_sources
from tools.images.buildah import Storage, imported
from tools.images.sources import REPOSITORY, SOURCES, Sources
from tools.images.store import find_image
from tools.images.wheelhouse import wheelhouse

pytestmark = pytest.mark.timeout(1200)

_ARBITRARY_UID = 1000650000
_OURS = {"trainer": {"finetune_job", "finetune_memory", "finetune_trainer"}, "operator": {"finetune_job", "finetune_operator"}}
_SITE_PACKAGES = Path("opt/finetune/venv/lib/python3.11/site-packages")
_SHELLS = re.compile(r"^(ash|bash|busybox|csh|dash|ksh|rbash|sh|tcsh|toybox|zsh)(\.[a-z]+)?$")
_INSTALLERS = re.compile(
    r"^(pip|apt|dpkg|curl|wget|uv|uvx|easy_install|perl|cyclonedx-py|ssh|scp|sftp|nc|ncat|netcat|telnet|su|sudo)([0-9.]*|-.*)$"
)
_COMPILERS = re.compile(r"^(.*-)?(gcc|g\+\+|cc|c\+\+|cpp|clang|clang\+\+|ld|as|rustc|go|make|nvcc)(-[0-9.]+)?$")
_CACHES = ("var/cache/apt", "var/lib/apt/lists", "root/.cache", "var/cache/debconf")
_BILL = Path("opt/finetune/sbom.cdx.json")


@dataclass(frozen=True)
class _Mounted:
    """An image and its file system."""

    which: str
    image: Image
    root: Path

    @property
    def sources(self) -> Sources:
        return SOURCES[self.which]

    @property
    def config(self) -> dict[str, Any]:
        """The part of the image's configuration that a container runtime acts on."""
        config: dict[str, Any] = json.loads(self.image.stored.config)["config"]
        return config

    def run(self, *command: str, scratch: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command as a pod would: arbitrary UID, group 0, read-only root, writable /tmp, PID 1, no network.

        `scratch`: a directory of this machine to stand at /tmp; an empty one that is thrown away otherwise.
        """
        volume = "-t tmpfs tmpfs" if scratch is None else f"--bind {shlex.quote(str(scratch))}"
        enter = (
            # As in every pod, the loopback interface is up.
            "ip link set lo up && "
            f'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && mount {volume} "$0/tmp" '
            '&& mount -t proc proc "$0/proc" && mount --rbind /dev "$0/dev" '
            '&& exec env --ignore-environment "$@"'
        )
        unshare = shutil.which("unshare")  # with its path: the last one is started with the image's PATH
        assert unshare is not None
        user = (f"--setuid={_ARBITRARY_UID}", "--setgid=0")
        return subprocess.run(
            [
                *(unshare, "--mount", "--pid", "--net", "--fork", "--kill-child", "sh", "-c", enter, self.root),
                *(*self.config["Env"], unshare, f"--root={self.root}", f"--wd={self.config['WorkingDir']}", *user, *command),
            ],
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    def python(self, code: str) -> str:
        """Run Python code with `run`, in place of the image's own program, and return what it prints."""
        entrypoint = self.config["Entrypoint"]
        done = self.run(*entrypoint[: entrypoint.index("-m")], "-c", code)
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module", params=list(SOURCES))
def mounted(request: pytest.FixtureRequest) -> Iterator[_Mounted]:
    image = build(request.param)
    with image.mounted() as root:
        yield _Mounted(request.param, image, root)


@pytest.fixture(scope="module")
def operator_image() -> Image:
    return build("operator")


def _walk(root: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for directory, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(directory, name)
            yield path, path.lstat()


def test_nothing_in_the_image_installs_packages_or_gains_privileges(mounted: _Mounted) -> None:
    installers, privileged = [], []
    for path, status in _walk(mounted.root):
        if path.parent.name in {"bin", "sbin"} and (_INSTALLERS.match(path.name) or _COMPILERS.match(path.name)):
            installers.append(path)
        if not stat.S_ISLNK(status.st_mode) and status.st_mode & (stat.S_ISUID | stat.S_ISGID):
            privileged.append(path)
    modules = [path for name in ("pip", "ensurepip", "kernels") for path in mounted.root.glob(f"**/python3*/**/{name}")]
    packages = [path for path in modules if (path / "__init__.py").exists() and path.name != "kernels"]
    packages += [path for path in modules if path.name == "kernels" and path.parent.name == "site-packages"]
    caches = [path for name in _CACHES for path in (mounted.root / name).rglob("*")]
    caches += list(mounted.root.glob("**/*.whl"))
    assert (installers, privileged, packages, caches) == ([], [], [], [])


def test_bill_of_materials_lists_every_package(mounted: _Mounted) -> None:
    bill = json.loads((mounted.root / _BILL).read_text())
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill["metadata"]["component"]["name"] == mounted.sources.name
    references = [component["bom-ref"] for component in bill["components"]]
    assert len(set(references)) == len(references)
    assert {entry["ref"] for entry in bill["dependencies"]} <= {*references, bill["metadata"]["component"]["bom-ref"]}
    listed = {component["purl"] for component in bill["components"] if "purl" in component}
    for name, version in _installed(mounted).items():
        assert f"pkg:pypi/{name}@{quote(version)}" in listed
    installed = _debian_packages(mounted.root / "var/lib/dpkg/status")
    assert {"python3.11-minimal", "tini", "libc6"} <= {name for name, _, _, _ in installed}
    found = {unquote(purl) for purl in listed if purl.startswith("pkg:deb/debian/")}
    assert found == {
        f"pkg:deb/debian/{name}@{version}?arch={architecture}&distro=debian-12" + (f"&upstream={source}" if source else "")
        for name, version, architecture, source in installed
    }
    tools = {re.split("[@/]", purl)[2] for purl in listed if purl.startswith("pkg:pypi/")} & {
        "cyclonedx-bom",
        "lxml",
        "pip",
        "uv",
    }
    assert tools == set()
    # What advisories of Debian are about.
    components = bill["components"]
    systems = [(each["name"], each["version"]) for each in components if each["type"] == "operating-system"]
    assert systems == [("debian", "12")]
    of_glibc = [each["purl"] for each in components if each["name"] == "libc6"]
    assert [re.sub(r"@.*arch=\w+", "", purl) for purl in of_glibc] == ["pkg:deb/debian/libc6&distro=debian-12&upstream=glibc"]


def _installed(mounted: _Mounted) -> dict[str, str]:
    """Normalised name -> version of every Python package in the image."""
    installed = {}
    for information in (mounted.root / _SITE_PACKAGES).glob("*.dist-info"):
        name, _, version = information.name.removesuffix(".dist-info").rpartition("-")
        installed[re.sub(r"[-_.]+", "-", name).lower()] = version
    return installed


def _debian_packages(status: Path) -> set[tuple[str, str, str, str]]:
    """Name, version, architecture and source of each package that dpkg's list calls installed.

    Source: empty where it has the package's name; "name@version" where its version is another one.
    """
    found = set()
    for paragraph in status.read_text().split("\n\n"):
        fields = dict(re.findall(r"^(\S+): (.*)$", paragraph, re.MULTILINE))
        if fields.get("Status", "").endswith(" installed"):
            source, _, version = fields.get("Source", "").partition(" ")
            written = f"{source}@{version.strip('()')}" if version else source
            found.add((fields["Package"], fields["Version"], fields["Architecture"], written))
    return found


def test_image_runs_as_a_numeric_user_that_cannot_change_its_code(mounted: _Mounted) -> None:
    user, group = mounted.config["User"].split(":")
    assert int(user) > 0
    assert int(group) == 0
    writable, hidden = [], []
    for path, status in _walk(mounted.root):
        name, mode = str(path.relative_to(mounted.root)), status.st_mode
        if stat.S_ISLNK(mode) or name.startswith(("dev/", "proc", "sys", "root")):
            continue
        # Temporary directories: each pod mounts its own, or has a read-only root.
        if (status.st_uid != 0 or mode & (stat.S_IWGRP | stat.S_IWOTH)) and not (stat.S_ISDIR(mode) and mode & stat.S_ISVTX):
            writable.append(name)
        if name.startswith(("opt", "usr")) and not mode & stat.S_IROTH:
            hidden.append(name)
    assert (writable, hidden) == ([], [])


@pytest.mark.parametrize("mounted", ["operator"], indirect=True)
def test_operator_has_no_shell_and_no_program_but_python(mounted: _Mounted) -> None:
    programs, shells = set(), []
    for path, status in _walk(mounted.root):
        name = path.relative_to(mounted.root)
        if name.parts[:2] in {("usr", "bin"), ("usr", "sbin"), ("usr", "local")} and not stat.S_ISDIR(status.st_mode):
            programs.add(path.name)
        if _SHELLS.match(path.name) and stat.S_ISREG(status.st_mode):
            shells.append(str(name))
    assert (programs, shells) == ({"python3.11", "tini"}, [])
    assert mounted.python("import os; print(os.path.exists('/bin/sh'))") == "False\n"


@pytest.mark.parametrize("mounted", ["operator"], indirect=True)
def test_operator_knows_authorities_users_and_text(mounted: _Mounted) -> None:
    """What a base usually brings and a copied system may lack."""
    printed = mounted.python(
        "import locale, pwd, ssl\n"
        "print(ssl.create_default_context().cert_store_stats()['x509_ca'] > 100, pwd.getpwuid(0).pw_name)\n"
        "print(locale.setlocale(locale.LC_ALL, ''))"
    )
    assert printed == "True root\nC.UTF-8\n"


@pytest.mark.parametrize("mounted", ["operator"], indirect=True)
def test_operator_counts_without_an_installed_distribution(mounted: _Mounted) -> None:
    assert mounted.python("from finetune_operator.metrics.metrics import Metrics; Metrics(); print('counts')") == "counts\n"


_ASKED_AND_ANSWERED = """
import socket, threading
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("127.0.0.1", 53))
def answer():
    while True:
        query, client = server.recvfrom(512)
        end = query.index(0, 12) + 5
        address = b"\\xc0\\x0c\\0\\1\\0\\1\\0\\0\\0\\5\\0\\4\\x0a\\1\\2\\3" if query[end - 3] == 1 else b""
        counts = b"\\0\\1\\0" + bytes([bool(address)]) + b"\\0\\0\\0\\0"
        server.sendto(query[:2] + b"\\x81\\x80" + counts + query[12:end] + address, client)
threading.Thread(target=answer, daemon=True).start()
print(socket.getaddrinfo("kubernetes.default.svc", 443, proto=socket.IPPROTO_TCP)[0][4])
"""


@pytest.mark.parametrize("mounted", ["operator"], indirect=True)
def test_operator_asks_the_name_server_of_its_pod(mounted: _Mounted) -> None:
    settings = mounted.root / "etc/resolv.conf"  # the kubelet's
    settings.write_text("nameserver 127.0.0.1\nsearch default.svc.cluster.local\noptions ndots:5\n")
    try:
        enter = 'ip link set lo up && exec chroot "$0" /opt/finetune/venv/bin/python -c "$1"'
        asked = subprocess.run(
            ["unshare", "--net", "sh", "-c", enter, mounted.root, _ASKED_AND_ANSWERED],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        settings.unlink()
    assert asked.stdout == "('10.1.2.3', 443)\n", asked.stderr


def test_image_is_no_larger_than_agreed(mounted: _Mounted) -> None:
    sizes = json.loads((REPOSITORY / "tools/images/sizes.json").read_text())
    assert mounted.image.stored.size <= sizes[mounted.sources.name]


@pytest.mark.nightly
@pytest.mark.parametrize("which", list(SOURCES))
def test_second_build_gives_the_same_bytes(which: str) -> None:
    assert rebuilt_manifest(which) == build(which).stored.manifest


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_second_base_has_the_same_bytes(kind: str, tmp_path: Path) -> None:
    first, second = (base_archive(tmp_path / name, kind) for name in ("first", "second") if not (tmp_path / name).mkdir())
    with first.open("rb") as one, second.open("rb") as other:
        assert hashlib.file_digest(one, "sha256").digest() == hashlib.file_digest(other, "sha256").digest()  # type: ignore[arg-type]


def test_snapshot_of_debian_stands_in_every_source() -> None:
    assert package_sources("20261101T000000Z").splitlines() == [
        "deb [check-valid-until=no] http://snapshot.debian.org/archive/debian/20261101T000000Z bookworm main",
        "deb [check-valid-until=no] http://snapshot.debian.org/archive/debian/20261101T000000Z bookworm-updates main",
        "deb [check-valid-until=no] http://snapshot.debian.org/archive/debian-security/20261101T000000Z bookworm-security main",
    ]


@pytest.mark.nightly
def test_base_is_made_of_a_snapshot_of_debian_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    time = "20261101T000000Z"
    monkeypatch.setenv(SNAPSHOT_VARIABLE, time)
    with snapshot_archive(time) as archive:
        monkeypatch.setenv("http_proxy", archive.address)
        made = base_archive(tmp_path)
    assert archive.refused == []
    # All packages came from there: the mirrors were asked for none.
    packages = [address for address in archive.served if address.endswith(".deb")]
    with tarfile.open(made) as base:
        status = base.extractfile("./var/lib/dpkg/status")
        assert status is not None
        assert len(packages) == status.read().count(b" ok installed\n") > 0


def test_image_holds_our_packages_and_nothing_else_of_the_tree(mounted: _Mounted) -> None:
    packages = mounted.root / "opt/finetune/packages"
    assert {path.name for path in packages.iterdir()} - {"__pycache__"} == _OURS[mounted.which]
    leftovers = [path for name in ("mnt", "tmp", "home", "root") for path in (mounted.root / name).glob("[!.]*")]
    assert leftovers == []


def test_installed_packages_are_those_of_the_lock(mounted: _Mounted) -> None:
    locked = locks.pinned_versions(mounted.sources.requirements.read_text())
    # Locked for another platform only.
    assert _installed(mounted) == {name: version for name, version in locked.items() if name != "colorama"}


def test_every_module_is_compiled(mounted: _Mounted) -> None:
    site_packages = mounted.root / _SITE_PACKAGES
    folders = [mounted.root / "opt/finetune/packages" / name for name in _OURS[mounted.which]]
    samples = {"trainer": ("torch/nn", "transformers"), "operator": ("kopf", "kubernetes")}[mounted.which]
    folders += [site_packages / name for name in samples]
    missing = [
        source
        for folder in folders
        for source in folder.rglob("*.py")
        if not (source.parent / "__pycache__" / f"{source.stem}.cpython-311.pyc").exists()
    ]
    assert missing == []
    code = (mounted.root / "opt/finetune").rglob("*.pyc")
    assert [str(path.relative_to(mounted.root)) for path in code if not _is_timeless(path)] == []


def _is_timeless(compiled: Path) -> bool:
    """Whether bytecode holds no time of its source, and is never compared with it."""
    with compiled.open("rb") as file:
        return file.read(8)[4:] == b"\x01\0\0\0"


def test_image_runs_as_an_arbitrary_user_on_a_read_only_root(mounted: _Mounted) -> None:
    done = mounted.run(*mounted.config["Entrypoint"], "--help")
    assert done.returncode == 0, done.stderr
    assert "usage" in done.stdout.lower()


def test_dependencies_import_as_an_arbitrary_user_who_can_write_below_tmp_alone(mounted: _Mounted) -> None:
    modules = {
        "trainer": "torch, transformers, peft, accelerate, bitsandbytes, pyarrow, boto3, huggingface_hub, tqdm, "
        "finetune_trainer, finetune_job",
        "operator": "kopf, kubernetes, prometheus_client, finetune_operator, finetune_job",
    }[mounted.which]
    printed = mounted.python(
        f"import {modules}, errno, os, pathlib, tempfile\n"
        "print(os.getuid(), os.getgid(), os.getppid(), os.environ['HOME'])\n"
        "print(tempfile.mkdtemp(dir=pathlib.Path.home()))\n"
        "try: pathlib.Path('/var/tmp/file').write_text('')\n"
        "except OSError as error: print(errno.errorcode[error.errno])"
    )
    *who, made, refused = printed.split()
    assert (who, refused) == ([str(_ARBITRARY_UID), "0", "1", "/tmp"], "EROFS")
    assert made.startswith("/tmp/")


@pytest.mark.parametrize("mounted", ["trainer"], indirect=True)
def test_versions_are_those_of_the_lock(mounted: _Mounted) -> None:
    versions = json.loads((mounted.root / "opt/finetune/versions.json").read_text())
    assert re.fullmatch(r"3\.11\.\d+", versions.pop("python"))
    locked = locks.pinned_versions(mounted.sources.requirements.read_text())
    names = "torch transformers peft accelerate bitsandbytes safetensors tokenizers numpy pyarrow boto3 huggingface-hub tqdm"
    assert versions == {name: locked[name] for name in names.split()}


def test_trainer_compiles_for_gpus_without_a_compiler(mounted: _Mounted) -> None:
    launcher = list((mounted.root / "opt/finetune").glob("launcher/*"))
    if mounted.which == "operator":
        assert launcher == []
        return
    assert [path.name for path in launcher] == ["cuda_utils.cpython-311-x86_64-linux-gnu.so"]
    assert stat.S_IMODE(launcher[0].stat().st_mode) == 0o555
    shown = mounted.python(
        "import json\n"
        "from pathlib import Path\n"
        "import triton\n"
        "from triton.runtime import build\n"
        "from finetune_trainer.model.compilation import missing_compiler, take_launcher\n"
        "take_launcher()\n"
        "source = Path(triton.__file__).parent / 'backends/nvidia/driver.c'\n"
        "kept = build.compile_so_from_file(str(source), 'cuda_utils', libraries=['libcuda.so.1'])\n"
        "print(json.dumps([missing_compiler('cuda'), missing_compiler('cpu'), Path(kept).stat().st_size]))\n"
    )
    assert json.loads(shown) == [[], ["g++", "c++", "clang++"], launcher[0].stat().st_size]


@pytest.mark.parametrize("mounted", ["trainer"], indirect=True)
def test_the_trainer_asks_no_hub_and_has_every_cache_under_tmp(mounted: _Mounted) -> None:
    assert {"HF_HUB_OFFLINE=1", "HF_HUB_DISABLE_TELEMETRY=1"} <= set(mounted.config["Env"])
    names = ("HOME", "HF_HOME", "XDG_CACHE_HOME", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    settings = dict(setting.split("=", 1) for setting in mounted.config["Env"])
    assert all(Path(settings[name]).is_relative_to("/tmp") for name in names)
    printed = mounted.python(
        "import torch._inductor.runtime.cache_dir_utils as inductor, huggingface_hub.constants as hub, triton\n"
        "print(inductor.cache_dir(), hub.HF_HUB_CACHE, hub.HF_XET_CACHE, triton.knobs.cache.dir)"
    )
    assert all(path.startswith("/tmp/") for path in printed.split())


def test_locks_are_what_uv_lock_says() -> None:
    assert locks.stale() == []


def test_lock_with_a_forbidden_package_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks, "_FORBIDDEN", frozenset({"kopf"}))
    with pytest.raises(ImageError, match=r"adds kopf to finetune-operator"):
        locks.derive(next(lock for lock in locks.LOCKS if lock.subject == "finetune-operator"))


def _blobs(archive: Path) -> dict[str, str]:
    """Name of every blob in an OCI archive that can be read once -> digest of its content."""
    digests = {}
    with archive.open("rb") as file, tarfile.open(fileobj=file, mode="r|") as tar:
        for entry in tar:
            content = tar.extractfile(entry)
            assert content is not None
            if entry.name.startswith("blobs/sha256/"):
                digests[Path(entry.name).name] = hashlib.file_digest(content, "sha256").hexdigest()  # type: ignore[arg-type]
    return digests


@pytest.fixture
def empty_storage(tmp_path: Path) -> Iterator[Storage]:
    storage = Storage(tmp_path)
    yield storage
    shutil.rmtree(storage.mounts)


def test_tags_that_were_built_last_are_kept(empty_storage: Storage) -> None:
    """All images say that they were created at one time, so neither that nor a tag's letters tell which is the newest."""
    storage, sources = empty_storage, SOURCES["operator"]
    reference = f"localhost/{sources.name}"
    (storage.directory / "file.tar").touch()
    storage.import_file_system("base", storage.directory / "file.tar")
    for tag in ("c", "b", "d", "a", "d", "b"):
        storage._buildah("tag", "localhost/finetune-base:latest", f"{reference}:built")
        storage.accept(sources, tag, 2)
        assert find_image(storage.root, f"{reference}:{tag}") is not None
    assert [tag for tag in "abcd" if find_image(storage.root, f"{reference}:{tag}")] == ["b", "d"]
    assert find_image(storage.root, f"{reference}:built") is not None


def test_archive_holds_every_blob_that_the_reader_lacks(operator_image: Image) -> None:
    with operator_image.archive() as archive:
        blobs = _blobs(archive)
    layers = [layer.digest.removeprefix("sha256:") for layer in operator_image.stored.layers]
    assert set(layers) < set(blobs)
    assert len(blobs) == len(layers) + 2  # the manifest and the configuration
    assert all(name == digest for name, digest in blobs.items())

    present = [f"sha256:{digest}" for digest in layers[:-1]]
    with operator_image.archive(present) as archive:
        assert set(blobs) - set(_blobs(archive)) == set(layers[:-1])

    with operator_image.archive() as unread:
        assert unread.exists()
    assert not unread.exists()


@dataclass(frozen=True)
class _Wheelhouse:
    """A folder with one wheel of ours and the installer, and locks for both."""

    folder: Path
    requirements: Path
    installer: Path
    environment: Path

    def install(self) -> subprocess.CompletedProcess[str]:
        script = REPOSITORY / "trainer_image" / "layers" / "install-locked.sh"
        return subprocess.run(
            ["sh", script, self.folder, self.requirements, self.installer, self.environment],
            # An empty word is none: in an image no such variable is set.
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )


@pytest.fixture
def small_wheelhouse(tmp_path: Path, operator_image: Image) -> _Wheelhouse:
    folder = tmp_path / "wheelhouse"
    folder.mkdir()
    (uv,) = wheelhouse(SOURCES["operator"], cache_root() / "wheels").glob("uv-*.whl")
    (folder / uv.name).write_bytes(uv.read_bytes())
    wheel = folder / "demonstration-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("demonstration.py", "VALUE = 1\n")
        for name, text in {
            "METADATA": "Metadata-Version: 2.1\nName: demonstration\nVersion: 1.0\n",
            "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            "RECORD": "",
        }.items():
            archive.writestr(f"demonstration-1.0.dist-info/{name}", text)
        # Like setuptools', which is then imported by the very process that compiles it.
        archive.writestr("demonstration.pth", "import demonstration\n")
    requirements = tmp_path / "requirements.lock"
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    requirements.write_text(f"demonstration==1.0 --hash=sha256:{digest}\n")
    return _Wheelhouse(folder, requirements, SOURCES["operator"].installer, tmp_path / "venv")


def test_locked_wheel_is_installed(small_wheelhouse: _Wheelhouse) -> None:
    done = small_wheelhouse.install()
    assert done.returncode == 0, done.stderr
    (compiled,) = small_wheelhouse.environment.glob("lib/*/site-packages/__pycache__/demonstration.*.pyc")
    assert _is_timeless(compiled)


def test_wheel_that_the_lock_does_not_know_ends_the_build(small_wheelhouse: _Wheelhouse) -> None:
    with zipfile.ZipFile(small_wheelhouse.folder / "demonstration-1.0-py3-none-any.whl", "a") as archive:
        archive.writestr("added.py", "")
    done = small_wheelhouse.install()
    assert done.returncode != 0
    assert "hash mismatch" in done.stderr.lower()
    assert not list(small_wheelhouse.environment.glob("lib/*/site-packages/demonstration.py"))


def test_installer_that_its_lock_does_not_know_is_not_run(small_wheelhouse: _Wheelhouse) -> None:
    (uv,) = small_wheelhouse.folder.glob("uv-*.whl")
    with uv.open("ab") as file:
        file.write(b"\0")
    done = small_wheelhouse.install()
    assert done.returncode != 0
    assert "no uv wheel with a hash" in done.stderr


_RECIPE_PAGE = REPOSITORY / "docs/how-to/training.md"
_SLIM_PYTHON, _OUR_IMAGE = "python:3.11-slim-bookworm", "registry.example/team/finetune-trainer"
"""Images that the page builds on; no registry is asked for them here."""
_OF_THE_MACHINE = (Path("/etc/pip.conf"), Path("/etc/ssl/certs/ca-certificates.crt"))
"""What pip has to know to reach its index from here."""
_TRACKED = """
import os, sys
from importlib.util import find_spec
from finetune_trainer.observe.trackers import Trackers, offered_trackers

print(sorted(offered_trackers()))
both = set(os.listdir("/opt/trackers")) & set(os.listdir("/opt/finetune/venv/lib/python3.11/site-packages"))
modules = sorted(name for name in both if name.isidentifier() and not name.startswith("_"))
print(modules)
print([name for name in modules if str(find_spec(name).origin).startswith("/opt/trackers")])
trackers = Trackers(["wandb", "mlflow"], finish_seconds=300)
plan = {"method": {"type": "LoRA"}, "model": {"name": "maker/base"}, "training": {"seed": 3}}
run = {"namespace": "team", "name": "tuned", "uid": "0123", "plan": plan, "directory": "/tmp/trackers"}
trackers.start({**run, "attempt": 0, "step": 0, "total_steps": 1})
trackers.log(1, {"loss": 0.5})
trackers.finish("Succeeded")
"""


@pytest.fixture
def with_trackers(tmp_path: Path) -> Iterator[_Mounted]:
    """The trainer image with packages of trackers, derived as the page says, from a Python with pip in place of Docker Hub's."""
    image = build("trainer")
    storage, derived = image.storage, Image("finetune-trainer-derived", "trackers", image.storage)
    (bundled,) = (Path(ensurepip.__file__).parent / "_bundled").glob("pip-*.whl")
    shutil.copy(bundled, tmp_path)
    python = (
        f"FROM {imported('base')}\nCOPY {bundled.name} /\n"
        f"RUN printf '#!/bin/sh\\nexec python3.11 /{bundled.name}/pip \"$@\"\\n' > /usr/bin/pip && chmod 0755 /usr/bin/pip\n"
    )
    digest = f"sha256:{hashlib.sha256(image.stored.manifest).hexdigest()}"
    (recipe,) = [block.text for block in blocks_of(_RECIPE_PAGE, "dockerfile")]
    assert f"FROM {_SLIM_PYTHON} AS" in recipe
    assert f"FROM {_OUR_IMAGE}@sha256:DIGEST" in recipe
    made = []
    try:
        storage.derive(python, f"localhost/{_SLIM_PYTHON}", tmp_path)
        made.append(f"localhost/{_SLIM_PYTHON}")
        storage.tag(f"localhost/{image.name}:{image.tag}", f"{_OUR_IMAGE}:documented")
        made.append(f"{_OUR_IMAGE}:documented")
        name = f"localhost/{derived.name}:{derived.tag}"
        try:
            storage.derive(
                recipe.replace("sha256:DIGEST", digest), name, tmp_path, [path for path in _OF_THE_MACHINE if path.exists()]
            )
        except ImageError as error:
            if "No matching distribution" in str(error):
                pytest.skip(f"the packages cannot be had here: {str(error)[-300:]}")
            raise
        made.append(name)
        with derived.mounted() as root:
            yield _Mounted("trainer", derived, root)
    finally:
        for each in reversed(made):
            storage.remove(each)


@pytest.mark.nightly
def test_the_documented_image_with_trackers_writes_runs_that_can_be_sent_later(with_trackers: _Mounted, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    scratch.chmod(0o777)
    entrypoint = with_trackers.config["Entrypoint"]
    done = with_trackers.run(*entrypoint[: entrypoint.index("-m")], "-c", _TRACKED, scratch=scratch)
    assert done.returncode == 0, done.stderr
    offered, in_both, replaced = (ast.literal_eval(line) for line in done.stdout.splitlines()[:3])
    assert offered == ["mlflow", "tensorboard", "wandb"]
    assert "pydantic" in in_both, "what our lock has, and the packages bring in a version of their own"
    assert replaced == []
    (run,) = (scratch / "trackers/wandb").glob("offline-run-*-0123")
    assert [path.stat().st_size > 0 for path in run.glob("run-0123.wandb")] == [True], done.stderr
    with sqlite3.connect(scratch / "trackers/mlflow.db") as database:
        assert database.execute("select name, status from runs").fetchall() == [("tuned", "FINISHED")], done.stderr
        assert database.execute("select key, value, step from metrics").fetchall() == [("loss", 0.5, 1)]
    assert list((scratch / "trackers/tensorboard").glob("events.*"))
    assert "is off for the rest of the run" not in done.stderr
