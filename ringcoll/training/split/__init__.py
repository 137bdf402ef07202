"""Layers, tokens and sequences that are split over the ranks.

============  ====================================================================
`conjugate`   collectives forward, and their transposes backward
`tensor`      layers, and tokens between them, split over the ranks
`ring`        attention over sequences that are split over the ranks
`mesh`        data, pipeline and tensor parallel at once
============  ====================================================================
"""
