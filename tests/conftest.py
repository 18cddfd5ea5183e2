"""What tests share: one Ray cluster for the session, data sets, and the command line as a subprocess."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # read when Ray is imported: loopback only

REPOSITORY = Path(__file__).resolve().parent.parent
SHARED = REPOSITORY.parent / "shared"


@pytest.fixture(scope="session")
def real_bars() -> Path:
    """Real one-minute futures bars, where they are at hand."""
    path = SHARED / "data" / "6E_FUT_2024-01_1m.parquet"
    if not path.exists():
        pytest.skip(f"{path} is not here")
    return path


@pytest.fixture(scope="session")
def synthetic_bars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five days of synthetic one-minute bars."""
    from foxray.data.synth import synth

    path = tmp_path_factory.mktemp("bars") / "bars.parquet"
    synth(path, days=5, seed=1)
    return path


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[str]:
    """Address of a local cluster with 4 CPUs and 2 declared GPUs (no test needs a real one)."""
    import ray

    from foxray.driver.cluster import RAY_ENVIRONMENT

    os.environ.update(RAY_ENVIRONMENT)
    paths = [REPOSITORY, REPOSITORY / "tests"]
    context = ray.init(
        address="local",
        num_cpus=4,
        num_gpus=2,
        _node_ip_address="127.0.0.1",
        log_to_driver=False,
        logging_level="ERROR",
        # Workers unpickle functions of test modules by name, so they must find these.
        runtime_env={"env_vars": RAY_ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(map(str, paths))}},
    )
    yield context.address_info["gcs_address"]
    ray.shutdown()


@pytest.fixture
def foxray_cli(ray_cluster: str, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs `foxray ARGS...` in an empty folder, on the shared cluster."""

    def run(*arguments: Any, timeout: float = 300, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "foxray", *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=timeout,
            env=os.environ | {"RAY_ADDRESS": ray_cluster} | env,
        )

    return run


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Fast tests first; tests for a GPU are skipped where there is none."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
    if any(item.get_closest_marker("gpu") for item in items):
        import torch

        if not torch.cuda.is_available():
            for item in items:
                if item.get_closest_marker("gpu"):
                    item.add_marker(pytest.mark.skip(reason="no CUDA device"))
