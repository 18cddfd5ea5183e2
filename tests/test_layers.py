"""The shape of the package: who may import whom, and what an import may cost."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import foxray

PACKAGE = Path(foxray.__file__).parent

# Each folder may import only folders in later rows.
LAYERS = [
    {"cli"},
    {"driver"},
    {"training"},
    {"workloads"},
    {"monitoring"},
    {"models", "data"},
    {"memory"},
    {"ledger"},
    {"oom"},
]
RANK = {folder: rank for rank, row in enumerate(LAYERS) for folder in row}


def imported_folders(file: Path) -> set[str]:
    """Folders of foxray that a file imports when it runs (not those under `if TYPE_CHECKING`)."""
    tree = ast.parse(file.read_text())
    typing_only = {
        child
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for child in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if node in typing_only:
            continue
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "foxray" and len(parts) > 1 and parts[1] in RANK:
                found.add(parts[1])
    return found


def test_every_folder_imports_only_folders_below_it() -> None:
    offences = [
        f"{file.relative_to(PACKAGE)} imports {other}"
        for folder, rank in RANK.items()
        for file in (PACKAGE / folder).rglob("*.py")
        for other in imported_folders(file)
        if other != folder and RANK[other] <= rank
    ]
    assert offences == []


@pytest.mark.parametrize("arguments", [["-c", "import foxray"], ["-m", "foxray", "--help"]])
def test_light_starts_import_neither_torch_nor_ray(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments], capture_output=True, text=True, check=True
    )
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "foxray" in imported
    assert not imported & {"torch", "ray", "pyarrow", "numpy", "pandas", "talib"}


def test_unknown_attribute_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = foxray.no_such_name
