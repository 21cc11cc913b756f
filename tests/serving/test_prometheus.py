"""What a scrape of a running job reads."""

from __future__ import annotations

import dataclasses
import socket
import urllib.request

import pytest

from dspark_jax.core.errors import InputError
from dspark_jax.serving.jsonl import ExitCode, serve_file

pytest.importorskip("prometheus_client")
LINES = [{"prompt": f"say {n}", "max_new_tokens": 6} for n in range(6)]


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_a_scrape(fake_engine, make_config, port):
    read = []

    def scrape(step):
        if step == 8:
            read.append(urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode())

    fake_engine.before_step = scrape
    assert serve_file(make_config(LINES, metrics_port=port)) == ExitCode.DONE

    values = dict(line.rsplit(" ", 1) for line in read[0].splitlines() if not line.startswith("#"))
    assert values['dspark_requests_total{outcome="answered"}'] == "4.0"
    assert (values["dspark_tokens_total"], values["dspark_in_flight"]) == ("24.0", "2.0")
    assert (values["dspark_verified_tokens_total"], values["dspark_accepted_tokens_total"]) == (
        "24.0",
        "12.0",
    )
    assert values["dspark_mean_budget_rows"] == "6.0"
    assert values["dspark_engine_preemptions"] == "3.0"
    assert float(values['dspark_first_token_seconds{quantile="0.5"}']) > 0
    with pytest.raises(OSError):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics")


def test_a_port_that_is_taken(fake_engine, make_config):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = make_config(LINES, metrics_port=taken.getsockname()[1])
        with pytest.raises(InputError, match="choose another --metrics-port"):
            serve_file(config)
    assert serve_file(dataclasses.replace(config, metrics_port=None)) == ExitCode.DONE
