"""Threads within what the process may use of the CPUs."""

import os

import pytest

from kvbatch.model.threads import choose_threads


@pytest.mark.parametrize(
    ("quota", "wanted", "available", "count", "reason"),
    [
        ("max 100000", None, 6, 6, "one for each CPU"),
        ("max 100000", None, 2, 2, "torch's own choice"),
        ("100000 100000", None, 6, 1, "a CPU quota of 1, of 6 CPUs"),
        ("50000 100000", None, 6, 1, "a CPU quota of 0.5, of 6 CPUs"),
        ("250000 100000", None, 6, 3, "a CPU quota of 2.5, of 6 CPUs"),
        ("1000000 100000", None, 6, 6, "one for each CPU"),
        ("100000 100000", 4, 6, 4, "engine.threads"),
    ],
)
def test_no_more_than_the_quota_pays_for(tmp_path, monkeypatch, quota, wanted, available, count, reason):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)), raising=False)
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text(quota)
    found = choose_threads(wanted, available, tmp_path)
    assert (found.count, found.reason) == (count, reason)


def test_no_more_than_the_cpus_of_this_process(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3}, raising=False)
    assert choose_threads(None, 8, tmp_path).count == 1
