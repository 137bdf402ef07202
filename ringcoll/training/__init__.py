"""Training systems on the public functions.

====================  ============================================May be imported from outside: each module's ``__all__``.
"""
