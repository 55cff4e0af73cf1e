"""Something that the pods need is missing or used up; it comes, and the job continues as if nothing had been."""

import shutil
from functools import partial
from typing import Any

from tests.e2e.failures.case import Case, Expected
from tests.e2e.failures.scene import Scene
from tools.stack import NAMESPACE
from tools.volumes import bound_claim, volume


def _image(scene: Scene) -> None:
    present = scene.stack.trainer_image
    missing = f"docker.io/library/finetune-trainer-absent:{scene.name}"
    for node in scene.stack.cluster.nodes:
        node.images.untag(missing)  # of a killed run: the first node keeps its images
    scene.start(profile={"trainerImage": missing, "imagePullPolicy": "IfNotPresent"})
    scene.wait_until_said("ImagePullFailed", missing)
    scene.start_clock()
    for node in scene.stack.cluster.nodes:
        node.images.tag(present, missing)
        scene.at_the_end(partial(node.images.untag, missing))
    scene.wait_for_next_step()


def _volume(scene: Scene) -> None:
    # The claim is bound, and what is behind it does not exist: the kubelet finds out.
    directory = scene.stack.claim(scene.name)
    scene.stack.apply(volume(NAMESPACE, scene.name, directory, storage_class=""), bound_claim(NAMESPACE, scene.name))
    data = scene.example()["data"] | {"source": f"pvc://{scene.name}/train.jsonl"}
    scene.start({"data": data})
    scene.wait_until_said("MountFailed", str(directory))
    scene.start_clock()
    shutil.copytree(scene.stack.claim("data"), directory)
    scene.wait_for_next_step()


def _secret(scene: Scene) -> None:
    scene.stack.s3.upload(scene.name, {"train.jsonl": (scene.stack.claim("data") / "train.jsonl").read_bytes()})
    data = scene.example()["data"] | {"source": f"s3://{scene.name}/train.jsonl"}
    scene.start({"data": data, "fetch": {"s3SecretRef": {"name": scene.name}}})
    scene.wait_until_said("MountFailed", scene.name)
    scene.start_clock()
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": scene.name, "namespace": NAMESPACE}}
    scene.stack.apply({**secret, "stringData": scene.stack.s3.environment()})
    scene.wait_for_next_step()


def _quota(scene: Scene, resource: str) -> None:
    quota: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": scene.name, "namespace": NAMESPACE},
        "spec": {"hard": {resource: "0"}},
    }
    scene.stack.apply(quota)
    scene.at_the_end(lambda: scene.kubectl("delete", "resourcequota", scene.name, "--ignore-not-found"))
    scene.start()
    scene.wait_until_said("CreateRefused", "exceeded quota")
    scene.start_clock()
    scene.kubectl("delete", "resourcequota", scene.name)
    scene.wait_for_next_step()


def _waits(reason: str) -> Expected:
    """Said at once, waited for, and no attempt failed."""
    return Expected("Succeeded", says=reason)


CASES = (
    Case("image-missing", "the profile's image cannot be pulled; it comes", _waits("ImagePullFailed"), _image, fixed=True),
    Case("volume-missing", "a volume's directory does not exist; it comes", _waits("MountFailed"), _volume, fixed=True),
    Case("secret-missing", "the fetch's Secret does not exist; it comes", _waits("MountFailed"), _secret, fixed=True),
    Case(
        "quota-pods",
        "a ResourceQuota that allows no pod; it is lifted",
        _waits("CreateRefused"),
        lambda scene: _quota(scene, "pods"),
        fixed=True,
    ),
    Case(
        "quota-jobs",
        "a ResourceQuota that allows no Job; it is lifted",
        _waits("CreateRefused"),
        lambda scene: _quota(scene, "count/jobs.batch"),
        fixed=True,
    ),
)
