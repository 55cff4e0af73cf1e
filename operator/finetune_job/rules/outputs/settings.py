"""What of a result is written, and with whose credentials."""

from __future__ import annotations

from finetune_job.api.base import ClaimPath, HubPath, RegistryPath, parse_source
from finetune_job.api.method import MethodType
from finetune_job.plan.inputs import named_sources
from finetune_job.rules.outputs.destinations import destination_of, free_directory
from finetune_job.rules.rule import OURS, Problem, Reproduction, RuleContext, rule
from finetune_job.rules.rule_tables import SAME_PLAN, NoEffect, no_effect_rules
from finetune_job.rules.sources import SOURCES

_DESTINATION = "output.destination"
_ADAPTER = "output.adapter"
_SECRET = "output.secretRef"  # noqa: S105 - a field that names a Secret
WRITE_TOKEN_SECRET = "hub-write-token"  # noqa: S105 - the name of a Secret in a fix
_TOKEN = "fetch.hubTokenSecretRef"  # noqa: S105 - a field that names a Secret


@rule(
    "hub-destination-without-token",
    "Nobody writes to the Hub without a token",
    reads=(_DESTINATION, _SECRET),
    sources=("Hugging Face Hub: commits need a token with the right to write",),
    reproduction=Reproduction(
        "tests/pitfalls/test_destinations.py::test_the_hub_takes_nothing_without_a_token",
        "DestinationRefusedError after the training (HTTP status 401)",
    ),
    holds_for=OURS,
)
def hub_destination_without_token(context: RuleContext) -> Problem | None:
    """On a cluster only: on a person's machine the library finds the token that its own login has left."""
    output, profile = context.spec.output, context.profile
    if profile is None or profile.publish.hub_endpoint is not None:
        return None
    if not isinstance(destination_of(context), HubPath) or output.secret_ref is not None:
        return None
    return Problem(
        field=_SECRET,
        value=None,
        message=f"{output.destination} takes nothing without a token, and this would show only after the training",
        fix=f'make a Secret with a write token under "token" and name it in {_SECRET}.name',
        changes={_SECRET: {"name": WRITE_TOKEN_SECRET}},
    )


@rule(
    "output-adapter-is-the-result",
    "Without a merged model the adapter is the result",
    reads=(_ADAPTER, "merge.enabled"),
    sources=("this product's API",),
    reproduction=Reproduction(
        "tests/pitfalls/test_evaluation.py::test_an_adapter_that_is_the_result_is_kept_whatever_is_written",
        "no error: the adapter is kept all the same",
    ),
    holds_for=OURS,
)
def output_adapter_is_the_result(context: RuleContext) -> Problem | None:
    spec = context.spec
    if spec.output.adapter or spec.merge.enabled or spec.method.type is MethodType.FULL:
        return None
    return Problem(
        field=_ADAPTER,
        value=spec.output.adapter,
        message="nothing is merged, so the adapter is the only result, and would be published all the same",
        fix=f"remove {_ADAPTER}, or set merge.enabled to true",
        changes={_ADAPTER: None},
    )


@rule(
    "credentials-without-tls",
    "Credentials travel in clear without TLS",
    severity="warning",
    reads=(_SECRET, _DESTINATION, _TOKEN, *SOURCES),
    sources=("RFC 7617: basic authentication is as secret as the connection it is sent over",),
    reproduction=Reproduction(
        "tests/pitfalls/test_destinations.py::test_a_hubs_token_can_be_read_on_the_way "
        "tests/pitfalls/test_destinations.py::test_the_token_that_reads_can_be_read_on_the_way "
        "tests/pitfalls/test_destinations.py::test_a_registrys_password_can_be_read_on_the_way",
        "no error: the token, or user name and password, are in the request as it was sent",
    ),
    needs_human=True,
    holds_for=OURS,
)
def credentials_without_tls(context: RuleContext) -> Problem | None:
    """Of the Hub and of registries: a request to a bucket is signed, and its secret key stays here."""
    spec, profile = context.spec, context.profile
    if profile is None:
        return None
    place, secret, token = destination_of(context), spec.output.secret_ref, spec.fetch.hub_token_secret_ref
    writes_in_clear = (isinstance(place, HubPath) and _is_in_clear(profile.publish.hub_endpoint)) or (
        isinstance(place, RegistryPath) and place.registry in profile.publish.plain_http_registries
    )
    reads_in_clear = _is_in_clear(profile.fetch.hub_endpoint) and any(
        isinstance(parse_source(named.source), HubPath) for named in named_sources(spec)
    )
    in_clear: dict[str, str] = {}
    if writes_in_clear and secret is not None:
        in_clear[_SECRET] = secret.name
    if reads_in_clear and token is not None:
        in_clear[_TOKEN] = token.name
    if not in_clear:
        return None
    field, name = next(iter(in_clear.items()))
    return Problem(
        field=field,
        value=name,
        message="the profile has this service spoken to over plain HTTP, where everybody on the way can read the credentials",
        fix="ask for a profile with an address that speaks TLS, or read from and write to claims",
        changes=dict.fromkeys(in_clear) | ({_DESTINATION: free_directory(context)} if _SECRET in in_clear else {}),
    )


def _is_in_clear(endpoint: str | None) -> bool:
    return (endpoint or "").startswith("http://")


NO_EFFECT = (
    NoEffect(
        "no-effect-output-adapter",
        "Full fine-tuning has no adapter",
        (_ADAPTER,),
        ("method.type",),
        lambda context: context.spec.method.type is MethodType.FULL,
        "full fine-tuning changes the weights themselves and makes no adapter",
        Reproduction(
            "tests/pitfalls/test_evaluation.py::test_full_fine_tuning_has_no_adapter_to_leave_out",
            "no error: no adapter is published with it or without it",
        ),
    ),
    NoEffect(
        "no-effect-output-secret",
        "A claim needs no Secret",
        (_SECRET,),
        (_DESTINATION,),
        lambda context: isinstance(destination_of(context), ClaimPath),
        "results on a claim are written by a pod that mounts it, and no credentials are asked for",
        SAME_PLAN,
    ),
    NoEffect(
        "no-effect-output-private",
        "Only a repository on the Hub is private or public",
        ("output.private",),
        (_DESTINATION,),
        lambda context: not isinstance(destination_of(context), HubPath),
        "who may read a claim, a bucket or a registry is decided there",
        SAME_PLAN,
    ),
)
RULES = (
    hub_destination_without_token,
    output_adapter_is_the_result,
    *no_effect_rules(__name__, NO_EFFECT),
    credentials_without_tls,
)
