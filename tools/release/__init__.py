"""Releases: the sdist and the wheel, tried as a user would, and the tag.

`python -m tools.release` makes a release, `python -m tools.release --try` builds and tries what would be released.
"""
