"""From evidence to one fault: right kind, right rank, whatever else the ranks say."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytf.faults.classify import Evidence, Fault, FaultKind, RankEvidence, classify
from raytf.faults.texts import exit_code_in, named_tasks, spoken_of

# Ray 2.60, whole sentences.
EOF_TEXT = (
    "The actor died unexpectedly before finishing this task.\n\tclass_name: RayTrainWorker\n"
    "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR "
    "Worker exit detail: Worker unexpectedly exits with a connection error code 2. End of file. "
    "There are some potential root causes. (1) The process is killed by SIGKILL by OOM killer due "
    "to high memory usage. (2) ray stop --force is called. (3) The worker is crashed unexpectedly "
    "due to SIGSEGV or other unexpected errors."
)
EOF_TEXT_NEW = (
    "Worker unexpectedly exits with a connection error code 2. End of file. Some common causes "
    "include: (1) the process was killed by the OOM killer due to high memory usage, (2) ray stop "
    "--force was called, or (3) the worker crashed unexpectedly due to SIGSEGV or another "
    "unexpected error. If the process was killed by the kernel OOM killer (verifiable by checking "
    "for OOM in dmesg of the OOMing node), consider running low on memory."
)
OOM_TEXT = "1 worker(s) were killed due to the node running low on memory. Memory: 15 of 16 GB."
NODE_TEXT = (
    "The actor died because its node has died. Node Id: ab12\n"
    "\tthe actor's node was terminated unexpectedly: health check failed due to missing too many "
    "heartbeats"
)
PREEMPTED_TEXT = "The actor died because its node has died. Actor died by preemption."
EXIT_TEXT = "Worker exit detail: Worker exits with an exit code 3. None"
KILL_TEXT = "The actor is dead because it was killed by `ray.kill`."
TRACE = (
    'Traceback (most recent call last):\n  File "/u/train.py", line 7, in f\nValueError: bad row'
)


def error(
    rank: int,
    headline: str = "ValueError at step 30: bad row",
    error_type: str = "ValueError",
    type: str = "TrainingError",
    collateral: bool = False,
    step: int | None = 30,
    traceback: str = TRACE,
) -> dict[str, Any]:
    return {
        "rank": rank,
        "type": type,
        "headline": headline,
        "traceback": traceback,
        "message": headline,
        "context": {"rank": rank, "step": step},
        "error_type": error_type,
        "collateral": collateral,
    }


def echo(rank: int, text: str = "Collective ops is aborted by: Socket closed") -> dict[str, Any]:
    kind = "tensorflow.python.framework.errors_impl.UnavailableError"
    return error(rank, f"UnavailableError at step 30: {text}", kind, collateral=True, traceback="")


def tf_error(rank: int, name: str, text: str = "incompatible shapes") -> dict[str, Any]:
    kind = f"tensorflow.python.framework.errors_impl.{name}"
    return error(rank, f"{name} at step 30: {text}", kind, traceback="")


def rank(number: int, **known: Any) -> RankEvidence:
    return RankEvidence(**{"rank": number, "node": f"n{number}", "step": 30, **known})


def victims(*numbers: int) -> tuple[RankEvidence, ...]:
    return tuple(rank(n, error=echo(n), alive=True) for n in numbers)


K = FaultKind
# Rank 1's evidence alone -> kind, hardware-like; rank 0 reports an aborted collective throughout.
KINDS = [
    (rank(1, signal=signal.SIGKILL), K.KILLED, True),
    (rank(1, signal=signal.SIGTERM), K.KILLED, False),
    (rank(1, death=EOF_TEXT), K.KILLED, True),
    (rank(1, death=EOF_TEXT_NEW), K.KILLED, True),
    (rank(1, death=KILL_TEXT), K.KILLED, False),
    (rank(1, alive=False), K.KILLED, True),
    (rank(1, exit_code=-9), K.KILLED, True),
    (rank(1, exit_code=137), K.KILLED, True),
    (rank(1, exit_code=0), K.EXITED, False),
    (rank(1, exit_code=3), K.EXITED, False),
    (rank(1, death=EXIT_TEXT), K.EXITED, False),
    (rank(1, signal=signal.SIGSEGV), K.SEGFAULT, True),
    (rank(1, signal=signal.SIGBUS), K.SEGFAULT, True),
    (rank(1, signal=signal.SIGABRT), K.SEGFAULT, False),
    (rank(1, exit_code=139), K.SEGFAULT, True),
    (rank(1, death="Fatal Python error: Segmentation fault"), K.SEGFAULT, True),
    (rank(1, death=OOM_TEXT), K.OOM, False),
    (rank(1, signal=signal.SIGKILL, death=OOM_TEXT), K.OOM, False),
    (rank(1, error=error(1, "MemoryError: ", "MemoryError")), K.OOM, False),
    (rank(1, error=tf_error(1, "ResourceExhaustedError", "OOM when allocating")), K.OOM, False),
    (rank(1, error=error(1)), K.USER_ERROR, False),
    (rank(1, error=error(1, "no", "raytf.errors.DataError", "DataError")), K.USER_ERROR, False),
    (rank(1, error=error(1), exit_code=1), K.USER_ERROR, False),
    (rank(1, error=tf_error(1, "InvalidArgumentError")), K.TENSORFLOW_ERROR, False),
    (rank(1, error=tf_error(1, "InternalError", "Xid 79")), K.TENSORFLOW_ERROR, True),
    (rank(1, error=error(1, "x", "y", "StorageError")), K.STORAGE, False),
    (rank(1, error=error(1, "x", "y", "CheckpointDamagedError")), K.STORAGE, False),
    (rank(1, error=error(1, "x", "y", "StartupError")), K.STARTUP, False),
    (rank(1, error=error(1, "x", "y", "SupersededError")), K.SUPERSEDED, False),
    (rank(1, node_alive=False), K.NODE_LOST, True),
    (rank(1, death=NODE_TEXT), K.NODE_LOST, True),
    (rank(1, death=NODE_TEXT, draining=True), K.PREEMPTED, False),
    (rank(1, death=PREEMPTED_TEXT), K.PREEMPTED, False),
    (rank(1, draining=True, signal=signal.SIGTERM), K.PREEMPTED, False),
    (rank(1, hung="no step for 60 s", alive=True), K.HANG, True),
    (rank(1, hung="no step for 60 s", signal=signal.SIGKILL), K.HANG, True),  # by the watchdog
    (rank(1, nan="loss is NaN"), K.NAN, False),
    (rank(1, diverged="dense/kernel differs"), K.DIVERGENCE, True),
    (rank(1, heartbeat_age_s=12.0), K.KILLED, True),  # silent, and its peers' sockets are closed
    (rank(1), K.KILLED, True),
]


@pytest.mark.parametrize(("known", "kind", "hard"), KINDS)
def test_every_kind_among_victims(known: RankEvidence, kind: FaultKind, hard: bool) -> None:
    fault = classify(Evidence(ranks=(*victims(0, 2), known)))
    assert (fault.kind, fault.rank, fault.hardware_like) == (kind, 1, hard)
    assert (fault.node, fault.step, fault.victims) == ("n1", 30, (0, 2))
    assert fault.evidence
    assert "rank 1 on node n1" in fault.summary()
    assert Fault.from_json(json.loads(json.dumps(fault.to_json()))) == fault


def test_every_kind_is_in_the_table() -> None:
    missing = set(FaultKind) - {kind for _, kind, _ in KINDS}
    assert missing == {K.UNKNOWN, K.COLLECTIVE}  # below


def test_guesses_of_ray_are_no_evidence() -> None:
    for text in (EOF_TEXT, EOF_TEXT_NEW):
        said = spoken_of(text)
        assert "End of file" in said
        for word in ("OOM", "SIGSEGV", "memory"):
            assert word not in said
    both = spoken_of(f"{EOF_TEXT}\n{OOM_TEXT}")
    assert "running low on memory" in both


def test_words_that_belong_to_nobody_are_matched_by_process_or_node() -> None:
    text = f"{OOM_TEXT} Killed: pid 4711 on node n9."
    dead = rank(1, signal=signal.SIGKILL, pid=4711)
    other = rank(1, signal=signal.SIGKILL, pid=471)
    assert classify(Evidence(ranks=(dead,), texts=(text,))).kind is K.OOM
    assert classify(Evidence(ranks=(other,), texts=(text,))).kind is K.KILLED


def test_two_ranks_die() -> None:
    dead = [rank(1, signal=signal.SIGKILL, at=5.0), rank(2, signal=signal.SIGKILL, at=4.0)]
    fault = classify(Evidence(ranks=(*victims(0), *dead)))
    assert (fault.kind, fault.rank, fault.ranks, fault.victims) == (K.KILLED, 2, (1, 2), (0,))
    assert "ranks 1, 2" in fault.summary()


def test_a_node_takes_two_ranks() -> None:
    lost = [rank(n, node="n1", node_alive=False) for n in (1, 3)]
    elsewhere = rank(4, node="n4", node_alive=False)
    fault = classify(Evidence(ranks=(*victims(0, 2), *lost)))
    assert (fault.kind, fault.rank, fault.ranks, fault.node) == (K.NODE_LOST, 1, (1, 3), "n1")
    fault = classify(Evidence(ranks=(*victims(0), *lost, elsewhere)))
    assert fault.ranks == (1, 3)
    assert any("rank 4" in line for line in fault.evidence)


def test_a_users_error_and_echoes() -> None:
    fault = classify(Evidence(ranks=(*victims(0, 2), rank(1, error=error(1)))))
    assert (fault.kind, fault.rank, fault.error_type) == (K.USER_ERROR, 1, "ValueError")
    assert fault.root_text == TRACE


def test_a_death_beats_errors_that_are_its_echo() -> None:
    wrapped = error(0, "RuntimeError: training failed", "RuntimeError")  # the user's own raise
    dead = rank(1, signal=signal.SIGKILL, at=10.2)
    fault = classify(Evidence(ranks=(rank(0, error=wrapped, at=10.0), dead)))
    assert (fault.kind, fault.rank, fault.victims) == (K.KILLED, 1, (0,))
    assert any("rank 0 raised an error" in line for line in fault.evidence)
    # unless the error came long before
    fault = classify(Evidence(ranks=(rank(0, error=wrapped, at=-60.0), dead)))
    assert (fault.kind, fault.rank) == (K.USER_ERROR, 0)


def test_who_waits_for_a_dead_rank_is_not_hung() -> None:
    hung = rank(0, hung="no step for 60 s", at=1.0)
    fault = classify(Evidence(ranks=(hung, rank(1, death=EOF_TEXT, at=9.0))))
    assert (fault.kind, fault.rank) == (K.KILLED, 1)


def test_preemption_beats_what_follows_from_it() -> None:
    gone = rank(2, death=PREEMPTED_TEXT)
    fault = classify(Evidence(ranks=(rank(0, death=EOF_TEXT), *victims(1), gone)))
    assert (fault.kind, fault.rank) == (K.PREEMPTED, 2)


def test_a_draining_node_whose_worker_lives_is_not_to_blame() -> None:
    fault = classify(Evidence(ranks=(rank(0, draining=True, alive=True), rank(1, error=error(1)))))
    assert (fault.kind, fault.rank) == (K.USER_ERROR, 1)


def test_an_old_group_that_was_replaced_is_no_culprit() -> None:
    old = error(0, "belongs to a group", type="SupersededError", collateral=True)
    fault = classify(Evidence(ranks=(rank(0, error=old), rank(1, signal=9))))
    assert (fault.kind, fault.rank) == (K.KILLED, 1)


def test_of_several_silent_ranks_the_oldest_sign_of_life_and_the_named_one() -> None:
    stale = rank(2, heartbeat_age_s=60.0)
    fault = classify(Evidence(ranks=(*victims(0), rank(1, heartbeat_age_s=0.1), stale)))
    assert (fault.rank, fault.ranks) == (2, (2,))
    text = "Socket closed\nfrom remote target /job:worker/replica:0/task:2:"
    told = rank(0, error=echo(0, text))
    fault = classify(Evidence(ranks=(told, rank(1), rank(2))))
    assert (fault.rank, fault.ranks) == (2, (2,))
    fault = classify(Evidence(ranks=(*victims(0), rank(1), rank(2))))
    assert fault.ranks == (1, 2)


def test_a_silent_rank_that_lives_is_of_unknown_fault() -> None:
    fault = classify(Evidence(ranks=(*victims(0), rank(1, alive=True))))
    assert (fault.kind, fault.rank, fault.hardware_like) == (K.UNKNOWN, 1, False)


def test_nobody_is_blamed_without_evidence() -> None:
    fault = classify(Evidence(ranks=victims(0, 1)))
    assert (fault.kind, fault.rank, fault.victims) == (K.COLLECTIVE, None, (0, 1))
    assert classify(Evidence()).kind is K.UNKNOWN
    assert classify(Evidence(texts=("the controller died",))).root_text == "the controller died"
    assert classify(Evidence(ranks=(rank(0, alive=True),))).rank is None


def test_storage_and_startup_without_a_rank() -> None:
    assert classify(Evidence(storage="no such bucket")).kind is K.STORAGE
    late = Evidence(ranks=(rank(0), rank(1)), startup="120 s")
    assert (classify(late).kind, classify(late).rank) == (K.STARTUP, None)
    one = Evidence(ranks=(rank(0, started=True), rank(1, started=False)), startup="120 s")
    fault = classify(one)
    assert (fault.kind, fault.rank, fault.hardware_like) == (K.STARTUP, 1, True)
    both = Evidence(ranks=(rank(0, started=False), rank(1, started=False)), startup="120 s")
    assert not classify(both).hardware_like


def test_a_death_during_start_up_explains_it() -> None:
    ranks = (rank(0, started=False), rank(1, signal=signal.SIGSEGV, started=False))
    fault = classify(Evidence(ranks=ranks, startup="120 s"))
    assert (fault.kind, fault.rank) == (K.SEGFAULT, 1)


def test_identity_is_where_an_error_was_raised() -> None:
    def identity(text: str, kind: str = "ValueError") -> tuple[str, ...]:
        said = error(1, text, kind, traceback=text)
        return classify(Evidence(ranks=(rank(1, error=said),))).identity

    assert identity("bad row 17 at 0x7f") == identity("bad row 4 at 0xab")
    assert identity("bad row") != identity("bad column")
    assert identity("bad row") != identity("bad row", "KeyError")
    again = TRACE.replace("bad row", "another text")
    assert identity(TRACE) == identity(again)
    assert identity(TRACE) != identity(TRACE.replace("line 7", "line 8"))


def test_words() -> None:
    assert exit_code_in(EXIT_TEXT) == 3
    assert exit_code_in(EOF_TEXT) is None
    assert named_tasks("/job:worker/replica:0/task:1 /job:worker/task:12") == {1, 12}


ANY = st.builds(
    RankEvidence,
    rank=st.integers(0, 3),
    node=st.sampled_from(["a", "b", None]),
    at=st.none() | st.floats(0, 100),
    alive=st.sampled_from([True, False, None]),
    signal=st.sampled_from([None, 9, 11, 15, 64, 99]),
    exit_code=st.sampled_from([None, 0, 1, -9, 139, 255]),
    death=st.sampled_from([None, EOF_TEXT, OOM_TEXT, NODE_TEXT, PREEMPTED_TEXT, EXIT_TEXT]),
    error=st.sampled_from([None, error(0), echo(0), {}, {"collateral": False}]),
    node_alive=st.sampled_from([True, False, None]),
    draining=st.booleans(),
    hung=st.sampled_from([None, "hung"]),
    started=st.sampled_from([True, False, None]),
)


@settings(deadline=None)
@given(
    st.lists(ANY, max_size=4, unique_by=lambda r: r.rank),
    st.sampled_from([None, "late"]),
    st.randoms(),
)
def test_any_evidence_gives_one_fault_in_any_order(
    ranks: list[RankEvidence], startup: str | None, random: Any
) -> None:
    fault = classify(Evidence(ranks=tuple(ranks), startup=startup))
    shuffled = ranks[:]
    random.shuffle(shuffled)
    assert classify(Evidence(ranks=tuple(shuffled), startup=startup)) == fault
    assert fault.rank is None or fault.rank in fault.ranks
    assert not set(fault.ranks) & set(fault.victims)
    assert fault.kind is not K.COLLECTIVE or fault.rank is None
    assert Fault.from_json(fault.to_json()) == fault
