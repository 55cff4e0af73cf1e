"""Where results lie at each kind of destination, and the list of checksums that proves them."""

import hashlib
import shutil
import subprocess
from pathlib import Path

import pytest

from finetune_trainer.errors import CheckpointError
from finetune_trainer.release.checksums import checksum_lines, parse_checksums, read_release
from finetune_trainer.release.files import release_layout
from finetune_trainer.release.write import is_complete, write_release_files
from tests.unit.finetune_trainer.release.example import example, write_weights

BUCKET, HUB, REGISTRY = "s3://results/run", "hf://team/tuned", "oci://registry.example/team/tuned:v1"
REPORTS = {"README.md", "report.html", "report.json", "provenance.json", "verification.json", "verification.md", "SHA256SUMS"}
ADAPTER = {"adapter_model.safetensors", "adapter_config.json", "manifest.json"}
MERGED = {"model-00001.safetensors", "model-00002.safetensors", "config.json", "manifest.json"}
FULL = {"method.type": "Full"}


def below(directory: str, names: set[str]) -> set[str]:
    return {f"{directory}/{name}" for name in names}


def published(tmp_path: Path, destination: str, **changes: object) -> tuple[Path, set[str]]:
    """A directory as a reader sees it after publishing, and its names."""
    made = example(tmp_path / "claims", {"output.destination": destination, **changes})
    write_release_files(made.context.output, made.results())
    release = read_release(made.context)
    seen = tmp_path / "seen"
    for file in (*release.files, release.manifest):
        (seen / file.name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file.local, seen / file.name)
        assert (file.size, file.sha256) == (file.local.stat().st_size, hashlib.sha256(file.local.read_bytes()).hexdigest())
    return seen, {file.name for file in (*release.files, release.manifest)}


@pytest.mark.parametrize(
    ("destination", "changes", "expected"),
    [
        (BUCKET, {}, REPORTS | below("adapter", ADAPTER | {"README.md"}) | below("merged", MERGED)),
        (HUB, {}, REPORTS | below("adapter", ADAPTER | {"README.md"}) | MERGED),
        (REGISTRY, {"output.adapter": False}, REPORTS | MERGED),
        (HUB, {"merge.enabled": False}, REPORTS - {"verification.json", "verification.md"} | ADAPTER),
        (
            BUCKET,
            {"merge.enabled": False},
            REPORTS - {"verification.json", "verification.md"} | below("adapter", ADAPTER | {"README.md"}),
        ),
        (HUB, FULL, REPORTS - {"verification.json", "verification.md"} | MERGED),
        (BUCKET, FULL, REPORTS - {"verification.json", "verification.md"} | below("merged", MERGED)),
        ("pvc://out/result", {}, REPORTS | below("adapter", ADAPTER | {"README.md"}) | below("merged", MERGED)),
    ],
)
def test_results_have_their_places_and_sha256sum_agrees(tmp_path, destination, changes, expected):
    seen, names = published(tmp_path, destination, **changes)
    assert names == expected
    checked = subprocess.run(
        ["sha256sum", "--check", "--strict", "SHA256SUMS"], cwd=seen, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
    assert len(checked.stdout.splitlines()) == len(names) - 1


def test_weights_come_first_the_card_last_and_the_manifest_after_it(tmp_path):
    made = example(tmp_path, {"output.destination": HUB})
    write_release_files(made.context.output, made.results())
    release = read_release(made.context)
    names = [file.name for file in release.files]
    weights = [name for name in names if name.endswith(".safetensors")]
    assert names[: len(weights)] == weights
    assert names[-1] == "README.md"
    assert release.manifest.name == "SHA256SUMS"
    assert release.facts["base_model"] == "pvc://models/base"
    assert release.facts["plan_sha256"] == made.context.plan_sha256


def test_two_results_of_one_name_are_refused(tmp_path):
    made = example(tmp_path, {"output.destination": HUB})
    facts = made.results()
    (made.context.output.merged / "README.md").write_text("somebody else's card")
    with pytest.raises(CheckpointError, match=r"README\.md"):
        write_release_files(made.context.output, facts)
    assert not made.context.output.checksums.exists()


def test_digests_of_weights_are_those_of_the_manifest(tmp_path):
    """So nothing reads 140 GB again; and a file that changed since then does not get a new digest."""
    made = example(tmp_path)
    facts = made.results()
    path = made.context.output.merged / "model-00001.safetensors"
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    write_release_files(made.context.output, facts)
    assert f"{before}  merged/model-00001.safetensors\n" in made.context.output.checksums.read_text()


@pytest.mark.parametrize("damage", ["missing", "cut", "unlisted"])
def test_an_incomplete_release_is_not_read(tmp_path, damage):
    made = example(tmp_path)
    output = made.context.output
    write_release_files(output, made.results())
    if damage == "missing":
        output.checksums.unlink()
    elif damage == "cut":
        output.checksums.write_text(output.checksums.read_text()[:-1])
    else:
        (output.merged / "config.json").unlink()
    with pytest.raises(CheckpointError):
        read_release(made.context)


def test_writing_again_changes_nothing_and_a_change_breaks_the_seal_first(tmp_path, monkeypatch):
    made = example(tmp_path)
    output = made.context.output
    facts = made.results()
    digests = write_release_files(output, facts)
    stamps = {path: path.stat().st_mtime_ns for path in output.root.rglob("*") if path.is_file()}
    assert write_release_files(output, facts) == digests
    assert {path: path.stat().st_mtime_ns for path in output.root.rglob("*") if path.is_file()} == stamps
    write_weights(output.merged, "another seed")
    sealed = []
    from finetune_trainer.release import write

    original = write.write_durably
    monkeypatch.setattr(
        write, "write_durably", lambda path, content: (sealed.append(output.checksums.exists()), original(path, content))
    )
    assert write_release_files(output, facts) != digests
    assert sealed == [False]


def test_results_are_complete_for_their_own_plan_and_files_alone(tmp_path):
    made = example(tmp_path)
    output, places, plan = made.context.output, release_layout(made.context.plan), made.context.plan_sha256
    facts = made.results()
    digest = hashlib.sha256((output.merged / "manifest.json").read_bytes()).hexdigest()
    assert not is_complete(output, places, plan, {"merged/manifest.json": digest})
    write_release_files(output, facts)
    assert is_complete(output, places, plan, {"merged/manifest.json": digest})
    assert not is_complete(output, places, "0" * 64, {"merged/manifest.json": digest})
    assert not is_complete(output, places, plan, {"merged/manifest.json": "0" * 64})
    output.provenance.write_text("[]")
    assert not is_complete(output, places, plan, {"merged/manifest.json": digest})


def test_checksums_are_read_as_they_were_written():
    digests = {"b/c d.json": "0" * 64, "a": "f" * 64}
    assert parse_checksums(checksum_lines(digests)) == digests
    for text in ("", "x", checksum_lines(digests) + "junk", f"{'0' * 63}  a\n"):
        assert parse_checksums(text) is None


def test_the_adapter_alone_is_published_even_where_it_was_not_asked_for(tmp_path):
    assert release_layout(example(tmp_path, {"merge.enabled": False, "output.adapter": False}).context.plan).has_adapter
