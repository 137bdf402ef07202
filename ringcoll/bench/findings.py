"""Where ``ringcoll train`` still imports `label` from; it is in `ringcoll.bench`."""

from ringcoll.bench.verdicts import label

__all__ = ["label"]
