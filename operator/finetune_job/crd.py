"""The CustomResourceDefinitions, generated from the API models.

pydantic's JSON schema is rewritten into a structural schema. The rewrite raises an error for every unknown keyword, so no new
kind of constraint is lost silently. `python -m finetune_job.crd DIR` writes the files.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel

from finetune_job.api.documentation import field_docs
from finetune_job.api.job import FineTuneJobSpec
from finetune_job.api.profile import FineTuneProfileSpec
from finetune_job.api.status import FineTuneJobStatus, FineTuneProfileStatus
from finetune_job.finding import INVALID_FIELD
from finetune_job.names import GROUP, JOB_KIND, JOB_PLURAL, MAX_JOB_NAME, PROFILE_KIND, PROFILE_PLURAL, VERSION
from finetune_job.rules.book import rule_by_id
from finetune_job.rules.cel import CONDITIONS
from finetune_job.rules.cel.condition import CANCELLED, FROZEN

Schema = dict[str, Any]
_COPIED = {
    "type", "description", "enum", "pattern", "minLength", "maxLength", "minimum", "maximum", "minItems", "maxItems",
    "minProperties", "maxProperties", "default",
}  # fmt: skip
_DROPPED = {"title"}
"""Keywords that are allowed but carry no information, so they are dropped."""
MUTABLE_FIELD = "run"
"""The only part of the spec that may change after the start."""
FROZEN_FIELDS_OF_RUN = ("queueName", "priorityClassName")
"""Fields of `run` that, as an exception, cannot change after the start, because the frozen plan contains them."""


KEY_LENGTH = f"{INVALID_FIELD}: the length of keys is bounded"
HEADER = "# Generated from the API models by `make generate`; do not edit.\n"


class UnknownKeywordError(TypeError):
    """A JSON schema keyword that has no translation yet."""


def structural_schema(model: type[BaseModel]) -> Schema:
    """Return the structural schema of a model: it has no references, unions or nulls."""
    document = model.model_json_schema(by_alias=True, mode="validation")
    definitions: dict[str, Schema] = document.get("$defs", {})
    for each in _models_in(model, {}).values():
        node = document if each is model else definitions.get(each.__name__)
        if node is None:
            continue  # only used in a field that the schema leaves out
        for name, meaning in field_docs(each).items():
            if name in node["properties"]:
                node["properties"][name]["description"] = meaning
    return _rewrite(document, definitions, model.__name__)


def _models_in(model: type[BaseModel], found: dict[str, type[BaseModel]]) -> dict[str, type[BaseModel]]:
    """Collect the model and every model in its fields, by name."""
    if found.setdefault(model.__name__, model) is not model:
        raise UnknownKeywordError(f"two models have the name {model.__name__}")
    for info in model.model_fields.values():
        for inner in _types_in(info.annotation):
            if issubclass(inner, BaseModel) and inner.__name__ not in found:
                _models_in(inner, found)
    return found


def _types_in(annotation: Any) -> Iterator[type]:
    if get_args(annotation):
        for inner in get_args(annotation):
            yield from _types_in(inner)
    elif isinstance(annotation, type):
        yield annotation


def _rewrite(node: Schema, definitions: dict[str, Schema], path: str) -> Schema:
    node = dict(node)
    node.pop("$defs", None)
    if "$ref" in node:
        target = definitions[node.pop("$ref").rsplit("/", 1)[1]]
        return _rewrite({**target, **node}, definitions, path)
    if "anyOf" in node:
        options = [option for option in node.pop("anyOf") if option != {"type": "null"}]
        if len(options) != 1:
            raise UnknownKeywordError(f"{path}: a union of {len(options)} types cannot be written in a structural schema")
        if node.get("default", 0) is None:
            del node["default"]
        return _rewrite({**options[0], **node}, definitions, path)
    result: Schema = {}
    for key, value in sorted(node.items()):
        if key in _DROPPED:
            continue
        if key == "const":
            result["enum"] = [value]
        elif key == "properties":
            result["properties"] = {name: _rewrite(child, definitions, f"{path}.{name}") for name, child in value.items()}
        elif key == "items":
            result["items"] = _rewrite(value, definitions, f"{path}[]")
        elif key == "required":
            result["required"] = list(value)
        elif key == "additionalProperties":
            if isinstance(value, dict):
                result["additionalProperties"] = _rewrite(value, definitions, f"{path}{{}}")
            elif value is True and "maxProperties" in node:
                # Allowed only if the number of fields is bounded; the pydantic validators check the content.
                result["x-kubernetes-preserve-unknown-fields"] = True
            elif value is not False:
                raise UnknownKeywordError(f"{path}: free-form objects need a maximum number of fields")
        elif key == "propertyNames":
            result["x-kubernetes-validations"] = [_bounded_keys(value, path)]
        elif key in _COPIED:
            result[key] = value
        else:
            raise UnknownKeywordError(f"{path}: no translation for the JSON schema keyword {key!r}")
    if "properties" in result and isinstance(result.get("default"), dict):
        # Write every field of the default, even those equal to their own defaults: CEL conditions see exactly what is written.
        result["default"] = _without_nulls(result["default"])
    if isinstance(result.get("description"), str):
        result["description"] = " ".join(result["description"].split())
    return result


def _bounded_keys(names: Schema, path: str) -> Schema:
    """Return a CEL rule that limits the length of keys, because structural schemas do not support `propertyNames`."""
    if not {"maxLength"} <= set(names) <= {"minLength", "maxLength"}:
        raise UnknownKeywordError(f"{path}: keys of a map have a maximum length, perhaps a minimum length, and nothing else")
    least, most = names.get("minLength", 0), names["maxLength"]
    rule = f"self.all(key, key.size() <= {most}{f' && key.size() >= {least}' if least else ''})"
    return {"rule": rule, "message": f"{KEY_LENGTH}, here {least} to {most}", "reason": "FieldValueInvalid"}


def _without_nulls(value: Any) -> Any:
    """Return an object's default as it would appear in a manifest: without unset fields."""
    if not isinstance(value, dict):
        return value
    return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}


def _add_conditions(spec: Schema) -> None:
    for condition in CONDITIONS:
        rule = rule_by_id(condition.rule)
        if condition.rule != INVALID_FIELD and (rule is None or rule.severity != "error"):
            raise ValueError(f"the rule book has no error {condition.rule}, which a condition of the schema names")
        validation = {"rule": condition.holds, "message": condition.message, "reason": "FieldValueInvalid"}
        if condition.field:
            validation["fieldPath"] = f".{condition.field}"
        _node(spec, condition.at).setdefault("x-kubernetes-validations", []).append(validation)


def _node(schema: Schema, path: str) -> Schema:
    for part in path.split(".") if path else ():
        name = part.removesuffix("[]")
        schema = schema["properties"][name]
        if name != part:
            schema = schema["items"]
    return schema


def _freeze_rules(spec: Schema) -> list[dict[str, str]]:
    """Return CEL rules for the root, where both status and spec are visible. Optional chaining would exceed the cost limit."""
    started = "!has(oldSelf.status) || !has(oldSelf.status.startTime)"
    frozen = [name for name in spec["properties"] if name != MUTABLE_FIELD]
    frozen += [f"{MUTABLE_FIELD}.{name}" for name in FROZEN_FIELDS_OF_RUN]
    rules = [
        {
            "rule": f"{started} || (has(self.spec.{name}) == has(oldSelf.spec.{name}) "
            f"&& (!has(self.spec.{name}) || self.spec.{name} == oldSelf.spec.{name}))",
            "message": f"{FROZEN.rule}: spec.{name} cannot change after the job has started; "
            f"only spec.{MUTABLE_FIELD} can, without its {' and '.join(FROZEN_FIELDS_OF_RUN)}; {FROZEN.fix}",
            "fieldPath": f".spec.{name}",
            "reason": "FieldValueForbidden",
        }
        for name in frozen
    ]
    rules.append(
        {
            "rule": f"!has(oldSelf.spec.{MUTABLE_FIELD}) || !oldSelf.spec.{MUTABLE_FIELD}.cancel "
            f"|| (has(self.spec.{MUTABLE_FIELD}) && self.spec.{MUTABLE_FIELD}.cancel)",
            "message": f"{CANCELLED.rule}: a cancelled job cannot be revived; {CANCELLED.fix}",
            "fieldPath": f".spec.{MUTABLE_FIELD}.cancel",
            "reason": "FieldValueForbidden",
        }
    )
    return rules


def job_crd() -> Schema:
    """Build the CustomResourceDefinition of FineTuneJob."""
    spec = structural_schema(FineTuneJobSpec)
    _add_conditions(spec)
    status = _status_schema(FineTuneJobStatus)
    validations = [
        *_freeze_rules(spec),
        {
            "rule": f"self.metadata.name.size() <= {MAX_JOB_NAME}",
            "message": f"{INVALID_FIELD}: the name of a {JOB_KIND} may have at most {MAX_JOB_NAME} characters, "
            "because it is used in labels",
            "reason": "FieldValueInvalid",
        },
    ]
    columns: list[Schema] = [
        {"name": "Phase", "type": "string", "jsonPath": ".status.phase"},
        {"name": "Step", "type": "string", "jsonPath": ".status.progress.summary"},
        {"name": "Loss", "type": "string", "jsonPath": ".status.progress.loss"},
        {"name": "EvalLoss", "type": "string", "jsonPath": ".status.progress.evalLoss"},
        {"name": "Restarts", "type": "integer", "jsonPath": ".status.restarts.counted"},
        {"name": "Rehearsed", "type": "string", "jsonPath": '.status.conditions[?(@.type=="Rehearsed")].status', "priority": 1},
        {"name": "Reason", "type": "string", "jsonPath": '.status.conditions[?(@.type=="Succeeded")].reason', "priority": 1},
        {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
    ]
    return _definition(
        kind=JOB_KIND, plural=JOB_PLURAL, short=["ftj"], scope="Namespaced", columns=columns, validations=validations,
        properties={"spec": spec, "status": status},
        description="One fine-tuning run: from a base model and data to a merged, verified model.",
    )  # fmt: skip


def profile_crd() -> Schema:
    """Build the CustomResourceDefinition of FineTuneProfile."""
    columns: list[Schema] = [
        {"name": "Image", "type": "string", "jsonPath": ".spec.trainerImage"},
        {"name": "GPU", "type": "string", "jsonPath": ".spec.gpu.resourceName"},
        {"name": "Ready", "type": "string", "jsonPath": '.status.conditions[?(@.type=="Ready")].status'},
        {"name": "Reason", "type": "string", "jsonPath": '.status.conditions[?(@.type=="Ready")].reason', "priority": 1},
        {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
    ]
    return _definition(
        kind=PROFILE_KIND, plural=PROFILE_PLURAL, short=["ftp"], scope="Cluster", columns=columns, validations=[],
        properties={"spec": structural_schema(FineTuneProfileSpec), "status": _status_schema(FineTuneProfileStatus)},
        description="Images, resources and limits that the platform team sets for fine-tuning jobs.",
    )  # fmt: skip


def _status_schema(model: type[BaseModel]) -> Schema:
    status = structural_schema(model)
    _without_defaults(status)
    status["properties"]["conditions"] |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
    return status


def _without_defaults(node: Schema) -> None:
    """Remove all defaults from the status: the API server would fill them in on every read, but only the operator writes it."""
    node.pop("default", None)
    for child in node.get("properties", {}).values():
        _without_defaults(child)
    for key in ("items", "additionalProperties"):
        if key in node:
            _without_defaults(node[key])


def _definition(
    *, kind: str, plural: str, short: list[str], scope: str, columns: list[Schema], validations: list[dict[str, str]],
    properties: dict[str, Schema], description: str,
) -> Schema:  # fmt: skip
    schema: Schema = {
        "type": "object",
        "description": description,
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            **properties,
        },
    }
    if validations:
        schema["x-kubernetes-validations"] = validations
    version: Schema = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "additionalPrinterColumns": columns,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {"status": {}},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{GROUP}", "annotations": {"helm.sh/resource-policy": "keep"}},
        "spec": {
            "group": GROUP,
            "scope": scope,
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": plural,
                "singular": kind.lower(),
                "shortNames": short,
                "categories": ["ml"],
            },
            "versions": [version],
        },
    }


class _PlainDumper(yaml.SafeDumper):
    """A YAML dumper that repeats values instead of writing anchors, which are hard to read for people and diff tools."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002 - the base class names it
        return True


def files() -> dict[str, str]:
    """Return the content of every CRD by its file name."""
    return {
        f"{GROUP}_{plural}.yaml": HEADER + yaml.dump(crd, Dumper=_PlainDumper, sort_keys=False, width=140)
        for plural, crd in ((JOB_PLURAL, job_crd()), (PROFILE_PLURAL, profile_crd()))
    }


def main(directories: list[str]) -> None:
    """Write the files into each directory."""
    for directory in map(Path, directories):
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in files().items():
            (directory / name).write_text(content)


if __name__ == "__main__":
    main(sys.argv[1:])
