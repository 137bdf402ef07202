"""Pipeline parallel: schedules as data, and what runs them.

===================  ====================================================================
`pipeline_schedule`  the schedule of a pipeline as data; pure: no torch
`stage_orders`       GPipe, 1F1B, interleaved 1F1B and zero-bubble; pure
`check`              what is read from a schedule: a proof, a drawing; pure
`runner`             runs a schedule on which the ranks agree
`stage_messages`     the messages that a schedule asks for
===================  ====================================================================
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
