"""Checkpoints in a store: complete or not there, found whatever a listing says, and verified."""

from __future__ import annotations

import json
import threading
import uuid

import pytest

from ddpkit.checkpointing import ObjectFolder, verify
from ddpkit.checkpointing.object_index import INDEX, read_index
from ddpkit.errors import CheckpointError, ConfigError, FolderInUseError, ObjectStoreError
from ddpkit.object_store import Objects, StoreLock, repetition
from tests import faulty_store
from tests.s3_server import needs_s3
from tests.stored_checkpoints import make, step_of

STORES = ["memory", "file", pytest.param("s3", marks=needs_s3)]


@pytest.fixture
def place(request, tmp_path):
    """A URL and options of a store: of memory, or of what a test asks for."""
    kind = getattr(request, "param", "memory")
    if kind == "s3":
        server = request.getfixturevalue("s3")
        return server.folder(), server.options
    if kind == "file":
        return f"file://{tmp_path}/store", {}
    return f"memory://{uuid.uuid4().hex}/run", {}


@pytest.fixture
def folder(place):
    return ObjectFolder(*place)


@pytest.fixture
def objects(place):
    return Objects(*place)


@pytest.fixture
def disk(tmp_path):
    return tmp_path / "disk"


@pytest.fixture
def into(tmp_path):
    (tmp_path / "back").mkdir()
    return tmp_path / "back"


@pytest.mark.parametrize("place", STORES, indirect=True)
def test_a_checkpoint_comes_back_as_it_was(place, folder, disk, into):
    folder.put(make(disk, "CKPT+a", 1))
    folder.put(make(disk, "CKPT+b+c", 2))
    other = ObjectFolder(*place)
    assert other.names() == ["CKPT+a", "CKPT+b+c"]
    assert other.meta("CKPT+b+c") == {"unixtime": 1002.0, "step": 2}
    assert step_of(other.get("CKPT+a", into)) == 1
    assert [path.name for path in into.iterdir()] == ["CKPT+a"]
    assert other.verify("CKPT+a") == []


@pytest.mark.parametrize("place", STORES, indirect=True)
def test_a_checkpoint_that_replaces_one_leaves_nothing_of_it(place, folder, objects, disk, into):
    for step in (1, 2, 3):
        folder.put(make(disk, "CKPT+best", step))
        assert ObjectFolder(*place).names() == ["CKPT+best"]
        assert step_of(ObjectFolder(*place).get("CKPT+best", into)) == step
    assert len([name for name in objects.sizes() if name.endswith("manifest.json")]) == 1


@pytest.mark.parametrize("place", STORES, indirect=True)
def test_what_is_deleted_is_gone(place, folder, objects, disk):
    folder.put(make(disk, "CKPT+a", 1))
    folder.put(make(disk, "CKPT+b", 2))
    ObjectFolder(*place).delete("CKPT+a")
    assert folder.names() == ["CKPT+b"]
    folder.delete("CKPT+a")
    folder.delete("CKPT+never")
    assert not [name for name in objects.sizes() if name.startswith("CKPT+a")]
    with pytest.raises(CheckpointError, match=r"has no checkpoint CKPT\+a\."):
        folder.meta("CKPT+a")


@pytest.mark.parametrize("place", STORES, indirect=True)
def test_other_files_come_back(place, folder, tmp_path):
    (tmp_path / "log.txt").write_text("one line\n")
    folder.put_file(tmp_path / "log.txt", "logs/log.txt")
    assert folder.has("logs/log.txt")
    assert not folder.has("logs/other.txt")
    assert folder.files() == {"logs/log.txt": 9}
    folder.get_file("logs/log.txt", tmp_path / "again.txt")
    assert (tmp_path / "again.txt").read_text() == "one line\n"
    with pytest.raises(FileNotFoundError, match=r"has no file logs/other\.txt"):
        folder.get_file("logs/other.txt", tmp_path / "other.txt")
    assert not (tmp_path / "other.txt").exists()


@pytest.mark.parametrize("place", STORES, indirect=True)
def test_one_run_at_a_time(place, folder, objects, disk):
    lock = StoreLock(place[0], storage_options=place[1])
    with lock.hold():
        assert lock.excludes
        folder.put(make(disk, "CKPT+a", 1), lock.require)
        folder.clean(lock)
    assert [name for name in objects.sizes() if name.startswith(".lock")] == []


def test_a_checkpoint_is_not_there_before_its_manifest(place, folder, objects, disk, into):
    folder.put(make(disk, "CKPT+best", 1))

    def look():
        other = ObjectFolder(*place)
        assert other.names() == ["CKPT+best"]
        assert step_of(other.get("CKPT+best", into)) == 1
        raise FolderInUseError("lost")

    with pytest.raises(FolderInUseError, match="lost"):
        folder.put(make(disk, "CKPT+best", 2), look)
    assert step_of(folder.get("CKPT+best", into)) == 1
    folder.put(make(disk, "CKPT+other", 3))
    assert {name.partition("/")[0] for name in objects.sizes()} == {
        "CKPT+best",
        "CKPT+other",
        INDEX.name,
    }


def test_a_name_that_looks_like_a_version_is_a_name(place, folder, disk, into):
    folder.put(make(disk, "CKPT+a", 1))
    folder.put(make(disk, "CKPT+a@2", 2))
    folder.put(make(disk, "CKPT+a", 3))
    other = ObjectFolder(*place)
    assert other.names() == ["CKPT+a", "CKPT+a@2"]
    assert [step_of(other.get(name, into)) for name in other.names()] == [3, 2]


def test_what_is_copied_there_by_hand_is_found(folder, objects, disk, into):
    path = make(disk, "CKPT+copied", 4)
    for file in path.rglob("*"):
        if file.is_file():
            objects.write(file.relative_to(disk).as_posix(), file.read_bytes())
    assert folder.names() == ["CKPT+copied"]
    assert step_of(folder.get("CKPT+copied", into)) == 4


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda data: data[:-1], r"model\.ckpt has .* bytes instead of"),
        (lambda data: data[:-1] + b"?", r"model\.ckpt fails its checksum"),
        (None, r"model\.ckpt is missing"),
    ],
)
def test_damage_is_told_and_nothing_is_left_on_the_disk(
    folder, objects, disk, into, damage, reason
):
    folder.put(make(disk, "CKPT+a", 1))
    name = "CKPT+a/model.ckpt"
    if damage is None:
        objects.delete(name)
    else:
        objects.write(name, damage(objects.read(name)))
    with pytest.raises(CheckpointError, match=rf"CKPT\+a in .* is damaged: {reason}"):
        folder.get("CKPT+a", into)
    assert list(into.iterdir()) == []
    assert [reason] != folder.verify("CKPT+a") != []
    assert folder.meta("CKPT+a")["step"] == 1


def test_a_manifest_that_lies_is_damage(folder, objects, disk, into):
    folder.put(make(disk, "CKPT+a", 1))
    manifest = json.loads(objects.read("CKPT+a/manifest.json"))
    manifest["files"]["../../escaped"] = {"size": 1, "sha256": ""}
    objects.write("CKPT+a/manifest.json", json.dumps(manifest).encode())
    with pytest.raises(CheckpointError, match="is damaged: manifest.json fails its checksum"):
        folder.get("CKPT+a", into)
    objects.write("CKPT+a/manifest.json", b"x" * (17 << 20))
    with pytest.raises(CheckpointError, match=r"manifest\.json has .* bytes; at most"):
        folder.meta("CKPT+a")


def test_a_meta_that_was_changed_is_damage(folder, objects, disk):
    folder.put(make(disk, "CKPT+a", 1))
    objects.write("CKPT+a/CKPT.yaml", b"unixtime: 5\n")
    with pytest.raises(CheckpointError, match=r"CKPT\.yaml fails its checksum"):
        folder.meta("CKPT+a")


def test_what_is_no_checkpoint_is_not_copied(folder, objects, disk, tmp_path):
    path = make(disk, "CKPT+a", 1)
    (path / "model.ckpt").write_bytes(b"1")
    with pytest.raises(CheckpointError, match=r"cannot be copied to .*model\.ckpt has 1 bytes"):
        folder.put(path)
    with pytest.raises(CheckpointError, match="it has another name"):
        folder.put(tmp_path)
    with pytest.raises(ConfigError, match="the modes are"):
        folder.verify("CKPT+a", "some")
    assert objects.sizes() == {}


def test_a_checkpoint_that_is_replaced_while_it_is_read(place, folder, disk, into, monkeypatch):
    folder.put(make(disk, "CKPT+best", 1))
    reader = ObjectFolder(*place)
    real = Objects.read_range
    replaced = threading.Event()

    def read_range(self, name, start, end):
        if not replaced.is_set():
            replaced.set()
            folder.put(make(disk, "CKPT+best", 2))
        return real(self, name, start, end)

    monkeypatch.setattr(Objects, "read_range", read_range)
    monkeypatch.setattr("ddpkit.checkpointing.object_transfer.PIECES_AT_ONCE", 1)
    assert step_of(reader.get("CKPT+best", into)) == 2


def test_clean_leaves_what_is_whole_and_an_upload_that_is_going_on(
    place, folder, objects, disk, into
):
    for file in ("CKPT+dead/model.ckpt", "CKPT+best@7/model.ckpt", "notes/CKPT.txt"):
        objects.write(file, b"1")
    lock = StoreLock(place[0])
    with pytest.raises(CheckpointError, match="is not held"):
        folder.clean(lock)
    with lock.hold():
        folder.put(make(disk, "CKPT+best", 1), lambda: folder.clean(lock))
        folder.clean(lock)
    kept = {name.partition("/")[0] for name in objects.sizes()}
    assert kept == {"CKPT+best@8", "notes", INDEX.name}
    assert folder.names() == ["CKPT+best"]
    assert step_of(folder.get("CKPT+best", into)) == 1


def test_what_a_run_that_has_lost_the_lock_still_sends_harms_nothing(
    place, folder, objects, disk, into, monkeypatch
):
    lock = StoreLock(place[0])
    real = Objects.send
    taken = threading.Event()

    def send(self, path, name):
        if not taken.is_set():  # this file is on its way when the lock is taken over
            taken.set()
            record = json.loads(objects.read(".lock"))
            objects.write(".lock", json.dumps({**record, "token": "f" * 32}).encode())
            self.write("CKPT+best@1-ffffffff/notes", b"of the new run")
        real(self, path, name)

    monkeypatch.setattr("ddpkit.checkpointing.object_transfer.FILES_AT_ONCE", 1)
    lock.acquire()
    folder.put(make(disk, "CKPT+best", 1), lock=lock)
    monkeypatch.setattr(Objects, "send", send)
    with pytest.raises(FolderInUseError, match="is no longer locked by this run"):
        folder.put(make(disk, "CKPT+best", 2), lock=lock)
    own = [name for name in objects.sizes() if name.startswith("CKPT+best@1")]
    assert len(own) == 2  # the one that was on its way, and the other run's
    assert {name.partition("/")[0] for name in own} > {"CKPT+best@1-ffffffff"}
    index = objects.read(INDEX.name)
    with pytest.raises(FolderInUseError, match="is no longer locked by this run"):
        folder.put(make(disk, "CKPT+best", 3), lock=lock)
    assert objects.read(INDEX.name) == index
    assert step_of(ObjectFolder(*place).get("CKPT+best", into)) == 1
    lock.release()


# ------------------------------------------------------------------------ stores that misbehave


def test_a_file_that_a_run_sends_after_the_takeover_lands_in_no_checkpoint(folder, objects, disk):
    directory = make(disk, "CKPT+best", step=1)
    INDEX.write(objects, {"CKPT+best"})  # of the run that is about to lose the lock
    with StoreLock(folder.url).hold():
        lock = StoreLock(folder.url)
        lock.acquire()
        folder.clean(lock)
        folder.put(directory, lock=lock)
        objects.write("CKPT+best/CKPT.yaml", b"old")  # it was on its way
        lock.release()
    assert folder.names() == ["CKPT+best"]
    assert folder.verify("CKPT+best", "full") == []


@pytest.fixture
def faulty(monkeypatch):
    faulty_store.register()
    monkeypatch.setattr(repetition, "FIRST_PAUSE_SECONDS", 0.001)
    yield f"faulty://{uuid.uuid4().hex}/run"
    faulty_store.reset()


def go_through(url, disk, into):
    """What a run does: lock, save, replace, delete, resume."""
    folder = ObjectFolder(url)
    lock = StoreLock(url)
    with lock.hold():
        folder.clean(lock)
        for step in (1, 2, 3):
            folder.put(make(disk, f"CKPT+{step}", step), lock.require)
            folder.put(make(disk, "CKPT+best", step), lock.require)
        folder.delete("CKPT+1")
        found = ObjectFolder(url)
        assert found.names() == folder.names() == ["CKPT+2", "CKPT+3", "CKPT+best"]
        steps = [step_of(found.get(name, into)) for name in found.names()]
        assert steps == [2, 3, 3]
        assert [found.meta(name)["step"] for name in found.names()] == steps
    assert not ObjectFolder(url).has(".lock")


@pytest.mark.costly
@pytest.mark.parametrize("every", [2, 3, 7])
@pytest.mark.parametrize("after", [False, True], ids=["not done", "done, the answer lost"])
def test_a_store_that_fails_every_few_calls(faulty, disk, into, every, after, caplog):
    faults = faulty_store.reset(every=every, after=after)
    go_through(faulty, disk, into)
    assert faults.calls > 60
    assert "(attempt 1 of 6, again in 0.0 s): OSError: [Errno 16] Reduce your" in caplog.text


def test_a_store_that_always_fails_is_an_error_with_its_words(faulty, caplog):
    faults = faulty_store.reset(every=1)
    with pytest.raises(ObjectStoreError, match=r"faulty://.*: cannot create \.lock: OSError.*Redu"):
        StoreLock(faulty).acquire()
    assert faults.calls == repetition.ATTEMPTS
    assert "attempt 5 of 6" in caplog.text


def test_a_slow_store_is_waited_for(faulty, disk, into):
    faulty_store.reset(seconds=0.01)
    go_through(faulty, disk, into)


def test_a_store_that_lists_late_hides_nothing_and_brings_nothing_back(faulty, disk, into):
    faulty_store.reset(late=True)
    go_through(faulty, disk, into)
    faulty_store.FaultyFileSystem().catch_up()
    folder = ObjectFolder(faulty)
    folder.delete("CKPT+3")
    assert ObjectFolder(faulty).names() == ["CKPT+2", "CKPT+best"]
    folder.put(make(disk, "CKPT+4", 4))
    assert ObjectFolder(faulty).names() == ["CKPT+2", "CKPT+4", "CKPT+best"]


def test_reads_that_are_short_are_made_again(faulty, disk, into):
    faulty_store.reset(short=True)
    go_through(faulty, disk, into)


def test_a_read_that_is_damaged_once_is_made_again(faulty, disk, into):
    faulty_store.reset()
    folder = ObjectFolder(faulty)
    folder.put(make(disk, "CKPT+a", 1))
    faulty_store.reset(damaged=1)
    assert step_of(folder.get("CKPT+a", into)) == 1
    faulty_store.reset(damaged=100)
    with pytest.raises(CheckpointError, match="fails its checksum"):
        folder.get("CKPT+a", into)
    assert verify(into / "CKPT+a") == []


@pytest.mark.parametrize("bad", ["CKPT+a/../../evil", "CKPT+a\\b", "CKPT+a\0b", "..", "."])
def test_an_index_that_names_other_folders_leads_nowhere(folder, objects, disk, bad, caplog):
    folder.put(make(disk, "CKPT+a", 1))
    objects.write(INDEX.name, json.dumps({"format": 1, "checkpoints": ["CKPT+a", bad]}).encode())
    assert read_index(objects) == {"CKPT+a"}
    assert f"names {bad!r}, which is no folder of a checkpoint" in caplog.text


@pytest.mark.parametrize("bad", ["CKPT+a/../../evil", "../CKPT+a", "CKPT+a\\b", "..", ""])
def test_a_name_is_one_part_of_a_path(folder, objects, disk, into, bad):
    folder.put(make(disk, "CKPT+a", 1))
    folder._folders[bad] = "CKPT+a"  # as an index of somebody else had it
    with pytest.raises(CheckpointError, match="is no name of a checkpoint"):
        folder.get(bad, into)
    with pytest.raises(CheckpointError, match="is no name of a checkpoint"):
        folder.delete(bad)
    assert list(into.iterdir()) == []
    assert sorted(path.name for path in into.parent.iterdir()) == ["back", "disk"]
    assert folder.names() == ["CKPT+a"]
