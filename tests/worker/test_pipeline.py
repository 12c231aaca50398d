"""Which rows this rank gets, in which batch, with which shape."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from raytf.errors import ConfigError

pytestmark = pytest.mark.tf


def feed(rows: int = 23, **arguments: Any) -> Any:
    from raytf.data import ArraySource
    from raytf.worker.pipeline import Feed

    given: dict[str, Any] = {"global_batch_size": 5, "num_workers": 1, "rank": 0, "seed": 3}
    source = arguments.pop("source", None) or ArraySource(np.arange(rows), np.arange(rows) % 3)
    return Feed(source, **(given | arguments))


def rows_of(feed: Any, epoch: int = 0) -> list[int]:
    full = [int(v) for x, *_ in feed.full_batches(epoch).take(feed.plan.full_steps) for v in x]
    if feed.tail is None:
        return full
    return full + [int(v) for x, *_ in feed.tail_batches(epoch).take(1) for v in x]


def test_every_row_once_per_epoch_and_epochs_differ() -> None:
    made = feed(shuffle=True)
    first, second = rows_of(made, 0), rows_of(made, 1)
    assert sorted(first) == sorted(second) == list(range(23))
    assert first != second


def test_full_batches_go_on_over_the_end_of_an_epoch() -> None:
    made = feed(shuffle=True)
    both = [int(v) for x, *_ in made.full_batches(0).take(2 * made.plan.full_steps) for v in x]
    later = [int(v) for x, *_ in made.full_batches(1).take(made.plan.full_steps) for v in x]
    assert both[made.plan.full_steps * 5 :] == later


@pytest.mark.parametrize("num_workers", [2, 3, 7])
def test_ranks_together_have_the_batch_of_one(num_workers: int) -> None:
    whole = feed(shuffle=True)
    parts = [feed(shuffle=True, num_workers=num_workers, rank=r) for r in range(num_workers)]
    batches = [
        list(p.full_batches().take(whole.plan.full_steps).as_numpy_iterator()) for p in parts
    ]
    for step, (x, _) in enumerate(
        whole.full_batches().take(whole.plan.full_steps).as_numpy_iterator()
    ):
        got = [v for p, b in zip(parts, batches, strict=True) if p.full.weight for v in b[step][0]]
        assert got == list(x)
    assert sum(p.full.weight for p in parts) == pytest.approx(1)
    assert sum(p.tail.weight for p in parts) == pytest.approx(1)


def test_a_rank_without_rows_reads_a_stand_in() -> None:
    made = feed(rows=6, num_workers=3, rank=2)
    assert made.tail.weight == 0.0
    assert [len(x) for x, _ in made.tail_batches().take(1)] == [1]


def test_shapes_are_static() -> None:
    spec = feed().full_batches().element_spec
    assert [s.shape.as_list() for s in spec] == [[5], [5]]
    assert [s.shape.as_list() for s in feed().tail_batches().element_spec] == [[3], [3]]


def test_drop_remainder() -> None:
    assert feed(drop_remainder=True).tail is None


def test_transform_sees_each_sample_with_its_own_repeatable_key() -> None:
    import tensorflow as tf

    def noisy(x: Any, y: Any, key: Any) -> Any:
        return tf.cast(x, tf.float32) + tf.random.stateless_uniform((), key), y

    one = feed(shuffle=True, transform=noisy)
    a = {int(v): float(v) for x, _ in one.full_batches().take(4) for v in x}
    b: dict[int, float] = {}
    for rank in range(2):
        part = feed(shuffle=True, transform=noisy, num_workers=2, rank=rank)
        b |= {int(v): float(v) for x, _ in part.full_batches().take(4) for v in x}
    assert a == b  # whoever reads a sample augments it alike
    assert len({round(v - int(v), 6) for v in a.values()}) > 15  # and samples differ
    later = {int(v): float(v) for x, _ in one.full_batches(1).take(4) for v in x}
    assert any(later[k] != a[k] for k in later.keys() & a.keys())


def test_transform_of_two_arguments_and_of_shapes() -> None:
    def twice(x: Any, y: Any) -> Any:
        return (x, x), y

    spec = feed(transform=twice).full_batches().element_spec
    assert [s.shape.as_list() for s in spec[0]] == [[5], [5]]


def test_transform_must_return_a_pair() -> None:
    with pytest.raises(ConfigError, match=r"transform must return a pair \(x, y\)"):
        feed(transform=lambda x, y: x).full_batches()


def test_class_weight() -> None:
    _, y, weight = next(iter(feed(class_weight={0: 0.5, 2: 3.0}).full_batches()))
    assert list(weight.numpy()) == [{0: 0.5, 1: 1.0, 2: 3.0}[int(v)] for v in y]


def test_class_weight_of_one_hot_targets() -> None:
    from raytf.data import ArraySource

    source = ArraySource(np.arange(5), np.eye(3, dtype="float32")[[0, 1, 2, 2, 0]])
    *_, weight = next(iter(feed(source=source, class_weight={2: 3.0}).full_batches()))
    assert list(weight.numpy()) == [1, 1, 3, 3, 1]


def test_class_weight_and_sample_weight_are_refused_together() -> None:
    from raytf.data import ArraySource

    source = ArraySource(np.arange(5), np.arange(5) % 2, np.ones(5, "float32"))
    with pytest.raises(ConfigError, match="class_weight and sample_weight"):
        feed(source=source, class_weight={0: 2.0})


def test_a_source_that_is_read_row_by_row() -> None:
    from raytf.data import SequenceSource

    items = [(np.full((2, 2), i, "float32"), np.int64(i)) for i in range(23)]
    made = feed(source=SequenceSource(items), shuffle=True)
    seen = [int(v) for _, y in made.full_batches().take(4) for v in y]
    assert seen == rows_of(feed(shuffle=True))[:20]
    assert made.full_batches().element_spec[0].shape.as_list() == [5, 2, 2]


def test_strings_and_dicts() -> None:
    from raytf.data import ArraySource

    source = ArraySource({"word": np.array(["a", "bb", "c"]), "n": np.arange(3)})
    (x,) = next(iter(feed(source=source, global_batch_size=3).full_batches()))
    assert list(x["word"].numpy()) == [b"a", b"bb", b"c"]
