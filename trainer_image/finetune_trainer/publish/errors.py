"""What ends a publication, in words that name the field to mend."""

from __future__ import annotations

from finetune_trainer.errors import DestinationRefusedError, DestinationUnavailableError

DESTINATION_FIELD = "spec.output.destination"
SECRET_FIELD = "spec.output.secretRef"  # noqa: S105 - the name of a field


def given_up(message: str) -> DestinationUnavailableError:
    """Requests fail again and again."""
    return DestinationUnavailableError(
        message,
        "what is there is not sent again; check the way out of the cluster and the endpoints of the profile's spec.publish",
    )


def denied(what: str, said: str, *, signed: bool, secret_holds: str) -> DestinationRefusedError:
    """401 or 403. `signed`: whether there were credentials. `secret_holds`: what belongs into the Secret or, locally, elsewhere."""
    if signed:
        hint = f"the credentials of {SECRET_FIELD} ({secret_holds}) may not write there: check their rights and their expiry"
    else:
        hint = f"name a Secret with {secret_holds} in {SECRET_FIELD}"
    return DestinationRefusedError(f"{what}: access is refused{said}", hint)


def not_found(what: str, said: str, thing: str) -> DestinationRefusedError:
    """404."""
    return DestinationRefusedError(f"{what}: there is no such {thing}{said}", f"make it, or correct {DESTINATION_FIELD}")


def full(what: str, said: str) -> DestinationRefusedError:
    """A quota or a limit of size."""
    return DestinationRefusedError(
        f"{what}: there is no room, or a file is larger than the destination takes{said}",
        "raise the quota or the limit there, or lower spec.merge.maxShardSize; what is there is not sent again",
    )
