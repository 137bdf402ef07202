"""Training systems on the public functions, and one table of trainers that run them by name.

==============  ================================================================================
What is trained
------------------------------------------------------------------------------------------------
`models`        a perceptron and a small transformer, and stages of them
`task`          a model, its data, and how it learns
`checks`        what all ranks look at together before and during training
`flat`          parameters end to end in a flat tensor, and put together from pieces
`messages`      messages between two ranks, and from several ranks as they come
`named_phases`  the phases of a training program, named for `ringcoll.trace`
--------------  --------------------------------------------------------------------------------
Systems
------------------------------------------------------------------------------------------------
`data`          data parallel: samples of each rank, averages of gradients, also compressed
`sharded`       AdamW whose state, gradients and parameters are sharded (ZeRO)
`split`         layers, tokens and sequences split over the ranks, and a mesh of all axes
`pipeline`      schedules of a pipeline as data (pure: no torch), and the runner of them
`free`          out of lock-step: gossip, local SGD and DiLoCo, a parameter server
--------------  --------------------------------------------------------------------------------
All of them by name
------------------------------------------------------------------------------------------------
`trainer`       one rank of a system: the loop of its steps
`systems`       what each system does differently
`trainers`      the table of all trainers
==============  ================================================================================

A ``group`` is everywhere the group of the ranks that take part: a process group of torch, a
`LocalGroup`, or ``None`` for the default group.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
