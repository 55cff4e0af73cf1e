"""Publishing to the Hub with the real client: what readers see, what is sent, what is refused, and what failures do."""

import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub.utils import _http as library_http

from finetune_job.api.base import HubPath
from finetune_job.failures import FailureClass
from finetune_trainer.errors import CheckpointError, DestinationRefusedError, DestinationUnavailableError, TrainerError
from finetune_trainer.network.environment import go_online
from finetune_trainer.network.hub_answers import redacted_message
from finetune_trainer.network.retry import RetryPolicy, StoppedError
from finetune_trainer.publish.destination import Publication
from finetune_trainer.publish.hub import HubDestination
from finetune_trainer.release.checksums import read_release
from finetune_trainer.release.files import Release
from finetune_trainer.release.sign import signed
from finetune_trainer.release.write import write_release_files
from tests.support.hub import SIGNATURE, Fault, Hub, running_hub
from tests.support.hub_writes import FIRST_FILES, LARGE_BYTES
from tests.unit.finetune_trainer.release.example import Example, example, write_weights
from tests.unit.finetune_trainer.release.test_sign import P256, make_key

NAME = "team/tuned"
TOKEN = "hf_secret_of_the_test"
QUICK = RetryPolicy(attempts=3, first_seconds=0.01, longest_seconds=0.02)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    # The library's own retries begin with a pause of a second; they are to happen, not to last.
    monkeypatch.setattr(library_http.time, "sleep", lambda seconds: None)
    with running_hub() as running:
        running.writes.tokens = {TOKEN}
        yield running


@pytest.fixture
def made(tmp_path: Path) -> Example:
    return finished(tmp_path / "claims")


def finished(claims: Path, **changes: object) -> Example:
    """A complete release."""
    one = example(claims, {"output.destination": f"hf://{NAME}", **changes})
    write_release_files(one.context.output, one.results())
    return one


def contents(release: Release) -> dict[str, bytes]:
    return {file.name: file.local.read_bytes() for file in (*release.files, release.manifest)}


def destination(hub: Hub, token: str | None = TOKEN, *, private: bool = True) -> HubDestination:
    place = HubPath(repository=NAME, path="", is_dataset=False)
    return HubDestination(place, token=token, endpoint=hub.address, private=private, patience=QUICK)


def publish(hub: Hub, release: Release, **settings: object) -> Publication:
    return destination(hub, **settings).publish(release)


def failure(hub: Hub, release: Release, **settings: object) -> TrainerError:
    with pytest.raises(TrainerError) as caught:
        publish(hub, release, **settings)
    assert TOKEN not in f"{caught.value}{caught.value.hint}"
    assert SIGNATURE not in f"{caught.value}{caught.value.hint}"
    return caught.value


def seen(hub: Hub) -> dict[str, bytes]:
    return hub.repositories["models", NAME].files


def large(release: Release) -> int:
    return sum(file.size for file in (*release.files, release.manifest) if file.size >= LARGE_BYTES)


def test_readers_see_everything_at_once_and_a_second_time_nothing_is_sent(hub, made):
    release = read_release(made.context)
    first = publish(hub, release)
    repository = hub.repositories["models", NAME]
    assert repository.files == contents(release) | FIRST_FILES
    assert repository.is_private
    # What a new repository holds, and then all of it: there was no commit in between.
    assert list(repository.older.values()) == [FIRST_FILES]
    assert first.address == f"hf://{NAME}@{repository.commit}"
    assert first.digest == repository.commit
    assert first.bytes_sent == sum(map(len, contents(release).values()))
    before = len(hub.writes.received)
    again = publish(hub, release)
    assert (again.address, again.bytes_sent) == (first.address, 0)
    assert len(hub.writes.received) == before


def test_a_public_repository_is_made_where_it_is_asked_for(hub, made):
    publish(hub, read_release(made.context), private=False)
    assert not hub.repositories["models", NAME].is_private


def test_large_files_go_in_parts_and_nothing_goes_by_xet(hub, made):
    hub.writes.part_bytes = 1000
    release = read_release(made.context)
    assert publish(hub, release).bytes_sent == sum(map(len, contents(release).values()))
    assert seen(hub) == contents(release) | FIRST_FILES
    assert max(hub.writes.received) == 1000
    assert not any("xet" in request.path for request in hub.requests)


def test_the_token_goes_to_the_hub_alone(hub, made):
    publish(hub, read_release(made.context))
    assert all(f"Bearer {TOKEN}" == request.headers["Authorization"] for request in hub.requests if not request.store)
    assert all("Authorization" not in request.headers for request in hub.requests if request.store)
    assert any(request.store for request in hub.requests)


@pytest.mark.parametrize(
    ("part", "fault"),
    [
        ("/api/repos/create", Fault(1, status=503)),
        ("/api/models/", Fault(1, status=429, headers={"Retry-After": "0"})),
        ("/tree/", Fault(2, status=502)),
        ("/preupload/", Fault(1, status=500)),
        ("/objects/batch", Fault(1, status=504)),
        ("/upload/", Fault(1, status=503)),
        ("/upload/", Fault(1, take=700)),
        ("/upload/", Fault(1, status=403)),
        ("/lfs/verify", Fault(1, status=503)),
        ("/commit/main", Fault(1, status=503)),
        ("/commit/main", Fault(1, take=10)),
        ("/commit/main", Fault(1, drop_answer=True)),
        ("/upload/", Fault(1, drop_answer=True)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_passes_is_survived(hub, made, part, fault):
    release = read_release(made.context)
    hub.fail(part, fault)
    publication = publish(hub, release)
    assert fault.times == 0
    assert seen(hub) == contents(release) | FIRST_FILES
    assert publication.digest == hub.repositories["models", NAME].commit
    assert len(hub.repositories["models", NAME].older) == 1


def test_what_was_sent_before_it_broke_off_is_not_sent_again(hub, made):
    release = read_release(made.context)
    hub.fail("/commit/main", Fault(100, status=503))
    assert failure(hub, release).failure is FailureClass.DESTINATION_UNAVAILABLE
    assert seen(hub) == FIRST_FILES
    sent = list(hub.writes.received)
    assert sum(sent) == large(release)
    hub.fail("/commit/main", Fault(0))
    hub._faults.clear()
    assert publish(hub, release).bytes_sent == sum(map(len, contents(release).values())) - large(release)
    assert hub.writes.received == sent
    assert seen(hub) == contents(release) | FIRST_FILES


def test_a_new_release_leaves_no_shard_of_the_older_one(hub, tmp_path):
    older = finished(tmp_path / "older")
    write_weights(older.context.output.merged, "more shards", shards=4)
    write_release_files(older.context.output, older.facts())
    publish(hub, read_release(older.context))
    repository = hub.repositories["models", NAME]
    assert "model-00004.safetensors" in repository.files
    hub.writes.commit(repository, repository.files | {"notes.md": b"mine", "images/plot.png": b"png"})
    newer = read_release(finished(tmp_path / "newer").context)
    publish(hub, newer)
    assert seen(hub) == contents(newer) | FIRST_FILES | {"notes.md": b"mine", "images/plot.png": b"png"}


def test_a_new_release_leaves_no_signature_of_the_older_one(hub, tmp_path):
    release = read_release(finished(tmp_path / "run").context)
    key = make_key(tmp_path / "signing.key", *P256)
    publish(hub, signed(release, key, tmp_path))
    assert seen(hub)["SHA256SUMS.sig"] == (tmp_path / "SHA256SUMS.sig").read_bytes()
    publish(hub, release)
    assert seen(hub) == contents(release) | FIRST_FILES


def test_an_unchanged_shard_is_not_sent_again(hub, tmp_path):
    older = finished(tmp_path / "older")
    publish(hub, read_release(older.context))
    before = len(hub.writes.received)
    (older.context.base_model / "README.md").write_text("---\nlicense: mit\n---\n")
    write_release_files(older.context.output, older.facts())
    publish(hub, read_release(older.context))
    resent = {name for name, content in seen(hub).items() if len(content) >= LARGE_BYTES and name.endswith(".safetensors")}
    assert resent
    assert len(hub.writes.received) - before == 3  # both cards and the checksums


@pytest.mark.parametrize(
    "standing",
    [
        {"model-00003-of-00003.safetensors": b"w" * 600},
        {"pytorch_model.bin": b"w" * 600},
        {"model-00001.safetensors": b"w" * 600},
        {"adapter_config.json": b"{}"},
        {"other/adapter_model.safetensors": b"w" * 600},
        {"model-00003-of-00003.safetensors": b"w" * 600, "SHA256SUMS": b"not ours"},
        {"model.safetensors": b"w" * 600, "SHA256SUMS": f"{'0' * 64}  model.safetensors\n{'1' * 64}  provenance.json\n".encode()},
    ],
    ids=["shard", "pickle", "same name", "adapter", "directory", "foreign sums", "replaced weights"],
)
def test_another_model_is_neither_touched_nor_mixed(hub, made, standing):
    hub.add(NAME, standing)
    error = failure(hub, read_release(made.context))
    assert isinstance(error, DestinationRefusedError)
    assert "spec.output.destination" in str(error)
    assert any(name in str(error) for name in standing)
    assert seen(hub) == standing
    assert hub.writes.received == []


def test_foreign_weights_under_our_names_are_not_deleted(hub, tmp_path):
    publish(hub, read_release(finished(tmp_path / "older").context))
    repository = hub.repositories["models", NAME]
    foreign = repository.files | {"model-00002.safetensors": b"theirs" * 200}
    hub.writes.commit(repository, foreign)
    newer = finished(tmp_path / "newer")
    shutil.rmtree(newer.context.output.merged)
    write_weights(newer.context.output.merged, "one shard", shards=1)
    write_release_files(newer.context.output, newer.facts())
    assert "model-00002.safetensors" in str(failure(hub, read_release(newer.context)))
    assert seen(hub) == foreign


def test_files_that_are_no_model_may_stand_there(hub, made):
    hub.add(NAME, {"README.md": b"hello", ".gitattributes": b"*", "LICENSE": b"terms", "data/plot.png": b"png"})
    release = read_release(made.context)
    publish(hub, release)
    assert seen(hub) == {".gitattributes": b"*", "LICENSE": b"terms", "data/plot.png": b"png"} | contents(release)


def test_a_commit_in_between_is_seen_and_kept(hub, made):
    release = read_release(made.context)
    publish_first = Fault(
        1, before=lambda: hub.writes.commit(hub.repositories["models", NAME], seen(hub) | {"notes.md": b"mine"})
    )
    hub.fail("/commit/main", publish_first)
    publish(hub, release)
    assert seen(hub) == contents(release) | FIRST_FILES | {"notes.md": b"mine"}


def test_a_model_that_appears_in_between_is_not_mixed(hub, made):
    def intrude() -> None:
        hub.writes.commit(hub.repositories["models", NAME], seen(hub) | {"pytorch_model.bin": b"w" * 600})

    hub.fail("/commit/main", Fault(1, before=intrude))
    assert "pytorch_model.bin" in str(failure(hub, read_release(made.context)))
    assert set(seen(hub)) == {".gitattributes", "pytorch_model.bin"}


def test_a_repository_that_never_rests_is_given_up(hub, made):
    count = iter(range(1000))
    hub.fail(
        "/commit/main",
        Fault(
            100,
            before=lambda: hub.writes.commit(hub.repositories["models", NAME], seen(hub) | {"n.md": str(next(count)).encode()}),
        ),
    )
    assert isinstance(failure(hub, read_release(made.context)), DestinationUnavailableError)


@pytest.mark.parametrize(("token", "word"), [(None, "name a Secret"), ("hf_of_somebody_else", "may not write")])
def test_without_the_right_to_write_the_field_of_the_token_is_named(hub, made, token, word):
    error = failure(hub, read_release(made.context), token=token)
    assert isinstance(error, DestinationRefusedError)
    assert "spec.output.secretRef" in error.hint
    assert word in error.hint
    assert "hf_of_somebody_else" not in f"{error}{error.hint}"


@pytest.mark.parametrize(
    ("part", "fault"),
    [
        (
            "/api/repos/create",
            Fault(9, status=402, headers={"X-Error-Message": "payment at https://hub/pay?Signature=not-for-any-log"}),
        ),
        ("/commit/main", Fault(9, status=400, headers={"X-Error-Message": "too many files"})),
        ("/preupload/", Fault(9, status=413)),
        ("/api/validate-yaml", Fault(9, status=400, body=b'{"errors": [{"message": "no such licence"}]}')),
        ("/upload/", Fault(9, status=422)),
    ],
    ids=["payment", "commit", "size", "card", "content"],
)
def test_what_a_human_has_to_mend_is_refused_at_once(hub, made, part, fault):
    hub.fail(part, fault)
    error = failure(hub, read_release(made.context))
    assert isinstance(error, DestinationRefusedError)
    assert "spec.output.destination" in str(error)
    assert set(
        hub.repositories.get(("models", NAME), hub.repositories.get(("models", NAME))).files if hub.repositories else {}
    ) <= set(FIRST_FILES)


def test_a_full_storage_is_reported_in_its_own_words(hub, made):
    hub.writes.storage_refusal = "storage limit of the organisation reached"
    assert "storage limit of the organisation reached" in str(failure(hub, read_release(made.context)))


def test_files_that_the_repository_ignores_are_missed(hub, made):
    hub.writes.ignored = {"model-00001.safetensors"}
    error = failure(hub, read_release(made.context))
    assert isinstance(error, DestinationRefusedError)
    assert "model-00001.safetensors" in str(error)


def test_a_file_that_changed_after_the_merge_is_not_published(hub, made):
    release = read_release(made.context)
    path = made.context.output.merged / "model-00001.safetensors"
    content = path.read_bytes()
    path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    assert isinstance(failure(hub, release), CheckpointError)
    assert seen(hub) == FIRST_FILES
    assert not any(len(stored) == len(content) and stored == path.read_bytes() for stored in hub.writes.stored.values())


def test_what_is_sent_stops_at_once_when_all_is_given_up(hub, made):
    stop = threading.Event()
    hub.fail("/upload/", Fault(1, before=stop.set, take=0))
    place = HubPath(repository=NAME, path="", is_dataset=False)
    given_up = HubDestination(place, token=TOKEN, endpoint=hub.address, private=True, patience=QUICK, stop=stop)
    with pytest.raises(StoppedError):
        given_up.publish(read_release(made.context))
    assert seen(hub) == FIRST_FILES
    publish(hub, read_release(made.context))
    assert seen(hub) == contents(read_release(made.context)) | FIRST_FILES


def test_a_hub_that_is_not_there_is_unavailable(hub, made):
    release = read_release(made.context)
    address = hub.address
    hub.address = re.sub(r":\d+$", ":1", address)
    assert isinstance(failure(hub, release), DestinationUnavailableError)


@pytest.fixture
def levels() -> Iterator[Callable[[], None]]:
    """What going online changes, put back afterwards."""
    names = ("httpx2", "httpcore2", "huggingface_hub")
    before = {name: logging.getLogger(name).level for name in names}
    environment = dict(os.environ)
    yield go_online
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)
    os.environ.clear()
    os.environ.update(environment)


def test_no_log_line_holds_token_or_signed_address(hub, made, caplog, capfd, levels):
    caplog.set_level(logging.DEBUG)
    levels()
    hub.writes.part_bytes = 1000
    hub.fail("/part/", Fault(2, status=503))
    hub.fail("/part/", Fault(1, take=100))
    hub.fail("/commit/main", Fault(1, status=503))
    publish(hub, read_release(made.context))
    output = capfd.readouterr()
    said = caplog.text + output.out + output.err
    assert "is ready" in said
    assert TOKEN not in said
    assert SIGNATURE not in said


def test_what_the_hub_says_is_shown_without_addresses():
    assert redacted_message("no: see https://hub/x?token=y\nplease") == ": no: see (address) please"
    assert redacted_message(None) == redacted_message(" ") == ""
    assert len(redacted_message("x" * 9999)) < 320
