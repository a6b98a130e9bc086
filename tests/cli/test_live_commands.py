"""The commands on a running server, as far as they refuse without asking it, or find none. The rest: test_admin.py."""

import pytest

from tests.remote.servers import free_port

NOBODY = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("clear",), "neither DIR nor --url"),
        (("prune", ".", "--url", NOBODY), "DIR with --url"),
        (("clear", ".", "--model", "m"), "--model without --url: add --url in the place of DIR"),
        (("clear", ".", "--yes", "--model", ""), "--model without --url"),  # "$MODEL" that nobody has set
        (("prune", ".", "--ram-to-size", "1GB"), "--ram-to-size without --url"),
        (("prune", "--url", NOBODY, "--dry-run"), "--dry-run with --url: it is for a DIR"),
        (("prune", "--url", NOBODY, "--quarantine"), "--quarantine with --url"),
        (("prune", "--url", NOBODY), "nothing is selected"),
        (("prune", "--url", NOBODY, "--older-than", "7"), "--older-than '7': not an age"),
        (("prune", "--url", NOBODY, "--to-size", "7x"), "--to-size='7x': not a size"),
        (("clear", "--url", NOBODY), "add --yes where there is no terminal to ask"),
        (("clear", "--yes", "--url", "127.0.0.1:8080"), "not the address of a server; give a server's address"),
        (("clear", "--yes", "--url", "http://127.0.0.1:99999"), "--url http://127.0.0.1:99999"),
        (("clear", "--yes", "--url", "http://127.0.0..1:80"), "http://127.0.0..1:80: "),
        (("clear", "--yes", "--url", NOBODY, "--no-salt", "--api-key-file", "x"), "--no-salt with the file of a salt"),
        (
            ("clear", "--yes", "--url", NOBODY, "--api-key-file", "/nowhere/x"),
            "--api-key-file /nowhere/x: No such file",
        ),
        (("clear", "--yes", "--url", NOBODY, "--cache-salt-file", "/dev/null"), "--cache-salt-file /dev/null: empty"),
        (("clear", "--yes", "--url", NOBODY, "--admin-key-file", "/dev/null"), "/dev/null: no key in it"),
        (("remove", "--url", NOBODY), "no prompts: name a file"),
        (("remove", "--url", NOBODY, "/nowhere/p"), "/nowhere/p: No such file"),
        (("pin", "--url", NOBODY, "--undo"), "--undo without prompts"),
        (("warm", "--url", NOBODY, "--model", "m", "x"), "--model with --url: the server has its own"),
        (("warm", "--url", NOBODY, "--no-canonical", "x"), "--no-canonical with --url: the server has its own"),
        (("warm", "--url", NOBODY, "--prefill-step-size", "9", "x"), "--prefill-step-size with --url: the server has"),
        (("warm", "--url", NOBODY, "--ssd-dir", "x", "x"), "--ssd-dir with --url: the server has its own"),
    ],
)
def test_what_can_not_be_meant_is_refused(call, words, told):
    done = call(*words)
    assert done.exit_code == 2
    assert told in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_line_that_is_no_object_is_named(call, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "x"}\n[1]\n')
    done = call("remove", "--url", NOBODY, file)
    assert (done.exit_code, f"{file}:2: no JSON object; write" in done.stderr) == (2, True)
    file.write_text('{\n  "messages": [\n    {"role": "user" "content": "x"}\n  ]\n}\n')
    done = call("remove", "--url", NOBODY, file)
    assert f"{file}:3: not JSON (Expecting ',' delimiter, column 21); write" in done.stderr


@pytest.mark.parametrize("words", [("inspect",), ("clear", "--yes"), ("prune", "--older-than", "1h"), ("reconcile",)])
def test_an_empty_name_and_an_address_are_no_directories(call, words):
    done = call(*words, "")  # such as "$DIR" that nobody has set
    assert done.exit_code == 2
    assert "it is empty; write the directory's path" in done.stderr
    done = call(*words, NOBODY)
    assert f"{NOBODY} is a server's address; write --url {NOBODY}" in done.stderr


@pytest.mark.parametrize("words", [("clear", "--yes"), ("prune", "--older-than", "1h"), ("pin",)])
def test_a_server_that_is_not_there_is_told(call, words):
    url = f"http://127.0.0.1:{free_port()}"
    done = call(*words, "--url", url)
    assert done.exit_code == 2
    assert f"{url}: " in done.stderr
    assert "refused; is the server up" in done.stderr
