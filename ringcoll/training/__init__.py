"""Training systems on the public functions.

====================  ==========================================================
`data`                digits and text, and who sees which samples
`models`              a perceptron and a small transformer, and stages of them
`data_parallel`       data-parallel training, to read and to use
`pipeline`            pipeline-parallel training: runs a schedule
`pipeline_schedule`   schedules of a pipeline as data; pure: no torch
`pipeline_messages`   point-to-point messages, and what a schedule sends
`pipeline_agreement`  what the ranks compare before they send
====================  ==========================================================

May be imported from outside: each module's ``__all__``.
"""
