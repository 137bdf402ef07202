"""``python -m ringcoll.tools.cli`` is the same as ``ringcoll``."""

from ringcoll.tools.cli import main

if __name__ == "__main__":
    main()
