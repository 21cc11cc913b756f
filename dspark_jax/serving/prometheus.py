"""A job's figures for Prometheus, read when they are asked for: the loop does nothing for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from dspark_jax.core.errors import InputError
from dspark_jax.engine.engine import Engine
from dspark_jax.serving.report import engine_counters
from dspark_jax.serving.summary import Summary


class _Collector:
    """What a scrape reads."""

    def __init__(self, summary: Summary, engine: Engine):
        self._summary, self._engine = summary, engine

    def collect(self) -> Iterator:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        summary, total = self._summary, self._summary.all
        requests = CounterMetricFamily("dspark_requests", "Requests that have ended", labels=["outcome"])
        requests.add_metric(["answered"], total.answers)
        requests.add_metric(["failed"], summary.failed)
        yield requests
        for name, text, value in (
            ("tokens", "Tokens of finished requests", total.tokens),
            ("rounds", "Rounds of finished requests", total.rounds.total()),
            ("verified_tokens", "Draft tokens that the target scored", total.verified),
            ("accepted_tokens", "Draft tokens that were accepted", total.accepted),
        ):
            yield CounterMetricFamily(f"dspark_{name}", text, value=value)
        yield GaugeMetricFamily("dspark_in_flight", "Requests being decoded", value=summary.in_flight)
        yield GaugeMetricFamily(
            "dspark_mean_budget_rows", "Target rows verified per step", value=summary.mean_budget
        )
        for name, text, latencies in (
            ("first_token", "From submission to the first token", summary.first_token_s),
            ("between_tokens", "Per token after the first", summary.between_tokens_s),
        ):
            seconds = GaugeMetricFamily(f"dspark_{name}_seconds", text, labels=["quantile"])
            for share in (0.5, 0.99):
                seconds.add_metric([str(share)], latencies.quantile_s(share) or 0.0)
            yield seconds
        for name, value in engine_counters(self._engine).items():
            yield GaugeMetricFamily(f"dspark_engine_{name}", "Counted by the engine", value=value)


@contextlib.contextmanager
def metrics_server(port: int | None, host: str, summary: Summary, engine: Engine) -> Iterator[None]:
    """Serves the figures at http://HOST:PORT/metrics while inside; does nothing without a port.

    Raises:
      InputError: prometheus_client is not installed, or the port cannot be had.
    """
    if port is None:
        yield
        return
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError as error:
        raise InputError(
            given="a metrics port without prometheus_client",
            expected="the package prometheus_client",
            fix="pip install 'dspark_jax[http]'",
        ) from error
    registry = CollectorRegistry()
    registry.register(_Collector(summary, engine))
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        raise InputError(
            given=f"metrics at {host}:{port}: {error}",
            expected="a free port of this machine",
            fix="choose another --metrics-port",
        ) from error
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
