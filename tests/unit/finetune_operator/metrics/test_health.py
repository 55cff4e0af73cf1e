"""What the probes and the scrape are answered."""

from urllib.error import HTTPError
from urllib.request import urlopen

from prometheus_client import CollectorRegistry, Gauge

from finetune_operator.metrics.health import STALL_SECONDS, WAITING, Health, health_server


def test_a_main_loop_is_dead_once_it_has_been_silent_for_too_long() -> None:
    now = [100.0]
    health = Health(lambda: now[0])
    now[0] += STALL_SECONDS - 1
    assert health.is_alive
    now[0] += 1
    assert not health.is_alive
    health.beat()
    assert health.is_alive


def test_each_path_answers_for_itself() -> None:
    now = [0.0]
    health, registry = Health(lambda: now[0]), CollectorRegistry()
    Gauge("jobs", "Jobs.", registry=registry).set(3)
    server = health_server("127.0.0.1", 0, health, registry)
    server.start()
    try:
        host, port = server.address

        def answer(path: str) -> tuple[int, str]:
            try:
                with urlopen(f"http://{host}:{port}{path}", timeout=60) as response:
                    return response.status, response.read().decode()
            except HTTPError as error:
                with error:
                    return error.code, error.read().decode()

        assert answer("/healthz") == (200, "ok\n")
        assert answer("/readyz") == (503, f"{WAITING}\n")
        health.is_ready = True
        now[0] = STALL_SECONDS
        assert answer("/readyz") == (200, "ok\n")
        assert answer("/healthz") == (503, "the main loop is stalled\n")
        assert "jobs 3.0" in answer("/metrics")[1]
    finally:
        server.stop()
