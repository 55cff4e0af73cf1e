"""Claims of a job as directories and links of this machine."""

from pathlib import Path

import pytest

from finetune_cli.exit_codes import LocalError
from finetune_cli.local.claims import claim_directories, claims_of, link_claims, parse_claims, with_places
from finetune_cli.local.look import look
from finetune_job.finding import Finding
from tests.unit.finetune_cli.local_jobs import PLAN


def test_claims_are_parsed():
    assert parse_claims(["models=/srv/a=b", "data=x"]) == {"models": Path("/srv/a=b"), "data": Path("x")}
    for wrong in ("models", "models=", "=x", "Models=/x"):
        with pytest.raises(LocalError, match="NAME=PATH"):
            parse_claims([wrong])
    with pytest.raises(LocalError, match="once"):
        parse_claims(["a=1", "a=2"])


def test_claims_become_links(tmp_path):
    models = tmp_path / "elsewhere"
    models.mkdir()
    (tmp_path / "claims" / "data").mkdir(parents=True)
    uses = claims_of(PLAN)
    assert [(use.name, use.is_input) for use in uses] == [("models", True), ("data", True), ("workspace", False), ("out", False)]
    places = claim_directories(uses, tmp_path / "claims", {"models": models})
    view = tmp_path / "view"
    for _ in range(2):
        link_claims(uses, places, view)
        assert (view / "models").resolve() == models.resolve()
        assert (view / "out").resolve() == (tmp_path / "claims" / "out").resolve()
        assert {path.name for path in view.iterdir()} == {"models", "data", "workspace", "out"}


def test_a_missing_input_claim_is_named(tmp_path):
    uses = claims_of(PLAN)
    with pytest.raises(LocalError, match=r"spec.model.source: claim models is .*does not exist.*--claim models=PATH"):
        link_claims(uses, claim_directories(uses, tmp_path, {}), tmp_path / "view")


def test_links_stay_as_they_were_if_a_claim_cannot_be_used(tmp_path: Path) -> None:
    """By them --fresh finds what the last run has left."""
    for claim in ("models", "data"):
        (tmp_path / claim).mkdir()
    uses, view = claims_of(PLAN), tmp_path / "view"
    link_claims(uses, claim_directories(uses, tmp_path, {}), view)
    before = {path.name: path.readlink() for path in view.iterdir()}
    (tmp_path / "file").touch()
    for claim, place, error in (("models", "nowhere", LocalError), ("workspace", "file", OSError)):
        with pytest.raises(error):
            link_claims(uses, claim_directories(uses, tmp_path, {claim: tmp_path / place}), view)
        assert {path.name: path.readlink() for path in view.iterdir()} == before
    # The last of the new links cannot be made, after the others were.
    (view / ".out").mkdir()
    (tmp_path / "moved").mkdir()
    with pytest.raises(OSError, match=r"\.out"):
        link_claims(uses, claim_directories(uses, tmp_path, {"models": tmp_path / "moved"}), view)
    (view / ".out").rmdir()
    assert {name: (view / name).readlink() for name in before} == before
    # What a command that was killed has left is replaced, and claims of another manifest are removed.
    for left in (".out", "other"):
        (view / left).symlink_to(tmp_path)
    link_claims(uses, claim_directories(uses, tmp_path, {}), view)
    assert {path.name: path.readlink() for path in view.iterdir()} == before


def test_findings_name_directories_and_no_links_that_are_removed(tmp_path: Path) -> None:
    directories = {"data": tmp_path / "mine", "data-2": Path("/srv/other")}
    message = "cannot write to /tmp/view/data (no right), nor to /tmp/view/data-2/train.jsonl"
    finding = Finding(rule="directory-not-writable", severity="error", message=message, fix="")
    found = with_places(finding, Path("/tmp/view"), directories)
    assert found.message == f"cannot write to {tmp_path}/mine (no right), nor to /srv/other/train.jsonl"
    assert found.model_copy(update={"message": message}) == finding


def test_a_look_at_the_places_of_a_job_names_its_directories(tmp_path: Path) -> None:
    """The output is a file on a claim that is a directory."""
    directories = claim_directories(claims_of(PLAN), tmp_path, {})
    for place in directories.values():
        place.mkdir()
    (tmp_path / "out" / "tuned").touch()
    found = [
        finding for finding in look(PLAN, directories, must_exist=False, checks_places=True).findings if "out" in finding.value
    ]
    assert [finding.rule for finding in found] == ["directory-not-writable"]
    assert f"cannot write to {tmp_path}/out" in found[0].message
