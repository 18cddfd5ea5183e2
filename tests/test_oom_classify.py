"""Which exceptions are memory failures: real texts, real types, and everything they may be wrapped in."""

import csv
import dataclasses
import errno
import io
import json
import pickle
import subprocess
import sys
import time
import timeit
from collections.abc import Callable
from pathlib import Path

import pytest

from foxray.errors import MemoryExhausted
from foxray.oom import (
    broken_collective,
    classify,
    context_lost,
    impossible_request,
    low_memory_bytes,
)

CORPUS = Path(__file__).resolve().parents[2] / "shared" / "corpus" / "oom-messages.tsv"
GIB = 1 << 30

# Stand-ins with the qualified names of libraries that are not installed here; the real torch and Ray types
# are used below.
OutOfResources = type("OutOfResources", (Exception,), {"__module__": "triton"})
CupyOutOfMemoryError = type("OutOfMemoryError", (MemoryError,), {"__module__": "cupy.cuda.memory"})
XlaRuntimeError = type("XlaRuntimeError", (RuntimeError,), {"__module__": "jaxlib.xla_extension"})
ResourceExhaustedError = type(
    "ResourceExhaustedError", (Exception,), {"__module__": "tensorflow.python.framework.errors_impl"}
)

TORCH_TEXT = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 4.00 GiB of which 12.50 "
    "MiB is free. Process 4121 has 3.60 GiB memory in use."
)

DEVICE_TEXTS = [
    # The eight patterns that people know from their logs.
    "out of memory",
    "status: out_of_memory",
    "OOM",
    "CUDA error 2",
    "CUDA error 2: out of memory",
    "Failed to allocate 512 MiB on device",
    "failed to allocate",
    "CUDA_ERROR_OUT_OF_MEMORY",
    "cudaErrorMemoryFull",
    "memory allocation failed",
    # Frameworks and libraries.
    "OOM when allocating tensor with shape[256,60,225] and type float on /device:GPU:0 by GPU_0_bfc",
    "CUDA OOM: batch of 64",
    "job failed with OOM",
    "oom detected in backward",
    "[rank1]: GPU 0 ran out of memory",
    "model.forward raised: Triton Error [CUDA]: out of memory",
    "Memory allocation failed for tensor of 512 MiB",
    "not enough memory on device: 2 GiB needed",
    "DriverError(CUDA_ERROR_OUT_OF_MEMORY, out of memory)",
    "CUDA driver error: out of memory",
    "HIP error: out of memory",
    "hipErrorOutOfMemory",
    "Error code=2(cudaErrorMemoryAllocation)",
    "[2] Call to cuMemAlloc results in CUDA_ERROR_OUT_OF_MEMORY",
    "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 4294967296 bytes.",
    "RESOURCE_EXHAUSTED: Failed to allocate request for 2.0GiB (2147483648B) on device ordinal 0",
    "NCCL error: unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'",
    "CUDA error: CUSPARSE_STATUS_ALLOC_FAILED when calling `cusparseCreate(handle)`",
    "training step failed: CUDA out of memory. Tried to allocate 20.00 MiB",
    "Caught RuntimeError in DataLoader worker process 0.\nOriginal Traceback (most recent call last):\n"
    '  File "loop.py", line 3, in step\n    x = y.cuda()\nRuntimeError: CUDA error: out of memory\n',
]
HOST_TEXTS = [
    "std::bad_alloc",
    "unable to mmap 1073741824 bytes from file <weights.bin>: Cannot allocate memory (12)",
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
    "allocate 68719476736 bytes. Error code 12 (Cannot allocate memory)",
    "OOM when allocating tensor with shape[9] and type float on /job:localhost/device:CPU:0 by allocator cpu",
]
SHM_TEXTS = [
    "unable to write to file </torch_4711_99_0>: No space left on device (28)",
    "DataLoader worker (pid(s) 3) exited: insufficient shared memory (shm)",
    "DataLoader worker (pid 46794) is killed by signal: Bus error. ",
]
OTHER_TEXTS = [
    "unknown feature column 'room_temperature_zoom'",
    "bloom filter of the mushroom broom",
    "symbol OOM not found in the catalogue",
    "column OOM: not numeric",
    "history of run 7: OOM, OOM, success",
    "metric oom_retries_total is missing",
    "oom_score_adj is not writable",
    "OOM recovery is switched off",
    "use PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True to avoid out of memory",
    "see https://pytorch.org/docs/stable/notes/faq.html#my-model-reports-cuda-runtime-error-2-out-of-memory",
    "the log says CUDA out of memory",
    "WARNING: CUDA out of memory was handled",
    "checkpoint lost: the previous attempt ended with CUDA out of memory",
    "potential causes: (1) The process is killed by SIGKILL by OOM killer due to high memory usage",
    "CUDA error 209: no kernel image is available",
    "CUDA error: 2 devices found, 4 wanted",
    "failed to allocate port 8265",
    "failed to allocate a placement group in time",
    "upload failed: 500 (last log lines: 'WARN CUDA out of memory, retrying with 32' 'INFO recovered')",
    "upload failed; log: CUDA out of memory, retrying with 32; then recovered",
    "assertion failed after recovering from an earlier CUDA out of memory",
    "retried after CUDA_ERROR_OUT_OF_MEMORY; then the loss became nan",
    "the model would run out of memory at this size; choose another",
    "memory format option is only supported by strided tensors",
    "CUDA error: no kernel image is available for execution on the device",
    "could not load libgomp.so.1: cannot allocate memory in static TLS block",
    "CUDA error: device-side assert triggered",
    "RESOURCE_EXHAUSTED: Received message larger than max (5 vs. 4)",
]
CASES: list[Callable[[str], str]] = [str, str.upper, str.lower, str.title]


def corpus() -> list[tuple[str, str, str]]:
    """(expected, type, text) of every row, or nothing where the file is not here."""
    if not CORPUS.exists():
        return []
    rows = csv.DictReader(io.StringIO(CORPUS.read_text()), delimiter="\t")
    return [(row["expected"], row["exception_type"], row["message"]) for row in rows]


def build(name: str, text: str) -> BaseException:
    """The exception of this type, the real one where its library is installed."""
    if name.startswith("torch."):
        import torch

        return getattr(torch, name.removeprefix("torch."))(text)
    if name == "ray.exceptions.OutOfMemoryError":
        from ray.exceptions import OutOfMemoryError

        return OutOfMemoryError(text)
    if name == "triton.OutOfResources":
        return OutOfResources(text)
    return {kind.__name__: kind for kind in (RuntimeError, MemoryError, OSError, ValueError, KeyError)}[name](
        text
    )


def raised_from(cause: BaseException, *, outer: BaseException | None = None) -> BaseException:
    """`outer` (a RuntimeError if not given), raised from `cause`."""
    try:
        raise outer or RuntimeError("training step failed") from cause
    except BaseException as error:  # noqa: BLE001 - the test wants the object, whatever it is
        return error


def ray_wrapped(cause: BaseException) -> list[BaseException]:
    """Everything in which Ray may hand over a failure of a worker."""
    from ray.exceptions import RayTaskError
    from ray.train.v2._internal.exceptions import UserExceptionWithTraceback, WorkerHealthCheckFailedError
    from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

    task_error = RayTaskError("loop", "no traceback", cause, proctitle="p", pid=1, ip="127.0.0.1")
    unhealthy = WorkerHealthCheckFailedError("worker is unhealthy", task_error)
    return [
        task_error,
        task_error.as_instanceof_cause(),
        unhealthy,
        WorkerGroupError("workers failed", {1: cause}),
        WorkerGroupError("workers failed", {1: unhealthy}),
        WorkerGroupError("workers failed", {1: UserExceptionWithTraceback(cause, "Traceback ...")}),
        ControllerError(unhealthy),
        raised_from(WorkerGroupError("workers failed", {1: cause}), outer=RuntimeError("the run failed")),
    ]


def kind_of(exc: BaseException, *, free_bytes: int | None = None, total_bytes: int | None = None) -> str:
    incident = classify(exc, free_bytes=free_bytes, total_bytes=total_bytes)
    return "none" if incident is None else incident.kind


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("expected", "name", "text"), corpus())
def test_corpus(expected: str, name: str, text: str, case: Callable[[str], str]) -> None:
    for wording in (case(text), case(text.replace("\\n", "\n"))):
        for exc in (build(name, wording), raised_from(build(name, wording))):
            if expected == "confirm":
                assert kind_of(exc) == "none"
                assert kind_of(exc, free_bytes=3 * GIB, total_bytes=4 * GIB) == "none"
                assert kind_of(exc, free_bytes=20 << 20, total_bytes=4 * GIB) == "device"
            else:
                assert kind_of(exc) == expected
                # Low memory makes no memory failure of a bug.
                assert kind_of(exc, free_bytes=0, total_bytes=4 * GIB) == expected


@pytest.mark.parametrize(("expected", "name", "text"), corpus())
def test_corpus_wrapped_by_ray_and_by_two_arguments(expected: str, name: str, text: str) -> None:
    pytest.importorskip("ray")
    wrapped = ray_wrapped(build(name, text)) + ray_wrapped(raised_from(build(name, text)))
    if expected != "confirm":
        wrapped += [RuntimeError("step 7 failed", build(name, text))]
        if name == "RuntimeError":
            wrapped += [RuntimeError(text, 7), RuntimeError(7, text)]
    for exc in wrapped:
        low = kind_of(exc, free_bytes=0, total_bytes=4 * GIB)
        assert low == ("device" if expected == "confirm" else expected)
        assert kind_of(exc) == ("none" if expected == "confirm" else expected)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("expected", "texts"),
    [("device", DEVICE_TEXTS), ("host", HOST_TEXTS), ("shm", SHM_TEXTS), ("none", OTHER_TEXTS)],
)
def test_texts(expected: str, texts: list[str], case: Callable[[str], str]) -> None:
    for text in texts:
        for exc in (
            RuntimeError(case(text)),
            Exception(case(text)),
            RuntimeError(case(text), 2),
            raised_from(RuntimeError(case(text))),
            ExceptionGroup("two tasks failed", [ValueError("x"), RuntimeError(case(text))]),
        ):
            assert kind_of(exc) == expected, exc


@pytest.mark.parametrize(
    "kind", [ValueError, TypeError, KeyError, AttributeError, NotImplementedError, ImportError]
)
def test_texts_of_other_types_do_not_count(kind: type[Exception]) -> None:
    for text in DEVICE_TEXTS + HOST_TEXTS:
        assert classify(kind(text)) is None
        assert kind_of(kind(text), free_bytes=0) == "none"


def test_types_decide_whatever_the_text() -> None:
    torch = pytest.importorskip("torch")
    assert kind_of(torch.OutOfMemoryError("Ein anderer Wortlaut")) == "device"
    assert kind_of(type("OurOom", (torch.OutOfMemoryError,), {})("subclass")) == "device"
    assert kind_of(MemoryError()) == "host"
    assert kind_of(CupyOutOfMemoryError("Out of memory allocating 1,024 bytes")) == "device"
    assert kind_of(MemoryError("std::bad_alloc: out_of_memory: CUDA error at: device_buffer.hpp")) == "device"
    assert (
        kind_of(XlaRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8 bytes."))
        == "device"
    )
    assert kind_of(ResourceExhaustedError("OOM when allocating tensor with shape[2]")) == "device"
    refused = torch.AcceleratorError("another wording")
    refused.error_code = 2
    assert kind_of(refused) == "device"
    refused.error_code = 700
    assert classify(refused) is None
    assert context_lost(refused)


def test_operating_system_errors() -> None:
    assert kind_of(OSError(errno.ENOMEM, "Cannot allocate memory")) == "host"
    assert kind_of(OSError(errno.ENOMEM, "Nicht genug Speicher")) == "host"
    assert kind_of(OSError(errno.ENOSPC, "No space left on device", "/dev/shm/torch_1")) == "shm"
    assert kind_of(OSError("[Errno 28] No space left on device: '/dev/shm/torch_1'")) == "shm"
    assert classify(OSError(errno.ENOSPC, "No space left on device", "/data/checkpoint")) is None
    assert classify(OSError("PUT failed: CUDA out of memory")) is None


def test_amounts_are_read_from_the_text() -> None:
    torch = pytest.importorskip("torch")
    incident = classify(torch.OutOfMemoryError(TORCH_TEXT), free_bytes=1, total_bytes=2)
    assert incident is not None
    assert incident.exception_type == "torch.OutOfMemoryError"
    assert incident.message == TORCH_TEXT
    assert incident.bytes_requested == 20 << 20
    assert incident.bytes_free == int(12.5 * (1 << 20))
    assert incident.bytes_total == 4 << 30
    assert incident.fresh_reason is None
    given = classify(RuntimeError("CUDA error: out of memory"), free_bytes=5, total_bytes=9)
    assert given is not None and (given.bytes_requested, given.bytes_free, given.bytes_total) == (None, 5, 9)
    host = classify(RuntimeError(HOST_TEXTS[2]))
    assert host is not None and host.bytes_requested == 68719476736
    old = classify(
        RuntimeError("CUDA out of memory. Tried to allocate 1.50 GiB (GPU 1; 11.17 GiB total capacity)")
    )
    assert old is not None and old.bytes_requested == 3 << 29 and old.bytes_total == int(11.17 * GIB)


def test_incident_travels() -> None:
    incident = classify(RuntimeError(TORCH_TEXT))
    assert incident is not None
    assert pickle.loads(pickle.dumps(incident)) == incident
    assert json.loads(json.dumps(dataclasses.asdict(incident)))["bytes_total"] == 4 * GIB


def test_a_long_text_is_not_cut_silently() -> None:
    incident = classify(RuntimeError("CUDA out of memory. " + "x" * 10_000))
    assert incident is not None
    assert len(incident.message) < 5_000
    assert incident.message.endswith("more characters)")


def test_contexts_and_cycles() -> None:
    try:
        try:
            raise RuntimeError(TORCH_TEXT)
        except RuntimeError:
            raise ValueError("while cleaning up")  # noqa: B904 - the context is the point
    except ValueError as error:
        assert kind_of(error) == "device"
        error.__suppress_context__ = True
        assert classify(error) is None
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert classify(first) is None
    second.__context__ = MemoryError("std::bad_alloc")
    second.__suppress_context__ = False
    assert kind_of(first) == "host"
    deep: BaseException = RuntimeError(TORCH_TEXT)
    for _ in range(5_000):
        outer = ValueError("outer")
        outer.__cause__ = deep
        deep = outer
    assert kind_of(deep) == "device"


def test_nested_groups() -> None:
    inner = ExceptionGroup("inner", [KeyError("bloom"), raised_from(RuntimeError(TORCH_TEXT))])
    assert kind_of(ExceptionGroup("outer", [ValueError("x"), inner])) == "device"
    assert classify(ExceptionGroup("CUDA out of memory", [ValueError("x")])) is None


def test_an_interrupt_or_a_decided_failure_is_none() -> None:
    for outer in (KeyboardInterrupt(), SystemExit(1), MemoryExhausted("Training OOM after 3 retries")):
        assert classify(raised_from(RuntimeError(TORCH_TEXT), outer=outer)) is None


def test_ray_memory_monitor_means_fresh_workers() -> None:
    exceptions = pytest.importorskip("ray.exceptions")
    killed = exceptions.OutOfMemoryError("Task was killed due to the node running low on memory.")
    for exc in [killed, *ray_wrapped(killed)]:
        incident = classify(exc)
        assert incident is not None
        assert (incident.kind, incident.fresh_reason) == ("host", "process killed")


def test_ray_tells_the_rank() -> None:
    pytest.importorskip("ray")
    from ray.train.v2.api.exceptions import WorkerGroupError

    peer = RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:40000")
    incident = classify(WorkerGroupError("x", {0: peer, 3: raised_from(RuntimeError(TORCH_TEXT))}))
    assert incident is not None
    assert incident.rank == 3
    assert (incident.fresh_reason or "").startswith("broken collective")


def test_a_cause_that_ray_dropped_is_found_in_its_traceback() -> None:
    exceptions = pytest.importorskip("ray.exceptions")
    import traceback

    torch = pytest.importorskip("torch")
    for cause, expected in (
        (torch.OutOfMemoryError(TORCH_TEXT), "device"),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be late"), "device"),
        (KeyError("bloom"), "none"),
    ):
        error = raised_from(cause, outer=ValueError("step failed"))
        text = "".join(traceback.format_exception(error))
        sent = exceptions.RayTaskError(
            "loop", text, ValueError("step failed"), proctitle="p", pid=1, ip="127.0.0.1"
        )
        assert sent.cause.__cause__ is None
        assert kind_of(sent) == expected
    decided = exceptions.RayTaskError(
        "loop", text, MemoryExhausted("all tried"), proctitle="p", pid=1, ip="127.0.0.1"
    )
    assert classify(decided) is None


@pytest.mark.parametrize(
    "text",
    [
        "Storage size calculation overflowed with sizes=[1152921504606846976, 16]",
        "CUDA out of memory. Tried to allocate more than 1EB memory.",
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
        "to allocate 18446744073709551104 bytes. Error code 12 (Cannot allocate memory)",
        "Unable to allocate 2.00 EiB for an array with shape (1, 2) and data type float64",
    ],
)
def test_impossible_requests(text: str) -> None:
    kinds: list[type[BaseException]] = [RuntimeError, MemoryError]
    torch = pytest.importorskip("torch")
    for kind in [*kinds, torch.OutOfMemoryError]:
        for case in CASES:
            exc = raised_from(kind(case(text)))
            assert classify(exc, free_bytes=0) is None
            assert impossible_request(exc) == case(text)
    assert impossible_request(RuntimeError(TORCH_TEXT)) is None


def test_real_impossible_request_of_torch() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(RuntimeError) as caught:
        torch.empty((1 << 60, 16))
    assert impossible_request(caught.value)
    with pytest.raises(RuntimeError) as ordinary:
        torch.empty(1 << 55, dtype=torch.uint8)
    assert impossible_request(ordinary.value) is None
    assert kind_of(ordinary.value) == "host"


def test_lost_contexts() -> None:
    for text in (
        "CUDA error: device-side assert triggered",
        "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be",
        "CUDA error: unspecified launch failure",
        "HIP error: an illegal memory access was encountered",
        "cudaErrorIllegalAddress",
    ):
        for case in CASES:
            assert context_lost(raised_from(RuntimeError(case(text))))
    assert not context_lost(RuntimeError("CUDA error: out of memory"))
    assert not context_lost(ValueError("an illegal memory access was encountered"))
    after = raised_from(
        RuntimeError(TORCH_TEXT), outer=RuntimeError("CUDA error: unspecified launch failure")
    )
    incident = classify(after)
    assert incident is not None
    assert incident.fresh_reason == "CUDA context lost: CUDA error: unspecified launch failure"
    alone = classify(RuntimeError("CUDA error: out of memory"))
    assert alone is not None and alone.fresh_reason is None


def test_broken_collectives() -> None:
    torch = pytest.importorskip("torch")
    for text in (
        "[../third_party/gloo/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:40000",
        "Read error [127.0.0.1]:40000: Connection reset by peer",
        "NCCL error in: ProcessGroupNCCL.cpp:1691, remote process exited or there was a network error",
        "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting",
    ):
        for exc in (
            RuntimeError(text),
            torch.distributed.DistBackendError(text),
            raised_from(RuntimeError(text)),
        ):
            assert broken_collective(exc)
            assert classify(exc) is None
    assert not broken_collective(ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"))
    assert not broken_collective(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    nccl = classify(
        RuntimeError("NCCL error in: x.cpp:1, unhandled cuda error\nFailed to CUDA calloc async 608 bytes")
    )
    assert nccl is not None and nccl.bytes_requested == 608
    assert (nccl.fresh_reason or "").startswith("broken collective")


def test_evidence_threshold() -> None:
    assert low_memory_bytes(None) == 512 << 20
    assert low_memory_bytes(4 * GIB) == 4 * GIB // 10
    assert low_memory_bytes(80 * GIB) == GIB
    exc = RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`")
    assert kind_of(exc, free_bytes=low_memory_bytes(4 * GIB) - 1, total_bytes=4 * GIB) == "device"
    assert kind_of(exc, free_bytes=low_memory_bytes(4 * GIB), total_bytes=4 * GIB) == "none"


def test_imports_neither_torch_nor_ray() -> None:
    code = (
        "import sys, foxray.oom as o; o.classify(RuntimeError('CUDA out of memory'));"
        "print(sorted({'torch', 'ray', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "exc", [ValueError("unknown column 'x'"), RuntimeError("loss is nan"), RuntimeError(TORCH_TEXT)]
)
def test_fast(exc: Exception) -> None:
    seconds = min(timeit.repeat(lambda: classify(exc), number=20, repeat=10)) / 20
    assert seconds < 1e-3


def test_a_huge_text_is_no_trap() -> None:
    assert kind_of(RuntimeError("log line\n" * 50_000 + TORCH_TEXT)) == "device"
    for text in (
        "a " * 200_000 + "memory",
        "(" * 100_000 + " oom x" * 20_000,
        "failed to allocate " * 20_000,
    ):
        start = time.perf_counter()
        classify(RuntimeError(text))
        assert time.perf_counter() - start < 1.0
