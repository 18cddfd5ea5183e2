"""Events: their JSON form, what of a newer or torn form is accepted, and what makes two of them one."""

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ledger_samples import eventful_run

from foxray.ledger import events as ev
from foxray.ledger.events import MalformedEvent, from_json, to_json
from foxray.ledger.store import file_name

# Floats without NaN, since NaN differs from itself; NaN has a test of its own.
_json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
_by_hint: dict[str, st.SearchStrategy[Any]] = {
    "str": st.text(),
    "int": st.integers(min_value=-(2**63), max_value=2**63),
    "float": st.floats(allow_nan=False),
    "bool": st.booleans(),
    "list[int]": st.lists(st.integers(), max_size=4),
    "dict[str, Any]": st.dictionaries(st.text(max_size=5), _json_values, max_size=4),
    "dict[str, int]": st.dictionaries(st.text(max_size=3), st.integers(), max_size=3),
    "dict[str, float]": st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False), max_size=3),
}
_envelope = {
    "run_id": st.text(min_size=1),
    "execution": st.integers(0, 10_000),
    "event_id": st.text(min_size=1),
    "time_utc": st.datetimes(min_value=ev.datetime(1970, 1, 1)).map(
        lambda moment: ev.format_utc(moment.replace(tzinfo=ev.UTC))
    ),
    "schema": st.integers(1, 99),
    "outcome": st.sampled_from(ev.OUTCOMES),
}


@st.composite
def any_event(draw: st.DrawFn) -> ev.Event:
    kind = draw(st.sampled_from(list(ev.KINDS.values())))
    values = {}
    for field in fields(kind):
        if field.name in _envelope:
            values[field.name] = draw(_envelope[field.name])
            continue
        hint = getattr(field.type, "__name__", None) or str(field.type)
        hint = str(field.type) if "[" in str(field.type) or "|" in str(field.type) else hint
        parts = [part.strip().replace("typing.", "") for part in hint.split("|")]
        values[field.name] = draw(
            st.one_of([st.none() if part == "None" else _by_hint[part] for part in parts])
        )
    return kind(**values)


@settings(max_examples=60, deadline=None)
@given(any_event())
def test_json_gives_back_the_event(event: ev.Event) -> None:
    assert from_json(to_json(event)) == event


@settings(max_examples=60, deadline=None)
@given(any_event())
def test_json_is_standard_and_file_names_are_safe(event: ev.Event) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads(to_json(event), parse_constant=refuse)["kind"] == event.kind
    name = file_name(event)
    assert len(name.encode()) < 255 and name.isascii() and not set(name) & set('/\\:*?"<>| \0')


def test_nan_and_infinity_survive() -> None:
    event = ev.EpochEnded(
        run_id="r",
        execution=1,
        epoch=1,
        step=2,
        validation_loss=math.nan,
        metrics={"a": math.inf, "b": -math.inf},
    )
    back = from_json(to_json(event))
    assert isinstance(back, ev.EpochEnded) and back.validation_loss is not None
    assert math.isnan(back.validation_loss) and back.metrics == event.metrics


def test_scalars_of_arrays_and_paths_are_written_as_plain_values() -> None:
    numpy = pytest.importorskip("numpy")
    event = ev.RunCreated(
        run_id="r",
        execution=0,
        model="tft",
        config={"a": numpy.float32(0.5), "n": numpy.int64(3), "p": Path("x/y"), "nan": numpy.float32("nan")},
        foxray_version="0",
    )
    back = from_json(to_json(event))
    assert isinstance(back, ev.RunCreated)
    assert [back.config[key] for key in "anp"] == [0.5, 3, "x/y"] and math.isnan(back.config["nan"])
    with pytest.raises(TypeError, match="no place in the ledger"):
        to_json(ev.RunCreated(run_id="r", execution=0, model="m", config={"o": object()}, foxray_version="0"))


def test_a_newer_writers_fields_are_passed_over_and_its_kinds_kept() -> None:
    plain = json.loads(to_json(ev.CheckpointWritten(run_id="r", execution=1, step=1, epoch=1, path="p")))
    assert isinstance(from_json(json.dumps(plain | {"novel": 1, "schema": 2}).encode()), ev.CheckpointWritten)
    unknown = from_json(json.dumps(plain | {"kind": "moon_phase"}).encode())
    assert isinstance(unknown, ev.UnknownEvent) and unknown.unknown_kind == "moon_phase"
    assert unknown.fields["path"] == "p"
    assert from_json(to_json(unknown)) == unknown


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"step": None}, "step is None"),
        ({"step": "7"}, "step is '7'"),
        ({"time_utc": "yesterday"}, "time_utc"),
        ({"time_utc": "2026-13-31T09:05:00.000000Z"}, "checkpoint_written"),
        ({"kind": ""}, "no kind"),
        ({"execution": -1}, "execution -1"),
    ],
)
def test_wrong_values_make_it_foreign(change: dict[str, Any], reason: str) -> None:
    plain = json.loads(to_json(ev.CheckpointWritten(run_id="r", execution=1, step=1, epoch=1, path="p")))
    with pytest.raises(MalformedEvent, match=reason):
        from_json(json.dumps(plain | change).encode())


def test_a_missing_required_field_or_torn_bytes_are_malformed() -> None:
    data = to_json(ev.CheckpointWritten(run_id="r", execution=1, step=1, epoch=1, path="p"))
    plain = json.loads(data)
    for name in ("step", "run_id", "event_id", "time_utc"):
        with pytest.raises(MalformedEvent, match=f"{name} is missing"):
            from_json(json.dumps({k: v for k, v in plain.items() if k != name}).encode())
    for length in range(len(data)):
        with pytest.raises(MalformedEvent):
            from_json(data[:length])
    for foreign in (b"[]", b"7", b"\xff\xfe", b"null", b"[" * 100_000):
        with pytest.raises(MalformedEvent):
            from_json(foreign)


def test_what_is_said_twice_about_one_incident_has_one_id() -> None:
    about = (
        ev.RecoveryMeasured | ev.IncidentRecorded | ev.DecisionRecorded | ev.ExecutionEnded | ev.RunCreated
    )
    first = [event.event_id for event in eventful_run() if isinstance(event, about)]
    again = [event.event_id for event in eventful_run() if isinstance(event, about)]
    assert first == again and len(set(first)) == len(first)
    others = [e.event_id for _ in range(2) for e in eventful_run() if not isinstance(e, about)]
    assert len(set(others)) == len(others)


def test_times_of_one_process_never_go_back(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter(
        [ev.datetime(2090, 1, 1, tzinfo=ev.UTC)] * 3 + [ev.datetime(2080, 1, 1, tzinfo=ev.UTC)] * 3
    )

    class SetBack(ev.datetime):
        @classmethod
        def now(cls, tz: object = None) -> "SetBack":
            return next(moments)  # type: ignore[return-value]

    clock = ev._Clock()
    monkeypatch.setattr(ev, "datetime", SetBack)
    times = [clock() for _ in range(6)]
    assert times == sorted(times) and len(set(times)) == len(times)


def test_an_outcome_that_does_not_exist_is_refused_where_it_is_built() -> None:
    with pytest.raises(ValueError, match="success, oom, failed, cancelled"):
        ev.ExecutionEnded(
            run_id="r", execution=1, outcome="great", oom_retries=0, duration_seconds=1.0, message=""
        )
