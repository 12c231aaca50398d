"""The run actor's waiting and waking, in one event loop and without Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from raytf.cluster.failures import describe
from raytf.cluster.run_actor import RunActor, new_run_actor_name


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, 10))


def make(n: int = 2, timeout: float = 5.0) -> RunActor:
    return RunActor(n, timeout, 3)


def test_join_hold_ready() -> None:
    async def flow() -> None:
        actor = make()
        await actor.begin("g")
        for verb, *args in (("join", 1), ("hold",), ("ready",)):
            calls = [
                getattr(actor, verb)(r, "g", args[0] if args else 1, f"h:{r}" if args else None)
                for r in range(2)
            ]
            first, second = await asyncio.gather(*calls)
            assert first == second
            assert first["kind"] == ("formed" if verb == "join" else "ready")
            assert first["addresses"] == ["h:0", "h:1"]

    run(flow())


def test_a_rank_that_fails_wakes_those_that_wait() -> None:
    async def flow() -> dict[str, Any]:
        actor = make(timeout=100)
        waiting = asyncio.ensure_future(actor.join(0, "g", 1, "h:0"))
        await asyncio.sleep(0)
        await actor.failed(1, "g", describe(ValueError("bad"), rank=1))
        return await waiting

    answer = run(flow())
    assert answer["kind"] == "failed"
    assert answer["error"]["context"]["collateral"]
    assert "rank 1 failed first: ValueError: bad" in answer["error"]["message"]


def test_a_missing_rank_ends_the_wait() -> None:
    answer = run(make(timeout=0.2).join(0, "g", 1, "h:0"))
    assert answer["error"]["context"]["missing_ranks"] == [1]


def test_signatures_that_differ_fail_on_all_ranks() -> None:
    async def flow() -> list[dict[str, Any]]:
        actor = make()
        await actor.begin("g")
        return await asyncio.gather(
            actor.compare(0, "g", 1, {"shape": [1]}), actor.compare(1, "g", 1, {"shape": [2]})
        )

    first, second = run(flow())
    assert first == second
    assert first["error"]["type"] == "ModelMismatchError"
    assert "rank 0 has [1] and rank 1 has [2]" in first["error"]["message"]


def test_comparisons_are_counted() -> None:
    async def flow() -> None:
        actor = make()
        await actor.begin("g")
        for number in (1, 2):
            answers = await asyncio.gather(
                *(actor.compare(r, "g", number, {"n": number}) for r in range(2))
            )
            assert {a["kind"] for a in answers} == {"ready"}

    run(flow())


def test_poll_gives_each_record_once_and_waits_for_one() -> None:
    async def flow() -> None:
        actor = make()
        await actor.progress({"n": 1})
        answer = await actor.poll(0, 5.0)
        assert [r["n"] for r in answer["records"]] == [1]
        poll = asyncio.ensure_future(actor.poll(answer["cursor"], 5.0))
        await asyncio.sleep(0.01)
        assert not poll.done()
        await actor.progress({"n": 2})
        assert [r["n"] for r in (await poll)["records"]] == [2]
        assert (await actor.poll(2, 0.0))["records"] == []

    run(flow())


def test_poll_tells_the_driver_of_a_stuck_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async def flow() -> None:
        actor = make(timeout=0.01)
        assert (await actor.poll(0, 0.0))["overdue"] is None  # nothing has begun
        await actor.begin("g")
        await asyncio.sleep(0.05)
        assert (await actor.poll(0, 0.0))["overdue"] is None  # ranks get to raise it first
        monkeypatch.setattr("raytf.cluster.run_actor._DRIVER_GRACE_S", 0.0)
        assert (await actor.poll(0, 0.0))["overdue"]["type"] == "StartupError"

    run(flow())


def test_a_new_group_forgets_the_old_one() -> None:
    async def flow() -> None:
        actor = make()
        await actor.begin("g", "pg1")
        await actor.failed(0, "g", describe(ValueError("old"), rank=0))
        await actor.deliver(0, "g", "rows", 1)
        await actor.begin("h", "pg2")
        await actor.begin("h", "pg2")
        await actor.failed(1, "g", describe(ValueError("late"), rank=1))
        await actor.deliver(1, "g", "rows", 2)
        assert await actor.errors() == []
        assert await actor.collect("rows") == {}
        assert await actor.placement_groups() == ["pg1", "pg2"]
        answers = await asyncio.gather(*(actor.join(r, "h", 1, f"h:{r}") for r in range(2)))
        assert {a["kind"] for a in answers} == {"formed"}
        assert (await actor.poll(0, 0.0))["groups"] == 2

    run(flow())


def test_results_come_per_rank_in_order() -> None:
    async def flow() -> None:
        actor = make()
        await actor.begin("g")
        for rank, value in ((1, "c"), (0, "a"), (0, "b")):
            await actor.deliver(rank, "g", "rows", value)
        assert await actor.collect("rows") == {1: ["c"], 0: ["a", "b"]}
        assert await actor.collect("rows") == {}

    run(flow())


def test_names_are_unique() -> None:
    assert new_run_actor_name("mnist") != new_run_actor_name("mnist")
