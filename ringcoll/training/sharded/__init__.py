"""AdamW whose state, gradients and parameters are sharded over the ranks (ZeRO).

=================  ================================================================
`optimizer`        the optimizer, how all of it works, and the bytes that it needs
`sharded_buckets`  buckets of parameters, of which each rank owns a shard
=================  ================================================================
"""

from ringcoll.training.sharded.optimizer import ShardedAdamW

__all__ = ["ShardedAdamW"]
