"""The documentation says what the code does: options, events, log lines and links are compared with it."""

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import typer.main
from conftest import REPOSITORY

from foxray.cli import app
from foxray.driver.cluster import RAY_ENVIRONMENT
from foxray.errors import FoxrayError, MemoryExhausted, UserError
from foxray.ledger.events import KINDS, Event
from foxray.oom import texts
from foxray.oom.policy import RUNGS
from foxray.training.config import PRESETS, TrainConfig

DOCS = REPOSITORY / "docs"
PAGES = sorted([*DOCS.glob("*.md"), REPOSITORY / "README.md"])

# Options of the configuration under another name on the command line, or without a flag.
NEGATED = {"keep_effective_batch": "no-keep-effective-batch"}
ONLY_IN_YAML = {"max_grad_norm", "max_worker_failures"}


def page(name: str) -> str:
    return (DOCS / name).read_text()


def rows(text: str, first: str) -> Iterator[list[str]]:
    """Cells of the table rows of which the first cell matches `first`."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("|") and re.fullmatch(first, cells[0]):
            yield cells


def section(text: str, heading: str) -> str:
    """The text below a heading, up to the next heading of any level."""
    below = text.split(f"\n{heading}\n", 1)[1]
    return re.split(r"^#+ ", below, maxsplit=1, flags=re.MULTILINE)[0]


# -- configuration.md ------------------------------------------------------------------------------


def shown_default(option: Any) -> str:
    if option.name == "parquet_file":
        return "required"
    if isinstance(option.show_default, str):
        return option.show_default
    if option.is_flag:
        return "off"
    return "none" if option.default is None else str(option.default)


def test_every_option_of_train_is_documented_with_its_default() -> None:
    command = typer.main.get_command(app).commands["train"]  # type: ignore[attr-defined]
    real = {f"`{option.opts[0]}`": shown_default(option) for option in command.params}
    real.pop("`--help`", None)
    documented = {row[0]: row[1] for row in rows(page("configuration.md"), r"`--[a-z-]+`") if len(row) == 4}
    assert documented == real


def test_documented_defaults_are_those_of_the_configuration() -> None:
    documented = {row[0].strip("`-"): row[1] for row in rows(page("configuration.md"), r"`(--)?[a-z-]+`")}
    for name, field in TrainConfig.model_fields.items():
        shown = documented[NEGATED.get(name, name.replace("_", "-"))]
        if isinstance(field.default, int | float) and not isinstance(field.default, bool):
            assert float(shown) == field.default, name
        elif isinstance(field.default, str):
            assert shown == field.default, name


def test_documented_ranges_are_those_of_the_configuration() -> None:
    """Numbers that bound an option stand in its row."""
    documented = {
        row[0].strip("`-"): row[2]
        for row in rows(page("configuration.md"), r"`(--)?[a-z-]+`")
        if len(row) == 4
    }
    for name, field in TrainConfig.model_fields.items():
        allowed = documented[NEGATED.get(name, name.replace("_", "-"))]
        for bound in field.metadata:
            for limit in ("ge", "gt", "le", "lt"):
                if hasattr(bound, limit):
                    assert f"{getattr(bound, limit):g}" in re.findall(r"[\d.]+", allowed), (name, bound)


def test_options_without_a_flag_are_documented_as_such() -> None:
    command = typer.main.get_command(app).commands["train"]  # type: ignore[attr-defined]
    flags = {option.name for option in command.params}
    without = set(TrainConfig.model_fields) - flags - set(NEGATED)
    assert without == ONLY_IN_YAML
    for name in without:
        assert list(rows(page("configuration.md"), f"`{name.replace('_', '-')}`"))


def test_presets_are_documented() -> None:
    documented = {
        row[0].strip("`"): {"batch_size": int(row[1]), "min_batch_size": int(row[2])}
        for row in rows(section(page("configuration.md"), "## Presets"), r"`[a-z-]+`")
    }
    assert documented == PRESETS


def test_what_a_resume_may_change_is_documented() -> None:
    pytest.importorskip("ray")
    from foxray.driver.resume import CHANGEABLE

    listed = section(page("configuration.md"), "## Resuming")
    for name in CHANGEABLE - ONLY_IN_YAML:
        assert f"`--{name.replace('_', '-')}`" in listed


# -- ledger.md -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_every_field_of_an_event_is_documented(kind: str) -> None:
    documented = {row[0].strip("`") for row in rows(section(page("ledger.md"), f"### `{kind}`"), "`[a-z_]+`")}
    envelope = {field.name for field in fields(Event)}
    assert documented == {field.name for field in fields(KINDS[kind])} - envelope


def test_the_envelope_and_all_kinds_are_documented() -> None:
    text = page("ledger.md")
    documented = {row[0].strip("`") for row in rows(section(text, "### Envelope"), "`[a-z_]+`")}
    assert documented == {"kind"} | {field.name for field in fields(Event)}
    assert set(re.findall(r"^### `([a-z_]+)`$", text, re.MULTILINE)) == set(KINDS)


# -- logs.md ---------------------------------------------------------------------------------------

AT_MINIMUM = texts.Situation(
    phase="training", kind="device", batch_size=2, min_batch_size=2, retries=3, max_retries=3
)


def situation(**changes: Any) -> texts.Situation:
    known = {field.name: getattr(AT_MINIMUM, field.name) for field in fields(AT_MINIMUM)}
    return texts.Situation(**(known | changes))


def every_line() -> list[str]:
    lines = [texts.total_time(315)]
    for phase, batches in (("training", 10), ("validation", 3)):
        lines.append(texts.phase_start(phase, batches=batches, batch_size=64))
        lines += texts.retry_lines(phase, attempt=1, max_retries=3, previous=64, batch_size=32)
        for rung in RUNGS:
            lines += texts.retry_lines(phase, attempt=4, max_retries=3, previous=2, batch_size=2, rung=rung)
        lines.append(texts.phase_complete(phase, retries=2, batch_size=16))
        lines.append(texts.phase_complete(phase, retries=0, batch_size=64))
        lines.append(texts.phase_duration(phase, 270))
    original = "CUDA out of memory. Tried to allocate 3.75 MiB."
    failures = [
        texts.failure_at_minimum(AT_MINIMUM),
        texts.failure_at_minimum(situation(retries=1, on_cpu=True, rungs_tried=RUNGS)),
        texts.failure_at_minimum(situation(kind="shm")),
        texts.failure_exhausted(situation(batch_size=8), original_error=original),
        texts.failure_exhausted(situation(batch_size=64, retries=0, max_retries=0), original_error=original),
        texts.failure_exhausted(situation(batch_size=4, retries=10, max_retries=10), original_error=original),
    ]
    for failure in failures:
        lines += texts.error_line(failure).splitlines()
    return [line.rstrip() for line in lines]


def test_every_log_line_is_documented_word_for_word() -> None:
    documented = {line.rstrip() for line in page("logs.md").splitlines()}
    assert [line for line in every_line() if line not in documented] == []


def test_exit_statuses_are_documented() -> None:
    listed = {row[0]: row[2] for row in rows(section(page("logs.md"), "## Exit statuses"), r"\d+")}
    assert {"0", "130"} | {str(e.exit_status) for e in (FoxrayError, UserError, MemoryExhausted)} == set(
        listed
    )
    assert listed[str(MemoryExhausted.exit_status)] == "`oom`"


# -- architecture.md ------------------------------------------------------------------------------


def imported_folders(tree: ast.AST) -> Iterator[str]:
    """Folders of foxray that a module imports when it runs, not only for the type checker."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("foxray."):
            yield str(node.module).split(".")[1]
        yield from imported_folders(node)


def test_folders_import_only_those_below_them_in_the_documented_table() -> None:
    table = section(page("architecture.md"), "## Who may import whom")
    levels = [re.findall(r"foxray/([a-z]+)/", row[0]) for row in rows(table, r"`foxray/.+")]
    height = {folder: -level for level, folders in enumerate(levels) for folder in folders}
    package = REPOSITORY / "foxray"
    with_code = {file.parent.name for file in package.glob("*/*.py") if file.stat().st_size}
    assert with_code <= height.keys()
    for file in package.glob("*/*.py"):
        own = file.parent.name
        for other in set(imported_folders(ast.parse(file.read_text()))) - {own, "errors"}:
            assert height[other] < height[own], f"{own}/{file.name} imports {other}"


# -- deployment.md and all pages -------------------------------------------------------------------


def test_the_environment_of_ray_is_documented() -> None:
    below = page("deployment.md").split("## Environment variables that foxray sets for Ray", 1)[1]
    documented = {row[0].strip("`"): row[1] for row in rows(below, "`[A-Z0-9_]+`")}
    assert documented == RAY_ENVIRONMENT


def anchors(path: Path) -> set[str]:
    """The fragments that GitHub gives the headings of a page."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(path: Path) -> None:
    prose = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if "://" in target:
            continue
        file, _, fragment = target.partition("#")
        aim = (path.parent / file).resolve() if file else path
        # Pictures are drawn from the demo's output by `make picture`.
        assert aim.exists() or aim.suffix == ".svg", f"{path.name}: {target}"
        assert not fragment or fragment in anchors(aim), f"{path.name}: {target}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages_speak_of_the_project_alone(path: Path) -> None:
    assert "shared/" not in path.read_text()
