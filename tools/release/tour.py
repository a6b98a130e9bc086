"""What a new user does with an installed prefixcache: it is run by an empty environment's Python, from an empty folder.

It needs the standard library and what `pip install prefixcache` brought. With `--brief` it asks whether all of it is there,
its kernels, too, and serves. Ends with 1, and the output of the command that failed, where something doesn't work.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# What an extra, or a server, brings.
EXTRAS = {"cryptography", "fastapi", "mlx_vlm", "obstore", "valkey", "vllm_mlx"}
C_KERNELS = ("turboquant.c_rows", "transform.c_entropy")
SECONDS = 1200.0  # that one command, or the start of a server, may take on a machine that is busy with tests
BIN = Path(sys.executable).parent
ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}"}


def main() -> None:
    import prefixcache

    assert Path(prefixcache.__file__).is_relative_to(sys.prefix), f"{prefixcache.__file__} is not this environment's"
    everything_is_there()
    model = str(Path(prefixcache.__file__).parent / "cli" / "demo" / "tiny-llama")
    serve = ("prefixcache", "serve", "--model", model, "--port", "0", "--ram", "100MB")
    run("prefixcache", "--version")
    answered(*serve)
    if "--brief" not in sys.argv:
        use(model, serve)
    print("everything works")


def use(model: str, serve: tuple[str, ...]) -> None:
    """Run the commands of README, small, and a model on two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        kept = str(Path(folder, "demo"))
        run("prefixcache", "demo", "--conversations", "2", "--turns", "2", "--keep", kept)
        run("prefixcache", "inspect", str(Path(kept, "raw")))
        quick = ("--windows", "6", "--tokens", "256", "--draws", "4")
        run("prefixcache", "calibrate", model, *quick, "--basis-dir", str(Path(folder, "bases")))
        answered("mlx.launch", "-n", "2", "--backend", "ring", "--", *serve)


def everything_is_there() -> None:
    """Import every public name, and every module but those for an extra that isn't installed."""
    import prefixcache

    for name in prefixcache.__all__:
        getattr(prefixcache, name)
    names = [module.name for module in pkgutil.walk_packages(prefixcache.__path__, "prefixcache.")]
    for name in names:
        if name.rpartition(".")[2].startswith("_"):  # __main__, and the kernels that ctypes loads
            continue
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] not in EXTRAS:
                raise
    c_kernels = [importlib.import_module(f"prefixcache.codecs.{name}") for name in C_KERNELS]
    assert all(kernels.available() for kernels in c_kernels), [kernels.describe() for kernels in c_kernels]
    print(f"{len(prefixcache.__all__)} public names, {len(names)} modules, the C kernels")


def run(*command: str) -> None:
    began = time.monotonic()
    done = subprocess.run(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}")
    print(f"{' '.join(command[:3])}: {time.monotonic() - began:.0f} s")


def answered(*command: str) -> None:
    """Start a server, ask it a question, and end it as a service manager does."""
    with started(command) as url:
        body = {"messages": [{"role": "user", "content": "Which number has the archive?"}], "max_tokens": 8}
        request = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=SECONDS) as response:
            assert json.load(response)["choices"], "no answer"
    print(f"{command[0]} ... serve: answered, and ended by SIGTERM")


@contextmanager
def started(command: tuple[str, ...]) -> Iterator[str]:
    """The address of a server that takes requests."""
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(command, env=ENVIRONMENT, stdout=log, stderr=log, start_new_session=True)

        def said() -> str:
            log.seek(0)
            return log.read()

        try:
            until = time.monotonic() + SECONDS
            while (found := re.search(r"serving at (http://\S+)", said())) is None:
                if server.poll() is not None or time.monotonic() > until:
                    raise SystemExit(f"{command} does not serve:\n{said()[-4000:]}")
                time.sleep(0.2)
            yield found[1]
            server.send_signal(signal.SIGTERM)
            server.wait(60)
        finally:
            if server.poll() is None:
                os.killpg(server.pid, signal.SIGKILL)
                raise SystemExit(f"{command} does not end:\n{said()[-4000:]}")


if __name__ == "__main__":
    main()
