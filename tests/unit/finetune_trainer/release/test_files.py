"""Each file has one name in the results and one at its destination."""

from __future__ import annotations

import pytest

from finetune_trainer.release.files import ReleaseLayout


@pytest.mark.parametrize("has_adapter", [True, False])
@pytest.mark.parametrize("has_merged", [True, False])
@pytest.mark.parametrize("is_repository", [True, False])
def test_names_lead_back_to_the_results(has_adapter, has_merged, is_repository):
    places = ReleaseLayout(has_adapter, has_merged, is_repository)
    local = [f"{directory}/{name}" for directory in places.directories for name in ("config.json", "deep/down.jinja")]
    local += ["README.md", "report.html", "report.json", "provenance.json", "verification.json", "verification.md"]
    assert [places.in_results(places.at_destination(name)) for name in local] == local
    assert len({places.at_destination(name) for name in local}) == len(local)
