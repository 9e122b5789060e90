"""The Grafana dashboard against a real Prometheus that scrapes a real server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from tests.e2e.prometheus_process import ROOT, PrometheusProcess
from tests.e2e.requests import client, completion, streamed_text, until
from tests.e2e.server_process import ServerProcess

GRAFANA = ROOT / "docker" / "grafana"
DASHBOARD = json.loads((GRAFANA / "dashboards" / "serve-llm.json").read_text())


def queries() -> list[str]:
    return [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]


def test_every_panel_uses_the_provisioned_data_source() -> None:
    sources = yaml.safe_load((GRAFANA / "provisioning/datasources/prometheus.yaml").read_text())
    (source,) = sources["datasources"]
    for panel in DASHBOARD["panels"]:
        for user in (panel, *panel["targets"]):
            assert user["datasource"] == {"type": source["type"], "uid": source["uid"]}


def test_panels_do_not_overlap() -> None:
    places = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & places, panel["title"]
        assert max(x for x, _ in cells) < 24
        places |= cells


def test_every_metric_of_the_dashboard_is_one_the_server_has(
    tiny_server: ServerProcess,
) -> None:
    page = httpx.get(f"{tiny_server.url}/metrics").text
    names = {name for query in queries() for name in re.findall(r"serve_llm_\w+", query)}
    assert len(names) > 10
    assert [name for name in sorted(names) if f"\n{name}{{" not in page] == []


@pytest.fixture
def prometheus(
    tiny_server: ServerProcess,
    tmp_path: Path,
) -> Iterator[PrometheusProcess]:
    with PrometheusProcess(tiny_server.url.removeprefix("http://"), tmp_path) as prometheus:
        yield prometheus


async def test_every_query_of_the_dashboard_has_an_answer(
    tiny_server: ServerProcess,
    prometheus: PrometheusProcess,
) -> None:
    scraped = "count_over_time(serve_llm_num_requests_running[1m])"
    await until(lambda: bool(prometheus.query(scraped)), "a first scrape")
    async with client(tiny_server) as http:
        for number in range(3):
            await streamed_text(http, completion(f"Number {number}", 10))

    def answered(query: str) -> bool:
        filled = query.replace("$__rate_interval", "1m").replace("$model", ".*")
        return bool(prometheus.query(filled))

    for query in queries():
        await until(lambda query=query: answered(query), f"an answer to {query}")
    (variable,) = DASHBOARD["templating"]["list"]
    assert "label_values(serve_llm_num_requests_running, model_name)" in variable["query"]["query"]
    assert prometheus.query("serve_llm_num_requests_running")[0]["metric"]["model_name"] == "tiny"
