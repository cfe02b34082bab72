"""The files under deploy/ name what exists. That they run is for Docker and Kubernetes to show."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import typer
import yaml

from vlmserve.cli import app
from vlmserve.settings.config import EngineConfig, MediaConfig, ServerConfig

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
CHART = DEPLOY / "helm/vlmserve"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text("utf-8").replace("\\\n", " ")
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
TEMPLATES = {path.name: path.read_text("utf-8") for path in (CHART / "templates").iterdir()}
VALUES = yaml.safe_load((CHART / "values.yaml").read_text("utf-8"))
SCHEMA = json.loads((CHART / "values.schema.json").read_text("utf-8"))
SETTINGS = {*EngineConfig.model_fields, *MediaConfig.model_fields, *ServerConfig.model_fields}


def instructions(name: str) -> list[str]:
    """What is behind an instruction of the Dockerfile, each time."""
    return re.findall(rf"^{name} (.+)$", DOCKERFILE, re.MULTILINE)


STAGES = {line.rpartition(" AS ")[2] for line in instructions("FROM")}


def test_the_dockerfile_copies_existing_files() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text("utf-8").splitlines()
    copied = [name for line in instructions("COPY") for name in line.split()[:-1]]
    assert "src" in copied
    for name in copied:
        assert (ROOT / name).exists(), name
        assert f"!{name}" in ignored, name


def test_the_dockerfile_installs_extras_that_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    chosen = [set(extras.split(",")) for extras in re.findall(r"\.whl\)\[([\w,]+)\]", DOCKERFILE)]
    users = {*project["optional-dependencies"]} - {"all", "dev", "pixie", "docs"}
    assert chosen == [users, users - {"gpu"}]  # for CUDA, for CPUs


def test_images_do_not_run_as_root() -> None:
    assert {"wheel", "base", "cpu", "cuda"} == STAGES
    assert DOCKERFILE.rstrip().endswith("USER 10001")
    assert instructions("USER") == ["10001"] * 2
    assert "--uid 10001" in DOCKERFILE
    assert "runAsUser: 10001" in TEMPLATES["statefulset.yaml"]


@pytest.mark.parametrize("page", ["README.md", "docs/containers.md"])
def test_documented_containers_run_existing_commands(page: str) -> None:
    text = (ROOT / page).read_text("utf-8").replace("\\\n", " ")
    runs = re.findall(r"^ *docker run .*?(?<=\s)vlmserve(?::\w+)? (\S+)", text, re.MULTILINE)
    assert runs
    assert instructions("ENTRYPOINT") == ['["vlmserve"]']
    assert set(runs) <= set(typer.main.get_command(app).commands)


def test_compose_names_existing_stages_and_settings() -> None:
    for service in COMPOSE["services"].values():
        assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        assert service["build"]["target"] in STAGES
        assert {volume.partition(":")[0] for volume in service["volumes"]} <= COMPOSE["volumes"].keys()
        variables = service["environment"]
        names = [name for name in variables if name.startswith("VLMSERVE_")]
        assert {name.removeprefix("VLMSERVE_").lower() for name in names} <= SETTINGS
        # Compose passes on a variable without a value, and removes it if nobody sets it.
        fixed = {name: value for name, value in variables.items() if value is not None}
        assert fixed == {"VLMSERVE_HOST": "0.0.0.0", "VLMSERVE_PORT": "8000"}
        assert [port.endswith(":8000") for port in service["ports"]] == [True]


def test_compose_passes_documented_variables_on() -> None:
    page = (ROOT / "docs/containers.md").read_text("utf-8").partition("## Compose")[2].partition("\n## ")[0]
    passed = COMPOSE["services"]["server"]["environment"].keys()
    assert set(re.findall(r"`?(VLMSERVE_[A-Z_]+|HF_TOKEN)`", page)) <= passed
    assert COMPOSE["services"]["server"]["env_file"] == [{"path": ".env", "required": False}]


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_use_values_that_exist(name: str) -> None:
    text = TEMPLATES[name]
    assert text.count("{{") == text.count("}}")
    for path in set(re.findall(r"(?<=\s)\.Values((?:\.\w+)+)", text)):
        found: Any = VALUES
        for word in path.strip(".").split("."):
            assert word in found, path
            found = found[word]
    defined = set(re.findall(r'define "([\w.]+)"', TEMPLATES["_names.tpl"]))
    assert set(re.findall(r'include "([\w.]+)"', text)) <= defined


def test_templates_balance_their_blocks() -> None:
    for name, text in TEMPLATES.items():
        begun = re.findall(r"\{\{-?\s*(?:if|with|range|define)\b", text)
        assert len(begun) == len(re.findall(r"\{\{-?\s*end\b", text)), name


def test_values_fit_their_schema() -> None:
    jsonschema.validate(VALUES, SCHEMA)
    assert SCHEMA["properties"].keys() - {"global"} == VALUES.keys()
    for wrong in ({"replicas": "two"}, {"modell": "pixie"}, {"settings": {"Max-Len": 1}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(VALUES | wrong, SCHEMA)


def test_flags_of_the_chart_exist() -> None:
    flags = set(re.findall(r"- --([a-z-]+)=", TEMPLATES["statefulset.yaml"]))
    assert flags == {"api-keys-file"}
    named = {name.lower() for name in re.findall(r"VLMSERVE_([A-Z_]+)$", TEMPLATES["statefulset.yaml"], re.MULTILINE)}
    assert named == {"allowed_hosts"}
    assert {name.replace("-", "_") for name in flags} | named <= SETTINGS
    assert VALUES["terminationGracePeriodSeconds"] > ServerConfig.model_fields["shutdown_grace"].default
