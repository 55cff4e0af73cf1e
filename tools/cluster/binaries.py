"""The test cluster's executables, built once from Go modules and kept in the cache.

`python -m tools.cluster.binaries` builds missing programs and prints their directory. A build of the Kubernetes
programs takes about five minutes on two cores. A directory is named after the hash of all inputs of its build, so an
unchanged source is never built twice.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from tools.cluster.cache import cache_root, locked

PREBUILT_VARIABLE = "FINETUNE_TEST_BINARIES"
"""Environment variable that names a directory with prebuilt executables: those of `Binaries`."""

KUBERNETES_VERSION = "1.36.3"
"""Release that the executables report; `cluster_go/go.mod` requires the same one.

A release 1.X.Y requires its own modules, `k8s.io/api` and so on, as v0.0.0, so go.mod replaces each by v0.X.Y. It also
pins etcd to the version that the release requires, because CoreDNS would raise it. A helm or CoreDNS that requires a
later 0.X would change how the API server behaves, so they may be upgraded only after the Kubernetes release.
"""

_GO_SOURCES = Path(__file__).parent.parent / "cluster_go"
_SOURCE_SUFFIXES = {".go", ".s", ".mod", ".test"}
"""Suffixes of the files that a build of a dependency reads; `.test` files are embedded by a package of Prometheus."""
_PROGRESS_SECONDS = 30.0
"""Interval at which a running build reports its progress."""


class BuildError(RuntimeError):
    """An executable is missing and cannot be built; the message says why and what to do."""


def _linker_flags() -> str:
    major, minor, _ = KUBERNETES_VERSION.split(".")
    values = {
        "gitVersion": f"v{KUBERNETES_VERSION}",
        "gitMajor": major,
        "gitMinor": minor,
        "gitTreeState": "archive",
        "buildDate": "1970-01-01T00:00:00Z",
    }
    packages = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
    stamps = [f"-X {package}.{name}={value}" for package in packages for name, value in values.items()]
    return " ".join(["-s", "-w", *stamps])


@dataclass(frozen=True)
class _Stub:
    """A package of a dependency whose own dependencies are not needed here, and our file that replaces the package."""

    module: str
    package: str
    """Directory of the package in the module."""
    file: str
    """Our file, below the sources of the module that requires the dependency."""


@dataclass(frozen=True)
class _Module:
    """A Go module and the programs built from it in one call, so that shared packages are compiled once."""

    name: str
    sources: Path
    packages: tuple[str, ...]
    programs: tuple[str, ...]
    flags: tuple[str, ...]
    stub: _Stub | None = None

    def fingerprint(self) -> str:
        """Hash of the module's sources and of the build flags."""
        digest = hashlib.sha256()
        nested = {path.parent for path in self.sources.glob("*/go.mod")}
        for path in sorted(self.sources.rglob("*")):
            if path.is_file() and not nested.intersection(path.parents):
                digest.update(f"{path.relative_to(self.sources)}\0{path.stat().st_size}\0".encode())
                digest.update(path.read_bytes())
        stub = () if self.stub is None else astuple(self.stub)
        digest.update("\0".join((*self.packages, *self.flags, *stub)).encode())
        return digest.hexdigest()[:16]

    def directory(self) -> Path:
        return cache_root() / self.name / self.fingerprint()


_FLAGS = ("-trimpath", "-gcflags=all=-dwarf=false")
_QUICK = ("-trimpath", "-gcflags=all=-dwarf=false -l", "-gcflags=std=-dwarf=false")
"""Flags for programs that do little: without inlining, compiling takes a third less time."""


def _quick(name: str, *packages: str, flags: tuple[str, ...] = (), stub: _Stub | None = None) -> _Module:
    """Return the module in the directory of this name, whose programs are named like their packages."""
    programs = tuple(package.rpartition("/")[2] for package in packages)
    return _Module(f"{name}-bin", _GO_SOURCES / name, packages, programs, (*_QUICK, *flags, "-ldflags", "-s -w"), stub)


_CLUSTER = _Module(
    name="cluster-bin",
    sources=_GO_SOURCES,
    packages=("./kube", "./coredns", "helm.sh/helm/v4/cmd/helm"),
    programs=("kube", "coredns", "helm"),
    flags=(*_FLAGS, "-ldflags", _linker_flags()),
)
_PROBE = _Module(
    name="probe-bin", sources=_GO_SOURCES / "probe", packages=(".",), programs=("probe",), flags=(*_FLAGS, "-ldflags", "-s -w")
)
_S3 = _quick("s3", "github.com/versity/versitygw/cmd/versitygw")
_PROMETHEUS = _quick(
    "prometheus",
    "github.com/prometheus/prometheus/cmd/prometheus",
    "github.com/prometheus/prometheus/cmd/promtool",
    # Targets are static here, and the web pages are not used.
    flags=("-tags", "remove_all_sd"),
    # promtool checks the certificates of this discovery, and so would contain all of Kubernetes' client: a third of the build.
    stub=_Stub("github.com/prometheus/prometheus", "discovery/kubernetes", "stubs/kubernetes.go"),
)
_OF_THE_NIGHT = {
    "cosign": _quick("cosign", "github.com/sigstore/cosign/v3/cmd/cosign"),
    "krew": _quick("krew", "sigs.k8s.io/krew/cmd/krew", "sigs.k8s.io/krew/cmd/validate-krew-manifest"),
    "grype": _quick("grype", "github.com/anchore/grype/cmd/grype", "./advisories"),
    "helm3": _quick("helm3", "helm.sh/helm/v3/cmd/helm"),
    "oras": _quick("oras", "oras.land/oras/cmd/oras"),
}
"""Modules that only nightly tests need. Building cosign takes five minutes of CPU time."""
_MODULES = (_CLUSTER, _PROBE, _S3, _PROMETHEUS)


@dataclass(frozen=True)
class Binaries:
    """Paths of the test cluster's executables."""

    kube: Path
    """One program for etcd, all components of Kubernetes, and kubectl; its first argument chooses one."""
    coredns: Path
    helm: Path
    probe: Path
    """Static program in the test cluster's own image."""
    versitygw: Path
    """S3 server that keeps objects as files."""
    prometheus: Path
    promtool: Path


def find_binaries() -> Binaries | None:
    """Return the executables if all exist, without building anything.

    Raises:
        BuildError: the directory named by FINETUNE_TEST_BINARIES lacks one of them.
    """
    prebuilt = os.environ.get(PREBUILT_VARIABLE)
    paths: dict[str, Path] = {}
    for module in _MODULES:
        directory = Path(prebuilt).absolute() if prebuilt else module.directory()
        paths |= {program: directory / program for program in module.programs}
    absent = [name for name, path in paths.items() if not os.access(path, os.X_OK)]
    if absent and prebuilt:
        raise BuildError(
            f"{PREBUILT_VARIABLE}={prebuilt} has no executable {', '.join(absent)}: put it there, or unset "
            f"{PREBUILT_VARIABLE} so that everything is built"
        )
    return None if absent else Binaries(**paths)


def ensure_binaries() -> Binaries:
    """Return the executables, building those that the cache lacks (five minutes on two cores when it is empty).

    Raises:
        BuildError: Go is missing, or the build failed.
    """
    binaries = find_binaries()
    if binaries is not None:
        return binaries
    _ensure_built(_MODULES)
    binaries = find_binaries()
    if binaries is None:
        raise BuildError(f"an executable is missing after the build: delete {cache_root()} and build again")
    return binaries


def ensure_programs(name: str) -> tuple[Path, ...]:
    """Return the programs of a module that only nightly tests need, built if the cache lacks them.

    Raises:
        BuildError: Go is missing, or the build failed.
    """
    module = _OF_THE_NIGHT[name]
    _ensure_built((module,))
    return tuple(module.directory() / program for program in module.programs)


def _ensure_built(modules: Sequence[_Module]) -> None:
    """Build the modules that the cache lacks. Their common packages, above all Go's standard library, are compiled once."""
    with locked(cache_root() / "go-build.lock"):
        missing = [module for module in modules if not module.directory().exists()]
        compiled = cache_root() / "go-build"
        try:
            for module in missing:
                _build(module, compiled)
        finally:
            # These are three gigabytes that are useful again only after a change of the sources.
            shutil.rmtree(compiled, ignore_errors=True)


def _build(module: _Module, compiled: Path) -> None:
    go = shutil.which("go")
    if go is None:
        raise BuildError(
            f"the program 'go' is not on PATH, and {module.directory()} is not built: install Go 1.26, or set "
            f"{PREBUILT_VARIABLE} to a directory with {', '.join(name for module in _MODULES for name in module.programs)}"
        )
    target = module.directory()
    target.parent.mkdir(parents=True, exist_ok=True)
    compiled.mkdir(exist_ok=True)
    environment = {
        **os.environ,
        "CGO_ENABLED": "0",
        "GOTOOLCHAIN": "local",
        "GOGC": "400",
        "GOCACHE": str(compiled),
        "GOFLAGS": "-mod=readonly -buildvcs=false",
    }
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="building-") as scratch:
        output = Path(scratch) / "bin"
        output.mkdir()
        environment["GOTMPDIR"] = scratch
        flags = module.flags
        if module.stub is not None:
            flags = (*flags, f"-modfile={_with_stub(module, module.stub, go, Path(scratch), environment)}")
        _compile(module, go, output, flags, environment)
        output.rename(target)


def _with_stub(module: _Module, stub: _Stub, go: str, scratch: Path, environment: dict[str, str]) -> Path:
    """Write a go.mod that uses a copy of the dependency with the stub: files of the module cache cannot be replaced."""
    # `go list` shows no directory for a module that is not downloaded yet.
    download = [go, "mod", "download", "-json", stub.module]
    done = subprocess.run(download, cwd=module.sources, env=environment, capture_output=True, text=True, check=False)
    original = Path(json.loads(done.stdout).get("Dir", "")) if done.returncode == 0 else Path()
    if done.returncode != 0 or not (original / stub.package).is_dir():
        raise BuildError(f"{module.sources} has no {stub.module} with {stub.package}: correct the stub\n{done.stderr}")
    copy = scratch / "module"
    for path in original.rglob("*"):
        if path.suffix in _SOURCE_SUFFIXES and not path.name.endswith("_test.go"):
            place = copy / path.relative_to(original)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, place)
    shutil.rmtree(copy / stub.package)
    (copy / stub.package).mkdir()
    shutil.copy(module.sources / stub.file, copy / stub.package)
    (scratch / "go.mod").write_text(f"{(module.sources / 'go.mod').read_text()}\nreplace {stub.module} => {copy}\n")
    shutil.copy(module.sources / "go.sum", scratch)
    return scratch / "go.mod"


def _compile(module: _Module, go: str, output: Path, flags: Sequence[str], environment: dict[str, str]) -> None:
    started = time.monotonic()
    _say(f"building {', '.join(module.programs)} from {module.sources}")
    process = subprocess.Popen(
        [go, "build", "-v", *flags, "-o", f"{output}/", *module.packages],
        cwd=module.sources,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    lines: list[str] = []
    reported = started
    for line in process.stderr:  # one line for each compiled package, and the compiler's errors
        lines.append(line)
        if time.monotonic() - reported >= _PROGRESS_SECONDS:
            reported = time.monotonic()
            _say(f"{len(lines)} packages, {_minutes(started)}")
    if process.wait() != 0:
        raise BuildError(f"'go build' failed in {module.sources} (exit {process.returncode}):\n{''.join(lines[-40:])}")
    _say(f"built {', '.join(module.programs)} in {_minutes(started)}")


def _minutes(started: float) -> str:
    return f"{(time.monotonic() - started) / 60:.1f} min"


def _say(text: str) -> None:
    print(f"test cluster: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        print(ensure_binaries().kube.parent)
    except BuildError as error:
        sys.exit(f"test cluster: {error}")
