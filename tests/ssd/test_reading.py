"""The disk is believed only when proved: what happens to files that are not what they should be."""

import errno
import json
import os
import shutil

import pytest

from prefixcache.ssd import Corrupt, Unreadable, reconcile
from tests.inside import directory_of, queue_of

from .images import chain, execute, flip, make, path_of


def instead(put):
    """A damage: what `put` makes stands in the file's place."""

    def damage(path, others):
        path.unlink()
        put(path, others)

    return damage


DAMAGES = {
    "a bit of a tensor": lambda path, others: flip(path, -100),
    "a bit of the header": lambda path, others: flip(path, 200),
    "a byte less": lambda path, others: os.truncate(path, path.stat().st_size - 1),
    "nothing left": lambda path, others: os.truncate(path, 0),
    "a byte more": lambda path, others: os.truncate(path, path.stat().st_size + 1),
    "another image": lambda path, others: shutil.copyfile(others[0], path),
    "a link": instead(lambda path, others: path.symlink_to(others[0])),
    "a pipe": instead(lambda path, others: os.mkfifo(path)),
    "a folder": instead(lambda path, others: path.mkdir()),
}


@pytest.mark.parametrize("what", DAMAGES)
def test_a_bad_file_is_quarantined_with_its_reason_and_refunded(open_tier, root, what):
    ssd = open_tier()
    bad, *good = ssd.put(*chain(3))
    path = path_of(root, bad)
    DAMAGES[what](path, [path_of(root, entry) for entry in good])
    with pytest.raises(Corrupt, match="quarantined") as raised:
        ssd.read(bad).result(10)
    assert raised.value.entry == bad
    assert not os.path.lexists(path)
    notes = list((root / "quarantine").glob("*.json"))
    assert json.loads(notes[0].read_text())["reason"] == raised.value.reason
    assert os.path.lexists(str(notes[0])[: -len(".json")])
    assert ssd.flush(10)
    ssd.check_integrity()
    assert {entry.key for entry in ssd.entries()} == {entry.key for entry in good}
    assert ssd.stats().corrupt == 1
    assert ssd.stats().quarantine_bytes > 0
    assert "tokens" not in notes[0].read_text()
    ssd.close()
    again = open_tier()
    again.check_integrity()


def test_tokens_that_went_bad_in_the_index_are_not_believed_and_nothing_is_lost(open_tier, root):
    ssd = open_tier()
    stored = ssd.put(*chain(2))
    ssd.close()
    execute(root, "UPDATE tokens SET tokens = zeroblob(1024) WHERE id = 1")
    again = open_tier()
    assert [(entry.key, entry.tokens) for entry in again.entries()] == [(entry.key, entry.tokens) for entry in stored]
    again.check_integrity()


def test_a_row_that_is_wrong_about_a_files_size_costs_a_miss_and_is_mended(open_tier, root):
    ssd = open_tier()
    (stored,) = ssd.put(make(1))
    ssd.close()
    execute(root, "UPDATE image SET nbytes = nbytes + 1")
    again = open_tier()
    (wrong,) = again.entries()
    assert isinstance(again.read(wrong).exception(10), Corrupt)
    assert again.flush(10)
    (right,) = again.entries()
    assert again.read(right).result(10).nbytes == stored.nbytes
    again.check_integrity()


@pytest.mark.parametrize(("field", "value"), [("checksum", "0" * 32), ("start", 512)])
def test_a_row_that_is_wrong_about_a_whole_file_is_mended_by_reconcile(open_tier, root, field, value):
    ssd = open_tier()
    (stored,) = ssd.put(make(1))
    ssd.close()
    execute(root, f"UPDATE image SET {field} = ?", value)
    ssd = open_tier()
    assert ssd.read(stored).result(10)
    ssd.close()
    assert reconcile(root, deep=True).counts == {"orphan": 1}
    assert reconcile(root, deep=True).clean
    (right,) = open_tier().entries()
    assert (right.start, right.checksum) == (stored.start, stored.checksum)


@pytest.mark.parametrize("wrong", [{"tokens": bytes(2048)}, {"parent": bytes(32)}, {"start": 512}])
def test_an_image_of_other_tokens_is_never_given_though_the_key_is_right(ssd, wrong):
    (stored,) = ssd.put(make(1))
    with pytest.raises(Corrupt, match="another image's"):
        ssd.read(stored._replace(**wrong)).result(10)


def test_a_missing_file_is_corrupt_and_its_row_goes(ssd, root):
    bad, good = ssd.put(*chain(2))
    path_of(root, bad).unlink()
    with pytest.raises(Corrupt, match="missing"):
        ssd.read(bad).result(10)
    ssd.flush(10)
    assert [entry.key for entry in ssd.entries()] == [good.key]
    ssd.check_integrity()


def test_what_was_quarantined_can_be_written_again(ssd, root):
    pair = make(1)
    (stored,) = ssd.put(pair)
    os.truncate(path_of(root, stored), stored.nbytes - 1)
    reads = [ssd.read(stored) for _ in range(6)]
    assert all(isinstance(read.exception(10), Corrupt) for read in reads)
    (again,) = ssd.put(pair)
    assert ssd.holds(again, pair[1])
    ssd.flush(10)
    ssd.check_integrity()
    assert ssd.stats().files == 1


def test_a_reader_that_comes_late_does_not_quarantine_the_new_file(ssd, root):
    pair = make(1)
    (stored,) = ssd.put(pair)
    before = os.stat(path_of(root, stored))
    ssd.delete([stored])
    ssd.flush(10)
    kept = os.open(root, os.O_RDONLY)  # so that the next file gets another inode more likely
    (root / "tmp" / "spacer").write_bytes(b"x")
    ssd.put(pair)
    (root / "tmp" / "spacer").unlink()
    os.close(kept)
    old = (before.st_dev, before.st_ino + 10**9)
    assert not directory_of(ssd).move_away(str(path_of(root, stored)), "late", old)
    queue_of(ssd).forget(stored)
    ssd.flush(10)
    assert ssd.holds(stored, pair[1])
    ssd.check_integrity()


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.ENFILE, errno.EACCES])
@pytest.mark.parametrize("call", ["open", "readv"])
def test_an_error_that_proves_nothing_leaves_the_file(ssd, root, monkeypatch, number, call):
    pair = make(1)
    (stored,) = ssd.put(pair)
    original = getattr(os, call)

    def failing(first, *rest, **more):
        if call == "readv" or str(first).endswith(".safetensors"):
            raise OSError(number, os.strerror(number))
        return original(first, *rest, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        with pytest.raises(Unreadable, match="try again"):
            ssd.read(stored).result(10)
    assert ssd.holds(stored, pair[1])
    assert ssd.stats().unreadable == 1
    ssd.check_integrity()


def test_short_reads_are_continued(ssd, monkeypatch):
    pair = make(1)
    (stored,) = ssd.put(pair)
    original = os.readv
    monkeypatch.setattr(os, "readv", lambda fd, buffers: original(fd, [buffers[0][:1000]]))
    assert ssd.holds(stored, pair[1])


def test_quarantine_keeps_to_its_share(open_tier, root):
    ssd = open_tier(limit=4 << 20)
    stored = ssd.put(*chain(20, size=30_000))
    for entry in stored:
        os.truncate(path_of(root, entry), entry.nbytes - 1)
        assert ssd.read(entry).exception(10)
    ssd.flush(10)
    assert ssd.stats().quarantine_bytes <= (4 << 20) // 20
    assert list((root / "quarantine").glob("*.json"))
    ssd.check_integrity()
