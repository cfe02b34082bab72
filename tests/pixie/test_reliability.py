"""Calibration of decisions: what is asked, its arithmetic, and the temperature that is stored."""

from __future__ import annotations

import json
from xml.etree import ElementTree

import numpy as np
import pytest

from tests.mock_checkpoint import make_mock_checkpoint
from vlmserve import LLM
from vlmserve.cli.reliability import run_calibration
from vlmserve.errors import ConfigurationError, ModelLoadError
from vlmserve.frontend.deciding import Question
from vlmserve.pixie.reliability import (
    TASKS,
    Calibration,
    Outcome,
    accuracy,
    at_temperature,
    calibration_error,
    fitted_temperature,
    outcomes,
)
from vlmserve.pixie.reliability_plot import to_html, to_svg
from vlmserve.prompt.decisions import DECISIONS, read_temperature
from vlmserve.settings.config import EngineConfig, MediaConfig


def drawn(temperature: float, count: int = 4000) -> list[Outcome]:
    """Outcomes whose true probabilities are those at a temperature."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(count):
        stated = rng.dirichlet([0.5] * 3)
        right = int(rng.choice(3, p=at_temperature(stated, temperature)))
        found.append(Outcome("exists", tuple(stated), right))
    return found


def test_fitting_finds_the_true_temperature():
    found = drawn(2.0)
    assert fitted_temperature(found) == pytest.approx(2.0, rel=0.1)
    assert calibration_error(found, 2.0) < 0.03 < calibration_error(found)
    assert fitted_temperature(drawn(1.0)) == pytest.approx(1.0, rel=0.1)


def test_calibration_error_weighs_bins():
    sure = [Outcome("count", (0.95, 0.05), right) for right in (0, 0, 0, 1)]
    unsure = [Outcome("count", (0.55, 0.45), 0)]
    assert accuracy(sure) == 0.75
    assert calibration_error(sure) == pytest.approx(0.2)
    assert calibration_error(sure + unsure) == pytest.approx((4 * 0.2 + 0.45) / 5)


def test_questions_have_their_right_answers():
    asked: list[Question] = []

    def decide(messages, question):
        assert [part["type"] for part in messages[0]["content"]] == ["image"]
        asked.append(question)
        return [1 / len(question.answers)] * len(question.answers)

    found = outcomes(decide, 6)
    assert {one.task for one in found} == set(TASKS)
    assert all(0 <= one.right < len(one.probabilities) for one in found)
    right = {question.answers[one.right] for one, question in zip(found, asked, strict=True) if one.task == "exists"}
    assert right == {"Yes", "No"}


def test_reports_show_tasks_and_curves():
    calibration = Calibration.of(drawn(3.0, 200))
    assert "| all | 100 |" in calibration.to_markdown()
    drawing = ElementTree.fromstring(to_svg(calibration))
    assert len(drawing.findall("{*}polyline")) == 2
    page = to_html(calibration, "<a>")
    assert len(drawing.findall("{*}circle")) == page.count("<circle") > 4
    assert page.count('<th scope="row">') == len(calibration.rows)
    assert "Calibration of &lt;a&gt;" in page


def test_stored_temperatures_change_decisions(tmp_path, capsys):
    folder = make_mock_checkpoint(tmp_path)
    settings = EngineConfig(model=str(folder), engine="mock")
    plot = tmp_path / "plot.html"
    run_calibration(settings, MediaConfig(), 3, plot, write=True)
    assert "<svg" in plot.read_text()
    with pytest.raises(ConfigurationError, match=r"end in \.svg or \.html"):
        run_calibration(settings, MediaConfig(), 3, tmp_path / "plot.png", write=False)
    assert f"Temperature: {read_temperature(folder):.3f}" in capsys.readouterr().out
    (folder / DECISIONS).write_text(json.dumps({"temperature": 2}))
    llm = LLM(str(folder), engine="mock")
    question, chat = Question.choice("Which?", ["a", "b", "c"]), [{"role": "user", "content": "a"}]
    [plain] = llm.decide(chat, [question], temperature=1.0, use_tqdm=False)
    [stored] = llm.decide(chat, [question], use_tqdm=False)
    np.testing.assert_allclose(stored, at_temperature(plain, 2.0), atol=1e-9)


@pytest.mark.parametrize("content", ['{"temperature": 0}', '{"temperature": "hot"}', '{"temperature": true}', "["])
def test_broken_temperatures_are_named(tmp_path, content):
    (tmp_path / DECISIONS).write_text(content)
    with pytest.raises(ModelLoadError, match=DECISIONS):
        read_temperature(tmp_path)
