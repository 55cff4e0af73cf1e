"""A release as an artifact of a registry: the media types of the specification, and equal bytes for equal releases."""

import json

import pytest

from finetune_trainer.publish.model_pack import build_artifact, media_type
from finetune_trainer.release.checksums import read_release
from tests.support.cases import table
from tests.support.finished_run import finished_run


@pytest.mark.parametrize(("name", "kind"), table(__file__, "test_layers_have_the_media_types_of_the_specification"))
def test_layers_have_the_media_types_of_the_specification(name, kind):
    assert media_type(name) == f"application/vnd.cncf.model.{kind}"


def test_equal_releases_are_equal_artifacts(tmp_path):
    def artifact(name, **changes):
        return build_artifact(read_release(finished_run(tmp_path / name, "oci://a.example/b:v1", **changes)))

    first = artifact("one")
    assert artifact("two") == first
    assert artifact("three", seed="other").digest != first.digest
    manifest, config = json.loads(first.manifest), json.loads(first.config)
    assert (manifest["schemaVersion"], manifest["mediaType"]) == (2, "application/vnd.oci.image.manifest.v1+json")
    assert manifest["artifactType"] == "application/vnd.cncf.model.manifest.v1+json"
    assert manifest["config"]["mediaType"] == "application/vnd.cncf.model.config.v1+json"
    assert [layer["digest"] for layer in manifest["layers"]] == config["modelfs"]["diffIds"]
    assert manifest["layers"][-1]["annotations"] == {
        "org.cncf.model.filepath": "SHA256SUMS",
        "org.opencontainers.image.title": "SHA256SUMS",
    }
    assert manifest["annotations"]["dev.finetune.job"] == "team/tuned"
