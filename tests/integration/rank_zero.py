"""What the operator hears of a training pod where no kubelet runs one."""

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from finetune_job.names import OBSERVE_PORT
from finetune_job.progress import Progress


@contextlib.contextmanager
def rank_zero(address: str, progress: Progress) -> Iterator[None]:
    """Serve /progress as a training pod does. `address`: of the loopback network, the pod's in its status."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = progress.model_dump_json().encode() if self.path == "/progress" else b""
            self.send_response(200 if body else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer((address, OBSERVE_PORT), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
