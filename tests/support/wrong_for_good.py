"""Importing this registers `tests.support.wrong`; for ``ringcoll bench --import``."""

from tests.support import wrong

wrong._register()
