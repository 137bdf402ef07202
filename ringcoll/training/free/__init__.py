"""Training out of lock-step: a rank does not wait for all others in every step.

================  ==========================================================================
`model_averages`  gossip with neighbours; local SGD and DiLoCo, which average every H steps
`server`          a parameter server, synchronous or with bounded staleness
================  ==========================================================================
"""
