"""How the processes of a group reach each other before they exchange messages, and beside them.

===========  ===============================================================
`lines`      connections between hosts that tell of a death
`mailboxes`  messages to processes of other hosts, which may sleep
`keys`       keys of a store: how ranks wait for each other's texts
`stores`     stores of torch: served, connected to, and asked
===========  ===============================================================
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
