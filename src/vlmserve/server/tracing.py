"""OpenTelemetry traces over OTLP. Needs the extra ``otel``."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TypeAlias
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from vlmserve import __version__
from vlmserve.errors import ConfigurationError

logger = logging.getLogger(__name__)

Attributes: TypeAlias = "Mapping[str, str | bool | int | float | Sequence[str]]"

_CHATTY = ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal")
"""Loggers that repeat for each batch that the collector is unreachable."""
_PATH = "/v1/traces"
_LAST_SPANS = 5.0
"""Seconds to send the last spans."""
_NANOSECONDS = 1e9


class Trace:
    """The span of a running request. End it. Times are Unix times."""

    def __init__(self, tracer: Tracer, span: Span, method: str) -> None:
        self._method = method
        self._tracer = tracer
        self._span = span
        self._is_described = False
        self.trace_id = format_trace_id(span.get_span_context().trace_id)

    @property
    def is_recorded(self) -> bool:
        """False if a sampler decided not to record it."""
        return self._span.is_recording()

    def describe(self, name: str, attributes: Attributes) -> None:
        self._is_described = True
        self._span.update_name(name)
        self._span.set_attributes(attributes)

    def part(self, name: str, start: float, seconds: float, attributes: Attributes | None = None) -> None:
        begin = int(start * _NANOSECONDS)
        inside = set_span_in_context(self._span)
        span = self._tracer.start_span(name, inside, start_time=begin, attributes=attributes)
        span.end(begin + int(seconds * _NANOSECONDS))

    def end(self, status: int, error: str | None, attributes: Attributes, *, failed: bool) -> None:
        """status: HTTP. error: code. failed: the server's fault, not the client's."""
        self._span.set_attributes({"http.response.status_code": status, **attributes})
        if not self._is_described and "http.route" in attributes:
            self._span.update_name(f"{self._method} {attributes['http.route']}")
        if error is not None:
            self._span.set_attribute("error.type", error)
        if failed:
            self._span.set_status(StatusCode.ERROR, error)
        self._span.end()


class Tracing:
    """Sends traces in the background, in batches. Close it to send the rest.

    endpoint: URL of an OTLP/HTTP collector; the default path is added. OpenTelemetry's variables set the rest, like
    OTEL_EXPORTER_OTLP_HEADERS.

    Raises ConfigurationError for an invalid URL.
    """

    def __init__(self, endpoint: str) -> None:
        url = _complete(endpoint)
        for chatty in _CHATTY:
            logging.getLogger(chatty).setLevel(logging.CRITICAL)
        about = {"service.name": "vlmserve", "service.version": __version__}
        resource = Resource.create(about).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_LoggingExporter(OTLPSpanExporter(url), url)))
        self._tracer = self._provider.get_tracer("vlmserve")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, method: str, path: str, headers: Mapping[str, str]) -> Trace:
        """Start the span of a request, as a child of its header `traceparent`."""
        carrier = {name: headers[name] for name in ("traceparent", "tracestate") if name in headers}
        span = self._tracer.start_span(
            method,
            self._propagator.extract(carrier),
            SpanKind.SERVER,
            {"http.request.method": method, "url.path": path},
            start_time=time.time_ns(),
        )
        return Trace(self._tracer, span, method)

    def close(self) -> None:
        """Send the remaining spans, for `_LAST_SPANS` seconds at most."""
        last = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        last.start()
        last.join(_LAST_SPANS)


class _LoggingExporter(SpanExporter):
    def __init__(self, exporter: SpanExporter, url: str) -> None:
        self._exporter = exporter
        self._url = url
        self._fails = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        fails = result is not SpanExportResult.SUCCESS
        if fails and not self._fails:
            logger.warning("Traces do not arrive at %s and are dropped; everything else continues", self._url)
        elif self._fails and not fails:
            logger.info("Traces arrive at %s again", self._url)
        self._fails = fails
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()


def _complete(endpoint: str) -> str:
    url = urlsplit(endpoint)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ConfigurationError(
            f"--otlp-traces-endpoint {endpoint!r}: give the URL of a collector that takes OTLP over HTTP, like "
            f"http://localhost:4318{_PATH}"
        )
    return endpoint if url.path.strip("/") else url._replace(path=_PATH).geturl()
