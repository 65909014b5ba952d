"""An S3 server for tests, with faults: moto's implementation of S3 behind a real HTTP server on the loopback.

What a client asks for goes over sockets, signed, as to any other server. Faults are put between moto and the socket.
"""

from __future__ import annotations

import contextlib
import os
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import boto3
from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
from werkzeug.serving import make_server

_PREFIX = "imagenet/shards"
# moto takes any.
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "of-the-test", "AWS_SECRET_ACCESS_KEY": "hush-of-the-test"}

Answer = Callable[..., Any]
# The name of an object and the number of the request for it, both as counted here, to what to do with it.
Fault = Callable[[str, int], str | None]


class _Quiet(MotoRequestHandler):
    def log(self, *arguments: Any) -> None:
        """Say nothing."""


class S3Server:
    """A server that counts what it is asked for.

    Attributes:
        gets: by the name of the object, how often it was asked for.
        requests: of any kind.
        failed: of these, how many were given a fault.
        fault: what is done to a request, by the name of the object and the number of all requests until then:
            ``503``, ``refused`` (credentials that have expired),
            ``cut`` (half of the body comes), ``changed`` (a byte differs), ``hang`` (half of it comes, and
            then nothing), ``trickle`` (it comes slowly), ``silent`` (nothing comes), ``huge`` (the header says that a
            terabyte comes), ``endless`` (it says nothing, and zeros come), or None.
        sent: bytes of huge and endless objects.
    """

    def __init__(self) -> None:
        self.gets: Counter[str] = Counter()
        self.requests = self.failed = self.sent = 0
        self.fault: Fault = lambda name, number: None
        # Of all servers of a process moto keeps one storage.
        self._bucket = f"photographs-{uuid.uuid4().hex[:12]}"
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=_Quiet)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where the objects are."""
        return f"s3://{self._bucket}/{_PREFIX}"

    @property
    def environment(self) -> dict[str, str]:
        """What a client has to have in its environment, so that it asks nobody else either."""
        return {
            **CREDENTIALS,
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.server_port}",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_PROXY": "127.0.0.1",
        }

    def put(self, folder: Path) -> None:
        """Put the files of a folder below :attr:`url`."""
        client = self._client()
        client.create_bucket(Bucket=self._bucket)
        for path in sorted(folder.iterdir()):
            if path.is_file():
                client.put_object(Bucket=self._bucket, Key=f"{_PREFIX}/{path.name}", Body=path.read_bytes())
        self.forget()

    def put_object(self, name: str, content: bytes) -> None:
        """Put one object there, in place of one of this name."""
        self._client().put_object(Bucket=self._bucket, Key=f"{_PREFIX}/{name}", Body=content)
        self.forget()

    def forget(self) -> None:
        """Count from 0, without faults."""
        self.gets.clear()
        self.requests = self.failed = self.sent = 0
        self.fault = lambda name, number: None

    def stop(self) -> None:
        self._over.set()
        self._server.shutdown()
        self._thread.join(timeout=30)
        self._server.server_close()

    def _client(self) -> Any:
        names = {"aws_access_key_id": "AWS_ACCESS_KEY_ID", "aws_secret_access_key": "AWS_SECRET_ACCESS_KEY"}
        given = {name: self.environment[variable] for name, variable in names.items()}
        return boto3.client("s3", endpoint_url=self.environment["AWS_ENDPOINT_URL"], region_name="us-east-1", **given)

    def _answer(self, environ: dict[str, Any], start_response: Answer) -> Iterable[bytes]:
        name = environ["PATH_INFO"].rpartition("/")[2]
        with self._lock:
            self.requests += 1
            if environ["REQUEST_METHOD"] == "GET":
                self.gets[name] += 1
            fault = self.fault(name, self.requests)
            self.failed += fault is not None
        if fault == "silent":
            self._over.wait(60)
        if fault == "refused":
            content = b"<Error><Code>ExpiredToken</Code><Message>The token has expired</Message></Error>"
            start_response("400 Bad Request", [("Content-Length", str(len(content)))])
            return [content]
        if fault == "503":
            content = b"<Error><Code>ServiceUnavailable</Code><Message>Please try again</Message></Error>"
            start_response("503 Service Unavailable", [("Content-Length", str(len(content)))])
            return [content]
        if fault in ("huge", "endless"):
            start_response("200 OK", [("Content-Length", str(10**12))] if fault == "huge" else [])
            return self._zeros()
        body = b"".join(self._moto(environ, start_response))
        if fault == "changed":
            return [body[:-1] + bytes([body[-1] ^ 1])]
        if fault == "trickle":
            return self._slowly(body)
        return self._half(body, waits=fault == "hang") if fault else [body]

    def _slowly(self, body: bytes) -> Iterator[bytes]:
        for number in range(100):
            self._over.wait(0.1)
            yield body[number * len(body) // 100 : (number + 1) * len(body) // 100]

    def _zeros(self) -> Iterator[bytes]:
        # An end of its own, so that a client without a limit fills no disk.
        while self.sent < 1 << 30:
            self.sent += 1 << 20
            yield bytes(1 << 20)

    def _half(self, body: bytes, *, waits: bool) -> Iterator[bytes]:
        # The header says how much there is.
        yield body[: len(body) // 2]
        if waits:
            self._over.wait(60)


@contextlib.contextmanager
def s3_server() -> Iterator[S3Server]:
    """A server that runs while the block does."""
    server = S3Server()
    try:
        yield server
    finally:
        server.stop()
