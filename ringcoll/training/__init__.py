"""Training systems on the public functions.

================  ======================================================================
`data`            digits and text, and who sees which samples
`models`          a perceptron and a small transformer, and stages of them
`data_parallel`   data-parallel training, to read and to use
`flat`            buckets of parameters, of which each rank owns a shard
`sharded`         AdamW whose state, gradients and parameters are sharded (ZeRO)
`state_bytes`     bytes of parameters, gradients and optimizer state: formula, measurement
================  ======================================================================

May be imported from outside: each module's ``__all__``.
"""
