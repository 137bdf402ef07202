"""Using it: the backend of torch.distributed, and training systems by name.

================  ==============================================================================
`backend`         ``init_process_group("ringcoll")``
`resilient`       going on without the dead
----------------  ------------------------------------------------------------------------------
What is trained
------------------------------------------------------------------------------------------------
`arguments`       names of models, optimizers and other choices; without torch
`models`          a perceptron and a transformer
`examples`        their data: digits, and a text
`task`            a task: a model, its data, and how it learns
`model_on_ranks`  the model that several ranks hold: compared, laid end to end, put together
`messages`        messages between two ranks, and from several ranks as they come
----------------  ------------------------------------------------------------------------------
Systems
------------------------------------------------------------------------------------------------
`data`            data parallel: averages of gradients
`sharded`         AdamW whose state, gradients and parameters are sharded (ZeRO)
`split`           layers, tokens and sequences split over the ranks, and a mesh of all axes
`pipeline`        schedules of a pipeline as data (pure: no torch), and the runner of them
`free`            out of lock-step: gossip, local SGD, a parameter server
----------------  ------------------------------------------------------------------------------
All of them by name
------------------------------------------------------------------------------------------------
`trainers`        the table of all systems
`systems`         what each system does differently
`trainer`         one rank of a system: the loop of its steps
================  ==============================================================================

A ``group`` is everywhere the group of the ranks that take part: a process group of torch, a
`LocalGroup`, or ``None`` for the default group.
"""

from ringcoll._package import late_door

__getattr__, __dir__ = late_door(__name__, __file__)
