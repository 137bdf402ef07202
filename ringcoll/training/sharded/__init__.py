"""AdamW whose state, gradients and parameters are sharded over the ranks (ZeRO).

=================  ==================================================================
`optimizer`        the optimizer, how all of it works, and the bytes that it needs
`sharded_buckets`  the buckets of a module: reduced when full, whole when a module needs them
`flat_bucket`      a bucket: parameters end to end, of which each rank owns a shard
=================  ==================================================================
"""

from ringcoll.training.sharded.optimizer import ShardedAdamW

__all__ = ["ShardedAdamW"]
