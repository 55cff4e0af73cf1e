"""Manifests for the tests of the command line, and what is found in one."""

from typing import Any

import yaml

from finetune_cli.checks.validate import validate
from finetune_cli.documents import Loader

ACCEPTED = """\
apiVersion: finetune.dev/v1alpha1
kind: FineTuneJob
metadata:
  name: tuned
spec:
  model:
    source: pvc://models/base
    dtype: bfloat16
  data:
    source: pvc://data/train.jsonl
  training:
    maxSteps: 10
  parallelism:
    processesPerNode: 2
  output:
    destination: pvc://out/tuned
  workspace:
    claimName: workspace
"""
REFUSED = ACCEPTED.replace("  parallelism:\n", '  parallelism:\n    fsdp: {version: 1, transformerLayerClsToWrap: [""]}\n')
WARNED = ACCEPTED.replace("  parallelism:\n", "  parallelism:\n    fsdp: {useOrigParams: true}\n")
PROFILE = """\
apiVersion: finetune.dev/v1alpha1
kind: FineTuneProfile
metadata:
  name: default
spec:
  trainerImage: registry.example/trainer@sha256:0000
"""
CLAIM = """\
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: workspace
spec: {}
"""


def edited_document(path: str, value: object) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(ACCEPTED)
    *parents, last = path.split(".")
    place = document
    for part in parents:
        place = place.setdefault(part, {})
    place[last] = value
    return document


def edited(path: str, value: object) -> str:
    return yaml.safe_dump(edited_document(path, value))


def findings(text: str, profile: str | None = None) -> dict[str, tuple[str, str, str]]:
    """field -> value, reason, fix"""
    return {
        finding.field: (finding.value, finding.message, finding.fix)
        for verdict in validate(text, profile).verdicts
        for finding in verdict.findings
    }


class Quoted(yaml.SafeDumper):
    """Writes what this product reads: 2e-4 is a number, so the text is put in quotes."""


Quoted.yaml_implicit_resolvers = Loader.yaml_implicit_resolvers
