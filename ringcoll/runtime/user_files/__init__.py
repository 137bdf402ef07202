"""Files of a user that decide how a call runs.

============  ===========================================================================
`algorithms`  files with schedules, modules that register algorithms, rules
`tuning`      tables of costs: of ``ringcoll tune`` and ``ringcoll fit``, and of groups
============  ===========================================================================
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
