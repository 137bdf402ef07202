"""Importing this registers `tests.fakes.wrong_algorithm`; for ``ringcoll bench --import``."""

from tests.fakes import wrong_algorithm

wrong_algorithm._register()
