"""A case: the values of the dimensions that apply to it, and the manifest that a user would write for them."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from finetune_job.api.method import MethodType
from finetune_job.methods import METHODS, Family
from tests.support.cases import table
from tests.support.method_settings import SETTINGS
from tests.sweep import added
from tests.sweep.architectures import ARCHITECTURES

UNSET = "unset"
"""The manifest does not have the field."""
STEPS, SAVED_AT, GLOBAL_BATCH = 3, 2, 4
MODEL_CLAIM, WORKSPACE_CLAIM, RESULTS_CLAIM = "models", "workspace", "results"

FOLLOWED = {MethodType.IA3: "1"}
"""Learning rates of methods that multiply weights, where steps are as large as the gradients."""


@dataclass(frozen=True)
class Case:
    """One combination."""

    values: Mapping[str, str]
    """Value of each dimension that applies."""

    @property
    def id(self) -> str:
        """The same for the same manifest and model, whatever drew it."""
        content = json.dumps([self.values["architecture"], self.values["stored"], self.spec()], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:12]

    @property
    def base(self) -> str:
        """Name of the base model's directory."""
        return f"{self.values['architecture']}-{self.values['stored']}"

    @property
    def packs(self) -> bool:
        return self.values.get("packing") != "false"

    @property
    def added(self) -> list[added.Token]:
        """Tokens that it adds to its base."""
        return added.TOKENS.get(self.of("added"), [])

    def of(self, name: str) -> str:
        """Value of a dimension; UNSET where it does not apply."""
        return self.values.get(name, UNSET)

    def spec(self) -> dict[str, Any]:
        """What a user would write, as the manifest's `spec`."""
        spec: dict[str, Any] = {
            "model": {"source": f"pvc://{MODEL_CLAIM}/{self.base}"},
            "data": {"source": "pvc://data/train.jsonl", "format": "PromptCompletion", "maxSequenceLength": 64},
            "method": {"type": self.values["method"]},
            "training": {"maxSteps": STEPS, "globalBatchSize": GLOBAL_BATCH, "learningRate": "1e-2", "seed": 3},
            "parallelism": {"processesPerNode": int(self.values["ranks"])},
            "checkpoint": {"everySteps": SAVED_AT},
            "merge": {},
            "output": {"destination": f"pvc://{RESULTS_CLAIM}/out"},
            "workspace": {"claimName": WORKSPACE_CLAIM},
        }
        kind = MethodType(self.values["method"])
        if METHODS[kind].family is Family.OTHER and (settings := SETTINGS.get(kind.value)):
            spec["method"]["settings"] = copy.deepcopy(settings)
        for name, value in self.values.items():
            if value != UNSET and name in FIELDS:
                _put(spec, FIELDS[name], _meaning(self, name, value))
        if kind in FOLLOWED and self.of("optimizer") in ("RAdam", "SGD"):
            # Their first steps follow the gradient, and a share of each weight would be less than 16 bits tell apart.
            _put(spec, "training.learningRate", FOLLOWED[kind])
        if self.of("init") == "Random":
            # PEFT's random A and B are so large that the model would say nothing but the adapter.
            _put(spec, "method.lora.loraAlpha", 1)
        if self.of("wrap") == "SIZE_BASED_WRAP":
            _put(spec, "parallelism.fsdp.minNumParams", 5000)
        return spec

    @staticmethod
    def parse(text: str) -> Case:
        """The inverse of `json.dumps(dict(case.values))`."""
        return Case(json.loads(text))


FIELDS = table(__file__, "FIELDS")
"""Where the manifest has each dimension that is a field."""


def _put(spec: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for name in parents:
        spec = spec.setdefault(name, {})
    spec[last] = value


def _meaning(case: Case, name: str, value: str) -> Any:
    """A word of the dimension -> the value in the manifest, in the architecture's own names."""
    architecture = ARCHITECTURES[case.values["architecture"]]
    first = architecture.attention[0]
    named: dict[tuple[str, str], Any] = {
        **{("added", value): tokens for value, tokens in added.TOKENS.items()},
        ("targets", "attention"): list(architecture.attention),
        ("targets", "all-linear"): ["all-linear"],
        ("targets", "embedding"): [*architecture.attention, architecture.embedding],
        ("targets", "head"): [*architecture.attention, architecture.head],
        ("targets", "embedding and head"): [architecture.embedding, architecture.head],
        ("targets", "all-linear and a name"): ["all-linear", architecture.embedding],
        ("targets", "unknown"): [*architecture.attention, "no_such_module"],
        ("other_targets", "attention"): list(architecture.attention),
        ("exclude", "one"): [first],
        ("layers", "one"): [1],
        ("saved", "head"): [architecture.head],
        ("saved", "embedding"): [architecture.embedding],
        ("saved", "norm"): [architecture.norm],
        ("saved", "head and embedding"): [architecture.head, architecture.embedding],
        ("saved", "adapted"): [first],
        ("saved", "unknown"): ["no_such_module"],
        ("other_saved", "norm"): [architecture.norm],
        ("other_saved", "head"): [architecture.head],
        ("other_saved", "head and embedding"): [architecture.head, architecture.embedding],
        ("rank_pattern", "one"): {first: 3},
        ("rank_pattern", "unknown"): {"no_such_module": 3},
        ("alpha_pattern", "one"): {first: 5},
        ("tokens", "some"): [1, 5, 97],
        ("tokens", "one twice"): [1, 5, 5],
        ("tokens", "beyond"): [1, 100_000],
        ("parameters", "experts"): list(architecture.experts),
        ("parameters", "unknown"): ["mlp.no_such_parameter"],
        ("classes", "right"): [architecture.layer_class],
        ("classes", "right and unknown"): [architecture.layer_class, "NoSuchLayer"],
        ("classes", "empty"): [],
        ("classes", "blank"): [""],
        ("classes", "wrong"): ["NoSuchLayer"],
        ("classes", "head"): ["Linear"],
        ("validation", "some"): {"source": "pvc://data/validation.jsonl"},
    }
    if (name, value) in named:
        return named[name, value]
    if value in ("true", "false"):
        return value == "true"
    return int(value) if name in WHOLE_NUMBERS else value


WHOLE_NUMBERS = frozenset({"r", "alpha", "bits", "micro", "version", "evaluate"})
