"""A collector of traces: takes what servers send over HTTP, and decodes it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue


@dataclass(frozen=True)
class ReceivedSpan:
    """A span as it arrived. Times are in nanoseconds, ids in hexadecimal. status: "" where none was set."""

    name: str
    kind: str
    trace_id: str
    span_id: str
    parent_id: str
    start: int
    end: int
    attributes: dict[str, Any]
    status: str
    resource: dict[str, Any]


class Collector:
    """Listens on that port, by default on a free one, while it is used as a context manager."""

    def __init__(self, port: int = 0) -> None:
        self.spans: list[ReceivedSpan] = []
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []
        self.bodies: list[bytes] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.paths.append(self.path)
                collector.headers.append({name.lower(): value for name, value in self.headers.items()})
                collector.bodies.append(body)
                collector.spans += _spans(body)
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: object) -> None:
                """Nothing on the terminal."""

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def forget(self) -> None:
        """Drop what has arrived."""
        for received in (self.spans, self.headers, self.paths, self.bodies):
            received.clear()

    def requests(self) -> list[ReceivedSpan]:
        """The spans of whole requests, in the order in which these came."""
        return sorted((span for span in self.spans if span.kind == "SPAN_KIND_SERVER"), key=lambda span: span.start)

    def parts(self, request: ReceivedSpan) -> list[ReceivedSpan]:
        """The spans within a request's, in order."""
        return sorted((span for span in self.spans if span.parent_id == request.span_id), key=lambda span: span.start)


def _spans(body: bytes) -> list[ReceivedSpan]:
    message = ExportTraceServiceRequest.FromString(body)
    return [
        ReceivedSpan(
            name=span.name,
            kind=span.SpanKind.Name(span.kind),
            trace_id=span.trace_id.hex(),
            span_id=span.span_id.hex(),
            parent_id=span.parent_span_id.hex(),
            start=span.start_time_unix_nano,
            end=span.end_time_unix_nano,
            attributes={pair.key: _value(pair.value) for pair in span.attributes},
            status={1: "ok", 2: "error"}.get(span.status.code, ""),
            resource={pair.key: _value(pair.value) for pair in resource.resource.attributes},
        )
        for resource in message.resource_spans
        for scope in resource.scope_spans
        for span in scope.spans
    ]


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(one) for one in value.array_value.values]
    return getattr(value, str(kind))
