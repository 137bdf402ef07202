"""Training systems on the public functions.

====================  ==========================================================
`data`                digits and text, and who sees which samples
`models`              a perceptron and a small transformer, and stages of them
`checks`              what all ranks look at together before and during training
`whole`               parameters of a whole model, put together
`data_parallel`       data-parallel training, to read and to use
`tensor_parallel`     layers, and tokens between them, split over the ranks
`ring_attention`      attention over sequences that are split over the ranks
`pipeline`            pipeline-parallel training: runs a schedule
`pipeline_schedule`   schedules of a pipeline as data; pure: no torch
`pipeline_messages`   point-to-point messages, and what a schedule sends
`pipeline_agreement`  what the ranks compare before they send
`mesh`                data, pipeline and tensor parallel at once
====================  ==========================================================

May be imported from outside: each module's ``__all__``.
"""
