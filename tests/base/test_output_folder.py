"""Whether an output could be written is found without writing it."""

from __future__ import annotations

import errno
import os

import pytest

from ddpkit.base import cannot_write, require_writable
from ddpkit.errors import ConfigError
from tests.disks import fill, mounted


def test_a_read_only_disk_and_a_full_one_are_named(tmp_path):
    with (
        mounted(tmp_path / "read_only", "-t", "tmpfs", "-o", "ro,size=64k", "tmpfs") as folder,
        pytest.raises(ConfigError, match=f"x cannot be written: Read-only file system: '{folder}'"),
    ):
        require_writable("x", folder / "a" / "b")
    with mounted(tmp_path / "small", "-t", "tmpfs", "-o", "size=64k", "tmpfs") as folder:
        require_writable("x", folder / "a")
        fill(folder)
        with pytest.raises(
            ConfigError,
            match="x cannot be written: No space left on device.* Free some space",
        ):
            require_writable("x", folder / "a")


def test_nothing_is_made(tmp_path):
    require_writable("x", tmp_path / "new" / "deep")
    assert not (tmp_path / "new").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user's rights")
def test_another_users_folder_is_named(tmp_path):
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o755)
    for parent in (tmp_path, *list(tmp_path.parents)[:-2]):
        parent.chmod(0o755)
    os.seteuid(65534)
    try:
        with pytest.raises(
            ConfigError,
            match=f"x cannot be written: Permission denied: '{folder}'",
        ):
            require_writable("x", folder / "run")
    finally:
        os.seteuid(0)


def test_a_file_of_a_command_is_given_by_its_own_option():
    error = OSError(errno.ENOSPC, "No space left on device")
    said = str(cannot_write("--json='full/scale.json'", error))
    assert said.endswith("or give a folder on another disk, such as --json=/path/to/scale.json.")
