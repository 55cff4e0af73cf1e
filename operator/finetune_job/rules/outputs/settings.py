"""Rules on which parts of a result are written, and on the credentials for writing them."""

from __future__ import annotations

from finetune_job.api.base import ClaimPath, HubPath, RegistryPath, parse_source
from finetune_job.api.method import MethodType
from finetune_job.plan.inputs import named_sources
from finetune_job.rules.outputs.destinations import destination_of, free_directory
from finetune_job.rules.rule import Problem, RuleContext, rule

_DESTINATION = "output.destination"
_SECRET = "output.secretRef"  # noqa: S105 - a field that names a Secret
WRITE_TOKEN_SECRET = "hub-write-token"  # noqa: S105 - the name of a Secret in a fix
_TOKEN = "fetch.hubTokenSecretRef"  # noqa: S105 - a field that names a Secret


@rule("hub-destination-without-token")
def hub_destination_without_token(context: RuleContext) -> Problem | None:
    """Refuse a Hub destination without a token on a cluster; on a laptop, the library uses the token from the user's login."""
    output, profile = context.spec.output, context.profile
    if profile is None or profile.publish.hub_endpoint is not None:
        return None
    if not isinstance(destination_of(context), HubPath) or output.secret_ref is not None:
        return None
    return Problem(
        value=None,
        message=f"{output.destination} accepts nothing without a token, and this would only be noticed after the training",
        fix=f'make a Secret with a write token under "token" and name it in {_SECRET}.name',
        field=_SECRET,
        changes={_SECRET: {"name": WRITE_TOKEN_SECRET}},
    )


@rule("output-adapter-is-the-result")
def output_adapter_is_the_result(context: RuleContext) -> Problem | None:
    spec = context.spec
    if spec.output.adapter or spec.merge.enabled or spec.method.type is MethodType.FULL:
        return None
    return Problem(value=spec.output.adapter)


@rule("credentials-without-tls")
def credentials_without_tls(context: RuleContext) -> Problem | None:
    """Refuse plain HTTP to the Hub and registries. Buckets may use it: their requests are signed, without the secret key."""
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
        value=name,
        field=field,
        changes=dict.fromkeys(in_clear) | ({_DESTINATION: free_directory(context)} if _SECRET in in_clear else {}),
    )


def _is_in_clear(endpoint: str | None) -> bool:
    return (endpoint or "").startswith("http://")


rule("no-effect-output-adapter")(lambda context: context.spec.method.type is MethodType.FULL)
rule("no-effect-output-secret")(lambda context: isinstance(destination_of(context), ClaimPath))
rule("no-effect-output-private")(lambda context: not isinstance(destination_of(context), HubPath))
