"""The replay buffer: whole groups of trajectories as Arrow record batches on shards behind ZMQ.

Usable alone. Knows neither torch nor Ray nor vLLM.
"""

if __name__ != "asyncrl.buffer":
    raise ImportError("import this package as asyncrl.buffer")

from asyncrl.buffer.client import Lease, ReplayBuffer
from asyncrl.buffer.columns import Columns
from asyncrl.buffer.keys import CurveKeys, ServerKeys, ShardAddress, new_keys
from asyncrl.buffer.sampling import Sampling
from asyncrl.buffer.schema import SCHEMA, SCHEMA_VERSION
from asyncrl.buffer.segment_table import StoreSettings
from asyncrl.buffer.shard import ShardServer, shared_memory
from asyncrl.buffer.stats import LEDGER, BufferStats
from asyncrl.buffer.table import groups_to_table, write_parquet

__all__ = [
    "LEDGER",
    "SCHEMA",
    "SCHEMA_VERSION",
    "BufferStats",
    "Columns",
    "CurveKeys",
    "Lease",
    "ReplayBuffer",
    "Sampling",
    "ServerKeys",
    "ShardAddress",
    "ShardServer",
    "StoreSettings",
    "groups_to_table",
    "new_keys",
    "shared_memory",
    "write_parquet",
]
