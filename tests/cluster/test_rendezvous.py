"""The rules of start-up, without Ray and without a clock."""

from __future__ import annotations

import pytest

from raytf.cluster.rendezvous import Rendezvous, first_difference, mismatch_text


def meeting(n: int = 2, **kwargs: object) -> Rendezvous:
    return Rendezvous(num_workers=n, **kwargs)  # type: ignore[arg-type]


def formed(n: int = 2, **kwargs: object) -> Rendezvous:
    m = meeting(n, **kwargs)
    for rank in range(n):
        m.join(rank, "g", 1, f"h:{rank}", now=10.0)
    return m


def test_ranks_wait_until_all_have_joined() -> None:
    m = meeting(3)
    assert m.join(0, "g", 1, "a:1", 0.0).kind == "wait"
    assert m.join(2, "g", 1, "c:3", 1.0).kind == "wait"
    last = m.join(1, "g", 1, "b:2", 2.0)
    assert (last.kind, last.generation, last.addresses) == ("formed", 1, ("a:1", "b:2", "c:3"))
    assert m.joined(0, "g", 1, 2.0) == last


def test_all_ports_held_and_all_servers_up() -> None:
    m = formed()
    assert m.hold(0, "g", 1, None, 11.0).kind == "wait"
    assert m.hold(1, "g", 1, None, 12.0).kind == "ready"
    assert m.held(0, "g", 1, 12.0).kind == "ready"
    assert m.report(1, "g", 1, None, 13.0).kind == "wait"
    assert m.deadline() is not None  # a server is still to come
    assert m.report(0, "g", 1, None, 14.0).kind == "ready"
    assert m.deadline() is None


def test_a_taken_port_sends_everyone_back() -> None:
    m = formed()
    m.hold(0, "g", 1, None, 11.0)
    assert m.hold(1, "g", 1, "port 2: in use", 11.0).kind == "again"
    assert m.held(0, "g", 1, 11.0).kind == "again"
    assert m.join(0, "g", 2, "h:8", 12.0).kind == "wait"
    again = m.join(1, "g", 2, "h:9", 12.0)
    assert (again.kind, again.generation, again.addresses) == ("formed", 2, ("h:8", "h:9"))
    assert m.held(0, "g", 1, 12.0).kind == "again"  # late answer to the first generation


def test_a_rank_that_reads_its_formation_late_still_gets_it() -> None:
    m = formed()
    m.hold(1, "g", 1, "taken", 11.0)
    m.join(1, "g", 2, "h:9", 12.0)
    assert m.joined(0, "g", 1, 12.0).generation == 1
    assert m.hold(0, "g", 1, None, 12.0).kind == "again"


def test_ports_used_up_names_ranks_addresses_and_errors() -> None:
    m = formed(max_port_attempts=1)
    verdict = m.hold(1, "g", 1, "port 1: in use", 11.0)
    assert verdict.kind == "failed" and verdict.error is not None
    assert verdict.error["type"] == "StartupError"
    assert "rank 1 at h:1: port 1: in use" in verdict.error["message"]
    assert m.held(0, "g", 1, 11.0).kind == "failed"


def test_a_missing_rank_is_named_with_the_known_addresses() -> None:
    m = meeting(3, startup_timeout_s=120.0)
    m.begin("g", 0.0)
    m.join(0, "g", 1, "10.0.0.1:5", 50.0)
    assert m.joined(0, "g", 1, 169.9).kind == "wait"  # counted from the first rank, not from begin
    verdict = m.joined(0, "g", 1, 170.0)
    assert verdict.kind == "failed" and verdict.error is not None
    assert "ranks 1, 2 of 3 did not join within 120 s" in verdict.error["message"]
    assert "rank 0 at 10.0.0.1:5" in verdict.error["message"]
    assert verdict.error["context"]["missing_ranks"] == [1, 2]


def test_nobody_at_all_is_overdue_too() -> None:
    m = meeting(2, startup_timeout_s=10.0)
    assert m.overdue(1e9) is None  # nothing has begun
    m.begin("g", 100.0)
    assert m.overdue(109.0) is None
    verdict = m.overdue(110.0)
    assert verdict is not None and verdict.error is not None
    assert "Joined: nobody" in verdict.error["message"]


def test_a_server_that_does_not_come_up_is_named_with_its_address() -> None:
    m = formed(startup_timeout_s=20.0)
    m.hold(0, "g", 1, None, 20.0)
    m.hold(1, "g", 1, None, 25.0)
    m.report(0, "g", 1, None, 26.0)
    assert m.overdue(44.9) is None  # the servers have the whole limit from the last hold on
    verdict = m.reported(0, "g", 1, 45.0)
    assert verdict.kind == "failed" and verdict.error is not None
    assert "server of rank 1 at h:1 did not come up within 20 s" in verdict.error["message"]


def test_a_rank_that_never_holds_is_overdue() -> None:
    m = formed(startup_timeout_s=5.0)
    m.hold(0, "g", 1, None, 11.0)
    verdict = m.overdue(15.0)
    assert verdict is not None and verdict.error is not None
    assert verdict.error["context"]["missing_ranks"] == [1]


def test_a_broken_server_fails_all() -> None:
    m = formed()
    for rank in range(2):
        m.hold(rank, "g", 1, None, 11.0)
    verdict = m.report(1, "g", 1, "no route", 12.0)
    assert verdict.error is not None and "rank 1 at h:1: no route" in verdict.error["message"]
    assert m.reported(0, "g", 1, 12.0).kind == "failed"


def test_a_new_group_forms_again_and_generations_go_on() -> None:
    m = formed()
    m.begin("h", 20.0)
    assert m.join(0, "h", 1, "x:1", 21.0).kind == "wait"
    verdict = m.join(1, "h", 1, "x:2", 21.0)
    assert (verdict.kind, verdict.generation) == ("formed", 2)


def test_a_join_of_an_unknown_group_begins_it() -> None:
    m = formed()
    assert m.is_new("h") and not m.is_new("g")
    m.join(0, "h", 1, "x:1", 20.0)
    assert m.group == "h"


def test_late_calls_of_a_replaced_group_are_refused() -> None:
    m = formed()
    m.begin("h", 20.0)
    for verdict in (
        m.join(0, "g", 1, "h:0", 21.0),
        m.hold(0, "g", 1, None, 21.0),
        m.report(0, "g", 1, None, 21.0),
    ):
        assert verdict.kind == "failed" and verdict.error is not None
        assert verdict.error["context"]["superseded"]
    assert m.group == "h"
    assert not m.is_new("g")


def test_a_rank_outside_the_group_is_a_bug() -> None:
    verdict = meeting(2).join(2, "g", 1, "a:1", 0.0)
    assert verdict.error is not None and verdict.error["type"] == "RaytfError"


def signature(**changes: object) -> dict[str, object]:
    variables = [
        {"path": "dense/kernel", "shape": [784, 128], "dtype": "float32"},
        {"path": "dense/bias", "shape": [128], "dtype": "float32"},
    ]
    return {"model": "Sequential", "variables": variables, "optimizer": {"name": "adam"}} | changes


def test_equal_signatures_are_equal() -> None:
    assert first_difference(signature(), signature()) is None
    assert mismatch_text({0: signature(), 1: signature(), 2: signature()}) is None


def test_a_shape_is_named_by_the_variable_s_path() -> None:
    other = signature(
        variables=[
            {"path": "dense/kernel", "shape": [784, 128], "dtype": "float32"},
            {"path": "dense/bias", "shape": [64], "dtype": "float32"},
        ]
    )
    assert first_difference(signature(), other) == ("variables.dense/bias.shape", [128], [64])
    text = mismatch_text({0: signature(), 1: signature(), 2: other})
    assert text is not None
    assert "'variables.dense/bias.shape' rank 0 has [128] and rank 2 has [64]" in text
    assert "rank 2 of 3 differ" in text


@pytest.mark.parametrize(
    ("other", "path"),
    [
        (signature(model="Functional"), "model"),
        (signature(optimizer={"name": "sgd"}), "optimizer.name"),
        (signature(optimizer={"name": "adam", "rate": 1}), "optimizer.rate"),
        (signature(variables=[]), "variables.0"),
    ],
)
def test_other_differences(other: dict[str, object], path: str) -> None:
    found = first_difference(signature(), other)
    assert found is not None and found[0] == path


def test_a_missing_variable_reads_as_nothing() -> None:
    text = mismatch_text({0: signature(), 1: signature(variables=[])})
    assert text is not None and "rank 1 has nothing" in text


def test_renamed_variables_are_shown_whole() -> None:
    a = {"variables": [{"path": "a", "shape": [1]}]}
    b = {"variables": [{"path": "b", "shape": [1]}]}
    assert first_difference(a, b) == ("variables.0", {"path": "a", "shape": [1]}, b["variables"][0])
