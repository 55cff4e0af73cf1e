"""Credentials: which file or place a value comes from, how a registry's login is found, and where no value shows."""

import base64
import json
import traceback

import pytest

from finetune_trainer.credentials import Credentials, RegistryLogin, login_for
from finetune_trainer.errors import ConfigError, DestinationRefusedError
from tests.support.cases import table

CANARY = "canary-that-sings"


def keys(credentials: Credentials) -> tuple[str | None, ...]:
    session = credentials.s3_session()
    return tuple(session.get_credentials().get_frozen_credentials())[:3]


def encoded(text: str) -> str:
    return base64.b64encode(text.encode()).decode()


@pytest.mark.parametrize(("registry", "key"), table(__file__, "test_the_login_of_a_registry_is_found_as_docker_finds_it"))
def test_the_login_of_a_registry_is_found_as_docker_finds_it(registry, key):
    logins = {"auths": {"other.example": {"auth": encoded("x:y")}, key: {"auth": encoded(f"user:{CANARY}:with:colons")}}}
    assert login_for(registry, logins) == RegistryLogin("user", f"{CANARY}:with:colons")


def test_an_exact_key_wins_over_one_of_the_same_host():
    logins = {"auths": {"https://a.example/v2/": {"auth": encoded("x:old")}, "a.example": {"auth": encoded("x:new")}}}
    assert login_for("a.example", logins) == RegistryLogin("x", "new")


@pytest.mark.parametrize(
    "logins", [{}, {"auths": {}}, {"auths": {"a.example:5000": {"auth": encoded("x:y")}}}, {"auths": {"a.example": {}}}]
)
def test_a_missing_login_is_none(logins):
    assert login_for("a.example", logins) is None


def test_user_name_and_password_may_be_separate_and_tokens_are_recognized():
    assert login_for("a", {"auths": {"a": {"username": "u", "password": "p"}}}) == RegistryLogin("u", "p")
    assert login_for("a", {"auths": {"a": {"auth": encoded("u:p"), "identitytoken": "t"}}}) == RegistryLogin("u", "p", "t")
    assert login_for("a", {"auths": {"a": {"auth": encoded("<token>:t")}}}) == RegistryLogin("<token>", "t", "t")


def test_mounted_files_are_read_and_nothing_else(tmp_path, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "HF_TOKEN"):
        monkeypatch.setenv(name, "of-the-environment")
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker/config.json").write_text(json.dumps({"auths": {"a": {"username": "of", "password": "docker"}}}))
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    credentials = Credentials(mounted)
    assert (credentials.hub_token(), credentials.s3_session(), credentials.registry_login("a")) == (None, None, None)
    for name, value in {
        "hub/token": "hf\n",
        "s3/AWS_ACCESS_KEY_ID": "id\n",
        "s3/AWS_SECRET_ACCESS_KEY": "secret",
        "registry/config.json": json.dumps({"auths": {"a": {"username": "u", "password": "p"}}}),
    }.items():
        (mounted / name).parent.mkdir(exist_ok=True)
        (mounted / name).write_text(value)
    assert credentials.hub_token() == "hf"
    assert keys(credentials) == ("id", "secret", None)
    assert credentials.registry_login("a") == RegistryLogin("u", "p")
    (mounted / "s3/AWS_SESSION_TOKEN").write_text("session")
    assert keys(credentials) == ("id", "secret", "session")
    local = Credentials(tmp_path / "not-mounted")
    assert local.hub_token() == "of-the-environment"
    assert keys(local) == ("of-the-environment", "of-the-environment", None)
    assert local.registry_login("a") == RegistryLogin("of", "docker")


@pytest.mark.parametrize(
    "content", [f'{{"auths": {{"a": {{"auth": "{CANARY}"}}', f'["{CANARY}"]', f'{{"auths": {{"a": {{"auth": "{CANARY}!"}}}}}}']
)
def test_a_damaged_file_is_named_and_not_quoted(tmp_path, content):
    (tmp_path / "registry").mkdir()
    (tmp_path / "registry/config.json").write_text(content)
    with pytest.raises(DestinationRefusedError, match=r"config\.json") as caught:
        Credentials(tmp_path).registry_login("a")
    assert "spec.output.secretRef" in caught.value.hint
    assert CANARY not in "".join(traceback.format_exception(caught.value))


def test_no_value_shows_in_a_repr():
    shown = repr([RegistryLogin(CANARY, CANARY, CANARY)])
    assert CANARY not in shown


def test_on_a_users_machine_keys_of_a_profile_are_found(tmp_path, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    local = Credentials(tmp_path / "not-mounted")
    assert local.s3_session() is None
    (tmp_path / "credentials").write_text("[default]\naws_access_key_id = of\naws_secret_access_key = profile\n")
    assert keys(local) == ("of", "profile", None)
    monkeypatch.setenv("AWS_PROFILE", "missing")
    with pytest.raises(ConfigError, match="missing"):
        local.s3_session()
    # A pod has what its Secret holds: the role of its node is not the user's.
    (tmp_path / "mounted").mkdir()
    assert Credentials(tmp_path / "mounted").s3_session() is None


HELPER = """#!/bin/sh
read server
case "$server" in
  https://index.docker.io/v1/) echo '{"Username": "user", "Secret": "of-the-hub"}' ;;
  azure.example) echo '{"Username": "<token>", "Secret": "identity"}' ;;
  *) echo "credentials not found in native keychain"; exit 1 ;;
esac
"""


@pytest.mark.parametrize(
    ("registry", "login"),
    [
        ("docker.io", RegistryLogin("user", "of-the-hub")),
        ("azure.example", RegistryLogin("<token>", "identity", "identity")),
        ("plain.example", RegistryLogin("u", "p")),
        ("unknown.example", None),
    ],
)
@pytest.mark.parametrize("key", ["credsStore", "credHelpers"])
def test_on_a_users_machine_credential_helpers_are_asked_first(tmp_path, monkeypatch, registry, login, key):
    helper = tmp_path / "docker-credential-keychain"
    helper.write_text(HELPER)
    helper.chmod(0o755)
    helpers = {"credsStore": "keychain"} if key == "credsStore" else {"credHelpers": {registry: "keychain"}}
    logins = {"auths": {"plain.example": {"auth": encoded("u:p")}, "docker.io": {}}} | helpers
    (tmp_path / "config.json").write_text(json.dumps(logins))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert Credentials(tmp_path / "not-mounted").registry_login(registry) == login
    # The file of a pod comes from the user's Secret, and starts nothing.
    mounted = tmp_path / "mounted/registry"
    mounted.mkdir(parents=True)
    (mounted / "config.json").write_text(json.dumps(helpers))
    assert Credentials(mounted.parent).registry_login(registry) is None


def test_a_credential_helper_that_is_not_installed_is_reported(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({"credsStore": "missing"}))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    with pytest.raises(DestinationRefusedError, match="credential helper failed"):
        Credentials(tmp_path / "not-mounted").registry_login("a.example")


@pytest.mark.parametrize("answer", ["{}", '{"Username": "u"}', "[]", "no JSON", "[" * 100_000])
def test_an_answer_of_a_credential_helper_that_is_no_login_is_reported(tmp_path, monkeypatch, answer):
    helper = tmp_path / "docker-credential-keychain"
    (tmp_path / "answer").write_text(answer)
    helper.write_text(f"#!/bin/sh\ncat {tmp_path / 'answer'}\n")
    helper.chmod(0o755)
    (tmp_path / "config.json").write_text(json.dumps({"credsStore": "keychain"}))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(DestinationRefusedError, match="holds no logins"):
        Credentials(tmp_path / "not-mounted").registry_login("a.example")
