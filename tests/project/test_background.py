"""The tests pass where a shell starts them in the background: it has them ignore SIGINT, which some of them send."""

import signal
import subprocess
import sys

CHILD = "import signal; print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)"


def test_what_tests_start_can_be_interrupted_though_they_were_started_in_the_background():
    code = f"import tests.conftest, subprocess, sys; subprocess.run([sys.executable, '-c', {CHILD!r}], check=True)"
    ignoring = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)}
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=True, **ignoring)
    assert done.stdout == "False\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, **ignoring)
    assert done.stdout == "True\n"
