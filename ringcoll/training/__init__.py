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
`sharded`             AdamW whose state, gradients and parameters are sharded (ZeRO)
`flat_bucket`         buckets of parameters, of which each rank owns a shard
`state_bytes`         bytes of parameters, gradients and optimizer state
`mesh`                data, pipeline and tensor parallel at once
`gossip`              averages with neighbours, on a ring or an exponential graph
`local_sgd`           averages every H steps, and DiLoCo
`server`              a parameter server, synchronous or with bounded staleness
`arrivals`            messages from several ranks, each as it comes
`compression`         compressed averages of gradients, with error feedback
`compression_hook`    the same inside torch's DistributedDataParallel
`compressors`         the largest elements, numbers of 8 bits, low rank
`straggler`           a rank that is slow on purpose
`messages`            messages between two ranks, for gossip and the server
`flat`                the parameters of a module as a flat tensor
====================  ==========================================================

May be imported from outside: each module's ``__all__``.
"""
