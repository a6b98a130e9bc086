"""`prefixcache serve` with its directory on a disk that is not there yet: RAM answers until it comes."""

from tests.servers.serving import ask, save_model, serve, serving, starting, user, wait_for


def test_a_server_begins_without_its_disk_and_goes_on_with_it(tmp_path):
    model, disk = save_model(tmp_path / "model"), tmp_path / "disk"
    prompt, later = user("The first question. " * 60), user("Another question. " * 60)
    (tmp_path / "plugged").mkdir()
    with serving(tmp_path / "with.log", "--model", model, "--ssd-dir", tmp_path / "plugged" / "ssd") as server:
        assert ask(server, prompt).cached == 0
    log = tmp_path / "without.log"
    flags = ["--model", model, "--ssd-dir", disk / "ssd", "--ram", "200MB", "--codec", "raw"]
    with starting(serve, log, *flags) as server:
        server.ready()
        assert ask(server, later).cached == 0
        assert ask(server, later).computed == 1
        assert "RAM only until then" in server.said()
        assert not disk.exists()
        (tmp_path / "plugged").rename(disk)
        wait_for(lambda: "its disk is there, and in use" in server.said(), "the disk to be used", log)
        assert ask(server, prompt).computed == 1
        assert server.end() == 0
    assert log.read_text().count("RAM only until then") == 1
    with serving(tmp_path / "again.log", "--model", model, "--ssd-dir", disk / "ssd") as server:
        assert ask(server, prompt).computed == 1
        assert ask(server, later).computed == 1
