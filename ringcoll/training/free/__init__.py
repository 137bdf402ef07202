"""Training out of lock-step: a rank does not wait for all others in every step.

===========  =====================================================================
`gossip`     averages of models with a few neighbours, after each step
`local_sgd`  averages of models over all ranks, every H steps
`server`     a parameter server, synchronous or with bounded staleness
`straggler`  ranks that are slow on purpose
===========  =====================================================================
"""
