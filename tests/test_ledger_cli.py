"""`foxray runs` and `foxray show` over a ledger written by hand."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ledger_samples import eventful_run, small_run
from typer import Typer
from typer.testing import CliRunner

from foxray.cli.runs import runs
from foxray.cli.show import show
from foxray.errors import UserError
from foxray.ledger import Ledger
from foxray.ledger import events as ev

app = Typer()
app.command("runs")(runs)
app.command("show")(show)


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    ledger = Ledger(tmp_path)
    for event in eventful_run("tft-1") + small_run("mamba2-2", outcome="failed"):
        ledger.run(event.run_id).append(event)
    return tmp_path


def output(*arguments: str, **environment: str) -> str:
    result = CliRunner().invoke(app, list(arguments), env=environment, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def document(*arguments: str) -> Any:
    return json.loads(output(*arguments))


def test_runs_lists_every_run_and_the_success_rate(storage: Path) -> None:
    text = output("runs", "--storage", str(storage))
    line = next(line for line in text.splitlines() if "tft-1" in line)
    for value in ("tft", "2026-01-31 09:00:00", "success", "64 → 32 → 16", "0.25", "0.75"):
        assert value in line
    assert "2 runs; executions: 1 success, 1 failed, 1 lost; success rate: 33.3%" in text
    assert output("runs", FOXRAY_STORAGE=str(storage)) == text


def test_runs_as_json(storage: Path) -> None:
    plain = document("runs", "--storage", str(storage), "--json")
    assert [run["run_id"] for run in plain["runs"]] == ["mamba2-2", "tft-1"]
    assert plain["success_rate"] == pytest.approx(1 / 3) and plain["outcomes"]["lost"] == 1
    empty = document("runs", "--storage", str(storage / "nowhere"), "--json")
    assert empty == {"runs": [], "unreadable": {}, "outcomes": {}, "success_rate": None}


def test_runs_says_when_there_are_none_and_names_unreadable_ones(storage: Path) -> None:
    assert "no runs" in output("runs", "--storage", str(storage / "nowhere"))
    (storage / "runs" / "broken" / "events").mkdir(parents=True)
    (storage / "runs" / "broken" / "events" / "x.json").write_text("{")
    text = output("runs", "--storage", str(storage))
    assert "broken: nothing readable (x.json: torn" in text


def test_show_prints_the_whole_run(storage: Path) -> None:
    (storage / "runs" / "tft-1" / "events" / "torn.json").write_text('{"kind"')
    text = output("show", "tft-1", "--storage", str(storage))
    for title in ("Executions", "Attempts", "Incidents", "Decisions", "Phases", "Epochs"):
        assert title in text
    for value in (
        "64 → 32 → 16",
        "e1l1-training-r1-2",
        "CUDA out of memory",
        "retry_in_place",
        "fresh_workers",
        "32 → 16",
        "512 B",
        "950 B",
        "0.125 s",
        "checkpoints/200",
        "coverage",
        "skipped torn.json: torn",
    ):
        assert value in text, value
    attempts = text[text.index("Attempts") : text.index("Incidents")]
    assert attempts.count("oom") == 4 and attempts.count("interrupted") == 3


def test_show_as_json(storage: Path) -> None:
    plain = document("show", "tft-1", "--storage", str(storage), "--json")
    assert plain["oom_retries"] == 4 and len(plain["executions"]) == 2 and plain["model"] == "tft"


def test_texts_of_the_ledger_are_no_markup(tmp_path: Path) -> None:
    events = small_run("r")
    fields = {
        "run_id": "r",
        "execution": 0,
        "model": "[red]m[/red]",
        "config": {},
        "foxray_version": ":boom:",
    }
    for event in [ev.RunCreated(**fields), *events[1:]]:
        Ledger(tmp_path).run("r").append(event)
    assert "[red]m[/red]" in output("runs", "--storage", str(tmp_path))
    assert "[red]m[/red]" in output("show", "r", "--storage", str(tmp_path))


def test_an_unknown_run_names_the_storage_and_what_comes_close(storage: Path) -> None:
    def error(*arguments: str) -> str:
        result = CliRunner().invoke(app, list(arguments))
        assert isinstance(result.exception, UserError)
        return str(result.exception)

    text = error("show", "tft-l", "--storage", str(storage))
    assert "tft-l" in text and str(storage) in text and "did you mean tft-1" in text
    assert "2 runs" in error("show", "qqqqqqqq", "--storage", str(storage))
    assert "--storage" in error("show", "tft-1", "--storage", str(storage / "nowhere"))
    assert "not in" in error("show", "../tft-1", "--storage", str(storage))


def test_neither_command_loads_torch_or_ray(storage: Path) -> None:
    code = (
        "import sys; from foxray.cli.runs import runs; from foxray.cli.show import show\n"
        f"runs(storage={str(storage)!r}); show('tft-1', storage={str(storage)!r})\n"
        "print([m for m in ('torch', 'ray', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr
