"""The policy: it always ends, stays within its limits, and answers the same history the same way."""

import pickle
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foxray.oom import Attempt, Decision, Incident, OomPolicy, next_batch_size

INCIDENT = Incident(
    kind="device", exception_type="torch.OutOfMemoryError", message="CUDA error 2: out of memory\nsecond line"
)
KILLED = Incident(
    kind="host",
    exception_type="ray.exceptions.OutOfMemoryError",
    message="killed",
    fresh_reason="process killed",
)


def failed(
    batch_size: int, *, phase: str = "training", rank: int = 0, incident: Incident | None = INCIDENT
) -> Attempt:
    return Attempt(phase=phase, rank=rank, batch_size=batch_size, incident=incident)


def play(policy: OomPolicy, start: int, fits: Callable[[int, Sequence[str]], bool]) -> list[Decision]:
    """Every decision until `fits(batch size, rungs entered)` or the policy gives up."""
    history, decisions, size, rungs = list[Attempt](), list[Decision](), start, list[str]()
    while not fits(size, rungs):
        history.append(failed(size))
        decision = policy.decide(history)
        assert policy.decide(list(history)) == decision
        decisions.append(decision)
        if decision.action == "give_up":
            break
        size = decision.batch_size
        rungs += [decision.rung] if decision.rung else []
        assert len(decisions) < 100, "it does not end"
    return decisions


def test_halves_until_it_fits() -> None:
    decisions = play(OomPolicy(), 64, lambda size, _: size <= 16)
    assert [one.batch_size for one in decisions] == [32, 16]
    assert [one.retries for one in decisions] == [1, 2]
    assert {(one.action, one.reason, one.rung, one.text) for one in decisions} == {
        ("retry_in_place", "shrunk", None, "")
    }


def test_gives_up_at_the_minimum() -> None:
    (*retries, last) = play(OomPolicy(), 8, lambda *_: False)
    assert [one.batch_size for one in retries] == [4, 2]
    assert (last.action, last.reason, last.batch_size, last.retries) == ("give_up", "at_minimum", 2, 2)
    assert "batch_size=2 (minimum=2)" in last.text


def test_the_minimum_is_named_before_the_retries() -> None:
    (*retries, last) = play(OomPolicy(min_batch_size=8), 64, lambda *_: False)
    assert [one.batch_size for one in retries] == [32, 16, 8]
    assert last.reason == "at_minimum"


def test_gives_up_when_the_retries_are_used_up() -> None:
    (*retries, last) = play(OomPolicy(), 512, lambda *_: False)
    assert [one.batch_size for one in retries] == [256, 128, 64]
    assert (last.reason, last.batch_size, last.retries) == ("retries_exhausted", 64, 3)
    assert "OOM after 3 retries (final batch_size=64)" in last.text
    assert "Original error: CUDA error 2: out of memory\n" in last.text


def test_halving_stops_at_the_minimum() -> None:
    assert next_batch_size(6, 4) == 4
    assert next_batch_size(64, 2) == 32
    assert next_batch_size(5, 1) == 2
    assert OomPolicy(min_batch_size=4).decide([failed(6)]).batch_size == 4


@pytest.mark.parametrize(("size", "minimum"), [(1, 1), (1, 2), (3, 4)])
def test_a_size_at_or_under_the_minimum_ends_and_does_not_grow(size: int, minimum: int) -> None:
    decision = OomPolicy(min_batch_size=minimum).decide([failed(size)])
    assert (decision.action, decision.reason, decision.batch_size) == ("give_up", "at_minimum", size)


def test_other_errors_are_never_retried() -> None:
    decision = OomPolicy(on_exhausted=("cpu",)).decide([failed(64), failed(32, incident=None)])
    assert (decision.action, decision.reason, decision.text) == ("give_up", "not_a_memory_error", "")


def test_recovery_switched_off() -> None:
    for ladder in ((), ("gradient-checkpointing",)):
        decision = OomPolicy(max_retries=0, on_exhausted=ladder).decide([failed(64)])
        assert (decision.action, decision.reason, decision.retries) == ("give_up", "recovery_off", 0)
        assert "Original error: CUDA error 2" in decision.text


def test_fresh_workers_only_where_the_incident_asks() -> None:
    history = [failed(64, incident=KILLED)]
    assert OomPolicy().decide(history).action == "fresh_workers"
    history.append(failed(32))
    decision = OomPolicy().decide(history)
    assert (decision.action, decision.retries) == ("retry_in_place", 2)


def test_retries_are_counted_by_phase_and_rank() -> None:
    policy = OomPolicy(max_retries=1)
    history = [failed(64), failed(64, rank=1), failed(64, phase="validation")]
    for end in (1, 2, 3):
        decision = policy.decide(history[:end])
        assert (decision.action, decision.retries) == ("retry_in_place", 1)
        assert (decision.phase, decision.rank) == (history[end - 1].phase, history[end - 1].rank)
    assert policy.decide([*history, failed(32)]).reason == "retries_exhausted"
    assert policy.decide([*history, failed(64, rank=2)]).retries == 1


def test_attempts_that_ended_well_use_up_nothing() -> None:
    ended = failed(64, incident=None)
    assert OomPolicy(max_retries=1).decide([ended, ended, failed(64)]).retries == 1


def test_ladder_at_the_minimum() -> None:
    policy = OomPolicy(on_exhausted=("gradient-checkpointing", "cpu"))
    decisions = play(policy, 4, lambda *_: False)
    assert [(one.batch_size, one.rung, one.retries) for one in decisions[:-1]] == [
        (2, None, 1),
        (2, "gradient-checkpointing", 2),
        (2, "cpu", 3),
    ]
    last = decisions[-1]
    assert (last.reason, last.retries) == ("at_minimum", 3)
    assert "Tried at the minimum: gradient-checkpointing, cpu." in last.text
    assert "CPU" not in last.text.replace("cpu.", "")


def test_ladder_after_the_retries_goes_to_the_minimum() -> None:
    policy = OomPolicy(max_retries=1, on_exhausted=("gradient-checkpointing",))
    decisions = play(policy, 64, lambda size, rungs: bool(rungs) and size == 2)
    assert [(one.batch_size, one.rung) for one in decisions] == [(32, None), (2, "gradient-checkpointing")]


def test_rungs_that_change_nothing_are_skipped() -> None:
    policy = OomPolicy(on_exhausted=("gradient-checkpointing", "cpu"))
    assert policy.decide([failed(2)], on_cpu=True).rung == "gradient-checkpointing"
    assert policy.decide([failed(2), failed(2)], on_cpu=True).action == "give_up"
    assert policy.decide([failed(2)], initial_rungs=("gradient-checkpointing",)).rung == "cpu"
    host = [failed(2), failed(2, incident=KILLED)]
    assert policy.decide(host).action == "give_up"


def test_a_rung_under_the_minimum_does_not_grow_the_batch() -> None:
    decision = OomPolicy(min_batch_size=4, on_exhausted=("cpu",)).decide([failed(3)])
    assert (decision.rung, decision.batch_size) == ("cpu", 3)


def test_own_way_of_shrinking() -> None:
    policy = OomPolicy(shrink=lambda size, minimum: size - 10, max_retries=10)
    decisions = play(policy, 64, lambda size, _: size <= 34)
    assert [one.batch_size for one in decisions] == [54, 44, 34]
    assert OomPolicy(shrink=lambda size, _: size).decide([failed(64)]).batch_size == 63
    assert OomPolicy(shrink=lambda size, _: -5).decide([failed(64)]).batch_size == 2


def test_advice_stands_in_the_text() -> None:
    for size in (2, 512):
        policy = OomPolicy(max_retries=1)
        history = [failed(1024), failed(size)]
        assert "a batch of 6 would fit" in policy.decide(history, advice=("a batch of 6 would fit",)).text


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"min_batch_size": 0}, ("min_batch_size", "0", "1 to 64")),
        ({"min_batch_size": 65}, ("min_batch_size", "65", "1 to 64")),
        ({"min_batch_size": 2.5}, ("min_batch_size", "2.5", "1 to 64")),
        ({"max_retries": -1}, ("max_retries", "-1", "0 to 10")),
        ({"max_retries": 11}, ("max_retries", "11", "0 to 10")),
        ({"on_exhausted": "pray"}, ("on_exhausted", "'pray'", "gradient-checkpointing, cpu")),
        ({"shrink": "third"}, ("shrink", "'third'", "'halve'")),
    ],
)
def test_bad_settings_are_named(values: dict[str, object], named: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as caught:
        OomPolicy(**values)  # type: ignore[arg-type]
    for part in named:
        assert part in str(caught.value)


@pytest.mark.parametrize("values", [{"min_batch_size": 1}, {"min_batch_size": 64}, {"max_retries": 10}])
def test_limits_are_allowed(values: dict[str, int]) -> None:
    OomPolicy(**values)


@pytest.mark.parametrize(
    ("given_as", "rungs"),
    [
        ("raise", ()),
        ("", ()),
        (("raise",), ()),
        ("gradient-checkpointing, cpu", ("gradient-checkpointing", "cpu")),
        (["cpu", "cpu"], ("cpu",)),
        ("cpu,raise", ("cpu",)),
    ],
)
def test_on_exhausted_is_normalised(given_as: object, rungs: tuple[str, ...]) -> None:
    assert OomPolicy(on_exhausted=given_as).on_exhausted == rungs  # type: ignore[arg-type]


def test_policy_travels() -> None:
    policy = OomPolicy(on_exhausted=("cpu",))
    assert pickle.loads(pickle.dumps(policy)) == policy
    decision = policy.decide([failed(64)])
    assert pickle.loads(pickle.dumps(decision)) == decision


POLICIES = st.builds(
    OomPolicy,
    min_batch_size=st.integers(1, 64),
    max_retries=st.integers(0, 10),
    on_exhausted=st.sampled_from(
        [
            (),
            ("gradient-checkpointing",),
            ("cpu",),
            ("gradient-checkpointing", "cpu"),
            ("cpu", "gradient-checkpointing"),
        ]
    ),
)


@settings(deadline=None)
@given(policy=POLICIES, start=st.integers(1, 5000), largest=st.integers(0, 5000))
def test_it_ends_within_its_limits(policy: OomPolicy, start: int, largest: int) -> None:
    """A device on which only batches up to `largest` fit (0: none does)."""
    decisions = play(policy, start, lambda size, _: size <= largest)
    sizes = [start, *(one.batch_size for one in decisions if one.action != "give_up")]
    retries = [one for one in decisions if one.action != "give_up"]
    assert len([one for one in retries if one.rung is None]) <= policy.max_retries
    entered = [one.rung for one in retries if one.rung is not None]
    assert entered == list(policy.on_exhausted[: len(entered)])
    assert [one.retries for one in retries] == list(range(1, len(retries) + 1))
    for before, decision in zip(sizes, retries, strict=False):
        assert decision.batch_size >= min(policy.min_batch_size, start)
        assert decision.batch_size <= before
        assert decision.batch_size < before or decision.rung is not None
        assert decision.rung is None or decision.batch_size <= policy.min_batch_size
    given_up = bool(decisions) and decisions[-1].action == "give_up"
    assert given_up == (sizes[-1] > largest)
    if given_up:
        assert decisions[-1].text
        reachable = start >> policy.max_retries <= policy.min_batch_size
        reason = decisions[-1].reason
        if policy.on_exhausted and policy.max_retries:
            assert reason == "at_minimum"
        if reason == "at_minimum":
            assert sizes[-1] <= policy.min_batch_size
        if reason == "retries_exhausted":
            assert sizes[-1] > policy.min_batch_size and not reachable


@settings(deadline=None)
@given(
    policy=POLICIES,
    history=st.lists(
        st.builds(
            Attempt,
            phase=st.sampled_from(["calibration", "training"]),
            rank=st.integers(0, 1),
            batch_size=st.integers(1, 300),
            incident=st.sampled_from([INCIDENT, KILLED, None]),
        ),
        min_size=1,
        max_size=40,
    ),
    on_cpu=st.booleans(),
)
def test_any_history_is_answered_within_the_limits(
    policy: OomPolicy, history: list[Attempt], on_cpu: bool
) -> None:
    """Also a history that no run of this policy could make, as from a loop that ignores its batch size."""
    decision = policy.decide(history, on_cpu=on_cpu)
    last = history[-1]
    assert decision == policy.decide(tuple(history), on_cpu=on_cpu)
    assert (decision.phase, decision.rank) == (last.phase, last.rank)
    assert decision.retries <= policy.max_retries + len(policy.on_exhausted)
    if last.incident is None:
        assert decision.action == "give_up"
    if decision.action == "give_up":
        assert decision.batch_size == last.batch_size and decision.rung is None
        assert bool(decision.text) == (last.incident is not None)
    else:
        assert last.incident is not None
        assert (decision.action == "fresh_workers") == (last.incident.fresh_reason is not None)
        assert min(policy.min_batch_size, last.batch_size) <= decision.batch_size <= last.batch_size
        granted_before = [policy.decide(history[:end], on_cpu=on_cpu) for end in range(1, len(history))]
        own = [one for one in granted_before if (one.phase, one.rank) == (last.phase, last.rank)]
        assert decision.retries == 1 + sum(one.action != "give_up" for one in own)
        assert decision.rung is None or decision.rung not in [one.rung for one in own]
