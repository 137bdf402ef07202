"""AdamW whose state, gradients and parameters are sharded over the ranks (ZeRO).

=================  =================================================================
`optimizer`        the optimizer; its module says how all of it works
`sharded_buckets`  buckets of which gradients go in, and averaged shards come out
`flat_bucket`      a bucket of parameters, of which each rank owns a shard
`gather_ahead`     parameters are whole when a module needs them
`state_bytes`      bytes of parameters, gradients and optimizer state
=================  =================================================================
"""

from ringcoll.training.sharded.optimizer import ShardedAdamW

__all__ = ["ShardedAdamW"]
