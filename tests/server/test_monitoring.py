"""The dashboard and the alerts under deploy/ ask for what a server really tells, and so does the document."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families as parse

from tests.server.test_chat import about, data_url

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs/metrics.md"
DASHBOARD = json.loads((ROOT / "deploy/grafana/vlmserve.json").read_text("utf-8"))
ALERTS = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text("utf-8"))
SCRAPING = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yaml").read_text("utf-8"))

OF_A_GPU = {
    "vlmserve:gpu_utilization_perc",
    "vlmserve:gpu_memory_bytes",
    "vlmserve:gpu_memory_used_bytes",
    "vlmserve:gpu_process_memory_bytes",
}
"""What no server without a GPU tells; that one with a GPU does is in test_metrics.py."""
OF_PROMETHEUS = {"job", "instance"}
"""Labels that it adds."""
SERIES = re.compile(r"(?P<name>vlmserve:\w+)(?:\{(?P<selector>[^}]*)\})?")
GROUPING = re.compile(r"\b(?:by|on)\s*\(([^)]*)\)")


def panels() -> list[dict[str, Any]]:
    """All that shows something."""
    return [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]


def queries() -> dict[str, str]:
    """All expressions, by where they stand."""
    found = {f"{panel['title']}/{target['refId']}": target["expr"] for panel in panels() for target in panel["targets"]}
    found |= {rule["alert"]: rule["expr"] for rule in rules()}
    for variable in DASHBOARD["templating"]["list"]:
        if variable["type"] == "query":
            found[variable["name"]] = variable["query"]["query"]
    return found


def rules() -> list[dict[str, Any]]:
    return [rule for group in ALERTS["groups"] for rule in group["rules"]]


@pytest.fixture(scope="module")
def told(live) -> dict[str, set[str]]:
    """The names of all samples that a server tells, and their labels."""
    live.ask(messages=about(data_url("red")), max_tokens=3, ignore_eos=True)
    assert live.ask(temperature=-1).status_code == 400
    page = httpx.get(f"{live.url}/metrics", timeout=60).text
    samples = [sample for family in parse(page) for sample in family.samples]
    labels: dict[str, set[str]] = {}
    for sample in samples:
        labels.setdefault(sample.name, set()).update(sample.labels)
    return labels | {name: {"model_name", "gpu"} for name in OF_A_GPU}


@pytest.fixture(scope="module")
def documented() -> dict[str, str]:
    """The metrics that the document has in its tables, and their types."""
    rows = re.findall(r"^\| `(vlmserve:\w+)(?:\{[\w,]+\})?` \| (\w+) \|", DOCUMENT.read_text("utf-8"), re.MULTILINE)
    return dict(rows)


def family(sample: str, documented: dict[str, str]) -> str:
    """The metric that a sample belongs to."""
    base = re.sub("_(bucket|sum|count)$", "", sample)
    return base if documented.get(base) == "histogram" else sample


def test_documented_metrics_equal_reported_metrics(told, documented):
    assert {family(name, documented) for name in told} == set(documented)


@pytest.mark.parametrize("place", queries())
def test_queries_use_existing_series_and_labels(place, told):
    expression = queries()[place]
    asked = list(SERIES.finditer(expression))
    assert asked or "up{" in expression
    labels = set().union(*(told[series["name"]] for series in asked), OF_PROMETHEUS)
    for series in asked:
        selected = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", series["selector"] or ""))
        assert selected <= told[series["name"]] | OF_PROMETHEUS
    grouped = {label.strip() for found in GROUPING.findall(expression) for label in found.split(",")}
    assert grouped <= labels


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel["title"])
def test_panels_have_description_unit_and_owner(panel):
    assert panel["title"]
    assert panel["description"].endswith(".")
    assert panel["type"] == "heatmap" or panel["fieldConfig"]["defaults"]["unit"]
    for query in [panel, *panel["targets"]]:
        assert query["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    for target in panel["targets"]:
        for series in SERIES.finditer(target["expr"]):
            assert 'model_name=~"$model_name", instance=~"$instance"' in series["selector"]
        shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
        assert shown <= {label.strip() for found in GROUPING.findall(target["expr"]) for label in found.split(",")}


def test_the_dashboard_can_be_imported_as_it_is():
    assert DASHBOARD["id"] is None
    assert DASHBOARD["uid"] == "vlmserve"
    variables = {variable["name"]: variable["type"] for variable in DASHBOARD["templating"]["list"]}
    assert variables == {"datasource": "datasource", "model_name": "query", "instance": "query"}
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    taken = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells


def test_the_dashboard_shows_every_metric(documented):
    shown = {family(series["name"], documented) for query in queries().values() for series in SERIES.finditer(query)}
    assert shown == set(documented)


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_alerts_tell_severity_and_remedy(rule):
    assert re.fullmatch(r"Vlmserve[A-Za-z]+", rule["alert"])
    assert rule["labels"]["severity"] in ("critical", "warning")
    # What has happened some times in a while needs not go on.
    assert "increase(" in rule["expr"] or re.fullmatch(r"\d+[mh]", rule["for"])
    assert rule["annotations"]["summary"]
    assert len(rule["annotations"]["description"]) > 100


def test_flags_that_alerts_recommend_exist():
    settings = (ROOT / "docs/settings.md").read_text("utf-8")
    for rule in rules():
        for flag in re.findall(r"--[a-z-]+", rule["annotations"]["description"]):
            assert f"`{flag}`" in settings, f"{rule['alert']}: {flag}"


def test_alerts_are_unique_and_in_the_scraping_example():
    names = [rule["alert"] for rule in rules()]
    assert len(set(names)) == len(names)
    assert SCRAPING["rule_files"] == ["alerts.yaml"]
    [job] = SCRAPING["scrape_configs"]
    assert f'up{{job="{job["job_name"]}"}} == 0' in [rule["expr"] for rule in rules()]
    assert job["metrics_path"] == "/metrics"
