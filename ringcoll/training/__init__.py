"""Training systems on the public functions: a file with the system's name, and what it is made of.

=====================  ==========================================================
What is trained
---------------------------------------------------------------------------------
`data`                 digits and text, and who sees which samples
`models`               a perceptron and a small transformer, and stages of them
`task`                 a model, its data, and how it learns
`checks`               what all ranks look at together before and during training
`flat`                 the parameters of a module as a flat tensor
`whole`                parameters of a whole model, put together
`messages`             messages between two ranks
`straggler`            a rank that is slow on purpose
`phases`               phases of a step, and waits between ranks, for `ringcoll.trace`
---------------------  ----------------------------------------------------------
Data parallel
---------------------------------------------------------------------------------
`data_parallel`        data-parallel training, to read and to use
`average`              averages of gradients, parameter by parameter
`gradient_buckets`     gradients that are averaged together
`ddp_hook`             gradients of torch's DistributedDataParallel
`compression`          compressed averages of gradients, with error feedback
`compressors`          the largest elements, numbers of 8 bits, low rank
`compression_hook`     the same inside torch's DistributedDataParallel
`sharded`              AdamW whose state, gradients and parameters are sharded (ZeRO)
`sharded_buckets`      buckets of which gradients go in, and averaged shards come out
`sharded_state`        its state put together, taken apart, and counted
`flat_bucket`          a bucket of parameters, of which each rank owns a shard
`gather_ahead`         parameters are whole when a module needs them
`state_bytes`          bytes of parameters, gradients and optimizer state
---------------------  ----------------------------------------------------------
Split models
---------------------------------------------------------------------------------
`tensor_parallel`      layers, and tokens between them, split over the ranks
`split_layers`         layers of which each rank holds a piece
`conjugate`            collectives forward, and their transposes backward
`ring_attention`       attention over sequences that are split over the ranks
`pipeline`             pipeline-parallel training: runs a schedule
`pipeline_schedule`    the schedule of a pipeline as data; pure: no torch
`pipeline_orders`      GPipe, 1F1B, interleaved 1F1B and zero-bubble; pure
`pipeline_check`       what is read from a schedule: a proof, a drawing; pure
`pipeline_messages`    the messages that a schedule asks for
`pipeline_agreement`   what the ranks compare before they send
`mesh`                 data, pipeline and tensor parallel at once
---------------------  ----------------------------------------------------------
Out of lock-step
---------------------------------------------------------------------------------
`gossip`               averages with neighbours, on a ring or an exponential graph
`local_sgd`            averages every H steps, and DiLoCo
`server`               a parameter server, synchronous or with bounded staleness
`arrivals`             messages from several ranks, each as it comes
---------------------  ----------------------------------------------------------
All of them by name
---------------------------------------------------------------------------------
`trainer`              one shape for all of these systems
`replicated_trainers`  trainers whose ranks hold the whole model
`split_trainers`       trainers whose ranks hold a part of the model each
`free_trainers`        trainers out of lock-step
`trainers`             all trainers by name
=====================  ==========================================================

May be imported from outside: each module's ``__all__``.
"""
