"""What a program in a pod prints, by the WebSocket protocol of a real API server."""

import base64
import hashlib
import http.server
import json
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from finetune_cli.cluster.client import ClusterClient, RequestError
from tests.unit.finetune_cli.cluster.test_client import client_of

SUCCESS = json.dumps({"status": "Success"}).encode()
FRAMES: list[tuple[int, bytes]] = []
"""Channel and content of what the server sends; then it closes the connection."""
PAUSE = -2
STALL = -1
"""Instead of a channel: the server waits a little; from here on it says nothing."""
ENDED = threading.Event()
REFUSED: list[int] = []
ASKED: list[dict[str, list[str]]] = []


def frame(opcode: int, content: bytes) -> bytes:
    size = len(content)
    head = (
        bytes([size])
        if size < 126
        else bytes([126]) + struct.pack(">H", size)
        if size < 65_536
        else bytes([127]) + struct.pack(">Q", size)
    )
    return bytes([0x80 | opcode]) + head + content


class PodHandler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        ASKED.append(parse_qs(urlsplit(self.path).query))
        if REFUSED:
            self.send_response(REFUSED[0])
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        key = self.headers["Sec-WebSocket-Key"].encode() + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        self.send_header("Sec-WebSocket-Accept", base64.b64encode(hashlib.sha1(key).digest()).decode())
        self.send_header("Sec-WebSocket-Protocol", "v4.channel.k8s.io")
        self.end_headers()
        for channel, content in FRAMES:
            if channel == PAUSE:
                self.wfile.flush()
                time.sleep(0.1)
                continue
            if channel == STALL:
                ENDED.wait(300)
                return
            self.wfile.write(frame(2, bytes([channel]) + content))
        self.wfile.flush()
        if FRAMES and FRAMES[-1][0] == 3:
            self.wfile.write(frame(8, struct.pack(">H", 1000)))
        self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterClient]:
    for given in (FRAMES, REFUSED, ASKED):
        given.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), PodHandler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        ENDED.clear()
        yield client_of(server.server_port, tmp_path, monkeypatch)
        ENDED.set()
        server.shutdown()


def printed(client: ClusterClient, silence_seconds: float = 5.0) -> bytes:
    return b"".join(client.output_of("team", "pod", "reader", ["python", "-c", "x"], silence_seconds))


def test_bytes_come_as_they_are(client: ClusterClient) -> None:
    content = bytes(range(256)) * 1000
    FRAMES[:] = [*((1, content[at : at + 70_000]) for at in range(0, len(content), 70_000)), (2, b"a warning"), (3, SUCCESS)]
    assert printed(client) == content
    (asked,) = ASKED
    assert (asked["command"], asked["container"], asked["stdout"]) == (["python", "-c", "x"], ["reader"], ["true"])
    FRAMES[:] = [(3, SUCCESS)]
    assert printed(client) == b""


def test_frames_without_content_and_pauses_are_no_silence(client: ClusterClient) -> None:
    opening = [each for channel in (1, 2, 3) for each in ((channel, b""), (PAUSE, b""))]
    FRAMES[:] = [*opening, (1, b"one"), (PAUSE, b""), (2, b"a warning"), (PAUSE, b""), (1, b"two"), (3, SUCCESS)]
    assert printed(client) == b"onetwo"


def test_a_program_that_fails_says_why(client: ClusterClient) -> None:
    FRAMES[:] = [(2, b"is not a file of the results\n"), (3, json.dumps({"status": "Failure", "message": "code 1"}).encode())]
    with pytest.raises(RequestError, match="the program in the pod pod failed: is not a file of the results") as caught:
        printed(client)
    assert caught.value.status == 400


@pytest.mark.parametrize("frames", [[(1, b"half")], [], [(1, b"half"), (3, b"{")]])
def test_a_connection_that_breaks_off_is_no_end(client: ClusterClient, frames: list[tuple[int, bytes]]) -> None:
    FRAMES[:] = frames
    with pytest.raises(RequestError, match="broke off") as caught:
        printed(client)
    assert caught.value.status is None


def test_a_program_that_says_nothing_is_not_waited_for(client: ClusterClient) -> None:
    FRAMES[:] = [(1, b"half"), (STALL, b"")]
    with pytest.raises(RequestError, match=r"the program in the pod pod has printed nothing for 0.2 s"):
        printed(client, 0.2)


@pytest.mark.parametrize("status", [403, 404, 500])
def test_a_refusal_has_its_status(client: ClusterClient, status: int) -> None:
    REFUSED[:] = [status]
    with pytest.raises(RequestError, match=f"the API server answered {status}") as caught:
        printed(client)
    assert caught.value.status == status


def test_no_server_is_no_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RequestError, match=r"no program can be run in the pod pod: .*refused") as caught:
        printed(client_of(1, tmp_path, monkeypatch))
    assert caught.value.status is None
