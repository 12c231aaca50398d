"""Which sample comes when, and where it comes from. Imports neither TensorFlow nor Ray.

`order` says which rows a step takes, `sources` what can be read by row number, `parquet` reads
files. pyarrow and fsspec are imported when a ParquetSource is made.
"""

from raytf.data.arrays import ArraySpec, Structure, map_leaves, named_leaves
from raytf.data.order import Order, Plan, Position, sample_keys, share
from raytf.data.parquet import ParquetSource
from raytf.data.sources import (
    ArraySource,
    Factory,
    SequenceSource,
    Source,
    as_source,
    check_batch,
    is_factory,
)

__all__ = [
    "ArraySource",
    "ArraySpec",
    "Factory",
    "Order",
    "ParquetSource",
    "Plan",
    "Position",
    "SequenceSource",
    "Source",
    "Structure",
    "as_source",
    "check_batch",
    "is_factory",
    "map_leaves",
    "named_leaves",
    "sample_keys",
    "share",
]
