"""The archives for Krew: this platform's runs where there is nothing but it and a shell, and all are what they say they are."""

import io
import json
import os
import shutil
import stat
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import psutil
import pytest

from tests.support.processor import slowness
from tools.cluster.certificates import CertificateAuthority
from tools.krew.bundle import bundle
from tools.krew.interpreter import PACKAGES, download
from tools.krew.platforms import PLATFORMS, Platform, own_platform

pytestmark = pytest.mark.nightly
ROOT = Path(__file__).parents[2]
JOBS = "/apis/finetune.dev/v1alpha1/namespaces/default/finetunejobs"
PROGRAMS = ("sh", "readlink", "dirname")
"""What the launchers use of a machine."""
SHELL = "busybox-static"
PLUGIN = """#!/bin/busybox sh
busybox env > /plugin-environment
echo '{"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential", "status": {"token": "told-by-the-plugin"}}'
"""
MACHINES = {"amd64": 62, "arm64": 183}
"""`e_machine` of ELF."""
CHROOT = shutil.which("chroot") or "chroot"
FIRST_OUTPUT_SECONDS = 0.3
"""Of processor time."""


def platform_named(name: str) -> Platform:
    [found] = [one for one in PLATFORMS if one.name == name]
    return found


def unpacked(archive: bytes, target: Path) -> Path:
    with tarfile.open(fileobj=io.BytesIO(archive)) as packed:
        packed.extractall(target, filter="data")
    return target


@dataclass(frozen=True)
class Machine:
    """The root of a file system with a bundle in /bundle and a static shell: no Python, no C library."""

    root: Path
    archive: bytes
    packages: list[Path]
    """Of Debian, that the bundle was made with."""

    def run(self, script: str, **variables: str) -> tuple[int, str]:
        """In a shell; its exit code and output."""
        done = subprocess.run(
            [CHROOT, self.root, "/bin/sh", "-euc", script],
            env={"PATH": "/bin", "HOME": "/home", **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    if os.geteuid() != 0:
        pytest.skip("the root directory of a process is changed by root alone")
    target = platform_named(own_platform())
    scratch = tmp_path_factory.mktemp("krew")
    packages = download(target.arch, [*PACKAGES, SHELL], scratch / "debian")
    [shell] = [path for path in packages if path.name.startswith(SHELL)]
    packages.remove(shell)
    archive = bundle("0.2.0", target, packages)
    root = scratch / "root"
    unpacked(archive, root / "bundle")
    subprocess.run(["dpkg-deb", "--extract", shell, scratch / "shell"], check=True)
    for name in ("bin", "dev", "home"):
        (root / name).mkdir()
    shutil.copy(scratch / "shell/bin/busybox", root / "bin/busybox")
    for name in PROGRAMS:
        (root / "bin" / name).symlink_to("busybox")
    os.mknod(root / "dev/null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    (root / "bin/kubectl-finetune").symlink_to("../bundle/kubectl-finetune")
    good = (ROOT / "examples/quickstart.yaml").read_text()
    (root / "good.yaml").write_text(good)
    (root / "bad.yaml").write_text(good.replace("learningRate", "learningrat"))
    return Machine(root, archive, packages)


def test_it_runs_without_python_and_without_a_c_library(machine: Machine) -> None:
    assert machine.run("kubectl-finetune --version") == (0, "finetune 0.2.0\n")
    code, said = machine.run("kubectl-finetune validate -f /good.yaml")
    assert code == 0, said
    assert "FineTuneJob quickstart: accepted" in said
    code, said = machine.run("kubectl-finetune validate -f /bad.yaml")
    assert code == 2, said
    assert "field:  spec.training.learningrat\n" in said
    assert "fix:    write learningRate\n" in said
    # What is started as Python's own program starts this interpreter, and finds the packages of the bundle.
    told = "import sys; print(sys.executable)"
    assert machine.run(f"/bundle/python/bin/python3.11 -c '{told}'") == (0, "/bundle/python/bin/python3.11\n")
    assert machine.run("/bundle/python/bin/python3.11 -m finetune_cli --version") == (0, "finetune 0.2.0\n")
    # What the environment names is not looked at.
    (machine.root / "home/pathlib.py").write_text("raise SystemExit(77)")
    elsewhere = {"PYTHONPATH": "/home", "PYTHONHOME": "/home", "LD_LIBRARY_PATH": "/home", "FINETUNE_PYTHON": "/home/python"}
    assert machine.run("kubectl-finetune --version", **elsewhere) == (0, "finetune 0.2.0\n")


def test_the_archive_says_what_is_in_it(machine: Machine) -> None:
    root = machine.root / "bundle"
    assert "Apache License" in (root / "LICENSE").read_text()
    assert [path.name for path in (root / "lib").iterdir() if path.name in {"torch", "transformers", "kopf"}] == []
    listed = dict(line.split() for line in (root / "python/debian-packages.txt").read_text().splitlines()[1:])
    assert set(listed) == set(PACKAGES)
    assert {name for name in listed if not (root / f"python/share/doc/{name}/copyright").read_text().strip()} == set()


@dataclass
class ApiServer:
    """Answers one list, to whom has the plugin's token."""

    url: str = ""
    asked: list[str] = field(default_factory=list)

    def answer(self, path: str, authorization: str) -> tuple[int, dict[str, object]]:
        self.asked.append(path)
        if authorization != "Bearer told-by-the-plugin":
            return 401, {"kind": "Status", "reason": "Unauthorized", "message": "Unauthorized"}
        items = {
            "apiVersion": "finetune.dev/v1alpha1",
            "kind": "FineTuneJobList",
            "metadata": {"resourceVersion": "1"},
            "items": [],
        }
        return (200, items) if path.partition("?")[0] == JOBS else (404, {"kind": "Status", "reason": "NotFound"})


@pytest.fixture
def authority(tmp_path: Path) -> CertificateAuthority:
    return CertificateAuthority(tmp_path / "authority")


@pytest.fixture
def server(authority: CertificateAuthority) -> Iterator[ApiServer]:
    api = ApiServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            code, document = api.answer(self.path, self.headers.get("Authorization", ""))
            content = json.dumps(document).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        listening.socket = authority.server_context("127.0.0.1").wrap_socket(listening.socket, server_side=True)
        api.url = f"https://127.0.0.1:{listening.server_port}"
        thread = threading.Thread(target=listening.serve_forever)
        thread.start()
        yield api
        listening.shutdown()
        thread.join()


def kubeconfig(server: str, authority: str | None) -> str:
    """Of a user whom a plugin logs in. authority: path of the certificates to trust; None: those of the machine."""
    cluster = {"server": server, **({"certificate-authority": authority} if authority else {})}
    plugin = {"apiVersion": "client.authentication.k8s.io/v1", "command": "/bin/plugin", "interactiveMode": "Never"}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "user", "user": {"exec": plugin}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "user"}}],
        "current-context": "test",
    }
    return json.dumps(document)


def test_it_talks_to_a_server_as_whom_a_plugin_logs_in(
    machine: Machine, server: ApiServer, authority: CertificateAuthority
) -> None:
    (machine.root / "bin/plugin").write_text(PLUGIN)
    (machine.root / "bin/plugin").chmod(0o755)
    certificates = machine.root / "etc/pki/tls/certs/ca-bundle.crt"
    certificates.parent.mkdir(parents=True)
    (machine.root / "home/config").write_text(kubeconfig(server.url, None))
    code, said = machine.run("kubectl-finetune list", KUBECONFIG="/home/config")
    assert code == 3, said
    assert "certificate verify failed" in said

    # Authorities of the machine, where another distribution than Debian keeps them.
    shutil.copy(authority.certificate, certificates)
    said = machine.run("kubectl-finetune list", KUBECONFIG="/home/config")
    assert said == (0, "there are no FineTuneJobs in the namespace default\n")
    assert server.asked[-1].partition("?")[0] == JOBS

    # A plugin is another program: the loader and the libraries of the bundle are none of its business.
    certificates.rename(machine.root / "home/authority.crt")
    (machine.root / "home/config").write_text(kubeconfig(server.url, "/home/authority.crt"))
    assert machine.run("kubectl-finetune list", KUBECONFIG="/home/config")[0] == 0
    names = {line.partition("=")[0] for line in (machine.root / "plugin-environment").read_text().splitlines()}
    assert names - {"KUBERNETES_EXEC_INFO", "PWD", "SHLVL"} <= {"PATH", "HOME", "KUBECONFIG", "LC_CTYPE", "OLDPWD"}


def test_the_first_output_comes_soon(machine: Machine) -> None:
    """Without a file that it writes: where Krew keeps it, nothing need be writable."""
    before = {path: path.stat().st_mtime_ns for path in (machine.root / "bundle").rglob("*")}
    for command in ("kubectl-finetune --version", "kubectl-finetune validate -f /good.yaml"):
        taken = []
        for _ in range(5):
            started = psutil.Process().cpu_times()
            assert machine.run(command)[0] == 0
            ended = psutil.Process().cpu_times()
            taken.append(ended.children_user + ended.children_system - started.children_user - started.children_system)
        assert min(taken) < FIRST_OUTPUT_SECONDS * slowness(), (command, taken)
    assert {path: path.stat().st_mtime_ns for path in (machine.root / "bundle").rglob("*")} == before


@pytest.mark.timeout(900)
def test_equal_inputs_give_equal_bytes(machine: Machine) -> None:
    assert bundle("0.2.0", platform_named(own_platform()), machine.packages) == machine.archive


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["linux-arm64", "linux-amd64"])
def test_an_archive_for_linux_holds_programs_of_its_architecture_alone(name: str, tmp_path: Path) -> None:
    target = platform_named(name)
    root = unpacked(bundle("0.2.0", target), tmp_path)
    machines = {}
    for path in root.rglob("*"):
        if path.is_file() and (head := path.open("rb").read(20)).startswith(b"\x7fELF"):
            machines[path.relative_to(root)] = int.from_bytes(head[18:20], "little")
    assert set(machines.values()) == {MACHINES[target.arch]}
    names = {path.name for path in machines}
    loader = {"linux-amd64": "ld-linux-x86-64.so.2", "linux-arm64": "ld-linux-aarch64.so.1"}[name]
    assert {"python3.11", loader, "libc.so.6", "libssl.so.3", "libz.so.1", "libexpat.so.1"} <= names
    assert {path.suffix for path in machines if "lib-dynload" in path.parts} == {".so"}
    assert loader in (root / "python/bin/python3.11").read_text()
    assert [path for path in root.rglob("*") if path.is_symlink()] == []
    told = {path.parts[1].partition(".")[0] for path in machines if path.parts[0] == "lib"}
    assert {"pydantic_core", "yaml"} <= told
    executable = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file() and path.stat().st_mode & 0o111}
    own = {"kubectl-finetune", "python/bin/python3.11", "python/libexec/python3.11", f"python/lib/{loader}"}
    assert executable == own
    unwanted = {"test", "idlelib", "tkinter", "ensurepip", "lib2to3", "aio"}
    assert {path.name for path in root.rglob("*") if path.is_dir()} & unwanted == set()


@pytest.mark.timeout(900)
def test_an_archive_for_macos_says_that_it_needs_python(tmp_path: Path) -> None:
    root = unpacked(bundle("0.2.0", platform_named("darwin-arm64")), tmp_path)
    assert not (root / "python").exists()
    environment = {"PATH": "/usr/bin:/bin", "FINETUNE_PYTHON": "no-such-python"}
    done = subprocess.run([root / "kubectl-finetune", "--version"], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "needs Python 3.11: there is no no-such-python on PATH. Install it, or set FINETUNE_PYTHON" in done.stderr
