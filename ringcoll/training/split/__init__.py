"""Layers, tokens and sequences that are split over the ranks.

================  ==========================================================================
`conjugate`       collectives forward, and their transposes backward
`tensor`          layers, and tokens between them, split over the ranks; and a mesh with
                  data and pipeline parallel at once; attention over split sequences
================  ==========================================================================
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
