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


def shared(answers: list[dict[str, Any]]) -> list[Any]:
    assert {a["kind"] for a in answers} == {"ready"}
    assert {a["error"] for a in answers} == {None}
    return [a["values"] for a in answers]


def test_share_gives_every_rank_all_values_by_rank() -> None:
    async def flow() -> None:
        actor = make(3)
        await actor.begin("g")
        late = asyncio.ensure_future(actor.share(2, "g", "k", "c"))
        await asyncio.sleep(0)
        assert not late.done()
        rest = [actor.share(r, "g", "k", v) for r, v in ((1, None), (0, "a"))]
        assert shared([*await asyncio.gather(*rest), await late]) == [["a", None, "c"]] * 3
        assert actor._shared == {}  # nothing of a complete exchange stays

    run(flow())


def test_exchanges_do_not_mix() -> None:
    async def flow() -> None:
        actor = make()
        await actor.begin("g")
        calls = [actor.share(r, "g", key, (key, r)) for key in "ab" for r in range(2)]
        got = shared(await asyncio.gather(*calls))
        assert got == [[(key, 0), (key, 1)] for key in "ab" for _ in range(2)]

    run(flow())


def test_post_does_not_wait_and_counts() -> None:
    async def flow() -> None:
        actor = make()
        await actor.begin("g")
        answer = await actor.share(1, "g", "k", "posted", wait=False)
        assert answer["values"] is None
        assert answer["error"] is None
        assert shared([await actor.share(0, "g", "k", "mine")]) == [["mine", "posted"]]
        assert (await actor.share(1, "g", "last", "mine", wait=False))["error"] is None
        await actor.share(0, "g", "last", "posted", wait=False)  # nobody waits for it
        assert actor._shared == {}

    run(flow())


def test_a_failed_rank_ends_the_wait_of_share() -> None:
    async def flow() -> dict[str, Any]:
        actor = make()
        await actor.begin("g")
        waiting = asyncio.ensure_future(actor.share(0, "g", "k", 1))
        await asyncio.sleep(0)
        await actor.failed(1, "g", describe(ValueError("bad"), rank=1))
        return await waiting

    answer = run(flow())
    assert answer["values"] is None
    assert "rank 1 failed first: ValueError: bad" in answer["error"]["message"]


def test_a_replaced_group_learns_it_and_leaves_no_values() -> None:
    async def flow() -> None:
        actor = make()
        await actor.begin("g")
        waiting = asyncio.ensure_future(actor.share(0, "g", "k", "old"))
        await asyncio.sleep(0)
        await actor.begin("h")
        answer = await waiting
        assert (answer["kind"], answer["values"]) == ("again", None)
        late = await actor.share(1, "g", "k", "older")
        assert (late["kind"], late["values"]) == ("again", None)
        new = [actor.share(r, "h", "k", f"new{r}") for r in range(2)]
        assert shared(await asyncio.gather(*new)) == [["new0", "new1"]] * 2

    run(flow())


def test_the_first_word_of_a_group_begins_it() -> None:
    """In somebody's own loop nobody calls `begin`: a rank's first `share` does."""

    async def flow() -> None:
        actor = make()
        calls = [actor.share(r, "g", "k", r) for r in range(2)]
        assert shared(await asyncio.gather(*calls)) == [[0, 1]] * 2

    run(flow())
