"""Pipeline parallel: schedules as data, and what runs them.

===================  ==========================================================================
`pipeline_schedule`  the orders of a pipeline as data: GPipe and 1F1B, a drawing; pure: no torch
`runner`             runs a schedule on which the ranks agree
`mailbox`            activations and gradients between neighbouring stages
===================  ==========================================================================
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
