"""Limits of control groups, in trees that look like those of services and containers."""

from pathlib import Path

import pytest

from engine.control_groups import cpu_quota, memory_room

V2 = "31 23 0:28 {root} /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw"
V1 = "32 31 0:29 {root} /sys/fs/cgroup/{name} rw,relatime - cgroup cgroup rw,{name}"
NO_LIMIT = 9223372036854771712
SERVICE = "sys/fs/cgroup/system.slice/kvbatch.service"


def write(root: Path, folder: str, **files: object) -> None:
    for name, text in files.items():
        file = root / folder / name.replace("__", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")


def system(root: Path, cgroup: str, *mounts: str) -> None:
    write(root, "proc/self", cgroup=cgroup, mountinfo="\n".join(mounts))


def limited(root: Path, folder: str, limit: object, usage: int, reclaimable: int = 0, high: object = "max"):
    stat = f"anon 5\ninactive_file {reclaimable}"
    write(root, folder, memory__max=limit, memory__high=high, memory__current=usage, memory__stat=stat)


def limited_v1(root: Path, folder: str, limit: int, usage: int, reclaimable: int = 0):
    stat = f"inactive_file 1\ntotal_inactive_file {reclaimable}"
    files = {"memory__limit_in_bytes": limit, "memory__usage_in_bytes": usage, "memory__stat": stat}
    write(root, folder, **files)


def test_nothing_limits_where_there_are_no_groups(tmp_path):
    assert memory_room(tmp_path) is None and cpu_quota(tmp_path) is None


@pytest.mark.parametrize("mounts", [[V2.format(root="/")], []], ids=["mountinfo", "no mountinfo"])
def test_a_service_has_the_least_room_of_its_group_and_those_above(tmp_path, mounts):
    system(tmp_path, "0::/system.slice/kvbatch.service", *mounts)
    limited(tmp_path, SERVICE, 1000, 900, 600)
    assert memory_room(tmp_path) == 700, "files that were read do not count as used"
    limited(tmp_path, SERVICE, 1000, 900, 600, high=800)
    assert memory_room(tmp_path) == 500, "beyond memory.high the kernel slows a group down"
    limited(tmp_path, "sys/fs/cgroup/system.slice", 5000, 4900, 100)
    assert memory_room(tmp_path) == 200, "a neighbour's memory is used as well"
    limited(tmp_path, "sys/fs/cgroup/system.slice", "max", 4900)
    limited(tmp_path, SERVICE, "max", 900)
    assert memory_room(tmp_path) is None


@pytest.mark.parametrize(
    ("path", "root", "folder"),
    [
        ("/", "/", "sys/fs/cgroup"),  # a namespace of its own
        ("/docker/abc", "/docker/abc", "sys/fs/cgroup"),  # the host's name, its own group mounted
        ("/docker/abc/inner", "/docker/abc", "sys/fs/cgroup/inner"),
        ("/docker/abc", "/", "sys/fs/cgroup"),  # the host's name and nothing below that has it
        ("/../other", "/", "sys/fs/cgroup"),  # moved out of the namespace
        ("/docker/abc", "/docker/other", "sys/fs/cgroup"),
    ],
)
def test_a_container_sees_its_limits_whatever_its_group_is_called(tmp_path, path, root, folder):
    system(tmp_path, f"0::{path}", V2.format(root=root))
    limited(tmp_path, folder, 700, 200)
    write(tmp_path, folder, cpu__max="150000 100000")
    assert memory_room(tmp_path) == 500 and cpu_quota(tmp_path) == 1.5


def test_version_1_and_a_hybrid(tmp_path):
    system(
        tmp_path,
        "4:memory:/jobs/one\n3:cpu,cpuacct:/jobs/one\n1:name=systemd:/\n0::/user.slice",
        V1.format(root="/", name="memory"),
        V1.format(root="/", name="cpu,cpuacct"),
        V2.format(root="/").replace("/sys/fs/cgroup", "/sys/fs/cgroup/unified"),
    )
    limited_v1(tmp_path, "sys/fs/cgroup/memory/jobs/one", NO_LIMIT, 500)
    limited_v1(tmp_path, "sys/fs/cgroup/memory/jobs", 2000, 1500, 800)
    limited(tmp_path, "sys/fs/cgroup/unified/user.slice", "max", 1)
    cpu = "sys/fs/cgroup/cpu,cpuacct/jobs"
    write(tmp_path, f"{cpu}/one", cpu__cfs_quota_us=-1, cpu__cfs_period_us=100000)
    write(tmp_path, cpu, cpu__cfs_quota_us=250000, cpu__cfs_period_us=100000)
    assert memory_room(tmp_path) == 1300 and cpu_quota(tmp_path) == 2.5


def test_files_that_make_no_sense_limit_nothing(tmp_path):
    system(tmp_path, "0\n:\n0::/x", "31 23", " - ", V2.format(root="/"))
    write(tmp_path, "sys/fs/cgroup/x", memory__max="", cpu__max="100000", memory__stat="inactive_file\n\n")
    assert memory_room(tmp_path) is None and cpu_quota(tmp_path) is None
    write(tmp_path, "sys/fs/cgroup/x", memory__max="100", cpu__max="max 100000")
    assert memory_room(tmp_path) == 100 and cpu_quota(tmp_path) is None
