"""Results come from their claim by way of a pod that is deleted in any case; each file is what the list says, or nothing."""

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from finetune_cli.cluster.client import ClusterClient, RequestError
from finetune_cli.cluster.errors import ClusterError
from finetune_cli.cluster.results_pod import PART_BYTES
from finetune_cli.commands.download import Listener, bring, parse_list
from finetune_cli.exit_codes import ExitCode, LocalError
from finetune_job.api.base import ClaimPath
from finetune_job.plan.digest import canonical_json
from tests.support.builders import a_job
from tests.support.cases import table
from tests.support.documented import ROOT, blocks_of
from tests.unit.finetune_cli.cluster.api_server import JOBS, ApiServer, Document
from tests.unit.finetune_cli.commands.test_cluster_jobs import CONFIG_MAPS, Run, run, server
from tests.unit.finetune_cli.jobs import objects
from tests.unit.finetune_cli.manifests import ACCEPTED

__all__ = ["run", "server"]
CONTENT = {"adapter/adapter_model.safetensors": bytes(range(256)) * 100, "README.md": b"# card\n", "merged/a/b.json": b""}
SILENT = Listener(lambda _: None, lambda: False)


def sums(content: dict[str, bytes]) -> str:
    return "".join(f"{hashlib.sha256(each).hexdigest()}  {name}\n" for name, each in content.items())


class Results:
    """What a pod would send; `breaks`: connections that end after so many bytes."""

    def __init__(self, content: dict[str, bytes], *breaks: int, text: str | None = None) -> None:
        self.sent, self.breaks, self.asked = content, list(breaks), list[tuple[str, int]]()
        self.text = sums(content) if text is None else text

    def listing(self) -> dict[str, Any]:
        return {"sums": self.text, "sizes": {name: len(each) for name, each in self.sent.items()}}

    def content(self, name: str, offset: int) -> Iterator[bytes]:
        self.asked.append((name, offset))
        rest = self.sent[name][offset:]
        if not self.breaks:
            yield rest
            return
        yield rest[: self.breaks.pop(0)]
        raise ClusterError("the connection broke off")


def test_every_file_comes_and_the_list_last(tmp_path: Path) -> None:
    results = Results(CONTENT)
    said: list[str] = []
    found = bring(results, tmp_path / "here", Listener(said.append, lambda: False))
    assert {str(path.relative_to(tmp_path / "here")) for path in (tmp_path / "here").rglob("*") if path.is_file()} == {
        *CONTENT, "SHA256SUMS"
    }  # fmt: skip
    assert subprocess.run(["sha256sum", "--check", "--quiet", "SHA256SUMS"], cwd=tmp_path / "here", check=True).returncode == 0
    assert (found.files, found.bytes, said[0]) == (3, 25_607, "adapter/adapter_model.safetensors (0.0 MB)")
    again = Results(CONTENT)
    assert bring(again, tmp_path / "here", SILENT).bytes == 0
    assert again.asked == [], "what is there and right is not asked for again"


def test_a_broken_connection_is_continued_where_it_broke(tmp_path: Path) -> None:
    name = "adapter/adapter_model.safetensors"
    results = Results({name: CONTENT[name]}, 1000, 0, 500)
    bring(results, tmp_path, SILENT)
    assert (tmp_path / name).read_bytes() == CONTENT[name]
    assert [offset for _, offset in results.asked] == [0, 1000, 1000, 1500]
    with pytest.raises(ClusterError, match="broke off"):
        bring(Results({"x": b"y"}, *[0] * 5), tmp_path, SILENT)
    with pytest.raises(LocalError, match="interrupted") as caught:
        bring(Results({"z": b"y"}), tmp_path, Listener(lambda _: None, lambda: True))
    assert caught.value.exit_code is ExitCode.INTERRUPTED


@pytest.mark.parametrize("place", ["taken", "taken/below", "holds"])
def test_a_directory_that_cannot_be_written_is_told(tmp_path: Path, place: str) -> None:
    (tmp_path / "taken").write_text("a file")
    (tmp_path / "holds/README.md.part").mkdir(parents=True)
    with pytest.raises(LocalError, match=rf"{place}.* cannot be written \(") as caught:
        bring(Results({"README.md": b"# card"}), tmp_path / place, SILENT)
    assert caught.value.exit_code is ExitCode.FAILED
    assert not (tmp_path / place / "SHA256SUMS").exists()


def test_wrong_bytes_never_get_a_result_s_name(tmp_path: Path) -> None:
    text = sums({"x": b"right"})
    with pytest.raises(ClusterError, match="x: the received bytes do not match SHA256SUMS"):
        bring(Results({"x": b"wrong"}, text=text), tmp_path, SILENT)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "x").write_bytes(b"an older one")
    bring(Results({"x": b"right"}), tmp_path, SILENT)
    assert (tmp_path / "x").read_bytes() == b"right"


@pytest.mark.parametrize(
    "name", ["../x", "/etc/passwd", "a/../../x", "..", "a\x1b[2J", "", " "],
)  # fmt: skip
def test_a_list_that_leads_out_of_the_directory_is_refused(tmp_path: Path, name: str) -> None:
    if name == " ":
        assert parse_list(f"{'0' * 64}   \n") == {" ": "0" * 64}
        return
    with pytest.raises(ClusterError, match="names no file of the results"):
        parse_list(f"{'0' * 64}  {name}\n")


@pytest.mark.parametrize("names", table(__file__, "test_a_name_under_which_something_else_is_kept_is_refused"))
def test_a_name_under_which_something_else_is_kept_is_refused(names: list[str]) -> None:
    with pytest.raises(ClusterError, match="would replace another file"):
        parse_list("".join(f"{'0' * 64}  {name}\n" for name in names))


def test_names_that_only_look_like_parts_are_brought(tmp_path: Path) -> None:
    content = {"a.part": b"1", ".part": b"2", "b.part.part": b"3", "c/d.part": b"4", "d": b"5"}
    bring(Results(content), tmp_path, SILENT)
    assert {name: (tmp_path / name).read_bytes() for name in content} == content


@pytest.mark.parametrize(
    ("listing", "code", "words"),
    [
        ({"sums": None, "sizes": {}}, ExitCode.REFUSED, "not complete; wait for the job"),
        ({"sums": 3}, ExitCode.REFUSED, "not complete"),
        ({"sums": sums({"x": b""}), "sizes": {}}, ExitCode.FAILED, "x is named by SHA256SUMS, but does not exist"),
        ({"sums": sums({"x": b""}), "sizes": {"x": "big"}}, ExitCode.FAILED, "does not exist"),
        ({"sums": sums({"x": b""}), "sizes": {"x": 1 << 60}}, ExitCode.UNUSABLE, "bytes are needed"),
    ],
)
def test_results_that_cannot_be_brought_are_told(tmp_path: Path, listing: dict[str, Any], code: ExitCode, words: str) -> None:
    results = Results({})
    results.listing = lambda: listing
    with pytest.raises(LocalError, match=words) as caught:
        bring(results, tmp_path, SILENT)
    assert caught.value.exit_code is code


Given = Callable[..., Path]


@pytest.fixture
def given(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> Given:
    """The frozen plan of a job, and its folder of results; programs of the pod run here."""

    def output_of(client: ClusterClient, namespace: str, pod: str, container: str, command: list[str]) -> Iterator[bytes]:
        assert f"/api/v1/namespaces/{namespace}/pods/{pod}" in server.objects
        here = [part.replace("/claims/results", str(server.workspace)) for part in command]
        done = subprocess.run([sys.executable, *here[1:]], capture_output=True, timeout=60, check=False)
        if done.returncode:
            raise RequestError(f"the program failed: {done.stderr.decode()}", 400)
        yield from (done.stdout[at : at + 1000] for at in range(0, len(done.stdout), 1000))

    fail = server._create

    def create(path: str, document: dict[str, Any]) -> None:
        if not server.runs_pods:
            fail(path, document)
            return
        server.put(path.rpartition("/")[0], {**document, "status": {"phase": "Running"}})
        server.logs[path] = json.dumps(document)

    monkeypatch.setattr(ClusterClient, "output_of", output_of)
    monkeypatch.setattr(server, "_create", create)

    def give(name: str, **changes: Any) -> Path:
        plan = a_job().plan().model_copy(update={"output": ClaimPath(claim="results", path="tuned"), **changes})
        server.put(CONFIG_MAPS, {"metadata": {"name": f"{name}-plan"}, "data": {"plan.json": canonical_json(plan)}})
        folder = server.workspace / "tuned"
        for file, content in CONTENT.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(content)
        (folder / "SHA256SUMS").write_text(sums(CONTENT))
        return folder

    return give


def readers(server: ApiServer) -> list[str]:
    return [path for path in server.objects if "finetune-reader" in path]


def test_the_programs_in_the_pod_give_the_files_and_no_other(
    run: Run, server: ApiServer, given: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = given("succeeded")
    monkeypatch.setattr("finetune_cli.cluster.results_pod.PART_BYTES", 7000)
    assert PART_BYTES == 8 << 20
    done = run(f"download succeeded {tmp_path / 'here'} -o json --timeout 10m")
    assert (done.exit_code, json.loads(done.stdout)) == (
        0, {"directory": str(tmp_path / "here"), "files": 3, "bytesSent": 25_607}
    ), done.output  # fmt: skip
    assert {name: (tmp_path / "here" / name).read_bytes() for name in CONTENT} == CONTENT
    assert readers(server) == []
    (created,) = [json.loads(text) for path, text in server.logs.items() if "finetune-reader" in path]
    spec = created["spec"]
    (container,) = spec["containers"]
    assert (spec["activeDeadlineSeconds"], container["command"][2]) == (600, "import time; time.sleep(600)")
    assert (spec["volumes"][0]["persistentVolumeClaim"], container["volumeMounts"][0]["readOnly"]) == (
        {"claimName": "results", "readOnly": True}, True
    )  # fmt: skip
    assert (container["securityContext"]["capabilities"], spec["automountServiceAccountToken"]) == ({"drop": ["ALL"]}, False)
    # A link on the claim leads nowhere.
    (folder / "README.md").unlink()
    (folder / "README.md").symlink_to("/etc/passwd")
    done = run(f"download succeeded {tmp_path / 'other'}")
    assert (done.exit_code, "is not a file of the results" in done.output) == (3, True)
    assert readers(server) == []


def test_what_stands_in_the_way_is_told_and_no_pod_is_left(run: Run, server: ApiServer, given: Given, tmp_path: Path) -> None:
    (given("succeeded") / "SHA256SUMS").unlink()
    done = run(f"download succeeded {tmp_path / 'here'}")
    assert (done.exit_code, "wait for the job" in done.output) == (1, True)
    server.runs_pods = False
    done = run(f"download succeeded {tmp_path / 'here'}")
    assert (done.exit_code, "did not do so (Error: no such claim)" in done.output) == (3, True)
    assert readers(server) == []
    server.denied = {("create", "pods")}
    assert "you may not create pods in the namespace team" in run(f"download succeeded {tmp_path / 'here'}").output
    done = run(f"download running {tmp_path / 'here'}")
    assert (done.exit_code, "its plan (ConfigMap running-plan) is gone" in done.output) == (3, True)
    assert run(f"download succeeded {tmp_path / 'here'} --timeout soon").exit_code == 2


def test_what_the_page_on_jobs_says_is_done_as_it_is_written(
    run: Run, server: ApiServer, given: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """JOB is a job that trains. What is submitted succeeds at once."""
    given("running")
    (tmp_path / "job.yaml").write_text(ACCEPTED)
    put = server.put

    def put_ended(collection: str, *documents: Document) -> None:
        status = {"status": objects.SUCCEEDED["status"]} if collection == JOBS else {}
        put(collection, *({**document, **status} for document in documents))

    monkeypatch.setattr(server, "put", put_ended)
    (block,) = blocks_of(ROOT / "docs/how-to/jobs.md", section="Commands for jobs of a cluster")
    said = {}
    for line in block.text.splitlines():
        command = re.sub(r"\bJOB\b", "running", line.partition("  #")[0].removeprefix("finetune "))
        done = run(command)
        verb = command.split()[0]
        assert done.exit_code == (3 if verb == "reproduce" else 0), (
            line,
            done.output,
        )  # which waits for no end but its own job's
        said[verb] = done.stdout or done.output
    assert "is Training; wait for its end" in said["reproduce"]
    assert said["submit"].startswith("team/tuned: created\nteam/tuned: Succeeded\n")
    assert "Running" in said["list"]
    assert said["status"].startswith("team/running: Running, train\n")
    assert said["logs"] == "[rank 0] loss 1.25\\x1b[2J\n"
    assert "learningRate: '1e-5'" in said["fork"]
    assert {name: (tmp_path / "DIR" / name).read_bytes() for name in CONTENT} == CONTENT
    assert len(said) == len(block.text.splitlines()) > 6
