"""Sorting what `fit()` raised, with Ray's real exception types."""

import pytest
import ray.exceptions
import torch
from ray.train import WorkerGroupError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

from foxray.driver.failures import sort_failures
from foxray.errors import MemoryExhausted, UserError
from foxray.training.authority import Cancelled, Rescheduled


def group(**by_rank: Exception) -> WorkerGroupError:
    return WorkerGroupError("failed", {int(k[1:]): v for k, v in by_rank.items()})


def died(text: str) -> WorkerHealthCheckFailedError:
    inner = ray.exceptions.ActorDiedError()
    inner.error_msg = text
    return WorkerHealthCheckFailedError("health check", failure=inner)


def test_a_rank_that_left_in_order_and_its_collateral() -> None:
    broken = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:4711")
    failures = sort_failures(group(r0=broken, r1=Rescheduled("memory not back at baseline")))
    assert failures.rescheduled == [1]
    assert failures.collateral == [0]
    assert failures.other == {}


def test_giving_up_carries_its_text() -> None:
    failures = sort_failures(group(r0=MemoryExhausted("Training OOM: batch_size=2")))
    assert str(failures.exhausted) == "Training OOM: batch_size=2"


def test_an_oom_that_no_worker_could_report() -> None:
    failures = sort_failures(
        group(r1=torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    )
    assert failures.incidents[1].kind == "device"
    assert failures.incidents[1].fresh_reason is not None


def test_rays_memory_monitor_is_a_host_incident() -> None:
    inner = ray.exceptions.OutOfMemoryError("Task was killed due to the node running low on memory.")
    failures = sort_failures(group(r0=WorkerHealthCheckFailedError("health check", failure=inner)))
    assert failures.incidents[0].kind == "host"


def test_a_killed_process_is_a_host_incident_and_a_lost_node_is_not() -> None:
    failures = sort_failures(
        group(
            r0=died("The actor died unexpectedly before finishing this task. Worker exit type: SYSTEM_ERROR"),
            r1=died("The actor died because its node has died. Node Id: 42"),
        )
    )
    assert failures.incidents[0].fresh_reason == "process killed"
    assert list(failures.lost) == [1]


@pytest.mark.parametrize("bug", [ValueError("bug in the loop"), UserError("wrong input")])
def test_a_plain_bug_is_neither(bug: Exception) -> None:
    failures = sort_failures(group(r0=bug))
    assert failures.other == {0: bug}
    assert not failures.incidents and not failures.lost


def test_an_error_of_ray_itself_counts_for_rank_0() -> None:
    assert list(sort_failures(RuntimeError("placement group")).other) == [0]


def test_cancelled() -> None:
    assert sort_failures(group(r0=Cancelled("x"), r1=Cancelled("x"))).cancelled == [0, 1]
