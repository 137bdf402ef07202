"""Training out of lock-step: a rank does not wait for all others in every step.

================  ==========================================================================
`model_averages`  gossip with neighbours, and local SGD, which averages every H steps
`server`          a parameter server, synchronous or with bounded staleness
================  ==========================================================================
"""
