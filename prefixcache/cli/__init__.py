"""The `prefixcache` command: `app` has the commands, each a module of its own. Nothing in the library imports this."""

from prefixcache.cli.app import app

__all__ = ["app"]
