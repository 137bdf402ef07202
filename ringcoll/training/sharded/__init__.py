"""AdamW that is sharded over the ranks (ZeRO): `optimizer`, `sharded_buckets`, `flat_bucket`."""

from ringcoll.training.sharded.optimizer import ShardedAdamW

__all__ = ["ShardedAdamW"]
