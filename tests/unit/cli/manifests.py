"""Manifests for the tests of the command line."""

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
