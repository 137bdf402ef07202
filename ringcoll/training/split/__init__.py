"""Layers, tokens and sequences that are split over the ranks.

===========  =================================================================
`conjugate`  collectives forward, and their transposes backward
`tensor`     layers split over the ranks
`sequence`   activations between these layers split by tokens
`context`    sequences split over the ranks: ring attention
`mesh`       data, pipeline and tensor parallel at once
===========  =================================================================
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
