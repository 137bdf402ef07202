"""Training out of lock-step: a rank does not wait for all others in every step.

============  ====================================================================
`gossip`      averages with neighbours, on a ring or an exponential graph
`local_sgd`   averages every H steps, and DiLoCo
`server`      a parameter server, synchronous or with bounded staleness
`straggler`   a rank that is slow on purpose
============  ====================================================================
"""
