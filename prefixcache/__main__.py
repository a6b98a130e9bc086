"""`python -m prefixcache`: the command."""

from prefixcache.cli import app

if __name__ == "__main__":
    app(prog_name="prefixcache")
